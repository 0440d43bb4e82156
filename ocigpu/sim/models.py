"""The GPU models a simulated host can have, and the MIG layouts they can be cut into."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from ocigpu.core.errors import OcigpuError, quoted

MINORS_PER_INSTANCE = 9
"""Minors of nvidia-caps per GPU instance: its own and those of eight compute instances."""
MINORS_PER_GPU = 15 * MINORS_PER_INSTANCE
FIRST_INSTANCE_MINOR = 3
"""Minors 0, 1 and 2 are NVLink's fabric-mgmt, MIG's config and MIG's monitor."""

MAX_GPUS = 64
CPUS_OF_NODE = 64
MAX_MIG_GPUS = 32
"""The driver has minors for the MIG devices of so many GPUs."""

_CUDA_BY_BRANCH = {535: "12.2", 550: "12.4", 560: "12.6", 565: "12.7", 570: "12.8", 575: "12.9", 580: "13.0"}

_INSTANCE_IDS = {1: (0,), 2: (1, 2), 4: (3, 4, 5, 6), 8: (7, 8, 9, 10, 11, 12, 13, 14)}
"""GPU instance ids that the driver gives out, by how often the profile's memory fits into the GPU's."""


@dataclass(frozen=True)
class MigProfile:
    """One way to cut a MIG device, e.g. "1g.10gb+me".

    ``enumerator``: what NVML's functions take (nvmlGpuInstanceProfile); ``id``: what it answers with, and nvidia-smi
    shows. ``memory_slices``: it takes so many from one of ``starts`` on; ``most``: so many of it fit into one GPU.
    ``engines``: copy engines, decoders, encoders, JPEG decoders, optical flow accelerators.
    """

    name: str
    enumerator: int
    id: int
    compute_slices: int
    memory_slices: int
    starts: tuple[int, ...]
    most: int
    memory_mib: int
    multiprocessors: int
    engines: tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """One GPU model.

    ``name`` and ``brand`` are what NVML answers (nvmlDeviceGetName, nvmlBrandType_t), ``architecture`` the compute
    capability, ``device_id``/``subsystem_id`` PCI's. ``fabric``: sits on NVSwitches, so the host runs a fabric manager.
    ``imex``: the host has IMEX channels. ``nvlinks``: each GPU has so many, to the switches or, with ``nvlink_group``,
    to the other GPUs of each group of that size. ``cluster``: part of a fabric of several hosts.
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
    nvlinks: int = 0
    nvlink_group: int = 0
    cluster: bool = False

    @property
    def compute_slices(self) -> int:
        """What the whole GPU has to give to MIG devices."""
        return max(profile.compute_slices for profile in self.mig_profiles)

    @property
    def memory_slices(self) -> int:
        """What the whole GPU has to give to MIG devices."""
        return max(profile.memory_slices for profile in self.mig_profiles)


@dataclass(frozen=True)
class MigInstance:
    """One MIG device of a simulated GPU: a GPU instance with one compute instance that fills it.

    ``start``: its first memory slice.
    """

    profile: MigProfile
    start: int
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


def _profiles(family: str, sizes: str) -> tuple[MigProfile, ...]:
    """Return the profiles of one model.

    Lines of ``family``: enumerator, id, compute slices, memory slices, most, starts (nvml.h, NVIDIA's MIG User Guide).
    Lines of ``sizes``, in the same order: name, GiB, multiprocessors, engines (``nvidia-smi mig -lgip`` as NVIDIA's
    guide and users show it; what nobody shows is the fair share).
    """
    profiles = []
    for line, size in zip(family.split("\n")[1:-1], sizes.split("\n")[1:-1], strict=True):
        enumerator, number, compute, memory, most, *starts = map(int, line.split())
        name, gib, multiprocessors, *engines = size.split()
        mib = round(float(gib) * 8) * 128
        profiles.append(
            MigProfile(
                name, enumerator, number, compute, memory, tuple(starts), most,
                mib, int(multiprocessors), tuple(map(int, engines)),
            )
        )  # fmt: skip
    return tuple(profiles)


_SEVEN_SLICES = """
0 19 1 1 7  0 1 2 3 4 5 6
7 20 1 1 1  0 1 2 3 4 5 6
9 15 1 2 4  0 2 4 6
1 14 2 2 3  0 2 4
2  9 3 4 2  0 4
3  5 4 4 1  0
4  0 7 8 1  0
"""
_FOUR_SLICES = """
0 14 1 1 4  0 1 2 3
7 21 1 1 1  0 1 2 3
1  5 2 2 2  0 2
8  6 2 2 1  0 2
3  0 4 4 1  0
"""
_TWELVE_MEMORY_SLICES = """
 0 14 1  3 4  0 3 6 9
 7 21 1  3 1  0 3 6 9
10 47 1  3 4  0 3 6 9
15 65 1  3 1  0 3 6 9
13 67 1  3 4  0 3 6 9
 1  5 2  6 2  0 6
11 35 2  6 2  0 6
16 64 2  6 1  0 6
14 66 2  6 2  0 6
 3  0 4 12 1  0
12 32 4 12 1  0
"""
_A30 = _profiles(
    _FOUR_SLICES,
    """
1g.6gb      5.81 14  1 0 0 0 0
1g.6gb+me   5.81 14  1 1 0 1 1
2g.12gb    11.69 28  2 2 0 0 0
2g.12gb+me 11.69 28  2 2 0 1 1
4g.24gb    23.44 56  4 4 0 1 1
""",
)
_A100 = _profiles(
    _SEVEN_SLICES,
    """
1g.5gb     4.75 14  1 0 0 0 0
1g.5gb+me  4.75 14  1 1 0 1 1
1g.10gb    9.75 14  1 1 0 0 0
2g.10gb    9.75 28  2 1 0 0 0
3g.20gb   19.62 42  3 2 0 0 0
4g.20gb   19.62 56  4 2 0 0 0
7g.40gb   39.50 98  7 5 0 1 1
""",
)
_H100 = _profiles(
    _SEVEN_SLICES,
    """
1g.10gb     9.75  16  1 1 0 1 0
1g.10gb+me  9.75  16  1 1 0 1 1
1g.20gb    19.62  26  1 1 0 1 0
2g.20gb    19.62  32  2 2 0 2 0
3g.40gb    39.50  60  3 3 0 3 0
4g.40gb    39.50  64  4 4 0 4 0
7g.80gb    79.25 132  8 7 0 7 1
""",
)
_H200 = _profiles(
    _SEVEN_SLICES,
    """
1g.18gb     16.00  16  1 1 0 1 0
1g.18gb+me  16.00  16  1 1 0 1 1
1g.35gb     32.50  26  1 1 0 1 0
2g.35gb     32.50  32  2 2 0 2 0
3g.71gb     65.50  60  3 3 0 3 0
4g.71gb     65.50  64  4 4 0 4 0
7g.141gb   131.50 132  8 7 0 7 1
""",
)
_B200 = _profiles(
    _SEVEN_SLICES,
    """
1g.23gb     22.12  18   2 1 0 1 0
1g.23gb+me  22.12  18   2 1 0 1 1
1g.45gb     44.50  18   2 1 0 1 0
2g.45gb     44.50  36   3 2 0 2 0
3g.90gb     89.25  70   6 3 0 3 0
4g.90gb     89.25  72   8 4 0 4 0
7g.180gb   178.50 148  16 7 0 7 1
""",
)
_GB200 = _profiles(
    _SEVEN_SLICES,
    """
1g.23gb     22.88  18   2 1 0 1 0
1g.23gb+me  22.88  18   2 1 0 1 1
1g.47gb     46.00  18   2 1 0 1 0
2g.47gb     46.00  36   3 2 0 2 0
3g.93gb     92.25  70   6 3 0 3 0
4g.93gb     92.25  72   8 4 0 4 0
7g.186gb   184.50 152  16 7 0 7 1
""",
)
_RTX_PRO_6000 = _profiles(
    _TWELVE_MEMORY_SLICES,
    """
1g.24gb        23.62  46  1 1 1 1 0
1g.24gb+me     23.62  46  1 1 1 1 1
1g.24gb+gfx    23.62  46  1 1 1 1 0
1g.24gb+me.all 23.62  46  1 4 4 4 1
1g.24gb-me     23.62  46  1 0 0 0 0
2g.48gb        47.38  94  2 2 2 2 0
2g.48gb+gfx    47.38  94  2 2 2 2 0
2g.48gb+me.all 47.38  94  2 4 4 4 1
2g.48gb-me     47.38  94  2 0 0 0 0
4g.96gb        95.00 188  4 4 4 4 1
4g.96gb+gfx    95.00 188  4 4 4 4 1
""",
)

_TESLA, _NVIDIA = 2, 14  # nvmlBrandType_t

MODELS = {
    model.key: model
    for model in (
        Model("t4", "Tesla T4", _TESLA, "7.5", 15360, 0x1EB8, 0x12A2, 40, 70),
        Model("a10", "NVIDIA A10", _NVIDIA, "8.6", 23028, 0x2236, 0x1482, 72, 150),
        Model("a30", "NVIDIA A30", _NVIDIA, "8.0", 24576, 0x20B7, 0x1532, 56, 165, _A30, nvlinks=4, nvlink_group=2),
        Model(
            "a100", "NVIDIA A100-SXM4-40GB", _NVIDIA, "8.0", 40960, 0x20B0, 0x134F, 108, 400, _A100,
            nvlinks=12, nvlink_group=4,
        ),
        Model("l4", "NVIDIA L4", _NVIDIA, "8.9", 23034, 0x27B8, 0x16CA, 58, 72),
        Model("l40s", "NVIDIA L40S", _NVIDIA, "8.9", 46068, 0x26B9, 0x1851, 142, 350),
        Model(
            "h100", "NVIDIA H100 80GB HBM3", _NVIDIA, "9.0", 81559, 0x2330, 0x16C1, 132, 700, _H100, True, True,
            nvlinks=18,
        ),
        Model("h200", "NVIDIA H200", _NVIDIA, "9.0", 143771, 0x2335, 0x18BE, 132, 700, _H200, True, True, nvlinks=18),
        Model(
            "b200", "NVIDIA B200", _NVIDIA, "10.0", 183359, 0x2901, 0x1999, 148, 1000, _B200, True, True, "570.133.20",
            nvlinks=18,
        ),
        Model(
            "gb200", "NVIDIA GB200", _NVIDIA, "10.0", 189471, 0x2941, 0x2046, 152, 1200, _GB200, False, True,
            "580.65.06", nvlinks=18, cluster=True,
        ),
        Model(
            "rtxpro6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", _NVIDIA, "12.0", 97887, 0x2BB5, 0x204E, 188,
            600, _RTX_PRO_6000, driver_version="580.65.06",
        ),
    )
}  # fmt: skip
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
    for what, taken, there in (
        ("compute slices", sum(profile.compute_slices for profile in found), model.compute_slices),
        ("memory slices", sum(profile.memory_slices for profile in found), model.memory_slices),
    ):
        if taken > there:
            raise sim_error(f"MIG layout {quoted(layout)}: {taken} {what}, and a {model.name} has {there}")
    if find_starts(found) is None or not _engines_suffice(found, model):
        raise sim_error(f"MIG layout {quoted(layout)}: these profiles do not fit into one {model.name} together")
    return tuple(found)


def find_starts(profiles: Sequence[MigProfile], taken: int = 0) -> tuple[int, ...] | None:
    """Return a first memory slice for each profile such that no two overlap, None when there are none.

    The highest that is free is tried first, as the driver does. ``taken``: slices in use, a bit each.
    """
    if not profiles:
        return ()
    for start in reversed(profiles[0].starts):
        slices = ((1 << profiles[0].memory_slices) - 1) << start
        rest = None if slices & taken else find_starts(profiles[1:], taken | slices)
        if rest is not None:
            return (start, *rest)
    return None


def _engines_suffice(profiles: Sequence[MigProfile], model: Model) -> bool:
    """Say whether the GPU has the engines of all these: profiles with media extensions take what others have not."""
    whole = max(model.mig_profiles, key=lambda profile: profile.compute_slices)
    counts = zip(*(profile.engines for profile in profiles), strict=True)
    return all(sum(taken) <= there for taken, there in zip(counts, whole.engines, strict=False)) and all(
        profiles.count(profile) <= profile.most for profile in profiles
    )


def _place(model: Model, index: int, profiles: tuple[MigProfile, ...]) -> tuple[MigInstance, ...]:
    """Give every profile its GPU instance id as the driver does, and the minors that belong to it."""
    free = {share: list(ids) for share, ids in _INSTANCE_IDS.items()}
    devices = []
    for number, (profile, start) in enumerate(zip(profiles, find_starts(profiles) or (), strict=True)):
        instance = free[model.memory_slices // profile.memory_slices].pop(0)
        minor = gi_minor(index, instance)
        uuid = sim_uuid("MIG", model.key, index, number, profile.name)
        devices.append(MigInstance(profile, start, uuid, instance, 0, minor, minor + 1))
    return tuple(devices)


def gi_minor(gpu: int, instance: int) -> int:
    """Return the nvidia-caps minor of a GPU instance; compute instance N of it has this plus 1 + N."""
    return FIRST_INSTANCE_MINOR + gpu * MINORS_PER_GPU + instance * MINORS_PER_INSTANCE


def numa_node(index: int, count: int) -> int:
    """Return the NUMA node of one of ``count`` GPUs: a host with several has two, with half of them each."""
    return 0 if count == 1 or index < count // 2 else 1
