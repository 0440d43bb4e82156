"""The devices that a node offers to claims: GPUs, MIG devices, GPUs for virtual machines; attributes.  Pure.

Device names, attribute names and types match NVIDIA's driver (gpu.nvidia.com 0.5), so its device classes and selectors
work unchanged.  Devices that share a board exclude each other.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from ocigpu.core.facts import Gpu, HostFacts, MigDevice
from ocigpu.core.vendors import FIRST
from ocigpu.gpus.nvidia.hardware import family
from ocigpu.gpus.nvidia.mig_layout import GpuLayout
from ocigpu.gpus.nvidia.selection import DISPLAY_ONLY
from ocigpu.gpus.nvidia.topology import GpuPlace
from ocigpu.gpus.on_node import Hardware, MigSize
from ocigpu.gpus.parts import GpuPart, as_version
from ocigpu.gpus.pci import Function
from ocigpu.gpus.tree import normal_bus_id, sysfs_address
from ocigpu.gpus.vfio.facts import VFIO_DRIVERS, VfioFacts
from ocigpu.kubernetes.node.vfio import name_at, vfio_name

STANDARD = "resource.kubernetes.io"
"""Domain of the attributes that mean the same with every driver."""

Attributes = dict[str, dict[str, Any]]


class Taint(NamedTuple):
    """Why a device is restricted; ``effect``: NoSchedule, NoExecute or None."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"


class DraNode(NamedTuple):
    """A reading of a node: NVIDIA's GPUs, or those of another ``vendor`` in ``parts``.

    ``places``: by PCI address as facts write it; ``models``: names by PCI device id; ``partitions``: attributes of the
    fabric by PCI address.
    ``problems``: why something could not be read, a sentence each.  ``addressable``: bytes of 64-bit memory regions by
    PCI address as sysfs writes it, which a virtual machine must have room for.
    """

    facts: HostFacts = HostFacts()
    hardware: Hardware = Hardware()
    layouts: tuple[GpuLayout, ...] = ()
    vfio: VfioFacts = VfioFacts()
    vendor: str = FIRST
    parts: tuple[GpuPart, ...] = ()
    places: "dict[str, GpuPlace]" = {}
    models: "dict[int, str]" = {}
    partitions: "dict[str, dict[str, int]]" = {}
    problems: tuple[str, ...] = ()
    addressable: "dict[str, int]" = {}


class MigPlace(NamedTuple):
    """Where on which board a GPU instance is: id of its profile, and its first memory slice.

    -1 both: the board itself, whose MIG mode was switched on for a claim.
    """

    board: str
    profile: int = -1
    start: int = -1


class DraDevice(NamedTuple):
    """One device.  ``kind``: "gpu", "mig" or "vfio".

    ``board``: PCI address of the GPU it is or is part of.  ``id``: the vendor's identifier: UUID, or PCI address and
    number of a partition.  ``memory``: memory slices, for MIG devices; for another vendor's partition, also of kind
    "mig", its number; ``profile``: id and start of a MIG device that is made for a claim, None for an existing one.
    ``policies``: how much a claim takes of a shared capacity (CapacityRequestPolicy of resource/v1), by its name.
    """

    name: str
    kind: str
    board: str
    id: str
    attributes: Attributes
    capacity: "dict[str, str]"
    memory: tuple[int, ...] = ()
    profile: "tuple[int, int] | None" = None
    vendor: str = FIRST
    shared: bool = False
    taints: tuple[Taint, ...] = ()
    policies: "dict[str, dict[str, Any]]" = {}

    @property
    def place(self) -> MigPlace | None:
        """Where a MIG device is made for a claim, None for an existing device."""
        return MigPlace(self.board, *self.profile) if self.profile else None

    @property
    def counters(self) -> tuple[str, ...]:
        """The counters of its board that it consumes: memory slices, and the media engines for a part of a GPU."""
        media = ("media-engines",) if "+me" in str(self.attributes.get("profile", {}).get("string")) else ()
        return (*(f"memory-slice-{number}" for number in self.memory), *media)

    def conflicts(self, other: "DraDevice") -> bool:
        """Return whether a container with one of them takes something from the other."""
        if self.board != other.board:
            return False
        if self.kind == other.kind == "mig" and self.name != other.name:
            return bool(self.memory and other.memory and set(self.counters) & set(other.counters))
        return True


