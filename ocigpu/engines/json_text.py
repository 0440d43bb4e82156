"""Single members of a JSON text set and removed; indentation, order and all other bytes stay."""

import json
from collections.abc import Sequence
from json.decoder import scanstring  # type: ignore[attr-defined]  # in every CPython, documented by its use in json
from typing import Any, NamedTuple

_SPACE = " \t\r\n"


class _Member(NamedTuple):
    key: str
    start: int
    """Where the key begins."""
    value: int
    end: int
    """Where the value ends."""


class _Object(NamedTuple):
    start: int
    members: list[_Member]
    end: int
    """Behind the closing brace."""


def raw(text: str, keys: Sequence[str]) -> str:
    """Return the text of the existing value at ``keys``."""
    member = _find(text, keys)
    return text[member.value : member.end]


def put(text: str, keys: Sequence[str], value: Any) -> str:
    """Return the text with a value set at ``keys``, in objects that are made where they are missing."""
    depth, holder, rest = _reach(text, keys)
    for key in reversed(rest[1:]):
        value = {key: value}
    present = next((member for member in holder.members if member.key == rest[0]), None)
    unit, newline = _style(text)
    gap = ""
    if holder.members:
        before = text[: holder.members[-1].start]
        gap = before[len(before.rstrip(_SPACE)) :]
        if "\n" not in gap:
            unit, gap = None, gap or " "
    rendered = json.dumps(value, indent=unit, ensure_ascii=False)
    if unit is not None:
        rendered = rendered.replace("\n", newline + unit * (depth + 1))
    if present:
        return text[: present.value] + rendered + text[present.end :]
    pair = f"{json.dumps(rest[0], ensure_ascii=False)}: {rendered}"
    if holder.members:
        end = holder.members[-1].end
        return f"{text[:end]},{gap}{pair}{text[end:]}"
    if unit is not None:
        pair = f"{newline}{unit * (depth + 1)}{pair}{newline}{unit * depth}"
    content = f"{{{pair}}}"
    return text[: holder.start] + content + (text[holder.end :] if text.strip("\ufeff" + _SPACE) else newline)


def put_raw(text: str, keys: Sequence[str], value: str) -> str:
    """Return the text with the existing value at ``keys`` replaced by another's text."""
    member = _find(text, keys)
    return text[: member.value] + value + text[member.end :]


def drop(text: str, keys: Sequence[str]) -> str:
    """Return the text without the existing member at ``keys``."""
    _, holder, rest = _reach(text, keys)
    index = next(number for number, member in enumerate(holder.members) if member.key == rest[0])
    member = holder.members[index]
    if len(holder.members) == 1:
        return f"{text[: holder.start]}{{}}{text[holder.end :]}"
    if index + 1 < len(holder.members):
        return text[: member.start] + text[holder.members[index + 1].start :]
    return text[: holder.members[index - 1].end] + text[member.end :]


def _find(text: str, keys: Sequence[str]) -> _Member:
    _, holder, rest = _reach(text, keys)
    return next(member for member in holder.members if member.key == rest[0])


def _reach(text: str, keys: Sequence[str]) -> tuple[int, _Object, Sequence[str]]:
    """Return the innermost existing object on the way, its depth, and the remaining keys (at least one)."""
    start = len(text) - len(text.lstrip("\ufeff" + _SPACE))
    if start == len(text):  # an empty file
        return 0, _Object(start, [], start), keys
    holder = _scan(text, start)
    for depth, key in enumerate(keys[:-1]):
        member = next((member for member in holder.members if member.key == key), None)
        if member is None:
            return depth, holder, keys[depth:]
        holder = _scan(text, member.value)
    return len(keys) - 1, holder, keys[-1:]


def _scan(text: str, start: int) -> _Object:
    """Return the object that begins at ``start`` of a text that is JSON."""
    decoder = json.JSONDecoder()
    members = []
    position = _skip(text, start + 1)
    while text[position] != "}":
        key, after = scanstring(text, position + 1)
        value = _skip(text, _skip(text, after) + 1)
        _, end = decoder.raw_decode(text, value)
        members.append(_Member(key, position, value, end))
        position = _skip(text, end)
        if text[position] == ",":
            position = _skip(text, position + 1)
    return _Object(start, members, position + 1)


def _skip(text: str, position: int) -> int:
    while text[position] in _SPACE:
        position += 1
    return position


def _style(text: str) -> tuple[str | None, str]:
    """Return the indentation of one level, None for a text on one line, and the line end."""
    newline = "\r\n" if "\r\n" in text else "\n"
    body = text.strip("\ufeff" + _SPACE)
    if not body or body == "{}":
        return "    ", newline
    first = body[1 : len(body) - len(body[1:].lstrip(_SPACE))]
    if "\n" not in first:
        return None, newline
    return first.rpartition("\n")[2] or "  ", newline
