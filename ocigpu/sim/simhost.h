/* What the simulated NVML, CUDA and nvidia-smi share: the table of GPUs and the question which of them this process
 * may open.
 *
 * The table is empty here. It is filled in in the finished file when a host is made (table.py), so that a wheel can
 * bring the libraries to machines without a compiler.
 *
 * Only functions that every libc has had for decades are used, so that the libraries load in old and in musl images.
 */
#ifndef OCIGPU_SIMHOST_H
#define OCIGPU_SIMHOST_H

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { SIM_MOST_GPUS = 64, SIM_MOST_PROFILES = 16, SIM_MIG_SIZE = 48 << 10, SIM_PATH = 4400 };

struct sim_gpu {
    char name[64], uuid[48];
    unsigned int brand, major, minor; /* compute capability */
    unsigned int bus, pci_device, pci_subsystem, numa; /* bus: and the domain above its 8 bits; 0: not on PCI */
    unsigned int power_watts, multiprocessors, ats;    /* ats: it uses the processor's page tables */
    unsigned long long memory; /* bytes; 0: NVML knows none, as of GPUs that have no memory of their own */
};

/* Arguments of a PCI address in a format such as "%04X:%02X:00.0". */
#define SIM_BUS(gpu) (gpu)->bus >> 8, (gpu)->bus & 0xFF

struct sim_profile { /* of GPU instances; see MigProfile in models.py */
    char name[32];
    unsigned int enumerator, id, slices, size, most, multiprocessors, engines[5];
    unsigned int starts; /* a bit for each memory slice that it may start at */
    unsigned long long memory_mib;
};

/* A GPU instance (ci is -1) or a compute instance in one. */
struct sim_instance {
    int gpu, gi, profile, start;
    int ci, ci_slices, ci_start, ci_profile; /* its nvmlComputeInstanceProfile */
    char uuid[48];
};

/* What differs from host to host, in the order of table.py. */
struct sim_table {
    char magic[32]; /* the file is searched for it */
    char directory[4096], driver_version[32], nvml_version[32], cluster[48];
    int cuda_version, gpus, nvlinks, nvlink_group, nvlinks_each, profiles, memory_slices, caps_major;
    int few; /* for programs that see the host's directory, whatever nodes there are in /dev */
    struct sim_gpu gpu[SIM_MOST_GPUS];
    struct sim_profile profile[SIM_MOST_PROFILES];
    char mig_state[SIM_MIG_SIZE]; /* how the GPUs were cut when the host was made */
};

/* Not static: the compiler must not take the empty one for what it will always be. */
__attribute__((visibility("hidden"))) struct sim_table sim_table = {.magic = "ocigpu simulated GPU table 1"};

enum { SIM_GIS = 15, SIM_CIS = 8, SIM_MOST = SIM_MOST_GPUS * 2 * SIM_GIS };
enum { SIM_CPUS_OF_NODE = 64, SIM_MIG_GPUS = 32, SIM_FIRST_MINOR = 3 }; /* as in models.py */

static struct sim_instance sim_instances[SIM_MOST];
static int sim_count, sim_mig_mode[SIM_MOST_GPUS], sim_mig_pending[SIM_MOST_GPUS]; /* pending: -1 for none */
static char sim_last[SIM_MOST * 80 + 4096]; /* what they were read from */

#define SIM_STATE "/proc/driver/ocigpu-mig" /* below the host's directory; containers have its /proc/driver */

/* A path below the host's directory, until the end of the block. */
#define SIM_BELOW(name) sim_join((char[SIM_PATH]){0}, name)

static const char *sim_join(char *path, const char *name) {
    snprintf(path, SIM_PATH, "%s%s", sim_table.directory, name);
    return path;
}

/* Return the decimal number that a text starts with, and let the text start behind it and a blank. */
static int sim_number(const char **text) {
    int value = 0, sign = **text == '-';

    for (*text += sign; **text >= '0' && **text <= '9' && value < 100000000; (*text)++)
        value = value * 10 + (**text - '0');
    *text += **text == ' ';
    return sign ? -value : value;
}

/* Read a small file, at most size - 1 bytes of it; return its text, NULL when there is none. */
static char *sim_read_text(const char *path, char *text, size_t size) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t got;

    if (fd < 0)
        return NULL;
    got = read(fd, text, size - 1);
    close(fd);
    text[got > 0 ? got : 0] = 0;
    return text;
}