class DeviceOptions(NamedTuple):
    """``passthrough``: offer GPUs of the driver for virtual machines too, and switch drivers for a claim.

    ``dynamic_mig``: offer every MIG device that could be made; ``shares``: "disabled", "unlimited", "memory" or a
    number: how several claims may share a GPU.
    """

    passthrough: bool = False
    dynamic_mig: bool = False
    shares: str = "disabled"


def make_devices(
    node: DraNode,
    options: DeviceOptions = DeviceOptions(),  # noqa: B008 - it cannot be changed
    made: "Collection[MigPlace]" = (),
) -> tuple[DraDevice, ...]:
    """Return the devices of a node by PCI address; driver bindings do not change the order.

    ``made``: places of MIG devices that exist because a claim has them, and boards whose MIG mode was switched on for
    one.  Their offer stays the same, counters keep the claims apart, and no slice is written again.
    """
    found: list[tuple[str, int, DraDevice]] = []
    layouts = {normal_bus_id(layout.bus_id): layout for layout in node.layouts}
    for gpu in node.facts.gpus:
        if gpu.model in DISPLAY_ONLY or not gpu.uuid or gpu.minor < 0:
            continue
        layout = layouts.get(gpu.bus_id)
        found += [(gpu.bus_id, 1, device) for device in _of_driver(gpu, layout, node, options, made)]
    for function in _machine_functions(node):
        address = normal_bus_id(function.address)
        if function.driver in VFIO_DRIVERS or (options.passthrough and _may_switch(address, node)):
            found.append((address, 2, _vfio_device(function, node)))
    for number, part in enumerate(node.parts):
        found.append((normal_bus_id(part.address), 3 + number, _other_device(part, node)))
    return tuple(device for _, _, device in sorted(found, key=lambda item: item[:2]))


def find_device(devices: Iterable[DraDevice], name: str) -> DraDevice | None:
    """Return the device of a name."""
    return next((device for device in devices if device.name == name), None)


# GPUs of the driver, and MIG devices


def _of_driver(
    gpu: Gpu, layout: GpuLayout | None, node: DraNode, options: DeviceOptions, made: Collection[MigPlace]
) -> list[DraDevice]:
    instances = layout.instances if layout else ()
    ours = {one.gi for one in instances if MigPlace(gpu.bus_id, one.profile, one.start) in made}
    there = [_mig_device(gpu, mig, layout, node) for mig in gpu.mig_devices if mig.gpu_instance not in ours]
    taken = {slice_ for device in there for slice_ in device.memory}
    possible: list[DraDevice] = []
    if options.dynamic_mig and layout is not None and (gpu.mig_enabled or _changes_at_once(gpu)):
        possible = [each for each in _possible_migs(gpu, layout, node) if not taken & set(each.memory)]
    if gpu.mig_enabled and (there or MigPlace(gpu.bus_id) not in made):
        return there + possible
    memory = {slice_ for device in possible for slice_ in device.memory}
    return [_gpu_device(gpu, node, options)._replace(memory=tuple(sorted(memory))), *possible]


def _changes_at_once(gpu: Gpu) -> bool:
    """Return whether MIG mode changes without a reset: from Hopper on (NVIDIA's MIG user guide)."""
    return int(gpu.architecture.partition(".")[0] or 0) >= 9


def made_uuid(device: DraDevice, node: DraNode) -> str:
    """Return the UUID of the MIG device that was made for a claim, "" while it does not exist."""
    for layout in node.layouts:
        for instance in layout.instances:
            if MigPlace(normal_bus_id(layout.bus_id), instance.profile, instance.start) == device.place:
                return next(iter(instance.uuids), "")
    return ""


