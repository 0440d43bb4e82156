"""``ocigpu device-plugin``: keeps the kubelet informed about this node's devices until it is stopped.

One thread (:mod:`~ocigpu.kubernetes.node.program`) does everything that must never block: signals, files, readings of
the node, NVML's events, registration; gRPC answers in others (:mod:`~ocigpu.kubernetes.plugin.server`).  Failures are
logged and retried.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

from ocigpu.core.errors import HostError, OcigpuError
from ocigpu.core.settings import Settings
from ocigpu.core.vendors import FIRST, VENDORS
from ocigpu.kubernetes.api.listener import identity
from ocigpu.kubernetes.leases.gate import LeaseGate
from ocigpu.kubernetes.leases.machine import open_gate
from ocigpu.kubernetes.mps.shares import mps_problem, waiting_resources, waits_for_mps
from ocigpu.kubernetes.node.config import CommandInput, Configuration, PluginOptions, configure, read_configuration
from ocigpu.kubernetes.node.devices import Inventory, Resource
from ocigpu.kubernetes.node.health import RULES, Monitor, Rules
from ocigpu.kubernetes.node.program import NodeProgram
from ocigpu.kubernetes.node.reading import KubernetesNode, carry_over, host_settings
from ocigpu.kubernetes.node.vfio import SWITCH_RESOURCE
from ocigpu.kubernetes.plugin.allocatable import Allocatable, pods_socket
from ocigpu.kubernetes.plugin.allocate import usable_channels
from ocigpu.kubernetes.plugin.reading import Reading, hardware_reader
from ocigpu.kubernetes.plugin.server import FIRST_RETRY, LONGEST_RETRY, Offer, Registration, ResourceServer
from ocigpu.system.service import Backoff, FollowedFile

ASK = 3
"""Readings of the node for one question to the kubelet which devices it has."""


class Timing(NamedTuple):
    """Seconds: ``poll`` between looks at files and sockets, ``probe`` between readings of the node.

    ``listens``: after which a kubelet that has taken a registration listens.
    """

    poll: float = 0.5
    probe: float = 10.0
    rules: Rules = RULES
    listens: float = 10.0


class Served(NamedTuple):
    """A resource's server, its registration, and when a failed start is tried again."""

    server: ResourceServer
    registration: Registration
    retry: Backoff


