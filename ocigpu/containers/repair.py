"""``ocigpu repair``: gives running containers back what they have lost; ``ocigpu watch --repair`` does it by itself.

Containers lose device rules of a hook or of ``ocigpu attach`` when an update by the runtime or systemd's daemon-reload
replaces them.  They also lose nodes that were removed, and an attached GPU's part of /proc/driver/nvidia.  Repair gives
only what was granted before.  A detached GPU that came back by such an update is taken away again.
"""

import functools
import os
import time
from typing import TYPE_CHECKING, NamedTuple

from ocigpu.bundle.edit import has_gpu_hook
from ocigpu.containers.attach import allowed_now, give, settle, take, view_of
from ocigpu.containers.attached import AttachRecord, prune_records, read_record
from ocigpu.containers.believed import Container, process_of, read_cgroup, read_config_of
from ocigpu.containers.child import look_into
from ocigpu.containers.find import Places, find_containers
from ocigpu.containers.inside import look_inside
from ocigpu.containers.live import Live, host_nodes, may_have_devices, open_live, plan_for, read_now
from ocigpu.containers.rules import Number
from ocigpu.core.actions import Node
from ocigpu.core.errors import OcigpuError
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.views import PROC_DRIVER
from ocigpu.gpus.vendors import read_host_facts
from ocigpu.provision.cgroups import open_device_cgroup
from ocigpu.provision.image import read_image_facts
from ocigpu.system import bpf
from ocigpu.system.proc import read_proc
from ocigpu.system.service import ServiceLog

if TYPE_CHECKING:
    from ocigpu.core.actions import Action


NOTHING = "nothing"
"""Stamp of a container that has no device: there is nothing to compare."""
RETRY = 60.0
"""Seconds until a container that could not be inspected is tried again: it must not delay the others."""


ROUND = 30.0
"""Seconds that one round repairs; one container that hangs may take ten of them."""
_Key = tuple[str, int, int]
"""A container's state file, process id and start time."""


class Repaired(NamedTuple):
    """What a container had lost, a few words each; ``done``: whether that is restored (false for a mere check).

    ``right``: what was in order, as text; ``devices``: UUIDs of the granted devices.
    """

    lost: tuple[str, ...] = ()
    right: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    done: bool = False
    notes: tuple[str, ...] = ()


def repair(live: Live, dry_run: bool = False) -> Repaired:
    """Give a container back what it has lost; raises OcigpuError, and the step that failed has changed nothing."""
    now = read_now(live)
    left: tuple[str, ...] = ()
    if now.record.unsure:
        what = f"what a killed command has left of {', '.join(now.record.unsure)}"
        left = (f"{what} is to be removed" if dry_run else f"{what} was removed",)
        now = now if dry_run else settle(live)
    grant, record = now.grant, now.record
    nodes = grant.usable
    granted = {(node.major, node.minor) for node in nodes.values()}
    detached = {(node.major, node.minor) for node in now.started.nodes.values()} - granted if record.detached else set()
    if not granted and not detached:
        return Repaired(right=("it was granted nothing",), notes=left)
    allowed = allowed_now(live, granted | detached)
    denied, returned = granted - allowed, detached & allowed
    views = _view_paths(live, granted, record)
    seen = dict(zip((*nodes, *views), look_inside(live.inside, (), (*nodes, *views)).files, strict=True))
    missing = [node for path, node in nodes.items() if not seen[path].is_device(node)]
    unseen = [path for path in views if seen[path].kind != "directory"]
    lost = (
        *(f"device rule c {major}:{minor} rw" for major, minor in sorted(denied)),
        *(f"node {node.container_path}" for node in missing),
        *unseen,
        *(f"denial of the detached c {major}:{minor}" for major, minor in sorted(returned)),
    )
    right = (
        f"{len(granted) - len(denied)} of {len(granted)} devices allowed",
        f"{len(nodes) - len(missing)} of {len(nodes)} nodes in place",
    )
    if dry_run or not lost:
        return Repaired(lost, right, grant.devices, notes=left)
    if returned:
        take(live, grant, returned, None)
    actions: "list[Action]" = [Node(node, "it was lost") for node in missing]
    if unseen:
        actions += view_of(plan_for(live, grant.devices, now.set_up))
    notes = give(live, now, grant, granted, actions, record) if denied or actions else ()
    return Repaired(lost, right, grant.devices, True, (*left, *notes))


def _view_paths(live: Live, granted: set[Number], record: AttachRecord) -> list[str]:
    """Return the directories of the granted GPUs below /proc/driver/nvidia, if we made them."""
    if not (has_gpu_hook(live.config) or record.attached) or not live.facts.proc_driver:
        return []
    return [
        f"{PROC_DRIVER}/gpus/{gpu.proc_name}"
        for gpu in live.facts.gpus
        if gpu.node and gpu.proc_name and (gpu.node.major, gpu.node.minor) in granted
    ]


