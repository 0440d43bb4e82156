"""``ocigpu tenancy controller``: brings tenancies to the state their objects request, and reports their status.

The controller is level-triggered: a pass over a tenancy reads its objects in the cluster and adds what is missing,
without memory of earlier passes.  Tenancies wait in a queue, independently: those that a watch names, and those that a
resync finds unsettled.  A tenancy that does not become ready is checked less and less often.  The decisions are in
tenancy.py, which makes no requests.
"""

import collections
import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from lightkube import Client

from ocigpu.core.errors import HostError
from ocigpu.kubernetes.cluster.announce import make_event
from ocigpu.kubernetes.cluster.client import status_of
from ocigpu.kubernetes.cluster.documents import Documents
from ocigpu.kubernetes.cluster.leader import RETRY, Leader, NotLeadingError, create_announcement, own_identity
from ocigpu.kubernetes.cluster.names import GROUP, TENANCY_LABEL, VERSION, namespace_name
from ocigpu.system.log import stamp
from ocigpu.system.service import Backoff, ServiceLog, Signals
from ocigpu.tenants.tenancy import (
    FINALIZER,
    OBJECT_NAME,
    TenancyOptions,
    TenancySeen,
    TenancyStep,
    find_held_leases,
    find_unenforced,
    is_closed,
    make_status,
    next_steps,
)

RESYNC = 10.0
"""Seconds between looks at all tenancies: what others have changed is found then."""
SOON, LATER = 1.0, 8.0
"""Seconds until the next pass over a tenancy that is on its way, and at last, where nothing happens."""
FIRST_LIST = 0.05
"""Seconds between looks whether tenancies were listed, which a watch goes on from."""
WATCH = 300
"""Seconds after which a watch is begun anew."""
LEASE = "ocigpu-tenancies"
MAX_QUICK = 12
"""Passes over a tenancy in a row without a pause; more would be a quarrel with somebody."""
SETTLED = ("Ready", "Suspended", "Failed")

Document = dict[str, Any]


class _Seen(NamedTuple):
    """What a pass reads once for all tenancies; ``objects`` and ``others`` by namespace."""

    spaces: dict[str, Document]
    objects: dict[str, dict[tuple[str, str], Document]]
    others: dict[str, list[str]]
    leases: list[Document]
    unenforced: tuple[str, ...]


