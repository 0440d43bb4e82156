"""``ocigpu attach`` and ``ocigpu detach``: GPUs for containers that run.

Attached are the device rules, the nodes, the view of /proc/driver/nvidia, and for a container that had no GPU all that
a hook would have given it.  Everything or nothing: what is mounted and made is undone by the journal of
:mod:`ocigpu.provision`, the rules by :mod:`ocigpu.containers.guard`.
"""

import errno
import os
import stat
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ocigpu.actions import AllowDevice, Bind, Link, Node, Plan, RefreshLdCache, Tmpfs
from ocigpu.containers.asked import ask_child
from ocigpu.containers.attached import Record, read_record, write_record
from ocigpu.containers.granted import read_allowed
from ocigpu.containers.guard import changed_rules
from ocigpu.containers.live import Grant, Live, Number, change_grant, current_devices, plan_for, started_with
from ocigpu.containers.report import Process, find_holders
from ocigpu.errors import OcigpuError, RequestError
from ocigpu.linux import libc
from ocigpu.linux.paths import open_parent
from ocigpu.provision.apply import provision
from ocigpu.provision.container import Container, join, open_root, use_owner_ids
from ocigpu.provision.mounts import enter_own_proc, read_mnt_id
from ocigpu.request import Request
from ocigpu.selection import select_devices
from ocigpu.views import PROC_DRIVER

if TYPE_CHECKING:
    from ocigpu.actions import Action


class Changed(NamedTuple):
    """What came of it: UUIDs that were ``changed``, those that were so already, the UUIDs it has now, and notes.

    ``held``: processes that have a device open which was taken away.
    """

    changed: tuple[str, ...]
    already: tuple[str, ...]
    devices: tuple[str, ...]
    notes: tuple[str, ...] = ()
    held: tuple[Process, ...] = ()


def attach(live: Live, names: Sequence[str]) -> Changed:
    """Give a running container more GPUs or MIG devices, named by index, UUID or PCI bus id.

    Raises OcigpuError with nothing changed: RequestError for a device that is not there, OCIGPU-CTR-5 when a cgroup
    above the container's denies the device.
    """
    started, record = started_with(live), read_record(live.found, live.settings)
    have = current_devices(started, record)
    wanted = find_devices(live, names)
    new = tuple(uuid for uuid in wanted if uuid not in have)
    already = tuple(uuid for uuid in wanted if uuid in have)
    if not new:
        return Changed((), already, have)
    devices = (*have, *new)
    then = change_grant(live, started, devices)
    actions = missing_actions(live, started, have, devices)
    numbers = {(action.node.major, action.node.minor) for action in actions if isinstance(action, Node)}
    record = Record(
        tuple(uuid for uuid in devices if uuid not in started.devices),
        tuple(uuid for uuid in record.detached if uuid not in new),
    )
    notes = give(live, then, numbers, actions, record)
    return Changed(new, already, devices, notes)


def give(
    live: Live, grant: Grant, numbers: set[Number], actions: "Sequence[Action]", record: Record | None
) -> tuple[str, ...]:
    """Make a container able to open ``numbers``, which are granted, and carry out actions in it; returns notes.

    Then the ``record``, if there is one, is written.  Raises OcigpuError after everything was undone.
    """
    allow = [] if live.settings.no_cgroups else _rules(numbers - allowed_now(live, numbers))
    with changed_rules(live.inside.proc_fd, allow, (), grant.rules):
        refused = numbers - allowed_now(live, numbers)
        if refused:
            raise OcigpuError(
                "OCIGPU-CTR-5",
                f"container {live.found.name}: its device cgroup still denies {_listed(refused)}",
                "A cgroup above the container's has rules of its own (its engine's, or a unit's of systemd)."
                if not live.settings.no_cgroups
                else "The setting no-cgroups leaves device cgroups alone.",
            )
        rest = tuple(action for action in actions if not isinstance(action, AllowDevice))
        plan = Plan(rest, simulated=live.facts.simulated, image=live.image)
        notes = provision(plan, live.found.pid, live.found.rootfs, live.config, live.settings, caller=live.caller)
        if record is not None:
            write_record(live.found, live.settings, record)
    return notes


