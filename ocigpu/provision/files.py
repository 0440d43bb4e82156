"""Small files of an image that a step replaces: what they were, kept to be put back."""

import os
import stat

from ocigpu.core.errors import ApplyError, quoted
from ocigpu.system.files import replace_file
from ocigpu.system.paths import At, named, opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias

    Entry: TypeAlias = dict[str, Any]


def keep_file(at: At, backup_fd: int, limit: int) -> "Entry | None":
    """Add the content of a file to ``backup_fd``; return what an entry needs to put it back, None if it cannot be kept.

    "kind" is "none" when there is no such file, "link" for a symbolic link, "file" for a regular file of at most
    ``limit`` bytes, whose content begins at "offset".  Raises OSError.
    """
    found = at.find()
    if found is None:
        return {"kind": "none"}
    if stat.S_ISLNK(found.st_mode):
        return {"kind": "link", "old": read_old_link(at)}
    fd = _open_regular(at)
    if fd < 0:
        return None
    try:
        status = os.fstat(fd)
        if status.st_size > limit:
            return None
        offset, size = os.lseek(backup_fd, 0, os.SEEK_END), 0
        with named("sendfile", at.path):
            while size < status.st_size and (sent := os.sendfile(backup_fd, fd, None, status.st_size - size)):
                size += sent
    finally:
        os.close(fd)
    mode, uid, gid = stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
    same = [status.st_ino, status.st_mtime_ns]
    return {"kind": "file", "offset": offset, "size": size, "mode": mode, "uid": uid, "gid": gid, "same": same}


def put_back(entry: "Entry", at: At, backup_fd: int) -> None:
    """Replace a file by the link or file that :func:`keep_file` has kept.  Raises OSError."""
    draft = at.beside(entry["temp"])
    remove_if_there(draft)  # of an undoing that was killed
    if entry["kind"] == "link":
        make_old_link(draft, entry["old"])
        draft.rename(at.name)
        return
    content = os.pread(backup_fd, entry["size"], entry["offset"])
    owner, mtime = (entry["uid"], entry["gid"]), entry["same"][1]
    with named("write", at.path):
        replace_file(at.name, content, entry["mode"], at.fd, owner=owner, mtime_ns=mtime, draft=draft.name)


def _open_regular(at: At) -> int:
    """Return a descriptor to read a file, -1 if it is no regular one: nothing else is ever opened for reading."""
    with opened(at.open()) as path_fd:
        if not stat.S_ISREG(os.fstat(path_fd).st_mode):
            return -1
        with named("open", at.path):
            return os.open(f"fd/{path_fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def has_content(at: At, content: bytes) -> bool:
    """Tell whether it is a regular file, no link, of exactly this content.  Raises OSError."""
    fd = _open_regular(at)
    if fd < 0:
        return False
    with named("read", at.path), open(fd, "rb") as file:
        return os.fstat(fd).st_size == len(content) and file.read(len(content) + 1) == content


def is_same(at: At, same: list[int]) -> bool:
    """Tell whether it is still the file that :func:`keep_file` has seen."""
    status = at.find()
    return status is not None and [status.st_ino, status.st_mtime_ns] == same


def read_link(at: At) -> str | None:
    """Return the target of a symbolic link, None for anything else."""
    try:
        return at.readlink()
    except OSError:  # missing (ENOENT) or no link (EINVAL)
        return None


def read_old_link(at: At) -> "list[Any]":
    """Return [target, uid, gid] of a symbolic link, as entries keep it; raises OSError."""
    status = at.stat()
    return [at.readlink(), status.st_uid, status.st_gid]


def make_old_link(at: At, old: "list[Any]") -> None:
    """Make a link as :func:`read_old_link` has found it; raises OSError."""
    target, uid, gid = old
    at.symlink(target)
    status = at.stat()
    if (status.st_uid, status.st_gid) != (uid, gid):
        with named("chown", at.path):
            os.chown(at.name, uid, gid, dir_fd=at.fd, follow_symlinks=False)


def remove_if_there(at: At) -> None:
    """Remove a file; raises OSError, but not for one that is missing."""
    if at.find() is not None:  # asked first: a read-only root answers EROFS, missing or not
        at.unlink()


def unusable(what: str, path: str, found: os.stat_result, code: str = "OCIGPU-MNT-2") -> ApplyError:
    """Return the error that says what the container has at ``path``."""
    kinds = {
        stat.S_IFREG: "a file",
        stat.S_IFDIR: "a directory",
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFBLK: f"a block device {os.major(found.st_rdev)}:{os.minor(found.st_rdev)}",
        stat.S_IFCHR: f"a device {os.major(found.st_rdev)}:{os.minor(found.st_rdev)}",
    }
    kind = kinds.get(stat.S_IFMT(found.st_mode), "something")
    return ApplyError(code, f"{what}: the container has {kind} at {quoted(path)}")
