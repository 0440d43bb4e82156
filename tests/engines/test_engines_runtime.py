"""ocigpu-runtime in the place of runc and crun: what a container gets, what it does not, and what is left."""

import re
from pathlib import Path
from typing import Any

import pytest
from support import machine, requirements
from support.fixtures import MakeBundle
from support.machine import CACHED
from support.process import explain, run
from support.product import (
    CONTROL_NODES,
    GRANTED,
    LIBRARIES,
    RUNTIME,
    SimulatedHost,
    check_gpus_0_and_2,
    failed_with,
    gpu_names,
    listed_uuids,
)
from support.runtimes import (
    answers,
    container_id,
    create_and_start,
    parts,
    probe,
    run_container,
    script,
    start_in_background,
    view_of,
)

pytestmark = [pytest.mark.root, pytest.mark.engine]

RUNTIMES = pytest.mark.parametrize("low_level", ["runc", "crun"])
CGROUPS = pytest.mark.parametrize("cgroup", ["v1", "v2"])


@RUNTIMES
@CGROUPS
def test_a_container_gets_exactly_the_gpus_it_asks_for(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    low_level: str,
    cgroup: str,
) -> None:
    bundle = make_bundle(
        script(
            ["nvidia-smi", "-L"],
            probe(
                ["list", "/dev", "/proc/driver/nvidia/gpus"],
                ["stat", *(f"/dev/{name}" for name in GRANTED)],
                ["open", *(f"/dev/{name}" for name in GRANTED), "/dev/null"],
                ["mknod", "/dev/nvidia1", *simulated_host.number("nvidia1")],
                ["open", "/dev/nvidia1"],
                ["read", "/proc/driver/nvidia/params"],
            ),
            ["ldconfig", "-p"],
            ["/dlopen", *LIBRARIES],
        ),
        {"NVIDIA_VISIBLE_DEVICES": "0,2"},
    )
    env = simulated_host.environment(runtime_environment, low_level)
    result = run_container([RUNTIME], bundle, container_id(), env=env, cgroup=cgroup)
    assert result.returncode == 0, explain(result)
    listing, probed, cache, opened = parts(result.stdout)
    seen = check_gpus_0_and_2(simulated_host, listing, probed)
    assert seen["open", "/dev/null"] == "ok"
    assert seen["mknod", "/dev/nvidia1"] == "ok"
    assert "ModifyDeviceFiles: 0" in seen["read", "/proc/driver/nvidia/params"].splitlines()
    for name in LIBRARIES:
        assert f"{name} ({CACHED}) => " in cache
        assert f"dlopen {name} ok\n" in opened


@RUNTIMES
def test_create_start_and_delete_work_as_with_the_low_level_runtime(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    work_directory: Path,
    low_level: str,
) -> None:
    bundle = make_bundle(["nvidia-smi", "-L"], {"NVIDIA_VISIBLE_DEVICES": "7"})
    env = simulated_host.environment(runtime_environment, low_level)
    view = view_of("v2")  # crun refuses machines that mount both versions
    result = create_and_start([*view, RUNTIME], bundle, container_id(), env=env, state=work_directory / "state")
    assert result.returncode == 0, explain(result)
    assert listed_uuids(result.stdout) == [simulated_host.gpus[7]]


@RUNTIMES
def test_letters_of_a_rule_that_the_runtime_takes_are_taken(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str], low_level: str
) -> None:
    def edit(config: dict[str, Any]) -> None:
        rule = {"allow": True, "type": "c", "major": 1, "minor": 3, "access": "rwa"}
        config["linux"]["resources"]["devices"].append(rule)

    bundle = make_bundle(probe(["open", "/dev/nvidia0", "/dev/null"]), {"NVIDIA_VISIBLE_DEVICES": "0"}, edit=edit)
    env = simulated_host.environment(runtime_environment, low_level)
    result = run_container([RUNTIME], bundle, container_id(), env=env, cgroup="v2")
    assert result.returncode == 0, explain(result)
    assert answers(result.stdout) == {("open", "/dev/nvidia0"): "ENXIO", ("open", "/dev/null"): "ok"}


@pytest.mark.parametrize(
    ("request_text", "expected"),
    [
        pytest.param("all", range(8), id="all"),
        pytest.param("3", [3], id="an index"),
        pytest.param("5,1,5", [1, 5], id="indices twice and out of order"),
        pytest.param("none", [], id="none"),
    ],
)
def test_each_way_of_asking_gives_its_gpus(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    request_text: str,
    expected: list[int],
) -> None:
    bundle = make_bundle(probe(["list", "/dev"]), {"NVIDIA_VISIBLE_DEVICES": request_text})
    env = simulated_host.environment(runtime_environment)
    result = run_container([RUNTIME], bundle, container_id(), env=env)
    assert result.returncode == 0, explain(result)
    names = gpu_names(answers(result.stdout)["list", "/dev"])
    assert names == sorted([*(f"nvidia{index}" for index in expected), *CONTROL_NODES])


