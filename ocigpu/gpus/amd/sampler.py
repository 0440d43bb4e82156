"""What runs in a process of its own and samples AMD's GPUs for the exporter; see :mod:`ocigpu.exporter.sampler`.

Reads orders from standard input, a JSON object a line, of which ``interval`` (seconds) counts here.  Prints a sample a
line.  Ends with its standard input.

Names, help and labels are those of AMD's exporter (github.com/ROCm/device-metrics-exporter,
pkg/amdgpu/gpuagent/gpuagent_gpu_metrics.go), for what files of the kernel say: Documentation/gpu/amdgpu, thermal.rst
(hwmon: temp1 is the edge, temp2 the junction, temp3 the memory), driver-misc.rst (product_number, serial_number).  They
are of the whole GPU: of a partitioned one its first partition has them, as with that exporter.
"""

import json
import os
import select
import time
from typing import Any

from ocigpu.core.errors import HostError, printable
from ocigpu.core.facts import Gpu
from ocigpu.gpus.amd.facts import AmdGpu, describe_host, read_driven
from ocigpu.gpus.amd.on_node import with_health
from ocigpu.gpus.amd.ras import BLOCKS, read_errors
from ocigpu.gpus.amd.usage import read_gauge
from ocigpu.gpus.tree import Roots, list_names, read_text

METRICS = {
    "gpu_health": ("Health of the GPU (0 = Unhealthy | 1 = Healthy)", "as the device plugin finds it"),
    "gpu_gfx_activity": ("Graphics engine usage in Percentage (0-100)", "`gpu_busy_percent`"),
    "gpu_umc_activity": ("Memory engine usage in Percentage (0-100)", "`mem_busy_percent`"),
    "gpu_total_vram": ("Total VRAM memory of the GPU (in MB)", "`mem_info_vram_total`, MiB"),
    "gpu_used_vram": ("Used VRAM memory of the GPU (in MB)", "`mem_info_vram_used`, MiB"),
    "gpu_free_vram": ("Free VRAM memory of the GPU (in MB)", "the difference"),
    "gpu_package_power": ("Current socket power in Watts", "hwmon `power1_input`"),
    "gpu_average_package_power": ("Average socket power in Watts", "hwmon `power1_average`"),
    "gpu_edge_temperature": ("Current edge temperature in Celsius", "hwmon `temp1_input`"),
    "gpu_junction_temperature": ("Current junction/hotspot temperature in Celsius", "hwmon `temp2_input`"),
    "gpu_memory_temperature": ("Current memory temperature in Celsius", "hwmon `temp3_input`"),
    "gpu_ecc_correct_total": ("Total Correctable error count", "the sum of the blocks"),
    "gpu_ecc_uncorrect_total": ("Total Uncorrectable error count", "the sum of the blocks"),
    **{
        f"gpu_ecc_{kind}_{name}": (
            f"{kind.capitalize()}able ECC error count in {name.upper()}", f"`ras/{block}_err_count`",
        )
        for block, name in BLOCKS.items()
        for kind in ("correct", "uncorrect")
    },
}  # fmt: skip
"""By name the help of each, all gauges, and where it comes from."""
_OF_GPU = {
    "gpu_gfx_activity": ("gpu_busy_percent", 1),
    "gpu_umc_activity": ("mem_busy_percent", 1),
    "gpu_total_vram": ("mem_info_vram_total", 1 << 20),
    "gpu_used_vram": ("mem_info_vram_used", 1 << 20),
}
_OF_SENSOR = {
    "gpu_package_power": ("power1_input", 10**6),
    "gpu_average_package_power": ("power1_average", 10**6),
    "gpu_edge_temperature": ("temp1_input", 1000),
    "gpu_junction_temperature": ("temp2_input", 1000),
    "gpu_memory_temperature": ("temp3_input", 1000),
}


