"""The generated specification beside the one that NVIDIA's generator was recorded to write for such a machine.

Every difference that is intended stands in the tables below with its reason; anything else fails.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.machine import LIBRARIES, MACHINE, read_recorded

from ocigpu.cdi.generate import generate
from ocigpu.cdi.hook_words import CreateSymlinks, UpdateLdCache, parse_hook
from ocigpu.cdi.write import dump_yaml
from ocigpu.core.settings import Settings
from ocigpu.gpus.offer import GenerateOptions
from ocigpu.sim.create import create_host
from ocigpu.sim.made import remove_host
from ocigpu.system.settings_file import read_settings

pytestmark = pytest.mark.root  # a simulated host with real device nodes

RECORDED_FILE = Path(__file__).parents[1] / "recorded/vendor-cdi-8gpu.yaml"
RECORDED: dict[str, Any] = yaml.safe_load(read_recorded(RECORDED_FILE))
VERSION = "550.163.01"
FLAT = "hook mode puts every library into one directory, which the loader's cache has; here it is the same one"
NOT_HERE = "the simulated host does not have it, or has it elsewhere"
COMPAT32 = "the capability compat32: the vendor's generator has no 32-bit libraries at all"
SONAME = "the loader looks for it; the vendor's generator makes the link only where the host has one"
SETTINGS_TOOL = "a library of nvidia-settings, which containers do not get"

ONLY_RECORDED = {
    f"link libvdpau_nvidia.so.{VERSION}::{LIBRARIES}/vdpau/libvdpau_nvidia.so.1": FLAT,
    f"mount {LIBRARIES}/vdpau/libvdpau_nvidia.so.{VERSION}": FLAT,
    f"folder {LIBRARIES}/vdpau": FLAT,
    f"link libnvidia-ml.so.1::{LIBRARIES}/libnvidia-ml.so": "for linking programs; hook mode has none either",
    f"mount {LIBRARIES}/libnvidia-gtk3.so.{VERSION}": SETTINGS_TOOL,
    f"mount {LIBRARIES}/libnvidia-wayland-client.so.{VERSION}": SETTINGS_TOOL,
}
ONLY_OURS = {
    f"link libvdpau_nvidia.so.{VERSION}::{LIBRARIES}/libvdpau_nvidia.so.1": FLAT,
    f"mount {LIBRARIES}/libvdpau_nvidia.so.{VERSION}": FLAT,
    f"link libnvidia-egl-gbm.so.1.1.1::{LIBRARIES}/libnvidia-egl-gbm.so.1": SONAME,
    f"link libnvidia-egl-wayland.so.1.1.13::{LIBRARIES}/libnvidia-egl-wayland.so.1": SONAME,
    **({"folder /usr/lib/i386-linux-gnu": COMPAT32} if MACHINE == "x86_64" else {}),
}
MOVED = {
    "/etc/vulkan/icd.d/nvidia_icd.json": NOT_HERE,
    "/etc/vulkan/implicit_layer.d/nvidia_layers.json": NOT_HERE,
}
"""Files that the recorded machine had at another place."""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("vendor") / "host"
    create_host(str(directory), gpus=8, model="a100", driver_version=VERSION, dri=False)
    yield directory
    remove_host(str(directory))


@pytest.fixture(scope="module")
def settings(host: Path) -> Settings:
    return read_settings(str(host / "config.toml"))


def made_with(settings: Settings, **options: Any) -> dict[str, Any]:
    return generate(GenerateOptions(**options), settings).spec


@pytest.fixture(scope="module")
def separate(settings: Settings) -> dict[str, Any]:
    """The specification for the vendor's hook program: an entry for each hook, as recorded."""
    return made_with(settings, hook_path="/usr/bin/nvidia-cdi-hook")


@pytest.fixture(scope="module")
def merged(settings: Settings) -> dict[str, Any]:
    return made_with(settings, hook_path="/usr/bin/ocigpu-hook")


