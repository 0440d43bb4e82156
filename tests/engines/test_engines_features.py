"""Each part that a container can ask for, and each kind of host, through the shim or the hook and a real runc."""

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import machine, requirements
from support.fixtures import MakeBundle
from support.machine import CACHED, MACHINE, TRIPLET
from support.process import Completed, explain, run
from support.product import (
    CONTROL_NODES,
    LIBRARIES,
    RUNTIME,
    SimulatedHost,
    failed_with,
    gpu_names,
    listed_uuids,
    make_simulated_host,
)
from support.runtimes import answers, container_id, parts, probe, run_container, script, view_of

pytestmark = [pytest.mark.root, pytest.mark.engine]

EVERYTHING = {"NVIDIA_VISIBLE_DEVICES": "1", "NVIDIA_DRIVER_CAPABILITIES": "all"}
VERSION = "570.133.20"

Start = Callable[..., Completed]


@pytest.fixture(scope="module")
def b200_host(session_directory: Path) -> SimulatedHost:
    """A host with two GPUs and every part a simulated host can have: DRM nodes, IMEX channels, all sockets."""
    requirements.require(requirements.root(), requirements.programs("gcc"))
    host = make_simulated_host(session_directory / "host-b200", 2, model="b200")
    (host.directory / "tmp/nvidia-mps").mkdir(mode=0o777)
    return host


@pytest.fixture
def start(
    make_bundle: MakeBundle, b200_host: SimulatedHost, runtime_environment: dict[str, str], work_directory: Path
) -> Start:
    """Call with argv and variables: runs a container through the shim; ``settings`` come before the host's own."""

    def go(
        arguments: list[str],
        variables: dict[str, str],
        *,
        host: SimulatedHost = b200_host,
        settings: str = "",
        edit: Callable[[dict[str, Any]], None] | None = None,
        prepare: Callable[[Path], None] | None = None,
    ) -> Completed:
        bundle = make_bundle(arguments, variables, edit=edit)
        if prepare:
            prepare(bundle / "rootfs")
        env = host.environment(runtime_environment)
        if settings:
            file = work_directory / "config.toml"
            file.write_text(f"{settings}\n{Path(env['OCIGPU_CONFIG']).read_text()}")
            file.chmod(0o644)
            env["OCIGPU_CONFIG"] = str(file)
        return run_container([RUNTIME], bundle, container_id(), env=env)

    return go


def seen_by(result: Completed) -> dict[tuple[str, str], str]:
    assert result.returncode == 0, explain(result)
    return answers(result.stdout)


# the hook by hand, and the bundle as working directory


@pytest.mark.parametrize("low_level", ["runc", "crun"])
@pytest.mark.parametrize("stage", ["prestart", "createRuntime"])
def test_the_hook_works_in_both_stages_before_the_root_is_changed(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    low_level: str,
    stage: str,
) -> None:
    env = simulated_host.environment(runtime_environment, low_level)

    def edit(config: dict[str, Any]) -> None:
        arguments = ["ocigpu-hook", "--config", env["OCIGPU_CONFIG"], stage]
        config["hooks"] = {stage: [{"path": str(RUNTIME.with_name("ocigpu-hook")), "args": arguments}]}

    look = probe(["mknod", "/gpu1", *simulated_host.number("nvidia1")], ["open", "/dev/nvidia0", "/gpu1"])
    bundle = make_bundle(
        script(look, ["nvidia-smi", "-L"], ["/dlopen", *LIBRARIES]), {"NVIDIA_VISIBLE_DEVICES": "0"}, edit=edit
    )
    program = requirements.find_program(low_level)
    assert program is not None
    result = run_container([program], bundle, container_id(), env=env, cgroup="v2")
    assert result.returncode == 0, explain(result)
    probed, listing, opened = parts(result.stdout)
    seen = answers(probed)
    assert seen["open", "/dev/nvidia0"] == "ENXIO"
    assert seen["open", "/gpu1"] == "EPERM"
    assert listed_uuids(listing) == [simulated_host.gpus[0]]
    assert opened.splitlines() == [f"dlopen {name} ok" for name in LIBRARIES]


