/* nvidia-smi topo: how GPUs are connected; part of smi.c. */

/* Return how many NVLinks lead from one GPU to another: directly, or through switches. */
static int count_links(device_t one, device_t two) {
    struct pci_info there, other;
    unsigned int active, kind, link;
    int count = 0;

    if (nvmlDeviceGetPciInfo_v3(two, &other) != SUCCESS)
        return 0;
    for (link = 0; nvmlDeviceGetNvLinkState(one, link, &active) == SUCCESS; link++)
        if (active && nvmlDeviceGetNvLinkRemoteDeviceType(one, link, &kind) == SUCCESS &&
            (kind == 2 || (nvmlDeviceGetNvLinkRemotePciInfo_v2(one, link, &there) == SUCCESS &&
                           strcmp(there.bus_id, other.bus_id) == 0)))
            count++;
    return count;
}

static const char *connection(device_t one, device_t two, int with_links) {
    int links = one == two || !with_links ? 0 : count_links(one, two);
    unsigned int level;

    if (one == two)
        return " X ";
    if (links)
        return text("NV%d", links);
    if (nvmlDeviceGetTopologyCommonAncestor(one, two, &level) != SUCCESS)
        return "N/A";
    return level == 10 ? "PIX" : level == 20 ? "PXB" : level == 30 ? "PHB" : level == 40 ? "NODE" : "SYS";
}

/* Write the numbers of the bits that are set, such as 0-63,128. */
static const char *ranges(const unsigned long *set, unsigned int words) {
    unsigned int width = 8 * sizeof *set, bit, first, most = words * width;
    char list[200] = "";
    size_t at = 0;

#define IS_SET(bit) ((bit) < most && set[(bit) / width] >> (bit) % width & 1)
    for (bit = 0; bit < most && at < sizeof list - 24; bit++) {
        if (!IS_SET(bit))
            continue;
        for (first = bit; IS_SET(bit + 1); bit++)
            ;
        at += (size_t)snprintf(list + at, sizeof list - at, at ? ",%u" : "%u", first);
        if (bit > first)
            at += (size_t)snprintf(list + at, sizeof list - at, "-%u", bit);
    }
#undef IS_SET
    return at ? text("%s", list) : "N/A";
}

static int show_matrix(int with_links) {
    unsigned long cpus[32], nodes[1];
    unsigned int own;
    device_t one, two;

    EACH_GPU(one)
        printf("\tGPU%u", one->index);
    printf("\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n");
    EACH_GPU(one) {
        printf("GPU%u", one->index);
        EACH_GPU(two)
            printf("\t%s", connection(one, two, with_links));
        printf("\t%s", nvmlDeviceGetCpuAffinity(one, 32, cpus) == SUCCESS ? ranges(cpus, 32) : "N/A");
        printf("\t%s", nvmlDeviceGetMemoryAffinity(one, 1, nodes, 0) == SUCCESS ? ranges(nodes, 1) : "N/A");
        printf("\t\t%s\n", GPU(one)->ats && nvmlDeviceGetNumaNodeId(one, &own) == SUCCESS ? text("%u", own) : "N/A");
    }
    puts("\nLegend:\n\n"
         "  X    = Self\n"
         "  SYS  = Path over PCIe and the interconnect of NUMA nodes\n"
         "  NODE = Path over PCIe and the interconnect of PCIe host bridges in a NUMA node\n"
         "  PHB  = Path over PCIe and a PCIe host bridge\n"
         "  PXB  = Path over several PCIe bridges\n"
         "  PIX  = Path over one PCIe bridge at most\n"
         "  NV#  = Path over # NVLinks");
    say_simulated();
    return OK;
}

static const char peer_kinds[] = "rwn"; /* nvmlGpuP2PCapsIndex_t: read 0, write 1, NVLink 2 */

/* Show which GPUs can reach each other's memory. */
static int show_peers(char kind) {
    static const char *const states[] = {"OK", "CNS", "GNS", "TNS", "DR", "NS"};
    unsigned int capability = (unsigned int)(strchr(peer_kinds, kind) - peer_kinds), state;
    device_t one, two;

    putchar(' ');
    EACH_GPU(one)
        printf("\tGPU%u", one->index);
    putchar('\n');
    EACH_GPU(one) {
        printf(" GPU%u", one->index);
        EACH_GPU(two)
            printf("\t%s", one == two                                                             ? "X"
                           : nvmlDeviceGetP2PStatus(one, two, capability, &state) != SUCCESS || state > 5 ? "U"
                                                                                                     : states[state]);
        putchar('\n');
    }
    puts("\nLegend:\n\n"
         "  X   = Self\n"
         "  OK  = Access is possible\n"
         "  CNS = The chipset does not support it\n"
         "  NS  = Not supported\n"
         "  U   = Unknown");
    say_simulated();
    return OK;
}

/* Show the speed of each NVLink; a GPU without any is left out. */
static int show_links(void) {
    unsigned int active, version, link;
    device_t gpu;

    EACH_GPU(gpu)
        for (link = 0; nvmlDeviceGetNvLinkState(gpu, link, &active) == SUCCESS; link++) {
            if (!link)
                printf("GPU %u: %s (UUID: %s)\n", gpu->index, GPU(gpu)->name, GPU(gpu)->uuid);
            if (!active || nvmlDeviceGetNvLinkVersion(gpu, link, &version) != SUCCESS)
                printf("\t Link %u: <inactive>\n", link);
            else /* versions of nvml.h: 4 is NVLink 3, 6 is NVLink 4, 7 is NVLink 5 */
                printf("\t Link %u: %s GB/s\n", link, version >= 7 ? "53.125" : version == 6 ? "26.562" : "25");
        }
    say_simulated();
    return OK;
}
