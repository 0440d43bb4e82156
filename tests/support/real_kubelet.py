"""A real kubelet for a node of :class:`support.real_cluster.RealCluster`, with a containerd of the tests' own.

Its root is /var/lib/kubelet, which device plugins have built in, below a directory that only this process sees; its
kernel settings are copies.  Pods have the host's network: no plugin for networks is configured.  Sources: the reference
of KubeletConfiguration; pkg/kubelet/cm/container_manager_linux.go (kernel settings).
"""

import json
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support import machine
from support.process import run, wait_for
from support.real_cluster import RealCluster, free_ports

from ocigpu.system import libc

ROOT = Path("/var/lib/kubelet")
COVERED = ("/var/lib", "/var/log")
TUNABLES = (
    *("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops"),
    *("kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"),
)


@contextmanager
def own_directories() -> Iterator[None]:
    """Cover directories whose names kubelets have built in."""
    with ExitStack() as stack:
        for directory in COVERED:
            libc.mount("tests", directory, "tmpfs", 0, "mode=755")
            stack.callback(libc.umount2, directory, libc.MNT_DETACH)
        ROOT.mkdir()
        yield


@contextmanager
def start_kubelet(cluster: RealCluster, engine: Path, directory: Path, node: str) -> Iterator[None]:
    """Run the kubelet of a node, from when the node is registered and ready but for its network."""
    directory.mkdir()
    endpoint, name = f"unix://{engine}", machine.NAME
    configuration = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "127.0.0.1",
        "port": free_ports(1)[0],
        "healthzPort": 0,
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "containerRuntimeEndpoint": endpoint,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{name}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "enforceNodeAllocatable": [],
        "evictionHard": dict.fromkeys(("memory.available", "nodefs.available", "imagefs.available"), "0%"),
        "localStorageCapacityIsolation": False,
        "enableControllerAttachDetach": False,
        "makeIPTablesUtilChains": False,
        "podLogsDir": f"{directory}/logs",
        "volumePluginDir": f"{directory}/volumes",
        "resolvConf": "",
        "fileCheckFrequency": "1s",
        "syncFrequency": "2s",
    }
    (directory / "kubelet.yaml").write_text(json.dumps(configuration))
    kubeconfig = cluster.write_kubeconfig(directory / "kubeconfig", f"system:node:{node}")
    words = [f"--config={directory}/kubelet.yaml", f"--kubeconfig={kubeconfig}", f"--hostname-override={node}"]
    words += [f"--root-dir={ROOT}", f"--cert-dir={directory}/pki"]
    for each in Path("/sys/fs/cgroup").iterdir():
        if (each / "cgroup.procs").exists():
            (each / name).mkdir(exist_ok=True)
    script = ["set -e"]
    for tunable in TUNABLES:
        copy = directory / tunable.replace("/", "-")
        copy.write_text(Path("/proc/sys", tunable).read_text())
        script.append(f"mount --bind {shlex.quote(str(copy))} /proc/sys/{tunable}")
    running = cluster.run(
        "KUBELET", *words, view=("unshare", "--mount", "sh", "-c", "; ".join([*script, 'exec "$@"']), "sh")
    )

    def is_registered() -> bool:
        assert running.child.poll() is None, running.says()
        return cluster.exists("Node", node)

    try:
        wait_for("the kubelet's node", is_registered, 120, running.says)
        # the controller that takes it away looks at the health of all nodes, and others have no kubelet
        cluster.patch("Node", node, {"spec": {"taints": None}})
        yield
    finally:
        running.end()
        for line in reversed(machine.mounts_below(str(ROOT))):
            run(["umount", "-l", line.split()[4]], check=False)
        machine.remove_cgroups(name)


def read_log(directory: Path, namespace: str, pod: str) -> str:
    """Return what a pod's containers have printed, without the times before each line."""
    texts = [path.read_text() for path in sorted(directory.glob(f"logs/{namespace}_{pod}_*/*/*.log"))]
    return "".join(f"{line.split(' ', 3)[3]}\n" for text in texts for line in text.splitlines())
