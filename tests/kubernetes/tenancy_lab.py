"""A cluster with what tenancies need, and a controller with no more rights than its role gives."""

import functools
import json
from pathlib import Path
from typing import Any

import yaml
from deployment_lab import DEPLOYMENT, RENDERER
from support.cluster import ADMIN, Cluster, make_kind

from ocigpu.kubernetes.cluster.documents import Documents
from ocigpu.system.service import ServiceLog
from ocigpu.tenants.controller import RESYNC, TenancyController
from ocigpu.tenants.tenancy import TenancyOptions

Object = dict[str, Any]
ACCOUNT = "system:serviceaccount:ocigpu:ocigpu-tenancy-controller"
SERVICE = "system:serviceaccount:ocigpu:ocigpu-caas"
"""One who makes pods in namespaces of tenancies."""


def cilium_kind() -> Object:
    return make_kind("cilium.io", "CiliumNetworkPolicy", "ciliumnetworkpolicies", "v2", namespaced=True)


@functools.cache
def _manifests(values: str) -> str:
    return json.dumps(list(yaml.safe_load_all(RENDERER.tenants({"tenants": json.loads(values)}))))


def install(cluster: Cluster, **values: Any) -> None:
    """Install the tenants' manifests as an administrator does."""
    for document in json.loads(_manifests(json.dumps(values))):
        cluster.apply(document)
    cluster.apply_manifests(DEPLOYMENT / "kata-runtimeclass.yaml")


def make_controller(cluster: Cluster, network: str = "auto", **options: Any) -> TenancyController:
    documents = Documents(cluster.client(ACCOUNT))
    return TenancyController(documents, TenancyOptions(**options), ServiceLog(as_json=False), network)


def tenancy(name: str = "landon", **spec: Any) -> Object:
    return {"apiVersion": "ocigpu.io/v1alpha1", "kind": "Tenancy", "metadata": {"name": name}, "spec": spec}


def pod(namespace: str = "tenant-landon", name: str = "p", gpus: int = 2, **spec: Any) -> Object:
    """A pod as a tenant may have it; ``spec`` over it, and ``container`` over its container."""
    limits = {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": str(gpus)}
    container = {"name": "main", "image": "registry.example/cuda:12", "resources": {"limits": limits}}
    container |= spec.pop("container", {})
    annotations = {key: spec.pop(key) for key in ("annotations", "finalizers") if key in spec}
    whole = {"runtimeClassName": "kata-qemu-nvidia-gpu", "containers": [container], **spec}
    head = {"name": name, "namespace": namespace, **annotations}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": head, "spec": whole}


def settle(controller: TenancyController, passes: int = 12) -> int:
    """Do passes until nothing is done any more; returns how many there were before."""
    for number in range(passes):
        if controller.resync() == RESYNC:
            return number
    raise AssertionError("it never settles")


def status(cluster: Cluster, name: str = "landon") -> Object:
    return cluster.get("Tenancy", name).get("status", {})


def conditions(cluster: Cluster, name: str = "landon") -> dict[str, tuple[str, str]]:
    return {each["type"]: (each["status"], each["reason"]) for each in status(cluster, name).get("conditions", [])}


PLAIN = Path(__file__).parents[2] / "packaging/kubernetes/tenants.yaml"
__all__ = ["ACCOUNT", "ADMIN", "PLAIN", "SERVICE"]
