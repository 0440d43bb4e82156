"""``ocigpu compute-domain controller``: runs the daemons of ComputeDomains, and reports which nodes are ready.

Level-triggered: a pass reads all domains and their objects, and adds what is missing, without memory of earlier passes.
Watches end the pause between passes.  The decisions are in plan.py, which makes no requests.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from lightkube import Client

from ocigpu.core.errors import HostError
from ocigpu.kubernetes.cluster.announce import make_event
from ocigpu.kubernetes.cluster.documents import Documents
from ocigpu.kubernetes.cluster.leader import RETRY, Leader, NotLeadingError, create_announcement, own_identity
from ocigpu.kubernetes.cluster.owners import DOMAIN_DRIVER
from ocigpu.kubernetes.cluster.wake import wake_on_changes
from ocigpu.kubernetes.domains.objects import DOMAIN_LABEL, READY, TARGET_LABEL, DaemonOptions, Document, uid_of
from ocigpu.kubernetes.domains.plan import (
    ClusterSeen,
    DomainMember,
    DomainStep,
    describe_step,
    is_ending,
    label_change,
    make_domain_status,
    plan_domains,
    show_domain,
)
from ocigpu.system.service import Backoff, ServiceLog, Signals

RESYNC = 10.0
"""Seconds between passes when nothing is heard of changes."""
SOON = 0.5
"""Seconds between passes at least: news comes in crowds."""
WATCH = 300
"""Seconds that one watch lasts."""
GRACE = 60.0
"""Seconds for which an ending domain keeps its daemons if pods still have channels: longer than most pods need to end,
and short enough for scripts that delete the domain first and its pods afterwards."""
LEASE = "ocigpu-compute-domains"
OURS: Document = {DOMAIN_LABEL: None}


class DomainController:
    """``clock``: monotonic seconds."""

    def __init__(
        self,
        documents: Documents,
        options: DaemonOptions,
        log: ServiceLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.documents, self._options, self._log, self._clock = documents, options, log, clock
        self._ending: dict[str, float] = {}

    def resync(self) -> bool:
        """Do one pass over all domains; returns whether something was changed.

        A change that fails holds up no other.  Raises HostError (OCIGPU-KUBE-5) when the cluster cannot be read,
        NotLeadingError when another replica may lead.
        """
        seen = self._read()
        now = self._clock()
        ending = [uid_of(each) for each in seen.domains if is_ending(each)]
        self._ending = {uid: self._ending.get(uid, now) for uid in ending}
        expired = [uid for uid, since in self._ending.items() if now - since >= GRACE]
        plan = plan_domains(seen, self._options, expired)
        changed = False
        for step in plan.steps:
            changed |= self._try(describe_step(step), partial(self._take, step))
        for domain in seen.domains:
            uid, name = uid_of(domain), f"ComputeDomain {show_domain(domain)}"
            if uid in plan.members:
                changed |= self._try(f"status of {name}", partial(self._write_status, domain, plan.members[uid]))
                left = ", ".join(plan.surplus[uid])
                text = f"{name}: a clique has room for {self._options.most} nodes, and none for {left}"
                self._log.once(f"surplus {uid}", "warning", text if left else "")
        return changed

    def _read(self) -> ClusterSeen:
        """Read the cluster; objects that are made for domains before these, so that no new one has no domain."""
        space = self._options.namespace
        made = [*self._list("DaemonSet", space, OURS), *self._list("NetworkPolicy", space, OURS)]
        made += self._list("ComputeDomainClique", space, OURS)
        made += self._list("ResourceClaimTemplate", labels={**OURS, TARGET_LABEL: None})
        pods, nodes = self._list("Pod", space, OURS), self._list("Node", labels=OURS)
        slices = self._list("ResourceSlice", fields={"spec.driver": DOMAIN_DRIVER})
        claims = self._list("ResourceClaim", labels=OURS)
        return ClusterSeen(self._list("ComputeDomain"), made, claims, pods, nodes, slices)

    def _list(
        self, kind: str, namespace: str = "", labels: Document | None = None, fields: Document | None = None
    ) -> list[Document]:
        """Return objects; an answer that is no list raises: what is not listed is taken for gone, and cleaned up."""
        found, version = self.documents.list(kind, namespace, labels, fields)
        if not version:
            raise HostError(
                "OCIGPU-KUBE-5", f"API server: list {kind}: 404", "Does the cluster have the chart's kinds?"
            )
        return found

    def _try(self, what: str, change: Callable[[], bool]) -> bool:
        try:
            changed = change()
        except NotLeadingError:
            raise
        except HostError as error:
            self._log.once(what, "error", f"{what}: {error.message}")
            return False
        self._log.forget(what)
        return changed

    def _take(self, step: DomainStep) -> bool:
        if step.verb == "label":
            if not self.documents.patch(step.document, label_change(step.label)):
                return False  # there is no such node
        else:
            made = {"create": self.documents.create, "update": self.documents.update, "delete": self.documents.delete}
            made[step.verb](step.document)
        self._log("info", describe_step(step))
        return True

    def _write_status(self, domain: Document, members: "tuple[DomainMember, ...]") -> bool:
        before, status = domain.get("status") or {}, make_domain_status(domain, members)
        if {"nodes": [], **before} == status:
            return False
        self.documents.patch_status(domain, status)
        if status["status"] != before.get("status"):
            self._announce(domain, status["status"], members)
        return True

    def _announce(self, domain: Document, status: str, members: "tuple[DomainMember, ...]") -> None:
        """Write an Event about the new status of a domain; a failure to write it is ignored."""
        waiting = ", ".join(each.node for each in members if not each.ready)
        ready = sum(each.ready for each in members)
        note = f"{ready} of {len(members)} nodes are ready{f', not {waiting}' if waiting else ''}"
        self._log("info", f"ComputeDomain {show_domain(domain)}: {status}: {note}")
        metadata = domain["metadata"]
        about = {key: metadata[key] for key in ("name", "namespace", "uid")}
        about |= {key: domain[key] for key in ("apiVersion", "kind")}
        event = make_event(about, "compute-domain-controller", status, note, status != READY, time.time())
        create_announcement(self.documents, event, self._log)


class DomainService:
    """Runs the controller for as long as it leads, by a lease in the daemons' namespace."""

    def __init__(
        self, options: DaemonOptions, log: ServiceLog, open_client: Callable[[], Client | None] = lambda: None
    ) -> None:
        self._log, self._options = log, options
        self._leader = Leader(Documents(open_client()), LEASE, options.namespace, own_identity())
        self.controller = DomainController(Documents(open_client(), self._leader.check), options, log)
        self._watched = Documents(open_client())
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stopping = threading.Event()

    def run(self) -> None:
        """Work until SIGTERM, SIGINT or SIGQUIT; SIGHUP ends the pause."""
        due, backoff = 0.0, Backoff(SOON, RESYNC)
        watched: tuple[tuple[str, str, Document | None], ...] = (
            ("ComputeDomain", "", None),
            ("ResourceClaim", "", OURS),
            ("Pod", self._options.namespace, OURS),
        )
        with Signals() as signals:
            for each in watched:
                threading.Thread(target=self._watch, args=each, daemon=True).start()
            while not signals.stopping:
                if signals.take_again():
                    due = 0.0
                if not self._leader.lead(self._log):
                    signals.wait(RETRY)
                    due = 0.0
                    continue
                if time.monotonic() >= max(due, backoff.due):
                    due = time.monotonic() + (0.0 if self._pass(backoff) else RESYNC)
                if signals.wait(min(max(due, backoff.due) - time.monotonic(), RETRY), self._reader):
                    os.read(self._reader, 4096)
                    due = 0.0
        self._stopping.set()
        with suppress(HostError):
            self._leader.release()

    def _pass(self, backoff: Backoff) -> bool:
        """Do one pass, and set when the next may be; returns whether something was changed."""
        changed = False
        try:
            changed = self.controller.resync()
            self._log.forget("pass")
            backoff.reset(time.monotonic() + SOON)
        except NotLeadingError as error:
            self._log("warning", error.message)
        except HostError as error:
            self._log.failed("pass", error)
            backoff.failed(time.monotonic())
        return changed

    def _watch(self, kind: str, namespace: str, labels: "Document | None") -> None:
        """End the pause between passes when an object of a kind changes."""
        follow = partial(self._watched.watch, kind, "", WATCH, labels, namespace)
        said = f"everything is read every {RESYNC:.0f} s"
        wake_on_changes(follow, self._writer, self._stopping, RESYNC, self._log, f"watch {kind}", said)
