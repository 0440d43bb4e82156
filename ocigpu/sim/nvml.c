/* NVML of a simulated host: answers from the table, for the GPUs whose node this process may open.
 *
 * Struct layouts, return codes and versioned names are those of NVIDIA's NVML API reference and nvml.h.
 *
 * Faults for tests: OCIGPU_SIM_NVML_FAIL=<code> makes nvmlInit return that code, and a file SIM_DIRECTORY/faults, read
 * by nvmlInit and nvmlDeviceGetCount, has lines "init <code>", "lost <gpu>", "mig-pending <gpu>" (its MIG mode changes with the next reset),
 * "no-persistence" or "hang".  "xid <gpu> <number>" [<gpu instance> <compute instance>] is an event for whoever waits
 * for one while the line is added.
 */
#include "simhost.h"

#define EXPORT __attribute__((visibility("default")))

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    GPU_IS_LOST = 15,
    IN_USE = 19,
    INSUFFICIENT_RESOURCES = 23,
    VERSION_MISMATCH = 25, /* NVML_ERROR_ARGUMENT_VERSION_MISMATCH */
    UNKNOWN = 999,
};

typedef int nvml_return;

/* What an nvmlDevice_t points to: a GPU, or a MIG device when mig is set; nvmlGpuInstance_t and nvmlComputeInstance_t
 * point to one with mig set as well. A MIG device is its compute instance. */
struct handle {
    int gpu;                   /* index into sim_gpus[] */
    unsigned int index;        /* NVML's index */
    const struct sim_instance *mig;
};

EXPORT const char ocigpu_simulated[] = "This is a library of a simulated GPU host: there is no GPU behind it.";

static struct sim_view view;
static struct handle devices[SIM_GPUS];
static struct handle instances[SIM_GPUS][SIM_GIS][1 + SIM_CIS]; /* first the GPU instance; mig NULL: there is none */
static int references;
static int lost[SIM_GPUS], mig_pending[SIM_GPUS], no_persistence;

static int number(const char *text)
{
    int value = 0;

    while (*text == ' ')
        text++;
    for (; *text >= '0' && *text <= '9' && value < 100000; text++)
        value = value * 10 + (*text - '0');
    return value;
}

/* Read a small file, at most size - 1 bytes of it, and return whether there is one. */
static int read_text(const char *path, char *text, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t got;

    if (fd < 0)
        return 0;
    got = read(fd, text, size - 1);
    close(fd);
    text[got > 0 ? got : 0] = 0;
    return 1;
}

/* Read SIM_DIRECTORY/faults and return the code that nvmlInit fails with, 0 for none. */
static int read_faults(void)
{
    char text[4096], *line, *end;
    int gpu, code = 0;

    memset(lost, 0, sizeof lost);
    memset(mig_pending, 0, sizeof mig_pending);
    no_persistence = 0;
    if (!read_text(SIM_DIRECTORY "/faults", text, sizeof text))
        return 0;
    for (line = text; line; line = end ? end + 1 : NULL) {
        end = strchr(line, '\n');
        if (end)
            *end = 0;
        if (strcmp(line, "hang") == 0) {
            for (;;)
                pause();
        } else if (strncmp(line, "init ", 5) == 0) {
            code = number(line + 5);
        } else if (strncmp(line, "lost ", 5) == 0) {
            gpu = number(line + 5);
            if (gpu < SIM_GPUS)
                lost[gpu] = 1;
        } else if (strncmp(line, "mig-pending ", 12) == 0) {
            gpu = number(line + 12);
            if (gpu < SIM_GPUS)
                mig_pending[gpu] = 1;
        } else if (strcmp(line, "no-persistence") == 0) {
            no_persistence = 1;
        }
    }
    return code;
}

static struct handle *slot(const struct sim_instance *mig) { return &instances[mig->gpu][mig->gi][1 + mig->ci]; }

