"""``ocigpu firmware``: firmware of GPUs as the board controller tells it, against what an operator has signed off."""

import json as json_module
import os
import sys
from typing import NamedTuple

from ocigpu.cli import show
from ocigpu.cli.arguments import takes
from ocigpu.cli.common import load_settings
from ocigpu.core.errors import HostError, UsageError, printable
from ocigpu.gpus.firmware import (
    Deviation,
    FirmwareFacts,
    approve,
    compare_all,
    facts_from_json,
    merge,
    propose,
    read_baseline,
    write_baseline,
)
from ocigpu.gpus.redfish import NodeFirmware, read_credentials, read_firmware
from ocigpu.gpus.tree import find_roots
from ocigpu.gpus.vfio.identity import TABLE, read_table
from ocigpu.system.files import read_bounded

MAX_FACTS = 1 << 20
DEVIATES = 3
"""Exit status of a check that found a deviation: not that of one that could not be made."""


class _Source(NamedTuple):
    """Where facts come from, as the options shared by the commands say."""

    bmc: str
    credentials: str
    ca: str
    fingerprint: str
    facts: str
    deadline: float
    json: bool


def source(
    bmc: str = "",
    credentials: str = "",
    ca: str = "",
    fingerprint: str = "",
    facts_file: str = "",
    deadline: float = 60.0,
    json: bool = False,
) -> _Source:
    if bool(bmc) == bool(facts_file):
        raise UsageError("one of --bmc and --facts-file is needed")
    if bmc and not credentials:
        raise UsageError("--bmc needs --credentials FILE")
    return _Source(bmc, credentials, ca, fingerprint, facts_file, deadline, json)


def _read(options: _Source) -> NodeFirmware:
    if options.facts:
        return NodeFirmware(read_facts(options.facts), ())
    credentials = read_credentials(options.credentials)
    with show.Progress("asking the board controller"):
        return read_firmware(
            options.bmc, credentials, ca_file=options.ca, fingerprint=options.fingerprint, deadline=options.deadline
        )


def read_facts(path: str) -> tuple[FirmwareFacts, ...]:
    """Return what a file of facts says, "-" is standard input; raises HostError (OCIGPU-FW-2)."""
    try:
        with sys.stdin.buffer if path == "-" else open(path, "rb") as file:
            return facts_from_json(json_module.loads(read_bounded(file, MAX_FACTS)))
    except OSError as error:
        raise HostError("OCIGPU-FW-2", f"facts {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise HostError("OCIGPU-FW-2", f"facts {path}: {error}") from error


@takes(source)
def show_command(options: _Source) -> None:
    found = _read(options)
    if options.json:
        show.data({"components": [one.as_json() for one in found.components], "notes": list(found.notes)})
        return
    gpus = [one for one in found.components if one.slot]
    rows = [
        (one.name, one.serial, *(one.versions.get(fact, "") for fact in ("VBIOS", "InfoROM", "ERoT")), _health(one))
        for one in gpus
    ]
    show.table(("gpu", "serial", "vbios", "inforom", "erot", "health"), rows)
    for one in found.components:
        if not one.slot:
            print()
            show.fields([("model", one.key), *one.versions.items()])
    show.notes(found.notes)


def _health(one: FirmwareFacts) -> str:
    wrong = [f"{name} {value}" for name, value in one.health.items() if name != "status" and value not in (0, False)]
    return ", ".join([str(one.health.get("status", "unknown")), *wrong])


@takes(source)
def record_command(options: _Source, file: str, add: bool = False) -> None:
    proposal = propose(_read(options).components)
    if add:
        proposal = merge(read_baseline(file, proposal=True), proposal)
    elif os.path.lexists(file):
        raise UsageError(f"{printable(file)} is there already", "--add accepts what it has and what is there now")
    write_baseline(file, proposal)
    if options.json:
        show.data({"file": os.path.abspath(file), "models": proposal.models, "limits": proposal.limits})
        return
    name = printable(file)
    print(f"written to {name}: a proposal; look at it, then: ocigpu firmware approve {name} --by NAME")


def approve_command(file: str, by: str) -> None:
    baseline = approve(read_baseline(file, proposal=True), by)
    write_baseline(file, baseline)
    print(f"{printable(file)}: {show.count(len(baseline.models), 'model')}, signed off by {printable(by)}")


@takes(source)
def check_command(options: _Source, baseline: str, table: str = "", config: str = "") -> int:
    accepted = read_baseline(baseline)
    found = _read(options)
    path = table or f"{find_roots(load_settings(config)).host}{TABLE}"
    serials = {one.module_id: one.serial for one in read_table(path) if one.serial}
    deviations = compare_all(found.components, accepted, serials)
    if options.json:
        gpus = [one.name for one in found.components if one.slot]
        show.data({"gpus": gpus, "deviations": [_to_json(one) for one in deviations], "notes": list(found.notes)})
    else:
        for one in deviations:
            print(f"{show.styled('deviates:', '31')} {one.text}")
        show.notes(found.notes)
        count = show.count(sum(bool(one.slot) for one in found.components), "GPU")
        by = f"the baseline that {accepted.approved_by} signed off on {accepted.approved_at}"
        print(f"{count}, {show.count(len(deviations), 'deviation')} from {printable(by)}")
    return DEVIATES if deviations else 0


def _to_json(one: Deviation) -> dict[str, object]:
    return {**one._asdict(), "accepted": list(one.accepted), "text": one.text}
