"""The real ocigpu-runtime in front of a low-level runtime that only records: bad input, and what passes through."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.product import PROGRAMS, PublicCopy

from ocigpu.sim.create import create_host

REPOSITORY = Path(__file__).resolve().parents[1]
SHIM = str(PROGRAMS / "ocigpu-runtime")

RECORDER = """#!/bin/sh
for word; do printf '%s\\n' "$word"; done >"{0}/arguments"
pwd >"{0}/directory"
env >"{0}/environment"
# not by cat: the shell blocks all signals while it starts a program
while read -r line; do printf '%s\\n' "$line"; done <"/proc/$$/status" >"{0}/status"
ls "/proc/$$/fd" >"{0}/descriptors"
case $KEEP_STDIN in 1) cat >"{0}/input";; esac
case $READ_FD in 1) cat <&7 >"{0}/descriptor-7";; esac
echo "standard output"
echo "standard error" >&2
exit "${{EXIT_STATUS:-0}}"
"""


class Setting:
    """A directory with a recording runtime and settings that name it."""

    def __init__(self, directory: Path, shim: str = SHIM) -> None:
        self.directory = directory
        self.shim = shim
        self.bundle = directory / "bundle"
        self.bundle.mkdir()
        self.records = directory / "records"
        self.records.mkdir()
        self.runtime = directory / "low-level"
        self.runtime.write_text(RECORDER.format(self.records))
        self.runtime.chmod(0o755)
        self.settings = directory / "config.toml"
        self.write_settings(f'[runtime]\nruntimes = ["{self.runtime}"]\n')

    def write_settings(self, text: str) -> None:
        self.settings.write_text(text)
        self.settings.chmod(0o644)

    def write_config(self, config: Any) -> Path:
        path = self.bundle / "config.json"
        path.write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
        return path

    def run(self, *words: str, cwd: Path | None = None, **options: Any) -> "subprocess.CompletedProcess[str]":
        env = {"PATH": "/usr/bin:/bin", "OCIGPU_CONFIG": str(self.settings), **options.pop("env", {})}
        options.setdefault("stdin", subprocess.DEVNULL)
        return subprocess.run(
            [self.shim, *words],
            cwd=cwd or self.directory,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            **options,
        )

    def record(self, name: str) -> str:
        return (self.records / name).read_text()

    def assert_not_started(self) -> None:
        assert os.listdir(self.records) == [], "the low-level runtime was started"

    def assert_refused(
        self, done: "subprocess.CompletedProcess[str]", code: str, message: str, status: int = 1
    ) -> None:
        """One line with the code, and a hint at most; nothing on standard output; no container."""
        lines = done.stderr.splitlines()
        assert done.returncode == status, done.stderr
        assert lines[0].startswith(f"ocigpu-runtime: {code}: "), done.stderr
        assert message in lines[0]
        assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: ")), done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
        self.assert_not_started()


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


class Snapshot(NamedTuple):
    """Everything about the files of a directory that could change but the time of access."""

    files: tuple[tuple[str, int, int, int, int, str], ...]


def snapshot(directory: Path) -> Snapshot:
    found = []
    for path in sorted(directory.iterdir()):
        status = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found.append((path.name, status.st_ino, status.st_mode, status.st_mtime_ns, status.st_ctime_ns, content))
    return Snapshot(tuple(found))


PLAIN: dict[str, Any] = {"process": {"env": ["A=b"]}, "root": {"path": "r"}, "linux": {"namespaces": []}}


def asking(devices: str, **more: Any) -> dict[str, Any]:
    return {
        "process": {"env": [f"NVIDIA_VISIBLE_DEVICES={devices}"]},
        "root": {"path": "r"},
        "linux": {"namespaces": [{"type": "mount"}]},
        **more,
    }


# --- bad bundles


@pytest.mark.parametrize("subcommand", ["create", "run"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "line 1 column 1: Expecting value", id="empty"),
        pytest.param(b'{"process": {"env": [', "line 1 column 22: Expecting value", id="truncated"),
        pytest.param(b"\x7fELF", "line 1 column 1", id="program"),
        pytest.param(b'{"process": {}, "process": {}}', 'duplicate key "process"', id="duplicate keys"),
        pytest.param(b'{"a": NaN}', "NaN is not JSON", id="NaN"),
        pytest.param(b"[" * 1_000_000, "nested too deeply", id="huge nesting"),
        pytest.param(b'{"a": "\xff\xfe"}', "not UTF-8 at byte 7", id="invalid UTF-8"),
        pytest.param(b'{"a": ' + b"1" * 1_000_000 + b"}", "Exceeds the limit", id="huge number"),
        pytest.param(b"[]", "not a JSON object", id="list"),
        pytest.param(b'{"\\u001b[31m\\n": 1, "\\u001b[31m\\n": 2}', r'"\x1b[31m\n"', id="control characters"),
    ],
)
def test_a_broken_configuration_is_refused(setting: Setting, subcommand: str, content: bytes, message: str) -> None:
    setting.write_config(content)
    before = snapshot(setting.bundle)
    done = setting.run(subcommand, "--bundle", str(setting.bundle), "c1")
    setting.assert_refused(done, "OCIGPU-SPEC-2", message)
    assert done.stderr.isascii()
    assert "\x1b" not in done.stderr
    assert snapshot(setting.bundle) == before


def test_a_missing_bundle_is_refused(setting: Setting) -> None:
    missing = setting.directory / "nothing"
    setting.assert_refused(
        setting.run("create", "-b", str(missing), "c1"), "OCIGPU-SPEC-1", f"read {missing}/config.json"
    )
    setting.assert_refused(setting.run("create", "c1"), "OCIGPU-SPEC-1", "read config.json: No such file")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_configuration_that_is_no_file_is_refused_at_once(setting: Setting, make: Any) -> None:
    make(setting.bundle / "config.json")
    done = setting.run("create", "-b", str(setting.bundle), "c1")
    setting.assert_refused(done, "OCIGPU-SPEC-1", f"read {setting.bundle}/config.json: not a regular file")
    assert os.listdir(setting.bundle) == ["config.json"]


@pytest.mark.parametrize(
    ("config", "code", "message"),
    [
        pytest.param(asking("gpu0"), "OCIGPU-REQ-1", '"gpu0"', id="device"),
        pytest.param(asking("0\n\x1b[31m"), "OCIGPU-REQ-1", r"0\n\x1b[31m", id="control characters"),
        pytest.param(asking("0", linux={"namespaces": []}), "OCIGPU-SPEC-3", "no mount namespace", id="namespaces"),
        pytest.param(asking("0," * 100_000), "OCIGPU-REQ-1", "NVIDIA_VISIBLE_DEVICES", id="very long"),
        pytest.param(asking("9"), "OCIGPU-DEV-1", "this host has GPUs 0-1", id="unknown GPU"),
        pytest.param(asking("0", hooks=[]), "OCIGPU-SPEC-3", "hooks is not an object", id="hooks"),
    ],
)
def test_a_request_that_cannot_be_granted_stops_the_container(
    setting: Setting, simulated: str, config: dict[str, Any], code: str, message: str
) -> None:
    setting.write_settings(f'[runtime]\nruntimes = ["{setting.runtime}"]\n[simulation]\nroot = "{simulated}"\n')
    setting.write_config(config)
    before = snapshot(setting.bundle)
    done = setting.run("create", "-b", str(setting.bundle), "c1")
    setting.assert_refused(done, code, message)
    assert snapshot(setting.bundle) == before


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("host") / "sim"
    create_host(str(directory), 2, "t4", compat32=False, sockets=False)
    return str(directory)


# --- bad settings


UNKNOWN = "OCIGPU-SET-2", 'unknown key "disable-requires"', "did you mean disable-require?"
UNKNOWN_IN_TABLE = "OCIGPU-SET-2", 'unknown key "runtime.runtime"', "did you mean runtime.runtimes?"


@pytest.mark.parametrize(
    ("text", "code", "message", "hint"),
    [
        pytest.param("mode = ", "OCIGPU-SET-1", "Invalid value (at end of document)", "", id="not TOML"),
        pytest.param("disable-requires = true\n", *UNKNOWN, id="unknown"),
        pytest.param("[runtime]\nruntime = []\n", *UNKNOWN_IN_TABLE, id="unknown in a table"),
        pytest.param('mode = "cuda"\n', "OCIGPU-SET-2", '"cuda" is not one of auto, hook', "", id="unknown mode"),
        pytest.param("runtime = 1\n", "OCIGPU-SET-2", "runtime is not a table", "", id="no table"),
        pytest.param('[hook]\npath = "relative"\n', "OCIGPU-SET-2", "not an absolute path", "", id="relative path"),
    ],
)
@pytest.mark.parametrize("word", ["create", "run"])
def test_bad_settings_are_refused(setting: Setting, text: str, code: str, message: str, hint: str, word: str) -> None:
    setting.write_settings(text)
    setting.write_config(PLAIN)
    before = snapshot(setting.bundle)
    done = setting.run(word, "c1", cwd=setting.bundle)
    setting.assert_refused(done, code, message)
    assert str(setting.settings) in done.stderr
    assert hint in done.stderr
    assert snapshot(setting.bundle) == before


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_settings_that_others_may_write_are_refused(setting: Setting, mode: int) -> None:
    setting.settings.chmod(mode)
    setting.assert_refused(setting.run("create", "c1"), "OCIGPU-SET-3", f"mode {mode:04o}: others may write")


@pytest.mark.root
def test_settings_of_another_user_are_refused(setting: Setting) -> None:
    os.chown(setting.settings, 1234, 0)
    setting.assert_refused(setting.run("create", "c1"), "OCIGPU-SET-3", "owner 1234")


@pytest.mark.root
def test_unreadable_settings_are_refused(work_directory: Path, public_copy: PublicCopy) -> None:
    setting = Setting(work_directory, str(public_copy.runtime))
    setting.settings.chmod(0o600)
    done = setting.run("create", "c1", user=1234, group=1234, extra_groups=[])
    setting.assert_refused(done, "OCIGPU-SET-1", f"settings {setting.settings}: Permission denied")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(Path.exists, "No such file or directory", id="missing"),
        pytest.param(Path.mkdir, "not a regular file", id="directory"),
        pytest.param(os.mkfifo, "not a regular file", id="pipe"),
    ],
)
def test_settings_that_are_no_file_are_refused(setting: Setting, make: Any, message: str) -> None:
    setting.settings.unlink()
    make(setting.settings)
    setting.assert_refused(setting.run("create", "c1"), "OCIGPU-SET-1", f"settings {setting.settings}: {message}")


@pytest.mark.parametrize("text", [None, "mode = ", 'mode = "cuda"\n'], ids=["missing", "not TOML", "unknown mode"])
@pytest.mark.parametrize("word", ["state", "kill", "delete"])
def test_a_container_is_seen_and_ended_whatever_became_of_the_settings(
    setting: Setting, text: str | None, word: str
) -> None:
    """By the usual runtime, as nobody knows which the settings named."""
    setting.settings.unlink()
    if text is not None:
        setting.write_settings(text)
    log, usual = setting.directory / "log", setting.directory / "usual/runc"
    usual.parent.mkdir()
    setting.runtime.rename(usual)
    done = setting.run("--log", str(log), word, "c1", env={"PATH": f"{usual.parent}:/usr/bin:/bin"})
    assert (done.returncode, done.stderr) == (0, "standard error\n")
    assert word in setting.record("arguments")
    assert str(setting.settings) in log.read_text()
    assert "the usual runtime is used" in log.read_text()


def test_a_missing_low_level_runtime_is_named(setting: Setting) -> None:
    setting.write_settings('[runtime]\nruntimes = ["/nonexistent/runc", "no-such-runtime"]\n')
    done = setting.run("state", "c1")
    setting.assert_refused(done, "OCIGPU-RT-1", "looked for /nonexistent/runc, no-such-runtime")
    assert "hint: Install runc or crun" in done.stderr


def test_settings_that_name_only_the_shim_do_not_loop(setting: Setting) -> None:
    link = setting.directory / "runc"
    link.symlink_to(SHIM)
    copy = setting.directory / "copy"
    shutil.copy(SHIM, copy)
    setting.write_settings(f'[runtime]\nruntimes = ["{SHIM}", "{link}", "{copy}"]\n')
    setting.assert_refused(setting.run("state", "c1"), "OCIGPU-RT-1", f"looked for {SHIM}, {link}, {copy}")


@pytest.mark.parametrize("word", ["exec ", ""], ids=["exec", "fork"])
def test_a_wrapper_that_leads_back_to_the_shim_does_not_loop(setting: Setting, word: str) -> None:
    setting.runtime.write_text(f'#!/bin/sh\n{word}{SHIM} "$@"\n')
    done = setting.run("state", "c1")
    setting.assert_refused(done, "OCIGPU-RT-1", "starts ocigpu-runtime again")


def test_an_error_with_standard_error_closed_does_not_reach_standard_output(setting: Setting) -> None:
    setting.write_config(b"{")
    done = subprocess.run(
        ["/bin/sh", "-c", f"exec {SHIM} create -b bundle c1 2>&-"],
        cwd=setting.directory,
        env={"OCIGPU_CONFIG": str(setting.settings), "PATH": "/usr/bin:/bin"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, b"")
    setting.assert_not_started()


def test_a_runtime_that_cannot_be_executed_is_named(setting: Setting) -> None:
    setting.runtime.write_text("#!/nonexistent/interpreter\n")
    setting.assert_refused(
        setting.run("state", "c1"), "OCIGPU-RT-2", f"exec {setting.runtime}: No such file or directory"
    )


# --- command lines


@pytest.mark.parametrize("word", ["--bundle", "-b", "--pid-file"])
def test_an_option_without_its_value_is_refused(setting: Setting, word: str) -> None:
    setting.assert_refused(setting.run("create", "c1", word), "OCIGPU-ARG-1", f"option {word} needs a value", status=2)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["state", "c1"], id="state"),
        pytest.param(["delete", "create"], id="delete create"),
        pytest.param(["delete", "--force", "run"], id="delete run"),
        pytest.param(["--root", "create", "kill", "c1", "KILL"], id="root named create"),
        pytest.param(["exec", "c1", "create", "-b", "/nonexistent"], id="exec"),
        pytest.param([], id="nothing"),
        pytest.param(["", " ", "a b\tc", "*", "$HOME", "é", "\\"], id="odd words"),
        pytest.param(["unknown-subcommand", "--bundle"], id="unknown subcommand"),
    ],
)
def test_everything_else_passes_untouched(setting: Setting, words: list[str]) -> None:
    setting.write_config(b"not JSON, and not read")
    before = snapshot(setting.bundle)
    done = setting.run(*words, cwd=setting.bundle)
    assert (done.returncode, done.stdout, done.stderr) == (0, "standard output\n", "standard error\n")
    assert setting.record("arguments") == "".join(f"{word}\n" for word in words)
    assert setting.record("directory") == f"{setting.bundle}\n"
    assert snapshot(setting.bundle) == before


@pytest.mark.parametrize(
    ("words", "elsewhere"),
    [
        pytest.param(["create", "create"], True, id="container named create, bundle is the directory"),
        pytest.param(["create", "--bundle={0}", "c1"], False, id="bundle with ="),
        pytest.param(["create", "-b", "{0}", "c1"], False, id="b"),
        pytest.param(["create", "c1", "--bundle", "{0}"], False, id="after the name"),
        pytest.param(["--root", "/r", "--log", "/dev/null", "run", "-b", "{0}", "c1"], False, id="run"),
        pytest.param(["create", "-b", "bundle", "c1"], False, id="relative bundle"),
    ],
)
def test_a_container_that_asks_for_nothing_leaves_no_trace(setting: Setting, words: list[str], elsewhere: bool) -> None:
    setting.write_config(PLAIN)
    before = snapshot(setting.bundle)
    given = [word.format(setting.bundle) for word in words]
    done = setting.run(*given, cwd=setting.bundle if elsewhere else None)
    assert done.returncode == 0, done.stderr
    assert setting.record("arguments").splitlines() == given
    assert snapshot(setting.bundle) == before


@pytest.mark.parametrize("words", [["create", "create"], ["create", "--bundle=."], ["run", "-b", ".", "c1"]])
def test_a_request_is_edited_into_the_bundle_before_the_runtime_starts(
    setting: Setting, simulated: str, words: list[str]
) -> None:
    setting.write_settings(f'[runtime]\nruntimes = ["{setting.runtime}"]\n[simulation]\nroot = "{simulated}"\n')
    path = setting.write_config(asking("1"))
    done = setting.run(*words, cwd=setting.bundle)
    assert (done.returncode, done.stdout, done.stderr) == (0, "standard output\n", "standard error\n")
    (entry,) = json.loads(path.read_text())["hooks"]["prestart"]
    assert entry["path"] == str(PROGRAMS / "ocigpu-hook")
    options = ["--config", str(setting.settings), "--bundle", str(setting.bundle)]
    early = entry["args"][2] if os.geteuid() == 0 else ""  # only root's hook is prepared
    if early:
        assert early.startswith("/run/ocigpu/early-")
        options = ["--early", early, *options]
    assert entry["args"] == ["ocigpu-hook", *options, "prestart"]
    assert os.listdir(setting.bundle) == ["config.json"]
    once = path.read_text()
    assert setting.run(*words, cwd=setting.bundle).returncode == 0
    again = json.loads(path.read_text())["hooks"]["prestart"][0]["args"][2]
    assert path.read_text() == (once.replace(early, again) if early else once)


# --- the log that engines read


def test_an_error_is_written_to_the_engines_log_in_the_runtimes_form(setting: Setting) -> None:
    log = setting.directory / "log.json"
    done = setting.run("--log", str(log), "--log-format", "json", "create", "-b", "/nonexistent", "c1")
    setting.assert_refused(done, "OCIGPU-SPEC-1", "/nonexistent/config.json")
    (line,) = log.read_text().splitlines()
    entry = json.loads(line)
    assert entry.keys() == {"level", "msg", "time"}
    assert entry["level"] == "error"
    assert entry["msg"].startswith("ocigpu-runtime: OCIGPU-SPEC-1: read /nonexistent/config.json: No such file")


def test_an_error_in_the_settings_reaches_the_engines_log_too(setting: Setting) -> None:
    setting.write_settings("x = 1\n")
    log = setting.directory / "log"
    setting.assert_refused(setting.run(f"--log={log}", "create", "c1"), "OCIGPU-SET-2", 'unknown key "x"')
    (line,) = log.read_text().splitlines()
    assert " level=error msg=" in line
    assert "OCIGPU-SET-2" in line


@pytest.mark.parametrize("log", ["/nonexistent/log", "/", "/dev/full", ""])
def test_a_log_that_cannot_be_written_does_not_change_the_error(setting: Setting, log: str) -> None:
    done = setting.run("--log", log, "create", "-b", "/nonexistent", "c1")
    setting.assert_refused(done, "OCIGPU-SPEC-1", "/nonexistent/config.json")


# --- what the low-level runtime inherits


LIBRARY_SIGNALS = 0b11 << 31
"""Signals 32 and 33 are the C library's own (nptl(7)): no program can set them, and what it shows of them varies."""


