/* How the GPUs of a simulated host are connected; part of nvml.c.
 *
 * Two sockets with half of the GPUs each, two GPUs behind each PCIe switch. NVLinks lead to switches, or
 * (sim_table.nvlink_group) to the other GPUs of a board. Numbers of levels, capabilities and states are those of nvml.h.
 */

enum { SWITCHES = 4, FIRST_SWITCH_BUS = 0xC0 };

NUMBER(nvmlDeviceGetNumaNodeId, GPU(device)->numa)

struct addressing_mode { /* nvmlDeviceAddressingMode_v1_t; its value: 0 none, 1 HMM, 2 ATS */
    unsigned int version, value;
};

EXPORT nvml_return nvmlDeviceGetAddressingMode(device_t device, struct addressing_mode *mode) {
    REQUIRE(ask_gpu(device, !!mode));
    if (mode->version != (sizeof *mode | 1u << 24))
        return VERSION_MISMATCH;
    mode->value = GPU(device)->ats ? 2 : 0;
    return SUCCESS;
}
NUMBER(nvmlDeviceGetModuleId, device->gpu + 1)
NUMBER(nvmlDeviceGetMultiGpuBoard, 0)
NUMBER(nvmlDeviceGetArchitecture, /* NVML_DEVICE_ARCH_TURING 6, AMPERE 7, ADA 8, HOPPER 9, BLACKWELL 10 */
       GPU(device)->major >= 10 ? 10 : HOPPER(device) ? 9 : AMPERE(device) ? GPU(device)->minor == 9 ? 8 : 7 : 6)

static unsigned int common_ancestor(int one, int two) {
    if (one == two)
        return 0; /* NVML_TOPOLOGY_INTERNAL */
    if (sim_table.gpu[one].numa != sim_table.gpu[two].numa)
        return 50; /* SYSTEM */
    return one / 2 == two / 2 ? 10 : 40; /* SINGLE, NODE */
}

ANSWER(nvmlDeviceGetTopologyCommonAncestor, (device_t one, device_t two, unsigned int *result),
       ask_gpu(one, 1) ?: ask_gpu(two, !!result), common_ancestor(one->gpu, two->gpu))

/* Fill a list with the GPUs for which `wanted` holds, of `device`. */
#define LIST_GPUS(wanted)                                  \
    do {                                                   \
        unsigned int found = 0;                            \
                                                           \
        for (device_t device = devices; device < devices + view.gpus; device++) \
            if ((wanted) && found++ < *count && list)      \
                list[found - 1] = (struct handle *)device; \
        *count = found;                                    \
        return SUCCESS;                                    \
    } while (0)

EXPORT nvml_return nvmlDeviceGetTopologyNearestGpus(device_t of, unsigned int level, unsigned int *count,
                                                    struct handle **list) {
    REQUIRE(ask_gpu(of, !!count));
    LIST_GPUS(device != of && common_ancestor(of->gpu, device->gpu) <= level);
}

EXPORT nvml_return nvmlSystemGetTopologyGpuSet(unsigned int cpu, unsigned int *count, struct handle **list) {
    REQUIRE(ask(!!count));
    LIST_GPUS(GPU(device)->numa == cpu / SIM_CPUS_OF_NODE);
}

