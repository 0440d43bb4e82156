"""Which events count, which devices they are about, and how devices return."""

from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocigpu.kubernetes.node.config import Configuration
from ocigpu.kubernetes.node.devices import PluginDevice, Resource
from ocigpu.kubernetes.node.health import (
    APPLICATION_XIDS,
    NO_INSTANCE,
    Event,
    HealthPolicy,
    HealthState,
    Monitor,
    Rules,
    affected,
    parse_policy,
)


@pytest.mark.parametrize(
    ("disable", "enable", "counting", "ignored"),
    [
        ("", "", {48, 79, 94, 11}, {13, 31, 43, 45, 68, 109}),
        ("68,not-an-int,67", "", {79, 69}, {13, 67, 68, 109}),
        ("-68", "", {79}, {68}),
        ("all", "", set(), {13, 79, 48}),
        ("XIDS", "", set(), {13, 79, 48}),
        ("abc, all", "", set(), {13, 79, 48}),
        ("11", "11", {11, 79}, {13}),
        ("", "all", {13, 31, 43, 45, 68, 109, 79}, set()),
        ("79", "ALL", {13, 79}, set()),
        ("all", "79", {79}, {13, 48}),
        (" ALL ,79", " 13 , 79 ", {13, 79}, {31, 48}),
        ("", "13,xids", {13, 79}, {31}),
        ("9" * 40, "", {79}, {13}),
    ],
)
def test_lists_of_xids(disable: str, enable: str, counting: set[int], ignored: set[int]) -> None:
    policy, _ = parse_policy(disable, enable)
    assert {xid for xid in counting | ignored if policy.counts(xid)} == counting
    assert policy.watches_events is bool(counting)


def test_a_word_without_a_meaning_is_said() -> None:
    assert parse_policy("68,not-an-int,-5,", "xids,ALL")[1] == (
        'DP_DISABLE_HEALTHCHECKS: "not-an-int" ignored: it is not an XID',
        'DP_DISABLE_HEALTHCHECKS: "-5" ignored: it is not an XID',
        'DP_ENABLE_HEALTHCHECKS: "xids" ignored: it is not an XID',
    )
    assert parse_policy("", "") == (HealthPolicy(), ())


@pytest.mark.parametrize(("disable", "probes"), [("", True), ("xids", True), ("all", False), ("13,ALL", False)])
def test_only_all_ends_the_probes(disable: str, probes: bool) -> None:
    assert parse_policy(disable, "79")[0].probes is probes


def mig(gpu: str, gi: int, ci: int = 0, replica: int | None = None) -> PluginDevice:
    uuid = f"MIG-{gpu}{gi}{ci}"
    return PluginDevice(uuid + ("" if replica is None else f"::{replica}"), uuid, gpu, f"0:{gi}", instance=(gi, ci))


A, B = PluginDevice("A", "A", "A", "0"), PluginDevice("B", "B", "B", "1")
REPLICAS = [A._replace(id=f"A::{number}", replicas=2) for number in range(2)]
SPLIT = [mig("C", 7), mig("C", 8, replica=0), mig("C", 8, replica=1), mig("C", 9, 0), mig("C", 9, 1), B]


@pytest.mark.parametrize(
    ("event", "devices", "expected"),
    [
        (Event(79, "A"), [A, B], ("A",)),
        (Event(79, "A"), [*REPLICAS, B], ("A",)),
        (Event(79), [A, B], ("A", "B")),
        (Event(79, "Z"), [A, B], ()),
        (Event(79, "C"), SPLIT, ("MIG-C70", "MIG-C80", "MIG-C90", "MIG-C91")),
        (Event(94, "C", 8, 0), SPLIT, ("MIG-C80",)),
        (Event(94, "C", 9, 1), SPLIT, ("MIG-C91",)),
        (Event(94, "C", 9, NO_INSTANCE), SPLIT, ("MIG-C90", "MIG-C91")),
        (Event(94, "C", 5, 0), SPLIT, ("MIG-C70", "MIG-C80", "MIG-C90", "MIG-C91")),  # gone: better too many
        (Event(94, "B", 8, 0), SPLIT, ("B",)),  # offered as a whole
        (Event(94), SPLIT, ("MIG-C70", "MIG-C80", "MIG-C90", "MIG-C91", "B")),
        (Event(94, "", 8, 0), SPLIT, ("MIG-C70", "MIG-C80", "MIG-C90", "MIG-C91", "B")),
        (Event(79, "A"), [], ()),
    ],
)
def test_an_event_is_about_devices(event: Event, devices: list[PluginDevice], expected: tuple[str, ...]) -> None:
    assert affected(event, devices) == expected


