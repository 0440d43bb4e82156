"""``ocigpu vfio``: GPUs that are bound to VFIO: who has them, which module they are, and how they are reset."""

import os
from dataclasses import asdict

from ocigpu.cli.front import show
from ocigpu.cli.front.common import load_facts, load_settings, named_address
from ocigpu.cli.host.firmware import read_facts
from ocigpu.core.errors import HostError, UsageError, printable
from ocigpu.core.settings import Settings
from ocigpu.gpus.firmware.redfish import NodeFirmware
from ocigpu.gpus.tree import Roots, find_roots
from ocigpu.gpus.vfio.bus import PciBus
from ocigpu.gpus.vfio.facts import read_vfio_facts
from ocigpu.gpus.vfio.holders import HolderScan, scan_holders
from ocigpu.gpus.vfio.identity import TABLE, ModuleReading, identify, write_table
from ocigpu.gpus.vfio.reset import BUS, ResetPlan, ResetProof, plan_reset, reset_gpu


def find_gpus(roots: Roots, wanted: list[str] | None) -> list[str]:
    """Return the addresses of the node's GPUs, or the wanted ones as sysfs writes them.

    Raises HostError (OCIGPU-VFIO-1) where all are wanted and there is none, UsageError for a wanted one that is none.
    """
    there = [item.function.address for item in read_vfio_facts(roots).candidates if not item.is_switch]
    if not there and not wanted:
        raise HostError("OCIGPU-VFIO-1", "no NVIDIA GPU is on the PCI bus", "See: ocigpu doctor --tenants")
    if not wanted:
        return there
    named = list(map(named_address, wanted))
    for one, given in zip(named, wanted, strict=True):
        if one not in there:
            raise UsageError(f'no GPU "{printable(given)}" on the PCI bus', f"GPUs: {', '.join(there) or 'none'}")
    return named


def open_bus(roots: Roots) -> PciBus:
    """Return the PCI bus of the host, or of a simulated one."""
    if not roots.stand_in:
        return PciBus(roots.sys)
    from ocigpu.sim.board import SimBus

    return SimBus(roots.host)


def reset_command(gpu: str, dry_run: bool = False, no_scrub: bool = False, config: str = "") -> "show.Answer":
    roots = find_roots(load_settings(config))
    bus = open_bus(roots)
    (bdf,) = find_gpus(roots, [gpu])
    if dry_run:
        plan = plan_reset(bdf, roots, bus)
        yield asdict(plan) | {"family": plan.family.name if plan.family else ""}
        show.fields([*_plan_fields(plan), ("", "nothing was changed")])
        return
    with show.Progress(f"resetting GPU {bdf}"):
        proof = reset_gpu(bdf, roots, bus=bus, scrub=not no_scrub)
    yield proof.as_json()
    words = {True: "yes", False: "no", None: "not known"}
    show.fields(
        [
            *_plan_fields(proof),
            ("registers", "were cleared, and configuration is back"),
            ("link down", words[proof.link_went_down]),
            ("started up", words[proof.started_up]),
            ("memory", "scrubbed" if proof.scrubbed else "not known to be clear"),
            ("seconds", f"{proof.seconds:.1f}"),
        ]
    )


def _plan_fields(plan: ResetPlan | ResetProof) -> list[tuple[str, str]]:
    way = f"bus reset below {plan.port}" if plan.method == BUS else "function-level reset"
    reach = f"{', '.join(plan.functions)}; IOMMU group {plan.group}"
    return [("gpu", plan.bdf), ("way", way), ("reaches", reach)]


def holders_command(gpu: list[str] | None = None, config: str = "") -> "show.Answer":
    roots = find_roots(load_settings(config))
    scans = {bdf: scan_holders(bdf, roots) for bdf in find_gpus(roots, gpu)}
    unreadable = list(dict.fromkeys(what for scan in scans.values() for what in scan.unreadable))
    gpus = [{"bdf": bdf, "holders": [one._asdict() for one in scan.holders]} for bdf, scan in scans.items()]
    yield {"gpus": gpus, "unreadable": unreadable}, int(any(one.holders or one.unreadable for one in scans.values()))
    show.table(("gpu", "process", "command", "by"), [row for bdf in scans for row in _rows(bdf, scans[bdf])])
    show.notes(f"could not be inspected: {what}" for what in unreadable)


def _rows(bdf: str, scan: HolderScan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [(bdf, str(one.pid), one.command, one.path) for one in scan.holders]
    return rows or [(bdf, "", "unknown" if scan.unreadable else "nobody", "")]


def identify_command(
    gpu: list[str] | None = None,
    table: str = "",
    firmware: str = "",
    nvml: bool = False,
    record: bool = False,
    replaced: bool = False,
    config: str = "",
) -> "show.Answer":
    if replaced and not record:
        raise UsageError("--replaced needs --record")
    settings = load_settings(config)
    roots = find_roots(settings)
    path = os.path.abspath(table) if table else f"{roots.host}{TABLE}"
    wanted = find_gpus(roots, gpu)
    slots = NodeFirmware(read_facts(firmware), ()).slots if firmware else {}
    driver = _ask_driver(settings) if nvml else ()
    kept = None if replaced else path
    found, notes = identify(roots, wanted, bus=open_bus(roots), table=kept, slots=slots, driver=driver)
    if record:
        write_table(path, found)
    yield {"gpus": [one._asdict() for one in found], "notes": notes}
    rows = [(one.bdf, str(one.module_id), one.serial or "unknown", ", ".join(one.sources)) for one in found]
    show.table(("gpu", "module", "serial", "said by"), rows)
    show.notes(notes)
    if record:
        print(f"written to {printable(path)}")


def _ask_driver(settings: Settings) -> tuple[ModuleReading, ...]:
    from ocigpu.gpus.nvidia.firmware import read_driver_firmware

    found = read_driver_firmware(load_facts(settings)).items()
    return tuple(ModuleReading("driver", bdf, one.slot, one.serial) for bdf, one in found if one.slot > 0)
