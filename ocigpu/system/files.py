"""File operations shared by all modules: atomic replacement, bounded reading, locks, trust.

Names are relative to a directory's descriptor: its holder decides which root it was resolved below.
"""

import errno
import fcntl
import os
import stat
import time

from ocigpu.system.namespaces import in_initial_user_namespace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import BinaryIO

DRAFT = ".ocigpu-"
"""Begin of the names of files and links before they are moved into place; the process's number follows."""
MAX_ENTRIES = 20_000
"""Entries of a directory, perhaps an image's, that are looked at for drafts; usual ones have a tenth of that."""
_LDCONFIG_DRAFT = "ld.so.cache~"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_SMALL = 1 << 16
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def open_regular(path: str, dir_fd: int | None = None, flags: int = 0) -> "BinaryIO":
    """Return a regular file, open for reading without waiting for a FIFO or a device.

    ``path``: below the directory ``dir_fd`` where one is given; ``flags``: of open(2), more.  Raises OSError, EINVAL
    for any other kind of file.
    """
    fd = os.open(path, _READ | flags, dir_fd=dir_fd)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
    except OSError:
        os.close(fd)
        raise
    return open(fd, "rb")


def read_part(file: "BinaryIO", size: int) -> bytes:
    """Return at most this many bytes of a file; a buffer of the full size is allocated only for a large file."""
    data = file.read(min(size, _SMALL))
    return data + file.read(size - _SMALL) if len(data) == _SMALL else data


def read_bounded(file: "BinaryIO", limit: int) -> bytes:
    """Return the rest of a file; raises OSError, EFBIG when that is more than ``limit`` bytes."""
    data = read_part(file, limit + 1)
    if len(data) > limit:
        size = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit >> 10} KiB"
        raise OSError(errno.EFBIG, f"larger than {size}")
    return data


def read_regular(path: str, limit: int, dir_fd: int | None = None, flags: int = 0) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes; raises OSError, see :func:`open_regular`."""
    with open_regular(path, dir_fd, flags) as file:
        return read_bounded(file, limit)


def file_state(path: str) -> tuple[int, ...]:
    """Return :func:`state_of` a file, behind links too (the kubelet's for a ConfigMap are ..data); () for none."""
    try:
        return state_of(os.stat(path))
    except OSError:
        return ()


def state_of(status: os.stat_result) -> tuple[int, ...]:
    """Return what tells a file from another, and from itself after a change."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def replace_file(
    name: str,
    content: bytes,
    mode: int,
    dir_fd: int,
    *,
    owner: tuple[int, int] = (-1, -1),
    attributes: "Iterable[tuple[str, bytes]]" = (),
    mtime_ns: int | None = None,
    durable: bool = False,
    draft: str = "",
    draft_fd: int = -1,
    note: "Callable[[int], None] | None" = None,
) -> os.stat_result:
    """Give ``name`` in a directory this content by a rename: readers get the complete old or new file.

    ``owner``: uid and gid, if different from ours; ``attributes``: extended ones; ``mtime_ns``: time of modification,
    None: now; ``durable``: a crash of the machine loses neither; ``draft``: name until then, by default one that
    identifies this process; ``draft_fd``: directory for it, -1: the same; ``note``: called with the new file's number
    (st_ino) right before the rename.  Returns the state of the new file.  Raises OSError; then the old file is
    unchanged, and no draft is left.
    """
    draft, draft_fd = draft or draft_name(), dir_fd if draft_fd < 0 else draft_fd
    fd = os.open(draft, _NEW, 0o600, dir_fd=draft_fd)
    try:
        with open(fd, "wb") as file:
            file.write(content)
            file.flush()
            made = os.fstat(fd)
            if owner not in ((-1, -1), (made.st_uid, made.st_gid)):
                os.fchown(fd, *owner)
            os.fchmod(fd, mode)
            for key, value in attributes:
                _set_attribute(fd, key, value)
            if mtime_ns is not None:
                os.utime(fd, ns=(mtime_ns, mtime_ns))
            if durable:
                os.fsync(fd)
            status = os.fstat(fd)
        if note:
            note(status.st_ino)
        os.rename(draft, name, src_dir_fd=draft_fd, dst_dir_fd=dir_fd)
    except BaseException:
        remove_if_possible(draft_fd, draft)
        raise
    if durable:
        os.fsync(dir_fd)
    return status


def replace_path(path: str, content: bytes, mode: int) -> None:
    """Put a file into an existing directory, atomically and durably; raises OSError."""
    directory, name = os.path.split(path)  # not abspath(): behind a link, ".." is another directory
    fd = os.open(directory or ".", _DIRECTORY)
    try:
        replace_file(name, content, mode, fd, durable=True)
    finally:
        os.close(fd)


def _set_attribute(fd: int, key: str, value: bytes) -> None:
    try:
        os.setxattr(fd, key, value)
    except OSError as error:
        # only root may set security labels: a user's file gets its directory's label, like a new file
        if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOTSUP) or not key.startswith("security."):
            raise


def replace_link(
    name: str,
    target: str,
    dir_fd: int,
    *,
    owner: tuple[int, int] = (-1, -1),
    draft: str = "",
    note: "Callable[[int], None] | None" = None,
) -> None:
    """Make a symbolic link, replacing an existing file or link; the rest as for :func:`replace_file`."""
    draft = draft or draft_name()
    os.symlink(target, draft, dir_fd=dir_fd)
    try:
        made = os.stat(draft, dir_fd=dir_fd, follow_symlinks=False) if note or owner != (-1, -1) else None
        if made and owner not in ((-1, -1), (made.st_uid, made.st_gid)):
            os.chown(draft, *owner, dir_fd=dir_fd, follow_symlinks=False)
        if made and note:
            note(made.st_ino)
        os.rename(draft, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        remove_if_possible(dir_fd, draft)
        raise


def draft_name() -> str:
    """Return a name for a file or link before it is moved into place; the name identifies this process."""
    return f"{DRAFT}{os.getpid()}-{os.urandom(8).hex()}"


def is_draft_left(name: str, proc: str = "/proc", prefix: str = DRAFT) -> bool:
    """Tell whether a name is that of a draft whose process has ended.  ``proc``: path of our procfs.

    ``prefix``: of other names, followed by a process id and a hyphen.
    """
    pid, hyphen, _ = name.removeprefix(prefix).partition("-")
    return bool(name.startswith(prefix) and hyphen and pid.isdecimal()) and not os.path.exists(f"{proc}/{pid}")


def remove_drafts(dir_fd: int, proc: str = "/proc") -> None:
    """Remove the drafts of processes that are gone from a directory; never fails.

    One whose disk was full, or whose cgroup was killed, could not do so.  ``proc``: as above.
    """
    fd = dir_fd
    try:
        if fcntl.fcntl(dir_fd, fcntl.F_GETFL) & os.O_PATH:
            fd = os.open(".", _DIRECTORY, dir_fd=dir_fd)
        with os.scandir(fd) as entries:
            for entry, _ in zip(entries, range(MAX_ENTRIES), strict=False):
                if is_draft_left(entry.name, proc):
                    remove_if_possible(fd, entry.name)
    except OSError:  # the file system fails; or what keeps us from making drafts, too
        return
    finally:
        if fd != dir_fd:
            os.close(fd)


def remove_if_possible(dir_fd: int, name: str) -> None:
    """Remove a file from a directory; a missing file, or one we may not remove, is not an error."""
    try:
        os.unlink(name, dir_fd=dir_fd)
    except OSError:
        return


def remove_ldconfig_draft(dir_fd: int) -> None:
    """Remove the draft that a killed ldconfig left beside the loader's cache; never fails.

    ldconfig writes to ld.so.cache~ and renames it (elf/cache.c of glibc); one running right now fails with a warning.
    """
    try:
        if stat.S_ISREG(os.stat(_LDCONFIG_DRAFT, dir_fd=dir_fd, follow_symlinks=False).st_mode):
            os.unlink(_LDCONFIG_DRAFT, dir_fd=dir_fd)
    except OSError:  # missing, or what keeps us from writing, too
        return


def lock_file(path: str, dir_fd: int | None = None) -> int:
    """Return a descriptor of a file to be locked, made where it is missing; raises OSError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=dir_fd)