/* Return what is behind a word at the start of the next line that has it, NULL for none; *text is then behind that
 * line, NULL behind one without an end. */
static const char *sim_next_line(char **text, const char *word) {
    while (*text && **text) {
        char *line = *text, *end = strchr(line, '\n');

        if (end)
            *end = 0;
        *text = end ? end + 1 : NULL;
        if (strncmp(line, word, strlen(word)) == 0)
            return line + strlen(word);
    }
    return NULL;
}

#define SIM_EACH_LINE(path, word, rest)                                                 \
    for (char lines[4096], *text = sim_read_text(SIM_BELOW(path), lines, sizeof lines); \
         (rest = sim_next_line(&text, word));)

/* Read how the GPUs are cut, and return whether that has changed: lines "mode GPU 0|1", "pending GPU 0|1" (the mode
 * after a reset) and "mig" with the numbers of struct sim_instance and a UUID. */
static int sim_load(void) {
    static char text[sizeof sim_last];
    char *rest = text;
    const char *line;
    ssize_t size = 0, got;
    int fd = open(SIM_BELOW(SIM_STATE), O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        fd = open(SIM_STATE, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        size = (ssize_t)strlen(sim_table.mig_state);
        memcpy(text, sim_table.mig_state, (size_t)size);
    } else {
        while (size < (ssize_t)sizeof text - 1 && (got = read(fd, text + size, sizeof text - 1 - size)) > 0)
            size += got;
        close(fd);
    }
    text[size] = 0;
    if (*sim_last && strcmp(text, sim_last) == 0)
        return 0;
    strcpy(sim_last, text);
    sim_count = 0;
    memset(sim_mig_mode, 0, sizeof sim_mig_mode);
    memset(sim_mig_pending, -1, sizeof sim_mig_pending);
    while ((line = sim_next_line(&rest, ""))) {
        struct sim_instance *item = &sim_instances[sim_count];
        int *field, gpu;

        if (strncmp(line, "mode ", 5) == 0) {
            line += 5;
            gpu = sim_number(&line);
            if (gpu >= 0 && gpu < sim_table.gpus)
                sim_mig_mode[gpu] = sim_number(&line);
        } else if (strncmp(line, "pending ", 8) == 0) {
            line += 8;
            gpu = sim_number(&line);
            if (gpu >= 0 && gpu < sim_table.gpus)
                sim_mig_pending[gpu] = sim_number(&line);
        } else if (strncmp(line, "mig ", 4) == 0 && sim_count < SIM_MOST) {
            for (line += 4, field = &item->gpu; field <= &item->ci_profile; field++)
                *field = sim_number(&line);
            snprintf(item->uuid, sizeof item->uuid, "%s", line);
            sim_count += item->gpu < sim_table.gpus && item->gi < SIM_GIS && item->ci < SIM_CIS;
        }
    }
    return 1;
}

enum { SIM_REV1 = 7 }; /* NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1 */

/* Return the multiprocessors of the GPU's smallest instance. */
static unsigned int sim_least(void) {
    unsigned int least = ~0u;

    for (int i = 0; i < sim_table.profiles; i++)
        if (sim_table.profile[i].slices == 1 && sim_table.profile[i].multiprocessors < least)
            least = sim_table.profile[i].multiprocessors;
    return least;
}

/* Say whether a GPU instance has two profiles of compute instances of one slice: one with the multiprocessors of a
 * slice, and REV1 with all of a GPU instance that has one compute slice and more multiprocessors than that. */
static int sim_has_rev1(const struct sim_profile *profile) {
    return profile->slices == 1 && profile->multiprocessors > sim_least();
}

/* Return the multiprocessors of a compute instance: it has some or all slices of a GPU instance. */
static unsigned int sim_multiprocessors(const struct sim_profile *profile, int slices, int ci_profile) {
    return ci_profile == 0 && sim_has_rev1(profile) ? sim_least()
                                                    : profile->multiprocessors * (unsigned int)slices / profile->slices;
}

/* Write a compute instance's name, such as "1g.10gb" or "1c.3g.40gb" of a part of a GPU instance. */
static void sim_mig_name(const struct sim_instance *mig, char *name, size_t size) {
    const struct sim_profile *profile = &sim_table.profile[mig->profile];

    if (mig->ci_slices == (int)profile->slices && (mig->ci_profile == SIM_REV1 || !sim_has_rev1(profile)))
        snprintf(name, size, "%s", profile->name);
    else
        snprintf(name, size, "%dc.%s", mig->ci_slices, profile->name);
}

/* Return the minor of an instance's node: that of a GPU instance for -1. */
static int sim_minor(int gpu, int gi, int ci) {
    return SIM_FIRST_MINOR + (gpu * SIM_GIS + gi) * (1 + SIM_CIS) + 1 + ci;
}

#define SIM_MAGIC "ocigpu simulated device"

enum sim_node { SIM_ABSENT, SIM_SIMULATED, SIM_REAL };

/* Say what is behind a device node. No driver answers for a simulated one, so opening it gives ENXIO once the node's
 * mode and the device cgroup allow it; a stand-in file starts with SIM_MAGIC. On a file system mounted nodev the open
 * gives EACCES whatever the mode, which only counts on the host itself (on_host). */
static enum sim_node sim_probe(const char *directory, const char *name, int on_host) {
    char path[SIM_PATH + 64];
    char start[sizeof SIM_MAGIC - 1];
    int fd;
    ssize_t size;

    snprintf(path, sizeof path, "%s/%s", directory, name);
    fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        if (errno == ENXIO)
            return SIM_SIMULATED;
        if (errno == EACCES && on_host && access(path, R_OK) == 0)
            return SIM_SIMULATED;
        return SIM_ABSENT;
    }
    size = read(fd, start, sizeof start);
    close(fd);
    if (size == (ssize_t)sizeof start && memcmp(start, SIM_MAGIC, sizeof start) == 0)
        return SIM_SIMULATED;
    return SIM_REAL;
}

