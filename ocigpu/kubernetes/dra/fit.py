"""Why a claim does not fit: its requests against the published devices, one condition after the other.  Pure.

Selectors are CEL, evaluated by cel-python, which is not installed with us; the variable and the functions that
Kubernetes adds for devices are those of k8s.io/dynamic-resource-allocation cel and of apiserver's CEL libraries.
A first-fit search gives the devices that a request would get; the scheduler's own may differ.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ocigpu.core.errors import HostError, printable
from ocigpu.kubernetes.dra.claims import allocated_devices
from ocigpu.kubernetes.dra.slices import Slice
from ocigpu.kubernetes.quantity import parse_quantity

MAX_DEVICES = 32
"""Of one claim."""
_ATTRIBUTE = re.compile(r"""device\.(attributes|capacity)\[["']([^"']+)["']\]\.([A-Za-z_][A-Za-z0-9_]*)""")


class PublishedDevice(NamedTuple):
    """A device of a whole pool; ``spec``: its entry in the slice."""

    driver: str
    pool: str
    node: str
    name: str
    spec: "dict[str, Any]"

    @property
    def key(self) -> tuple[str, str, str]:
        return self.driver, self.pool, self.name

    def value(self, kind: str, domain: str, name: str) -> Any:
        """Return the value of an attribute or capacity, None for none; names without a domain are the driver's."""
        for key, content in (self.spec.get(kind) or {}).items():
            own, slash, short = key.rpartition("/")
            if short == name and (own if slash else self.driver) == domain:
                return next(iter(content.values()), None)
        return None


class DeviceRefusal(NamedTuple):
    """Why a device is not for a request: the condition, and what the device has of what it names."""

    device: str
    why: str


class RequestFit(NamedTuple):
    """``chosen``: devices that would do; ``refusals``: why others would not; ``problem``: "" if it fits."""

    request: str
    wanted: int
    chosen: tuple[PublishedDevice, ...]
    refusals: tuple[DeviceRefusal, ...]
    problem: str = ""


def published_devices(slices: Iterable[Slice]) -> tuple[tuple[PublishedDevice, ...], tuple[str, ...]]:
    """Return the devices of pools that are whole, and a note for each that is not."""
    pools: dict[tuple[str, str], list[Slice]] = {}
    for each in slices:
        pools.setdefault((each["driver"], each["pool"]["name"]), []).append(each)
    found: list[PublishedDevice] = []
    notes = []
    for (driver, pool), parts in pools.items():
        newest = max(each["pool"]["generation"] for each in parts)
        current = [each for each in parts if each["pool"]["generation"] == newest]
        wanted = current[0]["pool"]["resourceSliceCount"]
        if len(current) != wanted:
            notes.append(f"pool {pool} of {driver} is not whole: {len(current)} of {wanted} slices")
            continue
        for each in current:
            devices = each.get("devices") or []
            found += [PublishedDevice(driver, pool, each.get("nodeName", ""), one["name"], one) for one in devices]
    return tuple(found), tuple(notes)


def held_devices(claims: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, str], str]:
    """Return which claim has which device, by (driver, pool, device); administrators have none."""
    held = {}
    for claim in claims:
        meta = claim["metadata"]
        for each in allocated_devices(claim):
            if not each.get("adminAccess") and not each.get("shareID"):
                held[each["driver"], each["pool"], each["device"]] = f"{meta.get('namespace')}/{meta['name']}"
    return held


def fit_claim(
    spec: Mapping[str, Any],
    classes: Mapping[str, Mapping[str, Any]],
    devices: Sequence[PublishedDevice],
    held: Mapping[tuple[str, str, str], str],
) -> tuple[RequestFit, ...]:
    """Return how a claim's requests fit on the one node where most of them do, in their order.

    ``spec``: of a ResourceClaim.  Raises HostError (OCIGPU-DRA-6) without cel-python.
    """
    nodes = list(dict.fromkeys(device.node for device in devices)) or [""]
    tries = [_fit_on([each for each in devices if each.node == node], spec, classes, held) for node in nodes]
    return min(tries, key=lambda fits: sum(bool(fit.problem) for fit in fits))


