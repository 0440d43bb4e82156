"""What one container costs, in numbers that no machine changes: processes, files opened, mounts.  No times."""

import itertools
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support import requirements
from support.bundle import base_config, write_bundle
from support.process import explain, run, wait_for
from support.product import PROGRAMS, STUBS, PublicCopy, SimulatedHost, write_stub
from support.runtimes import container_id, run_container, set_cgroup, start_in_background
from support.trace import Program, life, trace

from ocigpu.cdi.cache import SETTLED_NS

pytestmark = [pytest.mark.root, pytest.mark.engine]

ALL = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
"""Eight GPUs."""
OPENED = {"hook": 69, "spec": 90, "cdi": 195}
"""Files and directories that a warm shim opens by mode, without what an empty interpreter opens.

All our modules are in one of them (ocigpu/entry/image.py), which is opened twice.  In mode cdi the directories of all
links and mounts are looked at.  One is the bundle, where a killed start may have left its draft of config.json; in mode
spec the loader's cache is opened to be looked at first, and then to be read.  Each directory in which something is made
is asked for its mount (/proc/self/fdinfo), and in mode cdi the way of each mount is gone as the runtime goes it.
"""
MOUNTS = {"hook": 30, "spec": 23, "cdi": 63}
"""Mounts that a container with all GPUs has by mode, beyond those of one without; /proc/driver is the simulation's."""


class Lives:
    """Lets containers of one image live on a simulated host of eight GPUs, in any mode, with all caches filled."""

    def __init__(
        self, host: SimulatedHost, environment: dict[str, str], image: Path, directory: Path, runtime: Path
    ) -> None:
        self.host, self.image, self.directory, self.runtime = host, image, directory, runtime
        self.state = directory / "state"
        self.base = host.environment(environment, "runc")
        self._numbers = itertools.count()
        self.specification = directory / "specs/nvidia.json"
        self.specification.parent.mkdir()
        command = [PROGRAMS / "ocigpu", "cdi", "generate", "--quiet", "--config", self.host.settings]
        command += ["--nvidia-cdi-hook-path", self.runtime.with_name("ocigpu-hook")]
        run([*command, "--output", self.specification])
        text = Path(self.base["OCIGPU_CONFIG"]).read_text()
        self._settings = directory / "settings"  # all at once: nothing is kept while this directory changes
        self._settings.mkdir()
        for mode in (*OPENED, "ldconfig"):
            path = self._settings / f"{mode}.toml"
            name = 'hook"\nloader-cache = "ldconfig' if mode == "ldconfig" else mode
            path.write_text(f'mode = "{name}"\ncdi.spec-dirs = ["{self.specification.parent}"]\n{text}')
            path.chmod(0o644)

    def environment(self, mode: str) -> dict[str, str]:
        """Return the environment of a mode; mode cdi has a specification that was generated for the host."""
        return {**self.base, "OCIGPU_CONFIG": str(self._settings / f"{mode}.toml")}

    def bundle(self, arguments: list[str], variables: dict[str, str]) -> Path:
        bundle = write_bundle(
            self.directory / f"bundle{next(self._numbers)}", base_config(arguments, variables), self.image
        )
        set_cgroup(bundle, container_id())
        return bundle

    def fill_caches(self, mode: str) -> dict[str, str]:
        """Start containers until all is kept that can be; returns the environment."""
        environment = self.environment(mode)
        kept = self.host.directory / "run/ocigpu"

        def settled() -> bool:  # what was written a moment ago is read, but nothing of it is kept
            return time.time_ns() - self._settings.stat().st_ctime_ns > SETTLED_NS

        def filled() -> bool:
            run(life(self.runtime, self.state, self.bundle(["/bin/true"], ALL), container_id()), env=environment)
            passed = counted(trace([self.runtime, "--version"], environment)) == {"shim": 1}
            return passed and (mode == "cdi" or any(kept.glob("facts-*")))

        wait_for("settings and specification to be of some age", settled)
        wait_for("what starts keep for the next ones", filled)
        return environment

    def traced(self, mode: str, variables: dict[str, str]) -> list[Program]:
        """Return what was started for one container: create, start, delete."""
        environment = self.fill_caches(mode)
        bundle = self.bundle(["/bin/true"], variables)
        return trace(life(self.runtime, self.state, bundle, container_id()), environment)


@pytest.fixture(scope="module")
def image(session_directory: Path, rootfs: Callable[[str], Path]) -> Path:
    """A Debian-like image whose loader cache is up to date, as distributions ship it."""
    path = session_directory / "image-of-counts"
    shutil.copytree(rootfs("glibc"), path, symlinks=True)
    run(["ldconfig", "-r", path])
    return path


