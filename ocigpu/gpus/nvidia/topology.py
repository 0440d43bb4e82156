"""How GPUs are connected: a score for each pair, and the NUMA node of each.

The scores are those of NVIDIA's plugin: how far up their common ancestor on the PCI bus is, and 100 for each NVLink.
Where NVML does not tell, the PCI paths of sysfs do.  Read once and kept: allocation must not wait for a GPU.
"""

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ocigpu.core.errors import printable
from ocigpu.core.facts import Gpu
from ocigpu.gpus.on_node import Hardware
from ocigpu.gpus.tree import normal_bus_id, read_text, sysfs_address

BOARD, SWITCH, SWITCHES, HOST_BRIDGE, SAME_CPU, OTHER_CPU = 60, 50, 40, 30, 20, 10
NVLINK = 100
LEVELS = {0: BOARD, 10: SWITCH, 20: SWITCHES, 30: HOST_BRIDGE, 40: SAME_CPU, 50: OTHER_CPU}
"""By nvmlGpuTopologyLevel_t."""
_BEHIND_ONE_SWITCH = 2  # a port of the switch and the GPU


class GpuPlace(NamedTuple):
    """Where a GPU is: the bridges above it from the root of its PCI domain to itself (() unknown), its NUMA node.

    ``cpus``: those near it, as the kernel lists them ("0-31,64-95"), "" unknown.
    """

    path: tuple[str, ...] = ()
    numa: int = -1
    cpus: str = ""


def read_places(sys: str, gpus: Sequence[Gpu]) -> dict[str, GpuPlace]:
    """Return the places of GPUs by UUID, from <sys>/bus/pci/devices (sysfs-bus-pci of the kernel's ABI documents)."""
    return {gpu.uuid: read_place(sys, gpu.bus_id) for gpu in gpus if gpu.uuid}


def read_place(sys: str, bus_id: str) -> GpuPlace:
    """Return the place of a PCI function; one that sysfs does not know has none, and no NUMA node is -1."""
    directory = f"{sys}/bus/pci/devices/{sysfs_address(bus_id)}"
    if not os.path.isdir(directory):
        return GpuPlace()
    number = (read_text(f"{directory}/numa_node", 64) or "").strip()
    _, _, below = os.path.realpath(directory).rpartition("/devices/")
    path = below.split("/") if below.startswith("pci") else ()
    cpus = printable((read_text(f"{directory}/local_cpulist", 4096) or "").strip())
    return GpuPlace(tuple(path), int(number) if number.isdigit() else -1, cpus)


def numa_nodes(places: Mapping[str, GpuPlace]) -> dict[str, int]:
    """Return the NUMA nodes of the GPUs that have one."""
    return {uuid: place.numa for uuid, place in places.items() if place.numa >= 0}


class Connection(NamedTuple):
    """How two GPUs are connected: the score of their PCI paths (BOARD to OTHER_CPU), and how many NVLinks."""

    level: int
    links: int


def read_connections(places: Mapping[str, GpuPlace], hardware: Hardware) -> dict[tuple[str, str], Connection]:
    """Return how each two GPUs are connected, by their UUIDs in both orders."""
    found = {}
    for one, two in itertools.combinations(places, 2):
        level = hardware.levels.get((one, two))
        score = LEVELS[level] if level in LEVELS else path_score(places[one], places[two])
        found[one, two] = found[two, one] = Connection(score, _links(hardware, one, two))
    return found


def pair_scores(places: Mapping[str, GpuPlace], hardware: Hardware) -> dict[tuple[str, str], int]:
    """Return how well each two GPUs are connected, by their UUIDs in both orders."""
    found = read_connections(places, hardware)
    return {pair: level + NVLINK * links for pair, (level, links) in found.items()}


def path_score(one: GpuPlace, two: GpuPlace) -> int:
    """Return the score of two GPUs from where they are on the PCI bus."""
    common = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one.path, two.path, strict=False))))
    if common > 1:
        near = max(len(one.path), len(two.path)) - common <= _BEHIND_ONE_SWITCH
        return SWITCH if near else SWITCHES
    if common == 1:
        return HOST_BRIDGE
    return SAME_CPU if one.numa == two.numa >= 0 else OTHER_CPU


def _links(hardware: Hardware, one: str, two: str) -> int:
    """Return the NVLinks between two GPUs: direct ones, and those to switches, which connect everybody."""
    first, second = hardware.gpus.get(one), hardware.gpus.get(two)
    if not first or not second:
        return 0
    address = normal_bus_id(second.bus_id)
    direct = sum(count for bus_id, count in first.links.items() if address and normal_bus_id(bus_id) == address)
    return direct + min(first.switch_links, second.switch_links)
