"""Whether an image's loader cache is as new as what it was made of; images are hostile."""

import os
import shutil
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from support.machine import TRIPLET
from support.process import run

from ocigpu.gpus.libraries.ldcache import NEW_MAGIC, OLD_MAGIC
from ocigpu.provision import image_cache, inside
from ocigpu.system import paths

BEFORE, MADE, AFTER = 1_000_000_000, 2_000_000_000, 2_000_000_001
CACHE = NEW_MAGIC + bytes(28)
LIBRARY_DIRECTORY = f"usr/lib/{TRIPLET}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root directory like Debian's, in which everything is older than the cache."""
    root = tmp_path / "root"
    for name in ("etc/ld.so.conf.d", LIBRARY_DIRECTORY, "usr/lib64", "opt/one", "usr/local/lib"):
        (root / name).mkdir(parents=True)
    for name in ("lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "etc/ld.so.conf").write_text("include /etc/ld.so.conf.d/*.conf\n")
    (root / "etc/ld.so.conf.d/libc.conf").write_text("# libc default configuration\n/usr/local/lib\n")
    (root / "etc/ld.so.conf.d/one.conf").write_text(f"/opt/one\n/opt/missing # none\n\n/lib/{TRIPLET}")
    (root / "etc/ld.so.cache").write_bytes(CACHE)
    age(root)
    return root


def age(root: Path) -> None:
    for directory, _, names in os.walk(root, topdown=False):
        for name in names:
            os.utime(f"{directory}/{name}", ns=(BEFORE, BEFORE), follow_symlinks=False)
        os.utime(directory, ns=(BEFORE, BEFORE))
    cache = root / "etc/ld.so.cache"
    if cache.is_file() and not cache.is_symlink():
        os.utime(cache, ns=(MADE, MADE))


def touch(path: Path, time: int) -> None:
    os.utime(path, ns=(time, time))


def reason(root: Path, *mounts: str) -> str:
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        before = len(os.listdir("/proc/self/fd"))
        found = image_cache.why_not_current(fd, TRIPLET, mounts)
        assert len(os.listdir("/proc/self/fd")) == before
        return found
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "name",
    [
        "etc/ld.so.conf",
        "etc/ld.so.conf.d",
        "etc/ld.so.conf.d/one.conf",
        "usr/lib",
        "usr/lib64",
        LIBRARY_DIRECTORY,
        "opt/one",
        "usr/local/lib",
    ],
)
def test_nothing_that_it_was_made_of_is_newer(name: str, root: Path) -> None:
    assert reason(root) == ""
    touch(root / name, MADE)
    assert reason(root) == "", "equal times are those of a reproducible image"
    touch(root / name, AFTER)
    assert reason(root).endswith(" is newer than /etc/ld.so.cache")


@pytest.mark.parametrize("walk", [False, True], ids=["openat2", "walk"])
def test_a_real_cache_is_current_until_a_library_is_added(root: Path, walk: bool) -> None:
    paths.use_walk(walk)
    try:
        run(["ldconfig", "-r", root])
        assert reason(root) == ""
        cache = (root / "etc/ld.so.cache").stat().st_mtime_ns
        (root / "opt/one/libnew.so.1").touch()
        touch(root / "opt/one", cache + 1)
        assert reason(root) == '"/opt/one" is newer than /etc/ld.so.cache'
    finally:
        paths.use_walk(False)


def test_what_is_not_searched_does_not_count(root: Path) -> None:
    (root / "opt/other").mkdir()
    (root / "etc/ld.so.conf.d/.hidden.conf").write_text("/opt/other\n")
    (root / "etc/ld.so.conf.d/off").write_text("/opt/other\n")
    (root / "usr/lib/python3").mkdir()
    age(root)
    for name in ("opt/other", "etc/ld.so.conf.d/off", "etc/ld.so.conf.d/.hidden.conf", "usr/lib/python3", "etc", "usr"):
        touch(root / name, AFTER)
    assert reason(root) == ""


def test_variants_for_newer_processors_count(root: Path) -> None:
    below = root / LIBRARY_DIRECTORY / "glibc-hwcaps/x86-64-v3"
    below.mkdir(parents=True)
    age(root)
    assert reason(root) == ""
    touch(below, AFTER)
    assert "glibc-hwcaps/x86-64-v3" in reason(root)
    age(root)
    for number in range(image_cache.MAX_HWCAPS):
        (below.parent / f"x{number}").mkdir()
    age(root)
    assert "names" in reason(root)


def test_an_image_without_a_configuration_has_the_default_directories(root: Path) -> None:
    shutil.rmtree(root / "etc/ld.so.conf.d")
    (root / "etc/ld.so.conf").unlink()
    assert reason(root) == ""
    touch(root / "usr/lib", AFTER)
    assert "newer" in reason(root)


@pytest.mark.parametrize(
    ("content", "known"),
    [
        (b"", False),
        (b"no cache", False),
        (CACHE, True),
        (CACHE[:-1], False),
        (OLD_MAGIC.ljust(12, b"\0") + struct.pack("<I", 1) + bytes(12) + bytes(4) + CACHE, True),
        (OLD_MAGIC.ljust(12, b"\0") + struct.pack("<I", 1) + bytes(12), False),
        (OLD_MAGIC.ljust(12, b"\0") + b"\xff\xff\xff\xff" + CACHE, False),
    ],
)
def test_only_a_known_format_can_be_merged(content: bytes, known: bool, root: Path) -> None:
    (root / "etc/ld.so.cache").write_bytes(content)
    age(root)
    assert (reason(root) == "") is known


def remove(path: Path) -> None:
    path.unlink()


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def link_out(path: Path) -> None:
    path.unlink()
    path.symlink_to("../../../../../../../../etc/ld.so.cache")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))


def large(path: Path) -> None:
    os.truncate(path, 1 << 30)


ODD = [directory, link, link_out, fifo, pytest.param(device, marks=pytest.mark.root), large]


@pytest.mark.parametrize("make", [remove, *ODD])
def test_a_cache_that_is_no_file_is_left_to_ldconfig(make: Callable[[Path], None], root: Path) -> None:
    make(root / "etc/ld.so.cache")
    age(root)
    assert reason(root)


@pytest.mark.parametrize("make", ODD)
@pytest.mark.parametrize("name", ["etc/ld.so.conf", "etc/ld.so.conf.d/one.conf"])
def test_a_configuration_that_is_no_file_is_left_to_ldconfig(
    make: Callable[[Path], None], name: str, root: Path
) -> None:
    """None of them is opened for reading: a FIFO would block, a device might act."""
    make(root / name)
    age(root)
    assert reason(root)


@pytest.mark.parametrize(
    "text",
    [
        "include /etc/ld.so.conf.d/*",
        "include /etc/ld.so.conf.d/one.conf",
        "include /etc/ld.so.conf.d/*.conf /opt/*.conf",
        "include",
        "hwcap 1 nosegneg",
        "relative/directory",
        "/usr/lib=libc6",
        "/with space",
        "/with\0nul",
        "/\udcff",
        "x" * (image_cache.MAX_CONF + 1),
        "\n".join(f"/{number}" for number in range(image_cache.MAX_DIRECTORIES)),
    ],
)
@pytest.mark.parametrize("name", ["etc/ld.so.conf", "etc/ld.so.conf.d/one.conf"])
def test_an_unusual_configuration_is_left_to_ldconfig(text: str, name: str, root: Path) -> None:
    (root / name).write_bytes(text.encode(errors="surrogateescape"))
    if name == "etc/ld.so.conf":
        (root / name).write_bytes((root / name).read_bytes() + b"\ninclude ld.so.conf.d/*.conf\n")
    age(root)
    said = reason(root)
    assert said
    assert said.isprintable()
    assert len(said) < 400


def test_an_include_counts_in_the_first_file_alone(root: Path) -> None:
    (root / "etc/ld.so.conf.d/one.conf").write_text("include ld.so.conf.d/*.conf\n")
    age(root)
    assert "has the line" in reason(root)


def test_a_directory_of_files_without_end_is_left_to_ldconfig(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside, "MAX_ENTRIES", 200)
    for number in range(300):
        (root / f"etc/ld.so.conf.d/{number}.txt").touch()
    age(root)
    assert "over 64 files" in reason(root)


@pytest.mark.parametrize("target", ["/../../../../usr/lib", "../../../../../../../usr/lib", "/proc/self/root/usr/lib"])
def test_a_searched_directory_that_leads_out_is_the_images_own(target: str, root: Path) -> None:
    (root.parent / "usr/lib").mkdir(parents=True)
    (root / "opt/one").rmdir()
    (root / "opt/one").symlink_to(target)
    age(root)
    touch(root.parent / "usr/lib", AFTER)
    assert reason(root) == ""


def test_links_that_lead_nowhere_count_as_missing(root: Path) -> None:
    (root / "opt/one").rmdir()
    (root / "opt/one").symlink_to("one")
    (root / "usr/lib64").rmdir()
    (root / "usr/lib64").symlink_to("/nonexistent")
    age(root)
    assert reason(root) == ""


@pytest.mark.parametrize(
    ("mount", "covers"),
    [
        ("/usr/local/lib", True),
        ("/usr/local", True),
        ("/usr", True),
        ("/", True),
        ("/opt/missing", True),
        (f"/lib/{TRIPLET}/libown.so.1", True),
        ("/lib/modules", True),
        ("/lib64", True),
        ("/through/lib", True),
        ("/etc", True),
        ("/etc/ld.so.conf.d/mine.conf", True),
        ("/etc/ld.so.cache", True),
        ("/etc/hosts", False),
        ("/etc/ld.so.conf.d.old", False),
        ("/opt", True),
        ("/opt/two", False),
        ("/data", False),
        ("/usr/share/x", False),
        ("/proc", False),
        ("/sys/fs/cgroup", False),
        ("/dev/shm", False),
        ("/var/run/secrets/kubernetes.io/serviceaccount", False),
        ("/\0", False),
        ("/" + "x" * 5000, False),
    ],
)
def test_a_mount_where_libraries_are_is_left_to_ldconfig(mount: str, covers: bool, root: Path) -> None:
    (root / "through").symlink_to("/usr/local")
    age(root)
    assert ("may have libraries" in reason(root, "/proc", mount)) is covers


def test_very_many_mounts_are_not_followed(root: Path) -> None:
    mounts = [f"/data/{number}" for number in range(image_cache.MAX_MOUNTS + 1)]
    assert reason(root, *mounts[1:]) == ""
    assert reason(root, *mounts) == "the container has over 64 mounts"
