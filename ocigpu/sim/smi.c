/* The programs of a simulated host: nvidia-smi, and five that only say what they are (told apart by their name).
 *
 * Linked statically, so that it runs in any image.  It contains the simulated NVML: what it prints is what other
 * programs get, of GPUs whose node it can open.  It says that they are simulated: on stderr where programs read stdout,
 * unless OCIGPU_SIM_QUIET is set ("ocigpu sim exec -q").  What is printed has the layout that users and test data of
 * parsers (telegraf, nvidia_gpu_exporter) show.
 */
#include "nvml.c"

#include <stdarg.h>
#include <strings.h>
#include <time.h>

enum { OK = 0, INVALID = 2, NO_DEVICES = 6 }; /* exit statuses of nvidia-smi; the others are NVML's codes */

static char shown[SIM_MOST_GPUS]; /* of the GPUs, by index: whether they are meant */

#define EACH_GPU(gpu) for (gpu = devices; gpu < devices + view.gpus; gpu++) if (shown[gpu->index])

static void say_simulated(void) {
    fflush(stdout);
    if (!*(getenv("OCIGPU_SIM_QUIET") ?: ""))
        fprintf(stderr, "nvidia-smi: SIMULATED host, no real GPU\n");
}

static const char help[] =
    "usage: nvidia-smi [-i GPU,...] [-l SECONDS | -lms MILLISECONDS] [-f FILE] [WHAT]\n"
    "  -L                     list GPUs and MIG devices\n"
    "  -q [-x | -d TYPE,...]  all that is known of GPUs; -x: as XML; -d: MEMORY, UTILIZATION, ECC, TEMPERATURE, ...\n"
    "  --query-gpu=FIELD,... --format=csv[,noheader][,nounits]           fields: --help-query-gpu\n"
    "  --query-compute-apps=FIELD,... --format=csv[,noheader][,nounits]  fields: --help-query-compute-apps\n"
    "  topo -m | -mp | -p2p r|w|n                   how GPUs are connected\n"
    "  nvlink -s              speed of NVLinks\n"
    "  dmon [-s pucvmet] [-d SECONDS] [-c COUNT]    watch GPUs\n"
    "  pmon [-s um] [-d SECONDS] [-c COUNT]         watch processes\n"
    "  -mig 0|1               MIG mode; mig -h: its instances\n"
    "  -c MODE                compute mode: 0 default, 2 prohibited, 3 exclusive to a process\n"
    "  -pm 0|1                persistence mode\n"
    "  -pl WATTS              power limit\n"
    "  compute-policy --set-timeslice=0|1|2|3       length of time slices\n"
    "  -r, --gpu-reset        reset GPUs\n"
    "  --version\n"
    "GPU: index, UUID or PCI address\n";

static int usage(const char *format, ...) {
    va_list arguments;

    va_start(arguments, format);
    fprintf(stderr, "nvidia-smi (simulated): ");
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n%s", help);
    return INVALID;
}

/* As the real one, which writes these two to standard output. Drivers 376 and 535, as reported:
 * https://github.com/tamisoft/nvidia-smi2ha/issues/2, https://github.com/influxdata/telegraf/issues/6573 and
 * https://github.com/anderskm/gputil/pull/63; the status is that of nvidia-smi(1), "RETURN VALUE". */
static int not_recognized(const char *option) {
    printf("ERROR: Option %s is not recognized. Please run 'nvidia-smi -h'.\n", option);
    fflush(stdout);
    fprintf(stderr, "nvidia-smi: SIMULATED, with fewer options than the real one\n");
    return INVALID;
}

static int not_together(void) {
    printf("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n");
    say_simulated();
    return INVALID;
}

/* Return whether a word is this option. */
static int is_flag(const char *word, const char *brief, const char *full) {
    return strcmp(word, brief) == 0 || strcmp(word, full) == 0;
}

