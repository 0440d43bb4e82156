"""The life of one GPU between its tenants, as a pure function: ``step(lease, event, now)``.

A lease is a record about one GPU.  Its generation grows by one whenever the GPU is reserved, its turn whenever the GPU
is taken back or a check begins.  A finding for another generation or turn is void.  Times are seconds since the boot
and valid within one boot only.  No time-out leads to Free: a jumping clock can delay or quarantine a GPU, never give it
away.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from ocigpu.core.errors import HostError, RequestError, printable


class LeasePhase(StrEnum):
    """The phase of a GPU; docs/tenants/LEASES.md explains each one and what an operator does."""

    UNKNOWN = "Unknown"
    FREE = "Free"
    RESERVED = "Reserved"
    LEASED = "Leased"
    RECLAIMING = "Reclaiming"
    CHECKING = "Checking"
    QUARANTINED = "Quarantined"
    MAINTENANCE = "Maintenance"


Phase = LeasePhase

HELD = (Phase.FREE, Phase.RESERVED, Phase.LEASED)
"""Reported as healthy to the kubelet: a device that a pod holds must stay so, or the pod is not admitted again after
the kubelet's restart (kubelet, cm/devicemanager)."""
PROBE_LIMIT = 300.0
RESERVE_LIMIT = 120.0
"""Seconds that a reservation waits for its pod; it is not over before the kubelet has said that there is none."""
RECLAIM_LIMITS = {"no-holder": 600.0, "reset": 600.0, "partition-off": 1200.0}
"""For each proof, since the one before; a partition waits for the resets of all its GPUs, one of which may fail."""
CHECK_LIMIT = 600.0
CHECK_ATTEMPTS = 3
QUIET = 2.0
"""Seconds without a holder, seen at least twice, before a GPU counts as let go."""
STRIKES = 2
"""Activations of a partition that fail one after another before its GPUs are quarantined."""
FIRST_PAUSE, LONGEST_PAUSE = 30.0, 600.0
"""Seconds before a check is tried again whose means failed: an image, a VM, a BMC."""

OVER, IDLE, RESET, OFF, ON = "pod-over", "no-holder", "reset", "partition-off", "partition-on"
PROOFS = (OVER, IDLE, RESET, OFF)
"""What must be known of a GPU, in this order, before it is checked."""
STUCK = {IDLE: "HolderStuck", RESET: "ResetFailed", OFF: "PartitionStuck"}
"""Reasons of a quarantine, by the proof that did not come in time."""


NO_KUBELET = "the kubelet does not report its pods"
"""Detail of a lease that waits for it; the agent's log has the error."""


class Effect(StrEnum):
    """What the node has to do for a lease in its state; each may be done twice."""

    PROBE = "probe the holders"
    FIND_POD = "look for the pod"
    ACTIVATE = "activate the partition"
    RESET = "reset"
    DEACTIVATE = "deactivate the partition"
    CHECK = "check"


_OF_SETS = (Effect.ACTIVATE, Effect.RESET, Effect.DEACTIVATE)


class LeaseHolder(NamedTuple):
    """The pod that has a GPU; ``uid`` and ``tenancy`` are "" where only the kubelet could be asked."""

    namespace: str
    pod: str
    container: str
    uid: str = ""
    tenancy: str = ""


@dataclass(frozen=True, slots=True)
class Lease:
    """The state of one GPU.

    ``gpu``: PCI address.  ``since``: when the phase was entered; ``timer``: when its time-out began, -1 for none.
    ``lease_set``, ``members``: of the container that has or had it; the set's GPUs pass through Reclaiming together.
    ``proofs``: what has been established in this phase.  ``quiet``: since when it has no holder, -1 for unknown.
    ``attempt``, ``failures``, ``due``: of the check.  ``sick``: why it will be quarantined instead of checked,
    ``maintenance``: why it will go there instead of Free; both are a one-word reason, a colon and text.  ``was``: the
    phase before Unknown.
    """

    gpu: str
    phase: Phase = Phase.UNKNOWN
    generation: int = 0
    turn: int = 0
    boot: str = ""
    since: float = 0.0
    timer: float = 0.0
    lease_set: str = ""
    members: tuple[str, ...] = ()
    holder: LeaseHolder | None = None
    proofs: tuple[str, ...] = ()
    quiet: float = -1.0
    attempt: int = 0
    failures: int = 0
    due: float = 0.0
    strikes: int = 0
    sick: str = ""
    maintenance: str = ""
    was: str = ""
    reason: str = ""
    detail: str = ""

    @property
    def sick_reason(self) -> str:
        """Why it will be quarantined, in one word; "" when it will not."""
        return self.sick.partition(":")[0]


