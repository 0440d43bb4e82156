"""The system call wrappers: numbers, sizes, errors; and what they read agrees with /proc."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support import requirements

from ocigpu.core.errors import cause
from ocigpu.system import libc


@pytest.mark.parametrize("machine", libc.MACHINES)
def test_the_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    requirements.require(requirements.system_calls(machine))
    text = requirements.SYSTEM_CALLS[machine].read_text()
    found = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text))
    for name, numbers in libc.NUMBERS.items():
        assert (name, found.get(name)) == (name, str(numbers[libc.MACHINES.index(machine)]))


def test_the_structures_have_the_kernels_sizes() -> None:
    assert len(libc.open_how(0, 0, 0)) == 24  # OPEN_HOW_SIZE_VER0
    assert len(libc.mount_attr(0, 0, 0, 0)) == 32  # MOUNT_ATTR_SIZE_VER0


def test_an_error_carries_number_text_and_path() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        libc.openat2(libc.AT_FDCWD, "/no/such/file", os.O_PATH, 0, 0)
    assert (caught.value.errno, caught.value.filename) == (2, "openat2 /no/such/file")
    assert caught.value.strerror == "No such file or directory"


WORDS: dict[str, tuple[Callable[[], object], str]] = {
    "setns": (lambda: libc.setns(-1, libc.CLONE_NEWNS), "setns (CLONE_NEWNS): Bad file descriptor"),
    "unshare": (lambda: libc.unshare(libc.CLONE_NEWUSER | 1), "unshare (CLONE_NEWUSER|0x1)"),
    "mount": (
        lambda: libc.mount(None, "fd/9", None, libc.MS_REMOUNT | libc.MS_BIND | libc.MS_RDONLY, shown="/usr/lib"),
        "mount /usr/lib (MS_RDONLY|MS_REMOUNT|MS_BIND)",
    ),
    "unknown flag": (lambda: libc.mount(None, "/none", None, 1 << 30), "mount /none (0x40000000)"),
    "umount2": (lambda: libc.umount2("fd/9", 0, "/usr/lib"), "umount2 /usr/lib"),
    "open_tree": (lambda: libc.open_tree(-1, "", 1, "/usr/lib"), "open_tree /usr/lib"),
    "move_mount": (lambda: libc.move_mount(-1, -1, "/usr/lib"), "move_mount to /usr/lib: Bad file descriptor"),
    "mount_setattr": (
        lambda: libc.mount_setattr(-1, libc.MOUNT_ATTR_RDONLY, libc.MS_PRIVATE, shown="/x"),
        "mount_setattr /x (MOUNT_ATTR_RDONLY MS_PRIVATE): "
        + os.strerror(errno.EBADF if libc.has_mount_setattr() else errno.ENOSYS),
    ),
    "fsopen": (lambda: libc.fsopen("none"), "fsopen none: No such device"),
    "fsconfig": (lambda: libc.fsconfig_string(-1, "size", "1"), "fsconfig size=1: Invalid argument"),
    "fsconfig create": (lambda: libc.fsconfig_create(-1, "/x"), "fsconfig /x (FSCONFIG_CMD_CREATE)"),
    "fsmount": (lambda: libc.fsmount(-1, libc.MOUNT_ATTR_NODEV, "/x"), "fsmount /x (MOUNT_ATTR_NODEV)"),
    "prctl": (lambda: libc.prctl(libc.PR_SET_SECCOMP, 9), "prctl PR_SET_SECCOMP: Invalid argument"),
    "prctl unknown": (lambda: libc.prctl(12345), "prctl 12345: Invalid argument"),
    "execveat": (lambda: libc.execveat(-1, ["ldconfig"], {}), "execveat ldconfig: Bad file descriptor"),
}


@pytest.mark.root
@pytest.mark.parametrize(("call", "words"), WORDS.values(), ids=WORDS)
def test_an_error_names_the_call_its_object_and_its_flags(call: Callable[[], object], words: str) -> None:
    with pytest.raises(OSError) as caught:
        call()
    assert cause(caught.value).startswith(words)
    assert "fd/9" not in cause(caught.value)


def test_an_unknown_architecture_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libc, "_machine", "sparc64")
    with pytest.raises(OSError, match="no system call number known for sparc64: 'openat2'"):
        libc.system_call("openat2", 0)


def test_the_mount_id_is_the_one_of_fdinfo() -> None:
    for path in ("/proc", "/proc/self"):
        fd = os.open(path, os.O_PATH)
        try:
            assert f"mnt_id:\t{libc.read_mount_id(fd)}\n" in Path(f"/proc/self/fdinfo/{fd}").read_text()
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
