"""The node, read again and again by a process of its own with one thread.

Asking NVML forks, which a process with gRPC's threads must not; and a read that hangs in the kernel hangs that process,
never the plugin.  It is started without a fork, answers one request after the other, and ends with the plugin.
"""

import select
import socket
import subprocess
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from ocigpu.core.errors import as_own_error
from ocigpu.gpus.nvidia.nvml_process import command
from ocigpu.system.programs import end_program

DEADLINE = 90.0
"""Seconds for one reading: NVML is asked up to four times, each time with a deadline of its own."""


def answer_requests(descriptor: str, read: Callable[[Any], Any], failed: Callable[[str], Any]) -> None:
    """Answer requests on a connected socket by ``read``, by ``failed`` with what went wrong, until it is closed."""
    connection = Connection(int(descriptor))
    while True:
        try:
            request = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            answer = read(request)
        except Exception as error:  # noqa: BLE001 - also a defect: it is reported, and the next reading may work
            answer = failed(as_own_error(error).message)
        try:
            connection.send(answer)
        except ConnectionError:
            return


A = TypeVar("A")


class ChildReader(Generic[A]):
    """The parent's side: at most one request is under way; nothing here waits for the child.

    ``module``: of the child's ``main``; ``failed`` makes an answer of what went wrong.
    """

    def __init__(self, module: str, failed: Callable[[str], A]) -> None:
        self._module, self._failed = module, failed
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._asked: float | None = None

    @property
    def busy(self) -> bool:
        """Whether an answer is awaited."""
        return self._asked is not None

    def fileno(self) -> int:
        """Return what becomes readable with an answer, -1 while there is no child."""
        return self._connection.fileno() if self._connection else -1

    def ask(self, request: Any, now: float) -> None:
        """Ask for a reading; raises OSError when no process can be started."""
        if self._connection is None:
            self._start()
        assert self._connection is not None
        self._asked = now
        try:
            self._connection.send(request)
        except ConnectionError:  # the next look finds the end of the stream
            return

    def answer(self, now: float) -> A | None:
        """Return the answer when there is one; a child that ended or is late is replaced with the next request.

        A child that ended is told of in any case.
        """
        if self._connection is None:
            return None
        if select.select([self._connection], [], [], 0)[0]:
            try:
                reading: A = self._connection.recv()
            except (EOFError, ConnectionError):
                status = self._child.poll() if self._child else None
                self.close()  # also while nothing is asked: the end of a stream would wake the caller again and again
                return self._failed(f"the process that reads the host ended (status {status})")
            self._asked = None
            return reading
        if self._asked is not None and now - self._asked > DEADLINE:
            self.close()
            return self._failed(f"the host could not be read within {DEADLINE:g} s")
        return None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._child = subprocess.Popen(
                    command(self._module, str(theirs.fileno())),
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    process_group=0,
                )
            except OSError:
                ours.close()
                raise
        self._connection = Connection(ours.detach())

    def close(self) -> None:
        """End the child; one that is stuck in the kernel is left to init."""
        if self._connection is not None:
            self._connection.close()
        if self._child is not None:
            end_program(self._child)
        self._child = self._connection = self._asked = None
