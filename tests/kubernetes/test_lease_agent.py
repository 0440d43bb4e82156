"""The agent and the device plugin's gate on a node in memory: killed at every step, with everything that can fail."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lease_lab import DEVICES, GPUS, MODULES, Board, World

from ocigpu.core.errors import OcigpuError
from ocigpu.gpus.nvidia.fabric.partitions import UNLINKED, choose_offer, choose_partition
from ocigpu.gpus.vfio.facts import GroupMembers
from ocigpu.kubernetes.leases.gate import LeaseGate
from ocigpu.kubernetes.leases.lease import NO_KUBELET, LeaseEvent, LeaseEventKind, Phase, describe
from ocigpu.kubernetes.node.devices import PluginDevice, Resource

PAIR = (GPUS[0], GPUS[2])
"""Modules 1 and 3, a partition."""


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def all_free(world: World) -> Any:
    agent = world.agent()
    world.run_until(agent, world.there, Phase.FREE)
    return agent


def test_a_new_node_gives_nothing_before_it_was_reset_and_checked(world: World) -> None:
    gate = world.gate()
    resource = Resource("nvidia.com/gpu", DEVICES, "vfio")
    assert {device.error for device in gate.with_leases(resource).devices} == {"it has no lease yet"}
    agent = world.agent()
    agent.step()
    assert "Reclaiming, generation 0 (BootChanged)" in gate.with_leases(resource).devices[0].error
    world.run_until(agent, GPUS, Phase.FREE)
    assert not any(device.error for device in gate.with_leases(resource).devices)


def test_a_container_of_two(world: World) -> None:
    agent, gate = all_free(world), world.gate()
    world.allocate(gate, *PAIR)
    assert world.board.active == {(1, 3)}
    world.start_pod(7, *PAIR)
    world.run_until(agent, PAIR, Phase.LEASED)
    assert agent.journal.leases[PAIR[0]].holder.pod == "pod7"
    world.run(agent, 3600, 20.0)
    assert {agent.journal.leases[gpu].phase for gpu in PAIR} == {Phase.LEASED}
    world.end_pod(7)
    world.run_until(agent, PAIR, Phase.FREE)
    assert not world.board.active
    assert [agent.journal.leases[gpu].generation for gpu in PAIR] == [1, 1]


def test_the_node_offers_no_more_gpus_than_it_has_partitions_for(world: World) -> None:
    """The scheduler would send a pod with two GPUs to free GPUs 1 and 2, which are no partition, and it would fail."""
    all_free(world)
    gate, resource = world.gate(), Resource("nvidia.com/gpu", DEVICES, "vfio")
    for gpus in (GPUS[4:], GPUS[2:3], GPUS[3:4]):
        world.allocate(gate, *gpus)

    def withheld() -> dict[str, str]:
        return {device.id: device.error for device in gate.with_leases(resource).devices if device.error}

    assert withheld() == {"2": "withheld until there is a partition of 2 among the node's free GPUs, or fewer are free"}
    world.allocate(gate, GPUS[0])
    assert gate.has_changed()
    assert withheld() == {}
    world.board.fails = ["list"]
    assert withheld() == {}


def test_every_number_of_gpus_that_is_offered_has_a_partition() -> None:
    board = Board().list_partitions()
    for count in range(9):
        for free in map(set, itertools.combinations(range(1, 9), count)):
            offered = choose_offer(board, free)
            assert offered <= free
            there = {len(one.physical_ids) for one in board if set(one.physical_ids) <= free}
            missing = min({1, 2, 4, 8} - there, default=9)
            assert len(offered) == min(count, missing - 1), "as many as possible"
            for size in (each for each in (1, 2, 4, 8) if each <= len(offered)):
                assert choose_partition(board, offered, size)


def test_preferred_sets_are_partitions(world: World) -> None:
    all_free(world)
    ids = [device.id for device in DEVICES]
    gate = world.gate()
    assert gate.prefer(DEVICES, ids, [], 2) == ("1", "3")
    assert gate.prefer(DEVICES, [id_ for id_ in ids if id_ != "1"], [], 2) == ("2", "4"), "its four is broken already"
    assert gate.prefer(DEVICES, ids, ["6"], 2) == ("6", "8")
    assert gate.prefer(DEVICES, ids, [], 3) == ()
    world.board.fails = ["list"]
    assert gate.prefer(DEVICES, ids, [], 2) == ()


def refusal(world: World, *gpus: str) -> str:
    with pytest.raises(OcigpuError) as caught:
        world.allocate(world.gate(), *gpus)
    return f"{caught.value.code}: {caught.value.message}"


def test_what_is_refused_is_not_half_done(world: World) -> None:
    agent = all_free(world)
    before = world.leases()
    assert "no partition of this board" in refusal(world, GPUS[0], GPUS[1])
    world.board.fails = ["list"]
    assert "FAB" in refusal(world, *PAIR)
    assert world.leases() == before
    world.start_vm(99, GPUS[0])
    assert "process 99 has it open" in refusal(world, *PAIR)
    world.run(agent, 5)
    assert "HolderUnexpected" in refusal(world, GPUS[0])
    world.end_pod(99)
    world.run_until(agent, GPUS[:1], Phase.QUARANTINED)


def test_an_activation_that_fails_twice(world: World) -> None:
    agent = all_free(world)
    for phase in (Phase.FREE, Phase.QUARANTINED):
        world.board.fails = ["activate"]
        assert "link training" in refusal(world, *PAIR)
        world.run_until(agent, PAIR, phase)
    assert {world.leases()[gpu].reason for gpu in PAIR} == {"PartitionStuck"}


def test_a_partition_that_was_left_over_goes_first(world: World) -> None:
    """The manager kept one that nobody has; one of a set that comes back is not touched."""
    agent = all_free(world)
    world.board.active = {(1, 2, 3, 4)}
    world.allocate(world.gate(), *PAIR)
    assert world.board.active == {(1, 3)}
    world.start_pod(7, *PAIR)
    world.run_until(agent, PAIR, Phase.LEASED)
    world.board.active = {(1, 3), (2, 4), (5, 6, 7, 8)}
    world.allocate(world.gate(), GPUS[1])
    assert world.board.active == {(1, 3), (2,), (5, 6, 7, 8)}


def test_the_same_request_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is answered where it was not before: the device plugin was killed while it switched the partition on."""
    agent, gate = all_free(world), world.gate()
    with monkeypatch.context() as patch:
        patch.setattr(world.board, "activate", counting([1]))
        with pytest.raises(Killed):
            world.allocate(gate, *PAIR)
    assert "Reserved" in refusal(world, PAIR[0])
    world.allocate(world.gate(), *PAIR)
    assert {world.leases()[gpu].generation for gpu in PAIR} == {1}
    world.start_pod(7, *PAIR)
    world.run(agent, 10)
    assert "Leased" in refusal(world, *PAIR)


