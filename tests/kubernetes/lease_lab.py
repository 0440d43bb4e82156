"""A node in memory for leases: GPUs with their truth, pods, a fabric manager; agent and gate that work on it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.lines import Lines

from ocigpu.core.errors import HostError, OcigpuError
from ocigpu.gpus.nvidia.fabric.partitions import FabricError, Partition, conflicts_of, must_find
from ocigpu.kubernetes.leases.agent import NodeAgent
from ocigpu.kubernetes.leases.gate import LeaseGate
from ocigpu.kubernetes.leases.journal import LeaseJournal
from ocigpu.kubernetes.leases.lease import Lease, LeaseHolder, Phase, is_released
from ocigpu.kubernetes.node.devices import PluginDevice

GPUS = tuple(f"0000:{number:02x}:00.0" for number in range(1, 9))
MODULES = dict(zip(GPUS, range(1, 9), strict=True))
SETS = (
    (1, 2, 3, 4, 5, 6, 7, 8),
    (1, 2, 3, 4),
    (5, 6, 7, 8),
    (1, 3),
    (2, 4),
    (5, 7),
    (6, 8),
    *((n,) for n in range(1, 9)),
)
DEVICES = tuple(PluginDevice(str(number), str(number), gpu, str(number)) for gpu, number in MODULES.items())


class Inline(Executor):
    """Carries everything out at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except OcigpuError as error:
            future.set_exception(error)
        return future


class Board:
    """A fabric manager that keeps the truth of a real one: no two active partitions overlap."""

    def __init__(self) -> None:
        self.active: set[tuple[int, ...]] = set()
        self.fails: list[str] = []
        """Names of calls that fail once each."""

    def _call(self, name: str) -> None:
        if name in self.fails:
            self.fails.remove(name)
            raise FabricError("OCIGPU-FAB-1", f"{name}: link training failed")

    def list_partitions(self) -> tuple[Partition, ...]:
        self._call("list")
        return tuple(Partition(place, ids in self.active, ids, ()) for place, ids in enumerate(SETS))

    def activate(self, physical_ids: Collection[int]) -> Partition:
        self._call("activate")
        wanted = must_find(self.list_partitions(), physical_ids)
        assert not conflicts_of(self.list_partitions(), wanted)
        self.active.add(wanted.physical_ids)
        return replace(wanted, is_active=True)

    def deactivate(self, physical_ids: Collection[int]) -> None:
        self._call("deactivate")
        self.active.discard(tuple(sorted(physical_ids)))


