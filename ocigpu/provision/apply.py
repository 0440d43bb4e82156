"""Carry out a plan in a container: everything or nothing.

There are two processes.  The parent stays in the host's namespaces.  The worker that it forks joins the container's and
takes one step after the other (:func:`carry_out`), recording each effect in shared memory before it happens.  Meanwhile
the parent changes the device cgroup.  When the worker has finished, the parent commits; only then is everything final.

* A step fails: the worker undoes everything and reports why.
* The worker is killed: the parent forks another one, which undoes what the first had recorded.
* The parent is killed: the worker sees its pipe end, and undoes everything.

A hook of the createContainer stage is in the container's namespaces already (:func:`provision_here`): there the two
processes differ only in their task.  If both are killed, files remain in the root directory of a container that does
not start; they do not prevent another try, and the mounts disappear with the namespace.  (crun ends all processes of a
container as soon as its hook was killed; runc waits for the worker, which holds the hook's output.)
"""

import os
import sys
import time

from ocigpu.core import rawjson
from ocigpu.core.actions import AllowDevice, Bind, Node, RefreshLdCache, TextFile
from ocigpu.core.errors import ApplyError, OcigpuError
from ocigpu.core.record import NamedTuple
from ocigpu.provision.cgroups import apply_device_rules
from ocigpu.provision.container import LiveContainer, join, open_container, open_here, open_root, use_owner_ids
from ocigpu.provision.journal import Journal
from ocigpu.provision.mounts import enter_own_proc, read_host_devices, take_source
from ocigpu.provision.operations import take, undo
from ocigpu.provision.operations.ldconfig import lock_ldconfig, stop_ldconfig
from ocigpu.provision.operations.mounts import make_root_writable
from ocigpu.provision.operations.transaction import CannotMergeError, Supplies, Transaction
from ocigpu.provision.worker import COMMIT, UNDO_SECONDS, Worker, describe, tell
from ocigpu.system import libc
from ocigpu.system.log import get_trace, mark, step
from ocigpu.system.namespaces import in_initial_user_namespace
from ocigpu.system.signals import seconds_left

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ocigpu.core.actions import Plan
    from ocigpu.core.settings import Settings
    from ocigpu.provision.operations.transaction import Sources

FORCE_MOUNT2 = False
"""Use mount(2) even where the newer calls work: for tests of old kernels' way."""


class Caller(NamedTuple):
    """The process that a runtime has started as its hook, if it is not this one: its id, and a pidfd of it.

    If it ends before all is done, no process waits for the outcome any more, and everything is undone.  ``seconds``:
    the time limit, 0 for that of a start; file systems may never answer.
    """

    pid: int = 0
    pidfd: int = -1
    seconds: float = 0.0


_THIS = Caller()


def provision(
    plan: "Plan",
    pid: int,
    rootfs: str,
    config: "dict[str, Any] | None",
    settings: "Settings",
    worker: Worker | None = None,
    caller: Caller = _THIS,
) -> tuple[str, ...]:
    """Carry out the plan in the container of process ``pid``; return notes, a sentence each.

    ``rootfs``: host path of its root directory; ``config``: its OCI configuration, None if unknown; ``worker``: of
    :func:`start_worker` for this plan, if there is one.  If this raises ApplyError or another OcigpuError, container
    and host are as they were.  Needs CAP_SYS_ADMIN, or a container with a user namespace of the caller's own making.
    Single-threaded callers only.
    """
    notes: tuple[str, ...] = ()
    if config and plan.groups():  # on most hosts all users may open the nodes
        from ocigpu.system.groups import missing_groups

        notes = missing_groups(config, plan.groups())
    with step("open-container", rootfs):
        container = open_container(pid, rootfs, caller.pid)
    return notes + _provision(plan, container, config, settings, worker, caller)


def provision_here(plan: "Plan", rootfs: str, settings: "Settings") -> tuple[str, ...]:
    """Carry out the plan in the container whose namespaces this process is in; return notes, a sentence each.

    For a hook of the createContainer stage.  ``rootfs``: path of the container's root directory in this mount
    namespace, where the host's files are visible too: the sources of the plan's mounts are opened here.  At that stage
    the runtime owns device nodes and rules: a plan with one is refused (OCIGPU-INT-1).  All or nothing as
    :func:`provision`; raises ApplyError, OCIGPU-NS-1 in the host's own mount namespace.  Needs CAP_SYS_ADMIN in the
    user namespace that owns the mount namespace.  Single-threaded callers only.
    """
    for action in plan.actions:
        if isinstance(action, (Node, AllowDevice)):
            raise ApplyError("OCIGPU-INT-1", f"{action.describe()}: not possible inside the container")
    return _provision(plan, open_here(rootfs), {}, settings)


def provision_own(plan: "Plan", rootfs: str, settings: "Settings") -> tuple[str, ...]:
    """As :func:`provision_here`, with device nodes and rules: for a container without a runtime that makes them.

    The caller has made its mount namespace, which this process is in; rules are those of this process's cgroup.
    """
    return _provision(plan, open_here(rootfs)._replace(built_here=True), None, settings)