def detach(live: Live, names: Sequence[str], force: bool = False) -> Changed:
    """Take GPUs or MIG devices from a running container.

    Once the device cgroup denies them they are gone; then nodes are removed, and what cannot be removed is a note.
    Raises OcigpuError with nothing changed: OCIGPU-CTR-7 when processes have one open and it is not to be forced,
    OCIGPU-CTR-5 when its rules allow more than single devices, so that this one cannot be taken out of them.
    """
    started, record = started_with(live), read_record(live.found, live.settings)
    have = current_devices(started, record)
    named = find_devices(live, names)
    gone = tuple(uuid for uuid in named if uuid in have)
    already = tuple(uuid for uuid in named if uuid not in have)
    if not gone:
        return Changed((), already, have)
    devices = tuple(uuid for uuid in have if uuid not in gone)
    then = change_grant(live, started, devices)
    removed = _not_in(plan_for(live, have), plan_for(live, devices))
    nodes = [action for action in removed if isinstance(action, Node)]
    numbers = {(action.node.major, action.node.minor): action.node.container_path for action in nodes}
    held, holder_notes = find_holders(live.found, numbers)
    if held and not force:
        raise OcigpuError("OCIGPU-CTR-7", f"container {live.found.name}: {describe_holders(held)}")
    record = Record(
        tuple(uuid for uuid in record.attached if uuid not in gone),
        tuple(uuid for uuid in started.devices if uuid not in devices),
    )
    take(live, then, set(numbers), record)
    notes = [*holder_notes, *remove_inside(live.inside, removed)]
    try:
        view = view_of(plan_for(live, devices))
        plan = Plan(view, simulated=live.facts.simulated, image=live.image)
        notes += provision(plan, live.found.pid, live.found.rootfs, live.config, live.settings, caller=live.caller)
    except OcigpuError as error:
        notes.append(f"{PROC_DRIVER} still shows it: {error.message}")
    return Changed(gone, already, devices, tuple(notes), held)


def take(live: Live, grant: Grant, numbers: set[Number], record: Record | None) -> None:
    """Make a container unable to open ``numbers``, which are not granted, and write the record if there is one.

    Raises OcigpuError with nothing changed.
    """
    deny = [] if live.settings.no_cgroups else _rules(numbers & allowed_now(live, numbers))
    with changed_rules(live.inside.proc_fd, (), deny, grant.rules):
        left = numbers & allowed_now(live, numbers)
        if left:
            raise OcigpuError(
                "OCIGPU-CTR-5",
                f"container {live.found.name}: its device cgroup still allows {_listed(left)}",
                "A rule of its config.json allows more than that device (c 195:* or all of them), and cgroup v1 cannot"
                " take one out of it."
                if not live.settings.no_cgroups
                else "The setting no-cgroups leaves device cgroups alone.",
            )
        if record is not None:
            write_record(live.found, live.settings, record)


