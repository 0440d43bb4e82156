/* What the simulated NVML, CUDA and nvidia-smi share: the table of GPUs and the question which of them this process
 * may open.
 *
 * table.h is written when a host is made; it defines SIM_DIRECTORY, SIM_DRIVER_VERSION, SIM_CUDA_VERSION (such as
 * 12040), SIM_GPUS, SIM_MIGS, sim_gpus[] and sim_migs[] in the types below.
 *
 * Only functions that every libc has had for decades are used, so that the libraries load in old and in musl images.
 */
#ifndef OCIGPU_SIMHOST_H
#define OCIGPU_SIMHOST_H

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct sim_gpu {
    const char *name, *uuid;
    unsigned int brand, major, minor; /* compute capability */
    unsigned int bus, pci_device, pci_subsystem;
    unsigned int power_watts, multiprocessors;
    unsigned long long memory; /* bytes */
    int mig_capable, mig_enabled;
};

struct sim_mig {
    const char *profile, *uuid;
    int gpu; /* index of its GPU in sim_gpus[] */
    unsigned int gpu_instance, compute_instance, gi_minor, ci_minor;
    unsigned int gi_slices, ci_slices, multiprocessors;
    unsigned long long memory; /* bytes */
};

#include "table.h"

#define SIM_MAGIC "ocigpu simulated device"

enum sim_node { SIM_ABSENT, SIM_SIMULATED, SIM_REAL };

/* Say what is behind a device node. No driver answers for a simulated one, so opening it gives ENXIO once the node's
 * mode and the device cgroup allow it; a stand-in file starts with SIM_MAGIC. On a file system mounted nodev the open
 * gives EACCES whatever the mode, which only counts on the host itself (on_host). */
static enum sim_node sim_probe(const char *directory, const char *name, int on_host)
{
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
static int sim_look(struct sim_view *view)
{
    const char *given = getenv("OCIGPU_SIM_DEV");
    enum sim_node control, own;
    char name[32];
    int i;

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
    for (i = 0; i < SIM_GPUS; i++) {
        snprintf(name, sizeof name, "nvidia%d", i);
        if (sim_probe(view->directory, name, view->on_host) != SIM_ABSENT)
            view->gpu[view->gpus++] = i;
    }
    return 1;
}

/* Return whether a MIG device can be used: both of its capability nodes must open, as with the real driver. */
static int sim_mig_visible(const struct sim_view *view, const struct sim_mig *mig)
{
    char name[64];

    snprintf(name, sizeof name, "nvidia-caps/nvidia-cap%u", mig->gi_minor);
    if (sim_probe(view->directory, name, view->on_host) == SIM_ABSENT)
        return 0;
    snprintf(name, sizeof name, "nvidia-caps/nvidia-cap%u", mig->ci_minor);
    return sim_probe(view->directory, name, view->on_host) != SIM_ABSENT;
}

#endif
