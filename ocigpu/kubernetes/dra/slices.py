"""ResourceSlices of a node: whole pools by generation, within the API's limits, compared by what they mean.  Pure.

Sources: k8s.io/api resource/v1 types.go (fields and limits), resource.k8s.io/v1 as the scheduler reads it: only slices
of a pool's highest generation count, and only all ``resourceSliceCount`` of them together.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ocigpu.core.errors import quoted
from ocigpu.kubernetes.cluster.quantity import parse_quantity
from ocigpu.kubernetes.dra.devices import DraDevice, Taint

GROUP = "resource.k8s.io"
MAX_DEVICES, MAX_COUNTED_DEVICES = 128, 64
"""Devices of a slice; of one in which any has a taint or consumes counters."""
MAX_COUNTER_SETS = 8
MAX_ATTRIBUTES = 32
"""Attributes and capacities of a device together."""
MAX_TEXT = 64
POLICY = ("default", "min", "max", "step")
"""Quantities of a CapacityRequestPolicy."""
MAX_NAME = 32
MAX_DOMAIN = 63
MAX_PREFIX, MAX_WORD = 253, 63
EFFECTS = ("None", "NoSchedule", "NoExecute")
_WORD = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
"""The name of a label, and its value."""
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SEMVER = re.compile(r"(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)([-+][0-9A-Za-z.+-]+)?")


class ApiFeatures(NamedTuple):
    """What the API server keeps: taints and counters of devices, and their sharing by several claims.

    ``notes``: taints with the effect None, which withhold nothing.
    """

    taints: bool = True
    counters: bool = True
    sharing: bool = True
    notes: bool = True

    @property
    def missing(self) -> tuple[str, ...]:
        """What it leaves out, by name; notes are not missed."""
        return tuple(name for name, kept in self._asdict().items() if not kept and name != "notes")


class Pool(NamedTuple):
    """The devices of a node under one driver's name; ``owner``: reference to the Node, {} for none."""

    driver: str
    node: str
    owner: "dict[str, str]" = {}


Slice = dict[str, Any]
"""The ``spec`` of a ResourceSlice."""


def make_slices(
    devices: Sequence[DraDevice],
    pool: Pool,
    features: ApiFeatures = ApiFeatures(),  # noqa: B008 - it cannot be changed
) -> tuple[Slice, ...]:
    """Return the specs of a pool's slices, of generation 1, those with counters first; a pool without devices has one.

    Without counters, devices that need them are left out; without taints, tainted devices are left out.
    """
    if not (features.taints and features.notes):
        devices = [
            device._replace(taints=tuple(taint for taint in device.taints if taint.effect != "None"))
            for device in devices
        ]
    offered = [device for device in devices if features.taints or not device.taints]
    if not features.counters:
        offered = [device for device in offered if device.profile is None and not _has_sibling(device, offered)]
    counted = sorted({each.board for each in offered if each.profile is not None or _has_sibling(each, offered)})
    sets = {board: _counter_set(board, offered) for board in counted}
    every = list(sets.values())
    parts: list[dict[str, Any]] = [
        {"sharedCounters": every[first : first + MAX_COUNTER_SETS]} for first in range(0, len(every), MAX_COUNTER_SETS)
    ]
    entries = [_device(device, sets.get(device.board), features) for device in offered]
    narrow = any("taints" in entry or "consumesCounters" in entry for entry in entries)
    most = MAX_COUNTED_DEVICES if narrow else MAX_DEVICES
    parts += [{"devices": entries[first : first + most]} for first in range(0, len(entries), most)]
    return _as_pool(parts or [{"devices": []}], pool)


def _has_sibling(device: DraDevice, devices: Sequence[DraDevice]) -> bool:
    """Return whether a GPU for virtual machines is offered by its own driver, too."""
    return device.kind == "vfio" and any(each.board == device.board and each.kind != "vfio" for each in devices)


def _as_pool(parts: Sequence[dict[str, Any]], pool: Pool, generation: int = 1) -> tuple[Slice, ...]:
    head = {"name": pool.node, "generation": generation, "resourceSliceCount": len(parts)}
    return tuple({"driver": pool.driver, "nodeName": pool.node, "pool": dict(head), **part} for part in parts)


def as_generation(slices: Sequence[Slice], generation: int) -> tuple[Slice, ...]:
    """Return the slices with another generation."""
    return tuple({**each, "pool": {**each["pool"], "generation": generation}} for each in slices)


