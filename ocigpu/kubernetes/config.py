"""What the device plugin is told: command line, environment, configuration file and defaults become one record.

The names, variables, keys and defaults are those of NVIDIA's device plugin and GPU feature discovery; every key is
obeyed or refused with a reason, none is read and forgotten.  Only :func:`read_configuration` reads a file.
"""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ocigpu.cdi.hook_words import HOOK_NAMES
from ocigpu.core.errors import quoted
from ocigpu.gpus.offer import FEATURE_FLAGS
from ocigpu.kubernetes.options import (
    Option,
    find_values,
    option_error,
    read_flags,
    read_table,
    read_text,
)
from ocigpu.kubernetes.schema import MAX_BYTES, TABLE, parse_config_file
from ocigpu.kubernetes.sharing import Sharing, parse_sharing, resource_name

CDI_STRATEGIES = ("cdi-annotations", "cdi-cri")


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
    lease_journal: str = ""
    fabric_address: str = ""
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


OPTIONS = read_table(TABLE)
"""Every option, in the order of the help."""


def configure(
    flags: Mapping[str, str],
    environment: Mapping[str, str],
    file: Mapping[str, Any] | None = None,
    where: str = "",
    defaults: PluginOptions = PluginOptions(),  # noqa: B008 - it cannot be changed
) -> Configuration:
    """Return the configuration: of each option the flag, else the variable, else the file's key, else the default.

    ``flags``: text by option name, only those that were given ("mig_strategy": "mixed").  An empty variable counts as
    not set.  ``where``: the file's name, for messages.  Raises SettingsError (OCIGPU-KUBE-1) that names the flag,
    variable or key.
    """
    file = file or {}
    options = defaults._replace(**find_values(OPTIONS, flags, environment, file, where))
    sharing, warnings = parse_sharing(file.get("sharing") or {}, where)
    warnings += _check(options, sharing, where)
    return Configuration(
        options,
        sharing,
        _patterns(file, "gpus", where),
        _patterns(file, "mig", where),
        tuple(warnings),
    )


def _patterns(file: Mapping[str, Any], kind: str, where: str) -> tuple[tuple[str, str], ...]:
    entries = (file.get("resources") or {}).get(kind) or ()
    return tuple(
        (entry["pattern"], resource_name(entry["name"], f"{where}: resources.{kind}[{position}].name"))
        for position, entry in enumerate(entries)
    )


def matches(pattern: str, text: str) -> bool:
    """Return whether the whole text matches a pattern in which "*" stands for anything, in any case of letters."""
    literal = re.sub(r"[?\[]", r"[\g<0>]", pattern.lower())  # nothing else is special
    return fnmatch.fnmatchcase(text.lower(), literal)


def _check(options: PluginOptions, sharing: Sharing, where: str) -> list[str]:
    """Return warnings about options that have no effect beside others; raises SettingsError for contradictions."""
    if options.device_discovery_strategy == "tegra":
        raise option_error(
            "deviceDiscoveryStrategy",
            "tegra is refused: an integrated GPU has no UUID and no health to report, and every pod gets the same",
            "Give it through CDI: ocigpu cdi generate --mode csv",
        )
    for flag, values, known in (
        ("--cdi-disable-hooks", options.cdi_disable_hooks, (*HOOK_NAMES, "all")),
        ("--cdi-feature-flags", options.cdi_feature_flags, FEATURE_FLAGS),
    ):
        for value in values:
            if value not in known:
                raise option_error(flag, f"{quoted(value)} is not one of {', '.join(known)}")
    if options.vfio_resource != "model":
        resource_name(options.vfio_resource, "P_GPU_ALIAS")
    if sharing.strategy == "mps":
        if options.mig_strategy == "mixed":
            raise option_error(f"{where}: sharing.mps", "MPS cannot be used with MIG strategy mixed")
        if not options.mps_root:
            hint = "Set it, or MPS_ROOT, for example to /run/nvidia/mps."
            raise option_error(f"{where}: sharing.mps", "MPS needs flags.mpsRoot", hint)
    warnings = []
    if options.pass_device_specs and set(options.device_list_strategy) <= set(CDI_STRATEGIES):
        warnings.append("passDeviceSpecs has no effect: with CDI strategies only, specifications hold the device nodes")
    return warnings


# the command line and the file

CONFIG_VARIABLES = {"node-labels": ("GFD_CONFIG_FILE", "CONFIG_FILE")}
"""What names the file to a program; to others CONFIG_FILE."""


class Told(NamedTuple):
    """``flags``: text by option name; ``file``: path of the configuration file, "" for none; and all variables."""

    flags: "dict[str, str]"
    file: str
    environment: Mapping[str, str] = {}


def parse_flags(words: Sequence[str], environment: Mapping[str, str], program: str = "device-plugin") -> Told:
    """Return what the command line of one of our programs says; raises UsageError for words that it does not know."""
    variables = CONFIG_VARIABLES.get(program, ("CONFIG_FILE",))
    config = Option("config_file", "text", ("config-file",), variables)
    flags = read_flags(words, (config, *(option for option in OPTIONS if program in option.programs)), program)
    default = next((environment[name] for name in variables if environment.get(name)), "")
    file = flags.pop(config.name, default)
    return Told(flags, file, environment)


def read_configuration(told: Told) -> Configuration:
    """Return the configuration in force; raises SettingsError (OCIGPU-KUBE-1).

    Unlike NVIDIA's plugin, one that was not told whether to end without a driver waits for it: a program that ends is
    started again and again.
    """
    text = read_text(told.file, MAX_BYTES, option_error) if told.file else ""
    file, warnings = parse_config_file(text, told.file)
    found = configure(told.flags, told.environment, file, told.file, PluginOptions(fail_on_init_error=False))
    return found._replace(warnings=(*warnings, *found.warnings))
