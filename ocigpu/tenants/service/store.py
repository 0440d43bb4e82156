"""What the service remembers: containers, Idempotency-Keys, logs; events and API keys beside them in one database.

A database and not objects of Kubernetes: a container and its Idempotency-Key are one transaction, which two objects
cannot be; events have numbers that only grow, which a stream resumes by; and the cluster's database is spared them.
See docs/decisions/2026-11-29-the-service-remembers-in-sqlite-or-postgresql.md.
"""

import hashlib
import hmac
import itertools
import json
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import sqlalchemy as sa

from ocigpu.tenants.service.api_keys import ApiKeys
from ocigpu.tenants.service.database import Database, SqliteDatabase
from ocigpu.tenants.service.event_log import EventLog
from ocigpu.tenants.service.lifecycle import ContainerStanding
from ocigpu.tenants.service.models import FINAL
from ocigpu.tenants.service.tables import containers, events, idempotency, keys, logs, tenancies

REPLAY_SECONDS = 86400
"""How long an Idempotency-Key is known."""
MAX_PAGE = 1 << 20
"""Bytes of the requests in an answer that lists containers."""
FORMER = "~"
"""Between the name and the UID of a tenancy that is gone: no tenancy is called so."""
MAX_FORGOTTEN = 8
"""Containers that are removed at one time."""
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_of = containers.c
_LIVE = _of.gone == 0
_OVER = _of.lifecycle.in_(FINAL)
_DELETE = {"deleting": 1, "version": _of.version + 1}
_READABLE = sa.select(
    _of.id, _of.tenancy, _of.created, _of.request, _of.secrets, _of.made, _of.deleting, _of.gone, _of.standing,
    _of.version, _of.lifecycle, _of.reason,
)  # fmt: skip
SCHEMES = ("postgresql://", "postgres://")


class StoreLimits(NamedTuple):
    """The storage limits of one tenancy: containers, and bytes of their requests and logs.

    ``reserve``: bytes of the file system that new containers must not use; the records of existing ones need them.
    """

    containers: int = 1000
    bytes: int = 256 << 20
    reserve: int = 64 << 20


class StoreFullError(Exception):
    """A tenancy has so much in the store that has not ended (too_many_containers), or the disk is full (store_full)."""


class KeyTakenError(Exception):
    """An Idempotency-Key came with another request at the same time."""


class StoredContainer(NamedTuple):
    """A stored container.

    ``text``: of ``request``, with secrets by name; it is parsed only when needed, because it can have 1 MiB;
    ``secrets``: values until they are in the cluster; ``made``: its pod existed; ``gone``: it was deleted and nothing
    of it is left.
    """

    id: str
    tenancy: str
    created: float
    text: str
    secrets: Mapping[str, str] | None
    made: bool
    deleting: bool
    gone: bool
    standing: ContainerStanding
    version: int

    @property
    def request(self) -> Mapping[str, Any]:
        """The request."""
        found: Mapping[str, Any] = json.loads(self.text)
        return found


class Replay(NamedTuple):
    """What came with an Idempotency-Key before."""

    container: str
    same_body: bool


def new_id(prefix: str, now: float) -> str:
    """Return an id that sorts by time: ten characters of milliseconds, sixteen of chance (80 bits)."""
    number = (int(now * 1000) << 80) | secrets.randbits(80)
    return f"{prefix}_" + "".join(_ALPHABET[number >> shift & 31] for shift in range(125, -1, -5))