def start_worker(plan: "Plan", settings: "Settings") -> Worker:
    """Return a worker with everything that it needs from the host, for a container that does not exist yet.

    For :func:`provision` by a process with CAP_SYS_ADMIN.  It ends when this process does.  Raises ApplyError
    OCIGPU-LD-1 for an ldconfig that cannot be used, and OSError.
    """
    return _fork(plan, _open_host_files(plan, settings), _wait_for_container)


def _fork(
    plan: "Plan", supplies: Supplies, find: "Callable[[int], LiveContainer | None]", waits: bool = True
) -> Worker:
    journal = Journal()

    def work(up_fd: int, down_fd: int) -> None:
        if container := find(down_fd):
            carry_out(plan, _enter(container, journal, supplies, plan.simulated), up_fd, down_fd)

    return Worker(work, journal, supplies, waits)


def _wait_for_container(down_fd: int) -> LiveContainer | None:
    """Wait for the parent to name a container, and open it; None if there is nothing to do."""
    text = b""
    while not text.endswith(b"\n"):
        chunk = os.read(down_fd, 1 << 16)
        if not chunk:
            return None
        text += chunk
    return open_container(*rawjson.parse(text.decode()))


def _open_host_files(plan: "Plan", settings: "Settings", sources: bool = True) -> Supplies:
    """Open the host's files that the worker cannot reach later; the caller closes them.

    ``sources``: also open what will be mounted.  Raises ApplyError OCIGPU-LD-1 for an ldconfig that cannot be used.
    """
    _load_late()
    new_calls = libc.has_mount_setattr() and not FORCE_MOUNT2
    ldconfig_fd = backup_fd = -1
    try:
        for action in plan.actions:
            if isinstance(action, RefreshLdCache) and action.entries:
                import ocigpu.gpus.libraries.loader_cache  # noqa: F401 - in the container nothing is imported any more
            elif isinstance(action, RefreshLdCache) and ldconfig_fd < 0:
                from ocigpu.provision.ldconfig import find_ldconfig, open_ldconfig  # few starts need it

                path = action.ldconfig or find_ldconfig(settings)
                if path:  # else the step leaves a note: hosts without ldconfig exist (NixOS, Talos, musl)
                    ldconfig_fd = open_ldconfig(path)
            if isinstance(action, RefreshLdCache | TextFile) and backup_fd < 0:
                backup_fd = os.memfd_create("ocigpu-backup")
        return Supplies(new_calls, _take_sources(plan, new_calls) if sources else {}, ldconfig_fd, backup_fd)
    except BaseException:
        Supplies(new_calls, {}, ldconfig_fd, backup_fd).close()
        raise


def _take_sources(plan: "Plan", new_calls: bool) -> "Sources":
    """Open the sources of mounts while their paths still lead to the host's files.

    A source that cannot be opened is tried again, and reported, by its action.
    """
    sources: "Sources" = {}
    for action in plan.actions:
        if isinstance(action, Bind):
            key = (action.host_path, action.kind, action.options)
            if key not in sources:
                try:
                    sources[key] = take_source(*key, new_calls)
                except OSError:  # its action reports it
                    continue
    return sources


def _provision(
    plan: "Plan",
    container: LiveContainer,
    config: "dict[str, Any] | None",
    settings: "Settings",
    worker: Worker | None = None,
    caller: Caller = _THIS,
) -> tuple[str, ...]:
    """Provision an open container and close it; a loader cache that cannot be merged is left to ldconfig."""
    try:
        try:
            return _try(plan, container, config, settings, worker, caller)
        except CannotMergeError:  # rare, so that nothing is made ready for it before
            return _try(plan.without_merge(), container, config, settings, None, caller)
    finally:
        container.close()


def _try(
    plan: "Plan",
    container: LiveContainer,
    config: "dict[str, Any] | None",
    settings: "Settings",
    worker: Worker | None,
    caller: Caller,
) -> tuple[str, ...]:
    """Provision an open container; raises CannotMergeError after everything was undone."""
    if worker is not None:
        return _run_to_commit(plan, container, config, settings, worker, caller)
    supplies = _open_host_files(plan, settings, not container.join_user)
    try:
        worker = _fork(plan, supplies, lambda _: container, waits=False)
        return _run_to_commit(plan, container, config, settings, worker, caller)
    finally:
        supplies.close()


