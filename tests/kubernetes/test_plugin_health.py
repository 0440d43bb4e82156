"""Devices that fail and recover while the plugin runs, and NVML that does not answer."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from plugin_lab import GPU, MIG_1G, MIG_3G, Kubelet, Plugin, kubelet, plugin
from support import requirements
from support.process import wait_for
from support.product import SimulatedHost, make_simulated_host

from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.system.settings_file import read_settings

pytestmark = pytest.mark.root


class Lab(NamedTuple):
    kubelet: Kubelet
    plugin: Plugin
    host: SimulatedHost

    def fault(self, text: str) -> None:
        """Put faults into the host; "" takes all away."""
        path = self.host.directory / "faults"
        new = path.with_name("faults.new")
        new.write_text(text)
        new.rename(path)


@contextmanager
def make_lab(directory: Path, mig: Sequence[str], words: Sequence[str], variables: dict[str, str]) -> Iterator[Lab]:
    requirements.require(requirements.programs("gcc"))
    directory.mkdir(exist_ok=True)
    host = make_simulated_host(directory / "host", 2, mig)
    with kubelet(directory / "dp") as kubelets, plugin(host.settings, directory / "dp", *words, **variables) as running:
        yield Lab(kubelets, running, host)


@pytest.fixture(scope="module")
def plain(session_directory: Path) -> Iterator[Lab]:
    """A node with two GPUs."""
    with make_lab(session_directory / "plugin-health", (), (), {}) as made:
        yield made


@pytest.fixture
def lab(request: pytest.FixtureRequest, work_directory: Path) -> Iterator[Lab]:
    """The plain node, as it was at first; with a parameter one of its own."""
    if hasattr(request, "param"):
        with make_lab(work_directory, *request.param) as made:
            yield made
        return
    made = request.getfixturevalue("plain")
    made.kubelet.expect(gpu=(2, 2))
    made.plugin.forget_log()
    yield made
    made.fault("")
    made.kubelet.expect(gpu=(2, 2))


MIG: Any = (("0:3g.20gb,1g.5gb",), ("--mig-strategy=mixed",), {})
PICKY: Any = ((), (), {"DP_DISABLE_HEALTHCHECKS": "79,what"})


def unhealthy(lab: Lab, resource: str = GPU) -> list[str]:
    return [id_ for id_, health in lab.kubelet.devices(resource).items() if health != "Healthy"]


def test_a_lost_gpu_takes_nothing_from_the_others_and_returns(lab: Lab) -> None:
    lab.kubelet.expect(gpu=(2, 2))
    lab.fault("lost 1\n")
    lab.kubelet.expect(gpu=(2, 1))
    assert unhealthy(lab) == [lab.host.gpus[1]]
    refused = lab.kubelet.answer("allocate", GPU, [lab.host.gpus[1]])["error"]
    assert refused.startswith("FAILED_PRECONDITION: OCIGPU-KUBE-2")
    assert "lost" in refused
    assert lab.kubelet.prefer(GPU, list(lab.host.gpus), [], 1) == [lab.host.gpus[0]]
    assert lab.kubelet.admit("pod", "main", {GPU: 1})["envs"] == {"NVIDIA_VISIBLE_DEVICES": lab.host.gpus[0]}
    lab.fault("")
    lab.kubelet.expect(gpu=(2, 2))
    lab.plugin.wait_for_log(f"{lab.host.gpus[1]} is healthy again")


@pytest.mark.rest
def test_a_gpu_whose_node_is_missing_is_not_called_lost(lab: Lab) -> None:
    """The doctor says the same, and nobody replaces the GPU."""
    lab.kubelet.expect(gpu=(2, 2))
    node = lab.host.directory / "dev/nvidia0"
    aside = node.with_name("aside")
    node.rename(aside)
    lab.kubelet.expect(gpu=(2, 1))
    assert unhealthy(lab) == [lab.host.gpus[0]]
    lab.plugin.wait_for_log(f"{lab.host.gpus[0]} is unhealthy: device nodes are missing: /dev/nvidia0")
    assert "device nodes are missing" in lab.kubelet.answer("allocate", GPU, [lab.host.gpus[0]])["error"]
    aside.rename(node)
    lab.kubelet.expect(gpu=(2, 2))


def watching(lab: Lab) -> int:
    """Return the process that waits for events, once there is one that has begun to."""
    found: list[int] = []

    def look() -> bool:
        children = Path(f"/proc/{lab.plugin.child.pid}/task/{lab.plugin.child.pid}/children").read_text().split()
        with suppress(FileNotFoundError, ProcessLookupError):  # one of them has just ended
            found[:] = [int(pid) for pid in children if b"watch-events" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            return any("libnvidia-ml" in Path(f"/proc/{pid}/maps").read_text() for pid in found)
        return False

    wait_for("the process that waits for events", look)
    return found[0]


def report(lab: Lab, line: str) -> None:
    """Add the event until somebody waits for events and has seen it."""
    watching(lab)
    path = lab.host.directory / "faults"
    text = path.read_text() if path.exists() else ""
    before = sum("XID" in message for message in lab.plugin.log)

    def seen() -> bool:
        nonlocal text
        text += f"xid {line}\n"
        lab.fault(text)
        try:
            wait_for("the event", lambda: sum("XID" in message for message in lab.plugin.log) > before, 1.0)
        except AssertionError:
            return False
        return True

    wait_for("an event", seen)


def test_an_xid_makes_a_gpu_unhealthy_for_a_while(lab: Lab) -> None:
    lab.kubelet.expect(gpu=(2, 2))
    report(lab, "1 79")
    lab.plugin.wait_for_log(f"{lab.host.gpus[1]} is unhealthy: XID 79")
    lab.plugin.wait_for_log(f"{lab.host.gpus[1]} is healthy again")
    lab.kubelet.expect(gpu=(2, 2))
    assert not any(lab.host.gpus[0] in line for line in lab.plugin.log)


@pytest.mark.rest
@pytest.mark.parametrize("lab", [PICKY], indirect=True, ids=["disabled"])
def test_an_xid_that_means_nothing(lab: Lab) -> None:
    lab.kubelet.expect(gpu=(2, 2))
    report(lab, "1 79")
    lab.plugin.wait_for_log("does not affect its health")
    lab.plugin.wait_for_log('"what" ignored: it is not an XID')
    assert not any("is unhealthy" in line for line in lab.plugin.log)


@pytest.mark.rest
@pytest.mark.parametrize("lab", [MIG], indirect=True, ids=["mig"])
def test_an_xid_of_an_instance_is_about_that_mig_device_and_one_of_a_gpu_about_all(lab: Lab) -> None:
    lab.kubelet.expect(gpu=(1, 1), mig_3g=(1, 1), mig_1g=(1, 1))
    (wide,), (small,) = lab.kubelet.devices(MIG_3G), lab.kubelet.devices(MIG_1G)
    devices = {
        mig.uuid: mig for gpu in read_host_facts(read_settings(str(lab.host.settings))).gpus for mig in gpu.mig_devices
    }
    report(lab, f"0 48 {devices[small].gpu_instance} {devices[small].compute_instance}")
    lab.plugin.wait_for_log(f"{small} is unhealthy: XID 48")
    lab.plugin.wait_for_log(f"{small} is healthy again")
    assert not any(wide in line for line in lab.plugin.log)
    report(lab, "0 95")
    for uuid in (wide, small):
        lab.plugin.wait_for_log(f"{uuid} is unhealthy: XID 95")
    assert not any(lab.host.gpus[1] in line for line in lab.plugin.log)


@pytest.mark.rest
def test_a_process_that_waits_for_events_is_replaced(lab: Lab) -> None:
    lab.kubelet.expect(gpu=(2, 2))
    first = watching(lab)
    os.kill(first, signal.SIGKILL)
    lab.plugin.wait_for_log("restarting it")
    wait_for("another process", lambda: watching(lab) != first)
    lab.kubelet.expect(gpu=(2, 2))


@pytest.mark.rest
def test_nvml_that_hangs_does_not_hang_the_plugin(lab: Lab) -> None:
    lab.kubelet.expect(gpu=(2, 2))
    lab.fault("hang\n")
    lab.kubelet.restart()
    lab.kubelet.expect(gpu=(2, 2))
    assert lab.kubelet.allocate(GPU, [lab.host.gpus[0]])["envs"] == {"NVIDIA_VISIBLE_DEVICES": lab.host.gpus[0]}
    lab.plugin.wait_for_log("NVML did not answer")
    lab.kubelet.expect(gpu=(2, 0))
    lab.plugin.wait_for_log("is unhealthy: no answer for 0 s")
    lab.fault("")
    lab.kubelet.wait_for({GPU: [2, 2]}, 120)
    lab.kubelet.expect(gpu=(2, 2))


@pytest.mark.rest
def test_the_process_that_reads_the_host_is_replaced(lab: Lab) -> None:
    lab.kubelet.expect(gpu=(2, 2))
    children = Path(f"/proc/{lab.plugin.child.pid}/task/{lab.plugin.child.pid}/children").read_text().split()
    readers = [int(pid) for pid in children if b"plugin.reading" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(readers[0], signal.SIGKILL)
    lab.plugin.wait_for_log("the process that reads the host ended")
    lab.fault("lost 0\n")
    lab.kubelet.expect(gpu=(2, 1))
