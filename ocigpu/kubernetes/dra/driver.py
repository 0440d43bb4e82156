"""``ocigpu dra-driver``: offers this node's GPUs to claims and prepares the claims until it is stopped.

One thread watches the node and its health, others maintain slices and claims; gRPC answers the kubelet in threads of
its own.  A thread waits for the API server only if it needs its answer.  The kubelet is served first: it must be able
to give back claims of an earlier boot in any state of the driver, the API server and the GPUs.  Otherwise the pods of
that boot could never end.
"""

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ocigpu.core.errors import HostError, OcigpuError, OsErrorAs
from ocigpu.core.settings import Settings
from ocigpu.core.vendors import FIRST
from ocigpu.gpus.vendors import find_vendors
from ocigpu.gpus.vfio.bus import PciBus
from ocigpu.kubernetes.cluster.pods import list_containers
from ocigpu.kubernetes.dra.claims import Allotted, ClaimRef
from ocigpu.kubernetes.dra.cluster import ApiCluster, open_cluster
from ocigpu.kubernetes.dra.devices import DraDevice, DraNode, MigPlace, Taint, make_devices
from ocigpu.kubernetes.dra.effects import Effects, plan_steps
from ocigpu.kubernetes.dra.metrics import DraMetrics
from ocigpu.kubernetes.dra.node import DraReading, dra_reader
from ocigpu.kubernetes.dra.options import DraOptions
from ocigpu.kubernetes.dra.prepare import ClaimEffect, PoolPlace, PreparedDevice, Preparer
from ocigpu.kubernetes.dra.publisher import Publisher
from ocigpu.kubernetes.dra.sockets import DeviceHealth, DraServer
from ocigpu.kubernetes.dra.specs import NodeView
from ocigpu.kubernetes.dra.state import ClaimRecord, ClaimStep, ClaimStore
from ocigpu.kubernetes.dra.status import DriverStatus, write_status
from ocigpu.kubernetes.leases.lease import Lease, Phase, describe, why_withheld
from ocigpu.kubernetes.leases.machine import open_fabric_at, open_gate
from ocigpu.kubernetes.node.config import Configuration
from ocigpu.kubernetes.node.devices import Inventory, PluginDevice, Resource
from ocigpu.kubernetes.node.health import RULES, Monitor, Rules
from ocigpu.kubernetes.node.program import NodeProgram
from ocigpu.kubernetes.node.reading import host_settings
from ocigpu.system.pages import WebServer, serve_metrics
from ocigpu.system.service import Backoff


class DraTiming(NamedTuple):
    """Seconds.

    ``poll`` between checks of the sockets, ``probe`` between readings of the node, ``publish`` between checks of the
    slices, which another writer may have changed; ``retry`` after a failure, doubling up to ``longest``; ``stop`` for a
    call to end; ``sweep`` between searches for prepared claims that are gone, ``vanished``: how long they must have
    been gone.
    """

    poll: float = 0.5
    probe: float = 10.0
    publish: float = 30.0
    retry: float = 1.0
    longest: float = 60.0
    stop: float = 20.0
    sweep: float = 300.0
    vanished: float = 60.0
    rules: Rules = RULES


