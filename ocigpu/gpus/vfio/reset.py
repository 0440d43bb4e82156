"""Reset a GPU between two tenants, and prove that it happened.

The reset is carried out here and not by the kernel's ``reset`` file, because that restores configuration space itself,
so that a reset and a reset without effect look the same.  After a reset, a function's registers have their defaults;
memory is clear when the GPU's own start-up code reports that it has scrubbed it.

Sources: PCI Express Base Specification 6.6 (conventional and function-level reset), 7.5.1.3.13 (bridge control) and
7.5.3 (capability); drivers/pci/quirks.c of Linux (boards without bus reset); NVIDIA/gpu-admin-tools 82422cc, MIT
(times, registers of start-up and scrub); nouveau's fsp/gh100.c (start-up of Hopper); dstack #1048 and #1065 (on H200,
state of a killed virtual machine survives a function-level reset).

What hardware has yet to confirm: that each register of FAMILIES means on every board what it does on those where it was
seen; those of Ada are not known.  docs/tenants/TENANTS.md has the list of all such places.
"""

import json
import os
import re
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

from ocigpu.core.errors import HostError
from ocigpu.gpus.pci import BRIDGE_CLASS, NVIDIA_VENDOR, Function, find_group, read_function
from ocigpu.gpus.tree import Roots, list_names
from ocigpu.gpus.vfio.bus import COMMAND, HEADER_TYPE, PCI_EXPRESS, PciBus
from ocigpu.gpus.vfio.facts import GPU_CLASSES, SWITCH_CLASS, VFIO_DRIVERS
from ocigpu.gpus.vfio.holders import claim, read_holders
from ocigpu.gpus.vfio.identity import is_answer
from ocigpu.system.locks import holding
from ocigpu.system.store import open_lock

BUS, FLR = "bus", "flr"
"""Names of the two ways, as the kernel's reset_method has them."""
SECONDARY_BUS = 0x19
BRIDGE_CONTROL, BUS_RESET = 0x3E, 0x40
DEVICE_CAPABILITIES, FLR_CAPABLE = 0x04, 1 << 28
DEVICE_CONTROL, START_FLR = 0x08, 1 << 15
DEVICE_STATUS, TRANSACTIONS_PENDING = 0x0A, 1 << 5
LINK_CAPABILITIES, TELLS_LINK = 0x0C, 1 << 20
LINK_STATUS, LINK_TRAINS, LINK_ACTIVE = 0x12, 1 << 11, 1 << 13
SLOT_CONTROL, SLOT_STATUS = 0x18, 0x1A
SLOT_EVENTS = 1 << 3 | 1 << 5 | 1 << 12
"""Presence changed, interrupt, link state changed: the kernel would take the GPU away."""
SLOT_CHANGES = 1 << 3 | 1 << 8
ANSWERS = 0x07
"""Of the command register: I/O, memory, bus master; zero after a reset."""
HEADER = (*range(0x0C, 0x40, 4), COMMAND)
"""Offsets of the restored registers, the command register last."""
EXPRESS_CONTROLS = (0x08, 0x10, 0x28, 0x30)
"""Device, link, device 2 and link 2 control, 16 bits each, in the capability."""
RESIZABLE_BAR, LATENCY_TOLERANCE = 0x15, 0x18
"""Extended capabilities whose settings are put back before the addresses are (7.8.6 and 7.8.2)."""
VENDOR_SPECIFIC, FIREWALL = 0x09, 1 << 20
ASSERTED, SETTLED, POLL = 0.1, 0.3, 0.1
PATIENCE = 5.0
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class Family(NamedTuple):
    """GPUs of these PCI device ids: their only reset method (``needs``, "" for any), and start-up registers.

    ``boot``: (offset, value when done), with None it is the firewall before BAR 0 that goes; ``scrub``: offset of the
    word that is 1 when memory is clear.
    """

    name: str
    first: int
    last: int
    needs: str
    boot: tuple[int, int] | None
    scrub: int


