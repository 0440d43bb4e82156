"""Products of several axes, such as image x way x kernel: which of their rows a run takes.

A test belongs to one by the mark ``product``: by default its parameters are the row, and all cases of the function the
product; ``product(NAME, ROW)`` says both, so that cases of several functions can be one.  Tests with the mark
``engine`` start real containers, which costs a lot: those of no other product are one product together, whose rows are
function and parameters.  A test that goes through rows by itself asks the fixture ``share``; one that tries something
random many times asks ``times``, or is Hypothesis's, which makes up fewer examples for a choice (conftest.py).  The
mark ``rest`` is for what takes long and few changes touch: ``chosen`` leaves it out; :func:`one_in` gives it to most
cases of a list.

``--rows chosen``, the default, takes a few rows in which every pair of values occurs that occurs at all, and those that
have ever failed; of ``product(single=True)`` rows in which every single value occurs, and so of tests with the mark
``engine``, but of the values that one function alone has a third.  ``all`` takes all, ``rest`` what the first leaves
out.  Cases that are named on the command line are taken in any case.
"""

import functools
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

Row = tuple[Hashable, ...]
Of = TypeVar("Of")
EVER_FAILED = (
    "2: the newest compatibility library is a FIFO",
    "4: every name of the driver is a link to nothing on the host",
    "4: files whose mode is set are links to nothing on the host",
    "by way of its working directory-text-old kernel",
)
"""Parts of the names of cases that have failed once; whoever finds another adds it."""


LEFT_OUT = pytest.StashKey[bool]()
"""Whether a case is one that a choice leaves out."""
LEFT = pytest.StashKey[dict[str, int]]()
"""How many cases this run leaves out, by what runs them."""


def pairs(row: Row) -> frozenset[Any]:
    return frozenset(itertools.combinations(enumerate(row), 2)) or frozenset(enumerate(row))


singles = frozenset


def choose(
    rows: Sequence[Row], always: Iterable[int] = (), parts: Callable[[Row], frozenset[Any]] = pairs
) -> list[int]:
    """Return the places of few rows in which all parts occur that occur in all of them, in order.

    ``always``: places that are among them.  Each next one has most parts that are not there yet; of several the one
    whose parts are there least often, of these the first.
    """
    has = [parts(row) for row in rows]
    chosen = set(always)
    often = Counter(part for place in chosen for part in has[place])

    def value(place: int) -> tuple[int, int, int]:
        """Return the least for the best.  What a place is worth only falls while others are chosen."""
        return -len(has[place] - often.keys()), sum(often[part] for part in has[place]), place

    left = [value(place) for place in range(len(rows))]
    heapq.heapify(left)
    while left:
        place = left[0][-1]
        now = value(place)
        if now[0] == 0:
            heapq.heappop(left)
        elif now == left[0]:
            heapq.heappop(left)
            chosen.add(place)
            often.update(has[place])
        else:
            heapq.heapreplace(left, now)
    return sorted(chosen)


def part_of(found: Sequence[Of], parts: int, turn: int, at: Callable[[int], int] = int, *, which: str) -> list[Of]:
    """Return every so many-th, or the others; ``turn``: which one is the first, ``at``: where a place is in the count.

    Where each case of a test has another turn, each of ``found`` is in one of them.
    """
    chosen = [(at(place) - turn) % parts == 0 for place in range(len(found))]
    wanted = {"chosen": (True,), "rest": (False,), "all": (True, False)}[which]
    return [each for each, is_chosen in zip(found, chosen, strict=True) if is_chosen in wanted]


