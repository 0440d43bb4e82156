"""The DRA driver and a kubelet: registration over real sockets, what works without a driver or an API server."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dra_lab import DRIVER, add_claim, dra_driver, dra_kubelet, result, write_kubeconfig
from support.cluster import Cluster
from support.process import wait_for
from support.product import SimulatedHost

from ocigpu.bundle.inject import inject
from ocigpu.cdi.registry import read_registry
from ocigpu.core.settings import Settings

pytestmark = pytest.mark.root
UNKNOWN = ["team", "3f2a0a4e-0000-4000-8000-000000000001", "gpus"]
SERVICES = ["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"]


@pytest.fixture
def root(work_directory: Path) -> Iterator[Path]:
    """A kubelet's directory whose path is as short as a real one's: sockets are in it."""
    parent = Path(tempfile.mkdtemp(prefix="k", dir=work_directory.parent))
    yield parent / "k"
    shutil.rmtree(parent)


def test_without_driver_and_api_server_claims_are_given_back(root: Path) -> None:
    """After a reboot pods end only if their claims can be given back, whatever else is not there yet."""
    settings = root.parent / "config.toml"
    nothing = root.parent / "host"
    nothing.mkdir()
    settings.write_text(f'[simulation]\nroot = "{nothing}"\n')
    with dra_kubelet(root) as kubelet, dra_driver(settings, root) as driver:
        (found,) = kubelet.find()
        assert found["name"] == DRIVER
        assert found["versions"] == SERVICES
        assert found["endpoint"] == f"{root}/plugins/{DRIVER}/dra.sock"
        driver.wait_for_log("registered with the kubelet")
        for version in SERVICES[:2]:
            assert kubelet.unprepare(DRIVER, [UNKNOWN], version) == {UNKNOWN[1]: {}}
            assert kubelet.prepare(DRIVER, [], version) == {}
            error = kubelet.prepare(DRIVER, [UNKNOWN], version)[UNKNOWN[1]]["error"]
            assert error.startswith("OCIGPU-KUBE-5")
            assert "\n" not in error
        assert driver.end() == 0
        assert not os.listdir(root / "plugins_registry"), "its sockets are gone"


def test_two_drivers_are_there_at_the_same_time(root: Path, simulated_host: SimulatedHost) -> None:
    """A rolling update: the new one registers beside the old one, which then ends and takes its own sockets away."""
    with dra_kubelet(root) as kubelet, dra_driver(simulated_host.settings, root, "--pod-uid=one") as old:
        (first,) = kubelet.find()
        assert first["endpoint"].endswith("/dra-one.sock")
        with dra_driver(simulated_host.settings, root, "--pod-uid=two"):
            assert len(kubelet.find(60, 2)) == 2
            assert kubelet.unprepare(DRIVER, [UNKNOWN]) == {UNKNOWN[1]: {}}
            assert old.end() == 0
            (left,) = kubelet.find()
            assert left["endpoint"].endswith("/dra-two.sock")
            assert kubelet.unprepare(DRIVER, [UNKNOWN]) == {UNKNOWN[1]: {}}


def test_a_kubelet_that_removes_the_sockets_gets_new_ones(root: Path, simulated_host: SimulatedHost) -> None:
    with dra_kubelet(root) as kubelet, dra_driver(simulated_host.settings, root):
        (found,) = kubelet.find()
        path = root / f"plugins_registry/{DRIVER}-reg.sock"
        before = path.stat().st_ino
        path.unlink()
        wait_for("the socket", lambda: path.exists() and path.stat().st_ino != before)
        (again,) = kubelet.find()
        assert again == found
        assert kubelet.unprepare(DRIVER, [UNKNOWN]) == {UNKNOWN[1]: {}}


def test_a_pods_claim_from_the_slice_to_the_containers_devices(root: Path, simulated_host: SimulatedHost) -> None:
    with Cluster() as cluster, dra_kubelet(root) as kubelet:
        cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})
        config = write_kubeconfig(cluster, root.parent / "kubeconfig")
        with dra_driver(simulated_host.settings, root, KUBECONFIG=str(config)) as driver:
            kubelet.find()
            driver.wait_for_log("published 8 devices")
            (published,) = cluster.objects("ResourceSlice")
            devices = {each["name"]: each["attributes"]["uuid"]["string"] for each in published["spec"]["devices"]}
            assert list(devices) == [f"gpu-{number}" for number in range(8)]
            assert kubelet.health(DRIVER, "gpu-0", 1) == {"health": 1, "message": ""}
            pod = add_claim(cluster, "gpus", result("gpu-2"), result("gpu-5"))
            for version in SERVICES[:2]:
                prepared = kubelet.prepare(DRIVER, [pod], version)[pod[1]]["devices"]
                assert [each["device_name"] for each in prepared] == ["gpu-2", "gpu-5"]
            registry = read_registry(Settings(cdi_spec_dirs=(f"{root.parent}/cdi",)))
            edits = registry.resolve([name for each in prepared for name in each["cdi_device_ids"]]).edits
            config_json: dict[str, Any] = {"process": {"env": []}, "linux": {}, "mounts": [], "hooks": {}}
            inject(config_json, edits)
            paths = [each["path"] for each in config_json["linux"]["devices"]]
            assert [path for path in paths if path.removeprefix("/dev/nvidia").isdigit()] == [
                "/dev/nvidia2",
                "/dev/nvidia5",
            ]
            assert set(devices.values()) == set(simulated_host.gpus)
            other = add_claim(cluster, "other", result("gpu-5"))
            both = kubelet.prepare(DRIVER, [pod, other])
            assert both[pod[1]]["devices"] == prepared
            assert "OCIGPU-DRA-4" in both[other[1]]["error"]
            assert kubelet.unprepare(DRIVER, [pod, other]) == {pod[1]: {}, other[1]: {}}
            assert not os.listdir(root.parent / "cdi")
            assert driver.end() == 0
            assert cluster.objects("ResourceSlice"), "they stay while the driver is replaced"