def _gpu_device(gpu: Gpu, node: DraNode, options: DeviceOptions) -> DraDevice:
    details = node.hardware.gpus.get(gpu.uuid)
    capacity = {"memory": f"{details.memory_mib}Mi"} if details and details.memory_mib else {}
    partitions = {name: {"int": number} for name, number in node.partitions.get(gpu.bus_id, {}).items()}
    own: Attributes = {"type": {"string": "gpu"}, "uuid": {"string": gpu.uuid}, "index": {"int": gpu.index}}
    attributes = {**own, **_common(gpu, node), **partitions}
    device = DraDevice(f"gpu-{gpu.minor}", "gpu", gpu.bus_id, gpu.uuid, attributes, capacity)
    return device if options.shares == "disabled" else _share(device, options.shares)


def _share(device: DraDevice, shares: str) -> DraDevice:
    """Let claims share a GPU; without a policy, a claim that requests no amount takes all of a capacity."""
    policies: dict[str, dict[str, Any]] = {"memory": {"default": "0", "validRange": {"min": "0"}}}
    capacity = dict(device.capacity)
    if shares == "memory":
        if "memory" not in capacity:  # nothing that could be shared out: GB10
            return device
        policies = {"memory": {"default": capacity.get("memory"), "validRange": {"min": "1Mi", "step": "1Mi"}}}
    elif shares.isdecimal():
        capacity["shares"] = shares
        step = {"step": "1"} if int(shares) > 1 else {}  # no step leads beyond the capacity
        policies["shares"] = {"default": "1", "validRange": {"min": "1", **step}}
    known = {name: policy for name, policy in policies.items() if name in capacity}
    return device._replace(capacity=capacity, shared=True, policies=known)


def _mig_device(gpu: Gpu, mig: MigDevice, layout: GpuLayout | None, node: DraNode) -> DraDevice:
    instance = next((each for each in layout.instances if each.gi == mig.gpu_instance), None) if layout else None
    attributes = {"type": {"string": "mig"}, "uuid": {"string": mig.uuid}}
    details = node.hardware.gpus.get(gpu.uuid)
    size = details.migs.get(mig.uuid) if details else None
    memory: tuple[int, ...] = ()
    name = f"gpu-{gpu.minor}-mig-{_dns(mig.profile)}-{mig.gpu_instance}-{mig.compute_instance}"
    if layout is not None and instance is not None:
        profile = layout.profile(instance.profile)
        memory = tuple(range(instance.start, instance.start + profile.size))
        several = f"-{mig.compute_instance}" if len(instance.cis) > 1 else ""
        name = f"gpu-{gpu.minor}-mig-{_dns(mig.profile)}-{profile.id}-{instance.start}{several}"
    attributes |= _mig_attributes(gpu, mig.profile, node)
    return DraDevice(name, "mig", gpu.bus_id, mig.uuid, attributes, _mig_capacity(size, memory), memory)


def _possible_migs(gpu: Gpu, layout: GpuLayout, node: DraNode) -> list[DraDevice]:
    found = []
    for profile in layout.profiles:
        for start in profile.starts:
            memory = tuple(range(start, start + profile.size))
            name = f"gpu-{gpu.minor}-mig-{_dns(profile.name)}-{profile.id}-{start}"
            attributes = {"type": {"string": "mig"}, **_mig_attributes(gpu, profile.name, node)}
            mib, processors, *engines = profile.contents or (0, 0)
            size = MigSize(mib, processors, profile.slices, profile.slices, *engines) if engines else None
            capacity = _mig_capacity(size, memory)
            found.append(
                DraDevice(name, "mig", gpu.bus_id, gpu.uuid, attributes, capacity, memory, (profile.id, start))
            )
    return found


def _mig_attributes(gpu: Gpu, profile: str, node: DraNode) -> Attributes:
    return {"parentUUID": {"string": gpu.uuid}, "profile": {"string": profile}, **_common(gpu, node)}


def _mig_capacity(size: MigSize | None, memory: Iterable[int]) -> "dict[str, str]":
    slices = {f"memorySlice{number}": "1" for number in memory}
    if size is None:
        return slices
    counts = {
        "multiprocessors": size.multiprocessors,
        "copyEngines": size.copy,
        "decoders": size.decoder,
        "encoders": size.encoder,
        "jpegEngines": size.jpeg,
        "ofaEngines": size.ofa,
    }
    memory_text = {"memory": f"{size.memory_mib}Mi"} if size.memory_mib else {}
    return {**memory_text, **{name: str(count) for name, count in counts.items()}, **slices}


