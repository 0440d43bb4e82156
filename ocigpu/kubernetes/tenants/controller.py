"""``ocigpu tenancy controller``: makes tenancies what their objects ask for, and says what it sees.

Level-triggered: every pass reads all tenancies and what the cluster has for them, and does what is missing; it
remembers nothing.  A watch only says that something has changed.  What is decided is in tenancy.py, without a request.
"""

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from lightkube import Client

from ocigpu.core.errors import HostError
from ocigpu.kubernetes.client import status_of
from ocigpu.kubernetes.tenants.announce import make_event
from ocigpu.kubernetes.tenants.leader import RETRY, Leader, NotLeadingError
from ocigpu.kubernetes.tenants.resources import Documents
from ocigpu.kubernetes.tenants.tenancy import (
    FINALIZER,
    GROUP,
    OBJECT_NAME,
    TENANCY_LABEL,
    VERSION,
    TenancyOptions,
    TenancySeen,
    TenancyStep,
    find_held_leases,
    find_unenforced,
    is_closed,
    make_status,
    namespace_name,
    next_steps,
)
from ocigpu.system.log import stamp
from ocigpu.system.service import Backoff, ServiceLog, Signals

RESYNC = 10.0
"""Seconds between passes when nothing is on the way: what others have changed is repaired then."""
SOON = 1.0
"""Seconds until the next pass while a tenancy is on its way."""
WATCH = 300
"""Seconds after which a watch is begun anew."""
LEASE = "ocigpu-tenancies"
MAX_QUICK = 12
"""Passes in a row without a pause; more would be a quarrel with somebody."""
SETTLED = ("Ready", "Suspended", "Failed")

Document = dict[str, Any]


class _Seen(NamedTuple):
    """What a pass reads once for all tenancies; ``objects`` and ``others`` by namespace."""

    spaces: dict[str, Document]
    objects: dict[str, dict[tuple[str, str], Document]]
    others: dict[str, list[str]]
    leases: list[Document]
    unenforced: tuple[str, ...]


class TenancyController:
    """``network``: cilium, networkpolicy, or auto for what the cluster has; ``version``: of the list of tenancies."""

    def __init__(
        self,
        documents: Documents,
        options: TenancyOptions,
        log: ServiceLog,
        network: str = "auto",
        time_now: Callable[[], str] = stamp,
    ) -> None:
        self._documents, self._options, self._log, self._network = documents, options, log, network
        self._time_now = time_now
        self._problems: dict[str, str] = {}
        self.version = ""

    def resync(self) -> float:
        """Do one pass; returns the seconds until the next: 0 when something was done, whose effect is to be seen.

        What fails for one tenancy is in its status and does not hold up the others.  Raises HostError (OCIGPU-KUBE-5)
        when the cluster cannot be read, NotLeadingError when another replica may lead.
        """
        tenancies, self.version = self._documents.list("Tenancy")
        names = [each["metadata"]["name"] for each in tenancies]
        for gone in self._problems.keys() - set(names):
            del self._problems[gone]
        if not tenancies:
            return RESYNC
        options = self._options._replace(cilium=self._has_cilium())
        seen = self._look(options, any(each["metadata"].get("deletionTimestamp") for each in tenancies))
        return min([self._reconcile(tenancy, seen, options) for tenancy in tenancies])

    def _has_cilium(self) -> bool:
        if self._network == "auto":
            return bool(self._documents.list("CiliumNetworkPolicy")[1])
        return self._network == "cilium"

    def _look(self, options: TenancyOptions, leases: bool) -> _Seen:
        listed = self._documents.list
        spaces = {each["metadata"]["name"]: each for each in listed("Namespace", labels={TENANCY_LABEL: None})[0]}
        found: dict[str, dict[tuple[str, str], Document]] = {}
        others: dict[str, list[str]] = {}
        ours = "CiliumNetworkPolicy" if options.cilium else "NetworkPolicy"
        names = {"ResourceQuota": OBJECT_NAME, "LimitRange": OBJECT_NAME, "ServiceAccount": "default"}
        for kind in (*names, "NetworkPolicy", *(["CiliumNetworkPolicy"] if options.cilium else [])):
            wanted = {"metadata.name": names[kind]} if kind in names else None
            for each in listed(kind, fields=wanted)[0]:
                space, name = each["metadata"]["namespace"], each["metadata"]["name"]
                if kind in names or (kind, name) == (ours, OBJECT_NAME):
                    found.setdefault(space, {})[kind, name] = each
                else:
                    others.setdefault(space, []).append(name)
        policies = listed("ValidatingAdmissionPolicy")[0]
        unenforced = find_unenforced(policies, listed("ValidatingAdmissionPolicyBinding")[0])
        return _Seen(spaces, found, others, listed("GPULease")[0] if leases else [], unenforced)

    def _reconcile(self, tenancy: Document, all_seen: _Seen, options: TenancyOptions) -> float:
        name = tenancy["metadata"]["name"]
        steps: tuple[TenancyStep, ...] = ()
        try:
            seen = self._see(tenancy, all_seen)
            status = make_status(tenancy, seen, options, self._time_now(), self._problems.get(name, ""))
            tenancy = self._tell(tenancy, status)
            steps = next_steps(tenancy, seen, options)
            for step in steps:
                self._take(name, step)
        except NotLeadingError:
            raise
        except HostError as error:
            self._problems[name] = error.message
            self._log.once(f"tenancy {name}", "error", f"tenancy {name}: {error.message}")
            return SOON
        if self._problems.pop(name, None):
            self._log.forget(f"tenancy {name}")
            return 0.0
        return 0.0 if steps else RESYNC if status["phase"] in SETTLED else SOON

    def _see(self, tenancy: Document, seen: _Seen) -> TenancySeen:
        name = tenancy["metadata"]["name"]
        space = namespace_name(name)
        namespace = seen.spaces.get(space) or self._documents.get("Namespace", space)
        pods = self._documents.list("Pod", space)[0] if namespace and is_closed(tenancy) else []
        return TenancySeen(
            namespace,
            seen.objects.get(space, {}),
            seen.others.get(space, ()),
            pods,
            find_held_leases(seen.leases, name),
            seen.unenforced,
        )

    def _take(self, name: str, step: TenancyStep) -> None:
        metadata = step.document["metadata"]
        made = {"create": self._documents.create, "update": self._documents.update, "delete": self._documents.delete}
        made[step.verb](step.document)
        self._log("info", f"tenancy {name}: {step.verb} {step.document['kind']} {metadata['name']}")

    def _tell(self, tenancy: Document, status: Document) -> Document:
        """Write the status if it says anything new; returns the tenancy as it is now."""
        before = tenancy.get("status") or {}
        if status == before or FINALIZER not in (tenancy["metadata"].get("finalizers") or ()):
            return tenancy
        written = self._documents.patch_status(tenancy, {**dict.fromkeys(before), **status})
        if status["phase"] != before.get("phase"):
            (ready,) = (each for each in status["conditions"] if each["type"] == "Ready")
            name, message = tenancy["metadata"]["name"], ready["message"]
            self._log("info", f"tenancy {name}: {status['phase']}{f': {message}' if message else ''}")
            self._announce(written, before.get("phase", ""), message)
        return written

    def _announce(self, tenancy: Document, before: str, message: str) -> None:
        """Write an Event about a tenancy's new phase; one that cannot be written is not missed."""
        phase, metadata = tenancy["status"]["phase"], tenancy["metadata"]
        head = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "Tenancy"}
        warning = phase == "Failed" or (phase, before) == ("Provisioning", "Ready")
        note = message or f"it was {before or 'new'}"
        about = {**head, "name": metadata["name"], "uid": metadata["uid"]}
        try:
            self._documents.create(make_event(about, "tenancy-controller", phase, note, warning, time.time()))
        except NotLeadingError:
            raise
        except HostError as error:
            self._log.once("announce", "warning", error.message)


