"""The controller of ComputeDomains against an API server double, with no rights but those of its role."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
from domain_lab import ACCOUNT, OPTIONS, OTHER_RACK, RACK, SPACE, Rack
from support.cluster import Cluster
from support.cluster_rules import Problem
from support.process import wait_for

from ocigpu.core.errors import HostError
from ocigpu.kubernetes.cluster.documents import Documents
from ocigpu.kubernetes.domains import controller as controller_module
from ocigpu.kubernetes.domains.controller import GRACE, DomainController, DomainService
from ocigpu.kubernetes.domains.objects import (
    DOMAIN_LABEL,
    FINALIZER,
    TARGET_LABEL,
    daemon_name,
    daemon_set,
    network_policy,
)
from ocigpu.kubernetes.domains.plan import node_cliques
from ocigpu.system.service import ServiceLog

NODES = tuple(f"node-{number:02}" for number in range(18))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def rack(cluster: Cluster) -> Rack:
    return Rack(cluster, *NODES)


def test_a_domain_gets_its_objects_and_its_pods_a_template(rack: Rack) -> None:
    uid = rack.add_domain(channel={"allocationMode": "All"})
    rack.settle()
    domain = rack.domain()
    assert domain["metadata"]["finalizers"] == [FINALIZER]
    assert domain["status"] == {"status": "Ready", "nodes": []}, "numNodes is 0"
    template = rack.cluster.get("ResourceClaimTemplate", "job-channel", "team")
    assert template["spec"]["metadata"]["labels"] == {DOMAIN_LABEL: uid}
    devices = template["spec"]["spec"]["devices"]
    assert devices["requests"][0]["exactly"] == {"deviceClassName": "compute-domain-default-channel.nvidia.com"}
    assert devices["config"][0]["opaque"] == {
        "driver": "compute-domain.nvidia.com",
        "parameters": {
            "apiVersion": "resource.nvidia.com/v1beta1", "kind": "ComputeDomainChannelConfig", "domainID": uid,
            "allocationMode": "All",
        },
    }  # fmt: skip
    daemons = rack.cluster.get("ResourceClaimTemplate", daemon_name(uid), SPACE)["spec"]["spec"]["devices"]
    assert daemons["config"][0]["opaque"]["parameters"]["kind"] == "ComputeDomainDaemonConfig"
    for kind in ("DaemonSet", "NetworkPolicy"):
        assert rack.cluster.exists(kind, daemon_name(uid), SPACE)
    assert not rack.labels(), "daemons run where its pods are"
    for document in (daemon_set(domain, OPTIONS), network_policy(domain, OPTIONS)):
        kubernetes_validate.validate(document, "1.37", strict=True)
    # what is as it should be is only looked at
    requests = len(rack.cluster.requests)
    assert not rack.controller.resync()
    assert {method for method, _ in rack.cluster.requests[requests:]} == {"GET"}


def test_a_daemon_runs_with_no_more_rights_than_it_needs(rack: Rack) -> None:
    rack.add_domain()
    pod = daemon_set(rack.domain(), OPTIONS)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    rights = container["securityContext"]
    assert (rights["allowPrivilegeEscalation"], rights["readOnlyRootFilesystem"]) == (False, True)
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert not any(volume.get("hostPath") for volume in pod["volumes"])
    assert "hostNetwork" not in pod


def test_all_nodes_of_a_rack_become_members_of_a_clique(rack: Rack) -> None:
    uid = rack.add_domain(numNodes=18)
    for node in NODES:
        rack.add_claim(node, uid)
    rack.settle(ready=False)
    assert rack.labels() == dict.fromkeys(NODES, uid)
    assert rack.domain()["status"]["status"] == "NotReady"
    rack.settle()
    assert rack.members() == {node: (number, RACK, "Ready") for number, node in enumerate(NODES)}
    assert rack.domain()["status"]["status"] == "Ready"
    daemons = rack.clique(uid)
    assert [each["index"] for each in daemons] == list(range(18))
    assert len({each["ipAddress"] for each in daemons}) == 18
    events = rack.cluster.objects("Event", "events.k8s.io/v1")
    assert [(each["reason"], each["note"]) for each in events][-1] == ("Ready", "18 of 18 nodes are ready")
    assert events[-1]["regarding"]["name"] == "job"


def test_a_domain_over_two_cliques_has_an_object_for_each(cluster: Cluster) -> None:
    rack = Rack(cluster, "a", "b")
    rack.add_node("c", OTHER_RACK)
    rack.add_node("d", "")
    uid = rack.add_domain()
    for node in "abcd":
        rack.add_claim(node, uid)
    rack.settle()
    assert rack.members() == {
        "a": (0, RACK, "Ready"), "b": (1, RACK, "Ready"), "c": (0, OTHER_RACK, "Ready"), "d": (-1, "", "Ready"),
    }  # fmt: skip
    assert [each["nodeName"] for each in rack.clique(uid)] == ["a", "b"]
    assert [each["nodeName"] for each in rack.clique(uid, OTHER_RACK)] == ["c"]
    assert len(cluster.objects("ComputeDomainClique")) == 2


@pytest.mark.parametrize("clique", ["../x", "x.1", f"{RACK}/", f"{RACK}\n", "6C9A6FB6.1"])
def test_a_node_that_publishes_nonsense_is_no_member(cluster: Cluster, clique: str) -> None:
    rack = Rack(cluster, "a")
    rack.add_node("b", clique)
    uid = rack.add_domain()
    for node in "ab":
        rack.add_claim(node, uid)
    rack.settle()
    assert set(rack.members()) == {"a"}


def test_of_a_nodes_slices_the_newest_counts() -> None:
    def published(generation: int, *cliques: str) -> dict[str, Any]:
        devices = [{"name": "daemon-0", "attributes": {"cliqueID": {"string": each}}} for each in cliques]
        return {"spec": {"nodeName": "a", "pool": {"generation": generation}, "devices": devices}}

    assert node_cliques([published(2, OTHER_RACK), published(1, RACK)]) == {"a": OTHER_RACK}
    assert node_cliques([published(1, RACK), published(2)]) == {}, "it offers nothing now"


def test_a_node_of_which_no_driver_tells_is_waited_for(cluster: Cluster) -> None:
    rack = Rack(cluster, "a")
    uid = rack.add_domain()
    rack.add_claim("a", uid)
    slice_ = cluster.get("ResourceSlice", "slice-a")
    cluster.delete("ResourceSlice", "slice-a")
    rack.settle()
    assert (rack.labels(), rack.members()) == ({"a": uid}, {})
    cluster.create({**slice_, "metadata": {"name": "slice-a"}})
    rack.settle()
    assert rack.members() == {"a": (0, RACK, "Ready")}


# who may have a domain's channel


def test_a_claim_of_another_namespace_gets_no_node_of_a_domain(rack: Rack) -> None:
    """Whatever its parameters and labels say."""
    rack.cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "thief"}})
    uid, own = rack.add_domain(), rack.add_domain("other")
    rack.add_claim(NODES[0], uid, namespace="thief")
    rack.add_claim(NODES[1], "no-such-domain")
    claim = rack.add_claim(NODES[2], uid, bogus="field")
    assert claim["status"]["allocation"]["devices"]["results"]
    claim = rack.add_claim(NODES[3], uid, device="daemon-0")
    rack.settle()
    assert rack.labels() == {}
    assert rack.members() == {}
    rack.add_claim(NODES[4], own, "mine")
    rack.settle()
    assert rack.labels() == {NODES[4]: own}


def test_a_pod_that_only_looks_like_a_daemon_is_no_member(rack: Rack) -> None:
    uid = rack.add_domain()
    rack.controller.resync()
    rack.add_claim(NODES[0], uid)
    metadata = {"name": "false", "namespace": SPACE, "labels": {DOMAIN_LABEL: uid}}
    spec = {"nodeName": NODES[0], "containers": [{"name": "c", "image": "i"}]}
    pod = rack.cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    ready = {"type": "Ready", "status": "True"}
    rack.cluster.update({**pod, "status": {"podIP": "10.9.9.9", "conditions": [ready]}}, sub="status")
    rack.controller.resync()
    rack.controller.resync()
    assert rack.members() == {}


def test_rights_of_controller_and_daemons_are_those_that_they_need(rack: Rack) -> None:
    """The tests of this file have only the controller's role; here is what it must not do with it."""
    documents = Documents(rack.cluster.client(ACCOUNT))
    node: dict[str, Any] = {"kind": "Node", "metadata": {"name": NODES[0]}}
    for change in (
        {"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}},
        {"metadata": {"annotations": {"a": "b"}}},
        {"metadata": {"finalizers": ["a.example/b"]}},
        {"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "gone", "uid": "u"}]}},
        {"spec": {"unschedulable": True}},
    ):
        with pytest.raises(HostError, match=r"changes the label resource\.nvidia\.com/computeDomain of nodes alone"):
            documents.patch(node, change)
    for namespace in ("team", "kube-system"):
        head = {"name": "d", "namespace": namespace}
        with pytest.raises(HostError, match="403"):
            documents.create({**daemon_set({"metadata": {"uid": "u"}}, OPTIONS), "metadata": head})


@pytest.mark.parametrize("kind", ["ResourceClaim", "ResourceClaimTemplate"])
@pytest.mark.parametrize("several", [False, True])
def test_only_daemons_may_request_a_daemons_device(rack: Rack, kind: str, several: bool) -> None:
    one = {"deviceClassName": "compute-domain-daemon.nvidia.com"}
    request = {"name": "x", "firstAvailable": [{"name": "y", **one}]} if several else {"name": "x", "exactly": one}
    spec: dict[str, Any] = {"devices": {"requests": [request]}}
    document = {
        "apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": {"name": "x", "namespace": "team"},
        "spec": spec if kind == "ResourceClaim" else {"spec": spec},
    }  # fmt: skip
    with pytest.raises(Problem, match="is for the daemons of ComputeDomains, in the namespace gpu"):
        rack.cluster.create(document)
    rack.cluster.create({**document, "metadata": {"name": "x", "namespace": SPACE}})
    spec = {"spec": {}} if kind == "ResourceClaimTemplate" else {}
    assert rack.cluster.create({**document, "metadata": {"name": "none", "namespace": "team"}, "spec": spec})


# a node that goes


def test_a_node_that_goes_makes_room_for_another_one(cluster: Cluster) -> None:
    """Its workload's claim is gone with its pod; nothing is asked of the node."""
    rack = Rack(cluster, "a", "b", "c")
    uid = rack.add_domain(numNodes=3)
    for node in "abc":
        rack.add_claim(node, uid)
    rack.settle()
    assert rack.members()["b"] == (1, RACK, "Ready")
    rack.set_ready("b", uid, False)  # the node controller's word about pods of a node that is silent
    rack.controller.resync()
    assert (rack.members()["b"], rack.domain()["status"]["status"]) == ((1, RACK, "NotReady"), "NotReady")
    cluster.delete("ResourceClaim", "channel-b", "team")
    rack.controller.resync()
    rack.controller.resync()
    assert rack.labels() == {"a": uid, "c": uid}
    assert set(rack.members()) == {"a", "c"}
    rack.add_node("d")
    rack.add_claim("d", uid)
    rack.settle()
    assert rack.members() == {"a": (0, RACK, "Ready"), "c": (2, RACK, "Ready"), "d": (1, RACK, "Ready")}
    assert rack.domain()["status"]["status"] == "Ready"


def test_a_node_keeps_its_index_while_its_daemon_is_replaced(cluster: Cluster) -> None:
    rack = Rack(cluster, "a", "b")
    uid = rack.add_domain()
    for node in "ab":
        rack.add_claim(node, uid)
    rack.settle()
    before = rack.clique(uid)
    cluster.delete("Pod", f"{daemon_name(uid)}-a", SPACE, gracePeriodSeconds=0)
    rack.controller.resync()
    assert rack.clique(uid) == [{**before[0], "status": "NotReady"}, before[1]]
    rack.run_daemons()
    rack.set_ready("a", uid, True, "10.0.7.7")
    rack.controller.resync()
    assert rack.clique(uid) == [{**before[0], "ipAddress": "10.0.7.7"}, before[1]]


def test_a_node_whose_object_is_gone_stays_until_its_claim_goes(cluster: Cluster) -> None:
    """Kubernetes deletes the pods of a node that is gone, and with them their claims."""
    rack = Rack(cluster, "a", "b")
    uid = rack.add_domain()
    for node in "ab":
        rack.add_claim(node, uid)
    rack.settle()
    cluster.delete("Node", "b")
    cluster.delete("ResourceSlice", "slice-b")
    rack.settle()
    assert rack.members() == {"a": (0, RACK, "Ready"), "b": (1, RACK, "NotReady")}
    cluster.delete("ResourceClaim", "channel-b", "team")
    rack.settle()
    assert set(rack.members()) == {"a"}


def test_a_driver_that_offers_nothing_for_a_moment_ends_no_job(cluster: Cluster) -> None:
    """Or is replaced, or finds that NVML hangs: nodes are in a domain by their claims."""
    rack = Rack(cluster, "a", "b")
    uid = rack.add_domain()
    for node in "ab":
        rack.add_claim(node, uid)
    rack.settle()
    before = rack.clique(uid)
    found = cluster.get("ResourceSlice", "slice-b")
    cluster.update({**found, "spec": {**found["spec"], "devices": []}})
    assert not rack.controller.resync()
    cluster.delete("ResourceSlice", "slice-b")
    assert not rack.controller.resync()
    assert rack.clique(uid) == before


@pytest.mark.parametrize(
    "path",
    ["computedomains", "resourceclaims", "resourceslices", "pods", "nodes", "daemonsets", "computedomaincliques"],
)
def test_an_answer_that_is_no_list_removes_nothing(rack: Rack, path: str) -> None:
    """A proxy may answer 404, and so does a server that has just started."""
    uid = rack.add_domain()
    rack.add_claim(NODES[0], uid)
    rack.settle()
    writes = [each for each in rack.cluster.requests if each[0] != "GET"]
    rack.cluster.fail(1, 404, method="GET", path=f"/{path}(\\?|$)")
    with pytest.raises(HostError, match="404"):
        rack.controller.resync()
    assert [each for each in rack.cluster.requests if each[0] != "GET"] == writes
    assert not rack.controller.resync()
    assert rack.labels() == {NODES[0]: uid}


def test_a_clique_without_room_says_so_and_fills_up_later(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    rack = Rack(cluster, "a", "b", "c")
    rack.controller = DomainController(
        Documents(cluster.client(ACCOUNT)), OPTIONS._replace(most=2), ServiceLog(as_json=False)
    )
    uid = rack.add_domain()
    for node in "abc":
        rack.add_claim(node, uid)
    rack.settle()
    assert set(rack.members()) == {"a", "b"}
    said = "ComputeDomain team/job: a clique has room for 2 nodes, and none for c"
    assert capsys.readouterr().out.count(said) == 1
    cluster.delete("ResourceClaim", "channel-a", "team")
    rack.settle()
    assert rack.members() == {"b": (1, RACK, "Ready"), "c": (0, RACK, "Ready")}


def test_the_label_of_a_domain_that_is_gone_is_taken_away(rack: Rack) -> None:
    rack.cluster.patch("Node", NODES[0], {"metadata": {"labels": {DOMAIN_LABEL: "gone", "other": "stays"}}})
    rack.settle()
    assert rack.cluster.get("Node", NODES[0])["metadata"]["labels"] == {"other": "stays"}


def test_a_node_goes_from_one_domain_to_the_next(rack: Rack) -> None:
    one, two = rack.add_domain(), rack.add_domain("next")
    rack.add_claim(NODES[0], one)
    rack.settle()
    rack.add_claim(NODES[0], two, "later")
    rack.settle()
    assert rack.labels() == {NODES[0]: one}, "while it has a claim of the first"
    rack.cluster.delete("ResourceClaim", f"channel-{NODES[0]}", "team")
    rack.settle()
    assert rack.labels() == {NODES[0]: two}
    assert (rack.members(), set(rack.members("next"))) == ({}, {NODES[0]})


# the end of a domain


def test_a_domain_that_ends_takes_everything_with_it(rack: Rack) -> None:
    uid = rack.add_domain()
    rack.add_claim(NODES[0], uid)
    rack.settle()
    rack.cluster.delete("ResourceClaim", f"channel-{NODES[0]}", "team")
    rack.cluster.delete("ComputeDomain", "job", "team")
    rack.settle()
    assert not rack.cluster.exists("ComputeDomain", "job", "team")
    for kind in ("DaemonSet", "ResourceClaimTemplate", "NetworkPolicy", "ComputeDomainClique"):
        assert rack.cluster.objects(kind) == []
    assert rack.labels() == {}


def test_a_domain_in_use_keeps_its_daemons_for_a_while(rack: Rack) -> None:
    """Pods that end at the same time end with their memory still shared; a script is not held up for ever."""
    uid = rack.add_domain()
    rack.add_claim(NODES[0], uid)
    rack.settle()
    rack.cluster.delete("ComputeDomain", "job", "team")
    rack.now = 1.0
    rack.settle()
    assert not rack.cluster.exists("ResourceClaimTemplate", "job-channel", "team"), "no new pods"
    assert rack.cluster.exists("DaemonSet", daemon_name(uid), SPACE)
    assert rack.labels() == {NODES[0]: uid}
    rack.now += GRACE
    rack.settle()
    assert not rack.cluster.exists("ComputeDomain", "job", "team")
    assert rack.cluster.objects("DaemonSet") == []
    assert rack.labels() == {}


def test_a_template_of_a_former_domain_of_that_name_is_replaced(rack: Rack) -> None:
    """Its claims would be for a domain that is gone."""
    old = {DOMAIN_LABEL: "former", TARGET_LABEL: "Workload"}
    head = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate"}
    rack.cluster.create({**head, "metadata": {"name": "job-channel", "namespace": "team", "labels": old}, "spec": {}})
    uid = rack.add_domain()
    rack.settle()
    made = rack.cluster.get("ResourceClaimTemplate", "job-channel", "team")
    assert made["metadata"]["labels"][DOMAIN_LABEL] == uid


def test_a_template_of_somebody_else_is_left_alone_and_said(rack: Rack, capsys: pytest.CaptureFixture[str]) -> None:
    head = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate"}
    theirs = rack.cluster.create({**head, "metadata": {"name": "job-channel", "namespace": "team"}, "spec": {}})
    rack.add_domain()
    other = rack.add_domain("other")
    rack.settle()
    assert rack.cluster.get("ResourceClaimTemplate", "job-channel", "team") == theirs
    lines = [
        line for line in capsys.readouterr().out.splitlines() if "job-channel" in line and line.startswith("error")
    ]
    assert len(lines) == 1, lines
    assert "already exists" in lines[0]
    assert rack.cluster.exists("DaemonSet", daemon_name(other), SPACE), "one that fails holds up no other"


def test_a_manifest_that_nvidias_driver_takes_is_taken(rack: Rack) -> None:
    for spec in ({}, {"channel": {"resourceClaimTemplate": {}}}, {"channel": {"allocationMode": "Some"}}):
        document = {
            "apiVersion": "resource.nvidia.com/v1beta1", "kind": "ComputeDomain",
            "metadata": {"name": "wrong", "namespace": "team"}, "spec": spec,
        }  # fmt: skip
        with pytest.raises(Problem):
            rack.cluster.create(document)
    rack.add_domain(numNodes=4)
    domain = rack.domain()
    assert domain["spec"]["channel"]["allocationMode"] == "Single"
    domain["spec"]["numNodes"] = 5
    with pytest.raises(Problem, match="immutable"):
        rack.cluster.update(domain)


# the program


def test_the_program_hears_of_changes_and_ends_when_told(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "RESYNC", 300.0)
    service = DomainService(OPTIONS, ServiceLog(as_json=False), lambda: rack.cluster.client(ACCOUNT))
    seen: list[bool] = []

    def watch() -> None:
        wait_for("a lease", lambda: rack.cluster.exists("Lease", "ocigpu-compute-domains", SPACE))  # it handles signals
        try:
            uid = rack.add_domain()
            wait_for("objects", lambda: rack.cluster.exists("DaemonSet", daemon_name(uid), SPACE))
            rack.add_claim(NODES[0], uid)
            wait_for("a label", lambda: rack.labels() == {NODES[0]: uid})
            rack.run_daemons()
            wait_for("a status", lambda: rack.members() == {NODES[0]: (0, RACK, "Ready")})
            seen.append(True)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=watch)
    thread.start()
    service.run()
    thread.join()
    assert seen == [True]
    lease = rack.cluster.get("Lease", "ocigpu-compute-domains", SPACE)
    assert lease["spec"]["holderIdentity"] == "", "released"
