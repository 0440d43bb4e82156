/* NVML of a simulated host: answers from the table, for the GPUs whose node this process may open.
 *
 * Struct layouts, return codes and versioned names are those of NVIDIA's NVML API reference and nvml.h.
 *
 * Faults for tests: OCIGPU_SIM_NVML_FAIL=<code> makes nvmlInit return that code, and a file DIRECTORY/faults, read
 * by nvmlInit and nvmlDeviceGetCount, has lines "init <code>", "lost <gpu>", "mig-pending <gpu>" (its MIG mode changes
 * with the next reset), "mig-busy <gpu>" (a change of its MIG mode needs a reset), "no-persistence" or "hang".  "xid <gpu> <number>" [<gpu instance> <compute instance>] is an
 * event for whoever waits for one while the line is added.
 */
#include "simhost.h"

/* nvmlReturn_t, and what nvmlErrorString says. */
#define CODES(X)                                                                                                \
    X(SUCCESS, 0, "Success")                                                                                    \
    X(UNINITIALIZED, 1, "Uninitialized")                                                                        \
    X(INVALID_ARGUMENT, 2, "Invalid Argument")                                                                  \
    X(NOT_SUPPORTED, 3, "Not Supported")                                                                        \
    X(NO_PERMISSION, 4, "Insufficient Permissions")                                                             \
    X(NOT_FOUND, 6, "Not Found")                                                                                \
    X(INSUFFICIENT_SIZE, 7, "Insufficient Size")                                                                \
    X(DRIVER_NOT_LOADED, 9, "Driver Not Loaded")                                                                \
    X(TIMEOUT, 10, "Timeout")                                                                                   \
    X(LIBRARY_NOT_FOUND, 12, "NVML Shared Library Not Found")                                                   \
    X(FUNCTION_NOT_FOUND, 13, "Function Not Found")                                                             \
    X(GPU_IS_LOST, 15, "GPU is lost")                                                                           \
    X(OPERATING_SYSTEM, 17, "The operating system has blocked the request.")                                    \
    X(LIB_RM_VERSION_MISMATCH, 18, "Driver/library version mismatch")                                           \
    X(IN_USE, 19, "In use by another client")                                                                   \
    X(MEMORY, 20, "Unknown Error")                                                                              \
    X(INSUFFICIENT_RESOURCES, 23, "Insufficient Resources")                                                     \
    X(VERSION_MISMATCH, 25, "Argument version mismatch") /* NVML_ERROR_ARGUMENT_VERSION_MISMATCH */             \
    X(UNKNOWN, 999, "Unknown Error")
#define NUMBERED(name, number, text) name = number,
#define WORDED(name, number, text) \
    if (code == number)            \
        return text;

enum { CODES(NUMBERED) };

typedef int nvml_return;

/* What an nvmlDevice_t points to: a GPU, or a MIG device when mig is set; nvmlGpuInstance_t and nvmlComputeInstance_t
 * point to one with mig set as well. A MIG device is its compute instance. */
struct handle {
    int gpu;                   /* index into sim_table.gpu[] */
    unsigned int index;        /* NVML's index */
    const struct sim_instance *mig;
};
typedef const struct handle *device_t;

EXPORT const char ocigpu_simulated[] = "This is a library of a simulated GPU host: there is no GPU behind it.";

static struct sim_view view;
static struct handle devices[SIM_MOST_GPUS];
static struct handle instances[SIM_MOST_GPUS][SIM_GIS][1 + SIM_CIS]; /* first the GPU instance; mig NULL: none */
static int references;
static int lost[SIM_MOST_GPUS], mig_pending[SIM_MOST_GPUS], mig_busy[SIM_MOST_GPUS], no_persistence;
static int fabric_state, fabric_status;

/* Fill what the lines of the file of faults that have a word say of GPUs. */
static void read_marks(const char *word, int *marks) {
    const char *rest;

    memset(marks, 0, SIM_MOST_GPUS * sizeof *marks);
    SIM_EACH_LINE("/faults", word, rest) {
        unsigned int gpu = (unsigned int)sim_number(&rest);

        if (gpu < SIM_MOST_GPUS)
            marks[gpu] = 1;
    }
}

