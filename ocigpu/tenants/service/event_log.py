"""The events of containers in the service's store, numbered in their order."""

import sqlite3
from collections.abc import Callable
from typing import NamedTuple

from ocigpu.tenants.service.database import Database
from ocigpu.tenants.service.lifecycle import ContainerStanding

MAX_EVENTS = 10_000
"""Of one tenancy."""
_EVENTS = "select id, at, kind, container, tenancy, lifecycle, reason, detail from events where"
_FORGET_OLD = (
    "delete from events where tenancy = ? and id <="
    " (select id from events where tenancy = ? order by id desc limit 1 offset ?)"
)


class StoredEvent(NamedTuple):
    """Something that happened to a container; ``id`` grows."""

    id: int
    at: float
    kind: str
    container: str
    tenancy: str
    lifecycle: str
    reason: str
    detail: str


class EventLog:
    """Events in a database.  ``clock``: returns seconds since 1970."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database, self.clock = database, clock

    def note(
        self, base: sqlite3.Connection, kind: str, container: str, tenancy: str, standing: ContainerStanding
    ) -> None:
        """Add an event, as part of the transaction that ``base`` is in; the oldest of many are deleted."""
        done = base.execute(
            "insert into events (at, kind, container, tenancy, lifecycle, reason, detail) values (?, ?, ?, ?, ?, ?, ?)",
            (self.clock(), kind, container, tenancy, *standing[:3]),
        )
        if done.lastrowid and done.lastrowid % 100 == 0:
            base.execute(_FORGET_OLD, (tenancy, tenancy, MAX_EVENTS))

    def last(self) -> int:
        """Return the id of the newest event, 0 for none."""
        return int(self._database.read("select coalesce(max(id), 0) from events")[0][0])

    def after(self, event: int, tenancy: str = "", container: str = "", limit: int = 100) -> list[StoredEvent]:
        """Return the events after one, the oldest first; of a tenancy or container, "" for all."""
        wanted = {"tenancy = ?": tenancy, "container = ?": container}
        wanted = {term: value for term, value in wanted.items() if value}
        terms = " and ".join(["id > ?", *wanted])
        rows = self._database.read(
            f"{_EVENTS} {terms} order by id limit {int(limit)}", (event, *wanted.values())
        )  # fmt: skip
        return [StoredEvent(*row) for row in rows]
