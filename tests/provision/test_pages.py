"""Small file systems of a plan, on kernels with small and large pages."""

import os
from pathlib import Path

import pytest
from provision_lab import Lab, new_kernel, old_kernel

from ocigpu.core.actions import Plan, Tmpfs
from ocigpu.provision import mounts

PROC = Tmpfs(
    "/proc/driver/nvidia",
    0o555,
    (
        ("params", 0o444, "x" * 1200),
        ("version", 0o444, "y" * 150),
        ("registry", 0o444, ""),
        ("big", 0o444, "z" * 70_000),
    ),
    ("gpus", "gpus/0000:01:00.0", "capabilities"),
    "",
)


@pytest.mark.parametrize("page", [4 << 10, 16 << 10, 64 << 10])
@pytest.mark.parametrize("action", [PROC, PROC._replace(files=(), directories=()), PROC._replace(files=PROC.files[:1])])
def test_there_is_room_for_every_file_whatever_the_size_of_a_page(action: Tmpfs, page: int) -> None:
    """A kernel charges whole pages for each file, and for each directory at most one."""
    options = dict(mounts.tmpfs_options(action, 0, 0))
    pages = sum(-(-len(content) // page) for _, _, content in action.files) + len(action.directories)
    assert int(options["size"]) >= pages * page
    assert int(options["nr_inodes"]) >= len(action.files) + len(action.directories) + 1


@pytest.mark.root
@pytest.mark.parametrize("kernel", [new_kernel, old_kernel])
def test_this_kernel_has_room_and_takes_only_what_is_used(kernel: object, rootfs: Path) -> None:
    action = PROC._replace(container_path="/etc/many", files=tuple((f"f{n}", 0o444, "x" * n) for n in range(200)))
    with Lab(rootfs) as lab:
        assert lab.provision(Plan((action,)), kernel) == ([], "", "")

        def used() -> int:
            found = os.statvfs("/etc/many")
            return (found.f_blocks - found.f_bfree) * found.f_frsize

        assert lab.inside(used) <= 201 * os.sysconf("SC_PAGESIZE")
