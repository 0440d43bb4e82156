"""The only editor of config.json: it applies the edits of all modes, and removes an earlier edit of ours.  Pure.

Unknown fields survive and order stays.  A configuration is changed as a whole or not at all, and editing twice equals
editing once.
"""

import os
from binascii import crc32

from ocigpu.core import rawjson
from ocigpu.core.config_json import (
    CDI_DEVICES,
    DECLARED,
    HOOK_ENVIRONMENT,
    OUR_HOOK,
    VENDOR_HOOKS,
    clean_path,
    find,
    get_list,
    get_object,
    get_rules,
)
from ocigpu.core.errors import SpecError
from ocigpu.core.record import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any, TypeAlias

    from ocigpu.core.actions import Plan

    Entry: TypeAlias = dict[str, Any]
    Key: TypeAlias = tuple[int | str, ...]

RULE_FIELDS = ["allow", "type", "major", "minor", "access"]
BIND_OPTIONS = ("rbind", "rprivate")
NODE_OPTIONS = ("bind", "rprivate", "nosuid", "noexec")
OWN_OPTIONS = (
    [*BIND_OPTIONS, "ro", "nosuid", "nodev"],
    [*BIND_OPTIONS, "nosuid", "nodev", "noexec"],
    list(NODE_OPTIONS),
)
"""Options of all mounts that are declared: of files, of sockets, of nodes."""
PROC_DRIVER = "/proc/driver/nvidia"
SIMULATED_PROC = """\
while IFS= read -r line || [ "$line" ]; do state=$state$line line=; done
state=${state#*'"pid"'} state=${state#*:} state=${state# } pid=${state%%[!0-9]*}
exec nsenter --target "$pid" --mount mount -o bind,ro,nosuid,nodev,noexec "$1" "$2"
"""
"""Only hooks of simulated hosts do this: a real procfs contains the tree of the kernel module."""
GPU_STAGES = ("prestart", "createRuntime")
"""Stages of hooks that give GPUs: the same one by its older and its newer name."""
_NONE: "Entry" = {}


class ConfigEdit(NamedTuple):
    """What is to be put into a config.json, in any mode; entries are those of the runtime-spec.

    ``env``: NAME=value.  ``nodes``: of linux.devices, by path; None for a path whose entry goes because a mount takes
    its place.  ``rules``: of linux.resources.devices, to come last, so that no earlier rule overrides them.
    ``in_order``: a mount replaces those of its destination, and all are sorted from the root down, as the CDI library
    does.  ``hooks``: pairs of (stage, entry).  ``groups``: by the ids that they have in the container.  ``noted``:
    which of these (named as in ``_KEYS``) an annotation records, so that :func:`take_back` finds them.  ``devices``:
    names of CDI devices, for an annotation of their own.
    """

    env: "Sequence[str]" = ()
    nodes: "Mapping[str, Entry | None]" = _NONE
    rules: "Sequence[Entry]" = ()
    net_devices: "Entry" = _NONE
    mounts: "Sequence[Entry]" = ()
    in_order: bool = False
    masked: "Sequence[str]" = ()
    read_only: "Sequence[str]" = ()
    hooks: "Sequence[tuple[str, Entry]]" = ()
    rdt: "Entry | None" = None
    groups: "Sequence[int]" = ()
    noted: "Sequence[str]" = ()
    devices: "Sequence[str]" = ()


