"""What the device plugin is told: command line, environment, configuration file and defaults become one record.

The names, variables, keys and defaults are those of NVIDIA's device plugin and GPU feature discovery; every key is
obeyed or refused with a reason, none is read and forgotten.  Pure.
"""

import fnmatch
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ocigpu.core.errors import quoted
from ocigpu.core.tokens import is_number
from ocigpu.gpus.nvidia.request import MAX_IMEX_CHANNEL
from ocigpu.kubernetes.schema import ConfigFile, NamePattern, config_error, shown
from ocigpu.kubernetes.sharing import Sharing, parse_sharing, resource_name

INFINITE = "infinite"
CDI_STRATEGIES = ("cdi-annotations", "cdi-cri")
STRATEGIES = ("envvar", "volume-mounts", *CDI_STRATEGIES)
_TRUE = ("1", "t", "T", "TRUE", "true", "True")
_FALSE = ("0", "f", "F", "FALSE", "false", "False")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ns|us|µs|ms|s|m|h)")


class PluginOption(NamedTuple):
    """One option: ``name`` is its field in :class:`PluginOptions`.

    ``kind``: "bool", "text", "path", "list", "numbers" or "duration" (text such as "1m30s" or "infinite", a value in
    seconds).
    ``key``: its path in the file, "" for none.  ``flags`` and ``variables``: its names elsewhere; an earlier one wins.
    """

    name: str
    kind: str
    default: Any
    key: str
    flags: tuple[str, ...]
    variables: tuple[str, ...]
    meaning: str
    choices: tuple[str, ...] = ()


class PluginOptions(NamedTuple):
    """Every option by name; see :data:`OPTIONS`.  ``sleep_interval`` is in seconds; paths are those of the host."""

    mig_strategy: str = "none"
    fail_on_init_error: bool = True
    driver_root: str = "/"
    dev_root: str = ""
    container_driver_root: str = "/driver-root"
    pass_device_specs: bool = False
    device_list_strategy: tuple[str, ...] = ("envvar",)
    device_id_strategy: str = "uuid"
    gdrcopy_enabled: bool = False
    gds_enabled: bool = False
    mofed_enabled: bool = False
    kubelet_socket: str = "/var/lib/kubelet/device-plugins/kubelet.sock"
    cdi_annotation_prefix: str = "cdi.k8s.io/"
    cdi_hook_path: str = ""
    cdi_feature_flags: tuple[str, ...] = ()
    cdi_disable_hooks: tuple[str, ...] = ()
    mps_root: str = ""
    shared_devices_allocation_policy: str = "distributed"
    device_discovery_strategy: str = "auto"
    vfio_resource: str = "gpu"
    imex_channel_ids: tuple[int, ...] = ()
    imex_required: bool = False
    use_node_feature_api: bool = True
    oneshot: bool = False
    no_timestamp: bool = False
    sleep_interval: float = 60.0
    output_file: str = "/etc/kubernetes/node-feature-discovery/features.d/gfd"
    machine_type_file: str = "/sys/class/dmi/id/product_name"
    disabled_health_checks: str = ""
    enabled_health_checks: str = ""


class Configuration(NamedTuple):
    """What the plugin is told.

    ``gpu_names``, ``mig_names``: (pattern, resource name) pairs, the first that matches wins.  ``warnings``: a sentence
    each about what has no effect.
    """

    options: PluginOptions = PluginOptions()
    sharing: Sharing = Sharing()
    gpu_names: tuple[tuple[str, str], ...] = ()
    mig_names: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()


def _option(
    name: str, kind: str, key: str, variables: str, meaning: str, choices: tuple[str, ...] = (), flags: str = ""
) -> PluginOption:
    names = tuple(flags.split()) or (name.replace("_", "-"),)
    return PluginOption(
        name, kind, PluginOptions._field_defaults[name], key, names, tuple(variables.split()), meaning, choices
    )


