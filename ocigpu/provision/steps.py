"""One function per kind of action: what happens inside the container's namespaces.

Nothing is decided here; each function does what its action says or raises.  Each effect is written to the journal
right before it happens.
"""

import errno
import os
import stat

from ocigpu.core.actions import Bind, Link, Mode, Node, RefreshLdCache, TextFile, Tmpfs
from ocigpu.core.errors import ApplyError, quoted
from ocigpu.provision.files import apply_mode, apply_text, unusable
from ocigpu.provision.inside import is_of_kernel
from ocigpu.provision.journal import LD_CACHE, LD_CACHE_DRAFT, MAX_LD_CACHE, keep_ld_cache, read_old_link
from ocigpu.provision.mounts import (
    MountTarget,
    Source,
    is_equal_tmpfs,
    is_own,
    read_mnt_id,
)
from ocigpu.provision.workplace import Workplace, _is_in_proc
from ocigpu.system.files import draft_name, remove_ldconfig_draft
from ocigpu.system.paths import open_in_root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


_NODE_OPTIONS = ("ro", "nosuid", "noexec")
"""Flags of a bind-mounted node.  Reading and writing the device is not "ro"'s business; changing its mode is."""
_COVER_OPTIONS = ("ro", "nosuid", "nodev")
_SPARE_NODES = ("/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
"""For profilers and for graphics: CUDA works without."""
_CODES = {Node: "OCIGPU-DEV-3", Link: "OCIGPU-MNT-3", RefreshLdCache: "OCIGPU-LD-1"}
_O_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def apply_action(place: Workplace, action: "Any") -> None:
    """Carry out one action.  Raises ApplyError naming the action and the cause."""
    try:
        _APPLY[type(action)](place, action)
    except OSError as error:
        path = error.filename
        where = f"{path}: " if isinstance(path, str) and path and path not in action.describe() else ""
        raise ApplyError(
            _CODES.get(type(action), "OCIGPU-MNT-1"),
            f"{action.describe()}: {where}{error.strerror}",
            _hint(error, action),
            errno=error.errno or 0,
        ) from error


def _hint(error: OSError, action: "Any") -> str | None:
    path = getattr(action, "container_path", "")
    if error.errno == errno.EROFS:
        return f"The container's root is read-only already: let the image contain {path}, or use a writable root."
    if error.errno == errno.ENOENT and path.startswith("/proc/driver"):
        return "The container's /proc shows no NVIDIA driver: mount a procfs there and do not mask /proc/driver."
    return None


def _apply_node(place: Workplace, action: Node) -> None:
    node = action.node
    rdev = os.makedev(node.major, node.minor)
    parent_fd, name = place.parent(node.container_path)
    try:
        try:
            found = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
        except FileNotFoundError:
            if read_mnt_id(parent_fd) != read_mnt_id(place.root_fd) and not is_own(
                parent_fd, place.root_fd, place.host_devices
            ):
                _leave_to_host(place, action)
                return
            usable = place.make_nodes and not os.fstatvfs(parent_fd).f_flag & os.ST_NODEV
            if usable and _make_node(place, action, parent_fd, name):
                return
            _require_host_node(action)
            place.journal.record("file", node.container_path)
            os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o444, dir_fd=parent_fd))
        else:
            if stat.S_ISCHR(found.st_mode) and found.st_rdev == rdev:
                return  # the runtime made it, or the image has it
            if not stat.S_ISREG(found.st_mode) or found.st_size:
                raise unusable(action.describe(), node.container_path, found)
            _require_host_node(action)
        source = place.source(node.host_path, "node", _NODE_OPTIONS, rdev)
        _mount_on_file(place, source, node.container_path, parent_fd, name)
    finally:
        os.close(parent_fd)


def _leave_to_host(place: Workplace, action: Node) -> None:
    """Make nothing in a volume, which would have it for ever: what the container can do without is a note."""
    path = action.node.container_path
    if path in _SPARE_NODES:
        place.notes.append(f"{path} was left out: its directory is the host's, which has no such node")
        return
    raise ApplyError(
        "OCIGPU-DEV-3",
        f"{action.describe()}: its directory is a volume of the host, which has no such node",
        "Make it on the host (ocigpu system create-device-nodes), or give the container a /dev of its own.",
    )


