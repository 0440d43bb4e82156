"""A real dockerd on the files that ``ocigpu engine configure docker`` writes."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import requirements
from support.engines import SYSTEM_PATH, Docker, start_docker
from support.fixtures import IMAGE
from support.process import run, wait_for
from support.product import PROGRAMS, RUNTIME, SimulatedHost, listed_uuids
from support.runtimes import view_of

from ocigpu.engines.checker import program_version

pytestmark = [pytest.mark.root, pytest.mark.engine, pytest.mark.rest]

CONFIGURE = (PROGRAMS / "ocigpu", "engine", "configure", "docker", "--no-gpus-hook", "--runtime-path", RUNTIME)
RUN = ("run", "--rm", "--network=none")
ASK = ("--env=NVIDIA_VISIBLE_DEVICES=1,3", IMAGE, "nvidia-smi", "-L")


def engine(*words: str | Path) -> str:
    return run([PROGRAMS / "ocigpu", "engine", *words]).stdout


@pytest.fixture(scope="module")
def hooks(session_directory: Path, simulated_host: SimulatedHost) -> Path:
    """Our programs, of which the hook knows the simulated host, and an empty directory for the link."""
    directory = session_directory / "configured-docker-bin"
    script = Path(__file__).parents[2] / "packaging" / "install.sh"
    venv = str(PROGRAMS.parent)
    run(["sh", script, "--bin", directory, "--venv", venv, "--config", simulated_host.settings, "--vendor-names"])
    (directory / "path").mkdir()
    return directory


@pytest.fixture(scope="module")
def docker(
    session_directory: Path, image: Path, simulated_host: SimulatedHost, hooks: Path
) -> Iterator[tuple[Docker, Path]]:
    """A dockerd whose file was configured with the hook, and the file."""
    requirements.require(requirements.programs("dockerd", "docker", "containerd", "runc"))
    directory = session_directory / "configured-docker"
    originals = []

    def prepare(file: Path) -> None:
        originals.append(file.read_bytes())
        words = ("--runtime-path", hooks / "ocigpu-runtime", "--hook-dir", hooks / "path")
        output = engine("configure", "docker", "--config", file, *words)
        assert '+    "ocigpu"' in output
        assert "next step: systemctl restart docker" in output  # it looks for the hook only then

    env = {"PATH": f"{hooks / 'path'}:{SYSTEM_PATH}", "OCIGPU_CONFIG": str(simulated_host.settings)}
    with start_docker(directory, image, {}, env, view=view_of("v2"), prepare=prepare) as started:
        file = directory / "daemon.json"
        yield started, file
    engine("remove", "docker", "--config", file)
    assert file.read_bytes() == originals[0]
    assert list((hooks / "path").iterdir()) == []


def test_the_runtime_gives_gpus(docker: tuple[Docker, Path], simulated_host: SimulatedHost) -> None:
    listing = docker[0](*RUN, "--runtime=ocigpu", *ASK).stdout
    assert listed_uuids(listing) == [simulated_host.gpus[1], simulated_host.gpus[3]]


def test_the_linked_hook_gives_gpus(docker: tuple[Docker, Path], simulated_host: SimulatedHost) -> None:
    listing = docker[0](*RUN, "--gpus", '"device=2"', IMAGE, "nvidia-smi", "-L").stdout
    assert listed_uuids(listing) == [simulated_host.gpus[2]]


def test_the_default_runtime_comes_with_a_reload_and_goes_from_the_file(
    docker: tuple[Docker, Path], simulated_host: SimulatedHost, hooks: Path
) -> None:
    started, file = docker
    before = file.read_bytes()
    words = ("--config", file, "--runtime-path", hooks / "ocigpu-runtime")
    assert "nothing to do" in engine("configure", "docker", *words)
    assert "next step: systemctl reload docker" in engine("configure", "docker", "--default", *words)
    os.kill(int((started.socket.parent / "pid").read_text()), signal.SIGHUP)
    default = "--format={{.DefaultRuntime}}"
    wait_for("dockerd to have read its file", lambda: started("info", default).stdout.strip() == "ocigpu")
    listing = started(*RUN, *ASK).stdout
    assert listed_uuids(listing) == [simulated_host.gpus[1], simulated_host.gpus[3]]
    assert "next step: systemctl restart docker" in engine("remove", "docker", "--config", file)
    assert b"ocigpu-runtime" not in file.read_bytes()
    engine("configure", "docker", *words, "--hook-dir", hooks / "path")
    assert file.read_bytes() == before


@pytest.fixture
def named_nvidia(docker: tuple[Docker, Path], hooks: Path) -> Iterator[Docker]:
    """The dockerd with the runtime "nvidia", as Dev Containers look for it; its file is as it was afterwards."""
    started, file = docker
    before = file.read_bytes()
    run([hooks / "ocigpu", "engine", "configure", "docker", "--name", "nvidia", "--no-gpus-hook", "--config", file])
    os.kill(int((started.socket.parent / "pid").read_text()), signal.SIGHUP)
    entry = ("info", "--format={{.Runtimes.nvidia}}")
    wait_for("dockerd to have read its file", lambda: "nvidia-container-runtime" in started(*entry).stdout)
    yield started
    engine("remove", "docker", "--config", file)
    engine("configure", "docker", "--config", file, "--runtime-path", hooks / "ocigpu-runtime", "--hook-dir",
           hooks / "path")  # fmt: skip
    assert file.read_bytes() == before


def test_dev_containers_find_the_vendors_name(named_nvidia: Docker, simulated_host: SimulatedHost) -> None:
    """Dev Containers pass --gpus where ``docker info`` has the name (devcontainers/cli: checkDockerSupportForGPU)."""
    listing = named_nvidia(*RUN, "--runtime=nvidia", *ASK).stdout
    assert listed_uuids(listing) == [simulated_host.gpus[1], simulated_host.gpus[3]]


@pytest.mark.program("devcontainer")
@pytest.mark.parametrize("words", [{"hostRequirements": {"gpu": True}}, {"runArgs": ["--gpus", "all"]}], ids=str)
def test_the_devcontainer_command_gives_gpus(
    named_nvidia: Docker, simulated_host: SimulatedHost, work_directory: Path, words: dict[str, Any]
) -> None:
    """``--gpu-availability`` is left at "detect": it asks ``docker info`` itself."""
    arguments = ["--network=none", *words.get("runArgs", ())]
    settings = {"image": IMAGE, "updateRemoteUserUID": False, "remoteUser": "root", **words, "runArgs": arguments}
    (work_directory / ".devcontainer.json").write_text(json.dumps(settings))
    env = {"PATH": os.environ["PATH"], "DOCKER_HOST": f"unix://{named_nvidia.socket}"}
    env |= dict.fromkeys(("HOME", "TMPDIR"), str(work_directory))
    place = ("--workspace-folder", work_directory, "--user-data-folder", work_directory / "data")
    up = run(["devcontainer", "up", *place], env=env)
    try:
        listing = run(["devcontainer", "exec", *place, "nvidia-smi", "-L"], env=env).stdout
    finally:
        named_nvidia("rm", "--force", json.loads(up.stdout.splitlines()[-1])["containerId"])
    assert listed_uuids(listing) == list(simulated_host.gpus)


def test_cdi_is_switched_on_where_docker_has_it(docker: tuple[Docker, Path], tmp_path: Path) -> None:
    file = tmp_path / "daemon.json"
    file.write_text('{"features": {"containerd-snapshotter": false}}\n')
    words = [*CONFIGURE, "--cdi", "--config", file]
    result = run(words, check=False)
    version = program_version("/", "docker")
    if version and version < (25, 0):
        assert result.returncode == 1
        assert "OCIGPU-ENG-5" in result.stderr
        assert "25.0 is the first" in result.stderr
        return
    assert result.returncode == 0, result.stderr
    assert json.loads(file.read_text())["features"] == {"containerd-snapshotter": False, "cdi": True}


def test_what_dockerd_refuses_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / "daemon.json"
    file.write_text('{"no-such-option": 1}\n')
    words = [*CONFIGURE, "--config", file]
    result = run(words, check=False)
    version = program_version("/", "docker")
    if version and version < (23, 0):  # no --validate
        assert "checked by" not in result.stdout
        return
    assert (result.returncode, file.read_text()) == (1, '{"no-such-option": 1}\n')
    assert "no-such-option" in result.stderr