class DevicePlugin(NodeProgram[Reading]):
    """What the plugin knows and does; :meth:`run` returns when a signal ends it.

    Raises SettingsError (OCIGPU-KUBE-1) for flags and variables that cannot be understood: the file may be corrected
    while it runs, they may not.
    """

    fatal = (OcigpuError,)

    def __init__(
        self,
        given: CommandInput,
        settings: Settings,
        as_json: bool = False,
        timing: Timing | None = None,
    ) -> None:
        timing = timing or Timing()
        super().__init__(hardware_reader(), Monitor(Configuration()), timing.poll, timing.probe, as_json)
        self.given = given
        self.given_settings = settings
        self.rules, self.listens = timing.rules, timing.listens
        fixed = configure(given.flags, given.environment).options
        self.kubelet = fixed.kubelet_socket
        self.directory = os.path.dirname(self.kubelet or PluginOptions().kubelet_socket)
        self.configuration: Configuration | None = None
        self.settings = settings
        self.without_mps: frozenset[str] = frozenset()
        """Resources whose control daemon is not ready."""
        self.node: KubernetesNode | None = None
        self.gate: LeaseGate | None = None
        self.inventory = Inventory()
        self.served: dict[str, Served] = {}
        self._missing: frozenset[str] = frozenset()
        """Resources of which the kubelet had not all devices when it was last asked."""
        self._allocatable = (
            Allocatable(pods_socket(self.kubelet), ASK * timing.probe, self.signals.wake) if self.kubelet else None
        )
        self._file = FollowedFile(given.file)
        self._first = True
        self._sick: dict[str, str] = {}

    # life

    def run(self) -> None:
        """Work until SIGTERM, SIGINT or SIGQUIT; SIGHUP reads everything again.

        Needs the right to make sockets beside the kubelet's: root.  Raises HostError without a driver if
        failOnInitError is set.
        """
        with self.signals:
            self._configure()
            try:
                self._work()
            finally:
                if self._allocatable:
                    self._allocatable.close()
                for name in list(self.served):
                    self._end(name)

    def _step(self, now: float) -> None:
        self._look_at_file()
        if self.configuration and (reading := self._poll_reader(lambda: (self.settings, self.configuration), now)):
            self._record_reading(reading, now)
        if self._hear(self.node.driven if self.node else (), self.inventory, now):
            self._offer()
        if self.configuration and self.without_mps != waiting_resources(self.inventory.resources, self.configuration):
            self._offer()
        if self.gate and self.gate.has_changed():
            self._offer()
        for served in self.served.values():
            self._keep(served, now)
        if self._allocatable and (found := self._allocatable.step(now)) is not None:
            self._compare(found, now)

    # configuration

    def _look_at_file(self) -> None:
        changed = self._file.has_changed()
        if self.signals.take_again():
            self.log("info", "SIGHUP: reading everything again")
            if self._configure():
                for served in self.served.values():
                    served.server.stop()
                    served.retry.reset()
        elif changed:
            self.log("info", f"{self.given.file} has changed")
            self._configure()

    def _configure(self) -> bool:
        """Load the configuration; a wrong one leaves the former one in force.  Returns whether it was valid."""
        try:
            configuration = read_configuration(self.given)
            settings = host_settings(self.given_settings, configuration.options)
            gate = open_gate(configuration.options, settings) if configuration != self.configuration else self.gate
        except OcigpuError as error:
            stays = "nothing is offered until it is corrected" if self.configuration is None else "the one before stays"
            self.log("error", f"{error.line}; {stays}", code=error.code)
            return False
        for warning in configuration.warnings:
            self.log("warning", warning)
        if configuration != self.configuration:
            self.configuration = configuration
            self.settings, self.gate = settings, gate
            self.monitor = Monitor(configuration, self.rules, self.monitor)
            for note in self.monitor.notes:
                self.log("warning", note)
            self.inventory, self.node = Inventory(), None  # a device missing from another configuration is not lost
            self.reader.close()
        self._read_due = 0.0
        return True

    # the node

    def _record_reading(self, reading: Reading, now: float) -> None:
        assert self.configuration is not None
        self.log.once("silent", "warning", reading.silent)
        self.log.new("specifications", "error", reading.problems)
        if reading.node is None:
            self.monitor.record_silence(self.inventory, now)
        else:
            node = reading.node
            if reading.silent and self.node:
                node = self.node._replace(others=node.others)
            self.node = node
            self.inventory = carry_over(self.inventory, node.offered)
            read = [vendor for vendor in VENDORS if vendor != FIRST or not reading.silent]
            self.monitor.record_reading(self.inventory.of(*read), now)
            if reading.silent:
                self.monitor.record_silence(self.inventory.of(FIRST), now)
            options = self.configuration.options._replace(imex_required=False)
            missing = usable_channels(node.facts, options)[1]
            self.log.new("notes", "warning", (*node.offered.notes, *missing))
        if self._first and self.configuration.options.fail_on_init_error and not self.inventory.resources:
            raise HostError("OCIGPU-HOST-1", f"{self.inventory.reason or reading.silent} (failOnInitError is set)")
        self._first = False
        why = "" if self.inventory.resources else self.inventory.reason or reading.silent
        self.log.once("nothing", "warning", f"no devices to offer: {why}; waiting for some" if why else "")
        self._offer()

    # servers

    def _offer(self) -> None:
        """Tell every server what it offers now; make those that are new and end those that are gone."""
        if self.node is None or self.configuration is None:
            return
        self.without_mps = waiting_resources(self.inventory.resources, self.configuration)
        # tenants share the switches: access to one exposes the traffic of all
        offered = [each for each in self.inventory.resources if not (self.gate and each.name == SWITCH_RESOURCE)]
        judged = [self.monitor.with_health(self._usable(resource)) for resource in offered]
        gated = {resource.name for resource in judged if resource.kind == "vfio" and self.gate}
        judged = [self.gate.with_leases(each) if self.gate and each.name in gated else each for each in judged]
        self._tell_health(judged)
        for name in self.served.keys() - {resource.name for resource in judged}:
            self.log("info", f"{name}: no longer offered")
            self._end(name, gone=True)
        for resource in judged:
            gate = self.gate if resource.name in gated else None
            offer = Offer(resource, self.node, self.configuration, self.settings, gate)
            served = self.served.get(resource.name)
            if served is None:
                server = ResourceServer(offer, self.directory, self.log)
                registration = Registration(self.kubelet, resource.name, self.signals.wake, self.log, self.listens)
                self.served[resource.name] = Served(server, registration, Backoff(FIRST_RETRY, LONGEST_RETRY))
                self.log("info", f"{resource.name}: {_count(resource)}", resource=resource.name)
            elif served.server.update(offer):
                self.log("info", f"{resource.name}: now {_count(resource)}", resource=resource.name)

    def _usable(self, resource: Resource) -> Resource:
        """Return the resource, with the reason if its devices cannot be shared as configured."""
        if resource.sharing != "mps" or self.node is None or self.configuration is None:
            return resource
        problem = mps_problem(resource, self.node.facts) or waits_for_mps(resource, self.configuration)
        if not problem:
            return resource
        devices = (each._replace(error=problem) if each.is_replica else each for each in resource.devices)
        return resource._replace(devices=tuple(devices))

    def _tell_health(self, resources: list[Resource]) -> None:
        sick = {device.uuid: device.error for each in resources for device in each.devices if device.error}
        for uuid, error in sick.items():
            if self._sick.get(uuid) != error:
                self.log("warning", f"{uuid} is unhealthy: {error}", device=uuid)
        present = {device.uuid for each in resources for device in each.devices}
        for uuid in self._sick.keys() & present - sick.keys():
            self.log("info", f"{uuid} is healthy again", device=uuid)
        self._sick = sick

    def _keep(self, served: Served, now: float) -> None:
        """Keep a server listening and registered: kubelets remove all sockets when they start."""
        server = served.server
        if server.running and not server.owns_socket():
            taken = bool(identity(server.path))
            self.log(
                "warning", f"{server.path} was {'taken by another program' if taken else 'removed'}: serving again"
            )
            server.stop()
            served.retry.due = now + LONGEST_RETRY if taken else now
        if not server.running:
            served.registration.again()
            if not os.path.isdir(self.directory):
                self.log.once(self.directory, "warning", f"there is no directory {self.directory}: waiting")
                return
            if now < served.retry.due or not self._start(served, now):
                return
        if self.kubelet:
            if not server.is_followed and served.registration.holds(now):
                cause = "it ended, or another plugin serves this resource"
                served.registration.renew(now, f"the kubelet no longer listens ({cause})")
            served.registration.step(now, identity(self.kubelet))

    def _compare(self, found: Mapping[str, frozenset[str]], now: float) -> None:
        """Register what the kubelet does not have twice in a row: another plugin may have taken the resource."""
        before, self._missing = self._missing, frozenset()
        for name, served in self.served.items():
            healthy = {device.id for device in served.server.offer.resource.devices if not device.error}
            if healthy <= found.get(name, frozenset()) or not served.registration.holds(now):
                continue
            if name not in before:
                self._missing |= {name}
                continue
            served.server.break_off()
            cause = "another plugin serves or served this resource"
            served.registration.renew(now, f"the kubelet does not have these devices ({cause})")

    def _start(self, served: Served, now: float) -> bool:
        try:
            served.server.start()
        except OcigpuError as error:
            served.retry.failed(now)
            self.log.once(served.server.path, "error", error.line)
            return False
        served.retry.reset()
        self.log.forget(served.server.path)
        self.log.forget(self.directory)
        return True

    def _end(self, name: str, gone: bool = False) -> None:
        served = self.served.pop(name)
        served.registration.cancel()
        served.server.stop(gone)


def _count(resource: Resource) -> str:
    sick = sum(bool(device.error) for device in resource.devices)
    number = len(resource.devices)
    return f"{number} device{'s' if number != 1 else ''}" + (f", {sick} of them unhealthy" if sick else "")
