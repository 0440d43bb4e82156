"""``ocigpu engine``: what it prints, what it refuses, what it leaves alone."""

import json
import os
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.product import PROGRAMS, SimulatedHost

from ocigpu.cli.engines import try_engine as engine_test
from ocigpu.cli.engines.try_engine import Docker
from ocigpu.cli.front.main import main
from ocigpu.engines import places
from ocigpu.engines.carry_out import remaining_step
from ocigpu.engines.configure import ConfigureOptions, EngineLink, EnginePlan
from ocigpu.engines.status import EngineStatus
from ocigpu.engines.wanted import Wanted

DAEMON = '{\n  "debug": true\n}\n'


def test_the_hint_of_a_failed_start_names_its_code() -> None:
    said = "OCI runtime create failed: error running hook #0: ocigpu-hook: OCIGPU-LIB-1: libcuda was not found"
    assert engine_test._hint(said) == "ocigpu explain OCIGPU-LIB-1"
    assert engine_test._hint("OCI runtime create failed") == "ocigpu doctor"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A root with the shim, the hook and a daemon.json."""
    for name in ("ocigpu-runtime", "ocigpu-hook", "runc"):
        path = tmp_path / "usr/local/bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    (tmp_path / "etc/docker").mkdir(parents=True)
    (tmp_path / "etc/docker/daemon.json").write_text(DAEMON)
    return tmp_path


def test_directories_of_killed_runs_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a run at work stay, and what only has such a name."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with ExitStack() as at_work, ExitStack() as cleanup:
        other = Path(engine_test._make_directory(at_work))
        killed = tmp_path / f"{engine_test.NAME}-killed"
        (killed / "rootfs").mkdir(parents=True)
        link = tmp_path / f"{engine_test.NAME}-link"
        link.symlink_to(tmp_path)
        own = Path(engine_test._make_directory(cleanup))
        assert {*tmp_path.iterdir()} == {other, own, link}


@pytest.mark.parametrize("program", ["", "/usr/bin/nvidia-cdi-hook"])
def test_gpus_that_a_specification_gives_may_be_more_than_the_plan(
    monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """Docker 29.2 and later serves ``--gpus`` by CDI where this program is on its PATH."""
    monkeypatch.setattr(places, "find_program", lambda _root, _name: program)
    status = EngineStatus("docker", "", True, True, "/etc/docker/daemon.json", gpus_hook="hook", gpus_hook_ours=True)
    (way,) = Docker("docker", status).ways(["nvidia"], [])
    assert (way.words, way.exact) == (("--gpus=all",), not program)


def daemon(host: Path) -> str:
    return (host / "etc/docker/daemon.json").read_text()


def test_configure_shows_the_difference_and_says_what_remains(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "configure", "docker", "--root", str(host)]) == 0
    assert capsys.readouterr().out == (
        """\
--- /etc/docker/daemon.json
+++ /etc/docker/daemon.json
@@ -1,3 +1,8 @@
 {
-  "debug": true
+  "debug": true,
+  "runtimes": {
+    "ocigpu": {
+      "path": "/usr/local/bin/ocigpu-runtime"
+    }
+  }
 }
