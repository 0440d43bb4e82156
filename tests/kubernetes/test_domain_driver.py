"""The node's part of ComputeDomains: what claims for channels and daemons are given, and who is refused."""

import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from domain_lab import OTHER_RACK, RACK, SPACE, Rack
from dra_lab import dra_kubelet
from support.cluster import Cluster
from support.process import wait_for
from support.programs import LoggedProgram

from ocigpu.core.errors import HostError, OcigpuError
from ocigpu.core.facts import Gpu, HostFacts
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.gpus.nvidia.imex import why_no_imex
from ocigpu.gpus.on_node import GpuDetails, Hardware
from ocigpu.kubernetes.cluster.owners import DOMAIN_DRIVER
from ocigpu.kubernetes.domains.driver import find_clique, make_domain_devices
from ocigpu.kubernetes.domains.specs import make_domain_spec
from ocigpu.kubernetes.dra.claims import Allotted, ClaimRef
from ocigpu.kubernetes.dra.configs import DeviceConfig, kinds_of, parse_config
from ocigpu.kubernetes.dra.devices import DraNode
from ocigpu.kubernetes.dra.options import parse_options
from ocigpu.kubernetes.dra.specs import NodeView
from ocigpu.kubernetes.node.config import PluginOptions
from ocigpu.sim.create import create_host
from ocigpu.system.settings_file import read_settings

API = "resource.nvidia.com/v1beta1"
UID = "7e0c8f5e-3b1b-4d6e-9a55-2f6b3f1f0a11"


# --- pure


@pytest.mark.parametrize(
    ("parameters", "config"),
    [
        (
            {"kind": "ComputeDomainChannelConfig", "domainID": UID},
            DeviceConfig("ComputeDomainChannelConfig", domain=UID),
        ),
        (
            {"kind": "ComputeDomainChannelConfig", "domainID": UID, "allocationMode": "All"},
            DeviceConfig("ComputeDomainChannelConfig", domain=UID, every=True),
        ),
        ({"kind": "ComputeDomainDaemonConfig", "domainID": UID}, DeviceConfig("ComputeDomainDaemonConfig", domain=UID)),
    ],
)
def test_configurations_are_those_of_nvidias_driver(parameters: dict[str, Any], config: DeviceConfig) -> None:
    assert parse_config({"apiVersion": API, **parameters}, "config[0]", kinds_of(DOMAIN_DRIVER)) == config


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"kind": "ComputeDomainChannelConfig"}, '.domainID: "" is not the uid of a ComputeDomain'),
        ({"kind": "ComputeDomainChannelConfig", "domainID": "../x"}, '.domainID: "../x" is not the uid'),
        ({"kind": "ComputeDomainChannelConfig", "domainID": 7}, '.domainID: "7" is not the uid'),
        ({"kind": "ComputeDomainChannelConfig", "domainID": UID, "allocationMode": "Some"}, "not one of Single, All"),
        ({"kind": "ComputeDomainDaemonConfig", "domainID": UID, "allocationMode": "All"}, "unknown field"),
        ({"kind": "GpuConfig"}, "is not one of ComputeDomainChannelConfig, ComputeDomainDaemonConfig"),
    ],
)
def test_a_wrong_configuration_is_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(OcigpuError) as raised:
        parse_config({"apiVersion": API, **parameters}, "config[0]", kinds_of(DOMAIN_DRIVER))
    assert raised.value.code == "OCIGPU-DRA-2"
    assert message in raised.value.message


@pytest.mark.parametrize(
    ("version", "problem"),
    [("580.65.06", ""), ("570.158.01", ""), ("570.133.20", "570.158.01 or later"), ("", "570.158.01 or later")],
)
def test_a_driver_too_old_for_changing_peers_says_so(version: str, problem: str) -> None:
    assert problem in why_no_imex(version)
    assert bool(problem) == bool(why_no_imex(version))