def put(config: "Entry", edit: ConfigEdit) -> None:
    """Apply the edit to ``config`` in place; hooks that provided GPUs before are removed.

    Rules of an earlier edit in mode hook for the same drivers are removed too.  Raises SpecError OCIGPU-SPEC-3, with
    ``config`` unchanged, for parts of another type than the specification's.
    """
    draft = dict(config)
    edited_before = remove_gpu_hooks(draft)
    if edit.env:
        _put_variables(_own(draft, "process.env"), edit.env)
    if edit.nodes:
        _replace(draft, "linux.devices", "path", edit.nodes)
    if edit.rules:
        _put_rules(_own(draft, "linux.resources.devices"), edit.rules, edited_before)
    if edit.net_devices:
        _own(draft, "linux.netDevices", dict).update(edit.net_devices)
    if edit.mounts and edit.in_order:
        _replace(draft, "mounts", "destination", {mount["destination"]: mount for mount in edit.mounts})
        draft["mounts"].sort(key=_depth)
    elif edit.mounts:
        _own(draft, "mounts").extend(edit.mounts)
    new: "dict[str, Sequence[Any]]" = {"devices": [*filter(None, edit.nodes.values())], "rules": edit.rules}
    new["mounts"] = edit.mounts
    for kind, path, values in (
        ("maskedPaths", "linux.maskedPaths", edit.masked),
        ("readonlyPaths", "linux.readonlyPaths", edit.read_only),
        ("groups", "process.user.additionalGids", edit.groups),
    ):
        if values:
            new[kind] = _add_missing(_own(draft, path), values)
    for stage in dict.fromkeys(stage for stage, _ in edit.hooks):
        _add_hooks(_own(draft, f"hooks.{stage}"), [entry for other, entry in edit.hooks if other == stage])
    if edit.rdt is not None:
        _own(draft, "linux", dict)["intelRdt"] = edit.rdt
    keys = [(kind, _KEYS[kind](entry)) for kind in edit.noted for entry in new.get(kind, ())]
    words = [entry_digest(kind, key) for kind, key in keys if key]
    if words or "devices" in edit.noted:
        _own(draft, "annotations", dict)[DECLARED] = " ".join(words)
    if edit.devices:
        _own(draft, "annotations", dict)[CDI_DEVICES] = ",".join(edit.devices)
    config.clear()
    config.update(draft)


def _own(draft: "Entry", path: str, kind: type = list) -> "Any":
    """Replace the value at a path by a copy, so that the original stays unchanged; return the copy, or an empty one."""
    names = path.split(".")
    for depth, name in enumerate(names, 1):
        of = kind if depth == len(names) else dict
        draft[name] = of(find(draft, name, of, ".".join(names[:depth])))
        draft = draft[name]
    return draft


def _put_variables(env: "list[Any]", entries: "Sequence[str]") -> None:
    """Replace variables in place, every one of a name that occurs several times, and append new ones."""
    positions: dict[str, list[int]] = {}
    for position, entry in enumerate(env):
        if isinstance(entry, str):
            positions.setdefault(entry.partition("=")[0], []).append(position)
    for entry in entries:
        name = entry.partition("=")[0]
        for position in positions.get(name, ()):
            env[position] = entry
        if name not in positions:
            positions[name] = [len(env)]
            env.append(entry)


def _replace(draft: "Entry", path: str, key: str, entries: "Mapping[str, Entry | None]") -> None:
    """Remove the entries of a list whose ``key`` equals a new one's, and append the new ones that are not None."""
    present = _own(draft, path)
    for position, entry in enumerate(present):
        if not isinstance(entry, dict):
            raise SpecError("OCIGPU-SPEC-3", f"config.json: {path}[{position}] is not an object")
        if not isinstance(entry.get(key), str):
            raise SpecError("OCIGPU-SPEC-3", f"config.json: {path}[{position}].{key} is not a text")
    present[:] = [entry for entry in present if entry[key] not in entries]
    present.extend(filter(None, entries.values()))


def _depth(mount: "Entry") -> int:
    """Return how many slashes a mount's cleaned path has."""
    path: str = mount["destination"]
    return (clean_path(path) if path.startswith("/") else os.path.normpath(path)).count("/")


def _put_rules(present: "list[Any]", rules: "Sequence[Entry]", edited_before: bool) -> None:
    """Put rules at the end of a list, each of them once.

    After an earlier edit, rules of our form for the same drivers are its rules, and are removed.  Without an earlier
    edit they belong to others: their fields are reordered, so that the next edit does not take them for ours.
    """
    wanted = {_rule(entry): entry for entry in rules}
    majors = {entry["major"] for entry in rules}
    kept = []
    for entry in present:
        ours = is_own_rule(entry) and entry["major"] in majors
        if _rule(entry) in wanted or (ours and edited_before):
            continue
        kept.append({name: entry[name] for name in (*RULE_FIELDS[1:], "allow")} if ours else entry)
    present[:] = [*kept, *wanted.values()]


