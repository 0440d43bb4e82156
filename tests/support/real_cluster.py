"""A real API server with its etcd, controllers and scheduler, in place of :class:`support.cluster.Cluster`.

``make cluster-test`` names the programs; they run on loopback as this process's children, on ports that were free,
with certificates and tokens of their own in one directory, and end with it.  Source: the reference pages of etcd,
kube-apiserver, kube-controller-manager and kube-scheduler 1.36.
"""

import contextlib
import http.client
import json
import os
import socket
import ssl
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import quote

import yaml
from support import process
from support.api_server import make_account
from support.cluster import ADMIN
from support.cluster_rules import Problem
from support.process import stop, wait_for

from ocigpu.kubernetes.cluster.api_server import ApiServer

Object = dict[str, Any]
SERVER = ("KUBE_APISERVER", "ETCD")
ALL = (*SERVER, "KUBE_CONTROLLER_MANAGER", "KUBE_SCHEDULER", "KUBELET", "CONTAINERD")
EVERYTHING = "tests:everything"
"""A group that may do everything: whom tests act as has no limits but policies, as in the double."""
CONTROLLERS = (
    *("daemonset-controller", "deployment-controller", "replicaset-controller"),
    *("namespace-controller", "serviceaccount-controller", "resourcequota-controller", "garbage-collector-controller"),
    *("root-ca-certificate-publisher-controller", "resourceclaim-controller", "device-taint-eviction-controller"),
    *("validatingadmissionpolicy-status-controller", "persistentvolume-protection-controller"),
    *("persistentvolumeclaim-protection-controller", "persistentvolume-binder-controller"),
)
KUBELET_NODE = "kubelet-1"
_USERS = {
    ADMIN: "system:masters",
    "system:kube-controller-manager": "",
    "system:kube-scheduler": "",
    f"system:node:{KUBELET_NODE}": "system:nodes",
}
_DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"


def find_programs() -> dict[str, str]:
    """Return the programs that the environment names, by the names of its variables."""
    return {name: os.environ[name] for name in ALL if os.environ.get(name)}


class Place(NamedTuple):
    """Where the objects of a kind are."""

    path: str
    plural: str
    namespaced: bool


class RunningProgram:
    """A program and its log; it ends when this process ends."""

    def __init__(self, directory: Path, program: str, *words: str, view: Sequence[str] = ()) -> None:
        self.log = directory / f"{Path(program).name}.log"
        with self.log.open("ab") as output:
            command = ["setpriv", "--pdeathsig", "KILL", *view, program, *words]
            self.child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def says(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    def listens(self, port: int) -> bool:
        """Wait until it listens; False when somebody else has taken the port, which was free."""

        def is_decided() -> bool:
            with socket.socket() as client:
                return self.child.poll() is not None or client.connect_ex(("127.0.0.1", port)) == 0

        wait_for(f"{self.log.stem} to listen", is_decided, 120, self.says)
        assert self.child.poll() is None or "address already in use" in self.says(), self.says()
        return self.child.poll() is None

    def end(self) -> None:
        if self.child.poll() is None:
            stop(self.child.pid)
        self.child.wait()


class Etcd:
    """What several API servers keep their objects in, each under a prefix."""

    def __init__(self, directory: Path, program: str) -> None:
        directory.mkdir()
        for port, other in (free_ports(2) for _ in range(3)):
            self.url, peers = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{other}"
            self.program = RunningProgram(
                directory, program, f"--data-dir={directory}/data", "--name=tests", "--log-level=warn",
                "--unsafe-no-fsync", f"--listen-client-urls={self.url}", f"--advertise-client-urls={self.url}",
                f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}",
                f"--initial-cluster=tests={peers}",
            )  # fmt: skip
            if self.program.listens(port):
                break


