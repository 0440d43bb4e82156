"""Volumes of real Podman with its defaults, and links of the image that lead into them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support import machine, requirements
from support.bundle import LIBRARIES
from support.podman import Podman, make_podman
from support.process import explain, run
from support.product import PROGRAMS, RUNTIME, SimulatedHost

pytestmark = [pytest.mark.root, pytest.mark.engine]

WRAPPER = '#!/bin/sh\n{preload}OCIGPU_CONFIG={settings} exec {runtime} "$@"\n'
USER = ("--user=1000:1000", "--cap-drop=ALL", "--security-opt=no-new-privileges")
LOOK = ["sh", "-c", "ls /dev; echo started"]


@pytest.fixture(scope="module")
def podman(session_directory: Path, runtime_environment: dict[str, str]) -> Podman:
    return make_podman(session_directory / "podman-v", runtime_environment.get("LD_PRELOAD", ""))


@pytest.fixture
def start(
    podman: Podman,
    simulated_host: SimulatedHost,
    rootfs: Callable[[str], Path],
    runtime_environment: dict[str, str],
    work_directory: Path,
) -> Callable[..., str]:
    """Call with mode, runtime, the place that is a link into the volume, and options; returns what was said."""
    specs = work_directory / "specs"
    run([PROGRAMS / "ocigpu", "cdi", "generate", "--quiet", "--config", simulated_host.settings, "--output",
         specs / "nvidia.json"])  # fmt: skip

    def call(mode: str, low_level: str, place: str, *options: str) -> str:
        settings, shim, image = (work_directory / name for name in ("s.toml", "shim", "image"))
        named = f'mode = "{mode}"\ncdi.spec-dirs = ["{specs}"]\nruntime.runtimes = ["{podman.directory / low_level}"]\n'
        settings.write_text(named + simulated_host.settings.read_text())
        settings.chmod(0o644)
        shim.write_text(WRAPPER.format(preload="", settings=settings, runtime=RUNTIME))
        shim.chmod(0o755)
        run(["cp", "-a", rootfs("glibc"), image])
        (image / "vol").mkdir()
        if place:
            directory = image / place
            if directory.exists():
                directory.rename(image / "moved")
            directory.symlink_to("/vol")
        try:
            result = podman.run_rootfs(str(shim), [], image, LOOK, "--env=NVIDIA_VISIBLE_DEVICES=0", *options)
        finally:
            run(["rm", "-rf", image])
        assert "Traceback" not in result.stderr, explain(result)
        return result.stdout + result.stderr

    return call


@pytest.mark.parametrize("low_level", ["runc", "crun"])
@pytest.mark.parametrize("mode", ["hook", "spec", "cdi"])
@pytest.mark.parametrize("place", ["etc", LIBRARIES, "usr/sbin"])
def test_nothing_is_made_in_a_volume_of_podmans(
    start: Callable[..., str], work_directory: Path, mode: str, low_level: str, place: str
) -> None:
    """A user without any right has the host's /etc, say, as a volume: what he may not write nobody writes for him."""
    volume = work_directory / "volume"
    volume.mkdir(mode=0o755)
    for name in ("ld.so.cache", "ld.so.conf", "libcuda.so.1"):
        (volume / name).write_text("of the host")
    before = machine.tree(volume)
    said = start(mode, low_level, place, *USER, f"--volume={volume}:/vol")
    for name in ("hosts", "hostname", "resolv.conf"):  # made by the runtime, to mount Podman's files on
        if (volume / name).exists() and not (volume / name).stat().st_size:
            (volume / name).unlink()
    assert machine.tree(volume) == before, said
    assert ("started" in said) is (place != LIBRARIES), said


@pytest.mark.parametrize("mode", ["hook", "spec", "cdi"])
def test_what_podman_itself_mounts_is_no_hindrance(start: Callable[..., str], mode: str) -> None:
    """/etc/hosts and the like are files of the host, /run is a tmpfs of the container."""
    said = start(mode, "crun", "", "--tmpfs=/run", "--network=none")
    assert "nvidia0" in said, said
    assert "left out" not in said, said


@pytest.mark.parametrize("mode", ["hook", "spec", "cdi"])
def test_nothing_is_made_in_a_tmpfs_of_the_host(start: Callable[..., str], work_directory: Path, mode: str) -> None:
    """Kubernetes has such volumes (emptyDir with medium Memory): a tmpfs as a whole, but not the container's own."""
    requirements.require(requirements.root())
    volume = work_directory / "memory"
    volume.mkdir()
    run(["mount", "-t", "tmpfs", "-o", "mode=755", "ocigpu-test", volume])
    try:
        said = start(mode, "runc", "", f"--volume={volume}:/{LIBRARIES}/driver", f"--volume={volume}:/usr/bin/other")
        assert "started" in said, said
        said = start(mode, "runc", "", f"--volume={volume}:/run/nvidia-persistenced")
        assert os.listdir(volume) == [], said
    finally:
        run(["umount", volume])
