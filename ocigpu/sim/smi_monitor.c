/* nvidia-smi dmon and pmon: a line for each GPU or process, repeatedly; part of smi.c. */

static const char *in_mib(device_t gpu) {
    const char *kib = fact_received(gpu);

    return kib ? text("%ld", strtol(kib, NULL, 10) / 1000) : NULL;
}

static const char *out_mib(device_t gpu) {
    const char *kib = fact_sent(gpu);

    return kib ? text("%ld", strtol(kib, NULL, 10) / 1000) : NULL;
}

static const char *whole_watts(device_t gpu) {
    const char *watts = fact_power(gpu);

    return watts ? text("%ld", strtol(watts, NULL, 10)) : NULL;
}

static const char *zero(device_t gpu) { return "0"; }

/* Columns, by the letter of -s that chooses them. */
static const struct monitored {
    char group;
    const char *name, *unit;
    fact *ask;
} monitored[] = {
    {'p', "pwr", "W", whole_watts},
    {'p', "gtemp", "C", fact_temperature},
    {'p', "mtemp", "C", fact_memory_temperature},
    {'u', "sm", "%", fact_busy},
    {'u', "mem", "%", fact_memory_busy},
    {'u', "enc", "%", fact_encoder},
    {'u', "dec", "%", fact_decoder},
    {'u', "jpg", "%", fact_jpeg},
    {'u', "ofa", "%", fact_ofa},
    {'c', "mclk", "MHz", fact_clock_memory},
    {'c', "pclk", "MHz", fact_clock_graphics},
    {'v', "pviol", "%", zero},
    {'v', "tviol", "bool", zero},
    {'m', "fb", "MB", fact_memory_used},
    {'m', "bar1", "MB", fact_bar1_used},
    {'m', "ccpm", "MB", zero},
    {'e', "sbecc", "errs", fact_corrected},
    {'e', "dbecc", "errs", fact_uncorrected},
    {'e', "pci", "errs", fact_replays},
    {'t', "rxpci", "MB/s", in_mib},
    {'t', "txpci", "MB/s", out_mib},
};

#define EACH_COLUMN(column, groups)                                                                      \
    for (const struct monitored *column = monitored; column < monitored + LENGTH(monitored); column++) \
        if (strchr(groups, column->group))

static void monitor_gpus(const char *groups, int headed) {
    device_t gpu;

    if (headed) {
        printf("# gpu");
        EACH_COLUMN(column, groups) printf("%7s", column->name);
        printf(" \n# Idx");
        EACH_COLUMN(column, groups) printf("%7s", column->unit);
        printf(" \n");
    }
    EACH_GPU(gpu) {
        printf("%5u", gpu->index);
        EACH_COLUMN(column, groups) printf("%7s", column->ask(gpu) ?: "-");
        printf(" \n");
    }
}

static void monitor_line(device_t gpu, const char *groups, const struct process *one, unsigned int sm) {
    const char *name = one ? process_name(one->pid) : "-";

    printf("%5u %10s %5s", gpu->index, one ? text("%u", one->pid) : "-", one ? "C" : "-");
    if (strchr(groups, 'u'))
        printf("%7s%7s%7s%7s%7s%7s", one ? text("%u", sm) : "-", one ? "0" : "-", "-", "-", "-", "-");
    if (strchr(groups, 'm'))
        printf("%7s%7s", one ? text("%llu", one->memory >> 20) : "-", one ? "0" : "-");
    printf("    %-15.15s\n", strrchr(name, '/') ? strrchr(name, '/') + 1 : name);
}

static void monitor_processes(const char *groups, int headed) {
    static struct process list[MOST_PROCESSES];
    static struct process_time times[MOST_PROCESSES];
    int use = strchr(groups, 'u') != NULL, memory = strchr(groups, 'm') != NULL;
    unsigned int count, timed;
    device_t gpu;

    if (headed)
        printf("# gpu         pid   type%s%s    command \n# Idx           #    C/G%s%s    name \n",
               use ? "     sm    mem    enc    dec    jpg    ofa" : "", memory ? "     fb   ccpm" : "",
               use ? "      %      %      %      %      %      %" : "", memory ? "     MB     MB" : "");
    EACH_GPU(gpu) {
        count = find_processes(gpu, list);
        timed = MOST_PROCESSES;
        if (nvmlDeviceGetProcessUtilization(gpu, times, &timed, 0) != SUCCESS)
            timed = 0;
        if (!count)
            monitor_line(gpu, groups, NULL, 0);
        for (unsigned int i = 0; i < count; i++) {
            unsigned int sm = 0;

            for (unsigned int j = 0; j < timed; j++)
                sm = times[j].pid == list[i].pid ? times[j].sm : sm;
            monitor_line(gpu, groups, &list[i], sm);
        }
    }
}

/* Write so many times, without a count until the program is ended. */
static int monitor(int processes, const char *groups, int count, int seconds) {
    say_simulated();
    for (int i = 0; !count || i < count; i++) {
        if (i)
            sleep((unsigned int)seconds);
        refresh();
        (processes ? monitor_processes : monitor_gpus)(groups, i == 0);
        fflush(stdout);
    }
    return OK;
}
