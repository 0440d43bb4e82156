"""Shares of clients of MPS, and what MPS cannot share."""

from typing import Any

import pytest
from kubernetes_lab import host, inventory, shared

from ocigpu.core.facts import HostFacts
from ocigpu.kubernetes.mps.shares import control_commands, max_clients, mps_directories, mps_problem
from ocigpu.kubernetes.node.devices import Resource

A100 = host("a100-8")
MIG = host("h100-8-mig")


def resource(facts: HostFacts, *entries: dict[str, Any], **flags: str) -> Resource:
    return inventory(facts, shared(*entries, strategy="mps"), **flags).resources[-1]


@pytest.mark.parametrize(
    ("architecture", "clients"), [("6.1", 16), ("7.0", 48), ("7.5", 48), ("9.0", 48), ("10.0", 48), ("", 16)]
)
def test_clients_by_compute_capability(architecture: str, clients: int) -> None:
    assert max_clients(architecture) == clients


def test_replicas_get_equal_shares() -> None:
    found = resource(A100, {"name": "gpu", "replicas": 10, "devices": [0, 3], "rename": "s"})
    memory = {A100.gpus[0].uuid: 81559, A100.gpus[3].uuid: 40960}
    assert control_commands(found, memory) == (
        "set_default_device_pinned_mem_limit 0 8155M",
        "set_default_device_pinned_mem_limit 3 4096M",
        "set_default_active_thread_percentage 10",
    )


def test_what_mps_cannot_share() -> None:
    assert mps_problem(resource(A100, {"name": "gpu", "replicas": 48}), A100) == ""
    problem = "MPS: 49 replicas of GPU 0, which can have 48 clients"
    assert mps_problem(resource(A100, {"name": "gpu", "replicas": 49}), A100) == problem
    mig = MIG._replace(gpus=tuple(gpu for gpu in MIG.gpus if gpu.mig_enabled)[:1])
    assert mig.gpus[0].mig_devices
    one = mig._replace(gpus=(mig.gpus[0]._replace(mig_devices=mig.gpus[0].mig_devices[:1]),))
    assert mps_problem(resource(one, {"name": "gpu", "replicas": 2}, mig_strategy="single"), one).startswith(
        "MPS cannot share MIG device "
    )


def test_directories_are_those_of_the_resource() -> None:
    base = "/run/nvidia/mps/nvidia.com/gpu"
    found = mps_directories("/run/nvidia/mps/", "nvidia.com/gpu")
    assert found == (f"{base}/pipe", f"{base}/log", f"{base}/shm", f"{base}/.ready")