class World:
    """The truth about a node.  ``time``: seconds since the boot; ``vms``: GPUs that are open, by process.

    ``dirty``: what a tenant had since it was reset and checked; ``hook``: called with the name of each effect, may end
    the program.
    """

    def __init__(self, directory: Path, gpus: int = 8) -> None:
        self.directory = directory
        self.there = GPUS[:gpus]
        self.time = 1000.0
        self.boot = "boot 1"
        self.vms: dict[int, tuple[str, ...]] = {}
        self.kubelet: dict[str, LeaseHolder] | None = {}
        self.board = Board()
        self.dirty: dict[str, str] = dict.fromkeys(self.there, "of before")
        self.deviations: dict[str, str] = {}
        self.broken: set[str] = set()
        self.lost: dict[str, str] = {}
        self.hook: Callable[[str], None] = lambda _name: None
        self.log = Lines()
        self.answers: list[tuple[str, int]] = []

    # what the agent can do

    def gpus(self) -> Collection[str]:
        return self.there

    def holders(self, gpu: str) -> Sequence[int]:
        return [pid for pid, gpus in self.vms.items() if gpu in gpus]

    def pods(self) -> Mapping[str, LeaseHolder]:
        if self.kubelet is None:
            raise HostError("OCIGPU-LEASE-4", "ask the kubelet for its pods: UNAVAILABLE")
        return self.kubelet

    def reset(self, gpu: str) -> str:
        self.hook("before reset")
        assert not self.holders(gpu), "reset under a VM"
        if gpu in self.broken:
            raise HostError("OCIGPU-VFIO-1", "no method")
        if self.dirty.get(gpu):
            self.dirty[gpu] = "reset"
        self.hook("after reset")
        return "bus"

    def deactivate(self, gpus: Collection[str]) -> None:
        self.hook("before deactivate")
        ids = {MODULES[gpu] for gpu in gpus}
        for one in self.board.list_partitions():
            if one.is_active and one.overlaps(ids):
                assert not any(self.holders(GPUS[number - 1]) for number in one.physical_ids), "a partition of a VM"
                self.board.deactivate(one.physical_ids)
        self.hook("after deactivate")

    def sick(self) -> Mapping[str, str]:
        return self.lost

    def check(self, gpu: str) -> Sequence[str]:
        self.hook("before check")
        if gpu in self.deviations:
            return [self.deviations[gpu]]
        if self.dirty.get(gpu) == "reset":
            self.dirty[gpu] = ""
        self.hook("after check")
        return []

    # programs that begin anew

    def journal(self) -> LeaseJournal:
        return LeaseJournal(str(self.directory), clock=lambda: self.time, boot=self.boot)

    def agent(self) -> NodeAgent:
        return NodeAgent(self.journal(), self, Inline(), self.log)

    def gate(self) -> LeaseGate:
        return LeaseGate(self.journal(), self.board, lambda: MODULES, self.holders)

    def leases(self) -> Mapping[str, Lease]:
        journal = self.journal()
        try:
            return dict(journal.refresh())
        finally:
            journal.close()

    def phases(self) -> set[str]:
        return {str(lease.phase) for lease in self.leases().values()}

    def run(self, agent: NodeAgent, seconds: float, pace: float = 1.0) -> None:
        for _ in range(int(seconds / pace)):
            self.time += pace
            agent.step()
            self.check_truth(agent.journal.leases)

    def run_until(self, agent: NodeAgent, gpus: Collection[str], *phases: Phase, limit: float = 4000.0) -> None:
        end = self.time + limit
        self.run(agent, 1.0)
        while not all(gpu in agent.journal.leases and agent.journal.leases[gpu].phase in phases for gpu in gpus):
            assert self.time < end, agent.journal.leases
            self.run(agent, 1.0)

    # what must always be true

    def check_truth(self, leases: Mapping[str, Lease]) -> None:
        for gpu, lease in leases.items():
            if lease.phase is Phase.FREE:
                assert not self.dirty.get(gpu), (lease, self.dirty[gpu])
                assert not self.holders(gpu)
            if self.holders(gpu) and lease.phase is Phase.RECLAIMING:
                assert not is_released(lease) or lease.quiet < 0 or lease.proofs
            assert (
                lease.phase in (Phase.FREE, Phase.RESERVED, Phase.LEASED)
                or lease.reason
                or lease.phase is Phase.CHECKING
            )

    # what tenants and the kubelet do

    def allocate(self, gate: LeaseGate, *gpus: str) -> None:
        """What the device plugin does for Allocate: the answer is the moment that counts."""
        gate.reserve([device for device in DEVICES if device.gpu in gpus])
        leases = gate.journal.leases
        for gpu in gpus:
            assert not self.dirty.get(gpu), f"{gpu} is given unchecked"
            assert not self.holders(gpu)
            self.answers.append((gpu, leases[gpu].generation))
        assert tuple(sorted(MODULES[gpu] for gpu in gpus)) in self.board.active

    def start_vm(self, pid: int, *gpus: str) -> None:
        for gpu in gpus:
            assert not self.holders(gpu), "VFIO gives a group to one"
            self.dirty[gpu] = f"tenant {pid}"
        self.vms[pid] = gpus

    def start_pod(self, pid: int, *gpus: str) -> None:
        assert self.kubelet is not None
        self.kubelet |= dict.fromkeys(gpus, LeaseHolder("tenant-a", f"pod{pid}", "main"))
        self.start_vm(pid, *gpus)

    def end_pod(self, pid: int) -> None:
        assert self.kubelet is not None
        self.kubelet = {gpu: pod for gpu, pod in self.kubelet.items() if pod.pod != f"pod{pid}"}
        self.vms.pop(pid, None)
