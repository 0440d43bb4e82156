"""What is done inside a container's namespaces, and how each thing is undone: :data:`OPERATIONS`.

Nothing is decided here; each function does what its action says or raises.  Each effect is noted in the journal right
before it comes.  Undoing therefore copes with an effect that never came, and removes only what looks like ours: an
empty file, an empty directory, a node of that number, a link with that target, a file with that content, a mount that
was not there before.  Undoing twice is like undoing once.

Another container on the same root directory may rely on what was made there: on files that it has mounted something
on, on links, on the loader's cache.  Where there is one (:mod:`ocigpu.provision.mounts`), all this stays, as it
stays of a container that ran; what is this container's alone is undone, above all its mounts.

Names of an image may be anything: what is at one is looked at by descriptor, and a file or link that is written has a
new name first and is then renamed over the old one, so a link at that place is replaced and never followed.

Links of an image, and a volume's owner, decide where a path leads.  So whatever is made, replaced or changed is first
found to be on the container's root mount or on a tmpfs of its own (:meth:`Transaction.require_own`), by the very
descriptor that is then used.  What is mounted on something that is there already changes nothing where that lies.
"""

import errno
import fcntl
import os
import stat

from ocigpu.core.actions import Bind, FinishLdconfig, Link, Mode, Node, RefreshLdCache, StartLdconfig, TextFile, Tmpfs
from ocigpu.core.errors import MAKE_NODES, ApplyError, cause, quoted
from ocigpu.core.record import NamedTuple
from ocigpu.provision import files, mounts
from ocigpu.provision.inside import is_of_kernel
from ocigpu.provision.mounts import MountTarget, Source, read_mnt_id
from ocigpu.system import libc
from ocigpu.system.files import draft_name, remove_drafts, remove_ldconfig_draft, replace_file
from ocigpu.system.log import step
from ocigpu.system.paths import At, make_directories, named, open_in_root, open_parent, opened, split
from ocigpu.system.proc import read_mounts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet
    from typing import Any, TypeAlias

    from ocigpu.provision.container import LiveContainer
    from ocigpu.provision.files import Entry
    from ocigpu.provision.journal import Journal
    from ocigpu.provision.ldconfig import Started

    Sources: TypeAlias = dict[tuple[str, str, tuple[str, ...]], Source]

