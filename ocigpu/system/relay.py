"""Bytes passed on between two sockets, for programs whose library does not speak the family of one of them."""

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable

PART = 1 << 16
MOST = 16
"""Connections at a time; more are closed at once."""
DIAL_SECONDS = 10.0


class Relay:
    """Connections to ``listener``, each passed on to a new one that ``dial`` makes; both sides see the other's end.

    ``admit``: whether the client is allowed; otherwise the connection is closed.  Owns the listener.
    """

    def __init__(
        self,
        listener: socket.socket,
        dial: Callable[[], socket.socket],
        admit: Callable[[socket.socket], bool] = lambda _: True,
    ) -> None:
        self._listener = listener
        self._dial = dial
        self._admit = admit
        self._room = threading.BoundedSemaphore(MOST)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closing = False
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._accept, name="relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections and the listener."""
        os.write(self._writer, b"\0")
        self._thread.join()
        with self._lock:
            self._closing = True
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
        for descriptor in (self._reader, self._writer):
            os.close(descriptor)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            ready = select.select([self._listener.fileno(), self._reader], [], [])[0]
            if self._reader in ready:
                return
            try:
                one, _ = self._listener.accept()
            except OSError:  # the client is gone, or we have no descriptors left
                select.select([self._reader], [], [], 0.05)
                continue
            if not self._room.acquire(blocking=False):
                one.close()
                continue
            threading.Thread(target=self._serve, args=(one,), daemon=True).start()

    def _serve(self, one: socket.socket) -> None:
        try:
            with one:
                if self._admit(one):
                    with contextlib.suppress(OSError), self._dial() as other:
                        self._pass(one, other)
        finally:
            self._room.release()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with self._lock:
            if self._closing:
                return
            self._open |= {one, other}
        back = threading.Thread(target=_copy, args=(other, one), daemon=True)
        back.start()
        _copy(one, other)
        back.join()
        with self._lock:
            self._open -= {one, other}


def connect(family: int, address: str | tuple[int, int], seconds: float) -> socket.socket:
    """Return a new connection, which then has no time-out; raises OSError."""
    made = socket.socket(family)
    try:
        made.settimeout(seconds)
        made.connect(address)
        made.settimeout(None)
    except BaseException:
        made.close()
        raise
    return made


def listen(family: int, address: str | tuple[int, int]) -> socket.socket:
    """Return a socket that listens; raises OSError."""
    made = socket.socket(family)
    try:
        made.bind(address)
        made.listen()
    except BaseException:
        made.close()
        raise
    return made


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Pass on what comes until one side ends, then let the other know."""
    with contextlib.suppress(OSError):
        while data := source.recv(PART):
            target.sendall(data)
    for one, how in ((target, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            one.shutdown(how)
