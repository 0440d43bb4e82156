"""Choice of partitions, plans and audits: values in, values out."""

from collections.abc import Collection
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fabric import with_active

from ocigpu.gpus.nvidia.fabric.partitions import (
    FabricError,
    Partition,
    audit_partitions,
    board_partitions,
    check_isolates,
    check_list,
    choose_partition,
    choose_singles,
    conflicts_of,
    find_partition,
    must_find,
    plan_steps,
)

HOPPER = board_partitions("hopper")
ALL = range(1, 9)
boards = st.sampled_from([board_partitions("hopper"), board_partitions("blackwell")])


def ids(partition: Partition | None) -> tuple[int, ...] | None:
    return partition and partition.physical_ids


@pytest.mark.parametrize(
    ("free", "count", "chosen"),
    [
        (ALL, 8, (1, 2, 3, 4, 5, 6, 7, 8)),
        (ALL, 4, (1, 2, 3, 4)),
        (ALL, 2, (1, 3)),
        (ALL, 1, (1,)),
        ({1, 3, 5, 6, 7, 8}, 2, (1, 3)),  # the four of 5-8 stays whole
        ({1, 2, 3, 4, 6, 8}, 2, (6, 8)),
        ({1, 2, 3}, 1, (2,)),  # the pair 1,3 stays whole
        ({1, 2, 3, 4, 5}, 1, (5,)),
        ({1, 2, 3, 5}, 4, None),
        ({1, 2}, 2, None),  # no pair of this board
        (ALL, 3, None),
        ((), 1, None),
    ],
)
def test_the_set_that_spoils_least_is_chosen(free: Collection[int], count: int, chosen: tuple[int, ...] | None) -> None:
    assert ids(choose_partition(HOPPER, free, count)) == chosen
    assert ids(choose_partition(reversed(HOPPER), free, count)) == chosen


@given(boards, st.sets(st.sampled_from(ALL)), st.sampled_from(ALL))
def test_a_choice_is_free_and_no_other_leaves_more_whole(
    board: tuple[Partition, ...], free: set[int], count: int
) -> None:
    def whole(left: set[int]) -> list[int]:
        return sorted((len(one.physical_ids) for one in board if set(one.physical_ids) <= left), reverse=True)

    chosen = choose_partition(board, free, count)
    fitting = [one for one in board if len(one.physical_ids) == count and set(one.physical_ids) <= free]
    if chosen is None:
        assert not fitting
    else:
        assert chosen in fitting
        assert all(whole(free - set(chosen.physical_ids)) >= whole(free - set(one.physical_ids)) for one in fitting)


@pytest.mark.parametrize(("free", "count", "chosen"), [
    (ALL, 3, [1, 2, 3]),
    ({2, 5, 6, 7, 8}, 3, [2, 5, 7]),  # the pair 6,8 stays whole
    ({1, 2, 4, 6, 8}, 2, [1, 2]),
    ({1, 2}, 3, []),
    (ALL, 0, []),
])  # fmt: skip
def test_gpus_that_no_partition_connects_are_single_ones(free: Collection[int], count: int, chosen: list[int]) -> None:
    assert [one.physical_ids[0] for one in choose_singles(HOPPER, free, count)] == chosen


def test_sets_are_found_by_their_gpus_whatever_their_number_is() -> None:
    for board in ("hopper", "blackwell"):
        four = must_find(board_partitions(board), [4, 3, 2, 1])
        assert (four.physical_ids, four.links) == ((1, 2, 3, 4), 72)
    assert find_partition(HOPPER, {1, 2}) is None
    with pytest.raises(
        FabricError, match="GPUs 1,2: no partition of this board: of that size it has 1,3; 2,4; 5,7; 6,8"
    ) as error:
        must_find(HOPPER, {1, 2})
    assert error.value.code == "OCIGPU-FAB-4"
    with pytest.raises(FabricError, match="its sizes are 1, 2, 4, 8"):
        must_find(HOPPER, {1, 2, 3})


