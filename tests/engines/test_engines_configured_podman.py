"""A real Podman on the files that ``ocigpu engine configure podman`` writes."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import machine, requirements
from support.engines import SYSTEM_PATH
from support.podman import Podman, make_podman
from support.process import run, wait_for
from support.product import PROGRAMS, RUNTIME, SimulatedHost, listed_uuids
from support.runtimes import container_id

pytestmark = [pytest.mark.root, pytest.mark.engine, pytest.mark.xdist_group("podman")]

WRAPPER = '#!/bin/sh\nOCIGPU_CONFIG={settings} exec {runtime} "$@"\n'
BELOW_ETC = 'mount --bind "$0" /etc/containers && exec "$@"'


@pytest.fixture
def directory(session_directory: Path) -> Iterator[Path]:
    """A directory of this test: Podman wants short paths."""
    path = session_directory / "podman-e"
    path.mkdir()
    yield path
    wait_for("what conmon has started to end", lambda: not machine.processes_of(str(path)))
    shutil.rmtree(path)


@pytest.fixture
def shim(directory: Path, simulated_host: SimulatedHost) -> Path:
    """Our shim with its settings: conmon, which starts it, keeps no variable."""
    settings = simulated_host.environment({}, "runc")["OCIGPU_CONFIG"]
    path = directory / "ocigpu-runtime"
    path.write_text(WRAPPER.format(settings=settings, runtime=RUNTIME))
    path.chmod(0o755)
    return path


@pytest.fixture
def podman(directory: Path) -> Podman:
    return make_podman(directory / "podman", "")


@pytest.mark.parametrize("default", [False, True], ids=["by name", "by default"])
def test_the_runtime_gives_gpus(
    podman: Podman, shim: Path, simulated_host: SimulatedHost, rootfs: Callable[[str], Path], default: bool
) -> None:
    file = podman.directory / "containers.conf"
    before = file.read_bytes()
    words = ["--config", file, "--runtime-path", shim, *(["--default"] if default else [])]
    output = run([PROGRAMS / "ocigpu", "engine", "configure", "podman", *words]).stdout
    assert "checked by: podman --version" in output
    assert "remains" not in output
    runtime = "" if default else "ocigpu"
    ask = "--env=NVIDIA_VISIBLE_DEVICES=4"
    result = podman.run_rootfs(runtime, [], rootfs("glibc"), ["nvidia-smi", "-L"], ask)
    assert listed_uuids(result.stdout) == [simulated_host.gpus[4]], result.stderr
    for command, device, reason in (("true", "99", "this host has GPUs 0-7"), ("no-such", "4", '"no-such"')):
        refused = podman.run_rootfs(runtime, [], rootfs("glibc"), [command], f"--env=NVIDIA_VISIBLE_DEVICES={device}")
        assert refused.returncode != 0
        assert reason in refused.stderr  # Podman reads runc's reasons only from a log whose form it knows
    run([PROGRAMS / "ocigpu", "engine", "remove", "podman", "--config", file])
    assert file.read_bytes() == before


def test_podman_finds_the_runtime_in_the_drop_in(directory: Path, shim: Path) -> None:
    requirements.require(requirements.cgroup_v2(), requirements.programs("podman", "conmon", "runc"))
    etc = directory / "containers"
    etc.mkdir()
    (etc / "containers.conf").write_text("# ours\n[engine]\nevents_logger = 'none'\n")
    view = () if requirements.is_unified() else requirements.CGROUP2_VIEW
    private = [*view, "unshare", "--mount", "sh", "-c", BELOW_ETC, etc]
    ocigpu = [*private, PROGRAMS / "ocigpu", "engine"]
    run([*ocigpu, "configure", "podman", "--default", "--runtime-path", shim])
    assert [path.name for path in (etc / "containers.conf.d").iterdir()] == ["99-ocigpu.conf"]
    places = ["--root", directory / "storage", "--runroot", directory / "run", "--storage-driver", "vfs"]
    info = ["podman", *places, "info", "--format={{.Host.OCIRuntime.Name}} {{.Host.OCIRuntime.Path}}"]
    env = {"PATH": SYSTEM_PATH, "HOME": str(directory)}
    assert run([*private, *info], env=env).stdout.strip() == f"ocigpu {shim}"
    (status,) = json.loads(run([*ocigpu, "status", "podman", "--json"]).stdout)["engines"]
    assert (status["is_default"], status["problems"]) == (True, [])
    run([*ocigpu, "remove", "podman"])
    assert [path.name for path in etc.iterdir()] == ["containers.conf"]


def test_a_container_without_cgroups_gets_its_gpus(
    directory: Path, simulated_host: SimulatedHost, runtime_environment: dict[str, str], rootfs: Callable[[str], Path]
) -> None:
    """Podman asks a list of its configuration which runtimes can do that; crun can."""
    podman = make_podman(directory / "podman", runtime_environment.get("LD_PRELOAD", ""))
    settings = directory / "settings.toml"
    crun = podman.directory / "crun"
    settings.write_text(f'runtime.runtimes = ["{crun}"]\nsimulation.root = "{simulated_host.directory}"\n')
    settings.chmod(0o644)
    shim = directory / "ocigpu-runtime"
    shim.write_text(WRAPPER.format(settings=settings, runtime=RUNTIME))
    shim.chmod(0o755)
    file = podman.directory / "containers.conf"
    words = ["engine", "configure", "podman", "--config", file, "--runtime-path", shim]
    run([PROGRAMS / "ocigpu", *words], env={**os.environ, "OCIGPU_CONFIG": str(settings)})
    root = directory / "root"
    shutil.copytree(rootfs("glibc"), root, symlinks=True)
    ask = ["--cgroups=disabled", "--env=NVIDIA_VISIBLE_DEVICES=4", "--rootfs", root, "nvidia-smi", "-L"]
    of_machine = machine.cgroups_named("libpod_parent")
    result = podman.run_words("ocigpu", container_id(), ["run", "--rm"], *ask)
    machine.remove_cgroups("libpod_parent", but=of_machine)  # conmon's; Podman takes no --cgroup-parent here
    assert listed_uuids(result.stdout) == [simulated_host.gpus[4]], result.stderr
