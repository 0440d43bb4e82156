"""AMD's GPUs and partitions for claims: from the slice to a container that has exactly its nodes."""

import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from amd_lab import AmdHost
from dra_lab import NODE, RunningDriver, add_claim, dra_driver, dra_kubelet, result
from support import requirements
from support.cluster import Cluster
from support.process import wait_for
from support.programs import AskedProgram
from support.runtimes import container_id, run_container, script

from ocigpu.bundle.inject import inject
from ocigpu.cdi.registry import read_registry
from ocigpu.core.errors import CdiError, HostError
from ocigpu.core.settings import Settings
from ocigpu.gpus.amd.parts import read_parts
from ocigpu.kubernetes.dra.claims import Allotted, ClaimRef
from ocigpu.kubernetes.dra.devices import DraDevice, DraNode
from ocigpu.kubernetes.dra.fit import PublishedDevice, fit_claim
from ocigpu.kubernetes.dra.slices import Pool, check_device, make_slices
from ocigpu.kubernetes.dra.specs import NodeView, make_claim_spec
from ocigpu.kubernetes.node.config import PluginOptions
from ocigpu.sim.create import create_host
from ocigpu.system.settings_file import read_settings

AMD = "gpu.amd.com"
NAMES = [f"gpu-0000-{bus:02x}-00-0" for bus in range(0x41, 0x45)]


def amd_result(device: str, request: str = "gpu") -> dict[str, Any]:
    return {**result(device, request), "driver": AMD}


@pytest.fixture
def amd_host(work_directory: Path) -> AmdHost:
    create_host(str(work_directory / "amd"), 4, "mi300x")
    return AmdHost(work_directory / "amd")


@pytest.mark.root
def test_a_gpu_that_is_lost_renames_no_other(amd_host: AmdHost) -> None:
    before = amd_host.devices()
    assert [each.name for each in before] == NAMES
    amd_host.lose("0000:42:00.0")
    after = amd_host.devices()
    left = [*before[:1], *before[2:]]
    assert [(each.name, each.board, each.id) for each in after] == [(each.name, each.board, each.id) for each in left]
    assert [each.attributes["uuid"] for each in after] == [each.attributes["uuid"] for each in left]


@pytest.mark.root
def test_a_claim_gets_its_gpu_also_where_others_have_gone_since(amd_host: AmdHost) -> None:
    """The reading of the node is older than what is read for the specification."""
    old, own = amd_host.devices(), {gpu.address: gpu.nodes for gpu in amd_host.gpus}

    def nodes(device: DraDevice) -> set[str]:
        spec = make_claim_spec(
            ClaimRef("team", "uid", "c"),
            [Allotted("gpu", device)],
            AMD,
            NodeView(DraNode(), old, amd_host.settings, PluginOptions()),
        )
        (only,) = spec["devices"]
        assert only["name"] == f"uid-{device.name}"
        return {node["path"] for node in only["containerEdits"]["deviceNodes"]}

    amd_host.lose("0000:41:00.0")
    assert nodes(old[2]) == {node.container_path for node in own["0000:43:00.0"]}
    with pytest.raises(CdiError, match=r"0000:41:00\.0"):
        nodes(old[0])
    amd_host.cut(3)
    with pytest.raises(HostError, match="gpu-0000-44-00-0: it is cut into 8 partitions now"):
        nodes(old[3])


