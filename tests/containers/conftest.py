"""Fixtures: containers that stay, and specifications for them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from containers_lab import GPU_3, WAITING, Made, container
from support.fixtures import MakeBundle
from support.process import run
from support.product import PROGRAMS, SimulatedHost


@pytest.fixture(scope="session")
def specifications(simulated_host: SimulatedHost, session_directory: Path) -> str:
    """Lines of settings with a directory of CDI specifications."""
    directory = session_directory / "specifications"
    directory.mkdir()
    generate = [PROGRAMS / "ocigpu", "cdi", "generate", "--config", simulated_host.settings]
    run([*generate, "--output", directory / "nvidia.yaml"])
    return f'cdi.spec-dirs = ["{directory}"]\n'


@pytest.fixture
def gpu_3(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost
) -> Iterator[Made]:
    """A container of runc on cgroup v1 that was given GPU 3."""
    with container(make_bundle(WAITING, GPU_3), runtime_environment, host=simulated_host) as made:
        yield made
