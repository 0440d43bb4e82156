"""What NVML says beyond the facts of :mod:`ocigpu.facts`: memory, connections, sizes of MIG devices.

It is asked once at start and when devices change, in a process of its own with a deadline: a hung driver hangs that
process, never the plugin.  Starting it is safe beside gRPC's threads, which a fork would not be.
"""

import json
import subprocess
import sys
from typing import Any, NamedTuple

from ocigpu.errors import printable
from ocigpu.facts import HostFacts

DEADLINE = 20.0
"""Seconds: each idle GPU takes one or two to wake up."""
_REAP = 0.5
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from ocigpu.kubernetes.nvml_details import main; main(*sys.argv[2:])"
)


class MigSize(NamedTuple):
    """What a MIG device consists of; engines are counts."""

    memory_mib: int = 0
    multiprocessors: int = 0
    gi_slices: int = 0
    ci_slices: int = 0
    copy: int = 0
    decoder: int = 0
    encoder: int = 0
    jpeg: int = 0
    ofa: int = 0


class GpuDetails(NamedTuple):
    """One GPU: ``clique`` is "<cluster uuid>.<clique id>" or "".

    ``links``: NVLinks to other GPUs by their bus ids; ``switch_links``: those to NVSwitches.  ``migs``: by UUID.
    """

    uuid: str
    bus_id: str = ""
    memory_mib: int = 0
    clique: str = ""
    switch_links: int = 0
    links: "dict[str, int]" = {}
    migs: "dict[str, MigSize]" = {}


class Hardware(NamedTuple):
    """``gpus`` by UUID; ``levels``: NVML's topology level by pairs of UUIDs; ``problem``: why nothing is known."""

    gpus: "dict[str, GpuDetails]" = {}
    levels: "dict[tuple[str, str], int]" = {}
    problem: str = ""


def read_hardware(facts: HostFacts, seconds: float = DEADLINE) -> Hardware:
    """Return what the host's NVML says; waits no longer than ``seconds``.  Never raises for what NVML does."""
    library = next(
        (lib.host_path for lib in facts.libraries if lib.soname == "libnvidia-ml.so.1" and lib.bits == 64), ""
    )
    if not library:
        return Hardware(problem="the host has no NVML library")
    command = [
        sys.executable,
        "-I",
        "-c",
        _CODE,
        json.dumps(list(filter(None, sys.path))),
        library,
        facts.driver_root if facts.simulated else "",
    ]
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={}, cwd="/"
        )
    except OSError as error:
        return Hardware(problem=f"{sys.executable}: {error.strerror}")
    with child:
        try:
            output, complaint = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            _reap(child)
            return Hardware(problem=f"NVML did not answer within {seconds:g} s")
    if child.returncode:
        lines = complaint.decode(errors="replace").strip().splitlines()
        return Hardware(problem=printable(lines[-1] if lines else f"NVML ended its process ({child.returncode})", 300))
    try:
        return parse_hardware(json.loads(output))
    except (ValueError, TypeError, KeyError, AttributeError):
        return Hardware(problem="NVML gave no usable answer")


def _reap(child: "subprocess.Popen[bytes]") -> None:
    """Wait for a killed child, but not for one that is stuck in the driver: that is left to init."""
    try:
        child.wait(_REAP)
    except subprocess.TimeoutExpired:
        child.returncode = -9


def parse_hardware(data: Any) -> Hardware:
    """Return the records of the document that :mod:`~ocigpu.kubernetes.nvml_details` prints.

    Raises ValueError, TypeError, KeyError or AttributeError for anything else.
    """
    gpus = [
        GpuDetails(
            printable(str(item["uuid"]), 96),
            printable(str(item["bus_id"]), 96),
            int(item["memory_mib"]),
            printable(str(item["clique"]), 96),
            int(item["switch_links"]),
            {str(bus_id): int(count) for bus_id, count in item["links"].items()},
            {
                str(uuid): MigSize(**{name: int(value) for name, value in size.items()})
                for uuid, size in item["migs"].items()
            },
        )
        for item in data["gpus"]
    ]
    levels = {}
    for one, two, level in data["levels"]:
        levels[one, two] = levels[two, one] = int(level)
    return Hardware({gpu.uuid: gpu for gpu in gpus}, levels)
