"""The controller of tenancies against an API server double, with no rights but those of its role."""

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml
from deployment_lab import RENDERER
from support.cluster import Cluster
from support.process import wait_for
from support.products import one_in
from tenancy_lab import (
    ACCOUNT,
    SERVICE,
    cilium_kind,
    conditions,
    install,
    make_controller,
    pod,
    settle,
    status,
    tenancy,
)

from ocigpu.core.errors import HostError
from ocigpu.kubernetes.cluster.documents import Documents
from ocigpu.kubernetes.cluster.leader import DEADLINE, DURATION, RETRY, Leader, NotLeadingError
from ocigpu.system.service import ServiceLog
from ocigpu.tenants import controller as controller_module
from ocigpu.tenants.controller import RESYNC, ControllerService
from ocigpu.tenants.tenancy import TenancyOptions

SPACE = "tenant-landon"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        install(cluster)
        yield cluster


def lease(cluster: Cluster, phase: str, name: str = "node-1-0000-3b-00-0") -> None:
    holder = {"tenancy": "landon", "namespace": SPACE, "podName": "p"}
    head = {"apiVersion": "ocigpu.io/v1alpha1", "kind": "GPULease", "metadata": {"name": name}}
    spec = {"nodeName": "node-1", "pciAddress": "0000:3b:00.0"}
    cluster.apply({**head, "spec": spec, "status": {"phase": phase, "generation": 1, "holder": holder}})


def test_a_tenancy_is_ready_when_everything_has_been_observed(cluster: Cluster) -> None:
    controller = make_controller(cluster)
    cluster.create(tenancy(quota={"gpus": 4}))
    assert settle(controller) <= 3
    assert status(cluster)["phase"] == "Ready"
    assert set(conditions(cluster).values()) == {("True", "Observed")}
    kinds = {"NetworkIsolated", "QuotaEnforced", "LimitsSet", "AccountLocked", "AdmissionEnforced"}
    assert set(conditions(cluster)) == {"NamespaceReady", *kinds, "Ready"}
    space = cluster.get("Namespace", SPACE)
    assert status(cluster)["namespace"] == {"name": SPACE, "uid": space["metadata"]["uid"]}
    assert cluster.get("Tenancy", "landon")["metadata"]["finalizers"] == ["ocigpu.io/tenancy"]
    cluster.create(pod(), user=SERVICE)
    # what is as it should be is only looked at
    requests = len(cluster.requests)
    assert controller.resync() > 1
    assert {method for method, _ in cluster.requests[requests:]} == {"GET"}


def test_each_phase_is_an_event_and_one_that_fails_is_a_warning(cluster: Cluster) -> None:
    controller = make_controller(cluster)
    cluster.create(tenancy())
    cluster.fail(1, 500, method="POST", path="events$")  # nobody waits for it
    settle(controller)
    cluster.delete("NetworkPolicy", "ocigpu-tenancy", SPACE)
    settle(controller)
    found = cluster.objects("Event", "events.k8s.io/v1")
    assert [(each["reason"], each["type"]) for each in found] == [
        ("Ready", "Normal"), ("Provisioning", "Warning"), ("Ready", "Normal"),
    ]  # fmt: skip
    assert "there is no NetworkPolicy" in found[1]["note"]
    uid = cluster.get("Tenancy", "landon")["metadata"]["uid"]
    about = {"apiVersion": "ocigpu.io/v1alpha1", "kind": "Tenancy", "name": "landon", "uid": uid}
    for each in found:
        assert (each["regarding"], each["metadata"]["namespace"]) == (about, "default")
        kubernetes_validate.validate(each, "1.37", strict=True)


def test_nothing_can_run_before_it_is_closed(cluster: Cluster) -> None:
    cluster.create(tenancy())
    settle(make_controller(cluster))
    made = [path.split("/")[-1] for method, path in cluster.requests if method in ("POST", "PUT")]
    made = [name for name in made if name != "events"]
    assert made == ["landon", "namespaces", "networkpolicies", "resourcequotas", "limitranges", "default"]


