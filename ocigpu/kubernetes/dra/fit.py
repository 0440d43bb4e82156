"""Why a claim does not fit: its requests against the published devices, one condition after the other.  Pure.

Selectors are CEL (:mod:`~ocigpu.kubernetes.dra.cel`); :mod:`~ocigpu.kubernetes.dra.ledger` counts allocations.  The
search takes the first devices that fit together, as the scheduler does, but the scheduler's choice may differ.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ocigpu.core.errors import printable
from ocigpu.kubernetes.dra.cel import Unjudged, celpy, quantity, run, semver
from ocigpu.kubernetes.dra.claims import allocated_devices
from ocigpu.kubernetes.dra.ledger import CounterSets, Key, Ledger, Use, Uses, amount, counter_sets
from ocigpu.kubernetes.dra.slices import Slice

MAX_DEVICES = 32
"""Of one claim."""
MAX_TRIES = 20_000
"""Devices that a search takes: a claim may ask for 32 of several hundred."""
NAMED = 3
"""Devices that a line names."""
JUDGED_ELSEWHERE = "cannot be evaluated here"
_ATTRIBUTE = re.compile(r"""device\.(attributes|capacity)\[["']([^"']+)["']\]\.([A-Za-z_][A-Za-z0-9_]*)""")


class PublishedDevice(NamedTuple):
    """A device of a whole pool; ``spec``: its entry in the slice; ``counters``: what its pool's devices share."""

    driver: str
    pool: str
    node: str
    name: str
    spec: "dict[str, Any]"
    counters: CounterSets = {}

    @property
    def key(self) -> Key:
        return self.driver, self.pool, self.name

    def value(self, kind: str, domain: str, name: str) -> Any:
        """Return the value of an attribute or capacity, None for none; names without a domain are the driver's."""
        for key, content in (self.spec.get(kind) or {}).items():
            own, slash, short = key.rpartition("/")
            if short == name and (own if slash else self.driver) == domain:
                return content.get("value") if kind == "capacity" else next(iter(content.values()), None)
        return None


class DeviceRefusal(NamedTuple):
    """Why a device is not for a request: the condition, and what the device has of what it names."""

    device: str
    why: str
    driver: str = ""
    pool: str = ""


class RequestFit(NamedTuple):
    """How a request fits on a node.

    ``chosen``: devices that would do; ``refusals``: why others would not; ``problem``: "" if it fits; ``free``: devices
    that fit, each by itself, if not enough do.
    """

    request: str
    wanted: str
    chosen: tuple[PublishedDevice, ...]
    refusals: tuple[DeviceRefusal, ...]
    problem: str = ""
    free: tuple[PublishedDevice, ...] = ()


class NodeFit(NamedTuple):
    """How a claim's requests fit on a node, in their order."""

    node: str
    fits: tuple[RequestFit, ...]

    @property
    def problems(self) -> int:
        return sum(bool(fit.problem) for fit in self.fits)


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
            notes.append(f"pool {pool} of {driver} is incomplete: {len(current)} of {wanted} slices")
            continue
        counters = counter_sets(current)
        for each in current:
            node, devices = each.get("nodeName", ""), each.get("devices") or []
            found += [PublishedDevice(driver, pool, node, one["name"], one, counters) for one in devices]
    return tuple(found), tuple(notes)


def held_devices(claims: Iterable[Mapping[str, Any]]) -> Uses:
    """Return which claims have which device, by (driver, pool, device); administrators have none."""
    held: dict[Key, tuple[Use, ...]] = {}
    for claim in claims:
        meta = claim["metadata"]
        owner = f"claim {meta.get('namespace')}/{meta['name']}"
        for each in allocated_devices(claim):
            if each.get("adminAccess"):
                continue
            key = (each["driver"], each["pool"], each["device"])
            taken = {
                name if "/" in name else f"{key[0]}/{name}": amount(value)
                for name, value in (each.get("consumedCapacity") or {}).items()
            }
            held[key] = (*held.get(key, ()), Use(owner, taken if each.get("shareID") else None))
    return held


def fit_nodes(
    spec: Mapping[str, Any],
    classes: Mapping[str, Mapping[str, Any]],
    devices: Sequence[PublishedDevice],
    held: Uses,
) -> tuple[NodeFit, ...]:
    """Return how a claim fits on each node that has devices, but only the first node on which it fits, if one does.

    All devices of a claim are of one node.  ``spec``: of a ResourceClaim.  Raises HostError (OCIGPU-DRA-6) without
    cel-python.
    """
    by_node: dict[str, list[PublishedDevice]] = {}
    for device in devices:
        by_node.setdefault(device.node, []).append(device)
    found: list[NodeFit] = []
    for node, each in (by_node or {"": []}).items():
        found.append(NodeFit(node, _fit_on(each, spec, classes, held)))
        if not found[-1].problems:
            return (found[-1],)
    return tuple(found)


