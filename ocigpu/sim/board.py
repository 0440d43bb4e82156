"""The PCI bus of a simulated host without a driver: functions that answer to a reset, or fail to.

Lines of DIR/faults make failures, a word and an address each: ``reset-ignored`` (nothing happens), ``reset-refused``
(the kernel forbids it), ``link-lost`` (the GPU does not come back), ``config-lost`` (it does not take its configuration
back), ``boot-stuck``, ``scrub-stuck``, ``registers-hidden``.  Time does not go by: a wait ends at once.
"""

import errno
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ocigpu.gpus.vfio import reset
from ocigpu.gpus.vfio.bus import COMMAND, PciBus
from ocigpu.sim.driverless import EXPRESS
from ocigpu.sim.made import read_faults

READINGS = 3
"""A register says that something is done when it is read so often."""


class SimBus(PciBus):
    """The bus of the simulated host in a directory."""

    def __init__(self, directory: str) -> None:
        super().__init__(f"{directory}/sys")
        self.directory = directory
        self._time = 0.0
        self._lost: set[str] = set()
        self._was_reset: set[str] = set()
        self._reads: dict[tuple[str, int], int] = {}

    def sleep(self, seconds: float) -> None:
        self._time += seconds

    def now(self) -> float:
        return self._time

    def write(self, bdf: str, name: str, text: str) -> None:
        if name == "driver/unbind":
            self._bind(bdf, "")
        else:
            super().write(bdf, name, text)

    def probe(self, bdf: str) -> None:
        """Bind a function to the driver in its driver_override, if that exists."""
        driver = self.read(bdf, "driver_override")
        if not self.driver(bdf) and os.path.isdir(f"{self.sys}/bus/pci/drivers/{driver}"):
            self._bind(bdf, driver)

    def _bind(self, bdf: str, driver: str) -> None:
        link, drivers = self.path(bdf, "driver"), f"{self.sys}/bus/pci/drivers"
        if before := self.driver(bdf):
            os.unlink(f"{drivers}/{before}/{bdf}")
            os.unlink(link)
        if driver:
            device = os.path.realpath(self.path(bdf, ""))
            os.symlink(os.path.relpath(device, f"{drivers}/{driver}"), f"{drivers}/{driver}/{bdf}")
            os.symlink(os.path.relpath(f"{drivers}/{driver}", device), link)

    def read_config(self, bdf: str, offset: int, size: int) -> int:
        port = self._port(bdf)
        if bdf in self._lost or (port and super().read_config(port, reset.BRIDGE_CONTROL, 2) & reset.BUS_RESET):
            return (1 << 8 * size) - 1
        return super().read_config(bdf, offset, size)

    def write_config(self, bdf: str, offset: int, size: int, value: int) -> None:
        below = [bdf] if self._is_endpoint(bdf) else self._below(bdf)
        faults = {word for one in below for word in self._faults(one)}
        if "reset-refused" in faults:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), self.path(bdf, "config"))
        if bdf in self._lost or ("config-lost" in faults and self._is_endpoint(bdf) and bdf in self._was_reset):
            return
        before = super().read_config(bdf, offset, size)
        if self._is_endpoint(bdf):
            if offset == EXPRESS + reset.DEVICE_CONTROL and value & reset.START_FLR:
                value &= ~reset.START_FLR
                if "reset-ignored" not in faults:
                    self._clear(bdf)
        elif offset == reset.BRIDGE_CONTROL and "reset-ignored" in faults:
            value &= ~reset.BUS_RESET
        elif offset == EXPRESS + reset.SLOT_STATUS:  # bits that are written are cleared
            value = before & ~value
        super().write_config(bdf, offset, size, value)
        if offset == reset.BRIDGE_CONTROL and not self._is_endpoint(bdf):
            self._follow(bdf, bool(before & reset.BUS_RESET), bool(value & reset.BUS_RESET), faults)

    def _follow(self, port: str, was: bool, now: bool, faults: set[str]) -> None:
        """Let the link and the devices behind the port follow the reset bit."""
        if was == now:
            return
        status = super().read_config(port, EXPRESS + reset.LINK_STATUS, 2) & ~reset.LINK_ACTIVE
        up = not now and "link-lost" not in faults
        super().write_config(port, EXPRESS + reset.LINK_STATUS, 2, status | (reset.LINK_ACTIVE if up else 0))
        events = super().read_config(port, EXPRESS + reset.SLOT_STATUS, 2) | 1 << 8
        super().write_config(port, EXPRESS + reset.SLOT_STATUS, 2, events)
        for bdf in self._below(port) if was else ():
            self._clear(bdf)
            if not up:
                self._lost.add(bdf)

    def _clear(self, bdf: str) -> None:
        """Put a function's registers to their defaults."""
        self._was_reset.add(bdf)
        super().write_config(bdf, COMMAND, 2, 0)
        for offset in range(0x10, 0x28, 4):
            super().write_config(bdf, offset, 4, 0)
        super().write_config(bdf, 0x3C, 1, 0)
        super().write_config(bdf, 0x108, 4, 8 << 8 | 1 << 5 | 1)  # BAR 1 of 256 MiB
        super().write_config(bdf, EXPRESS + reset.DEVICE_CONTROL, 2, 0)
        for offset in self._progress(bdf):
            self._set_register(bdf, offset, 0)
            self._reads.pop((bdf, offset), None)

    @contextmanager
    def _mapped(self, bdf: str) -> Iterator[Callable[[int], int]]:
        progress = self._progress(bdf)
        with super()._mapped(bdf) as read:

            def answer(offset: int) -> int:
                faults = self._faults(bdf)
                if "registers-hidden" in faults:
                    return 0xBADF1100
                if offset in progress and not read(offset):
                    done, fault = progress[offset]
                    self._reads[bdf, offset] = self._reads.get((bdf, offset), 0) + 1
                    if self._reads[bdf, offset] >= READINGS and fault not in faults:
                        self._set_register(bdf, offset, done)
                return read(offset)

            yield answer

    def _progress(self, bdf: str) -> dict[int, tuple[int, str]]:
        """Return the registers that show the start-up: their value after it, and the fault that prevents it."""
        family = reset.find_family(int(self.read(bdf, "device"), 16))
        found = {family.scrub: (1, "scrub-stuck")} if family else {}
        if family and family.boot:
            found[family.boot[0]] = (family.boot[1], "boot-stuck")
        return found

    def _set_register(self, bdf: str, offset: int, value: int) -> None:
        with open(self.path(bdf, "resource0"), "r+b") as file:
            file.seek(offset)
            file.write(struct.pack("<I", value))

    def _faults(self, bdf: str) -> set[str]:
        words = [line.split() for line in read_faults(self.directory)]
        return {word for word, *where in words if where == [bdf]}

    def _is_endpoint(self, bdf: str) -> bool:
        return not self.read(bdf, "class").startswith("0x0604")

    def _port(self, bdf: str) -> str:
        name = os.path.realpath(self.path(bdf, "")).split("/")[-2]
        return name if os.path.exists(self.path(name, "config")) else ""

    def _below(self, port: str) -> list[str]:
        names = os.listdir(os.path.realpath(self.path(port, "")))
        return [name for name in names if os.path.exists(self.path(name, "resource0"))]