OPTIONS = (
    _option(
        "mig_strategy", "text", "flags.migStrategy", "MIG_STRATEGY GFD_MIG_STRATEGY", "how MIG devices are offered",
        ("none", "single", "mixed"),
    ),
    _option(
        "fail_on_init_error", "bool", "flags.failOnInitError", "FAIL_ON_INIT_ERROR GFD_FAIL_ON_INIT_ERROR",
        "end when there is no driver, instead of waiting for one",
    ),
    _option(
        "driver_root", "path", "flags.nvidiaDriverRoot", "NVIDIA_DRIVER_ROOT", "where the host has the driver's files",
        flags="driver-root nvidia-driver-root",
    ),
    _option(
        "dev_root", "path", "flags.nvidiaDevRoot", "NVIDIA_DEV_ROOT",
        "where the host has the driver's device nodes; empty: the driver root", flags="dev-root nvidia-dev-root",
    ),
    _option(
        "container_driver_root", "path", "flags.plugin.containerDriverRoot",
        "DRIVER_ROOT_CTR_PATH CONTAINER_DRIVER_ROOT", "where the plugin's own container has the driver root",
        flags="driver-root-ctr-path container-driver-root",
    ),
    _option(
        "pass_device_specs", "bool", "flags.plugin.passDeviceSpecs", "PASS_DEVICE_SPECS",
        "tell the kubelet about device nodes too",
    ),
    _option(
        "device_list_strategy", "list", "flags.plugin.deviceListStrategy", "DEVICE_LIST_STRATEGY",
        "how a container is told about its devices", STRATEGIES,
    ),
    _option(
        "device_id_strategy", "text", "flags.plugin.deviceIDStrategy", "DEVICE_ID_STRATEGY",
        "what devices are called in it", ("uuid", "index"),
    ),
    _option("gdrcopy_enabled", "bool", "flags.gdrcopyEnabled", "GDRCOPY_ENABLED", "give GDRCopy's devices"),
    _option("gds_enabled", "bool", "flags.gdsEnabled", "GDS_ENABLED", "give GPUDirect Storage's devices"),
    _option("mofed_enabled", "bool", "flags.mofedEnabled", "MOFED_ENABLED", "give Mellanox' devices"),
    _option("kubelet_socket", "path", "", "KUBELET_SOCKET", "where to register; plugins' sockets are beside it"),
    _option(
        "cdi_annotation_prefix", "text", "flags.plugin.cdiAnnotationPrefix", "CDI_ANNOTATION_PREFIX",
        "beginning of annotations that name CDI devices",
    ),
    _option(
        "cdi_hook_path", "path", "flags.plugin.nvidiaCTKPath", "NVIDIA_CDI_HOOK_PATH NVIDIA_CTK_PATH",
        "program of the hooks in CDI specifications; empty: ocigpu-hook",
        flags="nvidia-cdi-hook-path nvidia-ctk-path",
    ),
    _option("cdi_feature_flags", "list", "", "CDI_FEATURE_FLAGS", "feature flags of CDI specifications"),
    _option("cdi_disable_hooks", "list", "", "CDI_DISABLE_HOOKS", "hooks that CDI specifications go without, or all"),
    _option("mps_root", "path", "flags.mpsRoot", "MPS_ROOT", "directory of the host for MPS"),
    _option(
        "shared_devices_allocation_policy", "text", "flags.plugin.sharedDevicesAllocationPolicy",
        "SHARED_DEVICES_ALLOCATION_POLICY", "how shared and MIG devices are spread", ("distributed", "packed"),
    ),
    _option(
        "device_discovery_strategy", "text", "flags.deviceDiscoveryStrategy",
        "DEVICE_DISCOVERY_STRATEGY GFD_DEVICE_DISCOVERY_STRATEGY", "where devices are looked for",
        ("auto", "nvml", "vfio", "tegra"),
    ),
    _option(
        "vfio_resource", "text", "", "P_GPU_ALIAS", "resource of the GPUs for virtual machines; model: one for each",
    ),
    _option("imex_channel_ids", "numbers", "imex.channelIDs", "IMEX_CHANNEL_IDS", "IMEX channels of every container"),
    _option("imex_required", "bool", "imex.required", "IMEX_REQUIRED", "refuse to go without one of them"),
    _option(
        "use_node_feature_api", "bool", "flags.useNodeFeatureAPI", "GFD_USE_NODE_FEATURE_API USE_NODE_FEATURE_API",
        "write labels through the API server",
    ),
    _option("oneshot", "bool", "flags.gfd.oneshot", "GFD_ONESHOT", "write labels once and end"),
    _option("no_timestamp", "bool", "flags.gfd.noTimestamp", "GFD_NO_TIMESTAMP", "no label with the time"),
    _option("sleep_interval", "duration", "flags.gfd.sleepInterval", "GFD_SLEEP_INTERVAL", "time between labellings"),
    _option(
        "output_file", "path", "flags.gfd.outputFile", "GFD_OUTPUT_FILE", "where labels are written",
        flags="output-file output o",
    ),
    _option("machine_type_file", "path", "flags.gfd.machineTypeFile", "GFD_MACHINE_TYPE_FILE", "name of the machine"),
    _option("disabled_health_checks", "text", "", "DP_DISABLE_HEALTHCHECKS", "XIDs that mean nothing, or all"),
    _option("enabled_health_checks", "text", "", "DP_ENABLE_HEALTHCHECKS", "XIDs that count all the same, or all"),
)  # fmt: skip
"""Every option, in the order of the help."""


def configure(
    flags: Mapping[str, str], environment: Mapping[str, str], file: ConfigFile | None = None, where: str = ""
) -> Configuration:
    """Return the configuration: of each option the flag, else the variable, else the file's key, else the default.

    ``flags``: text by option name, only those that were given ("mig_strategy": "mixed").  An empty variable counts as
    not set.  ``where``: the file's name, for messages.  Raises SettingsError (OCIGPU-KUBE-1) that names the flag,
    variable or key.
    """
    file = file or ConfigFile()
    document = file.model_dump(by_alias=True)
    options = PluginOptions(**{option.name: _choose(option, flags, environment, document, where) for option in OPTIONS})
    sharing, warnings = parse_sharing(file.sharing, where)
    warnings += _check(options, sharing, where)
    return Configuration(
        options,
        sharing,
        _patterns(file.resources.gpus, f"{where}: resources.gpus"),
        _patterns(file.resources.mig, f"{where}: resources.mig"),
        tuple(warnings),
    )


