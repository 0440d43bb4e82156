"""What a hostile image tries to get out of the hooks of CDI specifications, in real containers."""

from pathlib import Path
from typing import Any

import pytest
from support import machine
from support.bundle import LIBRARIES
from support.fixtures import MakeBundle
from support.process import Completed, explain
from support.product import PROGRAMS
from support.runtimes import container_id, run_container

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
    path = "/etc/ld-musl-x86_64.path"
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
    assert result.stdout == "", explain(result)
    assert result.returncode != 0
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
