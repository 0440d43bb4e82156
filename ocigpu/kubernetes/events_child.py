"""What runs in a process of its own to wait for NVML's XID events; see :mod:`ocigpu.kubernetes.events`.

Prints a JSON object a line: ``{"watched": [...], "unwatched": {...}}`` first, then ``{"xid": ...}`` for each event, and
``{}`` as a sign of life.  Sources: nvml.h and NVIDIA's NVML API reference, "Event Handling Methods".
"""

import json
import sys
import time
from typing import Any

import pynvml

from ocigpu.gpus.nvidia.nvml_child import MAX_GPUS
from ocigpu.kubernetes.nvml_process import DriverPlace, load

WAIT_MS = 2000
WANTED = pynvml.nvmlEventTypeXidCriticalError
TIMEOUT = pynvml.NVML_ERROR_TIMEOUT
NO_XIDS = "it reports no XIDs"


def main(parent: str, *place: str) -> None:
    """Watch all GPUs of NVML at this place; raises OSError or NVMLError when it cannot."""
    load(parent, DriverPlace(*place))
    events = pynvml.nvmlEventSetCreate()
    watched: list[str] = []
    unwatched: dict[str, str] = {}
    for index in range(min(pynvml.nvmlDeviceGetCount(), MAX_GPUS)):
        _watch(index, events, watched, unwatched)
    _print({"watched": watched, "unwatched": unwatched})
    while watched:
        _print(_wait(events))
    while unwatched and set(unwatched.values()) == {NO_XIDS}:  # starting again would not help
        time.sleep(WAIT_MS / 1000)
        _print({})


def _watch(index: int, events: Any, watched: list[str], unwatched: dict[str, str]) -> None:
    name = str(index)
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        name = pynvml.nvmlDeviceGetUUID(handle)
        if not pynvml.nvmlDeviceGetSupportedEventTypes(handle) & WANTED:
            unwatched[name] = NO_XIDS
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
