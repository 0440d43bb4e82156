"""Labels of a node about its GPUs, in the names of NVIDIA's GPU feature discovery.  Pure.

Unknown values have no label.  Differences to NVIDIA's program: GPUs of several models are labelled by the most frequent
one, and a driver version of another shape costs only its own labels.

A vGPU, which a hypervisor made up, shows in its PCI configuration space: a vendor-specific capability that begins with
the letters VF and holds records (type, length, data).  The record of type 0 is the host driver's version and branch,
ten bytes each.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ocigpu.core.facts import Gpu, HostFacts, MigDevice
from ocigpu.gpus.nvidia.hardware import family
from ocigpu.gpus.nvidia.selection import DISPLAY_ONLY
from ocigpu.gpus.on_node import GpuDetails, Hardware, MigSize, common_clique
from ocigpu.kubernetes.node.config import Configuration
from ocigpu.kubernetes.node.devices import GPU_RESOURCE, mig_name, single_problem
from ocigpu.kubernetes.node.sharing import DOMAIN

SPACE = 256
STATUS, HAS_CAPABILITIES, FIRST_CAPABILITY = 0x06, 0x10, 0x34
VENDOR_SPECIFIC = 0x09
"""PCI Local Bus Specification 3.0, sections 6.2.3, 6.7 and appendix H."""
_SIGNATURE, _HOST_DRIVER, _TEXT = b"VF", 0, 10


class Vgpu(NamedTuple):
    """What the guest can know of the host's driver."""

    host_driver_version: str = ""
    host_driver_branch: str = ""


def parse_vgpu(config: bytes) -> Vgpu | None:
    """Return the vGPU in a function's configuration space (sysfs ``config``); None if it is not a vGPU."""
    if len(config) < SPACE or not config[STATUS] & HAS_CAPABILITIES:
        return None
    position, seen = config[FIRST_CAPABILITY], set[int]()
    while position and position not in seen and position + 2 < SPACE:
        seen.add(position)
        if config[position] == VENDOR_SPECIFIC:
            capability = config[position : min(position + config[position + 2], SPACE)]
            if capability[3:5] == _SIGNATURE:
                return _parse_records(capability[5:])
        position = config[position + 1]
    return None


def _parse_records(data: bytes) -> Vgpu:
    while len(data) >= 2 and data[1] >= 2:
        if data[0] == _HOST_DRIVER and len(data) >= 2 + 2 * _TEXT:
            return Vgpu(_text(data[2 : 2 + _TEXT]), _text(data[2 + _TEXT : 2 + 2 * _TEXT]))
        data = data[data[1] :]
    return Vgpu()


def _text(data: bytes) -> str:
    text = data.split(b"\0")[0].decode("ascii", "replace")
    return "".join(c for c in text if c.isascii() and (c.isalnum() or c in "-_."))


MAX_VALUE = 63
"""Characters of a label's value, and of its name after the domain."""
TIMESTAMP = f"{DOMAIN}gfd.timestamp"
GRAPHICS_CLASS, COMPUTE_CLASS = 0x0300, 0x0302
ENGINES = ("copy", "decoder", "encoder", "jpeg", "ofa")
_VERSION = re.compile(r"[0-9]+\.[0-9]+(\.[0-9]+)?")


class Surroundings(NamedTuple):
    """Facts from outside the driver: machine name, PCI classes of its GPUs, vGPU, Unix time or None."""

    machine: str = ""
    pci_classes: frozenset[int] = frozenset()
    vgpu: Vgpu | None = None
    timestamp: int | None = None


