"""WSL: no start and no finding tells to install a driver there, and what is told works."""

import contextlib
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.fixtures import Run
from support.product import PROGRAMS
from support.trees import write_tree

from ocigpu.core.errors import HostError
from ocigpu.doctor.findings import Finding
from ocigpu.doctor.host import Host
from ocigpu.doctor.report import render, run_checks
from ocigpu.doctor.works import find_works
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.gpus.nvidia.kmods import missing_modules
from ocigpu.gpus.nvidia.nodes import read_driver
from ocigpu.gpus.tree import Roots, find_roots

FORBIDDEN = (
    "Install the driver",
    "no driver is loaded",
    "modprobe",
    "apt-get install nvidia",
    "engine configure docker",
)
LIBRARIES, STORE = "/usr/lib/wsl/lib", "/usr/lib/wsl/drivers/nv_dispi.inf_amd64_1"
SYSTEM = {
    "/etc/passwd": "root:x:0:0::/root:/bin/sh\n",
    "/proc/sys/kernel/osrelease": "5.15.167.4-microsoft-standard-WSL2\n",
}
WSL = SYSTEM | {
    f"{LIBRARIES}/libdxcore.so": "",
    f"{LIBRARIES}/nvidia-smi": "560",
    **{f"{STORE}/{name}": "560" for name in ("libcuda.so.1.1", "libnvidia-ml.so.1", "nvidia-smi")},
}


def make_wsl(directory: Path, docker: str = "28.5.1") -> Path:
    write_tree(directory, WSL)
    (directory / "dev").mkdir(exist_ok=True)
    os.mknod(directory / "dev/dxg", stat.S_IFCHR | 0o666, os.makedev(10, 125))
    for name in ("docker", "dockerd", "ocigpu-runtime", "ocigpu-hook", "runc", "nvidia-container-runtime-hook"):
        program = directory / "usr/bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    status = directory / "var/lib/dpkg/status"
    status.parent.mkdir(parents=True)
    status.write_text(f"Package: docker-ce\nStatus: install ok installed\nVersion: 5:{docker}-1~debian\n")
    return directory


def text_of(root: Path, everything: bool = True) -> str:
    host = Host(str(root))
    return "\n".join(render(host, run_checks(host), everything))


def bad(root: Path) -> dict[str, Finding]:
    return {item.name: item for item in run_checks(Host(str(root))) if item.is_bad}


@pytest.mark.root
@pytest.mark.parametrize("docker", ["20.10.24", "27.3.1", "28.5.1"])
def test_the_doctor_names_wsl_and_what_works_there(docker: str, tmp_path: Path, run: Run) -> None:
    root = make_wsl(tmp_path, docker)
    said = text_of(root)
    assert [words for words in FORBIDDEN if words in said] == []
    assert "WSL: Windows has a driver of NVIDIA" in said.splitlines()[0]
    found = bad(root)["cdi-missing"]
    assert found.fixes[0] == f"ocigpu cdi generate --mode wsl --output {root}/etc/cdi/nvidia.yaml"
    assert "ocigpu config set mode cdi" in found.fixes[2]


@pytest.mark.root
def test_docker_gives_the_gpus_of_wsl_by_cdi_and_never_by_its_hook(tmp_path: Path) -> None:
    root = make_wsl(tmp_path)
    write_tree(root, {"/etc/docker/daemon.json": '{"runtimes": {"ocigpu": {"path": "/usr/bin/ocigpu-runtime"}}}'})
    spec = "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: all\n  containerEdits:\n    deviceNodes:\n"
    write_tree(root, {"/etc/cdi/nvidia.yaml": f"{spec}    - path: /dev/dxg\n"})
    host = Host(str(root))
    (docker,) = [work for work in find_works(host, []) if work.what == "Docker"]
    assert docker.ways == {"--runtime": False, "--gpus": False, "CDI": True}
    write_tree(root, {"/etc/ocigpu/config.toml": 'mode = "cdi"\n'})
    host = Host(str(root))
    (docker,) = [work for work in find_works(host, []) if work.what == "Docker"]
    assert docker.ways == {"--runtime": True, "--gpus": False, "CDI": True}


