"""The service for containers: what goes on while it is followed, and what a restart or a failing cluster leaves."""

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from caas_lab import SCHEDULED, SEED, Lab, ended, main_status, make_lab, running
from support.process import wait_for

from ocigpu.tenants.service import events, intake, request, server, web
from ocigpu.tenants.service.cluster import ClusterClient
from ocigpu.tenants.service.reconciler import PARALLEL, ReconcilerPace
from ocigpu.tenants.service.request import TenantRules
from ocigpu.tenants.service.store import CaasStore

PATH = "/v1/containers"
STREAM = "text/event-stream"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with make_lab(tmp_path_factory.mktemp("caas")) as made:
        yield made


@pytest.fixture(scope="module")
def key(lab: Lab) -> str:
    return lab.key()


def events_of(answer: http.client.HTTPResponse) -> Iterator[dict[str, str]]:
    """Yield the events of a stream as an EventSource reads them."""
    found: dict[str, str] = {}
    for raw in answer:
        line = raw.decode().rstrip("\n")
        if line:
            name, _, value = line.partition(":")
            if name:
                found[name] = value.removeprefix(" ")
        elif found:
            if "data" in found:
                yield found
            found = {}


def follow(lab: Lab, key: str, container: str, **headers: str) -> list[dict[str, str]]:
    with lab.open("GET", f"{PATH}/{container}/events", key, **headers) as answer:
        assert answer.headers["content-type"].startswith(STREAM)
        return list(events_of(answer))


def test_the_events_of_a_container_are_followed_to_its_end(lab: Lab, key: str) -> None:
    made = lab.run(key)
    with lab.open("GET", f"{PATH}/{made}/events", key) as answer:
        found = events_of(answer)
        assert json.loads(next(found)["data"])["lifecycle"] == "accepted"
        lab.pod(made)
        lab.set_status(made, **running())
        while json.loads(next(found)["data"])["lifecycle"] != "running":
            pass
        lab.set_status(made, **ended())
        assert [json.loads(one["data"])["lifecycle"] for one in found] == ["finished"]


def test_a_stream_goes_on_where_it_broke(lab: Lab, key: str) -> None:
    made = lab.run(key)
    lab.pod(made)
    lab.set_status(made, **running())
    lab.wait(key, made, "running")
    lab.set_status(made, **ended(3))
    lab.wait(key, made, "failed")
    whole = follow(lab, key, made)
    assert [one["event"] for one in whole] == ["created", *["changed"] * (len(whole) - 1)]
    last = json.loads(whole[-1]["data"])
    assert (last["lifecycle"], last["reason"], last["container"]) == ("failed", "exit_nonzero", made)
    numbers = [int(one["id"]) for one in whole]
    assert numbers == sorted(numbers)
    for number, one in enumerate(whole[:-1]):
        assert follow(lab, key, made, Last_Event_ID=one["id"]) == whole[number + 1 :]
    assert lab.ask("GET", f"{PATH}/{made}/events", key, Last_Event_ID=whole[-1]["id"]).status == 204
    for wrong in ("x", "-1"):
        assert lab.ask("GET", f"{PATH}/{made}/events", key, Last_Event_ID=wrong).body["code"] == "parameter_invalid"


def test_all_events_in_pages_and_as_a_stream(lab: Lab, key: str) -> None:
    lab.add_tenancy("pages")
    mine = lab.key("pages")
    made = [lab.run(mine, tenancy="pages") for _ in range(3)]
    for one in made:  # nothing more happens to them then
        lab.wait(mine, one, "scheduling")
    items: list[Any] = []
    path = "/v1/events?limit=2"
    while path:
        page = lab.ask("GET", path, mine).body
        items += page["items"]
        path = f"/v1/events?limit=2&cursor={page['next_cursor']}" if page["next_cursor"] else ""
    assert [one["container"] for one in items if one["kind"] == "created"] == made
    assert {one["tenancy"] for one in items} == {"pages"}
    with lab.open("GET", f"/v1/events?after={items[0]['id']}", mine, Accept=STREAM) as answer:
        stream = events_of(answer)
        assert [int(next(stream)["id"]) for _ in items[1:]] == [one["id"] for one in items[1:]]
        new = lab.run(mine, tenancy="pages")
        assert json.loads(next(stream)["data"])["container"] == new


