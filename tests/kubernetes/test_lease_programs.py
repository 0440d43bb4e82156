"""Device plugin, kubelet and agent as processes on a simulated host without a driver: a container's GPUs and back."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from plugin_lab import Kubelet, kubelet, plugin
from support.driverless import GPUS, MODULES, holding
from support.process import wait_for

from ocigpu.gpus.tree import find_roots
from ocigpu.gpus.vfio.identity import GpuModule, write_table
from ocigpu.kubernetes.leases.journal import LeaseJournal
from ocigpu.kubernetes.leases.lease import RESERVE_LIMIT, Lease
from ocigpu.sim.create import create_host
from ocigpu.sim.fabric import SimulatedManager
from ocigpu.system.settings_file import read_settings

pytestmark = pytest.mark.root
GPU = "nvidia.com/gpu"
ABSENT = 3.0
"""Seconds of an agent's patience here: 10 in earnest."""
AGENT = {"POD_NAMESPACE": "ocigpu", "POD_NAME": "agent"}
"""The agent's own pod, as the chart tells it."""


def quick(reserve: float, absent: float) -> str:
    """Return the command with less patience: GPUs come back sooner."""
    return f"""
import sys
from ocigpu.cli.front.main import main
from ocigpu.kubernetes.leases import agent, lease
lease.QUIET, lease.RESERVE_LIMIT, agent.ABSENT = 0.5, {reserve}, {absent}
sys.exit(main(sys.argv[1:]))
"""


class Node:
    """A simulated node: its directories, and the command line's answers."""

    def __init__(self, directory: Path) -> None:
        self.host, self.leases, self.plugins = directory / "host", directory / "leases", directory / "dp"
        create_host(str(self.host), 8, "h100", driver="none", nodes=False)
        self.settings = self.host / "config.toml"
        self.pods = directory / "pods.sock"
        self.manager = SimulatedManager(self.host)
        self.manager.start()
        self.check = directory / "check"
        self.check.write_text("#!/bin/sh\n[ -e $0.$1 ] || exit 0\necho VBIOS 96.1, accepted 96.0\nexit 1\n")
        self.check.chmod(0o755)
        roots = find_roots(read_settings(str(self.settings)))
        write_table(
            f"{roots.host}/var/lib/ocigpu/module-ids.json", [GpuModule(gpu, n, "", ()) for gpu, n in MODULES.items()]
        )

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "ocigpu.cli.front.main", "lease", *words, "--journal", str(self.leases)]

    def ask(self, *words: str, status: int = 0) -> dict[str, Any]:
        found = subprocess.run(self.command(*words, "--json"), capture_output=True, text=True)
        assert found.returncode == status, found.stderr
        return json.loads(found.stdout) if status == 0 else {"error": found.stderr}

    def read(self) -> dict[str, Lease]:
        journal = LeaseJournal(str(self.leases))
        try:
            return dict(journal.refresh())
        finally:
            journal.close()

    def phases(self) -> dict[str, str]:
        return {gpu: str(lease.phase) for gpu, lease in self.read().items()}

    def wait(self, *gpus: str, phase: str) -> None:
        def reached() -> bool:
            found = self.phases()
            return all(found.get(gpu) == phase for gpu in gpus)

        wait_for(f"{gpus} {phase}", reached, 200, lambda: str(self.phases()))

    def start_agent(self, *more: str, code: str, **variables: str) -> "subprocess.Popen[bytes]":
        """``code``: runs the command, in the place of its module."""
        words = ["--pods-socket", str(self.pods), "--address", "127.0.0.1:6666", "--check-program", str(self.check)]
        command = self.command("agent", *words, "--config", str(self.settings), *(more or ("--pace", "0.5")))
        command[1:3] = ["-c", code]
        with (self.leases.parent / "agent.log").open("ab") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **AGENT, **variables})


@pytest.fixture
def node(work_directory: Path) -> Node:
    return Node(work_directory)


@pytest.fixture
def agent(node: Node) -> Iterator[Callable[[], "subprocess.Popen[bytes]"]]:
    """Start the agent anew; the one before is killed."""
    children: list[subprocess.Popen[bytes]] = []

    def start() -> "subprocess.Popen[bytes]":
        if children:
            os.kill(children[-1].pid, signal.SIGKILL)
            children[-1].wait()
        children.append(node.start_agent(code=quick(RESERVE_LIMIT, ABSENT)))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.wait()
    text = (node.leases.parent / "agent.log").read_text()
    print(text)
    assert "OCIGPU-INT" not in text


def group_of(node: Node, gpu: str) -> str:
    return os.readlink(f"{node.host}/sys/bus/pci/devices/{gpu}/iommu_group").rpartition("/")[2]


def admit(kubelets: Kubelet, pod: str, count: int) -> list[str]:
    """Return the devices that a pod is given, by their last path."""
    answer = kubelets.admit(pod, "main", {GPU: count})
    return [
        entry["host_path"].rpartition("/")[2] for entry in answer["devices"] if "/vfio/vfio" not in entry["host_path"]
    ]


