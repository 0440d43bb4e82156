"""Another root in the paths of a CDI specification: pure, from one specification to a new one.

A specification that was generated inside a driver container names the host's files as that container sees them.
Which fields hold paths of the host and which paths of the container is the vendor's rule (``nvidia-ctk cdi transform
root``), with two differences: a device node gets a ``hostPath`` only if its path on the host changes, and the declared
version is raised to what the result needs.
"""

from collections.abc import Callable
from typing import Any

from ocigpu.cdi.versions import is_older, minimum_version, parse_version
from ocigpu.core.config_json import clean_path
from ocigpu.gpus.fingerprint import ANNOTATION as FINGERPRINT_ANNOTATION

Edits = dict[str, Any]
Transform = Callable[[str], str]

SIDES = ("host", "container")
_CONTAINER_HOOKS = ("createContainer", "startContainer")
_HOST_PATH_FLAGS = ("--config", "--driver-proc", "--ldconfig-path")
"""Flags of CDI hooks whose value is a path of the host although the hook's other arguments are the container's."""


def transform_root(spec: dict[str, Any], from_root: str, to_root: str, side: str = "host") -> dict[str, Any]:
    """Return ``spec`` with ``from_root`` replaced by ``to_root`` in its paths of the host, or of the container.

    Both are absolute ("" is "/").  A path is changed if it is the root or lies under it.  With another root on the host
    the fingerprint is left out: it belongs to the settings of the host that generated the specification.  Unchanged
    lists and objects are shared with ``spec``, which is not modified.
    """
    from_root, to_root = clean_path(from_root or "/"), clean_path(to_root or "/")

    def moved(path: str) -> str:
        return move_path(path, from_root, to_root)

    host = side == "host"
    result = dict(spec)
    if spec.get("containerEdits"):
        result["containerEdits"] = _move_edits(spec["containerEdits"], moved, host)
    result["devices"] = [
        {**device, "containerEdits": _move_edits(device.get("containerEdits") or {}, moved, host)}
        for device in spec.get("devices", ())
    ]
    if host and from_root != to_root and FINGERPRINT_ANNOTATION in spec.get("annotations", ()):
        result["annotations"] = {k: v for k, v in spec["annotations"].items() if k != FINGERPRINT_ANNOTATION}
        if not result["annotations"]:
            del result["annotations"]
    needed = minimum_version(result)
    declared = parse_version(spec["cdiVersion"])
    if not declared or is_older(declared, needed):
        result["cdiVersion"] = needed
    return result


def move_path(path: str, from_root: str, to_root: str) -> str:
    """Return an absolute ``path`` with its root replaced; any other text, and a path outside, unchanged."""
    if not path.startswith("/") or from_root == to_root:
        return path
    clean = clean_path(path)
    if clean == from_root:
        return to_root
    inside = from_root.rstrip("/") + "/"
    if not clean.startswith(inside):
        return path
    return to_root.rstrip("/") + "/" + clean[len(inside) :]


def _move_edits(edits: Edits, moved: Transform, host: bool) -> Edits:
    """Return containerEdits with the paths of the host moved, or else those of the container."""
    result = dict(edits)
    path = "hostPath" if host else "containerPath"
    if edits.get("mounts"):
        result["mounts"] = [{**mount, path: moved(mount[path])} for mount in edits["mounts"]]
    if edits.get("deviceNodes"):
        result["deviceNodes"] = [_move_node(node, moved, host) for node in edits["deviceNodes"]]
    if edits.get("hooks"):
        result["hooks"] = [_move_hook(hook, moved, host) for hook in edits["hooks"]]
    return result


def _move_node(node: dict[str, Any], moved: Transform, host: bool) -> dict[str, Any]:
    # Without a hostPath the node's path is the host's as well.
    before = (node["path"], node.get("hostPath") or node["path"])
    after = (before[0], moved(before[1])) if host else (moved(before[0]), before[1])
    if after == before:
        return node
    # A node's fields are in the order of the CDI library's own files.
    rest = {name: value for name, value in node.items() if name not in ("path", "hostPath")}
    return {"path": after[0], "hostPath": after[1], **rest}


def _move_hook(hook: dict[str, Any], moved: Transform, host: bool) -> dict[str, Any]:
    def halves(argument: str) -> str:
        return _move_halves(argument, moved)

    result = dict(hook)
    name = hook["hookName"]
    if host != (name == "startContainer"):  # whose program is a file of the container
        result["path"] = moved(hook["path"])
    if hook.get("args") and host:  # a hook outside the container names the host's files alone
        result["args"] = _map_arguments(hook["args"], moved, str if name in _CONTAINER_HOOKS else halves)
    elif hook.get("args") and name in _CONTAINER_HOOKS:
        result["args"] = _map_arguments(hook["args"], str, halves)
    return result


def _move_halves(argument: str, moved: Transform) -> str:
    """Return a link's TARGET::PATH with both halves moved, or a plain argument moved."""
    return "::".join(moved(part) for part in argument.split("::"))


def _map_arguments(arguments: list[str], host: Transform, container: Transform) -> list[str]:
    """Return the arguments of a hook of the container, each through the function for the side that its path is of."""
    result = []
    value_is_host = False
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if value_is_host:
            result.append(host(argument))
        elif equals and flag in _HOST_PATH_FLAGS:
            result.append(f"{flag}={host(value)}")
        elif equals and flag.startswith("--"):
            result.append(f"{flag}={container(value)}")
        else:
            result.append(container(argument))
        value_is_host = not value_is_host and not equals and flag in _HOST_PATH_FLAGS
    return result
