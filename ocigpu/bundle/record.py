"""Records every change to a root directory before the runtime starts, so that it can be undone.

A shim that fails or is signalled undoes it itself.  For a killed shim there is a file below /run/ocigpu, which is
removed when everything is made: the next start in mode spec or cdi on the same root directory undoes what the file
names.  No other start does, because a file system that blocked one container would block it too.
"""

import errno
import os
from binascii import crc32

from ocigpu.core import rawjson
from ocigpu.system.files import is_draft_left, remove_if_possible
from ocigpu.system.log import step
from ocigpu.system.store import open_cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias

    Entry: TypeAlias = dict[str, Any]

PREFIX = "undo-"
MAX_LEFT = 64
"""Maximum of records of other root directories that stay until the next boot; those may never be used again."""
_CONTENTS = 1 << 20
"""Offset in the file of the contents of replaced files; entries, as in the worker's journal, come before."""
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Record:
    """The record of one root directory; changes left by a killed start are undone at once.

    ``simulated``: as for open_cache; None: the record exists only in this process, as it does if no file can be
    written.  ``entries`` are those of :mod:`ocigpu.provision.operations`.
    """

    def __init__(self, root_fd: int, simulated: str | None = None) -> None:
        self.entries: "list[Entry]" = []
        self._root_fd, self._kept = root_fd, list[tuple[int, bytes]]()
        self._size, self._end, self._fd, self._undoing = 0, _CONTENTS, -1, False
        self._directory = -1 if simulated is None else open_cache(True, simulated)
        if self._directory >= 0:
            self._path = os.readlink(f"/proc/self/fd/{root_fd}")
            key = f"-{crc32(os.fsencode(self._path)):08x}"
            self._name = f"{PREFIX}{os.getpid()}{key}"
            names = os.listdir(self._directory)
            left = [name for name in names if name == self._name or is_draft_left(name, prefix=PREFIX)]
            for name in left:
                if name.endswith(key):
                    self._undo_left(name)
                elif len(left) > MAX_LEFT:
                    remove_if_possible(self._directory, name)

    def note(self, do: str, path: str, **details: "Any") -> None:
        """Record a change that is about to be made."""
        self.entries.append({"do": do, "path": path, **details})
        self._write(self.entries[-1])

    def keep(self, content: bytes, status: os.stat_result | None) -> "Entry":
        """Store the content of a file of this state; return what an entry needs to restore it, None on failure."""
        if status is None:
            return {"kind": "none"}
        at, self._end = self._end, self._end + len(content)
        self._kept.append((at, content))
        self._write({}, at, content)
        same = [status.st_ino, status.st_mtime_ns]
        owner = {"mode": status.st_mode & 0o7777, "uid": status.st_uid, "gid": status.st_gid}
        return {"kind": "file", "offset": at, "size": len(content), "same": same, **owner}

    def undo(self) -> None:
        """Undo everything, the last change first; files that another process has changed since stay."""
        self._undoing, entries = True, self.entries
        backup_fd = os.memfd_create("ocigpu-backup")
        try:
            try:
                for at, content in self._kept:
                    os.pwrite(backup_fd, content, at)
            except OSError:  # a limit of file sizes: no file could be put back
                entries = [entry for entry in entries if entry.get("kind") != "file"]
            _undo(self._root_fd, entries, backup_fd)
        finally:
            os.close(backup_fd)
        self._undoing = False

    def close(self) -> None:
        """Remove the record, because everything is made or undone, unless undoing was interrupted."""
        if self._fd >= 0:
            if not self._undoing:
                remove_if_possible(self._directory, self._name)
            os.close(self._fd)
        if self._directory >= 0:
            os.close(self._directory)
        self._fd = self._directory = -1

    def _write(self, entry: "Entry", at: int = 0, content: bytes = b"") -> None:
        """Write an entry, or a content at its offset, to the file, whose first line identifies the root directory."""
        if self._directory < 0:
            return
        try:
            data = content or rawjson.dump(entry).encode() + b"\n"
            if self._fd < 0:
                self._fd = os.open(self._name, _NEW, 0o600, dir_fd=self._directory)
                os.ftruncate(self._fd, _CONTENTS)
                found = os.fstat(self._root_fd)
                self._write({"do": "root", "path": self._path, "dev": found.st_dev, "ino": found.st_ino})
            if not at:
                at, self._size = self._size, self._size + len(data)
            if self._size > _CONTENTS or os.pwrite(self._fd, data, at) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:  # no space: the record exists only in this process
            self.close()

    def _undo_left(self, name: str) -> None:
        from ocigpu.provision.journal import parse_entries

        try:
            os.rename(name, self._name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
            fd = os.open(self._name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._directory)
        except OSError:  # another start was faster
            return
        try:
            begin, *entries = parse_entries(os.pread(fd, _CONTENTS, 0).partition(b"\0")[0])
            found = os.fstat(self._root_fd)
            if (begin["dev"], begin["ino"]) == (found.st_dev, found.st_ino):
                with step("undo-links", self._path, "left by a start that was killed"):
                    _undo(self._root_fd, entries, fd)
        except (ValueError, TypeError, KeyError):  # empty, or written by different code of this version
            pass
        finally:
            os.close(fd)
        remove_if_possible(self._directory, self._name)


def _undo(root_fd: int, entries: "list[Entry]", backup_fd: int) -> None:
    """Undo entries, as a worker does; if another container uses this root directory, what was made in it stays."""
    from ocigpu.provision.journal import Journal
    from ocigpu.provision.operations import undo
    from ocigpu.provision.operations.transaction import Supplies, Transaction

    here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.chdir("/proc/self")
        undo(Transaction(root_fd, Journal(), Supplies(False, {}, backup_fd=backup_fd)), entries)
    finally:
        os.fchdir(here)
        os.close(here)
