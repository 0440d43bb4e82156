"""GPUs that share the processor's memory: GH200 and GB10 beside Grace, Orin and Thor of Jetson with its lists."""

import json
import os
from pathlib import Path

import pytest
from support import requirements
from support.fixtures import MakeBundle
from support.machine import CACHED, LIBRARIES
from support.process import explain, run
from support.product import PROGRAMS, RUNTIME, SimulatedHost
from support.runtimes import answers, container_id, parts, probe, run_container, script

from ocigpu.core.errors import OcigpuError
from ocigpu.core.facts import facts_from_json
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.gpus.nvidia.hardware import read_hardware
from ocigpu.gpus.nvidia.nvml_process import nvml_place
from ocigpu.sim.create import create_host
from ocigpu.sim.models import MODELS
from ocigpu.system.settings_file import read_settings

MODELS_HERE = ("gh200", "gb10", "orin", "thor")
WITHOUT_MEMORY = ("gb10", "orin", "thor")
JETSON = ("orin", "thor")
DRIVER = f"{LIBRARIES}/nvidia"


@pytest.fixture(scope="module")
def hosts(session_directory: Path) -> dict[str, SimulatedHost]:
    requirements.require(requirements.compiler())
    made = {}
    for model in MODELS_HERE:
        directory = session_directory / f"host-{model}"
        create_host(str(directory), 1, model, dri=False, compat32=False)
        marker = json.loads((directory / ".ocigpu-sim.json").read_text())
        made[model] = SimulatedHost(directory, tuple(gpu["uuid"] for gpu in marker["gpus"]), ())
    return made


def ocigpu(host: SimulatedHost, *words: str) -> str:
    return run([PROGRAMS / "ocigpu", *words, "--config", host.settings]).stdout


@pytest.mark.parametrize(
    ("model", "row"),
    [
        ("gh200", "NVIDIA GH200 480GB, 97871 MiB, 0 MiB, 00000009:01:00.0, 0 %"),
        ("gb10", "NVIDIA GB10, [N/A], [N/A], 0000000F:01:00.0, 0 %"),
        ("orin", "Orin (nvgpu), [N/A], [N/A], [N/A], [N/A]"),
        ("thor", "NVIDIA Thor, [N/A], [N/A], 00000000:01:00.0, 0 %"),
    ],
)
def test_nvidia_smi_says_what_is_not_known(hosts: dict[str, SimulatedHost], model: str, row: str) -> None:
    smi = hosts[model].directory / "usr/bin/nvidia-smi"
    query = "--query-gpu=name,memory.total,memory.used,pci.bus_id,utilization.gpu"
    assert run([smi, query, "--format=csv,noheader"]).stdout == f"{row}\n"
    assert ("Not Supported" in run([smi]).stdout) == (model in WITHOUT_MEMORY)


@pytest.mark.parametrize(
    ("model", "bus_id", "architecture", "coherent"),
    [
        ("gh200", "00000009:01:00.0", "9.0", True),
        ("gb10", "0000000f:01:00.0", "12.1", True),
        ("orin", "", "8.7", False),
        ("thor", "00000000:01:00.0", "11.0", False),
    ],
)
def test_the_facts_are_those_of_the_model(
    hosts: dict[str, SimulatedHost], model: str, bus_id: str, architecture: str, coherent: bool
) -> None:
    facts = read_host_facts(read_settings(str(hosts[model].settings)))
    (gpu,) = facts.gpus
    assert (gpu.bus_id, gpu.architecture, gpu.coherent, gpu.error) == (bus_id, architecture, coherent, "")
    assert gpu.model == MODELS[model].name
    assert facts.driver_version == MODELS[model].driver_version
    assert facts.notes == ()
    assert (facts.listed is not None) == (model in JETSON)
    assert os.path.basename(nvml_place(facts).library).startswith("libnvidia-ml.so")
    assert facts_from_json(json.loads(ocigpu(hosts[model], "facts", "--json"))) == facts