def test_its_rights_are_those_that_it_needs(cluster: Cluster) -> None:
    """A whole life of tenancies uses every right of the role; what it has no right to is refused by the double."""
    cluster.create(cilium_kind())
    for network in ("networkpolicy", "cilium"):
        controller = make_controller(cluster, network)
        cluster.create(tenancy())
        settle(controller)
        cluster.create(pod())
        kind = "CiliumNetworkPolicy" if network == "cilium" else "NetworkPolicy"
        cluster.patch(kind, "ocigpu-tenancy", {"spec": {"ingress": []}}, SPACE)
        for drifted in ("ResourceQuota", "LimitRange"):
            cluster.patch(drifted, "ocigpu-tenancy", {"metadata": {"labels": None}}, SPACE)
        cluster.delete("ServiceAccount", "default", SPACE)
        cluster.patch(
            "Namespace", SPACE, {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "privileged"}}}
        )
        settle(controller)
        cluster.delete("Tenancy", "landon")
        settle(controller)
        assert not cluster.exists("Tenancy", "landon")
    seconds = Leader(Documents(cluster.client(ACCOUNT)), "ocigpu-tenancies", "ocigpu", "me", lambda: 0.0)
    seconds.attempt()
    seconds.release()
    cluster.create(tenancy("watched"))
    next(Documents(cluster.client(ACCOUNT)).watch("Tenancy", "", 60))
    given = set()
    for document in yaml.safe_load_all(RENDERER.tenants({})):
        if document["kind"] in ("ClusterRole", "Role"):
            for rule in document["rules"]:
                given |= {
                    (verb, group, resource)
                    for verb in rule["verbs"] for group in rule["apiGroups"] for resource in rule["resources"]
                }  # fmt: skip
    used = {each[1:] for each in cluster.used if each[0] == ACCOUNT}
    assert used == given


@pytest.mark.parametrize(
    ("kind", "name", "patch"),
    [
        ("NetworkPolicy", "ocigpu-tenancy", {"spec": {"egress": [{}]}}),
        ("ResourceQuota", "ocigpu-tenancy", {"spec": {"hard": {"requests.nvidia.com/gpu": "800"}}}),
        ("ResourceQuota", "ocigpu-tenancy", {"metadata": {"labels": None}}),
        ("LimitRange", "ocigpu-tenancy", {"spec": {"limits": []}}),
        ("ServiceAccount", "default", {"automountServiceAccountToken": True}),
        ("Namespace", SPACE, {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "privileged"}}}),
        ("Namespace", SPACE, {"metadata": {"labels": {"ocigpu.io/tenancy": None}}}),
    ],
)
def test_what_others_change_is_repaired(cluster: Cluster, kind: str, name: str, patch: dict[str, Any]) -> None:
    controller = make_controller(cluster)
    cluster.create(tenancy())
    settle(controller)
    space = None if kind == "Namespace" else SPACE
    before = cluster.get(kind, name, space)
    cluster.patch(kind, name, patch, space)
    assert controller.resync() == 0
    after = cluster.get(kind, name, space)
    assert {**after, "metadata": after["metadata"]["labels"]} == {**before, "metadata": before["metadata"]["labels"]}
    settle(controller)
    assert status(cluster)["phase"] == "Ready"
    if space:
        cluster.delete(kind, name, space)
        controller.resync()
        assert cluster.exists(kind, name, space)


def test_the_registries_of_a_tenancy_are_at_its_namespace(cluster: Cluster) -> None:
    controller = make_controller(cluster)
    cluster.create(tenancy(registries=["nvcr.io/nvidia", "registry.example"]))
    settle(controller)

    def annotations() -> dict[str, str]:
        return dict(cluster.get("Namespace", SPACE)["metadata"].get("annotations") or {})

    assert annotations() == {"ocigpu.io/registries": "nvcr.io/nvidia,registry.example"}
    others = {"mine": "1", "ocigpu.io/registries": "docker.io"}
    cluster.patch("Namespace", SPACE, {"metadata": {"annotations": others}})
    assert controller.resync() == 0
    assert conditions(cluster)["NamespaceReady"] == ("False", "Differs"), "as it was seen"
    settle(controller)
    assert annotations() == {"mine": "1", "ocigpu.io/registries": "nvcr.io/nvidia,registry.example"}
    cluster.patch("Tenancy", "landon", {"spec": {"registries": []}})
    settle(controller)
    assert annotations() == {"mine": "1"}
    assert status(cluster)["phase"] == "Ready"


