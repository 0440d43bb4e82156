"""``ocigpu mig-manager``: against an API server double over HTTP; the GPUs are a double too, and once real commands."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from mig_lab import layouts_of, make_mig_host, names
from support.cluster import Cluster
from support.process import wait_for
from support.product import PROGRAMS

from ocigpu.core.errors import HostError, SettingsError
from ocigpu.kubernetes.dra.claims import Allotted, ClaimRef
from ocigpu.kubernetes.dra.devices import DraDevice
from ocigpu.kubernetes.dra.state import ClaimRecord, ClaimStore
from ocigpu.kubernetes.mig.layouts import parse_services
from ocigpu.kubernetes.mig.manager import (
    CONFIG,
    JOURNAL,
    PAUSED,
    REASON,
    REBOOTED,
    STATE,
    ManagerOptions,
    MigManager,
    StoppedError,
)
from ocigpu.kubernetes.mig.node import HostTools, MigAnswer, NodeApi
from ocigpu.system.service import ServiceLog

PLUGIN, EXPORTER, DCGM = (f"nvidia.com/gpu.deploy.{name}" for name in ("device-plugin", "dcgm-exporter", "dcgm"))
OPERATOR = {PLUGIN: "true", EXPORTER: "false", DCGM: "true"}


class Killed(BaseException):
    """kill -9, at a point."""


class Gpus:
    """The host: which layout it has, who holds it (by containers, "namespace/pod/container"), and what was done."""

    def __init__(self) -> None:
        self.layout, self.held, self.done = "old", "", list[str]()
        self.problem = ""
        self.apply_error = ""
        self.boot, self.kept = "b1", ("", "")
        self.active = {"nvsm.service", "sshd.service"}
        self.start_fails = 0

    def mig(self, verb: str, *words: str, layouts: str = "") -> MigAnswer:  # noqa: ARG002 - as the real one
        name = words[words.index("-c") + 1]
        self.done.append(" ".join([verb, *(word for word in words if word.startswith("--"))]))
        if verb == "assert":
            return MigAnswer(int(name != self.layout), {"gpus": [{"index": 0, "problem": ""}]})
        held = f"it would fit, but not beside the instances in use: {self.held} uses MIG-a" if self.held else ""
        problem = self.problem or ("" if "--force" in words else held)
        if verb == "plan":
            return MigAnswer(int(bool(problem)), {"gpus": [{"index": 0, "problem": problem}]})
        if "--mode-only" in words:
            return MigAnswer(0, {"gpus": []})
        if self.apply_error or problem:
            return MigAnswer(1, {}, self.apply_error or f"OCIGPU-MIG-2: GPU 0: {problem}")
        self.layout = name
        return MigAnswer(0, {"gpus": []})

    def refresh_cdi(self) -> str:
        self.done.append("cdi refresh")
        return ""

    def running(self, services: tuple[str, ...]) -> list[str]:
        return [name for name in services if name in self.active]

    def switch(self, verb: str, services: list[str]) -> None:
        if verb == "start" and services and self.start_fails:
            self.start_fails -= 1
            raise HostError("OCIGPU-MIG-6", "systemctl start: no")
        self.active = self.active | set(services) if verb == "start" else self.active - set(services)

    def reboot(self) -> None:
        self.done.append("reboot")

    def boot_id(self) -> str:
        return self.boot

    def keep_for_boot(self, name: str, layouts: str) -> None:
        self.kept = (name, layouts)


class Lab:
    """A node, its pods, and managers of it; the cluster's other controllers act whenever a manager waits."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.gpus, self.now = cluster, Gpus(), 0.0
        self.stubborn = False
        self.states: list[str] = []
        cluster.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n", "labels": {CONFIG: "new"}}})

    def node(self) -> dict[str, Any]:
        metadata: dict[str, Any] = self.cluster.get("Node", "n")["metadata"]
        return metadata

    def label(self, **_: Any) -> dict[str, str]:
        labels: dict[str, str] = self.node()["labels"]
        return labels

    def annotation(self, name: str) -> str | None:
        found: str | None = self.node().get("annotations", {}).get(name)
        return found

    def set(self, **metadata: Any) -> None:
        self.cluster.patch("Node", "n", {"metadata": metadata})

    def pod(self, name: str, key: str = "", gpus: int = 0, namespace: str = "default", owner: str = "") -> None:
        """Make a pod; ``key``: of a DaemonSet that chooses nodes by it; ``owner``: UID of one that is not there."""
        limits = {"nvidia.com/mig-1g.10gb": str(gpus)} if gpus else {}
        spec: dict[str, Any] = {
            "nodeName": "n",
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "main", "image": "i", "resources": {"limits": limits}}],
        }
        if key:
            spec["nodeSelector"] = {key: "true"}
        if not self.cluster.exists("Namespace", namespace):
            self.cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        metadata: dict[str, Any] = {"name": name, "namespace": namespace}
        if key:
            head = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "d", "namespace": namespace}}
            if not owner and not self.cluster.exists("DaemonSet", "d", namespace):
                self.cluster.create({**head, "spec": {"selector": {}, "template": {}}})
            uid = owner or self.cluster.get("DaemonSet", "d", namespace)["metadata"]["uid"]
            reference = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": uid, "controller": True}
            metadata["ownerReferences"] = [reference]
        self.cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})

    def pods(self) -> list[str]:
        return sorted(pod["metadata"]["name"] for pod in self.cluster.objects("Pod"))

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        self.states.append(self.label().get(STATE, ""))
        for pod in self.cluster.objects("Pod"):
            keys = pod["spec"].get("nodeSelector", {})
            if not self.stubborn and any(self.label().get(key) == PAUSED for key in keys):
                self.cluster.delete("Pod", pod["metadata"]["name"], pod["metadata"]["namespace"])
        return False

    def manager(self, **options: Any) -> MigManager:
        node = NodeApi(self.cluster.client(), "n")
        return MigManager(ManagerOptions(**options), node, self.gpus, ServiceLog(False), self.wait, lambda: self.now)

    def is_settled(self, **labels: str) -> bool:
        return self.label() == {CONFIG: "new", STATE: "success", **labels} and self.annotation(JOURNAL) is None


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Cluster() as cluster:
        yield Lab(cluster)


