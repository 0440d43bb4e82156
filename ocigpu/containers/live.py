"""A running container for ``verify``, ``attach``, ``detach`` and ``repair``: opened, with its grant.

The grant is computed again from the config.json that the runtime got, from the device rules that the runtime recorded,
and from later attaching and detaching.  A configuration grants its own nodes, as far as the rules allow them.  If it
contains a GPU hook (mode hook, Docker's --gpus), it also grants what the hook has visibly given
(:mod:`ocigpu.containers.shown`).  A request alone grants nothing: images request GPUs by a variable, which takes effect
only through a hook.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from ocigpu.bundle.document import check_can_have_gpus
from ocigpu.bundle.edit import has_gpu_hook
from ocigpu.containers.attached import AttachRecord, read_record
from ocigpu.containers.believed import Container, open_process, read_config_of, read_recorded_rules
from ocigpu.containers.child import ask_child
from ocigpu.containers.rules import Number, listed_nodes, may_open, numbers_of
from ocigpu.containers.shown import ShownMounts, plan_shown, read_mounts
from ocigpu.core.actions import AllowDevice, Bind, Node, Plan
from ocigpu.core.config_json import get_list
from ocigpu.core.errors import OcigpuError, OsErrorAs
from ocigpu.core.facts import DeviceNode, Gpu, HostFacts, ImageFacts
from ocigpu.core.settings import Settings
from ocigpu.gpus.request import join_requests
from ocigpu.gpus.vendors import load_vendor, make_plan
from ocigpu.provision.apply import Caller
from ocigpu.provision.container import LiveContainer, open_container
from ocigpu.provision.device_filter import FilterRule, Policy
from ocigpu.provision.image import read_image_facts
from ocigpu.system import libc
from ocigpu.system.files import lock
from ocigpu.system.namespaces import in_initial_user_namespace

SECONDS = 30.0
"""Longest wait for another command of ours to be through with a container, and for the files of one that runs."""


class Live(NamedTuple):
    """An open container: its state as found, its process and namespaces, its configuration, its host.

    ``caller``: its first process, for :func:`ocigpu.provision.apply.provision`: the work ends with it.  ``rules``: its
    device rules as its runtime has recorded them.  ``mounts``: its mounts and the host's.
    """

    found: Container
    inside: LiveContainer
    config: dict[str, Any]
    settings: Settings
    facts: HostFacts
    image: ImageFacts
    caller: Caller
    rules: tuple[FilterRule, ...] = ()
    mounts: ShownMounts = ShownMounts()


class Grant(NamedTuple):
    """What a container is granted.

    ``nodes``: nodes of the host's driver by path; ``rules``: its whole device policy; ``devices``: UUIDs of the GPUs
    and MIG devices in it; ``libraries``: where driver libraries are mounted, by host path; ``numbers``: devices it may
    open; ``by``: the origin of the grant, as text.  ``set_up``: vendors whose driver files and control nodes it has, as
    every container with a GPU.
    """

    nodes: dict[str, DeviceNode]
    rules: list[FilterRule]
    devices: tuple[str, ...]
    libraries: dict[str, str]
    numbers: frozenset[Number]
    by: str
    set_up: tuple[str, ...] = ()

    @property
    def usable(self) -> dict[str, DeviceNode]:
        """The nodes, by path, that it may open."""
        return {path: node for path, node in self.nodes.items() if (node.major, node.minor) in self.numbers}


@contextmanager
def open_live(found: Container, settings: Settings, facts: HostFacts) -> Iterator[Live]:
    """Open a running container; other commands of ours wait meanwhile.

    Raises OcigpuError OCIGPU-CTR-6 unless root of the initial user namespace calls, OCIGPU-CTR-3 for one that does not
    run, OCIGPU-CTR-4 for one that is paused, does not answer, or is locked too long by another command of ours,
    SpecError for a configuration that cannot be read or that others may change.
    """
    require_root(f"container {found.name}")
    if found.status == "paused":  # what enters its cgroup would be, too
        raise OcigpuError("OCIGPU-CTR-4", f"container {found.name}: it is paused", "Resume it first.")
    os.close(open_process(found))
    config = read_config_of(found).config
    with ExitStack() as stack:
        with OsErrorAs(OcigpuError, "OCIGPU-CTR-3", f"container {found.name}"):
            lock_fd = os.open(os.path.dirname(found.state_file), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, lock_fd)
            if not lock(lock_fd, SECONDS):
                text = f"container {found.name}: another command of ocigpu has been at work on it for {SECONDS:g} s"
                raise OcigpuError("OCIGPU-CTR-4", text)
            pidfd = os.pidfd_open(found.pid)
            stack.callback(os.close, pidfd)
        inside = open_container(found.pid, found.rootfs, found.pid)
        stack.callback(inside.close)
        os.close(open_process(found))  # still the same one: now all descriptors are of it
        with _failing(found, "inspect its files"):  # by a child: a file system of the container may never answer
            image = ImageFacts(*ask_child(lambda: read_image_facts(inside.init_root_fd, facts.driver_version)))
        rules = tuple(read_recorded_rules(found, config))
        with _failing(found, "read its mounts"):
            mounts = read_mounts(inside, config)
        yield Live(found, inside, config, settings, facts, image, Caller(found.pid, pidfd, SECONDS), rules, mounts)


@contextmanager
def _failing(found: Container, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        text = f"container {found.name}: {what}: {error.strerror or error}"
        raise OcigpuError("OCIGPU-CTR-4", text) from error


def require_root(what: str) -> None:
    """Raise OcigpuError OCIGPU-CTR-6 unless this process is root of the machine, with CAP_SYS_ADMIN."""
    if os.geteuid() != 0 or not in_initial_user_namespace():
        raise OcigpuError("OCIGPU-CTR-6", f"{what}: it needs root, outside of user namespaces")
    if not libc.capget().effective >> libc.CAP_SYS_ADMIN & 1:
        hint = "A service that systemd confines lacks it (CapabilityBoundingSet=): see ocigpu-repair.service."
        raise OcigpuError("OCIGPU-CTR-6", f"{what}: it needs CAP_SYS_ADMIN", hint)


def host_nodes(facts: HostFacts) -> dict[Number, tuple[str, DeviceNode]]:
    """Return every device node of the host's driver by number, each with what it is, "GPU 0", "control node"."""
    rows: list[tuple[str, DeviceNode | None]] = [
        *((f"GPU {gpu.index}", gpu.node) for gpu in facts.gpus),
        *(("control node", node) for node in facts.control_nodes),
        *((f"MIG capability {path}", node) for path, node in facts.cap_nodes),
        *((f"IMEX channel {node.minor}", node) for node in facts.imex_nodes),
        *((f"DRM node of GPU {gpu.index}", node) for gpu in facts.gpus for node in gpu.drm_nodes),
        *((feature.name, node) for feature in facts.features for node in feature.nodes),
    ]
    found: dict[Number, tuple[str, DeviceNode]] = {}
    for what, node in rows:
        if node is not None:
            found.setdefault((node.major, node.minor), (what, node))
    return found


