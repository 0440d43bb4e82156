"""ComputeDomains whole: drivers, kubelets, daemons and a controller of several nodes; and their part of the chart."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from deployment_lab import containers, objects, of_kind
from domain_lab import RACK, SPACE, Rack, documented
from support.cluster import Cluster
from support.process import wait_for
from test_domain_daemon import Daemons
from test_domain_driver import Node, start

from ocigpu.kubernetes.domains.objects import DOMAIN_LABEL
from ocigpu.kubernetes.dra.options import parse_options

__all__ = ["start"]


def variables_of(node: Node, claim: dict[str, Any]) -> dict[str, str]:
    """Return the variables that a container with a claim's device gets by CDI."""
    (spec,) = [each for each in node.specs if each["devices"][0]["name"].startswith(claim["metadata"]["uid"])]
    return dict(each.split("=", 1) for each in spec["devices"][0]["containerEdits"]["env"])


def nodes_of(node: Node, claim: dict[str, Any]) -> list[str]:
    """Return the device nodes that it gets."""
    (spec,) = [each for each in node.specs if each["devices"][0]["name"].startswith(claim["metadata"]["uid"])]
    return [each["path"] for each in spec["devices"][0]["containerEdits"].get("deviceNodes", [])]


@pytest.mark.root
def test_a_job_on_two_nodes_gets_its_channels_and_survives_the_loss_of_one(
    start: Callable[..., Any], work_directory: Path
) -> None:
    """From claims to channels, with what each part tells the next; then a node goes, and a third takes its place."""
    with Cluster() as cluster:
        rack = Rack(cluster)
        nodes: dict[str, Node] = {}
        claims: dict[str, dict[str, Any]] = {}
        uid = rack.add_domain(numNodes=2)
        daemons = Daemons(rack, uid, work_directory)

        def join(name: str) -> None:
            """A pod of the job is scheduled to a node, whose kubelet prepares claims as pods are started."""
            cluster.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
            nodes[name] = start(cluster, name, wait=0.0)
            claims[name] = rack.add_claim(name, uid)
            assert "has no daemon on this node yet" in nodes[name].prepare(claims[name])["error"]
            rack.controller.resync()
            assert rack.labels()[name] == uid
            daemon = rack.add_claim(name, uid, f"daemon-{name}", SPACE, "daemon-0")
            assert nodes[name].prepare(daemon)["devices"]
            assert variables_of(nodes[name], daemon) == {"COMPUTE_DOMAIN_UUID": uid, "CLIQUE_ID": RACK}
            daemons.start(name)
            daemons.until("the daemon", lambda: rack.members().get(name, ("", "", ""))[2] == "Ready")
            assert nodes[name].prepare(claims[name])["devices"]
            assert nodes_of(nodes[name], claims[name]) == ["/dev/nvidia-caps-imex-channels/channel0"]

        try:
            for name in "ab":
                join(name)
            assert rack.domain()["status"]["status"] == "Ready"
            for name, peers in (("a", {"0001"}), ("b", {"0000"})):
                wait_for("the peer", lambda name=name, peers=peers: daemons.connected(name) == peers)

            nodes["b"].driver.end(signal.SIGKILL)
            orphan = daemons.log("b").rpartition("nvidia-imex started: process ")[2].split()[0]
            daemons.end("b", signal.SIGKILL)
            os.kill(int(orphan), signal.SIGKILL)
            daemons.until("the loss", lambda: rack.domain()["status"]["status"] == "NotReady")
            cluster.delete("ResourceClaim", "channel-b", "team")
            rack.controller.resync()
            assert rack.labels() == {"a": uid}
            join("c")
            assert rack.members() == {"a": (0, RACK, "Ready"), "c": (1, RACK, "Ready")}
            for name, peers in (("a", {"0001"}), ("c", {"0000"})):
                wait_for("the new peer", lambda name=name, peers=peers: daemons.connected(name) == peers)
            assert daemons.log("a").count("started: process") == 1
            assert nodes["a"].prepare(claims["a"])["devices"], "the pod that stayed has what it had"
        finally:
            daemons.close()


def test_the_manifest_of_the_page_applies() -> None:
    domain, pod = documented()
    with Cluster() as cluster:
        rack = Rack(cluster, "a")
        for document in (domain, pod):
            kubernetes_validate.validate(pod, "1.37", strict=True)
            document["metadata"]["namespace"] = "team"
            cluster.create(document)
        rack.settle()
        assert rack.domain()["status"] == {"status": "Ready", "nodes": []}
        (request,) = pod["spec"]["resourceClaims"]
        template = cluster.get("ResourceClaimTemplate", request["resourceClaimTemplateName"], "team")
        assert template["metadata"]["labels"][DOMAIN_LABEL] == rack.domain()["metadata"]["uid"]


# --- the chart

VALUES: dict[str, Any] = {"computeDomains": {"enabled": True}}


def test_objects_are_those_of_kubernetes_and_the_programs_understand_their_words() -> None:
    found = objects({**VALUES, "image": {"pullSecrets": ["s"]}})
    for each in found:
        kubernetes_validate.validate(each, "1.37", strict=True)
    (container,) = [each for _, each in containers(found) if "--compute-domains" in each["args"]]
    options = parse_options([*container["args"][1:]], {"NODE_NAME": "n", "POD_UID": "u", "POD_NAMESPACE": "gpu"})
    assert (options.compute_domains, options.namespace) == (True, "gpu")
    (deployment,) = of_kind(found, "Deployment").values()
    (controller,) = deployment["spec"]["template"]["spec"]["containers"]
    words = controller["args"]
    assert words[:2] == ["compute-domain", "controller"]
    assert {"--image-pull-secret=s", "--service-account=ocigpu-compute-domain-daemon", "--max-nodes=18"} <= set(words)
    assert [word for word in words if word.startswith("--image=")]
    accounts = of_kind(found, "ServiceAccount")
    assert {f"ocigpu-compute-domain-{name}" for name in ("controller", "daemon", "driver")} <= set(accounts)


def test_gpus_are_offered_as_without_domains() -> None:
    plain, claims = objects(VALUES), objects({**VALUES, "dra": {"enabled": True}})
    assert "ocigpu-device-plugin" in of_kind(plain, "DaemonSet")
    assert "ocigpu-device-plugin" not in of_kind(claims, "DaemonSet")
    assert {"ocigpu-dra-driver", "ocigpu-compute-domain-driver"} <= set(of_kind(claims, "DaemonSet"))


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ({}, 0),
        ({"computeDomains": {"enabled": True}}, 2),
        ({"computeDomains": {"enabled": True, "kinds": False}}, 0),
        ({"computeDomains": {"enabled": True}, "enabled": False}, 0),
    ],
    ids=str,
)
def test_the_kinds_of_nvidias_chart_may_be_used(values: dict[str, Any], kinds: int) -> None:
    found = of_kind(objects(values), "CustomResourceDefinition")
    assert len(found) == kinds
    assert all(each["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for each in found.values())
