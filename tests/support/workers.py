"""How pytest-xdist deals the tests out: a file to a worker, the longest first."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

ORDER = (
    *("security/test_security_faults", "security/test_security_race", "test_packages", "test_wheel", "test_linters"),
    *("test_bench", "test_install"),
    *("containers/test_attach", "security/", "engines/", "containers/", "provision/", "kubernetes/"),
    *("cli/test_demo", "cli/test_container_cli", "test_passing", "test_rootfs"),
    *("sim/", "doctor/", "cdi/", "host/", "cli/"),
)
"""Starts of the names of files, the longest first: what begins last should be short."""
TOGETHER = {
    "test_apt.py": "test_packages.py",
    "engines/test_engines_configured_podman.py": "engines/test_engines_all.py",
}
"""Files that go to the worker of another: both need the packages, which are built in one directory of the clone; or
both remove the one cgroup that Podman has for all containers.
"""
SPLIT = ("security/test_security_faults.py", "security/test_security_race.py")
"""Long files whose tests have nothing in common: they are dealt out one function at a time."""


def unit_of(nodeid: str) -> str:
    """Return what of the tests goes to one worker together with this one."""
    file, _, function = nodeid.removeprefix("tests/").partition("::")
    return f"{file}::{function.partition('[')[0]}" if file in SPLIT else TOGETHER.get(file, file)


def sort_key(item: pytest.Item) -> int:
    """Return the place of an item's file in the order; all others come after them, as they are."""
    file = item.nodeid.removeprefix("tests/")
    return next((place for place, start in enumerate(ORDER) if file.startswith(start)), len(ORDER))


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
        for path in sorted(Path(__file__).parents[1].rglob("test_*.py"))[number::workers]:
            sys.path.insert(0, str(path.parent))  # as pytest does
            with contextlib.suppress(BaseException):  # pytest will say it
                importlib.import_module(path.stem)