class LeaseEventKind(StrEnum):
    """What a node reports to a lease."""

    STARTED = "started"
    TICK = "tick"
    RESERVE = "reserve"
    HOLDERS = "holders"
    POD_SEEN = "pod-seen"
    POD_OVER = "pod-over"
    PODS_UNKNOWN = "pods-unknown"
    PARTITION_ON = "partition-on"
    PARTITION_OFF = "partition-off"
    PARTITION_FAILED = "partition-failed"
    RESET_DONE = "reset-done"
    RESET_FAILED = "reset-failed"
    CHECK_PASSED = "check-passed"
    CHECK_MISMATCH = "check-mismatch"
    CHECK_BROKEN = "check-broken"
    SICK = "sick"
    RELEASE = "release"
    QUARANTINE = "quarantine"
    MAINTAIN = "maintain"


class LeaseEvent(NamedTuple):
    """``generation``, ``turn``: of the lease at the time of the finding, -1 where that does not matter.

    ``text``: reason, boot id or set, by the kind; ``pids``: processes that hold the GPU; ``members``: GPUs of a set.
    """

    kind: LeaseEventKind
    generation: int = -1
    turn: int = -1
    text: str = ""
    pids: tuple[int, ...] = ()
    members: tuple[str, ...] = ()
    holder: LeaseHolder | None = None


def step(lease: Lease, event: LeaseEvent, now: float) -> tuple[Lease, tuple[Effect, ...]]:
    """Return the lease after an event, and the work pending for it.

    An event of another generation or turn, or one without meaning in this phase, changes nothing.  ``now``: seconds
    since the boot.  A lease equal to the former one need not be recorded.
    """
    stale = event.generation not in (-1, lease.generation) or event.turn not in (-1, lease.turn)
    if not stale:
        lease = _HANDLERS[event.kind](lease, event, now)
    return lease, effects(lease, now)


def effects(lease: Lease, now: float) -> tuple[Effect, ...]:
    """Return what a lease lacks, from its state alone: after a crash the same is done again."""
    if lease.phase in (Phase.QUARANTINED, Phase.MAINTENANCE):
        return ()
    wanted = [Effect.PROBE]
    if lease.phase is Phase.RESERVED:
        wanted += [Effect.FIND_POD] if ON in lease.proofs else [Effect.ACTIVATE, Effect.FIND_POD]
    elif lease.phase is Phase.LEASED:
        wanted.append(Effect.FIND_POD)
    elif lease.phase is Phase.RECLAIMING:
        missing = next((proof for proof in PROOFS if proof not in lease.proofs), "")
        wanted += {RESET: [Effect.RESET], OFF: [Effect.DEACTIVATE]}.get(missing, [])
        wanted += [Effect.FIND_POD] if OVER not in lease.proofs else []
    elif lease.phase is Phase.CHECKING and now >= lease.due:
        wanted.append(Effect.CHECK)
    return tuple(wanted)


def is_released(lease: Lease) -> bool:
    """Whether pod and VM are known to be gone, so that the GPU may be reset and its partition switched off."""
    return lease.phase in (Phase.FREE, Phase.CHECKING, Phase.MAINTENANCE) or (
        {OVER, IDLE} <= set(lease.proofs) and lease.phase in (Phase.RECLAIMING, Phase.QUARANTINED)
    )


def blocked_by(lease: Lease, leases: Mapping[str, Lease]) -> str:
    """Return another GPU of the same set that is not released yet, "" for none: a VM has all of them or none."""
    return next((each.gpu for each in _peers(lease, leases)[1:] if not is_released(each)), "")


def work(leases: Mapping[str, Lease], now: float) -> list[tuple[Effect, tuple[str, ...]]]:
    """Return a node's pending work, each with its GPUs; a partition is switched on and off once for its set.

    No GPU of a set is reset before all of them are released, and the partition stays on until all have been reset.
    """
    found: dict[tuple[Effect, tuple[str, ...]], None] = {}
    for gpu, lease in sorted(leases.items()):
        for effect in effects(lease, now):
            gpus: tuple[str, ...] = (gpu,)
            if effect in _OF_SETS:
                together = _peers(lease, leases)
                if effect is not Effect.ACTIVATE and not all(map(is_released, together)):
                    continue
                if effect is Effect.DEACTIVATE and any(Effect.RESET in effects(each, now) for each in together):
                    continue
                gpus = gpus if effect is Effect.RESET else tuple(sorted(each.gpu for each in together))
            found[effect, gpus] = None
    return list(found)