def test_the_clique_of_a_node_is_unknown_rather_than_none() -> None:
    """A node with multi-node NVLink that is not registered yet must not run without it."""
    gpu = Gpu(0, 0, "GPU-1", "00000000:01:00.0", "NVIDIA GB200")
    facts = HostFacts(gpus=(gpu,), driver_version="580.65.06")

    def clique(**details: str) -> tuple[str, str]:
        return find_clique(DraNode(facts, Hardware({"GPU-1": GpuDetails("GPU-1", **details)})))

    assert clique(clique=RACK) == (RACK, "")
    assert clique() == ("", "")
    assert clique(fabric_problem="under way") == ("", "under way")
    assert find_clique(DraNode(facts, Hardware(problem="NVML hangs"))) == ("", "NVML hangs")
    assert find_clique(DraNode()) == ("", "")
    old = facts._replace(driver_version="570.133.20")
    assert find_clique(DraNode(old, Hardware({"GPU-1": GpuDetails("GPU-1", clique=RACK)})))[0] == ""


def test_compute_domains_need_the_namespace_of_daemons() -> None:
    with pytest.raises(OcigpuError, match="--namespace: it is not set"):
        parse_options(["--compute-domains", "--node-name=n"], {})
    assert parse_options(["--compute-domains", "--node-name=n"], {"POD_NAMESPACE": "gpu"}).namespace == "gpu"


# --- specifications, of a simulated node of a rack


@pytest.fixture(scope="module")
def rack_node(session_directory: Path) -> Path:
    """Return the settings of a node of a rack."""
    create = {"nodes": False, "dri": False, "compat32": False, "ldcache": False}
    return Path(create_host(str(session_directory / "domain node"), 4, "gb200", clique=RACK, **create))


@pytest.fixture(scope="module")
def view(rack_node: Path) -> NodeView:
    settings = read_settings(str(rack_node))
    facts = read_host_facts(settings)
    return NodeView(DraNode(facts), make_domain_devices(RACK), settings, PluginOptions())


def spec_of(view: NodeView, kind: str, clique: str, every: bool = False) -> dict[str, Any]:
    """Return the edits of the one device of a claim, and those of all of its containers."""
    device = next(each for each in view.devices if each.kind == kind)
    allotted = Allotted(kind, device, DeviceConfig(domain=UID, every=every))
    spec = make_domain_spec(ClaimRef("team", "uid-1", "c"), [allotted], DOMAIN_DRIVER, view, clique)
    assert spec["kind"] == "k8s.compute-domain.nvidia.com/claim"
    (one,) = spec["devices"]
    assert one["name"] == f"uid-1-{kind}-0"
    return {"own": one["containerEdits"], "all": spec.get("containerEdits", {})}


def test_a_channel_is_one_node_by_number_and_nothing_else(view: NodeView) -> None:
    edits = spec_of(view, "channel", RACK)
    (node,) = edits["own"]["deviceNodes"]
    major = dict(view.node.facts.majors)["nvidia-caps-imex-channels"]
    assert (node["path"], node["type"], node["major"], node["minor"]) == (
        "/dev/nvidia-caps-imex-channels/channel0", "c", major, 0,
    )  # fmt: skip
    assert edits["own"]["env"] == [f"COMPUTE_DOMAIN_UUID={UID}"]
    assert set(edits["own"]) == {"deviceNodes", "env"}
    assert edits["all"] == {}


def test_all_channels_are_those_that_the_driver_has(view: NodeView) -> None:
    nodes = spec_of(view, "channel", RACK, every=True)["own"]["deviceNodes"]
    assert {node["minor"] for node in nodes} == set(range(2048))


def test_without_multi_node_nvlink_there_is_no_channel(view: NodeView) -> None:
    for kind in ("channel", "daemon"):
        edits = spec_of(view, kind, "")
        assert "deviceNodes" not in edits["own"]
        assert "mounts" not in edits["all"]


