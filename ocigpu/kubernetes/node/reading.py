"""The present state of a node: facts, offer and connections of its GPUs.

A broken GPU or driver ends nothing here: the inventory then states why it is empty.
"""

import os
from typing import NamedTuple

from ocigpu.core.errors import HostError
from ocigpu.core.facts import HostFacts
from ocigpu.core.settings import Settings
from ocigpu.core.vendors import FIRST
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.gpus.nvidia.topology import read_place
from ocigpu.gpus.on_node import Hardware, NodeGpus
from ocigpu.gpus.pci import NVIDIA_VENDOR, Function, read_functions
from ocigpu.gpus.tree import find_roots, normal_bus_id
from ocigpu.gpus.vendors import find_vendors, load_vendor
from ocigpu.gpus.vfio.facts import GPU_CLASSES, VFIO_DRIVERS, read_vfio_facts
from ocigpu.gpus.wsl import is_wsl
from ocigpu.gpus.wsl.facts import read_wsl_facts
from ocigpu.kubernetes.node.config import Configuration, PluginOptions
from ocigpu.kubernetes.node.devices import (
    GPU_RESOURCE,
    Inventory,
    PluginDevice,
    Resource,
    make_inventory,
    make_other_inventory,
)
from ocigpu.kubernetes.node.vfio import make_vfio_inventory, read_names

GONE = "this GPU is gone"
_DXG = "/dev/dxg"


class OtherGpus(NamedTuple):
    """The GPUs of a vendor other than NVIDIA, and what of them is offered."""

    gpus: NodeGpus
    inventory: Inventory


class KubernetesNode(NamedTuple):
    """``source``: "nvml", "wsl" or "vfio"; "" when the driver does not answer, for the reason in the inventory.

    ``scores``: how well GPUs are connected, by pairs of UUIDs.  ``machines``: GPUs bound to a VFIO driver.  All these
    cover NVIDIA's GPUs; ``others``: those of other vendors.
    """

    source: str
    facts: HostFacts
    inventory: Inventory
    hardware: Hardware = Hardware()
    scores: "dict[tuple[str, str], int]" = {}
    machines: tuple[Function, ...] = ()
    others: tuple[OtherGpus, ...] = ()

    @property
    def offered(self) -> Inventory:
        """The offer of all vendors' GPUs."""
        parts = [self.inventory, *(other.inventory for other in self.others)]
        resources = tuple(resource for part in parts for resource in part.resources)
        notes = tuple(note for part in parts for note in part.notes)
        reason = "" if resources else "; ".join(part.reason for part in parts if part.reason)
        return Inventory(resources, notes, reason)

    @property
    def driven(self) -> tuple[HostFacts, ...]:
        """The facts of each vendor whose driver has GPUs for containers."""
        own = (self.facts,) if self.source == "nvml" else ()
        return (*own, *(other.gpus.facts for other in self.others))

    def of(self, vendor: str) -> NodeGpus:
        """Return the reading of a vendor's GPUs."""
        own = NodeGpus(self.facts, self.hardware, {}, self.scores)
        return next((other.gpus for other in self.others if other.gpus.facts.vendor == vendor), own)


def host_settings(settings: Settings, options: PluginOptions) -> Settings:
    """Return the settings with the plugin's driver root: in its own container that is where it was mounted."""
    if settings.simulation_root:
        return settings
    if os.path.isdir(options.container_driver_root):
        return settings._replace(driver_root=options.container_driver_root, driver_dev_root="")
    return settings._replace(driver_root=options.driver_root, driver_dev_root=options.dev_root)


def read_node(settings: Settings, configuration: Configuration) -> KubernetesNode:
    """Return this node's present offer of NVIDIA's GPUs, by the discovery strategy.

    Queries NVML in separate processes.

    ``settings``: those of :func:`host_settings`.  Must be called from a process with one thread.
    """
    strategy = configuration.options.device_discovery_strategy
    if strategy == "vfio":
        return _read_vfio(settings, configuration)
    node = _read_wsl(settings, configuration) if is_wsl(settings) else _read_driver(settings, configuration)
    if strategy == "auto" and not node.inventory.resources:
        machines = _read_vfio(settings, configuration)
        functions = read_functions(find_roots(settings).sys, NVIDIA_VENDOR)
        on_bus = sum(function.base_class in GPU_CLASSES for function in functions)
        if machines.inventory.resources or len(machines.machines) == on_bus > 0:
            return machines
    return node


