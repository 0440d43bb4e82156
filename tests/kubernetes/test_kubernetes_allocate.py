"""What a container is given: every strategy, sharing, and errors of one line."""

from typing import Any

import pytest
from kubernetes_lab import configured, host, inventory, shared
from support.allocation import DeviceSpec, PluginMount, Response, allocate
from support.asking import request_from_variables

from ocigpu.core.actions import AllowDevice, Node
from ocigpu.core.errors import OcigpuError
from ocigpu.core.facts import DeviceNode, FeatureNodes, HostFacts
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.plan import make_plan
from ocigpu.kubernetes.node.config import Configuration, PluginOptions
from ocigpu.kubernetes.node.devices import PluginDevice, Resource, make_inventory
from ocigpu.kubernetes.plugin.allocate import host_path, usable_channels

A100 = host("a100-8")
IMEX = host("h100-4-imex")
MIG = host("h100-8-mig")
GDS = A100._replace(
    features=(
        FeatureNodes("gds", (DeviceNode("/dev/nvidia-fs0", "/dev/nvidia-fs0", 237, 0),)),
        FeatureNodes("gdrcopy", (DeviceNode("/dev/gdrdrv", "/dev/gdrdrv", 238, 0),)),
        FeatureNodes("mofed", ()),
    )
)
GPU = {"name": "gpu", "replicas": 2}
LIST = "/var/run/nvidia-container-devices"
KIND = "k8s.device-plugin.nvidia.com"
DIRECTORY_ENV = {"NVIDIA_VISIBLE_DEVICES": LIST}


def uuids(*indices: int, facts: HostFacts = A100) -> list[str]:
    return [facts.gpus[index].uuid for index in indices]


def resource(facts: HostFacts, configuration: Configuration, name: str = "gpu") -> Resource:
    found = {each.name: each for each in make_inventory(facts, configuration).resources}
    return found[f"nvidia.com/{name}"]


def give(
    ids: list[str], facts: HostFacts = A100, file: dict[str, Any] | None = None, name: str = "gpu", **environment: str
) -> Response:
    configuration = configured(file, environment)
    return allocate(resource(facts, configuration, name), ids, facts, configuration, Settings(), "T")


def refusal(ids: list[str], facts: HostFacts = A100, file: dict[str, Any] | None = None, **environment: str) -> str:
    with pytest.raises(OcigpuError) as caught:
        give(ids, facts, file, **environment)
    assert caught.value.code == "OCIGPU-KUBE-2"
    assert "\n" not in caught.value.message
    return caught.value.message.removeprefix('invalid allocation request for "nvidia.com/gpu": ')


TWO = uuids(2, 0)
SORTED = ",".join(uuids(0, 2))
NAMES = tuple(f"{KIND}/gpu={uuid}" for uuid in uuids(0, 2))
ANNOTATION = {"cdi.k8s.io/nvidia-device-plugin_T": ",".join(NAMES)}
MOUNTS = tuple(PluginMount(f"{LIST}/{uuid}", "/dev/null") for uuid in uuids(0, 2))

STRATEGIES: dict[str, Response] = {
    "envvar": Response({"NVIDIA_VISIBLE_DEVICES": SORTED}),
    "volume-mounts": Response(DIRECTORY_ENV, MOUNTS),
    "cdi-annotations": Response(annotations=ANNOTATION),
    "cdi-cri": Response(cdi_devices=NAMES),
    "envvar,volume-mounts": Response(DIRECTORY_ENV, MOUNTS),
    "envvar,cdi-cri": Response({"NVIDIA_VISIBLE_DEVICES": SORTED}, cdi_devices=NAMES),
    "cdi-annotations,cdi-cri": Response(annotations=ANNOTATION, cdi_devices=NAMES),
    "envvar,volume-mounts,cdi-annotations,cdi-cri": Response(DIRECTORY_ENV, MOUNTS, (), ANNOTATION, NAMES),
}


