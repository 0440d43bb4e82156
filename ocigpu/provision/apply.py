"""Carry out a plan in a container: everything or nothing.

Two processes.  The parent stays in the host's namespaces; the worker it forks joins the container's and does one
action after the other, noting each effect in shared memory before it happens.  Meanwhile the parent changes the device
cgroup; when the worker is done the parent answers; only then is it all final.

* A step fails: the worker undoes everything and reports why.
* The worker is killed: the parent forks another one, which undoes what the first had noted.
* The parent is killed: the worker sees its pipe end, and undoes everything.

A hook of the createContainer stage is in the container's namespaces already (:func:`provision_here`): there the two
differ in nothing but their task.  What ends both leaves files in a root directory whose container does not start, and
which are not in the way of a second try; the mounts are gone with the namespace.  (crun ends all processes of a
container as soon as its hook was killed; runc waits for the worker, which holds the hook's output.)
"""

import gc
import os
import select
import sys

from ocigpu.core import rawjson
from ocigpu.core.actions import AllowDevice, Bind, JoinGroup, Node, RefreshLdCache, TextFile
from ocigpu.core.errors import ApplyError, OcigpuError, as_own_error
from ocigpu.provision import steps
from ocigpu.provision.cgroups import apply_device_rules
from ocigpu.provision.container import LiveContainer, join, open_container, open_here, open_root, use_owner_ids
from ocigpu.provision.files import make_root_writable
from ocigpu.provision.journal import Journal, new_memory, read_journal, read_step, undo, write_step
from ocigpu.provision.mounts import Mounts, Source, enter_own_proc, read_host_devices, take_source
from ocigpu.provision.workplace import Workplace
from ocigpu.system import libc, signals
from ocigpu.system.log import current_step, follow_steps, get_trace, mark, step
from ocigpu.system.namespaces import in_initial_user_namespace
from ocigpu.system.signals import children, reap, seconds_left

TYPE_CHECKING = False
if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable
    from typing import Any, NamedTuple, NoReturn, TypeAlias

    from ocigpu.core.actions import Plan
    from ocigpu.core.settings import Settings

    Sources: TypeAlias = dict[tuple[str, str, tuple[str, ...]], Source]
else:
    from ocigpu.core.record import NamedTuple

_COMMIT = b"c"
_UNDO_SECONDS = 1.0
"""For a worker to undo what it had begun when there was no answer in time; as long for the one in its place."""
_FORCE_MOUNT2 = False
"""Use mount(2) even where the newer calls work: for tests of old kernels' way."""


class Supplies(NamedTuple):
    """What a worker needs of the host: what is mounted, a copy of ldconfig, a place for backups (-1: not needed)."""

    mounts: Mounts
    sources: "Sources"
    ldconfig_fd: int
    backup_fd: int

    def close(self) -> None:
        """Close all descriptors."""
        for fd in (*(source.tree_fd for source in self.sources.values()), self.ldconfig_fd, self.backup_fd):
            if fd >= 0:
                os.close(fd)


class Caller(NamedTuple):
    """The process that a runtime has started as its hook, when it is not this one: its id, and a pidfd of it.

    When it ends before all is done, nobody waits for the outcome any more, and everything is undone.
    ``seconds``: how long that may take, 0 for the time that a start has; file systems may never answer.
    """

    pid: int = 0
    pidfd: int = -1
    seconds: float = 0.0


def provision(
    plan: "Plan",
    pid: int,
    rootfs: str,
    config: "dict[str, Any] | None",
    settings: "Settings",
    worker: "Worker | None" = None,
    caller: Caller = Caller(),  # noqa: B008 - immutable
) -> tuple[str, ...]:
    """Give the container of process ``pid`` everything the plan says; return notes, a sentence each.

    ``rootfs``: host path of its root directory; ``config``: its OCI configuration, None if nobody knows it;
    ``worker``: of :func:`start_worker` for this plan, if there is one.
    Nothing of the container or the host is different afterwards if this raises ApplyError, or another OcigpuError.
    Needs CAP_SYS_ADMIN, or a container with a user namespace of the caller's own making.  Single-threaded callers only.
    """
    notes: tuple[str, ...] = ()
    if config and plan.groups():  # few hosts have nodes that are closed to others
        from ocigpu.system.groups import missing_groups

        notes = missing_groups(config, plan.groups())
    with step("open-container", rootfs):
        container = open_container(pid, rootfs, caller.pid)
    if worker is None:
        return notes + _provision_open(plan, container, config, settings, caller)
    try:
        return notes + _provision(plan, container, config, settings, worker, caller)
    finally:
        container.close()


