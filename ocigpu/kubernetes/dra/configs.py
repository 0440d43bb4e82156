"""Configurations for the driver in classes and claims: read strictly, merged in their order.  Pure.

Group, version, kinds and fields are those of NVIDIA's driver (resource.nvidia.com/v1beta1): an unknown field is an
error, as there.  Configurations of the class come first, then those of the claim.  The later one counts.  One without
requests applies to all of them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ocigpu.core.errors import RequestError, quoted
from ocigpu.kubernetes.cluster.owners import DOMAIN_DRIVER
from ocigpu.kubernetes.cluster.quantity import parse_quantity

API_VERSION = "resource.nvidia.com/v1beta1"
INTERVALS = {"Default": 0, "Short": 1, "Medium": 2, "Long": 3}
"""Lengths of time slices, as ``nvidia-smi compute-policy --set-timeslice`` takes them."""
POLICIES = ("LegacyOnly", "PreferIommuFD")
CHANNELS = ("Single", "All")
"""How many channels of its ComputeDomain a claim has."""
MAX_BYTES = 10 << 10
"""Of the parameters of one configuration, the API's limit."""
MAX_MPS_DEVICES = 64


class DeviceConfig(NamedTuple):
    """How a claim wants a device to be used.

    ``kind``: of :data:`KIND_OF`.  ``strategy``: "", "TimeSlicing" or "MPS";
    ``interval``: of :data:`INTERVALS`.  ``percentage``: MPS' active threads, 0 for all; ``pinned``: memory limit in MiB
    of each device by UUID, index or "default".  ``policy``: of :data:`POLICIES`; ``api_device``: also provide
    /dev/vfio/vfio or /dev/iommu.  ``domain``: uid of the ComputeDomain of a channel or daemon; ``every``: all of its
    channels.
    """

    kind: str = ""
    strategy: str = ""
    interval: str = "Default"
    percentage: int = 0
    pinned: "dict[str, int]" = {}
    policy: str = "LegacyOnly"
    api_device: bool = False
    domain: str = ""
    every: bool = False


CHANNEL_CONFIG, DAEMON_CONFIG = "ComputeDomainChannelConfig", "ComputeDomainDaemonConfig"
KIND_OF = {
    "gpu": "GpuConfig",
    "mig": "MigDeviceConfig",
    "vfio": "VfioDeviceConfig",
    "channel": CHANNEL_CONFIG,
    "daemon": DAEMON_CONFIG,
}
"""The kind that fits a kind of device."""


def config_error(where: str, text: str) -> RequestError:
    """Return the error of a claim's configuration; ``where``: its field."""
    return RequestError("OCIGPU-DRA-2", f"{where}: {text}")


def resolve_configs(
    allocation: Mapping[str, Any], driver: str, results: Sequence[tuple[str, str]]
) -> "dict[int, DeviceConfig]":
    """Return the effective configuration of each result, (request, kind of its device), by position.

    A configuration of another device kind is ignored if it applies to all requests, and an error if it names the
    request.  Raises RequestError (OCIGPU-DRA-2) with the field.
    """
    entries = (allocation.get("devices") or {}).get("config") or []
    order = {"FromClass": 0, "FromClaim": 1}
    sources = [str(entry.get("source", "")) for entry in entries]
    ordered = sorted(range(len(entries)), key=lambda number: order.get(sources[number], 1))
    found: dict[int, DeviceConfig] = {}
    for number in ordered:
        opaque = entries[number].get("opaque") or {}
        if opaque.get("driver") != driver:
            continue
        where = f"config[{number}]"
        config = parse_config(opaque.get("parameters"), f"{where}.opaque.parameters", kinds_of(driver))
        requests = entries[number].get("requests") or []
        for position, (request, kind) in enumerate(results):
            named = any(_is_for(name, request) for name in requests)
            if KIND_OF.get(kind) == config.kind and (named or not requests):
                found[position] = config
            elif named:
                raise config_error(
                    where, f"{config.kind} is not for request {quoted(request)}, which has a {kind} device"
                )
    return found


def _is_for(name: str, request: str) -> bool:
    """Return whether a configuration applies to a result's request: "gpu" covers "gpu" and "gpu/first"."""
    return name in (request, request.partition("/")[0])


def kinds_of(driver: str) -> tuple[str, ...]:
    """Return the kinds of configuration that a driver takes."""
    domains = (CHANNEL_CONFIG, DAEMON_CONFIG)
    return domains if driver == DOMAIN_DRIVER else tuple(kind for kind in KIND_OF.values() if kind not in domains)


def parse_config(parameters: Any, where: str, kinds: Sequence[str] = kinds_of("")) -> DeviceConfig:
    """Return a configuration of these kinds, of a driver of GPUs by default.

    Raises RequestError (OCIGPU-DRA-2) that names the field.
    """
    data = _mapping(parameters, where)
    if len(json.dumps(data)) > MAX_BYTES:
        raise config_error(where, f"more than {MAX_BYTES} bytes")
    if data.get("apiVersion") != API_VERSION:
        raise config_error(f"{where}.apiVersion", f"{quoted(str(data.get('apiVersion', '')))} is not {API_VERSION}")
    kind = data.get("kind")
    if kind not in kinds:
        raise config_error(f"{where}.kind", f"{quoted(str(kind or ''))} is not one of {', '.join(kinds)}")
    if kind == "VfioDeviceConfig":
        return _vfio(data, where)
    if kind in (CHANNEL_CONFIG, DAEMON_CONFIG):
        return _domain(data, str(kind), where)
    _known(data, ("apiVersion", "kind", "sharing"), where)
    return _sharing(DeviceConfig(str(kind)), data.get("sharing"), f"{where}.sharing")


