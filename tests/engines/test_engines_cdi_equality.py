"""One container in four ways on one host: hook mode, mode cdi, Podman by itself, and NVIDIA's own specification.

What the container has is looked at from inside.  Every difference that is intended stands in a table with its reason;
anything else fails.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from support.bundle import LIBRARIES as MULTIARCH
from support.bundle import base_config, write_bundle
from support.machine import LIBRARIES
from support.podman import Podman, make_podman
from support.process import run
from support.product import PROGRAMS, RUNTIME, SimulatedHost, listed_uuids
from support.runtimes import container_id, run_container, set_cgroup
from support.survey import OWN_RUN, Seen, beyond, differences, finished, may_differ, survey, without_directories

pytestmark = [pytest.mark.root, pytest.mark.engine]

RECORDED = Path(__file__).parents[1] / "recorded/vendor-cdi-8gpu.yaml"
RUNTIMES = pytest.mark.parametrize("runtime", ["runc", "crun"])


class Host(NamedTuple):
    """A simulated host, its specification in two versions, and Podman that reads the older one."""

    host: SimulatedHost
    cdi: Path
    podman: Podman
    environment: dict[str, str]


# --- the hosts and the ways


@pytest.fixture(scope="module")
def gpus(session_directory: Path, runtime_environment: dict[str, str], simulated_host: SimulatedHost) -> Host:
    return make_host(session_directory / "equal", runtime_environment, simulated_host)


@pytest.fixture(scope="module")
def mig(session_directory: Path, runtime_environment: dict[str, str], mig_host: SimulatedHost) -> Host:
    return make_host(session_directory / "equal-mig", runtime_environment, mig_host)


def make_host(directory: Path, environment: dict[str, str], host: SimulatedHost) -> Host:
    directory.mkdir()
    podman = make_podman(directory / "podman", environment.get("LD_PRELOAD", ""))
    (directory / "cdi").mkdir()
    generate = [PROGRAMS / "ocigpu", "cdi", "generate", "--config", host.settings, "--output"]
    run([*generate, directory / "cdi/nvidia.yaml"])
    run([*generate, podman.cdi / "nvidia.yaml", "--max-version", "0.5.0"])
    return Host(host, directory / "cdi", podman, environment)


@pytest.fixture(scope="module")
def image(session_directory: Path, rootfs: Callable[[str], Path]) -> Path:
    """A Debian-like image whose loader cache is up to date, as distributions ship it."""
    path = session_directory / "equal-image"
    shutil.copytree(rootfs("glibc"), path, symlinks=True)
    run(["ldconfig", "-r", path])
    return path


@pytest.fixture(scope="module")
def fedora_like(session_directory: Path, rootfs: Callable[[str], Path]) -> Iterator[Path]:
    """An image with its libraries in /usr/lib64, which its loader is told by ld.so.conf."""
    path = session_directory / "fedora-like"
    shutil.copytree(rootfs("glibc"), path, symlinks=True)
    (path / "etc/debian_version").unlink()
    for file in (path / MULTIARCH).iterdir():
        file.rename(path / "usr/lib64" / file.name)
    (path / MULTIARCH).rmdir()
    (path / "etc/ld.so.conf.d").mkdir()
    (path / "etc/ld.so.conf.d/machine.conf").write_text("/usr/lib64\n")
    (path / "etc/ld.so.conf").write_text("include ld.so.conf.d/*.conf\n")
    run(["ldconfig", "-r", path])
    return path


def settings_of(host: Host, runtime: str, specs: Path | None) -> dict[str, str]:
    """Return the environment of the shim: hook mode, or mode cdi with a directory of specifications.

    Hook mode runs ldconfig, as the hooks of specifications do; a merged cache is compared with that elsewhere
    (test_engines_spec_mode.py, test_engines_loader_cache.py).
    """
    path = (specs or host.cdi.parent) / f"{runtime}.toml"
    mode, line = ("cdi", f'cdi.spec-dirs = ["{specs}"]') if specs else ("hook", 'loader-cache = "ldconfig"')
    return host.host.in_mode(host.environment, path, mode, line, runtime=runtime)


_WITHOUT: dict[tuple[str, str, Path, Path], Seen] = {}
"""What containers without GPUs have: by way, runtime, image and host."""


class Ways(NamedTuple):
    """Starts containers of one image on one host with one low-level runtime."""

    host: Host
    runtime: str
    image: Path
    directory: Path

    def by_hook(self, names: str) -> Seen:
        """By the shim's hook mode."""
        return beyond(self._by_shim(names, None), self._without_gpus("shim"))

    def by_cdi(self, names: str, specs: Path | None = None) -> Seen:
        """By the shim's mode cdi."""
        return beyond(self._by_shim(names, specs or self.host.cdi), self._without_gpus("shim"))

    def by_podman(self, names: str) -> Seen:
        return beyond(self._by_podman(names), self._without_gpus("podman"))

    def _without_gpus(self, way: str) -> Seen:
        key = (way, self.runtime, self.image, self.host.cdi)
        if key not in _WITHOUT:
            _WITHOUT[key] = self._by_shim("", None) if way == "shim" else self._by_podman("")
        return _WITHOUT[key]

    def _by_shim(self, names: str, specs: Path | None) -> Seen:
        variables = {"NVIDIA_VISIBLE_DEVICES": names, "NVIDIA_DRIVER_CAPABILITIES": "all"} if names else {}
        config = base_config(survey(self.host.host), variables)
        name = container_id()
        bundle = write_bundle(self.directory / name, config, self.image)
        set_cgroup(bundle, name)
        env = settings_of(self.host, self.runtime, specs)
        return finished(run_container([RUNTIME], bundle, name, env=env, cgroup="v2", prefix=OWN_RUN))

    def _by_podman(self, names: str) -> Seen:
        devices = [f"nvidia.com/gpu={name}" for name in names.split(",") if name]
        return finished(self.host.podman.run_rootfs(self.runtime, devices, self.image, survey(self.host.host)))


