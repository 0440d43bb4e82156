"""The resources that a node offers to Kubernetes, and the devices of each.  Pure, from the host's facts.

A device that cannot be given does not affect the others: it is offered as unhealthy, with the reason, or left out with
a note when it has no lasting name.  Device ids are those of NVIDIA's plugin: the UUID, and "UUID::n" for the replicas
of a shared device, so they are the same after a restart.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ocigpu.core.facts import DeviceNode, Gpu, HostFacts, MigDevice
from ocigpu.core.vendors import FIRST, VENDORS
from ocigpu.gpus.nvidia.selection import DISPLAY_ONLY
from ocigpu.gpus.on_node import NodeGpus
from ocigpu.gpus.vfio.facts import GroupMembers
from ocigpu.kubernetes.node.config import Configuration, matches
from ocigpu.kubernetes.node.sharing import DOMAIN, MAX_DEVICES, MAX_NAME, Shared

GPU_RESOURCE = f"{DOMAIN}gpu"
REPLICA = "::"
"""Between a device's name and the number of a replica."""
MAX_ID = 63
"""Characters of a device's id that the kubelet's interface allows."""

NO_MIG_DEVICES = "MIG is enabled, but there are no MIG devices"


class PluginDevice(NamedTuple):
    """One device of a resource.

    ``id``: its name for the kubelet.  ``uuid``: its name in a container, the id without the number of a replica.
    ``gpu``: UUID of the GPU that it is or belongs to.  ``ordinal``: "0", or "0:1" for a MIG device.  ``paths``: its
    device nodes in a container.  ``numa``: its NUMA node, -1 for none.  ``replicas``: how often it is offered.
    ``instance``: GPU and compute instance of a MIG device.  ``error``: empty, or why it cannot be given now.  For
    virtual machines, ``gpu`` is a PCI address, ``gpus`` are the addresses of all its GPUs, ``group`` is its IOMMU
    group.
    """

    id: str
    uuid: str
    gpu: str
    ordinal: str
    paths: tuple[str, ...] = ()
    numa: int = -1
    replicas: int = 1
    instance: tuple[int, int] | None = None
    error: str = ""
    gpus: tuple[str, ...] = ()
    group: GroupMembers = GroupMembers()

    @property
    def is_replica(self) -> bool:
        """Whether others may have the same GPU or MIG device."""
        return self.id != self.uuid


class Resource(NamedTuple):
    """A resource by its full name.  ``kind``: "gpu" (MIG devices included), "wsl" or "vfio".

    ``sharing``: "none", "time-slicing" or "mps", for its replicas.  ``one_each``: one replica for a container at most.
    ``vendor``: whose devices they are, by its name in :mod:`ocigpu.gpus.vendors`.
    """

    name: str
    devices: tuple[PluginDevice, ...]
    kind: str = "gpu"
    sharing: str = "none"
    one_each: bool = False
    vendor: str = FIRST


class Inventory(NamedTuple):
    """A node's offer.  ``notes``: a sentence about each omitted device; ``reason``: why the offer is empty."""

    resources: tuple[Resource, ...] = ()
    notes: tuple[str, ...] = ()
    reason: str = ""

    def of(self, *vendors: str) -> "Inventory":
        """Return the resources of these vendors."""
        return self._replace(resources=tuple(each for each in self.resources if each.vendor in vendors))


def make_inventory(
    facts: HostFacts, configuration: Configuration, numa: Mapping[str, int] | None = None, wsl_node: str = ""
) -> Inventory:
    """Return the resources of a node.

    ``numa``: NUMA nodes by the GPUs' UUIDs, others have none.  ``wsl_node``: path of the node of all GPUs under WSL.
    """
    notes: list[str] = []
    gpus = _nameable(facts, notes)
    found: dict[str, list[PluginDevice]] = {}
    for gpu in gpus:
        for name, device in _devices_of(gpu, facts, configuration, wsl_node, notes):
            place = numa.get(gpu.uuid, -1) if numa else -1
            found.setdefault(name, []).append(device._replace(numa=max(place, -1)))
    if configuration.options.mig_strategy == "single":
        problem = single_problem(facts)
        if problem:
            notes.append(problem)
            found.clear()
    kind = "wsl" if wsl_node else "gpu"
    resources = _share_resources(found, kind, FIRST, configuration, notes)
    reason = "" if resources else "; ".join(notes or facts.notes) or "this host has no GPUs"
    return Inventory(resources, tuple(notes), reason)


