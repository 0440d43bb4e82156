"""One simulated host for all tests that only look, and directories that every user may enter for the others."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ocigpu.sim import libraries
from ocigpu.sim.create import create_host
from ocigpu.sim.libraries import library_triplet

RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def sim_host(session_directory: Path) -> Path:
    """Four H100s; the first is cut into three MIG devices, the second is in MIG mode and not cut."""
    directory = session_directory / "simulated host"  # the space is meant
    create_host(str(directory), 4, "h100", ["0:1g.10gb,1g.10gb,3g.40gb", "1:"])
    return directory


@pytest.fixture(scope="session")
def prebuilt(session_directory: Path) -> Path:
    """What a wheel brings: made once, as the tests make many hosts."""
    directory = session_directory / "prebuilt"
    assert libraries.prebuild(directory, native=True) == {os.uname().machine: ""}
    return directory


@pytest.fixture
def run_python(sim_host: Path) -> RunPython:
    """Call with a script: runs it in a new interpreter that finds the host's libraries by their SONAME."""

    def run(
        script: str, *arguments: str, host: Path = sim_host, prefix: tuple[str, ...] = (), **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(host / "usr/lib" / library_triplet()),
            **variables,
        }
        return subprocess.run(
            [*prefix, sys.executable, "-c", script, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run
