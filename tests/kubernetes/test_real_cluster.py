"""Manifests, roles, policies and programs against a real API server: ``make cluster-test`` names its programs.

Tests of the double's files run here, too, where they need nothing that only a double can do.
"""

import contextlib
import itertools
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import test_domain_controller as domain_controller
import test_dra_chart as dra_chart
import test_lease_objects as lease_objects
import test_tenancy_objects as tenancy_objects
import yaml
from caas_lab import Lab as CaasLab
from caas_lab import ended, running
from deployment_lab import CASES, CHART, DEPLOYMENT, RENDERER, objects
from domain_lab import ACCOUNT as DOMAIN_ACCOUNT
from domain_lab import DAEMON_ACCOUNT, DRIVER_ACCOUNT, RACK, SPACE, Rack, documented
from dra_lab import DRIVER, NODE, dra_driver
from lease_lab import GPUS, Inline
from plugin_lab import plugin
from support.cluster_rules import Problem
from support.engines import start_containerd
from support.fixtures import IMAGE
from support.lines import Lines
from support.process import run, wait_for
from support.product import RUNTIME, SimulatedHost, gpu_names, listed_uuids
from support.real_cluster import KUBELET_NODE, SERVER, Etcd, RealCluster, find_programs
from support.real_kubelet import ROOT, own_directories, read_log, start_kubelet
from support.runtimes import script
from tenancy_lab import ACCOUNT, SERVICE, install, make_controller, pod, tenancy
from test_dra_examples import EXAMPLES, claim_spec
from test_dra_slices import nine_gpus
from test_dra_slices import node as a100

from ocigpu.cli.front.main import main
from ocigpu.core.errors import HostError
from ocigpu.kubernetes.cluster.api_server import apply_to_node
from ocigpu.kubernetes.cluster.documents import Documents
from ocigpu.kubernetes.cluster.owners import DOMAIN_DRIVER
from ocigpu.kubernetes.domains.controller import DomainController
from ocigpu.kubernetes.domains.driver import make_domain_devices
from ocigpu.kubernetes.domains.objects import DAEMON_CLASS, daemon_name, domain_of
from ocigpu.kubernetes.dra.claims import Allotted, ClaimRef, read_allocation
from ocigpu.kubernetes.dra.cluster import ApiCluster
from ocigpu.kubernetes.dra.devices import DeviceOptions, DraDevice, Taint, make_devices
from ocigpu.kubernetes.dra.explain import read_fit
from ocigpu.kubernetes.dra.fit import published_devices
from ocigpu.kubernetes.dra.publisher import Published, Publisher
from ocigpu.kubernetes.dra.slices import ApiFeatures
from ocigpu.kubernetes.labels.program import find_place, publish, withdraw
from ocigpu.kubernetes.leases.lease import Lease, Phase
from ocigpu.kubernetes.leases.report import LeaseReporter, lease_name
from ocigpu.kubernetes.mig.node import NodeApi
from ocigpu.kubernetes.node.config import PluginOptions
from ocigpu.system.service import ServiceLog
from ocigpu.tenants.controller import RESYNC, ControllerService, TenancyController
from ocigpu.tenants.tenancy import TenancyOptions, is_as_planned, plan_objects

pytestmark = pytest.mark.cluster(*SERVER, "KUBE_CONTROLLER_MANAGER")
needs_scheduler = pytest.mark.cluster("KUBE_SCHEDULER")
Object = dict[str, Any]
FOREIGN = ("monitoring.coreos.com", "cilium.io")
"""Groups that others' controllers bring."""
INSTALLED = (
    *("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "DeviceClass"),
    *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
)
LEASES = {"enabled": True, "check": "check", "secret": "baseline", "fabric": "vsock:42:6666"}
VALUES: dict[str, Object] = {
    **CASES,
    "claims": {"dra": {"enabled": True, "privileged": True, "shares": "4"}},
    "domains": {"computeDomains": {"enabled": True}},
    "leases": {"leases": LEASES, "devicePlugin": {"enabled": False}},
    "labels of the node": {"nodeLabels": {"target": "node"}, "nodeInstaller": {"enabled": True}},
    "the service": {"caas": {"enabled": True, "tlsSecret": "tls"}},
    "tenants": {"tenants": {"enabled": True, "registries": ["registry.example/"], "dnsCidrs": ["169.254.20.10/32"]}},
}
OF_THE_CHART = {
    "dra": {"enabled": True, "privileged": True},
    "computeDomains": {"enabled": True},
    "leases": LEASES,
    "caas": {"enabled": True, "tlsSecret": "tls"},
    "nodeLabels": {"target": "node"},
    "nodeInstaller": {"enabled": True},
    "migManager": {"enabled": True, "pods": "drain"},
}
"""What is installed in namespace "gpu"; all at once, for their accounts have nothing in common."""
FEATURES = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: nodefeatures.nfd.k8s-sigs.io}
spec:
  group: nfd.k8s-sigs.io
  scope: Namespaced
  names: {kind: NodeFeature, plural: nodefeatures, singular: nodefeature, listKind: NodeFeatureList}
  versions:
    - name: v1alpha1
      served: true
      storage: true
      schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
"""


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    made = Etcd(tmp_path_factory.mktemp("cluster") / "etcd", find_programs()["ETCD"])
    yield made
    made.program.end()


@pytest.fixture(scope="module")
def cluster(etcd: Etcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    """A cluster with the chart's accounts, roles, policies and classes, and a namespace of a tenancy."""
    with RealCluster(tmp_path_factory.mktemp("cluster") / "registry", etcd) as made:
        made.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "gpu"}})
        made.apply(yaml.safe_load(FEATURES))
        install(made)
        for each in objects(OF_THE_CHART):
            if each["kind"] in (*INSTALLED, "CustomResourceDefinition"):
                made.apply(each)
        made.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})
        made.wait_for_right(ACCOUNT, "create", "", "namespaces")
        labels = {"ocigpu.io/tenancy": "landon"}
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "tenant-landon", "labels": labels}}
        made.create(space, user=ACCOUNT)
        for name in ("tenant-landon", "default"):
            lock_account(made, name)
        tenancy_objects.furnish(made)
        in_force(made, pod(hostNetwork=True), SERVICE)
        in_force(made, pod(namespace="default"), ACCOUNT)
        in_force(made, tenancy_objects.policy("tenant-landon"), SERVICE)
        held = {"name": "held", "namespace": "tenant-landon", "finalizers": ["tests.example/hold"]}
        in_force(made, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": held}, SERVICE)
        yield made


def lock_account(cluster: RealCluster, space: str) -> None:
    """What the controller does to the account that the controller manager makes: pods get no token of it."""
    wait_for("the account", lambda: cluster.exists("ServiceAccount", "default", space))
    cluster.patch("ServiceAccount", "default", {"automountServiceAccountToken": False}, space)


def in_force(cluster: RealCluster, document: Object, user: str) -> None:
    """Wait until a policy refuses an object."""

    said: list[str] = []

    def is_refused() -> bool:
        try:
            cluster.create(document, user=user, dryRun="All")
            said.append("it is accepted")
        except Problem as problem:
            said.append(problem.message)
        return "ValidatingAdmissionPolicy" in said[-1]

    wait_for("policies to be in force", is_refused, on_failure=lambda: said[-1])


# --- manifests


def test_the_manifests_are_accepted(cluster: RealCluster) -> None:
    """As kubectl's server-side dry run checks them: every field is known, and every value is one it takes."""
    refused, seen = [], set()
    names = ("ocigpu.yaml", "tenants.yaml", "leases.yaml", "caas.yaml", "kata-runtimeclass.yaml")
    texts = [(DEPLOYMENT / name).read_text() for name in names]
    found = [each for text in texts for each in yaml.safe_load_all(text)]
    for values in VALUES.values():
        found += objects(values)
    cluster.ensure({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "ocigpu"}})
    for each in filter(None, found):
        text = json.dumps(each, sort_keys=True)
        if text in seen or each["apiVersion"].partition("/")[0] in FOREIGN:
            continue
        seen.add(text)
        try:
            cluster.apply(each, manager="checks", dryRun="All")
        except Problem as problem:
            refused.append(f"{each['kind']} {each['metadata']['name']}: {problem.message}")
    assert refused == []
    assert len(seen) > 100


