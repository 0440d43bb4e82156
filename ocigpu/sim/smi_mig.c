/* nvidia-smi mig and -mig: GPU instances and compute instances, made and destroyed by NVML's functions, so that other
 * programs see the same; part of smi.c.
 */

#define IS_MIG(gpu) (sim_table.profiles && MIG_MODE(gpu))
#define EACH_MIG_GPU(gpu) EACH_GPU(gpu) if (IS_MIG(gpu))

static void line_of(char line, int length) {
    while (length--)
        putchar(line);
}

static void border(int width) {
    putchar('+');
    line_of('-', width);
    puts("+");
}

/* Write the head of a table; `wider`: columns that names need beyond those of the real one. */
static void head(int width, int wider, const char *const *lines, int count, int name_end) {
    border(width + wider);
    for (int i = 0; i < count; i++)
        printf("|%.*s%*s%s|\n", name_end, lines[i], wider, "", lines[i] + name_end);
    putchar('|');
    line_of('=', width + wider);
    puts("|");
}

static int none(const char *what) {
    printf("%s\n", what);
    return NO_DEVICES;
}

/* Return how many columns the longest name of a profile needs beyond `room`. */
static int wider_than(int room) {
    int most = 0;

    for (int i = 0; i < sim_table.profiles; i++)
        if ((int)strlen(sim_table.profile[i].name) > room + most)
            most = (int)strlen(sim_table.profile[i].name) - room;
    return most;
}

static int list_profiles(void) {
    static const char *const lines[] = {
        " GPU instance profiles:                                                      ",
        " GPU   Name             ID    Instances   Memory     P2P    SM    DEC   ENC  ",
        "                              Free/Total   GiB              CE    JPEG  OFA  ",
    };
    int wider = wider_than(13);
    device_t gpu;

    if (!sim_table.profiles)
        return none("No MIG-supported devices found.");
    head(77, wider, lines, 3, 23);
    EACH_GPU(gpu)
        for (const struct sim_profile *one = sim_table.profile; one < sim_table.profile + sim_table.profiles; one++) {
            unsigned int left;

            if (nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, one->id, &left) != SUCCESS)
                left = 0;
            printf("|%4u  MIG %-*s%3u%6u/%-2u       %-11.2fNo%7u%6u%6u   |\n", gpu->index, 13 + wider, one->name,
                   one->id, left, one->most, (double)one->memory_mib / 1024, one->multiprocessors, one->engines[1],
                   one->engines[2]);
            printf("|%*u%6u%6u   |\n", 62 + wider, one->engines[0], one->engines[3], one->engines[4]);
            border(77 + wider);
        }
    return OK;
}

static int list_placements(void) {
    struct placement places[32];
    unsigned int count, i;
    int mig = 0;
    device_t gpu;

    EACH_MIG_GPU(gpu)
        for (const struct sim_profile *one = sim_table.profile; one < sim_table.profile + sim_table.profiles; one++) {
            mig = 1;
            count = 32;
            if (nvmlDeviceGetGpuInstancePossiblePlacements_v2(gpu, one->id, places, &count) != SUCCESS || !count)
                continue;
            printf("GPU %2u Profile ID %2u Placement%s: {", gpu->index, one->id, count > 1 ? "s" : " ");
            for (i = 0; i < count; i++)
                printf("%s%u", i ? "," : "", places[i].start);
            printf("}:%u\n", places[0].size);
        }
    return mig ? OK : none("No MIG-enabled devices found.");
}

/* Which instances are meant: NULL or a list by commas of ids. */
static int is_chosen(const char *list, int id) {
    const char *at = text(",%s,", list ? list : "");

    return !list || strstr(at, text(",%d,", id));
}

/* Fill a list with the GPU instances that are chosen on a GPU, by profile; return their number. */
static int find_gis(device_t gpu, const char *chosen, struct handle **found) {
    struct handle *list[SIM_GIS];
    unsigned int count, i;
    int all = 0;

    for (const struct sim_profile *one = sim_table.profile; one < sim_table.profile + sim_table.profiles; one++)
        if (nvmlDeviceGetGpuInstances(gpu, one->id, list, &count) == SUCCESS)
            for (i = 0; i < count; i++)
                if (is_chosen(chosen, list[i]->mig->gi))
                    found[all++] = list[i];
    return all;
}

