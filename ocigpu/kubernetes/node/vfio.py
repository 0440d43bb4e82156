"""Resources of GPUs for virtual machines, as Kata Containers takes them.

Kata asks the kubelet which devices a pod has, and looks for CDI devices called <resource name>=<device id>: so resource
and device have the names of the CDI specification that ``ocigpu cdi generate --mode vfio`` makes from the same facts.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from ocigpu.core.actions import Node
from ocigpu.core.errors import CdiError
from ocigpu.gpus.offer import GenerateOptions, OfferedDevice
from ocigpu.gpus.pci import NVIDIA_VENDOR
from ocigpu.gpus.tree import normal_bus_id, sysfs_address
from ocigpu.gpus.vfio.facts import Candidate, VfioFacts, group_members
from ocigpu.gpus.vfio.offers import SWITCHES, offer_functions
from ocigpu.kubernetes.node.devices import Inventory, PluginDevice, Resource
from ocigpu.kubernetes.node.sharing import DOMAIN, MAX_NAME
from ocigpu.system.files import read_regular

BY_MODEL = "model"
SWITCH_RESOURCE = f"{DOMAIN}{SWITCHES}"
PCI_IDS = ("/usr/share/misc/pci.ids", "/usr/share/hwdata/pci.ids", str(Path(__file__).with_name("pci-names.txt")))
"""Lists of PCI ids; the last one is ours, for hosts and images that have none."""
MAX_PCI_IDS = 16 << 20


def make_vfio_inventory(
    facts: VfioFacts, resource: str, names: Mapping[int, str] | None = None, numa: Mapping[str, int] | None = None
) -> Inventory:
    """Return the GPUs that VFIO has as nvidia.com/<resource>, the NVSwitches as nvidia.com/nvswitch.

    ``resource`` "model": a resource for each model, by its name in ``names`` (PCI device id to text), else by its id in
    four digits.  ``numa``: NUMA nodes by PCI address.
    """
    notes: dict[str, None] = dict.fromkeys(facts.notes)
    resources = []
    for name, part in _parts(facts, resource, names or {}).items():
        try:
            offered = offer_functions(part, GenerateOptions(mode="vfio", device_class=name))
        except CdiError as error:
            notes[error.message] = None
            continue
        notes.update(dict.fromkeys((*offered.notes, *offered.skipped)))
        devices = tuple(_device(device, part, numa or {}) for device in offered.devices)
        resources.append(Resource(f"{DOMAIN}{name}", devices, "vfio"))
    reason = "" if resources else "; ".join(notes) or "no GPU is on the PCI bus"
    return Inventory(tuple(resources), tuple(notes), reason)


def model_class(text: str) -> str:
    """Return a model's name as part of a resource name: "GH100 [H100 SXM5 80GB]" is GH100_H100_SXM5_80GB."""
    name = re.sub(r"\s+", "_", re.sub(r"[./]", "_", text.upper()))
    return re.sub(r"[^A-Z0-9_-]", "", name).strip("_-")[: MAX_NAME - len(DOMAIN)].strip("_-")


def read_names(resource: str) -> dict[int, str]:
    """Return the names that resources have by their models, {} where all GPUs are in one resource."""
    return read_model_names() if resource == BY_MODEL else {}


def read_model_names(paths: tuple[str, ...] = PCI_IDS) -> dict[int, str]:
    """Return NVIDIA's PCI devices by id from the first list of PCI ids that exists (pci.ids(5)); {} without one."""
    for path in paths:
        try:
            lines = read_regular(path, MAX_PCI_IDS).decode(errors="replace").splitlines()
        except OSError:  # not installed, or another kind of file
            continue
        return _names_of_vendor(lines, f"{NVIDIA_VENDOR:04x} ")
    return {}


def _names_of_vendor(lines: list[str], vendor: str) -> dict[int, str]:
    names = {}
    inside = False
    for line in lines:
        if line[:1] not in ("\t", "#", ""):
            inside = line.lower().startswith(vendor)
        elif inside and (found := re.match(r"\t([0-9a-fA-F]{4})\s+(\S.*)", line)):
            names[int(found[1], 16)] = found[2].strip()
    return names


def _parts(facts: VfioFacts, resource: str, names: Mapping[int, str]) -> dict[str, VfioFacts]:
    """Return the facts about each resource by the last part of its name; an IOMMU group is in one only."""
    parts: dict[str, list[Candidate]] = {}
    owners: dict[int, str] = {}
    for item in facts.candidates:
        if item.is_switch:
            continue
        name = resource
        if resource == BY_MODEL:
            device = item.function.device
            name = model_class(names.get(device, "")) or f"{device:04x}"
            name = owners.setdefault(item.group, name) if item.group >= 0 else name
        parts.setdefault(name, []).append(item)
    switches = [item for item in facts.candidates if item.is_switch]
    found = {name: facts._replace(candidates=(*items, *switches)) for name, items in parts.items()}
    return found | ({SWITCHES: facts} if switches else {})


def _device(device: OfferedDevice, facts: VfioFacts, numa: Mapping[str, int]) -> PluginDevice:
    paths = tuple(action.node.container_path for action in device.actions if isinstance(action, Node))
    single = paths[-1].startswith("/dev/vfio/devices/")
    found = [item for item in facts.candidates if str(item.cdev if single else item.group) == device.name]
    members = [item for item in found if not item.is_switch] or found
    nodes = {numa.get(item.function.address, -1) for item in members}
    gpus = tuple(item.function.address for item in members)
    node = nodes.pop() if len(nodes) == 1 else -1
    group = group_members(facts, gpus[0])
    return PluginDevice(device.name, device.name, gpus[0], device.name, paths, node, gpus=gpus, group=group)


def vfio_names(facts: VfioFacts) -> dict[str, str]:
    """Return the PCI addresses of the GPUs that may go to virtual machines, by the names of their devices."""
    addresses = (item.function.address for item in facts.candidates if not item.is_switch)
    return {vfio_name(address): address for address in addresses}


def vfio_name(address: str) -> str:
    """Return the name of the device that is the GPU at an address for a virtual machine."""
    return name_at("gpu-vfio", address)


def name_at(what: str, address: str) -> str:
    """Return a name made from a PCI address: it stays when another GPU is lost, and numbers do not."""
    return "-".join([what, *re.split("[:.]", sysfs_address(normal_bus_id(address)))])
