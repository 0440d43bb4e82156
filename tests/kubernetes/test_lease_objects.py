"""Leases as objects of the cluster: the kind's schema and rules; they follow the journal and hold nothing up."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lease_lab import GPUS, MODULES, Inline, World
from support.cluster import Cluster
from support.lines import Lines
from support.process import wait_for

from ocigpu.core.errors import HostError
from ocigpu.kubernetes.cluster.announce import make_event
from ocigpu.kubernetes.cluster.documents import Documents
from ocigpu.kubernetes.leases.lease import Lease, LeaseEvent, LeaseEventKind, LeaseHolder, Phase
from ocigpu.kubernetes.leases.objects import LeaseWish, notices_between, read_wish
from ocigpu.kubernetes.leases.report import LOOK_SECONDS, LeaseReporter, LeaseWatch, lease_name
from ocigpu.tenants.service.fleet import view_nodes
from ocigpu.tenants.tenancy import find_held_leases

CRD = Path(__file__).parents[2] / "packaging/kubernetes/chart/kinds/gpuleases.yaml"
NAME = lease_name("node-1", GPUS[0])
HOLDER = LeaseHolder("tenant-landon", "pod7", "main", tenancy="landon")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        made.apply_manifests(CRD)
        yield made


class Reported:
    """A reporter with a clock of its own, and what it logs; ``modules``: by address, None when it cannot be said."""

    def __init__(self, cluster: Cluster) -> None:
        self.time, self.log = 1_700_000_000.0, Lines()
        self.modules: dict[str, int] | None = MODULES
        self.reporter = LeaseReporter(
            Documents(cluster.client()),
            "node-1",
            Inline(),
            self.log,
            lambda: self.time,
            lambda: self.time,
            self.say_modules,
        )

    def say_modules(self) -> Mapping[str, int]:
        if self.modules is None:
            raise HostError("OCIGPU-VFIO-7", "they disagree")
        return self.modules

    def step(self, *leases: Lease, seconds: float = 0.0) -> Mapping[str, LeaseEvent]:
        self.time += seconds
        return self.reporter.step({lease.gpu: lease for lease in leases}, self.time)


def methods(cluster: Cluster) -> list[str]:
    return [method for method, _ in cluster.requests]


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
    (shown,) = view_nodes([], [found], "nvidia.com/gpu")[0].gpus
    assert (shown.module, shown.partition, shown.tenancy) == (MODULES[GPUS[0]], [MODULES[GPUS[0]]], "landon")
    written = methods(cluster)
    reported.step(lease, seconds=60)
    assert methods(cluster) == [*written, "GET"], "what has not changed is not written"
    reported.step(replace(lease, phase=Phase.RECLAIMING, proofs=("pod-over",), sick="Xid"), seconds=60)
    assert status(cluster)["missing"] == ["no-holder", "reset", "partition-off"]
    conditions = {each["type"]: (each["status"], each["reason"]) for each in status(cluster)["conditions"]}
    assert conditions == {
        "Ready": ("False", "Reclaiming"), "DeviceHealthy": ("False", "Xid"), "PodOver": ("True", "Reclaiming"),
        "AsWished": ("True", "Reclaiming"),
    }  # fmt: skip
    times = {each["type"]: each["lastTransitionTime"] for each in status(cluster)["conditions"]}
    reported.step(Lease(GPUS[0], Phase.QUARANTINED, 3, since=reported.time, reason="Xid"), seconds=60)
    after = {each["type"]: each["lastTransitionTime"] for each in status(cluster)["conditions"]}
    assert after["DeviceHealthy"] == times["DeviceHealthy"]
    assert "holder" not in status(cluster)
    reported.modules = None
    reported.step(Lease(GPUS[0], Phase.QUARANTINED, 3, since=reported.time, reason="Other"), seconds=60)
    assert "physicalId" not in status(cluster)
    assert find_held_leases([cluster.get("GPULease", NAME)], "landon") == ()


def test_a_node_asks_once_for_all_of_its_gpus(cluster: Cluster) -> None:
    """800 GPUs that are asked for one by one every 10 s are 80 requests in a second; each node has its own answer."""
    node, other = "node-1", "n." * 100 + "example"
    leases = {gpu: Lease(gpu, Phase.FREE, 3) for gpu in GPUS}
    reporters = []
    clock = [0.0]
    for name in (node, other):
        documents = Documents(cluster.client())
        reporters.append(LeaseReporter(documents, name, Inline(), Lines(), lambda: 1.7e9, lambda: clock[0]))
    for reporter in reporters:
        assert reporter.step(leases, 0.0) == {}
    cluster.patch("GPULease", lease_name(other, GPUS[0]), {"spec": {"maintenance": True}})
    before = len(cluster.requests)
    for second in range(1, 601):
        clock[0] = float(second)
        acts = [reporter.step(leases, 0.0) for reporter in reporters]
    assert [list(each) for each in acts] == [[], [GPUS[0]]]
    sent = cluster.requests[before:]
    assert {method for method, _ in sent} == {"GET", "PATCH"}
    assert sum(method == "GET" for method, _ in sent) == 2 * 60
    assert sum(method == "PATCH" for method, _ in sent) == 1, "that its wish was seen"


def test_with_a_watch_nobody_asks_and_a_wish_is_heard_at_once(cluster: Cluster) -> None:
    """The wish, an object that is gone, and a watch that breaks; the events of our own writes are nothing new."""
    leases, clock, log = {gpu: Lease(gpu, Phase.FREE, 3) for gpu in GPUS}, [0.0], Lines()
    watch = LeaseWatch(Documents(cluster.client()), "node-1")
    watch.start()
    reporter = LeaseReporter(
        Documents(cluster.client()), "node-1", Inline(), log, lambda: 1.7e9, lambda: clock[0], watch=watch
    )

    def step(seconds: float = 1.0) -> list[str]:
        clock[0] += seconds
        return list(reporter.step(leases, 0.0))

    def count(method: str) -> int:
        return methods(cluster).count(method)

    assert step() == []
    wait_for("the watch", watch.has_news)  # of its own writes
    reads, writes = count("GET"), count("PATCH")
    for _ in range(60):
        assert step() == []
    assert (count("GET"), count("PATCH")) == (reads, writes), "nothing is asked for, nothing is written"
    cluster.patch("GPULease", NAME, {"spec": {"maintenance": True}})
    wait_for("the wish", lambda: step(0.1) == [GPUS[0]])
    assert (count("GET"), count("PATCH")) == (reads, writes + 1), "that its wish was seen"
    cluster.delete("GPULease", NAME)
    wait_for("the object", lambda: step(0.1) is not None and cluster.exists("GPULease", NAME))
    cluster.fail(1, 503, "GET", "gpuleases$")  # it cannot be begun again at once
    cluster.drop_watches()
    wait_for("the end of the watch", lambda: not watch.follows)
    cluster.patch("GPULease", NAME, {"spec": {"maintenance": True}})
    wait_for("the wish, by a list", lambda: step(LOOK_SECONDS) == [GPUS[0]])
    wait_for("the watch again", lambda: watch.follows)
    assert [line for line in log.lines if "answer 503" not in line] == []


def test_an_object_that_somebody_deletes_is_made_again(cluster: Cluster) -> None:
    reported = Reported(cluster)
    reported.step(Lease(GPUS[0], Phase.FREE, 3))
    cluster.delete("GPULease", NAME)
    for _ in range(3):  # what has failed is heard of, and done again
        reported.step(Lease(GPUS[0], Phase.RESERVED, 4), seconds=3)
    assert status(cluster)["phase"] == "Reserved"


def test_the_api_server_is_gone_for_an_hour(cluster: Cluster, tmp_path: Path) -> None:
    """GPUs go round without it, and then the objects say where they are."""
    world, reported = World(tmp_path), Reported(cluster)
    agent = world.agent()
    cluster.fail(10_000, 503)
    for _ in range(3600 // 20):
        world.time += 20
        reported.step(*agent.step().values(), seconds=20)
    assert {lease.phase for lease in agent.journal.leases.values()} == {Phase.FREE}
    assert 0 < len(reported.log.lines) <= 2, reported.log.lines
    cluster.recover()
    reported.step(*agent.step().values(), seconds=60)
    reported.step(*agent.step().values(), seconds=60)
    assert [each["status"]["phase"] for each in cluster.objects("GPULease")] == ["Free"] * 8


class Obeyed:
    """A node whose agent does what the objects want, as ``ocigpu lease agent`` does."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster, self.world, self.reported = cluster, World(directory, gpus=1), Reported(cluster)
        self.agent = self.world.agent()

    def wish(self, **spec: Any) -> None:
        self.cluster.patch("GPULease", NAME, {"spec": spec})

    def run(self, seconds: int) -> Lease:
        """Return the lease after so many seconds."""
        for _ in range(seconds):
            self.world.time += 1
            self.agent.obey(self.reported.step(*self.agent.step().values(), seconds=1))
            self.world.check_truth(self.agent.journal.leases)
        return self.agent.journal.leases[GPUS[0]]

    def as_wished(self) -> tuple[str, str]:
        (found,) = [each for each in status(self.cluster)["conditions"] if each["type"] == "AsWished"]
        return found["status"], found["message"]


