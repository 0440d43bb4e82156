"""What runs in a process that speaks to Fabric Manager: the closed library never runs in our own process.

Names, layouts and numbers: nv_fm_agent.h and nv_fm_types.h of package nvidia-fabric-manager-devel 610.  Every member
has the alignment 4 or 1, so nothing is padded; a structure's version word is its size, and a number in the top byte.

What hardware has yet to confirm: that the manager in use takes these layouts, and listens on a vsock.
"""

import ctypes
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from ocigpu.system.child import OVERFLOW_ID, drop_rights, end_with

MOST_GPUS = 16
MOST_PARTITIONS = 64

FM_SUCCESS = 0
FM_IN_USE = -7
FM_VERSION_MISMATCH = -6
UNIX = 2
CHANGED = 1
"""Not the library's: the manager's number is that of another set now."""

_u32 = ctypes.c_uint32


class ConnectParams1(ctypes.Structure):
    """fmConnectParams_v1."""

    _fields_ = [("version", _u32), ("addressInfo", ctypes.c_char * 256), ("timeoutMs", _u32), ("isUnix", _u32)]


class ConnectParams2(ctypes.Structure):
    """fmConnectParams_v2."""

    _fields_ = [*ConnectParams1._fields_, ("addressType", _u32)]


class GpuInfo(ctypes.Structure):
    """fmFabricPartitionGpuInfo_t."""

    _fields_ = [
        ("physicalId", _u32),
        ("uuid", ctypes.c_char * 80),
        ("pciBusId", ctypes.c_char * 32),
        ("numNvLinksAvailable", _u32),
        ("maxNumNvLinks", _u32),
        ("nvlinkLineRateMBps", _u32),
    ]


class PartitionInfo(ctypes.Structure):
    """fmFabricPartitionInfo_t."""

    _fields_ = [("partitionId", _u32), ("isActive", _u32), ("numGpus", _u32), ("gpuInfo", GpuInfo * MOST_GPUS)]


class PartitionList(ctypes.Structure):
    """fmFabricPartitionList_v2, whose number is 1."""

    _fields_ = [
        ("version", _u32),
        ("numPartitions", _u32),
        ("maxNumPartitions", _u32),
        ("partitionInfo", PartitionInfo * MOST_PARTITIONS),
    ]


class ActivatedList(ctypes.Structure):
    """fmActivatedFabricPartitionList_v1."""

    _fields_ = [("version", _u32), ("numPartitions", _u32), ("partitionIds", _u32 * MOST_PARTITIONS)]


def version_word(layout: type[ctypes.Structure]) -> int:
    """Return what the first member of a structure has to say."""
    return ctypes.sizeof(layout) | (2 if layout is ConnectParams2 else 1) << 24


def main(parent: str, order: str) -> None:
    """Carry out an order of :mod:`~ocigpu.gpus.nvidia.fabric.libnvfm` and print the answer, both JSON.

    What the library prints is not part of it.  The process has the rights of whoever owns the manager's socket, or the
    simulated host; for another machine it needs none.
    """
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked = json.loads(order)
    drop_rights(*_identity(asked))
    end_with(int(parent))
    print(json.dumps(_carry_out(asked)), file=answer, flush=True)
    sys.stdout.flush()
    os._exit(0)  # the library's threads are not waited for


def _identity(asked: dict[str, Any]) -> tuple[int, int]:
    path = asked["simulation"] or (asked["address"] if asked["type"] == UNIX else "")
    try:
        owner = os.stat(path)
    except OSError:
        return OVERFLOW_ID, OVERFLOW_ID
    return owner.st_uid, owner.st_gid


