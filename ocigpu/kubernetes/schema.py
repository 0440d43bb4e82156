"""The device plugin's configuration file: YAML or JSON in the schema of NVIDIA's device plugin, version v1.

Only shape is checked here: types and names of keys.  What values mean is :mod:`ocigpu.kubernetes.config`.
"""

import difflib
import json
import re
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from pydantic import BaseModel, ConfigDict, StrictBool, StrictInt, StrictStr, ValidationError, create_model
from pydantic.alias_generators import to_camel

from ocigpu.cdi.yaml_child import RefusedError, build
from ocigpu.core import rawjson
from ocigpu.core.errors import printable, quoted
from ocigpu.kubernetes.options import option_error, read_table, shown

MAX_BYTES = 1 << 20
"""As much as a ConfigMap may hold."""
MAX_SHOWN = 4
TABLE = Path(__file__).with_name("options.toml")


class SchemaPart(BaseModel):
    """A mapping of the file: keys in camel case, nothing unknown, nothing converted; None for what is not given."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        alias_generator=lambda name: to_camel(name) if "_" in name else name,
    )


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


class ConfigFile(SchemaPart):
    """The whole file; what :data:`FILE` validates also has ``flags`` and ``imex``."""

    version: Literal["v1"] = "v1"
    resources: Resources = Resources()
    sharing: SharingPart = SharingPart()


_MEMBERS: dict[str, type[SchemaPart]] = {
    "resources": Resources,
    "resources.gpus[]": NamePattern,
    "resources.mig[]": NamePattern,
    "sharing": SharingPart,
    "sharing.timeSlicing": SharingBlock,
    "sharing.mps": SharingBlock,
    "sharing.timeSlicing.resources[]": SharedResource,
    "sharing.mps.resources[]": SharedResource,
}
"""What may stand where, for suggestions; [] stands for an entry of a list."""
_KINDS: dict[str, Any] = {"bool": StrictBool, "text": StrictStr, "path": StrictStr, "numbers": list[StrictInt]}


def _part_of_options(path: str) -> Any:
    """Return the field of a part whose keys are those of the table of options."""
    fields: dict[str, Any] = {}
    for option in read_table(TABLE, {}):
        if option.key.startswith(f"{path}."):
            name, inner, _ = option.key.removeprefix(f"{path}.").partition(".")
            fields[name] = (_KINDS.get(option.kind, Any) | None, None)
            if inner:
                fields[name] = (_part_of_options(f"{path}.{name}")[0] | None, None)
    _MEMBERS[path] = model = create_model(path, __base__=SchemaPart, **fields)
    return model, model()


FILE = create_model("FILE", __base__=ConfigFile, flags=_part_of_options("flags"), imex=_part_of_options("imex"))
_MEMBERS[""] = FILE


def parse_config_file(text: str, where: str) -> tuple[ConfigFile, tuple[str, ...]]:
    """Return the file's content and warnings about top-level keys that mean nothing, a sentence each.

    An empty file is one without keys.  Raises SettingsError (OCIGPU-KUBE-1), which names every wrong key by its path:
    a key below a known one that is not known itself was meant to change something.
    """
    data = _parse(text, where)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise option_error(where, "the document is not a mapping of keys")
    known = _keys(FILE)
    foreign = [key for key in data if key not in known]
    warnings = tuple(f"{where}: unknown key {quoted(str(key))} ignored{_suggestion(str(key), '')}" for key in foreign)
    # null stands for a part that is not given
    kept = {key: value for key, value in data.items() if key in known and value is not None}
    try:
        return FILE.model_validate(kept), warnings
    except ValidationError as error:
        problems = list(dict.fromkeys(_problem(details) for details in error.errors(include_url=False)))
    more = f"; and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
    raise option_error(where, "; ".join(problems[:MAX_SHOWN]) + more)


def _keys(model: type[SchemaPart]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


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
    except (RefusedError, yaml.YAMLError, MemoryError) as error:
        if isinstance(error, yaml.MarkedYAMLError):
            error = RefusedError(error.problem_mark, error.problem or "unreadable")
        raise option_error(where, f"not YAML: {printable(str(error), 300)}") from error