def fit_claim(
    spec: Mapping[str, Any],
    classes: Mapping[str, Mapping[str, Any]],
    devices: Sequence[PublishedDevice],
    held: Uses,
) -> tuple[RequestFit, ...]:
    """Return how a claim's requests fit on the one node where most of them do; see :func:`fit_nodes`."""
    return best_node(fit_nodes(spec, classes, devices, held)).fits


def best_node(nodes: Sequence[NodeFit]) -> NodeFit:
    return min(nodes, key=lambda each: each.problems)


class _Option(NamedTuple):
    """A way to meet a request.  ``good``: devices that would do, as far as their own properties go."""

    name: str
    request: "Mapping[str, Any]"
    wanted: int
    every: bool
    good: "tuple[PublishedDevice, ...]"
    refusals: "tuple[DeviceRefusal, ...]"
    problem: str = ""

    @property
    def admin(self) -> bool:
        return bool(self.request.get("adminAccess"))

    @property
    def asked(self) -> str:
        return "all" if self.every else str(self.wanted)


def _fit_on(
    devices: Sequence[PublishedDevice],
    spec: Mapping[str, Any],
    classes: Mapping[str, Mapping[str, Any]],
    held: Uses,
) -> tuple[RequestFit, ...]:
    constraints = (spec.get("devices") or {}).get("constraints") or []
    requests = []
    for request in (spec.get("devices") or {}).get("requests") or []:
        options = request.get("firstAvailable") or [{**(request.get("exactly") or {}), "name": ""}]
        names = ["/".join(filter(None, (request["name"], option["name"]))) for option in options]
        pairs = zip(names, options, strict=True)
        requests.append([_option(name, option, classes, devices) for name, option in pairs])
    entries = [(each.key, each.spec, each.counters) for each in devices]
    search = _Search(requests, constraints, Ledger(entries, held))
    return tuple(search.all_together() or search.one_by_one())


def _option(
    name: str,
    request: Mapping[str, Any],
    classes: Mapping[str, Mapping[str, Any]],
    devices: Sequence[PublishedDevice],
) -> _Option:
    every, count = request.get("allocationMode") == "All", int(request.get("count") or 1)
    device_class = classes.get(str(request.get("deviceClassName", "")))
    if device_class is None:
        problem = f"there is no DeviceClass {request.get('deviceClassName')}"
        return _Option(name, request, count, every, (), (), problem)
    parts = [*((device_class.get("spec") or {}).get("selectors") or []), *(request.get("selectors") or [])]
    expressions = [str(part["cel"]["expression"]) for part in parts if "cel" in part]
    refusals: list[DeviceRefusal] = []
    good: list[PublishedDevice] = []
    for device in devices:
        reasons = [why for why in (why_not(text, device) for text in expressions) if why]
        why = next((each for each in reasons if not each.startswith(JUDGED_ELSEWHERE)), "".join(reasons[:1]))
        if not why and not request.get("adminAccess"):
            why = _taint(device, request)
        if why:
            refusals.append(_refusal(device, why))
        else:
            good.append(device)
    return _Option(name, request, count, every, tuple(good), tuple(refusals))


def _refusal(device: PublishedDevice, why: str) -> DeviceRefusal:
    return DeviceRefusal(device.name, why, device.driver, device.pool)


