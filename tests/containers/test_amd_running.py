"""explain, verify, attach and detach on a running container with AMD's GPUs."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from containers_lab import WAITING, Made, container, settings_with
from live_lab import execute, ocigpu, verify
from support.fixtures import MakeBundle
from support.product import SimulatedHost
from support.runtimes import answers, probe

from ocigpu.sim.create import create_host

pytestmark = [pytest.mark.root, pytest.mark.engine]


@pytest.fixture(scope="module")
def amd_host(session_directory: Path) -> SimulatedHost:
    directory = session_directory / "host-amd-running"
    create_host(str(directory), gpus=4, model="mi300x")
    marker = json.loads((directory / ".ocigpu-sim.json").read_text())
    return SimulatedHost(directory, tuple(gpu["uuid"] for gpu in marker["gpus"]), ())


@pytest.fixture(params=["hook", "spec"])
def gpu_1(
    amd_host: SimulatedHost,
    make_bundle: MakeBundle,
    runtime_environment: dict[str, str],
    work_directory: Path,
    request: pytest.FixtureRequest,
) -> Iterator[Made]:
    bundle = make_bundle(WAITING, {"AMD_VISIBLE_DEVICES": "1"})
    settings = settings_with(amd_host, "runc", work_directory / "config.toml", request.param)
    with container(bundle, runtime_environment, host=amd_host, settings=settings) as made:
        yield made


def opens(made: Made, host: SimulatedHost) -> list[int]:
    """Return which GPUs the container may open by both of their nodes; each node alone is an error."""
    names = [sorted(path.name for path in (host.directory / "dev/dri").glob(kind)) for kind in ("card*", "renderD*")]
    pairs = list(zip(*names, strict=True))
    said = answers(execute(made, *probe(["open", *(f"/dev/dri/{name}" for pair in pairs for name in pair)])))
    found = [{said["open", f"/dev/dri/{name}"] == "ENXIO" for name in pair} for pair in pairs]
    assert all(len(pair) == 1 for pair in found)
    return [index for index, pair in enumerate(found) if pair == {True}]


@pytest.mark.rest
def test_a_gpu_comes_and_goes(gpu_1: Made, amd_host: SimulatedHost) -> None:
    assert opens(gpu_1, amd_host) == [1]
    assert "/dev/kfd" in verify(gpu_1)["nodes"]  # and exit status 0: all is as it is to be
    attached = json.loads(ocigpu(gpu_1, "attach", gpu_1.name, "--gpu", "3", "--json").stdout)
    assert attached["devices"] == [amd_host.gpus[1], amd_host.gpus[3]]
    assert opens(gpu_1, amd_host) == [1, 3]
    assert "/dev/kfd" in verify(gpu_1)["nodes"]  # and exit status 0: all is as it is to be
    ocigpu(gpu_1, "detach", gpu_1.name, "--gpu", amd_host.gpus[1])
    assert opens(gpu_1, amd_host) == [3]
    assert "/dev/kfd" in verify(gpu_1)["nodes"]  # and exit status 0: all is as it is to be
    ocigpu(gpu_1, "attach", gpu_1.name, "--gpu", "9", status=1)
    assert opens(gpu_1, amd_host) == [3]


def test_explain_says_where_each_node_comes_from(gpu_1: Made, amd_host: SimulatedHost) -> None:
    said = ocigpu(gpu_1, "explain", gpu_1.name).stdout
    assert "AMD_VISIBLE_DEVICES=1" in said
    assert amd_host.gpus[1] in said
    assert "/dev/kfd" in said
