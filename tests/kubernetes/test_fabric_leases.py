"""What the agent of leases does with partitions when the manager, or its machine, is restarted under tenants."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.driverless import GPUS, MODULES
from support.process import wait_for

from ocigpu.core.errors import OcigpuError
from ocigpu.gpus.nvidia.fabric.state import KeptFabric
from ocigpu.gpus.tree import find_roots
from ocigpu.gpus.vfio.identity import GpuModule, write_table
from ocigpu.kubernetes.tenants.machine import MachineHands, open_fabric_at
from ocigpu.sim.create import create_host
from ocigpu.sim.fabric import SimulatedManager
from ocigpu.system.settings_file import read_settings

PAIR = sorted(gpu for gpu in GPUS if MODULES[gpu] in (1, 3))


class LeaseNode:
    """A host without a driver, and the agent's hands."""

    def __init__(self, host: Path) -> None:
        settings = read_settings(create_host(str(host), 8, "h100", driver="none", nodes=False))
        roots = find_roots(settings)
        write_table(
            f"{roots.host}/var/lib/ocigpu/module-ids.json", [GpuModule(gpu, n, "", ()) for gpu, n in MODULES.items()]
        )
        self.manager = SimulatedManager(host)
        fabric = open_fabric_at("127.0.0.1:6666", settings)
        assert fabric
        self.fabric: KeptFabric = fabric
        self.hands = MachineHands(settings, lambda _gpu: "", fabric=fabric, look_seconds=0.0)

    def sick(self) -> list[str]:
        try:
            return sorted(self.hands.sick())
        except OcigpuError:
            return []


@pytest.fixture
def node(work_directory: Path) -> Iterator[LeaseNode]:
    made = LeaseNode(work_directory / "host")
    yield made
    if made.hands._looking:
        made.hands._looking.join()


def test_a_manager_that_waits_is_given_back_what_was_active(node: LeaseNode) -> None:
    node.fabric.activate([1, 3], "set-1", 1)
    node.manager.restart()
    wait_for("active again", lambda: node.sick() or node.manager.active() == [(1, 3)])
    assert node.sick() == []


def test_gpus_of_a_lost_partition_are_sick_until_they_were_taken_back(node: LeaseNode) -> None:
    node.fabric.activate([1, 3], "set-1", 1)
    node.fabric.activate([2], "set-2", 1)
    node.manager.start(active=[{2}])  # anew, with its machine
    wait_for("sick", lambda: node.sick() == PAIR)
    node.hands.deactivate(PAIR)
    assert node.hands.sick() == {}
    assert node.fabric.activate([1, 3], "set-3", 2).is_active
    assert node.manager.active() == [(1, 3), (2,)]


def test_a_manager_that_is_away_is_said_to_be(node: LeaseNode) -> None:
    node.manager.stop()

    def is_said() -> bool:
        try:
            node.hands.sick()
        except OcigpuError as error:
            return error.code == "OCIGPU-FAB-2"
        return False

    wait_for("said", is_said)
