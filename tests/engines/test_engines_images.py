"""Images of every kind start with a GPU, under every setting of the root file system."""

from pathlib import Path
from typing import Any

import pytest
from support import machine
from support.bundle import LAYOUTS, give_to
from support.fixtures import MakeBundle
from support.process import explain
from support.product import CONTROL_NODES, LIBRARIES, RUNTIME, SimulatedHost, gpu_names, listed_uuids
from support.runtimes import answers, container_id, parts, probe, run_container, script

pytestmark = [pytest.mark.root, pytest.mark.engine]

RUNTIMES = pytest.mark.parametrize("low_level", ["runc", "crun"])
LOOK = probe(["list", "/dev"], ["open", "/dev/nvidia3", "/dev/nvidiactl"])


def assert_has_gpu_3(output: str) -> None:
    seen = answers(output)
    assert gpu_names(seen["list", "/dev"]) == sorted(["nvidia3", *CONTROL_NODES])
    assert seen["open", "/dev/nvidia3"] == "ENXIO"
    assert seen["open", "/dev/nvidiactl"] == "ENXIO"


@RUNTIMES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("readonly", [False, True], ids=["writable root", "read-only root"])
def test_every_image_layout_starts_with_a_gpu(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    low_level: str,
    layout: str,
    readonly: bool,
) -> None:
    def edit(config: dict[str, Any]) -> None:
        config["root"]["readonly"] = readonly

    bundle = make_bundle(
        probe(["list", "/dev"], ["open", "/dev/nvidia3", "/dev/nvidiactl"], ["create", "/new"]),
        {"NVIDIA_VISIBLE_DEVICES": "3"},
        layout,
        edit,
    )
    env = simulated_host.environment(runtime_environment, low_level)
    result = run_container([RUNTIME], bundle, container_id(), env=env, cgroup="v2")
    assert result.returncode == 0, explain(result)
    assert_has_gpu_3(result.stdout)
    assert answers(result.stdout)["create", "/new"] == ("EROFS" if readonly else "ok")


@pytest.mark.parametrize("readonly", [False, True], ids=["writable root", "read-only root"])
def test_an_image_without_a_loader_cache_finds_the_driver_libraries(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str], readonly: bool
) -> None:
    def edit(config: dict[str, Any]) -> None:
        config["root"]["readonly"] = readonly

    bundle = make_bundle(
        script(["nvidia-smi", "-L"], ["/dlopen", *LIBRARIES]), {"NVIDIA_VISIBLE_DEVICES": "3"}, "glibc", edit
    )
    assert not (bundle / "rootfs/etc/ld.so.cache").exists()
    result = run_container([RUNTIME], bundle, container_id(), env=simulated_host.environment(runtime_environment))
    assert result.returncode == 0, explain(result)
    listing, opened = parts(result.stdout)
    assert listed_uuids(listing) == [simulated_host.gpus[3]]
    assert opened.splitlines() == [f"dlopen {name} ok" for name in LIBRARIES]


@RUNTIMES
@pytest.mark.parametrize("propagation", ["shared", "slave", "private"])
def test_mounts_stay_in_the_container_whatever_its_propagation(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    session_directory: Path,
    low_level: str,
    propagation: str,
) -> None:
    def edit(config: dict[str, Any]) -> None:
        config["linux"]["rootfsPropagation"] = propagation

    bundle = make_bundle(LOOK, {"NVIDIA_VISIBLE_DEVICES": "3"}, edit=edit)
    env = simulated_host.environment(runtime_environment, low_level)
    result = run_container([RUNTIME], bundle, container_id(), env=env, cgroup="v2")
    assert result.returncode == 0, explain(result)
    assert_has_gpu_3(result.stdout)
    assert machine.mounts_below(str(session_directory)) == []


@RUNTIMES
@pytest.mark.parametrize("cgroup", ["v1", "v2"])
def test_a_container_with_a_user_namespace_gets_usable_nodes(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    low_level: str,
    cgroup: str,
) -> None:
    def edit(config: dict[str, Any]) -> None:
        config["linux"]["namespaces"].append({"type": "user"})
        for name in ("uidMappings", "gidMappings"):
            config["linux"][name] = [{"containerID": 0, "hostID": 100000, "size": 65536}]

    bundle = make_bundle(
        script(["nvidia-smi", "-L"], LOOK, ["/dlopen", *LIBRARIES]), {"NVIDIA_VISIBLE_DEVICES": "3"}, edit=edit
    )
    give_to(bundle / "rootfs", 100000, 100000)
    env = simulated_host.environment(runtime_environment, low_level)
    result = run_container([RUNTIME], bundle, container_id(), env=env, cgroup=cgroup)
    assert result.returncode == 0, explain(result)
    listing, probed, opened = parts(result.stdout)
    assert listed_uuids(listing) == [simulated_host.gpus[3]]
    assert_has_gpu_3(probed)
    assert opened.splitlines() == [f"dlopen {name} ok" for name in LIBRARIES]


@RUNTIMES
@pytest.mark.parametrize("early", [True, False], ids=["early", "alone"])
def test_a_runtime_that_tells_its_hook_another_bundle_does_no_harm(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    work_directory: Path,
    low_level: str,
    early: bool,
) -> None:
    """crun tells its working directory, which is / where it binds nodes of the host for a user namespace."""

    def edit(config: dict[str, Any]) -> None:
        config["linux"]["namespaces"].append({"type": "user"})
        config["linux"]["devices"] = [{"path": "/dev/kmsg", "type": "c", "major": 1, "minor": 11}]
        for name in ("uidMappings", "gidMappings"):
            config["linux"][name] = [{"containerID": 0, "hostID": 100000, "size": 65536}]

    bundle = make_bundle(LOOK, {"NVIDIA_VISIBLE_DEVICES": "3"}, edit=edit)
    give_to(bundle / "rootfs", 100000, 100000)
    env = simulated_host.environment(runtime_environment, low_level)
    if not early:  # as where nobody could be left to wait for the hook
        runtime, settings = work_directory / low_level, work_directory / "config.toml"
        runtime.write_text(f'#!/bin/sh\nrm -rf /run/ocigpu/early-$$-*\nexec {low_level} "$@"\n')
        runtime.chmod(0o755)
        text = Path(env["OCIGPU_CONFIG"]).read_text()
        settings.write_text(text.replace(f'runtimes = ["{low_level}"]', f'runtimes = ["{runtime}"]'))
        env = {**env, "OCIGPU_CONFIG": str(settings)}
    result = run_container([RUNTIME], bundle, container_id(), env=env, cgroup="v2")
    assert result.returncode == 0, explain(result)
    assert_has_gpu_3(result.stdout)


@pytest.mark.parametrize("layout", ["glibc", "distroless"])
def test_a_container_of_an_ordinary_user_without_capabilities_can_use_its_gpu(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str], layout: str
) -> None:
    def edit(config: dict[str, Any]) -> None:
        config["process"]["user"] = {"uid": 1000, "gid": 1000}
        config["process"]["capabilities"] = {}

    bundle = make_bundle(LOOK, {"NVIDIA_VISIBLE_DEVICES": "3"}, layout, edit)
    result = run_container([RUNTIME], bundle, container_id(), env=simulated_host.environment(runtime_environment))
    assert result.returncode == 0, explain(result)
    assert_has_gpu_3(result.stdout)
