/* nvidia-smi without options: the table of GPUs, their MIG devices and processes, as drivers from 550 on draw it; part of
 * smi.c.  A last row says that the GPUs are simulated.
 */

enum { TABLE = 89 }; /* columns between the borders */

/* Write a line of the frame; `start` is its first character, and `widths` are those of its parts. */
static void rule(char start, char line, const int *widths) {
    putchar(start);
    for (; *widths; widths++) {
        line_of(line, *widths);
        if (widths[1])
            putchar('+');
    }
    printf("%c\n", line == '=' ? '|' : '+');
}

static const int whole[] = {TABLE, 0}, gpu_parts[] = {41, 24, 22, 0}, mig_parts[] = {18, 34, 11, 23, 0};

/* Return a text that fits, its start cut off if need be. */
static const char *fit(const char *given, size_t width) {
    size_t length = strlen(given);

    return length <= width ? given : text("...%s", given + length - width + 3);
}

static const char *with_unit(const char *number, const char *unit, const char *unknown) {
    return number ? text("%ld%s", strtol(number, NULL, 10), unit) : unknown;
}

static const char *mode_word(device_t gpu) {
    const char *mode = fact_compute_mode(gpu) ?: "N/A";

    return strcmp(mode, "Exclusive_Process") == 0 ? "E. Process" : mode;
}

static const char *ecc_word(device_t gpu) {
    const char *mode = fact_ecc(gpu);

    return !mode                           ? "N/A"
           : strcmp(mode, "Enabled") != 0 ? "Off"
           : IS_MIG(gpu)                  ? "On"
                                          : fact_uncorrected(gpu) ?: "N/A";
}

static void show_gpu(device_t gpu) {
    const char *name = GPU(gpu)->name, *persistence = fact_persistence(gpu), *active = fact_display_active(gpu);
    const char *memory = fact_memory(gpu);

    if (strlen(name) > 27)
        name = text("%.24s...", name);
    printf("|%4u  %-27s    %-3s |%19s %3s |%21s |\n", gpu->index, name,
           persistence && strcmp(persistence, "Enabled") == 0 ? "On" : "Off", bus_id(gpu),
           active && strcmp(active, "Enabled") == 0 ? "On" : "Off", ecc_word(gpu));
    printf("|%4s%6s%6s%16s / %5s |", with_unit(fact_fan(gpu), "%", "N/A"), with_unit(fact_temperature(gpu), "C", "N/A"),
           fact_state(gpu) ?: "N/A", with_unit(fact_power(gpu), "W", "N/A "),
           with_unit(fact_limit(gpu), "W", "N/A "));
    if (memory)
        printf("%11s / %9s |", text("%sMiB", fact_memory_used(gpu)), text("%sMiB", memory));
    else
        printf(" Not Supported          |");
    printf("%8s%13s |\n", with_unit(fact_busy(gpu), "%", "N/A"), mode_word(gpu));
    printf("|%41s|%24s|%21s |\n", "", "", fact_mig(gpu) ?: "N/A");
}

static void show_mig_row(device_t gpu, device_t mig) {
    struct attributes got;

    if (nvmlDeviceGetAttributes_v2(mig, &got) != SUCCESS)
        return;
    printf("|%3u%5d%4d%4u  |%19s / %8s    |%3u%7d |%3u%4u%5u%5u%5u |\n", gpu->index, mig->mig->gi, mig->mig->ci,
           mig->index, text("%sMiB", fact_memory_used(mig)), text("%sMiB", fact_memory(mig)), got.multiprocessors, 0,
           got.engines[0], got.engines[2], got.engines[1], got.engines[4], got.engines[3]);
    printf("|%18s|%*s / %8s%*s|%11s|%23s|\n", "", branch() < 570 ? 21 : 19, "0MiB",
           text("%lluMiB", (bar1_of(GPU(gpu)) >> 20) * PROFILE(mig)->size / (unsigned int)sim_table.memory_slices - 1),
           branch() < 570 ? 2 : 4, "", "", "");
    rule('+', '-', mig_parts);
}

