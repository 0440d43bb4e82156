"""A real dockerd: our shim as one of its runtimes, and our hook under its ``--gpus``."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import requirements
from support.engines import SYSTEM_PATH, Docker, start_docker
from support.fixtures import IMAGE
from support.product import (
    CONTROL_NODES,
    GRANTED,
    LIBRARIES,
    RUNTIME,
    SimulatedHost,
    check_gpus_0_and_2,
    failed_with,
    gpu_names,
    install_vendor_names,
    listed_uuids,
)
from support.runtimes import answers, parts, probe, script, view_of

pytestmark = [pytest.mark.root, pytest.mark.engine]

RUN = ("run", "--rm", "--network=none")
WAYS = pytest.mark.parametrize(
    "way",
    [
        pytest.param(("--runtime=ocigpu", "--env=NVIDIA_VISIBLE_DEVICES=0,2"), id="runtime"),
        pytest.param(("--gpus", '"device=0,2"'), id="gpus"),
        pytest.param(("--runtime=ocigpu", "--gpus", '"device=0,2"'), id="runtime and gpus"),
    ],
)


@pytest.fixture(scope="module", params=["v1", "v2"])
def docker(
    request: pytest.FixtureRequest, session_directory: Path, image: Path, simulated_host: SimulatedHost
) -> Iterator[Docker]:
    """A dockerd on a machine with cgroup v1 or v2; the vendor's name of the hook comes first on its PATH."""
    requirements.require(requirements.programs("dockerd", "docker", "containerd", "runc"))
    view = view_of(request.param)
    directory = session_directory / f"docker-{request.param}"
    names = install_vendor_names(session_directory / f"bin-{request.param}", simulated_host.settings)
    env = {"PATH": f"{names}:{SYSTEM_PATH}", "OCIGPU_CONFIG": str(simulated_host.settings)}
    with start_docker(directory, image, {"ocigpu": str(RUNTIME)}, env, view=view) as engine:
        yield engine


@WAYS
def test_a_container_gets_exactly_the_gpus_it_asks_for(
    docker: Docker, simulated_host: SimulatedHost, way: tuple[str, ...]
) -> None:
    look = script(
        ["nvidia-smi", "-L"],
        probe(
            ["list", "/dev", "/proc/driver/nvidia/gpus"],
            ["stat", *(f"/dev/{name}" for name in GRANTED)],
            ["open", *(f"/dev/{name}" for name in GRANTED), "/dev/null"],
            ["mknod", "/dev/nvidia1", *simulated_host.number("nvidia1")],
            ["open", "/dev/nvidia1"],
        ),
        ["/dlopen", *LIBRARIES],
    )
    listing, probed, opened = parts(docker(*RUN, *way, IMAGE, *look).stdout)
    seen = check_gpus_0_and_2(simulated_host, listing, probed)
    assert seen["open", "/dev/null"] == "ok"
    assert seen["mknod", "/dev/nvidia1"] == "ok"
    assert opened.splitlines() == [f"dlopen {name} ok" for name in LIBRARIES]


@pytest.mark.rest
@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        pytest.param("all", range(8), id="all"),
        pytest.param("2", range(2), id="a number"),
        pytest.param('"device=7"', [7], id="an index"),
    ],
)
def test_docker_gpus_gives_what_its_value_says(
    docker: Docker, simulated_host: SimulatedHost, gpus: str, expected: list[int]
) -> None:
    result = docker(*RUN, "--gpus", gpus, IMAGE, "nvidia-smi", "-L")
    assert listed_uuids(result.stdout) == [simulated_host.gpus[index] for index in expected]


