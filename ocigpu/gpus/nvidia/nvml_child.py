"""Code of the process that queries NVML: the closed library never runs in our own process.

:func:`enter` drops every privilege before the library is loaded.  This module queries the facts of a host, in a forked
child of programs that cannot afford ctypes; other queries are in :mod:`~.nvml_verbs`.  Function names, structures and
numbers: nvml.h of the driver's development kit.
"""

import os
import stat
import struct

from ocigpu.core import rawjson
from ocigpu.core.record import NamedTuple
from ocigpu.system import foreign as ctypes
from ocigpu.system import libc  # noqa: F401 - which dropping rights loads, and below another root cannot
from ocigpu.system.child import OVERFLOW_ID, be_child, drop_rights, end_with, isolate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_GPUS = 256
MAX_MIG_DEVICES = 64

NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_FUNCTION_NOT_FOUND = 13
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_RESET_REQUIRED = 16
NVML_ERROR_GPU_NOT_FOUND = 28
FATAL = (NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED, NVML_ERROR_GPU_NOT_FOUND)
"""Errors that mean the GPU cannot be used, for any query."""

MISSING = (AttributeError, OSError)
"""What a library raises that has no such function."""

_TEXT_SIZE = 96
_PCI_INFO_SIZE = 256  # more than any version of nvmlPciInfo_t
_ADDRESSING_MODE_VERSION = 1 << 24 | 8  # nvmlDeviceAddressingMode_v1: its number, and its size in bytes
_PCI_NUMBERS = struct.Struct("<16x3I")  # busIdLegacy, then domain, bus, device: the same in all versions


class DriverPlace(NamedTuple):
    """``library``: path of NVML, "" for none, below the driver root ``chroot`` when that is to be entered for it.

    ``simulation``: root of a simulated host, "" for a real one.
    """

    library: str
    chroot: str = ""
    simulation: str = ""


def enter(parent: int, place: DriverPlace, as_root: bool = False) -> str:
    """Prepare this process for loading NVML; returns the library's path.

    It ends with the process ``parent`` from now on.  Drops root for the ids of :func:`_find_identity`, and all
    capabilities for good, unless ``as_root``.
    """
    library, chroot, simulation = place
    identity = _find_identity(chroot, simulation)
    if chroot and not _enter_root(chroot):
        library = chroot + library
    if not as_root:
        drop_rights(*identity)
    end_with(parent)
    return library


def main(pipe: str, parent: str, *place: str) -> None:
    """Be the child of :func:`ocigpu.gpus.nvidia.nvml.start_nvml` in a program that it has executed; never returns."""
    be_child(lambda pipe: answer_in_child(int(parent), pipe, DriverPlace(*place)), int(pipe))


def answer_in_child(parent: int, pipe: int, place: DriverPlace) -> bytes:
    """Return the facts that NVML knows, as JSON; of a forked child, which ends with the process ``parent``."""
    isolate(pipe)
    return rawjson.dump(_ask(enter(parent, place))).encode()


def _find_identity(chroot: str, simulation_root: str) -> tuple[int, int]:
    """Return the user and group for queries: nobody, or those that the permissions of /dev/nvidiactl require.

    A simulated host may lie below directories that only its owner can enter: then it is the owner.
    """
    try:
        if simulation_root:
            owner = os.stat(simulation_root)
            return owner.st_uid, owner.st_gid
        node = os.stat(f"{chroot}/dev/nvidiactl")
    except OSError:
        return OVERFLOW_ID, OVERFLOW_ID
    if node.st_mode & (stat.S_IROTH | stat.S_IWOTH) == stat.S_IROTH | stat.S_IWOTH:
        return OVERFLOW_ID, OVERFLOW_ID
    if node.st_mode & (stat.S_IRGRP | stat.S_IWGRP) == stat.S_IRGRP | stat.S_IWGRP:
        return OVERFLOW_ID, node.st_gid
    return node.st_uid, node.st_gid


def _enter_root(chroot: str) -> bool:
    """Make the driver root the root directory; returns False without the privilege for it."""
    # the C library in use is the host's: what the driver's library links must be of the same build
    for name in ("libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0", "libgcc_s.so.1"):
        try:
            ctypes.CDLL(name, use_errno=True)
        except OSError:
            continue
    try:
        os.chroot(chroot)
    except OSError:
        return False
    os.chdir("/")
    return True


def _ask(library: str) -> "dict[str, Any]":
    try:
        nvml = ctypes.CDLL(library, use_errno=True)
    except OSError as error:
        return {"load": str(error)}
    client = _Client(nvml)
    code = client.call("nvmlInit_v2")
    if code:
        return {"init": code, "text": client.text(code)}
    return {
        "init": 0,
        "driver": client.string("nvmlSystemGetDriverVersion")[1],
        "cuda": client.number("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion")[1],
        "gpus": client.gpus(),
    }


