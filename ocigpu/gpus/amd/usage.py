"""What amdgpu's files say of a GPU at work, and KFD's topology of the links between GPUs.

Sources: Documentation/gpu/amdgpu/driver-misc.rst (mem_info_vram_*) and thermal.rst (gpu_busy_percent, hwmon) of the
kernel.  Memory is of the whole GPU: nothing is said of partitions, which share these files.
drivers/gpu/drm/amd/amdkfd, kfd_topology.c (nodes/N/io_links/M/properties) and kfd_crat.c: a link of type 11 is XGMI,
its weight is 15 for each hop, its least bandwidth that of one link, and its greatest that of all.  Before Linux 5.14,
and for GPUs before the MI200, both bandwidths are 0.
"""

from ocigpu.core.errors import HostError
from ocigpu.core.facts import HostFacts
from ocigpu.core.settings import Settings
from ocigpu.gpus.amd.facts import MAX_TOPOLOGY, TOPOLOGY, find_node, parse_numbers, read_properties
from ocigpu.gpus.tree import find_roots, list_names, read_or_skip, read_text, sysfs_address
from ocigpu.gpus.usage import Usage
from ocigpu.gpus.vendors import GpuLink


def read_usage(settings: Settings, facts: HostFacts) -> tuple[Usage, ...]:
    """Return what the GPUs of these facts do; which processes do it is not said here.  Needs no privilege."""
    devices = f"{find_roots(settings).sys}/bus/pci/devices"
    addresses = [gpu.bus_id for gpu in facts.gpus]
    found = []
    for gpu in facts.gpus:
        if addresses.count(gpu.bus_id) > 1:
            continue
        directory = f"{devices}/{sysfs_address(gpu.bus_id)}"
        sensors = [f"{directory}/hwmon/{name}" for name in list_names(f"{directory}/hwmon")[:1]]
        found.append(
            Usage(
                gpu.uuid,
                read_gauge(f"{directory}/gpu_busy_percent"),
                read_gauge(f"{directory}/mem_info_vram_used", 1 << 20),
                read_gauge(f"{directory}/mem_info_vram_total", 1 << 20),
                next((read_gauge(f"{sensor}/power1_average", 10**6) for sensor in sensors), None),
                next((read_gauge(f"{sensor}/temp1_input", 1000) for sensor in sensors), None),
            )
        )
    return tuple(found)


def read_gauge(path: str, unit: int = 1) -> int | None:
    """Return the number in a file of amdgpu in this unit; None for no such file, or one that cannot be read now."""
    try:
        text = (read_text(path, 64) or "").strip()
    except HostError:  # EPERM while the GPU sleeps
        return None
    return int(text) // unit if text.isascii() and text.isdigit() else None


XGMI = 11
ONE_HOP = 15


def read_links(settings: Settings, facts: HostFacts) -> tuple[GpuLink, ...]:
    """Return the direct XGMI links between two GPUs each; needs no privilege."""
    sys = find_roots(settings).sys
    minors = {gpu.minor: gpu.uuid for gpu in facts.gpus if gpu.minor >= 0}
    nodes = {name: find_node(values) for name, values in read_properties(sys).items()}
    names = {name: minors[node.render_minor] for name, node in nodes.items() if node and node.render_minor in minors}
    found = {}
    for name, uuid in names.items():
        links = f"{sys}/{TOPOLOGY}/{name}/io_links"
        for number in list_names(links)[:MAX_TOPOLOGY]:
            link = parse_numbers(read_or_skip(f"{links}/{number}/properties") or "")
            other = names.get(str(link.get("node_to")), uuid)
            if link.get("type") == XGMI and link.get("weight") == ONE_HOP and other != uuid:
                least = link.get("min_bandwidth", 0)
                count = max(1, link.get("max_bandwidth", 0) // least if least else 1)
                found[tuple(sorted((uuid, other)))] = count
    return tuple(GpuLink(one, two, "XGMI", count) for (one, two), count in found.items())
