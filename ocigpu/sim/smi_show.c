/* nvidia-smi -q and -q -x: all that is known of GPUs, as text or with the element names of nvsmi_device_v12.dtd; part of
 * smi.c.
 */

/* What -d chooses, a bit each; everything else is GENERAL. */
static const char *const displays[] = {
    "GENERAL", "MEMORY", "UTILIZATION", "ECC", "TEMPERATURE", "POWER", "CLOCK", "COMPUTE", "PIDS", "PERFORMANCE",
    "PAGE_RETIREMENT", "ENCODER_STATS", "ROW_REMAPPER", "ACCOUNTING", "VOLTAGE", "SUPPORTED_CLOCKS", "RESET_STATUS",
    "GSP_FIRMWARE_VERSION",
};

enum {
    GENERAL = 1, MEMORY_USE = 2, UTILIZATION = 4, ECC = 8, TEMPERATURE = 16, POWER = 32, CLOCK = 64, COMPUTE = 128,
    PIDS = 256, PERFORMANCE = 512, RETIREMENT = 1024, ENCODER = 2048, REMAPPER = 4096, ACCOUNTING = 8192,
    VOLTAGE = 16384, SUPPORTED_CLOCKS = 32768, RESET_STATUS = 65536, GSP_VERSION = 131072,
};

static struct {
    int xml, depth;
    unsigned int wanted, part; /* what is shown, and what the next lines belong to */
} report = {.wanted = ~0u};

/* Read the list behind -d; return whether every name is known. */
static int read_displays(char *names) {
    char *name;
    int i;

    report.wanted = 0;
    while ((name = strsep(&names, ","))) {
        for (i = 1; i < LENGTH(displays) && strcasecmp(name, displays[i]) != 0; i++)
            ;
        if (i == LENGTH(displays))
            return 0;
        report.wanted |= 1u << i;
    }
    return 1;
}

static void indent(void) {
    for (int i = 0; i < report.depth; i++)
        fputs(report.xml ? "\t" : "    ", stdout);
}

/* Write what has one value. A program that reads XML must not stumble over what a process is called. */
static void entry(const char *label, const char *element, const char *value, const char *unit) {
    const char *known = value ? value : "N/A", *blank = value && *unit ? " " : "";

    unit = value ? unit : "";
    if (!(report.part & report.wanted))
        return;
    indent();
    if (!report.xml) {
        printf("%-*s: %s%s%s\n", 42 - 4 * report.depth, label, known, blank, unit);
        return;
    }
    if (strncmp(element, "pci_", 4) == 0 && strncmp(known, "0x", 2) == 0)
        known += 2;
    printf("<%s>", element);
    for (; *known; known++)
        if (strchr("<>&", *known))
            printf(*known == '<' ? "&lt;" : *known == '>' ? "&gt;" : "&amp;");
        else
            putchar(*known);
    printf("%s%s</%s>\n", blank, unit, element);
}

static void open_group(const char *label, const char *element) {
    if (report.part & report.wanted) {
        indent();
        printf(report.xml ? "<%s>\n" : "%s\n", report.xml ? element : label);
    }
    report.depth++;
}

static void close_group(const char *element) {
    report.depth--;
    if (report.xml && report.part & report.wanted) {
        indent();
        printf("</%s>\n", element);
    }
}

#define GROUP(label, element) \
    for (int once = (open_group(label, element), 1); once; once = (close_group(element), 0))

/* A group in which nothing is known here. */
static void unknown_group(const char *label, const char *element, const char *first, const char *first_element,
                          const char *second, const char *second_element) {
    GROUP(label, element) {
        entry(first, first_element, NULL, "");
        entry(second, second_element, NULL, "");
    }
}

static void show_memory(const char *total, const char *reserved, const char *used, const char *free) {
    entry("Total", "total", total, "MiB");
    if (reserved)
        entry("Reserved", "reserved", *reserved ? reserved : NULL, "MiB");
    entry("Used", "used", used, "MiB");
    entry("Free", "free", free, "MiB");
}