def test_what_was_answered_is_no_other_pods_although_no_agent_has_seen_the_first(world: World) -> None:
    """Its machine came and went while the agent did not run: the GPUs are as that tenant left them."""
    agent = all_free(world)
    world.allocate(world.gate(), *PAIR)
    world.start_pod(7, *PAIR)
    world.end_pod(7)
    gate = world.gate()
    resource = Resource("nvidia.com/gpu", DEVICES, "vfio")
    assert not gate.has_changed() or not gate.has_changed()
    assert not any(device.error for device in gate.with_leases(resource).devices), "a pod may have them"
    with pytest.raises(OcigpuError, match="Reserved"):
        world.allocate(gate, *PAIR)
    assert gate.has_changed()
    assert not gate.has_changed()
    withheld = {device.gpu for device in gate.with_leases(resource).devices if device.error}
    assert withheld == set(PAIR), "the kubelet would give them to pod after pod"
    world.run_until(agent, PAIR, Phase.FREE)
    assert not any(device.error for device in gate.with_leases(resource).devices)
    world.allocate(gate, *PAIR)
    assert {world.leases()[gpu].generation for gpu in PAIR} == {2}
    assert not any(device.error for device in gate.with_leases(resource).devices)


def test_a_pod_that_is_deleted_by_force_leaves_its_machine(world: World) -> None:
    agent = all_free(world)
    world.allocate(world.gate(), GPUS[0])
    world.start_pod(7, GPUS[0])
    world.run(agent, 10)
    world.kubelet = {}
    world.run(agent, 60)
    lease = agent.journal.leases[GPUS[0]]
    assert (lease.phase, lease.detail) == (Phase.RECLAIMING, "process 7 has the GPU open")
    world.vms.clear()
    world.run_until(agent, GPUS[:1], Phase.FREE)


