"""GPUs go from their driver to VFIO's for a claim, with their IOMMU group, and back, whatever kills the driver."""

import os
from pathlib import Path
from typing import Any

import pytest
from dra_lab import DRIVER, NODE, Killed, result, vfio_name
from kubernetes_lab import host
from support.driverless import holding
from support.product import SimulatedHost
from switch_lab import GIVEN, GPU, HAD, SwitchHost

from ocigpu.core.errors import HostError, RequestError, SettingsError
from ocigpu.gpus.nvidia.hardware import read_hardware
from ocigpu.gpus.pci import Function
from ocigpu.gpus.tree import normal_bus_id
from ocigpu.gpus.vendors import load_vendor
from ocigpu.gpus.vfio.facts import Candidate, VfioFacts
from ocigpu.kubernetes.dra.devices import DeviceOptions, DraNode, make_devices
from ocigpu.kubernetes.dra.options import parse_options
from ocigpu.kubernetes.dra.slices import ApiFeatures, Pool, make_slices
from ocigpu.sim.board import SimBus
from ocigpu.system.settings_file import read_settings


@pytest.fixture
def switched(tmp_path: Path) -> SwitchHost:
    made = SwitchHost(tmp_path)
    assert made.drivers == HAD
    return made


@pytest.mark.root
def test_a_gpu_and_its_group_go_to_vfio_for_a_claim(switched: SwitchHost) -> None:
    switched.preparer.prepare(switched.ref)
    assert switched.drivers == GIVEN
    assert switched.specs == [f"k8s.{DRIVER}-claim_vm_vfio.json"]
    assert '"/dev/vfio/112"' in (switched.directory / "cdi" / switched.specs[0]).read_text()
    changes = switched.bus.changes
    assert switched.preparer.prepare(switched.ref)
    assert switched.bus.changes == changes, "it is done once"
    switched.read_again()
    with holding(str(switched.host / "dev/vfio/112")) as pid:
        with pytest.raises(HostError, match=f"still open in process {pid}"):
            switched.preparer.unprepare(switched.ref)
        assert switched.drivers == GIVEN
    switched.preparer.unprepare(switched.ref)
    assert switched.drivers == HAD
    view = switched.view()
    assert view
    (left,) = [each.name for each in view.devices if each.kind == "vfio" and each.name != vfio_name(GPU)]
    other = switched.add("other", result(left))
    before = switched.bus.changes
    switched.preparer.prepare(other)
    switched.preparer.unprepare(other)
    assert switched.bus.changes == before, "one that VFIO has stays VFIO's"


def persistent(switched: SwitchHost, simulated_host: SimulatedHost) -> Path:
    """Let the GPU be the first of a host whose NVML answers; returns the file of its persistence mode."""
    settings = read_settings(str(simulated_host.settings))
    facts = load_vendor("nvidia").read_now(settings)
    first = facts.gpus[0]
    hardware = read_hardware(facts)
    assert hardware.gpus[first.uuid].persistent is True
    node = DraNode(facts._replace(gpus=(first._replace(bus_id=normal_bus_id(GPU)),)), hardware, vfio=switched.vfio())
    switched.node = node
    return simulated_host.directory / "persistence-mode.0"


@pytest.mark.root
def test_persistence_mode_is_off_while_a_virtual_machine_has_the_gpu(
    switched: SwitchHost, simulated_host: SimulatedHost
) -> None:
    mode = persistent(switched, simulated_host)
    try:
        switched.preparer.prepare(switched.ref)
        assert (switched.drivers, mode.read_text()) == (GIVEN, "0")
        switched.preparer.unprepare(switched.ref)
        assert (switched.drivers, mode.read_text()) == (HAD, "1")
        with holding(str(switched.host / "dev/nvidia0")), pytest.raises(HostError, match=r"has .* open"):
            switched.preparer.prepare(switched.ref)  # somebody else has it
        assert (switched.drivers, mode.read_text()) == (HAD, "1")
    finally:
        mode.unlink(missing_ok=True)


@pytest.mark.root
def test_a_persistence_mode_that_was_off_stays_off(switched: SwitchHost, simulated_host: SimulatedHost) -> None:
    mode = persistent(switched, simulated_host)
    assert switched.node
    hardware = switched.node.hardware
    off = {uuid: one._replace(persistent=False) for uuid, one in hardware.gpus.items()}
    switched.node = switched.node._replace(hardware=hardware._replace(gpus=off))
    switched.preparer.prepare(switched.ref)
    switched.preparer.unprepare(switched.ref)
    assert (switched.drivers, mode.exists()) == (HAD, False)


@pytest.mark.root
@pytest.mark.parametrize("owned", [True, False])
def test_an_administrator_has_no_gpu_of_a_virtual_machine(switched: SwitchHost, owned: bool) -> None:
    if owned:
        switched.preparer.prepare(switched.ref)
    specs, drivers = switched.specs, switched.drivers
    watcher = switched.add("watcher", result(vfio_name(GPU), adminAccess=True))
    with pytest.raises(RequestError, match="no administrator's access") as caught:
        switched.preparer.prepare(watcher)
    assert caught.value.code == "OCIGPU-DRA-2"
    assert (switched.specs, switched.drivers) == (specs, drivers)


