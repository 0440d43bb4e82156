"""What a user reads when the kernel refuses a step: the action, the system call, the path he knows, the cause."""

import re
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from provision_lab import READ_ONLY, Lab, host_mounts, make_rootfs, new_kernel, old_kernel, snapshot
from support import requirements
from support.machine import MACHINE
from support.products import one_in

from ocigpu.core.actions import Bind, Link, Node, Plan, TextFile, Tmpfs
from ocigpu.core.facts import DeviceNode
from ocigpu.provision import fence
from ocigpu.system import libc

pytestmark = pytest.mark.root

TEXT = requirements.SYSTEM_CALLS[MACHINE].read_text()
NUMBERS = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+)\s+(\d+)", TEXT)}
OLD = {name: name for name in ("chown", "renameat") if name in NUMBERS}
"""Calls that younger machines lack."""
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
LIBRARY = Bind("/etc/hostname", "/usr/lib64/libnew.so.1", READ_ONLY, "library")
DIRECTORY = Bind("/etc", "/opt/etc", READ_ONLY, "directory", "directory")
PROFILES = Tmpfs("/opt/profiles", 0o555, (("a.conf", 0o444, "{}"),), ("b",), "profiles")
LINK = Link("/usr/lib64/libnew.so", "libnew.so.1", "loader")
STALE = Link("/usr/lib64/libstale.so", "libnew.so.1", "loader")
TEXT = TextFile("/etc/ld.so.conf.d/x.conf", 0o644, "/opt\n", "loader")
CAP = Node(DeviceNode("/dev/nvidia-caps/nvidia-cap1", "/dev/null", 1, 3, 0o440, 0, 44), "MIG")


def refuse(call: str, argument: int = 0, bits: int = 0) -> Callable[[], None]:
    """Return what has a system call fail with EPERM, or only that with these bits in an argument."""

    def prepare() -> None:
        def line(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
            return struct.pack("=HBBI", code, if_true, if_false, operand)

        test = line(_LOAD, 16 + 8 * argument) + line(_ANY_BIT, bits, 0, 1) if bits else b""
        code = line(_LOAD, 0) + line(_EQUAL, NUMBERS[call], 0, 1 + len(test) // 8) + test
        code += line(_RETURN, fence.SECCOMP_RET_ERRNO | 1) + line(_RETURN, fence.SECCOMP_RET_ALLOW)
        libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
        fence.install_filter(code)

    return prepare


REFUSED: dict[str, tuple[Callable[[], None], Callable[[], None], Any, str]] = {
    "open_tree": (new_kernel, refuse("open_tree"), LIBRARY, "open_tree /etc/hostname"),
    "mount_setattr": (
        new_kernel, refuse("mount_setattr", 4, 0xFF), LIBRARY,
        "mount_setattr /etc/hostname (MOUNT_ATTR_RDONLY|MOUNT_ATTR_NOSUID|MOUNT_ATTR_NODEV MS_PRIVATE)",
    ),
    "move_mount": (new_kernel, refuse("move_mount"), LIBRARY, "move_mount to /usr/lib64/libnew.so.1"),
    "fsopen": (new_kernel, refuse("fsopen"), PROFILES, "fsopen tmpfs"),
    "fsconfig": (new_kernel, refuse("fsconfig", 1, 2), PROFILES, "fsconfig /opt/profiles (FSCONFIG_CMD_CREATE)"),
    "fsmount": (
        new_kernel, refuse("fsmount"), PROFILES,
        "fsmount /opt/profiles (MOUNT_ATTR_NOSUID|MOUNT_ATTR_NODEV|MOUNT_ATTR_NOEXEC)",
    ),
    "in a tmpfs": (new_kernel, refuse("fchmod"), PROFILES, "write /opt/profiles/a.conf"),
    "bind": (old_kernel, refuse("mount", 3, libc.MS_BIND), LIBRARY, "mount /usr/lib64/libnew.so.1 (MS_BIND)"),
    "remount": (
        old_kernel, refuse("mount", 3, libc.MS_REMOUNT), DIRECTORY,
        "mount /opt/etc (MS_RDONLY|MS_NOSUID|MS_NODEV|MS_REMOUNT|MS_BIND",
    ),
    "private": (old_kernel, refuse("mount", 3, libc.MS_PRIVATE), LIBRARY, "mount /usr/lib64/libnew.so.1 (MS_PRIVATE)"),
    "tmpfs": (old_kernel, refuse("mount"), PROFILES, "mount /opt/profiles (MS_NOSUID|MS_NODEV|MS_NOEXEC)"),
    "mkdir": (new_kernel, refuse("mkdirat"), TEXT, "mkdir /etc/ld.so.conf.d"),
    "mkdir without openat2": (old_kernel, refuse("mkdirat"), TEXT, "mkdir /etc/ld.so.conf.d"),
    "chown": (new_kernel, refuse(OLD.get("chown", "fchownat")), CAP, "chown /dev/nvidia-caps/nvidia-cap1"),
    "symlink": (new_kernel, refuse("symlinkat"), LINK, "symlink /usr/lib64/libnew.so"),
    "rename": (new_kernel, refuse(OLD.get("renameat", "renameat2")), STALE, "rename /usr/lib64/libstale.so"),
    "write": (new_kernel, refuse("fchmod"), TEXT, "write /etc/ld.so.conf.d/x.conf"),
}  # fmt: skip


@pytest.mark.parametrize(("kernel", "filter_", "action", "words"), one_in(3, REFUSED.values()), ids=REFUSED)
def test_a_call_that_is_refused_is_named_with_its_path(
    kernel: Callable[[], None], filter_: Callable[[], None], action: Any, words: str, rootfs: Path
) -> None:
    def prepare() -> None:
        kernel()
        filter_()

    before = host_mounts()
    with Lab(rootfs) as lab:
        tree, mounts = snapshot(rootfs), lab.mounts()
        notes, code, message = lab.provision(Plan((action,)), prepare)
        assert notes == []
        assert code == {Link: "OCIGPU-MNT-3", Node: "OCIGPU-DEV-3"}.get(type(action), "OCIGPU-MNT-1")
        assert message.startswith(f"{action.describe()}: {words}")
        assert message.endswith(": Operation not permitted")
        assert not re.search(r"\bfd/\d", message)
        assert (snapshot(rootfs), lab.mounts()) == (tree, mounts)
    assert host_mounts() == before


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))


