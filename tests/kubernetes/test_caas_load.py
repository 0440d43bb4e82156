"""The service for containers under load: what one credential can make it do, and who is answered meanwhile."""

import asyncio
import contextlib
import gc
import http.client
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import h11
import pytest
from caas_lab import Lab, ended, make_lab, running
from support.process import wait_for

from ocigpu.tenants.service import about, events, intake, logs, server, web
from ocigpu.tenants.service.endpoints import Endpoint
from ocigpu.tenants.service.health import DEAD, HealthServer
from ocigpu.tenants.service.intake import (
    MAX_BODY,
    MAX_DEPTH,
    MAX_NUMBER,
    MAX_VALUES,
    Rates,
    Turns,
    check_shape,
    read_model,
)
from ocigpu.tenants.service.models import ContainerRequest
from ocigpu.tenants.service.problems import Refusal
from ocigpu.tenants.service.request import STREAM
from ocigpu.tenants.service.web import Api

PATH = "/v1/containers"
CONNECTIONS = 128


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with make_lab(tmp_path_factory.mktemp("caas"), health="127.0.0.1:0") as made:
        made.add_tenancy("other")
        yield made


def wrong_body() -> bytes:
    """Return a body of 1 MiB whose every place is wrong."""
    found = ",".join(f'"{number}":0' for number in range(105_000))
    return b'{"image":"debian","env":{' + found.encode() + b"}}"


def send(lab: Lab, key: str, body: bytes) -> socket.socket:
    """Send a request and return its connection, whose answer nobody has read yet."""
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", lab.server.port), timeout=60)
    connection.sendall(head.encode() + body)
    return connection