static void show_mig_device(device_t mig) {
    struct attributes got;

    if (nvmlDeviceGetAttributes_v2(mig, &got) != SUCCESS)
        return;
    GROUP("MIG Device", "mig_device") {
        entry("Index", "index", text("%u", mig->index), "");
        entry("GPU Instance ID", "gpu_instance_id", text("%d", mig->mig->gi), "");
        entry("Compute Instance ID", "compute_instance_id", text("%d", mig->mig->ci), "");
        GROUP("Device Attributes", "device_attributes") GROUP("Shared", "shared") {
            entry("Multiprocessor count", "multiprocessor_count", text("%u", got.multiprocessors), "");
            entry("Copy Engine count", "copy_engine_count", text("%u", got.engines[0]), "");
            entry("Encoder count", "encoder_count", text("%u", got.engines[2]), "");
            entry("Decoder count", "decoder_count", text("%u", got.engines[1]), "");
            entry("OFA count", "ofa_count", text("%u", got.engines[4]), "");
            entry("JPG count", "jpg_count", text("%u", got.engines[3]), "");
        }
        GROUP("ECC Errors", "ecc_error_count") GROUP("Volatile", "volatile_count")
            entry("SRAM Uncorrectable", "sram_uncorrectable", "0", "");
        GROUP("FB Memory Usage", "fb_memory_usage")
            show_memory(fact_memory(mig), "0", fact_memory_used(mig), fact_memory_free(mig));
        GROUP("BAR1 Memory Usage", "bar1_memory_usage") show_memory(NULL, NULL, NULL, NULL);
    }
}

static void show_mig(device_t gpu) {
    struct handle *mig;
    unsigned int index;

    GROUP("MIG Mode", "mig_mode") {
        entry("Current", "current_mig", fact_mig(gpu), "");
        entry("Pending", "pending_mig", fact_mig_pending(gpu), "");
    }
    if (nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0, &mig) != SUCCESS) {
        if (report.xml)
            entry("", "mig_devices", "None", "");
        return;
    }
    if (report.xml)
        open_group("", "mig_devices");
    for (index = 0; nvmlDeviceGetMigDeviceHandleByIndex(gpu, index, &mig) == SUCCESS; index++)
        show_mig_device(mig);
    if (report.xml)
        close_group("mig_devices");
}

static void show_board(device_t gpu) {
    report.part = GENERAL;
    entry("Product Name", "product_name", fact_name(gpu), "");
    entry("Product Brand", "product_brand", fact_brand(gpu), "");
    entry("Product Architecture", "product_architecture", fact_architecture(gpu), "");
    entry("Display Mode", "display_mode", fact_display(gpu), "");
    entry("Display Active", "display_active", fact_display_active(gpu), "");
    entry("Persistence Mode", "persistence_mode", fact_persistence(gpu), "");
    entry("Addressing Mode", "addressing_mode", fact_addressing(gpu), "");
    show_mig(gpu);
    report.part = GENERAL | ACCOUNTING;
    entry("Accounting Mode", "accounting_mode", fact_accounting(gpu), "");
    entry("Accounting Mode Buffer Size", "accounting_mode_buffer_size", fact_accounting_size(gpu), "");
    report.part = GENERAL;
    unknown_group("Driver Model", "driver_model", "Current", "current_dm", "Pending", "pending_dm");
    entry("Serial Number", "serial", fact_serial(gpu), "");
    entry("GPU UUID", "uuid", fact_uuid(gpu), "");
    entry("Minor Number", "minor_number", fact_minor(gpu), "");
    entry("VBIOS Version", "vbios_version", fact_vbios(gpu), "");
    entry("MultiGPU Board", "multigpu_board", fact_multi_board(gpu), "");
    entry("Board ID", "board_id", fact_board(gpu), "");
    entry("Board Part Number", "board_part_number", NULL, "");
    entry("GPU Part Number", "gpu_part_number", NULL, "");
    entry("FRU Part Number", "gpu_fru_part_number", NULL, "");
    entry("Module ID", "gpu_module_id", fact_module(gpu), "");
    GROUP("Inforom Version", "inforom_version") {
        entry("Image Version", "img_version", NULL, "");
        entry("OEM Object", "oem_object", NULL, "");
        entry("ECC Object", "ecc_object", NULL, "");
        entry("Power Management Object", "pwr_object", NULL, "");
    }
    unknown_group("GPU Operation Mode", "gpu_operation_mode", "Current", "current_gom", "Pending", "pending_gom");
    GROUP("GPU Virtualization Mode", "gpu_virtualization_mode") {
        entry("Virtualization Mode", "virtualization_mode", fact_virtualization(gpu), "");
        entry("Host VGPU Mode", "host_vgpu_mode", NULL, "");
    }
    report.part = GENERAL | RESET_STATUS;
    GROUP("GPU Reset Status", "gpu_reset_status") {
        entry("Reset Required", "reset_required", "No", "");
        entry("Drain and Reset Recommended", "drain_and_reset_recommended", "No", "");
    }
    report.part = GENERAL | GSP_VERSION;
    entry("GSP Firmware Version", "gsp_firmware_version", fact_gsp(gpu), "");
    report.part = GENERAL;
    GROUP("IBMNPU", "ibmnpu") entry("Relaxed Ordering Mode", "relaxed_ordering_mode", NULL, "");
}

