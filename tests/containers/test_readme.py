"""What the README begins with is what the programs print."""

import json
import re
from pathlib import Path

import pytest
from containers_lab import container, ocigpu
from support.fixtures import MakeBundle
from support.process import run
from support.product import SimulatedHost

from ocigpu.sim.create import create_host

pytestmark = [pytest.mark.root, pytest.mark.engine]
README = Path(__file__).parents[2] / "README.md"


def shown(command: str) -> list[str]:
    """Return the lines that the README shows below a command."""
    text = README.read_text().split(f"    $ {command}\n", 1)[1]
    return [line[4:] for line in re.split(r"\n(?=    \$|\n)", text)[0].splitlines()]


def cells(line: str) -> list[str]:
    """Return the cells of a row of top, without those that differ between machines and engines."""
    found = re.split(r" {2,}", line.rstrip())
    return [*found[:6], *found[8:10], re.sub(r"\d+$", "", found[10])]


def test_the_readme_begins_with_real_output(
    make_bundle: MakeBundle, session_directory: Path, runtime_environment: dict[str, str]
) -> None:
    assert README.read_text().splitlines().index("    $ ocigpu top --once") < 20
    directory = session_directory / "host-readme"
    create_host(str(directory), gpus=1, model="l40s", compat32=False)
    (gpu,) = json.loads((directory / ".ocigpu-sim.json").read_text())["gpus"]
    host = SimulatedHost(directory, (gpu["uuid"],), ())
    bundle = make_bundle(["sleep", "1000"], {"NVIDIA_VISIBLE_DEVICES": "all"}, layout="debian")
    with container(bundle, runtime_environment, host=host) as made:
        smi = run([*made.command, "exec", made.name, "nvidia-smi", "-L"], env=made.environment)
        assert (smi.stdout + smi.stderr).splitlines() == shown("docker run --rm --gpus all debian nvidia-smi -L")
        (directory / "load").write_text(f"load 0 80\nprocess 0 {made.found().pid} 36352 80\n")
        words = ("--config", str(host.settings), "--state-dir", str(made.state))
        simulated, *top = ocigpu("top", "--once", *words).splitlines()
        assert "SIMULATED" in simulated
        assert [cells(line) for line in top] == [cells(line) for line in shown("ocigpu top --once")]
