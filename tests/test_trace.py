"""Lines of a trace, and what ``ocigpu trace`` makes of them."""

import errno
import fcntl
import json
import os
import pty
import stat
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from support import requirements
from support.fixtures import Run

from ocigpu.cli.containers.trace import (
    Start,
    find_outcome,
    find_phases,
    find_slowest,
    group_steps,
    parse_step,
    read_starts,
)
from ocigpu.core.actions import Bind, Node
from ocigpu.core.errors import ApplyError
from ocigpu.core.facts import DeviceNode
from ocigpu.entry.own_hooks import add_trace
from ocigpu.system import log as log_module
from ocigpu.system import trace as trace_module
from ocigpu.system.log import step
from ocigpu.system.trace import MAX_FILE, Trace, open_trace

STEP = {
    "time": "2026-11-21T18:00:00.000000Z", "ns": 1000, "took": 0, "process": "shim", "pid": 7, "container": "c",
    "depth": 0, "action": "begin", "path": "", "reason": "", "result": "ok",
}  # fmt: skip


@pytest.fixture
def written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[Trace], object]], list[dict[str, Any]]]:
    """Call with a function of the process's trace: returns the lines that it wrote."""

    def write(use: Callable[[Trace], object]) -> list[dict[str, Any]]:
        trace = open_trace(str(tmp_path / "trace"), "hook", "c")
        monkeypatch.setattr(log_module, "current_trace", trace)
        try:
            use(trace)
        finally:
            os.close(trace.fd)
        return [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]

    return write


Written = Callable[[Callable[[Trace], object]], list[dict[str, Any]]]


def test_a_plans_action_is_written_with_its_reason(written: Written) -> None:
    node = Node(DeviceNode("/dev/nvidia0", "/dev/nvidia0", 195, 0), "GPU 0 is granted")
    bind = Bind("/usr/bin/nvidia-smi", "/bin/smi", ("ro",), "needed by utility")

    def use(_: Trace) -> None:
        for action in (node, bind):
            with step(action):
                pass

    lines = written(use)
    assert [(line["action"], line["path"], line["reason"], line["result"]) for line in lines] == [
        ("node", "/dev/nvidia0", "GPU 0 is granted", "ok"),
        ("bind", "/bin/smi", "needed by utility", "ok"),
    ]
    assert lines[0]["detail"] == "node /dev/nvidia0 c 195:0 mode=0666 uid=0 gid=0"
    assert (lines[0]["process"], lines[0]["container"], lines[0]["pid"]) == ("hook", "c", os.getpid())


@pytest.mark.parametrize(
    ("error", "result", "message"),
    [
        (ApplyError("OCIGPU-MNT-1", "bind /a -> /b: No space"), "OCIGPU-MNT-1", "bind /a -> /b: No space"),
        (PermissionError(errno.EPERM, "no", "/x"), "EPERM", "[Errno 1] no: '/x'"),
        (ValueError("odd\n"), "ValueError", "odd\\n"),
        (KeyboardInterrupt(), "KeyboardInterrupt", ""),
    ],
    ids=["ours", "errno", "another", "interrupted"],
)
def test_a_step_that_fails_is_written_and_raises(
    written: Written, error: BaseException, result: str, message: str
) -> None:
    def use(trace: Trace) -> None:
        with pytest.raises(type(error)), step("outer"), step("inner", "/p"):
            raise error
        trace.write(("after",))

    inner, outer, after = written(use)
    assert (inner["action"], inner["depth"], outer["action"], outer["depth"], after["depth"]) == (
        *("inner", 1), *("outer", 0), 0,
    )  # fmt: skip
    assert (inner["result"], inner["message"]) == (outer["result"], outer["message"]) == (result, message)


def test_hostile_names_neither_end_a_line_nor_make_it_long(written: Written) -> None:
    evil = "a\n\x1b[31m\x00\udcff\U0001f600" * 5000

    def use(trace: Trace) -> None:
        with pytest.raises(ApplyError), step(Bind(evil, evil, (), evil)):
            raise ApplyError("OCIGPU-MNT-1", evil)
        with step("step", evil, evil):
            pass
        trace.name(json.dumps({"id": evil}).encode())

    lines = written(use)
    assert len(lines) == 3
    for line in lines:
        assert len(json.dumps(line)) < 20_000
        assert all(value.isprintable() for value in line.values() if isinstance(value, str))


