"""The tables of the store, for SQLite and PostgreSQL alike; ``migrations/`` makes them, and changes older ones."""

from typing import Any

import sqlalchemy as sa

REVISION = "5"
"""The newest revision in ``migrations/versions``."""


class Words(sa.types.TypeDecorator[str]):
    """Text, sorted by its code points in both databases; a NUL, which PostgreSQL cannot store, becomes U+FFFD."""

    impl = sa.Text
    cache_ok = True

    def load_dialect_impl(self, dialect: sa.Dialect) -> sa.types.TypeEngine[Any]:
        """Return the type of a database, see SQLAlchemy."""
        return dialect.type_descriptor(sa.Text(collation="C" if dialect.name == "postgresql" else None))

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:  # noqa: ARG002 - SQLAlchemy's
        """Return text that both databases can store."""
        return value and value.replace("\0", "\ufffd")


SECONDS: sa.types.TypeEngine[float] = sa.Double().with_variant(sa.REAL(), "sqlite")
"""Since 1970."""
FLAG: Any = {"type_": sa.Integer, "nullable": False, "server_default": sa.text("0")}
NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
metadata = sa.MetaData()


def _table(name: str, *parts: sa.schema.SchemaItem) -> sa.Table:
    return sa.Table(name, metadata, *parts, sqlite_with_rowid=False)


meta = _table("meta", sa.Column("name", Words, primary_key=True), sa.Column("value", sa.LargeBinary, nullable=False))
containers = _table(
    "containers",
    sa.Column("id", Words, primary_key=True),
    sa.Column("tenancy", Words, nullable=False),
    sa.Column("created", SECONDS, nullable=False),
    sa.Column("request", Words, nullable=False),
    sa.Column("secrets", Words),
    sa.Column("made", **FLAG),
    sa.Column("deleting", **FLAG),
    sa.Column("gone", **FLAG),
    sa.Column("lifecycle", Words, nullable=False, server_default=sa.text("'accepted'")),
    sa.Column("reason", Words, nullable=False, server_default=sa.text("''")),
    sa.Column("standing", Words, nullable=False, server_default=sa.text("'{}'")),
    sa.Column("version", sa.Integer, nullable=False, server_default=sa.text("1")),
    sa.Column("size", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("gpus", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("finished", SECONDS),
)
_of = containers.c
sa.Index("by_tenancy", _of.tenancy, _of.id)
sa.Index("live", _of.gone, _of.lifecycle)
sa.Index("sizes", _of.tenancy, _of.id, _of.gone, _of.deleting, _of.lifecycle, _of.size)
_to_delete = sa.and_(_of.deleting == 1, _of.gone == 0)
sa.Index("to_delete", _of.id, sqlite_where=_to_delete, postgresql_where=_to_delete)
events = sa.Table(
    "events",
    metadata,
    sa.Column("id", NUMBER, primary_key=True),
    sa.Column("at", SECONDS, nullable=False),
    *(
        sa.Column(name, Words, nullable=False)
        for name in ("kind", "container", "tenancy", "lifecycle", "reason", "detail")
    ),
    sa.Column("gpus", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("started", SECONDS),
    sa.Column("finished", SECONDS),
    sqlite_autoincrement=True,
)
sa.Index("of_container", events.c.container, events.c.id)
sa.Index("events_of_tenancy", events.c.tenancy, events.c.id)
idempotency = _table(
    "idempotency",
    sa.Column("tenancy", Words, primary_key=True),
    sa.Column("key", sa.LargeBinary, primary_key=True),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("container", Words, nullable=False),
    sa.Column("expires", SECONDS, nullable=False),
)
keys = _table(
    "keys",
    sa.Column("id", Words, primary_key=True),
    sa.Column("hash", sa.LargeBinary, nullable=False),
    sa.Column("tenancy", Words),
    sa.Column("scopes", Words, nullable=False),
    sa.Column("label", Words, nullable=False),
    sa.Column("created", SECONDS, nullable=False),
    sa.Column("expires", SECONDS),
    sa.Column("revoked", **FLAG),
)
logs = _table(
    "logs", sa.Column("container", Words, primary_key=True), sa.Column("text", sa.LargeBinary, nullable=False)
)
tenancies = _table("tenancies", sa.Column("name", Words, primary_key=True), sa.Column("uid", Words, nullable=False))
