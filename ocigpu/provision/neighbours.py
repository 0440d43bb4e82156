"""Whether another container has the same root directory, and so may rely on what was made in it.

What is mounted in another namespace cannot be seen on the file itself, and the kernel detaches every mount on a file
that is removed, in all namespaces (detach_mounts of fs/namei.c, since Linux 3.18).  Tables of mounts tell: those of all
processes that we may look at.  Read only when something is to be undone.
"""

import os

from ocigpu.provision.mounts import read_mnt_id
from ocigpu.system.proc import read_mounts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ocigpu.system.proc import Mount


def has_neighbours(root_fd: int, own_proc: str = ".") -> bool:
    """Tell whether a mount namespace other than ours has this root directory with something mounted in it.

    So has a container from the moment when its runtime begins to mount; copies of the host's namespace have the
    directory at most.  ``own_proc``: path of our own directory of procfs.  What cannot be told is no: processes of
    other users, of outer pid namespaces, and all of them without procfs.
    """
    try:
        own, place = os.stat(f"{own_proc}/ns/mnt").st_ino, _find_place(root_fd, own_proc)
    except OSError:
        return False
    seen, known = {own}, set[str]()
    while new := set(filter(str.isdecimal, _list(f"{own_proc}/.."))) - known:  # containers may have begun meanwhile
        known |= new
        for table in _tables(f"{own_proc}/..", new, seen):
            if _is_used(table, place):
                return True
    return False


def _find_place(root_fd: int, own_proc: str) -> tuple[str, str]:
    """Return device and path of a directory in its file system, as mountinfo writes both."""
    mount = read_mounts(f"{own_proc}/mountinfo")[read_mnt_id(root_fd, own_proc)]
    rest = os.readlink(f"{own_proc}/fd/{root_fd}").removeprefix(mount.point.rstrip("/"))
    return mount.device, f"{mount.root.rstrip('/')}{rest}".rstrip("/") or "/"


def _tables(proc: str, pids: set[str], seen: set[int]) -> "Iterator[dict[int, Mount]]":
    """Yield the mounts of each namespace that these processes live in and that was not ``seen``."""
    for pid in pids:
        try:
            namespace = os.stat(f"{proc}/{pid}/ns/mnt").st_ino
            if namespace in seen:
                continue
            table = read_mounts(f"{proc}/{pid}/mountinfo")
        except OSError:  # it has ended, or is not ours to look at
            continue
        seen.add(namespace)
        yield table


def _is_used(table: "dict[int, Mount]", place: tuple[str, str]) -> bool:
    roots = {mount.mnt_id for mount in table.values() if (mount.device, mount.root.rstrip("/") or "/") == place}
    return bool(roots) and any(mount.parent in roots and mount.mnt_id not in roots for mount in table.values())


def _list(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
