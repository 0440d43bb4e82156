"""MIG devices: a container gets the capability nodes of its own, and of no other."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.fixtures import MakeBundle
from support.process import explain
from support.product import CONTROL_NODES, RUNTIME, SimulatedHost, failed_with, gpu_names, make_simulated_host
from support.runtimes import answers, container_id, parts, probe, run_container, script

from ocigpu.sim.libraries import library_triplet

pytestmark = [pytest.mark.root, pytest.mark.engine]


@pytest.mark.parametrize("cgroup", ["v1", "v2"])
@pytest.mark.parametrize("by", ["index", "uuid"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_container_gets_its_mig_device_and_no_other(
    make_bundle: MakeBundle,
    mig_host: SimulatedHost,
    runtime_environment: dict[str, str],
    cgroup: str,
    by: str,
    number: int,
) -> None:
    uuid, *minors = mig_host.mig_devices[number]
    other_uuid, *other_minors = mig_host.mig_devices[1 - number]
    granted = [f"nvidia-caps/nvidia-cap{minor}" for minor in minors]
    refused = f"nvidia-caps/nvidia-cap{other_minors[0]}"
    bundle = make_bundle(
        script(
            ["nvidia-smi", "-L"],
            probe(
                ["list", "/dev", "/dev/nvidia-caps"],
                ["stat", *(f"/dev/{name}" for name in granted)],
                ["open", "/dev/nvidia0", *(f"/dev/{name}" for name in granted)],
                ["mknod", f"/dev/{refused}", *mig_host.number(refused)],
                ["open", f"/dev/{refused}"],
                ["mknod", "/dev/nvidia1", *mig_host.number("nvidia1")],
                ["open", "/dev/nvidia1"],
            ),
        ),
        {"NVIDIA_VISIBLE_DEVICES": f"0:{number}" if by == "index" else uuid},
    )
    env = mig_host.environment(runtime_environment)
    result = run_container([RUNTIME], bundle, container_id(), env=env, cgroup=cgroup)
    assert result.returncode == 0, explain(result)
    listing, probed = parts(result.stdout)
    assert uuid in listing
    assert other_uuid not in listing
    assert mig_host.gpus[1] not in listing
    seen = answers(probed)
    assert gpu_names(seen["list", "/dev"]) == sorted(["nvidia0", "nvidia-caps", *CONTROL_NODES])
    assert seen["list", "/dev/nvidia-caps"].split() == sorted(f"nvidia-cap{minor}" for minor in minors)
    for name in granted:
        assert seen["stat", f"/dev/{name}"] == mig_host.describe_node(name), name
        assert seen["open", f"/dev/{name}"] == "ENXIO", name
    assert seen["open", "/dev/nvidia0"] == "ENXIO"
    assert seen["open", f"/dev/{refused}"] == "EPERM"
    assert seen["open", "/dev/nvidia1"] == "EPERM"


def test_an_unknown_mig_device_stops_the_container(
    make_bundle: MakeBundle, mig_host: SimulatedHost, runtime_environment: dict[str, str]
) -> None:
    bundle = make_bundle(["sh", "-c", "echo started"], {"NVIDIA_VISIBLE_DEVICES": "0:2"})
    result = run_container([RUNTIME], bundle, container_id(), env=mig_host.environment(runtime_environment))
    assert failed_with("OCIGPU-DEV-1", result), explain(result)
    assert "started" not in result.stdout


_CUT = """
import pynvml
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(1)
pynvml.nvmlDeviceSetMigMode(gpu, 1)
instance = pynvml.nvmlDeviceCreateGpuInstance(gpu, 9)
for profile in (0, 1):
    part = pynvml.nvmlGpuInstanceCreateComputeInstance(instance, profile)
for index in (0, 1):
    print(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)))
"""


@pytest.mark.parametrize("mode", ["hook", "spec"])
def test_a_mig_device_made_while_the_host_runs_reaches_its_container(
    make_bundle: MakeBundle, tmp_path: Path, runtime_environment: dict[str, str], mode: str
) -> None:
    """As mig-parted and the MIG manager do it, by NVML alone; facts that were kept before count no longer."""
    host = make_simulated_host(tmp_path / "host", 2)
    host.settings.write_text(f'mode = "{mode}"\n{host.settings.read_text()}')
    environment = host.environment(runtime_environment)

    def start(device: str) -> subprocess.CompletedProcess[str]:
        bundle = make_bundle(script(["nvidia-smi", "-L"]), {"NVIDIA_VISIBLE_DEVICES": device})
        return run_container([RUNTIME], bundle, container_id(), env=environment)

    before = start("1")
    assert before.returncode == 0, explain(before)
    assert host.gpus[1] in before.stdout
    variables = {"LD_LIBRARY_PATH": str(host.directory / "usr/lib" / library_triplet()), "PATH": "/usr/bin:/bin"}
    cut = subprocess.run([sys.executable, "-c", _CUT], env=variables, capture_output=True, text=True, check=True)
    one, two = cut.stdout.split()
    after = start(two)
    assert after.returncode == 0, explain(after)
    assert host.gpus[1] in after.stdout
    assert f"MIG 2c.3g.20gb  Device  0: (UUID: {two})" in after.stdout
    assert one not in after.stdout
    assert host.gpus[0] not in after.stdout
