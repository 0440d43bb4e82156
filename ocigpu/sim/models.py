"""The GPU models a simulated host can have, and the MIG layouts they can be cut into."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from ocigpu.errors import OcigpuError, quoted

COMPUTE_SLICES = 7
MEMORY_SLICES = 8
"""What a MIG capable GPU can be cut into: seven compute slices and eight memory slices (NVIDIA MIG User Guide)."""

MINORS_PER_INSTANCE = 9
"""Minors of nvidia-caps per GPU instance: its own and those of eight compute instances."""
MINORS_PER_GPU = 15 * MINORS_PER_INSTANCE
FIRST_INSTANCE_MINOR = 3
"""Minors 0, 1 and 2 are NVLink's fabric-mgmt, MIG's config and MIG's monitor."""

MAX_GPUS = 64
MAX_MIG_GPUS = 32
"""The driver has minors for the MIG devices of so many GPUs."""

_CUDA_BY_BRANCH = {535: "12.2", 550: "12.4", 560: "12.6", 565: "12.7", 570: "12.8", 575: "12.9", 580: "13.0"}

_INSTANCE_IDS = {8: (0,), 4: (1, 2), 2: (3, 4, 5, 6), 1: (7, 8, 9, 10, 11, 12, 13, 14)}
"""GPU instance ids that the driver gives out, by the memory slices of the profile."""


@dataclass(frozen=True)
class MigProfile:
    """One way to cut a MIG device, e.g. "1g.10gb"; ``memory_slices`` are eighths of the GPU's memory."""

    name: str
    compute_slices: int
    memory_slices: int
    memory_mib: int
    multiprocessors: int


@dataclass(frozen=True)
class Model:
    """One GPU model.

    ``name`` and ``brand`` are what NVML answers (nvmlDeviceGetName, nvmlBrandType_t), ``architecture`` the compute
    capability, ``device_id``/``subsystem_id`` PCI's. ``fabric``: sits on NVSwitches, so the host runs a fabric manager.
    ``imex``: the host has IMEX channels.
    """

    key: str
    name: str
    brand: int
    architecture: str
    memory_mib: int
    device_id: int
    subsystem_id: int
    multiprocessors: int
    power_watts: int
    mig_profiles: tuple[MigProfile, ...] = ()
    fabric: bool = False
    imex: bool = False
    driver_version: str = "550.163.01"


@dataclass(frozen=True)
class MigInstance:
    """One MIG device of a simulated GPU: a GPU instance with one compute instance that fills it."""

    profile: MigProfile
    uuid: str
    gpu_instance: int
    compute_instance: int
    gi_minor: int
    ci_minor: int


@dataclass(frozen=True)
class SimGpu:
    """One simulated GPU; ``minor`` equals ``index``, ``bus_id`` is "0000:01:00.0"."""

    index: int
    model: Model
    uuid: str
    bus_id: str
    mig_enabled: bool = False
    mig_devices: tuple[MigInstance, ...] = ()


def _profiles(gib_by_eighths: dict[str, int], multiprocessors: dict[int, int]) -> tuple[MigProfile, ...]:
    profiles = []
    for name, eighths in gib_by_eighths.items():
        slices, memory = name.split("g.")
        count = int(slices)
        profiles.append(
            MigProfile(name, count, eighths, int(memory.removesuffix("gb")) * 1024 - 256, multiprocessors[count])
        )
    return tuple(profiles)


