"""What mode ``spec`` makes in a container's root directory before the low-level runtime starts: links, loader cache.

Everything is accessed by descriptor below the root directory, which is hostile (:mod:`ocigpu.system.paths`), and is
recorded before it is made (:mod:`ocigpu.bundle.record`).  Nothing is made on another mount than the root directory's,
because the engine may have mounted volumes in it already.  If the runtime fails later, links and files remain in the
container's own layer, like the empty files that the runtime itself makes as mount points, and do not prevent another
try.
"""

import errno
import os
import stat
import time

from ocigpu.bundle.declared import LD_CACHE
from ocigpu.bundle.record import Record
from ocigpu.core.config_json import clean_path, get_list
from ocigpu.gpus.libraries.loader_cache import merge_ld_cache
from ocigpu.system.files import draft_name, remove_drafts, remove_ldconfig_draft, replace_file, replace_link
from ocigpu.system.log import step
from ocigpu.system.paths import MAX_LINKS, make_directories, open_in_root, open_parent
from ocigpu.system.proc import read_mnt_id_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    Covers = dict[str, dict[str, Any]]

YOUNG_NS = 120_000_000_000
"""Age in seconds below which a link or file may belong to a start that can still fail, and would then remove it."""
MAX_LD_CACHE = 8 << 20
MAX_PATH = 4096
"""PATH_MAX of include/uapi/linux/limits.h."""
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class NeedsHookError(Exception):
    """Names the part of a root directory that only the hook can handle."""


class RootDirectory:
    """A container's root directory while links and the loader's cache are made in it; all of it can be undone.

    ``simulated``: as for :class:`ocigpu.bundle.record.Record`.
    """

    def __init__(self, root_fd: int, simulated: str | None = None) -> None:
        self.root_fd = root_fd
        self._root_id = -1
        self._record = Record(root_fd, simulated)
        self.undo = self._record.undo
        self._parents: dict[str, int] = {}
        self._cleared: set[int] = set()

    def close(self) -> None:
        """Close all descriptors except the root's; nothing can be undone afterwards."""
        for fd in self._parents.values():
            os.close(fd)
        self._parents.clear()
        self._record.close()

    def make_links(self, links: "Sequence[tuple[str, str]]") -> None:
        """Make symbolic links, pairs of (container path, target); one with another target is replaced.

        Missing directories are made (0755); owners are the parent directory's.  Raises NeedsHookError if something
        other than a link has the path of one, and OSError.
        """
        for path, target in links:
            parent, _, name = path.rpartition("/")
            with step("link", path, f"to {target}"):
                self._make_link(self._parent(parent), name, target, path)

    def _parent(self, path: str) -> int:
        if path not in self._parents:
            made: list[str] = []

            def on_create(one: str) -> None:
                made.append(one)
                self._record.note("mkdir", one)

            fd = self._parents[path] = make_directories(self.root_fd, path, 0o755, on_create, check=self._check)
            self._check(fd, path)
            for one in made:
                self._give_directory(one)
        return self._parents[path]

    def _check(self, fd: int, path: str) -> None:
        """Raise NeedsHookError unless a directory is on the mount of the root directory; raises OSError."""
        if self._root_id < 0:
            self._root_id = read_mnt_id_of(self.root_fd)
        if read_mnt_id_of(fd) != self._root_id:
            raise NeedsHookError(f"{path} is in a volume, or in another file system than the container's own")

    def _give_directory(self, path: str) -> None:
        """Set the owner of a new directory to its parent's, and its mode to the one that the umask may have reduced."""
        parent_fd, name, _ = open_parent(self.root_fd, path)
        try:
            owner = os.fstat(parent_fd)
            fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent_fd)
        finally:
            os.close(parent_fd)
        try:
            self._check(fd, path)  # another container with this root directory may have replaced it
            if not _is_own(owner):
                os.fchown(fd, owner.st_uid, owner.st_gid)
            os.fchmod(fd, 0o755)
        finally:
            os.close(fd)

    def _clear(self, parent_fd: int) -> None:
        """Remove what killed starts have left in a directory, once for each directory."""
        if parent_fd not in self._cleared:
            self._cleared.add(parent_fd)
            remove_drafts(parent_fd)

    def _make_link(self, parent_fd: int, name: str, target: str, path: str) -> None:
        old, owner = None, os.fstat(parent_fd)
        try:
            found = os.readlink(name, dir_fd=parent_fd)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise NeedsHookError(f"the image has something other than a link at {path}") from error
        else:
            self._clear(parent_fd)
            status = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
            if found == target:
                if _is_young(status):
                    _renew_link(parent_fd, name, target, owner)
                return
            old = (found, status.st_uid, status.st_gid)
        draft = draft_name()
        self._record.note("draft", f"{path.rpartition('/')[0]}/{draft}")

        def note(number: int) -> None:
            self._record.note("link", path, target=target, old=old, temp=draft, ino=number)

        replace_link(name, target, parent_fd, owner=(owner.st_uid, owner.st_gid), draft=draft, note=note)

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
            self._write(parent_fd, LD_CACHE, data, status, merged, mode)
        elif status:
            _renew_file(parent_fd, name, data, status)

    def write_files(self, files: "Sequence[tuple[str, int, str, bool]]") -> None:
        """Write files, as (container path, mode, content, only if it is missing); equal ones are left alone.

        Raises NeedsHookError if something else has the path of one, and OSError.
        """
        for path, mode, text, only_if_missing in files:
            parent, _, name = path.rpartition("/")
            parent_fd = self._parent(parent)
            data, status = _read_old(parent_fd, name, path)
            self._clear(parent_fd)
            content = text.encode("utf-8", "surrogateescape")
            if status is None or (data != content and not only_if_missing):
                self._write(parent_fd, path, data, status, content, mode)
            else:
                _renew_file(parent_fd, name, data, status)

    def _write(
        self, parent_fd: int, path: str, old: bytes, status: os.stat_result | None, content: bytes, mode: int
    ) -> None:
        """Replace a file by a new one, whole or not at all."""
        directory, _, name = path.rpartition("/")
        kept, draft, owner = self._record.keep(old, status), draft_name(), status or os.fstat(parent_fd)
        self._record.note("draft", f"{directory}/{draft}")

        def note(number: int) -> None:
            self._record.note("cache", path, temp=draft, ino=number, **kept)

        replace_file(name, content, mode, parent_fd, owner=(owner.st_uid, owner.st_gid), draft=draft, note=note)


