"""Locks between processes that a block holds (flock(2))."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ocigpu.system.files import lock


@contextmanager
def holding(fd: int, busy: Exception, seconds: float = 0.0, pause: float = 0.05) -> Iterator[None]:
    """Hold the lock of an open file and close it; -1: there is no place for one, and nothing is held.

    Raises ``busy`` when somebody else has it for so long, OSError where a file system has no locks.
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
