"""The container that is provisioned: its process, its namespaces and its root, each opened once.

At the prestart stage runc and crun have assembled the container's root below the path of the bundle, but have not
yet made it the root of the namespace (pivot_root): the host's tree is still visible there.  Other runtimes and later
stages show the container's root as ``/``.  Both are handled.

At the createContainer stage the hook itself runs in the container's namespaces, with the host's tree still visible
(runtime-spec, config.md, "createContainer Hooks"): see :func:`open_here`.
"""

import errno
import os

from ocigpu.core.errors import ApplyError, cause
from ocigpu.core.record import NamedTuple
from ocigpu.provision.mounts import read_mnt_id
from ocigpu.system import libc
from ocigpu.system.namespaces import in_initial_user_namespace
from ocigpu.system.paths import named, opened
from ocigpu.system.proc import read_mounts, read_proc, read_stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self


class LiveContainer(NamedTuple):
    """An open container.

    ``proc_fd``: its /proc/<pid>, a descriptor that never refers to another process; ``mnt_fd``/``user_fd``: namespaces;
    ``init_root_fd``: the ``/`` of its process, O_PATH.  ``uid``/``gid``: our ids of the container's root user.
    ``other_user_namespace``: its user namespace is not ours.  ``join_user``: we have rights over it only inside it.
    ``pivoted``: ``init_root_fd`` is the container's root already.  ``host_root``: (device, inode) of our ``/``.
    ``here``: its namespaces are our own; nothing is joined.  ``rootfs_id``: (device, inode) of its root directory as
    the runtime sees it, () where that is not known.  ``built_here``: our caller has built it in our namespaces.
    """

    pid: int
    rootfs: str
    proc_fd: int
    mnt_fd: int
    user_fd: int
    init_root_fd: int
    uid: int
    gid: int
    other_user_namespace: bool
    join_user: bool
    pivoted: bool
    host_root: tuple[int, int]
    here: bool = False
    rootfs_id: tuple[int, ...] = ()
    built_here: bool = False

    def close(self) -> None:
        for fd in (self.proc_fd, self.mnt_fd, self.user_fd, self.init_root_fd):
            os.close(fd)