MAX_TEXT = 256 << 10
"""Bytes of a text file, ours or the image's that it replaces."""
MAX_LD_CACHE = 16 << 20
"""A loader cache of an image above this many bytes is not kept, and so not changed."""
LD_CACHE = "/etc/ld.so.cache"
LD_CACHE_DRAFT = "/etc/ld.so.cache~"
"""Where ldconfig writes before it renames; one that is killed leaves it there."""
_NODE_OPTIONS = ("ro", "nosuid", "noexec")
"""Flags of a bind-mounted node.  Reading and writing the device is not "ro"'s business; changing its mode is."""
_COVER_OPTIONS = ("ro", "nosuid", "nodev")
_NO_VOLUME = "Mount the volume somewhere else. If it is not mounted there, a link of the image leads into it."
_SPARE_NODES = ("/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
"""For profilers and for graphics: CUDA works without."""


class VolumeError(Exception):
    """The place of something that is to be made or changed is not the container's own; ``path`` of the container."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class Supplies(NamedTuple):
    """What a worker has of the host.

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

    def do(self, action: "Any") -> None:
        """Take one step of a plan.  Raises ApplyError naming the step, the call that failed, and the cause."""
        operation = OPERATIONS[type(action)]
        assert operation.do is not None, "a step of a plan"
        begun = len(self.journal.entries)
        with step(action):
            try:
                operation.do(self, action)
            except (OSError, VolumeError, ApplyError) as error:
                if getattr(action, "optional", False) and not self.undo(self.journal.entries[begun:]):
                    read_only = getattr(error, "errno", 0) == errno.EROFS
                    why = "the container's root is read-only" if read_only else _why(error)
                    self.notes.append(f"{action.container_path} was left out: {why}")
                    return
                if isinstance(error, ApplyError):
                    raise
                message = f"{action.describe()}: {_why(error)}"
                if isinstance(error, VolumeError):
                    raise ApplyError("OCIGPU-MNT-4", message, _NO_VOLUME) from error
                raise ApplyError(operation.code, message, _hint(error, action), errno=error.errno or 0) from error

    def undo(self, entries: "list[Entry]") -> list[str]:
        """Undo what was noted, last entry first; return a line about each that could not be undone."""
        left = []
        lasting = [entry for entry in entries if _UNDO[entry["do"]].lasting]
        shared = bool(lasting) and mounts.has_neighbours(self.root_fd)
        for entry in reversed(entries):
            try:
                if shared and _UNDO[entry["do"]].lasting and not self._is_private(entry):
                    continue
                undo = _UNDO[entry["do"]].undo
                assert undo is not None, "what has a word in the journal"
                with step(f"undo-{entry['do']}", entry["path"]):
                    undo(self, entry)
            except FileNotFoundError:  # the effect never came, or is undone already
                pass
            except OSError as error:
                left.append(cause(error) if error.filename else f"{entry['do']} {entry['path']}: {cause(error)}")
        return left

    def _is_private(self, entry: "Entry") -> bool:
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
        if _is_in_proc(path):
            return open_parent(self.root_fd, path)
        *parents, name = split(path)

        def on_create(made: str) -> None:
            self.note("mkdir", made)

        def check(fd: int, _: str) -> None:
            if not self.is_own(fd):
                raise VolumeError(path)

        return At(make_directories(self.root_fd, "/" + "/".join(parents), 0o755, on_create, check=check), name, path)

    def clear(self, at: At) -> None:
        """Remove what starts that were killed have left in a directory; once."""
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
        """Mount a detached tree, closed here; without one (-1) let ``by_name`` do it.  It reaches nobody else."""
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


def _why(error: "OSError | VolumeError | ApplyError") -> str:
    if isinstance(error, VolumeError):
        return f"{quoted(error.path)} is in a volume, or in another file system than the container's own"
    if isinstance(error, ApplyError):
        return error.message
    return cause(error)


def _hint(error: OSError, action: "Any") -> str | None:
    path = getattr(action, "container_path", "")
    if error.errno == errno.EROFS:
        return f"The container's root is read-only already: let the image contain {path}, or use a writable root."
    if error.errno == errno.ENOENT and path.startswith("/proc/driver"):
        return "The container's /proc shows no NVIDIA driver: mount a procfs there and do not mask /proc/driver."
    return None


def _is_in_proc(path: str) -> bool:
    return split(path)[0] == "proc"


# -- device nodes ------------------------------------------------------------------------------------------------


def make_node(transaction: Transaction, action: Node) -> None:
    """Make a device node; where that is not possible, mount the host's."""
    node, rdev = action.node, os.makedev(action.node.major, action.node.minor)
    with transaction.at(node.container_path) as at:
        found = at.find()
        if found is not None and stat.S_ISCHR(found.st_mode) and found.st_rdev == rdev:
            return  # the runtime made it, or the image has it
        if found is not None and (not stat.S_ISREG(found.st_mode) or found.st_size):
            raise files.unusable(action.describe(), node.container_path, found)
        if found is None:
            if not transaction.is_own(at.fd):
                _leave_to_host(transaction, action)
                return
            if transaction.make_nodes and not os.fstatvfs(at.fd).f_flag & os.ST_NODEV:
                transaction.note("node", node.container_path, rdev=rdev)
                try:
                    at.mknod(stat.S_IFCHR | node.mode, rdev)
                except PermissionError:  # mounted, then
                    pass
                else:
                    _set_owner(action, at, rdev)
                    return
        if not node.host_path:
            raise ApplyError(
                "OCIGPU-DEV-3",
                f"{action.describe()}: mknod is not possible for this container and the host has no node to mount",
                f"Make it on the host: {MAKE_NODES}"
                if node.container_path.startswith("/dev/nvidia")
                else f"Make it on the host: {node.container_path}",
            )
        if found is None:
            transaction.note("file", node.container_path)
            at.create(0o444)
        _mount_on_file(transaction, transaction.source(node.host_path, "node", _NODE_OPTIONS, rdev), at)


def _set_owner(action: Node, at: At, rdev: int) -> None:
    """Give a node that was just made exactly the owner and mode of the plan."""
    node = action.node
    with opened(at.open()) as fd:
        made = os.fstat(fd)
        if not stat.S_ISCHR(made.st_mode) or made.st_rdev != rdev:
            raise files.unusable(action.describe(), node.container_path, made)
        # by the descriptor's own name: the path may have been exchanged by somebody who shares the directory
        if (made.st_uid, made.st_gid) != (node.uid, node.gid):
            with named("chown", at.path):
                os.chown(f"fd/{fd}", node.uid, node.gid)
        if stat.S_IMODE(made.st_mode) != node.mode or made.st_uid != node.uid:
            with named("chmod", at.path):
                os.chmod(f"fd/{fd}", node.mode)


def _leave_to_host(transaction: Transaction, action: Node) -> None:
    """Make nothing in a volume, which would have it for ever: what the container can do without is a note."""
    path = action.node.container_path
    if path in _SPARE_NODES:
        transaction.notes.append(f"{path} was left out: its directory is the host's, which has no such node")
        return
    raise ApplyError(
        "OCIGPU-DEV-3",
        f"{action.describe()}: its directory is a volume of the host, which has no such node",
        f"Make it on the host ({MAKE_NODES}), or give the container a /dev of its own.",
    )


def remove_made(transaction: Transaction, entry: "Entry") -> None:
    """Remove a node, an empty file or directory, or a draft."""
    with transaction.own_parent(entry["path"]) as at:
        status, do = at.stat(), entry["do"]
        if do == "mkdir" and stat.S_ISDIR(status.st_mode):
            at.rmdir()
        elif (
            (do == "file" and stat.S_ISREG(status.st_mode) and status.st_size == 0)
            or (do == "node" and stat.S_ISCHR(status.st_mode) and status.st_rdev == entry["rdev"])
            or (do == "draft" and (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)))
        ):
            at.unlink()


