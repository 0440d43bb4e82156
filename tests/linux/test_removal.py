"""Trees that containers made, removed."""

import os
from pathlib import Path

import pytest

from ocigpu.kubernetes.dra.effects import remove_mps
from ocigpu.kubernetes.mps.shares import mps_directories
from ocigpu.system.removal import empty_directory, remove_directory


def make_deep(path: Path, depth: int) -> None:
    """Make directories in each other, as a container does that nobody limits: by descriptor."""
    path.mkdir()
    fd = os.open(path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(os.open("file", os.O_CREAT, dir_fd=fd))
    os.close(fd)


def test_a_tree_of_any_depth_goes(tmp_path: Path) -> None:
    make_deep(tmp_path / "deep", 5000)
    remove_directory(str(tmp_path / "deep"))
    assert list(tmp_path.iterdir()) == []


def test_what_a_container_has_made_in_its_pipe_directory_keeps_no_claim(tmp_path: Path) -> None:
    pipe = Path(mps_directories(str(tmp_path), "claims/u-0").pipe)
    pipe.parent.mkdir(parents=True)
    make_deep(pipe, 2000)
    remove_mps(str(tmp_path), "claims/u-0")
    assert not pipe.parent.exists()


def test_links_go_and_what_they_lead_to_stays(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").write_text("")
    (tmp_path / "top/inner").mkdir(parents=True)
    for place in ("top", "top/inner"):
        (tmp_path / place / "link").symlink_to(tmp_path / "kept")
        os.mkfifo(tmp_path / place / "fifo")
    empty_directory(str(tmp_path / "top"))
    assert list((tmp_path / "top").iterdir()) == []
    assert (tmp_path / "kept/file").exists()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    with pytest.raises(NotADirectoryError):
        remove_directory(str(tmp_path / "link"))
