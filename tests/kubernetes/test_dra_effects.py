"""What is done for a claim on the node: time slices, control daemons of MPS, GPUs that virtual machines still have."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from dra_lab import DRIVER, Lab, opaque, result
from kubernetes_lab import host
from mps_lab import make_mps_host
from support.driverless import holding, make_driverless
from support.products import one_in

from ocigpu.core.errors import HostError, RequestError
from ocigpu.core.settings import Settings
from ocigpu.gpus.vfio.facts import read_vfio_facts
from ocigpu.kubernetes.dra.claims import Allotted, mps_place
from ocigpu.kubernetes.dra.configs import DeviceConfig
from ocigpu.kubernetes.dra.devices import DraNode, make_devices
from ocigpu.kubernetes.dra.effects import Effects, mps_commands, plan_steps
from ocigpu.kubernetes.dra.node import read_dra_node
from ocigpu.kubernetes.node.vfio import vfio_names
from ocigpu.system.module_process import ModuleProcess
from ocigpu.system.settings_file import read_settings

A100 = host("a100-8")
GPUS = make_devices(DraNode(A100))


def silent(*_: Any, **__: Any) -> None:
    """A log for nobody."""


def test_limits_of_mps_by_uuid_number_and_for_all() -> None:
    pinned = {A100.gpus[0].uuid: 1024, "1": 2048, "default": 4096}
    config = DeviceConfig("GpuConfig", "MPS", percentage=30, pinned=pinned)
    allotted = [Allotted("gpu", device, config) for device in GPUS[:3]]
    assert mps_commands(allotted, A100) == (
        "set_default_device_pinned_mem_limit 0 1024M",
        "set_default_device_pinned_mem_limit 1 2048M",
        "set_default_device_pinned_mem_limit 2 4096M",
        "set_default_active_thread_percentage 30",
    )
    unlimited = [allotted[0]._replace(config=DeviceConfig("GpuConfig", "MPS"))]
    assert mps_commands(unlimited, A100) == ("set_default_active_thread_percentage 100",)


def test_devices_with_one_configuration_have_one_daemon(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    view = lab.view()
    assert view
    one, two = DeviceConfig("GpuConfig", "MPS"), DeviceConfig("GpuConfig", "MPS", percentage=50)
    allotted = [Allotted("gpu", device, config) for device, config in zip(GPUS, (one, two, one), strict=False)]
    steps = plan_steps(allotted, view)
    assert [step.effect for step in steps] == ["mps", "mps"]
    places = [mps_place("uid", step.arguments["group"], allotted) for step in steps]
    assert places == ["claims/uid-0", "claims/uid-1"]
    admin = [each._replace(admin=True) for each in allotted]
    assert plan_steps(admin, view) == ()
    mig = [allotted[0]._replace(device=GPUS[0]._replace(kind="mig"))]
    with pytest.raises(RequestError, match="MPS cannot share MIG devices"):
        plan_steps(mig, view)


@pytest.mark.root
def test_a_gpu_that_a_machine_still_has_is_not_given_back(tmp_path: Path) -> None:
    roots = make_driverless(tmp_path / "host", 2)
    settings = Settings(simulation_root=str(tmp_path / "host"))
    effects = Effects(settings, str(tmp_path / "mps"), silent)
    lab = Lab(tmp_path / "lab", settings=settings, effects=effects.table, plan=plan_steps)
    lab.node = DraNode(vfio=read_vfio_facts(roots))
    gpu = next(iter(vfio_names(lab.node.vfio)))
    ref = lab.add("vm", result(gpu), config=[opaque("VfioDeviceConfig")])
    lab.preparer.prepare(ref)
    assert lab.specs == [f"k8s.{DRIVER}-claim_vm_vfio.json"]
    text = (lab.directory / "cdi" / lab.specs[0]).read_text()
    path = next(path for path in (tmp_path / "host/dev/vfio").iterdir() if f'"/dev/vfio/{path.name}"' in text)
    with holding(str(path)) as pid:
        with pytest.raises(HostError, match=rf"still open in process {pid} \(sleep\)"):
            lab.preparer.unprepare(ref)
        lab.restart()
        with pytest.raises(RequestError, match="in use by claim team/vm"):
            lab.preparer.prepare(lab.add("next", result(gpu)))
    lab.preparer.unprepare(ref)
    assert lab.preparer.held() == ()
    assert lab.preparer.prepare(lab.add("next", result(gpu)))


def slices(interval: str) -> list[dict[str, Any]]:
    sharing = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": interval}}
    return [opaque("GpuConfig", sharing=sharing)]


@pytest.mark.root
def test_shares_of_a_gpu_have_one_length_of_time_slices(session_directory: Path, tmp_path: Path) -> None:
    """It is the GPU's: the last claim's would count for all, and the first one's end would end it for all."""
    directory = session_directory / "dra-mps"
    if not (directory / "config.toml").exists():
        make_mps_host(directory)
    settings = read_settings(str(directory / "config.toml"))
    effects = Effects(settings, str(tmp_path / "mps"), silent)
    lab = Lab(tmp_path, settings=settings, effects=effects.table, plan=plan_steps, devices={"shares": "4"})
    lab.node = read_dra_node(settings).node
    now = (directory / "timeslice0").read_text
    one, two = (lab.add(name, result("gpu-0", shareID=name), config=slices("Long")) for name in ("one", "two"))
    lab.preparer.prepare(one)
    lab.preparer.prepare(two)
    with pytest.raises(RequestError, match=r"gpu-0 has time slices of another length: Long, for claim team/(one|two)"):
        lab.preparer.prepare(lab.add("short", result("gpu-0", shareID="short"), config=slices("Short")))
    lab.preparer.prepare(lab.add("plain", result("gpu-0", shareID="plain")))
    twice = lab.add("twice", result("gpu-1", "a", shareID="a"), result("gpu-1", "b", shareID="b"))
    lab.claims["twice"]["status"]["allocation"]["devices"]["config"] = [
        {**slices(interval)[0], "requests": [name]} for name, interval in (("a", "Short"), ("b", "Medium"))
    ]
    with pytest.raises(RequestError, match="time slices of another length: Short, for this claim"):
        lab.preparer.prepare(twice)
    assert now() == "3\n"
    lab.preparer.unprepare(one)
    assert now() == "3\n", "another claim has it so"
    lab.preparer.unprepare(two)
    assert now() == "0\n"
    assert lab.preparer.prepare(lab.add("short", result("gpu-0", shareID="short"), config=slices("Short")))


