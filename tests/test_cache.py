"""The cache directory: only what this user alone can have written counts, and nothing about it is ever an error."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from ocigpu.system import store as cache
from ocigpu.system.store import open_cache, prune_cache, read_cached, write_cached


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cache is: neither root's nor the user's real one."""
    monkeypatch.setattr(cache, "SYSTEM_DIRECTORY", str(tmp_path / "ocigpu"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "ocigpu"


@pytest.fixture
def directory(place: Path) -> Iterator[int]:
    fd = open_cache(create=True)
    yield fd
    os.close(fd)


def test_the_directory_is_made_for_this_user_alone(place: Path) -> None:
    assert open_cache() == -1
    assert not place.exists()
    for _ in range(2):
        fd = open_cache(create=True)
        assert os.path.samestat(os.fstat(fd), place.stat())
        assert not os.get_inheritable(fd)
        os.close(fd)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    os.close(open_cache())


def make_open_directory(place: Path) -> None:
    place.mkdir()
    place.chmod(0o770)


def make_link(place: Path) -> None:
    target = place.with_name("target")
    target.mkdir(0o700)
    place.symlink_to(target)


def make_file(place: Path) -> None:
    place.touch(0o600)


@pytest.mark.parametrize("make", [make_open_directory, make_link, make_file])
def test_a_directory_that_others_could_have_made_is_not_used(place: Path, make: object) -> None:
    assert callable(make)
    make(place)
    assert open_cache(create=True) == -1


def test_a_directory_that_others_may_only_read_is_closed_to_them(place: Path) -> None:
    place.mkdir()
    place.chmod(0o755)
    os.close(open_cache())
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


@pytest.mark.root
def test_a_directory_of_somebody_else_is_not_used(place: Path) -> None:
    place.mkdir(0o700)
    os.chown(place, 4321, 4321)
    assert open_cache(create=True) == -1


@pytest.mark.parametrize("value", [None, "", "relative", "/nonexistent", "/proc", "/a\0b"])
def test_users_without_a_run_directory_have_no_cache(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.setattr(cache, "in_initial_user_namespace", lambda: False)
    if value is None:
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    else:
        monkeypatch.setattr(os, "environ", {"XDG_RUNTIME_DIR": value})
    assert open_cache(create=True) == -1


def test_a_file_is_written_whole_for_this_user_alone(place: Path, directory: int) -> None:
    assert write_cached(directory, "a", b"one")
    assert write_cached(directory, "a", b"two\n" * 1000)
    assert read_cached(directory, "a") == b"two\n" * 1000
    assert os.listdir(place) == ["a"]
    assert stat.S_IMODE((place / "a").stat().st_mode) == 0o600


def test_what_a_killed_process_left_is_in_nobodys_way(place: Path, directory: int) -> None:
    (place / f".ocigpu-{os.getpid()}-0").symlink_to("/etc/passwd")
    (place / "a").symlink_to("/etc/passwd")
    assert write_cached(directory, "a", b"one")
    assert not (place / "a").is_symlink()
    assert sorted(os.listdir(place)) == [f".ocigpu-{os.getpid()}-0", "a"]


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o666])
def test_a_file_that_others_may_touch_is_not_read(place: Path, directory: int, mode: int) -> None:
    write_cached(directory, "a", b"one")
    (place / "a").chmod(mode)
    assert read_cached(directory, "a") == b""


@pytest.mark.root
def test_a_file_of_somebody_else_is_not_read(place: Path, directory: int) -> None:
    write_cached(directory, "a", b"one")
    os.chown(place / "a", 4321, 0)
    assert read_cached(directory, "a") == b""


def test_only_regular_files_of_reasonable_size_are_read(
    place: Path, directory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_cached(directory, "missing") == b""
    os.mkfifo(place / "fifo", 0o600)
    assert read_cached(directory, "fifo") == b""
    (place / "sub").mkdir(0o700)
    assert read_cached(directory, "sub") == b""
    (place / "real").touch(0o600)
    (place / "link").symlink_to("real")
    assert read_cached(directory, "link") == b""
    write_cached(directory, "large", b"12345")
    monkeypatch.setattr(cache, "MAX_BYTES", 4)
    assert read_cached(directory, "large") == b""


def test_what_cannot_be_written_is_not_there(place: Path, directory: int) -> None:
    (place / "a").mkdir(0o700)
    assert not write_cached(directory, "a", b"one")
    assert not write_cached(directory, "b/c", b"one")
    assert os.listdir(place) == ["a"]
    place.rename(place.with_name("gone"))
    (place.with_name("gone") / "a").rmdir()
    place.with_name("gone").rmdir()
    assert not write_cached(directory, "a", b"one")
    prune_cache(directory, "", (), 0)


def test_drafts_of_processes_that_are_gone_are_removed(place: Path, directory: int) -> None:
    gone = 1 << 22  # above the greatest number that a process can have: proc(5), pid_max
    stay = [f".ocigpu-{os.getpid()}-0", ".ocigpu-x-0", ".ocigpu-", f"a-1.{gone}"]
    for name in (f".ocigpu-{gone}-0", f".ocigpu-{gone}-1", *stay):
        (place / name).touch()
    (place / f".ocigpu-{gone}-2").mkdir()
    prune_cache(directory, "a-", (), 99)
    assert sorted(os.listdir(place)) == sorted([f".ocigpu-{gone}-2", *stay])


def test_files_that_nobody_wants_go_when_there_are_many(place: Path, directory: int) -> None:
    for name in ("x-1", "x-2", "x-3", "y-1"):
        write_cached(directory, name, b"")
    prune_cache(directory, "x-", {"x-1"}, 2)
    assert len(os.listdir(place)) == 4
    (place / "x-4").mkdir()
    prune_cache(directory, "x-", {"x-1"}, 2)
    assert sorted(os.listdir(place)) == ["x-1", "x-4", "y-1"]