def commands(spec: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for entry in spec["containerEdits"]["hooks"]:
        words = entry["args"][1:]
        words = words[2:] if words[0] == "--config" else words
        call = parse_hook(words)
        assert not call.unknown
        found += call.commands
    return found


def parts(spec: dict[str, Any]) -> set[str]:
    """What every container gets, each part as a line."""
    common = spec["containerEdits"]
    lines = {f"variable {item}" for item in common["env"]}
    lines |= {f"node {node['path']} {node['fileMode']:o}" for node in common["deviceNodes"]}
    lines |= {f"mount {mount['containerPath']}" for mount in common["mounts"]}
    for command in commands(spec):
        if isinstance(command, CreateSymlinks):
            lines |= {f"link {target}::{path}" for target, path in command.links}
        elif isinstance(command, UpdateLdCache):
            lines |= {f"folder {folder}" for folder in command.folders}
    return lines


def is_32_bit(line: str) -> bool:
    return "/usr/lib/i386-linux-gnu/" in line and line.startswith(("mount", "link"))


@pytest.mark.parametrize("form", ["merged", "separate"])
def test_every_container_gets_what_was_recorded(form: str, request: pytest.FixtureRequest) -> None:
    ours, recorded = parts(request.getfixturevalue(form)), parts(RECORDED)
    assert recorded - ours == set(ONLY_RECORDED)
    assert {line for line in ours - recorded if not is_32_bit(line)} == set(ONLY_OURS)


def test_every_mount_has_the_recorded_source_and_options(separate: dict[str, Any], host: Path) -> None:
    recorded = {mount["containerPath"]: mount for mount in RECORDED["containerEdits"]["mounts"]}
    ours = {mount["containerPath"]: mount for mount in separate["containerEdits"]["mounts"]}
    for path in recorded.keys() & ours.keys():
        assert set(ours[path]["options"]) == set(recorded[path]["options"]), path
        if path not in MOVED:
            assert ours[path]["hostPath"].removeprefix(str(host)) == recorded[path]["hostPath"], path
    order = [path for path in ours if path in recorded]
    assert order == [path for path in recorded if path in ours]  # by depth, then by name


def test_devices_have_the_recorded_names_and_nodes(separate: dict[str, Any]) -> None:
    def nodes(spec: dict[str, Any]) -> dict[str, list[tuple[str, int]]]:
        devices = {}
        for device in spec["devices"]:
            listed = [(node["path"], node["fileMode"]) for node in device["containerEdits"]["deviceNodes"]]
            is_uuid = device["name"].startswith("GPU-")  # of this GPU: every host has its own
            devices[f"uuid of {listed[0][0]}" if is_uuid else device["name"]] = listed
            assert list(device["containerEdits"]) == ["deviceNodes"]
        return devices

    assert nodes(separate) == nodes(RECORDED)
    assert [device["name"] for device in separate["devices"]] == sorted(d["name"] for d in separate["devices"])


def test_nodes_differ_from_the_recorded_in_numbers_access_and_host_path_only(
    separate: dict[str, Any], host: Path
) -> None:
    """The engine reads the numbers from the host's node, and no container has to make nodes ("m")."""

    def every_node(spec: dict[str, Any]) -> list[dict[str, Any]]:
        of_devices = [node for device in spec["devices"] for node in device["containerEdits"]["deviceNodes"]]
        return [*spec["containerEdits"]["deviceNodes"], *of_devices]

    fields = {name for node in every_node(RECORDED) for name in node}
    assert fields == {"path", "major", "minor", "fileMode", "permissions"}
    for node in every_node(separate):
        assert node == {
            "path": node["path"],
            "hostPath": f"{host}{node['path']}",
            "fileMode": 0o666,
            "permissions": "rw",
        }


def test_separate_hooks_are_the_recorded_ones_in_the_recorded_order(separate: dict[str, Any]) -> None:
    """Links of graphics and of the driver are one hook instead of two: each is a process."""

    def shape(spec: dict[str, Any]) -> list[tuple[Any, ...]]:
        hooks = spec["containerEdits"]["hooks"]
        return [(hook["hookName"], hook["path"], *hook["args"][:2], *hook["env"]) for hook in hooks]

    assert shape(separate) == shape(RECORDED)[1:]
    words = {hook["args"][1]: hook["args"][2:] for hook in separate["containerEdits"]["hooks"]}
    recorded = {hook["args"][1]: hook["args"][2:] for hook in RECORDED["containerEdits"]["hooks"]}
    for name in ("enable-cuda-compat", "disable-device-node-modification", "update-application-profile"):
        assert words[name] == recorded[name]


def test_with_our_hook_all_hooks_are_one_process(merged: dict[str, Any], host: Path) -> None:
    (hook,) = merged["containerEdits"]["hooks"]
    assert (hook["hookName"], hook["path"]) == ("createContainer", "/usr/bin/ocigpu-hook")
    assert hook["args"][:3] == ["ocigpu-hook", "--config", f"{host}/config.toml"]
    assert [type(command).__name__ for command in commands(merged)] == [
        "CreateSymlinks",
        "EnableCudaCompat",
        "UpdateLdCache",
        "DisableDeviceNodeModification",
        "UpdateApplicationProfile",
    ]


def test_kind_is_the_recorded_one_and_the_version_is_newer_for_the_fingerprint(separate: dict[str, Any]) -> None:
    assert (RECORDED["kind"], RECORDED["cdiVersion"]) == (separate["kind"], "0.5.0")
    assert (separate["cdiVersion"], list(separate["annotations"])) == ("0.6.0", ["ocigpu/fingerprint"])


def test_without_the_fingerprint_the_version_is_the_recorded_one(settings: Settings) -> None:
    spec = made_with(settings, max_version="0.5.0")
    assert spec["cdiVersion"] == RECORDED["cdiVersion"]
    assert "annotations" not in spec


def test_the_recorded_specification_is_written_byte_for_byte_as_it_was() -> None:
    assert dump_yaml(RECORDED) == read_recorded(RECORDED_FILE)
