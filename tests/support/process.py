"""Child processes of the tests: always with a time limit, always with what they said."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

Completed = subprocess.CompletedProcess[str]


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    check: bool = True,
    env: dict[str, str] | None = None,
    timeout: float = 120,
    cwd: str | os.PathLike[str] | None = None,
) -> Completed:
    """Run a command with nothing on standard input; with ``check``, a failure shows command and output."""
    words = [os.fspath(word) for word in command]
    result = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, timeout=timeout, cwd=cwd
    )
    if check:
        assert result.returncode == 0, explain(result)
    return result


def explain(result: Completed) -> str:
    """Return the command, its status and its output, for the message of a failed test."""
    return f"$ {' '.join(result.args)}\nstatus {result.returncode}\n{result.stdout}{result.stderr}"


def wait_for(
    what: str, condition: Callable[[], object], seconds: float = 150, on_failure: Callable[[], str] = str
) -> None:
    """Poll until ``condition()`` is true; fails with ``what`` and ``on_failure()`` when the time is over.

    It waits longer than it asks: what is waited for needs the processor, too.
    """
    begun = time.monotonic()
    deadline = begun + seconds
    while not condition():
        now = time.monotonic()
        if now > deadline:
            raise AssertionError(f"waited {seconds} s for {what}\n{on_failure()}")
        time.sleep(min(max(0.02, 3 * (now - begun)), 0.5))
        begun = time.monotonic()


@contextmanager
def processor_seconds(limit: float) -> Iterator[None]:
    """Let the block fail when it computes for longer: unlike a time, that is the same on a busy machine."""

    def end(*_: object) -> None:
        raise AssertionError(f"it computes for more than {limit} s")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def stop(pid: int, seconds: float = 15) -> None:
    """End a process: SIGTERM, and SIGKILL when it has not gone in ``seconds``."""
    for number, limit in ((signal.SIGTERM, seconds), (signal.SIGKILL, seconds)):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            if not is_alive(pid):
                return
            time.sleep(0.02)
    raise AssertionError(f"process {pid} does not end")


def child_of(pid: int) -> int:
    """Return the one child that a process has, whichever of its threads has started it: proc(5), "children"."""
    (child,) = (int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split())
    return child


def own_children(word: str) -> set[int]:
    """Return the children of this process that have a word on their command line, whichever thread has started them."""
    found = set()
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in path.read_text().split():
            with suppress(OSError):  # ended since
                if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    found.add(int(pid))
    return found