def provision_here(plan: "Plan", rootfs: str, settings: "Settings") -> tuple[str, ...]:
    """Give the container whose namespaces this process is in what the plan says; return notes, a sentence each.

    For a hook of the createContainer stage.  ``rootfs``: path of the container's root directory in this mount
    namespace, where the host's files are in sight too: the sources of the plan's mounts are taken from here.
    Device nodes and rules are the runtime's at that stage: a plan with one is refused (OCIGPU-INT-1).
    All or nothing as :func:`provision`; raises ApplyError, OCIGPU-NS-1 in the host's own mount namespace.
    Needs CAP_SYS_ADMIN in the user namespace that owns the mount namespace.  Single-threaded callers only.
    """
    for action in plan.actions:
        if isinstance(action, (Node, AllowDevice)):
            raise ApplyError("OCIGPU-INT-1", f"{action.describe()}: not possible inside the container")
    return _provision_open(plan, open_here(rootfs), {}, settings)


def provision_own(plan: "Plan", rootfs: str, settings: "Settings") -> tuple[str, ...]:
    """As :func:`provision_here`, device nodes and rules too: for a container that has no runtime to make them.

    Its mount namespace, which this process is in, was made by who calls us; rules are those of this process's cgroup.
    """
    return _provision_open(plan, open_here(rootfs), None, settings)


def _provision_open(
    plan: "Plan",
    container: LiveContainer,
    config: "dict[str, Any] | None",
    settings: "Settings",
    caller: Caller = Caller(),  # noqa: B008 - immutable
) -> tuple[str, ...]:
    """Provision an open container and close it."""
    try:
        supplies = _take_supplies(plan, settings, not container.join_user)
        try:
            worker = _start(plan, supplies, lambda _: container)
            return _provision(plan, container, config, settings, worker, caller)
        finally:
            supplies.close()
    finally:
        container.close()


class Worker(NamedTuple):
    """A worker and what it shares with its parent; ``waits``: it has yet to be told which container it is for."""

    child: "_Child"
    memory: "mmap.mmap"
    supplies: Supplies
    waits: bool = False

    def dismiss(self) -> None:
        """End a worker that was told nothing."""
        self.child.finish()
        self.supplies.close()


def start_worker(plan: "Plan", settings: "Settings") -> Worker:
    """Return a worker with all that it needs of the host, for a container that is not there yet.

    For :func:`provision` by a process with CAP_SYS_ADMIN.  It ends when this process does.  Raises ApplyError
    OCIGPU-LD-1 for an ldconfig that cannot be used, and OSError.
    """
    supplies = _take_supplies(plan, settings)
    return _start(plan, supplies, _read_job)._replace(waits=True)


def _start(plan: "Plan", supplies: Supplies, job: "Callable[[int], LiveContainer | None]") -> Worker:
    memory = new_memory()
    child = _Child(lambda up_fd, down_fd: _work(plan, job, supplies, memory, up_fd, down_fd), memory)
    return Worker(child, memory, supplies)


def _read_job(down_fd: int) -> LiveContainer | None:
    """Wait to be told of a container and open it; None if there is nothing to do."""
    text = b""
    while not text.endswith(b"\n"):
        chunk = os.read(down_fd, 1 << 16)
        if not chunk:
            return None
        text += chunk
    return open_container(*rawjson.parse(text.decode()))


