"""Objects of the API server as plain documents, by lightkube: its typed models would drop fields newer than themselves.

Needs lightkube: it is imported only where a command has made sure of it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import lightkube
from lightkube.core.exceptions import ApiError, ConfigError
from lightkube.core.resource import ApiInfo, GlobalResource, GlobalSubResource, NamespacedResourceG, ResourceDef
from lightkube.generic_resource import Generic
from lightkube.types import PatchType

from ocigpu.core.errors import HostError, printable

Document = dict[str, Any]
_VERBS = ["delete", "get", "global_list", "global_watch", "list", "patch", "post", "put", "watch"]
# group/version, kind, plural, n: in a namespace
_KINDS = """
v1 Namespace namespaces -
v1 Pod pods n
v1 ResourceQuota resourcequotas n
v1 LimitRange limitranges n
v1 ServiceAccount serviceaccounts n
networking.k8s.io/v1 NetworkPolicy networkpolicies n
cilium.io/v2 CiliumNetworkPolicy ciliumnetworkpolicies n
coordination.k8s.io/v1 Lease leases n
admissionregistration.k8s.io/v1 ValidatingAdmissionPolicy validatingadmissionpolicies -
admissionregistration.k8s.io/v1 ValidatingAdmissionPolicyBinding validatingadmissionpolicybindings -
ocigpu.io/v1alpha1 Tenancy tenancies -
ocigpu.io/v1alpha1 GPULease gpuleases -
"""


def _classes() -> Iterator[tuple[str, tuple[Any, Any]]]:
    for line in _KINDS.strip().splitlines():
        api, name, plural, scope = line.split()
        group, _, version = api.rpartition("/")
        definition = ResourceDef(group, version, name)
        info = ApiInfo(resource=definition, plural=plural, verbs=_VERBS)
        status = ApiInfo(
            resource=definition, parent=definition, plural=plural, verbs=["get", "patch", "put"], action="status"
        )
        base: Any = NamespacedResourceG if scope == "n" else GlobalResource
        made = type(name, (base, Generic), {"_api_info": info})
        yield name, (made, type(f"{name}Status", (GlobalSubResource, Generic), {"_api_info": status}))


_CLASSES = dict(_classes())


class Documents:
    """Documents of the API server; every method raises HostError (OCIGPU-KUBE-5) with the server's own words.

    ``may_write``: asked before each change; it raises when this program must not write any more.
    """

    def __init__(self, client: lightkube.Client, may_write: Callable[[], None] = lambda: None) -> None:
        self._client = client
        self._may_write = may_write

    def close(self) -> None:
        self._client.close()

    def get(self, kind: str, name: str, namespace: str | None = None) -> Document | None:
        """Return an object, None when there is none."""
        try:
            return dict(self._client.get(_CLASSES[kind][0], name, namespace=namespace))
        except (httpx2.HTTPError, OSError) as error:
            if is_status(error, 404):
                return None
            raise _failed("get", kind, name, error) from error

    def list(
        self,
        kind: str,
        namespace: str = "*",
        labels: "dict[str, Any] | None" = None,
        fields: "dict[str, Any] | None" = None,
    ) -> "tuple[list[Document], str]":
        """Return objects and the version of their list; ([], "") where there is no such kind."""
        cls = _CLASSES[kind][0]
        scope = {"namespace": namespace} if issubclass(cls, NamespacedResourceG) else {}
        try:
            found = self._client.list(cls, labels=labels, fields=fields, chunk_size=500, **scope)
            # lists of the API server's own kinds do not say it of each object
            head = {"apiVersion": cls._api_info.resource.api_version, "kind": kind}
            items = [{**head, **each} for each in found]
            return items, found.resourceVersion
        except (httpx2.HTTPError, OSError) as error:
            if is_status(error, 404):
                return [], ""
            raise _failed("list", kind, "", error) from error

    def create(self, document: Document) -> Document:
        return self._write("create", document, lambda obj, _cls: self._client.create(obj))

    def update(self, document: Document) -> Document:
        """Write an object as it is, if nobody has written it since it was read."""
        return self._write("update", document, lambda obj, _cls: self._client.replace(obj))

    def patch_status(self, document: Document, status: Document) -> Document:
        """Merge into the status of an object of the cluster's."""
        name, sub, body = document["metadata"]["name"], _CLASSES[document["kind"]][1], {"status": status}
        return self._write(
            "write status of",
            document,
            lambda _obj, _cls: self._client.patch(sub, name, body, patch_type=PatchType.MERGE),
        )

    def delete(self, document: Document) -> None:
        """Delete an object; one that is gone is no error."""
        metadata = document["metadata"]
        scope = {"namespace": metadata["namespace"]} if metadata.get("namespace") else {}

        def delete(_obj: Any, cls: Any) -> Document:
            try:
                self._client.delete(cls, metadata["name"], **scope)
            except ApiError as error:
                if not is_status(error, 404):
                    raise
            return {}

        self._write("delete", document, delete)

    def watch(self, kind: str, version: str, seconds: int) -> Iterator[str]:
        """Yield the type of each event of a kind, for so long."""
        try:
            events = self._client.watch(_CLASSES[kind][0], resource_version=version or None, server_timeout=seconds)
            for event, _ in events:
                yield event
        except (httpx2.HTTPError, OSError, RuntimeError) as error:  # RuntimeError: the client has been closed
            raise _failed("watch", kind, "", error) from error

    def _write(self, verb: str, document: Document, call: Callable[[Any, Any], Any]) -> Document:
        self._may_write()
        cls = _CLASSES[document["kind"]][0]
        try:
            return dict(call(cls(document), cls))
        except (httpx2.HTTPError, OSError) as error:
            raise _failed(verb, document["kind"], document["metadata"]["name"], error) from error


def open_client() -> lightkube.Client:
    """Return a client with the pod's service account, $KUBECONFIG or ~/.kube/config.

    Raises HostError (OCIGPU-KUBE-5).
    """
    try:
        return lightkube.Client()
    except (ConfigError, OSError, KeyError, ValueError) as error:
        words = f"API server: no configuration: {printable(str(error), 300)}"
        raise HostError(
            "OCIGPU-KUBE-5", words, "In a pod it is the service account; elsewhere set KUBECONFIG."
        ) from error


def is_status(error: BaseException, *codes: int) -> bool:
    """Whether an error is the server's answer with one of these codes."""
    if isinstance(error, ApiError) and error.status.code is not None:
        return error.status.code in codes
    return (
        isinstance(error, httpx2.HTTPStatusError) and error.response is not None and error.response.status_code in codes
    )


def _failed(verb: str, kind: str, name: str, error: Exception) -> HostError:
    words = printable(str(error), 300) or type(error).__name__
    return HostError("OCIGPU-KUBE-5", f"{verb} {kind}{f' {name}' if name else ''}: {words}")
