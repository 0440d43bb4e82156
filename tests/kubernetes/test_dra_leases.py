"""Claims of GPUs for virtual machines on a node with leases: reserved, given back, reset, checked; taints say where."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dra_lab import DRIVER, NODE, Lab, opaque, result, vfio_name
from lease_lab import GPUS, World
from support.driverless import make_driverless

from ocigpu.core.errors import OcigpuError
from ocigpu.core.settings import Settings
from ocigpu.gpus.vfio.facts import read_vfio_facts
from ocigpu.kubernetes.cluster.owners import Claim, Owner
from ocigpu.kubernetes.cluster.pods import Listing
from ocigpu.kubernetes.dra.devices import DraNode, make_devices
from ocigpu.kubernetes.dra.driver import DraDriver, taint_of_lease
from ocigpu.kubernetes.dra.effects import Effects, plan_steps
from ocigpu.kubernetes.dra.options import parse_options
from ocigpu.kubernetes.dra.prepare import ClaimEffect
from ocigpu.kubernetes.dra.specs import NodeView
from ocigpu.kubernetes.leases import machine
from ocigpu.kubernetes.leases.lease import Lease, Phase
from ocigpu.kubernetes.leases.machine import MachineHands
from ocigpu.kubernetes.node.vfio import vfio_names

PAIR = (GPUS[0], GPUS[2])
"""Modules 1 and 3, a partition."""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> tuple[Settings, DraNode]:
    directory = tmp_path_factory.mktemp("dra") / "host"
    roots = make_driverless(directory)
    return Settings(simulation_root=str(directory)), DraNode(vfio=read_vfio_facts(roots))


class Leased(Lab):
    """A preparer on a node whose GPUs have leases; ``world`` has agent, fabric manager and virtual machines."""

    def __init__(self, directory: Path, node: tuple[Settings, DraNode]) -> None:
        self.world = World(directory / "leases")
        self.agent = self.world.agent()
        self.world.run_until(self.agent, GPUS, Phase.FREE)
        self.effects = Effects(node[0], str(directory / "mps"), lambda *_, **__: None, gate=self.world.gate())
        super().__init__(directory / "lab", settings=node[0], effects=self.effects.table, plan=plan_steps)
        self.node = node[1]

    def view(self) -> NodeView | None:
        view = super().view()
        return view and view._replace(options=view.options._replace(lease_journal="on"))

    def phases(self, *gpus: str) -> set[str]:
        return {str(self.world.leases()[gpu].phase) for gpu in gpus}

    def machine(self, uid: str, *gpus: str) -> Any:
        return self.add(uid, *(result(vfio_name(gpu)) for gpu in gpus), config=[opaque("VfioDeviceConfig")])


@pytest.fixture
def leased(tmp_path: Path, node: tuple[Settings, DraNode]) -> Leased:
    return Leased(tmp_path, node)


@pytest.mark.root
def test_a_claim_is_a_lease_from_prepare_to_the_check(leased: Leased) -> None:
    ref, world, agent = leased.machine("vm", *PAIR), leased.world, leased.agent
    leased.preparer.prepare(ref)
    assert world.board.active == {(1, 3)}
    assert {world.leases()[gpu].lease_set for gpu in PAIR} == {"claim/vm"}
    assert leased.preparer.prepare(ref), "the kubelet asks again"
    world.start_pod(7, *PAIR)
    world.run_until(agent, PAIR, Phase.LEASED)
    leased.preparer.unprepare(ref)
    assert leased.phases(*PAIR) == {"Reclaiming"}
    later = leased.machine("later", *PAIR)
    with pytest.raises(OcigpuError, match="lease is Reclaiming"):
        leased.preparer.prepare(later)
    assert leased.preparer.held() == ()
    world.end_pod(7)
    world.run_until(agent, PAIR, Phase.FREE)
    assert not world.board.active
    leased.preparer.prepare(later)
    assert [world.leases()[gpu].generation for gpu in PAIR] == [2, 2]


@pytest.mark.root
def test_what_is_reserved_for_one_is_nobody_elses(leased: Leased) -> None:
    """Also before its pod is seen: a claim's repeated request is answered again, another's for the same GPUs is not.

    Requests of the device plugin have no name: whose the second is nobody knows.
    """
    gate = leased.world.gate()
    gate.reserve_set(PAIR, [], "claim/one")
    gate.reserve_set(PAIR, [], "claim/one")
    for name in ("claim/two", ""):
        with pytest.raises(OcigpuError, match="lease is Reserved"):
            gate.reserve_set(PAIR, [], name)
    gate.reserve_set(GPUS[1:2], [])
    for name in ("claim/two", ""):
        with pytest.raises(OcigpuError, match="lease is Reserved"):
            gate.reserve_set(GPUS[1:2], [], name)
    gate.give_back("claim/two")
    assert leased.phases(*PAIR) == {"Reserved"}


@pytest.mark.root
def test_what_is_no_partition_is_refused_and_leaves_nothing(leased: Leased) -> None:
    before = leased.world.leases()
    with pytest.raises(OcigpuError, match="no partition of this board"):
        leased.preparer.prepare(leased.machine("vm", *GPUS[:2]))
    assert (leased.world.leases(), leased.preparer.held(), leased.specs) == (before, (), [])


@pytest.mark.root
def test_a_claim_whose_pod_never_came_comes_back_at_once(leased: Leased) -> None:
    ref = leased.machine("vm", GPUS[0])
    leased.preparer.prepare(ref)
    leased.preparer.unprepare(ref)
    assert leased.phases(GPUS[0]) == {"Reclaiming"}
    leased.world.run_until(leased.agent, GPUS[:1], Phase.FREE, limit=60)


class Killed(BaseException):
    """The driver is gone."""


@pytest.mark.root
def test_a_driver_that_is_killed_while_it_prepares_gives_back(leased: Leased, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> None:
        raise Killed

    ref = leased.machine("vm", GPUS[0])
    with monkeypatch.context() as patch:
        patch.setitem(leased.preparer.effects, "vfio", ClaimEffect(killed, killed))
        patch.setattr(leased.preparer, "undo_if_possible", killed)
        with pytest.raises(Killed):
            leased.preparer.prepare(ref)
    assert leased.phases(GPUS[0]) == {"Reserved"}
    leased.restart()
    assert leased.phases(GPUS[0]) == {"Reclaiming"}
    leased.world.run_until(leased.agent, GPUS[:1], Phase.FREE, limit=60)
    assert leased.preparer.prepare(ref)


@pytest.mark.root
def test_the_devices_say_where_their_leases_are(leased: Leased) -> None:
    words = ("--node-name=n1", f"--plugins-directory={leased.directory}", f"--lease-journal={leased.world.directory}")
    driver = DraDriver(parse_options(words, {}), leased.settings)
    assert driver.gate
    driver.gate.journal.boot = leased.world.boot
    driver.node, driver.devices = leased.node, make_devices(leased.node or DraNode())
    driver.update_reasons()
    taints: dict[str, list[tuple[str, ...]]] = {}

    def look() -> dict[str, list[tuple[str, ...]]]:
        assert driver.gate
        if driver.gate.has_changed():
            driver.update_reasons()
        return {each.name: [tuple(taint) for taint in each.taints] for each in driver.offered if each.taints}

    assert look() == taints
    leased.preparer.prepare(leased.machine("vm", GPUS[0]))
    leased.world.start_pod(7, GPUS[0])
    leased.world.run_until(leased.agent, GPUS[:1], Phase.LEASED)
    assert look() == {}, "one that a pod has is not for others anyway"
    leased.world.lost = {GPUS[0]: "PartitionLost: the manager was restarted"}
    leased.world.run(leased.agent, 5)
    assert look() == {vfio_name(GPUS[0]): [(f"{DRIVER}/quarantined", "PartitionLost", "NoExecute")]}
    leased.world.lost = {}
    leased.world.end_pod(7)
    leased.world.run_until(leased.agent, GPUS[:1], Phase.QUARANTINED)
    assert look() == {vfio_name(GPUS[0]): [(f"{DRIVER}/quarantined", "PartitionLost", "NoExecute")]}


TAINTS = [
    (None, ("lease", "None", "NoSchedule")),
    (Lease(GPUS[0], Phase.FREE, boot="b"), None),
    (Lease(GPUS[0], Phase.RESERVED, boot="b"), None),
    (Lease(GPUS[0], Phase.FREE, boot="another"), ("lease", "Free", "NoSchedule")),
    (Lease(GPUS[0], Phase.CHECKING, boot="b"), ("lease", "Checking", "NoSchedule")),
    (Lease(GPUS[0], Phase.MAINTENANCE, boot="b"), ("lease", "Maintenance", "NoSchedule")),
    (Lease(GPUS[0], Phase.QUARANTINED, boot="b", reason="Xid"), ("quarantined", "Xid", "NoExecute")),
    (replace(Lease(GPUS[0], Phase.LEASED, boot="b"), sick="Xid"), ("quarantined", "Xid", "NoExecute")),
    (
        replace(Lease(GPUS[0], Phase.LEASED, boot="b"), sick="not (well), 3 x"),
        ("quarantined", "not-well-3-x", "NoExecute"),
    ),
]


@pytest.mark.parametrize(("lease", "taint"), TAINTS)
def test_the_taint_of_a_lease(lease: Lease | None, taint: tuple[str, str, str] | None) -> None:
    found = taint_of_lease(lease, "b", DRIVER)
    assert (tuple(found[0]) if found else None) == (taint and (f"{DRIVER}/{taint[0]}", *taint[1:]))


@pytest.mark.root
def test_the_agent_knows_the_pods_of_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a GPU is lost: the others are still those that the pods were given."""
    roots = make_driverless(tmp_path / "host")
    settings = Settings(simulation_root=str(tmp_path / "host"))
    first, second = map(vfio_name, GPUS[:2])
    assert list(vfio_names(read_vfio_facts(roots)).items())[:2] == [(first, GPUS[0]), (second, GPUS[1])]
    owners = [
        Owner(pod, "tenant-a", container, claim=Claim("vm-claim", "tenant-a", driver, NODE, device))
        for pod, container, driver, device in (
            ("pod", "main", DRIVER, second),
            ("pod", "side", DRIVER, second),
            ("other", "main", "gpu.other.com", first),
            ("gpus", "main", DRIVER, "gpu-0"),
        )
    ]
    monkeypatch.setattr(machine, "list_containers", lambda _socket: Listing(claimed=tuple(owners)))
    hands = MachineHands(settings, lambda _gpu: "")
    for present in (GPUS, GPUS[1:]):
        assert [item.function.address for item in read_vfio_facts(roots).candidates if not item.is_switch] == [*present]
        assert {gpu: tuple(each) for gpu, each in hands.pods().items()} == {
            GPUS[1]: ("tenant-a", "pod", "vm-claim", "", "a")
        }
        if present == GPUS:
            (tmp_path / "host/sys/bus/pci/devices" / GPUS[0]).unlink()
