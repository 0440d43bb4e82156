"""Works inside a running container: tests which devices it can reach, and removes what was made there.

A forked child does this in the container's cgroups and namespaces.  It opens everything that it needs of the host
before it enters, and imports nothing afterwards.  It executes nothing of the container, touches only what is still as
we made it, and leaves nothing behind: the tested nodes are in a private file system that ends with the child.
"""

import errno
import os
import stat
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ocigpu.containers.child import ask_child
from ocigpu.containers.rules import cgroup_directories, join_cgroups
from ocigpu.core.actions import Link, Node
from ocigpu.core.errors import OcigpuError, OsErrorAs
from ocigpu.core.facts import DeviceNode
from ocigpu.gpus.nvidia.views import PROC_DRIVER
from ocigpu.provision.container import LiveContainer, join, join_users, open_root, use_owner_ids
from ocigpu.provision.mounts import enter_own_proc, is_on_own_tmpfs, read_host_devices, read_mnt_id
from ocigpu.system import libc
from ocigpu.system.paths import open_in_root, open_parent

if TYPE_CHECKING:
    from ocigpu.core.actions import Action

REFUSALS = ("EPERM", "EACCES", "ENOENT", "ENOTDIR", "ELOOP", "ENAMETOOLONG")
"""Answers that do not come from a driver: there is no such node, or no right to open it."""
_OPEN_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FILE_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFBLK: "block device",
}


class Answer(NamedTuple):
    """The result of testing one device of the host in a container.

    ``found``: the file at the node's path, links followed ("c 195:3", "fifo", "" for nothing); ``opened``: the result
    of opening it if it is the device, "ok" or the name of an errno ("" if it was not opened); ``made``: the same for a
    node with that number made for the test ("mknod EPERM" if that is already refused).
    """

    found: str
    opened: str
    made: str


class ProbedFile(NamedTuple):
    """What a path of a container leads to: ``kind`` ("file", ..., "" for nothing), and which file of the machine."""

    kind: str
    device: int = 0
    inode: int = 0

    def is_device(self, node: DeviceNode) -> bool:
        """Tell whether it is a node of this number."""
        return self.kind == f"c {node.major}:{node.minor}"


class Seen(NamedTuple):
    """What :func:`look_inside` saw, in the order of what it was asked."""

    nodes: list[Answer]
    files: list[ProbedFile]


def is_reached(answer: str) -> bool:
    """Tell whether the device itself answered, even with an error (ENXIO: the number has no driver)."""
    return answer not in ("", *REFUSALS) and not answer.startswith("mknod")


def look_inside(
    container: LiveContainer, nodes: Sequence[DeviceNode], paths: Sequence[str], seconds: float = 10.0
) -> Seen:
    """Return what comes of opening nodes in a container, and of making and opening them, and what paths lead to.

    As the container's root user, with all rights that this can have.  A device is opened for reading and closed at
    once; anything else at a node's path is only looked at.  Needs root of the initial user namespace and Linux 5.2.
    Raises OcigpuError OCIGPU-CTR-4.
    """
    what = f"inspect container process {container.pid}"
    try:
        directories = [path for _, path in cgroup_directories(container.proc_fd)]
        found = ask_child(lambda: _probe(container, directories, nodes, paths), seconds)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise OcigpuError("OCIGPU-CTR-4", f"{what}: {where}{error.strerror or error}") from error
    return Seen([Answer(*item) for item in found[0]], [ProbedFile(*item) for item in found[1]])


def _enter(container: LiveContainer, as_root: bool = False) -> int:
    """Enter a container's namespaces as a worker of :mod:`ocigpu.provision.apply` does; returns its root.

    ``as_root``: become its root user, too.  Afterwards /proc/self is the working directory and nothing can be imported.
    """
    own_proc_fd = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    sys.meta_path.clear()  # the search path leads to the image's files
    join(container)
    enter_own_proc(own_proc_fd)
    root_fd = open_root(container)
    if container.other_user_namespace and not container.join_user:
        if as_root:
            join_users(container)
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
        else:
            use_owner_ids(container)
    return root_fd


def _probe(
    container: LiveContainer, directories: Sequence[str], nodes: Sequence[DeviceNode], paths: Sequence[str]
) -> tuple[list[Answer], list[ProbedFile]]:
    fs_fd = libc.fsopen("tmpfs")
    libc.fsconfig_create(fs_fd)
    place_fd = libc.fsmount(fs_fd, 0)
    join_cgroups(directories)
    root_fd = _enter(container, as_root=True)
    answers = [Answer(*_try_path(root_fd, node), _try_made(place_fd, str(i), node)) for i, node in enumerate(nodes)]
    return answers, [_probe_path(root_fd, path) for path in paths]


def _try_path(root_fd: int, node: DeviceNode) -> tuple[str, str]:
    try:
        fd = open_in_root(root_fd, node.container_path, os.O_PATH)
    except OSError as error:
        return "", _name(error)
    try:
        found = ProbedFile(_kind(os.fstat(fd)))
        return found.kind, _open(f"fd/{fd}") if found.is_device(node) else ""
    finally:
        os.close(fd)