@pytest.mark.parametrize("state", [b"", b"{}", b"[]", b'{"id": 1}', b"\xff", b"[" * 100_000])
def test_a_state_without_an_id_leaves_the_container_unknown(written: Written, state: bytes) -> None:
    line = written(lambda trace: trace.name(state))[0]
    assert line["action"] == "begin"
    assert line["container"] in ("", "1")


def refusal(path: Path) -> str:
    with pytest.raises(OSError, match=r".") as caught:
        open_trace(str(path), "shim", "")
    return caught.value.strerror


def test_a_trace_that_others_have_a_hand_in_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.touch(0o600)
    os.link(file, tmp_path / "other")
    assert refusal(file) == "it has another name"
    (tmp_path / "link").symlink_to(file)
    assert refusal(tmp_path / "link") == os.strerror(errno.ELOOP)
    os.unlink(tmp_path / "other")
    file.chmod(0o620)
    assert refusal(file).endswith("mode 0620: others may write")
    file.chmod(0o600)
    os.truncate(file, MAX_FILE + 1)
    assert refusal(file) == "larger than 256 MiB: move it away"


def test_a_trace_is_a_regular_file(tmp_path: Path) -> None:
    requirements.require(requirements.root())
    os.mknod(tmp_path / "null", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    assert refusal(tmp_path / "null") == "not a regular file"


def test_a_new_trace_is_for_its_owner_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        os.close(open_trace(str(tmp_path / "trace"), "shim", "").fd)
    finally:
        os.umask(old)
    assert (tmp_path / "trace").stat().st_mode & 0o777 == 0o600


def test_a_trace_never_takes_the_place_of_a_closed_standard_stream(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "from ocigpu.system.log import begin_trace\n"
        "problem = begin_trace(sys.argv[2], 'shim')\n"
        "import os; os.write(1, problem.encode())\n"
    )
    command = [sys.executable, "-I", "-c", script, str(Path(trace_module.__file__).parents[2]), str(tmp_path / "t")]
    done = subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", *command], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("a standard stream is closed")


def test_neither_program_loads_anything_for_a_trace_that_nobody_wants() -> None:
    script = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "import ocigpu.runtime, ocigpu.hook, ocigpu.provision.apply, ocigpu.bundle.hookless, ocigpu.entry.prepared\n"
        "print('ocigpu.system.trace' in sys.modules)\n"
    )
    package = str(Path(trace_module.__file__).parents[2])
    done = subprocess.run([sys.executable, "-I", "-c", script, package], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


def test_only_our_hooks_of_a_specification_are_told_of_the_trace(tmp_path: Path) -> None:
    ours = tmp_path / "ocigpu-hook"
    ours.touch()
    config = {
        "hooks": {
            "createContainer": [
                {"path": str(ours), "args": ["h", "chmod"]},
                {"path": "/usr/bin/other", "args": ["o", "chmod"]},
                {"path": str(ours)},
            ]
        }
    }
    for _ in range(2):
        add_trace(config, str(ours), "/t")
    first, second, third = config["hooks"]["createContainer"]
    assert first["args"] == ["h", "--trace", "/t", "chmod"]
    assert second["args"] == ["o", "chmod"]
    assert "args" not in third
    for odd in (
        {},
        {"hooks": None},
        {"hooks": {"createContainer": [None, {"path": 1, "args": ["h"]}, {"args": 3}, {"path": "\0", "args": ["h"]}]}},
    ):
        add_trace(odd, str(ours), "/t")


def line(**fields: object) -> bytes:
    return json.dumps({**STEP, **fields}).encode() + b"\n"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n",
        b"[]\n",
        b'{"ns": 1}\n',
        b"\xff\n",
        line(ns="1"),
        line(ns=-1),
        line(ns=True),
        line(depth=1 << 40),
        line(path=3),
        line(message=[]),
        b"[" * 60_000,
        line()[:-20],
    ],
    ids=[
        *("empty", "line-end", "list", "keys", "bytes", "text", "negative", "bool", "depth", "number", "message"),
        *("deep", "torn"),
    ],
)
def test_what_is_no_step_is_passed_over(text: bytes) -> None:
    assert parse_step(text) is None