_NOTHING = _Seen({}, {}, {}, [], ())


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
        self.documents, self._options, self._log, self._network = documents, options, log, network
        self._time_now = time_now
        self._problems: dict[str, str] = {}
        self._backoffs: dict[str, Backoff] = {}
        self._cilium, self._unenforced, self._common_until = False, tuple[str, ...](), -math.inf
        self.version = ""

    def resync(self) -> float:
        """Do one pass over each tenancy; returns the seconds until the next: 0 when something was done.

        What fails for one tenancy is in its status and does not hold up the others.  Raises HostError (OCIGPU-KUBE-5)
        when the cluster cannot be read, NotLeadingError when another replica may lead.
        """
        tenancies, seen, options = self._read_all()
        return min([self._reconcile(tenancy, seen, options) for tenancy in tenancies], default=RESYNC)

    def find_unsettled(self) -> list[str]:
        """Return the names of tenancies in a wrong state or with an outdated status; changes nothing."""
        tenancies, seen, options = self._read_all()
        return [each["metadata"]["name"] for each in tenancies if not self._is_settled(each, seen, options)]

    def reconcile(self, name: str) -> float:
        """Do one pass over one tenancy, and ask about its namespace alone; as :meth:`resync`, math.inf: it is gone."""
        (*found,), self.version = self.documents.list("Tenancy", fields={"metadata.name": name})
        if not found:
            self._forget(name)
            return math.inf
        if time.monotonic() > self._common_until:
            self._read_common()
        options, metadata = self._options._replace(cilium=self._cilium), found[0]["metadata"]
        going = bool(metadata.get("deletionTimestamp"))
        ours = FINALIZER in (metadata.get("finalizers") or ())  # without it only the finalizer is added
        seen = self._read_objects(options, going, namespace_name(name)) if ours else _NOTHING
        return self._reconcile(found[0], seen, options)

    def _read_common(self) -> None:
        """Read what all tenancies have in common; passes over single ones use the reading for a second."""
        listed = self.documents.list
        self._cilium = self._network == "cilium" or (
            self._network == "auto" and bool(listed("CiliumNetworkPolicy", fields={"metadata.name": OBJECT_NAME})[1])
        )
        policies = listed("ValidatingAdmissionPolicy")[0]
        self._unenforced = find_unenforced(policies, listed("ValidatingAdmissionPolicyBinding")[0])
        self._common_until = time.monotonic() + SOON

    def _read_all(self) -> tuple[list[Document], _Seen, TenancyOptions]:
        tenancies, self.version = self.documents.list("Tenancy")
        names = {each["metadata"]["name"] for each in tenancies}
        for gone in (self._problems.keys() | self._backoffs.keys()) - names:
            self._forget(gone)
        if not tenancies:
            return [], _NOTHING, self._options
        self._read_common()
        options = self._options._replace(cilium=self._cilium)
        seen = self._read_objects(options, any(each["metadata"].get("deletionTimestamp") for each in tenancies))
        return tenancies, seen, options

    def _forget(self, name: str) -> None:
        self._problems.pop(name, None)
        self._backoffs.pop(name, None)

    def _is_settled(self, tenancy: Document, all_seen: _Seen, options: TenancyOptions) -> bool:
        name = tenancy["metadata"]["name"]
        try:
            seen = self._see(tenancy, all_seen)
        except HostError:  # its own pass tells of it
            return False
        status = make_status(tenancy, seen, options, self._time_now(), self._problems.get(name, ""))
        said = status["phase"] in SETTLED and status == (tenancy.get("status") or {})
        return said and not next_steps(tenancy, seen, options)

    def _read_objects(self, options: TenancyOptions, leases: bool, space: str = "") -> _Seen:
        """Read the objects of all tenancies, or only those of one namespace."""
        listed = self.documents.list
        labels: Document = {TENANCY_LABEL: None}
        spaces = {} if space else {each["metadata"]["name"]: each for each in listed("Namespace", labels=labels)[0]}
        found: dict[str, dict[tuple[str, str], Document]] = {}
        others: dict[str, list[str]] = {}
        ours = "CiliumNetworkPolicy" if options.cilium else "NetworkPolicy"
        names = {"ResourceQuota": OBJECT_NAME, "LimitRange": OBJECT_NAME, "ServiceAccount": "default"}
        for kind in (*names, "NetworkPolicy", *(["CiliumNetworkPolicy"] if options.cilium else [])):
            wanted = {"metadata.name": names[kind]} if kind in names else None
            for each in listed(kind, space, fields=wanted)[0]:
                where, name = each["metadata"]["namespace"], each["metadata"]["name"]
                if kind in names or (kind, name) == (ours, OBJECT_NAME):
                    found.setdefault(where, {})[kind, name] = each
                else:
                    others.setdefault(where, []).append(name)
        return _Seen(spaces, found, others, listed("GPULease")[0] if leases else [], self._unenforced)

    def _reconcile(self, tenancy: Document, all_seen: _Seen, options: TenancyOptions) -> float:
        name, before = tenancy["metadata"]["name"], tenancy
        backoff = self._backoffs.setdefault(name, Backoff(SOON, LATER))
        steps: tuple[TenancyStep, ...] = ()
        try:
            seen = self._see(tenancy, all_seen)
            status = make_status(tenancy, seen, options, self._time_now(), self._problems.get(name, ""))
            tenancy = self._write_status(tenancy, status)
            steps = next_steps(tenancy, seen, options)
            for step in steps:
                self._take(name, step)
        except NotLeadingError:
            raise
        except HostError as error:
            self._problems[name] = error.message
            self._log.once(f"tenancy {name}", "error", f"tenancy {name}: {error.message}")
            return backoff.failed(0.0)
        if steps or tenancy is not before:
            backoff.reset()
        if self._problems.pop(name, None):
            self._log.forget(f"tenancy {name}")
            return 0.0
        return 0.0 if steps else RESYNC if status["phase"] in SETTLED else backoff.failed(0.0)

    def _see(self, tenancy: Document, seen: _Seen) -> TenancySeen:
        name = tenancy["metadata"]["name"]
        space = namespace_name(name)
        namespace = seen.spaces.get(space) or self.documents.get("Namespace", space)
        pods = self.documents.list("Pod", space)[0] if namespace and is_closed(tenancy) else []
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
        made = {"create": self.documents.create, "update": self.documents.update, "delete": self.documents.delete}
        made[step.verb](step.document)
        self._log("info", f"tenancy {name}: {step.verb} {step.document['kind']} {metadata['name']}")

    def _write_status(self, tenancy: Document, status: Document) -> Document:
        """Write the status if it has changed; returns the tenancy in its new state."""
        before = tenancy.get("status") or {}
        if status == before or FINALIZER not in (tenancy["metadata"].get("finalizers") or ()):
            return tenancy
        written = self.documents.patch_status(tenancy, {**dict.fromkeys(before), **status})
        if status["phase"] != before.get("phase"):
            (ready,) = (each for each in status["conditions"] if each["type"] == "Ready")
            name, message = tenancy["metadata"]["name"], ready["message"]
            self._log("info", f"tenancy {name}: {status['phase']}{f': {message}' if message else ''}")
            self._announce(written, before.get("phase", ""), message)
        return written

    def _announce(self, tenancy: Document, before: str, message: str) -> None:
        """Write an Event about a tenancy's new phase; a failure to write it is ignored."""
        phase, metadata = tenancy["status"]["phase"], tenancy["metadata"]
        head = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "Tenancy"}
        warning = phase == "Failed" or (phase, before) == ("Provisioning", "Ready")
        note = message or f"it was {before or 'new'}"
        about = {**head, "name": metadata["name"], "uid": metadata["uid"]}
        event = make_event(about, "tenancy-controller", phase, note, warning, time.time())
        create_announcement(self.documents, event, self._log)


