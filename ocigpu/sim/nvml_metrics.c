/* What monitoring asks NVML for; part of nvml.c.
 *
 * GPUs are idle, but for those that lines "load <gpu> <percent>" of the file SIM_DIRECTORY/load name; its lines
 * "process <gpu> <pid> <MiB> <percent>" are processes. Counters of errors are 0. Numbers of fields and of GPM's metrics
 * are those of nvml.h.
 */
#include <sys/time.h>

/* Return how busy a GPU is, in percent; read anew each time. */
static unsigned int load_of(int gpu)
{
    char text[2048], *line;
    unsigned int load = 0;

    if (!read_text(SIM_DIRECTORY "/load", text, sizeof text))
        return 0;
    for (line = text; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        char *rest = line + 5;

        if (strncmp(line, "load ", 5) == 0 && (int)strtoul(rest, &rest, 10) == gpu)
            load = (unsigned int)strtoul(rest, &rest, 10);
    }
    return load > 100 ? 100 : load;
}

#define LOAD(device) load_of((device)->gpu)
#define AMPERE(device) (GPU(device)->major >= 8)
#define HOPPER(device) (GPU(device)->major >= 9)

static unsigned int watts(const struct handle *device)
{
    unsigned int limit = GPU(device)->power_watts;

    return limit / 10 + limit * 9 / 10 * LOAD(device) / 100;
}

static unsigned long long milliseconds(void)
{
    struct timeval now;

    gettimeofday(&now, NULL);
    return (unsigned long long)now.tv_sec * 1000 + (unsigned long long)now.tv_usec / 1000;
}

struct process { /* nvmlProcessInfo_v2_t */
    unsigned int pid;
    unsigned long long memory;
    unsigned int gpu_instance, compute_instance;
};

struct process_time { /* nvmlProcessUtilizationSample_t */
    unsigned int pid;
    unsigned long long timestamp_us;
    unsigned int sm, memory, encoder, decoder;
};

/* Fill at most `most` records of the list that is given with a GPU's processes, and return how many processes it has. */
static unsigned int list_processes(int gpu, unsigned int most, struct process *list, struct process_time *times)
{
    char text[2048], *line;
    unsigned int found = 0;

    if (!read_text(SIM_DIRECTORY "/load", text, sizeof text))
        return 0;
    for (line = text; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        char *rest = line + 8;
        unsigned int pid, mib, percent;

        if (strncmp(line, "process ", 8) != 0 || (int)strtoul(rest, &rest, 10) != gpu)
            continue;
        pid = (unsigned int)strtoul(rest, &rest, 10);
        mib = (unsigned int)strtoul(rest, &rest, 10);
        percent = (unsigned int)strtoul(rest, &rest, 10);
        if (found < most && list)
            list[found] = (struct process){pid, (unsigned long long)mib << 20, 0xFFFFFFFFU, 0xFFFFFFFFU};
        if (found < most && times)
            times[found] = (struct process_time){pid, milliseconds() * 1000, percent, 0, 0, 0};
        found++;
    }
    return found;
}