# -- mounts ------------------------------------------------------------------------------------------------------


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
        transaction.note("unlink", at.path, old=files.read_old_link(at))
        at.unlink()
        found = None
    if found is None:
        if _is_in_proc(at.path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"stat {at.path}")
        transaction.require_own(at)
        transaction.note("mkdir" if directory else "file", at.path)
        if directory:
            at.mkdir(0o755)
        else:
            at.create(0o555 if source.status.st_mode & 0o111 and action.kind == "file" else 0o444)
    if not directory:
        _mount_on_file(transaction, source, at)
        return
    try:
        fd = at.open(os.O_PATH | os.O_DIRECTORY)
    except NotADirectoryError as error:
        raise files.unusable(action.describe(), at.path, at.stat()) from error
    _mount(transaction, source, MountTarget(at, fd))


def _mount_on_file(transaction: Transaction, source: Source, at: At) -> None:
    """Mount a file, socket or node on a regular file or socket; anything else there is refused."""
    target = MountTarget(at, at.open())
    found = os.fstat(target.fd)
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISSOCK(found.st_mode):
        os.close(target.fd)
        raise files.unusable(f"bind {source.host_path} -> {at.path}", at.path, found)
    _mount(transaction, source, target)


def _mount(transaction: Transaction, source: Source, target: MountTarget) -> None:
    """Mount and close both; nothing is done if it is there, as a hook that runs twice finds it."""

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
            if _is_in_proc(at.path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"stat {at.path}")
            transaction.require_own(at)
            transaction.note("mkdir", at.path)
            at.mkdir(0o555)
        elif not stat.S_ISDIR(found.st_mode):
            raise files.unusable(action.describe(), at.path, found)
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
            files.make_old_link(at, entry["old"])
        except FileExistsError:  # it was never taken away
            return


# -- links -------------------------------------------------------------------------------------------------------


def make_link(transaction: Transaction, action: Link) -> None:
    """Make a symbolic link, in place of another one; a file of the image is covered with what it would lead to."""
    with transaction.at(action.container_path) as at:
        found, old = at.find(), None
        if found is not None:
            if stat.S_ISREG(found.st_mode):
                _cover_with_target(transaction, action, at)
                return
            if not stat.S_ISLNK(found.st_mode):
                raise files.unusable(action.describe(), at.path, found, "OCIGPU-MNT-3")
            old = files.read_old_link(at)
            if old[0] == action.target:
                if transaction.is_own(at.fd):
                    transaction.clear(at)
                return
        transaction.require_own(at)
        if old is not None:
            transaction.clear(at)
        draft = at.beside(draft_name())
        transaction.note("draft", f"{at.path.rpartition('/')[0]}/{draft.name}")
        draft.symlink(action.target)
        inode = draft.stat().st_ino
        transaction.note("link", at.path, target=action.target, old=old, temp=draft.name, ino=inode)
        draft.rename(at.name)


