"""The real ocigpu-hook with input that no OCI runtime sends: one line, a status, and nothing done."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import machine
from support.product import PROGRAMS

from ocigpu.entry.state import MAX_STATE_BYTES
from ocigpu.sim.create import create_host

REPOSITORY = Path(__file__).resolve().parents[1]
HOOK = str(PROGRAMS / "ocigpu-hook")


def run(*words: str, stdin: bytes = b"", **options: Any) -> "subprocess.CompletedProcess[bytes]":
    env = {"PATH": "/usr/bin:/bin", "OCIGPU_CONFIG": "/nonexistent", **options.pop("env", {})}
    return subprocess.run([HOOK, *words], input=stdin, env=env, cwd="/", capture_output=True, timeout=60, **options)


def assert_refused(done: "subprocess.CompletedProcess[bytes]", code: str, message: str, status: int = 1) -> None:
    text = done.stderr.decode("ascii")
    lines = text.splitlines()
    assert done.returncode == status, text
    assert lines[0].startswith(f"ocigpu-hook: {code}: "), text
    assert message in lines[0]
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: ")), text
    assert "Traceback" not in text
    assert "\x1b" not in text
    assert done.stdout == b""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The settings of a simulated host with two GPUs."""
    return create_host(str(tmp_path_factory.mktemp("host") / "sim"), 2, "t4", compat32=False, sockets=False)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle that asks for a GPU, with an empty root."""
    (tmp_path / "rootfs").mkdir()
    config = {
        "process": {"env": ["NVIDIA_VISIBLE_DEVICES=0"]},
        "root": {"path": "rootfs"},
        "linux": {"namespaces": [{"type": "mount"}, {"type": "pid"}]},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture
def child() -> Iterator[int]:
    """A process of ours in the host's namespaces."""
    process = subprocess.Popen(["sleep", "300"], stdin=subprocess.DEVNULL)
    yield process.pid
    process.kill()
    process.wait()


def state(pid: Any, bundle: Any, **more: Any) -> bytes:
    return json.dumps({"ociVersion": "1.0.2", "id": "c1", "pid": pid, "bundle": str(bundle), **more}).encode()


def tree(directory: Path) -> list[tuple[str, int, int]]:
    return sorted(
        (str(path), path.lstat().st_mode, path.lstat().st_mtime_ns) for path in [directory, *directory.rglob("*")]
    )


# --- standard input


@pytest.mark.parametrize("command", ["prestart", "createRuntime"])
@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        pytest.param(b"", "line 1 column 1: Expecting value", id="empty"),
        pytest.param(b"\x00\xff\xfe\x7fELF", "not UTF-8 at byte 1", id="garbage"),
        pytest.param(b'{"pid": 1, "bun', "line 1 column 12: Unterminated string", id="truncated"),
        pytest.param(b"[" * 1_000_000, "nested too deeply", id="huge nesting"),
        pytest.param(b" " * (MAX_STATE_BYTES + 1), "larger than 4 MiB", id="huge"),
        pytest.param(b'{"pid": 1, "pid": 2}', 'duplicate key "pid"', id="duplicate"),
        pytest.param(b'{"bundle": "/"}', "pid is missing", id="no pid"),
        pytest.param(b'{"pid": 0, "bundle": "/"}', "pid is missing or not a process id", id="stopped container"),
        pytest.param(b'{"pid": 1}', "bundle is missing", id="no bundle"),
        pytest.param(b'{"pid": 1, "bundle": "x"}', "bundle is missing or not an absolute path", id="relative bundle"),
        pytest.param(b'{"\\u001b[31m": 1, "\\u001b[31m": 2}', r'duplicate key "\x1b[31m"', id="control characters"),
    ],
)
def test_what_is_not_a_state_is_refused(command: str, stdin: bytes, message: str) -> None:
    assert_refused(run(command, stdin=stdin), "OCIGPU-SPEC-5", f"container's state: {message}")


def test_endless_input_is_refused() -> None:
    with open("/dev/zero", "rb") as endless:
        done = subprocess.run(
            [HOOK, "prestart"], stdin=endless, capture_output=True, timeout=60, env={"PATH": "/usr/bin:/bin"}
        )
    assert_refused(done, "OCIGPU-SPEC-5", "larger than 4 MiB")


def test_closed_standard_input_is_refused() -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", '"$0" prestart <&-', HOOK], capture_output=True, timeout=60, env={"PATH": "/usr/bin:/bin"}
    )
    assert_refused(done, "OCIGPU-SPEC-5", "read state on standard input: Bad file descriptor")


# --- bundles


def test_a_missing_bundle_is_refused(tmp_path: Path, child: int) -> None:
    done = run("prestart", stdin=state(child, tmp_path / "nothing"))
    assert_refused(done, "OCIGPU-SPEC-1", f"read {tmp_path}/nothing/config.json: No such file or directory")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_configuration_that_is_no_file_is_refused_at_once(tmp_path: Path, child: int, make: Any) -> None:
    make(tmp_path / "config.json")
    done = run("prestart", stdin=state(child, tmp_path))
    assert_refused(done, "OCIGPU-SPEC-1", "config.json: not a regular file")


