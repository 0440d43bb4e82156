"""Compute modes of GPUs: exclusive to one process while a control daemon of MPS shares them, else the default.

Set in a process of its own with a deadline, like every question to NVML; it keeps root, which the driver demands here.
Source: nvmlDeviceSetComputeMode of NVIDIA's NVML API reference.
"""

import json
import sys
from collections.abc import Sequence

from ocigpu.core.errors import printable
from ocigpu.core.facts import HostFacts
from ocigpu.kubernetes.nvml_process import DriverPlace, NvmlError, ask, load

DEFAULT, EXCLUSIVE_PROCESS = 0, 3  # nvmlComputeMode_t
SECONDS = 20.0


def set_compute_mode(facts: HostFacts, uuids: Sequence[str], mode: int, seconds: float = SECONDS) -> dict[str, str]:
    """Set the mode of GPUs and return why not by UUID, {} when all have it; needs root (CAP_SYS_ADMIN).

    Waits no longer than ``seconds`` and never raises for what NVML does.
    """
    try:
        found = ask("ocigpu.kubernetes.compute_mode", facts, seconds, str(mode), *uuids)
    except NvmlError as error:
        return dict.fromkeys(uuids, str(error))
    return {str(uuid): printable(str(problem), 200) for uuid, problem in found.items()}


def main(parent: str, library: str, chroot: str, simulation: str, mode: str, *uuids: str) -> None:
    """Set the mode and print, as JSON, what did not work by UUID.  Raises OSError or NVMLError."""
    import pynvml

    load(parent, DriverPlace(library, chroot, simulation), as_root=True)
    problems = {}
    for uuid in uuids:
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
            pynvml.nvmlDeviceSetComputeMode(handle, int(mode))
        except pynvml.NVMLError as error:
            problems[uuid] = str(error)
    json.dump(problems, sys.stdout)
