"""The chart's part for the service: what it may, by whom it is reached, and how it runs."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from caas_lab import Lab, ended, running
from deployment_lab import DEPLOYMENT, RENDERER, objects, of_kind
from support.cluster import Cluster
from support.cluster_rules import Problem
from support.process import wait_for
from support.product import REPOSITORY
from tenancy_lab import SERVICE, install, make_controller, pod, settle, tenancy

from ocigpu.cli.front.main import main
from ocigpu.tenants.service.pods import PodOptions
from ocigpu.tenants.service.request import TenantRules
from ocigpu.tenants.service.server import GRACE

VALUES: dict[str, Any] = {
    "caas": {
        "enabled": True,
        "tlsSecret": "tls",
        "existingClaim": "mine",
        "storageClass": "fast",
        "nfs": ["nfs.example:/exports/{tenancy}"],
        "oidc": {"issuer": "https://login.example", "audience": "ocigpu"},
        "serviceType": "LoadBalancer",
        "serviceAnnotations": {"a": "1"},
        "from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
        "args": ["--cpus-per-gpu=8"],
        "createTenancies": ["admin", "https://login.example"],
    },
    "tenants": {"enabled": True, "registries": ["registry.example/"], "runtimeClasses": ["kata-a", "kata-b"]},
    "jsonLogs": True,
    "podAnnotations": {"b": "2"},
    "image": {"pullSecrets": ["pull"]},
}
NAME = "ocigpu-caas"
KUBERNETES_GRACE = 30
"""Seconds from the deletion of a pod to SIGKILL, preStop included.  Source: "Pod Lifecycle"."""


def documents() -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(RENDERER.caas({})) if each]


def pod_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    template: dict[str, Any] = of_kind(found, "Deployment")[NAME]["spec"]["template"]
    return template


def test_the_manifests_of_the_service_are_those_of_the_chart_and_valid() -> None:
    text = (DEPLOYMENT / "caas.yaml").read_text()
    assert text == RENDERER.caas({}), "run: packaging/kubernetes/render.py --caas > packaging/kubernetes/caas.yaml"
    for each in [*documents(), *objects(VALUES)]:
        kubernetes_validate.validate(each, "1.37", strict=True)
    assert "DaemonSet" not in text
    assert NAME not in str(objects({}))


def test_a_certificate_is_needed() -> None:
    with pytest.raises(RENDERER.ChartError, match=r"caas\.tlsSecret is needed"):
        objects({"caas": {"enabled": True}})


def test_it_runs_once_without_rights_on_its_node() -> None:
    deployment = of_kind(documents(), "Deployment")[NAME]["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"}), "the store has one writer"
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    assert not {"env", "lifecycle"} & container.keys()
    security = container["securityContext"]
    assert security["runAsNonRoot"]
    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert {volume["name"]: set(volume) - {"name"} for volume in pod["volumes"]} == {
        "store": {"persistentVolumeClaim"}, "tls": {"secret"},
    }  # fmt: skip
    assert {probe["httpGet"]["port"] for name, probe in container.items() if name.endswith("Probe")} == {"health"}
    assert "--health=[::]:8444" in container["args"]
    assert container["resources"]["limits"]["memory"]


DATABASE = {
    "url": "postgresql://ocigpu@db.example/ocigpu?sslrootcert=/etc/ocigpu/postgresql/ca.crt",
    "secret": "db",
    "ca": "db-ca",
    "port": 6432,
}
REPLICAS = {**VALUES, "caas": {**VALUES["caas"], "postgresql": DATABASE}}


def test_with_a_database_it_is_several_replicas_that_are_updated_one_by_one() -> None:
    found = objects(REPLICAS)
    for each in found:
        kubernetes_validate.validate(each, "1.37", strict=True)
    deployment = of_kind(found, "Deployment")[NAME]["spec"]
    assert deployment["replicas"] == 2
    assert deployment["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    assert f"--store={DATABASE['url']}" in container["args"]
    password = {"valueFrom": {"secretKeyRef": {"name": "db", "key": "password"}}}
    assert container["env"] == [{"name": "PGPASSWORD", **password}]
    assert {volume["name"]: set(volume) - {"name"} for volume in pod["volumes"]} == {
        "database-ca": {"configMap"}, "tls": {"secret"},
    }  # fmt: skip
    assert {one["name"] for one in container["volumeMounts"]} == {"database-ca", "tls"}
    assert of_kind(found, "PersistentVolumeClaim") == {}
    assert of_kind(found, "PodDisruptionBudget")[NAME]["spec"]["maxUnavailable"] == 1
    egress = of_kind(found, "NetworkPolicy")[NAME]["spec"]["egress"]
    assert 6432 in {each["port"] for rule in egress for each in rule["ports"]}
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert 5 < pause < KUBERNETES_GRACE - GRACE, "test_an_update_loses_no_request shows why"
    (spread,) = pod["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"].items() <= deployment["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize(
    "values", [{"caas": {"enabled": True, "tlsSecret": "tls"}}, VALUES, REPLICAS], ids=["plain", "full", "replicas"]
)
def test_its_words_are_those_of_the_command(values: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    (container,) = pod_of(objects(values))["spec"]["containers"]
    assert main([*container["args"], "--no-such-option"]) == 2
    assert "--no-such-option" in capsys.readouterr().err


def test_the_schedulers_configuration_packs_the_gpus_of_tenants_pods() -> None:
    document = yaml.safe_load((DEPLOYMENT / "scheduler.yaml").read_text())
    (profile,) = document["profiles"]
    (config,) = profile["pluginConfig"]
    resources = [{"name": PodOptions().resource, "weight": 1}]
    assert config["args"]["scoringStrategy"] == {"type": "MostAllocated", "resources": resources}
    accepted = f"object.spec.schedulerName in ['', '{profile['schedulerName']}']"
    assert accepted in (DEPLOYMENT / "tenants.yaml").read_text()


def test_the_documented_job_copies_the_charts_store(capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPOSITORY / "docs/tenants/CAAS.md").read_text()
    (job,) = (each for text in re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
              for each in yaml.safe_load_all(text) if each["kind"] == "Job")  # fmt: skip
    kubernetes_validate.validate(job, "1.37", strict=True)
    spec, served = job["spec"]["template"]["spec"], pod_of(documents())["spec"]
    (container,) = spec["containers"]
    assert main([*container["args"], "--no-such-option"]) == 2
    assert "--no-such-option" in capsys.readouterr().err
    store = {"name": "store", "mountPath": "/var/lib/ocigpu/caas"}
    assert store in container["volumeMounts"]
    assert store in served["containers"][0]["volumeMounts"]
    claim = {"name": "store", "persistentVolumeClaim": {"claimName": NAME}}
    assert claim in spec["volumes"]
    assert claim in served["volumes"]
    for name in ("runAsUser", "runAsGroup", "runAsNonRoot"):
        assert spec["securityContext"][name] == served["containers"][0]["securityContext"][name]
    assert spec["securityContext"]["fsGroup"] == served["securityContext"]["fsGroup"]


def test_policy_and_runtime_class_are_those_of_tenancies() -> None:
    found = objects(VALUES)
    words = pod_of(found)["spec"]["containers"][0]["args"]
    assert {"--runtime-class=kata-a", "--registry=registry.example/", "--resource=nvidia.com/gpu"} <= set(words)
    assert "--nfs=nfs.example:/exports/{tenancy}" in words
    assert {"--create-tenancies=admin", "--create-tenancies=https://login.example"} <= set(words)


@pytest.mark.parametrize(("sets", "counts", "taken"), [
    (True, ["0", "1", "2", "3", "4", "5", "6", "7", "8"], True), (True, ["0", "1", "2", "4", "8"], False),
    (False, ["0", "1", "2", "3", "4", "5", "6", "7", "8"], False),
])  # fmt: skip
def test_it_takes_the_numbers_of_gpus_that_plugin_and_policy_let_pass(
    sets: bool, counts: list[str], taken: bool
) -> None:
    values = {**VALUES, "leases": {"unlinkedSets": sets}, "tenants": {**VALUES["tenants"], "gpuCounts": counts}}
    (container,) = pod_of(objects(values))["spec"]["containers"]
    assert ("--unlinked-sets" in container["args"]) == taken


def test_the_claim_is_the_operators() -> None:
    found = objects(VALUES)
    assert of_kind(found, "PersistentVolumeClaim") == {}


def test_service_budget_and_policy_choose_its_pods_and_no_others() -> None:
    found = objects(VALUES)
    labels = pod_of(found)["metadata"]["labels"].items()
    others = of_kind(found, "Deployment")["ocigpu-tenancy-controller"]["spec"]["template"]["metadata"]["labels"].items()
    service, policy = of_kind(found, "Service")[NAME]["spec"], of_kind(found, "NetworkPolicy")[NAME]["spec"]
    budget = of_kind(found, "PodDisruptionBudget")[NAME]["spec"]
    for selector in (service["selector"], policy["podSelector"]["matchLabels"], budget["selector"]["matchLabels"]):
        assert selector.items() <= labels
        assert not selector.items() <= others
    (container,) = pod_of(found)["spec"]["containers"]
    assert service["ports"][0]["targetPort"] == container["ports"][0]["name"]
    assert policy["ingress"] == [
        {"ports": [{"protocol": "TCP", "port": 8443}], "from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}
    ]
    assert {each["port"] for rule in policy["egress"] for each in rule["ports"]} == {53, 443, 6443}
    assert container["ports"][0]["containerPort"] == 8443


@pytest.mark.parametrize(
    "wrong",
    [
        {"tlsSecret": "Upper"},
        {"storage": "much"},
        {"nfs": ["/exports"]},
        {"createTenancies": ["everybody"]},
        {"createTenancies": ["http://login.example"]},
        {"oidc": {"issuer": "http://login.example"}},
        {"oidc": {"issuer": "https://login.example"}},
        {"serviceType": "ExternalName"},
        {"egressPorts": []},
        {"maxUnavailable": 2},
        {"postgresql": {"url": "postgresql://user:password@host/name"}},
        {"postgresql": {"url": "/var/lib"}},
        {"postgresql": {"replicas": 0}},
        {"enable": True},
    ],
    ids=str,
)
def test_values_that_are_wrong_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RENDERER.ChartError, match=r"^values .* at '/caas"):
        RENDERER.caas({"caas": wrong})


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """With a tenancy that is ready, and the service's account."""
    with Cluster() as cluster:
        install(cluster)
        for each in documents():
            cluster.apply(each)
        cluster.create(tenancy())
        settle(make_controller(cluster))
        yield cluster


