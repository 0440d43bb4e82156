"""``ocigpu sim remove`` says what still refers to the host."""

import json
import shutil
from pathlib import Path

import pytest
from containers_lab import WAITING, container, ocigpu
from support.fixtures import MakeBundle
from support.product import SimulatedHost

from ocigpu.sim.create import create_host


@pytest.mark.root
@pytest.mark.engine
def test_containers_that_have_the_gpus_and_settings_that_name_the_host_are_named(
    make_bundle: MakeBundle,
    session_directory: Path,
    runtime_environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = session_directory / "host-removed"
    create_host(str(directory), gpus=1, model="l40s", compat32=False)
    (gpu,) = json.loads((directory / ".ocigpu-sim.json").read_text())["gpus"]
    host = SimulatedHost(directory, (gpu["uuid"],), ())
    settings = tmp_path / "config.toml"
    shutil.copy(directory / "config.toml", settings)
    monkeypatch.setenv("OCIGPU_CONFIG", str(settings))
    bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "all"}, layout="busybox")
    with container(bundle, runtime_environment, host=host) as made:
        monkeypatch.setattr("ocigpu.cli.containers.containers.places_of", lambda _: made.places)
        output = ocigpu("sim", "remove", str(directory))
    assert f"note: these containers had its GPUs, and lose them when they restart: {made.name}\n" in output
    assert f"note: {settings} still names it, so no container gets a GPU: rm {settings}\n" in output
    assert not directory.exists()


def test_of_a_host_that_nothing_refers_to_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "host"
    create_host(str(directory), gpus=1, model="l40s", compat32=False, nodes=False)
    monkeypatch.setenv("OCIGPU_CONFIG", str(directory / "config.toml"))
    assert ocigpu("sim", "remove", str(directory)) == f"removed {directory}\n"
