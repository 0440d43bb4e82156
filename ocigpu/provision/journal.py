"""What was done to a container, written down before it is done, and how each thing is undone.

An entry is a JSON object: "do" names the kind, "path" is a path inside the container.  Entries are lines in memory that
the worker shares with its parent: if the worker is killed, the parent can have everything undone.  (A pipe would do
the same, and wake the parent for every line.)  Because an entry comes before its effect, undoing copes with an effect
that never came, and removes only what looks like ours: an empty file, an empty directory, a node of that number, a
link with that target, a file with that content, a mount that was not there before.

Another container on the same root directory may rely on what was made there: on files that it has mounted something
on, on links, on the loader's cache.  Where there is one (:mod:`ocigpu.provision.neighbours`), all this stays, as it
stays of a container that ran; what is this container's alone is undone, above all its mounts.
"""

import errno
import mmap
import os
import stat

from ocigpu.core import rawjson
from ocigpu.provision.mounts import is_own, read_mnt_id, remount
from ocigpu.provision.neighbours import has_neighbours
from ocigpu.system import libc
from ocigpu.system.log import step
from ocigpu.system.paths import open_in_root, open_parent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet
    from typing import Any, TypeAlias

    Entry: TypeAlias = dict[str, Any]

LD_CACHE = "/etc/ld.so.cache"
LD_CACHE_DRAFT = "/etc/ld.so.cache~"
"""Where ldconfig writes before it renames; one that is killed leaves it there."""
_MEMORY = 4 << 20  # bytes of address space; pages that are not written cost nothing
_STEP = 2048  # bytes at the end of it: the step that the worker is at
MAX_LD_CACHE = 16 << 20
"""A loader cache of an image above this many bytes is not kept, and so not changed."""