class GrantKeeper:
    """Checks the device rules of all running containers again and again, and repairs changed ones.

    The comparison is cheap: the list of rules of cgroup v1, the numbers of the programs of v2.
    """

    def __init__(self, places: Places, settings: Settings, log: ServiceLog) -> None:
        self._places = places
        self._settings = settings
        self._log = log
        self._facts = functools.cache(lambda: read_host_facts(settings, kept=True))
        """The facts of this round, read once."""
        self._devices: frozenset[Number] = frozenset()
        """The host's devices, which decide what :data:`NOTHING` is said of."""
        self._seen: dict[_Key, str] = {}
        self._again: dict[_Key, float] = {}

    def look(self) -> None:
        """Look once; whatever fails is logged, once for each container or once for the host, and tried again."""
        containers = [one for one in find_containers(self._places)[0] if one.pid and one.status != "paused"]
        keys = {(one.state_file, one.pid, one.start_time): one for one in containers}
        if set(self._seen) - set(keys):
            self._seen = {key: stamp for key, stamp in self._seen.items() if key in keys}
            self._again = {key: due for key, due in self._again.items() if key in keys}
            prune_records(self._settings)
        self._facts.cache_clear()
        try:
            devices = frozenset(host_nodes(self._facts())) if keys else self._devices
        except (OcigpuError, OSError) as error:  # without a driver nothing can be given back
            self._log.once("facts", "error", f"repair: {error}")
            return
        self._log.forget("facts")
        if devices != self._devices:  # it may have one now that had none
            self._devices = devices
            self._seen = {key: stamp for key, stamp in self._seen.items() if stamp != NOTHING}
        changed: dict[_Key, tuple[Container, str]] = {}
        for key, container in keys.items():
            if time.monotonic() < self._again.get(key, 0.0):
                continue
            try:
                if self._has_nothing(container, self._seen.get(key)):
                    self._seen[key] = NOTHING
                    continue
                stamp = read_stamp(container)
                if stamp != self._seen.get(key):
                    changed[key] = container, stamp
            except (OcigpuError, OSError) as error:
                self._put_off(key, container, str(error))
        # all at once: one after another, those whose files never answer would keep the others waiting
        look = functools.partial(inspect_image, self._facts().driver_version)
        problems = look_into([container for container, _ in changed.values()], look) if changed else []
        deadline = time.monotonic() + ROUND
        for (key, (container, stamp)), (_, problem) in zip(changed.items(), problems, strict=True):
            if problem:
                self._put_off(key, container, problem)
            elif time.monotonic() < deadline:  # the next round checks the others
                try:
                    # what was repaired is looked at once more: it may have changed before its new stamp is read
                    if not self._repair(container):
                        self._seen[key] = stamp
                except (OcigpuError, OSError) as error:
                    self._put_off(key, container, str(error))

    def _put_off(self, key: "_Key", container: Container, problem: str) -> None:
        self._again[key] = time.monotonic() + RETRY
        self._log.once(container.id, "error", f"repair {container.name}: {problem}", container=container.id)

    def _has_nothing(self, container: Container, seen: str | None) -> bool:
        """Tell whether a container has no device that it could lose; ``seen``: its stamp of the round before."""
        if seen is None:
            config = read_config_of(container).config
            return not may_have_devices(container, config, self._settings, self._facts())
        return seen == NOTHING and read_record(container, self._settings) == AttachRecord()

    def _repair(self, container: Container) -> bool:
        """Repair a container; returns whether it had lost anything."""
        with open_live(container, self._settings, self._facts()) as live:
            repaired = repair(live)
        if repaired.lost:
            text = f"repaired {container.name}: it had lost {', '.join(repaired.lost)}"
            self._log("info", text, container=container.id, lost=list(repaired.lost))
        for note in repaired.notes:
            self._log("warning", f"{container.name}: {note}", container=container.id)
        return bool(repaired.lost)


def inspect_image(version: str, proc_fd: int) -> None:
    """Look at the files of a container as :func:`open_live` does: that may never end."""
    root_fd = os.open("root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc_fd)
    try:
        read_image_facts(root_fd, version)
    finally:
        os.close(root_fd)


def read_stamp(container: Container) -> str:
    """Return a text that changes when the device rules of a running container are replaced; raises OcigpuError."""
    with process_of(container) as proc_fd:
        cgroup = open_device_cgroup(proc_fd, read_cgroup(container))
        try:
            if cgroup.version == 2:
                return repr(bpf.query_device_programs(cgroup.fd).ids)
            return read_proc("devices.list", cgroup.fd)
        except OSError as error:
            raise OcigpuError("OCIGPU-CG-1", f"read device rules of {cgroup.path}: {error.strerror}") from error
        finally:
            os.close(cgroup.fd)
