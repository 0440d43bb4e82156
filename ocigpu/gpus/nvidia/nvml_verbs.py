"""What a process of its own can ask of NVML or have it do, one function a verb; see :mod:`~.nvml_process`.

``main`` prints JSON: one document, or one a line.  What a GPU does not answer is left out, whatever the reason: one
lost GPU hides no other.  Sources: nvml.h, and NVIDIA's NVML API reference.
"""

import ctypes
import json
import sys
import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pynvml

from ocigpu.gpus.nvidia.nvml_child import MAX_GPUS, MAX_MIG_DEVICES, DriverPlace, enter

MIG_FIELDS = {
    "memory_mib": "memorySizeMB",
    "multiprocessors": "multiprocessorCount",
    "gi_slices": "gpuInstanceSliceCount",
    "ci_slices": "computeInstanceSliceCount",
    "copy": "sharedCopyEngineCount",
    "decoder": "sharedDecoderCount",
    "encoder": "sharedEncoderCount",
    "jpeg": "sharedJpegCount",
    "ofa": "sharedOfaCount",
}
FABRIC_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED
WAIT_MS = 2000
XIDS = pynvml.nvmlEventTypeXidCriticalError
NO_XIDS = "it reports no XIDs"


def main(verb: str, parent: str, library: str, chroot: str, simulation: str, *words: str) -> None:
    """Answer to a verb by the NVML at this place; raises OSError or NVMLError when that is not possible.

    Setting compute modes keeps root, which the driver demands for it.
    """
    load(parent, DriverPlace(library, chroot, simulation), as_root=verb == "set-compute-mode")
    pynvml.nvmlInit()
    VERBS[verb](*words)


def load(parent: str, place: DriverPlace, *, as_root: bool = False) -> None:
    """Load NVML into this process, which ends with the process ``parent``; raises OSError.

    Gives up root first unless it is needed.
    """
    pynvml.nvmlLib = ctypes.CDLL(enter(int(parent), place, as_root))


