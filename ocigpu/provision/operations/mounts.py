"""Mounts of the host's files and directories, and small file systems of our own."""

import errno
import os
import stat

from ocigpu.core.actions import Bind, Tmpfs
from ocigpu.provision import mounts
from ocigpu.provision.mounts import MountTarget, Source, read_mnt_id
from ocigpu.provision.operations.files import make_old_link, read_old_link
from ocigpu.provision.operations.transaction import Transaction, is_in_proc, unusable
from ocigpu.system import libc
from ocigpu.system.paths import At, named, open_in_root, opened
from ocigpu.system.proc import read_mounts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ocigpu.provision.journal import Entry


def bind(transaction: Transaction, action: Bind) -> None:
    """Mount a file, directory or socket of the host; an optional one that has vanished is a note of its own."""
    try:
        source = transaction.source(action.host_path, action.kind, action.options)
    except FileNotFoundError:
        if not action.optional:
            raise
        transaction.notes.append(f"{action.host_path} has vanished from the host and was left out")
        return
    with transaction.at(action.container_path) as at:
        _bind_at(transaction, action, source, at)


def _bind_at(transaction: Transaction, action: Bind, source: Source, at: At) -> None:
    directory = action.kind == "directory"
    found = at.find()
    if found is not None and stat.S_ISLNK(found.st_mode):
        transaction.require_own(at)
        transaction.note("unlink", at.path, old=read_old_link(at))
        at.unlink()
        found = None
    if found is None:
        if is_in_proc(at.path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"stat {at.path}")
        transaction.require_own(at)
        transaction.note("mkdir" if directory else "file", at.path)
        if directory:
            at.mkdir(0o755)
        else:
            at.create(0o555 if source.status.st_mode & 0o111 and action.kind == "file" else 0o444)
    if not directory:
        mount_on_file(transaction, source, at)
        return
    try:
        fd = at.open(os.O_PATH | os.O_DIRECTORY)
    except NotADirectoryError as error:
        raise unusable(action.describe(), at.path, at.stat()) from error
    _mount(transaction, source, MountTarget(at, fd))


def mount_on_file(transaction: Transaction, source: Source, at: At) -> None:
    """Mount a file, socket or node on a regular file or socket; anything else there is refused."""
    target = MountTarget(at, at.open())
    found = os.fstat(target.fd)
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISSOCK(found.st_mode):
        os.close(target.fd)
        raise unusable(f"bind {source.host_path} -> {at.path}", at.path, found)
    _mount(transaction, source, target)


def _mount(transaction: Transaction, source: Source, target: MountTarget) -> None:
    """Mount and close both; does nothing if the mount exists, as for a hook that runs twice."""

    def by_name() -> None:
        with named("openat", source.host_path):
            fd = os.open(source.host_path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            mounts.bind_by_name(fd, source, target)
        finally:
            os.close(fd)

    with target:
        if not mounts.is_bound(source, target):
            transaction.mount(target, source.tree_fd, by_name)
        elif source.tree_fd >= 0:
            os.close(source.tree_fd)


def cover_with_tmpfs(transaction: Transaction, action: Tmpfs) -> None:
    """Mount a small read-only file system of our own."""
    uid, gid = transaction.uid, transaction.gid
    with transaction.at(action.container_path) as at:
        found = at.find()
        if found is None:
            if is_in_proc(at.path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"stat {at.path}")
            transaction.require_own(at)
            transaction.note("mkdir", at.path)
            at.mkdir(0o555)
        elif not stat.S_ISDIR(found.st_mode):
            raise unusable(action.describe(), at.path, found)
        with MountTarget(at, at.open(os.O_PATH | os.O_DIRECTORY)) as target:
            if not mounts.is_equal_tmpfs(action, uid, gid, target):
                tree_fd = mounts.new_tmpfs(action, uid, gid) if transaction.supplies.new_calls else -1
                transaction.mount(target, tree_fd, lambda: mounts.tmpfs_by_name(action, uid, gid, target))


def unmount(transaction: Transaction, entry: "Entry") -> None:
    """Take away a mount that was not there before."""
    with opened(open_in_root(transaction.root_fd, entry["path"], os.O_PATH | os.O_NOFOLLOW)) as fd:
        mnt_id = read_mnt_id(fd)
        if mnt_id != entry["under"] and entry["mount"] in (0, mnt_id):
            libc.umount2(f"fd/{fd}", libc.MNT_DETACH, entry["path"])


def restore_link(transaction: Transaction, entry: "Entry") -> None:
    """Put back a link of the image that was in the way of a mount."""
    with transaction.own_parent(entry["path"]) as at:
        try:
            make_old_link(at, entry["old"])
        except FileExistsError:  # it was never taken away
            return


def make_root_writable(transaction: Transaction) -> None:
    """Let the container's root be written to until that is undone, which the caller does.

    A container with a read-only root has one already when crun starts hooks inside it (createContainer); runc makes
    it one after them.  Both have mounted the root directory over itself: where what is below is read-only too, the
    host wants it so and nothing is changed, which the actions will meet.  Raises OSError.
    """
    flags = mounts.kept_flags(transaction.root_fd)
    if not flags & os.ST_RDONLY:
        return
    table = read_mounts("mountinfo")
    mount = table.get(read_mnt_id(transaction.root_fd))
    below = table.get(mount.parent) if mount is not None else None
    if mount is None or below is None or mount.device != below.device or "ro" in below.options:
        return
    transaction.note("writable", "/", flags=flags)
    try:
        mounts.remount(transaction.root_fd, flags & ~os.ST_RDONLY, "/")
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EPERM, errno.EROFS, errno.EACCES):  # no mount, or a locked flag
            raise


def make_root_read_only(transaction: Transaction, entry: "Entry") -> None:
    """Restore the mount flags of the container's root."""
    mounts.remount(transaction.root_fd, entry["flags"], "/")