def _take_supplies(plan: "Plan", settings: "Settings", sources: bool = True) -> Supplies:
    """Take from the host what the worker cannot reach later; the caller closes it.

    ``sources``: also what will be mounted.  Raises ApplyError OCIGPU-LD-1 for an ldconfig that cannot be used.
    """
    _load_late()
    mounts = Mounts(new_calls=libc.has_mount_setattr() and not _FORCE_MOUNT2)
    ldconfig_fd = backup_fd = -1
    try:
        for action in plan.actions:
            if isinstance(action, RefreshLdCache) and ldconfig_fd < 0:
                from ocigpu.provision.ldconfig import find_ldconfig, open_ldconfig  # only glibc images need it

                path = action.ldconfig or find_ldconfig(settings)
                if path:  # else the step leaves a note: hosts without ldconfig exist (NixOS, Talos, musl)
                    ldconfig_fd = open_ldconfig(path)
            if isinstance(action, RefreshLdCache | TextFile) and backup_fd < 0:
                backup_fd = os.memfd_create("ocigpu-backup")
        return Supplies(mounts, _take_sources(plan, mounts) if sources else {}, ldconfig_fd, backup_fd)
    except BaseException:
        for fd in (ldconfig_fd, backup_fd):
            if fd >= 0:
                os.close(fd)
        raise


def _provision(
    plan: "Plan",
    container: LiveContainer,
    config: "dict[str, Any] | None",
    settings: "Settings",
    hired: Worker,
    caller: Caller,
) -> tuple[str, ...]:
    worker, memory, backup_fd = hired.child, hired.memory, hired.supplies.backup_fd
    undo_rules: "Callable[[], None] | None" = None
    seconds, undoing = caller.seconds or seconds_left(), caller.seconds or _UNDO_SECONDS
    try:
        if hired.waits:
            worker.tell(rawjson.dump([container.pid, container.rootfs, caller.pid]).encode() + b"\n")
        note = ""
        if plan.device_rules():
            rules = ", ".join(f"{rule.major}:{rule.minor}" for rule in plan.device_rules()) if get_trace() else ""
            with step("device-rules", rules, "what the container's cgroup does not allow yet"):
                note, undo_rules = apply_device_rules(container.proc_fd, plan.device_rules(), config, settings)
        report = worker.read_report(caller.pidfd, seconds)
        if report is not None and "done" in report:
            notes = (*report["done"], *((note,) if note else ()))
            report = worker.answer(_COMMIT, seconds)
            if report is not None and "committed" in report:
                if not hired.waits:  # else this process is about to end, too
                    worker.finish()
                return notes
    except BaseException as error:
        left = _abandon(worker, undo_rules, container, backup_fd, memory, undoing)
        if left and isinstance(error, ApplyError):
            raise ApplyError(error.code, error.message + _left(left), error.hint, error.errno) from error
        raise
    left = _abandon(worker, undo_rules, container, backup_fd, memory, undoing)
    if report is not None and "error" in report:
        code, message, hint, number = report["error"]
        raise ApplyError(code, message + _left(left), hint, number)
    raise ApplyError(
        "OCIGPU-INT-2", f"provision container process {container.pid}: the worker was killed" + _left(left)
    )


def _left(left: list[str]) -> str:
    return f" (could not be undone: {'; '.join(left)})" if left else ""


def _abandon(
    worker: "_Child",
    undo_rules: "Callable[[], None] | None",
    container: LiveContainer,
    backup_fd: int,
    memory: "mmap.mmap",
    seconds: float,
) -> list[str]:
    """See to it that all is undone, by the worker or in its place, each in so many seconds; return what is left."""
    left: list[str] = []
    if undo_rules is not None:
        try:
            with step("undo-device-rules"):
                undo_rules()
        except (OSError, OcigpuError) as error:
            left.append(f"device rules: {error}")
    report = worker.dismiss(seconds)
    worker.finish()
    if report is None or "left" not in report:  # killed
        second = _Child(lambda up_fd, _: _recover(container, memory, backup_fd, up_fd), memory)
        report = second.dismiss(seconds)
        second.finish()
    return left + (report["left"] if report is not None and "left" in report else ["the worker was killed again"])


