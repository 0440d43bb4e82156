"""What is in the small file systems of a plan: their size, their files, and whether one holds them already."""

import os
import stat

from ocigpu.system.paths import At, named, opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ocigpu.core.actions import Tmpfs

_PAGE = 4096


def tmpfs_options(action: "Tmpfs", uid: int, gid: int) -> list[tuple[str, str]]:
    """Return the mount options of tmpfs(5) for a file system of the action's size that ``uid``:``gid`` owns."""
    names = len(action.files) + len(_directories(action))
    pages = sum(len(content.encode()) // _PAGE + 1 for _, _, content in action.files) + names + 8
    return [
        ("mode", "0755"),  # until it is filled
        ("uid", str(uid)),
        ("gid", str(gid)),
        ("size", str(pages * _PAGE)),
        ("nr_inodes", str(names + 8)),
    ]


def fill(fd: int, action: "Tmpfs") -> None:
    """Write the directories and files of the action into the empty file system whose root is ``fd``."""
    directories, top = _directories(action), action.container_path
    for name in directories:
        At(fd, name, f"{top}/{name}").mkdir(0o755)
    for name, mode, content in action.files:
        file_fd = At(fd, name, f"{top}/{name}").open(os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with named("write", f"{top}/{name}"), open(file_fd, "wb") as file:
            file.write(content.encode())
            os.fchmod(file_fd, mode)
    with named("chmod", top):
        for name in reversed(directories):
            os.chmod(name, 0o555, dir_fd=fd)
        os.chmod(".", action.mode, dir_fd=fd)


def holds(top_fd: int, action: "Tmpfs", uid: int, gid: int) -> bool:
    """Tell whether the file system whose root is ``top_fd`` holds what the action wants, and nothing else.

    Expects /proc/self as working directory.  Raises OSError when something else has one of the names.
    """
    device = os.fstat(top_fd).st_dev
    directories = _directories(action)
    for directory in ("", *directories):
        with opened(
            os.open(directory or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top_fd)
        ) as fd:
            wanted = {
                name for name in (*directories, *(file[0] for file in action.files)) if _parent(name) == directory
            }
            found = os.fstat(fd)
            if found.st_dev != device and not wanted:
                continue  # a later action has mounted something here
            if found.st_dev != device or (found.st_uid, found.st_gid) != (uid, gid):
                return False
            if stat.S_IMODE(found.st_mode) != (0o555 if directory else action.mode) or not _has_names(fd, wanted):
                return False
    return all(_is_file_of(top_fd, device, *file) for file in action.files)


def _parent(name: str) -> str:
    return name.rpartition("/")[0]


def _has_names(fd: int, wanted: set[str]) -> bool:
    """Tell whether a directory has exactly the last names of these paths; reads no more entries than that and one."""
    with os.scandir(fd) as entries:
        found = {entry.name for entry, _ in zip(entries, range(len(wanted) + 1), strict=False)}
    return found == {name.rpartition("/")[2] for name in wanted}


def _is_file_of(top_fd: int, device: int, name: str, mode: int, content: str) -> bool:
    with opened(At(top_fd, name, name).open()) as fd:
        found, data = os.fstat(fd), content.encode()
        if not stat.S_ISREG(found.st_mode) or (found.st_dev, found.st_size) != (device, len(data)):
            return False
        if stat.S_IMODE(found.st_mode) != mode:
            return False
        with open(f"fd/{fd}", "rb") as file:
            return file.read(len(data) + 1) == data


def _directories(action: "Tmpfs") -> list[str]:
    """Return every directory of the tmpfs, parents first."""
    wanted: set[str] = set()
    paths = [name.split("/")[:-1] for name, _, _ in action.files] + [name.split("/") for name in action.directories]
    for parts in paths:
        wanted.update("/".join(parts[: depth + 1]) for depth in range(len(parts)))
    return sorted(wanted)
