/* How the GPUs of a simulated host are connected; part of nvml.c.
 *
 * Two sockets with half of the GPUs each, two GPUs behind each PCIe switch. NVLinks lead to switches, or
 * (SIM_NVLINK_GROUP) to the other GPUs of a board. Numbers of levels, capabilities and states are those of nvml.h.
 */

enum { SWITCHES = 4, FIRST_SWITCH_BUS = 0xC0 };

NUMBER(nvmlDeviceGetNumaNodeId, GPU(device)->numa)
NUMBER(nvmlDeviceGetModuleId, device->gpu + 1)
NUMBER(nvmlDeviceGetMultiGpuBoard, 0)
NUMBER(nvmlDeviceGetArchitecture, /* NVML_DEVICE_ARCH_TURING 6, AMPERE 7, ADA 8, HOPPER 9, BLACKWELL 10 */
       GPU(device)->major >= 10 ? 10 : HOPPER(device) ? 9 : AMPERE(device) ? GPU(device)->minor == 9 ? 8 : 7 : 6)

static unsigned int common_ancestor(int one, int two)
{
    if (one == two)
        return 0; /* NVML_TOPOLOGY_INTERNAL */
    if (sim_gpus[one].numa != sim_gpus[two].numa)
        return 50; /* SYSTEM */
    return one / 2 == two / 2 ? 10 : 40; /* SINGLE, NODE */
}

