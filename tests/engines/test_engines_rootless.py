"""Containers of users without privileges: rootless runc and crun, and runtimes inside a user namespace."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support import machine, requirements
from support.bundle import give_to
from support.fixtures import MakeBundle
from support.process import explain
from support.product import (
    LIBRARIES,
    PublicCopy,
    SimulatedHost,
    failed_with,
    look_at_gpus_0_and_2,
)
from support.runtimes import container_id, probe, run_container, script

pytestmark = [pytest.mark.root, pytest.mark.engine]

USER = 4321
AS_USER = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
LOOK = script(
    ["nvidia-smi", "-L"],
    probe(["list", "/dev", "/proc/driver/nvidia/gpus"], ["open", "/dev/nvidia0", "/dev/nvidia2", "/dev/nvidiactl"]),
    ["/dlopen", *LIBRARIES],
)

RUNTIMES = pytest.mark.parametrize("low_level", ["runc", "crun"])
CGROUPS = pytest.mark.parametrize("cgroup", ["v1", "v2"])


def make_rootless(config: dict[str, Any]) -> None:
    """Change a config as ``runc spec --rootless`` writes it: one id mapped, no cgroup, the host's network and sysfs."""
    linux = config["linux"]
    linux["namespaces"] = [item for item in linux["namespaces"] if item["type"] != "network"] + [{"type": "user"}]
    for name in ("uidMappings", "gidMappings"):
        linux[name] = [{"containerID": 0, "hostID": USER, "size": 1}]
    del linux["resources"]
    config["mounts"] = [item for item in config["mounts"] if item["destination"] != "/sys"]
    options = ["rbind", "nosuid", "noexec", "nodev", "ro"]
    config["mounts"].append({"destination": "/sys", "type": "none", "source": "/sys", "options": options})


def without_resources(config: dict[str, Any]) -> None:
    del config["linux"]["resources"]


def give_away(bundle: Path, owner: int) -> dict[str, str]:
    """Give a test's directory to a user, the cgroup's name away; returns the variables of a session of theirs."""
    path = bundle / "config.json"
    config = json.loads(path.read_text())
    del config["linux"]["cgroupsPath"]  # their place in the hierarchies is the caller's own
    path.write_text(json.dumps(config, indent="\t"))
    directory = bundle.parent
    (directory / "run").mkdir(mode=0o700)
    give_to(directory, owner, owner)
    return {"HOME": str(directory), "XDG_RUNTIME_DIR": str(directory / "run")}


def assert_has_gpus_0_and_2(host: SimulatedHost, output: str) -> None:
    seen = look_at_gpus_0_and_2(host, output)
    assert sorted(seen["list", "/proc/driver/nvidia/gpus"].split()) == ["0000:01:00.0", "0000:03:00.0"]


def assert_declares_gpus_0_and_2(host: SimulatedHost, bundle: Path, output: str) -> None:
    """As with a hook, but that the directories of other GPUs in /proc/driver/nvidia are there and empty."""
    config = (bundle / "config.json").read_text()
    assert "ocigpu-hook" not in config
    assert json.loads(config)["linux"].get("resources") in (None, {})
    look_at_gpus_0_and_2(host, output)


@pytest.fixture(autouse=True)
def ordinary_user(simulated_host: SimulatedHost) -> None:
    """Where this works at all: user namespaces are allowed."""
    requirements.require(requirements.user_namespaces())


@CGROUPS
def test_a_rootless_container_gets_its_gpus(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    public_copy: PublicCopy,
    cgroup: str,
) -> None:
    bundle = make_bundle(LOOK, {"NVIDIA_VISIBLE_DEVICES": "0,2"}, edit=make_rootless)
    env = simulated_host.environment({**runtime_environment, **give_away(bundle, USER)})
    result = run_container([public_copy.runtime], bundle, container_id(), env=env, cgroup=cgroup, prefix=AS_USER)
    assert result.returncode == 0, explain(result)
    assert_has_gpus_0_and_2(simulated_host, result.stdout)


