"""The device plugin on hosts with AMD's GPUs, alone and beside NVIDIA's: offered, given, lost and partitioned."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from amd_lab import AmdHost
from kubernetes_lab import configured
from plugin_lab import GPU, MODES, Kubelet, Plugin, apply_response, kubelet, plugin
from support import requirements
from support.product import RUNTIME
from support.runtimes import container_id, run_container, script

from ocigpu.core.actions import Node
from ocigpu.core.errors import HostError, RequestError, SettingsError
from ocigpu.gpus.amd.sampler import sample
from ocigpu.gpus.offer import GenerateOptions
from ocigpu.gpus.tree import find_roots
from ocigpu.gpus.vendors import load_vendor, make_plan, parse_request
from ocigpu.kubernetes.node.devices import PluginDevice, Resource
from ocigpu.kubernetes.node.reading import OtherGpus, read_others
from ocigpu.kubernetes.plugin.allocate import allocate
from ocigpu.kubernetes.plugin.preferred import prefer
from ocigpu.sim.create import create_host

AMD_GPU = "amd.com/gpu"
pytestmark = pytest.mark.root


@pytest.fixture
def amd_host(work_directory: Path) -> AmdHost:
    create_host(str(work_directory / "amd"), 4, "mi300x")
    return AmdHost(work_directory / "amd")


def read(host: AmdHost, **options: str) -> OtherGpus:
    (found,) = read_others(host.settings, configured(**options))
    return found


def only_resource(found: OtherGpus) -> Resource:
    (resource,) = found.inventory.resources
    assert (resource.name, resource.vendor, resource.sharing) == (AMD_GPU, "amd", "none")
    return resource


# what the folder answers


def test_gpus_are_offered_by_their_unique_ids_with_their_numa_nodes(amd_host: AmdHost) -> None:
    found = read(amd_host)
    devices = only_resource(found).devices
    assert [(each.id, each.gpu, each.ordinal, each.numa) for each in devices] == [
        (f"0x{gpu.unique_id:x}", f"0000{gpu.address}", str(index), 2 * index // 4)
        for index, gpu in enumerate(amd_host.gpus)
    ]
    assert devices[1].paths == ("/dev/dri/renderD129",)
    assert not any(each.error for each in devices)
    assert found.gpus.facts.control_nodes[0].container_path == "/dev/kfd"


def test_partitions_are_offered_in_place_of_their_gpu_and_preferred_together(amd_host: AmdHost) -> None:
    amd_host.cut(1, 4)
    found = read(amd_host)
    devices = only_resource(found).devices
    parts = [each for each in devices if each.gpu == "00000000:42:00.0"]
    unique = f"0x{amd_host.gpus[1].unique_id:x}"
    assert [each.id for each in parts] == [f"{unique}:{number}" for number in range(4)]
    assert len(devices) == 7
    scores = found.gpus.scores
    assert set(prefer(devices, [each.id for each in devices], (), 4, scores)) == {each.id for each in parts}
    linked, numa = (devices[0].id, parts[0].id), (parts[0].id, parts[1].id)
    assert scores[linked] == 40, "XGMI and the same NUMA node"
    assert scores[numa] == 50, "the same board and the same NUMA node"
    assert scores[devices[0].id, devices[-1].id] == 30, "XGMI alone"


def test_a_gpu_that_cannot_be_used_is_unhealthy_or_left_out(amd_host: AmdHost) -> None:
    root = amd_host.root / "sys"
    topology = root / "class/kfd/kfd/topology/nodes"
    (path,) = (path for path in topology.iterdir() if "drm_render_minor 130\n" in (path / "properties").read_text())
    shutil.rmtree(path)
    (path,) = (path for path in topology.iterdir() if "drm_render_minor 131\n" in (path / "properties").read_text())
    text = (path / "properties").read_text()
    (path / "properties").write_text("".join(line for line in text.splitlines(True) if "unique_id" not in line))
    shutil.rmtree(root / "bus/pci/devices/0000:41:00.0/drm")
    found = read(amd_host)
    assert found.inventory.notes == ("GPU 3 (0000:43:00.0) left out: it is not in KFD's topology",)
    assert {each.id: each.error for each in only_resource(found).devices} == {
        f"0x{amd_host.gpus[0].unique_id:x}": "",
        "0000:41:00.0": "it has no nodes below /dev/dri",
        "0000:44:00.0": "",  # without a unique id it is called by its address
    }
    (root / "class/kfd/kfd/dev").unlink()
    (amd_host.root / "dev/kfd").unlink()
    errors = [each.error for each in only_resource(read(amd_host)).devices]
    assert sorted(errors) == ["it has no nodes below /dev/dri", *["the host has no /dev/kfd"] * 2]


def test_a_gpu_without_a_unique_id_is_given_by_its_address(amd_host: AmdHost) -> None:
    """As consumers' models are: by variable, by CDI name, and as one of the partitions of a GPU."""
    for path in (amd_host.root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if not line.startswith("unique_id")))
    amd_host.cut(1, 2)
    devices = only_resource(read(amd_host)).devices
    ids = [f"0000:4{number}:00.0{part}" for number, part in ((1, ""), (2, ":0"), (2, ":1"), (3, ""), (4, ""))]
    assert [each.id for each in devices] == ids
    settings = amd_host.settings
    facts = load_vendor("amd").read_now(settings)
    for id_, path in ((ids[0], "renderD128"), (ids[2], devices[2].paths[0]), (ids[4], "renderD131")):
        config = {"process": {"env": [f"AMD_VISIBLE_DEVICES={id_}"]}}
        plan = make_plan(facts, parse_request(config, settings), settings)
        nodes = [each.node.container_path for each in plan.actions if isinstance(each, Node)]
        assert [node for node in nodes if "renderD" in node] == [f"/dev/dri/{path.rpartition('/')[2]}"], id_
        options = GenerateOptions(mode="amd", device_ids=(id_,), name_strategies=("uuid",))
        assert [each.name for each in load_vendor("amd").offer(options, settings).devices] == [id_]
    config = {"process": {"env": ["AMD_VISIBLE_DEVICES=0000:42:00.0"]}}
    assert len(make_plan(facts, parse_request(config, settings), settings).gpus) == 2, "all partitions of a GPU"
    for wrong in ("0000:41:00", "0000:41:00.9", "41.0", "0000:41:00.0:x", "0000:41:00.0:1:2", "zz:41:00.0"):
        with pytest.raises(RequestError, match=r"is not an index|no such device"):
            make_plan(facts, parse_request({"process": {"env": [f"AMD_VISIBLE_DEVICES={wrong}"]}}, settings), settings)


