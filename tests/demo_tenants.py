"""``make demo-tenants``: a tenant's container from its request to its GPUs' next tenant, on this machine, in a minute.

Real: the service for containers, the controller of tenancies, the device plugin, the agent, the lease journal, the
firmware check, their sockets and processes.  Simulated: the host with its GPUs, resets, fabric manager and board
controller (``ocigpu sim``), the API server and the kubelet (doubles of the tests), and the virtual machine (a process
that has the VFIO nodes open).  Exit status 1 if anything is not as it should be.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "kubernetes")]

from caas_lab import SEED, Lab, ended, running
from plugin_lab import Kubelet
from support.cluster import Cluster
from support.driverless import MODULES
from support.process import wait_for
from tenancy_lab import install, make_controller, settle, tenancy

from ocigpu.gpus.tree import find_roots
from ocigpu.gpus.vfio.identity import TABLE, GpuModule, write_table
from ocigpu.kubernetes.leases.journal import LeaseJournal
from ocigpu.kubernetes.leases.lease import Lease
from ocigpu.sim.create import create_host
from ocigpu.sim.fabric import SimulatedManager
from ocigpu.system.settings_file import read_settings

GPU = "nvidia.com/gpu"
MANAGER = "127.0.0.1:6666"
NODE = "node-1"


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def show(text: str) -> None:
    print("".join(f"   {line}\n" for line in text.rstrip().splitlines()), end="", flush=True)


class Node:
    """The simulated node and the programs that run on it."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory, self.host, self.leases = directory, directory / "host", directory / "leases"
        self._stack = stack
        create_host(str(self.host), 8, "h100", driver="none", nodes=False)
        self.settings = self.host / "config.toml"  # this machine's specifications are left alone
        self.settings.write_text(f'{self.settings.read_text()}\n[cdi]\nspec-dirs = ["{directory}/cdi"]\n')
        self.manager = SimulatedManager(self.host)
        self.manager.start()
        roots = find_roots(read_settings(str(self.settings)))
        self.table = f"{roots.host}{TABLE}"
        self.groups = {
            os.readlink(f"{roots.sys}/bus/pci/devices/{gpu}/iommu_group").rpartition("/")[2]: gpu for gpu in MODULES
        }
        self.journal = LeaseJournal(str(self.leases))

    def ocigpu(self, *words: str) -> str:
        """Run a command and return what it prints."""
        command = [sys.executable, "-m", "ocigpu.cli.front.main", *words]
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if found.returncode not in (0, 1):
            raise SystemExit(f"{' '.join(words)}: status {found.returncode}")
        return found.stdout

    def start(self, name: str, *command: str, **variables: str) -> "subprocess.Popen[bytes]":
        """Start a program that runs until the end of the demonstration."""
        log = self._stack.enter_context((self.directory / f"{name}.log").open("wb"))
        child = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **variables})
        self._stack.callback(end, child)
        return child

    def lease(self, gpu: str) -> Lease:
        return self.journal.refresh()[gpu]

    def wait(self, gpus: list[str], *phases: str) -> None:
        def reached() -> bool:
            leases = self.journal.refresh()
            return all(gpu in leases and leases[gpu].phase in phases for gpu in gpus)

        wait_for(f"{phases} of {gpus}", reached, 120, self.logs)

    def logs(self) -> str:
        return "".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.directory.glob("*.log")))

    def list(self) -> None:
        show(self.ocigpu("lease", "list", "--journal", str(self.leases)))


def end(child: "subprocess.Popen[bytes]") -> None:
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(20)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


@contextmanager
def machine(node: Node, gpus: list[str]) -> Iterator[None]:
    """A virtual machine, as VFIO sees it: a process that has its GPUs open."""
    groups = {gpu: group for group, gpu in node.groups.items()}
    with ExitStack() as stack:
        files = [stack.enter_context(open(f"{node.host}/dev/vfio/{groups[gpu]}", "rb")) for gpu in gpus]
        child = subprocess.Popen(["sleep", "600"], pass_fds=[file.fileno() for file in files])
        for file in files:
            file.close()
        try:
            yield
        finally:
            child.kill()
            child.wait()


def start_node(node: Node, cluster: Cluster) -> Kubelet:
    """Start board controller, kubelet, device plugin and agent; returns the kubelet."""
    bmc = subprocess.Popen(
        [sys.executable, "-m", "ocigpu.cli.front.main", "sim", "bmc", str(node.host)], stdout=subprocess.PIPE, text=True
    )
    node._stack.callback(end, bmc)
    assert bmc.stdout
    where = bmc.stdout.readline().split()
    serials = {
        each["name"]: each["serial"]
        for each in json.loads(node.ocigpu("firmware", "show", "--json", *where))["components"]
    }
    modules = [GpuModule(gpu, slot, serials[f"GPU_SXM_{slot}"], ("demo",)) for gpu, slot in MODULES.items()]
    write_table(node.table, modules)
    baseline = str(node.directory / "baseline.json")
    show(node.ocigpu("firmware", "record", baseline, *where))
    show(node.ocigpu("firmware", "approve", baseline, "--by", "Ada Lovelace"))
    words = ("firmware", "check", "--baseline", baseline, "--table", node.table, *where, "--config", str(node.settings))
    check = " ".join((sys.executable, "-m", "ocigpu.cli.front.main", *words))
    kubelet = Kubelet(node.directory / "kubelet")
    node._stack.callback(kubelet.close)
    pods = str(node.directory / "pods.sock")
    kubelet.serve_pods(pods)
    kubelet.add_resident("ocigpu/agent")
    main = (sys.executable, "-m", "ocigpu.cli.front.main")
    socket = f"--kubelet-socket={node.directory}/kubelet/kubelet.sock"
    leases = ("--device-discovery-strategy=vfio", f"--lease-journal={node.leases}", f"--fabric-address={MANAGER}")
    node.start("device-plugin", *main, "device-plugin", "--config", str(node.settings), socket, *leases)
    config = cluster.write_kubeconfig(node.directory / "kubeconfig")
    agent = (
        "--pods-socket",
        pods,
        "--address",
        MANAGER,
        "--check-program",
        check,
        "--pace",
        "0.3",
        "--node-name",
        NODE,
    )
    where_ = ("--journal", str(node.leases), "--config", str(node.settings))
    own = {"POD_NAMESPACE": "ocigpu", "POD_NAME": "agent"}  # as the chart tells it
    node.start("agent", *main, "lease", "agent", *agent, *where_, KUBECONFIG=str(config), **own)
    return kubelet


