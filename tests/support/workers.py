"""How pytest-xdist deals the tests out: a file to a worker, the longest files first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

LONGEST = ()
"""Files that take longest, in order: what begins last should be short."""
SPLIT = ()
"""Files whose tests have nothing in common and are dealt out one function at a time."""


def unit_of(nodeid: str) -> str:
    """Return what of the tests goes to one worker together with this one."""
    file, _, function = nodeid.partition("::")
    return f"{file}::{function.partition('[')[0]}" if file.removeprefix("tests/") in SPLIT else file


def sort_key(item: pytest.Item) -> int:
    """Return the place of an item's file among the longest; all others come after them, as they are."""
    file = item.nodeid.partition("::")[0].removeprefix("tests/")
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return what deals out units in the order in which they were collected."""
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False
    return Units(config, log)
