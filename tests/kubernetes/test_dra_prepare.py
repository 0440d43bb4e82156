"""Claims are prepared and given back: once, whole, and undone by whoever comes after a driver that was killed."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from dra_lab import DRIVER, NODE, Killed, Lab, claim, opaque, result
from kubernetes_lab import host

from ocigpu.cdi.check import check_spec
from ocigpu.core.errors import HostError, OcigpuError, RequestError
from ocigpu.kubernetes.dra.claims import Allotted, ClaimRef
from ocigpu.kubernetes.dra.devices import DraNode
from ocigpu.kubernetes.dra.prepare import ClaimEffect, PreparedDevice
from ocigpu.kubernetes.dra.state import FILE, LOCK, ClaimStep, ClaimStore, find_stores

A100 = host("a100-8")


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def spec_of(lab: Lab, uid: str, family: str = "nvidia") -> dict[str, Any]:
    text = (lab.directory / f"cdi/k8s.{DRIVER}-claim_{uid}_{family}.json").read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def nodes_of(spec: dict[str, Any]) -> set[str]:
    edits = [spec["containerEdits"], *(each["containerEdits"] for each in spec["devices"])]
    return {node["path"] for edit in edits for node in edit.get("deviceNodes", ())}


def test_a_claim_is_its_gpus_and_no_others(lab: Lab) -> None:
    devices = lab.preparer.prepare(lab.add("uid-1", result("gpu-1"), result("gpu-3", "two")))
    assert devices == (
        PreparedDevice("gpu", NODE, "gpu-1", (f"k8s.{DRIVER}/claim=uid-1-gpu-1",)),
        PreparedDevice("two", NODE, "gpu-3", (f"k8s.{DRIVER}/claim=uid-1-gpu-3",)),
    )
    spec = spec_of(lab, "uid-1")
    assert not check_spec(spec).errors
    assert spec["kind"] == f"k8s.{DRIVER}/claim"
    assert [each["name"] for each in spec["devices"]] == ["uid-1-gpu-1", "uid-1-gpu-3"]
    paths = {gpu.minor: gpu.node.container_path for gpu in A100.gpus if gpu.node}
    own = {path for path in nodes_of(spec) if path in paths.values()}
    assert own == {paths[1], paths[3]}
    assert "NVIDIA_VISIBLE_DEVICES=void" in spec["containerEdits"]["env"]


def test_prepared_twice_it_is_the_same_without_the_api_server(lab: Lab) -> None:
    ref = lab.add("uid-1", result("gpu-1"))
    first = lab.preparer.prepare(ref)
    path = lab.directory / "cdi" / lab.specs[0]
    before = path.stat().st_ino
    lab.claims.clear()
    lab.restart()
    assert lab.preparer.prepare(ref) == first
    assert (path.stat().st_ino, lab.reads) == (before, 1)
    path.unlink()
    assert lab.preparer.prepare(ref) == first
    assert path.exists(), "what somebody has removed is written again"


@pytest.mark.parametrize(
    ("document", "code", "text"),
    [
        (None, "OCIGPU-DRA-1", "it was deleted"),
        (claim("other", result("gpu-0")), "OCIGPU-DRA-1", "it was replaced by another one"),
        ({**claim("uid"), "status": {}}, "OCIGPU-DRA-1", "it is not allocated"),
        ({**claim("uid"), "status": None}, "OCIGPU-DRA-1", "it is not allocated"),
        ({**claim("uid"), "status": {"allocation": {"devices": None}}}, "OCIGPU-DRA-1", "none of its devices"),
        (claim("uid", {**result("gpu-0"), "driver": "nic.example.com"}), "OCIGPU-DRA-1", "they are of nic.example.com"),
        (claim("uid", {**result("gpu-0"), "pool": "worker-2"}), "OCIGPU-DRA-1", "not of this node"),
        (claim("uid", result("gpu-77")), "OCIGPU-DRA-3", 'no device "gpu-77"'),
        (claim("uid", result("gpu-0"), config=[opaque("Nonsense")]), "OCIGPU-DRA-2", "kind"),
        (
            claim("uid", result("gpu-0", shareID="s1"), config=[opaque("GpuConfig", sharing={"strategy": "MPS"})]),
            "OCIGPU-DRA-2",
            "not shared by MPS",
        ),
        (
            claim(
                "uid",
                result("gpu-0", adminAccess=True),
                config=[opaque("GpuConfig", sharing={"strategy": "TimeSlicing"})],
            ),
            "OCIGPU-DRA-2",
            "access of an administrator",
        ),
    ],
)
def test_what_cannot_be_prepared_changes_nothing(lab: Lab, document: Any, code: str, text: str) -> None:
    lab.claims["uid"] = document
    with pytest.raises(OcigpuError) as caught:
        lab.preparer.prepare(ClaimRef("team", "uid", "uid"))
    assert caught.value.code == code
    assert text in caught.value.message
    assert lab.specs == []
    assert lab.preparer.held() == ()


def test_two_claims_never_have_one_device(lab: Lab) -> None:
    lab.preparer.prepare(lab.add("first", result("gpu-0"), name="training"))
    with pytest.raises(RequestError, match="device gpu-0 is in use by claim team/training"):
        lab.preparer.prepare(lab.add("second", result("gpu-0")))
    admin = lab.add("third", result("gpu-0", adminAccess=True))
    assert lab.preparer.prepare(admin)[0].device == "gpu-0"
    lab.preparer.unprepare(ClaimRef("team", "first", "training"))
    assert lab.preparer.prepare(lab.add("second", result("gpu-0")))
    assert [name.split("_")[1] for name in lab.specs] == ["second", "third"]


def test_claims_share_a_device_by_their_shares(tmp_path: Path) -> None:
    lab = Lab(tmp_path, devices={"shares": "4"})
    (one,) = lab.preparer.prepare(lab.add("one", result("gpu-0", shareID="s1")))
    lab.preparer.prepare(lab.add("two", result("gpu-0", shareID="s2")))
    assert one.share == "s1"
    with pytest.raises(RequestError, match="in use by"):
        lab.preparer.prepare(lab.add("whole", result("gpu-0")))


def test_an_alternative_is_answered_by_its_request(lab: Lab) -> None:
    (device,) = lab.preparer.prepare(lab.add("uid-1", result("gpu-0", "any/large")))
    assert device.request == "any"


def test_giving_back_what_nobody_knows_is_no_error(lab: Lab) -> None:
    lab.node = None
    lab.preparer.unprepare(ClaimRef("team", "unknown", "x"))
    lab.preparer.unprepare(ClaimRef("", "../../etc", "\n"))
    assert lab.reads == 0


def test_after_a_reboot_nothing_is_prepared(lab: Lab) -> None:
    ref = lab.add("uid-1", result("gpu-1"))
    lab.preparer.prepare(ref)
    foreign = lab.directory / "cdi/nvidia.com-gpu.json"
    foreign.write_text("{}")
    lab.node = None
    lab.restart("boot-2")
    assert lab.specs == [foreign.name]
    assert any("the machine was restarted: 1 earlier claims" in line for line in lab.logged)
    lab.preparer.unprepare(ref)
    lab.node = DraNode(A100)
    assert lab.preparer.prepare(ref)


def test_without_a_driver_claims_are_given_back(lab: Lab) -> None:
    ref = lab.add("uid-1", result("gpu-1"))
    lab.preparer.prepare(ref)
    lab.node = DraNode()
    lab.preparer.unprepare(ref)
    assert lab.specs == []
    with pytest.raises(HostError, match='no device "gpu-1"'):
        lab.preparer.prepare(ref)


def test_a_state_that_is_not_understood_is_kept_aside(lab: Lab) -> None:
    lab.preparer.prepare(lab.add("uid-1", result("gpu-1")))
    (lab.directory / FILE).write_bytes(b"{}\n00000000")
    assert (lab.preparer.held(), lab.preparer.made_places()) == ((), set())  # these say nothing, and move nothing
    lab.restart()
    assert any("cannot be parsed: moved to" in line for line in lab.logged)
    assert (lab.directory / f"{FILE}.bad").exists()
    assert lab.specs == []
    assert lab.preparer.held() == ()


def test_a_later_versions_state_is_understood(lab: Lab) -> None:
    from ocigpu.system.store import seal, unseal

    ref = lab.add("uid-1", result("gpu-1"), config=[opaque("GpuConfig", sharing={"strategy": "TimeSlicing"})])
    first = lab.preparer.prepare(ref)
    path = lab.directory / FILE
    data = json.loads(unseal(path.read_bytes()))
    data["later"] = data["claims"]["uid-1"]["later"] = data["claims"]["uid-1"]["devices"][0]["later"] = 1
    data["claims"]["uid-1"]["devices"][0]["config"]["later"] = 1
    path.write_bytes(seal(json.dumps(data).encode()))
    lab.restart()
    assert lab.preparer.prepare(ref) == first
    assert lab.preparer.held()[0].devices[0].config.strategy == "TimeSlicing"


class Things:
    """Effects whose every step may fail or be the driver's last."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.journal: list[str] = []
        self.fails = self.kills = self.stuck = ""

    def effects(self) -> dict[str, ClaimEffect]:
        return {"thing": ClaimEffect(self.do, self.undo)}

    def plan(self, *_: Any) -> list[ClaimStep]:
        return [ClaimStep("thing", {"name": name}) for name in ("bind", "power")]

    def do(self, _record: Any, arguments: dict[str, str], _view: Any) -> None:
        name = arguments["name"]
        self.journal.append(name)
        if self.kills == f"before {name}":
            raise Killed
        self.done.append(name)
        if self.kills == f"after {name}":
            raise Killed
        if self.fails == name:
            raise HostError("OCIGPU-DRA-3", f"{name} does not work")

    def undo(self, _record: Any, arguments: dict[str, str], _view: Any) -> None:
        name = arguments["name"]
        if self.stuck == name:
            raise HostError("OCIGPU-DRA-3", f"{name} is in use by process 17")
        self.journal.append(f"un{name}")
        if name in self.done:
            self.done.remove(name)