def _cover_with_target(transaction: Transaction, action: Link, at: At) -> None:
    """Mount what the link would lead to, inside the container, over the image's own file of that name.

    That file would win otherwise; it is not removed, because what is removed could not be put back if we are killed.
    """
    where = os.path.join(at.path[: at.path.rindex("/") + 1], action.target)
    with opened(open_in_root(transaction.root_fd, where, os.O_PATH)) as fd:
        source = Source(at.path, -1, _COVER_OPTIONS, os.fstat(fd))
        if not stat.S_ISREG(source.status.st_mode):
            raise files.unusable(action.describe(), where, source.status, "OCIGPU-MNT-3")
        if is_of_kernel(fd):
            raise ApplyError("OCIGPU-MNT-3", f"{action.describe()}: {quoted(where)} leads to a file of the kernel")
        with MountTarget(at, at.open()) as target:
            if os.path.samestat(os.fstat(target.fd), source.status):
                return  # covered by a hook before this one, or the same file by a second name
            tree_fd = mounts.clone(fd, _COVER_OPTIONS, where) if transaction.supplies.new_calls else -1
            transaction.mount(target, tree_fd, lambda: mounts.bind_by_name(fd, source, target))


def remove_link(transaction: Transaction, entry: "Entry") -> None:
    """Take our link away, or put the image's back.

    "temp" is the name ours had before it was moved into place, "ino" its number: another start may have made it anew.
    """
    with transaction.own_parent(entry["path"]) as at:
        draft = at.beside(entry["temp"])
        if files.read_link(draft) == entry["target"]:
            draft.unlink()
        if entry.get("ino") not in (None, at.stat().st_ino) or files.read_link(at) != entry["target"]:
            return
        if entry["old"] is None:
            at.unlink()
        else:
            files.make_old_link(draft, entry["old"])
            draft.rename(at.name)


# -- files -------------------------------------------------------------------------------------------------------


def write_text(transaction: Transaction, action: TextFile) -> None:
    """Write a small file; raises ApplyError OCIGPU-MNT-2 when something unfit is in its place."""
    content = action.content.encode()
    if len(content) > MAX_TEXT:
        raise ApplyError("OCIGPU-MNT-2", f"{action.describe()}: larger than {MAX_TEXT >> 10} KiB")
    with transaction.at(action.container_path) as at:
        found = at.find()
        if found is not None:
            if not stat.S_ISREG(found.st_mode) and not stat.S_ISLNK(found.st_mode):
                raise files.unusable(action.describe(), at.path, found)
            if action.only_if_missing and _leads_to_file(transaction.root_fd, at.path):
                return
            if files.has_content(at, content):
                return
        transaction.require_own(at)
        kept = files.keep_file(at, transaction.supplies.backup_fd, MAX_TEXT)
        if kept is None:
            raise ApplyError(
                "OCIGPU-MNT-2",
                f"{action.describe()}: the container has no file of at most {MAX_TEXT >> 10} KiB at {quoted(at.path)}",
            )
        transaction.clear(at)
        draft = draft_name()
        transaction.note("text", at.path, content=action.content, temp=draft, **kept)
        with named("write", at.path):
            replace_file(at.name, content, action.mode, at.fd, draft=draft)


def _leads_to_file(root_fd: int, path: str) -> bool:
    try:
        with opened(open_in_root(root_fd, path, os.O_PATH)) as fd:
            return stat.S_ISREG(os.fstat(fd).st_mode)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES):  # a link to nothing
            raise
        return False


def restore_text(transaction: Transaction, entry: "Entry") -> None:
    """Take our file away, or put the image's back; "temp" is the name ours had before it was moved into place."""
    with transaction.own_parent(entry["path"]) as at:
        files.remove_if_there(at.beside(entry["temp"]))
        if not files.has_content(at, entry["content"].encode()):
            return
        if entry["kind"] == "none":
            at.unlink()
        else:
            files.put_back(entry, at, transaction.supplies.backup_fd)


