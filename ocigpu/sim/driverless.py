"""A simulated host without NVIDIA's driver: its GPUs are bound to vfio-pci, to be given to virtual machines.

A baseboard of up to eight GPUs, each alone behind a port of the root complex, and for boards with NVSwitches those four
behind one PCIe switch, all of them and its management function in one IOMMU group, as on some makers' boards.  Module
ids are not in PCI order.  ``ocigpu.sim.board`` lets these functions answer to a reset.
"""

import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ocigpu.gpus.vfio.identity import BOARDS, INVERTED, PIN_BIT, PINS
from ocigpu.gpus.vfio.reset import find_family
from ocigpu.sim.files import pci_regions, read_tables, write_file, write_files
from ocigpu.sim.models import CPUS_OF_NODE, SimGpu, numa_node, sim_error
from ocigpu.sim.nodes import NVSWITCHES, SimNode, free_majors, make_nodes

MODULES = (2, 4, 3, 1, 7, 5, 8, 6)
"""Module ids of the GPUs by PCI order."""
FIRST_GROUP = 112
SWITCH_GROUP = 140
BOOT_0 = 0x180000A1
"""The word that names the chip, at offset 0 of its registers."""
REGISTERS = 16 << 20
EXPRESS = 0x78
"""Where the PCI Express capability of simulated functions is."""
GPU, NVSWITCH, BRIDGE, MANAGEMENT = 0x030200, 0x068000, 0x060400, 0x058000
CONFIG_SIZE = 4096


class SimFunction(NamedTuple):
    """A function of the simulated bus: ``above``: addresses of the bridges it is behind, from the root complex on."""

    bdf: str
    above: tuple[str, ...]
    pci_class: int
    ids: tuple[int, int, int, int]
    driver: str
    group: int
    node: int = 0
    secondary: int = 0
    gpu: SimGpu | None = None

    @property
    def directory(self) -> str:
        return "/".join(("sys/devices/pci0000:00", *self.above, self.bdf))


def check_driverless(gpus: Sequence[SimGpu]) -> None:
    """Raise OcigpuError (OCIGPU-SIM-1) for GPUs that one baseboard cannot have."""
    if len(gpus) > len(MODULES):
        raise sim_error(f"{len(gpus)} GPUs without a driver: a baseboard has at most {len(MODULES)}")
    if any(gpu.mig_enabled for gpu in gpus):
        raise sim_error("MIG devices need a driver", "leave out --mig or --driver none")


def module_of(gpu: SimGpu) -> int:
    """Return the module id of a GPU."""
    return MODULES[gpu.index]


def serial_of(gpu: SimGpu) -> str:
    """Return the serial number of a GPU's board."""
    return f"16522309{gpu.model.device_id % 100:02d}{gpu.index:03d}"


def write_driverless(root: Path, gpus: Sequence[SimGpu], *, iommufd: bool, real: bool | None) -> dict[str, Any]:
    """Write /sys, /dev/vfio and /proc/devices below ``root``; return their part of the marker."""
    functions = list(plan_functions(gpus))
    vfio, cdevs, misc = free_majors()[:3]
    nodes = [SimNode("dev/vfio/vfio", misc, 196)]
    write_file(root / "sys/class/misc/vfio/dev", f"{misc}:196\n", 0o444)
    given = [one for one in functions if one.driver == "vfio-pci"]
    for number, group in enumerate(sorted({one.group for one in given})):
        write_file(root / f"sys/class/vfio/{group}/dev", f"{vfio}:{number}\n", 0o444)
        nodes.append(SimNode(f"dev/vfio/{group}", vfio, number, 0o600))
    for one in functions:
        _write_function(root, one)
    if iommufd:
        nodes.append(SimNode("dev/iommu", misc, 124))
        for number, one in enumerate(given):
            write_file(root / f"{one.directory}/vfio-dev/vfio{number}/dev", f"{cdevs}:{number}\n", 0o444)
            nodes.append(SimNode(f"dev/vfio/devices/vfio{number}", cdevs, number, 0o600))
    table = read_tables()["majors"]
    characters = sorted([*table["character"], [vfio, "vfio"], *([[cdevs, "vfio-dev"]] if iommufd else [])])
    lines = ["Character devices:", *(f"{number:3d} {name}" for number, name in characters)]
    write_file(root / "proc/devices", "\n".join([*lines, "", "Block devices:"]) + "\n", 0o444)
    nodes_made = make_nodes(root, nodes, real=real)
    return {"nodes": "real" if nodes_made else "stand-in", "majors": {"vfio": vfio, "vfio-dev": cdevs}}


def plan_functions(gpus: Sequence[SimGpu]) -> Iterable[SimFunction]:
    """Yield every function of the bus, bridges before the functions behind them."""
    for gpu in gpus:
        node = numa_node(gpu.index, len(gpus))
        port, bus = f"0000:00:01.{gpu.index}", int(gpu.bus_id.split(":")[1], 16)
        yield SimFunction(port, (), BRIDGE, (0x8086, 0x352A, 0, 0), "pcieport", 20 + gpu.index, node, bus)
        ids = (0x10DE, gpu.model.device_id, 0x10DE, gpu.model.subsystem_id)
        yield SimFunction(gpu.bus_id, (port,), GPU, ids, "vfio-pci", FIRST_GROUP + gpu.index, node, gpu=gpu)
    if gpus[0].model.has_nvswitch_nodes:
        yield from _plan_switches()


