"""containerEdits of CDI specifications applied to an OCI configuration, as the CDI library's main branch does."""

import os
import stat

from ocigpu.bundle.edit import NODE_OPTIONS, ConfigEdit, put
from ocigpu.bundle.rootfs import find_cover, find_covers, leads_elsewhere, resolver
from ocigpu.core.cdi_names import HOOK_STAGES
from ocigpu.core.config_json import (
    HOOK_ENVIRONMENT,
    clean_path,
    find,
    get_list,
    get_object,
    has_user_namespace,
    rootfs_path,
)
from ocigpu.core.errors import MAKE_NODES, CdiError, SpecError, quoted
from ocigpu.system.files import is_open_to_all, why_replaceable
from ocigpu.system.paths import opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    Edits = dict[str, Any]

NODE_TYPES = {stat.S_IFBLK: "b", stat.S_IFCHR: "c", stat.S_IFIFO: "p"}
DEFAULT_ACCESS = "rwm"
_SHARED = ("shared", "rshared")
_OPTIONAL = ("/etc/", "/usr/share/", "/run/", "/var/run/", "/tmp/", "/lib/firmware/", "/usr/lib/firmware/")
"""Directories of NVIDIA's driver whose files are optional in a container: configuration, sockets, firmware."""
_NO_VOLUMES = ("tmpfs", "proc", "sysfs", "devpts", "mqueue", "cgroup")
"""Types of mounts whose content disappears with the container."""
ENGINE_HINT = "The engine wrote a configuration that is not one of the OCI runtime specification."


def inject(
    config: "dict[str, Any]",
    edits: "Sequence[Edits]",
    declare_rules: bool = True,
    lstat: "Callable[[str], os.stat_result]" = os.lstat,
    files: "Sequence[str]" = (),
    rootless: bool = False,
) -> "tuple[str, ...]":
    """Apply :func:`edit_of_devices` to ``config`` in place, and return its warnings; raises the same errors."""
    edit, notes = edit_of_devices(config, edits, declare_rules, lstat, files, rootless)
    put_devices(config, edit)
    return notes


def put_devices(config: "dict[str, Any]", edit: ConfigEdit) -> None:
    """Apply the edit; raises CdiError OCIGPU-CDI-6, with ``config`` unchanged, for parts of the wrong JSON type."""
    try:
        put(config, edit)
    except SpecError as error:
        raise CdiError("OCIGPU-CDI-6", error.message, ENGINE_HINT) from error


def edit_of_devices(
    config: "dict[str, Any]",
    edits: "Sequence[Edits]",
    declare_rules: bool = True,
    lstat: "Callable[[str], os.stat_result]" = os.lstat,
    files: "Sequence[str]" = (),
    rootless: bool = False,
) -> "tuple[ConfigEdit, tuple[str, ...]]":
    """Return the edit that applies these checked containerEdits to the container of ``config``, and warnings.

    ``declare_rules``: also put a device rule for each node into linux.resources.devices.  ``files``: where each of
    ``edits`` comes from, for messages.  ``rootless``: this process is in a user namespace of its own, so that the
    runtime can neither make ID-mapped mounts nor device nodes.
    Raises CdiError OCIGPU-CDI-6 for a node or mount source that the host does not have, a node of another type than
    the host's, and parts of ``config`` of the wrong JSON type.

    The order is the library's: env, deviceNodes, netDevices, mounts, hooks, intelRdt, additionalGids; each of them
    for all edits.  What differs from the library:

    - An equal hook, rule or environment entry is not added a second time, and a new mount replaces all mounts of its
      destination, not only the first.
    - permissions "none" writes no rule: an empty access grants nothing, and runc (1.1.5) refuses it.
    - Rules go to the end of the list even where it was empty: without any rule runc still denies everything but its
      default devices, so the node could not be opened.  For crun the first rule brings a policy to a container that
      had none: narrower than before, and what every engine that injects CDI devices does.
    - A hook without env gets a search path and a locale: runc (1.1.5) starts one of createContainer with the
      container's own environment, which its image sets, and the host's loader obeys LD_PRELOAD there (CVE-2025-23266).
    - In a user namespace additionalGids are the host's groups, by the ids that they have there; one that is not mapped
      is left out, for the container would not start.
    - In a user namespace, where runtimes bind the host's node of the same path instead of making one, a node whose
      hostPath differs from its path becomes a bind mount.
    """
    try:
        draft = _Draft(config, rootless, lstat)
        sources = [f"{file}: " if file else "" for file in (*files, *[""] * (len(edits) - len(files)))]
        named = list(zip(edits, sources, strict=True))
        for item, source in named:
            for node in item.get("deviceNodes", ()):
                draft.add_node(node, source)
        for item, source in named:
            for mount in item.get("mounts", ()):
                draft.add_mount(mount, source)
        _refuse_shared(config, draft.mounts)
        gids: "Sequence[int]" = [gid for gid in _all(edits, "additionalGids") if gid]
        if gids and (draft.user_namespace or rootless):
            from ocigpu.system.groups import fit_groups

            gids, left = fit_groups(config, gids)
            draft.notes.extend(left)
        edit = ConfigEdit(
            env=[*_all(edits, "env")],
            nodes=draft.nodes,
            rules=draft.rules if declare_rules else (),
            net_devices={item["hostInterfaceName"]: {"name": item["name"]} for item in _all(edits, "netDevices")},
            mounts=[*draft.mounts.values()],
            in_order=True,
            hooks=[_hook(item) for item in _all(edits, "hooks")],
            rdt=next((dict(item["intelRdt"]) for item in reversed(edits) if item.get("intelRdt") is not None), None),
            groups=gids,
        )
    except SpecError as error:
        raise CdiError("OCIGPU-CDI-6", error.message, ENGINE_HINT) from error
    return edit, tuple(draft.notes)