def test_a_daemon_gets_the_capability_its_clique_and_the_drivers_files(view: NodeView) -> None:
    edits = spec_of(view, "daemon", RACK)
    nodes = {node["path"]: node for node in edits["own"]["deviceNodes"]}
    text = Path(view.settings.simulation_root, "proc/driver/nvidia/capabilities/fabric-imex-mgmt").read_text()
    minor = int(text.split()[1])
    management = nodes[f"/dev/nvidia-caps/nvidia-cap{minor}"]
    assert (management["minor"], management["major"]) == (minor, dict(view.node.facts.majors)["nvidia-caps"])
    assert {f"/dev/nvidia{number}" for number in range(4)} | {"/dev/nvidiactl"} <= set(nodes)
    assert sorted(edits["own"]["env"]) == [f"CLIQUE_ID={RACK}", f"COMPUTE_DOMAIN_UUID={UID}"]
    mounts = {mount["containerPath"] for mount in edits["all"]["mounts"]}
    assert any(path.endswith("libnvidia-ml.so.580.65.06") for path in mounts)
    assert {"/usr/bin/nvidia-imex", "/usr/bin/nvidia-imex-ctl"} <= mounts


def test_a_host_without_imex_is_told(session_directory: Path) -> None:
    create = {"nodes": False, "dri": False, "compat32": False, "ldcache": False}
    settings = read_settings(create_host(str(session_directory / "no imex"), 1, "a100", **create))
    view = NodeView(DraNode(read_host_facts(settings)), make_domain_devices(RACK), settings, PluginOptions())
    with pytest.raises(HostError, match="has no IMEX channels"):
        spec_of(view, "channel", RACK)
    with pytest.raises(HostError, match="capability fabric-imex-mgmt"):
        spec_of(view, "daemon", RACK)


# --- drivers as processes, with kubelets and a cluster

_QUICK = """
import os, sys
from ocigpu.kubernetes.domains import driver
from ocigpu.kubernetes.domains.driver import DomainDriver
from ocigpu.kubernetes.dra.driver import DraTiming
from ocigpu.kubernetes.dra.options import parse_options
from ocigpu.kubernetes.node.health import Rules
from ocigpu.system.settings_file import read_settings
driver.POLL = 0.1
rules = Rules(probes=2, hold=0.3, patience=0.0)
timing = DraTiming(poll=0.1, probe=0.3, publish=0.5, retry=0.1, longest=0.5, rules=rules)
made = DomainDriver(parse_options(sys.argv[2:], os.environ), read_settings(sys.argv[1]), True, timing)
made.wait = float(os.environ["WAIT"])
made.run()
"""


class Node(NamedTuple):
    name: str
    kubelet: Any
    driver: LoggedProgram
    root: Path
    host: Path

    def prepare(self, claim: dict[str, Any]) -> Any:
        metadata = claim["metadata"]
        found = self.kubelet.prepare(DOMAIN_DRIVER, [[metadata["namespace"], metadata["uid"], metadata["name"]]])
        return found[metadata["uid"]]

    def unprepare(self, claim: dict[str, Any]) -> Any:
        metadata = claim["metadata"]
        found = self.kubelet.unprepare(DOMAIN_DRIVER, [[metadata["namespace"], metadata["uid"], metadata["name"]]])
        return found[metadata["uid"]]

    @property
    def specs(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.root.parent / "cdi").iterdir())]


