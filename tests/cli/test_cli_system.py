"""``ocigpu system`` on a simulated host."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import requirements
from support.fixtures import Run

from ocigpu.cli.front.main import main


@pytest.fixture(scope="module")
def made_host(session_directory: Path) -> Iterator[Path]:
    """A simulated host with two A100, of which one is cut into MIG devices."""
    requirements.require(requirements.compiler(), requirements.root())
    directory = session_directory / "system-host"
    assert main(["sim", "create", str(directory), "--gpus", "2", "--model", "a100", "--mig", "1:1g.5gb"]) == 0
    yield directory
    assert main(["sim", "remove", str(directory)]) == 0


@pytest.fixture
def host(made_host: Path) -> Iterator[Path]:
    """The same, put right again afterwards."""
    yield made_host
    assert main(["system", "create-device-nodes", "--config", str(made_host / "config.toml")]) == 0
    shutil.rmtree(made_host / "dev/char")


def real_nodes() -> set[str]:
    return {name for name in os.listdir("/dev") if name.startswith("nvidia") or name == "char"}


def test_nodes_that_are_missing_are_made(host: Path, run: Run) -> None:
    there = real_nodes()
    config = ("--config", host / "config.toml")
    missing = [host / "dev/nvidia1", host / "dev/nvidia-uvm", *(host / "dev/nvidia-caps").iterdir()]
    for path in missing:
        path.unlink()
    status, out, err = run("system", "create-device-nodes", *config, "--dry-run")
    assert (status, err) == (0, "")
    assert f"make    {host}/dev/nvidia-uvm" in out
    assert "note: simulated host: nothing outside its directory is touched" in out
    assert not any(path.exists() for path in missing)
    assert not (host / "dev/char").exists()
    status, out, err = run("system", "create-device-nodes", *config, "--load-kernel-modules", "--json")
    assert (status, err) == (0, "")
    document = json.loads(out)
    assert (document["simulated"], document["dry_run"], document["modules"]) == (True, False, [])
    made = {change["path"] for change in document["changes"] if change["change"] == "make" and "mode" in change}
    assert made == set(map(str, missing))
    assert os.readlink(host / "dev/char/195:1") == "../nvidia1"
    status, out, _ = run("system", "create-device-nodes", *config)
    assert "done: 0; as they should be: " in out
    assert run("list", *config)[0] == 0
    assert real_nodes() == there


def test_links_alone_make_no_node(host: Path, run: Run) -> None:
    config = ("--config", host / "config.toml")
    (host / "dev/nvidia1").unlink()
    status, _, err = run("system", "create-dev-char-symlinks", "--create-all", *config)
    assert (status, err) == (0, "")
    assert os.readlink(host / "dev/char/195:1") == "../nvidia1", "systemd reads the number in its name"
    assert not (host / "dev/nvidia1").exists()
    assert run("system", "create-dev-char-symlinks", "--create-device-nodes", *config)[0] == 0
    assert (host / "dev/nvidia1").exists()


def test_links_can_be_elsewhere(host: Path, run: Run, tmp_path: Path) -> None:
    config = ("--config", host / "config.toml")
    assert run("system", "create-dev-char-symlinks", "--dev-char-path", tmp_path / "char", *config)[0] == 0
    assert os.readlink(tmp_path / "char/195:255") == f"{host}/dev/nvidiactl"
    assert not (host / "dev/char").exists()


def test_control_devices_alone(host: Path, run: Run) -> None:
    for name in ("nvidia0", "nvidiactl"):
        (host / "dev" / name).unlink()
    assert run("system", "create-device-nodes", "--control-devices", "--config", host / "config.toml")[0] == 0
    assert (host / "dev/nvidiactl").exists()
    assert not (host / "dev/nvidia0").exists()


def test_a_host_without_a_driver_is_an_error(run: Run, tmp_path: Path) -> None:
    if os.path.exists("/proc/driver/nvidia"):
        pytest.skip("has an NVIDIA driver")
    for command in ("create-device-nodes", "create-dev-char-symlinks"):
        status, out, err = run("system", command, "--dev-root", tmp_path)
        assert (status, out) == (1, "")
        assert err.startswith("ocigpu: OCIGPU-HOST-1: /proc/devices: no device number of the NVIDIA driver")
    assert os.listdir(tmp_path) == []
