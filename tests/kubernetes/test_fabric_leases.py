"""What the agent of leases does with partitions when the manager, or its machine, is restarted under tenants."""

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.driverless import GPUS, MODULES
from support.process import wait_for

from ocigpu.core.errors import OcigpuError
from ocigpu.gpus.nvidia.fabric.state import KeptFabric
from ocigpu.gpus.tree import find_roots
from ocigpu.gpus.vfio.holders import claim, read_holders
from ocigpu.gpus.vfio.identity import GpuModule, write_table
from ocigpu.kubernetes.cluster.pods import Listing
from ocigpu.kubernetes.leases import machine
from ocigpu.kubernetes.leases.machine import MachineHands, find_holders, open_fabric_at, run_check
from ocigpu.sim.create import create_host
from ocigpu.sim.fabric import SimulatedManager
from ocigpu.system.settings_file import read_settings

PAIR = sorted(gpu for gpu in GPUS if MODULES[gpu] in (1, 3))


class LeaseNode:
    """A host without a driver, and the agent's hands."""

    def __init__(self, host: Path) -> None:
        self.settings = settings = read_settings(create_host(str(host), 8, "h100", driver="none", nodes=False))
        roots = find_roots(settings)
        write_table(
            f"{roots.host}/var/lib/ocigpu/module-ids.json", [GpuModule(gpu, n, "", ()) for gpu, n in MODULES.items()]
        )
        self.manager = SimulatedManager(host)
        fabric = open_fabric_at("127.0.0.1:6666", settings)
        assert fabric
        self.fabric: KeptFabric = fabric
        self.hands = MachineHands(settings, lambda _gpu: "", fabric=fabric, look_seconds=0.0)

    def sick(self) -> list[str]:
        try:
            return sorted(self.hands.sick())
        except OcigpuError:
            return []


@pytest.fixture
def node(work_directory: Path) -> Iterator[LeaseNode]:
    made = LeaseNode(work_directory / "host")
    yield made
    if made.hands.polling:
        made.hands.polling.join()


