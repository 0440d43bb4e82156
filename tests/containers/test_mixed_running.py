"""Running containers on a host with GPUs of two vendors: looked into, given and taken GPUs of both, and repaired."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from containers_lab import WAITING, Made, container, settings_with
from live_lab import apply_again, execute, ocigpu, shell, verify
from support.fixtures import MakeBundle
from support.product import SimulatedHost
from support.runtimes import answers, probe

from ocigpu.containers.repair import GrantKeeper
from ocigpu.sim.create import create_host
from ocigpu.system.service import ServiceLog
from ocigpu.system.settings_file import read_settings

pytestmark = [pytest.mark.root, pytest.mark.engine]


@pytest.fixture(scope="module")
def mixed_host(session_directory: Path) -> SimulatedHost:
    directory = session_directory / "host-mixed-running"
    create_host(str(directory), gpus=2, model=("h100", "mi300x"), compat32=False)
    marker = json.loads((directory / ".ocigpu-sim.json").read_text())
    return SimulatedHost(directory, tuple(gpu["uuid"] for gpu in marker["gpus"]), ())


class Lab:
    """Makes containers on the host; GPUs 0 and 1 of its list are NVIDIA's, 2 and 3 AMD's."""

    def __init__(self, host: SimulatedHost, base: dict[str, str], make: MakeBundle, directory: Path) -> None:
        self.host, self.base, self.make, self.directory = host, base, make, directory
        dri = host.directory / "dev/dri"
        renders = sorted(f"/dev/dri/{path.name}" for path in dri.glob("renderD*"))
        self.nodes = ["/dev/nvidia0", "/dev/nvidia1", *renders[2:]]

    @contextmanager
    def started(self, mode: str, **env: str) -> Iterator[Made]:
        settings = settings_with(self.host, "runc", self.directory / "config.toml", mode)
        with container(self.make(WAITING, env), self.base, host=self.host, settings=settings) as made:
            yield made

    def opened(self, made: Made) -> list[int]:
        """Return which GPUs the container may open, after verify has found all as it is to be."""
        verify(made)
        said = answers(execute(made, *probe(["open", *self.nodes])))
        return [number for number, path in enumerate(self.nodes) if said["open", path] == "ENXIO"]

    def change(self, made: Made, command: str, number: int) -> None:
        ocigpu(made, command, made.name, "--gpu", self.host.gpus[number])


@pytest.fixture
def lab(
    mixed_host: SimulatedHost, runtime_environment: dict[str, str], make_bundle: MakeBundle, work_directory: Path
) -> Lab:
    return Lab(mixed_host, runtime_environment, make_bundle, work_directory)


@pytest.mark.rest
@pytest.mark.parametrize("mode", ["hook", "spec"])
def test_gpus_of_both_vendors_come_and_go(lab: Lab, mode: str) -> None:
    with lab.started(mode, NVIDIA_VISIBLE_DEVICES="0", AMD_VISIBLE_DEVICES="0") as made:
        assert lab.opened(made) == [0, 2]
        lab.change(made, "attach", 3)
        lab.change(made, "detach", 0)
        assert lab.opened(made) == [2, 3]
        lab.change(made, "attach", 1)
        lab.change(made, "detach", 2)
        assert lab.opened(made) == [1, 3]
        assert "GPU 1 (" in ocigpu(made, "attach", made.name, "--gpu", "1").stdout  # an index is of the first vendor
        assert lab.opened(made) == [1, 3]


@pytest.mark.rest
@pytest.mark.parametrize("variable", ["NVIDIA_VISIBLE_DEVICES", "AMD_VISIBLE_DEVICES"])
def test_a_gpu_of_the_other_vendor_brings_all_that_it_needs_and_no_more(lab: Lab, variable: str) -> None:
    own, other = (0, 2) if variable.startswith("NVIDIA") else (2, 0)
    with lab.started("hook", **{variable: "0"}) as made:
        assert lab.opened(made) == [own]
        lab.change(made, "attach", own + 1)
        assert lab.opened(made) == [own, own + 1]
        foreign = "/dev/kfd" if own == 0 else "/dev/nvidiactl"
        assert verify(made)["nodes"][foreign]["granted"] == "no"
        lab.change(made, "attach", other)
        assert lab.opened(made) == sorted([own, own + 1, other])
        assert verify(made)["nodes"][foreign]["granted"] == "node"
        assert lab.host.gpus[0] in execute(made, "nvidia-smi", "-L")
        lab.change(made, "detach", other)
        assert lab.opened(made) == [own, own + 1]


def test_a_container_that_had_nothing_gets_one_vendors_alone(lab: Lab) -> None:
    with lab.started("hook", NVIDIA_VISIBLE_DEVICES="void") as made:
        lab.change(made, "attach", 2)
        assert lab.opened(made) == [2]
        assert verify(made)["nodes"]["/dev/nvidiactl"]["granted"] == "no"
        assert not execute(made, "ls", "/proc/driver/nvidia").strip()


def test_ps_and_explain_show_the_gpus_of_both(lab: Lab) -> None:
    with lab.started("hook", NVIDIA_VISIBLE_DEVICES="1", AMD_VISIBLE_DEVICES="1") as made:
        shown = json.loads(ocigpu(made, "ps", "--json").stdout)
        assert [gpu["uuid"] for gpu in shown["containers"][0]["gpus"]] == [lab.host.gpus[1], lab.host.gpus[3]]
        said = ocigpu(made, "explain", made.name).stdout
        assert "NVIDIA_VISIBLE_DEVICES=1 AMD_VISIBLE_DEVICES=1" in said
        assert all(lab.host.gpus[number] in said for number in (1, 3))
        assert json.loads(ocigpu(made, "explain", made.name, "--json").stdout)["explanation"]["missing"] == []


@pytest.mark.rest
def test_the_keeper_gives_back_what_an_update_has_taken(lab: Lab) -> None:
    with lab.started("spec", AMD_VISIBLE_DEVICES="0") as made:
        lab.change(made, "attach", 3)
        lab.change(made, "attach", 0)
        keeper = GrantKeeper(made.places, read_settings(made.environment["OCIGPU_CONFIG"]), ServiceLog(False))
        keeper.look()
        apply_again(made, "v1")
        shell(made, f"rm {lab.nodes[2]}")
        keeper.look()
        assert lab.opened(made) == [0, 2, 3]
        apply_again(made, "v1")
        assert ocigpu(made, "repair", made.name).stdout.count("restored: device rule") >= 4
        assert lab.opened(made) == [0, 2, 3]