/* Return the value of an option, behind it or after "=", and go on to it; NULL when *at is another word. */
static char *value(char ***at, const char *brief, const char *full) {
    char *word = **at;
    size_t length = strlen(full);

    if (strncmp(word, full, length) == 0 && word[length] == '=')
        return word + length + 1;
    return is_flag(word, brief, full) && (*at)[1] ? *++*at : NULL;
}

/* Return a GPU's PCI address as nvidia-smi writes it. */
static const char *bus_id(device_t gpu) {
    static char known[32];
    struct pci_info info;

    return nvmlDeviceGetPciInfo_v3(gpu, &info) == SUCCESS ? (strcpy(known, info.bus_id), known) : "N/A";
}

/* Return the index of the GPU named by index, UUID or bus id, -1 when there is none. */
static int find_gpu(const char *given) {
    char name[32];

    for (int i = 0; i < view.gpus; i++) {
        snprintf(name, sizeof name, "%d", i);
        if (strcmp(given, name) == 0 || strcmp(given, GPU(&devices[i])->uuid) == 0)
            return i;
        snprintf(name, sizeof name, "%08X:%02X:00.0", SIM_BUS(GPU(&devices[i])));
        if (GPU(&devices[i])->bus && (strcasecmp(given, name) == 0 || strcasecmp(given, name + 4) == 0 ||
                                      strcasecmp(given, name + 9) == 0))
            return i;
    }
    return -1;
}

/* Ask for the driver and mark the chosen GPUs of a list by commas, all without one; return 0 or an exit status. */
static int choose(const char *selected) {
    char names[1024], *rest = names, *name;
    int code = initialize(), i;

    if (code == DRIVER_NOT_LOADED) {
        printf("NVIDIA-SMI has failed because the NVIDIA driver (simulated) does not answer: no /dev/nvidiactl can be "
               "opened.\n");
        return code;
    }
    if (code != SUCCESS) {
        printf("Failed to initialize NVML: %s\n", nvmlErrorString(code));
        if (code == LIB_RM_VERSION_MISMATCH)
            printf("NVML library version: %s\n", sim_table.driver_version);
        return code > 255 ? 255 : code;
    }
    snprintf(names, sizeof names, "%s", selected ? selected : "");
    memset(shown, !selected, sizeof shown);
    while (selected && (name = strsep(&rest, ","))) {
        i = find_gpu(name);
        if (i < 0)
            return printf("No devices were found\n"), NO_DEVICES;
        shown[i] = 1;
    }
    return OK;
}

/* As choose, of GPUs that answer; without any there is nothing to do. */
static int begin(const char *selected) {
    int status = choose(selected), any = 0;
    device_t gpu;

    if (status == NO_DEVICES)
        say_simulated();
    if (status != OK)
        return status;
    EACH_GPU(gpu) {
        any |= !lost[gpu->gpu];
        if (!lost[gpu->gpu])
            continue;
        printf("Unable to determine the device handle for GPU%u: %08X:%02X:00.0: GPU is lost.  "
               "Reboot the system to recover this GPU\n",
               gpu->index, SIM_BUS(GPU(gpu)));
        shown[gpu->index] = 0;
        status = GPU_IS_LOST;
    }
    if (any || status != OK)
        return any ? OK : status;
    printf("No devices were found\n");
    say_simulated();
    return NO_DEVICES;
}

/* The MIG devices of a GPU. */
#define EACH_MIG_DEVICE(device, of) \
    for (unsigned int at = 0; nvmlDeviceGetMigDeviceHandleByIndex(of, at, &device) == SUCCESS; at++)

#include "smi_facts.c"
#include "smi_query.c"
#include "smi_show.c"
#include "smi_topology.c"
#include "smi_monitor.c"
#include "smi_mig.c"
#include "smi_table.c"