FAMILIES = (
    Family("Turing", 0x1E00, 0x1FFF, "", (0x118234, 0x3FF), 0x100B20),
    Family("Ampere", 0x2080, 0x20FF, "", (0x118234, 0x3FF), 0x100B20),
    Family("Ampere", 0x2200, 0x22FF, "", (0x118234, 0x3FF), 0x100B20),
    Family("Hopper", 0x2300, 0x233F, BUS, (0x200BC, 0xFF), 0x100B20),
    Family("Grace Hopper", 0x2340, 0x237F, FLR, (0x200BC, 0xFF), 0x100B20),
    Family("Ampere", 0x2400, 0x25FF, "", (0x118234, 0x3FF), 0x100B20),
    Family("Blackwell", 0x2900, 0x2FFF, "", None, 0x8A004C),
    Family("Blackwell", 0x3180, 0x31FF, "", None, 0x8A004C),
)
"""The kernel has no bus reset for 0x2340 to 0x237f."""
T4 = 0x1EB8
"""No bus reset behind a root port."""


def find_family(device: int) -> Family | None:
    """Return the family of GPUs with a PCI device id."""
    return next((one for one in FAMILIES if one.first <= device <= one.last), None)


class ResetError(HostError):
    """A GPU that was not reset, or of which that is not known: it must not be given to anybody."""


@dataclass(frozen=True)
class ResetPlan:
    """What would be reset and how: ``functions`` are all that it reaches, ``port`` the bridge above them."""

    bdf: str
    method: str
    port: str
    functions: tuple[str, ...]
    group: int
    device: int
    family: Family | None


@dataclass(frozen=True)
class ResetProof:
    """The evidence of a reset.

    ``link_went_down``: None if the port does not report it; ``commands``: the command register of each function before
    and after, which a reset clears; ``started_up`` and ``scrubbed``: the GPU reported it, None if it was not queried.
    """

    bdf: str
    method: str
    port: str
    functions: tuple[str, ...]
    group: int
    time: float
    seconds: float
    link_went_down: bool | None
    commands: tuple[tuple[int, int], ...]
    started_up: bool | None
    scrubbed: bool | None

    def as_json(self) -> dict[str, Any]:
        """Return it as an object for JSON."""
        return {**asdict(self), "functions": list(self.functions), "commands": [list(one) for one in self.commands]}


def plan_reset(bdf: str, roots: Roots, bus: PciBus | None = None) -> ResetPlan:
    """Return how a GPU can be reset; nothing is changed.

    Raises ResetError (OCIGPU-VFIO-3) if it is not a GPU bound to VFIO, if a reset would affect more than this GPU and
    its IOMMU group, or if the board or the kernel has no suitable reset.
    """
    bus = bus or PciBus(roots.sys)
    gpu = read_function(roots.sys, bdf) if _ADDRESS.fullmatch(bdf) else None
    if gpu is None or gpu.vendor != NVIDIA_VENDOR or gpu.base_class not in GPU_CLASSES:
        what = "an NVSwitch is never reset" if gpu and gpu.base_class == SWITCH_CLASS else "no GPU at this address"
        raise _refuse(bdf, what)
    group = find_group(bdf, roots.sys)
    if group < 0:
        raise _refuse(bdf, "in no IOMMU group: the host's IOMMU is off")
    if bus.read(bdf, "sriov_numvfs") not in ("", "0"):
        raise _refuse(bdf, "has virtual functions")
    family = find_family(gpu.device)
    port = _find_port(gpu, roots, bus)
    below = _functions_below(port, roots) if port else (bdf,)
    why_not_bus = _why_not_bus(gpu, port, below, group, roots, bus)
    method = BUS
    if why_not_bus:
        if family and family.needs == BUS:
            raise _refuse(bdf, f"its board needs a bus reset, but {why_not_bus}")
        method = FLR
    if family and family.needs == FLR:
        method = FLR
    _check_method(bdf, method, bus, why_not_bus)
    functions = below if method == BUS else (bdf,)
    for function in functions:
        driver = _read(function, roots).driver
        if driver and driver not in VFIO_DRIVERS:
            raise _refuse(bdf, f"{function} is bound to {driver}, not to VFIO")
    return ResetPlan(bdf, method, port, functions, group, gpu.device, family)