_A100 = _profiles(
    {"1g.5gb": 1, "2g.10gb": 2, "3g.20gb": 4, "4g.20gb": 4, "7g.40gb": 8}, {1: 14, 2: 28, 3: 42, 4: 56, 7: 98}
)
_H100 = _profiles(
    {"1g.10gb": 1, "1g.20gb": 2, "2g.20gb": 2, "3g.40gb": 4, "4g.40gb": 4, "7g.80gb": 8},
    {1: 16, 2: 32, 3: 60, 4: 64, 7: 132},
)
_H200 = _profiles(
    {"1g.18gb": 1, "1g.35gb": 2, "2g.35gb": 2, "3g.71gb": 4, "4g.71gb": 4, "7g.141gb": 8},
    {1: 16, 2: 32, 3: 60, 4: 64, 7: 132},
)
_B200 = _profiles(
    {"1g.23gb": 1, "1g.45gb": 2, "2g.45gb": 2, "3g.90gb": 4, "4g.90gb": 4, "7g.180gb": 8},
    {1: 18, 2: 36, 3: 70, 4: 72, 7: 148},
)

_TESLA, _NVIDIA = 2, 14  # nvmlBrandType_t

MODELS = {
    model.key: model
    for model in (
        Model("t4", "Tesla T4", _TESLA, "7.5", 15360, 0x1EB8, 0x12A2, 40, 70),
        Model("a10", "NVIDIA A10", _NVIDIA, "8.6", 23028, 0x2236, 0x1482, 72, 150),
        Model("a100", "NVIDIA A100-SXM4-40GB", _NVIDIA, "8.0", 40960, 0x20B0, 0x134F, 108, 400, _A100),
        Model("l4", "NVIDIA L4", _NVIDIA, "8.9", 23034, 0x27B8, 0x16CA, 58, 72),
        Model("l40s", "NVIDIA L40S", _NVIDIA, "8.9", 46068, 0x26B9, 0x1851, 142, 350),
        Model("h100", "NVIDIA H100 80GB HBM3", _NVIDIA, "9.0", 81559, 0x2330, 0x16C1, 132, 700, _H100, True, True),
        Model("h200", "NVIDIA H200", _NVIDIA, "9.0", 143771, 0x2335, 0x18BE, 132, 700, _H200, True, True),
        Model(
            "b200", "NVIDIA B200", _NVIDIA, "10.0", 183359, 0x2901, 0x1999, 148, 1000, _B200, True, True, "570.133.20"
        ),
    )
}
"""Every model by the name that ``ocigpu sim create --model`` takes."""


def sim_error(message: str, hint: str = "") -> OcigpuError:
    """Return the error of everything that goes wrong with a simulated host; without ``hint`` there is none."""
    return OcigpuError("OCIGPU-SIM-1", message, hint)


def find_model(key: str) -> Model:
    """Return the model named ``key`` (any case); raises OcigpuError listing the models."""
    model = MODELS.get(key.lower())
    if model is None:
        raise sim_error(f"model {quoted(key)} is unknown", f"models: {', '.join(MODELS)}")
    return model


def cuda_version_of(driver_version: str) -> str:
    """Return the CUDA version a driver reports, e.g. "12.4" for "550.163.01"; between branches the one below.

    From the table of CUDA releases and driver branches in NVIDIA's CUDA release notes.
    """
    branch = int(driver_version.partition(".")[0])
    known = [number for number in _CUDA_BY_BRANCH if number <= branch]
    return _CUDA_BY_BRANCH[max(known)] if known else "11.8"


def sim_uuid(prefix: str, *parts: object) -> str:
    """Return e.g. "GPU-8f3a...": the same for the same parts, so that recorded requests stay valid."""
    digest = hashlib.sha256("/".join(["ocigpu-sim", *map(str, parts)]).encode()).hexdigest()
    return f"{prefix}-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"


def make_gpus(model: Model, count: int, mig: Sequence[str] = ()) -> tuple[SimGpu, ...]:
    """Return ``count`` GPUs of one model, cut as the MIG layouts say.

    A layout is "INDEX:PROFILE,PROFILE..." or "all:...", e.g. "0:1g.10gb,3g.40gb"; without profiles ("0:") the GPU is
    in MIG mode and has no MIG devices. Raises OcigpuError for a count or layout that cannot be.
    """
    if not 1 <= count <= MAX_GPUS:
        raise sim_error(f"{count} GPUs: a simulated host has 1 to {MAX_GPUS}")
    layouts = parse_mig_layouts(mig, model, count)
    return tuple(
        SimGpu(
            index,
            model,
            sim_uuid("GPU", model.key, index),
            f"0000:{index + 1:02x}:00.0",
            index in layouts,
            _place(model, index, layouts.get(index, ())),
        )
        for index in range(count)
    )