def _peers(lease: Lease, leases: Mapping[str, Lease]) -> list[Lease]:
    """Return the leases of the same set, this one included."""
    known = [leases[gpu] for gpu in lease.members if gpu in leases and gpu != lease.gpu]
    return [lease, *(each for each in known if each.lease_set == lease.lease_set)]


def set_name(leases: Iterable[Lease], ahead: int = 1) -> str:
    """Return the name of the set that these leases would be next, unique for ever: an address and its generation."""
    first = min(leases, key=lambda lease: lease.gpu)
    return f"{first.gpu}/{first.generation + ahead}"


def is_repeated(leases: Collection[Lease], name: str = "") -> bool:
    """Whether the same request was reserved already and cannot have been used: it may be answered again.

    The partition is switched on before the answer.  From then on a machine may have come and gone unobserved, and the
    next pod may be another tenant's.  ``name``: of the set, if the request has one: a reservation for a claim is valid
    for no other claim and for no pod.
    """
    gpus, wanted = sorted(lease.gpu for lease in leases), name or set_name(leases, 0)
    return all(
        (lease.phase, lease.lease_set, sorted(lease.members), lease.holder) == (Phase.RESERVED, wanted, gpus, None)
        and (name or ON not in lease.proofs)
        for lease in leases
    )


def why_withheld(lease: Lease | None, boot: str) -> str:
    """Return why a GPU is neither offered nor in use, "" when it is Free or a pod has it."""
    if lease is None:
        return "it has no lease yet"
    if lease.boot != boot:
        return f"lease of an earlier boot, generation {lease.generation}"
    return "" if lease.phase in HELD else describe(lease)


def check_reservable(leases: Iterable[Lease]) -> None:
    """Raise HostError (OCIGPU-LEASE-2) unless all are Free; it names the other one, its phase and the reason."""
    for lease in leases:
        if lease.phase is not Phase.FREE:
            raise HostError("OCIGPU-LEASE-2", f"GPU {lease.gpu} cannot be assigned: {describe(lease)}")


def describe(lease: Lease) -> str:
    """Return the state of a GPU in a line: phase, generation, what is missing."""
    text = f"lease is {lease.phase}, generation {lease.generation}"
    text += f" ({lease.reason})" if lease.reason else ""
    if lease.phase is Phase.RECLAIMING:
        text += f", missing: {', '.join(proof for proof in PROOFS if proof not in lease.proofs) or 'nothing'}"
    return text + (f": {lease.detail}" if lease.detail else "")


def check_act(lease: Lease, event: LeaseEvent) -> None:
    """Raise RequestError (OCIGPU-LEASE-3) for an operator's act that a lease does not take, for the reason."""
    what = f"{event.kind} of GPU {lease.gpu}"
    if event.generation != lease.generation:
        raise RequestError("OCIGPU-LEASE-3", f"{what}: the generation is {lease.generation}, not {event.generation}")
    kept = lease.phase in (Phase.QUARANTINED, Phase.MAINTENANCE) or lease.maintenance
    if event.kind is LeaseEventKind.RELEASE and not kept:
        raise RequestError("OCIGPU-LEASE-3", f"{what}: it is {lease.phase}, neither Quarantined nor in Maintenance")
    if event.kind is LeaseEventKind.MAINTAIN and lease.phase is Phase.QUARANTINED:
        raise RequestError("OCIGPU-LEASE-3", f"{what}: it is Quarantined, and stays so until it is released")


# what each event does


def _enter(lease: Lease, phase: Phase, now: float, reason: str = "", detail: str = "", **changes: Any) -> Lease:
    """Return the lease at the start of a phase: no proofs yet, its time-out runs."""
    fresh: dict[str, Any] = {
        "timer": now,
        "proofs": (),
        "quiet": -1.0,
        "attempt": 0,
        "failures": 0,
        "due": 0.0,
        "was": "",
    }
    detail = printable(detail, 500)
    return replace(lease, phase=phase, since=now, reason=reason, detail=detail, **(fresh | changes))