def starts_of(*lines: bytes) -> list[Start]:
    steps = [parse_step(text) for text in lines]
    return group_steps(step for step in steps if step is not None)


def hook_start() -> list[bytes]:
    """A start in milliseconds: shim 0 to 10, runtime to 30, hook to 50."""
    ms = 1_000_000
    return [
        line(ns=ms),
        line(ns=2 * ms, took=5 * ms, action="facts", depth=1),
        line(ns=2 * ms, took=6 * ms, action="rules"),
        line(ns=11 * ms, action="exec", path="/usr/bin/runc"),
        line(ns=12 * ms, action="begin", process="early", pid=8),
        line(ns=13 * ms, took=18 * ms, action="wait-for-hook", process="early", pid=8),
        line(ns=40 * ms, took=3 * ms, action="bind", process="worker", pid=9, path="/a"),
        line(ns=51 * ms, action="end", process="early", pid=8),
    ]


def test_phases_are_those_of_shim_runtime_and_hook() -> None:
    (start,) = starts_of(*hook_start())
    ms = 1_000_000
    assert [tuple(phase) for phase in find_phases(start)] == [
        ("shim", 0, 10 * ms),
        ("runtime", 10 * ms, 20 * ms),
        ("hook", 30 * ms, 20 * ms),
    ]
    assert start.took == 50 * ms
    assert find_outcome(start) == ("ok", "")
    assert [step.action for step in find_slowest(start)] == ["facts", "bind"], "neither what holds others nor waiting"


def failed(process: str = "early") -> bytes:
    return line(ns=60_000_000, process=process, action="failed", result="OCIGPU-MNT-1", message="bind /a: no")


@pytest.mark.parametrize(
    ("lines", "outcome"),
    [
        (hook_start()[:3], ("incomplete", "the shim did not come to its end: it was killed, or still runs")),
        (hook_start()[:4], ("ok", "")),
        (hook_start()[:5], ("incomplete", "the runtime has not called the hook: it failed before, or still runs")),
        (hook_start()[:7], ("incomplete", "the hook did not come to its end: it was killed, or still runs")),
        ([*hook_start()[:7], failed()], ("OCIGPU-MNT-1", "bind /a: no")),
        ([*hook_start()[:2], failed("shim")], ("OCIGPU-MNT-1", "bind /a: no")),
    ],
    ids=["shim-killed", "no-hook", "not-called", "hook-killed", "hook-failed", "shim-failed"],
)
def test_the_outcome_is_that_of_the_last_word(lines: list[bytes], outcome: tuple[str, str]) -> None:
    (start,) = starts_of(*lines)
    assert find_outcome(start) == outcome


def test_starts_are_told_apart_by_container_and_by_beginning() -> None:
    hook = {"process": "hook", "pid": 9}
    lines = [
        line(container="a"),
        line(container="b", ns=1001),
        line(container="a", action="exec", ns=1002),
        line(container="a", **hook, ns=1003),  # of the shim's start
        line(container="a", ns=2000, pid=10),  # started again
        line(container="b", action="exec", ns=2001),
        line(container="c", **hook, ns=3000),  # without a shim, twice
        line(container="c", **hook, ns=4000),
    ]
    found = [(start.container, len(start.steps)) for start in starts_of(*lines)]
    assert found == [("a", 3), ("b", 2), ("a", 1), ("c", 1), ("c", 1)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trace"
    other = [text.replace(b'"c"', b'"other"') for text in [*hook_start()[:7], failed()]]
    path.write_bytes(b"".join([*hook_start(), b'{"torn', b"\n", *other]))
    return path


def test_a_trace_is_a_timeline(file: Path, run: Run) -> None:
    status, out, err = run("trace", file, "--container", "c")
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "container c, 2026-11-21T18:00:00.000000Z",
        "8 steps in 50.00 ms: ok",
        "",
        "PHASE    AT MS  TOOK MS",
        "shim     0.00   10.00",
        "runtime  10.00  20.00",
        "hook     30.00  20.00",
        "",
        "AT MS  TOOK MS  PROCESS  STEP           WHAT           RESULT",
        "0.00            shim     begin",
        "1.00   6.00     shim     rules",
        "1.00   5.00     shim       facts",
        "10.00           shim     exec           /usr/bin/runc",
        "11.00           early    begin",
        "12.00  18.00    early    wait-for-hook",
        "39.00  3.00     worker   bind           /a",
        "50.00           early    end",
        "",
        "SLOWEST MS  PROCESS  STEP   WHAT",
        "5.00        shim     facts",
        "3.00        worker   bind   /a",
        "",
        "note: 1 line could not be read",
    ]


