"""A machine of its own with real engines, whose administrator types what ocigpu doctor prints."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import machine as host_machine
from support import requirements
from support.engines import SYSTEM_PATH, private_machine
from support.fixtures import IMAGE
from support.process import Completed, run
from support.product import PROGRAMS, REPOSITORY, SimulatedHost

PATH = f"/usr/local/bin:{SYSTEM_PATH}"
OTHERS = {
    "docker": ("podman",),
    "podman": ("dockerd", "docker", "containerd"),
    "containerd": ("dockerd", "docker", "podman"),
}
NEEDED = {
    "docker": ("dockerd", "docker", "containerd", "runc"),
    "podman": ("podman", "conmon", "runc"),
    "containerd": ("containerd", "ctr", "runc"),
}
LISTING = ["sh", "-c", "test -c /dev/nvidia0 && test -c /dev/nvidia-uvm && nvidia-smi -L"]
HOME = "/run/root"
FIX, MORE = "    fix      ", "             "
CRI = 'plugins."io.containerd.grpc.v1.cri"'
SYSTEMCTL = """#!/bin/sh
# What systemd does for dockerd and containerd, on a machine that it does not run on; three starts that fail are enough.
case $1 in
  start | stop | restart) verb=$1 ;;
  reset-failed) shift; for unit; do rm -f /run/${{unit%.service}}.failed; done; exit ;;
  show) shift 2; for unit; do
    if [ -e /run/${{unit%.*}}.failed ]; then state=failed; else state=active; fi
    printf 'LoadState=loaded\\nActiveState=%s\\n\\n' $state
  done; exit ;;
  *) echo "systemctl $1: not on this machine" >&2; exit 1 ;;
esac
unit=${{2%.service}}
cd {directory}
case $unit in docker) program="{docker}" ;; containerd) program="{containerd}" ;; *) exit 5 ;; esac
pid=$(cat /run/$unit.staged 2>/dev/null)
if [ -n "$pid" ] && [ -d "/proc/$pid" ]; then
  [ $verb != start ] || exit 0
  kill "$pid"
  while [ -d "/proc/$pid" ]; do sleep 0.05; done
fi
[ $verb != stop ] || exit 0
[ "$(cat /run/$unit.failed 2>/dev/null)" != xxx ] || {{ echo "Start request repeated too quickly." >&2; exit 1; }}
PATH={path} HOME=/root setsid -f sh -c 'echo $$ >/run/'$unit'.staged; exec '"$program" >$unit.log 2>&1 </dev/null
while [ ! -s /run/$unit.staged ] || [ "$(cat /run/$unit.staged)" = "$pid" ]; do sleep 0.01; done
pid=$(cat /run/$unit.staged)
for _ in $(seq 1200); do
  [ -d "/proc/$pid" ] || {{ printf x >>/run/$unit.failed; cat $unit.log >&2; exit 1; }}
  case $unit in
    docker) docker -H unix:///run/docker.sock version >/dev/null 2>&1 && exit 0 ;;
    containerd) ctr --address {directory}/containerd.sock version >/dev/null 2>&1 && exit 0 ;;
  esac
  sleep 0.05
done
exit 1
"""
CONTAINERD = """\
version = 2
[plugins."io.containerd.internal.v1.opt"]
path = "{directory}/opt"
[{cri}]
sandbox_image = "{image}"
restrict_oom_score_adj = true
disable_tcp_service = true
tolerate_missing_hugetlb_controller = true
[{cri}.cni]
bin_dir = "{directory}/cni/bin"
conf_dir = "{directory}/cni/net.d"
[{cri}.containerd]
snapshotter = "overlayfs"
"""
PODMAN = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
netns = "none"
pids_limit = 0
[engine]
hooks_dir = ["/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d"]
cgroup_manager = "cgroupfs"
events_logger = "none"
runtime = "runc"
"""


