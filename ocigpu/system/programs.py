"""A program executed with a deadline and bounded output.  Loads ``subprocess``: never in a container's start."""

import contextlib
import errno
import os
import resource
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    group: bool = False,
) -> Finished:
    """Run a program to its end; ``words``: its standard input, ``prepare``: done in the child before it executes.

    ``group``: it is the first of a process group, which is killed with it.
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
        process_group=0 if group else None,
    )
    try:
        end = time.monotonic() + seconds
        if child.stdin:
            with contextlib.suppress(BrokenPipeError), child.stdin:
                child.stdin.write(words.encode())
        output, complaint = _read(child, end, limit)
        child.wait(max(end - time.monotonic(), 0))
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        if group:
            os.killpg(child.pid, signal.SIGKILL)
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


def end_program(child: "subprocess.Popen[bytes]") -> bool:
    """Kill a process that has not ended, and close its pipes; returns False if it is stuck in the kernel."""
    child.kill()
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream:
            stream.close()
    try:
        child.wait(REAP_SECONDS)
    except subprocess.TimeoutExpired:
        child.returncode = -9
        return False
    return True


_KEPT = {signal.SIGKILL, signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT}
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGSYS}
_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
_FROM_KERNEL = 0x80
"""si_code of what a terminal's driver sends, to all processes in front: sigaction(2), SI_KERNEL."""
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


@contextlib.contextmanager
def held_signals() -> Iterator[set[int]]:
    """Hold back signals that would end this process, for :func:`run_in_front`; yield the former mask.

    SIGALRM passes, because the caller may use a timer meanwhile.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _KEPT - _FAULTS - {signal.SIGALRM})
    try:
        yield {int(number) for number in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_in_front(path: str, command: Sequence[str], env: Mapping[str, str], mask: set[int]) -> int:
    """Run a program in the foreground and return how it ended: its exit status, or minus the number of a signal.

    It has our streams, terminal and process group.  This process passes its signals on to the program, which gets those
    of a terminal by itself.  Call it with :func:`held_signals`, whose ``mask`` the program starts with.  Orphans are
    reaped as well, because this may be a container's first process.  A signal that arrived before the program was
    started counts as its end.  Raises OSError.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the parent may ignore SIGCHLD: then no end would be reported
    if early := signal.sigpending() & _ENDING:
        return -int(min(early))
    child = os.posix_spawn(path, list(command), env, setsigmask=mask, setsigdef=_IGNORED_BY_PYTHON)
    waited = signal.valid_signals() - _KEPT - _FAULTS
    signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    while True:
        while True:
            try:
                ended, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:  # not before ours has ended
                return 1
            if ended == child:
                return os.waitstatus_to_exitcode(status)
            if not ended:
                break
        got = signal.sigwaitinfo(waited)
        if got.si_signo != signal.SIGCHLD and got.si_code != _FROM_KERNEL:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, got.si_signo)


def end_like(status: int) -> int:
    """Return an exit status, or end this process by the signal that ``status`` is minus the number of."""
    if status >= 0:
        return status
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # one core is enough
    with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler to be set
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
    return 128 - status  # a container's first process is not ended by its own signals
