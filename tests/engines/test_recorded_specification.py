"""The recorded specification gives our containers what NVIDIA's runtime was recorded to give with it.

Recorded were mode cdi, with the file ``vendor-cdi-8gpu.yaml``, and the default mode, which makes the same edits for
each container.  Here the same file, told where the simulated host has its files, is applied by our shim; the hooks are
ours by the vendor's name.  Every difference that is intended is below with its reason.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from engines.test_recorded_facts import Seen, see
from support.product import PROGRAMS, write_stub

from ocigpu.sim.create import create_host
from ocigpu.sim.made import remove_host

pytestmark = [pytest.mark.root, pytest.mark.engine]

FILES = Path(__file__).parents[1] / "recorded"
RECORDED: dict[str, Any] = json.loads((FILES / "vendor-specification.json").read_text())
REQUESTS = {
    "host-8gpu-all-cdi": "all",
    "host-8gpu-all-auto": "all",
    "host-8gpu-idx0,2-auto": "0,2",
    "host-8gpu-void-auto": "void",
}
VERSION = "550.163.01"

# Intended differences

ELSEWHERE = "/usr/share/vulkan/", "/etc/vulkan/"
"""Where the recorded machine and the simulated host have these files; containers have them in the latter place."""
PARAMETERS = "/proc/driver/nvidia/params"
"""With hooks its content is compared; the shim leaves the file as it is: docs/decisions, mode spec hides."""
PROFILE = "/etc/nvidia/nvidia-application-profiles-rc.d"
"""A mount here, which leaves the image as it is; the vendor's hook writes a file into the image."""


class Machine(NamedTuple):
    """A simulated host, and settings by which the shim does the hooks' work itself, or leaves it to the hooks."""

    host: Path
    settings: dict[str, Path]


def write_specification(host: Path, directory: Path, program: Path) -> Path:
    """Write the recorded specification for a simulated host, and settings for it; returns these."""
    spec = yaml.safe_load((FILES / "vendor-cdi-8gpu.yaml").read_text())
    common = spec["containerEdits"]
    for item in (common, *(device["containerEdits"] for device in spec["devices"])):
        for mount in item.get("mounts", ()):
            mount["hostPath"] = str(host) + mount["hostPath"].replace(*ELSEWHERE)
        for node in item.get("deviceNodes", ()):
            node["hostPath"] = f"{host}{node['path']}"
    for hook in common["hooks"]:
        assert hook["path"] == "/usr/bin/nvidia-cdi-hook"
        hook["path"] = str(program)
        if hook["args"][1] == "disable-device-node-modification":
            hook["args"] += ["--driver-proc", f"{host}/proc/driver/nvidia", "--simulated"]
    (directory / "cdi").mkdir(parents=True)
    (directory / "cdi/nvidia.yaml").write_text(yaml.safe_dump(spec))
    settings = directory / "config.toml"
    text = (host / "config.toml").read_text()
    settings.write_text(f'mode = "cdi"\ncdi.spec-dirs = ["{directory}/cdi"]\n{text}')
    return settings


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    directory = tmp_path_factory.mktemp("recorded-specification")
    host = directory / "host"
    create_host(str(host), gpus=8, model="a100", driver_version=VERSION, dri=False)
    (directory / "nvidia-cdi-hook").symlink_to(PROGRAMS / "ocigpu-hook")
    other = directory / "bin/nvidia-cdi-hook"
    other.parent.mkdir()
    programs = {"shim": directory / "nvidia-cdi-hook", "hooks": write_stub(other, name="ocigpu-hook")}
    yield Machine(host, {way: write_specification(host, directory / way, path) for way, path in programs.items()})
    remove_host(str(host))


@pytest.mark.parametrize("way", ["shim", "hooks"])
@pytest.mark.parametrize("case", REQUESTS)
def test_the_recorded_specification_gives_what_was_recorded(
    machine: Machine, tmp_path: Path, case: str, way: str
) -> None:
    recorded = RECORDED[case]
    recorded = RECORDED[recorded] if isinstance(recorded, str) else recorded
    seen = see(machine.settings[way], tmp_path / "bundle", case, {"NVIDIA_VISIBLE_DEVICES": REQUESTS[case]})
    config = json.loads((tmp_path / "bundle/config.json").read_text())
    hooks = config.get("hooks", {}).get("createContainer", [])
    assert len(hooks) == (6 if way == "hooks" and recorded["nodes"] else 0)
    assert (seen.status == 0) == recorded["starts"], seen.errors
    assert set(recorded["environment"]) <= set(seen.environment)
    assert seen.nodes == recorded["nodes"]
    assert seen.opens == recorded["opens"]
    assert seen.rules == recorded["device_rules"]
    assert_same_files(seen, recorded)
    if recorded["nodes"]:
        params = recorded["params"] if way == "hooks" else ["ModifyDeviceFiles: 1"]
        assert [" ".join(seen.params.split())] == params


def assert_same_files(seen: Seen, recorded: dict[str, Any]) -> None:
    """Files are at the same places with the same options, and the loader finds the same, by the same links."""
    expected = {path: set(options.split(",")) for path, options in recorded["mounts"].items() if path != PARAMETERS}
    ours = {
        path: {option for option in options.split(",") if option not in ("relatime", "noatime")}
        for path, options in seen.mounts.items()
        if path not in ("/", "/dev", "/sys", "/proc") and not path.startswith(("/dev/", "/proc/", "/sys/"))
    }
    assert (PROFILE in ours) == bool(expected)
    assert {path: options for path, options in ours.items() if path != PROFILE} == expected
    assert set(recorded["ldcache"]) <= set(seen.ldcache)
    assert set(recorded["links"]) <= set(seen.links)
    shown = [path.rpartition("/")[2] for path in seen.proc if path.rpartition("/")[0].endswith("/nvidia/gpus")]
    assert set(shown) <= set(recorded["gpus"]) or not recorded["nodes"]
