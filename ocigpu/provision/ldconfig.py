"""The host's ldconfig, run for a container: from a sealed copy, in a sandbox that shows only the container's root.

ldconfig reads what the image holds (its libraries, /etc/ld.so.conf) and writes /etc/ld.so.cache, so it loses all rights
on the host first: it sees the container's root only, as the container's root user without any capability, in mount,
pid, network, ipc and uts namespaces of its own, behind a list of system calls and limits of time, memory and file size.
The root mount alone can be written to: volumes cannot.  Nothing of the image is executed: the copy is the host's and
links to nothing.
"""

import errno
import fcntl
import os
import select
import stat
import struct
import time

from ocigpu.core.errors import ApplyError, cause, printable
from ocigpu.provision import fence
from ocigpu.provision.mounts import kept_flags
from ocigpu.system import libc, signals
from ocigpu.system.paths import named
from ocigpu.system.proc import parse_mounts, read_proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ocigpu.core.settings import Settings
    from ocigpu.system.proc import Mount

CANDIDATES = (
    "/sbin/ldconfig.real",
    "/sbin/ldconfig",
    "/usr/sbin/ldconfig.real",
    "/usr/sbin/ldconfig",
    "/bin/ldconfig",
    "/run/current-system/sw/bin/ldconfig",  # NixOS
    "/usr/local/glibc/sbin/ldconfig",  # Talos, whose own C library is musl
    "/usr/local/sbin/ldconfig",
)
"""Debian derivatives that divert ldconfig leave a script under its name and the program under ``.real``."""
MAX_PROGRAM = 16 << 20
MAX_OUTPUT = 8 << 10
DEADLINE = 15.0
"""Seconds of wall clock after which ldconfig is killed; its own limit of CPU time is shorter."""
LAST_SECONDS = 2.0
"""Longest wait for the end of a killed one."""
MASKED = ("/proc", "/sys", "/dev", "/var/cache/ldconfig")
"""Directories hidden below an empty file system.  The last one holds a cache of the image's making, for the next run
of ldconfig, which would be read as trusted."""
_SEALS = 0x1 | 0x2 | 0x4 | 0x8  # F_SEAL_SEAL, SHRINK, GROW, WRITE (linux/fcntl.h)
_MFD_EXEC = 0x10  # since Linux 6.3; needed where vm.memfd_noexec is 1
_PROGRAM_FD = 3
_DEV_INODES = 3  # root, the directory and the file
_PT_INTERP = 3
_PROC_SUPER_MAGIC = 0x9FA0  # linux/magic.h
_KEPT = {
    "ro": libc.MS_RDONLY, "nosuid": libc.MS_NOSUID, "nodev": libc.MS_NODEV, "noexec": libc.MS_NOEXEC,
    "noatime": 1 << 10, "nodiratime": 1 << 11, "relatime": 1 << 21,
}  # fmt: skip
"""Flags MS_* of a mount that a remount has to repeat, by mountinfo's words (linux/mount.h, proc_pid_mountinfo(5))."""
_OPTIONAL_NAMESPACES = (libc.CLONE_NEWNET, libc.CLONE_NEWIPC, libc.CLONE_NEWUTS)


def find_ldconfig(settings: "Settings") -> str:
    """Return the host path of ldconfig: that of the settings, else the first usual one that is not a script, or ""."""
    if settings.ldconfig:
        return settings.ldconfig
    for path in CANDIDATES:
        try:
            with open(path, "rb") as file:
                if file.read(2) != b"#!":
                    return path
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
    return ""


def open_ldconfig(path: str) -> int:
    """Return a descriptor of a sealed copy of the host's ldconfig, for :func:`start_ldconfig`.

    ``path``: host path.  Call it while the host's files are visible, before any namespace is entered: everything that
    the sandbox needs from the host is opened here.  No process can change the copy, and a container never reaches the
    host's file through /proc/<pid>/exe.  Raises ApplyError (OCIGPU-LD-1) if there is no such program, if it is a
    script, or dynamically linked (its loader would be the image's), or has over 16 MiB.
    """
    fence.load_prctl()
    try:
        copy = _sealed_copy(path)
    except OSError as error:
        raise ApplyError("OCIGPU-LD-1", f"copy {path}: {cause(error)}", None, error.errno or 0) from error
    problem = _elf_problem(os.pread(copy, 1 << 16, 0))
    if problem:
        os.close(copy)
        raise ApplyError("OCIGPU-LD-1", f"{path}: {problem}")
    return copy


