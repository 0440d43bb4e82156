"""The service's database, a SQLite file or one of PostgreSQL: opened, brought to this version, changed, read.

Changes are serialised, in both: each sees all changes before it, and the numbers of events grow in the order in which
they become visible.  In SQLite "begin immediate" does it; in PostgreSQL an advisory lock, which a transaction takes
first and which is released after its commit is visible to others.  A number taken without it could be committed after
a higher one, which a stream has sent already.
"""

import abc
import contextlib
import os
import secrets
import shlex
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from ocigpu.core.errors import HostError, printable
from ocigpu.system.files import lock, lock_file
from ocigpu.tenants.service import tables

FILE = "caas.sqlite"
_LAST_NUMBERED = 3
"""The last version whose files have their number in user_version; from then on they have a table of Alembic's."""

MOVED = "moved"
"""The name in ``meta`` of the place that a file was copied to."""
_MOVED = sa.select(tables.meta.c.value).where(tables.meta.c.name == MOVED)
_FORGET_MOVED = sa.delete(tables.meta).where(tables.meta.c.name == MOVED)


class KeepingLostError(Exception):
    """The session that held the lock is gone: another replica may be keeping containers."""


class Database(abc.ABC):
    """An open database.

    ``place``: the file or server, for errors; ``shared``: other replicas change it, too; ``secret``: random bytes that
    stay the same for its life; ``unclean``: deleted values may still be there, see :meth:`clean`.
    """

    shared = False
    secret: bytes
    _url: str
    _begin: Sequence[str]

    def __init__(self, place: str) -> None:
        self.place, self.unclean = place, False
        self._guard = threading.RLock()
        self._depth = 0
        self._base: sa.Connection | None = None
        self._engine = sa.create_engine(
            self._url, creator=self._connect, poolclass=NullPool, isolation_level="AUTOCOMMIT", hide_parameters=True
        )

    @abc.abstractmethod
    def _connect(self) -> Any:
        """Return a new connection of the database's driver."""

    def _open(self, create: bool = True) -> None:
        """Connect, and bring the tables to this version; ``create``: make them if there are none.  Raises HostError."""
        try:
            with self.change() as base:
                _upgrade(base, self.place, create)
            (self.secret,) = self.read(sa.select(tables.meta.c.value).where(tables.meta.c.name == "secret"))[0]
        except (OSError, DBAPIError, sqlite3.Error) as error:
            self.close()
            raise HostError("OCIGPU-CAAS-1", f"{self.place}: {cause_of(error)}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the connection."""
        if self._base:
            self._base.close()
            self._base = None

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sa.Connection]:
        with self._guard:
            if self._base is None:
                self._base = self._engine.connect()
            try:
                yield self._base
            except DBAPIError as error:
                if error.connection_invalidated:
                    self._drop()
                raise

    def _drop(self) -> None:
        """Forget a connection that broke: the next use makes another."""
        self.close()

    @contextlib.contextmanager
    def change(self) -> Iterator[sa.Connection]:
        """Run a transaction: it is on the disk when the block ends, and undone if the block raises.

        A change inside another is part of it.
        """
        with self._connection() as base:
            if self._depth:
                yield base
                return
            self._depth += 1
            try:
                for text in self._begin:
                    base.exec_driver_sql(text)
                yield base
                base.exec_driver_sql("commit")
            except BaseException:
                if not (base.invalidated or base.closed):  # the end of a connection undoes it, too
                    with contextlib.suppress(DBAPIError):  # there is none, or it ends now
                        base.exec_driver_sql("rollback")
                raise
            finally:
                self._depth -= 1

    def read(self, statement: sa.Executable) -> Sequence[Any]:
        """Return the rows of a query."""
        try:
            with self._connection() as base:
                return base.execute(statement).all()
        except DBAPIError as error:
            if not (self.shared and error.connection_invalidated) or self._depth:
                raise
        with self._connection() as base:  # the server was restarted, or another one took over
            return base.execute(statement).all()

    def clean(self) -> None:
        """Remove what is left of deleted values, as far as the database can: a server does so by itself, in time."""
        self.unclean = False

    def has_space(self, size: int) -> bool:  # noqa: ARG002 - of a file
        """Tell whether the disk has room for this many more bytes, as far as that can be known."""
        return True

    def hold(self) -> "Database | None":
        """Return the database for the one replica that keeps containers, None while another replica does."""
        return self


