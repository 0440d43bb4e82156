"""containerEdits of CDI specifications applied to an OCI configuration, by the rules of the CDI library's main branch.

The configuration stays a raw document: unknown fields survive, order stays.  It is changed as a whole or not at all.
"""

import os
import stat

from ocigpu.core.cdi_names import HOOK_STAGES
from ocigpu.core.config_json import HOOK_ENVIRONMENT
from ocigpu.core.errors import CdiError, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    Edits = dict[str, Any]

NODE_TYPES = {stat.S_IFBLK: "b", stat.S_IFCHR: "c", stat.S_IFIFO: "p"}
BOUND_NODE_OPTIONS = ("bind", "rprivate", "nosuid", "noexec")
DEFAULT_ACCESS = "rwm"
_SHARED = ("shared", "rshared")
ENGINE_HINT = "The engine wrote a configuration that is not one of the OCI runtime specification."


def inject(
    config: "dict[str, Any]",
    edits: "Sequence[Edits]",
    declare_rules: bool = True,
    lstat: "Callable[[str], os.stat_result]" = os.lstat,
    files: "Sequence[str]" = (),
    rootless: bool = False,
) -> "tuple[str, ...]":
    """Change ``config`` in place so that the container gets ``edits`` (checked containerEdits, in order).

    ``declare_rules``: also put a device rule for each node into linux.resources.devices.  ``files``: where each of
    ``edits`` comes from, for messages.  ``rootless``: this process is in a user namespace of its own, so that the
    runtime can neither make ID-mapped mounts nor device nodes.  Returns warnings.
    Raises CdiError OCIGPU-CDI-6, with ``config`` unchanged, for a node or mount source that the host does not have, a
    node of another type than the host's, and parts of ``config`` of the wrong JSON type.
    Doing it twice equals doing it once.

    The order is the library's: env, deviceNodes, netDevices, mounts, hooks, intelRdt, additionalGids; each of them
    for all edits.  What differs from the library:

    - An equal hook, rule or environment entry that is there already is not added a second time, and mounts that are
      replaced are all of that destination, not only the first.
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
    draft = _Draft(config, declare_rules, rootless)
    sources = [*files, *[""] * (len(edits) - len(files))]
    _add_env(draft, [entry for item in edits for entry in item.get("env", ())])
    for item, file in zip(edits, sources, strict=True):
        for node in item.get("deviceNodes", ()):
            _add_node(draft, node, _named(file), lstat)
    for item in edits:
        for device in item.get("netDevices", ()):
            draft.net_devices[device["hostInterfaceName"]] = {"name": device["name"]}
    for item, file in zip(edits, sources, strict=True):
        for mount in item.get("mounts", ()):
            _add_mount(draft, mount, _named(file), lstat)
    hooks = [hook for item in edits for hook in item.get("hooks", ())]
    rdt = [item["intelRdt"] for item in edits if item.get("intelRdt") is not None]
    gids = [gid for item in edits for gid in item.get("additionalGids", ()) if gid]
    if gids and (draft.user_namespace or rootless):
        from ocigpu.system.groups import fit_groups

        gids, left = fit_groups(config, gids)
        draft.notes.extend(left)
    finished = _finish(draft, hooks, rdt, gids)
    config.clear()
    config.update(finished)
    return tuple(draft.notes)


class _Draft:
    """The configuration to be: a copy wherever something may change, and what the edits add, by what it replaces."""

    def __init__(self, config: "dict[str, Any]", declare_rules: bool, rootless: bool) -> None:
        self.config = dict(config)
        self.declare_rules = declare_rules
        self.rootless = rootless
        linux = _look(self.config, "linux", dict, "linux")
        namespaces = _look(linux, "namespaces", list, "linux.namespaces")
        self.user_namespace = any(isinstance(item, dict) and item.get("type") == "user" for item in namespaces)
        user = _look(_look(self.config, "process", dict, "process"), "user", dict, "process.user")
        self.owner = {name: user[name] for name in ("uid", "gid") if _is_id(user.get(name))}
        self.nodes: dict[str, dict[str, Any] | None] = {}
        self.rules: list[dict[str, Any]] = []
        self.net_devices: dict[str, Any] = {}
        self.mounts: dict[str, dict[str, Any]] = {}
        self.notes: list[str] = []


def _named(file: str) -> str:
    return f"{file}: " if file else ""


def _is_id(value: "Any") -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _wrong_type(path: str, kind: type) -> CdiError:
    what = "an object" if kind is dict else "a list" if kind is list else "a text"
    return CdiError("OCIGPU-CDI-6", f"config.json: {path} is not {what}", ENGINE_HINT)


def _look(parent: "dict[str, Any]", name: str, kind: type, path: str) -> "Any":
    """Return ``parent[name]``, or an empty one when it is missing or null; another type is an error."""
    value = parent.get(name)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise _wrong_type(path, kind)
    return value


def _own(parent: "dict[str, Any]", name: str, kind: type, path: str) -> "Any":
    """Put a copy of ``parent[name]`` in its place and return it, so that the original stays as it is."""
    parent[name] = kind(_look(parent, name, kind, path))
    return parent[name]


def _add_env(draft: _Draft, entries: "list[str]") -> None:
    """Replace variables in place, every one of a name that occurs several times, and append new ones."""
    if not entries:
        return
    env = _own(_own(draft.config, "process", dict, "process"), "env", list, "process.env")
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


def _add_node(draft: _Draft, node: "dict[str, Any]", named: str, lstat: "Callable[[str], os.stat_result]") -> None:
    """Add one device node: what the specification does not say is read from the host's node."""
    path = node["path"]
    host_path = node.get("hostPath") or path
    kind = node.get("type", "")
    major, minor = node.get("major", 0), node.get("minor", 0)
    complete = bool(kind) and (major != 0 or kind == "p")  # enough to make the node without the host's
    mode = node.get("fileMode")
    try:
        status = lstat(host_path)
        host_kind = NODE_TYPES.get(stat.S_IFMT(status.st_mode), "")
        cause = "" if host_kind else "not a device node"
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or str(error)
    if not cause:
        number = os.major(status.st_rdev), os.minor(status.st_rdev)
        mode = stat.S_IMODE(status.st_mode) if mode is None else mode
        if not complete:
            if kind and kind != host_kind:
                raise CdiError(
                    "OCIGPU-CDI-6",
                    f"{named}CDI device ({quoted(path)}, {quoted(host_path)}), host type mismatch"
                    f" ({kind}, {host_kind})",
                )
            kind = host_kind
            if major == 0 and kind != "p":
                major, minor = number
        if host_path == path and kind == host_kind != "p" and (major, minor) != number:
            draft.notes.append(
                f"{named}CDI device {quoted(path)} is {kind} {major}:{minor} in the specification"
                f" and {number[0]}:{number[1]} on this host"
            )
    elif not complete:
        raise CdiError("OCIGPU-CDI-6", f"{named}failed to stat CDI host device {quoted(host_path)}: {cause}")
    permissions = node.get("permissions", "")
    if kind in ("b", "c") and permissions != "none":
        access = permissions or DEFAULT_ACCESS
        draft.rules.append({"allow": True, "type": kind, "major": major, "minor": minor, "access": access})
    if (draft.user_namespace or draft.rootless) and host_path != path and not cause:
        _put(draft.mounts, path, {"type": "bind", "source": host_path, "options": list(BOUND_NODE_OPTIONS)})
        draft.nodes[path] = None  # an entry of this path goes: the runtime would bind another node there
        return
    entry = {"path": path, "type": kind}
    if kind != "p":
        entry.update(major=major, minor=minor)
    if mode is not None:
        entry["fileMode"] = mode
    for name in ("uid", "gid"):
        value = node.get(name)
        if value is None:
            value = draft.owner.get(name)
        if value is not None:
            entry[name] = value
    draft.nodes.pop(path, None)  # the last of a path counts, and stands where it was added
    draft.nodes[path] = entry
    draft.mounts.pop(path, None)  # a bound node of this path before it; mounts of the edits come later


