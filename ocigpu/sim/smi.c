/* The programs of a simulated host: nvidia-smi, and five that only say what they are (told apart by their name).
 *
 * Linked statically, so that it runs in any image. It lists only GPUs whose node it can open, and always says that
 * they are simulated.
 */
#include "simstate.h"

#include <stdarg.h>
#include <strings.h>

enum { OK = 0, INVALID = 2, NO_PERMISSION = 4, NO_DEVICES = 6, NO_DRIVER = 9, IN_USE = 19 }; /* exit statuses of nvidia-smi */

static struct sim_view view;

static void say_simulated(void) {
    fflush(stdout);
    fprintf(stderr, "nvidia-smi: SIMULATED host, no real GPU\n");
}

static int usage(const char *format, const char *text) {
    fprintf(stderr, "nvidia-smi (simulated): ");
    fprintf(stderr, format, text);
    fprintf(stderr, "\nusage: nvidia-smi [-L] [-i INDEX|UUID|BUS-ID] [--version] [--gpu-reset]\n"
                    "       nvidia-smi --query-gpu=FIELD,... --format=csv[,noheader][,nounits]\n");
    return INVALID;
}

/* Every GPU that is shown, and the MIG devices of one. */
#define EACH_GPU(i) for (i = 0; i < view.gpus; i++) if (only < 0 || only == i)
#define EACH_MIG_DEVICE(mig, of) \
    for (mig = sim_instances; mig < sim_instances + sim_count; mig++) \
        if (mig->gpu == (of) && mig->ci >= 0 && sim_visible(&view, mig))

static int list_gpus(int only) {
    const struct sim_instance *mig;
    char name[64];
    int i, shown;

    EACH_GPU(i) {
        printf("GPU %d: %s (UUID: %s)\n", i, sim_table.gpu[view.gpu[i]].name, sim_table.gpu[view.gpu[i]].uuid);
        shown = 0;
        EACH_MIG_DEVICE(mig, view.gpu[i]) {
            sim_mig_name(mig, name, sizeof name);
            printf("  MIG %-11s Device %2d: (UUID: %s)\n", name, shown++, mig->uuid);
        }
    }
    say_simulated();
    return OK;
}

/* Return a GPU's PCI address as nvidia-smi writes it. */
static const char *bus_id(const struct sim_gpu *gpu) {
    static char text[32];

    snprintf(text, sizeof text, "%08X:%02X:00.0", SIM_BUS(gpu));
    return gpu->bus ? text : "N/A";
}

static void rule(char line) {
    putchar('+');
    for (int i = 0; i < 88; i++)
        putchar(line);
    puts("+");
}

static void row(const char *format, ...) {
    char text[256];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    printf("| %-86.86s |\n", text);
}

static int show_table(int only) {
    const struct sim_instance *mig;
    char name[64], memory[64];
    int i, shown;

    rule('-');
    row("NVIDIA-SMI %s (simulated host, no real GPU)", sim_table.driver_version);
    row("Driver Version: %-20s CUDA Version: %d.%d", sim_table.driver_version, sim_table.cuda_version / 1000,
        sim_table.cuda_version % 1000 / 10);
    rule('-');
    row("%-4s %-40s %-18s %s", "GPU", "Name", "Bus-Id", "Memory-Usage");
    rule('=');
    EACH_GPU(i) {
        const struct sim_gpu *gpu = &sim_table.gpu[view.gpu[i]];

        if (gpu->memory)
            snprintf(memory, sizeof memory, "0MiB / %lluMiB", gpu->memory >> 20);
        row("%3d  %-40s %-16s   %s", i, gpu->name, bus_id(gpu), gpu->memory ? memory : "Not Supported");
        shown = 0;
        EACH_MIG_DEVICE(mig, view.gpu[i]) {
            sim_mig_name(mig, name, sizeof name);
            row("       MIG %d: %-12s GI %d  CI %d  %lluMiB", shown++, name, mig->gi, mig->ci,
                sim_table.profile[mig->profile].memory_mib);
        }
    }
    rule('-');
    row("SIMULATED: these GPUs do not exist, nothing can be computed on them");
    rule('-');
    return OK;
}

static const struct field {
    const char *name, *alias, *unit;
} fields[] = {
    {"index", "", ""},
    {"name", "gpu_name", ""},
    {"uuid", "gpu_uuid", ""},
    {"pci.bus_id", "gpu_bus_id", ""},
    {"count", "", ""},
    {"driver_version", "", ""},
    {"compute_cap", "", ""},
    {"mig.mode.current", "", ""},
    {"memory.total", "", "MiB"},
    {"memory.free", "", "MiB"},
    {"memory.used", "", "MiB"},
    {"utilization.gpu", "", "%"},
    {"temperature.gpu", "", ""},
};

