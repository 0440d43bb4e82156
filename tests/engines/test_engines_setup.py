"""``ocigpu setup`` with a real Podman and a real Docker: one command, a container that proves it, and back."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_engines_all import Machine, enter, machine  # noqa: F401 - fixtures

pytestmark = [pytest.mark.root, pytest.mark.engine, pytest.mark.xdist_group("podman")]

DROP_IN = "/etc/containers/containers.conf.d/99-ocigpu.conf"
LINE = "    podman --runtime=ocigpu run --rm -e NVIDIA_VISIBLE_DEVICES=all debian nvidia-smi"


@pytest.fixture
def unconfigured(machine: Machine) -> Iterator[Machine]:  # noqa: F811
    """The machine, whose Podman knows nothing of ocigpu."""
    machine.ocigpu("engine", "remove", "podman")
    yield machine
    machine.ocigpu("engine", "configure", "podman")


def test_podman_by_one_command_and_back(unconfigured: Machine) -> None:
    shown = unconfigured.ocigpu("setup", "podman", "--dry-run").stdout
    assert f"+++ {DROP_IN}" in shown
    assert f"{DROP_IN}: would be written" in shown
    assert shown.endswith("nothing was changed\n")
    nobody = unconfigured.ocigpu("setup", "podman", check=False)
    assert (nobody.returncode, nobody.stdout.splitlines()[-1]) == (3, "nothing was changed, as nobody said yes (--yes)")
    assert not json.loads(unconfigured.ocigpu("engine", "status", "podman", "--json").stdout)["engines"][0][
        "configured"
    ]

    done = unconfigured.ocigpu("setup", "podman", "--yes").stdout
    assert f"{DROP_IN}: written" in done
    assert "podman  podman --runtime=ocigpu run" in done
    assert "FAILED" not in done
    assert f"It works. To type:\n\n{LINE}\n" in done
    assert "simulated host, no real GPU" in done.partition("It works.")[2]

    again = json.loads(unconfigured.ocigpu("setup", "podman", "--yes", "--json").stdout)
    assert (again["ready"], again["engines"][0]["changed"], again["commands"]) == (True, False, [])
    assert {row["way"] for row in again["results"]} == {
        "podman --runtime=ocigpu run", "podman run --device=nvidia.com/gpu=all",
    }  # fmt: skip

    undone = unconfigured.ocigpu("setup", "podman", "--undo", "--yes").stdout
    assert f"{DROP_IN}: removed" in undone
    assert unconfigured.remains() == ""


def test_an_engine_that_runs_is_restarted_and_one_that_cannot_be_is_named(machine: Machine) -> None:  # noqa: F811
    """There is no systemd on this machine: make test-grounds has the restart itself."""
    machine.ocigpu("engine", "remove", "docker")
    try:
        done = machine.ocigpu("setup", "docker", "--yes", check=False)
        assert "then:\n  systemctl restart docker\n" in done.stdout
        assert "this machine was not booted with systemd: restart docker yourself" in done.stderr
    finally:
        machine.ocigpu("engine", "configure", "docker")


def test_the_host_must_have_gpus(machine: Machine, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "config.toml"
    file.write_text(f"[driver]\nroot = {json.dumps(str(tmp_path))}\n")
    done = machine.ocigpu("setup", "podman", "--yes", "--config", str(file), check=False)
    assert done.returncode == 1
    assert "OCIGPU-HOST-1" in done.stderr


@pytest.mark.parametrize("words", [("--json",), ("dokcer",)])
def test_a_command_line_that_says_too_little(machine: Machine, words: tuple[str, ...]) -> None:  # noqa: F811
    assert machine.ocigpu("setup", *words, check=False).returncode == 2
