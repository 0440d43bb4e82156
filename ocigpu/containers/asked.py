"""A forked child that looks at something of a container, and is killed when that takes too long.

A container decides what its file systems are: looking at a file of one in user space (FUSE) may never end.
"""

import json
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

from ocigpu.core.errors import OcigpuError

MAX_ANSWER = 16 << 20
SECONDS = 10.0


def ask_child(look: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """Return what ``look`` returns in a forked child, as JSON data.

    Raises OSError and OcigpuError as ``look`` does, TimeoutError when it takes longer than ``seconds``, and OSError
    without a number when the child was killed.  For a process with one thread.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            try:
                answer = {"found": look()}
            except OcigpuError as error:
                answer = {"code": error.code, "text": error.message, "hint": error.hint}
            except OSError as error:
                answer = {"errno": error.errno or 0, "text": f"{error.strerror or error}", "path": error.filename}
            with open(writer, "w", encoding="utf-8") as file:
                json.dump(answer, file)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    try:
        text = _read(reader, time.monotonic() + seconds)
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        _reap(pid)
    try:
        answer = json.loads(text)
    except ValueError as error:
        raise OSError("the process that looked was killed") from error
    if "found" in answer:
        return answer["found"]
    if "code" in answer:
        raise OcigpuError(answer["code"], answer["text"], answer["hint"])
    path = answer["path"] if isinstance(answer["path"], str) else None
    raise OSError(answer["errno"], answer["text"], path)


def _read(reader: int, deadline: float) -> bytes:
    text = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            raise TimeoutError("it took too long")
        chunk = os.read(reader, 1 << 16)
        text += chunk
        if not chunk or len(text) > MAX_ANSWER:
            return text


def _reap(pid: int) -> None:
    """Wait a little for a killed child; one that the kernel does not let go of is left to whoever outlives us."""
    for attempt in range(11):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.0005 * 2**attempt)