/* Fill the handles of the instances that this process may use. */
static void find_instances(void)
{
    unsigned int counts[SIM_GPUS] = {0};
    int i, j;

    memset(instances, 0, sizeof instances);
    for (i = 0; i < sim_count; i++) {
        const struct sim_instance *mig = &sim_instances[i];

        for (j = 0; j < view.gpus && view.gpu[j] != mig->gpu; j++)
            ;
        if (j == view.gpus || !sim_visible(&view, mig))
            continue;
        *slot(mig) = (struct handle){mig->gpu, mig->ci < 0 ? 0 : counts[mig->gpu]++, mig};
    }
}

/* See instances that came and went since, by whatever process. */
static void refresh(void)
{
    if (sim_load())
        find_instances();
}

static nvml_return initialize(void)
{
    const char *failure = getenv("OCIGPU_SIM_NVML_FAIL");
    int code, i;

    if (references) {
        references++;
        return SUCCESS;
    }
    if (failure && *failure)
        return number(failure);
    code = read_faults();
    if (code)
        return code;
    if (!sim_look(&view))
        return DRIVER_NOT_LOADED;
    for (i = 0; i < view.gpus; i++) {
        devices[i].gpu = view.gpu[i];
        devices[i].index = (unsigned int)i;
        devices[i].mig = NULL;
    }
    sim_load();
    find_instances();
    references = 1;
    return SUCCESS;
}

EXPORT nvml_return nvmlInit_v2(void) { return initialize(); }
EXPORT nvml_return nvmlInit(void) { return initialize(); }

EXPORT nvml_return nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    return initialize();
}

EXPORT nvml_return nvmlShutdown(void)
{
    if (!references)
        return UNINITIALIZED;
    references--;
    return SUCCESS;
}

EXPORT const char *nvmlErrorString(nvml_return code)
{
    switch (code) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case TIMEOUT: return "Timeout";
    case 12: return "NVML Shared Library Not Found";
    case 13: return "Function Not Found";
    case GPU_IS_LOST: return "GPU is lost";
    case IN_USE: return "In use by another client";
    case INSUFFICIENT_RESOURCES: return "Insufficient Resources";
    case 17: return "The operating system has blocked the request.";
    case 18: return "Driver/library version mismatch";
    case VERSION_MISMATCH: return "Argument version mismatch";
    default: return "Unknown Error";
    }
}

/* Copy text with its final NUL; INSUFFICIENT_SIZE when it does not fit. */
static nvml_return give(char *buffer, unsigned int length, const char *text)
{
    size_t size = strlen(text) + 1;

    if (!buffer)
        return INVALID_ARGUMENT;
    if (size > length)
        return INSUFFICIENT_SIZE;
    memcpy(buffer, text, size);
    return SUCCESS;
}

/* Return whether a handle is an instance's: a GPU instance's for the first of its row. */
static int is_instance(const struct handle *handle, int of_gpu)
{
    size_t at = (size_t)((const char *)handle - (const char *)instances);

    return at < sizeof instances && at % sizeof *handle == 0 && handle->mig && (handle->mig->ci < 0) == of_gpu;
}

/* Check that a handle is one we gave out and that its GPU answers. */
static nvml_return check(const struct handle *device)
{
    int i, known;

    if (!references)
        return UNINITIALIZED;
    known = is_instance(device, 0);
    for (i = 0; i < view.gpus; i++)
        known |= device == &devices[i];
    if (!known)
        return INVALID_ARGUMENT;
    return lost[device->gpu] ? GPU_IS_LOST : SUCCESS;
}

/* As check, and refuse MIG devices: the query is about a whole GPU. */
static nvml_return check_gpu(const struct handle *device)
{
    nvml_return result = check(device);

    return result == SUCCESS && device->mig ? NOT_SUPPORTED : result;
}

#define REQUIRE(call)                      \
    do {                                   \
        nvml_return required = (call);     \
        if (required != SUCCESS)           \
            return required;               \
    } while (0)

#define GPU(device) (&sim_gpus[(device)->gpu])
#define PROFILE(device) (&sim_profiles[(device)->mig->profile])
#define MIG_MODE(device) (sim_mig_mode[(device)->gpu])

