"""XGMI links in KFD's topology: how many there are between two GPUs; and what the GPUs are called."""

import json
from pathlib import Path

import pytest

from ocigpu.cli.front.main import main
from ocigpu.core.settings import Settings
from ocigpu.gpus.amd.facts import read_facts
from ocigpu.gpus.amd.simulated import simulate
from ocigpu.gpus.amd.usage import read_links
from ocigpu.gpus.vendors import GpuLink
from ocigpu.sim.models import find_model

LINK = "type 11\nversion_major 0\nnode_from 1\nnode_to 2\nweight 15\nmin_bandwidth 50000\nmax_bandwidth 50000\n"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """The files of three simulated GPUs, of which the last has no links."""
    made = simulate(3, find_model("mi300x"), 0, 511)
    for name, text in made.files.items():
        path = tmp_path / name
        if "nodes/3/io_links" not in name:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    for name, target in made.links.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "count"),
    [
        pytest.param(LINK, 1, id="one"),
        pytest.param(LINK.replace("max_bandwidth 50000", "max_bandwidth 200000"), 4, id="four"),
        pytest.param("type 11\nnode_to 2\nweight 15\n", 1, id="not counted by this kernel"),
        pytest.param(LINK.replace("weight 15", "weight 30"), 0, id="over another GPU"),
        pytest.param(LINK.replace("type 11", "type 2"), 0, id="PCIe"),
        pytest.param(LINK.replace("node_to 2", "node_to 0"), 0, id="to a CPU"),
        pytest.param(LINK.replace("node_to 2", "node_to 1"), 0, id="to itself"),
        pytest.param("type x\n\xff", 0, id="no numbers"),
    ],
)
def test_direct_links_are_counted(host: Path, text: str, count: int) -> None:
    nodes = host / "sys/class/kfd/kfd/topology/nodes"
    for node in (1, 2):
        for link in (0, 1):
            (nodes / f"{node}/io_links/{link}/properties").write_text("")
    (nodes / "1/io_links/0/properties").write_text(text)
    settings = Settings(simulation_root=str(host))
    facts = read_facts(settings)
    one, two, _ = (gpu.uuid for gpu in facts.gpus)
    assert read_links(settings, facts) == ((GpuLink(*sorted((one, two)), "XGMI", count),) if count else ())


def test_list_names_the_models(host: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As boards store them; a board that stores none, as the list of PCI ids does."""
    devices = host / "sys/bus/pci/devices"
    (devices / "0000:42:00.0/product_name").unlink()
    (devices / "0000:43:00.0/product_name").write_text("\x1b[31mred\n")
    (host / "config.toml").write_text(f'[simulation]\nroot = "{host}"\n')
    assert main(["list", "--config", str(host / "config.toml"), "--json"]) == 0
    models = [gpu["model"] for gpu in json.loads(capsys.readouterr().out)["gpus"]]
    assert models == ["AMD Instinct MI300X OAM", "", "\\x1b[31mred"]