def test_a_node_that_is_as_its_label_says_is_only_told(lab: Lab) -> None:
    lab.gpus.layout = "new"
    manager = lab.manager()
    assert manager.reconcile()
    assert lab.is_settled()
    before = len([one for one in lab.cluster.requests if one[0] == "PATCH"])
    assert manager.reconcile()
    assert len([one for one in lab.cluster.requests if one[0] == "PATCH"]) == before == 1
    assert lab.gpus.done == ["assert"] * 2
    assert lab.gpus.kept == ("new", "")


def test_a_node_without_a_label_is_left_alone(lab: Lab) -> None:
    lab.set(labels={CONFIG: None})
    assert lab.manager().reconcile()
    assert (lab.node().get("labels") or {}, lab.gpus.done) == ({}, [])
    assert lab.manager(default="all-disabled").reconcile()
    assert lab.gpus.layout == "all-disabled"


def test_clients_are_paused_and_given_back(lab: Lab) -> None:
    lab.set(labels=OPERATOR)
    lab.pod("plugin", PLUGIN)
    lab.pod("dcgm", DCGM)
    lab.pod("exporter", EXPORTER)
    lab.pod("other", "zone")
    assert lab.manager(services=("nvsm.service", "gone.service")).reconcile()
    assert lab.states == ["pending"]
    assert lab.pods() == ["exporter", "other"]
    assert lab.is_settled(**OPERATOR)
    assert lab.gpus.done == ["assert", "plan --force", "plan", "apply", "cdi refresh"]
    assert lab.gpus.active == {"nvsm.service", "sshd.service"}