def test_expressions_of_the_policies_fit_the_kinds_that_they_are_about(cluster: RealCluster) -> None:
    def is_checked(policy: Object) -> bool:
        return bool(policy.get("status", {}).get("observedGeneration") == policy["metadata"]["generation"])

    wait_for("the check of types", lambda: all(map(is_checked, cluster.objects("ValidatingAdmissionPolicy"))))
    found = {each["metadata"]["name"]: each["status"] for each in cluster.objects("ValidatingAdmissionPolicy")}
    assert len(found) >= 6
    warnings = {name: status["typeChecking"] for name, status in found.items() if status.get("typeChecking")}
    assert warnings == {}


# --- tenancies

test_what_is_no_change_of_a_service_or_claim_is_nobodys_business = (
    tenancy_objects.test_what_is_no_change_of_a_service_or_claim_is_nobodys_business
)
test_the_defaults_are_those_of_the_schema = tenancy_objects.test_the_defaults_are_those_of_the_schema
test_what_cannot_be_a_tenancy_is_refused = tenancy_objects.test_what_cannot_be_a_tenancy_is_refused
test_pods_that_tenants_may_have_are_admitted = tenancy_objects.test_pods_that_tenants_may_have_are_admitted
test_pods_that_tenants_may_not_have_are_refused = tenancy_objects.test_pods_that_tenants_may_not_have_are_refused
test_pods_cannot_become_others = tenancy_objects.test_pods_cannot_become_what_they_could_not_be_made_as
test_only_the_controller_and_operators_change_what_keeps_a_tenancy_in_its_place = (
    tenancy_objects.test_only_the_controller_and_operators_change_what_keeps_a_tenancy_in_its_place
)
test_the_controller_can_do_nothing_outside_of_namespaces_of_tenancies = (
    tenancy_objects.test_the_controller_can_do_nothing_outside_of_namespaces_of_tenancies
)
test_policies_that_are_weakened_are_not_in_force = tenancy_objects.test_policies_that_are_weakened_are_not_in_force
test_what_the_kind_refuses = lease_objects.test_what_the_kind_refuses


@pytest.mark.parametrize(("document", "words"), tenancy_objects.LEADING_OUT, ids=str)
def test_claims_and_services_that_lead_out_of_a_tenancy_are_refused(
    cluster: RealCluster, document: Object, words: str
) -> None:
    if "dataSourceRef" in document["spec"]:  # namespaces of sources are left out unless a gate of alpha is on
        made = cluster.create(document, user=SERVICE, dryRun="All")
        assert "namespace" not in (made["spec"].get("dataSourceRef") or {})
        return
    with pytest.raises(Problem, match=words):
        cluster.create(document, user=SERVICE)


@pytest.mark.parametrize(
    "spec",
    [{"externalIPs": ["10.96.0.1"]}, {"type": "NodePort"}, {"type": "LoadBalancer"}],
    ids=str,
)
def test_a_service_that_is_being_deleted_is_held_to_the_same_rules(cluster: RealCluster, spec: Object) -> None:
    """Kept by a finalizer, which a tenant may take away, and no more than that."""
    made = tenancy_objects.service()
    with pytest.raises(Problem, match="finalizers would keep"):
        cluster.create({**made, "metadata": {**made["metadata"], "finalizers": ["tests.example/hold"]}}, user=SERVICE)
    made["metadata"]["finalizers"] = ["tests.example/hold"]
    where = (cluster.create(made)["kind"], "data", "tenant-landon")
    try:
        cluster.delete(*where)
        found = cluster.get(*where)
        assert found["metadata"]["deletionTimestamp"]
        with pytest.raises(Problem, match=r"traffic that is for others|must be ClusterIP"):
            cluster.update({**found, "spec": {**found["spec"], **spec}}, user=SERVICE)
        balanced = {**found, "status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.7"}]}}}
        with pytest.raises(Problem):
            cluster.update(balanced, sub="status", user=SERVICE)
        found = cluster.get(*where)
        cluster.update({**found, "metadata": {**found["metadata"], "finalizers": []}}, user=SERVICE)
        assert not cluster.exists(*where)
    finally:
        if cluster.exists(*where):
            cluster.patch(*where[:2], {"metadata": {"finalizers": None}}, where[2])


def test_finalizers_of_others_are_refused_on_every_kind(cluster: RealCluster) -> None:
    for api, kind in (("v1", "ConfigMap"), ("v1", "Secret"), ("v1", "PersistentVolumeClaim")):
        head = {"apiVersion": api, "kind": kind, "metadata": {"name": "held", "namespace": "tenant-landon"}}
        document = tenancy_objects.claim(name="held") if kind == "PersistentVolumeClaim" else head
        cluster.create(document, user=SERVICE)
        found = cluster.get(kind, "held", "tenant-landon")
        with pytest.raises(Problem, match="finalizers would keep"):
            cluster.update({**found, "metadata": {**found["metadata"], "finalizers": ["a.b/c"]}}, user=SERVICE)
        cluster.delete(kind, "held", "tenant-landon")
        wait_for("its end", lambda kind=kind: not cluster.exists(kind, "held", "tenant-landon"))


