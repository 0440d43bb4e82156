"""An API server of Kubernetes for the tests of controllers: real HTTP in threads, and of the API what they lean on.

Resource versions and conflicts, watches with bookmarks and 410, server-side apply, custom resources with schemas and
CEL rules, admission policies, roles, namespaces that terminate.  What a controller manager would do (default service
accounts, ``status.hard`` of quotas, garbage of owners) is done at once.  Sources: "Kubernetes API Concepts",
"Server-Side Apply", "Custom Resources", "Validating Admission Policy".
"""

import contextlib
import copy
import json
import random
import re
import socket
import threading
import time
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from support.cluster_apply import Managers, json_patch, merge_patch
from support.cluster_rules import Problem, admit, allows, check_custom, default_custom

Object = dict[str, Any]
ADMIN = "system:admin"


class Kind(NamedTuple):
    """``versions``: served ones, each with its schema (None: anything); ``fields``: of field selectors."""

    group: str
    kind: str
    plural: str
    namespaced: bool
    status: bool
    versions: Mapping[str, Any]
    custom: bool = False
    fields: tuple[str, ...] = ()

    def api_version(self, version: str) -> str:
        return f"{self.group}/{version}" if self.group else version

    def describe(self, name: str = "") -> str:
        return f"{self.plural}{'.' if self.group else ''}{self.group}" + (f' "{name}"' if name else "")


# group/version, kind, plural, n: namespaced, s: has a status sub-resource, further fields that select
_KINDS = """
v1 Namespace namespaces - s status.phase
v1 Node nodes - s spec.unschedulable
v1 PersistentVolume persistentvolumes - s
v1 Pod pods n s spec.nodeName status.phase spec.schedulerName spec.serviceAccountName spec.restartPolicy
v1 Secret secrets n - type
v1 ConfigMap configmaps n -
v1 Service services n s
v1 ServiceAccount serviceaccounts n -
v1 ResourceQuota resourcequotas n s
v1 LimitRange limitranges n -
v1 PersistentVolumeClaim persistentvolumeclaims n s
v1 Event events n - involvedObject.name involvedObject.namespace involvedObject.kind involvedObject.uid reason type
events.k8s.io/v1 Event events n - reason
apps/v1 DaemonSet daemonsets n s
apps/v1 Deployment deployments n s
batch/v1 Job jobs n s
discovery.k8s.io/v1 EndpointSlice endpointslices n -
coordination.k8s.io/v1 Lease leases n -
networking.k8s.io/v1 NetworkPolicy networkpolicies n -
policy/v1 PodDisruptionBudget poddisruptionbudgets n s
node.k8s.io/v1 RuntimeClass runtimeclasses - -
scheduling.k8s.io/v1 PriorityClass priorityclasses - -
rbac.authorization.k8s.io/v1 ClusterRole clusterroles - -
rbac.authorization.k8s.io/v1 ClusterRoleBinding clusterrolebindings - -
rbac.authorization.k8s.io/v1 Role roles n -
rbac.authorization.k8s.io/v1 RoleBinding rolebindings n -
admissionregistration.k8s.io/v1 ValidatingAdmissionPolicy validatingadmissionpolicies - s
admissionregistration.k8s.io/v1 ValidatingAdmissionPolicyBinding validatingadmissionpolicybindings - -
apiextensions.k8s.io/v1 CustomResourceDefinition customresourcedefinitions - s
resource.k8s.io/v1 DeviceClass deviceclasses - -
resource.k8s.io/v1 ResourceClaim resourceclaims n s
resource.k8s.io/v1 ResourceClaimTemplate resourceclaimtemplates n -
resource.k8s.io/v1 ResourceSlice resourceslices - - spec.nodeName spec.driver
"""


def _kinds() -> Iterator[Kind]:
    for line in _KINDS.strip().splitlines():
        version, kind, plural, scope, status, *fields = line.split()
        group, _, version = version.rpartition("/")
        yield Kind(group, kind, plural, scope == "n", status == "s", {version: None}, fields=tuple(fields))


def make_kind(group: str, kind: str, plural: str, version: str = "v1alpha1", namespaced: bool = False) -> Object:
    """Return a CustomResourceDefinition, with a status, of objects of any content."""
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    served = {"name": version, "served": True, "storage": True, "subresources": {"status": {}}, "schema": schema}
    names = {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"}
    scope = "Namespaced" if namespaced else "Cluster"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "scope": scope, "names": names, "versions": [served]},
    }


class User(NamedTuple):
    name: str
    groups: tuple[str, ...] = ()
    extra: Mapping[str, list[str]] = {}


_CONTROLLER = User("system:serviceaccount:kube-system:namespace-controller")


class Request(NamedTuple):
    """A request as it is served; ``query`` with one value for each name."""

    user: User
    method: str
    kind: Kind
    version: str
    namespace: str
    name: str
    sub: str
    query: dict[str, str]
    content: str
    body: Any

    def verb(self) -> str:
        if self.method == "GET":
            return "watch" if self.query.get("watch") in ("true", "1") else "get" if self.name else "list"
        many = "deletecollection" if not self.name else "delete"
        return {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": many}[self.method]


class Event(NamedTuple):
    """``before``: the object as it was, for selectors."""

    version: int
    type: str
    key: str
    object: Object
    before: Object | None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, _request: Any, _address: Any) -> None:
        """Clients go away."""


