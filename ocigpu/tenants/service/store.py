"""What the service remembers: containers, Idempotency-Keys and logs; events and API keys beside them in the same file.

SQLite and not objects of Kubernetes: a container and its Idempotency-Key are one transaction, which two objects cannot
be; events have numbers that only grow, which a stream resumes by; and the cluster's database is spared them.  What it
costs is that the service runs once at a time, as a Deployment of one with a volume.  See
docs/decisions/2026-11-23-the-service-remembers-in-sqlite.md.
"""

import hashlib
import hmac
import itertools
import json
import secrets
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ocigpu.tenants.service.api_keys import ApiKeys
from ocigpu.tenants.service.database import Database
from ocigpu.tenants.service.event_log import EventLog
from ocigpu.tenants.service.lifecycle import ContainerStanding
from ocigpu.tenants.service.models import FINAL

REPLAY_SECONDS = 86400
"""How long an Idempotency-Key is known."""
MAX_PAGE = 1 << 20
"""Bytes of the requests in an answer that lists containers."""
FORMER = "~"
"""Between the name and the UID of a tenancy that is gone: no tenancy is called so."""
MAX_FORGOTTEN = 8
"""Containers that are removed at one time."""
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_CONTAINERS = (
    "select id, tenancy, created, request, secrets, made, deleting, gone, standing, version, lifecycle, reason"
    " from containers where"
)
_IDS = "select id from containers where gone = 0 and"
_WAITING_GPUS = (
    "select coalesce(sum(json_extract(request, '$.gpus')), 0) from containers where tenancy = ?"
    " and made = 0 and gone = 0 and deleting = 0 and lifecycle not in ('finished', 'failed')"
)
_SIZES = "select size from containers where"
_DELETING = "update containers set deleting = 1, version = version + 1 where id = ?"


class StoreLimits(NamedTuple):
    """The storage limits of one tenancy: containers, and bytes of their requests and logs.

    ``reserve``: bytes of the file system that new containers must not use; the records of existing ones need them.
    """

    containers: int = 1000
    bytes: int = 256 << 20
    reserve: int = 64 << 20


