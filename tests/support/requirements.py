"""Probes that try a thing: each returns "" where it works and otherwise the reason why it does not.

``require(probe(), ...)`` skips the test with the first reason.
"""

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from support import machine

ACCEPTED_REASONS = (
    "no NVIDIA driver",
    "has an NVIDIA driver",
    "no device cgroup of version 1",
    "this Podman passes no annotation of an image on",
)
"""Skips that stay skips in CI: what a machine is like for good."""

CGROUP2_VIEW = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'umount -l /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && exec "$@"',
    "sh",
)
"""Put before a command: it sees a machine with nothing but cgroup version 2."""

CGROUP1_VIEW = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'if mountpoint -q /sys/fs/cgroup/unified; then umount -l /sys/fs/cgroup/unified; fi && exec "$@"',
    "sh",
)
"""Put before a command: it sees cgroup version 1 only (crun refuses machines that mount both)."""


def require(*reasons: str) -> None:
    """Skip the calling test with the first reason that is not empty."""
    for reason in reasons:
        if reason:
            pytest.skip(reason)


def root() -> str:
    return "" if os.geteuid() == 0 else "needs root"


def programs(*names: str) -> str:
    missing = [name for name in names if find_program(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def find_program(name: str) -> str | None:
    """Return the path of a program of the system; the distribution's own comes before /usr/local."""
    return shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin")


def _tried(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return "" if result.returncode == 0 else f"{' '.join(command)}: {result.stderr.strip()}"


@functools.cache
def is_unified() -> bool:
    """Whether the machine itself has cgroup version 2 only."""
    return Path("/sys/fs/cgroup/cgroup.controllers").exists()


CGROUP2 = "/sys/fs/cgroup" if is_unified() else "/sys/fs/cgroup/unified"
"""Where the machine has the cgroups of version 2."""


@functools.cache
def cgroup_v1() -> str:
    """Makes and removes a device cgroup of version 1."""
    directory = Path("/sys/fs/cgroup/devices")
    if not (directory / "devices.allow").exists() and not (directory / "devices.list").exists():
        return "no device cgroup of version 1 is mounted"
    trial = directory / f"{machine.NAME}-trial"
    try:
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        return f"no device cgroup of version 1 can be made: {error.strerror}"
    return ""


@functools.cache
def cgroup_v2() -> str:
    """Makes and removes a cgroup of version 2, in a view of its own where the machine is a mixed one."""
    name = f"/sys/fs/cgroup/{machine.NAME}-trial"
    view = () if is_unified() else CGROUP2_VIEW
    return _tried(*view, "sh", "-c", f"mkdir {name} && rmdir {name}")


@functools.cache
def user_namespaces() -> str:
    """An ordinary user makes a user namespace."""
    return _tried("setpriv", "--reuid", "4321", "--regid", "4321", "--clear-groups", "unshare", "-Ur", "true")


@functools.cache
def overlay() -> str:
    """Mounts an overlay where engines keep their images."""
    with tempfile.TemporaryDirectory(prefix="ocigpu-test-") as directory:
        for name in ("lower", "upper", "work", "merged"):
            os.mkdir(os.path.join(directory, name))
        options = f"lowerdir={directory}/lower,upperdir={directory}/upper,workdir={directory}/work"
        return _tried("unshare", "--mount", "mount", "-t", "overlay", "overlay", "-o", options, f"{directory}/merged")


@functools.cache
def compiler() -> str:
    """Compiles a static program."""
    with tempfile.TemporaryDirectory(prefix="ocigpu-test-") as directory:
        source = Path(directory, "a.c")
        source.write_text("int main(void) { return 0; }\n")
        return programs("gcc") or _tried("gcc", "-static", "-o", f"{directory}/a", str(source))


SYSTEM_CALLS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def system_calls(machine: str) -> str:
    """The kernel's header with a machine's system call numbers: one of x86-64 is nowhere else."""
    return "" if SYSTEM_CALLS[machine].exists() else f"no header of {machine}'s system calls: {SYSTEM_CALLS[machine]}"


@functools.cache
def may_raise_limits() -> bool:
    """Whether this process may raise its hard limits (CAP_SYS_RESOURCE)."""
    return not _tried("prlimit", "--memlock=unlimited", "true")
