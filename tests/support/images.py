"""Container images as ``make image`` writes them: archives that both ``docker load`` and ``ctr images import`` read."""

import sys
from pathlib import Path

from support.process import run
from support.product import REPOSITORY


def write_image(archive: Path, rootfs: Path, name: str, command: list[str]) -> Path:
    """Write an image of one layer; returns the archive."""
    program = REPOSITORY / "packaging/kubernetes/archive_image.py"
    run([sys.executable, "-I", program, rootfs, name, archive, *(f"--command={word}" for word in command)])
    return archive
