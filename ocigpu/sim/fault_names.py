"""Names of the faults that a simulated host can have; :mod:`ocigpu.sim.faults` makes them."""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple


class FaultName(NamedTuple):
    """One table of faults.toml: the fault, and the names of the doctor's findings; ``steps``: how it is made."""

    text: str
    findings: tuple[str, ...]
    steps: dict[str, Any]


def _read_faults() -> dict[str, FaultName]:
    tables = tomllib.loads(Path(__file__).with_name("faults.toml").read_text(encoding="utf-8"))
    return {
        name: FaultName(table.pop("text"), tuple(table.pop("findings", ())), table) for name, table in tables.items()
    }


FAULT_NAMES = _read_faults()
"""Every fault by the name that ``ocigpu sim create --fault`` takes."""
