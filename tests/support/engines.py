"""Real containerd and dockerd, each with sockets and directories of its own, ended and cleaned by us."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support import machine, requirements
from support.process import Completed, explain, is_alive, run, stop, wait_for

SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
PRIVATE = """
set -e
mount -t tmpfs none "$0"
for directory in etc usr/local; do
    own=$0/$directory
    mkdir -p "$own/upper" "$own/work"
    mount -t overlay none -o "lowerdir=/$directory,upperdir=$own/upper,workdir=$own/work" "/$directory"
done
mount -t tmpfs none /run
mkdir -p /var/lib/containers
mount -t tmpfs none /var/lib/containers
mkdir -p /run/cdi /etc/cdi /etc/ocigpu /etc/docker /etc/containers
echo ready
sleep infinity & wait # the first process takes in children of others
"""


def _program(name: str) -> str:
    path = requirements.find_program(name)
    assert path is not None
    return path


@contextmanager
def _daemon(
    directory: Path, command: Sequence[str], env: dict[str, str], address: Path, ready: Sequence[str]
) -> Iterator[None]:
    """A daemon from when ``ready`` succeeds until the block ends; all its processes and mounts are removed then.

    ``ready`` is tried when somebody listens at the ``address``: each try is a large program.
    """
    log = directory / "log"
    with log.open("wb") as output:
        daemon = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:

        def is_ready() -> bool:
            assert daemon.poll() is None, f"{command[0]} ended with status {daemon.returncode}\n{log.read_text()}"
            with socket.socket(socket.AF_UNIX) as client:
                return client.connect_ex(str(address)) == 0 and run(ready, check=False).returncode == 0

        wait_for(f"{command[0]} to answer", is_ready, on_failure=log.read_text)
        yield
    finally:
        if is_alive(daemon.pid):
            daemon.terminate()
        try:
            daemon.wait(60)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
        for pid in machine.processes_of(str(directory)):  # shims live on without their daemon
            stop(pid, 5)
        for line in reversed(machine.mounts_below(str(directory))):
            subprocess.run(["umount", "-l", line.split()[4]], check=False)


class Docker:
    """A running dockerd; every call has the words after ``docker``."""

    def __init__(self, socket: Path, log: Path) -> None:
        self.socket = socket
        self.log = log

    def __call__(self, *words: str, check: bool = True) -> Completed:
        environment = {"PATH": SYSTEM_PATH, "HOME": str(self.socket.parent)}
        result = run(
            [_program("docker"), "--host", f"unix://{self.socket}", *words], check=False, env=environment, timeout=120
        )
        assert not check or result.returncode == 0, f"{explain(result)}\n{self.log.read_text()[-4000:]}"
        return result


@contextmanager
def start_docker(
    directory: Path,
    image: Path,
    runtimes: dict[str, str],
    env: dict[str, str],
    *,
    view: Sequence[str] = (),
    prepare: Callable[[Path], object] = bool,
    options: Sequence[str] = (),
) -> Iterator[Docker]:
    """Start dockerd with an image and further runtimes (name -> program); ``view`` goes before its command.

    ``prepare`` is called with the path of its daemon.json before it starts.
    """
    directory.mkdir()
    storage = "vfs" if requirements.overlay() else "overlay2"
    settings = {
        "data-root": str(directory / "data"),
        "exec-root": str(directory / "exec"),
        "pidfile": str(directory / "pid"),
        "hosts": [f"unix://{directory}/docker.sock"],
        "iptables": False,
        "ip6tables": False,
        "ip-masq": False,
        "bridge": "none",
        "storage-driver": storage,
        "cgroup-parent": f"/{directory.parent.name}-docker",
        "exec-opts": ["native.cgroupdriver=cgroupfs"],  # with cgroup v2 and systemd its default is systemd
        "runtimes": {name: {"path": path} for name, path in runtimes.items()},
    }
    file = directory / "daemon.json"
    file.write_text(json.dumps(settings, indent=2))
    prepare(file)
    environment = {"PATH": SYSTEM_PATH, "HOME": str(directory), **env}
    docker = Docker(directory / "docker.sock", directory / "log")
    command = [*view, _program("dockerd"), "--config-file", str(file), *options]
    ready = [_program("docker"), "--host", f"unix://{docker.socket}", "version"]
    try:
        with _daemon(directory, command, environment, docker.socket, ready):
            docker("load", "--input", str(image))
            yield docker
            for name in docker("ps", "--all", "--quiet").stdout.split():
                docker("rm", "--force", name)
    finally:
        machine.remove_cgroups(f"{directory.parent.name}-docker")
        _remove_common_directories()


class Containerd:
    """A running containerd; every call has the words after ``ctr``, in a namespace of the tests."""

    def __init__(self, directory: Path, namespace: str, snapshotter: str) -> None:
        self.directory = directory
        self.snapshotter = snapshotter
        self.socket = directory / "containerd.sock"
        self.log = directory / "log"
        self.namespace = namespace

    def __call__(
        self, *words: str, check: bool = True, namespace: str = "", env: dict[str, str] | None = None
    ) -> Completed:
        command = [_program("ctr"), "--address", str(self.socket), "--namespace", namespace or self.namespace, *words]
        result = run(command, check=False, timeout=120, env=env)
        assert not check or result.returncode == 0, f"{explain(result)}\n{self.log.read_text()[-4000:]}"
        return result

    def cri(self, *calls: tuple[str, dict[Any, Any]]) -> list[dict[str, str]]:
        """Make calls of the Container Runtime Interface; returns their answers by field number."""
        result = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("cri.py")), str(self.socket)],
            input=json.dumps(calls),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stderr
        answers: list[dict[str, str]] = json.loads(result.stdout)
        return answers


@contextmanager
def start_containerd(
    directory: Path,
    image: Path,
    runtimes: dict[str, str],
    env: dict[str, str],
    *,
    sandbox_image: str,
    view: Sequence[str] = (),
    prepare: Callable[[Path], object] = bool,
    program: str = "containerd",
) -> Iterator[Containerd]:
    """Start containerd with an image, and runtime entries (name -> program) in its config.toml.

    ``prepare`` is called with the path of the config.toml before it starts; ``program``: another containerd's path.
    """
    directory.mkdir()
    namespace = directory.parent.name
    config = directory / "config.toml"
    snapshotter = "native" if requirements.overlay() else "overlayfs"
    config.write_text(
        f"""version = 2
