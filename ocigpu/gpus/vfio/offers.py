"""GPUs for virtual machines: ``ocigpu cdi generate --mode vfio``, kind nvidia.com/pgpu.

For Kata Containers: a device is an IOMMU group that is bound to VFIO drivers (/dev/vfio/vfio and /dev/vfio/<group>,
named by the group's number), or, where the host has /dev/iommu and nodes for single functions, one function
(/dev/vfio/devices/vfio<N>, named N).  These names are also the ids of NVIDIA's device plugin for sandboxes, as Kata
wants it: it forms CDI names from the resource's name and the device's id.  With the class "nvswitch" the devices are
the NVSwitches instead of the GPUs.

That plugin writes CDI 0.5.0 for Kata, and so does this source unless another version is requested.  Such a file has no
annotations, so it cannot be checked against the host.
"""

from typing import TYPE_CHECKING, NamedTuple

from ocigpu.core.actions import AllowDevice, Node
from ocigpu.core.errors import CdiError
from ocigpu.core.facts import DeviceNode
from ocigpu.core.settings import Settings
from ocigpu.gpus.offer import DeviceOffer, GenerateOptions, OfferedDevice, select_ids
from ocigpu.gpus.tree import find_roots
from ocigpu.gpus.vfio.facts import VFIO_DRIVERS, Candidate, Group, VfioFacts, leaves_group, read_vfio_facts

if TYPE_CHECKING:
    from ocigpu.core.actions import Action

KATA_VERSION = "0.5.0"
SWITCHES = "nvswitch"
MAX_REASONS = 4


class _Given(NamedTuple):
    """A device, named by its number; ``functions`` are its GPUs or NVSwitches."""

    number: int
    node: DeviceNode
    functions: tuple[Candidate, ...]


def offer(options: GenerateOptions, settings: Settings) -> DeviceOffer:
    """Return the GPUs (or NVSwitches) of the host that VFIO drivers have.

    Raises CdiError (OCIGPU-CDI-7) when there is none that can be given, or for a device id that none has, and HostError
    (OCIGPU-HOST-3) for a file of sysfs that cannot be read.
    """
    return offer_functions(read_vfio_facts(find_roots(settings)), options)


def offer_functions(facts: VfioFacts, options: GenerateOptions) -> DeviceOffer:
    """Return the offer of these facts; raises CdiError (OCIGPU-CDI-7) as :func:`offer` does.  Pure."""
    device_class = options.device_class or "pgpu"
    switches = device_class == SWITCHES
    what = "NVSwitch" if switches else "GPU"
    groups = {group.number: group for group in facts.groups}
    skipped: list[str] = []
    usable: list[Candidate] = []
    for item in facts.candidates:
        if item.is_switch == switches:
            reason = _why_unusable(item, groups)
            if reason:
                skipped.append(f"{what} {item.function.text} {reason}")
            else:
                usable.append(item)
    single = facts.iommufd and all(item.cdev >= 0 for item in usable)
    given = _single_functions(usable, skipped, what) if single else _whole_groups(usable, groups, skipped, what, facts)
    ids = [(str(device.number), *(item.function.address for item in device.functions)) for device in given]
    if given:
        given = [given[position] for position in select_ids(options.device_ids, ids, "VFIO device")]
    if not given:
        more = f"; and {len(skipped) - MAX_REASONS} more" if len(skipped) > MAX_REASONS else ""
        why = "; ".join(skipped[:MAX_REASONS]) + more or f"no {what} is on the PCI bus"
        hint = "Bind it and all of its IOMMU group, e.g.: driverctl set-override ADDRESS vfio-pci" if skipped else ""
        raise CdiError("OCIGPU-CDI-7", f"no {what} for virtual machines: {why}", hint)
    # both are written into each device, as NVIDIA's plugin does: some readers look at devices only
    api = () if single or facts.container_node is None else (facts.container_node,)
    return DeviceOffer(
        source="vfio",
        vendor=options.vendor or "nvidia.com",
        device_class=device_class,
        devices=tuple(_device(device, api) for device in given),
        groups=False,
        notes=(*facts.notes, *_notes(facts, given, single, switches)),
        skipped=tuple(skipped),
        max_version=KATA_VERSION,
    )


def _why_unusable(item: Candidate, groups: dict[int, Group]) -> str:
    """Return why a function cannot be given, as the rest of a sentence; "" when it can."""
    driver = item.function.driver
    if driver not in VFIO_DRIVERS:
        return f"is not bound to vfio-pci, but to {driver or 'no driver'}"
    if item.group < 0:
        return "is in no IOMMU group: the host's IOMMU is off"
    for function in groups[item.group].functions:
        if not leaves_group(function.driver):
            return f"is in IOMMU group {item.group}, of which {function.text} is bound to {function.driver}"
    return ""


def _single_functions(usable: list[Candidate], skipped: list[str], what: str) -> list[_Given]:
    given = []
    for item in usable:
        if item.node is None:
            skipped.append(f"{what} {item.function.text} has no node /dev/vfio/devices/vfio{item.cdev}")
        else:
            given.append(_Given(item.cdev, item.node, (item,)))
    return sorted(given, key=lambda device: device.number)


def _whole_groups(
    usable: list[Candidate], groups: dict[int, Group], skipped: list[str], what: str, facts: VfioFacts
) -> list[_Given]:
    given = []
    for number in sorted({item.group for item in usable}):
        items = tuple(item for item in usable if item.group == number)
        group = groups[number]
        names = ", ".join(item.function.text for item in items)
        missing = "" if group.node and facts.container_node else f"/dev/vfio/{number if not group.node else 'vfio'}"
        others = [each for each in facts.candidates if each.group == number and each.is_switch != items[0].is_switch]
        if missing:
            skipped.append(f"{what} {names} cannot be opened: the host has no {missing}")
        elif others and items[0].is_switch:  # a group goes to one machine, with the GPU
            skipped.append(f"{what} {names} is passed with the GPU {others[0].function.text}, by IOMMU group {number}")
        elif group.node:
            given.append(_Given(number, group.node, items))
    return given


def _device(device: _Given, api: tuple[DeviceNode, ...]) -> OfferedDevice:
    nodes = (*api, device.node)
    actions: list[Action] = [Node(node, "") for node in nodes]
    actions += [AllowDevice(node.major, node.minor, "rwm", "") for node in nodes]
    return OfferedDevice(str(device.number), tuple(actions))


def _notes(facts: VfioFacts, given: list[_Given], single: bool, switches: bool) -> list[str]:
    parts = [f"{each.number} is {' and '.join(item.function.text for item in each.functions)}" for each in given]
    notes = [f"devices are named by {'VFIO device' if single else 'IOMMU group'}: {'; '.join(parts)}"]
    counts: dict[int, list[int]] = {}
    for device in given if single else ():
        counts.setdefault(device.functions[0].group, []).append(device.number)
    for group, numbers in counts.items():
        if len(numbers) > 1:
            names = ", ".join(map(str, numbers))
            notes.append(f"devices {names} share IOMMU group {group}: they can only go to the same virtual machine")
    ready = [item for item in facts.candidates if item.is_switch and item.function.driver in VFIO_DRIVERS]
    if ready and not switches:
        notes.append(f"NVSwitches that are bound to VFIO too: {len(ready)}; --class {SWITCHES} selects them")
    return notes
