"""Hand-made hosts: trees of small files below a directory, with libraries written byte by byte."""

import os
import stat
import struct
from pathlib import Path

from support.machine import MACHINE, TRIPLET

from ocigpu.core.settings import Settings

VERSION = "550.163.01"
MACHINES = {"x86_64": (62, 3), "aarch64": (183, 40)}
NATIVE = MACHINES[MACHINE]


def elf_bytes(soname: str, bits: int = 64, machine: int = 0, kind: int = 3) -> bytes:
    """A shared object of nothing but headers, a dynamic section and its string table."""
    machine = machine or NATIVE[bits == 32]
    strings = b"\0" + soname.encode() + b"\0"
    tags = [(14, 1)] if soname else []
    if bits == 64:
        header_size, program_size, entry = 64, 56, "<qQ"
    else:
        header_size, program_size, entry = 52, 32, "<iI"
    dynamic_offset = header_size + 2 * program_size
    count = len(tags) + 2
    strings_offset = dynamic_offset + count * struct.calcsize(entry)
    base = 0x1000
    dynamic = b"".join(struct.pack(entry, *tag) for tag in [*tags, (5, base + strings_offset), (0, 0)])
    total = strings_offset + len(strings)
    ident = b"\x7fELF" + bytes([2 if bits == 64 else 1, 1, 1]) + bytes(9)
    if bits == 64:
        header = ident + struct.pack("<HHIQQQIHHHHHH", kind, machine, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
        load = struct.pack("<IIQQQQQQ", 1, 4, 0, base, base, total, total, 4096)
        size = len(dynamic)
        program = struct.pack("<IIQQQQQQ", 2, 4, dynamic_offset, base + dynamic_offset, 0, size, size, 8)
    else:
        header = ident + struct.pack("<HHIIIIIHHHHHH", kind, machine, 1, 0, 52, 0, 0, 52, 32, 2, 0, 0, 0)
        load = struct.pack("<8I", 1, 0, base, base, total, total, 4, 4096)
        size = len(dynamic)
        program = struct.pack("<8I", 2, dynamic_offset, base + dynamic_offset, 0, size, size, 4, 4)
    return header + load + program + dynamic + strings


def cache_bytes(entries: list[tuple[str, str, int]], old: bool = False) -> bytes:
    """A loader cache with (SONAME, path, flags) entries, with the old table in front when asked."""
    table = b""
    offset = 48 + 24 * len(entries)
    packed = b""
    for soname, path, flags in entries:
        key = offset + len(table)
        table += soname.encode() + b"\0"
        value = offset + len(table)
        table += path.encode() + b"\0"
        packed += struct.pack("<iIIIQ", flags, key, value, 0, 0)
    new = b"glibc-ld.so.cache1.1" + struct.pack("<II", len(entries), len(table)) + bytes(20) + packed + table
    if not old:
        return new
    front = b"ld.so-1.7.0\0" + struct.pack("<I", 3) + bytes(36)
    return front + bytes(-len(front) % 8) + new


class HostTree:
    """A host below ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cache: list[tuple[str, str, int]] = []
        self.flags = {"x86_64": (0x0303, 0x0003), "aarch64": (0x0A03, 0x0903)}[MACHINE]

    @property
    def settings(self) -> Settings:
        return Settings(simulation_root=str(self.root))

    def write(self, path: str, content: str | bytes = "", mode: int = 0o644) -> Path:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else content.encode())
        target.chmod(mode)
        return target

    def link(self, path: str, target: str) -> None:
        link = self.root / path.lstrip("/")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)

    def node(self, path: str, major: int, minor: int, mode: int = 0o666) -> None:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        os.mknod(target, stat.S_IFCHR | mode, os.makedev(major, minor))
        target.chmod(mode)

    def library(
        self, name: str, soname: str = "", directory: str = f"/usr/lib/{TRIPLET}", bits: int = 64, cached: bool = True
    ) -> Path:
        """Write a library, the link of its SONAME, and remember it for the cache."""
        soname = soname or name
        path = self.write(f"{directory}/{name}", elf_bytes(soname, bits), 0o755)
        if soname != name:
            self.link(f"{directory}/{soname}", name)
        if cached:
            self.cache.append((soname, f"{directory}/{soname}", self.flags[bits == 32]))
        return path

    def write_cache(self, extra: int = 0) -> None:
        others = [
            (f"libother{number}.so.1", f"/usr/lib/{TRIPLET}/libother{number}.so.1", self.flags[0])
            for number in range(extra)
        ]
        self.write("/etc/ld.so.cache", cache_bytes([*others, *self.cache]))

    def driver(self, version: str = VERSION, gpus: int = 2, nvml: Path | None = None) -> "HostTree":
        """Lay out a kernel module with GPUs and the libraries of a small driver."""
        self.write("/proc/driver/nvidia/version", f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Tue\n")
        self.write(
            "/proc/driver/nvidia/params",
            "ResmanDebugLevel: 4294967295\nDeviceFileUID: 0\nDeviceFileGID: 0\nDeviceFileMode: 438\n",
        )
        self.write("/proc/driver/nvidia/registry", 'Binary: ""\n')
        self.write(
            "/proc/devices",
            "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n235 nvidia-caps\n510 nvidia-uvm\n\n"
            "Block devices:\n  8 sd\n300 nvidia-block\n",
        )
        for index in range(gpus):
            self.gpu(index, gpus - 1 - index)
        library = self.library(f"libnvidia-ml.so.{version}", "libnvidia-ml.so.1")
        if nvml:
            library.write_bytes(nvml.read_bytes())
        self.library(f"libcuda.so.{version}", "libcuda.so.1")
        self.library(f"libnvidia-eglcore.so.{version}")
        self.write_cache()
        return self

    def gpu(self, index: int, minor: int, extra: str = "") -> None:
        name = f"0000:{0x10 + index:02x}:00.0"
        self.write(
            f"/proc/driver/nvidia/gpus/{name}/information",
            f"Model: \t\t Fake GPU\nIRQ:   \t\t 18\nGPU UUID: \t GPU-{index:08d}-0000-0000-0000-000000000000\n"
            f"Bus Type: \t PCIe\nBus Location: \t {name}\nDevice Minor: \t {minor}\n{extra}",
        )
