"""The driver's part of procfs: versions, node permissions, GPUs, MIG capabilities.

Formats: the driver's README (chapters "Driver settings" and "The /proc interface") and proc(5) for /proc/devices.
Text that does not parse is passed over; a file that is there and cannot be read is OCIGPU-HOST-3.
"""

import os
import stat

from ocigpu.core.facts import Permissions, ProcFile, capability_path
from ocigpu.core.record import NamedTuple
from ocigpu.gpus.tree import TEXT_LIMIT, list_names, normal_bus_id, read_text, small_number

MIG_MINORS_LIMIT = 1 << 20
"""Bytes read of mig-minors: it lists every possible instance of 32 GPUs, about 100 KiB."""
MAX_GPUS = 256


class ProcGpu(NamedTuple):
    """One directory of /proc/driver/nvidia/gpus; ``minor`` is -1 when unknown, ``uuid`` "" before its first use."""

    name: str
    bus_id: str
    minor: int = -1
    uuid: str = ""
    model: str = ""
    excluded: bool = False


class CapabilityNode(NamedTuple):
    """One file below /proc/driver/nvidia/capabilities: ``name`` is its path there, ``modify`` DeviceFileModify."""

    name: str
    minor: int
    mode: int
    modify: bool


def parse_devices(text: str) -> tuple[tuple[str, int], ...]:
    """Return (driver, major) of NVIDIA's character devices in /proc/devices, in its order."""
    found: dict[str, int] = {}
    in_characters = False
    for line in text.splitlines():
        if line.endswith(":"):
            in_characters = line.startswith("Character")
            continue
        number, _, name = line.strip().partition(" ")
        major = small_number(number)
        if in_characters and name.startswith("nvidia") and 0 < major < 1 << 20:
            found.setdefault(name, major)
    return tuple(found.items())


def find_gpu_major(majors: dict[str, int], default: int) -> int:
    """Return the major of the GPUs' nodes among those of :func:`parse_devices`."""
    return majors.get("nvidia", majors.get("nvidia-frontend", default))


def parse_driver_version(text: str) -> str:
    """Return the version in /proc/driver/nvidia/version, "550.163.01"; "" when there is none.

    The line reads "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01  Tue ..." or, for the open modules,
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.163.01  Release Build ...".
    """
    for line in text.splitlines():
        if "Kernel Module" in line:
            for word in line.partition("Kernel Module")[2].split():
                if is_version(word):
                    return word
    return ""


def is_version(text: str) -> bool:
    """Return whether the text is two or more groups of digits with dots between."""
    groups = text.split(".")
    return 2 <= len(groups) <= 4 and all(small_number(group) >= 0 for group in groups)


def parse_fields(text: str) -> dict[str, str]:
    """Return the "name: value" lines of params, information or a capability file; the first of equal names wins."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def parse_permissions(params: str) -> Permissions:
    """Return DeviceFileMode, DeviceFileUID and DeviceFileGID (decimal) of params; the driver's defaults otherwise."""
    fields = parse_fields(params)
    default = Permissions()
    return Permissions(
        small_number(fields.get("DeviceFileMode", ""), default.mode) & 0o777,
        small_number(fields.get("DeviceFileUID", ""), default.uid),
        small_number(fields.get("DeviceFileGID", ""), default.gid),
    )


def parse_mig_minors(text: str) -> dict[str, int]:
    """Map capability to minor of nvidia-caps: "config", "monitor", "gpu0/gi1/access", "gpu0/gi1/ci0/access"."""
    minors: dict[str, int] = {}
    for line in text.splitlines():
        name, _, number = line.rpartition(" ")
        minor = small_number(number)
        if name and 0 <= minor < 1 << 20:
            minors[name] = minor
    return minors


def parse_capability(text: str) -> tuple[int, int, bool]:
    """Return (minor, permission bits, whether to change) of a file below capabilities; -1 when it names no minor."""
    fields = parse_fields(text)
    mode = small_number(fields.get("DeviceFileMode", ""), 0o400) & 0o777
    return small_number(fields.get("DeviceFileMinor", "")), mode, fields.get("DeviceFileModify", "1") == "1"


