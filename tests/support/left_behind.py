"""Fixtures for every test of a directory whose tests start engines: its conftest.py imports them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import machine


@pytest.fixture(scope="module", autouse=True)
def machine_unchanged(request: pytest.FixtureRequest, session_directory: Path) -> Iterator[None]:
    """After each module nothing of its engines is left: no mount, process or cgroup."""
    yield
    left = machine.remains(str(session_directory), session_directory.name)
    if left:
        machine.clean(str(session_directory), session_directory.name)
    assert not left, f"left behind by {Path(request.path).name}:\n" + "\n".join(left)


@pytest.fixture(autouse=True)
def hook_log(session_directory: Path) -> Iterator[None]:
    """What hooks wrote to their log during a test, printed so that pytest shows it with a failure."""
    sizes = {log: log.stat().st_size for log in session_directory.glob("*/hook.log")}
    yield
    for log in session_directory.glob("*/hook.log"):
        print(log.read_text()[sizes.get(log, 0) :], end="")