def _carry_out(asked: dict[str, Any]) -> dict[str, Any]:
    try:
        library = _load(asked["libraries"])
    except OSError as error:
        return {"load": str(error)}
    for name in ("fmLibInit", "fmConnect", "fmGetSupportedFabricPartitions"):
        if not hasattr(library, name):
            return {"load": f"it has no function {name}"}
    code = library.fmLibInit()
    if code not in (FM_SUCCESS, FM_IN_USE):
        return {"connect": code}
    handle = ctypes.c_void_p()
    code = _connect(library, handle, ConnectParams2, asked)
    if code == FM_VERSION_MISMATCH:  # a library of before knows the first version only
        code = _connect(library, handle, ConnectParams1, asked)
    if code:
        return {"connect": code}
    manager = _Manager(library, handle)
    answer = {"connect": 0, "steps": [manager.do(*step) for step in asked["steps"]]}
    library.fmDisconnect(handle)
    return answer


def _load(names: list[str]) -> ctypes.CDLL:
    """Return the first library that can be loaded; raises the OSError of the first otherwise."""
    failures = []
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            failures.append(error)
    raise failures[0]


def _connect(
    library: ctypes.CDLL, handle: ctypes.c_void_p, layout: type[ctypes.Structure], asked: dict[str, Any]
) -> int:
    parameters = layout()
    parameters.version = version_word(layout)
    parameters.addressInfo = asked["address"].encode()
    parameters.timeoutMs = asked["timeout_ms"]
    parameters.isUnix = int(asked["type"] == UNIX)
    if layout is ConnectParams2:
        parameters.addressType = asked["type"]
    return int(library.fmConnect(ctypes.byref(parameters), ctypes.byref(handle)))


class _Manager:
    """A connection; each step answers [code, value]."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self.library = library
        self.handle = handle
        self.steps: dict[str, Callable[..., list[Any]]] = {
            "list": self.read_list,
            "activate": self.activate,
            "deactivate": self.deactivate,
            "set": self.set,
        }

    def do(self, verb: str, *arguments: Any) -> list[Any]:
        return self.steps[verb](*arguments)

    def read_list(self) -> list[Any]:
        found = PartitionList()
        found.version = version_word(PartitionList)
        code = self.library.fmGetSupportedFabricPartitions(self.handle, ctypes.byref(found))
        return [code, None] if code else [0, _plain(found)]

    def activate(self, number: int, physical_ids: list[int]) -> list[Any]:
        return self._change("fmActivateFabricPartition", number, physical_ids)

    def deactivate(self, number: int, physical_ids: list[int]) -> list[Any]:
        return self._change("fmDeactivateFabricPartition", number, physical_ids)

    def _change(self, function: str, number: int, physical_ids: list[int]) -> list[Any]:
        """Change a partition unless its number is another set's by now: a manager of another version has come."""
        code, partitions = self.read_list()
        if code:
            return [code, None]
        if not any(one["id"] == number and one["gpus"] == physical_ids for one in partitions):
            return [CHANGED, None]
        return [int(self.library[function](self.handle, _u32(number))), None]

    def set(self, numbers: list[int]) -> list[Any]:
        active = ActivatedList()
        active.version = version_word(ActivatedList)
        active.numPartitions = len(numbers)
        active.partitionIds[: len(numbers)] = numbers
        return [int(self.library.fmSetActivatedFabricPartitions(self.handle, ctypes.byref(active))), None]


def _plain(found: PartitionList) -> list[dict[str, Any]]:
    """Return a list as the answer has it; counts that are out of bounds say that the layout is another's."""
    if found.numPartitions > MOST_PARTITIONS:
        return [{"bad": f"{found.numPartitions} partitions"}]
    return [_partition(found.partitionInfo[at]) for at in range(found.numPartitions)]


def _partition(info: PartitionInfo) -> dict[str, Any]:
    if info.numGpus > MOST_GPUS:
        return {"bad": f"partition {info.partitionId} has {info.numGpus} GPUs"}
    gpus = sorted((gpu.physicalId, gpu.numNvLinksAvailable, gpu.maxNumNvLinks) for gpu in info.gpuInfo[: info.numGpus])
    return {
        "id": info.partitionId,
        "active": bool(info.isActive),
        "gpus": [gpu[0] for gpu in gpus],
        "links": [gpu[1:] for gpu in gpus],
    }
