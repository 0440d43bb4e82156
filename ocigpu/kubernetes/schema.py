"""The device plugin's configuration file: YAML or JSON in the schema of NVIDIA's device plugin, version v1.

Only shape is checked here: types and names of keys.  What values mean is :mod:`ocigpu.kubernetes.config`.
"""

import difflib
import json
import re
from typing import Any, ClassVar, Literal

import yaml
from pydantic import BaseModel, ConfigDict, StrictBool, StrictInt, StrictStr, ValidationError
from pydantic.alias_generators import to_camel

from ocigpu.core.errors import printable, quoted
from ocigpu.kubernetes.options import option_error, shown

MAX_BYTES = 1 << 20
"""As much as a ConfigMap may hold."""
MAX_VALUES = 100_000
"""Counted as often as aliases repeat them."""
MAX_SHOWN = 4
_BY_HAND = {"device_id_strategy": "deviceIDStrategy", "nvidia_ctk_path": "nvidiaCTKPath", "channel_ids": "channelIDs"}


class SchemaPart(BaseModel):
    """A mapping of the file: keys in camel case, nothing unknown, nothing converted; None for what is not given."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        alias_generator=lambda name: _BY_HAND.get(name) or to_camel(name).replace("Api", "API"),
    )


class PluginFlags(SchemaPart):
    """``flags.plugin``."""

    pass_device_specs: StrictBool | None = None
    device_list_strategy: Any = None
    device_id_strategy: StrictStr | None = None
    cdi_annotation_prefix: StrictStr | None = None
    nvidia_ctk_path: StrictStr | None = None
    container_driver_root: StrictStr | None = None
    shared_devices_allocation_policy: StrictStr | None = None


class GfdFlags(SchemaPart):
    """``flags.gfd``: node labels."""

    oneshot: StrictBool | None = None
    no_timestamp: StrictBool | None = None
    sleep_interval: Any = None
    output_file: StrictStr | None = None
    machine_type_file: StrictStr | None = None


class Flags(SchemaPart):
    """``flags``."""

    mig_strategy: StrictStr | None = None
    fail_on_init_error: StrictBool | None = None
    mps_root: StrictStr | None = None
    nvidia_driver_root: StrictStr | None = None
    nvidia_dev_root: StrictStr | None = None
    gdrcopy_enabled: StrictBool | None = None
    gds_enabled: StrictBool | None = None
    mofed_enabled: StrictBool | None = None
    use_node_feature_api: StrictBool | None = None
    device_discovery_strategy: StrictStr | None = None
    plugin: PluginFlags | None = None
    gfd: GfdFlags | None = None


class NamePattern(SchemaPart):
    """An entry of ``resources``: devices whose model or profile matches ``pattern`` are of resource ``name``."""

    pattern: StrictStr
    name: StrictStr


class Resources(SchemaPart):
    """``resources``."""

    gpus: list[NamePattern] | None = None
    mig: list[NamePattern] | None = None


class SharedResource(SchemaPart):
    """An entry of ``sharing.timeSlicing.resources`` or ``sharing.mps.resources``."""

    name: StrictStr | None = None
    rename: StrictStr | None = None
    devices: Any = None
    replicas: StrictInt | None = None


class SharingBlock(SchemaPart):
    """``sharing.timeSlicing`` or ``sharing.mps``."""

    rename_by_default: StrictBool = False
    fail_requests_greater_than_one: StrictBool | None = None
    resources: list[SharedResource] | None = None


class SharingPart(SchemaPart):
    """``sharing``."""

    time_slicing: SharingBlock | None = None
    mps: SharingBlock | None = None


class ImexPart(SchemaPart):
    """``imex``."""

    channel_ids: list[StrictInt] | None = None
    required: StrictBool | None = None


class ConfigFile(SchemaPart):
    """The whole file."""

    version: Literal["v1"] = "v1"
    flags: Flags = Flags()
    resources: Resources = Resources()
    sharing: SharingPart = SharingPart()
    imex: ImexPart = ImexPart()


def parse_config_file(text: str, where: str) -> tuple[ConfigFile, tuple[str, ...]]:
    """Return the file's content and warnings about top-level keys that mean nothing, a sentence each.

    An empty file is one without keys.  Raises SettingsError (OCIGPU-KUBE-1), which names every wrong key by its path:
    a key below a known one that is not known itself was meant to change something.
    """
    data = _parse(text, where)
    _check_size(data, where)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise option_error(where, "the document is not a mapping of keys")
    known = _keys(ConfigFile)
    foreign = [key for key in data if key not in known]
    warnings = tuple(f"{where}: unknown key {quoted(str(key))} ignored{_suggestion(str(key), '')}" for key in foreign)
    # null stands for a part that is not given
    kept = {key: value for key, value in data.items() if key in known and value is not None}
    try:
        return ConfigFile.model_validate(kept), warnings
    except ValidationError as error:
        problems = list(dict.fromkeys(_problem(details) for details in error.errors(include_url=False)))
    more = f"; and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
    raise option_error(where, "; ".join(problems[:MAX_SHOWN]) + more)


def _keys(model: type[SchemaPart]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


_MEMBERS: dict[str, type[SchemaPart]] = {
    "": ConfigFile,
    "flags": Flags,
    "flags.plugin": PluginFlags,
    "flags.gfd": GfdFlags,
    "resources": Resources,
    "resources.gpus[]": NamePattern,
    "resources.mig[]": NamePattern,
    "sharing": SharingPart,
    "sharing.timeSlicing": SharingBlock,
    "sharing.mps": SharingBlock,
    "sharing.timeSlicing.resources[]": SharedResource,
    "sharing.mps.resources[]": SharedResource,
    "imex": ImexPart,
}
"""What may stand where, for suggestions; [] stands for an entry of a list."""


def _problem(details: Any) -> str:
    *above, last = details["loc"]
    if details["type"] == "extra_forbidden":
        parent = _path(above)
        return f"{parent}: unknown key {quoted(str(last))}{_suggestion(str(last), parent)}"
    path = _path(details["loc"])
    if path == "version":
        return f"version: unknown version {shown(details['input'])}: only v1 is known"
    if details["type"] == "missing":
        return f"{path}: is missing"
    kinds = {"model_type": "a mapping", "list_type": "a list", "bool_type": "true or false", "int_type": "a number"}
    wanted = kinds.get(details["type"], "text")
    return f"{path}: {shown(details['input'])} is not {wanted}"


def _path(parts: Any) -> str:
    """Return a path as people write it: sharing.timeSlicing.resources[0].name."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")


