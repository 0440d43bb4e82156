"""The device plugin's configuration: command line, environment, file and defaults become one record.

The names, variables, keys and defaults are those of NVIDIA's device plugin and GPU feature discovery; every key is
either supported or rejected with a reason.  Only :func:`read_configuration` reads a file: YAML or JSON in the schema of
NVIDIA's device plugin, version v1.  It checks the shape first, then the meaning of the values.
"""

import fnmatch
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ocigpu.cdi.hook_words import HOOK_NAMES
from ocigpu.cdi.yaml_child import RefusedError, build
from ocigpu.core import rawjson
from ocigpu.core.errors import printable, quoted, suggest
from ocigpu.gpus.offer import FEATURE_FLAGS
from ocigpu.kubernetes.node.sharing import Sharing, parse_sharing, resource_name
from ocigpu.system.options import (
    Option,
    find_values,
    option_error,
    read_flags,
    read_table,
    read_text,
    shown,
)

MAX_BYTES = 1 << 20
"""As much as a ConfigMap may hold."""
MAX_SHOWN = 4
MAX_HOMES = 2
TABLE = Path(__file__).with_name("options.toml")


Shape = str | dict[str, Any] | list[Any]
"""What a value may be: a word of :data:`_TYPES` or "anything", a mapping of these keys, or a list of such entries."""
_TYPES = {"true or false": bool, "a number": int, "text": str}
_KINDS: dict[str, Shape] = {"bool": "true or false", "text": "text", "path": "text", "numbers": ["a number"]}
_NAME: Shape = {"pattern": "text", "name": "text"}
"""Devices whose model or profile matches the pattern are of the resource of that name; both are needed."""
_SHARED: Shape = {"name": "text", "rename": "text", "devices": "anything", "replicas": "a number"}
_SHARING: Shape = {
    "renameByDefault": "true or false",
    "failRequestsGreaterThanOne": "true or false",
    "resources": [_SHARED],
}


def _shape() -> dict[str, Any]:
    """Return the shape of the whole file, with the keys of the table of options."""
    shape: dict[str, Any] = {
        "version": "anything",
        "resources": {"gpus": [_NAME], "mig": [_NAME]},
        "sharing": {"timeSlicing": _SHARING, "mps": _SHARING},
    }
    for option in read_table(TABLE):
        if option.key:
            *above, last = option.key.split(".")
            part = shape
            for name in above:
                part = part.setdefault(name, {})
            part[last] = _KINDS.get(option.kind, "anything")
    return shape


SHAPE = _shape()


