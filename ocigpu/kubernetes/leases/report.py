"""Leases as objects of the cluster, kind GPULease: they follow the node's journal, which never waits for them.

In the other direction only an operator's wishes for a GPU flow (:mod:`~ocigpu.kubernetes.leases.objects`).

Needs lightkube: import this module only after a command has made sure of it.
"""

import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from hashlib import sha256
from typing import Any

from ocigpu.core.errors import HostError, OcigpuError, as_own_error
from ocigpu.kubernetes.cluster.announce import make_event
from ocigpu.kubernetes.cluster.client import may_pass, status_of
from ocigpu.kubernetes.cluster.documents import Document, Documents
from ocigpu.kubernetes.leases.lease import Lease, LeaseEvent
from ocigpu.kubernetes.leases.objects import LeaseWish, Notice, act_for, make_lease_status, notices_between, read_wish
from ocigpu.system.log import stamp
from ocigpu.system.service import Backoff, ServiceLog

API, KIND = "ocigpu.io/v1alpha1", "GPULease"
NODE_LABEL = "ocigpu.io/node"
"""By which a node asks for its objects, all in one request."""
FIRST_RETRY, LONGEST_RETRY = 1.0, 60.0
LOOK_SECONDS, LOOK_RARELY = 10.0, 300.0
"""Between looks at what operators want, without a watch and beside one."""
WATCH_SECONDS = 300
MAX_NOTICES = 200
"""Events that wait while the API server is gone; older ones are given up."""


def lease_name(node: str, gpu: str) -> str:
    """Return the name of a GPU's object."""
    return f"{node}-{gpu.replace(':', '-').replace('.', '-')}"


def label_of(node: str) -> str:
    """Return the value of a node's label: its name, which may be longer than a label (63 letters)."""
    return node if len(node) <= 63 else f"{node[:46]}-{sha256(node.encode()).hexdigest()[:16]}"


