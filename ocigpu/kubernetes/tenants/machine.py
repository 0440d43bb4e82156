"""The parts of this machine that leases work with: holders, pods, resets, partitions, checks."""

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
from ocigpu.gpus.vfio.identity import TABLE, read_module_ids
from ocigpu.kubernetes.exporter.pods import list_containers
from ocigpu.kubernetes.tenants.fabric_client import open_fabric
from ocigpu.kubernetes.tenants.gate import LeaseGate
from ocigpu.kubernetes.tenants.journal import LeaseJournal
from ocigpu.kubernetes.tenants.lease import CHECK_LIMIT, LeaseHolder
from ocigpu.kubernetes.vfio import make_vfio_inventory
from ocigpu.system.programs import run_program

PODS = "/var/lib/kubelet/pod-resources/kubelet.sock"
LOOK_SECONDS = 5.0
"""Between looks at the fabric manager: after a restart it waits a minute to be told what was active."""
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


def module_ids(roots: Roots) -> dict[str, int]:
    """Return the physical ids of this node's GPUs, by address; raises HostError (OCIGPU-VFIO-7)."""
    return read_module_ids(roots, table=f"{roots.host}{TABLE}")


def run_check(program: str, gpu: str) -> Sequence[str]:
    """Ask an operator's program about a GPU: status 0 as it should be, 1 it deviates, a line each on standard output.

    ``program``: a command in the shell's words, without a shell; the address comes last.

    Raises HostError (OCIGPU-LEASE-4) for any other end.
    """
    try:
        finished = run_program([*shlex.split(program), gpu], CHECK_LIMIT)
    except (OSError, TimeoutError, ValueError) as error:
        raise HostError("OCIGPU-LEASE-4", f"check GPU {gpu} by {program}: {error}") from error
    if finished.status == 0:
        return ()
    lines = [line for line in finished.output.splitlines() if line.strip()]
    if finished.status != 1 or not lines:
        said = (finished.complaint or finished.output).strip() or "nothing"
        raise HostError("OCIGPU-LEASE-4", f"check GPU {gpu} by {program}: status {finished.status}, it says {said}")
    return lines


def open_machine_gate(directory: str, fabric: str, settings: Settings) -> LeaseGate:
    """Return the gate of this machine's device plugin; raises OcigpuError."""
    roots = find_roots(settings)
    return LeaseGate(
        LeaseJournal(directory),
        open_fabric_at(fabric, settings),
        lambda: module_ids(roots),
        lambda gpu: [holder.pid for holder in read_holders(gpu, roots)],
    )


class MachineHands:
    """What the agent does to this machine; see :class:`~ocigpu.kubernetes.tenants.node_agent.NodeHands`.

    ``resource``: of the device plugin (its variable P_GPU_ALIAS); ``pods_socket``: the kubelet's pod-resources;
    ``check``: None where none is configured, and then no GPU becomes free.
    """

    def __init__(
        self,
        settings: Settings,
        reset: Reset,
        resource: str = "gpu",
        pods_socket: str = PODS,
        fabric: KeptFabric | None = None,
        check: Check | None = None,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._roots = find_roots(settings)
        self._resource = resource
        self._socket = pods_socket
        self._fabric = fabric
        self._reset = reset
        self._check = check
        self._look_seconds = look_seconds
        self._look_due = 0.0
        self._looking: threading.Thread | None = None
        self._unseen: OcigpuError | None = None

    def gpus(self) -> tuple[str, ...]:
        """Return the addresses of the GPUs that VFIO has."""
        facts = read_vfio_facts(self._roots)
        functions = [item.function for item in facts.candidates if not item.is_switch]
        return tuple(function.address for function in functions if function.driver in VFIO_DRIVERS)

    def holders(self, gpu: str) -> tuple[int, ...]:
        """Return the processes that have a GPU open."""
        return tuple(holder.pid for holder in read_holders(gpu, self._roots))

    def pods(self) -> Mapping[str, LeaseHolder]:
        """Return which pod has which GPU; raises HostError (OCIGPU-LEASE-4) when the kubelet does not say."""
        listing = list_containers(self._socket)
        if listing.problem:
            raise HostError("OCIGPU-LEASE-4", f"ask the kubelet for its pods: {listing.problem}")
        inventory = make_vfio_inventory(read_vfio_facts(self._roots), self._resource)
        gpus = {(each.name, device.id): device.gpu for each in inventory.resources for device in each.devices}
        found = {}
        for owner, resource, id_ in listing.held:
            if gpu := gpus.get((resource, id_)):
                tenancy = owner.namespace.removeprefix("tenant-") if owner.namespace.startswith("tenant-") else ""
                found[gpu] = LeaseHolder(owner.namespace, owner.pod, owner.container, tenancy=tenancy)
        return found

    def reset(self, gpu: str) -> str:
        """Reset a GPU; returns the proof."""
        return self._reset(gpu)

    def deactivate(self, gpus: Collection[str]) -> None:
        """Switch off every partition with one of these GPUs that is active, or was lost and is nobody's any more."""
        if self._fabric is None:
            return
        modules = module_ids(self._roots)
        ids = [modules[gpu] for gpu in gpus]
        listed = self._fabric.list_partitions()
        lost = {each.physical_ids for each in self._fabric.read_state().broken}
        for one in listed:
            if one.overlaps(ids) and (one.is_active or one.physical_ids in lost):
                self._fabric.deactivate(one.physical_ids)

    def sick(self) -> Mapping[str, str]:
        """Return the GPUs whose tenants have lost their NVLinks: the manager was restarted under them.

        Looks at the manager now and then, in a thread, as it may hang: that also gives back to one that waits what was
        active.
        """
        if self._fabric is None:
            return {}
        now = time.monotonic()
        if now >= self._look_due and not (self._looking and self._looking.is_alive()):
            self._look_due = now + self._look_seconds
            self._looking = threading.Thread(target=self._look, args=(self._fabric,), daemon=True)
            self._looking.start()
        broken = {id_: each.broken for each in self._fabric.read_state().broken for id_ in each.physical_ids}
        if self._unseen and not broken:
            raise self._unseen
        modules = module_ids(self._roots) if broken else {}
        return {gpu: f"PartitionLost: {broken[id_]}" for gpu, id_ in modules.items() if id_ in broken}

    def _look(self, fabric: KeptFabric) -> None:
        try:
            fabric.list_partitions()
            self._unseen = None
        except OcigpuError as error:
            self._unseen = error

    def check(self, gpu: str) -> Sequence[str]:
        """Return the deviations from the baseline; raises HostError (OCIGPU-LEASE-4) where nothing can check."""
        if self._check is None:
            raise HostError("OCIGPU-LEASE-4", f"check GPU {gpu}: no check is configured, so no GPU becomes free")
        return self._check(gpu)
