/* The little of CUDA that says whether there is a GPU; nothing can be computed on a simulated one. */
#include "simhost.h"

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, NOT_SUPPORTED = 801 };

EXPORT const char ocigpu_simulated[] = "This is a library of a simulated GPU host: there is no GPU behind it.";

static struct sim_view view;
static int initialized;

EXPORT int cuInit(unsigned int flags)
{
    if (flags)
        return INVALID_VALUE;
    if (!sim_look(&view) || !view.gpus)
        return NO_DEVICE;
    initialized = 1;
    return SUCCESS;
}

EXPORT int cuDriverGetVersion(int *version)
{
    if (!version)
        return INVALID_VALUE;
    *version = SIM_CUDA_VERSION;
    return SUCCESS;
}

EXPORT int cuDeviceGetCount(int *count)
{
    if (!initialized)
        return NOT_INITIALIZED;
    if (!count)
        return INVALID_VALUE;
    *count = view.gpus;
    return SUCCESS;
}

EXPORT int cuDeviceGet(int *device, int ordinal)
{
    if (!initialized)
        return NOT_INITIALIZED;
    if (!device)
        return INVALID_VALUE;
    if (ordinal < 0 || ordinal >= view.gpus)
        return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

EXPORT int cuDeviceGetName(char *name, int length, int device)
{
    if (!initialized)
        return NOT_INITIALIZED;
    if (device < 0 || device >= view.gpus)
        return INVALID_DEVICE;
    if (!name || length <= 0)
        return INVALID_VALUE;
    snprintf(name, (size_t)length, "%s", sim_gpus[view.gpu[device]].name);
    return SUCCESS;
}

EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int device)
{
    if (!initialized)
        return NOT_INITIALIZED;
    if (device < 0 || device >= view.gpus)
        return INVALID_DEVICE;
    if (!bytes)
        return INVALID_VALUE;
    *bytes = (size_t)sim_gpus[view.gpu[device]].memory;
    return SUCCESS;
}

EXPORT int cuCtxCreate_v2(void **context, unsigned int flags, int device)
{
    (void)context;
    (void)flags;
    (void)device;
    return initialized ? NOT_SUPPORTED : NOT_INITIALIZED;
}

EXPORT int cuGetErrorString(int error, const char **text)
{
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