def _reclaim(
    lease: Lease, now: float, reason: str, detail: str = "", sick: str = "", proofs: tuple[str, ...] = ()
) -> Lease:
    """Take the GPU back; the time-out runs when the pod is over."""
    timer = now if OVER in proofs else -1.0
    turn = lease.turn + 1
    sick = lease.sick or sick
    return _enter(lease, Phase.RECLAIMING, now, reason, detail, turn=turn, sick=sick, proofs=proofs, timer=timer)


def _quarantine(lease: Lease, now: float, reason: str, detail: str = "") -> Lease:
    """Existing proofs stay: the other GPUs of the set may continue."""
    return _enter(lease, Phase.QUARANTINED, now, reason, detail, proofs=lease.proofs, turn=lease.turn + 1, sick="")


def _check(lease: Lease, now: float) -> Lease:
    return _enter(lease, Phase.CHECKING, now, turn=lease.turn + 1, attempt=1)


def _free(lease: Lease, now: float) -> Lease:
    phase = Phase.MAINTENANCE if lease.maintenance else Phase.FREE
    reason, _, detail = lease.maintenance.partition(": ")
    return _enter(lease, phase, now, reason, detail, lease_set="", members=(), holder=None, maintenance="")


def _prove(lease: Lease, proof: str, now: float, detail: str = "") -> Lease:
    """The time-out of the next proof begins, but not before the pod is over."""
    if proof in lease.proofs:
        return lease
    proofs = (*lease.proofs, proof)
    timer = now if OVER in proofs or lease.phase is not Phase.RECLAIMING else -1.0
    return replace(lease, proofs=proofs, timer=timer, detail=printable(detail, 500))


def _without(lease: Lease, *proofs: str) -> Lease:
    left = tuple(proof for proof in lease.proofs if proof not in proofs)
    return lease if left == lease.proofs else replace(lease, proofs=left)


def _started(lease: Lease, event: LeaseEvent, now: float) -> Lease:
    """The program has started, ``text`` is the boot id: earlier observations may be out of date."""
    same = lease.boot == event.text
    lease = replace(lease, boot=event.text)
    if lease.phase in (Phase.QUARANTINED, Phase.MAINTENANCE):
        return lease if same else replace(lease, since=now, timer=now)
    if not same:
        return _enter(lease, Phase.UNKNOWN, now, "BootChanged", was="", turn=lease.turn + 1)
    if lease.phase is Phase.FREE:
        return _enter(lease, Phase.UNKNOWN, now, "Started", was=Phase.FREE)
    if lease.phase is Phase.RECLAIMING:
        return _reclaim(lease, now, lease.reason, lease.detail)
    if lease.phase is Phase.CHECKING:
        return replace(lease, turn=lease.turn + 1)
    return replace(lease, quiet=-1.0)


def _reserve(lease: Lease, event: LeaseEvent, now: float) -> Lease:
    if lease.phase is not Phase.FREE:
        return lease
    generation, turn = lease.generation + 1, lease.turn + 1
    return _enter(
        lease, Phase.RESERVED, now, generation=generation, turn=turn, lease_set=event.text, members=event.members
    )


def _holders(lease: Lease, event: LeaseEvent, now: float) -> Lease:
    return _held(lease, event, now) if event.pids else _not_held(lease, now)


def _held(lease: Lease, event: LeaseEvent, now: float) -> Lease:
    who = f"process {', '.join(map(str, event.pids[:4]))} has the GPU open"
    if lease.phase is Phase.FREE:
        return _reclaim(lease, now, "HolderUnexpected", who, sick="HolderUnexpected")
    if lease.phase is Phase.UNKNOWN:
        sick = "HolderUnexpected" if lease.was == Phase.FREE or not lease.lease_set else ""
        return _enter(lease, Phase.LEASED, now, "HolderFound", who, sick=lease.sick or sick)
    if lease.phase is Phase.RESERVED:
        return _enter(lease, Phase.LEASED, now)
    if lease.phase is Phase.CHECKING:
        return _reclaim(lease, now, "HolderUnexpected", who)
    if lease.phase is Phase.LEASED:
        return lease if lease.quiet < 0 else replace(lease, quiet=-1.0)
    if lease.phase is Phase.RECLAIMING:
        if lease.members and OVER not in lease.proofs and RESET not in lease.proofs:  # its pod's VM was started again
            return _enter(lease, Phase.LEASED, now, "VmStartedAgain")
        undone = _without(lease, IDLE, RESET, OFF)
        return replace(undone, quiet=-1.0, detail=who, turn=lease.turn + (undone is not lease))
    return lease