def parse_mig_layouts(layouts: Sequence[str], model: Model, count: int) -> dict[int, tuple[MigProfile, ...]]:
    """Return the profiles per GPU index; raises OcigpuError naming the layout that cannot be."""
    result: dict[int, tuple[MigProfile, ...]] = {}
    for layout in layouts:
        where, colon, names = layout.partition(":")
        if not colon:
            raise sim_error(f"MIG layout {quoted(layout)}: no GPU index", 'write "0:1g.10gb,3g.40gb" or "all:..."')
        if not model.mig_profiles:
            raise sim_error(f"MIG layout {quoted(layout)}: a {model.name} has no MIG", _mig_models())
        profiles = _find_profiles(layout, names, model)
        for index in _gpu_indices(layout, where.strip(), count):
            if index >= MAX_MIG_GPUS:
                raise sim_error(f"MIG layout {quoted(layout)}: GPU {index}: only the first {MAX_MIG_GPUS} can have MIG")
            if index in result:
                raise sim_error(f"MIG layout {quoted(layout)}: GPU {index} already has a layout")
            result[index] = profiles
    return result


def _mig_models() -> str:
    return f"models with MIG: {', '.join(key for key, model in MODELS.items() if model.mig_profiles)}"


def _gpu_indices(layout: str, where: str, count: int) -> range:
    if where == "all":
        return range(count)
    if not (where.isascii() and where.isdigit() and int(where) < count):
        raise sim_error(f"MIG layout {quoted(layout)}: no GPU {quoted(where)}: indices are 0-{count - 1}")
    return range(int(where), int(where) + 1)


def _find_profiles(layout: str, names: str, model: Model) -> tuple[MigProfile, ...]:
    known = {profile.name: profile for profile in model.mig_profiles}
    found = []
    for name in names.split(",") if names.strip() else []:
        profile = known.get(name.strip())
        if profile is None:
            raise sim_error(
                f"MIG layout {quoted(layout)}: a {model.name} has no profile {quoted(name.strip())}",
                f"profiles: {', '.join(known)}",
            )
        found.append(profile)
    compute = sum(profile.compute_slices for profile in found)
    memory = sum(profile.memory_slices for profile in found)
    if compute > COMPUTE_SLICES:
        raise sim_error(
            f"MIG layout {quoted(layout)}: {compute} compute slices, and a {model.name} has {COMPUTE_SLICES}"
        )
    if memory > MEMORY_SLICES:
        raise sim_error(f"MIG layout {quoted(layout)}: {memory} memory slices, and a {model.name} has {MEMORY_SLICES}")
    return tuple(found)


def _place(model: Model, index: int, profiles: tuple[MigProfile, ...]) -> tuple[MigInstance, ...]:
    """Give every profile its GPU instance id as the driver does, and the minors that belong to it."""
    free = {slices: list(ids) for slices, ids in _INSTANCE_IDS.items()}
    devices = []
    for number, profile in enumerate(profiles):
        instance = free[profile.memory_slices].pop(0)
        minor = gi_minor(index, instance)
        uuid = sim_uuid("MIG", model.key, index, number, profile.name)
        devices.append(MigInstance(profile, uuid, instance, 0, minor, minor + 1))
    return tuple(devices)


def gi_minor(gpu: int, instance: int) -> int:
    """Return the nvidia-caps minor of a GPU instance; compute instance N of it has this plus 1 + N."""
    return FIRST_INSTANCE_MINOR + gpu * MINORS_PER_GPU + instance * MINORS_PER_INSTANCE