@pytest.mark.rest
@pytest.mark.timeout(600)  # it takes long: workers.py deals it out first
def test_a_container_gets_a_partition_and_gives_it_back(node: Node, agent: Callable[[], Any]) -> None:
    words = ("--device-discovery-strategy=vfio", f"--lease-journal={node.leases}", "--fabric-address=127.0.0.1:6666")
    with kubelet(node.plugins) as kubelets, plugin(node.settings, node.plugins, *words):
        kubelets.serve_pods(str(node.pods))
        kubelets.add_resident("ocigpu/agent")
        kubelets.expect(gpu=(8, 0))  # nothing was checked yet
        agent()
        node.wait(*GPUS, phase="Free")
        kubelets.expect(gpu=(8, 8))

        groups = {group_of(node, gpu): gpu for gpu in GPUS}
        pair = [groups[name] for name in admit(kubelets, "tenant-a/pod", 2)]
        assert sorted(MODULES[gpu] for gpu in pair) in ([1, 3], [2, 4], [5, 7], [6, 8])
        assert node.manager.active() == [tuple(sorted(MODULES[gpu] for gpu in pair))]
        node.wait(*pair, phase="Reserved")
        with holding(f"{node.host}/dev/vfio/{group_of(node, pair[0])}"):
            with holding(f"{node.host}/dev/vfio/{group_of(node, pair[1])}"):
                node.wait(*pair, phase="Leased")
                wait_for("the pod is found", lambda: all(node.read()[gpu].holder for gpu in pair), 200)
                kubelets.expect(gpu=(8, 8))  # held devices stay healthy
                answer = kubelets.answer("allocate", GPU, [group_of(node, pair[0])])
                assert "OCIGPU-LEASE-2" in answer["error"], answer
                kubelets.expect(gpu=(8, 7))  # but for one that the kubelet would give once more
                agent()  # killed and begun anew
                kubelets.delete("tenant-a/pod")
                node.wait(*pair, phase="Reclaiming")
                kubelets.expect(gpu=(8, 6), nvswitch=(0, 0))  # the host has a group of four switches
            shown = node.ask("show", pair[0])
            assert "no-holder" not in shown["proofs"]
        (node.check.parent / f"check.{pair[1]}").touch()
        node.wait(pair[0], phase="Free")
        node.wait(pair[1], phase="Quarantined")
        assert node.manager.active() == []
        kubelets.expect(gpu=(8, 7))

        listed = {each["gpu"]: each["phase"] for each in node.ask("list")["leases"]}
        assert listed == node.phases()
        lease = node.ask("show", pair[1])
        assert (lease["reason"], lease["detail"]) == ("FirmwareMismatch", "VBIOS 96.1, accepted 96.0")
        wrong = node.ask("release", pair[1], "--generation", "7", status=1)["error"]
        assert "OCIGPU-LEASE-3" in wrong
        (node.check.parent / f"check.{pair[1]}").unlink()
        node.ask("release", pair[1], "--generation", "1", "--why", "flashed anew")
        node.wait(*GPUS, phase="Free")
        (machine,) = node.ask("history", pair[1])["machines"]
        assert (machine["served_tenant"], machine["sanitized"], machine["status"]) == ("a", True, "available")
        states = [each["to"] for each in machine["transitions"]]
        assert states[-8:] == [
            "in_use",
            "in_use",
            "sanitizing",
            "sanitizing",
            "quarantined",
            "sanitizing",
            "sanitizing",
            "available",
        ]


@pytest.mark.rest
def test_a_kubelet_that_does_not_know_its_pods_yet_takes_no_gpu_from_one_that_starts(
    node: Node, agent: Callable[[], Any]
) -> None:
    """It was restarted, and the API server is slow: one pod pulls its image, another was never listed before."""
    words = ("--device-discovery-strategy=vfio", f"--lease-journal={node.leases}", "--fabric-address=127.0.0.1:6666")
    with kubelet(node.plugins) as kubelets, plugin(node.settings, node.plugins, *words):
        kubelets.serve_pods(str(node.pods))
        kubelets.add_resident("ocigpu/agent")
        agent()
        node.wait(*GPUS, phase="Free")
        kubelets.expect(gpu=(8, 8))
        groups = {group_of(node, gpu): gpu for gpu in GPUS}
        (seen,) = [groups[name] for name in admit(kubelets, "tenant-a/pulls", 1)]
        wait_for("the pod is found", lambda: node.read()[seen].holder, 200)
        kubelets.restart(False)
        kubelets.expect(gpu=(8, 8))
        (fresh,) = [groups[name] for name in admit(kubelets, "tenant-a/new", 1)]
        time.sleep(ABSENT + 3)
        assert {node.phases()[gpu] for gpu in (seen, fresh)} == {"Reserved"}
        assert "does not know ocigpu/agent yet" in (node.leases.parent / "agent.log").read_text()
        kubelets.learn_pods()
        with holding(f"{node.host}/dev/vfio/{group_of(node, seen)}"):
            node.wait(seen, phase="Leased")
            wait_for("the other pod is found", lambda: node.read()[fresh].holder, 200)
            assert len(node.manager.active()) == 2
        kubelets.delete("tenant-a/pulls")
        kubelets.delete("tenant-a/new")
        node.wait(seen, fresh, phase="Free")
