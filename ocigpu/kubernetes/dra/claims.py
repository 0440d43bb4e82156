"""What a claim was allocated of this node, and whether it may have it.  Pure."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ocigpu.core.errors import HostError, RequestError, printable, quoted
from ocigpu.gpus.vendors import load_vendor
from ocigpu.kubernetes.dra.configs import DeviceConfig, resolve_configs
from ocigpu.kubernetes.dra.devices import DraDevice, find_device

MAX_RESULTS = 32


class ClaimRef(NamedTuple):
    """A claim as the kubelet names it."""

    namespace: str
    uid: str
    name: str

    def __str__(self) -> str:
        return f"{printable(self.namespace, 253)}/{printable(self.name, 253)}"


class Allotted(NamedTuple):
    """One device of a claim: for which request, with which configuration; ``share``: id of a part of a device."""

    request: str
    device: DraDevice
    config: DeviceConfig = DeviceConfig()
    admin: bool = False
    share: str = ""


def claim_error(claim: ClaimRef, text: str, hint: str | None = None) -> RequestError:
    """Return the error of a claim that cannot be prepared."""
    return RequestError("OCIGPU-DRA-1", f"claim {claim}: {text}", hint)


def allocated_devices(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the devices that a claim of the API server has, of all drivers; [] while it is not allocated."""
    allocation = (document.get("status") or {}).get("allocation") or {}
    return (allocation.get("devices") or {}).get("results") or []


def read_allocation(
    claim: ClaimRef, document: Mapping[str, Any] | None, driver: str, pool: str, devices: Sequence[DraDevice]
) -> tuple[Allotted, ...]:
    """Return the devices of this driver's pool that the API server's object allocates to a claim.

    Raises RequestError OCIGPU-DRA-1 for a claim that is gone, replaced, not allocated, or of other drivers and nodes
    only, OCIGPU-DRA-2 for its configuration, HostError OCIGPU-DRA-3 for devices that this node lacks.
    """
    if document is None:
        raise claim_error(claim, "it was deleted", "")
    uid = str(document.get("metadata", {}).get("uid", ""))
    if uid != claim.uid:
        raise claim_error(claim, f"it was replaced by another one of that name: its uid is {quoted(uid)}", "")
    allocation = (document.get("status") or {}).get("allocation")
    if not isinstance(allocation, Mapping):
        raise claim_error(claim, "it is not allocated", "")
    results = allocated_devices(document)
    own = [each for each in results if each.get("driver") == driver][:MAX_RESULTS]
    if not own:
        others = ", ".join(sorted({str(each.get("driver")) for each in results})) or "nobody"
        raise claim_error(claim, f"none of its devices is of {driver}, they are of {printable(others, 200)}", "")
    found: list[Allotted] = []
    for each in own:
        name = str(each.get("device", ""))
        if each.get("pool") != pool:
            raise claim_error(
                claim, f"device {quoted(name)} is of pool {quoted(str(each.get('pool')))}, not of this node"
            )
        device = find_device(devices, name)
        if device is None:
            raise HostError("OCIGPU-DRA-3", f"claim {claim}: this node has no device {quoted(name)}")
        admin = each.get("adminAccess") is True
        found.append(Allotted(str(each.get("request", "")), device, admin=admin, share=str(each.get("shareID") or "")))
    configs = resolve_configs(allocation, driver, [(each.request, each.device.kind) for each in found])
    return tuple(each._replace(config=configs.get(position, DeviceConfig())) for position, each in enumerate(found))


def is_allocated(claim: ClaimRef, document: Mapping[str, Any] | None, driver: str, pool: str) -> bool:
    """Tell whether the API server's object is still this claim, with a device of this driver's pool."""
    if document is None or document.get("metadata", {}).get("uid") != claim.uid:
        return False
    return any((each.get("driver"), each.get("pool")) == (driver, pool) for each in allocated_devices(document))


def check_holders(
    claim: ClaimRef, wanted: Iterable[Allotted], holders: Iterable[tuple[ClaimRef, Sequence[Allotted]]]
) -> None:
    """Raise RequestError (OCIGPU-DRA-4) if another claim holds a device, or one of the same GPU that excludes it.

    The scheduler may have acted on outdated data; see kubernetes#136269.  Claims with admin access may share any
    device.
    """
    held = [(holder, each) for holder, devices in holders if holder.uid != claim.uid for each in devices]
    for each in wanted:
        for other, theirs in held:
            if each.admin or theirs.admin or not each.device.conflicts(theirs.device):
                continue
            if each.share and theirs.share and each.device.name == theirs.device.name:
                continue
            same = each.device.name == theirs.device.name
            what = f"device {each.device.name}" if same else f"device {theirs.device.name} of the same GPU"
            raise RequestError("OCIGPU-DRA-4", f"claim {claim}: {what} is in use by claim {other}")


def check_configs(claim: ClaimRef, allotted: Iterable[Allotted]) -> None:
    """Raise RequestError (OCIGPU-DRA-2) for what an administrator's access or a kind of device rules out."""
    for each in allotted:
        if each.admin and each.config.strategy:
            text = (
                f"request {quoted(each.request)}: access of an administrator changes nothing of how a device is shared"
            )
            raise RequestError("OCIGPU-DRA-2", f"claim {claim}: {text}")
        if each.admin and each.device.kind == "vfio":  # its node is the device, whoever shares it
            text = f"request {quoted(each.request)}: a virtual machine's GPU has one owner, no administrator's access"
            raise RequestError("OCIGPU-DRA-2", f"claim {claim}: {text}")
        if each.share and each.config.strategy == "MPS":  # each claim has a daemon of its own, a GPU can have one
            text = f"request {quoted(each.request)}: a GPU that several claims share is not shared by MPS"
            raise RequestError("OCIGPU-DRA-2", f"claim {claim}: {text}")
        if each.config.strategy and each.config.strategy not in load_vendor(each.device.vendor).sharing:
            text = f"request {quoted(each.request)}: {each.device.vendor} GPUs are not shared by {each.config.strategy}"
            raise RequestError("OCIGPU-DRA-2", f"claim {claim}: {text}")


def mps_group(allotted: Allotted) -> str:
    """Return what devices of a claim must have in common to have one control daemon: the configuration."""
    config = allotted.config
    return json.dumps([config.percentage, sorted(config.pinned.items())])


def mps_place(uid: str, group: str, allotted: Sequence[Allotted]) -> str:
    """Return the name of a daemon's directory below the root of MPS."""
    groups = list(dict.fromkeys(mps_group(each) for each in allotted if each.config.strategy == "MPS"))
    return f"claims/{uid}-{groups.index(group)}"
