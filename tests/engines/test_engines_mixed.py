"""Containers on a host with GPUs of two vendors: each gets those that it asked for, of one vendor or of both."""

import json
from pathlib import Path

import pytest
from support.fixtures import MakeBundle
from support.process import Completed, explain, run
from support.product import PROGRAMS, RUNTIME, SimulatedHost
from support.runtimes import answers, container_id, probe, run_container

from ocigpu.sim.create import create_host

pytestmark = [pytest.mark.root, pytest.mark.engine]

MODES = pytest.mark.parametrize("mode", ["hook", "spec", "cdi"])
RUNTIMES = pytest.mark.parametrize("low_level", ["runc", "crun"])


@pytest.fixture(scope="module")
def mixed_host(session_directory: Path) -> SimulatedHost:
    directory = session_directory / "host-mixed"
    create_host(str(directory), gpus=2, model=("mi300x", "h100"), compat32=False)
    marker = json.loads((directory / ".ocigpu-sim.json").read_text())
    return SimulatedHost(directory, tuple(gpu["uuid"] for gpu in marker["gpus"]), ())


class MixedContainers:
    """Runs containers on the host, in a mode."""

    def __init__(self, host: SimulatedHost, base: dict[str, str], make: MakeBundle, directory: Path) -> None:
        self.host, self.base, self.make, self.directory = host, base, make, directory
        cards = sorted(path.name for path in (host.directory / "dev/dri").glob("card*"))
        renders = sorted(path.name for path in (host.directory / "dev/dri").glob("renderD*"))
        self.nvidia = [("/dev/nvidia0",), ("/dev/nvidia1",)]
        self.amd = [
            (f"/dev/dri/{card}", f"/dev/dri/{render}") for card, render in zip(cards[2:], renders[2:], strict=True)
        ]

    def run(self, mode: str, low_level: str, user: int = 0, **env: str) -> Completed:
        settings, specs = self.directory / "config.toml", f'cdi.spec-dirs = ["{self.directory}/specs"]'
        environment = self.host.in_mode(self.base, settings, mode, specs, runtime=low_level)
        if mode == "cdi":
            (self.directory / "specs").mkdir(exist_ok=True)
            command = [PROGRAMS / "ocigpu", "cdi", "refresh", "--quiet", "--config", settings]
            run([*command, "--output", self.directory / "specs/all.json"])
        paths = ["/dev/nvidiactl", "/dev/kfd", *(path for gpu in (*self.nvidia, *self.amd) for path in gpu)]

        def as_user(config: dict[str, dict[str, dict[str, int]]]) -> None:
            config["process"]["user"] = {"uid": user, "gid": user}

        bundle = self.make(probe(["open", *paths]), env, edit=as_user)
        return run_container([RUNTIME], bundle, container_id(), env=environment, cgroup="v2")

    def opened(self, mode: str, low_level: str, user: int = 0, **env: str) -> set[str]:
        """Return what opens; everything else is not there at all."""
        done = self.run(mode, low_level, user, **env)
        assert done.returncode == 0, explain(done)
        said = {path: answer for (_, path), answer in answers(done.stdout).items()}
        assert set(said.values()) <= {"ENXIO", "ENOENT"}, said
        return {path for path, answer in said.items() if answer == "ENXIO"}


@pytest.fixture
def mixed(
    mixed_host: SimulatedHost, runtime_environment: dict[str, str], make_bundle: MakeBundle, work_directory: Path
) -> MixedContainers:
    return MixedContainers(mixed_host, runtime_environment, make_bundle, work_directory)


@RUNTIMES
@MODES
def test_a_container_gets_gpus_of_both_vendors(mixed: MixedContainers, mode: str, low_level: str) -> None:
    both = {"/dev/nvidiactl", "/dev/kfd", *mixed.nvidia[1], *mixed.amd[0]}
    assert mixed.opened(mode, low_level, NVIDIA_VISIBLE_DEVICES="1", AMD_VISIBLE_DEVICES="0") == both
    assert mixed.opened(mode, low_level, 1000, NVIDIA_VISIBLE_DEVICES="1", AMD_VISIBLE_DEVICES="0") == both


@pytest.mark.rest
@MODES
def test_of_one_vendor_it_gets_no_other(mixed: MixedContainers, mode: str) -> None:
    assert mixed.opened(mode, "runc", NVIDIA_VISIBLE_DEVICES="0") == {"/dev/nvidiactl", *mixed.nvidia[0]}
    assert mixed.opened(mode, "runc", AMD_VISIBLE_DEVICES="1") == {"/dev/kfd", *mixed.amd[1]}
    only = mixed.opened(mode, "runc", NVIDIA_VISIBLE_DEVICES="void", AMD_VISIBLE_DEVICES="all")
    assert only == {"/dev/kfd", *mixed.amd[0], *mixed.amd[1]}


@MODES
def test_what_one_vendor_cannot_give_stops_the_container(mixed: MixedContainers, mode: str) -> None:
    done = mixed.run(mode, "runc", NVIDIA_VISIBLE_DEVICES="0", AMD_VISIBLE_DEVICES="7")
    assert done.returncode != 0
    assert ("amd.com/gpu=7" if mode == "cdi" else 'no such device "7"') in done.stderr, explain(done)


@pytest.mark.rest
@MODES
@pytest.mark.parametrize("vendor", ["NVIDIA", "AMD"])
def test_a_vendor_without_a_driver_stops_only_what_asks_for_nothing_else(
    vendor: str,
    mode: str,
    session_directory: Path,
    runtime_environment: dict[str, str],
    make_bundle: MakeBundle,
    work_directory: Path,
) -> None:
    directory = session_directory / f"host-only-{vendor}-{mode}"
    create_host(str(directory), gpus=1, model=("h100" if vendor == "NVIDIA" else "mi300x",), compat32=False)
    host = SimulatedHost(directory, (), ())
    one = MixedContainers(host, runtime_environment, make_bundle, work_directory)
    variables = {"NVIDIA_VISIBLE_DEVICES": "0", "AMD_VISIBLE_DEVICES": "all"}
    needed = "/dev/nvidiactl" if vendor == "NVIDIA" else "/dev/kfd"
    assert needed in one.opened(mode, "runc", **variables)
    other = "AMD_VISIBLE_DEVICES" if vendor == "NVIDIA" else "NVIDIA_VISIBLE_DEVICES"
    asked = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    plan = run([PROGRAMS / "ocigpu", "plan", "--config", work_directory / "config.toml", *asked]).stdout
    assert f"{other}={variables[other]} ignored: no driver of" in plan
    assert one.run(mode, "runc", **{other: variables[other]}).returncode != 0


@pytest.mark.rest
def test_by_cdi_names_all_come_from_specifications(mixed: MixedContainers) -> None:
    mixed.run("cdi", "runc", NVIDIA_VISIBLE_DEVICES="0")  # writes them
    got = mixed.opened("spec", "runc", NVIDIA_VISIBLE_DEVICES="nvidia.com/gpu=0", AMD_VISIBLE_DEVICES="1")
    assert {*mixed.nvidia[0], *mixed.amd[1], "/dev/kfd"} <= got
    assert not got & {*mixed.nvidia[1], *mixed.amd[0]}
