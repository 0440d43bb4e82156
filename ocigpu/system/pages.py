"""The exporter's pages over HTTP: /metrics, /health and /.

Anybody who reaches the port may be a client.  One thread serves all of them without waiting for any, so a client costs
its socket, at most MAX_HEAD bytes of request, and a reference to the page that all are given.
"""

import asyncio
import contextlib
import gzip
import re
import socket
import threading
import time
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple

from ocigpu.core.errors import HostError, OsErrorAs
from ocigpu.system.service import listen_tcp

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TIMEOUT = 10.0
"""Seconds that a client may take over a whole request, however slowly it comes, and over reading the answer."""
MAX_CLIENTS = 64
"""Connections at one time: for one more, that whose request has taken longest is closed."""
MAX_PROBES = 8
"""Of those that have asked for a probe's path, whose places nobody else takes."""
MAX_HEAD, MAX_FIELDS = 16 << 10, 100
"""Bytes and header fields of a request."""
FRONT = b"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>GPU metrics</title></head><body>
<h1>GPU metrics</h1><p><a href="./metrics">Metrics</a>, <a href="./health">Health</a></p></body></html>
"""
_PART = 4096
_BACKLOG = 128
_PAUSE = 0.1
"""Seconds without new connections where there is no descriptor or memory for one."""
_END = re.compile(rb"\r?\n\r?\n")
_REQUEST = re.compile(rb"([!-~]+) ([!-~]+) HTTP/1\.([01])")


class Page(NamedTuple):
    """What was collected last, as text and compressed; pages are replaced, never changed."""

    text: bytes = b""
    packed: bytes = b""


def make_page(text: bytes) -> Page:
    """Return the page with this text."""
    return Page(text, gzip.compress(text, 1))


class WebRequest(NamedTuple):
    """``method`` and ``path``; ``packed``: gzip is accepted; ``lasting``: another request may follow."""

    method: str
    path: str
    packed: bool
    lasting: bool


class _BadRequestError(Exception):
    """What is no request that is understood; its argument is the status of the answer."""


class WebServer:
    """Serves until :meth:`shutdown`.

    ``page``: gives what was collected last; ``now``: gives the text that is made for each request; ``reloading``: tells
    whether the list of metrics is being read.  Raises HostError (OCIGPU-KUBE-3) when it cannot listen.
    """

    probes: tuple[str, ...] = ("/health",)
    """Paths of MAX_PROBES."""

    def __init__(
        self, host: str, port: int, page: Callable[[], Page], now: Callable[[], bytes], reloading: Callable[[], bool]
    ) -> None:
        self.page, self.now, self.reloading = page, now, reloading
        self._clients: dict[asyncio.Task[None], float] = {}
        self._probes: dict[asyncio.Task[None], float] = {}
        self._stop: Callable[[], object] | None = None
        self._begun = threading.Event()
        with OsErrorAs(HostError, "OCIGPU-KUBE-3", f"listen on {host or '*'}:{port}"):
            self._socket = listen_tcp(host, port, _BACKLOG)
            self._socket.setblocking(False)
        self.server_port = int(self._socket.getsockname()[1])

    def serve_forever(self) -> None:
        """Serve until another thread calls :meth:`shutdown`."""
        with self._socket, contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._serve())

    def close(self) -> None:
        """Listen no longer, where :meth:`serve_forever` was not called."""
        self._socket.close()

    def shutdown(self) -> None:
        """End :meth:`serve_forever`, which has begun or is about to."""
        self._begun.wait()
        assert self._stop is not None
        self._stop()

    async def _serve(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._stop = lambda: loop.call_soon_threadsafe(task.cancel)
        self._begun.set()
        while True:
            try:
                client, _ = await loop.sock_accept(self._socket)
            except ConnectionAbortedError:
                continue
            except OSError:  # no descriptor or no memory is left (accept(2))
                _drop_slowest(self._clients, 0)
                await asyncio.sleep(_PAUSE)
                continue
            client.setblocking(False)
            new = loop.create_task(self._client(client))
            self._clients[new] = time.monotonic()
            new.add_done_callback(self._forget)
            _drop_slowest(self._clients, MAX_CLIENTS)
            await asyncio.sleep(0)  # the others' turn: accepting does not wait while there are more

    def _forget(self, task: "asyncio.Task[None]") -> None:
        self._clients.pop(task, None)
        self._probes.pop(task, None)
        if not task.cancelled():
            task.exception()  # one that goes away or is too slow is nobody's error

    async def _client(self, client: socket.socket) -> None:
        """Answer a client's requests, one after another."""
        task = asyncio.current_task()
        assert task is not None
        with client:
            rest = b""
            lasting = True
            while lasting:
                try:
                    async with asyncio.timeout(TIMEOUT):
                        head, rest = await _read_head(client, rest)
                    request = _parse(head)
                except _BadRequestError as error:
                    request, parts = WebRequest("GET", "", packed=False, lasting=False), refuse(error.args[0])
                else:
                    parts = self.answer(request)
                if request.path in self.probes:
                    self._probes[task] = self._clients.pop(task, time.monotonic())
                    _drop_slowest(self._probes, MAX_PROBES)
                async with asyncio.timeout(TIMEOUT):
                    for part in parts[:1] if request.method == "HEAD" else parts:
                        await asyncio.get_running_loop().sock_sendall(client, part)
                self._probes.pop(task, None)
                self._clients[task] = time.monotonic()
                lasting = request.lasting

    def answer(self, request: WebRequest) -> list[bytes]:
        """Return head and body of the answer, in parts."""
        if request.method not in ("GET", "HEAD"):
            return refuse(HTTPStatus.NOT_IMPLEMENTED)
        if request.path == "/metrics":
            page, now = self.page(), self.now()
            if request.packed:
                # members of a gzip file may follow one another (RFC 1952): what was collected is packed once
                return respond(
                    HTTPStatus.OK, CONTENT_TYPE, page.packed, gzip.compress(now, 1), fields="Content-Encoding: gzip\r\n"
                )
            return respond(HTTPStatus.OK, CONTENT_TYPE, page.text, now)
        if request.path == "/health":
            reloading = "true" if self.reloading() else "false"
            fields = f"X-Reload-In-Progress: {reloading}\r\nX-Registry-Available: true\r\n"
            return respond(HTTPStatus.OK, "text/plain", b"OK\n", fields=fields)
        if request.path == "/":
            return respond(HTTPStatus.OK, "text/html; charset=utf-8", FRONT)
        return respond(HTTPStatus.NOT_FOUND, "text/plain", b"not found\n")


