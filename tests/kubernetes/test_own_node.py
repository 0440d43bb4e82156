"""A program on a node writes that node and no other, whoever has its token: by the roles and policies of the chart."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from deployment_lab import CASES, objects, of_kind
from support.cluster import Cluster, make_kind
from support.cluster_rules import Problem

from ocigpu.kubernetes.installer import program as node_installer
from ocigpu.kubernetes.mig import manager as mig_manager
from ocigpu.kubernetes.mig.node import NodeApi

WRITING = {"create", "update", "patch", "delete", "deletecollection", "*"}
NODE = "authentication.kubernetes.io/node-name"
EVERYTHING: dict[str, Any] = {
    "migManager": {"enabled": True, "pods": "drain"},
    "nodeInstaller": {"enabled": True},
    "dra": {"enabled": True, "privileged": True},
    "computeDomains": {"enabled": True},
    "leases": {"enabled": True, "check": "true"},
    "nodeLabels": {"args": ["--remove-on-exit"]},
}
MORE = {"all": EVERYTHING, "labels at the node": {"nodeLabels": {"target": "node"}}}


def accounts(found: list[dict[str, Any]]) -> set[str]:
    """Return the accounts of programs that run on every node."""
    return {
        f"system:serviceaccount:gpu:{each['spec']['template']['spec']['serviceAccountName']}"
        for each in of_kind(found, "DaemonSet").values()
    }


def written(found: list[dict[str, Any]], account: str) -> Iterator[tuple[str, str]]:
    """Yield (API group, resource) of everything that an account's roles let it write."""
    for kind in ("Role", "ClusterRole"):
        for binding in of_kind(found, f"{kind}Binding").values():
            subjects = [f"system:serviceaccount:{each.get('namespace')}:{each['name']}" for each in binding["subjects"]]
            if account in subjects:
                for rule in of_kind(found, kind)[binding["roleRef"]["name"]]["rules"]:
                    if WRITING & set(rule["verbs"]):
                        yield from ((group, each) for group in rule["apiGroups"] for each in rule["resources"])


def is_narrowed(found: list[dict[str, Any]], account: str, group: str, resource: str) -> bool:
    for name, policy in of_kind(found, "ValidatingAdmissionPolicy").items():
        spec = policy["spec"]
        binding = of_kind(found, "ValidatingAdmissionPolicyBinding")[name]["spec"]
        rule = spec["matchConstraints"]["resourceRules"][0]
        if (
            [f'request.userInfo.username == "{account}"']
            == [each["expression"] for each in spec.get("matchConditions", [])]
            and group in rule["apiGroups"]
            and resource in rule["resources"]
            and all(NODE in each["expression"] for each in spec["validations"][:2])
            and spec["failurePolicy"] == "Fail"
            and "Deny" in binding["validationActions"]
        ):
            operations = {"CREATE"} if resource.endswith("/eviction") else {"CREATE", "UPDATE", "DELETE"}
            return operations <= set(rule["operations"])
    return False


@pytest.mark.parametrize("values", [*CASES.values(), *MORE.values()], ids=[*CASES, *MORE])
def test_each_role_with_a_writing_verb_is_held_to_the_own_node(values: Mapping[str, Any]) -> None:
    found = objects(values)
    missing = [
        (account, group, resource)
        for account in accounts(found)
        for group, resource in written(found, account)
        if not is_narrowed(found, account, group, resource)
    ]
    assert missing == []


def test_no_policy_of_the_chart_knows_that_an_object_is_being_deleted() -> None:
    """It would be held to other rules than a living one."""
    found = objects({**EVERYTHING, "tenants": {"enabled": True}, "caas": {"enabled": True, "tlsSecret": "t"}})
    policies = of_kind(found, "ValidatingAdmissionPolicy")
    assert len(policies) >= 12
    assert [name for name, each in policies.items() if "deletion" in str(each["spec"])] == []


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """With both ways of telling a node's labels."""
    with Cluster() as cluster:
        cluster.create(
            make_kind("nfd.k8s-sigs.io", "NodeFeature", "nodefeatures", "v1alpha1", namespaced=True),
        )
        cluster.create(make_kind("ocigpu.io", "GPULease", "gpuleases"))
        for space in ("gpu", "bank"):
            cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": space}})
        for each in [*objects(EVERYTHING), *objects(MORE["labels at the node"])]:
            if each["apiVersion"].partition("/")[0] in ("rbac.authorization.k8s.io", "admissionregistration.k8s.io"):
                cluster.apply(each)
        for name in ("node-1", "node-2"):
            cluster.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"a": "b"}}})
            head = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"of-{name}", "namespace": "bank"}}
            cluster.create({**head, "spec": {"nodeName": name, "containers": [{"name": "c", "image": "i"}]}})
        yield cluster