def test_maintenance_is_what_the_object_wants(cluster: Cluster, tmp_path: Path) -> None:
    node = Obeyed(cluster, tmp_path)
    assert node.run(60).phase is Phase.FREE
    node.wish(maintenance=True, reason="firmware update")
    lease = node.run(30)
    assert (lease.phase, lease.reason, lease.detail) == (Phase.MAINTENANCE, "ObjectRequest", "firmware update")
    assert (status(cluster)["phase"], node.as_wished()) == ("Maintenance", ("True", ""))
    assert status(cluster)["observedGeneration"] == 2
    node.agent = node.world.agent()  # begun anew
    node.reported = Reported(cluster)
    assert node.run(30).phase is Phase.MAINTENANCE
    node.agent.journal.tell(
        {GPUS[0]: LeaseEvent(LeaseEventKind.RELEASE, lease.generation)}
    )  # on the node: the object wins
    node.run(1)
    assert node.run(60).phase is Phase.MAINTENANCE
    node.wish(maintenance=False)
    assert node.run(60).phase is Phase.FREE
    causes = [record.cause for record in node.agent.journal.history()]
    assert "maintain by GPULease: ObjectRequest: firmware update" in causes


def test_maintenance_waits_for_the_tenant_and_may_be_taken_back(cluster: Cluster, tmp_path: Path) -> None:
    node = Obeyed(cluster, tmp_path)
    node.run(60)
    node.world.allocate(node.world.gate(), GPUS[0])
    node.world.start_pod(7, GPUS[0])
    node.wish(maintenance=True)
    assert node.run(30).phase is Phase.LEASED
    assert node.as_wished() == ("False", "maintenance begins when the GPU is back, reset and checked")
    node.wish(maintenance=False)
    assert node.run(30).maintenance == ""
    node.wish(maintenance=True)
    node.run(30)
    node.world.end_pod(7)
    assert node.run(60).phase is Phase.MAINTENANCE


