"""System calls that ``os`` does not offer: one wrapper each, no policy.

Every wrapper raises an OSError whose ``filename`` names the call, its object, and its flags where they matter:
"open_tree /usr/lib/libcuda.so.1", "mount /usr/lib (MS_REMOUNT|MS_BIND|MS_RDONLY)".  For an object passed by descriptor,
callers put the path that a user knows into ``shown``.  All calls go through ``syscall(2)`` with the numbers of
:data:`NUMBERS`.  Constants keep the kernel's names; a comment beside each group names the header.
"""
# ruff: noqa: D402 - "mount(2)" names a manual page, not a signature

import errno
import os
import struct

from ocigpu.core.record import NamedTuple
from ocigpu.system.foreign import address, call

# include/uapi/linux/sched.h
CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

# include/uapi/linux/mount.h: mount(2)
MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_SLAVE = 1 << 19
MS_SHARED = 1 << 20
MNT_DETACH = 2  # include/linux/fs.h; umount2(2)

# include/uapi/linux/mount.h: the mount calls of Linux 5.2, mount_setattr(2) of 5.12
OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 0x04
MOVE_MOUNT_T_EMPTY_PATH = 0x40
FSOPEN_CLOEXEC = 1
FSMOUNT_CLOEXEC = 1
FSCONFIG_SET_STRING = 1
FSCONFIG_CMD_CREATE = 6
MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_NOEXEC = 0x8

# include/uapi/linux/fcntl.h
AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000

# include/uapi/linux/openat2.h (Linux 5.6)
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_IN_ROOT = 0x10

# include/uapi/linux/stat.h (statx: Linux 4.11; the mount id: 5.8)
STATX_MNT_ID = 0x1000
_STATX_SIZE = 256
_STATFS_SIZE = 256  # larger than any struct statfs

# include/uapi/linux/capability.h
CAP_SYS_ADMIN = 21
_LINUX_CAPABILITY_VERSION_3 = 0x20080522

CLOCK_MONOTONIC = 1  # include/uapi/linux/time.h

# include/uapi/linux/prctl.h
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
_PRCTL_NAMES = {value: name for name, value in globals().items() if name.startswith("PR_")}

NUMBERS: dict[str, tuple[int, int]] = {
    "bpf": (321, 280), "capget": (125, 90), "capset": (126, 91), "execveat": (322, 281), "fstatfs": (138, 44),
    "mount": (165, 40), "pivot_root": (155, 41), "prctl": (157, 167), "setfsgid": (123, 152), "setfsuid": (122, 151),
    "setns": (308, 268), "statx": (332, 291), "timer_create": (222, 107), "timer_settime": (223, 110),
    "umount2": (166, 39), "unshare": (272, 97),
    **{
        name: (number, number)
        for name, number in (
            ("open_tree", 428), ("move_mount", 429), ("fsopen", 430), ("fsconfig", 431), ("fsmount", 432),
            ("openat2", 437), ("pidfd_getfd", 438), ("mount_setattr", 442),
        )
    },
}  # fmt: skip
"""System call numbers of :data:`MACHINES`: asm/unistd_64.h of x86 and asm-generic/unistd.h; since Linux 5.1 equal."""
MACHINES = ("x86_64", "aarch64")
_machine = os.uname().machine if struct.calcsize("P") == 8 else "32-bit " + os.uname().machine


def system_call(
    name: str, *arguments: int | bytes | bytearray | None, shown: str = "", flags: tuple[tuple[str, int], ...] = ()
) -> int:
    """Call a system call of :data:`NUMBERS`; returns its result.

    ``arguments``: numbers, and memory by its address; the kernel may write to a bytearray.  Raises OSError; its
    filename is the call's name, then ``shown`` and ``flags``, as for :func:`name_flags`.
    """
    if _machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"no system call number known for {_machine}", name)
    try:
        return call(NUMBERS[name][MACHINES.index(_machine)], *arguments)
    except OSError as error:
        names = " ".join(name_flags(*pair) for pair in flags if pair[1])
        words = filter(None, (name, shown, names and f"({names})"))
        raise OSError(error.errno, error.strerror, " ".join(words)) from None


def open_how(flags: int, mode: int, resolve: int) -> bytes:
    """Return a struct open_how of include/uapi/linux/openat2.h."""
    return struct.pack("=3Q", flags, mode, resolve)


def mount_attr(attr_set: int, attr_clr: int, propagation: int, userns_fd: int) -> bytes:
    """Return a struct mount_attr of include/uapi/linux/mount.h."""
    return struct.pack("=4Q", attr_set, attr_clr, propagation, userns_fd)


def _path(text: str | None) -> bytes | None:
    return None if text is None else os.fsencode(text)


