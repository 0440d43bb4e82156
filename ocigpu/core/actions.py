"""The vocabulary of a plan: small immutable actions, each with the reason it is there.

A plan is made in a vendor's folder of :mod:`ocigpu.gpus` and carried out elsewhere: :mod:`ocigpu.bundle` declares in
config.json what can be declared there, :mod:`ocigpu.provision` acts inside a container's namespaces, and
:mod:`ocigpu.cdi` writes specifications.  Paths named ``container_path`` are absolute paths inside the container;
``host_path`` are absolute, resolved paths on the host.
"""

from ocigpu.core.facts import DeviceNode, ImageFacts, to_data
from ocigpu.core.record import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, TypeAlias

FILE_OPTIONS = ("ro", "nosuid", "nodev")
"""Mount options of driver files."""
SOCKET_OPTIONS = ("nosuid", "nodev", "noexec")
"""Mount options of sockets and pipe directories: connecting needs write access."""


class Node(NamedTuple):
    """Make a device node (mknod; bind mount of the host's node where mknod is refused)."""

    node: DeviceNode
    reason: str

    def describe(self) -> str:
        n = self.node
        return f"node {n.container_path} c {n.major}:{n.minor} mode={n.mode:04o} uid={n.uid} gid={n.gid}"


class AllowDevice(NamedTuple):
    """Allow a character device in the container's device cgroup; ``access`` of the letters r, w, m."""

    major: int
    minor: int
    access: str
    reason: str

    def describe(self) -> str:
        return f"allow c {self.major}:{self.minor} {self.access}"


class JoinGroup(NamedTuple):
    """Put the container's process into a group of the host, which alone may open some of its nodes.

    Declared in config.json (:mod:`ocigpu.system.groups`): the groups of an existing process cannot be changed from
    outside.
    """

    gid: int
    reason: str

    def describe(self) -> str:
        return f"group {self.gid}"


class Bind(NamedTuple):
    """Bind-mount ``host_path`` on ``container_path``.

    ``options``: of "ro", "nosuid", "nodev", "noexec".  ``kind``: "file", "directory" or "socket" (a socket is mounted
    on an empty file).  ``optional``: a source that has vanished since the facts were read is skipped with a note, and
    any other failure becomes a note too.
    """

    host_path: str
    container_path: str
    options: tuple[str, ...]
    reason: str
    kind: str = "file"
    optional: bool = False

    def describe(self) -> str:
        return f"bind {self.host_path} -> {self.container_path} ({','.join(self.options)})"


class Tmpfs(NamedTuple):
    """Mount a small read-only tmpfs on ``container_path``, holding exactly ``files`` and ``directories``.

    ``files``: (relative path, permission bits, content); ``directories``: relative paths, parents included, made 0555.
    The target is created (0555) if it does not exist, except below /proc, where it must exist.
    ``optional``: what goes wrong is a note.
    """

    container_path: str
    mode: int
    files: tuple[tuple[str, int, str], ...]
    directories: tuple[str, ...]
    reason: str
    optional: bool = False

    def describe(self) -> str:
        paths = [*(name for name, _, _ in self.files), *self.directories]
        parents = {path.rpartition("/")[0] for path in paths}
        names = [path + "/" if path in self.directories else path for path in paths if path not in parents]
        return f"tmpfs {self.container_path} ({', '.join(names)})"


class Link(NamedTuple):
    """Make the symbolic link ``container_path`` -> ``target``; an existing link with another target is replaced.

    ``optional``: what goes wrong is a note.
    """

    container_path: str
    target: str
    reason: str
    optional: bool = False

    def describe(self) -> str:
        return f"link {self.container_path} -> {self.target}"


class RefreshLdCache(NamedTuple):
    """Let the container's loader find ``directories``: run the host's ldconfig, sandboxed, in the container's root.

    ``ldconfig``: host path.  ``directories``: container paths passed to ldconfig, the first one wins.  ``entries``:
    (name, container path, bits) to add to the image's cache instead; if that is not possible, all is undone and done
    again with ldconfig.
    """

    ldconfig: str
    directories: tuple[str, ...]
    reason: str
    entries: "tuple[tuple[str, str, int], ...]" = ()

    def describe(self) -> str:
        instead = f"merge /etc/ld.so.cache ({len(self.entries)} entries), or else " if self.entries else ""
        return f"{instead}ldconfig {' '.join(self.directories)}"


