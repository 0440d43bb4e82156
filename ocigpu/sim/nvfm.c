/* libnvfm of a simulated host: Fabric Manager's SDK over a manager that is a file, DIRECTORY/fabric-manager.
 *
 * Functions, layouts, version words and return codes are those of NVIDIA's nv_fm_agent.h and nv_fm_types.h; their sizes
 * are asserted in tests.  ocigpu/sim/fabric.py writes the file and explains its lines.
 */
#include "simhost.h"

#include <stdint.h>
#include <sys/file.h>
#include <time.h>

enum { OK = 0, BADPARAM = -1, GENERIC_ERROR = -2, NOT_SUPPORTED = -3, UNINITIALIZED = -4, VERSION_MISMATCH = -6,
       IN_USE = -7, NOT_CONFIGURED = -8, CONNECTION_NOT_VALID = -9 };
enum { MOST_GPUS = 16, MOST_PARTITIONS = 64, MOST_SWITCHES = 12, RESTART_SECONDS = 60, MOST_STATE = 16 << 10 };
enum { ADDRESS_UNKNOWN, ADDRESS_INET, ADDRESS_UNIX, ADDRESS_VSOCK };

struct connect_params { uint32_t version; char address[256]; uint32_t timeout_ms, is_unix, type /* from version 2 on */; };
struct gpu_info { uint32_t physical_id; char uuid[80], bus_id[32]; uint32_t links, most_links, rate; };
struct partition { uint32_t id, active, gpus; struct gpu_info gpu[MOST_GPUS]; };
struct partition_list { uint32_t version, count, most; struct partition item[MOST_PARTITIONS]; };
struct activated_list { uint32_t version, count, id[MOST_PARTITIONS]; };
struct pci_device { uint32_t domain, bus, device, function; };
struct failed_device { char uuid[80], bus_id[32]; uint32_t ports, port[64]; };
struct failed_devices { uint32_t version, gpus, switches; struct failed_device gpu[MOST_GPUS], nvswitch[MOST_SWITCHES]; };
struct unsupported { uint32_t id, gpus, gpu[MOST_GPUS]; };
struct unsupported_list { uint32_t version, count; struct unsupported item[MOST_PARTITIONS]; };

/* All of nv_fm_types.h, also what ocigpu does not call. */
_Static_assert(offsetof(struct connect_params, type) == 268 && sizeof(struct connect_params) == 272, "as in nv_fm_types.h");
_Static_assert(sizeof(struct gpu_info) == 128 && sizeof(struct pci_device) == 16, "as in nv_fm_types.h");
_Static_assert(sizeof(struct partition) == 2060 && sizeof(struct partition_list) == 131852, "as in nv_fm_types.h");
_Static_assert(sizeof(struct activated_list) == 264 && sizeof(struct failed_devices) == 10428, "as in nv_fm_types.h");
_Static_assert(sizeof(struct failed_device) == 372 && sizeof(struct unsupported) == 72, "as in nv_fm_types.h");
_Static_assert(sizeof(struct unsupported_list) == 4616, "as in nv_fm_types.h");

#define VERSION_OF(type, number) (uint32_t)(sizeof(struct type) | (number) << 24)
enum { PARAMS_1 = 0x0100010C, PARAMS_2 = 0x02000110 };

/* The manager, as its file says. */
static struct {
    long down, mode, only_v1, epoch, slow;
    long restarted; /* when it began to wait for the activated list, 0: it does not, 1: since the next call */
    char listens[256];
    int lacks[MOST_GPUS + 1]; /* NVLinks, by physical id */
    int partitions;
    struct { int id, links, gpus, gpu[MOST_GPUS], active, failure; } partition[MOST_PARTITIONS];
} fm;
static int initialised;

/* Lines of a word and a number, or of the word alone. */
static const struct { const char *name; long *value; int alone; } words[] = {
    {"mode", &fm.mode, 0}, {"epoch", &fm.epoch, 0}, {"slow", &fm.slow, 0}, {"restarted", &fm.restarted, 0},
    {"old", &fm.only_v1, 1}, {"down", &fm.down, 1},
};

enum { WORDS = sizeof words / sizeof *words };