def _is_young(status: os.stat_result) -> bool:
    return time.time_ns() - status.st_ctime_ns < YOUNG_NS


def _renew_link(parent_fd: int, name: str, target: str, owner: os.stat_result) -> None:
    """Remake a link that another start has just made: if that start fails, it removes only its own link."""
    try:
        replace_link(name, target, parent_fd, owner=(owner.st_uid, owner.st_gid))
    except OSError:  # no process can write here, or remove the link
        return


def _renew_file(parent_fd: int, name: str, content: bytes, status: os.stat_result) -> None:
    """Do the same for a file, if it is young."""
    owner, mode = (status.st_uid, status.st_gid), stat.S_IMODE(status.st_mode)
    try:
        if _is_young(status):
            replace_file(name, content, mode, parent_fd, owner=owner, mtime_ns=status.st_mtime_ns)
    except OSError:  # as above
        return


def find_obstacle(root_fd: int, links: "Sequence[tuple[str, str]]", libraries: "Sequence[tuple[str, str, int]]") -> str:
    """Return why links and cache could not be made in a root directory, without trying; "" if nothing prevents it."""
    try:
        for path, _ in links:
            fd = _open_if_there(root_fd, path, os.O_NOFOLLOW)
            if fd >= 0:
                mode = os.fstat(fd).st_mode
                os.close(fd)
                if not stat.S_ISLNK(mode):
                    raise NeedsHookError(f"the image has something other than a link at {path}")
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
    """Return the loader's cache in a directory, the cache with libraries added, and the file's status if it exists.

    Raises NeedsHookError for a cache that cannot be read or extended, and OSError.
    """
    data, status = _read_old(parent_fd, name, LD_CACHE)
    merged = merge_ld_cache(data, [(one, path, bits) for one, path, bits in libraries], os.uname().machine)
    if merged is None:
        raise NeedsHookError(f"{LD_CACHE} of the image cannot be extended")
    return data, merged, status


def _read_old(parent_fd: int, name: str, path: str) -> "tuple[bytes, os.stat_result | None]":
    """Return content and status of a regular file, b"" and None if it is missing; raises NeedsHookError otherwise."""
    try:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
    except FileNotFoundError:
        return b"", None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_LD_CACHE:
            raise NeedsHookError(f"{path} of the image is not a regular file of at most {MAX_LD_CACHE >> 20} MiB")
        return _read_file(fd), status
    finally:
        os.close(fd)


def _is_own(owner: os.stat_result) -> bool:
    """Tell whether new files of this process have this owner anyway."""
    return (owner.st_uid, owner.st_gid) == (os.geteuid(), os.getegid())


