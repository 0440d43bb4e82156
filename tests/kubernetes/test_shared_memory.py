"""Kubernetes' parts on GB10 and Jetson, whose memory NVML does not know: without a number, never an error."""

import json
from pathlib import Path

import pytest
from kubernetes_lab import configured, shared
from support import requirements

from ocigpu.core.settings import Settings
from ocigpu.exporter.sampler import Orders, Sampler
from ocigpu.gpus.nvidia.hardware import NOT_OFFERED
from ocigpu.kubernetes.dra.devices import DeviceOptions, make_devices
from ocigpu.kubernetes.dra.node import read_dra_node
from ocigpu.kubernetes.labels.labels import Surroundings, make_labels
from ocigpu.kubernetes.mps.shares import control_commands
from ocigpu.kubernetes.node.reading import read_node
from ocigpu.sim.create import create_host
from ocigpu.system.settings_file import read_settings

METRICS = ("DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_UTIL")


@pytest.fixture(scope="module", params=["gb10", "orin", "thor"])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def settings(model: str, session_directory: Path) -> Settings:
    requirements.require(requirements.compiler())
    return read_settings(create_host(str(session_directory / f"host-kubernetes-{model}"), 1, model, dri=False))


def test_the_exporter_leaves_out_what_is_not_known(model: str, settings: Settings) -> None:
    sampler = Sampler(settings, deadline=60.0)
    try:
        sampler.order(Orders(METRICS, 0.1, 300, 300))
        samples = ()
        while not samples:
            samples = tuple(sampler.wait(1.0))
    finally:
        sampler.close()
    assert samples[0].error == ""
    (gpu,) = samples[0].gpus
    assert gpu.values == ({} if model == "orin" else {"DCGM_FI_DEV_GPU_TEMP": 30, "DCGM_FI_DEV_GPU_UTIL": 0})


def test_a_gpu_is_offered_without_its_memory_and_that_of_a_jetson_is_not(model: str, settings: Settings) -> None:
    node = read_node(settings, configured(shared({"name": "nvidia.com/gpu", "replicas": 2}, strategy="mps")))
    claims = read_dra_node(settings).node
    assert claims is not None
    devices = [device for device in make_devices(claims, DeviceOptions(shares="memory")) if device.kind == "gpu"]
    if model != "gb10":
        assert (node.inventory.resources, node.inventory.reason) == ((), NOT_OFFERED)
        assert (devices, claims.problems) == ([], (NOT_OFFERED,))
        return
    (resource,) = node.inventory.resources
    assert len(resource.devices) == 2
    assert not any("pinned_mem" in line for line in control_commands(resource, {resource.devices[0].uuid: 0}))
    labels, notes = make_labels(node.facts, configured(), node.hardware, Surroundings())
    assert (labels["nvidia.com/gpu.product"], notes) == ("NVIDIA-GB10", ())
    assert "nvidia.com/gpu.memory" not in labels
    (device,) = devices
    assert (device.capacity, device.shared) == ({}, False)
    assert device.attributes["addressingMode"] == {"string": "ATS"}
    assert json.dumps(device.attributes)
