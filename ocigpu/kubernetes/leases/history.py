"""The history of each GPU, from the journal's lines, in the form that operators show to auditors.

The form is that of NVIDIA/ai-cloud-validation 1207cb7 (its test of sanitising): per machine the state now, the tenant
served last, and the transitions in_use, sanitizing, available.  A decision to quarantine a GPU later, or to keep it for
maintenance, is a transition from a state to the same one.
"""

from collections.abc import Iterable
from typing import Any

from ocigpu.kubernetes.leases.journal import Recorded
from ocigpu.kubernetes.leases.lease import RESET, Lease, Phase

STATES = {
    Phase.UNKNOWN: "unknown",
    Phase.FREE: "available",
    Phase.RESERVED: "in_use",
    Phase.LEASED: "in_use",
    Phase.RECLAIMING: "sanitizing",
    Phase.CHECKING: "sanitizing",
    Phase.QUARANTINED: "quarantined",
    Phase.MAINTENANCE: "maintenance",
}


def show_history(records: Iterable[Recorded], gpu: str = "") -> list[dict[str, Any]]:
    """Return an object for each GPU, or for one.

    ``sanitized``: a reset was proven and a check passed since the last tenant; ``stale_tenant_binding``: it is
    available but still recorded for a tenant, which would be a defect.
    """
    found: dict[str, dict[str, Any]] = {}
    before: dict[str, Lease] = {}
    for record in records:
        for lease in record.leases:
            if not gpu or lease.gpu == gpu:
                machine = found.setdefault(lease.gpu, _new(lease.gpu))
                _note(machine, record, before.get(lease.gpu), lease)
                before[lease.gpu] = lease
    return [found[name] for name in sorted(found)]


def _new(gpu: str) -> dict[str, Any]:
    return {"machine_id": gpu, "status": "", "served_tenant": "", "sanitized": False, "transitions": []}


def _note(machine: dict[str, Any], record: Recorded, before: Lease | None, lease: Lease) -> None:
    state = STATES[lease.phase]
    if lease.holder:
        machine["served_tenant"] = lease.holder.tenancy or lease.holder.namespace
    if RESET in lease.proofs:
        machine["reset"] = lease.detail
    if before is not None and before.phase is Phase.CHECKING and lease.phase in (Phase.FREE, Phase.MAINTENANCE):
        machine["sanitized"] = True
    elif state not in ("available", "maintenance"):
        machine["sanitized"] = False
    machine |= {"status": state, "generation": lease.generation}
    machine["stale_tenant_binding"] = state == "available" and lease.holder is not None
    intent = lease.sick or lease.maintenance
    decided = before is not None and before.phase is lease.phase and intent != (before.sick or before.maintenance)
    if before is None or before.phase is not lease.phase or decided:
        machine["transitions"].append(
            {
                "time": record.time,
                "from": STATES[before.phase] if before else "",
                "to": state,
                "phase": str(lease.phase),
                "generation": lease.generation,
                "tenant": (lease.holder.tenancy or lease.holder.namespace) if lease.holder else "",
                "cause": record.cause,
                "reason": (decided and intent.partition(":")[0]) or lease.reason,
                "detail": lease.detail,
            }
        )