@pytest.fixture
def things() -> Things:
    return Things()


@pytest.fixture
def stepwise(tmp_path: Path, things: Things) -> Lab:
    return Lab(tmp_path, effects=things.effects(), plan=things.plan)


def test_steps_are_undone_in_reverse_when_one_fails(stepwise: Lab, things: Things) -> None:
    ref = stepwise.add("uid-1", result("gpu-1"))
    things.fails = "power"
    with pytest.raises(HostError, match="power does not work"):
        stepwise.preparer.prepare(ref)
    assert things.journal == ["bind", "power", "unpower", "unbind"]
    assert (stepwise.preparer.held(), stepwise.specs) == ((), [])
    things.fails = ""
    assert stepwise.preparer.prepare(ref)
    assert things.done == ["bind", "power"]
    stepwise.preparer.unprepare(ref)
    assert (things.done, stepwise.specs) == ([], [])


@pytest.mark.parametrize("moment", ["before bind", "after bind", "before power", "after power"])
def test_a_killed_driver_is_undone_by_the_next(
    stepwise: Lab, things: Things, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = stepwise.add("uid-1", result("gpu-1"))
    things.kills = moment
    with monkeypatch.context() as patch:
        patch.setattr(type(stepwise.preparer), "undo_if_possible", lambda *_: None)  # it is dead
        with pytest.raises(Killed):
            stepwise.preparer.prepare(ref)
    things.kills = ""
    stepwise.restart()
    assert (things.done, stepwise.preparer.held(), stepwise.specs) == ([], (), [])
    assert stepwise.preparer.prepare(ref)
    assert things.done == ["bind", "power"]


def test_what_is_still_in_use_is_given_back_when_it_no_longer_is(stepwise: Lab, things: Things) -> None:
    ref = stepwise.add("uid-1", result("gpu-1"))
    stepwise.preparer.prepare(ref)
    things.stuck = "bind"
    with pytest.raises(HostError, match="in use by process 17"):
        stepwise.preparer.unprepare(ref)
    assert stepwise.specs == [], "nobody can start another container with it"
    with pytest.raises(RequestError, match="in use by claim team/uid-1"):
        stepwise.preparer.prepare(stepwise.add("uid-2", result("gpu-1")))
    stepwise.restart()
    things.stuck = ""
    stepwise.preparer.unprepare(ref)
    assert (things.done, stepwise.preparer.held()) == ([], ())
    assert things.journal.count("unpower") == 1


@pytest.mark.parametrize(
    "now",
    [
        None,
        claim("another", result("gpu-1"), name="uid-1"),
        {**claim("uid-1", result("gpu-1")), "status": {}},
        claim("uid-1", {**result("gpu-1"), "pool": "worker-2"}),
    ],
)
def test_claims_that_are_gone_for_a_while_are_given_back(stepwise: Lab, things: Things, now: Any) -> None:
    """Also after a start of the driver, which knows only what it has written down."""
    ref, other = stepwise.add("uid-1", result("gpu-1")), stepwise.add("uid-2", result("gpu-2"))
    before = stepwise.claims["uid-1"]
    stepwise.preparer.prepare(ref)
    stepwise.preparer.prepare(other)
    stepwise.restart()
    sweep = stepwise.preparer.sweep_vanished
    assert not sweep(0.0, 60.0)
    stepwise.claims["uid-1"] = now
    assert sweep(100.0, 60.0), "its pod may be ending"
    stepwise.claims["uid-1"] = before
    assert not sweep(150.0, 60.0)
    stepwise.claims["uid-1"] = now
    assert sweep(200.0, 60.0)
    assert len(stepwise.preparer.held()) == 2
    things.stuck = "bind"
    assert not sweep(260.0, 60.0)
    assert len(stepwise.preparer.held()) == 2, "in use by process 17"
    things.stuck = ""
    assert not sweep(560.0, 60.0)
    assert [each.claim for each in stepwise.preparer.held()] == [other]
    assert [name.split("_")[1] for name in stepwise.specs] == ["uid-2"]


def test_a_claim_that_is_gone_keeps_what_a_pod_still_has(stepwise: Lab) -> None:
    """Whoever may delete a claim would otherwise take a GPU from a running container, and the next claim got it."""
    listing: dict[str, Any] = {"answer": HostError("OCIGPU-DRA-3", "ask the kubelet for its pods: no answer")}

    def listed() -> Any:
        if isinstance(listing["answer"], HostError):
            raise listing["answer"]
        return listing["answer"]

    stepwise.options["listed"] = listed
    stepwise.restart()
    stepwise.preparer.prepare(stepwise.add("uid-1", result("gpu-1"), result("gpu-2")))
    sweep = stepwise.preparer.sweep_vanished
    assert not sweep(0.0, 60.0), "the kubelet is asked only when a claim is gone"
    stepwise.claims["uid-1"] = None
    assert sweep(100.0, 60.0)
    with pytest.raises(HostError, match="no answer"):
        sweep(160.0, 60.0)
    listing["answer"] = {("team", "uid-1", "gpu-2")}
    assert not sweep(220.0, 60.0)
    assert stepwise.preparer.held()
    assert stepwise.logged[-1] == "claim team/uid-1: it is gone, and a pod still has its devices"
    listing["answer"] = {("team", "uid-1", "gpu-3"), ("other", "uid-1", "gpu-1"), ("team", "uid-2", "gpu-1")}
    assert not sweep(520.0, 60.0)
    assert not stepwise.preparer.held()


def test_while_the_api_server_is_away_no_claim_is_gone(lab: Lab) -> None:
    def away() -> None:
        raise HostError("OCIGPU-KUBE-5", "API server: no route to host")

    lab.preparer.prepare(lab.add("uid-1", result("gpu-1")))
    lab.claims["uid-1"] = None
    assert lab.preparer.sweep_vanished(0.0, 60.0)
    lab.claims["uid-1"] = away
    with pytest.raises(HostError, match="no route"):
        lab.preparer.sweep_vanished(300.0, 60.0)
    assert lab.preparer.held()


def test_giving_back_waits_for_no_api_server(lab: Lab) -> None:
    """Ten claims that wait for it would keep a pod's end for longer than the kubelet waits."""
    ours = lab.add("uid-1", result("gpu-1"))
    lab.preparer.prepare(ours)
    asked, answers = threading.Event(), threading.Event()

    def slowly() -> Any:
        asked.set()
        answers.wait(60)
        return claim("uid-2", result("gpu-2"))

    lab.claims["uid-2"] = slowly
    with ThreadPoolExecutor(2) as pool:
        try:
            waiting = pool.submit(lab.preparer.prepare, ClaimRef("team", "uid-2", "uid-2"))
            assert asked.wait(60)
            pool.submit(lab.preparer.unprepare, ours).result(30)
            assert not waiting.done()
        finally:
            answers.set()
        assert waiting.result(60)
    assert [each.claim.uid for each in lab.preparer.held()] == ["uid-2"]


def test_a_claim_that_is_given_back_while_it_is_asked_for_again_is_read(lab: Lab) -> None:
    ref = lab.add("uid-1", result("gpu-1"))
    lab.preparer.prepare(ref)
    lab.preparer.store, real = EmptiedStore(lab), lab.preparer.store
    assert lab.preparer.prepare(ref)
    assert (lab.preparer.store, lab.reads) == (real, 2)


class EmptiedStore:
    """The store of a preparer at a moment after which another driver gives everything back."""

    def __init__(self, lab: Lab) -> None:
        self._lab, self._real = lab, lab.preparer.store

    def read(self) -> Any:
        found = self._real.read()
        self._lab.preparer.store = self._real
        self._lab.preparer.unprepare(ClaimRef("team", "uid-1", "uid-1"))
        return found


def test_a_disk_that_is_full_prepares_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: Any) -> None:
        raise HostError("OCIGPU-DRA-5", "No space left on device")

    monkeypatch.setattr(ClaimStore, "write", full)
    with pytest.raises(HostError, match="No space left"):
        lab.preparer.prepare(lab.add("uid-1", result("gpu-1")))
    assert lab.specs == []