def _share_resources(
    found: Mapping[str, Sequence[PluginDevice]], kind: str, vendor: str, configuration: Configuration, notes: list[str]
) -> tuple[Resource, ...]:
    """Return a vendor's devices as resources, with those of the configuration's that are to be shared as replicas."""
    sharing, domain = configuration.sharing, f"{VENDORS[vendor][2]}/"
    entries = [entry for entry in sharing.resources if entry.name.startswith(domain)]
    shared = _share(found, entries, notes)
    return tuple(
        Resource(name, tuple(devices), kind, _sharing_of(devices, configuration), sharing.one_each, vendor=vendor)
        for name, devices in shared.items()
    )


def make_other_inventory(gpus: NodeGpus, configuration: Configuration) -> Inventory:
    """Return the GPUs and partitions of a vendor other than NVIDIA: as one resource, DOMAIN/gpu, or named by partition.

    A partition counts as one device, and its GPU is identified by the PCI address.  With the naming strategy "mixed" a
    resource has the name of how its GPUs are partitioned.
    """
    vendor = gpus.facts.vendor
    notes = list(gpus.facts.notes)
    mixed = configuration.options.resource_naming_strategy == "mixed"
    found: dict[str, list[PluginDevice]] = {}
    known: set[str] = set()
    for gpu in gpus.facts.gpus:
        if not gpu.uuid or len(gpu.uuid) > MAX_ID or gpu.uuid in known:
            notes.append(f"{vendor}: {gpu.title} left out: it has no name that no other has")
            continue
        paths = (gpu.node.container_path,) if gpu.node else ()
        numa = max(gpus.numa.get(gpu.uuid, -1), -1)
        name = f"{VENDORS[vendor][2]}/{(gpus.styles.get(gpu.uuid) if mixed else '') or 'gpu'}"
        device = PluginDevice(gpu.uuid, gpu.uuid, gpu.bus_id, str(gpu.index), paths, numa, error=gpu.error)
        found.setdefault(name, []).append(device)
        known.add(gpu.uuid)
    resources = _share_resources(found, "gpu", vendor, configuration, notes)
    return Inventory(resources, tuple(notes), "" if resources else "; ".join(notes))


def single_problem(facts: HostFacts) -> str:
    """Return why MIG strategy "single" offers nothing on this host; "" when it does.

    Under one name there must be devices of one size.  GPUs with errors, and those without MIG devices, do not count.
    """
    usable = [gpu for gpu in facts.gpus if not gpu.error and gpu.model not in DISPLAY_ONLY]
    split = [gpu for gpu in usable if gpu.mig_enabled]
    if not split:
        return ""
    whole = [gpu.index for gpu in usable if not gpu.mig_enabled]
    if whole:
        return f"MIG strategy single: MIG is enabled on GPU {split[0].index}, but not on GPU {whole[0]}"
    profiles = sorted({mig.profile for gpu in split for mig in gpu.mig_devices})
    if len(profiles) > 1:
        return f"MIG strategy single: MIG devices of several profiles: {', '.join(profiles)}"
    return ""


def mig_resource(profile: str) -> str:
    """Return the resource of a MIG profile: "1g.10gb+me" is nvidia.com/mig-1g.10gb.me; "" if it has none.

    A profile such as "1c.2g.10gb" is part of a GPU instance: NVIDIA has no name for it, resources.mig may give one.
    """
    name = f"{DOMAIN}mig-{profile.replace('+', '.')}"
    return name if profile and "c." not in profile and len(name) <= MAX_NAME else ""


def mig_name(profile: str, configuration: Configuration) -> str:
    """Return the resource of MIG devices of this profile under strategy mixed; "" for none."""
    named = (name for pattern, name in configuration.mig_names if matches(pattern, profile))
    return next(named, "") or mig_resource(profile)


def _nameable(facts: HostFacts, notes: list[str]) -> list[Gpu]:
    gpus = []
    for gpu in sorted(facts.gpus, key=lambda gpu: gpu.index):
        if gpu.model in DISPLAY_ONLY:
            notes.append(f"GPU {gpu.index} left out: it is for a display only")
        elif not gpu.uuid or len(gpu.uuid) > MAX_ID:
            notes.append(f"{gpu.title} left out: {gpu.error or 'it has no UUID'}")
        else:
            gpus.append(gpu)
    return gpus


