/* nvidia-smi --query-gpu and --query-compute-apps: tables of chosen fields, and their lists; part of smi.c. */

typedef const char *fact(device_t gpu);

/* A field by its name, and its older names; the first of a group is what the heading says. */
static const struct field {
    const char *name, *aliases, *unit;
    fact *ask;
} fields[] = {
    {"timestamp", "", "", fact_timestamp},
    {"driver_version", "", "", fact_driver},
    {"count", "", "", fact_count},
    {"name", " gpu_name ", "", fact_name},
    {"serial", " gpu_serial ", "", fact_serial},
    {"uuid", " gpu_uuid ", "", fact_uuid},
    {"pci.bus_id", " gpu_bus_id ", "", fact_bus_id},
    {"pci.domain", "", "", fact_domain},
    {"pci.bus", "", "", fact_bus},
    {"pci.device", "", "", fact_slot},
    {"pci.device_id", "", "", fact_device_id},
    {"pci.sub_device_id", "", "", fact_subsystem},
    {"vgpu_driver_capability.heterogenous_multivGPU", "", "", NULL},
    {"pcie.link.gen.current", " pcie.link.gen.gpucurrent ", "", fact_pcie},
    {"pcie.link.gen.max", " pcie.link.gen.gpumax pcie.link.gen.hostmax ", "", fact_pcie_most},
    {"pcie.link.width.current", "", "", fact_width},
    {"pcie.link.width.max", "", "", fact_width_most},
    {"index", "", "", fact_index},
    {"display_mode", " display_attached ", "", fact_display},
    {"display_active", "", "", fact_display_active},
    {"persistence_mode", "", "", fact_persistence},
    {"addressing_mode", "", "", fact_addressing},
    {"accounting.mode", "", "", fact_accounting},
    {"accounting.buffer_size", "", "", fact_accounting_size},
    {"driver_model.current", "", "", NULL},
    {"driver_model.pending", "", "", NULL},
    {"vbios_version", "", "", fact_vbios},
    {"inforom.img", " inforom.image ", "", NULL},
    {"inforom.oem", "", "", NULL},
    {"inforom.ecc", "", "", NULL},
    {"inforom.pwr", " inforom.power ", "", NULL},
    {"gom.current", " gpu_operation_mode.current ", "", NULL},
    {"gom.pending", " gpu_operation_mode.pending ", "", NULL},
    {"fan.speed", "", "%", fact_fan},
    {"pstate", "", "", fact_state},
    {"clocks_event_reasons.supported", " clocks_throttle_reasons.supported ", "", NULL},
    {"clocks_event_reasons.active", " clocks_throttle_reasons.active ", "", fact_reasons},
    {"clocks_event_reasons.gpu_idle", " clocks_throttle_reasons.gpu_idle ", "", fact_idle},
    {"clocks_event_reasons.applications_clocks_setting", " clocks_throttle_reasons.applications_clocks_setting ", "",
     fact_setting},
    {"clocks_event_reasons.sw_power_cap", " clocks_throttle_reasons.sw_power_cap ", "", fact_power_cap},
    {"clocks_event_reasons.hw_slowdown", " clocks_throttle_reasons.hw_slowdown ", "", fact_hardware},
    {"clocks_event_reasons.hw_thermal_slowdown", " clocks_throttle_reasons.hw_thermal_slowdown ", "",
     fact_hardware_thermal},
    {"clocks_event_reasons.hw_power_brake_slowdown", " clocks_throttle_reasons.hw_power_brake_slowdown ", "",
     fact_power_brake},
    {"clocks_event_reasons.sw_thermal_slowdown", " clocks_throttle_reasons.sw_thermal_slowdown ", "",
     fact_software_thermal},
    {"clocks_event_reasons.sync_boost", " clocks_throttle_reasons.sync_boost ", "", fact_sync_boost},
    {"memory.total", "", "MiB", fact_memory},
    {"memory.reserved", "", "MiB", fact_memory_reserved},
    {"memory.used", "", "MiB", fact_memory_used},
    {"memory.free", "", "MiB", fact_memory_free},
    {"compute_mode", "", "", fact_compute_mode},
    {"compute_cap", "", "", fact_capability},
    {"utilization.gpu", "", "%", fact_busy},
    {"utilization.memory", "", "%", fact_memory_busy},
    {"utilization.encoder", "", "%", fact_encoder},
    {"utilization.decoder", "", "%", fact_decoder},
    {"utilization.jpeg", "", "%", fact_jpeg},
    {"utilization.ofa", "", "%", fact_ofa},
    {"encoder.stats.sessionCount", "", "", fact_sessions},
    {"encoder.stats.averageFps", "", "", fact_frames},
    {"encoder.stats.averageLatency", "", "", fact_latency},
    {"ecc.mode.current", "", "", fact_ecc},
    {"ecc.mode.pending", "", "", fact_ecc_pending},
    {"ecc.errors.corrected.volatile.total", "", "", fact_corrected},
    {"ecc.errors.corrected.aggregate.total", "", "", fact_corrected_ever},
    {"ecc.errors.uncorrected.volatile.total", "", "", fact_uncorrected},
    {"ecc.errors.uncorrected.aggregate.total", "", "", fact_uncorrected_ever},
    {"retired_pages.single_bit_ecc.count", " retired_pages.sbe ", "", fact_retired_single},
    {"retired_pages.double_bit.count", " retired_pages.dbe ", "", fact_retired_double},
    {"retired_pages.pending", "", "", fact_retired_pending},
    {"remapped_rows.correctable", "", "", fact_rows_corrected},
    {"remapped_rows.uncorrectable", "", "", fact_rows_uncorrected},
    {"remapped_rows.pending", "", "", fact_rows_pending},
    {"remapped_rows.failure", "", "", fact_rows_failed},
    {"temperature.gpu", "", "", fact_temperature},
    {"temperature.gpu.tlimit", "", "", NULL},
    {"temperature.memory", "", "", fact_memory_temperature},
    {"power.management", "", "", NULL},
    {"power.draw", "", "W", fact_power},
    {"power.draw.average", "", "W", fact_power},
    {"power.draw.instant", "", "W", fact_power},
    {"power.limit", "", "W", fact_limit},
    {"enforced.power.limit", "", "W", fact_limit_enforced},
    {"power.default_limit", "", "W", fact_limit_default},
    {"power.min_limit", "", "W", fact_limit_least},
    {"power.max_limit", "", "W", fact_limit_most},
    {"clocks.current.graphics", " clocks.gr ", "MHz", fact_clock_graphics},
    {"clocks.current.sm", " clocks.sm ", "MHz", fact_clock_sm},
    {"clocks.current.memory", " clocks.mem ", "MHz", fact_clock_memory},
    {"clocks.current.video", " clocks.video ", "MHz", fact_clock_video},
    {"clocks.applications.graphics", " clocks.applications.gr ", "MHz", fact_application_graphics},
    {"clocks.applications.memory", " clocks.applications.mem ", "MHz", fact_application_memory},
    {"clocks.default_applications.graphics", " clocks.default_applications.gr ", "MHz", fact_default_graphics},
    {"clocks.default_applications.memory", " clocks.default_applications.mem ", "MHz", fact_default_memory},
    {"clocks.max.graphics", " clocks.max.gr ", "MHz", fact_most_graphics},
    {"clocks.max.sm", "", "MHz", fact_most_sm},
    {"clocks.max.memory", " clocks.max.mem ", "MHz", fact_most_memory},
    {"mig.mode.current", "", "", fact_mig},
    {"mig.mode.pending", "", "", fact_mig_pending},
    {"gsp.mode.current", "", "", NULL},
    {"fabric.state", "", "", fact_fabric},
};

