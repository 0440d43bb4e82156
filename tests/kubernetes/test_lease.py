"""The life of a lease: what each event does in each phase, and what no sequence of events can do."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ocigpu.core.errors import HostError, RequestError
from ocigpu.kubernetes.leases.lease import (
    CHECK_LIMIT,
    QUIET,
    RECLAIM_LIMITS,
    RESERVE_LIMIT,
    Effect,
    Lease,
    LeaseEvent,
    LeaseEventKind,
    LeaseHolder,
    Phase,
    blocked_by,
    check_act,
    check_reservable,
    describe,
    effects,
    is_repeated,
    set_name,
    step,
    work,
)

GPU, OTHER = "0000:1b:00.0", "0000:43:00.0"
POD = LeaseHolder("tenant-a", "pod", "main")
VM = LeaseEvent(LeaseEventKind.HOLDERS, pids=(77,))
NOBODY = LeaseEvent(LeaseEventKind.HOLDERS)
SEEN = LeaseEvent(LeaseEventKind.POD_SEEN, holder=POD)
OVER = LeaseEvent(LeaseEventKind.POD_OVER)
TICK = LeaseEvent(LeaseEventKind.TICK)
NEXT = LeaseEvent(LeaseEventKind.STARTED, text="next")
BOOT = LeaseEvent(LeaseEventKind.STARTED, text="boot")


def free(gpu: str = GPU) -> Lease:
    return Lease(gpu, Phase.FREE, generation=6, turn=20, boot="boot")


def follow(lease: Lease, *events: tuple[float, LeaseEvent]) -> Lease:
    for now, event in events:
        lease, _ = step(lease, event, now)
    return lease


def reserved(*gpus: str) -> dict[str, Lease]:
    leases = [free(gpu) for gpu in gpus or (GPU,)]
    event = LeaseEvent(LeaseEventKind.RESERVE, text=set_name(leases), members=gpus or (GPU,))
    return {lease.gpu: step(lease, event, 100.0)[0] for lease in leases}


def leased(*gpus: str) -> dict[str, Lease]:
    on = LeaseEvent(LeaseEventKind.PARTITION_ON)
    return {gpu: follow(lease, (101, on), (102, SEEN), (110, VM)) for gpu, lease in reserved(*gpus).items()}


def checking() -> Lease:
    return follow(
        leased()[GPU], (200, OVER), (201, NOBODY), (204, NOBODY),
        (205, LeaseEvent(LeaseEventKind.RESET_DONE, text="bus reset")), (206, LeaseEvent(LeaseEventKind.PARTITION_OFF)),
    )  # fmt: skip


def test_the_whole_life() -> None:
    lease = leased()[GPU]
    assert (lease.phase, lease.generation, lease.holder) == (Phase.LEASED, 7, POD)
    assert effects(lease, 120) == (Effect.PROBE, Effect.FIND_POD)
    lease = checking()
    assert (lease.phase, lease.generation) == (Phase.CHECKING, 7)
    assert effects(lease, 207) == (Effect.PROBE, Effect.CHECK)
    lease = follow(lease, (210, LeaseEvent(LeaseEventKind.CHECK_PASSED, 7, lease.turn)))
    assert (lease.phase, lease.holder, lease.members) == (Phase.FREE, None, ())


PATHS: dict[str, tuple[Lease, list[tuple[float, LeaseEvent]], Phase, str]] = {
    "no pod comes": (reserved()[GPU], [(101 + RESERVE_LIMIT, OVER)], Phase.RECLAIMING, "NoPod"),
    "the kubelet does not say whether one comes": (reserved()[GPU], [(3700, TICK)], Phase.RESERVED, ""),
    "its image takes an hour": (reserved()[GPU], [(102, SEEN), (3700, TICK)], Phase.RESERVED, ""),
    "the pod is refused": (reserved()[GPU], [(102, SEEN), (103, OVER)], Phase.RECLAIMING, "PodEnded"),
    "nobody has asked the kubelet yet": (reserved()[GPU], [(103, OVER)], Phase.RESERVED, ""),
    "the VM is gone for a moment": (
        leased()[GPU],
        [(150, NOBODY), (151, NOBODY), (151.5, VM), (153, NOBODY)],
        Phase.LEASED,
        "",
    ),
    "the VM has ended, the pod has not": (leased()[GPU], [(150, NOBODY), (153, NOBODY)], Phase.RECLAIMING, "VmEnded"),
    "and is started again by the kubelet": (
        leased()[GPU],
        [(150, NOBODY), (153, NOBODY), (170, VM)],
        Phase.LEASED,
        "VmStartedAgain",
    ),
    "the pod is gone, its VM stays": (
        leased()[GPU],
        [(150, OVER), (160, VM), (151 + RECLAIM_LIMITS["no-holder"], TICK)],
        Phase.QUARANTINED,
        "HolderStuck",
    ),
    "the pod backs off for an hour": (
        leased()[GPU],
        [(150, NOBODY), (153, NOBODY), (3800, TICK)],
        Phase.RECLAIMING,
        "VmEnded",
    ),
    "the reset fails": (
        leased()[GPU],
        [
            (150, OVER),
            (151, NOBODY),
            (154, NOBODY),
            (155, LeaseEvent(LeaseEventKind.RESET_FAILED, text="no method")),
            (900, TICK),
        ],
        Phase.QUARANTINED,
        "ResetFailed",
    ),
    "a reset that nobody may do proves nothing": (
        leased()[GPU],
        [(150, OVER), (151, LeaseEvent(LeaseEventKind.RESET_DONE))],
        Phase.RECLAIMING,
        "PodEnded",
    ),
    "a process holds a free GPU": (free(), [(10, VM)], Phase.RECLAIMING, "HolderUnexpected"),
    "a process holds a GPU that is checked": (checking(), [(208, VM)], Phase.RECLAIMING, "HolderUnexpected"),
    "the firmware is another": (
        checking(),
        [(210, LeaseEvent(LeaseEventKind.CHECK_MISMATCH, text="VBIOS 96.1 for 96.0"))],
        Phase.QUARANTINED,
        "FirmwareMismatch",
    ),
    "the BMC is silent for a while": (
        checking(),
        [(210, LeaseEvent(LeaseEventKind.CHECK_BROKEN, text="BMC: timed out")), (211, TICK)],
        Phase.CHECKING,
        "CheckBroken",
    ),
    "no check ever answers": (
        checking(),
        [(207 + (CHECK_LIMIT + 1) * number, TICK) for number in range(1, 4)],
        Phase.QUARANTINED,
        "CheckTimeout",
    ),
    "an error of the GPU while it is lent": (
        leased()[GPU],
        [(150, LeaseEvent(LeaseEventKind.SICK, text="Xid: 79"))],
        Phase.LEASED,
        "",
    ),
    "and afterwards": (
        replace(leased()[GPU], sick="Xid"),
        [
            (150, OVER),
            (151, NOBODY),
            (154, NOBODY),
            (155, LeaseEvent(LeaseEventKind.RESET_DONE)),
            (156, LeaseEvent(LeaseEventKind.PARTITION_OFF)),
        ],
        Phase.QUARANTINED,
        "Xid",
    ),
    "an operator wants it while it is lent": (
        replace(checking(), maintenance="OperatorRequest"),
        [(210, LeaseEvent(LeaseEventKind.CHECK_PASSED))],
        Phase.MAINTENANCE,
        "OperatorRequest",
    ),
    "the agent starts again: a free GPU": (free(), [(300, BOOT), (300.1, NOBODY)], Phase.FREE, ""),
    "the agent starts again: a free GPU that is held": (
        free(),
        [(300, BOOT), (300.1, VM)],
        Phase.LEASED,
        "HolderFound",
    ),
    "the agent starts again: nothing can be probed": (
        free(),
        [(300, BOOT), (601, TICK)],
        Phase.QUARANTINED,
        "ProbeFailed",
    ),
    "another boot": (free(), [(3, NEXT), (4, NOBODY)], Phase.RECLAIMING, "BootChanged"),
    "another boot, and a pod that came back": (
        leased()[GPU],
        [(3, NEXT), (4, VM)],
        Phase.LEASED,
        "HolderFound",
    ),
    "never seen before": (Lease(GPU), [(3, BOOT), (4, NOBODY)], Phase.RECLAIMING, "BootChanged"),
    "quarantine lasts": (
        Lease(GPU, Phase.QUARANTINED, 7, reason="Xid"),
        [(3, NEXT), (4, NOBODY), (9e9, TICK)],
        Phase.QUARANTINED,
        "Xid",
    ),
    "a release of another generation": (
        Lease(GPU, Phase.QUARANTINED, 7, reason="Xid"),
        [(3, LeaseEvent(LeaseEventKind.RELEASE, 6))],
        Phase.QUARANTINED,
        "Xid",
    ),
    "a release": (
        Lease(GPU, Phase.QUARANTINED, 7, reason="Xid"),
        [(3, LeaseEvent(LeaseEventKind.RELEASE, 7))],
        Phase.RECLAIMING,
        "Released",
    ),
}


@pytest.mark.parametrize(("lease", "events", "phase", "reason"), PATHS.values(), ids=PATHS)
def test_paths(lease: Lease, events: list[tuple[float, LeaseEvent]], phase: Phase, reason: str) -> None:
    after = follow(lease, *events)
    assert (after.phase, after.reason) == (phase, reason), describe(after)


def test_a_check_of_another_turn_says_nothing() -> None:
    """It was begun before the agent ended, and the GPU may have been held since."""
    lease = checking()
    stale = LeaseEvent(LeaseEventKind.CHECK_PASSED, lease.generation, lease.turn)
    again = follow(lease, (300, BOOT))
    assert again.phase is Phase.CHECKING
    assert step(again, stale, 301)[0] == again


def test_two_failed_activations_quarantine() -> None:
    failed = LeaseEvent(LeaseEventKind.PARTITION_FAILED, text="link training")
    lease = follow(reserved()[GPU], (101, failed))
    assert (lease.phase, lease.reason, lease.sick) == (Phase.RECLAIMING, "PartitionFailed", "")
    lease = follow(
        replace(lease, phase=Phase.FREE, proofs=()),
        (200, LeaseEvent(LeaseEventKind.RESERVE, text="x", members=(GPU,))),
        (201, failed),
    )
    assert (lease.phase, lease.sick) == (Phase.RECLAIMING, "PartitionStuck")


def test_nothing_of_a_set_is_reset_before_all_is_let_go() -> None:
    leases = leased(GPU, OTHER)
    let_go = ((200, OVER), (201, NOBODY), (204, NOBODY))
    leases[GPU] = follow(leases[GPU], *let_go)
    assert Effect.RESET in effects(leases[GPU], 205)
    assert blocked_by(leases[GPU], leases) == OTHER
    assert Effect.RESET not in [effect for effect, _ in work(leases, 205)]
    leases[OTHER] = follow(leases[OTHER], *let_go)
    assert [each for each in work(leases, 205) if each[0] is Effect.RESET] == [
        (Effect.RESET, (GPU,)),
        (Effect.RESET, (OTHER,)),
    ]


def test_a_partition_is_switched_off_once_and_after_all_resets() -> None:
    leases = {gpu: follow(each, (200, OVER), (201, NOBODY), (204, NOBODY)) for gpu, each in leased(GPU, OTHER).items()}
    leases[GPU] = follow(leases[GPU], (205, LeaseEvent(LeaseEventKind.RESET_DONE)))
    assert Effect.DEACTIVATE not in [effect for effect, _ in work(leases, 206)]
    leases[OTHER] = follow(leases[OTHER], (207, LeaseEvent(LeaseEventKind.RESET_DONE)))
    assert [each for each in work(leases, 208) if each[0] is Effect.DEACTIVATE] == [(Effect.DEACTIVATE, (GPU, OTHER))]


def test_the_same_request_again_is_the_same_reservation() -> None:
    leases = reserved(GPU, OTHER)
    assert is_repeated(list(leases.values()))
    assert not is_repeated([leases[GPU]])
    assert not is_repeated([step(leases[GPU], SEEN, 105)[0], leases[OTHER]])


def test_a_refusal_says_where_the_gpu_is() -> None:
    with pytest.raises(HostError, match=r"Checking, generation 7") as caught:
        check_reservable([free(OTHER), checking()])
    assert caught.value.code == "OCIGPU-LEASE-2"


def test_maintenance_that_has_not_begun_can_be_taken_back() -> None:
    lease = leased()[GPU]
    asked = follow(lease, (120, LeaseEvent(LeaseEventKind.MAINTAIN, 7, text="OperatorRequest: new board")))
    assert asked.maintenance == "OperatorRequest: new board"
    check_act(asked, LeaseEvent(LeaseEventKind.RELEASE, 7))
    assert follow(asked, (121, LeaseEvent(LeaseEventKind.RELEASE, 7))) == lease


@pytest.mark.parametrize(
    ("lease", "kind", "generation", "says"),
    [
        (free(), LeaseEventKind.RELEASE, 6, "it is Free, neither"),
        (Lease(GPU, Phase.QUARANTINED, 7), LeaseEventKind.RELEASE, 6, "the generation is 7, not 6"),
        (Lease(GPU, Phase.QUARANTINED, 7), LeaseEventKind.MAINTAIN, 7, "stays so until it is released"),
    ],
)
def test_acts_that_are_refused(lease: Lease, kind: LeaseEventKind, generation: int, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        check_act(lease, LeaseEvent(kind, generation))


# what no sequence of events can do

EVENTS = st.builds(
    LeaseEvent,
    st.sampled_from(list(LeaseEventKind)),
    st.sampled_from((-1, -1, -1, 0, 1, 2, 6, 7, 8)),
    st.just(-1),
    st.sampled_from(("boot", "other boot", "Reason: text")),
    st.sampled_from(((), (77,))),
    st.just((GPU,)),
    st.sampled_from((None, POD, LeaseHolder("tenant-b", "pod", "main"))),
)


TOUCHED = (Phase.RESERVED, Phase.LEASED, Phase.RECLAIMING)


@settings(max_examples=150, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.sampled_from((0.1, 1.0, QUIET + 0.1, 31.0, 121.0, 601.0, 1201.0, 7200.0, -50.0)), EVENTS),
        max_size=60,
    ),
    st.sampled_from((Lease(GPU), free(), leased()[GPU], checking(), Lease(GPU, Phase.QUARANTINED, 7, reason="Xid"))),
)
def test_no_sequence_frees_what_was_not_checked(events: list[tuple[float, LeaseEvent]], lease: Lease) -> None:
    """Also when the clock goes backward.  ``clean``: no VM can have touched it since its check."""
    clean, now = lease.phase is Phase.FREE, 1000.0
    for seconds, event in events:
        now += seconds
        before, (lease, wanted) = lease, step(lease, event, now)
        if before.phase is Phase.CHECKING and event.kind is LeaseEventKind.CHECK_PASSED and lease != before:
            clean = True
        held = event.kind is LeaseEventKind.HOLDERS and event.pids and event.generation in (-1, before.generation)
        clean = clean and not held and lease.phase not in TOUCHED
        given = lease.phase in (Phase.FREE, Phase.MAINTENANCE) and lease.phase is not before.phase
        assert clean or not given, (before, event)
        assert lease.generation >= before.generation
        if lease.phase is Phase.RESERVED and before.phase is not Phase.RESERVED:
            assert (before.phase, lease.generation) == (Phase.FREE, before.generation + 1)
        assert lease.phase is not Phase.QUARANTINED or lease.reason
        assert wanted or lease.phase in (Phase.QUARANTINED, Phase.MAINTENANCE)
        if before.phase is Phase.CHECKING and lease.phase is Phase.FREE:
            assert event.kind is LeaseEventKind.CHECK_PASSED


@settings(max_examples=100, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from((0.1, 3.0, 121.0, 601.0)), EVENTS), max_size=30),
    st.sampled_from((Lease(GPU), free(), leased()[GPU], checking())),
)
def test_no_gpu_is_lost(events: list[tuple[float, LeaseEvent]], lease: Lease) -> None:
    """When pod and VM are gone and nothing else is ever told, a lease ends Free or Quarantined, with its reason."""
    now = 1000.0
    for seconds, event in events:
        now += seconds
        lease, _ = step(lease, event, now)
    for _ in range(12):
        for event in (NOBODY, OVER, TICK):
            now += 1300.0
            lease, _ = step(lease, event, now)
    assert lease.phase in (Phase.FREE, Phase.QUARANTINED, Phase.MAINTENANCE), describe(lease)
    assert lease.phase is Phase.FREE or lease.reason