/* The same function under an earlier name. */
#define ALIAS(name, function) extern EXPORT __typeof__(function) name __attribute__((alias(#function)));

/* A function that answers with one number about a whole GPU. */
#define NUMBER(name, answer)                                                   \
    EXPORT nvml_return name(const struct handle *device, unsigned int *result) \
    {                                                                          \
        REQUIRE(check_gpu(device));                                            \
        if (!result)                                                           \
            return INVALID_ARGUMENT;                                           \
        *result = (unsigned int)(answer);                                      \
        return SUCCESS;                                                        \
    }

static unsigned int load_of(int gpu);
static unsigned int watts(const struct handle *device);
static nvml_return give_processes(const struct handle *device, unsigned int *count, void *list);

EXPORT nvml_return nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    return references ? give(version, length, SIM_DRIVER_VERSION) : UNINITIALIZED;
}

EXPORT nvml_return nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    return references ? give(version, length, SIM_NVML_VERSION) : UNINITIALIZED;
}

/* The two answer without nvmlInit, as the real ones do. */
EXPORT nvml_return nvmlSystemGetCudaDriverVersion(int *version)
{
    if (!version)
        return INVALID_ARGUMENT;
    *version = SIM_CUDA_VERSION;
    return SUCCESS;
}

ALIAS(nvmlSystemGetCudaDriverVersion_v2, nvmlSystemGetCudaDriverVersion)

EXPORT nvml_return nvmlDeviceGetCount_v2(unsigned int *count)
{
    if (!references)
        return UNINITIALIZED;
    if (!count)
        return INVALID_ARGUMENT;
    read_faults(); /* whoever watches the GPUs for long sees them come and go */
    *count = (unsigned int)view.gpus;
    return SUCCESS;
}

ALIAS(nvmlDeviceGetCount, nvmlDeviceGetCount_v2)

