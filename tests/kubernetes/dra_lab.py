"""Claims, nodes and preparers for the tests of the DRA driver."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kubernetes_lab import host
from support.process import stop, wait_for

from ocigpu.core.facts import HostFacts
from ocigpu.core.settings import Settings
from ocigpu.kubernetes.config import PluginOptions
from ocigpu.kubernetes.dra.claims import ClaimRef
from ocigpu.kubernetes.dra.devices import DeviceOptions, DraNode, make_devices
from ocigpu.kubernetes.dra.prepare import NodeView, PoolPlace, Preparer
from ocigpu.kubernetes.dra.state import ClaimStore

DRIVER, NODE = "gpu.nvidia.com", "worker-1"
API = "resource.nvidia.com/v1beta1"


def result(device: str, request: str = "gpu", **more: Any) -> dict[str, Any]:
    return {"request": request, "driver": DRIVER, "pool": NODE, "device": device, **more}


def opaque(kind: str, source: str = "FromClaim", requests: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    """Return a configuration of an allocation."""
    parameters = {"apiVersion": API, "kind": kind, **fields}
    return {"source": source, "requests": list(requests), "opaque": {"driver": DRIVER, "parameters": parameters}}


def claim(uid: str, *results: dict[str, Any], config: list[dict[str, Any]] | None = None, name: str = "") -> Any:
    """Return a ResourceClaim that is allocated these devices."""
    devices: dict[str, Any] = {"results": list(results), **({"config": config} if config else {})}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name or uid, "namespace": "team", "uid": uid},
        "spec": {},
        "status": {"allocation": {"devices": devices}},
    }


class Lab:
    """A preparer in this process; ``claims`` by name stand for the API server, ``reads`` counts its requests."""

    def __init__(self, directory: Path, facts: HostFacts | None = None, boot: str = "boot-1", **options: Any) -> None:
        self.directory = directory
        (directory / "cdi").mkdir(parents=True, exist_ok=True)
        self.claims: dict[str, Any] = {}
        self.reads = 0
        self.logged: list[str] = []
        self.settings = options.pop("settings", Settings())
        self.node: DraNode | None = DraNode(host("a100-8") if facts is None else facts)
        self.offered = DeviceOptions(**options.pop("devices", {}))
        self.options = options
        self.restart(boot)

    def restart(self, boot: str = "boot-1") -> None:
        """Begin as a driver that was started again."""
        place = PoolPlace(DRIVER, NODE, str(self.directory / "cdi"))
        store = ClaimStore(str(self.directory), boot)
        self.preparer = Preparer(store, place, self.view, self.get, self.log, **self.options)
        self.preparer.recover()

    def view(self) -> NodeView | None:
        if self.node is None:
            return None
        devices = make_devices(self.node, self.offered)
        return NodeView(self.node, devices, self.settings, PluginOptions(driver_root="/"))

    def get(self, _namespace: str, name: str) -> Any:
        self.reads += 1
        found = self.claims.get(name)
        return found() if isinstance(found, Callable) else found  # type: ignore[arg-type]

    def log(self, _level: str, message: str, **_fields: Any) -> None:
        self.logged.append(message)

    def add(self, uid: str, *results: dict[str, Any], **more: Any) -> ClaimRef:
        """Allocate devices to a new claim."""
        document = claim(uid, *results, **more)
        self.claims[document["metadata"]["name"]] = document
        return ClaimRef("team", uid, document["metadata"]["name"])

    @property
    def specs(self) -> list[str]:
        return sorted(path.name for path in (self.directory / "cdi").iterdir())


_QUICK = """
import os, sys
from ocigpu.kubernetes.dra.driver import DraDriver, DraTiming
from ocigpu.kubernetes.dra.options import parse_options
from ocigpu.kubernetes.health import Rules
from ocigpu.system.settings_file import read_settings
timing = DraTiming(0.1, 0.3, 0.5, 0.1, 0.5, 20.0, Rules(probes=2, hold=0.3, patience=0.0))
DraDriver(parse_options(sys.argv[2:], os.environ), read_settings(sys.argv[1]), True, timing).run()
"""
"""The command with less patience."""


class RunningDriver:
    """A driver's process and what it logs; ``root``: the kubelet's directory."""

    def __init__(self, settings: Path, root: Path, *words: str, **variables: str) -> None:
        self.root = root
        self.output = root.with_name(f"{root.name}.log")
        (root.parent / "cdi").mkdir(exist_ok=True)
        options = [
            f"--node-name={NODE}",
            f"--registrar-directory={root}/plugins_registry",
            f"--plugins-directory={root}/plugins",
            f"--cdi-root={root.parent}/cdi",
            *words,
        ]
        command = [sys.executable, "-c", _QUICK, str(settings), *options]
        with self.output.open("ab") as output:
            self.child = subprocess.Popen(
                command, stdout=output, stderr=output, env={"PATH": os.environ["PATH"], **variables}
            )

    @property
    def log(self) -> list[str]:
        text = self.output.read_text()
        return [str(json.loads(line)["msg"]) for line in text[: text.rfind("\n") + 1].splitlines()]

    def wait_for_log(self, part: str) -> None:
        wait_for(f"{part!r}", lambda: any(part in line for line in self.log), on_failure=self.output.read_text)

    def end(self, number: int = signal.SIGTERM) -> int:
        """End it by a signal and return its exit status."""
        self.child.send_signal(number)
        return self.child.wait(60)


@contextmanager
def dra_driver(settings: Path, root: Path, *words: str, **variables: str) -> Iterator[RunningDriver]:
    """Run a driver; afterwards its log has told of no defect."""
    running = RunningDriver(settings, root, *words, **variables)
    try:
        yield running
    finally:
        if running.child.poll() is None:
            stop(running.child.pid)
        running.child.wait()
        text = running.output.read_text()
        print(text)  # beside a failure
    assert "OCIGPU-INT" not in text, text
    assert "Traceback" not in text, text


class KubeletProcess:
    """A kubelet's process; its methods are those of :class:`support.dra_kubelet.DraKubelet`."""

    def __init__(self, root: Path) -> None:
        program = Path(__file__).parent.parent / "support/dra_kubelet.py"
        self.child = subprocess.Popen(
            [sys.executable, program, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._line() == "ready\n"

    def _line(self) -> str:
        assert self.child.stdout
        return self.child.stdout.readline()

    def answer(self, name: str, *arguments: Any) -> dict[str, Any]:
        """Return {"result": ...} or {"error": ...}."""
        assert self.child.stdin
        self.child.stdin.write(json.dumps([name, *arguments]) + "\n")
        self.child.stdin.flush()
        found: dict[str, Any] = json.loads(self._line())
        return found

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            answer = self.answer(name, *arguments)
            assert "error" not in answer, answer["error"]
            return answer["result"]

        return call

    def close(self) -> None:
        assert self.child.stdin
        assert self.child.stdout
        self.child.stdin.close()
        self.child.stdout.close()
        assert self.child.wait(60) == 0


@contextmanager
def dra_kubelet(root: Path) -> Iterator[KubeletProcess]:
    running = KubeletProcess(root)
    try:
        yield running
    finally:
        running.close()


def write_kubeconfig(cluster: Any, path: Path, user: str = "system:admin") -> Path:
    """Write a file by which a driver finds a :class:`support.cluster.Cluster`."""
    token = "admin" if user == "system:admin" else cluster.add_token(user)
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": cluster.url}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(document))
    return path


def add_claim(
    cluster: Any, uid: str, *results: dict[str, Any], config: list[dict[str, Any]] | None = None
) -> list[str]:
    """Make a claim that the scheduler has allocated; returns it as the kubelet names it."""
    document = claim(uid, *results, config=config)
    status = document.pop("status")
    document["metadata"].pop("uid")
    made = cluster.create(document)
    cluster.update({**made, "status": status}, sub="status")
    return ["team", made["metadata"]["uid"], uid]
