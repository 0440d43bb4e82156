"""Partitions of the NVLink fabric as attributes: a claim chooses GPUs that are one."""

from collections.abc import Collection
from pathlib import Path

import pytest
from dra_lab import DRIVER, NODE, Killed, Lab, result

from ocigpu.core.errors import HostError
from ocigpu.gpus.nvidia.fabric.libnvfm import open_fabric
from ocigpu.gpus.nvidia.fabric.partitions import FabricError, Partition
from ocigpu.gpus.nvidia.fabric.state import KeptFabric
from ocigpu.kubernetes.dra.claims import ClaimRef
from ocigpu.kubernetes.dra.devices import make_devices
from ocigpu.kubernetes.dra.effects import Effects, plan_steps
from ocigpu.kubernetes.dra.fabric import partition_attributes
from ocigpu.kubernetes.dra.fit import fit_claim, published_devices
from ocigpu.kubernetes.dra.node import read_dra_node
from ocigpu.kubernetes.dra.slices import Pool, check_device, make_slices
from ocigpu.kubernetes.leases.machine import open_fabric_at
from ocigpu.kubernetes.node.config import PluginOptions
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


class BoardLab(Lab):
    """Claims of whole GPUs on a board whose manager waits to be told which partition is to be active."""

    def __init__(self, directory: Path, fabric_host: Path) -> None:
        self.host = fabric_host
        settings = read_settings(str(fabric_host / "config.toml"))
        self.effects = Effects(settings, "/run/mps", self.log, fabric=open_fabric_at(MANAGER, settings))
        super().__init__(
            directory,
            settings=settings,
            plugin=PluginOptions(driver_root="/", fabric_address=MANAGER),
            effects=self.effects.table,
            plan=plan_steps,
        )
        self.node = read_dra_node(settings, fabric=MANAGER).node
        assert self.node
        self.modules = {each.attributes["gpuModuleID"]["int"]: each.name for each in make_devices(self.node)}

    def ask(self, uid: str, *modules: int, **more: bool) -> ClaimRef:
        return self.add(uid, *(result(self.modules[module], **more) for module in modules))

    @property
    def active(self) -> list[tuple[int, ...]]:
        listed = open_fabric(MANAGER, simulation=str(self.host)).list_partitions()
        return [one.physical_ids for one in listed if one.is_active]


@pytest.fixture
def board(tmp_path: Path, fabric_host: Path, manager: SimulatedManager) -> BoardLab:
    assert manager
    return BoardLab(tmp_path, fabric_host)


def test_the_partition_of_a_claims_gpus_is_active_while_it_is_prepared(board: BoardLab) -> None:
    four, one = board.ask("four", 1, 2, 3, 4), board.ask("one", 5)
    board.preparer.prepare(four)
    assert board.active == [(1, 2, 3, 4)]
    board.preparer.prepare(four)
    board.preparer.prepare(one)
    assert set(board.active) == {(1, 2, 3, 4), (5,)}
    board.preparer.unprepare(four)
    assert board.active == [(5,)]
    board.preparer.unprepare(four)
    whole = board.ask("whole", *range(1, 9))
    board.preparer.unprepare(one)
    board.preparer.prepare(whole)
    assert board.active == [tuple(range(1, 9))]
    board.restart("boot-2")
    assert board.preparer.store.prepared() == ()


def test_gpus_that_are_no_partition_are_refused_and_change_nothing(board: BoardLab) -> None:
    three = board.ask("three", 1, 2, 3)
    with pytest.raises(FabricError) as raised:
        board.preparer.prepare(three)
    assert raised.value.code == "OCIGPU-FAB-4"
    assert (board.active, board.specs) == ([], [])
    board.preparer.unprepare(three)


def test_an_administrators_claim_and_one_without_a_manager_switch_nothing(board: BoardLab) -> None:
    board.preparer.prepare(board.ask("admin", 1, 2, 3, adminAccess=True))
    assert board.active == []
    board.plugin = PluginOptions(driver_root="/")
    board.preparer.prepare(board.ask("other", 1, 2))
    assert board.active == []


def test_what_is_not_known_of_a_gpu_fails_the_claim(board: BoardLab) -> None:
    assert board.node
    board.node = board.node._replace(partitions={})
    (name,) = [name for module, name in board.modules.items() if module == 1]
    with pytest.raises(HostError, match=f"{name}: the fabric manager's partitions are not known"):
        board.preparer.prepare(board.add("one", result(name)))
    assert (board.active, board.specs) == ([], [])


def test_a_partition_of_somebody_else_stays_theirs(board: BoardLab) -> None:
    """It is neither taken over nor, when the claim's steps are undone, deactivated."""
    fabric = open_fabric_at(MANAGER, board.settings)
    assert fabric
    fabric.activate((1, 3), "machine")
    for uid, modules in (("same", (1, 3)), ("overlapping", (1, 2, 3, 4))):
        ref = board.ask(uid, *modules)
        with pytest.raises(FabricError):
            board.preparer.prepare(ref)
        board.preparer.unprepare(ref)
        assert board.active == [(1, 3)]
        assert board.specs == []
    fabric.deactivate((1, 3))


def test_a_driver_that_is_killed_leaves_no_partition_active(board: BoardLab, monkeypatch: pytest.MonkeyPatch) -> None:
    activate = KeptFabric.activate

    def killed(fabric: KeptFabric, ids: Collection[int], lease: str = "", generation: int = 0) -> Partition:
        activate(fabric, ids, lease, generation)
        raise Killed

    def gone(*_: object) -> None:
        raise Killed

    ref = board.ask("four", 1, 2, 3, 4)
    with monkeypatch.context() as patch:
        patch.setattr(KeptFabric, "activate", killed)
        patch.setattr(KeptFabric, "deactivate", gone)  # nothing is undone by a driver that is dead
        with pytest.raises(Killed):
            board.preparer.prepare(ref)
    assert board.active == [(1, 2, 3, 4)]
    board.restart()
    assert board.active == []
    board.preparer.prepare(ref)
    assert board.active == [(1, 2, 3, 4)]
    manager = SimulatedManager(board.host)
    text = manager.path.read_text()
    manager.path.write_text(f"{text}down\n")
    with pytest.raises(FabricError):
        board.preparer.unprepare(ref)
    manager.path.write_text(text)
    board.preparer.unprepare(ref)
    assert board.active == []


def test_a_claim_can_be_given_back_where_no_manager_is_set_any_more(board: BoardLab) -> None:
    ref = board.ask("two", 1, 3)
    board.preparer.prepare(ref)
    board.options["effects"] = Effects(board.settings, "/run/mps", board.log).table
    board.restart()
    board.preparer.unprepare(ref)
    assert any("stays active: --fabric-address is not set" in line for line in board.logged)