class ControllerService:
    """Runs the controller for as long as it leads.  ``namespace``: of the lease; "" for a single replica."""

    def __init__(
        self,
        options: TenancyOptions,
        log: ServiceLog,
        network: str = "auto",
        namespace: str = "",
        open_client: Callable[[], Client | None] = lambda: None,
    ) -> None:
        self._log = log
        self._leader = Leader(Documents(open_client()), LEASE, namespace, own_identity()) if namespace else None
        check = self._leader.check if self._leader else lambda: None
        self.controller = TenancyController(Documents(open_client(), check), options, log, network)
        self._watched = Documents(open_client())
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._woken: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._due: dict[str, float] = {}
        """When to do a pass over which tenancy; those that are as they should be are not in it."""
        self._quick: collections.Counter[str] = collections.Counter()
        self._stopping = threading.Event()

    def run(self) -> None:
        """Work until SIGTERM, SIGINT or SIGQUIT; SIGHUP triggers an immediate check of all tenancies."""
        backoff, look = Backoff(SOON, RESYNC), 0.0
        with Signals() as signals:
            threading.Thread(target=self._watch, daemon=True).start()
            while not signals.stopping:
                if signals.take_again():
                    look = 0.0
                if self._leader and not self._leader.lead(self._log):
                    self._take_woken()  # names do not pile up; a new leader first checks all tenancies
                    signals.wait(RETRY)
                    look = 0.0
                    continue
                due = max(min([look, *self._due.values()]), backoff.due)
                if signals.wait(min(due - time.monotonic(), RETRY if self._leader else math.inf), self._reader):
                    os.read(self._reader, 4096)
                look = look if self._take_woken() else 0.0
                now = time.monotonic()
                if now < backoff.due or now < min([look, *self._due.values()]):
                    continue
                try:
                    if now >= look:
                        for name in self.controller.find_unsettled():
                            self._due.setdefault(name, now)
                        look = time.monotonic() + RESYNC
                    else:
                        self._serve(min(self._due, key=self._due.__getitem__))
                    backoff.reset()
                    self._log.forget("pass")
                except NotLeadingError as error:
                    self._log("warning", error.message)
                except HostError as error:
                    self._log.failed("pass", error)
                    backoff.failed(time.monotonic())
        self._stopping.set()
        if self._leader is not None:
            with contextlib.suppress(HostError):
                self._leader.release()

    def _take_woken(self) -> bool:
        """Put the tenancies that the watch has named into the queue; False when it has missed some, perhaps."""
        whole = True
        with contextlib.suppress(queue.Empty):
            while True:
                name = self._woken.get_nowait()
                whole = whole and bool(name)
                if name:
                    self._due[name] = 0.0
        return whole

    def _serve(self, name: str) -> None:
        """Do one pass over the tenancy that is due: the next one is served when this one has to wait for something."""
        self._due[name] = time.monotonic() + LATER  # where it cannot be read, the others are served meanwhile
        pause = self.controller.reconcile(name)
        self._quick[name] = 0 if pause else self._quick[name] + 1
        if pause >= RESYNC:  # settled, or gone: the next check of all finds changes by others
            del self._due[name], self._quick[name]
        elif self._quick[name] < MAX_QUICK:
            self._due[name] = time.monotonic() + pause if pause else 0.0
        else:
            self._due[name] = time.monotonic() + RESYNC

    def _watch(self) -> None:
        """Name tenancies that change; the next check of all tenancies finds missed changes."""
        backoff = Backoff(SOON, RESYNC)
        while not self._stopping.is_set():
            if not self.controller.version:  # else it would begin with all that there are
                self._stopping.wait(FIRST_LIST)
                continue
            try:
                for _, found in self._watched.watch("Tenancy", self.controller.version, WATCH):
                    backoff.reset()
                    self._wake(found["metadata"]["name"])
            except HostError as error:
                if self._stopping.is_set():
                    return
                self._log.once("watch", "warning", f"{error.message}; tenancies are checked every {RESYNC:.0f} s")
                if status_of(error.__cause__) == 410:  # the version is of a list that is too old
                    self._wake("")
                self._stopping.wait(backoff.failed(0.0))

    def _wake(self, name: str) -> None:
        self._woken.put(name)
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"\0")
