"""The early hook: a process that is ready for a container before the container's hook is called.

A hook that starts Python spends most of its time on that.  The shim, before it becomes the low-level runtime, forks a
child instead, which reads and takes what it needs of the host while the runtime makes the container's namespaces.  The
hook in config.json is told where the child waits (``--early DIR``).  Its stub (packaging/ocigpu-hook.sh) writes its
process id to the FIFO DIR/request and reads from DIR/answer::

    begin PID DIR  the child has taken the request; before that, the stub may still do everything itself
    exit PID N     all is done; N is the status to exit with

If the child is gone the stub reads the end of file: before "begin" it starts Python as ever; after it it fails, and the
worker, whose parent the child was, has undone everything.  The child gets the container's state and the place for
messages from the stub, by descriptor; when the stub ends too soon, everything is undone.

A child that is stopped (SIGSTOP) is killed by its own timer, unless it was stopped before it set that.  The shim writes
its process id to DIR/child: the stub kills a child that it finds stopped; if no hook comes, the next start does.

Only for root of the machine, in a directory that only root can enter.
"""

import errno
import gc
import os
import sys
import time

from ocigpu.core.config_json import HOOK_ENVIRONMENT, rootfs_path
from ocigpu.core.errors import OcigpuError
from ocigpu.core.record import NamedTuple
from ocigpu.system import signals
from ocigpu.system.log import get_trace, mark, step, trace_problem
from ocigpu.system.signals import GRACE, SECONDS, kill_in
from ocigpu.system.store import SYSTEM_DIRECTORY, open_cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from ocigpu.core.config_json import Document
    from ocigpu.core.facts import HostFacts
    from ocigpu.core.settings import Settings
    from ocigpu.gpus.request import Request
    from ocigpu.hook import Ready
    from ocigpu.provision.apply import Caller

PREFIX = "early-"
FILES = ("request", "answer")
CHILD = "child"
MAX_AGE = 10.0
"""Seconds for which the preparation is valid; for a later hook it is repeated.

Only the runtime runs in between.  It takes seconds only on a busy machine, where doing the work twice would not
help."""
STUB_INPUT = 5
"""What the hook's stub has its standard input as, which is another thing while it reads the answer."""
_NAMESPACES = ("mnt", "pid", "user")


class Task(NamedTuple):
    """The container to prepare for, and the directory where its hook will come: of :func:`choose_path`.

    ``document``: its configuration, ``written``: by which the file is known that has it.
    ``bundle``: its directory, absolute; ``spec``: absolute path of its configuration, "" for the bundle's config.json.
    ``facts``: of the host, if they were read just now: those of a driver that hangs are not in the cache.
    """

    path: str
    settings: "Settings"
    request: "Request"
    document: "Document"
    written: tuple[int, ...]
    bundle: str
    spec: str
    facts: "HostFacts | None" = None


class _Meeting(NamedTuple):
    """The open meeting place of the hook's stub and the child: a directory of the cache, and the ends of its FIFOs."""

    path: str
    directory_fd: int
    request_fd: int
    answer_fd: int

    def remove(self) -> None:
        _remove(self.directory_fd, os.path.basename(self.path))


def choose_path() -> str:
    """Return a path for :class:`Task`, "" where file names are not in UTF-8, which the hook takes them to be."""
    name = f"{PREFIX}{os.getpid()}-{os.urandom(8).hex()}"
    return f"{SYSTEM_DIRECTORY}/{name}" if sys.getfilesystemencoding() == "utf-8" else ""


def wait_for_hook(task: Task) -> None:
    """Fork the child that does the hook's work; returns in the parent, which is about to become the runtime.

    For root of the initial user namespace.  If it fails, nothing is changed: the hook finds no process at the path, and
    does everything itself.
    """
    meeting = _open_meeting(task.path)
    if meeting is None:
        return
    parent, begin = os.getpid(), time.monotonic()
    try:
        child = os.fork()
    except OSError:  # no more processes: the hook will try again itself
        meeting.remove()
        return
    if child == 0:
        _be_child(task, meeting, parent, begin)
    try:
        path = f"{os.path.basename(task.path)}/{CHILD}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=meeting.directory_fd)
        os.write(fd, f"{child}\n".encode())
        os.close(fd)
    except OSError:  # it has ended already; or the disk is full
        return