def _refuse(bdf: str, why: str) -> ResetError:
    return ResetError("OCIGPU-VFIO-3", f"reset GPU {bdf}: {why}")


def _read(bdf: str, roots: Roots) -> Function:
    found = read_function(roots.sys, bdf)
    if found is None:
        raise _refuse(bdf, "it has left the bus")
    return found


def _find_port(gpu: Function, roots: Roots, bus: PciBus) -> str:
    """Return the address of the bridge whose secondary bus a GPU is on, "" where that is not certain."""
    port = os.path.realpath(bus.path(gpu.address, "")).split("/")[-2]
    bridge = read_function(roots.sys, port) if _ADDRESS.fullmatch(port) else None
    if bridge is None or bridge.base_class != BRIDGE_CLASS:
        return ""
    is_bridge = bus.read_config(port, HEADER_TYPE, 1) & 0x7F == 1
    same = bus.read_config(port, SECONDARY_BUS, 1) == int(gpu.address.split(":")[1], 16)
    return port if is_bridge and same else ""


def _functions_below(port: str, roots: Roots) -> tuple[str, ...]:
    """Return every function behind a bridge, also behind bridges behind it."""
    found: list[str] = []
    pending = [os.path.realpath(f"{roots.sys}/bus/pci/devices/{port}")]
    while pending:
        directory = pending.pop()
        names = [name for name in list_names(directory) if _ADDRESS.fullmatch(name)]
        found += names
        pending += [f"{directory}/{name}" for name in names]
    return tuple(sorted(found))


def _why_not_bus(gpu: Function, port: str, below: tuple[str, ...], group: int, roots: Roots, bus: PciBus) -> str:
    """Return why the bus above a GPU must not be reset, as the rest of a sentence; "" when it may be."""
    if not port:
        return "there is no bridge above it"
    for bdf in below:
        if _read(bdf, roots).base_class == SWITCH_CLASS:
            return f"NVSwitch {bdf} is behind the same port"
        if bdf.rpartition(".")[0] != gpu.address.rpartition(".")[0]:
            return f"{bdf} is behind the same port"
        if find_group(bdf, roots.sys) != group:
            return f"{bdf} is in IOMMU group {find_group(bdf, roots.sys)}, not in {group}"
    express = bus.find_capability(port, PCI_EXPRESS)
    if gpu.device == T4 and express and bus.read_config(port, express + 2, 2) >> 4 & 0xF == 4:
        return "a T4 behind a root port cannot have one"
    return ""


def _check_method(bdf: str, method: str, bus: PciBus, why_not_bus: str) -> None:
    """Raise ResetError when the kernel rules a way out (sysfs-bus-pci: reset_method) or the function has it not."""
    if os.path.exists(bus.path(bdf, "reset_method")):
        allowed = bus.read(bdf, "reset_method").split()
        if method not in allowed:
            raise _refuse(bdf, f"its reset_method has {' '.join(allowed) or 'nothing'}, not {method}")
    if method == FLR:
        express = bus.find_capability(bdf, PCI_EXPRESS)
        if not express or not bus.read_config(bdf, express + DEVICE_CAPABILITIES, 4) & FLR_CAPABLE:
            why = f" and {why_not_bus}" if why_not_bus else ""
            raise _refuse(bdf, f"it has no function-level reset{why}")


def reset_gpu(
    bdf: str, roots: Roots, *, bus: PciBus | None = None, scrub: bool = True, proc: str = "/proc"
) -> ResetProof:
    """Reset a GPU that no process uses, and return the evidence.

    ``scrub``: the GPU must report that its memory is clear; otherwise its next user must check.  ``proc``: the
    machine's procfs.  During the reset no process can open the GPU's IOMMU group.

    Raises ResetError: OCIGPU-VFIO-2 a process uses it, -3 see :func:`plan_reset`, -4 the reset failed, -5 nothing was
    reset, -6 start-up or scrub was not seen to end; and HostError (OCIGPU-VFIO-1) where holders cannot be known.

    A killed reset leaves the configuration in the lock's file, and the next reset restores it.
    """
    bus = bus or PciBus(roots.sys)
    try:
        lock = open_lock(f"reset-{bdf}.lock", roots.host) if _ADDRESS.fullmatch(bdf) else -1
        with holding(lock, ResetError("OCIGPU-VFIO-2", f"reset GPU {bdf}: another process resets it")):
            plan = plan_reset(bdf, roots, bus)
            _check_holders(plan, roots, proc)
            with claim(bdf, roots):
                proof = _reset(plan, bus, scrub, lock)
            _check_holders(plan, roots, proc)  # a kernel without group nodes lets others in meanwhile
            return proof
    except OSError as error:
        where = f"{error.filename}: " if isinstance(error.filename, str) else ""
        raise _failed(bdf, f"{where}{error.strerror}") from error


