/* What the simulated NVML, CUDA and nvidia-smi share: the table of GPUs and the question which of them this process
 * may open.
 *
 * table.h is written when a host is made (libraries.py): the directory, versions, what connects the GPUs, and
 * sim_gpus[], sim_profiles[] in the types below; SIM_MIG_STATE is how the GPUs were cut then.
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

struct sim_gpu {
    const char *name, *uuid;
    unsigned int brand, major, minor; /* compute capability */
    unsigned int bus, pci_device, pci_subsystem, numa;
    unsigned int power_watts, multiprocessors;
    unsigned long long memory; /* bytes */
};

struct sim_profile { /* of GPU instances; see MigProfile in models.py */
    const char *name;
    unsigned int enumerator, id, slices, size, most, multiprocessors, engines[5];
    unsigned int starts; /* a bit for each memory slice that it may start at */
    unsigned long long memory_mib;
};

/* A GPU instance (ci is -1) or a compute instance in one. */
struct sim_instance {
    int gpu, gi, profile, start;
    int ci, ci_slices, ci_start;
    char uuid[48];
};

#include "table.h"

enum { SIM_GIS = 15, SIM_CIS = 8, SIM_MOST = SIM_GPUS * 2 * SIM_GIS };

static struct sim_instance sim_instances[SIM_MOST];
static int sim_count, sim_mig_mode[SIM_GPUS];
static char sim_last[SIM_MOST * 80 + 4096]; /* what they were read from */

#define SIM_STATE "/proc/driver/ocigpu-mig" /* below SIM_DIRECTORY, and in containers, which have its /proc/driver */

/* Return the decimal number that a text starts with, and let the text start behind it and a blank. */
static int sim_number(const char **text) {
    int value = 0, sign = **text == '-';

    for (*text += sign; **text >= '0' && **text <= '9' && value < 100000000; (*text)++)
        value = value * 10 + (**text - '0');
    *text += **text == ' ';
    return sign ? -value : value;
}

/* Read how the GPUs are cut, and return whether that has changed: lines "mode GPU 0|1" and "mig" with the numbers of
 * struct sim_instance and a UUID. */
static int sim_load(void) {
    static char text[sizeof sim_last];
    const char *line;
    ssize_t size = 0, got;
    int fd = open(SIM_DIRECTORY SIM_STATE, O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        fd = open(SIM_STATE, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        size = sizeof SIM_MIG_STATE - 1;
        memcpy(text, SIM_MIG_STATE, sizeof SIM_MIG_STATE);
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
    for (line = text; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        struct sim_instance *item = &sim_instances[sim_count];
        int *field, gpu, length;

        if (strncmp(line, "mode ", 5) == 0) {
            line += 5;
            gpu = sim_number(&line);
            if (gpu >= 0 && gpu < SIM_GPUS)
                sim_mig_mode[gpu] = sim_number(&line);
        } else if (strncmp(line, "mig ", 4) == 0 && sim_count < SIM_MOST) {
            for (line += 4, field = &item->gpu; field <= &item->ci_start; field++)
                *field = sim_number(&line);
            length = (int)strcspn(line, "\n");
            snprintf(item->uuid, sizeof item->uuid, "%.*s", length, line);
            sim_count += item->gpu < SIM_GPUS && item->gi < SIM_GIS && item->ci < SIM_CIS;
        }
    }
    return 1;
}

/* Write a compute instance's name, such as "1g.10gb" or "1c.3g.40gb" of a part of a GPU instance. */
static void sim_mig_name(const struct sim_instance *mig, char *name, size_t size) {
    const struct sim_profile *profile = &sim_profiles[mig->profile];

    if (mig->ci_slices == (int)profile->slices)
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
    char path[4200];
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
    const char *directory; /* where the nodes are */
    int on_host;           /* it is SIM_DIRECTORY/dev, not a container's /dev */
    int gpus;
    int gpu[SIM_GPUS];     /* indices into sim_gpus[] */
};

/* Find the nodes and fill the view; 0 when there is no nvidiactl.
 *
 * A container has its nodes in /dev. On the host they are in SIM_DIRECTORY/dev, and a nvidiactl of /dev with a driver
 * behind it belongs to a real GPU: it is only ours to use where the simulated host's directory cannot be seen. */
static int sim_look(struct sim_view *view) {
    const char *given = getenv("OCIGPU_SIM_DEV");
    enum sim_node control, own;
    char name[32];

    view->gpus = 0;
    view->on_host = 0;
    if (given && *given) {
        view->directory = given;
        view->on_host = 1;
        if (sim_probe(given, "nvidiactl", 1) == SIM_ABSENT)
            return 0;
    } else {
        view->directory = "/dev";
        control = sim_probe("/dev", "nvidiactl", 0);
        if (control != SIM_SIMULATED) {
            own = sim_probe(SIM_DIRECTORY "/dev", "nvidiactl", 1);
            if (own != SIM_ABSENT) {
                view->directory = SIM_DIRECTORY "/dev";
                view->on_host = 1;
            } else if (control == SIM_ABSENT) {
                return 0;
            }
        }
    }
    for (int i = 0; i < SIM_GPUS; i++) {
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