def test_the_kubelet_is_silent_for_an_hour(world: World) -> None:
    """What is lent stays lent, and nothing becomes free that may have a pod."""
    agent = all_free(world)
    world.allocate(world.gate(), GPUS[0])
    world.start_pod(7, GPUS[0])
    world.run(agent, 10)
    pods, world.kubelet = world.kubelet, None
    world.run(agent, 1800, 10)
    assert agent.journal.leases[GPUS[0]].phase is Phase.LEASED
    world.vms.clear()
    world.run(agent, 1800, 10)
    assert agent.journal.leases[GPUS[0]].phase is Phase.RECLAIMING
    assert sum("UNAVAILABLE" in line for line in world.log.lines) == 1
    assert NO_KUBELET in refusal(world, GPUS[0])
    written = agent.journal.number
    world.run(agent, 600, 10)
    assert agent.journal.number == written, "it is written down once"
    assert pods
    world.kubelet = pods
    world.run(agent, 20)
    assert NO_KUBELET not in refusal(world, GPUS[0])
    world.kubelet = None
    world.run(agent, 20)
    assert NO_KUBELET in refusal(world, GPUS[0])
    world.kubelet = {}
    world.run_until(agent, GPUS[:1], Phase.FREE)


def test_a_deviation_quarantines_and_an_operator_releases(world: World) -> None:
    world.deviations[GPUS[0]] = "VBIOS 96.1, accepted 96.0"
    agent = world.agent()
    world.run_until(agent, GPUS, Phase.FREE, Phase.QUARANTINED)
    lease = agent.journal.leases[GPUS[0]]
    assert (lease.phase, lease.reason, lease.detail) == (
        Phase.QUARANTINED,
        "FirmwareMismatch",
        "VBIOS 96.1, accepted 96.0",
    )
    assert "FirmwareMismatch" in refusal(world, GPUS[0])
    world.run(agent, 7200, 60)
    del world.deviations[GPUS[0]]
    agent.journal.tell({GPUS[0]: LeaseEvent(LeaseEventKind.RELEASE, lease.generation + 1)})
    assert agent.journal.leases[GPUS[0]].phase is Phase.QUARANTINED
    world.journal().tell({GPUS[0]: LeaseEvent(LeaseEventKind.RELEASE, lease.generation)})  # by another program
    world.run_until(agent, GPUS, Phase.FREE)


def test_a_reset_that_fails_keeps_its_set_company_no_longer_than_needed(world: World) -> None:
    agent = all_free(world)
    world.allocate(world.gate(), *PAIR)
    world.start_pod(7, *PAIR)
    world.run(agent, 10)
    world.broken.add(PAIR[0])
    world.end_pod(7)
    world.run_until(agent, PAIR, Phase.FREE, Phase.QUARANTINED)
    leases = agent.journal.leases
    assert (leases[PAIR[0]].reason, leases[PAIR[1]].phase) == ("ResetFailed", Phase.FREE)


def test_a_tenant_whose_nvlinks_are_lost_keeps_its_gpu_until_it_ends(world: World) -> None:
    agent = all_free(world)
    world.lost = {GPUS[7]: "PartitionLost: of nobody"}
    world.allocate(world.gate(), *PAIR)
    world.start_pod(7, *PAIR)
    world.lost = dict.fromkeys(PAIR, "PartitionLost: the service machine was restarted")
    world.run(agent, 10)
    assert {(lease.phase, lease.sick) for gpu, lease in agent.journal.leases.items() if gpu in PAIR} == {
        (Phase.LEASED, "PartitionLost: the service machine was restarted")
    }
    world.lost = {}
    world.end_pod(7)
    world.run_until(agent, PAIR, Phase.QUARANTINED)
    lease = agent.journal.leases[PAIR[0]]
    assert (lease.reason, lease.detail) == ("PartitionLost", "the service machine was restarted")


def test_after_a_reboot_nothing_is_free_until_checked(world: World) -> None:
    all_free(world)
    world.boot, world.time = "boot 2", 30.0
    assert "lease of an earlier boot" in refusal(world, GPUS[0])
    agent = world.agent()
    agent.step()
    assert world.phases() == {"Reclaiming"}
    world.run_until(agent, GPUS, Phase.FREE)


