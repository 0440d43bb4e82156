"""Agent and device plugin killed by SIGKILL at any moment, while tenants come and go: held against the truth.

The truth is the tests' own: which process has a GPU open, and what that tenant left in its registers.
"""

import itertools
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from lease_lab import Board
from plugin_lab import Kubelet, Plugin, kubelet
from support.cluster import Cluster
from support.driverless import GPUS, MODULES
from support.process import wait_for
from test_lease_programs import GPU, Node, group_of, quick

from ocigpu.gpus.nvidia.fabric.partitions import choose_offer
from ocigpu.kubernetes.leases.lease import Phase
from ocigpu.sim.board import SimBus

pytestmark = pytest.mark.root
CRD = Path(__file__).parents[2] / "packaging/kubernetes/chart/kinds/gpuleases.yaml"
SCRUB, DATA = 0x100B20, 0xDA7A
"""The register of Hopper that is 1 when memory was cleared, and what a tenant leaves in its place."""


class Tenant:
    """A pod and its virtual machine, a process that has the GPUs open once it was started."""

    def __init__(self, name: str, gpus: tuple[str, ...]) -> None:
        self.name, self.gpus = name, gpus
        self.machine: subprocess.Popen[bytes] | None = None
        self.pod = True


class Truth:
    """What is really so on the node."""

    def __init__(self, node: Node, kubelets: Kubelet) -> None:
        self.node, self.kubelets = node, kubelets
        self.bus = SimBus(str(node.host))
        self.tenants: list[Tenant] = []
        self.ended: dict[str, int] = {}
        self.refused: list[str] = []
        self.given = 0
        self.did: defaultdict[str, list[str]] = defaultdict(list)

    def note(self, tenant: Tenant, what: str) -> None:
        for gpu in tenant.gpus:
            self.did[gpu].append(f"{time.time():.2f} {tenant.name}: {what}")

    def admit(self, name: str, count: int) -> None:
        """Let the kubelet admit a pod; what it is given must be nobody's, cleared, checked and a partition."""
        answer = self.kubelets.answer("admit", name, "main", {GPU: count})
        if "error" in answer:
            self.refused.append(answer["error"])
            return
        groups = {group_of(self.node, gpu): gpu for gpu in GPUS}
        paths = [each["host_path"].rpartition("/")[2] for each in answer["result"]["devices"]]
        gpus = tuple(groups[path] for path in paths if path in groups)
        assert len(gpus) == count
        for gpu in gpus:
            assert not [each.name for each in self.tenants if gpu in each.gpus], f"{gpu} is given to two"
            assert self.register(gpu) == 1, f"{gpu} is given as its tenant left it: {self.story(gpu)}"
            checked = (self.node.check.parent / f"checked.{gpu}").stat().st_mtime_ns
            assert checked > self.ended.get(gpu, 0), f"{gpu} is given unchecked"
        assert self.partition(gpus) in self.node.manager.active()
        self.tenants.append(Tenant(name, gpus))
        self.note(self.tenants[-1], "is given it")
        self.given += 1

    def story(self, gpu: str) -> str:
        """Return what the journal and the tests know of a GPU, the newest last."""
        (machine,) = self.node.ask("history", gpu)["machines"]
        lines = [
            f"{each['time']:.2f} {each['phase']} {each['generation']} {each['cause']}"
            for each in machine["transitions"][-30:]
        ]
        return "\n".join(["", *sorted([*lines, *self.did[gpu][-30:]])])

    def partition(self, gpus: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(sorted(MODULES[gpu] for gpu in gpus))

    def register(self, gpu: str) -> int:
        data = Path(self.bus.path(gpu, "resource0")).read_bytes()
        return int.from_bytes(data[SCRUB : SCRUB + 4], "little")

    def start(self, tenant: Tenant) -> None:
        self.note(tenant, "starts its machine")
        with ExitStack() as stack:
            paths = [f"{self.node.host}/dev/vfio/{group_of(self.node, gpu)}" for gpu in tenant.gpus]
            files = [stack.enter_context(open(path, "rb")) for path in paths]
            tenant.machine = subprocess.Popen(["sleep", "3600"], pass_fds=[file.fileno() for file in files])
        for gpu in tenant.gpus:
            with open(self.bus.path(gpu, "resource0"), "r+b") as registers:
                registers.seek(SCRUB)
                registers.write(DATA.to_bytes(4, "little"))

    def end(self, tenant: Tenant, what: str) -> None:
        """End the pod or the machine; when both are gone the tenant is, and its GPUs have to be taken back."""
        self.note(tenant, f"ends its {what}")
        if what == "pod":
            self.kubelets.delete(tenant.name)
            tenant.pod = False
        elif tenant.machine:
            tenant.machine.kill()
            tenant.machine.wait()
        if not tenant.pod and (tenant.machine is None or tenant.machine.poll() is not None):
            self.tenants.remove(tenant)
            self.ended |= dict.fromkeys(tenant.gpus, time.time_ns())

    def check(self) -> None:
        """No partition ends, and no memory is cleared, under a machine."""
        active = self.node.manager.active()
        for tenant in self.tenants:
            if tenant.machine and tenant.machine.poll() is None:
                assert self.partition(tenant.gpus) in active, (tenant.gpus, active)
                assert [self.register(gpu) for gpu in tenant.gpus] == [DATA] * len(tenant.gpus), "reset under a machine"

    def act(self, chance: random.Random, number: int) -> None:
        """Let one thing happen that tenants or the kubelet do."""
        tenant = chance.choice([None, *self.tenants])
        if tenant is None:
            if sum(len(each.gpus) for each in self.tenants) < 6:
                self.admit(f"tenant-{'abc'[number % 3]}/pod{number}", chance.choice((1, 1, 2, 4)))
        elif tenant.machine is None:
            self.start(tenant) if tenant.pod and chance.random() < 0.9 else self.end(tenant, "pod")
        else:
            self.end(tenant, "machine" if tenant.machine.poll() is None and chance.random() < 0.6 else "pod")

    def is_settled(self) -> bool:
        """Whether every GPU that nobody has is free, and the kubelet knows of those that are offered.

        One whose machine has ended and whose pod has not is neither: its machine may be started again.
        """
        self.check()
        left = set(GPUS).difference(*(tenant.gpus for tenant in self.tenants))
        free = {gpu for gpu, phase in self.node.phases().items() if phase == "Free"}
        devices = self.kubelets.devices(GPU)
        healthy = {MODULES[gpu] for gpu in left if devices.get(group_of(self.node, gpu)) == "Healthy"}
        return left <= free and healthy == choose_offer(Board().list_partitions(), {MODULES[gpu] for gpu in left})

    def close(self) -> None:
        for tenant in self.tenants:
            if tenant.machine:
                tenant.machine.kill()
                tenant.machine.wait()


@pytest.fixture
def node(work_directory: Path) -> Node:
    made = Node(work_directory)
    made.check.write_text(f"#!/bin/sh\ntouch {made.check.parent}/checked.$1\n")
    return made


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        made.apply_manifests(CRD)
        yield made


@pytest.mark.rest
@pytest.mark.timeout(1800)
def test_agent_and_plugin_killed_at_any_moment(node: Node, cluster: Cluster, times: Callable[[int], int]) -> None:
    """No GPU is with two tenants, none is given uncleared or unchecked, and in the end all are free."""
    chance = random.Random(17)
    words = ("--device-discovery-strategy=vfio", f"--lease-journal={node.leases}", "--fabric-address=127.0.0.1:6666")
    config = cluster.write_kubeconfig(node.leases.parent / "kubeconfig")
    kills = {"agent": 0, "plugin": 0}
    with ExitStack() as stack:
        kubelets = stack.enter_context(kubelet(node.plugins))
        kubelets.serve_pods(str(node.pods))
        kubelets.add_resident("ocigpu/agent")
        truth = Truth(node, kubelets)
        stack.callback(truth.close)

        def start(name: str) -> Any:
            if name == "plugin":
                return Plugin(node.settings, node.plugins, *words).child
            return node.start_agent("--pace", "0.1", code=quick(2.0, 1.0), KUBECONFIG=str(config), NODE_NAME="node-1")

        programs = {name: start(name) for name in kills}
        stack.callback(lambda: [each.kill() or each.wait() for each in programs.values()])
        node.wait(*GPUS, phase="Free")
        numbers = itertools.count()

        def go_on(seconds: float) -> None:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                truth.act(chance, next(numbers))
                truth.check()
                time.sleep(chance.uniform(0.0, 0.2))

        for kill in range(times(100)):
            go_on(chance.uniform(0.0, 2.0))
            name = chance.choice(("agent", "agent", "plugin"))
            os.kill(programs[name].pid, signal.SIGKILL)
            programs[name].wait()
            go_on(chance.choice((0.0, 0.0, 0.0, 4.0)))  # tenants come and go without it
            programs[name] = start(name)
            kills[name] += 1
            if kill % 3 == 2:  # every now and then they come so far that others get something
                wait_for("what nobody has is free", truth.is_settled, 200, lambda: str(node.phases()))
        for tenant in list(truth.tenants):
            truth.end(tenant, "machine")
            if tenant in truth.tenants:
                truth.end(tenant, "pod")
        assert not truth.tenants
        node.wait(*GPUS, phase="Free")
        assert node.manager.active() == []
        wait_for("the objects", lambda: {each["status"]["phase"] for each in cluster.objects("GPULease")} == {"Free"})
    for machine in node.ask("history")["machines"]:
        generations = [each["generation"] for each in machine["transitions"]]
        assert generations == sorted(generations)
        assert not [each for each in machine["transitions"] if each["phase"] == Phase.QUARANTINED], machine
    log = (node.leases.parent / "agent.log").read_text() + node.plugins.with_name("dp.log").read_text()
    assert "OCIGPU-INT" not in log
    assert "Traceback" not in log
    why = Counter(re.sub(r"[0-9a-f]{4}:\\S+|[0-9]+", "N", text) for text in truth.refused)
    print(f"{kills}, {truth.given} containers; refused: {why}")
    assert truth.given > times(20), truth.refused
