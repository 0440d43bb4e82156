"""ComputeDomains in a cluster double, which does Kubernetes' part, and a controller with the rights of its role."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import yaml
from deployment_lab import objects
from support.cluster import Cluster

from ocigpu.kubernetes.cluster.documents import Documents
from ocigpu.kubernetes.cluster.owners import DOMAIN_DRIVER
from ocigpu.kubernetes.domains.controller import DomainController
from ocigpu.kubernetes.domains.objects import DOMAIN_LABEL, DaemonOptions, daemon_name
from ocigpu.system.service import ServiceLog

Object = dict[str, Any]
PAGE = Path(__file__).parents[2] / "docs/COMPUTE-DOMAINS.md"
SPACE = "gpu"
"""The namespace of the chart and of daemons."""
ACCOUNT = f"system:serviceaccount:{SPACE}:ocigpu-compute-domain-controller"
DAEMON_ACCOUNT = f"system:serviceaccount:{SPACE}:ocigpu-compute-domain-daemon"
DRIVER_ACCOUNT = f"system:serviceaccount:{SPACE}:ocigpu-compute-domain-driver"
OPTIONS = DaemonOptions(SPACE, "ocigpu:1", "ocigpu-compute-domain-daemon", most=18)
RACK = "6c9a6fb6-5a4d-4d2e-8b1a-0d7f5c3e2a10.1"
OTHER_RACK = "6c9a6fb6-5a4d-4d2e-8b1a-0d7f5c3e2a10.2"
INSTALLED = ("CustomResourceDefinition", "DeviceClass", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding",
             "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "ServiceAccount")  # fmt: skip


def documented() -> list[Object]:
    """Return the domain of the page and the pod that uses it."""
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return list(yaml.safe_load_all(text))


@functools.cache
def manifests() -> str:
    return json.dumps(objects({"computeDomains": {"enabled": True}}))


class Rack:
    """A cluster with nodes of an NVL72 rack: what scheduler, kubelets and Kubernetes' controllers would do there."""

    def __init__(self, cluster: Cluster, *nodes: str, clique: str = RACK) -> None:
        self.cluster, self.now = cluster, 0.0
        for name in (SPACE, "team"):
            cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        for each in json.loads(manifests()):
            if each["kind"] in INSTALLED:
                cluster.apply(each)
        for node in nodes:
            self.add_node(node, clique)
        self.lines: list[str] = []
        self.controller = DomainController(
            Documents(cluster.client(ACCOUNT)), OPTIONS, ServiceLog(as_json=False), lambda: self.now
        )

    def add_node(self, name: str, clique: str = RACK) -> None:
        self.cluster.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
        attributes: Object = {"type": {"string": "daemon"}, "id": {"int": 0}}
        attributes |= {"cliqueID": {"string": clique}} if clique else {}
        spec = {
            "driver": DOMAIN_DRIVER, "nodeName": name, "pool": {"name": name, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "daemon-0", "attributes": attributes}],
        }  # fmt: skip
        head = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": f"slice-{name}"}}
        self.cluster.create({**head, "spec": spec})

    def add_domain(self, name: str = "job", namespace: str = "team", **spec: Any) -> str:
        """Make a domain as NVIDIA's examples have it; returns its uid."""
        channel = {"resourceClaimTemplate": {"name": f"{name}-channel"}, **spec.pop("channel", {})}
        head = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "ComputeDomain"}
        made = self.cluster.create(
            {**head, "metadata": {"name": name, "namespace": namespace}, "spec": {"channel": channel, **spec}}
        )
        return str(made["metadata"]["uid"])

    def add_claim(
        self, node: str, uid: str, name: str = "", namespace: str = "team", device: str = "channel-0", **more: Any
    ) -> Object:
        """Make the claim of a pod on a node that the scheduler has allocated a channel there."""
        channel = device.startswith("channel")
        kind = "ComputeDomainChannelConfig" if channel else "ComputeDomainDaemonConfig"
        parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": kind, "domainID": uid, **more}
        request = device.partition("-")[0]
        opaque = {"driver": DOMAIN_DRIVER, "parameters": parameters}
        config = {"source": "FromClaim", "requests": [request], "opaque": opaque}
        metadata = {"name": name or f"channel-{node}", "namespace": namespace, "labels": {DOMAIN_LABEL: uid}}
        head = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": metadata}
        made = self.cluster.create({**head, "spec": {}})
        result = {"request": request, "driver": DOMAIN_DRIVER, "pool": node, "device": device}
        status = {"allocation": {"devices": {"results": [result], "config": [config]}}}
        return self.cluster.update({**made, "status": status}, sub="status")

    def run_daemons(self, ready: bool = True) -> None:
        """Do what the DaemonSets' controller and kubelets do: pods on the nodes that have the label."""
        wanted = {}
        sets = {each["metadata"]["name"] for each in self.cluster.objects("DaemonSet")}
        for node in self.cluster.objects("Node"):
            uid = node["metadata"].get("labels", {}).get(DOMAIN_LABEL)
            if uid and daemon_name(uid) in sets:
                wanted[f"{daemon_name(uid)}-{node['metadata']['name']}"] = (node["metadata"]["name"], uid)
        for pod in self.cluster.objects("Pod"):
            if pod["metadata"]["namespace"] == SPACE and pod["metadata"]["name"] not in wanted:
                self.cluster.delete("Pod", pod["metadata"]["name"], SPACE, gracePeriodSeconds=0)
        for name, (node, uid) in wanted.items():
            if not self.cluster.exists("Pod", name, SPACE):
                self.add_daemon(name, node, uid)
            self.set_ready(node, uid, ready)

    def add_daemon(self, name: str, node: str, uid: str) -> None:
        owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": daemon_name(uid)}
        owner["uid"] = self.cluster.get("DaemonSet", daemon_name(uid), SPACE)["metadata"]["uid"]
        metadata = {"name": name, "namespace": SPACE, "labels": {DOMAIN_LABEL: uid}, "ownerReferences": [owner]}
        spec = {"nodeName": node, "containers": [{"name": "compute-domain-daemon", "image": "ocigpu:1"}]}
        self.cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})

    def set_ready(self, node: str, uid: str, ready: bool, address: str = "") -> None:
        pod = self.cluster.get("Pod", f"{daemon_name(uid)}-{node}", SPACE)
        condition = {"type": "Ready", "status": str(ready)}
        number = sorted(each["metadata"]["name"] for each in self.cluster.objects("Node")).index(node)
        pod["status"] = {
            "phase": "Running", "podIP": address or f"10.0.0.{number + 1}", "conditions": [condition],
        }  # fmt: skip
        self.cluster.update(pod, sub="status")

    def settle(self, ready: bool = True) -> None:
        """Let controller and kubelets work until nothing changes any more."""
        for _ in range(12):
            changed = self.controller.resync()
            version = self.cluster.objects("Pod")
            self.run_daemons(ready)
            if not changed and version == self.cluster.objects("Pod"):
                return
        raise AssertionError("it never settles")

    def domain(self, name: str = "job", namespace: str = "team") -> Object:
        return self.cluster.get("ComputeDomain", name, namespace)

    def members(self, name: str = "job") -> dict[str, tuple[int, str, str]]:
        """Return index, clique and status of each node of a domain."""
        nodes = self.domain(name).get("status", {}).get("nodes", [])
        return {each["name"]: (each["index"], each["cliqueID"], each["status"]) for each in nodes}

    def labels(self) -> dict[str, str]:
        """Return the label of each node that has it."""
        nodes = {each["metadata"]["name"]: each["metadata"].get("labels", {}) for each in self.cluster.objects("Node")}
        return {name: labels[DOMAIN_LABEL] for name, labels in nodes.items() if DOMAIN_LABEL in labels}

    def clique(self, uid: str, clique: str = RACK) -> list[Object]:
        found: list[Object] = self.cluster.get("ComputeDomainClique", f"{uid}.{clique}", SPACE)["daemons"]
        return found
