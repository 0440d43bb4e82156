"""How pytest-xdist deals the tests out: a file to a worker, the longest first.

The mark ``xdist_group`` of a whole file says otherwise: files of one group are dealt out together, and one whose group
is :data:`FUNCTIONS`, whose tests have nothing in common and take long, a function at a time.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

FUNCTIONS = "functions"
TESTS = Path(__file__).parents[1]


@functools.cache
def group_of(file: str) -> str:
    """Return the group that a file names, from its text: who deals the tests out collects none."""
    found = re.search(r'^pytestmark = .*\bxdist_group\("(.+?)"\)', (TESTS / file).read_text(), re.MULTILINE)
    return found[1] if found else file


def unit_of(nodeid: str) -> str:
    """Return what of the tests goes to one worker together with this one."""
    file, _, function = nodeid.removeprefix("tests/").partition("::")
    group = group_of(file)
    return f"{file}::{function.partition('[')[0]}" if group == FUNCTIONS else group


def seconds_of(item: pytest.Item) -> float:
    """Guess how long a test takes, by what it says of itself: a time limit of its own is that of a long one."""
    if item.get_closest_marker("timeout"):
        return 20
    if item.get_closest_marker("engine"):
        return 0.5
    return 0.2 if "session_directory" in getattr(item, "fixturenames", ()) else 0.01


def sort(items: list[pytest.Item]) -> None:
    """Bring the units into order, the longest first: what begins last should be short."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for item in items:
        seconds[unit_of(item.nodeid)] += seconds_of(item)
    items.sort(key=lambda item: -seconds[unit_of(item.nodeid)])


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return what deals out units in the order in which they were collected."""
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False
    return Units(config, log)


def import_share(config: pytest.Config) -> None:
    """Have a worker import its share of the test files first, where it is about to collect all of them.

    pytest rewrites the assertions of a module when it is imported, which takes half of the time of collecting, and
    keeps the result; all workers collect in one order, and each would rewrite every file of a fresh clone.
    """
    if hasattr(config, "workerinput") and config.args == config.getini("testpaths"):
        number, workers = int(config.workerinput["workerid"].removeprefix("gw")), config.workerinput["workercount"]
        for path in sorted(TESTS.rglob("test_*.py"))[number::workers]:
            sys.path.insert(0, str(path.parent))  # as pytest does
            with contextlib.suppress(BaseException):  # pytest will say it
                importlib.import_module(path.stem)
