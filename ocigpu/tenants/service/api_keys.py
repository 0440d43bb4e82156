"""API keys in the service's store: made, checked, listed and revoked; the store has hashes of them."""

import hashlib
import hmac
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from ocigpu.tenants.service.database import Database
from ocigpu.tenants.service.tables import keys


class ApiKey(NamedTuple):
    """The stored part of an API key.  ``tenancy``: None for an admin's; times are seconds since 1970."""

    id: str
    tenancy: str | None
    scopes: tuple[str, ...]
    label: str
    created: float
    expires: float | None
    revoked: bool


class ApiKeys:
    """The keys in a database.  ``clock``: returns seconds since 1970."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database, self.clock = database, clock

    def add(
        self, tenancy: str | None, scopes: Sequence[str], label: str, expires: float | None
    ) -> tuple[str, ApiKey]:  # fmt: skip
        """Make a key; returns it, only this once, and its stored part.

        A key has 256 random bits and cannot be guessed, so one round of SHA-256 is enough.
        """
        made = ApiKey(secrets.token_hex(6), tenancy, tuple(scopes), label, self.clock(), expires, False)
        secret = secrets.token_urlsafe(32)
        values = {**made._asdict(), "hash": _hash(secret), "scopes": " ".join(scopes), "revoked": 0}
        with self._database.change() as base:
            base.execute(sa.insert(keys).values(**values))
        return f"ocigpu_{made.id}_{secret}", made

    def check(self, key: str) -> ApiKey | None:
        """Return the key that this is, None if it is unknown, revoked or expired."""
        _, _, rest = key.partition("ocigpu_")
        number, _, secret = rest.partition("_")
        rows = self._database.read(sa.select(keys.c.hash).where(keys.c.id == number))
        if not hmac.compare_digest(rows[0][0] if rows else bytes(32), _hash(secret)):
            return None
        found = self.find(number)
        return found if found and (found.expires is None or found.expires > self.clock()) else None

    def find(self, number: str) -> ApiKey | None:
        """Return the key with this id, None if it is unknown or revoked."""
        return next(iter(self._select(keys.c.id == number, keys.c.revoked == 0)), None)

    def page(self, after: str = "", limit: int = 50) -> list[ApiKey]:
        """Return keys by their ids, from above the id ``after``."""
        return self._select(keys.c.id > after, limit=limit)

    def _select(self, *terms: sa.ColumnElement[bool], limit: int = 1) -> list[ApiKey]:
        query: sa.Select[Any] = sa.select(*(keys.c[name] for name in ApiKey._fields)).where(*terms)
        return [
            ApiKey(number, tenancy, tuple(scopes.split()), label, created, expires, bool(revoked))
            for number, tenancy, scopes, label, created, expires, revoked in self._database.read(
                query.order_by(keys.c.id).limit(limit)
            )
        ]

    def revoke(self, number: str) -> bool:
        """Revoke a key; returns whether it exists."""
        with self._database.change() as base:
            return base.execute(sa.update(keys).where(keys.c.id == number).values(revoked=1)).rowcount > 0


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