def _fit_on(
    devices: Sequence[PublishedDevice],
    spec: Mapping[str, Any],
    classes: Mapping[str, Mapping[str, Any]],
    held: Mapping[tuple[str, str, str], str],
) -> tuple[RequestFit, ...]:
    constraints = (spec.get("devices") or {}).get("constraints") or []
    taken = dict(held)
    fits: list[RequestFit] = []
    for request in (spec.get("devices") or {}).get("requests") or []:
        options = request.get("firstAvailable") or [{**(request.get("exactly") or {}), "name": ""}]
        tries = []
        for option in options:
            name = "/".join(filter(None, (request["name"], option["name"])))
            own = [each for each in constraints if not each.get("requests") or request["name"] in each["requests"]]
            tries.append(_fit_request(name, option, classes, devices, taken, own, fits))
            if not tries[-1].problem:
                break
        fit = tries[-1]
        fits.append(fit)
        if not options[0].get("adminAccess"):
            taken.update(
                {each.key: "this claim" for each in fit.chosen if not each.spec.get("allowMultipleAllocations")}
            )
    return tuple(fits)


def _fit_request(
    name: str,
    request: Mapping[str, Any],
    classes: Mapping[str, Mapping[str, Any]],
    devices: Sequence[PublishedDevice],
    taken: Mapping[tuple[str, str, str], str],
    constraints: Sequence[Mapping[str, Any]],
    before: Sequence[RequestFit],
) -> RequestFit:
    every = request.get("allocationMode") == "All"
    count = int(request.get("count") or 1)
    device_class = classes.get(str(request.get("deviceClassName", "")))
    if device_class is None:
        return RequestFit(name, count, (), (), f"there is no DeviceClass {request.get('deviceClassName')}")
    parts = [*((device_class.get("spec") or {}).get("selectors") or []), *(request.get("selectors") or [])]
    expressions = [str(part["cel"]["expression"]) for part in parts if "cel" in part]
    refusals: list[DeviceRefusal] = []
    good: list[PublishedDevice] = []
    for device in devices:
        why = next(filter(None, (why_not(text, device) for text in expressions)), "")
        if not why and not request.get("adminAccess"):
            why = f"in use by claim {taken[device.key]}" if device.key in taken else _taint(device, request)
        if why:
            refusals.append(DeviceRefusal(device.name, why))
        else:
            good.append(device)
    chosen = _constrained(good, len(good) if every else count, constraints, before)
    enough = len(chosen) >= max(1, len(good) if every else count)
    problem = "" if enough else f"{len(good)} devices fit, {'all' if every else count} wanted"
    if not enough and len(good) >= count:
        names = ", ".join(str(each.get("matchAttribute") or each.get("distinctAttribute")) for each in constraints)
        problem = f"{len(good)} devices fit, but no {count} of them by {names}"
    return RequestFit(name, count, tuple(chosen), tuple(refusals), problem)


def _taint(device: PublishedDevice, request: Mapping[str, Any]) -> str:
    for taint in device.spec.get("taints") or []:
        tolerated = any(
            (each.get("operator") == "Exists" and each.get("key") in (None, "", taint["key"]))
            or (each.get("key") == taint["key"] and each.get("value", "") == taint.get("value", ""))
            for each in request.get("tolerations") or []
        )
        if taint.get("effect") != "None" and not tolerated:
            return f"tainted {taint['key']}={taint.get('value', '')}:{taint.get('effect')}"
    return ""