@contextmanager
def running_node(name: str, directory: Path, clique: str, cluster: Cluster, wait: float) -> Iterator[Node]:
    """Run a driver and a kubelet of a node of a rack."""
    create = {"nodes": False, "dri": False, "compat32": False, "ldcache": False}
    host = Path(create_host(str(directory / f"host {name}"), 2, "gb200", clique=clique, **create)).parent
    root = directory / name / "k"
    (root.parent / "cdi").mkdir(parents=True)
    options = [
        "--compute-domains", f"--node-name={name}", f"--registrar-directory={root}/plugins_registry",
        f"--plugins-directory={root}/plugins", f"--cdi-root={root.parent}/cdi", f"--namespace={SPACE}",
        f"--kubeconfig={cluster.write_kubeconfig(directory / f'config-{name}')}",
    ]  # fmt: skip
    with ExitStack() as stack:
        kubelet = stack.enter_context(dra_kubelet(root))
        log = root.with_name("k.log")
        driver = LoggedProgram(_QUICK, log, str(host / "config.toml"), *options, WAIT=str(wait))
        stack.enter_context(driver.running())
        kubelet.find()
        driver.wait_for_log("published")
        yield Node(name, kubelet, driver, root, host)


@pytest.fixture
def start(work_directory: Path) -> Iterator[Callable[..., Any]]:
    """Return what runs nodes of a cluster; sockets are in the directory, so its path is short."""
    parent = Path(tempfile.mkdtemp(prefix="k", dir=work_directory.parent))
    with ExitStack() as stack:
        yield lambda cluster, name, clique=RACK, wait=60.0: stack.enter_context(
            running_node(name, parent, clique, cluster, wait)
        )
    shutil.rmtree(parent)


@pytest.mark.root
def test_a_claim_is_prepared_when_the_daemon_of_its_domain_is_ready(start: Callable[..., Any]) -> None:
    with Cluster() as cluster:
        rack = Rack(cluster)
        cluster.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "a"}})
        node = start(cluster, "a", wait=0.0)
        (published,) = cluster.objects("ResourceSlice")
        devices = {each["name"]: each["attributes"] for each in published["spec"]["devices"]}
        assert set(devices) == {"channel-0", "daemon-0"}
        assert devices["daemon-0"] == {"type": {"string": "daemon"}, "id": {"int": 0}, "cliqueID": {"string": RACK}}

        uid = rack.add_domain()
        claim = rack.add_claim("a", uid)
        rack.controller.resync()
        assert rack.labels() == {"a": uid}
        error = node.prepare(claim)["error"]
        assert 'claim team/channel-a: ComputeDomain "job": it has no daemon on this node yet' in error
        daemon = rack.add_claim("a", uid, "daemon-a", SPACE, "daemon-0")
        (device,) = node.prepare(daemon)["devices"]
        assert device["cdi_device_ids"] == [f"k8s.compute-domain.nvidia.com/claim={daemon['metadata']['uid']}-daemon-0"]
        rack.run_daemons(ready=False)
        rack.controller.resync()
        assert "its daemon on this node is not ready" in node.prepare(claim)["error"]
        rack.settle()
        (device,) = node.prepare(claim)["devices"]
        assert (device["device_name"], device["pool_name"]) == ("channel-0", "a")
        assert node.prepare(claim)["devices"] == [device], "once, however often the kubelet asks"
        assert len(node.specs) == 2
        rack.set_ready("a", uid, False)
        rack.controller.resync()
        assert node.prepare(claim)["devices"] == [device], "a container that runs is no matter of the daemon's state"
        for each in (claim, daemon):
            assert node.unprepare(each) == {}
        assert node.specs == []


@pytest.mark.root
def test_a_call_waits_for_the_daemon_and_others_get_their_turn(start: Callable[..., Any]) -> None:
    with Cluster() as cluster:
        rack = Rack(cluster)
        cluster.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "a"}})
        node = start(cluster, "a")
        uid = rack.add_domain()
        claim = rack.add_claim("a", uid)
        answers: list[Any] = []
        other = dra_kubelet(node.root)
        thread = threading.Thread(target=lambda: answers.append(node.prepare(claim)))
        thread.start()
        with other as second:
            second.find()
            rack.controller.resync()
            daemon = rack.add_claim("a", uid, "daemon-a", SPACE, "daemon-0")
            metadata = daemon["metadata"]
            words = [[metadata["namespace"], metadata["uid"], metadata["name"]]]
            assert second.prepare(DOMAIN_DRIVER, words)[metadata["uid"]]["devices"]
        assert not answers
        rack.settle()
        thread.join()
        assert answers[0]["devices"][0]["device_name"] == "channel-0"


