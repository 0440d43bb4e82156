/* The little of CUDA that says which GPUs there are; nothing can be computed on a simulated one.
 *
 * CUDA_VISIBLE_DEVICES chooses devices and their order (CUDA C++ Programming Guide, "CUDA Environment Variables"); only
 * CUDA reads it, NVML and nvidia-smi do not.
 */
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

struct device {
    int gpu;                        /* index into sim_table.gpu[] */
    const struct sim_instance *mig; /* NULL: the whole GPU */
};

static struct device devices[SIM_MOST_GPUS];
static int device_count;

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
#define GPU(device) (&sim_table.gpu[devices[device].gpu])
#define MIG(device) (devices[device].mig)

static int is_device(int device) { return device >= 0 && device < device_count; }

static int same(const struct device *one, const struct device *two) {
    return one->gpu == two->gpu && one->mig == two->mig;
}

/* Say whether a name is a device's UUID, or the start of it. */
static int is_named(const char *uuid, const char *name, size_t length) {
    return length > 4 && length < 48 && strncmp(uuid, name, length) == 0;
}

/* Find the MIG device "MIG-<UUID>" or "MIG-GPU-<UUID>/<GPU instance>/<compute instance>". */
static int find_mig(const char *name, size_t length, struct device *found) {
    char path[128];
    int count = 0;

    for (int i = 0; i < sim_count; i++) {
        const struct sim_instance *mig = &sim_instances[i];
        int j = 0;

        snprintf(path, sizeof path, "MIG-%s/%d/%d", sim_table.gpu[mig->gpu].uuid, mig->gi, mig->ci);
        while (j < view.gpus && view.gpu[j] != mig->gpu)
            j++;
        if (mig->ci < 0 || j == view.gpus || !sim_visible(&view, mig))
            continue;
        if (!is_named(mig->uuid, name, length) && (strlen(path) != length || strncmp(path, name, length) != 0))
            continue;
        *found = (struct device){mig->gpu, mig};
        count++;
    }
    return count == 1;
}

/* Find the one device that an entry of CUDA_VISIBLE_DEVICES names; return 0 for none and for several. */
static int find_device(const char *name, size_t length, struct device *found) {
    const char *digits = name;
    int count = 0, index;

    while (*digits == ' ')
        digits++;
    if (*digits >= '0' && *digits <= '9') { /* what follows the digits does not count, as with strtoul */
        index = sim_number(&digits);
        *found = (struct device){index < view.gpus ? view.gpu[index] : 0, NULL};
        return index < view.gpus;
    }
    if (strncmp(name, "MIG-", 4) == 0)
        return find_mig(name, length, found);
    for (int i = 0; i < view.gpus; i++)
        if (is_named(sim_table.gpu[view.gpu[i]].uuid, name, length)) {
            *found = (struct device){view.gpu[i], NULL};
            count++;
        }
    return count == 1;
}

/* Say what kind of name an entry is: an index, a GPU's UUID or a MIG device's; a list ends before another kind. */
static char kind_of(const char *name) {
    return strncmp(name, "GPU-", 4) == 0 ? 'g' : strncmp(name, "MIG-", 4) == 0 ? 'm' : 'i';
}

/* Choose the devices: all without CUDA_VISIBLE_DEVICES, else those in front of its first invalid entry, in its order.
 * A device that is named twice leaves none, and of MIG devices a process has one. */
static void choose_devices(void) {
    const char *name = getenv("CUDA_VISIBLE_DEVICES"), *first = name;
    struct device found;

    device_count = 0;
    for (int i = 0; !name && i < view.gpus; i++)
        devices[device_count++] = (struct device){view.gpu[i], NULL};
    while (name && kind_of(name) == kind_of(first)) {
        size_t length = strcspn(name, ",");

        if (!find_device(name, length, &found))
            return;
        for (int i = 0; i < device_count; i++)
            if (same(&found, &devices[i])) {
                device_count = 0;
                return;
            }
        if (!device_count || !found.mig)
            devices[device_count++] = found;
        name = name[length] ? name + length + 1 : NULL;
    }
}