# --- what must be the same

OWN_CONF = "/etc/ld.so.conf.d/00-ocigpu.conf"
CDI_ONLY = {
    f"file {OWN_CONF}": "the hook does not know whether the image's loader searches the specification's directories,"
    " which may be none of its own: a later ldconfig in the container has to find them"
}
"""What mode cdi leaves in a container and hook mode does not."""


def odd(one: Seen, other: Seen, by_hooks: bool = False) -> dict[str, tuple[str, str]]:
    """Return differences for which there is no reason: the shim carries out our hooks, for which no process runs."""
    found = differences(one, other)
    return {key: found[key] for key in found if by_hooks or not may_differ(key)}


def assert_same(ways: Ways, names: str, change: Callable[[Seen], Seen] = dict) -> Seen:
    """Compare the ways and return what hook mode gives; ``change`` is made to what both modes of the shim give."""
    hook, cdi, podman = ways.by_hook(names), ways.by_cdi(names), ways.by_podman(names)
    assert set(CDI_ONLY) <= set(cdi)
    assert odd(cdi, podman) == {}
    assert odd(change(hook), change({key: cdi[key] for key in cdi if key not in CDI_ONLY})) == {}
    assert odd(change(hook), change({key: podman[key] for key in podman if key not in CDI_ONLY}), by_hooks=True) == {}
    assert {cdi[key] for key in cdi if key.startswith("library")} == {"ok"}
    return hook


@RUNTIMES
@pytest.mark.parametrize("names", ["3", "0,5", "all"])
def test_gpus_are_the_same_in_every_way(
    gpus: Host, image: Path, work_directory: Path, runtime: str, names: str
) -> None:
    seen = assert_same(Ways(gpus, runtime, image, work_directory), names)
    indices = range(8) if names == "all" else map(int, names.split(","))
    assert listed_uuids(seen["listing"]) == [gpus.host.gpus[index] for index in indices]