def test_waiting_ends_with_what_was_waited_for_or_with_failure(lab: Lab, key: str) -> None:
    made = lab.run(key)
    lab.pod(made)
    answers: list[Any] = []
    waiting = [
        threading.Thread(target=lambda: answers.append(lab.show(key, made, "?wait=running&timeout=100")))
        for _ in range(3)
    ]
    for one in waiting:
        one.start()
    lab.set_status(made, **running())
    for one in waiting:
        one.join(60)
    assert [one["lifecycle"] for one in answers] == ["running"] * 3
    assert lab.show(key, made, "?wait=scheduling")["lifecycle"] == "running"
    assert lab.show(key, made, "?wait=finished&timeout=1")["lifecycle"] == "running"
    lab.set_status(made, **ended(1))
    assert lab.show(key, made, "?wait=finished")["lifecycle"] == "failed"
    for wrong in ("?wait=soon", "?wait=running&timeout=0", "?timeout=x"):
        assert lab.show(key, made, wrong)["code"] == "parameter_invalid"


LINES = [f"2026-11-23T10:02:0{number}.{number}Z line {number}" for number in range(6)]


def logged(lab: Lab, key: str, *lines: str) -> str:
    made = lab.run(key)
    lab.pod(made)
    for line in lines:
        lab.cluster.log("tenant-landon", made.replace("_", "-"), line)
    return made


def read(lab: Lab, key: str, container: str, query: str = "", **headers: str) -> str:
    answer = lab.ask("GET", f"{PATH}/{container}/logs{query}", key, **headers)
    assert answer.status == 200, answer
    return str(answer.body.decode())


def test_logs_are_read_in_part_and_kept_when_the_pod_is_gone(lab: Lab, key: str) -> None:
    made = logged(lab, key, *LINES)
    lab.set_status(made, **running())
    lab.wait(key, made, "running")
    texts = [f"line {number}\n" for number in range(6)]
    for _ in range(2):
        assert read(lab, key, made) == "".join(texts)
        assert read(lab, key, made, "?tail=2") == "".join(texts[-2:])
        assert read(lab, key, made, "?tail=0") == ""
        assert read(lab, key, made, "?since=2026-11-23T10:02:03Z") == "".join(texts[3:])
        assert read(lab, key, made, "?timestamps=1") == "".join(f"{line}\n" for line in LINES)
        lab.set_status(made, **ended())
        lab.wait(key, made, "finished")
        lab.cluster.logs.clear()  # the node has removed its files
    for wrong in ("?since=yesterday", "?tail=-1", "?follow=maybe", "?tail=1&tail=2"):
        assert lab.ask("GET", f"{PATH}/{made}/logs{wrong}", key).body["code"] == "parameter_invalid"


def test_a_followed_log_goes_on_after_the_line_that_was_read(lab: Lab, key: str) -> None:
    same = [f"2026-11-23T10:02:09Z part {number}" for number in range(3)]  # of one moment
    made = logged(lab, key, *LINES[:3])
    name = made.replace("_", "-")
    lab.set_status(made, **running())
    with lab.open("GET", f"{PATH}/{made}/logs?follow=1", key, Accept=STREAM) as answer:
        found = events_of(answer)
        seen = [next(found) for _ in range(3)]
        lab.cluster.log("tenant-landon", name, same[0])
        seen.append(next(found))
    for line in same[1:]:
        lab.cluster.log("tenant-landon", name, line)
    lab.set_status(made, **ended())
    lab.wait(key, made, "finished")
    with lab.open("GET", f"{PATH}/{made}/logs?follow=1", key, Accept=STREAM, Last_Event_ID=seen[-1]["id"]) as answer:
        seen += events_of(answer)
    assert [one["data"] for one in seen] == ["line 0", "line 1", "line 2", "part 0", "part 1", "part 2", ""]
    assert seen[-1]["event"] == "end"
    assert len({one["id"] for one in seen[:-1]}) == 6


