"""The kind Tenancy, the objects that a tenancy is made of, and the admission policies, in a cluster that has them."""

import contextlib
import copy
import ipaddress
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml
from deployment_lab import RENDERER
from support.cluster import Cluster
from support.cluster_rules import Problem
from support.process import wait_for
from support.products import one_in
from tenancy_lab import ACCOUNT, ADMIN, PLAIN, SERVICE, install, pod, tenancy

from ocigpu.kubernetes.cluster.quantity import parse_quantity
from ocigpu.tenants.tenancy import (
    COUNTED,
    DEFAULTS,
    TenancyOptions,
    find_held_leases,
    find_unenforced,
    is_as_planned,
    plan_objects,
    read_spec,
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One for all cases: none of them leaves anything."""
    with Cluster() as cluster:
        install(cluster)
        labels = {"ocigpu.io/tenancy": "landon"}
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "tenant-landon", "labels": labels}}
        cluster.create(space, user=ACCOUNT)
        furnish(cluster)
        yield cluster


def furnish(cluster: Any) -> None:
    """What pods of the cases need beside a namespace; its account has no token, as the controller leaves it."""
    head = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass"}
    cluster.create({**head, "metadata": {"name": "runc"}, "handler": "runc"})
    head = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass"}
    cluster.create({**head, "metadata": {"name": "above-all-tenants"}, "value": 1000})
    for space in ("tenant-landon", "default"):
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "other", "namespace": space}}
        cluster.create(account)
        for name in ("default", "other"):
            cluster.patch("ServiceAccount", name, {"automountServiceAccountToken": False}, space)


def planned(cilium: bool = False, **spec: Any) -> dict[str, Any]:
    document = {**tenancy(**spec), "metadata": {"name": "landon", "uid": "u-1"}}
    options = TenancyOptions(denied=("169.254.169.254/32", "203.0.113.0/24"), dns=("169.254.20.10/32",), cilium=cilium)
    return {each["kind"]: each for each in plan_objects(document, options)}


def test_the_defaults_are_those_of_the_schema(cluster: Cluster) -> None:
    made = cluster.create(tenancy("defaults"))
    assert made["spec"] == DEFAULTS == read_spec({"spec": {}, "metadata": {}})
    assert read_spec({"spec": {"quota": {"gpus": 2}}})["quota"] == {**DEFAULTS["quota"], "gpus": 2}
    cluster.delete("Tenancy", "defaults")


@pytest.mark.parametrize(
    "wrong",
    [
        {"metadata": {"name": "a" * 57}},
        {"metadata": {"name": "a.b"}},
        {"spec": {"quota": {"gpus": -1}}},
        {"spec": {"quota": {"gpus": "8"}}},
        {"spec": {"quota": {"cpu": "many"}}},
        {"spec": {"quota": {"memory": "1 Gi"}}},
        {"spec": {"podSecurity": "privileged"}},
        {"spec": {"suspended": "yes"}},
    ],
    ids=str,
)
def test_what_cannot_be_a_tenancy_is_refused(cluster: Cluster, wrong: dict[str, Any]) -> None:
    with pytest.raises(Problem) as caught:
        cluster.create({**tenancy(), **wrong})
    assert (caught.value.code, caught.value.reason) == (422, "Invalid")


def test_the_objects_of_a_tenancy_are_valid_and_closed() -> None:
    found = planned()
    assert list(found) == ["Namespace", "NetworkPolicy", "ResourceQuota", "LimitRange", "ServiceAccount"]
    for each in found.values():
        kubernetes_validate.validate(each, "1.37", strict=True)
        assert each["metadata"]["labels"]["ocigpu.io/tenancy"] == "landon"
    labels = found["Namespace"]["metadata"]["labels"]
    assert labels["ocigpu.io/tenancy-uid"] == "u-1"
    assert labels["pod-security.kubernetes.io/enforce"] == "baseline"
    assert planned(podSecurity="restricted")["Namespace"]["metadata"]["labels"] == {
        name: value.replace("baseline", "restricted") for name, value in labels.items()
    }
    hard = found["ResourceQuota"]["spec"]["hard"]
    assert hard["requests.nvidia.com/gpu"] == "8"
    assert "nvidia.com/gpu" not in hard, "extended resources have quotas for requests only"
    assert hard["services.nodeports"] == hard["services.loadbalancers"] == "0"
    assert found["ServiceAccount"] == {**found["ServiceAccount"], "automountServiceAccountToken": False}
    closed = planned(suspended=True)["ResourceQuota"]["spec"]["hard"]
    assert {name for name, value in closed.items() if value != "0"} == {"requests.storage", *COUNTED}
    assert {hard[name] for name in COUNTED} == {"1000"}, "the database of all is not filled by one"


def reaches(policy: dict[str, Any], address: str) -> bool:
    """Whether the policy lets a pod connect to an address outside of the cluster, on port 443."""
    one = ipaddress.ip_address(address)
    for rule in policy["spec"]["egress"]:
        blocks = [] if "ports" in rule or "toPorts" in rule else rule.get("toCIDRSet", [])
        blocks = blocks + (
            [] if "ports" in rule else [each["ipBlock"] for each in rule.get("to", []) if "ipBlock" in each]
        )
        for block in blocks:
            inside = one in ipaddress.ip_network(block["cidr"])
            if inside and not any(one in ipaddress.ip_network(each) for each in block["except"]):
                return True
    return False


@pytest.mark.parametrize("cilium", [False, True])
def test_pods_reach_their_namespace_and_dns_and_the_internet_only_when_asked_for(cilium: bool) -> None:
    kind = "CiliumNetworkPolicy" if cilium else "NetworkPolicy"
    shut, wide = planned(cilium)[kind], planned(cilium, internet=True)[kind]
    for address in ("8.8.8.8", "2606:4700::1111"):
        assert not reaches(shut, address)
        assert reaches(wide, address)
    never = ["169.254.169.254", "10.1.2.3", "192.168.0.1", "172.20.0.1", "203.0.113.7", "127.0.0.1", "169.254.20.10"]
    never += ["100.64.1.1", "fd00:ec2::254", "fe80::1", "::1", "::ffff:10.0.0.1", "::10.0.0.1", "fec0::1", "2001::1"]
    never += ["64:ff9b::10.0.0.1", "64:ff9b:1::a00:1", "2002:a00:1::", "2002:a9fe:a9fe::1", "100::1", "5f00::1"]
    assert [address for address in never if reaches(wide, address) or reaches(shut, address)] == []
    for block in [each for rule in wide["spec"]["egress"] for each in rule.get("toCIDRSet", [])]:
        for each in block["except"]:
            assert ipaddress.ip_network(each).subnet_of(ipaddress.ip_network(block["cidr"]))
    if cilium:
        own = {"matchLabels": {"k8s:io.kubernetes.pod.namespace": "tenant-landon"}}
        assert shut["spec"]["ingress"] == [{"fromEndpoints": [own]}]
        assert shut["spec"]["egress"][0] == {"toEndpoints": [own]}
    else:
        assert shut["spec"]["policyTypes"] == ["Ingress", "Egress"]
        assert shut["spec"]["ingress"] == [{"from": [{"podSelector": {}}]}]
    assert "169.254.20.10/32" in str(shut["spec"]["egress"])


@pytest.mark.parametrize("denied", [("0.0.0.0/0", "::/0"), ("0.0.0.0/0", "2000::/3")], ids=str)
def test_whoever_denies_all_addresses_does_not_open_all(denied: tuple[str, ...]) -> None:
    document = {**tenancy(internet=True), "metadata": {"name": "landon", "uid": "u-1"}}
    for cilium in (False, True):
        found = plan_objects(document, TenancyOptions(denied=denied, cilium=cilium))[1]
        assert len(found["spec"]["egress"]) == 2, "to its namespace, and to DNS"


def test_an_object_is_as_planned_with_quantities_in_other_words_and_more_labels() -> None:
    quota = planned()["ResourceQuota"]
    found = copy.deepcopy(quota)
    found["spec"]["hard"]["requests.memory"] = "2048Gi"
    found["metadata"]["labels"]["more"] = "x"
    assert is_as_planned(quota, {**found, "status": {}})
    found["spec"]["hard"]["pods"] = "33"
    assert not is_as_planned(quota, found)
    policy = planned()["NetworkPolicy"]
    wider = copy.deepcopy(policy)
    wider["spec"]["ingress"][0]["from"][0]["namespaceSelector"] = {}
    assert not is_as_planned(policy, wider), "a selector more lets all namespaces in"
    assert [parse_quantity(text) for text in ("2Gi", "1k", "500m", "x", "", "1.5Ki", "3Q")] == [
        2 << 30, 1000, parse_quantity("0.5"), None, None, 1536, None,
    ]  # fmt: skip


def test_leases_hold_a_tenancy_until_they_are_free_or_in_quarantine() -> None:
    def lease(name: str, phase: str, **holder: str) -> dict[str, Any]:
        return {"metadata": {"name": name}, "status": {"phase": phase, "holder": holder}}

    leases = [
        lease("a", "Leased", tenancy="landon"), lease("b", "Reclaiming", namespace="tenant-landon"),
        lease("c", "Free", tenancy="landon"), lease("d", "Quarantined", tenancy="landon"),
        lease("e", "Leased", tenancy="other"), {"metadata": {"name": "f"}},
    ]  # fmt: skip
    assert find_held_leases(leases, "landon") == ("a", "b")


# --- admission policies

GPU = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
REQUIRED, PREFERRED = (f"{what}DuringSchedulingIgnoredDuringExecution" for what in ("required", "preferred"))
HOST = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-1"]}
ZONE, NAME = {**HOST, "key": "zone"}, {**HOST, "key": "metadata.name"}
CERTIFICATE = {"signerName": "example.org/workloads", "keyType": "ED25519", "credentialBundlePath": "c"}
NEAR = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {}}
EVERYWHERE = {"namespaceSelector": {}, **NEAR}


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"gpus": 0},
        {"gpus": 8},
        {"annotations": {"mine": "1"}},
        {"hostNetwork": False},
        {"volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "persistentVolumeClaim": {"claimName": "c"}}]},
        {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]},
        {"initContainers": [{"name": "i", "image": "x"}]},
        {"shareProcessNamespace": True},
        {"containers": [{"name": "x", "image": "y"}]},
        {"finalizers": ["batch.kubernetes.io/job-tracking"]},
        {"nodeSelector": {"nvidia.com/gpu.product": "H100"}},
        {
            "affinity": {
                "nodeAffinity": {PREFERRED: [{"weight": 1, "preference": {"matchExpressions": [ZONE]}}]},
                "podAffinity": {REQUIRED: [NEAR]},
                "podAntiAffinity": {PREFERRED: [{"weight": 1, "podAffinityTerm": NEAR}]},
            }
        },
        {
            "container": {
                "readinessProbe": {"httpGet": {"port": 80}},
                "livenessProbe": {"exec": {"command": ["true"]}},
                "lifecycle": {"preStop": {"exec": {"command": ["true"]}}},
                "ports": [{"containerPort": 80}],
            }
        },
    ],
    ids=str,
)
def test_pods_that_tenants_may_have_are_admitted(cluster: Cluster, spec: dict[str, Any]) -> None:
    cluster.create(pod(**copy.deepcopy(spec)), user=SERVICE)
    cluster.patch("Pod", "p", {"metadata": {"finalizers": None}}, "tenant-landon")
    cluster.delete("Pod", "p", "tenant-landon")


REFUSED = [
        ({"runtimeClassName": "runc"}, "runtimeClassName"),
        ({"annotations": {"io.katacontainers.config.hypervisor.path": "/x"}}, "io.katacontainers"),
        ({"annotations": {"cdi.k8s.io/vfio0": "nvidia.com/pgpu=0"}}, "choose devices"),
        ({"hostNetwork": True}, "hostNetwork"),
        ({"hostPID": True}, "hostPID"),
        ({"hostIPC": True}, "hostIPC"),
        ({"container": {"securityContext": {"privileged": True}}}, "privileged"),
        ({"initContainers": [{"name": "i", "image": "x", "securityContext": {"privileged": True}}]}, "privileged"),
        ({"volumes": [{"name": "a", "hostPath": {"path": "/"}}]}, "volumes"),
        ({"volumes": [{"name": "a", "nfs": {"server": "s", "path": "/"}}]}, "volumes"),
        ({"volumes": [{"name": "a", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}]}, "volumes"),
        ({"volumes": [{"name": "a", "projected": {"sources": [{"podCertificate": CERTIFICATE}]}}]}, "volumes"),
        ({"resources": {"limits": {"hugepages-1Gi": "64Gi"}}}, "huge pages"),
        ({"nodeName": "node-1"}, "nodeName"),
        ({"schedulerName": "mine"}, "schedulerName"),
        ({"priorityClassName": "system-node-critical"}, "priorityClassName"),
        ({"priorityClassName": "above-all-tenants"}, "priorityClassName"),
        ({"nodeSelector": {"kubernetes.io/hostname": "node-1"}}, "name a node"),
        ({"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchFields": [NAME]}]}}}}, "name a node"),
        (
            {"affinity": {"nodeAffinity": {PREFERRED: [{"weight": 1, "preference": {"matchExpressions": [HOST]}}]}}},
            "name a node",
        ),
        ({"affinity": {"podAffinity": {REQUIRED: [{"namespaces": ["tenant-other"], **NEAR}]}}}, "of the tenancy only"),
        ({"affinity": {"podAntiAffinity": {REQUIRED: [{"namespaceSelector": {}, **NEAR}]}}}, "of the tenancy only"),
        (
            {"affinity": {"podAntiAffinity": {PREFERRED: [{"weight": 1, "podAffinityTerm": EVERYWHERE}]}}},
            "of the tenancy only",
        ),
        ({"container": {"livenessProbe": {"httpGet": {"host": "169.254.169.254", "port": 80}}}}, "probes ask the pod"),
        ({"container": {"startupProbe": {"tcpSocket": {"host": "127.0.0.1", "port": 6666}}}}, "probes ask the pod"),
        ({"container": {"lifecycle": {"postStart": {"httpGet": {"host": "10.0.0.7", "port": 80}}}}}, "hooks ask the"),
        ({"container": {"ports": [{"containerPort": 80, "hostPort": 80}]}}, "ports of the node"),
        ({"finalizers": ["mine.example/stay"]}, "finalizers"),
        ({"tolerations": [{"operator": "Exists"}]}, "tolerations"),
        ({"tolerations": [{"key": "gpu-check", "operator": "Exists"}]}, "tolerations"),
        ({"terminationGracePeriodSeconds": 301}, "at most 300"),
        ({"serviceAccountName": "other"}, "account"),
        ({"automountServiceAccountToken": True}, "volumes"),  # of the token
        ({"resourceClaims": [{"name": "gpu", "resourceClaimName": "c"}]}, "claims"),
        ({"gpus": 3}, "as one of"),
        ({"gpus": 16}, "as one of"),
        ({"container": {"resources": {"limits": {"ocigpu.io/gpu-check": "1"}}}}, "as one of"),
        ({"containers": [{"name": name, "image": "x", **GPU} for name in "ab"]}, "one container"),
        ({"initContainers": [{"name": "i", "image": "x", **GPU}]}, "one container"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "words"), REFUSED, ids=str)
def test_pods_that_tenants_may_not_have_are_refused(cluster: Cluster, spec: dict[str, Any], words: str) -> None:
    for user in (SERVICE, ADMIN):
        with pytest.raises(Problem, match=words) as caught:
            cluster.create(pod(**copy.deepcopy(spec)), user=user)
        assert caught.value.code in (403, 422)
    cluster.create(pod(namespace="default", **copy.deepcopy(spec)), user=SERVICE)
    cluster.patch("Pod", "p", {"metadata": {"finalizers": None}}, "default")
    cluster.delete("Pod", "p", "default", gracePeriodSeconds=0)


def test_pods_cannot_become_what_they_could_not_be_made_as(cluster: Cluster) -> None:
    cluster.create(pod(), user=SERVICE)
    debugger = [{"name": "debug", "image": "x"}]
    with pytest.raises(Problem, match="ephemeral"):
        cluster.patch(
            "Pod", "p", {"spec": {"ephemeralContainers": debugger}}, "tenant-landon", sub="ephemeralcontainers"
        )
    with pytest.raises(Problem, match="choose devices"):
        cluster.patch("Pod", "p", {"metadata": {"annotations": {"cdi.k8s.io/x": "y"}}}, "tenant-landon")
    # the scheduler's binding and the kubelet's status are not in the way
    cluster.bind("p", "tenant-landon", "node-1")
    cluster.patch("Pod", "p", {"status": {"phase": "Running"}}, "tenant-landon", sub="status")
    cluster.delete("Pod", "p", "tenant-landon", gracePeriodSeconds=0)


CLUSTERS = "system:serviceaccount:kube-system:statefulset-controller"
AT_CREATION = ("nodeName", "automountServiceAccountToken")
"""What is set when a pod is made, and never afterwards."""


@pytest.fixture
def going(cluster: Cluster) -> Iterator[Any]:
    """Make an object that is being deleted and is kept by a finalizer; it goes when a tenant takes that away."""
    made = []

    def make(document: dict[str, Any]) -> dict[str, Any]:
        document["metadata"]["finalizers"] = ["foregroundDeletion"]
        cluster.create(document)
        where = (document["kind"], document["metadata"]["name"], document["metadata"].get("namespace"))
        made.append(where)
        cluster.delete(*where)
        assert cluster.get(*where)["metadata"]["deletionTimestamp"]
        return cluster.get(*where)

    yield make
    for where in made:
        found = cluster.get(*where)
        cluster.update({**found, "metadata": {**found["metadata"], "finalizers": []}}, user=SERVICE)
        assert not cluster.exists(*where)


@pytest.mark.parametrize(
    ("spec", "words"), one_in(4, [case for case in REFUSED if not set(AT_CREATION) & set(case[0])]), ids=str
)
def test_pods_that_are_being_deleted_cannot_become_what_they_could_not_be_made_as(
    cluster: Cluster, going: Any, spec: dict[str, Any], words: str
) -> None:
    found = going(pod())
    wrong = pod(**copy.deepcopy(spec))
    for field in ("annotations", "finalizers"):
        wrong["metadata"].setdefault(field, found["metadata"].get(field, []))
    for user in (SERVICE, ADMIN):
        with pytest.raises(Problem, match=words):
            cluster.update(
                {**found, "metadata": {**found["metadata"], **wrong["metadata"]}, "spec": wrong["spec"]}, user=user
            )


@pytest.mark.parametrize("deleted", [False, True])
def test_annotations_are_held_to_the_rules_through_every_part_of_a_pod(
    cluster: Cluster, going: Any, deleted: bool
) -> None:
    if deleted:
        going(pod())
    else:
        cluster.create(pod())
    wrong = {"metadata": {"annotations": {"io.katacontainers.config.hypervisor.path": "/x"}}}
    for sub in ("", "status"):
        with pytest.raises(Problem, match=r"io\.katacontainers"):
            cluster.patch("Pod", "p", wrong, "tenant-landon", sub=sub)
    with pytest.raises(Problem, match="finalizers would keep"):
        cluster.patch("Pod", "p", {"metadata": {"finalizers": ["evil.example/hold"]}}, "tenant-landon", sub="status")
    cluster.patch("Pod", "p", {"status": {"phase": "Running"}}, "tenant-landon", sub="status")
    if not deleted:
        cluster.delete("Pod", "p", "tenant-landon")


def test_only_the_scheduler_binds_pods(cluster: Cluster) -> None:
    """A binding chooses the node, and what annotations it has are the pod's (BindingREST)."""
    cluster.create(pod(), user=SERVICE)
    body = {"target": {"kind": "Node", "name": "node-1"}, "metadata": {"annotations": {"cdi.k8s.io/x": "y"}}}
    head = {"kind": "Pod", "metadata": {"name": "p", "namespace": "tenant-landon"}}
    with pytest.raises(Problem, match="controller's"):
        cluster.do("POST", head, SERVICE, "binding", named=True, body=body)
    cluster.do("POST", head, "system:kube-scheduler", "binding", named=True, body={"target": body["target"]})
    assert cluster.get("Pod", "p", "tenant-landon")["spec"]["nodeName"] == "node-1"
    cluster.delete("Pod", "p", "tenant-landon", gracePeriodSeconds=0)


def test_images_may_be_held_to_registries() -> None:
    with Cluster() as cluster:
        install(cluster, registries=["registry.example/"])
        labels = {"ocigpu.io/tenancy": "landon"}
        cluster.create(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "tenant-landon", "labels": labels}}
        )
        furnish(cluster)
        cluster.create(pod())
        with pytest.raises(Problem, match="images must begin"):
            cluster.create(pod(name="q", container={"image": "docker.io/cuda"}))


