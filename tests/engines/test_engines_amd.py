"""Containers with AMD's GPUs, in each mode: their nodes open, by root and by users of their groups, and no others."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.fixtures import MakeBundle
from support.process import Completed, explain, run
from support.product import PROGRAMS, RUNTIME, SimulatedHost
from support.runtimes import answers, container_id, probe, run_container

from ocigpu.sim.create import create_host

pytestmark = [pytest.mark.root, pytest.mark.engine]

MODES = pytest.mark.parametrize("mode", ["hook", "spec", "cdi"])
VARIABLE = "AMD_VISIBLE_DEVICES"


@pytest.fixture(scope="module")
def amd_host(session_directory: Path) -> SimulatedHost:
    directory = session_directory / "host-amd"
    create_host(str(directory), gpus=4, model="mi300x")
    marker = json.loads((directory / ".ocigpu-sim.json").read_text())
    return SimulatedHost(directory, tuple(gpu["uuid"] for gpu in marker["gpus"]), ())


class AmdContainers:
    """Runs containers on the host, in a mode."""

    def __init__(self, host: SimulatedHost, base: dict[str, str], make: MakeBundle, directory: Path) -> None:
        self.host, self.base, self.make, self.directory = host, base, make, directory
        self.cards = sorted(path.name for path in (host.directory / "dev/dri").glob("card*"))
        self.renders = sorted(path.name for path in (host.directory / "dev/dri").glob("renderD*"))

    def environment(self, mode: str, low_level: str = "runc", more: str = "") -> dict[str, str]:
        settings, specs = self.directory / "config.toml", f'cdi.spec-dirs = ["{self.directory}/specs"]'
        environment = self.host.in_mode(self.base, settings, mode, specs, more, runtime=low_level)
        if mode == "cdi":
            (self.directory / "specs").mkdir(exist_ok=True)
            command = [PROGRAMS / "ocigpu", "cdi", "generate", "--quiet", "--vendor", "amd", "--config", settings]
            run([*command, "--output", self.directory / "specs/amd.json"])
        return environment

    def run(self, env: dict[str, str], devices: str, user: int = 0, words: list[str] | None = None) -> Completed:
        def as_user(config: dict[str, Any]) -> None:
            config["process"]["user"] = {"uid": user, "gid": user}

        paths = ["/dev/kfd", *(f"/dev/dri/{name}" for name in (*self.cards, *self.renders))]
        bundle = self.make(words or probe(["open", *paths]), {VARIABLE: devices}, edit=as_user)
        return run_container([RUNTIME], bundle, container_id(), env=env, cgroup="v2")

    def opened(self, env: dict[str, str], devices: str, user: int = 0) -> dict[str, str]:
        done = self.run(env, devices, user)
        assert done.returncode == 0, explain(done)
        return {path: answer for (_, path), answer in answers(done.stdout).items()}

    def expected(self, *indices: int) -> dict[str, str]:
        """What opening says: ENXIO where it is allowed, since no driver is behind a node; nothing else is there."""
        names = {f"/dev/dri/{names[index]}" for index in indices for names in (self.cards, self.renders)}
        every = {f"/dev/dri/{name}" for name in (*self.cards, *self.renders)}
        kfd = {"/dev/kfd": "ENXIO" if indices else "ENOENT"}
        return kfd | {path: "ENXIO" if path in names else "ENOENT" for path in every}


@pytest.fixture
def amd(
    amd_host: SimulatedHost, runtime_environment: dict[str, str], make_bundle: MakeBundle, work_directory: Path
) -> AmdContainers:
    return AmdContainers(amd_host, runtime_environment, make_bundle, work_directory)


@pytest.mark.parametrize("low_level", ["runc", "crun"])
@MODES
def test_a_container_opens_what_it_asked_for_and_nothing_else(amd: AmdContainers, mode: str, low_level: str) -> None:
    environment = amd.environment(mode, low_level)
    assert amd.opened(environment, "1") == amd.expected(1)
    assert amd.opened(environment, "0-1,3") == amd.expected(0, 1, 3)


@MODES
def test_all_none_and_unique_ids(amd: AmdContainers, mode: str) -> None:
    environment = amd.environment(mode)
    assert amd.opened(environment, "all") == amd.expected(0, 1, 2, 3)
    assert amd.opened(environment, "none") == amd.expected()
    assert amd.opened(environment, amd.host.gpus[2].upper().replace("X", "x")) == amd.expected(2)


@MODES
def test_a_user_who_is_not_root_joins_the_groups(amd: AmdContainers, mode: str) -> None:
    assert amd.opened(amd.environment(mode), "2", user=1000) == amd.expected(2)


@MODES
def test_the_cgroup_denies_a_node_that_the_container_makes_itself(amd: AmdContainers, mode: str) -> None:
    minor = amd.cards[0].removeprefix("card")
    words = probe(["mknod", "/dev/other", "226", minor], ["open", "/dev/other"])
    done = amd.run(amd.environment(mode), "1", words=words)
    assert answers(done.stdout)["open", "/dev/other"] == "EPERM", explain(done)


@MODES
def test_a_gpu_that_is_not_there_stops_the_container(amd: AmdContainers, mode: str) -> None:
    done = amd.run(amd.environment(mode), "7")
    assert done.returncode != 0
    assert ("amd.com/gpu=7" if mode == "cdi" else 'no such device "7"') in done.stderr, explain(done)


def test_the_gate_applies_as_for_every_vendor(amd: AmdContainers) -> None:
    closed = "accept-nvidia-visible-devices-envvar-when-unprivileged = false"
    assert amd.opened(amd.environment("hook", more=closed), "all") == amd.expected()