class Journal:
    """The journal of one worker, in :func:`new_memory`."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.entries: "list[Entry]" = []
        self._memory = memory
        self._end = 0

    def record(self, do: str, path: str, **details: "Any") -> None:
        """Note what is about to be done.  Raises OSError (ENOSPC) when the plan is absurdly long."""
        entry = {"do": do, "path": path, **details}
        line = rawjson.dump(entry).encode()
        end = self._end + len(line)
        if end >= len(self._memory) - _STEP - 1:
            raise OSError(errno.ENOSPC, "the journal is full", path)
        self._memory[self._end : end] = line
        self._memory[end] = ord("\n")  # a line counts from here on: one byte cannot be half written
        self._end = end + 1
        self.entries.append(entry)


def new_memory() -> mmap.mmap:
    """Return zeroed memory that processes forked from now on share with us."""
    return mmap.mmap(-1, _MEMORY + _STEP)


def read_journal(memory: mmap.mmap) -> "list[Entry]":
    """Return the entries that a worker, now ended, has noted."""
    *lines, _ = memory[: memory.find(b"\0")].split(b"\n")
    return [rawjson.parse(line.decode()) for line in lines]


def write_step(memory: mmap.mmap, text: str) -> None:
    """Let the other process know what this one is about to do."""
    data = text.encode("utf-8", "backslashreplace")[: _STEP - 1] + b"\0"
    start = len(memory) - _STEP
    memory[start : start + len(data)] = data


def read_step(memory: mmap.mmap) -> str:
    """Return what the worker was last about to do, "" for nothing yet."""
    return memory[len(memory) - _STEP :].partition(b"\0")[0].decode("utf-8", "replace")


def undo(
    entries: "list[Entry]", root_fd: int, backup_fd: int, host_devices: "AbstractSet[int]" = frozenset()
) -> list[str]:
    """Undo all entries, last one first; return a line about each that could not be undone.

    Runs in the container's mount namespace with /proc/self as working directory.  ``backup_fd`` holds the content of
    files that were replaced; ``host_devices``: as for :func:`ocigpu.provision.mounts.is_own`.  Undoing twice is like
    undoing once.
    """
    left = []
    shared = any(entry["do"] in _LASTING for entry in entries) and has_neighbours(root_fd)
    for entry in reversed(entries):
        try:
            if shared and entry["do"] in _LASTING and not _is_private(entry, root_fd, host_devices):
                continue
            with step(f"undo-{entry['do']}", entry["path"]):
                _UNDO[entry["do"]](entry, root_fd, backup_fd)
        except FileNotFoundError:  # the effect never came, or is undone already
            pass
        except OSError as error:
            left.append(f"{entry['do']} {entry['path']}: {error.strerror}")
    return left


def _is_private(entry: "Entry", root_fd: int, host_devices: "AbstractSet[int]") -> bool:
    """Tell whether an entry is about a directory that only this container has; raises OSError."""
    parent_fd, _ = open_parent(root_fd, entry["path"])
    try:
        return is_own(parent_fd, root_fd, host_devices)
    finally:
        os.close(parent_fd)


def _undo_mount(entry: "Entry", root_fd: int, _: int) -> None:
    fd = open_in_root(root_fd, entry["path"], os.O_PATH | os.O_NOFOLLOW)
    try:
        mnt_id = read_mnt_id(fd)
        if mnt_id != entry["under"] and entry["mount"] in (0, mnt_id):
            libc.umount2(f"fd/{fd}", libc.MNT_DETACH)
    finally:
        os.close(fd)


def _undo_created(entry: "Entry", root_fd: int, _: int) -> None:
    parent_fd, name = open_parent(root_fd, entry["path"])
    try:
        status = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
        mode = status.st_mode
        if entry["do"] == "mkdir" and stat.S_ISDIR(mode):
            os.rmdir(name, dir_fd=parent_fd)
        elif (
            (entry["do"] == "file" and stat.S_ISREG(mode) and status.st_size == 0)
            or (entry["do"] == "node" and stat.S_ISCHR(mode) and status.st_rdev == entry["rdev"])
            or (entry["do"] == "draft" and (stat.S_ISREG(mode) or stat.S_ISLNK(mode)))
        ):
            os.unlink(name, dir_fd=parent_fd)
    finally:
        os.close(parent_fd)


def _undo_link(entry: "Entry", root_fd: int, _: int) -> None:
    """Take our link away, or put the image's back.

    "temp" is the name ours had before it was moved into place, "ino" its number: another start may have made it anew.
    """
    parent_fd, name = open_parent(root_fd, entry["path"])
    try:
        if read_link(parent_fd, entry["temp"]) == entry["target"]:
            os.unlink(entry["temp"], dir_fd=parent_fd)
        if entry.get("ino") not in (None, os.stat(name, dir_fd=parent_fd, follow_symlinks=False).st_ino):
            return
        if read_link(parent_fd, name) == entry["target"]:
            if entry["old"] is None:
                os.unlink(name, dir_fd=parent_fd)
            else:
                _make_link(parent_fd, entry["temp"], entry["old"])
                os.rename(entry["temp"], name, src_dir_fd=parent_fd, dst_dir_fd=parent_fd)
    finally:
        os.close(parent_fd)


def _undo_unlink(entry: "Entry", root_fd: int, _: int) -> None:
    parent_fd, name = open_parent(root_fd, entry["path"])
    try:
        _make_link(parent_fd, name, entry["old"])
    except FileExistsError:  # it was never taken away
        pass
    finally:
        os.close(parent_fd)


def read_link(dir_fd: int, name: str) -> str | None:
    """Return the target of a symbolic link, None for anything else."""
    try:
        return os.readlink(name, dir_fd=dir_fd)
    except OSError:  # missing (ENOENT) or no link (EINVAL)
        return None


def read_old_link(dir_fd: int, name: str) -> "list[Any]":
    """Return [target, uid, gid] of a symbolic link, as entries keep it; raises OSError."""
    status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    return [os.readlink(name, dir_fd=dir_fd), status.st_uid, status.st_gid]


def _make_link(dir_fd: int, name: str, old: "list[Any]") -> None:
    target, uid, gid = old
    os.symlink(target, name, dir_fd=dir_fd)
    status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    if (status.st_uid, status.st_gid) != (uid, gid):
        os.chown(name, uid, gid, dir_fd=dir_fd, follow_symlinks=False)


def keep_ld_cache(root_fd: int, backup_fd: int) -> "dict[str, Any] | None":
    """Return :func:`keep_file` of the image's loader cache, of at most :data:`MAX_LD_CACHE` bytes."""
    try:
        parent_fd, name = open_parent(root_fd, LD_CACHE)
    except FileNotFoundError:
        return {"kind": "none"}
    try:
        return keep_file(parent_fd, name, backup_fd, MAX_LD_CACHE)
    finally:
        os.close(parent_fd)


def keep_file(parent_fd: int, name: str, backup_fd: int, limit: int) -> "dict[str, Any] | None":
    """Add the content of a file to ``backup_fd``; return what an entry needs to put it back, None if it cannot be kept.

    "kind" is "none" when there is no such file, "link" for a symbolic link, "file" for a regular file of at most
    ``limit`` bytes, whose content begins at "offset".
    """
    try:
        if stat.S_ISLNK(os.stat(name, dir_fd=parent_fd, follow_symlinks=False).st_mode):
            return {"kind": "link", "old": read_old_link(parent_fd, name)}
        fd = _open_regular(parent_fd, name)
    except FileNotFoundError:
        return {"kind": "none"}
    if fd < 0:
        return None
    try:
        status = os.fstat(fd)
        if status.st_size > limit:
            return None
        offset = os.lseek(backup_fd, 0, os.SEEK_END)
        size = 0
        while size < status.st_size:
            sent = os.sendfile(backup_fd, fd, None, status.st_size - size)
            if not sent:
                break
            size += sent
    finally:
        os.close(fd)
    mode, uid, gid = stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
    same = [status.st_ino, status.st_mtime_ns]
    return {"kind": "file", "offset": offset, "size": size, "mode": mode, "uid": uid, "gid": gid, "same": same}