def _constrained(
    good: Sequence[PublishedDevice],
    count: int,
    constraints: Sequence[Mapping[str, Any]],
    before: Sequence[RequestFit],
) -> list[PublishedDevice]:
    """Return the first devices that agree with each other, and with those of other requests, in what is to be equal.

    And that differ in what is to be distinct.
    """
    earlier = [each for fit in before for each in fit.chosen]

    def bound_by(rule: str) -> "list[tuple[str, list[PublishedDevice]]]":
        found = [(each[rule], each.get("requests")) for each in constraints if each.get(rule)]
        return [(name, [one for one in earlier if _named(one, before, requests)]) for name, requests in found]

    for name, others in bound_by("distinctAttribute"):
        good = _distinct(good, name, others)
    bound = bound_by("matchAttribute")
    if not bound:
        return list(good[:count])
    for first in good:
        wanted = [_qualified(first, name) for name, _ in bound]
        agree = all(
            value is not None and all(_qualified(one, name) == value for one in others)
            for value, (name, others) in zip(wanted, bound, strict=True)
        )
        same = [each for each in good if [_qualified(each, name) for name, _ in bound] == wanted]
        if agree and len(same) >= count:
            return same[:count]
    return []


def _distinct(good: Sequence[PublishedDevice], name: str, others: Sequence[PublishedDevice]) -> list[PublishedDevice]:
    """Return the first devices whose values of an attribute are all different, also from those of others."""
    found: dict[Any, PublishedDevice] = {}
    for device in good:
        found.setdefault(_qualified(device, name), device)
    taken = {None, *(_qualified(each, name) for each in others)}
    return [device for value, device in found.items() if value not in taken]


def _named(device: PublishedDevice, before: Sequence[RequestFit], requests: Any) -> bool:
    return any(device in fit.chosen and (not requests or fit.request.partition("/")[0] in requests) for fit in before)


def _qualified(device: PublishedDevice, name: str) -> Any:
    domain, _, short = name.rpartition("/")
    return device.value("attributes", domain or device.driver, short)


# CEL


def why_not(expression: str, device: PublishedDevice) -> str:
    """Return why a device does not meet an expression, "" if it does: the condition that fails, and its values."""
    result = evaluate(expression, device)
    if result is True:
        return ""
    for condition in conjuncts(expression):
        result = evaluate(condition, device)
        if result is not True:
            values = ", ".join(dict.fromkeys(_value_text(device, *found) for found in _ATTRIBUTE.findall(condition)))
            why = f"; {printable(result, 200)}" if isinstance(result, str) else ""
            return f"not {' '.join(condition.split())}" + (f" ({values}{why})" if values or why else "")
    return f"not {' '.join(expression.split())}"


def _value_text(device: PublishedDevice, kind: str, domain: str, name: str) -> str:
    value = device.value(kind, domain, name)
    if value is None:
        return f"{name} is not there"
    return f"{name} is {value!r}" if kind == "attributes" else f"{name} is {value}"


def conjuncts(expression: str) -> tuple[str, ...]:
    """Return the parts of an expression that && joins, outside of brackets and texts."""
    parts, depth, quote, start = [], 0, "", 0
    position = 0
    while position < len(expression):
        letter = expression[position]
        if quote:
            if letter == "\\":
                position += 1
            elif letter == quote:
                quote = ""
        elif letter in "\"'":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif depth == 0 and expression.startswith("||", position):
            return (expression.strip(),)
        elif depth == 0 and expression.startswith("&&", position):
            parts.append(expression[start:position])
            start = position + 2
            position += 1
        position += 1
    return tuple(part.strip() for part in [*parts, expression[start:]])


def evaluate(expression: str, device: PublishedDevice) -> "bool | str":
    """Return whether a device meets an expression, or the error as text: a missing attribute is one, as in Kubernetes.

    Raises HostError (OCIGPU-DRA-6) without cel-python.
    """
    _celpy()
    try:
        result = _program(expression).evaluate({"device": _as_cel(device)})
    except Exception as error:  # noqa: BLE001 - whatever a selector of somebody does to the library
        return str(error.args[0] if error.args else error).partition(" (in activation")[0]
    return bool(result)


