"""NVML's details beyond the facts of :mod:`ocigpu.core.facts`: memory, connections, sizes of MIG devices.

NVML is queried at the start and when devices change, in a separate process with a deadline: a hung driver blocks that
process, never the plugin.
"""

from typing import Any

from pydantic import TypeAdapter

from ocigpu.core.facts import HostFacts
from ocigpu.gpus.nvidia.nvml_process import NvmlError, ask
from ocigpu.gpus.on_node import GpuDetails, Hardware

DEADLINE = 20.0
"""Seconds: each idle GPU takes one or two to wake up."""

_GPUS = TypeAdapter(list[GpuDetails])

NOT_OFFERED = (
    "the GPU of a Jetson is not offered: it has no health to report, and every pod gets the same;"
    " use CDI: ocigpu cdi generate --mode csv"
)


def nvml_silence(facts: HostFacts) -> str:
    """Return why NVML gave no answer about GPUs that the kernel's driver lists, "" when it did or there are none."""
    if facts.source != "procfs" or not facts.gpus:
        return ""
    return next((note for note in facts.notes if note.startswith("NVML")), "NVML gave no answer")


def read_hardware(facts: HostFacts, seconds: float = DEADLINE) -> Hardware:
    """Return what the host's NVML says; waits no longer than ``seconds``.  Never raises for what NVML does."""
    try:
        return ask("details", facts, seconds, parse=parse_hardware)
    except NvmlError as error:
        return Hardware(problem=str(error))


def parse_hardware(data: Any) -> Hardware:
    """Return the records of the document that :mod:`~ocigpu.gpus.nvidia.nvml_verbs` prints for ``details``.

    Raises ValueError, TypeError, KeyError or AttributeError for anything else.
    """
    gpus = _GPUS.validate_python(data["gpus"])
    levels = {}
    for one, two, level in data["levels"]:
        levels[one, two] = levels[two, one] = int(level)
    return Hardware({gpu.uuid: gpu for gpu in gpus}, levels)


FAMILIES = {1: "tesla", 2: "fermi", 3: "kepler", 5: "maxwell", 6: "pascal", 9: "hopper", 10: "blackwell",
            12: "blackwell", 13: "rubin"}  # fmt: skip
"""Families by the major number of the compute capability, where that is enough."""


def family(architecture: str) -> str:
    """Return the family of a compute capability, e.g. "ampere" for "8.6"; "undefined" for an unknown one."""
    major, _, minor = architecture.partition(".")
    if not major.isdigit() or not minor.isdigit():
        return "undefined"
    if major == "7":
        return "turing" if int(minor) >= 5 else "volta"
    if major == "8":
        return "ada-lovelace" if int(minor) >= 9 else "ampere"
    return FAMILIES.get(int(major), "undefined")
