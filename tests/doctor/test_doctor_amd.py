"""What the doctor says of AMD's GPUs."""

from pathlib import Path

import pytest

from ocigpu.core.settings import Settings
from ocigpu.doctor.driver import check_gpu, check_vendor
from ocigpu.doctor.host import Host
from ocigpu.gpus.amd.checks import check
from ocigpu.sim.create import create_host


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    create_host(str(tmp_path / "host"), gpus=2, model="mi300x", nodes=False)
    return tmp_path / "host"


def troubles(directory: Path) -> list[tuple[str, str]]:
    return [(one.severity, one.text) for one in check(Settings(simulation_root=str(directory)))]


def test_a_host_in_order_has_no_finding(directory: Path) -> None:
    host = Host(str(directory))
    assert [one.severity for one in (*check_gpu(host), *check_vendor(host))] == ["ok", "ok"]


def test_nodes_that_are_missing_are_found(directory: Path) -> None:
    (directory / "dev/kfd").unlink()
    card = min((directory / "dev/dri").glob("card*"))
    card.unlink()
    assert troubles(directory) == [
        ("error", "/dev/kfd is missing: ROCm cannot be used"),
        ("error", f"GPU 0 (0000:41:00.0): nodes are missing: /dev/dri/{card.name}"),
    ]
    found = check_vendor(Host(str(directory)))
    assert [one.severity for one in found] == ["error", "error"]
    assert all(one.fixes and one.evidence for one in found)


def test_gpus_without_kfd_or_driver_are_found(directory: Path) -> None:
    (directory / "sys/class/kfd/kfd/topology/nodes/2/properties").unlink()
    function = directory / "sys/bus/pci/devices/0000:45:00.0"
    function.mkdir()
    for name, text in (("vendor", "0x1002"), ("device", "0x74a1"), ("class", "0x120000")):
        (function / name).write_text(text)
    assert troubles(directory) == [
        ("warning", "GPU 1 (0000:42:00.0) is not in KFD's topology: ROCm cannot use it"),
        ("warning", "GPU 0000:45:00.0 (1002:74a1) is not bound to amdgpu, but to no driver"),
    ]


def test_a_kernel_without_kfd_is_found(directory: Path) -> None:
    (directory / "dev/kfd").unlink()
    (directory / "sys/class/kfd/kfd/dev").unlink()
    assert ("error", "KFD is missing: ROCm cannot work on this host") in troubles(directory)
