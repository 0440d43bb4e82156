"""Prometheus metrics of a node's leases: phases of GPUs, duration of the handover, failures."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from ocigpu import __version__
from ocigpu.core.errors import OcigpuError
from ocigpu.kubernetes.leases.lease import IDLE, OFF, RESET, Lease, LeaseEvent, Phase
from ocigpu.system.exposition import Pairs, render_histogram, render_number

BOUNDS = (1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0)
STEPS = {IDLE: "holder", RESET: "reset", OFF: "fabric"}
"""Steps of the way between two tenants, by the proof that ends them; then "check", and "all" from begin to end."""
METRICS = {
    "ocigpu_lease_gpus": ("gauge", "GPUs in this phase."),
    "ocigpu_lease_phase_seconds": ("gauge", "How long a GPU has been in its phase."),
    "ocigpu_lease_transitions_total": ("counter", "How often a GPU has entered this phase."),
    "ocigpu_lease_step_seconds": ("histogram", "Seconds of a step between two tenants."),
    "ocigpu_lease_failures_total": ("counter", "Steps that failed and are retried, by error code."),
    "ocigpu_lease_quarantines_total": ("counter", "GPUs that were quarantined, by reason."),
    "ocigpu_lease_free_sets": ("gauge", "Partitions of this size whose GPUs are all free."),
    "ocigpu_lease_largest_free_set": ("gauge", "GPUs in the largest request that fits now."),
    "ocigpu_lease_agent_info": ("gauge", "The agent's version."),
}
"""Types and help, by name; docs/METRICS.md is made of them.  All count since the agent was started."""
Series = Sequence[tuple[Pairs, float]]


class LeaseMetrics:
    """Counts what becomes of leases, round by round; :meth:`render` may be called by another thread.

    ``sets``: returns the sets of GPUs that a request can have, by address; None where any set will do.  ``failures``:
    steps that failed, by step and code, as others count them.
    """

    def __init__(
        self,
        sets: Callable[[], Sequence[Sequence[str]] | None] = lambda: None,
        failures: "Counter[tuple[str, str]] | None" = None,
    ) -> None:
        self.failures: Counter[tuple[str, str]] = Counter() if failures is None else failures
        self._sets = sets
        self._leases: Mapping[str, Lease] = {}
        self._now = 0.0
        self._began: dict[str, float] = {}
        self._entered: Counter[str] = Counter()
        self.quarantined: Counter[str] = Counter()
        self._steps: dict[str, tuple[list[int], float]] = {}

    def take(self, leases: Mapping[str, Lease], now: float) -> Mapping[str, LeaseEvent]:
        """Count the events since the last call; changes no lease.  ``now``: on the leases' clock."""
        for gpu, lease in leases.items():
            before = self._leases.get(gpu)
            if before is not None and before != lease:
                self._note(before, lease)
        self._leases, self._now = leases, now
        return {}

    def _note(self, before: Lease, lease: Lease) -> None:
        for step, seconds in steps_between(before, lease).items():
            self._measure(step, seconds)
        if before.phase is lease.phase:
            return
        self._entered[lease.phase] += 1
        if lease.phase is Phase.QUARANTINED:
            self.quarantined[lease.reason] += 1
        if lease.phase is Phase.RECLAIMING:
            self._began[lease.gpu] = lease.since
            if lease.reason == "PartitionFailed":
                self.failures["activate", lease.reason] += 1
        elif lease.phase is not Phase.CHECKING:
            began = self._began.pop(lease.gpu, None)
            if began is not None and lease.phase in (Phase.FREE, Phase.MAINTENANCE):
                self._measure("all", lease.since - began)

    def _measure(self, step: str, seconds: float) -> None:
        counts, total = self._steps.get(step, ([0] * (len(BOUNDS) + 1), 0.0))
        counts = list(counts)
        counts[bisect_left(BOUNDS, seconds)] += 1
        self._steps[step] = counts, round(total + seconds, 3)

    def render(self) -> bytes:
        """Return all of it in Prometheus' text format."""
        leases, now = self._leases, self._now
        phases = Counter(lease.phase for lease in leases.values())
        lasted = [
            ((("gpu", gpu), ("phase", str(lease.phase))), round(max(now - lease.since, 0.0), 3))
            for gpu, lease in sorted(leases.items())
        ]
        failures = [((("step", step), ("reason", why)), n) for (step, why), n in sorted(self.failures.copy().items())]
        found: dict[str, Series] = {
            "ocigpu_lease_gpus": [((("phase", str(phase)),), phases[phase]) for phase in Phase],
            "ocigpu_lease_phase_seconds": lasted,
            "ocigpu_lease_transitions_total": [((("phase", str(phase)),), self._entered[phase]) for phase in Phase],
            "ocigpu_lease_failures_total": failures,
            "ocigpu_lease_quarantines_total": [
                ((("reason", why),), n) for why, n in sorted(self.quarantined.copy().items())
            ],
            "ocigpu_lease_agent_info": [((("version", __version__),), 1)],
            **self._free_sets(),
        }
        lines = [render_number(name, *METRICS[name], *series) for name, series in found.items()]
        name = "ocigpu_lease_step_seconds"
        steps = [((("step", step),), *measured) for step, measured in sorted(self._steps.copy().items())]
        return "".join((*lines, render_histogram(name, METRICS[name][1], BOUNDS, *steps))).encode()

    def _free_sets(self) -> dict[str, Series]:
        """Return how many sets of each size are free, and the largest; nothing where the sets are not known."""
        free = {gpu for gpu, lease in self._leases.items() if lease.phase is Phase.FREE}
        try:
            sets = self._sets()
        except OcigpuError:
            return {}
        if sets is None:
            return {"ocigpu_lease_largest_free_set": [((), len(free))]}
        counts = {len(each): 0 for each in sets} | Counter(len(each) for each in sets if free.issuperset(each))
        return {
            "ocigpu_lease_free_sets": [((("gpus", str(size)),), count) for size, count in sorted(counts.items())],
            "ocigpu_lease_largest_free_set": [((), max((size for size, count in counts.items() if count), default=0))],
        }


def steps_between(before: Lease, lease: Lease) -> dict[str, float]:
    """Return the steps that have ended between two looks at a lease, with their seconds; two at once count as one."""
    same = before.turn == lease.turn
    if before.phase is Phase.CHECKING and same and lease.phase in (Phase.FREE, Phase.MAINTENANCE):
        return {"check": lease.since - before.since}
    if before.phase is not Phase.RECLAIMING or before.timer < 0:
        return {}
    if lease.phase is Phase.CHECKING and before.turn + 1 == lease.turn:
        return {STEPS[OFF]: lease.since - before.timer}
    new = [proof for proof in lease.proofs if proof in STEPS and proof not in before.proofs]
    return {STEPS[new[-1]]: lease.timer - before.timer} if new and same else {}
