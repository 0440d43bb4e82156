"""The commands on a simulated host: what ``ocigpu sim create`` makes, the others read."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import requirements
from support.fixtures import Run
from support.machine import read_recorded

from ocigpu import __version__
from ocigpu.cli.front.main import main
from ocigpu.entry.container_cli.main import main as container_cli_main

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def host(session_directory: Path) -> Iterator[Path]:
    """A simulated host with eight A100, of which number 7 is cut into MIG devices."""
    requirements.require(requirements.compiler())
    directory = session_directory / "cli-host"
    arguments = ["--gpus", "8", "--model", "a100", "--driver-version", "550.163.01", "--mig", "7:1g.5gb,2g.10gb"]
    assert main(["sim", "create", str(directory), *arguments]) == 0
    yield directory
    assert main(["sim", "remove", str(directory)]) == 0
    assert not os.path.lexists(directory)


@pytest.fixture
def run_there(host: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Call with arguments: runs ``ocigpu`` with the simulated host's settings."""
    monkeypatch.setenv("OCIGPU_CONFIG", str(host / "config.toml"))
    return run


def test_sim_show_says_what_was_made(host: Path, run: Run) -> None:
    status, out, err = run("sim", "show", host)
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == f"host      SIMULATED host {host}: no real GPU"
    assert "MIG 2g.10gb" in out
    assert len(json.loads(run("sim", "show", host, "--json")[1])["gpus"]) == 8