class Cluster:
    """Use it as a context manager.  ``requests``: (method, path) of each request; ``used``: what rights it needed."""

    def __init__(self, bookmark_seconds: float = 0.5) -> None:
        self.requests: list[tuple[str, str]] = []
        self.used: set[tuple[str, str, str, str]] = set()
        """(user, verb, group, resource or resource/sub-resource)"""
        self.logs: dict[tuple[str, str], list[str]] = {}
        """Lines by (namespace, pod)."""
        self._kinds = {(kind.group, kind.plural): kind for kind in _kinds()}
        self._objects: dict[str, dict[tuple[str, str], Object]] = {}
        self._managers: dict[str, Managers] = {}
        self._events: list[Event] = []
        self._version = 100
        self._oldest = 0
        self._changed = threading.Condition(threading.RLock())
        self.slow: tuple[str, threading.Event] | None = None
        self.stalled = 0
        """Requests that were answered slowly since :meth:`stall`."""
        self._failures: list[list[Any]] = []
        self._epoch = 0
        self._bookmark_seconds = bookmark_seconds
        self._users = {"admin": User(ADMIN, ("system:masters", "system:authenticated"))}
        self._random = random.Random(17)
        self._clients: list[Any] = []
        self._connections: set[socket.socket] = set()
        for name in ("default", "kube-system"):
            self.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    def __enter__(self) -> Self:
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.close()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        with self._changed:
            self._epoch = -1
            self._changed.notify_all()
            for connection in list(self._connections):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def add_token(self, user: str, *groups: str) -> str:
        """Return a token of a user, who has the rights that roles in the cluster give."""
        if user.startswith("system:serviceaccount:"):
            groups = (*groups, "system:serviceaccounts", f"system:serviceaccounts:{user.split(':')[2]}")
        token = f"token-of-{user}"
        self._users[token] = User(user, (*groups, "system:authenticated"))
        return token

    def token(self, user: str = ADMIN, *groups: str, node: str | None = None) -> str:
        """Return a token of a user; with ``node`` that of a pod there."""
        if user == ADMIN:
            return "admin"
        token = self.add_token(user, *groups)
        if node is not None:
            known, token = self._users[token], f"{token}@{node}"
            self._users[token] = known._replace(extra={"authentication.kubernetes.io/node-name": [node]})
        return token

    def kubeconfig(self, user: str = ADMIN, *groups: str, node: str | None = None) -> Object:
        """Return the document by which a user finds the cluster; the default one may do everything."""
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "users": [{"name": "test", "user": {"token": self.token(user, *groups, node=node)}}],
            "current-context": "test",
        }

    def write_kubeconfig(self, path: Path, user: str = ADMIN) -> Path:
        """Write that document; returns the path."""
        path.write_text(json.dumps(self.kubeconfig(user)))
        return path

    def client(self, user: str = ADMIN, *groups: str, node: str | None = None, **options: Any) -> Any:
        """Return a client of lightkube, closed with the cluster; the default user may do everything."""
        import lightkube

        config = lightkube.KubeConfig.from_dict(self.kubeconfig(user, *groups, node=node))
        client = lightkube.Client(config=config.get(), trust_env=False, **options)
        self._clients.append(client._client)
        return client

    # What tests do themselves; each raises Problem.

    def create(self, document: Object, user: str = ADMIN) -> Object:
        return self.do("POST", document, user)

    def update(self, document: Object, sub: str = "", user: str = ADMIN) -> Object:
        return self.do("PUT", document, user, sub, named=True)

    def patch(self, kind: str, name: str, patch: Object, namespace: str | None = None, sub: str = "") -> Object:
        """Merge patch; ``sub="status"`` for the status."""
        head = {"kind": kind, "metadata": {"name": name, "namespace": namespace or ""}}
        return self.do("PATCH", head, ADMIN, sub, named=True, body=patch)

    def delete(self, kind: str, name: str, namespace: str | None = None, **options: Any) -> None:
        head = {"kind": kind, "metadata": {"name": name, "namespace": namespace or ""}}
        self.do("DELETE", head, ADMIN, named=True, body=options)

    def bind(self, pod: str, namespace: str, node: str) -> None:
        """Do what the scheduler does."""
        head = {"kind": "Pod", "metadata": {"name": pod, "namespace": namespace}}
        self.do("POST", head, ADMIN, "binding", named=True, body={"target": {"kind": "Node", "name": node}})

    def get(self, kind: str, name: str, namespace: str | None = None) -> Object:
        return self.do("GET", {"kind": kind, "metadata": {"name": name, "namespace": namespace or ""}}, named=True)

    def exists(self, kind: str, name: str, namespace: str | None = None) -> bool:
        return (namespace or "", name) in self._store(self._find(kind))

    def objects(self, kind: str, api_version: str | None = None) -> list[Object]:
        with self._changed:
            return copy.deepcopy([found for _, found in sorted(self._store(self._find(kind, api_version)).items())])

    def history(self) -> list["Event"]:
        """Return what has happened to objects, as watches tell it."""
        with self._changed:
            return list(self._events)

    def apply_manifests(self, path: Path | str) -> None:
        """Create or replace the objects of a file or of the files of a directory, as an administrator."""
        path = Path(path)
        for file in sorted(path.glob("*.yaml")) if path.is_dir() else [path]:
            for document in filter(None, yaml.safe_load_all(file.read_text())):
                self.apply(document)

    def apply(self, document: Object, manager: str = "kubectl") -> Object:
        """Server-side apply, with force."""
        query = {"fieldManager": manager, "force": "true"}
        return self.do("PATCH", document, named=True, query=query, content="application/apply-patch+yaml")

    def fail(self, times: int, status: int, method: str | None = None, path: str | None = None) -> None:
        """Answer the next requests with this status; 0: the connection is closed.  ``path``: a regular expression."""
        self._failures.append([times, status, method, path])

    def recover(self) -> None:
        """Fail no more."""
        self._failures.clear()

    @contextlib.contextmanager
    def stall(self, path: str) -> Iterator[None]:
        """Answer requests for paths with this in them so slowly that no time limit is reached, until the block ends."""
        ended = threading.Event()
        self.slow, self.stalled = (path, ended), 0
        try:
            yield
        finally:
            self.slow = None
            ended.set()

    def drop_watches(self) -> None:
        """Break the connection of every watch."""
        with self._changed:
            self._epoch += 1
            self._changed.notify_all()

    def expire(self, resource_version: int | str | None = None) -> None:
        """Forget the history up to a version (None: all of it): watches from there on answer 410."""
        with self._changed:
            self._oldest = int(resource_version or self._version)
            self._events = [event for event in self._events if event.version > self._oldest]

    def do(
        self,
        method: str,
        document: Object,
        user: str = ADMIN,
        sub: str = "",
        named: bool = False,
        body: Any = None,
        query: dict[str, str] | None = None,
        content: str = "application/merge-patch+json",
    ) -> Object:
        """Send a request about an object, as a user."""
        kind = self._find(document["kind"], document.get("apiVersion"))
        metadata = document["metadata"]
        version = document.get("apiVersion", "").rpartition("/")[2] or next(reversed(kind.versions))
        namespace = (metadata.get("namespace") or ("default" if kind.namespaced else "")) if kind.namespaced else ""
        who = next((known for known in self._users.values() if known.name == user), User(user))
        name = metadata["name"] if named else ""
        body = document if body is None else body
        body = copy.deepcopy(body)
        return self.serve(Request(who, method, kind, version, namespace, name, sub, query or {}, content, body))[1]

    # Serving

    def _find(self, name: str, api_version: str | None = None) -> Kind:
        group = None if api_version is None else api_version.rpartition("/")[0]
        for kind in self._kinds.values():
            if name in (kind.kind, kind.plural) and group in (None, kind.group):
                return kind
        raise Problem(404, "NotFound", f"no kind {name} in {api_version}")

    def _store(self, kind: Kind) -> dict[tuple[str, str], Object]:
        return self._objects.setdefault(f"{kind.group}/{kind.plural}", {})

    def find_failure(self, method: str, path: str) -> int | None:
        with self._changed:
            for failure in self._failures:
                if failure[0] > 0 and failure[2] in (None, method) and re.search(failure[3] or "", path):
                    failure[0] -= 1
                    return int(failure[1])
        return None

    def route(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Request | Object:
        """Return the request, or the answer of what is no object (discovery, versions); raises Problem."""
        parts = urlsplit(target)
        self.requests.append((method, parts.path))
        user = self._users.get(headers.get("Authorization", "").removeprefix("Bearer "))
        if user is None:
            raise Problem(401, "Unauthorized", "Unauthorized")
        words = [unquote(word) for word in parts.path.strip("/").split("/")]
        if words[0] not in ("api", "apis"):
            known = {"version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}, "readyz": {}, "livez": {}}
            if words[0] in known:
                return known[words[0]]
            raise _no_path()
        group, rest = ("", words[1:]) if words[0] == "api" else (words[1] if len(words) > 1 else "", words[2:])
        if len(rest) < 2:
            return self._discover(words[0], group, rest)
        version, *rest = rest
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
            namespace, rest = rest[1], rest[2:]
        data = json.loads(body) if body and headers.get("Content-Type") != "application/apply-patch+yaml" else None
        data = yaml.safe_load(body) if body and data is None else data
        if group == "authentication.k8s.io" and rest[0] == "tokenreviews":
            return self._review_token(data)
        kind = self._kinds.get((group, rest[0]))
        if kind is None or version not in kind.versions or (namespace and not kind.namespaced):
            raise _no_path()
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        name, sub = (*rest[1:], "", "")[:2]
        request = Request(
            user, method, kind, version, namespace, name, sub, query, headers.get("Content-Type", ""), data
        )
        resource = f"{kind.plural}/{sub}" if sub else kind.plural
        self.used.add((user.name, request.verb(), group, resource))
        if "system:masters" not in user.groups:
            with self._changed:
                roles = {name: self._store(self._find(name)) for name in ROLES}
                if not allows(roles, user, request.verb(), group, resource, namespace, name):
                    where = f' in the namespace "{namespace}"' if namespace else " at the cluster scope"
                    what = f'User "{user.name}" cannot {request.verb()} resource "{resource}" in API group "{group}"'
                    raise Problem(403, "Forbidden", f"{kind.describe(name)} is forbidden: {what}{where}")
        return request

    def _discover(self, root: str, group: str, rest: list[str]) -> Object:
        if root == "apis" and not group:
            groups: dict[str, set[str]] = {}
            for kind in self._kinds.values():
                groups.setdefault(kind.group, set()).update(kind.versions)
            listed = [
                {"name": name, "versions": [{"groupVersion": f"{name}/{one}", "version": one} for one in sorted(found)]}
                for name, found in sorted(groups.items())
                if name
            ]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
        version = rest[0] if rest else ""
        kinds = [kind for kind in self._kinds.values() if kind.group == group and version in kind.versions]
        if not kinds:
            raise _no_path()
        verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
        listed = []
        for kind in kinds:
            one = {"name": kind.plural, "singularName": kind.kind.lower(), "namespaced": kind.namespaced}
            listed.append({**one, "kind": kind.kind, "verbs": verbs})
            if kind.status:
                listed.append(
                    {**one, "name": f"{kind.plural}/status", "kind": kind.kind, "verbs": ["get", "patch", "update"]}
                )
        named = f"{group}/{version}".strip("/")
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": named, "resources": listed}

    def _review_token(self, review: Object) -> Object:
        user = self._users.get(review["spec"].get("token", ""))
        found = {"username": user.name, "groups": list(user.groups), "uid": "", "extra": {}} if user else {}
        audiences = review["spec"].get("audiences", []) if user else []
        return {**review, "status": {"authenticated": user is not None, "user": found, "audiences": audiences}}

    def serve(self, request: Request) -> tuple[int, Object]:
        """Carry out a request, as whoever asks; raises Problem."""
        with self._changed:
            verb, kind = request.verb(), request.kind
            if request.sub not in (
                "",
                "status" if kind.status else "",
                *(("ephemeralcontainers", "eviction", "binding") if kind.kind == "Pod" else ()),
            ):
                raise _no_path()
            if verb == "list":
                return 200, self._list(request)
            if verb == "deletecollection":
                for found in self._selected(request):
                    name, namespace = found["metadata"]["name"], found["metadata"].get("namespace", "")
                    self._delete(request._replace(name=name, namespace=namespace), found)
                return 200, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
            if verb == "create" and not request.sub:
                return 201, self._create(request)
            found = self._store(kind).get((request.namespace, request.name))
            if verb == "patch" and request.content == "application/apply-patch+yaml":
                return (200 if found else 201), self._apply(request, found)
            if request.sub in ("binding", "eviction"):  # before the pod is looked up
                self._admit(request, "CREATE", request.body, None)
            if found is None:
                raise Problem(404, "NotFound", f"{kind.describe(request.name)} not found", kind, request.name)
            if verb == "get":
                return 200, self._shown(request, found)
            if request.sub == "eviction":  # no policy is asked about the deletion that follows (EvictionREST)
                options = (request.body or {}).get("deleteOptions")
                self._delete(request._replace(method="DELETE", sub="", body=options), found, asked=True)
                return 201, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
            if request.sub == "binding":
                bound = copy.deepcopy(found)
                bound["spec"]["nodeName"] = request.body["target"]["name"]
                for field in ("labels", "annotations"):  # BindingREST adds what the binding has
                    more = (request.body.get("metadata") or {}).get(field)
                    bound["metadata"].update({field: {**bound["metadata"].get(field, {}), **more}} if more else {})
                return 201, self._written(request, "MODIFIED", bound, copy.deepcopy(found))
            if verb == "delete":
                return 200, self._delete(request, found)
            return 200, self._change(request, found)

    def _shown(self, request: Request, found: Object) -> Object:
        api_version = request.kind.api_version(request.version)
        return copy.deepcopy({**found, "apiVersion": api_version, "kind": request.kind.kind})

    def _selected(self, request: Request) -> list[Object]:
        matches = _selector(request)
        found = self._store(request.kind)
        return [one for (space, _), one in sorted(found.items()) if request.namespace in ("", space) and matches(one)]

    def _list(self, request: Request) -> Object:
        found = self._selected(request)
        metadata = {"resourceVersion": str(self._version)}
        limit = int(request.query.get("limit") or 0)
        start, _, version = request.query.get("continue", "0").partition("@")
        if version and int(version) < self._oldest:
            raise Problem(410, "Expired", "The provided continue parameter is too old")
        if limit and len(found) > int(start) + limit:
            metadata["continue"] = f"{int(start) + limit}@{self._version}"
            metadata["remainingItemCount"] = len(found) - int(start) - limit
        items = [self._shown(request, one) for one in found[int(start) :][: limit or None]]
        if not request.kind.custom:
            items = [{key: value for key, value in one.items() if key not in ("apiVersion", "kind")} for one in items]
        kind, version = f"{request.kind.kind}List", request.kind.api_version(request.version)
        return {"kind": kind, "apiVersion": version, "metadata": metadata, "items": items}

    def _create(self, request: Request) -> Object:
        kind, document = request.kind, request.body
        metadata = document.setdefault("metadata", {})
        if not metadata.get("name") and metadata.get("generateName"):
            letters = "".join(self._random.choice("bcdfghjklmnpqrstvwxz2456789") for _ in range(5))
            metadata["name"] = metadata["generateName"] + letters
        name = metadata.get("name") or ""
        if metadata.get("resourceVersion"):
            raise Problem(400, "BadRequest", "resourceVersion should not be set on objects to be created")
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9.:]{0,251}[a-z0-9])?", name) and "rbac" not in kind.group:
            raise Problem(422, "Invalid", f'{kind.kind} "{name}" is invalid: metadata.name: Invalid value', kind, name)
        if kind.kind == "Namespace" and len(name) > 63:
            raise Problem(422, "Invalid", f'{kind.kind} "{name}" is invalid: metadata.name: Too long', kind, name)
        if request.namespace and metadata.get("namespace", request.namespace) != request.namespace:
            raise Problem(400, "BadRequest", "the namespace of the provided object does not match the request")
        if kind.namespaced:
            metadata["namespace"] = request.namespace
            space = self._store(self._find("Namespace")).get(("", request.namespace))
            if space is None:
                raise Problem(404, "NotFound", f'namespaces "{request.namespace}" not found')
            if space["metadata"].get("deletionTimestamp"):
                because = (
                    f"unable to create new content in namespace {request.namespace} because it is being terminated"
                )
                raise Problem(403, "Forbidden", f"{kind.describe(name)} is forbidden: {because}", kind, name)
        else:
            metadata.pop("namespace", None)
        if (request.namespace, name) in self._store(kind):
            raise Problem(409, "AlreadyExists", f"{kind.describe(name)} already exists", kind, name)
        if kind.status and request.user.name != ADMIN:
            document.pop("status", None)
        if kind.status or kind.custom:
            metadata["generation"] = 1
        metadata.update(uid=str(uuid.UUID(int=self._random.getrandbits(128), version=4)), creationTimestamp=_now())
        for unwanted in ("deletionTimestamp", "managedFields", "selfLink"):
            metadata.pop(unwanted, None)
        self._prepare(kind, document)
        document = self._check(request._replace(name=name), document, None)
        manager = request.query.get("fieldManager") or "unknown"
        self._managers.setdefault(metadata["uid"], Managers(kind.versions.get(request.version))).update(
            manager, "Update", request.sub, {}, document
        )
        return self._written(request._replace(name=name), "ADDED", document, None)

    def _prepare(self, kind: Kind, document: Object) -> None:
        """Do what an API server and its controllers do to new objects of its own kinds."""
        metadata = document["metadata"]
        if kind.kind == "Namespace":
            metadata.setdefault("labels", {})["kubernetes.io/metadata.name"] = metadata["name"]
            document["spec"] = {"finalizers": ["kubernetes"]}
            document["status"] = {"phase": "Active"}
        elif kind.kind == "Pod":
            document.setdefault("status", {}).setdefault("phase", "Pending")
            document.setdefault("spec", {}).setdefault("restartPolicy", "Always")
            document["spec"].setdefault("serviceAccountName", "default")
            document["spec"].setdefault("schedulerName", "default-scheduler")
            document["spec"].setdefault("terminationGracePeriodSeconds", 30)
            self._admit_pod(metadata, document["spec"])
        elif kind.kind == "ResourceQuota":
            hard = document.get("spec", {}).get("hard", {})
            document["status"] = {"hard": dict(hard), "used": dict.fromkeys(hard, "0")}
        elif kind.kind in ("ResourceClaim", "ResourceClaimTemplate"):
            # a list that is never left out: null where there is none
            spec = document.setdefault("spec", {})
            claim = spec.setdefault("spec", {}) if kind.kind == "ResourceClaimTemplate" else spec
            claim.setdefault("devices", {}).setdefault("requests", None)
        elif kind.kind == "CustomResourceDefinition":
            self._define(document)

    def _admit_pod(self, metadata: Object, spec: Object) -> None:
        """Do what the admission plugin ServiceAccount does."""
        refused, space = f'pods "{metadata["name"]}" is forbidden', metadata["namespace"]
        account = self._store(self._find("ServiceAccount")).get((space, spec["serviceAccountName"]))
        if account is None:
            words = f"error looking up service account {space}/{spec['serviceAccountName']}: it is not found"
            raise Problem(403, "Forbidden", f"{refused}: {words}")
        if spec.get("automountServiceAccountToken", account.get("automountServiceAccountToken", True)):
            token = {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}}
            volume = {"name": "kube-api-access-x7x7x", "projected": {"sources": [token]}}
            spec["volumes"] = [*spec.get("volumes", []), volume]

    def _define(self, crd: Object) -> None:
        spec = crd["spec"]
        if not spec.get("versions") or not all(one.get("schema") for one in spec["versions"]):
            raise Problem(
                422, "Invalid", f'CustomResourceDefinition "{crd["metadata"]["name"]}": spec.versions: Required'
            )
        if crd["metadata"]["name"] != f"{spec['names']['plural']}.{spec['group']}":
            raise Problem(422, "Invalid", 'metadata.name: must be spec.names.plural+"."+spec.group')
        served = {one["name"]: one["schema"]["openAPIV3Schema"] for one in spec["versions"] if one["served"]}
        status = any("status" in one.get("subresources", {}) for one in spec["versions"])
        fields = [one["jsonPath"].strip(".") for item in spec["versions"] for one in item.get("selectableFields", [])]
        names = spec["names"]
        kind = Kind(spec["group"], names["kind"], names["plural"], spec["scope"] == "Namespaced", status, served, True)
        self._kinds[(spec["group"], names["plural"])] = kind._replace(fields=tuple(fields))
        conditions = [
            {"type": kind, "status": "True", "reason": kind, "message": "", "lastTransitionTime": _now()}
            for kind in ("NamesAccepted", "Established")
        ]
        crd["status"] = {
            "acceptedNames": names,
            "storedVersions": [spec["versions"][0]["name"]],
            "conditions": conditions,
        }

    def _check(self, request: Request, document: Object, old: Object | None) -> Object:
        """Return the document as it may be written: schema and policies; raises Problem."""
        kind = request.kind
        document["apiVersion"], document["kind"] = kind.api_version(request.version), kind.kind
        schema = kind.versions[request.version]
        if schema is not None:
            document = default_custom(document, schema)
        self._admit(request, "CREATE" if old is None else "UPDATE", document, old)
        if schema is not None:
            check_custom(kind, document, old, schema)
        return document

    def _written(self, request: Request, event: str, document: Object, old: Object | None) -> Object:
        kind, metadata = request.kind, document["metadata"]
        if request.query.get("dryRun"):
            return self._shown(request, document)
        managers = self._managers.get(metadata["uid"])
        if managers is not None:
            metadata["managedFields"] = managers.shown(document["apiVersion"])
        self._version += 1
        metadata["resourceVersion"] = str(self._version)
        place = (metadata.get("namespace", ""), metadata["name"])
        if event == "DELETED":
            self._store(kind).pop(place, None)
        else:
            self._store(kind)[place] = document
        self._events.append(Event(self._version, event, f"{kind.group}/{kind.plural}", copy.deepcopy(document), old))
        self._changed.notify_all()
        if kind.kind == "Namespace" and event == "ADDED":
            head = {
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": {"name": "default", "namespace": place[1]},
            }
            self.create(head)
        if event == "DELETED":
            self._collect(document)
        return self._shown(request, document)

    def _collect(self, gone: Object) -> None:
        """Delete what the object owned, and a terminating namespace that has become empty."""
        for kind in list(self._kinds.values()):
            for found in list(self._store(kind).values()):
                owners = found["metadata"].get("ownerReferences", [])
                if owners and all(owner.get("uid") == gone["metadata"]["uid"] for owner in owners):
                    self._remove(kind, found)
        space = self._store(self._find("Namespace")).get(("", gone["metadata"].get("namespace", "")))
        if space is not None and space["metadata"].get("deletionTimestamp"):
            self._terminate(space)

    def _remove(self, kind: Kind, found: Object) -> None:
        metadata = found["metadata"]
        space = metadata.get("namespace", "")
        version = next(iter(kind.versions))
        self._delete(Request(_CONTROLLER, "DELETE", kind, version, space, metadata["name"], "", {}, "", {}), found)

    def _terminate(self, space: Object) -> None:
        """Delete what is in a namespace, and the namespace when nothing is left."""
        name, left = space["metadata"]["name"], 0
        for kind in list(self._kinds.values()):
            for found in [one for place, one in self._store(kind).items() if place[0] == name and kind.namespaced]:
                if not found["metadata"].get("deletionTimestamp"):
                    self._remove(kind, found)
                left += (name, found["metadata"]["name"]) in self._store(kind)
        kind = self._find("Namespace")
        space["status"]["conditions"] = list(self._what_is_left(name))
        if not left and ("", name) in self._store(kind) and space["spec"]["finalizers"] == ["kubernetes"]:
            space["spec"]["finalizers"] = []
            if not space["metadata"].get("finalizers"):
                request = Request(_CONTROLLER, "DELETE", kind, "v1", "", name, "", {}, "", {})
                self._written(request, "DELETED", space, space)

    def _what_is_left(self, name: str) -> Iterator[Object]:
        """Yield the conditions of a namespace that is being deleted (namespace controller, status_condition.go)."""
        remaining: dict[str, int] = {}
        finalizers: dict[str, int] = {}
        for kind in self._kinds.values():
            for (space, _), one in self._store(kind).items():
                if kind.namespaced and space == name:
                    resource = f"{kind.plural}.{kind.group}"
                    remaining[resource] = remaining.get(resource, 0) + 1
                    for each in one["metadata"].get("finalizers", []):
                        finalizers[each] = finalizers.get(each, 0) + 1
        words = ", ".join(f"{resource} has {count} resource instances" for resource, count in remaining.items())
        yield _condition(
            "NamespaceContentRemaining", "SomeResourcesRemain", f"Some resources are remaining: {words}", words
        )
        words = ", ".join(f"{each} in {count} resource instances" for each, count in finalizers.items())
        said = f"Some content in the namespace has finalizers remaining: {words}"
        yield _condition("NamespaceFinalizersRemaining", "SomeFinalizersRemain", said, words)

    def _admit(self, request: Request, operation: str, document: Object | None, old: Object | None) -> None:
        spaces = self._store(self._find("Namespace"))
        kinds = {*POLICIES, *self._param_kinds()}
        store = {name: self._store(self._find(name)) for name in kinds}
        space = spaces.get(("", request.namespace))
        if request.kind.kind == "Namespace" and operation != "DELETE":
            space = document
        admit(store, request, operation, document, old, space)

    def _param_kinds(self) -> Iterator[str]:
        for policy in self._store(self._find("ValidatingAdmissionPolicy")).values():
            if policy["spec"].get("paramKind"):
                yield policy["spec"]["paramKind"]["kind"]

    def _delete(self, request: Request, found: Object, asked: bool = False) -> Object:
        kind, options = request.kind, request.body or {}
        metadata = found["metadata"]
        for field, wanted in (options.get("preconditions") or {}).items():
            if metadata[field] != wanted:
                raise _conflict(kind, request.name, f"Precondition failed: {field} in precondition: {wanted}")
        if not asked:
            self._admit(request, "DELETE", None, found)
        grace = options.get("gracePeriodSeconds", request.query.get("gracePeriodSeconds"))
        if kind.kind == "Pod" and grace is None and found["spec"].get("nodeName"):
            ended = found["status"].get("phase") in ("Succeeded", "Failed")
            grace = 0 if ended else found["spec"].get("terminationGracePeriodSeconds", 30)
        grace = int(grace or 0)
        stays = metadata.get("finalizers") or (kind.kind == "Namespace" and found["spec"]["finalizers"])
        old = copy.deepcopy(found)
        if stays or (kind.kind == "Pod" and grace):
            if not metadata.get("deletionTimestamp") or metadata.get("deletionGracePeriodSeconds") != grace:
                metadata.update(deletionTimestamp=_now(), deletionGracePeriodSeconds=grace)
                if kind.kind == "Namespace":
                    found["status"]["phase"] = "Terminating"
                self._written(request, "MODIFIED", found, old)
                if kind.kind == "Namespace":
                    self._terminate(found)
            return self._shown(request, found)
        if kind.kind == "CustomResourceDefinition":
            spec = found["spec"]
            gone = self._kinds.pop((spec["group"], spec["names"]["plural"]), None)
            if gone is not None:
                self._objects.pop(f"{gone.group}/{gone.plural}", None)
        return self._written(request, "DELETED", found, old)

    def _change(self, request: Request, found: Object) -> Object:
        kind = request.kind
        if request.method == "PUT":
            new = request.body
            new.setdefault("metadata", {})
            if new["metadata"].get("name") != request.name:
                raise Problem(400, "BadRequest", "the name of the object does not match the name on the URL")
            if kind.custom and not new["metadata"].get("resourceVersion"):
                raise Problem(
                    422, "Invalid", "metadata.resourceVersion: must be specified for an update", kind, request.name
                )
        elif request.content == "application/json-patch+json":
            new = json_patch(copy.deepcopy(found), request.body)
        elif request.content in ("application/merge-patch+json", "application/strategic-merge-patch+json"):
            if kind.custom and "strategic" in request.content:
                raise Problem(415, "UnsupportedMediaType", "the body of the request was in an unknown format")
            new = merge_patch(copy.deepcopy(found), request.body, keyed="strategic" in request.content)
        else:
            raise Problem(415, "UnsupportedMediaType", "the body of the request was in an unknown format")
        manager = request.query.get("fieldManager") or "unknown"
        return self._replace(
            request,
            found,
            new,
            lambda managers, document: managers.update(manager, "Update", request.sub, found, document),
        )

    def _apply(self, request: Request, found: Object | None) -> Object:
        manager, force = request.query.get("fieldManager"), request.query.get("force") == "true"
        if not manager:
            raise Problem(400, "BadRequest", "fieldManager is required for apply patch")
        asked = request.body
        if asked.get("metadata", {}).get("managedFields"):
            raise Problem(400, "BadRequest", "metadata.managedFields must be nil")
        if found is None:
            if request.sub:
                raise Problem(
                    404, "NotFound", f"{request.kind.describe(request.name)} not found", request.kind, request.name
                )
            asked["metadata"]["name"] = request.name
            created = self._create(request._replace(body=copy.deepcopy(asked), name=""))
            if not request.query.get("dryRun"):
                managers = self._managers[created["metadata"]["uid"]]
                managers.owners.clear()
                managers.apply({}, asked, manager, request.sub, force)
                stored = self._store(request.kind)[(request.namespace, request.name)]
                stored["metadata"]["managedFields"] = managers.shown(stored["apiVersion"])
                return self._shown(request, stored)
            return created
        managers = copy.deepcopy(self._managers[found["metadata"]["uid"]])
        new = managers.apply(copy.deepcopy(found), asked, manager, request.sub, force)
        version = asked.get("metadata", {}).get("resourceVersion")
        if version:
            new["metadata"]["resourceVersion"] = version

        def keep(_: Managers, _document: Object) -> None:
            self._managers[found["metadata"]["uid"]] = managers

        return self._replace(request, found, new, keep)

    def _replace(self, request: Request, found: Object, new: Object, own: Callable[[Managers, Object], None]) -> Object:
        """Write a changed object: what the sub-resource lets be changed, if it does not change what another wrote."""
        kind, metadata = request.kind, found["metadata"]
        version = new["metadata"].get("resourceVersion")
        if version and version != metadata["resourceVersion"]:
            words = "the object has been modified; please apply your changes to the latest version and try again"
            raise _conflict(kind, request.name, words)
        if new["metadata"].get("uid", metadata["uid"]) != metadata["uid"]:
            raise _conflict(kind, request.name, "Precondition failed: UID in precondition")
        if request.sub == "status" and kind.custom:
            new = {**copy.deepcopy(found), "status": new.get("status", {})}
        elif request.sub == "status":  # strategies of the server's own kinds keep the spec, and let metadata be written
            kept = {key: value for key, value in found.items() if key not in ("metadata", "status")}
            new = {**copy.deepcopy(kept), "metadata": new["metadata"], "status": new.get("status", {})}
        elif kind.status and request.user.name != ADMIN:
            new = {**new, **({"status": copy.deepcopy(found["status"])} if "status" in found else {})}
            if "status" not in found:
                new.pop("status", None)
        for field in (
            "uid",
            "creationTimestamp",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
            "generation",
            "namespace",
        ):
            new["metadata"].pop(field, None)
            if field in metadata:
                new["metadata"][field] = metadata[field]
        new["metadata"]["resourceVersion"] = metadata["resourceVersion"]
        new["metadata"]["managedFields"] = metadata.get("managedFields", [])
        if kind.kind == "Namespace":
            new["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = request.name
            new["spec"] = copy.deepcopy(found["spec"])
        if kind.kind == "Pod" and new["spec"].get("nodeName") != found["spec"].get("nodeName"):
            words = "spec: Forbidden: pod updates may not change fields other than a few"
            raise Problem(422, "Invalid", f'Pod "{request.name}" is invalid: {words}', kind, request.name)
        if kind.kind == "ResourceQuota" and not request.sub:
            hard = new.get("spec", {}).get("hard", {})
            new["status"] = {
                "hard": dict(hard),
                "used": {**dict.fromkeys(hard, "0"), **found["status"].get("used", {})},
            }
        if kind.kind == "CustomResourceDefinition":
            self._define(new)
        new = self._check(request, new, found)
        own(self._managers[metadata["uid"]], new)
        if not request.query.get("dryRun"):
            shown = self._managers[metadata["uid"]].shown(new["apiVersion"])
            if _without_times(new) == _without_times(found) and [{**one, "time": 0} for one in shown] == [
                {**one, "time": 0} for one in metadata.get("managedFields", [])
            ]:
                return self._shown(request, found)
        if (kind.status or kind.custom) and _desired(new) != _desired(found):
            new["metadata"]["generation"] = metadata.get("generation", 1) + 1
        metadata = new["metadata"]
        done = metadata.get("deletionTimestamp") and not metadata.get("finalizers")
        if done and kind.kind == "Namespace":
            done = not new["spec"]["finalizers"]
        if done and kind.kind == "Pod":
            done = not metadata.get("deletionGracePeriodSeconds")
        return self._written(request, "DELETED" if done else "MODIFIED", new, copy.deepcopy(found))

    def watch(self, request: Request) -> Iterator[Object | None]:
        """Yield the events of a watch, and None when the connection is to be broken."""
        query, key = request.query, f"{request.kind.group}/{request.kind.plural}"
        matches = _selector(request)
        deadline = time.monotonic() + float(query.get("timeoutSeconds") or 3600)
        bookmarks = query.get("allowWatchBookmarks") in ("true", "1")
        with self._changed:
            epoch = self._epoch
            asked = query.get("resourceVersion") or "0"
            position = int(asked)
            started: list[Object] = []
            if asked == "0":
                started = [{"type": "ADDED", "object": self._shown(request, one)} for one in self._selected(request)]
                position = self._version
        yield from started
        while True:
            with self._changed:
                if epoch != self._epoch:
                    yield None
                    return
                if position < self._oldest:
                    words = f"too old resource version: {position} ({self._oldest})"
                    yield {"type": "ERROR", "object": Problem(410, "Expired", words).status()}
                    return
                news = self._events_after(position)
                if not news:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return
                    self._changed.wait(min(left, self._bookmark_seconds) if bookmarks else left)
                    news = self._events_after(position)
            if not news and bookmarks and epoch == self._epoch:
                metadata = {"resourceVersion": str(max(position, self._version)), "creationTimestamp": None}
                head = {"apiVersion": request.kind.api_version(request.version), "kind": request.kind.kind}
                yield {"type": "BOOKMARK", "object": {**head, "metadata": metadata}}
            for event in news:
                position = event.version
                space = event.object["metadata"].get("namespace", "")
                if event.key != key or request.namespace not in ("", space):
                    continue
                was, is_now = event.before is not None and matches(event.before), matches(event.object)
                kind = (
                    event.type
                    if event.type == "DELETED"
                    else "MODIFIED"
                    if was and is_now
                    else "ADDED"
                    if is_now
                    else "DELETED"
                )
                if was or is_now:
                    yield {"type": kind, "object": self._shown(request, event.object)}

    def _events_after(self, version: int) -> list[Event]:
        return self._events[bisect_right(self._events, version, key=lambda event: event.version) :]

    def follow(self, request: Request) -> Iterator[str]:
        """Yield the lines of a pod's log; those to come with ``follow``, until the pod has ended."""
        place, position = (request.namespace, request.name), 0
        lines = self.logs.get(place, [])
        if "tailLines" in request.query:
            position = max(0, len(lines) - int(request.query["tailLines"]))
        while True:
            with self._changed:
                lines = self.logs.get(place, [])
                pod = self._store(request.kind).get(place)
                over = pod is None or pod["status"].get("phase") in ("Succeeded", "Failed") or self._epoch < 0
                over = over or request.query.get("follow") not in ("true", "1")
                if len(lines) <= position and not over:
                    self._changed.wait(1)
                    continue
                news, position = lines[position:], len(lines)
            yield from news
            if over:
                return

    def log(self, namespace: str, pod: str, line: str) -> None:
        """Add a line to a pod's log."""
        with self._changed:
            self.logs.setdefault((namespace, pod), []).append(line)
            self._changed.notify_all()


ROLES = ("ClusterRoleBinding", "RoleBinding", "ClusterRole", "Role")
POLICIES = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "ConfigMap")


