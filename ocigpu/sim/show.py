"""Say what a simulated host holds."""

import os
from typing import Any

from ocigpu.sim.marker import read_marker

_STAND_IN_NOTE = (
    "device nodes are stand-in files: mknod was not permitted, so access by containers cannot be tested with them"
)


def describe_host(directory: str) -> dict[str, Any]:
    """Return what the host's marker says, plus ``directory``, ``config`` and ``faults`` (lines of DIR/faults).

    ``notes`` has one sentence for everything that is not as on a real host. Raises OcigpuError (OCIGPU-SIM-1) when the
    directory is not a simulated host.
    """
    path = os.path.abspath(directory)
    data = read_marker(path)
    faults = read_faults(path)
    notes = [*data.get("notes", [])]
    if data.get("nodes") == "stand-in":
        notes.append(_STAND_IN_NOTE)
    if faults:
        notes.append(f"faults are switched on: {', '.join(faults)}")
    return {
        "directory": path,
        "config": os.path.join(path, "config.toml"),
        **data,
        "faults": faults,
        "notes": notes,
    }


def read_faults(directory: str) -> list[str]:
    """Return the lines of DIR/faults, which nvml.c explains ("lost GPU"); none when there is no such file."""
    try:
        with open(os.path.join(directory, "faults"), encoding="utf-8", errors="replace") as file:
            return [line.strip() for line in file.read(4096).splitlines() if line.strip()]
    except FileNotFoundError:
        return []