enum { FIELDS = sizeof fields / sizeof fields[0], MOST = 64 };

static void print_field(int field, int i) {
    const struct sim_gpu *gpu = &sim_table.gpu[view.gpu[i]];

    switch (field) {
    case 0: printf("%d", i); break;
    case 1: printf("%s", gpu->name); break;
    case 2: printf("%s", gpu->uuid); break;
    case 3: printf("%s", gpu->bus ? bus_id(gpu) : "[N/A]"); break;
    case 4: printf("%d", view.gpus); break;
    case 5: printf("%s", sim_table.driver_version); break;
    case 6: printf("%u.%u", gpu->major, gpu->minor); break;
    case 7: printf("%s", !sim_table.profiles ? "[N/A]" : sim_mig_mode[view.gpu[i]] ? "Enabled" : "Disabled"); break;
    case 8:
    case 9: printf("%llu", gpu->memory >> 20); break;
    case 12: printf("30"); break;
    default: printf("0"); break;
    }
}

/* Return whether NVML has no answer: about memory that a GPU shares, and about most of one that is not on PCI. */
static int is_unknown(int field, const struct sim_gpu *gpu) {
    return field >= 8 && (field <= 10 ? !gpu->memory : !gpu->bus);
}

static int query(char *names, const char *format, int only) {
    int wanted[MOST], count = 0, i, j, header, units;
    char *name, *rest = names;

    if (strncmp(format, "csv", 3) != 0)
        return usage("--query-gpu needs --format=csv, not \"%s\"", format);
    header = !strstr(format, "noheader");
    units = !strstr(format, "nounits");
    while ((name = strsep(&rest, ","))) {
        while (*name == ' ')
            name++;
        for (i = 0; i < FIELDS; i++)
            if (strcmp(name, fields[i].name) == 0 || (*name && strcmp(name, fields[i].alias) == 0))
                break;
        if (i == FIELDS || count == MOST)
            return usage("field \"%s\" is unknown", name);
        wanted[count++] = i;
    }
    for (i = 0; header && i < count; i++) {
        const struct field *field = &fields[wanted[i]];

        printf("%s%s", i ? ", " : "", field->name);
        if (*field->unit && units)
            printf(" [%s]", field->unit);
    }
    if (header)
        putchar('\n');
    EACH_GPU(i) {
        for (j = 0; j < count; j++) {
            printf("%s", j ? ", " : "");
            if (is_unknown(wanted[j], &sim_table.gpu[view.gpu[i]])) {
                printf("[N/A]");
                continue;
            }
            print_field(wanted[j], i);
            if (*fields[wanted[j]].unit && units)
                printf(" %s", fields[wanted[j]].unit);
        }
        putchar('\n');
    }
    say_simulated();
    return OK;
}