static void show_pci(device_t gpu) {
    const char *current = fact_pcie(gpu), *most = fact_pcie_most(gpu);
    const char *width = fact_width(gpu), *widest = fact_width_most(gpu);

    report.part = GENERAL;
    GROUP("PCI", "pci") {
        entry("Bus", "pci_bus", fact_bus(gpu), "");
        entry("Device", "pci_device", fact_slot(gpu), "");
        entry("Domain", "pci_domain", fact_domain(gpu), "");
        entry("Device Id", "pci_device_id", fact_device_id(gpu), "");
        entry("Bus Id", "pci_bus_id", fact_bus_id(gpu), "");
        entry("Sub System Id", "pci_sub_system_id", fact_subsystem(gpu), "");
        GROUP("GPU Link Info", "pci_gpu_link_info") {
            GROUP("PCIe Generation", "pcie_gen") {
                entry("Max", "max_link_gen", most, "");
                entry("Current", "current_link_gen", current, "");
                entry("Device Current", "device_current_link_gen", current, "");
                entry("Device Max", "max_device_link_gen", most, "");
                entry("Host Max", "max_host_link_gen", most, "");
            }
            GROUP("Link Width", "link_widths") {
                entry("Max", "max_link_width", widest ? text("%sx", widest) : NULL, "");
                entry("Current", "current_link_width", width ? text("%sx", width) : NULL, "");
            }
        }
        unknown_group("Bridge Chip", "pci_bridge_chip", "Type", "bridge_chip_type", "Firmware", "bridge_chip_fw");
        entry("Replays Since Reset", "replay_counter", fact_replays(gpu), "");
        entry("Replay Number Rollovers", "replay_rollover_counter", fact_replays(gpu), "");
        entry("Tx Throughput", "tx_util", fact_sent(gpu), "KB/s");
        entry("Rx Throughput", "rx_util", fact_received(gpu), "KB/s");
        entry("Atomic Caps Inbound", "atomic_caps_inbound", NULL, "");
        entry("Atomic Caps Outbound", "atomic_caps_outbound", NULL, "");
    }
    entry("Fan Speed", "fan_speed", fact_fan(gpu), "%");
}

static void show_performance(device_t gpu) {
    static const struct {
        const char *label, *element;
        fact *ask;
    } reasons[] = {
        {"Idle", "clocks_event_reason_gpu_idle", fact_idle},
        {"Applications Clocks Setting", "clocks_event_reason_applications_clocks_setting", fact_setting},
        {"SW Power Cap", "clocks_event_reason_sw_power_cap", fact_power_cap},
        {"HW Slowdown", "clocks_event_reason_hw_slowdown", fact_hardware},
        {"    HW Thermal Slowdown", "clocks_event_reason_hw_thermal_slowdown", fact_hardware_thermal},
        {"    HW Power Brake Slowdown", "clocks_event_reason_hw_power_brake_slowdown", fact_power_brake},
        {"Sync Boost", "clocks_event_reason_sync_boost", fact_sync_boost},
        {"SW Thermal Slowdown", "clocks_event_reason_sw_thermal_slowdown", fact_software_thermal},
        {"Display Clock Setting", "clocks_event_reason_display_clocks_setting", fact_display_clocks},
    };

    report.part = GENERAL | PERFORMANCE;
    entry("Performance State", "performance_state", fact_state(gpu), "");
    GROUP("Clocks Event Reasons", "clocks_event_reasons")
        for (int i = 0; i < LENGTH(reasons); i++)
            entry(reasons[i].label, reasons[i].element, reasons[i].ask(gpu), "");
}

