/* ocigpu-container-cli.sh, compiled: packaging/stub.sh. */
#include "stub.h"

int main(int count, char **words)
{
	const char *config = getenv("OCIGPU_CONFIG");
	if ((!config || !*config) && *CONFIG && setenv("OCIGPU_CONFIG", CONFIG, 1))
		return 1;
	*words = (char *)getauxval(AT_EXECFN); /* as a script has it */
	python(count, words);
}