static void show_mig_table(void) {
    struct handle *mig;
    device_t gpu;
    int any = 0, found = 0, late = branch() >= 570;

    EACH_GPU(gpu)
        any |= IS_MIG(gpu);
    if (!any)
        return;
    putchar('\n');
    rule('+', '-', whole);
    printf("| %-*s|\n", TABLE - 1, "MIG devices:");
    rule('+', '-', mig_parts);
    printf("| GPU  GI  CI  MIG |%33s |        Vol|%-23s|\n", late ? "Shared Memory-Usage" : "Memory-Usage",
           late ? "        Shared" : "      Shared");
    printf("|      ID  ID  Dev |%33s | SM     Unc|%-23s|\n", late ? "Shared BAR1-Usage" : "BAR1-Usage",
           late ? " CE ENC  DEC  OFA  JPG" : " CE ENC DEC OFA JPG");
    printf("|%18s|%34s|        ECC|%23s|\n", "", "", "");
    rule('|', '=', mig_parts);
    EACH_GPU(gpu)
        EACH_MIG_DEVICE(mig, gpu) {
            found++;
            show_mig_row(gpu, mig);
        }
    if (!found) {
        printf("|%-*s|\n", TABLE, "  No MIG devices found");
        rule('+', '-', whole);
    }
}

static void show_process_table(void) {
    static struct process list[MOST_PROCESSES];
    int wider = branch() >= 570 ? 6 : 0, found = 0;
    device_t gpu;

    putchar('\n');
    rule('+', '-', whole);
    printf("| %-*s|\n", TABLE - 1, "Processes:");
    printf("|  GPU   GI   CI %*s   Type   Process name%*s |\n", 10 + wider, "PID", TABLE - 49 - wider, "GPU Memory");
    printf("|        ID   ID%*s |\n", TABLE - 16, "Usage     ");
    rule('|', '=', whole);
    EACH_GPU(gpu)
        for (unsigned int one = 0, count = find_processes(gpu, list); one < count; one++) {
            int is_mig = list[one].gpu_instance != 0xFFFFFFFFU;

            found++;
            printf("|%5u%6s%5s%*u%7s   %-*s%10s |\n", gpu->index,
                   is_mig ? text("%u", list[one].gpu_instance) : "N/A",
                   is_mig ? text("%u", list[one].compute_instance) : "N/A", 10 + wider, list[one].pid, "C", 42 - wider,
                   fit(process_name(list[one].pid), (size_t)(41 - wider)), text("%lluMiB", list[one].memory >> 20));
        }
    if (!found)
        printf("|%-*s|\n", TABLE, "  No running processes found");
    rule('+', '-', whole);
}

static int show_table(void) {
    time_t now = time(NULL);
    char date[64];
    device_t gpu;

    strftime(date, sizeof date, "%a %b %e %H:%M:%S %Y", localtime(&now));
    printf("%s       \n", date);
    rule('+', '-', whole);
    printf(branch() < RENAMED ? "| NVIDIA-SMI %-23sDriver Version: %-15sCUDA Version: %-9s|\n"
                              : "| NVIDIA-SMI %-23sKMD Version: %-14sCUDA UMD Version: %-9s|\n",
           sim_table.driver_version, sim_table.driver_version, cuda_version());
    rule(branch() < 580 ? '|' : '+', '-', gpu_parts);
    puts("| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |\n"
         "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |\n"
         "|                                         |                        |               MIG M. |");
    rule('|', '=', gpu_parts);
    EACH_GPU(gpu) {
        show_gpu(gpu);
        rule('+', '-', gpu_parts);
    }
    show_mig_table();
    show_process_table();
    printf("| %-*s|\n", TABLE - 1, "SIMULATED host, no real GPU: nothing can be computed on these GPUs");
    rule('+', '-', whole);
    return OK;
}
