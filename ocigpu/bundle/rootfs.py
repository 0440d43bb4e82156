"""What mode ``spec`` makes in a container's root directory before the low-level runtime starts: links, loader cache.

Everything goes by descriptor below the root directory, which is hostile (:mod:`ocigpu.system.paths`).  What stays when
this process is killed in between, or when the runtime fails later, is like the empty files that the runtime itself
makes to mount on: in the container's own layer, and not in the way of another try.
"""

import errno
import os
import stat
import time

from ocigpu.bundle.declared import LD_CACHE
from ocigpu.bundle.loader_cache import merge_ld_cache
from ocigpu.system.files import remove_drafts, remove_ldconfig_draft, replace_file, replace_link
from ocigpu.system.log import step
from ocigpu.system.paths import make_directories, open_in_root, open_parent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_YOUNG_NS = 120_000_000_000
"""A link that is younger may be of a start that has yet to fail, and to take it away again."""
MAX_LD_CACHE = 8 << 20
MAX_PATH = 4096
"""PATH_MAX of include/uapi/linux/limits.h."""
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class NeedsHookError(Exception):
    """Says what of a root directory only the hook can deal with."""


class RootDirectory:
    """A container's root directory while links and the loader's cache are made in it; all of it can be undone."""

    def __init__(self, root_fd: int) -> None:
        self.root_fd = root_fd
        self._parents: dict[str, int] = {}
        self._made: list[str] = []
        self._links: list[tuple[int, str, str, str, os.stat_result | None]] = []
        self._inodes: dict[tuple[int, str], int] = {}
        self._cleared: set[int] = set()
        self._files: list[tuple[int, str, bytes, os.stat_result | None, tuple[int, int]]] = []

    def close(self) -> None:
        """Close the descriptors but the root's; nothing can be undone any more."""
        for fd in self._parents.values():
            os.close(fd)
        self._parents.clear()

    def undo(self) -> None:
        """Put everything back as it was, the last change first; what somebody else has changed since stays.

        All of it stays where another container has this root directory.
        """
        from ocigpu.provision.mounts import has_neighbours

        if has_neighbours(self.root_fd, "/proc/self"):
            return
        for file in reversed(self._files):
            _undo_file(*file)
        for parent_fd, name, target, old, owner in reversed(self._links):
            try:
                found = os.stat(name, dir_fd=parent_fd, follow_symlinks=False).st_ino
                same = self._inodes.get((parent_fd, name), found) == found  # else another start has made it anew
                if same and os.readlink(name, dir_fd=parent_fd) == target:
                    os.unlink(name, dir_fd=parent_fd)
                    if owner is not None:
                        os.symlink(old, name, dir_fd=parent_fd)
                        _give_link(parent_fd, name, owner)
            except OSError:  # changed since, or the file system fails: another try starts from what is there
                continue
        for path in reversed(self._made):
            try:
                parent_fd, name, _ = open_parent(self.root_fd, path)
            except OSError:
                continue
            try:
                os.rmdir(name, dir_fd=parent_fd)
            except OSError:  # no longer empty
                continue
            finally:
                os.close(parent_fd)

    def make_links(self, links: "Sequence[tuple[str, str]]") -> None:
        """Make symbolic links, pairs of (container path, target); one with another target is replaced.

        Missing directories are made (0755); owners are the parent directory's.
        Raises NeedsHookError for something that is no link in the place of one, and OSError.
        """
        for path, target in links:
            parent, _, name = path.rpartition("/")
            with step("link", path, f"to {target}"):
                self._make_link(self._parent(parent), name, target, path)

    def _parent(self, path: str) -> int:
        if path not in self._parents:
            made = len(self._made)
            self._parents[path] = make_directories(self.root_fd, path, 0o755, self._made.append)
            for one in self._made[made:]:
                self._give_directory(one)
        return self._parents[path]

    def _give_directory(self, path: str) -> None:
        """Give a directory that was made the owner of its parent, and the mode that the umask may have narrowed."""
        parent_fd, name, _ = open_parent(self.root_fd, path)
        try:
            owner = os.fstat(parent_fd)
            fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent_fd)
        finally:
            os.close(parent_fd)
        try:
            if not _is_own(owner):
                os.fchown(fd, owner.st_uid, owner.st_gid)
            os.fchmod(fd, 0o755)
        finally:
            os.close(fd)

    def _clear(self, parent_fd: int) -> None:
        """Remove what starts that were killed have left in a directory; once."""
        if parent_fd not in self._cleared:
            self._cleared.add(parent_fd)
            remove_drafts(parent_fd)

    def _make_link(self, parent_fd: int, name: str, target: str, path: str) -> None:
        old, owner = "", None
        try:
            os.symlink(target, name, dir_fd=parent_fd)
        except FileExistsError:
            self._clear(parent_fd)
            try:
                old = os.readlink(name, dir_fd=parent_fd)
                owner = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                raise NeedsHookError(f"the image has something else than a link at {path}") from error
            if old == target:
                if time.time_ns() - owner.st_ctime_ns < _YOUNG_NS:
                    _renew(parent_fd, name, target)
                return
            replace_link(name, target, parent_fd)
        self._links.append((parent_fd, name, target, old, owner))
        self._inodes[parent_fd, name] = os.stat(name, dir_fd=parent_fd, follow_symlinks=False).st_ino
        _give_link(parent_fd, name, os.fstat(parent_fd))

    def extend_ld_cache(self, libraries: "Sequence[tuple[str, str, int]]") -> None:
        """Let the container's loader find libraries, as (name, container path, bits), besides what its cache has.

        Raises NeedsHookError for a cache that cannot be read or extended, and OSError.
        """
        parent, _, name = LD_CACHE.rpartition("/")
        parent_fd = self._parent(parent)
        data, merged, status = _extended(parent_fd, name, libraries)
        self._clear(parent_fd)
        remove_ldconfig_draft(parent_fd)
        if merged != data:
            mode = stat.S_IMODE(status.st_mode) if status else 0o644
            self._write(parent_fd, name, data, status, merged, mode)

    def write_files(self, files: "Sequence[tuple[str, int, str, bool]]") -> None:
        """Write files, as (container path, mode, content, only if it is missing); equal ones are left alone.

        Raises NeedsHookError for something else in the place of one, and OSError.
        """
        for path, mode, text, only_if_missing in files:
            parent, _, name = path.rpartition("/")
            parent_fd = self._parent(parent)
            data, status = _read_old(parent_fd, name, path)
            self._clear(parent_fd)
            content = text.encode("utf-8", "surrogateescape")
            if status is None or (data != content and not only_if_missing):
                self._write(parent_fd, name, data, status, content, mode)

    def _write(
        self, parent_fd: int, name: str, old: bytes, status: os.stat_result | None, content: bytes, mode: int
    ) -> None:
        written = _write_beside(parent_fd, name, content, mode, status or os.fstat(parent_fd))
        self._files.append((parent_fd, name, old, status, written))