def _not_held(lease: Lease, now: float) -> Lease:
    if lease.phase is Phase.UNKNOWN:
        return _free(lease, now) if lease.was == Phase.FREE else _reclaim(lease, now, lease.reason or "JournalEmpty")
    if lease.phase not in (Phase.LEASED, Phase.RECLAIMING) or IDLE in lease.proofs:
        return lease
    if not 0 <= lease.quiet <= now:
        return replace(lease, quiet=now)
    if now - lease.quiet < QUIET:
        return lease
    if lease.phase is Phase.LEASED:
        return _reclaim(lease, now, "VmEnded", proofs=(IDLE,))
    return _prove(lease, IDLE, now)


def _pod_seen(lease: Lease, event: LeaseEvent, _now: float) -> Lease:
    if lease.phase is Phase.RECLAIMING and RESET not in lease.proofs:
        lease = _with_kubelet(lease)
        return lease if OVER not in lease.proofs else replace(_without(lease, OVER), timer=-1.0)
    if lease.phase not in (Phase.UNKNOWN, Phase.RESERVED, Phase.LEASED) or event.holder is None:
        return lease
    known = lease.holder
    if known is None or known[:3] != event.holder[:3]:
        sick = lease.sick or ("HolderChanged" if known is not None and lease.phase is Phase.LEASED else "")
        return replace(lease, holder=event.holder, sick=sick)
    better = event.holder._replace(uid=event.holder.uid or known.uid, tenancy=event.holder.tenancy or known.tenancy)
    return lease if better == known else replace(lease, holder=better)


def _pod_over(lease: Lease, event: LeaseEvent, now: float) -> Lease:
    """No pod of this node has the GPU; a reservation whose pod was never seen may still get one.

    ``text``: who has given it back; then no pod will come.
    """
    if lease.phase is Phase.RESERVED and lease.holder is None and not event.text:
        return _reclaim(lease, now, "NoPod", proofs=(OVER,)) if now - lease.timer > RESERVE_LIMIT else lease
    if lease.phase in (Phase.RESERVED, Phase.LEASED):
        return _reclaim(lease, now, "PodEnded", proofs=(OVER,))
    if lease.phase is Phase.RECLAIMING and OVER not in lease.proofs:
        return _prove(lease, OVER, now, _with_kubelet(lease).detail)
    return lease


def _pods_unknown(lease: Lease, _event: LeaseEvent, _now: float) -> Lease:
    """Nobody can say whether its pod is over; other details stay, so that the two do not take turns in the journal."""
    waits = lease.phase is Phase.RECLAIMING and OVER not in lease.proofs
    return replace(lease, detail=NO_KUBELET) if waits and not lease.detail else lease


def _with_kubelet(lease: Lease) -> Lease:
    return replace(lease, detail="") if lease.detail == NO_KUBELET else lease


def _partition_on(lease: Lease, event: LeaseEvent, now: float) -> Lease:
    return replace(_prove(lease, ON, now, event.text), strikes=0) if lease.phase is Phase.RESERVED else lease


def _partition_failed(lease: Lease, event: LeaseEvent, now: float) -> Lease:
    if lease.phase is not Phase.RESERVED:
        return replace(lease, detail=printable(event.text, 500)) if lease.phase is Phase.RECLAIMING else lease
    strikes = lease.strikes + 1
    sick = "PartitionStuck" if strikes >= STRIKES else ""
    return replace(_reclaim(lease, now, "PartitionFailed", event.text, sick), strikes=strikes)


def _partition_off(lease: Lease, _event: LeaseEvent, now: float) -> Lease:
    if lease.phase is not Phase.RECLAIMING or not {OVER, IDLE, RESET} <= set(lease.proofs):
        return lease
    lease = _prove(lease, OFF, now, lease.detail)
    reason, _, detail = lease.sick.partition(": ")
    return _quarantine(lease, now, reason, detail or lease.detail) if reason else _check(lease, now)


def _reset_done(lease: Lease, event: LeaseEvent, now: float) -> Lease:
    if lease.phase is not Phase.RECLAIMING or not {OVER, IDLE} <= set(lease.proofs):
        return lease
    return _prove(lease, RESET, now, event.text)


def _reset_failed(lease: Lease, event: LeaseEvent, _now: float) -> Lease:
    return replace(lease, detail=printable(event.text, 500)) if lease.phase is Phase.RECLAIMING else lease


def _check_passed(lease: Lease, _event: LeaseEvent, now: float) -> Lease:
    return _free(lease, now) if lease.phase is Phase.CHECKING else lease


