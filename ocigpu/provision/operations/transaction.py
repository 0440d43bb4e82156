"""What the operations of a worker share: the container's root, files opened on the host, the journal, the notes.

Links of an image, and a volume's owner, decide where a path leads.  So before anything is made, replaced or changed, it
is checked to be on the container's root mount or on a tmpfs of its own (:meth:`Transaction.require_own`), by the very
descriptor that is then used.  What is mounted on something that is there already changes nothing where that lies.
"""

import errno
import os
import stat

from ocigpu.core.errors import ApplyError, cause, quoted
from ocigpu.core.record import NamedTuple
from ocigpu.provision import mounts
from ocigpu.provision.mounts import MountTarget, Source, read_mnt_id
from ocigpu.system import libc
from ocigpu.system.files import remove_drafts
from ocigpu.system.paths import At, make_directories, open_parent, opened, split

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet
    from typing import TypeAlias

    from ocigpu.provision.container import LiveContainer
    from ocigpu.provision.journal import Entry, Journal
    from ocigpu.provision.ldconfig import Started

    Sources: TypeAlias = dict[tuple[str, str, tuple[str, ...]], Source]


class VolumeError(Exception):
    """The place of something that is to be made or changed is not the container's own; ``path`` of the container."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class CannotMergeError(Exception):
    """The image's loader cache is none to which entries can be added."""


class Supplies(NamedTuple):
    """What a worker has opened on the host.

    ``new_calls``: whether mounts are made by the calls of Linux 5.2 and 5.12; ``sources``: what is mounted;
    ``ldconfig_fd``: a copy of ldconfig, ``backup_fd``: a place for what is replaced (-1: not needed).
    """

    new_calls: bool
    sources: "Sources"
    ldconfig_fd: int = -1
    backup_fd: int = -1

    def close(self) -> None:
        """Close all descriptors."""
        for fd in (*(source.tree_fd for source in self.sources.values()), self.ldconfig_fd, self.backup_fd):
            if fd >= 0:
                os.close(fd)


