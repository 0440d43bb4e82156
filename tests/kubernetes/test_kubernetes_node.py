"""A node as it is: where devices are looked for, and what becomes of those that are gone."""

from pathlib import Path

import pytest
from kubernetes_lab import configured, host, inventory, offered, shared
from support.allocation import Response, allocate
from support.product import SimulatedHost
from support.trees import Tree, pci_function, write_tree

from ocigpu.core.settings import Settings
from ocigpu.kubernetes.node.config import PluginOptions
from ocigpu.kubernetes.node.devices import Inventory
from ocigpu.kubernetes.node.reading import GONE, carry_over, host_settings, read_node
from ocigpu.system.settings_file import read_settings

A100 = host("a100-8")
MIG = host("h100-8-mig")
VFIO: Tree = {
    "/sys/class/misc/vfio/dev": "10:196\n", "/dev/vfio/vfio": "",
    "/sys/class/vfio/9/dev": "242:9\n", "/dev/vfio/9": "",
    **pci_function("0000:3b:00.0", "10de:2330", "0302", "vfio-pci", "9"),
    "/sys/bus/pci/devices/0000:3b:00.0/numa_node": "1\n",
}  # fmt: skip
WSL: Tree = {"/usr/lib/wsl/lib/libdxcore.so": "", "/sys/class/misc/dxg/dev": "10:125\n", "/dev/dxg": ""}


def test_a_node_with_gpus(simulated_host: SimulatedHost) -> None:
    found = read_node(read_settings(str(simulated_host.settings)), configured(shared({"name": "gpu", "replicas": 2})))
    assert (found.source, found.inventory.reason, found.hardware.problem) == ("nvml", "", "")
    assert offered(found.inventory) == {"gpu": [f"{gpu}::{n}" for gpu in range(8) for n in range(2)]}
    devices = found.inventory.resources[0].devices
    assert {device.uuid for device in devices} == set(simulated_host.gpus) == set(found.hardware.gpus)
    assert all(device.numa >= 0 for device in devices), "the simulated host has NUMA nodes"
    assert len(found.scores) == 8 * 7


def test_an_unhealthy_gpu_is_offered_as_such(mig_host: SimulatedHost) -> None:
    faults = mig_host.directory / "faults"
    faults.write_text("lost 1\n")
    try:
        found = read_node(read_settings(str(mig_host.settings)), configured(mig_strategy="mixed"))
    finally:
        faults.unlink()
    assert offered(found.inventory) == {"mig-3g.20gb": ["0:0"], "mig-1g.5gb": ["0:1"], "gpu": ["!1"]}


@pytest.mark.parametrize("strategy", ["auto", "vfio"])
def test_a_node_whose_gpus_are_for_virtual_machines(tmp_path: Path, strategy: str) -> None:
    found = read_node(write_tree(tmp_path, VFIO), configured(device_discovery_strategy=strategy))
    (resource,) = found.inventory.resources
    assert (found.source, resource.name, resource.kind) == ("vfio", "nvidia.com/gpu", "vfio")
    assert [(device.id, device.numa) for device in resource.devices] == [("9", 1)]


def test_a_node_by_model_without_a_list_of_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ocigpu.kubernetes.node.vfio.read_model_names", dict)
    found = read_node(write_tree(tmp_path, VFIO), configured(vfio_resource="model"))
    assert [resource.name for resource in found.inventory.resources] == ["nvidia.com/2330"]


@pytest.mark.parametrize("strategy", ["auto", "nvml", "vfio"])
def test_a_node_without_gpus_has_a_reason(tmp_path: Path, strategy: str) -> None:
    found = read_node(write_tree(tmp_path, {"/proc/": ""}), configured(device_discovery_strategy=strategy))
    assert found.inventory.resources == ()
    assert found.inventory.reason


def test_wsl_without_an_answer_of_nvml_is_one_device(tmp_path: Path) -> None:
    configuration = configured(None, {"PASS_DEVICE_SPECS": "1", "DEVICE_ID_STRATEGY": "index"})
    found = read_node(write_tree(tmp_path, WSL), configuration)
    assert (found.source, offered(found.inventory)) == ("wsl", {"gpu": ["all"]})
    (resource,) = found.inventory.resources
    given = allocate(resource, ["all"], found.facts, configuration, Settings())
    assert given.envs == {"NVIDIA_VISIBLE_DEVICES": "all"}
    assert given.devices == Response(devices=(("/dev/dxg", "/dev/dxg", "rw"),)).devices


def test_settings_are_those_of_the_options_and_of_the_container(tmp_path: Path) -> None:
    inside = PluginOptions(driver_root="/run/nvidia/driver", container_driver_root=str(tmp_path))
    assert host_settings(Settings(), inside) == Settings(driver_root=str(tmp_path))
    outside = PluginOptions(driver_root="/d", dev_root="/e", container_driver_root=f"{tmp_path}/none")
    assert host_settings(Settings(), outside) == Settings(driver_root="/d", driver_dev_root="/e")
    simulated = Settings(simulation_root="/s")
    assert host_settings(simulated, inside) == simulated


# --- what is gone


def test_a_gpu_that_is_gone_stays_as_an_unhealthy_one() -> None:
    before = inventory(A100, shared({"name": "gpu", "replicas": 2}))
    now = inventory(A100._replace(gpus=A100.gpus[1:]), shared({"name": "gpu", "replicas": 2}))
    found = carry_over(before, now)
    assert offered(found) == {"gpu": [*(f"{gpu}::{n}" for gpu in range(1, 8) for n in range(2)), "!0::0", "!0::1"]}
    assert found.resources[0].devices[-1].error == GONE
    assert carry_over(found, before) == before, "and returns"


def test_all_gpus_gone_leave_their_resource() -> None:
    found = carry_over(inventory(A100), Inventory(reason="no driver"))
    assert offered(found) == {"gpu": [f"!{gpu}" for gpu in range(8)]}
    assert found.reason == ""
    assert carry_over(Inventory(), Inventory(reason="no driver")).reason == "no driver"


def test_mig_devices_that_were_removed_are_left_out() -> None:
    before = inventory(MIG, mig_strategy="mixed")
    gpus = tuple(gpu._replace(mig_devices=gpu.mig_devices[:1]) for gpu in MIG.gpus)
    now = inventory(MIG._replace(gpus=gpus), mig_strategy="mixed")
    assert carry_over(before, now) == now
    assert now != before


def test_mig_devices_of_a_lost_gpu_stay_as_unhealthy_ones() -> None:
    """It does not tell whether MIG is enabled, and looks like a whole one."""
    before = inventory(MIG, mig_strategy="mixed")
    split = next(gpu for gpu in MIG.gpus if gpu.mig_devices)
    lost = split._replace(error="GPU is lost (NVML 15)", mig_enabled=False, mig_devices=())
    now = inventory(MIG._replace(gpus=tuple(lost if gpu == split else gpu for gpu in MIG.gpus)), mig_strategy="mixed")
    found = carry_over(before, now)
    assert split.uuid not in {device.id for resource in found.resources for device in resource.devices}
    for resource in before.resources:
        after = next(each for each in found.resources if each.name == resource.name)
        errors = {device.id: device.error for device in after.devices}
        assert errors == {device.id: lost.error if device.gpu == split.uuid else "" for device in resource.devices}
    assert carry_over(found, before) == before, "and returns"


def test_nothing_changes_while_nothing_is_gone() -> None:
    found = inventory(MIG, mig_strategy="mixed")
    assert carry_over(found, found) == found