static int list_gpus(void) {
    struct handle *mig;
    char name[64];
    device_t gpu;

    EACH_GPU(gpu) {
        printf("GPU %u: %s (UUID: %s)\n", gpu->index, GPU(gpu)->name, GPU(gpu)->uuid);
        EACH_MIG_DEVICE(mig, gpu) {
            sim_mig_name(mig->mig, name, sizeof name);
            printf("  MIG %-11s Device %2u: (UUID: %s)\n", name, mig->index, mig->mig->uuid);
        }
    }
    say_simulated();
    return OK;
}

/* Put a pending MIG mode in force and take the MIG devices away; return whether this process may. */
static int reset_mig(const int *chosen) {
    static struct sim_instance gone[SIM_MOST];
    int lock = sim_lock(), i, kept = 0, taken = 0, stored;

    if (lock < 0)
        return 0;
    sim_load();
    for (i = 0; i < sim_count; i++)
        if (chosen[sim_instances[i].gpu])
            gone[taken++] = sim_instances[i];
        else
            sim_instances[kept++] = sim_instances[i];
    sim_count = kept;
    for (i = 0; i < sim_table.gpus; i++) {
        if (chosen[i] && sim_mig_pending[i] >= 0)
            sim_mig_mode[i] = sim_mig_pending[i];
        sim_mig_pending[i] = chosen[i] ? -1 : sim_mig_pending[i];
    }
    stored = sim_store();
    while (stored && taken--) /* a GPU instance comes before the compute instances in it */
        sim_show(&gone[taken], 0, view.directory);
    close(lock);
    return stored;
}

/* Reset GPUs: a MIG mode that waits for it is in force then, and MIG devices are gone. As the real one, not while a
 * process uses one of them. */
static int reset_gpus(const char *selected) {
    int chosen[SIM_MOST_GPUS] = {0}, status = choose(selected);
    const char *line;
    device_t gpu;

    if (status != OK)
        return status;
    EACH_GPU(gpu)
        chosen[gpu->gpu] = 1;
    SIM_EACH_LINE("/load", "process ", line) {
        int number = sim_number(&line);

        if (number >= 0 && number < SIM_MOST_GPUS && chosen[number]) {
            EACH_GPU(gpu)
                if (gpu->gpu == number)
                    printf("The following GPUs could not be reset:\n  GPU %s: In use by another client\n",
                           bus_id(gpu));
            say_simulated();
            return IN_USE;
        }
    }
    if (!reset_mig(chosen)) {
        printf("Insufficient Permissions\n");
        return NO_PERMISSION;
    }
    EACH_GPU(gpu)
        printf("GPU %s was successfully reset.\n", bus_id(gpu));
    say_simulated();
    return OK;
}

/* Note the length of time slices: 0 default, 1 short, 2 medium, 3 long. */
static int set_timeslice(const char *timeslice) {
    char path[4200];
    FILE *file;
    device_t gpu;

    if (strlen(timeslice) != 1 || *timeslice < '0' || *timeslice > '3') {
        printf("Invalid timeslice \"%s\"\n", timeslice);
        return INVALID;
    }
    EACH_GPU(gpu) {
        snprintf(path, sizeof path, "%s/timeslice%d", SIM_BELOW(""), gpu->gpu);
        file = fopen(path, "we");
        if (!file) {
            printf("Insufficient Permissions\n");
            return NO_PERMISSION;
        }
        fprintf(file, "%s\n", timeslice);
        fclose(file);
        printf("Successfully set timeslice policy to %s for GPU %s\n", timeslice, bus_id(gpu));
    }
    say_simulated();
    return OK;
}

