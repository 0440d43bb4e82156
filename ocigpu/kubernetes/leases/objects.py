"""A lease and its object, kind GPULease: status of the lease, wishes of operators, notices to them.  Pure.

A wish is level-triggered: it is checked again and again, and the lease gets an event whenever it differs from the wish.
A release names one quarantine by generation and turn, so it can never release a later one.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ocigpu.kubernetes.cluster.announce import Verdict, make_conditions
from ocigpu.kubernetes.leases.lease import OVER, PROOFS, Lease, LeaseEvent, LeaseEventKind, Phase, describe

BY_OBJECT = "ObjectRequest"
"""Reason of maintenance that an object wants; it ends when the object no longer does, other maintenance does not."""


class LeaseWish(NamedTuple):
    """``release``: name of the quarantine that is over; ``why``: for the history."""

    maintenance: bool = False
    release: str = ""
    why: str = ""


def read_wish(document: Mapping[str, Any]) -> LeaseWish:
    """Return the wish in an object's ``spec``; a field whose type violates the kind's schema is ignored."""
    spec = document.get("spec") or {}
    release, why = (spec.get(name) for name in ("release", "reason"))
    return LeaseWish(
        spec.get("maintenance") is True,
        release if isinstance(release, str) else "",
        why if isinstance(why, str) else "",
    )


def quarantine_name(lease: Lease) -> str:
    """Return the unique name of the quarantine that a GPU is in; "" for none."""
    return f"{lease.generation}/{lease.turn}" if lease.phase is Phase.QUARANTINED else ""


def act_for(lease: Lease, wish: LeaseWish) -> LeaseEvent | None:
    """Return the event for a lease, None when it matches the wish, or must not match it yet."""
    fence = (lease.generation, lease.turn)
    if wish.release and wish.release == quarantine_name(lease):
        return LeaseEvent(LeaseEventKind.RELEASE, *fence, text=wish.why)
    ours = (lease.reason if lease.phase is Phase.MAINTENANCE else lease.maintenance).startswith(BY_OBJECT)
    if ours and not wish.maintenance:
        return LeaseEvent(LeaseEventKind.RELEASE, *fence, text=wish.why)
    kept = lease.phase in (Phase.QUARANTINED, Phase.MAINTENANCE) or lease.maintenance
    if wish.maintenance and not kept:
        return LeaseEvent(LeaseEventKind.MAINTAIN, *fence, text=f"{BY_OBJECT}: {wish.why}")
    return None


def why_not_as_wished(lease: Lease, wish: LeaseWish) -> str:
    """Return what a wish waits for, "" when the GPU is as wished."""
    if wish.maintenance and lease.phase is not Phase.MAINTENANCE:
        first = "is released" if lease.phase is Phase.QUARANTINED else "is back, reset and checked"
        return f"maintenance begins when the GPU {first}"
    return "the quarantine ends now" if wish.release and wish.release == quarantine_name(lease) else ""


Document = dict[str, Any]


def make_lease_status(lease: Lease, since: str, found: Document, module: int | None = None) -> Document:
    """Return the status of an object; unchanged conditions keep their time.

    ``since``: when the phase was entered; ``module``: the physical id of the GPU in partitions.
    """
    holder, wish = lease.holder, read_wish(found)
    status: Document = {
        "phase": str(lease.phase),
        "generation": lease.generation,
        "since": since,
        "reason": lease.sick_reason or lease.reason,
        "message": describe(lease),
        "quarantine": quarantine_name(lease) or None,
        "physicalId": module,
        "set": list(lease.members),
        "missing": [proof for proof in PROOFS if proof not in lease.proofs] if lease.phase is Phase.RECLAIMING else [],
        "holder": {
            "namespace": holder.namespace,
            "podName": holder.pod,
            "podUID": holder.uid,
            "container": holder.container,
            "tenancy": holder.tenancy,
        }
        if holder
        else None,
        "observedGeneration": int(found["metadata"].get("generation") or 0),
    }
    well = not lease.sick and lease.phase is not Phase.QUARANTINED
    pod_over = lease.phase is not Phase.LEASED and (OVER in lease.proofs or holder is None)
    waits, said = why_not_as_wished(lease, wish), describe(lease)
    facts = (
        Verdict("Ready", lease.phase is Phase.FREE, str(lease.phase), said),
        Verdict("DeviceHealthy", well, "AsExpected" if well else lease.sick_reason or lease.reason or "Unknown", said),
        Verdict("PodOver", pod_over, str(lease.phase), said),
        Verdict("AsWished", not waits, str(lease.phase), waits),
    )
    status["conditions"] = make_conditions(facts, found, since)
    return status


class Notice(NamedTuple):
    """``reason``: in one word; ``name``: unique to this notice, however often it is repeated."""

    gpu: str
    name: str
    reason: str
    text: str
    warning: bool = True


def notices_between(before: Lease, lease: Lease) -> tuple[Notice, ...]:
    """Return what has happened between two looks at a lease that an operator must hear of."""
    found: list[tuple[str, str, bool]] = []
    if before.phase is not lease.phase:
        if lease.phase is Phase.QUARANTINED:
            found.append(("Quarantined", describe(lease), True))
        elif lease.phase is Phase.MAINTENANCE:
            found.append(("Maintenance", describe(lease), False))
        elif lease.reason == "Released":
            found.append(("Released", f"{before.phase} is over, reset and check follow: {lease.detail}", False))
        elif lease.reason == "PartitionFailed":
            found.append(("FabricBroken", describe(lease), True))
    if lease.failures and not before.failures:
        found.append(("CheckFailed", f"retrying: {lease.detail}", True))
    if lease.sick and lease.sick != before.sick and lease.phase is not Phase.QUARANTINED:
        reason = "FabricBroken" if lease.sick_reason == "PartitionLost" else "DeviceUnhealthy"
        found.append((reason, f"it will be quarantined after its tenant: {lease.sick}", True))
    fence = f"{lease.generation}-{lease.turn}"
    return tuple(
        Notice(lease.gpu, f"{fence}-{reason.lower()}", reason, f"GPU {lease.gpu}: {text}", warning)
        for reason, text, warning in dict.fromkeys(found)
    )
