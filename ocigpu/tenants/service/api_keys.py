"""API keys in the service's store: made, checked, listed and revoked; the store has hashes of them."""

import hashlib
import hmac
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ocigpu.tenants.service.database import Database

_KEYS = "select id, tenancy, scopes, label, created, expires, revoked from keys where"


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
        values = (made.id, _hash(secret), tenancy, " ".join(scopes), label, made.created, expires)
        with self._database.change() as base:
            base.execute("insert into keys values (?, ?, ?, ?, ?, ?, ?, 0)", values)
        return f"ocigpu_{made.id}_{secret}", made

    def check(self, key: str) -> ApiKey | None:
        """Return the key that this is, None if it is unknown, revoked or expired."""
        _, _, rest = key.partition("ocigpu_")
        number, _, secret = rest.partition("_")
        rows = self._database.read("select hash from keys where id = ?", (number,))
        if not hmac.compare_digest(rows[0][0] if rows else bytes(32), _hash(secret)):
            return None
        found = self.find(number)
        return found if found and (found.expires is None or found.expires > self.clock()) else None

    def find(self, number: str) -> ApiKey | None:
        """Return the key with this id, None if it is unknown or revoked."""
        return next(iter(self._select("id = ? and revoked = 0", number)), None)

    def page(self, after: str = "", limit: int = 50) -> list[ApiKey]:
        """Return keys by their ids, from above the id ``after``."""
        return self._select("id > ? order by id limit ?", after, limit)

    def _select(self, terms: str, *values: str | int) -> list[ApiKey]:
        return [
            ApiKey(key, tenancy, tuple(scopes.split()), label, created, expires, bool(revoked))
            for key, tenancy, scopes, label, created, expires, revoked in self._database.read(
                f"{_KEYS} {terms}", values
            )
        ]

    def revoke(self, number: str) -> bool:
        """Revoke a key; returns whether it exists."""
        with self._database.change() as base:
            return base.execute("update keys set revoked = 1 where id = ?", (number,)).rowcount > 0


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
