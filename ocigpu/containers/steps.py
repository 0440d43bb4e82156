"""The steps of a plan for display: what is made in a container, from which file of the host, and why."""

from ocigpu.core.actions import AllowDevice, Bind, Link, Node, Plan
from ocigpu.core.record import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ocigpu.core.actions import Action


class Step(NamedTuple):
    """One part of a plan: ``what``, where it comes from (a host path, the target of a link), why, and how it is now.

    ``now``: "there", "missing", "another" (something else has its place), "refused" (a node that the device cgroup does
    not allow), "allowed", "merged" (a loader cache that ldconfig has not written), "detached" (taken away by ocigpu
    detach) or "" (not looked at).
    """

    what: str
    source: str
    reason: str
    now: str = ""


def plan_steps(plan: Plan, now: "Mapping[int, str] | None" = None) -> list[Step]:
    """Return the actions of a plan; a node and the rule for it are one step.  ``now``: state by place in the plan."""
    nodes = {(action.node.major, action.node.minor) for action in plan.actions if isinstance(action, Node)}
    return [
        Step(*_shown(action), action.reason, now.get(place, "") if now else "")
        for place, action in enumerate(plan.actions)
        if not isinstance(action, AllowDevice) or (action.major, action.minor) not in nodes
    ]


def edit_steps(edits: "dict[str, Any]", reason: str) -> list[Step]:
    """Return the steps that containerEdits of CDI devices are."""
    from ocigpu.cdi.compare import edit_rows

    return [Step(" ".join(row), "", reason) for row in edit_rows(edits)]


def _shown(action: "Action") -> tuple[str, str]:
    """Return what an action makes, and of what on the host."""
    if isinstance(action, Bind):
        return f"{action.kind} {action.container_path}", action.host_path
    if isinstance(action, Link):
        return f"link {action.container_path}", action.target
    if isinstance(action, Node):
        return f"node {action.node.container_path} {action.node.major}:{action.node.minor}", action.node.host_path
    return action.describe(), ""