/* Read DIRECTORY/faults and return the code that nvmlInit fails with, 0 for none. */
static int read_faults(void) {
    const char *rest;
    int code = 0;

    SIM_EACH_LINE("/faults", "hang", rest)
        while (!*rest)
            pause();
    read_marks("lost ", lost);
    read_marks("mig-pending ", mig_pending);
    read_marks("mig-busy ", mig_busy);
    no_persistence = 0;
    SIM_EACH_LINE("/faults", "no-persistence", rest)
        no_persistence |= !*rest;
    fabric_state = 3; /* NVML_GPU_FABRIC_STATE_COMPLETED */
    fabric_status = 0;
    SIM_EACH_LINE("/faults", "fabric ", rest) {
        fabric_state = sim_number(&rest);
        fabric_status = sim_number(&rest);
    }
    SIM_EACH_LINE("/faults", "init ", rest)
        code = sim_number(&rest);
    return code;
}

static struct handle *slot(const struct sim_instance *mig) { return &instances[mig->gpu][mig->gi][1 + mig->ci]; }

/* Fill the handles of the instances that this process may use. */
static void find_instances(void) {
    unsigned int counts[SIM_MOST_GPUS] = {0};
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
static void refresh(void) {
    if (sim_load())
        find_instances();
}

static int is_load_bad(void);

static nvml_return initialize(void) {
    const char *failure = getenv("OCIGPU_SIM_NVML_FAIL");
    int code, i;

    if (references) {
        references++;
        return SUCCESS;
    }
    if (failure && *failure)
        return sim_number(&failure);
    code = read_faults();
    if (code)
        return code;
    if (!sim_look(&view))
        return DRIVER_NOT_LOADED;
    if (is_load_bad())
        return INVALID_ARGUMENT;
    for (i = 0; i < view.gpus; i++)
        devices[i] = (struct handle){view.gpu[i], (unsigned int)i, NULL};
    sim_load();
    find_instances();
    references = 1;
    return SUCCESS;
}

EXPORT nvml_return nvmlInit_v2(void) { return initialize(); }
EXPORT nvml_return nvmlInit(void) { return initialize(); }
EXPORT nvml_return nvmlInitWithFlags(unsigned int flags) { return initialize(); }

EXPORT nvml_return nvmlShutdown(void) {
    if (!references)
        return UNINITIALIZED;
    references--;
    return SUCCESS;
}

EXPORT const char *nvmlErrorString(nvml_return code) {
    CODES(WORDED)
    return "Unknown Error";
}

/* Copy text with its final NUL; INSUFFICIENT_SIZE when it does not fit. */
static nvml_return give(char *buffer, unsigned int length, const char *text) {
    size_t size = strlen(text) + 1;

    if (!buffer || size > length)
        return buffer ? INSUFFICIENT_SIZE : INVALID_ARGUMENT;
    memcpy(buffer, text, size);
    return SUCCESS;
}

/* Return whether a handle is an instance's: a GPU instance's for the first of its row. */
static int is_instance(device_t handle, int of_gpu) {
    size_t at = (size_t)((const char *)handle - (const char *)instances);

    return at < sizeof instances && at % sizeof *handle == 0 && handle->mig && (handle->mig->ci < 0) == of_gpu;
}

/* Check that there is somebody to ask, and what is asked. */
static nvml_return ask(int valid) { return !references ? UNINITIALIZED : valid ? SUCCESS : INVALID_ARGUMENT; }

#define REQUIRE(call)                  \
    do {                               \
        nvml_return required = (call); \
        if (required != SUCCESS)       \
            return required;           \
    } while (0)

/* Check that a handle is one we gave out, that its GPU answers, and that the other arguments are valid. */
static nvml_return ask_any(device_t device, int valid) {
    int i, known = is_instance(device, 0);

    for (i = 0; i < view.gpus; i++)
        known |= device == &devices[i];
    REQUIRE(ask(known));
    return lost[device->gpu] ? GPU_IS_LOST : valid ? SUCCESS : INVALID_ARGUMENT;
}

/* As ask_any, about a whole GPU; of one that is not on PCI (Orin) NVML knows little more than its name. */
static nvml_return ask_gpu(device_t device, int valid) {
    REQUIRE(ask_any(device, 1));
    return device->mig || !sim_table.gpu[device->gpu].bus ? NOT_SUPPORTED : valid ? SUCCESS : INVALID_ARGUMENT;
}

/* As ask_any, about a MIG device. */
static nvml_return ask_mig(device_t device, int valid) {
    REQUIRE(ask_any(device, 1));
    return device->mig && valid ? SUCCESS : INVALID_ARGUMENT;
}

#define GPU(device) (&sim_table.gpu[(device)->gpu])
#define PROFILE(device) (&sim_table.profile[(device)->mig->profile])
#define MIG_MODE(device) (sim_mig_mode[(device)->gpu])

/* As ask_gpu, for what only some GPUs answer; a macro, because what is asked of the device counts once it is known. */
#define ASK_IF(supported, device, valid) (ask_gpu(device, valid) ?: (supported) ? SUCCESS : NOT_SUPPORTED)

/* The same function under an earlier name. */
#define ALIAS(name, function) extern EXPORT __typeof__(function) name __attribute__((alias(#function)));

/* A function that checks its parameters and then answers with one value. */
#define ANSWER(name, parameters, check, value) \
    EXPORT nvml_return name parameters         \
    {                                          \
        REQUIRE(check);                        \
        *result = (value);                     \
        return SUCCESS;                        \
    }
/* One that answers with a number about a whole GPU. */
#define NUMBER(name, value) ANSWER(name, (device_t device, unsigned int *result), ask_gpu(device, !!result), value)

#include "nvml_metrics.c"
#include "nvml_limits.c"

EXPORT nvml_return nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    return references ? give(version, length, sim_table.driver_version) : UNINITIALIZED;
}