def test_maintenance_of_the_node_is_left_alone(cluster: Cluster, tmp_path: Path) -> None:
    node = Obeyed(cluster, tmp_path)
    node.run(60)
    node.agent.journal.tell({GPUS[0]: LeaseEvent(LeaseEventKind.MAINTAIN, text="OperatorRequest: board is out")})
    node.wish(maintenance=False)
    assert node.run(60).phase is Phase.MAINTENANCE


def test_a_release_is_of_one_quarantine(cluster: Cluster, tmp_path: Path) -> None:
    node = Obeyed(cluster, tmp_path)
    node.world.deviations[GPUS[0]] = "VBIOS 96.1, accepted 96.0"
    lease = node.run(90)
    name = status(cluster)["quarantine"]
    assert (lease.phase, name) == (Phase.QUARANTINED, f"{lease.generation}/{lease.turn}")
    with pytest.raises(Exception, match=r"spec\.release: it must be what status\.quarantine is now"):
        node.wish(release="0/1", reason="mended")
    with pytest.raises(Exception, match=r"spec\.reason: a release needs one"):
        node.wish(release=name)
    node.wish(release=name, reason="mended")
    after = node.run(90)
    assert (after.phase, after.turn > lease.turn) == (Phase.QUARANTINED, True)
    details = [each.detail for record in node.agent.journal.history() for each in record.leases]
    assert details.count("mended") > 0
    node.world.deviations.clear()
    assert node.run(90) == after, "a wish of an earlier quarantine releases no later one"
    node.wish(release=status(cluster)["quarantine"], reason="mended again")
    assert node.run(90).phase is Phase.FREE
    assert "quarantine" not in status(cluster)


def test_wishes_that_are_nonsense_want_nothing() -> None:
    for spec in ({"maintenance": "yes"}, {"release": 7, "reason": ["x"]}, {}, None):
        assert read_wish({"spec": spec}) == LeaseWish()


def events(cluster: Cluster) -> list[tuple[str, str, str]]:
    return [(each["reason"], each["type"], each["regarding"]["kind"]) for each in all_events(cluster)]