def as_objects(slices: Sequence[Slice], pool: Pool, version: str = "v1") -> tuple[dict[str, Any], ...]:
    """Return ResourceSlices to be made; their names begin with their number, by which the scheduler takes them."""
    owner = {"ownerReferences": [pool.owner]} if pool.owner else {}
    return tuple(
        {
            "apiVersion": f"{GROUP}/{version}",
            "kind": "ResourceSlice",
            "metadata": {"generateName": f"{number:05x}-{pool.driver}-{pool.node}-"[:246], **owner},
            "spec": to_version(each, version),
        }
        for number, each in enumerate(slices)
    )


def counter_set_name(board: str) -> str:
    """Return the name of the counters of a board: a DNS label."""
    return f"gpu-{re.sub('[^a-z0-9]+', '-', board)}-counter-set"


def _counter_set(board: str, devices: Sequence[DraDevice]) -> dict[str, Any]:
    """Return the counters that the devices of a board share; a GPU with several drivers counts once."""
    names = {name for device in devices if device.board == board for name in device.counters}
    return {"name": counter_set_name(board), "counters": _ones(sorted(names) or ["gpu"])}


def _ones(names: Iterable[str]) -> dict[str, dict[str, str]]:
    return {name: {"value": "1"} for name in names}


def _device(device: DraDevice, whole: Mapping[str, Any] | None, features: ApiFeatures) -> dict[str, Any]:
    """Return the entry of a device; ``whole``: the counters of its board, None if nothing is shared."""
    entry: dict[str, Any] = {"name": device.name, "attributes": device.attributes}
    if device.capacity:
        entry["capacity"] = {name: {"value": value} for name, value in device.capacity.items()}
        for name, policy in device.policies.items() if features.sharing else ():
            entry["capacity"][name]["requestPolicy"] = policy
    if whole is not None:
        counters = _ones(device.counters) if device.kind == "mig" else whole["counters"]
        entry["consumesCounters"] = [{"counterSet": whole["name"], "counters": counters}]
    if device.shared and features.sharing:
        entry["allowMultipleAllocations"] = True
    if device.taints:
        entry["taints"] = [
            {"key": key, **({"value": value} if value else {}), "effect": effect}
            for key, value, effect in device.taints
        ]
    return entry


def to_version(spec: Slice, version: str) -> Slice:
    """Return a spec as an older version of the API writes it: v1beta1 has a device's content in ``basic``."""
    if version != "v1beta1" or "devices" not in spec:
        return spec
    devices = [{"name": each["name"], "basic": _without(each, "name")} for each in spec["devices"]]
    return {**spec, "devices": devices}


def from_version(spec: Slice, version: str) -> Slice:
    """Return a spec of an older version as v1 writes it."""
    if version != "v1beta1":
        return spec
    devices = [{"name": each.get("name"), **each.get("basic", {})} for each in spec.get("devices") or []]
    return {**spec, **({"devices": devices} if "devices" in spec else {})}


def _without(entry: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != name}


# limits


def check_device(device: DraDevice) -> tuple[str, ...]:
    """Return what the API server would refuse in a device, each with the field."""
    where = f"device {device.name}"
    problems = [] if _LABEL.fullmatch(device.name) else [f"{where}: name is not a DNS label"]
    if len(device.attributes) + len(device.capacity) > MAX_ATTRIBUTES:
        count = len(device.attributes) + len(device.capacity)
        problems.append(f"{where}: {count} attributes and capacities, {MAX_ATTRIBUTES} are allowed")
    for name, value in device.attributes.items():
        problems += [
            f"{where}: attribute {quoted(name)}: {text}" for text in (*_name_problems(name), *_problems(value))
        ]
    for name, text in device.capacity.items():
        wrong = [] if parse_quantity(text) is not None else [f"{quoted(text)} is not a quantity"]
        problems += [f"{where}: capacity {quoted(name)}: {each}" for each in (*_name_problems(name), *wrong)]
    return (
        *problems,
        *(f"{where}: taint {quoted(each.key)}: {text}" for each in device.taints for text in _taint(each)),
    )


def _taint(taint: Taint) -> list[str]:
    prefix, slash, name = taint.key.rpartition("/")
    found = []
    if not _WORD.fullmatch(name) or (slash and (len(prefix) > MAX_PREFIX or not _DOMAIN.fullmatch(prefix))):
        found.append(f"it is not a name of at most {MAX_WORD} characters after a DNS name")
    if taint.value and not _WORD.fullmatch(taint.value):
        found.append(f"value {quoted(taint.value)} is not the value of a label")
    if taint.effect not in EFFECTS:
        found.append(f"effect {quoted(taint.effect)} is not one of {', '.join(EFFECTS)}")
    return found


