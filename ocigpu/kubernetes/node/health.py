"""When a device is unhealthy, and when it is healthy again: pure functions of what was observed.

Another module handles NVML's events and probes; time comes with the observations.  No XID disables a device for ever:
the device returns once it has answered well for a while, and each relapse lengthens that while.  XID: NVIDIA's numbers
for errors that the driver reports, in the kernel's log and as NVML events.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from ocigpu.core.errors import quoted
from ocigpu.core.tokens import is_number
from ocigpu.kubernetes.node.config import Configuration
from ocigpu.kubernetes.node.devices import Inventory, PluginDevice, Resource

APPLICATION_XIDS = frozenset((13, 31, 43, 45, 68, 109))
"""Faults of programs, not of GPUs: illegal instructions and addresses, stopped channels, timeouts of contexts."""
NOTE_LASTS, NOTE_STAYS = 600.0, 60.0
"""Seconds for which an XID that harms no GPU is remembered, and in which no other one replaces it."""
NO_INSTANCE = 0xFFFFFFFF
"""In an event: the whole GPU, not an instance."""


class HealthPolicy(NamedTuple):
    """Which XIDs count.  ``probes``: whether devices are also asked how they are."""

    ignored: frozenset[int] = APPLICATION_XIDS
    enabled: frozenset[int] = frozenset()
    ignore_all: bool = False
    enable_all: bool = False
    probes: bool = True

    def counts(self, xid: int) -> bool:
        """Return whether this XID makes a device unhealthy; enabled XIDs take precedence over disabled ones."""
        return self.enable_all or xid in self.enabled or not (self.ignore_all or xid in self.ignored)

    @property
    def watches_events(self) -> bool:
        """Whether there is any XID that counts."""
        return not self.ignore_all or self.enable_all or bool(self.enabled)


def parse_policy(disable: str, enable: str) -> tuple[HealthPolicy, tuple[str, ...]]:
    """Return the policy of DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS, and notes on words without a meaning.

    Both are comma lists of XIDs.  "all" and "xids" among those to disable mean every XID, "all" the probes too; "all"
    among those to enable means every XID.  With "all" disabled and 79 enabled, 79 alone counts.
    """
    disabled, off, notes = _parse(disable, "DP_DISABLE_HEALTHCHECKS", ("all", "xids"))
    enabled, on, more = _parse(enable, "DP_ENABLE_HEALTHCHECKS", ("all",))
    policy = HealthPolicy(APPLICATION_XIDS | disabled, enabled, bool(off), bool(on), "all" not in off)
    return policy, (*notes, *more)


def _parse(text: str, variable: str, words: tuple[str, ...]) -> tuple[frozenset[int], set[str], list[str]]:
    parts = [part for part in map(str.strip, text.lower().split(",")) if part]
    numbers = frozenset(int(part) for part in parts if is_number(part) and len(part) <= 9)
    found = {part for part in parts if part in words}
    wrong = [part for part in parts if part not in words and not (is_number(part) and len(part) <= 9)]
    return numbers, found, [f"{variable}: {quoted(part)} ignored: it is not an XID" for part in wrong]


# events


class Event(NamedTuple):
    """An XID event.  ``gpu``: its UUID, "" when the driver could not tell; instances as NVML gives them."""

    xid: int
    gpu: str = ""
    gpu_instance: int = NO_INSTANCE
    compute_instance: int = NO_INSTANCE


def affected(event: Event, devices: Iterable[PluginDevice]) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs and MIG devices that an event is about, in order, each once.

    An event of a whole GPU is about all its MIG devices and replicas, one of an instance about that instance, where it
    is offered as a device; else it is about the GPU.  An event without a GPU is about all of them.
    """
    of_gpu = [device for device in devices if event.gpu in ("", device.gpu)]
    inside = [device for device in of_gpu if _is_inside(device, event)]
    return tuple(dict.fromkeys(device.uuid for device in inside or of_gpu))


def _is_inside(device: PluginDevice, event: Event) -> bool:
    if device.instance is None or not event.gpu:
        return event.gpu_instance == NO_INSTANCE
    wanted = (event.gpu_instance, event.compute_instance)
    return all(number in (NO_INSTANCE, own) for number, own in zip(wanted, device.instance, strict=True))


# from observations to a state


class Rules(NamedTuple):
    """How quick to judge; times in seconds.

    A device is healthy again after ``probes`` good answers in a row and ``hold`` without a fault; a relapse within
    ``forget`` doubles the hold, up to ``longest_hold``.  ``patience``: how long a device may give no answer.
    """

    probes: int = 3
    hold: float = 60.0
    longest_hold: float = 3600.0
    forget: float = 24 * 3600.0
    patience: float = 30.0


