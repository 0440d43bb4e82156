"""Simulated hosts whose GPUs are cut, and ``ocigpu mig`` on them."""

from pathlib import Path

import pytest

from ocigpu.cli.front.main import main
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.gpus.nvidia.mig import read_layouts
from ocigpu.gpus.nvidia.mig_layout import GpuInstance, GpuLayout, Profile
from ocigpu.sim.create import create_host
from ocigpu.sim.models import MODELS
from ocigpu.system.settings_file import read_settings

STEPS = ("querying NVML", "changing MIG devices")
ABLE = [key for key, model in MODELS.items() if model.mig_profiles]


def layout(model: str = "h100", *instances: GpuInstance, mode: int = 1) -> GpuLayout:
    """A GPU of a model without a driver, as NVML would describe it."""
    made = MODELS[model]
    profiles = [
        Profile(each.name, each.id, each.compute_slices, each.most, each.memory_slices, each.starts, each.enumerator)
        for each in made.mig_profiles
    ]
    ids = (made.device_id << 16 | 0x10DE, made.subsystem_id << 16 | 0x10DE)
    return GpuLayout(0, "GPU-x", "0000:01:00.0", made.name, *ids, mode, mode, tuple(profiles), instances)


def make_mig_host(directory: Path, gpus: int, model: str, *layouts: str) -> Path:
    create_host(str(directory), gpus, model, layouts, nodes=False, dri=False, compat32=False, ldcache=False)
    return directory


def mig(host: Path, capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """What ``ocigpu mig`` returns and prints, without what it shows of steps that take long."""
    status = main(["mig", *words, "--config", str(host / "config.toml")])
    out, err = capfd.readouterr()
    lines = [line for line in err.splitlines(keepends=True) if line.strip() not in STEPS]
    return status, out, "".join(lines)


def names(gpu: GpuLayout) -> list[str]:
    return sorted(gpu.name_of(one) for one in gpu.instances)


def layouts_of(host: Path) -> tuple[GpuLayout, ...]:
    return read_layouts(read_host_facts(read_settings(str(host / "config.toml"))))