def take_back_rules(config: "Entry", rules: "Sequence[Entry]") -> None:
    """Remove the rules of an edit in mode hook from ``config``: those of our form for the drivers of ``rules``."""
    majors = {entry["major"] for entry in rules}
    present = get_rules(config)
    present[:] = [entry for entry in present if not (is_own_rule(entry) and entry["major"] in majors)]


def _rule(entry: "Any") -> "tuple[Any, ...]":
    """Return a key that equal rules share, whatever the order of their fields; () for a rule with other fields."""
    if not isinstance(entry, dict) or entry.keys() != set(RULE_FIELDS):
        return ()
    values = tuple(entry[name] for name in RULE_FIELDS)
    return values if all(isinstance(value, (bool, int, str)) for value in values) else ()


def is_own_rule(entry: "Any") -> bool:
    """Tell whether a device rule has the form that edits for plans write."""
    if not isinstance(entry, dict) or list(entry) != RULE_FIELDS:
        return False
    plain = entry["allow"] is True and type(entry["major"]) is int
    return plain and (entry["type"], entry["access"]) == ("c", "rw")


def _add_missing(present: "list[Any]", values: "Sequence[Any]") -> "list[Any]":
    """Append the values that a list lacks; return these."""
    known = {value for value in present if isinstance(value, (int, str))}
    new = [value for value in dict.fromkeys(values) if value not in known]
    present += new
    return new


def _add_hooks(present: "list[Any]", entries: "Iterable[Entry]") -> None:
    """Append hooks, except those of which the list contains an equal one, whatever the order of its fields."""
    seen = {repr(sorted(entry.items())) for entry in present if isinstance(entry, dict)}
    for entry in entries:
        text = repr(sorted(entry.items()))
        if text not in seen:
            seen.add(text)
            present.append(entry)


def rule_entries(plan: "Plan") -> "list[Entry]":
    """Return the entries of linux.resources.devices for the plan's device rules."""
    return [
        {"allow": True, "type": "c", "major": rule.major, "minor": rule.minor, "access": rule.access}
        for rule in plan.device_rules()
    ]


def fitting_groups(config: "Entry", gids: "Sequence[int]") -> "tuple[Sequence[int], tuple[str, ...]]":
    """Return the ids by which the container's process can join groups of the host, and notes on the others."""
    if not gids or not find(config, "process", dict, "process"):  # without a process, no user opens anything
        return (), ()
    from ocigpu.system.groups import fit_groups  # on most hosts all users may open the nodes

    return fit_groups(config, gids)


def edit_config(
    config: "Entry",
    rules: "Sequence[Entry]",
    hook_path: str,
    hook_options: list[str],
    declare_rules: bool = True,
    groups: "Sequence[int]" = (),
) -> tuple[str, ...]:
    """Change ``config`` in place so that the container gets its GPUs from a prestart hook; return notes on groups.

    ``rules``: of :func:`rule_entries`.  ``hook_options``: options of ocigpu-hook before its command.
    ``declare_rules``: also put the rules into linux.resources.devices, so that the runtime owns the device policy (not
    for rootless containers, which have none).  A container without any device rule gets none: crun applies no device
    policy then, and a first rule would create one that denies other devices.  If the runtime has a policy nevertheless,
    the hook widens it.  ``groups``: of the host, of device nodes.  Raises as :func:`put`.
    """
    hook = {"path": hook_path, "args": [OUR_HOOK, *hook_options, "prestart"], "env": list(HOOK_ENVIRONMENT)}
    resources = find(find(config, "linux", dict, "linux"), "resources", dict, "linux.resources")
    if not declare_rules or not find(resources, "devices", list, "linux.resources.devices"):
        rules = ()
    fitting, notes = fitting_groups(config, groups)
    put(config, ConfigEdit(rules=rules, hooks=[("prestart", hook)], groups=fitting, noted=("groups",)))
    return notes


def remove_gpu_hooks(config: "Entry") -> bool:
    """Remove the hooks that provide GPUs, ours and the vendor's, from ``config``; returns whether ours was among them.

    CDI hooks belong to others.
    """
    edited_before = False
    for stage in GPU_STAGES:
        entries = get_list(get_object(config, "hooks"), stage)
        edited_before = edited_before or any(map(_is_our_hook, entries))
        left = [entry for entry in entries if not _is_gpu_hook(entry)]
        if len(left) < len(entries):
            config["hooks"] = {**config["hooks"], stage: left}
    return edited_before