class CaasStore:
    """The store in a directory or at a URL, see :func:`open_database`; or in an open ``database``.

    ``clock``: returns seconds since 1970; ``listener``: called after each change that made events.
    """

    def __init__(
        self,
        place: str,
        serving: bool = False,
        clock: Callable[[], float] = time.time,
        limits: StoreLimits = StoreLimits(),  # noqa: B008 - immutable
        create: bool = True,
        database: Database | None = None,
    ) -> None:
        self.clock, self.limits = clock, limits
        self.listener: Callable[[], object] = lambda: None
        self.database = database or open_database(place, serving, create)
        self.keys, self.events = ApiKeys(self.database, clock), EventLog(self.database, clock)

    def close(self) -> None:
        """Close the database; a file's lock is released."""
        self.database.close()

    def hold(self) -> "CaasStore | None":
        """Return the store for the one replica that keeps containers, None while another replica does."""
        held = self.database.hold()
        if held is None or held is self.database:
            return self if held else None
        found = CaasStore("", clock=self.clock, limits=self.limits, database=held)
        found.listener = self.listener
        return found

    # containers

    def make_room(self, tenancy: str, size: int) -> list[str]:
        """Make room for a tenancy's container with a request of this many bytes.

        Containers that are gone are removed with their Idempotency-Keys.  Returns the ended containers to delete now,
        the oldest first.  Raises StoreFullError, and changes nothing, if that is not enough.
        """
        if not self.database.has_space(self.limits.reserve + size):
            raise StoreFullError("store_full")
        with self.database.change() as base:
            stored = _of.size + sa.func.coalesce(sa.func.length(logs.c.text), 0)
            found = base.execute(
                sa.select(_of.id, _of.gone, _of.deleting, _of.lifecycle, stored)
                .outerjoin(logs, logs.c.container == _of.id)
                .where(_of.tenancy == tenancy)
                .order_by(_of.id)
            ).all()
            count, used = len(found), sum(row[4] for row in found)
            ended: list[str] = []
            for gone in (1, 0):
                for number, was_gone, deleting, lifecycle, bytes_ in found:
                    if count < self.limits.containers and used + size <= self.limits.bytes:
                        return ended
                    if was_gone != gone or not (gone or (lifecycle in FINAL and not deleting)):
                        continue
                    count, used = count - 1, used - bytes_
                    if gone:
                        base.execute(sa.delete(idempotency).where(idempotency.c.container == number))
                        base.execute(sa.delete(containers).where(_of.id == number))
                    else:
                        ended.append(number)
                        base.execute(sa.update(containers).where(_of.id == number).values(**_DELETE))
            if count < self.limits.containers and used + size <= self.limits.bytes:
                return ended
            raise StoreFullError("too_many_containers")

    def add(
        self, tenancy: str, request: Mapping[str, Any], values: Mapping[str, str], key: str = "", body: bytes = b""
    ) -> StoredContainer:
        """Remember a container and, with it, the Idempotency-Key and body that it came with.

        Raises KeyTakenError if the key is known: another replica was faster.
        """
        now = self.clock()
        made = new_id("ctr", now)
        text, secret = json.dumps(request), json.dumps(values) if values else None
        with self.database.change() as base:
            base.execute(
                sa.insert(containers).values(
                    id=made, tenancy=tenancy, created=now, request=text, secrets=secret, gpus=request.get("gpus", 0),
                    size=len(text) + len(secret or ""),
                )
            )  # fmt: skip
            if key:
                if self.replay(tenancy, key, body):
                    raise KeyTakenError
                mark = {"tenancy": tenancy, "key": self._hash(key.encode())}
                values_ = {"body": self._hash(body), "container": made, "expires": now + REPLAY_SECONDS}
                _replace(base, idempotency, mark, values_)
            self.events.note(base, "created", made, tenancy, ContainerStanding("accepted"))
        self.listener()
        found = self.find(made)
        assert found
        return found

    def replay(self, tenancy: str, key: str, body: bytes) -> Replay | None:
        """Return what came with an Idempotency-Key within the last day."""
        mark = self._hash(key.encode())
        of = idempotency.c
        rows = self.database.read(
            sa.select(of.container, of.body).where(of.tenancy == tenancy, of.key == mark, of.expires > self.clock())
        )
        return Replay(rows[0][0], hmac.compare_digest(rows[0][1], self._hash(body))) if rows else None

    def _hash(self, text: bytes) -> bytes:
        """The hash is keyed, because a body contains secrets, and some of them could be guessed."""
        return hmac.digest(self.database.secret, text, hashlib.sha256)

    def find(self, container: str) -> StoredContainer | None:
        """Return a container that was not deleted."""
        return next(iter(self._containers(_READABLE.where(_of.id == container, _LIVE))), None)

    def find_tenancy(self, container: str) -> str:
        """Return whose a container is that was not deleted, "" for none."""
        rows = self.database.read(sa.select(_of.tenancy).where(_of.id == container, _LIVE))
        return str(rows[0][0]) if rows else ""

    def find_any(self, container: str) -> StoredContainer | None:
        """Return a container, also a deleted one."""
        return next(iter(self._containers(_READABLE.where(_of.id == container))), None)

    def list_containers(
        self, tenancy: str, lifecycle: str = "", before: str = "", limit: int = 50
    ) -> list[StoredContainer]:
        """Return containers of a tenancy, "" for all, the newest first, from below the id ``before``."""
        return self._containers(_listed(_READABLE, tenancy, lifecycle, before, limit))

    def fit(self, tenancy: str, lifecycle: str = "", before: str = "", limit: int = 50) -> int:
        """Return how many of these containers fit into an answer: one or more, of MAX_PAGE bytes or the first."""
        rows = self.database.read(_listed(sa.select(_of.size), tenancy, lifecycle, before, limit))
        return max(1, len([used for used in itertools.accumulate(size for (size,) in rows) if used <= MAX_PAGE]))

    def list_live(self) -> list[str]:
        """Return those that have something in the cluster, or are to have."""
        return self._ids(sa.or_(_of.deleting == 1, _of.made == 0, ~_OVER))

    def list_over(self, before: float) -> list[str]:
        """Return those that ended before this time and are not being deleted."""
        return self._ids(_of.deleting == 0, _OVER, sa.func.coalesce(_of.finished, _of.created) < before)

    def list_deleting(self) -> list[str]:
        """Return those that are to be deleted."""
        return self._ids(_of.deleting == 1)

    def list_ids(self) -> list[str]:
        """Return all ids that are stored, also of deleted containers."""
        return [number for (number,) in self.database.read(sa.select(_of.id))]

    def _ids(self, *terms: sa.ColumnElement[bool]) -> list[str]:
        """Return ids alone: requests are as large as tenants like, and there are very many."""
        return [number for (number,) in self.database.read(sa.select(_of.id).where(_LIVE, *terms))]

    def _containers(self, query: sa.Select[Any]) -> "list[StoredContainer]":
        return [_read_row(*row) for row in self.database.read(query)]

    def waiting_gpus(self, tenancy: str) -> int:
        """Return the GPUs of containers whose pods the cluster has not seen: its quota does not count them yet."""
        terms = (_of.tenancy == tenancy, _of.made == 0, _LIVE, _of.deleting == 0, ~_OVER)
        return int(self.database.read(sa.select(sa.func.coalesce(sa.func.sum(_of.gpus), 0)).where(*terms))[0][0])

    def note_made(self, container: str) -> None:
        """Its objects are in the cluster: the values of its secrets are forgotten."""
        with self.database.change() as base:
            self._forget_secrets(base, container)
            base.execute(sa.update(containers).where(_of.id == container).values(made=1))
        self.database.clean()

    def note_standing(self, container: str, standing: ContainerStanding) -> bool:
        """Store the state of a container; adds an event if lifecycle or reason changed, and returns whether it did.

        A final state stays, and a known phase is not lost.
        """
        with self.database.change() as base:
            found = self.find(container)
            if not found or found.standing.lifecycle in FINAL:
                return False
            standing = standing._replace(phases={**found.standing.phases, **standing.phases})
            if standing == found.standing:
                return False
            base.execute(
                sa.update(containers)
                .where(_of.id == container)
                .values(
                    lifecycle=standing.lifecycle,
                    reason=standing.reason,
                    standing=json.dumps(standing._asdict()),
                    finished=standing.finished,
                    version=_of.version + 1,
                )
            )
            if standing.lifecycle in FINAL:
                self._forget_secrets(base, container)
            changed = standing[:2] != found.standing[:2]
            if changed:
                self.events.note(base, "changed", container, found.tenancy, standing)
        self.database.clean()
        if changed:
            self.listener()
        return changed

    def _forget_secrets(self, base: sa.Connection, container: str) -> None:
        known = (_of.id == container, _of.secrets.is_not(None))
        done = base.execute(sa.update(containers).where(*known).values(secrets=None))
        self.database.unclean = self.database.unclean or done.rowcount > 0

    def note_deleting(self, container: str) -> None:
        """It is to be deleted."""
        with self.database.change() as base:
            base.execute(sa.update(containers).where(_of.id == container).values(**_DELETE))

    def note_gone(self, container: str) -> None:
        """Record that nothing of a container is left in the cluster."""
        with self.database.change() as base:
            found = self.find(container)
            if not found:
                return
            self._forget_secrets(base, container)
            base.execute(sa.update(containers).where(_of.id == container).values(gone=1))
            base.execute(sa.delete(logs).where(logs.c.container == container))
            self.events.note(base, "deleted", container, found.tenancy, found.standing)
        self.database.clean()
        self.listener()

    # what containers printed

    def keep_log(self, container: str, text: bytes) -> None:
        """Keep what a container printed: its pod goes, the node's files before it; nothing on a full disk."""
        text = text if self.database.has_space(self.limits.reserve + len(text)) else b""
        with self.database.change() as base:
            _replace(base, logs, {"container": container}, {"text": text})
            whose = sa.select(_of.tenancy).where(_of.id == container).scalar_subquery()
            sizes = sa.select(_of.id, sa.func.length(logs.c.text)).join(logs, logs.c.container == _of.id)
            kept = base.execute(sizes.where(_of.tenancy == whose).order_by(_of.id.desc())).all()
            for (number, _), used in zip(kept, itertools.accumulate(size for _, size in kept), strict=True):
                if used > self.limits.bytes and number != container:
                    base.execute(sa.delete(logs).where(logs.c.container == number))

    def read_log(self, container: str) -> bytes | None:
        """Return the stored part of a container's output."""
        rows = self.database.read(sa.select(logs.c.text).where(logs.c.container == container))
        return bytes(rows[0][0]) if rows else None

    # which tenancy has a name

    def list_tenancies(self) -> list[str]:
        """Return the names of tenancies that keys or containers are of."""
        of_keys = sa.select(keys.c.tenancy).where(keys.c.revoked == 0, keys.c.tenancy.is_not(None))
        found = self.database.read(sa.union(sa.select(_of.tenancy).where(_LIVE), of_keys))
        return [name for (name,) in found if FORMER not in name]

    def note_tenancy(self, name: str, uid: str, created: float = sys.float_info.max) -> list[str]:
        """Store which tenancy has a name, "" for none, and since when.

        A former tenancy of this name loses everything: its keys are revoked, and its containers are deleted and
        returned.  So a name may be given to the next customer.
        """
        own = tenancies.c.name == name
        known = self.database.read(sa.select(tenancies.c.uid).where(own))
        if (known[0][0] if known else "") == uid:
            return []
        with self.database.change() as base:
            before = base.execute(sa.select(tenancies.c.uid).where(own)).scalar() or ""
            if before == uid:
                return []
            _replace(base, tenancies, {"name": name}, {"uid": uid})
            if not before:
                return []
            past, former = (_of.tenancy == name, _of.created < created), f"{name}{FORMER}{before}"
            gone = base.execute(sa.select(_of.id).where(*past)).scalars().all()
            for container in gone:
                base.execute(sa.update(containers).where(_of.id == container).values(**_DELETE))
                base.execute(sa.delete(logs).where(logs.c.container == container))
                base.execute(sa.delete(idempotency).where(idempotency.c.container == container))
            base.execute(sa.update(containers).where(*past).values(tenancy=former))
            base.execute(sa.delete(events).where(events.c.tenancy == name, events.c.at < created))
            base.execute(sa.update(keys).where(keys.c.tenancy == name, keys.c.created < created).values(revoked=1))
        self.listener()
        return list(gone)

    # a day later

    def forget(self) -> bool:
        """Remove data that no request needs any more: old Idempotency-Keys, some of the long deleted containers.

        Returns whether more of them are left: a call is limited because removal overwrites up to 1 MiB for each.
        """
        with self.database.change() as base:
            base.execute(sa.delete(idempotency).where(idempotency.c.expires <= self.clock()))
            known = sa.exists().where(idempotency.c.container == _of.id)
            old = sa.select(_of.id).where(_of.gone == 1, ~known).limit(MAX_FORGOTTEN)
            done = base.execute(sa.delete(containers).where(_of.id.in_(old)))
        self.database.unclean = True  # requests and logs that were deleted
        self.database.clean()
        return done.rowcount == MAX_FORGOTTEN