@pytest.mark.rest
@pytest.mark.parametrize("kernel", [new_kernel, old_kernel])
def test_other_causes_are_named_with_their_call(kernel: Callable[[], None], rootfs: Path) -> None:
    (rootfs / "opt").symlink_to("/nowhere")
    openat = "openat2" if kernel is new_kernel else "openat"
    with Lab(rootfs) as lab:

        def attempt(action: Any, also: Callable[[], None] = new_kernel) -> str:
            def prepare() -> None:
                kernel()
                also()

            message = lab.provision(Plan((action,)), prepare)[2]
            assert message.startswith(f"{action.describe()}: ")
            return message.removeprefix(f"{action.describe()}: ")

        assert attempt(DIRECTORY) == "openat /opt: a link that leads nowhere"
        assert attempt(TEXT, limit_files) == "write /etc/ld.so.conf.d/x.conf: File too large"
        assert attempt(Bind("/none", "/x", (), "r")) == "openat /none: No such file or directory"
        assert attempt(Bind("/etc/hostname", "/etc/ld.so.cache/x", (), "r")) == (
            f"{openat} /etc/ld.so.cache: Not a directory"
        )
        lab.inside(lambda: libc.mount(None, "/", None, libc.MS_REMOUNT | libc.MS_BIND | libc.MS_RDONLY))
        assert attempt(LIBRARY) == "openat /usr/lib64/libnew.so.1: Read-only file system"
        assert attempt(TEXT) == "mkdir /etc/ld.so.conf.d: Read-only file system"
        assert attempt(STALE) == "symlink /usr/lib64/libstale.so: Read-only file system"


def test_what_could_not_be_undone_names_its_call(tmp_path: Path) -> None:
    rootfs = make_rootfs(tmp_path / "rootfs")
    with Lab(rootfs) as lab:

        def prepare() -> None:
            refuse("umount2")()

        _, code, message = lab.provision(Plan((LIBRARY, Bind("/none", "/x", (), "r"))), prepare)
    assert code == "OCIGPU-MNT-1"
    assert "(could not be undone: " in message
    assert "umount2 /usr/lib64/libnew.so.1: Operation not permitted" in message
