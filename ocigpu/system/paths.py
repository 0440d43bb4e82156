"""Paths below a root that another user controls: all are resolved by descriptor and never leave the root.

The kernel does it where openat2(2) is known (Linux 5.6).  Elsewhere a walk over the components does the same with
O_PATH descriptors: absolute links start again at the root, ``..`` stops there, 40 links at most.  A resolved path is
never used again as text.
"""

import errno
import os
import stat

from ocigpu.core.record import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

MAX_LINKS = 40
"""The kernel's own limit of links in one path (path_resolution(7))."""
_MAX_PATH = 4096
_MAX_TRIES = 128
_OF_PATH = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags that change nothing of a directory's descriptor with O_PATH, beyond what the walk opens it with."""

_openat2_usable: bool | None = None


class named:  # noqa: N801 - reads as a statement
    """In the block, an OSError gets the call and the path as users know it: "mkdir /usr/lib", in place of a name."""

    __slots__ = ("_what",)

    def __init__(self, call: str, path: str) -> None:
        self._what = f"{call} {path}"

    def __enter__(self) -> None:
        return

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, OSError):
            error.filename, error.filename2 = self._what, None


class opened:  # noqa: N801 - reads as a statement
    """A descriptor that is closed at the end of the block."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


class At(NamedTuple):
    """A name in an open directory, as mkdirat(2) and its kin take it; ``path``: what a user knows it by.

    In a ``with`` statement the directory is closed at its end.  Errors name the call and the path.  Nothing here
    follows a link.
    """

    fd: int
    name: str
    path: str

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def stat(self) -> os.stat_result:
        with named("stat", self.path):
            return os.stat(self.name, dir_fd=self.fd, follow_symlinks=False)

    def find(self) -> os.stat_result | None:
        """Return :meth:`stat`, None if nothing has the name."""
        try:
            return self.stat()
        except FileNotFoundError:
            return None

    def open(self, flags: int = os.O_PATH, mode: int = 0) -> int:
        with named("openat", self.path):
            return os.open(self.name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=self.fd)

    def mkdir(self, mode: int) -> None:
        with named("mkdir", self.path):
            os.mkdir(self.name, mode, dir_fd=self.fd)

    def mknod(self, mode: int, rdev: int) -> None:
        with named("mknod", self.path):
            os.mknod(self.name, mode, rdev, dir_fd=self.fd)

    def create(self, mode: int) -> None:
        """Make an empty file; raises FileExistsError."""
        os.close(self.open(os.O_CREAT | os.O_EXCL, mode))

    def readlink(self) -> str:
        with named("readlink", self.path):
            return os.readlink(self.name, dir_fd=self.fd)

    def symlink(self, target: str) -> None:
        with named("symlink", self.path):
            os.symlink(target, self.name, dir_fd=self.fd)

    def rename(self, name: str) -> None:
        """Move it to another name in its directory, in place of what has that."""
        with named("rename", self.path):
            os.rename(self.name, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def unlink(self) -> None:
        with named("unlink", self.path):
            os.unlink(self.name, dir_fd=self.fd)

    def rmdir(self) -> None:
        with named("rmdir", self.path):
            os.rmdir(self.name, dir_fd=self.fd)

    def beside(self, name: str) -> "At":
        """Return another name in this directory, which stays this one's to close; users know it by the same path."""
        return At(self.fd, name, self.path)


def open_in_root(root_fd: int, path: str, flags: int, mode: int = 0, force_fallback: bool = False) -> int:
    """Return a new descriptor of ``path``, resolved as if ``root_fd`` were the root directory.

    ``flags`` and ``mode`` as for open(2); O_CLOEXEC is added.  Links are followed inside the root, the last component
    too unless ``flags`` has O_NOFOLLOW; mounts are crossed.  Links of procfs that jump (/proc/1/root) are refused by
    the kernel and read as text by the walk: neither leaves the root.  Raises OSError, also for an invalid path; EAGAIN
    when renames elsewhere disturbed the kernel's walk many times in a row.
    """
    flags |= os.O_CLOEXEC
    with named("openat", path):
        _check(path)
    if force_fallback or not _has_openat2(root_fd):
        with named("openat", path):
            return _walk(root_fd, path, flags, mode)
    from ocigpu.system import libc  # see use_walk

    for _ in range(_MAX_TRIES):
        try:
            return libc.openat2(root_fd, path, flags, mode, libc.RESOLVE_IN_ROOT | libc.RESOLVE_NO_MAGICLINKS)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
    raise OSError(errno.EAGAIN, "the path is being renamed all the time", f"openat2 {path}")


def _check(path: str) -> None:
    """Refuse what no path can be as the kernel would: texts of JSON and of images may hold any character."""
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL)) from error
    if b"\0" in encoded:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    if len(encoded) >= _MAX_PATH:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))


def use_walk(wanted: bool) -> None:
    """Let this process do without openat2(2), or not: its module costs 2 ms to load, a walk some 0.03 for a path."""
    global _openat2_usable  # noqa: PLW0603 - a choice of the whole process
    _openat2_usable = False if wanted else None


def _has_openat2(root_fd: int) -> bool:
    """Try it once: old kernels answer ENOSYS, filters of system calls EPERM."""
    global _openat2_usable  # noqa: PLW0603 - what the kernel can do does not change while we run
    if _openat2_usable is None:
        from ocigpu.system import libc

        try:
            os.close(libc.openat2(root_fd, ".", os.O_PATH | os.O_CLOEXEC, 0, libc.RESOLVE_IN_ROOT))
            _openat2_usable = True
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM):
                raise
            _openat2_usable = False
    return _openat2_usable


