"""NVIDIA functions that are handed to virtual machines: VFIO drivers, IOMMU groups, their nodes.

Sources: Documentation/driver-api/vfio.rst and iommufd.rst of the kernel, sysfs-bus-pci and
sysfs-kernel-iommu_groups of its ABI documents; /sys/bus/pci/devices/<address>/vfio-dev/vfio<N> is there for a function
that a VFIO driver has when the kernel makes character devices for single functions (CONFIG_VFIO_DEVICE_CDEV, 6.6).
"""

from ocigpu.core.facts import DeviceNode, Permissions
from ocigpu.core.record import NamedTuple
from ocigpu.core.settings import Settings
from ocigpu.gpus.fingerprint import digest
from ocigpu.gpus.nodes import NodeReader
from ocigpu.gpus.pci import (
    NVIDIA_VENDOR,
    Function,
    bound_addresses,
    find_group,
    read_function,
    read_functions,
    read_number,
)
from ocigpu.gpus.tree import Roots, find_roots, list_names, node_tree, small_number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ocigpu.gpus.vendors import Fingerprint

GPU_CLASSES = (0x0300, 0x0302)
"""VGA and 3D controllers."""
SWITCH_CLASS = 0x0680
"""Other bridge: an NVSwitch, up to Hopper."""
VFIO_DRIVERS = ("vfio-pci", "nvgrace_gpu_vfio_pci", "nvgrace-gpu-vfio-pci")
MAX_GROUP = 256

_PRIVATE = Permissions(0o600)


def leaves_group(driver: str) -> bool:
    """Tell whether a driver, "" for none, may have other functions of a group that is given away.

    It leaves DMA to the group's user (driver_managed_dma in the kernel), as all do with "vfio" in their name.
    """
    return driver in ("", "pcieport", "pci-stub") or "vfio" in driver


class Candidate(NamedTuple):
    """A GPU or NVSwitch: ``group``: number of its IOMMU group, -1 for none; ``cdev``: N of its vfio<N>, -1 for none.

    ``node``: /dev/vfio/devices/vfio<N>, None when it is not there.
    """

    function: Function
    group: int
    cdev: int = -1
    node: DeviceNode | None = None

    @property
    def is_switch(self) -> bool:
        return self.function.base_class == SWITCH_CLASS


class Group(NamedTuple):
    """An IOMMU group: all its functions, and /dev/vfio/<number>, None when it is not there."""

    number: int
    functions: tuple[Function, ...]
    node: DeviceNode | None = None


class VfioFacts(NamedTuple):
    """NVIDIA's GPUs and NVSwitches, by address, whatever their driver; the groups of those that VFIO has.

    ``container_node``: /dev/vfio/vfio.  ``iommufd``: the host has /dev/iommu.
    """

    candidates: tuple[Candidate, ...] = ()
    groups: tuple[Group, ...] = ()
    container_node: DeviceNode | None = None
    iommufd: bool = False
    notes: tuple[str, ...] = ()


class GroupMembers(NamedTuple):
    """Addresses of the GPUs and NVSwitches of an IOMMU group, which only one virtual machine can have."""

    gpus: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()


def group_members(facts: VfioFacts, address: str) -> GroupMembers:
    """Return what shares the IOMMU group of a function, itself included; nothing for one in no group."""
    group = next((item.group for item in facts.candidates if item.function.address == address), -1)
    found = [item for item in facts.candidates if item.group == group >= 0]
    switches = tuple(item.function.address for item in found if item.is_switch)
    return GroupMembers(tuple(item.function.address for item in found if not item.is_switch), switches)


def read_vfio_facts(roots: Roots) -> VfioFacts:
    """Return the functions that can be passed to virtual machines, from sysfs and /dev; needs no privilege.

    Raises HostError (OCIGPU-HOST-3) when a file of sysfs exists but cannot be read.
    """
    return _read(roots, [item for item in read_functions(roots.sys, NVIDIA_VENDOR) if _is_candidate(item)])


def _read(roots: Roots, functions: list[Function]) -> VfioFacts:
    tree = node_tree(roots)
    reader = NodeReader(tree)
    candidates = tuple(_read_candidate(roots.sys, function, reader) for function in functions)
    numbers = {item.group for item in candidates if item.group >= 0 and item.function.driver in VFIO_DRIVERS}
    groups = tuple(_read_group(roots.sys, number, reader) for number in sorted(numbers))
    container_node = _read_node(f"{roots.sys}/class/misc/vfio/dev", "/dev/vfio/vfio", reader)
    iommufd = bool(tree.find("/dev/iommu"))
    return VfioFacts(candidates, groups, container_node, iommufd, tuple(reader.notes))


def _is_candidate(function: Function) -> bool:
    return function.base_class in (*GPU_CLASSES, SWITCH_CLASS)


def _read_candidate(sys: str, function: Function, reader: NodeReader) -> Candidate:
    directory = f"{sys}/bus/pci/devices/{function.address}"
    group = find_group(function.address, sys)
    for name in list_names(f"{directory}/vfio-dev"):
        number = small_number(name.removeprefix("vfio"))
        if number >= 0:
            path = f"/dev/vfio/devices/vfio{number}"
            return Candidate(function, group, number, _read_node(f"{directory}/vfio-dev/{name}/dev", path, reader))
    return Candidate(function, group)


def _read_group(sys: str, number: int, reader: NodeReader) -> Group:
    addresses = list_names(f"{sys}/kernel/iommu_groups/{number}/devices")[:MAX_GROUP]
    functions = tuple(filter(None, (read_function(sys, address) for address in addresses)))
    return Group(number, functions, _read_node(f"{sys}/class/vfio/{number}/dev", f"/dev/vfio/{number}", reader))


def _read_node(number_path: str, path: str, reader: NodeReader) -> DeviceNode | None:
    """Return a node that the host has; None when it has not: nothing but VFIO itself can make it usable."""
    number = read_number(number_path)
    node = reader.read(path, *number, _PRIVATE) if number else reader.read_existing(path)
    return node if node is not None and node.host_path else None


def read_vfio_fingerprint(settings: Settings) -> "Fingerprint":
    """Return pairs that change when functions are bound to VFIO or taken from it, or groups or nodes change."""
    roots = find_roots(settings)
    addresses = sorted({address for driver in VFIO_DRIVERS for address in bound_addresses(roots.sys, driver)})
    functions = filter(None, (read_function(roots.sys, address, NVIDIA_VENDOR) for address in addresses))
    facts = _read(roots, [function for function in functions if _is_candidate(function)])
    nodes = [item.node for item in facts.candidates] + [group.node for group in facts.groups] + [facts.container_node]
    members = ((group.number, each) for group in facts.groups for each in group.functions)
    return (
        ("gpus", digest(f"{item.function.text} {item.group} {item.cdev}" for item in facts.candidates)),
        ("groups", digest(f"{number} {each.text} {each.driver}" for number, each in members)),
        ("nodes", digest(f"{node.container_path} {node[1:]}" for node in nodes if node)),
        ("iommufd", "yes" if facts.iommufd else "no"),
    )