def _make_node(place: Workplace, action: Node, parent_fd: int, name: str) -> bool:
    """Make the node with exactly the mode and owner of the plan; False where mknod is refused."""
    node = action.node
    rdev = os.makedev(node.major, node.minor)
    place.journal.record("node", node.container_path, rdev=rdev)
    try:
        os.mknod(name, stat.S_IFCHR | node.mode, rdev, dir_fd=parent_fd)
    except PermissionError:
        return False
    fd = os.open(name, _O_LOOK, dir_fd=parent_fd)
    try:
        made = os.fstat(fd)
        if not stat.S_ISCHR(made.st_mode) or made.st_rdev != rdev:
            raise unusable(action.describe(), node.container_path, made)
        # by the descriptor's own name: the path may have been exchanged by somebody who shares the directory
        if (made.st_uid, made.st_gid) != (node.uid, node.gid):
            os.chown(f"fd/{fd}", node.uid, node.gid)
        if stat.S_IMODE(made.st_mode) != node.mode or made.st_uid != node.uid:
            os.chmod(f"fd/{fd}", node.mode)
    finally:
        os.close(fd)
    return True


def _require_host_node(action: Node) -> None:
    if not action.node.host_path:
        raise ApplyError(
            "OCIGPU-DEV-3",
            f"{action.describe()}: mknod is not possible for this container and the host has no node to mount",
            f"Create the node on the host (nvidia-modprobe): {action.node.container_path}",
        )


def _apply_bind(place: Workplace, action: Bind) -> None:
    try:
        source = place.source(action.host_path, action.kind, action.options)
    except FileNotFoundError:
        if not action.optional:
            raise
        place.notes.append(f"{action.host_path} has vanished from the host and was left out")
        return
    try:
        _bind(place, action, source)
    except OSError as error:
        if error.errno != errno.EROFS or not action.optional:
            raise
        place.notes.append(f"{action.container_path} was left out: the container's root is read-only")
    finally:
        if source.tree_fd >= 0:
            os.close(source.tree_fd)


def _bind(place: Workplace, action: Bind, source: Source) -> None:
    path = action.container_path
    directory = action.kind == "directory"
    parent_fd, name = place.parent(path)
    try:
        try:
            found = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
        except FileNotFoundError:
            found = None
        if found is not None and stat.S_ISLNK(found.st_mode):
            place.journal.record("unlink", path, old=read_old_link(parent_fd, name))
            os.unlink(name, dir_fd=parent_fd)
            found = None
        if found is None:
            if _is_in_proc(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if directory:
                place.journal.record("mkdir", path)
                os.mkdir(name, 0o755, dir_fd=parent_fd)
            else:
                place.journal.record("file", path)
                mode = 0o555 if source.status.st_mode & 0o111 and action.kind == "file" else 0o444
                os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=parent_fd))
        if directory:
            fd = os.open(name, _O_LOOK | os.O_DIRECTORY, dir_fd=parent_fd)
            try:
                place.mount(source, MountTarget(path, parent_fd, name, fd))
            finally:
                os.close(fd)
        else:
            _mount_on_file(place, source, path, parent_fd, name)
    except NotADirectoryError as error:
        raise unusable(action.describe(), path, os.stat(name, dir_fd=parent_fd, follow_symlinks=False)) from error
    finally:
        os.close(parent_fd)


def _mount_on_file(place: Workplace, source: Source, path: str, parent_fd: int, name: str) -> None:
    """Mount a file, socket or node on the regular file or socket ``name``; anything else there is refused."""
    fd = os.open(name, _O_LOOK, dir_fd=parent_fd)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISSOCK(found.st_mode):
            raise unusable(f"bind {source.host_path} -> {path}", path, found)
        place.mount(source, MountTarget(path, parent_fd, name, fd))
    finally:
        os.close(fd)


def _apply_tmpfs(place: Workplace, action: Tmpfs) -> None:
    path = action.container_path
    parent_fd, name = place.parent(path)
    tree_fd = -1
    try:
        try:
            found = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
        except FileNotFoundError:
            if _is_in_proc(path):
                raise
            place.journal.record("mkdir", path)
            os.mkdir(name, 0o555, dir_fd=parent_fd)
        else:
            if not stat.S_ISDIR(found.st_mode):
                raise unusable(action.describe(), path, found)
        fd = os.open(name, _O_LOOK | os.O_DIRECTORY, dir_fd=parent_fd)
        try:
            target = MountTarget(path, parent_fd, name, fd)
            if is_equal_tmpfs(action, place.uid, place.gid, target):
                return
            under = place.mounts.contain(target)
            if place.mounts.new_calls:
                tree_fd = place.mounts.new_tmpfs(action, place.uid, place.gid)
                place.journal.record("mount", path, under=under, mount=read_mnt_id(tree_fd))
                place.mounts.attach_tmpfs(tree_fd, target)
            else:
                place.journal.record("mount", path, under=under, mount=0)
                place.mounts.mount_tmpfs(action, place.uid, place.gid, target)
        finally:
            os.close(fd)
    finally:
        os.close(parent_fd)
        if tree_fd >= 0:
            os.close(tree_fd)


