/* GPU instances and compute instances: looked at, made and destroyed; part of nvml.c.
 *
 * Functions take a profile's enumerator when they ask about profiles, and its id everywhere else (nvml.h). What is made
 * is written into the host's directory for every other process: the state that sim_load reads, and what the kernel
 * module and nvidia-modprobe would make, the capability in /proc and its node.
 */
#include "simstate.h"

struct placement {
    unsigned int start, size;
};

enum { GI_PROFILES = 0x12, CI_PROFILES = 9 }; /* NVML_GPU_INSTANCE_PROFILE_COUNT, NVML_COMPUTE_INSTANCE_PROFILE_COUNT */

/* Compute slices, by enumerator (nvmlComputeInstanceProfile); the id is the same number. */
static const unsigned int ci_sizes[] = {1, 2, 3, 4, 7, 8, 6, 1};

enum { CI_SIZES = sizeof ci_sizes / sizeof *ci_sizes };

static nvml_return ask_gi(device_t gi, int valid) {
    REQUIRE(ask(1));
    refresh();
    return !is_instance(gi, 1) ? INVALID_ARGUMENT : lost[gi->gpu] ? GPU_IS_LOST : valid ? SUCCESS : INVALID_ARGUMENT;
}

static nvml_return ask_ci(device_t ci, int valid) {
    refresh();
    return ask_mig(ci, valid);
}

/* Find the profile with this id (of_id) or enumerator on a GPU in whatever mode. */
static nvml_return find_profile(device_t device, unsigned int wanted, int of_id, unsigned int *found) {
    REQUIRE(ask_gpu(device, 1));
    for (*found = 0; *found < sim_table.profiles; ++*found)
        if ((of_id ? sim_table.profile[*found].id : sim_table.profile[*found].enumerator) == wanted)
            return SUCCESS;
    return sim_table.profiles && (of_id || wanted >= GI_PROFILES) ? INVALID_ARGUMENT : NOT_SUPPORTED;
}

/* As find_profile by id, of a GPU in MIG mode. */
static nvml_return find_usable(device_t device, unsigned int id, const void *result, unsigned int *found) {
    REQUIRE(find_profile(device, id, 1, found));
    refresh();
    return !result ? INVALID_ARGUMENT : MIG_MODE(device) ? SUCCESS : NOT_SUPPORTED;
}

/* Find a size of compute instances that the GPU instance can have: a 4g is not cut into three. */
static nvml_return find_size(device_t gi, unsigned int number, const void *result, unsigned int *size) {
    REQUIRE(ask_gi(gi, result && number < CI_PROFILES));
    if (number >= CI_SIZES || ci_sizes[number] > PROFILE(gi)->slices || (number == 2 && PROFILE(gi)->slices == 4) ||
        number == 6 || (number == SIM_REV1 && !sim_has_rev1(PROFILE(gi))))
        return NOT_SUPPORTED;
    *size = ci_sizes[number];
    return SUCCESS;
}

static unsigned int bits(unsigned int start, unsigned int size) { return ((1u << size) - 1) << start; }

/* Return the memory slices of a GPU that are in use, or the compute slices of a GPU instance; fill how many instances
 * of one kind there are, and the engines that they all have. */
static unsigned int used(int gpu, int gi, int profile, unsigned int *count, unsigned int *engines) {
    unsigned int taken = 0, engine;

    *count = 0;
    for (int i = 0; i < sim_count; i++) {
        const struct sim_instance *mig = &sim_instances[i];

        if (mig->gpu != gpu || (gi < 0 ? mig->ci >= 0 : mig->gi != gi || mig->ci < 0))
            continue;
        *count += mig->profile == profile;
        taken |= gi < 0 ? bits((unsigned int)mig->start, sim_table.profile[mig->profile].size)
                        : bits((unsigned int)mig->ci_start, (unsigned int)mig->ci_slices);
        for (engine = 0; engines && engine < 5; engine++)
            engines[engine] += sim_table.profile[mig->profile].engines[engine];
    }
    return taken;
}

