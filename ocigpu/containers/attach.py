"""``ocigpu attach`` and ``ocigpu detach``: GPUs for containers that run.

The commands change the device rules, the nodes and the view of /proc/driver/nvidia.  A container without a GPU also
gets everything that a hook would have given it.  A change is made completely or not at all: the journal of
:mod:`ocigpu.provision` undoes mounts and files, :mod:`ocigpu.containers.rules` the rules.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from ocigpu.containers.attached import AttachRecord, write_record
from ocigpu.containers.believed import read_cgroup
from ocigpu.containers.find import is_of_pod
from ocigpu.containers.inside import drop_view, read_view, remove_inside
from ocigpu.containers.live import Grant, Live, Now, change_grant, host_nodes, owners_of, plan_for, read_now
from ocigpu.containers.report import Process, find_holders
from ocigpu.containers.rules import Number, changed_rules, numbers_of, read_allowed
from ocigpu.core.actions import AllowDevice, Bind, Link, Node, Plan, Tmpfs
from ocigpu.core.errors import OcigpuError, RequestError, quoted
from ocigpu.core.facts import HostFacts
from ocigpu.gpus.nvidia.views import PROC_DRIVER
from ocigpu.gpus.request import Request
from ocigpu.gpus.vendors import load_vendor
from ocigpu.provision.apply import provision
from ocigpu.provision.device_filter import FilterRule

if TYPE_CHECKING:
    from ocigpu.core.actions import Action


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
    now = settle(live)
    wanted = find_devices(live, names)
    new = tuple(uuid for uuid in wanted if uuid not in now.devices)
    already = tuple(uuid for uuid in wanted if uuid in now.devices)
    if not new:
        return Changed((), already, now.devices)
    devices = (*now.devices, *new)
    owners = owners_of(live.facts)
    first = tuple(dict.fromkeys(owners[uuid] for uuid in new if owners[uuid] not in now.set_up))
    whole = plan_for(live, [uuid for uuid in devices if owners.get(uuid) in first])
    after = plan_for(live, devices, now.set_up)
    view = view_of(after)
    profile = [action for action in after.base if isinstance(action, Tmpfs)]
    wanted_actions = dict.fromkeys((*whole.actions, *after.brought_by(new, now.devices), *profile))
    actions = [action for action in wanted_actions if action not in view]
    again = numbers_of(live.facts, new)  # the numbers of a detached device: all that it had
    actions += [Node(node, "") for node in now.started.nodes.values() if (node.major, node.minor) in again]
    numbers = {(action.node.major, action.node.minor) for action in actions if isinstance(action, Node)}
    began_with = {(node.major, node.minor) for node in now.started.nodes.values()}
    record = now.record._replace(
        attached=tuple(uuid for uuid in devices if uuid not in now.started.devices),
        detached=tuple(uuid for uuid in now.record.detached if uuid not in new),
        files=(*now.record.files, *first),
        numbers=tuple(sorted({*now.record.numbers, *numbers} - began_with)),
    )
    grant = change_grant(live, now.started, devices, record.files)
    notes = give(live, now, grant, numbers, [*view, *actions], record, new)
    if is_of_pod(live.config):
        listed = ", ".join(new)
        notes += (f"the kubelet does not know: it counts {listed} as free, and may assign the same to another pod",)
    return Changed(new, already, devices, notes)


def give(
    live: Live,
    now: Now,
    grant: Grant,
    numbers: set[Number],
    actions: "Sequence[Action]",
    record: AttachRecord,
    new: tuple[str, ...] = (),
) -> tuple[str, ...]:
    """Make a container able to open ``numbers``, which ``grant`` allows, and carry out actions in it; returns notes.

    Then the record is written; before, which devices are ``new``.  Raises OcigpuError after everything was undone.
    """
    foreign = numbers - set(host_nodes(live.facts))
    if foreign:  # under any configuration
        raise OcigpuError("OCIGPU-INT-2", f"container {live.found.name}: {_listed(foreign)} are not the driver's")
    with _rules_for(live, grant, numbers, allow=True):
        viewed = any(isinstance(action, Tmpfs) and action.container_path == PROC_DRIVER for action in actions)
        dropped = viewed and drop_view(live.inside, now.record.view)
        begun = now.record
        if new:
            begun = begun._replace(unsure=new, under=read_view(live.inside) if viewed else 0)
            write_record(live.found, live.settings, begun)
        try:
            notes = _carry_out(live, [action for action in actions if not isinstance(action, AllowDevice)])
            if viewed:
                record = record._replace(view=read_view(live.inside))
            if record != begun:
                write_record(live.found, live.settings, record)
        except OcigpuError:
            if dropped or new:
                before = show(live, now.started, now.devices, now.record) if dropped else now.record
                write_record(live.found, live.settings, before)
            raise
    return notes


def settle(live: Live) -> Now:
    """Return what a container is to have, after what a command that was killed has left in it was removed.

    It could not be used: the rules are put back, or not given, whatever is killed.  Raises OcigpuError.
    """
    now = read_now(live)
    if not now.record.unsure:
        return now
    record = now.record._replace(unsure=(), under=0)
    known = owners_of(live.facts)
    left = [uuid for uuid in now.record.unsure if uuid in known and uuid not in now.devices]
    remove_inside(live.inside, _made_for(live, now.started, now.devices, left))
    top = read_view(live.inside) if now.record.under else 0
    if top != now.record.under:
        drop_view(live.inside, top)
    record = show(live, now.started, now.devices, record)
    write_record(live.found, live.settings, record)
    return now._replace(record=record)


def _made_for(live: Live, started: Grant, devices: Sequence[str], others: Sequence[str]) -> "list[Node | Link]":
    """Return the nodes and links that a container has for ``others`` and not for its ``devices``."""
    numbers = numbers_of(live.facts, others) - numbers_of(live.facts, devices)
    added = plan_for(live, (*devices, *others)).brought_by(others, devices)
    nodes = [*started.nodes.values(), *(action.node for action in added if isinstance(action, Node))]
    links = [action for action in added if isinstance(action, Link)]
    return [*(Node(node, "") for node in nodes if (node.major, node.minor) in numbers), *links]


def detach(live: Live, names: Sequence[str], force: bool = False) -> Changed:
    """Take GPUs or MIG devices from a running container.

    Once the device cgroup denies them they are gone; then nodes are removed, and what cannot be removed is a note.
    Raises OcigpuError with nothing changed: OCIGPU-CTR-7 when processes have one open and it is not to be forced,
    OCIGPU-CTR-5 when its rules allow more than single devices, so that this one cannot be taken out of them.
    """
    now = settle(live)
    named = find_devices(live, names)
    gone = tuple(uuid for uuid in named if uuid in now.devices)
    already = tuple(uuid for uuid in named if uuid not in now.devices)
    if not gone:
        return Changed((), already, now.devices)
    devices = tuple(uuid for uuid in now.devices if uuid not in gone)
    numbers = numbers_of(live.facts, gone) - numbers_of(live.facts, devices)
    made = _made_for(live, now.started, devices, gone)
    nodes = [action.node for action in made if isinstance(action, Node)]
    names_of = {(node.major, node.minor): node.container_path for node in nodes}
    held, unknown = find_holders([live.found], names_of)[live.found.state_file]
    if (held or unknown) and not force:
        raise OcigpuError("OCIGPU-CTR-7", f"container {live.found.name}: {describe_holders(held) or unknown[0]}")
    record = now.record._replace(
        attached=tuple(uuid for uuid in now.record.attached if uuid not in gone),
        detached=tuple(uuid for uuid in now.started.devices if uuid not in devices),
        numbers=tuple(number for number in now.record.numbers if number not in numbers),
    )
    take(live, change_grant(live, now.started, devices, record.files), numbers, record._replace(unsure=gone))
    held, unknown = find_holders([live.found], names_of)[live.found.state_file]
    notes = [*unknown, *remove_inside(live.inside, made)]
    try:
        write_record(live.found, live.settings, show(live, now.started, devices, record))
    except OcigpuError as error:
        notes.append(f"{PROC_DRIVER} may still show it: {error.message}")
    return Changed(gone, already, devices, tuple(notes), held)


def show(live: Live, started: Grant, devices: Sequence[str], record: AttachRecord) -> AttachRecord:
    """Make /proc/driver/nvidia of a container show these devices; returns the record with the mount that does.

    What it was started with is under all that came later.  Raises OcigpuError.
    """
    drop_view(live.inside, record.view)
    if not record.files and set(devices) == set(started.devices):
        return record._replace(view=0)
    view = view_of(plan_for(live, devices, (*started.set_up, *record.files)))
    _carry_out(live, view)
    return record._replace(view=read_view(live.inside) if view else 0)


def _carry_out(live: Live, actions: "Sequence[Action]") -> tuple[str, ...]:
    plan = Plan(tuple(actions), simulated=live.facts.simulated, image=live.image)
    return provision(plan, live.found.pid, live.found.rootfs, live.config, live.settings, caller=live.caller)


def take(live: Live, grant: Grant, numbers: set[Number], record: AttachRecord | None) -> None:
    """Make a container unable to open ``numbers``, which are not granted, and write the record if there is one.

    Raises OcigpuError with nothing changed.
    """
    with _rules_for(live, grant, numbers, allow=False):
        if record is not None:
            write_record(live.found, live.settings, record)


@contextmanager
def _rules_for(live: Live, grant: Grant, numbers: set[Number], allow: bool) -> Iterator[None]:
    """Have the device cgroup allow or deny ``numbers`` while the block runs, and for good if it ends well.

    Raises OcigpuError OCIGPU-CTR-5 where that cannot be.
    """
    allowed = allowed_now(live, numbers)
    wrong = numbers - allowed if allow else numbers & allowed
    change = [] if live.settings.no_cgroups else [AllowDevice(*number, "rw", "") for number in sorted(wrong)]
    policy = _policy(live, grant, change, denied=not allow)
    changes: list[Sequence[AllowDevice]] = [change, ()] if allow else [(), change]
    with changed_rules(live.inside.proc_fd, changes[0], changes[1], policy, read_cgroup(live.found)):
        allowed = allowed_now(live, numbers)
        if wrong := numbers - allowed if allow else numbers & allowed:
            hint = "A cgroup above the container's has rules of its own (its engine's, or a unit's of systemd)."
            if not allow:
                hint = (
                    "A rule for many devices (as c 195:*) allows it, and cgroup v1 cannot take one device out of that."
                )
            if live.settings.no_cgroups:
                hint = "The setting no-cgroups leaves device cgroups alone."
            cause = f"its device cgroup still {'denies' if allow else 'allows'} {_listed(wrong)}"
            raise OcigpuError("OCIGPU-CTR-5", f"container {live.found.name}: {cause}", hint)
        yield


def _policy(live: Live, grant: Grant, change: Sequence[AllowDevice], denied: bool = False) -> list[FilterRule]:
    """Return the whole device policy after a change, for cgroup v2, where there is one (``denied``: it takes away).

    The rules that the runtime has recorded, and of the driver's devices those that may be opened now.
    """
    if not change:
        return grant.rules
    kept = allowed_now(live, set(host_nodes(live.facts)))
    changed = [FilterRule(not denied, "c", rule.major, rule.minor, rule.access) for rule in change]
    return [*grant.rules, *(FilterRule(True, "c", *number, "rw") for number in sorted(kept)), *changed]


def find_devices(live: Live, names: Sequence[str]) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs and MIG devices of these names; raises RequestError OCIGPU-DEV-1 and the like."""
    for name in names:
        if name in ("all", "none", "void", "") or "," in name:
            raise RequestError("OCIGPU-DEV-1", f"--gpu {quoted(name)}: name one GPU; several: --gpu A --gpu B")
    return tuple(dict.fromkeys(uuid for name in names for uuid in _find_device(name, live.facts)))