def has_gpu_hook(config: "Entry") -> bool:
    """Tell whether a hook, ours or the vendor's, provides the container's GPUs: see :func:`remove_gpu_hooks`."""
    hooks = get_object(config, "hooks")
    return any(_is_gpu_hook(entry) for stage in GPU_STAGES for entry in get_list(hooks, stage))


def _is_gpu_hook(entry: "Any") -> bool:
    return _is_our_hook(entry) or _program(entry) in VENDOR_HOOKS


def _is_our_hook(entry: "Any") -> bool:
    """Tell whether a hook is ours, also by its argv[0]: hook.path of the settings may give the program any name."""
    program = _program(entry)
    return program == OUR_HOOK or (program != "" and get_list(entry, "args")[:1] == [OUR_HOOK])


def _program(entry: "Any") -> str:
    path = entry.get("path") if isinstance(entry, dict) else None
    return os.path.basename(path) if isinstance(path, str) else ""


# undoing an earlier edit


def take_back(config: "Entry") -> None:
    """Remove what an earlier edit has put into ``config``, as its annotation says; what cannot be removed stays.

    Any user who can set annotations may have written the annotation.  So only entries are removed whose form only our
    edits have, and none that restrict the container: above all, no path that an engine hides becomes visible.  Replaced
    values are not restored: an engine writes a new configuration for another container.
    """
    annotations = get_object(config, "annotations")
    annotations.pop(CDI_DEVICES, None)
    text = annotations.pop(DECLARED, None)
    left: dict[str, int] = {}
    for word in text.split() if isinstance(text, str) else ():
        left[word] = left.get(word, 0) + 1
    linux = get_object(config, "linux")
    user = get_object(get_object(config, "process"), "user")
    for kind, entries in (
        ("devices", get_list(linux, "devices")),
        ("rules", get_rules(config)),
        ("mounts", get_list(config, "mounts")),
        ("maskedPaths", get_list(linux, "maskedPaths")),
        ("readonlyPaths", get_list(linux, "readonlyPaths")),
        ("groups", get_list(user, "additionalGids")),
    ):
        _remove(entries, kind, left)
    hooks = get_list(get_object(config, "hooks"), "prestart")
    hooks[:] = [entry for entry in hooks if SIMULATED_PROC not in get_list(entry, "args")]


def _remove(entries: "list[Any]", kind: str, left: "dict[str, int]") -> None:
    """Remove one entry for each digest in ``left``, the last one with it: ours come after others.

    Time grows with the lengths of both lists, not with their product: different users may control the two lists.
    """
    kept = []
    for entry in reversed(entries):
        key = _KEYS[kind](entry) if left else ()
        digest = entry_digest(kind, key) if key else ""
        if left.get(digest):
            left[digest] -= 1
        else:
            kept.append(entry)
    entries[:] = reversed(kept)


def entry_digest(kind: str, key: "Key") -> str:
    """Return the annotation's text for an entry of a list; it is short, because every hook receives all annotations."""
    return f"{crc32(rawjson.dump([kind, *key]).encode()):08x}"


def _key(*values: "Any") -> "Key":
    """Return the key of an entry, () for one that cannot be ours."""
    return values if all(type(value) in (int, str) for value in values) else ()


def _node_key(entry: "Any") -> "Key":
    return _key(entry.get("path")) if isinstance(entry, dict) else ()


def _rule_key(entry: "Any") -> "Key":
    return _key(entry["major"], entry["minor"]) if is_own_rule(entry) else ()


def _mount_key(entry: "Any") -> "Key":
    ours = isinstance(entry, dict) and entry.get("type") == "bind" and entry.get("options") in OWN_OPTIONS
    return _key(entry.get("destination"), entry.get("source")) if ours else ()


def _path_key(entry: "Any") -> "Key":
    return (entry,) if isinstance(entry, str) and f"{entry}/".startswith(f"{PROC_DRIVER}/") else ()


_KEYS: "dict[str, Callable[[Any], Key]]" = {
    "devices": _node_key,
    "rules": _rule_key,
    "mounts": _mount_key,
    "maskedPaths": _path_key,
    "readonlyPaths": _path_key,
    "groups": _key,
}
