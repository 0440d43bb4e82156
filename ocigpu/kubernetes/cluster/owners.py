"""Containers and the devices that they have: what the kubelet lists, in records."""

from typing import NamedTuple

DRA_DRIVER = "gpu.nvidia.com"
DOMAIN_DRIVER = "compute-domain.nvidia.com"
"""Of channels and daemons of ComputeDomains."""


class Claim(NamedTuple):
    """A device of a resource claim (dynamic resource allocation)."""

    name: str
    namespace: str
    driver: str
    pool: str
    device: str


class Owner(NamedTuple):
    """A container that has a device; ``vgpu``: number of the replica, "" for none; ``claim``: by which it has it."""

    pod: str
    namespace: str
    container: str
    vgpu: str = ""
    claim: Claim | None = None


class Held(NamedTuple):
    """A container and a device of a resource that it has."""

    owner: Owner
    resource: str
    device_id: str
