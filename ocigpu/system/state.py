"""Directories of what a program has to believe of itself: made so that nobody else writes there, and looked at."""

import os

from ocigpu.system.files import why_replaceable, why_untrusted


def open_state(path: str) -> tuple[int, str]:
    """Return a descriptor of a directory, and why others than root and we could have written it, "" for nobody.

    It is closed to other readers.  What is missing is made, whatever the umask: what is above it for root and us to
    write alone.  Raises OSError, also where it is a link.
    """
    _make(os.path.abspath(path), 0o700)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(fd)
        why = why_untrusted(status.st_uid, status.st_mode) or why_replaceable(path)
        if not why and status.st_mode & 0o077 and status.st_uid == os.geteuid():
            os.fchmod(fd, 0o700)
    except OSError:
        os.close(fd)
        raise
    return fd, why


def _make(path: str, mode: int) -> None:
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        return
    except FileNotFoundError:
        _make(os.path.dirname(path), 0o755)
        _make(path, mode)
