"""The parts of this machine that leases work with: holders, pods, resets, partitions, checks."""

import functools
import os
import shlex
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from ocigpu.core.errors import HostError, OcigpuError
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.fabric.state import FabricStore, KeptFabric, state_directory
from ocigpu.gpus.tree import Roots, find_roots
from ocigpu.gpus.vfio.facts import VFIO_DRIVERS, read_vfio_facts
from ocigpu.gpus.vfio.holders import read_holders
from ocigpu.gpus.vfio.identity import read_module_ids
from ocigpu.kubernetes.cluster.names import POD_RESOURCES_SOCKET, tenancy_of
from ocigpu.kubernetes.cluster.owners import DRA_DRIVER, Owner
from ocigpu.kubernetes.cluster.pods import Listing, list_containers
from ocigpu.kubernetes.fabric.client import open_fabric
from ocigpu.kubernetes.leases.gate import LeaseGate, gpus_of
from ocigpu.kubernetes.leases.journal import LeaseJournal
from ocigpu.kubernetes.leases.lease import CHECK_LIMIT, LeaseHolder
from ocigpu.kubernetes.node.config import PluginOptions
from ocigpu.kubernetes.node.vfio import make_vfio_inventory, read_names, vfio_names
from ocigpu.system.proc import read_stat
from ocigpu.system.programs import run_program

LOOK_SECONDS = 5.0
"""Between looks at the fabric manager: after a restart it waits a minute to be told what was active."""
SETTLES = 120.0
"""Seconds that a kubelet has, once started, to learn its pods from the API server; where the agent is no pod."""
CONFIRM = 0.3
"""Seconds until a holder that is new is looked for once more: whoever reads registers, or compares firmware, has the
GPU's group open for a moment, so that no VM gets it meanwhile (:func:`~ocigpu.gpus.vfio.holders.claim`)."""
Modules = Callable[[], Mapping[str, int]]
"""Returns module ids by address; raises OcigpuError."""
Check = Callable[[str], Sequence[str]]
"""Returns how a GPU differs from the baseline, a line each; raises OcigpuError when that cannot be found out."""
Reset = Callable[[str], str]
"""Resets a GPU and returns the proof in a line; raises OcigpuError."""


def open_fabric_at(address: str, settings: Settings) -> KeptFabric | None:
    """Return the manager at an address, with what this host remembers of it; None for ""."""
    if not address:
        return None
    simulation = settings.simulation_root
    return KeptFabric(open_fabric(address, simulation=simulation), FabricStore(state_directory(simulation)))


def remember_modules(roots: Roots) -> Modules:
    """Return what reads the module ids once: a look into a GPU's registers keeps virtual machines from it."""
    return functools.cache(functools.partial(read_module_ids, roots))


def find_holders(gpu: str, roots: Roots, known: Collection[int] = ()) -> tuple[int, ...]:
    """Return the processes that have a GPU open and stay, but for this one; ``known``: of the look before."""
    found = {holder.pid for holder in read_holders(gpu, roots)} - {os.getpid()}
    if found.difference(known):
        time.sleep(CONFIRM)
        found &= {holder.pid for holder in read_holders(gpu, roots)}
    return tuple(sorted(found))


def is_below(pid: int, ancestor: int) -> bool:
    """Return whether a process descends from another one, by the parents that the kernel records.

    No process can become the child of one that has not started it (fork(2), PR_SET_CHILD_SUBREAPER).
    """
    try:
        while pid not in (0, ancestor):
            pid = read_stat(f"/proc/{pid}/stat").parent
    except OSError:  # it has ended
        return False
    return pid == ancestor


def free_sets(fabric: KeptFabric | None, modules: Modules) -> list[tuple[str, ...]] | None:
    """Return the GPUs of each partition, as last listed by the manager; None without partitions.

    Raises OcigpuError.
    """
    if fabric is None:
        return None
    gpus = {number: gpu for gpu, number in modules().items()}
    return [tuple(gpus.get(id_, "") for id_ in one.physical_ids) for one in fabric.read_state().known]