def read_others(settings: Settings, configuration: Configuration) -> tuple[OtherGpus, ...]:
    """Return the GPUs of the other vendors whose driver the host has; none where the strategy names one of NVIDIA's.

    ``settings``: those of :func:`host_settings`.  A vendor whose driver does not answer offers nothing.
    """
    if configuration.options.device_discovery_strategy != "auto":
        return ()
    found = []
    for name in find_vendors(settings):
        read = load_vendor(name).read_node
        if name == FIRST or read is None:
            continue
        try:
            gpus = read(settings)
        except HostError as error:
            found.append(OtherGpus(NodeGpus(HostFacts(vendor=name)), Inventory((), (error.message,), error.message)))
        else:
            found.append(OtherGpus(gpus, make_other_inventory(gpus, configuration)))
    return tuple(found)


def _read_driver(settings: Settings, configuration: Configuration) -> KubernetesNode:
    try:
        read = load_vendor(FIRST).read_node
        assert read is not None
        gpus = read(settings)
    except HostError as error:
        return KubernetesNode("", HostFacts(), Inventory(reason=error.message))
    inventory = make_inventory(gpus.facts, configuration, gpus.numa)
    return KubernetesNode("nvml", gpus.facts, inventory, gpus.hardware, gpus.scores)


def _read_wsl(settings: Settings, configuration: Configuration) -> KubernetesNode:
    node = read_wsl_facts(settings, ()).node
    path = node.container_path if node else _DXG
    try:
        facts = read_host_facts(settings)
    except HostError as error:  # the one device stands for all GPUs
        device = PluginDevice("all", "all", "all", "all", (path,), error="" if node else f"the host has no {_DXG}")
        notes = (f"{error.message}; all GPUs are offered as one",)
        return KubernetesNode("wsl", HostFacts(), Inventory((Resource(GPU_RESOURCE, (device,), "wsl"),), notes))
    return KubernetesNode("wsl", facts, make_inventory(facts, configuration, wsl_node=path))


def _read_vfio(settings: Settings, configuration: Configuration) -> KubernetesNode:
    roots = find_roots(settings)
    try:
        facts = read_vfio_facts(roots)
    except HostError as error:
        return KubernetesNode("", HostFacts(), Inventory(reason=error.message))
    addresses = [item.function.address for item in facts.candidates]
    numa = {address: read_place(roots.sys, normal_bus_id(address)).numa for address in addresses}
    resource = configuration.options.vfio_resource
    functions = [item.function for item in facts.candidates if not item.is_switch]
    machines = tuple(function for function in functions if function.driver in VFIO_DRIVERS)
    return KubernetesNode(
        "vfio", HostFacts(), make_vfio_inventory(facts, resource, read_names(resource), numa), machines=machines
    )


def carry_over(before: Inventory, now: Inventory) -> Inventory:
    """Return the inventory with the devices of lost or removed GPUs, as unhealthy ones.

    Both inventories are of the same configuration.  To the kubelet a device that is left out never existed, and a lost
    GPU no longer reports its MIG devices.  MIG devices that are gone from a healthy GPU were removed on purpose: they
    are left out.
    """
    well = {device.gpu for resource in now.resources for device in resource.devices if not device.error}
    errors = {device.gpu: device.error for resource in now.resources for device in resource.devices if device.error}
    old_ids = {(resource.name, device.id) for resource in before.resources for device in resource.devices}
    old_gpus = {device.gpu for resource in before.resources for device in resource.devices}
    resources = {}
    for resource in now.resources:
        kept = [
            device
            for device in resource.devices
            if device.gpu in well or device.gpu not in old_gpus or (resource.name, device.id) in old_ids
        ]
        resources[resource.name] = resource._replace(devices=tuple(kept))
    for old in before.resources:
        current = resources.get(old.name, old._replace(devices=()))
        present = {device.id for device in current.devices}
        lost = [
            device._replace(error=errors.get(device.gpu, GONE))
            for device in old.devices
            if device.gpu not in well and device.id not in present
        ]
        resources[old.name] = current._replace(devices=(*current.devices, *lost))
    offered = tuple(resource for resource in resources.values() if resource.devices)
    return now._replace(resources=offered, reason="" if offered else now.reason)
