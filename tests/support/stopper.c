/* stopper LOG CLASS DEPTH NUMBER ERRNO PROGRAM [ARGUMENT]...
 *
 * Runs a program and interferes with one system call of it, or of a process it forks: of all calls of a class that
 * processes of a depth make (0: the program, 1: its children, ...), the NUMBERth is not made.  ERRNO 0: the process is
 * killed instead; else the call fails with that error; below 0: the call is made, and the process gets that signal.
 * NUMBER 0: nothing is done, LOG gets a line "DEPTH CALL" for each call of the class.
 *
 * CLASS change: calls that change something others can see.  CLASS open: calls that need a new descriptor.
 * Shells, our stubs and Python are followed; a process that executes another program is left alone from then on.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#define OPTIONS (PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACEFORK | PTRACE_O_TRACEVFORK | PTRACE_O_TRACECLONE | PTRACE_O_TRACEEXEC)
#define MOST 4096

struct call {
	long number;
	const char *name;
	char change, open;
};

static const struct call calls[] = {
	{SYS_openat, "openat", 1, 1}, /* change: only where it writes */
	{SYS_openat2, "openat2", 0, 1},
	{SYS_write, "write", 1, 0},
	{SYS_pwrite64, "pwrite64", 1, 0},
	{SYS_ftruncate, "ftruncate", 1, 0},
	{SYS_renameat, "renameat", 1, 0},
	{SYS_renameat2, "renameat2", 1, 0},
	{SYS_linkat, "linkat", 1, 0},
	{SYS_symlinkat, "symlinkat", 1, 0},
	{SYS_unlinkat, "unlinkat", 1, 0},
	{SYS_mkdirat, "mkdirat", 1, 0},
	{SYS_mknodat, "mknodat", 1, 0},
	{SYS_fchmod, "fchmod", 1, 0},
	{SYS_fchmodat, "fchmodat", 1, 0},
	{SYS_fchown, "fchown", 1, 0},
	{SYS_fchownat, "fchownat", 1, 0},
	{SYS_utimensat, "utimensat", 1, 0},
	{SYS_clone, "clone", 1, 0},
#ifdef SYS_fork
	{SYS_open, "open", 1, 1},
	{SYS_fork, "fork", 1, 0},
	{SYS_vfork, "vfork", 1, 0},
	{SYS_rename, "rename", 1, 0},
	{SYS_link, "link", 1, 0},
	{SYS_symlink, "symlink", 1, 0},
	{SYS_unlink, "unlink", 1, 0},
	{SYS_mkdir, "mkdir", 1, 0},
	{SYS_rmdir, "rmdir", 1, 0},
	{SYS_mknod, "mknod", 1, 0},
	{SYS_chmod, "chmod", 1, 0},
#endif
	{SYS_execve, "execve", 1, 0},
	{SYS_mount, "mount", 1, 0},
	{SYS_umount2, "umount2", 1, 0},
	{SYS_setns, "setns", 1, 0},
	{SYS_unshare, "unshare", 1, 0},
	{SYS_bpf, "bpf", 1, 1},
	{SYS_memfd_create, "memfd_create", 1, 1},
	{SYS_pipe2, "pipe2", 0, 1},
	{SYS_dup, "dup", 0, 1},
	{428, "open_tree", 1, 1},
	{429, "move_mount", 1, 0},
	{430, "fsopen", 1, 1},
	{431, "fsconfig", 1, 0},
	{432, "fsmount", 1, 1},
	{434, "pidfd_open", 0, 1},
	{438, "pidfd_getfd", 0, 1},
	{442, "mount_setattr", 1, 0},
};

static struct process {
	pid_t pid;
	int depth;
	int new;   /* its first stop is to come */
	int fail;  /* the call it is in fails at its end */
} processes[MOST];
static int process_count;

static struct process *find(pid_t pid)
{
	for (int i = 0; i < process_count; i++)
		if (processes[i].pid == pid)
			return &processes[i];
	if (process_count == MOST)
		exit(125);
	processes[process_count] = (struct process){pid, -1, 1, 0};
	return &processes[process_count++];
}

/* The parent may have been killed since it forked: then it is not asked, and its child is of no depth that counts. */
static int depth_of_parent(pid_t pid)
{
	char path[64], line[256];
	int parent = 0;
	snprintf(path, sizeof path, "/proc/%d/status", pid);
	FILE *file = fopen(path, "r");
	while (file && fgets(line, sizeof line, file))
		if (sscanf(line, "PPid: %d", &parent) == 1)
			break;
	if (file)
		fclose(file);
	for (int i = 0; i < process_count; i++)
		if (processes[i].pid == parent)
			return processes[i].depth;
	return 99;
}

static void forget(struct process *process)
{
	*process = processes[--process_count];
}

