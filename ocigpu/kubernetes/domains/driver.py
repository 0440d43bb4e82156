"""``ocigpu dra-driver --compute-domains``: a node's IMEX channel and IMEX daemon for claims of ComputeDomains.

It is the DRA driver with other devices.  A claim for a channel is prepared when the daemon of its domain is ready on
this node; until then the kubelet keeps asking.  Who may have a channel is decided here, by what the API server says of
domain and claim, never by what the claim says of itself.
"""

import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

from ocigpu.cdi.write import write_spec
from ocigpu.core.errors import HostError, RequestError, quoted
from ocigpu.core.settings import Settings
from ocigpu.core.vendors import FIRST
from ocigpu.gpus.nvidia.imex import why_no_imex
from ocigpu.gpus.on_node import GpuDetails, common_clique
from ocigpu.kubernetes.cluster.owners import DOMAIN_DRIVER
from ocigpu.kubernetes.domains.objects import READY, Document, uid_of
from ocigpu.kubernetes.domains.plan import is_ending
from ocigpu.kubernetes.domains.specs import make_domain_spec
from ocigpu.kubernetes.dra.claims import Allotted, ClaimRef, claim_error
from ocigpu.kubernetes.dra.devices import DraDevice, DraNode, MigPlace
from ocigpu.kubernetes.dra.driver import DraDriver, DraTiming
from ocigpu.kubernetes.dra.options import DraOptions
from ocigpu.kubernetes.dra.prepare import ClaimEffect, PreparedDevice
from ocigpu.kubernetes.dra.specs import NodeView, is_written, remove_spec
from ocigpu.kubernetes.dra.state import ClaimRecord, ClaimStep

WAIT = 25.0
"""Seconds that a call waits for a daemon to become ready: the kubelet gives it 45, and asks again much later."""
POLL = 1.0
WAITING = 4
"""Calls that wait at once; the others fail at once, for the kubelet to repeat: a daemon's claim must get a turn."""


def find_clique(node: DraNode) -> tuple[str, str]:
    """Return the NVLink clique of a node, "" for none, and why it is unknown."""
    facts, hardware = node.facts, node.hardware
    gpus = [gpu for gpu in facts.gpus if not gpu.error] or list(facts.gpus)
    if hardware.problem and gpus:
        return "", hardware.problem
    clique, problem = common_clique(hardware.gpus.get(gpu.uuid, GpuDetails(gpu.uuid)) for gpu in gpus)
    if clique and not problem:
        problem = why_no_imex(facts.driver_version)
    return ("" if problem else clique), problem


def make_domain_devices(clique: str) -> tuple[DraDevice, ...]:
    """Return the channel and the daemon of a node; names and attributes are those of NVIDIA's driver, but cliqueID."""
    of_clique = {"cliqueID": {"string": clique}} if clique else {}
    return tuple(
        DraDevice(f"{kind}-0", kind, kind, f"{kind}-0", {"type": {"string": kind}, "id": {"int": 0}, **of_clique}, {})
        for kind in ("channel", "daemon")
    )


class NotReadyError(HostError):
    """The daemon of a domain, with this ``uid``, is not ready on this node yet."""

    def __init__(self, message: str, uid: str) -> None:
        super().__init__("OCIGPU-DRA-3", message, "See: kubectl get computedomains -o yaml, and the daemon's log.")
        self.uid = uid