def _name_problems(name: str) -> list[str]:
    domain, slash, identifier = name.rpartition("/")
    found = []
    if slash and (len(domain) > MAX_DOMAIN or not _DOMAIN.fullmatch(domain)):
        found.append(f"its domain is not a DNS name of at most {MAX_DOMAIN} characters")
    if len(identifier) > MAX_NAME:
        found.append(f"its name has {len(identifier)} characters, {MAX_NAME} are allowed")
    elif not _IDENTIFIER.fullmatch(identifier):
        found.append("its name is not a C identifier")
    return found


def _problems(value: Mapping[str, Any]) -> list[str]:
    if len(value) != 1:
        return ["it does not have exactly one value"]
    ((kind, content),) = value.items()
    if kind in ("string", "version") and len(str(content)) > MAX_TEXT:
        return [f"{kind} of {len(str(content))} characters, {MAX_TEXT} are allowed"]
    if kind == "version" and not _SEMVER.fullmatch(str(content)):
        return [f"{quoted(str(content))} is not a semantic version"]
    return []


# comparison


def normal_slice(spec: Slice) -> Any:
    """Return what a slice means whatever its generation: without defaults, empty fields and spellings of numbers."""
    return _normal({**spec, "pool": _without(spec.get("pool", {}), "generation")}, "")


def _normal(value: Any, field: str) -> Any:
    if isinstance(value, Mapping):
        found = {key: _normal(item, key) for key, item in value.items() if key != "timeAdded"}
        return {key: item for key, item in sorted(found.items()) if not _is_default(key, item)}
    if isinstance(value, (list, tuple)):
        return [_normal(item, field) for item in value]
    if field in ("value", *POLICY) and (number := parse_quantity(value)) is not None:
        return f"{number.normalize():f}"
    return value


def _is_default(field: str, value: Any) -> bool:
    return value is None or value in ([], {}) or (value is False and field != "bool")


def same_slices(wanted: Sequence[Slice], found: Sequence[Slice]) -> bool:
    """Return whether slices mean the same, whatever their names, generation and order."""
    left, right = ([repr(normal_slice(each)) for each in part] for part in (wanted, found))
    return sorted(left) == sorted(right)


def dropped_fields(wanted: Any, found: Any, where: str = "") -> tuple[str, ...]:
    """Return the fields that an API server has left out of what it was given, by path ("devices[3].taints").

    It leaves out without a word what belongs to a feature that is switched off.
    """
    if isinstance(wanted, Mapping):
        missing: list[str] = []
        for name, value in wanted.items():
            path = f"{where}.{name}" if where else name
            if _is_default(name, value):
                continue
            if not isinstance(found, Mapping) or name not in found:
                missing.append(path)
            else:
                missing += dropped_fields(value, found[name], path)
        return tuple(missing)
    if isinstance(wanted, (list, tuple)):
        given = found if isinstance(found, (list, tuple)) else ()
        return tuple(
            path
            for position, value in enumerate(wanted)
            for path in dropped_fields(
                value, given[position] if position < len(given) else None, f"{where}[{position}]"
            )
        )
    return ()


def features_without(features: ApiFeatures, dropped: Sequence[str]) -> ApiFeatures:
    """Return the features that an API server that dropped these fields has."""
    text = " ".join(dropped)
    return ApiFeatures(
        features.taints and "taints" not in text,
        features.counters and "Counters" not in text,
        features.sharing and "allowMultipleAllocations" not in text and "requestPolicy" not in text,
        features.notes,
    )


class Present(NamedTuple):
    """A ResourceSlice of a pool that the API server has; ``spec`` as of v1."""

    name: str
    spec: Slice

    @property
    def generation(self) -> int:
        return int(self.spec.get("pool", {}).get("generation", 0))


class SliceChange(NamedTuple):
    """``create``: slices of a new generation, all of them, before ``delete``, names of those that it replaces."""

    create: tuple[Slice, ...] = ()
    delete: tuple[str, ...] = ()


def plan_slices(wanted: Sequence[Slice], present: Sequence[Present]) -> SliceChange:
    """Return the writes that bring a pool to the desired state; none if it is already in that state.

    Slices of older generations, left by an interrupted change, are removed.
    """
    newest = max((each.generation for each in present), default=0)
    current = [each for each in present if each.generation == newest]
    if present and same_slices(wanted, [each.spec for each in current]):
        return SliceChange((), tuple(each.name for each in present if each.generation != newest))
    return SliceChange(as_generation(wanted, newest + 1), tuple(each.name for each in present))
