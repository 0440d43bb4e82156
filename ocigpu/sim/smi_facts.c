/* What nvidia-smi knows of a GPU, as text without unit, each from the function of NVML that other programs call; NULL:
 * NVML does not say.  Part of smi.c.
 */

/* Return a text that stays valid until 64 others have been made. */
static const char *text(const char *format, ...) {
    static char texts[64][256];
    static unsigned int next;
    char *made = texts[next++ % 64];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(made, sizeof texts[0], format, arguments);
    va_end(arguments);
    return made;
}

/* From this branch on the versions have other names in the texts for people, as github.com/utkuozdemir/nvidia_gpu_exporter
 * recorded them (internal/captures); --query-gpu knows the old ones. */
enum { RENAMED = 610 };

static int branch(void) { return sim_number(&(const char *){sim_table.driver_version}); }

static const char *cuda_version(void) {
    return text("%d.%d", sim_table.cuda_version / 1000, sim_table.cuda_version % 1000 / 10);
}

/* A function that asks NVML about a GPU, for what `got` is filled with. */
#define FACT(name, type, ask, ...)                               \
    static const char *name(device_t gpu) {                      \
        type got = {0};                                          \
                                                                 \
        return (ask) == SUCCESS ? text(__VA_ARGS__) : NULL;      \
    }
#define COUNTED(name, ask) FACT(name, unsigned int, ask, "%u", got)
#define SWITCHED(name, ask, yes, no) FACT(name, unsigned int, ask, "%s", got ? yes : no)
#define MIB(name, type, ask, field) FACT(name, type, ask, "%llu", got.field >> 20)
#define WATTS_OF(milliwatts) (milliwatts) / 1000, (milliwatts) % 1000 / 10 /* in a format such as "%u.%02u" */
#define WATTS(name, ask) FACT(name, unsigned int, ask, "%u.%02u", WATTS_OF(got))
#define WORDS(name, ask) FACT(name, struct words, ask, "%s", got.text)

struct words {
    char text[96];
};

struct two {
    unsigned int first, second;
};

COUNTED(fact_index, nvmlDeviceGetIndex(gpu, &got))
WORDS(fact_name, nvmlDeviceGetName(gpu, got.text, sizeof got.text))
WORDS(fact_uuid, nvmlDeviceGetUUID(gpu, got.text, sizeof got.text))
WORDS(fact_driver, nvmlSystemGetDriverVersion(got.text, sizeof got.text))
WORDS(fact_serial, nvmlDeviceGetSerial(gpu, got.text, sizeof got.text))
WORDS(fact_vbios, nvmlDeviceGetVbiosVersion(gpu, got.text, sizeof got.text))
WORDS(fact_gsp, nvmlDeviceGetGspFirmwareVersion(gpu, got.text))
FACT(fact_capability, struct two, nvmlDeviceGetCudaComputeCapability(gpu, (int *)&got.first, (int *)&got.second),
     "%u.%u", got.first, got.second)
COUNTED(fact_minor, nvmlDeviceGetMinorNumber(gpu, &got))
COUNTED(fact_module, nvmlDeviceGetModuleId(gpu, &got))
FACT(fact_board, unsigned int, nvmlDeviceGetBoardId(gpu, &got), "0x%x", got)
SWITCHED(fact_multi_board, nvmlDeviceGetMultiGpuBoard(gpu, &got), "Yes", "No")
SWITCHED(fact_display, nvmlDeviceGetDisplayMode(gpu, &got), "Enabled", "Disabled")
SWITCHED(fact_display_active, nvmlDeviceGetDisplayActive(gpu, &got), "Enabled", "Disabled")
SWITCHED(fact_persistence, nvmlDeviceGetPersistenceMode(gpu, &got), "Enabled", "Disabled")
SWITCHED(fact_accounting, nvmlDeviceGetAccountingMode(gpu, &got), "Enabled", "Disabled")
COUNTED(fact_accounting_size, nvmlDeviceGetAccountingBufferSize(gpu, &got))
SWITCHED(fact_virtualization, nvmlDeviceGetVirtualizationMode(gpu, &got), "Pass-Through", "None")
SWITCHED(fact_mig, nvmlDeviceGetMigMode(gpu, &got, &(unsigned int){0}), "Enabled", "Disabled")
SWITCHED(fact_mig_pending, nvmlDeviceGetMigMode(gpu, &(unsigned int){0}, &got), "Enabled", "Disabled")
SWITCHED(fact_ecc, nvmlDeviceGetEccMode(gpu, &got, &(unsigned int){0}), "Enabled", "Disabled")
SWITCHED(fact_ecc_pending, nvmlDeviceGetEccMode(gpu, &(unsigned int){0}, &got), "Enabled", "Disabled")