static int find_cis(device_t gi, const char *chosen, struct handle **found) {
    struct handle *list[SIM_CIS];
    unsigned int count, number, i;
    int all = 0;

    for (number = 0; number < CI_PROFILES; number++)
        if (nvmlGpuInstanceGetComputeInstances(gi, number, list, &count) == SUCCESS)
            for (i = 0; i < count; i++)
                if (is_chosen(chosen, list[i]->mig->ci))
                    found[all++] = list[i];
    return all;
}

/* The chosen GPU instances of all GPUs, one after the other. */
#define EACH_GI(gpu, gi, chosen)                                                             \
    EACH_MIG_GPU(gpu)                                                                        \
    for (struct handle *gis[SIM_GIS], **gi = gis, **end = gis + find_gis(gpu, chosen, gis); gi < end; gi++)

static int count_gis(const char *chosen) {
    struct handle *gis[SIM_GIS];
    int count = 0, mig = 0;
    device_t gpu;

    EACH_MIG_GPU(gpu) {
        mig = 1;
        count += find_gis(gpu, chosen, gis);
    }
    if (!count)
        puts(mig ? "No GPU instances found: Not Found" : "No MIG-enabled devices found.");
    return count;
}

/* Print a table with a head of so many lines and a part for each GPU instance; returns the exit status. */
static int list_of_gis(const char *chosen, int width, int wider, const char *const *lines, int count, int name_end,
                       void (*print)(device_t gpu, device_t gi, int wider)) {
    device_t gpu;

    if (!count_gis(chosen))
        return NO_DEVICES;
    head(width, wider, lines, count, name_end);
    EACH_GI(gpu, gi, chosen)
        print(gpu, *gi, wider);
    return OK;
}

static void print_gi(device_t gpu, device_t gi, int wider) {
    struct gi_info info;

    nvmlGpuInstanceGetInfo(gi, &info);
    printf("|%4u  MIG %-*s%4u%9u%11u:%-6u|\n", gpu->index, 14 + wider, PROFILE(gi)->name, info.profile, info.id,
           info.place.start, info.place.size);
    border(55 + wider);
}

static int list_gis(const char *chosen) {
    static const char *const lines[] = {
        " GPU instances:                                        ",
        " GPU   Name             Profile  Instance   Placement  ",
        "                          ID       ID       Start:Size ",
    };

    return list_of_gis(chosen, 55, wider_than(14), lines, 3, 23, print_gi);
}

/* Return the profile of compute instances that takes all of a GPU instance. */
static unsigned int whole_of(device_t gi) {
    unsigned int number = 0;

    while (number < CI_SIZES - 1 && ci_sizes[number] != PROFILE(gi)->slices)
        number++;
    return sim_has_rev1(PROFILE(gi)) ? SIM_REV1 : number;
}

static nvml_return describe_ci(device_t gi, unsigned int number, struct ci_profile_v2 *info) {
    info->version = offsetof(struct ci_profile_v2, capabilities) | 2u << 24;
    return nvmlGpuInstanceGetComputeInstanceProfileInfoV(gi, number, 0, info);
}

static void print_ci_profiles(device_t gpu, device_t gi, int wider) {
    for (unsigned int number = 0, left; number < CI_PROFILES; number++) {
        struct ci_profile_v2 info;

        if (describe_ci(gi, number, &info) != SUCCESS)
            continue;
        if (nvmlGpuInstanceGetComputeInstanceRemainingCapacity(gi, number, &left) != SUCCESS)
            left = 0;
        printf("|%4u%7d       %-*s%4u%c%6u/%-2u%12u%9u%6u%6u   |\n", gpu->index, gi->mig->gi, 18 + wider, info.name,
               number, number == whole_of(gi) ? '*' : ' ', left, info.numbers[2], info.numbers[3], info.numbers[5],
               info.numbers[6], info.numbers[8]);
        printf("|%*u%6u         |\n", 71 + wider, info.numbers[4], info.numbers[7]);
        border(86 + wider);
    }
}

static int list_ci_profiles(const char *chosen) {
    static const char *const lines[] = {
        " Compute instance profiles:                                                           ",
        " GPU     GPU       Name             Profile  Instances   Exclusive       Shared       ",
        "       Instance                       ID     Free/Total     SM       DEC   ENC   OFA  ",
        "         ID                                                          CE    JPEG       ",
    };

    return list_of_gis(chosen, 86, wider_than(11), lines, 4, 35, print_ci_profiles);
}

