/* Opens each library by its name, as the container's own loader finds it: "dlopen SONAME ok" or the loader's words. */
#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        void *library = dlopen(argv[i], RTLD_NOW);
        printf("dlopen %s %s\n", argv[i], library ? "ok" : dlerror());
    }
    return 0;
}