def test_who_looks_into_a_gpu_is_no_tenant(node: LeaseNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset has the group open for seconds, a look into the registers for a moment; a virtual machine stays."""
    gpu, roots = PAIR[0], find_roots(node.settings)
    group = Path(os.readlink(f"{roots.sys}/bus/pci/devices/{gpu}/iommu_group")).name
    with claim(gpu, roots):
        assert read_holders(gpu, roots)
        assert node.hands.holders(gpu) == ()
    with Path(f"{roots.host}/dev/vfio/{group}").open("rb") as file:
        child = subprocess.Popen(["sleep", "600"], pass_fds=[file.fileno()])
    try:
        monkeypatch.setattr(machine, "CONFIRM", 0.0)
        assert node.hands.holders(gpu) == find_holders(gpu, roots) == (child.pid,)
        node.hands.seen.clear()

        def end(_seconds: float) -> None:
            child.kill()
            child.wait()

        monkeypatch.setattr(machine.time, "sleep", end)
        assert node.hands.holders(gpu) == ()
    finally:
        child.kill()
        child.wait()


class VmCheck:
    """A check that starts a machine with the GPU: a process that its own has started has it open."""

    def __init__(self, node: LeaseNode, directory: Path, after: str) -> None:
        """``after``: what it does in the end, in the shell's words; "$vm" is the machine."""
        roots = find_roots(node.settings)
        group = Path(os.readlink(f"{roots.sys}/bus/pci/devices/{PAIR[0]}/iommu_group")).name
        self.path, self.pid, self.go = f"{roots.host}/dev/vfio/{group}", directory / "pid", directory / "go"
        program = directory / "check"
        program.write_text(
            f"#!/bin/sh\nsleep 600 < {self.path} > /dev/null 2>&1 &\nvm=$!\n"
            f"until [ /proc/$vm/fd/0 -ef {self.path} ]; do sleep 0.01; done\n"
            f"echo $vm > {self.pid}.new; mv {self.pid}.new {self.pid}\n"
            f"while [ ! -e {self.go} ]; do sleep 0.05; done\n{after}\n"
        )
        program.chmod(0o755)
        self.hands = MachineHands(node.settings, lambda _gpu: "", check=lambda gpu: run_check(str(program), gpu))

    def stranger(self) -> int:
        """Start a process that has the GPU open and is nobody's child; returns its id."""
        words = f"sleep 600 < {self.path} > /dev/null 2>&1 & echo $!"
        return int(subprocess.run(["sh", "-c", words], stdout=subprocess.PIPE, text=True, check=True).stdout)

    def vm(self) -> int:
        wait_for("the machine", self.pid.exists)
        return int(self.pid.read_text())


def test_a_machine_that_a_check_has_started_is_no_tenant(node: LeaseNode, work_directory: Path) -> None:
    """Known by its parents, whom nobody chooses; whoever else has the GPU meanwhile is seen."""
    check = VmCheck(node, work_directory, "kill $vm")
    with ThreadPoolExecutor() as pool:
        result = pool.submit(check.hands.check, PAIR[0])
        vm = check.vm()
        assert [each.pid for each in read_holders(PAIR[0], find_roots(node.settings))] == [vm]
        assert check.hands.holders(PAIR[0]) == ()
        other = check.stranger()
        assert check.hands.holders(PAIR[0]) == (other,)
        os.kill(other, signal.SIGKILL)
        check.go.touch()
        assert result.result() == ()


def test_a_machine_that_a_check_leaves_behind_is_a_holder(node: LeaseNode, work_directory: Path) -> None:
    check = VmCheck(node, work_directory, "exit 0")
    check.go.touch()
    with pytest.raises(OcigpuError, match=r"process [0-9]+ has it open after the check") as error:
        check.hands.check(PAIR[0])
    assert error.value.code == "OCIGPU-LEASE-4"
    assert check.hands.holders(PAIR[0]) == (check.vm(),)
    os.kill(check.vm(), signal.SIGKILL)


def test_a_check_that_takes_too_long_is_ended_with_its_machine(
    node: LeaseNode, work_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "CHECK_LIMIT", 1.0)
    check = VmCheck(node, work_directory, "exit 0")
    with pytest.raises(OcigpuError, match="no answer within 1 s"):
        check.hands.check(PAIR[0])
    wait_for("its end", lambda: check.hands.holders(PAIR[0]) == ())


def test_module_ids_are_read_once_and_no_group_is_open_for_them_later(
    node: LeaseNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = dict(node.hands.modules())
    monkeypatch.setattr("ocigpu.gpus.vfio.identity.claim", None)
    assert (dict(node.hands.modules()), len(known)) == (known, 8)


def test_a_manager_that_waits_is_given_back_what_was_active(node: LeaseNode) -> None:
    node.fabric.activate([1, 3], "set-1", 1)
    node.manager.restart()
    wait_for("active again", lambda: node.sick() or node.manager.active() == [(1, 3)])
    assert node.sick() == []


def test_gpus_of_a_lost_partition_are_sick_until_they_were_taken_back(node: LeaseNode) -> None:
    node.fabric.activate([1, 3], "set-1", 1)
    node.fabric.activate([2], "set-2", 1)
    node.manager.start(active=[{2}])  # anew, with its machine
    wait_for("sick", lambda: node.sick() == PAIR)
    node.hands.deactivate(PAIR)
    assert node.hands.sick() == {}
    assert node.fabric.activate([1, 3], "set-3", 2).is_active
    assert node.manager.active() == [(1, 3), (2,)]


def test_a_manager_that_is_away_is_said_to_be(node: LeaseNode) -> None:
    node.manager.stop()

    def is_said() -> bool:
        try:
            node.hands.sick()
        except OcigpuError as error:
            return error.code == "OCIGPU-FAB-2"
        return False

    wait_for("said", is_said)


def test_a_kubelet_counts_once_it_knows_its_pods(
    node: LeaseNode, work_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the agent's own pod; by the age of its socket where the agent is none."""
    socket = work_directory / "pods.sock"
    socket.touch()
    pods: list[str] = []
    monkeypatch.setattr(machine, "list_containers", lambda _socket: Listing(pods=frozenset(pods)))

    def ask(own: str) -> str:
        hands = MachineHands(node.settings, lambda _gpu: "", pods_socket=str(socket), own_pod=own)
        try:
            return str(hands.pods())
        except OcigpuError as error:
            return error.message

    assert "it was started and does not know ocigpu/agent yet" in ask("ocigpu/agent")
    assert "it was started within 120 s" in ask("")
    pods += ["kube-system/static", "ocigpu/agent"]
    assert (ask("ocigpu/agent"), "within 120 s" in ask("")) == ("{}", True)
    os.utime(socket, (0, 0))
    pods.clear()
    assert (ask(""), "does not know" in ask("ocigpu/agent")) == ("{}", True)