class _Child:
    """A forked worker: a pipe of JSON lines from it, a pipe of one byte or nothing to it."""

    def __init__(self, work: "Callable[[int, int], None]", memory: "mmap.mmap") -> None:
        self._pending = b""
        self._memory, self._stuck = memory, False
        self._report: "dict[str, Any] | None" = None
        self._up_fd, up_fd = os.pipe()
        down_fd, self._down_fd = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            children.clear()
            os.close(self._up_fd)
            os.close(self._down_fd)
            _run_worker(work, memory, up_fd, down_fd)
        children.add(self.pid)
        os.close(up_fd)
        os.close(down_fd)

    def read_report(self, caller_fd: int = -1, seconds: float = 0.0) -> "dict[str, Any] | None":
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
            step = read_step(self._memory)
            raise ApplyError(
                "OCIGPU-INT-5",
                f"provision: no answer of the container's file systems for {seconds:.3g} s{step and ': '}{step}",
            )
        if any(ready == caller_fd for ready, _ in found):
            raise ApplyError("OCIGPU-INT-2", "provision: the hook's process was killed")

    def tell(self, data: bytes) -> None:
        """Say something to the worker; one that was killed is noticed when it does not answer."""
        try:
            while data:
                data = data[os.write(self._down_fd, data) :]
        except BrokenPipeError:
            return

    def dismiss(self, seconds: float) -> "dict[str, Any] | None":
        """Say that we are through; return the worker's last word as :meth:`answer` does, and kill one that is stuck."""
        try:
            return self.answer(b"", seconds)
        except ApplyError:
            os.kill(self.pid, signals.SIGKILL)
            self._stuck = True
            return None

    def answer(self, data: bytes, seconds: float = 0.0) -> "dict[str, Any] | None":
        """Say ``data``, or by nothing that we are through; return the worker's last word, None if it was killed."""
        if self._report is not None and ("left" in self._report or "committed" in self._report):
            return self._report
        if data:
            self.tell(data)
        elif self._down_fd >= 0:
            os.close(self._down_fd)
            self._down_fd = -1
        report = self.read_report(-1, seconds)
        while report is not None and "done" in report:  # said before it saw our answer
            report = self.read_report(-1, seconds)
        return report

    def finish(self) -> None:
        """Close the pipes and wait for the worker's end."""
        for fd in (self._up_fd, self._down_fd):
            if fd >= 0:
                os.close(fd)
        self._up_fd = self._down_fd = -1
        children.discard(self.pid)
        try:
            if self._stuck:  # not even SIGKILL ends every wait
                reap(self.pid, _UNDO_SECONDS)
            else:
                os.waitpid(self.pid, 0)
        except ChildProcessError:  # SIGCHLD is ignored in this process: the kernel reaps
            return


def _run_worker(work: "Callable[[int, int], None]", memory: "mmap.mmap", up_fd: int, down_fd: int) -> "NoReturn":
    """Be the worker: never return into the parent's code, never show a traceback."""
    status = 1
    try:
        for number in (signals.SIGINT, signals.SIGTERM, signals.SIGPIPE):
            signals.signal(number, signals.SIG_IGN)  # the parent gets them too: when it ends, we undo and end
        signals.signal(signals.SIGCHLD, signals.SIG_DFL)  # ldconfig's end is waited for
        gc.disable()
        os.umask(0)
        follow_steps(lambda: write_step(memory, current_step()))
        if trace := get_trace():
            trace.become("worker")
        work(up_fd, down_fd)
        status = 0
    except BaseException as error:  # noqa: BLE001 - whatever it is, it must not leave this function
        try:
            _write_line(up_fd, {"error": _describe(error), "left": []})
        except OSError:  # nobody listens
            status = 2
    finally:
        os._exit(status)


def _write_line(fd: int, data: "dict[str, Any]") -> None:
    left = memoryview(rawjson.dump(data).encode() + b"\n")
    while left:
        left = left[os.write(fd, left) :]


def _describe(error: BaseException) -> "list[Any]":
    own = as_own_error(error)
    message = own.message if own is error else f"provision: {own.message}"
    return [own.code, message, own.hint, getattr(error, "errno", 0) or 0]


