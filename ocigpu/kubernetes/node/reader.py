"""The node, read again and again by a process of its own with one thread.

Asking NVML forks, which a process with gRPC's threads must not; and a read that hangs in the kernel hangs that process,
never the plugin.  It answers one request after the other, and ends with the plugin.  It is our code with our rights: so
requests and answers are pickled.
"""

import binascii
import contextlib
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ocigpu.core.errors import as_own_error
from ocigpu.system.module_process import ModuleProcess

DEADLINE = 90.0
"""Seconds for one reading: NVML is asked up to four times, each time with a deadline of its own."""


def answer_requests(read: Callable[[Any], Any], failed: Callable[[str], Any]) -> None:
    """Answer requests on standard input by ``read``, by ``failed`` with what went wrong, until it is closed."""
    with contextlib.suppress(BrokenPipeError), os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # printed text is not an answer
        for line in sys.stdin.buffer:
            try:
                answer = read(pickle.loads(binascii.a2b_base64(line)))  # noqa: S301 - of our parent
            except Exception as error:  # noqa: BLE001 - also a defect: it is reported, and the next reading may work
                answer = failed(as_own_error(error).message)
            answers.write(_pack(answer) + b"\n")
            answers.flush()


def _pack(document: Any) -> bytes:
    return binascii.b2a_base64(pickle.dumps(document), newline=False)


A = TypeVar("A")


class ChildReader(Generic[A]):
    """The parent's side: at most one request is under way; nothing here waits for the child.

    ``module``: of the child's ``main``; ``failed`` makes an answer of what went wrong.
    """

    def __init__(self, module: str, failed: Callable[[str], A]) -> None:
        self._module, self._failed = module, failed
        self._process = ModuleProcess()
        self.fileno = self._process.fileno
        """Returns what becomes readable with an answer, -1 while there is no child."""
        self._asked: float | None = None

    @property
    def busy(self) -> bool:
        """Whether an answer is awaited."""
        return self._asked is not None

    def ask(self, request: Any, now: float) -> None:
        """Request a reading; raises OSError when no process can be started."""
        if self._process.child is None:
            self._process.start(self._module)
        self._asked = now
        self._process.send(_pack(request))

    def answer(self, now: float) -> A | None:
        """Return the answer if it has arrived; the next request replaces a child that ended or is late.

        The end of a child is always reported.
        """
        if self._process.child is None:
            return None
        lines, ended = self._process.read()
        if lines:
            self._asked = None
            answer: A = pickle.loads(binascii.a2b_base64(lines[-1]))  # noqa: S301 - of our child
            return answer
        if ended:  # also without a request: the end of a stream would wake the caller again and again
            return self._failed(f"the process that reads the host ended (status {self.close()})")
        if self._asked is not None and now - self._asked > DEADLINE:
            self.close()
            return self._failed(f"the host could not be read within {DEADLINE:g} s")
        return None

    def close(self) -> int | None:
        """End the child and return its status; one that is stuck in the kernel is left to init."""
        self._asked = None
        return self._process.close()
