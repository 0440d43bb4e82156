"""Sizes of requests, indexes for long lists, whose a tenancy's name is."""

import sqlalchemy as sa
from alembic import op

from ocigpu.tenants.service.tables import Words

revision = "2"
down_revision = "1"


def upgrade() -> None:
    """Add them."""
    op.add_column("containers", sa.Column("size", sa.Integer, nullable=False, server_default=sa.text("0")))
    op.execute("update containers set size = length(request)")
    op.create_index("sizes", "containers", ["tenancy", "id", "gone", "deleting", "lifecycle", "size"])
    op.create_index("events_of_tenancy", "events", ["tenancy", "id"])
    op.create_table(
        "tenancies",
        sa.Column("name", Words, primary_key=True),
        sa.Column("uid", Words, nullable=False),
        sqlite_with_rowid=False,
    )
