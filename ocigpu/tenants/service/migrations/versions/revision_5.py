"""Events say what to bill: how many GPUs a container has, and when it ran; older events do not."""

import sqlalchemy as sa
from alembic import op

from ocigpu.tenants.service.tables import SECONDS

revision = "5"
down_revision = "4"


def upgrade() -> None:
    """Add the columns; a container whose row remains knows its number of GPUs."""
    op.add_column("events", sa.Column("gpus", sa.Integer, nullable=False, server_default=sa.text("0")))
    op.add_column("events", sa.Column("started", SECONDS))
    op.add_column("events", sa.Column("finished", SECONDS))
    containers = sa.table("containers", sa.column("id"), sa.column("gpus"))
    events = sa.table("events", sa.column("container"), sa.column("gpus"))
    known = sa.select(containers.c.gpus).where(containers.c.id == events.c.container).scalar_subquery()
    op.get_bind().execute(sa.update(events).values(gpus=sa.func.coalesce(known, 0)))
