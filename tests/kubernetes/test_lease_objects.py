"""Leases as objects of the cluster: the kind's schema and rules; they follow the journal and hold nothing up."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lease_lab import GPUS, Inline, World
from support.cluster import Cluster

from ocigpu.kubernetes.tenants.lease import Lease, LeaseHolder, Phase
from ocigpu.kubernetes.tenants.report import LeaseReporter, lease_name
from ocigpu.kubernetes.tenants.resources import Documents
from ocigpu.kubernetes.tenants.tenancy import find_held_leases

CRD = Path(__file__).parents[2] / "packaging/kubernetes/chart/crds/gpuleases.yaml"
NAME = lease_name("node-1", GPUS[0])
HOLDER = LeaseHolder("tenant-landon", "pod7", "main", tenancy="landon")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        made.apply_manifests(CRD)
        yield made


class Reported:
    """A reporter with a clock of its own, and what it logs."""

    def __init__(self, cluster: Cluster) -> None:
        self.time, self.log = 1_700_000_000.0, list[str]()
        self.reporter = LeaseReporter(
            Documents(cluster.client()), "node-1", Inline(), lambda level, text: self.log.append(f"{level}: {text}"),
            lambda: self.time, lambda: self.time,
        )  # fmt: skip

    def step(self, *leases: Lease, seconds: float = 0.0) -> None:
        self.time += seconds
        self.reporter.step({lease.gpu: lease for lease in leases}, self.time)


def status(cluster: Cluster) -> Any:
    return cluster.get("GPULease", NAME)["status"]


def test_an_object_follows_its_lease(cluster: Cluster) -> None:
    reported = Reported(cluster)
    lease = Lease(GPUS[0], Phase.LEASED, 3, since=reported.time - 60, holder=HOLDER, members=GPUS[:2])
    reported.step(lease)
    found = cluster.get("GPULease", NAME)
    assert found["spec"] == {"nodeName": "node-1", "pciAddress": GPUS[0]}
    assert (found["status"]["phase"], found["status"]["holder"]["tenancy"]) == ("Leased", "landon")
    assert found["status"]["since"] == "2023-11-14T22:12:20Z"
    assert find_held_leases([found], "landon") == (NAME,)
    written = len(cluster.requests)
    reported.step(lease, seconds=60)
    assert len(cluster.requests) == written, "what has not changed is not written"
    reported.step(replace(lease, phase=Phase.RECLAIMING, proofs=("pod-over",), sick="Xid"), seconds=60)
    assert status(cluster)["missing"] == ["no-holder", "reset", "partition-off"]
    conditions = {each["type"]: (each["status"], each["reason"]) for each in status(cluster)["conditions"]}
    assert conditions == {
        "Ready": ("False", "Reclaiming"), "DeviceHealthy": ("False", "Xid"), "PodOver": ("True", "Reclaiming"),
    }  # fmt: skip
    times = {each["type"]: each["lastTransitionTime"] for each in status(cluster)["conditions"]}
    reported.step(Lease(GPUS[0], Phase.QUARANTINED, 3, since=reported.time, reason="Xid"), seconds=60)
    after = {each["type"]: each["lastTransitionTime"] for each in status(cluster)["conditions"]}
    assert after["DeviceHealthy"] == times["DeviceHealthy"]
    assert "holder" not in status(cluster)
    assert find_held_leases([cluster.get("GPULease", NAME)], "landon") == ()


def test_the_api_server_is_gone_for_an_hour(cluster: Cluster, tmp_path: Path) -> None:
    """GPUs go round without it, and then the objects say where they are."""
    world, reported = World(tmp_path), Reported(cluster)
    agent = world.agent()
    cluster.fail(10_000, 503)
    for _ in range(3600 // 20):
        world.time += 20
        reported.step(*agent.step().values(), seconds=20)
    assert {lease.phase for lease in agent.journal.leases.values()} == {Phase.FREE}
    assert 0 < len(reported.log) <= 2, reported.log
    cluster._failures.clear()
    reported.step(*agent.step().values(), seconds=60)
    reported.step(*agent.step().values(), seconds=60)
    assert [each["status"]["phase"] for each in cluster.objects("GPULease")] == ["Free"] * 8


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "another GPU": ({"spec": {"nodeName": "node-1", "pciAddress": GPUS[1]}}, "one GPU of one node"),
    "no address": ({"spec": {"nodeName": "node-1", "pciAddress": "gpu0"}}, "pciAddress"),
    "no such phase": ({"status": {"phase": "Lost", "generation": 4}}, "phase"),
    "a generation that goes back": ({"status": {"phase": "Free", "generation": 2}}, "never goes back"),
    "a reservation of the same generation": ({"status": {"phase": "Reserved", "generation": 3}}, "a new generation"),
}


@pytest.mark.parametrize(("change", "says"), BAD.values(), ids=BAD)
def test_what_the_kind_refuses(cluster: Cluster, change: dict[str, Any], says: str) -> None:
    Reported(cluster).step(Lease(GPUS[0], Phase.LEASED, 3))
    sub = "status" if "status" in change else ""
    with pytest.raises(Exception, match=says):
        cluster.patch("GPULease", NAME, change, sub=sub)
