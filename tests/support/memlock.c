/* Preloaded into crun on machines whose root lacks CAP_SYS_RESOURCE.
 *
 * crun 1.8 raises RLIMIT_MEMLOCK before it loads a device program, and gives up when it may not.  Since Linux 5.11
 * that memory is charged to the cgroup and the limit does not matter: here the refusal is a success.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/resource.h>

int setrlimit(__rlimit_resource_t resource, const struct rlimit *limit) {
    int (*real)(__rlimit_resource_t, const struct rlimit *) =
        (int (*)(__rlimit_resource_t, const struct rlimit *))dlsym(RTLD_NEXT, "setrlimit");
    int result = real(resource, limit);
    return resource == RLIMIT_MEMLOCK ? 0 : result;
}