def _undo_file(parent_fd: int, name: str, old: bytes, status: os.stat_result | None, written: tuple[int, int]) -> None:
    try:
        now = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
        if (now.st_dev, now.st_ino) != written:
            return
        if status is None:
            os.unlink(name, dir_fd=parent_fd)
        else:
            _write_beside(parent_fd, name, old, stat.S_IMODE(status.st_mode), status)
    except OSError:  # the file system fails: another try starts from what is there
        return


def _renew(parent_fd: int, name: str, target: str) -> None:
    """Make a link anew that another start has just made: if that one fails, it takes away none but its own."""
    try:
        replace_link(name, target, parent_fd)
        _give_link(parent_fd, name, os.fstat(parent_fd))
    except OSError:  # nobody can write here, to take it away either
        return


def find_obstacle(root_fd: int, links: "Sequence[tuple[str, str]]", libraries: "Sequence[tuple[str, str, int]]") -> str:
    """Return why links and cache could not be made in a root directory, as far as looking tells; "" for no reason."""
    try:
        for path, _ in links:
            fd = _open_if_there(root_fd, path, os.O_NOFOLLOW)
            if fd >= 0:
                mode = os.fstat(fd).st_mode
                os.close(fd)
                if not stat.S_ISLNK(mode):
                    raise NeedsHookError(f"the image has something else than a link at {path}")
        parent, _, name = LD_CACHE.rpartition("/")
        parent_fd = _open_if_there(root_fd, parent, os.O_DIRECTORY) if libraries else -1
        if parent_fd >= 0:
            try:
                _extended(parent_fd, name, libraries)
            finally:
                os.close(parent_fd)
    except NeedsHookError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    return ""


