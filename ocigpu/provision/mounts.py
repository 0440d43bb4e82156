"""Mounts by descriptor: opening sources on the host, attaching them, and keeping them from propagating back.

With the mount calls of Linux 5.2 and 5.12 a mount has its flags before any other process can see it.  Without them
mount(2) does the same in two steps, named by /proc/self/fd links; the functions here then expect /proc/self as working
directory (:func:`enter_own_proc`), because the container's /proc, if there is one, does not show this process.
"""

import errno
import os
import stat

from ocigpu.core.errors import ApplyError
from ocigpu.core.record import NamedTuple
from ocigpu.system import libc
from ocigpu.system.paths import At, named, opened
from ocigpu.system.proc import parse_mounts, read_mnt_id_of, read_mounts, read_proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet
    from typing import Self

    from ocigpu.core.actions import Tmpfs
    from ocigpu.system.proc import Mount

_ATTRIBUTES = {
    "ro": libc.MOUNT_ATTR_RDONLY,
    "nosuid": libc.MOUNT_ATTR_NOSUID,
    "nodev": libc.MOUNT_ATTR_NODEV,
    "noexec": libc.MOUNT_ATTR_NOEXEC,
}
"""Values of the first four MOUNT_ATTR_* are those of MS_* and ST_* too (include/uapi/linux/mount.h, statvfs(3))."""
_LOCKED = 0x40F  # ST_* of the flags a user namespace may not clear: the four above and noatime; see kept_flags
_ST_NODIRATIME, _ST_RELATIME = 0x800, 0x1000
_MS_NODIRATIME, _MS_RELATIME = 0x800, 1 << 21
_KINDS = {
    "file": (stat.S_IFREG,),
    "directory": (stat.S_IFDIR,),
    "socket": (stat.S_IFSOCK,),
    "node": (stat.S_IFCHR,),
}
_MAX_DEPTH = 4096
_MAX_ROUNDS = 64
"""How often new processes are searched: any user can keep starting some."""
_PRIVATE_TMPFS = ("nosuid", "nodev", "noexec")


class Source(NamedTuple):
    """A source on the host: ``tree_fd`` is a detached copy of its mount, or -1 if the kernel only has mount(2)."""

    host_path: str
    tree_fd: int
    options: tuple[str, ...]
    status: os.stat_result


class MountTarget(NamedTuple):
    """Where to mount: a name in its directory, and an O_PATH descriptor of what has it, closed by a ``with``."""

    at: At
    fd: int

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def enter_own_proc(own_proc_fd: int) -> None:
    """Make our /proc/self the working directory, so that "fd/7" and "mountinfo" work in every namespace."""
    os.fchdir(own_proc_fd)


def read_mnt_id(fd: int, own_proc: str = ".") -> int:
    """Return the id of the mount a descriptor is on, as in mountinfo; needs :func:`enter_own_proc`, or its path.

    statx(2) tells since Linux 5.8; before, the line "mnt_id:" of fdinfo does (proc(5)).
    """
    try:
        return libc.read_mount_id(fd)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
    return read_mnt_id_of(fd, own_proc)