def test_only_the_scheduler_binds_pods_of_tenancies(cluster: RealCluster) -> None:
    cluster.create(pod(name="unbound"), user=SERVICE)
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "unbound"}}
    body["target"] = {"apiVersion": "v1", "kind": "Node", "name": NODE}
    with pytest.raises(Problem, match="controller's"):
        cluster.ask("POST", "/api/v1/namespaces/tenant-landon/pods/unbound/binding", body, SERVICE)
    cluster.delete("Pod", "unbound", "tenant-landon", gracePeriodSeconds=0)


def pass_until(controller: TenancyController | DomainController, what: str, condition: Callable[[], bool]) -> None:
    def passes() -> bool:
        controller.resync()
        return condition()

    wait_for(what, passes, 120)


def phase(cluster: RealCluster, name: str) -> str:
    return str(cluster.get("Tenancy", name).get("status", {}).get("phase"))


def test_a_tenancy_is_made_used_and_deleted(
    cluster: RealCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, and by a controller that has the rights of its role."""
    monkeypatch.setenv("KUBECONFIG", str(cluster.write_kubeconfig(tmp_path / "config")))
    assert main(["tenancy", "create", "seed", "--gpus", "4", "--internet"]) == 0
    controller = make_controller(cluster, denied=("203.0.113.0/24",))
    pass_until(controller, "the tenancy", lambda: phase(cluster, "seed") == "Ready")
    found = cluster.get("Tenancy", "seed")
    planned = plan_objects(found, TenancyOptions(denied=("203.0.113.0/24",)))
    for each in planned:
        metadata = each["metadata"]
        assert is_as_planned(each, cluster.get(each["kind"], metadata["name"], metadata.get("namespace"))), each

    def versions() -> list[str]:
        named = [(each["kind"], each["metadata"]["name"], each["metadata"].get("namespace")) for each in planned]
        return [cluster.get(*each)["metadata"]["resourceVersion"] for each in [("Tenancy", "seed", None), *named]]

    before = versions()
    assert controller.resync() == RESYNC
    assert versions() == before, "what is as it should be is only looked at"
    # two GPUs of four are used, and no more than four
    cluster.create(pod(namespace="tenant-seed"), user=SERVICE)
    pass_until(controller, "their count", lambda: cluster.get("Tenancy", "seed")["status"].get("gpusUsed") == "2")
    with pytest.raises(Problem, match="exceeded quota"):
        cluster.create(pod(namespace="tenant-seed", name="q", gpus=4), user=SERVICE)
    # what others change is repaired
    cluster.patch("NetworkPolicy", "ocigpu-tenancy", {"spec": {"ingress": [{}]}}, "tenant-seed")
    cluster.delete("LimitRange", "ocigpu-tenancy", "tenant-seed")
    pass_until(controller, "repair", lambda: cluster.exists("LimitRange", "ocigpu-tenancy", "tenant-seed"))
    pass_until(controller, "the tenancy", lambda: phase(cluster, "seed") == "Ready")
    # a lease holds it up
    lease = {"apiVersion": "ocigpu.io/v1alpha1", "kind": "GPULease", "metadata": {"name": "held"}}
    cluster.create({**lease, "spec": {"nodeName": NODE, "pciAddress": GPUS[0]}})
    holder = {"namespace": "tenant-seed", "podName": "p", "tenancy": "seed"}
    leased = {"phase": "Leased", "generation": 1, "holder": holder}
    cluster.patch("GPULease", "held", {"status": leased}, sub="status")
    assert main(["tenancy", "delete", "seed"]) == 0
    pass_until(controller, "the end of its pods", lambda: not cluster.exists("Pod", "p", "tenant-seed"))
    assert phase(cluster, "seed") == "Terminating"
    cluster.patch("GPULease", "held", {"status": {"phase": "Free", "generation": 1}}, sub="status")
    pass_until(controller, "its end", lambda: not cluster.exists("Tenancy", "seed"))
    assert not cluster.exists("Namespace", "tenant-seed")
    cluster.delete("GPULease", "held")
    capsys.readouterr()


def test_the_controller_leads_watches_and_lets_others_lead(
    cluster: RealCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    service = ControllerService(
        TenancyOptions(), ServiceLog(as_json=False), namespace="ocigpu", open_client=lambda: cluster.client(ACCOUNT)
    )

    def act() -> None:
        try:
            cluster.create(tenancy("watched"))
            wait_for("the tenancy", lambda: phase(cluster, "watched") == "Ready", 120)
            cluster.delete("Tenancy", "watched")
            wait_for("its end", lambda: not cluster.exists("Tenancy", "watched"), 120)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=act)
    thread.start()
    service.run()
    thread.join(60)
    assert cluster.get("Lease", "ocigpu-tenancies", "ocigpu")["spec"].get("holderIdentity", "") == ""
    log = capsys.readouterr().out
    assert "tenancy watched: Ready" in log
    assert "403" not in log


# --- the service


def test_a_container_becomes_a_pod_and_goes(cluster: RealCluster, tmp_path: Path) -> None:
    account = "system:serviceaccount:gpu:ocigpu-caas"
    cluster.wait_for_right(account, "create", "", "pods", "tenant-caas")
    lab = CaasLab(cluster, tmp_path, user=account)
    lab.start()
    try:
        controller = make_controller(cluster)
        cluster.create(tenancy("caas"))
        pass_until(controller, "the tenancy", lambda: phase(cluster, "caas") == "Ready")
        key = lab.key("caas")
        made = lab.run(key, tenancy="caas", gpus=2, secrets={"TOKEN": "hidden-value"}, command=["sh"])
        name = made.replace("_", "-")
        spec = lab.pod(made, "caas")["spec"]
        assert spec["overhead"], "the runtime class was found"
        assert [each["name"] for each in spec["containers"][0]["env"]] == ["TOKEN"]
        lab.set_status(made, "caas", **running())
        lab.wait(key, made, "running")
        lab.set_status(made, "caas", **ended())
        assert lab.wait(key, made, "finished")["reason"] == "completed"
        assert lab.ask("DELETE", f"/v1/containers/{made}", key).status == 202
        wait_for("its end", lambda: lab.ask("GET", f"/v1/containers/{made}", key).status == 404)
        assert not cluster.exists("Pod", name, "tenant-caas")
        assert not cluster.exists("Secret", name, "tenant-caas")
        cluster.delete("Tenancy", "caas")
        pass_until(controller, "its end", lambda: not cluster.exists("Tenancy", "caas"))
    finally:
        lab.stop()


# --- programs of nodes


def test_labels_of_a_node(cluster: RealCluster, tmp_path: Path) -> None:
    cluster.patch("Node", NODE, {"metadata": {"labels": {"zone": "a"}}})
    for name in ("node-labels", "node-installer"):
        server = cluster.account(f"system:serviceaccount:gpu:ocigpu-{name}", tmp_path / name, NODE)
        cluster.wait_for_right(f"system:serviceaccount:gpu:ocigpu-{name}", "patch", "", "nodes")
        if name == "node-installer":
            apply_to_node(
                server, NODE, {"labels": {"ocigpu/runtime": "ready"}, "annotations": {"ocigpu/runtime": "y"}}, "i"
            )
            apply_to_node(server, NODE, {"labels": {}}, "i")
            continue
        place = find_place(PluginOptions(), "node", {"NODE_NAME": NODE}, server)
        publish(place, {"nvidia.com/gpu.count": "2", "nvidia.com/gpu.product": "A100"})
        publish(place, {"nvidia.com/gpu.count": "8"})
        assert "nvidia.com/gpu.product" not in cluster.get("Node", NODE)["metadata"]["labels"]
        withdraw(place)
    labels = cluster.get("Node", NODE)["metadata"]["labels"]
    assert {name: value for name, value in labels.items() if "kubernetes.io" not in name} == {"zone": "a"}


def test_a_node_feature(cluster: RealCluster, tmp_path: Path) -> None:
    """With the default values of the chart, in the namespace of another release."""
    cluster.ensure({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "labels"}})
    for each in objects({}, "labels"):
        if each["kind"] in INSTALLED:
            cluster.apply(each)
    account = "system:serviceaccount:labels:ocigpu-node-labels"
    cluster.wait_for_right(account, "patch", "nfd.k8s-sigs.io", "nodefeatures", "labels")
    server = cluster.account(account, tmp_path / "account", NODE)
    environment = {"NODE_NAME": NODE, "POD_NAME": f"ocigpu-node-labels-{NODE}"}
    place = find_place(PluginOptions(), "", environment, server)
    assert place.target == "node-feature"
    publish(place, {"a": "1", "b": "2"})
    publish(place, {"a": "2"})
    found = cluster.get("NodeFeature", f"nvidia-features-for-{NODE}", "labels")
    assert found["spec"]["labels"] == {"a": "2"}


def test_the_mig_manager_reads_and_writes_its_node(cluster: RealCluster) -> None:
    account = "system:serviceaccount:gpu:ocigpu-mig-manager"
    cluster.wait_for_right(account, "create", "", "pods/eviction")
    node = NodeApi(cluster.client(account, node=NODE), NODE)
    asks = {"name": "main", "image": "x", "resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}}}
    head = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "gpus", "namespace": "default"}}
    cluster.create({**head, "spec": {"nodeName": NODE, "terminationGracePeriodSeconds": 0, "containers": [asks]}})
    client = "nvidia.com/gpu.deploy.client"
    node.patch({"nvidia.com/mig.config.state": "pending", client: "1"}, {"ocigpu/mig.paused": "{}"})
    node.patch({"nvidia.com/mig.config.state": "success", client: None}, {"ocigpu/mig.paused": None})
    read = node.read()
    assert read.labels["nvidia.com/mig.config.state"] == "success"
    assert client not in read.labels
    assert "ocigpu/mig.paused" not in read.annotations
    (found,) = [each for each in node.pods() if each.name == "gpus"]
    elsewhere = NodeApi(cluster.client(account, node="other"), NODE)

    def is_refused() -> bool:
        try:
            elsewhere.patch({}, {})
        except HostError:
            return True
        return False

    wait_for("the policy to be in force", is_refused)
    assert found.gpus
    assert not found.daemon
    for on, words in (("other", "own node only"), (None, "does not say on which node")):
        theirs = NodeApi(cluster.client(account, node=on), NODE)
        for act in (lambda theirs=theirs: theirs.patch({client: "1"}, {}), lambda theirs=theirs: theirs.evict(found)):
            with pytest.raises(HostError, match=words):
                act()
    assert node.evict(found)
    wait_for("the eviction", lambda: not cluster.exists("Pod", "gpus", "default"))
    assert node.evict(found), "one that is gone is no error"
    woken, over = threading.Event(), threading.Event()
    follower = threading.Thread(
        target=node.follow, args=(woken.set, lambda _: over.is_set(), ["nvidia.com/mig.config"]), daemon=True
    )
    follower.start()
    number = iter(range(1000))

    def is_woken() -> bool:
        cluster.patch("Node", NODE, {"metadata": {"labels": {"nvidia.com/mig.config": f"c{next(number)}"}}})
        return woken.wait(0.2)

    wait_for("the label to be seen", is_woken)
    over.set()
    cluster.patch("Node", NODE, {"metadata": {"labels": {"nvidia.com/mig.config": None}}})


def test_leases_are_told_by_the_agent_of_their_node_alone(cluster: RealCluster) -> None:
    account = "system:serviceaccount:gpu:ocigpu-lease-agent"
    cluster.wait_for_right(account, "patch", "ocigpu.io", "gpuleases/status")
    log: list[str] = []

    def reporter(on: str | None) -> LeaseReporter:
        its = Lines()
        its.lines = log
        return LeaseReporter(Documents(cluster.client(account, node=on)), NODE, Inline(), its)

    name = lease_name(NODE, GPUS[0])
    theirs = {"apiVersion": "ocigpu.io/v1alpha1", "kind": "GPULease", "metadata": {"name": "x"}}
    in_force(cluster, {**theirs, "spec": {"nodeName": "n", "pciAddress": GPUS[0]}}, account)
    for on in ("other", None):
        told = reporter(on)
        told.step({GPUS[0]: Lease(GPUS[0], Phase.FREE, 1)}, 0.0)
        told.step({}, 0.0)
        assert not cluster.exists("GPULease", name)
    assert len(log) == 2
    assert all("of its own node alone" in line for line in log), log
    log.clear()
    told = reporter(NODE)
    told.step({GPUS[0]: Lease(GPUS[0], Phase.FREE, 1)}, 0.0)
    told.step({GPUS[0]: Lease(GPUS[0], Phase.RESERVED, 2)}, 1.0)
    told.step({}, 2.0)
    assert log == []
    assert cluster.get("GPULease", name)["status"]["phase"] == "Reserved"
    with pytest.raises(HostError, match="cannot get resource"):
        Documents(cluster.client(account)).get("GPULease", name)
    cluster.delete("GPULease", name)


# --- dynamic resource allocation

test_the_drivers_rights_suffice_and_end_at_its_own_node = (
    dra_chart.test_the_drivers_rights_suffice_and_end_at_its_own_node
)
test_wrong_configurations_are_refused_when_a_claim_is_made = (
    dra_chart.test_wrong_configurations_are_refused_when_a_claim_is_made
)


@pytest.fixture
def node(cluster: RealCluster) -> Iterator[RealCluster]:
    """A node that pods may be bound to and that offers nothing; afterwards its pods and claims are gone."""
    make_ready(cluster, NODE)
    cluster.ensure({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})
    lock_account(cluster, "team")
    clear(cluster)
    yield cluster
    clear(cluster)


def make_ready(cluster: RealCluster, name: str) -> None:
    """Let the scheduler bind pods to a node that has no kubelet."""
    cluster.patch("Node", name, {"spec": {"taints": None}})
    amounts = {"cpu": "64", "memory": "512Gi", "pods": "110"}
    ready = {"type": "Ready", "status": "True", "reason": "Tests", "message": ""}
    status = {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}
    cluster.patch("Node", name, {"status": status}, sub="status")


def clear(cluster: RealCluster) -> None:
    for each in cluster.objects("Pod"):
        if each["metadata"]["namespace"] == "team":
            cluster.delete("Pod", each["metadata"]["name"], "team", gracePeriodSeconds=0)
    for kind in ("ResourceClaim", "ResourceClaimTemplate"):
        for each in cluster.objects(kind):
            metadata = each["metadata"]
            if not metadata.get("ownerReferences"):
                cluster.delete(kind, metadata["name"], metadata["namespace"])
    wait_for("claims to go", lambda: not cluster.objects("ResourceClaim"), 120)
    for each in cluster.objects("ResourceSlice"):
        cluster.delete("ResourceSlice", each["metadata"]["name"])


def publish_devices(cluster: RealCluster, devices: Sequence[DraDevice]) -> Published:
    """Publish them as the driver on the node does, with its rights."""
    return publish_as(cluster, "system:serviceaccount:gpu:ocigpu-dra-driver", DRIVER, devices)


def publish_as(
    cluster: RealCluster, account: str, driver: str, devices: Sequence[DraDevice], on: str | None = NODE
) -> Published:
    client = cluster.client(account, node=on)
    return Publisher(ApiCluster(client), driver, NODE, lambda *_, **__: None).publish(devices)


def make_pod(cluster: RealCluster, name: str, **spec: Any) -> None:
    metadata = {"name": name, "namespace": "team"}
    cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})


def scheduled(cluster: RealCluster, name: str) -> Object:
    """Wait until the scheduler has bound a pod, and return it."""

    def why() -> str:
        return json.dumps(cluster.get("Pod", name, "team").get("status"), indent=1)

    wait_for(f"pod {name}", lambda: cluster.get("Pod", name, "team")["spec"].get("nodeName") == NODE, 60, why)
    return cluster.get("Pod", name, "team")


def allotted(cluster: RealCluster, claim: str, devices: Sequence[DraDevice]) -> tuple[Allotted, ...]:
    """Return what the driver reads from a claim that the scheduler has allocated."""
    found = cluster.get("ResourceClaim", claim, "team")
    return read_allocation(ClaimRef("team", found["metadata"]["uid"], claim), found, DRIVER, NODE, devices)


def claim_of(document: Object) -> str:
    """Return the name of the claim that was made for a pod from a template."""
    (found,) = document["status"]["resourceClaimStatuses"]
    return str(found["resourceClaimName"])


@needs_scheduler
@pytest.mark.parametrize("name", [name for name, each in EXAMPLES.items() if each.get("host", "gpu") in ("gpu", "mps")])
def test_pods_of_the_examples_are_given_our_devices(node: RealCluster, name: str) -> None:
    """By the scheduler: from the published example to the devices and settings that the driver is to prepare."""
    example, devices = EXAMPLES[name], make_devices(a100())
    publish_devices(node, devices)
    head = {"apiVersion": "resource.k8s.io/v1"}
    for source, short in example.get("templates", {}).items():
        metadata = {"name": source, "namespace": "team"}
        spec = {"spec": claim_spec(short)}
        node.create({**head, "kind": "ResourceClaimTemplate", "metadata": metadata, "spec": spec})
    for source, short in example.get("claims", {}).items():
        metadata = {"name": source, "namespace": "team"}
        node.create({**head, "kind": "ResourceClaim", "metadata": metadata, "spec": claim_spec(short)})
    seen: dict[str, list[str]] = {}
    for each, words in example["pods"].items():
        claims = [
            {"name": own, f"resourceClaim{'' if source in example.get('claims', {}) else 'Template'}Name": source}
            for own, source in words["claims"].items()
        ]
        containers = [
            {
                "name": container,
                "image": "x",
                "resources": {"claims": [dict(zip(("name", "request"), one, strict=False)) for one in used]},
            }
            for container, used in words["containers"].items()
        ]
        make_pod(node, each, resourceClaims=claims, containers=containers)
        found = scheduled(node, each)
        named = {own: source for own, source in words["claims"].items() if source in example.get("claims", {})}
        named |= {one["name"]: one["resourceClaimName"] for one in found["status"].get("resourceClaimStatuses", ())}
        for container, used in words["containers"].items():
            for own, *request in used:
                chosen = allotted(node, named[own], devices)
                assert all(one.device.kind == "gpu" for one in chosen)
                seen[f"{each}/{container}"] = [one.device.name for one in chosen if request in ([], [one.request])]
    letters: dict[str, str] = {}
    for container, expected in example["sees"].items():
        for device, letter in zip(sorted(seen[container]), expected, strict=True):
            assert letters.setdefault(letter, device) == device
    assert len(set(letters.values())) == len(letters), "different letters are different devices"


@needs_scheduler
def test_pods_that_ask_as_ever_are_given_a_claim(node: RealCluster) -> None:
    """``nvidia.com/gpu`` in limits, by the class's extendedResourceName."""
    devices = make_devices(a100())
    publish_devices(node, devices)
    limits = {"limits": {"nvidia.com/gpu": "2"}}
    make_pod(node, "old", containers=[{"name": "main", "image": "x", "resources": limits}])
    status = scheduled(node, "old")["status"]["extendedResourceClaimStatus"]
    (mapping,) = status["requestMappings"]
    assert (mapping["containerName"], mapping["resourceName"]) == ("main", "nvidia.com/gpu")
    chosen = allotted(node, status["resourceClaimName"], devices)
    assert [one.device.name for one in chosen] == ["gpu-0", "gpu-1"]
    assert {one.request for one in chosen} == {mapping["requestName"]}


@needs_scheduler
def test_explain_says_what_the_scheduler_does(node: RealCluster) -> None:
    devices = make_devices(a100())
    publish_devices(node, (devices[0]._replace(taints=(Taint(f"{DRIVER}/xid", "79"),)), *devices[1:3]))
    server = ApiCluster(node.client())
    for name, count, fits in (("two", 2, True), ("three", 3, False)):
        exactly = {"deviceClassName": "gpu.nvidia.com", "allocationMode": "ExactCount", "count": count}
        spec = {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
        head = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim"}
        node.create({**head, "metadata": {"name": name, "namespace": "team"}, "spec": spec})
        fit = read_fit(server, "team", name)
        assert fit.is_well is fits
        claims = [{"name": "gpu", "resourceClaimName": name}]
        container = {"name": "main", "image": "x", "resources": {"claims": [{"name": "gpu"}]}}
        make_pod(node, name, resourceClaims=claims, containers=[container])
        if fits:
            scheduled(node, name)
            chosen = [one.device.name for one in allotted(node, name, devices)]
            (here,) = fit.nodes
            assert [one.name for one in here.fits[0].chosen] == chosen
            assert len(read_fit(server, "team", name).allocated) == 2
        else:
            wait_for("the scheduler's word", lambda: NO_FIT in json.dumps(node.get("Pod", "three", "team")["status"]))


@needs_scheduler
def test_the_schedulers_configuration_packs(etcd: Etcd, tmp_path: Path) -> None:
    """Pods with GPUs share a node, although both have room, until one wants all GPUs of a node."""
    with RealCluster(tmp_path / "packing", etcd, scheduling=DEPLOYMENT / "scheduler.yaml") as cluster:
        for name in ("one", "two"):
            cluster.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
            make_ready(cluster, name)
            gpus = {"nvidia.com/gpu": "8"}
            cluster.patch("Node", name, {"status": {"capacity": gpus, "allocatable": gpus}}, sub="status")
        cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})
        lock_account(cluster, "team")
        chosen: list[str] = []
        for number, gpus_of_pod in enumerate((1, 2, 1, 4, 8)):
            limits = {"limits": {"nvidia.com/gpu": str(gpus_of_pod)}}
            make_pod(cluster, f"p{number}", containers=[{"name": "main", "image": "x", "resources": limits}])

            def node_of(name: str = f"p{number}") -> str:
                return str(cluster.get("Pod", name, "team")["spec"].get("nodeName", ""))

            wait_for("a node", lambda of=node_of: bool(of()), 60)
            chosen.append(node_of())
        assert len(set(chosen[:4])) == 1
        assert chosen[4] != chosen[0]