def test_numbers_of_gpus_that_no_partition_has(world: World) -> None:
    """Refused in one line that says what would give them; where they are wanted, the price is written down."""
    agent = all_free(world)
    three = (GPUS[0], GPUS[1], GPUS[2])
    assert "3 GPUs are not a partition of this board (sizes: 1, 2, 4, 8); --unlinked-sets" in refusal(world, *three)
    gate = LeaseGate(world.journal(), world.board, lambda: MODULES, world.holders, unlinked=True)
    assert gate.prefer(DEVICES, [device.id for device in DEVICES], [], 3) == ("1", "2", "3"), "one four is spoilt"
    assert set(gate.prefer(DEVICES, [device.id for device in DEVICES], ["5"], 3)) == {"5", "6", "7"}
    assert gate.prefer(DEVICES, ["1", "2"], [], 3) == ()
    cost = gate.reserve([device for device in DEVICES if device.gpu in three])
    assert cost == f"{UNLINKED}; free sets of 8: 1 to 0, of 4: 2 to 1, of 2: 4 to 2"
    assert world.board.active == {(1,), (2,), (3,)}
    assert {(world.leases()[gpu].phase, world.leases()[gpu].detail) for gpu in three} == {(Phase.RESERVED, cost)}
    world.start_pod(7, *three)
    world.run_until(agent, three, Phase.LEASED)
    world.end_pod(7)
    world.run_until(agent, three, Phase.FREE)
    assert not world.board.active
    assert "no partition of this board" in refusal(world, GPUS[0], GPUS[1]), "a size that partitions have is one"


def in_groups(*groups: tuple[int, ...], switches: tuple[str, ...] = ()) -> tuple[PluginDevice, ...]:
    """Return a device for each IOMMU group, of GPUs by module."""
    made = []
    for numbers in groups:
        gpus = tuple(GPUS[number - 1] for number in numbers)
        name = "-".join(map(str, numbers))
        made.append(PluginDevice(name, name, gpus[0], name, gpus=gpus, group=GroupMembers(gpus, switches)))
    return tuple(made)


def test_a_group_of_several_gpus_is_one_device_of_all_of_them(world: World) -> None:
    agent, gate = all_free(world), world.gate()
    devices = in_groups((1, 3), (2, 4), (5, 7), (6, 8))
    assert gate.prefer(devices, [device.id for device in devices], [], 1) == ("1-3",)
    assert set(gate.prefer(devices, [device.id for device in devices], ["5-7"], 2)) == {"5-7", "6-8"}
    gate.reserve(devices[:1])
    assert {gpu for gpu, lease in world.leases().items() if lease.phase is Phase.RESERVED} == set(PAIR)
    world.start_pod(7, *PAIR)
    world.run_until(agent, PAIR, Phase.LEASED)
    world.end_pod(7)
    world.deviations[PAIR[1]] = "VBIOS 96.1, accepted 96.0"
    world.run_until(agent, PAIR, Phase.FREE, Phase.QUARANTINED)
    (first, second, *_) = gate.with_leases(Resource("nvidia.com/gpu", devices, "vfio")).devices
    assert first.error == f"GPU {PAIR[1]}: {describe(world.leases()[PAIR[1]])}"
    assert not second.error
    with pytest.raises(OcigpuError, match=f"GPU {PAIR[1]} cannot be assigned: lease is Quarantined"):
        gate.reserve(devices[:1])


def test_gpus_of_one_group_go_together(world: World) -> None:
    """As single functions (iommufd): each is a device, and one machine must have all."""
    all_free(world)
    gate, both = world.gate(), GroupMembers(PAIR)
    devices = [device._replace(gpus=(device.gpu,), group=both) if device.gpu in PAIR else device for device in DEVICES]
    pair = [device for device in devices if device.gpu in PAIR]
    words = f"GPU {PAIR[0]} cannot be assigned: it needs GPU {PAIR[1]} of the same IOMMU group"
    before = world.leases()
    with pytest.raises(OcigpuError, match=words):
        gate.reserve(pair[:1])
    assert world.leases() == before
    assert gate.prefer(devices, [device.id for device in devices], [], 1) == ("2",), "1 and 3 are not for one each"
    gate.reserve(pair)
    assert world.board.active == {(1, 3)}
    resource = gate.with_leases(Resource("nvidia.com/gpu", tuple(devices), "vfio"))
    assert not any(device.error for device in resource.devices)


