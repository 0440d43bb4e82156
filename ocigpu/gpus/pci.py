"""GPUs as the PCI bus and the DRM subsystem show them in sysfs (sysfs-bus-pci of the kernel's ABI documents)."""

import os

from ocigpu.core.errors import HostError
from ocigpu.core.record import NamedTuple
from ocigpu.gpus.tree import list_names, read_text, small_number, sysfs_address

NVIDIA_VENDOR = 0x10DE
DISPLAY_CLASS = 0x03
DRM_MAJOR = 226
"""Of card and render nodes (Documentation/admin-guide/devices.txt)."""
BRIDGE_CLASS = 0x0604
"""A bridge between two PCI buses."""


def _hexadecimal(text: str | None) -> int:
    try:
        return int((text or "").strip()[:18], 16)
    except ValueError:
        return 0


def find_group(address: str, sys: str) -> int:
    """Return the number of the IOMMU group of a function, -1 for none (sysfs-kernel-iommu_groups)."""
    try:
        return small_number(os.readlink(f"{sys}/bus/pci/devices/{address}/iommu_group").rpartition("/")[2])
    except OSError:  # no IOMMU, or it is off
        return -1


def read_drm_numbers(sys: str, bus_id: str) -> tuple[tuple[str, int, int], ...]:
    """Return (name, major, minor) of the card and render nodes of a GPU, e.g. ("renderD128", 226, 128)."""
    return read_drm_directory(f"{sys}/bus/pci/devices/{sysfs_address(bus_id)}/drm")


def read_drm_directory(directory: str, notes: "list[str] | None" = None) -> tuple[tuple[str, int, int], ...]:
    """Return (name, major, minor) of the card and render nodes in a device's ``drm`` directory of sysfs.

    With ``notes`` a number that cannot be read is a note, and that of the name: DRM counts both alike (drm_sysfs.c).
    Otherwise it raises HostError (OCIGPU-HOST-3).
    """
    found = []
    for entry in list_names(directory):
        if not entry.startswith(("card", "renderD")):
            continue
        try:
            number = read_number(f"{directory}/{entry}/dev")
        except HostError as error:
            if notes is None:
                raise
            notes.append(error.message)
            minor = small_number(entry.removeprefix("card").removeprefix("renderD"))
            number = (DRM_MAJOR, minor) if minor >= 0 else None
        if number is not None:
            found.append((entry, *number))
    return tuple(found)


def read_number(path: str) -> tuple[int, int] | None:
    """Return (major, minor) in a ``dev`` file of sysfs, None without one that names a number."""
    major, _, minor = (read_text(path, 64) or "").strip().partition(":")
    numbers = small_number(major), small_number(minor)
    return numbers if numbers[0] > 0 and numbers[1] >= 0 else None


REGION_TYPE, REGION_64_BIT = 0x6, 0x4
"""Of the flags of a region: what a memory region's base address is (PCI Local Bus Specification, 6.2.5.1)."""
MAX_REGION = 1 << 52


def read_addressable(sys: str, address: str) -> int:
    """Return the bytes of a function's 64-bit memory regions, up to the next power of two, 0 for none.

    As NVIDIA's drivers for virtual machines count them (go-nvlib, GetTotalAddressableMemory): the first six lines of
    ``resource`` (sysfs-bus-pci) are start, end and flags of a region.
    """
    lines = (read_text(f"{sys}/bus/pci/devices/{address}/resource", 4096) or "").splitlines()[:6]
    total = 0
    for start, end, flags in (map(_hexadecimal, words) for words in map(str.split, lines) if len(words) == 3):
        if flags & REGION_TYPE == REGION_64_BIT and 0 < end - start < MAX_REGION:
            total += end - start + 1
    return 1 << (total - 1).bit_length() if total else 0


class Function(NamedTuple):
    """One function on the PCI bus: ``address`` as sysfs writes it ("0000:3b:00.0"), numbers of the bus, its driver.

    ``base_class``: the upper 16 bits of the class, e.g. 0x0302.  ``driver``: "" for none.
    """

    address: str
    vendor: int
    device: int
    base_class: int
    driver: str

    @property
    def text(self) -> str:
        """The function as people write it, "0000:3b:00.0 (10de:2330)"."""
        return f"{self.address} ({self.vendor:04x}:{self.device:04x})"


def read_function(sys: str, address: str, vendor: int = 0) -> Function | None:
    """Return the function at an address, from sysfs; None if it does not exist or is not of this vendor."""
    directory = f"{sys}/bus/pci/devices/{address}"
    found = _hexadecimal(read_text(f"{directory}/vendor", 64))
    if not found or vendor not in (0, found):
        return None
    try:
        driver = os.readlink(f"{directory}/driver").rpartition("/")[2]
    except OSError:  # no driver is bound
        driver = ""
    device = _hexadecimal(read_text(f"{directory}/device", 64))
    return Function(address, found, device, _hexadecimal(read_text(f"{directory}/class", 64)) >> 8, driver)


def read_functions(sys: str, vendor: int) -> tuple[Function, ...]:
    """Return every function of a vendor on the PCI bus, by address."""
    addresses = list_names(f"{sys}/bus/pci/devices")
    return tuple(filter(None, (read_function(sys, address, vendor) for address in addresses)))


def read_gpus(sys: str) -> tuple[Function, ...]:
    """Return NVIDIA's display controllers on the PCI bus, whatever their driver."""
    return tuple(item for item in read_functions(sys, NVIDIA_VENDOR) if item.base_class >> 8 == DISPLAY_CLASS)


def bound_addresses(sys: str, driver: str) -> list[str]:
    """Return the sorted addresses of the functions bound to a PCI driver; cheaper than reading all functions."""
    return [name for name in list_names(f"{sys}/bus/pci/drivers/{driver}") if ":" in name and name[:1].isalnum()]
