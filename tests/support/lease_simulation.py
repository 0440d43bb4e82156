"""A cluster whose GPUs are lent and taken back by the real state machine, with failures of every kind.

The world knows the truth: which VM has a GPU open, what touched it since it was last reset and checked.  The nodes know
what they are told, late, twice, or not at all.  After each event the invariants are held against the truth.
"""

import functools
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ocigpu.gpus.nvidia.fabric.partitions import Partition, choose_partition
from ocigpu.kubernetes.leases.journal import doubt
from ocigpu.kubernetes.leases.lease import (
    Effect,
    Lease,
    LeaseEvent,
    LeaseEventKind,
    LeaseHolder,
    Phase,
    check_reservable,
    is_repeated,
    set_name,
    step,
    work,
)

PARTITIONS = (
    (1, 2, 3, 4, 5, 6, 7, 8),
    (1, 2, 3, 4),
    (5, 6, 7, 8),
    (1, 3),
    (2, 4),
    (5, 7),
    (6, 8),
    *((n,) for n in range(1, 9)),
)
"""Of a board with eight H100, by physical id."""
SIZES = ((1, 0.50), (2, 0.20), (4, 0.18), (8, 0.12))
MEAN_LIFE = 2400.0
HEAD_WAITS = 1800.0
"""Seconds after which a request lets no other one pass that is asked for later."""


BOARD = tuple(Partition(number, False, ids, ()) for number, ids in enumerate(PARTITIONS))


@functools.cache
def choose(free: frozenset[int], count: int) -> tuple[int, ...]:
    """Return the partition whose use leaves most larger ones whole; () for none."""
    found = choose_partition(BOARD, free, count)
    return found.physical_ids if found else ()


class Chances(NamedTuple):
    """Of each failure, for each time that it can happen; those of a node, for an hour."""

    pod_never_comes: float = 0.01
    answer_lost: float = 0.005
    force_deleted: float = 0.01
    vm_dies_first: float = 0.05
    vm_again: float = 0.02
    sick: float = 0.003
    activation: float = 0.004
    deactivation: float = 0.01
    reset: float = 0.02
    reset_for_ever: float = 0.0005
    check_broken: float = 0.03
    check_silent: float = 0.003
    mismatch: float = 0.0008
    late_report: float = 0.05
    agent_killed: float = 0.01
    reboot: float = 0.002
    clock_jump: float = 0.002
    journal_damaged: float = 0.0005
    maintenance: float = 0.002
    outage: float = 0.05
    """Of the API server, in the whole cluster, for an hour."""


@dataclass(eq=False)
class Vm:
    """A tenant's machine: which GPUs, and whether it has them open."""

    request: int
    gpus: tuple[str, ...]
    holder: LeaseHolder
    open: bool = False
    pod: bool = True
    ended: bool = False


@dataclass
class Request:
    number: int
    size: int
    arrived: float
    life: float
    started: float = -1.0


@dataclass(eq=False)
class SimulatedNode:
    name: str
    leases: dict[str, Lease] = field(default_factory=dict)
    vms: list[Vm] = field(default_factory=list)
    active: set[tuple[int, ...]] = field(default_factory=set)
    dirty: dict[str, str] = field(default_factory=dict)
    granted: dict[str, int] = field(default_factory=dict)
    boot: int = 1
    skew: float = 0.0
    busy: set[tuple[Effect, tuple[str, ...], tuple[int, ...]]] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    look_at: float = -1.0
    running: bool = True
    pause: float = 1.0
    free: frozenset[int] = frozenset()