def test_what_is_published_is_what_the_server_keeps(node: RealCluster) -> None:
    """Attributes, counters, taints and shares: all gates are on."""
    sick = make_devices(a100(), DeviceOptions(shares="4"))
    sick = (sick[0]._replace(taints=(Taint(f"{DRIVER}/xid", "79"),)), *sick[1:])
    for devices in (sick, make_devices(a100(), DeviceOptions(shares="memory")), nine_gpus()):
        done = publish_devices(node, devices)
        assert done.made >= 1
        assert done.features == ApiFeatures()
        assert publish_devices(node, devices)[:3] == (0, 0, ApiFeatures()), "nothing is written for nothing"
        found, notes = published_devices([each["spec"] for each in node.objects("ResourceSlice")])
        assert ({each.name for each in found}, notes) == ({each.name for each in devices}, ())


def test_what_a_server_leaves_out_is_noticed(etcd: Etcd, tmp_path: Path) -> None:
    """With the gates of shared counters, taints and shares switched off."""
    gates = dict.fromkeys(("DRAPartitionableDevices", "DRADeviceTaints", "DRAConsumableCapacity"), False)
    with RealCluster(tmp_path / "gates", etcd, gates, programs=SERVER) as cluster:
        cluster.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})
        publisher = Publisher(ApiCluster(cluster.client()), DRIVER, NODE, lambda *_, **__: None)
        shared = make_devices(a100(), DeviceOptions(shares="4"))
        sick = shared[0]._replace(taints=(Taint(f"{DRIVER}/xid", "79"),))
        done = publisher.publish((sick, *shared[1:], *nine_gpus()))
        assert done.features == ApiFeatures(taints=False, counters=False, sharing=False)
        found, notes = published_devices([each["spec"] for each in cluster.objects("ResourceSlice")])
        assert ([each.name for each in found], notes) == ([each.name for each in shared[1:]], ())


