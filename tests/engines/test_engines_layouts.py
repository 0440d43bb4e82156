"""Containers on hosts whose driver lies where real systems have it, in each mode: libraries, programs, isolation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.bundle import base_config, write_bundle
from support.layouts import LAYOUTS, LaidOut, find_layout
from support.process import run
from support.product import LIBRARIES, PROGRAMS, RUNTIME, listed_uuids
from support.runtimes import container_id, parts, run_container, script, set_cgroup

pytestmark = [pytest.mark.root, pytest.mark.engine]


def each_way() -> list[Any]:
    """Return every layout in every way, of which a choice of rows has one for each layout, in turn."""
    found = []
    for number, name in enumerate(LAYOUTS):
        ways = LAYOUTS[name]["ways"]
        for place, way in enumerate(ways):
            found.append(pytest.param(name, way, marks=[pytest.mark.rest] if place != number % len(ways) else []))
    return found


@pytest.mark.parametrize(("name", "way"), each_way())
def test_a_container_has_its_gpu_and_the_libraries(
    name: str,
    way: str,
    laid_out: LaidOut,
    rootfs: Callable[[str], Path],
    runtime_environment: dict[str, str],
    work_directory: Path,
) -> None:
    layout, host = find_layout(name), laid_out(name)
    settings = work_directory / "config.toml"
    mode = "" if "mode" in layout["settings"] else f'mode = "{way}"\n'
    specs = f'cdi.spec-dirs = ["{work_directory}/cdi"]\nruntime.runtimes = ["runc"]\n'
    settings.write_text(mode + host.settings.read_text() + specs)
    settings.chmod(0o644)
    if way == "cdi":
        generate = ["cdi", "generate", "--config", settings, "--output", work_directory / "cdi/nvidia.yaml"]
        run([PROGRAMS / "ocigpu", *generate])
    wanted = host.gpus[1] if layout["list"] else "all"
    icd = f"cat /etc/vulkan/icd.d/{layout['icd']} /usr/share/vulkan/icd.d/{layout['icd']} 2>/dev/null"
    vulkan = f"""/dlopen $({icd} | sed -n 's/.*"library_path": "\\(.*\\)".*/\\1/p' | head -n 1)"""
    look = script(["nvidia-smi", "-L"], ["/dlopen", *LIBRARIES], ["ls", "/dev"], ["sh", "-c", vulkan])
    config = base_config(look, {"NVIDIA_VISIBLE_DEVICES": wanted, "NVIDIA_DRIVER_CAPABILITIES": "all"})
    container = container_id()
    bundle = write_bundle(work_directory / container, config, rootfs("glibc"))
    set_cgroup(bundle, container)
    env = {**runtime_environment, "OCIGPU_CONFIG": str(settings)}
    done = run_container([RUNTIME], bundle, container, env=env)
    assert done.returncode == 0, done.stderr
    listing, opened, nodes, vulkan = parts(done.stdout)
    assert opened.splitlines() == [f"dlopen {library} ok" for library in LIBRARIES]
    if layout["list"]:
        assert listed_uuids(listing) == [host.gpus[1]]
        assert "libGLX_nvidia.so.0 ok" in vulkan, "the loader of Vulkan opens the library that its file names"
    for path in layout["nodes"]:
        assert path.removeprefix("/dev/") in nodes.split()


@pytest.mark.parametrize("name", ["bottlerocket", "cos", "nixos", "talos"])
def test_a_host_whose_files_cannot_be_written_gives_its_gpus(
    name: str,
    laid_out: LaidOut,
    rootfs: Callable[[str], Path],
    runtime_environment: dict[str, str],
    work_directory: Path,
) -> None:
    """Its root file system is mounted read-only, as on these systems; only /run is not."""
    host = laid_out(name)
    (host.directory / "run").mkdir(exist_ok=True)
    settings = work_directory / "config.toml"
    settings.write_text(host.settings.read_text() + 'runtime.runtimes = ["runc"]\n')
    settings.chmod(0o644)
    config = base_config(["nvidia-smi", "-L"], {"NVIDIA_VISIBLE_DEVICES": "all"})
    container = container_id()
    bundle = write_bundle(work_directory / container, config, rootfs("glibc"))
    set_cgroup(bundle, container)
    mounts = ["mount --bind $0 $0", "mount --bind $0/run $0/run", "mount -o remount,bind,ro $0"]
    prefix = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{" && ".join(mounts)} && exec "$@"']
    env = {**runtime_environment, "OCIGPU_CONFIG": str(settings)}
    done = run_container([RUNTIME], bundle, container, env=env, prefix=[*prefix, host.directory])
    assert done.returncode == 0, done.stderr
    assert listed_uuids(done.stdout) == list(host.gpus)
    assert "warning" not in done.stderr.lower()
