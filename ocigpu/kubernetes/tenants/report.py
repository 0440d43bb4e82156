"""Leases as objects of the cluster, kind GPULease: they follow the node's journal, and nothing waits for them.

Needs lightkube: it is imported only where a command has made sure of it.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from typing import Any

from ocigpu.core.errors import HostError, as_own_error
from ocigpu.kubernetes.tenants.lease import OVER, PROOFS, Lease, Phase, describe
from ocigpu.kubernetes.tenants.resources import Documents
from ocigpu.system.service import Backoff

API, KIND = "ocigpu.io/v1alpha1", "GPULease"
FIRST_RETRY, LONGEST_RETRY = 1.0, 60.0
Document = dict[str, Any]


def lease_name(node: str, gpu: str) -> str:
    """Return the name of a GPU's object."""
    return f"{node}-{gpu.replace(':', '-').replace('.', '-')}"


def make_lease_status(lease: Lease, since: str, before: Document, generation: int) -> Document:
    """Return the status of an object; conditions that say the same keep their time.

    ``since``: when the phase was entered; ``before``: the status as it is; ``generation``: the object's own.
    """
    holder = lease.holder
    status: Document = {
        "phase": str(lease.phase),
        "generation": lease.generation,
        "since": since,
        "reason": lease.sick or lease.reason,
        "message": describe(lease),
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
        "observedGeneration": generation,
    }
    well = not lease.sick and lease.phase is not Phase.QUARANTINED
    facts = {
        "Ready": (lease.phase is Phase.FREE, str(lease.phase)),
        "DeviceHealthy": (well, "AsExpected" if well else lease.sick or lease.reason or "Unknown"),
        "PodOver": (lease.phase is not Phase.LEASED and (OVER in lease.proofs or holder is None), str(lease.phase)),
    }
    known = {each["type"]: each for each in before.get("conditions") or ()}
    status["conditions"] = [
        _condition(kind, true, reason, describe(lease), since, known.get(kind), generation)
        for kind, (true, reason) in facts.items()
    ]
    return status


def _condition(
    kind: str, true: bool, reason: str, message: str, now: str, before: Document | None, generation: int
) -> Document:
    status = "True" if true else "False"
    when = before["lastTransitionTime"] if before and before["status"] == status else now
    head = {"type": kind, "status": status, "reason": reason, "message": message}
    return {**head, "lastTransitionTime": when, "observedGeneration": generation}


class LeaseReporter:
    """Writes the objects of a node's leases; :meth:`step` never waits: an API server that is gone is caught up with.

    ``executor``: writes in a thread of its own; ``wall``: the clock of the objects' times; ``clock``: of back-off.
    """

    def __init__(
        self,
        documents: Documents,
        node: str,
        executor: Executor,
        log: Callable[[str, str], None],
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._documents = documents
        self._node = node
        self._executor = executor
        self._log = log
        self._wall = wall
        self._clock = clock
        self._told: dict[str, Lease] = {}
        self._under_way: Future[None] | None = None
        self._retry = Backoff(FIRST_RETRY, LONGEST_RETRY)
        self._problem = ""

    def step(self, leases: Mapping[str, Lease], now: float) -> None:
        """Begin to write what has changed.  ``now``: on the clock of the leases."""
        if self._under_way is not None:
            if not self._under_way.done():
                return
            self._finish(self._under_way)
        changed = {gpu: lease for gpu, lease in leases.items() if _shown(self._told.get(gpu)) != _shown(lease)}
        if changed and self._clock() >= self._retry.due:
            self._under_way = self._executor.submit(self._write, changed, now)

    def _finish(self, done: "Future[None]") -> None:
        self._under_way = None
        error = done.exception()
        if error is None:
            self._retry.reset()
            self._problem = ""
            return
        self._retry.failed(self._clock())
        own = as_own_error(error)
        if own.message != self._problem:
            self._log("warning", f"objects of leases: {own.code}: {own.message}; leases go on without them")
        self._problem = own.message

    def _write(self, leases: Mapping[str, Lease], now: float) -> None:
        for gpu, lease in leases.items():
            self._write_one(lease, now)
            self._told[gpu] = lease

    def _write_one(self, lease: Lease, now: float) -> None:
        name = lease_name(self._node, lease.gpu)
        found = self._documents.get(KIND, name)
        spec = {"nodeName": self._node, "pciAddress": lease.gpu}
        if found is None:
            found = self._documents.create({"apiVersion": API, "kind": KIND, "metadata": {"name": name}, "spec": spec})
        if found.get("spec") != spec:
            raise HostError("OCIGPU-KUBE-5", f"GPULease {name} is about another GPU", "Delete the object.")
        entered = self._wall() - max(now - lease.since, 0.0)
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entered))
        own = int(found["metadata"].get("generation") or 0)
        status = make_lease_status(lease, since, found.get("status") or {}, own)
        self._documents.patch_status(found, status)


def _shown(lease: Lease | None) -> tuple[Any, ...]:
    """Return what an object shows of a lease."""
    if lease is None:
        return ()
    return (lease.phase, lease.generation, lease.holder, lease.proofs, lease.sick, lease.reason, lease.detail)
