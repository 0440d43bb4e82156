"""Messages of shim and hook: to log files and standard error; standard output belongs to the wrapped runtime.

They also get the trace here (:mod:`ocigpu.system.trace`), if one is requested; otherwise nothing is loaded for it.
"""

import os
import sys
import time

from ocigpu.core import rawjson
from ocigpu.core.errors import OcigpuError, as_own_error, printable
from ocigpu.core.record import NamedTuple
from ocigpu.system.files import open_log_file
from ocigpu.system.signals import SECONDS, touched

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ocigpu.system.trace import Trace

LEVELS = {"error": 0, "warning": 1, "info": 2, "debug": 3}


def stamp(seconds: float | None = None) -> str:
    """Return a time since 1970, None for now, as RFC 3339 has it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


class Log(NamedTuple):
    """Where lines go: pairs of (path, format), format "text" or "json" (one object a line, as runc writes them)."""

    files: tuple[tuple[str, str], ...] = ()
    level: str = "info"

    def write(self, level: str, message: str) -> None:
        """Append one line to every file.

        A file that cannot be opened is skipped: a full or missing log must not stop a container, and the message also
        reaches standard error where it matters.  So is a file that another user may have put there: a link of either
        kind, or a file of another user.
        """
        if LEVELS[level] > LEVELS[self.level]:
            return
        now = stamp()
        for path, form in self.files:
            if form == "json":
                line = rawjson.dump({"level": level, "msg": message, "time": now})
            else:
                line = f"time={now} level={level} msg={rawjson.dump(printable(message))}"
            _append(path, line + "\n")


def _append(path: str, line: str) -> None:
    try:
        fd = open_log_file(path, 0o644)
    except OSError:
        return
    try:
        os.write(fd, line.encode("utf-8", "backslashreplace"))
    except OSError:
        return
    finally:
        os.close(fd)


current_trace: "Trace | None" = None
_step: "Any" = None
_on_step: "Callable[[], None] | None" = None


def begin_trace(path: str, process: str, container: str = "") -> str:
    """Write the steps of this process, and of its children, to a file from now on; returns why not, "" if so."""
    global current_trace  # noqa: PLW0603 - steps are taken in many modules, and a process has one trace
    from ocigpu.system.trace import open_trace

    try:
        current_trace = open_trace(path, process, container)
    except OSError as error:
        return f"this start is not traced: {printable(path)}: {error.strerror}"
    return ""


def get_trace() -> "Trace | None":
    """Return the trace of this process, if there is one."""
    return current_trace


def trace_problem() -> str:
    """Return a note on a trace that could not be written to its end, else ""."""
    return (
        f"the trace is incomplete: {current_trace.problem}"
        if current_trace is not None and current_trace.problem
        else ""
    )


class step:  # noqa: N801 - reads as a statement
    """What this process does in the block: :func:`current_step` tells it, and the trace gets a line about it.

    ``what``: an action of a plan, or a word that may have a path and a reason.
    """

    __slots__ = ("_before", "_began", "_what")

    def __init__(self, what: "Any", path: str = "", reason: str = "") -> None:
        self._what = (what, path, reason) if type(what) is str else what

    def __enter__(self) -> None:
        global _step
        self._before, _step = _step, self._what
        touched[0] = ""
        if _on_step is not None:
            _on_step()
        self._began = current_trace.begin() if current_trace is not None else 0

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        global _step  # noqa: PLW0603 - as above
        _step = self._before
        if current_trace is not None and self._began:
            current_trace.end(self._what, self._began, error)


def current_step() -> str:
    """Return what this process is about to do or has just begun, with its path, for a line of a message."""
    step = " ".join(filter(None, _step[:2])) if type(_step) is tuple else _step.describe() if _step else ""
    return printable(": ".join(filter(None, (step, touched[0]))), 300)


def follow_steps(function: "Callable[[], None]") -> None:
    """Have a function called at the beginning of every step of this process."""
    global _on_step  # noqa: PLW0603 - as above
    _on_step = function


def mark(action: str, path: str = "", reason: str = "") -> None:
    """Write a line about a moment to the trace."""
    if current_trace is not None:
        current_trace.write((action, path, reason))


def say(text: str) -> None:
    """Print on standard error, if there is one: a caller may have closed it, and print would take standard output."""
    if sys.stderr is not None:
        print(text, file=sys.stderr)


def no_answer() -> OcigpuError:
    """Return the error of a start whose deadline is over; it names the action that did not end."""
    return OcigpuError("OCIGPU-INT-5", f"no answer for {SECONDS:g} s: {current_step() or 'settings'}")


def report_failure(program: str, error: Exception, log: Log) -> int:
    """Show an error to the user and the log, in the form of errors.py; returns the exit status.

    An exception other than OcigpuError is a defect: it also gets one line, unless OCIGPU_DEBUG requests the traceback.
    """
    if not isinstance(error, OcigpuError):
        if os.environ.get("OCIGPU_DEBUG"):
            raise error
        error = as_own_error(error)
    if current_trace is not None:
        current_trace.write(("failed", program), error=error)
    text = error.render(program)
    log.write("error", text.replace("\n", "; "))
    say(text)
    return error.exit_code
