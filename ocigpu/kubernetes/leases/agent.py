"""The program that takes GPUs back on a node: finds their holders, resets, switches partitions off, checks.

It makes no decisions: the state machine returns the pending work (:func:`~ocigpu.kubernetes.leases.lease.work`), and
the agent does it and reports the result.  It may be killed at any time; the next one continues from the journal.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from ocigpu.core.errors import OcigpuError, as_own_error
from ocigpu.kubernetes.leases.journal import LeaseJournal
from ocigpu.kubernetes.leases.lease import Effect, Lease, LeaseEvent, LeaseEventKind, LeaseHolder, Phase, describe, work
from ocigpu.system.service import Backoff, ServiceLog, Signals

Answered = TypeVar("Answered")
Otherwise = TypeVar("Otherwise")
PACE = {Phase.FREE: 30.0, Phase.LEASED: 5.0, Phase.QUARANTINED: 60.0, Phase.MAINTENANCE: 60.0}
"""Seconds between looks at who has a GPU open, by phase; in all others it is looked at in every round."""
ABSENT = 10.0
"""Seconds that every list of the kubelet is without a pod before it counts as over: after a restart it takes its pods
in one by one (kubelet, HandlePodAdditions)."""
FIRST_RETRY, LONGEST_RETRY = 5.0, 120.0
WORKERS = 8
"""Resets and checks at once."""


class NodeHands(Protocol):
    """What the agent can do to a node.  Every method may raise OcigpuError, and may be called again at any time."""

    def gpus(self) -> Collection[str]:
        """Return the addresses of the GPUs that VFIO has."""

    def holders(self, gpu: str) -> Sequence[int]:
        """Return the processes that have a GPU open."""

    def pods(self) -> Mapping[str, LeaseHolder]:
        """Return the pod of each GPU, as the kubelet reports it; raises if the kubelet may not know all of its pods."""

    def reset(self, gpu: str) -> str:
        """Reset a GPU that has no holder; returns the proof in a line."""

    def deactivate(self, gpus: Collection[str]) -> None:
        """Switch off every partition with one of these GPUs."""

    def sick(self) -> Mapping[str, str]:
        """Return GPUs that must not go to another tenant in their state; the reason is a word, a colon and text."""

    def check(self, gpu: str) -> Sequence[str]:
        """Compare firmware and health with the baseline; returns the deviations, a line each."""


class LeaseTask(NamedTuple):
    """Something under way: for these GPUs in these generations and turns."""

    effect: Effect
    gpus: tuple[str, ...]
    fences: tuple[tuple[int, int], ...]


class NodeAgent:
    """Call :meth:`step` every second or so; it does not wait for what takes long.

    ``executor``: carries out resets, partitions and checks.  ``failures`` counts what failed, by step and code.
    """

    def __init__(self, journal: LeaseJournal, hands: NodeHands, executor: Executor, log: ServiceLog) -> None:
        self.journal = journal
        self.failures: Counter[tuple[str, str]] = Counter()
        self._hands = hands
        self._executor = executor
        self._log = log
        self._under_way: dict[LeaseTask, Future[LeaseEvent]] = {}
        self._retries: dict[tuple[Effect, tuple[str, ...]], Backoff] = {}
        self._looked: dict[str, float] = {}
        self._absent: dict[str, float] = {}
        self._told: Mapping[str, Lease] = {}
        self._started = False

    def step(self) -> Mapping[str, Lease]:
        """Collect finished work, observe, report, and begin the pending work; returns the leases.

        Raises HostError (OCIGPU-LEASE-1) when the journal cannot be used; the next call tries again.
        """
        now = self.journal.clock()
        there = {*self._ask("GPUs", self._hands.gpus, ())}
        new = there - self.journal.leases.keys() if self._started else there | self.journal.refresh().keys()
        if new:
            self.journal.tell(dict.fromkeys(sorted(new), LeaseEvent(LeaseEventKind.STARTED, text=self.journal.boot)))
        self._started = True
        self._take_in(now)
        self._observe(now)
        leases = self.journal.tell(dict.fromkeys(self.journal.leases, LeaseEvent(LeaseEventKind.TICK)))
        for effect, gpus_ in work(leases, now):
            if effect in (Effect.RESET, Effect.DEACTIVATE, Effect.CHECK):
                self._begin(
                    LeaseTask(effect, gpus_, tuple((leases[gpu].generation, leases[gpu].turn) for gpu in gpus_)), now
                )
        self._tell_of(leases)
        return leases

    def obey(self, acts: Mapping[str, LeaseEvent]) -> None:
        """Tell leases what operators want of them by their objects."""
        for gpu, act in acts.items():
            self.journal.tell({gpu: act}, f"{act.kind} by GPULease: {act.text}")

    def close(self) -> None:
        """Wait for nothing that is under way."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    # looking

    def _observe(self, now: float) -> None:
        leases = self.journal.leases
        due = [gpu for gpu, each in leases.items() if now - self._looked.get(gpu, -1e9) >= PACE.get(each.phase, 0.0)]
        events: dict[str, LeaseEvent] = {}
        for gpu in due:
            pids = self._ask(f"holders of GPU {gpu}", partial(self._hands.holders, gpu), None)
            if pids is not None:
                events[gpu] = LeaseEvent(LeaseEventKind.HOLDERS, pids=tuple(pids))
                self._looked[gpu] = now
        self._tell_several(events)
        sick = self._ask("health", self._hands.sick, {})
        lent = (Phase.RESERVED, Phase.LEASED)
        self._tell_several(
            {gpu: LeaseEvent(LeaseEventKind.SICK, text=sick[gpu]) for gpu in sick if self._phase(gpu) in lent}
        )
        with_pods = [gpu for gpu, each in self.journal.leases.items() if each.phase in _WITH_PODS]
        pods = self._ask("pods", self._hands.pods, None) if with_pods else None
        if pods is None:
            self._tell_several(dict.fromkeys(with_pods, LeaseEvent(LeaseEventKind.PODS_UNKNOWN)))
        absent = [] if pods is None else [gpu for gpu in with_pods if gpu not in pods]
        self._absent = {gpu: self._absent.get(gpu, now) for gpu in absent}
        seen = {gpu: LeaseEvent(LeaseEventKind.POD_SEEN, holder=pods[gpu]) for gpu in with_pods if pods and gpu in pods}
        over = [gpu for gpu, since in self._absent.items() if now - since >= ABSENT]
        self._tell_several(seen | dict.fromkeys(over, LeaseEvent(LeaseEventKind.POD_OVER)))

    def _phase(self, gpu: str) -> Phase | None:
        lease = self.journal.leases.get(gpu)
        return lease.phase if lease else None

    def _ask(self, what: str, question: Callable[[], Answered], otherwise: Otherwise) -> Answered | Otherwise:
        """Return the answer, or a substitute if it fails; logs the reason once."""
        try:
            answer = question()
        except OcigpuError as error:
            self._log.once(what, "warning", f"{what}: {error.line}")
            return otherwise
        self._log.forget(what)
        return answer

    # doing

    def _begin(self, task: LeaseTask, now: float) -> None:
        backoff = self._retries.get((task.effect, task.gpus))
        if any(not other.isdisjoint(task.gpus) for other in (set(each.gpus) for each in self._under_way)):
            return
        if backoff is None or now >= backoff.due:
            self._under_way[task] = self._executor.submit(carry_out, self._hands, task)

    def _take_in(self, now: float) -> None:
        """Tell the leases what came of the tasks that are done."""
        for task in [task for task, future in self._under_way.items() if future.done()]:
            event = self._under_way.pop(task).result()
            key = (task.effect, task.gpus)
            if event.kind in _FAILURES:
                self._retries.setdefault(key, Backoff(FIRST_RETRY, LONGEST_RETRY)).failed(now)
                self.failures[_STEPS[task.effect], event.text.partition(":")[0]] += 1
                self._log("warning", f"{task.effect} of {', '.join(task.gpus)}: {event.text}")
            else:
                self._retries.pop(key, None)
            fenced = zip(task.gpus, task.fences, strict=True)
            self._tell_several({gpu: event._replace(generation=fence[0], turn=fence[1]) for gpu, fence in fenced})

    def _tell_several(self, events: Mapping[str, LeaseEvent]) -> None:
        if events:
            self.journal.tell(events, next(iter(events.values())).kind if len(events) == 1 else "")

    def _tell_of(self, leases: Mapping[str, Lease]) -> None:
        before, self._told = self._told, leases
        for gpu, lease in leases.items():
            if gpu not in before or before[gpu].phase is not lease.phase:
                level = "warning" if lease.phase is Phase.QUARANTINED else "info"
                self._log(level, f"GPU {gpu}: {describe(lease)}")