def test_a_pod_that_says_it_is_of_a_daemonset_holds_nothing_up(lab: Lab) -> None:
    lab.pod("forged", PLUGIN, owner="made-up")  # no such DaemonSet
    lab.pod("plugin", PLUGIN)
    lab.pod("copied", PLUGIN, owner="made-up")  # another one of the name
    lab.pod(
        "forged", PLUGIN, namespace="mallory", owner=lab.cluster.get("DaemonSet", "d", "default")["metadata"]["uid"]
    )
    lab.stubborn = True
    lab.cluster.delete("Pod", "plugin", "default")
    assert lab.manager().reconcile()
    assert lab.now == 0
    assert lab.is_settled()


def test_clients_that_do_not_go_are_named_and_everybody_is_given_back(lab: Lab) -> None:
    lab.pod("plugin", PLUGIN, namespace="gpu")
    lab.stubborn = True
    assert not lab.manager().reconcile()
    assert lab.label() == {CONFIG: "new", STATE: "failed"}
    assert lab.annotation(REASON) == "paused clients are still running: gpu/plugin"
    assert lab.now >= 300
    lab.stubborn = False
    assert lab.manager().reconcile()
    assert (lab.is_settled(), lab.annotation(REASON)) == (True, None)


def test_clients_of_a_former_revision_are_waited_for(lab: Lab) -> None:
    """Their pods say nothing of the label yet: the chart has just been told of the manager."""
    template = {"spec": {"containers": [], "nodeSelector": {PLUGIN: "true"}}}
    head = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "d", "namespace": "default"}}
    uid = lab.cluster.create({**head, "spec": {"selector": {}, "template": template}})["metadata"]["uid"]
    lab.pod("former", "zone", owner=uid)
    lab.gpus.held = "default/former/main"
    turns = lab.wait

    def wait(seconds: float) -> bool:
        if len(lab.states) == 2:
            lab.cluster.delete("Pod", "former", "default")
            lab.gpus.held = ""
        return turns(seconds)

    lab.wait = wait
    assert lab.manager().reconcile()
    assert set(lab.states) == {"pending"}
    assert (lab.is_settled(), lab.pods()) == (True, [])


def test_a_client_that_was_on_no_node_when_it_was_paused_is_waited_for(lab: Lab) -> None:
    """A roll-out had just made its pod."""
    lab.pod("new", PLUGIN)
    pod = lab.cluster.get("Pod", "new", "default")
    lab.cluster.delete("Pod", "new", "default")
    pod["metadata"] = {key: pod["metadata"][key] for key in ("name", "namespace", "ownerReferences")}
    pod["spec"].pop("nodeName")
    lab.cluster.create(pod)
    lab.stubborn = True
    asked, turns = lab.gpus.mig, lab.wait

    def mig(verb: str, *words: str, layouts: str = "") -> MigAnswer:
        if verb == "plan" and "--force" not in words and lab.label().get(STATE) == "pending" and not lab.states:
            lab.cluster.bind("new", "default", "n")
            lab.gpus.held = "default/new/main"
        return asked(verb, *words, layouts=layouts)

    def wait(seconds: float) -> bool:
        lab.cluster.delete("Pod", "new", "default")
        lab.gpus.held = ""
        return turns(seconds)

    lab.gpus.mig, lab.wait = mig, wait
    assert lab.manager().reconcile()
    assert (lab.states, lab.is_settled()) == (["pending"], True)


def test_pods_that_have_what_would_go_are_not_disturbed(lab: Lab) -> None:
    lab.pod("web", gpus=1)
    lab.pod("idle", gpus=1)
    lab.gpus.held = "default/web/main"
    assert not lab.manager().reconcile()
    assert lab.label() == {CONFIG: "new", STATE: "failed"}
    assert lab.annotation(REASON) == "pods use what would be destroyed: default/web"
    assert (lab.states, lab.pods(), lab.gpus.layout) == ([], ["idle", "web"], "old")
    lab.gpus.held = "not-default/web/main"  # another pod, whose name ends with that of this one
    lab.pod("web", gpus=1, namespace="not-default")
    assert not lab.manager().reconcile()
    assert lab.annotation(REASON) == "pods use what would be destroyed: not-default/web"
    lab.gpus.held = ""  # it has ended: the label has not changed
    assert lab.manager().reconcile()
    assert lab.is_settled()