def run_container(
    node: Node, kubelet: Kubelet, lab: Lab, key: str, gpus: int, inside: Callable[[str], None] = lambda _gpu: None
) -> list[str]:
    """From the request to its end; returns the GPUs that it had.  ``inside``: what the tenant does with the first."""
    answer = lab.ask("POST", "/v1/containers", key, {**SEED, "gpus": gpus})
    assert answer.status == 202, answer
    container = answer.body["id"]
    show(f"POST /v1/containers {json.dumps({**SEED, 'gpus': gpus})}\n202 {container}: {answer.body['lifecycle']}")
    lab.bind(container)
    pod = f"tenant-landon/{container.replace('_', '-')}"
    given = kubelet.admit(pod, "main", {GPU: gpus})
    devices = [each["host_path"].rpartition("/")[2] for each in given["devices"]]
    had = [node.groups[name] for name in devices if name in node.groups]
    partition = ",".join(str(MODULES[gpu]) for gpu in sorted(had, key=lambda gpu: MODULES[gpu]))
    show(f"the kubelet allocates {', '.join(had)}: modules {partition}, active partitions {node.manager.active()}")
    assert tuple(sorted(MODULES[gpu] for gpu in had)) in node.manager.active()
    with machine(node, had):
        lab.set_status(container, **running())
        node.wait(had, "Leased")
        show(f"the service says: {lab.wait(key, container, 'running')['lifecycle']}")
        node.list()
        inside(had[0])
    lab.set_status(container, **ended())
    kubelet.delete(pod)
    show(f"the container has ended: {lab.wait(key, container, 'finished')['reason']}")
    return had


def spoil(node: Node, gpu: str) -> None:
    """What a tenant with root in its machine might do: another VBIOS."""
    path = node.host / "redfish.json"
    documents = json.loads(path.read_text())
    name = next(each for each in documents if each.endswith(f"HGX_FW_GPU_SXM_{MODULES[gpu]}"))
    documents[name]["Version"] = "96.00.BC.00.66"
    path.write_text(json.dumps(documents))


def main() -> int:
    begun = time.monotonic()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ocigpu-tenants-")))
        cluster = stack.enter_context(Cluster())
        install(cluster)
        say("a node with eight H100 on VFIO, no driver; what its board controller says is signed off")
        node = Node(directory, stack)
        kubelet = start_node(node, cluster)
        say("a tenancy")
        cluster.create(tenancy(quota={"gpus": 4}))
        settle(make_controller(cluster))
        state = cluster.get("Tenancy", "landon")["status"]
        show(f"landon: {state['phase']}, " + ", ".join(each["type"] for each in state["conditions"]))
        lab = Lab(cluster, directory)
        lab.start()
        stack.callback(lab.stop)
        key = lab.key()
        say("every GPU is reset and checked before its first tenant")
        node.wait(list(MODULES), "Free")
        node.list()
        kubelet.expect(gpu=(8, 8))
        say("the tenant asks for a container with two GPUs")
        had = run_container(node, kubelet, lab, key, 2)
        say("reset, partition off, check, free")
        node.wait(had, "Free")
        show(node.ocigpu("lease", "history", had[0], "--journal", str(node.leases)))
        assert node.manager.active() == []
        say("the next container flashes another VBIOS")
        (spoilt,) = run_container(node, kubelet, lab, key, 1, functools.partial(spoil, node))
        node.wait([spoilt], "Quarantined", "Free")
        show(node.ocigpu("lease", "show", spoilt, "--journal", str(node.leases)))
        assert node.lease(spoilt).reason == "FirmwareMismatch", node.lease(spoilt)
        kubelet.expect(gpu=(8, 7))

        def objects() -> dict[str, str]:
            return {each["spec"]["pciAddress"]: each["status"]["phase"] for each in cluster.objects("GPULease")}

        wait_for(
            "the cluster's object", lambda: objects().get(spoilt) == "Quarantined", on_failure=lambda: str(objects())
        )
        show(f"kubectl get gpuleases: {sorted(objects().values())}")
        print(f"\n{time.monotonic() - begun:.0f} s: all as it should be")
    return 0


if __name__ == "__main__":
    sys.exit(main())
