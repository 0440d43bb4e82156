"""Module ids of GPUs without a driver: the slot on the baseboard of the function at a PCI address.

Fabric Manager identifies GPUs by this number only (its "physical id"), and PCI order is not module order on any known
board.  There are four sources: this node's own table, the board controller's slots by serial number, a driver (in a
virtual machine for checks), and three pins in the GPU's registers.  They are compared; if two differ, there is no
answer.  What hardware has yet to confirm: that Redfish's GPU_SXM_<n>, the pins' number plus one and the driver's module
id are the same number (as documents of all three say), and the pins themselves (PINS, BOARDS).
"""

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from ocigpu.core.errors import HostError, OcigpuError
from ocigpu.gpus.tree import Roots
from ocigpu.gpus.vfio.bus import PciBus
from ocigpu.gpus.vfio.facts import VFIO_DRIVERS, read_vfio_facts
from ocigpu.gpus.vfio.holders import claim, read_holders
from ocigpu.system.files import open_regular, read_bounded, replace_path, why_replaceable, why_untrusted

TABLE = "/var/lib/ocigpu/module-ids.json"
"""Where a node keeps its table."""
FORMAT = 1
MAX_TABLE = 1 << 20
MODULES = range(1, 17)
"""Eight modules of a baseboard; A100 boards strapped as "top" count from 9 (Fabric Manager User Guide 2.3)."""
PINS = (0x21224, 0x21244, 0x21248)
"""Hopper's words of the pins that tell bits 0, 1 and 2; bit 14 of each (NVIDIA/gpu-admin-tools 82422cc, MIT)."""
PIN_BIT = 14
INVERTED = 4
"""What the number of these boards is XORed with."""
BOARDS = {
    0x2330: (0x16C0, 0x16C1, 0x2044, 0x20C1),
    0x2335: (0x18BE, 0x18BF),
    0x2329: (0x198B, 0x198C),
    0x2324: (0x17A6, 0x17A8),
}
"""PCI device and subsystem ids of boards whose pins are known, of the same tool: H100, H200, H20, H800."""


class ModuleReading(NamedTuple):
    """The answer of one source: the module at an address; ``serial``: of the board, "" where the source has none."""

    source: str
    bdf: str
    module_id: int
    serial: str = ""


class GpuModule(NamedTuple):
    """A GPU whose slot is known; ``sources``: the sources of it."""

    bdf: str
    module_id: int
    serial: str
    sources: tuple[str, ...]


class Registers(NamedTuple):
    """The pins of this node's GPUs, and why others were not read, a sentence each."""

    readings: tuple[ModuleReading, ...]
    notes: tuple[str, ...]


def read_module_ids(roots: Roots, bdfs: Collection[str] = (), driver: Iterable[ModuleReading] = ()) -> dict[str, int]:
    """Return the module id of each GPU, by address; ``bdfs``: of these only, () for all of the node.

    Raises HostError (OCIGPU-VFIO-7) if no source knows a GPU, if two sources differ, or if two GPUs would be one
    module.
    """
    return {gpu.bdf: gpu.module_id for gpu in identify(roots, bdfs, driver=driver)[0]}


def identify(
    roots: Roots,
    bdfs: Collection[str] = (),
    *,
    bus: PciBus | None = None,
    table: str | None = "",
    slots: Mapping[str, int] | None = None,
    driver: Iterable[ModuleReading] = (),
) -> tuple[tuple[GpuModule, ...], tuple[str, ...]]:
    """Return the GPUs of the node with their modules, and notes on sources that were not read.

    ``table``: path of the node's own, "" for :data:`TABLE`, None: not read; ``slots``: number of the slot by serial
    number (from the board controller); ``driver``: answers of a driver, here or in a virtual machine.  Registers are
    read only of GPUs that no process uses.  Raises HostError as :func:`read_module_ids`.
    """
    gpus = [item.function for item in read_vfio_facts(roots).candidates if not item.is_switch]
    wanted = tuple(bdfs) or tuple(function.address for function in gpus)
    if missing := [bdf for bdf in wanted if bdf not in {function.address for function in gpus}]:
        raise _error(f"GPU {missing[0]}: there is none at this address")
    kept = () if table is None else read_table(table or f"{roots.host}{TABLE}")
    vfio = [one.address for one in gpus if one.address in wanted and one.driver in VFIO_DRIVERS]
    said = read_pins(roots, vfio, bus or PciBus(roots.sys))
    readings = [*kept, *driver, *said.readings]
    return settle(wanted, [*readings, *_of_slots(readings, slots or {})], slots or {}), said.notes


def _of_slots(readings: Iterable[ModuleReading], slots: Mapping[str, int]) -> list[ModuleReading]:
    """Return the board controller's slots of the boards whose serial number is known."""
    serials = {one.bdf: one.serial for one in readings if one.serial}
    return [ModuleReading("Redfish", bdf, slots[serial], serial) for bdf, serial in serials.items() if serial in slots]