static nvml_return give_processes(const struct handle *device, unsigned int *count, void *list)
{
    unsigned int room = list ? *count : 0;

    *count = list_processes(device->gpu, room, list, NULL);
    return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetProcessUtilization(const struct handle *device, struct process_time *times,
                                                   unsigned int *count, unsigned long long since)
{
    unsigned int room = times ? *count : 0;

    (void)since;
    REQUIRE(check_gpu(device));
    *count = list_processes(device->gpu, room, NULL, times);
    return *count > room ? INSUFFICIENT_SIZE : *count ? SUCCESS : NOT_FOUND;
}

EXPORT nvml_return nvmlDeviceGetClockInfo(const struct handle *device, unsigned int type, unsigned int *mhz)
{
    static const unsigned int idle[] = {345, 345, 1593, 765}, busy[] = {1980, 1980, 2619, 1545};

    REQUIRE(check_gpu(device));
    if (type > 3)
        return INVALID_ARGUMENT;
    return give_number(device, mhz, LOAD(device) ? busy[type] : idle[type]);
}

EXPORT nvml_return nvmlDeviceGetTotalEnergyConsumption(const struct handle *device, unsigned long long *millijoules)
{
    REQUIRE(check_gpu(device));
    if (!millijoules)
        return INVALID_ARGUMENT;
    /* as if it had been idle since a day of 2024, and never negative afterwards */
    *millijoules = (milliseconds() - 1704067200000ull) * (GPU(device)->power_watts / 10);
    return SUCCESS;
}

static nvml_return give_codec(const struct handle *device, unsigned int *value, unsigned int *period)
{
    REQUIRE(check_gpu(device));
    if (!value || !period)
        return INVALID_ARGUMENT;
    if (MIG_MODE(device))
        return NOT_SUPPORTED;
    *value = 0;
    *period = 167000;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetEncoderUtilization(const struct handle *device, unsigned int *value, unsigned int *us)
{
    return give_codec(device, value, us);
}

EXPORT nvml_return nvmlDeviceGetDecoderUtilization(const struct handle *device, unsigned int *value, unsigned int *us)
{
    return give_codec(device, value, us);
}

NUMBER(nvmlDeviceGetPcieReplayCounter, 0)

EXPORT nvml_return nvmlDeviceGetPcieThroughput(const struct handle *device, unsigned int counter, unsigned int *kilobytes)
{
    REQUIRE(check_gpu(device));
    return counter > 1 ? INVALID_ARGUMENT : give_number(device, kilobytes, 100 + LOAD(device) * 10000);
}

NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, HOPPER(device) ? 5 : AMPERE(device) ? 4 : 3)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, HOPPER(device) ? 5 : AMPERE(device) ? 4 : 3)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, 16)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, 16)

struct violation {
    unsigned long long reference_us, violation_ns;
};

