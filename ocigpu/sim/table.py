"""The table of GPUs in the simulated NVML, CUDA and nvidia-smi: fills struct sim_table of simhost.h in the files.

The libraries are compiled without it, so those of a wheel serve every model and directory, without a compiler.
"""

import os
import struct
from collections.abc import Sequence
from pathlib import Path

from ocigpu.core.errors import quoted
from ocigpu.sim.models import MAX_GPUS, MigProfile, SimGpu, cuda_version_of, numa_node, sim_error

MAGIC = b"ocigpu simulated GPU table 1"
_MIG_SIZE = 48 << 10
_MOST_PROFILES = 16
# Native sizes and gaps, as the compiler has them: the file is for this machine.
_HEAD = struct.Struct("@32s4096s32s32s48s9i0Q")
_GPU = struct.Struct("@64s48s10IQ0Q")
_PROFILE = struct.Struct("@32s12IQ0Q")


def fill_table(path: Path, table: bytes) -> None:
    """Write the table into a library or program that was compiled without; raises OcigpuError when it has no place."""
    content = bytearray(path.read_bytes())
    at = content.find(MAGIC)
    if at < 0 or content.find(MAGIC, at + 1) >= 0 or at + len(table) > len(content):
        raise sim_error(f"{path}: not a library of this version's simulated hosts")
    content[at : at + len(table)] = table
    path.write_bytes(content)


def make_table(
    directory: str, gpus: Sequence[SimGpu], driver_version: str, caps_major: int = 0, *, few: bool = False
) -> bytes:
    """Return the bytes of the table: the host's directory, the GPUs, their connections and what MIG makes of them.

    ``few``: as of create_host; the nodes of /dev do not count where the directory can be seen.
    """
    major, minor = cuda_version_of(driver_version).split(".")
    model = gpus[0].model
    profiles, state = model.mig_profiles, _mig_state(gpus).encode()
    if len(os.fsencode(directory)) > 4000:
        raise sim_error(f"directory {quoted(directory)}: longer than 4000 bytes")
    assert len(profiles) <= _MOST_PROFILES
    assert len(state) < _MIG_SIZE
    head = _HEAD.pack(
        MAGIC,
        os.fsencode(directory),
        driver_version.encode(),
        f"{major}.{driver_version}".encode(),
        gpus[0].clique.encode(),
        *(int(major) * 1000 + int(minor) * 10, len(gpus), model.nvlinks, model.nvlink_group),
        model.nvlinks // (model.nvlink_group - 1) if model.nvlink_group else 1,
        *(len(profiles), model.memory_slices if profiles else 0, caps_major, few),
    )
    parts = [
        head,
        b"".join(_pack_gpu(gpu, len(gpus)) for gpu in gpus).ljust(MAX_GPUS * _GPU.size, b"\0"),
        b"".join(map(_pack_profile, profiles)).ljust(_MOST_PROFILES * _PROFILE.size, b"\0"),
        state.ljust(_MIG_SIZE, b"\0"),
    ]
    return b"".join(parts)


def _pack_gpu(gpu: SimGpu, count: int) -> bytes:
    model = gpu.model
    numbers = (
        *(model.brand, *map(int, model.architecture.split(".")), pci_number(gpu.bus_id)),
        *(model.device_id << 16 | 0x10DE, model.subsystem_id << 16 | 0x10DE, numa_node(gpu.index, count)),
        *(model.power_watts, model.multiprocessors, model.coherent, model.memory_mib << 20),
    )
    return _GPU.pack(model.name.encode(), gpu.uuid.encode(), *numbers)


def pci_number(bus_id: str) -> int:
    """Return domain and bus of a PCI address as one number, 0 for none."""
    return int("".join(bus_id.split(":")[:2]) or "0", 16)


def _pack_profile(profile: MigProfile) -> bytes:
    numbers = (
        *(profile.enumerator, profile.id, profile.compute_slices, profile.memory_slices),
        *(profile.most, profile.multiprocessors, *profile.engines),
        *(sum(1 << start for start in profile.starts), profile.memory_mib),
    )
    return _PROFILE.pack(profile.name.encode(), *numbers)


def _mig_state(gpus: Sequence[SimGpu]) -> str:
    """Return the lines that sim_load in simhost.h reads."""
    lines = [f"mode {gpu.index} 1\n" for gpu in gpus if gpu.mig_enabled]
    for gpu in gpus:
        for mig in gpu.mig_devices:
            instance = (gpu.index, mig.gpu_instance, gpu.model.mig_profiles.index(mig.profile), mig.start)
            start = " ".join(map(str, instance))
            slices, whole = mig.profile.compute_slices, gpu.model.whole_instance(mig.profile)
            lines.append(f"mig {start} -1 0 0 0 -\n")
            lines.append(f"mig {start} {mig.compute_instance} {slices} 0 {whole} {mig.uuid}\n")
    return "".join(lines)