@pytest.mark.root
def test_nobody_gets_the_channel_of_a_domain_of_another_namespace(start: Callable[..., Any]) -> None:
    with Cluster() as cluster:
        rack = Rack(cluster)
        for kind, name in (("Node", "a"), ("Namespace", "thief")):
            cluster.create({"apiVersion": "v1", "kind": kind, "metadata": {"name": name}})
        node = start(cluster, "a")
        uid = rack.add_domain()
        rack.add_claim("a", uid, "theirs")
        rack.settle()
        assert rack.members() == {"a": (0, RACK, "Ready")}
        stolen = rack.add_claim("a", uid, "stolen", "thief")
        assert f'namespace "thief" has no ComputeDomain with uid "{uid}"' in node.prepare(stolen)["error"]
        daemon = rack.add_claim("a", uid, "daemon", "team", "daemon-0")
        assert 'daemons of ComputeDomains are in namespace "gpu" only' in node.prepare(daemon)["error"]
        nothing = rack.add_claim("a", "no-such-uid", "nothing")
        assert 'namespace "team" has no ComputeDomain with uid "no-such-uid"' in node.prepare(nothing)["error"]
        gone = rack.add_claim("a", "no-such-uid", "gone", SPACE, "daemon-0")
        assert 'there is no ComputeDomain with uid "no-such-uid"' in node.prepare(gone)["error"]
        claim = rack.add_claim("a", uid, "plain")
        claim["status"]["allocation"]["devices"]["config"] = []
        claim = cluster.update(claim, sub="status")
        assert "no configuration names its ComputeDomain" in node.prepare(claim)["error"]
        # a domain that is being deleted takes nobody
        cluster.delete("ComputeDomain", "job", "team")
        late = rack.add_claim("a", uid, "late")
        assert 'ComputeDomain "job" is being deleted' in node.prepare(late)["error"]
        assert node.specs == []


@pytest.mark.root
def test_a_node_offers_nothing_while_its_fabric_is_not_registered(start: Callable[..., Any]) -> None:
    with Cluster() as cluster:
        rack = Rack(cluster)
        cluster.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "a"}})
        node = start(cluster, "a", wait=0.0)

        def devices() -> int:
            return sum(len(each["spec"]["devices"]) for each in cluster.objects("ResourceSlice"))

        wait_for("devices", lambda: devices() == 2)
        (node.host / "faults").write_text("fabric 2\n")
        wait_for("no devices", lambda: devices() == 0)
        uid = rack.add_domain()
        claim = rack.add_claim("a", uid)
        assert "NVLink fabric: the registration is under way" in node.prepare(claim)["error"]
        assert any("nothing is offered: NVLink fabric" in line for line in node.driver.log)
        (node.host / "faults").write_text("")
        wait_for("devices again", lambda: devices() == 2)


@pytest.mark.root
def test_a_channel_waits_for_a_daemon_of_its_own_clique(start: Callable[..., Any]) -> None:
    """The daemon's word is of another clique after the node was registered anew."""
    with Cluster() as cluster:
        rack = Rack(cluster)
        rack.add_node("b", OTHER_RACK)
        cluster.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "a"}})
        node = start(cluster, "a", wait=0.0)
        uid = rack.add_domain()
        claim = rack.add_claim("a", uid)
        rack.settle()
        domain = rack.domain()
        domain["status"]["nodes"][0]["cliqueID"] = OTHER_RACK
        cluster.update(domain, sub="status")
        assert "its daemon on this node is not ready" in node.prepare(claim)["error"]
        assert rack.controller.resync()
        assert node.prepare(claim)["devices"]
