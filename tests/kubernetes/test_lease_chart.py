"""The chart's part for leases: one privileged pod on each node, and an account that can tell of its own node alone."""

import re
import textwrap
from typing import Any

import kubernetes_validate
import pytest
import yaml
from deployment_lab import DEPLOYMENT, RENDERER, containers, objects, of_kind
from lease_lab import GPUS, Inline
from support.cluster import Cluster
from support.cluster_rules import evaluate
from support.lines import Lines
from support.process import wait_for
from support.product import REPOSITORY

from ocigpu.cli.front.main import main
from ocigpu.core.errors import HostError
from ocigpu.kubernetes.cluster.documents import Documents
from ocigpu.kubernetes.leases.lease import Lease, Phase
from ocigpu.kubernetes.leases.report import LeaseReporter, LeaseWatch, lease_name
from ocigpu.kubernetes.node.config import parse_flags, read_configuration

VALUES: dict[str, Any] = {
    "leases": {
        "enabled": True,
        "check": "check --quick",
        "secret": "baseline",
        "fabric": "vsock:42:6666",
        "args": ["--pace=2"],
    },
    "jsonLogs": True,
}
AGENT = "system:serviceaccount:gpu:ocigpu-lease-agent"
CRD = RENDERER.CHART / "kinds/gpuleases.yaml"


def test_one_pod_has_the_agent_and_a_device_plugin() -> None:
    found = objects(VALUES)
    assert not any("device-plugin" in each["metadata"]["name"] for each in found), "it would give GPUs without leases"
    (pod,) = [
        each["spec"]["template"]["spec"]
        for each in of_kind(found, "DaemonSet").values()
        if "lease" in each["metadata"]["name"]
    ]
    agent, plugin = pod["containers"]
    assert pod["hostPID"]
    assert pod["automountServiceAccountToken"]
    assert [each["name"] for each in agent["env"]] == ["NODE_NAME", "POD_NAMESPACE", "POD_NAME"]
    assert agent["args"][:2] == ["lease", "agent"]
    assert {"--check-program=check --quick", "--address=vsock:42:6666", "--pace=2"} <= set(agent["args"])
    configuration = read_configuration(
        parse_flags([word for word in plugin["args"][1:] if "log-format" not in word], {})
    )
    assert configuration.options.lease_journal == "/var/lib/ocigpu/leases"
    assert configuration.options.fabric_address == "vsock:42:6666"
    mounts = [{mount["name"] for mount in each["volumeMounts"]} for each in pod["containers"]]
    assert "state" in mounts[0] & mounts[1]
    assert_tmp(pod)
    assert {volume["name"] for volume in pod["volumes"]} == mounts[0] | mounts[1]
    for each in found:
        kubernetes_validate.validate(each, "1.37", strict=True)


def test_the_manifests_of_tenants_nodes_are_those_of_the_chart_and_valid() -> None:
    text = (DEPLOYMENT / "leases.yaml").read_text()
    assert text == RENDERER.leases({}), (
        "run: packaging/kubernetes/render.py --leases > packaging/kubernetes/leases.yaml"
    )
    found = [each for each in yaml.safe_load_all(text) if each]
    for each in found:
        kubernetes_validate.validate(each, "1.37", strict=True)
    assert list(of_kind(found, "DaemonSet")) == ["ocigpu-lease-agent"]


def test_the_values_of_the_page_are_the_manifests() -> None:
    """A stranger who follows docs/tenants/TENANTS.md by Helm gets what one gets who applies the files."""
    page = (REPOSITORY / "docs/tenants/TENANTS.md").read_text()
    (block,) = [each for each in re.findall(r"^    ```yaml\n(.*?)^    ```", page, re.S | re.M) if "leases:" in each]
    values = yaml.safe_load(textwrap.dedent(block))
    found = objects({**values, "config": {"existing": "none"}, "runtimeClass": {"create": False}})
    plain = [each for each in yaml.safe_load_all((DEPLOYMENT / "leases.yaml").read_text()) if each]
    (ours,), (theirs,) = (
        [each["spec"]["template"]["spec"]["containers"] for each in of_kind(them, "DaemonSet").values()]
        for them in (found, plain)
    )
    assert [each["args"] for each in ours] == [each["args"] for each in theirs]
    names = {each["metadata"]["name"] for each in found}
    assert {"ocigpu-caas", "ocigpu-tenancy-controller", "ocigpu-lease-agent"} <= names
    for each in found:
        kubernetes_validate.validate(each, "1.37", strict=True)