def test_a_gpu_can_be_asked_for_by_its_uuid(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str]
) -> None:
    bundle = make_bundle(["nvidia-smi", "-L"], {"NVIDIA_VISIBLE_DEVICES": simulated_host.gpus[4]})
    env = simulated_host.environment(runtime_environment)
    result = run_container([RUNTIME], bundle, container_id(), env=env)
    assert result.returncode == 0, explain(result)
    assert listed_uuids(result.stdout) == [simulated_host.gpus[4]]


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({}, id="unset"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": ""}, id="empty"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "void"}, id="void"),
    ],
)
def test_a_container_that_asks_for_nothing_is_not_touched(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    variables: dict[str, str],
) -> None:
    bundle = make_bundle(probe(["list", "/dev", "/proc/driver/nvidia"]), variables)
    config = (bundle / "config.json").read_bytes()
    status = (bundle / "config.json").stat()
    rootfs = machine.tree(bundle / "rootfs")
    env = simulated_host.environment(runtime_environment)
    result = run_container([RUNTIME], bundle, container_id(), env=env)
    assert result.returncode == 0, explain(result)
    assert gpu_names(answers(result.stdout)["list", "/dev"]) == []
    assert (bundle / "config.json").read_bytes() == config
    assert (bundle / "config.json").stat().st_ino == status.st_ino
    assert machine.tree(bundle / "rootfs") == rootfs


@RUNTIMES
@CGROUPS
def test_an_unknown_gpu_stops_the_container_and_leaves_nothing(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    session_directory: Path,
    low_level: str,
    cgroup: str,
) -> None:
    bundle = make_bundle(["sh", "-c", "echo started"], {"NVIDIA_VISIBLE_DEVICES": "0,9"})
    config = (bundle / "config.json").read_bytes()
    rootfs = machine.tree(bundle / "rootfs")
    env = simulated_host.environment(runtime_environment, low_level)
    result = run_container([RUNTIME], bundle, container_id(), env=env, cgroup=cgroup)
    assert failed_with("OCIGPU-DEV-1", result), explain(result)
    assert "started" not in result.stdout
    assert '"9"' in result.stderr
    assert "Traceback" not in result.stderr
    assert (bundle / "config.json").read_bytes() == config
    assert machine.tree(bundle / "rootfs") == rootfs
    assert machine.remains(str(session_directory), session_directory.name) == []


@RUNTIMES
@CGROUPS
def test_a_hook_that_fails_stops_the_container_and_leaves_the_root_as_it_was(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    session_directory: Path,
    low_level: str,
    cgroup: str,
) -> None:
    bundle = make_bundle(["sh", "-c", "echo started"], {"NVIDIA_VISIBLE_DEVICES": "0"})
    hostile = bundle / "rootfs/usr/bin/nvidia-smi"
    hostile.mkdir()  # a directory where a file must be mounted
    rootfs = machine.tree(bundle / "rootfs")
    env = simulated_host.environment(runtime_environment, low_level)
    logged = simulated_host.hook_log.stat().st_size
    result = run_container([RUNTIME], bundle, container_id(), env=env, cgroup=cgroup)
    assert result.returncode != 0
    assert "started" not in result.stdout
    # runc shows what a failing hook says, crun only that it failed
    message = result.stderr if low_level == "runc" else simulated_host.hook_log.read_text()[logged:]
    assert "OCIGPU-MNT-" in message, explain(result)
    assert "/usr/bin/nvidia-smi" in message
    assert "Traceback" not in message
    assert machine.tree(bundle / "rootfs") == rootfs
    assert machine.remains(str(session_directory), session_directory.name) == []


@RUNTIMES
@CGROUPS
def test_the_hook_works_alone_in_a_bundle(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    low_level: str,
    cgroup: str,
) -> None:
    """Without our shim nobody has declared device rules: the hook itself changes the device cgroup."""
    env = simulated_host.environment(runtime_environment, low_level)
    hook = {
        "path": str(RUNTIME.with_name("ocigpu-hook")),
        "args": ["ocigpu-hook", "--config", env["OCIGPU_CONFIG"], "prestart"],
        "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"],
    }

    def edit(config: dict[str, Any]) -> None:
        config["hooks"] = {"prestart": [hook]}

    look = probe(
        ["list", "/dev"],
        ["mknod", "/dev/nvidia1", *simulated_host.number("nvidia1")],
        ["mknod", "/dev/disk", "7", "0"],
        ["open", "/dev/nvidia0", "/dev/nvidiactl", "/dev/null", "/dev/nvidia1", "/dev/disk"],
    )
    bundle = make_bundle(script(look, ["nvidia-smi", "-L"]), {"NVIDIA_VISIBLE_DEVICES": "0"}, edit=edit)
    program = requirements.find_program(low_level)
    assert program is not None
    result = run_container([program], bundle, container_id(), env=env, cgroup=cgroup)
    assert result.returncode == 0, explain(result)
    probed, listing = parts(result.stdout)
    assert listed_uuids(listing) == [simulated_host.gpus[0]]
    seen = answers(probed)
    assert gpu_names(seen["list", "/dev"]) == sorted(["nvidia0", *CONTROL_NODES])
    assert seen["open", "/dev/nvidia0"] == "ENXIO"
    assert seen["open", "/dev/nvidiactl"] == "ENXIO"
    assert seen["open", "/dev/null"] == "ok"
    assert seen["open", "/dev/nvidia1"] == "EPERM"
    assert seen["open", "/dev/disk"] == "EPERM"


