"""NVIDIA's own device plugin and GPU feature discovery beside ours, on the same simulated GPUs.

``make cluster-test`` names their programs, which no registry has; the kubelet is the tests' double.
"""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from plugin_lab import Kubelet, kubelet
from support.process import run
from support.product import PROGRAMS
from support.real_kubelet import ROOT, own_directories

MIXED = ("--gpus=3", "--model=a100", "--mig=0:1g.5gb,2g.10gb", "--mig=1:7g.40gb")
GPU = "nvidia.com/gpu"
HOSTS: dict[str, tuple[tuple[str, ...], str, dict[str, int]]] = {
    "whole GPUs": (("--gpus=8", "--model=a100"), "none", {GPU: 8}),
    "of another model": (("--gpus=2", "--model=l4"), "none", {GPU: 2}),
    "MIG devices and whole GPUs": (
        MIXED, "mixed", {GPU: 1, **{f"nvidia.com/mig-{name}": 1 for name in ("1g.5gb", "2g.10gb", "7g.40gb")}},
    ),
    "MIG devices that are not shown": (MIXED, "none", {GPU: 3}),
    "only MIG devices of one kind": (("--gpus=1", "--model=a100", "--mig=0:1g.5gb,1g.5gb"), "single", {GPU: 2}),
}  # fmt: skip
"""GPUs, --mig-strategy, and what is offered."""
VIEW = """
host=$(dirname "$OCIGPU_CONFIG")
mount --bind "$host/proc/driver" /proc/driver
mount --bind "$host/sys/bus/pci/devices" /sys/bus/pci/devices
exec "$@"
"""
"""What theirs reads of the machine beside NVML: the numbers of MIG devices, and the classes of PCI functions."""
pytestmark = pytest.mark.root


def simulated(host: tuple[str, ...], program: str, *words: str) -> list[str]:
    view = ("unshare", "--mount", "sh", "-e", "-c", VIEW, "sh")
    return [str(PROGRAMS / "ocigpu"), "sim", "exec", *host, "--", *view, program, *words]


@pytest.mark.cluster("GPU_FEATURE_DISCOVERY")
@pytest.mark.parametrize("name", HOSTS)
def test_labels_are_those_of_gpu_feature_discovery(name: str, tmp_path: Path) -> None:
    host, strategy, _ = HOSTS[name]
    common = ("--no-timestamp", f"--mig-strategy={strategy}", "--oneshot", "--use-node-feature-api=false")
    found: list[dict[str, str]] = []
    for program in ([os.environ["GPU_FEATURE_DISCOVERY"]], [str(PROGRAMS / "ocigpu"), "node-labels"]):
        output = tmp_path / Path(program[-1]).name
        run(simulated(host, *program, *common, f"--output-file={output}"))
        found.append(dict(line.split("=", 1) for line in output.read_text().splitlines()))
    theirs, ours = found
    assert ours == theirs
    assert theirs["nvidia.com/gpu.count"]


@contextmanager
def running(command: list[str], log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(child.pid, signal.SIGTERM)
        child.wait(60)


@pytest.mark.cluster("K8S_DEVICE_PLUGIN")
@pytest.mark.parametrize("name", HOSTS)
def test_devices_are_those_of_the_device_plugin(name: str, tmp_path: Path) -> None:
    """Resources, devices, their NUMA nodes, and what a container with all of a resource is given."""
    host, strategy, offered = HOSTS[name]
    found: list[dict[str, Any]] = []
    counts = {resource: [count, count] for resource, count in offered.items()}
    for program in ([os.environ["K8S_DEVICE_PLUGIN"]], [str(PROGRAMS / "ocigpu"), "device-plugin"]):
        log = tmp_path / f"{Path(program[0]).name}.log"
        command = simulated(host, *program, f"--mig-strategy={strategy}")
        with own_directories(), kubelet(ROOT / "device-plugins") as kubelets, running(command, log):
            assert kubelets.wait_for(counts, 60) == counts, log.read_text()
            found.append({resource: look(kubelets, resource, count) for resource, count in offered.items()})
    theirs, ours = found
    assert ours == theirs


def look(kubelets: Kubelet, resource: str, count: int) -> dict[str, Any]:
    """Return what is to be the same: the devices, and what a container with all of them is given."""
    answer = kubelets.admit("pod", "main", {resource: count})
    kubelets.delete("pod")
    answer["envs"] = {name: sorted(value.split(",")) for name, value in answer["envs"].items()}  # theirs has no order
    return {
        "devices": kubelets.devices(resource),
        "topology": kubelets.topology(resource),
        "options": kubelets.options(resource),
        "container": answer,
    }
