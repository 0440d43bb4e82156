"""The DRA driver and a kubelet: registration over real sockets, what works without a driver or an API server."""

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import exporter_lab
import pytest
from dra_lab import DRIVER, NODE, add_claim, dra_driver, dra_kubelet, opaque, result
from mps_lab import make_mps_host
from support.cluster import Cluster
from support.process import wait_for
from support.product import SimulatedHost

from ocigpu.bundle.inject import inject
from ocigpu.cdi.registry import read_registry
from ocigpu.core.errors import HostError
from ocigpu.core.settings import Settings
from ocigpu.kubernetes.dra.driver import DraDriver, DraTiming
from ocigpu.kubernetes.dra.options import parse_options
from ocigpu.kubernetes.dra.state import ClaimStore
from ocigpu.kubernetes.dra.status import DriverStatus, parse_status

pytestmark = pytest.mark.root
UNKNOWN = ["team", "3f2a0a4e-0000-4000-8000-000000000001", "gpus"]
SERVICES = ["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"]


@pytest.fixture
def root(work_directory: Path) -> Iterator[Path]:
    """A kubelet's directory whose path is as short as a real one's: sockets are in it."""
    parent = Path(tempfile.mkdtemp(prefix="k", dir=work_directory.parent))
    yield parent / "k"
    shutil.rmtree(parent)


@pytest.mark.rest
def test_without_driver_and_api_server_claims_are_given_back(root: Path) -> None:
    """After a reboot pods end only if their claims can be given back, whatever else does not exist yet."""
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


def test_nobody_waits_for_a_driver_that_ends(root: Path) -> None:
    """A claim that needs another reading of the node fails at once; the next driver prepares it."""
    words = ("--node-name=n", f"--plugins-directory={root}/plugins")
    driver = DraDriver(parse_options(words, {}), Settings(), timing=DraTiming(stop=3600.0))
    with driver.signals, ThreadPoolExecutor(2) as pool:
        view, again = pool.submit(driver.node_view), pool.submit(driver.read_again)
        driver.end_readings()
        assert view.result(60) is None
        with pytest.raises(HostError, match="could not be read again"):
            again.result(60)


def test_a_node_that_cannot_be_read_keeps_nobody_waiting_for_long(root: Path) -> None:
    """Each step of each claim that is given back would wait, one after the other, for longer than the kubelet does."""
    words = ("--node-name=n", f"--plugins-directory={root}/plugins")
    driver = DraDriver(parse_options(words, {}), Settings(), timing=DraTiming(stop=3600.0))
    driver.started_at -= 2 * 3600.0
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(driver.node_view)
        try:
            assert waiting.result(60) is None
        finally:
            driver.end_readings()


def test_two_threads_that_need_the_api_server_first_have_one_client(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)

    def opened(_path: str) -> object:
        with suppress(threading.BrokenBarrierError):  # the other one waits outside
            both.wait(0.5)
        return object()

    monkeypatch.setattr("ocigpu.kubernetes.dra.driver.open_cluster", opened)
    driver = DraDriver(parse_options(("--node-name=n", f"--plugins-directory={root}/plugins"), {}), Settings())
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.submit(driver.open_api), pool.submit(driver.open_api)
        assert one.result(60) is two.result(60)


@pytest.mark.rest
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


@pytest.mark.rest
def test_the_next_driver_takes_over_what_is_prepared(root: Path) -> None:
    """Also control daemons of MPS: there is one at every moment after, where the claim's containers look for it."""
    node = make_mps_host(root.parent / "host")
    program, told = node.directory / "usr/bin/nvidia-cuda-mps-control", node.directory / "usr/bin/mps-told"
    mode = node.directory / "compute-mode.0"
    config = [opaque("GpuConfig", sharing={"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 30}})]
    with Cluster() as cluster, dra_kubelet(root) as kubelet:
        cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})
        words = (
            f"--kubeconfig={cluster.write_kubeconfig(root.parent / 'kubeconfig')}",
            f"--mps-root={root.parent}/mps",
        )
        with dra_driver(node.settings, root, "--pod-uid=one", *words) as old:
            kubelet.find()
            ref = add_claim(cluster, "shared", result("gpu-0"), config=config)
            prepared = kubelet.prepare(DRIVER, [ref])
            pipe = root.parent / f"mps/claims/{ref[1]}-0/pipe"
            before = pipe.stat().st_ino
            with dra_driver(node.settings, root, "--pod-uid=two", *words):
                kubelet.find(60, 2)
                wait_for("another control daemon", lambda: told.read_text().count("start ") == 2)
                wait_for("its limits", lambda: told.read_text().endswith("percentage 30\n"))
                assert old.end() == 0
                kubelet.find()
                assert kubelet.prepare(DRIVER, [ref]) == prepared
                assert pipe.stat().st_ino == before, "what containers have mounted"
                environment = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(pipe)}
                question = "get_default_active_thread_percentage\n"
                done = subprocess.run(
                    [program], input=question, capture_output=True, text=True, env=environment, check=True
                )
                assert done.stdout == "30.0\n"
                assert mode.read_text() == "3"
                assert kubelet.unprepare(DRIVER, [ref]) == {ref[1]: {}}
                assert mode.read_text() == "0"
                assert not os.listdir(root.parent / "mps/claims")