def test_a_hook_that_may_not_enter_a_rootless_container_stops_it_with_the_reason(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str], public_copy: PublicCopy
) -> None:
    """crun, started outside a user namespace, makes its process undumpable: the hook's user may not look at it.

    Podman starts it inside one, where this works: see the next test.
    """
    bundle = make_bundle(["sh", "-c", "echo started"], {"NVIDIA_VISIBLE_DEVICES": "0"}, edit=make_rootless)
    env = simulated_host.environment({**runtime_environment, **give_away(bundle, USER)}, "crun")
    before = simulated_host.hook_log.stat().st_size
    result = run_container([public_copy.runtime], bundle, container_id(), env=env, cgroup="v2", prefix=AS_USER)
    assert result.returncode != 0
    assert "started" not in result.stdout
    assert "OCIGPU-NS-2" in simulated_host.hook_log.read_text()[before:]
    assert machine.mounts_below(str(bundle)) == []


@RUNTIMES
@CGROUPS
@pytest.mark.parametrize("owner", [0, USER], ids=["of root", "of a user"])
def test_a_runtime_inside_a_user_namespace_gives_gpus(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    public_copy: PublicCopy,
    low_level: str,
    cgroup: str,
    owner: int,
) -> None:
    bundle = make_bundle(LOOK, {"NVIDIA_VISIBLE_DEVICES": "0,2"}, edit=without_resources)
    env = simulated_host.environment({**runtime_environment, **give_away(bundle, owner)}, low_level)
    prefix = [*(AS_USER if owner else ()), "unshare", "--user", "--map-root-user", "--mount"]
    result = run_container([public_copy.runtime], bundle, container_id(), env=env, cgroup=cgroup, prefix=prefix)
    assert result.returncode == 0, explain(result)
    assert_has_gpus_0_and_2(simulated_host, result.stdout)


def test_a_rootless_container_that_asks_for_an_unknown_gpu_does_not_start(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str], public_copy: PublicCopy
) -> None:
    bundle = make_bundle(["sh", "-c", "echo started"], {"NVIDIA_VISIBLE_DEVICES": "9"}, edit=make_rootless)
    env = simulated_host.environment({**runtime_environment, **give_away(bundle, USER)})
    config = (bundle / "config.json").read_bytes()
    result = run_container([public_copy.runtime], bundle, container_id(), env=env, prefix=AS_USER)
    assert failed_with("OCIGPU-DEV-1", result), explain(result)
    assert "started" not in result.stdout
    assert (bundle / "config.json").read_bytes() == config
    assert os.stat(bundle / "config.json").st_uid == USER


@CGROUPS
def test_a_rootless_container_gets_its_gpus_in_mode_spec(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    public_copy: PublicCopy,
    cgroup: str,
) -> None:
    """By the hook: a simulated host's own step could not enter the container's user namespace."""
    bundle = make_bundle(LOOK, {"NVIDIA_VISIBLE_DEVICES": "0,2"}, edit=make_rootless)
    variables = {**runtime_environment, **give_away(bundle, USER)}
    env = simulated_host.in_mode(variables, bundle.with_name("spec.toml"), "spec")
    result = run_container([public_copy.runtime], bundle, container_id(), env=env, cgroup=cgroup, prefix=AS_USER)
    assert result.returncode == 0, explain(result)
    assert_has_gpus_0_and_2(simulated_host, result.stdout)


@RUNTIMES
@CGROUPS
@pytest.mark.parametrize("owner", [0, USER], ids=["of root", "of a user"])
def test_a_runtime_inside_a_user_namespace_needs_no_hook_in_mode_spec(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    public_copy: PublicCopy,
    low_level: str,
    cgroup: str,
    owner: int,
) -> None:
    bundle = make_bundle(LOOK, {"NVIDIA_VISIBLE_DEVICES": "0,2"}, edit=without_resources)
    variables = {**runtime_environment, **give_away(bundle, owner)}
    env = simulated_host.in_mode(variables, bundle.with_name("spec.toml"), "spec", runtime=low_level)
    prefix = [*(AS_USER if owner else ()), "unshare", "--user", "--map-root-user", "--mount"]
    result = run_container([public_copy.runtime], bundle, container_id(), env=env, cgroup=cgroup, prefix=prefix)
    assert result.returncode == 0, explain(result)
    assert_declares_gpus_0_and_2(simulated_host, bundle, result.stdout)
