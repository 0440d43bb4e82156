"""Programs that stay, as processes: ours with what they log, and doubles that are asked line by line."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from support.process import stop, wait_for


@contextmanager
def held_port() -> Iterator[int]:
    """A port that nobody else is given, and that a program may listen at: both have SO_REUSEADDR, this one waits."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1]


class LoggedProgram:
    """A program's process that runs ``code`` and ends as our commands do, and what it logs: every line is an object."""

    def __init__(self, code: str, output: Path, *words: str, **variables: str) -> None:
        self.output = output
        self._begin = 0
        with output.open("ab") as log:
            self.child = subprocess.Popen(
                [sys.executable, "-c", f"{code}\nfrom ocigpu import leave\nleave(0)", *words],
                stdout=log, stderr=log, env={"PATH": os.environ["PATH"], **variables},
            )  # fmt: skip

    @property
    def log(self) -> list[str]:
        """Messages since :meth:`forget_log`."""
        text = self.output.read_text()[self._begin :]
        return [str(json.loads(line)["msg"]) for line in text[: text.rfind("\n") + 1].splitlines()]

    def forget_log(self) -> None:
        """Begin the log anew, for the next test with the same program."""
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
    def running(self) -> Iterator[Self]:
        """Afterwards its log has told of no defect."""
        try:
            yield self
        finally:
            if self.child.poll() is None:
                stop(self.child.pid)
            self.child.wait()
            text = self.output.read_text()
            print(text)  # beside a failure
        assert "OCIGPU-INT" not in text, text
        assert "Traceback" not in text, text


class AskedProgram:
    """A program of the tests that is asked line by line; its functions are methods.

    It starts while others do: the first call waits for it.
    """

    def __init__(self, program: str, *words: str | Path) -> None:
        command = [sys.executable, Path(__file__).with_name(program), *words]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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