static int set_compute_mode(const char *given) {
    static const char *const names[] = {"DEFAULT", "EXCLUSIVE_THREAD", "PROHIBITED", "EXCLUSIVE_PROCESS"};
    unsigned int mode = 0;
    device_t gpu;

    while (mode < 4 && strcasecmp(given, names[mode]) != 0 && strcmp(given, text("%u", mode)) != 0)
        mode++;
    if (mode == 4 || mode == 1) /* the second is none that CUDA still has */
        return usage("compute mode \"%s\" is unknown", given);
    EACH_GPU(gpu) {
        nvml_return code = nvmlDeviceSetComputeMode(gpu, mode);

        if (code != SUCCESS) {
            printf("Unable to set the compute mode for GPU %s: %s\n", bus_id(gpu), nvmlErrorString(code));
            return code;
        }
        printf("Set compute mode to %s for GPU %s.\n", names[mode], bus_id(gpu));
    }
    puts("All done.");
    say_simulated();
    return OK;
}

static int set_persistence_mode(const char *given) {
    unsigned int mode = strcmp(given, "1") == 0 || strcasecmp(given, "ENABLED") == 0;
    const char *word = mode ? "Enabled" : "Disabled";
    device_t gpu;

    if (!mode && strcmp(given, "0") != 0 && strcasecmp(given, "DISABLED") != 0)
        return usage("persistence mode \"%s\" is unknown", given);
    EACH_GPU(gpu) {
        const char *present = fact_persistence(gpu);
        nvml_return code = nvmlDeviceSetPersistenceMode(gpu, mode);

        if (code != SUCCESS) {
            printf("Unable to set persistence mode for GPU %s: %s\n", bus_id(gpu), nvmlErrorString(code));
            return code;
        }
        if (present && strcmp(present, word) == 0)
            printf("Persistence mode is already %s for GPU %s.\n", word, bus_id(gpu));
        else
            printf("%s persistence mode for GPU %s.\n", word, bus_id(gpu));
    }
    return OK;
}

/* Read watts with at most two decimals; return milliwatts, 0 for anything else. */
static unsigned int read_watts(const char *given) {
    size_t whole = strspn(given, "0123456789"), decimals;
    unsigned int milliwatts = 1000 * (unsigned int)sim_number(&(const char *){given});

    if (!whole || whole > 5 || (given[whole] && given[whole] != '.'))
        return 0;
    given += whole + (given[whole] == '.');
    decimals = strspn(given, "0123456789");
    if (decimals > 2 || given[decimals])
        return 0;
    return milliwatts + (decimals ? (unsigned int)(*given - '0') * 100 : 0) +
           (decimals > 1 ? (unsigned int)(given[1] - '0') * 10 : 0);
}

static int set_power_limit(const char *given) {
    unsigned int limit = read_watts(given), least, most;
    device_t gpu;

    if (!limit)
        return usage("power limit \"%s\": not a number of watts", given);
    EACH_GPU(gpu) {
        const char *before = fact_limit(gpu);
        nvml_return code = nvmlDeviceGetPowerManagementLimitConstraints(gpu, &least, &most);

        if (code == SUCCESS && (limit < least || limit > most)) {
            printf("Provided power limit %u.%02u W is not a valid power limit which should be between %u.%02u W and "
                   "%u.%02u W for GPU %s\nTerminating early due to previous errors.\n",
                   WATTS_OF(limit), WATTS_OF(least), WATTS_OF(most), bus_id(gpu));
            return INVALID;
        }
        if (code == SUCCESS)
            code = nvmlDeviceSetPowerManagementLimit(gpu, limit);
        if (code != SUCCESS) {
            printf("Failed to set power management limit for GPU %s: %s\n", bus_id(gpu), nvmlErrorString(code));
            return code;
        }
        printf("Power limit for GPU %s was set to %u.%02u W from %s W.\n", bus_id(gpu), WATTS_OF(limit), before);
    }
    return OK;
}

/* Set persistence mode and power limit, one or both. */
static int set_power(const char *persistence, const char *limit) {
    int status = persistence ? set_persistence_mode(persistence) : OK;

    if (status == OK && limit)
        status = set_power_limit(limit);
    if (status == OK) {
        puts("All done.");
        say_simulated();
    }
    return status;
}

