"""The device plugin and a kubelet as processes: both have threads of gRPC, and the test process forks."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.process import stop, wait_for

GPU = "nvidia.com/gpu"
_QUICK = """
import os, sys
from ocigpu.kubernetes.health import Rules
from ocigpu.kubernetes.config import parse_flags
from ocigpu.kubernetes.plugin import DevicePlugin, Timing
from ocigpu.system.settings_file import read_settings
timing = Timing(0.1, 0.3, Rules(probes=2, hold=0.3, patience=0.0))
DevicePlugin(parse_flags(sys.argv[2:], os.environ), read_settings(sys.argv[1]), True, timing).run()
"""
"""The command with less patience."""


class Kubelet:
    """A kubelet's process; its methods are those of :class:`support.kubelet.Kubelet`.

    It starts while its plugin does: the first call waits for it.
    """

    def __init__(self, directory: Path) -> None:
        program = Path(__file__).parent.parent / "support/kubelet.py"
        self.directory = directory
        self.child = subprocess.Popen(
            [sys.executable, program, directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._ready = False

    def wait_until_ready(self) -> None:
        """Wait until it listens."""
        if not self._ready:
            assert self._line() == "ready\n"
            self._ready = True

    def _line(self) -> str:
        assert self.child.stdout
        return self.child.stdout.readline()

    def answer(self, name: str, *arguments: Any) -> dict[str, Any]:
        """Return {"result": ...} or {"error": ...}."""
        self.wait_until_ready()
        assert self.child.stdin
        self.child.stdin.write(json.dumps([name, *arguments]) + "\n")
        self.child.stdin.flush()
        answer: dict[str, Any] = json.loads(self._line())
        return answer

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            answer = self.answer(name, *arguments)
            assert "error" not in answer, answer["error"]
            return answer["result"]

        return call

    def expect(self, **counts: tuple[int, int]) -> None:
        """Wait for [capacity, allocatable] of resources by the last part of their names, "_" for "-" and "."."""
        names = {name: f"nvidia.com/{name}" for name in counts} | {"mig_3g": MIG_3G, "mig_1g": MIG_1G}
        wanted = {names[name]: list(pair) for name, pair in counts.items()}
        found = self.wait_for(wanted, 120)
        assert {name: found.get(name, [0, 0]) for name in wanted} == wanted

    def kill(self) -> None:
        """End it without a word to anybody."""
        self.child.kill()
        self.child.communicate()

    def close(self) -> None:
        assert self.child.stdin
        assert self.child.stdout
        self.wait_until_ready()
        self.child.stdin.close()
        self.child.stdout.close()
        assert self.child.wait(60) == 0


MIG_3G, MIG_1G = "nvidia.com/mig-3g.20gb", "nvidia.com/mig-1g.5gb"


class Plugin:
    """A device plugin's process and what it logs."""

    def __init__(self, settings: Path, directory: Path, *words: str, **variables: str) -> None:
        self.directory = directory
        self.output = directory.with_name(f"{directory.name}.log")
        self._begin = 0
        command = [sys.executable, "-c", _QUICK, str(settings), f"--kubelet-socket={directory}/kubelet.sock", *words]
        environment = {"PATH": os.environ["PATH"], **variables}
        with self.output.open("ab") as output:
            self.child = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    @property
    def sockets(self) -> list[str]:
        """The names of its sockets, sorted."""
        if not self.directory.exists():
            return []
        return sorted(path.name for path in self.directory.iterdir() if path.name.startswith("nvidia-"))

    @property
    def log(self) -> list[str]:
        """Messages since :meth:`forget_log`: every line is an object."""
        text = self.output.read_text()[self._begin :]
        return [str(json.loads(line)["msg"]) for line in text[: text.rfind("\n") + 1].splitlines()]

    def forget_log(self) -> None:
        """Begin the log anew, for the next test with the same plugin."""
        self._begin = self.output.read_text().rfind("\n") + 1

    def wait_for_log(self, part: str, times: int = 1) -> None:
        wait_for(f"{part!r}", lambda: sum(part in line for line in self.log) >= times, on_failure=self.output.read_text)

    def send(self, number: int) -> None:
        self.child.send_signal(number)

    def end(self, number: int = signal.SIGTERM) -> int:
        """End it by a signal and return its exit status."""
        self.child.send_signal(number)
        return self.child.wait(60)


@contextmanager
def plugin(settings: Path, directory: Path, *words: str, **variables: str) -> Iterator[Plugin]:
    """Run a plugin; afterwards its log has told of no defect."""
    running = Plugin(settings, directory, *words, **variables)
    try:
        yield running
    finally:
        if running.child.poll() is None:
            stop(running.child.pid)
        running.child.wait()
        text = running.output.read_text()
        print(text)  # beside a failure
    assert "OCIGPU-INT" not in text, text
    assert "Traceback" not in text, text


@contextmanager
def kubelet(directory: Path) -> Iterator[Kubelet]:
    running = Kubelet(directory)
    try:
        yield running
    finally:
        running.close()
