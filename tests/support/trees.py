"""Small trees that stand for a host's /sys, /dev and files, written from a table.

A regular file stands for a device node: where a host is simulated, readers take it for one.
"""

import os
import struct
from pathlib import Path

from ocigpu.core.settings import Settings

Tree = dict[str, str | bytes]


def write_tree(root: Path, entries: Tree) -> Settings:
    """Write files below the root and return settings of a simulated host there.

    A text that starts with "-> " makes a symbolic link, a path that ends in "/" a directory.
    """
    for path, text in entries.items():
        target = root / path.lstrip("/")
        if path.endswith("/"):
            target.mkdir(parents=True, exist_ok=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(text, bytes):
            target.write_bytes(text)
        elif text.startswith("-> "):
            os.symlink(text.removeprefix("-> "), target)
        else:
            target.write_text(text)
    return Settings(simulation_root=str(root))


def pci_function(address: str, ids: str, base_class: str, driver: str = "", group: str = "") -> Tree:
    """Return the entries of a PCI function: ids "10de:2330", class "0302", bound driver, IOMMU group."""
    directory = f"/sys/bus/pci/devices/{address}"
    vendor, device = ids.split(":")
    entries: Tree = {
        f"{directory}/vendor": f"0x{vendor}\n",
        f"{directory}/device": f"0x{device}\n",
        f"{directory}/class": f"0x{base_class}00\n",
    }
    if driver:
        entries[f"{directory}/driver"] = f"-> ../../../../bus/pci/drivers/{driver}"
        entries[f"/sys/bus/pci/drivers/{driver}/{address}/"] = ""
    if group:
        entries[f"{directory}/iommu_group"] = f"-> ../../../../kernel/iommu_groups/{group}"
        entries[f"/sys/kernel/iommu_groups/{group}/devices/{address}/"] = ""
    return entries


def drm_entries(directory: str, card: int, render: int) -> Tree:
    """Return the entries of a device's DRM nodes in sysfs and in /dev."""
    return {
        f"{directory}/drm/card{card}/dev": f"226:{card}\n",
        f"{directory}/drm/renderD{render}/dev": f"226:{render}\n",
        f"/dev/dri/card{card}": "",
        f"/dev/dri/renderD{render}": "",
    }


def shared_object(soname: str) -> bytes:
    """Return the least of a 64-bit shared object that has a SONAME (elf(5))."""
    strings = b"\0" + soname.encode() + b"\0"
    start = 64 + 2 * 56
    dynamic = struct.pack("<6q", 14, 1, 5, start + 48, 0, 0)  # DT_SONAME, DT_STRTAB, DT_NULL
    size = start + len(dynamic) + len(strings)
    header = b"\x7fELF\2\1\1" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, 183, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 4, 0, 0, 0, size, size, 4096)
    table = struct.pack("<IIQQQQQQ", 2, 4, start, start, start, len(dynamic), len(dynamic), 8)
    return header + load + table + dynamic + strings
