"""A gRPC server on a unix socket, which has its name from the moment it answers; and what its streams tell."""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from ocigpu.core.errors import HostError, printable
from ocigpu.kubernetes.api.services import give_up, open_channel

STOP = 2.0
"""Seconds that running calls have when a server stops."""
MAX_PATH = 107
"""Bytes of a unix socket's path (unix(7))."""
MAX_STREAMS = 8
"""Open streams of one kubelet and its predecessors; each has a thread."""
MAX_REQUEST = 16 << 20
"""Bytes: GetPreferredAllocation names every free device, some of them twice."""


def identity(path: str) -> tuple[int, ...]:
    """Return what tells a file from another one of the same name, () for none."""
    try:
        status = os.lstat(path)
    except OSError:
        return ()
    return (status.st_dev, status.st_ino, status.st_ctime_ns)


class Listener:
    """Serves on the socket ``path``; ``new``: name of the socket until it answers.

    Kubelets search some directories for sockets and ignore names that begin with a dot.
    """

    def __init__(self, path: str, new: str = "", code: str = "OCIGPU-KUBE-3") -> None:
        self.path = path
        self._new = new or f"{os.path.dirname(path)}/.{os.path.basename(path)}"
        self._code = code
        self._server: Any = None
        self._inode: tuple[int, ...] = ()

    def start(self, handlers: Sequence[Any], workers: int, probe: "Callable[[grpc.Channel], None]") -> None:
        """Listen, and prove by ``probe`` that it answers.

        The socket replaces a leftover one.  Only our own socket is removed at the end.  Raises HostError of the
        listener's code.
        """
        new = self._new
        if len(os.fsencode(new)) > MAX_PATH:
            raise self._cannot(f"the path of a socket may have {MAX_PATH} bytes")
        if not os.path.isdir(os.path.dirname(new)):  # gRPC's library would write a line of its own to standard error
            raise self._cannot(f"there is no directory {os.path.dirname(new)}")
        server = grpc.server(
            ThreadPoolExecutor(workers, os.path.basename(self.path)),
            options=[("grpc.max_receive_message_length", MAX_REQUEST)],
        )
        server.add_generic_rpc_handlers(tuple(handlers))
        try:
            if os.path.lexists(new):
                os.unlink(new)
            server.add_insecure_port(f"unix:{new}")
            server.start()
            with open_channel(new) as channel:
                probe(channel)
            os.rename(new, self.path)
        except (OSError, RuntimeError, grpc.RpcError) as error:
            give_up(server)
            cause = error.strerror if isinstance(error, OSError) and error.strerror else why(error)
            raise self._cannot(cause) from error
        self._server = server
        self._inode = identity(self.path)[:2]

    def stop(self, seconds: float = STOP) -> str:
        """End all calls and remove the socket; returns why that was not possible, "" otherwise."""
        if self._server is None:
            return ""
        self._server.stop(seconds).wait(seconds)
        self._server = None
        if self.owns_socket():
            try:
                os.unlink(self.path)
            except OSError as error:  # ENOENT: just now removed by the kubelet
                return f"{self.path}: {error.strerror}"
        return ""

    @property
    def running(self) -> bool:
        """Whether it listens."""
        return self._server is not None

    def owns_socket(self) -> bool:
        """Whether the socket of its name is its own: kubelets remove all of them when they start."""
        return self._inode == identity(self.path)[:2]

    def _cannot(self, cause: str) -> HostError:
        return HostError(self._code, f"serve {printable(self.path, 300)}: {printable(cause, 300)}")


class Feed:
    """A value that streams tell, and tell again when it is another one, or after ``repeat`` seconds."""

    def __init__(self, repeat: float = math.inf) -> None:
        self._repeat = repeat
        self._condition = threading.Condition()
        self._value: Any = None
        self._version = -1
        self._streams = 0
        self._turn = 0
        self._ending = False

    def tell(self, value: Any) -> bool:
        """Returns whether it is another value than before."""
        with self._condition:
            changed: bool = value != self._value
            if changed:
                self._value = value
                self._version += 1
                self._condition.notify_all()
        return changed

    def end(self, ending: bool = True) -> None:
        """End the streams after they have sent what is new; ``ending``: False lets new ones begin."""
        with self._condition:
            self._ending = ending
            self._condition.notify_all()

    def break_off(self) -> None:
        """End the streams that there are; others may begin."""
        with self._condition:
            self._turn += 1
            self._condition.notify_all()

    @property
    def is_followed(self) -> bool:
        """Whether a stream tells its values."""
        return bool(self._streams)

    def follow(self, context: Any) -> Iterator[Any]:
        """Yield the values for a call, until it or the feed ends."""
        if not context.add_callback(self._wake):
            return
        with self._condition:
            self._streams += 1
            turn = self._turn
            crowded = self._streams > MAX_STREAMS
        try:
            if crowded:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"more than {MAX_STREAMS} streams")
            sent, due = -1, math.inf
            while True:
                with self._condition:
                    new, now = sent != self._version, time.monotonic()
                    ended = turn != self._turn or (self._ending and not new)
                    if ended or not context.is_active():
                        return
                    if not new and now < due:
                        self._condition.wait(None if due == math.inf else due - now)
                        continue
                    value, sent, due = self._value, self._version, now + self._repeat
                yield value
        finally:
            with self._condition:
                self._streams -= 1

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify_all()


def why(error: BaseException) -> str:
    """Return the message of a gRPC error."""
    return str(error.details() if isinstance(error, grpc.Call) else error)