def take_source(
    host_path: str, kind: str, options: tuple[str, ...], new_calls: bool, rdev: int = 0, stand_in: bool = False
) -> Source:
    """Return the source at ``host_path``, checked on the descriptor to be of ``kind``.

    ``kind``: "file", "directory", "socket", or "node", a character device of number ``rdev``; ``stand_in``: a regular
    file is as good as a node.  Must run in a mount namespace that shows the host.  Raises OSError when it cannot be
    opened, ApplyError OCIGPU-MNT-1 (OCIGPU-DEV-3 for nodes) when it is something else.
    """
    with named("openat", host_path):
        fd = os.open(host_path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        fits = stat.S_IFMT(status.st_mode) in _KINDS[kind] and (kind != "node" or status.st_rdev == rdev)
        if not fits and not (stand_in and kind == "node" and stat.S_ISREG(status.st_mode)):
            found = f"{stat.filemode(status.st_mode)} {os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
            wanted = f"node {os.major(rdev)}:{os.minor(rdev)}" if kind == "node" else kind
            code = "OCIGPU-DEV-3" if kind == "node" else "OCIGPU-MNT-1"
            raise ApplyError(code, f"take {host_path} of the host: expected a {wanted}, found {found}")
        tree_fd = clone(fd, options, host_path, kind == "directory") if new_calls else -1
    finally:
        os.close(fd)
    return Source(host_path, tree_fd, options, status)


def clone(fd: int, options: tuple[str, ...], shown: str, directory: bool = False) -> int:
    """Return a detached, private mount of what ``fd`` refers to, with these flags; Linux 5.12.  Raises OSError."""
    flags = libc.OPEN_TREE_CLONE | libc.OPEN_TREE_CLOEXEC | libc.AT_EMPTY_PATH
    recursive = 0
    try:
        tree_fd = libc.open_tree(fd, "", flags, shown)
    except OSError as error:
        # In a user namespace mounts below a directory that hide parts of the host are locked on it.
        if error.errno != errno.EINVAL or not directory:
            raise
        recursive = libc.AT_RECURSIVE
        tree_fd = libc.open_tree(fd, "", flags | recursive, shown)
    try:
        libc.mount_setattr(tree_fd, _attributes(options), libc.MS_PRIVATE, recursive, shown)
    except BaseException:
        os.close(tree_fd)
        raise
    return tree_fd


def _attributes(options: tuple[str, ...]) -> int:
    return sum(_ATTRIBUTES[option] for option in options)


def is_bound(source: Source, target: MountTarget) -> bool:
    """Tell whether ``target`` is a mount of ``source`` with its flags already."""
    if not os.path.samestat(os.fstat(target.fd), source.status):
        return False
    wanted = _attributes(source.options)
    return _is_mount(target) and os.fstatvfs(target.fd).f_flag & wanted == wanted


def is_equal_tmpfs(action: "Tmpfs", uid: int, gid: int, target: MountTarget) -> bool:
    """Tell whether ``target`` is already the tmpfs of ``action``, left by an earlier hook.

    Mounts on its directories are not checked.
    """
    flags = _attributes((*_PRIVATE_TMPFS, "ro"))
    if not _is_mount(target) or os.fstatvfs(target.fd).f_flag & flags != flags:
        return False
    mount = read_mounts("mountinfo").get(read_mnt_id(target.fd))
    if mount is None or (mount.root, mount.type) != ("/", "tmpfs"):
        return False
    try:
        return holds(target.fd, action, uid, gid)
    except OSError:  # something else has one of our names, or cannot be read: not ours
        return False


def is_on_own_tmpfs(fd: int, root_fd: int, host_devices: "AbstractSet[str]", part: bool = False) -> bool:
    """Tell whether a descriptor is on a mount that only the container has: its own tmpfs, such as its /dev.

    Another container may have the same root directory, and a volume is the host's.  ``host_devices``: of
    :func:`read_host_devices`.  ``part``: it may be a directory of such a tmpfs.  Raises OSError.
    """
    mnt_id = read_mnt_id(fd)
    if mnt_id == read_mnt_id(root_fd):
        return False
    mount = read_mounts("mountinfo").get(mnt_id)
    if mount is None or mount.type != "tmpfs":
        return False
    return (part or mount.root == "/") and mount.device not in host_devices


def read_host_devices(rootfs: str, built_here: bool = False) -> "AbstractSet[str]":
    """Return the numbers of every visible tmpfs except those mounted only below a container's root directory.

    For the mount namespace that the runtime is in, before it is left: a volume is mounted from a path there, so the
    number of its file system is among them, whatever it is mounted on in the container; that of a tmpfs which the
    runtime has made for the container is not.  ``built_here``: the container has been built in this very namespace;
    a tmpfs above its root directory that process 1 does not have was made for it, as Apptainer does, whose /dev lies
    there.  Raises OSError.
    """
    rootfs = os.path.realpath(rootfs)
    every = _read_tmpfs("/proc/self/mountinfo")
    devices = {mount.device for mount in every if not mount.point.startswith(f"{rootfs}/")}
    above = {mount.device for mount in every if rootfs.startswith(f"{mount.point}/")} if built_here else set()
    if above:
        try:
            above -= {mount.device for mount in _read_tmpfs("/proc/1/mountinfo")}
        except OSError:  # procfs is mounted with hidepid
            return devices
    return devices - above


def _read_tmpfs(path: str) -> "list[Mount]":
    lines = [line for line in read_proc(path).split("\n") if " - tmpfs " in line]
    return list(parse_mounts("\n".join(lines)).values())


def _is_mount(target: MountTarget) -> bool:
    """Tell whether ``target`` is the root of a mount: it is on another than its directory."""
    return read_mnt_id(target.fd) != read_mnt_id(target.at.fd)


def stop_sharing(target: MountTarget, mnt_id: int, new_calls: bool) -> None:
    """Make sure that a mount on ``target``, which is on mount ``mnt_id``, reaches no other namespace.

    The mount that holds the target may be shared with the host (rootfsPropagation, an rshared volume, a rootfs on a
    shared mount): it is made a slave, so that it still receives the host's mounts, but propagates none.
    """
    mount = read_mounts("mountinfo").get(mnt_id)  # a table that is read while mounts change may lack one
    if mount is not None and not any(tag.startswith("shared:") for tag in mount.tags):
        return
    with opened(_mount_root(target, mnt_id)) as fd:
        if new_calls:
            libc.mount_setattr(fd, 0, libc.MS_SLAVE, shown=target.at.path)
        else:
            libc.mount(None, f"fd/{fd}", None, libc.MS_SLAVE, shown=target.at.path)


def bind_by_name(fd: int, source: Source, target: MountTarget) -> None:
    """Bind what ``fd`` refers to with mount(2), check that the target is that mount, then set its flags.

    Raises OSError, ApplyError OCIGPU-MNT-1 when the path was exchanged meanwhile.
    """
    under = read_mnt_id(target.fd)
    libc.mount(f"fd/{fd}", f"fd/{target.fd}", None, libc.MS_BIND, shown=target.at.path)
    with opened(_open_mounted(target, under)) as mounted_fd:
        if not os.path.samestat(os.fstat(mounted_fd), source.status):
            raise ApplyError("OCIGPU-MNT-1", f"bind {source.host_path} -> {target.at.path}: something else is there")
        _set_flags(mounted_fd, _attributes(source.options), target)


def _open_mounted(target: MountTarget, under: int) -> int:
    """Return a descriptor of the root of the mount that was just made on ``target``."""
    fd = target.at.open()
    if read_mnt_id(fd) == under:
        os.close(fd)
        raise ApplyError("OCIGPU-MNT-1", f"mount on {target.at.path}: the path was exchanged meanwhile")
    return fd


def _set_flags(fd: int, flags: int, target: MountTarget) -> None:
    libc.mount(None, f"fd/{fd}", None, libc.MS_PRIVATE, shown=target.at.path)
    remount(fd, flags | kept_flags(fd), target.at.path)


def new_tmpfs(action: "Tmpfs", uid: int, gid: int) -> int:
    """Return the detached, filled, read-only tmpfs of ``action``, owned by ``uid``:``gid``; Linux 5.12."""
    fs_fd, path = libc.fsopen("tmpfs"), action.container_path
    try:
        for key, value in tmpfs_options(action, uid, gid):
            libc.fsconfig_string(fs_fd, key, value)
        libc.fsconfig_create(fs_fd, path)
        tree_fd = libc.fsmount(fs_fd, _attributes(_PRIVATE_TMPFS), path)
    finally:
        os.close(fs_fd)
    try:
        fill(tree_fd, action)
        libc.mount_setattr(tree_fd, libc.MOUNT_ATTR_RDONLY, libc.MS_PRIVATE, shown=path)
    except BaseException:
        os.close(tree_fd)
        raise
    return tree_fd


def tmpfs_by_name(action: "Tmpfs", uid: int, gid: int, target: MountTarget) -> None:
    """Make the tmpfs of :func:`new_tmpfs` on ``target`` with mount(2)."""
    under, flags = read_mnt_id(target.fd), _attributes(_PRIVATE_TMPFS)
    options = ",".join(f"{key}={value}" for key, value in tmpfs_options(action, uid, gid))
    libc.mount("tmpfs", f"fd/{target.fd}", "tmpfs", flags, options, action.container_path)
    with opened(_open_mounted(target, under)) as fd:
        fill(fd, action)
        _set_flags(fd, flags | libc.MS_RDONLY, target)


def remount(fd: int, flags: int, shown: str) -> None:
    """Set the MS_* ``flags`` of the mount whose root is ``fd``, by mount(2).  Raises OSError."""
    libc.mount(None, f"fd/{fd}", None, libc.MS_REMOUNT | libc.MS_BIND | flags, shown=shown)


def kept_flags(fd: int) -> int:
    """Return the MS_* of a mount's flags that a remount has to repeat: they may be locked (user_namespaces(7))."""
    found = os.fstatvfs(fd).f_flag
    flags = found & _LOCKED
    if found & _ST_NODIRATIME:
        flags |= _MS_NODIRATIME
    if found & _ST_RELATIME:
        flags |= _MS_RELATIME
    return flags


def _mount_root(target: MountTarget, mnt_id: int) -> int:
    """Return a descriptor of the root of the mount that ``target`` is on: upwards until the mount or the tree ends."""
    if not stat.S_ISDIR(os.fstat(target.fd).st_mode):
        if read_mnt_id(target.at.fd) != mnt_id:
            return os.dup(target.fd)  # a file that is a mount of its own
        fd = os.dup(target.at.fd)
    else:
        fd = os.dup(target.fd)
    for _ in range(_MAX_DEPTH):
        above = os.open("..", os.O_PATH | os.O_CLOEXEC, dir_fd=fd)
        if read_mnt_id(above) != mnt_id or os.path.samestat(os.fstat(fd), os.fstat(above)):
            os.close(above)
            return fd
        os.close(fd)
        fd = above
    os.close(fd)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), target.at.path)