EXPORT nvml_return nvmlDeviceGetTopologyCommonAncestor(const struct handle *one, const struct handle *two,
                                                       unsigned int *level)
{
    REQUIRE(check_gpu(one));
    REQUIRE(check_gpu(two));
    if (!level)
        return INVALID_ARGUMENT;
    *level = common_ancestor(one->gpu, two->gpu);
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetTopologyNearestGpus(const struct handle *device, unsigned int level,
                                                    unsigned int *count, struct handle **list)
{
    unsigned int found = 0;
    int i;

    REQUIRE(check_gpu(device));
    if (!count)
        return INVALID_ARGUMENT;
    for (i = 0; i < view.gpus; i++)
        if (device != &devices[i] && common_ancestor(device->gpu, devices[i].gpu) <= level && found++ < *count && list)
            list[found - 1] = &devices[i];
    *count = found;
    return SUCCESS;
}

EXPORT nvml_return nvmlSystemGetTopologyGpuSet(unsigned int cpu, unsigned int *count, struct handle **list)
{
    unsigned int found = 0;
    int i;

    if (!references)
        return UNINITIALIZED;
    if (!count)
        return INVALID_ARGUMENT;
    for (i = 0; i < view.gpus; i++)
        if (GPU(&devices[i])->numa == cpu / SIM_CPUS_OF_NODE && found++ < *count && list)
            list[found - 1] = &devices[i];
    *count = found;
    return SUCCESS;
}

/* Set the bits of what is near a GPU: all CPUs of its socket, or its NUMA node. */
static nvml_return give_set(const struct handle *device, unsigned int size, unsigned long *set, int cpus)
{
    unsigned int node, each = 8 * sizeof *set, bit, last;

    REQUIRE(check_gpu(device));
    if (!size || !set)
        return INVALID_ARGUMENT;
    memset(set, 0, size * sizeof *set);
    node = GPU(device)->numa;
    last = cpus ? (node + 1) * SIM_CPUS_OF_NODE : node + 1;
    for (bit = cpus ? node * SIM_CPUS_OF_NODE : node; bit < last && bit < size * each; bit++)
        set[bit / each] |= 1UL << bit % each;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetCpuAffinity(const struct handle *device, unsigned int size, unsigned long *set)
{
    return give_set(device, size, set, 1);
}

EXPORT nvml_return nvmlDeviceGetCpuAffinityWithinScope(const struct handle *device, unsigned int size,
                                                       unsigned long *set, unsigned int scope)
{
    return scope > 1 ? INVALID_ARGUMENT : give_set(device, size, set, 1);
}

EXPORT nvml_return nvmlDeviceGetMemoryAffinity(const struct handle *device, unsigned int size, unsigned long *set,
                                               unsigned int scope)
{
    return scope > 1 ? INVALID_ARGUMENT : give_set(device, size, set, 0);
}

/* Return the GPU at the other end of a direct NVLink, -1 when there is none. */
static int linked_gpu(int gpu, unsigned int link)
{
    int first, other;

    if (!SIM_NVLINK_GROUP)
        return -1;
    first = gpu - gpu % (SIM_NVLINK_GROUP + !SIM_NVLINK_GROUP);
    other = first + (int)link / SIM_NVLINKS_EACH;
    other += other >= gpu; /* not itself */
    return other < SIM_GPUS ? other : -1;
}

static nvml_return check_link(const struct handle *device, unsigned int link, const void *result)
{
    REQUIRE(check_gpu(device));
    if (!SIM_NVLINKS)
        return NOT_SUPPORTED;
    return !result || link >= SIM_NVLINKS ? INVALID_ARGUMENT : SUCCESS;
}

static unsigned int is_active(const struct handle *device, unsigned int link)
{
    return !SIM_NVLINK_GROUP || linked_gpu(device->gpu, link) >= 0;
}

/* A function that answers with one number about an NVLink. */
#define LINK_NUMBER(name, type, answer)                                                     \
    EXPORT nvml_return name(const struct handle *device, unsigned int link, type *result)   \
    {                                                                                       \
        REQUIRE(check_link(device, link, result));                                          \
        *result = (answer);                                                                 \
        return SUCCESS;                                                                     \
    }

LINK_NUMBER(nvmlDeviceGetNvLinkState, unsigned int, is_active(device, link))
LINK_NUMBER(nvmlDeviceGetNvLinkVersion, unsigned int, GPU(device)->major >= 10 ? 7 : HOPPER(device) ? 6 : 4)
LINK_NUMBER(nvmlDeviceGetNvLinkRemoteDeviceType, unsigned int, SIM_NVLINK_GROUP ? 0 : 2) /* a GPU, a switch */

EXPORT nvml_return nvmlDeviceGetNvLinkCapability(const struct handle *device, unsigned int link,
                                                 unsigned int capability, unsigned int *result)
{
    REQUIRE(check_link(device, link, result));
    *result = capability < 5; /* all but SLI */
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetNvLinkErrorCounter(const struct handle *device, unsigned int link, unsigned int counter,
                                                   unsigned long long *result)
{
    (void)counter;
    REQUIRE(check_link(device, link, result));
    *result = 0;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetNvLinkRemotePciInfo_v2(const struct handle *device, unsigned int link,
                                                       struct pci_info *info)
{
    int other;

    REQUIRE(check_link(device, link, info));
    if (!is_active(device, link))
        return NOT_SUPPORTED;
    other = linked_gpu(device->gpu, link);
    if (other >= 0) {
        fill_pci(&sim_gpus[other], info);
    } else {
        fill_pci(&(struct sim_gpu){.bus = FIRST_SWITCH_BUS + link % SWITCHES, .pci_device = 0x22A310DE}, info);
    }
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetNvLinkRemotePciInfo(const struct handle *device, unsigned int link, void *result)
{
    struct pci_info info;

    REQUIRE(check_link(device, link, result));
    REQUIRE(nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, &info));
    memcpy(result, &info, OLD_PCI_INFO);
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetP2PStatus(const struct handle *one, const struct handle *two, unsigned int capability,
                                          unsigned int *status)
{
    enum { NVLINK = 2, CAPABILITIES = 5, NOT_SUPPORTED_STATUS = 5 };
    unsigned int link;

    REQUIRE(check_gpu(one));
    REQUIRE(check_gpu(two));
    if (!status || capability >= CAPABILITIES || one == two)
        return INVALID_ARGUMENT;
    *status = capability == NVLINK ? NOT_SUPPORTED_STATUS : 0;
    for (link = 0; link < SIM_NVLINKS; link++)
        if (!SIM_NVLINK_GROUP || linked_gpu(one->gpu, link) == two->gpu)
            *status = 0;
    return SUCCESS;
}

struct fabric { /* nvmlGpuFabricInfo_t; the later ones have a version before it, and more behind it */
    unsigned char cluster[16];
    unsigned int status, clique;
    unsigned char state;
};

struct fabric_v {
    unsigned int version;
    struct fabric info;
    unsigned int health;
    unsigned char summary; /* of version 3 */
};

EXPORT nvml_return nvmlDeviceGetGpuFabricInfo(const struct handle *device, struct fabric *fabric)
{
    const char *digit = SIM_CLUSTER;
    unsigned int at = 0;

    REQUIRE(check_gpu(device));
    if (!fabric)
        return INVALID_ARGUMENT;
    if (!HOPPER(device) || !SIM_NVLINKS)
        return NOT_SUPPORTED;
    memset(fabric, 0, sizeof *fabric);
    for (; *digit && at < 2 * sizeof fabric->cluster; digit++) {
        if (hex(*digit) >= 0) {
            fabric->cluster[at / 2] |= (unsigned char)(hex(*digit) << (at % 2 ? 0 : 4));
            at++;
        }
    }
    fabric->clique = *SIM_CLUSTER ? 1 : 0;
    fabric->state = 3; /* NVML_GPU_FABRIC_STATE_COMPLETED */
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetGpuFabricInfoV(const struct handle *device, struct fabric_v *fabric)
{
    unsigned int version = fabric ? fabric->version >> 24 : 0;
    unsigned int size = version == 2 ? offsetof(struct fabric_v, summary) : sizeof *fabric;

    REQUIRE(check_gpu(device));
    if (!fabric)
        return INVALID_ARGUMENT;
    if ((version != 2 && version != 3) || fabric->version != (size | version << 24))
        return VERSION_MISMATCH;
    REQUIRE(nvmlDeviceGetGpuFabricInfo(device, &fabric->info));
    fabric->health = 0;
    if (version == 3)
        fabric->summary = 0;
    return SUCCESS;
}
