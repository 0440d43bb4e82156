"""Containers of a real dockerd: looked into, changed and repaired without asking it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from containers_lab import Made
from live_lab import ocigpu, verify
from support import requirements
from support.engines import SYSTEM_PATH, Docker, start_docker
from support.fixtures import IMAGE
from support.product import RUNTIME, SimulatedHost, install_vendor_names, listed_uuids
from support.runtimes import answers, probe, view_of

pytestmark = [pytest.mark.root, pytest.mark.engine, pytest.mark.rest]


@pytest.fixture(scope="module", params=["v1", "v2"])
def docker(
    request: pytest.FixtureRequest, session_directory: Path, image: Path, simulated_host: SimulatedHost
) -> Iterator[tuple[Docker, tuple[str, ...], Path]]:
    """A dockerd on a machine with cgroup v1 or v2, the words before commands there, and its directory."""
    requirements.require(requirements.programs("dockerd", "docker", "containerd", "runc"))
    words = view_of(request.param)
    directory = session_directory / f"attach-docker-{request.param}"
    names = install_vendor_names(session_directory / f"attach-bin-{request.param}", simulated_host.settings)
    env = {"PATH": f"{names}:{SYSTEM_PATH}", "OCIGPU_CONFIG": str(simulated_host.settings)}
    with start_docker(directory, image, {"ocigpu": str(RUNTIME)}, env, view=words) as engine:
        yield engine, words, directory


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(("--runtime=ocigpu", "--env=NVIDIA_VISIBLE_DEVICES=0"), id="runtime"),
        pytest.param(("--gpus", '"device=0"'), id="gpus"),
    ],
)
def test_a_container_of_docker_gets_one_more_and_one_less(
    docker: tuple[Docker, tuple[str, ...], Path], simulated_host: SimulatedHost, way: tuple[str, ...]
) -> None:
    engine, words, directory = docker
    host = simulated_host
    name = "gpus"
    engine("run", "--detach", "--name", name, "--network=none", *way, IMAGE)
    environment = {"PATH": SYSTEM_PATH, "OCIGPU_CONFIG": str(host.settings)}
    command = (*words, "runc", "--root", str(directory))
    state = directory / "exec/runtime-*/moby"
    made = Made(name, command, directory, state, environment)

    def listed() -> list[str]:
        return listed_uuids(engine("exec", name, "nvidia-smi", "-L").stdout)

    def opened(number: int) -> str:
        commands = (["mknod", "/tmp/made", *host.number(f"nvidia{number}")], ["open", "/tmp/made"])
        answer = answers(engine("exec", name, *probe(*commands)).stdout)["open", "/tmp/made"]
        engine("exec", name, "rm", "/tmp/made")
        return answer

    try:
        assert verify(made)["devices"] == [host.gpus[0]]
        ocigpu(made, "attach", name, "--gpu", "5")
        assert listed() == [host.gpus[0], host.gpus[5]]
        assert (opened(5), opened(4)) == ("ENXIO", "EPERM")
        engine("update", "--cpu-shares", "512", name)
        ocigpu(made, "repair", name)
        assert listed() == [host.gpus[0], host.gpus[5]]
        assert (opened(0), opened(5), opened(4)) == ("ENXIO", "ENXIO", "EPERM")
        ocigpu(made, "detach", name, "--gpu", "0")
        assert (listed(), opened(0)) == ([host.gpus[5]], "EPERM")
        verify(made)
        engine("restart", "--time=1", name)
        assert listed() == [host.gpus[0]]
        assert verify(made)["devices"] == [host.gpus[0]]
    finally:
        engine("rm", "--force", name)
