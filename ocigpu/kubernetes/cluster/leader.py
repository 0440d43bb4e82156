"""Leader election by an object of kind Lease: one of several replicas works.

No clock of another machine is trusted: a lease is over when its record has not changed for its duration on the
observer's clock.  A leader stops before that on its own.  Source: client-go's package leaderelection, "Leases" of
Kubernetes.
"""

import os
import socket
import time
from collections.abc import Callable
from typing import Any

from ocigpu.core.errors import HostError
from ocigpu.kubernetes.cluster.announce import micro_time
from ocigpu.kubernetes.cluster.documents import Documents
from ocigpu.system.service import ServiceLog

DURATION = 15.0
"""Seconds after which others may take a lease that is not renewed."""
DEADLINE = 10.0
"""Seconds after its last renewal until a leader stops."""
RETRY = 2.0
"""Seconds between attempts to take it or to renew it."""


class NotLeadingError(HostError):
    """The work must stop: another replica may be doing it."""


def own_identity() -> str:
    """Return a name that no other replica has."""
    return f"{socket.gethostname()}_{os.getpid()}_{os.urandom(4).hex()}"


def create_announcement(documents: Documents, event: "dict[str, Any]", log: ServiceLog) -> None:
    """Create an Event; a failure is logged, except NotLeadingError, which is raised."""
    try:
        documents.create(event)
    except NotLeadingError:
        raise
    except HostError as error:
        log.once("announce", "warning", error.message)


class Leader:
    """Whether this replica leads; ``clock``: monotonic seconds."""

    def __init__(
        self,
        documents: Documents,
        name: str,
        namespace: str,
        identity: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.documents, self._name, self._namespace, self._identity = documents, name, namespace, identity
        self._clock = clock
        self._renewed = -DURATION
        self._seen: tuple[Any, float] = (None, 0.0)
        self._held = self._said = False

    def is_leading(self) -> bool:
        return self._held and self._clock() < self._renewed + DEADLINE

    def check(self) -> None:
        """Raise NotLeadingError (OCIGPU-TEN-2) unless this replica leads."""
        if not self.is_leading():
            raise NotLeadingError(
                "OCIGPU-TEN-2", f"lease {self._namespace}/{self._name}: another replica may be the leader"
            )

    def attempt(self) -> bool:
        """Take the lease or renew it, if that is due; returns whether this replica leads.

        Raises HostError (OCIGPU-KUBE-5); a leader keeps leading until its deadline.
        """
        now = self._clock()
        if self._held and now < self._renewed + RETRY:
            return True
        found = self.documents.get("Lease", self._name, self._namespace)
        if found is None:
            metadata = {"name": self._name, "namespace": self._namespace}
            head = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
            self._write(lambda: self.documents.create({**head, "spec": self._spec({})}), now)
            return self.is_leading()
        spec = found.get("spec") or {}
        mine = spec.get("holderIdentity") == self._identity
        record = (spec.get("holderIdentity"), spec.get("renewTime"), found["metadata"].get("resourceVersion"))
        if record != self._seen[0]:
            self._seen = record, now
        duration = float(spec.get("leaseDurationSeconds") or DURATION)
        if not mine and spec.get("holderIdentity") and now < self._seen[1] + duration:
            self._held = False
            return False
        self._write(lambda: self.documents.update({**found, "spec": self._spec(spec)}), now)
        return self.is_leading()

    def lead(self, log: ServiceLog) -> bool:
        """Attempt it, and log a failure and a change; returns whether this replica leads."""
        try:
            self.attempt()
            log.forget("lease")
        except HostError as error:  # a conflict: another replica was faster
            log.once("lease", "warning", f"lease: {error.message}")
        leading = self.is_leading()
        if leading != self._said:
            log("info", "this replica leads" if leading else "another replica leads")
        self._said = leading
        return leading

    def release(self) -> None:
        """Let others lead at once; raises HostError (OCIGPU-KUBE-5)."""
        if not self._held:
            return
        self._held = False
        found = self.documents.get("Lease", self._name, self._namespace)
        if found is not None and found["spec"].get("holderIdentity") == self._identity:
            self.documents.update({**found, "spec": {**found["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}})

    def _write(self, write: Callable[[], Any], now: float) -> None:
        # the time before the request: the write may precede the answer by a long time
        try:
            write()
        except HostError:
            self._held = self._held and self._clock() < self._renewed + DEADLINE
            raise
        self._held, self._renewed = True, now

    def _spec(self, before: "dict[str, Any]") -> "dict[str, Any]":
        now = micro_time(time.time())
        same = before.get("holderIdentity") == self._identity
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(DURATION),
            "acquireTime": before.get("acquireTime", now) if same else now,
            "renewTime": now,
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + (not same and bool(before)),
        }