def assert_tmp(pod: dict[str, Any]) -> None:
    """A socket that leads to a vsock needs a directory, and the root of each container is read-only."""
    (volume,) = [each["emptyDir"] for each in pod["volumes"] if each["name"] == "tmp"]
    assert volume["medium"] == "Memory"
    for each in pod["containers"]:
        assert "/tmp" in [mount["mountPath"] for mount in each["volumeMounts"]]


def test_the_agents_options_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    (agent,) = [each for _, each in containers(objects(VALUES)) if each["name"] == "lease-agent"]
    assert main([*agent["args"], "--no-check"]) == 2
    assert "one of --check-program and --no-check" in capsys.readouterr().err


@pytest.mark.rest
def test_with_dra_the_driver_is_in_the_device_plugins_place() -> None:
    found = objects({**VALUES, "dra": {"enabled": True, "privileged": True}})
    pods = {
        name: each["spec"]["template"]["spec"]
        for name, each in of_kind(found, "DaemonSet").items()
        if "exporter" not in name
    }
    assert [each["name"] for each in pods["ocigpu-lease-agent"]["containers"]] == ["lease-agent"]
    (driver,) = pods["ocigpu-dra-driver"]["containers"]
    assert {"--lease-journal=/var/lib/ocigpu/leases", "--fabric-address=vsock:42:6666"} <= set(driver["args"])
    for name in ("ocigpu-lease-agent", "ocigpu-dra-driver"):
        assert_tmp(pods[name])
    for pod in pods.values():
        mounted = {mount["name"] for each in pod["containers"] for mount in each["volumeMounts"]}
        assert {volume["name"] for volume in pod["volumes"]} == mounted
    for each in found:
        kubernetes_validate.validate(each, "1.37", strict=True)
    with pytest.raises(Exception, match=r"dra\.privileged is needed"):
        objects({**VALUES, "dra": {"enabled": True}})
    with pytest.raises(Exception, match=r"leases\.unlinkedSets is the device plugin's"):
        objects(
            {
                "leases": {**VALUES["leases"], "unlinkedSets": True},
                "dra": {"enabled": True, "privileged": True},
            }
        )


def test_a_check_is_needed() -> None:
    with pytest.raises(Exception, match=r"leases\.check is needed"):
        objects({"leases": {"enabled": True}})


def test_the_accounts_rights_are_those_that_the_agent_uses() -> None:
    found = objects(VALUES)
    with Cluster() as cluster:
        cluster.apply_manifests(CRD)
        role = of_kind(found, "ClusterRole")["ocigpu-lease-agent"]
        cluster.apply(role)
        cluster.apply(of_kind(found, "ClusterRoleBinding")["ocigpu-lease-agent"])
        log = Lines()
        documents = Documents(cluster.client(AGENT))
        for kind in ("Role", "RoleBinding"):
            cluster.apply(of_kind(found, kind)["ocigpu-lease-agent"])
        watch = LeaseWatch(documents, "n1")
        watch.start()
        reporter = LeaseReporter(documents, "n1", Inline(), log, watch=watch)
        reporter.step({GPUS[0]: Lease(GPUS[0], Phase.FREE, 1)}, 0.0)
        wait_for("the watch", watch.has_news)
        reporter.step({GPUS[0]: Lease(GPUS[0], Phase.RESERVED, 2)}, 1.0)
        reporter.step({GPUS[0]: Lease(GPUS[0], Phase.QUARANTINED, 2)}, 2.0)
        reporter.step({GPUS[0]: Lease(GPUS[0], Phase.QUARANTINED, 2)}, 3.0)
        assert not log.lines
        rules = [*role["rules"], *of_kind(found, "Role")["ocigpu-lease-agent"]["rules"]]
        granted = {(verb, resource) for rule in rules for verb in rule["verbs"] for resource in rule["resources"]}
        assert granted == {(verb, resource) for user, verb, _, resource in cluster.used if user == AGENT}
        with pytest.raises(HostError):
            documents.get("GPULease", lease_name("n1", GPUS[0]))


