"""What of the published devices is taken: devices, shared counters, and capacity of devices that several share.  Pure.

As the scheduler counts it: k8s.io/api resource/v1 types.go (CounterSet, DeviceCounterConsumption, CapacityRequirements,
CapacityRequestPolicy), and k8s.io/dynamic-resource-allocation structured.  The same counters are written by
:mod:`~ocigpu.kubernetes.dra.slices`.
"""

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from ocigpu.kubernetes.cluster.quantity import parse_quantity

Key = tuple[str, str, str]
"""Driver, pool and name of a device."""
Amounts = Mapping[str, Decimal]
CounterSets = Mapping[str, Amounts]
"""Counters by the name of their set."""


class Use(NamedTuple):
    """The holder of a device; ``amounts``: of its capacity, None for all of the device."""

    owner: str
    amounts: Amounts | None = None


Uses = Mapping[Key, tuple[Use, ...]]


def counter_sets(slices: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Decimal]]:
    """Return the shared counters of a pool's slices."""
    return {
        each["name"]: _amounts(each.get("counters")) for spec in slices for each in spec.get("sharedCounters") or ()
    }


def consumed_counters(device: Mapping[str, Any]) -> dict[str, dict[str, Decimal]]:
    """Return what a device takes of its pool's counters; ``device``: its entry in a slice."""
    return {each["counterSet"]: _amounts(each.get("counters")) for each in device.get("consumesCounters") or ()}


def _amounts(values: Any) -> dict[str, Decimal]:
    return {name: amount(each) for name, each in (values or {}).items()}


def amount(content: Any) -> Decimal:
    """Return the amount of a counter or capacity, 0 for none."""
    return parse_quantity(content.get("value") if isinstance(content, Mapping) else content) or Decimal(0)


def consumed_capacity(device: Mapping[str, Any], driver: str, wanted: Mapping[str, Any]) -> "dict[str, Decimal] | str":
    """Return the amount that a request takes of a device's capacity, or why it cannot.

    ``wanted`` is from ``capacity.requests``.
    """
    asked = {_qualified(name, driver): value for name, value in wanted.items()}
    capacity = {_qualified(name, driver): each for name, each in (device.get("capacity") or {}).items()}
    for name in asked:
        if name not in capacity:
            return f"it has no capacity {_short(name, driver)}"
    taken: dict[str, Decimal] = {}
    for name, content in capacity.items():
        whole, policy = amount(content), content.get("requestPolicy") or {}
        given = parse_quantity(asked[name]) if name in asked else None
        least = whole if not policy else parse_quantity(policy.get("default")) or Decimal(0)
        wants = given if given is not None else least
        shared = bool(device.get("allowMultipleAllocations"))
        part = _by_policy(wants, policy, whole) if shared and policy else wants
        if part is None or part > whole:
            return f"{_short(name, driver)}: {asked.get(name, 'too much')} requested, {content.get('value')} available"
        taken[name] = part
    return taken


def _by_policy(part: Decimal, policy: Mapping[str, Any], whole: Decimal) -> Decimal | None:
    """Return the amount taken for a requested one: rounded up, None if it exceeds the limit."""
    if valid := sorted(filter(None, map(parse_quantity, policy.get("validValues") or ()))):
        return next((each for each in valid if each >= part), None)
    limits = policy.get("validRange") or {}
    least, most, step = (parse_quantity(limits.get(name)) for name in ("min", "max", "step"))
    part = max(part, least or Decimal(0))
    if step:
        over = (part - (least or Decimal(0))) % step
        part += step - over if over else 0
    return part if part <= (whole if most is None else most) else None


def _qualified(name: str, driver: str) -> str:
    return name if "/" in name else f"{driver}/{name}"


def _short(name: str, driver: str) -> str:
    return name.removeprefix(f"{driver}/")


class Ledger:
    """The holders of devices; a search calls :meth:`take` and :meth:`give_back` in stack order."""

    def __init__(self, devices: "Iterable[tuple[Key, Mapping[str, Any], CounterSets]]", held: Uses) -> None:
        self._entries = {key: (entry, sets) for key, entry, sets in devices}
        self._uses: dict[Key, list[Use]] = {}
        self._counted: dict[tuple[str, str, str], dict[str, Decimal]] = {}
        self._holders: dict[tuple[str, str, str], list[Key]] = {}
        for key, uses in held.items():
            for use in uses:
                self.take(key, use)

    def why_not(self, key: Key, request: Mapping[str, Any]) -> str:
        """Return why a request cannot take a device now, "" if it can."""
        entry, sets = self._entries[key]
        wanted = (request.get("capacity") or {}).get("requests") or {}
        part = consumed_capacity(entry, key[0], wanted)
        if isinstance(part, str):
            return part
        uses = self._uses.get(key, [])
        if uses and (not entry.get("allowMultipleAllocations") or any(use.amounts is None for use in uses)):
            return f"in use by {uses[0].owner}"
        for name, value in part.items():
            used = sum((use.amounts.get(name, Decimal(0)) for use in uses if use.amounts is not None), Decimal(0))
            whole = next(amount(each) for own, each in entry["capacity"].items() if _qualified(own, key[0]) == name)
            if used + value > whole:
                others = ", ".join(dict.fromkeys(use.owner for use in uses))
                left = whole - used
                return f"{_short(name, key[0])}: {value.normalize():f} needed, {left.normalize():f} left by {others}"
        return "" if uses else self._why_no_counters(key, entry, sets)

    def _why_no_counters(self, key: Key, entry: Mapping[str, Any], sets: CounterSets) -> str:
        for name, counters in consumed_counters(entry).items():
            if name not in sets:
                return f"its pool has no counters {name}"
            place = (key[0], key[1], name)
            used = self._counted.get(place, {})
            for counter, value in counters.items():
                if used.get(counter, Decimal(0)) + value <= sets[name].get(counter, Decimal(0)):
                    continue
                for other in self._holders.get(place, ()):
                    if counter in consumed_counters(self._entries[other][0]).get(name, ()):
                        return f"part of it is in use by {self._uses[other][0].owner} ({other[2]})"
                return f"it needs more of {counter} than {name} has"
        return ""

    def take(self, key: Key, use: Use) -> None:
        """Record that a device is taken."""
        uses = self._uses.setdefault(key, [])
        uses.append(use)
        if len(uses) == 1:
            self._count(key, 1)

    def take_for(self, key: Key, request: Mapping[str, Any], owner: str) -> None:
        """Record that a request takes its share of a device."""
        entry, _ = self._entries[key]
        part = consumed_capacity(entry, key[0], (request.get("capacity") or {}).get("requests") or {})
        shares = entry.get("allowMultipleAllocations") and not isinstance(part, str)
        self.take(key, Use(owner, part if shares and not isinstance(part, str) else None))

    def give_back(self, key: Key) -> None:
        """Forget the last holder of a device."""
        self._uses[key].pop()
        if not self._uses[key]:
            del self._uses[key]
            self._count(key, -1)

    def _count(self, key: Key, sign: int) -> None:
        """Counters are consumed once, however many share a device."""
        if key not in self._entries:
            return
        for name, counters in consumed_counters(self._entries[key][0]).items():
            place = (key[0], key[1], name)
            used = self._counted.setdefault(place, {})
            for counter, value in counters.items():
                used[counter] = used.get(counter, Decimal(0)) + sign * value
            holders = self._holders.setdefault(place, [])
            holders.append(key) if sign > 0 else holders.remove(key)
