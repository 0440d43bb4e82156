"""Signals without the standard ``signal``, which loads ``enum`` (3.5 ms of a start); and a start's deadline.

All our work in a container's start has one deadline: an action that never ends causes an error line that names it.  A
file system may never answer: a network or a user-space one, the host's or the image's.  The waiting thread cannot check
a clock, so another one does:

* Shim, hook and the vendor's CLI have a thread that only waits; at the deadline it reports, and ends the process.
* A kernel timer kills a process without a waiting parent, also a stopped one.
* A worker's parent watches it (:mod:`ocigpu.provision.apply`).

A wait that not even SIGKILL ends (FUSE whose program has read the request) keeps the process; the line appears then,
too.
"""

# ruff: noqa: F403, F405 - the names are in __all__

import _thread
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from signal import *
else:
    from _signal import *

__all__ = [
    "GRACE", "ITIMER_REAL", "SECONDS", "SIGALRM", "SIGCHLD", "SIGHUP", "SIGINT", "SIGKILL", "SIGPIPE", "SIGTERM",
    "SIGXFSZ", "SIG_DFL", "SIG_IGN", "SIG_SETMASK", "Deadline", "begin_deadline", "children", "end_deadline",
    "ended_by_signals", "kill_in", "pthread_sigmask", "reap", "seconds_left", "setitimer", "signal", "touched",
]  # fmt: skip

SECONDS = 30.0
"""For a whole start: NVML has 10 of them, and another start that reads the same facts 5."""
GRACE = 5.0
"""Seconds more for undoing what was begun."""


class Deadline:
    """A thread that calls ``report`` and ends the process with status 1 when time is over."""

    def __init__(self, report: "Callable[[], object]", seconds: float = SECONDS) -> None:
        self.end = time.monotonic() + seconds
        self._report, self._lock, self._pid = report, _thread.allocate_lock(), os.getpid()
        self._lock.acquire()
        try:
            _thread.start_new_thread(self._watch, ())
        except RuntimeError:  # no more processes: what waits for ever then is not noticed
            return

    def stop(self) -> None:
        """Forget it: this process is about to become another, or to end."""
        if self._lock.locked() and os.getpid() == self._pid:
            self._lock.release()

    def left(self) -> float:
        """Return how many seconds are left, at least a little; from now on there are GRACE more for undoing."""
        left = max(self.end - time.monotonic(), 0.1)
        self.end = time.monotonic() + left + GRACE
        return left

    def _watch(self) -> None:
        while (left := self.end - time.monotonic()) > 0:
            if self._lock.acquire(timeout=left):
                return
        try:
            for pid in tuple(children):
                os.kill(pid, SIGKILL)
            self._report()
        finally:
            os._exit(1)


touched = [""]
"""The path that was last looked at, for a message."""
children: set[int] = set()
"""Processes that end when this one's time is over."""
_deadline: Deadline | None = None
_timer = -1


def begin_deadline(report: "Callable[[], object]") -> None:
    """Let this process end with a report unless :func:`end_deadline` is called in time."""
    global _deadline  # noqa: PLW0603 - a process has one
    end_deadline()
    _deadline = Deadline(report)


def end_deadline() -> None:
    """Take the deadline of this process back, if it has one."""
    global _deadline  # noqa: PLW0603 - as above
    if _deadline is not None:
        _deadline.stop()
        _deadline = None


def seconds_left() -> float:
    """Return how long a worker may take: until the deadline of this process, SECONDS where it has none."""
    return _deadline.left() if _deadline is not None else SECONDS


class ended_by_signals:  # noqa: N801 - reads as a statement
    """In the block SIGTERM and SIGHUP raise SystemExit, as SIGINT does KeyboardInterrupt: started work is undone."""

    def __enter__(self) -> None:
        self._old = [(number, signal(number, _end)) for number in (SIGTERM, SIGHUP)]
        for number, old in self._old:
            if old == SIG_IGN:  # the parent chose to ignore it
                signal(number, old)

    def __exit__(self, *_: object) -> None:
        for number, old in self._old:
            signal(number, old)


def _end(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def kill_in(seconds: float) -> None:
    """Have the kernel kill this process then, whatever it does, even if it is stopped: timer_create(2).

    A child does not inherit it, and another program that is executed does not have it.  Does nothing where that is
    not possible; a second call sets another time.
    """
    global _timer  # noqa: PLW0603 - a process has one
    from ocigpu.system import libc

    try:
        if _timer < 0:
            _timer = libc.create_timer(SIGKILL)
        libc.set_timer(_timer, seconds)
    except OSError:  # a filter of system calls, or no more timers
        return


def reap(pid: int, seconds: float) -> int | None:
    """Return the exit status of a child that ends within the time, else None."""
    end = time.monotonic() + seconds
    while True:
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # SIGCHLD is ignored in the caller: the kernel reaps
            return 0
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            return None
        time.sleep(0.0005)