def test_no_tenant_has_an_nvswitch(world: World) -> None:
    all_free(world)
    (device,) = in_groups((1,), switches=("0000:0a:00.0",))
    gate = world.gate()
    why = "its IOMMU group has the NVSwitch 0000:0a:00.0, which no tenant may have"
    assert gate.with_leases(Resource("nvidia.com/gpu", (device,), "vfio")).devices[0].error == why
    with pytest.raises(OcigpuError, match=f"GPU {GPUS[0]} cannot be assigned: {why}"):
        gate.reserve([device])


class Killed(BaseException):
    """The program is gone."""


def counting(left: list[int]) -> Callable[[str], None]:
    def hook(_name: str) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    return hook


def test_killed_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each write of the journal, each effect and each call of the fabric: the next programs go on, nothing is lost.

    A story of two containers; whoever is killed is begun anew and does again what it was doing.
    """
    kills = 0
    for at in itertools.count(1):
        world = World(tmp_path / str(at), gpus=3)
        left = [at]
        hook = counting(left)
        world.hook = hook
        with monkeypatch.context() as patch:
            for name in ("fsync", "rename"):
                patch.setattr(os, name, around(getattr(os, name), hook))
            for name in ("activate", "deactivate"):
                monkeypatch.setattr(world.board, name, around(getattr(world.board, name), hook))
            story(world)
        if left[0] > 0:
            break
        kills += 1
    assert kills > 60


def test_killed_between_the_partitions_of_a_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three that are switched on one after another: what was begun goes the way of every GPU that comes back."""
    kills = 0
    for at in itertools.count(1):
        world = World(tmp_path / str(at), gpus=3)
        agent = all_free(world)
        left = [at]
        hook = counting(left)
        gate = LeaseGate(world.journal(), world.board, lambda: MODULES, world.holders, unlinked=True)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", around(os.fsync, hook))
            patch.setattr(world.board, "activate", around(world.board.activate, hook))
            try:
                gate.reserve(DEVICES[:3])
            except Killed:
                kills += 1
        if left[0] > 0:
            break
        assert world.phases() <= {"Free", "Reserved"}
        world.run_until(agent, world.there, Phase.FREE)
        assert not world.board.active
    assert kills == 10


def around(call: Callable[..., Any], hook: Callable[[str], None]) -> Callable[..., Any]:
    def function(*arguments: Any, **options: Any) -> Any:
        hook("before")
        result = call(*arguments, **options)
        hook("after")
        return result

    return function


def story(world: World) -> None:
    programs = [world.agent()]

    def survive(what: Callable[[], Any]) -> Any:
        for _ in range(2):
            try:
                return what()
            except Killed:
                programs[0] = world.agent()
        raise AssertionError("killed twice")

    def until(gpus: tuple[str, ...], *phases: Phase) -> None:
        survive(lambda: world.run_until(programs[0], gpus, *phases))

    def get(pid: int, *gpus: str) -> None:
        """As the kubelet: a request whose answer was lost is another pod's, when the GPUs are free again."""
        for _ in range(4):
            until(gpus, Phase.FREE, Phase.RESERVED)
            try:
                survive(lambda: world.allocate(world.gate(), *gpus))
            except OcigpuError:
                continue
            break
        world.start_pod(pid, *gpus)
        until(gpus, Phase.LEASED)

    there = world.there
    until(there, Phase.FREE)
    get(7, *PAIR)
    get(8, GPUS[1])
    world.end_pod(7)
    until(PAIR, Phase.FREE)
    world.end_pod(8)
    until(there, Phase.FREE)
    assert not world.board.active
    generations = [generation for gpu, generation in world.answers if gpu == GPUS[0]]
    assert generations == sorted(generations)


def test_a_full_disk_gives_nothing_away(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = all_free(world)
    with monkeypatch.context() as patch:

        def full(*_arguments: Any) -> int:
            raise OSError(28, "No space left on device")

        patch.setattr(os, "write", full)
        patch.setattr(os, "fsync", full)
        assert "OCIGPU-LEASE-1" in refusal(world, *PAIR)
        assert not world.board.active
    world.allocate(world.gate(), *PAIR)
    world.run(agent, 3)
