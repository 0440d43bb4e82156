"""AMD's GPUs and partitions for resource claims, with the attributes and capacities of AMD's own driver.

Its manifests compare ``deviceID`` to have partitions of one GPU, or of several; there partitions have it only as
``parentDeviceID``, here they have both.  ``partition``, the number of one, is ours.
Sources: github.com/ROCm/k8s-gpu-dra-driver, deviceinfo.go and pkg/amdgpu; Documentation/gpu/amdgpu of the kernel
(current_compute_partition, current_memory_partition: SPX, DPX, QPX, CPX; NPS1 to NPS8); drivers/gpu/drm/amd/amdkfd,
kfd_topology.c: simd_count, simd_per_cu and mem_banks of a node are those of its partition.
"""

import re
from typing import Any, NamedTuple

from ocigpu.core.errors import printable
from ocigpu.core.facts import Gpu
from ocigpu.core.settings import Settings
from ocigpu.gpus.amd.facts import DRIVER, TOPOLOGY, AmdGpu, describe_host, parse_numbers, read_driven, read_properties
from ocigpu.gpus.amd.ras import find_problem, read_errors
from ocigpu.gpus.parts import GpuPart, as_version
from ocigpu.gpus.tree import find_roots, list_names, read_or_skip

MAX_TEXT = 64
"""Characters of an attribute (resource.k8s.io/v1)."""
MAX_BANKS = 64


class _Size(NamedTuple):
    simds: int = 0
    per_unit: int = 0
    memory: int = 0


def read_parts(settings: Settings) -> tuple[GpuPart, ...]:
    """Return the GPUs and partitions of the host in their order; raises HostError without amdgpu."""
    roots = find_roots(settings)
    facts = read_driven(roots)
    sizes = _read_sizes(roots.sys)
    version = _text(f"{roots.sys}/module/{DRIVER}/version")
    described = describe_host(facts).gpus
    addresses = {gpu.address for gpu in facts.gpus}
    problems = {each: find_problem(read_errors(f"{roots.sys}/bus/pci/devices/{each}")) for each in addresses}
    found = []
    for gpu, as_fact in zip(facts.gpus, described, strict=True):
        size = sizes.get(as_fact.minor, _Size())
        attributes = _attributes(gpu, as_fact, f"{roots.sys}/bus/pci/devices/{gpu.address}", version)
        capacity = {
            "memory": f"{size.memory >> 20}Mi" if size.memory else "",
            "computeUnits": str(size.simds // size.per_unit) if size.per_unit else "",
            "simdUnits": str(size.simds) if size.simds else "",
        }
        told = {name: value for name, value in capacity.items() if value}
        error = as_fact.error or problems[gpu.address]
        found.append(GpuPart(gpu.address, gpu.partition, as_fact.uuid, attributes, told, error))
    return tuple(found)


def _attributes(gpu: AmdGpu, as_fact: Gpu, directory: str, version: str) -> dict[str, dict[str, Any]]:
    numbers = {"cardIndex": "card", "renderIndex": "renderD"}
    names = [node.container_path.rpartition("/")[2] for node in gpu.nodes]
    indices = {
        key: {"int": int(name.removeprefix(begin))}
        for key, begin in numbers.items()
        for name in names
        if re.fullmatch(rf"{begin}[0-9]{{1,6}}", name)
    }
    profile = [_text(f"{directory}/current_{what}_partition").lower() for what in ("compute", "memory")]
    unique = str(gpu.unique_id) if gpu.unique_id else ""
    whole = gpu.partition < 0
    texts = {
        "type": "amdgpu" if whole else "amdgpu-partition",
        "uuid": as_fact.uuid,
        "pciAddr" if whole else "parentPciAddr": gpu.address,
        "deviceID": unique,
        "parentDeviceID": "" if whole else unique,
        "productName": re.sub("[()]", "", _text(f"{directory}/product_name").replace(" ", "_")),
        "partitionProfile": "_".join(profile) if all(profile) else "",
    }
    numbered = {"partition": {"int": gpu.partition}} if not whole else {}
    driver = {"driverVersion": {"version": number}} if (number := as_version(version)) else {}
    return {
        **{name: {"string": text[:MAX_TEXT]} for name, text in texts.items() if text},
        **indices,
        **numbered,
        **driver,
    }


def _read_sizes(sys: str) -> dict[int, _Size]:
    """Return the sizes of KFD's nodes by the minors of their render nodes."""
    found = {}
    for name, values in read_properties(sys).items():
        if minor := values.get("drm_render_minor", 0):
            banks = f"{sys}/{TOPOLOGY}/{name}/mem_banks"
            texts = [read_or_skip(f"{banks}/{bank}/properties") or "" for bank in list_names(banks)[:MAX_BANKS]]
            memory = sum(parse_numbers(text).get("size_in_bytes", 0) for text in texts)
            found[minor] = _Size(values.get("simd_count", 0), values.get("simd_per_cu", 0), memory)
    return found


def _text(path: str) -> str:
    return printable((read_or_skip(path, 256) or "").strip())
