"""The chart with ``dra.enabled``: objects that fit together, rights that suffice, and policies that really apply."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from deployment_lab import containers, objects, of_kind
from dra_lab import API, DRIVER, NODE
from kubernetes_lab import host
from support.cluster import Cluster
from support.cluster_rules import Problem

from ocigpu.cli.front.main import main
from ocigpu.core.errors import HostError
from ocigpu.kubernetes.dra.cluster import ApiCluster
from ocigpu.kubernetes.dra.devices import DraNode, make_devices
from ocigpu.kubernetes.dra.fit import published_devices, why_not
from ocigpu.kubernetes.dra.node import read_dra_node
from ocigpu.kubernetes.dra.options import parse_options
from ocigpu.kubernetes.dra.publisher import Publisher
from ocigpu.kubernetes.dra.slices import Pool, as_objects, make_slices
from ocigpu.sim.create import create_host
from ocigpu.system.settings_file import read_settings

FOUND = objects({"dra": {"enabled": True}})
ACCOUNT = "system:serviceaccount:gpu:ocigpu-dra-driver"
DEVICES = make_devices(DraNode(host("a100-8")))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as running:
        running.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "gpu"}})
        running.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})
        for each in FOUND:
            if each["apiVersion"].partition("/")[0] in (
                "rbac.authorization.k8s.io",
                "admissionregistration.k8s.io",
                "resource.k8s.io",
            ):
                running.create(each)
        yield running


def publisher(cluster: Cluster, on: str | None, node: str = NODE) -> Publisher:
    """Return what publishes for a node, with the token of a driver's pod on a node."""
    return Publisher(ApiCluster(cluster.client(ACCOUNT, node=on)), DRIVER, node, lambda *_, **__: None)


def test_objects_are_those_of_kubernetes_and_the_program_understands_its_words() -> None:
    for each in objects({"dra": {"enabled": True, "privileged": True, "shares": "4"}}):
        if each["apiVersion"] != "resource.k8s.io/v1":
            kubernetes_validate.validate(each, "1.37", strict=True)
    sets = of_kind(FOUND, "DaemonSet")
    assert "ocigpu-dra-driver" in sets
    assert "ocigpu-device-plugin" not in sets, "one program offers a GPU"
    assert "ocigpu-device-plugin" in of_kind(objects({}), "DaemonSet")
    assert not of_kind(objects({}), "DeviceClass")
    ((pod, container),) = [(pod, each) for pod, each in containers(FOUND) if each["args"][0] == "dra-driver"]
    options = parse_options([*container["args"][1:]], {"NODE_NAME": "n", "POD_UID": "u"})
    assert options.directories.plugins == "/var/lib/kubelet/plugins"
    assert pod["automountServiceAccountToken"] is True
    paths = {each["mountPath"] for each in container["volumeMounts"]}
    kubelet = {f"/var/lib/kubelet/{name}" for name in ("plugins", "plugins_registry", "pod-resources")}
    assert {*kubelet, "/var/run/cdi", "/driver-root"} == paths
    more = objects({"dra": {"enabled": True, "privileged": True}})
    ((pod, container),) = [(pod, each) for pod, each in containers(more) if each["args"][0] == "dra-driver"]
    assert "/run/ocigpu" in {each["mountPath"] for each in container["volumeMounts"]}, "MIG devices have one lock"
    assert "/run/ocigpu" in {each.get("hostPath", {}).get("path") for each in pod["volumes"]}
    other = objects({"dra": {"enabled": True}, "host": {"kubelet": "/data/kubelet"}})
    ((_, container),) = [(pod, each) for pod, each in containers(other) if each["args"][0] == "dra-driver"]
    assert "--pods-socket=/data/kubelet/pod-resources/kubelet.sock" in container["args"]
    assert "/data/kubelet/pod-resources" in {each["mountPath"] for each in container["volumeMounts"]}


def test_the_drivers_metrics_have_a_port_and_a_service_only_if_they_are_wanted() -> None:
    assert not of_kind(FOUND, "Service").get("ocigpu-dra-driver")
    found = objects({"dra": {"enabled": True, "metricsPort": 9403}})
    service = of_kind(found, "Service")["ocigpu-dra-driver"]["spec"]
    ((_, container),) = [(pod, each) for pod, each in containers(found) if each["args"][0] == "dra-driver"]
    assert "--http-endpoint=:9403" in container["args"]
    assert container["ports"] == [{"name": "metrics", "containerPort": 9403}]
    assert service["ports"] == [{"name": "metrics", "port": 9403, "targetPort": "metrics"}]


