"""Directories removed that containers could write to, however deep they made them."""

import os

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def empty_directory(path: str) -> None:
    """Remove the contents of a directory, without following links; raises OSError, also for a mount in it.

    Subdirectories are moved up first, so a tree a million levels deep needs no more descriptors, and no deeper calls,
    than one of two levels.
    """
    top = os.open(path, _DIRECTORY)
    try:
        left = os.listdir(top)
        while left:
            name = left.pop()
            if not _unlinked(name, top):
                left += _move_up(name, top)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)


def remove_directory(path: str) -> None:
    """Remove a directory with all that is in it; raises as :func:`empty_directory`."""
    empty_directory(path)
    os.rmdir(path)


def _move_up(name: str, top: int) -> list[str]:
    """Empty a directory of ``top``; returns the names of the entries moved to ``top``."""
    moved = []
    fd = os.open(name, _DIRECTORY, dir_fd=top)
    try:
        for inner in os.listdir(fd):
            if not _unlinked(inner, fd):
                moved.append(f".{os.urandom(16).hex()}")
                os.rename(inner, moved[-1], src_dir_fd=fd, dst_dir_fd=top)
    finally:
        os.close(fd)
    return moved


def _unlinked(name: str, dir_fd: int) -> bool:
    """Remove a name; returns whether it was no directory, which stays."""
    try:
        os.unlink(name, dir_fd=dir_fd)
    except IsADirectoryError:
        return False
    return True