/* Return whether the GPU has what one more instance of this profile needs besides memory slices. */
static int has_engines(int gpu, int profile) {
    const struct sim_profile *whole = sim_table.profile, *one = &sim_table.profile[profile];
    unsigned int there[5] = {0}, count, i;

    for (i = 1; i < sim_table.profiles; i++)
        whole = sim_table.profile[i].slices > whole->slices ? &sim_table.profile[i] : whole;
    used(gpu, -1, profile, &count, there);
    for (i = 0; i < 5; i++)
        if (there[i] + one->engines[i] > whole->engines[i])
            return 0;
    return count < one->most;
}

struct gi_profile {
    unsigned int numbers[10];
    unsigned long long memory_mib;
};

struct gi_profile_v2 {
    unsigned int version, numbers[10];
    unsigned long long memory_mib;
    char name[96];
};

struct gi_profile_v3 {
    unsigned int version, numbers[9];
    unsigned long long memory_mib;
    char name[96];
    unsigned int capabilities;
};

static struct gi_profile describe_gi(int number) {
    const struct sim_profile *profile = &sim_table.profile[number];
    struct gi_profile info = {
        {profile->id, 0, profile->slices, profile->most, profile->multiprocessors}, profile->memory_mib};

    memcpy(info.numbers + 5, profile->engines, sizeof profile->engines);
    return info;
}

EXPORT nvml_return nvmlDeviceGetGpuInstanceProfileInfo(device_t device, unsigned int profile, struct gi_profile *info) {
    unsigned int number;

    REQUIRE(find_profile(device, profile, 0, &number));
    if (!info)
        return INVALID_ARGUMENT;
    *info = describe_gi(number);
    return SUCCESS;
}

static nvml_return give_gi_profile(int number, void *result) {
    struct gi_profile plain = describe_gi(number);
    struct gi_profile_v2 *two = result;
    struct gi_profile_v3 *three = result;

    if (!result)
        return INVALID_ARGUMENT;
    if (two->version == (sizeof *two | 2u << 24)) {
        memcpy(two->numbers, plain.numbers, sizeof plain.numbers);
        two->memory_mib = plain.memory_mib;
        snprintf(two->name, sizeof two->name, "MIG %s", sim_table.profile[number].name);
    } else if (three->version == (sizeof *three | 3u << 24)) {
        three->numbers[0] = plain.numbers[0];
        memcpy(three->numbers + 1, plain.numbers + 2, sizeof plain.numbers - 2 * sizeof *plain.numbers);
        three->memory_mib = plain.memory_mib;
        snprintf(three->name, sizeof three->name, "MIG %s", sim_table.profile[number].name);
        three->capabilities = strstr(three->name, "+gfx") ? 2 : 0; /* NVML_GPU_INSTANCE_PROFILE_CAPS_GFX */
    } else {
        return VERSION_MISMATCH;
    }
    return SUCCESS;
}

/* A function that finds the profile, or the size, by which it is asked. */
#define BY_NUMBER(name, parameters, find, answer) \
    EXPORT nvml_return name parameters            \
    {                                             \
        unsigned int number;                      \
                                                  \
        REQUIRE(find);                            \
        return answer;                            \
    }
/* named by its enumerator, and by its id */
BY_NUMBER(nvmlDeviceGetGpuInstanceProfileInfoV, (device_t device, unsigned int profile, void *info),
          find_profile(device, profile, 0, &number), give_gi_profile(number, info))
BY_NUMBER(nvmlDeviceGetGpuInstanceProfileInfoByIdV, (device_t device, unsigned int profile, void *info),
          find_profile(device, profile, 1, &number), give_gi_profile(number, info))