static int list_cis(const char *gis_chosen, const char *chosen) {
    static const char *const lines[] = {
        " Compute instances:                                                 ",
        " GPU     GPU       Name             Profile   Instance   Placement  ",
        "       Instance                       ID        ID       Start:Size ",
        "         ID                                                         ",
    };
    int wider = wider_than(11), shown_any = 0;
    device_t gpu;

    if (!count_gis(gis_chosen))
        return NO_DEVICES;
    EACH_GI(gpu, gi, gis_chosen) {
        struct handle *cis[SIM_CIS];

        for (int i = 0, count = find_cis(*gi, chosen, cis); i < count; i++) {
            const struct sim_instance *mig = cis[i]->mig;
            char name[64];

            if (!shown_any++)
                head(68, wider, lines, 4, 35);
            sim_mig_name(mig, name, sizeof name);
            printf("|%4u%7d       MIG %-*s%4d%10d%11d:%-6d|\n", gpu->index, mig->gi, 14 + wider, name, mig->ci_profile,
                   mig->ci, mig->ci_start, mig->ci_slices);
            border(68 + wider);
        }
    }
    return shown_any ? OK : none("No compute instances found: Not Found");
}

/* Return the number of a profile of compute instances by number or name, CI_PROFILES for none. */
static unsigned int find_ci(device_t gi, const char *given) {
    struct ci_profile_v2 info;
    unsigned int number;

    for (number = 0; number < CI_PROFILES; number++)
        if (describe_ci(gi, number, &info) == SUCCESS &&
            (strcmp(given, text("%u", number)) == 0 || strcmp(given, info.name) == 0 ||
             strcmp(given, info.name + strlen("MIG ")) == 0))
            break;
    return number;
}

static int make_one_ci(device_t gpu, device_t gi, const char *given) {
    unsigned int number = given ? find_ci(gi, given) : whole_of(gi);
    struct ci_profile_v2 info;
    struct handle *ci;
    nvml_return code = describe_ci(gi, number, &info);

    if (code == SUCCESS)
        code = nvmlGpuInstanceCreateComputeInstance(gi, number, &ci);
    if (code != SUCCESS) {
        printf("Unable to create a compute instance on GPU %2u GPU instance ID %2d using profile %s: %s\n"
               "Failed to create compute instances: %s\n",
               gpu->index, gi->mig->gi, given ? given : text("%u", number), nvmlErrorString(code),
               nvmlErrorString(code));
        return code;
    }
    printf("Successfully created compute instance ID %2d on GPU %2u GPU instance ID %2d using profile %s (ID %2u)\n",
           ci->mig->ci, gpu->index, gi->mig->gi, info.name, number);
    return OK;
}

/* Make compute instances in each chosen GPU instance: of the given profiles, or one that takes all of it. */
static int make_cis(const char *given, const char *chosen) {
    char names[1024], *rest, *name;
    device_t gpu;
    int status;

    if (!count_gis(chosen))
        return NO_DEVICES;
    EACH_GI(gpu, gi, chosen) {
        unsigned int id = (unsigned int)(*gi)->mig->gi;
        struct handle *found;

        if (!given && (status = make_one_ci(gpu, *gi, NULL)) != OK)
            return status;
        snprintf(names, sizeof names, "%s", given ? given : "");
        for (rest = names; given && (name = strsep(&rest, ","));) {
            status = nvmlDeviceGetGpuInstanceById(gpu, id, &found);
            status = status == SUCCESS ? make_one_ci(gpu, found, name) : status;
            if (status != OK)
                return status;
        }
    }
    return OK;
}

