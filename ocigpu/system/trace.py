"""Traces: a line of JSON for every step of a container's start, with its time and result.

Loaded only when ``OCIGPU_TRACE`` (in the environment of the shim) or the setting ``trace`` names a file; the hook gets
the file from the shim, or from its settings, and never from its environment.  ``ocigpu trace FILE`` shows the lines.

A line has:

    time       when the step began, UTC
    ns, took   the same by the monotonic clock (CLOCK_MONOTONIC), and for how long, in nanoseconds
    process    shim, hook, early (what the shim leaves for the hook) or worker; pid
    container  its id
    depth      in how many other steps of the same process it was taken
    action     what was done; path; reason and detail, where a plan has them
    result     "ok", an error code of ours, or the name of an errno; message with one that is not "ok"
"""

import errno
import os
import stat
import time

from ocigpu.core import rawjson
from ocigpu.core.errors import OcigpuError, printable
from ocigpu.system.files import open_log_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_TEXT = 300
"""Characters of a path, a reason or a message: a line has at most some 16 KiB, however an image names its files."""
MAX_FILE = 256 << 20
"""Bytes of a trace that is written on: one that was forgotten must not fill the disk."""


class Trace:
    """An open trace of one process.  ``problem``: why it no longer writes, "" while it does."""

    def __init__(self, fd: int, path: str, process: str, container: str) -> None:
        self.fd = fd
        self.path = path
        self.process = process
        self.container = container
        self.problem = ""
        self._depth = 0
        self._opened = time.monotonic_ns()

    def become(self, process: str) -> None:
        """Continue in a child under another name."""
        self.process, self._depth = process, 0

    def begin(self) -> int:
        """Begin a step; returns when (monotonic ns), for :meth:`end`."""
        self._depth += 1
        return time.monotonic_ns()

    def end(self, what: "Any", begin: int, error: BaseException | None) -> None:
        """Write a line about a step that began then and ends now; see :class:`ocigpu.system.log.step`."""
        self._depth -= 1
        self.write(what, begin, error)

    def write(self, what: "Any", begin: int = 0, error: BaseException | None = None) -> None:
        """Write a line: of a step that began at ``begin`` (monotonic ns) and ends now, or (0) of a moment."""
        if self.problem:
            return
        now = time.monotonic_ns()
        begin = begin or now
        wall = time.time_ns() - (now - begin)
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(wall // 10**9)) + f".{wall % 10**9 // 1000:06}Z",
            "ns": begin,
            "took": now - begin,
            "process": self.process,
            "pid": os.getpid(),
            "container": self.container,
            "depth": self._depth,
            **_describe(what),
            **_result(error),
        }
        data = rawjson.dump(line).encode() + b"\n"
        try:
            if os.write(self.fd, data) != len(data):
                self.problem = "the disk is full"
        except OSError as failure:
            self.problem = failure.strerror or "it cannot be written"

    def name(self, state: bytes) -> None:
        """Take the container's id from its OCI state, which is where a hook begins."""
        try:
            self.container = _text(rawjson.parse(state.decode())["id"])
        except (ValueError, RecursionError, KeyError, TypeError):  # the code that needs the state will report it
            self.container = ""
        if self.process == "hook":
            self.write(("begin", "", "called by the runtime"), self._opened)


def open_trace(path: str, process: str, container: str) -> Trace:
    """Return a trace that appends to a file; it is made if missing, for its owner alone.

    Raises OSError for the reasons of :func:`ocigpu.system.files.open_log_file`, and for a file that others could write,
    that is not regular, or that is larger than :data:`MAX_FILE`.
    """
    fd = open_log_file(path, 0o600, strict=True)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        if status.st_size > MAX_FILE:
            raise OSError(errno.EFBIG, f"larger than {MAX_FILE >> 20} MiB: move it away", path)
        if fd <= 2:
            raise OSError(errno.EBADF, "a standard stream is closed", path)
    except OSError:
        os.close(fd)
        raise
    return Trace(fd, path, process, _text(container))


def _text(value: object) -> str:
    return printable(str(value), MAX_TEXT)


def _describe(what: "Any") -> "dict[str, str]":
    """Return the fields of a step of a plan, or of (action, path, reason), of which the last may be missing."""
    if type(what) is tuple:
        action, path, reason = (*what, "", "")[:3]
        return {"action": action, "path": _text(path), "reason": _text(reason)}
    from ocigpu.core.actions import STEPS

    return {
        "action": STEPS[type(what)],
        "path": _text(
            getattr(what, "container_path", "") or (what.node.container_path if hasattr(what, "node") else "")
        ),
        "reason": _text(what.reason),
        "detail": _text(what.describe()),
    }


def _result(error: BaseException | None) -> "dict[str, str]":
    if error is None:
        return {"result": "ok"}
    if isinstance(error, OcigpuError):
        return {"result": error.code, "message": _text(error.message)}
    if isinstance(error, OSError) and error.errno:
        return {"result": errno.errorcode.get(error.errno, str(error.errno)), "message": _text(error)}
    return {"result": type(error).__name__, "message": _text(error)}