class ControllerService:
    """Runs the controller for as long as it leads.  ``namespace``: of the lease; "": there is no other replica."""

    def __init__(
        self,
        options: TenancyOptions,
        log: ServiceLog,
        network: str = "auto",
        namespace: str = "",
        open_client: Callable[[], Client | None] = lambda: None,
    ) -> None:
        self._log = log
        identity = f"{socket.gethostname()}_{os.getpid()}_{os.urandom(4).hex()}"
        self._leader = Leader(Documents(open_client()), LEASE, namespace, identity) if namespace else None
        check = self._leader.check if self._leader else lambda: None
        self._controller = TenancyController(Documents(open_client(), check), options, log, network)
        self._watched = Documents(open_client())
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._led = False
        self._stopping = threading.Event()

    def run(self) -> None:
        """Work until SIGTERM, SIGINT or SIGQUIT; SIGHUP begins a pass at once."""
        backoff, quick, due = Backoff(SOON, RESYNC), 0, 0.0
        with Signals() as signals:
            threading.Thread(target=self._watch, daemon=True).start()
            while not signals.stopping:
                if signals.take_again():
                    due = 0.0
                if not self._lead():
                    signals.wait(RETRY)
                    due = 0.0
                    continue
                pause = min(due - time.monotonic(), RETRY if self._leader else math.inf)
                if signals.wait(pause, self._reader):
                    os.read(self._reader, 4096)
                elif time.monotonic() < due:
                    continue
                try:
                    pause = self._controller.resync()
                    backoff.reset()
                    self._log.forget("pass")
                    quick = quick + 1 if not pause else 0
                    due = time.monotonic() + (pause if quick < MAX_QUICK else RESYNC)
                except NotLeadingError as error:
                    self._log("warning", error.message)
                except HostError as error:
                    self._log.failed("pass", error)
                    due = backoff.failed(time.monotonic()) and backoff.due
        self._stopping.set()
        if self._leader is not None:
            with contextlib.suppress(HostError):
                self._leader.release()

    def _lead(self) -> bool:
        if self._leader is None:
            return True
        try:
            self._leader.attempt()
            self._log.forget("lease")
        except HostError as error:  # a conflict: another replica was faster
            self._log.once("lease", "warning", f"lease: {error.message}")
        leading = self._leader.is_leading()
        if leading != self._led:
            self._log("info", "this replica leads" if leading else "another replica leads")
        self._led = leading
        return leading

    def _watch(self) -> None:
        """Wake the passes when a tenancy changes; what is missed meanwhile is seen by the next pass anyway."""
        backoff = Backoff(SOON, RESYNC)
        while not self._stopping.is_set():
            try:
                for _ in self._watched.watch("Tenancy", self._controller.version, WATCH):
                    backoff.reset()
                    self._wake()
            except HostError as error:
                if self._stopping.is_set():
                    return
                self._log.once("watch", "warning", f"{error.message}; tenancies are looked at every {RESYNC:.0f} s")
                if status_of(error.__cause__) == 410:  # the version is of a list that is too old
                    self._wake()
                self._stopping.wait(backoff.failed(0.0))

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"\0")