/etc/docker/daemon.json: changed
/usr/local/bin/nvidia-container-runtime-hook: link to ocigpu-hook made
"""
        f"next step: restart docker where the system in {host} runs, if it does\n"
    )
    assert main(["engine", "configure", "docker", "--root", str(host)]) == 0
    assert capsys.readouterr().out == "docker: nothing to do\n"
    assert main(["engine", "remove", "docker", "--root", str(host)]) == 0
    assert "daemon.json: changed" in capsys.readouterr().out
    assert daemon(host) == DAEMON
    assert main(["engine", "remove", "docker", "--root", str(host)]) == 0
    assert capsys.readouterr().out == "docker: nothing to do\n"


@pytest.mark.parametrize("engine", ["docker", "containerd", "crio", "podman"])
def test_a_dry_run_writes_nothing(host: Path, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted((path, path.lstat().st_mtime_ns) for path in host.rglob("*"))
    words = ["engine", "configure", engine, "--root", str(host), "--default", "--dry-run"]
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "+" in output
    assert ": would be " in output
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (one,) = result["engines"]
    assert (result["changed"], result["dry_run"], one["checked_by"]) == (True, True, "")
    assert all(file["diff"] for file in one["files"])
    assert sorted((path, path.lstat().st_mtime_ns) for path in host.rglob("*")) == before


def test_json_says_everything_that_was_done(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["engine", "configure", "docker", "--root", str(host), "--json"]
    assert main(words) == 0
    (result,) = json.loads(capsys.readouterr().out)["engines"]
    assert result["links"] == [{"path": "/usr/local/bin/nvidia-container-runtime-hook", "target": "ocigpu-hook"}]
    assert [file["path"] for file in result["files"]] == ["/etc/docker/daemon.json"]
    assert main(["engine", "status", "docker", "--root", str(host), "--json"]) == 0
    (status,) = json.loads(capsys.readouterr().out)["engines"]
    assert status["configured"] is True
    assert status["is_default"] is False
    assert status["gpus_hook_ours"] is True
    assert status["runtimes"] == [
        {"name": "ocigpu", "path": "/usr/local/bin/ocigpu-runtime", "exists": True, "ours": True}
    ]


def test_the_options_of_nvidias_tool_work(host: Path) -> None:
    words = ["--runtime=docker", "--nvidia-runtime-name=nvidia", "--nvidia-set-as-default", "--cdi.enabled"]
    assert main(["engine", "configure", *words, "--root", str(host)]) == 0
    data = json.loads(daemon(host))
    assert data["default-runtime"] == "nvidia"
    assert data["runtimes"] == {"nvidia": {"path": "/usr/local/bin/ocigpu-runtime"}}
    assert data["features"] == {"cdi": True}


def test_status_lists_every_engine_and_its_problems(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "configure", "docker", "--root", str(host), "--default"]) == 0
    (host / "usr/local/bin/ocigpu-runtime").unlink()
    (host / "etc/containers").mkdir()
    (host / "etc/containers/containers.conf").write_text("[engine]\nruntime = \n")
    capsys.readouterr()
    assert main(["engine", "status", "--root", str(host)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["ENGINE", "docker", "containerd", "crio", "podman"]
    assert "ocigpu = /usr/local/bin/ocigpu-runtime" in lines[1]
    problems = [line for line in lines if line.startswith("note: ")]
    assert problems == [
        'note: docker: runtime "ocigpu": /usr/local/bin/ocigpu-runtime does not exist',
        "note: podman: /etc/containers/containers.conf: not TOML: Invalid value (at line 2, column 11)",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["configure", "--engine-config", "/x"], "need the name of an engine", id="file of no engine"),
        pytest.param(["configure", "lxc"], "ENGINE is one of", id="unknown engine"),
        pytest.param(["remove", "lxc"], "ENGINE is one of", id="unknown engine to remove"),
        pytest.param(["status", "lxc"], "ENGINE is one of", id="unknown engine to show"),
        pytest.param(["configure", "docker", "--drop-in", "/x"], "no drop-in files", id="drop-in of docker"),
        pytest.param(["configure", "podman", "--gpus-hook"], "is for docker", id="hook of podman"),
        pytest.param(
            ["configure", "docker", "--hook-dir", "/x", "--no-gpus-hook"], "excludes", id="directory without hook"
        ),
        pytest.param(["configure", "docker", "--name", ""], "--name takes", id="empty name"),
        pytest.param(["configure", "docker", "--name", "runc"], "keeps this name", id="name of Docker's own"),
        pytest.param(["configure", "docker", "--name", "a b"], "--name takes", id="name with a space"),
        pytest.param(["configure", "docker", "--name", "a\nb"], "--name takes", id="name of two lines"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(
    words: list[str], message: str, host: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["engine", *words, "--root", str(host)]) == 2
    assert message in capsys.readouterr().err
    assert daemon(host) == DAEMON


@pytest.mark.parametrize("words", [["configure", "docker"], ["remove", "docker"], ["status"]])
def test_a_root_that_is_no_directory_is_refused(
    words: list[str], host: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for root in (host / "none", host / "etc/docker/daemon.json"):
        assert main(["engine", *words, "--root", str(root)]) == 2
        assert f"--root {root}: not a directory" in capsys.readouterr().err


def test_dockerd_looks_for_the_hook_when_it_starts() -> None:
    """A reload is enough for a runtime, not for the link; the link alone is a change with a step that remains, too."""
    plan = EnginePlan("docker", places.DOCKER, ())
    options = ConfigureOptions("docker", Wanted("ocigpu", "/usr/bin/ocigpu-runtime", False, False))
    assert remaining_step(options, plan) == "systemctl reload docker"
    assert remaining_step(options, plan._replace(links=(EngineLink("/x", "y"),))) == "systemctl restart docker"


def test_a_link_alone_leaves_a_step_to_be_done(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "configure", "docker", "--no-gpus-hook", "--root", str(host)]) == 0
    capsys.readouterr()
    assert main(["engine", "configure", "docker", "--root", str(host)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "/usr/local/bin/nvidia-container-runtime-hook: link to ocigpu-hook made",
        f"next step: restart docker where the system in {host} runs, if it does",
    ]


def test_names_of_an_image_do_not_reach_the_terminal_as_they_are(
    host: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = host / "etc/docker/daemon.json"
    file.rename(host / "etc/\x1b[2J.json")
    file.symlink_to("../\x1b[2J.json")
    assert main(["engine", "configure", "docker", "--root", str(host)]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "/etc/\\x1b[2J.json: changed" in output


def test_a_malformed_file_is_named_with_line_and_column(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '{\n  "debug": true\n  "live-restore": true\n}\n'
    (host / "etc/docker/daemon.json").write_text(text)
    assert main(["engine", "configure", "docker", "--root", str(host)]) == 1
    error = capsys.readouterr().err
    assert "OCIGPU-ENG-1: /etc/docker/daemon.json: not JSON: " in error
    assert "line 3 column 3" in error
    assert daemon(host) == text


def test_a_missing_shim_is_an_error_here_and_a_note_in_another_root(
    host: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "daemon.json"
    words = ["engine", "configure", "docker", "--runtime-path", "/no/such/runtime"]
    assert main([*words, "--config", str(config)]) == 1
    assert "OCIGPU-ENG-5: /no/such/runtime does not exist" in capsys.readouterr().err
    assert not config.exists()
    assert main([*words, "--root", str(host)]) == 0
    assert "note: /no/such/runtime does not exist yet below" in capsys.readouterr().out


@pytest.mark.parametrize("engine", ["docker", ""], ids=["docker", "all engines"])
def test_dev_containers_find_the_vendors_name_where_it_is_ours(
    host: Path, capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    """They pass no --gpus, and say nothing, unless "docker info" has nvidia-container-runtime for "nvidia"."""
    dockerd = host / "usr/bin/dockerd"
    dockerd.parent.mkdir()
    dockerd.write_text("#!/bin/sh\n")
    dockerd.chmod(0o755)
    words = ["engine", "configure", engine, "--name", "nvidia", "--root", str(host), "--yes"]
    words = [word for word in words if word]
    named = host / "usr/local/bin/nvidia-container-runtime"
    named.write_text("#!/bin/sh\n# somebody else's\n")
    named.chmod(0o755)
    assert main(words) == 0
    assert "install the package ocigpu-nvidia-names" in capsys.readouterr().out
    assert json.loads(daemon(host))["runtimes"]["nvidia"]["path"] == "/usr/local/bin/ocigpu-runtime"
    named.unlink()
    named.symlink_to("ocigpu-runtime")
    assert main(words) == 0
    assert "Dev Containers" not in capsys.readouterr().out
    assert json.loads(daemon(host))["runtimes"]["nvidia"]["path"] == "/usr/local/bin/nvidia-container-runtime"
    assert main(["engine", "status", "docker", "--root", str(host)]) == 0
    assert "nvidia = /usr/local/bin/nvidia-container-runtime" in capsys.readouterr().out
    assert main(["engine", "remove", "docker", "--root", str(host)]) == 0
    assert daemon(host) == DAEMON


def test_the_shim_that_status_shows_is_the_one_that_is_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shim = tmp_path / "bin/ocigpu-runtime"
    shim.parent.mkdir()
    shim.write_text("#!/bin/sh\n")
    shim.chmod(0o755)
    monkeypatch.setattr("sys.argv", [str(tmp_path / "ocigpu")])
    monkeypatch.setenv("PATH", str(shim.parent), prepend=os.pathsep)
    assert main(["engine", "configure", "docker", "--config", str(tmp_path / "daemon.json"), "--dry-run"]) == 0
    assert f'"path": "{shim}"' in capsys.readouterr().out
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["programs"]["ocigpu-runtime"] == str(shim)


@pytest.mark.root
@pytest.mark.parametrize(("owner", "mode"), [(1000, 0o755), (0, 0o775)], ids=["owner", "group"])
def test_a_shim_that_others_can_replace_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], owner: int, mode: int
) -> None:
    shim = tmp_path / "bin/ocigpu-runtime"
    shim.parent.mkdir(mode=0o755)
    shim.write_text("#!/bin/sh\n")
    shim.chmod(0o755)
    words = ["engine", "configure", "docker", "--config", str(tmp_path / "daemon.json"), "--dry-run"]
    assert main([*words, "--runtime-path", str(shim)]) == 0
    assert "others than root" not in capsys.readouterr().out
    os.chown(shim.parent, owner, 0)
    shim.parent.chmod(mode)
    assert main([*words, "--runtime-path", str(shim)]) == 0
    assert f"note: {shim.parent} can be changed by users other than root" in capsys.readouterr().out


@pytest.mark.root
def test_a_link_to_a_shim_that_others_can_replace_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = tmp_path / "home/ocigpu-runtime"
    link.parent.mkdir(mode=0o755)
    link.symlink_to("/bin/true")
    words = ["engine", "configure", "docker", "--config", str(tmp_path / "daemon.json"), "--dry-run"]
    assert main([*words, "--runtime-path", str(link)]) == 0
    assert "others than root" not in capsys.readouterr().out
    os.chown(link.parent, 1000, 0)
    assert main([*words, "--runtime-path", str(link)]) == 0
    assert f"note: {link} can be changed by users other than root" in capsys.readouterr().out


def test_control_characters_of_a_file_do_not_reach_the_terminal(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (host / "etc/docker/daemon.json").write_text('{\n\t"label": "\u202e\x7f\x9b2J"\n}\n')
    assert main(["engine", "configure", "docker", "--root", str(host)]) == 0
    output = capsys.readouterr().out
    assert "\t" in output
    assert not {"\u202e", "\x7f", "\x9b"} & set(output)


@pytest.mark.parametrize(
    ("said", "status", "written"),
    [
        pytest.param("", 0, True, id="content"),
        pytest.param("level=fatal\nrunning: no such monitor", 1, False, id="not content"),
    ],
)
def test_crio_checks_all_its_drop_ins_with_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: str, status: int,
    written: bool,
) -> None:  # fmt: skip
    """CRI-O is in no distribution that the tests run on: a program stands in for its command ``crio config``."""
    from ocigpu.engines import places

    programs = tmp_path / "programs"
    programs.mkdir()
    crio = programs / "crio"
    crio.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo crio version 1.30.0 && exit\n'
        f'echo "$1 $3" $(ls "$2") >"{tmp_path}/called"\necho "{said}" >&2\nexit {status}\n'
    )
    crio.chmod(0o755)
    monkeypatch.setattr(places, "DAEMON_PATH", (str(programs), *places.DAEMON_PATH))
    directory = tmp_path / "crio.conf.d"
    directory.mkdir()
    (directory / "10-crio.conf").write_text('[crio.runtime]\ndefault_runtime = "crun"\n')
    drop_in: Any = directory / "99-ocigpu.conf"
    words = ["engine", "configure", "crio", "--drop-in", str(drop_in), "--runtime-path", "/bin/true"]
    assert main(words) == status
    output = capsys.readouterr()
    assert (tmp_path / "called").read_text().split() == ["--config-dir", "config", "10-crio.conf", "99-ocigpu.conf"]
    assert drop_in.exists() is written
    if written:
        assert "checked by: crio config" in output.out
        assert sorted(os.listdir(directory)) == ["10-crio.conf", "99-ocigpu.conf"]
    else:
        assert f"OCIGPU-ENG-3: {drop_in}: crio refuses it: running: no such monitor" in output.err


@pytest.mark.parametrize("there", [True, False], ids=["as it was", "gone"])
def test_a_record_without_changes_is_removed(host: Path, capsys: pytest.CaptureFixture[str], there: bool) -> None:
    assert main(["engine", "configure", "docker", "--no-gpus-hook", "--root", str(host)]) == 0
    file = host / "etc/docker/daemon.json"
    file.write_text(DAEMON)
    if not there:
        file.unlink()
    capsys.readouterr()
    assert main(["engine", "remove", "docker", "--root", str(host)]) == 0
    assert capsys.readouterr().out == "/etc/docker/daemon.json: is as it was; its record removed\n"
    assert list(file.parent.iterdir()) == ([file] if there else [])
    assert main(["engine", "remove", "docker", "--root", str(host)]) == 0
    assert capsys.readouterr().out == "docker: nothing to do\n"


K3S = "var/lib/rancher/k3s/agent/etc/containerd/config.toml"
SYSTEM = "etc/containerd/config.toml"


@pytest.fixture
def node(host: Path) -> Path:
    """The root with Docker, its containerd for Docker only, Podman, CRI-O and k3s."""
    for name in ("dockerd", "containerd", "podman", "crio"):
        (host / "usr/local/bin" / name).write_text("#!/bin/sh\n")
        (host / "usr/local/bin" / name).chmod(0o755)
    for name, text in {
        SYSTEM: 'disabled_plugins = ["cri"]\n',
        K3S: "# File generated by k3s. DO NOT EDIT. Use config.toml.tmpl instead.\nversion = 2\n",
    }.items():
        (host / name).parent.mkdir(parents=True)
        (host / name).write_text(text)
    return host


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_all_engines_are_found_configured_and_set_back(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files_of(node)
    words = ["--root", str(node)]
    assert main(["engine", "configure", *words]) == 3
    output = capsys.readouterr()
    assert files_of(node) == before
    assert "nothing was changed" in output.err
    assert all(f"+++ /{path}" in output.out for path in ("etc/docker/daemon.json", f"{K3S}.tmpl"))
    assert main(["engine", "configure", "--yes", *words]) == 0
    output = capsys.readouterr()
    assert [line.split()[0] for line in output.out.partition("next steps:\n")[2].splitlines()] == [
        "docker", "k3s", "crio",
    ]  # fmt: skip
    assert "note: containerd is left alone" in output.out
    changed = {path for path, content in files_of(node).items() if before.get(path) != content}
    assert changed >= {
        "etc/docker/daemon.json",
        f"{K3S}.tmpl",
        "etc/crio/crio.conf.d/99-ocigpu.conf",
        "etc/containers/containers.conf.d/99-ocigpu.conf",
    }
    assert SYSTEM not in changed
    assert main(["engine", "configure", *words]) == 0
    assert capsys.readouterr().out.splitlines()[:4] == [
        f"{name}: nothing to do" for name in ("docker", "k3s", "crio", "podman")
    ]
    assert main(["engine", "remove", *words]) == 3
    assert main(["engine", "remove", "--yes", *words]) == 0
    assert files_of(node) == before
    assert main(["engine", "remove", *words]) == 0


def test_docker_of_a_snap_is_left_alone(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An entry would name a program that the snap does not see; one that is there is taken back."""
    snap = host / "var/snap/docker/current/config/daemon.json"
    snap.parent.mkdir(parents=True)
    snap.write_text(DAEMON)
    (host / "snap/docker/current/bin").mkdir(parents=True)
    (host / "snap/docker/current/bin/dockerd").write_text("#!/bin/sh\n")
    words = ["--root", str(host), "--yes"]
    assert main(["engine", "configure", *words]) == 1
    assert "hint: docker (snap) is left alone" in capsys.readouterr().err
    (host / "usr/local/bin/podman").write_text("#!/bin/sh\n")
    (host / "usr/local/bin/podman").chmod(0o755)
    assert main(["engine", "configure", *words]) == 0
    assert "note: docker (snap) is left alone" in capsys.readouterr().out
    assert snap.read_text() == DAEMON
    place = ["docker", "--engine-config", "/var/snap/docker/current/config/daemon.json"]
    assert main(["engine", "configure", *place, "--no-gpus-hook", "--root", str(host)]) == 0  # of an earlier version
    assert snap.read_text() != DAEMON
    assert main(["engine", "remove", *words]) == 0
    assert snap.read_text() == DAEMON


