"""MIG devices that are made for a claim: exactly those, whatever kills the driver, and nobody else's are touched."""

import ctypes
import fcntl
import io
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pynvml
import pytest
from dra_lab import DRIVER, NODE, Killed, Lab, add_claim, dra_driver, dra_kubelet, result
from kubernetes_lab import host
from mig_lab import layout, layouts_of, make_mig_host, mig
from support import requirements
from support.cluster import Cluster
from support.process import wait_for
from support.runtimes import container_id, run_container, script

from ocigpu.bundle.inject import inject
from ocigpu.cdi.registry import read_registry
from ocigpu.core.errors import HostError, RequestError
from ocigpu.core.facts import HostFacts, MigDevice
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia import mig as mig_program
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.gpus.nvidia.mig import alone, change_layouts, read_layouts
from ocigpu.gpus.nvidia.mig_layout import GpuInstance, GpuLayout, plan_back
from ocigpu.gpus.nvidia.nvml_process import nvml_place
from ocigpu.gpus.nvidia.nvml_verbs import VERBS
from ocigpu.kubernetes.dra.claims import ClaimRef
from ocigpu.kubernetes.dra.devices import DeviceOptions, DraDevice, DraNode, MigPlace, make_devices
from ocigpu.kubernetes.dra.effects import Effects, plan_steps
from ocigpu.kubernetes.dra.slices import Pool, make_slices
from ocigpu.kubernetes.dra.state import FILE, LOCK, ClaimStore
from ocigpu.sim.create import create_host
from ocigpu.system.proc import read_boot_id
from ocigpu.system.settings_file import read_settings

MIG, POOL = host("h100-8-mig"), Pool(DRIVER, NODE)
DYNAMIC = DeviceOptions(dynamic_mig=True)
HALF, ONE = "gpu-0-mig-3g40gb-9-4", "gpu-0-mig-1g10gb-19-0"


def whole(facts: Any, model: str, *instances: GpuInstance, mode: int = 0) -> DraNode:
    """A node with one GPU, and how it is cut."""
    gpu = facts.gpus[0]._replace(mig_enabled=bool(mode), mig_devices=())
    shape = layout(model, *instances, mode=mode)._replace(uuid=gpu.uuid, bus_id=gpu.bus_id)
    return DraNode(facts._replace(gpus=(gpu,)), layouts=(shape,))


def consumed(devices: tuple[DraDevice, ...]) -> dict[str, set[str]]:
    entries = [entry for part in make_slices(devices, POOL) for entry in part.get("devices", ())]
    return {entry["name"]: set(entry["consumesCounters"][0]["counters"]) for entry in entries}


def test_a_whole_gpu_and_what_could_be_made_of_it_share_counters() -> None:
    devices = make_devices(whole(MIG, "h100"), DYNAMIC)
    assert devices[0].name == "gpu-0"
    assert {each.kind for each in devices[1:]} == {"mig"}
    (shared,) = make_slices(devices, POOL)[0]["sharedCounters"]
    slices = {f"memory-slice-{number}" for number in range(8)}
    assert set(shared["counters"]) == {*slices, "media-engines"}
    found = consumed(devices)
    assert found["gpu-0"] == {*slices, "media-engines"}
    assert found["gpu-0-mig-7g80gb-0-0"] == slices
    assert found["gpu-0-mig-1g10gb-me-20-3"] == {"memory-slice-3", "media-engines"}
    device = next(each for each in devices if each.name == HALF)
    assert device.capacity["memorySlice7"] == "1"
    assert [each.name for each in make_devices(whole(MIG, "h100"))] == ["gpu-0"]


def test_a_gpu_whose_mode_needs_a_reset_is_offered_as_it_is() -> None:
    a100 = host("a100-8")
    assert [each.name for each in make_devices(whole(a100, "a100"), DYNAMIC)] == ["gpu-0"]
    cut = make_devices(whole(a100, "a100", mode=1), DYNAMIC)
    assert len(cut) == 7 + 7 + 4 + 3 + 2 + 1 + 1