/* Return the index of the GPU named by index, UUID or bus id, -1 when there is none. */
static int find_gpu(const char *text) {
    char name[32];

    for (int i = 0; i < view.gpus; i++) {
        const struct sim_gpu *gpu = &sim_table.gpu[view.gpu[i]];

        snprintf(name, sizeof name, "%d", i);
        if (strcmp(text, name) == 0 || strcmp(text, gpu->uuid) == 0)
            return i;
        snprintf(name, sizeof name, "%s", bus_id(gpu));
        if (gpu->bus && (strcasecmp(text, name) == 0 || strcasecmp(text, name + 4) == 0 ||
                         strcasecmp(text, name + 9) == 0))
            return i;
    }
    return -1;
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

/* Reset GPUs, of a list by commas, all without one: a MIG mode that waits for it is in force then, and MIG devices are
 * gone. As the real one, not while a process uses one of them. */
static int reset_gpus(const char *selected) {
    char names[1024] = "", *rest = names, *name;
    int chosen[SIM_MOST_GPUS] = {0}, i, gpu;
    const char *line;

    snprintf(names, sizeof names, "%s", selected ? selected : "");
    for (i = 0; !selected && i < view.gpus; i++)
        chosen[view.gpu[i]] = 1;
    while (selected && (name = strsep(&rest, ","))) {
        i = find_gpu(name);
        if (i < 0) {
            printf("No devices were found\n");
            return NO_DEVICES;
        }
        chosen[view.gpu[i]] = 1;
    }
    SIM_EACH_LINE("/load", "process ", line) {
        gpu = sim_number(&line);
        if (gpu >= 0 && gpu < SIM_MOST_GPUS && chosen[gpu]) {
            printf("The following GPUs could not be reset:\n  GPU %s: In use by another client\n",
                   bus_id(&sim_table.gpu[gpu]));
            say_simulated();
            return IN_USE;
        }
    }
    if (!reset_mig(chosen)) {
        printf("Insufficient Permissions\n");
        return NO_PERMISSION;
    }
    for (i = 0; i < view.gpus; i++)
        if (chosen[view.gpu[i]])
            printf("GPU %s was successfully reset.\n", bus_id(&sim_table.gpu[view.gpu[i]]));
    say_simulated();
    return OK;
}

/* Note the length of time slices of one GPU, or of all: 0 default, 1 short, 2 medium, 3 long. */
static int set_timeslice(int only, const char *timeslice) {
    char path[4200];
    FILE *file;
    int i;

    if (strlen(timeslice) != 1 || *timeslice < '0' || *timeslice > '3') {
        printf("Invalid timeslice \"%s\"\n", timeslice);
        return INVALID;
    }
    EACH_GPU(i) {
        snprintf(path, sizeof path, "%s/timeslice%d", SIM_BELOW(""), view.gpu[i]);
        file = fopen(path, "we");
        if (!file) {
            printf("Insufficient Permissions\n");
            return NO_PERMISSION;
        }
        fprintf(file, "%s\n", timeslice);
        fclose(file);
        printf("Successfully set timeslice policy to %s for GPU %s\n", timeslice,
               bus_id(&sim_table.gpu[view.gpu[i]]));
    }
    say_simulated();
    return OK;
}

static int nvidia_smi(int argc, char **argv) {
    int i, only = -1, list = 0, reset = 0, policy = argc > 1 && strcmp(argv[1], "compute-policy") == 0;
    char *names = NULL, *timeslice = NULL;
    const char *format = "", *selected = NULL;

    for (i = 1 + policy; i < argc; i++) {
        if (policy && strncmp(argv[i], "--set-timeslice=", 16) == 0) {
            timeslice = argv[i] + 16;
        } else if (policy && strcmp(argv[i], "--set-timeslice") == 0 && i + 1 < argc) {
            timeslice = argv[++i];
        } else if (strcmp(argv[i], "-L") == 0 || strcmp(argv[i], "--list-gpus") == 0) {
            list = 1;
        } else if (strcmp(argv[i], "-r") == 0 || strcmp(argv[i], "--gpu-reset") == 0) {
            reset = 1;
        } else if (strncmp(argv[i], "--query-gpu=", 12) == 0) {
            names = argv[i] + 12;
        } else if (strncmp(argv[i], "--format=", 9) == 0) {
            format = argv[i] + 9;
        } else if (strncmp(argv[i], "--id=", 5) == 0) {
            selected = argv[i] + 5;
        } else if (strcmp(argv[i], "-i") == 0 && i + 1 < argc) {
            selected = argv[++i];
        } else if (strcmp(argv[i], "--version") == 0) {
            printf("NVIDIA-SMI version  : %s (simulated)\nNVML version        : %s\nDRIVER version      : %s\n"
                   "CUDA Version        : %d.%d\n",
                   sim_table.driver_version, sim_table.nvml_version, sim_table.driver_version,
                   sim_table.cuda_version / 1000, sim_table.cuda_version % 1000 / 10);
            return OK;
        } else {
            return usage("option \"%s\" is unknown", argv[i]);
        }
    }
    if (!sim_look(&view)) {
        printf("NVIDIA-SMI has failed because the NVIDIA driver (simulated) does not answer: no /dev/nvidiactl can be "
               "opened.\n");
        return NO_DRIVER;
    }
    sim_load();
    if (reset)
        return reset_gpus(selected);
    if (selected)
        only = find_gpu(selected);
    if (!view.gpus || (selected && only < 0)) {
        printf("No devices were found\n");
        say_simulated();
        return NO_DEVICES;
    }
    if (timeslice)
        return set_timeslice(only, timeslice);
    if (names)
        return query(names, format, only);
    return list ? list_gpus(only) : show_table(only);
}

int main(int argc, char **argv) {
    const char *name = argc > 0 ? strrchr(argv[0], '/') : NULL;

    name = name ? name + 1 : argc > 0 ? argv[0] : "nvidia-smi";
    if (strncmp(name, "nvidia-smi", 10) != 0 && (strncmp(name, "nvidia-", 7) == 0 || strncmp(name, "nv-", 3) == 0)) {
        printf("%s %s (simulated: does nothing)\n", name, sim_table.driver_version);
        return OK;
    }
    return nvidia_smi(argc, argv);
}