RULES = Rules()


class HealthState(NamedTuple):
    """How a device is.  ``reason``: why it is unhealthy.

    ``fault_at``: of the latest fault; ``hold``: seconds that must pass after it; ``good``: good answers since;
    ``silent_since``: when answers stopped.  None for never.
    """

    healthy: bool = True
    reason: str = ""
    fault_at: float | None = None
    hold: float = 0.0
    good: int = 0
    silent_since: float | None = None

    def failed(self, at: float, reason: str, rules: Rules) -> "HealthState":
        """Return the state after a fault."""
        recent = self.fault_at is not None and at - self.fault_at < rules.forget
        longer = min(self.hold * 2, rules.longest_hold) if recent else rules.hold
        return HealthState(False, reason, at, longer if self.healthy else self.hold)

    def answered(self, at: float, rules: Rules) -> "HealthState":
        """Return the state after a good answer."""
        if self.healthy:
            return self._replace(silent_since=None)
        good = self.good + 1
        well = good >= rules.probes and at - (self.fault_at or 0.0) >= self.hold
        return HealthState(well, "" if well else self.reason, self.fault_at, self.hold, good)

    def silent(self, at: float, rules: Rules) -> "HealthState":
        """Return the state while there is no answer."""
        begin = at if self.silent_since is None else self.silent_since
        hung = self.healthy and at - begin >= rules.patience
        after = self.failed(at, f"no answer for {rules.patience:g} s", rules) if hung else self
        return after._replace(silent_since=begin, good=0)


class Monitor:
    """The states of GPUs and MIG devices by UUID; they continue those of ``before``."""

    def __init__(self, configuration: Configuration, rules: Rules = RULES, before: "Monitor | None" = None) -> None:
        options = configuration.options
        self.policy, self.notes = parse_policy(options.disabled_health_checks, options.enabled_health_checks)
        self._rules = rules
        self.states: dict[str, HealthState] = dict(before.states) if before else {}
        self._notes: dict[str, tuple[int, float, float]] = {}

    def record_reading(self, inventory: Inventory, now: float) -> None:
        """Record a reading of the node: a device with an error is faulty, every other one answered."""
        for device in _devices(inventory) if self.policy.probes else ():
            state = self.states.get(device.uuid, HealthState())
            error = device.error
            self.states[device.uuid] = (
                state.failed(now, error, self._rules) if error else state.answered(now, self._rules)
            )

    def record_silence(self, inventory: Inventory, now: float) -> None:
        """Record that the node could not be read, so that the state of its devices is unknown."""
        for device in _devices(inventory) if self.policy.probes else ():
            self.states[device.uuid] = self.states.get(device.uuid, HealthState()).silent(now, self._rules)

    def record_event(self, event: Event, inventory: Inventory, now: float) -> tuple[str, ...]:
        """Record an event; returns the UUIDs of the devices that it makes unhealthy."""
        found = affected(event, list(_devices(inventory)))
        if not self.policy.counts(event.xid):
            self._note(found, event.xid, now)
            return ()
        for uuid in found:
            self.states[uuid] = self.states.get(uuid, HealthState()).failed(now, f"XID {event.xid}", self._rules)
        return found

    def _note(self, found: Iterable[str], xid: int, now: float) -> None:
        """Remember an XID that harms no GPU; programs make them at will, so another replaces it only after a while."""
        for uuid in found:
            known, since, _ = self._notes.get(uuid, (xid, now, now))
            stays = known != xid and now - since < NOTE_STAYS
            self._notes[uuid] = (known, since, now) if stays or known == xid else (xid, now, now)

    def noted_xid(self, uuid: str, now: float) -> int | None:
        """Return the XID of the last NOTE_LASTS seconds that did not harm this device, None for none."""
        xid, _, last = self._notes.get(uuid, (0, 0.0, -math.inf))
        if now - last < NOTE_LASTS:
            return xid
        self._notes.pop(uuid, None)
        return None

    def with_health(self, resource: Resource) -> Resource:
        """Return the resource with the errors of its devices; a MIG device inherits those of its GPU."""
        sick = {uuid: state.reason for uuid, state in self.states.items() if not state.healthy}
        errors = (each.error or sick.get(each.uuid) or sick.get(each.gpu, "") for each in resource.devices)
        pairs = zip(resource.devices, errors, strict=True)
        return resource._replace(devices=tuple(device._replace(error=error) for device, error in pairs))


def _devices(inventory: Inventory) -> Iterable[PluginDevice]:
    """Return the devices of all resources, of several replicas one."""
    return {device.uuid: device for resource in inventory.resources for device in resource.devices}.values()