static int show_version(void) {
    printf("NVIDIA-SMI version  : %s (simulated)\nNVML version        : %s\n", sim_table.driver_version,
           sim_table.nvml_version);
    printf(branch() < RENAMED ? "DRIVER version      : %s\nCUDA Version        : %s\n"
                              : "DRIVER version      : Deprecated, see \"KMD version\" instead\n"
                                "CUDA version        : Deprecated, see \"CUDA UMD version\" instead\n"
                                "KMD version         : %s\nCUDA UMD version    : %s\n",
           sim_table.driver_version, cuda_version());
    return OK;
}

static int run_topology(char **at) {
    const char *selected = NULL, *peers = NULL, *given;
    int links = -1, status;

    for (; *at; at++)
        if (is_flag(*at, "-m", "--matrix"))
            links = 1;
        else if (is_flag(*at, "-mp", "--matrix_pci"))
            links = 0;
        else if ((given = value(&at, "-p2p", "--p2pstatus")))
            peers = given;
        else if ((given = value(&at, "-i", "--id")))
            selected = given;
        else
            return usage("topo: option \"%s\" is unknown", *at);
    if (peers && (strlen(peers) != 1 || !strchr(peer_kinds, *peers)))
        return usage("topo -p2p \"%s\": r, w or n", peers);
    if (links < 0 && !peers)
        return usage("topo needs -m, -mp or -p2p");
    status = begin(selected);
    return status != OK ? status : peers ? show_peers(*peers) : show_matrix(links);
}

static int run_nvlink(char **at) {
    const char *selected = NULL, *given;
    int wanted = 0, status;

    for (; *at; at++)
        if (is_flag(*at, "-s", "--status"))
            wanted = 1;
        else if ((given = value(&at, "-i", "--id")))
            selected = given;
        else
            return usage("nvlink: option \"%s\" is unknown", *at);
    if (!wanted)
        return usage("nvlink needs -s");
    status = begin(selected);
    return status == OK ? show_links() : status;
}

static int run_monitor(char **at, int processes) {
    const char *selected = NULL, *groups = processes ? "u" : "puc", *given;
    int count = 0, seconds = 1, status;

    for (; *at; at++)
        if ((given = value(&at, "-i", "--id")))
            selected = given;
        else if ((given = value(&at, "-s", "--select")))
            groups = given;
        else if ((given = value(&at, "-c", "--count")))
            count = sim_number(&given);
        else if ((given = value(&at, "-d", "--delay")))
            seconds = sim_number(&given);
        else
            return usage("option \"%s\" is unknown", *at);
    if (groups[strspn(groups, processes ? "um" : "pucvmet")])
        return usage("-s \"%s\": %s", groups, processes ? "letters of um" : "letters of pucvmet");
    if (count < 0 || seconds < 1 || seconds > 10)
        return usage("-d: 1 to 10 seconds; -c: a number");
    status = begin(selected);
    return status == OK ? monitor(processes, groups, count, seconds) : status;
}

/* What the options without a command say. */
struct request {
    int list, all, xml, milliseconds;
    char *fields, *app_fields;
    const char *format, *timeslice, *mig, *mode, *persistence, *watts;
};

static int answer(const struct request *request) {
    char names[4096];

    refresh();
    snprintf(names, sizeof names, "%s", request->fields ?: request->app_fields ?: "");
    return request->timeslice    ? set_timeslice(request->timeslice)
           : request->mig        ? set_mig_mode(request->mig)
           : request->mode       ? set_compute_mode(request->mode)
           : request->persistence || request->watts ? set_power(request->persistence, request->watts)
           : request->fields     ? query_gpus(names, request->format)
           : request->app_fields ? query_apps(names, request->format)
           : request->all        ? show_all(request->xml)
           : request->list       ? list_gpus()
                                 : show_table();
}