def carry_out(hands: NodeHands, task: LeaseTask) -> LeaseEvent:
    """Do one thing and return what to tell the leases; never raises."""
    try:
        if task.effect is Effect.RESET:
            return LeaseEvent(LeaseEventKind.RESET_DONE, text=hands.reset(task.gpus[0]))
        if task.effect is Effect.DEACTIVATE:
            hands.deactivate(task.gpus)
            return LeaseEvent(LeaseEventKind.PARTITION_OFF)
        deviations = hands.check(task.gpus[0])
        kind = LeaseEventKind.CHECK_MISMATCH if deviations else LeaseEventKind.CHECK_PASSED
        return LeaseEvent(kind, text="; ".join(deviations))
    except Exception as error:  # noqa: BLE001 - after any error the GPU is kept back, and the work is retried
        own = as_own_error(error)
        return LeaseEvent(_FAILED[task.effect], text=own.line)


_FAILED = {
    Effect.RESET: LeaseEventKind.RESET_FAILED,
    Effect.DEACTIVATE: LeaseEventKind.PARTITION_FAILED,
    Effect.CHECK: LeaseEventKind.CHECK_BROKEN,
}
_FAILURES = tuple(_FAILED.values())
_STEPS = {Effect.RESET: "reset", Effect.DEACTIVATE: "fabric", Effect.CHECK: "check"}
"""Names for metrics."""
_WITH_PODS = (Phase.UNKNOWN, Phase.RESERVED, Phase.LEASED, Phase.RECLAIMING)


Report = Callable[[Mapping[str, Lease], float], Mapping[str, LeaseEvent]]
"""Called in each round with the leases and the time on their clock; does not wait.  Returns what operators want."""


def run_agent(agent: NodeAgent, log: ServiceLog, pace: float, reports: Sequence[Report] = ()) -> None:
    """Work until SIGTERM, SIGINT or SIGQUIT; the next agent repeats unfinished work."""
    with Signals() as signals:
        log("info", f"leases are in {agent.journal.directory}")
        while not signals.stopping:
            try:
                leases = agent.step()
                for report in reports:
                    agent.obey(report(leases, agent.journal.clock()))
                log.forget("defect")
            except Exception as error:  # noqa: BLE001 - GPUs must come back; the next round tries again
                log.failed("defect", error)
            signals.wait(pace)
        log("info", "ending")
    agent.close()