def _put(mounts: "dict[str, dict[str, Any]]", destination: str, mount: "dict[str, Any]") -> None:
    mounts.pop(destination, None)
    mounts[destination] = {"destination": destination, **mount}


def _add_mount(draft: _Draft, mount: "dict[str, Any]", named: str, lstat: "Callable[[str], os.stat_result]") -> None:
    source, kind = mount["hostPath"], mount.get("type", "")
    options = list(mount.get("options", ()))
    bound, bound_with_all = kind == "bind" or "bind" in options, "rbind" in options
    if (bound or bound_with_all) and source.startswith("/"):  # a relative one is relative to the bundle
        try:
            lstat(source)
        except (OSError, ValueError) as error:
            cause = getattr(error, "strerror", None) or str(error)
            raise CdiError(
                "OCIGPU-CDI-6", f"{named}mount {mount['containerPath']}: host path {quoted(source)}: {cause}"
            ) from error
    if draft.user_namespace and not draft.rootless and not {"idmap", "ridmap"}.intersection(options):
        if bound_with_all:
            options.append("ridmap")
        elif bound:
            options.append("idmap")
    entry: dict[str, Any] = {"type": kind} if kind else {}
    entry["source"] = source
    if options:
        entry["options"] = options
    _put(draft.mounts, mount["containerPath"], entry)