def test_what_a_claim_has_made_stays_what_it_was_offered_as() -> None:
    gpu = next(gpu for gpu in MIG.gpus if gpu.mig_devices)
    mig_device = gpu.mig_devices[0]
    shape = layout("h100", GpuInstance(9, 4, (3,), mig_device.gpu_instance, (mig_device.uuid,)))
    gpu = gpu._replace(mig_devices=(mig_device,))
    node = DraNode(MIG._replace(gpus=(gpu,)), layouts=(shape._replace(uuid=gpu.uuid, bus_id=gpu.bus_id),))
    empty = DraNode(
        MIG._replace(gpus=(gpu._replace(mig_devices=()),)), layouts=(node.layouts[0]._replace(instances=()),)
    )
    assert make_devices(node, DYNAMIC, [MigPlace(gpu.bus_id, 9, 4)]) == make_devices(empty, DYNAMIC)
    foreign = make_devices(node, DYNAMIC)
    assert foreign[0].id == mig_device.uuid
    assert all(set(each.memory).isdisjoint(range(4, 8)) for each in foreign[1:])


def test_a_claim_changes_nothing_of_the_offer() -> None:
    """Counters keep a claim's MIG device and the whole GPU apart; slices that change make all schedulers begin anew."""
    before = make_slices(make_devices(whole(MIG, "h100"), DYNAMIC), POOL)
    node = whole(MIG, "h100", GpuInstance(9, 4, (3,), 1, ("MIG-made",)), mode=1)
    gpu = node.facts.gpus[0]._replace(mig_devices=(MigDevice(0, "MIG-made", "3g.40gb", 1, 0, 3, 4),))
    node = node._replace(facts=node.facts._replace(gpus=(gpu,)))
    place = MigPlace(gpu.bus_id, 9, 4)
    assert make_slices(make_devices(node, DYNAMIC, [place, MigPlace(gpu.bus_id)]), POOL) == before
    assert "gpu-0" not in consumed(make_devices(node, DYNAMIC, [place])), "somebody else has switched its mode on"
    foreign = make_devices(node, DYNAMIC, [MigPlace(gpu.bus_id)])
    assert "gpu" not in {each.kind for each in foreign}, "somebody else has made a device on it"


# on a simulated host, with its NVML


def ask_here(verb: str, _facts: HostFacts, _seconds: float, *words: str, parse: Any) -> Any:
    """Ask NVML in this process, instead of one that costs as much as all the rest."""
    with redirect_stdout(io.StringIO()) as answer:
        VERBS[verb](*words)
    return parse(json.loads(answer.getvalue()))