/* Fill a list with the places of this size that start at one of these slices, a bit each. */
static nvml_return give_places(unsigned int starts, unsigned int size, struct placement *list, unsigned int *count) {
    unsigned int start, found = 0;

    for (start = 0; start < 32; start++)
        if (starts >> start & 1 && found++ < *count && list)
            list[found - 1] = (struct placement){start, size};
    if (list && found > *count)
        return INSUFFICIENT_SIZE;
    *count = found;
    return SUCCESS;
}

BY_NUMBER(nvmlDeviceGetGpuInstancePossiblePlacements_v2,
          (device_t device, unsigned int id, struct placement *list, unsigned int *count),
          find_usable(device, id, count, &number),
          give_places(sim_table.profile[number].starts, sim_table.profile[number].size, list, count))

ALIAS(nvmlDeviceGetGpuInstancePossiblePlacements, nvmlDeviceGetGpuInstancePossiblePlacements_v2)

/* Return the highest slice that an instance can start at, as the driver does, -1 for none. */
static int free_start(unsigned int starts, unsigned int size, unsigned int taken) {
    int start;

    for (start = 31; start >= 0 && !(starts >> start & 1 && !(bits((unsigned int)start, size) & taken)); start--)
        ;
    return start;
}

EXPORT nvml_return nvmlDeviceGetGpuInstanceRemainingCapacity(device_t device, unsigned int id,
                                                             unsigned int *result) {
    unsigned int taken, count;
    unsigned int number;
    int start;

    REQUIRE(find_usable(device, id, result, &number));
    taken = used(device->gpu, -1, number, &count, NULL);
    *result = 0;
    if (!has_engines(device->gpu, number))
        return SUCCESS;
    while ((start = free_start(sim_table.profile[number].starts, sim_table.profile[number].size, taken)) >= 0) {
        taken |= bits((unsigned int)start, sim_table.profile[number].size);
        *result += *result + count < sim_table.profile[number].most;
    }
    return SUCCESS;
}

/* What changes */

static int lock_state(void) {
    int lock = sim_lock();

    refresh();
    return lock;
}

static nvml_return store(void) {
    int stored = sim_store();

    refresh();
    return stored ? SUCCESS : NO_PERMISSION;
}

static nvml_return add(struct sim_instance *mig, struct handle **result) {
    struct handle *made = slot(mig);

    if (sim_count == SIM_MOST)
        return INSUFFICIENT_RESOURCES;
    sim_show(mig, 1, view.directory);
    sim_instances[sim_count++] = *mig;
    if (store() != SUCCESS) {
        sim_show(mig, 0, view.directory);
        return NO_PERMISSION;
    }
    *result = made;
    return SUCCESS;
}

static nvml_return take_away(device_t handle) {
    struct sim_instance gone = *handle->mig;

    sim_count--;
    memmove(&sim_instances[handle->mig - sim_instances], handle->mig + 1,
            (size_t)(&sim_instances[sim_count] - handle->mig) * sizeof gone);
    REQUIRE(store());
    sim_show(&gone, 0, view.directory);
    return SUCCESS;
}

/* The result of something that is done under the lock. */
#define LOCKED(what)                                          \
    ({                                                        \
        int lock = lock_state();                              \
        nvml_return done = lock < 0 ? NO_PERMISSION : (what); \
                                                              \
        if (lock >= 0)                                        \
            close(lock);                                      \
        done;                                                 \
    })

/* A GPU that somebody uses cannot be reset: from Hopper on the mode stays, before it changes with the next reset. */
static nvml_return set_mode(device_t device, unsigned int mode, unsigned int *activation) {
    int gpu = device->gpu, used = mig_busy[gpu] || used_by_process(gpu, -1);

    for (int i = 0; i < sim_count; i++)
        if (!mode && sim_instances[i].gpu == gpu)
            return IN_USE;
    sim_mig_pending[gpu] = -1;
    if ((int)mode != sim_mig_mode[gpu] && used && HOPPER(device))
        return IN_USE;
    if ((int)mode != sim_mig_mode[gpu] && used) {
        sim_mig_pending[gpu] = (int)mode;
        *activation = IN_USE;
    } else {
        sim_mig_mode[gpu] = (int)mode;
    }
    return store();
}

