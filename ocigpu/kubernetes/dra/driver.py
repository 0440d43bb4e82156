"""``ocigpu dra-driver``: offers this node's GPUs to claims, and prepares the claims, until it is told to end.

One thread looks at the node, its health and the API server; gRPC answers the kubelet in threads of its own.  The
kubelet is served first: it must be able to give claims of an earlier boot back whatever the driver, the API server or
the GPUs do, or pods of before could never end.
"""

import os
import threading
import time
from typing import NamedTuple

from ocigpu.core.errors import HostError, OcigpuError, as_own_error
from ocigpu.core.settings import Settings
from ocigpu.core.vendors import FIRST
from ocigpu.gpus.vendors import find_vendors
from ocigpu.kubernetes.config import Configuration
from ocigpu.kubernetes.devices import Inventory, PluginDevice, Resource
from ocigpu.kubernetes.dra.cluster import ApiCluster, open_cluster
from ocigpu.kubernetes.dra.devices import DraDevice, DraNode, Taint, make_devices
from ocigpu.kubernetes.dra.effects import Effects, plan_steps
from ocigpu.kubernetes.dra.node import DraReading, dra_reader
from ocigpu.kubernetes.dra.options import DraOptions
from ocigpu.kubernetes.dra.prepare import NodeView, PoolPlace, Preparer
from ocigpu.kubernetes.dra.publisher import Publisher
from ocigpu.kubernetes.dra.sockets import DeviceHealth, DraServer
from ocigpu.kubernetes.dra.state import ClaimStore
from ocigpu.kubernetes.events import EventWatcher
from ocigpu.kubernetes.health import RULES, Monitor, Rules
from ocigpu.kubernetes.node import host_settings
from ocigpu.system.service import Backoff, ServiceLog, Signals


class DraTiming(NamedTuple):
    """Seconds.

    ``poll`` between looks at sockets, ``probe`` between readings of the node, ``publish`` between looks at the slices,
    which somebody else may have changed; ``retry`` after a failure, doubling up to ``longest``; ``stop`` that a call
    has to end.
    """

    poll: float = 0.5
    probe: float = 10.0
    publish: float = 30.0
    retry: float = 1.0
    longest: float = 60.0
    stop: float = 20.0
    rules: Rules = RULES