class StoreFullError(Exception):
    """A tenancy has so much in the store that has not ended (too_many_containers), or the disk is full (store_full)."""


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
    """The store.  ``serving``, and the errors it raises: as of Database, in whose file it is.

    ``clock``: returns seconds since 1970; ``listener``: called after each change that made events.
    """

    def __init__(
        self,
        directory: str,
        serving: bool = False,
        clock: Callable[[], float] = time.time,
        limits: StoreLimits = StoreLimits(),  # noqa: B008 - immutable
    ) -> None:
        self.clock, self.limits = clock, limits
        self.listener: Callable[[], None] = lambda: None
        self.database = Database(directory, serving)
        self.keys, self.events = ApiKeys(self.database, clock), EventLog(self.database, clock)

    def close(self) -> None:
        """Close the file and release its lock."""
        self.database.close()

    # containers

    def make_room(self, tenancy: str, size: int) -> list[str]:
        """Make room for a tenancy's container with a request of this many bytes.

        Containers that are gone are removed with their Idempotency-Keys.  Returns the ended containers to delete now,
        the oldest first.  Raises StoreFullError, and changes nothing, if that is not enough.
        """
        if not self.database.has_space(self.limits.reserve + size):
            raise StoreFullError("store_full")
        with self.database.change() as base:
            found = base.execute(
                "select id, gone, deleting, lifecycle, size + coalesce(length(text), 0) from containers"
                " left join logs on container = id where tenancy = ? order by id",
                (tenancy,),
            ).fetchall()
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
                        base.execute("delete from idempotency where container = ?", (number,))
                        base.execute("delete from containers where id = ?", (number,))
                    else:
                        ended.append(number)
                        base.execute(_DELETING, (number,))
            if count < self.limits.containers and used + size <= self.limits.bytes:
                return ended
            raise StoreFullError("too_many_containers")

    def add(
        self, tenancy: str, request: Mapping[str, Any], values: Mapping[str, str], key: str = "", body: bytes = b""
    ) -> StoredContainer:
        """Remember a container and, with it, the Idempotency-Key and body that it came with."""
        now = self.clock()
        made = new_id("ctr", now)
        text, secret = json.dumps(request), json.dumps(values) if values else None
        with self.database.change() as base:
            base.execute(
                "insert into containers (id, tenancy, created, request, secrets, size) values (?, ?, ?, ?, ?, ?)",
                (made, tenancy, now, text, secret, len(text) + len(secret or "")),
            )
            if key:
                base.execute(
                    "insert or replace into idempotency values (?, ?, ?, ?, ?)",
                    (tenancy, self._hash(key.encode()), self._hash(body), made, now + REPLAY_SECONDS),
                )
            self.events.note(base, "created", made, tenancy, ContainerStanding("accepted"))
        self.listener()
        found = self.find(made)
        assert found
        return found

    def replay(self, tenancy: str, key: str, body: bytes) -> Replay | None:
        """Return what came with an Idempotency-Key within the last day."""
        rows = self.database.read(
            "select container, body from idempotency where tenancy = ? and key = ? and expires > ?",
            (tenancy, self._hash(key.encode()), self.clock()),
        )
        return Replay(rows[0][0], hmac.compare_digest(rows[0][1], self._hash(body))) if rows else None

    def _hash(self, text: bytes) -> bytes:
        """The hash is keyed, because a body contains secrets, and some of them could be guessed."""
        return hmac.digest(self.database.secret, text, hashlib.sha256)

    def find(self, container: str) -> StoredContainer | None:
        """Return a container that was not deleted."""
        return next(iter(self._containers("id = ? and gone = 0", (container,))), None)

    def find_tenancy(self, container: str) -> str:
        """Return whose a container is that was not deleted, "" for none."""
        rows = self.database.read("select tenancy from containers where id = ? and gone = 0", (container,))
        return str(rows[0][0]) if rows else ""

    def find_any(self, container: str) -> StoredContainer | None:
        """Return a container, also a deleted one."""
        return next(iter(self._containers("id = ?", (container,))), None)

    def list_containers(
        self, tenancy: str, lifecycle: str = "", before: str = "", limit: int = 50
    ) -> list[StoredContainer]:
        """Return containers of a tenancy, "" for all, the newest first, from below the id ``before``."""
        terms, values = self._listed(tenancy, lifecycle, before, limit)
        return self._containers(terms, values)

    def fit(self, tenancy: str, lifecycle: str = "", before: str = "", limit: int = 50) -> int:
        """Return how many of these containers fit into an answer: one or more, of MAX_PAGE bytes or the first."""
        terms, values = self._listed(tenancy, lifecycle, before, limit)
        sizes = (row[0] for row in self.database.read(f"{_SIZES} {terms}", values))
        return max(1, len([used for used in itertools.accumulate(sizes) if used <= MAX_PAGE]))

    @staticmethod
    def _listed(tenancy: str, lifecycle: str, before: str, limit: int) -> tuple[str, tuple[str, ...]]:
        wanted = {"tenancy = ?": tenancy, "lifecycle = ?": lifecycle, "id < ?": before}
        wanted = {term: value for term, value in wanted.items() if value}
        terms = " and ".join(["gone = 0", *wanted])
        return f"{terms} order by id desc limit {int(limit)}", tuple(wanted.values())

    def list_live(self) -> list[str]:
        """Return those that have something in the cluster, or are to have."""
        return self._ids("deleting = 1 or made = 0 or lifecycle not in ('finished', 'failed')")

    def list_over(self, before: float) -> list[str]:
        """Return those that ended before this time and are not being deleted."""
        ended = "coalesce(json_extract(standing, '$.finished'), created)"
        return self._ids(f"deleting = 0 and lifecycle in ('finished', 'failed') and {ended} < ?", before)

    def _ids(self, terms: str, *values: Any) -> list[str]:
        """Return ids alone: requests are as large as tenants like, and there are very many."""
        return [number for (number,) in self.database.read(f"{_IDS} ({terms})", values)]

    def _containers(self, terms: str, values: Sequence[Any]) -> "list[StoredContainer]":
        rows = self.database.read(f"{_CONTAINERS} {terms}", values)
        return [_read_row(*row) for row in rows]

    def waiting_gpus(self, tenancy: str) -> int:
        """Return the GPUs of containers whose pods the cluster has not seen: its quota does not count them yet."""
        return int(self.database.read(_WAITING_GPUS, (tenancy,))[0][0])

    def note_made(self, container: str) -> None:
        """Its objects are in the cluster: the values of its secrets are forgotten."""
        with self.database.change() as base:
            self._forget_secrets(base, container)
            base.execute("update containers set made = 1 where id = ?", (container,))
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
            detail = standing._asdict()
            base.execute(
                "update containers set lifecycle = ?, reason = ?, standing = ?, version = version + 1 where id = ?",
                (standing.lifecycle, standing.reason, json.dumps(detail), container),
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

    def _forget_secrets(self, base: sqlite3.Connection, container: str) -> None:
        done = base.execute("update containers set secrets = null where id = ? and secrets is not null", (container,))
        self.database.unclean = self.database.unclean or done.rowcount > 0

    def note_deleting(self, container: str) -> None:
        """It is to be deleted."""
        with self.database.change() as base:
            base.execute(_DELETING, (container,))

    def note_gone(self, container: str) -> None:
        """Record that nothing of a container is left in the cluster."""
        with self.database.change() as base:
            found = self.find(container)
            if not found:
                return
            self._forget_secrets(base, container)
            base.execute("update containers set gone = 1 where id = ?", (container,))
            base.execute("delete from logs where container = ?", (container,))
            self.events.note(base, "deleted", container, found.tenancy, found.standing)
        self.database.clean()
        self.listener()

    # what containers printed

    def keep_log(self, container: str, text: bytes) -> None:
        """Keep what a container printed: its pod goes, the node's files before it; nothing on a full disk."""
        text = text if self.database.has_space(self.limits.reserve + len(text)) else b""
        with self.database.change() as base:
            base.execute("insert or replace into logs values (?, ?)", (container, text))
            kept = base.execute(
                "select id, length(text) from containers join logs on container = id"
                " where tenancy = (select tenancy from containers where id = ?) order by id desc",
                (container,),
            ).fetchall()
            for (number, _), used in zip(kept, itertools.accumulate(size for _, size in kept), strict=True):
                if used > self.limits.bytes and number != container:
                    base.execute("delete from logs where container = ?", (number,))

    def read_log(self, container: str) -> bytes | None:
        """Return the stored part of a container's output."""
        rows = self.database.read("select text from logs where container = ?", (container,))
        return bytes(rows[0][0]) if rows else None

    # which tenancy has a name

    def list_tenancies(self) -> list[str]:
        """Return the names of tenancies that keys or containers are of."""
        found = self.database.read(
            "select tenancy from containers where gone = 0"
            " union select tenancy from keys where revoked = 0 and tenancy is not null"
        )
        return [name for (name,) in found if FORMER not in name]

    def note_tenancy(self, name: str, uid: str, created: float = float("inf")) -> list[str]:
        """Store which tenancy has a name, "" for none, and since when.

        A former tenancy of this name loses everything: its keys are revoked, and its containers are deleted and
        returned.  So a name may be given to the next customer.
        """
        with self.database.change() as base:
            found = base.execute("select uid from tenancies where name = ?", (name,)).fetchone()
            before = found[0] if found else ""
            if before == uid:
                return []
            base.execute("insert or replace into tenancies values (?, ?)", (name, uid))
            if not before:
                return []
            old, former = (name, created), f"{name}{FORMER}{before}"
            gone = base.execute("select id from containers where tenancy = ? and created < ?", old).fetchall()
            for (container,) in gone:
                base.execute(_DELETING, (container,))
                base.execute("delete from logs where container = ?", (container,))
                base.execute("delete from idempotency where container = ?", (container,))
            base.execute("update containers set tenancy = ? where tenancy = ? and created < ?", (former, *old))
            base.execute("delete from events where tenancy = ? and at < ?", old)
            base.execute("update keys set revoked = 1 where tenancy = ? and created < ?", old)
        self.listener()
        return [container for (container,) in gone]

    # a day later

    def forget(self) -> bool:
        """Remove data that no request needs any more: old Idempotency-Keys, some of the long deleted containers.

        Returns whether more of them are left: a call is limited because removal overwrites up to 1 MiB for each.
        """
        with self.database.change() as base:
            base.execute("delete from idempotency where expires <= ?", (self.clock(),))
            done = base.execute(
                "delete from containers where id in (select id from containers where gone = 1"
                " and id not in (select container from idempotency) limit ?)",
                (MAX_FORGOTTEN,),
            )
        self.database.unclean = True  # requests and logs that were deleted
        self.database.clean()
        return done.rowcount == MAX_FORGOTTEN


def _read_row(
    number: str, tenancy: str, created: float, request: str, values: str | None, made: int, deleting: int, gone: int,
    standing: str, version: int, lifecycle: str, reason: str,
) -> StoredContainer:  # fmt: skip
    found = ContainerStanding(**{**json.loads(standing), "lifecycle": lifecycle, "reason": reason})
    secret = json.loads(values) if values else None
    return StoredContainer(
        number, tenancy, created, request, secret, bool(made), bool(deleting), bool(gone), found, version
    )