@pytest.mark.rest
@RUNTIMES
def test_an_image_with_libraries_elsewhere_gets_the_same_in_every_way_but_for_the_directory(
    gpus: Host, fedora_like: Path, work_directory: Path, runtime: str
) -> None:
    """A specification names one directory, the host's; hook mode looks where the image has its libraries.

    The loader of the image is Debian's: what has no entry in its cache (only names in the files have one) it looks for
    in Debian's directory, not in /usr/lib64 as Fedora's own would.
    """

    def change(seen: Seen) -> Seen:
        return without_directories({key: seen[key] for key in seen if key != "library dlopen libGLX_indirect.so.0"})

    assert_same(Ways(gpus, runtime, fedora_like, work_directory), "0,5", change)


@pytest.mark.rest
@RUNTIMES
@pytest.mark.parametrize("names", ["0:1", "all"])
def test_mig_devices_are_the_same_in_every_way(
    mig: Host, image: Path, work_directory: Path, runtime: str, names: str
) -> None:
    seen = assert_same(Ways(mig, runtime, image, work_directory), names)
    assert mig.host.mig_devices[1][0] in seen["listing"]


# --- NVIDIA's own specification

SETTINGS_TOOL = "a library of nvidia-settings, which containers do not get"
VENDOR = {
    OWN_CONF: CDI_ONLY[f"file {OWN_CONF}"],
    "/i386-linux-gnu/": "NVIDIA's generator has no 32-bit libraries",
    "(libc6)": "as above, in the loader's cache",
    "libvdpau_nvidia.so": "in a directory of its own",
    "libnvidia-gtk3.so": SETTINGS_TOOL,
    "libnvidia-wayland-client.so": SETTINGS_TOOL,
    "/dev/dri": "the recorded machine had no DRM nodes",
    "/tmp/dri-": "as above",
    "/vulkan/": "at another place on the recorded machine, which the simulated host does not have",
    "cache libnvidia-ml.so (": "a link for linking programs, which hook mode has not",
    f"link {LIBRARIES}/libnvidia-ml.so": "as above",
}
"""Parts of keys in which a container by NVIDIA's specification differs, and why."""


@pytest.fixture(scope="module")
def vendor_specs(gpus: Host, session_directory: Path) -> Path:
    """A directory with the recorded specification, moved to the simulated host, with our program for its hooks."""
    directory = session_directory / "vendor"
    directory.mkdir()
    host = gpus.host.directory
    hook = directory / "nvidia-cdi-hook"
    hook.symlink_to(PROGRAMS / "ocigpu-hook")
    moved = directory / "moved"
    words = ["cdi", "transform", "root", "--from", "/", "--to", host, "--input", RECORDED, "--output", f"{moved}.yaml"]
    run([PROGRAMS / "ocigpu", *words])
    spec: dict[str, Any] = yaml.safe_load(moved.with_suffix(".yaml").read_text())
    moved.with_suffix(".yaml").unlink()
    common = spec["containerEdits"]
    common["mounts"] = [mount for mount in common["mounts"] if Path(mount["hostPath"]).exists()]
    for entry in common["hooks"]:
        assert entry["path"] == f"{host}/usr/bin/nvidia-cdi-hook"
        entry["path"] = str(hook)
        if "disable-device-node-modification" in entry["args"]:  # the machine of the tests has no driver
            entry["args"] += ["--driver-proc", f"{host}/proc/driver/nvidia", "--simulated"]
    (directory / "nvidia.json").write_text(json.dumps(spec))
    return directory


@RUNTIMES
def test_an_existing_specification_of_nvidias_gives_the_same_with_our_program_for_its_hooks(
    gpus: Host, vendor_specs: Path, image: Path, work_directory: Path, runtime: str
) -> None:
    ways = Ways(gpus, runtime, image, work_directory)
    found = differences(ways.by_hook("0,5"), ways.by_cdi("0,5", vendor_specs))
    unknown = {key: found[key] for key in found if not any(part in key for part in VENDOR) and not may_differ(key)}
    assert unknown == {}
    assert [part for part in VENDOR if not any(part in key for key in found)] == []
