"""Mode ``spec`` behind real engines: a dockerd and a containerd whose shim declares everything."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import requirements
from support.engines import SYSTEM_PATH, Docker, start_containerd, start_docker
from support.fixtures import IMAGE
from support.product import (
    LIBRARIES,
    RUNTIME,
    SimulatedHost,
    failed_with,
    install_vendor_names,
    listed_uuids,
    look_at_gpus_0_and_2,
)
from support.runtimes import container_id, probe, script, view_of

pytestmark = [pytest.mark.root, pytest.mark.engine, pytest.mark.rest]

RUN = ("run", "--rm", "--network=none", "--runtime=ocigpu")
ASKS = "--env=NVIDIA_VISIBLE_DEVICES=0,2"
BECAUSE = "the hook provides the container's GPUs, because"


@pytest.fixture(scope="module")
def log(session_directory: Path) -> Path:
    """What the shim says; nothing but this file tells which way a container came by its GPUs."""
    return session_directory / "spec-engines.log"


@pytest.fixture(scope="module")
def settings(session_directory: Path, simulated_host: SimulatedHost, log: Path) -> Path:
    path = session_directory / "spec-engines.toml"
    text = simulated_host.settings.read_text()
    path.write_text(f'mode = "spec"\nruntime.log = "{log}"\n{text}')
    path.chmod(0o644)
    return path


@pytest.fixture(scope="module")
def docker(session_directory: Path, image: Path, simulated_host: SimulatedHost, settings: Path) -> Iterator[Docker]:
    """A dockerd on a machine with cgroup v2; the vendor's name of the hook is on its PATH, too."""
    requirements.require(requirements.programs("dockerd", "docker", "containerd", "runc"))
    names = install_vendor_names(session_directory / "bin-spec", simulated_host.settings)
    env = {"PATH": f"{names}:{SYSTEM_PATH}", "OCIGPU_CONFIG": str(settings)}
    directory = session_directory / "docker-spec"
    with start_docker(directory, image, {"ocigpu": str(RUNTIME)}, env, view=view_of("v2")) as engine:
        yield engine


@pytest.fixture
def said(log: Path) -> Callable[[], str]:
    """Call it after a start: what the shim has logged since the test began."""
    start = log.stat().st_size if log.exists() else 0
    return lambda: log.read_text()[start:]


def look(host: SimulatedHost) -> list[str]:
    hidden = "/proc/driver/nvidia/gpus/0000:02:00.0/information"
    return script(
        ["nvidia-smi", "-L"],
        probe(
            ["list", "/dev"],
            ["mknod", "/dev/nvidia1", *host.number("nvidia1")],
            ["open", "/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2", "/dev/nvidiactl"],
            ["read", hidden],
        ),
        ["/dlopen", *LIBRARIES],
    )


def assert_has_gpus_0_and_2(host: SimulatedHost, output: str) -> None:
    seen = look_at_gpus_0_and_2(host, output)
    assert seen["open", "/dev/nvidia1"] == "EPERM"
    assert host.gpus[1] not in output


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((ASKS,), id="variable"),
        pytest.param(("--gpus", '"device=0,2"'), id="gpus, with the vendor's hook"),
        pytest.param((ASKS, "--read-only", "--tmpfs=/tmp", "--tmpfs=/run"), id="read-only"),
        pytest.param((ASKS, "--volume=/usr/share:/usr/share:ro", "--volume=/data"), id="volumes"),
    ],
)
def test_docker_needs_no_hook(
    docker: Docker, simulated_host: SimulatedHost, said: Callable[[], str], words: tuple[str, ...]
) -> None:
    result = docker(*RUN, *words, IMAGE, *look(simulated_host))
    assert_has_gpus_0_and_2(simulated_host, result.stdout)
    assert BECAUSE not in said()
    assert f"granted {simulated_host.gpus[0]}, {simulated_host.gpus[2]}" in said()


def test_docker_gets_the_hook_for_a_volume_over_a_place_of_ours(
    docker: Docker, simulated_host: SimulatedHost, said: Callable[[], str], work_directory: Path
) -> None:
    (work_directory / "passwd").write_text("root:x:0:0:root:/:/bin/sh\n")
    volume = f"--volume={work_directory}:/usr/../etc/"
    result = docker(*RUN, ASKS, volume, IMAGE, *look(simulated_host))
    assert_has_gpus_0_and_2(simulated_host, result.stdout)
    assert f"{BECAUSE} /etc/ld.so.cache is in or below what is mounted on /etc" in said()


def test_docker_gets_the_hook_for_who_may_open_other_gpus(
    docker: Docker, simulated_host: SimulatedHost, said: Callable[[], str]
) -> None:
    arguments = ("--device-cgroup-rule=c 195:* rwm", ASKS, IMAGE, "nvidia-smi", "-L")
    result = docker(*RUN, *arguments)
    assert listed_uuids(result.stdout) == [simulated_host.gpus[0], simulated_host.gpus[2]]
    assert f"{BECAUSE} it may make and open nodes of GPUs that are not granted" in said()


def test_gpus_are_there_for_exec_and_after_a_restart(
    docker: Docker, simulated_host: SimulatedHost, said: Callable[[], str]
) -> None:
    name = docker("run", "--detach", "--network=none", "--runtime=ocigpu", ASKS, IMAGE).stdout.strip()
    try:
        for _ in range(2):
            result = docker("exec", name, *look(simulated_host))
            assert_has_gpus_0_and_2(simulated_host, result.stdout)
            docker("exec", name, "rm", "/dev/nvidia1")
            docker("restart", "--time=5", name)
    finally:
        docker("rm", "--force", name)
    assert BECAUSE not in said()


def test_an_unknown_gpu_is_an_error_that_docker_shows(docker: Docker) -> None:
    result = docker(*RUN, "--env=NVIDIA_VISIBLE_DEVICES=9", IMAGE, "echo", "started", check=False)
    assert failed_with("OCIGPU-DEV-1", result), result.stderr
    assert "started" not in result.stdout


def test_containerd_needs_no_hook(
    session_directory: Path, image: Path, simulated_host: SimulatedHost, settings: Path, said: Callable[[], str]
) -> None:
    requirements.require(requirements.programs("containerd", "ctr", "runc"))
    directory, env = session_directory / "containerd-spec", {"OCIGPU_CONFIG": str(settings)}
    with start_containerd(directory, image, {"ocigpu": str(RUNTIME)}, env, sandbox_image=IMAGE) as engine:
        words = ["run", "--rm", "--snapshotter", engine.snapshotter, "--fifo-dir", str(directory / "fifo")]
        words += ["--runtime", "io.containerd.runc.v2", "--runc-binary", str(RUNTIME)]
        variable = ["--env", "NVIDIA_VISIBLE_DEVICES=0,2"]
        result = engine(*words, *variable, IMAGE, container_id(), *look(simulated_host))
    assert_has_gpus_0_and_2(simulated_host, result.stdout)
    assert BECAUSE not in said()
    assert "granted" in said()
