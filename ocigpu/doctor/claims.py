"""Checks of a node whose GPUs are given to resource claims: pure functions over the facts of claim_facts.py."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ocigpu.doctor.claim_facts import CHECKPOINT, REGISTRY, ClaimFacts, DriverFacts
from ocigpu.doctor.findings import Evidence, Finding, not_checked, ok, say

if TYPE_CHECKING:
    from ocigpu.kubernetes.dra.claims import ClaimRef

GATES = {"taints": "DRADeviceTaints", "counters": "DRAPartitionableDevices", "sharing": "DRAConsumableCapacity"}
"""Feature gates of Kubernetes by the names of ApiFeatures."""


def check_registration(facts: ClaimFacts) -> list[Finding]:
    found = []
    for status, sockets, _ in facts.drivers:
        seen = tuple(Evidence(path, "answers" if well else "no process answers") for path, well in sockets)
        if not sockets:
            found.append(say("claims-registration.absent", driver=status.driver, path=REGISTRY))
        elif not any(well for _, well in sockets):
            found.append(say("claims-registration.silent", *seen, driver=status.driver))
        elif status.registered is False:
            found.append(say("claims-registration.refused", *seen, driver=status.driver, reason=status.refusal))
    return found or _well(facts, "registered")


def _well(facts: ClaimFacts, text: str) -> list[Finding]:
    names = ", ".join(each.status.driver for each in facts.drivers)
    return [ok(f"{names}: {text}")] if names else [not_checked("no driver of ocigpu has run on this node")]


def check_unprepared(facts: ClaimFacts) -> list[Finding]:
    if facts.objects is None:
        return [not_checked(facts.silent)]
    found = []
    for each, claim, document in _allocated(facts):
        record = each.claims.get(claim.uid)
        users = (document.get("status") or {}).get("reservedFor") or []
        pods = [str(user.get("name")) for user in users if user.get("resource") == "pods"]
        fixes = tuple(f"kubectl -n {claim.namespace} describe pod {pod}" for pod in pods)
        if record is not None and not record.done:
            found.append(say("claims-unprepared.half", claim=claim, fixes=fixes))
        elif record is None and pods:
            names = f"pod {', '.join(pods)}"
            found.append(say("claims-unprepared.missing", claim=claim, pods=names, fixes=fixes))
    return found or _well(facts, "every claim of a pod is prepared")


def _allocated(facts: ClaimFacts) -> "Iterator[tuple[DriverFacts, ClaimRef, dict[str, Any]]]":
    if not facts.drivers:
        return
    from ocigpu.kubernetes.dra.claims import ClaimRef, is_allocated  # pydantic

    for each in facts.drivers:
        for document in facts.objects or ():
            meta = document.get("metadata") or {}
            claim = ClaimRef(str(meta.get("namespace")), str(meta.get("uid")), str(meta.get("name")))
            if is_allocated(claim, document, each.status.driver, each.status.node):
                yield each, claim, document


def check_vanished(facts: ClaimFacts) -> list[Finding]:
    if facts.objects is None:
        return [not_checked(facts.silent)]
    there = {claim.uid for _, claim, _ in _allocated(facts)}
    found = [
        say("claims-vanished.left", claim=record.claim, devices=", ".join(one.device.name for one in record.devices))
        for each in facts.drivers
        for uid, record in each.claims.items()
        if uid not in there
    ]
    return found or _well(facts, "every prepared claim exists")


def check_dropped(facts: ClaimFacts) -> list[Finding]:
    found = []
    for each in facts.drivers:
        if missing := [name for name in each.status.missing if name in GATES]:
            gates = ",".join(f"{GATES[name]}=true" for name in missing)
            names = ", ".join(missing)
            found.append(say("claims-dropped.fields", features=names, driver=each.status.driver, gates=gates))
    return found or _well(facts, "its slices are kept whole")


def check_twice(facts: ClaimFacts) -> list[Finding]:
    found = []
    for status, sockets, _ in facts.drivers:
        for resource, count in facts.plugin.items():
            same = status.driver == f"gpu.{resource.partition('/')[0]}"
            if same and any(well for _, well in sockets):
                seen = Evidence(CHECKPOINT, f"{resource}: {count}")
                found.append(say("claims-twice.both", seen, count=count, resource=resource, driver=status.driver))
    return found or _well(facts, "no device plugin beside it")