class RealCluster:
    """Use it as a context manager; what tests do themselves raises Problem.

    ``gates``: of all programs; ``programs``: which of them run; ``scheduling``: the scheduler's configuration.
    """

    def __init__(
        self,
        directory: Path,
        etcd: Etcd,
        gates: Mapping[str, bool] | None = None,
        programs: Collection[str] = ALL,
        scheduling: Path | None = None,
    ) -> None:
        directory.mkdir()
        self.directory, self._etcd, self._scheduling = directory, etcd, scheduling
        self._gates = ",".join(f"{name}={str(on).lower()}" for name, on in (gates or {}).items())
        self._programs = {name: program for name, program in find_programs().items() if name in programs}
        self._running: list[RunningProgram] = []
        self._places: dict[tuple[str, str], Place] = {}
        self._clients: list[Any] = []
        make_account(directory)
        public = ["openssl", "pkey", "-in", directory / "ca.key", "-pubout", "-out", directory / "account.pub"]
        process.run(public)
        lines = [f'token-of-{user},{user},{user},"{groups}"\n' for user, groups in _USERS.items()]
        (directory / "tokens.csv").write_text("".join(lines))
        (directory / "tokens.csv").chmod(0o600)
        self._trust = ssl.create_default_context(cafile=str(directory / "ca.crt"))

    def __enter__(self) -> Self:
        try:
            self._start_server()
            for name, words in (
                ("KUBE_CONTROLLER_MANAGER", self._manager_words()),
                ("KUBE_SCHEDULER", self._scheduler_words()),
            ):
                if name in self._programs:
                    self.start(name, *words)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.close()
        for program in reversed(self._running):
            program.end()

    def _start_server(self) -> None:
        for port in (free_ports(1)[0] for _ in range(3)):
            server = self._start_server_at(port)
            if server.listens(port):
                break
            self._running.remove(server)

        def is_ready() -> bool:
            assert server.child.poll() is None, server.says()
            with contextlib.suppress(OSError, http.client.HTTPException, Problem):
                self.ask("GET", "/readyz", plain=True)
                return True
            return False

        wait_for("the API server", is_ready, 120, server.says)
        rules = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]
        self.apply({**_rbac("ClusterRole", EVERYTHING), "rules": rules})
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": EVERYTHING}
        subjects = [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": EVERYTHING}]
        self.apply({**_rbac("ClusterRoleBinding", EVERYTHING), "roleRef": role, "subjects": subjects})

    def _start_server_at(self, port: int) -> RunningProgram:
        self.host, self.port = "127.0.0.1", port
        self.url = f"https://127.0.0.1:{port}"
        here = self.directory
        return self.run(
            "KUBE_APISERVER", f"--etcd-servers={self._etcd.url}", f"--etcd-prefix=/{here.name}",
            "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", f"--secure-port={port}",
            "--endpoint-reconciler-type=none", "--service-cluster-ip-range=10.0.0.0/24", "--allow-privileged=true",
            f"--cert-dir={here}", f"--tls-cert-file={here}/server.pem", f"--tls-private-key-file={here}/server.key",
            f"--client-ca-file={here}/ca.crt", f"--token-auth-file={here}/tokens.csv",
            "--service-account-issuer=https://tests", f"--service-account-signing-key-file={here}/ca.key",
            f"--service-account-key-file={here}/account.pub", "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction", "--profiling=false",
        )  # fmt: skip

    def _manager_words(self) -> tuple[str, ...]:
        here = self.directory
        return (
            f"--controllers={','.join(CONTROLLERS)}", "--use-service-account-credentials=true",
            f"--service-account-private-key-file={here}/ca.key", f"--root-ca-file={here}/ca.crt",
        )  # fmt: skip

    def _scheduler_words(self) -> tuple[str, ...]:
        """It ignores ``--kubeconfig`` if it has a configuration, which names that of this cluster, then."""
        if self._scheduling is None:
            return ()
        document = yaml.safe_load(self._scheduling.read_text())
        document["clientConnection"]["kubeconfig"] = str(self._kubeconfig_of("KUBE_SCHEDULER"))
        path = self.directory / self._scheduling.name
        path.write_text(json.dumps(document))
        return (f"--config={path}",)

    def _kubeconfig_of(self, variable: str) -> Path:
        return self.directory / f"{variable}.json"

    def start(self, variable: str, *words: str) -> RunningProgram:
        """Start a program that works with the cluster under its usual name."""
        user = f"system:{variable.lower().replace('_', '-')}"
        kubeconfig = self.write_kubeconfig(self._kubeconfig_of(variable), user)
        usual = [f"--kubeconfig={kubeconfig}", "--leader-elect=false", "--secure-port=0", "--profiling=false"]
        return self.run(variable, *usual, *words)

    def run(self, variable: str, *words: str, view: Sequence[str] = ()) -> RunningProgram:
        """Start the program that a variable names, after the words of a ``view``; it ends with the cluster."""
        gates = [f"--feature-gates={self._gates}"] if self._gates else []
        program = RunningProgram(self.directory, self._programs[variable], *words, *gates, view=view)
        self._running.append(program)
        return program

    # Credentials

    def token(self, user: str, *, node: str | None = None) -> str:
        """Return a token of a service account, of a pod of its on a node; made where it is missing."""
        if user in _USERS:
            return f"token-of-{user}"
        _, _, space, name = user.split(":")
        self.ensure({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": space}})
        self.ensure({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": space}})
        spec: Object = {}
        if node is not None:
            metadata = {"name": f"{name}-{node}", "namespace": space}
            containers = [{"name": "main", "image": "none"}]
            pod = {"nodeName": node, "serviceAccountName": name, "containers": containers}
            made = self.ensure({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod})
            head = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": made["metadata"]["uid"]}
            spec["boundObjectRef"] = head
        path = f"/api/v1/namespaces/{space}/serviceaccounts/{name}/token"
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        return str(self.ask("POST", path, asked)["status"]["token"])

    def kubeconfig(self, user: str = ADMIN, *, node: str | None = None) -> Object:
        cluster = {"server": self.url, "certificate-authority": str(self.directory / "ca.crt")}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": self.token(user, node=node)}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }

    def write_kubeconfig(self, path: Path, user: str = ADMIN) -> Path:
        path.write_text(json.dumps(self.kubeconfig(user)))
        path.chmod(0o600)
        return path

    def client(self, user: str = ADMIN, *, node: str | None = None, **options: Any) -> Any:
        """Return a client of lightkube, closed with the cluster; with ``node`` that of a pod there."""
        import lightkube

        config = lightkube.KubeConfig.from_dict(self.kubeconfig(user, node=node))
        client = lightkube.Client(config=config.get(), trust_env=False, **options)
        self._clients.append(client)
        return client

    def account(self, user: str, directory: Path, node: str | None = None) -> ApiServer:
        """Return the server as a pod with this service account finds it."""
        directory.mkdir()
        (directory / "token").write_text(self.token(user, node=node))
        (directory / "ca.crt").write_text((self.directory / "ca.crt").read_text())
        (directory / "namespace").write_text(user.split(":")[2])
        return ApiServer(self.host, self.port, str(directory))

    def wait_for_right(self, user: str, verb: str, group: str, resource: str, namespace: str = "") -> None:
        """Wait until roles that were just made are in force."""
        attributes = {"verb": verb, "group": group, "resource": resource, "namespace": namespace}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "resourceAttributes": attributes},
        }
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        wait_for(f"the right of {user}", lambda: self.ask("POST", path, review)["status"]["allowed"])

    # What tests do themselves

    def create(self, document: Object, user: str = ADMIN, **query: str) -> Object:
        made = self.ask("POST", self._path(document, named=False), document, user, **query)
        if document["kind"] == "CustomResourceDefinition":
            self._wait_for_kind(document)
        return made

    def ensure(self, document: Object) -> Object:
        """Make an object that may be there."""
        with contextlib.suppress(Problem):
            return self.create(document)
        metadata = document["metadata"]
        return self.get(document["kind"], metadata["name"], metadata.get("namespace"))

    def update(self, document: Object, sub: str = "", user: str = ADMIN) -> Object:
        return self.ask("PUT", self._path(document, sub), document, user)

    def patch(self, kind: str, name: str, patch: Object, namespace: str | None = None, sub: str = "") -> Object:
        """Merge patch; ``sub="status"`` for the status."""
        return self.ask("PATCH", self._where(kind, name, namespace, sub), patch, content="application/merge-patch+json")

    def delete(self, kind: str, name: str, namespace: str | None = None, **options: Any) -> None:
        body = {"apiVersion": "v1", "kind": "DeleteOptions", **options}
        self.ask("DELETE", self._where(kind, name, namespace), body)

    def bind(self, pod: str, namespace: str, node: str) -> None:
        """Do what the scheduler does."""
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
        self.ask("POST", self._where("Pod", pod, namespace, "binding"), body)

    def get(self, kind: str, name: str, namespace: str | None = None) -> Object:
        return self.ask("GET", self._where(kind, name, namespace))

    def exists(self, kind: str, name: str, namespace: str | None = None) -> bool:
        try:
            self.get(kind, name, namespace)
        except Problem as problem:
            if problem.code != 404:
                raise
            return False
        return True

    def objects(self, kind: str) -> list[Object]:
        place = self._find(kind)
        found: Object = self.ask("GET", f"{place.path}/{place.plural}")
        return [{"apiVersion": found["apiVersion"], "kind": kind, **each} for each in found["items"]]

    def apply_manifests(self, path: Path | str) -> None:
        path = Path(path)
        for file in sorted(path.glob("*.yaml")) if path.is_dir() else [path]:
            for document in filter(None, yaml.safe_load_all(file.read_text())):
                self.apply(document)

    def apply(self, document: Object, manager: str = "kubectl", **query: str) -> Object:
        """Server-side apply, with force, and with no field that the server does not know."""
        query = {"fieldManager": manager, "force": "true", "fieldValidation": "Strict", **query}
        made = self.ask("PATCH", self._path(document), document, content="application/apply-patch+yaml", **query)
        if document["kind"] == "CustomResourceDefinition" and "dryRun" not in query:
            self._wait_for_kind(document)
        return made

    # Asking

    def ask(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        user: str = ADMIN,
        content: str = "application/json",
        plain: bool = False,
        accept: str = "application/json",
        **query: str,
    ) -> Any:
        """Send a request as an administrator, who may act as another user; raises Problem."""
        headers = {"Authorization": f"Bearer token-of-{ADMIN}", "Content-Type": content, "Accept": accept}
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=60, context=self._trust)
        words = "&".join(f"{name}={quote(value)}" for name, value in query.items())
        try:
            connection.putrequest(method, f"{path}?{words}" if words else path)
            data = b"" if body is None else json.dumps(body).encode()
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                connection.putheader(name, value)
            for name, value in _impersonation(user):
                connection.putheader(name, value)
            connection.endheaders(data)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        found = text.decode() if plain else json.loads(text)
        if answer.status >= 400:
            status = {"message": found} if plain else found
            raise Problem(answer.status, status.get("reason", ""), status.get("message", ""))
        return found

    def _path(self, document: Object, sub: str = "", named: bool = True) -> str:
        metadata = document["metadata"]
        name = metadata["name"] if named else ""
        return self._where(document["kind"], name, metadata.get("namespace"), sub, document.get("apiVersion", ""))

    def _where(self, kind: str, name: str, namespace: str | None = None, sub: str = "", api: str = "") -> str:
        place = self._find(kind, api)
        space = f"/namespaces/{namespace or 'default'}" if place.namespaced else ""
        return f"{place.path}{space}/" + "/".join(filter(None, (place.plural, name, sub)))

    def _find(self, kind: str, api: str = "") -> Place:
        if (kind, api) not in self._places:
            self._places = dict(self._discover())
        if (kind, api) not in self._places:
            raise Problem(404, "NotFound", f"no kind {kind} in {api}")
        return self._places[kind, api]

    def _discover(self) -> Iterator[tuple[tuple[str, str], Place]]:
        first: set[str] = set()
        for root in ("/api", "/apis"):
            for group in self.ask("GET", root, accept=_DISCOVERY)["items"]:
                for version in group["versions"]:  # the preferred one is the first
                    api = "/".join(filter(None, (group["metadata"].get("name"), version["version"])))
                    for each in version.get("resources", ()):
                        kind = each["responseKind"]["kind"]
                        place = Place(f"{root}/{api}", each["resource"], each["scope"] == "Namespaced")
                        yield (kind, api), place
                        if kind not in first:
                            first.add(kind)
                            yield (kind, ""), place

    def _wait_for_kind(self, crd: Object) -> None:
        spec, name = crd["spec"], crd["metadata"]["name"]

        def is_established() -> bool:
            found = self.get("CustomResourceDefinition", name).get("status", {}).get("conditions") or ()
            return any(each["type"] == "Established" and each["status"] == "True" for each in found)

        def is_served() -> bool:
            with contextlib.suppress(Problem):
                place = self._find(spec["names"]["kind"], f"{spec['group']}/{spec['versions'][0]['name']}")
                self.ask("GET", f"{place.path}/{place.plural}")
                return True
            return False

        wait_for(f"{name} to be established", is_established)
        wait_for(f"{name} to be served", is_served)


def _rbac(kind: str, name: str) -> Object:
    return {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, "metadata": {"name": name}}


def _impersonation(user: str) -> Iterator[tuple[str, str]]:
    if user == ADMIN:
        return
    yield "Impersonate-User", user
    groups = [EVERYTHING]
    if user.startswith("system:serviceaccount:"):
        groups += ["system:serviceaccounts", f"system:serviceaccounts:{user.split(':')[2]}"]
    for group in groups:
        yield "Impersonate-Group", group


def free_ports(number: int) -> list[int]:
    """Return ports of loopback that nobody has."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