def test_a_broken_configuration_is_refused(tmp_path: Path, child: int) -> None:
    (tmp_path / "config.json").write_text('{"process": {"env": [')
    assert_refused(run("prestart", stdin=state(child, tmp_path)), "OCIGPU-SPEC-2", f"{tmp_path}/config.json: line 1")


def test_a_missing_root_is_refused(bundle: Path, child: int, settings: str) -> None:
    (bundle / "rootfs").rmdir()
    done = run("--config", settings, "prestart", stdin=state(child, bundle))
    assert_refused(done, "OCIGPU-SPEC-3", f"open rootfs {bundle}/rootfs: No such file or directory")


def test_a_root_that_is_a_file_is_refused(bundle: Path, child: int, settings: str) -> None:
    (bundle / "rootfs").rmdir()
    (bundle / "rootfs").write_text("")
    done = run("--config", settings, "prestart", stdin=state(child, bundle))
    assert_refused(done, "OCIGPU-SPEC-3", f"open rootfs {bundle}/rootfs: Not a directory")


def test_a_container_without_a_mount_namespace_is_refused(bundle: Path, child: int, settings: str) -> None:
    (bundle / "config.json").write_text(json.dumps({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=0"]}}))
    done = run("--config", settings, "prestart", stdin=state(child, bundle))
    assert_refused(done, "OCIGPU-SPEC-3", "no mount namespace")


# --- processes


@pytest.mark.root
def test_a_process_in_the_hosts_mount_namespace_is_refused(bundle: Path, child: int, settings: str) -> None:
    before, mounts = tree(bundle), machine.own_mounts()
    done = run("--config", settings, "prestart", stdin=state(child, bundle))
    assert_refused(done, "OCIGPU-NS-1", str(child))
    assert tree(bundle) == before
    assert machine.own_mounts() == mounts


@pytest.mark.root
def test_a_process_that_is_gone_is_refused(bundle: Path, settings: str) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    before = tree(bundle)
    done = run("--config", settings, "prestart", stdin=state(process.pid, bundle))
    assert_refused(done, "OCIGPU-NS-1", str(process.pid))
    assert tree(bundle) == before


@pytest.mark.root
def test_a_zombie_is_refused(bundle: Path, settings: str) -> None:
    process = subprocess.Popen(["sleep", "300"])
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    try:
        done = run("--config", settings, "prestart", stdin=state(process.pid, bundle))
        assert_refused(done, "OCIGPU-NS-1", str(process.pid))
    finally:
        process.wait()


# --- nothing to do


@pytest.mark.parametrize("command", ["poststart", "poststop"])
@pytest.mark.parametrize("stdin", [b"", b"garbage", state(1, "/")], ids=["empty", "garbage", "state"])
def test_later_stages_have_nothing_to_do(command: str, stdin: bytes) -> None:
    done = run(command, stdin=stdin)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("env", [[], ["NVIDIA_VISIBLE_DEVICES=void"], ["NVIDIA_VISIBLE_DEVICES="]])
def test_a_container_that_asks_for_nothing_is_left_alone(bundle: Path, env: list[str]) -> None:
    """Not even its process or its root is looked for, and neither is the driver."""
    (bundle / "config.json").write_text(json.dumps({"process": {"env": env}}))
    done = run("prestart", stdin=state(2**31 - 1, bundle))
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


# --- command line and settings


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no command given"),
        (["--config", "/c"], "no command given"),
        (["start"], 'unknown command "start"'),
        (["--bundles", "/b", "prestart"], 'unknown option "--bundles"'),
        (["--config"], "option --config needs a value"),
        (["\x1b[31m\n"], r'unknown command "\x1b[31m\n"'),
    ],
)
def test_a_command_line_that_cannot_be_understood_is_refused(words: list[str], message: str) -> None:
    assert_refused(run(*words), "OCIGPU-ARG-1", message, status=2)


def test_named_settings_must_exist(tmp_path: Path) -> None:
    done = run("--config", str(tmp_path / "nothing"), "prestart", stdin=state(1, "/"))
    assert_refused(done, "OCIGPU-SET-1", f"settings {tmp_path}/nothing: No such file or directory")


def test_settings_never_come_from_the_environment(bundle: Path) -> None:
    """The environment may be the container's; run() sets OCIGPU_CONFIG to a file that does not exist."""
    (bundle / "config.json").write_text("{}")
    assert run("prestart", stdin=state(1, bundle)).returncode == 0


def test_unknown_settings_are_refused_with_a_suggestion(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("no-cgroup = true\n")
    path.chmod(0o644)
    done = run("--config", str(path), "prestart", stdin=state(1, "/"))
    assert_refused(done, "OCIGPU-SET-2", 'unknown key "no-cgroup"')
    assert b"hint: did you mean no-cgroups?" in done.stderr


def test_help_and_version_are_printed() -> None:
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"Exit status: 0 everything is in place" in done.stdout
    done = run("--version")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"ocigpu-hook ")


def test_errors_reach_the_hooks_log(tmp_path: Path) -> None:
    """crun shows only path and status of a failed hook."""
    path, log = tmp_path / "config.toml", tmp_path / "log"
    path.write_text(f'[hook]\nlog = "{log}"\n')
    path.chmod(0o644)
    assert run("--config", str(path), "prestart", stdin=b"x").returncode == 1
    (line,) = log.read_text().splitlines()
    assert "level=error" in line
    assert "OCIGPU-SPEC-5" in line