def _celpy() -> Any:
    try:
        import celpy
    except ImportError as error:
        hint = "Install it: pip install cel-python"
        raise HostError("OCIGPU-DRA-6", "selectors need cel-python, which is not installed", hint) from error
    return celpy


class _Number(tuple[Any, ...]):
    """A quantity or version, compared as its parts."""

    __slots__ = ()


def _compare(one: Any, two: Any) -> Any:
    types = _celpy().celtypes
    return types.IntType((one > two) - (one < two))


def _quantity(text: Any) -> _Number:
    number = parse_quantity(str(text))
    if number is None:
        raise ValueError(f"{text} is no quantity")
    return _Number((number,))


def _semver(text: Any) -> _Number:
    core, _, rest = str(text).partition("-")
    numbers = [int(part) for part in core.partition("+")[0].split(".")]
    if len(numbers) != 3:
        raise ValueError(f"{text} is no semantic version")
    return _Number((*numbers, not rest, rest))


@lru_cache(maxsize=256)
def _program(expression: str) -> Any:
    celpy = _celpy()
    truth, text, number = (celpy.celtypes.BoolType, celpy.celtypes.StringType, celpy.celtypes.IntType)
    functions = {
        "quantity": _quantity,
        "semver": _semver,
        "compareTo": _compare,
        "isGreaterThan": lambda one, two: truth(one > two),
        "isLessThan": lambda one, two: truth(one < two),
        # of strings (cel-go, ext.Strings)
        "lowerAscii": lambda one: text(one.encode().lower().decode()),
        "upperAscii": lambda one: text(one.encode().upper().decode()),
        "trim": lambda one: text(one.strip()),
        "replace": lambda one, old, new: text(one.replace(old, new)),
        "indexOf": lambda one, part: number(one.find(part)),
        "substring": lambda one, begin, end=None: text(one[begin:end]),
    }
    environment = new_environment()
    return environment.program(environment.compile(expression), functions=functions)


def new_environment() -> Any:
    """Return an Environment of cel-python; the recursion limit of this process, which it raises, stays as it is."""
    limit = sys.getrecursionlimit()
    try:
        return _celpy().Environment()
    finally:
        sys.setrecursionlimit(limit)


def _as_cel(device: PublishedDevice) -> Any:
    types = _celpy().celtypes
    text = types.StringType
    return types.MapType(
        {
            text("driver"): text(device.driver),
            text("attributes"): _domains(device, "attributes", types),
            text("capacity"): _domains(device, "capacity", types),
            text("allowMultipleAllocations"): types.BoolType(bool(device.spec.get("allowMultipleAllocations"))),
        }
    )


def _domains(device: PublishedDevice, kind: str, types: Any) -> Any:
    found: dict[str, dict[Any, Any]] = {device.driver: {}}
    for key, content in (device.spec.get(kind) or {}).items():
        domain, _, name = key.rpartition("/")
        ((form, value),) = content.items()
        found.setdefault(domain or device.driver, {})[types.StringType(name)] = _cel_value(form, value, types)
    return types.MapType({types.StringType(domain): types.MapType(part) for domain, part in found.items()})


def _cel_value(form: str, value: Any, types: Any) -> Any:
    if form == "value":
        return _quantity(value)
    if form == "version":
        return _semver(value)
    kind = {"int": types.IntType, "bool": types.BoolType}.get(form, types.StringType)
    return kind(value)


def explain_fit(fits: Sequence[RequestFit], most: int = MAX_DEVICES) -> Iterator[str]:
    """Yield what there is to say of a claim, a line each."""
    for fit in fits:
        if not fit.problem:
            yield f"request {fit.request}: fits: {', '.join(each.name for each in fit.chosen)}"
            continue
        yield f"request {fit.request}: {fit.problem}"
        for refusal in fit.refusals[:most]:
            yield f"  {refusal.device}: {refusal.why}"
        if len(fit.refusals) > most:
            yield f"  and {len(fit.refusals) - most} more"