/* The real one resets the GPU where that is needed. */
EXPORT nvml_return nvmlDeviceSetMigMode(device_t device, unsigned int mode, unsigned int *activation) {
    REQUIRE(ASK_IF(sim_table.profiles && device->gpu < SIM_MIG_GPUS, device, activation && mode <= 1));
    *activation = SUCCESS;
    return LOCKED(set_mode(device, mode, activation));
}

/* Make a GPU instance, at the highest free place without a given one. Ids are given by size: the whole GPU has 0, its
 * halves have 1 and 2, and so on. */
static nvml_return make_gi(int gpu, int number, const struct placement *place, struct handle **result) {
    const struct sim_profile *profile = &sim_table.profile[number];
    int share = sim_table.memory_slices / (int)(profile->size ? profile->size : 1);
    unsigned int count, taken = used(gpu, -1, number, &count, NULL);
    struct sim_instance mig = {gpu, share - 1, number, 0, -1, 0, 0, 0, "-"};

    if (place && (place->size != profile->size || place->start > 31 || !(profile->starts >> place->start & 1)))
        return INVALID_ARGUMENT;
    mig.start = free_start(place ? 1u << place->start : profile->starts, profile->size, taken);
    while (mig.gi < 2 * share - 1 && instances[gpu][mig.gi][0].mig)
        mig.gi++;
    if (mig.start < 0 || mig.gi == 2 * share - 1 || !has_engines(gpu, number))
        return INSUFFICIENT_RESOURCES;
    return add(&mig, result);
}

BY_NUMBER(nvmlDeviceCreateGpuInstanceWithPlacement,
          (device_t device, unsigned int id, const struct placement *place, struct handle **gi),
          find_usable(device, id, gi, &number), LOCKED(make_gi(device->gpu, number, place, gi)))

EXPORT nvml_return nvmlDeviceCreateGpuInstance(device_t device, unsigned int id, struct handle **gi) {
    return nvmlDeviceCreateGpuInstanceWithPlacement(device, id, NULL, gi);
}

static nvml_return remove_gi(device_t gi) {
    unsigned int count;

    REQUIRE(ask_gi(gi, 1));
    return used(gi->gpu, gi->mig->gi, 0, &count, NULL) || used_by_process(gi->gpu, gi->mig->gi) ? IN_USE
                                                                                                : take_away(gi);
}

EXPORT nvml_return nvmlGpuInstanceDestroy(device_t gi) {
    REQUIRE(ask_gi(gi, 1));
    return LOCKED(remove_gi(gi));
}

/* Fill a list with handles: of GPU instances of one profile on a GPU, or of compute instances of one profile. */
static nvml_return list_instances(int gpu, int gi, int kind, unsigned int *count, struct handle **list) {
    *count = 0;
    for (int i = 0; i < sim_count; i++) {
        const struct sim_instance *mig = &sim_instances[i];

        if (mig->gpu == gpu && slot(mig)->mig &&
            (gi < 0 ? mig->ci < 0 && mig->profile == kind : mig->gi == gi && mig->ci >= 0 && mig->ci_profile == kind))
            list[(*count)++] = slot(mig);
    }
    return SUCCESS;
}

BY_NUMBER(nvmlDeviceGetGpuInstances, (device_t device, unsigned int id, struct handle **list, unsigned int *count),
          find_usable(device, id, list, &number),
          count ? list_instances(device->gpu, -1, number, count, list) : INVALID_ARGUMENT)

EXPORT nvml_return nvmlDeviceGetGpuInstanceById(device_t device, unsigned int id, struct handle **gi) {
    REQUIRE(ASK_IF(sim_table.profiles, device, !!gi));
    refresh();
    if (id >= SIM_GIS || !instances[device->gpu][id][0].mig)
        return NOT_FOUND;
    *gi = &instances[device->gpu][id][0];
    return SUCCESS;
}