class Now(NamedTuple):
    """A container between two changes: its grant when ``started``, the later record, and its present state."""

    started: Grant
    record: AttachRecord
    grant: Grant

    @property
    def set_up(self) -> tuple[str, ...]:
        """Vendors of whose driver it has files and control nodes."""
        return (*self.started.set_up, *self.record.files)

    @property
    def devices(self) -> tuple[str, ...]:
        """UUIDs of the GPUs and MIG devices that it has."""
        kept = [uuid for uuid in self.started.devices if uuid not in self.record.detached]
        return (*kept, *(uuid for uuid in self.record.attached if uuid not in kept))


def read_now(live: Live) -> Now:
    """Return what a container is to have now, attached and detached devices counted; raises OcigpuError."""
    started, record = _started_with(live), read_record(live.found, live.settings)
    now = Now(started, record, started)
    if record == AttachRecord():
        return now
    return now._replace(grant=change_grant(live, started, now.devices, record.files))


def given_nodes(config: dict[str, Any], facts: HostFacts) -> dict[str, DeviceNode]:
    """Return the nodes of the host's driver that a configuration lists or mounts, by their path in the container."""
    known = host_nodes(facts)
    listed = listed_nodes(config).items()
    nodes = {path: known[number][1]._replace(container_path=path) for path, number in listed if number in known}
    by_source = {node.host_path: node for _, node in known.values() if node.host_path}
    bound = _mounted(config, by_source)
    return nodes | {path: by_source[source]._replace(container_path=path) for source, path in bound.items()}


def may_have_devices(found: Container, config: dict[str, Any], settings: Settings, facts: HostFacts) -> bool:
    """Tell whether a container was given a device: by its configuration, perhaps by a GPU hook, or after its start.

    All other containers need not be opened.
    """
    return has_gpu_hook(config) or read_record(found, settings) != AttachRecord() or bool(given_nodes(config, facts))


def _started_with(live: Live) -> Grant:
    """Return what a container was started with; raises OcigpuError for a request that this host cannot grant."""
    config, facts = live.config, live.facts
    rules = list(live.rules)
    nodes = given_nodes(config, facts)
    libraries = _mounted(config, [library.host_path for library in facts.libraries])
    by = "its config.json" if nodes else "nothing"
    if has_gpu_hook(config):
        place = (live.found.bundle, live.inside, live.mounts)
        shown = plan_shown(config, *place, live.settings, facts, live.image, Policy(rules))
        if shown is not None:
            nodes.update({action.node.container_path: action.node for action in _nodes(shown.plan)})
            rules += _as_filter(shown.plan.device_rules(), True)
            libraries |= _libraries(shown.plan, facts)
            by = f"the GPU hook in its config.json ({shown.source})"
    return _grant(live, nodes, rules, libraries, by)