def _run_to_commit(
    plan: "Plan",
    container: LiveContainer,
    config: "dict[str, Any] | None",
    settings: "Settings",
    worker: Worker,
    caller: Caller,
) -> tuple[str, ...]:
    """Allow the devices while the worker works, then have it commit, or undo everything; return the notes."""
    undo_rules: "Callable[[], None] | None" = None
    seconds = caller.seconds or seconds_left()
    end = time.monotonic() + seconds + caller.seconds
    try:
        if worker.waits:
            worker.say(rawjson.dump([container.pid, container.rootfs, caller.pid]).encode() + b"\n")
        note, rules = "", plan.device_rules()
        if rules:
            text = ", ".join(f"{rule.major}:{rule.minor}" for rule in rules) if get_trace() else ""
            with step("device-rules", text, "what the container's cgroup does not allow yet"):
                note, undo_rules = apply_device_rules(container.proc_fd, rules, config, settings)
        report = worker.read_report(caller.pidfd, seconds)
        if report is not None and "done" in report:
            notes = (*report["done"], *((note,) if note else ()))
            report = worker.answer(COMMIT, seconds)
            if report is not None and "committed" in report:
                if not worker.waits:  # otherwise this process is about to end, too
                    worker.finish()
                return notes
    except BaseException as error:
        left = _abandon(worker, undo_rules, container, end)
        if left and isinstance(error, ApplyError):
            raise ApplyError(error.code, error.message + left, error.hint, error.errno) from error
        raise
    left = _abandon(worker, undo_rules, container, end)
    if report is not None and "error" in report:
        code, message, hint, number = report["error"]
        raise ApplyError(code, message + left, hint, number)
    if report is not None and "unmerged" in report:
        if left:
            raise ApplyError("OCIGPU-LD-1", f"the image's loader cache cannot be merged{left}")
        raise CannotMergeError
    raise ApplyError("OCIGPU-INT-2", f"provision container process {container.pid}: the worker was killed{left}")


def _abandon(worker: Worker, undo_rules: "Callable[[], None] | None", container: LiveContainer, end: float) -> str:
    """Have everything undone, by the worker or instead of it; return a text about what is left.

    Each attempt has until ``end`` (monotonic), but at least UNDO_SECONDS: a second is short on a busy machine.
    """
    left: list[str] = []
    if undo_rules is not None:
        try:
            with step("undo-device-rules"):
                undo_rules()
        except (OSError, OcigpuError) as error:
            left.append(f"device rules: {error}")
    undone = worker.give_up(max(UNDO_SECONDS, end - time.monotonic()))
    if undone is None:  # killed
        journal, supplies = worker.journal, worker.supplies

        def recover(up_fd: int, _: int) -> None:
            transaction = _enter(container, journal, supplies, why="to undo what a killed worker had begun")
            if supplies.ldconfig_fd >= 0:
                lock_ldconfig(transaction)  # its ldconfig is killed with it, and writes nothing afterwards
            tell(up_fd, {"left": undo(transaction, journal.read())})

        undone = Worker(recover, journal, supplies).give_up(max(UNDO_SECONDS, end - time.monotonic()))
    left += undone if undone is not None else ["the worker was killed again"]
    return f" (could not be undone: {'; '.join(left)})" if left else ""


def _enter(
    container: LiveContainer, journal: Journal, supplies: Supplies, stand_in: bool = False, why: str = ""
) -> Transaction:
    """Join the container, for good; return the transaction that begins there."""
    own_proc_fd = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    host_mnt_fd = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    make_nodes = in_initial_user_namespace() and not container.other_user_namespace
    host_devices = read_host_devices(container.rootfs, container.built_here)
    with step("enter", container.rootfs, why):
        _stop_imports()
        join(container)
        enter_own_proc(own_proc_fd)
        root_fd = open_root(container)
        if container.other_user_namespace and not container.join_user:
            use_owner_ids(container)
    return Transaction(
        root_fd, journal, supplies, host_devices, container, own_proc_fd, host_mnt_fd, make_nodes, stand_in
    )


def _load_late() -> None:
    """Load what error messages load late: a codec, and the table of codes."""
    import ocigpu.core.codes  # noqa: F401 - found among the loaded modules afterwards

    "".encode("unicode_escape")


def _stop_imports() -> None:
    """Make every further import fail: in the container the search path leads to the image's files."""
    _load_late()
    sys.meta_path.clear()


def carry_out(plan: "Plan", transaction: Transaction, up_fd: int, down_fd: int) -> None:
    """Take all steps; on success wait for the parent's answer, on failure undo and report."""
    journal = transaction.journal
    failure: "dict[str, Any]" = {}
    try:
        if transaction.container is not None and transaction.container.here:
            make_root_writable(transaction)
        for action in plan.steps():
            take(transaction, action)
        tell(up_fd, {"done": transaction.notes})
        if os.read(down_fd, 1) == COMMIT:
            kept = [entry for entry in journal.entries if entry["do"] == "writable"]
            for problem in undo(transaction, kept):
                raise ApplyError("OCIGPU-MNT-1", f"make the container's root read-only again: {problem}")
            mark("commit")
            tell(up_fd, {"committed": True})
            return
    except CannotMergeError:
        failure = {"unmerged": True}
    except BaseException as error:  # noqa: BLE001 - whatever it is, all is undone before it is told
        failure = {"error": describe(error)}
    stop_ldconfig(transaction)  # otherwise it would write its cache after the image's was restored
    left = undo(transaction, journal.entries)
    tell(up_fd, {**failure, "left": left})