struct gi_info {
    struct handle *device;
    unsigned int id, profile;
    struct placement place;
};

ANSWER(nvmlGpuInstanceGetInfo, (device_t gi, struct gi_info *result), ask_gi(gi, !!result),
       ((struct gi_info){parent(gi), gi->mig->gi, PROFILE(gi)->id, {gi->mig->start, PROFILE(gi)->size}}))

struct ci_profile {
    unsigned int numbers[9];
};

struct ci_profile_v2 {
    unsigned int version, numbers[9];
    char name[96];
    unsigned int capabilities; /* of version 3 */
};

EXPORT nvml_return nvmlGpuInstanceGetComputeInstanceProfileInfo(device_t gi, unsigned int profile,
                                                                unsigned int engines, struct ci_profile *info) {
    unsigned int size;

    REQUIRE(find_size(gi, profile, info, &size));
    if (engines)
        return NOT_SUPPORTED;
    *info = (struct ci_profile){{profile, size, PROFILE(gi)->slices / size,
                                 sim_multiprocessors(PROFILE(gi), (int)size, (int)profile)}};
    memcpy(info->numbers + 4, PROFILE(gi)->engines, sizeof PROFILE(gi)->engines);
    return SUCCESS;
}

EXPORT nvml_return nvmlGpuInstanceGetComputeInstanceProfileInfoV(device_t gi, unsigned int profile,
                                                                 unsigned int engines, struct ci_profile_v2 *info) {
    unsigned int version = info ? info->version >> 24 : 0, size;
    struct ci_profile plain;
    struct sim_instance named;

    REQUIRE(find_size(gi, profile, info, &size));
    if ((version != 2 || (info->version & 0xFFFFFF) != offsetof(struct ci_profile_v2, capabilities)) &&
        (version != 3 || (info->version & 0xFFFFFF) != sizeof *info))
        return VERSION_MISMATCH;
    REQUIRE(nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, profile, engines, &plain));
    memcpy(info->numbers, plain.numbers, sizeof plain.numbers);
    named = *gi->mig;
    named.ci_slices = (int)size;
    named.ci_profile = (int)profile;
    memcpy(info->name, "MIG ", 4);
    sim_mig_name(&named, info->name + 4, sizeof info->name - 4);
    if (version == 3)
        info->capabilities = strstr(info->name, "+gfx") ? 1 : 0; /* NVML_COMPUTE_INSTANCE_PROFILE_CAPS_GFX */
    return SUCCESS;
}

EXPORT nvml_return nvmlGpuInstanceGetComputeInstanceRemainingCapacity(device_t gi, unsigned int id,
                                                                      unsigned int *result) {
    unsigned int size, start, taken, count;

    REQUIRE(find_size(gi, id, result, &size));
    taken = used(gi->gpu, gi->mig->gi, 0, &count, NULL);
    for (*result = start = 0; start + size <= PROFILE(gi)->slices; start++) {
        if (bits(start, size) & taken)
            continue;
        taken |= bits(start, size);
        ++*result;
    }
    return SUCCESS;
}

BY_NUMBER(nvmlGpuInstanceGetComputeInstancePossiblePlacements,
          (device_t gi, unsigned int id, struct placement *list, unsigned int *count),
          find_size(gi, id, count, &number),
          give_places(bits(0, PROFILE(gi)->slices - number + 1), number, list, count))