OPERATOR = "ocigpu-lease-operator"


def test_only_operators_say_what_is_wanted_of_a_gpu() -> None:
    """By their role, and by the policy for whoever may write the kind by another role."""
    found = objects({**VALUES, "leases": {**VALUES["leases"], "operators": ["gpu-operators"]}})
    role, binding = (of_kind(found, kind)[OPERATOR] for kind in ("ClusterRole", "ClusterRoleBinding"))
    broad = {"apiGroups": ["ocigpu.io"], "resources": ["*"], "verbs": ["*"]}
    with Cluster() as cluster:
        cluster.apply_manifests(CRD)
        for document in (role, binding, *(of_kind(found, kind)[OPERATOR] for kind in POLICY)):
            cluster.apply(document)
        cluster.apply({**role, "metadata": {"name": "broad"}, "rules": [broad]})
        subjects = [{**binding["subjects"][0], "name": "developers"}]
        reference = {**binding["roleRef"], "name": "broad"}
        cluster.apply({**binding, "metadata": {"name": "broad"}, "roleRef": reference, "subjects": subjects})
        operator, developer, tenant = (
            Documents(cluster.client(f"of-{group}", group)) for group in ("gpu-operators", "developers", "tenants")
        )
        head = {"apiVersion": "ocigpu.io/v1alpha1", "kind": "GPULease", "metadata": {"name": "n1-gpu"}}
        made = developer.create({**head, "spec": {"nodeName": "n1", "pciAddress": GPUS[0]}})
        wished = {**made, "spec": {**made["spec"], "maintenance": True}}
        for documents, act, says in (
            (tenant, "update", "cannot update"),
            (developer, "update", "for the groups"),
            (developer, "delete", "for the groups"),
        ):
            with pytest.raises(HostError, match=says):
                getattr(documents, act)(wished)
        with pytest.raises(HostError, match="for the groups"):
            developer.create({**head, "metadata": {"name": "another"}, "spec": wished["spec"]})
        assert operator.update(wished)["spec"]["maintenance"] is True
        # the same, being deleted: kept by a finalizer
        held = developer.create({**head, "metadata": {"name": "held", "finalizers": ["a.b/c"]}, "spec": made["spec"]})
        Documents(cluster.client("root", "system:masters", "gpu-operators")).delete(held)
        going = cluster.get("GPULease", "held")
        assert going["metadata"]["deletionTimestamp"]
        with pytest.raises(HostError, match="for the groups"):
            developer.update({**going, "spec": {**held["spec"], "maintenance": True}})
        developer.update({**going, "metadata": {**going["metadata"], "finalizers": []}})
        assert not cluster.exists("GPULease", "held")


POLICY = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
NODE = "authentication.kubernetes.io/node-name"


@pytest.mark.parametrize(
    ("extra", "accepted"), [({NODE: ["n1"]}, True), ({NODE: ["n2"]}, False), ({NODE: ["n1", "n2"]}, False), ({}, False)]
)
def test_an_agent_tells_of_its_own_node_alone(extra: dict[str, list[str]], accepted: bool) -> None:
    policy = of_kind(objects(VALUES), "ValidatingAdmissionPolicy")["ocigpu-lease-agent"]["spec"]
    request = {"userInfo": {"username": AGENT, "extra": extra}}
    known = {"request": request, "object": {"spec": {"nodeName": "n1"}}, "oldObject": None}
    assert all(evaluate(each["expression"], known) for each in policy["matchConditions"])
    assert all(evaluate(each["expression"], known) for each in policy["validations"]) is accepted