def read_own_ignored() -> int:
    """Return the mask of the signals that this process was started with as ignored, whoever did that."""
    lines = Path("/proc/self/status").read_text().splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn"))
    pythons_own = 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)
    return mask & ~pythons_own & ~LIBRARY_SIGNALS


OWN_IGNORED = read_own_ignored()


def inherited(setting: Setting) -> dict[str, int]:
    lines = setting.record("status").splitlines()
    masks = {line.split(":")[0]: int(line.split()[1], 16) for line in lines if line[:6] in ("SigIgn", "SigBlk")}
    return {name: mask & ~LIBRARY_SIGNALS for name, mask in masks.items()}


@pytest.mark.parametrize("words", [["state", "c1"], ["create", "-b", "bundle", "c1"]], ids=["state", "create"])
def test_no_signal_is_ignored_or_blocked(setting: Setting, words: list[str]) -> None:
    """CPython ignores SIGPIPE and SIGXFSZ for itself; runc and the container must not inherit that."""
    setting.write_config(PLAIN)
    assert setting.run(*words).returncode == 0
    assert inherited(setting) == {"SigIgn": OWN_IGNORED, "SigBlk": 0}


def test_a_signal_that_the_engine_ignores_stays_ignored(setting: Setting) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    assert setting.run("state", "c1", preexec_fn=ignore).returncode == 0
    assert inherited(setting)["SigIgn"] == OWN_IGNORED | 1 << (signal.SIGHUP - 1)


