"""The sandbox of a program that reads an image's files: no new privileges, few system calls, small limits.

:func:`build_filter` is pure; everything else changes the calling process for good and is called only in a forked child
that is about to execute the program.  The module python-prctl must be loaded before that child enters a container's
namespaces (:func:`load_prctl`): an import there would load files of the image.
"""

import errno
import os
import resource
import struct
import sys

from ocigpu.core.errors import ApplyError, how_to_install
from ocigpu.system import libc, signals
from ocigpu.system.foreign import address
from ocigpu.system.paths import named

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# linux/audit.h, linux/seccomp.h
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_SYSCALL_BIT = 0x40000000
SECCOMP_MODE_FILTER = 2
SECCOMP_RET_KILL_PROCESS = 0x80000000  # since Linux 4.14; older kernels kill the thread, which here is the process
SECCOMP_RET_ERRNO = 0x00050000
SECCOMP_RET_ALLOW = 0x7FFF0000
MAX_CAPABILITY = 63
CAP_SETGID = 6

SYSCALLS = {
    "x86_64": {
        "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "lseek": 8, "mmap": 9,
        "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
        "pread64": 17, "readv": 19, "writev": 20, "access": 21, "mremap": 25, "madvise": 28, "getpid": 39,
        "sendfile": 40, "execve": 59, "exit": 60, "uname": 63, "fcntl": 72, "fsync": 74, "fdatasync": 75,
        "ftruncate": 77, "getdents": 78, "getcwd": 79, "chdir": 80, "rename": 82, "mkdir": 83, "unlink": 87,
        "symlink": 88, "readlink": 89, "chmod": 90, "fchmod": 91, "gettimeofday": 96, "getrlimit": 97, "sysinfo": 99,
        "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "arch_prctl": 158, "gettid": 186, "time": 201,
        "futex": 202, "getdents64": 217, "set_tid_address": 218, "fadvise64": 221, "clock_gettime": 228,
        "exit_group": 231, "tgkill": 234, "openat": 257, "mkdirat": 258, "newfstatat": 262, "unlinkat": 263,
        "renameat": 264, "symlinkat": 266, "readlinkat": 267, "fchmodat": 268, "faccessat": 269,
        "set_robust_list": 273, "prlimit64": 302, "renameat2": 316, "getrandom": 318, "execveat": 322,
        "copy_file_range": 326, "statx": 332, "rseq": 334, "faccessat2": 439,
    },
    "aarch64": {
        "getcwd": 17, "fcntl": 25, "mkdirat": 34, "unlinkat": 35, "symlinkat": 36, "renameat": 38, "ftruncate": 46,
        "faccessat": 48, "chdir": 49, "fchmod": 52, "fchmodat": 53, "openat": 56, "close": 57, "getdents64": 61,
        "lseek": 62, "read": 63, "write": 64, "readv": 65, "writev": 66, "pread64": 67, "sendfile": 71,
        "readlinkat": 78, "newfstatat": 79, "fstat": 80, "fsync": 82, "fdatasync": 83, "exit": 93, "exit_group": 94,
        "set_tid_address": 96, "futex": 98, "set_robust_list": 99, "clock_gettime": 113, "tgkill": 131,
        "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139, "uname": 160, "getrlimit": 163,
        "gettimeofday": 169, "getpid": 172, "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177,
        "gettid": 178, "sysinfo": 179, "brk": 214, "munmap": 215, "mremap": 216, "execve": 221, "mmap": 222,
        "fadvise64": 223, "mprotect": 226, "madvise": 233, "prlimit64": 261, "renameat2": 276, "getrandom": 278,
        "execveat": 281, "copy_file_range": 285, "statx": 291, "rseq": 293, "faccessat2": 439,
    },
}  # fmt: skip
"""What a static ldconfig of glibc 2.17 to 2.42 calls (strace, and glibc's sources for the newer and older ones).

Numbers: asm/unistd_64.h of x86 and asm-generic/unistd.h.  Nothing here makes a socket, a process, a mount or a new
mapping of ids; arguments are not looked at.
"""
WITHOUT_EFFECT = ("fsync", "fdatasync")
"""Of these, those that succeed and do nothing: a disk may take 10 ms, and every start makes the cache again."""

LIMITS = (
    (resource.RLIMIT_CPU, 10),  # seconds
    (resource.RLIMIT_AS, 2 << 30),  # whole libraries are mapped, one after the other; some have more than 1 GiB
    (resource.RLIMIT_DATA, 256 << 20),  # what is not such a mapping, e.g. a configuration file of one endless line
    (resource.RLIMIT_NOFILE, 64),
    (resource.RLIMIT_FSIZE, 4 << 20),  # a cache of 10,000 libraries has about 1 MiB
    (resource.RLIMIT_CORE, 0),
)

# Classic BPF (linux/filter.h): u16 code, u8 jump if true, u8 jump if false, u32 operand.
_LOAD = 0x20
_JUMP_IF_EQUAL = 0x15
_JUMP_IF_AT_LEAST = 0x35
_RETURN = 0x06
_NUMBER_OFFSET, _ARCH_OFFSET = 0, 4  # struct seccomp_data


