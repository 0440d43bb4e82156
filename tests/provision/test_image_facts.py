"""What is read from images, hostile ones included."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from ocigpu.facts import ImageFacts
from ocigpu.provision import compat, image, inside

TRIPLET = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}[os.uname().machine]
DEBIAN32 = "/usr/lib/i386-linux-gnu" if os.uname().machine == "x86_64" else "/usr/lib32"


def read(root: Path, driver: str = "550.163.01") -> ImageFacts:
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        return image.read_image_facts(fd, driver)
    finally:
        os.close(fd)


def touch(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


@pytest.mark.parametrize(
    ("names", "library_dir", "library_dir32"),
    [
        ([], "/usr/lib64", "/usr/lib32"),
        (["etc/debian_version"], f"/usr/lib/{TRIPLET}", DEBIAN32),
        (["usr/lib64/x", "usr/lib/x"], "/usr/lib64", "/usr/lib"),
        (["usr/lib64/x", "usr/lib/x", "usr/lib32/x"], "/usr/lib64", "/usr/lib32"),
    ],
    ids=["empty", "debian", "fedora", "arch"],
)
def test_where_libraries_go(names: list[str], library_dir: str, library_dir32: str, tmp_path: Path) -> None:
    found = read(touch(tmp_path, *names))
    assert (found.library_dir, found.library_dir32) == (library_dir, library_dir32)


def test_a_lib64_that_is_lib_is_no_place_for_32_bits(tmp_path: Path) -> None:
    touch(tmp_path, "usr/lib/x")
    (tmp_path / "usr/lib64").symlink_to("lib")
    assert read(tmp_path).library_dir32 == "/usr/lib32"


@pytest.mark.parametrize(
    ("names", "libc"),
    [
        ([], ""),
        (["lib/x"], ""),
        (["lib64/ld-linux-x86-64.so.2"], "glibc"),
        (["lib/ld-linux-aarch64.so.1"], "glibc"),
        ([f"usr/lib/{TRIPLET}/ld-linux-x86-64.so.2"], "glibc"),
        (["lib/ld-musl-x86_64.so.1"], "musl"),
        (["lib/ld-musl-x86_64.so.1", "usr/lib64/ld-linux-x86-64.so.2"], "glibc"),
    ],
)
def test_the_loader_tells_the_c_library(names: list[str], libc: str, tmp_path: Path) -> None:
    assert read(touch(tmp_path, *names)).libc == libc


def test_the_loaders_directory_may_be_a_link(tmp_path: Path) -> None:
    touch(tmp_path, "usr/lib/ld-musl-x86_64.so.1")
    (tmp_path / "lib").symlink_to("/usr/lib")
    assert read(tmp_path).libc == "musl"


@pytest.mark.parametrize(
    ("names", "driver", "major"),
    [
        (["libcuda.so.575.51.03"], "550.163.01", 575),
        (["libcuda.so.575.51.03", "libcuda.so.580.1.1", "libcuda.so.1"], "550.163.01", 580),
        (["libcuda.so.550.163.01"], "550.163.01", 0),
        (["libcuda.so.535.1.1"], "550.163.01", 0),
        (["libcuda.so.1000.1"], "580.1", 1000),
        (["libcuda.so.99999999999999999999.1"], "550.1", 0),
        (["libcuda.so.x.1", "libcuda.so.", "libother.so.900.1"], "550.1", 0),
    ],
)
def test_compatibility_libraries_newer_than_the_driver(
    names: list[str], driver: str, major: int, tmp_path: Path
) -> None:
    found = read(touch(tmp_path, *(f"usr/local/cuda/compat/{name}" for name in names)), driver)
    assert (found.compat_dir, found.compat_major) == (compat.COMPAT_DIR if major else "", major)


def test_a_cuda_directory_that_is_a_link_as_in_nvidias_images(tmp_path: Path) -> None:
    touch(tmp_path, "usr/local/cuda-12.9/compat/libcuda.so.575.51.03")
    (tmp_path / "usr/local/cuda").symlink_to("/etc/alternatives/cuda")
    (tmp_path / "etc/alternatives").mkdir(parents=True)
    (tmp_path / "etc/alternatives/cuda").symlink_to("/usr/local/cuda-12.9")
    assert read(tmp_path).compat_major == 575


@pytest.mark.parametrize("target", ["/../../../../", "../../../../../..", "/", "/proc/self/cwd"])
def test_a_compatibility_directory_that_leads_out(target: str, tmp_path: Path) -> None:
    (tmp_path / "usr/local/cuda").mkdir(parents=True)
    (tmp_path / "usr/local/cuda/compat").symlink_to(target)
    assert read(tmp_path).compat_dir == ""


def directory(path: Path) -> None:
    path.mkdir()


def link(path: Path) -> None:
    path.symlink_to("/etc/shadow")


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))


@pytest.mark.parametrize("make", [directory, link, fifo, pytest.param(device, marks=pytest.mark.root)])
def test_only_a_file_is_a_library(make: Callable[[Path], None], tmp_path: Path) -> None:
    """None of them is opened for reading: a FIFO would block, a device might act."""
    (tmp_path / "usr/local/cuda/compat").mkdir(parents=True)
    make(tmp_path / "usr/local/cuda/compat/libcuda.so.999.1")
    assert read(tmp_path).compat_dir == ""


def test_marks_that_are_no_files_do_not_stop_anything(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    os.mkfifo(tmp_path / "etc/debian_version")
    os.mkfifo(tmp_path / "lib64")
    (tmp_path / "lib").symlink_to("lib")
    assert read(tmp_path).library_dir == f"/usr/lib/{TRIPLET}"


def test_a_listing_ends(tmp_path: Path) -> None:
    touch(tmp_path, *(f"lib64/{number}" for number in range(inside.MAX_ENTRIES + 50)))
    fd = os.open(tmp_path, os.O_PATH)
    try:
        assert len(inside.list_inside(fd, "/lib64")) == inside.MAX_ENTRIES
    finally:
        os.close(fd)