class _Opened:
    """Descriptors that are closed if the block fails.  ``what``: for messages."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._fds: list[int] = []

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for fd in self._fds if kind else ():
            os.close(fd)

    def open(self, name: str, flags: int = os.O_RDONLY, dir_fd: int | None = None, directory: str = "") -> int:
        with named("openat", directory + name):
            self._fds.append(os.open(name, flags | os.O_CLOEXEC, dir_fd=dir_fd))
        return self._fds[-1]

    def failed(self, number: int, why: str, hint: str | None = None, errno: int = 0) -> ApplyError:
        """Return the error OCIGPU-NS-``number``."""
        return ApplyError(f"OCIGPU-NS-{number}", f"{self.what}: {why}", hint, errno)


def open_container(pid: int, rootfs: str, hook_pid: int = 0) -> LiveContainer:
    """Return the container whose first process is ``pid`` and whose root directory is ``rootfs`` (a host path).

    ``hook_pid``: the process that the runtime has started as its hook (0: this one).
    Raises ApplyError OCIGPU-NS-1 when the container's process is gone, is younger than the hook (the pid was used
    again) or lives in our own mount namespace; OCIGPU-NS-2 when we may not look at it.
    """
    what = f"container process {pid}"
    if pid <= 0 or not rootfs.startswith("/"):
        raise ApplyError("OCIGPU-NS-1", f"{what}, root {rootfs!r}: not a process and a path")
    with _Opened(what) as place:
        try:
            return _open_process(place, pid, rootfs, hook_pid)
        except OSError as error:
            number = error.errno or 0
            if number in (errno.ENOENT, errno.ESRCH):
                raise place.failed(1, "it is gone", errno=number) from error
            hint = None
            if number == errno.EACCES:
                # crun makes its process unreadable (PR_SET_DUMPABLE), which leaves an ordinary user no way in: proc(5)
                hint = "The runtime hides its process from ordinary users: "
                hint += "run it as root, inside a user namespace, or use runc."
            raise place.failed(2, cause(error), hint, number) from error


def _open_process(place: _Opened, pid: int, rootfs: str, hook_pid: int) -> LiveContainer:
    directory = f"/proc/{pid}"
    proc_fd = place.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    process = read_stat(dir_fd=proc_fd)
    if process.ended:
        raise place.failed(1, "it has ended")
    if process.start > read_stat(f"/proc/{hook_pid or 'self'}/stat").start:
        raise place.failed(1, "it started after this hook, so it is not the container")
    mnt_fd = place.open("ns/mnt", os.O_RDONLY, proc_fd, f"{directory}/")
    user_fd = place.open("ns/user", os.O_RDONLY, proc_fd, f"{directory}/")
    init_root_fd = place.open("root", os.O_PATH | os.O_DIRECTORY, proc_fd, f"{directory}/")
    if os.path.samestat(os.fstat(mnt_fd), os.stat("/proc/self/ns/mnt")):
        raise place.failed(1, "it has no mount namespace of its own")
    other_user = not os.path.samestat(os.fstat(user_fd), os.stat("/proc/self/ns/user"))
    privileged = bool(libc.capget().effective >> libc.CAP_SYS_ADMIN & 1)
    if not privileged and not other_user:
        hint = "Run the runtime as root, or rootless with a user namespace for the container."
        raise place.failed(2, "joining its mount namespace needs CAP_SYS_ADMIN", hint)
    host = os.stat("/")
    pivoted = not os.path.samestat(os.fstat(init_root_fd), host)
    if pivoted and not privileged:
        why = "the host's files are out of reach: its root is in place already and we are not root"
        raise place.failed(2, why, "Use the prestart hook.")
    uid, gid = (_mapped_root(proc_fd, name) if other_user else 0 for name in ("uid_map", "gid_map"))
    return LiveContainer(
        pid, rootfs, proc_fd, mnt_fd, user_fd, init_root_fd, uid, gid, other_user,
        join_user=not privileged, pivoted=pivoted, host_root=(host.st_dev, host.st_ino),
        rootfs_id=() if pivoted else _identity(rootfs),
    )  # fmt: skip


def _identity(path: str) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError:  # reported when it is opened
        return ()
    return status.st_dev, status.st_ino


def open_here(rootfs: str) -> LiveContainer:
    """Return the container whose namespaces are the calling process's own, and whose root directory is ``rootfs``.

    For a hook of the createContainer stage.  ``uid``/``gid`` are the caller's own: 0 for root of whatever user
    namespace it is in.  Raises ApplyError OCIGPU-NS-1 when ``rootfs`` is not a mounted directory, or is the host's
    ``/``, or when this mount namespace is the host's; OCIGPU-NS-2 when procfs is not mounted on /proc.
    """
    with _Opened(f"container root {rootfs}") as place:
        try:
            _require_own_mounts(place)
            mnt_fd, user_fd = place.open("/proc/self/ns/mnt"), place.open("/proc/self/ns/user")
            proc_fd = place.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            hint = "The hook needs the procfs of the host on /proc."
            raise place.failed(2, cause(error), hint, error.errno or 0) from error
        try:
            root_fd = place.open(rootfs, os.O_PATH | os.O_DIRECTORY)
        except OSError as error:
            message = f"open container root {rootfs}: {error.strerror}"
            raise ApplyError("OCIGPU-NS-1", message, errno=error.errno or 0) from error
        host = os.stat("/")
        if not rootfs.startswith("/") or os.path.samestat(os.fstat(root_fd), host):
            raise place.failed(1, "it is the host's own root directory")
        if not _is_mount_point(root_fd):
            raise place.failed(1, "it is a directory of the host, not a mount of a container")
        return LiveContainer(
            os.getpid(), rootfs, proc_fd, mnt_fd, user_fd, root_fd, os.geteuid(), os.getegid(), False,
            join_user=False, pivoted=True, host_root=(host.st_dev, host.st_ino), here=True,
        )  # fmt: skip


def _require_own_mounts(place: _Opened) -> None:
    """Refuse to work in the mount namespace of the first process that the visible procfs shows, which is the host's.

    Two namespaces never share a mount, and its id is unique on the machine (fs/namespace.c), so comparing the tables is
    enough.  Unlike the link /proc/1/ns/mnt they can be read without the right to trace that process, but procfs may be
    mounted with hidepid: then root of the machine cannot compare and is refused, and any other user namespace is
    assumed to be the container's or its engine's.
    """
    own = read_mounts()
    try:
        shared = own.keys() & read_mounts("/proc/1/mountinfo").keys()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES, errno.EPERM):
            raise
        if not in_initial_user_namespace():
            return
        raise place.failed(1, f"the host's mounts are unknown: {cause(error)}") from error
    if shared:
        hint = "The hook works at the stage createContainer only, and for containers with a mount namespace."
        raise place.failed(1, "this process is in the host's mount namespace, not in a container's", hint)


def _is_mount_point(fd: int) -> bool:
    """Tell whether a directory is the root of a mount: runtimes mount a container's root, at least over itself.

    Services have mount namespaces of their own too (systemd.exec(5), PrivateTmp=), with the host's directories in it.
    It is one if the directory above it is on another mount (a reading of mountinfo may miss lines while mounts change).
    """
    with opened(os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)) as parent_fd:
        return read_mnt_id(fd, "/proc/self") != read_mnt_id(parent_fd, "/proc/self")


def join(container: LiveContainer) -> None:
    """Enter the container's mount namespace, and its user namespace if only that permits the former.

    For a single-threaded process that does nothing else afterwards.  Raises ApplyError OCIGPU-NS-2.
    """
    if container.here:
        return
    step = "user"
    try:
        if container.join_user:
            join_users(container)
            for call in (os.setresgid, os.setresuid):
                try:
                    call(0, 0, 0)
                except OSError as error:
                    if error.errno != errno.EINVAL:  # 0 is not mapped: we keep the ids we have
                        raise
        step = "mount"
        libc.setns(container.mnt_fd, libc.CLONE_NEWNS)
    except OSError as error:
        message = f"join {step} namespace of process {container.pid}: {cause(error)}"
        raise ApplyError("OCIGPU-NS-2", message, errno=error.errno or 0) from error


def join_users(container: LiveContainer) -> None:
    """Enter the container's user namespace, with the ids that we have; raises OSError.

    From then on processes with CAP_SYS_PTRACE there have it over this process, and see it if the container shares the
    host's PID namespace.  A process that is not dumpable cannot be traced, and its descriptors are not shown
    (ptrace(2)).
    """
    libc.prctl(libc.PR_SET_DUMPABLE, 0)
    libc.setns(container.user_fd, libc.CLONE_NEWUSER)


def open_root(container: LiveContainer) -> int:
    """Return an O_PATH descriptor of the container's root directory; after :func:`join`.

    Raises ApplyError OCIGPU-NS-2 when it cannot be opened, OCIGPU-NS-1 when it is the host's own root, or when a volume
    has been mounted over it: a link of an image can cause that, and the volume's files are not the image's.
    """
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        path = "." if container.pivoted else container.rootfs.lstrip("/") or "."
        if container.pivoted and not container.here:
            # where the runtime has put it: a running process may have changed its root into a volume, by chroot(2)
            top = os.stat("/")
            path = "/" if (top.st_dev, top.st_ino) != container.host_root else path
        # below the process's own root: the runtime may itself live in a chroot, which joining has taken us out of
        fd = os.open(path, flags, dir_fd=container.init_root_fd)
    except OSError as error:
        raise ApplyError(
            "OCIGPU-NS-2", f"open container root {container.rootfs}: {error.strerror}", errno=error.errno or 0
        ) from error
    status = os.fstat(fd)
    if (status.st_dev, status.st_ino) == container.host_root:
        os.close(fd)
        raise ApplyError("OCIGPU-NS-1", f"container root {container.rootfs}: it is the host's own root directory")
    if container.rootfs_id not in ((), (status.st_dev, status.st_ino)):
        os.close(fd)
        raise ApplyError("OCIGPU-NS-1", f"container root {container.rootfs}: something else is mounted over it")
    return fd


def use_owner_ids(container: LiveContainer) -> None:
    """Create files from now on as the container's root user, for a privileged process outside its user namespace.

    A file system that belongs to the container's user namespace accepts no inode of ids that are not mapped there
    (EOVERFLOW), and its root could not change files of the host's.  Leaving uid 0 for file access costs the
    capabilities that concern files (capabilities(7)), so they are put back.  Raises OSError.
    """
    sets = libc.capget()
    libc.setfsgid(container.gid)
    libc.setfsuid(container.uid)
    libc.capset(sets)


def _mapped_root(proc_fd: int, name: str) -> int:
    """Return our id of the container's id 0: lines "inside outside count" of user_namespaces(7)."""
    for line in read_proc(name, proc_fd).splitlines():
        inside, outside, _ = (int(word) for word in line.split())
        if inside == 0:
            return outside
    raise ApplyError("OCIGPU-NS-2", f"container user namespace: {name} maps no root user")