def claim(**spec: Any) -> dict[str, Any]:
    head = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
    metadata = {"name": spec.pop("name", "data"), "namespace": "tenant-landon"}
    common = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    return {**head, "metadata": metadata, "spec": {**common, "storageClassName": "fast", **spec}}


def service(**spec: Any) -> dict[str, Any]:
    return {**claim(), "kind": "Service", "spec": {"ports": [{"port": 80}], **spec}}


def test_what_is_no_change_of_a_service_or_claim_is_nobodys_business(cluster: Cluster) -> None:
    for document in (service(), claim()):
        where = (document["kind"], "data", "tenant-landon")
        made = cluster.create(document, user=SERVICE)
        labelled = {**made, "metadata": {**made["metadata"], "labels": {"a": "b"}}}
        assert cluster.update(labelled, user=SERVICE)["metadata"]["labels"] == {"a": "b"}
        cluster.delete(*where)
        wait_for("its end", lambda where=where: not cluster.exists(*where))


LEADING_OUT = [
    (claim(volumeName="of-another"), "may be another's"),
    (claim(volumeName="data"), "may be another's"),
    (claim(storageClassName=""), "takes any volume"),
    (claim(dataSourceRef={"kind": "PersistentVolumeClaim", "name": "a", "namespace": "b"}), "of the tenancy's"),
    (service(externalIPs=["10.96.0.10"]), "traffic that is for others"),
    (service(loadBalancerIP="203.0.113.9"), "traffic that is for others"),
    (service(type="NodePort"), "must be ClusterIP"),
    (service(type="ExternalName", externalName="kubernetes.default.svc"), "must be ClusterIP"),
]


