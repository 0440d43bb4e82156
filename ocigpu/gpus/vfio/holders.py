"""Who uses a GPU that is bound to a VFIO driver: processes with its nodes open, whatever started them.

A missing pod proves nothing: a virtual machine whose pod was deleted by force may continue and keep its GPU.  What
counts is which processes have /dev/vfio/<group> or /dev/vfio/devices/vfio<N> open.  Nodes are compared by number, so
that names, mount namespaces and containers' /dev do not matter (stat(2), proc_pid_fd(5)).  Descriptors on their way
through a socket, mappings without a descriptor, and threads with a table of their own are not seen here; a reset asks
the kernel, too (:mod:`ocigpu.gpus.vfio.reset`).
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ocigpu.core.errors import HostError
from ocigpu.gpus.pci import find_group, read_number
from ocigpu.gpus.tree import Roots, list_names, small_number
from ocigpu.system.proc import read_command, read_proc

INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""What /proc/<pid>/ns/pid of the machine's own processes reads: PROC_PID_INIT_INO of the kernel's proc_ns.h."""
DEVICE_FILE = "anon_inode:[vfio-device]"
"""The link of a device descriptor that a group's owner has opened (VFIO_GROUP_GET_DEVICE_FD); fdinfo may name it."""
SYSPATH = "vfio-device-syspath:"
"""Of a device's fdinfo since Linux 6.18 (Documentation/filesystems/proc.rst)."""


class Holder(NamedTuple):
    """A process that has a node of a GPU open; ``command``: its name of 15 letters (proc_pid_comm(5))."""

    pid: int
    command: str
    path: str


class HolderScan(NamedTuple):
    """``unreadable``: what could not be inspected, a phrase each; if not empty, finding no holder proves nothing."""

    holders: tuple[Holder, ...]
    unreadable: tuple[str, ...]


class HeldNode(NamedTuple):
    """A node to be found: by its number, or as a file that stands for it in a simulated host."""

    path: str
    number: tuple[int, int] | None
    file: tuple[int, int] | None


def read_holders(
    bdf: str, roots: Roots, proc: str = "/proc", nodes: "tuple[HeldNode, ...] | None" = None
) -> tuple[Holder, ...]:
    """Return the processes that have the GPU at an address, or its IOMMU group, open, by process id.

    ``proc``: path of the machine's procfs; ``nodes``: the nodes to search, None for those of VFIO.  Raises HostError
    (OCIGPU-VFIO-1) when there is no such function, and if no holder was found but some processes could not be
    inspected.
    """
    scan = scan_holders(bdf, roots, proc, nodes)
    if scan.unreadable and not scan.holders:
        more = f"; and {len(scan.unreadable) - 3} more" if len(scan.unreadable) > 3 else ""
        what = "; ".join(scan.unreadable[:3]) + more
        raise HostError("OCIGPU-VFIO-1", f"holders of GPU {bdf}: some processes could not be inspected: {what}")
    return scan.holders


def scan_holders(
    bdf: str, roots: Roots, proc: str = "/proc", nodes: "tuple[HeldNode, ...] | None" = None
) -> HolderScan:
    """Return the holders of the GPU, and the processes that could not be inspected; raises HostError as above."""
    nodes = find_nodes(bdf, roots) if nodes is None else nodes
    holders: list[Holder] = []
    unreadable: list[str] = []
    if not roots.stand_in and (why := _why_not_everybody(proc)):
        unreadable.append(why)
    for pid in sorted(filter(None, (small_number(name, 0) for name in list_names(proc)))):
        try:
            if path := _find_held(f"{proc}/{pid}", nodes, bdf):
                holders.append(Holder(pid, read_command(f"{proc}/{pid}"), path))
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        except OSError as error:
            if not roots.stand_in:  # a simulated host has the processes of its user
                unreadable.append(f"process {pid}: {error.strerror}")
    return HolderScan(tuple(holders), tuple(unreadable))