EXPORT nvml_return nvmlSystemGetNVMLVersion(char *version, unsigned int length) {
    return references ? give(version, length, sim_table.nvml_version) : UNINITIALIZED;
}

/* The two answer without nvmlInit, as the real ones do. */
ANSWER(nvmlSystemGetCudaDriverVersion, (int *result), result ? SUCCESS : INVALID_ARGUMENT, sim_table.cuda_version)
ALIAS(nvmlSystemGetCudaDriverVersion_v2, nvmlSystemGetCudaDriverVersion)

EXPORT nvml_return nvmlDeviceGetCount_v2(unsigned int *count) {
    REQUIRE(ask(!!count));
    read_faults(); /* whoever watches the GPUs for long sees them come and go */
    *count = (unsigned int)view.gpus;
    return SUCCESS;
}

ALIAS(nvmlDeviceGetCount, nvmlDeviceGetCount_v2)

static nvml_return give_handle(struct handle *device, struct handle **result) {
    REQUIRE(ask_any(device, 1));
    *result = device;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetHandleByIndex_v2(unsigned int index, struct handle **device) {
    REQUIRE(ask(device && index < (unsigned int)view.gpus));
    return give_handle(&devices[index], device);
}

ALIAS(nvmlDeviceGetHandleByIndex, nvmlDeviceGetHandleByIndex_v2)

EXPORT nvml_return nvmlDeviceGetHandleByUUID(const char *uuid, struct handle **device) {
    REQUIRE(ask(uuid && device));
    for (int i = 0; i < view.gpus; i++)
        if (strcmp(GPU(&devices[i])->uuid, uuid) == 0)
            return give_handle(&devices[i], device);
    refresh();
    for (int i = 0; i < sim_count; i++)
        if (strcmp(sim_instances[i].uuid, uuid) == 0 && slot(&sim_instances[i])->mig)
            return give_handle(slot(&sim_instances[i]), device);
    return NOT_FOUND;
}

static int hex(char c) {
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Return the number of "0000:01:00.0", "00000000:01:00.0" or "01:00.0" as sim_gpu has it, -1 for anything else. */
static int parse_bus(const char *text) {
    size_t length = strlen(text), i;
    int number = 0;

    if (length < 7 || length > 16 || strcmp(text + length - 5, ":00.0") != 0)
        return -1;
    for (i = 0; i < length - 5; i++) {
        if (text[i] == ':' && i == length - 8)
            continue;
        if (hex(text[i]) < 0 || number > 0xFFFFFF)
            return -1;
        number = number * 16 + hex(text[i]);
    }
    return number;
}

EXPORT nvml_return nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, struct handle **device) {
    REQUIRE(ask(bus_id && device));
    for (int i = 0; i < view.gpus; i++)
        if ((int)GPU(&devices[i])->bus == parse_bus(bus_id))
            return give_handle(&devices[i], device);
    return NOT_FOUND;
}

ALIAS(nvmlDeviceGetHandleByPciBusId, nvmlDeviceGetHandleByPciBusId_v2)

ANSWER(nvmlDeviceGetIndex, (device_t device, unsigned int *result), ask_any(device, !!result), device->index)
NUMBER(nvmlDeviceGetMinorNumber, device->gpu)
NUMBER(nvmlDeviceGetBrand, GPU(device)->brand)

EXPORT nvml_return nvmlDeviceGetUUID(device_t device, char *uuid, unsigned int length) {
    REQUIRE(ask_any(device, 1));
    return give(uuid, length, device->mig ? device->mig->uuid : GPU(device)->uuid);
}

EXPORT nvml_return nvmlDeviceGetName(device_t device, char *name, unsigned int length) {
    char profile[48], text[96];

    REQUIRE(ask_any(device, 1));
    if (!device->mig)
        return give(name, length, GPU(device)->name);
    sim_mig_name(device->mig, profile, sizeof profile);
    snprintf(text, sizeof text, "%s MIG %s", GPU(device)->name, profile);
    return give(name, length, text);
}

EXPORT nvml_return nvmlDeviceGetSerial(device_t device, char *serial, unsigned int length) {
    return ASK_IF(0, device, 1);
}

EXPORT nvml_return nvmlDeviceGetCudaComputeCapability(device_t device, int *major, int *minor) {
    REQUIRE(ask_any(device, major && minor));
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

static void fill_pci(const struct sim_gpu *gpu, struct pci_info *info) {
    memset(info, 0, sizeof *info);
    snprintf(info->bus_id_short, sizeof info->bus_id_short, "%04X:%02X:00.0", SIM_BUS(gpu));
    snprintf(info->bus_id, sizeof info->bus_id, "%08X:%02X:00.0", SIM_BUS(gpu));
    info->domain = gpu->bus >> 8;
    info->bus = gpu->bus & 0xFF;
    info->pci_device_id = gpu->pci_device;
    info->pci_subsystem_id = gpu->pci_subsystem;
}

/* Copies only the first `size` bytes: callers of the old names have a shorter struct. */
#define PCI_INFO(name, size)                                 \
    EXPORT nvml_return name(device_t device, void *result)   \
    {                                                        \
        struct pci_info info;                                \
                                                             \
        REQUIRE(ask_gpu(device, !!result));                  \
        fill_pci(GPU(device), &info);                        \
        memcpy(result, &info, size);                         \
        return SUCCESS;                                      \
    }
PCI_INFO(nvmlDeviceGetPciInfo_v3, sizeof info)
PCI_INFO(nvmlDeviceGetPciInfo_v2, OLD_PCI_INFO)
PCI_INFO(nvmlDeviceGetPciInfo, 32)

struct memory {
    unsigned long long total, free, used;
};

struct memory_v2 {
    unsigned int version;
    unsigned long long total, reserved, free, used;
};

/* The share of memory in use is the share of time, unless a line "memory" says how much of a whole GPU's it is. */
static struct memory memory_of(device_t device) {
    unsigned long long total = device->mig ? PROFILE(device)->memory_mib << 20 : GPU(device)->memory;
    unsigned long long used = (total >> 20) * load_of(device->gpu) / 100 << 20, said;
    const char *rest;

    SIM_EACH_LINE("/load", "memory ", rest)
        if (sim_number(&rest) == device->gpu && !device->mig) {
            said = (unsigned long long)sim_number(&rest) << 20;
            used = said < total ? said : total;
        }
    return (struct memory){total, total - used, used};
}

/* NVML has no memory of GPUs that share the processor's (GB10, Tegra). */
#define ASK_MEMORY(device, valid) (ask_any(device, valid) ?: GPU(device)->memory ? SUCCESS : NOT_SUPPORTED)

ANSWER(nvmlDeviceGetMemoryInfo, (device_t device, struct memory *result), ASK_MEMORY(device, !!result),
       memory_of(device))

EXPORT nvml_return nvmlDeviceGetMemoryInfo_v2(device_t device, struct memory_v2 *memory) {
    struct memory plain;

    REQUIRE(ASK_MEMORY(device, !!memory));
    if (memory->version != (sizeof *memory | 2u << 24))
        return VERSION_MISMATCH;
    plain = memory_of(device);
    *memory = (struct memory_v2){memory->version, plain.total, 0, plain.free, plain.used};
    return SUCCESS;
}

struct utilization {
    unsigned int gpu, memory;
};

ANSWER(nvmlDeviceGetUtilizationRates, (device_t device, struct utilization *result),
       ASK_IF(!MIG_MODE(device), device, !!result), ((struct utilization){load_of(device->gpu), load_of(device->gpu)}))
ANSWER(nvmlDeviceGetTemperature, (device_t device, unsigned int sensor, unsigned int *result),
       ask_gpu(device, !sensor && result), 30 + load_of(device->gpu) / 2)
NUMBER(nvmlDeviceGetPowerUsage, milliwatts(device)) /* a tenth of the limit: idle */
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, GPU(device)->power_watts * 1000)
NUMBER(nvmlDeviceGetPerformanceState, 0)

static nvml_return write_mode(const char *mode, device_t device, unsigned int value) {
    char number[16];
    int fd = open_mode(mode, device, O_WRONLY | O_CREAT | O_TRUNC), size, written;

    if (fd < 0)
        return NO_PERMISSION;
    size = snprintf(number, sizeof number, "%u", value);
    written = write(fd, number, (size_t)size) == size;
    close(fd);
    return written ? SUCCESS : UNKNOWN;
}

NUMBER(nvmlDeviceGetComputeMode, read_mode("compute-mode", device, 0))
NUMBER(nvmlDeviceGetPersistenceMode, read_mode("persistence-mode", device, !no_persistence))

EXPORT nvml_return nvmlDeviceSetComputeMode(device_t device, unsigned int mode) {
    REQUIRE(ask_gpu(device, mode <= 3));
    return write_mode("compute-mode", device, mode);
}

EXPORT nvml_return nvmlDeviceSetPersistenceMode(device_t device, unsigned int mode) {
    REQUIRE(ask_gpu(device, mode <= 1));
    return write_mode("persistence-mode", device, mode);
}

NUMBER(nvmlDeviceGetPowerManagementLimit, power_limit(device))
NUMBER(nvmlDeviceGetEnforcedPowerLimit, power_limit(device))

EXPORT nvml_return nvmlDeviceSetPowerManagementLimit(device_t device, unsigned int milliwatts) {
    unsigned int least, most;

    REQUIRE(nvmlDeviceGetPowerManagementLimitConstraints(device, &least, &most));
    return milliwatts < least || milliwatts > most ? INVALID_ARGUMENT : write_mode("power-limit", device, milliwatts);
}

EXPORT nvml_return nvmlDeviceGetComputeRunningProcesses_v3(device_t device, unsigned int *count, struct process *list) {
    unsigned int room = list && count ? *count : 0;

    REQUIRE(ask_any(device, !!count));
    *count = list_processes(device, room, list, NULL);
    return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}

ALIAS(nvmlDeviceGetComputeRunningProcesses_v2, nvmlDeviceGetComputeRunningProcesses_v3)
ANSWER(nvmlDeviceGetGraphicsRunningProcesses_v3, (device_t device, unsigned int *result, void *list),
       ask_any(device, !!result), 0)
ALIAS(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlDeviceGetGraphicsRunningProcesses_v3)

EXPORT nvml_return nvmlDeviceGetMigMode(device_t device, unsigned int *current, unsigned int *pending) {
    REQUIRE(ASK_IF(sim_table.profiles, device, current && pending));
    refresh();
    *current = *pending = (unsigned int)MIG_MODE(device);
    if (mig_pending[device->gpu])
        *pending = !*current;
    else if (sim_mig_pending[device->gpu] >= 0)
        *pending = (unsigned int)sim_mig_pending[device->gpu];
    return SUCCESS;
}

NUMBER(nvmlDeviceGetMaxMigDeviceCount, sim_table.profiles ? sim_table.profile[0].most : 0)
ANSWER(nvmlDeviceIsMigDeviceHandle, (device_t device, unsigned int *result), ask_any(device, !!result),
       device->mig != NULL)

EXPORT nvml_return nvmlDeviceGetMigDeviceHandleByIndex(device_t device, unsigned int index, struct handle **mig) {
    REQUIRE(ASK_IF(sim_table.profiles, device, !!mig));
    refresh();
    for (int i = 0; i < sim_count; i++) {
        struct handle *found = slot(&sim_instances[i]);

        if (is_instance(found, 0) && found->gpu == device->gpu && found->index == index) {
            *mig = found;
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

static struct handle *parent(device_t instance) {
    struct handle *device = devices;

    while (device->gpu != instance->gpu)
        device++;
    return device;
}

ANSWER(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, (device_t device, struct handle **result),
       ask_mig(device, !!result), parent(device))
ANSWER(nvmlDeviceGetGpuInstanceId, (device_t device, unsigned int *result), ask_mig(device, !!result), device->mig->gi)
ANSWER(nvmlDeviceGetComputeInstanceId, (device_t device, unsigned int *result), ask_mig(device, !!result),
       device->mig->ci)

/* nvmlDeviceAttributes_t */
struct attributes {
    unsigned int multiprocessors, engines[5], gi_slices, ci_slices;
    unsigned long long memory_mib;
};

EXPORT nvml_return nvmlDeviceGetAttributes_v2(device_t device, struct attributes *attributes) {
    REQUIRE(ask_mig(device, !!attributes));
    attributes->multiprocessors =
        sim_multiprocessors(PROFILE(device), device->mig->ci_slices, device->mig->ci_profile);
    memcpy(attributes->engines, PROFILE(device)->engines, sizeof attributes->engines);
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
    char watched[SIM_MOST_GPUS];
} event_sets[32];

static int is_event_set(const struct event_set *set) {
    size_t at = (size_t)((const char *)set - (const char *)event_sets);

    return at < sizeof event_sets && at % sizeof *set == 0 && set->used;
}

static unsigned int instance(const char **text) {
    const char *start = *text;
    int value = sim_number(text);

    return *text == start ? 0xFFFFFFFFU : (unsigned int)value;
}

/* Find the line "xid" of this number, counted from 0, and return whether there is one that is complete. */
static int find_xid(int wanted, unsigned int *gpu, struct event_data *event) {
    const char *rest;

    SIM_EACH_LINE("/faults", "xid ", rest) {
        if (wanted-- > 0 || !text)
            continue;
        *gpu = instance(&rest);
        event->data = instance(&rest);
        event->gpu_instance = instance(&rest);
        event->compute_instance = instance(&rest);
        return 1;
    }
    return 0;
}

EXPORT nvml_return nvmlEventSetCreate(struct event_set **result) {
    struct event_set *set = event_sets;
    struct event_data event;
    unsigned int gpu;

    REQUIRE(ask(1));
    while (set->used)
        if (++set == event_sets + sizeof event_sets / sizeof *set)
            return INSUFFICIENT_RESOURCES;
    *set = (struct event_set){.used = 1};
    while (find_xid(set->seen, &gpu, &event))
        set->seen++;
    *result = set;
    return SUCCESS;
}

EXPORT nvml_return nvmlEventSetFree(struct event_set *set) {
    if (!is_event_set(set))
        return INVALID_ARGUMENT;
    set->used = 0;
    return SUCCESS;
}

ANSWER(nvmlDeviceGetSupportedEventTypes, (device_t device, unsigned long long *result), ask_gpu(device, 1),
       XID_CRITICAL)

EXPORT nvml_return nvmlDeviceRegisterEvents(device_t device, unsigned long long types, struct event_set *set) {
    REQUIRE(ask_gpu(device, is_event_set(set) && types == XID_CRITICAL));
    set->watched[device->gpu] = 1;
    return SUCCESS;
}

EXPORT nvml_return nvmlEventSetWait_v2(struct event_set *set, struct event_data *event, unsigned int milliseconds) {
    unsigned int waited, gpu;

    if (!is_event_set(set))
        return INVALID_ARGUMENT;
    for (waited = 0;; waited += 50) {
        while (find_xid(set->seen, &gpu, event)) {
            set->seen++;
            if (gpu < (unsigned int)view.gpus && set->watched[devices[gpu].gpu]) {
                event->device = &devices[gpu];
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

#include "nvml_mig.c"
#include "nvml_topology.c"

/* The rest: programs look them up by name, and take this for an answer. */
static nvml_return not_supported(void) { return references ? NOT_SUPPORTED : UNINITIALIZED; }

#define UNSUPPORTED(name) EXPORT nvml_return name(void) __attribute__((alias("not_supported")));
#include "unsupported.h"