def test_no_word_of_a_trace_reaches_the_terminal_as_it_is(tmp_path: Path, run: Run) -> None:
    fields = ("time", "container", "path", "reason", "message")
    words = {name: f"\x1b[2J{name}" for name in fields}
    step = {**STEP, **words, "action": "failed", "result": "\x9b31m"}
    (tmp_path / "hostile").write_text(json.dumps(step) + "\n")
    status, out, _ = run("trace", str(tmp_path / "hostile"))
    assert status == 0
    assert "\x1b" not in out
    assert "\x9b" not in out
    assert "\\x1b[2Jtime" in out


def test_of_several_starts_the_last_one_is_shown(file: Path, run: Run) -> None:
    status, out, _ = run("trace", file)
    assert status == 0
    assert out.splitlines()[:3] == [
        "CONTAINER  TIME                         MS     STEPS  RESULT",
        "c          2026-11-21T18:00:00.000000Z  50.00  8      ok",
        "other      2026-11-21T18:00:00.000000Z  59.00  8      OCIGPU-MNT-1",
    ]
    assert "\n8 steps in 59.00 ms: OCIGPU-MNT-1\n  bind /a: no\n" in out


def test_scripts_get_json(file: Path, run: Run) -> None:
    document = json.loads(run("trace", file, "--json")[1])
    assert document["unreadable"] == 1
    assert [start["result"] for start in document["starts"]] == ["ok", "OCIGPU-MNT-1"]
    first = document["starts"][0]
    assert first["phases"][1] == {"name": "runtime", "at": 10_000_000, "took": 20_000_000}
    assert first["steps"][0]["action"] == "begin"
    assert first["slowest"][0]["action"] == "facts"


def read_terminal(screen: FileIO) -> bytes:
    try:
        return screen.read(65536) or b""
    except OSError:  # EIO: the other side is closed
        return b""


def test_a_terminal_gets_bars(file: Path) -> None:
    main_fd, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
    command = [sys.executable, "-m", "ocigpu.cli.front.main", "trace", str(file), "--container", "c"]
    process = subprocess.Popen(command, stdout=terminal, env={**os.environ, "TERM": "xterm", "COLUMNS": "160"})
    os.close(terminal)
    with open(main_fd, "rb", buffering=0) as screen:
        shown = b"".join(iter(lambda: read_terminal(screen), b""))
    assert process.wait(60) == 0
    bars = [text for text in shown.decode().splitlines() if text.startswith(("shim", "runtime"))]
    assert [text.count("━") for text in bars] == [5, 10]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{missing}"], "OCIGPU-TRC-1: trace {missing}: No such file or directory"),
        (["{file}", "--container", "z\n"], 'OCIGPU-TRC-2: trace {file}: no start of container "z\\n"'),
        (["{empty}"], "OCIGPU-TRC-2: trace {empty}: no start of a container"),
        (["{directory}"], "OCIGPU-TRC-1: trace {directory}: Is a directory"),
    ],
    ids=["missing", "container", "empty", "directory"],
)
def test_what_cannot_be_shown_is_an_error(
    file: Path, run: Run, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "empty").touch()
    names = {name: tmp_path / name for name in ("missing", "empty")} | {"file": file, "directory": tmp_path}
    status, out, err = run("trace", *(argument.format(**names) for argument in arguments))
    assert (status, out) == (1, "")
    assert err.splitlines()[0] == f"ocigpu: {message.format(**names)}"


def test_a_file_that_is_no_trace_has_no_starts(tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(os.urandom(300_000))
    starts, unreadable = read_starts(str(tmp_path / "noise"))
    assert starts == []
    assert unreadable > 1
