"""Configuration files below a root: read, replaced and removed atomically, with mode and owner kept."""

import contextlib
import errno
import os
import stat
from collections.abc import Container, Iterator
from typing import NamedTuple, Self

from ocigpu.core.errors import OcigpuError
from ocigpu.engines.places import MAX_CONFIG, NOT_THERE, decode, file_mode
from ocigpu.system.files import open_regular, read_bounded, remove_drafts, replace_file
from ocigpu.system.locks import holding
from ocigpu.system.paths import MAX_LINKS, make_directories, open_in_root, opened
from ocigpu.system.store import open_lock

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
LOCK_SECONDS = 30
_PLAIN_MODE = 0o644


class EngineFile(NamedTuple):
    """The state of a file: ``path`` is its real place below the root, ``text`` is None if it is missing."""

    path: str
    text: str | None
    mode: int = _PLAIN_MODE
    owner: tuple[int, int] = (-1, -1)
    attributes: tuple[tuple[str, bytes], ...] = ()
    """Extended attributes: labels of SELinux, access lists."""


class Root:
    """A root directory, held by descriptor for as long as the block lasts."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise _failed("open", path, error, "OCIGPU-ENG-1") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        os.close(self._fd)

    def read(self, path: str) -> EngineFile:
        """Return a file, its last link followed below the root.

        Raises OcigpuError OCIGPU-ENG-1, and OCIGPU-ENG-4 when another user could replace it: the file, or a link to it,
        is in a directory that is neither ours nor root's, or that all users can write.
        """
        real = path
        with _failing("read", path, "OCIGPU-ENG-1"):
            try:
                directory, name, real = self._find(path)
                with opened(directory), open_regular(name, directory, os.O_NOFOLLOW) as file:
                    status = os.fstat(file.fileno())
                    content = read_bounded(file, MAX_CONFIG)
                    attributes = _attributes(file.fileno())
            except OSError as error:
                if error.errno in NOT_THERE:
                    return EngineFile(real, None)
                raise
        mode = stat.S_IMODE(status.st_mode)
        return EngineFile(real, decode(path, content), mode, (status.st_uid, status.st_gid), attributes)

    def missing_directories(self, path: str) -> list[str]:
        """Return the directories that must be made for a file, the outermost one first."""
        missing: list[str] = []
        directory = os.path.dirname(path)
        while file_mode(self.path, directory) is None and directory != "/":
            missing.insert(0, directory)
            directory = os.path.dirname(directory)
        return missing

    def write(self, file: EngineFile, text: str) -> None:
        """Give a file this text by a rename that survives a crash; missing directories are made.

        If an engine might read every file of the directory, the draft is made beside the directory.  Raises OcigpuError
        OCIGPU-ENG-4; then the file is as it was.
        """
        made: list[str] = []
        before = os.umask(0o022)
        try:
            os.close(make_directories(self._fd, os.path.dirname(file.path), 0o755, made.append))
            target, name, _ = self._find(file.path)
            with opened(target), self._directory(aside(file.path, "")) as draft_fd:
                remove_drafts(draft_fd)
                replace_file(
                    name, text.encode(), file.mode, target,
                    owner=file.owner, attributes=file.attributes, durable=True, draft_fd=draft_fd,
                )  # fmt: skip
        except (OSError, ValueError) as error:
            self.remove_directories(made)
            if isinstance(error, OSError) and error.errno == errno.ENOENT and (dead := self.read_link(file.path)):
                hint = "put that file there, or move the link away"
                raise OcigpuError("OCIGPU-ENG-4", f"write {file.path}: a link to {dead}, not there", hint) from error
            if isinstance(error, OSError):
                raise _failed("write", file.path, error, "OCIGPU-ENG-4") from error
            raise OcigpuError("OCIGPU-ENG-4", f"write {file.path}: {error}") from error
        finally:
            os.umask(before)

    def remove(self, path: str) -> None:
        """Remove a file or link, if it exists; raises OcigpuError OCIGPU-ENG-4."""
        with _failing("remove", path, "OCIGPU-ENG-4", NOT_THERE), self._directory(os.path.dirname(path)) as directory:
            os.unlink(os.path.basename(path), dir_fd=directory)

    def remove_directories(self, paths: list[str]) -> None:
        """Remove directories, the last one first; those that hold something by now stay."""
        ignored = (*NOT_THERE, errno.ENOTEMPTY, errno.EBUSY)
        for path in reversed(paths):
            with _failing("remove", path, "OCIGPU-ENG-4", ignored), self._directory(os.path.dirname(path)) as directory:
                os.rmdir(os.path.basename(path), dir_fd=directory)

    def read_link(self, path: str) -> str | None:
        """Return the target of a link, "" for another kind of file, None for a missing one."""
        found = None
        with _failing("read", path, "OCIGPU-ENG-1", NOT_THERE), self._directory(os.path.dirname(path)) as directory:
            try:
                found = os.readlink(os.path.basename(path), dir_fd=directory)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                found = ""
        return found

    def link(self, path: str, target: str) -> None:
        """Make a link at a free path; raises OcigpuError OCIGPU-ENG-4."""
        with _failing("link", path, "OCIGPU-ENG-4"), self._directory(os.path.dirname(path)) as directory:
            _require_safe(directory, path)
            os.symlink(target, os.path.basename(path), dir_fd=directory)

    @contextlib.contextmanager
    def _directory(self, path: str) -> Iterator[int]:
        """Yield a descriptor of a directory below the root."""
        with opened(open_in_root(self._fd, path, _DIRECTORY)) as fd:
            yield fd

    def _find(self, path: str) -> tuple[int, str, str]:
        """Return the directory (a descriptor), name and path of the file that ``path`` leads to, there or not."""
        for links in range(MAX_LINKS):
            parent, name = os.path.split(path)
            directory = open_in_root(self._fd, parent, _DIRECTORY)
            try:
                _require_safe(directory, path)
                try:
                    target = os.readlink(name, dir_fd=directory)
                except OSError as error:
                    if error.errno in (errno.EINVAL, errno.ENOENT):  # no link, or nothing
                        return directory, name, os.path.join(self._path_of(directory), name) if links else path
                    raise
            except BaseException:
                os.close(directory)
                raise
            os.close(directory)
            path = os.path.join(parent, target)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))

    def _path_of(self, directory: int) -> str:
        """Return the path below the root of an open directory, without links and ".."."""
        top, path = (os.readlink(f"/proc/self/fd/{fd}") for fd in (self._fd, directory))
        return path.removeprefix(top.rstrip("/")) or "/"


def _attributes(fd: int) -> tuple[tuple[str, bytes], ...]:
    try:
        return tuple((key, os.getxattr(fd, key)) for key in os.listxattr(fd))
    except OSError as error:
        if error.errno == errno.ENOTSUP:  # by this file system
            return ()
        raise


@contextlib.contextmanager
def _failing(action: str, path: str, code: str, ignored: Container[int | None] = ()) -> Iterator[None]:
    """Raise OcigpuError for what the system refuses, but for the numbers that are ``ignored``."""
    try:
        yield
    except OSError as error:
        if error.errno not in ignored:
            raise _failed(action, path, error, code) from error


def _failed(action: str, path: str, error: OSError, code: str) -> OcigpuError:
    hint = "" if code == "OCIGPU-ENG-1" else None
    if error.errno in (errno.EACCES, errno.EPERM) and os.geteuid():
        hint = "run it as root"
    elif error.errno == errno.EROFS:
        hint = "a system such as NixOS writes this file itself: set the same in the system's own configuration"
    return OcigpuError(code, f"{action} {path}: {error.strerror or error}", hint)


def _require_safe(directory: int, path: str) -> None:
    status = os.fstat(directory)
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
        raise OcigpuError("OCIGPU-ENG-4", f"{path}: other users can replace files in {os.path.dirname(path)}: not used")


def aside(path: str, suffix: str) -> str:
    """Return a path for what belongs to a file; not in a directory of drop-ins: CRI-O reads every file of its one.

    With an empty suffix: the directory.
    """
    directory, name = os.path.split(path)
    if directory.endswith(".d"):
        directory = os.path.dirname(directory)
    return f"{directory}/{name}{suffix}" if suffix else directory


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Let one process at a time change engines' configurations; raises OcigpuError when another one takes too long.

    No other user can take the lock.
    """
    busy = OcigpuError("OCIGPU-ENG-4", "another ocigpu is changing engine configurations")
    try:
        fd = open_lock("engine.lock")
        if fd < 0:
            fd = os.open(os.path.expanduser("~"), _DIRECTORY | os.O_CLOEXEC)
        with holding(fd, busy, LOCK_SECONDS):
            yield
    except OSError as error:
        raise OcigpuError("OCIGPU-ENG-4", f"lock {error.filename or 'file'}: {error.strerror}") from error
