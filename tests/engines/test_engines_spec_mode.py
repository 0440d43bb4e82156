"""Mode ``spec``: the container is that of hook mode, and no process of ours runs for it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.bundle import base_config, write_bundle
from support.process import Completed, run
from support.product import RUNTIME, SimulatedHost, listed_uuids
from support.runtimes import container_id, run_container, set_cgroup
from support.survey import OWN_RUN, Seen, beyond, differences, finished, may_differ, survey

from ocigpu.gpus.libraries.loader_cache import FOOTER

pytestmark = [pytest.mark.root, pytest.mark.engine]

RUNTIMES = pytest.mark.parametrize("runtime", ["runc", "crun"])


@pytest.fixture(scope="module")
def image(session_directory: Path, rootfs: Callable[[str], Path]) -> Path:
    """A Debian-like image whose loader cache is up to date, as distributions ship it."""
    path = session_directory / "with-cache"
    shutil.copytree(rootfs("glibc"), path, symlinks=True)
    run(["ldconfig", "-r", path])
    return path


class Machine:
    """Starts containers of one image on one simulated host, in one mode after another."""

    def __init__(self, host: SimulatedHost, environment: dict[str, str], runtime: str, directory: Path) -> None:
        self.host, self.runtime, self.directory = host, runtime, directory
        self.environment = host.environment(environment, runtime)
        self.bundle = Path()

    def settings(self, mode: str) -> dict[str, str]:
        text = Path(self.environment["OCIGPU_CONFIG"]).read_text()
        path = self.directory / f"{mode}.toml"
        name = f'hook"\nloader-cache = "{mode}' if mode in ("ldconfig", "merge", "auto") else mode
        path.write_text(f'mode = "{name}"\n{text}')
        path.chmod(0o644)
        return {**self.environment, "OCIGPU_CONFIG": str(path)}

    def run(
        self,
        mode: str,
        image: Path,
        arguments: list[str],
        variables: dict[str, str],
        edit: Callable[[dict[str, Any]], None] | None = None,
    ) -> Completed:
        config = base_config(arguments, variables)
        if edit:
            edit(config)
        name = container_id()
        self.bundle = write_bundle(self.directory / name, config, image)
        set_cgroup(self.bundle, name)
        return run_container([RUNTIME], self.bundle, name, env=self.settings(mode), cgroup="v2", prefix=OWN_RUN)

    def edited(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.bundle / "config.json").read_text())
        return config

    def seen(self, mode: str, image: Path, variables: dict[str, str]) -> Seen:
        return finished(self.run(mode, image, survey(self.host), variables))


MakeMachine = Callable[[str], Machine]


@pytest.fixture
def machine(simulated_host: SimulatedHost, runtime_environment: dict[str, str], work_directory: Path) -> MakeMachine:
    return lambda runtime: Machine(simulated_host, runtime_environment, runtime, work_directory)


@pytest.fixture
def mig_machine(mig_host: SimulatedHost, runtime_environment: dict[str, str], work_directory: Path) -> MakeMachine:
    return lambda runtime: Machine(mig_host, runtime_environment, runtime, work_directory)


def asks(devices: str, capabilities: str = "all") -> dict[str, str]:
    return {"NVIDIA_VISIBLE_DEVICES": devices, "NVIDIA_DRIVER_CAPABILITIES": capabilities}


# --- the same from inside


def assert_same(machine: Machine, image: Path, devices: str, capabilities: str, mode: str = "spec") -> Seen:
    bare = machine.seen("hook", image, {})
    hook = beyond(machine.seen("ldconfig", image, asks(devices, capabilities)), bare)
    spec = beyond(machine.seen(mode, image, asks(devices, capabilities)), bare)
    assert ("ocigpu-hook" in json.dumps(machine.edited())) == (mode != "spec")
    found = differences(hook, spec)
    odd = {key: found[key] for key in found if not may_differ(key) or (mode != "spec" and "cache " not in key)}
    assert odd == {}, "\n".join(f"{key}: {values}" for key, values in odd.items())
    for key in found:
        if key.startswith("cache "):
            assert bare[key].removeprefix("/usr") == found[key][0].removeprefix("/usr")
            assert found[key][1] == "(none)"
    assert {spec[key] for key in spec if key.startswith("library")} <= {"ok"}
    return spec


@pytest.mark.rest
@RUNTIMES
@pytest.mark.parametrize(("devices", "capabilities"), [("3", "all"), ("0,5", "compute,utility,compat32")])
@pytest.mark.parametrize("way", ["merge", "auto"])
def test_a_container_whose_loader_cache_was_merged_is_that_of_ldconfig(
    machine: MakeMachine, image: Path, runtime: str, devices: str, capabilities: str, way: str
) -> None:
    one = machine(runtime)
    seen = assert_same(one, image, devices, capabilities, way)
    assert any(key.startswith("cache libcuda.so.1 ") for key in seen)
    assert FOOTER in (one.bundle / "rootfs/etc/ld.so.cache").read_bytes(), "ldconfig has written it"


@pytest.mark.rest
@RUNTIMES
def test_ldconfig_writes_a_cache_that_cannot_be_merged(
    machine: MakeMachine, image: Path, runtime: str, work_directory: Path
) -> None:
    broken = work_directory / "broken"
    shutil.copytree(image, broken, symlinks=True)
    (broken / "etc/ld.so.cache").write_bytes(b"no cache")
    one = machine(runtime)
    assert_same(one, broken, "0", "all", "merge")
    assert FOOTER not in (one.bundle / "rootfs/etc/ld.so.cache").read_bytes()


def shown_gpus(seen: Seen) -> int:
    """Return of how many GPUs the container sees something in /proc/driver/nvidia."""
    return len([key for key in seen if key.startswith("content /proc/driver/nvidia/gpus/") and key.endswith("/power")])


@RUNTIMES
@pytest.mark.parametrize(
    ("devices", "capabilities", "number"), [("3", "all", 1), ("0,5", "compute,utility", 2), ("all", "all", 8)]
)
def test_a_container_of_mode_spec_is_that_of_hook_mode(
    machine: MakeMachine, image: Path, runtime: str, devices: str, capabilities: str, number: int
) -> None:
    seen = assert_same(machine(runtime), image, devices, capabilities)
    assert len(listed_uuids(seen["listing"])) == number
    assert shown_gpus(seen) == number


@pytest.mark.rest
@RUNTIMES
@pytest.mark.parametrize(("devices", "profile"), [("0:1", "1g.5gb"), ("0", "3g.20gb"), ("1", "")])
def test_mig_devices_of_mode_spec_are_those_of_hook_mode(
    mig_machine: MakeMachine, image: Path, runtime: str, devices: str, profile: str
) -> None:
    machine = mig_machine(runtime)
    seen = assert_same(machine, image, devices, "all")
    hook = machine.seen("hook", image, asks(devices))
    paths = [{key for key in one if key.startswith("content /proc/driver/nvidia/cap")} for one in (seen, hook)]
    assert paths[0] == paths[1]
    assert bool(paths[0]) == bool(profile)