def test_the_bundle_may_be_the_working_directory(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    work_directory: Path,
) -> None:
    bundle = make_bundle(["nvidia-smi", "-L"], {"NVIDIA_VISIBLE_DEVICES": "6"})
    env = simulated_host.environment(runtime_environment)
    result = run([RUNTIME, "--root", work_directory / "state", "run", container_id()], env=env, cwd=bundle)
    assert listed_uuids(result.stdout) == [simulated_host.gpus[6]]


# parts of a request


def test_graphics_brings_the_granted_gpus_drm_nodes_and_its_application_profile(
    start: Start, b200_host: SimulatedHost
) -> None:
    granted, refused = (
        [f"dri/{(b200_host.directory / 'dev/dri/by-path' / f'pci-{bus_id}-{kind}').readlink().name}" for kind in kinds]
        for bus_id, kinds in (("0000:02:00.0", ("card", "render")), ("0000:01:00.0", ("card", "render")))
    )
    profile = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf"
    icd = "/etc/vulkan/icd.d/nvidia_icd.json"
    look = probe(
        ["list", "/dev/dri", "/dev/dri/by-path"],
        ["stat", *(f"/dev/{name}" for name in granted)],
        ["mknod", f"/dev/{refused[0]}", *b200_host.number(refused[0])],
        ["open", *(f"/dev/{name}" for name in (*granted, refused[0]))],
        ["read", profile, icd],
        ["create", profile, icd],
    )
    seen = seen_by(start(look, {**EVERYTHING, "NVIDIA_DRIVER_CAPABILITIES": "graphics"}))
    names = [name.removeprefix("dri/") for name in granted]
    assert seen["list", "/dev/dri"].split() == sorted(["by-path", *names])
    assert seen["list", "/dev/dri/by-path"].split() == ["pci-0000:02:00.0-card", "pci-0000:02:00.0-render"]
    for name in granted:
        assert seen["stat", f"/dev/{name}"] == b200_host.describe_node(name), name
        assert seen["open", f"/dev/{name}"] in ("ENXIO", "ENODEV"), name  # ENODEV: the kernel has DRM built in
    assert seen["open", f"/dev/{refused[0]}"] == "EPERM"
    assert '"EGLVisibleDGPUDevices", 0x2]' in seen["read", profile]
    assert "libGLX_nvidia.so.0" in seen["read", icd]
    assert seen["create", profile] == "EROFS"
    assert seen["create", icd] == "EROFS"