def make_labels(
    facts: HostFacts, configuration: Configuration, hardware: Hardware, around: Surroundings
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the labels by name, sorted, and notes on what could not be labelled."""
    labels: dict[str, str] = {}
    notes: list[str] = []
    if around.vgpu:
        labels["vgpu.host-driver-version"] = around.vgpu.host_driver_version
        labels["vgpu.host-driver-branch"] = around.vgpu.host_driver_branch
    gpus = [gpu for gpu in facts.gpus if gpu.model not in DISPLAY_ONLY]
    if gpus:
        healthy = [gpu for gpu in gpus if not gpu.error] or gpus
        labels |= _machine(around)
        labels["mig.capable"] = _bool(any(gpu.mig_capable for gpu in healthy))
        labels |= _versions(facts, notes) | _clique(healthy, hardware)
        labels |= _resources(facts, healthy, configuration, hardware, notes)
    return _finish(labels, configuration, around, notes)


def make_machine_labels(
    models: Sequence[str], configuration: Configuration, around: Surroundings
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the labels of a node whose GPUs are for virtual machines, and notes; ``models``: of each GPU.

    The host knows no more about such a GPU than the PCI bus reports.
    """
    counts = Counter(models)
    labels = {
        "mps.capable": "false",
        "mig.capable": "false",
        "gpu.count": str(len(models)),
        "gpu.replicas": "1",
        "gpu.sharing-strategy": "none",
        "gpu.product": sanitise(counts.most_common(1)[0][0]),
    }
    return _finish(labels | _machine(around), configuration, around._replace(vgpu=None), _of_several(counts))


def _machine(around: Surroundings) -> dict[str, str]:
    return {"gpu.machine": _value(sanitise(around.machine)) or "unknown", "gpu.mode": _mode(around.pci_classes)}


def _finish(
    labels: dict[str, str], configuration: Configuration, around: Surroundings, notes: Sequence[str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the labels that Kubernetes accepts, with those of every node, and a note for each other label."""
    labels["vgpu.present"] = _bool(around.vgpu is not None)
    if around.timestamp is not None and not configuration.options.no_timestamp:
        labels["gfd.timestamp"] = str(around.timestamp)
    long = [name for name in labels if len(name) > MAX_VALUE]
    unfit = (f"no label {DOMAIN}{name}: its name is longer than {MAX_VALUE} characters" for name in long)
    valid = {DOMAIN + name: _value(labels[name]) for name in sorted(labels.keys() - long)}
    # without a value, as GPU feature discovery writes it, where MIG devices under one name are not of one size
    kept = {name: value for name, value in valid.items() if value or name == f"{DOMAIN}gpu.sharing-strategy"}
    return kept, (*notes, *unfit)


def sanitise(text: str) -> str:
    """Return text as a label's value: "NVIDIA TITAN X (Pascal)" is NVIDIA-TITAN-X-Pascal."""
    return "-".join(re.sub(r"[^A-Za-z0-9\-_. ]", "", " ".join(text.split())).split())


def render_features(labels: Mapping[str, str]) -> str:
    """Return the labels as a file of node feature discovery's features.d: a line "name=value" each."""
    return "".join(f"{name}={value}\n" for name, value in sorted(labels.items()))


def _value(text: str) -> str:
    """Return text that Kubernetes takes for a label's value: 63 characters, letters or digits at both ends."""
    return text[:MAX_VALUE].strip("-_.")


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _versions(facts: HostFacts, notes: list[str]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for what, version, old, new in (
        ("driver", facts.driver_version, ("major", "minor", "rev"), ("major", "minor", "revision")),
        ("runtime", facts.cuda_version, ("major", "minor"), ("major", "minor")),
    ):
        if _VERSION.fullmatch(version):
            parts = version.split(".")
            labels |= {f"cuda.{what}.{name}": part for name, part in zip(old, parts, strict=False)}
            labels |= {f"cuda.{what}-version.{name}": part for name, part in zip(new, parts, strict=False)}
            labels[f"cuda.{what}-version.full"] = version
        elif what == "driver":
            notes.append(f"no labels for driver version {version or 'unknown'}: it is not X.Y or X.Y.Z")
    return labels


def _mode(classes: Iterable[int]) -> str:
    distinct = set(classes)
    if len(distinct) != 1:
        return "unknown"
    return {GRAPHICS_CLASS: "graphics", COMPUTE_CLASS: "compute"}.get(distinct.pop(), "unknown")


def _clique(gpus: Sequence[Gpu], hardware: Hardware) -> dict[str, str]:
    clique, _ = common_clique(hardware.gpus.get(gpu.uuid, GpuDetails(gpu.uuid)) for gpu in gpus)
    return {"gpu.clique": clique}


# resources


def _resources(
    facts: HostFacts, gpus: Sequence[Gpu], configuration: Configuration, hardware: Hardware, notes: list[str]
) -> dict[str, str]:
    strategy = configuration.options.mig_strategy
    split = [gpu for gpu in gpus if gpu.mig_enabled]
    labels = {"mps.capable": _bool(configuration.sharing.strategy == "mps" and not split)}
    if strategy != "none":
        labels["mig.strategy"] = strategy
    labels |= _whole_gpus(gpus, configuration, hardware, notes)
    if strategy == "single" and split:
        return labels | _single(facts, gpus, configuration, hardware)
    if strategy == "mixed":
        for profile, devices in _by_profile(split).items():
            name = mig_name(profile, configuration)
            if name:
                labels |= _mig_resource(name.removeprefix(DOMAIN), devices, configuration, hardware, name)
    return labels


def _whole_gpus(
    gpus: Sequence[Gpu], configuration: Configuration, hardware: Hardware, notes: list[str]
) -> dict[str, str]:
    models = Counter(gpu.model for gpu in gpus)
    notes += _of_several(models)
    first = next(gpu for gpu in gpus if gpu.model == models.most_common(1)[0][0])
    shared = any(not gpu.mig_enabled for gpu in gpus if gpu.model == first.model)
    sharing = _shared(GPU_RESOURCE, configuration) if shared else _UNSHARED
    memory = hardware.gpus[first.uuid].memory_mib if first.uuid in hardware.gpus else 0
    labels = _offered("gpu", sanitise(first.model), len([gpu for gpu in gpus if not gpu.error]), sharing, memory)
    major, _, minor = first.architecture.partition(".")
    if major and minor:
        labels |= {"gpu.family": family(first.architecture), "gpu.compute.major": major, "gpu.compute.minor": minor}
    return labels


def _of_several(models: "Counter[str]") -> tuple[str, ...]:
    if len(models) < 2:
        return ()
    counts = ", ".join(f"{count} {model}" for model, count in models.most_common())
    return (f"GPUs of several models ({counts}): labels are of the most frequent one",)


def _single(facts: HostFacts, gpus: Sequence[Gpu], configuration: Configuration, hardware: Hardware) -> dict[str, str]:
    profiles = _by_profile(gpus)
    if single_problem(facts) or not profiles:
        product = f"{sanitise(gpus[0].model)}-MIG-INVALID"
        numbers = dict.fromkeys(("gpu.count", "gpu.replicas", "gpu.memory"), "0")
        return {"gpu.product": product, "gpu.sharing-strategy": "", **numbers}
    (devices,) = profiles.values()
    return _mig_resource("gpu", devices, configuration, hardware, GPU_RESOURCE)


def _by_profile(gpus: Sequence[Gpu]) -> dict[str, list[tuple[Gpu, MigDevice]]]:
    found: dict[str, list[tuple[Gpu, MigDevice]]] = {}
    for gpu in gpus:
        for mig in gpu.mig_devices if not gpu.error else ():
            found.setdefault(mig.profile, []).append((gpu, mig))
    return found


def _mig_resource(
    prefix: str,
    devices: Sequence[tuple[Gpu, MigDevice]],
    configuration: Configuration,
    hardware: Hardware,
    resource: str,
) -> dict[str, str]:
    gpu, mig = devices[0]
    details = hardware.gpus.get(gpu.uuid)
    size = details.migs.get(mig.uuid, MigSize()) if details else MigSize()
    product = f"{sanitise(gpu.model)}-MIG-{sanitise(mig.profile.replace('+', '.'))}"
    labels = _offered(prefix, product, len(devices), _shared(resource, configuration), size.memory_mib)
    if size != MigSize():
        labels[f"{prefix}.multiprocessors"] = str(size.multiprocessors)
        labels |= {f"{prefix}.slices.{part}": str(getattr(size, f"{part}_slices")) for part in ("gi", "ci")}
        labels |= {f"{prefix}.engines.{kind}": str(getattr(size, kind)) for kind in ENGINES}
    return labels


def _offered(prefix: str, product: str, count: int, sharing: tuple[str, int, str], memory_mib: int) -> dict[str, str]:
    strategy, replicas, shown = sharing
    return {
        f"{prefix}.product": product + shown,
        f"{prefix}.count": str(count),
        f"{prefix}.replicas": str(replicas),
        f"{prefix}.sharing-strategy": strategy,
        f"{prefix}.memory": str(memory_mib) if memory_mib > 0 else "",
    }


_UNSHARED = ("none", 0, "")
"""Of GPUs that are cut: they are offered in no number."""


def _shared(resource: str, configuration: Configuration) -> tuple[str, int, str]:
    """Return (strategy, replicas of a device, suffix of the product: "-SHARED" where the name does not say it)."""
    entries = [entry for entry in configuration.sharing.resources if entry.name == resource]
    if not entries:
        return "none", 1, ""
    replicas = max(entry.replicas for entry in entries)
    renamed = all(entry.offered_as != resource for entry in entries)
    return configuration.sharing.strategy, replicas, "" if renamed else "-SHARED"