def _open_meeting(path: str) -> _Meeting | None:
    """Make the directory and its FIFOs; returns None without a trusted /run/ocigpu.

    Both FIFOs are open for reading and writing, so that opening them never waits, and close when this process executes
    another program.
    """
    directory_fd, name = open_cache(create=True), os.path.basename(path)
    if directory_fd < 0:
        return None
    opened = []
    try:
        os.mkdir(name, 0o700, dir_fd=directory_fd)
        for file in FILES:
            os.mkfifo(f"{name}/{file}", 0o600, dir_fd=directory_fd)
            opened.append(os.open(f"{name}/{file}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd))
        if directory_fd <= 2 or min(opened) <= 2:
            raise OSError(errno.EBADF, "a standard stream is closed")
    except OSError:
        _remove(directory_fd, name)
        for fd in (directory_fd, *opened):
            os.close(fd)
        return None
    return _Meeting(path, directory_fd, opened[0], opened[1])


def _be_child(task: Task, meeting: _Meeting, parent: int, begin: float) -> "NoReturn":
    """Prepare, wait, work; never return into the shim's code, never show a traceback."""
    status = 1
    try:
        if trace := get_trace():
            trace.become("early")
        mark("begin", task.path)
        _detach(meeting, parent)
        kill_in(SECONDS)  # stopped, or at a file system that hangs: the hook then does everything itself
        with step("prepare", task.bundle):
            ready = _prepare(task)
        with step("wait-for-hook", task.path):
            stub = _receive(meeting)
        if stub is not None:
            # from here on there is a worker to undo everything, and nothing of ours to remove
            signals.signal(signals.SIGTERM, signals.SIG_DFL)
            _end_with(parent, signals.SIGKILL)
            kill_in(SECONDS + 2 * GRACE)
            if ready and time.monotonic() - begin > MAX_AGE:
                ready.worker.dismiss()
                ready = None
            status = _work(task, meeting, stub, ready)
            os.write(meeting.answer_fd, f"exit {stub.pid} {status}\n".encode())
    except BaseException:  # noqa: BLE001 - nobody to tell but the stub, which sees the end of its FIFO
        status = 1
    finally:
        meeting.remove()
        os._exit(status)


def _detach(meeting: _Meeting, parent: int) -> None:
    """Close everything that the runtime has open, and end together with it, by SystemExit."""
    for number in (signals.SIGINT, signals.SIGHUP):
        signals.signal(number, signals.SIG_IGN)  # signals of the terminal: if they end the stub, this process notices
    signals.signal(signals.SIGTERM, _end)
    trace = get_trace()
    kept = {0, 1, 2, *meeting[1:], *((trace.fd,) if trace else ())}
    empty = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for target in (0, 1, 2):
        os.dup2(empty, target)
    # engines wait for the end of their pipes; the descriptor of this listing is among the names, and closed already
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in kept:
            try:
                os.close(fd)
            except OSError as error:
                if error.errno != errno.EBADF:
                    raise
    os.chdir("/")
    _end_with(parent, signals.SIGTERM)


def _end(*_: object) -> None:
    raise SystemExit(1)


def _end_with(parent: int, number: int) -> None:
    """Have the kernel send a signal when the parent ends, whatever it executes meanwhile: prctl(2)."""
    from ocigpu.system import libc

    libc.prctl(libc.PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        _end()


def _prepare(task: Task) -> "Ready | None":
    """Make the plan and open what it needs of the host; returns None on any error, which the hook will report."""
    gc.disable()
    os.environ.clear()
    for entry in HOOK_ENVIRONMENT:
        name, _, value = entry.partition("=")
        os.environ[name] = value
    from ocigpu.gpus.cached import KEPT, read_proved
    from ocigpu.hook import Ready, find_plan
    from ocigpu.provision.apply import start_worker

    try:
        rootfs = rootfs_path(task.document.config, task.bundle)
        facts = task.facts or (read_proved(task.settings) if task.request.vendors == KEPT else None)
        facts, image, plan = find_plan(task.request, task.settings, rootfs, task.document.config, facts)
        with step("start-worker", "", "what it needs of the host is taken"):
            worker = start_worker(plan, task.settings)
        return Ready(task.request, task.document, task.written, facts, image, plan, worker)
    except (OcigpuError, OSError):
        return None


def _receive(meeting: _Meeting) -> "Caller | None":
    """Wait for the hook's request; returns None if the hook must do everything itself.

    Its standard streams become ours.
    """
    import select

    from ocigpu.provision.apply import Caller
    from ocigpu.system import libc

    _remove_old(meeting.directory_fd)
    request = select.poll()
    request.register(meeting.request_fd, select.POLLIN)
    try:
        while not request.poll(1000):  # the signal of _end_with, come just before a call, would not end that call
            pass
        pid = int(os.read(meeting.request_fd, 64))
        pidfd = os.pidfd_open(pid)
        if not _is_stub(pid, meeting.path):
            return None
        for number, target in ((STUB_INPUT, 0), (2, 2)):
            try:
                os.dup2(libc.pidfd_getfd(pidfd, number), target)
            except OSError as error:
                if error.errno != errno.EBADF:
                    raise
        return Caller(pid, pidfd)
    except (OSError, ValueError, AttributeError):  # kernels before 5.6, filters of system calls, a stub that is gone
        return None
    finally:
        meeting.remove()  # a hook that comes now is too late


def _is_stub(pid: int, path: str) -> bool:
    """Tell whether a process is a hook's stub sent here, in our mount and PID namespaces."""
    process = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in _NAMESPACES:
            if not os.path.samestat(os.stat(f"ns/{name}", dir_fd=process), os.stat(f"/proc/self/ns/{name}")):
                return False
        if not os.path.samestat(os.stat("root", dir_fd=process), os.stat("/")):
            return False
        with open(os.open("cmdline", os.O_RDONLY | os.O_CLOEXEC, dir_fd=process), "rb") as file:
            return os.fsencode(path) in file.read().split(b"\0")
    finally:
        os.close(process)


def _work(task: Task, meeting: _Meeting, stub: "Caller", ready: "Ready | None") -> int:
    """Do what the hook does; returns its exit status."""
    from ocigpu.entry.state import read_state
    from ocigpu.hook import open_log, run_prestart, show_failure, show_notes

    where = task.bundle if task.bundle.isprintable() else ""
    os.write(meeting.answer_fd, f"begin {stub.pid} {where}\n".encode("utf-8", "replace"))
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115 - as long as we run
    log, status = open_log(task.settings), 0
    try:
        notes = run_prestart(read_state(), task.settings, task.spec, task.bundle, ready, stub)
        mark("end")
        show_notes(tuple(filter(None, (trace_problem(), *notes))), log)
    except Exception as error:  # noqa: BLE001 - as in the hook itself: it must be one line
        status = show_failure(error, log)
    sys.stderr.flush()
    return status


def _remove_old(directory_fd: int) -> None:
    """Remove the directories of processes that were killed before they could do so; end a child that is stopped."""
    for name in os.listdir(directory_fd):
        pid = name.removeprefix(PREFIX).partition("-")[0]
        if name.startswith(PREFIX) and not os.path.exists(f"/proc/{pid}"):
            _kill_stopped(directory_fd, name)
            _remove(directory_fd, name)


def _kill_stopped(directory_fd: int, name: str) -> None:
    """Kill the child that waits in a directory if it is stopped: its parent has gone, and no request will come."""
    from ocigpu.system.proc import read_proc

    try:
        child = int(read_proc(f"{name}/{CHILD}", directory_fd))
        if child > 1 and _is_stopped(child):
            os.kill(child, signals.SIGKILL)
    except (OSError, ValueError):  # it has ended
        return


def _is_stopped(pid: int) -> bool:
    from ocigpu.system.proc import read_proc, read_stat

    return read_stat(f"/proc/{pid}/stat").state == "T" and "ocigpu" in read_proc(f"/proc/{pid}/cmdline")


def _remove(directory_fd: int, name: str) -> None:
    for file in (*FILES, CHILD):
        try:
            os.unlink(f"{name}/{file}", dir_fd=directory_fd)
        except OSError:  # not made, or gone already
            continue
    try:
        os.rmdir(name, dir_fd=directory_fd)
    except OSError:  # another process was faster, or the directory is not empty
        return
