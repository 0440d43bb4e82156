"""Changes inside a running container that the plan's sink has no actions for: what was made there is taken away.

By a forked child in the container's mount namespace, which touches nothing that is not as we made it.
"""

import errno
import os
import stat
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ocigpu.containers.asked import ask_child
from ocigpu.core.actions import Link, Node
from ocigpu.core.errors import OcigpuError
from ocigpu.gpus.nvidia.views import PROC_DRIVER
from ocigpu.provision.container import LiveContainer, join, open_root, use_owner_ids
from ocigpu.provision.mounts import enter_own_proc, read_mnt_id
from ocigpu.system import libc
from ocigpu.system.paths import open_in_root, open_parent
from ocigpu.system.proc import read_mounts

if TYPE_CHECKING:
    from ocigpu.core.actions import Action


def remove_inside(container: LiveContainer, actions: "Sequence[Action]") -> list[str]:
    """Remove the nodes and links that these actions made in a container; returns a note for each that stays.

    Only what is as the action made it is removed.
    """
    wanted = [action for action in actions if isinstance(action, Node | Link)]
    try:
        found: list[str] = ask_child(lambda: _remove(container, wanted))
    except (OSError, OcigpuError) as error:
        return [f"its nodes could not be removed, and cannot be opened: {error}"]
    return found


def _remove(container: LiveContainer, actions: Sequence[Node | Link]) -> list[str]:
    of_host = {mount.device for mount in read_mounts().values()}
    root_fd = _enter(container)
    notes = []
    for action in actions:
        path = action.node.container_path if isinstance(action, Node) else action.container_path
        try:
            parent_fd, name = open_parent(root_fd, path)
            try:
                if not _is_own(root_fd, parent_fd, of_host) and not _is_mounted(parent_fd, name):
                    notes.append(f"{path} stays, in a directory that may be shared; it cannot be opened")
                elif isinstance(action, Node):
                    _remove_node(parent_fd, name, os.makedev(action.node.major, action.node.minor))
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


def _is_own(root_fd: int, directory_fd: int, of_host: set[str]) -> bool:
    """Tell whether a directory is the container's alone: on its root mount, or on a file system unknown to the host.

    A volume may be the host's own /dev.  Which one it is says the mount table: st_dev is another for btrfs.
    """
    mnt_id = read_mnt_id(directory_fd)
    if mnt_id == read_mnt_id(root_fd):
        return True
    mount = read_mounts("mountinfo").get(mnt_id)
    return mount is not None and mount.device not in of_host


def _is_mounted(parent_fd: int, name: str) -> bool:
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
    try:
        return read_mnt_id(fd) != read_mnt_id(parent_fd)
    finally:
        os.close(fd)


def _remove_node(parent_fd: int, name: str, rdev: int) -> None:
    """Remove a node, or what it is mounted on; anything of another number stays."""
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
    try:
        status = os.fstat(fd)
        if not stat.S_ISCHR(status.st_mode) or status.st_rdev != rdev:
            return
        mounted = _is_mounted(parent_fd, name)
        if mounted:
            libc.umount2(f"fd/{fd}", libc.MNT_DETACH)
    finally:
        os.close(fd)
    under = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    if not mounted or (stat.S_ISREG(under.st_mode) and under.st_size == 0):
        os.unlink(name, dir_fd=parent_fd)


def read_view(container: LiveContainer) -> int:
    """Return the id of the mount that shows a container its /proc/driver/nvidia, 0 for none; raises OSError."""
    found: int = ask_child(lambda: _read_view(container))
    return found


def _read_view(container: LiveContainer) -> int:
    try:
        fd = open_in_root(_enter(container), PROC_DRIVER, os.O_PATH)
    except FileNotFoundError:
        return 0
    try:
        return read_mnt_id(fd)
    finally:
        os.close(fd)


def drop_view(container: LiveContainer, mount: int) -> bool:
    """Unmount the view of /proc/driver/nvidia that is on top, if it is this mount; returns whether it was.

    Raises OSError.
    """
    found: bool = ask_child(lambda: _drop_view(container, mount))
    return found


def _drop_view(container: LiveContainer, mount: int) -> bool:
    fd = open_in_root(_enter(container), PROC_DRIVER, os.O_PATH)
    try:
        if read_mnt_id(fd) != mount:
            return False
        libc.umount2(f"fd/{fd}", libc.MNT_DETACH)  # with the GPUs' directories that are mounted in it
        return True
    finally:
        os.close(fd)


def _enter(container: LiveContainer) -> int:
    """Enter a container's mount namespace as a worker of :mod:`ocigpu.provision.apply` does; returns its root."""
    own_proc_fd = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    sys.meta_path.clear()  # the search path leads to the image's files
    join(container)
    enter_own_proc(own_proc_fd)
    root_fd = open_root(container)
    if container.other_user_namespace and not container.join_user:
        use_owner_ids(container)
    return root_fd
