"""The GPU models a simulated host can have, and the MIG layouts they can be cut into."""

import hashlib
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ocigpu.core.errors import OcigpuError, quoted, suggest

NVIDIA = "nvidia"
"""The vendor whose driver is simulated here; of others their folders say what it shows."""
MINORS_PER_INSTANCE = 9
"""Minors of nvidia-caps per GPU instance: its own and those of eight compute instances."""
MINORS_PER_GPU = 15 * MINORS_PER_INSTANCE
FIRST_INSTANCE_MINOR = 3
"""Minors 0, 1 and 2 are NVLink's fabric-mgmt, MIG's config and MIG's monitor."""

MAX_GPUS = 64
CPUS_OF_NODE = 64
MAX_MIG_GPUS = 32
"""The driver has minors for the MIG devices of so many GPUs."""

_CUDA_BY_BRANCH = {
    535: "12.2",
    540: "12.6",
    545: "12.3",
    550: "12.4",
    560: "12.6",
    565: "12.7",
    570: "12.8",
    575: "12.9",
    580: "13.0",
    590: "13.1",
    595: "13.2",
    610: "13.3",
}
"""NVIDIA's CUDA release notes, table of releases and driver branches; 540 is JetPack 6.  From 590 on as the drivers say
it themselves (github.com/utkuozdemir/nvidia_gpu_exporter, internal/captures)."""
_INSTANCE_IDS = {1: (0,), 2: (1, 2), 4: (3, 4, 5, 6), 8: (7, 8, 9, 10, 11, 12, 13, 14)}
"""GPU instance ids that the driver gives out, by how often the profile's memory fits into the GPU's."""


