"""Containers of a real Podman, with CDI devices: looked into and changed without asking it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from containers_lab import WAITING
from support import machine
from support.podman import Podman, make_podman
from support.process import explain, run, stop, wait_for
from support.product import PROGRAMS, SimulatedHost
from support.runtimes import container_id

pytestmark = [pytest.mark.root, pytest.mark.engine, pytest.mark.rest]


@pytest.fixture(scope="module")
def podman(session_directory: Path, runtime_environment: dict[str, str], simulated_host: SimulatedHost) -> Podman:
    podman = make_podman(session_directory / "attach-podman", runtime_environment.get("LD_PRELOAD", ""))
    command = [PROGRAMS / "ocigpu", "cdi", "generate", "--config", simulated_host.settings, "--max-version", "0.5.0"]
    run([*command, "--output", podman.cdi / "nvidia.yaml"])
    return podman


@pytest.mark.parametrize("low_level", ["runc", "crun"])
def test_a_container_of_podman_gets_one_more_and_one_less(
    podman: Podman,
    simulated_host: SimulatedHost,
    rootfs: Callable[[str], Path],
    work_directory: Path,
    low_level: str,
) -> None:
    """Podman has its /run to itself here: our commands go where it is."""
    name = container_id()
    root = shutil.copytree(rootfs("glibc"), work_directory / "rootfs", symlinks=True)
    output = work_directory / "output"
    started = podman.start_rootfs(low_level, "nvidia.com/gpu=4", root, name, WAITING, output)

    def ocigpu(*arguments: str) -> str:
        command = ["nsenter", "--target", str(started.pid), "--mount", PROGRAMS / "ocigpu", *arguments]
        result = run([*command, "--config", simulated_host.settings], check=False)
        assert result.returncode == 0, explain(result)
        return result.stdout

    def verify() -> dict[str, Any]:
        data: dict[str, Any] = json.loads(ocigpu("verify", name, "--json"))
        data["nodes"] = {row["path"]: row for row in data["nodes"]}
        return data

    def is_running() -> bool:
        assert started.poll() is None, output.read_text()
        state = Path(f"/proc/{started.pid}/root/run/{low_level}")
        return state.is_dir() and '"running"' in ocigpu("ps", "--all", "--json")

    try:
        wait_for("the container", is_running, on_failure=output.read_text)
        gpus = simulated_host.gpus
        assert verify()["devices"] == [gpus[4]]
        ocigpu("attach", name, "--gpu", "5")
        data = verify()
        assert data["devices"] == [gpus[4], gpus[5]]
        assert [data["nodes"][f"/dev/nvidia{number}"]["opened"] for number in (4, 5, 6)] == ["ENXIO", "ENXIO", "ENOENT"]
        ocigpu("detach", name, "--gpu", "4")
        data = verify()
        assert data["devices"] == [gpus[5]]
        assert [data["nodes"][f"/dev/nvidia{number}"]["made"] for number in (4, 5, 6)] == ["EPERM", "ENXIO", "EPERM"]
    finally:
        for pid in machine.processes_of(name):
            stop(pid, 2)
        started.wait(60)
        machine.remove_cgroups(name)