def test_what_a_client_that_stays_holds_is_found_after_the_pause(lab: Lab) -> None:
    lab.gpus.held = "process 12"
    assert not lab.manager().reconcile()
    assert lab.label() == {CONFIG: "new", STATE: "failed"}
    assert "process 12 uses MIG-a" in str(lab.annotation(REASON))
    assert lab.manager(pods="ignore").reconcile()
    assert lab.gpus.done[-2:] == ["apply --force", "cdi refresh"]


def test_pods_are_evicted_where_the_policy_says_so(lab: Lab) -> None:
    lab.pod("web", gpus=1)
    lab.pod("idle", gpus=1)
    lab.pod("cpu")
    lab.gpus.held = "default/web/main"
    turns = lab.wait

    def wait(seconds: float) -> bool:
        if "web" not in lab.pods():
            lab.gpus.held = ""
        return turns(seconds)

    lab.wait = wait
    lab.cluster.fail(2, 429, "POST", "/eviction$")
    assert lab.manager(pods="drain").reconcile()
    assert set(lab.states) == {"draining"}
    assert lab.pods() == ["cpu", "idle"]
    assert lab.is_settled()


CLAIMED = "claim default/half"


@pytest.mark.parametrize("kind", ["its own", "of a template", "of an extended resource"])
def test_pods_whose_claims_have_what_would_go_are_named(lab: Lab, kind: str) -> None:
    """Their containers may not be there yet: images are pulled after claims were prepared."""
    lab.pod("web", gpus=1)
    lab.pod("idle", gpus=1)
    lab.pod("half", gpus=1, namespace="other")
    web = lab.cluster.get("Pod", "web", "default")
    if kind == "its own":
        web["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": "half"}]
        lab.cluster.update(web)
    else:
        one = {"resourceClaimName": "half"}
        status = {"resourceClaimStatuses": [{"name": "gpu", **one}]}
        if kind == "of an extended resource":
            status = {"extendedResourceClaimStatus": {**one, "requestMappings": []}}
        lab.cluster.update({**web, "status": status}, sub="status")
    lab.gpus.held = CLAIMED
    assert not lab.manager().reconcile()
    assert lab.annotation(REASON) == "pods use what would be destroyed: default/web (claim default/half)"
    assert (lab.states, lab.gpus.layout) == ([], "old")
    turns = lab.wait

    def wait(seconds: float) -> bool:
        if "web" not in lab.pods():
            lab.gpus.held = ""
        return turns(seconds)

    lab.wait = wait
    assert lab.manager(pods="drain").reconcile()
    assert lab.pods() == ["half", "idle"]
    assert lab.is_settled()


def test_a_claim_without_a_pod_is_waited_for(lab: Lab) -> None:
    """Its pod has just ended: nobody is paused or evicted for it."""
    lab.pod("idle", gpus=1)
    lab.gpus.held = CLAIMED
    assert not lab.manager().reconcile()
    assert (lab.states, "claim default/half uses MIG-a" in str(lab.annotation(REASON))) == ([], True)
    assert not lab.manager(pods="drain").reconcile()
    assert "claim default/half uses MIG-a" in str(lab.annotation(REASON))
    assert lab.pods() == ["idle"]
    lab.gpus.held = ""
    assert lab.manager().reconcile()


def test_a_disruption_budget_is_respected(lab: Lab) -> None:
    lab.pod("web", gpus=1)
    lab.gpus.held = "default/web/main"
    lab.cluster.fail(10**6, 429, "POST", "/eviction$")
    assert not lab.manager(pods="drain", drain_seconds=20).reconcile()
    assert lab.annotation(REASON) == "a disruption budget keeps default/web"
    assert lab.label() == {CONFIG: "new", STATE: "failed"}


