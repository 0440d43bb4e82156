"""The exporter's pages over HTTP: /metrics, /health and /.

Anyone who reaches the port may be a client.  One thread serves all of them without waiting for any, so a client costs
its socket, at most MAX_HEAD bytes of request, and a reference to the shared page.  HTTP is h11's.
"""

import asyncio
import contextlib
import gzip
import socket
import threading
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple

import h11

from ocigpu.core.errors import HostError, OsErrorAs, SettingsError, quoted
from ocigpu.system.service import Door, cut, listen_tcp, split_address

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TIMEOUT = 10.0
"""Seconds that a client may take over a whole request, however slowly it comes, and over reading the answer."""
MAX_CLIENTS = 64
"""Connections at one time, see :class:`~.service.Door`."""
MAX_PROBES = 8
"""Of those that have asked for a probe's path, whose places nobody else takes."""
MAX_HEAD, MAX_FIELDS = 16 << 10, 100
"""Bytes and header fields of a request: more are refused, and so may be the last _PART of these bytes."""
FRONT = b"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>GPU metrics</title></head><body>
<h1>GPU metrics</h1><p><a href="./metrics">Metrics</a>, <a href="./health">Health</a></p></body></html>
"""
_PART = 4096
"""Bytes that are read at once."""
_BACKLOG = 128
_PAUSE = 0.1
"""Seconds without new connections where there is no descriptor or memory for one."""


class Page(NamedTuple):
    """The last collected metrics, as text and compressed; pages are replaced, never changed."""

    text: bytes = b""
    packed: bytes = b""


def make_page(text: bytes) -> Page:
    """Return the page with this text."""
    return Page(text, gzip.compress(text, 1))


class WebAnswer(NamedTuple):
    """``kind``: media type; ``body``: its parts; ``fields``: of the header, beside those that every answer has."""

    status: HTTPStatus
    kind: str
    body: tuple[bytes, ...]
    fields: tuple[tuple[str, str], ...] = ()


class WebServer:
    """Serves until :meth:`shutdown`.

    ``page``: returns the last collected page; ``now``: returns the text made for each request; ``reloading``: tells
    whether the list of metrics is being read.  Raises HostError (OCIGPU-KUBE-3) when it cannot listen.
    """

    probes: tuple[str, ...] = ("/health",)
    """Paths of MAX_PROBES."""

    def __init__(
        self, host: str, port: int, page: Callable[[], Page], now: Callable[[], bytes], reloading: Callable[[], bool]
    ) -> None:
        self.page, self.now, self.reloading = page, now, reloading
        self._tasks: set[asyncio.Task[None]] = set()
        self._probes: dict[int, socket.socket] = {}
        self._stop: Callable[[], object] | None = None
        self._begun = threading.Event()
        with OsErrorAs(HostError, "OCIGPU-KUBE-3", f"listen on {host or '*'}:{port}"):
            self.door = Door(listen_tcp(host, port, _BACKLOG), MAX_CLIENTS, lambda: self._probes)
        self.door.setblocking(False)
        self.server_port = int(self.door.getsockname()[1])
        self.address = f"{f'[{host}]' if ':' in host else host or '*'}:{self.server_port}"

    def serve_forever(self) -> None:
        """Serve until another thread calls :meth:`shutdown`."""
        with self.door, contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._serve())

    def close(self) -> None:
        """Listen no longer, where :meth:`serve_forever` was not called."""
        self.door.close()

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
                client, _ = await loop.sock_accept(self.door)
            except ConnectionAbortedError:
                continue
            except OSError:  # no descriptor or no memory is left (accept(2)): the door has closed a connection
                await asyncio.sleep(_PAUSE)
                continue
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else a body waits for its head's receipt
            new = loop.create_task(self._client(client))
            self._tasks.add(new)
            new.add_done_callback(self._tasks.discard)
            await asyncio.sleep(0)  # the others' turn: accepting does not wait while there are more

    async def _client(self, client: socket.socket) -> None:
        """Answer a client's requests, one after another."""
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD - _PART)
        number = client.fileno()
        with client, contextlib.suppress(OSError):  # a client that leaves or is too slow is not an error
            while True:
                try:
                    async with asyncio.timeout(TIMEOUT):
                        request = await _read_request(client, connection)
                except h11.RemoteProtocolError as error:
                    path, bare, answer = "", False, refuse(HTTPStatus(error.error_status_hint))
                else:
                    bare = request.method == b"HEAD"
                    path = request.target.decode("ascii").partition("?")[0]
                    packed = any(
                        name == b"accept-encoding" and b"gzip" in value.lower() for name, value in request.headers
                    )
                    answer = self.answer(path, packed)
                if path in self.probes:
                    self._probes[number] = client
                    if len(self._probes) > MAX_PROBES:
                        cut(self._probes.pop(next(iter(self._probes))))
                try:
                    async with asyncio.timeout(TIMEOUT):
                        await _send(client, connection, answer, bare)
                finally:
                    self._probes.pop(number, None)
                if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                    return
                connection.start_next_cycle()
                self.door.renew(client)

    def answer(self, path: str, packed: bool, /) -> WebAnswer:
        """Return the answer to a request for a path; ``packed``: gzip is accepted."""
        if path == "/metrics":
            page, now = self.page(), self.now()
            if packed:
                # a gzip file may have several members (RFC 1952): the collected page is compressed once
                body = (page.packed, gzip.compress(now, 1))
                return WebAnswer(HTTPStatus.OK, CONTENT_TYPE, body, (("Content-Encoding", "gzip"),))
            return WebAnswer(HTTPStatus.OK, CONTENT_TYPE, (page.text, now))
        if path == "/health":
            reloading = "true" if self.reloading() else "false"
            fields = (("X-Reload-In-Progress", reloading), ("X-Registry-Available", "true"))
            return WebAnswer(HTTPStatus.OK, "text/plain", (b"OK\n",), fields)
        if path == "/":
            return WebAnswer(HTTPStatus.OK, "text/html; charset=utf-8", (FRONT,))
        return NOT_FOUND


