"""What a hostile image tries to get out of the hooks of CDI specifications, in real containers."""

import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from support import machine
from support.bundle import LIBRARIES
from support.fixtures import MakeBundle
from support.machine import MACHINE
from support.process import Completed, explain
from support.product import PROGRAMS
from support.runtimes import container_id, run_container

from ocigpu.system import libc

pytestmark = [pytest.mark.root, pytest.mark.engine]

RUNTIMES = pytest.mark.parametrize("low_level", ["runc", "crun"])
DIRECTORY = f"/{LIBRARIES}"
MASKED = ["/proc/timer_list", "/proc/keys"]
"""Files of the kernel that a container finds hidden once it runs, but not yet while its hooks run."""


def make(
    make_bundle: MakeBundle, arguments: list[str], *calls: list[str], layout: str = "busybox", **linux: Any
) -> Path:
    """Make a bundle with a process of the hook for each call."""

    def edit(config: dict[str, Any]) -> None:
        hook = {"path": str(PROGRAMS / "ocigpu-hook"), "env": ["LC_ALL=C.UTF-8"]}
        config["hooks"] = {"createContainer": [{**hook, "args": ["ocigpu-hook", *words]} for words in calls]}
        config["linux"].update(linux)

    return make_bundle(arguments, layout=layout, edit=edit)


def start(bundle: Path, low_level: str, env: dict[str, str]) -> Completed:
    cgroup = "v2" if low_level == "crun" else ""
    variables = {name: value for name, value in env.items() if low_level == "crun" or name != "LD_PRELOAD"}
    return run_container([low_level], bundle, container_id(), env=variables, cgroup=cgroup)


@RUNTIMES
@pytest.mark.parametrize("source", ["/proc/iomem", "/proc/timer_list", "/etc/secret"])
def test_no_text_that_only_root_of_the_host_can_read_is_copied_into_the_container(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], low_level: str, source: str
) -> None:
    path = f"/etc/ld-musl-{MACHINE}.path"
    look = ["sh", "-c", f"[ -L {path} ] && echo link"]
    bundle = make(make_bundle, look, ["update-ldcache", "--folder", "/opt/lib"], layout="alpine-like")
    file = bundle / f"rootfs{path}"
    file.symlink_to(source)
    secret = bundle / "rootfs/etc/secret"
    secret.write_text("of another user of the image\n")
    secret.chmod(0o600)
    result = start(bundle, low_level, runtime_environment)
    assert result.stdout == "link\n", explain(result)
    assert file.is_symlink()


@RUNTIMES
@pytest.mark.parametrize("source", MASKED)
def test_a_link_does_not_bring_back_what_the_runtime_hides(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], low_level: str, source: str
) -> None:
    link = f"../libnvidia-allocator.so.1::{DIRECTORY}/gbm/nvidia-drm_gbm.so"
    look = ["cat", f"{DIRECTORY}/gbm/nvidia-drm_gbm.so"]
    bundle = make(make_bundle, look, ["create-symlinks", "--link", link], maskedPaths=MASKED)
    libraries = bundle / "rootfs" / LIBRARIES
    (libraries / "gbm").mkdir(parents=True)
    (libraries / "gbm/nvidia-drm_gbm.so").write_text("the image's own")
    (libraries / "libnvidia-allocator.so.1").symlink_to(source)
    before = machine.tree(bundle / "rootfs")
    result = start(bundle, low_level, runtime_environment)
    assert result.stdout == "the image's own", explain(result)  # the optional link is left out
    assert result.returncode == 0
    assert machine.tree(bundle / "rootfs") == before


@RUNTIMES
def test_hooks_of_two_specifications_both_count(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], low_level: str
) -> None:
    look = ["sh", "-c", "ldconfig -p | grep -c /opt; cat /etc/ld.so.conf.d/*"]
    calls = [["update-ldcache", "--folder", f"/opt/{name}"] for name in ("one", "two")]
    bundle = make(make_bundle, look, *calls, layout="glibc")
    libraries = bundle / "rootfs" / LIBRARIES
    for name in ("one", "two"):
        directory = bundle / f"rootfs/opt/{name}"
        directory.mkdir(parents=True)
        (directory / f"lib{name}.so.1").write_bytes((libraries / "libm.so.6").read_bytes())
    for _ in range(2):
        result = start(bundle, low_level, runtime_environment)
        assert result.stdout == "2\n/opt/one\n/opt/two\n", explain(result)


@pytest.mark.rest
@RUNTIMES
def test_a_container_that_exchanges_names_on_a_shared_volume_gets_nothing_of_the_host(
    make_bundle: MakeBundle,
    runtime_environment: dict[str, str],
    work_directory: Path,
    low_level: str,
    share: Callable[..., list[int]],
) -> None:
    """/etc and the library directory are on the volume; each is exchanged with a link that leads out of the root."""
    marker = work_directory / "marker"
    for name in ("ld.so.conf.d", "gbm"):
        (marker / name).mkdir(parents=True)
    for name in ("ld.so.conf", "ld.so.cache", "libx.so.1", "libx.so", "debian_version", "gbm/y.so"):
        (marker / name).write_text("the host's")
        (marker / name).chmod(0o600)
    words = [
        "create-symlinks",
        "--link",
        f"libx.so.1::{DIRECTORY}/libx.so",
        "--link",
        f"../libx.so::{DIRECTORY}/gbm/y.so",
    ]
    words += ["+", "update-ldcache", "--folder", "/opt/lib", "+", "chmod", "--mode", "777", "--path", "/etc/ld.so.conf"]
    words += ["--path", f"{DIRECTORY}/gbm"]
    bundle = make(make_bundle, ["sh", "-c", f"cat /etc/ld.so.conf {DIRECTORY}/gbm/y.so"], words, layout="debian")
    volume = bundle / "rootfs/volume"
    pairs = []
    for name, place in (("etc", "etc"), ("lib", LIBRARIES)):
        path = bundle / "rootfs" / place
        (volume / f"{name}.link").parent.mkdir(exist_ok=True)
        path.rename(volume / name)
        path.symlink_to(f"/volume/{name}")
        (volume / f"{name}.link").symlink_to("../" * 12 + str(marker).lstrip("/"))
        pairs.append((volume / name, volume / f"{name}.link"))
    (volume / "lib/gbm").mkdir()
    for name in ("libx.so.1", "gbm/y.so"):
        (volume / "lib" / name).write_text("the image's")
    before = machine.tree(marker)
    neighbour = os.fork()
    if neighbour == 0:
        exchange(pairs)
    try:
        results = [start(bundle, low_level, runtime_environment) for _ in share(range(25), 3, 0)]
    finally:
        os.kill(neighbour, signal.SIGKILL)
        os.waitpid(neighbour, 0)
    assert machine.tree(marker) == before
    assert machine.mounts_below(str(bundle)) == []
    for result in results:
        assert "the host's" not in result.stdout
        assert "Traceback" not in result.stderr
        assert "INT-1" not in result.stderr


def exchange(pairs: list[tuple[Path, Path]]) -> NoReturn:
    """Exchange the names of each pair for ever (renameat2(2), RENAME_EXCHANGE)."""
    names = [(os.fsencode(one), os.fsencode(other)) for one, other in pairs]
    renameat2 = ctypes.CDLL(None).renameat2
    while True:
        for one, other in names:
            renameat2(libc.AT_FDCWD, one, libc.AT_FDCWD, other, 2)
