"""A root file system that is full: an error, or nothing is left of what could not be made."""

import os
from pathlib import Path

import pytest
from provision_lab import LDCONFIG, Lab, make_rootfs

from ocigpu.core.actions import Plan, RefreshLdCache
from ocigpu.system import libc

pytestmark = pytest.mark.root

ENTRIES = tuple((f"libnumber{number}.so.1", f"/usr/lib64/libnumber{number}.so.1", 64) for number in range(200))


@pytest.mark.product(single=True)
@pytest.mark.parametrize("how", ["ldconfig", "merge"])
@pytest.mark.parametrize("cache", ["of the image", "none"])
@pytest.mark.parametrize("free", [0, 1, 2, 64])
def test_no_draft_is_left_on_a_full_disk(tmp_path: Path, how: str, cache: str, free: int) -> None:
    """``free``: pages.  What of ldconfig's is only half written has been taken for a cache's beginning by nobody."""
    root = tmp_path / "small"
    root.mkdir()
    libc.mount("tmpfs", str(root), "tmpfs", 0, "size=1m,mode=755")
    try:
        make_rootfs(root)
        if cache == "none":
            (root / "etc/ld.so.cache").unlink()
        for number in range(300):
            (root / f"usr/lib64/libx{number}.so").symlink_to("libx.so.1")
        before = {path.name: path.read_bytes() for path in (root / "etc").iterdir()}
        place = os.statvfs(root)
        (root / "fill").write_bytes(b"x" * ((place.f_bavail - free) * place.f_frsize))
        action = RefreshLdCache(LDCONFIG, ("/usr/lib64",), "loader", ENTRIES if how == "merge" else ())
        with Lab(root, dev=False) as lab:
            notes, code, _ = lab.provision(Plan((action,)))
        after = {path.name: path.read_bytes() for path in (root / "etc").iterdir()}
        assert set(after) <= {"ld.so.cache"}
        if code or notes:
            assert after == before
        if free == 64:
            assert (code, notes) == ("", [])
            assert after["ld.so.cache"].startswith((b"ld.so-1.7.0", b"glibc-ld.so.cache"))
    finally:
        libc.umount2(str(root), libc.MNT_DETACH)
