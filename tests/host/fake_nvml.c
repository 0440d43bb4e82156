/* An NVML with the faults that tests ask for at compile time; numbers and layouts are those of nvml.h.
 *
 * GPUS: how many.  INIT: what nvmlInit_v2 returns.  LOST: index whose handle cannot be had.  HALF: index whose UUID
 * cannot be had.  MIG: index with MIG devices at 0, 2 and (without an answer) 3 of at most 7.  CRASH, HANG, NOISE:
 * what nvmlInit_v2 does.  WHO: nvmlSystemGetDriverVersion tells ids, capabilities and environment instead.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#ifndef GPUS
#define GPUS 2
#endif
#ifndef INIT
#define INIT 0
#endif
#ifndef LOST
#define LOST -1
#endif
#ifndef HALF
#define HALF -1
#endif
#ifndef MIG
#define MIG -1
#endif
#ifndef VERSION
#define VERSION "550.163.01"
#endif

static int gpus[GPUS + 1], migs[8];

int nvmlInit_v2(void)
{
#ifdef CRASH
    raise(SIGSEGV);
#endif
#ifdef HANG
    for (;;)
        pause();
#endif
#ifdef NOISE
    printf("noise on standard output\n");
    fflush(stdout);
    fprintf(stderr, "noise on standard error\n");
#endif
    return INIT;
}

const char *nvmlErrorString(int code)
{
    return code == 15 ? "GPU is lost" : code == 18 ? "Driver/library version mismatch" : "Some error";
}

int nvmlSystemGetDriverVersion(char *text, unsigned size)
{
#ifdef WHO
    char line[256], caps[32] = "?";
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status))
        if (sscanf(line, "CapEff: %31s", caps) == 1)
            break;
    snprintf(text, size, "%d,%d,%s,%d,%d", getuid(), getgid(), caps, prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0),
             getenv("HOME") != NULL || getenv("LD_PRELOAD") != NULL);
#else
    snprintf(text, size, "%s", VERSION);
#endif
    return 0;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = 12040, 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { return *count = GPUS, 0; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    if ((int)index == LOST)
        return 15;
    *device = &gpus[index];
    return 0;
}

static int index_of(void *device) { return (int)((int *)device - gpus); }
static int is_mig(void *device) { return (int *)device >= migs && (int *)device < migs + 8; }
static int mig_of(void *device) { return (int)((int *)device - migs); }

int nvmlDeviceGetPciInfo_v3(void *device, char *info)
{
    unsigned numbers[3] = {0, 0x10 + (unsigned)index_of(device), 0};
    memcpy(info + 16, numbers, sizeof numbers);
    return 0;
}

int nvmlDeviceGetUUID(void *device, char *text, unsigned size)
{
    if (is_mig(device)) {
        if (mig_of(device) == 3)
            return 999;
        snprintf(text, size, "MIG-%08d-0000-0000-0000-000000000000", mig_of(device));
        return 0;
    }
    if (index_of(device) == HALF)
        return 15;
    snprintf(text, size, "GPU-%08d-0000-0000-0000-000000000000", index_of(device));
    return 0;
}

int nvmlDeviceGetMinorNumber(void *device, unsigned *minor) { return *minor = GPUS - 1 - index_of(device), 0; }

int nvmlDeviceGetName(void *device, char *text, unsigned size)
{
    snprintf(text, size, is_mig(device) ? "Fake GPU MIG 1g.10gb" : "Fake GPU");
    return 0;
}

int nvmlDeviceGetBrand(void *device, unsigned *brand) { return *brand = 2, 0; }
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { return *major = 9, *minor = 0, 0; }

#ifdef ADDRESSING
int nvmlDeviceGetAddressingMode(void *device, unsigned *version_and_value)
{
    if (version_and_value[0] != 0x1000008)
        return 25;
    version_and_value[1] = index_of(device) == 0 ? ADDRESSING : 0;
    return 0;
}
#endif

int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending)
{
    if (MIG < 0)
        return 3;
    *current = *pending = index_of(device) == MIG;
    return 0;
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) { return *count = 7, 0; }

int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **mig)
{
    if (index != 0 && index != 2 && index != 3)
        return 6;
    *mig = &migs[index];
    return 0;
}

int nvmlDeviceGetGpuInstanceId(void *mig, unsigned *id) { return *id = 7 + (unsigned)mig_of(mig), 0; }
int nvmlDeviceGetComputeInstanceId(void *mig, unsigned *id) { return *id = 0, 0; }