def _plan_switches() -> Iterable[SimFunction]:
    port, upstream = "0000:00:02.0", "0000:c0:00.0"
    packet_switch = (0x11F8, 0x4128, 0x15D9, 0)
    yield SimFunction(port, (), BRIDGE, (0x8086, 0x352A, 0, 0), "pcieport", 30, 1, 0xC0)
    yield SimFunction(upstream, (port,), BRIDGE, packet_switch, "pcieport", SWITCH_GROUP, 1, 0xC1)
    yield SimFunction("0000:c0:00.1", (port,), MANAGEMENT, packet_switch, "vfio-pci", SWITCH_GROUP, 1)
    for number in range(NVSWITCHES):
        down, bus = f"0000:c1:0{number}.0", 0xC2 + number
        yield SimFunction(down, (port, upstream), BRIDGE, packet_switch, "pcieport", SWITCH_GROUP, 1, bus)
        ids, above = (0x10DE, 0x22A3, 0x10DE, 0x1796), (port, upstream, down)
        yield SimFunction(f"0000:{bus:02x}:00.0", above, NVSWITCH, ids, "vfio-pci", SWITCH_GROUP, 1)


def _write_function(root: Path, one: SimFunction) -> None:
    device = root / one.directory
    ids = zip(("vendor", "device", "subvendor", "subsystem"), (f"{number:#06x}" for number in one.ids), strict=True)
    cpus = f"{one.node * CPUS_OF_NODE}-{(one.node + 1) * CPUS_OF_NODE - 1}"
    override = "vfio-pci" if one.driver == "vfio-pci" else "(null)"
    own = {"directory": one.directory, "class": f"{one.pci_class:#08x}", "node": one.node, "cpus": cpus}
    write_files(root, "function", {**dict(ids), **own, "override": override})
    write_file(device / "config", bridge_config(one) if one.secondary else endpoint_config(one))
    if one.pci_class in (GPU, NVSWITCH):
        write_file(device / "reset", "", 0o200)
        write_file(device / "reset_method", "flr bus\n" if one.gpu else "bus\n")
    if one.gpu:
        write_file(device / "resource", pci_regions(one.gpu) + "\n", 0o444)
        _write_registers(device / "resource0", one.gpu)
    _link(root / f"sys/bus/pci/devices/{one.bdf}", device)
    _link(root / f"sys/bus/pci/drivers/{one.driver}/{one.bdf}", device)
    _link(device / "driver", root / f"sys/bus/pci/drivers/{one.driver}")
    group = root / f"sys/kernel/iommu_groups/{one.group}"
    _link(group / "devices" / one.bdf, device)
    _link(device / "iommu_group", group)


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))


def _write_registers(path: Path, gpu: SimGpu) -> None:
    """Write the registers of a GPU that has booted; a hole in the file is registers that read zero."""
    words = {0: BOOT_0}
    if family := find_family(gpu.model.device_id):
        words |= {family.scrub: 1, **(dict([family.boot]) if family.boot else {})}
    if gpu.model.subsystem_id in BOARDS.get(gpu.model.device_id, ()):
        bits = (module_of(gpu) - 1) ^ INVERTED
        words |= {offset: (bits >> bit & 1) << PIN_BIT for bit, offset in enumerate(PINS)}
    with path.open("wb") as file:
        file.truncate(REGISTERS)
        for offset, word in words.items():
            file.seek(offset)
            file.write(struct.pack("<I", word))
    path.chmod(0o600)


def endpoint_config(one: SimFunction) -> bytes:
    """Return the configuration space of a GPU or NVSwitch: header type 0, power management and PCI Express."""
    space = _header(one, 0x00)
    starts = [0] * 3
    if one.gpu:
        struct.pack_into("<III", space, 0x100, 0x0001_0015, 0x1FF << 4, 17 << 8 | 1 << 5 | 1)  # BAR 1 has 128 GiB
        starts = [
            int(line.split()[0], 16) for line in pci_regions(one.gpu).splitlines()[:4] if int(line.split()[0], 16)
        ]
    struct.pack_into("<IQQ", space, 0x10, *starts)
    struct.pack_into("<HH", space, 0x2C, *one.ids[2:])
    struct.pack_into("<BBHII", space, EXPRESS, 0x10, 0, 0x0002, 1 << 28, 0x2910)  # endpoint; can reset by itself
    return bytes(space)


def bridge_config(one: SimFunction) -> bytes:
    """Return the configuration space of a port: header type 1, a slot whose plugging is watched, a link that is up."""
    space = _header(one, 0x01)
    space[0x18:0x1B] = bytes((int(one.bdf.split(":")[1], 16), one.secondary, one.secondary))
    struct.pack_into("<BBH", space, EXPRESS, 0x10, 0, 0x0142)
    struct.pack_into("<I", space, EXPRESS + 0x0C, 1 << 20)  # tells whether its link is up
    struct.pack_into("<HHIHH", space, EXPRESS + 0x10, 0, 0x3105, 0x40, 0x1028, 0x0040)
    return bytes(space)


def _header(one: SimFunction, kind: int) -> bytearray:
    vendor, device = one.ids[:2]
    space = bytearray(CONFIG_SIZE)
    struct.pack_into("<HHHH", space, 0, vendor, device, 0x0006, 0x0010)
    space[8:12] = bytes((0xA1, *one.pci_class.to_bytes(3, "little")))
    space[0x0E], space[0x34] = kind, 0x60
    space[0x60:0x64] = bytes((0x01, EXPRESS, 0x03, 0x00))
    return space


def describe_module(gpu: SimGpu) -> dict[str, Any]:
    """Return the marker's facts about a GPU beside its model."""
    return {"module_id": module_of(gpu), "serial": serial_of(gpu), "group": FIRST_GROUP + gpu.index}