def test_a_policy_of_somebody_else_is_an_opening(cluster: Cluster) -> None:
    controller = make_controller(cluster)
    cluster.create(tenancy())
    settle(controller)
    head = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
    cluster.create(
        {**head, "metadata": {"name": "open", "namespace": SPACE}, "spec": {"podSelector": {}, "egress": [{}]}}
    )
    controller.resync()
    assert conditions(cluster)["NetworkIsolated"] == ("False", "OtherPolicies")
    assert conditions(cluster)["Ready"] == ("False", "OtherPolicies")
    cluster.delete("NetworkPolicy", "open", SPACE)
    settle(controller)
    assert status(cluster)["phase"] == "Ready"


def test_it_is_not_ready_while_the_cluster_has_not_taken_notice(cluster: Cluster) -> None:
    controller = make_controller(cluster)
    cluster.create(tenancy())
    settle(controller)
    cluster.patch("ResourceQuota", "ocigpu-tenancy", {"status": {"hard": {"pods": "1"}}}, SPACE, sub="status")
    controller.resync()
    assert conditions(cluster)["QuotaEnforced"] == ("False", "NotSeenYet")
    cluster.delete("ValidatingAdmissionPolicyBinding", "ocigpu-tenant-pods")
    controller.resync()
    assert conditions(cluster)["AdmissionEnforced"] == ("False", "NotInForce")
    assert status(cluster)["phase"] == "Provisioning"


def test_with_cilium_its_policies_are_used_and_believed_when_they_are_valid(cluster: Cluster) -> None:
    cluster.create(cilium_kind())
    controller = make_controller(cluster)
    cluster.create(tenancy(internet=True))
    settle(controller)
    assert status(cluster)["phase"] == "Ready"
    assert cluster.objects("NetworkPolicy") == []
    rejected = [{"type": "Valid", "status": "False", "message": "no such entity"}]
    cluster.patch("CiliumNetworkPolicy", "ocigpu-tenancy", {"status": {"conditions": rejected}}, SPACE)
    controller.resync()
    assert conditions(cluster)["NetworkIsolated"] == ("False", "Rejected")
    # an addition that does away with the denial by default is taken out again
    weak = {"spec": {"enableDefaultDeny": {"egress": False}}, "status": None}
    cluster.patch("CiliumNetworkPolicy", "ocigpu-tenancy", weak, SPACE)
    settle(controller)
    assert "enableDefaultDeny" not in cluster.get("CiliumNetworkPolicy", "ocigpu-tenancy", SPACE)["spec"]


def test_a_namespace_that_was_there_is_never_adopted(cluster: Cluster) -> None:
    cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}})
    before = cluster.get("Namespace", SPACE)
    controller = make_controller(cluster)
    cluster.create(tenancy())
    settle(controller)
    assert status(cluster)["phase"] == "Failed"
    assert conditions(cluster)["Ready"] == ("False", "NamespaceNotOurs")
    cluster.delete("Tenancy", "landon")
    settle(controller)
    assert not cluster.exists("Tenancy", "landon")
    assert cluster.get("Namespace", SPACE) == before
    assert cluster.objects("NetworkPolicy") == cluster.objects("ResourceQuota") == []


def test_a_namespace_that_takes_the_place_of_its_own_is_not_its_own(cluster: Cluster) -> None:
    controller = make_controller(cluster)
    cluster.create(tenancy())
    settle(controller)
    labels = cluster.get("Namespace", SPACE)["metadata"]["labels"]
    cluster.delete("Namespace", SPACE)
    cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE, "labels": labels}})
    settle(controller)
    assert conditions(cluster)["Ready"] == ("False", "NamespaceReplaced")
    assert cluster.objects("ResourceQuota") == []
    # the operator takes it away: the tenancy gets a new one
    cluster.delete("Namespace", SPACE)
    settle(controller)
    assert status(cluster)["phase"] == "Ready"
    assert status(cluster)["namespace"]["uid"] == cluster.get("Namespace", SPACE)["metadata"]["uid"]


