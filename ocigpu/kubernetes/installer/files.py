"""The package's files on a host, installed by a pod: versions side by side, and a link to the one in use.

``PREFIX/versions/ID`` is the tree of one version, made for that path and never changed; ``PREFIX/current`` leads to it.
A new version is complete before a rename exchanges the link.  The former version stays, so a running program keeps its
own files.  Directories are resolved below the host's root, as the host itself sees them.
"""

import contextlib
import glob
import os
import shutil
from collections.abc import Callable, Iterator

from ocigpu.core.errors import HostError
from ocigpu.system.files import replace_link, why_untrusted
from ocigpu.system.paths import make_directories, open_in_root, opened

VERSIONS = "versions"
CURRENT = "current"
PENDING = "restart-pending"
"""A file that is there from before the engine's configuration changes until the engine has read it."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY


def install_error(cause: str, hint: str | None = None) -> HostError:
    """Return the error of what cannot be installed on this node."""
    return HostError("OCIGPU-KUBE-8", cause, hint)


def payload_version(payload: str) -> str:
    """Return the name of the one version that an image brings; raises HostError OCIGPU-KUBE-8."""
    try:
        names = sorted(entry.name for entry in os.scandir(payload) if entry.is_dir())
    except OSError as error:
        raise install_error(f"read {payload}: {error.strerror}", "Use the image of the chart.") from error
    if len(names) != 1:
        raise install_error(f"{payload}: holds {len(names)} versions, not one", "Build the image again.")
    return names[0]


class HostFiles:
    """The files below ``prefix`` of the host whose root is ``host_root``.  Methods raise HostError OCIGPU-KUBE-8."""

    def __init__(self, host_root: str, prefix: str) -> None:
        self.host_root, self.prefix = host_root, prefix

    def current(self) -> str:
        """Return the version in use, "" for none."""
        with self._open("", missing_ok=True) as fd:
            return _read_link(fd).removeprefix(f"{VERSIONS}/") if fd >= 0 else ""

    def place(self, payload: str, try_out: Callable[[str], None]) -> str:
        """Put the image's version on the host and activate it; return its name, "" if it was active before.

        ``try_out`` is called with the path of a new version, and raises when it does not work there.
        """
        name = payload_version(payload)
        with self._failing(f"write {self.prefix}"):
            for below in ("", f"/{VERSIONS}"):
                self._make(f"{self.prefix}{below}")
                self._check(below)
            with self._open(f"/{VERSIONS}") as fd:
                here = f"/proc/self/fd/{fd}"
                for left in glob.glob(f"{here}/.new-*"):
                    shutil.rmtree(left)
                if not os.path.isdir(f"{here}/{name}"):
                    shutil.copytree(f"{payload}/{name}", f"{here}/.new-{name}", symlinks=True)
                    os.sync()
                    os.rename(f"{here}/.new-{name}", f"{here}/{name}")
                before = self.current()
                if before == name:
                    return ""
                try_out(f"{self.prefix}/{VERSIONS}/{name}")
                with self._open("") as top:
                    replace_link(CURRENT, f"{VERSIONS}/{name}", top)
                self._forget_caches()
                for entry in os.listdir(fd):
                    if entry not in (name, before):
                        shutil.rmtree(f"{here}/{entry}")
        return name

    def is_pending(self) -> bool:
        """Tell whether the engine's configuration was changed and it was not seen to read it since."""
        with self._open("", missing_ok=True) as fd:
            return fd >= 0 and os.path.exists(f"/proc/self/fd/{fd}/{PENDING}")

    def set_pending(self, pending: bool) -> None:
        """Note whether the engine has yet to read its configuration."""
        with self._failing(f"write {self.prefix}/{PENDING}"), self._open("", missing_ok=True) as fd:
            if fd >= 0 and pending:
                os.close(os.open(PENDING, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=fd))
            elif fd >= 0:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(PENDING, dir_fd=fd)

    def remove(self) -> None:
        """Remove all of it; other files beside it stay, and the directory with them."""
        with self._failing(f"remove {self.prefix}"), self._open("", missing_ok=True) as fd:
            if fd < 0:
                return
            for name in (CURRENT, PENDING):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(f"/proc/self/fd/{fd}/{VERSIONS}")
            if not os.listdir(fd):
                with self._open("", above=True) as parent:
                    os.rmdir(os.path.basename(self.prefix), dir_fd=parent)

    def _root(self) -> opened:
        return opened(os.open(self.host_root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))

    def _make(self, path: str) -> None:
        with self._root() as root_fd:
            os.close(make_directories(root_fd, path, 0o755, lambda _: None))

    def _check(self, below: str) -> None:
        """Raise HostError where others than root could have put a version, which root would execute."""
        with self._open(below) as fd:
            status = os.fstat(fd)
        if why := why_untrusted(status.st_uid, status.st_mode):
            raise install_error(
                f"{self.prefix}{below} below {self.host_root}: {why}", "Remove it, or make root its owner."
            )

    def _forget_caches(self) -> None:
        """Remove the former version's stub caches (see ocigpu/entry/pass_through.py); programs rewrite them."""
        try:
            with self._root() as root_fd:
                fd = open_in_root(root_fd, "/run/ocigpu", _DIRECTORY)
        except OSError:  # nothing has run yet
            return
        with opened(fd):
            for name in os.listdir(fd):
                if name.startswith("next-"):
                    os.unlink(name, dir_fd=fd)

    @contextlib.contextmanager
    def _open(self, below: str, missing_ok: bool = False, above: bool = False) -> Iterator[int]:
        """Yield a descriptor of a directory below the prefix (or its parent), -1 for an optional missing one."""
        path = os.path.dirname(self.prefix) if above else f"{self.prefix}{below}"
        with self._failing(f"open {path}"), self._root() as root_fd:
            try:
                fd = open_in_root(root_fd, path, _DIRECTORY)
            except FileNotFoundError:
                if not missing_ok:
                    raise
                fd = -1
        with opened(fd) if fd >= 0 else contextlib.nullcontext(fd):
            yield fd

    @contextlib.contextmanager
    def _failing(self, action: str) -> Iterator[None]:
        try:
            yield
        except (OSError, shutil.Error) as error:
            cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise install_error(f"{action} below {self.host_root}: {cause}") from error


def _read_link(fd: int) -> str:
    try:
        return os.readlink(CURRENT, dir_fd=fd)
    except OSError:  # not there, or no link: then it is replaced
        return ""