@pytest.mark.rest
@pytest.mark.root
@pytest.mark.parametrize("fault", one_in(2, ["dies", "refuses-limits"]))
def test_a_control_daemon_that_does_not_start_leaves_nothing(
    session_directory: Path, fault: str, tmp_path: Path
) -> None:
    directory = session_directory / "dra-mps"
    simulated = directory / "config.toml"
    if not simulated.exists():
        make_mps_host(directory)
    settings = read_settings(str(simulated))
    effects = Effects(settings, str(tmp_path / "mps"), silent)
    lab = Lab(tmp_path, settings=settings, effects=effects.table, plan=plan_steps)
    lab.node = read_dra_node(settings).node
    (directory / "usr/bin/mps-faults").write_text(fault)
    ref = lab.add("uid", result("gpu-0"), config=[opaque("GpuConfig", sharing={"strategy": "MPS"})])
    with pytest.raises(HostError, match="MPS"):
        lab.preparer.prepare(ref)
    assert (lab.specs, lab.preparer.held()) == ([], ())
    assert list((tmp_path / "mps/claims").iterdir()) == []
    (directory / "usr/bin/mps-faults").unlink()
    first = lab.preparer.prepare(ref)
    lab.preparer.resume("mps")
    ((key, child),) = effects.children.items()
    child.child.kill()  # and the control daemon with it
    child.child.wait()
    assert lab.preparer.prepare(ref) == first
    assert effects.children[key].is_running(), "the next container finds one"
    mode = directory / "compute-mode.0"
    assert mode.read_text() == "3"
    effects.children[key].child.kill()
    lab.preparer.unprepare(ref)
    assert mode.read_text() == "0", "the next tenant's GPU is for more than one process"
    lab.preparer.prepare(ref)
    effects.close()
    lab.restart()
    lab.preparer.resume("mps")
    lab.preparer.unprepare(ref)
    assert list((tmp_path / "mps/claims").iterdir()) == []


class StuckChild:
    """A process that is stuck in the kernel: no signal ends it."""

    stdin = stdout = stderr = None
    returncode: int | None = None
    pid = 0

    def kill(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "nobody waits for ever"
        raise subprocess.TimeoutExpired("stuck", timeout)


def test_a_control_daemons_process_that_is_stuck_in_the_driver_is_left_alone() -> None:
    child: Any = StuckChild()
    process = ModuleProcess()
    process.child = child
    assert process.close(1) is None
    assert child.returncode == -9
