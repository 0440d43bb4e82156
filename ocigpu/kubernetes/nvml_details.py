"""What runs in a process of its own to ask NVML for what only Kubernetes needs: memory, connections, sizes of MIG.

Prints one JSON document.  What a GPU does not answer is left out, whatever the reason: one lost GPU hides no other.
"""

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any

import pynvml

from ocigpu.gpus.nvidia.nvml_child import MAX_GPUS, MAX_MIG_DEVICES
from ocigpu.kubernetes.nvml_process import DriverPlace, load

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


def main(parent: str, *place: str) -> None:
    """Load NVML at this place and print what it says; raises OSError or NVMLError when it says nothing."""
    load(parent, DriverPlace(*place))
    handles = [
        _try(pynvml.nvmlDeviceGetHandleByIndex, index)
        for index in range(min(_try(pynvml.nvmlDeviceGetCount) or 0, MAX_GPUS))
    ]
    known = [(handle, _try(pynvml.nvmlDeviceGetUUID, handle)) for handle in handles if handle is not None]
    named = [(handle, uuid) for handle, uuid in known if uuid]
    levels = [
        [one, two, level]
        for position, (first, one) in enumerate(named)
        for second, two in named[:position]
        if (level := _try(pynvml.nvmlDeviceGetTopologyCommonAncestor, first, second)) is not None
    ]
    json.dump({"gpus": [_gpu(handle, uuid) for handle, uuid in named], "levels": levels}, sys.stdout)


def _try(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer, None for any error."""
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


def _gpu(handle: Any, uuid: str) -> dict[str, Any]:
    memory = _try(pynvml.nvmlDeviceGetMemoryInfo, handle)
    pci = _try(pynvml.nvmlDeviceGetPciInfo, handle)
    switches, links = _links(handle)
    return {
        "uuid": uuid,
        "bus_id": pci.busId.lower() if pci else "",
        "memory_mib": memory.total >> 20 if memory else 0,
        "clique": _clique(handle),
        "switch_links": switches,
        "links": links,
        "migs": _migs(handle),
    }


def _links(handle: Any) -> tuple[int, dict[str, int]]:
    """Return how many active NVLinks lead to switches, and how many to each other device by bus id."""
    switches, peers = 0, dict[str, int]()
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        if not _try(pynvml.nvmlDeviceGetNvLinkState, handle, link):
            continue
        kind = _try(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            switches += 1
        elif remote := _try(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link):
            peers[remote.busId.lower()] = peers.get(remote.busId.lower(), 0) + 1
    return switches, peers


def _clique(handle: Any) -> str:
    """Return "<cluster uuid>.<clique id>" of a GPU that is part of a multi-node NVLink fabric, else ""."""
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    info.version = pynvml.nvmlGpuFabricInfo_v2
    if _try(pynvml.nvmlDeviceGetGpuFabricInfoV, handle, ctypes.byref(info)) is None or info.state != FABRIC_COMPLETED:
        return ""
    cluster = bytes(info.clusterUuid).hex()
    if not cluster.strip("0"):
        return ""
    parts = (cluster[:8], cluster[8:12], cluster[12:16], cluster[16:20], cluster[20:32])
    return f"{'-'.join(parts)}.{info.cliqueId}"


def _migs(handle: Any) -> dict[str, dict[str, int]]:
    sizes: dict[str, dict[str, int]] = {}
    if (_try(pynvml.nvmlDeviceGetMigMode, handle) or (0,))[0] != 1:
        return {}
    for index in range(min(_try(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0, MAX_MIG_DEVICES)):
        device = _try(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        uuid = _try(pynvml.nvmlDeviceGetUUID, device) if device else None
        attributes = _try(pynvml.nvmlDeviceGetAttributes_v2, device) if uuid else None
        if attributes:
            sizes[str(uuid)] = {name: int(getattr(attributes, field)) for name, field in MIG_FIELDS.items()}
    return sizes