def _mappings(shape: Shape, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every mapping of a shape with its path; [] stands for an entry of a list."""
    if isinstance(shape, list):
        yield from _mappings(shape[0], f"{path}[]")
    elif isinstance(shape, dict):
        yield path, shape
        for name, inner in shape.items():
            yield from _mappings(inner, f"{path}.{name}".removeprefix("."))


_MEMBERS = dict(_mappings(SHAPE))


def parse_config_file(text: str, where: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the file's content and warnings about meaningless top-level keys, a sentence each.

    An empty file has no keys; null stands for an absent value.  Raises SettingsError (OCIGPU-KUBE-1) that names every
    wrong key by its path.  An unknown key below a known one is wrong: it was meant to change something.
    """
    data = _parse(text, where)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise option_error(where, "the document is not a mapping of keys")
    _check_schema(data, where)
    foreign = {str(key): _suggestion(str(key), "") for key in data if key not in SHAPE}
    warnings = tuple(f"{where}: unknown key {quoted(key)} ignored{meant}" for key, meant in foreign.items())
    kept = {key: value for key, value in data.items() if key in SHAPE}
    problems = list(dict.fromkeys(_problems(kept, SHAPE, "")))
    version = kept.get("version")
    if version not in (None, "v1"):
        problems.insert(0, f"version: unknown version {shown(version)}: only v1 is known")
    if not problems:
        return kept, warnings
    more = f"; and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
    raise option_error(where, "; ".join(problems[:MAX_SHOWN]) + more)


def _check_schema(data: Mapping[str, Any], where: str) -> None:
    """Raise SettingsError for a document of another schema: without a known key it would pass as an empty one."""
    if "kind" in data and "apiVersion" in data:
        parts = data.get("data")
        names = ", ".join(quoted(str(name)) for name in parts) if isinstance(parts, Mapping) and parts else "data"
        text = f"it is a Kubernetes object ({printable(str(data['kind']), 60)}), not a configuration"
        raise option_error(where, text, f"The configuration is the text below one key of a ConfigMap: {names}")
    if data and not any(key in SHAPE or _suggestion(str(key), "") for key in data):
        names = ", ".join(quoted(str(key)) for key in list(data)[:MAX_SHOWN])
        text = f"none of its keys is known ({names}): it is not a configuration of NVIDIA's device plugin"
        raise option_error(where, text, f"Its keys are: {', '.join(SHAPE)}")


def _problems(value: Any, shape: Shape, path: str) -> Iterator[str]:
    """Yield what of a value is not of its shape, a clause each that begins with its path."""
    if isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{path}: {shown(value)} is not a list"
            return
        for position, entry in enumerate(value):
            yield from _problems(entry, shape[0], f"{path}[{position}]")
    elif isinstance(shape, dict):
        if not isinstance(value, dict):
            yield f"{path}: {shown(value)} is not a mapping"
            return
        for name, inner in value.items():
            if name not in shape:
                yield f"{path}: unknown key {quoted(str(name))}{_suggestion(str(name), path)}"
            elif inner is not None:
                yield from _problems(inner, shape[name], f"{path}.{name}".removeprefix("."))
        for name in _NAME if shape is _NAME else ():
            if value.get(name) is None:
                yield f"{path}.{name}: is missing"
    elif shape != "anything" and type(value) is not _TYPES[shape]:
        yield f"{path}: {shown(value)} is not {shape}"


def _suggestion(key: str, parent: str) -> str:
    """Return where a key belongs that is in the wrong part, or the key of this part that it resembles; "" for neither.

    Of several parts those below this one count, or else all; more than MAX_HOMES say nothing ("name").
    """
    here = re.sub(r"\[[0-9]+\]", "[]", parent)
    homes = [path for path, members in _MEMBERS.items() if key in members]
    homes = [path for path in homes if path.startswith(here)] or homes
    if 0 < len(homes) <= MAX_HOMES:
        parts = [path.partition("[]") for path in homes]
        places = [f"an entry of {part}" if entries else part or "the top" for part, entries, _ in parts]
        return f": it belongs {'into' if homes[0] else 'to'} {' or '.join(places)}"
    near = suggest(key, _MEMBERS.get(here, {}))
    return near and f": {near}"


def _parse(text: str, where: str) -> Any:
    if len(text) > MAX_BYTES:
        raise option_error(where, f"more than {MAX_BYTES} characters")
    if text.lstrip().startswith("{"):
        try:
            return rawjson.parse(text)
        except json.JSONDecodeError:
            pass  # YAML may begin like this too
        except (ValueError, RecursionError) as error:
            raise option_error(where, printable(str(error), 300)) from error
    try:
        return build(yaml, text.encode(), may_be_empty=True)
    except RefusedError as error:
        raise option_error(where, f"not YAML: {printable(str(error), 300)}") from error


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
    resource_naming_strategy: str = "single"
    vfio_resource: str = "gpu"
    lease_journal: str = ""
    fabric_address: str = ""
    unlinked_sets: bool = False
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
    """The plugin's configuration.

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
            "Use CDI: ocigpu cdi generate --mode csv",
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


class CommandInput(NamedTuple):
    """What a program was started with.

    ``flags``: text by option name; ``file``: path of the configuration file, "" for none; ``environment``: variables.
    """

    flags: "dict[str, str]"
    file: str
    environment: Mapping[str, str] = {}


def parse_flags(words: Sequence[str], environment: Mapping[str, str], program: str = "device-plugin") -> CommandInput:
    """Return the parsed command line of one of our programs; raises UsageError for unknown words."""
    variables = CONFIG_VARIABLES.get(program, ("CONFIG_FILE",))
    config = Option("config_file", "text", ("config-file",), variables)
    flags = read_flags(words, (config, *(option for option in OPTIONS if program in option.programs)), program)
    default = next((environment[name] for name in variables if environment.get(name)), "")
    file = flags.pop(config.name, default)
    return CommandInput(flags, file, environment)


def read_configuration(given: CommandInput) -> Configuration:
    """Return the configuration in force; raises SettingsError (OCIGPU-KUBE-1).

    Unless configured to end without a driver, this plugin waits for one.  NVIDIA's plugin ends, and is then restarted
    again and again.
    """
    text = read_text(given.file, MAX_BYTES, option_error) if given.file else ""
    file, warnings = parse_config_file(text, given.file)
    found = configure(given.flags, given.environment, file, given.file, PluginOptions(fail_on_init_error=False))
    return found._replace(warnings=(*warnings, *found.warnings))
