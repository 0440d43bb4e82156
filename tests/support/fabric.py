"""A simulated host with a Fabric Manager, for several test files."""

import shutil
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from support import requirements

from ocigpu.gpus.nvidia.fabric.libnvfm import LibnvfmFabric, open_fabric
from ocigpu.gpus.nvidia.fabric.partitions import Partition
from ocigpu.gpus.nvidia.fabric.state import state_directory
from ocigpu.sim.create import create_host
from ocigpu.sim.fabric import SimulatedManager


@pytest.fixture(scope="session")
def fabric_host(session_directory: Path) -> Path:
    """NVML, CUDA and libnvfm of a board with eight H100."""
    requirements.require(requirements.compiler())
    directory = session_directory / "fabric"
    create_host(str(directory), 8, "h100", few=True)
    return directory


@pytest.fixture
def manager(fabric_host: Path) -> SimulatedManager:
    """The host's manager, newly started."""
    made = SimulatedManager(fabric_host)
    made.path.unlink(missing_ok=True)
    made.start()
    shutil.rmtree(state_directory(str(fabric_host)), ignore_errors=True)
    return made


@pytest.fixture
def fabric(fabric_host: Path, manager: SimulatedManager) -> LibnvfmFabric:
    return open_fabric("127.0.0.1:6666", simulation=str(fabric_host))


def with_active(partitions: Iterable[Partition], physical_ids: Collection[int], active: bool) -> tuple[Partition, ...]:
    """Return partitions of which that of these GPUs is active or not."""
    wanted = tuple(sorted(physical_ids))
    return tuple(replace(one, is_active=active) if one.physical_ids == wanted else one for one in partitions)
