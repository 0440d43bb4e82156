"""Simulated hosts without a driver, and processes that have their GPUs open."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ocigpu.core.settings import Settings
from ocigpu.gpus.tree import Roots, find_roots
from ocigpu.sim.create import create_host

GPUS = tuple(f"0000:0{number}:00.0" for number in range(1, 9))
MODULES = dict(zip(GPUS, (2, 4, 3, 1, 7, 5, 8, 6), strict=True))


def make_driverless(directory: Path, gpus: int = 8, model: str = "h100", *, iommufd: bool = False) -> Roots:
    """Make a host whose nodes are files, which a process can really open."""
    create_host(str(directory), gpus, model, driver="none", iommufd=iommufd, nodes=False)
    return find_roots(Settings(simulation_root=str(directory)))


@contextmanager
def holding(path: str) -> Iterator[int]:
    """Yield the id of a process that has a file open."""
    with open(path, "rb") as file:
        process = subprocess.Popen(["sleep", "600"], stdin=file)
    with process:
        try:
            yield process.pid
        finally:
            process.kill()


@contextmanager
def running(script: str, *arguments: str) -> Iterator[int]:
    """Yield the id of a Python program that has printed a line and goes on."""
    command = [sys.executable, "-c", script, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout
            assert process.stdout.readline()
            yield process.pid
        finally:
            process.kill()
