"""How the devices are, from readings of the node and NVML's events; time comes with them.  Pure."""

from collections.abc import Iterable

from ocigpu.kubernetes.config import Configuration
from ocigpu.kubernetes.devices import Inventory, PluginDevice, Resource
from ocigpu.kubernetes.health import (
    RULES,
    Event,
    HealthState,
    Observation,
    Rules,
    affected,
    observe,
    parse_policy,
    with_health,
)


class Monitor:
    """The states of GPUs and MIG devices by UUID; those of ``before`` go on."""

    def __init__(self, configuration: Configuration, rules: Rules = RULES, before: "Monitor | None" = None) -> None:
        options = configuration.options
        self.policy, self.notes = parse_policy(options.disabled_health_checks, options.enabled_health_checks)
        self._rules = rules
        self.states: dict[str, HealthState] = dict(before.states) if before else {}

    def has_read(self, inventory: Inventory, now: float) -> None:
        """The node was read: a device with an error has a fault, every other one has answered well."""
        if not self.policy.probes:
            return
        for device in _devices(inventory):
            kind = "fault" if device.error else "good"
            self._observe(device.uuid, Observation(now, kind, device.error))

    def is_silent(self, inventory: Inventory, reason: str, now: float) -> None:
        """The node could not be read: nobody knows how its devices are."""
        if self.policy.probes:
            for device in _devices(inventory):
                self._observe(device.uuid, Observation(now, "silent", reason))

    def happened(self, event: Event, inventory: Inventory, now: float) -> tuple[str, ...]:
        """Take in an event; returns the UUIDs of the devices that it makes unhealthy."""
        if not self.policy.counts(event.xid):
            return ()
        found = affected(event, list(_devices(inventory)))
        for uuid in found:
            self._observe(uuid, Observation(now, "fault", event.reason))
        return found

    def judged(self, resource: Resource) -> Resource:
        """Return the resource with the errors of its devices."""
        return with_health(resource, self.states)

    def _observe(self, uuid: str, seen: Observation) -> None:
        self.states[uuid] = observe(self.states.get(uuid, HealthState()), seen, self._rules)


def _devices(inventory: Inventory) -> Iterable[PluginDevice]:
    """Return the devices of all resources, of several replicas one."""
    return {device.uuid: device for resource in inventory.resources for device in resource.devices}.values()