class SqliteDatabase(Database):
    """A file in a directory.  ``serving``: no other process may open it for serving meanwhile.

    API keys may be made beside it.  ``moved``: open it even if it was copied into another database, which has been
    changed since.  Raises HostError (OCIGPU-CAAS-1) if the file cannot be opened, is of a newer version, is being
    served, or was copied.
    """

    _url = "sqlite://"
    _begin = ("begin immediate",)

    def __init__(self, directory: str, serving: bool = False, create: bool = True, moved: bool = False) -> None:
        super().__init__(os.path.join(directory, FILE))
        if not create and not os.path.exists(self.place):
            raise no_store(self.place)
        self._directory, self._lock = directory, -1
        self.unclean = True  # a process that was killed may have left something
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            if serving:
                self._lock = lock_file(f"{self.place}.lock")
                if not lock(self._lock, 0):
                    raise HostError("OCIGPU-CAAS-1", f"{self.place}: another service uses it", "one service at a time")
            os.close(lock_file(self.place))
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            raise HostError("OCIGPU-CAAS-1", f"{self.place}: {error.strerror}") from error
        self._open()
        if not moved and (rows := self.read(_MOVED)):
            self.close()
            to = rows[0][0].decode()
            again = f"ocigpu caas copy-store --reopen --store {shlex.quote(directory)}"
            hint = f"name that database with --store; to use this out-of-date file all the same: {again}"
            raise HostError("OCIGPU-CAAS-1", f"{self.place}: it was copied to {to}, which services use since", hint)
        if serving:
            self.clean()

    def note_moved(self, place: str) -> None:
        """Record that the store was copied to another place: this file is out of date from now on."""
        with self.change() as base:
            base.execute(_FORGET_MOVED)
            base.execute(sa.insert(tables.meta).values(name=MOVED, value=place.encode()))

    def forget_moved(self) -> bool:
        """Forget that the store was copied; returns whether it was."""
        with self.change() as base:
            return base.execute(_FORGET_MOVED).rowcount > 0

    def close(self) -> None:
        """Close the file and release its lock."""
        super().close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _connect(self) -> sqlite3.Connection:
        base = sqlite3.connect(self.place, timeout=10, isolation_level=None, check_same_thread=False)
        # deleted data is overwritten: values of secrets; FULL: an answer is sent once its data is on the disk
        for pragma in ("journal_mode = wal", "synchronous = full", "secure_delete = on"):
            base.execute(f"pragma {pragma}")
        return base

    def clean(self) -> None:
        """Empty the log of changes (WAL), which keeps deleted values; during a read of the file, the next call does it.

        Source: "PRAGMA wal_checkpoint", TRUNCATE.
        """
        if not self.unclean:
            return
        with self._connection() as base:
            base.exec_driver_sql("pragma busy_timeout = 0")
            try:
                (busy, _, _) = base.exec_driver_sql("pragma wal_checkpoint(truncate)").one()
            except DBAPIError:  # a full disk: nothing is lost
                busy = 1
            base.exec_driver_sql("pragma busy_timeout = 10000")
        self.unclean = bool(busy)

    def has_space(self, size: int) -> bool:
        """Tell whether the disk has room for this many more bytes; freed space in the file is used again."""
        disk = os.statvfs(self._directory)
        unused = sa.text("select freelist_count * page_size from pragma_freelist_count, pragma_page_size")
        return int(disk.f_bavail * disk.f_frsize + self.read(unused)[0][0]) >= size


def cause_of(error: Exception) -> str:
    """Return the cause of a database's error, on one line; what libpq says of each of its attempts, once."""
    text = error.strerror if isinstance(error, OSError) else str(getattr(error, "orig", error))
    lines = dict.fromkeys(line.removeprefix("connection failed: ") for line in (text or "").splitlines())
    return printable(" ".join(" ".join(lines).split()), 400)


def no_store(place: str) -> HostError:
    """Return the error of what opens a store and does not make one: a key of a new store would be no service's."""
    hint = "Run it where the service runs: kubectl exec -n ocigpu deploy/ocigpu-caas -- ocigpu caas admin-key"
    return HostError("OCIGPU-CAAS-1", f"{place}: no service has its store here", hint)


def _upgrade(base: sa.Connection, place: str, create: bool) -> None:
    """Bring the tables to this version, in the transaction of ``base``."""
    here = sa.inspect(base)
    version = str(base.execute(sa.text("select version_num from alembic_version")).scalar()) if (
        here.has_table("alembic_version")) else ""  # fmt: skip
    if version == tables.REVISION:
        return
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config(attributes={"connection": base})
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
    sqlite = base.dialect.name == "sqlite"
    number = 0 if version or not sqlite else int(base.exec_driver_sql("pragma user_version").scalar_one())
    newer = HostError("OCIGPU-CAAS-1", f"{place}: written by a newer ocigpu", "run that version")
    if number > _LAST_NUMBERED:
        raise newer
    if not (version or number or create):
        raise no_store(place)
    if number:
        command.stamp(config, str(number))
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise newer from error
    if sqlite:  # versions that do not know the table see that the file is newer
        base.exec_driver_sql(f"pragma user_version = {_LAST_NUMBERED + 1}")
    if not version and not number:
        base.execute(sa.insert(tables.meta).values(name="secret", value=secrets.token_bytes(32)))
