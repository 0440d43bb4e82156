"""What amdgpu's files say of a GPU at work.

Sources: Documentation/gpu/amdgpu/driver-misc.rst (mem_info_vram_*) and thermal.rst (gpu_busy_percent, hwmon) of the
kernel.  Memory is of the whole GPU: nothing is said of partitions, which share these files.
"""

from ocigpu.core.errors import HostError
from ocigpu.core.facts import HostFacts
from ocigpu.core.settings import Settings
from ocigpu.gpus.pci import sysfs_names
from ocigpu.gpus.tree import find_roots, list_names, read_text
from ocigpu.gpus.usage import Usage


def read_usage(settings: Settings, facts: HostFacts) -> tuple[Usage, ...]:
    """Return what the GPUs of these facts do; which processes do it is not said here.  Needs no privilege."""
    devices = f"{find_roots(settings).sys}/bus/pci/devices"
    addresses = [gpu.bus_id for gpu in facts.gpus]
    found = []
    for gpu in facts.gpus:
        if addresses.count(gpu.bus_id) > 1:
            continue
        directory = next(
            (f"{devices}/{name}" for name in sysfs_names(gpu.bus_id) if list_names(f"{devices}/{name}")), ""
        )
        sensors = [f"{directory}/hwmon/{name}" for name in list_names(f"{directory}/hwmon")[:1]]
        found.append(
            Usage(
                gpu.uuid,
                _number(f"{directory}/gpu_busy_percent"),
                _number(f"{directory}/mem_info_vram_used", 1 << 20),
                _number(f"{directory}/mem_info_vram_total", 1 << 20),
                next((_number(f"{sensor}/power1_average", 10**6) for sensor in sensors), None),
                next((_number(f"{sensor}/temp1_input", 1000) for sensor in sensors), None),
            )
        )
    return tuple(found)


def _number(path: str, unit: int = 1) -> int | None:
    try:
        text = (read_text(path, 64) or "").strip()
    except HostError:  # EPERM while the GPU sleeps
        return None
    return int(text) // unit if text.isascii() and text.isdigit() else None
