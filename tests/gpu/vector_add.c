/* vector_add: proves that a GPU computes. Opens libcuda.so.1 (driver API), and on every device that it shows allocates
 * memory, compiles a kernel from PTX (so the driver's JIT compiler library is needed too), launches it and checks each
 * result. No CUDA headers: the few types and calls it needs are declared here, after the CUDA Driver API reference.
 * Prints "device N NAME: ok" per device; exit status 0 only if there is at least one device and all are right. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

typedef unsigned long long device_pointer;

static const char PTX[] =
    ".version 6.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry add(.param .u64 a, .param .u64 b, .param .u32 n)\n"
    "{\n"
    "  .reg .pred %p<2>; .reg .b32 %r<6>; .reg .b64 %d<8>; .reg .f32 %f<4>;\n"
    "  ld.param.u64 %d1, [a]; ld.param.u64 %d2, [b]; ld.param.u32 %r1, [n];\n"
    "  mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;\n"
    "  mad.lo.u32 %r5, %r2, %r3, %r4;\n"
    "  setp.ge.u32 %p1, %r5, %r1;\n"
    "  @%p1 bra DONE;\n"
    "  cvta.to.global.u64 %d3, %d1; cvta.to.global.u64 %d4, %d2;\n"
    "  mul.wide.u32 %d5, %r5, 4; add.u64 %d6, %d3, %d5; add.u64 %d7, %d4, %d5;\n"
    "  ld.global.f32 %f1, [%d6]; ld.global.f32 %f2, [%d7];\n"
    "  add.f32 %f3, %f1, %f2; st.global.f32 [%d7], %f3;\n"
    "DONE:\n  ret;\n}\n";

static void *library;

static void *find(const char *name) {
  void *symbol = dlsym(library, name);
  if (!symbol) {
    fprintf(stderr, "libcuda.so.1 has no %s\n", name);
    exit(1);
  }
  return symbol;
}

#define CALL(name, types, ...)                                        \
  do {                                                                \
    int code = ((int(*) types)find(#name))(__VA_ARGS__);              \
    if (code) {                                                       \
      fprintf(stderr, "%s: CUDA error %d\n", #name, code);            \
      exit(1);                                                        \
    }                                                                 \
  } while (0)

enum { COUNT = 1 << 20, THREADS = 256 };

static void check_device(int index) {
  int device;
  char name[128] = "";
  void *context, *module, *kernel;
  device_pointer a, b;
  unsigned count = COUNT;
  size_t bytes = COUNT * sizeof(float);
  float *x = malloc(bytes), *y = malloc(bytes);
  if (!x || !y) exit(1);
  for (int i = 0; i < COUNT; i++) x[i] = (float)i, y[i] = 2.0f * (float)i;
  CALL(cuDeviceGet, (int *, int), &device, index);
  CALL(cuDeviceGetName, (char *, int, int), name, (int)sizeof name, device);
  CALL(cuDevicePrimaryCtxRetain, (void **, int), &context, device);
  CALL(cuCtxSetCurrent, (void *), context);
  CALL(cuMemAlloc_v2, (device_pointer *, size_t), &a, bytes);
  CALL(cuMemAlloc_v2, (device_pointer *, size_t), &b, bytes);
  CALL(cuMemcpyHtoD_v2, (device_pointer, const void *, size_t), a, x, bytes);
  CALL(cuMemcpyHtoD_v2, (device_pointer, const void *, size_t), b, y, bytes);
  CALL(cuModuleLoadData, (void **, const void *), &module, PTX);
  CALL(cuModuleGetFunction, (void **, void *, const char *), &kernel, module, "add");
  void *parameters[] = {&a, &b, &count};
  CALL(cuLaunchKernel,
       (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **), kernel,
       COUNT / THREADS, 1, 1, THREADS, 1, 1, 0, NULL, parameters, NULL);
  CALL(cuCtxSynchronize, (void));
  CALL(cuMemcpyDtoH_v2, (void *, device_pointer, size_t), y, b, bytes);
  for (int i = 0; i < COUNT; i++)
    if (y[i] != 3.0f * (float)i) {
      fprintf(stderr, "device %d: element %d is %f, not %f\n", index, i, y[i], 3.0f * (float)i);
      exit(1);
    }
  CALL(cuMemFree_v2, (device_pointer), a);
  CALL(cuMemFree_v2, (device_pointer), b);
  CALL(cuDevicePrimaryCtxRelease_v2, (int), device);
  free(x);
  free(y);
  printf("device %d %s: ok\n", index, name);
}

int main(void) {
  int count = 0;
  library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  CALL(cuInit, (unsigned), 0);
  CALL(cuDeviceGetCount, (int *), &count);
  for (int i = 0; i < count; i++) check_device(i);
  return count ? 0 : 1;
}