class LeaseWatch:
    """Follows the objects of a node in a thread of its own: operators' wishes arrive at once, without polling.

    ``version``: of the last list, from which a watch continues, "" for none; ``follows``: no event is missed.
    """

    def __init__(self, documents: Documents, node: str) -> None:
        self._documents, self._labels = documents, {NODE_LABEL: label_of(node)}
        self._news: queue.SimpleQueue[tuple[str, Document]] = queue.SimpleQueue()
        self._listed = threading.Event()
        self.version, self.follows = "", False

    def start(self) -> None:
        threading.Thread(target=self._run, name="lease-watch", daemon=True).start()

    def has_news(self) -> bool:
        return not self._news.empty()

    def take(self) -> Iterator[tuple[str, Document]]:
        """Yield the type and the object of each event since the last call."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._news.get_nowait()

    def go_on_from(self, version: str) -> None:
        """Have it follow from a list on, where it does not."""
        if not self.follows:
            self.version = version
            self._listed.set()

    def _run(self) -> None:
        while True:
            self._listed.wait()
            self._listed.clear()
            self.follows = True
            with contextlib.suppress(HostError):  # the next list contains what was missed
                for news in self._documents.watch(KIND, self.version, WATCH_SECONDS, self._labels):
                    self._news.put(news)
            self.follows = False


class LeaseReporter:
    """Writes the objects of a node's leases; :meth:`step` never waits, and catches up after an API server's absence.

    ``executor``: writes in a thread of its own; ``wall``: the clock of the objects' times; ``clock``: of back-off;
    ``modules``: returns physical ids by PCI address; ``watch``: None has it list the objects every ten seconds.
    """

    def __init__(
        self,
        documents: Documents,
        node: str,
        executor: Executor,
        log: ServiceLog,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        modules: Callable[[], Mapping[str, int]] = dict,
        watch: LeaseWatch | None = None,
    ) -> None:
        self._watch = watch
        self._documents = documents
        self._node = node
        self._executor = executor
        self._log = log
        self._wall = wall
        self._clock = clock
        self._modules = modules
        self._told: dict[str, Lease] = {}
        self._wishes: dict[str, LeaseWish] = {}
        self._objects: dict[str, Document] = {}
        self._seen: Mapping[str, Lease] = {}
        self.notices: deque[tuple[Notice, float]] = deque(maxlen=MAX_NOTICES)
        self._looked = -math.inf
        self._under_way: Future[None] | None = None
        self._retry = Backoff(FIRST_RETRY, LONGEST_RETRY)

    def step(self, leases: Mapping[str, Lease], now: float) -> Mapping[str, LeaseEvent]:
        """Begin to write what has changed, and return what operators want of leases that are not so.

        ``now``: on the clock of the leases.
        """
        for gpu, lease in leases.items():
            if gpu in self._seen:
                self.notices.extend((each, self._wall()) for each in notices_between(self._seen[gpu], lease))
        self._seen = leases
        if self._under_way is not None and self._under_way.done():
            self._finish(self._under_way)
        if self._under_way is None and (moment := self._clock()) >= self._retry.due:
            follows = self._watch is not None and self._watch.follows
            look = moment >= self._looked + (LOOK_RARELY if follows else LOOK_SECONDS)
            news = self._watch is not None and self._watch.has_news()
            found = {gpu: lease for gpu, lease in leases.items() if look or news or self._has_changed(lease)}
            if look:
                self._looked = moment
            if found or self.notices:
                self._under_way = self._executor.submit(self._write, found, now, look)
        acts = {gpu: act_for(leases[gpu], wish) for gpu, wish in self._wishes.copy().items() if gpu in leases}
        return {gpu: act for gpu, act in acts.items() if act}

    def _has_changed(self, lease: Lease) -> bool:
        return _shown(self._told.get(lease.gpu)) != _shown(lease)

    def _finish(self, done: "Future[None]") -> None:
        self._under_way = None
        error = done.exception()
        if error is None:
            self._retry.reset()
            self._log.forget("objects")
            return
        self._retry.failed(self._clock())
        self._log.once(
            "objects", "warning", f"objects of leases: {as_own_error(error).line}; leases go on without them"
        )

    def _write(self, leases: Mapping[str, Lease], now: float, look: bool) -> None:
        """An object that the API server refuses does not delay the others; the first error is raised at the end."""
        if look:
            listed, version = self._documents.list(KIND, labels={NODE_LABEL: label_of(self._node)})
            self._objects = {each["metadata"]["name"]: each for each in listed}
            if self._watch is not None:
                self._watch.go_on_from(version)
        for event, found in self._watch.take() if self._watch else ():
            self._take(event, found)
        first: HostError | None = None
        for gpu, lease in leases.items():
            try:
                self._write_one(lease, now)
                self._told[gpu] = lease
            except HostError as error:
                if _status_of(error) == 0:  # the server is unreachable: the next request would wait as long
                    raise
                first = first or error
        while self.notices:
            self._write_events(*self.notices[0])
            self.notices.popleft()
        if first:
            raise first

    def _take(self, event: str, found: Document) -> None:
        """Accept an event unless our copy is newer: our own writes come back as events, too."""
        name, known = found["metadata"]["name"], self._objects.get(found["metadata"]["name"])
        if known is not None and _version(known) >= _version(found):
            return
        if event == "DELETED":
            self._objects.pop(name, None)
        else:
            self._objects[name] = found

    def _write_events(self, notice: Notice, moment: float) -> None:
        """Write a notice as events about the GPU's object and about the node; an existing event is as good."""
        name = lease_name(self._node, notice.gpu)
        uid = self._objects.get(name, {"metadata": {}})["metadata"].get("uid", "")
        object_ = {"apiVersion": API, "kind": KIND, "name": name, "uid": uid}
        # a node's own events go by its name (kubelet, and kubectl describe node)
        node = {"apiVersion": "v1", "kind": "Node", "name": self._node, "uid": self._node}
        for about, suffix in ((object_, ""), (node, "-node")):
            event = make_event(
                about, "lease-agent", notice.reason, notice.text, notice.warning, moment,
                name=f"{name}.{notice.name}{suffix}", instance=self._node,
            )  # fmt: skip
            try:
                self._documents.create(event)
            except HostError as error:
                if (status := _status_of(error)) == 409:
                    continue
                if may_pass(status):
                    raise
                self._log("warning", f"event {notice.reason} of GPU {notice.gpu}: {error.message}; giving up")

    def _write_one(self, lease: Lease, now: float) -> None:
        name = lease_name(self._node, lease.gpu)
        spec = {"nodeName": self._node, "pciAddress": lease.gpu}
        if name not in self._objects:
            metadata = {"name": name, "labels": {NODE_LABEL: label_of(self._node)}}
            made = {"apiVersion": API, "kind": KIND, "metadata": metadata, "spec": spec}
            self._objects[name] = self._documents.create(made)
        found = self._objects[name]
        if any((found.get("spec") or {}).get(key) != value for key, value in spec.items()):
            raise HostError("OCIGPU-KUBE-5", f"GPULease {name} is about another GPU", "Delete the object.")
        self._wishes[lease.gpu] = read_wish(found)
        seen = (found.get("status") or {}).get("observedGeneration") == found["metadata"].get("generation")
        if seen and not self._has_changed(lease):
            return
        entered = stamp(self._wall() - max(now - lease.since, 0.0))
        try:
            module = self._modules().get(lease.gpu)
        except OcigpuError:  # the code that needs it reports that it is unknown
            module = None
        try:
            self._objects[name] = self._documents.patch_status(found, make_lease_status(lease, entered, found, module))
        except HostError as error:
            if _status_of(error) == 404:  # it was deleted
                del self._objects[name]
            raise


def _version(found: Document) -> int:
    """Return the version of an object: a number that grows (KEP-5504, "Comparable Resource Version")."""
    version = str(found["metadata"].get("resourceVersion", ""))
    return int(version) if version.isdecimal() and len(version) < 20 else 0


def _status_of(error: HostError) -> int:
    """Return the status of HTTP behind an error, 0 for no answer, -1 for an error of our own."""
    return status_of(error.__cause__) if isinstance(error.__cause__, Exception) else -1


def _shown(lease: Lease | None) -> tuple[Any, ...]:
    """Return what an object shows of a lease."""
    if lease is None:
        return ()
    return (
        *(lease.phase, lease.generation, lease.turn, lease.holder, lease.proofs),
        *(lease.sick, lease.maintenance, lease.reason, lease.detail),
    )