def test_a_fabric_manager_is_named_and_what_is_active_is_remembered_on_the_host() -> None:
    found = objects({"dra": {"enabled": True, "fabric": "127.0.0.1:6666", "hostNetwork": True}})
    ((pod, container),) = [(pod, each) for pod, each in containers(found) if each["args"][0] == "dra-driver"]
    assert parse_options(container["args"][1:], {"NODE_NAME": "n"}).fabric_address == "127.0.0.1:6666"
    assert {"/var/lib/ocigpu", "/tmp"} <= {each["mountPath"] for each in container["volumeMounts"]}
    assert "/var/lib/ocigpu" in {each.get("hostPath", {}).get("path") for each in pod["volumes"]}


def test_classes_choose_the_devices_of_their_kind() -> None:
    classes = of_kind(FOUND, "DeviceClass")
    assert classes["gpu.nvidia.com"]["spec"]["extendedResourceName"] == "nvidia.com/gpu"
    assert set(classes) == {"gpu.nvidia.com", "mig.nvidia.com", "vfio.gpu.nvidia.com"}
    (device, *_), _ = published_devices(make_slices(DEVICES, Pool(DRIVER, NODE)))
    good = {
        name for name, each in classes.items() if not why_not(each["spec"]["selectors"][0]["cel"]["expression"], device)
    }
    assert good == {"gpu.nvidia.com"}


def test_nodes_with_gpus_of_the_other_vendor_have_driver_and_class(work_directory: Path) -> None:
    found = objects({"dra": {"enabled": True, "amd": True}})
    found_class = of_kind(found, "DeviceClass")["gpu.amd.com"]["spec"]
    assert found_class["extendedResourceName"] == "amd.com/gpu"
    create_host(str(work_directory / "amd"), 1, "mi300x", nodes=False)
    settings = read_settings(str(work_directory / "amd/config.toml"))
    reading = read_dra_node(settings, "amd")
    assert reading.node
    (device, *_), _ = published_devices(make_slices(make_devices(reading.node), Pool("gpu.amd.com", NODE)))
    assert not why_not(found_class["selectors"][0]["cel"]["expression"], device)
    ((pod, container),) = [(pod, each) for pod, each in containers(found) if each["args"][0] == "dra-driver"]
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    keys = {term["matchExpressions"][0]["key"] for term in required["nodeSelectorTerms"]}
    assert {"nvidia.com/gpu.present", "feature.node.kubernetes.io/pci-1200_1002.present"} <= keys
    # the pod starts there below ocigpu-runtime, too, which refuses NVIDIA's variable alone
    wanted = {each["name"]: each["value"] for each in container["env"] if each["name"].endswith("VISIBLE_DEVICES")}
    assert wanted == {"NVIDIA_VISIBLE_DEVICES": "all", "AMD_VISIBLE_DEVICES": "all"}
    words = [word for name, value in wanted.items() for word in ("--env", f"{name}={value}")]
    assert main(["plan", *words, "--config", str(work_directory / "amd/config.toml")]) == 0
    others = {name: of_kind(found, "DaemonSet")[name] for name in of_kind(FOUND, "DaemonSet") if "dra" not in name}
    assert others == {name: each for name, each in of_kind(FOUND, "DaemonSet").items() if "dra" not in name}