@pytest.mark.parametrize(("document", "words"), LEADING_OUT, ids=str)
def test_claims_and_services_that_lead_out_of_a_tenancy_are_refused(
    cluster: Cluster, document: dict[str, Any], words: str
) -> None:
    with pytest.raises(Problem, match=words):
        cluster.create(copy.deepcopy(document), user=SERVICE)


@pytest.mark.parametrize(("document", "words"), LEADING_OUT, ids=str)
def test_claims_and_services_that_are_being_deleted_cannot_lead_out_of_a_tenancy(
    cluster: Cluster, going: Any, document: dict[str, Any], words: str
) -> None:
    if "takes any volume" in words:  # a claim's class is set when it is made
        return
    found = going(service() if document["kind"] == "Service" else claim())
    with pytest.raises(Problem, match=words):
        cluster.update({**found, "spec": document["spec"]}, user=SERVICE)
    # what changes nothing is nobody's affair
    cluster.update({**found, "metadata": {**found["metadata"], "labels": {"a": "b"}}}, user=SERVICE)


@pytest.mark.parametrize("deleted", [False, True])
def test_the_address_of_a_load_balancer_is_the_clusters_to_tell(cluster: Cluster, going: Any, deleted: bool) -> None:
    found = going(service()) if deleted else cluster.create(service(), user=SERVICE)
    balanced = {**found, "status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.7"}]}}}
    with pytest.raises(Problem, match="traffic that is for others"):
        cluster.update(balanced, sub="status", user=SERVICE)
    cluster.update({**found, "status": {"loadBalancer": {}}}, sub="status", user=SERVICE)
    if not deleted:
        cluster.delete("Service", "data", "tenant-landon")


