"""Two containers on one root directory, as enroot's ranks and ``podman run --rootfs`` have it.

One is given its GPUs and fails at a late step; the other one started meanwhile and runs.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.bundle import base_config, write_bundle
from support.fixtures import MakeBundle
from support.machine import TRIPLET
from support.process import explain, run
from support.product import PROGRAMS, RUNTIME, SimulatedHost
from support.runtimes import container_id, set_cgroup, start_in_background, view_of

sys.path.insert(0, str(Path(__file__).parents[1] / "provision"))

from provision_lab import Lab, run_child

from ocigpu.core.actions import AllowDevice, Plan
from ocigpu.core.errors import OcigpuError
from ocigpu.gpus.cached import read_facts
from ocigpu.gpus.nvidia.plan import make_plan
from ocigpu.gpus.vendors import parse_request
from ocigpu.provision import apply, operations
from ocigpu.provision.image import read_rootfs_facts
from ocigpu.system.settings_file import read_settings

pytestmark = [pytest.mark.root, pytest.mark.engine]

ALL = {"NVIDIA_VISIBLE_DEVICES": "all"}


def plan_for(host: SimulatedHost, rootfs: Path) -> Plan:
    settings = read_settings(str(host.settings))
    facts = read_facts(settings)
    request = parse_request({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}}, settings)
    plan = make_plan(facts, request, settings, read_rootfs_facts(str(rootfs), facts.driver_version))
    return Plan(tuple(action for action in plan.actions if not isinstance(action, AllowDevice)))


def provision_and_fail(lab: Lab, plan: Plan, how: str, ready_fd: int, go_fd: int) -> str:
    """Give the laboratory's container everything; at the last step say so, wait, and fail; return the code."""

    def fail(*_: Any) -> None:
        os.write(ready_fd, b"r")
        os.read(go_fd, 1)
        if how == "raise":
            raise OSError(5, "failed on purpose")
        os.kill(os.getppid() if how == "kill parent" else os.getpid(), signal.SIGKILL)

    def work() -> str:
        kind = type(plan.actions[-1])
        operations.OPERATIONS[kind] = operations.OPERATIONS[kind]._replace(do=fail)
        try:
            apply.provision(plan, lab.pid, str(lab.rootfs), {}, read_settings())
        except OcigpuError as error:
            return error.code
        return ""

    return run_child(work, keep=ready_fd) or "killed"


def driver_mounts(pid: int) -> list[str]:
    """Return the mounts of the simulated driver in the namespace of a process."""
    lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    return sorted(line.split(" ")[4] for line in lines if "nvidia" in line or "libcuda" in line)


def links(rootfs: Path) -> dict[str, str]:
    directory = rootfs / f"usr/lib/{TRIPLET}"
    return {path.name: os.readlink(path) for path in directory.iterdir() if path.is_symlink() and "so" in path.name}


@contextmanager
def other_container(
    way: str, host: SimulatedHost, environment: dict[str, str], bundle: Path
) -> Iterator[Callable[[], int]]:
    """Yield what starts a container with all GPUs, in a mode or by the vendor's CLI, and returns its process."""
    env = host.environment(environment, "runc")
    command: list[Any] = [RUNTIME, "--root", bundle.with_name("state")]
    if way in ("hook", "spec"):
        env = host.in_mode(environment, bundle.with_name(f"{way}.toml"), way)
    else:
        command[0] = "runc"
    name = container_id()
    view = view_of("v2")

    def start() -> int:
        created = start_in_background([*view, *command], ["create"], bundle, name, env)
        assert created.returncode == 0, explain(created)
        pid: int = json.loads(run([*view, *command, "state", name], env=env).stdout)["pid"]
        if way == "configure":
            words = ["configure", "--no-cgroups", "--device=all", "--compute", "--utility", f"--pid={pid}"]
            run([PROGRAMS / "ocigpu-container-cli", *words, bundle / "rootfs"], env=env)
        run([*view, *command, "start", name], env=env)
        return pid

    try:
        yield start
    finally:
        run([*view, *command, "delete", "--force", name], env=env, check=False)


@pytest.mark.parametrize("how", ["raise", "kill", pytest.param("kill parent", marks=pytest.mark.rest)])
@pytest.mark.parametrize("way", ["hook", "spec", "configure"])
def test_a_start_that_fails_takes_nothing_from_another_container(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    way: str,
    how: str,
) -> None:
    bundle = make_bundle(["/probe", "pause"], ALL if way != "configure" else {})
    rootfs = bundle / "rootfs"
    plan = plan_for(simulated_host, rootfs)
    with other_container(way, simulated_host, runtime_environment, bundle) as start, Lab(rootfs) as lab:
        ready, ready_fd = os.pipe()
        go_fd, go = os.pipe()
        failing = os.fork()
        if failing == 0:
            code = provision_and_fail(lab, plan, how, ready_fd, go_fd)
            os._exit(0 if code else 1)
        os.close(ready_fd)
        assert os.read(ready, 1) == b"r"
        pid = start()
        before, linked = driver_mounts(pid), links(rootfs)
        assert len(before) > 20
        os.write(go, b"g")
        assert os.read(ready, 1) == b""  # every process of the failed start has ended
        assert os.waitpid(failing, 0)[1] == 0
        assert driver_mounts(pid) == before
        assert links(rootfs) == linked
        assert linked["libcuda.so.1"].startswith("libcuda.so.")
        left = [line for line in lab.mounts() if "nvidia" in line]
        assert left == []
        for fd in (ready, go_fd, go):
            os.close(fd)


def test_a_failed_start_is_not_in_the_way_of_the_next(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str], work_directory: Path
) -> None:
    bundle = make_bundle(["/probe", "pause"], ALL)
    plan = plan_for(simulated_host, bundle / "rootfs")
    ready, ready_fd = os.pipe()
    go_fd, go = os.pipe()
    os.write(go, b"g")
    with Lab(bundle / "rootfs") as lab:
        assert run_child(lambda: provision_and_fail(lab, plan, "raise", ready_fd, go_fd)) == "OCIGPU-LD-1"
    fresh = write_bundle(work_directory / "fresh", base_config(["/probe", "pause"], ALL), bundle / "rootfs")
    set_cgroup(fresh, container_id())
    with other_container("hook", simulated_host, runtime_environment, fresh) as start:
        assert len(driver_mounts(start())) > 20
    for fd in (ready, ready_fd, go_fd, go):
        os.close(fd)