def one_in(number: int, cases: Iterable[Any]) -> list[Any]:
    """Return what to give ``parametrize`` for a list of like cases, of which a choice takes every so many-th.

    A tuple is the values of several parameters.
    """
    found = []
    for place, case in enumerate(cases):
        one = case if hasattr(case, "marks") else pytest.param(*case if isinstance(case, tuple) else (case,))
        found.append(one._replace(marks=[*one.marks, pytest.mark.rest]) if place % number else one)
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rows",
        default="chosen",
        choices=("chosen", "all", "rest"),
        help="rows of each product (tests/support/products.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rest: left out of --rows chosen")
    config.addinivalue_line("markers", "product(name, row, single): a row of a product, of which a run takes some")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that are not of this run."""
    which = config.getoption("rows")
    if which == "all" or is_named(config):
        return
    products: dict[str, list[tuple[Row, pytest.Item]]] = {}
    for item in items:
        mark, is_engine = item.get_closest_marker("product"), item.get_closest_marker("engine")
        if mark and mark.args:
            name, row = mark.args
        elif mark:
            name, row = item.nodeid.partition("[")[0], parameters(item)
        elif is_engine and not item.get_closest_marker("rest"):
            name, row = "engine", values(item)
        else:
            continue
        products.setdefault(name, []).append((row, item))
    left = {item for item in items if item.get_closest_marker("rest")}
    if engines := products.get("engine"):
        rows = in_threes([row for row, _ in engines])
        products["engine"] = [(row, item) for row, (_, item) in zip(rows, engines, strict=True)]
    for product in products.values():
        failed = [place for place, (_, item) in enumerate(product) if any(part in item.name for part in EVER_FAILED)]
        parts = singles if is_single(product[0][1]) else pairs
        chosen = {product[place][1] for place in choose([row for row, _ in product], failed, parts)}
        left |= {item for _, item in product} - chosen
    for item in left:
        item.stash[LEFT_OUT] = True
    taken = {item for item in items if which == "rest" and _has_shares(item)}
    out = left if which == "chosen" else set(items) - left - taken
    leave_out(config, items, out, "--rows all runs everything (tests/support/products.py)")


def leave_out(config: pytest.Config, items: list[pytest.Item], out: Container[pytest.Item], advice: str) -> None:
    """Take cases out of a run; the summary says how many, and ``advice``: what runs them."""
    left = [item for item in items if item in out]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in out]
        config.stash.setdefault(LEFT, {})[advice] = len(left)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells its numbers to the process that prints the summary."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left-out"] = session.config.stash.get(LEFT, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each worker collects the same tests; one that died tells nothing."""
    node.config.stash.setdefault(LEFT, {}).update(getattr(node, "workeroutput", {}).get("left-out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for advice, number in config.stash.get(LEFT, {}).items():
        cases = f"{number} case was" if number == 1 else f"{number} cases were"
        terminalreporter.write_line(f"{cases} left out; {advice}")


def _has_shares(item: pytest.Item) -> bool:
    """Whether a test does one thing in a choice and another one, or more, in the rest."""
    made_up = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    return made_up or bool({"share", "times"} & set(getattr(item, "fixturenames", ())))


def is_single(item: pytest.Item) -> bool:
    """Whether single values of a case's product are chosen, and not pairs."""
    mark = item.get_closest_marker("product")
    return bool(item.get_closest_marker("engine") or (mark and mark.kwargs.get("single")))


def is_named(config: pytest.Config) -> bool:
    """Whether the command line names a test, and no directories and files alone."""
    return any("::" in argument for argument in config.args)


def parameters(item: pytest.Item) -> Row:
    """Return the names of a case's parameters, one for each ``parametrize``."""
    return tuple(item.callspec._idlist)


def values(item: pytest.Item) -> Row:
    """Return a case's function and the names of its parameters, which are the same in all tests unless pytest made
    them up.
    """
    function = item.nodeid.partition("[")[0]
    call = getattr(item, "callspec", None)
    names = parameters(item) if call else ()
    return (function, *((function, name) if str(name).startswith(tuple(call.params)) else name for name in names))


def in_threes(rows: Sequence[Row]) -> list[Row]:
    """Take values that one function alone has for one, three at a time: of a list of like cases, a third is enough."""
    users: dict[Hashable, set[Hashable]] = {}
    for function, *names in rows:
        for name in names:
            users.setdefault(name, set()).add(function)
    places: dict[Hashable, dict[Hashable, int]] = {}
    found = []
    for function, *names in rows:
        own = places.setdefault(function, {})
        thirds = [(function, own.setdefault(name, len(own)) // 3) if len(users[name]) == 1 else name for name in names]
        found.append((function, *thirds))
    return found


def _which(request: pytest.FixtureRequest) -> str:
    """Return which part of a test's own rows this run takes."""
    if is_named(request.config) or request.node.stash.get(LEFT_OUT, False):
        return "all"
    return str(request.config.getoption("rows"))


@pytest.fixture
def times(request: pytest.FixtureRequest) -> Callable[..., int]:
    """Call with how often something random is tried: returns how often in this run, a tenth (or ``part``) or all."""
    few = request.config.getoption("rows") == "chosen"
    return lambda number, part=10: number // part if few else number


@pytest.fixture
def share(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Call as :func:`part_of`, without ``which``."""
    return functools.partial(part_of, which=_which(request))
