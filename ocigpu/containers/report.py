"""What a container has of the host's GPUs: by its state, its config.json, its /dev, its cgroup and its processes."""

import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from ocigpu.bundle.edit import PROC_DRIVER
from ocigpu.containers.attached import AttachRecord, read_record
from ocigpu.containers.believed import Container, read_config_of
from ocigpu.containers.child import ask_each, look_into
from ocigpu.containers.rules import Allowed, Granted, Number, listed_nodes, numbers_of, read_allowed, read_granted
from ocigpu.core.config_json import (
    CDI_DEVICES,
    DECLARED,
    OUR_HOOK,
    VENDOR_HOOKS,
    get_list,
    get_object,
    is_path,
    is_stub,
)
from ocigpu.core.errors import OcigpuError, SpecError
from ocigpu.core.facts import DeviceNode, HostFacts, capability_path
from ocigpu.core.gate import is_gpu_of
from ocigpu.core.record import NamedTuple
from ocigpu.core.settings import Settings
from ocigpu.core.tokens import MOUNT_SOURCE
from ocigpu.core.vendors import GPU_VENDORS
from ocigpu.gpus.request import Request
from ocigpu.gpus.vendors import parse_request
from ocigpu.provision.image import read_device
from ocigpu.system.proc import ProcCgroup, read_cgroup, read_command

VENDOR_CDI_HOOKS = ("nvidia-ctk", "nvidia-cdi-hook")
MAX_DESCRIPTORS = 65536
"""Open files looked at of one process."""


class Device(NamedTuple):
    """One of the host's NVIDIA devices as a container has it.

    ``name``: "GPU 0", "MIG 0:1", or the path.  ``granted``: by the rules of its config.json or attached later, and not
    detached since.  ``inside``: it has the node.  ``allowed``: by its cgroup now, None when that is not known.
    """

    name: str
    path: str
    major: int
    minor: int
    granted: bool
    inside: bool
    allowed: bool | None


