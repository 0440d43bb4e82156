"""Locks between processes that a block holds (flock(2))."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ocigpu.system.files import lock


@contextmanager
def holding(fd: int, busy: Exception, seconds: float = 0.0, pause: float = 0.05) -> Iterator[None]:
    """Hold the lock of an open file and close it; -1: no place for a lock exists, and nothing is held.

    Raises ``busy`` when another process holds it for this long, OSError if the file system has no locks.
    """
    if fd < 0:
        yield
        return
    try:
        if not lock(fd, seconds, pause=pause):
            raise busy
        yield
    finally:
        os.close(fd)
