"""Paths below a hostile root: the kernel's resolution and our own walk, held to the same answers."""

import ctypes
import errno
import itertools
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ocigpu.system import libc, paths

BOTH_WAYS = pytest.mark.parametrize("walk", [False, True], ids=["openat2", "walk"])


def build(tmp: Path) -> Path:
    """Make a root full of links that want out, next to a marker they must not reach."""
    root = tmp / "root"
    (root / "usr/lib/deep").mkdir(parents=True)
    (root / "usr/lib/file").write_text("inside")
    (root / "etc").mkdir()
    (tmp / "outside").mkdir()
    (tmp / "outside/marker").write_text("host")
    links = {
        "lib": "usr/lib",
        "absolute": "/usr/lib",
        "host": str(tmp / "outside"),
        "up": "../../../../../../..",
        "relative-host": "../outside",
        "usr/lib/deep/back": "../../lib/file",
        "dangling": "/nowhere",
        "loop": "loop",
        "chain0": "usr/lib/file",
        "to-file": "usr/lib/file",
        "slash": "usr/lib/",
    }
    links |= {f"chain{number}": f"chain{number - 1}" for number in range(1, 42)}
    for name, target in links.items():
        (root / name).symlink_to(target)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return build(tmp_path)


@pytest.fixture
def root_fd(root: Path) -> Iterator[int]:
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def opened(root_fd: int, path: str, flags: int, walk: bool) -> tuple[int, int] | str:
    """Return (inode, kind) of what a path leads to, or the error's name."""
    try:
        fd = paths.open_in_root(root_fd, path, flags, force_fallback=walk)
    except OSError as error:
        return type(error).__name__ + f" {error.errno}"
    try:
        status = os.fstat(fd)
        return status.st_ino, stat.S_IFMT(status.st_mode)
    finally:
        os.close(fd)


CASES = {
    "plain": ("/usr/lib/file", "usr/lib/file"),
    "no leading slash": ("usr/lib/file", "usr/lib/file"),
    "relative link": ("/lib/file", "usr/lib/file"),
    "absolute link starts at the root": ("/absolute/file", "usr/lib/file"),
    "dotdot stops at the root": ("/../../usr/lib/file", "usr/lib/file"),
    "link upwards stops at the root": ("/up/usr/lib/file", "usr/lib/file"),
    "dotdot inside": ("/usr/lib/deep/../file", "usr/lib/file"),
    "link back": ("/usr/lib/deep/back", "usr/lib/file"),
    "40 links": ("/chain39", "usr/lib/file"),
    "the root": ("/", "."),
    "the root by dotdot": ("/..", "."),
    "double slashes and dots": ("//usr/./lib//file", "usr/lib/file"),
    "link with a final slash": ("/slash", "usr/lib"),
}


@BOTH_WAYS
@pytest.mark.parametrize("path", list(CASES))
def test_a_path_leads_where_the_root_says(path: str, walk: bool, root: Path, root_fd: int) -> None:
    asked, expected = CASES[path]
    assert opened(root_fd, asked, os.O_PATH, walk) == (
        (root / expected).stat().st_ino,
        (root / expected).stat().st_mode & 0o170000,
    )


REFUSED = {
    "a host path": ("/host/marker", os.O_PATH, "FileNotFoundError 2"),
    "a relative way out": ("/relative-host/marker", os.O_PATH, "FileNotFoundError 2"),
    "dangling": ("/dangling", os.O_PATH, "FileNotFoundError 2"),
    "a loop": ("/loop", os.O_PATH, "OSError 40"),
    "41 links": ("/chain41", os.O_PATH, "OSError 40"),
    "a file as directory": ("/usr/lib/file/x", os.O_PATH, "NotADirectoryError 20"),
    "a file with a slash": ("/usr/lib/file/", os.O_PATH, "NotADirectoryError 20"),
    "a link to a file with a slash": ("/to-file/", os.O_PATH, "NotADirectoryError 20"),
    "dotdot of a file": ("/usr/lib/file/..", os.O_PATH, "NotADirectoryError 20"),
    "a file where a directory is meant": ("/usr/lib/file", os.O_PATH | os.O_DIRECTORY, "NotADirectoryError 20"),
    "an existing file anew": ("/usr/lib/file", os.O_WRONLY | os.O_CREAT | os.O_EXCL, "FileExistsError 17"),
    "a link anew": ("/dangling", os.O_WRONLY | os.O_CREAT | os.O_EXCL, "FileExistsError 17"),
    "reading a link": ("/to-file", os.O_RDONLY | os.O_NOFOLLOW, "OSError 40"),
    "nothing": ("", os.O_PATH, "FileNotFoundError 2"),
    "too long": ("/" + "x/" * 2100, os.O_PATH, "OSError 36"),
}