def _choose(
    option: PluginOption, flags: Mapping[str, str], environment: Mapping[str, str], document: Any, where: str
) -> Any:
    if option.name in flags:
        return _value(option, flags[option.name], f"--{option.flags[0]}", text=True)
    for variable in option.variables:
        if environment.get(variable):
            return _value(option, environment[variable], variable, text=True)
    value = document if option.key else None
    for part in option.key.split(".") if option.key else ():
        value = value.get(part) if value is not None else None
    return option.default if value is None else _value(option, value, f"{where}: {option.key}", text=False)


def _value(option: PluginOption, raw: Any, where: str, *, text: bool) -> Any:
    """Return what was written, as text on a command line or as data in a file, as the option's value."""
    if option.kind == "bool":
        if raw in (_TRUE if text else (True,)):
            return True
        if raw in (_FALSE if text else (False,)):
            return False
        raise config_error(where, f"{shown(raw)} is neither true nor false")
    if option.kind == "duration":
        return math.inf if raw == INFINITE else parse_duration(raw, where)
    if option.kind in ("list", "numbers"):
        parts = raw.split(",") if isinstance(raw, str) else raw
        if not isinstance(parts, list) or any(isinstance(part, (list, dict)) for part in parts):
            raise config_error(where, f"{shown(raw)} is neither text nor a list of it")
        stripped = [part.strip() if isinstance(part, str) else part for part in parts]
        unique = tuple(dict.fromkeys(part for part in stripped if part != ""))
        convert = _channel if option.kind == "numbers" else _chosen
        values = tuple(convert(option, part, where) for part in unique)
        if not values and option.default:
            raise config_error(where, "is empty")
        return values
    if option.kind == "path" and raw and not str(raw).startswith("/"):
        raise config_error(where, f"{shown(raw)} is not an absolute path")
    return _chosen(option, raw, where)


def _chosen(option: PluginOption, raw: Any, where: str) -> str:
    if not isinstance(raw, str):
        raise config_error(where, f"{shown(raw)} is not text")
    if option.choices and raw not in option.choices:
        raise config_error(where, f"{quoted(raw)} is not one of {', '.join(option.choices)}")
    return raw


def _channel(_option: PluginOption, raw: Any, where: str) -> int:
    if not is_number(str(raw)) or len(str(raw)) > 7 or int(raw) > MAX_IMEX_CHANNEL:
        raise config_error(where, f"{shown(raw)} is not a channel number from 0 to {MAX_IMEX_CHANNEL}")
    return int(raw)


def parse_duration(raw: Any, where: str) -> float:
    """Return the seconds of a duration such as "60s" or "1m30s".

    A bare number is refused: NVIDIA's program takes it for nanoseconds, which nobody means.
    """
    parts = _DURATION.findall(raw) if isinstance(raw, str) else []
    if not parts or "".join(number + unit for number, unit in parts) != raw:
        bare = isinstance(raw, (str, int)) and is_number(str(raw))
        hint = f'Write a unit: "{raw}s" for seconds.' if bare else 'Durations are written "60s", "1m30s".'
        raise config_error(where, f"{shown(raw)} is not a duration", hint)
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if not 1 <= seconds <= 1e9:
        raise config_error(where, f"{quoted(raw)} is not a duration of a second or more")
    return seconds


def _patterns(entries: list[NamePattern] | None, where: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (entry.pattern, resource_name(entry.name, f"{where}[{position}].name"))
        for position, entry in enumerate(entries or ())
    )


def matches(pattern: str, text: str) -> bool:
    """Return whether the whole text matches a pattern in which "*" stands for anything, in any case of letters."""
    literal = re.sub(r"[?\[]", r"[\g<0>]", pattern.lower())  # nothing else is special
    return fnmatch.fnmatchcase(text.lower(), literal)


def _check(options: PluginOptions, sharing: Sharing, where: str) -> list[str]:
    """Return warnings about options that have no effect beside others; raises SettingsError for contradictions."""
    if options.device_discovery_strategy == "tegra":
        raise config_error(
            "deviceDiscoveryStrategy",
            "tegra is refused: an integrated GPU has no UUID and no health to report, and every pod gets the same",
            "Give it through CDI: ocigpu cdi generate --mode csv",
        )
    if options.vfio_resource != "model":
        resource_name(options.vfio_resource, "P_GPU_ALIAS")
    if sharing.strategy == "mps":
        if options.mig_strategy == "mixed":
            raise config_error(f"{where}: sharing.mps", "MPS cannot be used with MIG strategy mixed")
        if not options.mps_root:
            hint = "Set it, or MPS_ROOT, for example to /run/nvidia/mps."
            raise config_error(f"{where}: sharing.mps", "MPS needs flags.mpsRoot", hint)
    warnings = []
    if options.pass_device_specs and set(options.device_list_strategy) <= set(CDI_STRATEGIES):
        warnings.append("passDeviceSpecs has no effect: with CDI strategies only, specifications hold the device nodes")
    return warnings
