"""What the tests ask the kernel about device programs; the product itself never detaches or dumps one."""

import ctypes
import errno
import os
import struct

from ocigpu.system import bpf

# linux/bpf.h
BPF_PROG_DETACH = 9
BPF_OBJ_GET_INFO_BY_FD = 15
INFO_SIZE = 232
MAX_INSTRUCTIONS = 1_000_000


def detach_device_program(cgroup_fd: int, program_fd: int) -> None:
    """Detach a device program from a cgroup v2 directory: what it denied is allowed from here on."""
    bpf._bpf(BPF_PROG_DETACH, bpf._attr("=III", cgroup_fd, program_fd, bpf.BPF_CGROUP_DEVICE))


def read_program_id(program_fd: int) -> int:
    """Return the number of a loaded program."""
    info = _read_info(program_fd, 0, 0)
    return int(struct.unpack_from("=I", info, 4)[0])


def read_instructions(program_fd: int) -> bytes:
    """Return the instructions of a loaded program as the kernel shows them.

    For reading only: where net.core.bpf_jit_harden is on, what is shown may be zeros or may not load again.
    """
    length = struct.unpack_from("=I", _read_info(program_fd, 0, 0), 20)[0]
    if length > MAX_INSTRUCTIONS * 8:
        raise OSError(errno.E2BIG, os.strerror(errno.E2BIG))
    code = ctypes.create_string_buffer(length)
    _read_info(program_fd, length, ctypes.addressof(code))
    return code.raw


def _read_info(program_fd: int, length: int, address: int) -> "ctypes.Array[ctypes.c_char]":
    info = ctypes.create_string_buffer(INFO_SIZE)
    struct.pack_into("=I", info, 20, length)
    struct.pack_into("=Q", info, 32, address)
    bpf._bpf(BPF_OBJ_GET_INFO_BY_FD, bpf._attr("=IIQ", program_fd, INFO_SIZE, ctypes.addressof(info)))
    return info