def test_the_plan_resets_deactivates_activates_and_verifies() -> None:
    now = board_partitions("hopper", [{gpu} for gpu in ALL])
    four = must_find(now, {1, 2, 3, 4})
    steps = plan_steps(now, [four], held={5})
    assert [(step.verb, step.physical_ids) for step in steps] == [
        ("reset", (1, 2, 3, 4)),
        *(("deactivate", (gpu,)) for gpu in (1, 2, 3, 4)),
        ("activate", (1, 2, 3, 4)),
        ("verify", (1, 2, 3, 4)),
    ]
    with pytest.raises(FabricError, match=r"in use: partition 9 \(GPU 3\)") as error:
        plan_steps(now, [four], held={3})
    assert error.value.code == "OCIGPU-FAB-5"
    done = board_partitions("hopper", [{1, 2, 3, 4}])
    assert [step.verb for step in plan_steps(done, [must_find(done, {1, 2, 3, 4})])] == ["verify"]


@given(boards, st.data())
def test_after_a_plan_what_is_wanted_is_active_and_nothing_overlaps(
    board: tuple[Partition, ...], data: st.DataObject
) -> None:
    def some(label: str) -> list[Partition]:
        chosen: list[Partition] = []
        for one in data.draw(st.lists(st.sampled_from(board)), label=label):
            if not any(one.overlaps(other.physical_ids) for other in chosen):
                chosen.append(one)
        return chosen

    for one in some("active"):
        board = with_active(board, one.physical_ids, True)
    wanted = some("wanted")
    was = {one.physical_ids for one in board if one.is_active}
    for step in plan_steps(board, wanted):
        if step.verb == "activate":
            assert not conflicts_of(board, must_find(board, step.physical_ids))
        if step.verb in ("activate", "deactivate"):
            board = with_active(board, step.physical_ids, step.verb == "activate")
    expected = {one.physical_ids for one in wanted}
    left = {ids for ids in was if not any(set(ids) & set(other) for other in expected)}
    assert not audit_partitions(board, expected | left)


def test_an_audit_names_what_differs() -> None:
    now = board_partitions("hopper", [{1, 3}, {1}, {8}])
    found = audit_partitions(now, [{1, 3}, {5, 6, 7, 8}, {1, 2}])
    assert [(one.problem, one.physical_ids) for one in found] == [
        ("unknown", (1, 2)),
        ("missing", (5, 6, 7, 8)),
        ("unexpected", (1,)),
        ("unexpected", (8,)),
        ("overlapping", (1, 3)),
    ]
    assert audit_partitions(HOPPER, []) == ()
    (lacking,) = (one for one in HOPPER if one.physical_ids == (2, 4))
    weak = [*(one for one in HOPPER if one != lacking), replace(lacking, nvlinks=((18, 18), (13, 18)))]
    (only,) = audit_partitions(weak, [])
    assert (only.problem, only.physical_ids, only.text) == ("degraded", (4,), "13 of 18 NVLinks")


@pytest.mark.parametrize(
    "wrong",
    [
        [Partition(0, False, (), ())],
        [Partition(0, False, (1, 1), ())],
        [Partition(0, False, (0,), ())],
        [Partition(0, False, (1,), ()), Partition(0, False, (2,), ())],
        [Partition(0, False, (1,), ()), Partition(1, False, (1,), ())],
    ],
)
def test_a_list_that_makes_no_sense_is_refused(wrong: list[Partition]) -> None:
    with pytest.raises(FabricError) as error:
        check_list(wrong)
    assert error.value.code == "OCIGPU-FAB-8"


def test_a_board_whose_gpus_cannot_be_apart_is_refused_for_tenants() -> None:
    check_isolates(HOPPER)
    for listed in ((), [one for one in HOPPER if one.physical_ids != (3,)]):
        with pytest.raises(FabricError) as error:
            check_isolates(listed)
        assert error.value.code == "OCIGPU-FAB-3"