static void show_use(device_t gpu) {
    report.part = GENERAL | MEMORY_USE;
    GROUP("FB Memory Usage", "fb_memory_usage")
        show_memory(fact_memory(gpu), fact_memory_reserved(gpu) ?: "", fact_memory_used(gpu), fact_memory_free(gpu));
    GROUP("BAR1 Memory Usage", "bar1_memory_usage")
        show_memory(fact_bar1(gpu), NULL, fact_bar1_used(gpu), fact_bar1_free(gpu));
    GROUP("Conf Compute Protected Memory Usage", "cc_protected_memory_usage") show_memory("0", NULL, "0", "0");
    report.part = GENERAL | COMPUTE;
    entry("Compute Mode", "compute_mode", fact_compute_mode(gpu), "");
    report.part = GENERAL | UTILIZATION;
    GROUP("Utilization", "utilization") {
        entry("Gpu", "gpu_util", fact_busy(gpu), "%");
        entry("Memory", "memory_util", fact_memory_busy(gpu), "%");
        entry("Encoder", "encoder_util", fact_encoder(gpu), "%");
        entry("Decoder", "decoder_util", fact_decoder(gpu), "%");
        entry("JPEG", "jpeg_util", fact_jpeg(gpu), "%");
        entry("OFA", "ofa_util", fact_ofa(gpu), "%");
    }
    report.part = GENERAL | ENCODER;
    for (int i = 0; i < 2; i++)
        GROUP(i ? "FBC Stats" : "Encoder Stats", i ? "fbc_stats" : "encoder_stats") {
            entry("Active Sessions", "session_count", fact_sessions(gpu), "");
            entry("Average FPS", "average_fps", fact_frames(gpu), "");
            entry("Average Latency", "average_latency", fact_latency(gpu), "");
        }
}

/* NVML has counts of all memory together: those of SRAM are none of them. */
static void show_errors(device_t gpu) {
    const char *none = fact_ecc(gpu) ? "0" : NULL;

    report.part = GENERAL | ECC;
    GROUP("ECC Mode", "ecc_mode") {
        entry("Current", "current_ecc", fact_ecc(gpu), "");
        entry("Pending", "pending_ecc", fact_ecc_pending(gpu), "");
    }
    GROUP("ECC Errors", "ecc_errors")
        for (int ever = 0; ever < 2; ever++)
            GROUP(ever ? "Aggregate" : "Volatile", ever ? "aggregate" : "volatile") {
                entry("SRAM Correctable", "sram_correctable", none, "");
                entry("SRAM Uncorrectable", "sram_uncorrectable", none, "");
                entry("DRAM Correctable", "dram_correctable",
                      none ? ever ? fact_corrected_ever(gpu) : fact_corrected(gpu) : NULL, "");
                entry("DRAM Uncorrectable", "dram_uncorrectable",
                      none ? ever ? fact_uncorrected_ever(gpu) : fact_uncorrected(gpu) : NULL, "");
            }
    report.part = GENERAL | RETIREMENT;
    GROUP("Retired Pages", "retired_pages") {
        if (report.xml) {
            GROUP("", "multiple_single_bit_retirement") {
                entry("", "retired_count", fact_retired_single(gpu), "");
                entry("", "retired_pagelist", NULL, "");
            }
            GROUP("", "double_bit_retirement") {
                entry("", "retired_count", fact_retired_double(gpu), "");
                entry("", "retired_pagelist", NULL, "");
            }
            entry("", "pending_blacklist", fact_retired_pending(gpu), "");
            entry("", "pending_retirement", fact_retired_pending(gpu), "");
        } else {
            entry("Single Bit ECC", "", fact_retired_single(gpu), "");
            entry("Double Bit ECC", "", fact_retired_double(gpu), "");
            entry("Pending Page Blacklist", "", fact_retired_pending(gpu), "");
        }
    }
    report.part = GENERAL | REMAPPER;
    if (!fact_rows_corrected(gpu)) {
        entry("Remapped Rows", "remapped_rows", NULL, "");
        return;
    }
    GROUP("Remapped Rows", "remapped_rows") {
        entry("Correctable Error", "remapped_row_corr", fact_rows_corrected(gpu), "");
        entry("Uncorrectable Error", "remapped_row_unc", fact_rows_uncorrected(gpu), "");
        entry("Pending", "remapped_row_pending", fact_rows_pending(gpu), "");
        entry("Remapping Failure Occurred", "remapped_row_failure", fact_rows_failed(gpu), "");
    }
}

