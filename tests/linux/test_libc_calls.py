"""The system call wrappers: numbers, sizes, errors; and what they read agrees with /proc."""

import ctypes
import os
import re
from pathlib import Path

import pytest

from ocigpu.system import libc

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


@pytest.mark.parametrize("machine", list(HEADERS))
def test_the_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    text = HEADERS[machine].read_text()
    found = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text))
    for name, number in libc.NUMBERS[machine].items():
        assert (name, found.get(name)) == (name, str(number))


def test_the_structures_have_the_kernels_sizes() -> None:
    assert ctypes.sizeof(libc.open_how) == 24  # OPEN_HOW_SIZE_VER0
    assert ctypes.sizeof(libc.mount_attr) == 32  # MOUNT_ATTR_SIZE_VER0


def test_an_error_carries_number_text_and_path() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        libc.openat2(libc.AT_FDCWD, "/no/such/file", os.O_PATH, 0, 0)
    assert (caught.value.errno, caught.value.filename) == (2, "/no/such/file")
    assert caught.value.strerror == "No such file or directory"
    with pytest.raises(OSError, match="Bad file descriptor"):
        libc.setns(-1, libc.CLONE_NEWNS)


def test_an_unknown_architecture_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libc, "_machine", "sparc64")
    call = libc._system_call("openat2")
    with pytest.raises(OSError, match="openat2: no system call number known for sparc64"):
        call(0)


def test_the_mount_id_is_the_one_of_fdinfo() -> None:
    for path, is_root in (("/proc", True), ("/proc/self", False)):
        fd = os.open(path, os.O_PATH)
        try:
            found = libc.read_mount_id(fd)
            assert f"mnt_id:\t{found.mnt_id}\n" in Path(f"/proc/self/fdinfo/{fd}").read_text()
            assert found.is_root is is_root
        finally:
            os.close(fd)


def test_the_capabilities_are_those_of_status() -> None:
    status = Path("/proc/self/status").read_text()
    found = libc.capget()
    assert f"CapEff:\t{found.effective:016x}\n" in status
    assert f"CapPrm:\t{found.permitted:016x}\n" in status
    assert f"CapInh:\t{found.inheritable:016x}\n" in status
    libc.capset(found)


def test_this_kernel_has_the_mount_calls() -> None:
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    assert libc.has_mount_setattr() is (release >= (5, 12))
