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

from ocigpu.cli.host.top import HEADERS, fit
from ocigpu.gpus.usage import parse_usage
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
            preexec_fn=lambda: fcntl.ioctl(child, termios.TIOCSCTTY, 0) and None,  # noqa: PLW1509
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
        screen = terminal.wait_for(f"1 container .*\n(.*\n)+1 .* 40% .* {made.name} .* 40% .* 1.5 GiB")
        assert (screen[0].startswith("SIMULATED"), screen[-1].startswith("q quit")) == (True, True)
        terminal.press(b"u")
        assert terminal.wait_for("by use\n")[2].startswith("1 ")
        terminal.press(b"c")
        assert terminal.wait_for("by container\n")[2].startswith("1 ")
        terminal.resize(30, 5)
        os.kill(terminal.process.pid, signal.SIGWINCH)
        narrow = terminal.wait_for("rows 1 to 1 of ")
        assert len(narrow) == 5
        assert max(map(len, narrow)) <= 30
        terminal.press(b"\x1b[B")
        terminal.wait_for("rows 2 to 2 of ")
        terminal.resize(120, 30)
        os.kill(terminal.process.pid, signal.SIGWINCH)
        terminal.wait_for("by container\nGPU  ")
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


def test_columns_go_before_lines_are_cut() -> None:
    row = ["0", "NVIDIA H100 80GB HBM3", "99%", "1.0/79.6 GiB", "700 W", "80 °C", "train", "docker", "50%", "1.0 GiB"]
    rows = [[*row, "python 1, python 2, python 3"]]
    wide, narrow, tiny = fit(rows, 200), fit(rows, 60), fit(rows, 24)
    assert [line.split()[0] for line in (wide[0], narrow[0], tiny[0])] == ["GPU"] * 3
    assert all(header.upper() in wide[0] for header in HEADERS)
    assert wide[1].endswith("python 3")
    assert ("MODEL" in narrow[0], "CONTAINER" in narrow[0], "MEMORY" in narrow[0]) == (False, True, True)
    assert ("train" in tiny[1], max(map(len, tiny))) == (True, 24)


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