@pytest.mark.root
def test_partitions_have_numbers_and_their_own_capacities(amd_host: AmdHost) -> None:
    amd_host.cut(1)
    devices = amd_host.devices()
    parts = devices[1:9]
    assert [each.name for each in devices] == [NAMES[0], *(f"{NAMES[1]}-{number}" for number in range(8)), *NAMES[2:]]
    whole, last = devices[0], parts[7]
    unique = str(amd_host.gpus[0].unique_id)
    assert whole.attributes == {
        "type": {"string": "amdgpu"},
        "uuid": {"string": f"0x{int(unique):x}"},
        "pciAddr": {"string": "0000:41:00.0"},
        "deviceID": {"string": unique},
        "productName": {"string": "AMD_Instinct_MI300X_OAM"},
        "partitionProfile": {"string": "spx_nps1"},
        "cardIndex": {"int": 0},
        "renderIndex": {"int": 128},
        "driverVersion": {"version": "6.12.12"},
        "resource.kubernetes.io/pciBusID": {"string": "0000:41:00.0"},
        "resource.kubernetes.io/numaNode": {"int": 0},
    }
    assert whole.capacity == {"memory": "196592Mi", "computeUnits": "304", "simdUnits": "1216"}
    said = {name: next(iter(value.values())) for name, value in last.attributes.items()}
    assert (said["type"], said["partition"], said["partitionProfile"]) == ("amdgpu-partition", 7, "cpx_nps1")
    assert (said["parentPciAddr"], said["deviceID"]) == ("0000:42:00.0", said["parentDeviceID"])
    assert "pciAddr" not in said
    assert last.capacity == {"memory": "24574Mi", "computeUnits": "38", "simdUnits": "152"}
    assert not any(check_device(each) for each in devices)
    assert not any(one.conflicts(two) for one in parts for two in parts if one != two)
    before = whole._replace(board=last.board, name=NAMES[1])  # as it was before it was cut
    assert all(before.conflicts(each) for each in parts)
    (published,) = make_slices(devices, Pool(AMD, NODE))
    assert not any("consumesCounters" in each for each in published["devices"])


@pytest.mark.root
@pytest.mark.parametrize("rule", ["matchAttribute", "distinctAttribute"])
def test_the_vendors_examples_with_partitions(amd_host: AmdHost, rule: str) -> None:
    """Two partitions of one GPU, or of two, by the attribute that its examples name."""
    amd_host.cut(1, 2)
    amd_host.cut(3, 2)
    (published,) = make_slices(amd_host.devices(), Pool(AMD, NODE))
    devices = [PublishedDevice(AMD, NODE, NODE, each["name"], each) for each in published["devices"]]
    selector = {"cel": {"expression": f'device.attributes["{AMD}"].type == "amdgpu-partition"'}}
    requests = [{"name": name, "exactly": {"deviceClassName": AMD, "selectors": [selector]}} for name in ("p0", "p1")]
    constraints = [{rule: f"{AMD}/deviceID", "requests": ["p0", "p1"]}]
    classes = {AMD: {"spec": {"selectors": [{"cel": {"expression": f"device.driver == '{AMD}'"}}]}}}
    fits = fit_claim({"devices": {"requests": requests, "constraints": constraints}}, classes, devices, {})
    assert [fit.problem for fit in fits] == ["", ""]
    chosen = [fit.chosen[0].name.rpartition("-")[0] for fit in fits]
    assert chosen == ([NAMES[1]] * 2 if rule == "matchAttribute" else [NAMES[1], NAMES[3]])


def test_what_the_kernel_does_not_say_is_left_out(tmp_path: Path) -> None:
    create_host(str(tmp_path / "amd"), 1, "mi300x", nodes=False)
    root = tmp_path / "amd/sys"
    for name in ("current_memory_partition", "product_name"):
        (root / "bus/pci/devices/0000:41:00.0" / name).unlink()
    (root / "module/amdgpu/version").unlink()
    shutil.rmtree(root / "class/kfd/kfd/topology/nodes/1")
    (part,) = read_parts(read_settings(str(tmp_path / "amd/config.toml")))
    assert sorted(part.attributes) == ["cardIndex", "pciAddr", "renderIndex", "type", "uuid"]
    assert part.capacity == {}


# with the whole driver


class Running(NamedTuple):
    """A node of AMD's with its driver, its kubelet and the cluster's API server."""

    host: AmdHost
    cluster: Cluster
    kubelet: AskedProgram
    driver: RunningDriver
    place: Path

    def published(self) -> dict[str, Any]:
        (found,) = self.cluster.objects("ResourceSlice")
        assert (found["spec"]["driver"], found["spec"]["nodeName"]) == (AMD, NODE)
        return {each["name"]: each for each in found["spec"]["devices"]}


@pytest.fixture
def running(session_directory: Path) -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="a", dir=session_directory) as name, Cluster() as cluster:
        place = Path(name)
        create_host(str(place / "host"), 4, "mi300x")
        cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})
        config = f"--kubeconfig={cluster.write_kubeconfig(place / 'kubeconfig')}"
        with dra_kubelet(place / "k") as kubelet, dra_driver(place / "host/config.toml", place / "k", config) as driver:
            (found,) = kubelet.find()
            assert found["name"] == AMD, "the vendor whose driver the host has"
            driver.wait_for_log("published 4 devices")
            yield Running(AmdHost(place / "host"), cluster, kubelet, driver, place)


