"""Podman gives containers GPUs by itself, from the specification that ``ocigpu cdi generate`` writes."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.bundle import LAYOUTS
from support.bundle import LIBRARIES as MULTIARCH
from support.podman import PRIVATE_RUN, Podman, make_podman
from support.process import explain, run
from support.product import LIBRARIES, PROGRAMS, SimulatedHost, check_gpus_0_and_2, gpu_names, listed_uuids
from support.runtimes import answers, parts, probe, script

pytestmark = [pytest.mark.root, pytest.mark.engine]

OLDEST = ("--max-version", "0.5.0")
"""Podman 4.3 of Debian 12 reads CDI 0.5.0 and nothing newer."""
CONTROL_NODES = ("nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools", "nvidiactl")
RUNTIMES = pytest.mark.parametrize("runtime", ["runc", "crun"])


@pytest.fixture(scope="module")
def podman(session_directory: Path, runtime_environment: dict[str, str], simulated_host: SimulatedHost) -> Podman:
    """Podman with the specification of a host with eight GPUs."""
    return _podman(session_directory / "podman", runtime_environment, simulated_host)


@pytest.fixture(scope="module")
def mig_podman(session_directory: Path, runtime_environment: dict[str, str], mig_host: SimulatedHost) -> Podman:
    """Podman with the specification of a host with MIG devices."""
    return _podman(session_directory / "podman-mig", runtime_environment, mig_host)


def _podman(directory: Path, runtime_environment: dict[str, str], host: SimulatedHost) -> Podman:
    podman = make_podman(directory, runtime_environment.get("LD_PRELOAD", ""))
    output = podman.cdi / "nvidia.yaml"
    run([PROGRAMS / "ocigpu", "cdi", "generate", "--config", host.settings, *OLDEST, "--output", output])
    return podman


@RUNTIMES
@pytest.mark.parametrize("by", ["index", "uuid"])
def test_a_container_gets_exactly_the_gpus_it_names(
    podman: Podman, simulated_host: SimulatedHost, rootfs: Callable[[str], Path], runtime: str, by: str
) -> None:
    names = ["0", "2"] if by == "index" else [simulated_host.gpus[0], simulated_host.gpus[2]]
    granted = ["nvidia0", "nvidia2", *CONTROL_NODES]
    look = script(
        ["nvidia-smi", "-L"],
        probe(
            ["list", "/dev", "/proc/driver/nvidia/gpus"],
            ["stat", *(f"/dev/{name}" for name in granted)],
            ["open", *(f"/dev/{name}" for name in granted), "/dev/null"],
            ["mknod", "/dev/nvidia1", *simulated_host.number("nvidia1")],
            ["open", "/dev/nvidia1"],
        ),
        ["/dlopen", *LIBRARIES],
        ["grep", "ModifyDeviceFiles", "/proc/driver/nvidia/params"],
        ["sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES"],
    )
    result = podman.run_rootfs(runtime, [f"nvidia.com/gpu={name}" for name in names], rootfs("glibc"), look)
    assert result.returncode == 0, explain(result)
    listing, probed, opened, params, visible = parts(result.stdout)
    check_gpus_0_and_2(simulated_host, listing, probed, granted)
    assert "status" not in opened, opened
    assert params == "ModifyDeviceFiles: 0\n"
    assert visible == "void\n"


@RUNTIMES
def test_all_is_every_gpu(
    podman: Podman, simulated_host: SimulatedHost, rootfs: Callable[[str], Path], runtime: str
) -> None:
    look = script(["nvidia-smi", "-L"], ["/dlopen", *LIBRARIES])
    result = podman.run_rootfs(runtime, ["nvidia.com/gpu=all"], rootfs("glibc"), look)
    assert result.returncode == 0, explain(result)
    listing, opened = parts(result.stdout)
    assert listed_uuids(listing) == list(simulated_host.gpus)
    assert "status" not in opened, opened


@RUNTIMES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_image_layout_starts_with_a_gpu(
    podman: Podman, rootfs: Callable[[str], Path], runtime: str, layout: str
) -> None:
    look = probe(["list", "/dev"], ["open", "/dev/nvidia3", "/dev/nvidiactl"])
    result = podman.run_rootfs(runtime, ["nvidia.com/gpu=3"], rootfs(layout), look)
    assert result.returncode == 0, explain(result)
    seen = answers(result.stdout)
    assert gpu_names(seen["list", "/dev"]) == sorted(["nvidia3", *CONTROL_NODES])
    assert seen["open", "/dev/nvidia3"] == "ENXIO"


@RUNTIMES
def test_libraries_in_a_directory_that_the_image_does_not_know_are_found_even_after_an_ldconfig_of_its_own(
    session_directory: Path, podman: Podman, rootfs: Callable[[str], Path], work_directory: Path, runtime: str
) -> None:
    elsewhere = podman._replace(cdi=work_directory)
    moved = ["--from", f"/{MULTIARCH}", "--to", "/opt/driver", "--relative-to", "container"]
    files = ["--input", podman.cdi / "nvidia.yaml", "--output", work_directory / "nvidia.yaml"]
    run([PROGRAMS / "ocigpu", "cdi", "transform", "root", *moved, *files])
    look = script(["ls", "/opt/driver"], ["/dlopen", *LIBRARIES], ["ldconfig"], ["/dlopen", *LIBRARIES])
    result = elsewhere.run_rootfs(runtime, ["nvidia.com/gpu=0"], rootfs("glibc"), look)
    assert result.returncode == 0, explain(result)
    libraries, opened, _, opened_later = parts(result.stdout)
    assert set(LIBRARIES) <= set(libraries.split())
    assert "status" not in opened + opened_later, explain(result)


@RUNTIMES
def test_a_mig_device_comes_with_its_capabilities_and_no_other(
    mig_podman: Podman, mig_host: SimulatedHost, rootfs: Callable[[str], Path], runtime: str
) -> None:
    uuid, *minors = mig_host.mig_devices[1]
    other_uuid, *other_minors = mig_host.mig_devices[0]
    other = f"nvidia-caps/nvidia-cap{other_minors[0]}"
    look = script(
        ["nvidia-smi", "-L"],
        probe(
            ["list", "/dev", "/dev/nvidia-caps"],
            ["mknod", f"/dev/{other}", *mig_host.number(other)],
            ["open", f"/dev/{other}", "/dev/nvidia0"],
        ),
    )
    result = mig_podman.run_rootfs(runtime, ["nvidia.com/gpu=0:1"], rootfs("glibc"), look)
    assert result.returncode == 0, explain(result)
    listing, probed = parts(result.stdout)
    assert uuid in listing
    assert other_uuid not in listing
    seen = answers(probed)
    assert gpu_names(seen["list", "/dev"]) == sorted(["nvidia0", "nvidia-caps", *CONTROL_NODES])
    assert seen["list", "/dev/nvidia-caps"].split() == sorted(f"nvidia-cap{minor}" for minor in minors)
    assert seen["open", f"/dev/{other}"] == "EPERM"
    assert seen["open", "/dev/nvidia0"] == "ENXIO"


def test_a_device_that_is_not_there_stops_the_container(podman: Podman, rootfs: Callable[[str], Path]) -> None:
    result = podman.run_rootfs("runc", ["nvidia.com/gpu=8"], rootfs("glibc"), ["sh", "-c", "echo started"])
    assert result.returncode != 0
    assert "unresolvable CDI devices nvidia.com/gpu=8" in result.stderr
    assert "started" not in result.stdout


@pytest.mark.rest
@RUNTIMES
def test_what_refresh_writes_this_podman_reads(
    session_directory: Path,
    runtime_environment: dict[str, str],
    simulated_host: SimulatedHost,
    rootfs: Callable[[str], Path],
    runtime: str,
) -> None:
    """The enabled unit's own command: its file is of a version that the engines of this machine read."""
    podman = make_podman(session_directory / f"pod-{runtime}", runtime_environment.get("LD_PRELOAD", ""))
    refresh = [PROGRAMS / "ocigpu", "cdi", "refresh", "--config", simulated_host.settings]
    output = podman.cdi / "nvidia.yaml"
    run([*refresh, "--output", output])
    for _ in range(2):  # as it was written, and once it has been refreshed
        result = podman.run_rootfs(runtime, ["nvidia.com/gpu=2"], rootfs("debian"), ["nvidia-smi", "-L"])
        assert listed_uuids(result.stdout) == [simulated_host.gpus[2]], explain(result)
        assert "up to date" in run([*refresh, "--output", output]).stdout


@pytest.mark.parametrize("words", ["generate --output", "nvidia-ctk cdi generate --output"])
def test_what_generate_writes_where_this_podman_looks_it_reads(
    session_directory: Path,
    runtime_environment: dict[str, str],
    simulated_host: SimulatedHost,
    rootfs: Callable[[str], Path],
    words: str,
) -> None:
    """It is the doctor's fix for a stale file, and what guides of NVIDIA's have one type."""
    podman = make_podman(session_directory / f"pod-generate-{len(words)}", runtime_environment.get("LD_PRELOAD", ""))
    program = [PROGRAMS / "ocigpu", *(words if words.startswith("nvidia") else f"cdi {words}").split()]
    program[-1] = f"{program[-1]}=/var/run/cdi/nvidia.yaml"
    environment = {**os.environ, "OCIGPU_CONFIG": str(simulated_host.settings)}
    run(["unshare", "-m", "sh", "-ec", PRIVATE_RUN, podman.cdi, *program], env=environment)
    result = podman.run_rootfs("runc", ["nvidia.com/gpu=2"], rootfs("debian"), ["nvidia-smi", "-L"])
    assert listed_uuids(result.stdout) == [simulated_host.gpus[2]], explain(result)
