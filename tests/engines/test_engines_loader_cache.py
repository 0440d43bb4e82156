"""``loader-cache = "auto"``: merged where the image's cache is current, the host's ldconfig for every other image."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.bundle import LIBRARIES as MULTIARCH
from support.bundle import base_config, write_bundle
from support.process import explain, run
from support.product import LIBRARIES, PROGRAMS, RUNTIME, SimulatedHost
from support.runtimes import container_id, parts, run_container, script, set_cgroup

from ocigpu.gpus.libraries.loader_cache import FOOTER
from ocigpu.provision.image import read_rootfs_facts

pytestmark = [pytest.mark.root, pytest.mark.engine]

RUNTIMES = pytest.mark.parametrize("runtime", ["runc", "crun"])
OWN = "libown.so.1"
ALL = {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_DRIVER_CAPABILITIES": "all"}
LOOK = script(["ldconfig", "-p"], ["/dlopen", *LIBRARIES, "libm.so.6", OWN])


@pytest.fixture(scope="module")
def own_library(session_directory: Path) -> Path:
    path = session_directory / OWN
    run(["gcc", "-shared", "-nostdlib", "-x", "c", "/dev/null", f"-Wl,-soname,{OWN}", "-o", path])
    return path


@pytest.fixture(scope="module")
def image(session_directory: Path, rootfs: Callable[[str], Path], own_library: Path) -> Path:
    """An image with a library of its own in a directory that ld.so.conf names, and a cache that knows it."""
    path = session_directory / "image-with-own"
    shutil.copytree(rootfs("glibc"), path, symlinks=True)
    (path / "opt/own").mkdir(parents=True)
    shutil.copy(own_library, path / "opt/own")
    (path / "etc/ld.so.conf.d").mkdir(exist_ok=True)
    (path / "etc/ld.so.conf").write_text("include /etc/ld.so.conf.d/*.conf\n")
    (path / "etc/ld.so.conf.d/own.conf").write_text(f"# of this image\n/opt/own\n/usr/local/lib\n/{MULTIARCH}\n")
    run(["ldconfig", "-r", path])
    return path


class Starts:
    """Starts containers in mode hook on one simulated host."""

    def __init__(self, host: SimulatedHost, environment: dict[str, str], directory: Path) -> None:
        self.host, self.base, self.directory = host, environment, directory

    def environment(self, loader_cache: str, low_level: str = "runc") -> dict[str, str]:
        path = self.directory / f"settings-{loader_cache}.toml"
        line = f'loader-cache = "{loader_cache}"' if loader_cache else ""
        return self.host.in_mode(self.base, path, "hook", line, runtime=low_level)

    def bundle(self, image: Path, edit: Callable[[dict[str, Any]], None] | None = None) -> Path:
        config = base_config(LOOK, ALL)
        if edit:
            edit(config)
        return write_bundle(self.directory / container_id(), config, image)

    def run(self, bundle: Path, loader_cache: str = "", low_level: str = "runc") -> tuple[list[str], list[str]]:
        """Return what ldconfig -p prints in the container, without its first line, and what was loaded."""
        name = container_id()
        set_cgroup(bundle, name)
        done = run_container([RUNTIME], bundle, name, env=self.environment(loader_cache, low_level), cgroup="v2")
        assert done.returncode == 0, explain(done)
        listing, loaded = parts(done.stdout)
        return [line.strip() for line in listing.splitlines()[1:] if " => " in line], loaded.splitlines()

    def plan(self, bundle: Path) -> str:
        done = run([PROGRAMS / "ocigpu", "plan", "--bundle", bundle, "--steps"], env=self.environment(""))
        return " ".join(done.stdout.split())


@pytest.fixture
def starts(simulated_host: SimulatedHost, runtime_environment: dict[str, str], work_directory: Path) -> Starts:
    return Starts(simulated_host, runtime_environment, work_directory)


def is_merged(bundle: Path) -> bool:
    return FOOTER in (bundle / "rootfs/etc/ld.so.cache").read_bytes()


FOUND = [f"dlopen {name} ok" for name in (*LIBRARIES, "libm.so.6", OWN)]


def plain(entries: list[str]) -> list[str]:
    """Return entries with one name for /lib and /usr/lib, each once: ldconfig also uses that of the driver's."""
    return sorted({line.replace("=> /usr/lib/", "=> /lib/") for line in entries})


