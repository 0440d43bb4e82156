/* What exporters ask NVML for; part of nvml.c.
 *
 * GPUs are idle, but for those that lines "load <gpu> <percent>" of the file DIRECTORY/load name; its lines
 * "process <gpu> <pid> <MiB> <percent> [<gpu instance>]" are processes, and "memory <gpu> <MiB>" is what is in use.
 * nvmlInit fails with any other line.
 * Counters of errors are 0. Numbers of fields and of GPM's metrics are those of nvml.h.
 */
#include <sys/time.h>

/* Return how busy a GPU is, in percent; read again each time. */
static unsigned int load_of(int gpu) {
    const char *rest;
    int load = 0;

    SIM_EACH_LINE("/load", "load ", rest)
        if (sim_number(&rest) == gpu)
            load = sim_number(&rest);
    return load > 100 ? 100 : (unsigned int)load;
}

#define LOAD(device) load_of((device)->gpu)

/* Return whether a line of DIRECTORY/load has the form of one of its words, or is empty or a comment. */
static int is_load_line(const char *line) {
    static const struct {
        const char *word;
        int least, most, percent; /* numbers behind the word, and which of them is a share of 100 */
    } forms[] = {{"load ", 2, 2, 1}, {"memory ", 2, 2, -1}, {"process ", 4, 5, 3}};
    int count = 0;

    for (unsigned int i = 0; i < sizeof forms / sizeof *forms; i++) {
        if (strncmp(line, forms[i].word, strlen(forms[i].word)) != 0)
            continue;
        for (line += strlen(forms[i].word); *line; count++) {
            size_t digits = strspn(line, "0123456789");
            int number;

            if (!digits || digits > 8 || (line[digits] && (line[digits] != ' ' || !line[digits + 1])))
                return 0;
            number = sim_number(&line);
            if ((!count && number >= sim_table.gpus) || (count == forms[i].percent && number > 100))
                return 0;
        }
        return count >= forms[i].least && count <= forms[i].most;
    }
    return !*line || *line == '#';
}

/* Say on standard error which line of DIRECTORY/load is wrong, and return whether one is. */
static int is_load_bad(void) {
    char lines[4096], *text = sim_read_text(SIM_BELOW("/load"), lines, sizeof lines);
    const char *line;

    for (int number = 1; (line = sim_next_line(&text, "")); number++)
        if (!is_load_line(line)) {
            fprintf(stderr,
                    "simulated NVML: %s: line %d: \"%.80s\": expected \"load GPU PERCENT\", \"memory GPU MIB\" or "
                    "\"process GPU PID MIB PERCENT [INSTANCE]\", with a GPU from 0 to %d\n",
                    SIM_BELOW("/load"), number, line, sim_table.gpus - 1);
            return 1;
        }
    return 0;
}
#define AMPERE(device) (GPU(device)->major >= 8)
#define HOPPER(device) (GPU(device)->major >= 9)

/* A mode of a GPU is the number in DIRECTORY/<mode>.<gpu>; without that file it is the usual one. */
static int open_mode(const char *mode, device_t device, int flags) {
    char name[40];

    snprintf(name, sizeof name, "/%s.%d", mode, device->gpu);
    return open(SIM_BELOW(name), flags | O_CLOEXEC, 0644);
}

static unsigned int read_mode(const char *mode, device_t device, unsigned int usual) {
    int fd = open_mode(mode, device, O_RDONLY);
    char number[16] = "";
    const char *digits = number;

    if (fd >= 0) {
        if (read(fd, number, sizeof number - 1) > 0)
            usual = (unsigned int)sim_number(&digits);
        close(fd);
    }
    return usual;
}

/* Return the power limit in milliwatts. */
static unsigned int power_limit(device_t device) {
    return read_mode("power-limit", device, GPU(device)->power_watts * 1000);
}

static unsigned int milliwatts(device_t device) {
    unsigned int most = GPU(device)->power_watts, limit = power_limit(device);
    unsigned int drawn = (most / 10 + most * 9 / 10 * LOAD(device) / 100) * 1000;

    return drawn < limit ? drawn : limit;
}

static unsigned long long milliseconds(void) {
    struct timeval now;

    gettimeofday(&now, NULL);
    return (unsigned long long)now.tv_sec * 1000 + (unsigned long long)now.tv_usec / 1000;
}