# -- the small file systems of a plan ----------------------------------------------------------------------------

_PAGE = 1 << 16
"""The largest page of a kernel that we meet: 4 KiB on x86-64, 4, 16 or 64 on arm64 (arch/arm64/Kconfig).  tmpfs charges
whole pages for each file (mm/shmem.c), and takes none before that: what is too much costs nothing."""


def tmpfs_options(action: "Tmpfs", uid: int, gid: int) -> list[tuple[str, str]]:
    """Return the mount options of tmpfs(5) for a file system of the action's size that ``uid``:``gid`` owns.

    How many files there can be, nr_inodes says; it is read-only once they are written.
    """
    names = len(action.files) + len(_directories(action))
    pages = sum(len(content.encode()) // _PAGE + 1 for _, _, content in action.files) + names + 8
    return [
        ("mode", "0755"),  # until it is filled
        ("uid", str(uid)),
        ("gid", str(gid)),
        ("size", str(pages * _PAGE)),
        ("nr_inodes", str(names + 8)),
    ]


def fill(fd: int, action: "Tmpfs") -> None:
    """Write the directories and files of the action into the empty file system whose root is ``fd``."""
    directories, top = _directories(action), action.container_path
    for name in directories:
        At(fd, name, f"{top}/{name}").mkdir(0o755)
    for name, mode, content in action.files:
        file_fd = At(fd, name, f"{top}/{name}").open(os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with named("write", f"{top}/{name}"), open(file_fd, "wb") as file:
            file.write(content.encode())
            os.fchmod(file_fd, mode)
    with named("chmod", top):
        for name in reversed(directories):
            os.chmod(name, 0o555, dir_fd=fd)
        os.chmod(".", action.mode, dir_fd=fd)


def holds(top_fd: int, action: "Tmpfs", uid: int, gid: int) -> bool:
    """Tell whether the file system whose root is ``top_fd`` contains exactly the action's files.

    Expects /proc/self as working directory.  Raises OSError when something else has one of the names.
    """
    device = os.fstat(top_fd).st_dev
    directories = _directories(action)
    for directory in ("", *directories):
        with opened(
            os.open(directory or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top_fd)
        ) as fd:
            wanted = {
                name for name in (*directories, *(file[0] for file in action.files)) if _parent(name) == directory
            }
            found = os.fstat(fd)
            if found.st_dev != device and not wanted:
                continue  # a later action has mounted something here
            if found.st_dev != device or (found.st_uid, found.st_gid) != (uid, gid):
                return False
            if stat.S_IMODE(found.st_mode) != (0o555 if directory else action.mode) or not _has_names(fd, wanted):
                return False
    return all(_is_file_of(top_fd, device, *file) for file in action.files)


def _parent(name: str) -> str:
    return name.rpartition("/")[0]


def _has_names(fd: int, wanted: set[str]) -> bool:
    """Tell whether a directory has exactly the last names of these paths; reads no more entries than that and one."""
    with os.scandir(fd) as entries:
        found = {entry.name for entry, _ in zip(entries, range(len(wanted) + 1), strict=False)}
    return found == {name.rpartition("/")[2] for name in wanted}


def _is_file_of(top_fd: int, device: int, name: str, mode: int, content: str) -> bool:
    with opened(At(top_fd, name, name).open()) as fd:
        found, data = os.fstat(fd), content.encode()
        if not stat.S_ISREG(found.st_mode) or (found.st_dev, found.st_size) != (device, len(data)):
            return False
        if stat.S_IMODE(found.st_mode) != mode:
            return False
        with open(f"fd/{fd}", "rb") as file:
            return file.read(len(data) + 1) == data


def _directories(action: "Tmpfs") -> list[str]:
    """Return every directory of the tmpfs, parents first."""
    wanted: set[str] = set()
    paths = [name.split("/")[:-1] for name, _, _ in action.files] + [name.split("/") for name in action.directories]
    for parts in paths:
        wanted.update("/".join(parts[: depth + 1]) for depth in range(len(parts)))
    return sorted(wanted)


# -- other containers --------------------------------------------------------------------------------------------


def has_neighbours(root_fd: int, own_proc: str = ".") -> bool:
    """Tell whether a mount namespace other than ours has this root directory with something mounted in it.

    Another container may rely on what was made there.  What is mounted in another namespace cannot be seen on the file
    itself, and the kernel detaches every mount on a file that is removed, in all namespaces (detach_mounts of
    fs/namei.c, since Linux 3.18).  Tables of mounts tell: those of all processes that we may look at.  So has a
    container from the moment when its runtime begins to mount; copies of the host's namespace have the directory at
    most.  ``own_proc``: path of our own directory of procfs.  Unknown cases count as no: processes of other users, of
    outer pid namespaces, and all of them without procfs.  If new processes keep starting, the answer is yes.
    """
    try:
        own, place = os.stat(f"{own_proc}/ns/mnt").st_ino, _find_place(root_fd, own_proc)
    except OSError:
        return False
    seen, known = {own}, set[str]()
    for _ in range(_MAX_ROUNDS):
        new = set(filter(str.isdecimal, list_names(f"{own_proc}/.."))) - known  # containers may have begun meanwhile
        if not new:
            return False
        known |= new
        for table in _tables(f"{own_proc}/..", new, seen):
            if _is_used(table, place):
                return True
    return True


def _find_place(root_fd: int, own_proc: str) -> tuple[str, str]:
    """Return device and path of a directory in its file system, as mountinfo writes both."""
    mount = read_mounts(f"{own_proc}/mountinfo")[read_mnt_id(root_fd, own_proc)]
    rest = os.readlink(f"{own_proc}/fd/{root_fd}").removeprefix(mount.point.rstrip("/"))
    return mount.device, f"{mount.root.rstrip('/')}{rest}".rstrip("/") or "/"


def _tables(proc: str, pids: set[str], seen: set[int]) -> "Iterator[dict[int, Mount]]":
    """Yield the mounts of each namespace that these processes live in and that was not ``seen``."""
    for pid in pids:
        try:
            namespace = os.stat(f"{proc}/{pid}/ns/mnt").st_ino
            if namespace in seen:
                continue
            table = read_mounts(f"{proc}/{pid}/mountinfo")
        except OSError:  # it has ended, or we may not read it
            continue
        seen.add(namespace)
        yield table


def _is_used(table: "dict[int, Mount]", place: tuple[str, str]) -> bool:
    roots = {mount.mnt_id for mount in table.values() if (mount.device, mount.root.rstrip("/") or "/") == place}
    return bool(roots) and any(mount.parent in roots and mount.mnt_id not in roots for mount in table.values())


def list_names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