def _check_holders(plan: ResetPlan, roots: Roots, proc: str) -> None:
    for function in plan.functions:
        if held := read_holders(function, roots, proc):
            by = f"process {held[0].pid} ({held[0].command}) has {held[0].path} open"
            raise ResetError("OCIGPU-VFIO-2", f"reset GPU {plan.bdf}: {by}")


def _failed(bdf: str, why: str) -> ResetError:
    return ResetError("OCIGPU-VFIO-4", f"reset GPU {bdf}: {why}")


class _Saved(NamedTuple):
    """Configuration of a function: (offset, bytes, value) each, in the order in which it is put back."""

    bdf: str
    values: tuple[tuple[int, int, int], ...]


def _reset(plan: ResetPlan, bus: PciBus, scrub: bool, record: int) -> ResetProof:
    began, wall = bus.now(), time.time()
    with ExitStack() as stack:
        for function in (*([plan.port] if plan.method == BUS else []), *plan.functions):
            stack.enter_context(bus.awake(function))
        recalled = _recall(record)
        if plan.method == BUS:
            _release(plan, bus, recalled)
        saved = [_save(function, bus, recalled) for function in plan.functions]
        _remember(record, [*saved, _save_slot(plan, bus)])
        for function in plan.functions:  # something that a reset takes away
            bus.write_config(function, COMMAND, 2, bus.read_config(function, COMMAND, 2) | 0x02)
        before = [bus.read_config(function, COMMAND, 2) & ANSWERS for function in plan.functions]
        try:
            went_down = _reset_bus(plan, bus) if plan.method == BUS else _reset_function(plan, bus)
            for function in plan.functions:
                if not _wait(bus, PATIENCE, partial(_answers, function, bus)):
                    raise _failed(plan.bdf, f"{function} does not answer any more")
            after = [bus.read_config(function, COMMAND, 2) & ANSWERS for function in plan.functions]
        finally:
            for one in saved:
                _restore(one, bus)
        for function, left in zip(plan.functions, after, strict=True):
            if left:
                text = f"reset GPU {plan.bdf}: nothing was reset: {function} kept its command register ({left:#x})"
                raise ResetError("OCIGPU-VFIO-5", text)
        for one in saved:
            _check_restored(plan, one, bus)
        _remember(record, ())
        started, scrubbed = _see_start(plan, bus, scrub)
    return ResetProof(
        plan.bdf, plan.method, plan.port, plan.functions, plan.group, wall, round(bus.now() - began, 3), went_down,
        tuple(zip(before, after, strict=True)), started, scrubbed,
    )  # fmt: skip


def _release(plan: ResetPlan, bus: PciBus, recalled: dict[str, _Saved]) -> None:
    """End a reset of the bus that a killed process has begun."""
    control = bus.read_config(plan.port, BRIDGE_CONTROL, 2)
    if control & BUS_RESET:
        bus.write_config(plan.port, BRIDGE_CONTROL, 2, control & ~BUS_RESET)
        bus.sleep(SETTLED)
        _wait(bus, PATIENCE, lambda: all(_answers(function, bus) for function in plan.functions))
    if plan.port in recalled:
        _watch_slot(recalled[plan.port], bus)