RULES = Rules(probes=2, hold=60, longest_hold=200, forget=1000, patience=30)


def observe(state: HealthState, seen: tuple[float, str]) -> HealthState:
    at, kind = seen
    if kind == "fault":
        return state.failed(at, "XID 79", RULES)
    return state.silent(at, RULES) if kind == "silent" else state.answered(at, RULES)


def after(*seen: tuple[float, str]) -> HealthState:
    return reduce(observe, seen, HealthState())


def test_a_fault_is_believed_at_once() -> None:
    assert after((5, "good"), (7, "fault")) == HealthState(False, "XID 79", 7, 60)


@pytest.mark.parametrize(
    ("seen", "healthy"),
    [
        ([(0, "fault"), (30, "good"), (59, "good")], False),  # too soon
        ([(0, "fault"), (60, "good")], False),  # too few
        ([(0, "fault"), (30, "good"), (60, "good")], True),
        ([(0, "fault"), (30, "good"), (50, "fault"), (60, "good"), (109, "good")], False),
        ([(0, "fault"), (30, "good"), (50, "fault"), (60, "good"), (110, "good")], True),
        ([(0, "fault"), (30, "good"), (50, "silent"), (60, "good")], False),
        ([(0, "fault"), (30, "good"), (50, "silent"), (60, "good"), (61, "good")], True),
        ([(0, "silent"), (29, "silent")], True),
        ([(0, "silent"), (30, "silent")], False),
        ([(0, "silent"), (29, "good"), (31, "silent"), (60, "silent")], True),
        ([(0, "silent"), (30, "silent"), (31, "good"), (90, "good")], True),
    ],
    ids=str,
)
def test_a_device_returns_after_good_answers_and_a_while(seen: list[tuple[float, str]], healthy: bool) -> None:
    assert after(*seen).healthy is healthy


def test_a_device_that_was_healthy_again_has_no_reason() -> None:
    assert after((0, "fault"), (30, "good"), (60, "good")) == HealthState(True, "", 0, 60, 2)


def test_a_hung_driver_is_a_reason() -> None:
    assert after((0, "silent"), (31, "silent")).reason == "no answer for 30 s"


def test_relapses_take_longer_until_they_are_forgotten() -> None:
    at, state, holds = 0.0, HealthState(), []
    for _ in range(5):
        state = observe(state, (at, "fault"))
        holds.append(state.hold)
        while not state.healthy:
            at += 20
            state = observe(state, (at, "good"))
        at += 1
    assert holds == [60, 120, 200, 200, 200]
    assert observe(state, (at + 1000, "fault")).hold == 60


@given(
    st.lists(st.tuples(st.floats(0.1, 500), st.sampled_from(["good", "good", "good", "fault", "silent"])), max_size=60)
)
def test_a_device_never_returns_early_and_always_in_the_end(steps: list[tuple[float, str]]) -> None:
    at, state = 0.0, HealthState()
    for pause, kind in steps:
        at += pause
        before, state = state, observe(state, (at, kind))
        assert bool(state.reason) is not state.healthy
        if state.healthy and not before.healthy:
            assert kind == "good"
            assert before.fault_at is not None
            assert at - before.fault_at >= RULES.hold
        if kind == "fault":
            assert not state.healthy
    for _ in range(2):
        at += RULES.longest_hold
        state = observe(state, (at, "good"))
    assert state.healthy


def test_devices_have_the_errors_of_their_states() -> None:
    resource = Resource("nvidia.com/gpu", (*REPLICAS, B, mig("C", 7), mig("D", 7)._replace(error="own")))
    bad = HealthState(False, "XID 79", 0, 60)
    monitor = Monitor(Configuration())
    assert monitor.with_health(resource) == resource
    monitor.states = {"A": bad, "B": HealthState(), "C": bad, "MIG-D70": bad}
    found = monitor.with_health(resource)
    assert [device.error for device in found.devices] == ["XID 79", "XID 79", "", "XID 79", "own"]
    monitor.states = {"A": HealthState()}
    assert monitor.with_health(found).devices[0].error == "XID 79", "errors of facts are not taken back"


def test_faults_of_programs_are_the_published_ones() -> None:
    assert {13, 31, 43, 45, 68, 109} == APPLICATION_XIDS