def set_mode(transaction: Transaction, action: Mode) -> None:
    """Set permission bits of what is the container's own: a volume, or a mounted file, is the host's.

    What may not be changed, or is no file or directory, is left with a note.
    """
    path = action.container_path
    try:
        fd = open_in_root(transaction.root_fd, path, os.O_PATH)
    except (FileNotFoundError, NotADirectoryError):
        return
    with opened(fd):
        found = os.fstat(fd)
        old = stat.S_IMODE(found.st_mode)
        if old == action.mode:
            return
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            reason = "it is no file or directory"
        elif not transaction.is_own(fd):
            reason = "it is mounted from elsewhere"
        else:
            transaction.note("mode", path, old=old, mode=action.mode, ino=found.st_ino)
            try:
                with named("chmod", path):
                    os.chmod(f"fd/{fd}", action.mode)
            except PermissionError:
                reason = "not permitted"
            else:
                return
    transaction.notes.append(f"{path} keeps its mode {old:04o}: {reason}")


def restore_mode(transaction: Transaction, entry: "Entry") -> None:
    """Give a file that still has our mode its own again."""
    with opened(open_in_root(transaction.root_fd, entry["path"], os.O_PATH)) as fd:
        status = os.fstat(fd)
        unchanged = status.st_ino == entry["ino"] and stat.S_IMODE(status.st_mode) == entry["mode"]
        if unchanged and transaction.is_own(fd):
            with named("chmod", entry["path"]):
                os.chmod(f"fd/{fd}", entry["old"])


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
    """Give the container's root the flags that it had."""
    mounts.remount(transaction.root_fd, entry["flags"], "/")


# -- the loader's cache ------------------------------------------------------------------------------------------


def start_ldconfig(transaction: Transaction, action: StartLdconfig) -> None:
    """Make ready what a refresh of the loader's cache will run in: that takes a while, on another core."""
    from ocigpu.provision import ldconfig  # loaded by the parent: nothing is imported in here

    if transaction.supplies.ldconfig_fd >= 0:
        uid, gid = transaction.uid, transaction.gid
        with opened(lock_ldconfig(transaction, fcntl.LOCK_SH)) as fd:
            directories = action.refresh.directories
            transaction.ldconfig = ldconfig.start_ldconfig(fd, transaction.root_fd, directories, uid, gid)