def refuse(status: HTTPStatus) -> WebAnswer:
    """Return the answer to a request after which the connection is closed; it has no body, in case that was HEAD."""
    return WebAnswer(status, "text/plain", (), (("Connection", "close"),))


NOT_FOUND = WebAnswer(HTTPStatus.NOT_FOUND, "text/plain", (b"not found\n",))


async def _read_request(client: socket.socket, connection: h11.Connection) -> h11.Request:
    """Return the next request; raises RemoteProtocolError for a refused one.

    Raises ConnectionError when the client has gone.
    """
    while True:
        await asyncio.sleep(0)  # the others' turn: nothing here waits for a client that sends and reads fast enough
        event = connection.next_event()
        if isinstance(event, h11.Request):
            break
        if event is not h11.NEED_DATA:
            raise ConnectionError
        connection.receive_data(await asyncio.get_running_loop().sock_recv(client, _PART))
    if len(event.headers) > MAX_FIELDS:
        raise h11.RemoteProtocolError("many fields", HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    if event.method not in (b"GET", b"HEAD"):
        raise h11.RemoteProtocolError("not a page's method", HTTPStatus.NOT_IMPLEMENTED)
    if not isinstance(connection.next_event(), h11.EndOfMessage):
        raise h11.RemoteProtocolError("a body")  # RFC 9110 section 9.3.1: it has no meaning, and may be refused
    return event


async def _send(client: socket.socket, connection: h11.Connection, answer: WebAnswer, bare: bool) -> None:
    """Send an answer, without its body if it is ``bare``; no part of the body is copied."""
    fields = [
        ("Server", "ocigpu"),
        ("Date", formatdate(usegmt=True)),
        ("Content-Type", answer.kind),
        ("Content-Length", str(sum(map(len, answer.body)))),
        *answer.fields,
    ]
    head = h11.Response(status_code=answer.status, reason=answer.status.phrase, headers=fields)
    body = () if bare else (h11.Data(data=part) for part in answer.body)
    for event in (head, *body, h11.EndOfMessage()):
        for part in connection.send_with_data_passthrough(event) or ():
            await asyncio.get_running_loop().sock_sendall(client, part)


def serve_metrics(address: str, render: Callable[[], bytes], option: str = "--metrics") -> WebServer:
    """Serve /metrics in a thread, made for each request; ``option``: that has the address.

    Raises SettingsError (OCIGPU-KUBE-4), HostError (OCIGPU-KUBE-3).
    """
    place = split_address(address)
    if place is None:
        raise SettingsError("OCIGPU-KUBE-4", f"{option}: {quoted(address)} is not [HOST]:PORT")
    server = WebServer(*place, Page, render, lambda: False)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