@pytest.mark.parametrize(
    "annotation",
    [
        "volume.beta.kubernetes.io/storage-class",
        "volume.kubernetes.io/selected-node",
        "pv.kubernetes.io/bind-completed",
    ],
)
def test_annotations_choose_no_volume(cluster: Cluster, annotation: str) -> None:
    """The old annotation of a class goes before the class (component-helpers, storage/volume/helpers.go)."""
    document = claim()
    document["metadata"]["annotations"] = {annotation: "of-others"}
    for user in (SERVICE, CLUSTERS):
        with pytest.raises(Problem, match="annotations by which the cluster chooses"):
            cluster.create(copy.deepcopy(document), user=user)
    made = cluster.create(claim(), user=SERVICE)
    chosen = {**made, "metadata": {**made["metadata"], "annotations": {annotation: "node-1"}}}
    with pytest.raises(Problem, match="annotations by which the cluster chooses"):
        cluster.update(chosen, user=SERVICE)
    made = cluster.update(chosen, user="system:kube-scheduler")
    made["metadata"]["annotations"]["mine"] = "1"
    cluster.update(made, user=SERVICE)
    cluster.delete("PersistentVolumeClaim", "data", "tenant-landon")


@pytest.mark.parametrize("user", [CLUSTERS, "system:kube-controller-manager"])
def test_what_a_controller_makes_from_a_tenants_template_is_the_tenants(cluster: Cluster, user: str) -> None:
    """A StatefulSet's templates of claims have every field that a claim has."""
    for document, words in LEADING_OUT:
        with pytest.raises(Problem, match=words):
            cluster.create(copy.deepcopy(document), user=user)
    kept = claim()
    kept["metadata"]["finalizers"] = ["evil.example/hold"]
    with pytest.raises(Problem, match="finalizers would keep"):
        cluster.create(kept, user=user)


