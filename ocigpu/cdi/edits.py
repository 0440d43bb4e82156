"""A plan's third sink: its actions as containerEdits of a CDI specification.  Pure.

Intended differences to what NVIDIA's generator writes for the same host:

* Numbers of a device node are left out when the host has the node: the engine fills them in when it starts a container,
  so a major number that the kernel reassigned after a driver reload never grants another driver's device.
* "permissions" are the plan's "rw", not "rwm": containers need not make nodes.
* All hooks are one entry (one process for each container), unless the hook program is not ocigpu-hook.
* Links to DRM nodes go into that one entry as ``--device-link``: the hook makes those whose target the container has.
* The hook makes the files below /proc/driver/nvidia from the container's nodes; they are not a mount.
"""

import os
import sys

from ocigpu.cdi.hook_words import (
    COMPAT_ROOT,
    HOOK_NAMES,
    Chmod,
    CreateSymlinks,
    DisableDeviceNodeModification,
    EnableCudaCompat,
    UpdateApplicationProfile,
    UpdateLdCache,
    render_hook,
)
from ocigpu.core.actions import AllowDevice, Bind, Link, Node, RefreshLdCache, Tmpfs, join_groups
from ocigpu.core.config_json import HOOK_ENVIRONMENT, OUR_HOOK, SEARCH_PATH
from ocigpu.core.record import NamedTuple
from ocigpu.core.settings import DEFAULT_PATH
from ocigpu.gpus.nvidia.views import PROC_DRIVER, PROFILE_DIRECTORY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from ocigpu.cdi.hook_words import Command
    from ocigpu.core.actions import Action
    from ocigpu.core.facts import DeviceNode
    from ocigpu.core.settings import Settings
    from ocigpu.gpus.offer import DeviceOffer, GenerateOptions

    Edits = dict[str, Any]

MOUNT_OPTIONS = ("rbind", "rprivate")
"""What an engine needs beside the plan's options to make a bind mount of a CDI mount."""
DEFAULT_HOOKS = tuple(name for name in HOOK_NAMES if name != "chmod")
"""Hooks that are written when nobody says otherwise: chmod is of use only to old runtimes."""
FOREIGN_ENVIRONMENT = ("NVIDIA_CTK_DEBUG=false",)


class HookOptions(NamedTuple):
    """The program that a specification's hooks start, and its arguments beside the actions.

    ``path``: its absolute path; a program with another name than ocigpu-hook gets an entry for each hook, in the
    vendor's words.  ``config``: settings file for ocigpu-hook, "" for its own.  ``enabled``: hooks that may be written.
    ``compat``: the argument of enable-cuda-compat, None to leave it out.  ``proc_driver``: the host's path of
    /proc/driver/nvidia, "" to leave out disable-device-node-modification.  ``ldconfig``: the host's, "" for the usual.
    """

    path: str
    config: str = ""
    enabled: tuple[str, ...] = DEFAULT_HOOKS
    compat: "EnableCudaCompat | None" = None
    proc_driver: str = ""
    ldconfig: str = ""

    @property
    def merged(self) -> bool:
        """Whether one process does the work of all hooks."""
        return self.path.rpartition("/")[2] == OUR_HOOK


def edits_from_actions(
    actions: "Sequence[Action]", hook: HookOptions | None = None, additional_gids: bool = True
) -> "Edits":
    """Return containerEdits with the nodes, mounts and hooks of a plan's actions; empty lists are left out.

    Without ``hook`` the result has no hooks: then the caller handles links, the loader's cache and small file systems.
    ``additional_gids``: let the container's user open nodes that only the node's group may open.
    """
    access = {(rule.major, rule.minor): rule.access for rule in actions if isinstance(rule, AllowDevice)}
    nodes = [action.node for action in actions if isinstance(action, Node)]
    edits: Edits = {
        "deviceNodes": [node_edit(node, access.get((node.major, node.minor), "rw")) for node in nodes],
        "hooks": hook_entries(hook_commands(actions, hook), hook) if hook else [],
        "mounts": [mount_edit(action) for action in actions if isinstance(action, Bind) and not _is_in_proc(action)],
        "additionalGids": [group.gid for group in join_groups(nodes)] if additional_gids else [],
    }
    return {name: value for name, value in edits.items() if value}