def _suggestion(key: str, parent: str) -> str:
    """Return where a key belongs that is in the wrong part, or the key of this part that it resembles; "" for neither.

    Of several parts that is the one below this one, or else beside it.
    """
    here = re.sub(r"\[[0-9]+\]", "[]", parent)
    homes = [path for path, model in _MEMBERS.items() if key in _keys(model)]
    below = [path for path in homes if path.startswith(here)]
    best = (below or homes)[:1] if below or len(homes) == 1 else []
    if best:
        part, entries, _ = best[0].partition("[]")
        place = f"an entry of {part}" if entries else part or "the top"
        return f": it belongs into {place}" if part else f": it belongs to {place}"
    model = _MEMBERS.get(here)
    found = difflib.get_close_matches(key, _keys(model) if model else [], 1, 0.6)
    return f": did you mean {found[0]}?" if found else ""


def _check_size(data: Any, where: str) -> None:
    """Raise SettingsError for a document that aliases make larger than anybody could mean."""
    pending, count = [data], 0
    while pending:
        value = pending.pop()
        count += 1
        if count > MAX_VALUES:
            raise option_error(where, f"more than {MAX_VALUES} values")
        if isinstance(value, (list, dict)):
            pending.extend(value if isinstance(value, list) else value.values())


class _Loader(yaml.SafeLoader):
    """YAML without numbers of base 60 ("0:1" is a MIG device), dates, merged mappings, and keys that occur twice."""


_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0].rpartition(":")[2] in ("null", "bool")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][0-9]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$"), list("-+.0123456789")
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, "a key that is no text", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key} occurs twice", key_node.start_mark)
        seen[key] = loader.construct_object(value_node, deep=True)
    return seen


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key} occurs twice")
        found[key] = value
    return found


def _parse(text: str, where: str) -> Any:
    if len(text) > MAX_BYTES:
        raise option_error(where, f"more than {MAX_BYTES} characters")
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text, object_pairs_hook=_unique)
        except json.JSONDecodeError:
            pass  # YAML may begin like this too
        except (ValueError, RecursionError) as error:
            raise option_error(where, printable(str(error), 300)) from error
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a safe loader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1} column {mark.column + 1}: " if mark else ""
        raise option_error(where, f"not YAML: {place}{printable(error.problem or 'unreadable', 300)}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise option_error(where, f"not YAML: {printable(str(error), 300)}") from error