def _apply_link(place: Workplace, action: Link) -> None:
    path = action.container_path
    parent_fd, name = place.parent(path)
    try:
        try:
            found = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
        except FileNotFoundError:
            old = None
        else:
            if stat.S_ISREG(found.st_mode):
                _cover_with_target(place, action, parent_fd, name)
                return
            if not stat.S_ISLNK(found.st_mode):
                raise unusable(action.describe(), path, found, "OCIGPU-MNT-3")
            place.clear(parent_fd)
            old = read_old_link(parent_fd, name)
            if old[0] == action.target:
                return
        temp = draft_name()
        place.journal.record("draft", os.path.join(os.path.dirname(path), temp))
        os.symlink(action.target, temp, dir_fd=parent_fd)
        inode = os.stat(temp, dir_fd=parent_fd, follow_symlinks=False).st_ino
        place.journal.record("link", path, target=action.target, old=old, temp=temp, ino=inode)
        os.rename(temp, name, src_dir_fd=parent_fd, dst_dir_fd=parent_fd)
    finally:
        os.close(parent_fd)


def _cover_with_target(place: Workplace, action: Link, parent_fd: int, name: str) -> None:
    """Mount what the link would lead to, inside the container, over the image's own file of that name.

    That file would win otherwise; it is not removed, because what is removed could not be put back if we are killed.
    """
    path = action.container_path
    where = os.path.join(path[: path.rindex("/") + 1], action.target)
    target_fd = open_in_root(place.root_fd, where, os.O_PATH)
    try:
        if not stat.S_ISREG(os.fstat(target_fd).st_mode):
            raise unusable(action.describe(), where, os.fstat(target_fd), "OCIGPU-MNT-3")
        if is_of_kernel(target_fd):
            raise ApplyError("OCIGPU-MNT-3", f"{action.describe()}: {quoted(where)} leads to a file of the kernel")
        fd = os.open(name, _O_LOOK, dir_fd=parent_fd)
        try:
            target = MountTarget(path, parent_fd, name, fd)
            if os.path.samestat(os.fstat(fd), os.fstat(target_fd)):
                return  # covered by a hook before this one, or the same file by a second name
            under = place.mounts.contain(target)
            place.journal.record("mount", path, under=under, mount=0)
            place.mounts.attach_copy(target_fd, _COVER_OPTIONS, target)
        finally:
            os.close(fd)
    finally:
        os.close(target_fd)


def start_ldconfig(place: Workplace, action: RefreshLdCache) -> None:
    """Make ready what the next refresh of the loader's cache will run in: that takes a while, on another core."""
    from ocigpu.provision import ldconfig  # loaded by the parent: nothing is imported in here

    if place.ldconfig_fd >= 0:
        place.ldconfig = ldconfig.start_ldconfig(
            place.ldconfig_fd, place.root_fd, action.directories, place.uid, place.gid
        )


def _apply_ld_cache(place: Workplace, action: RefreshLdCache) -> None:
    if place.ldconfig_fd < 0:
        place.notes.append("this host has no ldconfig: the container's loader finds libraries by their links alone")
        return
    kept = keep_ld_cache(place.root_fd, place.backup_fd)
    if kept is None:
        place.notes.append(
            f"{LD_CACHE} of the image is no regular file of at most {MAX_LD_CACHE >> 20} MiB and was left alone"
        )
        return
    parent_fd, _ = place.parent(LD_CACHE)
    try:
        place.clear(parent_fd)
        remove_ldconfig_draft(parent_fd)
    finally:
        os.close(parent_fd)
    place.journal.record("draft", LD_CACHE_DRAFT)
    place.journal.record("cache", LD_CACHE, temp=draft_name(), **kept)
    if place.ldconfig is None:
        start_ldconfig(place, action)
    started, place.ldconfig = place.ldconfig, None
    warning = started.finish() if started else ""
    if warning:
        place.notes.append(warning)


_APPLY: "dict[Any, Any]" = {
    Node: _apply_node,
    Bind: _apply_bind,
    Tmpfs: _apply_tmpfs,
    Link: _apply_link,
    TextFile: apply_text,
    Mode: apply_mode,
    RefreshLdCache: _apply_ld_cache,
}