static const char *fact_count(device_t gpu) {
    return text("%d", view.gpus);
}

static const char *fact_timestamp(device_t gpu) {
    struct timeval now;
    char day[32];

    gettimeofday(&now, NULL);
    strftime(day, sizeof day, "%Y/%m/%d %H:%M:%S", localtime(&now.tv_sec));
    return text("%s.%03d", day, (int)(now.tv_usec / 1000));
}

static const char *fact_brand(device_t gpu) {
    return GEFORCE(gpu) ? "GeForce" : GPU(gpu)->brand == 2 ? "Tesla" : GPU(gpu)->brand ? "NVIDIA" : NULL;
}

static const char *fact_architecture(device_t gpu) {
    static const char *const names[] = {"Turing", "Ampere", "Ada Lovelace", "Hopper", "Blackwell"}; /* from 6 on */
    unsigned int got;

    return nvmlDeviceGetArchitecture(gpu, &got) == SUCCESS && got >= 6 && got <= 10 ? names[got - 6] : NULL;
}

static const char *fact_compute_mode(device_t gpu) {
    static const char *const names[] = {"Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process"};
    unsigned int got;

    return nvmlDeviceGetComputeMode(gpu, &got) == SUCCESS && got <= 3 ? names[got] : NULL;
}

static const char *fact_addressing(device_t gpu) {
    struct addressing_mode got = {.version = sizeof got | 1u << 24};

    return nvmlDeviceGetAddressingMode(gpu, &got) == SUCCESS ? got.value == 2 ? "ATS" : "None" : NULL;
}

static const char *fact_fabric(device_t gpu) {
    struct fabric got;

    return nvmlDeviceGetGpuFabricInfo(gpu, &got) == SUCCESS ? got.state == 3 ? "Completed" : "In Progress" : NULL;
}

FACT(fact_bus_id, struct pci_info, nvmlDeviceGetPciInfo_v3(gpu, &got), "%s", got.bus_id)
FACT(fact_domain, struct pci_info, nvmlDeviceGetPciInfo_v3(gpu, &got), "0x%04X", got.domain)
FACT(fact_bus, struct pci_info, nvmlDeviceGetPciInfo_v3(gpu, &got), "0x%02X", got.bus)
FACT(fact_slot, struct pci_info, nvmlDeviceGetPciInfo_v3(gpu, &got), "0x%02X", got.device)
FACT(fact_device_id, struct pci_info, nvmlDeviceGetPciInfo_v3(gpu, &got), "0x%08X", got.pci_device_id)
FACT(fact_subsystem, struct pci_info, nvmlDeviceGetPciInfo_v3(gpu, &got), "0x%08X", got.pci_subsystem_id)
COUNTED(fact_pcie, nvmlDeviceGetCurrPcieLinkGeneration(gpu, &got))
COUNTED(fact_pcie_most, nvmlDeviceGetMaxPcieLinkGeneration(gpu, &got))
COUNTED(fact_width, nvmlDeviceGetCurrPcieLinkWidth(gpu, &got))
COUNTED(fact_width_most, nvmlDeviceGetMaxPcieLinkWidth(gpu, &got))
COUNTED(fact_replays, nvmlDeviceGetPcieReplayCounter(gpu, &got))
COUNTED(fact_sent, nvmlDeviceGetPcieThroughput(gpu, 0, &got))
COUNTED(fact_received, nvmlDeviceGetPcieThroughput(gpu, 1, &got))

MIB(fact_memory, struct memory, nvmlDeviceGetMemoryInfo(gpu, &got), total)
MIB(fact_memory_used, struct memory, nvmlDeviceGetMemoryInfo(gpu, &got), used)
MIB(fact_memory_free, struct memory, nvmlDeviceGetMemoryInfo(gpu, &got), free)