def _drop_slowest(clients: "dict[asyncio.Task[None], float]", most: int) -> None:
    """Close the connection whose request began first, where there are more than so many."""
    if len(clients) > most:
        slowest = min(clients, key=clients.__getitem__)
        del clients[slowest]
        slowest.cancel()


# HTTP/1.1 (RFC 9112), as far as requests without a body need it


async def _read_head(client: socket.socket, head: bytes) -> tuple[bytes, bytes]:
    """Return the head of the next request, which may have begun, and what follows it; raises _BadRequestError.

    Raises ConnectionError when the client has gone.
    """
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(0)  # the others' turn: nothing here waits for a client that sends and reads fast enough
        head = head.lstrip(b"\r\n")
        end = _END.search(head)
        if end and end.start() <= MAX_HEAD:
            return head[: end.start()], head[end.end() :]
        if len(head) > MAX_HEAD:
            inside = b"\n" in head[:MAX_HEAD]
            raise _BadRequestError(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE if inside else HTTPStatus.REQUEST_URI_TOO_LONG
            )
        part = await loop.sock_recv(client, _PART)
        if not part:
            raise ConnectionError
        head += part


def _parse(head: bytes) -> WebRequest:
    """Return what a request's head says; raises _BadRequestError."""
    first, *lines = head.split(b"\n")
    request = _REQUEST.fullmatch(first.rstrip(b"\r"))
    if not request:
        raise _BadRequestError(HTTPStatus.BAD_REQUEST)
    if len(lines) > MAX_FIELDS:
        raise _BadRequestError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    fields: dict[str, str] = {}
    has_body = False
    for line in lines:
        name, colon, value = line.decode("latin-1").partition(":")
        if not colon or not name or any(letter.isspace() for letter in name):  # RFC 9112 section 5.1
            raise _BadRequestError(HTTPStatus.BAD_REQUEST)
        name, value = name.lower(), value.strip().lower()
        has_body = has_body or name == "transfer-encoding" or (name == "content-length" and value != "0")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    method, target, minor = (part.decode("ascii") for part in request.groups())
    lasting = minor == "1" and "close" not in fields.get("connection", "") and not has_body
    packed = "gzip" in fields.get("accept-encoding", "")
    return WebRequest(method, target.partition("?")[0], packed, lasting and method in ("GET", "HEAD"))


def respond(status: HTTPStatus, kind: str, *body: bytes, fields: str = "") -> list[bytes]:
    """Return head and body of an answer, in parts."""
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nServer: ocigpu\r\nDate: {formatdate(usegmt=True)}\r\n"
        f"Content-Type: {kind}\r\nContent-Length: {sum(map(len, body))}\r\n{fields}\r\n"
    )
    return [head.encode("latin-1"), *body]


def refuse(status: HTTPStatus) -> list[bytes]:
    """Return the answer to a request after which the connection is closed."""
    return respond(status, "text/plain", f"{status.phrase}\n".encode(), fields="Connection: close\r\n")
