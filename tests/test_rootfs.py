"""Links and the loader's cache in root directories that are out to break something; all of it is undone."""

import errno
import os
import platform
import resource
import stat
import struct
import subprocess
import sys
from binascii import crc32
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ocigpu.bundle import rootfs
from ocigpu.bundle.record import MAX_LEFT
from ocigpu.bundle.rootfs import MAX_LD_CACHE, NeedsHookError, RootDirectory, find_covers, resolve_in_root, resolver
from ocigpu.gpus.libraries.ldcache import HEADER, NEW_MAGIC
from ocigpu.gpus.libraries.loader_cache import ENTRY, FLAGS
from ocigpu.system import paths
from ocigpu.system.paths import make_directories, opened

LIBRARY_DIR = "/usr/lib64"
LINKS = [
    (f"{LIBRARY_DIR}/libcuda.so.1", "libcuda.so.550.163.01"),
    (f"{LIBRARY_DIR}/libcuda.so", "libcuda.so.1"),
    ("/usr/lib/xorg/modules/nvidia_drv.so", "../../nvidia_drv.so.550.163.01"),
]
LIBRARIES = [("libcuda.so.1", f"{LIBRARY_DIR}/libcuda.so.1", 64), ("libcuda.so", f"{LIBRARY_DIR}/libcuda.so", 64)]
_STRINGS = b"libc.so.6\0/usr/lib64/libc.so.6\0"
IMAGE_CACHE = (
    struct.pack("<20sIIB19x", NEW_MAGIC, 1, len(_STRINGS), 2)
    + struct.pack("<iIIIQ", FLAGS[platform.machine()][64], HEADER + ENTRY, HEADER + ENTRY + 10, 0, 0)
    + _STRINGS
)
SECRET = "of the host"

Tree = dict[str, tuple[Any, ...]]


def look(directory: Path) -> Tree:
    """Return name, type, mode, owner, and content or target, of everything in a directory."""
    found: Tree = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        content: object = ""
        if stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        elif stat.S_ISREG(status.st_mode) and status.st_size < 1 << 20:
            content = path.read_bytes()
        found[str(path.relative_to(directory))] = (oct(status.st_mode), status.st_uid, status.st_gid, content)
    return found


