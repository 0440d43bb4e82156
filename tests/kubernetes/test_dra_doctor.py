"""``ocigpu doctor --claims``: what keeps claims from their devices, and that what is told to do helps."""

import json
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dra_lab import DRIVER, NODE, Lab, add_claim, result
from support.cluster import Cluster
from support.product import REPOSITORY

from ocigpu.cli.front.main import main
from ocigpu.doctor.findings import CLAIMS
from ocigpu.kubernetes.dra.claims import ClaimRef
from ocigpu.kubernetes.dra.status import DriverStatus, write_status


class Node:
    """A node's directories: a kubelet's, and a driver's in it, whose claims are prepared by a preparer here."""

    def __init__(self, root: Path, cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
        self.root, self.cluster, self._capfd = root, cluster, capfd
        self.directory = root / f"var/lib/kubelet/plugins/{DRIVER}"
        self.registry = root / "var/lib/kubelet/plugins_registry"
        for path in (self.directory, self.registry, root / "var/lib/kubelet/device-plugins"):
            path.mkdir(parents=True)
        self.lab = Lab(self.directory)
        self.tell()

    def tell(self, **status: Any) -> None:
        write_status(str(self.directory), DriverStatus(DRIVER, NODE, **{"registered": True, **status}))

    def claim(self, name: str, device: str) -> ClaimRef:
        """Allocate a device to a pod's claim; the preparer's API server has it, too."""
        namespace, uid, _ = add_claim(self.cluster, name, result(device))
        document = self.cluster.get("ResourceClaim", name, namespace)
        pods = [{"resource": "pods", "name": f"{name}-pod", "uid": "p"}]
        self.cluster.update({**document, "status": {**document["status"], "reservedFor": pods}}, sub="status")
        self.lab.claims[name] = document
        return ClaimRef(namespace, uid, name)

    def findings(self) -> dict[str, dict[str, Any]]:
        """Return what is wrong, by check."""
        self._capfd.readouterr()
        main(["doctor", "--claims", "--root", str(self.root), "--json"])
        found = json.loads(self._capfd.readouterr().out)["findings"]
        assert [each["name"] for each in found] == [check.name for check in CLAIMS]
        return {each["name"].removeprefix("claims-"): each for each in found if each["severity"] != "ok"}


@pytest.fixture
def node(work_directory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Node]:
    with Cluster() as cluster:
        cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})
        monkeypatch.setenv("KUBECONFIG", str(cluster.write_kubeconfig(work_directory / "kubeconfig")))
        with tempfile.TemporaryDirectory(prefix="r", dir=work_directory.parent) as root:  # sockets: a short path
            yield Node(Path(root), cluster, capfd)


def listen(path: Path) -> socket.socket:
    one = socket.socket(socket.AF_UNIX)
    one.bind(str(path))
    one.listen()
    return one


def test_the_registration_of_a_driver(node: Node) -> None:
    found = node.findings()["registration"]
    assert (found["severity"], "it does not run" in found["text"]) == ("error", True)
    path = node.registry / f"{DRIVER}-reg.sock"
    listen(path).close()
    assert "it was killed" in node.findings()["registration"]["text"]
    path.unlink()
    with listen(path):  # as a driver that is started
        assert node.findings() == {}
        node.tell(registered=False, refusal="no supported version")
        assert "does not take gpu.nvidia.com: no supported version" in node.findings()["registration"]["text"]


def test_claims_that_are_not_prepared_and_prepared_ones_that_are_gone(node: Node) -> None:
    with listen(node.registry / f"{DRIVER}-reg.sock"):
        ref = node.claim("train", "gpu-1")
        found = node.findings()
        assert found["unprepared"]["text"] == (
            "claim team/train is allocated to this node for pod train-pod, and not prepared"
        )
        assert found["unprepared"]["fixes"] == ["kubectl -n team describe pod train-pod"]
        node.lab.preparer.prepare(ref)  # as the kubelet asks again
        assert node.findings() == {}
        node.cluster.delete("ResourceClaim", "train", "team")
        assert node.findings()["vanished"]["text"] == "claim team/train is gone or replaced, and still has gpu-1"
        node.lab.claims.clear()
        node.lab.preparer.sweep_vanished(0.0, 0.0)  # as a driver that runs
        assert node.findings() == {}


def test_what_the_server_leaves_out_and_what_a_device_plugin_offers_too(node: Node) -> None:
    with listen(node.registry / f"{DRIVER}-reg.sock"):
        node.tell(missing=("taints", "counters"))
        found = node.findings()["dropped"]
        assert "leaves taints, counters out of gpu.nvidia.com's slices" in found["text"]
        assert "--feature-gates=DRADeviceTaints=true,DRAPartitionableDevices=true" in found["fixes"][0]
        node.tell()
        checkpoint = node.root / "var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"
        both = {"nvidia.com/gpu": ["GPU-1", "GPU-2"], "example.com/nic": ["a"]}
        checkpoint.write_text(
            json.dumps({"Data": {"PodDeviceEntries": None, "RegisteredDevices": both}, "Checksum": 1})
        )
        assert "a device plugin offers 2 of nvidia.com/gpu" in node.findings()["twice"]["text"]
        gone = {"nvidia.com/gpu": [], "example.com/nic": ["a"]}  # as the kubelet writes without the plugin
        checkpoint.write_text(json.dumps({"Data": {"RegisteredDevices": gone}, "Checksum": 1}))
        assert node.findings() == {}


def test_what_cannot_be_asked_is_said(
    node: Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBECONFIG")
    found = node.findings()
    assert found["unprepared"]["severity"] == found["vanished"]["severity"] == "not-checked"
    assert "KUBECONFIG is not set" in found["vanished"]["text"]
    main(["doctor", "--claims", "--root", str(node.root)])
    assert "claims-unprepared, claims-vanished: KUBECONFIG is not set" in capfd.readouterr().out
    (node.directory / "status.json").write_text("[]")
    assert "status.json: not understood" in node.findings()["registration"]["text"]
    assert main(["doctor", "--claims", "--root", str(tmp_path), "--all"]) == 0
    assert "no driver of ocigpu has run on this node" in capfd.readouterr().out
    assert main(["doctor", "--claims", "--tenants"]) == 2


def test_the_page_lists_the_checks() -> None:
    text = (REPOSITORY / "docs/DRA.md").read_text()
    assert [name for name in (check.name for check in CLAIMS) if f"| `{name}` |" not in text] == []
