"""``ocigpu mig`` beside containers: what one of them has is not destroyed."""

import json
from pathlib import Path

import pytest
from containers_lab import WAITING, container, ocigpu
from support.fixtures import MakeBundle
from support.product import SimulatedHost

from ocigpu.cli.front.main import main
from ocigpu.sim.create import create_host


@pytest.mark.root
@pytest.mark.engine
def test_what_a_container_has_is_spared_unless_told(
    make_bundle: MakeBundle,
    runtime_environment: dict[str, str],
    work_directory: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = work_directory / "host"
    create_host(str(path), 2, "h100", ("0:" + ",".join(["1g.10gb"] * 7),), dri=False, compat32=False, ldcache=False)
    config = ["--config", str(path / "config.toml")]
    used = json.loads(ocigpu("mig", "plan", "-c", "all-1g.10gb", "--json", *config))["gpus"][0]["keep"][3]["uuids"][0]
    host = SimulatedHost(path, (), (used,))
    bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": used}, layout="busybox")
    with container(bundle, runtime_environment, host=host) as made:
        words = [*config, "--state-dir", str(made.state)]
        assert main(["mig", "apply", "-c", "all-disabled", *words]) == 1
        assert f"{made.name} uses {used}" in capfd.readouterr().err
        plan = json.loads(ocigpu("mig", "plan", "-c", "all-balanced", "--json", *words))["gpus"][0]
        assert used in [uuid for one in plan["keep"] for uuid in one["uuids"]]
        ocigpu("mig", "apply", "-c", "all-balanced", *words)
        made.do("exec", made.name, "/probe", "stat", "/dev/nvidia0")
        ocigpu("mig", "apply", "-c", "all-disabled", "--force", *words)
