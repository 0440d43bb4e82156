"""The journal as a worker that was killed leaves it, and undoing that can be repeated."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from provision_lab import Tree, snapshot

from ocigpu.provision import journal, mounts
from ocigpu.provision.journal import Journal
from ocigpu.provision.operations import undo
from ocigpu.provision.operations.transaction import Supplies, Transaction
from ocigpu.system.paths import opened

Entry = dict[str, Any]


def test_entries_are_read_back_by_another_process() -> None:
    noted = Journal()
    pid = os.fork()
    if pid == 0:
        noted.record("mkdir", "/a\n\0ü")
        noted.record("link", "/b", target="x", old=["y", 1, 2], temp="t")
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    assert noted.read() == [
        {"do": "mkdir", "path": "/a\n\0ü"},
        {"do": "link", "path": "/b", "target": "x", "old": ["y", 1, 2], "temp": "t"},
    ]


def test_half_a_line_is_no_entry() -> None:
    """Its effect has not come: the writer was killed while it wrote."""
    noted = Journal()
    assert noted.read() == []
    noted.record("mkdir", "/a")
    end = noted.memory.find(b"\0")
    noted.memory[end : end + 8] = b'{"do": "'
    assert noted.read() == [{"do": "mkdir", "path": "/a"}]


def test_a_full_journal_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MEMORY", 4096)
    noted = Journal()
    noted.record("mkdir", "/" + "x" * 3000)
    with pytest.raises(OSError, match="the journal is full"):
        noted.record("mkdir", "/" + "x" * 1500)
    assert len(noted.entries) == 1


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").write_text("content")
    (tmp_path / "kept/link").symlink_to("old")
    return tmp_path


def undo_twice(entries: list[Entry], root: Path) -> Tree:
    """Undo, check that undoing again changes nothing, return the tree."""
    fd, backup_fd = os.open(root, os.O_PATH), os.memfd_create("backup")
    transaction = Transaction(fd, Journal(), Supplies(True, {}, backup_fd=backup_fd))
    try:
        assert undo(transaction, entries) == []
        tree = snapshot(root)
        assert undo(transaction, entries) == []
        assert snapshot(root) == tree
        return tree
    finally:
        os.close(fd)
        os.close(backup_fd)


@pytest.mark.parametrize("effects", [0, 1, 2, 3, 4, 5])
def test_undoing_copes_with_effects_that_never_came(effects: int, root: Path) -> None:
    before = snapshot(root)
    entries: list[Entry] = [
        {"do": "mkdir", "path": "/new"},
        {"do": "file", "path": "/new/stub"},
        {"do": "link", "path": "/new/link", "target": "stub", "old": None, "temp": ".t1"},
        {"do": "unlink", "path": "/kept/link", "old": ["old", os.getuid(), os.getgid()]},
        {"do": "link", "path": "/kept/link", "target": "stub", "old": None, "temp": ".t2"},
    ]
    deeds = [
        (root / "new").mkdir,
        (root / "new/stub").touch,
        lambda: (root / "new/link").symlink_to("stub"),
        (root / "kept/link").unlink,
        lambda: (root / "kept/link").symlink_to("stub"),
    ]
    for deed in deeds[:effects]:
        deed()
    assert undo_twice(entries[: effects + 1], root) == before


def test_a_link_is_put_back_from_every_state(root: Path) -> None:
    before = snapshot(root)
    entry = {
        "do": "link",
        "path": "/kept/link",
        "target": "new",
        "old": ["old", os.getuid(), os.getgid()],
        "temp": ".t",
    }
    assert undo_twice([entry], root) == before
    (root / "kept/.t").symlink_to("new")  # killed before the rename
    assert undo_twice([entry], root) == before
    (root / "kept/.t").symlink_to("new")
    os.rename(root / "kept/.t", root / "kept/link")
    assert undo_twice([entry], root) == before


def test_only_what_looks_like_ours_is_removed(root: Path) -> None:
    before = snapshot(root)
    entries: list[Entry] = [
        {"do": "file", "path": "/kept/file"},
        {"do": "file", "path": "/kept"},
        {"do": "mkdir", "path": "/kept/file"},
        {"do": "node", "path": "/kept/file", "rdev": 0},
        {"do": "link", "path": "/kept/link", "target": "other", "old": None, "temp": ".t"},
    ]
    assert undo_twice(entries, root) == before


def test_what_cannot_be_undone_is_told_and_the_rest_is_undone(root: Path) -> None:
    (root / "made").mkdir()
    entries: list[Entry] = [{"do": "mkdir", "path": "/made"}, {"do": "mkdir", "path": "/kept"}]
    fd = os.open(root, os.O_PATH)
    try:
        assert undo(Transaction(fd, Journal(), Supplies(True, {})), entries) == ["rmdir /kept: Directory not empty"]
    finally:
        os.close(fd)
    assert not (root / "made").exists()


def test_a_tmpfs_of_the_host_is_not_the_container_s(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shim undoes what it made in the host's mount namespace: links of the image could lead into that one."""
    if not os.path.ismount("/dev/shm"):
        pytest.skip("this machine has no tmpfs on /dev/shm")
    monkeypatch.chdir("/proc/self")
    fd, shm_fd = os.open(root, os.O_PATH), os.open("/dev/shm", os.O_PATH)
    try:
        transaction = Transaction(fd, Journal(), Supplies(True, {}))
        assert transaction.is_own(fd)
        assert not transaction.is_own(shm_fd)
    finally:
        os.close(fd)
        os.close(shm_fd)


def test_processes_that_begin_for_ever_do_not_hold_undoing_up(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who forks in a loop, on a machine with many cores, always has a new process to look at; what is made stays."""
    numbers = itertools.count(1 << 22)
    monkeypatch.setattr(mounts, "list_names", lambda _: [str(next(numbers))])
    with opened(os.open(root, os.O_PATH)) as fd:
        assert mounts.has_neighbours(fd, "/proc/self")