def _domain(data: Mapping[str, Any], kind: str, where: str) -> DeviceConfig:
    mode = ("allocationMode",) if kind == CHANNEL_CONFIG else ()
    _known(data, ("apiVersion", "kind", "domainID", *mode), where)
    domain = data.get("domainID")
    if not isinstance(domain, str) or not re.fullmatch(r"[0-9a-zA-Z-]{1,63}", domain):
        raise config_error(f"{where}.domainID", f"{quoted(str(domain or ''))} is not the uid of a ComputeDomain")
    every = _word(data.get("allocationMode") or CHANNELS[0], CHANNELS, f"{where}.allocationMode") == CHANNELS[1]
    return DeviceConfig(kind, domain=domain, every=every)


def _sharing(config: DeviceConfig, data: Any, where: str) -> DeviceConfig:
    if data is None:
        return config
    sharing = _mapping(data, where)
    slicing = ("timeSlicingConfig",) if config.kind == "GpuConfig" else ()
    _known(sharing, ("strategy", "mpsConfig", *slicing), where)
    strategy = _word(sharing.get("strategy"), ("TimeSlicing", "MPS"), f"{where}.strategy")
    own, other = ("timeSlicingConfig", "mpsConfig") if strategy == "TimeSlicing" else ("mpsConfig", "timeSlicingConfig")
    if sharing.get(other) is not None:
        raise config_error(f"{where}.{other}", f"it has no meaning with strategy {strategy}")
    part = _mapping(sharing.get(own) or {}, f"{where}.{own}")
    config = config._replace(strategy=strategy)
    if strategy == "TimeSlicing":
        _known(part, ("interval",), f"{where}.{own}")
        interval = _word(part.get("interval", "Default"), tuple(INTERVALS), f"{where}.{own}.interval")
        return config._replace(interval=interval)
    return _mps(config, part, f"{where}.{own}")


def _mps(config: DeviceConfig, data: Mapping[str, Any], where: str) -> DeviceConfig:
    threads, default, each = (
        "defaultActiveThreadPercentage",
        "defaultPinnedDeviceMemoryLimit",
        "defaultPerDevicePinnedMemoryLimit",
    )
    _known(data, (threads, default, each), where)
    percentage = data.get(threads, 0) or 0
    if not isinstance(percentage, int) or isinstance(percentage, bool) or not 0 <= percentage <= 100:
        raise config_error(f"{where}.{threads}", f"{quoted(str(percentage))} is not a number from 0 to 100")
    pinned = {}
    if data.get(default) is not None:
        pinned["default"] = _mebibytes(data[default], f"{where}.{default}")
    limits = _mapping(data.get(each) or {}, f"{where}.{each}")
    if len(limits) > MAX_MPS_DEVICES:
        raise config_error(f"{where}.{each}", f"{len(limits)} devices, {MAX_MPS_DEVICES} are allowed")
    for name, limit in limits.items():
        if not re.fullmatch(r"[0-9]{1,4}|(GPU|MIG)-[0-9a-fA-F-]{1,60}", name):
            raise config_error(f"{where}.{each}", f"{quoted(name)} is neither an index nor a UUID")
        pinned[name] = _mebibytes(limit, f"{where}.{each}[{quoted(name)}]")
    return config._replace(percentage=percentage, pinned=pinned)


def _mebibytes(value: Any, where: str) -> int:
    number = parse_quantity(value)
    if number is None or number < 1 << 20:
        raise config_error(where, f"{quoted(str(value))} is not an amount of memory of 1Mi or more")
    return int(number) >> 20


def _vfio(data: Mapping[str, Any], where: str) -> DeviceConfig:
    _known(data, ("apiVersion", "kind", "iommu"), where)
    iommu = _mapping(data.get("iommu") or {}, f"{where}.iommu")
    _known(iommu, ("backendPolicy", "enableAPIDevice"), f"{where}.iommu")
    policy = _word(iommu.get("backendPolicy") or POLICIES[0], POLICIES, f"{where}.iommu.backendPolicy")
    api = iommu.get("enableAPIDevice", False)
    if not isinstance(api, bool):
        raise config_error(f"{where}.iommu.enableAPIDevice", f"{quoted(str(api))} is neither true nor false")
    return DeviceConfig("VfioDeviceConfig", policy=policy, api_device=api)


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise config_error(where, "it is not an object")
    return value


def _known(data: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for name in data:
        if name not in names:
            raise config_error(f"{where}.{quoted(name)}", f"unknown field; known are: {', '.join(names)}")


def _word(value: Any, words: Sequence[str], where: str) -> str:
    if value not in words:
        raise config_error(where, f"{quoted(str(value if value is not None else ''))} is not one of {', '.join(words)}")
    return str(value)