def _finish(
    draft: _Draft, hooks: "list[dict[str, Any]]", rdt: "list[dict[str, Any]]", gids: "list[int]"
) -> "dict[str, Any]":
    """Return the new configuration: lists that something goes into are copies, all others the old ones."""
    config = draft.config
    rules = draft.rules if draft.declare_rules else []
    if draft.nodes or rules or draft.net_devices or rdt:
        linux = _own(config, "linux", dict, "linux")
        if draft.nodes:
            _replace(linux, "devices", "linux.devices", "path", draft.nodes)
        if rules:
            _add_rules(linux, rules)
        if draft.net_devices:
            _own(linux, "netDevices", dict, "linux.netDevices").update(draft.net_devices)
        if rdt:
            linux["intelRdt"] = dict(rdt[-1])
    if draft.mounts:
        _replace(config, "mounts", "mounts", "destination", draft.mounts)
        config["mounts"].sort(key=lambda mount: _depth(mount["destination"]))
        _refuse_shared(config, draft.mounts)
    if hooks:
        _add_hooks(_own(config, "hooks", dict, "hooks"), hooks)
    if gids:
        user = _own(_own(config, "process", dict, "process"), "user", dict, "process.user")
        groups = _own(user, "additionalGids", list, "process.user.additionalGids")
        known = {group for group in groups if isinstance(group, int)}
        groups.extend(gid for gid in dict.fromkeys(gids) if gid not in known)
    return config


def _refuse_shared(config: "dict[str, Any]", added: "Mapping[str, Any]") -> None:
    """Refuse mounts below a volume that the container shares with the host: the host would get them, for good.

    The runtime makes these mounts, and tells the volume's peers of them (mount_namespaces(7)), where it is told to
    share the volume and the container's root.  Told by the text of paths: an image's links are not followed.
    """
    linux = _look(config, "linux", dict, "linux")
    if linux.get("rootfsPropagation") not in _SHARED:
        return
    for mount in config["mounts"]:
        options = mount.get("options")
        if (
            mount["destination"] in added
            or not isinstance(options, list)
            or not any(map(options.__contains__, _SHARED))
        ):
            continue
        volume = _cleaned(mount["destination"])
        for destination, entry in added.items():
            if entry is not None and (volume == "/" or _cleaned(destination).startswith(f"{volume}/")):
                raise CdiError(
                    "OCIGPU-CDI-6",
                    f"mount {quoted(destination)}: it is below {quoted(volume)}, a volume that is shared with the host,"
                    " and would stay there",
                    "Mount the volume elsewhere or without propagation, or use mode hook.",
                )


def _cleaned(path: str) -> str:
    return os.path.normpath("/" + path.lstrip("/"))


def _replace(parent: "dict[str, Any]", name: str, path: str, key: str, entries: "Mapping[str, Any]") -> None:
    """Take the entries whose ``key`` is one of the new ones' out of a list, and append those that are not None."""
    present = _own(parent, name, list, path)
    for position, entry in enumerate(present):
        if not isinstance(entry, dict):
            raise _wrong_type(f"{path}[{position}]", dict)
        if not isinstance(entry.get(key), str):
            raise _wrong_type(f"{path}[{position}].{key}", str)
    present[:] = [entry for entry in present if entry[key] not in entries]
    present.extend(entry for entry in entries.values() if entry is not None)


def _add_rules(linux: "dict[str, Any]", rules: "list[dict[str, Any]]") -> None:
    """Put the rules at the end, so that none before takes them back; each of them once."""
    resources = _own(linux, "resources", dict, "linux.resources")
    present = _own(resources, "devices", list, "linux.resources.devices")
    wanted = {tuple(rule.values()): rule for rule in rules}
    names = list(rules[0])
    present[:] = [
        entry
        for entry in present
        if not (
            isinstance(entry, dict)
            and list(entry) == names
            and all(isinstance(value, (bool, int, str)) for value in entry.values())
            and tuple(entry.values()) in wanted
        )
    ]
    present.extend(wanted.values())


def _depth(destination: str) -> int:
    """Return how many slashes a cleaned path has: mounts are made from the root down."""
    if destination.startswith("/"):
        return _cleaned(destination).count("/")
    return os.path.normpath(destination).count("/")


def _add_hooks(present: "dict[str, Any]", hooks: "list[dict[str, Any]]") -> None:
    stages: dict[str, list[dict[str, Any]]] = {}
    for hook in hooks:
        if hook["hookName"] not in HOOK_STAGES:
            raise CdiError("OCIGPU-CDI-6", f"unknown hook name {quoted(hook['hookName'])}")
        entry = {name: value for name, value in hook.items() if name != "hookName"}
        entry["env"] = list(entry.get("env") or HOOK_ENVIRONMENT)
        stages.setdefault(hook["hookName"], []).append(entry)
    for stage, entries in stages.items():
        listed = _own(present, stage, list, f"hooks.{stage}")
        seen = {_as_text(entry) for entry in listed if isinstance(entry, dict)}
        for entry in entries:
            if _as_text(entry) not in seen:
                seen.add(_as_text(entry))
                listed.append(entry)


def _as_text(hook: "dict[str, Any]") -> str:
    """Return a text that equal hooks share, whatever the order of their fields."""
    return repr(sorted(hook.items()))