def _open_if_there(root_fd: int, path: str, flags: int) -> int:
    try:
        return open_in_root(root_fd, path, os.O_PATH | flags)
    except FileNotFoundError:
        return -1


def _extended(
    parent_fd: int, name: str, libraries: "Sequence[tuple[str, str, int]]"
) -> "tuple[bytes, bytes, os.stat_result | None]":
    """Return the loader's cache in a directory, the same with libraries added, and its status if there is one.

    Raises NeedsHookError for a cache that cannot be read or extended, and OSError.
    """
    data, status = _read_old(parent_fd, name, LD_CACHE)
    merged = merge_ld_cache(data, [(one, path, bits) for one, path, bits in libraries], os.uname().machine)
    if merged is None:
        raise NeedsHookError(f"{LD_CACHE} of the image cannot be extended")
    return data, merged, status


def _read_old(parent_fd: int, name: str, path: str) -> "tuple[bytes, os.stat_result | None]":
    """Return content and status of a regular file, b"" and None where there is nothing; NeedsHookError for the rest."""
    try:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
    except FileNotFoundError:
        return b"", None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_LD_CACHE:
            raise NeedsHookError(f"{path} of the image is no regular file of at most {MAX_LD_CACHE >> 20} MiB")
        return _read_file(fd), status
    finally:
        os.close(fd)


def _is_own(owner: os.stat_result) -> bool:
    """Tell whether what this process makes has this owner by itself."""
    return (owner.st_uid, owner.st_gid) == (os.geteuid(), os.getegid())


def _give_link(parent_fd: int, name: str, owner: os.stat_result) -> None:
    if not _is_own(owner):
        os.chown(name, owner.st_uid, owner.st_gid, dir_fd=parent_fd, follow_symlinks=False)


def _read_file(path_fd: int) -> bytes:
    """Return the content of a regular file, given by a descriptor that only names it.

    Opening by name whatever an image has there could be opening a device of the host, and some act on it.
    """
    with open(os.open(f"/proc/self/fd/{path_fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        return file.read(MAX_LD_CACHE + 1)


def _write_beside(parent_fd: int, name: str, content: bytes, mode: int, owner: os.stat_result) -> tuple[int, int]:
    """Replace a file by a new one, whole or not at all; returns device and inode number of the new one."""
    written = replace_file(name, content, mode, parent_fd, owner=(owner.st_uid, owner.st_gid))
    return written.st_dev, written.st_ino


def resolve_in_root(root_fd: int, path: str) -> str:
    """Return where a path leads in the root directory, links followed as far as there is something to follow.

    The text is for comparisons only: nothing is opened by it.
    """
    if len(path) > MAX_PATH:  # nothing can be mounted there
        return path
    rest = ""
    while path not in ("", "/"):
        try:
            fd = open_in_root(root_fd, path, os.O_PATH)
        except OSError:  # missing, or a link that leads nowhere
            path, _, name = path.rpartition("/")
            rest = f"/{name}{rest}"
            continue
        try:
            top, found = (os.readlink(f"/proc/self/fd/{number}") for number in (root_fd, fd))
        finally:
            os.close(fd)
        return found.removeprefix(top.rstrip("/")) + rest
    return rest or "/"