static const char *fact_memory_reserved(device_t gpu) {
    struct memory_v2 got = {.version = sizeof got | 2u << 24};

    return nvmlDeviceGetMemoryInfo_v2(gpu, &got) == SUCCESS ? text("%llu", got.reserved >> 20) : NULL;
}

MIB(fact_bar1, struct bar1_memory, nvmlDeviceGetBAR1MemoryInfo(gpu, &got), total)
MIB(fact_bar1_used, struct bar1_memory, nvmlDeviceGetBAR1MemoryInfo(gpu, &got), used)
MIB(fact_bar1_free, struct bar1_memory, nvmlDeviceGetBAR1MemoryInfo(gpu, &got), free)

FACT(fact_busy, struct utilization, nvmlDeviceGetUtilizationRates(gpu, &got), "%u", got.gpu)
FACT(fact_memory_busy, struct utilization, nvmlDeviceGetUtilizationRates(gpu, &got), "%u", got.memory)
COUNTED(fact_encoder, nvmlDeviceGetEncoderUtilization(gpu, &got, &(unsigned int){0}))
COUNTED(fact_decoder, nvmlDeviceGetDecoderUtilization(gpu, &got, &(unsigned int){0}))
COUNTED(fact_jpeg, nvmlDeviceGetJpgUtilization(gpu, &got, &(unsigned int){0}))
COUNTED(fact_ofa, nvmlDeviceGetOfaUtilization(gpu, &got, &(unsigned int){0}))
COUNTED(fact_sessions, nvmlDeviceGetEncoderStats(gpu, &got, &(unsigned int){0}, &(unsigned int){0}))
COUNTED(fact_frames, nvmlDeviceGetEncoderStats(gpu, &(unsigned int){0}, &got, &(unsigned int){0}))
COUNTED(fact_latency, nvmlDeviceGetEncoderStats(gpu, &(unsigned int){0}, &(unsigned int){0}, &got))

COUNTED(fact_temperature, nvmlDeviceGetTemperature(gpu, 0, &got))
COUNTED(fact_shutdown, nvmlDeviceGetTemperatureThreshold(gpu, 0, &got))
COUNTED(fact_slowdown, nvmlDeviceGetTemperatureThreshold(gpu, 1, &got))
COUNTED(fact_memory_hottest, nvmlDeviceGetTemperatureThreshold(gpu, 2, &got))
COUNTED(fact_hottest, nvmlDeviceGetTemperatureThreshold(gpu, 3, &got))
COUNTED(fact_fan, nvmlDeviceGetFanSpeed(gpu, &got))
FACT(fact_state, unsigned int, nvmlDeviceGetPerformanceState(gpu, &got), "P%u", got)

static const char *fact_memory_temperature(device_t gpu) {
    struct field_value got = {.field = 82};

    return nvmlDeviceGetFieldValues(gpu, 1, &got) == SUCCESS && got.result == SUCCESS ? text("%u", got.value.number)
                                                                                      : NULL;
}

WATTS(fact_power, nvmlDeviceGetPowerUsage(gpu, &got))
WATTS(fact_limit, nvmlDeviceGetPowerManagementLimit(gpu, &got))
WATTS(fact_limit_enforced, nvmlDeviceGetEnforcedPowerLimit(gpu, &got))
WATTS(fact_limit_default, nvmlDeviceGetPowerManagementDefaultLimit(gpu, &got))
WATTS(fact_limit_least, nvmlDeviceGetPowerManagementLimitConstraints(gpu, &got, &(unsigned int){0}))
WATTS(fact_limit_most, nvmlDeviceGetPowerManagementLimitConstraints(gpu, &(unsigned int){0}, &got))