static void show_power(device_t gpu) {
    report.part = GENERAL | TEMPERATURE;
    GROUP("Temperature", "temperature") {
        entry("GPU Current Temp", "gpu_temp", fact_temperature(gpu), "C");
        entry("GPU T.Limit Temp", "gpu_temp_tlimit", NULL, "");
        entry("GPU Shutdown Temp", "gpu_temp_max_threshold", fact_shutdown(gpu), "C");
        entry("GPU Slowdown Temp", "gpu_temp_slow_threshold", fact_slowdown(gpu), "C");
        entry("GPU Max Operating Temp", "gpu_temp_max_gpu_threshold", fact_hottest(gpu), "C");
        entry("GPU Target Temperature", "gpu_target_temperature", NULL, "");
        entry("Memory Current Temp", "memory_temp", fact_memory_temperature(gpu), "C");
        entry("Memory Max Operating Temp", "gpu_temp_max_mem_threshold", fact_memory_hottest(gpu), "C");
    }
    report.part = GENERAL | POWER;
    for (int module = 0; module < 2; module++)
        GROUP(module ? "Module Power Readings" : "GPU Power Readings",
              module ? "module_power_readings" : "gpu_power_readings") {
            if (report.xml)
                entry("", "power_state", fact_state(gpu), "");
            entry("Power Draw", "power_draw", module ? NULL : fact_power(gpu), "W");
            entry("Current Power Limit", "current_power_limit", module ? NULL : fact_limit_enforced(gpu), "W");
            entry("Requested Power Limit", "requested_power_limit", module ? NULL : fact_limit(gpu), "W");
            entry("Default Power Limit", "default_power_limit", module ? NULL : fact_limit_default(gpu), "W");
            entry("Min Power Limit", "min_power_limit", module ? NULL : fact_limit_least(gpu), "W");
            entry("Max Power Limit", "max_power_limit", module ? NULL : fact_limit_most(gpu), "W");
        }
}

static void show_clocks(device_t gpu) {
    report.part = GENERAL | CLOCK;
    GROUP("Clocks", "clocks") {
        entry("Graphics", "graphics_clock", fact_clock_graphics(gpu), "MHz");
        entry("SM", "sm_clock", fact_clock_sm(gpu), "MHz");
        entry("Memory", "mem_clock", fact_clock_memory(gpu), "MHz");
        entry("Video", "video_clock", fact_clock_video(gpu), "MHz");
    }
    GROUP("Applications Clocks", "applications_clocks") {
        entry("Graphics", "graphics_clock", fact_application_graphics(gpu), "MHz");
        entry("Memory", "mem_clock", fact_application_memory(gpu), "MHz");
    }
    GROUP("Default Applications Clocks", "default_applications_clocks") {
        entry("Graphics", "graphics_clock", fact_default_graphics(gpu), "MHz");
        entry("Memory", "mem_clock", fact_default_memory(gpu), "MHz");
    }
    GROUP("Deferred Clocks", "deferred_clocks") entry("Memory", "mem_clock", NULL, "");
    GROUP("Max Clocks", "max_clocks") {
        entry("Graphics", "graphics_clock", fact_most_graphics(gpu), "MHz");
        entry("SM", "sm_clock", fact_most_sm(gpu), "MHz");
        entry("Memory", "mem_clock", fact_most_memory(gpu), "MHz");
        entry("Video", "video_clock", fact_most_video(gpu), "MHz");
    }
    GROUP("Max Customer Boost Clocks", "max_customer_boost_clocks")
        entry("Graphics", "graphics_clock", fact_boost(gpu), "MHz");
    unknown_group("Clock Policy", "clock_policy", "Auto Boost", "auto_boost", "Auto Boost Default",
                  "auto_boost_default");
    report.part = GENERAL | VOLTAGE;
    GROUP("Voltage", "voltage") entry("Graphics", "graphics_volt", NULL, "");
    report.part = GENERAL;
    GROUP("Fabric", "fabric") {
        entry("State", "state", fact_fabric(gpu), "");
        entry("Status", "status", fact_fabric(gpu) ? "Success" : NULL, "");
    }
    report.part = report.xml ? GENERAL : SUPPORTED_CLOCKS; /* as text only with -d */
    if (report.xml || report.wanted != ~0u)
        entry("Supported Clocks", "supported_clocks", NULL, "");
}