def _sealed_copy(path: str) -> int:
    with named("openat", path):
        source = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_PROGRAM:
            raise OSError(errno.EINVAL, "not a regular file of at most 16 MiB")
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            copy = os.memfd_create("ldconfig", flags | _MFD_EXEC)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            copy = os.memfd_create("ldconfig", flags)
        try:
            at = 0
            with named("sendfile", path):
                while at < status.st_size:
                    count = os.sendfile(copy, source, at, status.st_size - at)
                    if not count:
                        raise OSError(errno.EIO, "the file became shorter while it was read")
                    at += count
            # The container's root user, who runs it, may be any user of the host.  Nobody may read it: what runs an
            # unreadable program cannot be traced (execve(2)), by a container that sees the host's processes neither.
            os.fchmod(copy, 0o111)
            fcntl.fcntl(copy, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(copy)
            raise
        return copy
    finally:
        os.close(source)


def _elf_problem(head: bytes) -> str:
    """Return why a program with these first bytes cannot be used, "" if it can: a static ELF64 program (elf(5))."""
    if head[:2] == b"#!":
        return "a script, not a program"
    if head[:5] != b"\x7fELF\x02" or len(head) < 64:
        return "not a 64-bit ELF program"
    order = "<" if head[5] == 1 else ">"
    (offset,) = struct.unpack_from(order + "Q", head, 32)
    size, count = struct.unpack_from(order + "HH", head, 54)
    for at in range(offset, offset + size * count, size or 1):
        if at + 4 > len(head):
            return "its program headers are out of the first 64 KiB"
        if struct.unpack_from(order + "I", head, at)[0] == _PT_INTERP:
            return "dynamically linked: it would be started by the image's loader"
    return ""


def start_ldconfig(fd: int, root_fd: int, directories: "tuple[str, ...]", uid: int, gid: int) -> "Started":
    """Make the processes and namespaces in which ldconfig will run once :meth:`Started.go` is called.

    ``fd``: of :func:`open_ldconfig`; ldconfig has it open as long as it lives.  ``root_fd``: O_PATH directory of the
    container's root, of a mount in the calling process's mount namespace; may be that namespace's ``/``.
    ``uid``/``gid``: the container's root user as the calling process sees it; the image's /etc must be writable by it.
    The caller is root, or root of the user namespace that owns the mount namespace, and has one thread.  Nothing of the
    caller changes.

    ldconfig runs with -X: the plan makes our links, and ldconfig must not change those of the image.  Raises ApplyError
    (OCIGPU-LD-1) for a machine that the sandbox does not know, and OSError.
    """
    arguments = ["ldconfig", "-X", "-f", "/etc/ld.so.conf", "-C", "/etc/ld.so.cache", *directories]
    code = fence.build_filter(os.uname().machine)
    status_read, status_write = os.pipe()
    output_read, output_write = os.pipe()
    go_read, go_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go_write)
        _Sandbox(fd, root_fd, arguments, uid, gid, code).guard(go_read, status_write, output_write)
    for end in (go_read, status_write, output_write):
        os.close(end)
    return Started(child, go_write, status_read, output_read)