# --- ComputeDomains

test_the_domain_controller_changes_one_label_of_nodes = (
    domain_controller.test_rights_of_controller_and_daemons_are_those_that_they_need
)
test_only_daemons_may_request_a_daemons_device = domain_controller.test_only_daemons_may_request_a_daemons_device
test_a_manifest_that_nvidias_driver_takes_is_taken = (
    domain_controller.test_a_manifest_that_nvidias_driver_takes_is_taken
)


@pytest.fixture
def rack(node: RealCluster) -> Iterator[Rack]:
    """The controller of domains, with the policies about them in force."""
    made = Rack(node, domain_controller.NODES[0])
    in_force(node, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}}, DOMAIN_ACCOUNT)
    devices = {"requests": [{"name": "x", "exactly": {"deviceClassName": DAEMON_CLASS}}]}
    claim = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "spec": {"devices": devices}}
    in_force(node, {**claim, "metadata": {"name": "x", "namespace": "team"}}, SERVICE)
    yield made
    node.delete("Node", domain_controller.NODES[0])
    for each in node.objects("ComputeDomain"):
        node.delete("ComputeDomain", each["metadata"]["name"], "team")


def test_a_nodes_domain_driver_writes_its_own_slices_alone(rack: Rack) -> None:
    devices = make_domain_devices(RACK)
    rack.cluster.wait_for_right(DRIVER_ACCOUNT, "create", "resource.k8s.io", "resourceslices")
    (theirs,) = rack.cluster.objects("ResourceSlice")
    in_force(rack.cluster, {**theirs, "metadata": {"name": "x"}}, DRIVER_ACCOUNT)
    for on, words in (("other", "of its own node only"), (None, "does not say on which node")):
        with pytest.raises(HostError, match=words):
            publish_as(rack.cluster, DRIVER_ACCOUNT, DOMAIN_DRIVER, devices, on)
    with pytest.raises(HostError, match="of its own node only"):
        ApiCluster(rack.cluster.client(DRIVER_ACCOUNT, node=NODE)).delete_slice(theirs["metadata"]["name"])
    assert publish_as(rack.cluster, DRIVER_ACCOUNT, DOMAIN_DRIVER, devices).made == 1


