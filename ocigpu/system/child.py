"""A forked child with a pipe and a deadline: what may hang, crash or be misled does so there, and only there.

For processes with one thread.  Programs are executed by :mod:`ocigpu.system.programs`.
"""

import fcntl
import os
import select
import sys
import time

from ocigpu.system import signals
from ocigpu.system.signals import reap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

REAP_SECONDS = 0.5
"""Seconds given to a child to end: one stuck in the kernel does not even when killed, and is left to init."""
OVERFLOW_ID = 65534
_ENDING = (signals.SIGINT, signals.SIGTERM, signals.SIGHUP, signals.SIGPIPE, signals.SIGALRM)


class Child:
    """A forked child at work; :meth:`collect` waits for its answer, :meth:`close` gives up on it."""

    def __init__(self, work: "Callable[[int], bytes]", seconds: float) -> None:
        """Start ``work`` in a child and return at once: its argument is the pipe, its result the answer."""
        self.seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._pipe, writer = os.pipe2(os.O_CLOEXEC)
        self.pid = os.fork()
        if self.pid == 0:
            be_child(work, writer)
        os.close(writer)

    def renew(self) -> None:
        """Count the seconds from now: others have been waited for meanwhile."""
        self._deadline = time.monotonic() + self.seconds

    def collect(self, limit: int) -> tuple[bytes, int]:
        """Return the whole answer and the child's exit status, minus the number of a signal that ended it.

        Raises TimeoutError if the answer is incomplete at the deadline, and OverflowError for one of more than
        ``limit`` bytes.
        """
        parts: list[bytes] = []
        size = 0
        try:
            while size <= limit:
                left = self._deadline - time.monotonic()
                if not _is_readable(self._pipe, max(left, 0.0)):
                    raise TimeoutError(f"no answer within {self.seconds:g} s")
                part = os.read(self._pipe, 1 << 20)
                if not part:
                    return b"".join(parts), self._finish(REAP_SECONDS)  # at the end of its answer it is ending
                parts.append(part)
                size += len(part)
            raise OverflowError(f"an answer of more than {limit} bytes")
        finally:
            self.close()

    def close(self) -> None:
        """End the child now, if it still runs; does nothing after :meth:`collect`."""
        self._finish(0)

    def _finish(self, seconds: float) -> int:
        """Let the child end within the time, then end it; returns its exit status, 0 when we ended it."""
        if self.pid <= 0:
            return 0
        os.close(self._pipe)
        pid, self.pid = self.pid, 0
        status = reap(pid, seconds)
        if status is None:
            os.kill(pid, signals.SIGKILL)
            reap(pid, REAP_SECONDS)
            return 0
        return status


def _is_readable(fd: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(int(seconds * 1000) + 1))


def be_child(work: "Callable[[int], bytes]", pipe: int) -> None:
    """Write the result of ``work`` to the pipe, as long as it is open; never returns."""
    status = 1
    try:
        pipe = fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, 3)  # it may have been one of the standard three
        data = memoryview(work(pipe))
        while data:
            data = data[os.write(pipe, data) :]
        status = 0
    finally:
        os._exit(status)


def execute_main(module: str, pipe: int, *words: object) -> str:
    """Continue, in a child of a snapshot (:func:`ocigpu.is_snapshot`), as a module's main in the ordinary interpreter.

    ``words``: its arguments, as texts, behind the pipe's number; a descriptor among them must be inheritable.
    Returns only where the interpreter cannot be executed: which, and why.
    """
    os.set_inheritable(pipe, True)
    code = f"import sys; sys.path += sys.argv[1:3]; from {module} import main; main(*sys.argv[3:])"
    command = [sys.executable, "-I", "-S", "-c", code, *sys.path, str(pipe), *map(str, words)]
    try:
        os.execve(sys.executable, command, {})  # noqa: S606 - this interpreter again
    except OSError as error:
        return f"{sys.executable}: {error.strerror}"


def isolate(pipe: int) -> None:
    """Drop the parent's state: its environment, descriptors other than the pipe, signal handlers, core dumps."""
    import resource

    os.environ.clear()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(3, pipe)
    os.closerange(pipe + 1, 1 << 20)
    for number in _ENDING:
        signals.signal(number, signals.SIG_DFL)


def drop_rights(user: int, group: int) -> None:
    """Give up root for these ids, all capabilities, and the right to gain any.

    In a user namespace that maps only the caller (EPERM or EINVAL) the ids stay: it has no more than the user outside.
    """
    from ocigpu.system import libc

    if os.geteuid() == 0:
        steps: tuple[Callable[[], None], ...] = (
            lambda: os.setgroups([group]),
            lambda: os.setresgid(group, group, group),
            lambda: os.setresuid(user, user, user),
        )
        for step in steps:
            try:
                step()
            except OSError:
                continue
    libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
    libc.prctl(libc.PR_SET_DUMPABLE, 0)  # else any process with these ids that sees it could trace it
    libc.capset(libc.Capabilities(0, 0, 0))


def end_with(parent: int) -> None:
    """Be killed when the process ``parent`` ends; after a change of ids, which clears the setting (prctl(2))."""
    from ocigpu.system import libc

    libc.prctl(libc.PR_SET_PDEATHSIG, signals.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