/* Set the bits of what is near a GPU: `each` bits for its socket, all its CPUs or its NUMA node. */
static nvml_return give_set(device_t device, unsigned int size, unsigned long *set, unsigned int each) {
    unsigned int width = 8 * sizeof *set, bit, last;

    REQUIRE(ask_gpu(device, size && set));
    memset(set, 0, size * sizeof *set);
    last = (GPU(device)->numa + 1) * each;
    for (bit = GPU(device)->numa * each; bit < last && bit < size * width; bit++)
        set[bit / width] |= 1UL << bit % width;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetCpuAffinity(device_t device, unsigned int size, unsigned long *set) {
    return give_set(device, size, set, SIM_CPUS_OF_NODE);
}

#define AFFINITY(name, each)                                                                                     \
    EXPORT nvml_return name(device_t device, unsigned int size, unsigned long *set, unsigned int scope)         \
    {                                                                                                            \
        return scope > 1 ? INVALID_ARGUMENT : give_set(device, size, set, each);                                 \
    }
AFFINITY(nvmlDeviceGetCpuAffinityWithinScope, SIM_CPUS_OF_NODE)
AFFINITY(nvmlDeviceGetMemoryAffinity, 1)

/* Return the GPU at the other end of a direct NVLink, -1 when there is none. */
static int linked_gpu(int gpu, unsigned int link) {
    int first, other;

    if (!sim_table.nvlink_group)
        return -1;
    first = gpu - gpu % (sim_table.nvlink_group + !sim_table.nvlink_group);
    other = first + (int)link / sim_table.nvlinks_each;
    other += other >= gpu; /* not itself */
    return other < sim_table.gpus ? other : -1;
}

static nvml_return ask_link(device_t device, unsigned int link, const void *result) {
    return ASK_IF(sim_table.nvlinks, device, 1)
               ?: result && link < (unsigned int)sim_table.nvlinks ? SUCCESS : INVALID_ARGUMENT;
}

static unsigned int is_active(device_t device, unsigned int link) {
    return !sim_table.nvlink_group || linked_gpu(device->gpu, link) >= 0;
}

/* A function that answers with one number about an NVLink. */
#define LINK_NUMBER(name, value) \
    ANSWER(name, (device_t device, unsigned int link, unsigned int *result), ask_link(device, link, result), value)

LINK_NUMBER(nvmlDeviceGetNvLinkState, is_active(device, link))
LINK_NUMBER(nvmlDeviceGetNvLinkVersion, GPU(device)->major >= 10 ? 7 : HOPPER(device) ? 6 : 4)
LINK_NUMBER(nvmlDeviceGetNvLinkRemoteDeviceType, sim_table.nvlink_group ? 0 : 2) /* a GPU, a switch */
ANSWER(nvmlDeviceGetNvLinkCapability,
       (device_t device, unsigned int link, unsigned int capability, unsigned int *result),
       ask_link(device, link, result), capability < 5) /* all but SLI */
ANSWER(nvmlDeviceGetNvLinkErrorCounter,
       (device_t device, unsigned int link, unsigned int counter, unsigned long long *result),
       ask_link(device, link, result), 0)

EXPORT nvml_return nvmlDeviceGetNvLinkRemotePciInfo_v2(device_t device, unsigned int link, struct pci_info *info) {
    struct sim_gpu at_switch = {.bus = FIRST_SWITCH_BUS + link % SWITCHES, .pci_device = 0x22A310DE};

    REQUIRE(ask_link(device, link, info));
    if (!is_active(device, link))
        return NOT_SUPPORTED;
    fill_pci(sim_table.nvlink_group ? &sim_table.gpu[linked_gpu(device->gpu, link)] : &at_switch, info);
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetNvLinkRemotePciInfo(device_t device, unsigned int link, void *result) {
    struct pci_info info;

    REQUIRE(ask_link(device, link, result));
    REQUIRE(nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, &info));
    memcpy(result, &info, OLD_PCI_INFO);
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetP2PStatus(device_t one, device_t two, unsigned int capability, unsigned int *status) {
    enum { NVLINK = 2, CAPABILITIES = 5, CHIPSET_NOT_SUPPORTED = 1, NOT_SUPPORTED_STATUS = 5 };

    REQUIRE(ask_gpu(one, 1));
    REQUIRE(ask_gpu(two, status && capability < CAPABILITIES && one != two));
    *status = capability == NVLINK ? NOT_SUPPORTED_STATUS : GEFORCE(one) ? CHIPSET_NOT_SUPPORTED : 0;
    for (unsigned int link = 0; link < (unsigned int)sim_table.nvlinks; link++)
        if (!sim_table.nvlink_group || linked_gpu(one->gpu, link) == two->gpu)
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

EXPORT nvml_return nvmlDeviceGetGpuFabricInfo(device_t device, struct fabric *fabric) {
    const char *digit = sim_table.cluster;
    unsigned int at = 0;

    REQUIRE(ASK_IF(HOPPER(device) && sim_table.nvlinks, device, !!fabric));
    memset(fabric, 0, sizeof *fabric);
    fabric->state = (unsigned char)fabric_state;
    fabric->status = (unsigned int)fabric_status;
    if (fabric_state != 3) /* the rest is not known before the registration has ended */
        return SUCCESS;
    for (; *digit && *digit != '.'; digit++) {
        if (hex(*digit) >= 0 && at < 2 * sizeof fabric->cluster) {
            fabric->cluster[at / 2] |= (unsigned char)(hex(*digit) << (at % 2 ? 0 : 4));
            at++;
        }
    }
    if (*digit++ == '.')
        fabric->clique = (unsigned int)sim_number(&digit);
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetGpuFabricInfoV(device_t device, struct fabric_v *fabric) {
    unsigned int version = fabric ? fabric->version >> 24 : 0;
    unsigned int size = version == 2 ? offsetof(struct fabric_v, summary) : sizeof *fabric;

    REQUIRE(ask_gpu(device, !!fabric));
    if ((version != 2 && version != 3) || fabric->version != (size | version << 24))
        return VERSION_MISMATCH;
    REQUIRE(nvmlDeviceGetGpuFabricInfo(device, &fabric->info));
    fabric->health = 0;
    if (version == 3)
        fabric->summary = 0;
    return SUCCESS;
}
