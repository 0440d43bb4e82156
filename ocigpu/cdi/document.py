"""Files of CDI specifications: bounded reading, JSON here, YAML in a forked child with limits and a deadline.

Neither the name of a file nor its contents decide alone: what begins with "{" is read as JSON, and as YAML when it is
not JSON; everything else is YAML.
"""

import json
import os
import select
import stat
import time

from ocigpu.cdi.values import MAX_BYTES, MAX_NODES
from ocigpu.core.config_json import parse_json
from ocigpu.core.errors import CdiError, SpecError, printable
from ocigpu.system import signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NamedTuple
else:
    from ocigpu.core.record import NamedTuple

DEADLINE = 10.0
"""Seconds that the reading of one YAML document may take; 10,000 devices take about one."""
MAX_ANSWER = 64 << 20


class FileState(NamedTuple):
    """What tells one state of a file from another; times are in nanoseconds, ``mode`` is st_mode."""

    dev: int
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int
    uid: int
    mode: int


def file_state(status: os.stat_result) -> FileState:
    """Return the state of a file from its stat(2) result, to be compared with that of an earlier reading."""
    return FileState(
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_uid,
        status.st_mode,
    )


def read_document(path: str) -> "tuple[Any, FileState]":
    """Return the data of the specification file at ``path``, and the file's state from before it was read.

    Symbolic links are followed.  Raises CdiError OCIGPU-CDI-2 for anything but a readable regular file of at most
    16 MiB with one document in it.  Must be called from a process with one thread: YAML is read by a forked child.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)  # never waits for a FIFO or device
    except FileNotFoundError as error:
        hint = "Check the path, or write it: ocigpu cdi generate --output FILE"
        raise _cannot_read(path, str(error.strerror), hint) from error
    except OSError as error:
        raise _cannot_read(path, str(error.strerror)) from error
    except ValueError as error:  # a NUL character in the path
        raise _cannot_read(path, "not a path") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _cannot_read(path, "not a regular file")
        with open(fd, "rb", closefd=False) as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _cannot_read(path, str(error.strerror)) from error
    finally:
        os.close(fd)
    return parse_document(text, path), file_state(status)


def parse_document(text: bytes, what: str) -> "Any":
    """Return the data of one JSON or YAML document; ``what`` names it in messages.

    Raises CdiError OCIGPU-CDI-2 for no data, several documents, duplicate keys, what is no JSON data, and beyond the
    limits of this module.  Must be called from a process with one thread.
    """
    if len(text) > MAX_BYTES:
        raise _cannot_read(what, f"larger than {MAX_BYTES >> 20} MiB")
    if not text.strip():
        raise _cannot_read(what, "no data")
    if text.count(b",") + text.count(b"[") + text.count(b"{") > MAX_NODES:  # cheap, and before anything is built
        raise _cannot_read(what, f"more than {MAX_NODES} values")
    if not text.lstrip().startswith(b"{"):
        return _parse_yaml(text, what)
    try:
        return parse_json(text, f"read {printable(what, 300)}", "OCIGPU-CDI-2")
    except SpecError as error:
        deep = isinstance(error.__cause__, RecursionError)
        problem = _cannot_read(what, "nested too deep") if deep else CdiError(error.code, error.message)
    try:
        return _parse_yaml(text, what)
    except CdiError:
        raise problem from None  # somebody who begins with "{" means JSON


def _cannot_read(what: str, cause: str, hint: str | None = None) -> CdiError:
    return CdiError("OCIGPU-CDI-2", f"read {printable(what, 300)}: {printable(cause, 400)}", hint)


def _parse_yaml(text: bytes, what: str) -> "Any":
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            from ocigpu.cdi.yaml_child import run_child  # only the child pays for it

            run_child(writer, text, DEADLINE)
        finally:
            os._exit(1)
    os.close(writer)
    try:
        answer, problem = _read_answer(reader)
    finally:
        os.close(reader)
        status = _end(pid)
    if problem:
        raise _cannot_read(what, problem)
    try:
        result = json.loads(answer)
    except (ValueError, RecursionError) as error:
        cause = f"was ended by signal {-status}" if status < 0 else "gave no answer"
        raise _cannot_read(what, f"the process that reads YAML {cause}") from error
    if "missing" in result:
        hint = "Install PyYAML for the Python that runs ocigpu, or write the specification as JSON."
        raise _cannot_read(what, f"it is YAML, and PyYAML cannot be imported: {result['missing']}", hint)
    if "error" in result:
        raise _cannot_read(what, result["error"])
    if result["data"] is None:
        raise _cannot_read(what, "no data")
    return result["data"]


def _read_answer(pipe: int) -> tuple[bytes, str]:
    """Return what the child writes until it ends, or a problem."""
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    deadline = time.monotonic() + DEADLINE
    parts: list[bytes] = []
    size = 0
    while size <= MAX_ANSWER:
        left = deadline - time.monotonic()
        if left <= 0 or not poller.poll(int(left * 1000) + 1):
            return b"", f"not understood within {DEADLINE:g} s: too large or too involved"
        part = os.read(pipe, 1 << 20)
        if not part:
            return b"".join(parts), ""
        parts.append(part)
        size += len(part)
    return b"", f"more than {MAX_ANSWER >> 20} MiB of data"


def _end(pid: int) -> int:
    """End the child and return its exit status: minus the signal that ended it before we did."""
    try:
        os.kill(pid, signals.SIGKILL)  # for one that is ending already this changes nothing
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except (ChildProcessError, ProcessLookupError):  # SIGCHLD is ignored in the caller: the kernel reaps
        return 0