@RUNTIMES
@CGROUPS
def test_a_container_that_may_use_all_devices_still_may(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    low_level: str,
    cgroup: str,
) -> None:
    def edit(config: dict[str, Any]) -> None:
        config["linux"]["resources"]["devices"] = [{"allow": True, "access": "rwm"}]  # as for docker --privileged

    look = probe(
        ["list", "/dev"],
        ["mknod", "/dev/nvidia1", *simulated_host.number("nvidia1")],
        ["open", "/dev/nvidia0", "/dev/nvidia1"],
    )
    bundle = make_bundle(look, {"NVIDIA_VISIBLE_DEVICES": "0"}, edit=edit)
    env = simulated_host.environment(runtime_environment, low_level)
    result = run_container([RUNTIME], bundle, container_id(), env=env, cgroup=cgroup)
    assert result.returncode == 0, explain(result)
    seen = answers(result.stdout)
    assert gpu_names(seen["list", "/dev"]) == sorted(["nvidia0", *CONTROL_NODES])
    assert seen["open", "/dev/nvidia0"] == "ENXIO"
    assert seen["open", "/dev/nvidia1"] == "ENXIO"


def test_a_bundle_can_be_run_again_and_is_not_edited_twice(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str]
) -> None:
    bundle = make_bundle(["nvidia-smi", "-L"], {"NVIDIA_VISIBLE_DEVICES": "1,6"})
    env = simulated_host.environment(runtime_environment)
    configs = []
    for _ in range(2):
        result = run_container([RUNTIME], bundle, container_id(), env=env)
        assert result.returncode == 0, explain(result)
        assert listed_uuids(result.stdout) == [simulated_host.gpus[1], simulated_host.gpus[6]]
        text = (bundle / "config.json").read_bytes()
        # who is ready for the hook is another process each time: ocigpu/entry/prepared.py
        assert len(re.findall(rb'"--early","/run/ocigpu/early-[0-9]+-[0-9a-f]{16}",', text)) == 1
        configs.append(re.sub(rb"early-[0-9]+-[0-9a-f]{16}", b"", text))
    assert configs[0] == configs[1]


def test_two_containers_at_once_have_their_own_gpus(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str], work_directory: Path
) -> None:
    env = simulated_host.environment(runtime_environment)
    command = [str(RUNTIME), "--root", str(work_directory / "state")]
    names = [container_id() for _ in range(2)]
    try:
        for index, name in enumerate(names):
            bundle = make_bundle(["/probe", "pause"], {"NVIDIA_VISIBLE_DEVICES": str(index)})
            started = start_in_background(command, ["run", "--detach"], bundle, name, env)
            assert started.returncode == 0, explain(started)
        for index, name in enumerate(names):
            other = 1 - index
            look = probe(
                ["list", "/dev"],
                ["mknod", f"/dev/nvidia{other}", *simulated_host.number(f"nvidia{other}")],
                ["open", f"/dev/nvidia{index}", f"/dev/nvidia{other}"],
            )
            seen = answers(run([*command, "exec", name, *look], env=env).stdout)
            assert gpu_names(seen["list", "/dev"]) == sorted([f"nvidia{index}", *CONTROL_NODES])
            assert seen["open", f"/dev/nvidia{index}"] == "ENXIO"
            assert seen["mknod", f"/dev/nvidia{other}"] == "ok"
            assert seen["open", f"/dev/nvidia{other}"] == "EPERM"
    finally:
        for name in names:
            run([*command, "delete", "--force", name], env=env, check=False)


@pytest.mark.parametrize("subcommand", ["state", "kill", "delete", "start"])
def test_other_subcommands_fail_as_the_low_level_runtime_fails(
    simulated_host: SimulatedHost, runtime_environment: dict[str, str], work_directory: Path, subcommand: str
) -> None:
    env = simulated_host.environment(runtime_environment)
    words = ["--root", str(work_directory / "state"), subcommand, "no-such-container"]
    ours = run([RUNTIME, *words], env=env, check=False)
    plain = run(["/usr/sbin/runc", *words], env=env, check=False)
    assert ours.returncode == plain.returncode != 0
    assert ours.stdout == plain.stdout
    assert "does not exist" in ours.stderr