@pytest.mark.parametrize(("strategy", "expected"), STRATEGIES.items(), ids=STRATEGIES.keys())
def test_strategies(strategy: str, expected: Response) -> None:
    assert give(TWO, DEVICE_LIST_STRATEGY=strategy) == expected


def test_devices_by_index() -> None:
    strategies = "envvar,volume-mounts,cdi-cri"
    found = give(TWO, DEVICE_ID_STRATEGY="index", DEVICE_LIST_STRATEGY=strategies)
    assert found.mounts == (PluginMount(f"{LIST}/0", "/dev/null"), PluginMount(f"{LIST}/2", "/dev/null"))
    assert found.cdi_devices == (f"{KIND}/gpu=0", f"{KIND}/gpu=2")
    assert give(TWO, DEVICE_ID_STRATEGY="index").envs == {"NVIDIA_VISIBLE_DEVICES": "0,2"}


def test_mig_devices() -> None:
    configuration = configured(mig_strategy="mixed")
    found = next(each for each in make_inventory(MIG, configuration).resources if each.devices[0].instance)
    device = found.devices[0]
    assert allocate(found, [device.id], MIG, configuration, Settings()).envs == {"NVIDIA_VISIBLE_DEVICES": device.uuid}
    by_index = configured(None, {"DEVICE_ID_STRATEGY": "index"}, mig_strategy="mixed")
    assert allocate(found, [device.id], MIG, by_index, Settings()).envs == {"NVIDIA_VISIBLE_DEVICES": device.ordinal}


def test_the_prefix_of_annotations_can_be_chosen_and_each_has_a_name_of_its_own() -> None:
    environment = {"DEVICE_LIST_STRATEGY": "cdi-annotations", "CDI_ANNOTATION_PREFIX": "cdi.example.com/"}
    configuration = configured(None, environment)
    found = [
        next(iter(allocate(resource(A100, configuration), TWO, A100, configuration, Settings()).annotations))
        for _ in range(2)
    ]
    assert found[0] != found[1]
    assert all(name.startswith("cdi.example.com/nvidia-device-plugin_") for name in found)


# --- device specs: what the shim would make


def shim_nodes(facts: HostFacts, devices: str, **variables: str) -> tuple[DeviceSpec, ...]:
    request = request_from_variables({"NVIDIA_VISIBLE_DEVICES": devices, **variables}, Settings())
    actions = make_plan(facts, request, Settings()).actions
    rules = {(rule.major, rule.minor): rule.access for rule in actions if isinstance(rule, AllowDevice)}
    return tuple(
        DeviceSpec(action.node.container_path, action.node.host_path, rules[action.node.major, action.node.minor])
        for action in actions
        if isinstance(action, Node) and action.node.host_path
    )


@pytest.mark.parametrize("name", ["a100-8", "l4-2-drm", "h100-4-imex"])
def test_device_specs_are_the_nodes_that_a_container_of_docker_gets(name: str) -> None:
    facts = host(name)
    found = give(uuids(1, facts=facts), facts, PASS_DEVICE_SPECS="1")
    assert found.envs == {"NVIDIA_VISIBLE_DEVICES": facts.gpus[1].uuid}
    assert found.devices == shim_nodes(facts, facts.gpus[1].uuid)
    assert {spec.permissions for spec in found.devices} == {"rw"}
    paths = {spec.container_path for spec in found.devices}
    assert {"/dev/nvidiactl", "/dev/nvidia1"} <= paths
    assert "/dev/nvidia0" not in paths


def test_device_specs_of_a_mig_device() -> None:
    configuration = configured(None, {"PASS_DEVICE_SPECS": "1"}, mig_strategy="mixed")
    found = next(each for each in make_inventory(MIG, configuration).resources if each.devices[0].instance)
    device = found.devices[0]
    specs = allocate(found, [device.id], MIG, configuration, Settings()).devices
    assert specs == shim_nodes(MIG, device.uuid)
    assert set(device.paths) <= {spec.container_path for spec in specs}


