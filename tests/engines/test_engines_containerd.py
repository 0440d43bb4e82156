"""A real containerd: our shim as ctr's runtime program, and as the runtime of a Kubernetes pod."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import requirements
from support.engines import SYSTEM_PATH, Containerd, start_containerd
from support.fixtures import IMAGE
from support.process import run
from support.product import (
    CONTROL_NODES,
    LIBRARIES,
    PROGRAMS,
    RUNTIME,
    SimulatedHost,
    gpu_names,
    listed_uuids,
    look_at_gpus_0_and_2,
)
from support.runtimes import answers, container_id, parts, probe, script

pytestmark = [pytest.mark.root, pytest.mark.engine]

HOST_NETWORK = 2


@pytest.fixture(scope="module")
def containerd(session_directory: Path, image: Path, simulated_host: SimulatedHost) -> Iterator[Containerd]:
    requirements.require(requirements.programs("containerd", "ctr", "runc"))
    env = {"OCIGPU_CONFIG": str(simulated_host.settings)}
    runtimes = {"ocigpu": str(RUNTIME)}
    directory = session_directory / "containerd"
    with start_containerd(directory, image, runtimes, env, sandbox_image=IMAGE) as engine:
        yield engine


def look_around(host: SimulatedHost) -> list[str]:
    return script(
        ["nvidia-smi", "-L"],
        probe(
            ["list", "/dev", "/proc/driver/nvidia/gpus"],
            ["mknod", "/dev/nvidia1", *host.number("nvidia1")],
            ["open", "/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2", "/dev/nvidiactl"],
        ),
        ["/dlopen", *LIBRARIES],
    )


def assert_has_gpus_0_and_2(host: SimulatedHost, output: str) -> None:
    seen = look_at_gpus_0_and_2(host, output)
    assert sorted(seen["list", "/proc/driver/nvidia/gpus"].split()) == ["0000:01:00.0", "0000:03:00.0"]
    assert seen["mknod", "/dev/nvidia1"] == "ok"
    assert seen["open", "/dev/nvidia1"] == "EPERM"


def ctr_run(
    engine: Containerd,
    *words: str,
    check: bool = True,
    runtime: str | Path = RUNTIME,
    env: dict[str, str] | None = None,
) -> Any:
    return engine(
        "run",
        "--rm",
        "--snapshotter",
        engine.snapshotter,
        "--fifo-dir",
        str(engine.directory / "fifo"),
        "--runtime",
        "io.containerd.runc.v2",
        "--runc-binary",
        str(runtime),
        *words,
        check=check,
        env=env,
    )


def test_ctr_runs_a_container_with_gpus(containerd: Containerd, simulated_host: SimulatedHost) -> None:
    look = look_around(simulated_host)
    result = ctr_run(containerd, "--env", "NVIDIA_VISIBLE_DEVICES=0,2", IMAGE, container_id(), *look)
    assert_has_gpus_0_and_2(simulated_host, result.stdout)


def test_ctr_runs_a_container_that_asks_for_nothing(containerd: Containerd) -> None:
    result = ctr_run(containerd, IMAGE, container_id(), *probe(["list", "/dev"]))
    assert gpu_names(answers(result.stdout)["list", "/dev"]) == []


def test_ctr_shows_why_a_container_with_an_unknown_gpu_does_not_start(containerd: Containerd) -> None:
    name = container_id()
    result = ctr_run(containerd, "--env", "NVIDIA_VISIBLE_DEVICES=9", IMAGE, name, "echo", "started", check=False)
    assert result.returncode != 0
    assert "OCIGPU-DEV-1" in result.stderr
    assert "started" not in result.stdout
    assert name not in containerd("tasks", "ls").stdout


@pytest.fixture
def own_way(work_directory: Path, simulated_host: SimulatedHost) -> Iterator[dict[str, Any]]:
    """What ``ctr run --gpus`` needs: nvidia-container-cli on the PATH; from containerd 2.3 on, a CDI specification."""
    (work_directory / "nvidia-container-cli").symlink_to(PROGRAMS / "ocigpu-container-cli")
    path = f"{work_directory}:{SYSTEM_PATH}:/usr/local/bin:/usr/local/sbin"
    output = Path("/run/cdi/nvidia.yaml")
    run([PROGRAMS / "ocigpu", "cdi", "generate", "--config", simulated_host.settings, "--output", output])
    yield {"runtime": "runc", "env": {"PATH": path, "OCIGPU_CONFIG": str(simulated_host.settings)}}
    output.unlink()


def test_ctr_gives_gpus_by_itself(
    containerd: Containerd, simulated_host: SimulatedHost, own_way: dict[str, Any]
) -> None:
    """Until containerd 2.2 a hook, ``containerd oci-hook``, calls nvidia-container-cli, with all capabilities."""
    look = script(["nvidia-smi", "-L"], probe(["list", "/dev"], ["open", "/dev/nvidia0", "/dev/nvidia1"]))
    words = ("--gpus", "0", "--gpus", "2", IMAGE, container_id())
    listing, probed = parts(ctr_run(containerd, *words, *look, **own_way).stdout)
    assert listed_uuids(listing) == [simulated_host.gpus[0], simulated_host.gpus[2]]
    seen = answers(probed)
    assert gpu_names(seen["list", "/dev"]) == sorted(["nvidia0", "nvidia2", "nvidia-modeset", *CONTROL_NODES])
    assert (seen["open", "/dev/nvidia0"], seen["open", "/dev/nvidia1"]) == ("ENXIO", "ENOENT")


def test_ctr_by_itself_shows_why_a_container_does_not_start(containerd: Containerd, own_way: dict[str, Any]) -> None:
    words = ("--gpus", "9", IMAGE, container_id(), "echo", "started")
    result = ctr_run(containerd, *words, check=False, **own_way)
    assert result.returncode != 0
    assert "OCIGPU-DEV-1" in result.stderr or "unresolvable CDI devices nvidia.com/gpu=9" in result.stderr
    assert "started" not in result.stdout


@pytest.fixture
def pod(containerd: Containerd, session_directory: Path) -> Iterator[tuple[dict[Any, Any], str]]:
    """A pod with the runtime entry "ocigpu" of config.toml; its configuration and id."""
    pytest.importorskip("grpc", reason="not installed: grpcio")
    config = {
        1: {1: "pod", 2: container_id(), 3: "default"},  # metadata: name, uid, namespace
        3: str(containerd.directory / "logs"),
        8: {1: f"/{session_directory.name}-pods", 2: {1: {1: HOST_NETWORK}}},  # linux: cgroup parent, namespaces
    }
    (answer,) = containerd.cri(("RuntimeService/RunPodSandbox", {1: config, 2: "ocigpu"}))
    assert "error" not in answer, answer
    sandbox = answer["1"]
    yield config, sandbox
    answers = containerd.cri(
        ("RuntimeService/StopPodSandbox", {1: sandbox}), ("RuntimeService/RemovePodSandbox", {1: sandbox})
    )
    assert all("error" not in answer for answer in answers), answers


def start_in_pod(engine: Containerd, pod: tuple[dict[Any, Any], str], devices: str) -> tuple[str, str]:
    """Create and start a container in a pod; returns its id and the error, if any."""
    config, sandbox = pod
    container = {
        1: {1: "container"},  # metadata: name
        2: {1: IMAGE},
        6: [{1: "NVIDIA_VISIBLE_DEVICES", 2: devices}],  # environment
    }
    (created,) = engine.cri(("RuntimeService/CreateContainer", {1: sandbox, 2: container, 3: config}))
    assert "error" not in created, created
    (started,) = engine.cri(("RuntimeService/StartContainer", {1: created["1"]}))
    return created["1"], started.get("error", "")


def test_a_container_of_a_pod_gets_its_gpus(
    containerd: Containerd, simulated_host: SimulatedHost, pod: tuple[dict[Any, Any], str]
) -> None:
    name, error = start_in_pod(containerd, pod, "0,2")
    assert error == ""
    (answer,) = containerd.cri(("RuntimeService/ExecSync", {1: name, 2: look_around(simulated_host), 3: 30}))
    assert "error" not in answer, answer
    assert_has_gpus_0_and_2(simulated_host, answer["1"])


@pytest.mark.rest
def test_a_container_of_a_pod_with_an_unknown_gpu_does_not_start(
    containerd: Containerd, pod: tuple[dict[Any, Any], str]
) -> None:
    _, error = start_in_pod(containerd, pod, "9")
    assert "OCIGPU-DEV-1" in error