/* Clocks: graphics, SM, memory, video */
COUNTED(fact_clock_graphics, nvmlDeviceGetClockInfo(gpu, 0, &got))
COUNTED(fact_clock_sm, nvmlDeviceGetClockInfo(gpu, 1, &got))
COUNTED(fact_clock_memory, nvmlDeviceGetClockInfo(gpu, 2, &got))
COUNTED(fact_clock_video, nvmlDeviceGetClockInfo(gpu, 3, &got))
COUNTED(fact_most_graphics, nvmlDeviceGetMaxClockInfo(gpu, 0, &got))
COUNTED(fact_most_sm, nvmlDeviceGetMaxClockInfo(gpu, 1, &got))
COUNTED(fact_most_memory, nvmlDeviceGetMaxClockInfo(gpu, 2, &got))
COUNTED(fact_most_video, nvmlDeviceGetMaxClockInfo(gpu, 3, &got))
COUNTED(fact_boost, nvmlDeviceGetMaxCustomerBoostClock(gpu, 0, &got))
COUNTED(fact_application_graphics, nvmlDeviceGetApplicationsClock(gpu, 0, &got))
COUNTED(fact_application_memory, nvmlDeviceGetApplicationsClock(gpu, 2, &got))
COUNTED(fact_default_graphics, nvmlDeviceGetDefaultApplicationsClock(gpu, 0, &got))
COUNTED(fact_default_memory, nvmlDeviceGetDefaultApplicationsClock(gpu, 2, &got))

/* Why clocks are low: the bits of nvmlClocksEventReasons. */
FACT(fact_reasons, unsigned long long, nvmlDeviceGetCurrentClocksEventReasons(gpu, &got), "0x%016llX", got)
#define REASON(name, bit)                                                                            \
    FACT(name, unsigned long long, nvmlDeviceGetCurrentClocksEventReasons(gpu, &got), "%s",          \
         got & (bit) ? "Active" : "Not Active")
REASON(fact_idle, 0x1)
REASON(fact_setting, 0x2)
REASON(fact_power_cap, 0x4)
REASON(fact_hardware, 0x8)
REASON(fact_sync_boost, 0x10)
REASON(fact_software_thermal, 0x20)
REASON(fact_hardware_thermal, 0x40)
REASON(fact_power_brake, 0x80)
REASON(fact_display_clocks, 0x100)

/* Errors of memory: kind 0 corrected, 1 not; since 0 the driver was loaded, 1 ever. */
#define ERRORS(name, kind, since) \
    FACT(name, unsigned long long, nvmlDeviceGetTotalEccErrors(gpu, kind, since, &got), "%llu", got)
ERRORS(fact_corrected, 0, 0)
ERRORS(fact_uncorrected, 1, 0)
ERRORS(fact_corrected_ever, 0, 1)
ERRORS(fact_uncorrected_ever, 1, 1)

struct rows {
    unsigned int corrected, uncorrected, pending, failed;
};

#define ROWS(name, format, value)                                                                              \
    FACT(name, struct rows,                                                                                    \
         nvmlDeviceGetRemappedRows(gpu, &got.corrected, &got.uncorrected, &got.pending, &got.failed), format, value)
ROWS(fact_rows_corrected, "%u", got.corrected)
ROWS(fact_rows_uncorrected, "%u", got.uncorrected)
ROWS(fact_rows_pending, "%s", got.pending ? "Yes" : "No")
ROWS(fact_rows_failed, "%s", got.failed ? "Yes" : "No")

COUNTED(fact_retired_single, nvmlDeviceGetRetiredPages(gpu, 0, &got, NULL))
COUNTED(fact_retired_double, nvmlDeviceGetRetiredPages(gpu, 1, &got, NULL))
SWITCHED(fact_retired_pending, nvmlDeviceGetRetiredPagesPendingStatus(gpu, &got), "Yes", "No")

/* What the processes of a GPU are. */

enum { MOST_PROCESSES = 128 };

/* Fill a list of at least MOST_PROCESSES; return how many it holds. */
static unsigned int find_processes(device_t gpu, struct process *list) {
    unsigned int count = MOST_PROCESSES;
    nvml_return code = nvmlDeviceGetComputeRunningProcesses_v3(gpu, &count, list);

    return code == INSUFFICIENT_SIZE ? MOST_PROCESSES : code == SUCCESS ? count : 0;
}

/* Return a process's name; its characters are the process's own choice, so only printable ones are kept. */
static const char *process_name(unsigned int pid) {
    char name[256];

    if (nvmlSystemGetProcessName(pid, name, sizeof name) != SUCCESS)
        return "[Not Found]";
    for (char *c = name; *c; c++)
        if (*c < ' ' || *c > '~')
            *c = '?';
    return text("%s", name);
}