def change_grant(live: Live, started: Grant, devices: Sequence[str], files: tuple[str, ...] = ()) -> Grant:
    """Return the grant of a container that was ``started`` with one and has ``devices`` now.

    ``files``: vendors of whose driver it was given files and control nodes since.
    """
    plan = plan_for(live, devices, (*started.set_up, *files))
    gone = numbers_of(live.facts, set(started.devices) - set(devices)) - numbers_of(live.facts, devices)
    nodes = {path: node for path, node in started.nodes.items() if (node.major, node.minor) not in gone}
    nodes.update({action.node.container_path: action.node for action in _nodes(plan)})
    denied = [AllowDevice(major, minor, "rw", "") for major, minor in sorted(gone)]
    rules = started.rules + _as_filter(plan.device_rules(), True) + _as_filter(denied, False)
    owners = owners_of(live.facts)
    later = plan_for(live, [uuid for uuid in devices if owners.get(uuid) not in started.set_up], files)
    libraries = started.libraries | _libraries(later, live.facts)
    return _grant(live, nodes, rules, libraries, f"{started.by}, and what was attached or detached since")


def owners_of(facts: HostFacts) -> dict[str, str]:
    """Return the vendor of each GPU and MIG device of the host, by UUID."""
    return {uuid: one.vendor for one in facts.each for gpu in one.gpus for uuid in _uuids(gpu)}


def _uuids(gpu: Gpu) -> tuple[str, ...]:
    return (gpu.uuid, *(mig.uuid for mig in gpu.mig_devices))


def plan_for(live: Live, devices: Sequence[str], set_up: Sequence[str] = ()) -> Plan:
    """Return the plan of mode hook that gives a container these GPUs and MIG devices, and its other requests.

    ``set_up``: vendors whose driver files and control nodes it has, with or without a GPU of them.  Other requests of
    its variables, IMEX channels and opt-in parts, count only if variables are obeyed.  Raises OcigpuError for a device
    that cannot be given, and for a container that can have none.
    """
    check_can_have_gpus(live.config, f"{live.found.bundle}/config.json")
    owners = owners_of(live.facts)
    requests = []
    for vendor in live.facts.vendors:
        chosen = [uuid for uuid in devices if owners.get(uuid) == vendor]
        if chosen or vendor in set_up:
            requests.append(load_vendor(vendor).request_devices(live.config, chosen, live.settings))
    return make_plan(live.facts, join_requests(requests), live.settings, live.image)


def _nodes(plan: Plan) -> list[Node]:
    return [action for action in plan.actions if isinstance(action, Node)]


def _as_filter(rules: Sequence[AllowDevice], allow: bool) -> list[FilterRule]:
    return [FilterRule(allow, "c", rule.major, rule.minor, rule.access) for rule in rules]


def _libraries(plan: Plan, facts: HostFacts) -> dict[str, str]:
    mounted = {action.host_path: action.container_path for action in plan.actions if isinstance(action, Bind)}
    names = [library.host_path for library in facts.libraries]
    return {name: mounted[name] for name in names if name in mounted}


def _mounted(config: dict[str, Any], sources: Iterable[str]) -> dict[str, str]:
    """Return where a configuration mounts these files of the host: nodes too, as in user namespaces."""
    found = {}
    wanted = set(sources)
    for mount in get_list(config, "mounts"):
        source = mount.get("source") if isinstance(mount, dict) else None
        path = mount.get("destination") if isinstance(mount, dict) else None
        if isinstance(source, str) and isinstance(path, str) and source in wanted:
            found[source] = path
    return found


def _grant(
    live: Live, nodes: dict[str, DeviceNode], rules: list[FilterRule], libraries: dict[str, str], by: str
) -> Grant:
    policy = Policy(rules)
    numbers = frozenset(number for number in host_nodes(live.facts) if may_open(policy, number))
    usable = {(node.major, node.minor) for node in nodes.values()} & numbers
    first = [(one.vendor, one.control_nodes[0].container_path) for one in live.facts.each if one.control_nodes]
    set_up = tuple(vendor for vendor, path in first if path in nodes)
    return Grant(nodes, rules, _devices(live.facts, usable), libraries, numbers, by, set_up)


def _devices(facts: HostFacts, usable: set[Number]) -> tuple[str, ...]:
    """Return the GPUs and MIG devices whose nodes are all among the usable ones, in the host's order."""
    found = []
    capabilities = {node.minor: (node.major, node.minor) for _, node in facts.cap_nodes}
    for gpu in facts.gpus:
        if gpu.node is None or (gpu.node.major, gpu.node.minor) not in usable:
            continue
        if not gpu.mig_enabled:
            found.append(gpu.uuid)
        found += [
            mig.uuid
            for mig in gpu.mig_devices
            if {capabilities.get(mig.gi_minor), capabilities.get(mig.ci_minor)} <= usable
        ]
    return tuple(found)
