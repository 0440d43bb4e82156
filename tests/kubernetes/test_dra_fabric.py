"""Partitions of the NVLink fabric as attributes: a claim chooses GPUs that are one."""

from pathlib import Path

import pytest
from dra_lab import DRIVER, NODE

from ocigpu.gpus.nvidia.fabric.libnvfm import open_fabric
from ocigpu.gpus.nvidia.fabric.partitions import Partition
from ocigpu.kubernetes.dra.devices import make_devices
from ocigpu.kubernetes.dra.fabric import partition_attributes
from ocigpu.kubernetes.dra.fit import fit_claim, published_devices
from ocigpu.kubernetes.dra.node import read_dra_node
from ocigpu.kubernetes.dra.slices import Pool, check_device, make_slices
from ocigpu.sim.fabric import SimulatedManager
from ocigpu.system.settings_file import read_settings

MANAGER = "127.0.0.1:6666"


def part(number: int, *modules: int) -> Partition:
    return Partition(number, False, modules, tuple((0, 18) for _ in modules))


def test_a_gpu_has_the_numbers_of_its_partitions() -> None:
    sets = [(1, 2, 3, 4), (1, 2), (3, 4), (1,), (2,), (2, 3), (1, 2, 4)]
    listed = [part(number, *modules) for number, modules in enumerate(sets)]
    found, problems = partition_attributes(listed, {"0000:01:00.0": 1, "0000:02:00.0": 2})
    assert found["00000000:01:00.0"] == {"gpuModuleID": 1, "partition1": 3, "partition2": 1, "partition4": 0}
    assert found["00000000:02:00.0"] == {"gpuModuleID": 2, "partition1": 4, "partition4": 0}
    assert problems == ("GPU 0000:02:00.0 is in several partitions of 2 GPUs: 1, 5",)


@pytest.mark.usefixtures("manager")
def test_a_claim_chooses_gpus_of_one_partition(fabric_host: Path) -> None:
    settings = read_settings(str(fabric_host / "config.toml"))
    reading = read_dra_node(settings, fabric=MANAGER)
    assert reading.node
    assert reading.node.problems == ()
    devices = make_devices(reading.node)
    assert all(check_device(each) == () for each in devices)
    known = {tuple(sorted(each.attributes[f"partition{size}"]["int"] for each in devices)) for size in (1, 8)}
    assert len(known) == 2
    assert {each.attributes["gpuModuleID"]["int"] for each in devices} == set(range(1, 9))
    published, _ = published_devices(make_slices(devices, Pool(DRIVER, NODE)))
    request = {"name": "gpus", "exactly": {"deviceClassName": "gpu", "count": 4}}
    constraint = {"requests": ["gpus"], "matchAttribute": f"{DRIVER}/partition4"}
    spec = {"devices": {"requests": [request], "constraints": [constraint]}}
    (fit,) = fit_claim(spec, {"gpu": {"spec": {}}}, published, {})
    chosen = {each.name for each in fit.chosen}
    modules = {each.name: each.attributes["gpuModuleID"]["int"] for each in devices}
    sets = {one.physical_ids for one in open_fabric(MANAGER, simulation=str(fabric_host)).list_partitions()}
    assert tuple(sorted(modules[name] for name in chosen)) in sets
    SimulatedManager(fabric_host).path.unlink()
    again = read_dra_node(settings, fabric=MANAGER, known=reading.node.partitions)
    assert again.node
    assert (again.node.partitions, again.node.problems) == (reading.node.partitions, ()), "nobody is asked again"
    lost = read_dra_node(settings, fabric=MANAGER)
    assert lost.node
    assert lost.node.partitions == {}
    assert len(lost.node.problems) == 1
