"""Rules of the whole test suite: what is skipped and when that is an error, and that nothing stays behind."""

import os
import shutil
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, os.path.dirname(__file__))

from support import machine, requirements

pytest_plugins = ["support.fixtures"]

settings.register_profile("ocigpu", parent=settings(), deadline=None)  # a busy machine is no failure
settings.load_profile("ocigpu")

NO_SKIPS = os.environ.get("CI") == "true" or os.environ.get("OCIGPU_NO_SKIP") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = requirements.root()
    if reason:
        for item in items:
            if item.get_closest_marker("root") or item.get_closest_marker("engine"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a skipped test is a failed one, but for the reasons that no machine could help."""
    report = yield
    if NO_SKIPS and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(accepted in reason for accepted in requirements.ACCEPTED_REASONS):
            report.outcome = "failed"
            report.longrepr = f"skipped where nothing may be skipped: {reason}"
    return report


@pytest.fixture(scope="session")
def session_directory() -> Iterator[Path]:
    """A directory that every user may enter: containers, daemons and other users work in it.

    When the session ends, no mount, process or cgroup of ours may be left; what is left is named, then removed.
    """
    directory = Path(f"/tmp/{machine.PREFIX}{os.getpid()}")
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)  # whatever the umask
    yield directory
    left = machine.remains(str(directory), directory.name)
    if left:
        machine.clean(str(directory), directory.name)
    shutil.rmtree(directory)
    assert not left, "left behind by the tests:\n" + "\n".join(left)


@pytest.fixture(scope="session", autouse=True)
def cache_unchanged() -> Iterator[None]:
    """Nothing that the programs under test, started as root, have kept below /run stays there.

    What waits for a hook (ocigpu/early.py) removes its directory itself, at the latest when its runtime has ended.
    """
    directory = Path("/run/ocigpu")
    existed = directory.exists()
    before = {path: path.stat().st_mtime_ns for path in directory.glob("*")}
    yield
    deadline = time.monotonic() + 5
    while waiting := [path for path in directory.glob("early-*") if path not in before]:
        assert time.monotonic() < deadline, waiting
        time.sleep(0.02)
    for path in directory.glob("*"):
        if before.get(path) != path.stat().st_mtime_ns:
            path.unlink(missing_ok=True)
    if directory.exists() and not existed:
        directory.rmdir()
