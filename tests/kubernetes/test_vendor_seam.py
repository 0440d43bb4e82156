"""A vendor's folder answers the programs of a cluster's nodes: a vendor that nobody has heard of is another folder."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kubernetes_lab import host, inventory
from support.process import wait_for
from support.trees import write_tree

from ocigpu.core.actions import Node
from ocigpu.core.errors import RequestError
from ocigpu.core.facts import DeviceNode, Gpu, HostFacts
from ocigpu.core.settings import Settings
from ocigpu.core.vendors import VENDORS
from ocigpu.gpus.offer import DeviceOffer, GenerateOptions, OfferedDevice
from ocigpu.gpus.on_node import NodeGpus
from ocigpu.gpus.parts import GpuPart
from ocigpu.gpus.vendors import Vendor
from ocigpu.kubernetes.dra.claims import Allotted, ClaimRef, check_configs
from ocigpu.kubernetes.dra.configs import DeviceConfig
from ocigpu.kubernetes.dra.devices import make_devices
from ocigpu.kubernetes.dra.node import read_dra_node
from ocigpu.kubernetes.dra.specs import NodeView, make_claim_spec
from ocigpu.kubernetes.labels.program import read_labels
from ocigpu.kubernetes.mps.supervisor import plan_daemons
from ocigpu.kubernetes.node.config import Configuration, PluginOptions
from ocigpu.kubernetes.node.devices import Inventory
from ocigpu.kubernetes.node.health import Event, Monitor
from ocigpu.kubernetes.node.program import EventWatcher, NodeProgram
from ocigpu.kubernetes.node.reader import ChildReader
from ocigpu.kubernetes.node.reading import KubernetesNode, read_others
from ocigpu.kubernetes.node.sharing import Sharing

CLAIM = ClaimRef("lab", "11111111-2222-3333-4444-555555555555", "mine")
NODE = DeviceNode("/dev/acme0", "/dev/acme0", 240, 0)
A100 = host("a100-8")
FACTS = HostFacts(gpus=(Gpu(0, 0, "ACME-1", "00000000:41:00.0"),), vendor="acme")


def offer(claimed: "dict[str, str]", _options: GenerateOptions, _settings: Settings, _facts: HostFacts) -> DeviceOffer:
    devices = tuple(OfferedDevice(id_, (Node(NODE, f"{name} was claimed"),)) for id_, name in claimed.items())
    return DeviceOffer(source="acme", vendor="acme.example", device_class="gpu", devices=devices)


ANSWERS: dict[str, Any] = {
    "has_driver": lambda _: True,
    "read_parts": lambda _: (GpuPart("0000:41:00.0", -1, "ACME-1", {"type": {"string": "acme"}}, {}),),
    "offer_claimed": offer,
    "read_node": lambda _: NodeGpus(FACTS),
    "sharing": ("TimeSlicing",),
    "find_silence": lambda facts: f"{len(facts.gpus)} GPUs are silent",
    "watch_faults": lambda _: ("acme_faults", "7"),
    "read_labels": lambda _: [("acme.example/gpu.count", "1")],
}


@pytest.fixture(autouse=True)
def acme(monkeypatch: pytest.MonkeyPatch) -> Vendor:
    """A vendor that has a line in the table and a folder."""
    module: Any = ModuleType("ocigpu.gpus.acme")
    module.VENDOR = Vendor("acme", ("acme",), lambda _: (), lambda *_: None, **ANSWERS)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(VENDORS, "acme", ("acme", "ACME_VISIBLE_DEVICES", "acme.example"))
    found: Vendor = module.VENDOR
    return found


def allotted(strategy: str = "") -> list[Allotted]:
    node = read_dra_node(Settings(), "acme").node
    assert node
    (device,) = make_devices(node)
    return [Allotted("gpu", device, DeviceConfig(strategy=strategy), False, "")]


def test_a_claim_gets_what_the_folder_offers_for_it() -> None:
    node = read_dra_node(Settings(), "acme").node
    assert node
    view = NodeView(node, make_devices(node), Settings(), PluginOptions())
    spec = make_claim_spec(CLAIM, allotted(), "gpu.acme.example", view)
    assert spec["kind"] == "k8s.gpu.acme.example/claim"
    (device,) = spec["devices"]
    assert device["name"] == f"{CLAIM.uid}-gpu-0000-41-00-0"
    assert [node["path"] for node in device["containerEdits"]["deviceNodes"]] == ["/dev/acme0"]


def test_a_claim_shares_gpus_by_the_strategies_of_the_vendor() -> None:
    check_configs(CLAIM, allotted("TimeSlicing"))
    with pytest.raises(RequestError, match="acme GPUs are not shared by MPS"):
        check_configs(CLAIM, allotted("MPS"))


def test_labels_of_the_vendor_are_added(tmp_path: Path) -> None:
    found = read_labels(write_tree(tmp_path, {"/proc/": "", "/sys/": ""}), Configuration(), 0.0)
    assert found.labels["acme.example/gpu.count"] == "1"
    assert found.labels["nvidia.com/vgpu.present"] == "false"


def test_a_silent_driver_is_what_the_vendor_says() -> None:
    node = KubernetesNode("nvml", FACTS, Inventory())
    configuration = Configuration(sharing=Sharing("mps"))
    assert plan_daemons(node, configuration, "").problems == ("1 GPUs are silent",)


def test_faults_come_from_a_module_of_the_vendor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = '{"xid": %s, "gpu": "ACME-1", "gi": -1, "ci": -1}'
    (tmp_path / "acme_faults.py").write_text(f"def main(xid): print({line!r} % xid, flush=True)\n")
    monkeypatch.syspath_prepend(tmp_path)
    watcher = EventWatcher()
    watcher.watch(FACTS, 0.0)
    events: list[Event] = []

    def heard() -> bool:
        events.extend(watcher.step(1.0).events)
        return bool(events)

    try:
        wait_for("an event", heard)
    finally:
        watcher.close()
    assert events == [Event(7, "ACME-1")]


def test_the_device_plugin_offers_its_gpus_and_a_fault_is_about_them_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = read_others(Settings(), Configuration())
    offered = KubernetesNode("nvml", A100, inventory(A100), others=others).offered
    assert [(each.name, each.vendor) for each in offered.resources] == [
        ("nvidia.com/gpu", "nvidia"),
        ("acme.example/gpu", "acme"),
    ]
    fault = '{"xid": 7, "gpu": "", "gi": -1, "ci": -1}'  # its driver does not tell of which
    (tmp_path / "acme_faults.py").write_text(f"def main(xid): print({fault!r}, flush=True)\n")
    monkeypatch.syspath_prepend(tmp_path)
    program = NodeProgram(ChildReader("none", str), Monitor(Configuration()), 1.0, 1.0, as_json=False)
    try:
        wait_for("an event", lambda: program._hear((FACTS,), offered, 1.0))
    finally:
        for watcher in program.watchers.values():
            watcher.close()
    assert {uuid: state.reason for uuid, state in program.monitor.states.items()} == {"ACME-1": "XID 7"}