class GpuState(NamedTuple):
    """A GPU or MIG device that a container has, or had: ``state`` is of :func:`_state`; ``mig`` "" or "0:1"."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not needed here
    uuid: str
    model: str
    mig: str
    state: str


class Process(NamedTuple):
    """A process that holds devices open: its number here, its name as it chose it, names of the devices."""

    pid: int
    command: str
    devices: tuple[str, ...]


class Report(NamedTuple):
    """The facts about one container; ``mode``: of :func:`read_mode`; ``lost``: paths of granted devices it has lost.

    ``beyond``: paths of devices that its cgroup allows and that it was not granted.  ``attached``, ``detached``: UUIDs
    of devices that it was given, or lost, after its start.  ``unanswered``: what requests GPUs in its configuration, as
    text, if it has none.  ``refused``: the same if settings are the reason, and which of them.
    """

    container: Container
    mode: str
    gpus: tuple[GpuState, ...]
    devices: tuple[Device, ...]
    processes: tuple[Process, ...]
    lost: tuple[str, ...]
    beyond: tuple[str, ...]
    attached: tuple[str, ...]
    detached: tuple[str, ...]
    notes: tuple[str, ...]
    unanswered: str = ""
    refused: str = ""


def host_nodes(facts: HostFacts) -> dict[DeviceNode, str]:
    """Return the NVIDIA device nodes of the host that containers get, each with its name, in the order of a plan."""
    nodes = {node: node.container_path for node in facts.control_nodes}
    minors = {mig.gi_minor: f"{gpu.index}:{mig.index}" for gpu in facts.gpus for mig in gpu.mig_devices}
    minors |= {mig.ci_minor: f"{gpu.index}:{mig.index}" for gpu in facts.gpus for mig in gpu.mig_devices}
    nodes |= {gpu.node: f"GPU {gpu.index}" for gpu in facts.gpus if gpu.node is not None}
    nodes |= {node: f"GPU {gpu.index} (DRM)" for gpu in facts.gpus for node in gpu.drm_nodes}
    return nodes | {node: f"MIG {minors[node.minor]}" for _, node in facts.cap_nodes if node.minor in minors}


def read_mode(config: dict[str, Any]) -> str:
    """Return how a container got its GPUs, by its config.json.

    "spec", "hook": by this project; "vendor": by the vendor's hook; "cdi": by CDI devices with a hook or an annotation,
    injected by any program; "": none of these: its devices are in its configuration (``--device``, ``--privileged``).
    """
    hooks = get_object(config, "hooks")
    early = [_program(entry) for stage in ("prestart", "createRuntime") for entry in get_list(hooks, stage)]
    late = [_program(entry) for stage in ("createContainer", "startContainer") for entry in get_list(hooks, stage)]
    if any(map(_is_ours, early)):
        return "hook"
    for name, mode in ((CDI_DEVICES, "cdi"), (DECLARED, "spec")):
        if name in get_object(config, "annotations"):
            return mode
    if any(os.path.basename(path) in VENDOR_HOOKS for path, _ in early):
        return "vendor"
    if any(_is_ours(hook) or os.path.basename(hook[0]) in VENDOR_CDI_HOOKS for hook in late):
        return "cdi"
    return "cdi" if any(name.startswith("cdi.k8s.io/") for name in get_object(config, "annotations")) else ""


def _program(hook: object) -> tuple[str, str]:
    """Return path and argv[0] of a hook, "" for what it has not."""
    path = hook.get("path") if isinstance(hook, dict) else None
    first = get_list(hook, "args")[:1]
    return path if isinstance(path, str) else "", first[0] if first and isinstance(first[0], str) else ""


def _is_ours(hook: tuple[str, str]) -> bool:
    return hook[1] == OUR_HOOK or _is_our_program(hook[0])


def _is_our_program(path: str) -> bool:
    """Tell whether a hook's program is ours, which may be installed under the vendor's name too."""
    if not is_path(path) or not path.startswith("/"):
        return False
    if os.path.basename(os.path.realpath(path)) == OUR_HOOK:
        return True
    if os.path.basename(path) not in VENDOR_HOOKS:
        return False
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:  # opened only if it is a file: config.json may be of a bundle that anybody has made
            readable = stat.S_ISREG(os.fstat(fd).st_mode)
            head = b""
            if readable:
                with open(f"/proc/self/fd/{fd}", "rb") as file:
                    head = file.read(4096)
        finally:
            os.close(fd)
    except OSError:  # gone, or an unreadable binary
        return False
    return is_stub(head, b"ocigpu")


def make_reports(containers: Sequence[Container], facts: HostFacts, settings: Settings) -> list[Report]:
    """Return the report of each container; opens and changes nothing in it.  Needs root for containers of root."""
    nodes = host_nodes(facts)
    numbers = [(node.major, node.minor) for node in nodes]
    running = [container for container in containers if container.pid]
    looks = dict(zip(running, look_into(running, partial(_look_for_nodes, list(nodes))), strict=True))
    drafts = [_read(container, looks.get(container), nodes, facts, settings) for container in containers]
    given = [draft.container for draft in drafts if draft.container.pid and (draft.inside or draft.narrow)]
    allowed = dict(zip(given, read_allowed(given, numbers), strict=True))
    reports = [_make_report(draft, allowed.get(draft.container, Allowed()), nodes, facts) for draft in drafts]
    names = {(node.major, node.minor): name for node, name in nodes.items()}
    held = find_holders([report.container for report in reports if report.gpus and report.container.pid], names)
    return [
        report._replace(processes=processes, notes=(*report.notes, *notes))
        for report in reports
        for processes, notes in (held.get(report.container.state_file, ((), ())),)
    ]


class _Draft(NamedTuple):
    """The facts about a container before its cgroup is checked: ``inside``, paths of nodes that it has."""

    container: Container
    mode: str
    granted: Granted
    record: AttachRecord
    detached: frozenset[Number]
    inside: frozenset[str]
    unanswered: Request
    refused: str
    why_unanswered: list[str]
    notes: list[str]

    @property
    def narrow(self) -> frozenset[Number]:
        """The devices that it was given by number, or that were taken from it."""
        granted = frozenset[Number]() if self.granted.everything else self.granted.numbers
        return granted | frozenset(self.record.numbers) | self.detached


def _read(
    container: Container,
    look: tuple[list[str] | None, str] | None,
    nodes: dict[DeviceNode, str],
    facts: HostFacts,
    settings: Settings,
) -> _Draft:
    """Return the facts in a container's files; ``look``: paths of nodes in a running one, or why they are unknown."""
    notes: list[str] = []
    try:
        config = read_config_of(container).config
    except SpecError as error:
        config = {}
        notes.append(error.message)
    granted = read_granted(config, [(node.major, node.minor) for node in nodes])
    if look is None:  # it has ended: what it would get again
        listed = listed_nodes(config)
        inside, problem = [node.container_path for node in nodes if node.container_path in listed], ""
    else:
        inside, problem = look[0] or [], look[1]
    notes += [problem] if problem else []
    record = read_record(container, settings) if container.pid else AttachRecord()
    had = {*granted.numbers, *record.numbers, *((n.major, n.minor) for n in nodes if n.container_path in inside)}
    detached = _detached_numbers(facts, record.detached, had)
    why: list[str] = []
    request, refused = Request(), ""
    if container.pid:
        request = read_unanswered(config, container.bundle, settings, why)
        refused = "" if request.source else read_refused(config, container.bundle, settings)
    mode = read_mode(config)
    return _Draft(container, mode, granted, record, detached, frozenset(inside), request, refused, why, notes)


