/* nvml_list: prints the UUID of every GPU that NVML shows, one a line; exit status 0 if NVML works (even without GPUs).
 * Declares the few calls it needs, after the NVML API reference. */
#include <dlfcn.h>
#include <stdio.h>

int main(void) {
  void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  if (!library) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  int (*init)(void) = (int (*)(void))dlsym(library, "nvmlInit_v2");
  int (*count_of)(unsigned *) = (int (*)(unsigned *))dlsym(library, "nvmlDeviceGetCount_v2");
  int (*handle_of)(unsigned, void **) = (int (*)(unsigned, void **))dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
  int (*uuid_of)(void *, char *, unsigned) = (int (*)(void *, char *, unsigned))dlsym(library, "nvmlDeviceGetUUID");
  unsigned count = 0;
  if (!init || !count_of || !handle_of || !uuid_of || init() || count_of(&count)) {
    fprintf(stderr, "NVML does not answer\n");
    return 1;
  }
  for (unsigned i = 0; i < count; i++) {
    void *device;
    char uuid[96];
    if (handle_of(i, &device) || uuid_of(device, uuid, sizeof uuid)) return 1;
    puts(uuid);
  }
  return 0;
}
