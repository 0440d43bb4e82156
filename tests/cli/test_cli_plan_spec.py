"""``ocigpu plan`` with mode spec: its own plan, and whether a bundle's container would be left to the hook."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.asking import request_from_variables
from support.bundle import base_config
from support.fixtures import Run
from support.machine import LOADER

from ocigpu.bundle.declared import edit_declared
from ocigpu.bundle.from_plan import declare
from ocigpu.core.facts import HostFacts, ImageFacts
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.plan import make_plan

Record = Callable[[HostFacts], str]


@pytest.fixture
def spec(tmp_path: Path) -> tuple[str, str]:
    path = tmp_path / "config.toml"
    path.write_text('mode = "spec"\n')
    path.chmod(0o644)
    return "--config", str(path)


def write(tmp_path: Path, config: dict[str, Any], rootfs: bool = True) -> Path:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    if rootfs:
        for name in ("etc", "usr/lib64"):
            (bundle / "rootfs" / name).mkdir(parents=True)
        (bundle / "rootfs/usr/lib64" / LOADER).touch()
    (bundle / "config.json").write_text(json.dumps(config))
    return bundle


def one_gpu() -> dict[str, Any]:
    return base_config(["true"], {"NVIDIA_VISIBLE_DEVICES": "5"})


def test_the_plan_of_variables_is_that_of_mode_spec(
    run: Run, record: Record, facts: HostFacts, spec: tuple[str, str]
) -> None:
    status, out, err = run("plan", *spec, "--facts", record(facts), "--gpus", "5")
    assert (status, err) == (0, "")
    assert "mode          spec" in out.splitlines()
    lines = [line.split(maxsplit=4) for line in out.splitlines()]
    assert ["-", "7", "masks", "/proc/driver/nvidia/gpus/0000:01:00.0"] in [line[:4] for line in lines]
    assert "GPU 0, 1, 2, 3, 4, 6, 7 is not granted" in out
    assert not any(line[1:3] == ["tmpfs", "/proc/driver/nvidia"] for line in lines)
    data = json.loads(run("plan", *spec, "--facts", record(facts), "--gpus", "5", "--json")[1])
    assert (data["mode"], data["why_hook"]) == ("spec", "")
    assert {action["action"] for action in data["actions"]} >= {"mask", "read-only", "node", "bind", "link"}


@pytest.mark.parametrize("rootfs", [True, False], ids=["rootfs there", "rootfs not mounted yet"])
def test_a_bundle_that_needs_no_hook_is_left_alone(
    run: Run, record: Record, facts: HostFacts, spec: tuple[str, str], tmp_path: Path, rootfs: bool
) -> None:
    bundle = write(tmp_path, one_gpu(), rootfs)
    before = sorted((path, path.lstat().st_mtime_ns) for path in bundle.rglob("*"))
    status, out, err = run("plan", *spec, "--facts", record(facts), "--bundle", bundle)
    assert (status, err) == (0, "")
    assert "mode          spec" in out.splitlines()
    assert sorted((path, path.lstat().st_mtime_ns) for path in bundle.rglob("*")) == before


def volume(config: dict[str, Any], rootfs: Path) -> None:
    config["mounts"].append({"destination": "/etc", "type": "bind", "source": "/x", "options": ["rbind"]})


def privileged(config: dict[str, Any], rootfs: Path) -> None:
    config["linux"]["resources"]["devices"] = [{"allow": True, "access": "rwm"}]


def file_in_the_way(config: dict[str, Any], rootfs: Path) -> None:
    (rootfs / "usr/lib64/libcuda.so.1").write_text("x")


def odd_cache(config: dict[str, Any], rootfs: Path) -> None:
    (rootfs / "etc/ld.so.cache").write_text("x")


def linked_cache(config: dict[str, Any], rootfs: Path) -> None:
    (rootfs / "etc/ld.so.cache").symlink_to("/etc/passwd")


def not_a_directory(config: dict[str, Any], rootfs: Path) -> None:
    (rootfs / "etc").rmdir()
    (rootfs / "etc").write_text("x")


def of_other_users(config: dict[str, Any], rootfs: Path) -> None:
    config["linux"]["namespaces"].append({"type": "user"})
    for name in ("uidMappings", "gidMappings"):
        config["linux"][name] = [{"containerID": 0, "hostID": 100000, "size": 65536}]


def of_half_a_mapping(config: dict[str, Any], rootfs: Path) -> None:
    """What has no containerID maps nobody, as for the groups of device nodes."""
    of_other_users(config, rootfs)
    for name in ("uidMappings", "gidMappings"):
        config["linux"][name] = [{"hostID": 0, "size": 1 << 31}]


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (of_half_a_mapping, "root of its user namespace may not make "),
        (of_other_users, "root of its user namespace may not make "),
        (volume, "/etc/ld.so.cache is in or below what is mounted on /etc"),
        (privileged, "it may make and open nodes of GPUs that are not granted"),
        (file_in_the_way, "the image has something other than a link at /usr/lib64/libcuda.so.1"),
        (odd_cache, "/etc/ld.so.cache of the image cannot be extended"),
        (linked_cache, "/etc/ld.so.cache of the image is not a regular file"),
        (not_a_directory, "Not a directory"),
    ],
)
def test_a_bundle_that_needs_the_hook_gets_its_plan_and_the_reason(
    run: Run,
    record: Record,
    facts: HostFacts,
    spec: tuple[str, str],
    tmp_path: Path,
    edit: Callable[[dict[str, Any], Path], None],
    why: str,
) -> None:
    config = one_gpu()
    bundle = write(tmp_path, config)
    edit(config, bundle / "rootfs")
    (bundle / "config.json").write_text(json.dumps(config))
    status, out, err = run("plan", *spec, "--facts", record(facts), "--bundle", bundle)
    assert (status, err) == (0, "")
    (line,) = [line for line in out.splitlines() if line.startswith("mode ")]
    assert line.startswith("mode          hook, not spec: ")
    assert why in line
    assert any(line.split()[:3] == ["~", "tmpfs", "/proc/driver/nvidia"] for line in out.splitlines())
    data = json.loads(run("plan", *spec, "--facts", record(facts), "--bundle", bundle, "--json")[1])
    assert data["mode"] == "hook"
    assert why in data["why_hook"]


def test_what_an_earlier_start_has_declared_is_no_reason(
    run: Run, record: Record, facts: HostFacts, spec: tuple[str, str], tmp_path: Path
) -> None:
    request = request_from_variables({"NVIDIA_VISIBLE_DEVICES": "all"}, Settings())
    declared = declare(make_plan(facts, request, Settings(), ImageFacts(), "spec"), facts)
    config = copy.deepcopy(one_gpu())
    edit_declared(config, declared, "/rootfs", [], True, False)
    bundle = write(tmp_path, config)
    data = json.loads(run("plan", *spec, "--facts", record(facts), "--bundle", bundle, "--json")[1])
    assert (data["mode"], data["why_hook"]) == ("spec", "")


def test_other_modes_plan_for_the_hook(run: Run, record: Record, facts: HostFacts, tmp_path: Path) -> None:
    bundle = write(tmp_path, one_gpu())
    data = json.loads(run("plan", "--facts", record(facts), "--bundle", bundle, "--json")[1])
    assert data["mode"] == "hook"
    assert data["why_hook"] == ""
