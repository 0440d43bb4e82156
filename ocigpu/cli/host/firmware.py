"""``ocigpu firmware``: firmware of GPUs as the board controller tells it, against what an operator has signed off."""

import json as json_module
import os
from typing import NamedTuple

from ocigpu.cli.front import show
from ocigpu.cli.front.arguments import takes
from ocigpu.cli.front.common import load_facts, load_settings, named_address, read_named
from ocigpu.cli.front.optional import needing
from ocigpu.core.errors import HostError, OcigpuError, UsageError, printable
from ocigpu.gpus.firmware.baseline import (
    Deviation,
    FirmwareFacts,
    approve,
    compare_all,
    facts_from_json,
    merge,
    propose,
    read_baseline,
    read_with_doubts,
    write_baseline,
)
from ocigpu.gpus.firmware.redfish import NodeFirmware, Redfish, read_credentials, read_firmware
from ocigpu.gpus.tree import find_roots
from ocigpu.gpus.vfio.identity import TABLE, read_table

MAX_FACTS = 1 << 20
UNCHECKED = 3
"""Exit status of a check that could not be made: not that of one that found a deviation."""


class _Source(NamedTuple):
    """Where facts come from, and what else the options shared by the commands say."""

    bmc: str = ""
    credentials: str = ""
    bmc_ca: str = ""
    fingerprint: str = ""
    facts_file: str = ""
    deadline: float = 60.0
    measurements: bool = False
    nvml: bool = False
    config: str = ""

    def check(self) -> None:
        """Raise UsageError for options that contradict each other."""
        if sum(map(bool, (self.bmc, self.facts_file, self.nvml))) != 1:
            raise UsageError("one of --bmc, --nvml and --facts-file is needed")
        if self.bmc and not self.credentials:
            raise UsageError("--bmc needs --credentials FILE")


def _read_address(path: str) -> str:
    """Return the address in a file: one command fits all nodes, whose BMCs have an address each."""
    try:
        data, _, why = read_with_doubts(path, 4096)
        address = data.decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not a text"
        raise HostError("OCIGPU-FW-1", f"board controller: read {path}: {why}", "One line, its address.") from error
    if why:  # the credentials go there
        raise HostError("OCIGPU-FW-1", f"board controller: {path}: {why}", "Let root alone write it.")
    return address


def _read(options: _Source) -> NodeFirmware:
    if options.facts_file:
        return NodeFirmware(read_facts(options.facts_file), ())
    if options.nvml:
        from ocigpu.gpus.nvidia.firmware import read_driver_firmware

        return NodeFirmware(tuple(read_driver_firmware(load_facts(load_settings(options.config))).values()), ())
    if options.measurements:
        with needing("the signatures of measurements", "OCIGPU-FW-1", "tenants"):
            import cryptography  # noqa: F401 - is it there
    bmc = _read_address(options.bmc[1:]) if options.bmc.startswith("@") else options.bmc
    credentials = read_credentials(options.credentials)
    redfish = Redfish(
        *(bmc, credentials), ca_file=options.bmc_ca, fingerprint=options.fingerprint, deadline=options.deadline
    )
    with show.Progress("querying the board controller"):
        return read_firmware(redfish, options.measurements)


def read_facts(path: str) -> tuple[FirmwareFacts, ...]:
    """Return what a file of facts says, "-" is standard input; raises HostError (OCIGPU-FW-2)."""
    try:
        return facts_from_json(json_module.loads(read_named(path, MAX_FACTS)))
    except OSError as error:
        raise HostError("OCIGPU-FW-2", f"facts {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise HostError("OCIGPU-FW-2", f"facts {path}: {error}") from error


@takes(_Source)
def show_command(options: _Source) -> "show.Answer":
    options.check()
    found = _read(options)
    yield {"components": [one.as_json() for one in found.components], "notes": found.notes}
    gpus = [one for one in found.components if one.slot]
    rows = [
        (one.name, one.serial, *(one.versions.get(fact, "") for fact in ("VBIOS", "InfoROM", "ERoT")), _health(one))
        for one in gpus
    ]
    show.table(("gpu", "serial", "vbios", "inforom", "erot", "health"), rows)
    for one in found.components:
        if not one.slot and one.versions:
            print()
            show.fields([("model", one.key), *one.versions.items()])
    show.notes(found.notes)


def _health(one: FirmwareFacts) -> str:
    wrong = [f"{name} {value}" for name, value in one.health.items() if name != "status" and value not in (0, False)]
    return ", ".join([str(one.health.get("status", "unknown")), *wrong])


@takes(_Source)
def record_command(options: _Source, file: str, add: bool = False) -> "show.Answer":
    options.check()
    proposal = propose(_read(options).components)
    if add:
        proposal = merge(read_baseline(file, proposal=True), proposal)
    elif os.path.lexists(file):
        raise UsageError(f"{printable(file)} already exists", "--add accepts its values and the present ones")
    write_baseline(file, proposal)
    yield {"file": os.path.abspath(file), "models": proposal.models, "limits": proposal.limits}
    name = printable(file)
    print(f"written to {name}: a proposal; review it, then: ocigpu firmware approve {name} --by NAME")


def approve_command(file: str, by: str) -> None:
    baseline = approve(read_baseline(file, proposal=True), by)
    write_baseline(file, baseline)
    print(f"{printable(file)}: {show.count(len(baseline.models), 'model')}, signed off by {printable(by)}")


@takes(_Source)
def check_command(options: _Source, gpu: str = "", baseline: str = "", table: str = "") -> "show.Answer":
    options.check()
    if not baseline:
        raise UsageError("--baseline FILE is needed")
    try:
        yield from _check(options, gpu, baseline, table)
    except UsageError:
        raise
    except OcigpuError as error:
        error.exit_code = UNCHECKED
        raise


def _check(options: _Source, gpu: str, baseline: str, table: str) -> "show.Answer":
    accepted = read_baseline(baseline)
    roots = find_roots(load_settings(options.config))
    modules = {one.module_id: one for one in read_table(table or f"{roots.host}{TABLE}")}
    components, notes = _read(options)
    if gpu:
        bdf = named_address(gpu)
        slots = [number for number, one in modules.items() if one.bdf == bdf]
        if not slots:
            hint = "ocigpu vfio identify --record"
            raise HostError("OCIGPU-VFIO-7", f"module ids: GPU {printable(bdf)}: not in this node's table", hint)
        modules = {slots[0]: modules[slots[0]]}
        components = tuple(one for one in components if one.slot in (0, slots[0]))
    there = {one.slot for one in components}
    missing = [slot for slot in modules if slot not in there]
    silent = [Deviation(f"GPU_SXM_{slot}", "firmware", "", (), "not reported") for slot in missing]
    serials = {slot: one.serial for slot, one in modules.items() if one.serial and slot in there}
    deviations = (*silent, *compare_all(components, accepted, serials))
    names = [one.name for one in components if one.slot]
    data = [{**one._asdict(), "text": one.text} for one in deviations]
    yield {"gpus": names, "deviations": data, "notes": notes}, int(bool(deviations))
    for one in deviations:
        print(f"{show.styled('deviates:', '31')} {printable(one.text)}")
    show.notes(notes)
    if not deviations:
        who = f"{printable(accepted.approved_by)} signed off on {accepted.approved_at}"
        print(f"{show.count(len(names), 'GPU')}: as {who}")