def _try_made(place_fd: int, name: str, node: DeviceNode) -> str:
    try:
        os.mknod(name, stat.S_IFCHR | 0o666, os.makedev(node.major, node.minor), dir_fd=place_fd)
    except OSError as error:
        return f"mknod {_name(error)}"
    return _open(name, place_fd)


def _open(path: str, dir_fd: int | None = None) -> str:
    try:
        os.close(os.open(path, _OPEN_FLAGS, dir_fd=dir_fd))
    except OSError as error:
        return _name(error)
    return "ok"


def _probe_path(root_fd: int, path: str) -> ProbedFile:
    try:
        fd = open_in_root(root_fd, path, os.O_PATH)
    except OSError:  # missing, or a link that leads nowhere
        return ProbedFile("")
    try:
        status = os.fstat(fd)
    finally:
        os.close(fd)
    return ProbedFile(_kind(status), status.st_dev, status.st_ino)


def _kind(status: os.stat_result) -> str:
    if stat.S_ISCHR(status.st_mode):
        return f"c {os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    return _FILE_KINDS.get(stat.S_IFMT(status.st_mode), "file")


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error.errno))


# the removal of what was made


def remove_inside(container: LiveContainer, actions: "Sequence[Action]") -> list[str]:
    """Remove the nodes and links that these actions made in a container; returns a note for each that stays.

    A node or link is removed only if it is still as the action made it.
    """
    wanted = [action for action in actions if isinstance(action, Node | Link)]
    try:
        found: list[str] = ask_child(lambda: _remove(container, wanted))
    except (OSError, OcigpuError) as error:
        return [f"its nodes could not be removed, and cannot be opened: {error}"]
    return found


def _remove(container: LiveContainer, actions: Sequence[Node | Link]) -> list[str]:
    of_host = read_host_devices(container.rootfs)
    root_fd = _enter(container)
    notes = []
    for action in actions:
        path = action.node.container_path if isinstance(action, Node) else action.container_path
        try:
            parent_fd, name, _ = open_parent(root_fd, path)
            try:
                own = read_mnt_id(parent_fd) == read_mnt_id(root_fd) or is_on_own_tmpfs(parent_fd, root_fd, of_host)
                if not own and not _is_mounted(parent_fd, name):
                    notes.append(f"{path} stays, in a directory that may be shared; it cannot be opened")
                elif isinstance(action, Node):
                    _remove_node(parent_fd, name, os.makedev(action.node.major, action.node.minor), own)
                elif os.readlink(name, dir_fd=parent_fd) == action.target:
                    os.unlink(name, dir_fd=parent_fd)
            finally:
                os.close(parent_fd)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno == errno.EINVAL and isinstance(action, Link):  # something else than a link
                continue
            notes.append(f"{path} stays, and cannot be opened: {error.strerror}")
    return notes


def _is_mounted(parent_fd: int, name: str) -> bool:
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
    try:
        return read_mnt_id(fd) != read_mnt_id(parent_fd)
    finally:
        os.close(fd)


def _remove_node(parent_fd: int, name: str, rdev: int, own: bool) -> None:
    """Remove a node, or a mount of it and, in a directory of its ``own``, what that was on; another number stays."""
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
    try:
        status = os.fstat(fd)
        if not stat.S_ISCHR(status.st_mode) or status.st_rdev != rdev:
            return
        mounted = _is_mounted(parent_fd, name)
        if mounted:
            libc.umount2(f"fd/{fd}", libc.MNT_DETACH, name)
    finally:
        os.close(fd)
    under = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    if own and (not mounted or (stat.S_ISREG(under.st_mode) and under.st_size == 0)):
        os.unlink(name, dir_fd=parent_fd)


def read_view(container: LiveContainer) -> int:
    """Return the id of the mount that shows a container its /proc/driver/nvidia, 0 for none.

    Raises OcigpuError OCIGPU-CTR-5.
    """

    def look() -> int:
        try:
            return read_mnt_id(open_in_root(_enter(container), PROC_DRIVER, os.O_PATH))
        except FileNotFoundError:
            return 0

    found: int = _ask_for_view("look at", look)
    return found


def drop_view(container: LiveContainer, mount: int) -> bool:
    """Unmount the view of /proc/driver/nvidia that is on top, if it is this mount; returns whether it was.

    Raises OcigpuError OCIGPU-CTR-5.
    """

    def drop() -> bool:
        fd = open_in_root(_enter(container), PROC_DRIVER, os.O_PATH)
        if read_mnt_id(fd) != mount:
            return False
        libc.umount2(f"fd/{fd}", libc.MNT_DETACH, PROC_DRIVER)  # with the GPUs' directories that are mounted in it
        return True

    return mount != 0 and bool(_ask_for_view("unmount", drop))


def _ask_for_view(what: str, look: Callable[[], int]) -> Any:
    with OsErrorAs(OcigpuError, "OCIGPU-CTR-5", f"{what} {PROC_DRIVER}"):
        return ask_child(look)