def read_all(connection: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            found += part
    return found


def probe(lab: Lab, path: str = "/healthz") -> tuple[int, bytes]:
    assert lab.server.health
    connection = http.client.HTTPConnection("127.0.0.1", lab.server.health.server_port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()


def when_health_is_shown(monkeypatch: pytest.MonkeyPatch, note: Callable[[], None]) -> None:
    answer = Api.answer

    async def note_and_answer(api: Api, endpoint: Endpoint, *more: Any) -> Any:
        if endpoint.handler is about.show_health:
            note()
        return await answer(api, endpoint, *more)

    monkeypatch.setattr(Api, "answer", note_and_answer)


def test_one_tenancys_requests_wait_for_each_other_and_nobody_else_for_them(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are there before the first is looked at; health is answered though the loop stands still."""
    evil, good = lab.key(), lab.key("other")
    order: list[str] = []
    held, go = threading.Event(), threading.Event()

    def read(model: Any, body: bytes) -> Any:
        order.append("good" if b"other" in body else "evil")
        held.set()
        assert go.wait(60)
        return read_model(model, body)

    monkeypatch.setattr(web, "read_model", read)
    when_health_is_shown(monkeypatch, lambda: order.append("health"))
    with contextlib.ExitStack() as all_:
        many = [all_.enter_context(send(lab, evil, b"[]"))]
        assert held.wait(60)
        many += [all_.enter_context(send(lab, evil, b"[]")) for _ in range(CONNECTIONS - 1)]
        other = all_.enter_context(send(lab, good, json.dumps({"image": "ubuntu", "tenancy": "other"}).encode()))
        health = all_.enter_context(socket.create_connection(("127.0.0.1", lab.server.port), timeout=60))
        health.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert probe(lab) == (200, b"ok\n")
        assert order == ["evil"]
        go.set()
        assert b" 202 " in read_all(other)
        assert b" 200 " in read_all(health)
        assert [b" 400 " in read_all(one) or b" 429 " in read_all(one) for one in many].count(True) == CONNECTIONS
    assert order.count("evil") >= CONNECTIONS - 2  # two more at one time than it may have: refused
    assert order.index("good") < 8, order
    assert order.index("health") < 8, order


@pytest.mark.rest
def test_a_mebibyte_of_errors_is_refused_before_they_are_made(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 of them at one time, with nothing in place of the real parts."""
    asked: list[Any] = []
    monkeypatch.setattr(ContainerRequest, "model_validate", asked.append)
    key, body = lab.key(), wrong_body()
    assert MAX_BODY - 20_000 < len(body) < MAX_BODY
    answers: list[bytes] = []

    def ask() -> None:
        with send(lab, key, body) as connection:
            answers.append(read_all(connection))

    many = [threading.Thread(target=ask) for _ in range(CONNECTIONS)]
    for one in many:
        one.start()
    assert lab.ask("GET", f"{PATH}?limit=1", lab.key("other")).status == 200
    for one in many:
        one.join()
    codes = {json.loads(one.partition(b"\r\n\r\n")[2])["code"] for one in answers}
    assert "request_invalid" in codes
    assert codes <= {"request_invalid", "too_many_requests"}
    assert asked == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (wrong_body(), "names and values"),
        (b"[" + b"0," * MAX_VALUES + b"0]", "names and values"),
        (b"," * (MAX_BODY), "names and values"),
        (b'{"a":' * (MAX_DEPTH + 1) + b"0", "deep"),
        (b'{"gpus": ' + b"1" * (MAX_NUMBER + 1), "letters"),
        (b'{"gpus": 1.' + b"0" * MAX_BODY, "letters"),
        (b"nul" + b"l" * MAX_BODY, "letters"),
        (b'"' * MAX_BODY, "names and values"),
        (b'"\\"' * (MAX_BODY // 3), "names and values"),
    ],
    ids=["object", "list", "commas", "deep", "integer", "fraction", "word", "quotes", "quotes that end nothing"],
)  # fmt: skip
def test_a_body_of_more_than_any_request_needs_is_refused_at_once(body: bytes, said: str) -> None:
    with pytest.raises(Refusal, match=said) as caught:
        check_shape(body)
    assert caught.value.code == "request_invalid"


def test_the_largest_container_there_may_be_is_taken() -> None:
    words = [f'a "word" of {number}, {{with}} [signs]' for number in range(1024)]
    mounts = [{"server": "n", "path": "/e", "target": f"/{number}", "read_only": True} for number in range(16)]
    wanted = {
        "image": "x", "tenancy": "t", "gpus": 8, "command": words, "args": words, "mounts": mounts,
        "env": {f"E{number}": words[number] for number in range(512)},
        "secrets": {f"S{number}": "\\" * 100 for number in range(128)}, "timeout_seconds": 10**9, "restart": "never",
    }  # fmt: skip
    for indent in (None, 2):
        check_shape(json.dumps(wanted, indent=indent).encode())
    assert isinstance(read_model(ContainerRequest, json.dumps(wanted).encode()), ContainerRequest)
    for text in ("x" * 131072, "\\" * 131072, "é" * 100_000):
        check_shape(json.dumps({"image": "x", "args": [text] * 3}).encode())


def test_turns_go_round_the_tenancies() -> None:
    order: list[str] = []

    async def work(turns: Turns, who: str) -> None:
        async with turns.take(who):
            order.append(who)

    async def run() -> None:
        turns = Turns()
        await asyncio.gather(*(work(turns, who) for who in "aaaabbc"))
        assert not turns.waiting_by_owner  # nobody who has gone is remembered

    asyncio.run(run())
    assert order == list("abcabaa")


def test_a_credential_has_so_many_requests_a_second(tmp_path: Path) -> None:
    now = 0.0
    rates = Rates(8, lambda: now)
    for _ in range(32):
        rates.charge("a")
    with pytest.raises(Refusal) as caught:
        rates.charge("a")
    assert (caught.value.code, caught.value.headers()["Retry-After"]) == ("too_many_requests", "1")
    rates.charge("b", 1000)
    now = 1.0
    rates.charge("a", 8)
    with pytest.raises(Refusal):
        rates.charge("a")
    for number in range(intake.MAX_KNOWN):
        rates.charge(str(number))
    now = 1000.0
    rates.charge("last")
    assert len(rates.paid_at) == 1
    with make_lab(tmp_path, rate=0.5) as lab:
        first, second = lab.key(), lab.key()
        assert lab.ask("POST", PATH, first, b" " * MAX_BODY).body["code"] == "request_invalid"
        refused = lab.ask("GET", "/v1/me", first)
        assert (refused.status, refused.body["code"]) == (429, "too_many_requests")
        assert 0 < int(refused.headers["retry-after"]) < 40
        assert lab.ask("GET", "/v1/me", second).status == 200


def test_who_is_refused_before_his_body_is_read_reads_why(lab: Lab) -> None:
    """With buffers that do not take it all, as between two machines."""
    for key, more, status in (("ocigpu_none_none", "", b" 401 "), (lab.key(), "?x=1", b" 400 ")):
        with socket.create_connection(("127.0.0.1", lab.server.port), timeout=60) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
            head = f"POST {PATH}{more} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
            connection.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {MAX_BODY}\r\n\r\n".encode())
            for _ in range(MAX_BODY // 8192):
                connection.sendall(b" " * 8192)
            assert status in read_all(connection)


# what is not JSON


def test_nothing_of_a_connection_that_ended_is_kept(lab: Lab) -> None:
    """Whoever comes and goes would leave what he sent for as long as a request may take."""
    for _ in range(8):
        with socket.create_connection(("127.0.0.1", lab.server.port), timeout=60) as connection:
            connection.sendall(b"POST /v1/containers HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")

    def left() -> int:
        gc.collect()
        return sum(isinstance(one, server.HttpProtocol) for one in gc.get_objects())

    wait_for("them to go", lambda: left() <= 1)  # a probe's, of another test


def test_a_body_in_very_many_parts_ends_its_connection(lab: Lab) -> None:
    """Each part is parsed, whoever sends it; a stranger's too."""
    head = b"POST /v1/containers HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", lab.server.port), timeout=60) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(head + b"1\r\nx\r\n" * 100_000)
        answer = read_all(connection)
    assert answer == b"" or b" 400 " in answer or b" 401 " in answer
    parser = server.RequestParser(h11.SERVER)
    parser.receive_data(head + b"1\r\nx\r\n" * (server.MAX_CHUNKS + 1))
    parts = 0
    with contextlib.suppress(h11.RemoteProtocolError):
        while parser.next_event() is not h11.NEED_DATA:
            parts += 1
    parts -= 1  # the head
    assert parts == server.MAX_CHUNKS


def test_others_have_their_turn_while_a_long_log_is_read(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that is kept is all there: nothing in it is waited for."""
    key = lab.key()
    made = lab.run(key)
    lab.pod(made)
    lab.set_status(made, **running())
    lab.wait(key, made, "running")
    lab.set_status(made, **ended())
    lab.wait(key, made, "finished")
    lab.server.store.keep_log(made, b"2026-11-23T10:02:00Z x\n" * 20_000)
    sent = 0
    lines = logs.read_lines

    async def count(*words: Any) -> AsyncIterator[Any]:
        nonlocal sent
        async for line in lines(*words):
            sent += 1
            yield line

    monkeypatch.setattr(logs, "read_lines", count)
    seen: list[int] = []
    when_health_is_shown(monkeypatch, lambda: seen.append(sent))
    with lab.open("GET", f"{PATH}/{made}/logs", key) as answer:
        assert lab.ask("GET", "/healthz").status == 200
        assert len(answer.read().splitlines()) == 20_000
    assert seen[0] < 20_000
    assert lab.ask("GET", f"{PATH}/{made}/logs?tail=2", key).body == b"x\nx\n"
    assert lab.ask("GET", f"{PATH}/{made}/logs?tail=0", key).body == b""


def test_streams_of_one_tenancy_share_an_overview(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    key = lab.key()
    made: list[str] = []
    overview = events.make_overview

    def count(request: Any) -> Any:
        made.append(request.principal.tenancy)
        return overview(request)

    monkeypatch.setattr(events, "make_overview", count)
    monkeypatch.setattr(events, "SETTLE", 2.0)
    reconciler = lab.server.reconciler
    assert reconciler
    before, begun = reconciler.signal.count, time.monotonic()
    with contextlib.ExitStack() as all_:
        for one in [all_.enter_context(lab.open("GET", "/v1/overview", key, Accept=STREAM)) for _ in range(16)]:
            assert one.readline() == b"event: overview\n"
            assert one.readline().startswith(b"data: {")
        assert len(made) <= 1 + reconciler.signal.count - before + (time.monotonic() - begun) // events.SETTLE


# health


def test_health_tells_the_dead_from_the_busy() -> None:
    now, problem = 0.0, "the cluster is away"
    health = HealthServer("127.0.0.1", 0, lambda: problem, lambda: now)
    health.start()
    try:

        def ask(path: str, method: str = "GET") -> tuple[int, bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", health.server_port, timeout=60)
            with contextlib.closing(connection):
                connection.request(method, path)
                answer = connection.getresponse()
                return answer.status, answer.read()

        assert ask("/healthz") == (200, b"ok\n")
        assert ask("/readyz") == (503, b"the cluster is away\n")
        problem = ""
        assert ask("/readyz?x=1") == (200, b"ok\n")
        assert ask("/metrics")[0] == ask("/v1/me")[0] == 404
        assert ask("/healthz", "POST")[0] == 501
        now = DEAD + 1
        assert ask("/healthz") == (503, b"no sign of life for 61 s\n")
        assert ask("/readyz")[0] == 503
        health.beat()
        assert ask("/healthz")[0] == 200
    finally:
        health.end()


def test_the_service_gives_signs_of_life(lab: Lab) -> None:
    health = lab.server.health
    assert health
    before = health.last_beat
    wait_for("another", lambda: health.last_beat > before)
    assert probe(lab, "/readyz") == (200, b"ok\n")
    assert time.monotonic() - health.last_beat < DEAD