def ask(cluster: Cluster, account: str, on: str | None, method: str, path: str, body: Any = None, **query: str) -> None:
    """Send a request with the token of an account's pod on a node; raises Problem."""
    token = cluster.token(f"system:serviceaccount:gpu:ocigpu-{account}", node=on)
    content = "application/apply-patch+yaml" if "fieldManager" in query else "application/merge-patch+json"
    words = "&".join(f"{name}={value}" for name, value in query.items())
    headers = {"Authorization": f"Bearer {token}", "Content-Type": content}
    request = cluster.route(method, f"{path}?{words}", headers, json.dumps(body).encode())
    cluster.serve(request)


TAINT = {"spec": {"taints": [{"key": "evil", "effect": "NoExecute"}]}, "metadata": {"labels": {"c": "d"}}}
WRITES: dict[str, tuple[list[str], list[str]]] = {
    "mig-manager": (
        [mig_manager.STATE, *mig_manager.CLIENTS],
        [mig_manager.REASON, mig_manager.JOURNAL, mig_manager.REBOOTED],
    ),
    "node-installer": ([node_installer.LABEL, node_installer.VERSION_LABEL], [node_installer.LABEL]),
}
"""Labels and annotations of a node that a program writes."""


@pytest.mark.parametrize("account", WRITES)
def test_of_its_node_a_program_writes_its_own_labels_and_annotations_alone(cluster: Cluster, account: str) -> None:
    path = "/api/v1/nodes/node-1"
    before = cluster.patch(
        "Node", "node-1", {"metadata": {"annotations": {"theirs": "1"}}, "spec": {"podCIDR": "::/64"}}
    )
    labels, annotations = WRITES[account]
    for value in ("x", None):
        own = {"labels": dict.fromkeys(labels, value), "annotations": dict.fromkeys(annotations, value)}
        ask(cluster, account, "node-1", "PATCH", path, {"metadata": own})
    applied = {"labels": {labels[0]: "x"}, "annotations": {annotations[0]: "y"}}
    for own in (applied, {}):
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-1", **own}}
        ask(cluster, account, "node-1", "PATCH", path, body, fieldManager="m", force="true")
    other = next(keys for name, (keys, _) in WRITES.items() if name != account)[0]
    for change in (
        TAINT,
        {"spec": {"unschedulable": True}},
        {"spec": None},
        {"metadata": {"labels": {"a": "c"}}},
        {"metadata": {"labels": {"a": None}}},
        {"metadata": {"labels": {other: "x"}}},
        {"metadata": {"labels": {mig_manager.CONFIG: "all-disabled"}}},
        {"metadata": {"annotations": {"theirs": None}}},
        {"metadata": {"annotations": {"theirs": "2"}}},
        {"metadata": {"annotations": {labels[-1] + "-x": "2"}}},
        {"metadata": {"finalizers": ["a.example/b"]}},
        {"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "gone", "uid": "u"}]}},
    ):
        with pytest.raises(Problem, match=r"of a node the (installer|manager) changes"):
            ask(cluster, account, "node-1", "PATCH", path, change)
    after = cluster.get("Node", "node-1")
    assert after["spec"] == before["spec"]
    assert [after["metadata"][key] for key in ("labels", "annotations")] == [
        before["metadata"][key] for key in ("labels", "annotations")
    ]


@pytest.mark.parametrize("account", ["mig-manager", "node-installer", "node-labels"])
def test_a_node_is_written_by_its_own_programs_alone(cluster: Cluster, account: str) -> None:
    key = {"mig-manager": mig_manager.STATE, "node-installer": node_installer.LABEL, "node-labels": "c"}[account]
    for value in ("d", None):
        ask(cluster, account, "node-1", "PATCH", "/api/v1/nodes/node-1", {"metadata": {"labels": {key: value}}})
    for on, words in (("node-2", "own node only"), (None, "does not say on which node")):
        with pytest.raises(Problem, match=words):
            ask(cluster, account, on, "PATCH", "/api/v1/nodes/node-1", TAINT)
    # the same, being deleted: kept by a finalizer
    cluster.patch("Node", "node-2", {"metadata": {"finalizers": ["a.b/c"]}})
    if not cluster.get("Node", "node-2")["metadata"].get("deletionTimestamp"):
        cluster.delete("Node", "node-2")
    with pytest.raises(Problem, match="own node only"):
        ask(cluster, account, "node-1", "PATCH", "/api/v1/nodes/node-2", TAINT)
    apply = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-2", "labels": {"ocigpu/runtime": "ready"}}}
    with pytest.raises(Problem, match="own node only"):
        ask(cluster, account, "node-1", "PATCH", "/api/v1/nodes/node-2", apply, fieldManager="m", force="true")


def test_the_features_of_a_node_are_its_own_programs_alone(cluster: Cluster) -> None:
    path = "/apis/nfd.k8s-sigs.io/v1alpha1/namespaces/gpu/nodefeatures"

    def feature(name: str, node: str | None) -> dict[str, Any]:
        labels = {"labels": {"nfd.node.kubernetes.io/node-name": node}} if node else {}
        head = {"apiVersion": "nfd.k8s-sigs.io/v1alpha1", "kind": "NodeFeature"}
        return {**head, "metadata": {"name": name, "namespace": "gpu", **labels}, "spec": {}}

    def apply(on: str, name: str, node: str | None) -> None:
        ask(cluster, "node-labels", on, "PATCH", f"{path}/{name}", feature(name, node), fieldManager="m", force="true")

    apply("node-1", "nvidia-features-for-node-1", "node-1")
    for on, name, node in (
        ("node-2", "nvidia-features-for-node-1", "node-1"),  # another's, changed
        ("node-2", "nvidia-features-for-node-1", "node-2"),  # and taken
        ("node-1", "more-for-node-2", "node-2"),  # another's, made
        ("node-1", "nvidia-features-for-node-2", "node-1"),  # a name of another
        ("node-2", "nvidia-features-for-node-2", None),  # of no node
    ):
        with pytest.raises(Problem, match="own node only"):
            apply(on, name, node)
    with pytest.raises(Problem, match="own node only"):
        ask(cluster, "node-labels", "node-2", "DELETE", f"{path}/nvidia-features-for-node-1")
    ask(cluster, "node-labels", "node-1", "DELETE", f"{path}/nvidia-features-for-node-1")


def test_the_manager_lists_pods_of_its_own_node_alone(cluster: Cluster) -> None:
    account = "system:serviceaccount:gpu:ocigpu-mig-manager"
    assert [str(each) for each in NodeApi(cluster.client(account, node="node-1"), "node-1").pods()] == [
        "bank/of-node-1"
    ]


def test_the_manager_evicts_pods_of_its_own_node_alone(cluster: Cluster) -> None:
    def evict(on: str | None, pod: str) -> None:
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": "bank"}}
        ask(cluster, "mig-manager", on, "POST", f"/api/v1/namespaces/bank/pods/{pod}/eviction", body)

    for on, words in (("node-1", "own node only"), (None, "does not say on which node")):
        with pytest.raises(Problem, match=words):
            evict(on, "of-node-2")
    evict("node-2", "of-node-2")


def test_a_pod_that_has_gone_meanwhile_is_evicted(cluster: Cluster) -> None:
    """Also the last of its namespace: the policy then finds no pod to be evaluated with."""
    cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "alone"}})
    for space in ("bank", "alone"):
        head = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "short", "namespace": space}}
        cluster.create({**head, "spec": {"nodeName": "node-2", "containers": [{"name": "c", "image": "i"}]}})
    own = NodeApi(cluster.client("system:serviceaccount:gpu:ocigpu-mig-manager", node="node-2"), "node-2")
    for pod in [each for each in own.pods() if each.name == "short"]:
        cluster.delete("Pod", "short", pod.namespace, gracePeriodSeconds=0)
        assert own.evict(pod)


def test_events_are_told_in_the_name_of_the_own_node_alone(cluster: Cluster) -> None:
    head = {"apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {"name": "e.1", "namespace": "default"}}
    event = {**head, "reportingInstance": "node-2", "reason": "Quarantined"}
    path = "/apis/events.k8s.io/v1/namespaces/default/events"
    with pytest.raises(Problem, match="own node alone"):
        ask(cluster, "lease-agent", "node-1", "POST", path, event)
    ask(cluster, "lease-agent", "node-2", "POST", path, event)
