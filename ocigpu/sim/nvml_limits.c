/* What a board allows and has: clocks, thresholds, ECC, fan, media engines; part of nvml.c.
 *
 * The numbers are usual ones, the same for every model of a kind: data centre boards are passively cooled and have
 * ECC; GeForce boards have a fan, and a BAR1 of 256 MiB as long as it is not resized.
 */

#define GEFORCE(device) (GPU(device)->brand == 5) /* NVML_BRAND_GEFORCE */
#define HAS_ECC(device) (!GEFORCE(device) && GPU(device)->memory)

ANSWER(nvmlDeviceGetMaxClockInfo, (device_t device, unsigned int type, unsigned int *result),
       ask_gpu(device, type <= 3 && result), busy_mhz[type])
ALIAS(nvmlDeviceGetMaxCustomerBoostClock, nvmlDeviceGetMaxClockInfo)
ANSWER(nvmlDeviceGetApplicationsClock, (device_t device, unsigned int type, unsigned int *result),
       ASK_IF(!GEFORCE(device), device, type <= 3 && result), busy_mhz[type])
ALIAS(nvmlDeviceGetDefaultApplicationsClock, nvmlDeviceGetApplicationsClock)

EXPORT nvml_return nvmlDeviceGetPowerManagementLimitConstraints(device_t device, unsigned int *least,
                                                                unsigned int *most) {
    REQUIRE(ask_gpu(device, least && most));
    *most = GPU(device)->power_watts * 1000;
    *least = *most / 4;
    return SUCCESS;
}

/* shutdown, slowdown, of the memory, of the GPU */
static const unsigned int thresholds[] = {92, 89, 95, 85};

ANSWER(nvmlDeviceGetTemperatureThreshold, (device_t device, unsigned int kind, unsigned int *result),
       ASK_IF(kind <= 3, device, !!result), thresholds[kind])
ANSWER(nvmlDeviceGetFanSpeed, (device_t device, unsigned int *result), ASK_IF(GEFORCE(device), device, !!result),
       30 + LOAD(device) / 2)

ANSWER(nvmlDeviceGetEccMode, (device_t device, unsigned int *result, unsigned int *pending),
       ASK_IF(HAS_ECC(device), device, result && pending), *pending = 1)

struct bar1_memory { /* nvmlBAR1Memory_t */
    unsigned long long total, free, used;
};

static unsigned long long bar1_of(const struct sim_gpu *gpu) {
    unsigned long long size = 256ull << 20;

    while (gpu->brand == 14 && size < gpu->memory) /* NVML_BRAND_NVIDIA: all of the memory, as a power of two */
        size *= 2;
    return size;
}

ANSWER(nvmlDeviceGetBAR1MemoryInfo, (device_t device, struct bar1_memory *result),
       ASK_IF(GPU(device)->memory, device, !!result),
       ((struct bar1_memory){bar1_of(GPU(device)), bar1_of(GPU(device)) - (1 << 20), 1 << 20}))

ANSWER(nvmlDeviceGetJpgUtilization, (device_t device, unsigned int *result, unsigned int *period),
       ASK_IF(!MIG_MODE(device), device, result && period), (*period = 167000, 0))
ALIAS(nvmlDeviceGetOfaUtilization, nvmlDeviceGetJpgUtilization)
ANSWER(nvmlDeviceGetEncoderStats,
       (device_t device, unsigned int *result, unsigned int *frames, unsigned int *latency),
       ask_gpu(device, result && frames && latency), *frames = *latency = 0)

NUMBER(nvmlDeviceGetDisplayMode, 0)
NUMBER(nvmlDeviceGetDisplayActive, 0)
NUMBER(nvmlDeviceGetAccountingMode, 0)
NUMBER(nvmlDeviceGetAccountingBufferSize, 4000)
NUMBER(nvmlDeviceGetBoardId, GPU(device)->bus << 8)
NUMBER(nvmlDeviceGetVirtualizationMode, 0)

EXPORT nvml_return nvmlDeviceGetGspFirmwareVersion(device_t device, char *version) {
    REQUIRE(ask_gpu(device, !!version));
    strcpy(version, sim_table.driver_version); /* the caller has NVML_GSP_FIRMWARE_VERSION_BUF_SIZE, 64 */
    return SUCCESS;
}

/* A process's name is the first word of its command line, of any length: what does not fit is cut. */
EXPORT nvml_return nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length) {
    char path[32];

    REQUIRE(ask(name && length));
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    return sim_read_text(path, name, length) && *name ? SUCCESS : NOT_FOUND;
}
