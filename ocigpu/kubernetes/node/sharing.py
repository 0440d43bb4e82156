"""``sharing`` of the device plugin's configuration: which devices are offered several times, and under which name."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ocigpu.core.errors import quoted
from ocigpu.core.vendors import VENDORS
from ocigpu.system.options import option_error, shown

DOMAIN = "nvidia.com/"
DOMAINS = tuple(f"{domain}/" for _, variable, domain in VENDORS.values() if variable)
"""Of the vendors whose GPUs may be shared."""
MAX_NAME = 63
MAX_DEVICES = 49_000
"""Of a resource, each replica is one: a list of so many with the longest names is within what the kubelet receives."""

_HEX = "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
_OF_OTHERS = "0x[0-9a-f]{1,16}(:[0-9]{1,4})?|[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}[.][0-7](:[0-9]{1,4})?"
"""Unique ids and PCI addresses of other vendors' GPUs, perhaps with the number of a partition."""
_REFERENCE = re.compile(rf"{_OF_OTHERS}|[0-9]+(:[0-9]+)?|GPU-{_HEX}|MIG-{_HEX}|MIG-GPU-{_HEX}/[0-9]+/[0-9]+")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")  # RFC 1123


class Shared(NamedTuple):
    """Devices of the resource ``name`` are offered ``replicas`` times as ``offered_as``.

    ``devices``: "all", a count (the first ones by index), or indices ("0", "0:1") and UUIDs; the others stay as they
    are.
    """

    name: str
    offered_as: str
    replicas: int
    devices: "str | int | tuple[str, ...]" = "all"


class Sharing(NamedTuple):
    """``strategy``: "none", "time-slicing" or "mps".

    ``one_each``: a container may request one replica at most (failRequestsGreaterThanOne).
    """

    strategy: str = "none"
    resources: tuple[Shared, ...] = ()
    one_each: bool = False


def parse_sharing(part: Mapping[str, Any], where: str) -> tuple[Sharing, list[str]]:
    """Return how devices are shared, and warnings; MPS takes precedence over time-slicing, as in NVIDIA's plugin.

    A name under ``rename`` is used; renameByDefault only applies without one.  ``part``: of the shape that
    :mod:`~ocigpu.kubernetes.node.config` has checked.  Raises SettingsError.
    """
    found: dict[str, Sharing] = {}
    for strategy, key, one_each in (("mps", "mps", True), ("time-slicing", "timeSlicing", False)):
        block = part.get(key)
        if block is not None:
            asked = block.get("failRequestsGreaterThanOne")
            resources = _parse_block(block, f"{where}: sharing.{key}")
            foreign = [entry.name for entry in resources if not entry.name.startswith(DOMAIN)]
            if foreign and strategy == "mps":
                raise option_error(f"{where}: sharing.mps", f"{foreign[0]}: MPS is for NVIDIA's GPUs")
            found[key] = Sharing(strategy, resources, one_each if asked is None else asked)
    warnings = ["sharing.timeSlicing has no effect beside sharing.mps"] if len(found) > 1 else []
    return next(iter(found.values()), Sharing()), warnings


def _parse_block(block: Mapping[str, Any], where: str) -> tuple[Shared, ...]:
    if not block.get("resources"):
        raise option_error(where, "no resources specified")
    entries = tuple(
        _parse_entry(entry, bool(block.get("renameByDefault")), f"{where}.resources[{position}]")
        for position, entry in enumerate(block["resources"])
    )
    whole = [entry.name for entry in entries if not isinstance(entry.devices, tuple)]
    for name in whole:
        if sum(entry.name == name for entry in entries) > 1:
            raise option_error(where, f"several entries for {name}: each of them needs a list of devices")
    return entries


def _parse_entry(entry: Mapping[str, Any], rename_by_default: bool, where: str) -> Shared:
    if not entry.get("name"):
        raise option_error(where, "no resource name specified")
    name = resource_name(entry["name"], f"{where}.name")
    replicas = entry.get("replicas")
    if replicas is None:
        raise option_error(where, "no replicas specified")
    if not 2 <= replicas <= MAX_DEVICES:
        raise option_error(f"{where}.replicas", f"{replicas}: number of replicas must be >= 2, <= {MAX_DEVICES}")
    offered_as = f"{name}.shared" if rename_by_default else name
    domain = f"{name.partition('/')[0]}/"
    offered_as = resource_name(entry.get("rename") or offered_as, f"{where}.rename", domain)
    if not offered_as.startswith(domain):
        raise option_error(f"{where}.rename", f"{quoted(offered_as)} is another vendor's name")
    return Shared(name, offered_as, replicas, _parse_devices(entry.get("devices"), f"{where}.devices"))


def _parse_devices(raw: Any, where: str) -> "str | int | tuple[str, ...]":
    if raw is None or raw == "all":
        return "all"
    if isinstance(raw, int) and not isinstance(raw, bool) and raw > 0:
        return raw
    if isinstance(raw, list) and raw:
        references = [str(item) for item in raw if isinstance(item, (str, int)) and not isinstance(item, bool)]
        wrong = [item for item in references if not _REFERENCE.fullmatch(item)]
        if not wrong and len(references) == len(raw):
            return tuple(dict.fromkeys(references))
        raise option_error(where, f"{shown(wrong[0] if wrong else raw)} is not an index or UUID of a GPU or MIG device")
    raise option_error(where, f"{shown(raw)} is not all, a count above 0, or a list of devices")


def resource_name(text: str, where: str, default: str = DOMAIN) -> str:
    """Return a resource's name with its domain: "gpu" is nvidia.com/gpu; raises SettingsError for an invalid one.

    ``default``: the domain of a name without one.
    """
    own = next((domain for domain in DOMAINS if text.startswith(domain)), default)
    name = own + text.removeprefix(own)
    if len(name) > MAX_NAME:
        raise option_error(where, f"{quoted(name)} is longer than {MAX_NAME} characters")
    # resources that are named after partitions have an underscore (cpx_nps4), as Kubernetes allows
    rest = name.removeprefix(own)
    if not SUBDOMAIN.fullmatch(rest if own == DOMAIN else rest.replace("_", "-")):
        raise option_error(
            where,
            f"{quoted(text)} is not a resource name of {own.rstrip('/')}: letters a-z, digits, - and .",
        )
    return name