@pytest.fixture(params=["walk", "openat2"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """With and without openat2(2)."""
    paths.use_walk(request.param == "walk")
    yield
    paths.use_walk(False)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory of the host with everything that a link out of the root could hit."""
    directory = tmp_path / "outside"
    for name in ("etc", "usr/lib64", "usr/lib/xorg/modules", "lib64"):
        (directory / name).mkdir(parents=True)
    (directory / "etc/ld.so.cache").write_bytes(IMAGE_CACHE)
    (directory / "secret").write_text(SECRET)
    return directory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "root"
    for name in ("etc", "usr/lib64", "usr/lib"):
        (directory / name).mkdir(parents=True)
    (directory / "etc/ld.so.cache").write_bytes(IMAGE_CACHE)
    return directory


def open_root(root: Path) -> int:
    return os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def work(root: Path, undo: bool = False, simulated: str | None = None) -> str:
    """Make links and cache as a start in mode spec does; returns why it could not.  ``undo``: in any case.

    ``simulated``: root of a simulated host, which has the records of starts.
    """
    fd = open_root(root)
    directory = RootDirectory(fd, simulated)
    try:
        directory.make_links(LINKS)
        directory.extend_ld_cache(LIBRARIES)
        if undo:
            directory.undo()
    except (OSError, NeedsHookError) as error:
        directory.undo()
        return str(error)
    finally:
        directory.close()
        os.close(fd)
    return ""


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- what is made


def test_links_and_cache_are_made(root: Path) -> None:
    before = open_descriptors()
    assert work(root) == ""
    assert open_descriptors() == before
    for path, target in LINKS:
        assert os.readlink(f"{root}{path}") == target
    data = (root / "etc/ld.so.cache").read_bytes()
    assert b"/usr/lib64/libcuda.so.1\0" in data
    assert b"/usr/lib64/libc.so.6\0" in data
    assert not list(root.rglob(".ocigpu-*"))


def test_a_second_time_changes_nothing(root: Path) -> None:
    assert work(root) == ""
    before = look(root)
    assert work(root) == ""
    assert look(root) == before
    assert work(root, undo=True) == ""
    assert look(root) == before, "what was there before stays"


@pytest.mark.parametrize("with_cache", [True, False])
def test_a_start_that_fails_takes_nothing_from_one_that_found_it_made(root: Path, with_cache: bool) -> None:
    """The second one finds links, cache and files as it needs them, and its container is yet to be made."""
    if not with_cache:
        (root / "etc/ld.so.cache").unlink()
    files = [("/etc/nvidia/profile", 0o444, "{}\n", False), ("/etc/nvidia/other", 0o644, "x", True)]
    fd = open_root(root)
    first, second = RootDirectory(fd), RootDirectory(fd)
    for directory in (first, second):
        directory.make_links(LINKS)
        directory.write_files(files)
        directory.extend_ld_cache(LIBRARIES)
    made = look(root)
    first.undo()
    assert look(root) == made
    for directory in (first, second):
        directory.close()
    os.close(fd)


def test_what_has_long_been_there_is_not_made_anew(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert work(root) == ""
    paths_made = [root / "etc/ld.so.cache", root / "usr/lib64/libcuda.so.1"]
    inodes = [path.lstat().st_ino for path in paths_made]
    monkeypatch.setattr(rootfs, "YOUNG_NS", 0)
    assert work(root) == ""
    assert [path.lstat().st_ino for path in paths_made] == inodes


def test_an_image_without_any_directory_gets_them(tmp_path: Path) -> None:
    root = tmp_path / "empty"
    root.mkdir()
    assert work(root) == ""
    assert os.readlink(root / "usr/lib64/libcuda.so.1") == LINKS[0][1]
    assert stat.S_IMODE((root / "etc/ld.so.cache").stat().st_mode) == 0o644


def test_a_narrow_umask_does_not_hide_what_is_made(tmp_path: Path) -> None:
    root = tmp_path / "empty"
    root.mkdir()
    old = os.umask(0o077)
    try:
        assert work(root) == ""
    finally:
        os.umask(old)
    for name in ("etc", "usr", "usr/lib64", "usr/lib/xorg/modules"):
        assert stat.S_IMODE((root / name).stat().st_mode) == 0o755, name
    assert stat.S_IMODE((root / "etc/ld.so.cache").stat().st_mode) == 0o644


@pytest.mark.parametrize("mode", [0o644, 0o600, 0o444, 0o755])
def test_the_cache_keeps_its_mode(root: Path, mode: int) -> None:
    (root / "etc/ld.so.cache").chmod(mode)
    assert work(root) == ""
    assert stat.S_IMODE((root / "etc/ld.so.cache").stat().st_mode) == mode


@pytest.mark.root
def test_owners_are_those_of_the_directories(root: Path) -> None:
    """As the image's files have them, whoever that is on the host: in user namespaces it is root of the container."""
    for path, owner in (("usr", 5001), ("usr/lib64", 5002), ("usr/lib", 5003), ("etc", 5004)):
        os.chown(root / path, owner, owner + 1000)
    os.chown(root / "etc/ld.so.cache", 5005, 6005)
    (root / "usr/lib64/libcuda.so").symlink_to("elsewhere")
    os.lchown(root / "usr/lib64/libcuda.so", 5006, 6006)
    before = look(root)
    assert work(root, undo=True) == ""
    assert look(root) == before
    assert work(root) == ""
    owners = {path: (root / path).lstat().st_uid for path in look(root)}
    assert owners["usr/lib64/libcuda.so.1"] == owners["usr/lib64/libcuda.so"] == 5002
    assert owners["usr/lib/xorg"] == owners["usr/lib/xorg/modules"] == 5003
    assert owners["usr/lib/xorg/modules/nvidia_drv.so"] == 5003
    assert owners["etc/ld.so.cache"] == 5005
    (root / "etc/ld.so.cache").unlink()
    assert work(root) == ""
    status = (root / "etc/ld.so.cache").stat()
    assert (status.st_uid, status.st_gid) == (5004, 6004)


# --- links of images


@pytest.mark.parametrize(
    "target", ["libcuda.so.525", "/outside/libcuda.so", "libcuda.so", "../../../../etc/passwd", "x" * 200]
)
def test_a_link_of_the_image_is_replaced_and_put_back(root: Path, target: str) -> None:
    (root / "usr/lib64/libcuda.so").symlink_to(target)
    before = look(root)
    assert work(root, undo=True) == ""
    assert look(root) == before
    assert work(root) == ""
    assert os.readlink(root / "usr/lib64/libcuda.so") == "libcuda.so.1"


def make_file(path: Path) -> None:
    path.write_text("a real library")


def make_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o666)


@pytest.mark.parametrize("make", [make_file, Path.mkdir, os.mkfifo, make_socket])
def test_anything_but_a_link_stays_and_needs_the_hook(root: Path, make: Callable[[Path], None]) -> None:
    make(root / "usr/lib64/libcuda.so")
    before = look(root)
    assert "something other than a link at /usr/lib64/libcuda.so" in work(root)
    assert look(root) == before


# --- ways out


def replace(path: Path, target: str) -> None:
    """Put a link in the place of a directory, wherever that was."""
    if path.is_dir() and not path.is_symlink():
        for below in sorted(path.rglob("*"), reverse=True):
            below.rmdir() if below.is_dir() and not below.is_symlink() else below.unlink()
        path.rmdir()
    path.symlink_to(target)


PLACES = ["etc", "usr", "usr/lib", "usr/lib64", "usr/lib/xorg"]
WAYS_OUT = {
    "absolute": "{outside}/{place}",
    "relative": "../../../../../../../../../../../../../../{outside}/{place}",
    "up": "../../outside/{place}",
    "chain": "/hop1",
    "loop": "/loop1",
    "itself": "/{place}",
    "the root": "/",
    "above the root": "../../../../..",
    "procfs": "/proc/self/root/{outside}/{place}",
    "a descriptor": "/proc/self/fd/0",
    "nowhere": "/nowhere",
    "a file": "/file",
    "a fifo": "/fifo",
}


@pytest.mark.product(single=True)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("target", WAYS_OUT.values(), ids=WAYS_OUT)
def test_no_link_leads_out_of_the_root(root: Path, outside: Path, place: str, target: str) -> None:
    (root / "hop1").symlink_to("hop2")
    (root / "hop2").symlink_to(f"{outside}/{place}")
    (root / "loop1").symlink_to("loop2")
    (root / "loop2").symlink_to("loop1")
    (root / "file").write_text("x")
    os.mkfifo(root / "fifo")
    replace(root / place, target.format(outside=outside, place=place))
    parent, before, inside = look(root.parent), look(outside), look(root)
    work(root, undo=True)
    assert look(root) == inside
    found = work(root)
    assert look(outside) == before
    if found:
        assert look(root) == inside
    else:
        assert {path: entry for path, entry in look(root.parent).items() if not path.startswith("root/")} == {
            path: entry for path, entry in parent.items() if not path.startswith("root/")
        }


def test_etc_may_be_the_root(root: Path) -> None:
    replace(root / "etc", "/")
    assert work(root) == ""
    assert (root / "ld.so.cache").is_file()


def test_the_root_may_have_its_parts_elsewhere(root: Path) -> None:
    (root / "opt/real").mkdir(parents=True)
    replace(root / "usr/lib64", "/opt/link")
    (root / "opt/link").symlink_to("real")
    assert work(root) == ""
    assert os.readlink(root / "opt/real/libcuda.so.1") == LINKS[0][1]


@pytest.mark.parametrize("place", ["usr", "usr/lib64", "etc"])
def test_a_file_in_the_place_of_a_directory_needs_the_hook(root: Path, place: str) -> None:
    replace(root / place, "x")
    (root / place).unlink()
    (root / place).write_text("x")
    before = look(root)
    assert "Not a directory" in work(root)
    assert look(root) == before


RACER = """
import ctypes, os, random, sys, time
place, link = map(os.fsencode, sys.argv[1:])
exchange = ctypes.CDLL(None, use_errno=True).renameat2
print("ready", flush=True)
while all(exchange(-100, place, -100, link, 2) == 0 for _ in range(random.randrange(100))):
    time.sleep(random.random() * 0.002)
"""
"""Exchanges (RENAME_EXCHANGE) a directory and a link that leads out, for ever; with pauses in which a step may end."""


@pytest.mark.parametrize("place", ["usr/lib64", "usr", "etc"])
def test_who_renames_directories_meanwhile_gets_nothing_made_outside(
    root: Path, outside: Path, place: str, times: Callable[[int], int]
) -> None:
    before = look(outside)
    (root / "aside").symlink_to(outside / place)
    words = [sys.executable, "-I", "-S", "-c", RACER, root / place, root / "aside"]
    racer = subprocess.Popen(words, stdout=subprocess.PIPE)
    try:
        assert racer.stdout
        racer.stdout.readline()
        found = [work(root, undo=True) for _ in range(times(500))]
        while len(set(map(bool, found))) < 2 and len(found) < 50_000:  # until they have met, and have not
            found.append(work(root, undo=True))
        assert racer.poll() is None
    finally:
        racer.kill()
        racer.communicate()
    assert look(outside) == before
    assert "" in found
    assert any(found), "they met"


# --- caches of images


def host_file(cache: Path, outside: Path) -> None:
    cache.symlink_to(outside / "etc/ld.so.cache")


def relative_link(cache: Path, outside: Path) -> None:
    cache.symlink_to("../../outside/etc/ld.so.cache")


def huge(cache: Path, outside: Path) -> None:
    with cache.open("wb") as file:
        file.truncate(1 << 40)


def just_too_large(cache: Path, outside: Path) -> None:
    with cache.open("wb") as file:
        file.truncate(MAX_LD_CACHE + 1)


def sparse(cache: Path, outside: Path) -> None:
    with cache.open("wb") as file:
        file.truncate(MAX_LD_CACHE)


def garbage(cache: Path, outside: Path) -> None:
    cache.write_bytes(b"glibc-ld.so.cache1.1" + b"\xff" * 1000)


def text(cache: Path, outside: Path) -> None:
    cache.write_text("hello")


def fifo(cache: Path, outside: Path) -> None:
    os.mkfifo(cache)


def socket(cache: Path, outside: Path) -> None:
    os.mknod(cache, stat.S_IFSOCK | 0o666)


def directory(cache: Path, outside: Path) -> None:
    cache.mkdir()


def full_directory(cache: Path, outside: Path) -> None:
    (cache / "a").mkdir(parents=True)


def dangling(cache: Path, outside: Path) -> None:
    cache.symlink_to("nowhere")


CACHES = [
    host_file, relative_link, huge, just_too_large, sparse, garbage, text, fifo, socket, directory, full_directory,
    dangling,
]  # fmt: skip


@pytest.mark.parametrize("make", CACHES)
def test_a_cache_that_is_none_needs_the_hook(root: Path, outside: Path, make: Callable[[Path, Path], None]) -> None:
    (root / "etc/ld.so.cache").unlink()
    make(root / "etc/ld.so.cache", outside)
    before, host = look(root), look(outside)
    assert "/etc/ld.so.cache of the image" in work(root)
    assert look(root) == before
    assert look(outside) == host


@pytest.mark.root
@pytest.mark.parametrize("kind", [stat.S_IFCHR, stat.S_IFBLK], ids=["character", "block"])
def test_a_device_in_the_place_of_the_cache_is_not_opened(
    root: Path, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    """Opening a watchdog or a tape does something to the host."""
    cache = root / "etc/ld.so.cache"
    cache.unlink()
    os.mknod(cache, kind | 0o666, os.makedev(240, 0))
    opened: list[tuple[object, int]] = []
    real = os.open

    def spy(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        opened.append((path, flags))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", spy)
    assert "not a regular file" in work(root)
    assert [flags & os.O_PATH for path, flags in opened if path == "ld.so.cache"] == [os.O_PATH]
    assert not [path for path, _ in opened if str(path).startswith("/proc/self/fd/")]


@pytest.mark.parametrize("undo", [True, False])
def test_a_file_that_the_host_shares_with_the_image_stays_as_it_is(root: Path, outside: Path, undo: bool) -> None:
    """Written beside and renamed, never written in place."""
    cache = root / "etc/ld.so.cache"
    cache.unlink()
    os.link(outside / "etc/ld.so.cache", cache)
    host, inode = look(outside), (outside / "etc/ld.so.cache").stat().st_ino
    assert work(root, undo) == ""
    assert look(outside) == host
    assert (outside / "etc/ld.so.cache").stat().st_ino == inode
    assert cache.stat().st_ino != inode


def test_what_another_has_written_since_is_not_undone(root: Path) -> None:
    fd = open_root(root)
    work_in = RootDirectory(fd)
    work_in.make_links(LINKS)
    work_in.extend_ld_cache(LIBRARIES)
    (root / "etc/new").write_text("newer")
    (root / "etc/new").rename(root / "etc/ld.so.cache")
    (root / "usr/lib64/new").symlink_to("newer")
    (root / "usr/lib64/new").rename(root / "usr/lib64/libcuda.so")
    (root / "usr/lib/xorg/file").write_text("newer")
    work_in.undo()
    work_in.close()
    os.close(fd)
    assert (root / "etc/ld.so.cache").read_text() == "newer"
    assert os.readlink(root / "usr/lib64/libcuda.so") == "newer"
    assert (root / "usr/lib/xorg/file").read_text() == "newer"
    assert not (root / "usr/lib/xorg/modules").exists()
    assert not os.path.lexists(root / "usr/lib64/libcuda.so.1")


# --- every step may fail


STEPS = ("open", "mkdir", "symlink", "readlink", "rename", "chown", "fchown", "fchmod", "stat", "pwrite")


class Failing:
    """Lets the n-th step that changes or looks at something fail, or end the process (error 0); counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, error: int) -> None:
        self.count, self.number, self.error = 0, number, error
        for name in STEPS:
            monkeypatch.setattr(os, name, self.step(name, getattr(os, name)))

    def step(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.count += 1
            if self.count == self.number and not self.error:
                os._exit(0)
            if self.count == self.number:
                raise OSError(self.error, os.strerror(self.error), name)
            return real(*arguments, **named)

        return call


@pytest.mark.product(single=True)
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("with_cache", [True, False])
def test_undo_after_each_failing_step_leaves_everything_as_it_was(
    root: Path, monkeypatch: pytest.MonkeyPatch, with_cache: bool, error: int
) -> None:
    (root / "usr/lib64/libcuda.so").symlink_to("libcuda.so.525")
    if not with_cache:
        (root / "etc/ld.so.cache").unlink()
    before, descriptors = look(root), open_descriptors()
    with monkeypatch.context() as patch:
        counting = Failing(patch, 0, error)
        assert work(root) == ""
        steps = counting.count
    with monkeypatch.context() as patch:
        assert work(root) == ""  # again: everything is there
    clean(root, before)
    assert steps > 20
    for number in range(2, steps + 1):  # the first one opens the root itself
        with monkeypatch.context() as patch:
            Failing(patch, number, error)
            found = work(root)
        if found:
            assert look(root) == before, f"step {number} of {steps}: {found}"
        else:
            clean(root, before)
        assert open_descriptors() == descriptors, f"step {number} of {steps}: {found}"


@pytest.mark.product(single=True)
@pytest.mark.parametrize("with_cache", [True, False])
def test_what_a_start_that_was_killed_at_any_step_has_left_is_undone_by_the_next(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_cache: bool, share: Callable[..., list[int]]
) -> None:
    """SIGKILL, or the end of its time (os._exit): nobody of it is left to undo anything."""
    (root / "usr/lib64/libcuda.so").symlink_to("libcuda.so.525")
    if not with_cache:
        (root / "etc/ld.so.cache").unlink()
    host = tmp_path / "host"
    host.mkdir()
    before, left = look(root), 0
    for number in share(range(2, 200), 2, with_cache):
        pid = os.fork()
        if pid == 0:
            Failing(monkeypatch, number, 0)
            work(root, simulated=str(host))
            os._exit(1)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        left += bool(list(host.glob("run/ocigpu/undo-*")))
        assert work(root, undo=True, simulated=str(host)) == ""
        assert not list(host.glob("run/ocigpu/*"))
        if ended:
            break
        assert look(root) == before, f"step {number}"
    assert ended == 1, "a start has more steps than thought"
    assert left > 5


def test_what_a_killed_start_has_left_stays_where_another_start_has_made_it_anew(root: Path, tmp_path: Path) -> None:
    host = tmp_path / "host"
    host.mkdir()
    made_fd, told_fd = os.pipe()
    go_fd, say_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        killed = RootDirectory(open_root(root), str(host))
        killed.make_links(LINKS)
        killed.extend_ld_cache(LIBRARIES)
        os.write(told_fd, b"made")
        os.read(go_fd, 1)
        os._exit(0)
    os.read(made_fd, 4)
    assert work(root, simulated=str(host)) == ""
    os.write(say_fd, b"g")
    os.waitpid(pid, 0)
    assert list(host.glob("run/ocigpu/undo-*"))
    made = look(root)
    assert work(root, undo=True, simulated=str(host)) == ""
    assert look(root) == made
    assert not list(host.glob("run/ocigpu/undo-*"))
    for fd in (made_fd, told_fd, go_fd, say_fd):
        os.close(fd)


@pytest.mark.parametrize(
    "text", [b"", b"{}\n", b"[\n", b'{"do": "root", "path": "/", "dev": 1, "ino": 2}\n', b"\xff\n"]
)
def test_a_record_that_makes_no_sense_is_removed(root: Path, tmp_path: Path, text: bytes) -> None:
    host, gone = tmp_path / "host", 1 << 22
    (host / "run/ocigpu").mkdir(parents=True, mode=0o700)
    name = f"undo-{gone}-{crc32(os.fsencode(root.resolve())):08x}"
    (host / "run/ocigpu" / name).write_bytes(text)
    assert work(root, simulated=str(host)) == ""
    assert not list((host / "run/ocigpu").iterdir())
    assert os.readlink(root / "usr/lib64/libcuda.so.1") == LINKS[0][1]


def test_records_of_other_root_directories_stay_until_there_are_many(root: Path, tmp_path: Path) -> None:
    host, gone = tmp_path / "host", 1 << 22
    (host / "run/ocigpu").mkdir(parents=True, mode=0o700)
    for number in range(MAX_LEFT + 1):
        assert work(root, simulated=str(host)) == ""
        assert len(list((host / "run/ocigpu").iterdir())) == number
        (host / f"run/ocigpu/undo-{gone + number}-00000000").touch()
    assert work(root, simulated=str(host)) == ""
    assert not list((host / "run/ocigpu").iterdir())


def clean(root: Path, before: Tree) -> None:
    """Put a root directory of :func:`work` back by hand."""
    for path in sorted(root.rglob("*"), reverse=True):
        name = str(path.relative_to(root))
        if name not in before:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    for name, (_, _, _, content) in before.items():
        path = root / name
        if path.is_symlink():
            path.unlink()
            path.symlink_to(str(content))
        elif path.is_file():
            assert isinstance(content, bytes)
            path.write_bytes(content)
    assert look(root) == before


def test_a_cache_that_cannot_be_written_whole_is_not_written(root: Path) -> None:
    before = look(root)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        found = work(root)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in found
    assert look(root) == before


# --- where paths lead


@pytest.mark.parametrize(
    ("path", "leads_to"),
    [
        ("/", "/"),
        ("/usr/lib64", "/usr/lib64"),
        ("/lib", "/usr/lib"),
        ("/lib/missing/file", "/usr/lib/missing/file"),
        ("/var/run/x", "/run/x"),
        ("/up/etc", "/etc"),
        ("/absolute", "/etc"),
        ("/dangling", "/nowhere"),
        ("/dangling/x", "/nowhere/x"),
        ("/loop/x", "/loop/x"),
        ("/missing", "/missing"),
        ("/etc/ld.so.cache", "/etc/ld.so.cache"),
        ("/etc/ld.so.cache/x", "/etc/ld.so.cache/x"),
        ("relative", "/relative"),
    ],
)
def test_where_a_path_leads(root: Path, path: str, leads_to: str) -> None:
    (root / "run").mkdir()
    (root / "var").mkdir()
    for name, target in (
        ("lib", "usr/lib"), ("var/run", "/run"), ("up", "../../.."), ("absolute", "/etc"), ("dangling", "nowhere"),
        ("loop", "loop"),
    ):  # fmt: skip
        (root / name).symlink_to(target)
    fd = open_root(root)
    try:
        assert (resolve_in_root(fd, path) or "/") == leads_to
    finally:
        os.close(fd)


BIND: dict[str, Any] = {"type": "bind", "source": "/nowhere"}
COVERS: dict[str, dict[str, Any]] = {
    "/vol": BIND,
    "/vol/nested": BIND,
    "/tmp": {"type": "tmpfs"},
    "/run": {"type": "tmpfs", "options": ["tmpcopyup"]},
    "/proc": {"type": "proc"},
    "/usr/lib": BIND,
}


@pytest.mark.parametrize(
    ("path", "leads_to"),
    [
        ("/vol/in", "/vol/in"),  # the image's is a link
        ("/to-vol/x", "/vol/in/x"),
        ("/to-vol/../../etc", "/vol/in/../../etc"),
        ("/vol/nested/x", "/vol/nested/x"),
        ("/to-tmp/x", "/tmp/in/x"),  # nothing is there
        ("/to-tmp/../../vol/y", "/vol/y"),
        ("/to-run/x", "/etc/x"),  # as the image has it
        ("/to-proc/vol", "/proc/self/root/vol"),
        ("/lib/x", "/usr/lib/x"),
    ],
)
def test_where_a_path_leads_through_what_is_mounted(root: Path, path: str, leads_to: str) -> None:
    for name in ("vol", "tmp", "run", "proc"):
        (root / name).mkdir(exist_ok=True)
    for name, target in (
        ("vol/in", "/etc"), ("tmp/in", "/etc"), ("run/in", "/etc"), ("proc/self", "/etc"), ("lib", "usr/lib"),
        ("to-vol", "vol/in"), ("to-tmp", "/tmp/in"), ("to-run", "/run/in"), ("to-proc", "/proc/self/root"),
    ):  # fmt: skip
        (root / name).symlink_to(target)
    with opened(open_root(root)) as fd:
        assert resolve_in_root(fd, path, COVERS) == leads_to


def test_links_that_take_long_are_followed_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """38 links of 4 KB each: a start in mode cdi with 60 mounts there took 12 s."""
    (root / "a").mkdir()
    for number in range(38):
        (root / f"l{number}").symlink_to("/" + "a/../" * 800 + (f"l{number + 1}" if number < 37 else "etc"))
    opened_names: list[str] = []
    real = os.open

    def count(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        opened_names.append(path)
        return real(path, flags, mode, dir_fd=dir_fd)

    with opened(open_root(root)) as fd:
        monkeypatch.setattr(os, "open", count)
        assert resolve_in_root(fd, "/l0/x") == "/etc/x"
        once = len(opened_names)
        resolve = resolver(fd)
        assert [resolve(f"/l0/lib{number}") for number in range(60)] == [f"/etc/lib{number}" for number in range(60)]
    assert len(opened_names) < 3 * once


def test_volumes_whose_place_is_not_sure(root: Path, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    (volume / "there").mkdir(parents=True)
    (volume / "link").symlink_to("/usr/lib")
    (root / "vol").mkdir()
    (root / "by-proc").symlink_to("/proc/self/root/etc")
    outer = {"destination": "/vol", "type": "bind", "source": str(volume)}
    proc = {"destination": "/proc", "type": "proc"}
    with opened(open_root(root)) as fd:

        def unsure(*destinations: str) -> str:
            return find_covers(fd, [outer, proc, *({**BIND, "destination": one} for one in destinations)])[1]

        assert unsure() == unsure("/vol/there", "/vol/missing/x", "/data", "/proc/meminfo") == ""
        assert unsure("/vol/there", "/vol/link") == "/vol/link"
        assert unsure("/vol/link/x") == "/vol/link/x"
        assert unsure("/by-proc") == "/by-proc"
        assert unsure("/") == "/"


def test_a_path_that_is_too_long_is_not_looked_for(root: Path) -> None:
    """Part by part that would take minutes: configurations may be 32 MiB."""
    fd = open_root(root)
    try:
        assert resolve_in_root(fd, "/a" * 500_000) == "/a" * 500_000
    finally:
        os.close(fd)


def test_directories_are_made_below_the_root_only(root: Path, outside: Path) -> None:
    (root / "out").symlink_to(outside)
    fd = open_root(root)
    made: list[str] = []
    try:
        with pytest.raises(OSError, match="leads nowhere"):
            make_directories(fd, "/out/a/b", 0o755, made.append)
    finally:
        os.close(fd)
    assert made == []