class Started:
    """A sandbox that waits; it ends with the process that started it, whose child ``pid`` is."""

    def __init__(self, pid: int, go_fd: int, status_fd: int, output_fd: int) -> None:
        self.pid, self._go_fd, self._status_fd, self._output_fd = pid, go_fd, status_fd, output_fd

    def go(self) -> None:
        """Let ldconfig run on the container as it is now."""
        try:
            os.write(self._go_fd, b"g")
        except BrokenPipeError:  # ended before: its status says why
            return

    def stop(self) -> None:
        """Kill it, whatever it is doing."""
        os.close(self._go_fd)  # a waiting one may not yet have requested to end with its parent
        self._go_fd = -1
        self._collect(0.0)

    def finish(self) -> str:
        """Wait until ldconfig has ended; return "" or a warning of one line.

        A failure is only a warning, because the libraries' links exist and the image decides what else it reads.
        Raises ApplyError (OCIGPU-LD-1) if the sandbox could not be built: then nothing was run. ldconfig has ended
        then; this does not wait until the process around it and its namespaces are gone.
        """
        status, output, in_time = self._collect(DEADLINE)
        kind, _, text = status.partition("\n")[0].partition(" ")
        if kind == "error":
            raise ApplyError("OCIGPU-LD-1", f"ldconfig sandbox: {printable(text, 300)}")
        if not in_time:
            return f"ldconfig was stopped after {DEADLINE:.0f} s; the container's loader uses the links alone"
        if kind == "exit" and text == "0":
            return ""
        if kind not in ("exit", "signal"):
            raise ApplyError("OCIGPU-LD-1", "ldconfig sandbox: ended without a word")
        last = [line for line in output.splitlines() if line.strip()][-1:]
        return f"ldconfig: {kind} {text}{': ' + printable(last[0], 200) if last else ''}"

    def _collect(self, seconds: float) -> tuple[str, str, bool]:
        try:
            return _collect(self.pid, self._status_fd, self._output_fd, seconds)
        finally:
            for fd in (self._go_fd, self._status_fd, self._output_fd):
                if fd >= 0:
                    os.close(fd)


def _collect(child: int, status_fd: int, output_fd: int, seconds: float) -> tuple[str, str, bool]:
    """Return (status line, first 8 KiB of output, whether it ended in time); kills the child when it does not."""
    kept = {status_fd: b"", output_fd: b""}
    poll = select.poll()
    for fd in kept:
        poll.register(fd, select.POLLIN)
    waiting, in_time = set(kept), True
    end = time.monotonic() + seconds
    while waiting:
        left = end - time.monotonic()
        if left <= 0:
            if not in_time:
                break
            # The pid namespace's first process dies with its parent, and all in it with that one.
            os.kill(child, signals.SIGKILL)
            in_time, end = False, time.monotonic() + LAST_SECONDS
            continue
        for fd, _ in poll.poll(left * 1000):
            data = os.read(fd, 4096)
            kept[fd] = (kept[fd] + data)[:MAX_OUTPUT]
            if not data or (fd == status_fd and kept[fd].endswith(b"\n")):
                poll.unregister(fd)
                waiting.discard(fd)
    status, output = (kept[fd].decode("utf-8", "backslashreplace") for fd in (status_fd, output_fd))
    return status, output, in_time