@dataclass(frozen=True)
class MigProfile:
    """One MIG profile, e.g. "1g.10gb+me".

    ``enumerator``: the argument of NVML's functions (nvmlGpuInstanceProfile); ``id``: the number in NVML's answers and
    in nvidia-smi.  ``memory_slices``: the number it takes, from one of ``starts`` on; ``most``: the number that fits
    into one GPU.  ``engines``: copy engines, decoders, encoders, JPEG decoders, optical flow accelerators.
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
    """One GPU model, as models.toml has it and explains it."""

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
    coherent: bool = False
    domain: int = 0
    alone: bool = False
    tegra: bool = False
    vendor: str = NVIDIA

    @property
    def has_nvswitch_nodes(self) -> bool:
        """From Blackwell on the switches are behind network bridges and have no nodes of the nvidia driver."""
        return self.fabric and self.architecture == "9.0"

    @property
    def compute_slices(self) -> int:
        """What the whole GPU has to give to MIG devices."""
        return max(profile.compute_slices for profile in self.mig_profiles)

    def whole_instance(self, profile: MigProfile) -> int:
        """Return the nvmlComputeInstanceProfile that takes all of a GPU instance.

        A GPU instance of one compute slice may have more multiprocessors than a slice has: then one of two (REV1).
        """
        least = min(each.multiprocessors for each in self.mig_profiles if each.compute_slices == 1)
        if profile.compute_slices == 1 and profile.multiprocessors > least:
            return 7
        return {1: 0, 2: 1, 3: 2, 4: 3, 7: 4, 8: 5}[profile.compute_slices]

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
    """One simulated GPU; ``minor`` equals ``index``, ``bus_id`` is "0000:01:00.0", "" if it is not on PCI.

    ``clique``: "<cluster uuid>.<clique id>" of its multi-node NVLink, "" for none.
    """

    index: int
    model: Model
    uuid: str
    bus_id: str
    mig_enabled: bool = False
    mig_devices: tuple[MigInstance, ...] = ()
    clique: str = ""


def _read_model(key: str, table: dict[str, Any], slices: dict[str, list[list[Any]]]) -> Model:
    """Return one model of models.toml, whose first lines describe the file."""
    values = {name.replace("-", "_"): value for name, value in table.items()}
    family, sizes = slices.get(values.pop("slices", ""), []), values.pop("mig", [])
    profiles = [
        MigProfile(name, ids[0], ids[1], ids[2], ids[3], tuple(starts), most, round(gib * 8) * 128, count, tuple(media))
        for (*ids, most, starts), (name, gib, count, media) in zip(family, sizes, strict=True)
    ]
    return Model(key, **values, mig_profiles=tuple(profiles))


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
MODELS = {key: _read_model(key, table, _TABLES["slices"]) for key, table in _TABLES["models"].items()}
"""Every model by the name that ``ocigpu sim create --model`` takes."""


def sim_error(message: str, hint: str = "") -> OcigpuError:
    """Return the error for all failures of a simulated host; without ``hint`` it has no hint."""
    return OcigpuError("OCIGPU-SIM-1", message, hint)


def find_model(key: str) -> Model:
    """Return the model named ``key`` (any case); raises OcigpuError listing the models."""
    model = MODELS.get(key.lower())
    if model is None:
        raise sim_error(
            f"model {quoted(key)} is unknown", f"{suggest(key.lower(), MODELS)} models: {', '.join(MODELS)}".lstrip()
        )
    return model


def cuda_version_of(driver_version: str) -> str:
    """Return the CUDA version a driver reports, e.g. "12.4" for "550.163.01"; between branches the one below."""
    branch = int(driver_version.partition(".")[0])
    known = [number for number in _CUDA_BY_BRANCH if number <= branch]
    return _CUDA_BY_BRANCH[max(known)] if known else "11.8"


def sim_uuid(prefix: str, *parts: object) -> str:
    """Return e.g. "GPU-8f3a...": the same for the same parts, so that recorded requests stay valid."""
    digest = hashlib.sha256("/".join(["ocigpu-sim", *map(str, parts)]).encode()).hexdigest()
    return f"{prefix}-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"


def make_gpus(model: Model, count: int, mig: Sequence[str] = (), clique: str = "") -> tuple[SimGpu, ...]:
    """Return ``count`` GPUs of one model, cut as the MIG layouts say.

    A layout is "INDEX:PROFILE,PROFILE..." or "all:...", e.g. "0:1g.10gb,3g.40gb"; without profiles ("0:") the GPU is
    in MIG mode and has no MIG devices.  ``clique``: as of :func:`find_clique`.  Raises OcigpuError for a count, layout
    or clique that cannot be.
    """
    if not 1 <= count <= MAX_GPUS:
        raise sim_error(f"{count} GPUs: a simulated host has 1 to {MAX_GPUS}")
    if model.alone and count > 1:
        raise sim_error(f"{count} GPUs: a host of this model has one, {model.name}", "--gpus 1")
    layouts = parse_mig_layouts(mig, model, count)
    clique = find_clique(model, clique)
    return tuple(
        SimGpu(
            index,
            model,
            sim_uuid("GPU", model.key, index) if model.device_id else sim_uuid("", model.key)[1:],
            _bus_id(model, index),
            index in layouts,
            _place(model, index, layouts.get(index, ())),
            clique,
        )
        for index in range(count)
    )


def find_clique(model: Model, text: str) -> str:
    """Return "<cluster uuid>.<clique id>" for "", "CLIQUE" or "CLUSTER.CLIQUE"; hosts of a model share a cluster.

    "" is clique 1 of a model whose hosts have multi-node NVLink, and none of others.  Raises OcigpuError.
    """
    if not model.cluster:
        if text:
            fitting = ", ".join(key for key, one in MODELS.items() if one.cluster)
            raise sim_error(f"clique {quoted(text)}: a {model.name} has no multi-node NVLink", f"models: {fitting}")
        return ""
    found = re.fullmatch(r"(?:([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.)?([0-9]{1,9})", text or "1")
    if not found:
        raise sim_error(f"clique {quoted(text)}: not a number, or the cluster's UUID, a dot and a number")
    return f"{found[1] or sim_uuid('', model.key)[1:]}.{int(found[2])}"


def _bus_id(model: Model, index: int) -> str:
    """Return the address of a GPU: a bus of its own or, beside a Grace processor, a domain of its own."""
    if not model.device_id:
        return ""
    return f"{model.domain + 16 * index:04x}:01:00.0" if model.domain else f"0000:{index + 1:02x}:00.0"


def parse_mig_layouts(layouts: Sequence[str], model: Model, count: int) -> dict[int, tuple[MigProfile, ...]]:
    """Return the profiles per GPU index; raises OcigpuError naming the layout that cannot be."""
    result: dict[int, tuple[MigProfile, ...]] = {}
    for layout in layouts:
        where, colon, names = layout.partition(":")
        if not colon:
            raise sim_error(f"MIG layout {quoted(layout)}: no GPU index", 'write "0:1g.10gb,3g.40gb" or "all:..."')
        if not model.mig_profiles:
            fitting = ", ".join(key for key, one in MODELS.items() if one.mig_profiles)
            raise sim_error(f"MIG layout {quoted(layout)}: a {model.name} has no MIG", f"models with MIG: {fitting}")
        profiles = _find_profiles(layout, names, model)
        for index in _gpu_indices(layout, where.strip(), count):
            if index >= MAX_MIG_GPUS:
                raise sim_error(f"MIG layout {quoted(layout)}: GPU {index}: only the first {MAX_MIG_GPUS} can have MIG")
            if index in result:
                raise sim_error(f"MIG layout {quoted(layout)}: GPU {index} already has a layout")
            result[index] = profiles
    return result


def _gpu_indices(layout: str, where: str, count: int) -> range:
    if where == "all":
        return range(count)
    if not (where.isascii() and where.isdigit() and int(where) < count):
        raise sim_error(f"MIG layout {quoted(layout)}: no GPU {quoted(where)} of {count}, counted from 0")
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
    """Return a first memory slice for each profile such that no two overlap, None if that is impossible.

    The search starts with the highest free slice, as the driver does.  ``taken``: slices in use, a bit each.
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


def describe_mig(index: int, uuid: str, profile: str, instance: int, compute: int, minor: int) -> dict[str, Any]:
    """Return the marker's entry of a MIG device; ``minor``: of its GPU instance."""
    return {
        "index": index,
        "uuid": uuid,
        "profile": profile,
        "gpu_instance": instance,
        "compute_instance": compute,
        "gi_minor": minor,
        "ci_minor": minor + 1 + compute,
    }


def numa_node(index: int, count: int) -> int:
    """Return the NUMA node of one of ``count`` GPUs: a host with several has two, with half of them each."""
    return 0 if count == 1 or index < count // 2 else 1
