"""The CDI specification of a claim: its devices under names that are never used for anything else.

The claim's uid is in every name, because engines and the kubelet keep what they have read.  Edits come from the plans
that the runtime makes of the same facts.  Sources: CDI specification 0.8; kind and names as with NVIDIA's driver.
"""

import glob
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ocigpu.cdi.edits import MOUNT_OPTIONS, Draft, DraftDevice, hook_options, make_draft, node_edit
from ocigpu.cdi.generate import assemble
from ocigpu.cdi.write import write_spec
from ocigpu.core.actions import SOCKET_OPTIONS
from ocigpu.core.errors import CdiError, HostError, OsErrorAs
from ocigpu.core.facts import DeviceNode
from ocigpu.core.settings import Settings
from ocigpu.gpus.offer import VOID, GenerateOptions
from ocigpu.gpus.tree import find_roots
from ocigpu.gpus.vendors import load_vendor
from ocigpu.gpus.vfio.facts import read_vfio_facts
from ocigpu.kubernetes.dra.claims import Allotted, ClaimRef, mps_group, mps_place
from ocigpu.kubernetes.dra.devices import DraDevice, DraNode, made_uuid
from ocigpu.kubernetes.mps.shares import CONTAINER_ROOT, PIPE_VARIABLE, mps_directories
from ocigpu.kubernetes.node.config import PluginOptions
from ocigpu.kubernetes.node.on_host import on_the_host

CLASS = "claim"


class NodeView(NamedTuple):
    """The last reading of the node: its offer, and the settings of that reading."""

    node: DraNode
    devices: tuple[DraDevice, ...]
    settings: Settings
    options: PluginOptions
    mps_root: str = "/run/nvidia/mps"


def spec_kind(driver: str) -> str:
    """Return the kind of the devices of claims: k8s.gpu.nvidia.com/claim."""
    return f"k8s.{driver}/{CLASS}"


def cdi_device(driver: str, claim: ClaimRef, device: str) -> str:
    """Return the qualified name of a claim's device."""
    return f"{spec_kind(driver)}={claim.uid}-{device}"


def spec_path(directory: str, driver: str, uid: str, family: str) -> str:
    """Return the file of a claim's devices of a family, "vfio" or a vendor: each has edits for all of its own."""
    return f"{directory}/k8s.{driver}-{CLASS}_{uid}_{family}.json"


def family_of(allotted: Allotted) -> str:
    """Return whose edits a device needs."""
    return "vfio" if allotted.device.kind == "vfio" else allotted.device.vendor