class TextFile(NamedTuple):
    """Write a small regular file; an equal one is left unchanged, any other content is replaced.

    Missing directories are made (0755).  ``only_if_missing``: an existing file of any content is left alone.
    ``optional``: what goes wrong is a note.
    """

    container_path: str
    mode: int
    content: str
    reason: str
    only_if_missing: bool = False
    optional: bool = False

    def describe(self) -> str:
        return f"file {self.container_path} mode={self.mode:04o} ({len(self.content)} bytes)"


class Mode(NamedTuple):
    """Set the permission bits of an existing file or directory; one that is missing is left out."""

    container_path: str
    mode: int
    reason: str

    def describe(self) -> str:
        return f"mode {self.container_path} {self.mode:04o}"


class ReadOnly(NamedTuple):
    """Make ``container_path`` read-only, by linux.readonlyPaths: the runtime does it, in procfs too."""

    container_path: str
    reason: str

    def describe(self) -> str:
        return f"read-only {self.container_path}"


class Mask(NamedTuple):
    """Hide ``container_path``, by linux.maskedPaths: an empty directory, or /dev/null, is mounted over it."""

    container_path: str
    reason: str

    def describe(self) -> str:
        return f"mask {self.container_path}"


if TYPE_CHECKING:
    Action: TypeAlias = (
        Node | AllowDevice | JoinGroup | Bind | Tmpfs | Link | TextFile | Mode | RefreshLdCache | ReadOnly | Mask
    )

KINDS = {
    Node: "node",
    AllowDevice: "allow-device",
    JoinGroup: "group",
    Bind: "bind",
    Tmpfs: "tmpfs",
    Link: "link",
    TextFile: "file",
    Mode: "mode",
    RefreshLdCache: "ldconfig",
    ReadOnly: "read-only",
    Mask: "mask",
}


class StartLdconfig(NamedTuple):
    """Prepare the process in which ldconfig will run for ``refresh``: it starts in parallel with other steps."""

    refresh: RefreshLdCache
    reason: str = "it is made ready beside other steps"

    def describe(self) -> str:
        return f"start {self.refresh.describe()}"


class FinishLdconfig(NamedTuple):
    """Wait until the ldconfig of ``refresh``, if one runs, has ended."""

    refresh: RefreshLdCache
    reason: str = "the cache is complete before the plan continues"

    def describe(self) -> str:
        return f"finish {self.refresh.describe()}"


if TYPE_CHECKING:
    Step: TypeAlias = Action | StartLdconfig | FinishLdconfig

STEPS = {**KINDS, StartLdconfig: "start-ldconfig", FinishLdconfig: "finish-ldconfig"}
"""Words for the steps of :meth:`Plan.steps`."""


def _concerns_ldconfig(action: "Action") -> bool:
    """Tell whether ldconfig may read what an action makes: its settings, directories, and names that contain ".so".

    In a directory it reads only such names (glibc, elf/ldconfig.c); a link may lead to one, and a mode may make one
    unreadable. /proc, /sys and /dev are hidden from it.
    """
    path = getattr(action, "container_path", "/dev/")
    directory = isinstance(action, Bind) and action.kind == "directory"
    of_interest = ".so" in path or directory or isinstance(action, (Link, Mode, TextFile))
    return of_interest and not path.startswith(("/proc/", "/sys/", "/dev/"))