@RUNTIMES
def test_a_current_cache_is_merged_and_says_what_ldconfig_would(starts: Starts, image: Path, runtime: str) -> None:
    first, second = starts.bundle(image), starts.bundle(image)
    assert "the image's is extended: it is current" in starts.plan(first)
    merged, loaded = starts.run(first, "", runtime)
    assert loaded == FOUND
    assert is_merged(first)
    written, loaded = starts.run(second, "ldconfig", runtime)
    assert loaded == FOUND
    assert not is_merged(second)
    assert plain(merged) == plain(written)


def add_library(root: Path, own_library: Path) -> None:
    (root / "opt/own" / OWN).unlink()
    run(["ldconfig", "-r", root])
    shutil.copy(own_library, root / "opt/own")
    after = (root / "etc/ld.so.cache").stat().st_mtime_ns + 1  # the clock of file systems has ticks
    os.utime(root / "opt/own", ns=(after, after))


def no_cache(root: Path, _: Path) -> None:
    (root / "etc/ld.so.cache").unlink()


def other_format(root: Path, _: Path) -> None:
    (root / "etc/ld.so.cache").write_bytes(b"no cache")


def link(root: Path, _: Path) -> None:
    (root / "etc/ld.so.cache").rename(root / "etc/cache")
    (root / "etc/ld.so.cache").symlink_to("cache")


def other_include(root: Path, _: Path) -> None:
    (root / "etc/ld.so.conf").write_text("include /etc/ld.so.conf.d/own.conf\n")
    os.utime(root / "etc/ld.so.conf", (0, 0))


def malformed(root: Path, _: Path) -> None:
    """Of the known format as far as its header goes: only merging shows that it cannot be merged."""
    path = root / "etc/ld.so.cache"
    path.write_bytes(path.read_bytes()[:60])


@RUNTIMES
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (add_library, 'ldconfig writes it: "/opt/own" is newer than /etc/ld.so.cache'),
        (no_cache, "ldconfig writes it: the image has no file /etc/ld.so.cache"),
        (other_format, "ldconfig writes it: /etc/ld.so.cache has another format, or over 8 MiB"),
        (link, "ldconfig writes it: the image has no file /etc/ld.so.cache"),
        (other_include, 'has the line "include /etc/ld.so.conf.d/own.conf"'),
        (malformed, "the image's is extended: it is current"),
    ],
)
def test_ldconfig_writes_every_other_cache(
    starts: Starts,
    image: Path,
    own_library: Path,
    runtime: str,
    change: Callable[[Path, Path], None],
    reason: str,
) -> None:
    bundle = starts.bundle(image)
    change(bundle / "rootfs", own_library)
    assert reason in starts.plan(bundle)
    entries, loaded = starts.run(bundle, "", runtime)
    assert not is_merged(bundle)
    assert loaded == FOUND
    assert any(line.startswith(f"{OWN} ") for line in entries)
    assert any(line.startswith("libcuda.so.1 ") for line in entries)
    assert "; ldconfig writes it: " in starts.plan(bundle), "the next start decides the same"
    assert starts.run(bundle, "", runtime) == (entries, loaded)
    assert not is_merged(bundle)


def test_libraries_of_a_volume_are_found(starts: Starts, image: Path, own_library: Path, work_directory: Path) -> None:
    """A cache that is current says nothing of what is mounted over the image."""
    volume = work_directory / "volume"
    volume.mkdir()
    shutil.copy(own_library, volume)

    def edit(config: dict[str, Any]) -> None:
        mount = {"destination": "/usr/local/lib", "type": "bind", "source": str(volume), "options": ["bind", "ro"]}
        config["mounts"].append(mount)

    bundle = starts.bundle(image, edit)
    shutil.rmtree(bundle / "rootfs/opt/own")
    (bundle / "rootfs/opt/own").mkdir()
    run(["ldconfig", "-r", bundle / "rootfs"])
    assert 'a mount on "/usr/local/lib" may have libraries' in starts.plan(bundle)
    entries, loaded = starts.run(bundle)
    assert loaded == FOUND
    assert any(line.startswith(f"{OWN} ") and line.endswith(f"/usr/local/lib/{OWN}") for line in entries)


@RUNTIMES
def test_a_container_that_starts_again_gets_the_same(starts: Starts, image: Path, runtime: str) -> None:
    """Mount points and links of ours change the times of the image's directories."""
    bundle = starts.bundle(image)
    seen = []
    for _ in range(3):
        seen.append(starts.run(bundle, "", runtime))
        assert is_merged(bundle)
        assert read_rootfs_facts(str(bundle / "rootfs"), "1.1", []).stale_cache == ""
    assert seen[0] == seen[1] == seen[2]
