"""What differs between two CDI specifications of the same devices, in plain words: pure."""

from collections.abc import Callable
from typing import Any, NamedTuple

from ocigpu.cdi.hook_words import HOOK_NAMES, SEPARATOR
from ocigpu.gpus.fingerprint import ANNOTATION as FINGERPRINT_ANNOTATION

Edits = dict[str, Any]
Entry = dict[str, Any]
Described = tuple[str, Entry]
HookPart = tuple[str, str, Entry]


COMMON = "every container"
"""Place of edits that a container gets with any device of the specification."""


class Difference(NamedTuple):
    """One difference: ``where`` ("specification", "every container", 'device "0"'), ``change`` and what it is about.

    ``change``: "+" only in the new one, "-" only in the old one, "~" in both but not alike.
    """

    where: str
    change: str
    what: str

    def describe(self) -> str:
        return f"{self.change} {self.where}: {self.what}"


def compare_specs(old: dict[str, Any], new: dict[str, Any]) -> tuple[Difference, ...]:
    """Return the changes that turn ``old`` into ``new``, in the order of a specification's fields.

    Both have canonical field names.  The fingerprint annotation is left out: it describes the origin of a
    specification, not what a container gets.  An empty field is the same as an absent one.
    """
    found = [
        Difference("specification", "~", f"{field} {old.get(field)} is now {new.get(field)}")
        for field in ("cdiVersion", "kind")
        if old.get(field) != new.get(field)
    ]
    found += _compare_annotations("specification", old, new)
    found += _compare_edits(COMMON, old.get("containerEdits") or {}, new.get("containerEdits") or {})
    old_devices = {device["name"]: device for device in old.get("devices", ())}
    new_devices = {device["name"]: device for device in new.get("devices", ())}
    for name, device in old_devices.items():
        where = f'device "{name}"'
        if name not in new_devices:
            found.append(Difference(where, "-", "the device"))
            continue
        found += _compare_annotations(where, device, new_devices[name])
        found += _compare_edits(
            where, device.get("containerEdits") or {}, new_devices[name].get("containerEdits") or {}
        )
    found += [Difference(f'device "{name}"', "+", "the device") for name in new_devices if name not in old_devices]
    return tuple(found)


def _compare_annotations(where: str, old: Entry, new: Entry) -> list[Difference]:
    before, after = (
        [pair for pair in sorted((side.get("annotations") or {}).items()) if pair[0] != FINGERPRINT_ANNOTATION]
        for side in (old, new)
    )
    return _compare_entries(where, before, after, lambda pair: (f"annotation {pair[0]}", {"value": pair[1]}))


def _compare_edits(where: str, old: Edits, new: Edits) -> list[Difference]:
    found: list[Difference] = []
    for field, describe in _DESCRIBERS:
        found += _compare_entries(where, _entries(old, field), _entries(new, field), describe)
    before, after = ([rdt] if rdt is not None else [] for rdt in (old.get("intelRdt"), new.get("intelRdt")))
    return found + _compare_entries(where, before, after, lambda rdt: ("intelRdt", rdt))


def _compare_entries(
    where: str, old: list[Any], new: list[Any], describe: Callable[[Any], Described]
) -> list[Difference]:
    """Return the differences of two lists whose entries ``describe`` names, with the fields beyond the name."""
    if old == new:
        return []
    before, after = _by_name(old, describe), _by_name(new, describe)
    found = []
    for key, fields in before.items():
        name = key[0]
        if key not in after:
            found.append(Difference(where, "-", _join(name, fields)))
        elif changes := _changed_fields(fields, after[key]):
            found.append(Difference(where, "~", f"{name}: {changes}"))
    found += [Difference(where, "+", _join(key[0], after[key])) for key in after if key not in before]
    if not found and list(before) != list(after):
        noun = describe(new[0])[0].split(" ")[0]
        found.append(Difference(where, "~", f"the order of the entries of kind {noun}"))
    return found


def _by_name(entries: list[Any], describe: Callable[[Any], Described]) -> dict[tuple[str, int], Entry]:
    """Return the fields of each entry by its name and a number that tells entries of the same name apart."""
    result: dict[tuple[str, int], Entry] = {}
    seen: dict[str, int] = {}
    for entry in entries:
        name, fields = describe(entry)
        seen[name] = seen.get(name, 0) + 1
        result[name, seen[name]] = {field: value for field, value in fields.items() if value not in _NOTHING}
    return result