def _make_report(draft: _Draft, allowed: Allowed, nodes: dict[DeviceNode, str], facts: HostFacts) -> Report:
    container, mode, granted, record, detached, inside, unanswered, refused, why_unanswered, notes = draft
    narrow, attached = draft.narrow, frozenset(record.numbers)
    if allowed.unknown:
        notes.append(allowed.unknown)
    unknown = not container.pid or bool(allowed.unknown)
    devices = {
        number: Device(
            name,
            node.container_path,
            *number,
            number in (granted.numbers | attached) - detached,
            node.container_path in inside,
            None if unknown else number in allowed.numbers,
        )
        for node, name in nodes.items()
        for number in ((node.major, node.minor),)
    }
    had = {number: device for number, device in devices.items() if device.inside or number in narrow}
    hooked = mode in ("hook", "vendor") or not granted.has_rules  # hooks change cgroups without a word in config.json
    lost = tuple(
        device.path
        for number, device in had.items()
        if device.allowed is False and (device.granted or (hooked and number not in detached))
    )
    beyond = tuple(
        device.path
        for number, device in devices.items()
        if device.allowed and not device.granted and (number in detached or not (hooked or granted.everything))
    )
    gpus = tuple(_gpu_states(facts, had, lost, detached))
    return Report(
        container=container,
        mode=mode,
        gpus=gpus,
        devices=tuple(had.values()),
        processes=(),
        lost=lost,
        beyond=beyond,
        attached=record.attached,
        detached=record.detached,
        notes=(*notes, *(() if gpus else why_unanswered)),
        unanswered="" if gpus else unanswered.source,
        refused="" if gpus else refused,
    )


def read_unanswered(config: dict[str, Any], bundle: str, settings: Settings, notes: list[str]) -> Request:
    """Return the GPU request of a container that has no GPU, if it makes one.

    A runtime or hook answers a variable, mount or annotation; the container may have been started without it.
    """
    try:
        request = parse_request(config, settings, bundle)
    except OcigpuError as error:
        notes.append(error.message)
        return Request()
    by_name = any(is_gpu_of(vendor, name) for vendor in GPU_VENDORS for name in request.cdi_devices)
    return request if by_name or request.selection in ("all", "list") else Request()


