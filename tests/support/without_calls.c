/* Runs a program on a kernel that lacks system calls, as older ones do, or behind a filter that refuses them.
 *
 *   without_calls before-5.2|refused PROGRAM [ARGUMENT]...
 *
 * before-5.2: every call that is younger than Linux 5.1 is unknown (ENOSYS).  refused: openat2 and the mount calls of
 * Linux 5.2, 5.12 and 6.15 are not permitted (EPERM), as old lists of container engines do it.  Needs CAP_SYS_ADMIN.
 */
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define IF_EQUAL(value, yes, no) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, yes, no)
#define IF_FROM(value, yes, no) BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, value, yes, no)
#define RETURN(value) BPF_STMT(BPF_RET | BPF_K, value)

int main(int argc, char **argv) {
    /* 428 to 433: open_tree, move_mount, fsopen, fsconfig, fsmount, fspick; the numbers are those of all machines */
    struct sock_filter before[] = {LOAD(nr), IF_FROM(428, 0, 1), RETURN(SECCOMP_RET_ERRNO | ENOSYS),
                                   RETURN(SECCOMP_RET_ALLOW)};
    struct sock_filter refused[] = {
        LOAD(nr),
        IF_EQUAL(437 /* openat2 */, 4, 0),
        IF_EQUAL(442 /* mount_setattr */, 3, 0),
        IF_EQUAL(467 /* open_tree_attr */, 2, 0),
        IF_FROM(428, 0, 2),
        IF_FROM(434, 1, 0),
        RETURN(SECCOMP_RET_ERRNO | EPERM),
        RETURN(SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof before / sizeof *before, before};
    if (argc < 3)
        return 2;
    if (strcmp(argv[1], "refused") == 0) {
        program.len = sizeof refused / sizeof *refused;
        program.filter = refused;
    }
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
        perror("without_calls: seccomp");
        return 126;
    }
    execvp(argv[2], argv + 2);
    perror(argv[2]);
    return 127;
}
