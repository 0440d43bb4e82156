"""The worker: a forked process that works in a container, and its pipes and shared memory.

It tells in lines of JSON: {"done": notes}, and after the answer {"committed": true}; or {"error": [code, message, hint,
errno], "left": [what could not be undone]}, {"unmerged": true, "left": ...} if ldconfig has to write the loader's cache
instead, or {"left": ...} alone if it had to give up.
"""

import gc
import os
import select

from ocigpu.core import rawjson
from ocigpu.core.errors import ApplyError, as_own_error
from ocigpu.provision.journal import Journal
from ocigpu.provision.operations.transaction import Supplies
from ocigpu.system import signals
from ocigpu.system.log import current_step, follow_steps, get_trace
from ocigpu.system.signals import children, reap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn, TypeAlias

    Report: TypeAlias = dict[str, Any]

COMMIT = b"c"
UNDO_SECONDS = 1.0
"""Minimum of seconds for a worker to undo its steps, and for a worker that replaces it."""


class Worker:
    """A worker that was forked to call ``work`` with a descriptor for reports and one for orders; see :func:`tell`.

    ``waits``: its container is not known yet.  The caller must call :meth:`finish`.
    """

    def __init__(
        self, work: "Callable[[int, int], None]", journal: Journal, supplies: Supplies, waits: bool = False
    ) -> None:
        self.journal, self.supplies, self.waits = journal, supplies, waits
        self._pending, self._stuck = b"", False
        self._report: "Report | None" = None
        self._up_fd, up_fd = os.pipe()
        down_fd, self._down_fd = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            children.clear()
            os.close(self._up_fd)
            os.close(self._down_fd)
            _be_worker(work, journal, up_fd, down_fd)
        children.add(self.pid)
        os.close(up_fd)
        os.close(down_fd)

    def read_report(self, caller_fd: int = -1, seconds: float = 0.0) -> "Report | None":
        """Wait for the worker's next word; None: it ended without one.

        Raises ApplyError OCIGPU-INT-2 when the process of the pidfd ``caller_fd`` has ended before that, and
        OCIGPU-INT-5 when so many seconds are over.
        """
        while b"\n" not in self._pending:
            if caller_fd >= 0 or seconds:
                self._wait(caller_fd, seconds)
            chunk = os.read(self._up_fd, 1 << 16)
            if not chunk:
                return None
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        self._report = rawjson.parse(line.decode())
        return self._report

    def _wait(self, caller_fd: int, seconds: float) -> None:
        """Wait until there is something to read; raises ApplyError when the caller has ended, or too late."""
        poll = select.poll()
        poll.register(self._up_fd, select.POLLIN)
        if caller_fd >= 0:
            poll.register(caller_fd, select.POLLIN)  # a pidfd is readable once its process has ended: pidfd_open(2)
        found = poll.poll(seconds * 1000 or None)
        if not found:
            at = self.journal.read_step()
            raise ApplyError(
                "OCIGPU-INT-5",
                f"provision: no answer of the container's file systems for {seconds:.3g} s{at and ': '}{at}",
            )
        if any(ready == caller_fd for ready, _ in found):
            raise ApplyError("OCIGPU-INT-2", "provision: the hook's process was killed")

    def say(self, data: bytes) -> None:
        """Say something to the worker; one that was killed is noticed when it does not answer."""
        try:
            while data:
                data = data[os.write(self._down_fd, data) :]
        except BrokenPipeError:
            return

    def answer(self, data: bytes, seconds: float = 0.0) -> "Report | None":
        """Say ``data``, or by nothing that we are through; return the worker's last word, None if it was killed."""
        if self._report is not None and ("left" in self._report or "committed" in self._report):
            return self._report
        if data:
            self.say(data)
        elif self._down_fd >= 0:
            os.close(self._down_fd)
            self._down_fd = -1
        report = self.read_report(-1, seconds)
        while report is not None and "done" in report:  # said before it saw our answer
            report = self.read_report(-1, seconds)
        return report

    def give_up(self, seconds: float) -> "list[str] | None":
        """Have all undone and end; return what is left, None where the worker was killed, or now is: it was stuck."""
        try:
            report = self.answer(b"", seconds)
        except ApplyError:
            os.kill(self.pid, signals.SIGKILL)
            self._stuck, report = True, None
        self.finish()
        return None if report is None else report.get("left")

    def finish(self) -> None:
        """Close the pipes and wait for the worker's end."""
        for fd in (self._up_fd, self._down_fd):
            if fd >= 0:
                os.close(fd)
        self._up_fd = self._down_fd = -1
        children.discard(self.pid)
        try:
            if self._stuck:  # not even SIGKILL ends every wait
                reap(self.pid, UNDO_SECONDS)
            else:
                os.waitpid(self.pid, 0)
        except ChildProcessError:  # SIGCHLD is ignored in this process: the kernel reaps
            return

    def dismiss(self) -> None:
        """End a worker that has received no order."""
        self.finish()
        self.supplies.close()


def _be_worker(work: "Callable[[int, int], None]", journal: Journal, up_fd: int, down_fd: int) -> "NoReturn":
    """Be the worker: never return into the parent's code, never show a traceback."""
    status = 1
    try:
        for number in (signals.SIGINT, signals.SIGTERM, signals.SIGPIPE):
            signals.signal(number, signals.SIG_IGN)  # the parent gets them too: when it ends, we undo and end
        signals.signal(signals.SIGCHLD, signals.SIG_DFL)  # ldconfig's end is waited for
        gc.disable()
        os.umask(0)
        follow_steps(lambda: journal.write_step(current_step()))
        if trace := get_trace():
            trace.become("worker")
        work(up_fd, down_fd)
        status = 0
    except BaseException as error:  # noqa: BLE001 - whatever it is, it must not leave this function
        try:
            tell(up_fd, {"error": describe(error), "left": []})
        except OSError:  # nobody listens
            status = 2
    finally:
        os._exit(status)


def tell(fd: int, report: "Report") -> None:
    """Write a report to the parent; raises OSError when it has ended."""
    left = memoryview(rawjson.dump(report).encode() + b"\n")
    while left:
        left = left[os.write(fd, left) :]


def describe(error: BaseException) -> "list[Any]":
    """Return code, message, hint and errno of an error, as a report has them."""
    own = as_own_error(error)
    message = own.message if own is error else f"provision: {own.message}"
    return [own.code, message, own.hint, getattr(error, "errno", 0) or 0]