def node_edit(node: "DeviceNode", access: str) -> "dict[str, Any]":
    """Return the deviceNodes entry of a node; with its number only when the host does not have it to be looked at."""
    entry: dict[str, Any] = {"path": node.container_path}
    if not node.host_path:
        entry.update(type="c", major=node.major, minor=node.minor)
    elif node.host_path != node.container_path:
        entry["hostPath"] = node.host_path
    entry.update(fileMode=node.mode, permissions=access)
    entry.update({name: number for name, number in (("uid", node.uid), ("gid", node.gid)) if number})
    return entry


def mount_edit(bind: Bind) -> "dict[str, Any]":
    """Return the mounts entry of a bind mount.

    ``type`` adds nothing to the options, but crun up to 1.29 crashes without one if a container joins a pod with a user
    namespace ("read status from sync socket"; containers/crun issue 1948; seen with 1.8.1).
    """
    return {
        "hostPath": bind.host_path,
        "containerPath": bind.container_path,
        "options": [*bind.options, *MOUNT_OPTIONS],
        "type": "bind",
    }


def _is_in_proc(bind: Bind) -> bool:
    return bind.container_path.startswith("/proc/")


def hook_commands(actions: "Sequence[Action]", hook: HookOptions) -> "tuple[Command, ...]":
    """Return the hook's commands for these actions, in the order in which they run."""
    commands: dict[str, Command] = {}
    links: dict[bool, list[tuple[str, str]]] = {False: [], True: []}
    for action in actions:
        if isinstance(action, Link):
            links[hook.merged and _is_device_link(action)].append((action.target, action.container_path))
    if links[False] or links[True]:
        commands["create-symlinks"] = CreateSymlinks(_unique(links[False]), _unique(links[True]))
    caches = [action for action in actions if isinstance(action, RefreshLdCache)]
    if caches and hook.compat:
        commands["enable-cuda-compat"] = hook.compat
    if caches:
        commands["update-ldcache"] = UpdateLdCache(caches[0].directories, caches[0].ldconfig)
    views = {action.container_path for action in actions if isinstance(action, Tmpfs)}
    if PROC_DRIVER in views and hook.proc_driver:
        simulated = any(isinstance(action, Bind) and action.container_path == "/proc/driver" for action in actions)
        view = DisableDeviceNodeModification(hook.proc_driver, simulated)
        commands["disable-device-node-modification"] = view if hook.merged else DisableDeviceNodeModification()
    if PROFILE_DIRECTORY in views:
        commands["update-application-profile"] = UpdateApplicationProfile()
    folders = {action.node.container_path.rpartition("/")[0] for action in actions if isinstance(action, Node)}
    if below := tuple(sorted(folders - {"/dev"})):
        commands["chmod"] = Chmod(0o755, below)
    return tuple(commands[name] for name in HOOK_NAMES if name in commands and name in hook.enabled)


def _unique(items: "list[tuple[str, str]]") -> "tuple[tuple[str, str], ...]":
    return tuple(dict.fromkeys(items))


def hook_entries(commands: "Sequence[Command]", hook: HookOptions) -> "list[dict[str, Any]]":
    """Return the hooks entries that run these commands: one for ocigpu-hook, one each for another program.

    Raises CdiError OCIGPU-CDI-7 for names that a hook's words cannot hold.
    """
    program = hook.path.rpartition("/")[2]
    if not hook.merged:
        lead = [program, "hook"] if program == "nvidia-ctk" else [program]
        return [_entry(hook.path, [*lead, *render_hook([command])], FOREIGN_ENVIRONMENT) for command in commands]
    options = ["--config", hook.config] if hook.config else []
    return [_entry(hook.path, [program, *options, *render_hook(commands)], HOOK_ENVIRONMENT)] if commands else []


def _entry(path: str, arguments: list[str], environment: "Iterable[str]") -> "dict[str, Any]":
    return {"hookName": "createContainer", "path": path, "args": arguments, "env": list(environment)}


def enabled_hooks(options: "GenerateOptions") -> tuple[str, ...]:
    """Return the names of the hooks that the options allow.

    Hooks enabled by name are on, hooks disabled by name are off, and ``all`` disables the others.
    """
    allowed = () if "all" in options.disabled_hooks else DEFAULT_HOOKS
    return tuple(
        name
        for name in HOOK_NAMES
        if name in options.enabled_hooks or (name in allowed and name not in options.disabled_hooks)
    )