def open_database(place: str, serving: bool = False, create: bool = True) -> Database:
    """Return the database in a directory (SQLite) or at a URL (PostgreSQL).

    ``serving``: a file is locked for one service; ``create``: make it, or its tables, if there are none.  Raises
    HostError and SettingsError (OCIGPU-CAAS-1).
    """
    if not place.startswith(SCHEMES):
        return SqliteDatabase(place, serving, create)
    from ocigpu.tenants.service.postgresql import PostgresDatabase  # an extra of its own

    return PostgresDatabase(place, create)


def _listed(query: sa.Select[Any], tenancy: str, lifecycle: str, before: str, limit: int) -> sa.Select[Any]:
    terms = ((tenancy, _of.tenancy == tenancy), (lifecycle, _of.lifecycle == lifecycle), (before, _of.id < before))
    given = [term for text, term in terms if text]
    return query.where(_LIVE, *given).order_by(_of.id.desc()).limit(limit)


def _replace(base: sa.Connection, table: sa.Table, mark: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Insert a row, or replace the one with this mark; changes are serialised, so no other can come between."""
    base.execute(sa.delete(table).where(*(table.c[name] == value for name, value in mark.items())))
    base.execute(sa.insert(table).values(**mark, **values))


def _read_row(
    number: str, tenancy: str, created: float, request: str, values: str | None, made: int, deleting: int, gone: int,
    standing: str, version: int, lifecycle: str, reason: str,
) -> StoredContainer:  # fmt: skip
    found = ContainerStanding(**{**json.loads(standing), "lifecycle": lifecycle, "reason": reason})
    secret = json.loads(values) if values else None
    return StoredContainer(
        number, tenancy, created, request, secret, bool(made), bool(deleting), bool(gone), found, version
    )