EXPORT nvml_return nvmlDeviceGetViolationStatus(const struct handle *device, unsigned int policy, struct violation *time)
{
    REQUIRE(check_gpu(device));
    if (!time || policy > 11)
        return INVALID_ARGUMENT;
    time->reference_us = milliseconds() * 1000;
    time->violation_ns = 0;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetCurrentClocksEventReasons(const struct handle *device, unsigned long long *reasons)
{
    unsigned int load;

    REQUIRE(check_gpu(device));
    if (!reasons)
        return INVALID_ARGUMENT;
    load = LOAD(device);
    *reasons = load == 100 ? 4 : load ? 0 : 1; /* power cap, nothing, idle */
    return SUCCESS;
}

ALIAS(nvmlDeviceGetCurrentClocksThrottleReasons, nvmlDeviceGetCurrentClocksEventReasons)

EXPORT nvml_return nvmlDeviceGetTotalEccErrors(const struct handle *device, unsigned int type, unsigned int counter,
                                               unsigned long long *count)
{
    REQUIRE(check_gpu(device));
    if (!count || type > 1 || counter > 1)
        return INVALID_ARGUMENT;
    *count = 0;
    return SUCCESS;
}

/* Pages are retired before Ampere, rows are remapped since. */
EXPORT nvml_return nvmlDeviceGetRetiredPages(const struct handle *device, unsigned int cause, unsigned int *count,
                                             unsigned long long *addresses)
{
    (void)cause;
    (void)addresses;
    REQUIRE(check_gpu(device));
    return AMPERE(device) ? NOT_SUPPORTED : give_number(device, count, 0);
}

EXPORT nvml_return nvmlDeviceGetRetiredPagesPendingStatus(const struct handle *device, unsigned int *pending)
{
    REQUIRE(check_gpu(device));
    return AMPERE(device) ? NOT_SUPPORTED : give_number(device, pending, 0);
}

EXPORT nvml_return nvmlDeviceGetRemappedRows(const struct handle *device, unsigned int *correctable,
                                             unsigned int *uncorrectable, unsigned int *pending, unsigned int *failed)
{
    REQUIRE(check_gpu(device));
    if (!AMPERE(device))
        return NOT_SUPPORTED;
    if (!correctable || !uncorrectable || !pending || !failed)
        return INVALID_ARGUMENT;
    *correctable = *uncorrectable = *pending = *failed = 0;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetVbiosVersion(const struct handle *device, char *version, unsigned int length)
{
    REQUIRE(check_gpu(device));
    return give(version, length, "00.00.00.00.00");
}

struct field_value {
    unsigned int field, scope;
    long long timestamp_us, latency_us;
    unsigned int type, result;
    union {
        unsigned int number;
        unsigned long long counter;
    } value;
};

enum { FIELD_UNSIGNED_INT = 1, FIELD_UNSIGNED_LONG_LONG = 3 };

static void give_field(const struct handle *device, struct field_value *field)
{
    field->result = SUCCESS;
    field->type = FIELD_UNSIGNED_LONG_LONG;
    field->value.counter = 0;
    switch (field->field) {
    case 82: /* the memory's temperature */
        field->type = FIELD_UNSIGNED_INT;
        field->value.number = 35 + LOAD(device) * 4 / 10;
        field->result = SIM_NVLINKS ? SUCCESS : NOT_SUPPORTED;
        break;
    case 38: case 45: case 52: case 59: /* NVLink's errors */
        field->result = SIM_NVLINKS ? SUCCESS : NOT_SUPPORTED;
        break;
    case 138: case 139: /* what went over NVLink, in KiB */
        field->value.counter = (milliseconds() - 1704067200000ull) * 4;
        field->result = SIM_NVLINKS ? SUCCESS : NOT_SUPPORTED;
        break;
    default:
        field->result = NOT_SUPPORTED;
    }
}

EXPORT nvml_return nvmlDeviceGetFieldValues(const struct handle *device, int count, struct field_value *fields)
{
    REQUIRE(check_gpu(device));
    if (count < 1 || !fields)
        return INVALID_ARGUMENT;
    while (count--)
        give_field(device, fields++);
    return SUCCESS;
}

/* GPM: two samples and what happened between them. */

struct gpm_support {
    unsigned int version, supported;
};

struct gpm_sample {
    int gpu;
    int whole;
};

struct gpm_metric {
    unsigned int id, result;
    double value;
    const char *names[3];
};

struct gpm_metrics {
    unsigned int version, count;
    struct gpm_sample *first, *second;
    struct gpm_metric metrics[];
};

EXPORT nvml_return nvmlGpmQueryDeviceSupport(const struct handle *device, struct gpm_support *support)
{
    REQUIRE(check_gpu(device));
    support->supported = HOPPER(device);
    return SUCCESS;
}

EXPORT nvml_return nvmlGpmSampleAlloc(struct gpm_sample **sample)
{
    *sample = calloc(1, sizeof **sample);
    return *sample ? SUCCESS : 20; /* NVML_ERROR_MEMORY */
}

EXPORT nvml_return nvmlGpmSampleFree(struct gpm_sample *sample)
{
    free(sample);
    return SUCCESS;
}

EXPORT nvml_return nvmlGpmSampleGet(const struct handle *device, struct gpm_sample *sample)
{
    REQUIRE(check_gpu(device));
    if (!HOPPER(device))
        return NOT_SUPPORTED;
    sample->gpu = device->gpu;
    sample->whole = 1;
    return SUCCESS;
}

EXPORT nvml_return nvmlGpmMigSampleGet(const struct handle *device, unsigned int instance, struct gpm_sample *sample)
{
    REQUIRE(nvmlGpmSampleGet(device, sample));
    if (instance >= SIM_GIS || !instances[device->gpu][instance][0].mig)
        return INVALID_ARGUMENT;
    sample->whole = 0;
    return SUCCESS;
}

EXPORT nvml_return nvmlGpmMetricsGet(struct gpm_metrics *metrics)
{
    unsigned int i, load;

    if (!references)
        return UNINITIALIZED;
    if (metrics->version != 1)
        return VERSION_MISMATCH;
    if (metrics->first->gpu != metrics->second->gpu)
        return INVALID_ARGUMENT;
    load = load_of(metrics->second->gpu);
    for (i = 0; i < metrics->count; i++) {
        struct gpm_metric *metric = &metrics->metrics[i];
        int transfer = metric->id >= 20; /* PCIe and NVLink, in MiB/s, of whole GPUs */

        metric->result = transfer && !metrics->second->whole ? NOT_SUPPORTED : SUCCESS;
        metric->value = transfer ? load * 10.0 : load;
    }
    return SUCCESS;
}