/* The fields of processes, by these numbers. */
enum { APP_TIME, APP_NAME, APP_BUS, APP_SERIAL, APP_UUID, APP_PID, APP_PROCESS, APP_MEMORY };

static const struct field app_fields[] = {
    [APP_TIME] = {"timestamp", "", "", fact_timestamp},
    [APP_NAME] = {"gpu_name", "", "", fact_name},
    [APP_BUS] = {"gpu_bus_id", "", "", fact_bus_id},
    [APP_SERIAL] = {"gpu_serial", "", "", fact_serial},
    [APP_UUID] = {"gpu_uuid", "", "", fact_uuid},
    [APP_PID] = {"pid", "", "", NULL},
    [APP_PROCESS] = {"process_name", " name ", "", NULL},
    [APP_MEMORY] = {"used_gpu_memory", " used_memory ", "MiB", NULL},
};

enum { MOST_FIELDS = 256 };

#define LENGTH(list) (int)(sizeof list / sizeof *list)

static int find_field(const struct field *list, int length, const char *name) {
    const char *alias = text(" %s ", name);

    for (int i = 0; i < length; i++)
        if (strcasecmp(name, list[i].name) == 0 || (*name && strstr(list[i].aliases, alias)))
            return i;
    return -1;
}

struct table {
    const struct field *list;
    int columns[MOST_FIELDS], count, header, units;
};

