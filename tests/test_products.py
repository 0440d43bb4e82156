"""The choice of rows of a product (support/products.py)."""

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.products import choose, in_threes, one_in, part_of

AXES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def pairs(rows: list[tuple[int, ...]]) -> set[object]:
    found: set[object] = {each for row in rows for each in enumerate(row)}
    return found | {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}


@given(AXES, st.floats(0.1, 1.0), st.randoms(use_true_random=False))
def test_every_value_and_every_pair_that_occurs_is_in_the_choice(
    sizes: list[int], part: float, source: random.Random
) -> None:
    rows = [row for row in itertools.product(*map(range, sizes)) if source.random() <= part]
    chosen = choose(rows)
    assert pairs([rows[place] for place in chosen]) == pairs(rows)
    assert chosen == sorted(set(chosen))
    assert choose(rows) == chosen


def test_every_value_is_in_a_choice_of_single_values_and_each_as_often() -> None:
    rows = list(itertools.product(*((f"{axis}{value}" for value in range(6)) for axis in "abc")))
    chosen = [rows[place] for place in choose(rows, parts=frozenset)]
    assert sorted(itertools.chain(*chosen)) == sorted({value for row in rows for value in row})


def test_of_what_one_function_alone_has_a_third_is_enough() -> None:
    rows = [("f", "runc", number) for number in range(7)] + [("g", "runc"), ("g", "crun"), ("h", "crun")]
    assert choose(in_threes(rows), parts=frozenset) == [0, 3, 6, 8, 9]


@given(AXES, st.data())
def test_what_has_failed_is_always_in_the_choice(sizes: list[int], data: st.DataObject) -> None:
    rows = list(itertools.product(*map(range, sizes)))
    failed = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=3))
    assert set(failed) <= set(choose(rows, failed))


@pytest.mark.parametrize(
    ("sizes", "most"), one_in(4, [((4, 3, 2), 12), ((5, 5, 5), 35), ((9, 4, 2, 13), 130), ((30, 6, 4, 3), 200)])
)
def test_the_choice_is_small(sizes: tuple[int, ...], most: int) -> None:
    rows = list(itertools.product(*map(range, sizes)))
    assert len(choose(rows)) <= most < len(rows) * 0.6


def test_the_rest_is_what_the_choice_leaves_out() -> None:
    steps = list(range(20))
    chosen, rest = (part_of(steps, 3, 1, which=which) for which in ("chosen", "rest"))
    assert chosen == [1, 4, 7, 10, 13, 16, 19]
    assert sorted(chosen + rest) == part_of(steps, 3, 1, which="all") == steps
    assert part_of([], 3, 1, which="chosen") == []


def test_turns_take_everything_once_and_each_step_meets_each_fault() -> None:
    rows = list(itertools.product("abc", range(6)))  # a fault, a step
    turns = [part_of(rows, 3, turn, lambda place: place // 6 + place % 6, which="chosen") for turn in range(3)]
    assert sorted(itertools.chain(*turns)) == rows
    for turn in turns:
        assert ({fault for fault, _ in turn}, {step for _, step in turn}) == (set("abc"), set(range(6)))


SOURCE = """
import hypothesis.strategies, itertools, pytest
@pytest.mark.product
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", range(3))
def test_one(a, b, c): pass
@pytest.mark.parametrize("a", [pytest.param(a, marks=pytest.mark.product("p", (a, b, c)))
                               for a, b, c in itertools.product("12", "34", "56")])
def test_two(a): pass
def test_three(): pass
@pytest.mark.engine
@pytest.mark.parametrize("mode", ["hook", "spec", "cdi"])
@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_engine(mode, runtime): pass
@pytest.mark.engine
@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_engine_again(runtime): pass
@pytest.mark.engine
@pytest.mark.parametrize("object", [object(), object()])
def test_objects(object): pass
@pytest.mark.rest
def test_left_out(share): assert share([1, 2, 3], 3, 0) == [1, 2, 3]
def test_four(share, times): assert len(share([1, 2, 3], 3, 0)) == SEEN
@hypothesis.given(hypothesis.strategies.none())
def test_five(none): pass
"""


PLACE = "tests/support/products.py"


@pytest.mark.parametrize(("which", "seen"), [("chosen", 1), ("rest", 2), ("all", 3)])
def test_a_run_takes_the_chosen_cases_or_the_rest_or_all(pytester: pytest.Pytester, which: str, seen: int) -> None:
    three = len(choose(list(itertools.product(range(3), repeat=3))))
    passed = {"chosen": three + 4 + 3 + 3, "rest": 27 - three + 4 + 8 + 2, "all": 27 + 8 + 11 + 3}[which]
    pytester.makeconftest('pytest_plugins = ["support.products"]')
    path = pytester.makepyfile(SOURCE.replace("SEEN", str(seen)))
    done = pytester.runpytest("-p", "no:cacheprovider", f"--rows={which}")
    outcomes = done.parseoutcomes()
    assert outcomes["passed"] == passed
    said = [line for line in done.outlines if "left out" in line]
    left = outcomes.get("deselected", 0)
    assert said == ([f"{left} cases were left out; --rows all runs everything ({PLACE})"] if left else [])
    named = pytester.runpytest("-p", "no:cacheprovider", f"{path.name}::test_one")
    assert named.parseoutcomes()["passed"] == 27


def test_a_file_of_which_no_case_runs_says_why(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    pytester.makeini("[pytest]\naddopts = -p support.products")
    pytester.makepyfile("import pytest\n@pytest.mark.rest\ndef test_rest(): pass\n")
    for options in ((), ("-n", "1")):
        done = pytester.runpytest_subprocess("-p", "no:cacheprovider", *options)
        assert done.ret == pytest.ExitCode.NO_TESTS_COLLECTED
        assert f"1 case was left out; --rows all runs everything ({PLACE})" in done.outlines
