"""What runs in a process of its own to wait for NVML's XID events; see :mod:`ocigpu.kubernetes.events`.

Prints a JSON object a line: ``{"watched": [...], "unwatched": {...}}`` first, then ``{"xid": ...}`` for each event, and
``{}`` as a sign of life.  Sources: nvml.h and NVIDIA's NVML API reference, "Event Handling Methods".
"""

import ctypes
import json
import sys
from typing import Any

import pynvml

from ocigpu.host.nvml_child import MAX_GPUS, _drop_privileges, _end_with, _identity

WAIT_MS = 2000
WANTED = pynvml.nvmlEventTypeXidCriticalError
TIMEOUT = pynvml.NVML_ERROR_TIMEOUT


def main(library: str, simulation_root: str, parent: str) -> None:
    """Watch all GPUs of the library at this path; raises OSError or NVMLError when it cannot.

    Gives up root first, and ends with the process ``parent``.
    """
    _drop_privileges(*_identity("", simulation_root))
    _end_with(int(parent))
    pynvml.nvmlLib = ctypes.CDLL(library)
    pynvml.nvmlInit()
    events = pynvml.nvmlEventSetCreate()
    watched: list[str] = []
    unwatched: dict[str, str] = {}
    for index in range(min(pynvml.nvmlDeviceGetCount(), MAX_GPUS)):
        _watch(index, events, watched, unwatched)
    _print({"watched": watched, "unwatched": unwatched})
    while watched:
        _print(_wait(events))


def _watch(index: int, events: Any, watched: list[str], unwatched: dict[str, str]) -> None:
    name = str(index)
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        name = pynvml.nvmlDeviceGetUUID(handle)
        if not pynvml.nvmlDeviceGetSupportedEventTypes(handle) & WANTED:
            unwatched[name] = "it reports no XIDs"
            return
        pynvml.nvmlDeviceRegisterEvents(handle, WANTED, events)
    except pynvml.NVMLError as error:
        unwatched[name] = str(error)
    else:
        watched.append(name)


def _wait(events: Any) -> dict[str, Any]:
    """Return the next event, {} when there was none for a while."""
    try:
        event = pynvml.nvmlEventSetWait_v2(events, WAIT_MS)
    except pynvml.NVMLError as error:
        if error.value == TIMEOUT:
            return {}
        raise
    if event.eventType != WANTED:
        return {}
    try:
        gpu = pynvml.nvmlDeviceGetUUID(event.device)
    except pynvml.NVMLError:  # a GPU that was lost with this very event may not answer
        gpu = ""
    return {"xid": event.eventData, "gpu": gpu, "gi": event.gpuInstanceId, "ci": event.computeInstanceId}


def _print(document: dict[str, Any]) -> None:
    print(json.dumps(document), flush=True, file=sys.stdout)