class DraDriver:
    """What the driver knows and does; :meth:`run` returns when a signal ends it."""

    def __init__(
        self, options: DraOptions, settings: Settings, as_json: bool = False, timing: DraTiming | None = None
    ) -> None:
        if not options.vendor:
            options = options._replace(vendor=next(iter(find_vendors(settings)), FIRST))
        self.options = options
        self.settings = host_settings(settings, options.plugin)
        self.timing = timing or DraTiming()
        self.log = ServiceLog(as_json, lossy=True)
        self.signals = Signals()
        self.reader = dra_reader()
        self.watcher = EventWatcher()
        self.monitor = Monitor(Configuration(options.plugin), self.timing.rules)
        self.node: DraNode | None = None
        self.devices: tuple[DraDevice, ...] = ()
        self.offered: tuple[DraDevice, ...] = ()
        """The devices with their taints."""
        self._view: NodeView | None = None
        self._read = threading.Event()
        self._due = {"read": 0.0, "publish": 0.0}
        self._retry = {name: Backoff(self.timing.retry, self.timing.longest) for name in ("publish", "serve")}
        self._changed: dict[str, tuple[bool, int]] = {}
        self.directory = f"{options.directories.plugins}/{options.driver}"
        self.cluster: ApiCluster | None = None
        self.publisher: Publisher | None = None
        self.effects = Effects(self.settings, options.mps_root, self.log)
        self.preparer = Preparer(
            ClaimStore(self.directory),
            PoolPlace(options.driver, options.node_name, options.cdi_root),
            self._node_view,
            self._get_claim,
            self.log,
            self.effects.table,
            plan_steps,
        )
        self._resumed = False
        self.server = DraServer(
            options.driver,
            options.node_name,
            options.directories,
            self.preparer.prepare,
            self.preparer.unprepare,
            self.log,
            options.pod_uid,
        )

    # life

    def run(self) -> None:
        """Work until SIGTERM, SIGINT or SIGQUIT; a call of the kubelet that runs is finished first.

        Raises HostError (OCIGPU-DRA-5) when the driver's directory cannot be used.  The slices stay: claims that are
        allocated stay so while the driver is replaced or the node starts again.
        """
        with self.signals as signals:
            try:
                os.makedirs(self.directory, mode=0o750, exist_ok=True)
            except OSError as error:
                raise HostError("OCIGPU-DRA-5", f"make {self.directory}: {error.strerror}") from error
            self.preparer.recover()
            try:
                while not signals.stopping:
                    self._try_step()
                    signals.wait(self.timing.poll, *self._sources())
                self.log("info", "ending")
            finally:
                self.server.stop(self.timing.stop)
                self.effects.close()
                if self.cluster:
                    self.cluster.close()
                self.watcher.close()
                self.reader.close()

    def _sources(self) -> list[int]:
        return [fd for fd in (self.reader.fileno(), self.watcher.fileno()) if fd >= 0]

    def _try_step(self) -> None:
        """Take a step; a defect of ours is told of, and ends nothing that works."""
        try:
            self._step(time.monotonic())
        except OcigpuError as error:
            self.log.once("step", "error", f"{error.code}: {error.message}")
        except Exception as error:  # noqa: BLE001 - a program that ends is started again, and again
            own = as_own_error(error)
            self.log.once("defect", "error", f"{own.code}: {own.message}")

    def _step(self, now: float) -> None:
        self._serve(now)
        if self.signals.take_again():
            self.log("info", "SIGHUP: everything is read anew")
            self._due = dict.fromkeys(self._due, 0.0)
        reading = self.reader.answer(now)
        if reading is not None:
            self._due["read"] = now + self.timing.probe
            self._has_read(reading, now)
        if not self.reader.busy and now >= self._due["read"]:
            try:
                self.reader.ask((self.settings, self.options.vendor), now)
            except OSError as error:
                self._due["read"] = now + self.timing.probe
                self.log.once("reader", "error", f"no process to read the host: {error.strerror}")
        self._watch(now)
        if self.node is not None and now >= max(self._due["publish"], self._retry["publish"].due):
            self._publish(now)

    def _serve(self, now: float) -> None:
        """Keep the sockets where the kubelet looks for them: one that starts removes those of plugins."""
        if self.server.running or now < self._retry["serve"].due:
            return
        self.server.stop(0.0)
        try:
            self.server.start()
        except HostError as error:
            self._retry["serve"].failed(now)
            self.log.once("serve", "error", f"{error.code}: {error.message}")
            return
        self._retry["serve"].reset()
        self.log.forget("serve")
        self.log("info", f"{self.options.driver}: serving on {self.server.service.path}")

    # the node

    def _node_view(self) -> NodeView | None:
        """Return the node for a claim: waits a little for the first reading after a start."""
        self._read.wait(self.timing.stop)
        return self._view

    def _get_claim(self, namespace: str, name: str) -> "dict[str, object] | None":
        return self._cluster().get_claim(namespace, name)

    def _cluster(self) -> ApiCluster:
        if self.cluster is None:
            self.cluster = open_cluster(self.options.kubeconfig)
        return self.cluster

    def _has_read(self, reading: DraReading, now: float) -> None:
        self.log.once("silent", "warning", reading.silent)
        if reading.node is None:
            self.monitor.is_silent(self._inventory(), now)
        else:
            self.log.new("problems", "warning", reading.node.problems)
            self.node = reading.node
            self.devices = make_devices(reading.node, self.options.offered)
            options = self.options
            self._view = NodeView(reading.node, self.devices, self.settings, options.plugin, options.mps_root)
            self.monitor.has_read(self._inventory(), now)
        self._read.set()
        if self._view is not None and not self._resumed:
            self._resumed = True
            self.preparer.resume("mps")
        self._judge()

    def _inventory(self) -> Inventory:
        """Return the devices as the monitor of the device plugin knows them."""
        errors = {gpu.bus_id: gpu.error for gpu in self.node.facts.gpus} if self.node else {}
        uuids = {gpu.bus_id: gpu.uuid for gpu in self.node.facts.gpus} if self.node else {}
        found = tuple(
            PluginDevice(
                each.name, each.id, uuids.get(each.board, each.id), each.name, error=errors.get(each.board, "")
            )
            for each in self.devices
        )
        return Inventory((Resource(self.options.driver, found),) if found else ())

    def _watch(self, now: float) -> None:
        if self.node is not None and self.node.facts.gpus and self.monitor.policy.watches_events:
            self.watcher.watch(self.node.facts, now)
        else:
            self.watcher.close()
        news = self.watcher.step(now)
        for warning in news.warnings:
            self.log("warning", warning)
        for event in news.events:
            found = self.monitor.happened(event, self._inventory(), now)
            what = f"XID {event.xid} of {event.gpu or 'an unknown GPU'}"
            self.log("warning" if found else "info", what if found else f"{what} means nothing for its health")
        if news.events:
            self._judge()

    def _judge(self) -> None:
        """Taint devices that are not well, and tell the kubelet of it."""
        judged = [
            device for resource in self._inventory().resources for device in self.monitor.judged(resource).devices
        ]
        reasons = {device.id: device.error for device in judged}
        moment = int(time.time())
        for name, reason in reasons.items():
            if self._changed.get(name, (None, 0))[0] != (not reason):
                self._changed[name] = (not reason, moment)
        health = tuple(
            DeviceHealth(name, not reason, reason, self._changed[name][1]) for name, reason in reasons.items()
        )
        self.server.tell_health(health)
        tainted = tuple(
            each._replace(taints=taints_of(reasons.get(each.name, ""), self.options.driver)) for each in self.devices
        )
        if tainted != self.offered:
            self.offered = tainted
            self._due["publish"] = 0.0

    # the API server

    def _publish(self, now: float) -> None:
        try:
            if self.publisher is None:
                self.publisher = Publisher(self._cluster(), self.options.driver, self.options.node_name, self.log)
            done = self.publisher.publish(self.offered)
        except HostError as error:
            self._retry["publish"].failed(now)
            self.log.once("publish", "error", f"{error.code}: {error.message}")
            return
        self.log.forget("publish")
        self._retry["publish"].reset()
        self._due["publish"] = now + self.timing.publish
        if done.made or done.removed:
            count = len(self.offered)
            self.log("info", f"published {count} devices: {done.made} slices made, {done.removed} removed")


def taints_of(reason: str, driver: str) -> tuple[Taint, ...]:
    """Return the taints of a device that is not well, by the monitor's words; keys are those of NVIDIA's driver."""
    if not reason:
        return ()
    if reason.startswith("XID "):
        return (Taint(f"{driver}/xid", reason.removeprefix("XID ")),)
    return (Taint(f"{driver}/gpu-lost"),)