def _open_regular(dir_fd: int, name: str) -> int:
    """Return a descriptor to read ``name``, -1 if it is no regular file: nothing else is ever opened for reading."""
    path_fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        if not stat.S_ISREG(os.fstat(path_fd).st_mode):
            return -1
        return os.open(f"fd/{path_fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(path_fd)


def _undo_cache(entry: "Entry", root_fd: int, backup_fd: int) -> None:
    parent_fd, name = open_parent(root_fd, entry["path"])
    try:
        if entry["kind"] == "none":
            if stat.S_ISREG(os.stat(name, dir_fd=parent_fd, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=parent_fd)
        elif entry["kind"] == "link":
            if read_link(parent_fd, name) != entry["old"][0]:
                _put_back(entry, parent_fd, name, backup_fd)
        elif not _is_same(parent_fd, name, entry["same"]):
            _put_back(entry, parent_fd, name, backup_fd)
    finally:
        os.close(parent_fd)


def _undo_text(entry: "Entry", root_fd: int, backup_fd: int) -> None:
    """Take our file away, or put the image's back; "temp" is the name ours had before it was moved into place."""
    parent_fd, name = open_parent(root_fd, entry["path"])
    try:
        _unlink_if_there(parent_fd, entry["temp"])
        if not has_content(parent_fd, name, entry["content"].encode()):
            return
        if entry["kind"] == "none":
            os.unlink(name, dir_fd=parent_fd)
        else:
            _put_back(entry, parent_fd, name, backup_fd)
    finally:
        os.close(parent_fd)


def _put_back(entry: "Entry", parent_fd: int, name: str, backup_fd: int) -> None:
    """Replace ``name`` by the link or file that :func:`keep_file` has kept."""
    temp = entry["temp"]
    _unlink_if_there(parent_fd, temp)  # of an undoing that was killed
    if entry["kind"] == "link":
        _make_link(parent_fd, temp, entry["old"])
    else:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temp, flags, 0o600, dir_fd=parent_fd)
        try:
            done = 0
            while done < entry["size"]:
                data = os.pread(backup_fd, min(1 << 20, entry["size"] - done), entry["offset"] + done)
                if not data:
                    break
                done += os.write(fd, data)
            os.fchown(fd, entry["uid"], entry["gid"])
            os.fchmod(fd, entry["mode"])
            os.utime(fd, ns=(entry["same"][1], entry["same"][1]))
        finally:
            os.close(fd)
    os.rename(temp, name, src_dir_fd=parent_fd, dst_dir_fd=parent_fd)


def _unlink_if_there(dir_fd: int, name: str) -> None:
    try:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)  # a read-only root answers EROFS, missing or not
    except FileNotFoundError:
        return
    os.unlink(name, dir_fd=dir_fd)


def has_content(dir_fd: int, name: str, content: bytes) -> bool:
    """Tell whether ``name`` is a regular file, no link, of exactly this content.  Raises OSError."""
    fd = _open_regular(dir_fd, name)
    if fd < 0:
        return False
    with open(fd, "rb") as file:
        return os.fstat(fd).st_size == len(content) and file.read(len(content) + 1) == content


def _undo_mode(entry: "Entry", root_fd: int, _: int) -> None:
    fd = open_in_root(root_fd, entry["path"], os.O_PATH)
    try:
        status = os.fstat(fd)
        if status.st_ino == entry["ino"] and stat.S_IMODE(status.st_mode) == entry["mode"]:
            os.chmod(f"fd/{fd}", entry["old"])
    finally:
        os.close(fd)


def _is_same(dir_fd: int, name: str, same: list[int]) -> bool:
    """Tell whether the cache is still the image's own file: then ldconfig never came to replace it."""
    try:
        status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return [status.st_ino, status.st_mtime_ns] == same


def _undo_writable(entry: "Entry", root_fd: int, _: int) -> None:
    remount(root_fd, entry["flags"])


_LASTING = ("mkdir", "file", "node", "link", "unlink", "cache", "text", "mode")
"""What is undone only where no other container has the same root directory."""
_UNDO: "dict[str, Callable[[Entry, int, int], None]]" = {
    "mount": _undo_mount,
    "mkdir": _undo_created,
    "file": _undo_created,
    "node": _undo_created,
    "draft": _undo_created,
    "link": _undo_link,
    "unlink": _undo_unlink,
    "cache": _undo_cache,
    "text": _undo_text,
    "mode": _undo_mode,
    "writable": _undo_writable,
}
