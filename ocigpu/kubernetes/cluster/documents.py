"""Objects of the API server as plain documents, by lightkube: its typed models would drop fields newer than themselves.

Needs lightkube: it is imported only where a command has made sure of it.
"""

from collections.abc import Callable, Iterator
from typing import Any

from lightkube import Client
from lightkube.core.resource import (
    ApiInfo,
    GlobalResource,
    GlobalSubResource,
    NamespacedResourceG,
    NamespacedSubResource,
    ResourceDef,
)
from lightkube.generic_resource import Generic
from lightkube.types import PatchType

from ocigpu.kubernetes.cluster.client import FAILURES, ask, open_client, refused

Document = dict[str, Any]
_VERBS = ["delete", "get", "global_list", "global_watch", "list", "patch", "post", "put", "watch"]
# group/version, kind, plural, n: in a namespace
_KINDS = """
v1 Namespace namespaces -
v1 Node nodes -
v1 PersistentVolume persistentvolumes -
v1 PersistentVolumeClaim persistentvolumeclaims n
v1 Pod pods n
v1 Secret secrets n
v1 ResourceQuota resourcequotas n
v1 LimitRange limitranges n
v1 ServiceAccount serviceaccounts n
apps/v1 DaemonSet daemonsets n
networking.k8s.io/v1 NetworkPolicy networkpolicies n
cilium.io/v2 CiliumNetworkPolicy ciliumnetworkpolicies n
coordination.k8s.io/v1 Lease leases n
admissionregistration.k8s.io/v1 ValidatingAdmissionPolicy validatingadmissionpolicies -
admissionregistration.k8s.io/v1 ValidatingAdmissionPolicyBinding validatingadmissionpolicybindings -
events.k8s.io/v1 Event events n
resource.k8s.io/v1 ResourceClaim resourceclaims n
resource.k8s.io/v1 ResourceClaimTemplate resourceclaimtemplates n
resource.k8s.io/v1 ResourceSlice resourceslices -
resource.nvidia.com/v1beta1 ComputeDomain computedomains n
resource.nvidia.com/v1beta1 ComputeDomainClique computedomaincliques n
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
        sub: Any = NamespacedSubResource if scope == "n" else GlobalSubResource
        made = type(name, (base, Generic), {"_api_info": info})
        yield name, (made, type(f"{name}Status", (sub, Generic), {"_api_info": status}))


_CLASSES = dict(_classes())
KINDS: dict[str, Any] = {name: cls for name, (cls, _) in _CLASSES.items()}


def scope_of(kind: str, namespace: str = "") -> dict[str, str]:
    """Return the arguments that say where objects of a kind are; ``namespace``: "" for all."""
    return {"namespace": namespace or "*"} if issubclass(KINDS[kind], NamespacedResourceG) else {}


class Documents:
    """Documents of the API server; every method raises HostError (OCIGPU-KUBE-5) with the server's own words.

    ``client``: None opens one; ``may_write``: asked before each change, and raises when this program must not write.
    """

    def __init__(self, client: Client | None = None, may_write: Callable[[], None] = lambda: None) -> None:
        self._client = client or open_client(Client)
        self.may_write = may_write

    def close(self) -> None:
        self._client.close()

    def get(self, kind: str, name: str, namespace: str | None = None) -> Document | None:
        """Return an object, None if it does not exist."""
        cls = KINDS[kind]
        return ask(f"get {kind} {name}", lambda: dict(self._client.get(cls, name, namespace=namespace)), None)

    def list(
        self,
        kind: str,
        namespace: str = "",
        labels: "dict[str, Any] | None" = None,
        fields: "dict[str, Any] | None" = None,
    ) -> "tuple[list[Document], str]":
        """Return objects and the version of their list; ([], "") if the cluster lacks the kind."""
        cls = KINDS[kind]
        # lists of the API server's own kinds do not say it of each object
        head = {"apiVersion": cls._api_info.resource.api_version, "kind": kind}

        def read() -> tuple[list[Document], str]:
            found = self._client.list(cls, labels=labels, fields=fields, chunk_size=500, **scope_of(kind, namespace))
            return [{**head, **each} for each in found], found.resourceVersion

        nothing: tuple[list[Document], str] = ([], "")
        return ask(f"list {kind}", read, nothing)

    def create(self, document: Document) -> Document:
        return self._write("create", document, lambda obj, _cls: self._client.create(obj))

    def update(self, document: Document) -> Document:
        """Write an object, provided that it has not changed since it was read."""
        return self._write("update", document, lambda obj, _cls: self._client.replace(obj))

    def patch_status(self, document: Document, status: Document) -> Document:
        """Merge into the status of an object."""
        return self._patch("write status of", document, _CLASSES[document["kind"]][1], {"status": status})

    def patch(self, document: Document, change: Document) -> Document:
        """Merge a change into an object, which is {} when it does not exist; ``document``: its kind and metadata."""
        return self._patch("patch", document, KINDS[document["kind"]], change, {})

    def _patch(self, verb: str, document: Document, cls: Any, change: Document, *missing: Document) -> Document:
        metadata = document["metadata"]
        scope = {"namespace": metadata["namespace"]} if metadata.get("namespace") else {}
        merge: dict[str, Any] = {"patch_type": PatchType.MERGE, **scope}
        return self._write(
            verb, document, lambda _obj, _cls: self._client.patch(cls, metadata["name"], change, **merge), *missing
        )

    def delete(self, document: Document) -> None:
        """Delete an object; a missing one is not an error."""
        metadata = document["metadata"]
        scope = {"namespace": metadata["namespace"]} if metadata.get("namespace") else {}
        self._write("delete", document, lambda _, cls: self._client.delete(cls, metadata["name"], **scope) or {}, {})

    def watch(
        self, kind: str, version: str, seconds: int, labels: "dict[str, Any] | None" = None, namespace: str = ""
    ) -> "Iterator[tuple[str, Document]]":
        """Yield the type and the object of each event of a kind; the server ends each request after so long."""
        options: dict[str, Any] = {"resource_version": version or None, "server_timeout": seconds, "labels": labels}
        options |= scope_of(kind, namespace)
        try:
            for event, found in self._client.watch(KINDS[kind], **options):
                yield event, dict(found)
        except (*FAILURES, RuntimeError) as error:  # RuntimeError: the client has been closed
            raise refused(f"watch {kind}", error) from error

    def _write(self, verb: str, document: Document, call: Callable[[Any, Any], Any], *missing: Document) -> Document:
        self.may_write()
        cls = KINDS[document["kind"]]
        what = f"{verb} {document['kind']} {document['metadata']['name']}"
        return ask(what, lambda: dict(call(cls(document), cls)), *missing)