def _read_file(path_fd: int) -> bytes:
    """Return the content of a regular file, given an O_PATH descriptor.

    Opening a path of the image by name could open a device of the host, and some devices act on that.
    """
    with open(os.open(f"/proc/self/fd/{path_fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        return file.read(MAX_LD_CACHE + 1)


def resolve_in_root(root_fd: int, path: str, covers: "Covers | None" = None) -> str:
    """Return where a path leads in the root directory, following links as runtimes do, which create missing targets.

    ``covers``: of :func:`find_covers`.  Below one of these the rest of the path is not resolved: the mount decides
    where it leads, not the image.  The text is for comparisons only: nothing is opened by it.
    """
    if len(path) > MAX_PATH:  # nothing can be mounted on a longer one
        return path
    place: list[str] = []
    below: list[int] = []  # descriptors of the first of these directories
    todo, links = path.split("/")[::-1], 0
    try:
        while todo:
            name = todo.pop()
            if name == "..":
                if len(below) == len(place) and below:
                    os.close(below.pop())
                del place[-1:]
                continue
            if name in ("", "."):
                continue
            here = (below[-1] if below else root_fd) if len(below) == len(place) else -1
            place.append(name)
            cover = covers.get("/" + "/".join(place)) if covers else None
            if cover is not None and not _is_tmpfs(cover):
                return "/" + "/".join((*place, *todo[::-1]))
            if here < 0 or (cover is not None and "tmpcopyup" not in get_list(cover, "options")):
                continue  # missing, or empty
            try:
                fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            except (OSError, ValueError):  # missing, or no name
                continue
            below.append(fd)
            if stat.S_ISLNK(os.fstat(fd).st_mode) and links < MAX_LINKS:
                target, links = os.readlink("", dir_fd=fd), links + 1
                os.close(below.pop())
                place.pop()
                if target.startswith("/"):
                    while below:
                        os.close(below.pop())
                    place.clear()
                todo += target.split("/")[::-1]
    finally:
        for fd in below:
            os.close(fd)
    return "/" + "/".join(place)


def resolver(root_fd: int, covers: "Covers | None" = None) -> "Callable[[str], str]":
    """Return :func:`resolve_in_root` for many paths: each directory is resolved once, as an image can make it slow."""
    known: dict[str, str] = {}

    def resolve(path: str) -> str:
        parent, _, name = path.rpartition("/")
        if parent not in known:
            known[parent] = resolve_in_root(root_fd, parent, covers)
        return resolve_in_root(root_fd, f"{known[parent]}/{name}", covers)

    return resolve


def find_covers(root_fd: int, mounts: "Iterable[dict[str, Any]]") -> "tuple[Covers, str]":
    """Return the resolved targets of mounts in the root directory, and the first mount with an uncertain one, or "".

    ``mounts``: entries with a destination, in their order.  A link in one volume decides the target of another volume
    mounted below it, and its owner can make such links.
    """
    covers: "Covers" = {}
    unsure = ""
    for mount in mounts:
        destination = clean_path(mount["destination"])
        place = resolve_in_root(root_fd, destination, covers)
        if place == "/" or leads_elsewhere(covers, destination, place):
            unsure = unsure or destination
        covers[place] = mount
    return covers, unsure


def find_cover(covers: "Covers", place: str) -> str:
    """Return the mount target that covers a path, at the path or nearest above it; "" if none does."""
    while place not in covers and place not in ("", "/"):
        place = place.rpartition("/")[0] or "/"
    return place if place in covers else ""


def leads_elsewhere(covers: "Covers", path: str, place: str) -> bool:
    """Tell whether a path may lead out of the mount that covers it: by a link in the mount, or by procfs."""
    top = find_cover(covers, place)
    if top in ("", "/", place):
        return False
    mount, direct = covers[top], path.startswith(f"{top}/")
    names = place.removeprefix(top).strip("/").split("/")
    if _is_tmpfs(mount):
        return False
    source = mount.get("source")
    if not _is_bound(mount) or not isinstance(source, str) or not source.startswith("/"):
        return not direct or ".." in names
    try:
        paths = ["/".join((source, *names[:end])) for end in range(1, len(names) + 1)]
        return ".." in names or any(os.path.islink(one) for one in paths)
    except ValueError:  # no path
        return True


def _is_bound(mount: "dict[str, Any]") -> bool:
    return mount.get("type") == "bind" or not {"bind", "rbind"}.isdisjoint(
        option for option in get_list(mount, "options") if isinstance(option, str)
    )


def _is_tmpfs(mount: "dict[str, Any]") -> bool:
    """Tell whether it is a file system that contains only files of the image (tmpcopyup) or of the runtime."""
    return mount.get("type") == "tmpfs" and not _is_bound(mount)