@pytest.fixture(scope="module", params=["compiled"])
def lives(
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    image: Path,
    session_directory: Path,
    public_copy: PublicCopy,
    request: pytest.FixtureRequest,
) -> Lives:
    """By default with the compiled stubs."""
    requirements.require(requirements.programs("runc", "strace"))
    directory = session_directory / f"counts-{request.param}"
    programs = directory / "bin"
    programs.mkdir(parents=True)
    for name in ("ocigpu-runtime", "ocigpu-hook"):
        write_stub(programs / name, request.param, library=public_copy.library, site=public_copy.library)
    return Lives(simulated_host, runtime_environment, image, directory, programs / "ocigpu-runtime")


WITH_BOTH = pytest.mark.parametrize("lives", STUBS, indirect=True)


def counted(programs: list[Program]) -> dict[str, int]:
    """Return how many of our processes there were, by kind."""
    return dict(Counter(program.kind for program in programs if program.kind))


def listed(programs: list[Program]) -> str:
    return "\n".join(map(str, programs))


PROCESSES = {
    "nothing asked for": ("hook", {}, {"shim": 3}),
    "hook": ("hook", ALL, {"shim": 3, "python": 1, "hook": 1, "fork of python": 2}),
    "hook, ldconfig": ("ldconfig", ALL, {"shim": 3, "python": 1, "hook": 1, "fork of python": 3, "ldconfig": 1}),
    "spec": ("spec", ALL, {"shim": 3, "python": 1}),
    "cdi": ("cdi", ALL, {"shim": 3, "python": 1}),
}
"""Mode, variables, and what starts in create, start and delete: a stub for each; one of sh has grep read the bundle."""


@WITH_BOTH
@pytest.mark.parametrize(("mode", "variables", "expected"), PROCESSES.values(), ids=PROCESSES)
def test_a_container_starts_this_many_processes_of_ours(
    lives: Lives, mode: str, variables: dict[str, str], expected: dict[str, int]
) -> None:
    programs: list[Program] = []
    expected = {**expected, **({"grep": 1} if lives.runtime.read_bytes().startswith(b"#!") else {})}

    def started() -> bool:
        programs[:] = lives.traced(mode, variables)
        return counted(programs) == expected

    # one start is enough: on a busy machine the hook may come too late for what was prepared (early.MAX_AGE)
    wait_for("a start with as many processes", started, on_failure=lambda: listed(programs))


@WITH_BOTH
def test_commands_other_than_create_become_the_runtime_without_another_process(lives: Lives) -> None:
    environment = lives.fill_caches("hook")
    name = container_id()
    bundle = lives.bundle(["/probe", "pause"], ALL)
    command = [lives.runtime, "--root", lives.state]
    created = start_in_background(command, ["create"], bundle, name, environment)
    try:
        assert created.returncode == 0, explain(created)
        for words in (["state", name], ["start", name], ["kill", name, "KILL"], ["delete", "--force", name]):
            programs = trace([*command, *words], environment)
            shim, low_level = programs[:2]
            assert counted(programs) == {"shim": 1}, f"{words[0]}\n{listed(programs)}"
            assert (shim.pid, os.path.basename(low_level.path)) == (low_level.pid, "runc"), listed(programs)
            assert not {"clone", "clone3", "fork", "vfork"} & set(shim.calls), f"{words[0]}: {shim.calls}"
    finally:
        run([*command, "delete", "--force", name], env=environment, check=False)


@pytest.mark.parametrize("mode", OPENED)
def test_a_warm_shim_opens_at_most_this_many_files(lives: Lives, mode: str) -> None:
    (empty,) = trace([os.path.realpath(sys.executable), "-I", "-S", "-c", "pass"], lives.base)
    opened: list[str] = []

    def warm() -> bool:  # facts of a host that was made a moment ago are read once more
        shim = next(program for program in lives.traced(mode, ALL) if program.kind == "python")
        opened[:] = (Counter(shim.opened) - Counter(empty.opened)).elements()
        return len(opened) <= OPENED[mode]

    wait_for("a shim that opens no more", warm, on_failure=lambda: f"{len(opened)} opened:\n" + "\n".join(opened))


def test_the_mount_table_of_a_container_is_read_once_for_all_its_nodes(lives: Lives) -> None:
    """And once for each mount that something is mounted on: the container's root and its /proc."""
    programs = lives.traced("hook", ALL)
    read = [program.opened.count("mountinfo") for program in programs if program.kind == "fork of python"]
    assert max(read) == 3, listed(programs)


@pytest.mark.parametrize("mode", MOUNTS)
def test_a_container_with_all_gpus_has_this_many_mounts_more(lives: Lives, mode: str) -> None:
    environment = lives.environment(mode)
    found = []
    for variables in ({}, ALL):
        bundle = lives.bundle(["cat", "/proc/self/mountinfo"], variables)
        done = run_container([lives.runtime], bundle, container_id(), env=environment)
        assert done.returncode == 0, explain(done)
        found.append([line.split()[4] for line in done.stdout.splitlines()])
    without, with_all = found
    more = list((Counter(with_all) - Counter(without)).elements())
    assert len(more) == MOUNTS[mode], f"{len(more)} mounts more:\n" + "\n".join(more)