@pytest.mark.root
@pytest.mark.engine
def test_a_claims_container_has_exactly_its_gpus(
    running: Running, make_bundle: Callable[..., Path], runtime_environment: dict[str, str]
) -> None:
    assert list(running.published()) == NAMES
    running.host.cut(2)
    running.driver.child.send_signal(signal.SIGHUP)
    running.driver.wait_for_log("published 11 devices")
    wanted = (NAMES[1], f"{NAMES[2]}-5")
    ref = add_claim(running.cluster, "pair", *(amd_result(name, f"r{n}") for n, name in enumerate(wanted)))
    devices = running.kubelet.prepare(AMD, [ref])[ref[1]]["devices"]
    ids = [id_ for each in devices for id_ in each["cdi_device_ids"]]
    edits = read_registry(Settings(cdi_spec_dirs=(f"{running.place}/cdi",))).resolve(ids).edits
    look = script(["ls", "/dev/dri"], ["ls", "/dev/kfd"])
    bundle = make_bundle(look, edit=lambda document: inject(document, edits))
    done = run_container([str(requirements.find_program("runc"))], bundle, container_id(), env=runtime_environment)
    assert done.returncode == 0, done.stderr
    chosen = [
        gpu for gpu in running.host.gpus if (gpu.address, gpu.partition) in (("0000:42:00.0", -1), ("0000:43:00.0", 5))
    ]
    own = {node.container_path.rpartition("/")[2] for gpu in chosen for node in gpu.nodes}
    listed, kfd = done.stdout.split("@@0\n")[:2]
    assert set(listed.split()) == own
    assert len(own) == 4
    assert kfd.split() == ["/dev/kfd"]
    assert running.kubelet.unprepare(AMD, [ref]) == {ref[1]: {}}
    assert not list((running.place / "cdi").iterdir())


@pytest.mark.root
def test_a_gpu_without_nodes_is_tainted_and_one_that_is_lost_is_gone(running: Running) -> None:
    ref = add_claim(running.cluster, "last", amd_result(NAMES[3]))
    assert "error" not in running.kubelet.prepare(AMD, [ref])[ref[1]]
    shutil.rmtree(running.host.root / "sys/bus/pci/devices/0000:43:00.0/drm")
    running.driver.child.send_signal(signal.SIGHUP)
    running.driver.wait_for_log("published 4 devices: 1 slices made, 1 removed")
    tainted = {name: each["taints"][0]["key"] for name, each in running.published().items() if each.get("taints")}
    assert tainted == {NAMES[2]: f"{AMD}/gpu-lost"}
    running.host.lose("0000:41:00.0")
    running.driver.child.send_signal(signal.SIGHUP)
    running.driver.wait_for_log("published 3 devices")
    assert list(running.published()) == NAMES[1:]
    other = add_claim(running.cluster, "other", amd_result(NAMES[3]))
    assert "in use by claim team/last" in running.kubelet.prepare(AMD, [other])[other[1]]["error"]
    assert running.kubelet.unprepare(AMD, [ref]) == {ref[1]: {}}
    assert "error" not in running.kubelet.prepare(AMD, [other])[other[1]]


@pytest.mark.rest
@pytest.mark.root
def test_nobody_waits_for_an_api_server_that_is_slow(running: Running) -> None:
    """The kubelet hears of health, and claims are prepared, while the slices take as long as they like."""
    with running.cluster.stall("/resourceslices"):
        running.driver.child.send_signal(signal.SIGHUP)
        wait_for("a request that takes long", lambda: running.cluster.stalled)
        shutil.rmtree(running.host.root / "sys/bus/pci/devices/0000:43:00.0/drm")
        running.driver.child.send_signal(signal.SIGHUP)
        assert running.kubelet.health(AMD, NAMES[2], 2)["message"] == "it has no nodes below /dev/dri"
        ref = add_claim(running.cluster, "gpu", amd_result(NAMES[0]))
        assert "error" not in running.kubelet.prepare(AMD, [ref])[ref[1]]
        assert running.kubelet.unprepare(AMD, [ref]) == {ref[1]: {}}
        assert running.cluster.stalled == 1, "it still is that request"
    running.driver.wait_for_log("published 4 devices: 1 slices made, 1 removed")
