"""The package for Debian: what it brings, and docs/VENDOR.md, typed on a machine with real apt and dockerd."""

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from support import requirements
from support.fixtures import IMAGE
from support.machine import NAME, remove_cgroups
from support.process import run
from support.product import REPOSITORY, SimulatedHost
from support.runtimes import view_of
from support.scratch import scratch_machine
from support.toolkit import CALLED, write_toolkit
from support.transcript import read_transcript

pytestmark = [pytest.mark.rest, pytest.mark.xdist_group("packages"), pytest.mark.timeout(900)]

SIMULATED = "nvidia-smi: SIMULATED host, no real GPU\n"
SYSTEMCTL = """\
#!/bin/sh
# stands in for systemd, of which this machine has Docker's unit alone
set -e
[ "$*" = "restart docker" ] || exit 0
if pid=$(cat /run/docker.pid 2>/dev/null); then
    kill "$pid"
    while [ -e "/proc/$pid/exe" ]; do sleep 0.05; done
fi
PATH=/usr/local/sbin:/usr/local/bin:$PATH setsid {view} dockerd >>/run/dockerd.log 2>&1 </dev/null &
until docker version >/dev/null 2>&1; do kill -0 $!; sleep 0.1; done
"""


def test_simulated_gpus_need_no_compiler(packages: Path, tmp_path: Path) -> None:
    run(["dpkg-deb", "--extract", next(packages.glob("ocigpu_*.deb")), tmp_path])
    (library,) = tmp_path.glob("usr/lib/ocigpu/package/*/library")
    start = "import sys; sys.path[:0] = sys.argv[1:3]; del sys.argv[1:3]\n"
    start += "import ocigpu.cli.front.main as m; sys.exit(m.main())"
    python = [sys.executable, "-I", "-S", "-c", start, library, library / "vendor"]
    words = ["sim", "exec", "--gpus", "2", "--model", "l4", "--", "nvidia-smi", "-L"]
    listed = run([*python, *words], env={"PATH": "/nowhere"}).stdout.splitlines()
    assert [line.partition(" (")[0] for line in listed] == ["GPU 0: NVIDIA L4", "GPU 1: NVIDIA L4"]


@pytest.mark.root
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_the_way_from_the_vendors_toolkit_and_back_is_what_its_page_says(
    session_directory: Path, packages: Path, simulated_host: SimulatedHost, image: Path
) -> None:
    """Every line of docs/VENDOR.md is typed; dockerd and apt are real, the toolkit notes whether it was called."""
    requirements.require(requirements.root(), requirements.programs("dockerd", "docker", "runc", "dpkg-scanpackages"))
    repository = write_toolkit(session_directory / "toolkit")
    directory = session_directory / "vendor-page"
    directory.mkdir()
    with scratch_machine(directory, hidden=REPOSITORY, shared=[session_directory], alone=True) as machine:
        (machine.root / "etc/ocigpu").mkdir()
        shutil.copy(simulated_host.settings, machine.root / "etc/ocigpu/config.toml")
        etc = machine.root / "etc"
        shutil.rmtree(etc / "apt/sources.list.d", ignore_errors=True)
        (etc / "apt/sources.list").write_text(f"deb [trusted=yes] file:{repository} ./\n")
        (etc / "apt/apt.conf.d/99tests").write_text('APT { Get::Assume-Yes "true"; Sandbox::User "root"; };\n')
        machine("apt-get", "update")
        machine("apt-get", "install", "nvidia-container-toolkit")
        view = shlex.join(view_of("v2"))
        (machine.root / "usr/bin/systemctl").unlink()
        (machine.root / "usr/bin/systemctl").write_text(SYSTEMCTL.format(view=view))
        (machine.root / "usr/bin/systemctl").chmod(0o755)
        settings = {
            "data-root": "/run/docker-data",
            "storage-driver": "vfs" if requirements.overlay() else "overlay2",
            "cgroup-parent": f"/{NAME}-vendor-page",
            "iptables": False,
            "ip6tables": False,
            "bridge": "none",
            "runtimes": {"nvidia": {"args": [], "path": "nvidia-container-runtime"}},
        }
        file = etc / "docker/daemon.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(before := json.dumps(settings, indent=4))
        try:
            machine("systemctl", "restart", "docker")
            machine("docker", "load", "--input", str(image))
            machine("docker", "tag", IMAGE, "debian")
            called = machine.root / CALLED.lstrip("/")
            typed = read_transcript("VENDOR.md", "Moving", "Back")
            assert len(typed) > 10
            for line in typed:
                called.write_text("")
                done = machine(
                    "sh", "-c", f"cd {packages} && exec 2>&1\n{line.command}", check=False, env={"NO_COLOR": "1"}
                )
                print(f"$ {line.command}\n{done.stdout}", end="")
                assert line.fits(done.stdout.replace(SIMULATED, ""))
                assert (done.returncode == 0) == ("OCIGPU-" not in line.shown)
                if line.command.startswith("docker run"):
                    assert bool(called.read_text()) == ("the toolkit's" in line.command)
                if line.command.startswith("apt install ./ocigpu-nvidia-names"):
                    done = machine("apt-get", "remove", "ocigpu-nvidia-names", check=False)
                    assert 'the runtime "nvidia" of /etc/docker/daemon.json is nvidia-container-runtime' in done.stdout
            assert file.read_text() == before
        finally:
            machine("sh", "-c", "kill $(cat /run/docker.pid)", check=False)
            remove_cgroups(f"{NAME}-vendor-page")