/* Make a GPU instance of a profile by id or name, with ":START" at one place. */
static int make_one_gi(device_t gpu, char *given, int with_ci) {
    char *colon = strchr(given, ':');
    const struct sim_profile *one = sim_table.profile, *end = one + sim_table.profiles;
    nvml_return code = INVALID_ARGUMENT;
    struct placement place;
    struct handle *gi;

    if (colon)
        *colon++ = 0;
    while (one < end && strcmp(given, text("%u", one->id)) != 0 && strcmp(given, one->name) != 0 &&
           strcmp(given, text("MIG %s", one->name)) != 0)
        one++;
    if (one < end) {
        place = (struct placement){colon ? (unsigned int)strtoul(colon, NULL, 10) : 0, one->size};
        code = nvmlDeviceCreateGpuInstanceWithPlacement(gpu, one->id, colon ? &place : NULL, &gi);
    }
    if (code != SUCCESS) {
        printf("Unable to create a GPU instance on GPU %2u using profile %s: %s\n"
               "Failed to create GPU instances: %s\n",
               gpu->index, given, nvmlErrorString(code), nvmlErrorString(code));
        return code;
    }
    printf("Successfully created GPU instance ID %2d on GPU %2u using profile MIG %s (ID %2u)\n", gi->mig->gi,
           gpu->index, one->name, one->id);
    return with_ci ? make_one_ci(gpu, gi, NULL) : OK;
}

static int make_gis(const char *given, int with_ci) {
    char names[1024], *rest, *name;
    int status, mig = 0;
    device_t gpu;

    EACH_MIG_GPU(gpu) {
        mig = 1;
        snprintf(names, sizeof names, "%s", given);
        for (rest = names; (name = strsep(&rest, ","));)
            if ((status = make_one_gi(gpu, name, with_ci)) != OK)
                return status;
    }
    return mig ? OK : none("No MIG-enabled devices found.");
}

static int destroy_gis(const char *chosen) {
    int ids[SIM_GIS], count, i, status;
    struct handle *gis[SIM_GIS], *gi;
    device_t gpu;

    if (!count_gis(chosen))
        return NO_DEVICES;
    EACH_MIG_GPU(gpu) {
        count = find_gis(gpu, chosen, gis);
        for (i = 0; i < count; i++) /* handles change with the first that goes */
            ids[i] = gis[i]->mig->gi;
        for (i = 0; i < count; i++) {
            status = nvmlDeviceGetGpuInstanceById(gpu, (unsigned int)ids[i], &gi);
            status = status == SUCCESS ? nvmlGpuInstanceDestroy(gi) : status;
            if (status != SUCCESS) {
                printf("Unable to destroy GPU instance ID %2d from GPU %2u: %s\nFailed to destroy GPU instances: %s\n",
                       ids[i], gpu->index, nvmlErrorString(status), nvmlErrorString(status));
                return status;
            }
            printf("Successfully destroyed GPU instance ID %2d from GPU %2u\n", ids[i], gpu->index);
        }
    }
    return OK;
}

static int destroy_cis(const char *gis_chosen, const char *chosen) {
    int pairs[SIM_GIS * SIM_CIS][2], count, i, status, gone = 0;
    struct handle *gis[SIM_GIS], *cis[SIM_CIS], *gi, *ci;
    device_t gpu;

    if (!count_gis(gis_chosen))
        return NO_DEVICES;
    EACH_MIG_GPU(gpu) {
        count = 0;
        for (int at = 0, end = find_gis(gpu, gis_chosen, gis); at < end; at++)
            for (int each = 0, last = find_cis(gis[at], chosen, cis); each < last; each++, count++) {
                pairs[count][0] = gis[at]->mig->gi;
                pairs[count][1] = cis[each]->mig->ci;
            }
        for (i = 0; i < count; i++) {
            status = nvmlDeviceGetGpuInstanceById(gpu, (unsigned int)pairs[i][0], &gi);
            if (status == SUCCESS)
                status = nvmlGpuInstanceGetComputeInstanceById(gi, (unsigned int)pairs[i][1], &ci);
            status = status == SUCCESS ? nvmlComputeInstanceDestroy(ci) : status;
            if (status != SUCCESS) {
                printf("Unable to destroy compute instance ID %2d from GPU %2u GPU instance ID %2d: %s\n"
                       "Failed to destroy compute instances: %s\n",
                       pairs[i][1], gpu->index, pairs[i][0], nvmlErrorString(status), nvmlErrorString(status));
                return status;
            }
            printf("Successfully destroyed compute instance ID %2d from GPU %2u GPU instance ID %2d\n", pairs[i][1],
                   gpu->index, pairs[i][0]);
            gone++;
        }
    }
    return gone ? OK : none("No compute instances found: Not Found");
}

