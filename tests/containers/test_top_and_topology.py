"""``ocigpu top`` and ``ocigpu topology``: who uses which GPU how much, and how GPUs are connected."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from containers_lab import WAITING, Made, container, ocigpu
from support.fixtures import MakeBundle
from support.product import SimulatedHost

from ocigpu.cli.host.top import rows_of
from ocigpu.cli.host.top_screen import HELP, Choice, History, View, draw
from ocigpu.containers.usage import GpuProcess, UsedGpu, User
from ocigpu.gpus.usage import Usage, parse_usage
from ocigpu.sim.create import create_host

PATIENCE = 60.0
"""Seconds that a view may take to show something, on a machine that does much else."""


@contextmanager
def loaded(host: SimulatedHost, *lines: str) -> Iterator[None]:
    """Let the simulated NVML report this; see nvml_metrics.c."""
    file = host.directory / "load"
    file.write_text("".join(f"{line}\n" for line in lines))
    try:
        yield
    finally:
        file.unlink()


def words(host: SimulatedHost, made: Made | None = None) -> list[str]:
    state = str(made.state) if made else str(host.directory / "no-containers")
    return ["--config", str(host.settings), "--state-dir", state]


def top(host: SimulatedHost, made: Made | None = None) -> dict[str, dict[str, Any]]:
    data = json.loads(ocigpu("top", "--json", *words(host, made)))
    assert data["simulated"]
    return {gpu["gpu"]: gpu for gpu in data["gpus"]}


@pytest.mark.root
@pytest.mark.engine
def test_memory_and_time_of_processes_are_their_containers(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str]
) -> None:
    bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "0,2"}, layout="busybox")
    with container(bundle, runtime_environment, host=simulated_host) as made:
        pid, own = made.found().pid, os.getpid()
        lines = ("load 0 80", f"process 0 {pid} 1024 50", f"process 0 {own} 2048 30", f"process 1 {pid} 10 5")
        with loaded(simulated_host, *lines):
            gpus = top(simulated_host, made)
            host, given = gpus["0"]["containers"]
            assert (given["name"], given["engine"], given["state"]) == (made.name, "runc", "ok")
            assert (given["use"], given["used_mib"]) == (50, 1024)
            assert [process["pid"] for process in given["processes"]] == [pid]
            assert (host["name"], host["use"], host["used_mib"]) == ("(host)", 30, 2048)
            assert (gpus["0"]["use"], gpus["0"]["processes"]) == (80, 2)
            (stranger,) = gpus["1"]["containers"]
            assert (stranger["name"], stranger["state"], stranger["used_mib"]) == (made.name, "", 10)
            (idle,) = gpus["2"]["containers"]
            assert (idle["name"], idle["use"], idle["processes"]) == (made.name, 0, [])
            assert gpus["3"]["containers"] == []
            by_use = ocigpu("top", "--sort", "use", *words(simulated_host, made)).splitlines()
            by_memory = ocigpu("top", "--sort", "memory", *words(simulated_host, made)).splitlines()
            assert "SIMULATED" in by_use[0]
            assert [made.name in line for line in by_use[2:4]] == [True, False]
            assert [made.name in line for line in by_memory[2:4]] == [False, True]
            assert f"pytest {own}" in by_memory[2] or f"python {own}" in by_memory[2] or f" {own}" in by_memory[2]


@pytest.mark.root
@pytest.mark.engine
def test_mig_devices_have_rows_of_their_own(
    make_bundle: MakeBundle, mig_host: SimulatedHost, runtime_environment: dict[str, str]
) -> None:
    bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "0:1"}, layout="busybox")
    with container(bundle, runtime_environment, host=mig_host) as made:
        gpus = top(mig_host, made)
        assert "0" not in gpus
        assert [user["name"] for user in gpus["0:1"]["containers"]] == [made.name]
        assert gpus["0:1"]["total_mib"] < gpus["1"]["total_mib"]
        assert (gpus["0:1"]["use"], gpus["0:0"]["containers"]) == (None, [])
        found = json.loads(ocigpu("topology", "--json", *words(mig_host, made)))
        assert found["gpus"][0]["containers"] == [f"{made.name} (0:1)"]


class Terminal:
    """``ocigpu top`` on a terminal of its own; what it draws is read as screens."""

    def __init__(self, columns: int, lines: int, *arguments: str) -> None:
        self.parent, child = pty.openpty()
        self.child = child
        self.resize(columns, lines)
        self.before = termios.tcgetattr(child)
        command = [sys.executable, "-m", "ocigpu.cli.front.main", "top", "--interval", "0.2", *arguments]
        environment = {**os.environ, "TERM": "xterm"}
        self.process = subprocess.Popen(
            command, stdin=child, stdout=child, stderr=child, env=environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(child, termios.TIOCSCTTY, 0) and None,  # noqa: PLW1509 - there is one thread
        )  # fmt: skip
        self.output = b""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.child, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self.parent, keys)

    def wait_for(self, pattern: str) -> list[str]:
        """Return the lines of the next screen that has this."""
        self.output = b""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if select.select([self.parent], [], [], 0.1)[0]:
                self.output += os.read(self.parent, 65536)
            for screen in re.findall(rb"\x1b\[\?2026h(.*?)\x1b\[\?2026l", self.output, re.DOTALL):
                text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.decode().replace("\r\n", "\n"))
                if re.search(pattern, text):
                    return text.split("\n")
        raise AssertionError(f"no screen with {pattern!r}: {self.output[-2000:]!r}")

    def ended(self) -> int:
        """Return the exit status, after the terminal is as it was."""
        end = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < end:
            if select.select([self.parent], [], [], 0.1)[0]:
                self.output += os.read(self.parent, 65536)
        while select.select([self.parent], [], [], 0)[0]:
            self.output += os.read(self.parent, 65536)
        assert self.output.endswith(b"\x1b[?7h\x1b[?25h\x1b[?1049l"), self.output[-200:]
        assert termios.tcgetattr(self.child) == self.before
        return self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.parent)
        os.close(self.child)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    made: list[Terminal] = []
    yield made
    for terminal in made:
        terminal.close()


@pytest.mark.root
@pytest.mark.engine
def test_the_live_view_follows_containers_keys_and_the_terminals_size(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    terminals: list[Terminal],
) -> None:
    bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "1"}, layout="busybox")
    state = bundle.with_name(f"{bundle.name}.state")
    terminal = Terminal(120, 30, "--config", str(simulated_host.settings), "--state-dir", str(state))
    terminals.append(terminal)
    terminal.wait_for("0 containers.* by gpu\n.*\n0 .* 0%")
    with (
        container(bundle, runtime_environment, host=simulated_host) as made,
        loaded(simulated_host, f"process 1 {made.found().pid} 1536 40", "load 1 40"),
    ):
        pid = made.found().pid
        screen = terminal.wait_for(
            f"1 container .*\n(.*\n)+1 .* 40% .*\n +{made.name} .* 40% +1.5 GiB\n +{pid} \\S+ .* 1.5 GiB"
        )
        assert (screen[0].startswith("SIMULATED"), screen[-1].startswith("q quit")) == (True, True)
        terminal.press(b"u")
        assert terminal.wait_for("by use\n")[2].startswith("1 ")
        terminal.press(b"c")
        assert terminal.wait_for("by container\n")[2].startswith("1 ")
        terminal.press(b"p")
        terminal.wait_for(f"{made.name} .* 1 process\n(?!.*{pid})")
        terminal.press(b"?")
        terminal.wait_for("hide or show processes")
        terminal.press(b" ")
        terminal.press(f"/{made.name[:3]}xx".encode())
        terminal.wait_for(f"\nfilter: {made.name[:3]}xx_")
        terminal.press(b"\x7f\x7f\r")
        assert terminal.wait_for(f"\nfilter: {made.name[:3]} ")[2].startswith("1 ")
        terminal.press(b"\x1b")  # clears the filter, and does not quit
        terminal.wait_for("\nq quit")
        terminal.resize(30, 5)
        os.kill(terminal.process.pid, signal.SIGWINCH)
        narrow = terminal.wait_for("rows 1 to 1 of ")
        assert len(narrow) == 5
        assert max(map(len, narrow)) <= 30
        terminal.press(b"\x1b[B")
        terminal.wait_for("rows 2 to 2 of ")
        terminal.press(b"\x1b[A" * 40)  # more than is read at once: no key is cut
        terminal.wait_for("rows 1 to 1 of ")
        terminal.resize(120, 30)
        os.kill(terminal.process.pid, signal.SIGWINCH)
        terminal.wait_for("by container\nGPU  .* MEMORY")
    terminal.wait_for("0 containers")
    assert terminal.output.count(b"\x1b[2J") == 0  # a screen that is cleared first flickers
    terminal.press(b"q")
    assert terminal.ended() == 0


@pytest.mark.root
@pytest.mark.parametrize("ending", [b"\x03", signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_the_terminal_is_as_it_was_however_the_view_ends(
    simulated_host: SimulatedHost, terminals: list[Terminal], ending: bytes | signal.Signals
) -> None:
    terminal = Terminal(80, 24, *words(simulated_host))
    terminals.append(terminal)
    terminal.wait_for("0 containers")
    if isinstance(ending, bytes):
        terminal.press(ending)
    else:
        terminal.process.send_signal(ending)
    assert terminal.ended() == 0


@pytest.mark.root
def test_a_suspended_view_gives_the_terminal_back_and_goes_on(
    simulated_host: SimulatedHost, terminals: list[Terminal]
) -> None:
    terminal = Terminal(80, 24, *words(simulated_host))
    terminals.append(terminal)
    terminal.wait_for("0 containers")
    terminal.press(b"\x1a")
    _, status = os.waitpid(terminal.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert termios.tcgetattr(terminal.child) == terminal.before
    terminal.process.send_signal(signal.SIGCONT)
    terminal.wait_for("0 containers")
    terminal.press(b"q")
    assert terminal.ended() == 0


@pytest.mark.root
def test_an_nvml_that_dies_is_said_and_asked_again(simulated_host: SimulatedHost, terminals: list[Terminal]) -> None:
    terminal = Terminal(120, 24, *words(simulated_host))
    terminals.append(terminal)
    terminal.wait_for("\n0 .* 0%")
    children = Path(f"/proc/{terminal.process.pid}/task/{terminal.process.pid}/children").read_text().split()
    (child,) = (pid for pid in children if b"nvml_verbs" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(int(child), signal.SIGKILL)
    assert any(line.startswith("0 ") for line in terminal.wait_for("NVML ended its process"))
    terminal.wait_for("\n0 .* 0%")
    terminal.press(b"q")
    assert terminal.ended() == 0


TRAIN = User("train", "0123456789abcdef", "docker", "ok", 50, 1024, (GpuProcess(7, "python", 1024, 50),))
GPUS = [
    UsedGpu("0", "NVIDIA H100 80GB HBM3", Usage("a", 99, 79000, 81559, 700, 80), (TRAIN,)),
    UsedGpu("1", "NVIDIA H100 80GB HBM3", Usage("b", 0, 512, 81559, 90, 30), ()),
    UsedGpu("2:0", "NVIDIA H100 MIG 1g.10gb", Usage("c", None, 3, 9728), (User("idle", "", "", "lost"),)),
]


def screen(choice: Choice, width: int, gpus: list[UsedGpu] = GPUS, height: int = 24) -> list[str]:
    history = History()
    for second in range(100):
        history.add(gpus, second)
    return draw(View(False, 3, gpus, 2, []), choice, history, 100.0, 1.0, (width, height))


def test_a_screen_of_80_columns_has_bars_history_memory_and_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    lines = screen(Choice("gpu"), 80)
    assert max(map(len, lines)) <= 80
    assert lines[2] == "0    ██████████   99%  ████████████  ██████████    77.1/79.6 GiB   700 W   80 °C"
    assert (lines[3].split(), lines[4].split()) == (
        ["0123456789ab", "train", "docker", "50%", "1.0", "GiB"],
        ["7", "python", "50%", "1.0", "GiB"],
    )
    assert lines[5].startswith("1    ░░░░░░░░░░    0%  ▁▁▁▁▁▁▁▁▁▁▁▁")
    assert lines[6].split()[:3] == ["2:0", "░░░░░░░░░░", "-"]
    monkeypatch.setenv("LC_ALL", "C")
    assert all(line.isascii() for line in screen(Choice("gpu"), 200))


@pytest.mark.parametrize("width", [1, 12, 24, 40, 60, 79, 80, 132, 300])
def test_columns_go_before_lines_are_cut(width: int) -> None:
    lines = screen(Choice("gpu"), width)
    assert max(map(len, lines)) <= width
    assert ("H100" in lines[2], "700 W" in lines[2]) == (width >= 132, width >= 79)
    assert ("99%" in lines[2]) == (width >= 12)


def test_history_is_of_the_last_minute_and_of_gpus_that_are_here() -> None:
    history = History()
    for second in range(200):
        history.add([UsedGpu("0", "", Usage("a", second % 100), ())], float(second))
    assert history.means("a", 199.0) == [41, 46, 51, 56, 61, 66, 71, 76, 81, 86, 91, 96]
    assert history.means("a", 250.0)[2:] == [None] * 10
    assert history.means("a", 1000.0) == [None] * 12  # drawn long after it was read
    history.add([UsedGpu("1", "", Usage("b", 1), ())], 200.0)
    assert (history.means("a", 200.0), history.means("b", 200.0)) == ([None] * 12, [*[None] * 11, 1])


def test_keys_sort_filter_and_scroll() -> None:
    choice = Choice("gpu")

    def labels(*keys: str) -> list[str]:
        for key in keys:
            assert choice.press(key)
        return [line.split()[0] for line in screen(choice, 80)[2:-2] if not line.startswith("    ")]

    assert labels() == ["0", "1", "2:0"]
    assert labels("c") == ["2:0", "0", "1"]
    assert labels("m") == ["0", "1", "2:0"]
    assert labels("/", *"Python", "enter") == ["0"]
    assert labels("/", "backspace", *[*"idl"], "escape", "g") == ["0", "1", "2:0"]
    assert labels("/", *"mig", "enter") == ["2:0"]
    assert labels("escape") == ["0", "1", "2:0"]
    assert "keys" in screen(choice, 80)[1] or choice.press("?")
    assert [line.rstrip() for line in screen(choice, 100)[2:-2]] == [line.rstrip() for line in HELP.splitlines()]
    assert choice.press("q")  # closes the list of keys
    choice.press("end")
    assert screen(choice, 80, height=6)[-2] == "rows 5 to 6 of 6"
    choice.press("home")
    assert screen(choice, 80, height=6)[-2] == "rows 1 to 2 of 6"
    assert not choice.press("q")


def test_a_gpus_own_cells_stand_once() -> None:
    other = TRAIN._replace(name="other", id="")
    rows = rows_of([GPUS[0]._replace(users=(TRAIN, other))])
    assert [row[0] for row in rows] == ["0", ""]
    assert [row[6] for row in rows] == ["0123456789ab train", "other"]
    assert rows[0][-1] == "python 7"


@pytest.mark.parametrize("document", [{}, [1], [{"uuid": "x"}], [{"uuid": "x", "use": "y", "processes": []}], None])
def test_what_nvml_did_not_say_is_no_usage(document: object) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        parse_usage(document or 1)


def test_a_usage_may_be_unknown() -> None:
    numbers = dict.fromkeys(("use", "used_mib", "total_mib", "watts", "celsius"))
    (found,) = parse_usage([{"uuid": "GPU-1", "processes": [[7, 8, 9]], **numbers}]).values()
    assert (found.use, found.total_mib, found.processes) == (None, None, ((7, 8, 9),))


@pytest.mark.root
@pytest.mark.engine
def test_gpus_of_two_vendors_and_how_they_are_connected(
    make_bundle: MakeBundle, session_directory: Path, runtime_environment: dict[str, str]
) -> None:
    directory = session_directory / "host-mixed-top"
    create_host(str(directory), gpus=2, model=("a100", "mi300x"), compat32=False)
    gpus = json.loads((directory / ".ocigpu-sim.json").read_text())["gpus"]
    host = SimulatedHost(directory, tuple(gpu["uuid"] for gpu in gpus), ())
    device = directory / "sys/bus/pci/devices/0000:41:00.0"
    (device / "gpu_busy_percent").write_text("73\n")
    (device / "mem_info_vram_used").write_text(f"{5 << 30}\n")
    bundle = make_bundle(WAITING, {"AMD_VISIBLE_DEVICES": "0"}, layout="busybox")
    with container(bundle, runtime_environment, host=host) as made:
        found = top(host, made)
        assert list(found) == ["nvidia 0", "nvidia 1", "amd 0", "amd 1"]
        used = found["amd 0"]
        assert (used["use"], used["used_mib"], used["watts"], used["celsius"]) == (73, 5 << 10, 140, 40)
        assert [(one["name"], one["use"]) for one in used["containers"]] == [(made.name, None)]
        shown = json.loads(ocigpu("topology", "--json", *words(host, made)))
        assert {gpu["label"]: gpu["containers"] for gpu in shown["gpus"]}["amd0"] == [made.name]
        pairs = {tuple(pair["gpus"]): (pair["pcie"], pair["links"]) for pair in shown["pairs"]}
        assert pairs["nvidia0", "nvidia1"] == ("SYS", {"NV": 4})
        assert pairs["nvidia0", "amd0"] == ("NODE", {})
        assert pairs["amd0", "amd1"] == ("SYS", {"XGMI": 1})
        text = ocigpu("topology", *words(host, made))
        assert re.search(r"^amd0 +NODE +SYS +X +XGMI1 ", text, re.MULTILINE)
        assert {"NV#   number of NVLinks", "XGMI#  number of links of XGMI"} <= set(text.splitlines())


@pytest.mark.root
@pytest.mark.engine
def test_the_topology_is_a_tree_and_a_matrix(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str]
) -> None:
    bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "3"}, layout="busybox")
    with container(bundle, runtime_environment, host=simulated_host) as made:
        text = ocigpu("topology", *words(simulated_host, made))
    tree, matrix = re.split(r"\n +GPU0 ", text)
    count = len(simulated_host.gpus)
    assert re.findall(r"GPU\d", tree) == [f"GPU{number}" for number in range(count)]
    assert re.findall(r"^NUMA node \d", tree, re.MULTILINE) == ["NUMA node 0", "NUMA node 1"]
    assert "PCIe switch" in tree
    assert f"[{made.name}]" in next(line for line in tree.splitlines() if "GPU3" in line)
    rows = re.findall(r"^GPU\d .*", matrix, re.MULTILINE)
    assert [row.split()[1 + number] for number, row in enumerate(rows)] == ["X"] * count
    assert made.name in rows[3]


def test_without_a_driver_the_error_says_so(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    (tmp_path / "root").mkdir()
    config.write_text(f'[driver]\nroot = "{tmp_path / "root"}"\n')
    for command in ("top", "topology"):
        assert "OCIGPU-HOST-" in ocigpu(command, "--config", str(config), status=1)
