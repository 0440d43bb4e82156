"""What shim and hook say: to log files and standard error, so that standard output stays the wrapped runtime's."""

import os
import stat
import sys
import time

from ocigpu import rawjson
from ocigpu.errors import OcigpuError, printable
from ocigpu.settings import why_untrusted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple
else:
    from ocigpu.record import NamedTuple

LEVELS = {"error": 0, "warning": 1, "info": 2, "debug": 3}


class Log(NamedTuple):
    """Where lines go: pairs of (path, format), format "text" or "json" (one object a line, as runc writes them)."""

    files: tuple[tuple[str, str], ...] = ()
    level: str = "info"

    def write(self, level: str, message: str) -> None:
        """Append one line to every file.

        A file that cannot be opened is skipped: a full or missing log must not stop a container, and the message also
        reaches standard error where it matters.  So is one that somebody else has put there: a link of either kind,
        or a file of another user.
        """
        if LEVELS[level] > LEVELS[self.level]:
            return
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        for path, form in self.files:
            if form == "json":
                line = rawjson.dump({"level": level, "msg": message, "time": now})
            else:
                line = f"time={now} level={level} msg={rawjson.dump(printable(message))}"
            _append(path, line + "\n")


def _append(path: str, line: str) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o644)
    except OSError:
        return
    try:
        status = os.fstat(fd)
        if why_untrusted(status.st_uid, 0) or (stat.S_ISREG(status.st_mode) and status.st_nlink > 1):
            return
        os.write(fd, line.encode("utf-8", "backslashreplace"))
    except OSError:
        return
    finally:
        os.close(fd)


def say(text: str) -> None:
    """Print on standard error, if there is one: a caller may have closed it, and print would take standard output."""
    if sys.stderr is not None:
        print(text, file=sys.stderr)


def report_failure(program: str, error: Exception, log: Log) -> int:
    """Show an error to the user and the log, in the form of errors.py; returns the exit status.

    What is no OcigpuError is a defect: one line too, unless OCIGPU_DEBUG asks for the traceback.
    """
    if not isinstance(error, OcigpuError):
        if os.environ.get("OCIGPU_DEBUG"):
            raise error
        error = OcigpuError("OCIGPU-INT-1", f"{type(error).__name__}: {error}")
    text = error.render(program)
    log.write("error", text.replace("\n", "; "))
    say(text)
    return error.exit_code
