"""Moves GPUs between their driver and VFIO's: with their whole IOMMU group, and back to the original state.

The kernel assigns a group to one owner only, so everything in it except bridges moves too.  A driver is chosen by
driver_override, because the kernel's first match may be another driver than before.  NVIDIA's driver waits in the
kernel, without limit, until no process has the GPU open, so that is checked before.  Sources: sysfs-bus-pci of the
kernel's ABI documents (driver_override, unbind, drivers_probe), vfio.rst.
"""

import os
from collections.abc import Iterable
from typing import NamedTuple

from ocigpu.core.errors import HostError
from ocigpu.gpus.nvidia.devices import GPU_MAJOR
from ocigpu.gpus.nvidia.procfs import find_gpu_major, parse_devices, read_proc_gpus
from ocigpu.gpus.pci import BRIDGE_CLASS, find_group, read_drm_numbers, read_function
from ocigpu.gpus.tree import Roots, list_names, normal_bus_id, read_text
from ocigpu.gpus.vfio.bus import PciBus
from ocigpu.gpus.vfio.facts import GPU_CLASSES, VFIO_DRIVERS, leaves_group
from ocigpu.gpus.vfio.holders import Holder, make_node, read_holders

VARIANTS = dict.fromkeys((0x2340, 0x2940, 0x31C0), "nvgrace_gpu_vfio_pci")
"""VFIO drivers of their own, by device ids & 0xffc0: GH200, GB200, GB300, whose memory is the processor's, too.

The module is nvgrace-gpu-vfio-pci, its driver has underscores.  Source: nvgrace_gpu_vfio_pci_table and KBUILD_MODNAME
in drivers/vfio/pci/nvgrace-gpu/main.c of the kernel.
"""


class DriverOfFunction(NamedTuple):
    """A function and who had it: its driver, "" for none, and its driver_override, "" for none."""

    bdf: str
    driver: str
    override: str


def _error(bdf: str, why: str, hint: str | None = None) -> HostError:
    return HostError("OCIGPU-VFIO-8", f"GPU {bdf}: its driver cannot be changed: {why}", hint)


def plan_switch(bdf: str, roots: Roots, bus: PciBus) -> tuple[DriverOfFunction, ...]:
    """Return the functions that go to VFIO with a GPU, itself among them, as they are now; nothing is changed.

    Raises HostError (OCIGPU-VFIO-8) if the group contains a device of another board.
    """
    gpu = read_function(roots.sys, bdf)
    number = find_group(bdf, roots.sys)
    if gpu is None or number < 0:
        raise _error(bdf, "it is in no IOMMU group: the host's IOMMU is off" if gpu else "no such function")
    if bus.read(bdf, "sriov_numvfs") not in ("", "0"):
        raise _error(bdf, "it has virtual functions")
    found = []
    for name in list_names(f"{roots.sys}/kernel/iommu_groups/{number}/devices"):
        function = read_function(roots.sys, name)
        if function is None or function.base_class == BRIDGE_CLASS:
            continue
        free = leaves_group(function.driver)
        if name != bdf and function.base_class in GPU_CLASSES and not free:
            raise _error(bdf, f"its IOMMU group {number} has another GPU, {name}")
        if name.rpartition(".")[0] != bdf.rpartition(".")[0] and not free:
            text = f"its IOMMU group {number} has {function.text} of another board, bound to {function.driver}"
            raise _error(bdf, text)
        if name == bdf or not free:
            override = bus.read(name, "driver_override")
            found.append(DriverOfFunction(name, function.driver, "" if override == "(null)" else override))
    return tuple(found)


def give_to_vfio(functions: Iterable[DriverOfFunction], roots: Roots, bus: PciBus, proc: str = "/proc") -> None:
    """Let VFIO have these functions; those that it has stay.  Raises HostError (OCIGPU-VFIO-8)."""
    for one in functions:
        function = read_function(roots.sys, one.bdf)
        if function is None:
            raise _error(one.bdf, "no such function")
        wanted = VARIANTS.get(function.device & 0xFFC0, "vfio-pci")
        if function.driver in VFIO_DRIVERS:
            continue
        if not os.path.isdir(f"{roots.sys}/bus/pci/drivers/{wanted}"):
            raise _error(one.bdf, f"the driver {wanted} is not loaded", f"modprobe {wanted}")
        if function.base_class in GPU_CLASSES and (users := read_users(one.bdf, roots, proc)):
            who = ", ".join(f"process {each.pid} ({each.command}) has {each.path} open" for each in users[:4])
            hint = "For nvidia-persistenced: nvidia-smi -i ADDRESS --persistence-mode=0"
            raise _error(one.bdf, who, hint)
        _bind(one.bdf, wanted, wanted, bus)


def give_back(functions: Iterable[DriverOfFunction], bus: PciBus) -> None:
    """Rebind these functions to their original drivers; has no effect if they were not moved.

    Raises HostError (OCIGPU-VFIO-8).
    """
    for one in reversed(tuple(functions)):
        if os.path.exists(bus.path(one.bdf, "class")):  # or it is gone, and everybody's
            _bind(one.bdf, one.driver, one.override, bus)


def _bind(bdf: str, driver: str, override: str, bus: PciBus) -> None:
    """Bind a function to a driver, "" for none; ``override``: its driver_override afterwards."""
    try:
        if bus.driver(bdf) != driver:
            bus.write(bdf, "driver_override", f"{driver}\n")
            if bus.driver(bdf):
                bus.write(bdf, "driver/unbind", bdf)
            if driver:
                bus.probe(bdf)
        if bus.read(bdf, "driver_override") not in (override, "" if override else "(null)"):
            bus.write(bdf, "driver_override", f"{override}\n")
    except OSError as error:
        raise _error(bdf, f"{error.filename or bdf}: {error.strerror}") from error
    if bus.driver(bdf) != driver:
        raise _error(bdf, f"{driver} did not take it: it has {bus.driver(bdf) or 'no driver'}", "See the kernel's log.")


def read_users(bdf: str, roots: Roots, proc: str = "/proc") -> tuple[Holder, ...]:
    """Return the processes that have a GPU open by the nodes of NVIDIA's driver and the kernel's DRM.

    Raises HostError (OCIGPU-VFIO-1) if some processes could not be inspected.
    """
    majors = dict(parse_devices(read_text(f"{roots.proc}/devices") or ""))
    major = find_gpu_major(majors, GPU_MAJOR)
    nodes = [
        make_node(f"/dev/nvidia{gpu.minor}", (major, gpu.minor), roots)
        for gpu in read_proc_gpus(f"{roots.proc}/driver/nvidia")
        if gpu.bus_id == normal_bus_id(bdf) and gpu.minor >= 0
    ]
    nodes += [
        make_node(f"/dev/dri/{name}", (major, minor), roots)
        for name, major, minor in read_drm_numbers(roots.sys, normal_bus_id(bdf))
    ]
    return read_holders(bdf, roots, proc, tuple(nodes)) if nodes else ()