def test_what_an_operator_must_hear_is_an_event(cluster: Cluster, tmp_path: Path) -> None:
    """About the GPU's object and about its node; once, also when it is told again after a restart or an outage."""
    node = Obeyed(cluster, tmp_path)
    node.run(60)
    node.world.allocate(node.world.gate(), GPUS[0])
    node.world.start_pod(7, GPUS[0])
    node.run(10)
    assert events(cluster) == [], "what goes as usual is no event"
    cluster.fail(3, 503, "POST", "events")
    node.world.lost = {GPUS[0]: "PartitionLost: the manager was restarted"}
    node.run(60)
    node.world.end_pod(7)
    assert node.run(60).phase is Phase.QUARANTINED
    both = ("GPULease", "Node")
    wanted = [
        *(("FabricBroken", "Warning", kind) for kind in both),
        *(("Quarantined", "Warning", kind) for kind in both),
    ]
    assert sorted(events(cluster)) == wanted
    (found,) = [each for each in all_events(cluster) if each["metadata"]["name"].endswith("-quarantined")]
    assert found["regarding"]["uid"] == cluster.get("GPULease", NAME)["metadata"]["uid"]
    assert (
        found["note"] == f"GPU {GPUS[0]}: lease is Quarantined, generation 1 (PartitionLost): the manager was restarted"
    )
    for again in notices_between(Lease(GPUS[0], Phase.RECLAIMING), node.agent.journal.leases[GPUS[0]]):
        node.reported.reporter.notices.append((again, 0.0))
    node.wish(release=status(cluster)["quarantine"], reason="manager is back")
    node.world.lost = {}
    assert node.run(60).phase is Phase.FREE
    assert sorted(events(cluster)) == [*wanted, *(("Released", "Normal", kind) for kind in both)]


def all_events(cluster: Cluster) -> Any:
    return Documents(cluster.client()).list("Event")[0]


@pytest.mark.parametrize("status_", [403, 413])
def test_an_event_that_is_refused_holds_no_object_up(cluster: Cluster, tmp_path: Path, status_: int) -> None:
    node = Obeyed(cluster, tmp_path)
    cluster.fail(2, status_, "POST", "events")
    node.world.deviations[GPUS[0]] = "VBIOS 96.1, accepted 96.0"
    node.run(90)
    assert (status(cluster)["phase"], events(cluster)) == ("Quarantined", [])
    assert sum("giving up" in line for line in node.reported.log.lines) == 2


def test_an_object_that_is_refused_holds_no_other_up(cluster: Cluster) -> None:
    """As those of a node whose journal was moved away: their generation never goes back."""
    Reported(cluster).step(Lease(GPUS[0], Phase.FREE, 5))
    reported, other = Reported(cluster), lease_name("node-1", GPUS[1])
    reported.step(Lease(GPUS[0]), Lease(GPUS[1], Phase.LEASED))
    cluster.patch("GPULease", other, {"spec": {"maintenance": True, "reason": "new board"}})
    sick = Lease(GPUS[1], Phase.QUARANTINED, reason="Xid")
    for _ in range(2):  # what has failed is heard of, and done again
        reported.step(Lease(GPUS[0]), sick, seconds=60)
    assert (cluster.get("GPULease", other)["status"]["phase"], len(events(cluster))) == ("Quarantined", 2)
    assert list(reported.step(Lease(GPUS[0]), replace(sick, phase=Phase.FREE), seconds=60)) == [GPUS[1]]
    (line,) = reported.log.lines
    assert "it never goes back" in line
    cluster.delete("GPULease", NAME)
    for _ in range(2):
        reported.step(Lease(GPUS[0]), sick, seconds=60)
    assert status(cluster)["phase"] == "Unknown"


NOTICES = [
    (Lease(GPUS[0], Phase.LEASED), Lease(GPUS[0], Phase.LEASED, sick="Xid: 79"), "DeviceUnhealthy"),
    (Lease(GPUS[0], Phase.RESERVED), Lease(GPUS[0], Phase.RECLAIMING, reason="PartitionFailed"), "FabricBroken"),
    (Lease(GPUS[0], Phase.CHECKING), Lease(GPUS[0], Phase.CHECKING, failures=1, detail="no BMC"), "CheckFailed"),
    (Lease(GPUS[0], Phase.CHECKING, failures=1), Lease(GPUS[0], Phase.CHECKING, failures=2), ""),
    (Lease(GPUS[0], Phase.CHECKING), Lease(GPUS[0], Phase.MAINTENANCE, reason="OperatorRequest"), "Maintenance"),
    (Lease(GPUS[0], Phase.CHECKING), Lease(GPUS[0], Phase.FREE), ""),
]


@pytest.mark.parametrize(("before", "after", "reason"), NOTICES)
def test_what_an_operator_must_hear(before: Lease, after: Lease, reason: str) -> None:
    assert [each.reason for each in notices_between(before, after)] == ([reason] if reason else [])


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


def test_a_note_has_as_many_bytes_as_the_api_server_takes() -> None:
    event = make_event({"name": "x"}, "lease-agent", "Quarantined", "\u00e9" * 2000, True, 0.0)
    assert len(event["note"].encode()) == 1024