static nvml_return give_handle(struct handle *device, struct handle **result)
{
    REQUIRE(check(device));
    *result = device;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetHandleByIndex_v2(unsigned int index, struct handle **device)
{
    if (!references)
        return UNINITIALIZED;
    if (!device || index >= (unsigned int)view.gpus)
        return INVALID_ARGUMENT;
    return give_handle(&devices[index], device);
}

ALIAS(nvmlDeviceGetHandleByIndex, nvmlDeviceGetHandleByIndex_v2)

EXPORT nvml_return nvmlDeviceGetHandleByUUID(const char *uuid, struct handle **device)
{
    int i;

    if (!references)
        return UNINITIALIZED;
    if (!uuid || !device)
        return INVALID_ARGUMENT;
    for (i = 0; i < view.gpus; i++)
        if (strcmp(GPU(&devices[i])->uuid, uuid) == 0)
            return give_handle(&devices[i], device);
    refresh();
    for (i = 0; i < sim_count; i++)
        if (strcmp(sim_instances[i].uuid, uuid) == 0 && slot(&sim_instances[i])->mig)
            return give_handle(slot(&sim_instances[i]), device);
    return NOT_FOUND;
}

static int hex(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Return the bus number of "0000:01:00.0", "00000000:01:00.0" or "01:00.0", -1 for anything else. */
static int parse_bus(const char *text)
{
    size_t length = strlen(text), i;

    if (length < 7 || strcmp(text + length - 5, ":00.0") != 0)
        return -1;
    text += length - 7;
    for (i = 0; i < length - 7; i++) /* the domain is 0 */
        if (*(text - 1 - i) != '0' && *(text - 1 - i) != ':')
            return -1;
    return hex(text[0]) < 0 || hex(text[1]) < 0 ? -1 : hex(text[0]) * 16 + hex(text[1]);
}

EXPORT nvml_return nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, struct handle **device)
{
    int i, bus;

    if (!references)
        return UNINITIALIZED;
    if (!bus_id || !device)
        return INVALID_ARGUMENT;
    bus = parse_bus(bus_id);
    for (i = 0; i < view.gpus; i++)
        if ((int)GPU(&devices[i])->bus == bus)
            return give_handle(&devices[i], device);
    return NOT_FOUND;
}

ALIAS(nvmlDeviceGetHandleByPciBusId, nvmlDeviceGetHandleByPciBusId_v2)

EXPORT nvml_return nvmlDeviceGetIndex(const struct handle *device, unsigned int *index)
{
    REQUIRE(check(device));
    if (!index)
        return INVALID_ARGUMENT;
    *index = device->index;
    return SUCCESS;
}

NUMBER(nvmlDeviceGetMinorNumber, device->gpu)

EXPORT nvml_return nvmlDeviceGetUUID(const struct handle *device, char *uuid, unsigned int length)
{
    REQUIRE(check(device));
    return give(uuid, length, device->mig ? device->mig->uuid : GPU(device)->uuid);
}

EXPORT nvml_return nvmlDeviceGetName(const struct handle *device, char *name, unsigned int length)
{
    char profile[48], text[96];

    REQUIRE(check(device));
    if (!device->mig)
        return give(name, length, GPU(device)->name);
    sim_mig_name(device->mig, profile, sizeof profile);
    snprintf(text, sizeof text, "%s MIG %s", GPU(device)->name, profile);
    return give(name, length, text);
}

NUMBER(nvmlDeviceGetBrand, GPU(device)->brand)

EXPORT nvml_return nvmlDeviceGetSerial(const struct handle *device, char *serial, unsigned int length)
{
    (void)serial;
    (void)length;
    REQUIRE(check_gpu(device));
    return NOT_SUPPORTED;
}

EXPORT nvml_return nvmlDeviceGetCudaComputeCapability(const struct handle *device, int *major, int *minor)
{
    REQUIRE(check(device));
    if (!major || !minor)
        return INVALID_ARGUMENT;
    *major = (int)GPU(device)->major;
    *minor = (int)GPU(device)->minor;
    return SUCCESS;
}

/* nvmlPciInfo_t: the short bus id and the numbers have been there from the start, the two last fields came later. */
struct pci_info {
    char bus_id_short[16];
    unsigned int domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
};

enum { OLD_PCI_INFO = 36 }; /* the size that nvmlPciInfo_v2_t has */

static void fill_pci(const struct sim_gpu *gpu, struct pci_info *info)
{
    memset(info, 0, sizeof *info);
    snprintf(info->bus_id_short, sizeof info->bus_id_short, "0000:%02X:00.0", gpu->bus);
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", gpu->bus);
    info->bus = gpu->bus;
    info->pci_device_id = gpu->pci_device;
    info->pci_subsystem_id = gpu->pci_subsystem;
}

/* Copies only the first `size` bytes: callers of the old names have a shorter struct. */
static nvml_return give_pci(const struct handle *device, void *result, size_t size)
{
    struct pci_info info;

    REQUIRE(check_gpu(device));
    if (!result)
        return INVALID_ARGUMENT;
    fill_pci(GPU(device), &info);
    memcpy(result, &info, size);
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetPciInfo_v3(const struct handle *device, struct pci_info *info)
{
    return give_pci(device, info, sizeof *info);
}

EXPORT nvml_return nvmlDeviceGetPciInfo_v2(const struct handle *device, struct pci_info *info)
{
    return give_pci(device, info, OLD_PCI_INFO);
}

EXPORT nvml_return nvmlDeviceGetPciInfo(const struct handle *device, struct pci_info *info)
{
    return give_pci(device, info, 32);
}

struct memory {
    unsigned long long total, free, used;
};

struct memory_v2 {
    unsigned int version;
    unsigned long long total, reserved, free, used;
};

static unsigned long long total_memory(const struct handle *device)
{
    return device->mig ? PROFILE(device)->memory_mib << 20 : GPU(device)->memory;
}

static unsigned long long used_memory(const struct handle *device)
{
    return (total_memory(device) >> 20) * load_of(device->gpu) / 100 << 20;
}

EXPORT nvml_return nvmlDeviceGetMemoryInfo(const struct handle *device, struct memory *memory)
{
    REQUIRE(check(device));
    if (!memory)
        return INVALID_ARGUMENT;
    memory->total = total_memory(device);
    memory->used = used_memory(device);
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetMemoryInfo_v2(const struct handle *device, struct memory_v2 *memory)
{
    REQUIRE(check(device));
    if (!memory)
        return INVALID_ARGUMENT;
    if (memory->version != (sizeof *memory | 2u << 24))
        return VERSION_MISMATCH;
    memory->total = total_memory(device);
    memory->reserved = 0;
    memory->used = used_memory(device);
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

struct utilization {
    unsigned int gpu, memory;
};

EXPORT nvml_return nvmlDeviceGetUtilizationRates(const struct handle *device, struct utilization *rates)
{
    REQUIRE(check_gpu(device));
    if (!rates)
        return INVALID_ARGUMENT;
    if (MIG_MODE(device))
        return NOT_SUPPORTED;
    rates->gpu = rates->memory = load_of(device->gpu);
    return SUCCESS;
}

static nvml_return give_number(const struct handle *device, unsigned int *result, unsigned int value)
{
    REQUIRE(check_gpu(device));
    if (!result)
        return INVALID_ARGUMENT;
    *result = value;
    return SUCCESS;
}

NUMBER(nvmlDeviceGetPersistenceMode, !no_persistence)

EXPORT nvml_return nvmlDeviceGetTemperature(const struct handle *device, unsigned int sensor, unsigned int *celsius)
{
    REQUIRE(check_gpu(device));
    return sensor ? INVALID_ARGUMENT : give_number(device, celsius, 30 + load_of(device->gpu) / 2);
}

NUMBER(nvmlDeviceGetPowerUsage, watts(device) * 1000) /* a tenth of the limit: idle */
NUMBER(nvmlDeviceGetPowerManagementLimit, GPU(device)->power_watts * 1000)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, GPU(device)->power_watts * 1000)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, GPU(device)->power_watts * 1000)
NUMBER(nvmlDeviceGetPerformanceState, 0)

/* A GPU's compute mode is the one digit of SIM_DIRECTORY/compute-mode.<gpu>, 0 without that file. */
static int open_compute_mode(const struct handle *device, int flags)
{
    char path[sizeof SIM_DIRECTORY + 32];

    snprintf(path, sizeof path, SIM_DIRECTORY "/compute-mode.%d", device->gpu);
    return open(path, flags | O_CLOEXEC, 0644);
}

EXPORT nvml_return nvmlDeviceGetComputeMode(const struct handle *device, unsigned int *mode)
{
    char digit = '0';
    int fd;

    REQUIRE(check_gpu(device));
    fd = open_compute_mode(device, O_RDONLY);
    if (fd >= 0) {
        if (read(fd, &digit, 1) != 1)
            digit = '0';
        close(fd);
    }
    return give_number(device, mode, (unsigned int)(digit - '0'));
}

EXPORT nvml_return nvmlDeviceSetComputeMode(const struct handle *device, unsigned int mode)
{
    char digit = (char)('0' + mode);
    int fd, written;

    REQUIRE(check_gpu(device));
    if (mode > 3)
        return INVALID_ARGUMENT;
    fd = open_compute_mode(device, O_WRONLY | O_CREAT | O_TRUNC);
    if (fd < 0)
        return NO_PERMISSION;
    written = write(fd, &digit, 1) == 1;
    close(fd);
    return written ? SUCCESS : UNKNOWN;
}

static nvml_return no_processes(const struct handle *device, unsigned int *count)
{
    REQUIRE(check(device));
    if (!count)
        return INVALID_ARGUMENT;
    *count = 0;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetComputeRunningProcesses_v3(const struct handle *device, unsigned int *count, void *list)
{
    REQUIRE(check(device));
    return count ? give_processes(device, count, list) : INVALID_ARGUMENT;
}

ALIAS(nvmlDeviceGetComputeRunningProcesses_v2, nvmlDeviceGetComputeRunningProcesses_v3)

EXPORT nvml_return nvmlDeviceGetGraphicsRunningProcesses_v3(const struct handle *device, unsigned int *count, void *list)
{
    (void)list;
    return no_processes(device, count);
}

ALIAS(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlDeviceGetGraphicsRunningProcesses_v3)

EXPORT nvml_return nvmlDeviceGetMigMode(const struct handle *device, unsigned int *current, unsigned int *pending)
{
    REQUIRE(check_gpu(device));
    if (!current || !pending)
        return INVALID_ARGUMENT;
    if (!SIM_PROFILES)
        return NOT_SUPPORTED;
    refresh();
    *current = *pending = (unsigned int)MIG_MODE(device);
    if (mig_pending[device->gpu])
        *pending = !*current;
    return SUCCESS;
}

NUMBER(nvmlDeviceGetMaxMigDeviceCount, SIM_PROFILES ? sim_profiles[0].most : 0)

EXPORT nvml_return nvmlDeviceIsMigDeviceHandle(const struct handle *device, unsigned int *is_mig)
{
    REQUIRE(check(device));
    if (!is_mig)
        return INVALID_ARGUMENT;
    *is_mig = device->mig != NULL;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetMigDeviceHandleByIndex(const struct handle *device, unsigned int index, struct handle **mig)
{
    int i;

    REQUIRE(check_gpu(device));
    if (!mig)
        return INVALID_ARGUMENT;
    if (!SIM_PROFILES)
        return NOT_SUPPORTED;
    refresh();
    for (i = 0; i < sim_count; i++) {
        struct handle *found = slot(&sim_instances[i]);

        if (is_instance(found, 0) && found->gpu == device->gpu && found->index == index) {
            *mig = found;
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

EXPORT nvml_return nvmlDeviceGetDeviceHandleFromMigDeviceHandle(const struct handle *mig, struct handle **device)
{
    int i;

    REQUIRE(check(mig));
    if (!device || !mig->mig)
        return INVALID_ARGUMENT;
    for (i = 0; i < view.gpus; i++)
        if (devices[i].gpu == mig->gpu)
            *device = &devices[i];
    return SUCCESS;
}

static nvml_return check_mig(const struct handle *device)
{
    nvml_return result = check(device);

    return result == SUCCESS && !device->mig ? INVALID_ARGUMENT : result;
}

EXPORT nvml_return nvmlDeviceGetGpuInstanceId(const struct handle *device, unsigned int *id)
{
    REQUIRE(check_mig(device));
    if (!id)
        return INVALID_ARGUMENT;
    *id = (unsigned int)device->mig->gi;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetComputeInstanceId(const struct handle *device, unsigned int *id)
{
    REQUIRE(check_mig(device));
    if (!id)
        return INVALID_ARGUMENT;
    *id = (unsigned int)device->mig->ci;
    return SUCCESS;
}

static unsigned int multiprocessors(const struct sim_profile *profile, int slices)
{
    return profile->multiprocessors * (unsigned int)slices / profile->slices;
}

/* nvmlDeviceAttributes_t */
struct attributes {
    unsigned int multiprocessors, copy_engines, decoders, encoders, jpegs, ofas, gi_slices, ci_slices;
    unsigned long long memory_mib;
};

EXPORT nvml_return nvmlDeviceGetAttributes_v2(const struct handle *device, struct attributes *attributes)
{
    REQUIRE(check_mig(device));
    if (!attributes)
        return INVALID_ARGUMENT;
    attributes->multiprocessors = multiprocessors(PROFILE(device), device->mig->ci_slices);
    memcpy(&attributes->copy_engines, PROFILE(device)->engines, sizeof PROFILE(device)->engines);
    attributes->gi_slices = PROFILE(device)->slices;
    attributes->ci_slices = (unsigned int)device->mig->ci_slices;
    attributes->memory_mib = PROFILE(device)->memory_mib;
    return SUCCESS;
}

ALIAS(nvmlDeviceGetAttributes, nvmlDeviceGetAttributes_v2)

/* Events: the critical XIDs that the lines "xid" of the file of faults stand for. */

#define XID_CRITICAL 8ULL /* nvmlEventTypeXidCriticalError */

struct event_data { /* nvmlEventData_t */
    struct handle *device;
    unsigned long long type, data;
    unsigned int gpu_instance, compute_instance;
};

static struct event_set {
    int used, seen; /* lines that were there before, or were given out */
    char watched[SIM_GPUS];
} event_sets[32];

static int is_event_set(const struct event_set *set)
{
    size_t at = (size_t)((const char *)set - (const char *)event_sets);

    return at < sizeof event_sets && at % sizeof *set == 0 && set->used;
}

static unsigned int instance(char *text, char **end)
{
    unsigned long value = strtoul(text, end, 10);

    return *end == text ? 0xFFFFFFFFU : (unsigned int)value;
}

/* Find the line "xid" of this number, counted from 0, and return whether there is one. */
static int find_xid(int wanted, int *gpu, struct event_data *event)
{
    char text[4096], *line;

    if (!read_text(SIM_DIRECTORY "/faults", text, sizeof text))
        return 0;
    for (line = text; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        char *rest = line + 4;

        if (strncmp(line, "xid ", 4) != 0 || wanted-- > 0 || !strchr(line, '\n'))
            continue;
        *strchr(line, '\n') = 0;
        *gpu = (int)instance(rest, &rest);
        event->data = instance(rest, &rest);
        event->gpu_instance = instance(rest, &rest);
        event->compute_instance = instance(rest, &rest);
        return 1;
    }
    return 0;
}

EXPORT nvml_return nvmlEventSetCreate(struct event_set **result)
{
    struct event_set *set = event_sets;
    struct event_data event;
    int gpu;

    if (!references)
        return UNINITIALIZED;
    while (set->used)
        if (++set == event_sets + sizeof event_sets / sizeof *set)
            return INSUFFICIENT_RESOURCES;
    *set = (struct event_set){.used = 1};
    while (find_xid(set->seen, &gpu, &event))
        set->seen++;
    *result = set;
    return SUCCESS;
}

EXPORT nvml_return nvmlEventSetFree(struct event_set *set)
{
    if (!is_event_set(set))
        return INVALID_ARGUMENT;
    set->used = 0;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetSupportedEventTypes(struct handle *device, unsigned long long *types)
{
    REQUIRE(check_gpu(device));
    *types = XID_CRITICAL;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceRegisterEvents(struct handle *device, unsigned long long types, struct event_set *set)
{
    REQUIRE(check_gpu(device));
    if (!is_event_set(set) || types != XID_CRITICAL)
        return INVALID_ARGUMENT;
    set->watched[device->gpu] = 1;
    return SUCCESS;
}

EXPORT nvml_return nvmlEventSetWait_v2(struct event_set *set, struct event_data *event, unsigned int milliseconds)
{
    unsigned int waited;
    int gpu, i;

    if (!is_event_set(set))
        return INVALID_ARGUMENT;
    for (waited = 0;; waited += 50) {
        while (find_xid(set->seen, &gpu, event)) {
            set->seen++;
            for (i = 0; i < view.gpus; i++) {
                if ((unsigned int)gpu != devices[i].index || !set->watched[devices[i].gpu])
                    continue;
                event->device = &devices[i];
                event->type = XID_CRITICAL;
                return SUCCESS;
            }
        }
        if (waited >= milliseconds)
            return TIMEOUT;
        usleep(1000 * (milliseconds - waited < 50 ? milliseconds - waited : 50));
    }
}

ALIAS(nvmlEventSetWait, nvmlEventSetWait_v2)

#include "nvml_metrics.c"
#include "nvml_mig.c"
#include "nvml_topology.c"

/* The rest: programs look them up by name, and take this for an answer. */
static nvml_return not_supported(void) { return references ? NOT_SUPPORTED : UNINITIALIZED; }

#define UNSUPPORTED(name) EXPORT nvml_return name(void) __attribute__((alias("not_supported")));
#include "unsupported.h"