@needs_scheduler
def test_a_compute_domain_runs_its_daemon_where_its_pod_is_and_leaves_nothing(
    rack: Rack, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page's manifest, by scheduler and controllers of Kubernetes; the kubelet's part is the test's."""
    cluster, controller, devices = rack.cluster, rack.controller, make_domain_devices(RACK)
    publish_devices(cluster, make_devices(a100()))
    publish_as(cluster, DRIVER_ACCOUNT, DOMAIN_DRIVER, devices)
    for document in documented():
        document["metadata"]["namespace"] = "team"
        cluster.create(document)
    uid = rack.domain()["metadata"]["uid"]
    pass_until(controller, "the label", lambda: rack.labels() == {NODE: uid})

    def daemons() -> list[Object]:
        pods = [each for each in cluster.objects("Pod") if domain_of(each) == uid]
        return [each for each in pods if each["spec"].get("nodeName")]

    pass_until(controller, "the daemon's pod", lambda: bool(daemons()))
    (daemon,) = daemons()
    status = {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    cluster.patch("Pod", daemon["metadata"]["name"], {"status": status}, SPACE, sub="status")
    entry = {"ipAddress": "10.0.0.1", "cliqueID": RACK, "index": 0, "status": "Ready"}
    ready = {"status": "Ready", "nodes": [{"name": NODE, **entry}]}
    pass_until(controller, "the domain", lambda: rack.domain().get("status") == ready)
    assert not controller.resync(), "what is as it should be is only looked at"

    # what the node's driver and the daemon read
    server = ApiCluster(cluster.client(DRIVER_ACCOUNT, node=NODE))
    assert [each["metadata"]["uid"] for each in server.list_domains("team")] == [uid]
    for each, space, device in (
        (cluster.get("Pod", "worker-0", "team"), "team", "channel-0"),
        (daemon, SPACE, "daemon-0"),
    ):
        found = server.get_claim(space, claim_of(each))
        assert found is not None
        reference = ClaimRef(space, found["metadata"]["uid"], found["metadata"]["name"])
        (one,) = read_allocation(reference, found, DOMAIN_DRIVER, NODE, devices)
        assert (one.device.name, one.config.domain) == (device, uid)
    documents = Documents(cluster.client(DAEMON_ACCOUNT))
    ((clique,), _) = documents.list("ComputeDomainClique", SPACE)
    assert clique["daemons"] == [{"nodeName": NODE, **entry}]
    for act in (lambda: documents.update(clique), lambda: documents.list("ComputeDomain"),
                lambda: documents.patch({"kind": "Node", "metadata": {"name": NODE}}, {})):  # fmt: skip
        with pytest.raises(HostError, match="403"):
            act()

    # its end: the daemon stays for as long as the pod that is deleted at the same time
    cluster.delete("ComputeDomain", "job", "team")
    pass_until(controller, "no new pods", lambda: not cluster.exists("ResourceClaimTemplate", "job-channel", "team"))
    assert cluster.exists("DaemonSet", daemon_name(uid), SPACE)
    cluster.delete("Pod", "worker-0", "team", gracePeriodSeconds=0)
    pass_until(controller, "its end", lambda: not cluster.exists("ComputeDomain", "job", "team"))

    def left() -> list[str]:
        """Return what is there; pods that are to end do so, as a kubelet would see to."""
        for each in daemons():
            if "deletionTimestamp" in each["metadata"]:
                cluster.delete("Pod", each["metadata"]["name"], SPACE, gracePeriodSeconds=0)
        kinds = ("DaemonSet", "ControllerRevision", "Pod", "NetworkPolicy", "ResourceClaimTemplate", "ResourceClaim")
        found = [each for kind in (*kinds, "ComputeDomainClique", "Node") for each in cluster.objects(kind)]
        return [f"{each['kind']} {each['metadata']['name']}" for each in found if uid in json.dumps(each["metadata"])]

    wait_for("all to go", lambda: not left(), 120, lambda: str(left()))
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("error", "warning"))]
    assert said == []


