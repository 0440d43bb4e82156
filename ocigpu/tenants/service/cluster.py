"""The service's access to the cluster: reads tenancies and quotas; makes, watches and removes containers' objects.

It needs nothing else; docs/tenants/CAAS.md lists the rights.  Sources: "Kubernetes API Concepts", API reference.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from lightkube import ApiError, AsyncClient
from lightkube.generic_resource import create_namespaced_resource

from ocigpu.core.errors import printable
from ocigpu.kubernetes.cluster.client import FAILURES, httpx, is_gone, may_pass, open_client, status_of, trust, words_of
from ocigpu.kubernetes.cluster.documents import KINDS as ALL_KINDS
from ocigpu.kubernetes.cluster.documents import scope_of
from ocigpu.kubernetes.cluster.names import GROUP, VERSION
from ocigpu.system.service import Backoff, ServiceLog
from ocigpu.tenants.service.pods import MAIN, MANAGED_LABEL, MANAGER
from ocigpu.tenants.service.problems import Refusal

KINDS = {**ALL_KINDS, "Event": create_namespaced_resource("", "v1", "Event", "events")}
"""Events as the core group has them, with what the kubelet says of a pod; ``NEWS``: as programs write them."""
NEWS: Any = ALL_KINDS["Event"]
MAX_LINE = 1 << 20
WATCH_SECONDS = 290
"""After which a watch begins again where it was: a connection that died in silence is noticed then."""


class LogTransport(httpx.AsyncHTTPTransport):  # type: ignore[misc] # of Any: see httpx
    """Connections for logs, one for each follower; the service limits the followers.

    An overlong line is cut after MAX_LINE bytes, because the library would keep all of it in memory.
    """

    def __init__(self, verify: Any) -> None:
        super().__init__(verify=verify, trust_env=False, limits=httpx.Limits(max_connections=None))

    async def handle_async_request(self, request: Any) -> Any:
        """Ask, see httpx."""
        response = await super().handle_async_request(request)
        response.stream = ShortLines(response.stream)
        return response


class ShortLines(httpx.AsyncByteStream):  # type: ignore[misc] # of Any: see httpx
    """A stream whose lines end."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for part in self._stream:
            end = part.rfind(b"\n")
            size = len(part) - end - 1 if end >= 0 else size + len(part)
            yield part
            if size > MAX_LINE:
                size = 0
                yield b"\n"

    async def aclose(self) -> None:
        """End it, see httpx."""
        await self._stream.aclose()


class ClusterError(Exception):
    """The API server refuses, or does not answer: ``status`` of HTTP, 0 for no answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, printable(message, 500)

    @property
    def shown(self) -> str:
        """What a tenant may read of it: without an answer, the message names the API server's address."""
        return self.message if self.status else ""

    @property
    def passing(self) -> bool:
        """Whether the same request may be answered later."""
        return may_pass(self.status)


class ClusterClient:
    """Queries the API server.  All methods raise ClusterError.

    ``logs``: a separate client for logs, so that many followers do not use up the connections for work on containers.
    """

    def __init__(self, client: AsyncClient, logs: AsyncClient | None = None) -> None:
        self._client, self._logs = client, logs or client

    async def close(self) -> None:
        """End its connections."""
        await self._client.close()
        await self._logs.close()

    async def read_tenancy(self, name: str) -> Mapping[str, Any] | None:
        """Return a tenancy, None for none; raises Refusal (crd_version) when the cluster has others than we know."""
        try:
            found: Mapping[str, Any] = await self._ask(self._client.get(KINDS["Tenancy"], name))
        except ClusterError as error:
            if error.status != 404:
                raise
            if isinstance(error.__cause__, Exception) and is_gone(error.__cause__, name):
                return None
            raise Refusal("crd_version", f"the cluster serves no tenancies of {GROUP}/{VERSION}") from error
        if not (found.get("metadata") or {}).get("uid"):  # an answer of a proxy: the owner is unknown
            raise ClusterError(0, f"tenancy {name}: the answer is not a tenancy")
        return found

    async def get(self, kind: str, name: str, namespace: str = "") -> Mapping[str, Any] | None:
        """Return an object, None for none."""
        place = {"namespace": namespace} if namespace else {}
        found: Mapping[str, Any] | None = await self._ask(self._client.get(KINDS[kind], name, **place), None)
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

    async def announce(self, event: Mapping[str, Any]) -> None:
        """Create an Event of the service; see announce.py."""
        await self._ask(self._client.create(NEWS(event)))

    async def delete(self, document: Mapping[str, Any]) -> bool:
        """Remove an object; returns False if it is already gone."""
        metadata = document["metadata"]
        place = {"namespace": metadata["namespace"]} if "namespace" in metadata else {}
        gone = self._client.delete(KINDS[document["kind"]], metadata["name"], **place)
        return await self._ask(gone, False) is not False

    async def list_objects(
        self, kind: str, namespace: str = "", fields: Mapping[str, str] | None = None, ours: bool = False
    ) -> tuple[list[Mapping[str, Any]], str]:
        """Return the objects of a kind and the version at which they were so.  ``namespace``: "" for all."""
        found: Any = self._client.list(  # type: ignore[call-overload] # of a class that is chosen at run time
            KINDS[kind], **scope_of(kind, namespace), labels={MANAGED_LABEL: MANAGER} if ours else None, fields=fields
        )
        try:
            items = [item async for item in found]
            return items, found.resourceVersion
        except FAILURES as error:
            raise _as_cluster_error(error) from error

    async def watch(
        self, kind: str, version: str, ours: bool = False, fields: Mapping[str, str] | None = None
    ) -> AsyncIterator[tuple[str, Mapping[str, Any]]]:
        """Yield (type, object) of each change after a version, until the connection ends."""
        stream: Any = self._client.watch(  # type: ignore[call-overload] # as above
            KINDS[kind], **scope_of(kind), labels={MANAGED_LABEL: MANAGER} if ours else None,
            server_timeout=WATCH_SECONDS, resource_version=version, fields=fields,
        )  # fmt: skip
        try:
            async for change, found in stream:
                if change != "BOOKMARK":
                    yield change, found
        except FAILURES as error:
            raise _as_cluster_error(error) from error

    async def read_log(
        self, namespace: str, pod: str, follow: bool = False, tail: int | None = None, since: float | None = None
    ) -> AsyncIterator[str]:
        """Yield the lines that a pod's container printed, each after its time.  ``since``: seconds ago."""
        stream = self._logs.log(
            pod, namespace=namespace, container=MAIN, follow=follow, tail_lines=tail, timestamps=True, newlines=False,
            since=None if since is None else max(1, math.ceil(since)),
        )  # fmt: skip
        try:
            async for line in stream:
                yield line
        # the library reads the answer of a refusal as if it were not a stream: RuntimeError
        except (*FAILURES, RuntimeError) as error:
            raise _as_cluster_error(error) from error

    async def _ask(self, answer: Any, *missing: Any) -> Any:
        """Return an answer, ``missing`` for status 404."""
        try:
            return await answer
        except FAILURES as error:
            if missing and status_of(error) == 404:
                return missing[0]
            raise _as_cluster_error(error) from error