class _Client:
    """Calls of one loaded library; each answers a code and a value."""

    def __init__(self, nvml: ctypes.CDLL) -> None:
        self.nvml = nvml

    def call(self, name: str, *arguments: "Any") -> int:
        try:
            function = self.nvml[name]
        except MISSING:
            return NVML_ERROR_FUNCTION_NOT_FOUND
        return int(function(*arguments))

    def text(self, code: int) -> str:
        """Return the library's words for a code, e.g. "GPU is lost (NVML 15)"."""
        try:
            function = self.nvml["nvmlErrorString"]
        except MISSING:
            return f"NVML {code}"
        function.restype = ctypes.c_char_p
        words = function(code) or b"unknown error"
        return f"{words[:200].decode('utf-8', 'replace')} (NVML {code})"

    def string(self, name: str, *arguments: "Any") -> tuple[int, str]:
        buffer = ctypes.create_string_buffer(_TEXT_SIZE)
        code = self.call(name, *arguments, buffer, ctypes.c_uint(_TEXT_SIZE))
        return code, buffer.value.decode("utf-8", "replace") if not code else ""

    def number(self, name: str, fallback: str, *arguments: "Any") -> tuple[int, int]:
        value = ctypes.c_uint()
        code = self.call(name, *arguments, ctypes.byref(value))
        if code == NVML_ERROR_FUNCTION_NOT_FOUND and fallback:
            code = self.call(fallback, *arguments, ctypes.byref(value))
        return code, value.value if not code else -1

    def pair(self, name: str, device: ctypes.c_void_p) -> tuple[int, list[int]]:
        first, second = ctypes.c_int(), ctypes.c_int()
        code = self.call(name, device, ctypes.byref(first), ctypes.byref(second))
        return code, [first.value, second.value] if not code else []

    def bus_id(self, device: ctypes.c_void_p) -> tuple[int, str]:
        buffer = ctypes.create_string_buffer(_PCI_INFO_SIZE)
        code = NVML_ERROR_FUNCTION_NOT_FOUND
        for name in ("nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo"):
            code = self.call(name, device, buffer)
            if code != NVML_ERROR_FUNCTION_NOT_FOUND:
                break
        if code:
            return code, ""
        domain, bus, slot = _PCI_NUMBERS.unpack_from(buffer.raw)
        return 0, f"{domain:08x}:{bus:02x}:{slot:02x}.0"

    def addressing_mode(self, device: ctypes.c_void_p) -> tuple[int, int]:
        """Return a number of nvmlDeviceAddressingModeType_t; older drivers do not have the function."""
        version_and_value = (ctypes.c_uint * 2)(_ADDRESSING_MODE_VERSION, 0)
        code = self.call("nvmlDeviceGetAddressingMode", device, version_and_value)
        return code, version_and_value[1]

    def gpus(self) -> "list[dict[str, Any]]":
        code, count = self.number("nvmlDeviceGetCount_v2", "")
        return [self.gpu(index) for index in range(min(count, MAX_GPUS))] if not code else []

    def gpu(self, index: int) -> "dict[str, Any]":
        """Return the facts about one GPU; "error" says why it cannot be used."""
        gpu: dict[str, Any] = {"index": index}
        device = ctypes.c_void_p()
        code = self.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
        if code:
            gpu["error"] = self.text(code)
            return gpu
        answers = {
            "bus_id": self.bus_id(device),
            "uuid": self.string("nvmlDeviceGetUUID", device),
            "minor": self.number("nvmlDeviceGetMinorNumber", "", device),
            "name": self.string("nvmlDeviceGetName", device),
            "brand": self.number("nvmlDeviceGetBrand", "", device),
            "arch": self.pair("nvmlDeviceGetCudaComputeCapability", device),
            "mig": self.pair("nvmlDeviceGetMigMode", device),
            "addressing": self.addressing_mode(device),
            "persistence": self.number("nvmlDeviceGetPersistenceMode", "", device),
        }
        for key, (code, value) in answers.items():
            if not code:
                gpu[key] = value
            elif "error" not in gpu and (
                code in FATAL or (key in ("bus_id", "uuid", "minor") and code != NVML_ERROR_NOT_SUPPORTED)
            ):
                gpu["error"] = self.text(code)
        if gpu.get("mig", [0])[0] == 1:
            gpu["migs"], gpu["notes"] = self.mig_devices(device)
        return gpu

    def mig_devices(self, device: ctypes.c_void_p) -> "tuple[list[dict[str, Any]], list[str]]":
        """Return the MIG devices and notes on those that do not answer; indices may have holes."""
        devices, notes = [], []
        code, count = self.number("nvmlDeviceGetMaxMigDeviceCount", "", device)
        if code:
            return [], [f"MIG devices: {self.text(code)}"]
        for index in range(min(count, MAX_MIG_DEVICES)):
            handle = ctypes.c_void_p()
            code = self.call("nvmlDeviceGetMigDeviceHandleByIndex", device, ctypes.c_uint(index), ctypes.byref(handle))
            if code == NVML_ERROR_NOT_FOUND:
                continue
            uuid = self.string("nvmlDeviceGetUUID", handle) if not code else (code, "")
            gpu_instance = self.number("nvmlDeviceGetGpuInstanceId", "", handle) if not code else (code, -1)
            compute_instance = self.number("nvmlDeviceGetComputeInstanceId", "", handle) if not code else (code, -1)
            failed = code or uuid[0] or gpu_instance[0] or compute_instance[0]
            if failed:
                notes.append(f"MIG device {index}: {self.text(failed)}")
                continue
            name = self.string("nvmlDeviceGetName", handle)[1]
            devices.append(
                {
                    "index": index,
                    "uuid": uuid[1],
                    "gi": gpu_instance[1],
                    "ci": compute_instance[1],
                    "profile": name.rpartition(" MIG ")[2] if " MIG " in name else "",
                }
            )
        return devices, notes