def try_(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer, None for any error."""
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


def say(document: Any) -> None:
    """Print a document as a line."""
    print(json.dumps(document), flush=True, file=sys.stdout)


def mig_devices(gpu: Any) -> list[tuple[Any, str]]:
    """Return the MIG devices of a GPU that answer, and their UUIDs; indices may have holes."""
    if (try_(pynvml.nvmlDeviceGetMigMode, gpu) or (0,))[0] != 1:
        return []
    indices = range(min(try_(pynvml.nvmlDeviceGetMaxMigDeviceCount, gpu) or 0, MAX_MIG_DEVICES))
    devices = [try_(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, index) for index in indices]
    named = [(device, try_(pynvml.nvmlDeviceGetUUID, device)) for device in devices if device]
    return [(device, uuid) for device, uuid in named if uuid]


def _named_gpus() -> list[tuple[Any, str]]:
    """Return the GPUs that answer, and their UUIDs."""
    handles = [
        try_(pynvml.nvmlDeviceGetHandleByIndex, index)
        for index in range(min(try_(pynvml.nvmlDeviceGetCount) or 0, MAX_GPUS))
    ]
    known = [(handle, try_(pynvml.nvmlDeviceGetUUID, handle)) for handle in handles if handle is not None]
    return [(handle, uuid) for handle, uuid in known if uuid]


# details: how GPUs are made and connected


def print_details() -> None:
    """Print memory, connections and sizes of MIG devices; see :mod:`ocigpu.kubernetes.hardware`."""
    named = _named_gpus()
    levels = [
        [one, two, level]
        for position, (first, one) in enumerate(named)
        for second, two in named[:position]
        if (level := try_(pynvml.nvmlDeviceGetTopologyCommonAncestor, first, second)) is not None
    ]
    say({"gpus": [_details(handle, uuid) for handle, uuid in named], "levels": levels})


def _details(handle: Any, uuid: str) -> dict[str, Any]:
    memory = try_(pynvml.nvmlDeviceGetMemoryInfo, handle)
    pci = try_(pynvml.nvmlDeviceGetPciInfo, handle)
    switches, links = _links(handle)
    sizes = {name: try_(pynvml.nvmlDeviceGetAttributes_v2, device) for device, name in mig_devices(handle)}
    return {
        "uuid": uuid,
        "bus_id": pci.busId.lower() if pci else "",
        "memory_mib": memory.total >> 20 if memory else 0,
        "clique": _clique(handle),
        "switch_links": switches,
        "links": links,
        "migs": {
            name: {key: int(getattr(size, field)) for key, field in MIG_FIELDS.items()}
            for name, size in sizes.items()
            if size
        },
    }


def _links(handle: Any) -> tuple[int, dict[str, int]]:
    """Return how many active NVLinks lead to switches, and how many to each other device by bus id."""
    switches, peers = 0, dict[str, int]()
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        if not try_(pynvml.nvmlDeviceGetNvLinkState, handle, link):
            continue
        kind = try_(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            switches += 1
        elif remote := try_(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link):
            peers[remote.busId.lower()] = peers.get(remote.busId.lower(), 0) + 1
    return switches, peers


def _clique(handle: Any) -> str:
    """Return "<cluster uuid>.<clique id>" of a GPU that is part of a multi-node NVLink fabric, else ""."""
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    info.version = pynvml.nvmlGpuFabricInfo_v2
    if try_(pynvml.nvmlDeviceGetGpuFabricInfoV, handle, ctypes.byref(info)) is None or info.state != FABRIC_COMPLETED:
        return ""
    cluster = bytes(info.clusterUuid)
    return f"{UUID(bytes=cluster)}.{info.cliqueId}" if any(cluster) else ""


# usage


def print_usage(interval: str) -> None:
    """Print memory, use and processes of all GPUs and MIG devices, see :mod:`ocigpu.gpus.usage`.

    Again each time so many seconds have passed; "0": once.
    """
    newest: dict[str, int] = {}
    while True:
        gpus = [(gpu, uuid) for whole in _named_gpus() for gpu, uuid in (whole, *mig_devices(whole[0]))]
        say([_usage(gpu, uuid, newest) for gpu, uuid in gpus])
        if not float(interval):
            return
        time.sleep(float(interval))


def _usage(gpu: Any, uuid: str, newest: dict[str, int]) -> dict[str, Any]:
    get_memory = pynvml.nvmlDeviceGetMemoryInfo
    memory = try_(get_memory, gpu, pynvml.nvmlMemory_v2) or try_(
        get_memory, gpu
    )  # drivers before 510 have only the old
    rates = try_(pynvml.nvmlDeviceGetUtilizationRates, gpu)
    milliwatts = try_(pynvml.nvmlDeviceGetPowerUsage, gpu)
    processes, newest[uuid] = read_processes(gpu, newest.get(uuid, 0))
    return {
        "uuid": uuid,
        "use": rates.gpu if rates else None,
        "used_mib": memory.used >> 20 if memory else None,
        "total_mib": memory.total >> 20 if memory else None,
        "watts": None if milliwatts is None else round(milliwatts / 1000),
        "celsius": try_(pynvml.nvmlDeviceGetTemperature, gpu, pynvml.NVML_TEMPERATURE_GPU),
        "processes": processes,
    }


def read_processes(gpu: Any, since: int) -> tuple[list[list[int]], int]:
    """Return pid, MiB of memory and percent of GPU time of each process, and the time of the newest sample.

    ``since``: that time of the previous call, 0 for none: time is measured from there.  Without samples (an idle
    process, or a GPU that does not account for time) the percentage is 0.
    """
    memory: dict[int, int] = {}
    for function in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        for process in try_(function, gpu) or ():
            memory[process.pid] = max(memory.get(process.pid, 0), (process.usedGpuMemory or 0) >> 20)
    shares: dict[int, list[int]] = {}
    newest = since
    for sample in try_(pynvml.nvmlDeviceGetProcessUtilization, gpu, since) or ():
        shares.setdefault(sample.pid, []).append(sample.smUtil)
        newest = max(newest, sample.timeStamp)
    percent = {pid: sum(each) // len(each) for pid, each in shares.items()}
    return [[pid, memory.get(pid, 0), percent.get(pid, 0)] for pid in sorted({*memory, *shares})], newest


# compute modes


def set_compute_mode(mode: str, *uuids: str) -> None:
    """Set the mode of GPUs and print what did not work by UUID."""
    problems = {}
    for uuid in uuids:
        try:
            pynvml.nvmlDeviceSetComputeMode(pynvml.nvmlDeviceGetHandleByUUID(uuid.encode()), int(mode))
        except pynvml.NVMLError as error:
            problems[uuid] = str(error)
    say(problems)


# events


def watch_events() -> None:
    """Print the XID events of all GPUs, for ever; see :mod:`ocigpu.kubernetes.events`.

    ``{"watched": [...], "unwatched": {...}}`` first, then ``{"xid": ...}`` for each, and ``{}`` as a sign of life.
    Source: "Event Handling Methods" of the API reference.
    """
    events = pynvml.nvmlEventSetCreate()
    watched: list[str] = []
    unwatched: dict[str, str] = {}
    for index in range(min(pynvml.nvmlDeviceGetCount(), MAX_GPUS)):
        _watch(index, events, watched, unwatched)
    say({"watched": watched, "unwatched": unwatched})
    while watched:
        say(_wait(events))
    while unwatched and set(unwatched.values()) == {NO_XIDS}:  # starting again would not help
        time.sleep(WAIT_MS / 1000)
        say({})


def _watch(index: int, events: Any, watched: list[str], unwatched: dict[str, str]) -> None:
    name = str(index)
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        name = pynvml.nvmlDeviceGetUUID(handle)
        if not pynvml.nvmlDeviceGetSupportedEventTypes(handle) & XIDS:
            unwatched[name] = NO_XIDS
            return
        pynvml.nvmlDeviceRegisterEvents(handle, XIDS, events)
    except pynvml.NVMLError as error:
        unwatched[name] = str(error)
    else:
        watched.append(name)


def _wait(events: Any) -> dict[str, Any]:
    """Return the next event, {} when there was none for a while."""
    try:
        event = pynvml.nvmlEventSetWait_v2(events, WAIT_MS)
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_TIMEOUT:
            return {}
        raise
    if event.eventType != XIDS:
        return {}
    gpu = try_(pynvml.nvmlDeviceGetUUID, event.device) or ""  # one that was lost with this very event may not answer
    return {"xid": event.eventData, "gpu": gpu, "gi": event.gpuInstanceId, "ci": event.computeInstanceId}


VERBS: dict[str, Callable[..., None]] = {
    "details": print_details,
    "usage": print_usage,
    "set-compute-mode": set_compute_mode,
    "watch-events": watch_events,
}
