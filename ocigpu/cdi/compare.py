"""What differs between two CDI specifications of the same devices, in plain words: pure."""

from ocigpu.host.fingerprint import ANNOTATION as FINGERPRINT_ANNOTATION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NamedTuple

    Edits = dict[str, Any]
    Entry = dict[str, Any]
    Described = tuple[str, str]
else:
    from ocigpu.record import NamedTuple


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


def compare_specs(old: "dict[str, Any]", new: "dict[str, Any]") -> tuple[Difference, ...]:
    """Return what has to change in ``old`` to become ``new``, in the order of a specification's fields.

    Both have canonical field names.  The fingerprint annotation is left out: it says where a specification comes from,
    not what a container gets.  An empty field is the same as an absent one.
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


def _compare_annotations(where: str, old: "Entry", new: "Entry") -> list[Difference]:
    before, after = (
        [pair for pair in (side.get("annotations") or {}).items() if pair[0] != FINGERPRINT_ANNOTATION]
        for side in (old, new)
    )
    if dict(before) == dict(after):  # annotations have no order
        return []
    return _compare_entries(where, before, after, lambda pair: (f"annotation {pair[0]}", pair[1]))


def _compare_edits(where: str, old: "Edits", new: "Edits") -> list[Difference]:
    found: list[Difference] = []
    for field, describe in _DESCRIBERS:
        found += _compare_entries(where, old.get(field) or [], new.get(field) or [], describe)
    before, after = ([rdt] if rdt is not None else [] for rdt in (old.get("intelRdt"), new.get("intelRdt")))
    return found + _compare_entries(where, before, after, lambda rdt: ("intelRdt", _fields(rdt)))


def _compare_entries(
    where: str, old: "list[Any]", new: "list[Any]", describe: "Callable[[Any], Described]"
) -> list[Difference]:
    """Return the differences of two lists whose entries ``describe`` names, and then describes beyond the name."""
    if old == new:
        return []
    before, after = _by_name(old, describe), _by_name(new, describe)
    found = []
    for key, details in before.items():
        name = key[0]
        if key not in after:
            found.append(Difference(where, "-", _join(name, details)))
        elif details != after[key]:
            found.append(Difference(where, "~", f"{_join(name, details)} is now {after[key] or 'without it'}"))
    found += [Difference(where, "+", _join(key[0], after[key])) for key in after if key not in before]
    if not found and list(before) != list(after):
        noun = describe(new[0])[0].split(" ")[0]
        found.append(Difference(where, "~", f"the order of the entries of kind {noun}"))
    return found


def _by_name(entries: "list[Any]", describe: "Callable[[Any], Described]") -> "dict[tuple[str, int], str]":
    """Return the details of each entry by its name and a number that tells entries of the same name apart."""
    result: dict[tuple[str, int], str] = {}
    seen: dict[str, int] = {}
    for entry in entries:
        name, details = describe(entry)
        seen[name] = seen.get(name, 0) + 1
        result[name, seen[name]] = details
    return result


def _join(name: str, details: str) -> str:
    return f"{name} ({details})" if details else name


def edit_rows(edits: "Edits") -> list[tuple[str, str]]:
    """Return (name, details) for each entry of containerEdits, in the order of a specification's fields."""
    rows = [describe(entry) for field, describe in _DESCRIBERS for entry in edits.get(field) or ()]
    if edits.get("intelRdt") is not None:
        rows.append(("intelRdt", _fields(edits["intelRdt"])))
    return rows


def _describe_variable(variable: str) -> "Described":
    name, _, value = variable.partition("=")
    return f"variable {name}", f"={value}"


def _describe_node(node: "Entry") -> "Described":
    return f"node {node['path']}", _fields(node, "path")


def _describe_net_device(device: "Entry") -> "Described":
    return f"network-device {device['hostInterfaceName']}", _fields(device, "hostInterfaceName")


def _describe_hook(hook: "Entry") -> "Described":
    return f"hook {hook['hookName']} {_hook_action(hook)}", _fields(hook, "hookName")


def _hook_action(hook: "Entry") -> str:
    """Return what tells a hook apart from others of its stage: the sub-command if it has one, else its program."""
    words = [argument for argument in (hook.get("args") or [])[1:] if argument != "hook"]
    if words and not words[0].startswith(("-", "/")):
        return str(words[0])
    return str(hook["path"])


def _describe_mount(mount: "Entry") -> "Described":
    return f"mount {mount['containerPath']}", _fields(mount, "containerPath")


def _describe_group(group: int) -> "Described":
    return f"group {group}", ""


_DESCRIBERS: "tuple[tuple[str, Callable[[Any], Described]], ...]" = (
    ("env", _describe_variable),
    ("deviceNodes", _describe_node),
    ("netDevices", _describe_net_device),
    ("hooks", _describe_hook),
    ("mounts", _describe_mount),
    ("additionalGids", _describe_group),
)


def _fields(entry: "Entry", *leave_out: str) -> str:
    """Return the fields of an entry that say something, as "name value" pairs in the order of their names."""
    parts = []
    for field in sorted(entry):
        value = entry[field]
        if field in leave_out or value in ("", [], None):
            continue
        if field == "fileMode":
            value = f"{value:04o}"
        parts.append(f"{field} {' '.join(map(str, value)) if isinstance(value, list) else value}")
    return ", ".join(parts)