class Staged:
    """A machine with one engine that gives containers GPUs.  ``directory``: what outlives it; ``host``: its driver."""

    def __init__(self, enter: Sequence[str], directory: Path, host: SimulatedHost, image: Path) -> None:
        self.enter, self.directory, self.host, self.image = tuple(enter), directory, host.directory, image
        self.gpus = list(host.gpus)
        self.engine = ""

    def run(self, *words: object, check: bool = True, **variables: str) -> Completed:
        env = {"PATH": PATH, "HOME": HOME, **variables}
        return run([*self.enter, *map(str, words)], check=check, env=env, timeout=200)

    def sh(self, script: str, *, check: bool = True) -> Completed:
        return self.run("sh", "-e", "-c", script, check=check)

    def put(self, path: str, text: str, mode: int = 0o644) -> None:
        command = 'mkdir -p "$(dirname "$1")"; cat >"$1"; chmod "$2" "$1"'
        words = [*self.enter, "sh", "-e", "-c", command, "sh", path, f"{mode:o}"]
        subprocess.run(words, input=text, text=True, check=True)

    def read(self, path: str) -> str:
        return self.run("cat", path).stdout

    def add_setting(self, text: str) -> None:
        """Write top-level keys into the settings."""
        path = "/etc/ocigpu/config.toml"
        self.put(path, text + self.read(path))

    def edit_json(self, path: str, **values: Any) -> None:
        self.put(path, json.dumps({**json.loads(self.read(path)), **values}, indent=2))

    # the administrator

    def doctor(self) -> str:
        return self.run("ocigpu", "doctor", check=False).stdout

    def follow(self, report: str) -> list[str]:
        """Type each command of a report, in its order; comments and what is for a failure only are not typed."""
        commands = printed(report)
        for command in commands:
            done = self.sh(command, check=False)
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}\n{report}"
        return commands

    # the engines

    def begin(self, engine: str) -> None:
        """Have this engine give GPUs; programs of the others are not on this machine."""
        self.engine = engine
        requirements.require(requirements.programs(*NEEDED[engine]))
        if engine == "containerd":
            pytest.importorskip("grpc", reason="not installed: grpcio")
        for name in OTHERS[engine]:
            if program := requirements.find_program(name):
                self.run("mount", "--bind", "/dev/null", os.path.realpath(program))
        if engine == "podman":
            self.run("ocigpu", "engine", "configure", "podman")
            return
        if engine == "containerd":
            self.run("ocigpu", "engine", "configure", "containerd")
        if engine == "docker":
            self.put("/etc/docker/daemon.json", "{}")
            self.run("ocigpu", "engine", "configure", "docker")
        self.run("systemctl", "start", engine)
        loaded = self.directory / f"{engine}.loaded"
        if loaded.exists():
            return
        if engine == "docker":
            self.run("docker", "load", "--quiet", "--input", self.image)
        else:
            for namespace in ("default", "k8s.io"):
                words = ("--address", self.directory / "containerd.sock", "--namespace", namespace, "images", "import")
                self.run("ctr", *words, "--snapshotter", "overlayfs", self.image)
        loaded.touch()

    def listed(self, way: str) -> Completed:
        """Start a container in a way of the engine that runs nvidia-smi -L."""
        return {"docker": self._docker, "podman": self._podman, "containerd": self._pod}[self.engine](way)

    def _docker(self, way: str) -> Completed:
        asked = {"gpus": ["--gpus", "all"], "runtime": ["--runtime=ocigpu", "--env=NVIDIA_VISIBLE_DEVICES=all"]}
        words = asked.get(way, ["--env=NVIDIA_VISIBLE_DEVICES=all"])
        return self.run("docker", "run", "--rm", "--network=none", *words, IMAGE, *LISTING, check=False)

    def _podman(self, way: str) -> Completed:
        chosen = ["--runtime=ocigpu"] if way == "runtime" else []
        asked = ["--device=nvidia.com/gpu=all"] if way == "cdi" else ["--env=NVIDIA_VISIBLE_DEVICES=all"]
        words = [*chosen, "run", "--rm", "--cgroup-parent", f"/{self.directory.parent.name}-staged", *asked]
        return self.run("podman", *words, "--rootfs", f"{self.directory}/rootfs:O", *LISTING, check=False)

    def _pod(self, way: str) -> Completed:
        """Start a pod's container by the Container Runtime Interface."""
        config: dict[Any, Any] = {
            1: {1: "pod", 2: "staged", 3: "default"},
            3: str(self.directory / "logs"),
            8: {1: f"/{self.directory.parent.name}-staged", 2: {1: {1: 2}}},
        }
        try:
            sandbox = self._cri("RunPodSandbox", {1: config, 2: way and "ocigpu"})["1"]
            container = {1: {1: "container"}, 2: {1: IMAGE}, 6: [{1: "NVIDIA_VISIBLE_DEVICES", 2: "all"}]}
            try:
                created = self._cri("CreateContainer", {1: sandbox, 2: container, 3: config})["1"]
                self._cri("StartContainer", {1: created})
                said = self._cri("ExecSync", {1: created, 2: LISTING, 3: 30}).get("1", "")
            finally:
                self._cri("StopPodSandbox", {1: sandbox})
                self._cri("RemovePodSandbox", {1: sandbox})
        except RuntimeError as error:
            return subprocess.CompletedProcess([], 1, "", str(error))
        return subprocess.CompletedProcess([], 0, said, "")

    def _cri(self, method: str, request: dict[Any, Any]) -> dict[str, str]:
        script = Path(__file__).with_name("cri.py")
        words = [*self.enter, sys.executable, script, self.directory / "containerd.sock"]
        asked = json.dumps([[f"RuntimeService/{method}", request]])
        done = subprocess.run(words, input=asked, capture_output=True, text=True, timeout=200, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        (answer,) = json.loads(done.stdout)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        found: dict[str, str] = answer
        return found


def printed(report: str) -> list[str]:
    """Return the commands of a report of ocigpu doctor: the lines below "fix", without comments."""
    commands, inside = [], False
    for line in report.splitlines():
        inside = line.startswith(FIX) or (inside and line.startswith(MORE))
        text = line[len(MORE) :]
        if inside and not text.startswith("#") and "# when that fails" not in text:
            commands.append(text)
    return commands


@contextmanager
def staged_machine(directory: Path, host: SimulatedHost, image: Path, rootfs: Path) -> Iterator[Staged]:
    """A machine with the settings of a simulated host, its specification, and engines that are not started yet.

    ``directory`` keeps what engines have stored for the next machine.
    """
    directory.mkdir(exist_ok=True)
    if not (directory / "rootfs").exists():
        shutil.copytree(rootfs, directory / "rootfs", symlinks=True)
    group = f"{directory.parent.name}-staged"
    docker = (
        f"dockerd --data-root {directory}/data --exec-root {directory}/exec --pidfile {directory}/dockerd.pid"
        " --host unix:///run/docker.sock --iptables=false --ip6tables=false --ip-masq=false --bridge=none"
        f" --storage-driver overlay2 --cgroup-parent /{group}"
        " --exec-opt native.cgroupdriver=cgroupfs"
    )
    containerd = f"containerd --address {directory}/containerd.sock --root {directory}/root --state {directory}/state"
    of_machine = host_machine.cgroups_named("libpod_parent")
    own = directory.with_name(f"{directory.name}-private")
    with ExitStack() as closing:
        closing.callback(lambda: own.rmdir() if own.exists() else None)
        enter = closing.enter_context(private_machine(own))
        staged = Staged(enter, directory, host, image)
        text = SYSTEMCTL.format(directory=directory, docker=docker, containerd=containerd, path=PATH)
        staged.run("mkdir", HOME)
        staged.put("/usr/local/bin/systemctl", text, 0o755)
        staged.run("sh", REPOSITORY / "packaging/install.sh", "--bin", "/usr/local/bin", "--venv", PROGRAMS.parent)
        staged.put("/etc/ocigpu/config.toml", f'[simulation]\nroot = "{host.directory}"\n')
        staged.put("/etc/containerd/config.toml", CONTAINERD.format(directory=directory, image=IMAGE, cri=CRI))
        staged.put("/etc/containers/containers.conf", PODMAN)
        staged.run("ocigpu", "cdi", "generate", "--max-version=0.5.0", "--output=/etc/cdi/nvidia.yaml", "--quiet")
        try:
            yield staged
        finally:
            for unit in ("docker", "containerd"):
                staged.run("systemctl", "stop", unit, check=False)
            for line in reversed(host_machine.mounts_below(str(directory))):
                subprocess.run(["umount", "-l", line.split()[4]], check=False)
            host_machine.remove_cgroups("libpod_parent", but=of_machine)
            host_machine.remove_cgroups(group)