def _condition(kind: str, reason: str, message: str, holds: str) -> Object:
    status = {"status": "True", "reason": reason, "message": message} if holds else {"status": "False"}
    return {"type": kind, **status, "lastTransitionTime": _now()}


def _no_path() -> Problem:
    return Problem(404, "NotFound", "the server could not find the requested resource")


def _conflict(kind: Kind, name: str, words: str) -> Problem:
    return Problem(409, "Conflict", f"Operation cannot be fulfilled on {kind.describe(name)}: {words}", kind, name)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _desired(document: Object) -> Object:
    return {name: value for name, value in document.items() if name not in ("metadata", "status", "apiVersion")}


def _without_times(document: Object) -> Object:
    metadata = {name: value for name, value in document["metadata"].items() if name != "managedFields"}
    return {**document, "metadata": metadata, "apiVersion": ""}


def _selector(request: Request) -> Callable[[Object], bool]:
    labels = request.query.get("labelSelector", "")
    terms = [term for term in re.split(r",(?![^(]*\))", labels) if term]
    fields = []
    for term in filter(None, request.query.get("fieldSelector", "").split(",")):
        match = re.fullmatch(r"([\w./-]+?)(!?=)=?(.*)", term)
        if match is None or match[1] not in ("metadata.name", "metadata.namespace", *request.kind.fields):
            raise Problem(400, "BadRequest", f"field label not supported: {term}")
        fields.append((match[1], match[2] == "=", match[3]))

    def matches(document: Object) -> bool:
        for path, equal, wanted in fields:
            value: Any = document
            for word in path.split("."):
                value = (value or {}).get(word)
            if (("" if value is None else str(value)) == wanted) != equal:
                return False
        found = document["metadata"].get("labels") or {}
        return all(_label_matches(term.strip(), found) for term in terms)

    return matches


