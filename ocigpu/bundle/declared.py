"""What mode ``spec`` says in a config.json: found to be enough or not, put there, and taken back.  Pure.

Kept apart from what makes it of a plan (:mod:`ocigpu.bundle.from_plan`), because most starts find it made already.
"""

import os
from binascii import crc32

from ocigpu.bundle.edit import add_rules
from ocigpu.core import rawjson
from ocigpu.core.config_json import (
    DECLARED,
    HOOK_ENVIRONMENT,
    find,
    get_list,
    get_object,
    get_rules,
    has_user_namespace,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NamedTuple, TypeAlias

    Key: TypeAlias = tuple[int | str, ...]
else:
    from ocigpu.core.record import NamedTuple

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
"""What the hook of simulated hosts does, and no other host's: a real procfs has the tree of the kernel module."""
LD_CACHE = "/etc/ld.so.cache"
RULE_FIELDS = ["allow", "type", "major", "minor", "access"]


class Declared(NamedTuple):
    """What a config.json says of a plan, and what it cannot; plain enough to be kept as JSON.

    ``nodes``: (container path, host path or "", major, minor, mode, uid, gid); ``rules``: entries of
    linux.resources.devices; ``mounts``: entries of mounts, ``optional``: those of their sources that may be missing.
    ``masked``, ``read_only``: paths.  ``simulated_proc``: what a simulated host shows as /proc/driver, or "".
    ``links``: (container path, target) of links in the root file system.  ``libraries``: (name, container path, bits)
    of what its loader must find, most important first; ``views``: (container path, files, links) of small read-only
    directories, a file being (name, mode, content), a link (name, target).
    ``denied``: (major, minor) of the host's GPUs that are not granted.  ``needs_hook``: why all this is not enough.
    ``granted``: names for the log; ``notes``: the plan's.  ``groups``: those of the host that its process is to be in.
    """

    nodes: "Sequence[tuple[str, str, int, int, int, int, int]]"
    rules: "Sequence[dict[str, Any]]"
    mounts: "Sequence[dict[str, Any]]"
    optional: "Sequence[str]"
    masked: "Sequence[str]"
    read_only: "Sequence[str]"
    simulated_proc: str
    links: "Sequence[tuple[str, str]]"
    libraries: "Sequence[tuple[str, str, int]]"
    views: "Sequence[tuple[str, Sequence[tuple[str, int, str]], Sequence[tuple[str, str]]]]"
    denied: "Sequence[tuple[int, int]]"
    needs_hook: str
    granted: "Sequence[str]"
    notes: "Sequence[str]"
    groups: "Sequence[int]" = ()


def why_hook(
    declared: Declared,
    config: "dict[str, Any]",
    resolve: "Callable[[str], str]",
    declare_rules: bool,
    bind_nodes: bool,
) -> str:
    """Return why this container needs the hook, "" when its config.json can say all.

    ``resolve`` tells where a path of the container's root leads, links followed; the rest as for edit_declared.
    """
    if declared.needs_hook:
        return declared.needs_hook
    if declare_rules and not get_rules(config):
        return "its config.json has no device rules, and with some runtimes a first one would take devices away"
    missing = [path for path, host_path, *_ in declared.nodes if bind_nodes and not host_path]
    if missing:
        return f"the host has no {missing[0]} to mount"
    if declared.views and has_user_namespace(config):
        return "in its user namespace the directory with files for graphics could not be read"
    can_make_nodes = not bind_nodes and _has_mknod(config)  # in user namespaces nobody can
    if declared.denied and can_make_nodes and any(_is_allowed(config, *number) for number in declared.denied):
        return "it may make and open nodes of GPUs that are not granted, and the driver's libraries would"
    return _why_covered(declared, config, resolve)


def _has_mknod(config: "dict[str, Any]") -> bool:
    """Tell whether a process of the container can have CAP_MKNOD."""
    sets = get_object(get_object(config, "process"), "capabilities")
    names = [name for kind in ("bounding", "effective", "permitted") for name in get_list(sets, kind)]
    return any(isinstance(name, str) and name.upper() == "CAP_MKNOD" for name in names)  # crun takes any case


def _is_allowed(config: "dict[str, Any]", major: int, minor: int) -> bool:
    """Tell whether the device rules may let a container read or write a character device; the last that fits decides.

    Where runtimes read a rule differently, the wider reading counts.  Without any rule runc denies and crun has no
    policy: allowed, then.
    """
    rules = get_rules(config)
    granted = set() if rules else {"r", "w"}
    for rule in rules:
        if not isinstance(rule, dict) or rule.get("type") == "b":
            continue
        numbers = (("major", major), ("minor", minor))
        fits = all(rule.get(name, -1) in (None, -1, number) for name, number in numbers)
        access = rule.get("access")
        letters = set(access) if isinstance(access, str) and access else {"r", "w"}
        if rule.get("allow") is not True:
            granted -= letters if fits else set()
        elif fits or rule.get("type", "a") in ("a", "", None):  # to some "all" is all, whatever the numbers
            granted |= letters
    return not granted.isdisjoint(("r", "w"))


def _why_covered(declared: Declared, config: "dict[str, Any]", resolve: "Callable[[str], str]") -> str:
    """Tell whether something would be made below what is mounted later, or in a volume that is not the container's."""
    own = {mount["destination"] for mount in declared.mounts}
    covers: list[tuple[str, bool]] = []
    for mount in get_list(config, "mounts"):
        path = mount.get("destination") if isinstance(mount, dict) else None
        if not isinstance(path, str) or path in own:
            continue
        options = get_list(mount, "options")
        bound = mount.get("type") == "bind" or "bind" in options or "rbind" in options
        path = os.path.normpath("/" + path.lstrip("/"))  # normpath keeps two slashes at the beginning
        top = path.split("/", 2)[1]
        if top in ("proc", "sys") or (top == "dev" and not bound):
            continue
        covers.append((resolve(path), bound))
    if not covers:
        return ""
    parents: dict[str, str] = {}
    in_root = [path for path, _ in declared.links] + [LD_CACHE] * bool(declared.libraries)
    mounted = [node[0] for node in declared.nodes] + [path for path, _, _ in declared.views] + list(own)
    for paths, volumes in (
        (in_root, [path for path, _ in covers]),
        (mounted, [path for path, bound in covers if bound]),
    ):
        for path in paths if volumes else ():
            parent, _, name = path.rpartition("/")
            if parent not in parents:
                parents[parent] = resolve(parent)
            place = f"{parents[parent]}/{name}"
            for volume in volumes:
                if volume in ("/", place) or place.startswith(f"{volume}/"):
                    return f"{path} is in or below what is mounted on {volume}"
    return ""


def edit_declared(
    config: "dict[str, Any]",
    declared: Declared,
    root: str,
    view_paths: "Sequence[str]",
    declare_rules: bool,
    bind_nodes: bool,
) -> None:
    """Change ``config`` in place so that the container gets everything that is declared.

    ``root``: host path of its root directory; ``view_paths``: host paths of the views, in their order.
    ``declare_rules``: as for :func:`ocigpu.bundle.edit.edit_config`.  ``bind_nodes``: the runtime binds the host's
    node of the same path instead of making one, as in user namespaces.  Doing it twice equals doing it once.
    Raises SpecError OCIGPU-SPEC-3 for parts of ``config`` of another type than the specification's.
    """
    linux = find(config, "linux", dict, "linux")
    mounts = find(config, "mounts", list, "mounts")
    devices = find(linux, "devices", list, "linux.devices")
    masked = find(linux, "maskedPaths", list, "linux.maskedPaths")
    read_only = find(linux, "readonlyPaths", list, "linux.readonlyPaths")
    annotations = find(config, "annotations", dict, "annotations")
    hooks = find(config, "hooks", dict, "hooks")
    nodes, bound = [], []
    for path, host_path, major, minor, mode, uid, gid in declared.nodes:
        if bind_nodes and host_path != path:
            bound.append({"destination": path, "type": "bind", "source": host_path, "options": list(NODE_OPTIONS)})
        else:
            entry = {"path": path, "type": "c", "major": major, "minor": minor, "fileMode": mode}
            nodes.append({**entry, "uid": uid, "gid": gid})
    views = [
        {"destination": path, "type": "bind", "source": source, "options": [*BIND_OPTIONS, "ro", "nosuid", "nodev"]}
        for (path, _, _), source in zip(declared.views, view_paths, strict=True)
    ]
    added = [*bound, *declared.mounts, *views]
    paths = {node[0] for node in declared.nodes}
    devices[:] = [entry for entry in devices if not isinstance(entry, dict) or entry.get("path") not in paths] + nodes
    mounts += added
    new_masked = [path for path in declared.masked if path not in masked]
    new_read_only = [path for path in declared.read_only if path not in read_only]
    masked += new_masked
    read_only += new_read_only
    linux.update(devices=devices, maskedPaths=masked, readonlyPaths=read_only)
    config.update(linux=linux, mounts=mounts, annotations=annotations)
    if declare_rules:
        add_rules(config, declared.rules)
    if declared.simulated_proc:
        words = ["sh", "-c", SIMULATED_PROC, "sh", declared.simulated_proc, f"{root}/proc/driver"]
        entry = {"path": "/bin/sh", "args": words, "env": list(HOOK_ENVIRONMENT)}
        hooks["prestart"] = [*find(hooks, "prestart", list, "hooks.prestart"), entry]
        config["hooks"] = hooks
    ours: list[tuple[str, Key]] = [
        *(("devices", (str(entry["path"]),)) for entry in nodes),
        *(("rules", (rule["major"], rule["minor"])) for rule in declared.rules if declare_rules),
        *(("mounts", (entry["destination"], entry["source"])) for entry in added),
        *(("maskedPaths", (path,)) for path in new_masked),
        *(("readonlyPaths", (path,)) for path in new_read_only),
    ]
    annotations[DECLARED] = " ".join(_digest(kind, key) for kind, key in ours)


def _digest(kind: str, key: "Key") -> str:
    """Return what stands in the annotation for an entry of a list: every hook gets all annotations, so it is short."""
    return f"{crc32(rawjson.dump([kind, *key]).encode()):08x}"


def take_back(config: "dict[str, Any]") -> None:
    """Take what an earlier edit has declared out of ``config`` again, as its annotation says; what cannot be, stays.

    The annotation may be of whoever asks an engine for annotations, so nothing goes that is not of a form that only
    edits of ours have: above all no path stays unhidden that an engine hides.
    What had been replaced is not put back: an engine writes a new configuration for another container.
    """
    annotations = get_object(config, "annotations")
    left = _read_annotation(annotations.pop(DECLARED, None))
    linux = get_object(config, "linux")
    _remove(get_list(linux, "devices"), "devices", left, _node_key)
    _remove(get_rules(config), "rules", left, _rule_key)
    _remove(get_list(config, "mounts"), "mounts", left, _mount_key)
    for name in ("maskedPaths", "readonlyPaths"):
        _remove(get_list(linux, name), name, left, _path_key)
    hooks = get_list(get_object(config, "hooks"), "prestart")
    hooks[:] = [entry for entry in hooks if SIMULATED_PROC not in get_list(entry, "args")]


def _read_annotation(text: "Any") -> "dict[str, int]":
    """Return how often each digest stands in the annotation; one of an earlier version has the entries themselves."""
    words: list[str] = []
    if isinstance(text, str) and text.startswith("{"):
        try:
            listed = rawjson.parse(text)
        except (ValueError, RecursionError):  # not written by us
            listed = {}
        for kind in ("devices", "rules", "mounts", "maskedPaths", "readonlyPaths"):
            keys = [_key(*item) if isinstance(item, list) else _key(item) for item in get_list(listed, kind)]
            words += [_digest(kind, key) for key in keys if key]
    elif isinstance(text, str):
        words = text.split()
    left: dict[str, int] = {}
    for word in words:
        left[word] = left.get(word, 0) + 1
    return left


def _remove(entries: "list[Any]", kind: str, left: "dict[str, int]", key_of: "Callable[[Any], Key]") -> None:
    """Remove one entry for each digest that is ``left``, the last one that has it: ours come after others.

    Time grows with the lengths of both lists, not with their product: who writes one need not be who writes the other.
    """
    kept = []
    for entry in reversed(entries):
        key = key_of(entry)
        digest = _digest(kind, key) if key and left else ""
        if left.get(digest):
            left[digest] -= 1
        else:
            kept.append(entry)
    entries[:] = reversed(kept)


def _key(*values: "Any") -> "Key":
    """Return what an entry is known by, () for what none of ours is."""
    return values if len(values) <= 2 and all(type(value) in (int, str) for value in values) else ()


def _node_key(entry: "Any") -> "Key":
    return _key(entry.get("path")) if isinstance(entry, dict) else ()


def _rule_key(entry: "Any") -> "Key":
    ours = isinstance(entry, dict) and list(entry) == RULE_FIELDS and entry["allow"] is True and entry["access"] == "rw"
    return _key(entry["major"], entry["minor"]) if ours else ()


def _mount_key(entry: "Any") -> "Key":
    ours = isinstance(entry, dict) and entry.get("type") == "bind" and entry.get("options") in OWN_OPTIONS
    return _key(entry.get("destination"), entry.get("source")) if ours else ()


def _path_key(entry: "Any") -> "Key":
    return (entry,) if isinstance(entry, str) and f"{entry}/".startswith(f"{PROC_DRIVER}/") else ()
