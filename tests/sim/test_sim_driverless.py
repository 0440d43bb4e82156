"""Simulated hosts without a driver: what the PCI bus, IOMMU groups and VFIO show."""

import os
from pathlib import Path

import pytest
from support.driverless import GPUS, MODULES, make_driverless

from ocigpu.core.errors import OcigpuError
from ocigpu.gpus.pci import read_function
from ocigpu.gpus.vfio.facts import read_vfio_facts
from ocigpu.sim.create import create_host
from ocigpu.sim.made import describe_host, remove_host


def test_gpus_and_switches_are_bound_to_vfio(tmp_path: Path) -> None:
    roots = make_driverless(tmp_path / "host")
    facts = read_vfio_facts(roots)
    gpus = [item for item in facts.candidates if not item.is_switch]
    switches = [item for item in facts.candidates if item.is_switch]
    assert [item.function.address for item in gpus] == list(GPUS)
    assert [item.group for item in gpus] == list(range(112, 120))
    assert next(item.function.text for item in switches) == "0000:c2:00.0 (10de:22a3)"
    assert {item.group for item in switches} == {140}
    assert {item.function.driver for item in facts.candidates} == {"vfio-pci"}
    shared = next(group for group in facts.groups if group.number == 140)
    assert "0000:c0:00.1 (11f8:4128)" in [one.text for one in shared.functions]
    assert not facts.iommufd
    assert facts.container_node


def test_every_gpu_is_alone_behind_its_port(tmp_path: Path) -> None:
    roots = make_driverless(tmp_path / "host")
    for bdf in GPUS:
        port = Path(os.path.realpath(f"{roots.sys}/bus/pci/devices/{bdf}")).parent
        bridge = read_function(roots.sys, port.name)
        assert bridge
        assert bridge.base_class == 0x0604
        assert [path.name for path in port.iterdir() if path.name.startswith("0000:")] == [bdf]


def test_the_marker_says_what_the_driver_would(tmp_path: Path) -> None:
    make_driverless(tmp_path / "host", iommufd=True)
    host = describe_host(str(tmp_path / "host"))
    assert {gpu["bus_id"]: gpu["module_id"] for gpu in host["gpus"]} == MODULES
    assert len({gpu["serial"] for gpu in host["gpus"]}) == 8
    assert host["driver_version"] == ""
    remove_host(str(tmp_path / "host"))
    assert not (tmp_path / "host").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpus": 9, "driver": "none"}, "9 GPUs without a driver"),
        ({"driver": "nouveau"}, 'driver "nouveau": not known'),
        ({"iommufd": True}, "without a driver only"),
        ({"mig": ["0:1g.10gb"], "driver": "none"}, "need a driver"),
        ({"driver_version": "550.163.01", "driver": "none"}, "no versions, faults and libraries"),
        ({"faults": ["no-driver"], "driver": "none"}, "no versions, faults and libraries"),
        ({"model": ["h100", "mi300x"], "driver": "none"}, "one model"),
    ],
)
def test_what_such_a_host_cannot_have_is_refused(tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(OcigpuError, match=message):
        create_host(str(tmp_path / "host"), **arguments)
    assert list(tmp_path.iterdir()) == []