def parse_information(text: str, name: str) -> ProcGpu | None:
    """Return the GPU of gpus/<name>/information, None when its bus id is unknown.

    A GPU that nothing has used yet shows question marks for its UUID: that is "" here.
    """
    fields = parse_fields(text)
    bus_id = normal_bus_id(fields.get("Bus Location", "")) or normal_bus_id(name)
    if not bus_id:
        return None
    uuid = fields.get("GPU UUID", "")
    return ProcGpu(
        name,
        bus_id,
        small_number(fields.get("Device Minor", "")),
        uuid if uuid.startswith("GPU-") and uuid.isprintable() and "?" not in uuid else "",
        fields.get("Model", ""),
        fields.get("GPU Excluded", fields.get("GPU Blacklisted", "No")).lower() == "yes",
    )


def read_proc_gpus(proc_driver: str) -> tuple[ProcGpu, ...]:
    """Return the GPUs of <proc_driver>/gpus sorted by bus id: the order in which NVML numbers them."""
    gpus = []
    for name in list_names(f"{proc_driver}/gpus")[:MAX_GPUS]:
        text = read_text(f"{proc_driver}/gpus/{name}/information")
        gpu = parse_information(text or "", name)
        if gpu is not None:
            gpus.append(gpu)
    return tuple(sorted(gpus, key=lambda gpu: gpu.bus_id))


def read_proc_files(proc_driver: str) -> tuple[ProcFile, ...]:
    """Return params, version and registry as they are, with their permission bits; at most 64 KiB each."""
    files = []
    for name in ("params", "version", "registry"):
        path = f"{proc_driver}/{name}"
        text = read_text(path, TEXT_LIMIT)
        if text is not None:
            files.append(ProcFile(name, _permission_bits(path), text))
    return tuple(files)


def _permission_bits(path: str) -> int:
    try:
        return stat.S_IMODE(os.stat(path).st_mode) & 0o777
    except OSError:  # the module was unloaded since: what the driver uses
        return 0o444


def read_kernel_version(proc: str, sys: str) -> str:
    """Return the version of the loaded kernel module, from procfs or else sysfs; "" when it is not loaded."""
    version = parse_driver_version(read_text(f"{proc}/driver/nvidia/version") or "")
    if not version:
        text = (read_text(f"{sys}/module/nvidia/version") or "").strip()
        version = text if is_version(text) else ""
    return version


def is_loaded(sys: str, name: str) -> bool:
    """Return whether a kernel module is loaded: then it has an initstate (sysfs-module)."""
    return read_text(f"{sys}/module/{name.replace('-', '_')}/initstate") is not None


def _list_capabilities(proc_driver: str) -> list[str]:
    """Return the paths below <proc_driver>/capabilities that MIG capabilities have, GPUs and instances by number.

    E.g. "mig/config", "gpu0/mig/gi1/access".  The existence of each file is not checked.
    """
    top = f"{proc_driver}/capabilities"
    paths = ["mig/config", "mig/monitor"]
    for gpu in numbered(top, "gpu"):
        for instance in numbered(f"{top}/gpu{gpu}/mig", "gi"):
            directory = f"gpu{gpu}/mig/gi{instance}"
            paths.append(f"{directory}/access")
            paths += [f"{directory}/ci{compute}/access" for compute in numbered(f"{top}/{directory}", "ci")]
    return paths


def read_capabilities(proc_driver: str, minors: dict[str, int]) -> tuple[CapabilityNode, ...]:
    """Return the existing MIG capabilities, GPUs and instances by number.

    ``minors``: of :func:`parse_mig_minors`, for a file that does not state its own; one with an unknown minor is left
    out.
    """
    by_path = {capability_path(name): minor for name, minor in minors.items()}
    found = []
    for path in _list_capabilities(proc_driver):
        text = read_text(f"{proc_driver}/capabilities/{path}")
        minor, mode, modify = parse_capability(text or "")
        minor = minor if minor >= 0 else by_path.get(path, -1)
        if text is not None and minor >= 0:
            found.append(CapabilityNode(path, minor, mode, modify))
    return tuple(found)


def numbered(directory: str, prefix: str) -> list[int]:
    """Return the numbers of the names "<prefix><number>" in a directory, sorted."""
    numbers = (small_number(name.removeprefix(prefix)) for name in list_names(directory) if name.startswith(prefix))
    return sorted(number for number in numbers if number >= 0)
