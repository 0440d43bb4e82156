"""Several replicas of the service for containers, with one database of PostgreSQL: one keeps, all answer."""

import contextlib
import http.client
import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from caas_lab import SEED, TENANCY_TYPE, Lab, ended, running
from caas_storm import storm
from support import requirements
from support.cluster import Cluster
from support.postgresql import Postgres, find_postgres, postgres
from support.process import wait_for

from ocigpu.tenants.service.postgresql import KEEP_LOCK
from ocigpu.tenants.service.request import STREAM

PATH = "/v1/containers"


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    requirements.require("" if find_postgres() else "not installed: postgresql")
    with postgres() as made:
        yield made


@pytest.fixture
def labs(server: Postgres, tmp_path: Path) -> Iterator[tuple[Lab, Lab]]:
    """Two replicas, of which the first keeps containers."""
    url = server.make_database()
    with Cluster() as cluster:
        cluster.create(TENANCY_TYPE)
        made = []
        try:
            for name in ("first", "second"):
                (tmp_path / name).mkdir()
                lab = Lab(cluster, tmp_path / name, store=url)
                lab.start()
                made.append(lab)
                wait_for("the first to keep", lambda: keeps(made[0]))
            made[0].add_tenancy()
            yield made[0], made[1]
        finally:
            for lab in made:
                if lab.server.uvicorn_server and not lab.server.uvicorn_server.should_exit:
                    lab.stop()


def keeps(lab: Lab) -> bool:
    assert lab.server.reconciler
    return lab.server.reconciler.is_keeping


def follow(lab: Lab, key: str, container: str, count: int, **headers: str) -> list[tuple[int, str]]:
    """Return number and lifecycle of the next events of a container."""
    found: list[tuple[int, str]] = []
    with lab.open("GET", f"{PATH}/{container}/events", key, Accept=STREAM, **headers) as answer:
        while len(found) < count:
            line = answer.readline()
            assert line, found
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                found.append((event["id"], event["lifecycle"]))
    return found


def test_any_replica_answers_and_streams_resume_anywhere(labs: tuple[Lab, Lab]) -> None:
    first, second = labs
    key = second.key()
    made = second.run(key)
    first.bind(made)
    first.set_status(made, **running())
    begun = follow(second, key, made, 3)
    assert [lifecycle for _, lifecycle in begun] == ["accepted", "scheduling", "running"]
    assert follow(first, key, made, 2, Last_Event_ID=str(begun[0][0])) == begun[1:]
    assert not keeps(second)
    first.stop()
    wait_for("the second to keep", lambda: keeps(second))
    second.set_status(made, **ended())
    assert follow(second, key, made, 1, Last_Event_ID=str(begun[-1][0]))[0][1] == "finished"
    assert second.wait(key, made, "finished")["exit_code"] == 0


def test_a_deletion_at_one_replica_is_done_by_the_other(labs: tuple[Lab, Lab]) -> None:
    first, second = labs
    key = first.key()
    made = first.run(key, secrets={"A": "b"})
    first.pod(made)
    assert second.ask("DELETE", f"{PATH}/{made}", key).status == 202
    for lab in labs:
        wait_for("its end", lambda one=lab: one.ask("GET", f"{PATH}/{made}", key).status == 404)
    assert not first.cluster.objects("Pod")
    assert not first.cluster.objects("Secret")