class MigHost(Lab):
    """A node with a whole GPU, whose NVML is asked in this process.

    ``moments`` are what is done, before any of which the driver can be killed.
    """

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = make_mig_host(directory / "host", 1, "h100")
        settings = read_settings(str(self.host / "config.toml"))
        self.moments: list[str] = []
        self.kill = -1
        facts = read_host_facts(settings)
        monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(nvml_place(facts).library))
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        monkeypatch.setattr("ocigpu.gpus.nvidia.mig.ask", ask_here)
        pynvml.nvmlInit()
        effects = Effects(settings, str(directory / "mps"), lambda *_, **__: None, self.read_again)
        for module, name in (
            ("ocigpu.gpus.nvidia.mig", "carry_out"),
            ("ocigpu.kubernetes.dra.prepare", "write_claim_spec"),
            ("ocigpu.kubernetes.dra.prepare", "remove_spec"),
            ("ocigpu.kubernetes.dra.state", "replace_path"),
        ):
            self._count(monkeypatch, module, name)
        super().__init__(
            directory / "lab", effects=effects.table, plan=plan_steps, settings=settings, devices=DYNAMIC._asdict()
        )
        self.node = DraNode(facts)
        self.read_again()

    def _count(self, monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
        real = getattr(__import__(module, fromlist=[name]), name)
        if name == "write_claim_spec":  # what is in it is looked at with the whole driver

            def real(path: Any, *_: Any) -> None:
                Path(path).write_text('{"devices": [1]}')

        def counted(*arguments: Any, **more: Any) -> Any:
            if name == "carry_out" and not arguments[1]:
                return None
            if self.kill == len(self.moments):
                raise Killed
            self.moments.append(name)
            return real(*arguments, **more)

        monkeypatch.setattr(f"{module}.{name}", counted)

    def read_again(self) -> None:
        """Read how the GPU is cut, and what of it is a MIG device in the facts."""
        assert self.node
        (gpu,), (shape,) = self.node.facts.gpus, read_layouts(self.node.facts)
        migs = [MigDevice(0, one.uuids[0], shape.name_of(one), one.gi, 0, 3, 4) for one in shape.instances]
        gpu = gpu._replace(mig_enabled=bool(shape.mode), mig_devices=tuple(migs))
        self.node = DraNode(self.node.facts._replace(gpus=(gpu,)), layouts=(shape,))

    def come_and_go(self, ref: ClaimRef) -> None:
        self.preparer.prepare(ref)
        self.preparer.unprepare(ref)

    @property
    def shape(self) -> GpuLayout:
        (gpu,) = layouts_of(self.host)
        return gpu._replace(instances=tuple(one._replace(gi=-1, uuids=()) for one in gpu.instances))

    @property
    def names(self) -> list[str]:
        gpu = self.shape
        return sorted(f"{gpu.name_of(one)}@{one.start}" for one in gpu.instances)


@pytest.fixture
def cut(work_directory: Path, monkeypatch: pytest.MonkeyPatch) -> MigHost:
    return MigHost(work_directory, monkeypatch)


@pytest.mark.root
def test_devices_are_made_for_a_claim_and_destroyed_with_it(cut: MigHost) -> None:
    before = cut.shape
    first = cut.add("first", result(HALF), result("gpu-0-mig-1g10gb-19-3", "small"))
    second = cut.add("second", result("gpu-0-mig-2g20gb-14-0"))
    cut.preparer.prepare(first)
    assert (cut.shape.mode, cut.names) == (1, ["1g.10gb@3", "3g.40gb@4"])
    answer = cut.preparer.prepare(second)
    assert [each.device for each in answer] == ["gpu-0-mig-2g20gb-14-0"]
    assert cut.preparer.prepare(first)
    with pytest.raises(RequestError, match="device gpu-0-mig-3g40gb-9-4 of the same GPU is in use by claim team/first"):
        cut.preparer.prepare(cut.add("third", result("gpu-0-mig-1g10gb-19-6")))
    cut.preparer.unprepare(first)
    assert (cut.shape.mode, cut.names) == (1, ["2g.20gb@0"])
    cut.preparer.unprepare(second)
    assert cut.shape == before
    assert (cut.specs, cut.preparer.held()) == ([], ())


@pytest.mark.rest
@pytest.mark.root
def test_the_whole_gpu_is_offered_beside_a_claims_part_and_given_after_it(cut: MigHost) -> None:
    def offered() -> tuple[DraDevice, ...]:
        view = cut.view()
        assert view
        return view.devices

    before = offered()
    part, gpu = cut.add("part", result(HALF)), cut.add("gpu", result("gpu-0"))
    cut.preparer.prepare(part)
    assert offered() == before
    with pytest.raises(RequestError, match="of the same GPU is in use by claim team/part"):
        cut.preparer.prepare(gpu)
    cut.preparer.unprepare(part)
    assert offered() == before
    assert cut.node
    assert not cut.node.facts.gpus[0].mig_enabled, "the node was read again"
    assert [each.device for each in cut.preparer.prepare(gpu)] == ["gpu-0"]


@pytest.mark.rest
@pytest.mark.root
def test_a_driver_that_is_killed_at_any_moment_leaves_nothing(cut: MigHost, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cut.shape
    ref = cut.add("uid", result(HALF))
    cut.preparer.prepare(ref)
    made = len(cut.moments)
    cut.preparer.unprepare(ref)
    every = [name.removeprefix("_").partition("_")[0] for name in cut.moments]
    assert every[:made] == ["replace", "carry", "carry", "write", "replace"], "the mode, then the device"
    assert every[made:] == ["remove", "carry", "replace"]
    monkeypatch.setattr(type(cut.preparer), "undo_if_possible", lambda *_: None)  # it is dead
    for moment in range(len(every)):
        cut.moments.clear()
        cut.kill = moment
        with pytest.raises(Killed):
            cut.come_and_go(ref)
        cut.kill = -1
        cut.read_again()
        cut.restart()
        if cut.preparer.held():  # it was prepared, and is given back when the kubelet asks again
            assert moment >= made
            cut.preparer.unprepare(ref)
        assert (cut.shape, cut.specs, cut.preparer.held()) == (before, [], ()), moment
        cut.read_again()


@pytest.mark.root
def test_what_somebody_else_has_cut_stays(cut: MigHost, capfd: pytest.CaptureFixture[str]) -> None:
    stale = cut.view()
    assert mig(cut.host, capfd, "apply", "-c", "all-3g.40gb")[0] == 0
    assert stale
    before = cut.shape
    ref = cut.add("uid", result(HALF))
    with pytest.raises(HostError, match=r"3g\.40gb at 4 is in its place and belongs to no claim"):
        cut.preparer.prepare(ref)
    cut.read_again()
    assert cut.preparer.prepare(ref), "it is a plain device now"
    cut.preparer.unprepare(ref)
    assert cut.shape == before
    view = cut.view()
    assert view
    assert not [each.name for each in view.devices if each.profile], "nothing is left to be made"


@pytest.mark.rest
@pytest.mark.root
def test_what_somebody_cuts_while_a_claim_is_prepared_stays(cut: MigHost, capfd: pytest.CaptureFixture[str]) -> None:
    """Even the very device that the claim has: whoever made it may be using it."""

    def plan_late(*arguments: Any) -> Any:
        steps = plan_steps(*arguments)
        assert mig(cut.host, capfd, "apply", "-c", "all-3g.40gb")[0] == 0
        return steps

    cut.options["plan"] = plan_late
    cut.restart()
    with pytest.raises(HostError, match=r"3g\.40gb at 4 is in its place and belongs to no claim"):
        cut.preparer.prepare(cut.add("uid", result(HALF)))
    assert (cut.shape.mode, cut.names, cut.preparer.held()) == (1, ["3g.40gb@0", "3g.40gb@4"], ())


@pytest.mark.rest
@pytest.mark.root
def test_what_the_driver_or_a_process_forbids_changes_nothing(cut: MigHost) -> None:
    before = cut.shape
    ref = cut.add("uid", result(HALF))
    load = cut.host / "load"
    load.write_text("process 0 4242 100 5\n")
    with pytest.raises(HostError, match="it cannot be changed while process 4242 uses it"):
        cut.preparer.prepare(ref)
    assert (cut.shape, cut.specs, cut.preparer.held()) == (before, [], ())
    load.unlink()
    cut.preparer.prepare(ref)
    (instance,) = layouts_of(cut.host)[0].instances
    load.write_text(f"process 0 4242 100 5 {instance.gi}\n")
    with pytest.raises(HostError, match="process 4242 uses MIG-"):
        cut.preparer.unprepare(ref)
    assert cut.names == ["3g.40gb@4"]
    assert cut.preparer.held(), "it is tried again"
    load.unlink()
    cut.preparer.unprepare(ref)
    assert cut.shape == before


@pytest.mark.rest
@pytest.mark.root
def test_a_driver_that_cannot_be_read_is_not_gone(cut: MigHost) -> None:
    """What was made is destroyed later: the next tenant would find it, and the record of it would be lost."""
    ref = cut.add("uid", result(HALF))
    cut.preparer.prepare(ref)
    assert cut.node
    (gpu,) = cut.node.facts.gpus
    slices = cut.options["effects"]["timeslice"]
    (record,) = cut.preparer.held()
    for gpus in ((), (gpu._replace(uuid="GPU-other", error="it has fallen off the bus"),)):
        cut.node = DraNode(HostFacts(gpus=gpus))
        with pytest.raises(HostError, match="its driver is loaded but reports no working GPU"):
            cut.preparer.unprepare(ref)
        with pytest.raises(HostError, match="reports no working GPU"):
            slices.undo(record, {"gpu": gpu.uuid}, cut.view())
        assert cut.preparer.held()
    shutil.rmtree(cut.host / "proc/driver/nvidia")
    slices.undo(record, {"gpu": gpu.uuid}, cut.view())
    cut.preparer.unprepare(ref)
    assert cut.preparer.held() == ()


def test_mig_devices_are_not_changed_without_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pod without the host's /run/ocigpu: whoever else changes them would not be noticed."""
    monkeypatch.setattr("ocigpu.system.store.SYSTEM_DIRECTORY", str(tmp_path / "none/ocigpu"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with pytest.raises(HostError, match="/run/ocigpu is missing or not root's alone") as caught:
        alone()
    assert caught.value.code == "OCIGPU-MIG-3"


@pytest.mark.rest
@pytest.mark.root
def test_devices_that_a_reset_has_destroyed_are_made_again(cut: MigHost) -> None:
    ref = cut.add("uid", result(HALF))
    answer = cut.preparer.prepare(ref)
    (gpu,) = layouts_of(cut.host)
    assert cut.node
    change_layouts(cut.node.facts, [gpu], lambda now: [plan_back(now[0], gpu._replace(instances=()))])
    cut.read_again()
    assert cut.names == []
    assert cut.preparer.prepare(ref) == answer
    assert cut.names == ["3g.40gb@4"]


# beside ``ocigpu mig``: claims are prepared long before a process uses what they have


@pytest.fixture
def kubelet_words(cut: MigHost) -> tuple[str, str]:
    """Options that tell ``ocigpu mig`` where the driver's directory is."""
    (cut.directory.parent / "plugins").symlink_to(".")
    cut.restart(read_boot_id())
    return "--kubelet-directory", str(cut.directory.parent)


ONES = ("-c", "all-1g.10gb")


@pytest.mark.root
def test_what_is_made_for_a_claim_is_spared_and_named(
    cut: MigHost, kubelet_words: tuple[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    cut.preparer.prepare(cut.add("uid", result(HALF), name="half"))
    (uuid,) = layouts_of(cut.host)[0].instances[0].uuids
    why = f"GPU 0: it would fit, but not beside the instances in use: claim team/half uses {uuid}"
    status, _, err = mig(cut.host, capfd, "apply", *ONES, *kubelet_words)
    assert (status, err.splitlines()[0]) == (1, f"ocigpu: OCIGPU-MIG-2: {why}")
    assert mig(cut.host, capfd, "plan", *ONES, *kubelet_words)[0] == 1
    assert cut.names == ["3g.40gb@4"]
    status, out, _ = mig(cut.host, capfd, "apply", "-c", "all-3g.40gb", *kubelet_words)
    assert (status, out.splitlines()[-1]) == (0, "kept: 1, made: 1; done")
    assert mig(cut.host, capfd, "apply", *ONES, "--force", *kubelet_words)[0] == 0, "who knows better says so"


@pytest.mark.root
@pytest.mark.parametrize("whose", ["another user's", "anybody's", "of an earlier boot"])
def test_claims_count_that_only_the_driver_can_have_written(
    cut: MigHost, kubelet_words: tuple[str, str], capfd: pytest.CaptureFixture[str], whose: str
) -> None:
    cut.preparer.prepare(cut.add("uid", result(HALF)))
    if whose == "another user's":
        os.chown(cut.directory, 65534, 65534)
    elif whose == "anybody's":
        cut.directory.chmod(0o777)
    else:
        ClaimStore(str(cut.directory), "earlier").write({each.claim.uid: each for each in cut.preparer.held()})
    assert mig(cut.host, capfd, "apply", *ONES, *kubelet_words)[0] == 0


@pytest.mark.root
def test_claims_that_are_not_understood_may_be_any(
    cut: MigHost, kubelet_words: tuple[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    (cut.directory / FILE).write_text("{}")
    status, _, err = mig(cut.host, capfd, "apply", *ONES, *kubelet_words)
    assert (status, err.splitlines()[0]) == (
        1,
        f"ocigpu: OCIGPU-DRA-5: {cut.directory.parent}/plugins/lab/{FILE}: it is not understood",
    )
    assert cut.names == []


@pytest.mark.root
def test_claims_of_nvidias_own_driver_are_spared(
    cut: MigHost,
    kubelet_words: tuple[str, str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its checkpoint, of either version, and its lock."""
    assert mig(cut.host, capfd, "apply", "-c", "all-3g.40gb")[0] == 0
    (gpu,) = layouts_of(cut.host)
    concrete = {"parentMinor": 0, "giId": 1, "ciId": 0, "migUUID": gpu.instances[0].uuids[0], "parentUUID": gpu.uuid}
    device = {"gpu": None, "mig": {"concrete": concrete, "device": {"DeviceName": "gpu-0-mig-3g40gb-9-0"}}}
    claim_of_v1 = {"preparedDevices": [{"devices": [device], "configState": {}}]}
    claim_of_v2 = {**claim_of_v1, "checkpointState": "PrepareCompleted", "name": "half", "namespace": "team"}
    v1: dict[str, Any] = {"preparedClaims": {"c1a2": claim_of_v1}}
    v2 = {"preparedClaims": {"c1a2": claim_of_v2, "c1a3": {"checkpointState": "PrepareStarted"}}}
    theirs = cut.directory.with_name("gpu.nvidia.com")
    theirs.mkdir()
    (theirs / "pu.lock").touch()
    kept = theirs / "checkpoint.json"
    for document, said in (
        ({"checksum": 1, "v1": v1, "v2": {**v2, "nodeBootID": read_boot_id()}}, "claim team/half uses MIG-"),
        ({"checksum": 1, "v1": v1}, "claim /c1a2 uses MIG-"),
        ([], "checkpoint.json: it is not understood"),
    ):
        kept.write_text(json.dumps(document))
        status, _, err = mig(cut.host, capfd, "apply", *ONES, *kubelet_words)
        assert (status, said in err) == (1, True), err
    assert cut.names == ["3g.40gb@0", "3g.40gb@4"]
    kept.write_text(json.dumps({"v1": v1, "v2": {**v2, "nodeBootID": "the boot before"}}))
    real, free = mig_program.carry_out, list[bool]()

    def meanwhile(*arguments: Any) -> None:
        with open(theirs / "pu.lock") as lock:
            free.append(lock_is_free(lock.fileno()))
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(mig_program, "carry_out", meanwhile)
        assert mig(cut.host, capfd, "apply", *ONES, *kubelet_words)[0] == 0
    assert free
    assert not any(free)


def lock_is_free(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@pytest.mark.rest
@pytest.mark.root
def test_no_claim_is_prepared_while_devices_are_cut(
    cut: MigHost,
    kubelet_words: tuple[str, str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plain device would be prepared between the look at the claims and its end."""
    assert mig(cut.host, capfd, "apply", "-c", "all-3g.40gb")[0] == 0
    cut.read_again()
    ref, said = cut.add("uid", result(HALF)), list[str]()
    monkeypatch.setattr("ocigpu.kubernetes.dra.state.LOCK_SECONDS", 0.0)
    real = mig_program.carry_out

    def meanwhile(*arguments: Any) -> None:
        with pytest.raises(HostError) as caught:
            cut.preparer.prepare(ref)
        said.append(caught.value.code)
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(mig_program, "carry_out", meanwhile)
        assert mig(cut.host, capfd, "apply", *ONES, *kubelet_words)[0] == 0
    assert said
    assert set(said) == {"OCIGPU-DRA-5"}


@pytest.mark.rest
@pytest.mark.root
def test_what_hooks_end_can_give_its_claims_back(
    cut: MigHost, kubelet_words: tuple[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Pods that a hook drains end only if the driver can unprepare their claims."""
    free = {"command": "flock", "args": ["-n", str(cut.directory / LOCK), "true"]}
    moments = ("apply-start", "pre-apply-mode", "pre-apply-config", "apply-exit")
    hooks = cut.host / "hooks.yaml"
    hooks.write_text(json.dumps({"version": "v1", "hooks": {moment: [free] for moment in moments}}))
    assert mig(cut.host, capfd, "apply", *ONES, "-k", str(hooks), *kubelet_words)[0] == 0
    cut.read_again()
    view = cut.view()
    assert view
    cut.preparer.prepare(cut.add("uid", result(view.devices[0].name), name="late"))
    status, _, err = mig(cut.host, capfd, "apply", "-c", "all-disabled", "-k", str(hooks), *kubelet_words)
    assert status == 1
    assert "MIG mode cannot change while claim team/late uses MIG-" in err


@pytest.mark.rest
@pytest.mark.root
def test_mig_apply_beside_a_driver_with_claims(session_directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With the real driver and the kubelet's protocol: a MIG device that was there, and a whole GPU."""
    with tempfile.TemporaryDirectory(prefix="m", dir=session_directory) as name, Cluster() as cluster:
        place = Path(name)
        create_host(str(place / "host"), 2, "h100", ("0:3g.40gb,1g.10gb",))
        words = ("--kubelet-directory", str(place / "k"))
        cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})
        config = f"--kubeconfig={cluster.write_kubeconfig(place / 'kubeconfig')}"
        with dra_kubelet(place / "k") as kubelet, dra_driver(place / "host/config.toml", place / "k", config) as driver:
            kubelet.find()
            driver.wait_for_log("published")
            before = layouts_of(place / "host")
            (part,) = [each for each in published(cluster) if "mig-3g40gb" in each]
            refs = [add_claim(cluster, "part", result(part)), add_claim(cluster, "whole", result("gpu-1"))]
            assert all("error" not in each for each in kubelet.prepare(DRIVER, refs).values())
            status, _, err = mig(place / "host", capfd, "apply", *ONES, *words)
            assert status == 1
            assert "GPU 0: it would fit, but not beside the instances in use: claim team/part uses MIG-" in err
            assert "GPU 1: MIG mode cannot change while claim team/whole uses it" in err
            assert layouts_of(place / "host") == before
            kubelet.unprepare(DRIVER, refs[:1])
            status, _, err = mig(place / "host", capfd, "apply", *ONES, *words)
            assert (status, "team/part" in err, "team/whole" in err) == (1, False, True)
            kubelet.unprepare(DRIVER, refs[1:])
            assert mig(place / "host", capfd, "apply", *ONES, *words)[0] == 0
            assert [len(gpu.instances) for gpu in layouts_of(place / "host")] == [7, 7]


@pytest.mark.rest
@pytest.mark.root
@pytest.mark.engine
def test_a_pods_mig_device_is_made_before_its_container_starts(
    session_directory: Path, make_bundle: Callable[..., Path], runtime_environment: dict[str, str]
) -> None:
    """With the real driver, the kubelet's protocol and runc; the driver is killed while the claim is prepared."""
    with tempfile.TemporaryDirectory(prefix="m", dir=session_directory) as name, Cluster() as cluster:
        place = Path(name)
        create_host(str(place / "host"), 1, "h100")
        settings = place / "host/config.toml"
        cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})
        config = cluster.write_kubeconfig(place / "kubeconfig")
        words = ("--dynamic-mig", f"--kubeconfig={config}")
        before = layouts_of(place / "host")
        with dra_kubelet(place / "k") as kubelet:
            with dra_driver(settings, place / "k", *words) as driver:
                kubelet.find()
                driver.wait_for_log("published")
                ref = add_claim(cluster, "half", result(HALF))
                (device,) = kubelet.prepare(DRIVER, [ref])[ref[1]]["devices"]
                edits = read_registry(Settings(cdi_spec_dirs=(f"{place}/cdi",))).resolve(device["cdi_device_ids"]).edits
                look = script(["nvidia-smi", "-L"], ["ls", "/dev/nvidia-caps"])
                bundle = make_bundle(look, edit=lambda document: inject(document, edits))
                runc = [str(requirements.find_program("runc"))]
                done = run_container(runc, bundle, container_id(), env=runtime_environment)
                assert done.returncode == 0, done.stderr
                listed, caps = done.stdout.split("@@0\n")[:2]
                (gpu,) = layouts_of(place / "host")
                assert [word.rstrip(")") for word in listed.split() if word.startswith("MIG-")] == [
                    *gpu.instances[0].uuids
                ]
                assert len(caps.split()) == 2
                assert driver.end(signal.SIGKILL) == -signal.SIGKILL
            with dra_driver(settings, place / "k", *words):
                given = {"result": {ref[1]: {}}}  # the kubelet asks until the next driver answers
                wait_for("the claim's end", lambda: kubelet.answer("unprepare", DRIVER, [ref]) == given)
                assert layouts_of(place / "host") == before
                wait_for("the whole GPU", lambda: "gpu-0" in published(cluster))


def published(cluster: Cluster) -> list[str]:
    slices = [each["spec"] for each in cluster.objects("ResourceSlice")]
    return [device["name"] for spec in slices for device in spec.get("devices", ())]