@pytest.mark.rest
def test_a_claim_that_is_replaced_an_administrator_and_a_reboot(root: Path, simulated_host: SimulatedHost) -> None:
    """By the kubelet's protocol and the API server's objects, from one driver to the next."""
    with Cluster() as cluster, dra_kubelet(root) as kubelet:
        cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})
        words = (f"--kubeconfig={cluster.write_kubeconfig(root.parent / 'kubeconfig')}", f"--pods-socket={root}/none")
        with dra_driver(simulated_host.settings, root, *words) as driver:
            kubelet.find()
            first = add_claim(cluster, "gpus", result("gpu-2"))
            (given,) = kubelet.prepare(DRIVER, [first])[first[1]]["devices"]
            cluster.delete("ResourceClaim", "gpus", "team")
            second = add_claim(cluster, "gpus", result("gpu-2"))
            assert "in use by claim team/gpus" in kubelet.prepare(DRIVER, [second])[second[1]]["error"]
            assert kubelet.prepare(DRIVER, [first])[first[1]]["devices"] == [given], "its pod has it still"
            assert kubelet.unprepare(DRIVER, [first]) == {first[1]: {}}
            assert "it was replaced by another one" in kubelet.prepare(DRIVER, [first])[first[1]]["error"]
            (other,) = kubelet.prepare(DRIVER, [second])[second[1]]["devices"]
            assert other["cdi_device_ids"] != given["cdi_device_ids"], "engines keep what they have read"
            admin = add_claim(cluster, "monitor", result("gpu-2", adminAccess=True), result("gpu-3", adminAccess=True))
            seen = kubelet.prepare(DRIVER, [admin])[admin[1]]["devices"]
            assert [each["device_name"] for each in seen] == ["gpu-2", "gpu-3"]
            third = add_claim(cluster, "third", result("gpu-3"))
            assert "error" not in kubelet.prepare(DRIVER, [third])[third[1]], "who looks on keeps nobody out"
            assert driver.end() == 0
        store = ClaimStore(f"{root}/plugins/{DRIVER}")
        records = {each.claim.uid: each for each in store.prepared()}
        assert set(records) == {second[1], admin[1], third[1]}
        ClaimStore(store.directory, "the boot before").write(records)
        away = f"--kubeconfig={root.parent}/none"
        with dra_driver(simulated_host.settings, root, away) as driver:
            kubelet.find()
            driver.wait_for_log("the machine was restarted: 3 earlier claims are no longer prepared")
            assert kubelet.unprepare(DRIVER, [admin, third]) == {admin[1]: {}, third[1]: {}}, "without an API server"
            wait_for("the files' end", lambda: not os.listdir(root.parent / "cdi"))
            assert driver.end() == 0
        with dra_driver(simulated_host.settings, root, *words):
            kubelet.find()
            assert kubelet.prepare(DRIVER, [second])[second[1]]["devices"] == [other], "its pod's sandbox is made again"


@pytest.mark.rest
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
    listing = exporter_lab.kubelet(root.parent, ())
    with Cluster() as cluster, dra_kubelet(root) as kubelet, listing as (pods_socket, pods):
        cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})
        config = cluster.write_kubeconfig(root.parent / "kubeconfig")
        words = (f"--kubeconfig={config}", f"--pods-socket={pods_socket}", "--http-endpoint=127.0.0.1:0")
        with dra_driver(simulated_host.settings, root, *words) as driver:
            kubelet.find()
            driver.wait_for_log("published 8 devices")
            (port,) = [line.rpartition(" ")[2] for line in driver.log if line.startswith("metrics on port ")]
            (published,) = cluster.objects("ResourceSlice")
            devices = {each["name"]: each["attributes"]["uuid"]["string"] for each in published["spec"]["devices"]}
            assert list(devices) == [f"gpu-{number}" for number in range(8)]
            status = root / f"plugins/{DRIVER}/status.json"
            known = DriverStatus(DRIVER, NODE, registered=True)
            wait_for("the driver's status", lambda: status.exists() and parse_status(status.read_text()) == known)
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
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
                page = exporter_lab.read_page(response.read().decode())
            assert exporter_lab.value(page, "nvidia_dra_requests_total", operation="prepare") == 3
            assert exporter_lab.value(page, "nvidia_dra_request_duration_seconds_count", operation="prepare") == 3
            assert exporter_lab.value(page, "nvidia_dra_requests_total", operation="unprepare") == 0
            assert exporter_lab.value(page, "nvidia_dra_node_prepare_errors_total", error_type="OCIGPU-DRA-4") == 1
            assert exporter_lab.value(page, "nvidia_dra_prepared_devices", device_type="gpu", node=NODE) == 2
            assert exporter_lab.value(page, "ocigpu_dra_published_devices", driver=DRIVER) == 8
            assert kubelet.unprepare(DRIVER, [pod, other]) == {pod[1]: {}, other[1]: {}}
            assert not os.listdir(root.parent / "cdi")
            assert "error" not in kubelet.prepare(DRIVER, [other])[other[1]]
            exporter_lab.write_pods(pods, claims=[["team", "pod", "main", "other", DRIVER, NODE, "gpu-5", []]])
            cluster.delete("ResourceClaim", other[2], "team")
            driver.wait_for_log("a pod still has its devices")
            exporter_lab.write_pods(pods)
            wait_for("the vanished claim's end", lambda: not os.listdir(root.parent / "cdi"))
            assert driver.end() == 0
            assert cluster.objects("ResourceSlice"), "they stay while the driver is replaced"