def test_device_specs_of_opt_in_parts_and_channels() -> None:
    found = give(uuids(0), GDS, PASS_DEVICE_SPECS="1", GDS_ENABLED="1")
    assert found.devices == shim_nodes(GDS, A100.gpus[0].uuid, NVIDIA_GDS="enabled")
    assert found.devices[-1] == DeviceSpec("/dev/nvidia-fs0", "/dev/nvidia-fs0", "rw")
    found = give(uuids(0, facts=IMEX), IMEX, PASS_DEVICE_SPECS="1", IMEX_CHANNEL_IDS="0")
    assert found.devices == shim_nodes(IMEX, IMEX.gpus[0].uuid, NVIDIA_IMEX_CHANNELS="0")


@pytest.mark.parametrize(
    ("strategy", "given"), [("cdi-cri", False), ("cdi-cri,cdi-annotations", False), ("cdi-cri,envvar", True)]
)
def test_with_cdi_alone_there_are_no_device_specs(strategy: str, given: bool) -> None:
    assert bool(give(TWO, PASS_DEVICE_SPECS="1", DEVICE_LIST_STRATEGY=strategy).devices) is given


def test_settings_of_the_shim_about_containers_do_not_matter() -> None:
    configuration = configured(None, {"PASS_DEVICE_SPECS": "1"})
    settings = Settings(mode="cdi", accept_nvidia_visible_devices_envvar_when_unprivileged=False)
    found = allocate(resource(A100, configuration), TWO, A100, configuration, settings)
    assert found.devices == shim_nodes(A100, SORTED)


def test_a_node_that_is_missing_is_an_error_only_where_it_is_indispensable() -> None:
    gone = tuple(
        node._replace(host_path="") if node.container_path == "/dev/nvidia-uvm-tools" else node
        for node in A100.control_nodes
    )
    found = give(uuids(0), A100._replace(control_nodes=gone), PASS_DEVICE_SPECS="1")
    assert "/dev/nvidia-uvm-tools" not in {spec.container_path for spec in found.devices}
    node = A100.gpus[0].node
    assert node is not None
    first = A100.gpus[0]._replace(node=node._replace(host_path=""))
    broken = A100._replace(gpus=(first, *A100.gpus[1:]))
    assert refusal(uuids(0), broken, PASS_DEVICE_SPECS="1") == "the host has no device node /dev/nvidia0"
    assert give(uuids(1), broken, PASS_DEVICE_SPECS="1").devices


@pytest.mark.parametrize(
    ("path", "options", "expected"),
    [
        ("/dev/nvidia0", PluginOptions(), "/dev/nvidia0"),
        ("/driver-root/dev/nvidia0", PluginOptions(), "/dev/nvidia0"),
        ("/driver-root/dev/nvidia0", PluginOptions(driver_root="/run/nvidia/driver"), "/run/nvidia/driver/dev/nvidia0"),
        ("/driver-root/dev/nvidia0", PluginOptions(driver_root="/run/nvidia/driver", dev_root="/"), "/dev/nvidia0"),
        ("/driver-rooted/dev/nvidia0", PluginOptions(driver_root="/x"), "/driver-rooted/dev/nvidia0"),
        ("/d/dev/a", PluginOptions(container_driver_root="/d/", driver_root="/h/"), "/h/dev/a"),
    ],
)
def test_nodes_are_named_by_where_the_host_has_them(path: str, options: PluginOptions, expected: str) -> None:
    assert host_path(path, options) == expected


# --- opt-in parts, IMEX


@pytest.mark.parametrize("strategy", ["envvar", "cdi-cri"])
def test_opt_in_parts(strategy: str) -> None:
    everything = {"GDS_ENABLED": "1", "GDRCOPY_ENABLED": "1", "MOFED_ENABLED": "1"}
    found = give(uuids(0), GDS, DEVICE_LIST_STRATEGY=strategy, **everything)
    wanted = {"NVIDIA_GDS": "enabled", "NVIDIA_GDRCOPY": "enabled", "NVIDIA_MOFED": "enabled"}
    assert wanted.items() <= found.envs.items()
    parts = found.cdi_devices[1:]
    assert parts == ((f"{KIND}/gdrcopy=all", f"{KIND}/gds=all") if strategy == "cdi-cri" else ())