# --- a kubelet


class RealNode(NamedTuple):
    """A node with a real kubelet and containerd."""

    cluster: RealCluster
    directory: Path
    settings: Path

    def run(self, name: str, stays: bool = False, **spec: Any) -> str:
        """Run a pod that looks around, to its end, or until it ``stays``, and return what it printed."""
        command = [*LOOK[:-1], f"{LOOK[-1]}; exec sleep 1000"] if stays else LOOK
        container = {"name": "main", "image": IMAGE, "imagePullPolicy": "Never", "command": command}
        container |= spec.pop("container", {})
        common = {"hostNetwork": True, "restartPolicy": "Never", "nodeSelector": HERE}
        make_pod(self.cluster, name, containers=[container], terminationGracePeriodSeconds=1, **common, **spec)

        def why() -> str:
            return json.dumps(self.cluster.get("Pod", name, "team").get("status"), indent=1)

        def has_looked() -> bool:
            phase = self.cluster.get("Pod", name, "team")["status"]["phase"]
            looks = read_log(self.directory, "team", name).count(LOOKED)
            return phase in ("Succeeded", "Failed") or (stays and looks == len(LOOKS))

        wait_for(f"pod {name}", has_looked, 120, why)
        return read_log(self.directory, "team", name)

    def remove(self, name: str) -> None:
        """Delete a pod as users do: its node has to agree."""
        self.cluster.delete("Pod", name, "team")
        wait_for(f"the end of pod {name}", lambda: not self.cluster.exists("Pod", name, "team"), 120)


HERE = {"kubernetes.io/hostname": KUBELET_NODE}
NO_FIT = "cannot allocate all claims"
LOOKS = (["nvidia-smi", "-L"], ["ls", "/dev"])
LOOK, LOOKED = script(*LOOKS), "@@"
NUMBERS = itertools.count()


@pytest.fixture
def real_node(
    node: RealCluster, session_directory: Path, image: Path, simulated_host: SimulatedHost
) -> Iterator[RealNode]:
    runtime_class = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "ocigpu"}}
    node.apply({**runtime_class, "handler": "ocigpu"})
    number = next(NUMBERS)  # each has directories of its own
    directory, runtimes = session_directory / f"real-kubelet{number}", {"ocigpu": str(RUNTIME)}
    env = {"OCIGPU_CONFIG": str(simulated_host.settings)}
    program = find_programs().get("CONTAINERD", "containerd")
    place = session_directory / f"real-containerd{number}"
    with (
        own_directories(),
        start_containerd(place, image, runtimes, env, sandbox_image=IMAGE, program=program) as engine,
        start_kubelet(node, engine.socket, directory, KUBELET_NODE),
    ):
        made = RealNode(node, directory, simulated_host.settings)
        yield made
        for each in node.objects("Pod"):
            if each["metadata"]["namespace"] == "team":
                made.remove(each["metadata"]["name"])
    node.delete("Node", KUBELET_NODE)  # with what a plugin of the last test has offered


def assert_has_one_gpu(listing: str, host: SimulatedHost) -> None:
    (uuid,) = listed_uuids(listing)
    nodes = [name for name in gpu_names(listing) if name.removeprefix("nvidia").isdigit()]
    assert nodes == [f"nvidia{host.gpus.index(uuid)}"]