def test_a_suspended_tenancy_has_no_pods_and_gets_none(cluster: Cluster) -> None:
    controller = make_controller(cluster)
    cluster.create(tenancy())
    settle(controller)
    cluster.create(pod(finalizers=["batch.kubernetes.io/job-tracking"]), user=SERVICE)
    cluster.patch("Tenancy", "landon", {"spec": {"suspended": True}})
    for _ in range(4):
        controller.resync()
    assert status(cluster)["phase"] == "Suspending"
    assert conditions(cluster)["WorkloadsStopped"] == ("False", "PodsLeft")
    assert "p (finalizers batch.kubernetes.io/job-tracking)" in str(status(cluster)["conditions"])
    assert cluster.get("ResourceQuota", "ocigpu-tenancy", SPACE)["spec"]["hard"]["pods"] == "0"
    cluster.patch("Pod", "p", {"metadata": {"finalizers": None}}, SPACE)
    settle(controller)
    assert status(cluster)["phase"] == "Suspended"
    assert conditions(cluster)["Ready"] == ("False", "Suspended")
    cluster.patch("Tenancy", "landon", {"spec": {"suspended": False}})
    settle(controller)
    assert status(cluster)["phase"] == "Ready"
    assert "WorkloadsStopped" not in conditions(cluster)
    assert cluster.get("ResourceQuota", "ocigpu-tenancy", SPACE)["spec"]["hard"]["pods"] == "32"


@pytest.mark.parametrize("end", ["Free", "Quarantined"])
def test_deletion_waits_for_the_leases(cluster: Cluster, end: str) -> None:
    controller = make_controller(cluster)
    cluster.create(tenancy())
    settle(controller)
    cluster.create(pod(), user=SERVICE)
    lease(cluster, "Leased")
    cluster.delete("Tenancy", "landon")
    for phase in ("Leased", "Reclaiming", "Checking"):
        lease(cluster, phase)
        for _ in range(4):
            controller.resync()
        assert cluster.objects("Pod") == [], "its pods end at once"
        assert cluster.exists("Namespace", SPACE)
        assert status(cluster)["phase"] == "Terminating"
        assert conditions(cluster)["LeasesReleased"] == ("False", "LeasesHeld")
    lease(cluster, end)
    settle(controller)
    assert not cluster.exists("Tenancy", "landon")
    assert not cluster.exists("Namespace", SPACE)


def test_deletion_waits_for_the_namespace(cluster: Cluster) -> None:
    controller = make_controller(cluster)
    cluster.create(tenancy())
    settle(controller)
    held = {"name": "c", "namespace": SPACE, "finalizers": ["test/holds"]}
    cluster.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": held})
    cluster.delete("Tenancy", "landon")
    for _ in range(4):
        controller.resync()
    assert cluster.exists("Tenancy", "landon")
    assert conditions(cluster)["NamespaceReady"] == ("False", "NamespaceTerminating")
    (said,) = (each["message"] for each in status(cluster)["conditions"] if each["type"] == "NamespaceReady")
    assert "test/holds in 1 resource instances" in said, "whose finalizer it is"
    assert "configmaps. has 1 resource instances" in said
    cluster.patch("ConfigMap", "c", {"metadata": {"finalizers": None}}, SPACE)
    settle(controller)
    assert not cluster.exists("Tenancy", "landon")


def test_what_fails_for_one_tenancy_is_told_and_the_others_go_on(cluster: Cluster) -> None:
    controller = make_controller(cluster)
    for name in ("landon", "other"):
        cluster.create(tenancy(name))
    cluster.fail(2, 500, method="POST", path=f"{SPACE}/networkpolicies")
    for _ in range(4):
        controller.resync()
    assert status(cluster, "other")["phase"] == "Ready"
    cluster.fail(0, 500)
    assert "500" in str(status(cluster)["conditions"])
    settle(controller)
    assert status(cluster)["phase"] == "Ready"
    cluster.fail(1, 503, path="namespaces$")
    with pytest.raises(HostError, match="503"):
        controller.resync()


