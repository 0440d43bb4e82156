/* What the compiled stubs have in common.  What they do, and why, is said in ocigpu-runtime.sh and ocigpu-hook.sh: tests
 * hold both forms to the same answers.  In any doubt Python decides. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

/* Among the first bytes of the program: by it ocigpu/runtime.py knows a shim, and install.sh what it has written. */
static const struct { unsigned owner_size, mark_size, type; char owner[8], mark[sizeof MARK]; }
note __attribute__((used, aligned(4), section(".note.ocigpu"))) = {8, sizeof MARK, 1, "ocigpu", MARK};

static _Noreturn void python(int count, char **words)
{
	char *start[] = {INTERPRETER, "-I", "-S", "-c", START, *words, FIRST_WORDS};
	char **line = calloc((size_t)count + sizeof start / sizeof *start, sizeof *line);
	const char *without = getenv("OCIGPU_NO_IMAGE");
	struct rlimit data, addresses; /* where these are small, executing the snapshot would end this process */
	int room = !getrlimit(RLIMIT_DATA, &data) && !getrlimit(RLIMIT_AS, &addresses) &&
		data.rlim_cur >= 64 << 20 && addresses.rlim_cur >= 64 << 20;
	if (line)
		memcpy(mempcpy(line, start, sizeof start), words + 1, (size_t)count * sizeof *words);
	if (line && *SNAPSHOT && room && (!without || !*without))
		execve(SNAPSHOT, line, environ); /* packaging/snapshot: the same interpreter's work, started already */
	if (line && !access(INTERPRETER, X_OK) && !access(ENCODINGS, F_OK))
		execve(INTERPRETER, line, environ);
	dprintf(2, "%s: OCIGPU-INT-3: " INTERPRETER " or its library is missing\n"
		"hint: install that Python again, or ocigpu for the one that is there\n", *words);
	exit(127);
}

/* Return our user's id, which the kernel gave the program at its start (getauxval(3)). */
static __attribute__((unused)) uid_t own_user(void)
{
	return (uid_t)getauxval(AT_EUID);
}

/* Return a descriptor of a file of this type that nobody else can write, or -1; no link is followed, nothing waits. */
static __attribute__((unused)) int open_own(int directory, const char *name, int flags, mode_t type)
{
	int fd = openat(directory, name, flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	struct stat found;
	return fd >= 0 && !fstat(fd, &found) && (found.st_mode & S_IFMT) == type && found.st_uid == own_user() &&
		!(found.st_mode & (S_IWGRP | S_IWOTH)) ? fd : -1;
}
