"""The service for containers in a thread of the test, on a loopback port, in front of the tests' API server."""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import lightkube
from support.cluster import ADMIN, Cluster, make_kind
from support.process import wait_for
from support.programs import held_port

from ocigpu.system.service import ServiceLog
from ocigpu.tenants.service.cluster import ClusterClient
from ocigpu.tenants.service.reconciler import ReconcilerPace
from ocigpu.tenants.service.request import TenantRules
from ocigpu.tenants.service.server import CaasServer, ServiceOptions

SEED = {"container-url": "nvcr.io/nvidia/k8s/cuda-sample:vectoradd-cuda12.5.0-ubi8", "tenancy": "landon"}
"""The payload of the document that the service was asked for in."""
TENANCY_TYPE = make_kind("ocigpu.io", "Tenancy", "tenancies")
Object = dict[str, Any]


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: Any


class Lab:
    """``admin``: an admin's key; ``audits``: what was written; ``user``: whose rights the service has.

    ``store``: of several replicas, each of which is a lab, the URL.
    """

    def __init__(self, cluster: Cluster, directory: Path, **options: Any) -> None:
        self.cluster, self.directory = cluster, directory
        self.user = options.pop("user", ADMIN)
        self.store = options.pop("store", str(directory / "state"))
        # for ever: pods of the tests have ended in November 2026
        # no rate: tests ask as fast as they can
        rules = options.pop("rules", TenantRules())._replace(rate=options.pop("rate", 1e6))
        self.options = {
            "rules": rules,
            "pace": ReconcilerPace(0.2, 0.02, 0.2, 0.2),
            "keep_seconds": 1e10,
            "pod_seconds": 1e10,
            **options,
        }
        self.server: CaasServer
        self.port = 0
        """Where it listens, 0 for any."""
        self.lines: list[tuple[str, str]] = []
        self.user = ADMIN
        """As whom the service asks the cluster."""

    def start(self) -> None:
        options = ServiceOptions(
            f"127.0.0.1:{self.port}", self.store, audit=str(self.directory / "audit"), **self.options
        )
        config = lightkube.KubeConfig.from_dict(self.cluster.kubeconfig(self.user))
        client = ClusterClient(lightkube.AsyncClient(config=config, trust_env=False))
        self.server = CaasServer(options, _SilentLog(self.lines), client)
        ready = threading.Event()
        self._thread = threading.Thread(target=self.server.run, args=(ready.set,), daemon=True)
        self._thread.start()
        assert ready.wait(60)

    def stop(self) -> None:
        self.server.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()

    @property
    def admin(self) -> str:
        return self.server.store.keys.add(None, ["admin"], "tests", None)[0]

    def key(self, tenancy: str = "landon", *scopes: str) -> str:
        wanted = scopes or ("containers:read", "containers:write", "logs:read")
        return self.server.store.keys.add(tenancy, wanted, "tests", None)[0]

    def open(self, method: str, path: str, key: str = "", body: Any = None, **headers: str) -> http.client.HTTPResponse:
        """Send a request; its answer may be a stream."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = {"Connection": "close"} | ({"Content-Type": "application/json"} if data is not None else {})
        sent |= {"Authorization": f"Bearer {key}"} if key else {}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, data, sent)
        return connection.getresponse()

    def ask(self, method: str, path: str, key: str = "", body: Any = None, **headers: str) -> Answer:
        with self.open(method, path, key, body, **headers) as answer:
            data = answer.read()
            kind = answer.headers.get_content_type()
            found = json.loads(data) if data and kind.endswith("json") else data
            return Answer(answer.status, {name.lower(): value for name, value in answer.headers.items()}, found)

    def run(self, key: str, **wanted: Any) -> str:
        """Make a container and return its id."""
        answer = self.ask("POST", "/v1/containers", key, {**SEED, **wanted})
        assert answer.status == 202, answer
        return str(answer.body["id"])

    def show(self, key: str, container: str, query: str = "") -> Any:
        return self.ask("GET", f"/v1/containers/{quote(container)}{query}", key).body

    def wait(self, key: str, container: str, lifecycle: str) -> Any:
        found = self.show(key, container, f"?wait={lifecycle}&timeout=60")
        assert found["lifecycle"] == lifecycle, found
        return found

    def add_tenancy(self, name: str = "landon", phase: str = "Ready", gpus: int = 0) -> None:
        """What the controller of tenancies makes, as far as the service sees it."""
        head = {"apiVersion": "ocigpu.io/v1alpha1", "kind": "Tenancy", "metadata": {"name": name}}
        self.cluster.create({**head, "spec": {}})
        self.cluster.patch("Tenancy", name, {"status": {"phase": phase}}, sub="status")
        self.cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": f"tenant-{name}"}})
        if gpus:
            metadata = {"name": "tenancy", "namespace": f"tenant-{name}"}
            hard = {"requests.nvidia.com/gpu": str(gpus)}
            self.cluster.create(
                {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": {"hard": hard}}
            )

    def pod(self, container: str, tenancy: str = "landon") -> Object:
        """Wait for a container's pod."""
        place = ("Pod", container.replace("_", "-"), f"tenant-{tenancy}")
        wait_for(f"the pod of {container}", lambda: self.cluster.exists(*place))
        return self.cluster.get(*place)

    def set_status(self, container: str, tenancy: str = "landon", **status: Any) -> None:
        self.pod(container, tenancy)
        name = container.replace("_", "-")
        self.cluster.patch("Pod", name, {"status": status}, f"tenant-{tenancy}", sub="status")

    def bind(self, container: str, tenancy: str = "landon") -> None:
        """What the scheduler does: from now on a kubelet has to agree to the pod's end."""
        self.pod(container, tenancy)
        self.cluster.bind(container.replace("_", "-"), f"tenant-{tenancy}", "n1")

    def audits(self) -> list[Object]:
        return [json.loads(line) for line in (self.directory / "audit").read_text().splitlines()]


class _SilentLog(ServiceLog):
    def __init__(self, lines: list[tuple[str, str]]) -> None:
        super().__init__(as_json=True)
        self._lines = lines

    def __call__(self, level: str, message: str, **_fields: Any) -> None:
        self._lines.append((level, message))


@contextmanager
def make_lab(directory: Path, **options: Any) -> Iterator[Lab]:
    with Cluster() as cluster, held_port() as port:
        cluster.create(TENANCY_TYPE)
        lab = Lab(cluster, directory, **options)
        lab.port = port
        lab.add_tenancy()
        lab.start()
        try:
            yield lab
        finally:
            lab.stop()


SCHEDULED = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-11-23T10:00:10Z"}]
READY = [
    *SCHEDULED,
    {"type": "PodReadyToStartContainers", "status": "True", "lastTransitionTime": "2026-11-23T10:01:40Z"},
]


def main_status(**state: Any) -> list[Object]:
    return [{"name": "main", "image": "x", "imageID": "nvcr.io/x@sha256:" + "0" * 64, "ready": False, "state": state}]


def running(at: str = "2026-11-23T10:02:00Z") -> Object:
    return {"phase": "Running", "conditions": READY, "containerStatuses": main_status(running={"startedAt": at})}


def ended(code: int = 0, reason: str = "", message: str = "") -> Object:
    state = {"exitCode": code, "reason": reason or ("Completed" if not code else "Error"), "message": message}
    times = {"startedAt": "2026-11-23T10:02:00Z", "finishedAt": "2026-11-23T10:05:00Z"}
    return {
        "phase": "Failed" if code else "Succeeded",
        "conditions": READY,
        "containerStatuses": main_status(terminated={**state, **times}),
    }