def _save_slot(plan: ResetPlan, bus: PciBus) -> _Saved:
    """Return what the port tells the kernel of its slot; nothing where it is not touched."""
    express = bus.find_capability(plan.port, PCI_EXPRESS) if plan.method == BUS else 0
    at = express + SLOT_CONTROL
    value = bus.read_config(plan.port, at, 2) if express else 0
    return _Saved(plan.port, ((at, 2, value),) if value & SLOT_EVENTS else ())


def _watch_slot(saved: _Saved, bus: PciBus) -> None:
    for at, size, value in saved.values:
        if bus.read_config(saved.bdf, at, size) != value:
            bus.write_config(saved.bdf, at + SLOT_STATUS - SLOT_CONTROL, 2, SLOT_CHANGES)  # written ones are forgotten
            bus.write_config(saved.bdf, at, size, value)


def _remember(record: int, saved: Collection[_Saved]) -> None:
    """Record the registers to restore, () for none any more; ``record``: an open file, -1 for none."""
    if record >= 0:
        os.ftruncate(record, 0)
        os.pwrite(record, json.dumps(saved).encode() if saved else b"", 0)


def _recall(record: int) -> dict[str, _Saved]:
    """Return what a reset that was killed has left to be put back, by address."""
    try:
        found = json.loads(os.pread(record, 1 << 16, 0)) if record >= 0 else []
        return {bdf: _Saved(bdf, tuple((at, size, value) for at, size, value in values)) for bdf, values in found}
    except (ValueError, TypeError):
        return {}


def _answers(bdf: str, bus: PciBus) -> bool:
    """Tell whether a function answers: not all ones, and not the number of a retry (PCI Express 2.3.2)."""
    return bus.read_config(bdf, 0, 4) & 0xFFFF not in (0xFFFF, 0x0001)


def _wait(bus: PciBus, seconds: float, condition: Callable[[], bool]) -> bool:
    end = bus.now() + seconds
    while not condition():
        if bus.now() >= end:
            return False
        bus.sleep(POLL)
    return True


def _save(bdf: str, bus: PciBus, recalled: dict[str, _Saved]) -> _Saved:
    if not _answers(bdf, bus):
        raise _failed(bdf, f"{bdf} is off the bus already")
    express = bus.find_capability(bdf, PCI_EXPRESS)
    controls: list[tuple[int, int]] = [(express + offset, 2) for offset in EXPRESS_CONTROLS] if express else []
    if latency := bus.find_extended(bdf, LATENCY_TOLERANCE):
        controls.append((latency + 4, 4))
    if bars := bus.find_extended(bdf, RESIZABLE_BAR):
        count = bus.read_config(bdf, bars + 8, 4) >> 5 & 7
        controls += [(bars + 8 + 8 * number, 4) for number in range(count)]
    places = [*controls, *((offset, 2 if offset == COMMAND else 4) for offset in HEADER)]
    now = _Saved(bdf, tuple((offset, size, bus.read_config(bdf, offset, size)) for offset, size in places))
    before = recalled.get(bdf)
    if before and all(at >> 4 == 0 or at == then for at, then in zip(_addresses(now), _addresses(before), strict=True)):
        return before
    known = [line.split()[0] for line in bus.read(bdf, "resource").splitlines()[:6]]
    if any(int(start, 16) for start in known) and not any(address >> 4 for address in _addresses(now)):
        hint = f"Let the kernel find it again: echo 1 > {bus.path(bdf, 'remove')}; echo 1 > {bus.sys}/bus/pci/rescan"
        raise ResetError("OCIGPU-VFIO-4", f"reset GPU {bdf}: {bdf} lost its addresses in an earlier reset", hint)
    return now


def _addresses(saved: _Saved) -> list[int]:
    return [value for offset, _, value in saved.values if 0x10 <= offset < 0x28]


def _restore(saved: _Saved, bus: PciBus) -> None:
    for offset, size, value in saved.values:
        if bus.read_config(saved.bdf, offset, size) != value:
            bus.write_config(saved.bdf, offset, size, value)


def _check_restored(plan: ResetPlan, saved: _Saved, bus: PciBus) -> None:
    for offset, size, value in saved.values:
        found = bus.read_config(saved.bdf, offset, size)
        if (offset == COMMAND or 0x10 <= offset < 0x28) and found != value:
            text = f"{saved.bdf} did not take its configuration back: {offset:#04x} is {found:#x}, not {value:#x}"
            raise _failed(plan.bdf, text)