#define SINCE_2024 (milliseconds() - 1704067200000ull) /* what counts up has done so since, and never goes back */

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

/* Fill at most `most` records of the list that is given with the processes of a GPU or MIG device, and return how many
 * it has. */
static unsigned int list_processes(device_t device, unsigned int most, struct process *list,
                                   struct process_time *times) {
    unsigned int found = 0;
    const char *rest;

    SIM_EACH_LINE("/load", "process ", rest) {
        unsigned int pid, mib, percent, gi;

        if (sim_number(&rest) != device->gpu)
            continue;
        pid = (unsigned int)sim_number(&rest);
        mib = (unsigned int)sim_number(&rest);
        percent = (unsigned int)sim_number(&rest);
        gi = *rest ? (unsigned int)sim_number(&rest) : 0xFFFFFFFFU;
        if (device->mig && gi != 0xFFFFFFFFU && (int)gi != device->mig->gi)
            continue;
        if (found < most && list)
            list[found] = (struct process){pid, (unsigned long long)mib << 20, gi, gi == 0xFFFFFFFFU ? gi : 0};
        if (found < most && times)
            times[found] = (struct process_time){pid, milliseconds() * 1000, percent, 0, 0, 0};
        found++;
    }
    return found;
}

/* Return whether a process uses a GPU, or a GPU instance. */
static int used_by_process(int gpu, int gi) {
    const char *rest;
    int used = 0;

    SIM_EACH_LINE("/load", "process ", rest) {
        if (sim_number(&rest) != gpu)
            continue;
        for (int i = 0; i < 3; i++)
            sim_number(&rest);
        used |= gi < 0 || (*rest && sim_number(&rest) == gi);
    }
    return used;
}

EXPORT nvml_return nvmlDeviceGetProcessUtilization(device_t device, struct process_time *times, unsigned int *count,
                                                   unsigned long long since) {
    unsigned int room = times ? *count : 0;

    REQUIRE(ask_gpu(device, 1));
    *count = list_processes(device, room, NULL, times);
    return *count > room ? INSUFFICIENT_SIZE : *count ? SUCCESS : NOT_FOUND;
}

static const unsigned int idle_mhz[] = {345, 345, 1593, 765}, busy_mhz[] = {1980, 1980, 2619, 1545};

ANSWER(nvmlDeviceGetClockInfo, (device_t device, unsigned int type, unsigned int *result),
       ask_gpu(device, type <= 3 && result), LOAD(device) ? busy_mhz[type] : idle_mhz[type])
/* as if it had been idle all the time */
ANSWER(nvmlDeviceGetTotalEnergyConsumption, (device_t device, unsigned long long *result), ask_gpu(device, !!result),
       SINCE_2024 * (GPU(device)->power_watts / 10))
ANSWER(nvmlDeviceGetEncoderUtilization, (device_t device, unsigned int *result, unsigned int *period),
       ASK_IF(!MIG_MODE(device), device, result && period), (*period = 167000, 0))
ANSWER(nvmlDeviceGetDecoderUtilization, (device_t device, unsigned int *result, unsigned int *period),
       ASK_IF(!MIG_MODE(device), device, result && period), (*period = 167000, 0))
NUMBER(nvmlDeviceGetPcieReplayCounter, 0)
ANSWER(nvmlDeviceGetPcieThroughput, (device_t device, unsigned int counter, unsigned int *result),
       ask_gpu(device, counter <= 1 && result), 100 + LOAD(device) * 10000)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, HOPPER(device) ? 5 : AMPERE(device) ? 4 : 3)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, HOPPER(device) ? 5 : AMPERE(device) ? 4 : 3)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, 16)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, 16)

struct violation {
    unsigned long long reference_us, violation_ns;
};

ANSWER(nvmlDeviceGetViolationStatus, (device_t device, unsigned int policy, struct violation *result),
       ask_gpu(device, policy <= 11 && result), ((struct violation){milliseconds() * 1000, 0}))
ANSWER(nvmlDeviceGetCurrentClocksEventReasons, (device_t device, unsigned long long *result),
       ask_gpu(device, !!result), LOAD(device) == 100 ? 4 : LOAD(device) ? 0 : 1) /* power cap, nothing, idle */
