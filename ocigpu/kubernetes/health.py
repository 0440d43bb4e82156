"""When a device is unhealthy, and when it is healthy again: pure functions of what was observed.

NVML's events and probes are somebody else's business; time comes with the observations.  An XID condemns nothing for
ever: a device returns once it has answered well for a while, and each relapse makes that while longer.
XID: NVIDIA's numbers for errors that the driver reports, in the kernel's log and as NVML events.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ocigpu.core.errors import quoted
from ocigpu.core.tokens import is_number
from ocigpu.kubernetes.config import Configuration
from ocigpu.kubernetes.devices import Inventory, PluginDevice, Resource

APPLICATION_XIDS = frozenset((13, 31, 43, 45, 68, 109))
"""Faults of programs, not of GPUs: illegal instructions and addresses, stopped channels, timeouts of contexts."""
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
        """Return whether this XID makes a device unhealthy; what is enabled comes before what is disabled."""
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

    @property
    def reason(self) -> str:
        """Why a device that is affected is unhealthy."""
        return f"XID {self.xid}"


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


class Observation(NamedTuple):
    """What was seen of a device.  ``kind``: "good" (it answered well), "fault" or "silent" (no answer yet)."""

    at: float
    kind: str
    reason: str = ""


class HealthState(NamedTuple):
    """How a device is.  ``reason``: why it is unhealthy; ``since``: when ``healthy`` last changed.

    ``fault_at``: of the latest fault; ``hold``: seconds that must pass after it; ``good``: good answers since;
    ``silent_since``: when answers stopped.  None for never.
    """

    healthy: bool = True
    reason: str = ""
    since: float | None = None
    fault_at: float | None = None
    hold: float = 0.0
    good: int = 0
    silent_since: float | None = None


def observe(state: HealthState, seen: Observation, rules: Rules = RULES) -> HealthState:
    """Return the state after an observation."""
    if seen.kind == "fault":
        return _failed(state._replace(silent_since=None), seen.at, seen.reason, rules)
    if seen.kind == "silent":
        begin = seen.at if state.silent_since is None else state.silent_since
        state = state._replace(silent_since=begin, good=0)
        if state.healthy and seen.at - begin >= rules.patience:
            return _failed(state, seen.at, f"no answer for {rules.patience:g} s", rules)
        return state
    state = state._replace(silent_since=None)
    if state.healthy:
        return state
    state = state._replace(good=state.good + 1)
    quiet = seen.at - (state.fault_at if state.fault_at is not None else seen.at)
    if state.good >= rules.probes and quiet >= state.hold:
        return state._replace(healthy=True, reason="", since=seen.at)
    return state


def _failed(state: HealthState, at: float, reason: str, rules: Rules) -> HealthState:
    if not state.healthy:
        return state._replace(reason=reason, fault_at=at, good=0)
    recent = state.fault_at is not None and at - state.fault_at < rules.forget
    hold = min(state.hold * 2, rules.longest_hold) if recent else rules.hold
    return state._replace(healthy=False, reason=reason, since=at, fault_at=at, hold=hold, good=0)


def with_health(resource: Resource, states: Mapping[str, HealthState]) -> Resource:
    """Return the resource with the errors of these states, by UUID; a MIG device also has those of its GPU."""
    return resource._replace(devices=tuple(_with_error(device, states) for device in resource.devices))


def _with_error(device: PluginDevice, states: Mapping[str, HealthState]) -> PluginDevice:
    found = (states[name].reason for name in (device.uuid, device.gpu) if name in states and not states[name].healthy)
    error = device.error or next(found, "")
    return device._replace(error=error) if error != device.error else device


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