@pytest.mark.root
@pytest.mark.cluster("KUBE_SCHEDULER", "KUBELET")
def test_pods_of_a_real_kubelet_have_their_gpus(real_node: RealNode, simulated_host: SimulatedHost) -> None:
    """One by the device plugin, whose GPU is the only one that its container sees."""
    with plugin(real_node.settings, ROOT / "device-plugins"):

        def offered() -> str:
            return str(real_node.cluster.get("Node", KUBELET_NODE)["status"]["allocatable"].get("nvidia.com/gpu"))

        wait_for("GPUs of the node", lambda: offered() == "8")
        one = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
        listing = real_node.run("plain", runtimeClassName="ocigpu", container=one)
        assert_has_one_gpu(listing, simulated_host)
        assert not listed_uuids(real_node.run("without", runtimeClassName="ocigpu"))
        for name in ("plain", "without"):
            real_node.remove(name)


@pytest.mark.root
@pytest.mark.cluster("KUBE_SCHEDULER", "KUBELET", "CONTAINERD")
def test_claims_of_a_real_kubelet_are_prepared_and_given_back(
    real_node: RealNode, simulated_host: SimulatedHost, tmp_path: Path
) -> None:
    """One pod with a claim, and one that asks as ever; the engine must be containerd 1.7 or later."""
    config = real_node.cluster.write_kubeconfig(tmp_path / "kubeconfig")
    words = (f"--node-name={KUBELET_NODE}", "--cdi-root=/run/cdi")
    with dra_driver(real_node.settings, ROOT, *words, KUBECONFIG=str(config)) as driver:
        driver.wait_for_log("published 8 devices")
        spec = claim_spec({"requests": {"gpu": "gpu.nvidia.com"}})
        head = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate"}
        real_node.cluster.create({**head, "metadata": {"name": "one", "namespace": "team"}, "spec": {"spec": spec}})
        claims = {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one"}]}
        asks = {"claim": {"claims": [{"name": "gpu"}]}, "plain": {"limits": {"nvidia.com/gpu": "1"}}}
        for name, resources in asks.items():
            more = claims if name == "claim" else {}
            # the kubelet gives a claim back when its pod has ended
            listing = real_node.run(name, stays=True, container={"resources": resources}, **more)
            assert_has_one_gpu(listing, simulated_host)
            kinds = sorted(path.stem.rpartition("_")[2] for path in Path("/run/cdi").iterdir())
            assert kinds == ["metadata", "nvidia"]
            real_node.remove(name)
            assert not list(Path("/run/cdi").iterdir())


# --- Helm


def seen(cluster: RealCluster) -> set[tuple[str, str]]:
    """Return all objects that are not of the moment, by kind and name."""
    kinds = {*INSTALLED, "DaemonSet", "Deployment", "Service", "ConfigMap", "RuntimeClass", "NetworkPolicy"}
    kinds |= {"Secret", "PersistentVolumeClaim", "PodDisruptionBudget", "Pod", "ControllerRevision", "ReplicaSet"}
    found = {(kind, f"{each['metadata'].get('namespace', '')}/{each['metadata']['name']}")
             for kind in sorted(kinds) for each in cluster.objects(kind)}  # fmt: skip
    return {(kind, name) for kind, name in found if not name.startswith("kube-")}


@needs_scheduler
def test_the_chart_is_installed_upgraded_and_removed_by_helm(etcd: Etcd, tmp_path: Path) -> None:
    """With its defaults first; the nodes that its pods are for have no kubelet."""
    with RealCluster(tmp_path / "helm", etcd) as cluster:
        config = cluster.write_kubeconfig(tmp_path / "kubeconfig")
        for name, labels in (("gpus", {"nvidia.com/gpu.present": "true"}), ("none", {})):
            cluster.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})
            make_ready(cluster, name)
        cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "ocigpu"}})
        wait_for("the account", lambda: cluster.exists("ServiceAccount", "default", "ocigpu"))
        wait_for("the authority", lambda: cluster.exists("ConfigMap", "kube-root-ca.crt", "ocigpu"))
        before = seen(cluster)

        def helm(*words: str) -> str:
            home = {"HOME": str(tmp_path), "KUBECONFIG": str(config), "PATH": os.environ["PATH"]}
            return run([RENDERER.find_helm(), "--namespace", "ocigpu", *words], env=home, timeout=120).stdout

        def pods() -> dict[str, str | None]:
            """Return programs and their nodes; pods that are to end do so, as a kubelet would see to."""
            found = {}
            for each in cluster.objects("Pod"):
                metadata = each["metadata"]
                if "deletionTimestamp" in metadata:
                    with contextlib.suppress(Problem):
                        cluster.delete("Pod", metadata["name"], "ocigpu", gracePeriodSeconds=0)
                else:
                    owner = metadata["ownerReferences"][0]["name"]
                    found[owner.removeprefix("ocigpu-")] = each["spec"].get("nodeName")
            return found

        usual = dict.fromkeys(("device-plugin", "exporter", "node-labels"), "gpus")
        helm("install", "ocigpu", str(CHART))
        wait_for("pods on the node with GPUs", lambda: pods() == usual, on_failure=lambda: str(pods()))
        assert "STATUS: deployed" in helm("status", "ocigpu")
        installed = seen(cluster)

        more = tmp_path / "more.json"
        # without nodeInstaller, whose nodes have a label that only it writes
        values = {name: each for name, each in OF_THE_CHART.items() if name != "nodeInstaller"}
        more.write_text(json.dumps({**values, "tenants": {"enabled": True}}))
        helm("upgrade", "ocigpu", str(CHART), "--values", str(more))
        programs = {("DaemonSet", f"ocigpu/ocigpu-{name}") for name in ("lease-agent", "compute-domain-driver")}
        assert {("DeviceClass", "/gpu.nvidia.com"), *programs} <= seen(cluster)
        assert not cluster.exists("DaemonSet", "ocigpu-device-plugin", "ocigpu"), "the DRA driver replaces it"
        helm("rollback", "ocigpu", "1")

        def settled(found: set[tuple[str, str]]) -> set[tuple[str, str]]:
            """Without Helm's own notes, and what controllers make anew."""
            passing = ("Pod", "ControllerRevision", "ReplicaSet")
            return {(kind, name) for kind, name in found if "helm.release" not in name and kind not in passing}

        wait_for("the former pods", lambda: pods() == usual, on_failure=lambda: str(pods()))
        kept = settled(seen(cluster)) - settled(installed)
        assert {name for _, name in kept if not name.startswith("/ocigpu-tenant-")} == {"ocigpu/ocigpu-caas"}, (
            "tenants' requests, and what confines tenancies that may be there, stay (docs/UNINSTALLING.md)"
        )
        helm("uninstall", "ocigpu")

        def is_gone() -> bool:
            pods()
            return seen(cluster) - before <= kept

        wait_for("all to go", is_gone, 120, lambda: str(seen(cluster) - before))
