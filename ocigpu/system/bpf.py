"""The bpf(2) commands that device cgroups need: load, attach, replace, query, dump.

Sources: bpf(2), linux/bpf.h (``union bpf_attr``, ``struct bpf_prog_info``), kernel/bpf/cgroup.c.  Every command needs
privileges in the initial user namespace: loading CAP_BPF and CAP_NET_ADMIN (before Linux 5.8 CAP_SYS_ADMIN), fetching
a program by its number CAP_SYS_ADMIN, the rest CAP_NET_ADMIN.  Low-level: errors are OSError, policy lives elsewhere.
"""

import errno
import os
import resource
import struct

from ocigpu.core.record import NamedTuple
from ocigpu.system import libc
from ocigpu.system.foreign import address

BPF_PROG_LOAD = 5
BPF_PROG_ATTACH = 8
BPF_PROG_GET_FD_BY_ID = 13
BPF_PROG_QUERY = 16
_COMMANDS = {value: name for name, value in globals().items() if name.startswith("BPF_PROG_")}

BPF_PROG_TYPE_CGROUP_DEVICE = 15
BPF_CGROUP_DEVICE = 6

BPF_F_ALLOW_OVERRIDE = 1
BPF_F_ALLOW_MULTI = 2
BPF_F_REPLACE = 4  # since Linux 5.5, only together with BPF_F_ALLOW_MULTI

ATTR_SIZE = 120
"""Bytes of every attribute block.  Unused bytes are zero.  PROG_QUERY must never get fewer than 64: some kernels from
6.17 on store ``revision`` at offset 56 whatever size was passed."""
FIRST_ROOM = 64
MAX_PROGRAMS = 1024
"""More programs than this on one cgroup are refused (the kernel's own limit for cgroups is 64)."""
LOG_SIZE = 64 * 1024
_NAME = b"ocigpu_devices"
_LOAD_RETRIES = 5


class Attached(NamedTuple):
    """The device programs attached exactly to one cgroup: their numbers in order, and the attach flags in force."""

    ids: tuple[int, ...]
    flags: int


def _bpf(command: int, attr: bytearray) -> int:
    return libc.bpf(command, attr, _COMMANDS.get(command, str(command)))


def _attr(layout: str, *values: int) -> bytearray:
    attr = bytearray(ATTR_SIZE)
    struct.pack_into(layout, attr, 0, *values)
    return attr


def load_device_program(instructions: bytes) -> int:
    """Load a BPF_PROG_TYPE_CGROUP_DEVICE program and return its descriptor (close-on-exec).

    EPERM is answered once by raising RLIMIT_MEMLOCK, which kernels before 5.11 charge programs to.  Any other failure
    is repeated once with the verifier's log, whose last lines end up in the OSError's text.
    """
    try:
        return _load(instructions)
    except OSError as error:
        if error.errno == errno.EPERM:
            if not _charges_memlock():
                raise
            _raise_memlock()
            return _load(instructions)
        log = bytearray(LOG_SIZE)
        try:
            return _load(instructions, log)
        except OSError:
            text = log.partition(b"\0")[0].decode("utf-8", "backslashreplace").strip()
            tail = " | ".join(text.splitlines()[-3:])[-500:]
            raise OSError(error.errno, f"{error.strerror}{': ' + tail if tail else ''}", error.filename) from error


def _load(instructions: bytes, log: bytearray | None = None) -> int:
    license_text = b"Apache-2.0"  # the kernel looks for its end: bytes have a zero behind them
    attr = _attr(
        "=IIQQIIQII16s",
        BPF_PROG_TYPE_CGROUP_DEVICE,
        len(instructions) // 8,
        address(instructions),
        address(license_text),
        1 if log is not None else 0,
        LOG_SIZE if log is not None else 0,
        address(log) if log is not None else 0,
        0,
        0,
        _NAME,  # type: ignore[arg-type] # ctypes takes bytes for an array of c_char
    )
    for _ in range(_LOAD_RETRIES):
        try:
            return _bpf(BPF_PROG_LOAD, attr)
        except BlockingIOError:  # EAGAIN: the verifier was interrupted by a signal
            continue
    return _bpf(BPF_PROG_LOAD, attr)


def _charges_memlock() -> bool:
    parts = os.uname().release.split(".")
    try:
        return (int(parts[0]), int(parts[1])) < (5, 11)
    except (IndexError, ValueError):
        return False


def _raise_memlock() -> None:
    limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limit)
    except (OSError, ValueError):  # without CAP_SYS_RESOURCE (EPERM): the second load then reports the error
        return


def query_device_programs(cgroup_fd: int) -> Attached:
    """Return the device programs attached to exactly this cgroup v2 directory (those of ancestors are not listed).

    Raises OSError: EPERM without CAP_NET_ADMIN, EINVAL where the kernel has no CONFIG_CGROUP_BPF, EBADF if the
    directory is not of cgroup v2, ENOSPC beyond :data:`MAX_PROGRAMS`.
    """
    room = FIRST_ROOM
    while True:
        ids = bytearray(4 * room)
        attr = _attr("=IIIIQII", cgroup_fd, BPF_CGROUP_DEVICE, 0, 0, address(ids), room, 0)
        try:
            _bpf(BPF_PROG_QUERY, attr)
        except OSError as error:
            # The kernel stores the true count; it may grow again before the next try, but never beyond the bound.
            count = struct.unpack_from("=I", attr, 24)[0]
            if error.errno != errno.ENOSPC or room >= MAX_PROGRAMS:
                raise
            room = min(max(count, room * 2), MAX_PROGRAMS)
            continue
        flags, count = struct.unpack_from("=I", attr, 12)[0], struct.unpack_from("=I", attr, 24)[0]
        return Attached(struct.unpack_from(f"={min(count, room)}I", ids), flags)


def open_program(program_id: int) -> int:
    """Return a descriptor (close-on-exec) of the loaded program with this number; ENOENT if it is gone."""
    return _bpf(BPF_PROG_GET_FD_BY_ID, _attr("=III", program_id, 0, 0))


def attach_device_program(cgroup_fd: int, program_fd: int, flags: int, replace_fd: int = -1) -> None:
    """Attach a device program to a cgroup v2 directory.

    With ``replace_fd`` the attached program behind that descriptor is exchanged for the new one in one step
    (BPF_F_REPLACE is added; ENOENT if it is not attached, EINVAL before Linux 5.5).  With ``flags`` of 0 or
    BPF_F_ALLOW_OVERRIDE a cgroup has one program at most and attaching replaces it, also in one step.
    """
    if replace_fd >= 0:
        attr = _attr("=IIIII", cgroup_fd, program_fd, BPF_CGROUP_DEVICE, flags | BPF_F_REPLACE, replace_fd)
    else:
        attr = _attr("=IIII", cgroup_fd, program_fd, BPF_CGROUP_DEVICE, flags)
    _bpf(BPF_PROG_ATTACH, attr)