def test_a_log_is_followed_from_before_the_container_runs(lab: Lab, key: str) -> None:
    made = lab.run(key)
    lab.pod(made)
    with lab.open("GET", f"{PATH}/{made}/logs?follow=1", key) as answer:
        lab.cluster.log("tenant-landon", made.replace("_", "-"), LINES[0])
        lab.set_status(made, **running())
        assert answer.readline() == b"line 0\n"
        lab.set_status(made, **ended())
        assert answer.read() == b""
    assert read(lab, key, lab.run(key)) == ""


def test_one_credential_has_so_many_streams(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "MAX_STREAMS", 2)
    key = lab.key()
    made = lab.run(key)
    first, second = (lab.open("GET", f"{PATH}/{made}/events", key) for _ in range(2))
    assert first.readline()
    assert second.readline()
    assert lab.ask("GET", f"{PATH}/{made}/events", key).body["code"] == "too_many_streams"
    first.close()
    second.close()
    # the service notices when it next has something to say
    lab.set_status(made, **running())
    wait_for("a place", lambda: lab.ask("GET", f"{PATH}/{made}?wait=running", key).status == 200)


def test_a_stream_ends_with_its_key(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEEP_ALIVE", 0.05)
    key = lab.key()
    number = lab.ask("GET", "/v1/me", key).body["actor"].partition(":")[2]
    with lab.open("GET", "/v1/events", key, Accept=STREAM) as answer:
        assert answer.readline()
        assert lab.server.store.keys.revoke(number)
        answer.read()  # comes to its end


def test_who_waits_is_told_nothing_once_the_key_is_revoked(lab: Lab) -> None:
    key = lab.key()
    number = lab.ask("GET", "/v1/me", key).body["actor"].partition(":")[2]
    made = lab.run(key)
    answers: list[Any] = []
    wanted = f"{PATH}/{made}?wait=running&timeout=60"
    reconciler = lab.server.reconciler
    assert reconciler
    others = reconciler.signal.listeners
    waiting = threading.Thread(target=lambda: answers.append(lab.ask("GET", wanted, key)))
    waiting.start()
    wait_for("a subscriber", lambda: reconciler.signal.listeners > others)
    assert lab.server.store.keys.revoke(number)
    lab.set_status(made, **running())
    waiting.join()
    assert (answers[0].status, answers[0].body["code"]) == (401, "credential_invalid")


def test_a_followed_log_ends_with_its_key(lab: Lab) -> None:
    key = lab.key()
    number = lab.ask("GET", "/v1/me", key).body["actor"].partition(":")[2]
    made = logged(lab, key, LINES[0])
    lab.set_status(made, **running())
    with lab.open("GET", f"{PATH}/{made}/logs?follow=1", key) as answer:
        assert answer.readline() == b"line 0\n"
        assert lab.server.store.keys.revoke(number)
        lab.cluster.log("tenant-landon", made.replace("_", "-"), LINES[1])
        assert answer.read() == b""


def test_a_tenancy_whose_cluster_is_slow_holds_up_itself_only(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.add_tenancy("slow")
    reconciler = lab.server.reconciler
    assert reconciler
    create, released = reconciler.cluster.create, threading.Event()
    stuck: list[str] = []

    async def slowly(document: Any) -> bool:
        if document["metadata"]["namespace"] == "tenant-slow":
            stuck.append(document["metadata"]["name"])
            while not released.is_set():
                await asyncio.sleep(0.02)
        return await create(document)

    monkeypatch.setattr(reconciler.cluster, "create", slowly)
    slow = lab.key("slow")
    made = [lab.ask("POST", PATH, slow, {"image": "nvcr.io/x"}).body["id"] for _ in range(20)]
    wait_for("the slow ones", lambda: len(stuck) == PARALLEL)
    key = lab.key()
    quick = lab.run(key)
    lab.pod(quick)
    assert len(stuck) == PARALLEL
    released.set()
    lab.pod(made[-1], "slow")


def test_a_request_that_takes_longer_than_the_end_of_the_service_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ocigpu.tenants.service.server.GRACE", 1)
    with make_lab(tmp_path) as lab:
        assert lab.server.reconciler
        asked, answers = threading.Event(), list[Any]()

        async def never(_name: str) -> None:
            asked.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(lab.server.reconciler.cluster, "read_tenancy", never)
        key = lab.key()
        client = threading.Thread(target=lambda: answers.append(lab.ask("POST", PATH, key, SEED)))
        client.start()
        assert asked.wait(60)
        lab.server.stop()
        client.join()
        assert [(one.status, one.body["code"]) for one in answers] == [(503, "stopping")]


def test_a_body_that_does_not_come_is_refused(lab: Lab, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "BODY_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", lab.server.port), timeout=60) as connection:
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 10\r\n\r\n{{".encode())
        assert b" 408 " in connection.recv(4096)


def test_one_tenancy_has_so_many_requests(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.add_tenancy("crowded")  # nobody who has just gone has its place
    first, second = (lab.key("crowded") for _ in range(2))
    made = lab.run(first, tenancy="crowded")
    monkeypatch.setattr(web, "MAX_REQUESTS", 1)
    with lab.open("GET", f"{PATH}/{made}/events", first) as answer:
        assert answer.readline()
        assert lab.ask("GET", "/v1/me", second).body["code"] == "too_many_requests"
        assert lab.ask("GET", "/v1/me", lab.key("another")).status == 200


def test_another_tenancys_pod_says_nothing_of_a_container_by_its_labels(lab: Lab, key: str) -> None:
    made = lab.run(key)
    labels = lab.pod(made)["metadata"]["labels"]
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "tenant-mallory"}}
    lab.cluster.create(space)
    metadata = {"name": "forged", "namespace": "tenant-mallory", "labels": labels}
    spec = {"containers": [{"name": "main", "image": "x"}]}
    lab.cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    lab.cluster.patch("Pod", "forged", {"status": ended(3)}, "tenant-mallory", sub="status")
    other = lab.run(key)
    for status, lifecycle in ((running(), "running"), (ended(), "finished")):  # told after it, by the same watch
        lab.set_status(other, **status)
        lab.wait(key, other, lifecycle)
    assert lab.show(key, made)["lifecycle"] == "scheduling"


def test_a_log_of_very_many_lines_holds_nobody_up(lab: Lab, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = logged(lab, key)
    reconciler = lab.server.reconciler
    assert reconciler

    async def read_log(*_: Any) -> AsyncIterator[str]:
        for number in range(300_000):
            yield f"2026-11-23T10:02:00Z {number:011}"

    monkeypatch.setattr(reconciler.cluster, "read_log", read_log)
    container = lab.server.store.find(made)
    assert container
    before = time.process_time()
    asyncio.run(reconciler.keep_log(container))
    assert time.process_time() - before < 10  # not a minute: each line costs the same
    kept = lab.server.store.read_log(made)
    assert kept
    assert (len(kept) + 32 >> 22, kept[-12:]) == (1, b"00000299999\n")


def open_in_time(lab: Lab, path: str, key: str) -> http.client.HTTPResponse:
    """Open a stream; a machine that stops for a while may take the time of a request away."""
    found: list[http.client.HTTPResponse] = []

    def is_answered() -> bool:
        with contextlib.suppress(ConnectionError):
            found.append(lab.open("GET", path, key))
        return bool(found)

    wait_for("an answer", is_answered)
    return found[0]


def test_a_request_that_does_not_come_ends_its_connection(lab: Lab, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = lab.run(key)
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.1)
    place = ("127.0.0.1", lab.server.port)
    whole = b"GET /v1/openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
    with open_in_time(lab, f"{PATH}/{made}/events", key) as answer:
        assert answer.readline()
        for before in (b"", whole):
            with socket.create_connection(place, timeout=30) as slow:
                slow.sendall(before + b"GET /v1/me HT")
                with contextlib.suppress(ConnectionResetError):
                    while slow.recv(1 << 16):
                        pass
        lab.pod(made)
        lab.set_status(made, **ended())
        assert b'"finished"' in answer.read()  # who is answered is not disturbed


def _is_closed(one: socket.socket) -> bool:
    try:
        while one.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def test_strangers_have_their_room_and_no_more(lab: Lab, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.server.listening_socket, "most", 8)
    made = lab.run(key)
    flood = []
    with lab.open("GET", f"{PATH}/{made}/events", key) as answer, contextlib.ExitStack() as all_:
        assert answer.readline()
        for number in range(40):
            one = all_.enter_context(socket.create_connection(("127.0.0.1", lab.server.port)))
            if number % 2:
                one.sendall(b"GET /v1/me HT")
            one.setblocking(False)
            flood.append(one)
        wait_for("the first of them to go", lambda: all(_is_closed(one) for one in flood[:32]))
        assert not any(_is_closed(one) for one in flood[33:])
        assert lab.ask("GET", "/v1/me", key).status == 200
        lab.pod(made)
        lab.set_status(made, **ended())
        assert b'"finished"' in answer.read()  # longer there than any of them


def test_an_answer_that_a_stranger_does_not_read_ends_his_connection(
    lab: Lab, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.2)
    serving = lab.server.uvicorn_server
    assert serving
    connections = serving.server_state.connections
    before = set(connections)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", lab.server.port))
        slow.settimeout(1)
        with contextlib.suppress(TimeoutError, ConnectionError):  # until nothing fits into the buffers of both sides
            while True:
                slow.sendall(b"GET /v1/openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        wait_for("the connection to end", lambda: not set(connections) - before)


# what a restart leaves


def test_after_a_restart_the_same_key_gives_the_same_container(tmp_path: Path) -> None:
    with make_lab(tmp_path) as lab:
        key = lab.key()
        body = {**SEED, "secrets": {"TOKEN": "hidden-value"}}
        first = lab.ask("POST", PATH, key, body, Idempotency_Key='"k-1"')
        assert "idempotency-replayed" not in first.headers
        lab.pod(first.body["id"])
        lab.stop()
        lab.start()
        again = lab.ask("POST", PATH, key, body, Idempotency_Key="k-1")
        assert (again.status, again.body["id"]) == (202, first.body["id"])
        assert again.headers["idempotency-replayed"] == "true"
        assert again.headers["location"] == first.headers["location"]
        other = lab.ask("POST", PATH, key, {**body, "gpus": 2}, Idempotency_Key="k-1")
        assert (other.status, other.body["code"]) == (422, "idempotency_key_reused")
        assert lab.ask("POST", PATH, key, body, Idempotency_Key="k-2").body["id"] != first.body["id"]
        # what happened meanwhile is read from the pod
        lab.stop()
        lab.set_status(first.body["id"], **ended(2))
        lab.start()
        assert lab.wait(key, first.body["id"], "failed")["exit_code"] == 2


@pytest.mark.parametrize("limit", range(3))
def test_a_container_that_was_stored_and_not_made_is_made_after_the_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """Ended before each object, and after the last one before that was noted."""
    create, made = ClusterClient.create, []

    async def crash(self: ClusterClient, document: Any) -> bool:
        if len(made) >= limit:
            raise RuntimeError("killed here")
        made.append(document["kind"])
        return await create(self, document)

    def crash_too(_store: CaasStore, _container: str) -> None:
        raise RuntimeError("killed here")

    with make_lab(tmp_path) as lab, monkeypatch.context() as patched:
        patched.setattr(ClusterClient, "create", crash)
        patched.setattr(CaasStore, "note_made", crash_too)
        container = lab.run(lab.key(), secrets={"TOKEN": "hidden-value"})
        wait_for("the crash", lambda: any("killed here" in line for _, line in lab.lines))
        lab.stop()
        patched.undo()
        assert set(made) == {*["Secret", "Pod"][:limit]}
        lab.start()
        wait_for("the pod", lambda: lab.server.store.find(container).made)
        pods = [one["metadata"]["name"] for one in lab.cluster.objects("Pod")]
        assert pods == [container.replace("_", "-")]
        (secret,) = (one for one in lab.cluster.objects("Secret") if one["metadata"]["name"] == pods[0])
        assert secret["stringData"] == {"TOKEN": "hidden-value"}
        assert lab.server.store.find(container).secrets is None


def test_the_cluster_may_be_away_when_a_pod_is_to_be_made(lab: Lab, key: str) -> None:
    lab.cluster.fail(3, 0, "POST", "/pods$")
    made = lab.run(key)
    lab.pod(made)
    lab.cluster.fail(2, 503, "POST", "/pods$")
    lab.pod(lab.run(key))
    reasons = [one.reason for one in lab.server.store.events.after(0, "", made)]
    assert "cluster_unavailable" in reasons


def test_watches_that_break_and_versions_that_are_too_old(lab: Lab, key: str) -> None:
    made = lab.run(key)
    lab.pod(made)
    lab.cluster.drop_watches()
    lab.set_status(made, phase="Pending", conditions=SCHEDULED, containerStatuses=main_status(waiting={}))
    lab.wait(key, made, "booting")
    lab.cluster.expire()
    lab.cluster.drop_watches()
    lab.set_status(made, **running())
    lab.wait(key, made, "running")
    wait_for("readiness", lambda: lab.ask("GET", "/readyz").status == 200)


def test_a_secret_that_a_container_printed_is_in_its_log_alone(lab: Lab, key: str) -> None:
    """With the last lines in the pod's status, as the kubelet would put them there for whoever asks it to."""
    made = lab.run(key)
    name = lab.pod(made)["metadata"]["name"]
    lab.cluster.log("tenant-landon", name, "2026-11-23T10:02:01Z token=s3cret: error 802")
    lab.set_status(made, **ended(1, message="token=s3cret: error 802"))
    assert lab.wait(key, made, "failed")["reason"] == "cuda_fabric_not_ready"
    reader = lab.key("landon", "containers:read")
    seen = [lab.ask("GET", path, reader).body for path in (f"{PATH}/{made}", "/v1/events?limit=200", "/v1/overview")]
    assert "s3cret" not in json.dumps(seen)

    def told() -> list[dict[str, Any]]:
        return lab.cluster.objects("Event", "events.k8s.io/v1")

    wait_for("its event", lambda: any(one["regarding"]["name"] == name for one in told()))
    wait_for("its end to be told", lambda: "CudaFabricNotReady" in str(told()))
    assert "s3cret" not in str(told())
    assert lab.ask("GET", f"{PATH}/{made}/logs", reader).body["code"] == "scope_missing"
    assert "s3cret" in lab.ask("GET", f"{PATH}/{made}/logs", key).body.decode()


def test_a_pod_that_went_with_its_node_is_told(lab: Lab, key: str) -> None:
    """Where nobody marked it before it was removed."""
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}
    lab.cluster.create(node)
    made = lab.run(key)
    lab.bind(made)
    lab.set_status(made, **running())
    assert lab.wait(key, made, "running")["node"] == "n1"
    reconciler = lab.server.reconciler
    assert reconciler
    wait_for("the node to be seen", lambda: not reconciler.is_gone("n1"))
    lab.cluster.delete("Node", "n1")
    wait_for("the node to be gone", lambda: reconciler.is_gone("n1"))
    lab.cluster.delete("Pod", made.replace("_", "-"), "tenant-landon", gracePeriodSeconds=0)
    assert lab.wait(key, made, "failed")["reason"] == "node_lost"


def test_events_are_watched_once_for_all(lab: Lab, key: str) -> None:
    """However many containers start: nobody asks for each of them, and what is told is seen without asking."""
    made = [lab.run(key) for _ in range(4)]
    for one in made:
        lab.pod(one)
        lab.set_status(one, phase="Pending", conditions=SCHEDULED)
        lab.wait(key, one, "booting")
    reconciler = lab.server.reconciler
    assert reconciler
    before = len(lab.cluster.requests)
    for number, one in enumerate(made):
        name = one.replace("_", "-")
        about = {"kind": "Pod", "name": name, "namespace": "tenant-landon"}
        head = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": f"{name}.1", "namespace": "tenant-landon"}}
        for forged in ({**about, "kind": "Node"}, {**about, "name": "ctr-other"}):
            metadata = {"name": f"{name}.{forged['kind'].lower()}", "namespace": "tenant-landon"}
            lab.cluster.create({**head, "metadata": metadata, "reason": "FailedMount", "involvedObject": forged})
        lab.cluster.create({**head, "reason": "FailedMount", "message": f"export {number}", "involvedObject": about})
    for number, one in enumerate(made):
        wait_for("its reason", lambda one=one: lab.show(key, one)["reason"] == "volume_mount_failed")
        assert lab.show(key, one)["detail"] == f"export {number}"
    asked = [path for method, path in lab.cluster.requests[before:] if method == "GET" and path.endswith("/events")]
    assert len(asked) <= 1  # the watch, if it begins again
    name = made[0].replace("_", "-")
    lab.cluster.delete("Event", f"{name}.1", "tenant-landon")
    wait_for("the hour to be over", lambda: ("tenant-landon", name) not in reconciler.pod_events)


def test_a_pod_that_somebody_removed_is_told(lab: Lab, key: str) -> None:
    made = lab.run(key)
    lab.pod(made)
    lab.set_status(made, **running())
    lab.wait(key, made, "running")
    lab.cluster.delete("Pod", made.replace("_", "-"), "tenant-landon", gracePeriodSeconds=0)
    found = lab.wait(key, made, "failed")
    assert (found["reason"], found["finished"] is not None) == ("pod_lost", True)


def test_what_the_clusters_policies_refuse_has_failed_and_leaves_nothing(lab: Lab, key: str) -> None:
    lab.cluster.fail(1, 403, "POST", "/pods$")
    made = lab.run(key, secrets={"A": "b"})
    found = lab.wait(key, made, "failed")
    assert (found["reason"], found["detail"]) == ("admission_denied", "answer 403 of the tests")
    assert not lab.cluster.exists("Secret", made.replace("_", "-"), "tenant-landon")


def test_what_has_ended_goes_after_a_time(tmp_path: Path) -> None:
    with make_lab(tmp_path, keep_seconds=0.0) as lab:
        key = lab.key()
        made = lab.run(key)
        lab.set_status(made, **ended())
        wait_for("its end", lambda: lab.ask("GET", f"{PATH}/{made}", key).status == 404)
        assert lab.cluster.objects("Pod") == []


def test_a_pod_that_has_ended_leaves_the_cluster_and_its_container_is_told_of_all_the_same(tmp_path: Path) -> None:
    """Also with what it used, and also what had ended before the service was started anew; one that runs stays."""
    with make_lab(tmp_path, rules=TenantRules(exports=("nfs.example:/exports",))) as lab:
        key = lab.key()
        mount = {"type": "nfs", "server": "nfs.example", "path": "/exports", "target": "/data"}
        made, running_one = lab.run(key, secrets={"A": "b"}, mounts=[mount]), lab.run(key)
        lab.bind(made)
        lab.set_status(running_one, **running())
        name = made.replace("_", "-")
        lab.cluster.logs["tenant-landon", name] = ["2026-11-23T10:02:01Z Test PASSED"]
        lab.set_status(made, **ended())
        lab.wait(key, made, "finished")
        assert lab.cluster.exists("Pod", name, "tenant-landon")
        lab.stop()
        lab.options["pod_seconds"] = 0.0
        lab.start()
        wait_for("its pod's end", lambda: len(lab.cluster.objects("Pod")) == 1)
        others = ("Secret", "PersistentVolumeClaim", "PersistentVolume")
        wait_for("all objects' end", lambda: not any(lab.cluster.objects(kind) for kind in others))
        (left,) = lab.cluster.objects("Pod")
        assert left["metadata"]["name"] == running_one.replace("_", "-")
        assert lab.show(key, made)["lifecycle"] == "finished"
        assert lab.ask("GET", f"{PATH}/{made}/logs", key).body == b"Test PASSED\n"
        assert lab.ask("DELETE", f"{PATH}/{made}", key).status == 202
        wait_for("its end", lambda: lab.ask("GET", f"{PATH}/{made}", key).status == 404)


def test_a_tenancys_keys_and_containers_go_with_it(tmp_path: Path) -> None:
    with make_lab(tmp_path, pace=ReconcilerPace(0.2, 0.02, 0.2, 0.2, 0.05)) as lab:
        key = lab.key()
        made = lab.run(key)
        lab.pod(made)
        lab.cluster.delete("Tenancy", "landon")
        wait_for("its keys' end", lambda: lab.ask("GET", "/v1/me", key).status == 401)
        head = {"apiVersion": "ocigpu.io/v1alpha1", "kind": "Tenancy", "metadata": {"name": "landon"}}
        lab.cluster.create({**head, "spec": {}})
        assert lab.ask("GET", f"{PATH}/{made}", lab.key()).status == 404