root = "{directory}/root"
state = "{directory}/state"
disabled_plugins = ["io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.aufs", "io.containerd.tracing.processor.v1.otlp"]
[grpc]
  address = "{directory}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{directory}/opt"
[plugins."io.containerd.nri.v1.nri"]
  socket_path = "{directory}/nri.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{sandbox_image}"
  restrict_oom_score_adj = true
  disable_tcp_service = true
  tolerate_missing_hugetlb_controller = true
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "{directory}/cni/bin"
  conf_dir = "{directory}/cni/net.d"
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "{snapshotter}"
"""
        + "".join(
            f"""[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{name}]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{name}.options]
  BinaryName = "{path}"
"""
            for name, path in {"runc": _program("runc"), **runtimes}.items()
        )
    )
    prepare(config)
    environment = {"PATH": SYSTEM_PATH, "HOME": str(directory), **env}
    shim = Path(program).with_name("containerd-shim-runc-v2")
    if "/" in program and shim.exists():  # its own, but not the runc beside it, which may need another C library
        (directory / "bin").mkdir()
        (directory / "bin" / shim.name).symlink_to(shim)
        environment["PATH"] = f"{directory}/bin:{SYSTEM_PATH}"
    engine = Containerd(directory, namespace, snapshotter)
    command = [*view, _program(program), "--config", str(config)]
    ready = [_program("ctr"), "--address", str(engine.socket), "plugins", "ls"]
    try:
        with _daemon(directory, command, environment, engine.socket, ready):
            for target in (namespace, "k8s.io"):
                engine("images", "import", "--snapshotter", snapshotter, str(image), namespace=target)
            yield engine
    finally:
        machine.remove_cgroups(namespace)
        _remove_common_directories(namespace)


def _remove_common_directories(namespace: str = "") -> None:
    """containerd 1.6 keeps shim sockets, pipes and runc's state in one place for all daemons: removed where empty."""
    for name in (f"runc/{namespace}", "runc/k8s.io", "runc", "s", "fifo", ""):
        with contextlib.suppress(OSError):
            os.rmdir(f"/run/containerd/{name}")


@contextmanager
def private_machine(directory: Path) -> Iterator[tuple[str, ...]]:
    """Words that run a command where no process of others is seen, and what is written to the directories of
    engines and programs is gone at the end.
    """
    directory.mkdir()
    words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", PRIVATE, directory]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as machine:
        assert machine.stdout
        assert machine.stdout.readline() == "ready\n"
        (first,) = Path(f"/proc/{machine.pid}/task/{machine.pid}/children").read_text().split()
        try:
            yield "nsenter", f"--target={first}", "--mount", "--pid", "--"
        finally:
            machine.kill()
