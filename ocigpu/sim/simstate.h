/* How a simulated host's GPUs are cut, changed: by NVML, and by nvidia-smi's reset. */
#ifndef OCIGPU_SIMSTATE_H
#define OCIGPU_SIMSTATE_H

#include "simhost.h"

#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>

/* Lock the host's state; return the lock or -1 when this process may not change it. */
static int sim_lock(void) {
    int lock = open(SIM_BELOW("/proc/driver"), O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    if (lock >= 0 && (access(SIM_BELOW("/proc/driver"), W_OK) || flock(lock, LOCK_EX))) {
        close(lock);
        lock = -1;
    }
    return lock;
}

static int sim_write_text(const char *path, mode_t mode, const char *text, size_t size) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode), written;

    if (fd < 0)
        return 0;
    written = fchmod(fd, mode) == 0 && write(fd, text, size) == (ssize_t)size;
    return close(fd) == 0 && written;
}

/* Write how the GPUs are cut; return whether that could be. It is read again by whoever needs it. */
static int sim_store(void) {
    static char text[sizeof sim_last];
    const char *draft = SIM_BELOW(SIM_STATE ".new");
    size_t at = 0;
    int i;

    for (i = 0; i < sim_table.gpus; i++)
        at += (size_t)snprintf(text + at, sizeof text - at, "mode %d %d\n", i, sim_mig_mode[i]);
    for (i = 0; i < sim_table.gpus; i++)
        if (sim_mig_pending[i] >= 0)
            at += (size_t)snprintf(text + at, sizeof text - at, "pending %d %d\n", i, sim_mig_pending[i]);
    for (i = 0; i < sim_count; i++) {
        const struct sim_instance *mig = &sim_instances[i];

        at += (size_t)snprintf(text + at, sizeof text - at, "mig %d %d %d %d %d %d %d %d %s\n", mig->gpu, mig->gi,
                               mig->profile, mig->start, mig->ci, mig->ci_slices, mig->ci_start, mig->ci_profile,
                               mig->uuid);
    }
    i = sim_write_text(draft, 0644, text, at) && rename(draft, SIM_BELOW(SIM_STATE)) == 0;
    *sim_last = 0; /* what is in force is what the file says now */
    return i;
}

/* Make (or remove) what the kernel module shows of an instance, and its node, which is also in a directory. */
static void sim_show(const struct sim_instance *mig, int make, const char *directory) {
    const char *devices[] = {SIM_BELOW("/dev"), directory}, *magic = SIM_MAGIC "\n";
    int minor = sim_minor(mig->gpu, mig->gi, mig->ci), i, size;
    /* as the kernel takes it */
    unsigned int number = (unsigned int)sim_table.caps_major << 8 | (minor & 0xFF) | (minor & ~0xFF) << 12;
    char path[SIM_PATH + 64], text[128];

    size = snprintf(path, sizeof path, "%s/proc/driver/nvidia/capabilities/gpu%d/mig/gi%d", sim_table.directory,
                    mig->gpu, mig->gi);
    if (mig->ci >= 0)
        size += snprintf(path + size, sizeof path - (size_t)size, "/ci%d", mig->ci);
    if (make)
        mkdir(path, 0755);
    snprintf(path + size, sizeof path - (size_t)size, "/access");
    size = snprintf(text, sizeof text, "DeviceFileMinor: %d\nDeviceFileMode: 292\nDeviceFileModify: 1\n", minor);
    if (make) {
        sim_write_text(path, 0444, text, (size_t)size);
    } else {
        unlink(path);
        *strrchr(path, '/') = 0;
        rmdir(path);
    }
    for (i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/nvidia-caps/nvidia-cap1", devices[i]);
        size = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a file that stands for a node can be opened */
        snprintf(path, sizeof path, "%s/nvidia-caps/nvidia-cap%d", devices[i], minor);
        if (!make)
            unlink(path);
        else if (size >= 0)
            sim_write_text(path, 0444, magic, strlen(magic));
        else if (syscall(SYS_mknodat, AT_FDCWD, path, S_IFCHR | 0444, number) == 0)
            chmod(path, 0444);
        if (size >= 0)
            close(size);
    }
}

#endif
