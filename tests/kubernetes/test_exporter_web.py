"""The exporter's web server against clients that mean no good; in this process, on a real socket."""

import contextlib
import resource
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from http import HTTPStatus

import pytest

from ocigpu.system import pages as web
from ocigpu.system.service import Door, listen_tcp

PAGE = web.make_page(b"x 1\n")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[web.WebServer]:
    monkeypatch.setattr(web, "TIMEOUT", 1.0)
    found = web.WebServer("127.0.0.1", 0, lambda: PAGE, lambda: b"up 1\n", lambda: False)
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield found
    found.shutdown()
    thread.join()


def connect(server: web.WebServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=60)


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
    """Together they take longer than one may; a machine that stops for a while may take the time of one away."""
    for _ in range(20):
        with connect(server) as client:
            if all(answers_after_a_while(client) for _ in range(4)):
                return
    pytest.fail("no connection lasted for four requests")


def answers_after_a_while(client: socket.socket) -> bool:
    """Whether the connection is still there 0.4 s later, for another request."""
    time.sleep(0.4)
    answer = b""
    with contextlib.suppress(ConnectionError):
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        while not answer.endswith(b"\r\n\r\nx 1\nup 1\n"):
            part = client.recv(1 << 16)
            if not part:
                return False
            answer += part
    return answer.startswith(b"HTTP/1.1 200 OK\r\n")


NEXT = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (
            b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 33\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n",
            b"501",
        ),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 70000 + b"\r\n\r\n", b"431"),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 200 + b"\r\n", b"431"),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n" + (b"X: " + b"y" * 250 + b"\r\n") * 65 + b"\r\n", b"431"),
        (b"GET /" + b"x" * 70000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", b"431"),
        (b"\x16\x03\x01 nonsense\r\n\r\n", b"400"),
        (
            b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length : 33\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n",
            b"400",
        ),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 33\r\n Content-Length: 0\r\n\r\n" + NEXT, b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 27\r\nContent-Length: 0\r\n\r\n" + NEXT, b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 27\r\n\r\n" + NEXT, b"400"),
        (b"HEAD / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1b\r\n" + NEXT, b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
    ],
    ids=[
        "another method with a body",
        "a long header",
        "many headers",
        "headers of more than 16 KiB in all",
        "a long path",
        "no request",
        "a length in another spelling",
        "a length that is folded",
        "two lengths",
        "a page with a body",
        "a head with a body",
        "no host",
    ],
)
def test_what_is_no_request_for_a_page_is_refused_and_the_connection_closed(
    server: web.WebServer, request_: bytes, status: bytes
) -> None:
    with connect(server) as client:
        client.sendall(request_)
        answer = read_all(client)
    assert answer.count(b"HTTP/1.1 ") <= 1
    assert not answer or status in answer, "an answer may be lost when what was sent is not read"


def ask(server: web.WebServer, path: bytes) -> bytes:
    with connect(server) as client:
        client.sendall(b"GET " + path + b" HTTP/1.0\r\n\r\n")
        return read_all(client)


def test_a_client_too_many_takes_the_place_of_the_slowest(
    server: web.WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "TIMEOUT", 600.0)  # none is closed because of time
    idle = []
    for _ in range(web.MAX_CLIENTS):
        idle.append(connect(server))
        idle[-1].sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")
    assert b"200 OK" in ask(server, b"/metrics")
    assert read_all(idle[0]) == b"", "it was the slowest"
    for number, each in enumerate(idle[1:]):
        each.sendall(b"Connection: close\r\n\r\n")
        assert b"200 OK" in read_all(each), number
    for each in idle:
        each.close()


def test_without_a_descriptor_for_a_new_client_the_slowest_goes() -> None:
    with Door(listen_tcp("127.0.0.1", 0, 8), 8) as door, contextlib.ExitStack() as all_:

        def come() -> socket.socket:
            return all_.enter_context(socket.create_connection(door.getsockname(), timeout=60))

        clients = [come() for _ in range(3)]
        held = [all_.enter_context(door.accept()[0]) for _ in clients[:2]]
        door.renew(held[0])
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                door.accept()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert clients[1].recv(1) == b"", "it was the slowest"
        all_.enter_context(door.accept()[0]).send(b"x")
        held[0].send(b"x")
        assert [clients[number].recv(1) for number in (0, 2)] == [b"x", b"x"]