def test_the_drivers_rights_suffice_and_end_at_its_own_node(cluster: Cluster) -> None:
    assert publisher(cluster, NODE).publish(DEVICES).made == 1
    assert publisher(cluster, NODE).publish(DEVICES[1:]).removed == 1
    for on, words in (("other", "of its own node only"), (None, "does not say on which node")):
        with pytest.raises(HostError, match=words):
            publisher(cluster, on).publish(DEVICES)
    assert len(cluster.objects("ResourceSlice")) == 1
    (document,) = as_objects(make_slices(DEVICES, Pool(DRIVER, NODE)), Pool(DRIVER, NODE))
    ours = ApiCluster(cluster.client(ACCOUNT, node=NODE))
    every = {"matchExpressions": [{"key": "a", "operator": "Exists"}]}
    for spec in ({"allNodes": True}, {"nodeSelector": {"nodeSelectorTerms": [every]}}):
        everywhere = {name: value for name, value in document["spec"].items() if name != "nodeName"}
        with pytest.raises(HostError, match="of its own node only"):
            ours.create_slice({**document, "spec": {**everywhere, **spec}})
    (theirs,) = cluster.objects("ResourceSlice")
    with pytest.raises(HostError, match="of its own node only"):
        ApiCluster(cluster.client(ACCOUNT, node="other")).delete_slice(theirs["metadata"]["name"])
    assert cluster.create(document), "others are not the policy's affair"


def mps(**limits: Any) -> dict[str, Any]:
    return {"apiVersion": API, "kind": "GpuConfig", "sharing": {"strategy": "MPS", "mpsConfig": limits}}


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"apiVersion": API, "kind": "GpuConfig", "sharing": {"strategy": "MPS"}}, ""),
        ({"apiVersion": API, "kind": "VfioDeviceConfig"}, ""),
        ({"apiVersion": "v1", "kind": "GpuConfig"}, "apiVersion of the parameters"),
        ({"apiVersion": API, "kind": "Gpu"}, "kind of the parameters"),
        ({"apiVersion": API, "kind": "GpuConfig", "sharing": {"strategy": "Some"}}, "sharing.strategy"),
        (
            {
                "apiVersion": API,
                "kind": "GpuConfig",
                "sharing": {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Huge"}},
            },
            "interval",
        ),
        (
            mps(defaultPinnedDeviceMemoryLimit="10Gi", defaultPerDevicePinnedMemoryLimit={"0": "512Mi", "1": 1 << 30}),
            "",
        ),
        (mps(defaultPinnedDeviceMemoryLimit="1.5G", defaultPerDevicePinnedMemoryLimit={"0": "1e10"}), ""),
        (mps(defaultPinnedDeviceMemoryLimit="1e300000"), "memory limit"),
        (mps(defaultPerDevicePinnedMemoryLimit={"0": "1Gi", "1": "1e999999"}), "memory limit"),
        (mps(defaultPerDevicePinnedMemoryLimit={"0": "9" * 5000}), "memory limit"),
    ],
)
@pytest.mark.parametrize("template", [False, True])
def test_wrong_configurations_are_refused_when_a_claim_is_made(
    cluster: Cluster, parameters: dict[str, Any], words: str, template: bool
) -> None:
    devices = {"config": [{"opaque": {"driver": DRIVER, "parameters": parameters}}]}
    document = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate" if template else "ResourceClaim",
        "metadata": {"name": "c", "namespace": "gpu"},
        "spec": {"spec": {"devices": devices}} if template else {"devices": devices},
    }
    other = json.loads(json.dumps(document).replace(DRIVER, "nic.example.com"))
    other["metadata"]["name"] = "other"
    assert cluster.create(other), "another driver's are its own affair"
    cluster.delete(other["kind"], "other", "gpu")
    if not words:
        assert cluster.create(document)
        cluster.delete(document["kind"], "c", "gpu")
        return
    with pytest.raises(Problem, match=words):
        cluster.create(document)


def test_a_claim_from_before_the_policy_can_still_be_given_back(cluster: Cluster) -> None:
    """Kubernetes takes its finalizer off with an update: a policy that refused that would keep the claim for ever."""
    policy = next(each for each in FOUND if each["metadata"]["name"] == "ocigpu-dra-configs")
    cluster.delete(policy["kind"], "ocigpu-dra-configs")
    parameters = mps(defaultPinnedDeviceMemoryLimit="1e300000")
    config = [{"opaque": {"driver": DRIVER, "parameters": parameters}}]
    claim = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "spec": {"devices": {"config": config}}}
    names = {"name": "old", "namespace": "gpu"}
    old = cluster.create({**claim, "metadata": {**names, "finalizers": ["resource.kubernetes.io/delete-protection"]}})
    cluster.create(policy)
    old["metadata"]["finalizers"] = []
    cluster.update(old)
