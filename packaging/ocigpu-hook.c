/* ocigpu-hook.sh, compiled: packaging/stub.sh. */
#include "stub.h"
#include <limits.h>

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
	words[2] = *words, words += 2, count -= 2;
	snprintf(own, sizeof own, "%d", getpid());
	/* without O_NONBLOCK reading waits, until the process ends that has the other end */
	if (request >= 0 && answer >= 0 && !fcntl(answer, F_SETFL, 0) && dprintf(request, "%s\n", own) > 0)
		for (char *line = text, *end = text; end < text + sizeof text && read(answer, end, 1) == 1;) {
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
