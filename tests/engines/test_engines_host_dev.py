"""Containers that have a directory of the host as their /dev: what would be made there would stay for ever."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from support.fixtures import MakeBundle
from support.process import Completed, explain
from support.product import RUNTIME, SimulatedHost
from support.runtimes import answers, container_id, probe, run_container

pytestmark = [pytest.mark.root, pytest.mark.engine]

RUNTIMES = pytest.mark.parametrize("low_level", ["runc", "crun"])
MODES = pytest.mark.parametrize("mode", ["hook", "spec"])
GPU_2 = {"NVIDIA_VISIBLE_DEVICES": "2", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
NEEDED = ("nvidia2", "nvidiactl", "nvidia-uvm")


def start(
    make_bundle: MakeBundle,
    host: SimulatedHost,
    environment: dict[str, str],
    directory: Path,
    low_level: str,
    mode: str,
) -> Completed:
    """Start a container with GPU 2 and the host's ``directory``/dev, in a mode."""

    def edit(config: dict[str, Any]) -> None:
        config["mounts"] = [item for item in config["mounts"] if not item["destination"].startswith("/dev")]
        mount = {"destination": "/dev", "type": "bind", "source": f"{directory}/dev", "options": ["rbind", "rprivate"]}
        config["mounts"].append(mount)

    bundle = make_bundle(probe(["open", "/dev/nvidia2", "/dev/null"]), GPU_2, edit=edit)
    env = host.in_mode(environment, directory / "config.toml", mode, runtime=low_level)
    return run_container([RUNTIME], bundle, container_id(), env=env, cgroup="v2")


def make_dev(directory: Path, host: SimulatedHost, names: tuple[str, ...]) -> None:
    (directory / "dev").mkdir()
    for name, minor in (("null", 3), ("zero", 5), ("full", 7), ("random", 8), ("urandom", 9)):
        os.mknod(directory / "dev" / name, stat.S_IFCHR | 0o666, os.makedev(1, minor))
    for name in names:
        major, minor = (int(number) for number in host.number(name))
        os.mknod(directory / "dev" / name, stat.S_IFCHR | 0o666, os.makedev(major, minor))


@RUNTIMES
@MODES
def test_a_node_that_the_host_has_not_is_not_made_in_its_directory(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    work_directory: Path,
    low_level: str,
    mode: str,
) -> None:
    make_dev(work_directory, simulated_host, ("nvidiactl", "nvidia-uvm"))
    before = sorted(os.listdir(work_directory / "dev"))
    result = start(make_bundle, simulated_host, runtime_environment, work_directory, low_level, mode)
    assert result.returncode != 0
    assert "OCIGPU-DEV-3" in simulated_host.hook_log.read_text().splitlines()[-1]
    assert sorted(set(os.listdir(work_directory / "dev")) - {"pts", "shm", "mqueue", "console"}) == before


@RUNTIMES
@MODES
def test_nodes_of_the_host_serve_and_what_is_not_needed_is_left_out(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    work_directory: Path,
    low_level: str,
    mode: str,
) -> None:
    make_dev(work_directory, simulated_host, NEEDED)
    before = sorted(os.listdir(work_directory / "dev"))
    result = start(make_bundle, simulated_host, runtime_environment, work_directory, low_level, mode)
    assert result.returncode == 0, explain(result)
    assert answers(result.stdout) == {("open", "/dev/nvidia2"): "ENXIO", ("open", "/dev/null"): "ok"}
    assert sorted(set(os.listdir(work_directory / "dev")) - {"pts", "shm", "mqueue", "console"}) == before