static void show_processes(device_t gpu) {
    static struct process list[MOST_PROCESSES];
    unsigned int count = find_processes(gpu, list);

    report.part = GENERAL | PIDS;
    if (!count && !report.xml)
        entry("Processes", "", "None", "");
    if (!count && !report.xml)
        return;
    GROUP("Processes", "processes")
        for (unsigned int i = 0; i < count; i++) {
            int whole = list[i].gpu_instance == 0xFFFFFFFFU;

            if (report.xml)
                open_group("", "process_info");
            entry("GPU instance ID", "gpu_instance_id", whole ? NULL : text("%u", list[i].gpu_instance), "");
            entry("Compute instance ID", "compute_instance_id",
                  whole ? NULL : text("%u", list[i].compute_instance), "");
            entry("Process ID", "pid", text("%u", list[i].pid), "");
            report.depth += !report.xml;
            entry("Type", "type", "C", "");
            entry("Name", "process_name", process_name(list[i].pid), "");
            entry("Used GPU Memory", "used_memory", text("%llu", list[i].memory >> 20), "MiB");
            report.depth -= !report.xml;
            if (report.xml)
                close_group("process_info");
        }
    if (report.xml)
        GROUP("", "accounted_processes");
}

static const char *outdated(const char *version, const char *name) {
    return branch() < RENAMED ? version
                              : text("%s [Deprecated; will be removed in CUDA 14.0. Use %s instead]", version, name);
}

static int show_all(int xml) {
    const char *driver = sim_table.driver_version;
    time_t now = time(NULL);
    char date[64];
    device_t gpu;

    strftime(date, sizeof date, "%a %b %e %H:%M:%S %Y", localtime(&now));
    report.xml = report.depth = xml;
    report.wanted = xml ? ~0u : report.wanted; /* as the real one: -d has no effect on XML */
    report.part = ~0u;
    puts(xml ? "<?xml version=\"1.0\" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM \"nvsmi_device_v12.dtd\">\n<nvidia_smi_log>"
             : "\n==============NVSMI LOG==============\n");
    entry("Timestamp", "timestamp", date, "");
    entry("Driver Version", "driver_version", xml ? driver : outdated(driver, "KMD Version"), "");
    entry("CUDA Version", "cuda_version", xml ? cuda_version() : outdated(cuda_version(), "CUDA UMD Version"), "");
    if (!xml && branch() >= RENAMED) {
        entry("KMD Version", "", driver, "");
        entry("CUDA UMD Version", "", cuda_version(), "");
    }
    if (!xml)
        putchar('\n');
    entry("Attached GPUs", "attached_gpus", text("%d", view.gpus), "");
    EACH_GPU(gpu) {
        indent();
        printf(xml ? "<gpu id=\"%s\">\n" : "GPU %s\n", bus_id(gpu));
        report.depth++;
        show_board(gpu);
        show_pci(gpu);
        show_performance(gpu);
        show_use(gpu);
        show_errors(gpu);
        show_power(gpu);
        show_clocks(gpu);
        show_processes(gpu);
        report.part = ~0u;
        close_group("gpu");
        if (!xml)
            putchar('\n');
    }
    if (xml)
        puts("</nvidia_smi_log>");
    say_simulated();
    return OK;
}