/* nvidia-smi -mig: put GPUs into MIG mode or out of it. */
static int set_mig_mode(const char *mode) {
    int on = strcmp(mode, "1") == 0 || strcasecmp(mode, "ENABLED") == 0, activation, code;
    const char *word = on ? "enable" : "disable";
    device_t gpu;

    if (!on && strcmp(mode, "0") != 0 && strcasecmp(mode, "DISABLED") != 0)
        return usage("MIG mode \"%s\" is not 0 or 1", mode);
    EACH_GPU(gpu) {
        code = nvmlDeviceSetMigMode(gpu, (unsigned int)on, (unsigned int *)&activation);
        if (code == SUCCESS && activation != SUCCESS)
            printf("Warning: MIG mode is in pending %s state for GPU %s:%s\n", word, bus_id(gpu),
                   nvmlErrorString(activation));
        else if (code == SUCCESS)
            printf("%s MIG Mode for GPU %s\n", on ? "Enabled" : "Disabled", bus_id(gpu));
        else
            printf("Unable to %s MIG Mode for GPU %s: %s\n", word, bus_id(gpu), nvmlErrorString(code));
        if (code == NOT_SUPPORTED)
            puts("Treating as warning and moving on.");
        else if (code != SUCCESS)
            puts("Terminating early due to previous errors.");
        if (code != SUCCESS && code != NOT_SUPPORTED)
            return code;
    }
    puts("All done.");
    say_simulated();
    return OK;
}

static const char mig_help[] =
    "usage: nvidia-smi mig [-i GPU,...] [-gi ID,...] [-ci ID,...] ACTION\n"
    "  -lgip   profiles of GPU instances          -lgipp  where they can be placed\n"
    "  -lgi    GPU instances                      -lcip   profiles of compute instances\n"
    "  -lci    compute instances\n"
    "  -cgi PROFILE[:START],... [-C]  create GPU instances; -C: each with a compute instance\n"
    "  -cci [PROFILE,...]             create compute instances\n"
    "  -dci    destroy compute instances          -dgi    destroy GPU instances\n";

static int run_mig(char **at) {
    enum { LGIP = 1, LGIPP, LGI, LCIP, LCI, CGI, CCI, DCI, DGI };
    static const char *const brief[] = {"", "-lgip", "-lgipp", "-lgi", "-lcip", "-lci", "-cgi", "-cci", "-dci", "-dgi"};
    static const char *const full[] = {
        "", "--list-gpu-instance-profiles", "--list-gpu-instance-possible-placements", "--list-gpu-instances",
        "--list-compute-instance-profiles", "--list-compute-instances", "--create-gpu-instance",
        "--create-compute-instance", "--destroy-compute-instance", "--destroy-gpu-instance",
    };
    const char *selected = NULL, *gis = NULL, *cis = NULL, *profiles = NULL, *given;
    int action = 0, found, with_ci = 0, status;

    for (; *at; at++) {
        if ((given = value(&at, "-i", "--id"))) {
            selected = given;
        } else if ((given = value(&at, "-gi", "--gpu-instance-id"))) {
            gis = given;
        } else if ((given = value(&at, "-ci", "--compute-instance-id"))) {
            cis = given;
        } else if (is_flag(*at, "-C", "--default-compute-instance")) {
            with_ci = 1;
        } else if (is_flag(*at, "-h", "--help")) {
            fputs(mig_help, stdout);
            return OK;
        } else {
            given = value(&at, brief[CGI], full[CGI]);
            for (found = given ? CGI : DGI; !given && found && !is_flag(*at, brief[found], full[found]); found--)
                ;
            if (!found || action)
                return usage(found ? "more than one action: \"%s\"" : "option \"%s\" is unknown", *at);
            if (found == CGI && !given)
                return usage("option \"%s\" needs profiles", *at);
            action = found;
            profiles = found == CGI ? given : found == CCI && at[1] && *at[1] != '-' ? *++at : profiles;
        }
    }
    if (!action)
        return usage("%s needs an action", "mig");
    status = begin(selected);
    if (status != OK)
        return status;
    status = action == LGIP    ? list_profiles()
             : action == LGIPP ? list_placements()
             : action == LGI   ? list_gis(gis)
             : action == LCIP  ? list_ci_profiles(gis)
             : action == LCI   ? list_cis(gis, cis)
             : action == CGI   ? make_gis(profiles, with_ci)
             : action == CCI   ? make_cis(profiles, gis)
             : action == DCI   ? destroy_cis(gis, cis)
                               : destroy_gis(gis);
    say_simulated();
    return status;
}