class _Search:
    """Looks for devices for all requests together; ``requests``: the options of each."""

    def __init__(
        self, requests: Sequence[Sequence[_Option]], constraints: Sequence[Mapping[str, Any]], ledger: Ledger
    ) -> None:
        self._requests, self._constraints, self._ledger = requests, constraints, ledger
        self._left = MAX_TRIES
        self._chosen: list[tuple[_Option, list[PublishedDevice]]] = []

    def all_together(self) -> list[RequestFit]:
        """Return the devices of each request, [] if no choice fits."""
        refusals = {option.name: self._free(option)[1] for options in self._requests for option in options}
        if not self._from(0):
            return []
        found = ((option, tuple(picked)) for option, picked in self._chosen)
        return [RequestFit(option.name, option.asked, picked, refusals[option.name]) for option, picked in found]

    def one_by_one(self) -> Iterator[RequestFit]:
        """Yield what each request gets when those before it have what they got, and why not."""
        for options in self._requests:
            for option in options:
                self._left = MAX_TRIES
                free, refusals = self._free(option)
                fits = self._may_try(option) and self._take(option, lambda: True)
                if fits:
                    break
            picked = tuple(self._chosen[-1][1]) if fits else ()
            problem = "" if fits else option.problem or self._why(option, free, refusals)
            yield RequestFit(option.name, option.asked, picked, refusals, problem, () if fits else tuple(free))

    def _may_try(self, option: _Option) -> bool:
        """Return whether a search is possible: a request for all devices needs a verdict on each of them."""
        return not option.problem and not (option.every and _unjudged(option.refusals))

    def _from(self, number: int) -> bool:
        if number == len(self._requests):
            return True
        return any(
            self._may_try(option) and self._take(option, lambda: self._from(number + 1))
            for option in self._requests[number]
        )

    def _take(self, option: _Option, rest: "Callable[[], bool]") -> bool:
        """Choose devices of an option with which the rest succeeds; a failure leaves nothing chosen."""
        picked: list[PublishedDevice] = []
        self._chosen.append((option, picked))
        if self._more(option, max(1, len(option.good)) if option.every else option.wanted, 0, picked, rest):
            return True
        self._chosen.pop()
        return False

    def _more(
        self, option: _Option, count: int, begin: int, picked: list[PublishedDevice], rest: "Callable[[], bool]"
    ) -> bool:
        if len(picked) == count:
            return rest()
        for position in range(begin, len(option.good)):
            device = option.good[position]
            if self._left <= 0:
                return False
            if (not option.admin and self._ledger.why_not(device.key, option.request)) or not self._agrees(
                option, device
            ):
                continue
            self._left -= 1
            picked.append(device)
            if not option.admin:
                self._ledger.take_for(device.key, option.request, "this claim")
            again = position if device.spec.get("allowMultipleAllocations") and not option.every else position + 1
            if self._more(option, count, again, picked, rest):
                return True
            picked.pop()
            if not option.admin:
                self._ledger.give_back(device.key)
        return False

    def _agrees(self, option: _Option, device: PublishedDevice) -> bool:
        """Return whether a device meets the constraints: it shares, or differs in, attributes of those chosen."""
        for rule in self._constraints:
            name = rule.get("matchAttribute") or rule.get("distinctAttribute")
            if not name or not _is_named(option, rule):
                continue
            value = _qualified(device, name)
            others = [_qualified(one, name) for other, each in self._chosen if _is_named(other, rule) for one in each]
            if value is None or any((one == value) != bool(rule.get("matchAttribute")) for one in others):
                return False
        return True

    def _free(self, option: _Option) -> "tuple[list[PublishedDevice], tuple[DeviceRefusal, ...]]":
        """Return the devices of an option that can be taken now, and why the others cannot: first those in use."""
        free, refusals = [], list[DeviceRefusal]()
        for device in option.good:
            why = "" if option.admin else self._ledger.why_not(device.key, option.request)
            if why:
                refusals.append(_refusal(device, why))
            else:
                free.append(device)
        return free, (*refusals, *option.refusals)

    def _why(self, option: _Option, free: Sequence[PublishedDevice], refusals: Sequence[DeviceRefusal]) -> str:
        unjudged = _unjudged(refusals)
        if self._left <= 0:
            return f"{len(free)} devices fit; so many choices {JUDGED_ELSEWHERE}"
        if len(free) >= (len(option.good) or 1 if option.every else option.wanted):
            names = [str(each.get("matchAttribute") or each.get("distinctAttribute")) for each in self._constraints]
            by = f"by {', '.join(names)}" if names else "together"
            return f"{len(free)} devices fit, but no {option.wanted} of them {by}"
        more = f"; {unjudged} {JUDGED_ELSEWHERE}" if unjudged else ""
        return f"{len(free)} devices fit, {option.asked} requested{more}"


def _unjudged(refusals: Sequence[DeviceRefusal]) -> int:
    return sum(each.why.startswith(JUDGED_ELSEWHERE) for each in refusals)


def _is_named(option: _Option, rule: Mapping[str, Any]) -> bool:
    names = rule.get("requests")
    return not names or option.name in names or option.name.partition("/")[0] in names


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


def _qualified(device: PublishedDevice, name: str) -> Any:
    domain, _, short = name.rpartition("/")
    return device.value("attributes", domain or device.driver, short)


# CEL


