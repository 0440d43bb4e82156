"""``main`` of one of our modules in a process of its own, which takes and gives lines on a pipe each way.

What may hang, crash or fork does so there, and only there.  The process is started without a fork, which is safe beside
gRPC's threads.  Only :meth:`ModuleProcess.wait` and :meth:`ModuleProcess.close` wait for it, and
:meth:`ModuleProcess.send` while its pipe is full.
"""

import contextlib
import json
import os
import select
import subprocess
import sys

from ocigpu.system.programs import REAP_SECONDS, end_program

_CODE = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " importlib.import_module(sys.argv[2]).main(*sys.argv[3:])"
)


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that calls ``main(*arguments)`` of a module, found where this process finds modules."""
    return [sys.executable, "-I", "-c", _CODE, json.dumps(list(filter(None, sys.path))), module, *arguments]


class ModuleProcess:
    """One process at a time.  ``alone``: it has no environment, works in / and its errors are not shown."""

    def __init__(self, alone: bool = False) -> None:
        self._alone = alone
        self.child: subprocess.Popen[bytes] | None = None
        self.unfinished = b""
        """The beginning of a line."""
        self._grace = 0.0
        self._stuck = 0
        """The number of one that was killed and did not end."""

    def start(self, module: str, *arguments: str) -> None:
        """Call ``main(*arguments)`` of a module; raises OSError.  A main that reads its input ends with us."""
        self.child = subprocess.Popen(
            command(module, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if self._alone else None,
            env={} if self._alone else None,
            cwd="/" if self._alone else None,
            process_group=0,
            bufsize=0,
        )
        self.unfinished, self._grace = b"", 0.0
        os.set_blocking(self.fileno(), False)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable with a line or the process's end; -1 without a process."""
        return self.child.stdout.fileno() if self.child and self.child.stdout else -1

    def send(self, line: bytes) -> None:
        """Write a line to its standard input; :meth:`read` detects a process that has ended."""
        assert self.child
        assert self.child.stdin
        rest = memoryview(line + b"\n")
        with contextlib.suppress(BrokenPipeError):
            while rest:
                rest = rest[self.child.stdin.write(rest) :]

    def read(self) -> tuple[list[bytes], bool]:
        """Return the lines that have come, and whether there will be no more."""
        try:
            data = os.read(self.fileno(), 1 << 20)
        except BlockingIOError:
            return [], False
        *lines, self.unfinished = (self.unfinished + data).split(b"\n")
        self._grace = 0.0 if data else REAP_SECONDS  # it is about to end, with a status of its own
        return lines, not data

    def wait(self, seconds: float) -> tuple[list[bytes], bool]:
        """Wait so long for something to read, see :meth:`read`."""
        return self.read() if select.select([self], [], [], seconds)[0] else ([], False)

    def is_running(self) -> bool:
        """Return whether the process has not ended."""
        return self.child is not None and self.child.poll() is None

    def is_stuck(self) -> bool:
        """Return whether a process that was killed has not ended yet: it may hold the driver's locks."""
        try:
            if self._stuck and os.waitpid(self._stuck, os.WNOHANG)[0]:
                self._stuck = 0
        except ChildProcessError:
            self._stuck = 0
        return self._stuck != 0

    def close(self, seconds: float = 0.0) -> int | None:
        """End the process, and return its status, None for none.  One stuck in the kernel is left to init, with None.

        ``seconds`` after the end of its input it is killed.
        """
        child, self.child, self.unfinished = self.child, None, b""
        if child is None:
            return None
        if child.stdin:
            child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(seconds or self._grace)
        if end_program(child):
            return child.returncode
        self._stuck = child.pid
        return None
