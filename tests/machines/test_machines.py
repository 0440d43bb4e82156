"""What virtual machines of other architectures and kernels are made for; each of these runs on this one too."""

import os
from pathlib import Path

import calls
import pytest
from support import requirements
from support.fixtures import MakeBundle
from support.process import explain, run
from support.product import (
    CONTROL_NODES,
    LIBRARIES,
    PROGRAMS,
    REPOSITORY,
    RUNTIME,
    SimulatedHost,
    gpu_names,
    listed_uuids,
)
from support.runtimes import answers, container_id, parts, probe, run_container, script


def test_a_kernel_lacks_the_calls_that_are_younger() -> None:
    release = tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2])
    assert calls.missing() == [name for name, since in calls.SINCE.items() if release < since]


@pytest.mark.root
@pytest.mark.engine
@pytest.mark.parametrize("low_level", ["runc", "crun"])
@pytest.mark.parametrize("mode", ["hook", "spec", "cdi"])
@pytest.mark.parametrize("layout", ["glibc", "busybox"])
def test_a_container_has_its_gpus_and_no_other(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    work_directory: Path,
    low_level: str,
    mode: str,
    layout: str,
) -> None:
    settings, specifications = work_directory / "config.toml", work_directory / "cdi"
    place = f'cdi.spec-dirs = ["{specifications}"]'
    env = simulated_host.in_mode(runtime_environment, settings, mode, place, runtime=low_level)
    if mode == "cdi":
        output = specifications / "nvidia.yaml"
        run([PROGRAMS / "ocigpu", "cdi", "generate", "--quiet", "--config", settings, "--output", output])
    words = probe(
        ["list", "/dev"],
        ["open", "/dev/nvidia0", "/dev/nvidia2"],
        ["mknod", "/dev/nvidia1", *simulated_host.number("nvidia1")],
        ["open", "/dev/nvidia1"],
    )
    glibc = [["nvidia-smi", "-L"], ["/dlopen", *LIBRARIES]] if layout == "glibc" else []
    bundle = make_bundle(script(words, *glibc), {"NVIDIA_VISIBLE_DEVICES": "0,2"}, layout)
    cgroup = "v2" if requirements.cgroup_v1() else "v1"  # crun refuses machines that mount both
    done = run_container([RUNTIME], bundle, container_id(), env=env, cgroup=cgroup)
    assert done.returncode == 0, explain(done)
    probed, *of_glibc = parts(done.stdout)
    seen = answers(probed)
    nodes = set(gpu_names(seen["list", "/dev"])) - {"nvidia-modeset"}  # a specification is for graphics too
    assert nodes == {"nvidia0", "nvidia2", *CONTROL_NODES}
    assert {seen["open", f"/dev/nvidia{index}"] for index in (0, 2)} == {"ENXIO"}, "no driver is behind them"
    assert (seen["mknod", "/dev/nvidia1"], seen["open", "/dev/nvidia1"]) == ("ok", "EPERM")
    if of_glibc:
        assert listed_uuids(of_glibc[0]) == [simulated_host.gpus[0], simulated_host.gpus[2]]
        assert of_glibc[1].splitlines() == [f"dlopen {name} ok" for name in LIBRARIES]


@pytest.mark.parametrize("name", ["run.sh", "build.sh", "initrd.sh", "init", "inside.sh"])
def test_the_shell_understands_it(name: str) -> None:
    done = run(["bash", "-n", REPOSITORY / "tests/machines" / name])
    assert done.stderr == ""


def test_what_the_machines_run_is_there() -> None:
    lines = (REPOSITORY / "tests/machines/tests.txt").read_text().splitlines()
    names = [line for line in lines if not line.startswith("#")]
    assert len(names) > 2
    for name in names:
        file, _, function = name.rpartition("=")[2].partition("::")
        assert f"def {function}" in (REPOSITORY / file).read_text() if function else (REPOSITORY / file).exists(), name