def lock_ldconfig(transaction: Transaction, kind: int = fcntl.LOCK_EX) -> int:
    """Return a descriptor of ldconfig's program with a lock: LOCK_EX waits for the end of those that have LOCK_SH."""
    fd = os.open(f"fd/{transaction.supplies.ldconfig_fd}", os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(fd, kind)
    return fd


def refresh_ld_cache(transaction: Transaction, action: RefreshLdCache) -> None:
    """Let the host's ldconfig write the loader's cache, unless it can be merged where the plan says so.

    It is not waited for: :func:`finish_ldconfig`.  A cache that would lie in a volume is a note.
    """
    try:
        _refresh_ld_cache(transaction, action)
    except VolumeError as error:
        stop_ldconfig(transaction)
        text = f"the loader's cache was left out: {_why(error)}; libraries are found by their links alone"
        transaction.notes.append(text)


def _refresh_ld_cache(transaction: Transaction, action: RefreshLdCache) -> None:
    if transaction.supplies.ldconfig_fd < 0 and not action.entries:
        _note_no_ldconfig(transaction)
        return
    with transaction.at(LD_CACHE) as at:
        transaction.require_own(at)
        kept = files.keep_file(at, transaction.supplies.backup_fd, MAX_LD_CACHE)
        if kept is None:
            size = f"{MAX_LD_CACHE >> 20} MiB"
            text = f"{LD_CACHE} of the image is no regular file of at most {size} and was left alone"
            transaction.notes.append(text)
            stop_ldconfig(transaction)  # nobody has to wait for it
            return
        transaction.clear(at)
        remove_ldconfig_draft(at.fd)
        if action.entries and _merge_ld_cache(transaction, action, at, kept):
            return
        if read_mnt_id(at.fd) != transaction.root_id:  # nothing else can be written to in its sandbox
            raise VolumeError(at.path)
    if transaction.supplies.ldconfig_fd < 0:
        _note_no_ldconfig(transaction)
        return
    transaction.note("draft", LD_CACHE_DRAFT)
    transaction.note("cache", LD_CACHE, temp=draft_name(), **kept)
    if transaction.ldconfig is None:
        start_ldconfig(transaction, StartLdconfig(action))
    if transaction.ldconfig:
        transaction.ldconfig.go()


def finish_ldconfig(transaction: Transaction, _: FinishLdconfig) -> None:
    """Wait for the ldconfig of :func:`refresh_ld_cache`; what one that failed has left, on a full disk say, goes."""
    started, transaction.ldconfig = transaction.ldconfig, None
    if started and (warning := started.finish()):
        transaction.notes.append(warning)
        try:
            with transaction.own_parent(LD_CACHE) as at:
                remove_ldconfig_draft(at.fd)
        except OSError:  # there is no such directory any more
            return


def stop_ldconfig(transaction: Transaction) -> None:
    """End an ldconfig that is ready or runs."""
    started, transaction.ldconfig = transaction.ldconfig, None
    if started:
        started.stop()


def _note_no_ldconfig(transaction: Transaction) -> None:
    transaction.notes.append("this host has no ldconfig: the container's loader finds libraries by their links alone")


def _merge_ld_cache(transaction: Transaction, action: RefreshLdCache, at: At, kept: "Entry") -> bool:
    """Add the action's entries to the image's cache; returns whether it is one to which they can be added."""
    from ocigpu.gpus.loader_cache import merge_ld_cache  # loaded by the parent: nothing is imported in here

    if kept["kind"] == "link":  # ldconfig replaces it
        return False
    old, mode = b"", 0o644
    if kept["kind"] == "file":
        old, mode = os.pread(transaction.supplies.backup_fd, kept["size"], kept["offset"]), kept["mode"]
    merged = merge_ld_cache(old, action.entries, os.uname().machine)
    if merged is None:
        return False
    if merged != old:
        draft = draft_name()
        transaction.note("draft", f"{at.path.rpartition('/')[0]}/{draft}")

        def note(number: int) -> None:
            transaction.note("cache", at.path, temp=draft, ino=number, **kept)

        with named("write", at.path):
            replace_file(at.name, merged, mode, at.fd, draft=draft, note=note)
    return True


def restore_ld_cache(transaction: Transaction, entry: "Entry") -> None:
    """Put the image's own cache back, unless ldconfig never came to replace it.

    "ino" is the number of a file that was merged: another start may have made it anew.
    """
    backup_fd = transaction.supplies.backup_fd
    with transaction.own_parent(entry["path"]) as at:
        if entry.get("ino") not in (None, at.stat().st_ino):
            return
        if entry["kind"] == "none":
            if stat.S_ISREG(at.stat().st_mode):
                at.unlink()
        elif entry["kind"] == "link":
            if files.read_link(at) != entry["old"][0]:
                files.put_back(entry, at, backup_fd)
        elif not files.is_same(at, entry["same"]):
            files.put_back(entry, at, backup_fd)


class Operation(NamedTuple):
    """How something is done, and undone.

    ``word``: its name in the journal, "" for what notes nothing.  ``do``: None for what others are made of.  ``code``:
    of what goes wrong.  ``lasting``: it stays where another container has the same root directory.
    """

    word: str
    do: "Callable[[Transaction, Any], None] | None"
    undo: "Callable[[Transaction, Entry], None] | None"
    code: str = "OCIGPU-MNT-1"
    lasting: bool = True


OPERATIONS: "dict[Any, Operation]" = {
    Node: Operation("node", make_node, remove_made, "OCIGPU-DEV-3"),
    Bind: Operation("mount", bind, unmount, lasting=False),
    Tmpfs: Operation("mount", cover_with_tmpfs, unmount, lasting=False),
    Link: Operation("link", make_link, remove_link, "OCIGPU-MNT-3"),
    TextFile: Operation("text", write_text, restore_text),
    Mode: Operation("mode", set_mode, restore_mode),
    StartLdconfig: Operation("", start_ldconfig, None, "OCIGPU-LD-1"),
    RefreshLdCache: Operation("cache", refresh_ld_cache, restore_ld_cache, "OCIGPU-LD-1"),
    FinishLdconfig: Operation("", finish_ldconfig, None, "OCIGPU-LD-1"),
    "directory": Operation("mkdir", None, remove_made),
    "file": Operation("file", None, remove_made),
    "draft": Operation("draft", None, remove_made, lasting=False),
    "link in the way": Operation("unlink", None, restore_link),
    "root": Operation("writable", None, make_root_read_only, lasting=False),
}
"""By the steps of a plan, and what these are made of."""
_UNDO = {operation.word: operation for operation in OPERATIONS.values()}
