"""Details quoted what containers printed, which takes another scope."""

import json

import sqlalchemy as sa
from alembic import op

revision = "3"
down_revision = "2"
QUOTED = ("exit_nonzero", "oom_killed", "cuda_fabric_not_ready", "restarting")


def upgrade() -> None:
    """Remove them."""
    containers = sa.table("containers", sa.column("id"), sa.column("reason"), sa.column("standing"))
    events, base = sa.table("events", sa.column("reason"), sa.column("detail")), op.get_bind()
    base.execute(sa.update(events).where(events.c.reason.in_(QUOTED)).values(detail=""))
    found = base.execute(sa.select(containers.c.id, containers.c.standing).where(containers.c.reason.in_(QUOTED)))
    for number, standing in found.all():
        text = json.dumps({**json.loads(standing), "detail": ""})
        base.execute(sa.update(containers).where(containers.c.id == number).values(standing=text))