class Simulation:
    """``run`` ends when every request was served and every GPU is at rest."""

    def __init__(
        self, nodes: int, requests: int, seed: int = 17, chances: Chances | None = None, load: float = 0.75
    ) -> None:
        self.random = random.Random(seed)
        self.chances = chances or Chances()
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count()
        self.nodes = [SimulatedNode(f"node{number:03}") for number in range(nodes)]
        self.gpus = 8 * nodes
        self.queue: list[Request] = []
        self.by_free: list[dict[SimulatedNode, None]] = [dict.fromkeys(self.nodes), *({} for _ in range(8))]
        self.total, self.left = requests, requests
        self.waits: dict[int, list[float]] = {size: [] for size, _ in SIZES}
        self.happened: Counter[str] = Counter()
        self.grants: set[tuple[str, int]] = set()
        self.time_in: Counter[str] = Counter()
        self.split, self.free_time = 0.0, 0.0
        self.measured = 0.0
        self.last_arrival = 0.0
        self.outage_until = -1.0
        self.steps = 0
        for node in self.nodes:
            node.leases = {f"0000:{n:02x}:00.0": Lease(f"0000:{n:02x}:00.0") for n in range(1, 9)}
            node.dirty = dict.fromkeys(node.leases, "of before")
            self.after(0.0, functools.partial(self.start_agent, node))
        mean = sum(size * share for size, share in SIZES)
        gap = mean * MEAN_LIFE / (self.gpus * load)
        at = 120.0
        for number in range(requests):
            at += self.random.expovariate(1 / gap)
            size = self.random.choices([size for size, _ in SIZES], [share for _, share in SIZES])[0]
            life = 60.0 + self.random.expovariate(1 / (MEAN_LIFE - 60.0))
            self.at(at, functools.partial(self.arrive, Request(number, size, at, life)))
        self.last_arrival = at
        self.plan_misfortunes(at)

    # time

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self.count), what))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self.at(self.now + seconds, what)

    def chance(self, name: str) -> bool:
        happens = self.random.random() < getattr(self.chances, name)
        self.happened[name] += happens
        return happens

    def plan_misfortunes(self, end: float) -> None:
        hours = int(end / 3600) + 1
        kinds = {
            "agent_killed": self.start_agent, "reboot": self.reboot, "clock_jump": self.jump,
            "journal_damaged": self.damage, "maintenance": self.maintain,
        }  # fmt: skip
        for hour in range(hours):
            if self.chance("outage"):
                self.at(3600.0 * hour, self.begin_outage)
            for node in self.nodes:
                for kind, what in kinds.items():
                    if self.chance(kind):
                        self.at(3600.0 * (hour + self.random.random()), functools.partial(what, node))

    def run(self) -> None:
        begun = 0.0
        while self.events:
            when, _, what = heapq.heappop(self.events)
            if begun < self.last_arrival:
                self.measure(min(when, self.last_arrival) - begun)
                begun = when
            self.now = when
            what()
        self.check_rest()

    def measure(self, seconds: float) -> None:
        if seconds <= 0:
            return
        self.measured += seconds
        for phase, number in self.phases.items():
            self.time_in[phase] += seconds * number
        self.free_time += seconds * self.free_now
        self.split += seconds * self.split_now

    phases: Counter[str] = Counter()
    free_now = 0
    split_now = 0

    # leases

    def clock(self, node: SimulatedNode) -> float:
        return self.now + node.skew

    def tell(self, node: SimulatedNode, gpu: str, event: LeaseEvent) -> None:
        before = node.leases[gpu]
        after, _ = step(before, event, self.clock(node))
        self.steps += 1
        if after is before:
            return
        self.put(node, before, after)

    def put(self, node: SimulatedNode, before: Lease, after: Lease) -> None:
        assert after.generation >= before.generation, (before, after)
        assert after.turn >= before.turn or after.generation > before.generation, (before, after)
        if after.phase is not before.phase:
            if after.phase is Phase.FREE:
                assert not node.dirty.get(after.gpu), (node.dirty[after.gpu], before)
                node.granted.pop(after.gpu, None)
            if after.phase is Phase.QUARANTINED:
                assert after.reason, after
                self.happened[f"quarantined: {after.reason}"] += 1
                delay = self.random.uniform(3600.0, 4 * 3600.0)
                self.after(delay, functools.partial(self.release, node, after.gpu, after.generation, after.turn))
            if after.phase is Phase.MAINTENANCE:
                self.after(1800.0, functools.partial(self.release, node, after.gpu, after.generation, after.turn))
            self.account(node, -1)
            node.leases[after.gpu] = after
            self.account(node, 1)
        else:
            node.leases[after.gpu] = after
        assert after.phase in AT_REST or after.phase in (Phase.LEASED, Phase.RESERVED) or self.is_driven(after), after

    def account(self, node: SimulatedNode, sign: int) -> None:
        phases, node.free, split = summary(tuple(lease.phase for lease in node.leases.values()))
        if self.phases is Simulation.phases:
            self.phases = Counter({Phase.UNKNOWN: self.gpus})
        for phase in phases:
            self.phases[phase] += sign
        if sign < 0:
            del self.by_free[len(node.free)][node]
        else:
            self.by_free[len(node.free)][node] = None
        self.free_now += sign * len(node.free)
        self.split_now += sign * split

    @staticmethod
    def is_driven(lease: Lease) -> bool:
        """Whether something will move a lease on: a time-out, or the end of a pod that is still there."""
        return lease.timer >= 0 or (lease.phase is Phase.RECLAIMING and "pod-over" not in lease.proofs)

    def drive(self, node: SimulatedNode) -> None:
        """Do what is due on a node; results come later."""
        now = self.clock(node)
        if all(lease.phase in (*AT_REST, *WITH_POD) for lease in node.leases.values()):
            return
        for effect, gpus in work(node.leases, now):
            if effect not in SECONDS:
                continue  # probes come by themselves, activations with Allocate
            key = (effect, gpus, tuple(node.leases[gpu].turn for gpu in gpus))
            if key not in node.busy:
                node.busy.add(key)
                self.after(SECONDS[effect], functools.partial(self.carry_out, node, key, node.boot))

    def look_soon(self, node: SimulatedNode) -> None:
        node.pause = 0.5
        self.plan_look(node)

    def plan_look(self, node: SimulatedNode) -> None:
        """Have the node look again, ever more rarely while nothing changes; a real one looks every second."""
        node.look_at = self.now + node.pause
        node.pause = min(2 * node.pause, 20.0)
        self.at(node.look_at, functools.partial(self.look, node, node.look_at))

    def look(self, node: SimulatedNode, planned: float) -> None:
        """Tell the leases of a node who holds the GPUs, which pods there are, and that time has passed."""
        if planned != node.look_at or not node.running:
            return
        opened = {gpu: vm for vm in node.vms if vm.open for gpu in vm.gpus}
        pods = {gpu: vm.holder for vm in node.vms if vm.pod for gpu in vm.gpus}
        for gpu, lease in list(node.leases.items()):
            if lease.phase in AT_REST and gpu not in opened:
                continue
            as_known = lease.quiet < 0 and (gpu in opened) == (lease.phase is Phase.LEASED)
            if as_known and lease.phase in WITH_POD and lease.holder and lease.holder == pods.get(gpu):
                continue
            pids = (opened[gpu].request + 2,) if gpu in opened else ()
            self.tell(node, gpu, LeaseEvent(LeaseEventKind.HOLDERS, pids=pids))
            kind = LeaseEventKind.POD_SEEN if gpu in pods else LeaseEventKind.POD_OVER
            self.tell(node, gpu, LeaseEvent(kind, holder=pods.get(gpu)))
            self.tell(node, gpu, LeaseEvent(LeaseEventKind.TICK))
        self.drive(node)
        if any(is_moving(lease) for lease in node.leases.values()):
            self.plan_look(node)
        self.serve()

    # the truth

    def vm_of(self, node: SimulatedNode, gpu: str) -> Vm | None:
        return next((vm for vm in node.vms if vm.open and gpu in vm.gpus), None)

    def carry_out(self, node: SimulatedNode, key: tuple[Effect, tuple[str, ...], tuple[int, ...]], boot: int) -> None:
        if key not in node.busy or boot != node.boot:
            return  # its program was killed
        effect, gpus, turns = key
        generations = [node.leases[gpu].generation for gpu in gpus]
        held = [gpu for gpu in gpus if self.vm_of(node, gpu)]
        if effect is Effect.RESET:
            assert not held, "a GPU was reset under a VM"
            gpu = gpus[0]
            if gpu not in node.broken and self.chance("reset_for_ever"):
                node.broken.add(gpu)
            failed = gpu in node.broken or self.chance("reset")
            if not failed and node.dirty.get(gpu):
                node.dirty[gpu] = "reset, not checked"
            kind = LeaseEventKind.RESET_FAILED if failed else LeaseEventKind.RESET_DONE
        elif effect is Effect.DEACTIVATE:
            failed = self.chance("deactivation")
            if not failed:
                ids = {id_of(gpu) for gpu in gpus}
                for set_ in [set_ for set_ in node.active if not ids.isdisjoint(set_)]:
                    assert not any(self.vm_of(node, gpu) for gpu in map(gpu_of, set_)), "a partition ended under a VM"
                    node.active.discard(set_)
            kind = LeaseEventKind.PARTITION_FAILED if failed else LeaseEventKind.PARTITION_OFF
        else:
            kind = self.check(node, gpus[0])
        for gpu, generation, turn in zip(gpus, generations, turns, strict=True):
            report = LeaseEvent(kind, generation, turn, text=f"{effect}: {kind}")
            if self.chance("late_report"):
                self.after(self.random.choice((700.0, 5000.0)), functools.partial(self.tell, node, gpu, report))
            if kind is not LeaseEventKind.TICK:
                self.tell(node, gpu, report)
        pause = 30.0 if kind in (LeaseEventKind.RESET_FAILED, LeaseEventKind.PARTITION_FAILED) else 0.0
        if kind is not LeaseEventKind.TICK:
            self.after(pause, functools.partial(self.try_effect_again, node, key))
        self.drive(node)
        self.serve()

    def try_effect_again(self, node: SimulatedNode, key: tuple[Effect, tuple[str, ...], tuple[int, ...]]) -> None:
        node.busy.discard(key)
        self.drive(node)

    def check(self, node: SimulatedNode, gpu: str) -> LeaseEventKind:
        if self.chance("check_silent"):
            return LeaseEventKind.TICK
        if self.chance("check_broken"):
            return LeaseEventKind.CHECK_BROKEN
        if self.chance("mismatch"):
            return LeaseEventKind.CHECK_MISMATCH
        if node.dirty.get(gpu) == "reset, not checked":
            node.dirty[gpu] = ""
        return LeaseEventKind.CHECK_PASSED

    # requests

    def arrive(self, request: Request) -> None:
        self.queue.append(request)
        self.serve()

    def serve(self) -> None:
        """Give waiting requests their GPUs, the oldest first; one that does not fit lets others pass for a while."""
        if self.now < self.outage_until:
            return
        blocked = 9  # sets lie within larger ones: where no pair is free, no four are
        position = 0
        while position < len(self.queue) and blocked > 1:
            request = self.queue[position]
            if request.size < blocked:
                if place := self.place(request.size):
                    del self.queue[position]
                    self.allocate(request, *place)
                    continue
                blocked = request.size
            if self.now - request.arrived > HEAD_WAITS:
                return
            position += 1

    def place(self, size: int) -> tuple[SimulatedNode, tuple[int, ...]] | None:
        """Return where a request goes: the node that is fullest of those that have a partition for it."""
        for count in range(size, 9):
            for node in self.by_free[count]:
                if node.running and (found := choose(node.free, size)):
                    return node, found
        return None

    def allocate(self, request: Request, node: SimulatedNode, ids: tuple[int, ...], again: bool = False) -> None:
        """What Allocate does: reserve, write down, activate, answer."""
        gpus = tuple(sorted(gpu_of(each) for each in ids))
        leases = [node.leases[gpu] for gpu in gpus]
        if not is_repeated(leases):
            check_reservable(leases)
            name = set_name(leases)
            for gpu in gpus:
                self.tell(node, gpu, LeaseEvent(LeaseEventKind.RESERVE, text=name, members=gpus))
                grant = (f"{node.name} {gpu}", node.leases[gpu].generation)
                assert grant not in self.grants
                self.grants.add(grant)
        if self.chance("answer_lost"):
            self.start_agent(node)
            if not again and self.random.random() < 0.5:
                self.after(1.0, functools.partial(self.try_again, request, node, ids))
                return
            self.queue.insert(0, request)
            return
        if self.chance("activation"):
            for gpu in gpus:
                self.tell(
                    node, gpu, LeaseEvent(LeaseEventKind.PARTITION_FAILED, node.leases[gpu].generation, text="training")
                )
            self.queue.insert(0, request)
            self.look_soon(node)
            return
        for set_ in node.active:
            assert set(set_) == set(ids) or set(set_).isdisjoint(ids), "partitions overlap"
        node.active.add(ids)
        for gpu in gpus:
            self.tell(node, gpu, LeaseEvent(LeaseEventKind.PARTITION_ON, node.leases[gpu].generation))
        self.answer(request, node, gpus)

    def try_again(self, request: Request, node: SimulatedNode, ids: tuple[int, ...]) -> None:
        leases = [node.leases[gpu_of(each)] for each in ids]
        if is_repeated(leases) or all(lease.phase is Phase.FREE for lease in leases):
            self.happened["answered again"] += 1
            self.allocate(request, node, ids, again=True)
        else:
            self.queue.insert(0, request)

    def answer(self, request: Request, node: SimulatedNode, gpus: tuple[str, ...]) -> None:
        """The moment that counts: the kubelet is told that it may have the GPUs."""
        for gpu in gpus:
            assert not node.dirty.get(gpu), f"{gpu} is given away unchecked: {node.dirty[gpu]}"
            assert not self.vm_of(node, gpu), f"{gpu} is given away while a VM has it"
            assert not any(gpu in vm.gpus and vm.pod for vm in node.vms), f"{gpu} is given to two pods"
        if self.chance("pod_never_comes"):
            self.queue.insert(0, request)
            self.look_soon(node)
            return
        vm = Vm(request.number, gpus, LeaseHolder(f"tenant-{request.number % 20}", f"pod{request.number}", "main"))
        node.vms.append(vm)
        if request.started < 0:
            request.started = self.now
            self.waits[request.size].append(self.now - request.arrived)
        pull = 5.0 + self.random.expovariate(1 / 40.0)
        self.look_soon(node)
        self.after(pull, functools.partial(self.boot_vm, node, vm, request.life))

    def boot_vm(self, node: SimulatedNode, vm: Vm, life: float) -> None:
        if vm.ended:
            return
        for gpu in vm.gpus:
            other = self.vm_of(node, gpu)
            assert other is None, f"{gpu} is opened by two VMs: {other} {vm}"
            assert not node.dirty.get(gpu) or node.dirty[gpu] == vm.holder.namespace, node.dirty[gpu]
            node.dirty[gpu] = vm.holder.namespace
        if len(vm.gpus) > 1:
            assert tuple(map(id_of, vm.gpus)) in node.active, "a VM starts outside of its partition"
        vm.open = True
        self.look_soon(node)
        if self.chance("sick"):
            self.after(
                life / 2,
                functools.partial(self.tell, node, vm.gpus[0], LeaseEvent(LeaseEventKind.SICK, text="Xid: 79")),
            )
        if self.chance("force_deleted"):
            self.after(life, functools.partial(self.end, node, vm, "pod"))
            self.after(life + self.random.choice((30.0, 900.0)), functools.partial(self.end, node, vm, "vm"))
        elif self.chance("vm_dies_first"):
            self.after(life, functools.partial(self.end, node, vm, "vm"))
            self.after(life + 60.0, functools.partial(self.end, node, vm, "pod"))
        elif self.chance("vm_again"):
            self.after(life / 2, functools.partial(self.end, node, vm, "vm"))
            self.after(life / 2 + 20.0, functools.partial(self.boot_vm_again, node, vm, life / 2))
        else:
            self.after(life, functools.partial(self.end, node, vm, "vm"))
            self.after(life + 1.0, functools.partial(self.end, node, vm, "pod"))

    def boot_vm_again(self, node: SimulatedNode, vm: Vm, life: float) -> None:
        """The kubelet starts a pod's sandbox once more, with the devices that it has, and asks nobody."""
        if not vm.ended and vm.pod:
            vm.open = True
            self.look_soon(node)
            self.after(life, functools.partial(self.end, node, vm, "vm"))
            self.after(life + 1.0, functools.partial(self.end, node, vm, "pod"))

    def end(self, node: SimulatedNode, vm: Vm, what: str) -> None:
        if vm.ended:
            return
        if what == "vm":
            vm.open = False
        else:
            vm.pod = False
        if not vm.pod and not vm.open:
            vm.ended = True
            node.vms.remove(vm)
            self.left -= 1
        self.look_soon(node)

    # misfortunes

    def start_agent(self, node: SimulatedNode) -> None:
        """The agent begins, or is killed and begins again: what it was doing is lost, what it wrote down is not."""
        node.busy.clear()
        node.running = True
        for gpu in node.leases:
            self.tell(node, gpu, LeaseEvent(LeaseEventKind.STARTED, text=f"boot {node.boot}"))
        self.look_soon(node)

    def reboot(self, node: SimulatedNode) -> None:
        node.boot += 1
        node.running = False
        node.active.clear()
        for vm in list(node.vms):
            vm.open = vm.pod = False
            vm.ended = True
            node.vms.remove(vm)
            self.left -= 1
        self.after(180.0, functools.partial(self.start_agent, node))

    def jump(self, node: SimulatedNode) -> None:
        """A machine that was saved goes on: its clock is minutes ahead."""
        node.skew += self.random.choice((5.0, 700.0, 7200.0))
        self.look_soon(node)

    def damage(self, node: SimulatedNode) -> None:
        for lease in list(node.leases.values()):
            if lease.phase is not Phase.QUARANTINED:
                self.put(node, lease, doubt(lease, 1))
        self.start_agent(node)

    def maintain(self, node: SimulatedNode) -> None:
        for gpu, lease in list(node.leases.items()):
            self.tell(node, gpu, LeaseEvent(LeaseEventKind.MAINTAIN, lease.generation))

    def begin_outage(self) -> None:
        self.outage_until = self.now + 3600.0
        self.at(self.outage_until, self.serve)

    def release(self, node: SimulatedNode, gpu: str, generation: int, turn: int) -> None:
        """An operator looks at the GPU, mends it, and gives it back; first an act that is out of date."""
        if node.leases[gpu].turn != turn:
            return
        node.broken.discard(gpu)
        self.tell(node, gpu, LeaseEvent(LeaseEventKind.RELEASE, generation + 7))
        assert node.leases[gpu].turn == turn
        for each in node.leases[gpu].members or (gpu,):
            lease = node.leases[each]
            if lease.phase in (Phase.QUARANTINED, Phase.MAINTENANCE):
                self.tell(node, each, LeaseEvent(LeaseEventKind.RELEASE, lease.generation))
        self.look_soon(node)

    # what came of it

    def check_rest(self) -> None:
        """No GPU is lost: when nothing goes on any more, all are free."""
        where = Counter(lease.phase for node in self.nodes for lease in node.leases.values())
        assert where == {Phase.FREE: self.gpus}, where
        assert not self.queue
        assert self.left == 0, self.left

    def table(self) -> str:
        """Return the results as a table of Markdown."""
        total = self.measured * self.gpus
        share = {phase: self.time_in[phase] / total for phase in Phase}
        rows = [
            ("GPUs x hours simulated", f"{self.gpus} x {self.measured / 3600:.1f}"),
            ("requests", f"{self.total}"),
            ("GPU time that pods have (Reserved, Leased)", f"{share[Phase.RESERVED] + share[Phase.LEASED]:.1%}"),
            (
                "GPU time between tenants (Reclaiming, Checking, Unknown)",
                f"{share[Phase.RECLAIMING] + share[Phase.CHECKING] + share[Phase.UNKNOWN]:.1%}",
            ),
            ("GPU time in Quarantined or Maintenance", f"{share[Phase.QUARANTINED] + share[Phase.MAINTENANCE]:.1%}"),
            ("fragmentation: free GPUs that are in no free set of four", f"{self.split / max(self.free_time, 1):.1%}"),
        ]
        for size, waits in self.waits.items():
            ordered = sorted(waits) or [0.0]
            p50, p95 = (ordered[int(len(ordered) * part)] for part in (0.5, 0.95))
            rows.append((f"time to GPU, {size} of 8: median, 95 %", f"{p50:.0f} s, {p95:.0f} s"))
        lines = ["| of the simulated cluster | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
        lines += ["", "| what went wrong | times |", "|---|---|"]
        lines += [
            f"| {name.replace('_', ' ')} | {number} |" for name, number in sorted(self.happened.items()) if number
        ]
        return "\n".join(lines)


def is_moving(lease: Lease) -> bool:
    """Whether a lease changes by itself: the node has to look at it."""
    waits = lease.phase is Phase.RESERVED and lease.holder  # for its VM, which makes itself known here
    return (lease.phase not in (*AT_REST, Phase.LEASED) and not waits) or lease.quiet >= 0


SECONDS = {Effect.RESET: 3.0, Effect.DEACTIVATE: 1.0, Effect.CHECK: 8.0}
WITH_POD = (Phase.RESERVED, Phase.LEASED)
AT_REST = (Phase.FREE, Phase.QUARANTINED, Phase.MAINTENANCE)


@functools.cache
def summary(phases: tuple[Phase, ...]) -> tuple[tuple[Phase, ...], frozenset[int], int]:
    """Return the phases of a node, which GPUs are free, and how many of them in no free set of four."""
    free = frozenset(number for number, phase in enumerate(phases, 1) if phase is Phase.FREE)
    whole = {gpu for set_ in PARTITIONS if len(set_) >= 4 and free.issuperset(set_) for gpu in set_}
    return phases, free, len(free - whole)


def id_of(gpu: str) -> int:
    return int(gpu[5:7], 16)


def gpu_of(number: int) -> str:
    return f"0000:{number:02x}:00.0"


BEGIN, END = "<!-- simulated: begin -->\n", "<!-- simulated: end -->\n"


def table_of_document(path: Path) -> str:
    return path.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip()


def write_document(path: Path | None) -> str:
    """Run the cluster of 100 nodes, and put its table into a document; returns it."""
    simulation = Simulation(100, 10_000)
    simulation.run()
    table = simulation.table()
    if path:
        before, rest = path.read_text(encoding="utf-8").split(BEGIN)
        path.write_text(f"{before}{BEGIN}\n{table}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")
    return table


if __name__ == "__main__":
    print(write_document(Path(__file__).parents[2] / "docs/tenants/LEASES.md"))
