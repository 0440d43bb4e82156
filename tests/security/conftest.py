"""The host that hostile images attack, and what starts them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support import requirements
from support.left_behind import hook_log, machine_unchanged
from support.product import SimulatedHost, make_simulated_host

pytest.register_assert_rewrite("security_lab")

from security_lab import Attacks, add_busybox  # noqa: E402 - it has assertions

__all__ = ["hook_log", "machine_unchanged"]


@pytest.fixture(scope="session")
def rich_host(session_directory: Path) -> SimulatedHost:
    """A simulated host with two GPUs and everything that a simulated host can have."""
    requirements.require(requirements.root(), requirements.programs("gcc", "runc"))
    host = make_simulated_host(session_directory / "host-rich", 2, model="b200")
    (host.directory / "tmp/nvidia-mps").mkdir(mode=0o777)
    return host


@pytest.fixture(scope="session")
def lean_image(session_directory: Path, rootfs: Callable[[str], Path]) -> Path:
    """A small image with glibc that starts whatever is made of its directories: /busybox needs none."""
    path = session_directory / "lean-image"
    shutil.copytree(rootfs("glibc"), path, symlinks=True)
    add_busybox(path)
    return path


@pytest.fixture
def attacks(
    work_directory: Path,
    rich_host: SimulatedHost,
    lean_image: Path,
    probes: Path,
    runtime_environment: dict[str, str],
) -> Attacks:
    return Attacks(rich_host, lean_image, probes, work_directory, runtime_environment)