def test_imex_channels_are_in_every_way_of_asking() -> None:
    every = "envvar,volume-mounts,cdi-annotations,cdi-cri"
    gpu = uuids(0, facts=IMEX)
    found = give(gpu, IMEX, IMEX_CHANNEL_IDS="0", DEVICE_LIST_STRATEGY=every)
    assert found.envs == {**DIRECTORY_ENV, "NVIDIA_IMEX_CHANNELS": "0"}
    assert found.mounts == (PluginMount(f"{LIST}/{gpu[0]}", "/dev/null"), PluginMount(f"{LIST}/imex/0", "/dev/null"))
    assert found.cdi_devices == (f"{KIND}/gpu={gpu[0]}", f"{KIND}/imex-channel=0")


def test_a_missing_imex_channel_is_left_out_unless_it_is_required() -> None:
    assert "NVIDIA_IMEX_CHANNELS" not in give(uuids(0), IMEX_CHANNEL_IDS="0").envs
    assert usable_channels(A100, PluginOptions(imex_channel_ids=(0,)))[1] == (
        "IMEX channel 0: this host has no node for it",
    )
    message = "IMEX channel 0: this host has no node for it, and imex.required is set"
    assert refusal(uuids(0), IMEX_CHANNEL_IDS="0", IMEX_REQUIRED="1") == message


def test_no_devices() -> None:
    assert give([], DEVICE_LIST_STRATEGY="cdi-cri") == Response()
    found = give([], IMEX, DEVICE_LIST_STRATEGY="cdi-cri", IMEX_CHANNEL_IDS="0")
    assert found == Response(cdi_devices=(f"{KIND}/imex-channel=0",))
    assert give([]).envs == {"NVIDIA_VISIBLE_DEVICES": "void"}
    assert give([], PASS_DEVICE_SPECS="1", DEVICE_LIST_STRATEGY="volume-mounts") == Response()


# --- sharing


def test_two_replicas_of_a_gpu_are_the_gpu_once() -> None:
    one, two = uuids(1, 0)
    found = give([f"{one}::0", f"{two}::1", f"{one}::1", f"{one}::0"], file=shared(GPU))
    assert found.envs == {"NVIDIA_VISIBLE_DEVICES": f"{two},{one}"}


@pytest.mark.parametrize("strategy", ["timeSlicing", "mps"])
def test_more_than_one_replica_can_be_refused(strategy: str) -> None:
    file = shared(GPU, strategy=strategy, failRequestsGreaterThanOne=True)
    ids = [f"{uuid}::0" for uuid in uuids(0, 1)]
    assert refusal(ids, file=file) == "maximum request size for shared resources is 1; found 2"
    assert give(ids[:1], file=file).envs["NVIDIA_VISIBLE_DEVICES"] == A100.gpus[0].uuid
    partly = shared({**GPU, "devices": [0]}, strategy=strategy, failRequestsGreaterThanOne=True)
    assert give(uuids(1, 2), file=partly).envs["NVIDIA_VISIBLE_DEVICES"] == ",".join(uuids(1, 2))


@pytest.mark.parametrize("strategy", ["envvar", "cdi-cri"])
def test_a_client_of_mps_gets_its_directories(strategy: str) -> None:
    file = shared(GPU, strategy="mps", renameByDefault=True)
    found = give([f"{A100.gpus[0].uuid}::1"], file=file, name="gpu.shared", DEVICE_LIST_STRATEGY=strategy)
    assert found.envs["CUDA_MPS_PIPE_DIRECTORY"] == "/mps/nvidia.com/gpu.shared/pipe"
    base = "/run/nvidia/mps/nvidia.com/gpu.shared"
    assert found.mounts == (
        PluginMount("/mps/nvidia.com/gpu.shared/pipe", f"{base}/pipe"),
        PluginMount("/dev/shm", f"{base}/shm"),
    )


