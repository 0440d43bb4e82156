"""Rules of the whole test suite: what is skipped and when that is an error, and that nothing stays behind."""

import gc
import os
import secrets
import shutil
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

sys.path.insert(0, os.path.dirname(__file__))

from support import isolation, machine, requirements, workers
from support.process import wait_for

isolation.isolate()  # before anything is started
# or gRPC starts threads in each child that is forked once it was used, and setns(2) refuses a process with threads
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
machine.note_mounts()

pytest.register_assert_rewrite("support.product")
pytest_plugins = [
    "support.compiled",
    "support.fixtures",
    "support.fabric",
    "support.layouts",
    "support.products",
    "support.again",
    "pytester",
]

settings.register_profile("ocigpu", parent=settings(), deadline=None)  # a busy machine is no failure
settings.register_profile("chosen", parent=settings.get_profile("ocigpu"), max_examples=25)
settings.load_profile("ocigpu")

OWN_TEMPORARY = pytest.StashKey[str]()
NO_SKIPS = os.environ.get("CI") == "true" or os.environ.get("OCIGPU_NO_SKIP") == "1"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Temporary directories of this session alone: what several share, each of them closes to other users anew.

    Of examples that Hypothesis makes up a choice of rows has a quarter, unless a test says its number.
    """
    from support import products  # a plugin, which is not to be imported before it is registered

    if config.getoption("rows") == "chosen" and not products.is_named(config):
        settings.load_profile("chosen")
    if config.option.basetemp is None:
        directory = f"/tmp/pytest-{secrets.token_hex(4)}"
        os.mkdir(directory, 0o700)
        isolation.keep_in_memory(directory)
        machine.note_mounts(directory)
        config.option.basetemp = f"{directory}/run"
        config.stash[OWN_TEMPORARY] = directory


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Nothing stays of a session that passed; what failed can be looked at below the directory its message names."""
    directory = session.config.stash.get(OWN_TEMPORARY, None)
    if directory is not None:
        isolation.give_back(directory, keep=exitstatus != 0)
        if exitstatus == 0:
            shutil.rmtree(directory, ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return workers.make_scheduler(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    """What is collected stays to the end: it is looked through for garbage once, not over and over, nor by children."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collectstart(collector: pytest.Collector) -> None:
    if isinstance(collector, pytest.Session):
        workers.import_share(collector.config)


def pytest_unconfigure() -> None:
    isolation.release()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        workers.sort(items)
    leave_out_foreign(config, items)
    reason = requirements.root()
    if reason:
        for item in items:
            if item.get_closest_marker("root") or item.get_closest_marker("engine"):
                item.add_marker(pytest.mark.skip(reason=reason))


def leave_out_foreign(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs programs that no package here has: those of Kubernetes that nobody has named, and others."""
    out = {
        item
        for item in items
        if not all(os.environ.get(name) for mark in item.iter_markers("cluster") for name in mark.args)
        or any(requirements.programs(*mark.args) for mark in item.iter_markers("program"))
    }
    from support import products  # see above

    products.leave_out(config, items, out, "programs that they need are not here, or not named (CONTRIBUTING.md)")


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
    directory = Path(f"/tmp/{machine.NAME}")
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)  # whatever the umask
    isolation.keep_in_memory(str(directory))
    machine.note_mounts(str(directory))
    yield directory
    left = machine.remains(str(directory), directory.name)
    if left:
        machine.clean(str(directory), directory.name)
    isolation.give_back(str(directory), keep=False)
    shutil.rmtree(directory)
    assert not left, "left behind by the tests:\n" + "\n".join(left)


@pytest.fixture(scope="session", autouse=True)
def nobody_waits() -> Iterator[None]:
    """What waits for a hook (ocigpu/entry/prepared.py) removes its directory when its runtime has ended, or before.

    The directory is this process's own (support/isolation.py) where root could make it so.
    """
    directory = Path("/run/ocigpu")
    before = set(directory.glob("early-*"))
    yield
    wait_for("processes that wait for a hook to end", lambda: set(directory.glob("early-*")) <= before)
