"""CUDA's Multi-Process Service: its directories, the limits of each client, and whether pods may use it.

A control daemon for each resource has its directories below the host directory ``mpsRoot``.  Clients share the pipe
directory and /dev/shm with it.  Both belong to the resource, so pods of different resources share nothing.  Before the
limits are set a pod would run without any, and after the daemon's death no pod can start.  Meanwhile the devices are
unhealthy, so the kubelet does not allocate them.  Sources: NVIDIA's MPS documentation (environment variables, limits by
compute capability, control commands).
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

from ocigpu.core.facts import HostFacts
from ocigpu.kubernetes.node.config import Configuration
from ocigpu.kubernetes.node.devices import Resource

CONTAINER_ROOT = "/mps"
PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
CLIENTS_BEFORE_VOLTA, CLIENTS = 16, 48


class Directories(NamedTuple):
    """Directories of a resource's control daemon; ``ready``: a file that exists once the limits are set."""

    pipe: str
    log: str
    shm: str
    ready: str


def mps_directories(root: str, resource: str) -> Directories:
    """Return the directories of a resource ("nvidia.com/gpu") below the root of the host or of a container."""
    base = f"{root.rstrip('/')}/{resource}"
    return Directories(f"{base}/pipe", f"{base}/log", f"{base}/shm", f"{base}/.ready")


def max_clients(architecture: str) -> int:
    """Return how many clients a GPU of this compute capability ("7.0") may have: 48 from Volta on."""
    major, _, _ = architecture.partition(".")
    return CLIENTS if major.isdigit() and int(major) >= 7 else CLIENTS_BEFORE_VOLTA


def mps_problem(resource: Resource, facts: HostFacts) -> str:
    """Return why the devices of this resource cannot be shared by MPS, "" when they can."""
    architectures = {gpu.uuid: gpu.architecture for gpu in facts.gpus}
    for device in resource.devices:
        if not device.is_replica:
            continue
        if device.instance is not None:
            return f"MPS cannot share MIG device {device.ordinal}"
        most = max_clients(architectures.get(device.gpu, ""))
        if device.replicas > most:
            return f"MPS: {device.replicas} replicas of GPU {device.ordinal}, which can have {most} clients"
    return ""


def control_commands(resource: Resource, memory_mib: dict[str, int]) -> tuple[str, ...]:
    """Return a control daemon's first commands, sent before clients may connect: equal shares for all replicas.

    ``memory_mib``: by GPU UUID.  GPUs are named by NVML's index: the daemon must see all of them, in that order.
    """
    shared = {device.uuid: device for device in resource.devices if device.is_replica}
    limits = [
        f"set_default_device_pinned_mem_limit {device.ordinal} {memory_mib[uuid] // device.replicas}M"
        for uuid, device in shared.items()
        if memory_mib.get(uuid)
    ]
    percentage = 100 // max((device.replicas for device in shared.values()), default=1)
    return (*limits, f"set_default_active_thread_percentage {percentage}")


def mps_root(configuration: Configuration) -> str:
    """Return where the directories are: in a container where the host's directory was mounted."""
    return CONTAINER_ROOT if os.path.isdir(CONTAINER_ROOT) else configuration.options.mps_root


def waits_for_mps(resource: Resource, configuration: Configuration) -> str:
    """Return why pods must not have devices of this resource yet, "" when they may or it is not shared by MPS."""
    if resource.sharing != "mps":
        return ""
    ready = mps_directories(mps_root(configuration), resource.name).ready
    return "" if os.path.exists(ready) else f"MPS: no control daemon is ready: there is no {ready}"


def waiting_resources(resources: Sequence[Resource], configuration: Configuration) -> frozenset[str]:
    """Return the names of those that wait."""
    return frozenset(each.name for each in resources if waits_for_mps(each, configuration))
