"""What mode ``spec`` declares in a config.json: whether that is enough, and the edit for it.  Pure.

Separate from :mod:`ocigpu.bundle.from_plan`, which makes it from a plan, because most starts find it stored.
"""

from ocigpu.bundle.edit import BIND_OPTIONS, NODE_OPTIONS, SIMULATED_PROC, ConfigEdit, fitting_groups, put
from ocigpu.core.config_json import HOOK_ENVIRONMENT, clean_path, get_list, get_object, get_rules, has_user_namespace
from ocigpu.core.record import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

LD_CACHE = "/etc/ld.so.cache"
NOTED = ("devices", "rules", "mounts", "maskedPaths", "readonlyPaths", "groups")


class Declared(NamedTuple):
    """What a config.json can say of a plan, and what it cannot; plain data that can be stored as JSON.

    ``nodes``: (container path, host path or "", major, minor, mode, uid, gid); ``rules``: entries of
    linux.resources.devices; ``mounts``: entries of mounts, ``optional``: those of their sources that may be missing.
    ``masked``, ``read_only``: paths.  ``simulated_proc``: what a simulated host shows as /proc/driver, or "".
    ``links``: (container path, target) of links in the root file system.  ``libraries``: (name, container path, bits)
    of what its loader must find, most important first; ``views``: (container path, files, links) of small read-only
    directories, a file being (name, mode, content), a link (name, target).
    ``denied``: (major, minor) of the host's GPUs that are not granted.  ``needs_hook``: why all this is not enough.
    ``granted``: names for the log; ``notes``: the plan's.  ``groups``: those of the host that its process is to be in.
    ``files``: (container path, mode, content, whether only if it is missing) of files in the root file system.
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
    files: "Sequence[tuple[str, int, str, bool]]" = ()


def why_hook(
    declared: Declared,
    config: "dict[str, Any]",
    resolve: "Callable[[str], str]",
    declare_rules: bool,
    bind_nodes: bool,
) -> str:
    """Return why this container needs the hook, "" if config.json can say everything.

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
    can_make_nodes = not bind_nodes and _has_mknod(config)  # no process in a user namespace can
    if declared.denied and can_make_nodes and any(_is_allowed(config, *number) for number in declared.denied):
        return "it may make and open nodes of GPUs that are not granted, and the driver's libraries would"
    return _why_covered(declared, config, resolve)


def _has_mknod(config: "dict[str, Any]") -> bool:
    """Tell whether a process of the container can have CAP_MKNOD."""
    sets = get_object(get_object(config, "process"), "capabilities")
    names = [name for kind in ("bounding", "effective", "permitted") for name in get_list(sets, kind)]
    return any(isinstance(name, str) and name.upper() == "CAP_MKNOD" for name in names)  # crun takes any case


def _is_allowed(config: "dict[str, Any]", major: int, minor: int) -> bool:
    """Tell whether the device rules let a container read or write a character device; the last matching rule decides.

    If runtimes read a rule differently, the wider reading counts.  Without any rule runc denies and crun has no policy,
    so the device counts as allowed.
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
        elif fits or rule.get("type", "a") in ("a", "", None):  # "a" may mean all devices
            granted |= letters
    return not granted.isdisjoint(("r", "w"))


def _why_covered(declared: Declared, config: "dict[str, Any]", resolve: "Callable[[str], str]") -> str:
    """Return why something would be covered by a later mount, or made in a volume that is not the container's."""
    own = {mount["destination"] for mount in declared.mounts}
    covers: list[tuple[str, bool]] = []
    for mount in get_list(config, "mounts"):
        path = mount.get("destination") if isinstance(mount, dict) else None
        if not isinstance(path, str) or path in own:
            continue
        options = get_list(mount, "options")
        bound = mount.get("type") == "bind" or "bind" in options or "rbind" in options
        path = clean_path(path)
        top = path.split("/", 2)[1]
        if top in ("proc", "sys") or (top == "dev" and not bound):
            continue
        covers.append((resolve(path), bound))
    if not covers:
        return ""
    parents: dict[str, str] = {}
    in_root = [path for path, _ in declared.links] + [LD_CACHE] * bool(declared.libraries)
    in_root += [file[0] for file in declared.files]
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
            if place.startswith("/proc/") and not path.startswith("/proc/"):  # whose links lead anywhere
                return f"{path} is in or below what is mounted on /proc"
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
) -> tuple[str, ...]:
    """Change ``config`` in place so that the container gets everything that is declared; return notes on groups.

    ``declare_rules``: as for :func:`ocigpu.bundle.edit.edit_config`; the rest as for :func:`edit_of`.  Raises as
    :func:`ocigpu.bundle.edit.put`.
    """
    groups, notes = fitting_groups(config, declared.groups)
    edit = edit_of(declared, root, view_paths, bind_nodes)
    put(config, edit._replace(rules=declared.rules if declare_rules else (), groups=groups))
    return notes


def edit_of(declared: Declared, root: str, view_paths: "Sequence[str]", bind_nodes: bool) -> ConfigEdit:
    """Return what is to be put into a config.json, but for device rules and groups.

    ``root``: host path of its root directory; ``view_paths``: host paths of the views, in their order.
    ``bind_nodes``: the runtime binds the host's node of the same path instead of making one, as in user namespaces.
    """
    nodes: "dict[str, dict[str, Any] | None]" = {}
    mounts = []
    for path, host_path, major, minor, mode, uid, gid in declared.nodes:
        node = {"path": path, "type": "c", "major": major, "minor": minor, "fileMode": mode, "uid": uid, "gid": gid}
        nodes[path] = node
        if bind_nodes and host_path != path:
            nodes[path] = None
            mounts.append({"destination": path, "type": "bind", "source": host_path, "options": list(NODE_OPTIONS)})
    mounts += declared.mounts
    for (path, _, _), source in zip(declared.views, view_paths, strict=True):
        options = [*BIND_OPTIONS, "ro", "nosuid", "nodev"]
        mounts.append({"destination": path, "type": "bind", "source": source, "options": options})
    hooks = []
    if declared.simulated_proc:
        words = ["sh", "-c", SIMULATED_PROC, "sh", declared.simulated_proc, f"{root}/proc/driver"]
        hooks.append(("prestart", {"path": "/bin/sh", "args": words, "env": list(HOOK_ENVIRONMENT)}))
    return ConfigEdit(
        nodes=nodes, mounts=mounts, masked=declared.masked, read_only=declared.read_only, hooks=hooks, noted=NOTED
    )
