"""The store of the service for containers, in SQLite and in PostgreSQL: the same tests for both."""

import contextlib
import json
import os
import re
import shlex
import sqlite3
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from support import requirements
from support.postgresql import Postgres, find_postgres, postgres
from support.process import run, wait_for
from support.product import REPOSITORY

from ocigpu.cli.front.main import main
from ocigpu.core.errors import HostError
from ocigpu.tenants.service import migrations, tables
from ocigpu.tenants.service.containers import view
from ocigpu.tenants.service.database import FILE, cause_of
from ocigpu.tenants.service.lifecycle import ContainerStanding
from ocigpu.tenants.service.store import (
    MAX_FORGOTTEN,
    CaasStore,
    KeyTakenError,
    StoreFullError,
    StoreLimits,
    new_id,
)

ACCEPTED = 1795428000.0
"""2026-11-23T10:00:00Z"""
OLD = Path(__file__).with_name("caas_store")
"""The statements of the versions before Alembic, as they were."""
REQUEST = {
    "image": "nvcr.io/x:1", "gpus": 1, "cpus": None, "memory": None, "command": [], "args": [], "env": {}, "mounts": [],
    "restart": "never", "secrets": [], "has_pull_credentials": False, "timeout_seconds": 86400,
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    requirements.require("" if find_postgres() else "not installed: postgresql")
    with postgres() as made:
        yield made


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new store: a directory, or the URL of a database."""
    if request.param == "sqlite":
        return str(tmp_path)
    made: Postgres = request.getfixturevalue("server")
    return made.make_database()


def name_of(url: str) -> str:
    return url.partition("@/")[2].partition("?")[0]


def store_of(place: str | Path, now: list[float]) -> CaasStore:
    return CaasStore(str(place), clock=lambda: now[0])


def add(store: CaasStore, tenancy: str = "landon", **more: Any) -> str:
    return store.add(tenancy, {**REQUEST, **more}, {}).id


def test_ids_sort_by_time() -> None:
    made = [new_id("ctr", ACCEPTED + number) for number in range(50)]
    assert made == sorted(made)
    assert len(made[0]) == 30


def test_a_key_is_kept_as_a_hash_and_ends(place: str, tmp_path: Path) -> None:
    now = [ACCEPTED]
    store = store_of(place, now)
    key, kept = store.keys.add("landon", ["containers:read"], "x", ACCEPTED + 60)
    assert store.keys.check(key) == kept
    secret = key.rpartition("_")[2] if key.count("_") == 2 else key.split("_", 2)[2]
    files = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    rows = store.database.read(sa.select(tables.keys))
    assert secret.encode() not in files + str(rows).encode()
    wrong = ("", "ocigpu_", "ocigpu_x_y", "ocigpu_\0_\0", key[:-1], key + "x", key.replace(kept.id, "0" * 12))
    assert [store.keys.check(one) for one in wrong] == [None] * len(wrong)
    now[0] += 60
    assert store.keys.check(key) is None
    other, kept = store.keys.add(None, ["admin"], "y", None)
    assert store.keys.revoke(kept.id)
    assert store.keys.check(other) is None
    assert not store.keys.revoke("none")
    store.close()


def test_the_values_of_secrets_go_once_they_are_in_the_cluster(tmp_path: Path) -> None:
    store = store_of(tmp_path, [ACCEPTED])
    made = store.add("landon", REQUEST, {"TOKEN": "very-s3cret"}, "key", b"body")
    assert made.secrets == {"TOKEN": "very-s3cret"}
    store.note_made(made.id)
    store.close()
    files = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"very-s3cret" not in files
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0


def test_the_values_of_secrets_leave_every_file_of_the_store(tmp_path: Path) -> None:
    """The log of changes too, at once; where somebody else reads the store, as soon as nobody does."""
    store = CaasStore(str(tmp_path), serving=True)

    def left(text: str = "very-s3cret") -> list[str]:
        return [one.name for one in tmp_path.iterdir() if text.encode() in one.read_bytes()]

    def add() -> str:
        return store.add("landon", REQUEST, {"TOKEN": "very-s3cret"}).id

    made = add()
    assert left()
    store.note_made(made)
    assert left() == []
    failed = add()
    store.note_standing(failed, ContainerStanding("failed", "admission_denied"))
    assert left() == []
    gone = add()
    store.note_deleting(gone)
    store.note_gone(gone)
    assert left() == []
    with contextlib.closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as reader:
        reader.execute("begin")
        reader.execute("select count(*) from keys").fetchall()
        busy = add()
        store.note_made(busy)
        assert left()
        reader.execute("rollback")
    store.forget()
    assert left() == []
    store.keep_log(busy, b"printed by a tenant")
    assert left("printed by a tenant")
    store.note_deleting(busy)
    store.note_gone(busy)
    store.forget()
    assert left("printed by a tenant") == []
    later = add()
    store.note_made(later)
    store.database.unclean = True
    store.close()
    CaasStore(str(tmp_path), serving=True).close()
    assert left() == []


def test_container_and_idempotency_key_are_remembered_together(place: str) -> None:
    now = [ACCEPTED]
    store = store_of(place, now)
    made = store.add("landon", REQUEST, {}, "key", b"body")
    store.close()
    store = store_of(place, now)
    assert store.replay("landon", "key", b"body") == (made.id, True)
    assert store.replay("landon", "key", b"other") == (made.id, False)
    assert store.replay("other", "key", b"body") is None
    now[0] += 86401
    assert store.replay("landon", "key", b"body") is None
    store.forget()
    assert store.find(made.id)
    store.note_gone(made.id)
    store.forget()
    assert store.find_any(made.id) is None
    store.close()


def test_a_tenancy_has_so_many_containers_and_bytes_and_the_oldest_that_ended_go_first(place: str) -> None:
    now = [ACCEPTED]
    store = CaasStore(place, clock=lambda: now[0], limits=StoreLimits(3, 20_000))

    def add(tenancy: str = "landon", size: int = 100, key: str = "") -> tuple[str, list[str]]:
        now[0] += 1
        ended = store.make_room(tenancy, size)
        return store.add(tenancy, {**REQUEST, "args": ["x" * size]}, {}, key, b"").id, ended

    first, second, third = (add(key=str(number))[0] for number in range(3))
    for _ in range(2):
        with pytest.raises(StoreFullError):
            add()
    assert add("other")[1] == []
    store.note_standing(second, ContainerStanding("finished"))
    store.note_standing(first, ContainerStanding("failed"))
    fourth, ended = add()
    assert ended == [first]
    found = store.find(first)
    assert found
    assert found.deleting
    assert store.replay("landon", "0", b"")
    store.note_gone(first)
    assert add()[1] == [second]
    assert store.find_any(first) is None, "what is gone is forgotten first, with its key"
    assert store.replay("landon", "0", b"") is None
    with pytest.raises(StoreFullError):  # four are there, of which one is being deleted
        add()
    assert store.list_live()[-1] != third
    for one in (third, fourth):
        store.keep_log(one, b"x" * 15_000)
    assert store.read_log(third) is None, "the older log goes first"
    assert store.read_log(fourth)
    with pytest.raises(StoreFullError):
        add(size=19_000)
    store.close()


def test_a_full_disk_takes_no_more_and_keeps_what_is_there(tmp_path: Path) -> None:
    store = store_of(tmp_path, [ACCEPTED])
    made = store.add("landon", REQUEST, {}).id
    store.limits = StoreLimits(reserve=1 << 60)
    with pytest.raises(StoreFullError, match="store_full"):
        store.make_room("landon", 1)
    store.keep_log(made, b"x" * 100)
    assert store.read_log(made) == b""
    store.note_standing(made, ContainerStanding("finished"))
    store.note_gone(made)
    assert store.list_containers("landon") == []
    store.close()


def test_what_was_deleted_makes_room_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(tmp_path, [ACCEPTED])
    store.limits = StoreLimits(reserve=1 << 20)
    made = store.add("landon", REQUEST, {}).id
    store.keep_log(made, b"x" * (4 << 20))
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_bavail=0, f_frsize=4096))
    with pytest.raises(StoreFullError, match="store_full"):
        store.make_room("landon", 1)
    store.note_gone(made)
    assert store.make_room("landon", 1 << 20) == []
    store.close()


def test_a_page_has_so_many_bytes(place: str) -> None:
    store = store_of(place, [ACCEPTED])
    for _ in range(6):
        store.add("landon", {**REQUEST, "args": ["x" * (1 << 18)]}, {})
    assert (store.fit("landon"), store.fit("landon", limit=2), store.fit("other")) == (3, 2, 1)
    store.close()


def test_who_is_alive_and_who_is_over_is_told_by_ids(place: str) -> None:
    """Whatever tenants have written into their requests: chores go through all of them every minute."""
    store = store_of(place, [ACCEPTED])
    new, early, late, old = (store.add("landon", {**REQUEST, "gpus": 2}, {}).id for _ in range(4))
    store.note_standing(early, ContainerStanding("finished", finished=ACCEPTED + 5.5))
    store.note_standing(late, ContainerStanding("finished", finished=ACCEPTED + 50))
    store.note_standing(old, ContainerStanding("failed"))
    store.note_made(old)
    assert (sorted(store.list_live()), store.waiting_gpus("landon")) == (sorted([new, early, late]), 2)
    assert sorted(store.list_over(ACCEPTED + 10)) == sorted([early, old])
    store.note_deleting(early)
    assert (store.list_over(ACCEPTED + 10), store.waiting_gpus("nobody")) == ([old], 0)
    store.close()


def test_one_tenancys_events_do_not_push_out_anothers(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ocigpu.tenants.service.event_log.MAX_EVENTS", 20)
    store = store_of(place, [ACCEPTED])
    quiet, noisy = (store.add(tenancy, REQUEST, {}).id for tenancy in ("quiet", "noisy"))
    for number in range(300):
        store.note_standing(noisy, ContainerStanding("booting", ("", "unknown")[number % 2]))
    assert [one.container for one in store.events.after(0, "quiet")] == [quiet]
    assert len(store.events.after(0, "noisy", limit=1000)) <= 120
    store.close()


def test_events_say_what_to_bill_after_a_container_is_forgotten(place: str) -> None:
    now = [ACCEPTED]
    store = store_of(place, now)
    made = add(store, gpus=4)
    store.note_standing(made, ContainerStanding("running", started=ACCEPTED + 1))
    ended = ContainerStanding("finished", "completed", started=ACCEPTED + 1, finished=ACCEPTED + 61)
    now[0] += 3600  # the service was stopped meanwhile
    store.note_standing(made, ended)
    store.note_deleting(made)
    store.note_gone(made)
    while store.forget():
        pass
    assert store.find_any(made) is None
    found = [(one.kind, one.tenancy, one.gpus, one.started, one.finished) for one in store.events.after(0)]
    assert found == [
        ("created", "landon", 4, None, None),
        ("changed", "landon", 4, ACCEPTED + 1, None),
        ("changed", "landon", 4, ACCEPTED + 1, ACCEPTED + 61),
        ("deleted", "landon", 4, ACCEPTED + 1, ACCEPTED + 61),
    ]
    store.close()


def sql(directory: Path, *statements: str) -> list[Any]:
    """Execute statements on the file of a store; returns the rows of the last one."""
    with contextlib.closing(sqlite3.connect(directory / FILE, isolation_level=None)) as base:
        return [base.execute(statement).fetchall() for statement in statements][-1]


def make_old(directory: Path, version: int) -> None:
    """Make the file of a version before Alembic, with a container, as that version did."""
    directory.mkdir(exist_ok=True)
    steps = ["version-1.sql", *(f"from-{number}.sql" for number in range(1, version))]
    texts = "".join((OLD / step).read_text() for step in steps).split(";")
    request = json.dumps({**REQUEST, "gpus": 4})
    standing = json.dumps({**ContainerStanding("finished", "completed", finished=ACCEPTED + 5)._asdict()})
    values = ("ctr_1", "landon", ACCEPTED, request, 1, "finished", "completed", standing)
    with contextlib.closing(sqlite3.connect(directory / FILE, isolation_level=None)) as base:
        for text in texts:
            base.execute(text)
        names = "id, tenancy, created, request, made, lifecycle, reason, standing"
        base.execute(f"insert into containers ({names}) values (?, ?, ?, ?, ?, ?, ?, ?)", values)
        base.execute("insert into meta values ('secret', x'00112233')")
        base.execute("insert into events (at, kind, container, tenancy, lifecycle, reason, detail)"
                     " values (1, 'created', 'ctr_1', 'landon', 'accepted', '', '')")  # fmt: skip
        base.execute(f"pragma user_version = {version}")


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_file_of_a_version_before_is_read(tmp_path: Path, version: int) -> None:
    make_old(tmp_path / "old", version)
    store = CaasStore(str(tmp_path / "old"), serving=True, clock=lambda: ACCEPTED)
    found = store.find("ctr_1")
    assert found
    assert (found.request["gpus"], found.standing.finished, found.made) == (4, ACCEPTED + 5, True)
    assert (store.list_over(ACCEPTED + 6), store.list_over(ACCEPTED + 4)) == (["ctr_1"], [])
    assert store.database.secret == bytes.fromhex("00112233")
    assert [event.gpus for event in store.events.after(0)] == [4]
    made = add(store, gpus=2)
    assert (store.waiting_gpus("landon"), store.events.after(1)[0].container) == (2, made)
    store.make_room("landon", 1)
    store.close()
    store_of(tmp_path / "new", [ACCEPTED]).close()
    assert columns_of(tmp_path / "old") == columns_of(tmp_path / "new"), "revisions make the same of every version"


def test_revisions_make_the_tables(place: str) -> None:
    store = CaasStore(place, serving=True)
    with store.database.change() as base:
        context = MigrationContext.configure(base, opts={"compare_type": True})
        assert compare_metadata(context, tables.metadata) == []
        assert context.get_current_revision() == tables.REVISION
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    assert ScriptDirectory.from_config(config).get_current_head() == tables.REVISION
    store.close()


def columns_of(directory: Path) -> list[Any]:
    """Return the columns of every table and index of a store's file, and its version."""
    names = sql(directory, "select name, type from sqlite_master order by name")
    found = {name: sql(directory, f"pragma {kind}_xinfo('{name}')") for name, kind in names}
    # a table's primary key is never null where it has no rowid, whether it says so or not; types have any case
    columns = [
        sorted((row[1], str(row[2]).lower(), row[3] or row[5], str(row[4]), row[5]) for row in rows)
        if dict(names)[name] == "table" else [row[:3] for row in rows if row[1] >= 0]
        for name, rows in found.items()
    ]  # fmt: skip
    return [*names, *columns, sql(directory, "pragma user_version")]


def test_a_tenancys_whole_past_is_forgotten_in_parts(tmp_path: Path) -> None:
    store = CaasStore(str(tmp_path), serving=True)
    for _ in range(2 * MAX_FORGOTTEN):
        made = store.add("landon", REQUEST, {}).id
        store.note_deleting(made)
        store.note_gone(made)
    kept = store.add("landon", REQUEST, {}).id
    left = [sql(tmp_path, "select count(*) from containers")[0][0]]
    while store.forget():
        left.append(sql(tmp_path, "select count(*) from containers")[0][0])
    assert left == [2 * MAX_FORGOTTEN + 1, MAX_FORGOTTEN + 1, 1]
    assert store.find(kept)
    store.close()


def test_what_containers_printed_leaves_a_file_of_the_version_before(tmp_path: Path) -> None:
    make_old(tmp_path, 2)
    before = {key: value for key, value in REQUEST.items() if key not in ("cpus", "memory", "has_pull_credentials")}
    standings = {
        "ctr_2": ContainerStanding("failed", "exit_nonzero", "token=very-s3cret", exit_code=3),
        "ctr_3": ContainerStanding("failed", "image_pull_failed", "no such image"),
    }
    with contextlib.closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as base:
        for number, standing in standings.items():
            values = (number, "landon", 1.0, json.dumps(before), *standing[:2], json.dumps(standing._asdict()))
            names = "id, tenancy, created, request, lifecycle, reason, standing"
            base.execute(f"insert into containers ({names}) values (?, ?, ?, ?, ?, ?, ?)", values)
            base.execute("insert into events (at, kind, container, tenancy, lifecycle, reason, detail)"
                         " values (1, 'changed', ?, 'landon', ?, ?, ?)", (number, *standing[:3]))  # fmt: skip
    store = CaasStore(str(tmp_path), serving=True)
    shown = {one.id: view(one) for one in store.list_containers("landon")}
    assert (shown["ctr_2"].reason, shown["ctr_2"].detail, shown["ctr_2"].exit_code) == ("exit_nonzero", "", 3)
    assert (shown["ctr_3"].reason, shown["ctr_3"].detail) == ("image_pull_failed", "no such image")
    assert "no such image" in str(store.events.after(0))
    assert not any(b"very-s3cret" in one.read_bytes() for one in tmp_path.iterdir())
    store.close()


def test_an_end_is_an_end_and_a_phase_that_was_known_is_known(place: str) -> None:
    store = store_of(place, [ACCEPTED])
    made = store.add("landon", REQUEST, {})
    assert store.note_standing(made.id, ContainerStanding("running", phases={"queued": 1.0, "pull": 2.0}))
    assert not store.note_standing(made.id, ContainerStanding("running", phases={"queued": 1.0}))
    assert store.note_standing(made.id, ContainerStanding("finished", "completed", exit_code=0))
    assert not store.note_standing(made.id, ContainerStanding("failed", "pod_lost"))
    found = store.find(made.id)
    assert found
    assert (found.standing.lifecycle, found.standing.phases) == ("finished", {"queued": 1.0, "pull": 2.0})
    assert [one.lifecycle for one in store.events.after(0)] == ["accepted", "running", "finished"]
    store.close()


def test_one_service_at_a_time(tmp_path: Path) -> None:
    first = CaasStore(str(tmp_path), serving=True)
    with pytest.raises(Exception, match="another service uses it"):
        CaasStore(str(tmp_path), serving=True)
    beside = CaasStore(str(tmp_path))
    key, _ = beside.keys.add(None, ["admin"], "", None)
    assert first.keys.check(key)
    beside.close()
    first.close()
    CaasStore(str(tmp_path), serving=True).close()


def test_a_newer_file_is_left_alone(tmp_path: Path) -> None:
    make_old(tmp_path, 3)
    sql(tmp_path, "pragma user_version = 9")
    with pytest.raises(HostError, match="newer ocigpu"):
        CaasStore(str(tmp_path))


def test_a_store_of_a_newer_revision_is_left_alone(place: str) -> None:
    store = CaasStore(place)
    with store.database.change() as base:
        base.execute(sa.text("update alembic_version set version_num = '99'"))
    store.close()
    with pytest.raises(HostError, match="newer ocigpu"):
        CaasStore(place)


def test_the_next_tenancy_of_a_name_has_nothing_of_the_one_before(place: str) -> None:
    now = [ACCEPTED]
    store = store_of(place, now)
    assert store.note_tenancy("landon", "u-1", ACCEPTED - 60) == []
    key, _ = store.keys.add("landon", ["containers:read"], "", None)
    admin, _ = store.keys.add(None, ["admin"], "", None)
    made = store.add("landon", REQUEST, {"A": "b"}, "key", b"body").id
    store.keep_log(made, b"private")
    now[0] += 60
    new, _ = store.keys.add("landon", ["containers:read"], "", None)  # made before it was noticed
    assert store.list_tenancies() == ["landon"]
    assert store.note_tenancy("landon", "u-1") == []
    assert store.note_tenancy("landon", "u-2", now[0]) == [made]
    assert [bool(store.keys.check(one)) for one in (key, new, admin)] == [False, True, True]
    assert (store.list_containers("landon"), store.events.after(0, "landon")) == ([], [])
    assert (store.read_log(made), store.replay("landon", "key", b"body")) == (None, None)
    left = store.find(made)
    assert left
    assert (store.list_live(), left.deleting, left.tenancy) == ([made], True, "landon~u-1")
    store.note_gone(made)
    assert store.note_tenancy("landon", "") == []  # it is deleted
    assert store.keys.check(new) is None
    later, _ = store.keys.add("landon", ["containers:read"], "", None)  # made before the tenancy is
    assert store.note_tenancy("landon", "u-3", now[0] + 60) == []
    assert store.keys.check(later)
    store.close()


# several replicas, in PostgreSQL


def test_numbers_of_events_grow_in_the_order_in_which_they_are_seen(server: Postgres) -> None:
    """A reader that resumes by the last number it saw misses none, however writers overlap."""
    url = server.make_database()
    stores = [CaasStore(url) for _ in range(4)]
    stopping, seen = threading.Event(), list[int]()

    def write(store: CaasStore) -> None:
        for _ in range(40):
            with store.database.change():
                add(store)
                add(store)

    def read() -> None:
        reader = CaasStore(url)
        while True:
            over = stopping.is_set()
            found = reader.events.after(seen[-1] if seen else 0, limit=1000)
            seen.extend(one.id for one in found)
            if over and not found:
                break
        reader.close()

    writers = [threading.Thread(target=write, args=(store,)) for store in stores]
    reading = threading.Thread(target=read)
    for thread in (reading, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stopping.set()
    reading.join()
    all_of_them = [one.id for one in stores[0].events.after(0, limit=1000)]
    assert len(all_of_them) == 320
    assert seen == all_of_them
    for store in stores:
        store.close()


def test_a_number_is_given_after_the_change_before_is_seen(server: Postgres) -> None:
    """The race itself: a writer that has its number and is not committed holds up the next."""
    url = server.make_database()
    first, second = CaasStore(url), CaasStore(url)
    late = threading.Thread(target=add, args=(second,))
    with first.database.change():
        early = add(first)
        late.start()
        waiting = "select count(*) from pg_locks where locktype = 'advisory' and not granted"
        wait_for("the other writer to wait", lambda: server.do(waiting)[0][0] == 1)
        assert server.do("select count(*) from events", name_of(url)) == [(0,)]
    late.join()
    assert next(one.container for one in first.events.after(0)) == early
    assert len(first.events.after(0)) == 2
    first.close()
    second.close()


def test_one_key_makes_one_container_whichever_replica_is_asked(server: Postgres) -> None:
    url = server.make_database()
    first, second = CaasStore(url), CaasStore(url)
    made = first.add("landon", REQUEST, {}, "key", b"body")
    with pytest.raises(KeyTakenError):  # it looked before the other had stored it
        second.add("landon", REQUEST, {}, "key", b"body")
    assert second.replay("landon", "key", b"body") == (made.id, True)
    assert [one.id for one in second.list_containers("")] == [made.id]
    first.close()
    second.close()


def test_one_replica_keeps_containers_until_its_session_ends(server: Postgres) -> None:
    url = server.make_database()
    first, second = CaasStore(url), CaasStore(url)
    kept = first.hold()
    assert kept
    assert second.hold() is None
    made = add(first)
    kept.note_made(made)
    pid = kept.database.read(sa.text("select pg_backend_pid()"))[0][0]
    server.do(f"select pg_terminate_backend({pid})")
    wait_for("the lock", lambda: second.hold() is not None)
    with pytest.raises(Exception, match=r"terminat|closed|replica"):
        kept.note_standing(made, ContainerStanding("running"))
    with pytest.raises(Exception, match="another replica may keep"):
        kept.note_standing(made, ContainerStanding("running"))
    found = first.find(made)  # its other connection is none the worse
    assert found
    assert found.standing.lifecycle == "accepted"
    assert first.hold() is None
    second.close()
    wait_for("the lock, back", lambda: first.hold() is not None)
    first.close()


def test_a_server_that_restarts_is_used_again(server: Postgres) -> None:
    store = CaasStore(server.make_database())
    made = add(store)
    server.stop()
    with pytest.raises(sa.exc.DBAPIError):
        add(store)
    server.start()

    def finds() -> bool:
        with contextlib.suppress(sa.exc.DBAPIError):
            return store.find(made) is not None
        return False

    wait_for("it", finds)
    server.stop()
    server.start()
    assert store.find(made), "a read is repeated"
    store.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://user:s3cret@localhost/x", "a password on the command line"),
        ("postgresql://user@localhost/x?password=s3cret", "a password on the command line"),
        ("postgresql://db.example/x?sslmode=prefer", "db.example: the values of secrets would be sent unencrypted"),
        ("postgresql://localhost/x?hostaddr=192.0.2.1&sslmode=disable", "192.0.2.1: the values of secrets would be"),
        ("postgresql:///x?service=away&sslmode=disable", "away: the values of secrets would be sent unencrypted"),
        ("postgresql://localhost,10.0.0.1/x?sslmode=disable", "10.0.0.1: the values of secrets would be sent"),
        ("postgresql://localhost/x?nonsense=s3cret", "not a URL of PostgreSQL"),
        ("postgresql:///x?host=/nonexistent", "/nonexistent"),
    ],
)  # fmt: skip
def test_a_wrong_url_is_told_without_its_password(url: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["caas", "admin-key", "--store", url]) == 1
    told = capsys.readouterr().err
    assert words in told
    assert "OCIGPU-CAAS-1" in told
    assert "s3cret" not in told