@pytest.mark.root
def test_a_docker_without_cdi_gets_no_hook_on_wsl(tmp_path: Path) -> None:
    root = make_wsl(tmp_path, "27.3.1")
    spec = "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: all\n  containerEdits:\n    deviceNodes:\n"
    write_tree(root, {"/etc/cdi/nvidia.yaml": f"{spec}    - path: /dev/dxg\n"})
    found = bad(root)["engine-not-configured"]
    assert "engine configure --no-gpus-hook docker" in found.fixes[1]
    assert [words for words in FORBIDDEN if words in text_of(root)] == []


@pytest.mark.root
def test_a_driver_of_linux_in_wsl_is_in_the_way(tmp_path: Path) -> None:
    root = make_wsl(tmp_path)
    write_tree(root, {"/usr/lib/x86_64-linux-gnu/libcuda.so.1": ""})
    assert bad(root)["wsl-gpus"].severity == "warning"


def test_wsl_without_a_gpu_is_told_what_to_do_in_windows(tmp_path: Path) -> None:
    found = bad(write_tree_of(tmp_path))["wsl-gpus"]
    assert found.severity == "error"
    assert "in Windows: install NVIDIA's driver" in found.fixes[0]
    assert [words for words in FORBIDDEN if words in text_of(tmp_path)] == []


def write_tree_of(directory: Path) -> Path:
    write_tree(directory, SYSTEM)
    return directory


@pytest.mark.parametrize("has_gpu", [True, False])
def test_every_error_about_the_driver_names_wsl(has_gpu: bool, tmp_path: Path) -> None:
    settings = write_tree(tmp_path, WSL if has_gpu else SYSTEM)
    if has_gpu:
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev/dxg").touch()
    roots = find_roots(settings)
    real = Roots(roots.driver, roots.dev, roots.proc, roots.sys, False)
    for fail in (lambda: read_host_facts(settings), lambda: read_driver(roots), lambda: missing_modules(real)):
        with pytest.raises(HostError) as caught:
            fail()
        assert caught.value.code == "OCIGPU-HOST-1"
        assert caught.value.message.startswith("this is WSL")
        hint = caught.value.hint or ""
        assert ("cdi generate --mode wsl" in hint) is has_gpu
        assert "Install the driver and load" not in hint


STAGE = """\
set -e
mkdir -p "$0/dev" "$0/cdi" "$0/wsl/lib" "$0/wsl/drivers/nv_1"
for n in null zero full random urandom tty; do cp -a /dev/$n "$0/dev/"; done
mkdir "$0/dev/pts" "$0/dev/shm"
mknod -m 666 "$0/dev/dxg" c 10 125
for f in libcuda.so.1.1 libnvidia-ml.so.1 nvidia-smi; do echo 1 > "$0/wsl/drivers/nv_1/$f"; done
echo 1 > "$0/wsl/lib/nvidia-smi"; echo d > "$0/wsl/lib/libdxcore.so"
mkdir -p /usr/lib/wsl /etc/cdi
mount --bind "$0/dev" /dev
mount --bind "$0/wsl" /usr/lib/wsl
mount --bind "$0/cdi" /etc/cdi
"$1" plan --devices all 2>&1 && exit 9
"$1" cdi generate --mode wsl --output /etc/cdi/nvidia.yaml
echo 'mode = "cdi"' > "$0/config.toml"
OCIGPU_CONFIG="$0/config.toml" "$1" plan --devices all
"$1" engine configure docker --dry-run --runtime-path /bin/true --engine-config "$0/daemon.json"
"""


@pytest.mark.root
def test_what_a_start_is_told_on_wsl_works(tmp_path: Path) -> None:
    """A mount namespace with the files of WSL: the hint's command, then mode cdi, give the device."""
    environment = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:/usr/sbin:/usr/bin:/sbin:/bin"}
    environment.pop("OCIGPU_CONFIG", None)
    command = [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        STAGE,
        str(tmp_path),
        str(PROGRAMS / "ocigpu"),
    ]
    made = [path for path in ("/usr/lib/wsl", "/etc/cdi") if not os.path.exists(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    for path in made:
        with contextlib.suppress(OSError):  # somebody else has put something there
            os.rmdir(path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "this is WSL" in done.stdout
    assert "hint: ocigpu cdi generate --mode wsl --output /etc/cdi/nvidia.yaml" in done.stdout
    assert "/dev/dxg" in done.stdout.rpartition("WHERE")[2]
    assert "neither --gpus nor mode hook can provide its GPUs" in done.stdout + done.stderr
    assert "nvidia-container-runtime-hook" not in done.stdout