@pytest.mark.parametrize("number", one_in(3, [1, 2, 3]))
def test_it_may_be_killed_after_any_write(cluster: Cluster, number: int) -> None:
    """Each pass is done by a new controller whose n-th write is its last; the tenancy is made, and goes."""

    def broken() -> Any:
        left = [number]

        def may_write() -> None:
            if not left[0]:
                raise HostError("OCIGPU-KUBE-5", "killed")
            left[0] -= 1

        made = make_controller(cluster)
        made.documents.may_write = may_write
        return made

    cluster.create(tenancy())
    for _ in range(20):
        broken().resync()
    assert status(cluster)["phase"] == "Ready"
    assert len([each for each in cluster.objects("Namespace") if each["metadata"]["name"] == SPACE]) == 1
    cluster.delete("Tenancy", "landon")
    for _ in range(20):
        if cluster.exists("Tenancy", "landon"):
            broken().resync()
    assert not cluster.exists("Namespace", SPACE)


def open_policy(name: str) -> dict[str, Any]:
    """A policy that keeps a tenancy from being ready for as long as it is there."""
    head = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
    return {**head, "metadata": {"name": "open", "namespace": f"tenant-{name}"}, "spec": {"podSelector": {}}}


def test_a_tenancy_that_does_not_become_ready_is_looked_at_less_and_less_often(cluster: Cluster) -> None:
    controller = make_controller(cluster)
    for name in ("landon", "other"):
        cluster.create(tenancy(name))
    settle(controller)
    cluster.create(open_policy("landon"))
    assert controller.find_unsettled() == ["landon"]
    cluster.requests.clear()
    pauses = [controller.reconcile("landon") for _ in range(6)]
    assert pauses == [1, 2, 4, 8, 8, 8]
    lists = {path for _, path in cluster.requests if "/namespaces/tenant-landon" not in path}
    own = {
        "/api/v1/namespaces",
        "/apis/ocigpu.io/v1alpha1/tenancies",
        "/apis/ocigpu.io/v1alpha1/tenancies/landon/status",
    }
    kinds = ("validatingadmissionpolicies", "validatingadmissionpolicybindings")
    own |= {f"/apis/admissionregistration.k8s.io/v1/{kind}" for kind in kinds}
    assert lists <= own | {"/apis/events.k8s.io/v1/namespaces/default/events"}, "others' objects are not read"
    cluster.delete("NetworkPolicy", "open", SPACE)
    assert controller.reconcile("landon") == RESYNC
    assert controller.find_unsettled() == []
    cluster.create(open_policy("landon"))
    assert controller.reconcile("landon") == 1, "something has happened since"
    cluster.delete("NetworkPolicy", "open", SPACE)
    settle(controller)
    cluster.fail(1, 500, path="namespaces/tenant-landon")
    assert controller.find_unsettled() == []
    assert controller.reconcile("gone") == math.inf


def new_service(cluster: Cluster, **options: str) -> ControllerService:
    return ControllerService(
        TenancyOptions(), ServiceLog(as_json=False), open_client=lambda: cluster.client(ACCOUNT), **options
    )


def serve(service: ControllerService, act: Callable[[], None]) -> None:
    """Run the service for as long as ``act`` takes."""

    def act_and_end() -> None:
        try:
            act()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=act_and_end)
    thread.start()
    service.run()
    thread.join(60)


def wait_until_ready(cluster: Cluster, name: str) -> None:
    wait_for(f"tenancy {name}", lambda: status(cluster, name).get("phase") == "Ready")