def swept_specs(directory: str, driver: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return the files of unknown claims."""
    start = f"{directory}/k8s.{driver}-{CLASS}_"
    paths = glob.glob(f"{glob.escape(start)}*.json")
    return tuple(sorted(path for path in paths if path[len(start) :].rpartition("_")[0] not in known))


def write_claim_spec(path: str, claim: ClaimRef, allotted: Sequence[Allotted], driver: str, view: NodeView) -> None:
    """Write the file of a claim's devices, all of one family.

    Raises HostError, RequestError or CdiError if the host lacks something; then no file exists.
    """
    spec = make_claim_spec(claim, allotted, driver, view)
    write_spec(on_the_host(spec, view.options, view.settings), path, "json")


def make_claim_spec(claim: ClaimRef, allotted: Sequence[Allotted], driver: str, view: NodeView) -> dict[str, Any]:
    """Return the specification of a claim's devices, all of one family; raises as :func:`write_claim_spec`."""
    node, settings, options, mps = view.node, view.settings, view.options, view.mps_root
    allotted = [each._replace(device=_as_made(each.device, node)) for each in allotted]
    names = {each.device.id: f"{claim.uid}-{each.device.name}" for each in allotted}
    family = family_of(allotted[0])
    wanted = GenerateOptions(
        mode="vfio" if family == "vfio" else "nvml",
        device_ids=tuple(names),
        all_device=False,
        hook_path=options.cdi_hook_path,
        disabled_hooks=options.cdi_disable_hooks,
        feature_flags=options.cdi_feature_flags,
    )
    if family == "vfio":
        draft = _vfio_draft(allotted, names, settings)
    else:
        claimed = {each.device.id: each.device.name for each in allotted}
        offer = load_vendor(family).offer_claimed(claimed, wanted, settings, node.facts)
        draft = make_draft(offer, wanted, hook_options(wanted, settings))
        ids = {str(name).lower(): each for name, each in names.items()}
        devices = (each._replace(name=ids[each.name.lower()]) for each in draft.devices)
        draft = draft._replace(devices=tuple(devices))
    vendor, _, device_class = spec_kind(driver).partition("/")
    draft = draft._replace(vendor=vendor, device_class=device_class, all_device=False)
    spec = assemble(draft, wanted, "").spec
    shared = {names[each.device.id]: each for each in allotted if each.config.strategy == "MPS"}
    for device in spec["devices"]:
        if device["name"] in shared:
            _join_mps(device["containerEdits"], mps_place(claim.uid, mps_group(shared[device["name"]]), allotted), mps)
    spec.pop("annotations")  # it is the claim's, however the host changes: no state of the host dates it
    return spec


def _as_made(device: DraDevice, node: DraNode) -> DraDevice:
    """Return a device as it exists now: one that was made for the claim has a UUID of its own."""
    if not device.place:
        return device
    uuid = made_uuid(device, node)
    if not uuid:
        raise HostError("OCIGPU-DRA-3", f"{device.name}: NVML does not show the MIG device that was made", "")
    return device._replace(id=uuid)


def _join_mps(edits: dict[str, Any], place: str, root: str) -> None:
    """Let the containers that have a device connect to its control daemon: its pipes, and /dev/shm with it."""
    outside = mps_directories(root, place)
    inside = mps_directories(CONTAINER_ROOT, place).pipe
    edits.setdefault("env", []).append(f"{PIPE_VARIABLE}={inside}")
    options = [*SOCKET_OPTIONS, *MOUNT_OPTIONS]
    for source, target in ((outside.pipe, inside), (outside.shm, "/dev/shm")):
        mount = {"hostPath": source, "containerPath": target, "options": options, "type": "bind"}
        edits.setdefault("mounts", []).append(mount)


def _vfio_draft(allotted: Sequence[Allotted], names: dict[str, str], settings: Settings) -> Draft:
    facts = read_vfio_facts(find_roots(settings))
    by_address = {item.function.address: item for item in facts.candidates}
    groups = {group.number: group for group in facts.groups}
    devices = []
    for each in allotted:
        item = by_address.get(each.device.id)
        single = each.config.policy == "PreferIommuFD" and facts.iommufd and item is not None and item.node is not None
        group = groups.get(item.group) if item else None
        node = item.node if item and single else group.node if group else None
        if node is None:
            raise HostError("OCIGPU-DRA-3", f"GPU {each.device.id}: the host has no node of VFIO for it")
        nodes: list[DeviceNode | None] = [node]
        if each.config.api_device:
            nodes.append(facts.container_node if not single else _iommu_node(settings))
        entries = [node_edit(one, "rwm") for one in nodes if one is not None]
        devices.append(DraftDevice(names[each.device.id], {"deviceNodes": entries}))
    return Draft("vfio", "", "", tuple(devices), {"env": [VOID]}, all_device=False)


def _iommu_node(settings: Settings) -> DeviceNode | None:
    path = f"{find_roots(settings).dev}/dev/iommu"
    try:
        number = os.stat(path).st_rdev
    except OSError:  # then VFIO's devices are opened by their groups
        return None
    return DeviceNode("/dev/iommu", path, os.major(number), os.minor(number), 0o600)


def remove_spec(path: str) -> None:
    """Remove a file of a claim; a missing one is not an error.  Raises CdiError."""
    with OsErrorAs(CdiError, "OCIGPU-CDI-8", f"remove {path}"), suppress(FileNotFoundError):
        os.unlink(path)


def is_written(path: str) -> bool:
    """Tell whether a file of a claim exists and is complete."""
    try:
        with open(path, encoding="utf-8") as file:
            return bool(json.load(file).get("devices"))
    except (OSError, ValueError, AttributeError):  # missing or foreign: it is written again
        return False