def name_flags(prefix: str, flags: int) -> str:
    """Return flags by the names of the constants here that have a prefix: "MS_RDONLY|MS_BIND", unknown ones in hex."""
    known = {value: name for name, value in globals().items() if name.startswith(prefix) and type(value) is int}
    names = [name for value, name in known.items() if flags & value == value]
    rest = flags & ~sum(value for value in known if flags & value == value)
    return "|".join([*names, *([hex(rest)] if rest or not flags else [])])


def bpf(command: int, attributes: bytearray, shown: str) -> int:
    """Call bpf(2) with the attributes of a command, known as ``shown``."""
    return system_call("bpf", command, attributes, len(attributes), shown=shown)


def setns(fd: int, nstype: int) -> None:
    """Join the namespace ``fd`` of type ``nstype``, setns(2); needs a single-threaded process for user and mount."""
    system_call("setns", fd, nstype, flags=(("CLONE_", nstype),))


def unshare(flags: int) -> None:
    """Leave the namespaces named by ``flags`` for new ones, unshare(2)."""
    system_call("unshare", flags, flags=(("CLONE_", flags),))


def mount(
    source: str | None, target: str, fstype: str | None, flags: int, data: str | None = None, shown: str = ""
) -> None:
    """Call mount(2)."""
    arguments = _path(source), _path(target), _path(fstype), flags, _path(data)
    system_call("mount", *arguments, shown=shown or target, flags=(("MS_", flags),))


def umount2(target: str, flags: int, shown: str = "") -> None:
    """Call umount2(2)."""
    system_call("umount2", _path(target), flags, shown=shown or target)


def pivot_root(new_root: str, put_old: str) -> None:
    """Call pivot_root(2)."""
    system_call("pivot_root", _path(new_root), _path(put_old), shown=new_root)


def openat2(dir_fd: int, path: str, flags: int, mode: int, resolve: int) -> int:
    """Open ``path`` below ``dir_fd`` under the rules ``resolve`` (RESOLVE_*), openat2(2), Linux 5.6.

    ``mode`` must be 0 without O_CREAT.  O_CLOEXEC is the caller's to give.
    """
    how = open_how(flags, mode, resolve)
    return system_call("openat2", dir_fd, _path(path), how, len(how), shown=path)


def open_tree(dir_fd: int, path: str, flags: int, shown: str = "") -> int:
    """Return a descriptor of a mount, or with OPEN_TREE_CLONE of a detached copy of it, open_tree(2), Linux 5.2."""
    return system_call("open_tree", dir_fd, _path(path), flags, shown=shown or path)


def move_mount(from_fd: int, to_fd: int, shown: str = "") -> None:
    """Attach the mount of ``from_fd`` on the object of ``to_fd``, both by descriptor, move_mount(2), Linux 5.2."""
    flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH
    system_call("move_mount", from_fd, b"", to_fd, b"", flags, shown=f"to {shown}" if shown else "")


def mount_setattr(
    fd: int, attr_set: int, propagation: int = 0, flags: int = 0, shown: str = "", clear: int = 0
) -> None:
    """Set flags (MOUNT_ATTR_*) and propagation (MS_*) of the mount whose root is ``fd``, mount_setattr(2), Linux 5.12.

    ``flags``: AT_RECURSIVE for the mounts below it too; ``clear``: MOUNT_ATTR_* to take away.
    """
    attr = mount_attr(attr_set, clear, propagation, 0)
    pairs = (("MOUNT_ATTR_", attr_set), ("MS_", propagation))
    system_call("mount_setattr", fd, b"", AT_EMPTY_PATH | flags, attr, len(attr), shown=shown, flags=pairs)


def has_mount_setattr() -> bool:
    """Return whether the kernel, and the filters above us, know mount_setattr(2), newest of the mount calls.

    The kernel refuses a structure of size 0 with EINVAL before any other check.
    """
    try:
        system_call("mount_setattr", -1, b"", AT_EMPTY_PATH, None, 0)
    except OSError as error:
        return error.errno == errno.EINVAL
    return False


def fsopen(fstype: str) -> int:
    """Return the configuration descriptor of a new file system, fsopen(2), Linux 5.2."""
    return system_call("fsopen", _path(fstype), FSOPEN_CLOEXEC, shown=fstype)


def fsconfig_string(fs_fd: int, key: str, value: str) -> None:
    """Set one option of a file system being configured, fsconfig(2)."""
    system_call("fsconfig", fs_fd, FSCONFIG_SET_STRING, _path(key), _path(value), 0, shown=f"{key}={value}")


def fsconfig_create(fs_fd: int, shown: str = "") -> None:
    """Create the file system that was configured, fsconfig(2)."""
    system_call(
        "fsconfig",
        fs_fd,
        FSCONFIG_CMD_CREATE,
        None,
        None,
        0,
        shown=shown,
        flags=(("FSCONFIG_CMD", FSCONFIG_CMD_CREATE),),
    )