def _changed_fields(old: Entry, new: Entry) -> str:
    changes = []
    for field in dict.fromkeys((*old, *new)):
        before, after = old.get(field), new.get(field)
        if before == after:
            continue
        if isinstance(before, list) and isinstance(after, list):
            changes.append(f"{field} {_changed_items(before, after)}")
        elif after is None:
            changes.append(f"{field} {_text(field, before)} is gone")
        elif before is None:
            changes.append(f"{field} {_text(field, after)} is new")
        else:
            changes.append(f"{field} {_text(field, before)} is now {_text(field, after)}")
    return "; ".join(changes)


def _changed_items(old: list[Any], new: list[Any]) -> str:
    gone, added = list(old), []
    for item in new:
        if item in gone:
            gone.remove(item)
        else:
            added.append(item)
    parts = [f"{word} {' '.join(map(str, items))}" for word, items in (("without", gone), ("with", added)) if items]
    return ", ".join(parts) or "in another order"


def edit_rows(edits: Edits) -> list[tuple[str, str]]:
    """Return (name, details) for each entry of containerEdits, in the order of a specification's fields.

    A hook has a row for its program and one for each option of each of its sub-commands.
    """
    rows = []
    for field, describe in _DESCRIBERS:
        if field == "hooks":
            rows += [_hook_row(part) for hook in edits.get(field) or () for part in _hook_parts(hook)]
        else:
            described = [describe(entry) for entry in edits.get(field) or ()]
            rows += [(name, _details(fields)) for name, fields in described]
    if edits.get("intelRdt") is not None:
        rows.append(("intelRdt", _details(edits["intelRdt"])))
    return rows


def _hook_row(part: HookPart) -> tuple[str, str]:
    """Return the row of a hook's program, or below it, indented, of one option."""
    name, text, fields = part
    if fields:
        return name, _details(fields)
    option, _, value = text.partition(" ")
    return f"  {name.split(' ')[2]} {option}".rstrip(), value


def _entries(edits: Edits, field: str) -> list[Any]:
    """Return the entries of a field; hooks are split into their parts."""
    entries = edits.get(field) or []
    return [part for hook in entries for part in _hook_parts(hook)] if field == "hooks" else entries


def _hook_parts(hook: Entry) -> list[HookPart]:
    """Return a hook's program, and each option of each of its sub-commands (one without options is a part too)."""
    stage = f"hook {hook['hookName']}"
    words = [str(word) for word in hook.get("args") or []]
    start = next((place for place, word in enumerate(words) if place and word in HOOK_NAMES), len(words))
    program = {**_without(hook, "hookName", "path"), "args": words[:start]}
    parts: list[HookPart] = [(f"{stage} {hook['path']}", "", program)]
    name, fresh = "", False
    for place in range(start, len(words)):
        word = words[place]
        if word == SEPARATOR:
            name = ""
        elif not name:
            name, fresh = f"{stage} {word}", True
            parts.append((name, "", {}))
        elif fresh:  # its first option takes the place of the bare sub-command
            parts[-1] = (name, word, {})
            fresh = False
        elif word.startswith("-") or not parts[-1][1].startswith("-") or _ends_option(parts[-1][1]):
            parts.append((name, word, {}))
        else:
            parts[-1] = (name, f"{parts[-1][1]} {word}", {})
    return parts


def _ends_option(text: str) -> bool:
    """Tell whether an option has its value already."""
    return " " in text or "=" in text


def _describe_variable(variable: str) -> Described:
    name, _, value = variable.partition("=")
    return f"variable {name}", {"value": value}


def _describe_hook(part: HookPart) -> Described:
    name, text, fields = part
    return f"{name} {text}".rstrip(), fields


_NOTHING: tuple[Any, ...] = ("", [], None)
"""What an absent field and an empty one have in common."""
_DESCRIBERS: tuple[tuple[str, Callable[[Any], Described]], ...] = (
    ("env", _describe_variable),
    ("deviceNodes", lambda node: (f"node {node['path']}", _without(node, "path"))),
    (
        "netDevices",
        lambda device: (f"network-device {device['hostInterfaceName']}", _without(device, "hostInterfaceName")),
    ),
    ("hooks", _describe_hook),
    ("mounts", lambda mount: (f"mount {mount['containerPath']}", _without(mount, "containerPath"))),
    ("additionalGids", lambda group: (f"group {group}", {})),
)


def _without(entry: Entry, *fields: str) -> Entry:
    return {name: value for name, value in entry.items() if name not in fields}


def _join(name: str, fields: Entry) -> str:
    details = _details(fields)
    return f"{name} ({details})" if details else name


def _details(fields: Entry) -> str:
    return ", ".join(f"{field} {_text(field, value)}" for field, value in fields.items() if value not in _NOTHING)


def _text(field: str, value: Any) -> str:
    if field == "fileMode":
        return f"{value:04o}"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