def run_check(program: str, gpu: str) -> Sequence[str]:
    """Ask an operator's program about a GPU: status 0 as it should be, 1 it deviates, a line each on standard output.

    ``program``: a command in the shell's words, without a shell; the address comes last.

    Raises HostError (OCIGPU-LEASE-4) for any other end.
    """
    try:
        finished = run_program([*shlex.split(program), gpu], CHECK_LIMIT, group=True)
    except (OSError, TimeoutError, ValueError) as error:
        raise HostError("OCIGPU-LEASE-4", f"check GPU {gpu} by {program}: {error}") from error
    if finished.status == 0:
        return ()
    lines = [line for line in finished.output.splitlines() if line.strip()]
    if finished.status != 1 or not lines:
        said = (finished.complaint or finished.output).strip() or "nothing"
        raise HostError("OCIGPU-LEASE-4", f"check GPU {gpu} by {program}: status {finished.status}, output: {said}")
    return lines


def open_gate(options: PluginOptions, settings: Settings) -> LeaseGate | None:
    """Return the leases of this node, None if none are configured.  Raises OcigpuError."""
    if not options.lease_journal:
        return None
    roots = find_roots(settings)
    return LeaseGate(
        LeaseJournal(options.lease_journal),
        open_fabric_at(options.fabric_address, settings),
        remember_modules(roots),
        lambda gpu: find_holders(gpu, roots),
        options.unlinked_sets,
    )


def _holder(owner: Owner) -> LeaseHolder:
    """Return the holder of a GPU: the name of the container, or of the claim that all containers of a pod may use."""
    name = owner.claim.name if owner.claim else owner.container
    return LeaseHolder(owner.namespace, owner.pod, name, tenancy=tenancy_of(owner.namespace))