struct sim_view {
    char directory[SIM_PATH]; /* where the nodes are */
    int on_host;              /* it is the simulated host's, not a container's /dev */
    int gpus;
    int gpu[SIM_MOST_GPUS];   /* indices into sim_table.gpu[] */
};

/* Find the nodes and fill the view; 0 when there is no nvidiactl.
 *
 * A container has its nodes in /dev, and /proc/driver/nvidia beside them. On the host they are below the simulated
 * host's directory; a nvidiactl of /dev is there a real GPU's, or left over and nobody's. It is only ours to use where
 * the simulated host's directory cannot be seen. */
static int sim_look(struct sim_view *view) {
    const char *given = getenv("OCIGPU_SIM_DEV");
    enum sim_node control;
    char name[32];

    view->gpus = 0;
    view->on_host = 0;
    if (given && *given) {
        snprintf(view->directory, sizeof view->directory, "%s", given);
        view->on_host = 1;
        if (sim_probe(given, "nvidiactl", 1) == SIM_ABSENT)
            return 0;
    } else {
        control = sim_probe("/dev", "nvidiactl", 0);
        snprintf(view->directory, sizeof view->directory, "%s", SIM_BELOW("/dev"));
        view->on_host = (sim_table.few || control != SIM_SIMULATED || access("/proc/driver/nvidia", F_OK)) &&
                        sim_probe(view->directory, "nvidiactl", 1) != SIM_ABSENT;
        if (!view->on_host && control == SIM_ABSENT)
            return 0;
        if (!view->on_host)
            strcpy(view->directory, "/dev");
    }
    for (int i = 0; i < sim_table.gpus; i++) {
        snprintf(name, sizeof name, "nvidia%d", i);
        if (sim_probe(view->directory, name, view->on_host) != SIM_ABSENT)
            view->gpu[view->gpus++] = i;
    }
    return 1;
}

/* Return whether an instance can be used: its capability node must open, and for a compute instance that of the GPU
 * instance too, as with the real driver. */
static int sim_visible(const struct sim_view *view, const struct sim_instance *mig) {
    char name[64];

    snprintf(name, sizeof name, "nvidia-caps/nvidia-cap%d", sim_minor(mig->gpu, mig->gi, -1));
    if (sim_probe(view->directory, name, view->on_host) == SIM_ABSENT)
        return 0;
    snprintf(name, sizeof name, "nvidia-caps/nvidia-cap%d", sim_minor(mig->gpu, mig->gi, mig->ci));
    return mig->ci < 0 || sim_probe(view->directory, name, view->on_host) != SIM_ABSENT;
}

#endif
