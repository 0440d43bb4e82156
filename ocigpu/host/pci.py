"""GPUs as the PCI bus and the DRM subsystem show them in sysfs (sysfs-bus-pci of the kernel's ABI documents)."""

import os

from ocigpu.host.tree import list_names, read_text, small_number

NVIDIA_VENDOR = 0x10DE
DISPLAY_CLASS = 0x03


def count_gpus(sys: str) -> int:
    """Return how many NVIDIA display controllers are on the PCI bus: vendor 0x10de, base class 0x03."""
    count = 0
    devices = f"{sys}/bus/pci/devices"
    for name in list_names(devices):
        vendor = _hexadecimal(read_text(f"{devices}/{name}/vendor", 64))
        if vendor == NVIDIA_VENDOR:
            count += _hexadecimal(read_text(f"{devices}/{name}/class", 64)) >> 16 == DISPLAY_CLASS
    return count


def _hexadecimal(text: str | None) -> int:
    try:
        return int((text or "").strip()[:16], 16)
    except ValueError:
        return 0


def sysfs_names(bus_id: str) -> tuple[str, str]:
    """Return the names that sysfs may use for a bus id: a domain of four digits, of eight when it needs more."""
    return bus_id.removeprefix("0000"), bus_id


def read_drm_numbers(sys: str, bus_id: str) -> tuple[tuple[str, int, int], ...]:
    """Return (name, major, minor) of the card and render nodes of a GPU, e.g. ("renderD128", 226, 128)."""
    for name in sysfs_names(bus_id):
        directory = f"{sys}/bus/pci/devices/{name}/drm"
        names = [entry for entry in list_names(directory) if entry.startswith(("card", "renderD"))]
        found = []
        for entry in names:
            major, _, minor = (read_text(f"{directory}/{entry}/dev", 64) or "").strip().partition(":")
            if small_number(major) > 0 and small_number(minor) >= 0:
                found.append((entry, small_number(major), small_number(minor)))
        if found or os.path.isdir(directory):
            return tuple(found)
    return ()