@pytest.mark.parametrize(
    ("error", "state"),
    [
        ("OCIGPU-MIG-3: GPU 0: destroy 1g.10gb at 0: In use by another client (all is as it was before)", "rolledback"),
        ("OCIGPU-MIG-3: GPU 0: make 1g.10gb at 0: GPU is lost (could not be put back: GPU is lost)", "failed"),
        ("OCIGPU-MIG-4: reset GPU 0: nvidia-smi: in use", "failed"),
    ],
)
def test_an_error_is_the_reason(lab: Lab, error: str, state: str) -> None:
    lab.gpus.apply_error = error
    assert not lab.manager().reconcile()
    assert (lab.label(), lab.annotation(REASON)) == ({CONFIG: "new", STATE: state}, error)
    assert lab.gpus.kept == ("", "")


def test_a_layout_that_does_not_fit_pauses_nobody(lab: Lab) -> None:
    lab.gpus.problem = "it does not fit; 1 x 3g.40gb would"
    assert not lab.manager().reconcile()
    assert lab.label() == {CONFIG: "new", STATE: "failed"}
    assert lab.annotation(REASON) == "GPU 0: it does not fit; 1 x 3g.40gb would"
    assert lab.gpus.done == ["assert", "plan --force"]


def test_a_file_that_cannot_be_read_is_the_reason(lab: Lab, tmp_path: Path) -> None:
    assert not lab.manager(config_file=str(tmp_path / "none")).reconcile()
    assert str(lab.annotation(REASON)).startswith("OCIGPU-MIG-1: ")
    (tmp_path / "a.yaml").write_text("x")
    assert lab.manager(config_file=str(tmp_path / "a.yaml")).reconcile()
    assert lab.gpus.kept == ("new", "x")


# whatever ends it