@BOTH_WAYS
@pytest.mark.parametrize("case", list(REFUSED))
def test_a_path_that_leads_nowhere_is_refused(case: str, walk: bool, root_fd: int) -> None:
    path, flags, expected = REFUSED[case]
    assert opened(root_fd, path, flags, walk) == expected


@BOTH_WAYS
@pytest.mark.parametrize("path", ["/usr\0/lib", "/usr/lib\0", "/\ud800", "/" + "a" * 5000], ids=ascii)
def test_what_is_no_path_is_refused_with_a_number(path: str, walk: bool, root_fd: int) -> None:
    with pytest.raises(OSError, match=r"Invalid argument|File name too long") as caught:
        paths.open_in_root(root_fd, path, os.O_PATH, force_fallback=walk)
    assert caught.value.errno in (errno.EINVAL, errno.ENAMETOOLONG)


@BOTH_WAYS
def test_a_link_itself_can_be_opened(walk: bool, root: Path, root_fd: int) -> None:
    found = opened(root_fd, "/lib", os.O_PATH | os.O_NOFOLLOW, walk)
    assert found == ((root / "lib").lstat().st_ino, stat.S_IFLNK)


@BOTH_WAYS
def test_a_file_is_made_and_read(walk: bool, root: Path, root_fd: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    fd = paths.open_in_root(root_fd, "/absolute/new", flags, 0o640, force_fallback=walk)
    os.write(fd, b"x")
    assert not os.get_inheritable(fd)
    os.close(fd)
    assert (root / "usr/lib/new").read_text() == "x"
    fd = paths.open_in_root(root_fd, "/lib/new", os.O_RDONLY, force_fallback=walk)
    assert os.read(fd, 10) == b"x"
    os.close(fd)


@BOTH_WAYS
def test_links_of_procfs_do_not_lead_out(walk: bool, tmp_path: Path) -> None:
    fd = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    try:
        with pytest.raises(OSError):  # the kernel refuses the jump, the walk finds no /tmp/... in /proc
            paths.open_in_root(fd, f"/{os.getpid()}/root{tmp_path}", os.O_PATH, force_fallback=walk)
    finally:
        os.close(fd)


def test_no_descriptor_stays_open(root_fd: int) -> None:
    before = os.listdir("/proc/self/fd")
    for path, flags, _ in REFUSED.values():
        opened(root_fd, path, flags, True)
    for path, _ in CASES.values():
        opened(root_fd, path, os.O_PATH, True)
    assert os.listdir("/proc/self/fd") == before


def test_the_walk_takes_over_where_openat2_is_unknown(root_fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []

    def unknown(*words: object) -> int:
        tried.append(words)
        raise OSError(1, "Operation not permitted")  # what filters of system calls answer

    monkeypatch.setattr(libc, "openat2", unknown)
    paths.use_walk(False)
    try:
        for _ in range(2):
            os.close(paths.open_in_root(root_fd, "/absolute/file", os.O_PATH))
    finally:
        paths.use_walk(False)  # what this has found does not count for others
    assert len(tried) == 1


NAMES = st.sampled_from(
    ["usr", "lib", "file", "deep", "back", "up", "absolute", "host", "..", ".", "", "slash", "etc", "chain3"]
)


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(NAMES, max_size=7), flags=st.sampled_from([0, os.O_DIRECTORY, os.O_NOFOLLOW]))
def test_the_walk_answers_as_the_kernel_does(
    parts: list[str], flags: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = SHARED.get(tmp_path_factory)
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        path = "/" + "/".join(parts)
        assert opened(fd, path, os.O_PATH | flags, True) == opened(fd, path, os.O_PATH | flags, False)
    finally:
        os.close(fd)


class SHARED:
    """One tree for all examples, which change nothing."""

    root: Path | None = None

    @classmethod
    def get(cls, factory: pytest.TempPathFactory) -> Path:
        if cls.root is None:
            cls.root = build(factory.mktemp("walk"))
        return cls.root


@BOTH_WAYS
@pytest.mark.parametrize(
    ("path", "made", "at"),
    [
        ("/usr/lib/deep", [], "usr/lib/deep"),
        ("/usr/lib/a/b", ["/usr/lib/a", "/usr/lib/a/b"], "usr/lib/a/b"),
        ("/lib/c", ["/lib/c"], "usr/lib/c"),
        ("/absolute/d/e", ["/absolute/d", "/absolute/d/e"], "usr/lib/d/e"),
        ("/", [], "."),
    ],
)
def test_missing_directories_are_made_inside(
    path: str, made: list[str], at: str, walk: bool, root: Path, root_fd: int
) -> None:
    seen: list[tuple[str, bool]] = []

    def on_create(path: str) -> None:
        seen.append((path, os.path.lexists(f"{root}{path}")))

    old = os.umask(0)
    try:
        fd = paths.make_directories(root_fd, path, 0o751, on_create, force_fallback=walk)
    finally:
        os.umask(old)
    assert os.fstat(fd).st_ino == (root / at).stat().st_ino
    os.close(fd)
    assert seen == [(name, False) for name in made]
    if made:
        assert (root / at).stat().st_mode & 0o777 == 0o751


@BOTH_WAYS
@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/dangling/x", FileNotFoundError),
        ("/host/x", FileNotFoundError),
        ("/usr/lib/file/x", NotADirectoryError),
        ("/loop/x", OSError),
    ],
)
def test_directories_are_not_made_through_broken_links(
    path: str, error: type[OSError], walk: bool, root: Path, root_fd: int
) -> None:
    before = sorted(os.walk(root.parent))
    with pytest.raises(error):
        paths.make_directories(root_fd, path, 0o755, lambda _: None, force_fallback=walk)
    assert sorted(os.walk(root.parent)) == before