def _enter(container: LiveContainer, own_proc_fd: int) -> int:
    """Join the container; return its root."""
    _stop_imports()
    join(container)
    enter_own_proc(own_proc_fd)
    root_fd = open_root(container)
    if container.other_user_namespace and not container.join_user:
        use_owner_ids(container)
    return root_fd


def _load_late() -> None:
    """Load what error messages load late: a codec, and the table of codes."""
    import ocigpu.core.codes  # noqa: F401 - found among the loaded modules afterwards

    "".encode("unicode_escape")


def _stop_imports() -> None:
    """Make every further import fail: in the container the search path leads to the image's files."""
    _load_late()
    sys.meta_path.clear()


def _work(
    plan: "Plan",
    job: "Callable[[int], LiveContainer | None]",
    supplies: Supplies,
    memory: "mmap.mmap",
    up_fd: int,
    down_fd: int,
) -> None:
    """Do all actions; on success wait for the parent's word, on failure undo and report."""
    own_proc_fd = _open_own_proc()
    host_mnt_fd = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    container = job(down_fd)
    if container is None:
        return
    make_nodes = in_initial_user_namespace() and not container.other_user_namespace
    host_devices = read_host_devices()
    with step("enter", container.rootfs):
        root_fd = _enter(container, own_proc_fd)
    journal = Journal(memory)
    place = Workplace(
        container=container,
        root_fd=root_fd,
        own_proc_fd=own_proc_fd,
        host_mnt_fd=host_mnt_fd,
        host_devices=host_devices,
        journal=journal,
        mounts=supplies.mounts,
        sources=supplies.sources,
        make_nodes=make_nodes,
        simulated=plan.simulated,
        ldconfig_fd=supplies.ldconfig_fd,
        backup_fd=supplies.backup_fd,
    )
    failure: "list[Any] | None" = None
    try:
        if container.here:
            make_root_writable(place)
        for action in plan.actions:
            if isinstance(action, RefreshLdCache):
                with step("start-ldconfig"):
                    steps.start_ldconfig(place, action)
                break
        for action in plan.actions:
            if not isinstance(action, (AllowDevice, JoinGroup)):
                with step(action):
                    steps.apply_action(place, action)
        _write_line(up_fd, {"done": place.notes})
        if os.read(down_fd, 1) == _COMMIT:
            kept = [entry for entry in journal.entries if entry["do"] == "writable"]
            for problem in undo(kept, root_fd, supplies.backup_fd, host_devices):
                raise ApplyError("OCIGPU-MNT-1", f"make the container's root read-only again: {problem}")
            mark("commit")
            _write_line(up_fd, {"committed": True})
            return
    except BaseException as error:  # noqa: BLE001 - whatever it is, all is undone before it is told
        failure = _describe(error)
    left = undo(journal.entries, root_fd, supplies.backup_fd, host_devices)
    _write_line(up_fd, {"error": failure, "left": left} if failure else {"left": left})


def _recover(container: LiveContainer, memory: "mmap.mmap", backup_fd: int, up_fd: int) -> None:
    """Undo what a killed worker had noted."""
    own_proc_fd, host_devices = _open_own_proc(), read_host_devices()
    with step("enter", container.rootfs, "to undo what a killed worker had begun"):
        root_fd = _enter(container, own_proc_fd)
    _write_line(up_fd, {"left": undo(read_journal(memory), root_fd, backup_fd, host_devices)})


def _open_own_proc() -> int:
    return os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _take_sources(plan: "Plan", mounts: Mounts) -> "Sources":
    """Take from the host what will be mounted, while its paths mean the host's files.

    What cannot be taken is tried again, and reported, when its action comes.
    """
    sources: "Sources" = {}
    for action in plan.actions:
        if isinstance(action, Bind):
            key = (action.host_path, action.kind, action.options)
            if key not in sources:
                try:
                    sources[key] = take_source(*key, mounts.new_calls)
                except OSError:  # told when the action comes, by its name
                    continue
    return sources
