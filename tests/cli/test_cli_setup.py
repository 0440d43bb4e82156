"""What ``ocigpu setup`` decides by itself: which daemon it restarts, the line that it shows, its exit status.

Real engines: tests/engines/test_engines_all.py; a real systemd: make test-grounds.
"""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from ocigpu.cli.engines.configure import EngineWork
from ocigpu.cli.host import setup
from ocigpu.core.errors import HostError
from ocigpu.doctor.findings import Evidence, Finding
from ocigpu.engines.configure import ConfigureOptions, EnginePlan
from ocigpu.engines.status import EngineStatus
from ocigpu.engines.wanted import Wanted

UNREAD = Finding(
    "error", "old", (Evidence("/run/docker.sock", ""),), ("systemctl restart docker",), "docker-not-restarted"
)


def work(name: str, engine: str, *links: tuple[str, str], main: str = "", failed: bool = False) -> EngineWork:
    """Return what an engine gets: no change but for the links."""
    options = ConfigureOptions(engine, Wanted("ocigpu", "/usr/bin/ocigpu-runtime", False, False))
    error = HostError("OCIGPU-ENG-5", "no") if failed else None
    return EngineWork(name, options, EnginePlan(engine, main, (), links=links), error=error)


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> list[EngineStatus]:
    """The engines of this machine, for a test to fill; no container runs."""
    found: list[EngineStatus] = []
    monkeypatch.setattr("ocigpu.engines.status.find_engines", lambda: found)
    monkeypatch.setattr(setup, "stopped_by_restart", lambda: ())
    return found


LINK = ("/usr/local/bin/nvidia-container-runtime-hook", "/usr/bin/ocigpu-hook")


def test_an_engine_that_does_not_run_is_not_started(running: list[EngineStatus]) -> None:
    running.append(EngineStatus("docker", "", True, False, "/etc/docker/daemon.json"))
    assert setup.plan_restarts([work("docker", "docker", LINK)], []) == []


def test_k3s_is_not_taken_for_the_systems_containerd(running: list[EngineStatus]) -> None:
    running.append(
        EngineStatus("containerd", "k3s", True, True, "/var/lib/rancher/k3s/agent/etc/containerd/config.toml")
    )
    assert setup.plan_restarts([work("containerd", "containerd", LINK)], []) == []


def test_a_dockerd_that_has_not_read_its_file_is_restarted(running: list[EngineStatus]) -> None:
    """Its files were written before, by engine configure or by a setup that was interrupted."""
    running.append(EngineStatus("docker", "", True, True, "/etc/docker/daemon.json"))
    assert setup.plan_restarts([work("docker", "docker")], []) == []
    assert [one.command for one in setup.plan_restarts([work("docker", "docker")], [UNREAD])] == [
        "systemctl restart docker"
    ]


def test_a_containerd_that_has_not_read_its_file_is_restarted(running: list[EngineStatus]) -> None:
    running.append(EngineStatus("containerd", "", True, True, "/etc/containerd/config.toml"))
    command = "systemctl restart containerd"
    unread = UNREAD._replace(text="containerd was configured after", fixes=(command,), name="engine-not-restarted")
    assert [one.line for one in setup.plan_restarts([work("containerd", "containerd")], [unread])] == [command]
    assert setup.plan_restarts([work("containerd", "containerd")], [UNREAD]) == []


def test_a_restart_names_what_it_stops() -> None:
    restart = setup.Restart("docker", "systemctl restart docker", ("c0", "c1"))
    assert restart.line == "systemctl restart docker   (stops 2 running containers)"
    assert restart.data == {"command": restart.command, "stops": ["c0", "c1"], "status": None}


VARIABLES = " -e NVIDIA_VISIBLE_DEVICES=all -e AMD_VISIBLE_DEVICES=all"


@pytest.mark.parametrize(
    ("way", "vendors", "line"),
    [
        ("docker run --gpus all", ("nvidia",), "docker run --rm --gpus all debian nvidia-smi"),
        (
            "docker run --runtime=ocigpu",
            ("amd",),
            "docker run --rm --runtime=ocigpu -e AMD_VISIBLE_DEVICES=all debian ls /dev/dri",
        ),
        (
            "podman --runtime=ocigpu run",
            ("nvidia", "amd"),
            f"podman --runtime=ocigpu run --rm{VARIABLES} debian nvidia-smi",
        ),
        (
            "docker run --device=amd.com/gpu=all",
            ("amd",),
            "docker run --rm --device=amd.com/gpu=all debian ls /dev/dri",
        ),
    ],
)
def test_the_line_to_type_is_for_the_gpus_that_are_there(way: str, vendors: tuple[str, ...], line: str) -> None:
    assert setup.typed(way, vendors) == line


@pytest.mark.parametrize(
    ("failed", "stays", "dry_run", "passed", "status"),
    [
        (False, False, False, True, 0),
        (False, False, False, False, 4),
        (True, False, False, True, 1),
        (False, True, True, False, 0),
        (True, True, True, False, 1),
        (False, True, False, False, 3),
    ],
)
def test_the_exit_status_is_the_worst(failed: bool, stays: bool, dry_run: bool, passed: bool, status: int) -> None:
    works = [work("docker", "docker"), work("podman", "podman", failed=failed)]
    assert setup.result_status(works, stays, dry_run, passed) == status


def test_a_machine_without_the_client_or_systemctl_ends_with_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_words: Any, **_more: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(subprocess, "run", missing)
    monkeypatch.setattr(setup, "BOOTED", "/")
    assert not setup.is_active("k3s")
    setup.await_restart(["docker", "version"])
    assert setup.restart_engine(setup.Restart("k3s", "systemctl restart k3s"))["status"] == 1


def test_without_a_gpu_the_way_to_a_simulated_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    config = tmp_path / "config.toml"
    config.write_text(f'[driver]\nroot = "{tmp_path / "root"}"\n')
    with pytest.raises(HostError) as caught:
        setup.setup_command("docker", dry_run=True, config=str(config))
    assert caught.value.code == "OCIGPU-HOST-1"
    assert "ocigpu sim create /opt/gpus" in caught.value.hint
    config.write_text(f'[simulation]\nroot = "{tmp_path / "none"}"\n')
    with pytest.raises(HostError) as caught:
        setup.setup_command("docker", dry_run=True, config=str(config))
    assert "ocigpu sim create /opt/gpus" not in caught.value.hint