def test_one_key_at_both_at_once_makes_one_container(labs: tuple[Lab, Lab]) -> None:
    key, ids = labs[0].key(), list[Any]()
    begin = threading.Barrier(8)

    def ask(lab: Lab) -> None:
        begin.wait()
        for number in range(5):
            while True:
                answer = lab.ask("POST", PATH, key, SEED, Idempotency_Key=f'"k{number}"')
                if answer.status != 409:
                    break
                assert answer.body["code"] == "idempotency_in_flight"
            ids.append((number, answer.status, answer.body["id"]))

    threads = [threading.Thread(target=ask, args=(labs[number % 2],)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 40
    assert len(set(ids)) == 5, "status 202 and the same container each time"
    assert len(labs[0].server.store.list_containers("")) == 5


def test_limits_and_quotas_hold_for_all_replicas_together(labs: tuple[Lab, Lab]) -> None:
    for lab in labs:
        lab.server.store.limits = lab.server.store.limits._replace(containers=5)
    key, statuses = labs[0].key(), list[int]()
    begin = threading.Barrier(8)

    def ask(lab: Lab) -> None:
        begin.wait()
        statuses.extend(lab.ask("POST", PATH, key, SEED).status for _ in range(2))

    threads = [threading.Thread(target=ask, args=(labs[number % 2],)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses.count(202) == 5, statuses


def test_a_keeper_that_loses_its_session_keeps_no_more(labs: tuple[Lab, Lab], server: Postgres) -> None:
    first, second = labs
    key = first.key()
    name = first.store.partition("@/")[2].partition("?")[0]
    held = (
        "select pg_terminate_backend(pid) from pg_locks join pg_database on oid = database"
        f" where locktype = 'advisory' and granted and datname = '{name}' and objid = {KEEP_LOCK & 0xFFFFFFFF}"
    )
    for number in range(3):
        keeper, other = (first, second) if keeps(first) else (second, first)
        assert server.do(held) == [(True,)]
        made = other.run(key, gpus=1)
        keeper.pod(made)
        wait_for("one keeper", lambda: [keeps(lab) for lab in labs].count(True) == 1)
        assert len(first.cluster.objects("Pod")) == number + 1


def test_a_database_that_is_away_is_told_and_used_again(labs: tuple[Lab, Lab], server: Postgres) -> None:
    first, second = labs
    key = first.key()
    server.stop()
    try:
        answer = first.ask("GET", PATH, key)
        assert (answer.status, answer.body["code"]) == (503, "store_unavailable")
        assert answer.headers["retry-after"]
        assert first.ask("GET", "/healthz").status == 200
        wait_for("nobody to keep", lambda: not keeps(first) and not keeps(second))
    finally:
        server.start()
    wait_for("an answer", lambda: second.ask("GET", PATH, key).status == 200)
    made = second.run(key)
    second.pod(made)
    wait_for("one keeper", lambda: keeps(first) != keeps(second))
    assert not [line for lab in labs for _, line in lab.lines if "OCIGPU-INT" in line or "ExceptionGroup" in line]


def test_a_keeper_that_waits_for_the_database_answers_requests(
    labs: tuple[Lab, Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, key = labs[0], labs[0].key()
    assert keeper.server.reconciler
    held, begun, go_on = keeper.server.reconciler.store, threading.Event(), threading.Event()
    note_made = held.note_made

    def note_later(container: str) -> None:
        begun.set()
        assert go_on.wait(60)
        note_made(container)

    monkeypatch.setattr(held, "note_made", note_later)
    made = keeper.run(key)
    try:
        assert begun.wait(60)
        assert keeper.ask("GET", f"{PATH}/{made}", key).body["lifecycle"] == "accepted"
    finally:
        go_on.set()
    keeper.wait(key, made, "scheduling")


class Service:
    """A Service of the cluster, to clients that send each request once, over a connection of its own.

    ``endpoints``: ports of replicas; ``open``: requests of each that were sent there and are not answered.
    """

    def __init__(self, ports: list[int], path: str, key: str) -> None:
        self.endpoints, self.open = list(ports), dict.fromkeys(ports, 0)
        self.statuses: list[int | str] = []
        self._path, self._key, self._lock, self._over = path, key, threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._be_a_client, args=(number,)) for number in range(4)]

    def _be_a_client(self, number: int) -> None:
        while not self._over.is_set():
            with self._lock:
                port = self.endpoints[number % len(self.endpoints)]
                self.open[port] += 1
            self.statuses.append(ask_once(port, self._path, self._key))
            with self._lock:
                self.open[port] -= 1

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def send(port: int, path: str, key: str) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers={"Authorization": f"Bearer {key}"})
    return connection


def ask_once(port: int, path: str, key: str) -> int | str:
    """Return a status, or why there is none."""
    try:
        with contextlib.closing(send(port, path, key)) as connection:
            return connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return repr(error)


def test_an_update_loses_no_request(server: Postgres, tmp_path: Path) -> None:
    """What the chart's pause is for: first connections end to come, then SIGTERM comes, while one request waits."""
    with storm(tmp_path, server.make_database(), replicas=2, tenancies=1) as made:
        replicas, (key,) = made.replicas, made.keys.values()
        status, container = replicas.ask("POST", PATH, key, {**SEED, "tenancy": "tenant0"})
        assert status == 202
        with Service(replicas.ports, PATH, key) as service:
            for number, port in enumerate(replicas.ports):
                with contextlib.closing(send(port, f"{PATH}/{container['id']}?wait=finished&timeout=300", key)) as late:
                    seen = len(service.statuses)
                    wait_for("requests after it", lambda count=seen: len(service.statuses) > count + 20)
                    service.endpoints.remove(port)
                    wait_for("the last of them", lambda one=port: not service.open[one])
                    replicas.children[number].send_signal(signal.SIGTERM)
                    assert late.getresponse().status == 200
                assert replicas.children[number].wait(60) == 0
                assert "ConnectionRefused" in str(ask_once(port, PATH, key)), "what is still sent there would be lost"
                replicas.start(number)
                wait_for("the new one", lambda one=number: replicas.is_ready(one), 120)
                service.endpoints.append(port)
        assert set(service.statuses) == {200}


@pytest.mark.rest
@pytest.mark.timeout(1800)
def test_replicas_killed_at_any_moment_lose_and_double_nothing(
    server: Postgres, tmp_path: Path, times: Callable[[int], int]
) -> None:
    """Of 100 clients' containers; all replicas are updated one by one meanwhile, too."""
    containers = times(1000)
    with storm(tmp_path, server.make_database()) as made:
        made.run(containers, 100, 2.0)
        made.check(containers)
        assert made.replicas.kills