class _Sandbox:
    """What happens in the two children: the guard, and the first process of the new pid namespace.

    Both leave by os._exit or exec.  Nothing may be imported here: the namespace's files are the image's.
    """

    def __init__(self, fd: int, root_fd: int, arguments: list[str], uid: int, gid: int, code: bytes) -> None:
        self.fd, self.root_fd, self.arguments = fd, root_fd, arguments
        self.uid, self.gid, self.code = uid, gid, code
        self.go_fd = self.status_fd = self.output_fd = self.tree_fd = self.proc_fd = -1
        self.step = "start"

    def guard(self, go_fd: int, status_fd: int, output_fd: int) -> None:
        """Make the namespaces, start the inner process, pass on how it ended; never returns."""
        self.go_fd, self.status_fd, self.output_fd = go_fd, status_fd, output_fd
        try:
            parent = os.getppid()
            fence.die_with_parent()
            if os.getppid() != parent:
                os._exit(1)
            self.step = "unshare namespaces"
            self._unshare()
            self.step = "fork"
            inner = os.fork()
            if inner == 0:
                self._inner()
            os.close(self.go_fd)
            os.close(self.output_fd)
            code = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
            self._write_status(f"signal {-code}" if code < 0 else f"exit {code}")
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 - the only way out of a forked child is _exit
            self._fail(error)

    def _take_root(self) -> None:
        """Take a private copy of the container's mounts, while their namespace is ours."""
        try:
            flags = libc.OPEN_TREE_CLONE | libc.OPEN_TREE_CLOEXEC | libc.AT_EMPTY_PATH | libc.AT_RECURSIVE
            self.tree_fd = libc.open_tree(self.root_fd, "", flags, "/")
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM):
                raise
            # Before Linux 5.2, or behind a filter that does not know the call: the root must be a mount point then,
            # as runtimes make it.  The working directory follows into the new mount namespace, a descriptor does not.
            os.fchdir(self.root_fd)

    def _unshare(self) -> None:
        try:
            libc.unshare(libc.CLONE_NEWPID | sum(_OPTIONAL_NAMESPACES))
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSPC):
                raise
            # A kernel without one of them (EINVAL) or a limit on their number (ENOSPC, namespaces(7)).  The filter
            # lets no socket and no System V call through in any case; mount and pid namespaces are a must.
            for flag in (libc.CLONE_NEWPID, *_OPTIONAL_NAMESPACES):
                try:
                    libc.unshare(flag)
                except OSError as reason:
                    if flag == libc.CLONE_NEWPID or reason.errno not in (errno.EINVAL, errno.ENOSPC):
                        raise

    def _inner(self) -> None:
        """Become ldconfig; never returns."""
        try:
            self.step = "parent-death signal"
            fence.die_with_parent()
            # Everything that does not depend on the container's later state is done before it waits.
            self.step = "standard streams"
            self._set_streams()
            self.step = "resource limits"
            os.umask(0o022)
            fence.set_limits()
            self.step = "forgo privileges"
            fence.forgo_privileges()
            self.step = "wait"
            if not os.read(self.go_fd, 1):
                os._exit(1)
            self.step = "copy the container's mounts"
            self._take_root()
            self.step = "unshare mount namespace"
            libc.unshare(libc.CLONE_NEWNS)
            os.close(self.root_fd)
            self.step = "make mounts private"
            libc.mount(None, "/", None, libc.MS_REC | libc.MS_PRIVATE)
            self.step = "change root"
            self._change_root()
            self.step = "close mounts"
            self._close_mounts()
            for path in MASKED:
                self.step = f"cover {path}"
                if os.path.isdir(path):
                    self._cover(path)
            self.step = "signals"
            fence.reset_signals()
            self.step = f"drop privileges to {self.uid}:{self.gid}"
            fence.drop_privileges(self.uid, self.gid)
            self.step = "seccomp filter"
            fence.install_filter(self.code)
            self.step = "execute"
            libc.execveat(self.fd, self.arguments, {})
        except BaseException as error:  # noqa: BLE001 - the only way out of a forked child is _exit
            self._fail(error)

    @staticmethod
    def _cover(path: str) -> None:
        """Hide a directory below an empty file system; in that of /dev the program's descriptor has a name.

        A kernel with TOMOYO, as Debian 11 has it, starts what execveat(2) is given by descriptor only where
        /dev/fd/NUMBER leads somewhere (tomoyo_find_next_domain, security/tomoyo/domain.c); it runs the descriptor.
        """
        flags = libc.MS_NOSUID | libc.MS_NODEV | libc.MS_NOEXEC
        if path != "/dev":
            libc.mount("tmpfs", path, "tmpfs", flags | libc.MS_RDONLY, "nr_inodes=1,mode=0555")  # its root alone
            return
        libc.mount("tmpfs", path, "tmpfs", flags, f"nr_inodes={_DEV_INODES},mode=0755")
        top = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        if os.fstatvfs(top).f_files == _DEV_INODES:  # or else the name has led elsewhere since
            os.mkdir("fd", 0o755, dir_fd=top)
            os.close(os.open(f"fd/{_PROGRAM_FD}", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, dir_fd=top))
        os.close(top)
        libc.mount(None, path, None, libc.MS_REMOUNT | libc.MS_BIND | libc.MS_RDONLY | flags)

    def _set_streams(self) -> None:
        """Give ldconfig its program as standard input, one pipe for the others, and no other descriptor."""
        # what the caller has as working directory is its own part of procfs: an image's /proc can be anything
        proc = ".." if libc.read_file_system_type(os.open(".", os.O_PATH)) == _PROC_SUPER_MAGIC else "/proc"
        self.proc_fd = os.open(proc, os.O_RDONLY | os.O_DIRECTORY)
        sources = (
            self.fd, self.output_fd, self.output_fd, self.fd, self.status_fd, self.root_fd, self.go_fd, self.proc_fd
        )  # fmt: skip
        # First out of the way, so that no source is overwritten before its turn.
        high = [fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, 100) for source in sources]
        for target, source in enumerate(high):
            os.dup2(source, target, inheritable=target <= 2)
        self.fd, self.status_fd, self.root_fd, self.go_fd, self.proc_fd = _PROGRAM_FD, 4, 5, 6, 7
        os.closerange(8, min(os.sysconf("SC_OPEN_MAX"), 1 << 20))

    def _change_root(self) -> None:
        """Make the container's root ours and detach everything else."""
        if self.tree_fd >= 0:
            top = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            libc.move_mount(self.tree_fd, top, "/")
            os.close(top)
            os.fchdir(self.tree_fd)
            os.close(self.tree_fd)
        try:
            libc.pivot_root(".", ".")
        except OSError as error:
            if error.errno != errno.EBUSY or self.tree_fd >= 0:
                raise
            os.chroot(".")  # the root already; nothing else is in sight
        else:
            libc.umount2(".", libc.MNT_DETACH)
        os.chdir("/")
        # The copied mounts may be of a group whose other members the container sees.
        libc.mount(None, "/", None, libc.MS_REC | libc.MS_PRIVATE)

    def _close_mounts(self) -> None:
        """Let no mount but the root be written to, and no device node be opened.

        Links of the image lead into volumes.  Nodes: an image can have some, and no device cgroup of the container
        holds here.
        """
        top = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            flags = kept_flags(top)
            attributes = libc.MOUNT_ATTR_NODEV | libc.MOUNT_ATTR_RDONLY
            libc.mount_setattr(top, attributes, flags=libc.AT_RECURSIVE, shown="/")
            if not flags & libc.MS_RDONLY:
                libc.mount_setattr(top, 0, shown="/", clear=libc.MOUNT_ATTR_RDONLY)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM):
                raise
            self._close_mounts_by_name(flags)
        finally:
            os.close(top)

    def _close_mounts_by_name(self, root_flags: int) -> None:
        """Do the same before Linux 5.12, or behind a filter: one mount after the other, then look that all are closed.

        A name may lead elsewhere by now, or be covered by another mount: then it is not closed, and nothing is run.
        """
        change = libc.MS_REMOUNT | libc.MS_BIND | libc.MS_NODEV
        table = self._read_table()
        for mount in table.values():
            flags = sum(flag for option, flag in _KEPT.items() if option in mount.options)
            try:
                libc.mount(None, mount.point, None, change | libc.MS_RDONLY | flags)
            except OSError:  # found below
                continue
        libc.mount(None, "/", None, change | root_flags)
        table = self._read_table()
        covered = {
            mount.parent
            for mount in table.values()
            if (under := table.get(mount.parent)) and under.point == mount.point
        }
        for number, mount in table.items():
            wanted = {"nodev"} if mount.point == "/" else {"nodev", "ro"}
            if number not in covered and not wanted.issubset(mount.options):
                raise OSError(errno.EBUSY, "it could not be closed", f"mount {mount.point}")

    def _read_table(self) -> "dict[int, Mount]":
        """Return the visible mounts, from a procfs that was opened before the image's files were."""
        return parse_mounts(read_proc("self/mountinfo", self.proc_fd))

    def _write_status(self, text: str) -> None:
        os.write(self.status_fd, text.encode("utf-8", "backslashreplace") + b"\n")

    def _fail(self, error: BaseException) -> None:
        why = cause(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        try:
            self._write_status(f"error {self.step}: {why}")
        finally:  # the reader may have ended
            os._exit(127)
