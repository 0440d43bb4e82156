"""A process that runs tests, by itself: what the machine has, or what others do on it meanwhile, changes no test.

Root gets a mount namespace in which nothing arrives from outside: :data:`COVERED` are empty there, and /dev is a copy
without the nodes of GPUs.  Everybody gets the usual signal dispositions, umask and environment: a job in the background
of a shell starts with SIGINT ignored, one of nohup(1) with SIGHUP ignored.
"""

import contextlib
import fcntl
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

from ocigpu.system import libc

COVERED = {
    "/run/ocigpu": 0o700,
    "/etc/ocigpu": 0o755,
    "/run/containerd": 0o711,
    "/run/docker": 0o700,
    "/etc/docker": 0o755,
    "/opt/containerd": 0o711,
    "/etc/containerd": 0o755,
    "/run/cdi": 0o755,
}
"""Directories whose names the product and engines have built in, with their mode; made where they are missing."""
ALSO_COVERED = ("/etc/cdi", "/etc/nvidia-container-runtime")
"""Directories that are covered where the machine has them."""
GPU_NODES = ("nvidia", "dri", "kfd", "dxg", "vfio", "infiniband", "gdrdrv")
"""Starts of names in /dev that the product looks at."""
KEPT_VARIABLES = tuple(
    f"OCIGPU_{name}" for name in ["NO_SKIP", "SECURITY", "EVERY_STEP", "UPDATE_BUNDLES", "PIP_OPTIONS"]
)
"""The suite's own; others that start alike would be obeyed by programs under test."""

_held: dict[str, tuple[int, bool]] = {}
_in_memory: dict[str, int] = {}


def isolate() -> None:
    """Put the calling process by itself; what it starts from now on is there with it.

    Where root may not make mount namespaces, or mount, that part is left out: the tests that need it skip.
    """
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o022)
    for name in list(os.environ):
        if name.startswith(("OCIGPU_", "NVIDIA_", "CUDA_", "AMD_")) and name not in KEPT_VARIABLES:
            del os.environ[name]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it every program would compile its modules at every start
    sys.dont_write_bytecode = False
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError):
            libc.unshare(libc.CLONE_NEWNS)
            libc.mount(None, "/", None, libc.MS_REC | libc.MS_PRIVATE)
            for directory, mode in COVERED.items():
                _hold(directory)
                _cover(directory, mode)
            for directory in filter(os.path.isdir, ALSO_COVERED):
                _cover(directory, 0o755)
            _cover_dev()


def keep_in_memory(directory: str) -> None:
    """Have what is made in an empty directory kept in memory, where this process is by itself; it makes tests cheaper.

    For each file that ext4 makes, it looks through the inodes that were deleted in the last seconds
    (recently_deleted, fs/ext4/ialloc.c): a quarter of the suite's processor time.  The tmpfs has the directory at the
    directory's own path, so that a mount table names a file as it would without.
    """
    if not _held:
        return
    status = os.stat(directory)
    below = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    libc.mount("tests", directory, "tmpfs", 0, "mode=755")
    try:
        os.setxattr(directory, "user.ocigpu", b"1")  # rootless overlays need them: since Linux 6.6
    except OSError:
        libc.umount2(directory, libc.MNT_DETACH)
        os.close(below)
        return
    inner = Path(directory, directory.lstrip("/"))
    inner.mkdir(parents=True)
    inner.chmod(stat.S_IMODE(status.st_mode))
    libc.mount(str(inner), directory, None, libc.MS_BIND)
    _in_memory[directory] = below


def give_back(directory: str, keep: bool) -> None:
    """Undo :func:`keep_in_memory`: the directory is on disk again; with ``keep``, together with all that is in it."""
    if directory in _in_memory:
        below = _in_memory.pop(directory)
        if keep:
            subprocess.run(["cp", "-a", f"{directory}/.", f"/proc/self/fd/{below}"], pass_fds=[below], check=False)
        os.close(below)
        for _ in range(2):
            libc.umount2(directory, libc.MNT_DETACH)


def release() -> None:
    """Remove the directories that :func:`isolate` has made, unless another such process still has them covered."""
    for directory, (fd, made) in _held.items():
        with contextlib.suppress(OSError):
            if made:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                libc.umount2(directory, libc.MNT_DETACH)
                os.rmdir(directory)
        os.close(fd)
    _held.clear()


def _hold(directory: str) -> None:
    """Lock a directory against its removal: a directory that is removed takes mounts on it along, in all namespaces."""
    made = False
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory)
            made = True
        try:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another process has just ended
            continue
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.path.exists(directory) and os.path.samestat(os.stat(directory), os.fstat(fd)):
            _held[directory] = fd, made
            return
        os.close(fd)


def _cover(directory: str, mode: int) -> None:
    libc.mount("tests", directory, "tmpfs", 0, f"mode={mode:o}")


def _cover_dev() -> None:
    """Cover /dev with one that has all the same but GPUs; what tests make there nobody else sees."""
    real = os.open("/dev", os.O_PATH | os.O_DIRECTORY)
    top = f"/proc/self/fd/{real}"
    _cover("/dev", 0o755)
    try:
        for name in os.listdir(top):
            if not name.startswith(GPU_NODES):
                _copy_node(f"{top}/{name}", Path("/dev", name))
        if os.path.isdir("/dev/shm"):  # Podman's locks have a fixed name there
            _cover("/dev/shm", 0o1777)
    except PermissionError:  # root that may mount, but not make nodes
        libc.umount2("/dev", libc.MNT_DETACH)
    os.close(real)


def _copy_node(source: str, target: Path) -> None:
    status = os.lstat(source)
    if stat.S_ISDIR(status.st_mode):
        target.mkdir()
        libc.mount(source, str(target), None, libc.MS_BIND | libc.MS_REC)
    elif stat.S_ISLNK(status.st_mode):
        target.symlink_to(os.readlink(source))
    elif stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
        os.mknod(target, status.st_mode, status.st_rdev)
        os.chown(target, status.st_uid, status.st_gid)
        target.chmod(stat.S_IMODE(status.st_mode))