@contextmanager
def claim(bdf: str, roots: Roots) -> Iterator[None]:
    """Open the IOMMU group of a function: only one process can, and none can open its functions meanwhile.

    The kernel's own answer (vfio_group_fops_open: EBUSY) also reveals a holder without a visible descriptor.  Raises
    HostError (OCIGPU-VFIO-2) then, and other OSErrors but those of hosts without such nodes.
    """
    path = f"{roots.host}/dev/vfio/{find_group(bdf, roots.sys)}"
    fd = -1
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise HostError("OCIGPU-VFIO-2", f"GPU {bdf}: a process has {path} open") from error
        if error.errno not in (errno.ENOENT, errno.ENXIO, errno.ENODEV):  # ENXIO: a node of a simulated host
            raise
    try:
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def find_nodes(bdf: str, roots: Roots) -> tuple[HeldNode, ...]:
    """Return the nodes by which a function can be had; raises HostError (OCIGPU-VFIO-1) for an unknown function."""
    directory = f"{roots.sys}/bus/pci/devices/{bdf}"
    if "/" in bdf or not os.path.exists(f"{directory}/class"):
        raise HostError("OCIGPU-VFIO-1", f"holders of GPU {bdf}: no such function: {directory}")
    group = find_group(bdf, roots.sys)
    numbers = {f"/dev/vfio/{group}": f"{roots.sys}/class/vfio/{group}/dev"} if group >= 0 else {}
    for name in list_names(f"{directory}/vfio-dev"):
        numbers[f"/dev/vfio/devices/{name}"] = f"{directory}/vfio-dev/{name}/dev"
    return tuple(make_node(path, read_number(number), roots) for path, number in numbers.items())


def make_node(path: str, number: "tuple[int, int] | None", roots: Roots) -> HeldNode:
    """Return a node by its path and number, and by the file that stands for it in a simulated host."""
    try:
        status = os.stat(f"{roots.host}{path}")
    except OSError:
        return HeldNode(path, number, None)
    stands_in = roots.stand_in and stat.S_ISREG(status.st_mode)
    return HeldNode(path, number, (status.st_dev, status.st_ino) if stands_in else None)


def _why_not_everybody(proc: str) -> str:
    try:
        namespace = os.readlink(f"{proc}/1/ns/pid")
    except OSError as error:
        return f"the processes of the machine: {proc}/1/ns/pid: {error.strerror}"
    if namespace != INITIAL_PID_NAMESPACE:
        return f"processes outside of the PID namespace of {proc} (in a pod: hostPID)"
    return ""


def _find_held(directory: str, nodes: tuple[HeldNode, ...], bdf: str) -> str:
    """Return the path of a node that a process has open, "" for none.  Raises OSError."""
    names = [f"{directory}/fd/{name}" for name in os.listdir(f"{directory}/fd")]
    if not names:  # the first thread may have ended before the others
        threads = os.listdir(f"{directory}/task")
        names = [
            f"{directory}/task/{one}/fd/{name}" for one in threads for name in _names(f"{directory}/task/{one}/fd")
        ]
    numbers = {node.number: node.path for node in nodes if node.number}
    files = {node.file: node.path for node in nodes if node.file}
    majors = {major for major, _ in numbers}
    machines = any(node.path.startswith("/dev/vfio/") for node in nodes)
    unknown = other = False
    for name in names:
        try:
            status = os.stat(name)
            if stat.S_ISCHR(status.st_mode):
                number = (os.major(status.st_rdev), os.minor(status.st_rdev))
                if number[0] in majors and not _is_name(name):
                    if number in numbers:
                        return numbers[number]
                    other = True
            elif machines and stat.S_IFMT(status.st_mode) == 0:  # no file of a file system
                if os.readlink(name) == DEVICE_FILE:
                    device = device_of(name)
                    if device == bdf:
                        return DEVICE_FILE
                    unknown |= not device
            elif (status.st_dev, status.st_ino) in files and not _is_name(name):
                return files[status.st_dev, status.st_ino]
        except (FileNotFoundError, ProcessLookupError):  # closed since
            continue
    # Before Linux 6.18 fdinfo does not name the device: it is of one of the groups that the process has open.
    return DEVICE_FILE if unknown and not other else ""


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, ProcessLookupError):
        return []


def device_of(name: str) -> str:
    """Return the address of the function that a descriptor is, "" where the kernel does not say."""
    return _read_fdinfo(name, SYSPATH).rpartition("/")[2]


def _is_name(name: str) -> bool:
    """Whether a descriptor only names its file (O_PATH): anybody can have one of a node that he may not open."""
    return bool(int(_read_fdinfo(name, "flags:") or "0", 8) & os.O_PATH)


def _read_fdinfo(name: str, word: str) -> str:
    """Return the value behind a word in a descriptor's fdinfo, "" if absent (proc_pid_fdinfo(5))."""
    directory, _, number = name.rpartition("/fd/")
    lines = read_proc(f"{directory}/fdinfo/{number}").splitlines()
    return next((line.removeprefix(word).strip() for line in lines if line.startswith(word)), "")
