"""Labels of a node about its AMD GPUs, with the names of AMD's node labeller.

A property that all GPUs share is the label's value (amd.com/gpu.vram=192G); of several values each is a label with the
number of GPUs that have it (amd.com/gpu.vram.192G=4).  The older names with "beta." have both forms, as there.
Partitions count one by one.  Family and firmware are not known: they need a call to the driver, not only its files.
Source: github.com/ROCm/k8s-device-plugin, cmd/k8s-node-labeller.
"""

import re
from collections import Counter
from collections.abc import Iterator

from ocigpu.core.settings import Settings
from ocigpu.gpus.amd.facts import DRIVER
from ocigpu.gpus.amd.parts import read_parts
from ocigpu.gpus.parts import GpuPart
from ocigpu.gpus.tree import find_roots, read_text

DOMAIN = "amd.com"
MAX_TEXT = 63
"""Characters of a label's value, and of its name after the domain."""
_WORD = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")


def read_labels(settings: Settings) -> list[tuple[str, str]]:
    """Return the labels; raises HostError without amdgpu, and for a file of sysfs that cannot be read.

    Nodes are chosen by labels, so a value that is missing for a moment must not change them: the former ones stay.
    """
    sys = find_roots(settings).sys
    parts = read_parts(settings)
    for part in parts:
        for name in ("product_name", "current_compute_partition", "current_memory_partition"):
            _text(_device(sys, part), name)  # read_parts passes over those that cannot be read
    found = list(_make_labels(parts, {part.address: _text(_device(sys, part), "device") for part in parts}))
    for name, file in (("driver-version", "version"), ("driver-src-version", "srcversion")):
        found.append((f"{DOMAIN}/gpu.{name}", _text(f"{sys}/module/{DRIVER}", file)))
    for what in ("compute", "memory"):
        supported = any(_text(_device(sys, part), f"available_{what}_partition") for part in parts)
        found.append((f"{DOMAIN}/{what}-partitioning-supported", "true" if supported else "false"))
    return [(name, value) for name, value in found if is_label(name, value)]


def is_label(name: str, value: str) -> bool:
    """Return whether Kubernetes takes this; what firmware calls a product may be anything."""
    words = (name.partition("/")[2], value)
    return all(len(word) <= MAX_TEXT and _WORD.fullmatch(word) for word in words)


def _make_labels(parts: "tuple[GpuPart, ...]", device_ids: "dict[str, str]") -> Iterator[tuple[str, str]]:
    def text(part: GpuPart, name: str) -> str:
        return str(part.attributes.get(name, {}).get("string", ""))

    memory = {part.id: int(part.capacity.get("memory", "0Mi").removesuffix("Mi")) for part in parts}
    properties = {
        "device-id": [device_ids[part.address].removeprefix("0x") for part in parts],
        "product-name": [text(part, "productName") for part in parts],
        "vram": [f"{round(memory[part.id] / 1024)}G" if memory[part.id] else "" for part in parts],
        "simd-count": [part.capacity.get("simdUnits", "") for part in parts],
        "cu-count": [part.capacity.get("computeUnits", "") for part in parts],
    }
    for kind, values in properties.items():
        counts = Counter(filter(None, values))
        for value, count in counts.items():
            yield f"beta.{DOMAIN}/gpu.{kind}.{value}", str(count)
            if len(counts) == 1:
                yield f"beta.{DOMAIN}/gpu.{kind}", value
                yield f"{DOMAIN}/gpu.{kind}", value
            else:
                yield f"{DOMAIN}/gpu.{kind}.{value}", str(count)
    profiles = {text(part, "partitionProfile") for part in parts}
    if len(profiles) == 1:
        yield f"{DOMAIN}/compute-memory-partition", profiles.pop()


def _device(sys: str, part: GpuPart) -> str:
    return f"{sys}/bus/pci/devices/{part.address}"


def _text(directory: str, name: str) -> str:
    return (read_text(f"{directory}/{name}", 256) or "").strip()