struct connection { long epoch; };

static int state_file(void) {
    int fd = open(SIM_BELOW("/fabric-manager"), O_RDWR | O_CLOEXEC);

    if (fd >= 0)
        flock(fd, LOCK_EX);
    return fd;
}

static int find(int id) {
    for (int i = 0; i < fm.partitions; i++)
        if (fm.partition[i].id == id)
            return i;
    return -1;
}

static void read_line(const char *line) {
    char word[16];
    int at, length = (int)strcspn(line, " ");
    const char *rest = line + length + (line[length] == ' ');

    snprintf(word, sizeof word, "%.*s", length, line);
    for (int i = 0; i < WORDS; i++)
        if (strcmp(word, words[i].name) == 0)
            *words[i].value = words[i].alone ? 1 : atol(rest);
    if (strcmp(word, "listens") == 0)
        snprintf(fm.listens, sizeof fm.listens, "%s", rest);
    else if (strcmp(word, "partition") == 0 && fm.partitions < MOST_PARTITIONS) {
        fm.partition[fm.partitions].id = sim_number(&rest);
        fm.partition[fm.partitions].links = sim_number(&rest);
        while (*rest >= '1' && *rest <= '9' && fm.partition[fm.partitions].gpus < MOST_GPUS) {
            at = fm.partition[fm.partitions].gpus++;
            fm.partition[fm.partitions].gpu[at] = sim_number(&rest);
        }
        fm.partitions++;
    } else if (strcmp(word, "lacks") == 0) {
        at = sim_number(&rest);
        if (at >= 0 && at <= MOST_GPUS)
            fm.lacks[at] = sim_number(&rest);
    } else if (strcmp(word, "active") == 0 && (at = find(sim_number(&rest))) >= 0)
        fm.partition[at].active = 1;
    else if (strcmp(word, "fails") == 0 && (at = find(sim_number(&rest))) >= 0)
        fm.partition[at].failure = sim_number(&rest);
}

static void load(int fd) {
    static char text[MOST_STATE];
    ssize_t size = fd < 0 ? 0 : pread(fd, text, sizeof text - 1, 0);
    const char *line;
    char *rest = text;

    memset(&fm, 0, sizeof fm);
    fm.down = size <= 0;
    text[size < 0 ? 0 : size] = 0;
    while ((line = sim_next_line(&rest, "")))
        read_line(line);
}

static void store(int fd) {
    static char text[MOST_STATE];
    int size = 0;

#define LINE(...) size += snprintf(text + size, sizeof text - (size_t)size, __VA_ARGS__)
    for (int i = 0; i < WORDS; i++)
        if (*words[i].value)
            LINE(words[i].alone ? "%s\n" : "%s %ld\n", words[i].name, *words[i].value);
    if (*fm.listens)
        LINE("listens %s\n", fm.listens);
    for (int i = 0; i <= MOST_GPUS; i++)
        if (fm.lacks[i])
            LINE("lacks %d %d\n", i, fm.lacks[i]);
    for (int i = 0; i < fm.partitions; i++) {
        LINE("partition %d %d", fm.partition[i].id, fm.partition[i].links);
        for (int gpu = 0; gpu < fm.partition[i].gpus; gpu++)
            LINE(" %d", fm.partition[i].gpu[gpu]);
        LINE("\n");
        if (fm.partition[i].active)
            LINE("active %d\n", fm.partition[i].id);
        if (fm.partition[i].failure)
            LINE("fails %d %d\n", fm.partition[i].id, fm.partition[i].failure);
    }
#undef LINE
    if (ftruncate(fd, 0) || pwrite(fd, text, (size_t)size, 0) != size)
        fm.down = 1;
}

/* What a manager that was restarted with FABRIC_MODE_RESTART=1 does when time passes: it ends after its minute. */
static void pass_time(int fd) {
    if (fm.down || !fm.restarted)
        return;
    if (fm.restarted == 1)
        fm.restarted = (long)time(NULL);
    else if (time(NULL) - fm.restarted >= RESTART_SECONDS)
        fm.down = 1;
    else
        return;
    store(fd);
}

