"""The exporter's pages over HTTP: /metrics, /health and /."""

import gzip
import io
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from ocigpu.errors import HostError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TIMEOUT = 10.0
"""Seconds that a client may take over a whole request, however slowly it comes, and over reading the answer."""
MAX_CLIENTS = 32
"""Connections at one time; others are closed at once."""
FRONT = b"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>GPU metrics</title></head><body>
<h1>GPU metrics</h1><p><a href="./metrics">Metrics</a>, <a href="./health">Health</a></p></body></html>
"""


class Page(NamedTuple):
    """What was collected last, as text and compressed; pages are replaced, never changed."""

    text: bytes = b""
    packed: bytes = b""


def make_page(text: bytes) -> Page:
    """Return the page with this text."""
    return Page(text, gzip.compress(text, 1))


class WebServer(ThreadingHTTPServer):
    """Serves in threads of its own.

    ``page``: gives what was collected last; ``now``: gives the text that is made for each request; ``reloading``: tells
    whether the list of metrics is being read.  Raises HostError (OCIGPU-KUBE-3) when it cannot listen.
    """

    daemon_threads = True
    request_queue_size = 64
    allow_reuse_address = True

    def __init__(
        self, host: str, port: int, page: Callable[[], Page], now: Callable[[], bytes], reloading: Callable[[], bool]
    ) -> None:
        self.page, self.now, self.reloading = page, now, reloading
        self._places = threading.BoundedSemaphore(MAX_CLIENTS)
        self.address_family, address = _address(host, port)
        try:
            super().__init__(address, _Handler)
        except OSError as error:
            raise HostError("OCIGPU-KUBE-3", f"listen on {host or '*'}:{port}: {error.strerror}") from error

    def server_bind(self) -> None:
        """Listen; without the reverse look-up of our own name that the standard library does here."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(self.server_address[0] != "::"))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; a client too many is turned away."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one client."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away or is too slow is nobody's error."""


def _address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Return family and address to listen on; without a host, IPv6 and IPv4 where there is IPv6."""
    if not host:
        try:
            with socket.socket(socket.AF_INET6) as probe:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                probe.bind(("::", 0))
        except OSError:  # a kernel without IPv6
            return socket.AF_INET, ("0.0.0.0", port)
        return socket.AF_INET6, ("::", port)
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, port)


class _Requests(io.RawIOBase):
    """What a client sends; raises TimeoutError when a request is not there in time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.due = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.due - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(TIMEOUT)  # of the answer, as a whole: socket.sendall


class _Handler(BaseHTTPRequestHandler):
    server: WebServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self._requests = _Requests(self.connection)
        self.rfile = io.BufferedReader(self._requests)

    def handle_one_request(self) -> None:
        self._requests.due = time.monotonic() + TIMEOUT
        super().handle_one_request()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._metrics()
        elif path == "/health":
            reloading = "true" if self.server.reloading() else "false"
            self._answer(
                200, "text/plain", b"OK\n", {"X-Reload-In-Progress": reloading, "X-Registry-Available": "true"}
            )
        elif path == "/":
            self._answer(200, "text/html; charset=utf-8", FRONT)
        else:
            self._answer(404, "text/plain", b"not found\n")

    do_HEAD = do_GET  # noqa: N815

    def _metrics(self) -> None:
        page, now = self.server.page(), self.server.now()
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            # members of a gzip file may follow one another (RFC 1952): what was collected is packed once
            body = page.packed + gzip.compress(now, 1)
            self._answer(200, CONTENT_TYPE, body, {"Content-Encoding": "gzip"})
        else:
            self._answer(200, CONTENT_TYPE, page.text + now)

    def _answer(self, status: int, kind: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        """Return the name of this server."""
        return "ocigpu"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Requests are not logged: there is one each few seconds."""