def read_refused(config: dict[str, Any], bundle: str, settings: Settings) -> str:
    """Return the request that only settings deny to a container, and which settings, as text; "" for none."""
    wide = settings._replace(
        accept_nvidia_visible_devices_envvar_when_unprivileged=True,
        accept_nvidia_visible_devices_as_volume_mounts=True,
        supported_driver_capabilities="all",
    )
    request = read_unanswered(config, bundle, wide, [])
    if not request.source:
        return ""
    notes: list[str] = []
    if read_unanswered(config, bundle, settings, notes).source:
        return ""
    by_mount = request.source == MOUNT_SOURCE
    keys = "accept-nvidia-visible-devices-as-volume-mounts is false" if by_mount else ""
    if not by_mount and not settings.accept_nvidia_visible_devices_envvar_when_unprivileged:
        keys = "accept-nvidia-visible-devices-envvar-when-unprivileged is false"
    return f"{request.source}: {keys or '; '.join(notes) or 'the settings do not permit it'}"


def detached_paths(report: Report, facts: HostFacts) -> frozenset[str]:
    """Return the container paths of detached devices: nodes, and entries below /proc."""
    had = [(device.major, device.minor) for device in report.devices if device.granted or device.inside]
    numbers = _detached_numbers(facts, report.detached, had)
    nodes = {node.container_path for node in host_nodes(facts) if (node.major, node.minor) in numbers}
    lost = [gpu for gpu in facts.gpus if gpu.node and (gpu.node.major, gpu.node.minor) in numbers]
    shown = [f"gpus/{gpu.proc_name}" for gpu in lost if gpu.proc_name]
    mine = [name for name, node in facts.cap_nodes if (node.major, node.minor) in numbers]
    shown += [f"capabilities/{capability_path(name)}" for name in mine]
    return frozenset(nodes | {f"{PROC_DRIVER}/{path}" for path in shown})


def _detached_numbers(facts: HostFacts, detached: Sequence[str], had: Collection[Number]) -> frozenset[Number]:
    """Return the devices that were taken from a container with these GPUs and MIG devices.

    Not those that the other MIG devices of a GPU need; by what the container ``had``.
    """
    capabilities = {node.minor: (node.major, node.minor) for _, node in facts.cap_nodes}
    others = [mig for gpu in facts.gpus for mig in gpu.mig_devices if mig.uuid not in detached]
    kept = [m.uuid for m in others if capabilities.get(m.gi_minor) in had and capabilities.get(m.ci_minor) in had]
    return frozenset(numbers_of(facts, detached) - numbers_of(facts, kept))


def _gpu_states(
    facts: HostFacts, had: dict[Number, Device], lost: tuple[str, ...], detached: frozenset[Number]
) -> Iterable[GpuState]:
    """Return the GPUs of which the container has the node or the rule; for a partitioned one, its MIG devices."""
    by_minor = {node.minor: had.get((node.major, node.minor)) for _, node in facts.cap_nodes}
    for gpu in facts.gpus:
        device = had.get((gpu.node.major, gpu.node.minor)) if gpu.node else None
        if device is None:
            continue
        parts = [
            (mig, [device, *filter(None, (by_minor.get(mig.gi_minor), by_minor.get(mig.ci_minor)))])
            for mig in gpu.mig_devices
        ]
        owned = [(mig, nodes) for mig, nodes in parts if len(nodes) == 3]
        for mig, nodes in owned:
            yield GpuState(gpu.index, mig.uuid, mig.profile, f"{gpu.index}:{mig.index}", _state(nodes, lost, detached))
        if not owned:
            yield GpuState(gpu.index, gpu.uuid, gpu.model, "", _state([device], lost, detached))


def _state(devices: Sequence[Device], lost: tuple[str, ...], detached: frozenset[Number]) -> str:
    """Return the state of a GPU by its devices, "" when it is unknown.

    "ok", "lost" (granted, and refused now), "detached", "denied" (never granted), "no node".
    """
    if any(device.path in lost for device in devices):
        return "lost"
    if any(device.allowed is None for device in devices):
        return ""
    refused = {(device.major, device.minor) for device in devices if not device.allowed}
    if refused:
        return "detached" if refused <= detached else "denied"
    return "ok" if all(device.inside for device in devices) else "no node"


