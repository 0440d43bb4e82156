"""Directories that stand for the host and for an image."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from provision_lab import make_host, make_rootfs
from support import machine


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return make_host(tmp_path / "host")


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    return make_rootfs(tmp_path / "rootfs")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory that ordinary users may enter."""
    path = Path(f"/tmp/{machine.NAME}-{tmp_path.name}")
    path.mkdir()
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)
