"""Small files and modes.  A file or link of the image that one replaces is kept, to be put back."""

import errno
import os
import stat

from ocigpu.core.actions import Mode, TextFile
from ocigpu.core.errors import ApplyError, quoted
from ocigpu.provision.operations.transaction import Transaction, unusable
from ocigpu.system.files import draft_name, replace_file
from ocigpu.system.paths import At, named, open_in_root, opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ocigpu.provision.journal import Entry

MAX_TEXT = 256 << 10
"""Bytes of a text file, ours or the image's that it replaces."""


def write_text(transaction: Transaction, action: TextFile) -> None:
    """Write a small file; raises ApplyError OCIGPU-MNT-2 when something unfit is in its place."""
    content = action.content.encode()
    if len(content) > MAX_TEXT:
        raise ApplyError("OCIGPU-MNT-2", f"{action.describe()}: larger than {MAX_TEXT >> 10} KiB")
    with transaction.at(action.container_path) as at:
        found = at.find()
        if found is not None:
            if not stat.S_ISREG(found.st_mode) and not stat.S_ISLNK(found.st_mode):
                raise unusable(action.describe(), at.path, found)
            if action.only_if_missing and _leads_to_file(transaction.root_fd, at.path):
                return
            if has_content(at, content):
                return
        transaction.require_own(at)
        kept = keep_file(at, transaction.supplies.backup_fd, MAX_TEXT)
        if kept is None:
            raise ApplyError(
                "OCIGPU-MNT-2",
                f"{action.describe()}: the container has no file of at most {MAX_TEXT >> 10} KiB at {quoted(at.path)}",
            )
        transaction.clear(at)
        draft = draft_name()
        transaction.note("text", at.path, content=action.content, temp=draft, **kept)
        with named("write", at.path):
            replace_file(at.name, content, action.mode, at.fd, draft=draft)


def _leads_to_file(root_fd: int, path: str) -> bool:
    try:
        with opened(open_in_root(root_fd, path, os.O_PATH)) as fd:
            return stat.S_ISREG(os.fstat(fd).st_mode)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES):  # a link to nothing
            raise
        return False


def restore_text(transaction: Transaction, entry: "Entry") -> None:
    """Take our file away, or put the image's back; "temp" is the name ours had before it was moved into place."""
    with transaction.own_parent(entry["path"]) as at:
        remove_if_there(at.beside(entry["temp"]))
        if not has_content(at, entry["content"].encode()):
            return
        if entry["kind"] == "none":
            at.unlink()
        else:
            put_back(entry, at, transaction.supplies.backup_fd)


def set_mode(transaction: Transaction, action: Mode) -> None:
    """Set permission bits of the container's own files: a volume or a mounted file belongs to the host.

    A path that may not be changed, or is neither a file nor a directory, is left unchanged with a note.
    """
    path = action.container_path
    try:
        fd = open_in_root(transaction.root_fd, path, os.O_PATH)
    except (FileNotFoundError, NotADirectoryError):
        return
    with opened(fd):
        found = os.fstat(fd)
        old = stat.S_IMODE(found.st_mode)
        if old == action.mode:
            return
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            reason = "it is neither a file nor a directory"
        elif not transaction.is_own(fd):
            reason = "it is mounted from elsewhere"
        else:
            transaction.note("mode", path, old=old, mode=action.mode, ino=found.st_ino)
            try:
                with named("chmod", path):
                    os.chmod(f"fd/{fd}", action.mode)
            except PermissionError:
                reason = "not permitted"
            else:
                return
    transaction.notes.append(f"{path} keeps its mode {old:04o}: {reason}")


def restore_mode(transaction: Transaction, entry: "Entry") -> None:
    """Restore the mode of a file that still has ours."""
    with opened(open_in_root(transaction.root_fd, entry["path"], os.O_PATH)) as fd:
        status = os.fstat(fd)
        unchanged = status.st_ino == entry["ino"] and stat.S_IMODE(status.st_mode) == entry["mode"]
        if unchanged and transaction.is_own(fd):
            with named("chmod", entry["path"]):
                os.chmod(f"fd/{fd}", entry["old"])


def remove_made(transaction: Transaction, entry: "Entry") -> None:
    """Remove a node, an empty file or directory, or a draft."""
    with transaction.own_parent(entry["path"]) as at:
        status, do = at.stat(), entry["do"]
        if do == "mkdir" and stat.S_ISDIR(status.st_mode):
            at.rmdir()
        elif (
            (do == "file" and stat.S_ISREG(status.st_mode) and status.st_size == 0)
            or (do == "node" and stat.S_ISCHR(status.st_mode) and status.st_rdev == entry["rdev"])
            or (do == "draft" and (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)))
        ):
            at.unlink()


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
    """Return a descriptor to read a file, -1 if it is not a regular one: nothing else is ever opened for reading."""
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