def settle(
    bdfs: Iterable[str], readings: Iterable[ModuleReading], slots: Mapping[str, int] | None = None
) -> tuple[GpuModule, ...]:
    """Return the modules on which all sources agree; raises HostError (OCIGPU-VFIO-7), see :func:`read_module_ids`.

    If no source knows a serial number, the one of the slot with the same number is used.  Pure.
    """
    by_address: dict[str, list[ModuleReading]] = {}
    for reading in readings:
        by_address.setdefault(reading.bdf, []).append(reading)
    by_slot = {number: serial for serial, number in (slots or {}).items()}
    found: dict[int, GpuModule] = {}
    for bdf in sorted(set(bdfs)):
        said = by_address.get(bdf, [])
        if not said:
            raise _error(f"GPU {bdf}: no source knows its module id")
        first = said[0]
        serials = [one for one in said if one.serial]
        for one in said:
            if one.module_id not in MODULES:
                raise _error(f"GPU {bdf}: {one.source} says {one.module_id}: no module id")
            if one.module_id != first.module_id:
                raise _error(f"GPU {bdf}: {first.source} says {first.module_id}, {one.source} says {one.module_id}")
        for one in serials:
            if one.serial != serials[0].serial:
                more = f"{serials[0].source} has serial {serials[0].serial}, {one.source} {one.serial}"
                raise _error(f"GPU {bdf}: another board than before: {more}")
        serial = serials[0].serial if serials else by_slot.get(first.module_id, "")
        there = by_slot.get(first.module_id, serial)
        if there != serial:
            more = f"{serials[0].source} has serial {serial}, the board controller's slot {first.module_id} {there}"
            raise _error(f"GPU {bdf}: another board than before: {more}")
        if twin := found.get(first.module_id):
            raise _error(f"GPUs {twin.bdf} and {bdf} both claim module {first.module_id}")
        found[first.module_id] = GpuModule(bdf, first.module_id, serial, tuple(one.source for one in said))
    return tuple(sorted(found.values()))


def _error(message: str) -> HostError:
    return HostError("OCIGPU-VFIO-7", f"module ids: {message}")


def read_pins(roots: Roots, bdfs: Iterable[str], bus: PciBus) -> Registers:
    """Return the pins of GPUs that no process uses; for other GPUs and unknown boards, why they were not read."""
    readings, notes = [], []
    for bdf in bdfs:
        try:
            if holders := read_holders(bdf, roots):
                notes.append(f"pins of GPU {bdf} were not read: process {holders[0].pid} uses it")
                continue
            device, subsystem = (int(bus.read(bdf, name) or "0", 16) for name in ("device", "subsystem_device"))
            if subsystem not in BOARDS.get(device, ()):
                notes.append(f"pins of GPU {bdf} were not read: board {device:04x}:{subsystem:04x} is not known")
                continue
            with claim(bdf, roots), bus.registers(bdf) as read:
                number = decode_pins(read)
        except (OSError, ValueError, OcigpuError) as error:
            notes.append(f"pins of GPU {bdf} were not read: {getattr(error, 'strerror', '') or error}")
            continue
        if number is None:
            notes.append(f"pins of GPU {bdf} do not answer: the GPU hides its registers, or is off the bus")
        else:
            readings.append(ModuleReading("pins", bdf, number))
    return Registers(tuple(readings), tuple(notes))


def decode_pins(read: Callable[[int], int]) -> int | None:
    """Return the module id of a board of :data:`BOARDS`, None where registers are hidden (:func:`is_answer`)."""
    words = [read(offset) for offset in PINS]
    if not all(map(is_answer, words)):
        return None
    return (sum((word >> PIN_BIT & 1) << bit for bit, word in enumerate(words)) ^ INVERTED) + 1


def is_answer(word: int) -> bool:
    """Tell whether a word came from a register: not all ones, and not 0xBADFxxxx (gpu-admin-tools)."""
    return word != 0xFFFFFFFF and word >> 16 != 0xBADF


def read_table(path: str) -> tuple[ModuleReading, ...]:
    """Return the entries of a node's table, () if there is none.

    Raises HostError (OCIGPU-VFIO-7) for a table that cannot be read or understood, or that users other than root and
    this one could have written.
    """
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if why := why_untrusted(status.st_uid, status.st_mode) or why_replaceable(path):
                raise _error(f"table {path} is not trusted: {why}")
            document = json.loads(read_bounded(file, MAX_TABLE))
        if document["format"] != FORMAT:
            raise _error(f"table {path}: format {document['format']}, not {FORMAT}")
        return tuple(_reading(bdf, entry) for bdf, entry in document["gpus"].items())
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise _error(f"read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _error(f"table {path}: not one of ocigpu vfio identify") from error


def _reading(bdf: str, entry: Any) -> ModuleReading:
    if type(entry["module_id"]) is not int:
        raise TypeError
    return ModuleReading("table", str(bdf), entry["module_id"], str(entry["serial"]))


def write_table(path: str, modules: Iterable[GpuModule]) -> None:
    """Keep modules in a node's table, in one step; raises HostError (OCIGPU-VFIO-7)."""
    gpus = {
        one.bdf: {"module_id": one.module_id, "serial": one.serial, "sources": list(one.sources)} for one in modules
    }
    text = json.dumps({"format": FORMAT, "gpus": gpus}, indent=2) + "\n"
    try:
        os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
        replace_path(path, text.encode(), 0o644)
    except OSError as error:
        raise _error(f"write {path}: {error.strerror}") from error