def why_not(expression: str, device: PublishedDevice) -> str:
    """Return why a device fails an expression (the condition and its values), "" if it meets it.

    It begins with JUDGED_ELSEWHERE if the verdict needs a feature that cel-python lacks.
    """
    result = evaluate(expression, device)
    if result is True:
        return ""
    found = [(condition, evaluate(condition, device)) for condition in conjuncts(expression)]
    wrong = [(condition, each) for condition, each in found if each is not True]
    condition, each = next(
        (one for one in wrong if not isinstance(one[1], Unjudged)), (wrong or [(expression, result)])[0]
    )
    text = " ".join(condition.split())
    if isinstance(each, Unjudged):
        return f"{JUDGED_ELSEWHERE}: {text} ({printable(each, 200)})"
    values = ", ".join(dict.fromkeys(_value_text(device, *one) for one in _ATTRIBUTE.findall(condition)))
    why = f"; {printable(each, 200)}" if isinstance(each, str) else ""
    return f"not {text}" + (f" ({values}{why})" if values or why else "")


def _value_text(device: PublishedDevice, kind: str, domain: str, name: str) -> str:
    value = device.value(kind, domain, name)
    if value is None:
        return f"{name} is missing"
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
    """Return whether a device meets an expression; see :func:`ocigpu.kubernetes.dra.cel.run`."""
    return run(expression, {"device": _as_cel(device)})


def _as_cel(device: PublishedDevice) -> Any:
    types = celpy().celtypes
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
        form, value = next(iter(content.items())) if kind == "attributes" else ("value", content.get("value"))
        found.setdefault(domain or device.driver, {})[types.StringType(name)] = _cel_value(form, value, types)
    return types.MapType({types.StringType(domain): types.MapType(part) for domain, part in found.items()})


def _cel_value(form: str, value: Any, types: Any) -> Any:
    if form == "value":
        return quantity(value)
    if form == "version":
        return semver(value)
    kind = {"int": types.IntType, "bool": types.BoolType}.get(form, types.StringType)
    return kind(value)


def explain_fit(nodes: Sequence[NodeFit], most: int = MAX_DEVICES) -> Iterator[str]:
    """Yield what there is to say of a claim, a line each: of every node, if it fits on none.

    Nodes with the same devices and reasons are named together, and so are a node's devices with the same reason.
    """
    if sum(each.problems for each in nodes) == 0:
        for node in nodes:
            for fit in node.fits:
                yield f"request {fit.request}: fits on {_title(node)}: {_devices(node, fit.chosen)}"
        return
    wanted = ", ".join(dict.fromkeys(f"{fit.request} requests {fit.wanted}" for node in nodes for fit in node.fits))
    yield f"no node has all devices of this claim, which must be of one node: {wanted}"
    alike: dict[tuple[str, ...], list[NodeFit]] = {}
    for node in nodes:
        alike.setdefault(tuple(line for fit in node.fits for line in _explain_request(node, fit, most)), []).append(
            node
        )
    for lines, same in list(alike.items())[:most]:
        others = f"; the same: {_listed([each.node for each in same[1:]], NAMED - 1)}" if same[1:] else ""
        yield f"{_title(same[0])}{others}"
        yield from lines
    if len(alike) > most:
        yield f"and {sum(map(len, list(alike.values())[most:]))} more nodes"


def _title(node: NodeFit) -> str:
    return f"node {node.node}" if node.node else "devices that are of no single node"


def _listed(names: Sequence[str], most: int = MAX_DEVICES) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def _devices(node: NodeFit, devices: Iterable[PublishedDevice]) -> str:
    return _listed([_name(node, each.pool, each.name) for each in devices])


def _name(node: NodeFit, pool: str, device: str) -> str:
    """Return the name of a device, with its pool unless that is named after the node."""
    return device if pool == node.node else f"{pool}/{device}"


def _explain_request(node: NodeFit, fit: RequestFit, most: int) -> Iterator[str]:
    """Yield how a request fits on a node, which devices fit, and why others do not."""
    if not fit.problem:
        yield f"  request {fit.request}: fits: {_devices(node, fit.chosen)}"
        return
    yield f"  request {fit.request}: {fit.problem}"
    if fit.free:
        yield f"    fits: {_devices(node, fit.free)}"
    reasons: dict[str, list[str]] = {}
    for each in fit.refusals:
        reasons.setdefault(each.why, []).append(_name(node, each.pool, each.device))
    for why, same in list(reasons.items())[:most]:
        yield f"    {same[0]}: {why}" + (f"; the same: {_listed(same[1:], NAMED - 1)}" if same[1:] else "")
    if len(reasons) > most:
        yield f"    and {len(reasons) - most} more reasons"