def _all(edits: "Sequence[Edits]", name: str) -> "Iterator[Any]":
    return (entry for item in edits for entry in item.get(name, ()))


def _hook(item: "dict[str, Any]") -> "tuple[str, dict[str, Any]]":
    if item["hookName"] not in HOOK_STAGES:
        raise CdiError("OCIGPU-CDI-6", f"unknown hook name {quoted(item['hookName'])}")
    entry = {name: value for name, value in item.items() if name != "hookName"}
    return item["hookName"], {**entry, "env": list(entry.get("env") or HOOK_ENVIRONMENT)}


class _Draft:
    """The future nodes, rules and mounts, by the path that they replace, adapted to this container."""

    def __init__(self, config: "dict[str, Any]", rootless: bool, lstat: "Callable[[str], os.stat_result]") -> None:
        self.rootless = rootless
        self.lstat = lstat
        find(find(config, "linux", dict, "linux"), "namespaces", list, "linux.namespaces")  # refuses another type
        self.user_namespace = has_user_namespace(config)
        user = find(find(config, "process", dict, "process"), "user", dict, "process.user")
        self.owner = {name: user[name] for name in ("uid", "gid") if _is_id(user.get(name))}
        self.nodes: dict[str, dict[str, Any] | None] = {}
        self.rules: list[dict[str, Any]] = []
        self.mounts: dict[str, dict[str, Any]] = {}
        self.notes: list[str] = []

    def add_node(self, node: "dict[str, Any]", named: str) -> None:
        """Add one device node: fields missing in the specification are read from the host's node."""
        path = node["path"]
        host_path = node.get("hostPath") or path
        kind = node.get("type", "")
        major, minor = node.get("major", 0), node.get("minor", 0)
        complete = bool(kind) and (major != 0 or kind == "p")  # enough to make the node without the host's
        mode = node.get("fileMode")
        status, cause = self._stat_host(host_path)
        host_kind = NODE_TYPES.get(stat.S_IFMT(status.st_mode), "") if status else ""
        if status and not host_kind:
            cause = "not a device node"
        if status and host_kind:
            number = os.major(status.st_rdev), os.minor(status.st_rdev)
            mode = stat.S_IMODE(status.st_mode) if mode is None else mode
            if not complete:
                if kind and kind != host_kind:
                    named_pair = f"({quoted(path)}, {quoted(host_path)}), host type mismatch ({kind}, {host_kind})"
                    raise CdiError("OCIGPU-CDI-6", f"{named}CDI device {named_pair}")
                kind = host_kind
                if major == 0 and kind != "p":
                    major, minor = number
            if host_path == path and kind == host_kind != "p" and (major, minor) != number:
                self.notes.append(
                    f"{named}CDI device {quoted(path)} is {kind} {major}:{minor} in the specification"
                    f" and {number[0]}:{number[1]} on this host"
                )
        elif not complete or self.user_namespace or self.rootless:  # in a user namespace it is mounted
            hint = MAKE_NODES if "/dev/nvidia" in host_path else None
            raise CdiError("OCIGPU-CDI-6", f"{named}failed to stat CDI host device {quoted(host_path)}: {cause}", hint)
        permissions = node.get("permissions", "")
        if kind in ("b", "c") and permissions != "none":
            access = permissions or DEFAULT_ACCESS
            self.rules.append({"allow": True, "type": kind, "major": major, "minor": minor, "access": access})
        if (self.user_namespace or self.rootless) and host_path != path and not cause:
            self._put_mount(path, {"type": "bind", "source": host_path, "options": list(NODE_OPTIONS)})
            self.nodes[path] = None  # an entry of this path goes: the runtime would bind another node there
            return
        entry = {"path": path, "type": kind}
        if kind != "p":
            entry.update(major=major, minor=minor)
        if mode is not None:
            entry["fileMode"] = mode
        for name in ("uid", "gid"):
            value = node.get(name)
            value = self.owner.get(name) if value is None else value
            if value is not None:
                entry[name] = value
        self.nodes.pop(path, None)  # the last node of a path counts, at its own position
        self.nodes[path] = entry
        self.mounts.pop(path, None)  # replaces a node bound to this path earlier; mounts of the edits come later

    def add_mount(self, mount: "dict[str, Any]", named: str) -> None:
        """Add one mount; raises CdiError for a source that does not exist."""
        source, kind = mount["hostPath"], mount.get("type", "")
        options = list(mount.get("options", ()))
        bound, bound_with_all = kind == "bind" or "bind" in options, "rbind" in options
        checked = (bound or bound_with_all) and source.startswith("/")  # a relative one is relative to the bundle
        if checked and (cause := self._why_source_refused(source)):
            message = f"{named}mount {mount['containerPath']}: host path {quoted(source)}: {cause}"
            raise CdiError("OCIGPU-CDI-6", message)
        mapped = self.user_namespace and not self.rootless and not {"idmap", "ridmap"}.intersection(options)
        if mapped and (bound or bound_with_all):
            options.append("ridmap" if bound_with_all else "idmap")
        entry: dict[str, Any] = {"type": kind} if kind else {}
        entry["source"] = source
        if options:
            entry["options"] = options
        self._put_mount(mount["containerPath"], entry)

    def _stat_host(self, path: str) -> "tuple[os.stat_result | None, str]":
        """Return the status of a path of the host, or the error."""
        try:
            return self.lstat(path), ""
        except (OSError, ValueError) as error:
            return None, getattr(error, "strerror", None) or str(error)

    def _why_source_refused(self, path: str) -> str:
        """Return why a path of the host is not mounted, "" if it is.

        An example is a link in /tmp: any user could choose which file of the host the container gets, perhaps writable.
        """
        status, cause = self._stat_host(path)
        if status and stat.S_ISLNK(status.st_mode) and is_open_to_all(os.path.dirname(path)):
            return "a link, in a directory where every user can make one"
        return cause

    def _put_mount(self, destination: str, mount: "dict[str, Any]") -> None:
        self.mounts.pop(destination, None)
        self.mounts[destination] = {"destination": destination, **mount}


