/* The little of CUDA that says whether there is a GPU; nothing can be computed on a simulated one. */
#include "simhost.h"

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, NOT_SUPPORTED = 801 };

EXPORT const char ocigpu_simulated[] = "This is a library of a simulated GPU host: there is no GPU behind it.";

static struct sim_view view;
static int initialized;

/* A function that is asked after cuInit, of a device that there is, and has somewhere to write its answer. */
#define ANSWER(name, parameters, is_device, valid, answer)                                      \
    EXPORT int name parameters                                                                  \
    {                                                                                           \
        int failure = !initialized ? NOT_INITIALIZED : !(is_device) ? INVALID_DEVICE : SUCCESS; \
                                                                                                \
        if (failure || !(valid))                                                                \
            return failure ? failure : INVALID_VALUE;                                           \
        answer;                                                                                 \
        return SUCCESS;                                                                         \
    }

static int is_device(int device) { return device >= 0 && device < view.gpus; }

EXPORT int cuInit(unsigned int flags) {
    if (flags)
        return INVALID_VALUE;
    if (!sim_look(&view) || !view.gpus)
        return NO_DEVICE;
    initialized = 1;
    return SUCCESS;
}

EXPORT int cuDriverGetVersion(int *version) {
    if (!version)
        return INVALID_VALUE;
    *version = SIM_CUDA_VERSION;
    return SUCCESS;
}

EXPORT int cuCtxCreate_v2(void **context, unsigned int flags, int device) {
    return initialized ? NOT_SUPPORTED : NOT_INITIALIZED;
}

ANSWER(cuDeviceGetCount, (int *count), 1, count, *count = view.gpus)
ANSWER(cuDeviceGet, (int *device, int ordinal), !device || is_device(ordinal), device, *device = ordinal)
ANSWER(cuDeviceGetName, (char *name, int length, int device), is_device(device), name && length > 0,
       snprintf(name, (size_t)length, "%s", sim_gpus[view.gpu[device]].name))
ANSWER(cuDeviceTotalMem_v2, (size_t *bytes, int device), is_device(device), bytes,
       *bytes = (size_t)sim_gpus[view.gpu[device]].memory)

EXPORT int cuGetErrorString(int error, const char **text) {
    if (!text)
        return INVALID_VALUE;
    switch (error) {
    case SUCCESS: *text = "no error"; return SUCCESS;
    case INVALID_VALUE: *text = "invalid argument"; return SUCCESS;
    case NOT_INITIALIZED: *text = "initialization error"; return SUCCESS;
    case NO_DEVICE: *text = "no CUDA-capable device is detected (simulated host)"; return SUCCESS;
    case INVALID_DEVICE: *text = "invalid device ordinal"; return SUCCESS;
    case NOT_SUPPORTED: *text = "operation not supported: this GPU is simulated"; return SUCCESS;
    default: *text = NULL; return INVALID_VALUE;
    }
}
