"""Changes of single values in the text of a configuration file; every other byte of it stays.

Pure: texts in, texts out.  JSON is :mod:`~ocigpu.engines.json_text`, TOML :mod:`~ocigpu.engines.toml_text`: who only
looks up values loads neither.
"""

from ocigpu.core.errors import OcigpuError
from ocigpu.core.record import NamedTuple
from ocigpu.engines.places import is_json, parse_config

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType
    from typing import Any


class ValueChange(NamedTuple):
    """A value to set: ``keys`` from the outermost table in; with ``append`` an element to add to an array."""

    keys: tuple[str, ...]
    value: "Any"
    append: bool = False


class Applied(NamedTuple):
    """A change that was made, with the data to undo it.

    ``present``: the number of leading keys that led to an existing table; the tables below are ours.  ``before``: the
    former value, None for none; ``raw``: its text, "" for a TOML table.  ``header``: the table got a new header in
    TOML.
    """

    change: ValueChange
    present: int
    before: "Any"
    raw: str
    header: bool = False


def name_of(keys: "Sequence[str]") -> str:
    """Return keys as one reads them in TOML: plugins."io.containerd.grpc.v1.cri".containerd."""
    import tomlkit

    return tomlkit.key(list(keys)).as_string()


def look_up(data: "Any", keys: "Sequence[str]") -> "Any":
    """Return the value below a list of keys, None if it is missing."""
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def table_at(data: "Any", keys: "Sequence[str]") -> "dict[str, Any]":
    """Return the table below a list of keys, an empty one if it is missing.

    Raises OcigpuError OCIGPU-ENG-2 if another kind of value is at the keys or on the way.
    """
    for number, key in enumerate(keys, 1):
        data = data.get(key)
        if data is None:
            return {}
        if not isinstance(data, dict):
            raise OcigpuError("OCIGPU-ENG-2", f"{name_of(keys[:number])} is not a table")
    return dict(data)


def apply_changes(path: str, text: str, changes: "Sequence[ValueChange]") -> tuple[str, list[Applied]]:
    """Return the text of the file ``path`` with the changes, and the real changes; an existing value is not one.

    The result is parsed again: it contains the former content and the changes, nothing else.  Raises OcigpuError
    OCIGPU-ENG-1 when the text cannot be parsed, OCIGPU-ENG-2 when another value is in the place of a table.
    """
    from ocigpu.engines import template, toml_text

    if is_template(path):
        return template.put_block(path, text, {change.keys: change.value for change in changes}), [
            Applied(change, 0, None, "") for change in changes
        ]
    form = _form(path, text)
    applied = []
    for change in changes:
        data = parse_config(path, text)
        present = _present(path, data, change)
        before = look_up(data, change.keys)
        if _holds(before, change):
            continue
        raw = "" if before is None else form.raw(text, change.keys)
        value = [*(before or ()), change.value] if change.append else change.value
        old, text = text, form.put(text, change.keys, value)
        _verify(path, data, change.keys, value, text)
        table = change.keys[:-1]
        header = form is toml_text and toml_text.has_header(text, table) and not toml_text.has_header(old, table)
        applied.append(Applied(change, present, before, raw, header))
    return text, applied


def revert_changes(path: str, text: str, applied: "Sequence[Applied]") -> tuple[str, list[ValueChange]]:
    """Return the text without the changes, and the changes that stay because the value was modified since.

    A table of ours is removed completely, with additions of others.  A table whose values of ours were replaced is no
    longer ours.  Raises OcigpuError OCIGPU-ENG-1.
    """
    from ocigpu.engines import template, toml_text

    if is_template(path):
        return template.drop_block(text), []
    form = _form(path, text)
    left = []
    for change, present, before, raw, header in reversed(applied):
        keys = change.keys
        now = look_up(parse_config(path, text), keys)
        if not _holds(now, change):
            if now is not None:
                left.append(change)
            continue
        if change.append and (before is None or now != [*before, change.value]):
            value = list(now)
            value.remove(change.value)
            text = form.put(text, keys, value) if value or before is not None else form.drop(text, keys)
        elif before is None:
            text = form.drop(text, keys)
        else:
            text = form.put_raw(text, keys, raw) if raw else form.put(text, keys, before)
        for length in range(len(keys) - 1, present, -1):
            if look_up(parse_config(path, text), keys[:length]) == {}:
                text = form.drop(text, keys[:length])
        if header:
            text = toml_text.drop_header(text, keys[:-1])
    return text, left


def is_template(path: str) -> bool:
    """Whether a file is a template of k3s or RKE2, which is TOML only once they have filled it in."""
    return path.endswith(".tmpl")


def _form(path: str, text: str) -> "ModuleType":
    from ocigpu.engines import json_text, toml_text

    return json_text if is_json(path, text) else toml_text


def _present(path: str, data: "Any", change: ValueChange) -> int:
    """Return how many leading keys (not the last) lead to tables; raises OcigpuError for anything else there."""
    for number, key in enumerate(change.keys[:-1]):
        if key not in data:
            return number
        data = data[key]
        if not isinstance(data, dict):
            raise OcigpuError("OCIGPU-ENG-2", f"{path}: {name_of(change.keys[: number + 1])} is not a table")
    if change.keys[-1] not in data:
        return len(change.keys) - 1
    before = data[change.keys[-1]]
    if isinstance(before, list) and any(isinstance(element, dict) for element in before):
        raise OcigpuError("OCIGPU-ENG-2", f"{path}: {name_of(change.keys)} is an array of tables")
    if not isinstance(before, list if change.append else type(change.value)):
        kind = "an array" if isinstance(change.value, list) or change.append else type(change.value).__name__
        raise OcigpuError("OCIGPU-ENG-2", f"{path}: {name_of(change.keys)} is not {_KINDS.get(kind, kind)}")
    return len(change.keys) - 1


_KINDS = {"dict": "a table", "str": "a string", "bool": "true or false", "int": "a number"}


def _holds(value: "Any", change: ValueChange) -> bool:
    """Whether a value is what the change makes of it; a table may hold more."""
    if change.append:
        return isinstance(value, list) and change.value in value
    return _contains(value, change.value)


def _contains(value: "Any", wanted: "Any") -> bool:
    if isinstance(wanted, dict):
        return isinstance(value, dict) and all(key in value and _contains(value[key], wanted[key]) for key in wanted)
    return type(value) is type(wanted) and bool(value == wanted)


def _verify(path: str, data: "Any", keys: "Sequence[str]", value: "Any", text: str) -> None:
    """Raise OcigpuError unless the parsed text equals the data, with the value at its keys."""
    import copy

    wanted = copy.deepcopy(data)
    table = wanted
    for key in keys[:-1]:
        table = table.setdefault(key, {})
    table[keys[-1]] = value
    try:
        same = parse_config(path, text) == wanted
    except OcigpuError:
        same = False
    if not same:
        raise OcigpuError("OCIGPU-ENG-2", f"{path}: {name_of(keys)} cannot be set without changing other settings")