def _is_id(value: "Any") -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def leave_volumes(config: "dict[str, Any]", edit: ConfigEdit, bundle: str) -> "tuple[ConfigEdit, list[str]]":
    """Return the edit without optional mounts whose target would be created in a volume, and notes on them.

    The runtime would create it, and it would stay there.  Links of the image are followed as the runtime follows them.
    A target that exists is only mounted on.  Raises CdiError OCIGPU-MNT-4 for nodes, and for mounts that are not
    optional.
    """
    own = {mount["destination"] for mount in edit.mounts}
    mounts = [mount for mount in get_list(config, "mounts") if isinstance(mount, dict)]
    volumes = [
        mount
        for mount in mounts
        if isinstance(mount.get("destination"), str) and mount["destination"] not in own and not _is_file(mount)
    ]
    if all(mount.get("type") in _NO_VOLUMES for mount in volumes):
        return edit, []
    try:
        root_fd = os.open(rootfs_path(config, bundle), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, SpecError):  # the runtime reports that
        return edit, []
    with opened(root_fd):
        covers, unsure = find_covers(root_fd, volumes)
        resolve = resolver(root_fd, covers)
        places = {path: resolve(clean_path(path)) for path in (*own, *edit.nodes)}
    if unsure and places:
        message = f"{quoted(unsure)} is below a volume, where a link may lead it to any place"
        raise CdiError("OCIGPU-MNT-4", message, "Mount the volume somewhere else.")
    left: dict[str, str] = {}
    for path, place in places.items():
        top = find_cover(covers, place)
        if not top:
            continue
        mount, elsewhere = covers[top], leads_elsewhere(covers, path, place)
        # runtimes make no node in a volume that is the whole /dev
        if not elsewhere and (mount.get("type") in _NO_VOLUMES or (path in edit.nodes and top == "/dev")):
            continue
        rest = place.removeprefix(top).strip("/")
        if elsewhere or not _is_there(mount.get("source"), rest):
            why = f"{quoted(path)} is in {quoted(mount['destination'])}, a volume: the runtime would make "
            why += f"{quoted(rest)} where a link in it leads" if elsewhere else f"{quoted(rest)} in it"
            if path in edit.nodes or "nvidia" not in path or not path.startswith(_OPTIONAL):
                raise CdiError("OCIGPU-MNT-4", why)
            left[path] = f"{path} was left out: {why}"
        elif place != top and _is_shared(config, mount):
            raise _shared_error(path, mount["destination"])
    mounts = [mount for mount in edit.mounts if mount["destination"] not in left]
    return edit._replace(mounts=mounts), [*left.values()]


