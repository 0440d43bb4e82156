"""Queries and commands to NVML for a separate process, one function for each verb; see :mod:`~.nvml_process`.

``main`` prints JSON: one document, or one for each line.  Values that a GPU does not report are left out, whatever the
reason: one lost GPU hides no other.  Sources: nvml.h, and NVIDIA's NVML API reference.
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
FABRIC_STATES = {
    0: "",
    1: "NVLink fabric: the registration has not begun",
    2: "NVLink fabric: the registration is under way",
}
"""Of NVML_GPU_FABRIC_STATE_*: not supported, not started, in progress."""
UNCORRECTED = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_AGGREGATE_ECC)
WAIT_MS = 2000
XIDS = pynvml.nvmlEventTypeXidCriticalError
NO_XIDS = "it reports no XIDs"


def main(verb: str, parent: str, library: str, chroot: str, simulation: str, *words: str) -> None:
    """Answer to a verb by the NVML at this place; raises OSError or NVMLError when that is not possible.

    What the driver demands root for keeps it.
    """
    load(parent, DriverPlace(library, chroot, simulation), as_root=verb in AS_ROOT)
    pynvml.nvmlInit()
    VERBS[verb](*words)


def load(parent: str, place: DriverPlace, *, as_root: bool = False) -> None:
    """Load NVML into this process, which ends with the process ``parent``; raises OSError.

    Drops root first unless it is needed.
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
    """Print memory, connections and sizes of MIG devices; see :mod:`ocigpu.gpus.nvidia.hardware`."""
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
    clique, fabric_problem = _fabric(handle)
    return {
        "uuid": uuid,
        "bus_id": pci.busId.lower() if pci else "",
        "memory_mib": memory.total >> 20 if memory else 0,
        "clique": clique,
        "fabric_problem": fabric_problem,
        "switch_links": switches,
        "links": links,
        "migs": {
            name: {key: int(getattr(size, field)) for key, field in MIG_FIELDS.items()}
            for name, size in sizes.items()
            if size
        },
        "persistent": None if (mode := try_(pynvml.nvmlDeviceGetPersistenceMode, handle)) is None else bool(mode),
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


def _fabric(handle: Any) -> tuple[str, str]:
    """Return "<cluster uuid>.<clique id>" of a GPU that is part of a multi-node NVLink fabric, and why it is unknown.

    Both are "" for a GPU without such a fabric: state 0, or a cluster of zeros.  The status counts once the
    registration is completed (nvml.h, nvmlGpuFabricInfo_v2_t).
    """
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    info.version = pynvml.nvmlGpuFabricInfo_v2
    if try_(pynvml.nvmlDeviceGetGpuFabricInfoV, handle, ctypes.byref(info)) is None:
        return "", ""
    if info.state != FABRIC_COMPLETED:
        return "", FABRIC_STATES.get(info.state, f"NVLink fabric: state {info.state}")
    if info.status != pynvml.NVML_SUCCESS:
        return "", f"NVLink fabric: the registration failed with status {info.status}"
    cluster = bytes(info.clusterUuid)
    return (f"{UUID(bytes=cluster)}.{info.cliqueId}" if any(cluster) else ""), ""


# firmware: what a baseline is about


def print_firmware() -> None:
    """Print versions, numbers and health of GPUs; see :mod:`ocigpu.gpus.nvidia.firmware`."""
    say([_firmware(handle, uuid) for handle, uuid in _named_gpus()])


def _firmware(gpu: Any, uuid: str) -> dict[str, Any]:
    _, rows, pending, failed = try_(pynvml.nvmlDeviceGetRemappedRows, gpu) or (None,) * 4
    return {
        "bus_id": pynvml.nvmlDeviceGetPciInfo(gpu).busId,
        "uuid": uuid,
        "model": try_(pynvml.nvmlDeviceGetName, gpu),
        "part_number": try_(pynvml.nvmlDeviceGetBoardPartNumber, gpu),
        "serial": try_(pynvml.nvmlDeviceGetSerial, gpu),
        "module_id": try_(pynvml.nvmlDeviceGetModuleId, gpu),
        "vbios": try_(pynvml.nvmlDeviceGetVbiosVersion, gpu),
        "inforom": try_(pynvml.nvmlDeviceGetInforomImageVersion, gpu),
        "ecc_mode": try_(pynvml.nvmlDeviceGetEccMode, gpu),
        "mig_mode": try_(pynvml.nvmlDeviceGetMigMode, gpu),
        "corrupted": _is_corrupted(gpu),
        "ecc": try_(pynvml.nvmlDeviceGetTotalEccErrors, gpu, *UNCORRECTED),
        "rows": rows,
        "pending": None if pending is None else bool(pending),
        "failed": None if failed is None else bool(failed),
    }


def _is_corrupted(gpu: Any) -> bool | None:
    """Tell whether the InfoROM is damaged; None where NVML does not say."""
    try:
        pynvml.nvmlDeviceValidateInforom(gpu)
    except pynvml.NVMLError as error:
        return True if error.value == pynvml.NVML_ERROR_CORRUPTED_INFOROM else None
    return False


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


# compute and persistence modes


def set_compute_mode(mode: str, *uuids: str) -> None:
    """Set the compute mode of GPUs and print what did not work by UUID."""
    _set_mode(pynvml.nvmlDeviceSetComputeMode, mode, uuids)


def set_persistence_mode(mode: str, *uuids: str) -> None:
    """Set the persistence mode of GPUs, 0 or 1, and print what did not work by UUID."""
    _set_mode(pynvml.nvmlDeviceSetPersistenceMode, mode, uuids)


def _set_mode(function: Callable[[Any, int], object], mode: str, uuids: tuple[str, ...]) -> None:
    problems = {}
    for uuid in uuids:
        try:
            function(pynvml.nvmlDeviceGetHandleByUUID(uuid.encode()), int(mode))
        except pynvml.NVMLError as error:
            problems[uuid] = str(error)
    say(problems)


# MIG


GI_PROFILES = 0x12
"""NVML_GPU_INSTANCE_PROFILE_COUNT of CUDA 13."""
CI_PROFILES = 9
"""NVML_COMPUTE_INSTANCE_PROFILE_COUNT."""
MAX_INSTANCES = 32
ENGINES = ("multiprocessor", "copyEngine", "decoder", "encoder", "jpeg", "ofa")
"""Of nvmlGpuInstanceProfileInfo_t, in the order of :class:`ocigpu.gpus.nvidia.mig_layout.Profile`."""


def print_mig_layout() -> None:
    """Print how each GPU is cut, and could be; see :mod:`ocigpu.gpus.nvidia.mig_layout`.  Needs root."""
    say([_mig_layout(pynvml.nvmlDeviceGetIndex(gpu), gpu, uuid) for gpu, uuid in _named_gpus()])


def _mig_layout(number: int, gpu: Any, uuid: str) -> dict[str, Any]:
    pci = try_(pynvml.nvmlDeviceGetPciInfo, gpu)
    mode, pending = try_(pynvml.nvmlDeviceGetMigMode, gpu) or (None, None)
    numbers = () if mode is None else range(GI_PROFILES)
    asked = [(profile, try_(pynvml.nvmlDeviceGetGpuInstanceProfileInfo, gpu, profile)) for profile in numbers]
    profiles = [(profile, info) for profile, info in asked if info]
    devices: dict[tuple[int, int], str] = {}
    for device, name in mig_devices(gpu):
        ids = (try_(pynvml.nvmlDeviceGetGpuInstanceId, device), try_(pynvml.nvmlDeviceGetComputeInstanceId, device))
        devices[ids] = name
    return {
        "number": number,
        "uuid": uuid,
        "bus_id": pci.busId.lower() if pci else "",
        "model": try_(pynvml.nvmlDeviceGetName, gpu) or "",
        "device_id": pci.pciDeviceId if pci else 0,
        "subsystem_id": pci.pciSubSystemId if pci else 0,
        "mode": mode,
        "pending": pending,
        "profiles": [_mig_profile(gpu, profile, info) for profile, info in profiles],
        "instances": [
            _mig_instance(gi, info, devices)
            for _, info in profiles
            for gi in _listed(pynvml.nvmlDeviceGetGpuInstances, gpu, info.id, pynvml.c_nvmlGpuInstance_t)
        ],
    }


def _listed(function: Callable[..., Any], where: Any, profile: int, kind: Any) -> list[Any]:
    """Return the instances of a profile."""
    count, room = ctypes.c_uint(0), (kind * MAX_INSTANCES)()
    found = try_(function, where, profile, room, ctypes.byref(count))
    return [] if found is None else list(room[: min(count.value, MAX_INSTANCES)])


def _mig_profile(gpu: Any, number: int, info: Any) -> dict[str, Any]:
    count, room = ctypes.c_uint(MAX_INSTANCES), (pynvml.c_nvmlGpuInstancePlacement_t * MAX_INSTANCES)()
    places = try_(pynvml.nvmlDeviceGetGpuInstancePossiblePlacements, gpu, info.id, room, ctypes.byref(count))
    found = [] if places is None else room[: min(count.value, MAX_INSTANCES)]
    return {
        "name": info.name.removeprefix("MIG "),
        "id": info.id,
        "slices": info.sliceCount,
        "most": info.instanceCount,
        "size": found[0].size if found else 0,
        "starts": [place.start for place in found],
        "number": number,
        "contents": [info.memorySizeMB, *(getattr(info, f"{name}Count") for name in ENGINES)],
    }


def _ci_profiles(gi: Any) -> dict[int, Any]:
    """Return the profiles of compute instances that a GPU instance can have, by nvmlComputeInstanceProfile."""
    asked = [
        (number, try_(pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo, gi, number, 0))
        for number in range(CI_PROFILES)
    ]
    return {number: info for number, info in asked if info}


def _usual_profiles(profiles: dict[int, Any]) -> dict[int, int]:
    """Return the number of the profile for each size in compute slices.

    A GPU instance of one compute slice may have several of that size: the one with all of its multiprocessors counts,
    as for nvidia-smi's -C.  Of a part the first one does.
    """
    whole = max((info.sliceCount for info in profiles.values()), default=0)
    found: dict[int, int] = {}
    for number, info in profiles.items():
        size = info.sliceCount
        more = size == whole and size in found and info.multiprocessorCount > profiles[found[size]].multiprocessorCount
        if size not in found or more:
            found[size] = number
    return found


def _compute_instances(gi: Any) -> list[tuple[int, Any]]:
    """Return the compute instances in a GPU instance with the numbers of their profiles."""
    get, kind = pynvml.nvmlGpuInstanceGetComputeInstances, pynvml.c_nvmlComputeInstance_t
    return [(number, ci) for number, info in _ci_profiles(gi).items() for ci in _listed(get, gi, info.id, kind)]


def _mig_instance(gi: Any, profile: Any, devices: dict[tuple[int, int], str]) -> dict[str, Any]:
    info = pynvml.nvmlGpuInstanceGetInfo(gi)
    compute, profiles = _compute_instances(gi), _ci_profiles(gi)
    usual = _usual_profiles(profiles)
    names = [devices.get((info.id, pynvml.nvmlComputeInstanceGetInfo(ci).id), "") for _, ci in compute]
    sizes = [profiles[number].sliceCount for number, _ in compute]
    numbers = [number for number, _ in compute]
    return {
        "profile": profile.id,
        "start": info.placement.start,
        "cis": sizes,
        "numbers": numbers,
        "usual": numbers == [usual[size] for size in sizes],
        "gi": info.id,
        "uuids": list(filter(None, names)),
    }


def change_mig(text: str) -> None:
    """Carry out steps in order and print how many were done, and why not all; needs root.

    A step is ``[UUID of the GPU, {"mode": 0 or 1}]``, ``{"destroy": id of a GPU instance}`` or ``{"create": profile
    id, "start": slice, "size": slices, "cis": [compute slices], "numbers": [nvmlComputeInstanceProfile]}``; without
    numbers the sizes say which.
    """
    steps = json.loads(text)
    for number, (uuid, step) in enumerate(steps):
        try:
            _change_mig(pynvml.nvmlDeviceGetHandleByUUID(uuid.encode()), step)
        except pynvml.NVMLError as error:
            say({"done": number, "error": str(error)})
            return
    say({"done": len(steps), "error": ""})


def _change_mig(gpu: Any, step: dict[str, Any]) -> None:
    if "mode" in step:
        pynvml.nvmlDeviceSetMigMode(gpu, step["mode"])  # whether it is active yet, or pending, is read afterwards
    elif "destroy" in step:
        _destroy(pynvml.nvmlDeviceGetGpuInstanceById(gpu, step["destroy"]))
    else:
        place = pynvml.c_nvmlGpuInstancePlacement_t(step["start"], step["size"])
        gi = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, step["create"], ctypes.byref(place))
        try:
            profiles = _ci_profiles(gi)
            usual = _usual_profiles(profiles)
            for number in step.get("numbers") or [usual.get(size, -1) for size in step["cis"]]:
                if number not in profiles:
                    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
                pynvml.nvmlGpuInstanceCreateComputeInstance(gi, profiles[number].id)
        except pynvml.NVMLError:
            try_(_destroy, gi)
            raise


def _destroy(gi: Any) -> None:
    for _, ci in _compute_instances(gi):
        pynvml.nvmlComputeInstanceDestroy(ci)
    pynvml.nvmlGpuInstanceDestroy(gi)


# events


def watch_events() -> None:
    """Print the XID events of all GPUs, for ever; see :mod:`ocigpu.kubernetes.node.program`.

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


AS_ROOT = ("set-compute-mode", "set-persistence-mode", "mig-layout", "change-mig")
VERBS: dict[str, Callable[..., None]] = {
    "details": print_details,
    "usage": print_usage,
    "set-compute-mode": set_compute_mode,
    "set-persistence-mode": set_persistence_mode,
    "watch-events": watch_events,
    "firmware": print_firmware,
    "mig-layout": print_mig_layout,
    "change-mig": change_mig,
}
