"""The driver's business with the API server: it reads claims, and writes the ResourceSlices of its own node.

Rights of its service account: resourceclaims get; resourceslices list, create, delete; nodes get; for ComputeDomains
computedomains list.
"""

from collections.abc import Callable
from typing import Any

from lightkube import Client
from lightkube.generic_resource import create_global_resource, create_namespaced_resource
from lightkube.resources.core_v1 import Node

from ocigpu.core.errors import HostError
from ocigpu.kubernetes.cluster.client import FAILURES, ask, is_gone, open_client, refused, status_of
from ocigpu.kubernetes.dra.slices import GROUP, Present, from_version

VERSIONS = ("v1", "v1beta2", "v1beta1")
"""Of the API group, the newest first; v1 came with Kubernetes 1.34."""


class ApiCluster:
    """The API server of a pod's service account or of a kubeconfig file; methods raise HostError (OCIGPU-KUBE-5)."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._version = ""
        self.close: Callable[[], None] = client.close

    @property
    def version(self) -> str:
        """The version of the API group that is spoken."""
        version = self._version  # another thread may have it asked again
        if not version:
            self._version = version = next(filter(self._serves, VERSIONS), "")
            if not version:
                cause = f"it serves none of {GROUP}/{', '.join(VERSIONS)}"
                raise HostError("OCIGPU-KUBE-5", f"API server: {cause}", "Kubernetes 1.34 or later is needed.")
        return version

    def _serves(self, version: str) -> bool:
        kind = create_global_resource(GROUP, version, "ResourceSlice", "resourceslices")
        nobody = {"spec.driver": "none"}  # only whether it can be asked
        return ask("LIST resourceslices", lambda: self._listed(kind, nobody), None) is not None

    def _listed(self, kind: Any, fields: "dict[str, Any]") -> "list[Any]":
        return list(self._client.list(kind, fields=fields))

    def get_claim(self, namespace: str, name: str) -> "dict[str, Any] | None":
        """Return a ResourceClaim, None for none."""
        kind = create_namespaced_resource(GROUP, self.version, "ResourceClaim", "resourceclaims")
        try:
            return _plain(self._client.get(kind, name, namespace=namespace))
        except FAILURES as error:
            if is_gone(error, name):
                return None
            if status_of(error) == 404:
                self._version = ""  # it may be served no more
            raise refused(f"GET resourceclaims {namespace}/{name}", error) from error

    def list_domains(self, namespace: str) -> "list[dict[str, Any]]":
        """Return the ComputeDomains of a namespace, "": of all."""
        kind: Any = create_namespaced_resource("resource.nvidia.com", "v1beta1", "ComputeDomain", "computedomains")
        where = namespace or "*"
        return ask("LIST computedomains", lambda: [_plain(each) for each in self._client.list(kind, namespace=where)])

    def list_slices(self, driver: str, node: str) -> "tuple[Present, ...]":
        """Return the ResourceSlices of a driver on a node."""
        fields = {"spec.nodeName": node, "spec.driver": driver}
        found = ask("LIST resourceslices", lambda: self._listed(self._slices(), fields))
        return tuple(self._present(each) for each in found)

    def create_slice(self, document: "dict[str, Any]") -> Present:
        """Make a ResourceSlice; returns what has become of it."""
        kind = self._slices()
        return self._present(ask("POST resourceslices", lambda: self._client.create(kind(document))))

    def delete_slice(self, name: str) -> None:
        """Remove a ResourceSlice; a missing one is not an error."""
        kind = self._slices()
        ask(f"DELETE resourceslices {name}", lambda: self._client.delete(kind, name), None)

    def node_owner(self, node: str) -> "dict[str, str]":
        """Return the reference to the Node, whose end ends its slices; {} for none."""
        found = ask(f"GET nodes {node}", lambda: self._client.get(Node, node), None)
        uid = found.metadata.uid if found and found.metadata else ""
        return {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid} if uid else {}

    def list_objects(
        self, kind: str, plural: str, *, namespaced: bool = False, spec: bool = False
    ) -> "list[dict[str, Any]]":
        """Return all objects of a kind of the API group; ``spec``: the specs of slices, as of v1."""
        make = create_namespaced_resource if namespaced else create_global_resource
        known: Any = make(GROUP, self.version, kind, plural)
        space: dict[str, Any] = {"namespace": "*"} if namespaced else {}
        found = ask(f"LIST {plural}", lambda: [_plain(each) for each in self._client.list(known, **space)])
        return [from_version(each["spec"], self.version) for each in found] if spec else found

    def _slices(self) -> Any:
        return create_global_resource(GROUP, self.version, "ResourceSlice", "resourceslices")

    def _present(self, found: Any) -> Present:
        document = _plain(found)
        return Present(document["metadata"]["name"], from_version(document.get("spec", {}), self.version))


def open_cluster(kubeconfig: str = "") -> ApiCluster:
    """Return the API server; raises as :func:`~ocigpu.kubernetes.cluster.client.open_client`."""
    return ApiCluster(open_client(Client, kubeconfig))


def _plain(found: Any) -> "dict[str, Any]":
    document: dict[str, Any] = found.to_dict()
    return document