def build_filter(machine: str) -> bytes:
    """Return the seccomp filter for ``machine`` ("x86_64", "aarch64") as an array of struct sock_filter.

    Calls of :data:`SYSCALLS` pass or are :data:`WITHOUT_EFFECT`; others fail with EPERM, and so does every x32 call; a
    call of another architecture kills the process.  Raises ApplyError (OCIGPU-LD-1) for an unknown machine.
    """
    calls = SYSCALLS.get(machine)
    if calls is None:
        raise ApplyError("OCIGPU-LD-1", f"ldconfig sandbox: no list of system calls for {machine}")
    numbers = sorted(calls.values())
    without_effect = [calls[name] for name in WITHOUT_EFFECT]
    code = [
        _filter(_LOAD, _ARCH_OFFSET),
        _filter(_JUMP_IF_EQUAL, AUDIT_ARCH[machine], 1, 0),
        _filter(_RETURN, SECCOMP_RET_KILL_PROCESS),
        _filter(_LOAD, _NUMBER_OFFSET),
        _filter(_JUMP_IF_AT_LEAST, X32_SYSCALL_BIT, len(numbers), 0),
    ]
    for position, number in enumerate(numbers):
        code.append(_filter(_JUMP_IF_EQUAL, number, len(numbers) - position + (number not in without_effect), 0))
    code.append(_filter(_RETURN, SECCOMP_RET_ERRNO | errno.EPERM))
    code.append(_filter(_RETURN, SECCOMP_RET_ERRNO))
    code.append(_filter(_RETURN, SECCOMP_RET_ALLOW))
    return b"".join(code)


def _filter(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def load_prctl() -> None:
    """Import python-prctl, which the functions below use; call it while only the host's files are visible.

    Raises ApplyError (OCIGPU-LD-1) if it is not installed.
    """
    try:
        import prctl  # noqa: F401 - whether it is there
    except ImportError as error:
        raise ApplyError("OCIGPU-LD-1", f"ldconfig sandbox: {error}", how_to_install("cli")) from error


def _prctl() -> "Any":
    return sys.modules["prctl"]


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends (PR_SET_PDEATHSIG); undone by a change of user."""
    _prctl().set_pdeathsig(signals.SIGKILL)


def set_limits() -> None:
    """Lower this process's resource limits to :data:`LIMITS`, never raising one."""
    for what, value in LIMITS:
        _, hard = resource.getrlimit(what)
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (limit, limit))


def reset_signals() -> None:
    """Restore the default actions that the interpreter changed, and unblock all signals: exec keeps both."""
    for number in (signals.SIGPIPE, signals.SIGXFSZ, signals.SIGINT, signals.SIGTERM, signals.SIGCHLD, signals.SIGHUP):
        signals.signal(number, signals.SIG_DFL)
    signals.pthread_sigmask(signals.SIG_SETMASK, ())


def forgo_privileges() -> None:
    """Prevent every exec from granting a capability, even to uid 0: NOROOT and an empty bounding set; raises OSError.

    This process keeps its present capabilities until :func:`drop_privileges`.  Needs CAP_SETPCAP.
    """
    prctl = _prctl()
    for capability in range(MAX_CAPABILITY + 1):
        try:
            libc.prctl(libc.PR_CAPBSET_DROP, capability)  # python-prctl refuses capabilities younger than itself
        except OSError as error:
            if error.errno == errno.EINVAL:  # above the last one that this kernel knows
                break
            raise
    prctl.set_securebits(prctl.SECBIT_NOROOT | prctl.SECBIT_NOROOT_LOCKED | prctl.SECBIT_KEEP_CAPS_LOCKED)


def drop_privileges(uid: int, gid: int) -> None:
    """Become ``uid``/``gid`` without groups and without any capability, for good; raises OSError.

    Uid 0 keeps none either: after :func:`forgo_privileges` and with no_new_privs, exec cannot grant any.
    """
    libc.prctl(libc.PR_SET_DUMPABLE, 0)  # with no capability left, any process with the same ids could trace this one
    may_set_groups = libc.capget().effective >> CAP_SETGID & 1
    try:
        with named("setgroups", "to none"):
            os.setgroups([])
    except PermissionError:
        # With the capability that is a user namespace that denies setgroups (user_namespaces(7)): its groups were the
        # caller's all along, and cannot be dropped.
        if not may_set_groups:
            raise
    with named("setresgid", str(gid)):
        os.setresgid(gid, gid, gid)
    with named("setresuid", str(uid)):
        os.setresuid(uid, uid, uid)
    libc.capset(libc.Capabilities(0, 0, 0))
    _prctl().set_no_new_privs(1)
    die_with_parent()


def install_filter(code: bytes) -> None:
    """Put this process behind a seccomp filter of :func:`build_filter`; needs no_new_privs.  Raises OSError."""
    # struct sock_fprog: u16 count, padding, pointer
    program = struct.pack("@HP", len(code) // 8, address(code))
    libc.prctl(libc.PR_SET_SECCOMP, SECCOMP_MODE_FILTER, address(program))