class Transaction:
    """What one worker does in a container, all of it or nothing.

    It works in the container's mount namespace with /proc/self as working directory.  ``container``: None only for
    undoing.  ``host_devices``: as for :func:`ocigpu.provision.mounts.is_on_own_tmpfs`.  ``host_mnt_fd``: the host's
    mount namespace.  ``make_nodes``: nodes that are made here can be opened.  ``stand_in``: as for take_source.
    ``ldconfig``: one that is ready or runs.  ``notes``: what a user should know, a sentence each.
    """

    def __init__(
        self,
        root_fd: int,
        journal: "Journal",
        supplies: Supplies,
        host_devices: "AbstractSet[str]" = frozenset(),
        container: "LiveContainer | None" = None,
        own_proc_fd: int = -1,
        host_mnt_fd: int = -1,
        make_nodes: bool = False,
        stand_in: bool = False,
    ) -> None:
        self.root_fd, self.supplies, self.host_devices = root_fd, supplies, host_devices
        self.root_id = read_mnt_id(root_fd)
        self.container, self._own_proc_fd, self._host_mnt_fd = container, own_proc_fd, host_mnt_fd
        self.make_nodes, self.stand_in = make_nodes, stand_in
        self.journal, self.note = journal, journal.record
        self.ldconfig: "Started | None" = None
        self.notes: list[str] = []
        self._cleared: set[tuple[int, int]] = set()
        self._private: set[int] = set()
        self._own: dict[int, int] = {}
        # inside its own user namespace the container's root user is 0; elsewhere it is who the map says
        inside = container is None or container.join_user
        self.uid, self.gid = (0, 0) if container is None or inside else (container.uid, container.gid)

    def is_private(self, entry: "Entry") -> bool:
        """Tell whether an entry is about a directory that only this container has; raises OSError."""
        with open_parent(self.root_fd, entry["path"]) as at:
            return self._is_on_own_tmpfs(at.fd)

    def is_own(self, fd: int) -> bool:
        """Tell whether a descriptor is on the container's root mount or on a tmpfs of its own; raises OSError.

        The mount is compared, not the file system: a volume may be another directory of the same one.
        """
        return read_mnt_id(fd) == self.root_id or self._is_on_own_tmpfs(fd)

    def require_own(self, at: At) -> None:
        """Raise VolumeError unless a name may be made or replaced; raises OSError.

        Not where its directory lies elsewhere, nor where something is mounted right on it.
        """
        if not self.is_own(at.fd):
            raise VolumeError(at.path)
        try:
            with opened(at.open()) as fd:
                if read_mnt_id(fd) != read_mnt_id(at.fd):
                    raise VolumeError(at.path)
        except FileNotFoundError:
            return

    def own_parent(self, path: str) -> At:
        """Return a path as a name in its directory, to undo something there; FileNotFoundError if that is elsewhere.

        Who may write to the directories on the way can have moved them since it was made.
        """
        at = open_parent(self.root_fd, path)
        if not self.is_own(at.fd):
            os.close(at.fd)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"undo {path}")
        return at

    def _is_on_own_tmpfs(self, fd: int) -> bool:
        """Tell what :func:`ocigpu.provision.mounts.is_on_own_tmpfs` does; raises OSError.

        A mount of the container's is looked up in its table once, and kept open: its id stays its own.
        """
        mnt_id = read_mnt_id(fd)
        if mnt_id not in self._own:
            if self.container is None:  # in the host's namespace, where a tmpfs is anybody's
                return False
            if not mounts.is_on_own_tmpfs(fd, self.root_fd, self.host_devices, self.container.built_here):
                return False
            self._own[mnt_id] = os.dup(fd)
        return True

    def at(self, path: str) -> At:
        """Return a path of the container as a name in its directory, which is made if missing (never below /proc).

        Raises VolumeError where a directory would be made elsewhere than in the container.
        """
        if is_in_proc(path):
            return open_parent(self.root_fd, path)
        *parents, name = split(path)

        def on_create(made: str) -> None:
            self.note("mkdir", made)

        def check(fd: int, _: str) -> None:
            if not self.is_own(fd):
                raise VolumeError(path)

        return At(make_directories(self.root_fd, "/" + "/".join(parents), 0o755, on_create, check=check), name, path)

    def clear(self, at: At) -> None:
        """Remove what killed starts have left in a directory, once for each directory."""
        status = os.fstat(at.fd)
        if (key := (status.st_dev, status.st_ino)) not in self._cleared:
            self._cleared.add(key)
            remove_drafts(at.fd, "..")  # the working directory is our /proc/self

    def source(self, host_path: str, kind: str, options: tuple[str, ...], rdev: int = 0) -> Source:
        """Return something of the host: taken before the namespace was joined, or now."""
        found = self.supplies.sources.pop((host_path, kind, options), None)
        if found is not None:
            return found
        container = self.container
        away = container is not None and not container.join_user and not container.here
        if away:
            libc.setns(self._host_mnt_fd, libc.CLONE_NEWNS)
        try:
            return mounts.take_source(host_path, kind, options, self.supplies.new_calls, rdev, self.stand_in)
        finally:
            if away and container is not None:
                libc.setns(container.mnt_fd, libc.CLONE_NEWNS)
                mounts.enter_own_proc(self._own_proc_fd)

    def mount(self, target: MountTarget, tree_fd: int, by_name: "Callable[[], None]") -> None:
        """Mount a detached tree, closed here; without one (-1) let ``by_name`` do it.  It does not propagate."""
        try:
            under = read_mnt_id(target.fd)
            if under not in self._private:
                mounts.stop_sharing(target, under, self.supplies.new_calls)
                self._private.add(under)
            mounted = read_mnt_id(tree_fd) if tree_fd >= 0 else 0
            self.note("mount", target.at.path, under=under, mount=mounted)
            if tree_fd >= 0:
                self._private.add(mounted)
                libc.move_mount(tree_fd, target.fd, target.at.path)
            else:
                by_name()
        finally:
            if tree_fd >= 0:
                os.close(tree_fd)


def reason_of(error: "OSError | VolumeError | ApplyError") -> str:
    """Return why something failed, as part of a line."""
    if isinstance(error, VolumeError):
        return f"{quoted(error.path)} is in a volume, or in another file system than the container's own"
    if isinstance(error, ApplyError):
        return error.message
    return cause(error)


def is_in_proc(path: str) -> bool:
    """Tell whether a path of the container is below /proc, where nothing can be made."""
    return split(path)[0] == "proc"


def unusable(what: str, path: str, found: os.stat_result, code: str = "OCIGPU-MNT-2") -> ApplyError:
    """Return the error that names the kind of file at ``path``."""
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