def _is_file(mount: "dict[str, Any]") -> bool:
    """Tell whether a mount's source is not a directory, so that nothing can be created below it."""
    source = mount.get("source")
    try:
        return isinstance(source, str) and source.startswith("/") and not stat.S_ISDIR(os.stat(source).st_mode)
    except (OSError, ValueError):
        return False


def _is_there(source: "Any", rest: str) -> bool:
    """Tell whether a volume contains this path without any link in it: links lead elsewhere in a container.

    If users other than root can replace a part of the path, it may be different, or a link, when the runtime uses it.
    """
    if not isinstance(source, str) or not source.startswith("/"):
        return False
    names = rest.split("/") if rest else []
    paths = ["/".join((source, *names[:end])) for end in range(1, len(names) + 1)]
    try:
        return all(not stat.S_ISLNK(os.lstat(path).st_mode) and not why_replaceable(path) for path in paths)
    except (OSError, ValueError):
        return False


def _refuse_shared(config: "dict[str, Any]", added: "dict[str, Any]") -> None:
    """Refuse mounts below a volume that the container shares with the host: they would stay on the host.

    The runtime makes these mounts, and they propagate to the volume's peers (mount_namespaces(7)) if the volume and the
    container's root are shared.  Paths are compared as text; :func:`leave_volumes` handles links.
    """
    for mount in get_list(config, "mounts"):
        volume = mount.get("destination") if isinstance(mount, dict) else None
        if not isinstance(volume, str) or volume in added or not _is_shared(config, mount):
            continue
        volume = clean_path(volume)
        for destination in added:
            if volume == "/" or clean_path(destination).startswith(f"{volume}/"):
                raise _shared_error(destination, volume)


def _is_shared(config: "dict[str, Any]", mount: "dict[str, Any]") -> bool:
    """Tell whether mounts below this volume propagate to the host."""
    shares = get_object(config, "linux").get("rootfsPropagation") in _SHARED
    return shares and any(option in _SHARED for option in get_list(mount, "options"))


def _shared_error(destination: str, volume: str) -> CdiError:
    return CdiError(
        "OCIGPU-CDI-6",
        f"mount {quoted(destination)}: it is below {quoted(volume)}, a volume that is shared with the host,"
        " and would stay there",
        "Mount the volume elsewhere or without propagation, or use mode hook.",
    )
