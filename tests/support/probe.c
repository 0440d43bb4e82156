/* What a container sees, told by a static program: works in an image that holds nothing else.
 *
 *   /probe COMMAND ARGUMENT... [-- COMMAND ARGUMENT...]...
 *
 * One line per answer, "COMMAND PATH ANSWER".  An errno is answered by its name.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

static const char *answer(int failed) { return failed ? strerrorname_np(errno) : "ok"; }

static void open_one(const char *path) {
    int fd = open(path, O_RDWR | O_NONBLOCK);
    printf("open %s %s\n", path, answer(fd < 0));
    if (fd >= 0)
        close(fd);
}

static void create_one(const char *path) {
    int fd = open(path, O_WRONLY | O_CREAT, 0600);
    printf("create %s %s\n", path, answer(fd < 0));
    if (fd >= 0)
        close(fd);
}

static void stat_one(const char *path) {
    struct stat st;
    if (lstat(path, &st) != 0)
        printf("stat %s %s\n", path, strerrorname_np(errno));
    else if (S_ISCHR(st.st_mode))
        printf("stat %s c %u:%u %04o %u:%u\n", path, major(st.st_rdev), minor(st.st_rdev), st.st_mode & 07777,
               st.st_uid, st.st_gid);
    else
        printf("stat %s %s %lld %04o %u:%u\n", path,
               S_ISDIR(st.st_mode) ? "d" : S_ISLNK(st.st_mode) ? "l" : S_ISSOCK(st.st_mode) ? "s" : "-",
               (long long)st.st_size, st.st_mode & 07777, st.st_uid, st.st_gid);
}

static void list_one(const char *path) {
    struct dirent **names;
    int count = scandir(path, &names, NULL, alphasort);
    printf("list %s", path);
    if (count < 0)
        printf(" %s", strerrorname_np(errno));
    for (int i = 0; i < count; i++)
        if (strcmp(names[i]->d_name, ".") != 0 && strcmp(names[i]->d_name, "..") != 0)
            printf(" %s", names[i]->d_name);
    printf("\n");
}

static void read_one(const char *path) {
    char line[4096];
    FILE *file = fopen(path, "r");
    if (!file) {
        printf("read %s %s\n", path, strerrorname_np(errno));
        return;
    }
    while (fgets(line, sizeof line, file))
        printf("read %s %s%s", path, line, strchr(line, '\n') ? "" : "\n");
    fclose(file);
}

static void leave(int signal_number) {
    (void)signal_number;
    _exit(0);
}

/* Stay until a signal comes. */
static void pause_until_told(void) {
    signal(SIGTERM, leave);
    signal(SIGINT, leave);
    fflush(stdout);
    for (;;)
        pause();
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *command = argv[i++];
        if (strcmp(command, "pause") == 0)
            pause_until_told();
        if (strcmp(command, "mknod") == 0 && i + 2 < argc) {
            dev_t device = makedev(atoi(argv[i + 1]), atoi(argv[i + 2]));
            printf("mknod %s %s\n", argv[i], answer(mknod(argv[i], S_IFCHR | 0666, device) != 0));
            i += 3;
        }
        for (; i < argc && strcmp(argv[i], "--") != 0; i++) {
            if (strcmp(command, "open") == 0)
                open_one(argv[i]);
            else if (strcmp(command, "create") == 0)
                create_one(argv[i]);
            else if (strcmp(command, "stat") == 0)
                stat_one(argv[i]);
            else if (strcmp(command, "list") == 0)
                list_one(argv[i]);
            else if (strcmp(command, "read") == 0)
                read_one(argv[i]);
            else {
                fprintf(stderr, "probe: unknown command %s\n", command);
                return 2;
            }
        }
    }
    return 0;
}
