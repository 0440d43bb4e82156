"""Copies a store from its SQLite file into an empty PostgreSQL database, all of it or nothing."""

import os
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from ocigpu.core.errors import HostError
from ocigpu.tenants.service import tables
from ocigpu.tenants.service.database import FILE, Database, SqliteDatabase, cause_of
from ocigpu.tenants.service.postgresql import PostgresDatabase, read_url

ROWS = 16
"""Read at one time: a row has up to 4 MiB."""
_TABLES = [table for table in tables.metadata.sorted_tables if table is not tables.meta]


def copy_store(directory: str, url: str) -> dict[str, int]:
    """Copy the store in a directory into the database at a URL; return the number of rows by table.

    Every row is read back and compared.  The source is locked meanwhile, and keeps its rows; its tables are brought to
    this version.  Afterwards it is marked, so that no service starts with it.  Raises SettingsError and HostError
    (OCIGPU-CAAS-1), also if a service uses one of the two, or if the database has rows; then it gets none.
    """
    read_url(url)  # a password in it is told before anything else
    place = os.path.join(directory, FILE)
    if not os.path.exists(place):
        raise HostError(
            "OCIGPU-CAAS-1", f"{place}: does not exist", "--store names the directory of the service's store"
        )
    source = SqliteDatabase(directory, serving=True, moved=True)
    try:
        target = PostgresDatabase(url)
        try:
            counts = _copy(source, target)
            source.note_moved(target.place)
            return counts
        except DBAPIError as error:
            raise HostError("OCIGPU-CAAS-1", f"{place} to {target.place}: {cause_of(error)}", "") from error
        finally:
            target.close()
    finally:
        source.close()


def reopen_store(directory: str) -> bool:
    """Let services use a file again that was copied; returns whether one was.  Raises HostError (OCIGPU-CAAS-1)."""
    source = SqliteDatabase(directory, serving=True, create=False, moved=True)
    try:
        return source.forget_moved()
    finally:
        source.close()


def _copy(source: Database, target: Database) -> dict[str, int]:
    """Copy in one transaction of the session that keeps containers: no replica keeps any, or starts, meanwhile."""
    session = target.hold()
    if session is None:
        raise HostError(
            "OCIGPU-CAAS-1", f"{target.place}: a service uses it", "stop that service, or name an empty database"
        )
    with source.change() as old, session.change() as new:
        for table in _TABLES:
            if new.execute(sa.select(sa.literal(1)).select_from(table).limit(1)).first():
                text = f"{target.place}: its table {table.name} has rows"
                raise HostError("OCIGPU-CAAS-1", text, "name an empty database")
        # hashes of Idempotency-Keys and cursors of lists depend on it
        new.execute(sa.update(tables.meta).where(tables.meta.c.name == "secret").values(value=source.secret))
        counts = {table.name: _copy_table(table, old, new) for table in _TABLES}
        # deleted events have had numbers, too, and a stream resumes by them
        last = old.execute(sa.text("select seq from sqlite_sequence where name = 'events'")).scalar()
        if last:
            new.execute(sa.select(sa.func.setval(sa.func.pg_get_serial_sequence("events", "id"), last)))
    return counts


def _copy_table(table: sa.Table, old: sa.Connection, new: sa.Connection) -> int:
    with _read(table, old) as found:
        for rows in found.mappings().partitions():
            new.execute(sa.insert(table), [dict(row) for row in rows])
    count = 0
    with _read(table, old) as found, _read(table, new) as stored:
        for count, (before, after) in enumerate(zip(found, stored, strict=True), 1):
            if [_stored(value) for value in before] != list(after):
                raise HostError("OCIGPU-CAAS-1", f"table {table.name}: row {count} was not stored as it was sent", "")
    return count


def _read(table: sa.Table, base: sa.Connection) -> "sa.CursorResult[Any]":
    """Return the rows in the order of their key, a few in memory at one time."""
    return base.execute(sa.select(table).order_by(*table.primary_key).execution_options(yield_per=ROWS))


def _stored(value: Any) -> Any:
    """Return what PostgreSQL has of a value, see Words."""
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value
