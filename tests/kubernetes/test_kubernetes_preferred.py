"""Which devices a container should get: connected GPUs, spread or packed replicas, and always an answer."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ocigpu.core.errors import RequestError
from ocigpu.kubernetes.node.devices import PluginDevice
from ocigpu.kubernetes.plugin.preferred import Scores, prefer


def gpus(count: int) -> list[PluginDevice]:
    return [PluginDevice(f"G{number}", f"G{number}", f"G{number}", str(number)) for number in range(count)]


def replicas(count: int, each: int) -> list[PluginDevice]:
    return [
        device._replace(id=f"{device.uuid}::{number}", replicas=each)
        for device in gpus(count)
        for number in range(each)
    ]


def mig(*counts: int) -> list[PluginDevice]:
    """MIG devices "M<gpu><n>", so many on each GPU."""
    return [
        PluginDevice(f"M{gpu}{number}", f"M{gpu}{number}", f"G{gpu}", f"{gpu}:{number}", instance=(number, 0))
        for gpu, count in enumerate(counts)
        for number in range(count)
    ]


def ids(devices: list[PluginDevice]) -> list[str]:
    return [device.id for device in devices]


def connected(*groups: str, near: int = 250, far: int = 10) -> Scores:
    """Scores of GPUs named by digits: near within a group, far across."""
    home = {digit: group for group in groups for digit in group}
    return {
        (f"G{one}", f"G{two}"): near if home[one] == home[two] else far for one, two in itertools.permutations(home, 2)
    }


PAIRS = connected("01", "23", "45", "67")
HALVES = connected("0246", "1357")


def chosen(free: str, size: int, scores: Scores, required: str = "") -> str:
    names = [f"G{digit}" for digit in free]
    return "".join(name[1:] for name in prefer(gpus(8), names, [f"G{digit}" for digit in required], size, scores))


@pytest.mark.parametrize(
    ("free", "size", "scores", "required", "expected"),
    [
        ("01234567", 1, {}, "", "0"),
        ("7654321", 1, {}, "", "1"),
        ("01234567", 2, PAIRS, "", "01"),
        ("0234567", 2, PAIRS, "", "23"),
        ("01234567", 4, PAIRS, "", "0123"),
        ("01234567", 4, HALVES, "", "0246"),
        ("0134567", 4, HALVES, "", "1357"),
        ("0135", 2, HALVES, "", "13"),
        ("01234567", 2, HALVES, "3", "31"),
        ("01234567", 3, PAIRS, "5", "501"),
        ("01234567", 8, PAIRS, "", "01234567"),
        ("0234567", 1, PAIRS, "", "0"),  # its partner is not free: no pair is torn
        ("123", 1, PAIRS, "", "1"),
        ("0123467", 3, PAIRS, "", "014"),  # a pair, and the one whose partner is gone
        ("01", 2, {}, "01", "01"),
        ("01", 0, {}, "", ""),
    ],
)
def test_whole_gpus_are_chosen_by_connection(
    free: str, size: int, scores: Scores, required: str, expected: str
) -> None:
    assert chosen(free, size, scores, required) == expected


def test_sixteen_of_64_gpus_are_those_of_two_boards() -> None:
    devices = gpus(64)
    boards = {device.id: (int(device.ordinal) * 5) % 8 for device in devices}
    scores = {
        (one, two): 1850 if boards[one] == boards[two] else 20 if boards[one] // 2 == boards[two] // 2 else 10
        for one, two in itertools.permutations(boards, 2)
    }
    found = prefer(devices, ids(devices), ("G3",), 16, scores)
    assert Counter(boards[id_] for id_ in found) == {boards["G3"]: 8, boards["G3"] ^ 1: 8}


ALL_8 = ids(replicas(2, 4))
ONE_FULL = ids(replicas(2, 4)[4:])
UNEVEN = ["G0::0", "G0::1", "G1::1"]


@pytest.mark.parametrize(
    ("devices", "free", "required", "size", "policy", "expected"),
    [
        (replicas(2, 4), ALL_8, [], 4, "distributed", {"G0": 2, "G1": 2}),
        (replicas(2, 4), ALL_8, [], 2, "distributed", {"G0": 1, "G1": 1}),
        (replicas(3, 2), ids(replicas(3, 2)), [], 3, "distributed", {"G0": 1, "G1": 1, "G2": 1}),
        (replicas(2, 4), ONE_FULL, [], 2, "distributed", {"G1": 2}),
        (replicas(2, 2), UNEVEN, [], 2, "distributed", {"G0": 1, "G1": 1}),
        (replicas(2, 4), ALL_8, [], 2, "packed", {"G0": 2}),
        (replicas(2, 4), ALL_8, [], 4, "packed", {"G0": 4}),
        (replicas(2, 4), ALL_8, [], 5, "packed", {"G0": 4, "G1": 1}),
        (replicas(2, 4), ALL_8[1:], [], 2, "distributed", {"G0": 1, "G1": 1}),
        (replicas(2, 4), ALL_8[:-1], [], 2, "packed", {"G1": 2}),
        (replicas(2, 4), ALL_8, ["G0::2"], 2, "distributed", {"G0": 1, "G1": 1}),
        (replicas(2, 4), ALL_8, ["G1::2"], 3, "packed", {"G1": 3}),
        (mig(2, 2), ids(mig(2, 2)), [], 2, "distributed", {"G0": 1, "G1": 1}),
        (mig(2, 2), ids(mig(2, 2)), [], 2, "packed", {"G0": 2}),
        (mig(1, 3), ids(mig(1, 3)), [], 2, "distributed", {"G0": 1, "G1": 1}),
    ],
)
def test_replicas_and_mig_devices_are_chosen_by_policy(
    devices: list[PluginDevice], free: list[str], required: list[str], size: int, policy: str, expected: dict[str, int]
) -> None:
    found = prefer(devices, free, required, size, {}, policy)
    parents = {device.id: device.gpu for device in devices}
    assert set(required) <= set(found) <= {*free, *required}
    assert Counter(parents[id_] for id_ in found) == expected


def test_replicas_are_taken_in_the_order_of_numbers() -> None:
    devices = replicas(1, 12)
    assert prefer(devices, sorted(ids(devices)), (), 12, {}) == tuple(ids(devices))


def test_healthy_devices_come_first() -> None:
    devices = [device._replace(error="lost" if device.id == "G0" else "") for device in gpus(3)]
    assert prefer(devices, ["G0", "G1", "G2"], (), 2, {}) == ("G1", "G2")
    assert prefer(devices, ["G0", "G1", "G2"], (), 3, {}) == ("G0", "G1", "G2")


def test_unknown_ids_are_no_error() -> None:
    assert prefer(gpus(2), ["old", "G1"], ("older",), 2, PAIRS) == ("older", "G1")
    assert prefer(replicas(1, 1), ["old", "G0::0"], (), 2, {}) == ("G0::0", "old")
    assert prefer([], ["a", "b"], (), 1, {}) == ("a",)


@pytest.mark.parametrize(("free", "required", "size"), [(["G0"], [], 2), (["G0"], ["G1", "G2"], 1), ([], [], 1)])
def test_what_cannot_be_answered_is_refused(free: list[str], required: list[str], size: int) -> None:
    with pytest.raises(RequestError, match=f"preferred allocation of {size} devices") as caught:
        prefer(gpus(3), free, required, size, {})
    assert caught.value.code == "OCIGPU-KUBE-2"


# --- properties


@st.composite
def questions(draw: st.DrawFn, most: int) -> tuple[list[str], list[str], int, dict[tuple[str, str], int]]:
    count = draw(st.integers(1, most))
    names = [f"G{number}" for number in range(count)]
    required = draw(st.lists(st.sampled_from(names), unique=True, max_size=3))
    free = draw(st.lists(st.sampled_from(names), unique=True))
    size = draw(st.integers(len(required), len({*required, *free})))
    seed = draw(st.randoms(use_true_random=False))
    scores = {}
    for one, two in itertools.combinations(names, 2):
        scores[one, two] = scores[two, one] = seed.choice([0, 10, 20, 30, 40, 50, 60, 150, 250])
    return free, required, size, scores


def total(names: tuple[str, ...], scores: Scores) -> int:
    return sum(scores.get(pair, 0) for pair in itertools.combinations(names, 2))


@given(questions(7))
def test_of_few_gpus_the_best_connected_are_found(question: tuple[list[str], list[str], int, Scores]) -> None:
    free, required, size, scores = question
    found = prefer(gpus(7), free, required, size, scores)
    others = sorted(set(free) - set(required))
    best = max(total((*required, *more), scores) for more in itertools.combinations(others, size - len(required)))
    assert total(found, scores) == best


@settings(max_examples=30)
@given(questions(64), st.sampled_from(["distributed", "packed"]), st.sampled_from([1, 3]), st.booleans())
def test_there_is_always_a_valid_answer(
    question: tuple[list[str], list[str], int, Scores], policy: str, each: int, known: bool
) -> None:
    free, required, size, scores = question
    devices = gpus(64) if each == 1 else replicas(64, each)
    if each > 1:
        free, required = [f"{id_}::1" for id_ in free], [f"{id_}::1" for id_ in required]
    found = prefer(devices if known else [], free, required, size, scores, policy)
    assert len(set(found)) == len(found) == size
    assert set(required) <= set(found) <= {*free, *required}
    assert found == prefer(devices if known else [], free[::-1], required, size, scores, policy), "order decides"


@given(st.integers(1, 6), st.integers(2, 5), st.data())
def test_distributed_leaves_the_gpus_as_evenly_busy_as_can_be(count: int, each: int, data: st.DataObject) -> None:
    devices = replicas(count, each)
    size = data.draw(st.integers(1, len(devices)))
    parents = {device.id: device.gpu for device in devices}
    found = Counter(parents[id_] for id_ in prefer(devices, ids(devices), (), size, {}))
    assert max(found.values()) - min(found[f"G{number}"] for number in range(count)) <= 1
    packed = Counter(parents[id_] for id_ in prefer(devices, ids(devices), (), size, {}, "packed"))
    assert len(packed) == -(-size // each)
