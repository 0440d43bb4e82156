"""What programs that stay have in common: signals, a log, back-off, files that are followed, the service manager."""

import contextlib
import errno
import json
import math
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from types import FrameType, TracebackType
from typing import Any, Self
from weakref import WeakValueDictionary

from ocigpu.core.errors import as_own_error, printable
from ocigpu.core.tokens import is_number
from ocigpu.system.files import file_state
from ocigpu.system.log import stamp

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
_OUT_OF_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
MAX_TOPICS = 1000
"""Topics whose last line is remembered: an API server may put a number into each of its refusals."""


class ServiceLog:
    """One line on standard output for each message, plain or a JSON object; threads may share it.

    ``lossy``: a line that cannot be written (EPIPE, ENOSPC) is lost instead of ending the program.
    """

    def __init__(self, as_json: bool, lossy: bool = False) -> None:
        self.as_json = as_json
        self._errors = (OSError,) if lossy else ()
        self._lock = threading.Lock()
        self.last_lines: dict[str, tuple[str, ...]] = {}

    def __call__(self, level: str, message: str, **fields: Any) -> None:
        message = printable(message)
        line = message if level == "info" else f"{level}: {message}"
        if self.as_json:
            line = json.dumps({"time": stamp(), "level": level, "msg": message, **fields})
        with self._lock, contextlib.suppress(*self._errors):
            print(line, flush=True)

    def once(self, topic: str, level: str, text: str, **fields: Any) -> None:
        """Log a line about a topic unless it was the last one about it; "" only forgets that."""
        self.new(topic, level, (text,) if text else (), **fields)

    def failed(self, topic: str, error: Exception) -> None:
        """Log an error about a topic, also an unexpected one, unless it was the last line about the topic."""
        self.once(topic, "error", as_own_error(error).line)

    def new(self, topic: str, level: str, texts: Sequence[str], **fields: Any) -> None:
        """Log those lines about a topic that were not there last time."""
        before = self.last_lines.pop(topic, ())
        if len(self.last_lines) >= MAX_TOPICS:
            self.last_lines.clear()
        if texts:
            self.last_lines[topic] = tuple(texts)
        for text in texts:
            if text not in before:
                self(level, text, **fields)

    def forget(self, topic: str) -> bool:
        """Return whether the topic has had a line; its next line is logged again."""
        return bool(self.last_lines.pop(topic, ()))

    def forget_all(self) -> None:
        """Take every next line for news."""
        self.last_lines.clear()


class Backoff:
    """When to try again what has failed, on the caller's clock: after ``first`` seconds, doubling up to ``longest``."""

    def __init__(self, first: float, longest: float = math.inf, due: float = 0.0) -> None:
        self.first, self.longest = first, longest
        self.reset(due)

    def reset(self, due: float = 0.0) -> None:
        """Reset after a success or a change of matter: only ``due`` delays the next attempt."""
        self.delay, self.due = 0.0, due

    def failed(self, now: float) -> float:
        """Set ``due``; returns the seconds until then."""
        self.delay = min(max(2 * self.delay, self.first), self.longest)
        self.due = now + self.delay
        return self.delay


class FollowedFile:
    """A file that is read again when it changes, "" for none."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._state = file_state(path)

    def has_changed(self) -> bool:
        """Return whether it has changed since the last call."""
        before, self._state = self._state, file_state(self.path)
        return before != self._state


class Signals:
    """Within the block signals of ``ending`` set ``stopping`` and SIGHUP sets ``again``; each ends a wait.

    Of the main thread only.  Children begun in the block have the handling of signals that programs are used to.
    ``hangup``: whether SIGHUP is handled.
    """

    def __init__(self, ending: Sequence[signal.Signals] = ENDING, hangup: bool = True) -> None:
        self.stopping = False
        self.again = False
        self._handlers: dict[int, Callable[[int, FrameType | None], None]] = dict.fromkeys(ending, self._stop)
        if hangup:
            self._handlers[signal.SIGHUP] = self._hang_up
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def __enter__(self) -> Self:
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, handler) for number, handler in self._handlers.items()}
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._reader)
        os.close(self._writer)

    def wait(self, seconds: float, *others: int) -> list[int]:
        """Return which descriptors of ``others`` are readable, after this time (math.inf: never), or at once.

        Ends at once when a signal has come, :meth:`wake` was called or one of them is readable.
        """
        limit = 0.0 if self.stopping or self.again else max(0.0, seconds)
        readable = select.select([self._reader, *others], [], [], None if limit == math.inf else limit)[0]
        if self._reader in readable:
            readable.remove(self._reader)
            os.read(self._reader, 4096)
        return readable

    def wake(self) -> None:
        """End the wait; may be called by any thread within the block."""
        with contextlib.suppress(BlockingIOError):  # it has been woken often enough
            os.write(self._writer, b"\0")

    def take_again(self) -> bool:
        """Return whether SIGHUP has come since the last call."""
        asked, self.again = self.again, False
        return asked

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self.stopping = True

    def _hang_up(self, _number: int, _frame: FrameType | None) -> None:
        self.again = True


def split_address(text: str) -> tuple[str, int] | None:
    """Return host ("" for none, without brackets) and port of "[HOST]:PORT", None for another text."""
    host, colon, port = text.rpartition(":")
    digits = port.lstrip("0") or "0"
    if not colon or not is_number(port) or len(digits) > 5 or int(digits) > 65535:
        return None
    return host.removeprefix("[").removesuffix("]"), int(digits)


def listen_tcp(host: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens; "" and "::" are all addresses, of IPv4 too where there is IPv6.  Raises OSError."""
    host = "" if host == "::" else host
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=both)
    except OSError as error:  # "... (while attempting to bind on address ...)"
        raise OSError(error.errno, str(error.strerror).partition(" (while ")[0]) from error


class Door(socket.socket):
    """Replaces a listening socket, and limits the number of its clients.

    Beyond ``most`` connections, and when the system lacks a descriptor or memory for one, the connection with the
    oldest request is closed.  A connection counts even before it sends anything.  ``spared``: returns the descriptors
    of connections that are neither counted nor closed.
    """

    def __init__(self, listening: socket.socket, most: int, spared: Callable[[], Collection[int]] = tuple) -> None:
        super().__init__(fileno=listening.detach())
        self.most, self.spared = most, spared
        self._clients: WeakValueDictionary[int, socket.socket] = WeakValueDictionary()

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept, see socket."""
        try:
            client, address = super().accept()
        except OSError as error:
            if error.errno in _OUT_OF_ROOM:
                for each in self._strangers()[:1]:
                    cut(each)
            raise
        self.renew(client)
        if len(self._clients) > self.most:
            for each in self._strangers()[: -self.most]:
                cut(each)
        return client, address

    def renew(self, client: socket.socket) -> None:
        """Let a client's time begin: it is the last to be closed."""
        self._clients.pop(client.fileno(), None)  # or a closed one: its number now belongs to another
        self._clients[client.fileno()] = client

    def _strangers(self) -> list[socket.socket]:
        spared = {-1, *self.spared()}
        return [each for each in self._clients.values() if each.fileno() not in spared]


def cut(client: socket.socket) -> None:
    """End a connection for all its waiters and holders."""
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)


def notify_service_manager(state: str) -> None:
    """Tell the service manager our state, e.g. "READY=1", as in sd_notify(3); without one nothing happens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not (address and state):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        try:
            sender.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
        except OSError as error:  # without a listener the work continues
            print(f"warning: NOTIFY_SOCKET {address}: {error.strerror}", flush=True)
