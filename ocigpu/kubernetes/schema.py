"""The device plugin's configuration file: YAML or JSON in the schema of NVIDIA's device plugin, version v1.

Only shape is checked here: types and names of keys.  What values mean is :mod:`ocigpu.kubernetes.config`.
"""

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ocigpu.cdi.yaml_child import RefusedError, build
from ocigpu.core import rawjson
from ocigpu.core.errors import printable, quoted
from ocigpu.kubernetes.options import option_error, read_table, shown

MAX_BYTES = 1 << 20
"""As much as a ConfigMap may hold."""
MAX_SHOWN = 4
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
    """Return the file's content and warnings about top-level keys that mean nothing, a sentence each.

    An empty file is one without keys, null stands for a value that is not given.  Raises SettingsError
    (OCIGPU-KUBE-1), which names every wrong key by its path: a key below a known one that is not known itself was meant
    to change something.
    """
    data = _parse(text, where)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise option_error(where, "the document is not a mapping of keys")
    foreign = [key for key in data if key not in SHAPE]
    warnings = tuple(f"{where}: unknown key {quoted(str(key))} ignored{_suggestion(str(key), '')}" for key in foreign)
    kept = {key: value for key, value in data.items() if key in SHAPE}
    problems = list(dict.fromkeys(_problems(kept, SHAPE, "")))
    version = kept.get("version")
    if version not in (None, "v1"):
        problems.insert(0, f"version: unknown version {shown(version)}: only v1 is known")
    if not problems:
        return kept, warnings
    more = f"; and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
    raise option_error(where, "; ".join(problems[:MAX_SHOWN]) + more)


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

    Of several parts that is the one below this one, or else beside it.
    """
    here = re.sub(r"\[[0-9]+\]", "[]", parent)
    homes = [path for path, members in _MEMBERS.items() if key in members]
    below = [path for path in homes if path.startswith(here)]
    best = (below or homes)[:1] if below or len(homes) == 1 else []
    if best:
        part, entries, _ = best[0].partition("[]")
        place = f"an entry of {part}" if entries else part or "the top"
        return f": it belongs into {place}" if part else f": it belongs to {place}"
    found = difflib.get_close_matches(key, _MEMBERS.get(here, {}), 1, 0.6)
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