class Plan(NamedTuple):
    """All steps for one container, in order: ``actions`` are the :attr:`base` and all ``parts`` together.

    ``parts``: the actions of each device, by its UUID (``NAME`` of an opt-in part, ``imex-channel=N``); actions that
    two devices share, such as the node of the GPU of two MIG devices, are in both parts.  In a specification the base
    is the containerEdits and each part is a device; attaching a device to a container carries out its part.
    ``gpus``/``mig_devices``: UUIDs of granted devices.  ``notes``: warnings, a sentence each.  Empty ``actions`` mean
    that the container requested nothing.
    """

    actions: "tuple[Action, ...]"
    gpus: tuple[str, ...] = ()
    mig_devices: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    driver_version: str = ""
    simulated: bool = False
    mode: str = "hook"
    image: ImageFacts = ImageFacts()
    parts: "dict[str, tuple[Action, ...]]" = {}

    @property
    def base(self) -> "tuple[Action, ...]":
        """The actions that do not depend on the container's devices, and views that show all of them."""
        brought = {action for part in self.parts.values() for action in part}
        return tuple(action for action in self.actions if action not in brought)

    def brought_by(self, devices: "Sequence[str]", had: "Sequence[str]" = ()) -> "list[Action]":
        """Return the parts of these devices, without actions that the devices in ``had`` have already brought."""
        there = {action for device in had for action in self.parts.get(device, ())}
        new = dict.fromkeys(action for device in devices for action in self.parts.get(device, ()))
        return [action for action in new if action not in there]

    def steps(self) -> "list[Step]":
        """Return the steps of the process in the container, in order; device rules and groups are set from outside.

        ldconfig takes longest, so each run of it overlaps the preceding actions whose results it does not read.  It
        ends before the actions that follow it, and before another run starts; it is killed together with its process.
        A cache that is merged comes after all of them: it must be newer than the directories that they change, so that
        the next start of the container finds it current.
        """
        done: "list[Step]" = []
        before: "list[Action]" = []
        for action in self.actions:
            if isinstance(action, RefreshLdCache) and action.entries:
                done += [*before, action]
                before = []
            elif isinstance(action, RefreshLdCache):
                done.append(StartLdconfig(action))
                done += [one for one in before if _concerns_ldconfig(one)]
                done.append(action)
                done += [one for one in before if not _concerns_ldconfig(one)]
                done.append(FinishLdconfig(action))
                before = []
            elif not isinstance(action, (AllowDevice, JoinGroup)):
                before.append(action)
        return [*done, *before]

    def without_merge(self) -> "Plan":
        """Return the plan that leaves every loader cache to ldconfig."""
        return self._replace(
            actions=tuple(
                action._replace(entries=()) if isinstance(action, RefreshLdCache) else action for action in self.actions
            )
        )

    def device_rules(self) -> tuple[AllowDevice, ...]:
        """Return the device cgroup rules of the plan."""
        return tuple(action for action in self.actions if isinstance(action, AllowDevice))

    def groups(self) -> tuple[int, ...]:
        """Return the groups of the host that the container's process is to be in."""
        return tuple(dict.fromkeys(action.gid for action in self.actions if isinstance(action, JoinGroup)))


def join_plans(plans: "Sequence[Plan]") -> Plan:
    """Join the plans of several vendors for one container; fields that exist once are taken from the first plan."""
    if len(plans) == 1:
        return plans[0]
    return plans[0]._replace(
        actions=tuple(dict.fromkeys(action for plan in plans for action in plan.actions)),
        gpus=tuple(uuid for plan in plans for uuid in plan.gpus),
        notes=tuple(note for plan in plans for note in plan.notes),
        simulated=any(plan.simulated for plan in plans),
        parts={device: part for plan in plans for device, part in plan.parts.items()},
    )


def node_actions(*nodes: DeviceNode, reason: str = "") -> "tuple[Node | AllowDevice, ...]":
    """Return the actions for device nodes: the node and the permission to read and write it."""
    pairs = ((Node(node, reason), AllowDevice(node.major, node.minor, "rw", reason)) for node in nodes)
    return tuple(action for pair in pairs for action in pair)


def join_groups(nodes: "Sequence[DeviceNode]") -> tuple[JoinGroup, ...]:
    """Return the groups that users other than root must be in to open these nodes, by id.

    As in NVIDIA's toolkit: the groups of nodes that belong to a group other than root and are not readable and writable
    for all.
    """
    paths: dict[int, list[str]] = {}
    for node in nodes:
        if node.gid != 0 and node.mode & 0o006 != 0o006:
            paths.setdefault(node.gid, []).append(f"{node.container_path} ({node.mode:04o})")
    return tuple(
        JoinGroup(gid, f"not all users may open {found[0]}" + (f" and {len(found) - 1} more" if found[1:] else ""))
        for gid, found in sorted(paths.items())
    )


def plan_to_json(plan: Plan) -> "dict[str, Any]":
    """Return the plan as JSON data; each action has "action" (its kind), its fields and "reason"."""
    data: dict[str, Any] = to_data(plan)
    del data["parts"]
    data["actions"] = [{"action": KINDS[type(action)], **to_data(action)} for action in plan.actions]
    for action in data["actions"]:
        if action.get("entries") == []:  # only settings that ask for a merge show it
            del action["entries"]
        if action["action"] != "bind" and action.get("optional") is False:
            del action["optional"]
    return data