@pytest.mark.parametrize("status", [0, 1, 7, 125, 255])
def test_the_exit_status_passes_through(setting: Setting, status: int) -> None:
    setting.write_config(PLAIN)
    for words in (["state", "c1"], ["run", "-b", "bundle", "c1"]):
        assert setting.run(*words, env={"EXIT_STATUS": str(status)}).returncode == status


def test_the_environment_passes_through(setting: Setting) -> None:
    env = {"XDG_RUNTIME_DIR": "/x", "NOTIFY_SOCKET": "/n", "PYTHONPATH": "/p", "LC_ALL": "xx_YY", "EMPTY": ""}
    assert setting.run("state", "c1", env=env).returncode == 0
    found = dict(line.split("=", 1) for line in setting.record("environment").splitlines())
    assert {name: found.get(name) for name in env} == env
    # OCIGPU_RUNTIME_PID: how the shim notices that a wrapper has led back to it
    added = {"PWD", "SHLVL", "_", "OLDPWD", "PATH", "OCIGPU_CONFIG", "OCIGPU_RUNTIME_PID"}
    assert found.keys() - added == env.keys()


def test_standard_input_is_left_for_the_container(setting: Setting) -> None:
    setting.write_config(PLAIN)
    source = setting.directory / "input"
    source.write_text("for the container\n" * 1000)
    with source.open() as stdin:
        done = setting.run("run", "-b", "bundle", "c1", stdin=stdin, env={"KEEP_STDIN": "1"})
    assert done.returncode == 0
    assert setting.record("input") == source.read_text()


@pytest.mark.parametrize("words", [["state", "c1"], ["create", "-b", "bundle", "c1"]], ids=["state", "create"])
def test_descriptors_pass_through_and_none_is_added(setting: Setting, words: list[str]) -> None:
    """Descriptor 7 stands for those of --preserve-fds and for console sockets."""
    setting.write_config(PLAIN)
    source = setting.directory / "input"
    source.write_text("through descriptor 7")
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" 7<{source}', "sh", SHIM, *words],
        cwd=setting.directory,
        env={"PATH": "/usr/bin:/bin", "OCIGPU_CONFIG": str(setting.settings), "READ_FD": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert setting.record("descriptor-7") == source.read_text()
    # 10 and above are the recording shell's own
    assert {fd for fd in map(int, setting.record("descriptors").split()) if fd < 10} == {0, 1, 2, 7}