def _look_for_nodes(nodes: Sequence[DeviceNode], proc_fd: int) -> list[str]:
    """Return the container paths at which it has these nodes: below its root as its first process sees it."""
    root_fd = os.open("root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc_fd)
    try:
        found = ((node, read_device(root_fd, node.container_path)) for node in nodes)
        return [
            node.container_path
            for node, present in found
            if present is not None and (present.major, present.minor) == (node.major, node.minor)
        ]
    finally:
        os.close(root_fd)


# processes


def find_members(containers: Sequence[Container], pids: Iterable[int] | None = None) -> dict[str, set[int]]:
    """Return the processes of containers by their state files: those in its cgroups, else in its pid namespace.

    ``pids``: the processes to examine, None for all; a container's first process always belongs to it.
    """
    members = {container.state_file: {container.pid} for container in containers}
    ours = _place(os.getpid()) if containers else None
    if ours is None:
        return members
    owners: dict[tuple[int, str | int], list[str]] = {}
    for container in containers:
        if (place := _place(container.pid)) is not None:
            owners.setdefault(_sign(place, ours), []).append(container.state_file)
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pids is None else pids:
        for sign in _signs(_place(pid)):
            for state_file in owners.get(sign, ()):
                members[state_file].add(pid)
    return members


def _place(pid: int) -> tuple[ProcCgroup, int] | None:
    """Return the cgroups of a process, and the number of its pid namespace."""
    try:
        return read_cgroup(f"/proc/{pid}/cgroup"), os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:  # it has ended, or is not ours to look at
        return None


def _sign(place: tuple[ProcCgroup, int], ours: tuple[ProcCgroup, int]) -> tuple[int, str | int]:
    """Return what only a container's processes have: a cgroup, by its hierarchy, or a pid namespace; (0, 0) if none."""
    for hierarchy, (path, own) in enumerate(zip(place[0], ours[0], strict=True)):
        if path not in (None, "/", own):
            return hierarchy, path or ""
    return (-1, place[1]) if place[1] != ours[1] else (0, 0)


def _signs(place: tuple[ProcCgroup, int] | None) -> Iterator[tuple[int, str | int]]:
    """Yield everything by which a process may be a container's: its cgroups with all above them, its pid namespace."""
    if place is not None:
        yield -1, place[1]
        for hierarchy, path in enumerate(place[0]):
            parts = (path or "").split("/")
            yield from ((hierarchy, "/".join(parts[:end])) for end in range(2, len(parts) + 1))


Holders = tuple[tuple[Process, ...], tuple[str, ...]]
"""Processes that have devices open, and notes."""


def find_holders(containers: Sequence[Container], names: dict[Number, str]) -> dict[str, Holders]:
    """Return, by state file, which processes of running containers have one of these devices open."""
    members = find_members(containers)
    asks = ask_each(partial(_look_for_holders, sorted(pids), names) for pids in members.values())
    return {state_file: _holders(ask) for state_file, ask in zip(members, asks, strict=True)}


def _holders(ask: Callable[[], Any]) -> Holders:
    try:
        return tuple(Process(pid, command, tuple(devices)) for pid, command, devices in ask()), ()
    except OSError as error:
        return (), (f"its processes cannot be inspected: {error.strerror or error}",)


def _look_for_holders(pids: Sequence[int], names: dict[Number, str]) -> list[tuple[int, str, list[str]]]:
    return [holder for pid in pids if (holder := _holder(pid, names))]


def _holder(pid: int, names: dict[Number, str]) -> tuple[int, str, list[str]] | None:
    """Return (pid, command, names of devices) of a process that has one open, by what its descriptors are (stat(2))."""
    held: dict[str, None] = {}
    try:
        for name in os.listdir(f"/proc/{pid}/fd")[:MAX_DESCRIPTORS]:
            try:
                status = os.stat(f"/proc/{pid}/fd/{name}")
            except OSError:  # closed since
                continue
            number = (os.major(status.st_rdev), os.minor(status.st_rdev))
            if stat.S_ISCHR(status.st_mode) and number in names:
                held[names[number]] = None
        if not held:
            return None
        return pid, read_command(f"/proc/{pid}"), list(held)
    except OSError:  # it has ended
        return None