EXPORT int cuInit(unsigned int flags) {
    if (flags)
        return ERROR_INVALID_VALUE;
    if (!sim_look(&view))
        return ERROR_NO_DEVICE;
    sim_load();
    choose_devices();
    if (!device_count)
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

/* The 16 bytes that the hexadecimal digits of "GPU-..." or "MIG-..." stand for. */
static void give_uuid(unsigned char *bytes, const char *text) {
    unsigned int digits = 0, value;

    text += strncmp(text, "GPU-", 4) == 0 || strncmp(text, "MIG-", 4) == 0 ? 4 : 0; /* a Jetson's starts with neither */
    for (; *text && digits < 32; text++) {
        if (*text == '-')
            continue;
        value = (unsigned int)(*text <= '9' ? *text - '0' : *text - 'a' + 10);
        bytes[digits / 2] = (unsigned char)(digits % 2 ? bytes[digits / 2] | value : value << 4);
        digits++;
    }
}

/* CUdevice_attribute of cuda.h: what the table knows, what all GPUs have had since compute capability 7.0, else 0. */
static int attribute_of(int attribute, int device) {
    const struct sim_gpu *gpu = GPU(device);
    const struct sim_instance *mig = MIG(device);

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
    case 16: return (int)(mig ? sim_multiprocessors(&sim_table.profile[mig->profile], mig->ci_slices, mig->ci_profile)
                             : gpu->multiprocessors); /* MULTIPROCESSOR_COUNT */
    case 19: case 41: return 1;                 /* CAN_MAP_HOST_MEMORY, UNIFIED_ADDRESSING */
    case 33: return (int)(gpu->bus & 0xFF);     /* PCI_BUS_ID; the device is 0 */
    case 50: return (int)(gpu->bus >> 8);       /* PCI_DOMAIN_ID */
    case 75: return (int)gpu->major;            /* COMPUTE_CAPABILITY_MAJOR */
    case 76: return (int)gpu->minor;            /* COMPUTE_CAPABILITY_MINOR */
    default: return 0;
    }
}

static void give_name(char *name, size_t length, int device) {
    char profile[48];

    if (!MIG(device)) {
        snprintf(name, length, "%s", GPU(device)->name);
        return;
    }
    sim_mig_name(MIG(device), profile, sizeof profile);
    snprintf(name, length, "%s MIG %s", GPU(device)->name, profile);
}

ANSWER(cuDeviceGetCount, (int *count), 1, count, *count = device_count)
ANSWER(cuDeviceGet, (int *device, int ordinal), !device || is_device(ordinal), device, *device = ordinal)
ANSWER(cuDeviceGetName, (char *name, int length, int device), is_device(device), name && length > 0,
       give_name(name, (size_t)length, device))
ANSWER(cuDeviceTotalMem_v2, (size_t *bytes, int device), is_device(device), bytes,
       *bytes = MIG(device) ? (size_t)sim_table.profile[MIG(device)->profile].memory_mib << 20
                : GPU(device)->memory ? (size_t)GPU(device)->memory : (size_t)sysconf(_SC_PHYS_PAGES) * getpagesize())
ANSWER(cuDeviceGetAttribute, (int *value, int attribute, int device), is_device(device), value && attribute > 0,
       *value = attribute_of(attribute, device))
ANSWER(cuDeviceComputeCapability, (int *major, int *minor, int device), is_device(device), major && minor,
       (*major = (int)GPU(device)->major, *minor = (int)GPU(device)->minor))
ANSWER(cuDeviceGetUuid, (unsigned char *uuid, int device), is_device(device), uuid, give_uuid(uuid, GPU(device)->uuid))
ANSWER(cuDeviceGetPCIBusId, (char *id, int length, int device), is_device(device), id && length > 0,
       snprintf(id, (size_t)length, "%04X:%02X:00.0", SIM_BUS(GPU(device))))
ANSWER(cuDeviceGetUuid_v2, (unsigned char *uuid, int device), is_device(device), uuid, /* a MIG device's own */
       give_uuid(uuid, MIG(device) ? MIG(device)->uuid : GPU(device)->uuid))

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