FOREIGN = ["evil.example/hold", "kubernetes", "ocigpu.io/tenancy", "batch.kubernetes.io/job-tracking"]


@pytest.mark.parametrize("kind", ["ConfigMap", "Secret", "Service", "PersistentVolumeClaim", "Job", "Deployment"])
def test_nothing_that_a_tenant_makes_is_kept_by_finalizers_of_others(cluster: Cluster, kind: str) -> None:
    api = {"Job": "batch/v1", "Deployment": "apps/v1"}.get(kind, "v1")
    known = {"Service": service, "PersistentVolumeClaim": claim}.get(kind)
    head = {"apiVersion": api, "kind": kind, "metadata": {"name": "data", "namespace": "tenant-landon"}}
    document = known() if known else {**head, "spec": {}}
    for finalizer in FOREIGN:
        wrong = copy.deepcopy(document)
        wrong["metadata"]["finalizers"] = [finalizer]
        with pytest.raises(Problem, match="finalizers would keep"):
            cluster.create(wrong, user=SERVICE)
    allowed = ["foregroundDeletion", *(["kubernetes.io/pvc-protection"] if known is claim else [])]
    document["metadata"]["finalizers"] = allowed
    made = cluster.create(document, user=SERVICE)
    more = {**made, "metadata": {**made["metadata"], "finalizers": [*allowed, "evil.example/hold"]}}
    for sub in ("", "status") if kind not in ("ConfigMap", "Secret") else ("",):
        with pytest.raises(Problem, match="finalizers would keep"):
            cluster.update(copy.deepcopy(more), sub=sub, user=SERVICE)
    cluster.delete(kind, "data", "tenant-landon")
    held = cluster.get(kind, "data", "tenant-landon")
    for finalizers in ([*allowed, "evil.example/hold"], ["evil.example/hold"]):  # being deleted
        with pytest.raises(Problem, match="finalizers would keep"):
            cluster.update({**held, "metadata": {**held["metadata"], "finalizers": finalizers}}, user=SERVICE)
    # controllers of the cluster protect what is in use, and it goes when they say so
    theirs = {**held["metadata"], "finalizers": [*allowed, "snapshot.storage.kubernetes.io/in-use"]}
    held = cluster.update({**held, "metadata": theirs}, user="system:serviceaccount:kube-system:snapshot-controller")
    cluster.update({**held, "metadata": {**held["metadata"], "labels": {"a": "b"}}}, user=SERVICE)
    cluster.patch(kind, "data", {"metadata": {"finalizers": None}}, "tenant-landon")
    assert not cluster.exists(kind, "data", "tenant-landon")


