"""What starts that were killed have left half written is gone after the next start; what others write just now is not.

A full disk or a killed cgroup leaves no process that could remove its own draft.
"""

import os
from pathlib import Path

import pytest
from support.fixtures import MakeBundle
from support.process import explain
from support.product import RUNTIME, SimulatedHost
from support.runtimes import container_id, run_container

from ocigpu.system import files

pytestmark = [pytest.mark.root, pytest.mark.engine]

GONE = 1 << 22
"""Above the greatest number that a process can have: proc(5), pid_max."""


def draft_of(pid: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name that the product gives to a draft of this process."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid)
        return files.draft_name()


def plant(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).write_text("half of")


@pytest.mark.parametrize("runtime", ["runc", "crun"])
@pytest.mark.parametrize("mode", ["hook", "spec"])
def test_drafts_of_the_dead_are_gone_and_those_of_the_living_stay(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    work_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    runtime: str,
) -> None:
    env = simulated_host.in_mode(runtime_environment, work_directory / "config.toml", mode, runtime=runtime)
    bundle = make_bundle(["/bin/true"], {"NVIDIA_VISIBLE_DEVICES": "0"})
    etc = bundle / "rootfs/etc"
    dead, living = draft_of(GONE, monkeypatch), draft_of(os.getpid(), monkeypatch)
    link = draft_of(GONE, monkeypatch)
    for directory in (bundle, etc):
        plant(directory, dead, living)
        (directory / link).symlink_to("nowhere")
    plant(etc, "ld.so.cache~")
    result = run_container([RUNTIME], bundle, container_id(), env=env, cgroup="v2")
    assert result.returncode == 0, explain(result)
    for directory in (bundle, etc):
        assert [path.name for path in directory.iterdir() if path.name.startswith(files.DRAFT)] == [living]
        assert (directory / living).read_text() == "half of"
    assert not (etc / "ld.so.cache~").exists()


def test_a_start_without_gpus_touches_nothing(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle = make_bundle(["/bin/true"], {})
    dead = draft_of(GONE, monkeypatch)
    plant(bundle, dead)
    plant(bundle / "rootfs/etc", dead, "ld.so.cache~")
    result = run_container(
        [RUNTIME], bundle, container_id(), env=simulated_host.environment(runtime_environment, "runc")
    )
    assert result.returncode == 0, explain(result)
    assert (bundle / dead).exists()
    assert (bundle / "rootfs/etc" / dead).exists()
    assert (bundle / "rootfs/etc/ld.so.cache~").exists()
