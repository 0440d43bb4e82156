"""A program executed with a deadline and bounded output.  Loads ``subprocess``: never in a container's start."""

import contextlib
import errno
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

REAP_SECONDS = 0.5
"""Seconds given to a killed process to end: one that is stuck in the kernel does not, and is left to init."""
MAX_OUTPUT = 64 << 20


class Finished(NamedTuple):
    """How a program ended (minus the number of a signal), and what it wrote to its two streams."""

    status: int
    output: str
    complaint: str

    @property
    def last_line(self) -> str:
        """The last line of its complaint, else of its output, else its exit status."""
        lines = [line.strip() for line in (self.complaint or self.output).splitlines() if line.strip()]
        return lines[-1] if lines else f"exit status {self.status}"


def run_program(
    command: Sequence[str],
    seconds: float,
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    words: str = "",
    limit: int = MAX_OUTPUT,
    prepare: Callable[[], None] | None = None,
) -> Finished:
    """Run a program to its end; ``words``: its standard input, ``prepare``: done in the child before it executes.

    Raises OSError when it cannot be started, EFBIG when it writes more than ``limit`` bytes, and TimeoutError when it
    takes longer than ``seconds``; then it was killed.
    """
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE if words else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        cwd=cwd,
        preexec_fn=prepare,  # noqa: PLW1509 - for callers with one thread
    )
    try:
        end = time.monotonic() + seconds
        if child.stdin:
            with contextlib.suppress(BrokenPipeError), child.stdin:
                child.stdin.write(words.encode())
        output, complaint = _read(child, end, limit)
        child.wait(max(end - time.monotonic(), 0))
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        raise TimeoutError(f"no answer within {seconds:g} s") from error
    finally:
        end_program(child)
    return Finished(child.returncode, output.decode(errors="replace"), complaint.decode(errors="replace"))


def _read(child: "subprocess.Popen[bytes]", end: float, limit: int) -> tuple[bytes, bytes]:
    """Return what a process writes to its two streams until it has closed both."""
    kept: dict[int, bytes] = {}
    with selectors.DefaultSelector() as waiting:
        for stream in (child.stdout, child.stderr):
            assert stream
            kept[stream.fileno()] = b""
            waiting.register(stream, selectors.EVENT_READ)
        while waiting.get_map():
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError
            for key, _ in waiting.select(left):
                data = os.read(key.fd, 1 << 16)
                kept[key.fd] += data
                if not data:
                    waiting.unregister(key.fileobj)
            if sum(map(len, kept.values())) > limit:
                raise OSError(errno.EFBIG, f"more than {limit} bytes of output")
    output, complaint = kept.values()
    return output, complaint


def end_program(child: "subprocess.Popen[bytes]") -> None:
    """Kill a process that has not ended, close its pipes, and wait for it, but not for one stuck in the kernel."""
    child.kill()
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream:
            stream.close()
    try:
        child.wait(REAP_SECONDS)
    except subprocess.TimeoutExpired:
        child.returncode = -9