def test_a_gpu_that_is_not_shared_needs_no_mps() -> None:
    file = shared({**GPU, "devices": [0]}, strategy="mps")
    assert give(uuids(1), file=file) == Response({"NVIDIA_VISIBLE_DEVICES": A100.gpus[1].uuid})


# --- refusals


def test_refusals_are_one_line_with_the_resource_and_the_device() -> None:
    assert refusal(["GPU-old"]) == 'unknown device: "GPU-old"'
    assert refusal([*uuids(0), "a", "b\n"]) == 'unknown device: "a" and 1 more'
    assert refusal([f"{A100.gpus[0].uuid}::0"]) == f'unknown device: "{A100.gpus[0].uuid}::0"'
    assert refusal(uuids(0), file=shared(GPU)) == f'unknown device: "{A100.gpus[0].uuid}"'
    lost = A100._replace(gpus=(A100.gpus[0]._replace(error="GPU is lost (NVML 15)"), *A100.gpus[1:]))
    assert refusal(uuids(0), lost) == f"device {A100.gpus[0].uuid} is unhealthy: GPU is lost (NVML 15)"
    assert give(uuids(1), lost).envs == {"NVIDIA_VISIBLE_DEVICES": A100.gpus[1].uuid}


# --- virtual machines, WSL

MACHINES = Resource(
    "nvidia.com/GH100.X-1",
    tuple(
        PluginDevice(key, key, f"0000:{key}:00.0", key, ("/dev/vfio/vfio", f"/dev/vfio/{key}")) for key in ("9", "112")
    ),
    "vfio",
)


def test_a_virtual_machine_gets_the_nodes_of_its_groups() -> None:
    found = allocate(MACHINES, ["112", "9"], HostFacts(), configured(), Settings())
    paths = ["/dev/vfio/vfio", "/dev/vfio/9", "/dev/vfio/112"]
    addresses = {"PCI_RESOURCE_NVIDIA_COM_GH100_X-1": "0000:9:00.0,0000:112:00.0"}
    assert found == Response(addresses, devices=tuple(DeviceSpec(path, path, "mrw") for path in paths))


def test_a_virtual_machine_may_be_told_by_cdi() -> None:
    configuration = configured(None, {"DEVICE_LIST_STRATEGY": "cdi-cri"})
    found = allocate(MACHINES, ["112"], HostFacts(), configuration, Settings())
    addresses = {"PCI_RESOURCE_NVIDIA_COM_GH100_X-1": "0000:112:00.0"}
    assert found == Response(addresses, cdi_devices=("nvidia.com/GH100.X-1=112",))
    with pytest.raises(OcigpuError, match='unknown device: "113"'):
        allocate(MACHINES, ["113"], HostFacts(), configuration, Settings())


def test_under_wsl_the_one_node_is_given() -> None:
    configuration = configured(None, {"PASS_DEVICE_SPECS": "1"})
    facts = HostFacts(gpus=tuple(gpu._replace(node=None) for gpu in A100.gpus))
    (found,) = make_inventory(facts, configuration, wsl_node="/dev/dxg").resources
    response = allocate(found, TWO, facts, configuration, Settings())
    assert response.envs == {"NVIDIA_VISIBLE_DEVICES": SORTED}
    assert response.devices == (DeviceSpec("/dev/dxg", "/dev/dxg", "rw"),)


def test_every_offered_device_can_be_allocated() -> None:
    for facts in (A100, MIG, IMEX, host("h200-64")):
        for strategy in ("none", "mixed"):
            environment = {"PASS_DEVICE_SPECS": "1", "MIG_STRATEGY": strategy}
            configuration = configured(None, environment)
            for each in inventory(facts, mig_strategy=strategy).resources:
                for device in (device for device in each.devices if not device.error):
                    given = allocate(each, [device.id], facts, configuration, Settings())
                    assert set(device.paths) <= {spec.container_path for spec in given.devices}