class DraDriver(NodeProgram[DraReading]):
    """What the driver knows and does; :meth:`run` returns when a signal ends it."""

    def __init__(
        self,
        options: DraOptions,
        settings: Settings,
        as_json: bool = False,
        timing: DraTiming | None = None,
        bus: PciBus | None = None,
    ) -> None:
        if not options.vendor:
            options = options._replace(vendor=next(iter(find_vendors(settings)), FIRST))
        self.options = options
        self.settings = host_settings(settings, options.plugin)
        self.timing = timing or DraTiming()
        monitor = Monitor(Configuration(options.plugin), self.timing.rules)
        super().__init__(dra_reader(), monitor, self.timing.poll, self.timing.probe, as_json)
        self.node: DraNode | None = None
        self.devices: tuple[DraDevice, ...] = ()
        self.offered: tuple[DraDevice, ...] = ()
        """The devices with their taints."""
        self._view: NodeView | None = None
        self._readings = threading.Condition()
        self._asked = self._answered = self._wanted = 0
        self._made: set[MigPlace] = set()
        self._offer_changed = threading.Event()
        self._retry = {name: Backoff(self.timing.retry, self.timing.longest) for name in ("publish", "serve")}
        self._changed: dict[str, tuple[bool, int]] = {}
        self.directory = f"{options.directories.plugins}/{options.driver}"
        self.cluster: ApiCluster | None = None
        self._opening = threading.Lock()
        self.publisher: Publisher | None = None
        self.gate = open_gate(options.plugin, self.settings)
        fabric = None if options.lease_journal else open_fabric_at(options.fabric_address, self.settings)
        self.effects = Effects(self.settings, options.mps_root, self.log, self.read_again, self.gate, bus, fabric)
        self.preparer = Preparer(
            ClaimStore(self.directory),
            PoolPlace(
                options.driver,
                options.node_name,
                options.cdi_root,
                f"{self.directory}/metadata" if options.device_metadata else "",
            ),
            self.node_view,
            self._get_claim,
            self.log,
            self.effects.table | self.own_effects(),
            self.plan_claim,
            self._listed,
        )
        self._status = DriverStatus()
        self.metrics = DraMetrics(options.driver, options.node_name, self._count_prepared)
        self.web: WebServer | None = None
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._keep, self._publish_on)]
        self.started_at = time.monotonic()
        self._ended = threading.Event()
        self.server = DraServer(
            options.driver,
            options.node_name,
            options.directories,
            self.prepare,
            self.preparer.unprepare,
            self.log,
            options.pod_uid,
            self.metrics,
        )

    # what a driver of other devices has otherwise

    def find_devices(self, node: DraNode, made: Collection[MigPlace]) -> tuple[DraDevice, ...]:
        """Return the devices of a node; ``made``: as of :func:`make_devices`."""
        return make_devices(node, self.options.offered, made)

    def own_effects(self) -> dict[str, ClaimEffect]:
        """Return changes for claims beside those of GPUs."""
        return {}

    def plan_claim(
        self, allotted: Sequence[Allotted], view: NodeView, others: Sequence[ClaimRecord]
    ) -> Sequence[ClaimStep]:
        """Return what must be done for a claim; see :data:`ocigpu.kubernetes.dra.prepare.Planner`."""
        return plan_steps(allotted, view, others)

    def prepare(self, claim: ClaimRef) -> tuple[PreparedDevice, ...]:
        """Prepare a claim for the kubelet; called by several threads, raises OcigpuError."""
        return self.preparer.prepare(claim)

    # life

    def run(self) -> None:
        """Work until SIGTERM, SIGINT or SIGQUIT; a call of the kubelet that runs is finished first.

        Raises HostError (OCIGPU-DRA-5) when the driver's directory cannot be used.  The slices stay: claims that are
        allocated stay so while the driver is replaced or the node starts again.
        """
        with self.signals:
            with OsErrorAs(HostError, "OCIGPU-DRA-5", f"make {self.directory}"):
                os.makedirs(self.directory, mode=0o750, exist_ok=True)
            self.preparer.held()
            self._serve_metrics()
            for thread in self._threads:
                thread.start()
            try:
                self._work()
            finally:
                self.end_readings()
                self.server.stop(self.timing.stop)
                end = time.monotonic() + self.timing.stop
                for thread in self._threads:
                    thread.join(max(0.0, end - time.monotonic()))
                if self.web:
                    self.web.close()
                self.effects.close()
                if self.cluster:
                    self.cluster.close()

    def _serve_metrics(self) -> None:
        """Serve metrics if that is wanted; claims are more important than they, so nothing ends if it fails."""
        if self.options.http_endpoint:
            try:
                self.web = serve_metrics(self.options.http_endpoint, self.metrics.render, "--http-endpoint")
            except OcigpuError as error:
                self.log.failed("metrics", error)
            else:
                self.log("info", f"metrics on port {self.web.server_port}", port=self.web.server_port)

    def end_readings(self) -> None:
        """Wake all threads that wait for a reading of the node: there will be no more readings."""
        self._ended.set()
        self._offer_changed.set()
        with self._readings:
            self._readings.notify_all()

    def _step(self, now: float) -> None:
        self._serve(now)
        if self.signals.take_again():
            self.log("info", "SIGHUP: reading everything again")
            self._read_due = 0.0
            if self.node:
                self._offer_changed.set()
        if self._wanted > self._asked:
            self._read_due = 0.0
        if reading := self._poll_reader(self._request, now):
            self._record_reading(reading, now)
        heard = self._hear((self.node.facts,) if self.node else (), self._inventory(), now)
        if heard | bool(self.gate and self.gate.has_changed()):
            self.update_reasons()
        self._tell_status()

    def _tell_status(self) -> None:
        """Write down for the doctor what has changed of how it stands with the kubelet and the API server."""
        refusal, missing = self.server.refusal, self.publisher.features.missing if self.publisher else ()
        known = None if refusal is None else not refusal
        status = DriverStatus(self.options.driver, self.options.node_name, known, refusal or "", missing)
        if status != self._status:
            try:
                write_status(self.directory, status)
            except OSError as error:
                self.log.once("status", "warning", f"{self.directory}: {error.strerror}")
                return
            self._status = status

    def _serve(self, now: float) -> None:
        """Keep the sockets where the kubelet looks for them: a kubelet that starts removes the sockets of plugins."""
        if self.server.running or now < self._retry["serve"].due:
            return
        self.server.stop(0.0)
        try:
            self.server.start()
        except HostError as error:
            self._retry["serve"].failed(now)
            self.log.failed("serve", error)
            return
        self._retry["serve"].reset()
        self.log.forget("serve")
        self.log("info", f"{self.options.driver}: serving on {self.server.service.path}")

    # the node

    def node_view(self) -> NodeView | None:
        """Return the node for a claim: for a while after the start the first reading is waited for a little."""
        left = self.started_at + 2 * self.timing.stop - time.monotonic()
        with self._readings:
            seconds = min(max(0.0, left), self.timing.stop)
            self._readings.wait_for(lambda: self._answered or self._ended.is_set(), seconds)
        return self._view

    def _request(self) -> "tuple[Settings, str, bool, str, dict[str, dict[str, int]]]":
        self._made = self.preparer.made_places()
        self._asked += 1
        options, known = self.options, self.node.partitions if self.node else {}
        return self.settings, options.vendor, options.dynamic_mig, options.fabric_address, known

    def read_again(self) -> None:
        """Wait for a reading that was begun after now; raises HostError (OCIGPU-DRA-3)."""
        with self._readings:
            self._wanted = wanted = self._asked + 1
            self.signals.wake()
            self._readings.wait_for(lambda: self._answered >= wanted or self._ended.is_set(), self.timing.stop)
            if self._answered < wanted:
                raise HostError("OCIGPU-DRA-3", f"the node could not be read again within {self.timing.stop:g} s", "")

    def _get_claim(self, namespace: str, name: str) -> "dict[str, object] | None":
        return self.open_api().get_claim(namespace, name)

    def _listed(self) -> set[tuple[str, str, str]]:
        listing = list_containers(self.options.pods_socket)
        if listing.problem:
            raise HostError("OCIGPU-DRA-3", f"ask the kubelet for its pods: {listing.problem}", "")
        claims = [each.claim for each in listing.claimed if each.claim]
        return {(each.namespace, each.name, each.device) for each in claims if each.driver == self.options.driver}

    def open_api(self) -> ApiCluster:
        with self._opening:
            if self.cluster is None:
                self.cluster = open_cluster(self.options.kubeconfig)
            return self.cluster

    def _record_reading(self, reading: DraReading, now: float) -> None:
        self.log.once("silent", "warning", reading.silent)
        first = self.node is None
        if reading.node is None:
            self.monitor.record_silence(self._inventory(), now)
        else:
            self.log.new("problems", "warning", reading.node.problems)
            self.node = reading.node
            # a device made or given back during the reading belongs to a claim, too
            made = self._made | self.preparer.made_places()
            self.devices = self.find_devices(reading.node, made)
            options = self.options
            self._view = NodeView(reading.node, self.devices, self.settings, options.plugin, options.mps_root)
            self.monitor.record_reading(self._inventory(), now)
        with self._readings:
            self._answered = self._asked
            self._readings.notify_all()
        self.update_reasons()
        if first and self.node:  # also where there is nothing to be offered
            self._offer_changed.set()

    def _inventory(self) -> Inventory:
        """Return the devices as the monitor of the device plugin knows them."""
        own = self.node.facts.gpus if self.node else ()
        parts = self.node.parts if self.node else ()
        errors = {gpu.bus_id: gpu.error for gpu in own} | {part.id: part.error for part in parts}
        uuids = {gpu.bus_id: gpu.uuid for gpu in own}
        found = tuple(
            PluginDevice(
                each.name,
                each.id,
                uuids.get(each.board, each.id),
                each.name,
                error=errors.get(each.board) or errors.get(each.id, ""),
            )
            for each in self.devices
        )
        return Inventory((Resource(self.options.driver, found),) if found else ())

    def update_reasons(self) -> None:
        """Taint devices that are not well, and tell the kubelet of it."""
        judged = [
            device for resource in self._inventory().resources for device in self.monitor.with_health(resource).devices
        ]
        reasons = {device.id: device.error for device in judged}
        leases = self._lease_taints()
        for name, (taint, why) in leases.items():
            if taint.effect == "NoExecute":
                reasons[name] = reasons.get(name) or why
        moment = int(time.time())
        for name, reason in reasons.items():
            if self._changed.get(name, (None, 0))[0] != (not reason):
                self._changed[name] = (not reason, moment)
        health = tuple(
            DeviceHealth(name, not reason, reason, self._changed[name][1]) for name, reason in reasons.items()
        )
        self.server.tell_health(health)
        tainted = tuple(
            each._replace(taints=(leases[each.name][0],))
            if each.name in leases
            else each._replace(
                taints=taints_of(reasons.get(each.name, ""), self.options.driver) or self._notes_on(each)
            )
            for each in self.devices
        )
        if tainted != self.offered:
            self.offered = tainted
            self._offer_changed.set()

    def _notes_on(self, device: DraDevice) -> tuple[Taint, ...]:
        """Return taints that withhold nothing: an XID that harms no GPU, or that no XIDs come from its GPU."""
        driver, now = self.options.driver, time.monotonic()
        xid = self.monitor.noted_xid(device.id, now)
        if xid is not None:
            return (Taint(f"{driver}/xid", str(xid), "None"),)
        gpus = {gpu.bus_id: gpu.uuid for gpu in self.node.facts.gpus} if self.node else {}
        unwatched = frozenset[str]().union(*(watcher.unwatched for watcher in self.watchers.values()))
        is_watched = device.kind == "vfio" or gpus.get(device.board, device.id) not in unwatched
        return () if is_watched else (Taint(f"{driver}/unmonitored", "", "None"),)

    def _count_prepared(self) -> "Counter[str]":
        """Return the number of prepared devices by type; raises HostError (OCIGPU-DRA-5)."""
        records = self.preparer.store.prepared()
        return Counter(each.device.kind for record in records if record.done for each in record.devices)

    def _lease_taints(self) -> "dict[str, tuple[Taint, str]]":
        """Return the taints, with the reason, of GPUs for virtual machines whose leases withhold them."""
        if self.gate is None:
            return {}
        machines = [each for each in self.devices if each.kind == "vfio"]
        leases, boot = self.gate.journal.leases, self.gate.journal.boot
        found = {each.name: taint_of_lease(leases.get(each.id), boot, self.options.driver) for each in machines}
        return {name: each for name, each in found.items() if each}

    # the API server

    def _keep(self) -> None:
        """Undo unfinished work, restart what ended with the previous driver, give back claims that are gone.

        Runs in a thread of its own, because all of this may take long.
        """
        resumed = False
        while not self._ended.is_set():
            view, waits = self.node_view(), True
            try:
                self.preparer.recover()
                if view is not None and not resumed:
                    resumed = True
                    self.preparer.resume("mps")
                waits = self.preparer.sweep_vanished(time.monotonic(), self.timing.vanished)
                self.log.forget("keep")
            except Exception as error:  # noqa: BLE001 - a defect ends no thread: the next look may work
                self.log.failed("keep", error)
            self._ended.wait(self.timing.vanished if waits or view is None else self.timing.sweep)

    def _publish_on(self) -> None:
        """Keep the slices equal to the offer, from the first reading of the node on."""
        seconds: float | None = None
        while True:
            self._offer_changed.wait(seconds)
            if self._ended.is_set():
                return
            self._offer_changed.clear()
            try:
                self._publish(self.offered)
                self._retry["publish"].reset()
                self.log.forget("publish")
                seconds = self.timing.publish
            except Exception as error:  # noqa: BLE001 - a defect ends no thread: the next look may work
                self.metrics.failed_to_publish()
                self.log.failed("publish", error)
                self._ended.wait(self._retry["publish"].failed(0.0))
                seconds = 0.0

    def _publish(self, offered: "tuple[DraDevice, ...]") -> None:
        if self.publisher is None:
            self.publisher = Publisher(self.open_api(), self.options.driver, self.options.node_name, self.log)
        done = self.publisher.publish(offered)
        taints = Counter((taint.key, taint.effect) for each in offered for taint in each.taints)
        self.metrics.published(len(offered), done.slices, taints)
        if done.made or done.removed:
            self.log("info", f"published {len(offered)} devices: {done.made} slices made, {done.removed} removed")


def taints_of(reason: str, driver: str) -> tuple[Taint, ...]:
    """Return the taints of an unhealthy device, by the monitor's words; keys are those of NVIDIA's driver."""
    if not reason:
        return ()
    if reason.startswith("XID "):
        return (Taint(f"{driver}/xid", as_value(reason.removeprefix("XID "))),)
    return (Taint(f"{driver}/gpu-lost"),)


def as_value(text: str) -> str:
    """Return words as the value of a taint, in the syntax of a label value."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text)[:63].strip("-_.")


def taint_of_lease(lease: Lease | None, boot: str, driver: str) -> "tuple[Taint, str] | None":
    """Return the taint of a withheld GPU, and why; None for one that is free or that a pod has.

    A GPU that is in quarantine, or bound for it, must not have a tenant: its pod is evicted.
    """
    if lease is not None and (lease.sick or lease.phase is Phase.QUARANTINED):
        reason = lease.sick_reason or lease.reason
        return Taint(f"{driver}/quarantined", as_value(reason), "NoExecute"), lease.sick or describe(lease)
    why = why_withheld(lease, boot)
    return (Taint(f"{driver}/lease", str(lease.phase) if lease else "None"), why) if why else None
