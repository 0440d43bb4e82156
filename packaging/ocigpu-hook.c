/* ocigpu-hook.sh, compiled: packaging/stub.sh. */
#include "stub.h"
#include <limits.h>
#include <poll.h>
#include <signal.h>

enum { SECONDS = 30 }; /* that a start may take: ocigpu/system/signals.py */

/* Kill the process that was to answer if it is stopped, and has the parent that the shim became: ours. */
static void kill_stopped(int child)
{
	if (child <= 1)
		return;
	char path[32], text[512];
	int parent = 0, size;
	snprintf(path, sizeof path, "/proc/%d/stat", child);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	size = fd < 0 ? -1 : (int)read(fd, text, sizeof text - 1);
	text[size > 0 ? size : 0] = '\0';
	char *state = strrchr(text, ')'); /* the name before may have any character */
	close(fd);
	if (state && state[2] == 'T' && sscanf(state + 4, "%d", &parent) == 1 && parent == getppid())
		kill(child, SIGKILL);
}

static int read_child(int early)
{
	char text[16] = "";
	int fd = open_own(early, "child", O_RDONLY, S_IFREG);
	if (fd < 0 || read(fd, text, sizeof text - 1) <= 0)
		return 0;
	close(fd);
	return atoi(text);
}

int main(int count, char **words)
{
	static char text[2 * PATH_MAX];
	char own[16], *where = NULL;
	*words = (char *)getauxval(AT_EXECFN); /* as a script has it */
	/* where a standard stream is closed, something of ours would be opened in its place */
	if (count < 3 || strcmp(words[1], "--early") || fcntl(1, F_GETFD) < 0 || fcntl(2, F_GETFD) < 0 || dup2(0, 5) < 0)
		python(count, words);
	int early = open(words[2], O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	int request = open_own(early, "request", O_RDWR, S_IFIFO), answer = open_own(early, "answer", O_RDONLY, S_IFIFO);
	int child = read_child(early);
	kill_stopped(child);
	struct pollfd wait = {.fd = answer, .events = POLLIN};
	words[2] = *words, words += 2, count -= 2;
	snprintf(own, sizeof own, "%d", getpid());
	/* An end that nobody had open when ours was opened is none for poll(2), but for read(2).  Without O_NONBLOCK reading
	 * waits, until the process ends that has the other end. */
	if (request >= 0 && answer >= 0 && read(answer, text, 1) < 0 && !fcntl(answer, F_SETFL, 0) &&
		dprintf(request, "%s\n", own) > 0)
		for (char *line = text, *end = text; end < text + sizeof text;) {
			while (child > 1 && !poll(&wait, 1, SECONDS * 1000))
				kill_stopped(child);
			if (read(answer, end, 1) != 1)
				break;
			if (*end++ != '\n')
				continue;
			end[-1] = '\0';
			char *rest = line, *word = strsep(&rest, " "), *pid = strsep(&rest, " ");
			line = end;
			if (!pid || strcmp(pid, own))
				break;
			if (!strcmp(word, "exit"))
				exit(rest ? atoi(rest) : 1);
			where = strcmp(word, "begin") ? where : rest ? rest : "";
		}
	if (!where) {
		close(5);
		python(count, words);
	}
	dprintf(2, "%s: OCIGPU-INT-2: %s%sthe process that prepared the container was killed, or gave no answer; "
		"what it had begun is undone\n", *words, where, *where ? ": " : "");
	return 1;
}
