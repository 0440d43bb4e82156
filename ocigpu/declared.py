"""What mode ``spec`` says in a config.json: found to be enough or not, put there, and taken back.  Pure.

Kept apart from what makes it of a plan (:mod:`ocigpu.declare`), because most starts find it made already.
"""

import os

from ocigpu import rawjson
from ocigpu.spec import DECLARED, HOOK_ENVIRONMENT, add_rules, find, get_list, get_object

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NamedTuple
else:
    from ocigpu.record import NamedTuple

BIND_OPTIONS = ("rbind", "rprivate")
NODE_OPTIONS = ("bind", "rprivate", "nosuid", "noexec")
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
    ``granted``: names for the log; ``notes``: the plan's.
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


def why_hook(declared: Declared, config: "dict[str, Any]", resolve: "Callable[[str], str]") -> str:
    """Return why this container needs the hook, "" when its config.json can say all.

    ``resolve`` tells where a path of the container's root leads, links followed.
    """
    if declared.needs_hook:
        return declared.needs_hook
    if declared.views and has_user_namespace(config):
        return "in its user namespace the directory with files for graphics could not be read"
    if declared.denied and _can_make_nodes(config) and any(_is_allowed(config, *number) for number in declared.denied):
        return "it may make and open nodes of GPUs that are not granted, and the driver's libraries would"
    return _why_covered(declared, config, resolve)


def has_user_namespace(config: "dict[str, Any]") -> bool:
    """Tell whether the container gets, or joins, a user namespace."""
    namespaces = get_list(get_object(config, "linux"), "namespaces")
    return any(isinstance(item, dict) and item.get("type") == "user" for item in namespaces)


def _can_make_nodes(config: "dict[str, Any]") -> bool:
    """Tell whether a process of the container can have CAP_MKNOD where it counts: outside user namespaces."""
    sets = get_object(get_object(config, "process"), "capabilities")
    listed = any("CAP_MKNOD" in get_list(sets, name) for name in ("bounding", "effective", "permitted"))
    return listed and not has_user_namespace(config)


def _is_allowed(config: "dict[str, Any]", major: int, minor: int) -> bool:
    """Tell whether the device rules let a container read or write a character device; the last one that fits decides.

    Without any rule runc denies and crun has no policy: allowed, then.
    """
    rules = get_list(get_object(get_object(config, "linux"), "resources"), "devices")
    allowed = not rules
    for rule in rules:
        if not isinstance(rule, dict) or rule.get("type", "a") not in ("a", "c", ""):
            continue
        fits = all(rule.get(name, -1) in (None, -1, number) for name, number in (("major", major), ("minor", minor)))
        access = rule.get("access")
        if fits and (not isinstance(access, str) or not access or "r" in access or "w" in access):
            allowed = rule.get("allow") is True
    return allowed


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
        if path.startswith(("/proc", "/sys")) or (path.startswith("/dev") and not bound):
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
    ``declare_rules``: as for :func:`ocigpu.spec.edit_config`.  ``bind_nodes``: the runtime binds the host's node of the
    same path instead of making one, as in user namespaces.  Doing it twice equals doing it once.
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
    annotations[DECLARED] = rawjson.dump(
        {
            "devices": [entry["path"] for entry in nodes],
            "rules": [[rule["major"], rule["minor"]] for rule in declared.rules] if declare_rules else [],
            "mounts": [[entry["destination"], entry["source"]] for entry in added],
            "maskedPaths": new_masked,
            "readonlyPaths": new_read_only,
        }
    )


def take_back(config: "dict[str, Any]") -> None:
    """Take what an earlier edit has declared out of ``config`` again, as its annotation says; what cannot be, stays.

    What had been replaced is not put back: an engine writes a new configuration for another container.
    """
    annotations = get_object(config, "annotations")
    text = annotations.pop(DECLARED, None)
    try:
        listed = rawjson.parse(text) if isinstance(text, str) else {}
    except (ValueError, RecursionError):  # not written by us
        return
    linux = get_object(config, "linux")
    rules = [pair for pair in get_list(listed, "rules") if isinstance(pair, list)]
    for parent, name, keys in (
        (linux, "devices", ("path",)),
        (config, "mounts", ("destination", "source")),
        (linux, "maskedPaths", ()),
        (linux, "readonlyPaths", ()),
    ):
        entries, ours = get_list(parent, name), get_list(listed, name)
        entries[:] = [entry for entry in entries if _key(entry, keys) not in ours]
    devices = get_list(get_object(linux, "resources"), "devices")
    devices[:] = [
        entry
        for entry in devices
        if not isinstance(entry, dict)
        or list(entry) != RULE_FIELDS
        or [entry["major"], entry["minor"]] not in rules
        or entry["access"] != "rw"
    ]
    hooks = get_list(get_object(config, "hooks"), "prestart")
    hooks[:] = [entry for entry in hooks if SIMULATED_PROC not in get_list(entry, "args")]


def _key(entry: "Any", keys: tuple[str, ...]) -> "Any":
    if not isinstance(entry, dict):
        return entry
    values = [entry.get(key) for key in keys]
    return values[0] if len(values) == 1 else values
