"""Configuration space and registers of PCI functions, as sysfs shows them to root.

Sources: sysfs-bus-pci of the kernel's ABI documents (config, resource<N>, power/control), PCI Local Bus Specification
3.0 section 6.1 (headers), PCI Express Base Specification section 7.5.3 (its capability).
"""

import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

COMMAND = 0x04
MEMORY_ENABLE = 0x02
HEADER_TYPE = 0x0E
CAPABILITIES = 0x34
PCI_EXPRESS = 0x10
"""The capability's number."""


class PciBus:
    """The functions below a sysfs; each call raises OSError.

    A simulated host has one that lets its functions answer (:mod:`ocigpu.sim.board`).
    """

    def __init__(self, sys: str = "/sys") -> None:
        self.sys = sys

    def path(self, bdf: str, name: str) -> str:
        """Return the path of a file of a function in sysfs."""
        return f"{self.sys}/bus/pci/devices/{bdf}/{name}"

    def read_config(self, bdf: str, offset: int, size: int) -> int:
        """Return a number of 1, 2 or 4 bytes of configuration space."""
        fd = os.open(self.path(bdf, "config"), os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(fd, size, offset)
        finally:
            os.close(fd)
        return int.from_bytes(data.ljust(size, b"\xff"), "little")

    def write_config(self, bdf: str, offset: int, size: int, value: int) -> None:
        """Write such a number."""
        fd = os.open(self.path(bdf, "config"), os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(fd, value.to_bytes(size, "little"), offset)
        finally:
            os.close(fd)

    def write(self, bdf: str, name: str, text: str) -> None:
        """Write to a file of a function, e.g. "1" to its ``reset``."""
        Path(self.path(bdf, name)).write_text(text, encoding="ascii")

    def read(self, bdf: str, name: str) -> str:
        """Return the content of a small file of a function, "" if it does not exist."""
        try:
            return Path(self.path(bdf, name)).read_text(encoding="ascii", errors="replace").strip()
        except FileNotFoundError:
            return ""

    def driver(self, bdf: str) -> str:
        """Return the driver that has a function, "" for none."""
        try:
            return os.readlink(self.path(bdf, "driver")).rpartition("/")[2]
        except FileNotFoundError:
            return ""

    def probe(self, bdf: str) -> None:
        """Let the kernel find a driver for a function that has none (drivers_probe)."""
        Path(f"{self.sys}/bus/pci/drivers_probe").write_text(bdf, encoding="ascii")

    def sleep(self, seconds: float) -> None:
        """Let time go by."""
        time.sleep(seconds)

    def now(self) -> float:
        """Return a time that only grows, in seconds."""
        return time.monotonic()

    def find_capability(self, bdf: str, number: int) -> int:
        """Return the offset of a capability in configuration space, 0 for none."""
        offset, seen = self.read_config(bdf, CAPABILITIES, 1) & 0xFC, set[int]()
        while offset >= 0x40 and offset not in seen:
            if self.read_config(bdf, offset, 1) == number:
                return offset
            seen.add(offset)
            offset = self.read_config(bdf, offset + 1, 1) & 0xFC
        return 0

    def find_extended(self, bdf: str, number: int) -> int:
        """Return the offset of an extended capability (PCI Express 7.6.3), 0 for none."""
        offset, seen = 0x100, set[int]()
        while offset >= 0x100 and offset not in seen:
            header = self.read_config(bdf, offset, 4)
            if header & 0xFFFF == number:
                return offset
            seen.add(offset)
            offset = header >> 20 & 0xFFC
        return 0

    @contextmanager
    def awake(self, bdf: str) -> Iterator[None]:
        """Keep a function awake until the end: vfio-pci lets an unused one sleep."""
        control = self.read(bdf, "power/control")
        if control:
            self.write(bdf, "power/control", "on")
        try:
            yield
        finally:
            if control:
                self.write(bdf, "power/control", control)

    @contextmanager
    def registers(self, bdf: str) -> Iterator[Callable[[int], int]]:
        """Yield a reader of 32-bit registers of BAR 0, by offset; no other process may use the function meanwhile.

        It is kept awake and answers memory accesses until the end; then both are as before.
        """
        with self.awake(bdf):
            command = self.read_config(bdf, COMMAND, 2)
            try:
                self.write_config(bdf, COMMAND, 2, command | MEMORY_ENABLE)
                with self._mapped(bdf) as read:
                    yield read
            finally:
                self.write_config(bdf, COMMAND, 2, command)

    @contextmanager
    def _mapped(self, bdf: str) -> Iterator[Callable[[int], int]]:
        fd = os.open(self.path(bdf, "resource0"), os.O_RDONLY | os.O_CLOEXEC)
        try:
            area = mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)
        with area, memoryview(area) as octets, octets.cast("I") as words:  # an item is one access of 32 bits
            yield lambda offset: int(words[offset // 4])