def hook_options(options: "GenerateOptions", settings: "Settings") -> HookOptions:
    """Return the form of the hooks.

    An absolute path in the options is used unchanged; a name is searched in PATH and the usual directories.  The
    default is hook.path of the settings, else ocigpu-hook beside the running program, else in those directories.
    """
    path = options.hook_path or settings.hook_path or _beside() or OUR_HOOK
    if not path.startswith("/"):
        path = _search(path) or f"/usr/bin/{os.path.basename(path)}"
    merged = path.rpartition("/")[2] == OUR_HOOK
    named = settings.path and settings.path != DEFAULT_PATH and merged
    config = os.path.abspath(settings.path) if named else ""
    return HookOptions(path, config, enabled_hooks(options), ldconfig=settings.ldconfig)


def _beside() -> str:
    for program in (sys.argv[0], sys.executable):
        path = os.path.join(os.path.dirname(program), OUR_HOOK)
        if program.startswith("/") and os.access(path, os.X_OK):  # never what lies in the working directory
            return path
    return ""


def _search(name: str) -> str:
    directories = f"{os.environ.get('PATH', '')}:{SEARCH_PATH}".split(":")
    paths = (f"{directory}/{name}" for directory in directories if directory.startswith("/"))
    return next((path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)), "")


class DraftDevice(NamedTuple):
    """A device of an offer with its containerEdits."""

    name: str
    edits: "Edits"
    coherent: bool | None = None


class Draft(NamedTuple):
    """An offer in the words of specifications; fields as there.  ``common``: containerEdits of every container."""

    source: str
    vendor: str
    device_class: str
    devices: tuple[DraftDevice, ...]
    common: "Edits"
    all_device: bool = True
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    max_version: str = ""


def make_draft(offer: "DeviceOffer", options: "GenerateOptions", hook: HookOptions) -> Draft:
    """Return an offer with edits for actions, and a note if its hooks start a program that is not there."""
    gids = offer.groups and options.additional_gids
    if offer.compat:
        driver, cuda, root = offer.compat
        hook = hook._replace(compat=EnableCudaCompat(driver, cuda, root or COMPAT_ROOT))
    hook = hook._replace(proc_driver=offer.proc_driver)
    known: dict[int, Edits] = {}  # the names of one device share their edits
    devices = []
    for device in offer.devices:
        edits = known.get(id(device.actions))
        if edits is None or device.env:
            edits = _device_edits(device.actions, gids, hook)
            known[id(device.actions)] = edits = {"env": list(device.env), **edits} if device.env else edits
        devices.append(DraftDevice(device.name, edits, device.coherent))
    hooked = [action for action in offer.hooked if hook.merged or not _is_device_link(action)]
    common = {
        "env": list(offer.env),
        **edits_from_actions(offer.base, None, gids),
        "hooks": hook_entries(hook_commands(hooked, hook), hook),
    }
    common = {name: value for name, value in common.items() if value}
    notes = offer.notes
    if common.get("hooks") and not os.access(hook.path, os.X_OK):
        notes += (f"hook {hook.path}: missing or not executable here: containers will not start without it",)
    head = (offer.source, offer.vendor, offer.device_class)
    return Draft(*head, tuple(devices), common, offer.all_device, notes, offer.skipped, offer.max_version)


def _device_edits(actions: "Sequence[Action]", gids: bool, hook: HookOptions) -> "Edits":
    """Return the edits of one device: nodes and mounts, and links to nodes unless our hook makes them."""
    links = () if hook.merged else tuple(action for action in actions if _is_device_link(action))
    kept = [action for action in actions if isinstance(action, (Node, AllowDevice, Bind))]
    only_links = hook._replace(enabled=tuple(name for name in ("create-symlinks",) if name in hook.enabled))
    return edits_from_actions([*kept, *links], only_links if links else None, gids)


def _is_device_link(action: "Action") -> bool:
    """Return whether an action is a link to a device node: of use only to a container that has that node."""
    return isinstance(action, Link) and action.container_path.startswith("/dev/")