def main(driver: str, dev: str, proc: str, sys: str, stand_in: str) -> None:
    """Print samples of the host with these roots until standard input is closed; ``stand_in``: "" for no."""
    where = Roots(driver, dev, proc, sys, bool(stand_in))
    interval, due, pending = 0.0, 0.0, b""
    while True:
        left = max(due - time.monotonic(), 0.0) if interval else None
        if select.select([0], [], [], left)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            if lines:
                interval, due = float(json.loads(lines[-1])["interval"]), time.monotonic()
            continue
        due = time.monotonic() + interval
        print(json.dumps(sample(where)), flush=True)


def sample(roots: Roots) -> dict[str, Any]:
    """Return a sample of all GPUs and partitions, or {"error": why there is none}; needs no privilege."""
    begin = time.monotonic()
    try:
        driven = read_driven(roots)
    except HostError as error:
        return {"error": error.message}
    errors = {gpu.uuid: gpu.error for gpu in with_health(driven, roots.sys).gpus}
    pairs = zip(driven.gpus, describe_host(driven).gpus, strict=True)
    return {
        "gpus": [_gpu(as_read, gpu, errors, roots.sys) for as_read, gpu in pairs],
        "labels": {},
        "listed": [],
        "metrics": [(name, "gauge", text) for name, (text, _) in METRICS.items()],
        "seconds": round(time.monotonic() - begin, 6),
    }


def _gpu(as_read: AmdGpu, gpu: Gpu, errors: dict[str, str], sys: str) -> dict[str, Any]:
    directory = f"{sys}/bus/pci/devices/{as_read.address}"
    model = _text(f"{directory}/product_number") or _text(f"{directory}/product_name")
    names = {
        "gpu_id": str(gpu.index),
        "gpu_uuid": gpu.uuid,
        "gpu_partition_id": str(max(as_read.partition, 0)),
        "gpu_compute_partition_type": _text(f"{directory}/current_compute_partition").lower(),
        "gpu_memory_partition_type": _text(f"{directory}/current_memory_partition").lower(),
        "card_model": model,
        "serial_number": _text(f"{directory}/serial_number"),
    }
    values = _values(directory) if as_read.partition <= 0 else {}
    if gpu.uuid in errors:
        values["gpu_health"] = int(not errors[gpu.uuid])
    return {
        "number": gpu.index,
        "uuid": gpu.uuid,
        "bus_id": gpu.bus_id,
        "name": model,
        "values": values,
        "names": names,
        "ids": [as_read.address if as_read.partition < 0 else f"{as_read.address}/{as_read.partition}"],
    }


def _values(directory: str) -> dict[str, int]:
    sensor = next(iter(list_names(f"{directory}/hwmon")), "")
    paths = {name: (f"{directory}/{file}", unit) for name, (file, unit) in _OF_GPU.items()}
    if sensor:
        paths |= {name: (f"{directory}/hwmon/{sensor}/{file}", unit) for name, (file, unit) in _OF_SENSOR.items()}
    read = {name: read_gauge(*place) for name, place in paths.items()}
    values = {name: value for name, value in read.items() if value is not None}
    if values.keys() >= {"gpu_total_vram", "gpu_used_vram"}:
        values["gpu_free_vram"] = values["gpu_total_vram"] - values["gpu_used_vram"]
    errors = read_errors(directory)
    for block, count in errors.items():
        values[f"gpu_ecc_correct_{BLOCKS[block]}"] = count.correctable
        values[f"gpu_ecc_uncorrect_{BLOCKS[block]}"] = count.uncorrectable
    if errors:
        values["gpu_ecc_correct_total"] = sum(count.correctable for count in errors.values())
        values["gpu_ecc_uncorrect_total"] = sum(count.uncorrectable for count in errors.values())
    return values


def _text(path: str) -> str:
    try:
        return printable((read_text(path, 256) or "").strip())
    except HostError:  # EPERM while the GPU sleeps
        return ""
