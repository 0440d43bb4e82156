"""The chart's part for leases: one privileged pod on each node, and an account that can tell of its own node alone."""

from typing import Any

import kubernetes_validate
import pytest
from celpy.adapter import json_to_cel
from deployment_lab import RENDERER, containers, objects, of_kind
from lease_lab import GPUS, Inline
from support.cluster import Cluster

from ocigpu.cli.main import main
from ocigpu.core.errors import HostError
from ocigpu.kubernetes.config import parse_flags, read_configuration
from ocigpu.kubernetes.dra.fit import new_environment
from ocigpu.kubernetes.tenants.lease import Lease, Phase
from ocigpu.kubernetes.tenants.report import LeaseReporter
from ocigpu.kubernetes.tenants.resources import Documents

VALUES: dict[str, Any] = {
    "leases": {
        "enabled": True,
        "check": "check --quick",
        "secret": "baseline",
        "fabric": "vsock:42:6666",
        "args": ["--pace=2"],
    },
    "devicePlugin": {"enabled": False},
    "jsonLogs": True,
}
AGENT = "system:serviceaccount:gpu:ocigpu-lease-agent"
CRD = RENDERER.CHART / "crds/gpuleases.yaml"


def test_one_pod_has_the_agent_and_a_device_plugin() -> None:
    found = objects(VALUES)
    (pod,) = [
        each["spec"]["template"]["spec"]
        for each in of_kind(found, "DaemonSet").values()
        if "lease" in each["metadata"]["name"]
    ]
    agent, plugin = pod["containers"]
    assert pod["hostPID"]
    assert pod["automountServiceAccountToken"]
    assert agent["args"][:2] == ["lease", "agent"]
    assert {"--check-program=check --quick", "--address=vsock:42:6666", "--pace=2"} <= set(agent["args"])
    configuration = read_configuration(
        parse_flags([word for word in plugin["args"][1:] if "log-format" not in word], {})
    )
    assert configuration.options.lease_journal == "/var/lib/ocigpu/leases"
    assert configuration.options.fabric_address == "vsock:42:6666"
    mounts = [{mount["name"] for mount in each["volumeMounts"]} for each in pod["containers"]]
    assert "state" in mounts[0] & mounts[1]
    assert {volume["name"] for volume in pod["volumes"]} == mounts[0] | mounts[1]
    for each in found:
        kubernetes_validate.validate(each, "1.37", strict=True)


def test_the_agents_options_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    (agent,) = [each for _, each in containers(objects(VALUES)) if each["name"] == "lease-agent"]
    assert main([*agent["args"], "--no-check"]) == 2
    assert "one of --check-program and --no-check" in capsys.readouterr().err


def test_a_check_is_needed() -> None:
    with pytest.raises(Exception, match=r"leases\.check is needed"):
        objects({"leases": {"enabled": True}})


def test_the_accounts_rights_are_those_that_the_agent_uses() -> None:
    with Cluster() as cluster:
        cluster.apply_manifests(CRD)
        role = of_kind(objects(VALUES), "ClusterRole")["ocigpu-lease-agent"]
        cluster.apply(role)
        cluster.apply(of_kind(objects(VALUES), "ClusterRoleBinding")["ocigpu-lease-agent"])
        log: list[str] = []
        documents = Documents(cluster.client(AGENT))
        reporter = LeaseReporter(documents, "n1", Inline(), lambda _level, text: log.append(text))
        reporter.step({GPUS[0]: Lease(GPUS[0], Phase.FREE, 1)}, 0.0)
        reporter.step({GPUS[0]: Lease(GPUS[0], Phase.RESERVED, 2)}, 1.0)
        assert not log
        granted = {
            (verb, resource) for rule in role["rules"] for verb in rule["verbs"] for resource in rule["resources"]
        }
        assert granted == {(verb, resource) for user, verb, _, resource in cluster.used if user == AGENT}
        with pytest.raises(HostError):
            documents.list("GPULease")


NODE = "authentication.kubernetes.io/node-name"


@pytest.mark.parametrize(
    ("extra", "accepted"), [({NODE: ["n1"]}, True), ({NODE: ["n2"]}, False), ({NODE: ["n1", "n2"]}, False), ({}, False)]
)
def test_an_agent_tells_of_its_own_node_alone(extra: dict[str, list[str]], accepted: bool) -> None:
    policy = of_kind(objects(VALUES), "ValidatingAdmissionPolicy")["ocigpu-lease-agent"]["spec"]
    request = {"userInfo": {"username": AGENT, "extra": extra}}
    known = {"request": json_to_cel(request), "object": json_to_cel({"spec": {"nodeName": "n1"}})}

    def value(expression: str) -> bool:
        environment = new_environment()
        return bool(environment.program(environment.compile(expression)).evaluate(known))

    assert all(value(each["expression"]) for each in policy["matchConditions"])
    assert all(value(each["expression"]) for each in policy["validations"]) is accepted