def _devices_of(
    gpu: Gpu, facts: HostFacts, configuration: Configuration, wsl_node: str, notes: list[str]
) -> "list[tuple[str, PluginDevice]]":
    """Return (resource name, device) of a GPU: itself, or its MIG devices."""
    strategy = configuration.options.mig_strategy
    if strategy == "none" or not gpu.mig_enabled:
        name = next((name for pattern, name in configuration.gpu_names if matches(pattern, gpu.model)), GPU_RESOURCE)
        error = gpu.error
        if not (error or gpu.node or wsl_node):
            error = "its device number is unknown"
        elif not error and gpu.mig_enabled and not gpu.mig_devices:
            error = NO_MIG_DEVICES  # the runtime could not give it either
        paths = (wsl_node,) if wsl_node else (gpu.node.container_path,) if gpu.node else ()
        return [(name, PluginDevice(gpu.uuid, gpu.uuid, gpu.uuid, str(gpu.index), paths, error=error))]
    if not gpu.mig_devices:
        notes.append(f"{gpu.title} left out: {gpu.error or NO_MIG_DEVICES}")
    found = []
    nodes = {node.minor: node for _, node in facts.cap_nodes}
    for mig in gpu.mig_devices:
        name = GPU_RESOURCE if strategy == "single" else mig_name(mig.profile, configuration)
        what = f"MIG device {gpu.index}:{mig.index}"
        if not name:
            notes.append(f"{what} left out: profile {mig.profile or 'unknown'} has no resource name (resources.mig)")
        elif not mig.uuid or len(mig.uuid) > MAX_ID:
            notes.append(f"{what} left out: it has no UUID")
        else:
            found.append((name, _mig_device(gpu, mig, nodes)))
    return found


def _mig_device(gpu: Gpu, mig: MigDevice, nodes: Mapping[int, DeviceNode]) -> PluginDevice:
    parts = [gpu.node, nodes.get(mig.gi_minor), nodes.get(mig.ci_minor)]
    paths = tuple(node.container_path for node in parts if node)
    error = gpu.error or ("" if len(paths) == len(parts) else "a device number of its instances is unknown")
    instance = (mig.gpu_instance, mig.compute_instance)
    return PluginDevice(mig.uuid, mig.uuid, gpu.uuid, f"{gpu.index}:{mig.index}", paths, instance=instance, error=error)


# sharing


def _share(
    found: Mapping[str, Sequence[PluginDevice]], entries: Sequence[Shared], notes: list[str]
) -> "dict[str, list[PluginDevice]]":
    """Return the devices by resource, with shared devices as replicas, perhaps under another name.

    A resource with more devices than the kubelet accepts is left out with a note, before its replicas are made.
    """
    left = {name: list(devices) for name, devices in found.items()}
    shared: dict[str, list[tuple[PluginDevice, int]]] = {}
    for entry in entries:
        devices = left.get(entry.name, [])
        chosen = _chosen(entry, devices, notes)
        taken = {device.id for device in chosen}
        if devices:
            left[entry.name] = [device for device in devices if device.id not in taken]
        shared.setdefault(entry.offered_as, []).extend((device, entry.replicas) for device in chosen)
    merged: dict[str, list[PluginDevice]] = {}
    for name in dict.fromkeys((*left, *shared)):
        own, parts = left.get(name, []), shared.get(name, [])
        count = len(own) + sum(replicas for _, replicas in parts)
        if count > MAX_DEVICES:
            notes.append(f"{name} left out: {count} devices, a kubelet accepts {MAX_DEVICES}")
        elif count:
            merged[name] = [*own, *(one for device, replicas in parts for one in _replicas(device, replicas))]
    return merged


def _replicas(device: PluginDevice, count: int) -> Iterator[PluginDevice]:
    for number in range(count):
        yield device._replace(id=f"{device.uuid}{REPLICA}{number}", replicas=count)


def _chosen(entry: Shared, devices: Sequence[PluginDevice], notes: list[str]) -> list[PluginDevice]:
    if not devices:
        notes.append(f"{entry.name} is not shared: this node has no such resource")
        return []
    if entry.devices == "all":
        return list(devices)
    if isinstance(entry.devices, int):
        if entry.devices > len(devices):
            notes.append(f"{entry.name}: {entry.devices} devices are to be shared, this node has {len(devices)}")
        return list(devices[: entry.devices])
    chosen = []
    for reference in entry.devices:
        matching = [device for device in devices if _is_called(device, reference)]
        if not matching:
            notes.append(f"{entry.name}: device {reference} is to be shared, but this node does not have it")
        chosen.extend(matching)
    return list(dict.fromkeys(chosen))


def _is_called(device: PluginDevice, reference: str) -> bool:
    names = [device.ordinal, device.uuid.lower()]
    if device.instance:
        names.append(f"mig-{device.gpu.lower()}/{device.instance[0]}/{device.instance[1]}")
    return reference.lower() in names


def _sharing_of(devices: Sequence[PluginDevice], configuration: Configuration) -> str:
    return configuration.sharing.strategy if any(device.is_replica for device in devices) else "none"