@pytest.mark.rest
def test_a_kill_at_any_point_leaves_nobody_paused(lab: Lab) -> None:
    """Before and after each request and each command: the next manager finishes, and gives everybody back."""
    left = 0
    after = False

    def counted(real: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and not after:
                raise Killed
            found = real(*arguments, **more)
            if left == 0:
                raise Killed
            return found

        return call

    points = 0
    for after in (False, True):
        for point in range(1, 100):
            lab.gpus = Gpus()
            lab.set(labels={**OPERATOR, STATE: None}, annotations={JOURNAL: None})
            lab.pod("plugin", PLUGIN)
            manager = lab.manager(services=("nvsm.service",))
            for owner in (manager.node, lab.gpus):
                for name in ("read", "patch", "pods", "mig", "refresh_cdi", "switch", "running", "keep_for_boot"):
                    if hasattr(owner, name):
                        setattr(owner, name, counted(getattr(owner, name)))
            left = point
            try:
                manager.reconcile()
                break
            except Killed:
                points += 1
                left = 10**6
            assert lab.manager(services=("nvsm.service",)).reconcile()
            assert lab.is_settled(**OPERATOR), (point, after, lab.node())
            assert (lab.gpus.layout, lab.gpus.active) == ("new", {"nvsm.service", "sshd.service"}), (point, after)
            if "plugin" in lab.pods():
                lab.cluster.delete("Pod", "plugin", "default")
        lab.cluster.delete("Pod", "plugin", "default") if "plugin" in lab.pods() else None
    assert points > 25


def test_an_api_server_that_is_away_is_asked_again(lab: Lab) -> None:
    for number in range(1, 7):
        lab.gpus = Gpus()
        lab.set(labels={**OPERATOR, STATE: None})
        manager = lab.manager()
        real, left = manager.node.patch, number

        def patch(*arguments: Any, real: Any = real) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                lab.cluster.fail(1, 503, "PATCH")
            real(*arguments)

        manager.node.patch = patch
        try:
            assert manager.reconcile()
        except HostError as error:
            assert error.code == "OCIGPU-KUBE-5"  # noqa: PT017 - not every call that fails is one of it
            assert manager.reconcile()
        assert lab.is_settled(**OPERATOR)


def test_what_the_vendors_manager_left_paused_is_given_back(lab: Lab) -> None:
    lab.gpus.layout = "new"
    lab.set(labels={PLUGIN: PAUSED, DCGM: PAUSED, EXPORTER: "false"}, annotations={JOURNAL: "nonsense"})
    assert lab.manager().reconcile()
    assert lab.is_settled(**OPERATOR)


def test_a_note_that_others_wrote_starts_no_command_of_theirs(lab: Lab) -> None:
    lab.gpus.layout = "new"
    services = ["--host=mallory@elsewhere.example", "-Hx", "nvsm.service", "a b"]
    lab.set(annotations={JOURNAL: json.dumps({"labels": {}, "services": services})})
    assert lab.manager().reconcile()
    assert lab.gpus.active == {"nvsm.service", "sshd.service"}


def test_labels_go_back_also_where_the_wanted_one_is_taken_away(lab: Lab) -> None:
    lab.set(labels={CONFIG: None, PLUGIN: PAUSED}, annotations={JOURNAL: json.dumps({"labels": {PLUGIN: None}})})
    assert lab.manager().reconcile()
    assert lab.node().get("labels", {}) == {}


def test_an_end_while_it_waits_gives_everybody_back(lab: Lab) -> None:
    lab.set(labels=OPERATOR)
    lab.pod("plugin", PLUGIN)
    manager = lab.manager()
    manager.wait = lambda _: True
    with pytest.raises(StoppedError):
        manager.reconcile()
    assert {key: lab.label()[key] for key in OPERATOR} == OPERATOR


def test_services_that_do_not_start_are_tried_again(lab: Lab) -> None:
    lab.gpus.start_fails = 1
    manager = lab.manager(services=("nvsm.service",))
    assert not manager.reconcile()
    assert lab.label() == {CONFIG: "new", STATE: "success"}
    assert "nvsm.service" in str(lab.annotation(JOURNAL))
    assert manager.reconcile()
    assert (lab.is_settled(), lab.gpus.active) == (True, {"nvsm.service", "sshd.service"})


def test_a_reboot_where_the_mode_needs_one(lab: Lab) -> None:
    lab.set(labels=OPERATOR)
    lab.gpus.apply_error = "OCIGPU-MIG-4: reset GPU 0: nvidia-smi: in use"
    manager = lab.manager(with_reboot=True)
    assert not manager.reconcile()
    assert (lab.label()[STATE], lab.label()[PLUGIN], lab.gpus.done[-1]) == ("rebooting", PAUSED, "reboot")
    assert "apply --mode-only --skip-reset" in lab.gpus.done
    assert not lab.manager(with_reboot=True).reconcile(), "the manager was started again before the host was"
    lab.gpus.boot = "b2"
    assert not lab.manager(with_reboot=True).reconcile(), "it did not help: no second reboot"
    assert lab.label()[STATE] == "failed"
    assert {key: lab.label()[key] for key in OPERATOR} == OPERATOR
    lab.gpus.apply_error = ""
    assert lab.manager(with_reboot=True).reconcile()
    assert (lab.is_settled(**OPERATOR), lab.annotation(REBOOTED)) == (True, None)


def test_the_rights_that_it_needs(lab: Lab) -> None:
    lab.pod("web", gpus=1)
    lab.gpus.held = "default/web/main"
    lab.manager(pods="drain", drain_seconds=3).reconcile()
    used = {(verb, resource) for user, verb, _, resource in lab.cluster.used if user == "system:admin"}
    assert used == {("get", "nodes"), ("patch", "nodes"), ("list", "pods"), ("create", "pods/eviction")}
    lab.gpus.held = ""
    lab.pod("plugin", PLUGIN)
    lab.manager().reconcile()
    used |= {(verb, resource) for user, verb, _, resource in lab.cluster.used if user == "system:admin"}
    assert ("get", "daemonsets") in used


def test_files_of_services(tmp_path: Path) -> None:
    file = tmp_path / "clients.yaml"
    file.write_text("version: v1\nsystemd-services: [nvsm.service, dcgm.service]\n")
    assert parse_services(str(file)) == ("nvsm.service", "dcgm.service")
    for text in ("version: v1", "version: v1\nsystemd-services: ['a b']", "[", "version: v1\nsystemd: []"):
        file.write_text(text)
        with pytest.raises(SettingsError, match=str(file)):
            parse_services(str(file))


# real commands


@pytest.mark.root
def test_the_program_follows_the_label(work_directory: Path, lab: Lab) -> None:
    host = make_mig_host(work_directory / "host", 1, "h100")
    wanted = {"mine": {"3g.40gb": 2}, "other": {"1g.10gb": 7}}
    layouts = {name: [{"devices": "all", "mig-enabled": True, "mig-devices": each}] for name, each in wanted.items()}
    store = ClaimStore(str(work_directory / "kubelet/plugins/gpu.nvidia.com"))
    Path(store.directory).mkdir(parents=True)
    (work_directory / "config.yaml").write_text(yaml.safe_dump({"version": "v1", "mig-configs": layouts}))
    lab.cluster.write_kubeconfig(work_directory / "kubeconfig")
    environment = {
        **os.environ,
        "KUBECONFIG": str(work_directory / "kubeconfig"),
        "NODE_NAME": "n",
        "OCIGPU_CONFIG": str(host / "config.toml"),
        "CONFIG_FILE": str(work_directory / "config.yaml"),
        "OCIGPU_KUBELET_DIRECTORY": str(work_directory / "kubelet"),
    }
    words = ["mig-manager", "--host-root", "/", "--ocigpu", str(PROGRAMS / "ocigpu"), "--no-boot", "--no-cdi"]
    process = subprocess.Popen([PROGRAMS / "ocigpu", *words], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        wait_for("the unknown layout is refused", lambda: lab.label().get(STATE) == "failed", 250)
        assert "no layout 'new'; known: mine, other" in str(lab.annotation(REASON)).replace('"', "'")
        lab.set(labels={CONFIG: "mine"})
        wait_for("the layout is made", lambda: lab.label().get(STATE) == "success", 250)
        assert lab.label() == {CONFIG: "mine", STATE: "success"}
        assert names(layouts_of(host)[0]) == ["3g.40gb", "3g.40gb"]
        (uuid,) = layouts_of(host)[0].instances[0].uuids
        device = DraDevice("gpu-0-mig-3g40gb-9-0", "mig", "00000000:00:00.0", uuid, {}, {})
        record = ClaimRecord(ClaimRef("team", "uid", "half"), (Allotted("gpu", device),), done=True)
        with store.locked():
            store.write({"uid": record})
        lab.pod("half", gpus=1)  # its claim is another one
        lab.set(labels={CONFIG: "other"})
        wait_for("the claim is spared", lambda: f"claim team/half uses {uuid}" in str(lab.annotation(REASON)), 250)
        assert (lab.label()[STATE], names(layouts_of(host)[0])) == ("failed", ["3g.40gb", "3g.40gb"])
        with store.locked():
            store.write({})
        wait_for("the layout is made without another label", lambda: lab.label().get(STATE) == "success", 250)
        assert names(layouts_of(host)[0]) == ["1g.10gb"] * 7
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_the_hosts_tools_say_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="the host has no ocigpu"):
        HostTools(str(tmp_path)).mig("assert", "-c", "a")
    tools = HostTools("/", str(tmp_path / "none"))
    with pytest.raises(HostError, match="none"):
        tools.mig("assert", "-c", "a")
    tools = HostTools(str(tmp_path))
    tools.keep_for_boot("a", "text")
    tools.keep_for_boot("b", "")
    assert (tmp_path / "etc/ocigpu/mig.env").read_text() == "MIG_PARTED_SELECTED_CONFIG=b\n"
    assert (tmp_path / "etc/ocigpu/mig.yaml").read_text() == "text"