def test_partitions_have_resources_of_their_own_with_strategy_mixed(amd_host: AmdHost) -> None:
    amd_host.cut(1, 8)
    (amd_host.root / "sys/bus/pci/devices/0000:42:00.0/current_memory_partition").write_text("NPS4\n")
    (amd_host.root / "sys/bus/pci/devices/0000:44:00.0/current_memory_partition").write_text("evil/../x\n")
    found = read(amd_host, resource_naming_strategy="mixed")
    assert {each.name: len(each.devices) for each in found.inventory.resources} == {
        "amd.com/spx_nps1": 2, "amd.com/cpx_nps4": 8, AMD_GPU: 1,
    }  # fmt: skip
    assert len(only_resource(read(amd_host)).devices) == 11


@pytest.mark.parametrize(
    ("entry", "counts"),
    [
        ({"name": AMD_GPU, "replicas": 3}, {AMD_GPU: 12}),
        ({"name": AMD_GPU, "replicas": 2, "rename": "gpu.shared", "devices": ["0", "0000:43:00.0"]}, {
            AMD_GPU: 3, "amd.com/gpu.shared": 2,
        }),
        ({"name": "nvidia.com/gpu", "replicas": 3}, {AMD_GPU: 4}),
        ({"name": "amd.com/cpx_nps4", "replicas": 3}, {AMD_GPU: 4}),
    ],
    ids=["all", "some renamed", "another vendor's", "none"],
)  # fmt: skip
def test_gpus_are_shared_as_nvidias_are(amd_host: AmdHost, entry: dict[str, Any], counts: dict[str, int]) -> None:
    (found,) = read_others(amd_host.settings, configured({"sharing": {"timeSlicing": {"resources": [entry]}}}))
    assert {each.name: len(each.devices) for each in found.inventory.resources} == counts


