"""Columns for what was read from JSON, and an index for what is to be deleted: both databases have these alike."""

import json

import sqlalchemy as sa
from alembic import op

from ocigpu.tenants.service.tables import SECONDS

revision = "4"
down_revision = "3"


def upgrade() -> None:
    """Add them."""
    op.add_column("containers", sa.Column("gpus", sa.Integer, nullable=False, server_default=sa.text("0")))
    op.add_column("containers", sa.Column("finished", SECONDS))
    to_delete = sa.text("deleting = 1 AND gone = 0")
    op.create_index("to_delete", "containers", ["id"], sqlite_where=to_delete, postgresql_where=to_delete)
    names = ("id", "request", "standing", "gpus", "finished")
    containers, base = sa.table("containers", *map(sa.column, names)), op.get_bind()
    for number in base.execute(sa.select(containers.c.id)).scalars().all():
        one = containers.c.id == number  # a request may have 1 MiB
        request, standing = base.execute(sa.select(containers.c.request, containers.c.standing).where(one)).one()
        values = {"gpus": json.loads(request).get("gpus", 0), "finished": json.loads(standing).get("finished")}
        base.execute(sa.update(containers).where(one).values(**values))