def test_finalizers_of_the_clusters_controllers_may_be_named() -> None:
    with Cluster() as cluster:
        install(cluster, finalizers=["storage.example/protection"])
        labels = {"ocigpu.io/tenancy": "landon"}
        cluster.create(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "tenant-landon", "labels": labels}}
        )
        document = claim()
        document["metadata"]["finalizers"] = ["storage.example/protection"]
        cluster.create(document, user=SERVICE)


def test_claims_and_services_of_a_tenancys_own_are_admitted_and_stay_so(cluster: Cluster) -> None:
    pinned = claim(name="ctr-01-0", volumeName="ctr-01-0", storageClassName="")  # as the service makes them
    for document in (claim(), pinned, service(), service(type="ClusterIP", clusterIP="None")):
        cluster.create(document, user=SERVICE)
        cluster.delete(document["kind"], document["metadata"]["name"], "tenant-landon")
    made = cluster.create(claim(), user=SERVICE)
    bound = {**made, "spec": {**made["spec"], "volumeName": "pvc-1"}}
    with pytest.raises(Problem, match="may be another's"):
        cluster.update(bound, user=SERVICE)
    made = cluster.update(bound, user="system:serviceaccount:kube-system:persistent-volume-binder")
    cluster.update({**made, "metadata": {**made["metadata"], "labels": {"a": "b"}}}, user=SERVICE)
    cluster.delete("PersistentVolumeClaim", "data", "tenant-landon")


def test_priorities_and_storage_may_be_held_to_classes() -> None:
    with Cluster() as cluster:
        install(cluster, priorityClasses=["batch"], storageClasses=["local"])
        labels = {"ocigpu.io/tenancy": "landon"}
        cluster.create(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "tenant-landon", "labels": labels}}
        )
        furnish(cluster)
        cluster.create(pod(priorityClassName="batch"), user=SERVICE)
        cluster.create(claim(storageClassName="local"), user=SERVICE)
        with pytest.raises(Problem, match=r'one of \["batch"\]'):
            cluster.create(pod(name="q", priorityClassName="other"), user=SERVICE)
        with pytest.raises(Problem, match=r'one of \["local"\]'):
            cluster.create(claim(name="b"), user=SERVICE)