@pytest.mark.parametrize("model", MODELS_HERE)
def test_memory_that_nvml_does_not_know_is_left_out(hosts: dict[str, SimulatedHost], model: str) -> None:
    host, known = hosts[model], model not in WITHOUT_MEMORY
    (uuid,) = host.gpus
    hardware = read_hardware(read_host_facts(read_settings(str(host.settings))))
    assert hardware.gpus[uuid].memory_mib == (97871 if known else 0)
    for sort in ("gpu", "memory"):
        top = ocigpu(host, "top", "--once", "--sort", sort)
        assert ("0.0/95.6 GiB" in top) == known, top
        assert MODELS[model].name in top


@pytest.mark.parametrize("model", JETSON)
def test_the_doctor_says_no_false_word_of_a_jetson(hosts: dict[str, SimulatedHost], model: str) -> None:
    told = json.loads(
        run([PROGRAMS / "ocigpu", "doctor", "--json", "--root", hosts[model].directory], check=False).stdout
    )
    about = [finding["name"] for finding in told["findings"] if finding["severity"] in ("error", "warning")]
    assert about == ["simulated-host"]


@pytest.mark.parametrize("model", WITHOUT_MEMORY)
def test_such_a_host_has_one_gpu(model: str, tmp_path: Path) -> None:
    with pytest.raises(OcigpuError, match="a host of this model has one"):
        create_host(str(tmp_path / "host"), 2, model)


@pytest.mark.root
@pytest.mark.engine
@pytest.mark.parametrize("low_level", ["runc", "crun"])
@pytest.mark.parametrize("mode", ["hook", "spec", "cdi"])
@pytest.mark.parametrize("model", JETSON)
def test_a_container_gets_what_the_lists_of_a_jetson_name(
    hosts: dict[str, SimulatedHost],
    runtime_environment: dict[str, str],
    make_bundle: MakeBundle,
    work_directory: Path,
    model: str,
    mode: str,
    low_level: str,
) -> None:
    host = hosts[model]
    nodes = [f"/dev/{path.relative_to(host.directory / 'dev')}" for path in (host.directory / "dev").rglob("*")]
    nodes = sorted(node for node in nodes if (host.directory / node[1:]).is_char_device())
    settings, specs = work_directory / "config.toml", f'cdi.spec-dirs = ["{work_directory}/specs"]'
    environment = host.in_mode(runtime_environment, settings, mode, specs, runtime=low_level)
    if mode == "cdi":
        command = [PROGRAMS / "ocigpu", "cdi", "refresh", "--quiet", "--config", settings]
        run([*command, "--output", work_directory / "specs/all.json"])
    look = script(
        probe(["open", *nodes], ["stat", f"{DRIVER}/libcuda.so", "/etc/nv_tegra_release"]),
        ["ldconfig", "-p"],
        ["/dlopen", "libcuda.so.1", "libnvidia-ml.so.1"],
        ["nvidia-smi", "-L"],
    )
    bundle = make_bundle(look, {"NVIDIA_VISIBLE_DEVICES": "all"})
    done = run_container([RUNTIME], bundle, container_id(), env=environment, cgroup="v2")
    assert done.returncode == 0, explain(done)
    probed, cache, opened, listing = parts(done.stdout)
    seen = answers(probed)
    # modeset is for displays, which hook and spec leave out where nobody asks for them
    expected = [node for node in nodes if mode == "cdi" or node != "/dev/nvidia-modeset"]
    assert [node for node in nodes if seen["open", node] == "ENXIO"] == expected, done.stdout
    assert seen["stat", f"{DRIVER}/libcuda.so"].startswith("l ")
    assert seen["stat", "/etc/nv_tegra_release"].startswith("- ")
    assert f"libcuda.so.1 ({CACHED}) => {DRIVER}/libcuda.so.1\n" in cache
    assert opened == "dlopen libcuda.so.1 ok\ndlopen libnvidia-ml.so.1 ok\n"
    assert host.gpus[0] in listing