class DomainDriver(DraDriver):
    """See :class:`DraDriver`."""

    def __init__(
        self, options: DraOptions, settings: Settings, as_json: bool = False, timing: DraTiming | None = None
    ) -> None:
        # XIDs do not make a channel unusable; files about devices would say nothing that the claim does not
        own = options._replace(
            driver_name=DOMAIN_DRIVER, vendor=FIRST, ignored_xids="all", device_metadata=False, lease_journal="",
            fabric_address="", passthrough=False, dynamic_mig=False, shares="disabled",
        )  # fmt: skip
        self.clique, self.unknown = "", ""
        self._call = threading.local()
        """``domains``: those that the claim of a call may be for, by uid; kubelets repeat calls that last."""
        self._waiting = threading.BoundedSemaphore(WAITING)
        self.wait = WAIT
        super().__init__(own, settings, as_json, timing)

    # what the driver of GPUs has otherwise

    def find_devices(self, node: DraNode, _made: Collection[MigPlace]) -> tuple[DraDevice, ...]:
        """Return the devices; none while it is unknown which nodes this one is connected to."""
        self.clique, self.unknown = find_clique(node)
        self.log.once("fabric", "warning", f"nothing is offered: {self.unknown}" if self.unknown else "")
        return () if self.unknown else make_domain_devices(self.clique)

    def own_effects(self) -> dict[str, ClaimEffect]:
        return {
            "domain": ClaimEffect(lambda record, step, _view: self._admit(record, step["domain"]), lambda *_: None),
            "cdi": ClaimEffect(
                lambda record, step, view: self._write_spec(record, step["path"], view),
                lambda _record, step, _view: remove_spec(step["path"]),
                lambda _record, step, _view: not is_written(step["path"]),
            ),
        }

    def plan_claim(
        self, allotted: Sequence[Allotted], _view: NodeView, _others: Sequence[ClaimRecord]
    ) -> tuple[ClaimStep, ...]:
        for each in allotted:
            if not each.config.domain:
                text = f"request {quoted(each.request)}: no configuration names its ComputeDomain"
                raise RequestError("OCIGPU-DRA-2", text, "Use the claim template that the ComputeDomain names.")
        return tuple(ClaimStep("domain", {"domain": uid}) for uid in dict.fromkeys(a.config.domain for a in allotted))

    def prepare(self, claim: ClaimRef) -> tuple[PreparedDevice, ...]:
        """Prepare a claim; waits a little for the daemon of its domain, without the lock that others need."""
        record = self.preparer.store.read()[0].get(claim.uid)
        if record is not None and record.done:
            return self.preparer.prepare(claim)
        if self.unknown:
            raise HostError("OCIGPU-DRA-3", f"claim {claim}: {self.unknown}")
        waits = self._waiting.acquire(blocking=False)
        end = time.monotonic() + (self.wait if waits else 0.0)
        try:
            self._call.domains = self._read_domains(claim.namespace)
            while True:
                try:
                    return self.preparer.prepare(claim)
                except NotReadyError as error:
                    if not self._wait_for_daemon(claim, error.uid, end):
                        raise
        finally:
            if waits:
                self._waiting.release()

    def _wait_for_daemon(self, claim: ClaimRef, uid: str, end: float) -> bool:
        """Wait until the daemon of a domain is ready here; returns whether it is."""
        while time.monotonic() < end and not self._ended.wait(POLL):
            self._call.domains = found = self._read_domains(claim.namespace)
            if uid not in found or not self._why_not_ready(found[uid]):
                return True
        return False

    def _read_domains(self, namespace: str) -> dict[str, Document]:
        """Return the domains that claims of a namespace may be for: its own, for daemons all."""
        everywhere = namespace == self.options.namespace
        return {uid_of(each): each for each in self.open_api().list_domains("" if everywhere else namespace)}

    def _admit(self, record: ClaimRecord, uid: str) -> None:
        """Raise unless a claim may have its devices: channels of its namespace's domains, daemons in their own."""
        claim = record.claim
        domain = self._call.domains.get(uid)
        for each in record.devices:
            if each.config.domain != uid:
                continue
            if each.device.kind == "daemon":
                if claim.namespace != self.options.namespace:
                    text = f"daemons of ComputeDomains are in namespace {quoted(self.options.namespace)} only"
                    raise claim_error(claim, text, "Use the claim template that the ComputeDomain names.")
                if domain is None:
                    raise claim_error(claim, f"there is no ComputeDomain with uid {quoted(uid)}", "")
            elif domain is None or domain["metadata"]["namespace"] != claim.namespace:
                text = f"namespace {quoted(claim.namespace)} has no ComputeDomain with uid {quoted(uid)}"
                raise claim_error(claim, text, "A ComputeDomain is for pods of its own namespace.")
            else:
                self._check_ready(claim, domain)

    def _check_ready(self, claim: ClaimRef, domain: Document) -> None:
        name = quoted(domain["metadata"]["name"])
        if is_ending(domain):
            raise claim_error(claim, f"ComputeDomain {name} is being deleted", "")
        if problem := self._why_not_ready(domain):
            raise NotReadyError(f"claim {claim}: ComputeDomain {name}: {problem}", uid_of(domain))

    def _why_not_ready(self, domain: Document) -> str:
        """Return why pods of a domain cannot start on this node yet, "" if they can."""
        nodes = (domain.get("status") or {}).get("nodes") or ()
        here: dict[str, Any] = next((each for each in nodes if each.get("name") == self.options.node_name), {})
        if here.get("status") == READY and here.get("cliqueID", "") == self.clique:
            return ""
        return "its daemon on this node is not ready" if here else "it has no daemon on this node yet"

    def _write_spec(self, record: ClaimRecord, path: str, view: NodeView) -> None:
        if self.unknown:
            raise HostError("OCIGPU-DRA-3", f"claim {record.claim}: {self.unknown}")
        spec = make_domain_spec(record.claim, record.devices, self.options.driver, view, self.clique)
        write_spec(spec, path, "json")
