"""Directories for a program's trusted state: made so that no other user can write there, and checked."""

import os

from ocigpu.system.files import why_replaceable, why_untrusted


def open_state_directory(path: str) -> tuple[int, str]:
    """Return a descriptor of a directory, and why users other than root and us could have written it, "" if none.

    It is made if missing, and closed to other readers.  Raises OSError, also if it is a link.
    """
    make_directory(path, 0o700)
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


def make_directory(path: str, mode: int) -> None:
    """Make a missing directory, and missing parents with mode 0755; the umask has no effect.

    One that exists keeps its mode.  Raises OSError.
    """
    try:
        os.mkdir(path, mode)
    except FileExistsError:  # or it is not a directory: its user gets that error
        return
    except FileNotFoundError:
        above = os.path.dirname(path)
        if above in ("", path):
            raise
        make_directory(above, 0o755)
        make_directory(path, mode)
        return
    os.chmod(path, mode)
