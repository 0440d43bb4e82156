/* Run in the place of ldconfig: says what the sandbox lets it do.  Static, so that it needs nothing of the image. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

extern char **environ;

static FILE *out;

static void said(const char *what, long result) {
	fprintf(out, "%s=%s\n", what, result < 0 ? strerrorname_np(errno) : "ok");
}

static int entries(const char *path) {
	DIR *directory = opendir(path);
	int count = 0;
	if (!directory)
		return -1;
	while (readdir(directory))
		count++;
	closedir(directory);
	return count - 2;
}

int main(int argc, char **argv) {
	struct rlimit limit;
	int open_fds = 0;

	out = fopen("/etc/ld.so.cache", "w");
	if (!out)
		return 3;
	if (argc > 6 && !strcmp(argv[6], "/sleep")) {
		syscall(SYS_futex, &open_fds, 0 /* FUTEX_WAIT */, 0, NULL, NULL, 0);
		return 4;
	}
	if (argc > 6 && !strcmp(argv[6], "/talk")) {
		for (int line = 0; line < 20000; line++)
			fprintf(stderr, "line %d\033[31m\n", line);
		return 5;
	}
	for (int at = 0; at < argc; at++)
		fprintf(out, "argv%d=%s\n", at, argv[at]);
	fprintf(out, "environment=%s\n", environ[0] ? environ[0] : "");
	fprintf(out, "pid=%d\nuid=%d\neuid=%d\ngid=%d\n", getpid(), getuid(), geteuid(), getgid());
	for (int fd = 3; fd < 64; fd++)
		if (fd != fileno(out) && fcntl(fd, F_GETFD) >= 0)
			open_fds++;
	fprintf(out, "other_fds=%d\n", open_fds);
	fprintf(out, "proc=%d\nsys=%d\ndev=%d\n", entries("/proc"), entries("/sys"), entries("/dev"));
	fprintf(out, "dev_fd=%d\n", entries("/dev/fd"));
	said("own_name", access("/dev/fd/3", F_OK)); /* TOMOYO looks for it */
	fprintf(out, "parent_is_root=%d\n", entries("/..") == entries("/"));
	said("read_marker", open(argv[6], O_RDONLY));
	said("write_dev", open("/dev/x", O_WRONLY | O_CREAT, 0644));
	said("write_foreign", open("/foreign", O_WRONLY | O_APPEND));
	if (!access("/vol", F_OK)) {
		said("write_volume", open("/vol/file", O_WRONLY | O_CREAT, 0666));
		said("write_volume_below", open("/vol/below/file", O_WRONLY | O_CREAT, 0666));
		said("write_root", open("/written", O_WRONLY | O_CREAT, 0666));
	}
	said("device", open("/null", O_RDONLY));
	said("socket", socket(AF_INET, SOCK_STREAM, 0));
	said("mount", mount("none", "/etc", "tmpfs", 0, NULL));
	said("fork", syscall(SYS_clone, 0, 0, 0, 0, 0));
	said("chroot", chroot("/etc"));
	said("setuid", syscall(SYS_setuid, 0));
	said("ptrace", ptrace(PTRACE_TRACEME, 0, 0, 0));
	said("read_stdin", read(0, &open_fds, 1) == 0 ? 0 : -1);
	getrlimit(RLIMIT_FSIZE, &limit);
	fprintf(out, "fsize=%lu\n", (unsigned long)limit.rlim_cur);
	return 0;
}
