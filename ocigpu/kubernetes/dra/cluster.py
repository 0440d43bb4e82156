"""The driver's business with the API server: it reads claims, and writes the ResourceSlices of its own node.

Rights of its service account: resourceclaims get; resourceslices list, create, delete; nodes get.
"""

import ssl
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import httpx2
from lightkube import ApiError, Client, KubeConfig
from lightkube.core.exceptions import ConfigError
from lightkube.generic_resource import create_global_resource, create_namespaced_resource
from lightkube.resources.core_v1 import Node

from ocigpu.core.errors import HostError, printable
from ocigpu.kubernetes.dra.slices import GROUP, Present, from_version

VERSIONS = ("v1", "v1beta2", "v1beta1")
"""Of the API group, the newest first; v1 came with Kubernetes 1.34."""
TIMEOUT = 10.0
T = TypeVar("T")


class DraCluster(Protocol):
    """What the driver asks of the API server; methods raise HostError (OCIGPU-KUBE-5)."""

    @property
    def version(self) -> str:
        """The version of the API group that is spoken."""

    def get_claim(self, namespace: str, name: str) -> "dict[str, Any] | None":
        """Return a ResourceClaim, None for none."""

    def list_slices(self, driver: str, node: str) -> "tuple[Present, ...]":
        """Return the ResourceSlices of a driver on a node."""

    def create_slice(self, document: "dict[str, Any]") -> Present:
        """Make a ResourceSlice; returns what has become of it."""

    def delete_slice(self, name: str) -> None:
        """Remove a ResourceSlice; one that is not there is no error."""

    def node_owner(self, node: str) -> "dict[str, str]":
        """Return the reference to the Node, whose end ends its slices; {} for none."""


class ApiCluster:
    """The API server of a pod's service account or of a kubeconfig file; see :class:`DraCluster`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._version = ""
        self.close: Callable[[], None] = client.close

    @property
    def version(self) -> str:
        if not self._version:
            served = (version for version in VERSIONS if self._serves(version))
            self._version = next(served, "")
            if not self._version:
                cause = f"it serves none of {GROUP}/{', '.join(VERSIONS)}"
                raise HostError("OCIGPU-KUBE-5", f"API server: {cause}", "Kubernetes 1.34 or later is needed.")
        return self._version

    def _serves(self, version: str) -> bool:
        kind = create_global_resource(GROUP, version, "ResourceSlice", "resourceslices")
        nobody = {"spec.driver": "none"}  # only whether it can be asked
        return _asking("LIST resourceslices", lambda: self._listed(kind, nobody), missing_ok=True) is not None

    def _listed(self, kind: Any, fields: "dict[str, Any]") -> "list[Any]":
        return list(self._client.list(kind, fields=fields))

    def get_claim(self, namespace: str, name: str) -> "dict[str, Any] | None":
        kind = create_namespaced_resource(GROUP, self.version, "ResourceClaim", "resourceclaims")
        where = f"GET resourceclaims {namespace}/{name}"
        found = _asking(where, lambda: self._client.get(kind, name, namespace=namespace), missing_ok=True)
        return None if found is None else _plain(found)

    def list_slices(self, driver: str, node: str) -> "tuple[Present, ...]":
        fields = {"spec.nodeName": node, "spec.driver": driver}
        found = _asking("LIST resourceslices", lambda: self._listed(self._slices(), fields))
        return tuple(self._present(each) for each in found or ())

    def create_slice(self, document: "dict[str, Any]") -> Present:
        kind = self._slices()
        made = _asking("POST resourceslices", lambda: self._client.create(kind(document)))
        return self._present(made)

    def delete_slice(self, name: str) -> None:
        kind = self._slices()
        _asking(f"DELETE resourceslices {name}", lambda: self._client.delete(kind, name), missing_ok=True)

    def node_owner(self, node: str) -> "dict[str, str]":
        found = _asking(f"GET nodes {node}", lambda: self._client.get(Node, node), missing_ok=True)
        uid = found.metadata.uid if found and found.metadata else ""
        return {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid} if uid else {}

    def list_objects(
        self, kind: str, plural: str, *, namespaced: bool = False, spec: bool = False
    ) -> "list[dict[str, Any]]":
        """Return all objects of a kind of the API group; ``spec``: the specs of slices, as of v1."""
        make = create_namespaced_resource if namespaced else create_global_resource
        known: Any = make(GROUP, self.version, kind, plural)
        space: dict[str, Any] = {"namespace": "*"} if namespaced else {}
        found = _asking(f"LIST {plural}", lambda: [_plain(each) for each in self._client.list(known, **space)]) or []
        return [from_version(each["spec"], self.version) for each in found] if spec else found

    def _slices(self) -> Any:
        return create_global_resource(GROUP, self.version, "ResourceSlice", "resourceslices")

    def _present(self, found: Any) -> Present:
        document = _plain(found)
        return Present(document["metadata"]["name"], from_version(document.get("spec", {}), self.version))


def open_cluster(kubeconfig: str = "") -> ApiCluster:
    """Return the API server of a kubeconfig file, or of the pod's service account; raises HostError OCIGPU-KUBE-5."""
    try:
        config = KubeConfig.from_file(kubeconfig) if kubeconfig else KubeConfig.from_service_account()
        client = Client(config, timeout=httpx2.Timeout(TIMEOUT), trust_env=False)
    except (ConfigError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        where = kubeconfig or "service account"
        hint = "Name a kubeconfig (--kubeconfig, KUBECONFIG), or run in a pod with a service account."
        raise HostError("OCIGPU-KUBE-5", f"{where}: {printable(str(error), 300)}", hint) from error
    return ApiCluster(client)


def _asking(where: str, function: "Callable[[], T]", missing_ok: bool = False) -> "T | None":
    """Return what a request returns, None for 404 where that is no error; raises HostError (OCIGPU-KUBE-5)."""
    try:
        return function()
    except httpx2.HTTPStatusError as error:
        code = error.response.status_code
        if missing_ok and code == 404:
            return None
        words = error.status.message if isinstance(error, ApiError) else error.response.text
        cause = f"{code}: {printable(str(words or ''), 500)}"
    except (httpx2.HTTPError, ssl.SSLError, OSError, ConfigError, ValueError, RecursionError) as error:
        cause = printable(str(error), 300) or type(error).__name__
    raise HostError("OCIGPU-KUBE-5", f"API server: {where}: {cause}")


def _plain(found: Any) -> "dict[str, Any]":
    document: dict[str, Any] = found.to_dict()
    return document