@pytest.mark.rest
@pytest.mark.root
def test_a_driver_that_is_killed_at_any_moment_leaves_nothing(
    switched: SwitchHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    switched.bus.changes = 0
    switched.come_and_go()
    every = switched.bus.changes
    assert every == 2 * 3 + 2 * 4, "override, unbind, probe; back the same, and the override as it was"
    monkeypatch.setattr(type(switched.preparer), "undo_if_possible", lambda *_: None)  # it is dead
    for moment in range(every):
        switched.bus.changes, switched.bus.kill = 0, moment
        switched.read_again()
        with pytest.raises(Killed):
            switched.come_and_go()
        switched.bus.kill = -1
        switched.restart()
        if switched.preparer.held():
            switched.preparer.unprepare(switched.ref)
        assert (switched.drivers, switched.specs, switched.preparer.held()) == (HAD, [], ()), moment


@pytest.mark.root
@pytest.mark.parametrize(
    ("device", "driver"),
    [
        ("0x2342", "nvgrace_gpu_vfio_pci"),
        ("0x2348", "nvgrace_gpu_vfio_pci"),
        ("0x2941", "nvgrace_gpu_vfio_pci"),
        ("0x31c2", "nvgrace_gpu_vfio_pci"),
        ("0x2901", "vfio-pci"),
        ("0x3182", "vfio-pci"),
    ],
    ids=["GH200", "GH200-144G", "GB200", "GB300", "B200", "B300"],
)
def test_gpus_of_grace_go_to_the_driver_that_knows_their_memory(switched: SwitchHost, device: str, driver: str) -> None:
    """As the kernel names it in sysfs, not as the module's file is called."""
    (switched.host / f"sys/bus/pci/devices/{GPU}/device").write_text(f"{device}\n")
    if driver != "vfio-pci":
        with pytest.raises(HostError, match=f"the driver {driver} is not loaded"):
            switched.preparer.prepare(switched.ref)
        assert switched.drivers == HAD
        (switched.host / f"sys/bus/pci/drivers/{driver}").mkdir()
    switched.preparer.prepare(switched.ref)
    assert switched.drivers == [(driver, driver), ("vfio-pci", "vfio-pci")]
    switched.read_again()
    switched.preparer.unprepare(switched.ref)
    assert switched.drivers == HAD


@pytest.mark.root
def test_a_gpu_that_somebody_uses_or_whose_group_is_others_stays(switched: SwitchHost) -> None:
    with holding(str(switched.host / "dev/nvidia0")) as pid:
        with pytest.raises(HostError, match=rf"process {pid} \(sleep\) has /dev/nvidia0 open"):
            switched.preparer.prepare(switched.ref)
        assert switched.drivers == HAD
    group = switched.host / "sys/kernel/iommu_groups/112/devices"
    stranger = switched.host / "sys/bus/pci/devices/0000:02:00.0"
    (group / "0000:02:00.0").symlink_to(os.path.realpath(stranger))
    (switched.host / "sys/bus/pci/drivers/nvme").mkdir()
    for text in ("nvme", "nvidia"):
        switched.bus.write("0000:02:00.0", "driver/unbind", "")
        switched.bus.write("0000:02:00.0", "driver_override", text)
        switched.bus.probe("0000:02:00.0")
        with pytest.raises(HostError, match=r"its IOMMU group 112 has another GPU, 0000:02:00\.0"):
            switched.preparer.prepare(switched.ref)
    assert switched.drivers == HAD
    assert (switched.preparer.held(), switched.specs) == ((), [])


@pytest.mark.root
def test_a_driver_that_does_not_take_it_gives_it_back(switched: SwitchHost, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SimBus.probe

    def probe(bus: SimBus, bdf: str) -> None:
        if bus.read(bdf, "driver_override") != "vfio-pci":
            real(bus, bdf)

    monkeypatch.setattr(SimBus, "probe", probe)
    with pytest.raises(HostError, match="vfio-pci did not take it: it has no driver"):
        switched.preparer.prepare(switched.ref)
    assert switched.drivers == HAD


def test_both_ways_to_have_a_gpu_are_offered_once() -> None:
    facts = host("a100-8")
    functions = [Function(gpu.bus_id[4:], 0x10DE, 0x20B0, 0x0302, "nvidia") for gpu in facts.gpus]
    node = DraNode(facts, vfio=VfioFacts(tuple(Candidate(each, n) for n, each in enumerate(functions))))
    assert len(make_devices(node)) == 8
    devices = make_devices(node, DeviceOptions(passthrough=True))
    assert [each.name for each in devices[:2]] == ["gpu-0", vfio_name(facts.gpus[0].bus_id[4:])]
    assert devices[0].conflicts(devices[1])
    counters, entries = make_slices(devices, Pool(DRIVER, NODE))
    assert counters["sharedCounters"][0]["counters"] == {"gpu": {"value": "1"}}
    one, two, *_ = entries["devices"]
    assert one["consumesCounters"] == two["consumesCounters"]
    (plain_slice,) = make_slices(devices, Pool(DRIVER, NODE), ApiFeatures(counters=False))
    assert [each["name"] for each in plain_slice["devices"]] == [f"gpu-{n}" for n in range(8)]


def test_gpus_of_leases_stay_with_vfio() -> None:
    words: list[Any] = ["--node-name=n", "--passthrough", "--lease-journal=/var/lib/ocigpu/leases"]
    with pytest.raises(SettingsError, match="--passthrough: with --lease-journal"):
        parse_options(words, {})


def test_leases_are_of_the_driver_whose_claims_the_agent_knows() -> None:
    words = ["--node-name=n", "--lease-journal=/var/lib/ocigpu/leases"]
    with pytest.raises(SettingsError, match=r"--driver-name: with --lease-journal it is gpu\.nvidia\.com"):
        parse_options([*words, "--driver-name=gpu.example.com"], {})
    assert parse_options([*words, f"--driver-name={DRIVER}"], {}).driver == parse_options(words, {}).driver == DRIVER