def _reset_bus(plan: ResetPlan, bus: PciBus) -> bool | None:
    """Reset the bus behind the port; returns whether the link was seen to go down."""
    port, express = plan.port, bus.find_capability(plan.port, PCI_EXPRESS)
    tells = bool(express and bus.read_config(port, express + LINK_CAPABILITIES, 4) & TELLS_LINK)
    control = bus.read_config(port, BRIDGE_CONTROL, 2) & ~BUS_RESET
    slot = _save_slot(plan, bus)
    went_down = None
    try:
        for at, size, value in slot.values:
            bus.write_config(port, at, size, value & ~SLOT_EVENTS)
        bus.write_config(port, BRIDGE_CONTROL, 2, control | BUS_RESET)
        bus.sleep(ASSERTED)
        if tells:
            went_down = not bus.read_config(port, express + LINK_STATUS, 2) & LINK_ACTIVE
        bus.write_config(port, BRIDGE_CONTROL, 2, control)
        if tells and not _wait(bus, PATIENCE, lambda: _link_is_up(port, express, bus)):
            raise _failed(plan.bdf, f"the link below {port} did not come up again")
        bus.sleep(SETTLED)
    finally:
        bus.write_config(port, BRIDGE_CONTROL, 2, control)
        _watch_slot(slot, bus)
    return went_down


def _link_is_up(port: str, express: int, bus: PciBus) -> bool:
    status = bus.read_config(port, express + LINK_STATUS, 2)
    return bool(status & LINK_ACTIVE) and not status & LINK_TRAINS


def _reset_function(plan: ResetPlan, bus: PciBus) -> bool | None:
    express = bus.find_capability(plan.bdf, PCI_EXPRESS)
    status = express + DEVICE_STATUS
    if not _wait(bus, 1.0, lambda: not bus.read_config(plan.bdf, status, 2) & TRANSACTIONS_PENDING):
        raise _failed(plan.bdf, "transactions are still under way")
    control = bus.read_config(plan.bdf, express + DEVICE_CONTROL, 2)
    bus.write_config(plan.bdf, express + DEVICE_CONTROL, 2, control | START_FLR)
    bus.sleep(POLL)
    return None  # the link stays up


def _see_start(plan: ResetPlan, bus: PciBus, scrub: bool) -> tuple[bool | None, bool | None]:
    """Return whether start-up and scrub were seen to end; raises ResetError (OCIGPU-VFIO-6) where they must be."""
    family = plan.family
    if family is None:
        if scrub:
            raise _unseen(plan, f"it is unknown how a GPU {plan.device:04x} signals that its memory is clear")
        return None, None
    if family.boot is None and not _wait(bus, 2 * PATIENCE, lambda: not _is_walled(plan.bdf, bus)):
        raise _unseen(plan, "its firewall before BAR 0 did not go")
    with bus.registers(plan.bdf) as read:
        if not _wait(bus, PATIENCE, lambda: is_answer(read(0))):
            raise _unseen(plan, f"its registers are hidden: {read(0):#010x}")
        offset, done = family.boot or (0, read(0))
        if not _wait(bus, PATIENCE, lambda: read(offset) == done):
            raise _unseen(plan, f"start-up did not end: register {offset:#x} is {read(offset):#x}, not {done:#x}")
        scrubbed = _wait(bus, PATIENCE, lambda: read(family.scrub) == 1)
        if scrub and not scrubbed:
            raise _unseen(plan, f"memory was not scrubbed: register {family.scrub:#x} is {read(family.scrub):#x}")
    return True, scrubbed


def _is_walled(bdf: str, bus: PciBus) -> bool:
    offset = bus.find_capability(bdf, VENDOR_SPECIFIC)
    return bool(offset and bus.read_config(bdf, offset + 8, 4) & FIREWALL)


def _unseen(plan: ResetPlan, why: str) -> ResetError:
    return ResetError("OCIGPU-VFIO-6", f"reset GPU {plan.bdf}: {why}")