ALIAS(nvmlDeviceGetCurrentClocksThrottleReasons, nvmlDeviceGetCurrentClocksEventReasons)
ANSWER(nvmlDeviceGetTotalEccErrors,
       (device_t device, unsigned int type, unsigned int counter, unsigned long long *result),
       ask_gpu(device, type <= 1 && counter <= 1 && result), 0)

/* Pages are retired before Ampere, rows are remapped since. */
ANSWER(nvmlDeviceGetRetiredPages,
       (device_t device, unsigned int cause, unsigned int *result, unsigned long long *addresses),
       ASK_IF(!AMPERE(device), device, !!result), 0)
ANSWER(nvmlDeviceGetRetiredPagesPendingStatus, (device_t device, unsigned int *result),
       ASK_IF(!AMPERE(device), device, !!result), 0)
ANSWER(nvmlDeviceGetRemappedRows,
       (device_t device, unsigned int *result, unsigned int *uncorrectable, unsigned int *pending, unsigned int *failed),
       ASK_IF(AMPERE(device), device, result && uncorrectable && pending && failed),
       *uncorrectable = *pending = *failed = 0)

EXPORT nvml_return nvmlDeviceGetVbiosVersion(device_t device, char *version, unsigned int length) {
    REQUIRE(ask_gpu(device, 1));
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

#define ALL_LINKS 0xffffffffu /* scope of a field: UINT_MAX (nvml.h, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX) */

enum { FIELD_UNSIGNED_INT = 1, FIELD_UNSIGNED_LONG_LONG = 3 };

static void give_field(device_t device, struct field_value *field) {
    field->result = sim_table.nvlinks ? SUCCESS : NOT_SUPPORTED;
    field->type = FIELD_UNSIGNED_LONG_LONG;
    field->value.counter = 0;
    switch (field->field) {
    case 82: /* the memory's temperature */
        field->type = FIELD_UNSIGNED_INT;
        field->value.number = 35 + LOAD(device) * 4 / 10;
        break;
    case 38: case 45: case 52: case 59: /* NVLink's errors */
        break;
    case 138: case 139: /* what went over one NVLink or all, in KiB */
        field->value.counter = SINCE_2024 * 4;
        if (field->scope == ALL_LINKS)
            break;
        if (field->scope >= (unsigned int)sim_table.nvlinks)
            field->result = NOT_SUPPORTED;
        else
            field->value.counter /= (unsigned int)sim_table.nvlinks;
        break;
    default:
        field->result = NOT_SUPPORTED;
    }
}

EXPORT nvml_return nvmlDeviceGetFieldValues(device_t device, int count, struct field_value *fields) {
    REQUIRE(ask_gpu(device, count >= 1 && fields));
    while (count--)
        give_field(device, fields++);
    return SUCCESS;
}

/* GPM: two samples and what happened between them. */

struct gpm_support {
    unsigned int version, supported;
};

struct gpm_sample {
    int gpu, whole;
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

EXPORT nvml_return nvmlGpmQueryDeviceSupport(device_t device, struct gpm_support *support) {
    REQUIRE(ask_gpu(device, 1));
    support->supported = HOPPER(device);
    return SUCCESS;
}

EXPORT nvml_return nvmlGpmSampleAlloc(struct gpm_sample **sample) {
    *sample = calloc(1, sizeof **sample);
    return *sample ? SUCCESS : MEMORY;
}

EXPORT nvml_return nvmlGpmSampleFree(struct gpm_sample *sample) {
    free(sample);
    return SUCCESS;
}

ANSWER(nvmlGpmSampleGet, (device_t device, struct gpm_sample *result), ASK_IF(HOPPER(device), device, 1),
       ((struct gpm_sample){device->gpu, 1}))
ANSWER(nvmlGpmMigSampleGet, (device_t device, unsigned int instance, struct gpm_sample *result),
       ASK_IF(HOPPER(device), device, 1) ?: instance < SIM_GIS && instances[device->gpu][instance][0].mig
                                                ? SUCCESS
                                                : INVALID_ARGUMENT,
       ((struct gpm_sample){device->gpu, 0}))

EXPORT nvml_return nvmlGpmMetricsGet(struct gpm_metrics *metrics) {
    unsigned int i, load;

    REQUIRE(ask(1));
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