/* Open the manager for a request; the code when it cannot answer, and then *fd is closed. */
static int begin(void *handle, int *fd, int waiting) {
    struct connection *connection = handle;
    int code = OK;

    if (!initialised)
        return UNINITIALIZED;
    if (!connection)
        return BADPARAM;
    *fd = state_file();
    load(*fd);
    pass_time(*fd);
    if (fm.down || connection->epoch != fm.epoch)
        code = CONNECTION_NOT_VALID;
    else if (fm.mode == 0)
        code = NOT_SUPPORTED;
    else if (fm.restarted && !waiting)
        code = NOT_CONFIGURED;
    if (fm.slow)
        sleep((unsigned)fm.slow);
    if (code && *fd >= 0)
        close(*fd);
    return code;
}

static int conflicts(int at) {
    for (int i = 0; i < fm.partitions; i++)
        for (int a = 0; fm.partition[i].active && a < fm.partition[i].gpus; a++)
            for (int b = 0; b < fm.partition[at].gpus; b++)
                if (fm.partition[i].gpu[a] == fm.partition[at].gpu[b])
                    return 1;
    return 0;
}

EXPORT int fmLibInit(void) {
    if (initialised)
        return IN_USE;
    initialised = 1;
    return OK;
}

EXPORT int fmLibShutdown(void) {
    if (!initialised)
        return UNINITIALIZED;
    initialised = 0;
    return OK;
}

/* Whether a text is decimal numbers, one after each of the characters of ``before`` but the first. */
static int is_numbers(const char *text, const char *before, int most) {
    for (; *before; before++) {
        if (*text < '0' || *text > '9' || sim_number(&text) > most)
            return 0;
        if (before[1] && *text++ != before[1])
            return 0;
    }
    return *text == 0;
}

/* "127.0.0.1" or "127.0.0.1:6666": IPv4 only. */
static int is_inet(const char *text) {
    return is_numbers(text, " ...", 255) || is_numbers(text, " ...:", 65535);
}

EXPORT int fmConnect(struct connect_params *params, void **handle) {
    uint32_t type;
    char address[300];
    int fd, fits;

    if (!params || !handle)
        return BADPARAM;
    if (!initialised)
        return UNINITIALIZED;
    fd = state_file();
    load(fd);
    pass_time(fd);
    if (fd >= 0)
        close(fd);
    if (params->version != PARAMS_1 && (params->version != PARAMS_2 || fm.only_v1))
        return VERSION_MISMATCH;
    type = params->version == PARAMS_2 ? params->type : ADDRESS_UNKNOWN;
    if (type == ADDRESS_UNKNOWN)
        type = params->is_unix ? ADDRESS_UNIX : ADDRESS_INET;
    fits = memchr(params->address, 0, sizeof params->address) != NULL &&
           (type == ADDRESS_INET    ? is_inet(params->address)
            : type == ADDRESS_UNIX  ? params->address[0] == '/'
            : type == ADDRESS_VSOCK ? is_numbers(params->address, " :", 99999999)
                                    : 0);
    if (!fits)
        return BADPARAM;
    snprintf(address, sizeof address, "%s:%s%s", (const char *[]){"", "tcp", "unix", "vsock"}[type], params->address,
             type == ADDRESS_INET && !strchr(params->address, ':') ? ":6666" : "");
    if (fm.down || (*fm.listens && strcmp(fm.listens, address) != 0))
        return CONNECTION_NOT_VALID;
    struct connection *made = calloc(1, sizeof *made);
    if (!made)
        return GENERIC_ERROR;
    made->epoch = fm.epoch;
    *handle = made;
    return OK;
}

EXPORT int fmDisconnect(void *handle) {
    if (!initialised)
        return UNINITIALIZED;
    if (!handle)
        return BADPARAM;
    free(handle);
    return OK;
}

