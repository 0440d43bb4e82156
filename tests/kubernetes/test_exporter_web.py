"""The exporter's web server against clients that mean no good; in this process, on a real socket."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from ocigpu.kubernetes.exporter import web

PAGE = web.make_page(b"x 1\n")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[web.WebServer]:
    monkeypatch.setattr(web, "TIMEOUT", 1.0)
    found = web.WebServer("127.0.0.1", 0, lambda: PAGE, lambda: b"up 1\n", lambda: False)
    thread = threading.Thread(target=found.serve_forever, args=(0.05,))
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join()


def connect(server: web.WebServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=20)


def read_all(client: socket.socket) -> bytes:
    parts = []
    try:
        while part := client.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def test_a_request_that_comes_a_byte_at_a_time_is_given_up(server: web.WebServer) -> None:
    with connect(server) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        client.settimeout(0.05)
        for _ in range(400):  # many times longer than a request may take, each byte well within that time
            try:
                assert client.recv(1) == b""
                break
            except TimeoutError:
                client.sendall(b"x")
            except ConnectionError:
                break
        else:
            pytest.fail("the connection is still open")


def test_several_requests_of_one_connection_have_each_their_time(server: web.WebServer) -> None:
    with connect(server) as client:
        for _ in range(4):
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b"\r\n\r\nx 1\nup 1\n"):
                part = client.recv(1 << 16)
                assert part, answer
                answer += part
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            time.sleep(0.4)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 33\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"501"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 70000 + b"\r\n\r\n", b"431"),
        (b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n", b"431"),
        (b"GET /" + b"x" * 70000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"\x16\x03\x01 nonsense\r\n\r\n", b"400"),
    ],
    ids=["another method with a body", "a long header", "many headers", "a long path", "no request"],
)
def test_what_is_no_request_for_a_page_is_refused_and_the_connection_closed(
    server: web.WebServer, request_: bytes, status: bytes
) -> None:
    with connect(server) as client:
        client.sendall(request_)
        answer = read_all(client)
    assert answer.count(b"HTTP/1.1 ") <= 1
    assert not answer or status in answer, "an answer may be lost when what was sent is not read"


def test_a_client_too_many_is_turned_away_and_places_are_free_again(server: web.WebServer) -> None:
    idle = [connect(server) for _ in range(web.MAX_CLIENTS)]
    with connect(server) as client:
        assert read_all(client) == b""
    for each in idle:
        assert read_all(each) == b"", "it said nothing in time"
        each.close()
    with connect(server) as client:
        client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b"200 OK" in read_all(client)