def _walk(root_fd: int, path: str, flags: int, mode: int) -> int:
    """Do what openat2 with RESOLVE_IN_ROOT does, one component at a time.

    ``below`` holds the descriptors of the directories between root and here, so ``..`` goes back the way we came:
    a directory that is moved out of the root meanwhile leads nowhere else.
    """
    below: list[int] = []
    todo = _parts(path)
    must_be_directory = path.endswith(("/", "/."))
    links = 0
    try:
        while todo:
            name = todo.pop()
            if name == "..":
                if below:
                    os.close(below.pop())
                continue
            here = below[-1] if below else root_fd
            last = not todo
            fd = _open_component(here, name, flags) if last else _open_path(here, name)
            if fd is None:  # missing, and to be created
                return os.open(name, flags | os.O_NOFOLLOW, mode, dir_fd=here)
            kind = stat.S_IFMT(os.fstat(fd).st_mode)
            if kind == stat.S_IFLNK and not (last and flags & os.O_NOFOLLOW and not must_be_directory):
                try:
                    target = os.readlink("", dir_fd=fd)
                finally:
                    os.close(fd)
                links += 1
                if links > MAX_LINKS or len(todo) > _MAX_PATH:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                if target.startswith("/"):
                    while below:
                        os.close(below.pop())
                todo.extend(_parts(target))
                must_be_directory = must_be_directory or (last and target.endswith(("/", "/.")))
                continue
            if kind != stat.S_IFDIR:
                if must_be_directory or not last:
                    os.close(fd)
                    raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
                return _reopen(here, name, fd, flags)
            below.append(fd)
        here = below[-1] if below else root_fd
        if flags & os.O_CREAT and flags & os.O_EXCL:
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
        if below and flags & ~_OF_PATH == os.O_PATH:
            return below.pop()
        return os.open(".", flags & ~os.O_CREAT, dir_fd=here)
    finally:
        for fd in below:
            os.close(fd)


def _parts(path: str) -> list[str]:
    """Return the components of a path, last one first."""
    if not path:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _open_path(dir_fd: int, name: str) -> int:
    return os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)


def _open_component(dir_fd: int, name: str, flags: int) -> int | None:
    """Return an O_PATH descriptor of the last component, None when it is missing and ``flags`` has O_CREAT."""
    try:
        fd = _open_path(dir_fd, name)
    except FileNotFoundError:
        if flags & os.O_CREAT:
            return None
        raise
    if flags & os.O_CREAT and flags & os.O_EXCL:
        os.close(fd)
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
    return fd


def _reopen(dir_fd: int, name: str, path_fd: int, flags: int) -> int:
    """Return a descriptor with ``flags`` of the last component; ``path_fd`` is an O_PATH descriptor of it."""
    if flags & os.O_PATH and not flags & os.O_DIRECTORY:
        return path_fd
    try:
        if flags & os.O_DIRECTORY:
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return os.open(name, flags & ~os.O_CREAT | os.O_NOFOLLOW, dir_fd=dir_fd)
    finally:
        os.close(path_fd)


def split(path: str) -> list[str]:
    """Return the components of an absolute path of a plan; ``..`` has no place in one (ValueError)."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not path.startswith("/") or ".." in parts or not parts:
        raise ValueError(f"not a path of a plan: {path}")
    return parts


def open_parent(root_fd: int, path: str) -> At:
    """Return ``path`` as a name in the directory that holds it, links on the way there followed inside the root."""
    *parents, name = split(path)
    return At(open_in_root(root_fd, "/" + "/".join(parents), os.O_PATH | os.O_DIRECTORY), name, path)


def make_directories(
    root_fd: int,
    path: str,
    mode: int,
    on_create: "Callable[[str], None]",
    force_fallback: bool = False,
    check: "Callable[[int, str], None] | None" = None,
) -> int:
    """Return an O_PATH descriptor of the directory ``path``, making missing directories with ``mode``.

    ``on_create`` is called with the path of each directory right before it is made, ``check`` before that, with the
    descriptor of its parent directory: it may refuse.  Existing links in the path (lib -> usr/lib, var/run -> /run) are
    followed inside the root; one that leads nowhere is an error (ENOENT), as is anything that is not a directory
    (ENOTDIR).
    """
    flags = os.O_PATH | os.O_DIRECTORY
    parts = [part for part in path.split("/") if part]
    try:
        return open_in_root(root_fd, "/" + "/".join(parts), flags, force_fallback=force_fallback)
    except FileNotFoundError:
        pass
    here = os.open(".", flags | os.O_CLOEXEC, dir_fd=root_fd)
    for depth, name in enumerate(parts, 1):
        prefix = "/" + "/".join(parts[:depth])
        try:
            below = open_in_root(root_fd, prefix, flags, force_fallback=force_fallback)
        except FileNotFoundError:
            try:
                below = _make_directory(here, name, prefix, mode, on_create, check)
            finally:
                os.close(here)
        except BaseException:
            os.close(here)
            raise
        else:
            os.close(here)
        here = below
    return here


def _make_directory(
    dir_fd: int,
    name: str,
    path: str,
    mode: int,
    on_create: "Callable[[str], None]",
    check: "Callable[[int, str], None] | None",
) -> int:
    """Make the directory ``name``, which in-root resolution did not find: missing, or a link that leads nowhere."""
    at = At(dir_fd, name, path)
    if at.find() is not None:
        raise FileNotFoundError(errno.ENOENT, "a link that leads nowhere", f"openat {path}")
    if check:
        check(dir_fd, path)
    on_create(path)
    at.mkdir(mode)
    return at.open(os.O_PATH | os.O_DIRECTORY)