def lock(fd: int, seconds: float | None = None, shared: bool = False, pause: float = 0.05) -> bool:
    """Lock an open file until its descriptor is closed (flock(2)); returns whether the lock was obtained in time.

    ``seconds``: None waits for ever, otherwise the attempt is repeated after every ``pause``.  Raises OSError where a
    file system has no locks.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    if seconds is None:
        fcntl.flock(fd, kind)
        return True
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(pause)
        else:
            return True


def _is_trusted(uid: int) -> bool:
    """Tell whether this is root, the caller, or in a user namespace the id that stands for all users outside it.

    There the host's root shows as the overflow id (user_namespaces(7)); so does every other unmapped user, which is
    why the mode must refuse writing to group and others.
    """
    if uid in (0, os.geteuid()):
        return True
    if in_initial_user_namespace():
        return False
    with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
        return uid == int(file.read())


def why_untrusted(uid: int, mode: int) -> str:
    """Return why root must not trust a file of this owner and mode; "" when only root or we may write it.

    In a user namespace :func:`_is_trusted` decides how far the host's root can be recognised.
    """
    if not mode & 0o022 and _is_trusted(uid):
        return ""
    return f"owner {uid}, mode {stat.S_IMODE(mode):04o}: others may write"


def why_replaceable(path: str) -> str:
    """Return why a user other than root and us could replace the file at an existing path; "" if none could.

    The check covers its directory and links; directories further up are their owners' responsibility.  Raises OSError.
    """
    paths = [os.path.abspath(path)]
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        if not _is_trusted(status.st_uid):
            return f"a link of user {status.st_uid}"
        paths.append(os.path.realpath(path))
    for directory in map(os.path.dirname, paths):
        status = os.stat(directory)
        mode = stat.S_IMODE(status.st_mode)
        # where the sticky bit is set, others may add files but not replace ours: inode(7)
        if not _is_trusted(status.st_uid) or (mode & 0o022 and not mode & stat.S_ISVTX):
            return f"directory {directory}: owner {status.st_uid}, mode {mode:04o}: others may replace files"
    return ""


def is_open_to_all(directory: str) -> bool:
    """Tell whether every user can make files and links in a directory; no for a missing one."""
    try:
        return bool(os.stat(directory).st_mode & stat.S_IWOTH)
    except OSError:
        return False


def open_log_file(path: str, mode: int, strict: bool = False) -> int:
    """Return a descriptor that appends to a file, made with ``mode`` if missing.

    Raises OSError, also for anything another user may have put there: a link of either kind, a file of another user,
    and if ``strict`` one that others can write.
    """
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    try:
        status = os.fstat(fd)
        if cause := why_untrusted(status.st_uid, status.st_mode if strict else 0):
            raise OSError(errno.EACCES, cause, path)
        if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            raise OSError(errno.EMLINK, "it has another name", path)
    except OSError:
        os.close(fd)
        raise
    return fd