def _label_matches(term: str, labels: Mapping[str, str]) -> bool:
    if match := re.fullmatch(r"(\S+)\s+(in|notin)\s+\((.*)\)", term):
        values = [value.strip() for value in match[3].split(",")]
        return (labels.get(match[1]) in values) == (match[2] == "in")
    if match := re.fullmatch(r"([^!=\s]+)\s*(!=|==?)\s*(.*)", term):
        return (labels.get(match[1]) == match[3]) == (match[2] != "!=")
    return (term.removeprefix("!") in labels) != term.startswith("!")


def _handler(cluster: Cluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            super().setup()
            cluster._connections.add(self.connection)

        def finish(self) -> None:
            cluster._connections.discard(self.connection)
            with contextlib.suppress(OSError, ValueError):
                super().finish()

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            failure = cluster.find_failure(self.command, urlsplit(self.path).path)
            try:
                if failure == 0:
                    cluster.requests.append((self.command, urlsplit(self.path).path))
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                if failure is not None:
                    cluster.requests.append((self.command, urlsplit(self.path).path))
                    raise Problem(failure, "Injected", f"answer {failure} of the tests")
                request = cluster.route(self.command, self.path, dict(self.headers), body)
                if not isinstance(request, Request):
                    self._answer(200 if self.command == "GET" else 201, request)
                elif request.sub == "log":
                    self._stream("text/plain", (f"{line}\n".encode() for line in cluster.follow(request)))
                elif request.verb() == "watch":
                    _selector(request)
                    events = cluster.watch(request)
                    self._stream("application/json", (event and json.dumps(event).encode() + b"\n" for event in events))
                elif cluster.slow and cluster.slow[0] in self.path:
                    self._stream("application/json", self._drip(cluster.slow[1], *cluster.serve(request)))
                else:
                    self._answer(*cluster.serve(request))
            except Problem as problem:
                self._answer(problem.code, problem.status())

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815 - names of http.server

        def _answer(self, status: int, answer: Object) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _drip(self, ended: threading.Event, _status: int, answer: Object) -> Iterator[bytes]:
            cluster.stalled += 1
            while not ended.wait(0.2):
                yield b" "
            yield json.dumps(answer).encode()

        def _stream(self, content: str, pieces: Iterable[bytes | None]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", content)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in pieces:
                if piece is None:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_arguments: Any) -> None:
            return

    return Handler