def _find_device(name: str, facts: HostFacts) -> tuple[str, ...]:
    """Return the UUIDs of the GPU or MIG device of a name, by the first vendor that knows it."""
    unknown = None
    for one in facts.each:
        try:
            found = load_vendor(one.vendor).select_devices(Request("list", (name,), "--gpu"), one)
        except RequestError as error:
            unknown = unknown or error
        else:
            return (*(gpu.uuid for gpu in found.gpus), *(mig.uuid for _, mig in found.mig_devices))
    raise unknown or RequestError("OCIGPU-DEV-1", f"--gpu {quoted(name)}: this host has no GPU")


def view_of(plan: Plan) -> "tuple[Action, ...]":
    """Return the actions that make all of /proc/driver/nvidia: a new view is mounted over the former one."""
    tops = (PROC_DRIVER, PROC_DRIVER.rpartition("/")[0])
    return tuple(
        action
        for action in plan.actions
        if isinstance(action, Bind | Tmpfs)
        and (action.container_path in tops or action.container_path.startswith(f"{PROC_DRIVER}/"))
    )


def _listed(numbers: set[Number]) -> str:
    return ", ".join(f"c {major}:{minor}" for major, minor in sorted(numbers))


def allowed_now(live: Live, numbers: set[Number]) -> frozenset[Number]:
    """Return which of these devices the container's device cgroup allows; raises OcigpuError OCIGPU-CTR-4."""
    (allowed,) = read_allowed([live.found], numbers, read_cgroup(live.found))
    if allowed.unknown:
        raise OcigpuError("OCIGPU-CTR-4", f"container {live.found.name}: {allowed.unknown}")
    return allowed.numbers


def describe_holders(held: Sequence[Process]) -> str:
    """Return the holders as text, "process 4711 (python) has /dev/nvidia3 open"."""
    shown = [f"process {one.pid} ({one.command}) has {', '.join(one.devices)} open" for one in held[:8]]
    return "; ".join(shown) + (f"; and {len(held) - 8} more" if len(held) > 8 else "")