def test_its_rights_are_those_that_it_uses(cluster: Cluster, tmp_path: Path) -> None:
    """A container's whole life uses every right of the role; what it has no right to is refused by the double."""
    lab = Lab(cluster, tmp_path, rules=TenantRules(exports=("nfs.example:/exports/{tenancy}",)))
    lab.user = SERVICE
    lab.start()
    try:
        cluster.fail(1, 503, method="POST", path="events$")  # it is told again
        key = lab.key()
        mount = {"server": "nfs.example", "path": "/exports/landon", "target": "/data"}
        who = {"username": "robot", "password": "hidden"}
        made = lab.run(key, secrets={"TOKEN": "hidden"}, mounts=[mount], pull_credentials=who)
        lab.bind(made)
        lab.set_status(made, **running())
        lab.wait(key, made, "running")
        other = lab.run(key)
        lab.set_status(other, **ended())
        lab.wait(key, other, "finished")
        lab.ask("DELETE", f"/v1/containers/{made}", key)
        wait_for("its deletion", lambda: "deletionTimestamp" in lab.pod(made)["metadata"])
        cluster.delete("Pod", made.replace("_", "-"), "tenant-landon", gracePeriodSeconds=0)
        wait_for("its end", lambda: lab.ask("GET", f"/v1/containers/{made}", key).status == 404)
        role = of_kind(documents(), "ClusterRole")[NAME]
        granted = {
            (verb, group, resource)
            for rule in role["rules"]
            for verb in rule["verbs"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
        }

        def used() -> set[tuple[str, str, str]]:
            return {(verb, group, resource) for user, verb, group, resource in cluster.used if user == SERVICE}

        wait_for("every right", lambda: granted <= used(), on_failure=lambda: str(granted - used()))

        def events() -> list[dict[str, Any]]:
            return cluster.objects("Event", "events.k8s.io/v1")

        wait_for("the last event", lambda: any(each["reason"] == "Deleted" for each in events()))
        assert used() == granted
        assert not [line for _, line in lab.lines if "forbidden" in line]
        about = [each for each in events() if each["regarding"].get("namespace") == "tenant-landon"]
        by_pod = {name: [each["reason"] for each in about if each["regarding"]["name"] == name] for name in
                  (made.replace("_", "-"), other.replace("_", "-"))}  # fmt: skip
        assert list(by_pod.values()) == [["Created", "Ready", "Deleted"], ["Created", "Finished"]]
        for each in about:
            kubernetes_validate.validate(each, "1.37", strict=True)
    finally:
        lab.stop()


TENANCY = {"apiVersion": "ocigpu.io/v1alpha1", "kind": "Tenancy", "metadata": {"name": "evil"}}


def head(kind: str, name: str = "ctr-1", namespace: str = "tenant-landon") -> dict[str, Any]:
    place = {} if kind == "PersistentVolume" else {"namespace": namespace}
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, **place}}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({**head("PersistentVolume"), "spec": {"hostPath": {"path": "/"}}}, "volumes of NFS only"),
        ({**head("PersistentVolume"), "spec": {"local": {"path": "/"}}}, "volumes of NFS only"),
        ({**head("PersistentVolume", "other"), "spec": {"nfs": {"server": "s", "path": "/"}}}, "its containers only"),
        (
            {**head("Secret"), "type": "kubernetes.io/service-account-token"},
            "types Opaque and kubernetes.io/dockerconfigjson only",
        ),
        ({**head("Secret", namespace="kube-system"), "type": "Opaque"}, "namespaces of tenancies only"),
        ({**head("Pod", namespace="kube-system"), "spec": {"containers": []}}, "namespaces of tenancies only"),
        (pod(name="other"), "its containers only"),
        ({**TENANCY, "spec": {"internet": True}}, "defaults of their kind only"),
        ({**TENANCY, "spec": {"quota": {"gpus": 9}}}, "defaults of their kind only"),
        ({**TENANCY, "spec": {"quota": {"memory": "3Ti"}}}, "defaults of their kind only"),
        (
            {**TENANCY, "metadata": {"name": "evil", "finalizers": ["a.example/b"]}, "spec": {}},
            "defaults of their kind",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value["kind"],
)
def test_whoever_takes_it_over_gets_no_further(cluster: Cluster, document: dict[str, Any], words: str) -> None:
    with pytest.raises(Problem, match=words) as caught:
        cluster.create(document, user=SERVICE)
    assert caught.value.code == 403


