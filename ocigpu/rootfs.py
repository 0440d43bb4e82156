"""What mode ``spec`` makes in a container's root directory before the low-level runtime starts: links, loader cache.

Everything goes by descriptor below the root directory, which is hostile (:mod:`ocigpu.linux.paths`).  What stays when
this process is killed in between, or when the runtime fails later, is like the empty files that the runtime itself
makes to mount on: in the container's own layer, and not in the way of another try.
"""

import errno
import os
import stat

from ocigpu.ldcache import merge_ld_cache
from ocigpu.linux.paths import make_directories, open_in_root, open_parent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

LD_CACHE = "/etc/ld.so.cache"
MAX_LD_CACHE = 8 << 20
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class NeedsHookError(Exception):
    """Says what of a root directory only the hook can deal with."""


class RootDirectory:
    """A container's root directory while links and the loader's cache are made in it; all of it can be undone."""

    def __init__(self, root_fd: int) -> None:
        self.root_fd = root_fd
        self._parents: dict[str, int] = {}
        self._made: list[str] = []
        self._links: list[tuple[int, str, str, str]] = []
        self._cache: bytes | None = None
        self._cache_status: os.stat_result | None = None

    def close(self) -> None:
        """Close the descriptors but the root's; nothing can be undone any more."""
        for fd in self._parents.values():
            os.close(fd)
        self._parents.clear()

    def undo(self) -> None:
        """Put everything back as it was, the last change first; what somebody else has changed since stays."""
        if self._cache is not None:
            self._undo_cache(self._cache)
        for parent_fd, name, target, old in reversed(self._links):
            try:
                if os.readlink(name, dir_fd=parent_fd) == target:
                    os.unlink(name, dir_fd=parent_fd)
                    if old:
                        os.symlink(old, name, dir_fd=parent_fd)
            except OSError:  # changed since, or the file system fails: another try starts from what is there
                continue
        for path in reversed(self._made):
            try:
                parent_fd, name = open_parent(self.root_fd, path)
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
            self._make_link(self._parent(parent), name, target, path)

    def _parent(self, path: str) -> int:
        if path not in self._parents:
            self._parents[path] = make_directories(self.root_fd, path, 0o755, self._made.append)
        return self._parents[path]

    def _make_link(self, parent_fd: int, name: str, target: str, path: str) -> None:
        old = ""
        try:
            os.symlink(target, name, dir_fd=parent_fd)
        except FileExistsError:
            try:
                old = os.readlink(name, dir_fd=parent_fd)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                raise NeedsHookError(f"the image has something else than a link at {path}") from error
            if old == target:
                return
            temporary = f".ocigpu-{os.urandom(8).hex()}"
            os.symlink(target, temporary, dir_fd=parent_fd)
            try:
                os.rename(temporary, name, src_dir_fd=parent_fd, dst_dir_fd=parent_fd)
            except OSError:
                os.unlink(temporary, dir_fd=parent_fd)
                raise
        self._links.append((parent_fd, name, target, old))
        status = os.fstat(parent_fd)
        if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
            os.chown(name, status.st_uid, status.st_gid, dir_fd=parent_fd, follow_symlinks=False)

    def extend_ld_cache(self, libraries: "Sequence[tuple[str, str, int]]") -> None:
        """Let the container's loader find libraries, as (name, container path, bits), besides what its cache has.

        Raises NeedsHookError for a cache that cannot be read or extended, and OSError.
        """
        parent, _, name = LD_CACHE.rpartition("/")
        parent_fd = self._parent(parent)
        status = os.fstat(parent_fd)
        data = b""
        try:
            fd = os.open(name, _READ_FLAGS, dir_fd=parent_fd)
        except FileNotFoundError:
            mode = 0o644
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link, a socket
                raise
            raise NeedsHookError(f"{LD_CACHE} of the image is no regular file") from error
        else:
            with open(fd, "rb", buffering=0) as file:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_LD_CACHE:
                    raise NeedsHookError(
                        f"{LD_CACHE} of the image is no regular file of at most {MAX_LD_CACHE >> 20} MiB"
                    )
                mode = stat.S_IMODE(status.st_mode)
                data = file.readall()[: MAX_LD_CACHE + 1]
                self._cache_status = status
        merged = merge_ld_cache(data, [(one, path, bits) for one, path, bits in libraries], os.uname().machine)
        if merged is None:
            raise NeedsHookError(f"{LD_CACHE} of the image cannot be extended")
        if merged == data:
            return
        self._cache = data
        self._write_cache(merged, mode, status)

    def _write_cache(self, content: bytes, mode: int, owner: os.stat_result) -> None:
        parent, _, name = LD_CACHE.rpartition("/")
        parent_fd = self._parent(parent)
        temporary = f".ocigpu-{os.urandom(8).hex()}"
        fd = os.open(temporary, _WRITE_FLAGS, 0o600, dir_fd=parent_fd)
        try:
            with open(fd, "wb") as file:
                file.write(content)
                if (owner.st_uid, owner.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(fd, owner.st_uid, owner.st_gid)
                os.fchmod(fd, mode)
            os.rename(temporary, name, src_dir_fd=parent_fd, dst_dir_fd=parent_fd)
        except OSError:
            os.unlink(temporary, dir_fd=parent_fd)
            raise

    def _undo_cache(self, content: bytes) -> None:
        parent, _, name = LD_CACHE.rpartition("/")
        try:
            if self._cache_status is None:
                os.unlink(name, dir_fd=self._parent(parent))
            else:
                self._write_cache(content, stat.S_IMODE(self._cache_status.st_mode), self._cache_status)
        except OSError:  # the file system fails: another try starts from what is there
            return


def resolve_in_root(root_fd: int, path: str) -> str:
    """Return where a path leads in the root directory, links followed as far as there is something to follow.

    The text is for comparisons only: nothing is opened by it.
    """
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