EXPORT int fmGetSupportedFabricPartitions(void *handle, struct partition_list *list) {
    int fd, code;

    if (!list)
        return BADPARAM;
    if (list->version != VERSION_OF(partition_list, 1))
        return VERSION_MISMATCH;
    if ((code = begin(handle, &fd, 0)))
        return code;
    list->count = (uint32_t)fm.partitions;
    list->most = MOST_PARTITIONS;
    for (int i = 0; i < fm.partitions; i++) {
        struct partition *item = &list->item[i];

        item->id = (uint32_t)fm.partition[i].id;
        item->active = (uint32_t)fm.partition[i].active;
        item->gpus = (uint32_t)fm.partition[i].gpus;
        for (int gpu = 0; gpu < fm.partition[i].gpus; gpu++) { /* as an H100 is listed: no UUID, address zero */
            item->gpu[gpu].physical_id = (uint32_t)fm.partition[i].gpu[gpu];
            item->gpu[gpu].uuid[0] = 0;
            strcpy(item->gpu[gpu].bus_id, "00000000:00:00.0");
            int most = fm.partition[i].links, id = fm.partition[i].gpu[gpu];
            int lacks = id <= MOST_GPUS ? fm.lacks[id] : 0;

            item->gpu[gpu].most_links = (uint32_t)most;
            item->gpu[gpu].links = (uint32_t)(lacks < most ? most - lacks : 0);
            item->gpu[gpu].rate = 26562;
        }
    }
    close(fd);
    return OK;
}

static int change(void *handle, uint32_t id, int active) {
    int fd, at, code = begin(handle, &fd, 0);

    if (code)
        return code;
    at = find((int)id);
    if (fm.mode == 2) /* partitions of virtual functions: fmActivateFabricPartitionWithVFs */
        code = NOT_SUPPORTED;
    else if (at < 0)
        code = BADPARAM;
    else if (!active && !fm.partition[at].active)
        code = UNINITIALIZED;
    else if (active && (fm.partition[at].active || conflicts(at)))
        code = IN_USE;
    else if (fm.partition[at].failure)
        code = fm.partition[at].failure;
    else {
        fm.partition[at].active = active;
        store(fd);
    }
    close(fd);
    return code;
}

EXPORT int fmActivateFabricPartition(void *handle, uint32_t id) { return change(handle, id, 1); }

EXPORT int fmDeactivateFabricPartition(void *handle, uint32_t id) { return change(handle, id, 0); }

EXPORT int fmActivateFabricPartitionWithVFs(void *handle, uint32_t id, void *functions, uint32_t count) {
    int fd, code = functions && count ? begin(handle, &fd, 0) : BADPARAM;

    (void)id;
    if (code)
        return code;
    close(fd);
    return NOT_SUPPORTED; /* there are virtual functions in mode 2 only */
}

EXPORT int fmSetActivatedFabricPartitions(void *handle, struct activated_list *list) {
    int fd, at, code;

    if (!list || (list->version == VERSION_OF(activated_list, 1) && list->count > MOST_PARTITIONS))
        return BADPARAM;
    if (list->version != VERSION_OF(activated_list, 1))
        return VERSION_MISMATCH;
    if ((code = begin(handle, &fd, 1)))
        return code;
    for (int i = 0; i < fm.partitions; i++)
        fm.partition[i].active = 0; /* only what is in the list is routed: what was forgotten is cut off */
    for (uint32_t i = 0; !code && i < list->count; i++) {
        at = find((int)list->id[i]);
        if (at < 0)
            code = BADPARAM;
        else if (conflicts(at))
            code = IN_USE;
        else
            fm.partition[at].active = 1;
    }
    if (!code) {
        fm.restarted = 0;
        store(fd);
    }
    close(fd);
    return code;
}

EXPORT int fmGetNvlinkFailedDevices(void *handle, struct failed_devices *devices) {
    int fd, code;

    if (!devices)
        return BADPARAM;
    if (devices->version != VERSION_OF(failed_devices, 1))
        return VERSION_MISMATCH;
    if ((code = begin(handle, &fd, 0)))
        return code;
    close(fd);
    devices->gpus = devices->switches = 0; /* as on boards with eight H100 */
    return OK;
}

EXPORT int fmGetUnsupportedFabricPartitions(void *handle, struct unsupported_list *list) {
    int fd, code;

    if (!list)
        return BADPARAM;
    if (list->version != VERSION_OF(unsupported_list, 1))
        return VERSION_MISMATCH;
    if ((code = begin(handle, &fd, 0)))
        return code;
    close(fd);
    list->count = 0;
    return OK;
}