class MachineHands:
    """The agent's actions on this machine; see :class:`~ocigpu.kubernetes.leases.agent.NodeHands`.

    ``resource``: of the device plugin (its variable P_GPU_ALIAS); ``pods_socket``: the kubelet's pod-resources;
    ``check``: None if none is configured, and then no GPU becomes free.  ``own_pod``: "namespace/name" of the pod that
    this runs in, "" for none.
    """

    def __init__(
        self,
        settings: Settings,
        reset: Reset,
        resource: str = "gpu",
        pods_socket: str = POD_RESOURCES_SOCKET,
        fabric: KeptFabric | None = None,
        check: Check | None = None,
        look_seconds: float = LOOK_SECONDS,
        own_pod: str = "",
    ) -> None:
        self._own_pod = own_pod
        self._roots = find_roots(settings)
        self.modules = remember_modules(self._roots)
        self.seen: dict[str, tuple[int, ...]] = {}
        self._checked: set[str] = set()
        self._resource, self._names = resource, read_names(resource)
        self._socket = pods_socket
        self._fabric = fabric
        self._reset = reset
        self._check = check
        self._look_seconds = look_seconds
        self._look_due = 0.0
        self.polling: threading.Thread | None = None
        self._unseen: OcigpuError | None = None

    def gpus(self) -> tuple[str, ...]:
        """Return the addresses of the GPUs that VFIO has."""
        facts = read_vfio_facts(self._roots)
        functions = [item.function for item in facts.candidates if not item.is_switch]
        return tuple(function.address for function in functions if function.driver in VFIO_DRIVERS)

    def holders(self, gpu: str) -> tuple[int, ...]:
        """Return the processes that have a GPU open and stay; resets have it open, too, and are our own.

        So are those that a check has started, such as a virtual machine with a driver, while it is under way.
        """
        checked = gpu in self._checked
        found = self.seen[gpu] = find_holders(gpu, self._roots, self.seen.get(gpu, ()))
        return tuple(pid for pid in found if not (checked and is_below(pid, os.getpid())))

    def pods(self) -> Mapping[str, LeaseHolder]:
        """Return which pod has which GPU; raises HostError (OCIGPU-LEASE-4) when the kubelet does not say."""
        listing = list_containers(self._socket)
        if problem := listing.problem or self._why_incomplete(listing):
            raise HostError("OCIGPU-LEASE-4", f"ask the kubelet for its pods: {problem}")
        facts = read_vfio_facts(self._roots)
        inventory = make_vfio_inventory(facts, self._resource, self._names)
        gpus = {(each.name, device.id): gpus_of([device]) for each in inventory.resources for device in each.devices}
        found: dict[str, LeaseHolder] = {}
        claimed = vfio_names(facts)
        for each in listing.claimed:
            if each.claim and each.claim.driver == DRA_DRIVER and (gpu := claimed.get(each.claim.device)):
                found.setdefault(gpu, _holder(each))
        for owner, resource, id_ in listing.held:
            found |= dict.fromkeys(gpus.get((resource, id_), ()), _holder(owner))
        return found

    def _why_incomplete(self, listing: Listing) -> str:
        """Return why a list may lack pods, "" if it is complete.

        After its start a kubelet lists no pods, or only those of its files, until the API server has sent the others
        (kubelet, config/config.go: all of a source at once).  Our own pod is one of those others.
        """
        if self._own_pod:
            return "" if self._own_pod in listing.pods else f"it was started and does not know {self._own_pod} yet"
        try:
            age = time.time() - os.stat(self._socket).st_mtime  # it makes its socket again
        except OSError:
            return ""
        return "" if age > SETTLES else f"it was started within {SETTLES:.0f} s and may not know all of them yet"

    def reset(self, gpu: str) -> str:
        """Reset a GPU; returns the proof."""
        return self._reset(gpu)

    def deactivate(self, gpus: Collection[str]) -> None:
        """Switch off every partition with one of these GPUs that is active, or that was lost and has no owner."""
        if self._fabric is None:
            return
        modules = self.modules()
        ids = [modules[gpu] for gpu in gpus]
        listed = self._fabric.list_partitions()
        lost = {each.physical_ids for each in self._fabric.read_state().broken}
        for one in listed:
            if one.overlaps(ids) and (one.is_active or one.physical_ids in lost):
                self._fabric.deactivate(one.physical_ids)

    def sick(self) -> Mapping[str, str]:
        """Return the GPUs whose tenants have lost their NVLinks: the manager was restarted under them.

        A thread checks the manager from time to time, because it may hang.  The check also restores the active
        partitions of a manager that waits for them.
        """
        if self._fabric is None:
            return {}
        now = time.monotonic()
        if now >= self._look_due and not (self.polling and self.polling.is_alive()):
            self._look_due = now + self._look_seconds
            self.polling = threading.Thread(target=self._poll_manager, args=(self._fabric,), daemon=True)
            self.polling.start()
        broken = {id_: each.broken for each in self._fabric.read_state().broken for id_ in each.physical_ids}
        if self._unseen and not broken:
            raise self._unseen
        modules = self.modules() if broken else {}
        return {gpu: f"PartitionLost: {broken[id_]}" for gpu, id_ in modules.items() if id_ in broken}

    def _poll_manager(self, fabric: KeptFabric) -> None:
        try:
            fabric.list_partitions()
            self._unseen = None
        except OcigpuError as error:
            self._unseen = error

    def check(self, gpu: str) -> Sequence[str]:
        """Return the deviations from the baseline; raises HostError (OCIGPU-LEASE-4) if the check cannot run.

        It also raises that if a process has the GPU open after the check: the GPU may have been used since.
        """
        if self._check is None:
            raise HostError("OCIGPU-LEASE-4", f"check GPU {gpu}: no check is configured, so no GPU becomes free")
        self._checked.add(gpu)
        try:
            deviations = self._check(gpu)
            left = find_holders(gpu, self._roots)
        finally:
            self._checked.discard(gpu)
        if left:
            raise HostError("OCIGPU-LEASE-4", f"check GPU {gpu}: process {left[0]} has it open after the check")
        return deviations
