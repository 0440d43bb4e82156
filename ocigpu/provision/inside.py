"""Reads an image that may be hostile: by descriptor below its root, within limits, and opening only regular files.

Nothing here raises for anything that an image contains: a file that cannot be read counts as missing.
"""

import os
import stat

from ocigpu.system.paths import open_in_root, opened

MAX_ENTRIES = 4096
"""Names read of one directory."""
_KERNEL_FILE_SYSTEMS = frozenset(
    (
        0x9FA0,  # proc
        0x62656572,  # sysfs
        0x27E0EB,  # cgroup
        0x63677270,  # cgroup2
        0x64626720,  # debugfs
        0x74726163,  # tracefs
        0x73636673,  # securityfs
        0xF97CFF8C,  # selinuxfs
        0x43415D53,  # smackfs
        0x62656570,  # configfs
        0xDE5E81E4,  # efivarfs
        0x6165676C,  # pstore
        0xCAFE4A11,  # bpf
        0x42494E4D,  # binfmt_misc
        0x19800202,  # mqueue
        0x1CD1,  # devpts
        0x6E736673,  # nsfs
    )
)
"""Magic numbers of include/uapi/linux/magic.h (configfs, mqueue: fs/configfs/mount.c, ipc/mqueue.c)."""


def list_inside(root_fd: int, path: str) -> list[str]:
    """Return at most :data:`MAX_ENTRIES` names of a directory of the image, sorted; none if it cannot be listed."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK
    try:
        with opened(open_in_root(root_fd, path, flags)) as fd, os.scandir(fd) as entries:
            return sorted(entry.name for entry, _ in zip(entries, range(MAX_ENTRIES), strict=False))
    except OSError:  # missing, a link to nowhere, not a directory; or it cannot be read, on a broken file system
        return []


def status_inside(root_fd: int, path: str, flags: int = 0) -> os.stat_result | None:
    """Return the status of the file that ``path`` leads to inside the image, None if missing; flags as of open(2)."""
    try:
        with opened(open_in_root(root_fd, path, os.O_PATH | flags)) as fd:
            return os.fstat(fd)
    except OSError:  # missing, or a link that leads nowhere
        return None


def look_inside(root_fd: int, path: str) -> tuple[os.stat_result | None, str]:
    """Return the status of a name of the image, None if missing, and where it leads if it is a link, else ""."""
    try:
        with opened(open_in_root(root_fd, path, os.O_PATH | os.O_NOFOLLOW)) as fd:
            status = os.fstat(fd)
            return status, os.readlink("", dir_fd=fd) if stat.S_ISLNK(status.st_mode) else ""
    except OSError:  # missing, or a link to it leads nowhere
        return None, ""


def exists_inside(root_fd: int, path: str) -> bool:
    """Tell whether ``path`` leads to anything inside the image."""
    return status_inside(root_fd, path) is not None


def is_of_kernel(fd: int) -> bool:
    """Tell whether a file is one of procfs, sysfs and the like, which runtimes mount before hooks run.

    Links of an image may lead there.  Files that root of the host can read there are not for the container, and reading
    may have effects (/proc/kmsg); files that the runtime will hide (linux.maskedPaths) are still visible.  Raises
    OSError.
    """
    from ocigpu.system.libc import read_file_system_type  # for paths.use_walk

    return read_file_system_type(fd) in _KERNEL_FILE_SYSTEMS


def open_file_inside(root_fd: int, path: str, flags: int = 0) -> int:
    """Return a descriptor to read a regular file of the image, -1 if there is none; needs procfs on /proc.

    Its type is checked first: a FIFO would block, and opening a device or a file of the kernel may have effects.
    """
    try:
        with opened(open_in_root(root_fd, path, os.O_PATH | flags)) as path_fd:
            status = os.fstat(path_fd)
            own = status.st_dev == os.fstat(root_fd).st_dev  # the image's own file system, not one of the kernel's
            if not stat.S_ISREG(status.st_mode) or (not own and is_of_kernel(path_fd)):
                return -1
            return os.open(f"/proc/self/fd/{path_fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # missing, a link that leads nowhere, or not readable for us
        return -1


def read_inside(root_fd: int, path: str, limit: int, flags: int = 0) -> bytes | None:
    """Return the first ``limit`` bytes of a regular file of the image, None if there is none; flags as of open(2)."""
    fd = open_file_inside(root_fd, path, flags)
    if fd < 0:
        return None
    try:
        with open(fd, "rb", buffering=0) as file:
            data = b""
            while len(data) < limit and (chunk := file.read(limit - len(data))):
                data += chunk
            return data
    except OSError:  # on a broken file system
        return None


def resolve_inside(root_fd: int, path: str) -> str:
    """Return where a path of the image leads, as an absolute path in it without links; "" if unknown.

    The text is for the image's own use, such as its loader's configuration: nothing is opened by it.
    """
    try:
        with opened(open_in_root(root_fd, path, os.O_PATH)) as fd:
            top, found = (os.readlink(f"/proc/self/fd/{number}") for number in (root_fd, fd))
    except OSError:  # missing, a link that leads nowhere; or there is no procfs
        return ""
    inner = found.removeprefix(top.rstrip("/"))
    return inner if found.startswith(top.rstrip("/") + "/") and inner.isprintable() else ""