static int nvidia_smi(char **at) {
    int policy = *at && strcmp(*at, "compute-policy") == 0, reset = 0, status;
    struct request request = {.format = ""};
    const char *selected = NULL, *file = NULL, *number = NULL;
    char *given;

    if (*at && strcmp(*at, "mig") == 0)
        return run_mig(at + 1);
    if (*at && strcmp(*at, "topo") == 0)
        return run_topology(at + 1);
    if (*at && strcmp(*at, "nvlink") == 0)
        return run_nvlink(at + 1);
    if (*at && (strcmp(*at, "dmon") == 0 || strcmp(*at, "pmon") == 0))
        return run_monitor(at + 1, **at == 'p');
    for (at += policy; *at; at++) {
        if (policy && (given = value(&at, "--set-timeslice", "--set-timeslice")))
            request.timeslice = given;
        else if (is_flag(*at, "-L", "--list-gpus"))
            request.list = 1;
        else if (is_flag(*at, "-q", "--query"))
            request.all = 1;
        else if (is_flag(*at, "-x", "--xml-format"))
            request.xml = 1;
        else if (is_flag(*at, "-r", "--gpu-reset"))
            reset = 1;
        else if (is_flag(*at, "-h", "--help"))
            return fputs(help, stdout), OK;
        else if (is_flag(*at, "--version", "--version"))
            return show_version();
        else if (is_flag(*at, "--help-query-gpu", "--help-query-gpu"))
            return help_fields("--query-gpu=", fields, LENGTH(fields));
        else if (is_flag(*at, "--help-query-compute-apps", "--help-query-compute-apps"))
            return help_fields("--query-compute-apps=", app_fields, LENGTH(app_fields));
        else if ((given = value(&at, "--query-gpu", "--query-gpu")))
            request.fields = given;
        else if ((given = value(&at, "--query-compute-apps", "--query-compute-apps")))
            request.app_fields = given;
        else if ((given = value(&at, "--format", "--format")))
            request.format = given;
        else if ((given = value(&at, "-i", "--id")))
            selected = given;
        else if ((given = value(&at, "-mig", "--multi-instance-gpu")))
            request.mig = given;
        else if ((given = value(&at, "-c", "--compute-mode")))
            request.mode = given;
        else if ((given = value(&at, "-pm", "--persistence-mode")))
            request.persistence = given;
        else if ((given = value(&at, "-pl", "--power-limit")))
            request.watts = given;
        else if ((given = value(&at, "-f", "--filename")))
            file = given;
        else if ((number = given = value(&at, "-l", "--loop")))
            request.milliseconds = 1000 * sim_number(&number);
        else if ((number = given = value(&at, "-lms", "--loop-ms")))
            request.milliseconds = sim_number(&number);
        else if ((given = value(&at, "-d", "--display"))) {
            if (!read_displays(given))
                return usage("-d: one of its types is unknown");
        } else
            return not_recognized(*at);
    }
    if ((request.xml && !request.all) || (*request.format && !request.fields && !request.app_fields) ||
        (request.list && (request.all || request.fields || request.app_fields)))
        return not_together();
    if (number && request.milliseconds < 1)
        return usage("-l needs a number from 1 on");
    if (file && !freopen(file, "we", stdout))
        return usage("%s: %s", file, strerror(errno));
    if (reset)
        return reset_gpus(selected);
    status = begin(selected);
    while (status == OK && (status = answer(&request)) == OK && request.milliseconds) {
        fflush(stdout);
        usleep(1000u * (unsigned int)request.milliseconds);
    }
    return status;
}

int main(int argc, char **argv) {
    const char *name = argc > 0 ? strrchr(argv[0], '/') : NULL;

    name = name ? name + 1 : argc > 0 ? argv[0] : "nvidia-smi";
    if (strncmp(name, "nvidia-smi", 10) != 0 && (strncmp(name, "nvidia-", 7) == 0 || strncmp(name, "nv-", 3) == 0)) {
        printf("%s %s (simulated: does nothing)\n", name, sim_table.driver_version);
        return OK;
    }
    return nvidia_smi(argv + (argc > 0));
}
