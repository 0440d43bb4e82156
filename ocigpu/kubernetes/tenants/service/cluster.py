"""The cluster as the service needs it: tenancies and quotas read, objects of containers made, watched and removed.

It asks for nothing else; docs/CAAS.md lists the rights.  Sources: "Kubernetes API Concepts", API reference.
"""

import math
from collections.abc import AsyncIterator, Mapping
from typing import Any

from lightkube import ApiError, AsyncClient, KubeConfig
from lightkube.core import exceptions
from lightkube.generic_resource import create_global_resource, create_namespaced_resource

from ocigpu.core.errors import HostError, printable
from ocigpu.kubernetes.tenants.service.pods import MAIN, MANAGED_LABEL, MANAGER
from ocigpu.kubernetes.tenants.service.problems import Refusal

GROUP, VERSION = "ocigpu.io", "v1alpha1"
KINDS: dict[str, Any] = {
    "Tenancy": create_global_resource(GROUP, VERSION, "Tenancy", "tenancies"),
    "GPULease": create_global_resource(GROUP, VERSION, "GPULease", "gpuleases"),
    **{
        kind: create_global_resource("", "v1", kind, plural)
        for kind, plural in (("Node", "nodes"), ("PersistentVolume", "persistentvolumes"))
    },
    **{
        kind: create_namespaced_resource("", "v1", kind, plural)
        for kind, plural in (
            ("Pod", "pods"), ("Secret", "secrets"), ("PersistentVolumeClaim", "persistentvolumeclaims"),
            ("ResourceQuota", "resourcequotas"), ("Event", "events"),
        )
    },
}  # fmt: skip
HTTP_ERROR: type[Exception] = exceptions.httpx.HTTPError  # type: ignore[attr-defined] # its name depends on the version
WATCH_SECONDS = 290
"""After which a watch begins again where it was: a connection that died in silence is noticed then."""


class ClusterError(Exception):
    """The API server refuses, or does not answer: ``status`` of HTTP, 0 for no answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, printable(message, 500)

    @property
    def passing(self) -> bool:
        """Whether the same request may be answered later."""
        return self.status in (0, 401, 408, 409, 429) or self.status >= 500


class ClusterClient:
    """Asks the API server.  Everything here raises ClusterError."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def close(self) -> None:
        """End its connections."""
        await self._client.close()

    async def read_tenancy(self, name: str) -> Mapping[str, Any] | None:
        """Return a tenancy, None for none; raises Refusal (crd_version) when the cluster has others than we know."""
        try:
            found: Mapping[str, Any] = await self._ask(self._client.get(KINDS["Tenancy"], name))
        except ClusterError as error:
            if error.status == 404 and f'"{name}"' not in error.message:  # no such path, rather than no such object
                raise Refusal("crd_version", f"the cluster serves no tenancies of {GROUP}/{VERSION}") from error
            if error.status == 404:
                return None
            raise
        return found

    async def get(self, kind: str, name: str, namespace: str = "") -> Mapping[str, Any] | None:
        """Return an object, None for none."""
        place = {"namespace": namespace} if namespace else {}
        try:
            found: Mapping[str, Any] = await self._ask(self._client.get(KINDS[kind], name, **place))
        except ClusterError as error:
            if error.status == 404:
                return None
            raise
        return found

    async def create(self, document: Mapping[str, Any]) -> bool:
        """Make an object; returns False for one whose name is taken."""
        try:
            await self._ask(self._client.create(KINDS[document["kind"]](document)))
        except ClusterError as error:
            if error.status == 409 and "AlreadyExists" in error.args:
                return False
            raise
        return True

    async def delete(self, document: Mapping[str, Any]) -> bool:
        """Remove an object; returns False for one that is gone."""
        metadata = document["metadata"]
        place = {"namespace": metadata["namespace"]} if "namespace" in metadata else {}
        try:
            await self._ask(self._client.delete(KINDS[document["kind"]], metadata["name"], **place))
        except ClusterError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def list_objects(
        self, kind: str, namespace: str = "", fields: Mapping[str, str] | None = None, ours: bool = False
    ) -> tuple[list[Mapping[str, Any]], str]:
        """Return the objects of a kind and the version at which they were so.  ``namespace``: "" for all."""
        found: Any = self._client.list(  # type: ignore[call-overload]
            KINDS[kind], **_place(kind, namespace), labels={MANAGED_LABEL: MANAGER} if ours else None, fields=fields
        )
        try:
            items = [item async for item in found]
            return items, found.resourceVersion
        except (HTTP_ERROR, OSError) as error:
            raise _as_cluster_error(error) from error

    async def watch(self, kind: str, version: str, ours: bool = False) -> AsyncIterator[tuple[str, Mapping[str, Any]]]:
        """Yield (type, object) of each change after a version, until the connection ends."""
        stream: Any = self._client.watch(  # type: ignore[call-overload]
            KINDS[kind], **_place(kind, ""), labels={MANAGED_LABEL: MANAGER} if ours else None,
            server_timeout=WATCH_SECONDS, resource_version=version,
        )  # fmt: skip
        try:
            async for change, found in stream:
                if change != "BOOKMARK":
                    yield change, found
        except (HTTP_ERROR, OSError) as error:
            raise _as_cluster_error(error) from error

    async def read_events(self, namespace: str, pod: str) -> list[Mapping[str, Any]]:
        """Return the events of a pod."""
        return (await self.list_objects("Event", namespace, {"involvedObject.name": pod}))[0]

    async def read_log(
        self, namespace: str, pod: str, follow: bool = False, tail: int | None = None, since: float | None = None
    ) -> AsyncIterator[str]:
        """Yield the lines that a pod's container printed, each after its time.  ``since``: seconds ago."""
        stream = self._client.log(
            pod, namespace=namespace, container=MAIN, follow=follow, tail_lines=tail, timestamps=True, newlines=False,
            since=None if since is None else max(1, math.ceil(since)),
        )  # fmt: skip
        try:
            async for line in stream:
                yield line
        # the library reads the answer of a refusal as if it were not a stream: RuntimeError
        except (HTTP_ERROR, OSError, RuntimeError) as error:
            raise _as_cluster_error(error) from error

    async def _ask(self, answer: Any) -> Any:
        try:
            return await answer
        except (HTTP_ERROR, OSError) as error:
            raise _as_cluster_error(error) from error


def _place(kind: str, namespace: str) -> dict[str, str]:
    return {} if kind in ("Tenancy", "GPULease", "Node", "PersistentVolume") else {"namespace": namespace or "*"}


def _as_cluster_error(error: Exception) -> ClusterError:
    if isinstance(error, ApiError):
        found = ClusterError(error.status.code or 0, error.status.message or "")
        found.args = (found.message, error.status.reason)
        return found
    response = getattr(error, "response", None)
    return ClusterError(getattr(response, "status_code", 0), str(error) or type(error).__name__)


def open_cluster(kubeconfig: str = "") -> ClusterClient:
    """Return the cluster of this pod, or that of a kubeconfig; raises HostError (OCIGPU-CAAS-1)."""
    try:
        config = KubeConfig.from_file(kubeconfig) if kubeconfig else KubeConfig.from_env()
        return ClusterClient(AsyncClient(config=config.get(), trust_env=False))
    except (exceptions.ConfigError, OSError, ValueError, AssertionError) as error:
        where = f"kubeconfig {kubeconfig}" if kubeconfig else "the cluster of this pod"
        raise HostError("OCIGPU-CAAS-1", f"{where}: {error}", "name a kubeconfig, or run in a pod") from error