static const struct call *of_class(int open_class, const struct __ptrace_syscall_info *info)
{
	for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
		const struct call *call = &calls[i];
		if (call->number != (long)info->entry.nr)
			continue;
		if (open_class)
			return call->open ? call : 0;
		int flags = call->number == SYS_openat ? (int)info->entry.args[2] : O_WRONLY;
#ifdef SYS_fork
		if (call->number == SYS_open)
			flags = (int)info->entry.args[1];
#endif
		return call->change && (flags & (O_WRONLY | O_RDWR | O_CREAT)) ? call : 0;
	}
	return 0;
}

static void drop_call(pid_t pid)
{
#if defined(__x86_64__)
	ptrace(PTRACE_POKEUSER, pid, offsetof(struct user_regs_struct, orig_rax), -1L);
#else
	int none = -1;
	struct iovec vector = {&none, sizeof none};
	ptrace(PTRACE_SETREGSET, pid, NT_ARM_SYSTEM_CALL, &vector);
#endif
}

static void set_result(pid_t pid, long result)
{
#if defined(__x86_64__)
	ptrace(PTRACE_POKEUSER, pid, offsetof(struct user_regs_struct, rax), result);
#else
	struct user_regs_struct registers;
	struct iovec vector = {&registers, sizeof registers};
	ptrace(PTRACE_GETREGSET, pid, NT_PRSTATUS, &vector);
	registers.regs[0] = result;
	ptrace(PTRACE_SETREGSET, pid, NT_PRSTATUS, &vector);
#endif
}

static int is_followed(pid_t pid)
{
	char path[64], target[4096];
	snprintf(path, sizeof path, "/proc/%d/exe", pid);
	ssize_t size = readlink(path, target, sizeof target - 1);
	if (size < 0)
		return 0;
	target[size] = 0;
	const char *name = strrchr(target, '/');
	name = name ? name + 1 : target;
	return !strncmp(name, "python", 6) || !strcmp(name, "dash") || !strcmp(name, "bash") ||
	       !strncmp(name, "ocigpu-", 7);
}

int main(int argc, char **argv)
{
	if (argc < 7)
		return 125;
	FILE *log = fopen(argv[1], "we");
	int open_class = !strcmp(argv[2], "open"), depth = atoi(argv[3]), number = atoi(argv[4]), error = atoi(argv[5]);
	int seen = 0, result = 125;
	if (!log)
		return 125;
	pid_t first = fork();
	if (first == 0) {
		ptrace(PTRACE_TRACEME, 0, 0, 0);
		raise(SIGSTOP);
		execv(argv[6], argv + 6);
		_exit(125);
	}
	find(first)->depth = 0;
	for (;;) {
		int status;
		pid_t pid = waitpid(-1, &status, __WALL);
		if (pid < 0) {
			if (errno == EINTR)
				continue;
			break;
		}
		struct process *process = find(pid);
		if (WIFEXITED(status) || WIFSIGNALED(status)) {
			if (pid == first)
				result = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
			forget(process);
			continue;
		}
		int signal_number = WSTOPSIG(status), event = status >> 16;
		if (process->new) {
			process->new = 0;
			if (process->depth < 0)
				process->depth = depth_of_parent(pid) + 1;
			ptrace(PTRACE_SETOPTIONS, pid, 0, OPTIONS);
			ptrace(PTRACE_SYSCALL, pid, 0, 0);
			continue;
		}
		if (event == PTRACE_EVENT_FORK || event == PTRACE_EVENT_VFORK || event == PTRACE_EVENT_CLONE) {
			signal_number = 0;
		} else if (event == PTRACE_EVENT_EXEC) {
			if (!is_followed(pid)) {
				forget(process);
				if (pid == first) /* its end is waited for, and children it has just forked ask for its depth */
					*find(pid) = (struct process){pid, 0, 0, 0};
				ptrace(PTRACE_DETACH, pid, 0, 0);
				continue;
			}
			signal_number = 0;
		} else if (signal_number == (SIGTRAP | 0x80)) {
			struct __ptrace_syscall_info info;
			signal_number = 0;
			if (ptrace(PTRACE_GET_SYSCALL_INFO, pid, sizeof info, &info) > 0) {
				const struct call *call;
				if (info.op == PTRACE_SYSCALL_INFO_EXIT && process->fail) {
					process->fail = 0;
					set_result(pid, -error);
				} else if (info.op == PTRACE_SYSCALL_INFO_ENTRY && (call = of_class(open_class, &info))) {
					if (!number)
						fprintf(log, "%d %s\n", process->depth, call->name);
					if (process->depth == depth && ++seen == number) {
						fprintf(log, "%d %s\n", process->depth, call->name);
						if (error < 0) {
							kill(pid, -error);
						} else if (error) {
							drop_call(pid);
							process->fail = 1;
						} else {
							kill(pid, SIGKILL);
						}
					}
				}
			}
		} else if (event || signal_number == SIGTRAP) {
			signal_number = 0;
		}
		ptrace(PTRACE_SYSCALL, pid, 0, signal_number);
	}
	fclose(log);
	return result;
}