@pytest.mark.rest
def test_a_new_tenancy_waits_for_no_other(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for those that are made at the same time, nor for those that do not become ready."""
    monkeypatch.setattr(controller_module, "RESYNC", 3600.0)
    names = [f"t{number:02}" for number in range(20)]
    for name in names:
        cluster.create(tenancy(name))

    def act() -> None:
        for name in names:
            wait_until_ready(cluster, name)
        paths = [path for _, path in cluster.requests]
        first = paths.index(f"/apis/ocigpu.io/v1alpha1/tenancies/{names[0]}/status")
        other = paths.index(f"/api/v1/namespaces/tenant-{names[1]}/resourcequotas")
        writes = [n for n, path in enumerate(paths) if path.endswith(f"tenancies/{names[0]}/status")]
        assert first < writes[-1] < other, "the first one is ready before the second one has its objects"
        for name in names:
            cluster.create(open_policy(name))
            cluster.patch("Tenancy", name, {"spec": {"internet": True}})
        for name in names:
            wait_for(name, lambda name=name: status(cluster, name)["phase"] == "Provisioning")
        cluster.requests.clear()
        cluster.create(tenancy("new"))
        wait_until_ready(cluster, "new")
        theirs = [path for _, path in cluster.requests if path.endswith("/tenancies/new/status")]
        assert theirs

    serve(new_service(cluster), act)


def test_a_tenancy_that_cannot_be_read_holds_up_no_other(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "RESYNC", 3600.0)
    cluster.create(tenancy("bad"))
    cluster.fail(10**6, 500, "GET", "/namespaces/tenant-bad/")
    for name in ("one", "two"):
        cluster.create(tenancy(name))
    serve(new_service(cluster), lambda: [wait_until_ready(cluster, name) for name in ("one", "two")] and None)
    assert status(cluster, "bad").get("phase") != "Ready"


# --- one of several replicas


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def replicas(cluster: Cluster) -> tuple[Clock, list[Leader]]:
    clock = Clock()
    documents = [Documents(cluster.client(ACCOUNT)) for _ in range(2)]
    return clock, [Leader(each, "ocigpu-tenancies", "ocigpu", f"r{n}", clock) for n, each in enumerate(documents)]


def test_one_replica_leads_until_it_has_been_silent_for_long(replicas: tuple[Clock, list[Leader]]) -> None:
    clock, (one, other) = replicas
    assert one.attempt()
    assert not other.attempt()
    for _ in range(20):
        clock.now += RETRY
        assert one.attempt()
        assert not other.attempt()
    clock.now += DEADLINE
    assert not one.is_leading(), "it stops before another can begin"
    with pytest.raises(NotLeadingError):
        one.check()
    assert not other.attempt()
    clock.now += DURATION
    assert other.attempt()
    assert not one.attempt()


def test_a_replica_that_ends_lets_the_next_one_lead_at_once(
    cluster: Cluster, replicas: tuple[Clock, list[Leader]]
) -> None:
    _, (one, other) = replicas
    assert one.attempt()
    assert not other.attempt()
    one.release()
    assert not one.is_leading()
    assert other.attempt()
    spec = cluster.get("Lease", "ocigpu-tenancies", "ocigpu")["spec"]
    assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("r1", 1)


def test_of_two_that_try_at_once_one_leads(cluster: Cluster, replicas: tuple[Clock, list[Leader]]) -> None:
    _, leaders = replicas
    barrier = threading.Barrier(2, timeout=60)
    for leader in leaders:
        get = leader.documents.get

        def get_and_wait(*words: Any, get: Any = get) -> Any:
            found = get(*words)
            barrier.wait()
            return found

        leader.documents.get = get_and_wait

    def attempt(leader: Leader) -> None:
        try:
            leader.attempt()
        except HostError:
            return

    threads = [threading.Thread(target=attempt, args=(leader,)) for leader in leaders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(leader.is_leading() for leader in leaders) == [False, True]


def test_a_leader_whose_server_is_away_leads_until_its_deadline(
    cluster: Cluster, replicas: tuple[Clock, list[Leader]]
) -> None:
    clock, (one, _) = replicas
    one.attempt()
    clock.now += RETRY
    cluster.fail(1, 500)
    with pytest.raises(HostError):
        one.attempt()
    assert one.is_leading()
    clock.now += DEADLINE
    assert not one.is_leading()


def test_the_service_works_while_it_leads_and_ends_when_told_to(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the watch makes it look again: the time between passes is an hour here."""
    monkeypatch.setattr(controller_module, "RESYNC", 3600.0)
    cluster.create(tenancy("first"))
    service = new_service(cluster, namespace="ocigpu")

    def act() -> None:
        wait_for("the first", lambda: status(cluster, "first").get("phase") == "Ready")
        own = int(cluster.get("Tenancy", "first")["metadata"]["resourceVersion"])
        wait_for("the pass after its last write", lambda: int(service.controller.version or 0) >= own)
        cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "newer-than-the-last-list"}})
        cluster.expire()
        cluster.drop_watches()
        cluster.create(tenancy("second"))
        wait_for("the second", lambda: status(cluster, "second").get("phase") == "Ready")

    serve(service, act)
    assert cluster.get("Lease", "ocigpu-tenancies", "ocigpu")["spec"]["holderIdentity"] == ""
    assert "tenancy second: Ready" in capsys.readouterr().out