/* Write a UUID that says which instance it is of: the same one gets the same again. */
static void write_uuid(struct sim_instance *mig) {
    unsigned long long halves[2];
    char text[128], *c;

    snprintf(text, sizeof text, "%s/%d/%d/%d/%d%s", sim_table.gpu[mig->gpu].uuid, mig->gi, mig->ci, mig->profile,
             mig->ci_slices, mig->ci_profile == 0 && sim_has_rev1(&sim_table.profile[mig->profile]) ? "/0" : "");
    for (int i = 0; i < 2; i++) { /* FNV-1a with two offsets */
        halves[i] = 14695981039346656037ull + (unsigned int)i;
        for (c = text; *c; c++)
            halves[i] = (halves[i] ^ (unsigned char)*c) * 1099511628211ull;
    }
    snprintf(mig->uuid, sizeof mig->uuid, "MIG-%08x-%04x-5%03x-8%03x-%012llx", (unsigned int)(halves[0] >> 32),
             (unsigned int)(halves[0] >> 16 & 0xFFFF), (unsigned int)(halves[0] & 0xFFF),
             (unsigned int)(halves[1] >> 52), halves[1] & 0xFFFFFFFFFFFFull);
}

static nvml_return make_ci(device_t gi, unsigned int size, unsigned int profile, const struct placement *place,
                           struct handle **result) {
    struct sim_instance mig = *gi->mig;
    unsigned int count, start, taken = used(mig.gpu, mig.gi, 0, &count, NULL);

    if (place && (place->size != size || place->start >= PROFILE(gi)->slices))
        return INVALID_ARGUMENT;
    for (start = place ? place->start : 0; bits(start, size) & taken; start++)
        if (place)
            return INSUFFICIENT_RESOURCES;
    if (start + size > PROFILE(gi)->slices)
        return INSUFFICIENT_RESOURCES;
    mig.ci = 0;
    while (instances[mig.gpu][mig.gi][1 + mig.ci].mig)
        mig.ci++;
    mig.ci_slices = (int)size;
    mig.ci_start = (int)start;
    mig.ci_profile = (int)profile;
    write_uuid(&mig);
    return add(&mig, result);
}

BY_NUMBER(nvmlGpuInstanceCreateComputeInstanceWithPlacement,
          (device_t gi, unsigned int id, const struct placement *place, struct handle **ci),
          find_size(gi, id, ci, &number),
          LOCKED(is_instance(gi, 1) ? make_ci(gi, number, id, place, ci) : INVALID_ARGUMENT))

EXPORT nvml_return nvmlGpuInstanceCreateComputeInstance(device_t gi, unsigned int id, struct handle **ci) {
    return nvmlGpuInstanceCreateComputeInstanceWithPlacement(gi, id, NULL, ci);
}

EXPORT nvml_return nvmlComputeInstanceDestroy(device_t ci) {
    REQUIRE(ask_ci(ci, 1));
    return LOCKED(!is_instance(ci, 0)                        ? INVALID_ARGUMENT
                  : used_by_process(ci->gpu, ci->mig->gi) ? IN_USE
                                                          : take_away(ci));
}

BY_NUMBER(nvmlGpuInstanceGetComputeInstances, (device_t gi, unsigned int id, struct handle **list, unsigned int *count),
          find_size(gi, id, list, &number),
          count ? list_instances(gi->gpu, gi->mig->gi, (int)id, count, list) : INVALID_ARGUMENT)

EXPORT nvml_return nvmlGpuInstanceGetComputeInstanceById(device_t gi, unsigned int id, struct handle **ci) {
    REQUIRE(ask_gi(gi, !!ci));
    if (id >= SIM_CIS || !instances[gi->gpu][gi->mig->gi][1 + id].mig)
        return NOT_FOUND;
    *ci = &instances[gi->gpu][gi->mig->gi][1 + id];
    return SUCCESS;
}

struct ci_info {
    struct handle *device, *gi;
    unsigned int id, profile;
    struct placement place;
};

ANSWER(nvmlComputeInstanceGetInfo_v2, (device_t ci, struct ci_info *result), ask_ci(ci, !!result),
       ((struct ci_info){parent(ci), &instances[ci->gpu][ci->mig->gi][0], ci->mig->ci, (unsigned int)ci->mig->ci_profile,
                         {ci->mig->ci_start, ci->mig->ci_slices}}))
ALIAS(nvmlComputeInstanceGetInfo, nvmlComputeInstanceGetInfo_v2)
