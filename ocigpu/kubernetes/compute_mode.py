"""Compute modes of GPUs: exclusive to one process while a control daemon of MPS shares them, else the default.

Set in a process of its own with a deadline, like every question to NVML; it keeps root, which the driver demands here.
Source: nvmlDeviceSetComputeMode of NVIDIA's NVML API reference.
"""

import ctypes
import json
import subprocess
import sys
from collections.abc import Sequence

from ocigpu.errors import printable
from ocigpu.facts import HostFacts

DEFAULT, EXCLUSIVE_PROCESS = 0, 3  # nvmlComputeMode_t
SECONDS = 20.0
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from ocigpu.kubernetes.compute_mode import main; main(*sys.argv[2:])"
)


def set_compute_mode(facts: HostFacts, uuids: Sequence[str], mode: int, seconds: float = SECONDS) -> dict[str, str]:
    """Set the mode of GPUs and return why not by UUID, {} when all have it; needs root (CAP_SYS_ADMIN).

    Waits no longer than ``seconds`` and never raises for what NVML does.
    """
    library = next(
        (lib.host_path for lib in facts.libraries if lib.soname == "libnvidia-ml.so.1" and lib.bits == 64), ""
    )
    if not library:
        return dict.fromkeys(uuids, "the host has no NVML library")
    paths = json.dumps(list(filter(None, sys.path)))
    command = [sys.executable, "-I", "-c", _CODE, paths, library, str(mode), *uuids]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, env={}, cwd="/", check=False
        )
        found = json.loads(done.stdout) if not done.returncode else None
    except subprocess.TimeoutExpired:
        return dict.fromkeys(uuids, f"NVML did not answer within {seconds:g} s")
    except (OSError, ValueError) as error:
        return dict.fromkeys(uuids, printable(str(error), 200))
    if found is None:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return dict.fromkeys(uuids, printable(lines[-1] if lines else f"NVML ended with {done.returncode}", 200))
    return {str(uuid): printable(str(problem), 200) for uuid, problem in found.items()}


def main(library: str, mode: str, *uuids: str) -> None:
    """Set the mode and print, as JSON, what did not work by UUID.  Raises OSError or NVMLError."""
    import pynvml

    pynvml.nvmlLib = ctypes.CDLL(library)
    pynvml.nvmlInit()
    problems = {}
    for uuid in uuids:
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
            pynvml.nvmlDeviceSetComputeMode(handle, int(mode))
        except pynvml.NVMLError as error:
            problems[uuid] = str(error)
    json.dump(problems, sys.stdout)