def test_a_container_gets_a_shared_gpu_once(amd_host: AmdHost) -> None:
    entry = {"name": AMD_GPU, "replicas": 2}
    block = {"resources": [entry], "failRequestsGreaterThanOne": True}
    configuration = configured({"sharing": {"timeSlicing": {"resources": [entry]}}})
    (found,) = read_others(amd_host.settings, configuration)
    (resource,) = found.inventory.resources
    uuid = amd_host.gpus[0].unique_id
    ids = [f"0x{uuid:x}::{number}" for number in (0, 1)]
    assert [each.id for each in resource.devices[:2]] == ids
    assert resource.sharing == "time-slicing"
    answer = allocate(resource, ids, found.gpus.facts, configuration, amd_host.settings)
    assert dict(answer.envs) == {"AMD_VISIBLE_DEVICES": f"0x{uuid:x}"}
    configuration = configured({"sharing": {"timeSlicing": block}})
    (found,) = read_others(amd_host.settings, configuration)
    with pytest.raises(RequestError, match="maximum request size for shared resources is 1"):
        allocate(found.inventory.resources[0], ids, found.gpus.facts, configuration, amd_host.settings)


@pytest.mark.parametrize(
    ("sharing", "cause"),
    [
        ({"mps": {"resources": [{"name": AMD_GPU, "replicas": 2}]}}, "MPS is for NVIDIA's GPUs"),
        (
            {"timeSlicing": {"resources": [{"name": AMD_GPU, "replicas": 2, "rename": "nvidia.com/x"}]}},
            "another vendor",
        ),
        ({"timeSlicing": {"resources": [{"name": "amd.com/_", "replicas": 2}]}}, "not a resource name of amd.com"),
        ({"timeSlicing": {"resources": [{"name": "a_b", "replicas": 2}]}}, "not a resource name of nvidia.com"),
    ],
)
def test_sharing_that_there_is_not_is_refused(sharing: dict[str, Any], cause: str) -> None:
    with pytest.raises(SettingsError, match=cause):
        configured({"sharing": sharing})