def find_devices(live: Live, names: Sequence[str]) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs and MIG devices of these names; raises RequestError OCIGPU-DEV-1 and the like."""
    for name in names:
        if name in ("all", "none", "void", ""):
            raise RequestError("OCIGPU-DEV-1", f"--gpu {name}: name one GPU; several: --gpu A --gpu B")
    selection = select_devices(Request(selection="list", devices=tuple(names), source="--gpu"), live.facts)
    return (*(gpu.uuid for gpu in selection.gpus), *(mig.uuid for _, mig in selection.mig_devices))


def missing_actions(live: Live, started: Grant, have: Sequence[str], devices: Sequence[str]) -> "list[Action]":
    """Return what must be done for a container that has some devices to have others, too."""
    after = plan_for(live, devices)
    if not started.is_set_up and not have:
        return list(after.actions)
    before = plan_for(live, have)
    view = view_of(after)
    added = _not_in(after, before)
    return [*view, *(action for action in added if action not in view and not isinstance(action, RefreshLdCache))]


def view_of(plan: Plan) -> "tuple[Action, ...]":
    """Return what makes /proc/driver/nvidia, all of it: a new view goes over the one before."""
    tops = (PROC_DRIVER, PROC_DRIVER.rpartition("/")[0])
    return tuple(
        action
        for action in plan.actions
        if isinstance(action, Bind | Tmpfs)
        and (action.container_path in tops or action.container_path.startswith(f"{PROC_DRIVER}/"))
    )


def _not_in(plan: Plan, other: Plan) -> "list[Action]":
    """Return the actions of a plan that another does not have, whatever their reasons."""
    there = {_key(action) for action in other.actions}
    return [action for action in plan.actions if _key(action) not in there]


def _key(action: "Action") -> tuple[object, ...]:
    return (type(action), *action._replace(reason=""))


def _rules(numbers: set[Number]) -> list[AllowDevice]:
    return [AllowDevice(major, minor, "rw", "") for major, minor in sorted(numbers)]


def _listed(numbers: set[Number]) -> str:
    return ", ".join(f"c {major}:{minor}" for major, minor in sorted(numbers))


def allowed_now(live: Live, numbers: set[Number]) -> frozenset[Number]:
    """Return which of these devices the container's device cgroup allows; raises OcigpuError OCIGPU-CTR-4."""
    allowed = read_allowed(live.found, numbers)
    if allowed.unknown:
        raise OcigpuError("OCIGPU-CTR-4", f"container {live.found.name}: {allowed.unknown}")
    return allowed.numbers


def describe_holders(held: Sequence[Process]) -> str:
    """Return who has what open, "process 4711 (python) has /dev/nvidia3 open"."""
    shown = [f"process {one.pid} ({one.command}) has {', '.join(one.devices)} open" for one in held[:8]]
    return "; ".join(shown) + (f"; and {len(held) - 8} more" if len(held) > 8 else "")


# in the container


def remove_inside(container: Container, actions: "Sequence[Action]") -> list[str]:
    """Remove the nodes and links that these actions made in a container; returns a note for each that stays.

    Only what is as the action made it is removed.
    """
    wanted = [action for action in actions if isinstance(action, Node | Link)]
    try:
        found: list[str] = ask_child(lambda: _remove(container, wanted))
    except OSError as error:
        return [f"its nodes could not be removed, and cannot be opened: {error.strerror or error}"]
    return found


def _remove(container: Container, actions: Sequence[Node | Link]) -> list[str]:
    own_proc_fd = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    sys.meta_path.clear()  # the search path leads to the image's files
    join(container)
    enter_own_proc(own_proc_fd)
    root_fd = open_root(container)
    if container.other_user_namespace and not container.join_user:
        use_owner_ids(container)
    notes = []
    for action in actions:
        path = action.node.container_path if isinstance(action, Node) else action.container_path
        try:
            parent_fd, name = open_parent(root_fd, path)
            try:
                if isinstance(action, Node):
                    _remove_node(parent_fd, name, os.makedev(action.node.major, action.node.minor))
                elif os.readlink(name, dir_fd=parent_fd) == action.target:
                    os.unlink(name, dir_fd=parent_fd)
            finally:
                os.close(parent_fd)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno == errno.EINVAL and isinstance(action, Link):  # something else than a link
                continue
            notes.append(f"{path} stays, and cannot be opened: {error.strerror}")
    return notes


def _remove_node(parent_fd: int, name: str, rdev: int) -> None:
    """Remove a node, or what it is mounted on; anything of another number stays."""
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
    try:
        status = os.fstat(fd)
        if not stat.S_ISCHR(status.st_mode) or status.st_rdev != rdev:
            return
        mounted = read_mnt_id(fd) != read_mnt_id(parent_fd)
        if mounted:
            libc.umount2(f"fd/{fd}", libc.MNT_DETACH)
    finally:
        os.close(fd)
    under = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    if not mounted or (stat.S_ISREG(under.st_mode) and under.st_size == 0):
        os.unlink(name, dir_fd=parent_fd)