/* Read the names and the format of a query; return 0 when both are known. */
static int read_query(struct table *table, int length, char *names, const char *format, const char *option) {
    char *name;

    if (strncmp(format, "csv", 3) != 0)
        return usage("%s needs --format=csv, not \"%s\"", option, format);
    table->header = !strstr(format, "noheader");
    table->units = !strstr(format, "nounits");
    while ((name = strsep(&names, ","))) {
        while (*name == ' ')
            name++;
        if (table->count == MOST_FIELDS || (table->columns[table->count++] = find_field(table->list, length, name)) < 0) {
            printf("Field \"%.200s\" is not a valid field to query.\n\n", name);
            return INVALID;
        }
    }
    for (int i = 0; table->header && i < table->count; i++) {
        const struct field *field = &table->list[table->columns[i]];

        printf("%s%s", i ? ", " : "", field->name);
        if (*field->unit && table->units)
            printf(" [%s]", field->unit);
    }
    if (table->header)
        putchar('\n');
    return OK;
}

static void print_cell(const struct table *table, int column, const char *value) {
    const char *unit = table->list[table->columns[column]].unit;

    printf("%s%s", column ? ", " : "", value ? value : "[N/A]");
    if (value && *unit && table->units)
        printf(" %s", unit);
    if (column == table->count - 1)
        putchar('\n');
}

static int query_gpus(char *names, const char *format) {
    struct table table = {.list = fields};
    int i, status = read_query(&table, LENGTH(fields), names, format, "--query-gpu");
    device_t gpu;

    if (status != OK)
        return status;
    EACH_GPU(gpu)
        for (i = 0; i < table.count; i++) {
            fact *ask = fields[table.columns[i]].ask;

            print_cell(&table, i, ask ? ask(gpu) : NULL);
        }
    say_simulated();
    return OK;
}

static int query_apps(char *names, const char *format) {
    struct table table = {.list = app_fields};
    int i, status = read_query(&table, LENGTH(app_fields), names, format, "--query-compute-apps");
    static struct process list[MOST_PROCESSES];
    device_t gpu;

    if (status != OK)
        return status;
    EACH_GPU(gpu)
        for (unsigned int one = 0, count = find_processes(gpu, list); one < count; one++)
            for (i = 0; i < table.count; i++) {
                int column = table.columns[i];

                print_cell(&table, i,
                           column == APP_PID       ? text("%u", list[one].pid)
                           : column == APP_PROCESS ? process_name(list[one].pid)
                           : column == APP_MEMORY  ? text("%llu", list[one].memory >> 20)
                                                   : app_fields[column].ask(gpu));
            }
    say_simulated();
    return OK;
}

/* List the fields, without a description of those that have a value. Exporters find them by the name in quotes at the start of a line. */
static int help_fields(const char *option, const struct field *list, int length) {
    char aliases[256], *rest, *alias;

    printf("List of valid properties to query for the switch \"%s\":\n", option);
    for (int i = 0; i < length; i++) {
        printf("\n\"%s\"", list[i].name);
        snprintf(aliases, sizeof aliases, "%s", list[i].aliases);
        for (rest = aliases; (alias = strsep(&rest, " "));)
            if (*alias)
                printf(" or \"%s\"", alias);
        puts(list[i].ask || list == app_fields ? "" : "\nNot simulated: [N/A].");
    }
    return OK;
}