def fsmount(fs_fd: int, attributes: int, shown: str = "") -> int:
    """Return a detached mount (an O_PATH descriptor of its root) of the file system, fsmount(2), Linux 5.2."""
    named = (("MOUNT_ATTR_", attributes),)
    return system_call("fsmount", fs_fd, FSMOUNT_CLOEXEC, attributes, shown=shown, flags=named)


def pidfd_getfd(pidfd: int, fd: int) -> int:
    """Return our own descriptor (close-on-exec) of what another process has as ``fd``, pidfd_getfd(2), Linux 5.6.

    Needs the right to trace that process (ptrace(2), PTRACE_MODE_ATTACH_REALCREDS); EBADF when it has no such one.
    """
    return system_call("pidfd_getfd", pidfd, fd, 0)


def read_mount_id(fd: int) -> int:
    """Return the id (as in mountinfo) of the mount a descriptor is on, O_PATH ones included, by statx(2).

    Raises OSError, ENOSYS before Linux 5.8.
    """
    buffer = bytearray(_STATX_SIZE)
    system_call("statx", fd, b"", AT_EMPTY_PATH, STATX_MNT_ID, buffer)
    # struct statx: u32 stx_mask @0, u64 stx_mnt_id @144
    (mask,) = struct.unpack_from("=I", buffer, 0)
    if not mask & STATX_MNT_ID:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    mnt_id: int = struct.unpack_from("=Q", buffer, 144)[0]
    return mnt_id


def read_file_system_type(fd: int) -> int:
    """Return the magic number of the file system a descriptor is on (f_type of fstatfs(2)), O_PATH ones included."""
    buffer = bytearray(_STATFS_SIZE)
    system_call("fstatfs", fd, buffer)
    kind: int = struct.unpack_from("@l", buffer, 0)[0]
    return kind


def prctl(option: int, argument: int = 0, second: int = 0) -> None:
    """Call prctl(2) with one argument or two; an address is an argument too."""
    system_call("prctl", option, argument, second, 0, 0, shown=_PRCTL_NAMES.get(option, str(option)))


def setfsuid(uid: int) -> None:
    """Set the user id for file access, setfsuid(2); it reports no error, so the id is read back."""
    system_call("setfsuid", uid)
    if system_call("setfsuid", 0xFFFFFFFF) != uid:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), f"setfsuid {uid}")


def setfsgid(gid: int) -> None:
    """Set the group id for file access, setfsgid(2); read back like :func:`setfsuid`."""
    system_call("setfsgid", gid)
    if system_call("setfsgid", 0xFFFFFFFF) != gid:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), f"setfsgid {gid}")


class Capabilities(NamedTuple):
    """The capability sets of a thread as bit masks, bit CAP_X for capability X."""

    effective: int
    permitted: int
    inheritable: int


def capget() -> Capabilities:
    """Return our capability sets, capget(2)."""
    header, data = struct.pack("=Ii", _LINUX_CAPABILITY_VERSION_3, 0), bytearray(24)
    system_call("capget", header, data)
    low_e, low_p, low_i, high_e, high_p, high_i = struct.unpack("=6I", data)
    return Capabilities(low_e | high_e << 32, low_p | high_p << 32, low_i | high_i << 32)


def capset(sets: Capabilities) -> None:
    """Set our capability sets, capset(2)."""
    header = struct.pack("=Ii", _LINUX_CAPABILITY_VERSION_3, 0)
    words = [mask >> shift & 0xFFFFFFFF for shift in (0, 32) for mask in sets]
    system_call("capset", header, struct.pack("=6I", *words))


def create_timer(signal: int) -> int:
    """Return a timer that sends this process a signal, timer_create(2); :func:`set_timer` sets the time."""
    # struct sigevent, 64 bytes: value, signal, SIGEV_SIGNAL
    event, timer = struct.pack("=QiI", 0, signal, 0).ljust(64, b"\0"), bytearray(4)
    system_call("timer_create", CLOCK_MONOTONIC, event, timer)
    number: int = struct.unpack("=i", timer)[0]
    return number


def set_timer(timer: int, seconds: float) -> None:
    """Let a timer expire once, this many seconds from now, timer_settime(2)."""
    # struct itimerspec: interval and value, each seconds and nanoseconds
    system_call("timer_settime", timer, 0, struct.pack("=4q", 0, 0, int(seconds), int(seconds % 1 * 1e9)), None)


def execveat(fd: int, arguments: list[str], environment: dict[str, str]) -> None:
    """Replace this process by the program of descriptor ``fd``, execveat(2), Linux 3.19; returns only by raising."""
    texts = [os.fsencode(text) for text in (*arguments, *(f"{name}={value}" for name, value in environment.items()))]
    places = [address(text) for text in texts]
    count = len(arguments)
    argv = struct.pack(f"={count + 1}Q", *places[:count], 0)
    envp = struct.pack(f"={len(places) - count + 1}Q", *places[count:], 0)
    system_call("execveat", fd, b"", argv, envp, AT_EMPTY_PATH, shown=arguments[0])