def _common(gpu: Gpu, node: DraNode) -> Attributes:
    """Return the attributes of a GPU and of all its MIG devices."""
    found: Attributes = {
        "productName": {"string": gpu.model},
        "brand": {"string": gpu.brand},
        "architecture": {"string": family(gpu.architecture).replace("-", " ").title() if gpu.architecture else ""},
        "cudaComputeCapability": {"version": as_version(gpu.architecture)},
        "driverVersion": {"version": as_version(node.facts.driver_version)},
        "cudaDriverVersion": {"version": as_version(node.facts.cuda_version)},
        "addressingMode": {"string": "ATS" if gpu.coherent else ""},
    }
    told = {name: value for name, value in found.items() if "" not in value.values()}
    return {**told, **_place(gpu.bus_id, node.places)}


def _place(address: str, places: Mapping[str, GpuPlace]) -> Attributes:
    """Return the standard attributes of where a PCI function is (deviceattribute of Kubernetes' helper library)."""
    place = places.get(address, GpuPlace())
    found: Attributes = {f"{STANDARD}/pciBusID": {"string": sysfs_address(address)}}
    if place.path:
        found[f"{STANDARD}/pcieRoot"] = {"string": place.path[0]}
    if place.numa >= 0:
        found[f"{STANDARD}/numaNode"] = {"int": place.numa}
    return found


# GPUs for virtual machines


def _machine_functions(node: DraNode) -> list[Function]:
    return [item.function for item in node.vfio.candidates if not item.is_switch]


def _may_switch(address: str, node: DraNode) -> bool:
    """Return whether a GPU could be handed from its driver to VFIO: in an IOMMU group, and not cut into MIG devices."""
    cut = {gpu.bus_id for gpu in node.facts.gpus if gpu.mig_enabled}
    groups = {normal_bus_id(item.function.address): item.group for item in node.vfio.candidates}
    return address not in cut and groups.get(address, -1) >= 0


def _vfio_device(function: Function, node: DraNode) -> DraDevice:
    address = normal_bus_id(function.address)
    model = node.models.get(function.device, "")
    numa = node.places.get(address, GpuPlace()).numa
    attributes: Attributes = {
        "type": {"string": "vfio"},
        "deviceID": {"string": f"0x{function.device:04x}"},
        "vendorID": {"string": f"0x{function.vendor:04x}"},
        "iommuFDEnabled": {"bool": node.vfio.iommufd},
        **({"productName": {"string": model[:64]}} if model else {}),
        **({"numa": {"int": numa}} if numa >= 0 else {}),
        **{name: {"int": number} for name, number in node.partitions.get(address, {}).items()},
        **_place(address, node.places),
    }
    memory = node.addressable.get(function.address, 0)
    capacity = {"addressableMemory": _binary(memory)} if memory else {}
    return DraDevice(vfio_name(address), "vfio", address, function.address, attributes, capacity)


def _binary(count: int) -> str:
    """Return a number of bytes as Kubernetes writes it: 128Gi."""
    units = ((30, "Gi"), (20, "Mi"), (10, "Ki"))
    return next((f"{count >> shift}{unit}" for shift, unit in units if not count % (1 << shift)), str(count))


# other vendors' GPUs


def _other_device(part: GpuPart, node: DraNode) -> DraDevice:
    """Return a GPU, or a partition."""
    address = normal_bus_id(part.address)
    number = () if part.partition < 0 else (part.partition,)
    name = "-".join([name_at("gpu", address), *map(str, number)])
    attributes = {**part.attributes, **_place(address, node.places)}
    kind = "mig" if number else "gpu"
    return DraDevice(name, kind, address, part.id, attributes, part.capacity, number, vendor=node.vendor)


# words


def _dns(profile: str) -> str:
    """Return a MIG profile as part of a DNS label: "1g.10gb+me" is 1g10gb-me."""
    return re.sub(r"[^a-z0-9]+", "-", profile.lower().replace(".", "")).strip("-")