def test_it_takes_away_what_is_its_own_alone(cluster: Cluster) -> None:
    cluster.create({**head("Secret", "other"), "type": "Opaque"})
    with pytest.raises(Problem, match="its containers only"):
        cluster.do("DELETE", head("Secret", "other"), SERVICE, named=True)
    cluster.delete("Secret", "other", "tenant-landon")


@pytest.mark.parametrize("create", [["admin"], []])
def test_it_makes_tenancies_where_the_operator_allows_it(tmp_path: Path, create: list[str]) -> None:
    """With the rights of the chart for it, and a controller that makes the rest."""
    with Cluster() as cluster:
        install(cluster)
        found = [each for each in yaml.safe_load_all(RENDERER.caas({"caas": {"createTenancies": create}})) if each]
        for each in found:
            cluster.apply(each)
        role = of_kind(found, "ClusterRole")
        verbs = [rule["verbs"] for rule in role[NAME]["rules"] if rule["resources"] == ["tenancies"]]
        assert verbs == [["get", "create"] if create else ["get"]]
        lab = Lab(cluster, tmp_path, rules=TenantRules(creators=("admin",)))
        lab.user = SERVICE
        lab.start()
        try:
            wanted = {"image": "ubuntu", "tenancy": "never-seen"}
            answer = lab.ask("POST", "/v1/containers", lab.admin, wanted)
            if not create:
                assert (answer.status, answer.body["code"]) == (422, "tenancy_unknown")
                assert "cannot be made" in answer.body["detail"]
                return
            assert (answer.status, answer.body["tenancy"]) == (202, "never-seen")
            made = cluster.get("Tenancy", "never-seen")
            assert made["metadata"]["annotations"]["ocigpu.io/created-by"].startswith("key:")
            controller = make_controller(cluster)
            settle(controller)
            assert lab.pod(answer.body["id"], "never-seen")["metadata"]["namespace"] == "tenant-never-seen"
            again = lab.ask("POST", "/v1/containers", lab.admin, wanted)
            assert again.status == 202
            assert [one.get("made_tenancy") for one in lab.audits()][-2:] == [True, None]
        finally:
            lab.stop()