def test_a_login_that_is_refused_twice_is_told_once() -> None:
    """Libpq tries again without TLS, unless sslmode forbids it."""
    said = 'connection to server at "127.0.0.1", port 5432 failed: FATAL:  password authentication failed for user "u"'
    assert cause_of(Exception(f"connection failed: {said}\n{said}")) == " ".join(said.split())


def test_a_key_is_made_beside_services_and_not_in_a_database_without(
    server: Postgres, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.make_database()
    assert main(["caas", "admin-key", "--store", url]) == 1
    assert "no service has its store here" in capsys.readouterr().err
    assert server.do("select count(*) from pg_tables where schemaname = 'public'", name_of(url)) == [(0,)]
    store = CaasStore(url)
    assert main(["caas", "admin-key", "--store", url]) == 0
    key = store.keys.check(capsys.readouterr().out.strip())
    assert key
    assert key.scopes == ("admin",)
    store.close()


# from one to the other


def fill(store: CaasStore, now: list[float]) -> tuple[str, str]:
    """Have something in every table; returns an API key and a container."""
    key, _ = store.keys.add("landon", ["containers:read"], "x\0y", ACCEPTED + 60)
    store.keys.add(None, ["admin"], "", None)
    store.note_tenancy("landon", "u-1", ACCEPTED)
    made = store.add("landon", {**REQUEST, "args": ["\0 ü \U0001f600"]}, {"A": "b"}, "key", b"body").id
    now[0] += 1 / 3
    store.note_standing(made, ContainerStanding("finished", "completed", finished=now[0], phases={"pull": 1 / 7}))
    store.keep_log(made, bytes(range(256)))
    for _ in range(40):
        store.note_deleting(add(store))
    store.note_gone(gone := add(store))
    with store.database.change() as base:  # the newest number is of no event any more
        base.execute(sa.delete(tables.events).where(tables.events.c.container == gone))
    return key, made


def test_a_file_is_copied_into_a_database_where_all_goes_on(
    server: Postgres, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now, url = [ACCEPTED], server.make_database()
    before = store_of(tmp_path, now)
    key, made = fill(before, now)
    cursor, last = before.list_containers("landon"), sql(tmp_path, "select seq from sqlite_sequence")[0][0]
    assert last > before.events.last()
    before.close()
    words = ["caas", "copy-store", "--store", str(tmp_path)]
    assert main([*words, "--reopen"]) == 0
    assert "nothing has changed" in capsys.readouterr().out
    assert main([*words, "--to", url, "--json"]) == 0
    names = [name for name in tables.metadata.tables if name != "meta"]
    told = json.loads(capsys.readouterr().out)
    assert told["rows"] == {name: sql(tmp_path, f"select count(*) from {name}")[0][0] for name in names}
    assert (told["rows"]["containers"], told["compared"]) == (42, sum(told["rows"].values()))
    after = store_of(url, now)
    found = after.keys.check(key)
    assert found
    assert found.label == "x\ufffdy"
    assert after.replay("landon", "key", b"body") == (made, True)
    assert (after.list_containers("landon"), after.read_log(made)) == (cursor, bytes(range(256)))
    add(after)
    assert after.events.last() == last + 1
    after.close()
    # the file is out of date from now on
    for serving in (True, False):
        with pytest.raises(HostError, match=f"it was copied to postgresql://.*/{name_of(url)}") as refused:
            CaasStore(str(tmp_path), serving, lambda: now[0], create=False)
    assert main(shlex.split(refused.value.hint.partition("same: ocigpu ")[2])) == 0
    assert "can use the file again" in capsys.readouterr().out
    store_of(tmp_path, now).close()


@pytest.mark.parametrize(
    "words", [[], ["--to", "postgresql:///x", "--reopen"], ["--reopen", "--store", "postgresql:///x"]]
)
def test_a_copy_needs_one_aim(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["caas", "copy-store", *words]) == 2
    assert "--reopen is needed" in (told := capsys.readouterr().err) or "only a SQLite file" in told


def test_a_database_that_is_not_empty_or_in_use_gets_nothing(
    server: Postgres, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now, url = [ACCEPTED], server.make_database()
    words = ["caas", "copy-store", "--store", str(tmp_path), "--to", url]
    assert main(words) == 1
    assert "does not exist" in capsys.readouterr().err
    file = CaasStore(str(tmp_path), serving=True, clock=lambda: now[0])
    fill(file, now)
    assert main(words) == 1
    assert "another service uses it" in capsys.readouterr().err
    assert main([*words[:-1], "postgresql://u:s3cret@localhost/x"]) == 1
    assert "a password on the command line" in capsys.readouterr().err
    file.close()
    replica = CaasStore(url)
    held = replica.hold()
    assert held
    assert main(words) == 1
    assert f"{name_of(url)}: a service uses it" in capsys.readouterr().err
    add(held)
    replica.close()
    wait_for("the lock", lambda: main(words) == 1 and "its table containers has rows" in capsys.readouterr().err)
    assert server.do("select count(*) from keys", name_of(url)) == [(0,)]


def test_a_copy_that_fails_leaves_the_database_empty(
    server: Postgres, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now, url = [ACCEPTED], server.make_database()
    file = store_of(tmp_path, now)
    fill(file, now)
    file.close()
    CaasStore(url).close()
    server.do(
        "create function fail() returns trigger language plpgsql as $$ begin raise 'no room'; end $$", name_of(url)
    )
    server.do("create trigger fail before insert on logs execute function fail()", name_of(url))
    words = ["caas", "copy-store", "--store", str(tmp_path), "--to", url]
    assert main(words) == 1
    assert "no room" in capsys.readouterr().err
    assert server.do("select count(*) from containers", name_of(url)) == [(0,)]
    server.do("drop trigger fail on logs", name_of(url))
    # a database that alters what it is given is found out
    server.do("create or replace function fail() returns trigger language plpgsql as"
              " $$ begin new.text := 'x'; return new; end $$", name_of(url))  # fmt: skip
    server.do("create trigger fail before insert on logs for each row execute function fail()", name_of(url))
    assert main(words) == 1
    assert "table logs: row 1 was not stored as it was sent" in capsys.readouterr().err
    server.do("drop trigger fail on logs", name_of(url))
    assert main(words) == 0
    assert "were copied, read back and compared" in capsys.readouterr().out


def test_the_packages_psycopg_works_with_the_distributions_libpq(server: Postgres) -> None:
    """Package and image carry no library of PostgreSQL's: see packaging/requirements-kubernetes.txt."""
    packaging = REPOSITORY / "packaging"
    assert re.findall(r"^psycopg\S*==", (packaging / "requirements-kubernetes.txt").read_text(), re.MULTILINE) == [
        "psycopg=="
    ]
    for name, words in (
        ("deb/control-kubernetes", "Recommends: libpq5"), ("rpm/ocigpu.spec", "Recommends: libpq.so.5()(64bit)"),
        ("kubernetes/Containerfile", " libpq5 "), ("kubernetes/image.sh", "--include=libpq5"),
    ):  # fmt: skip
        assert words in (packaging / name).read_text()
    url = server.make_database()
    code = (
        "import sys; from ocigpu.tenants.service.store import CaasStore; import psycopg.pq\n"
        "CaasStore(sys.argv[1]).keys.add(None, ['admin'], '', None); print(psycopg.pq.__impl__)"
    )
    assert run([sys.executable, "-c", code, url], env={**os.environ, "PSYCOPG_IMPL": "python"}).stdout == "python\n"
    assert server.do("select count(*) from keys", name_of(url)) == [(1,)]
