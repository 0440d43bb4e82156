"""Log files, opened so that nobody else can lead them elsewhere."""

import errno
import os
import stat

from ocigpu.system.files import why_untrusted


def open_log_file(path: str, mode: int, strict: bool = False) -> int:
    """Return a descriptor that appends to a file, made with ``mode`` if missing.

    Raises OSError, and so for what somebody else has put there: a link of either kind, a file of another user, and if
    ``strict`` one that others can write.
    """
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    try:
        status = os.fstat(fd)
        if cause := why_untrusted(status.st_uid, status.st_mode if strict else 0):
            raise OSError(errno.EACCES, cause, path)
        if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            raise OSError(errno.EMLINK, "it has another name", path)
    except OSError:
        os.close(fd)
        raise
    return fd
