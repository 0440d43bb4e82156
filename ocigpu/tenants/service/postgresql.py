"""The store in PostgreSQL, for several replicas.

Each replica reads and changes over one connection.  The replica that keeps containers has a second one, whose session
holds a lock in the database and makes all changes of its keeping.  When that session ends, for whatever reason, the
lock is free, and nothing of that keeping reaches the database any more.  Sources: PostgreSQL's manual, "Advisory
Locks", "Client Connection Defaults" and "Database Connection Control Functions".
"""

import os
import time
from typing import Any

import psycopg
import sqlalchemy as sa
from psycopg.conninfo import conninfo_to_dict

from ocigpu.core.errors import SettingsError, printable
from ocigpu.tenants.service.database import Database, KeepingLostError

CHANGE_LOCK, KEEP_LOCK = 0x6F636967707501, 0x6F636967707502
"""Advisory locks of the database that is named: of a transaction that changes, of the session that keeps."""
LOCAL = ("localhost", "127.0.0.1", "::1")
ENCRYPTED = ("require", "verify-ca", "verify-full")
SESSION = {
    "statement_timeout": "15s",
    "lock_timeout": "10s",
    # a replica that was stopped in a transaction must not hold up the others
    "idle_in_transaction_session_timeout": "5s",
    # so that the session of a machine that is gone ends in 15 seconds
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "3",
    "tcp_keepalives_count": "3",
}
CONNECT_SECONDS, RETRY_SECONDS = 5, 1.0
"""For a connection to be made; after a failure, before the next attempt: requests meanwhile fail at once."""


class PostgresDatabase(Database):
    """A database of a server.  ``create``: make the tables if there are none.

    ``url``: as libpq takes it, without a password: PGPASSWORD or PGPASSFILE has that.  Raises SettingsError and
    HostError (OCIGPU-CAAS-1).
    """

    shared = True
    _url = "postgresql+psycopg://"
    _begin = ("begin", f"select pg_advisory_xact_lock({CHANGE_LOCK})")

    def __init__(self, url: str, create: bool = True) -> None:
        self._arguments = read_url(url)
        self._url_text, self._away_until = url, 0.0
        host, name = self._arguments.get("host", ""), self._arguments.get("dbname", "")
        super().__init__(printable(f"postgresql://{host}/{name}", 200))
        self._keeper: KeepingSession | None = None
        self._open(create)

    def close(self) -> None:
        """End the connections."""
        super().close()
        if self._keeper:
            self._keeper.close()
            self._keeper = None

    def _connect(self) -> Any:
        if time.monotonic() < self._away_until:
            raise psycopg.OperationalError("the server did not answer a moment ago")
        try:
            base = psycopg.connect(**self._arguments, autocommit=True)
        except psycopg.Error:
            self._away_until = time.monotonic() + RETRY_SECONDS
            raise
        base.execute(
            # an answer is sent once its data is on the disk; a stricter setting of the server's stays
            "select set_config('synchronous_commit', 'on', false) where current_setting('synchronous_commit') = 'off'"
        )
        return base

    def hold(self) -> Database | None:
        """Return the database for the one replica that keeps containers, None while another replica does."""
        if self._keeper is None or self._keeper.lost:
            self._keeper = KeepingSession(self._url_text)
        return self._keeper if self._keeper.try_lock() else None


class KeepingSession(PostgresDatabase):
    """The session of a replica that keeps containers, or waits to; ``lost``: it ended."""

    lost = has_lock = False

    def _connect(self) -> Any:
        if self.lost:
            raise KeepingLostError("another replica may keep containers now")
        return super()._connect()

    def try_lock(self) -> bool:
        """Take the lock if nobody else has it, or keep it; returns whether this session has it."""
        if not self.has_lock:
            self.has_lock = bool(self.read(sa.select(sa.func.pg_try_advisory_lock(KEEP_LOCK)))[0][0])
        return self.has_lock

    def close(self) -> None:
        """End the session, and with it the keeping."""
        self.lost = True
        super().close()


def read_url(url: str) -> dict[str, Any]:
    """Return the arguments of a connection; raises SettingsError (OCIGPU-CAAS-1) that names no password."""
    try:
        found = conninfo_to_dict(url)
    except psycopg.Error as error:
        raise SettingsError(
            "OCIGPU-CAAS-1", "--store: not a URL of PostgreSQL", "postgresql://USER@HOST/NAME"
        ) from error
    if "password" in found:
        text = "--store: a password on the command line can be read by other processes"
        raise SettingsError("OCIGPU-CAAS-1", text, "set PGPASSWORD, or PGPASSFILE to a file with it")
    # libpq connects to the address, where there is one, and takes from the environment what the URL does not say
    places = [found.get("host") or os.environ.get("PGHOST"), found.get("hostaddr") or os.environ.get("PGHOSTADDR")]
    hosts = ",".join(str(place or "") for place in places).split(",")
    away = [host for host in hosts if host and not host.startswith("/") and host not in LOCAL]
    away += [str(service) for service in (found.get("service"), os.environ.get("PGSERVICE")) if service]
    if away and found.setdefault("sslmode", "verify-full") not in ENCRYPTED:
        text = f"--store: {printable(away[0], 100)}: the values of secrets would be sent unencrypted"
        raise SettingsError("OCIGPU-CAAS-1", text, f"sslmode={', '.join(ENCRYPTED)}")
    settings = " ".join(f"-c {name}={value}" for name, value in SESSION.items())
    defaults = {"connect_timeout": CONNECT_SECONDS, "application_name": "ocigpu caas", "tcp_user_timeout": 10_000}
    return {**defaults, **found, "options": f"{settings} {found.get('options', '')}".strip()}
