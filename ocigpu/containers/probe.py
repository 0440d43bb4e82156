"""What a container can reach: device nodes and files tried from inside its cgroups and namespaces.

Done by a forked child, which opens all that it needs of the host before it enters and imports nothing afterwards.
Nothing of the container is executed, and nothing is left in it: the nodes that are made are in a file system that
nobody else sees and that ends with the child.
"""

import errno
import os
import stat
import sys
from collections.abc import Sequence
from typing import NamedTuple

from ocigpu.containers.asked import ask_child
from ocigpu.containers.granted import cgroup_directories, join_cgroups
from ocigpu.core.errors import OcigpuError
from ocigpu.core.facts import DeviceNode
from ocigpu.provision.container import LiveContainer, join, open_root
from ocigpu.provision.mounts import enter_own_proc
from ocigpu.system import libc
from ocigpu.system.paths import open_in_root

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
    """What came of trying one device of the host in a container.

    ``found``: what it has at the node's path, links followed ("c 195:3", "fifo", "" for nothing); ``opened``: what
    opening that said if it is the device, "ok" or the name of an errno ("" if it was not opened); ``made``: the same
    for a node of the number that was made there ("mknod EPERM" where that is refused already).
    """

    found: str
    opened: str
    made: str


class ProbedFile(NamedTuple):
    """What a path of a container leads to: ``kind`` ("file", ..., "" for nothing), and which file of the machine."""

    kind: str
    device: int = 0
    inode: int = 0


class Seen(NamedTuple):
    """What :func:`look_inside` saw, in the order of what it was asked."""

    nodes: list[Answer]
    files: list[ProbedFile]


def is_reached(answer: str) -> bool:
    """Tell whether the device itself answered, whatever it said (ENXIO: there is no driver behind the number)."""
    return answer not in ("", *REFUSALS) and not answer.startswith("mknod")


def look_inside(
    container: LiveContainer, nodes: Sequence[DeviceNode], paths: Sequence[str], seconds: float = 10.0
) -> Seen:
    """Return what comes of opening nodes in a container, and of making and opening them, and what paths lead to.

    As the container's root user, with all rights that this can have.  A device is opened for reading and closed at
    once; anything else at a node's path is only looked at.  Needs root of the initial user namespace and Linux 5.2.
    Raises OcigpuError OCIGPU-CTR-4.
    """
    what = f"look into container process {container.pid}"
    try:
        with open(os.open("cgroup", os.O_RDONLY | os.O_CLOEXEC, dir_fd=container.proc_fd), encoding="utf-8") as file:
            directories = [path for _, path in cgroup_directories(file.read(1 << 20))]
        found = ask_child(lambda: _look(container, directories, nodes, paths), seconds)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise OcigpuError("OCIGPU-CTR-4", f"{what}: {where}{error.strerror or error}") from error
    return Seen([Answer(*item) for item in found[0]], [ProbedFile(*item) for item in found[1]])


def enter(container: LiveContainer) -> int:
    """Enter a container's namespaces as its root user; returns a descriptor of its root.  For a child that ends soon.

    Afterwards /proc/self is the working directory and nothing can be imported.  Raises OSError, ApplyError.
    """
    own_proc_fd = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    sys.meta_path.clear()  # the search path leads to the image's files
    join(container)
    enter_own_proc(own_proc_fd)
    root_fd = open_root(container)
    if container.other_user_namespace and not container.join_user:
        libc.setns(container.user_fd, libc.CLONE_NEWUSER)
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    return root_fd


def _look(
    container: LiveContainer, directories: Sequence[str], nodes: Sequence[DeviceNode], paths: Sequence[str]
) -> tuple[list[Answer], list[ProbedFile]]:
    fs_fd = libc.fsopen("tmpfs")
    libc.fsconfig_create(fs_fd)
    place_fd = libc.fsmount(fs_fd, 0)
    join_cgroups(directories)
    root_fd = enter(container)
    answers = [Answer(*_try_path(root_fd, node), _try_made(place_fd, str(i), node)) for i, node in enumerate(nodes)]
    return answers, [_look_at(root_fd, path) for path in paths]


def _try_path(root_fd: int, node: DeviceNode) -> tuple[str, str]:
    try:
        fd = open_in_root(root_fd, node.container_path, os.O_PATH)
    except OSError as error:
        return "", _name(error)
    try:
        status = os.fstat(fd)
        if not stat.S_ISCHR(status.st_mode):
            return _FILE_KINDS.get(stat.S_IFMT(status.st_mode), "file"), ""
        if status.st_rdev != os.makedev(node.major, node.minor):
            return _number(status), ""
        return _number(status), _open(f"fd/{fd}")
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


def _look_at(root_fd: int, path: str) -> ProbedFile:
    try:
        fd = open_in_root(root_fd, path, os.O_PATH)
    except OSError:  # missing, or a link that leads nowhere
        return ProbedFile("")
    try:
        status = os.fstat(fd)
    finally:
        os.close(fd)
    if stat.S_ISCHR(status.st_mode):
        return ProbedFile(_number(status), status.st_dev, status.st_ino)
    return ProbedFile(_FILE_KINDS.get(stat.S_IFMT(status.st_mode), "file"), status.st_dev, status.st_ino)


def _number(status: os.stat_result) -> str:
    return f"c {os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error.errno))