def test_refresh_says_what_is_kept_for_the_next_start(
    host: Path, run_there: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ocigpu.gpus.cached.SETTLED", -1.0)  # the host was made just now
    status, out, err = run_there("refresh")
    assert (status, err) == (0, "")
    kept = next((host / "run/ocigpu").glob("facts-*"))
    assert f"kept    {kept}\n" in out
    document = json.loads(run_there("refresh", "--json")[1])
    assert (document["kept"], document["path"], document["gpus"]) == (True, str(kept), 8)
    assert document["age_before"] >= 0
    monkeypatch.setattr("ocigpu.gpus.cached.open_cache", lambda *_: -1)
    status, out, _ = run_there("refresh")
    assert status == 0
    assert "no, every start reads the host again: no cache directory is writable for this user alone" in out
    assert json.loads(run_there("refresh", "--json")[1])["kept"] is False


def test_a_directory_without_a_board_controller_serves_none(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    status, _, err = run("sim", "bmc", tmp_path / "empty")
    assert status == 1
    assert f"{tmp_path}/empty: has no redfish.json" in err
    assert "hint: ocigpu sim create DIR --driver none" in err
    assert not list((tmp_path / "empty").iterdir())


@pytest.mark.parametrize("command", ["show", "remove"])
def test_sim_leaves_a_directory_alone_that_it_did_not_make(run: Run, tmp_path: Path, command: str) -> None:
    (tmp_path / "precious").touch()
    status, _, err = run("sim", command, tmp_path)
    assert status == 1
    assert err.startswith("ocigpu: OCIGPU-SIM-1: ")
    assert (tmp_path / "precious").exists()


def test_sim_create_names_the_models_it_has(run: Run, tmp_path: Path) -> None:
    status, _, err = run("sim", "create", tmp_path / "host", "--model", "voodoo2")
    assert status == 1
    assert "h100" in err
    assert not (tmp_path / "host").exists()


def test_list_shows_the_host_as_simulated(run_there: Run, host: Path) -> None:
    status, out, err = run_there("list")
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == f"host    SIMULATED host {host}: no real GPU"
    assert "7:1" in out
    assert "8 GPUs (from nvml)" in out


def test_status_is_one_screen(run_there: Run, host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "systemctl"
    watch = "Id=ocigpu-watch.service LoadState=loaded ActiveState=active UnitFileState=enabled"
    repair = "Id=ocigpu-repair.service LoadState=not-found ActiveState=inactive UnitFileState="
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' {watch} '' {repair}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("ocigpu.engines.places.BOOTED", str(tmp_path))
    status, out, err = run_there("status")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) <= 24
    assert lines[0].startswith(f"ocigpu    {__version__}, Python 3.")
    assert f"host      SIMULATED host {host}: no real GPU" in lines
    assert "GPUs      8 x NVIDIA A100-SXM4-40GB" in lines
    assert "ocigpu-watch.service  enabled  active" in lines
    assert "ocigpu-repair" not in out
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr("ocigpu.cli.about.SECONDS", 0.1)
    assert "note: units: systemctl: no answer in time" in run_there("status")[1]


def test_status_says_what_an_installation_has_compiled(
    run_there: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names on the PATH are links, as those of packages."""
    programs, here = tmp_path / "programs", tmp_path / "here"
    programs.mkdir()
    here.mkdir()
    names = ("ocigpu-runtime", "ocigpu-hook", "ocigpu-container-cli")
    for name in names:
        (here / name).symlink_to(programs / name)
    monkeypatch.setattr(sys, "argv", [str(here / "ocigpu")])
    for content, kept, form in (
        (b"#!/bin/sh\n", True, "script"),
        (b"\x7fELF", False, "compiled"),
        (b"\x7fELF", True, "compiled, with a kept interpreter"),
    ):
        for name in (*names, *["ocigpu-python"] * kept):
            (programs / name).write_bytes(content)
            (programs / name).chmod(0o755)
        assert f"programs  {here}/ocigpu-runtime ({form})" in run_there("status")[1].splitlines()
        assert json.loads(run_there("status", "--json")[1])["forms"] == dict.fromkeys(names, form)
        (programs / "ocigpu-python").unlink(missing_ok=True)


def test_version_as_json(run: Run) -> None:
    assert run("version") == (0, f"ocigpu {__version__}\n", "")
    assert json.loads(run("version", "--json")[1])["version"] == __version__


def test_plan_of_a_mig_device_on_the_host(run_there: Run, host: Path) -> None:
    data = json.loads(run_there("plan", "--gpus", "7:0", "--json")[1])
    assert data["simulated"] is True
    assert (len(data["gpus"]), len(data["mig_devices"])) == (0, 1)
    nodes = [action["node"]["container_path"] for action in data["actions"] if action["action"] == "node"]
    assert "/dev/nvidia7" in nodes
    assert sum(path.startswith("/dev/nvidia-caps/") for path in nodes) == 2


def test_recorded_facts_give_the_plan_of_the_host(run_there: Run, tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text(run_there("facts", "--json")[1])
    for request in (["--gpus", "all"], ["--gpus", "7:1", "--capabilities", "all"]):
        live = run_there("plan", *request, "--json")
        assert live[0] == 0
        assert run_there("plan", *request, "--json", "--facts", tmp_path / "facts.json") == live


def test_container_cli_info_has_the_vendors_shape(run_there: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert container_cli_main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    expected = (DATA / "info-8gpu.txt").read_text().splitlines()
    same = ("NVRM", "CUDA", "Device Index", "Device Minor", "Bus Location", "Architecture", "Brand")
    assert [line[:16] for line in lines] == [line[:16] for line in expected]
    assert [line for line in lines if line.startswith(same)] == [line for line in expected if line.startswith(same)]


def test_container_cli_list_has_the_vendors_lines_in_the_vendors_order(
    run_there: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """This host also has MIG devices, and libraries that the recorded one lacked."""
    assert container_cli_main(["-k", "-u0:0", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    recorded = read_recorded(DATA / "list-8gpu.txt").splitlines()
    assert [line for line in lines if line in recorded] == recorded
    extra = [line for line in lines if line not in recorded]
    assert all(".so." in line or "nvidia-cap" in line or "/capabilities/" in line for line in extra)


def test_container_cli_lists_the_sockets_and_libraries_of_another_root(
    host: Path, run_there: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert container_cli_main(["list", "--device=GPU-nonsense"]) == 1
    assert "device error: GPU-nonsense: unknown device" in capsys.readouterr().err
    assert container_cli_main(["list", "--ipcs"]) == 0
    assert capsys.readouterr().out == "/run/nvidia-persistenced/socket\n"


def test_container_cli_without_a_driver_is_an_initialization_error(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "config.toml"
    (tmp_path / "empty").mkdir()
    settings.write_text(f'[simulation]\nroot = "{tmp_path}/empty"\n')
    settings.chmod(0o644)
    os.environ["OCIGPU_CONFIG"] = str(settings)
    try:
        assert container_cli_main(["info"]) == 1
    finally:
        del os.environ["OCIGPU_CONFIG"]
    assert capsys.readouterr().err.startswith("ocigpu-container-cli: OCIGPU-HOST-1: initialization error: ")
