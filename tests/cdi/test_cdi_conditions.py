"""What a specification may give a container, and what its image requires: on facts, and with the shim and runc."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support import requirements
from support.bundle import base_config, write_bundle
from support.process import run
from support.product import PROGRAMS, RUNTIME, SimulatedHost, gpu_names
from support.runtimes import answers, container_id, probe, run_container, set_cgroup

from ocigpu.cdi.cache import LoadedSpec
from ocigpu.cdi.conditions import check_conditions, find_gpus
from ocigpu.core.errors import HostError, RequestError
from ocigpu.core.facts import HostFacts, facts_from_json
from ocigpu.core.gate import CAPABILITIES_ANNOTATION
from ocigpu.gpus.request import Request

HOSTS = Path(__file__).parents[1] / "bundles/hosts"
A100 = facts_from_json(json.loads((HOSTS / "a100-8.json").read_text()))
MIG = facts_from_json(json.loads((HOSTS / "h100-8-mig.json").read_text()))
SOURCE = "NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=0"


def spec(kind: str = "nvidia.com/gpu", said: str | None = None) -> LoadedSpec:
    annotations = {} if said is None else {CAPABILITIES_ANNOTATION: said}
    return LoadedSpec("/etc/cdi/nvidia.yaml", 0, kind, "0.6.0", annotations, {}, b"\n", 0, 1)


def ask(bound: tuple[str, ...] = (), **required: str) -> Request:
    requirements = tuple((f"NVIDIA_REQUIRE_{name}", text) for name, text in required.items())
    return Request(
        "cdi", source=SOURCE, cdi_devices=("nvidia.com/gpu=0",), capabilities=bound, requirements=requirements
    )


def unread() -> HostFacts:
    raise AssertionError("facts are read for requirements only")


@pytest.mark.parametrize(
    ("said", "bound", "cause"),
    [
        pytest.param("compute,utility", ("compute", "utility"), "", id="as permitted"),
        pytest.param("utility", ("compute", "utility"), "", id="less"),
        pytest.param("compute,graphics", ("compute", "utility"), 'provides "graphics"', id="more"),
        pytest.param(None, ("compute", "utility"), "may provide every driver capability", id="of others"),
        pytest.param("", ("compute",), "", id="nothing"),
        pytest.param("compute", ("none",), 'provides "compute"', id="none permitted"),
        pytest.param(None, (), "", id="no bound"),
    ],
)
def test_a_specification_gives_no_more_than_the_bound(said: str | None, bound: tuple[str, ...], cause: str) -> None:
    if not cause:
        assert check_conditions(ask(bound), [spec(said=said)], unread) == ()
        return
    with pytest.raises(RequestError) as caught:
        check_conditions(ask(bound), [spec("nvidia.com/gds"), spec(said=said)], unread)
    assert caught.value.code == "OCIGPU-REQ-2"
    assert caught.value.message.startswith(f"{SOURCE}: /etc/cdi/nvidia.yaml {cause}, and supported-driver-capabilities")
    assert check_conditions(ask(bound), [spec("amd.com/gpu", said)], unread) == (), "another vendor's driver"


def test_requirements_hold_for_the_gpus_that_are_named() -> None:
    assert check_conditions(ask(CUDA="cuda>=12.4"), [], lambda: A100) == ()
    with pytest.raises(RequestError, match=r"needs cuda>=13.1; have cuda 12.4") as caught:
        check_conditions(ask(CUDA="cuda>=13.1"), [], lambda: A100)
    assert caught.value.code == "OCIGPU-REQ-3"

    def no_driver() -> HostFacts:
        raise HostError("OCIGPU-HOST-1", "no NVIDIA driver: /proc/driver/nvidia is missing")

    assert check_conditions(ask(CUDA="cuda>=13.1"), [], no_driver) == (
        "NVIDIA_REQUIRE_CUDA not examined: no NVIDIA driver: /proc/driver/nvidia is missing",
    )


@pytest.mark.parametrize(
    ("names", "indices"),
    [
        (["nvidia.com/gpu=1"], [1]),
        (["nvidia.com/gpu=1", "x.com/a=2", "nvidia.com/gds=all"], [1]),
        (["nvidia.com/gpu=0:1"], [0]),
        ([f"nvidia.com/gpu={MIG.gpus[3].uuid}"], [3]),
        (["nvidia.com/gpu=all"], list(range(8))),
        (["nvidia.com/gpu=a-name-of-its-own"], list(range(8))),
        (["k8s.device-plugin.nvidia.com/gpu=2"], [2]),
    ],
)
def test_names_are_gpus_where_they_say_which(names: list[str], indices: list[int]) -> None:
    assert [gpu.index for gpu in find_gpus(names, MIG)] == indices


# --- the shim


Start = Callable[..., tuple[int, str, str]]


@pytest.fixture
def start(
    work_directory: Path,
    simulated_host: SimulatedHost,
    rootfs: Callable[[str], Path],
    runtime_environment: dict[str, str],
) -> Start:
    """Call with variables, lines of settings, and settings for generating: returns how a container of runc went."""
    requirements.require(requirements.root(), requirements.programs("runc"))
    text = simulated_host.environment({}, "runc")["OCIGPU_CONFIG"]

    def write(name: str, lines: str) -> Path:
        path = work_directory / name
        path.write_text(f'{lines}cdi.spec-dirs = ["{work_directory}/cdi"]\n{Path(text).read_text()}')
        path.chmod(0o644)
        return path

    def go(variables: dict[str, str], lines: str, generated_with: str = "") -> tuple[int, str, str]:
        output = work_directory / "cdi/nvidia.json"
        if generated_with or not output.exists():
            settings = write("generate.toml", generated_with)
            run([PROGRAMS / "ocigpu", "cdi", "generate", "--quiet", "--config", settings, "--output", output])
        name = container_id()
        bundle = write_bundle(work_directory / name, base_config(probe(["list", "/dev"]), variables), rootfs("busybox"))
        set_cgroup(bundle, name)
        environment = {**runtime_environment, "OCIGPU_CONFIG": str(write("config.toml", lines))}
        done = run_container([RUNTIME], bundle, name, env=environment)
        return done.returncode, done.stdout, done.stderr

    return go


BY_NAME = pytest.mark.parametrize(("mode", "device"), [("auto", "nvidia.com/gpu=0"), ("cdi", "0")])


@pytest.mark.root
@pytest.mark.engine
@BY_NAME
def test_a_name_evades_neither_capabilities_nor_requirements(
    start: Start, work_directory: Path, mode: str, device: str
) -> None:
    limits = 'supported-driver-capabilities = "compute,utility"\n'
    lines = f'mode = "{mode}"\n'
    variables = {"NVIDIA_VISIBLE_DEVICES": device, "NVIDIA_REQUIRE_CUDA": "cuda>=12.0"}
    status, said, errors = start(variables, lines)
    assert status == 0, errors
    assert "nvidia0" in gpu_names(answers(said)["list", "/dev"])
    unmet = {**variables, "NVIDIA_REQUIRE_CUDA": "cuda>=99.0"}
    status, _, errors = start(unmet, lines)
    assert (status != 0, "OCIGPU-REQ-3" in errors, "needs cuda>=99.0" in errors) == (True,) * 3, errors
    asked = [word for name, value in unmet.items() for word in ("--env", f"{name}={value}")]
    planned = run([PROGRAMS / "ocigpu", "plan", "--config", work_directory / "config.toml", *asked], check=False)
    assert "needs cuda>=99.0" in planned.stderr, "who asks what would happen is told the same"
    status, _, errors = start(variables, limits + lines)
    assert (status != 0, "OCIGPU-REQ-2" in errors, "may provide every driver capability" in errors) == (True,) * 3
    status, _, errors = start(variables, limits + lines, limits)
    assert status == 0, errors


@pytest.mark.root
@pytest.mark.engine
@pytest.mark.parametrize("device", ["nvidia.com/pgpu=0", "nvidia.com/nvswitch=all", "nvidia.com/imex-channel=0"])
def test_a_variable_names_gpus_and_nothing_else_of_nvidia(start: Start, device: str) -> None:
    status, _, errors = start({"NVIDIA_VISIBLE_DEVICES": device}, "")
    assert status != 0
    assert "OCIGPU-REQ-1" in errors
    assert "the image may have written this" in errors