def test_imex_channels_that_are_asked_for_are_given_and_no_others(start: Start, b200_host: SimulatedHost) -> None:
    directory = "nvidia-caps-imex-channels"
    look = probe(
        ["list", f"/dev/{directory}"],
        ["stat", f"/dev/{directory}/channel1"],
        ["mknod", "/channel2", *b200_host.number(f"{directory}/channel2")],
        ["open", f"/dev/{directory}/channel1", f"/dev/{directory}/channel3", "/channel2"],
    )
    seen = seen_by(start(look, {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_IMEX_CHANNELS": "3,1"}))
    assert seen["list", f"/dev/{directory}"] == "channel1 channel3"
    assert seen["stat", f"/dev/{directory}/channel1"] == b200_host.describe_node(f"{directory}/channel1")
    assert seen["open", f"/dev/{directory}/channel1"] == "ENXIO"
    assert seen["open", f"/dev/{directory}/channel3"] == "ENXIO"
    assert seen["open", "/channel2"] == "EPERM"


def test_firmware_sockets_and_programs_are_the_hosts_own(start: Start, b200_host: SimulatedHost) -> None:
    firmware = f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"
    sockets = ["/run/nvidia-persistenced/socket", "/run/nvidia-fabricmanager/socket"]
    programs = ["/usr/bin/nvidia-smi", "/usr/bin/nvidia-cuda-mps-control", "/usr/bin/nvidia-debugdump"]
    look = probe(["stat", firmware, *sockets, *programs, "/tmp/nvidia-mps"], ["create", firmware])
    seen = seen_by(start(look, {"NVIDIA_VISIBLE_DEVICES": "0"}))
    assert seen["create", firmware] == "EROFS"
    for path in (firmware, *programs):
        size = (b200_host.directory / path[1:]).stat().st_size
        assert seen["stat", path].startswith(f"- {size} "), path
    for path in sockets:
        assert seen["stat", path].startswith("s "), path
    assert seen["stat", "/tmp/nvidia-mps"].startswith("d ")


@pytest.mark.parametrize("asked", [True, False], ids=["asked for", "not asked for"])
def test_the_node_of_a_feature_is_given_to_who_asks_for_it(start: Start, b200_host: SimulatedHost, asked: bool) -> None:
    node = b200_host.directory / "dev/gdrdrv"
    os.mknod(node, 0o666 | stat.S_IFCHR, os.makedev(240, 0))
    try:
        node.chmod(0o666)
        look = probe(["list", "/dev"], ["mknod", "/gdrdrv", "240", "0"], ["open", "/gdrdrv"])
        variables = {"NVIDIA_VISIBLE_DEVICES": "0", **({"NVIDIA_GDRCOPY": "enabled"} if asked else {})}
        seen = seen_by(start(look, variables))
        assert ("gdrdrv" in seen["list", "/dev"].split()) == asked
        assert (seen["open", "/gdrdrv"] != "EPERM") == asked
    finally:
        node.unlink()


@pytest.mark.parametrize("capabilities", ["compute,utility", "compute,utility,compat32"])
def test_32_bit_libraries_come_with_compat32_only(start: Start, capabilities: str) -> None:
    result = start(["ldconfig", "-p"], {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_DRIVER_CAPABILITIES": capabilities})
    assert result.returncode == 0, explain(result)
    assert f"\tlibcuda.so.1 ({CACHED}) => " in result.stdout
    assert ("\tlibcuda.so.1 (libc6) => " in result.stdout) == ("compat32" in capabilities and MACHINE == "x86_64")


@pytest.mark.parametrize("kind", ["config", "monitor"])
def test_a_privileged_container_may_configure_or_watch_mig(start: Start, mig_host: SimulatedHost, kind: str) -> None:
    node = f"nvidia-caps/nvidia-cap{1 if kind == 'config' else 2}"
    other = f"nvidia-caps/nvidia-cap{2 if kind == 'config' else 1}"

    def edit(config: dict[str, Any]) -> None:
        for names in config["process"]["capabilities"].values():
            names.append("CAP_SYS_ADMIN")

    look = probe(
        ["stat", f"/dev/{node}"],
        ["mknod", "/other", *mig_host.number(other)],
        ["open", f"/dev/{node}", "/other"],
        ["list", "/proc/driver/nvidia/capabilities/mig"],
    )
    variables = {"NVIDIA_VISIBLE_DEVICES": "all", f"NVIDIA_MIG_{kind.upper()}_DEVICES": "all"}
    seen = seen_by(start(look, variables, host=mig_host, edit=edit))
    assert seen["stat", f"/dev/{node}"] == mig_host.describe_node(node)
    assert seen["open", f"/dev/{node}"] == "ENXIO"
    assert seen["open", "/other"] == "EPERM"
    assert kind in seen["list", "/proc/driver/nvidia/capabilities/mig"].split()


@pytest.mark.parametrize("kind", ["CONFIG", "MONITOR"])
def test_an_unprivileged_container_may_not_configure_or_watch_mig(
    start: Start, mig_host: SimulatedHost, kind: str
) -> None:
    variables = {"NVIDIA_VISIBLE_DEVICES": "all", f"NVIDIA_MIG_{kind}_DEVICES": "all"}
    result = start(["sh", "-c", "echo started"], variables, host=mig_host)
    assert failed_with("OCIGPU-REQ-5", result), explain(result)
    assert "started" not in result.stdout


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        pytest.param("", "cuda/compat", id="newer in the image"),
        pytest.param('cuda-compat-mode = "disabled"', f"lib/{TRIPLET}", id="disabled by settings"),
    ],
)
def test_the_loader_prefers_compatibility_libraries_of_the_image(
    start: Start, b200_host: SimulatedHost, settings: str, chosen: str
) -> None:
    def prepare(rootfs: Path) -> None:
        directory = rootfs / "usr/local/cuda/compat"
        directory.mkdir(parents=True)
        library = b200_host.directory / f"usr/lib/{TRIPLET}/libcuda.so.{VERSION}"
        shutil.copy(library, directory / "libcuda.so.999.10.01")
        (directory / "libcuda.so.1").symlink_to("libcuda.so.999.10.01")

    look = ["sh", "-c", "LD_DEBUG=files /dlopen libcuda.so.1 2>&1"]
    result = start(look, {"NVIDIA_VISIBLE_DEVICES": "0"}, settings=settings, prepare=prepare)
    assert result.returncode == 0, explain(result)
    assert "dlopen libcuda.so.1 ok" in result.stdout
    (loaded,) = [line.split()[-1] for line in result.stdout.splitlines() if "calling init: " in line and "cuda" in line]
    assert loaded.endswith(f"/{chosen}/libcuda.so.1")


# ways of asking that settings turn on or off


def test_devices_can_be_asked_for_by_volume_mounts(start: Start, b200_host: SimulatedHost) -> None:
    def edit(config: dict[str, Any]) -> None:
        target = f"/var/run/nvidia-container-devices/{b200_host.gpus[1]}"
        config["mounts"].append({"destination": target, "type": "bind", "source": "/dev/null", "options": ["bind"]})

    settings = (
        "accept-nvidia-visible-devices-as-volume-mounts = true\n"
        "accept-nvidia-visible-devices-envvar-when-unprivileged = false"
    )
    result = start(["nvidia-smi", "-L"], {"NVIDIA_VISIBLE_DEVICES": "all"}, settings=settings, edit=edit)
    assert result.returncode == 0, explain(result)
    assert listed_uuids(result.stdout) == [b200_host.gpus[1]]


def test_the_variable_of_an_unprivileged_container_can_be_refused(start: Start) -> None:
    settings = "accept-nvidia-visible-devices-envvar-when-unprivileged = false"
    seen = seen_by(start(probe(["list", "/dev"]), {"NVIDIA_VISIBLE_DEVICES": "all"}, settings=settings))
    assert gpu_names(seen["list", "/dev"]) == []


def test_a_swarm_resource_takes_the_place_of_the_variable(start: Start, b200_host: SimulatedHost) -> None:
    variables = {"NVIDIA_VISIBLE_DEVICES": "all", "DOCKER_RESOURCE_GPU": b200_host.gpus[1]}
    result = start(["nvidia-smi", "-L"], variables, settings='swarm-resource = "DOCKER_RESOURCE_GPU"')
    assert result.returncode == 0, explain(result)
    assert listed_uuids(result.stdout) == [b200_host.gpus[1]]


def test_an_unsatisfied_requirement_says_what_is_needed_and_what_is_there(start: Start) -> None:
    variables = {"NVIDIA_VISIBLE_DEVICES": "1", "NVIDIA_REQUIRE_CUDA": "cuda>=99.1 brand=nvidia,driver<400"}
    result = start(["sh", "-c", "echo started"], variables)
    assert failed_with("OCIGPU-REQ-3", result), explain(result)
    assert "started" not in result.stdout
    for word in ("NVIDIA_REQUIRE_CUDA", "99.1", "12.8"):
        assert word in result.stderr, result.stderr
    result = start(["echo", "started"], {**variables, "NVIDIA_DISABLE_REQUIRE": "1"})
    assert result.stdout == "started\n", explain(result)


# hosts that are not as they should be


@pytest.fixture
def faults(b200_host: SimulatedHost) -> Iterator[Path]:
    """A file: the host's NVML has the faults in it until the test is over."""
    file = b200_host.directory / "faults"
    yield file
    file.unlink()


def test_a_host_with_a_broken_nvml_still_gives_its_gpus_and_says_so(
    start: Start, b200_host: SimulatedHost, faults: Path
) -> None:
    faults.write_text("init 999\n")
    b200_host.environment({})
    logged = b200_host.hook_log.stat().st_size
    look = probe(["list", "/dev"], ["open", "/dev/nvidia1"])
    seen = seen_by(start(look, {"NVIDIA_VISIBLE_DEVICES": b200_host.gpus[1]}))
    assert gpu_names(seen["list", "/dev"]) == sorted(["nvidia1", *CONTROL_NODES])
    assert seen["open", "/dev/nvidia1"] == "ENXIO"
    assert "GPUs come from procfs" in b200_host.hook_log.read_text()[logged:]


def test_a_gpu_that_fell_off_the_bus_stops_only_containers_that_ask_for_it(
    start: Start, b200_host: SimulatedHost, faults: Path
) -> None:
    faults.write_text("lost 0\n")
    seen = seen_by(start(probe(["list", "/dev"]), {"NVIDIA_VISIBLE_DEVICES": "1"}))
    assert gpu_names(seen["list", "/dev"]) == sorted(["nvidia1", *CONTROL_NODES])
    result = start(["sh", "-c", "echo started"], {"NVIDIA_VISIBLE_DEVICES": "0"})
    assert failed_with("OCIGPU-DEV-2", result), explain(result)
    assert "started" not in result.stdout


def test_a_host_without_a_loader_cache_gives_its_libraries(start: Start, session_directory: Path) -> None:
    host = make_simulated_host(session_directory / "host-no-ldcache", 1, model="t4", ldcache=False)
    assert not (host.directory / "etc/ld.so.cache").exists()
    look = script(["nvidia-smi", "-L"], ["/dlopen", *LIBRARIES])
    result = start(look, {"NVIDIA_VISIBLE_DEVICES": "0"}, host=host)
    assert result.returncode == 0, explain(result)
    listing, opened = parts(result.stdout)
    assert listed_uuids(listing) == [host.gpus[0]]
    assert opened.splitlines() == [f"dlopen {name} ok" for name in LIBRARIES]


@pytest.mark.parametrize("stage", ["shim", "hook alone"])
def test_a_driver_root_elsewhere_serves_a_host_that_is_no_simulation(
    make_bundle: MakeBundle,
    b200_host: SimulatedHost,
    runtime_environment: dict[str, str],
    work_directory: Path,
    session_directory: Path,
    stage: str,
) -> None:
    """A driver container's files below driver.root; kernel and procfs are, as in such machines, the host's own.

    The procfs of a kernel with the driver is made from the simulated one by mounts, for this process tree alone; the
    container's own procfs, where the kernel module would show its tree too, by a hook before ours.
    """
    directory = b200_host.directory
    settings = work_directory / "config.toml"
    settings.write_text(f'[driver]\nroot = "{directory}"\n[runtime]\nruntimes = ["runc"]\n')
    settings.chmod(0o644)
    hook = str(RUNTIME.with_name("ocigpu-hook"))

    def edit(config: dict[str, Any]) -> None:
        cover = (
            'pid=$(sed "s/.*\\"pid\\": *\\([0-9]*\\).*/\\1/"); exec nsenter --target "$pid" --mount '
            f'mount --bind {directory}/proc/driver "$0/rootfs/proc/driver"'
        )
        place = str(work_directory / "bundle1")  # what make_bundle makes first
        hooks = [{"path": "/bin/sh", "args": ["sh", "-c", cover, place], "env": ["PATH=/usr/bin:/bin:/usr/sbin:/sbin"]}]
        if stage == "hook alone":
            hooks.append({"path": hook, "args": ["ocigpu-hook", "--config", str(settings), "prestart"], "env": []})
        config["hooks"] = {"prestart": hooks}

    look = script(
        ["nvidia-smi", "-L"],
        probe(
            ["list", "/dev", "/proc/driver/nvidia/gpus"],
            ["mknod", "/gpu0", *b200_host.number("nvidia0")],
            ["open", "/dev/nvidia1", "/gpu0"],
        ),
        ["/dlopen", *LIBRARIES],
    )
    bundle = make_bundle(look, {"NVIDIA_VISIBLE_DEVICES": b200_host.gpus[1]}, edit=edit)
    assert bundle == work_directory / "bundle1"
    mounts = [f"mount --bind {directory}/proc/{name} /proc/{name}" for name in ("devices", "driver")]
    kernel_view = ("unshare", "--mount", "sh", "-c", f'{" && ".join(mounts)} && exec "$@"', "sh")
    env = {**runtime_environment, "OCIGPU_CONFIG": str(settings)}
    program = str(RUNTIME) if stage == "shim" else requirements.find_program("runc")
    assert program is not None
    result = run_container([program], bundle, container_id(), env=env, prefix=(*view_of("v2"), *kernel_view))
    assert result.returncode == 0, explain(result)
    listing, probed, opened = parts(result.stdout)
    assert listed_uuids(listing) == [b200_host.gpus[1]]
    seen = answers(probed)
    assert gpu_names(seen["list", "/dev"]) == sorted(["nvidia1", *CONTROL_NODES])
    assert seen["list", "/proc/driver/nvidia/gpus"] == "0000:02:00.0"
    assert seen["open", "/dev/nvidia1"] == "ENXIO"
    assert seen["open", "/gpu0"] == "EPERM"
    assert opened.splitlines() == [f"dlopen {name} ok" for name in LIBRARIES]
    assert machine.remains(str(session_directory), session_directory.name) == []
