/* The little of CUDA that says which GPUs there are; nothing can be computed on a simulated one. */
#include "simhost.h"

/* CUresult of cuda.h, with the words of cuGetErrorString. */
#define RESULTS(X)                                                                  \
    X(SUCCESS, 0, "no error")                                                       \
    X(ERROR_INVALID_VALUE, 1, "invalid argument")                                   \
    X(ERROR_NOT_INITIALIZED, 3, "initialization error")                             \
    X(ERROR_NO_DEVICE, 100, "no CUDA-capable device is detected (simulated host)")  \
    X(ERROR_INVALID_DEVICE, 101, "invalid device ordinal")                          \
    X(ERROR_NOT_SUPPORTED, 801, "operation not supported: this GPU is simulated")
#define NUMBERED(name, number, text) name = number,

enum { RESULTS(NUMBERED) };

EXPORT const char ocigpu_simulated[] = "This is a library of a simulated GPU host: there is no GPU behind it.";

static struct sim_view view;
static int initialized;

/* A function that is asked after cuInit, of a device that there is, and has somewhere to write its answer. */
#define ANSWER(name, parameters, is_device, valid, answer)                                                  \
    EXPORT int name parameters                                                                              \
    {                                                                                                       \
        int failure = !initialized ? ERROR_NOT_INITIALIZED : !(is_device) ? ERROR_INVALID_DEVICE : SUCCESS; \
                                                                                                            \
        if (failure || !(valid))                                                                            \
            return failure ? failure : ERROR_INVALID_VALUE;                                                 \
        answer;                                                                                             \
        return SUCCESS;                                                                                     \
    }
#define GPU(device) (&sim_table.gpu[view.gpu[device]])

static int is_device(int device) { return device >= 0 && device < view.gpus; }

EXPORT int cuInit(unsigned int flags) {
    if (flags)
        return ERROR_INVALID_VALUE;
    if (!sim_look(&view) || !view.gpus)
        return ERROR_NO_DEVICE;
    initialized = 1;
    return SUCCESS;
}

EXPORT int cuDriverGetVersion(int *version) {
    if (!version)
        return ERROR_INVALID_VALUE;
    *version = sim_table.cuda_version;
    return SUCCESS;
}

static int refuse(void) { return initialized ? ERROR_NOT_SUPPORTED : ERROR_NOT_INITIALIZED; }

EXPORT int cuCtxCreate_v2(void **context, unsigned int flags, int device) { return refuse(); }
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) { return refuse(); }

/* The 16 bytes that the hexadecimal digits of "GPU-..." stand for. */
static void give_uuid(unsigned char *bytes, const char *text) {
    unsigned int digits = 0, value;

    for (text += strncmp(text, "GPU-", 4) ? 0 : 4; *text && digits < 32; text++) {
        if (*text == '-')
            continue;
        value = (unsigned int)(*text <= '9' ? *text - '0' : *text - 'a' + 10);
        bytes[digits / 2] = (unsigned char)(digits % 2 ? bytes[digits / 2] | value : value << 4);
        digits++;
    }
}

/* CUdevice_attribute of cuda.h: what the table knows, what all GPUs have had since compute capability 7.0, else 0. */
static int attribute_of(int attribute, const struct sim_gpu *gpu) {
    switch (attribute) {
    case 1: return 1024;                        /* MAX_THREADS_PER_BLOCK */
    case 2: case 3: return 1024;                /* MAX_BLOCK_DIM_X, _Y */
    case 4: return 64;                          /* MAX_BLOCK_DIM_Z */
    case 5: return 0x7FFFFFFF;                  /* MAX_GRID_DIM_X */
    case 6: case 7: return 0xFFFF;              /* MAX_GRID_DIM_Y, _Z */
    case 8: return 48 << 10;                    /* MAX_SHARED_MEMORY_PER_BLOCK */
    case 9: return 64 << 10;                    /* TOTAL_CONSTANT_MEMORY */
    case 10: return 32;                         /* WARP_SIZE */
    case 12: return 64 << 10;                   /* MAX_REGISTERS_PER_BLOCK */
    case 16: return (int)gpu->multiprocessors;  /* MULTIPROCESSOR_COUNT */
    case 19: case 41: return 1;                 /* CAN_MAP_HOST_MEMORY, UNIFIED_ADDRESSING */
    case 33: return (int)(gpu->bus & 0xFF);     /* PCI_BUS_ID; the device is 0 */
    case 50: return (int)(gpu->bus >> 8);       /* PCI_DOMAIN_ID */
    case 75: return (int)gpu->major;            /* COMPUTE_CAPABILITY_MAJOR */
    case 76: return (int)gpu->minor;            /* COMPUTE_CAPABILITY_MINOR */
    default: return 0;
    }
}

ANSWER(cuDeviceGetCount, (int *count), 1, count, *count = view.gpus)
ANSWER(cuDeviceGet, (int *device, int ordinal), !device || is_device(ordinal), device, *device = ordinal)
ANSWER(cuDeviceGetName, (char *name, int length, int device), is_device(device), name && length > 0,
       snprintf(name, (size_t)length, "%s", GPU(device)->name))
ANSWER(cuDeviceTotalMem_v2, (size_t *bytes, int device), is_device(device), bytes,
       *bytes = GPU(device)->memory ? (size_t)GPU(device)->memory : (size_t)sysconf(_SC_PHYS_PAGES) * getpagesize())
ANSWER(cuDeviceGetAttribute, (int *value, int attribute, int device), is_device(device), value && attribute > 0,
       *value = attribute_of(attribute, GPU(device)))
ANSWER(cuDeviceComputeCapability, (int *major, int *minor, int device), is_device(device), major && minor,
       (*major = (int)GPU(device)->major, *minor = (int)GPU(device)->minor))
ANSWER(cuDeviceGetUuid, (unsigned char *uuid, int device), is_device(device), uuid, give_uuid(uuid, GPU(device)->uuid))
ANSWER(cuDeviceGetPCIBusId, (char *id, int length, int device), is_device(device), id && length > 0,
       snprintf(id, (size_t)length, "%04X:%02X:00.0", SIM_BUS(GPU(device))))
extern EXPORT __typeof__(cuDeviceGetUuid) cuDeviceGetUuid_v2 __attribute__((alias("cuDeviceGetUuid")));

#define WORDED(name, number, text) case number: *result = text; return SUCCESS;
#define NAMED(name, number, text) case number: *result = "CUDA_" #name; return SUCCESS;

#define SAY(function, words)                                \
    EXPORT int function(int error, const char **result) {   \
        if (!result)                                        \
            return ERROR_INVALID_VALUE;                     \
        switch (error) {                                    \
        RESULTS(words)                                      \
        default: *result = NULL; return ERROR_INVALID_VALUE; \
        }                                                   \
    }
SAY(cuGetErrorString, WORDED)
SAY(cuGetErrorName, NAMED)