class WatchCache:
    """A current copy of the cluster's objects of a kind, while :meth:`run` runs.

    ``objects``: by namespace, "" for none, and name.  Labels are no key: every writer of objects in a tenancy's
    namespace can set them.  ``problem``: why the objects may be out of date.  ``ours``: only those of the service;
    ``fields``: the field values of the objects to follow; ``take``: returns the part of an object to keep, None to drop
    it.
    """

    def __init__(
        self,
        cluster: ClusterClient,
        kind: str,
        pause: Backoff,
        log: ServiceLog,
        ours: bool = False,
        fields: Mapping[str, str] | None = None,
        take: Callable[[Mapping[str, Any]], Mapping[str, Any] | None] = lambda found: found,
    ) -> None:
        self._cluster, self._kind, self._pause, self._log, self._ours = cluster, kind, pause, log, ours
        self._fields, self._take = fields, take
        self.objects: dict[tuple[str, str], Mapping[str, Any]] = {}
        self.problem = "the cluster was not queried yet"

    async def run(self, changed: Callable[[Mapping[str, Any] | None], None]) -> None:
        """Follow until cancelled.  ``changed``: called with an object that is another or gone, None: all may be."""
        while True:
            try:
                items, version = await self._cluster.list_objects(self._kind, fields=self._fields, ours=self._ours)
                self.objects = {_place(one): one for each in items if (one := self._take(each)) is not None}
                self.problem = ""
                self._log.forget(self._kind)
                self._pause.reset()
                changed(None)
                async for change, each in self._cluster.watch(self._kind, version, self._ours, self._fields):
                    found = self._take(each)
                    if found is None:
                        continue
                    if change == "DELETED":
                        self.objects.pop(_place(found), None)
                    else:
                        self.objects[_place(found)] = found
                    changed(found)
            except ClusterError as error:
                self.problem = error.message
                self._log.once(self._kind, "warning", f"objects {self._kind} cannot be followed: {error.message}")
                if error.status != 410:  # 410: the list is read again at once
                    await asyncio.sleep(self._pause.failed(0.0))


def _place(found: Mapping[str, Any]) -> tuple[str, str]:
    return str(found["metadata"].get("namespace") or ""), str(found["metadata"]["name"])


def _as_cluster_error(error: Exception) -> ClusterError:
    found = ClusterError(status_of(error), words_of(error))
    if isinstance(error, ApiError):
        found.args = (found.message, error.status.reason)
    return found


def open_cluster(kubeconfig: str = "") -> ClusterClient:
    """Return the cluster of this pod or of a kubeconfig; raises HostError (OCIGPU-CAAS-1)."""
    client = open_client(AsyncClient, kubeconfig, "OCIGPU-CAAS-1")
    config: Any = client.config
    logs = LogTransport(trust(config))
    return ClusterClient(client, AsyncClient(config=config, trust_env=False, transport=logs))