def make_unreadable(path: Path) -> None:
    """Make a file that is there and cannot be read, also by root."""
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "name",
    [
        "class/kfd/kfd/topology/nodes/2/properties", "class/kfd/kfd/topology/nodes/2/mem_banks/0/properties",
        "class/kfd/kfd/topology/nodes/2/io_links/0/properties", "class/kfd/kfd/dev", "module/amdgpu/version",
        *(f"bus/pci/devices/0000:42:00.0/{file}" for file in (
            "product_name", "current_compute_partition", "available_compute_partition", "numa_node", "device",
            "ras/umc_err_count", "drm/renderD129/dev", "drm/card1/dev", "gpu_busy_percent", "mem_info_vram_total",
        )),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_takes_no_gpu_away(amd_host: AmdHost, name: str) -> None:
    """EPERM while a GPU sleeps, or of KFD without the GPU in the device cgroup: the value is missing, nothing else."""
    before = only_resource(read(amd_host)).devices
    make_unreadable(amd_host.root / "sys" / name)
    settings = amd_host.settings
    vendor = load_vendor("amd")
    after = only_resource(read(amd_host)).devices
    assert {each.id for each in after} == {each.id for each in before}
    assert not any(each.error for each in after)
    assert {each.uuid for each in vendor.read_now(settings).gpus} == {each.id for each in before}
    assert vendor.read_parts
    assert len(vendor.read_parts(settings)) == 4
    assert vendor.read_usage(settings, vendor.read_now(settings))
    assert len(sample(find_roots(settings))["gpus"]) == 4
    assert len(vendor.offer(GenerateOptions(mode="amd", name_strategies=("uuid",)), settings).devices) >= 4


def test_uncorrectable_errors_make_a_gpu_unhealthy(amd_host: AmdHost) -> None:
    (amd_host.root / "sys/bus/pci/devices/0000:42:00.0/ras/umc_err_count").write_text("ue: 2\nce: 7\n")
    (amd_host.root / "sys/bus/pci/devices/0000:43:00.0/ras/umc_err_count").write_text("ue: 0\nce: 99\n")
    (amd_host.root / "sys/bus/pci/devices/0000:44:00.0/ras/gfx_err_count").write_text("nothing\nue: -1\n")
    errors = [each.error for each in only_resource(read(amd_host)).devices]
    assert errors == ["", "uncorrectable errors (RAS): 2 in umc", "", ""]
    parts = load_vendor("amd").read_parts
    assert parts
    assert [part.error for part in parts(amd_host.settings)] == errors
    gpus = sample(find_roots(amd_host.settings))["gpus"]
    assert [gpu["values"]["gpu_health"] for gpu in gpus] == [1, 0, 1, 1]
    assert [gpu["values"]["gpu_ecc_uncorrect_total"] for gpu in gpus] == [0, 2, 0, 0]
    assert gpus[1]["values"]["gpu_ecc_uncorrect_umc"] == 2
    assert gpus[2]["values"]["gpu_ecc_correct_total"] == 99
    assert "gpu_ecc_correct_gfx" not in gpus[3]["values"]


def test_who_wants_nvidias_gpus_alone_gets_these(amd_host: AmdHost) -> None:
    assert read_others(amd_host.settings, configured(device_discovery_strategy="nvml")) == ()
    shutil.rmtree(amd_host.root / "sys/bus/pci/drivers/amdgpu")
    assert read_others(amd_host.settings, configured()) == ()
    read_node = load_vendor("amd").read_node
    assert read_node
    with pytest.raises(HostError, match="amdgpu drives no PCI device"):
        read_node(amd_host.settings)


# what a container is given


def test_what_each_strategy_gives(amd_host: AmdHost) -> None:
    found = read(amd_host)
    resource = only_resource(found)
    first, second = (device.id for device in resource.devices[:2])
    nodes = ["/dev/kfd", "/dev/dri/card0", "/dev/dri/renderD128", "/dev/dri/card1", "/dev/dri/renderD129"]

    def given(strategy: str, *ids: str, **options: str) -> dict[str, object]:
        configuration = configured(device_list_strategy=strategy, **options)
        answer = allocate(resource, ids, found.gpus.facts, configuration, amd_host.settings, "token")
        parts = {
            "envs": dict(answer.envs),
            "annotations": dict(answer.annotations),
            "cdi": [each.name for each in answer.cdi_devices],
            "nodes": [each.container_path for each in answer.devices],
        }
        assert not answer.mounts
        assert all(each.permissions == "rw" for each in answer.devices)
        return {name: value for name, value in parts.items() if value}

    names = [f"k8s.device-plugin.amd.com/gpu={id_}" for id_ in (first, second)]
    both = f"{first},{second}"
    assert given("envvar", second, first) == {"envs": {"AMD_VISIBLE_DEVICES": both}}
    assert given("envvar", second, device_id_strategy="index") == {"envs": {"AMD_VISIBLE_DEVICES": "1"}}
    passed = given("envvar", first, second, pass_device_specs="true")
    assert passed == {"envs": {"AMD_VISIBLE_DEVICES": both}, "nodes": nodes}
    assert given("volume-mounts", first, second) == {"nodes": nodes}
    assert given("cdi-cri", first, second, pass_device_specs="true") == {"cdi": names}
    annotation = {"cdi.k8s.io/amd-device-plugin_token": ",".join(names)}
    assert given("cdi-annotations", first, second) == {"annotations": annotation}
    broken = resource._replace(devices=(PluginDevice("x", "x", "x", "0", error="it fell"),))
    with pytest.raises(HostError, match="is unhealthy: it fell"):
        allocate(broken, ["x"], found.gpus.facts, configured(), amd_host.settings)


# with a kubelet


class Lab(NamedTuple):
    """A node with AMD's GPUs, or two of each vendor; specifications are written beside the kubelet's directory."""

    host: AmdHost
    kubelet: Kubelet
    plugin: Plugin
    settings: Path

    def expect(self, **counts: tuple[int, int]) -> None:
        names = {"amd": AMD_GPU, "nvidia": GPU}
        wanted = {names[name]: list(pair) for name, pair in counts.items()}
        found = self.kubelet.wait_for(wanted, 120)
        assert {name: found.get(name, [0, 0]) for name in wanted} == wanted


@pytest.fixture
def lab(request: pytest.FixtureRequest, work_directory: Path) -> Iterator[Lab]:
    """The parameter: the models, the strategy, and further words for the plugin."""
    models, strategy, *words = request.param
    if "h100" in models:
        requirements.require(requirements.programs("gcc"))
    create_host(str(work_directory / "host"), 2, models, compat32=False)
    host = AmdHost(work_directory / "host")
    settings, directory = work_directory / "config.toml", work_directory / "dp"
    text = (host.root / "config.toml").read_text() + f'[runtime]\nruntimes = ["{requirements.find_program("runc")}"]\n'
    settings.write_text(f'{MODES[strategy]}cdi.spec-dirs = ["{work_directory}/cdi"]\n{text}')
    words = [f"--device-list-strategy={strategy}", *words]
    with kubelet(directory) as kubelets, plugin(settings, directory, *words) as running:
        yield Lab(host, kubelets, running, settings)


ALONE, BOTH = ("mi300x",), ("h100", "mi300x")


@pytest.mark.parametrize("lab", [(ALONE, "envvar")], indirect=True, ids=["alone"])
def test_a_node_of_amds_gpus_alone(lab: Lab) -> None:
    """A GPU that is lost is unhealthy, one that is partitioned is replaced; nothing of NVIDIA is offered."""
    lab.expect(amd=(2, 2))
    assert lab.kubelet.node_status() == {AMD_GPU: [2, 2]}
    assert [path.name for path in lab.plugin.directory.glob("*-*.sock")] == ["amd-gpu.sock"]
    first, second = (f"0x{gpu.unique_id:x}" for gpu in lab.host.gpus)
    assert lab.kubelet.topology(AMD_GPU) == {first: [0], second: [1]}
    assert lab.kubelet.options(AMD_GPU)["preferred"]
    lab.host.cut(1, 2)
    lab.expect(amd=(3, 3))
    assert sorted(lab.kubelet.devices(AMD_GPU)) == sorted([first, f"{second}:0", f"{second}:1"])
    lab.host.lose("0000:41:00.0")
    lab.expect(amd=(3, 2))
    refused = lab.kubelet.answer("allocate", AMD_GPU, [first])["error"]
    assert "is unhealthy: this GPU is gone" in refused


@pytest.mark.rest
@pytest.mark.parametrize("lab", [(BOTH, "envvar")], indirect=True, ids=["both"])
def test_a_silent_nvml_says_nothing_of_another_vendors_gpus(lab: Lab) -> None:
    lab.expect(amd=(2, 2), nvidia=(2, 2))
    assert sorted(path.name for path in lab.plugin.directory.glob("*-*.sock")) == ["amd-gpu.sock", "nvidia-gpu.sock"]
    (lab.host.root / "faults").write_text("init 999\n")
    lab.expect(amd=(2, 2), nvidia=(2, 0))
    lab.host.lose("0000:41:00.0")
    lab.expect(amd=(2, 1), nvidia=(2, 0))
    (lab.host.root / "faults").write_text("")
    lab.expect(amd=(2, 1), nvidia=(2, 2))


NODES = ("envvar", "volume-mounts", "cdi-annotations", "cdi-cri")


@pytest.mark.engine
@pytest.mark.parametrize(
    "lab",
    [*((ALONE, strategy) for strategy in NODES), *((BOTH, strategy) for strategy in NODES if strategy != "cdi-cri")],
    indirect=True,
    ids=[*(f"alone-{strategy}" for strategy in NODES), *(f"both-{strategy}" for strategy in NODES[:3])],
)
def test_a_container_gets_exactly_its_gpus(
    lab: Lab, make_bundle: Callable[..., Path], runtime_environment: dict[str, str]
) -> None:
    both = (lab.host.root / "dev/nvidiactl").exists()
    wanted = {AMD_GPU: 1, **({GPU: 1} if both else {})}
    lab.expect(amd=(2, 2), **({"nvidia": (2, 2)} if both else {}))
    response = lab.kubelet.admit("pod", "main", wanted)
    (id_,) = lab.kubelet.held("pod")[AMD_GPU]
    bundle = make_bundle(
        script(["ls", "/dev"], ["ls", "/dev/dri"]),
        edit=lambda config: apply_response(config, response, lab.settings.parent / "cdi"),
    )
    environment = {**runtime_environment, "OCIGPU_CONFIG": str(lab.settings)}
    done = run_container([RUNTIME], bundle, container_id(), env=environment)
    assert done.returncode == 0, done.stderr
    devices, dri = (part.split() for part in done.stdout.split("@@0\n")[:2])
    (gpu,) = (gpu for gpu in lab.host.gpus if f"0x{gpu.unique_id:x}" == id_)
    of_amd = {node.container_path.rpartition("/")[2]: each for each in lab.host.gpus for node in each.nodes}
    assert sorted(set(dri) & of_amd.keys()) == sorted(name for name, each in of_amd.items() if each == gpu)
    assert both or not set(dri) - of_amd.keys()
    assert "kfd" in devices
    assert sum(name.removeprefix("nvidia").isdigit() for name in devices) == int(both)
    written = sorted(path.name for path in (lab.settings.parent / "cdi").glob("*"))
    kinds = ["k8s.device-plugin.amd.com-gpu.json", *(["k8s.device-plugin.nvidia.com-gpu.json"] if both else [])]
    assert written == (kinds if response["annotations"] or response["cdi_devices"] else [])
    for name in written[:1]:
        spec = json.loads((lab.settings.parent / "cdi" / name).read_text())
        assert spec["kind"] == "k8s.device-plugin.amd.com/gpu"
        assert {each["name"] for each in spec["devices"]} >= {f"0x{gpu.unique_id:x}" for gpu in lab.host.gpus}
