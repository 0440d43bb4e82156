"""Claims, nodes and preparers for the tests of the DRA driver."""

from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

from kubernetes_lab import host
from support.programs import AskedProgram, LoggedProgram

from ocigpu.core.facts import HostFacts
from ocigpu.core.settings import Settings
from ocigpu.kubernetes.dra.claims import ClaimRef
from ocigpu.kubernetes.dra.devices import DeviceOptions, DraNode, make_devices
from ocigpu.kubernetes.dra.prepare import PoolPlace, Preparer
from ocigpu.kubernetes.dra.specs import NodeView
from ocigpu.kubernetes.dra.state import ClaimStore
from ocigpu.kubernetes.node.config import PluginOptions

DRIVER, NODE = "gpu.nvidia.com", "worker-1"
API = "resource.nvidia.com/v1beta1"


def result(device: str, request: str = "gpu", **more: Any) -> dict[str, Any]:
    return {"request": request, "driver": DRIVER, "pool": NODE, "device": device, **more}


def vfio_name(address: str) -> str:
    """Return what a GPU for virtual machines is called: by its PCI address."""
    return f"gpu-vfio-{address.replace(':', '-').replace('.', '-')}"


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


class Killed(BaseException):
    """The driver is gone, whatever it was doing."""


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
        self.plugin = options.pop("plugin", PluginOptions(driver_root="/"))
        self.metadata = str(directory / "metadata") if options.pop("metadata", False) else ""
        self.options = options
        self.restart(boot)

    def restart(self, boot: str = "boot-1") -> None:
        """Begin as a driver that was started again."""
        place = PoolPlace(DRIVER, NODE, str(self.directory / "cdi"), self.metadata)
        store = ClaimStore(str(self.directory), boot)
        self.preparer = Preparer(store, place, self.view, self.get, self.log, **self.options)
        self.preparer.recover()

    def view(self) -> NodeView | None:
        if self.node is None:
            return None
        devices = make_devices(self.node, self.offered, self.preparer.made_places())
        return NodeView(self.node, devices, self.settings, self.plugin)

    def get(self, _namespace: str, name: str) -> Any:
        self.reads += 1
        found = self.claims.get(name)
        return found() if isinstance(found, Callable) else found

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
from ocigpu.kubernetes.node.health import Rules
from ocigpu.system.settings_file import read_settings
probe = float(os.environ.get("PROBE", "0.3"))
timing = DraTiming(0.1, probe, 0.5, 0.1, 0.5, 20.0, Rules(probes=2, hold=0.3, patience=0.0))
timing = timing._replace(sweep=0.3, vanished=0.3)
DraDriver(parse_options(sys.argv[2:], os.environ), read_settings(sys.argv[1]), True, timing).run()
"""
"""The command with less patience.  PROBE: seconds between readings of the node, each of which is a process."""


class RunningDriver(LoggedProgram):
    """A driver's process and what it logs; ``root``: the kubelet's directory."""

    def __init__(self, settings: Path, root: Path, *words: str, **variables: str) -> None:
        self.root = root
        (root.parent / "cdi").mkdir(exist_ok=True)
        options = [
            f"--node-name={NODE}",
            f"--registrar-directory={root}/plugins_registry",
            f"--plugins-directory={root}/plugins",
            f"--cdi-root={root.parent}/cdi",
            *words,
        ]
        super().__init__(_QUICK, root.with_name(f"{root.name}.log"), str(settings), *options, **variables)


def dra_driver(settings: Path, root: Path, *words: str, **variables: str) -> AbstractContextManager[RunningDriver]:
    """Run a driver; afterwards its log has told of no defect."""
    return RunningDriver(settings, root, *words, **variables).running()


def dra_kubelet(root: Path) -> AbstractContextManager[AskedProgram]:
    """Run a kubelet; its methods are those of :class:`support.dra_kubelet.DraKubelet`."""
    kubelet = AskedProgram("dra_kubelet.py", root)
    kubelet.wait_until_ready()  # its directories are there
    return closing(kubelet)


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
