"""Say what a simulated host holds."""

import os
from typing import Any

from ocigpu.sim.marker import read_marker
from ocigpu.sim.models import describe_mig, find_model, gi_minor

_STAND_IN_NOTE = (
    "device nodes are stand-in files: mknod was not permitted, so access by containers cannot be tested with them"
)


def describe_host(directory: str) -> dict[str, Any]:
    """Return what the host's marker says, with the MIG devices that there are now.

    Added are ``directory``, ``config`` and ``faults`` (lines of DIR/faults); ``notes`` has one sentence for everything
    that is not as on a real host. Raises OcigpuError (OCIGPU-SIM-1) when the directory is not a simulated host.
    """
    path = os.path.abspath(directory)
    data = read_marker(path)
    _follow_mig(path, data)
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


def _follow_mig(directory: str, data: dict[str, Any]) -> None:
    """Put what programs have made of the GPUs by NVML since into ``data``; simhost.h explains the file."""
    try:
        with open(os.path.join(directory, "proc/driver/ocigpu-mig"), encoding="ascii") as file:
            lines = [line.split() for line in file]
    except FileNotFoundError:
        return
    profiles = find_model(data["model"]).mig_profiles
    for gpu in data["gpus"]:
        found = [line for line in lines if line[1:2] == [str(gpu["index"])]]
        gpu["mig_enabled"] = ["mode", str(gpu["index"]), "1"] in found
        gpu["mig_devices"] = []
        for instance, profile, _, ci, slices, _, uuid in (line[2:] for line in found if line[0] == "mig"):
            if int(ci) < 0:
                continue
            whole, minor = profiles[int(profile)], gi_minor(gpu["index"], int(instance))
            part = "" if int(slices) == whole.compute_slices else f"{slices}c."
            name = part + whole.name
            mig = describe_mig(len(gpu["mig_devices"]), uuid, name, int(instance), int(ci), minor)
            gpu["mig_devices"].append(mig)


def read_faults(directory: str) -> list[str]:
    """Return the lines of DIR/faults, which nvml.c explains ("lost GPU"); none when there is no such file."""
    try:
        with open(os.path.join(directory, "faults"), encoding="utf-8", errors="replace") as file:
            return [line.strip() for line in file.read(4096).splitlines() if line.strip()]
    except FileNotFoundError:
        return []