def test_mig_devices_of_a_gpu_go_to_different_claims(tmp_path: Path) -> None:
    facts = host("h100-8-mig")
    lab = Lab(tmp_path, facts)
    view = lab.view()
    assert view
    migs = [each for each in view.devices if each.kind == "mig"]
    pair = [each for each in migs if each.board == migs[0].board][:2]
    for number, each in enumerate(pair):
        lab.preparer.prepare(lab.add(f"uid-{number}", result(each.name)))
    caps = [{path for path in nodes_of(spec_of(lab, f"uid-{number}")) if "nvidia-cap" in path} for number in range(2)]
    assert len(caps[0]) == len(caps[1]) == 2
    assert not caps[0] & caps[1]


def test_records_survive_the_file(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.preparer.prepare(lab.add("uid-1", result("gpu-1", shareID="s")))
    (record,) = ClaimStore(str(tmp_path), "boot-1").read()[0].values()
    (device,) = record.devices
    assert isinstance(device, Allotted)
    assert (device.device.name, device.device.id, device.share) == ("gpu-1", A100.gpus[1].uuid, "s")


@pytest.mark.root
def test_claims_count_where_only_root_can_have_written_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, owner, mode in (("root", 0, 0o755), ("open", 0, 0o777), ("foreign", 12345, 0o755)):
        directory = tmp_path / name
        directory.mkdir()
        (directory / LOCK).touch()
        directory.chmod(mode)
        os.chown(directory, owner, 0)
    assert [Path(each.directory).name for each in find_stores(str(tmp_path))] == ["root"]
    monkeypatch.setattr(os, "geteuid", lambda: 54321)  # root's word counts for whoever asks
    assert [Path(each.directory).name for each in find_stores(str(tmp_path))] == ["root"]
