"""The first tables."""

import sqlalchemy as sa
from alembic import op

from ocigpu.tenants.service.tables import FLAG, NUMBER, SECONDS, Words

revision = "1"
down_revision = None


def upgrade() -> None:
    """Make the tables."""
    _table("meta", sa.Column("name", Words, primary_key=True), sa.Column("value", sa.LargeBinary, nullable=False))
    _table(
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
    )
    op.create_index("by_tenancy", "containers", ["tenancy", "id"])
    op.create_index("live", "containers", ["gone", "lifecycle"])
    op.create_table(
        "events",
        sa.Column("id", NUMBER, primary_key=True),
        sa.Column("at", SECONDS, nullable=False),
        *(
            sa.Column(name, Words, nullable=False)
            for name in ("kind", "container", "tenancy", "lifecycle", "reason", "detail")
        ),
        sqlite_autoincrement=True,
    )
    op.create_index("of_container", "events", ["container", "id"])
    _table(
        "idempotency",
        sa.Column("tenancy", Words, primary_key=True),
        sa.Column("key", sa.LargeBinary, primary_key=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("container", Words, nullable=False),
        sa.Column("expires", SECONDS, nullable=False),
    )
    _table(
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
    _table("logs", sa.Column("container", Words, primary_key=True), sa.Column("text", sa.LargeBinary, nullable=False))


def _table(name: str, *columns: sa.Column[object]) -> None:
    op.create_table(name, *columns, sqlite_with_rowid=False)
