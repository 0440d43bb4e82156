"""Groups for a container's process, so that users other than root can open the nodes of its GPUs.

In the container only root and the group can open a node of mode 0660 and group render or video.  The plan lists the
groups (:class:`ocigpu.core.actions.JoinGroup`); :mod:`ocigpu.bundle.edit` puts them into a config.json.
"""

import os

from ocigpu.core.config_json import get_list, get_object, has_user_namespace, map_inside
from ocigpu.system.namespaces import in_initial_user_namespace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

KEEP_GROUPS = "run.oci.keep_original_groups"
"""Annotation with which crun keeps the groups of who starts it, and sets no others (crun(1), extensions)."""

OVERFLOW_GID = "/proc/sys/kernel/overflowgid"
OWN_PROC = "/proc/self"


def missing_groups(config: "dict[str, Any]", gids: "Sequence[int]") -> "tuple[str, ...]":
    """Return a note on groups of the host that a container's process should be in and is not; () if it runs as root.

    This is for callers that run after config.json was read: an existing process cannot be put into a group.
    """
    user = get_object(get_object(config, "process"), "user")
    if not user.get("uid"):
        return ()
    missing = [
        gid for gid in fit_groups(config, gids)[0] if gid not in (user.get("gid"), *get_list(user, "additionalGids"))
    ]
    if not missing:
        return ()
    text = ", ".join(map(str, missing))
    return (
        f"user {user['uid']} of the container is not in group {text} and may not open its nodes (--group-add {text})",
    )


def fit_groups(config: "dict[str, Any]", gids: "Sequence[int]") -> "tuple[list[int], tuple[str, ...]]":
    """Return the ids by which a container's process can be in these groups of the host, and notes on the others.

    In a user namespace a group has its mapped id.  With an unmapped group setgroups(2) would fail and the container not
    start.
    """
    if reason := _why_none(config):
        return [], (f"users of the container are not put into groups of device nodes: {reason}",)
    fitting, left = [], []
    for gid in gids:
        inside = _map_inside(config, gid) if _is_known_here(gid) else -1
        if inside < 0:
            left.append(str(gid))
        else:
            fitting.append(inside)
    if not left:
        return fitting, ()
    text = f"the user namespace has no group {', '.join(left)} of device nodes: only root may be able to open them"
    return fitting, (text,)


def _why_none(config: "dict[str, Any]") -> str:
    if get_object(config, "annotations").get(KEEP_GROUPS) == "1":
        return f"annotation {KEEP_GROUPS}"
    if (
        os.geteuid() != 0
    ):  # runc refuses a configuration with any: "cannot set any additional groups in a rootless container"
        return "the runtime is started by an ordinary user"
    return ""


def _map_inside(config: "dict[str, Any]", gid: int) -> int:
    """Return the id of our group in the container's user namespace, -1 without one."""
    if not has_user_namespace(config):
        return gid
    return map_inside(get_list(get_object(config, "linux"), "gidMappings"), gid)


def _is_known_here(gid: int) -> bool:
    """Tell whether a node's group, as we see it, exists in our own user namespace.

    All groups that are not mapped there appear as the overflow id (user_namespaces(7)).
    """
    if in_initial_user_namespace():
        return True
    try:
        with open(OVERFLOW_GID, encoding="ascii") as file:
            overflow = int(file.read())
        with open(f"{OWN_PROC}/setgroups", encoding="ascii") as file:
            denied = file.read().strip() == "deny"
        with open(f"{OWN_PROC}/gid_map", encoding="ascii") as file:
            ranges = [list(map(int, line.split())) for line in file]
    except (OSError, ValueError):
        return False
    return not denied and gid != overflow and any(0 <= gid - first < size for first, _, size in ranges)