def test_images_may_be_held_to_the_registries_of_a_tenancy(cluster: Cluster) -> None:
    def allow(registries: str | None) -> None:
        metadata = {"annotations": {"ocigpu.io/registries": registries}}
        cluster.patch("Namespace", "tenant-landon", {"metadata": metadata})

    allow("nvcr.io/nvidia,registry.example:5000")
    try:
        for image in ("nvcr.io/nvidia/cuda:12", "registry.example:5000/x@sha256:0"):
            cluster.create(pod(container={"image": image}), user=SERVICE)
            cluster.delete("Pod", "p", "tenant-landon")
        side = [{"name": "i", "image": "docker.io/cuda"}]
        for spec in (
            *(
                {"container": {"image": image}}
                for image in ("docker.io/cuda", "nvcr.io/nvidia-not/x", "nvcr.io/x", "x")
            ),
            {"container": {"image": "nvcr.io/nvidia/x"}, "initContainers": side},
        ):
            with pytest.raises(Problem, match=r"one of nvcr\.io/nvidia,registry\.example:5000"):
                cluster.create(pod(**spec), user=SERVICE)
    finally:
        allow(None)
    for registries in (["UPPER"], ["a,b"], ["https://nvcr.io"] * 2, ["nvcr.io/"]):
        with pytest.raises(Problem):
            cluster.create(tenancy("wrong", registries=registries))


def policy(namespace: str) -> dict[str, Any]:
    head = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
    return {**head, "metadata": {"name": "open", "namespace": namespace}, "spec": {"podSelector": {}, "egress": [{}]}}


def test_only_the_controller_and_operators_change_what_keeps_a_tenancy_in_its_place(cluster: Cluster) -> None:
    space = cluster.get("Namespace", "tenant-landon")
    stripped = {**space, "metadata": {**space["metadata"], "labels": {}}}
    other = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "x", "labels": {"ocigpu.io/tenancy": "x"}}}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q", "namespace": "tenant-landon"}}
    head = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4", "endpoints": []}
    slice_ = {**head, "metadata": {"name": "open", "namespace": "tenant-landon"}}
    for document, do in [
        (slice_, cluster.create), (policy("tenant-landon"), cluster.create), (quota, cluster.create),
        (other, cluster.create), (stripped, cluster.update),
    ]:  # fmt: skip
        with pytest.raises(Problem, match="change the Tenancy instead"):
            do(document, user=SERVICE)
    with pytest.raises(Problem, match="change the Tenancy instead"):
        cluster.update(stripped, sub="status", user=SERVICE)  # labels can be written there, too
    assert cluster.exists("ServiceAccount", "default", "tenant-landon"), "made by the controller manager"
    cluster.create(policy("tenant-landon"), user=ACCOUNT)
    cluster.delete("NetworkPolicy", "open", "tenant-landon")
    cluster.create(policy("default"), user=SERVICE)
    cluster.delete("NetworkPolicy", "open", "default")


def test_being_deleted_makes_nobody_the_controller(cluster: Cluster) -> None:
    """The same as above, with objects that are kept by a finalizer."""
    labels = {"ocigpu.io/tenancy": "going"}
    head = {"name": "tenant-going", "labels": labels, "finalizers": ["foregroundDeletion"]}
    cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": head}, user=ACCOUNT)
    held = policy("tenant-going")
    held["metadata"]["finalizers"] = ["foregroundDeletion"]
    cluster.create(held, user=ACCOUNT)
    outside = policy("default")
    outside["metadata"]["finalizers"] = ["foregroundDeletion"]
    cluster.create(outside)
    for space in ("tenant-going", "default"):
        cluster.delete("NetworkPolicy", "open", space)
    cluster.delete("Namespace", "tenant-going")
    space = cluster.get("Namespace", "tenant-going")
    held = cluster.get("NetworkPolicy", "open", "tenant-going")
    with pytest.raises(Problem, match="change the Tenancy instead"):
        cluster.update({**held, "spec": {"podSelector": {}, "ingress": [{}]}}, user=SERVICE)
    with pytest.raises(Problem, match="change the Tenancy instead"):
        cluster.update({**space, "metadata": {**space["metadata"], "labels": {}}}, user=SERVICE)
    outside = cluster.get("NetworkPolicy", "open", "default")
    with pytest.raises(Problem, match="namespaces of tenancies only"):
        cluster.update({**outside, "spec": {"podSelector": {}}}, user=ACCOUNT)
    for space_ in ("tenant-going", "default"):
        cluster.patch("NetworkPolicy", "open", {"metadata": {"finalizers": None}}, space_)
    cluster.patch("Namespace", "tenant-going", {"metadata": {"finalizers": None}})


def test_the_controller_can_do_nothing_outside_of_namespaces_of_tenancies(cluster: Cluster) -> None:
    other = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "mine"}}
    for document in (policy("kube-system"), other, pod(namespace="default")):
        with pytest.raises(Problem, match="namespaces of tenancies only"):
            cluster.create(document, user=ACCOUNT)


def test_policies_that_are_weakened_are_not_in_force(cluster: Cluster) -> None:
    policies = cluster.objects("ValidatingAdmissionPolicy")
    bindings = cluster.objects("ValidatingAdmissionPolicyBinding")
    assert find_unenforced(policies, bindings) == ()
    assert (
        find_unenforced([], bindings)
        == find_unenforced(policies, [])
        == ("ocigpu-tenant-pods", "ocigpu-tenant-resources", "ocigpu-tenant-objects", "ocigpu-tenant-finalizers")
    )

    def weakened(documents: list[dict[str, Any]], **spec: Any) -> list[dict[str, Any]]:
        return [{**each, "spec": {**each["spec"], **spec}} for each in documents]

    narrow = {"namespaceSelector": {"matchLabels": {"ocigpu.io/tenancy": "landon"}}}
    for spec in ({"validationActions": ["Warn"]}, {"matchResources": narrow}, {"policyName": "other"}):
        assert len(find_unenforced(policies, weakened(bindings, **spec))) == 4
    assert len(find_unenforced(weakened(policies, failurePolicy="Ignore"), bindings)) == 4