def test_an_engine_that_cannot_be_configured_keeps_no_other_from_it(
    node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (node / "etc/docker/daemon.json").write_text("{")
    assert main(["engine", "configure", "--yes", "--json", "--root", str(node)]) == 1
    result = json.loads(capsys.readouterr().out)
    rows = {engine["engine"]: engine for engine in result["engines"]}
    assert list(rows) == ["docker", "k3s", "crio", "podman"]
    assert rows["docker"]["error"]["code"] == "OCIGPU-ENG-1"
    assert {name for name, row in rows.items() if row["changed"] and not row["error"]} == {"k3s", "crio", "podman"}
    assert (node / f"{K3S}.tmpl").exists()
    assert main(["engine", "configure", "--yes", "--root", str(node)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("docker: left as it is\nocigpu: OCIGPU-ENG-1: /etc/docker/daemon.json: not JSON")


@pytest.mark.parametrize(("answer", "status"), [("y\n", 0), ("\n", 3), ("", 3)], ids=["yes", "no", "end"])
def test_it_asks_once_on_a_terminal(node: Path, answer: str, status: int) -> None:
    import pty

    before = files_of(node)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(PROGRAMS / "ocigpu", ["ocigpu", "engine", "configure", "--root", str(node)])
    shown = b""
    while b"[y/N] " not in shown:
        shown += os.read(terminal, 4096)
    assert files_of(node) == before
    os.write(terminal, answer.encode() or b"\x04")
    try:
        while part := os.read(terminal, 4096):
            shown += part
    except OSError:  # the other end is closed
        pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status
    assert shown.count(b"[y/N]") == 1
    assert (files_of(node) == before) is (status == 3)


def test_no_engine_is_an_error_to_configure_and_nothing_to_remove(
    host: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["engine", "configure", "--root", str(host)]) == 1
    assert "OCIGPU-ENG-5: no container engine is installed here" in capsys.readouterr().err
    assert main(["engine", "remove", "--root", str(host)]) == 0


def test_k3s_is_named_to_somebody_who_names_containerd(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--root", str(node)]
    assert main(["engine", "configure", "containerd", *words]) == 0
    note = f"note: k3s has a containerd of its own, which does not read /{SYSTEM}: ocigpu engine configure k3s"
    assert note in capsys.readouterr().out.splitlines()
    assert main(["engine", "remove", "containerd", *words]) == 0
    (node / "usr/local/bin/containerd").unlink()
    (node / SYSTEM).unlink()
    before = files_of(node)
    assert main(["engine", "configure", "containerd", *words]) == 1
    error = capsys.readouterr().err
    assert "OCIGPU-ENG-5: containerd is not installed here, but k3s" in error
    assert "hint: ocigpu engine configure k3s" in error
    assert files_of(node) == before
    assert main(["engine", "configure", "k3s", *words]) == 0
    assert f"next step: restart k3s where the system in {node} runs" in capsys.readouterr().out
    assert (node / f"{K3S}.tmpl").exists()
    assert main(["engine", "status", "k3s", *words]) == 0
    assert "k3s" in capsys.readouterr().out
    assert main(["engine", "configure", "rke2", *words]) == 1
    assert "rke2/agent/etc/containerd/config.toml does not exist yet" in capsys.readouterr().err


@pytest.mark.root
def test_what_two_daemons_of_an_engine_lack_is_said_once(
    simulated_host: SimulatedHost, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user's own Docker beside the system's: neither has a hook for --gpus, nor CDI."""
    daemons = [EngineStatus("docker", flavour, True, False, "", cdi="off") for flavour in ("", "rootless")]
    monkeypatch.setattr(engine_test, "find_engines", lambda: daemons)
    monkeypatch.setenv("OCIGPU_CONFIG", str(simulated_host.settings))
    assert main(["engine", "test", "docker"]) == 1
    assert capsys.readouterr().err.count("docker run --gpus is not tested: it has no hook") == 1


@pytest.mark.parametrize("text", ['{"debug": true,}\n', '{"runtimes": {"ocigpu": "/usr/local/bin/ocigpu-runtime"}}\n'])
def test_the_hint_on_a_broken_file_corrects_it(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "daemon.json"
    file.write_text(text)
    monkeypatch.setattr("ocigpu.engines.carry_out.check", lambda *_: "")
    words = ["engine", "configure", "docker", "--no-gpus-hook", "--engine-config", str(file)]
    words += ["--runtime-path", str(PROGRAMS / "ocigpu-runtime")]
    assert main(words) == 1
    hint = capsys.readouterr().err.splitlines()[1]
    assert hint.endswith("; then run this again")
    subprocess.run(["sh", "-e", "-c", hint.removeprefix("hint: ").partition("; then")[0]], check=True)
    assert main(words) == 0, capsys.readouterr().err
    assert "ocigpu" in json.loads(file.read_text())["runtimes"]


def test_the_hint_on_a_directory_moves_it_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As "docker run -v /etc/docker/daemon.json:..." makes one where there is no file."""
    file = tmp_path / "daemon.json"
    file.mkdir()
    monkeypatch.setattr("ocigpu.engines.carry_out.check", lambda *_: "")
    words = ["engine", "configure", "docker", "--no-gpus-hook", "--engine-config", str(file)]
    words += ["--runtime-path", str(PROGRAMS / "ocigpu-runtime")]
    assert main(words) == 1
    hint = capsys.readouterr().err.splitlines()[1]
    subprocess.run(["sh", "-e", "-c", hint.removeprefix("hint: ").partition("; then")[0]], check=True)
    assert main(words) == 0
    file.unlink()
    file.symlink_to("gone/daemon.json")
    assert main(words) == 1
    assert "a link to gone/daemon.json, not there\nhint: put that file there" in capsys.readouterr().err
