"""Several replicas of the service for containers, with one database of PostgreSQL: one keeps, all answer."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