@WAYS
def test_gpus_are_there_for_exec_and_after_a_restart(
    docker: Docker, simulated_host: SimulatedHost, way: tuple[str, ...]
) -> None:
    name = docker("run", "--detach", "--network=none", *way, IMAGE).stdout.strip()
    try:
        for _ in range(2):
            result = docker("exec", name, "nvidia-smi", "-L")
            assert listed_uuids(result.stdout) == [simulated_host.gpus[0], simulated_host.gpus[2]]
            number = simulated_host.number("nvidia1")
            look = probe(["open", "/dev/nvidia0"], ["mknod", "/tmp/gpu1", *number], ["open", "/tmp/gpu1"])
            seen = answers(docker("exec", name, *look).stdout)
            assert seen["open", "/dev/nvidia0"] == "ENXIO"
            assert seen["open", "/tmp/gpu1"] == "EPERM"
            docker("restart", "--time=5", name)
    finally:
        docker("rm", "--force", name)


@WAYS
def test_a_loader_cache_is_merged_at_every_start_of_a_container(docker: Docker, way: tuple[str, ...]) -> None:
    """Of an image whose own cache is current; another image's is written by ldconfig at every start."""
    name, image = docker("run", "--detach", "--network=none", IMAGE).stdout.strip(), "localhost/gpu:with-cache"
    try:
        docker("exec", name, "ldconfig")
        docker("commit", name, image)
        docker("rm", "--force", name)
        for one, merged in ((image, "1"), (IMAGE, "0")):
            name = docker("run", "--detach", "--network=none", *way, one).stdout.strip()
            seen = []
            for _ in range(3):
                count = docker("exec", name, "sh", "-c", "grep -c ocigpu-ld.so.cache /etc/ld.so.cache; true").stdout
                assert count.strip() == merged
                seen.append(docker("exec", name, "ldconfig", "-p").stdout)
                docker("restart", "--time=1", name)
            assert "libcuda.so.1 " in seen[0]
            assert seen[0] == seen[1] == seen[2]
            docker("rm", "--force", name)
    finally:
        docker("rm", "--force", name, check=False)
        docker("rmi", image, check=False)


def test_two_containers_at_once_have_their_own_gpus(docker: Docker, simulated_host: SimulatedHost) -> None:
    names = []
    try:
        for index, way in enumerate((("--gpus", '"device=0"'), ("--runtime=ocigpu", "-eNVIDIA_VISIBLE_DEVICES=1"))):
            names.append(docker("run", "--detach", "--network=none", *way, IMAGE).stdout.strip())
            assert len(names) == index + 1
        for index, name in enumerate(names):
            other = f"nvidia{1 - index}"
            look = probe(
                ["list", "/dev"],
                ["mknod", f"/dev/{other}", *simulated_host.number(other)],
                ["open", f"/dev/nvidia{index}", f"/dev/{other}"],
            )
            seen = answers(docker("exec", name, *look).stdout)
            assert gpu_names(seen["list", "/dev"]) == sorted([f"nvidia{index}", *CONTROL_NODES])
            assert seen["open", f"/dev/nvidia{index}"] == "ENXIO"
            assert seen["open", f"/dev/{other}"] == "EPERM"
    finally:
        for name in names:
            docker("rm", "--force", name)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(("--runtime=ocigpu", "--env=NVIDIA_VISIBLE_DEVICES=9"), id="runtime"),
        pytest.param(("--gpus", '"device=9"'), id="gpus"),
    ],
)
def test_an_unknown_gpu_is_an_error_that_docker_shows(docker: Docker, way: tuple[str, ...]) -> None:
    result = docker(*RUN, *way, IMAGE, "echo", "started", check=False)
    assert failed_with("OCIGPU-DEV-1", result), result.stderr
    assert "started" not in result.stdout
    assert "Traceback" not in result.stderr
    assert docker("ps", "--all", "--quiet", "--filter", "status=running").stdout == ""


def test_a_container_that_asks_for_nothing_has_no_gpu(docker: Docker) -> None:
    result = docker(*RUN, "--runtime=ocigpu", IMAGE, *probe(["list", "/dev"]))
    assert gpu_names(answers(result.stdout)["list", "/dev"]) == []


def test_a_read_only_container_gets_its_gpu(docker: Docker, simulated_host: SimulatedHost) -> None:
    result = docker(*RUN, "--read-only", "--gpus", '"device=5"', IMAGE, "nvidia-smi", "-L")
    assert listed_uuids(result.stdout) == [simulated_host.gpus[5]]
