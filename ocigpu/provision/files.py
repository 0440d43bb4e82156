"""Small files of a container: what an action writes or changes in the root file system itself, and that it can.

A path of an image may be anything.  What is written has a new name first and is then renamed over the old one, so a
link at that place is replaced and never followed.
"""

import errno
import os
import stat

from ocigpu.core.actions import Mode, TextFile
from ocigpu.core.errors import ApplyError, quoted
from ocigpu.provision.journal import has_content, keep_file
from ocigpu.provision.mounts import kept_flags, read_mnt_id, remount
from ocigpu.system.files import draft_name, replace_file
from ocigpu.system.paths import open_in_root
from ocigpu.system.proc import read_mounts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ocigpu.provision.workplace import Workplace

MAX_TEXT = 256 << 10
"""Bytes of a text file, ours or the image's that it replaces."""


def make_root_writable(place: "Workplace") -> None:
    """Let the container's root be written to until the journal's entry "writable" is undone, which the caller does.

    A container with a read-only root has one already when crun starts hooks inside it (createContainer); runc makes
    it one after them.  Both have mounted the root directory over itself: where what is below is read-only too, the
    host wants it so and nothing is changed, which the actions will meet.  Raises OSError.
    """
    flags = kept_flags(place.root_fd)
    if not flags & os.ST_RDONLY:
        return
    table = read_mounts("mountinfo")
    mount = table.get(read_mnt_id(place.root_fd))
    below = table.get(mount.parent) if mount is not None else None
    if mount is None or below is None or mount.device != below.device or "ro" in below.options:
        return
    place.journal.record("writable", "/", flags=flags)
    try:
        remount(place.root_fd, flags & ~os.ST_RDONLY)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EPERM, errno.EROFS, errno.EACCES):  # no mount, or a locked flag
            raise


def apply_text(place: "Workplace", action: TextFile) -> None:
    """Write the file of the action.  Raises OSError, ApplyError OCIGPU-MNT-2 when something unfit is in its place."""
    path, content = action.container_path, action.content.encode()
    if len(content) > MAX_TEXT:
        raise ApplyError("OCIGPU-MNT-2", f"{action.describe()}: larger than {MAX_TEXT >> 10} KiB")
    parent_fd, name = place.parent(path)
    try:
        try:
            found = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
        except FileNotFoundError:
            pass
        else:
            if not stat.S_ISREG(found.st_mode) and not stat.S_ISLNK(found.st_mode):
                raise unusable(action.describe(), path, found)
            if action.only_if_missing and _leads_to_file(place.root_fd, path):
                return
            if has_content(parent_fd, name, content):
                return
        kept = keep_file(parent_fd, name, place.backup_fd, MAX_TEXT)
        if kept is None:
            raise ApplyError(
                "OCIGPU-MNT-2",
                f"{action.describe()}: the container has no file of at most {MAX_TEXT >> 10} KiB at {quoted(path)}",
            )
        place.clear(parent_fd)
        temp = draft_name()
        place.journal.record("text", path, content=action.content, temp=temp, **kept)
        replace_file(name, content, action.mode, parent_fd, draft=temp)
    finally:
        os.close(parent_fd)


def _leads_to_file(root_fd: int, path: str) -> bool:
    try:
        fd = open_in_root(root_fd, path, os.O_PATH)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES):  # a link to nothing
            raise
        return False
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode)
    finally:
        os.close(fd)


def apply_mode(place: "Workplace", action: Mode) -> None:
    """Set permission bits, on the root file system and on /dev only: a volume, or a mounted file, is the host's.

    What may not be changed, or is no file or directory, is left with a note.  Raises OSError.
    """
    path = action.container_path
    try:
        fd = open_in_root(place.root_fd, path, os.O_PATH)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        found = os.fstat(fd)
        old = stat.S_IMODE(found.st_mode)
        if old == action.mode:
            return
        reason = ""
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            reason = "it is no file or directory"
        elif read_mnt_id(fd) not in _own_mounts(place.root_fd):
            reason = "it is mounted from elsewhere"
        else:
            place.journal.record("mode", path, old=old, mode=action.mode, ino=found.st_ino)
            try:
                os.chmod(f"fd/{fd}", action.mode)
            except PermissionError:
                reason = "not permitted"
        if reason:
            place.notes.append(f"{path} keeps its mode {old:04o}: {reason}")
    finally:
        os.close(fd)


def _own_mounts(root_fd: int) -> set[int]:
    mounts = {read_mnt_id(root_fd)}
    try:
        fd = open_in_root(root_fd, "/dev", os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return mounts
    try:
        return mounts | {read_mnt_id(fd)}
    finally:
        os.close(fd)


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
