"""The events of containers in the service's store, numbered in their order."""

from collections.abc import Callable
from typing import Any, NamedTuple

import sqlalchemy as sa

from ocigpu.tenants.service.database import Database
from ocigpu.tenants.service.lifecycle import ContainerStanding
from ocigpu.tenants.service.tables import containers, events

MAX_EVENTS = 10_000
"""Of one tenancy."""


class StoredEvent(NamedTuple):
    """Something that happened to a container; ``id`` grows.

    ``gpus``: 0 for an event of a version that did not store it; ``started``, ``finished``: of the container, if known.
    """

    id: int
    at: float
    kind: str
    container: str
    tenancy: str
    lifecycle: str
    reason: str
    detail: str
    gpus: int
    started: float | None
    finished: float | None


class EventLog:
    """Events in a database.  ``clock``: returns seconds since 1970."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database, self.clock = database, clock

    def note(self, base: sa.Connection, kind: str, container: str, tenancy: str, standing: ContainerStanding) -> None:
        """Add an event of a stored container, in the transaction of ``base``; the oldest of many are deleted."""
        values: dict[str, Any] = {"at": self.clock(), "kind": kind, "container": container, "tenancy": tenancy}
        names = ("lifecycle", "reason", "detail", "started", "finished")
        values |= {name: getattr(standing, name) for name in names}
        values["gpus"] = sa.select(containers.c.gpus).where(containers.c.id == container).scalar_subquery()
        (number,) = base.execute(sa.insert(events).values(**values)).inserted_primary_key or (0,)
        if number % 100 == 0:
            own = events.c.tenancy == tenancy
            kept = sa.select(events.c.id).where(own).order_by(events.c.id.desc()).limit(1).offset(MAX_EVENTS)
            base.execute(sa.delete(events).where(own, events.c.id <= kept.scalar_subquery()))

    def last(self) -> int:
        """Return the id of the newest event, 0 for none."""
        return int(self._database.read(sa.select(sa.func.coalesce(sa.func.max(events.c.id), 0)))[0][0])

    def after(self, event: int, tenancy: str = "", container: str = "", limit: int = 100) -> list[StoredEvent]:
        """Return the events after one, the oldest first; of a tenancy or container, "" for all."""
        query = sa.select(*(events.c[name] for name in StoredEvent._fields)).where(events.c.id > event)
        if tenancy:
            query = query.where(events.c.tenancy == tenancy)
        if container:
            query = query.where(events.c.container == container)
        return [StoredEvent(*row) for row in self._database.read(query.order_by(events.c.id).limit(limit))]