def _check_mismatch(lease: Lease, event: LeaseEvent, now: float) -> Lease:
    return _quarantine(lease, now, "FirmwareMismatch", event.text) if lease.phase is Phase.CHECKING else lease


def _check_broken(lease: Lease, event: LeaseEvent, now: float) -> Lease:
    """What checks failed, not the GPU: tried again ever more rarely until the time-out."""
    if lease.phase is not Phase.CHECKING:
        return lease
    due = now + min(FIRST_PAUSE * 2 ** min(lease.failures, 10), LONGEST_PAUSE)
    text = printable(event.text, 500)
    return replace(lease, failures=lease.failures + 1, due=due, turn=lease.turn + 1, reason="CheckBroken", detail=text)


def _sick(lease: Lease, event: LeaseEvent, now: float) -> Lease:
    """``text``: reason, in one word; a held GPU stays with its tenant, and is quarantined afterwards."""
    reason, _, detail = event.text.partition(": ")
    if lease.phase in (Phase.FREE, Phase.UNKNOWN, Phase.CHECKING, Phase.MAINTENANCE):
        return _quarantine(lease, now, reason, detail)
    if lease.sick or lease.phase is Phase.QUARANTINED:
        return lease
    return replace(lease, sick=printable(event.text, 500), detail=printable(detail, 500))


def _release(lease: Lease, event: LeaseEvent, now: float) -> Lease:
    """A GPU that is not withheld from tenants yet will not be."""
    if lease.phase not in (Phase.QUARANTINED, Phase.MAINTENANCE):
        return replace(lease, maintenance="")
    return replace(_reclaim(replace(lease, sick=""), now, "Released", event.text), strikes=0)


def _maintain(lease: Lease, event: LeaseEvent, now: float) -> Lease:
    """``text``: reason in one word, and more; a held GPU stays with its tenant, and is not free afterwards."""
    if lease.phase in (Phase.QUARANTINED, Phase.MAINTENANCE) or lease.maintenance:
        return lease
    lease = replace(lease, maintenance=printable(event.text, 300) or "OperatorRequest")
    return _free(lease, now) if lease.phase is Phase.FREE else lease


def _tick(lease: Lease, _event: LeaseEvent, now: float) -> Lease:
    elapsed = now - lease.timer if lease.timer >= 0 else 0.0
    if lease.phase is Phase.UNKNOWN and elapsed > PROBE_LIMIT:
        return _quarantine(lease, now, "ProbeFailed", lease.detail)
    if lease.phase is Phase.RECLAIMING and OVER in lease.proofs:
        missing = next(proof for proof in PROOFS if proof not in lease.proofs)
        return _quarantine(lease, now, STUCK[missing], lease.detail) if elapsed > RECLAIM_LIMITS[missing] else lease
    if lease.phase is Phase.CHECKING and elapsed > CHECK_LIMIT:
        if lease.attempt >= CHECK_ATTEMPTS:
            reason = "CheckUnavailable" if lease.failures else "CheckTimeout"
            return _quarantine(lease, now, reason, lease.detail)
        return replace(lease, attempt=lease.attempt + 1, turn=lease.turn + 1, timer=now)
    return lease


_HANDLERS: Mapping[LeaseEventKind, Callable[[Lease, LeaseEvent, float], Lease]] = {
    LeaseEventKind.STARTED: _started,
    LeaseEventKind.TICK: _tick,
    LeaseEventKind.RESERVE: _reserve,
    LeaseEventKind.HOLDERS: _holders,
    LeaseEventKind.POD_SEEN: _pod_seen,
    LeaseEventKind.POD_OVER: _pod_over,
    LeaseEventKind.PODS_UNKNOWN: _pods_unknown,
    LeaseEventKind.PARTITION_ON: _partition_on,
    LeaseEventKind.PARTITION_OFF: _partition_off,
    LeaseEventKind.PARTITION_FAILED: _partition_failed,
    LeaseEventKind.RESET_DONE: _reset_done,
    LeaseEventKind.RESET_FAILED: _reset_failed,
    LeaseEventKind.CHECK_PASSED: _check_passed,
    LeaseEventKind.CHECK_MISMATCH: _check_mismatch,
    LeaseEventKind.CHECK_BROKEN: _check_broken,
    LeaseEventKind.SICK: _sick,
    LeaseEventKind.RELEASE: _release,
    LeaseEventKind.QUARANTINE: _sick,
    LeaseEventKind.MAINTAIN: _maintain,
}
