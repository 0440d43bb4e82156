/* ocigpu-runtime.sh and its grep, compiled: packaging/stub.sh. */
#include "stub.h"
#include <fnmatch.h>

/* Return what stands in a text between two others, and move on behind them; NULL if the text goes on differently. */
static char *take(char **at, const char *before, const char *after)
{
	char *begin = *at + strlen(before), *end = strncmp(*at, before, strlen(before)) ? NULL : strstr(begin, after);
	if (end)
		*end = '\0', *at = end + strlen(after);
	return end ? begin : NULL;
}

/* Return the runtime that is kept (ocigpu/entry/pass_through.py) for these settings, and the words, or NULL. */
static char *read_kept(const char *config, const char *search, char **words)
{
	static char text[1 << 16];
	char name[512], *at = text, *file, *mark;
	const char *slash = strrchr(config, '/');
	struct stat found, marked;
	const char *run = !stat("/", &found) && found.st_uid == own_user() ? RUN : getenv("XDG_RUNTIME_DIR");
	if (!search || !run || *run != '/' || stat(run, &found) || found.st_uid != own_user())
		return NULL;
	int cache = open_own(openat(AT_FDCWD, run, O_PATH | O_DIRECTORY | O_CLOEXEC), "ocigpu", O_PATH | O_DIRECTORY, S_IFDIR);
	snprintf(name, sizeof name, "next-%zu-%zu-%s", strlen(config), strlen(search), slash ? slash + 1 : config);
	ssize_t size = read(open_own(cache, name, O_RDONLY, S_IFREG), text, sizeof text - 1);
	if (size < 0 || strlen(text) != (size_t)size || !(file = take(&at, "same '", "' '")) || strcmp(file, config) ||
	    !(file = take(&at, "", "' &&\n")) || strcmp(file, search))
		return NULL;
	while ((file = take(&at, "is '", "' ")))
		if (!(mark = take(&at, "", " &&\n")) || (!strcmp(mark, "none") ? !stat(file, &found) :
		    stat(file, &found) || fstatat(cache, mark, &marked, 0) || found.st_mtim.tv_sec != marked.st_mtim.tv_sec ||
		    found.st_mtim.tv_nsec != marked.st_mtim.tv_nsec))
			return NULL;
	file = take(&at, "runtime='", "' ");
	return file && (*words = take(&at, "words='", "'\n")) && !*at && !access(file, X_OK) ? file : NULL;
}

/* Whether a bundle's config.json has one of the words, which are lines, or whether that cannot be told. */
static int may_ask(const char *bundle, const char *words)
{
	enum { LONGEST = 1 << 12 };
	static char text[1 << 16];
	size_t size = 0, kept;
	ssize_t got;
	struct stat found;
	int fd = openat(openat(AT_FDCWD, *bundle ? bundle : ".", O_PATH | O_DIRECTORY | O_CLOEXEC), "config.json",
		O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &found) || !S_ISREG(found.st_mode) || !*words)
		return 1;
	for (; (got = read(fd, text + size, sizeof text - size)) > 0; memmove(text, text + size - kept, kept), size = kept) {
		size += (size_t)got;
		for (const char *word = words, *end = words; *end; word = end + 1) {
			end = strchrnul(word, '\n');
			if (end == word || end - word > LONGEST || memmem(text, size, word, (size_t)(end - word)))
				return 1;
		}
		kept = size < LONGEST ? size : LONGEST; /* a word may begin in it, and go on behind it */
	}
	return got != 0;
}

/* Which words may stand (g: in front of the subcommand, c: behind create), and what comes then: the same, v: a version is
 * asked for, e: nothing of ours, =: a value, b: this is the bundle, !: this is odd, for Python. */
static const struct { char at, then; const char *patterns[8]; } FORMS[] = {
	{'g', '=', {"--log", "--log-format", "--log-level", "--root", "--criu", "--rootless", "--cgroup-manager"}},
	{'g', 'v', {"--version", "-version", "-v"}}, {'g', 'g', {"--*=*", "--debug", "--systemd-cgroup"}},
	{'g', 'c', {"create", "run"}}, {'g', '!', {"[!-]*"}},
	{'c', '=', {"--bundle", "--console-socket", "--pid-file", "--preserve-fds", "--user"}},
	{'c', 'b', {"--bundle=*"}}, {'c', '!', {"--", "--config*", "-", "-[!-]*"}}, {'c', 'c', {"--*"}}, {'c', 'e', {"*"}},
};

static char what_comes_after(const char *word, char at)
{
	for (size_t form = 0; form < sizeof FORMS / sizeof *FORMS; form++)
		for (size_t i = 0; FORMS[form].at == at && FORMS[form].patterns[i]; i++)
			if (!fnmatch(FORMS[form].patterns[i], word, 0))
				return FORMS[form].then;
	return '?';
}

int main(int count, char **words)
{
	char own[16], *kept, *runtime, *bundle = "", *value = NULL, *self = (char *)getauxval(AT_EXECFN), at = 'g';
	int creates = 0, odd = 0;
	const char *config = getenv("OCIGPU_CONFIG"), *loop = getenv("OCIGPU_RUNTIME_PID"), *name = strrchr(self, '/');
	*words = self;
	if ((!config || !*config) && *(config = CONFIG) && setenv("OCIGPU_CONFIG", CONFIG, 1))
		exit(127);
	if ((loop && *loop) || !(runtime = read_kept(config, getenv("PATH"), &kept)))
		python(count, words);
	for (char **next = words + 1, *word; (word = *next); next++) {
		creates |= !strcmp(word, "create") || !strcmp(word, "run");
		if (value) {
			bundle = strcmp(value, "--bundle") ? bundle : word;
			value = NULL;
			continue;
		}
		char then = what_comes_after(word, at);
		value = then == '=' ? word : NULL;
		bundle = then == 'b' ? strchr(word, '=') + 1 : bundle;
		odd |= then == '!' || then == '?';
		at = then == '!' ? 'e' : strchr("=b?", then) ? at : then;
	}
	if (creates && (odd || value || may_ask(bundle, kept)))
		python(count, words);
	if (at == 'v') /* as print_version in ocigpu/runtime.py */
		dprintf(1, "%s" VERSION "\nspec: " SPEC "\n\n", strncmp(name ? name + 1 : self, "nvidia-", 7) ?
			"ocigpu-runtime " : "NVIDIA Container Runtime version " VENDOR "\nocigpu: ");
	snprintf(own, sizeof own, "%d", getpid());
	if (!setenv("OCIGPU_RUNTIME_PID", own, 1))
		execve(*words = runtime, words, environ);
	unsetenv("OCIGPU_RUNTIME_PID");
	*words = self;
	python(count, words);
}
