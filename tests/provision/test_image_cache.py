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
    for directory, below, names in os.walk(root, topdown=False):
        for name in (*below, *names):  # links to directories are in the former
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
        "\n".join(f"/{number}" for number in range(image_cache.MAX_DIRECTORIES + 1)),
        "/usr/lib\n" * (image_cache.MAX_DIRECTORIES + 1),
        "/" + "x" * (image_cache.MAX_PATH - 1),
        "/" + "\u00e9" * (image_cache.MAX_PATH // 2),
        "/x" * (image_cache.MAX_COMPONENTS + 1),
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
        ("/devel/lib", True),
        ("/dev/../usr/lib", True),
        ("/processes", False),
        ("/var/run/secrets/kubernetes.io/serviceaccount", False),
        ("/\0", False),
        ("/" + "x" * 5000, False),
    ],
)
def test_a_mount_where_libraries_are_is_left_to_ldconfig(mount: str, covers: bool, root: Path) -> None:
    (root / "through").symlink_to("/usr/local")
    (root / "etc/ld.so.conf.d/devel.conf").write_text("/devel/lib\n")
    age(root)
    assert ("may have libraries" in reason(root, "/proc", mount)) is covers


def test_very_many_mounts_are_not_followed(root: Path) -> None:
    mounts = [f"/data/{number}" for number in range(image_cache.MAX_MOUNTS + 1)]
    assert reason(root, *mounts[1:]) == ""
    assert reason(root, *mounts) == "the container has over 64 mounts"


def test_the_longest_line_is_read(root: Path) -> None:
    lines = ("/" + "x" * (image_cache.MAX_PATH - 2), "/x" * image_cache.MAX_COMPONENTS)
    (root / "etc/ld.so.conf.d/one.conf").write_text("\n".join(lines))
    age(root)
    assert reason(root) == ""


@pytest.mark.parametrize("link", ["usr/local/cuda", "etc/alternatives/cuda", "opt/cuda-12/lib64"])
def test_a_link_on_the_way_that_leads_elsewhere_now_counts(link: str, root: Path) -> None:
    """As in CUDA's images: only the link and the directory that it lies in are newer."""
    for name in ("etc/alternatives", "opt/cuda-12/lib", "opt/cuda-13/lib64"):
        (root / name).mkdir(parents=True)
    (root / "usr/local/cuda").symlink_to("/etc/alternatives/cuda")
    (root / "etc/alternatives/cuda").symlink_to("../../../opt/cuda-12")
    (root / "opt/cuda-12/lib64").symlink_to("lib")
    (root / "etc/ld.so.conf.d/cuda.conf").write_text("/usr/local/cuda/lib64\n")
    age(root)
    assert reason(root) == ""
    assert "may have libraries" in reason(root, "/opt/cuda-12/lib")
    os.utime(root / link, ns=(MADE, MADE), follow_symlinks=False)
    assert reason(root) == ""
    (root / link).unlink()
    (root / link).symlink_to("/opt/cuda-13")
    os.utime(root / link, ns=(AFTER, AFTER), follow_symlinks=False)
    assert reason(root) == f'"/{link}" is newer than /etc/ld.so.cache'


def test_variants_that_are_links_count_with_where_they_lead(root: Path) -> None:
    (root / "opt/variants").mkdir()
    (root / LIBRARY_DIRECTORY / "glibc-hwcaps").symlink_to("/opt/variants")
    age(root)
    assert reason(root) == ""
    assert "may have libraries" in reason(root, "/opt/variants")
    touch(root / "opt/variants", AFTER)
    assert "glibc-hwcaps" in reason(root)


def test_two_dots_after_a_link_are_those_of_its_target(root: Path) -> None:
    """ldconfig opens the line as it is."""
    (root / "opt/link").symlink_to("/usr/local/lib")
    (root / "usr/local/there").mkdir()
    (root / "etc/ld.so.conf.d/one.conf").write_text("/opt/link/../there\n")
    age(root)
    assert reason(root) == ""
    touch(root / "usr/local/there", AFTER)
    assert "newer" in reason(root)


def many_long_lines(root: Path) -> None:
    for number in range(8):
        (root / f"etc/ld.so.conf.d/{number}.conf").write_text(f"/{number}" + "/a" * 30_000)


def many_deep_lines(root: Path) -> None:
    for number in range(8):
        line = "/a" * (image_cache.MAX_COMPONENTS - 1)
        (root / f"etc/ld.so.conf.d/{number}.conf").write_text("\n".join(f"/{number}{line}{one}" for one in range(15)))


def long_links(root: Path) -> None:
    (root / "opt/long").symlink_to("x/" * 2000)
    (root / "etc/ld.so.conf.d/one.conf").write_text("/opt/long\n")


def chains_of_links(root: Path) -> None:
    for number in range(40):
        (root / f"opt/{number}").symlink_to("./" * 28 + f"../opt/{number + 1}")
    lines = (f"/opt/0/{number}" for number in range(100))
    (root / "etc/ld.so.conf.d/one.conf").write_text("\n".join(lines))


def links_that_grow(root: Path) -> None:
    (root / "opt/grow").symlink_to("grow/" + "x/" * 40)
    (root / "etc/ld.so.conf.d/one.conf").write_text("/opt/grow\n")


def many_variants(root: Path) -> None:
    for number in range(100):
        for name in range(image_cache.MAX_HWCAPS):
            (root / f"opt/{number}/glibc-hwcaps/{name}").mkdir(parents=True)
    (root / "etc/ld.so.conf.d/one.conf").write_text("\n".join(f"/opt/{number}" for number in range(100)))


def many_texts(root: Path) -> None:
    for number in range(8):
        (root / f"etc/ld.so.conf.d/{number}.conf").write_text("#\n" * 10_000)


@pytest.mark.parametrize(
    "build",
    [many_long_lines, many_deep_lines, long_links, chains_of_links, links_that_grow, many_variants, many_texts],
)
def test_what_an_image_can_multiply_is_counted(
    build: Callable[[Path], None], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look-up is an open_in_root, with a path of few components."""
    seen: list[str] = []
    original = inside.open_in_root

    def count(root_fd: int, path: str, *more: int) -> int:
        seen.append(path)
        return original(root_fd, path, *more)

    monkeypatch.setattr(inside, "open_in_root", count)
    build(root)
    age(root)
    assert any(word in reason(root, "/data") for word in ("too long", "too many", "over 64 KiB"))
    assert len(seen) <= image_cache.MAX_STEPS + 200
    assert max(path.count("/") for path in seen) <= image_cache.MAX_COMPONENTS