# --- the chart

KEPT = {"helm.sh/resource-policy": "keep"}
"""What helm uninstall and helm upgrade leave where it is."""


def test_a_chart_that_is_removed_leaves_the_rules_of_tenancies_that_live_on() -> None:
    with Cluster() as cluster:
        install(cluster)
        labels = {"ocigpu.io/tenancy": "landon"}
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "tenant-landon", "labels": labels}}
        cluster.create(space)
        furnish(cluster)
        for document in yaml.safe_load_all(RENDERER.render({"tenants": {"enabled": True, "cilium": True}})):
            metadata = document["metadata"]
            if document["kind"] == "CustomResourceDefinition":
                continue
            kept = (metadata.get("annotations") or {}).items() >= KEPT.items()
            tenants = "ocigpu-tenant-" in metadata["name"] or document["kind"].startswith("Cilium")
            assert kept == tenants, metadata["name"]
            if tenants:  # the label by which docs/UNINSTALLING.md takes them away
                assert metadata["labels"]["app.kubernetes.io/component"] == "tenant-policies"
            else:
                with contextlib.suppress(Problem):  # the manifests of tenants have not all of it
                    cluster.delete(document["kind"], metadata["name"], metadata.get("namespace"))
        assert not cluster.exists("ValidatingAdmissionPolicy", "ocigpu-tenancy-controller"), "nobody is the controller"
        with pytest.raises(Problem, match="hostNetwork"):
            cluster.create(pod(hostNetwork=True), user=SERVICE)
        with pytest.raises(Problem, match="change the Tenancy instead"):
            cluster.create(policy("tenant-landon"), user=SERVICE)


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ({}, set()),
        ({"dra": {"enabled": True}, "migManager": {"enabled": True}, "nodeInstaller": {"enabled": True}}, set()),
        ({"leases": {"enabled": True, "check": "true"}}, {"gpuleases.ocigpu.io"}),
        ({"caas": {"enabled": True, "tlsSecret": "t"}}, {"gpuleases.ocigpu.io"}),
        ({"tenants": {"enabled": True}}, {"gpuleases.ocigpu.io", "tenancies.ocigpu.io"}),
        ({"tenants": {"enabled": True}, "enabled": False}, set()),
    ],
    ids=lambda value: str(sorted(value)) if isinstance(value, set) else str(value),
)
def test_a_release_has_the_kinds_of_its_parts_and_an_upgrade_changes_them(
    values: dict[str, Any], kinds: set[str]
) -> None:
    """helm never changes what is in crds/, and installs all of it."""
    found = [each for each in yaml.safe_load_all(RENDERER.render(values)) if each]
    definitions = [each["metadata"] for each in found if each["kind"] == "CustomResourceDefinition"]
    assert {each["name"] for each in definitions} == kinds
    assert all(each["annotations"].items() >= KEPT.items() for each in definitions), "with a kind go all its objects"
    assert not (RENDERER.CHART / "crds").exists()


def test_the_manifests_of_tenants_are_those_of_the_chart_and_valid() -> None:
    text = PLAIN.read_text()
    assert text == RENDERER.tenants({}), (
        "run: packaging/kubernetes/render.py --tenants > packaging/kubernetes/tenants.yaml"
    )
    found = [each for each in yaml.safe_load_all(text) if each]
    for each in found:
        if each["kind"] not in ("CustomResourceDefinition", "CiliumClusterwideNetworkPolicy"):
            kubernetes_validate.validate(each, "1.37", strict=True)
    assert {"Deployment", "ClusterRole", "ValidatingAdmissionPolicy", "CustomResourceDefinition"} <= {
        each["kind"] for each in found
    }
    assert "DaemonSet" not in text


def test_with_cilium_denials_hold_for_all_tenancies() -> None:
    found = list(yaml.safe_load_all(RENDERER.tenants({"tenants": {"cilium": True, "deniedCidrs": ["10.9.0.0/16"]}})))
    (denial,) = [each for each in found if each["kind"] == "CiliumClusterwideNetworkPolicy"]
    assert denial["spec"]["egressDeny"] == [
        {"toCIDR": ["10.9.0.0/16"]}, {"toEntities": ["host", "remote-node", "kube-apiserver"]},
    ]  # fmt: skip
    (controller,) = [each for each in found if each["kind"] == "Deployment"]
    assert "--deny=10.9.0.0/16" in controller["spec"]["template"]["spec"]["containers"][0]["args"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"runtimeClasses": []},
        {"gpuCounts": [1]},
        {"deniedCidrs": ["10.0.0.1"]},
        {"registries": ["a'b/"]},
        {"finalizers": ["a'b/"]},
        {"network": "calico"},
        {"replicas": 0},
        {"enable": True},
    ],
    ids=str,
)
def test_values_that_are_wrong_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RENDERER.ChartError, match=r"^values .* at '/tenants"):
        RENDERER.tenants({"tenants": wrong})