@pytest.mark.parametrize("path", ["relative", "/a/../b", "/"])
def test_a_path_of_a_plan_is_plain(path: str) -> None:
    with pytest.raises(ValueError, match="not a path of a plan"):
        paths.split(path)


@BOTH_WAYS
def test_a_directory_that_is_exchanged_for_a_link_all_the_time_leads_nowhere_else(
    walk: bool, root: Path, root_fd: int
) -> None:
    """Somebody who shares a volume swaps a directory and a link to the host while files are made below it."""
    (root / "race").mkdir()
    (root / "swap").symlink_to(root.parent / "outside")
    stop = threading.Event()
    thread = threading.Thread(target=exchange, args=(root / "race", root / "swap", stop.is_set))
    thread.start()
    made = 0
    try:
        deadline = time.monotonic() + 60
        for number in itertools.count():
            if number >= 1500 and (made or time.monotonic() > deadline):  # a busy machine may show the link for long
                break
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                os.close(paths.open_in_root(root_fd, f"/race/{number}", flags, 0o600, force_fallback=walk))
                made += 1
            except OSError:
                continue
    finally:
        stop.set()
        thread.join()
    assert made
    assert os.listdir(root.parent / "outside") == ["marker"]


def exchange(one: Path, other: Path, stopped: Callable[[], bool]) -> None:
    """Exchange two names in a loop: renameat2(2) with RENAME_EXCHANGE."""
    renameat2 = ctypes.CDLL(None).renameat2
    while not stopped():
        renameat2(libc.AT_FDCWD, os.fsencode(one), libc.AT_FDCWD, os.fsencode(other), 2)