def test_a_flood_of_slow_clients_stops_neither_the_probe_nor_the_scrape(
    server: web.WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hundred clients that read no answer and send no end; new ones come between probe and scrape."""
    monkeypatch.setattr(web, "TIMEOUT", 600.0)
    slow = []
    for number in range(200):
        slow.append(connect(server))
        slow[-1].sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 16000 * (number % 2))
        if number % 20 == 19:
            assert b"200 OK" in ask(server, b"/health")
            assert b"x 1\nup 1\n" in ask(server, b"/metrics")
    for each in slow:
        each.close()


GREEDY = """
import socket, sys, threading
client = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def send():
    while True:
        client.sendall(b"GET /nothing HTTP/1.1\\nHost: x\\n\\n" * 4000)
threading.Thread(target=send, daemon=True).start()
client.recv(1)
print(flush=True)
while client.recv(1 << 20):
    pass
"""


def test_a_client_that_never_stops_asking_stops_neither_the_probe_nor_the_scrape(
    server: web.WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends requests without an end and reads the answers as fast: the server is never left waiting for it."""
    monkeypatch.setattr(web, "TIMEOUT", 600.0)  # none is closed because of time, on a machine that stops for a while
    command = [sys.executable, "-I", "-c", GREEDY, str(server.server_port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as greedy:
        try:
            assert greedy.stdout is not None
            assert greedy.stdout.readline() == b"\n", "it is being answered"
            for _ in range(3):
                assert b"200 OK" in ask(server, b"/health")
                assert b"x 1\nup 1\n" in ask(server, b"/metrics")
            assert greedy.poll() is None
        finally:
            greedy.kill()


def test_a_client_that_reads_no_answer_keeps_no_page_of_its_own(
    server: web.WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of 8 MiB, of which the kernel takes a part: what is left is the page of all, not a copy for each."""
    monkeypatch.setattr(web, "TIMEOUT", 600.0)
    page = web.Page(b"x" * (8 << 20))
    monkeypatch.setattr(server, "page", lambda: page)
    tracemalloc.start()
    clients = []
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(8):
            clients.append(connect(server))
            clients[-1].sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            assert clients[-1].recv(5) == b"HTTP/", "it is being answered"
        assert tracemalloc.get_traced_memory()[1] - before < 4 << 20
    finally:
        tracemalloc.stop()
        for each in clients:
            each.close()


def read_exactly(client: socket.socket, size: int) -> int:
    """Return how many of so many bytes there were."""
    got = 0
    with contextlib.suppress(ConnectionResetError):
        while got < size and (part := client.recv(min(size - got, 1 << 20))):
            got += len(part)
    return got


def test_probes_have_places_that_no_other_client_takes(server: web.WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that are slow to read: more than there are places put out no probe, one probe too many does."""
    size = 16 << 20  # more than the kernel takes
    monkeypatch.setattr(web, "TIMEOUT", 600.0)
    monkeypatch.setattr(server.door, "most", 4)
    monkeypatch.setattr(web, "MAX_PROBES", 2)
    answer = web.WebAnswer(HTTPStatus.OK, "text/plain", (bytes(size),))
    monkeypatch.setattr(server, "answer", lambda *_: answer)

    def begin(path: bytes) -> socket.socket:
        client = connect(server)
        client.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(1) == b"H", "it is being answered"
        return client

    probes = [begin(b"/health") for _ in range(web.MAX_PROBES + 1)]
    others = [begin(b"/metrics") for _ in range(4 + 1)]
    read = [read_exactly(each, size - 1) == size - 1 for each in probes]
    assert read == [False] + [True] * web.MAX_PROBES
    assert read_exactly(others[0], size - 1) < size - 1
    for each in (*probes, *others):
        each.close()
