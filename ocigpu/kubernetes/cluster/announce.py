"""Conditions of Kubernetes objects, and events about tenancies, leases and containers.  Pure.

Sources: "API Conventions" (conditions), reference of events.k8s.io/v1, and k8s.io/kubernetes
pkg/apis/core/validation/events.go: events about a cluster-scoped object are in the namespace default, notes have at
most 1024 bytes, action and reporter are never empty.
"""

import socket
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from ocigpu.core.errors import printable

API = "events.k8s.io/v1"
MAX_NOTE = 1024


class Verdict(NamedTuple):
    """A condition before it has a time."""

    type: str
    holds: bool
    reason: str
    message: str = ""


def make_conditions(verdicts: Iterable[Verdict], found: Mapping[str, Any], now: str) -> list[dict[str, Any]]:
    """Return the conditions of an object; an unchanged one keeps its time, the others get ``now``."""
    before = {each["type"]: each for each in (found.get("status") or {}).get("conditions") or ()}
    conditions = []
    for each in verdicts:
        status, old = "True" if each.holds else "False", before.get(each.type)
        conditions.append({
            "type": each.type, "status": status, "reason": each.reason, "message": each.message,
            "lastTransitionTime": old["lastTransitionTime"] if old and old["status"] == status else now,
            "observedGeneration": int(found["metadata"].get("generation") or 0),
        })  # fmt: skip
    return conditions


def micro_time(at: float) -> str:
    """Return seconds since 1970 as Kubernetes' MicroTime has them."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def make_event(
    regarding: Mapping[str, Any],
    reporter: str,
    reason: str,
    note: str,
    warning: bool,
    at: float,
    *,
    name: str = "",
    instance: str = "",
) -> dict[str, Any]:
    """Return an Event about an object: apiVersion, kind, name, and namespace and uid where it has them.

    ``reporter``: the program of ours that reports; ``instance``: its machine, "" for this one; ``reason``: a word in
    CamelCase; ``at``: seconds since 1970; ``name``: of the event, "" derives it from the time.  A repeated event with
    the same name already exists.
    """
    name = name or f"{regarding['name']}.{int(at * 1e6):x}"
    return {
        "apiVersion": API,
        "kind": "Event",
        "metadata": {"name": name, "namespace": regarding.get("namespace", "default")},
        "regarding": dict(regarding),
        "eventTime": micro_time(at),
        "type": "Warning" if warning else "Normal",
        "reason": reason,
        "action": "Reconcile",
        "note": printable(note, MAX_NOTE).encode()[:MAX_NOTE].decode(errors="ignore"),
        "reportingController": f"ocigpu.io/{reporter}",
        "reportingInstance": (instance or socket.gethostname())[:128] or "unknown",
    }
