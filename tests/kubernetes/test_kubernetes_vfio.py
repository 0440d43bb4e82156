"""GPUs for virtual machines as resources: names that Kata finds in CDI specifications."""

import os
from pathlib import Path

import pytest
import yaml
from support.allocation import DeviceSpec, Response, allocate
from support.product import REPOSITORY
from support.trees import Tree, pci_function, write_tree

from ocigpu.core.facts import HostFacts
from ocigpu.core.settings import Settings
from ocigpu.gpus.offer import GenerateOptions
from ocigpu.gpus.tree import Roots
from ocigpu.gpus.vfio.facts import GroupMembers, VfioFacts, read_vfio_facts
from ocigpu.gpus.vfio.offers import offer_functions
from ocigpu.kubernetes.cluster.owners import Held, Owner
from ocigpu.kubernetes.cluster.pods import Listing
from ocigpu.kubernetes.leases import machine
from ocigpu.kubernetes.node.config import Configuration
from ocigpu.kubernetes.node.vfio import PCI_IDS, make_vfio_inventory, model_class, read_model_names

API: Tree = {"/sys/class/misc/vfio/dev": "10:196\n", "/dev/vfio/vfio": ""}
H100, B200, SWITCH = "10de:2330", "10de:2901", "10de:22a3"
NAMES = {0x2330: "GH100 [H100 SXM5 80GB]"}


def function(address: str, group: int, ids: str = H100, kind: str = "0302", driver: str = "vfio-pci") -> Tree:
    node = {f"/sys/class/vfio/{group}/dev": f"242:{group}\n", f"/dev/vfio/{group}": ""}
    return {**pci_function(address, ids, kind, driver, str(group)), **node}


def cdev(address: str, number: int) -> Tree:
    return {
        f"/sys/bus/pci/devices/{address}/vfio-dev/vfio{number}/dev": f"511:{number}\n",
        f"/dev/vfio/devices/vfio{number}": "",
    }


TWO: Tree = {**API, **function("0000:3b:00.0", 112), **function("0000:19:00.0", 9, B200)}
SINGLE: Tree = {**TWO, "/dev/iommu": "", **cdev("0000:3b:00.0", 0), **cdev("0000:19:00.0", 1)}


def facts(root: Path, tree: Tree) -> VfioFacts:
    write_tree(root, tree)
    return read_vfio_facts(Roots(str(root), str(root), f"{root}/proc", f"{root}/sys", True))


CASES: dict[str, tuple[Tree, str, dict[str, dict[str, tuple[str, ...]]]]] = {
    "one name for all": (
        TWO, "gpu", {"gpu": {"9": ("/dev/vfio/vfio", "/dev/vfio/9"), "112": ("/dev/vfio/vfio", "/dev/vfio/112")}},
    ),
    "single functions": (
        SINGLE, "pgpu", {"pgpu": {"0": ("/dev/vfio/devices/vfio0",), "1": ("/dev/vfio/devices/vfio1",)}},
    ),
    "by model": (
        TWO, "model",
        {
            "2901": {"9": ("/dev/vfio/vfio", "/dev/vfio/9")},
            "GH100_H100_SXM5_80GB": {"112": ("/dev/vfio/vfio", "/dev/vfio/112")},
        },
    ),
    "two models in a group are one device of the first": (
        {**API, **function("0000:19:00.0", 9, B200), **function("0000:3b:00.0", 9)}, "model",
        {"2901": {"9": ("/dev/vfio/vfio", "/dev/vfio/9")}},
    ),
    "switches": (
        {**TWO, **function("0000:05:00.0", 3, SWITCH, "0680")}, "gpu",
        {
            "gpu": {"9": ("/dev/vfio/vfio", "/dev/vfio/9"), "112": ("/dev/vfio/vfio", "/dev/vfio/112")},
            "nvswitch": {"3": ("/dev/vfio/vfio", "/dev/vfio/3")},
        },
    ),
    "one GPU is not bound": (
        {**TWO, **function("0000:5a:00.0", 4, driver="nvidia")}, "gpu",
        {"gpu": {"9": ("/dev/vfio/vfio", "/dev/vfio/9"), "112": ("/dev/vfio/vfio", "/dev/vfio/112")}},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("tree", "resource", "expected"), CASES.values(), ids=CASES.keys())
def test_resources(tmp_path: Path, tree: Tree, resource: str, expected: dict[str, dict[str, tuple[str, ...]]]) -> None:
    found = make_vfio_inventory(facts(tmp_path, tree), resource, NAMES)
    assert {
        each.name.removeprefix("nvidia.com/"): {device.id: device.paths for device in each.devices}
        for each in found.resources
    } == expected
    assert {each.kind for each in found.resources} == {"vfio"}


def test_a_device_is_all_gpus_of_its_group(tmp_path: Path) -> None:
    """Also where an NVSwitch comes first; as single functions each knows the others."""
    switch = function("0000:05:00.0", 9, SWITCH, "0680")
    (resource,) = make_vfio_inventory(
        facts(tmp_path / "groups", {**TWO, **function("0000:3b:00.0", 9), **switch}), "gpu"
    ).resources
    (device,) = resource.devices
    pair = ("0000:19:00.0", "0000:3b:00.0")
    assert (device.gpu, device.gpus, device.group) == (pair[0], pair, GroupMembers(pair, ("0000:05:00.0",)))
    single = facts(tmp_path / "functions", {**SINGLE, **function("0000:3b:00.0", 9)})
    found = make_vfio_inventory(single, "gpu").resources[0].devices
    assert [(each.gpus, each.group.gpus) for each in found] == [(pair[1:], pair), (pair[:1], pair)]


@pytest.mark.parametrize(("resource", "name"), [("gpu", "gpu"), ("model", "GB100_B200")])
def test_the_agent_knows_all_gpus_of_a_pods_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resource: str, name: str
) -> None:
    read = facts(tmp_path, {**TWO, **function("0000:3b:00.0", 9)})
    held = Held(Owner("pod", "tenant-a", "main"), f"nvidia.com/{name}", "9")
    monkeypatch.setattr("ocigpu.kubernetes.node.vfio.read_model_names", lambda: {0x2901: "GB100 [B200]"})
    monkeypatch.setattr(machine, "list_containers", lambda _socket: Listing(held=(held,)))
    monkeypatch.setattr(machine, "read_vfio_facts", lambda _roots: read)
    found = machine.MachineHands(Settings(), lambda _gpu: "", resource).pods()
    assert {gpu: each.pod for gpu, each in found.items()} == {"0000:19:00.0": "pod", "0000:3b:00.0": "pod"}


def test_a_device_is_called_as_in_the_specification_that_cdi_generate_makes(tmp_path: Path) -> None:
    read = facts(tmp_path, SINGLE)
    drafted = offer_functions(read, GenerateOptions(mode="vfio", device_class="gpu"))
    (resource,) = make_vfio_inventory(read, "gpu").resources
    assert resource.name == f"{drafted.vendor}/{drafted.device_class}"
    assert [device.id for device in resource.devices] == [device.name for device in drafted.devices]


@pytest.mark.parametrize(
    ("tree", "resource", "id_", "paths"),
    [
        (TWO, "gpu", "112", ("/dev/vfio/vfio", "/dev/vfio/112")),
        (SINGLE, "gpu", "0", ("/dev/vfio/devices/vfio0",)),
        (TWO, "model", "112", ("/dev/vfio/vfio", "/dev/vfio/112")),
        (SINGLE, "model", "0", ("/dev/vfio/devices/vfio0",)),
    ],
    ids=["groups", "functions", "groups by model", "functions by model"],
)
def test_what_is_offered_can_be_allocated(
    tmp_path: Path, tree: Tree, resource: str, id_: str, paths: tuple[str, ...]
) -> None:
    name = "GH100_H100_SXM5_80GB" if resource == "model" else resource
    offered = {each.name: each for each in make_vfio_inventory(facts(tmp_path, tree), resource, NAMES).resources}
    found = allocate(offered[f"nvidia.com/{name}"], [id_], HostFacts(), Configuration(), Settings())
    assert found == Response(
        {f"PCI_RESOURCE_NVIDIA_COM_{name.upper()}": "0000:3b:00.0"},
        devices=tuple(DeviceSpec(path, path, "mrw") for path in paths),
    )


def test_kubevirt_finds_the_resource_of_its_page(tmp_path: Path) -> None:
    """By the name that it permits, and the variable that it makes of that name (user-guide, host-devices)."""
    page = (REPOSITORY / "docs/KUBERNETES.md").read_text().partition("### KubeVirt")[2]
    permitted, machine = (yaml.safe_load(part.partition("```")[0]) for part in page.split("```yaml\n")[1:3])
    (host,) = permitted["spec"]["configuration"]["permittedHostDevices"]["pciHostDevices"]
    name = host["resourceName"]
    assert (host["externalResourceProvider"], machine["devices"]["gpus"][0]["deviceName"]) == (True, name)
    read = facts(tmp_path, TWO)
    vendor, _, model = host["pciVendorSelector"].partition(":")
    assert (int(vendor, 16), int(model, 16)) == (0x10DE, 0x2330)
    (resource,) = make_vfio_inventory(read, "gpu").resources
    found = allocate(resource, ["112"], HostFacts(), Configuration(), Settings())
    assert (resource.name, *found.envs) == (name, "PCI_RESOURCE_" + name.upper().replace("/", "_").replace(".", "_"))


def test_numa_nodes_are_those_of_the_functions(tmp_path: Path) -> None:
    numa = {"0000:3b:00.0": 1, "0000:19:00.0": 0}
    for tree, expected in ((TWO, {"9": 0, "112": 1}), (SINGLE, {"0": 1, "1": 0})):
        (resource,) = make_vfio_inventory(facts(tmp_path / str(len(tree)), tree), "gpu", numa=numa).resources
        assert {device.id: device.numa for device in resource.devices} == expected


def test_without_devices_there_is_a_reason(tmp_path: Path) -> None:
    found = make_vfio_inventory(facts(tmp_path, {**API, **function("0000:5a:00.0", 4, driver="nvidia")}), "gpu")
    assert found.resources == ()
    assert "0000:5a:00.0 (10de:2330) is not bound to vfio-pci, but to nvidia" in found.reason
    assert make_vfio_inventory(VfioFacts(), "gpu").reason == "no GPU is on the PCI bus"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("GH100 [H100 SXM5 80GB]", "GH100_H100_SXM5_80GB"),
        ("a.b/c d", "A_B_C_D"),
        ("x" * 90, "X" * 52),
        ("[]", ""),
        ("GK104.GL [GRID/K520]", "GK104_GL_GRID_K520"),
        ("GeForce   GTX  1080", "GEFORCE_GTX_1080"),
        ("A-B", "A-B"),
        ("Device [Name] (Rev A)", "DEVICE_NAME_REV_A"),
        ("x" * 51 + "-y", "X" * 51),
        ("", ""),
    ],
)
def test_a_model_is_named_as_nvidias_plugin_does(text: str, name: str) -> None:
    assert model_class(text) == name


def test_names_of_models_come_from_the_list_of_pci_ids(tmp_path: Path) -> None:
    path = tmp_path / "pci.ids"
    path.write_text(
        "# a comment\n10dd  Other\n\t2330  No\n10de  NVIDIA Corporation\n\t2330  GH100 [H100 SXM5 80GB]\n"
        "\t\t10de 16c1  subsystem\n\n\t2901  GB100 [B200]\n10df  Another\n\t2331  No\nC 03  Display\n"
    )
    assert read_model_names((str(tmp_path / "absent"), str(path))) == {0x2330: NAMES[0x2330], 0x2901: "GB100 [B200]"}
    assert read_model_names((str(tmp_path / "absent"),)) == {}
    ours = read_model_names((str(tmp_path / "absent"), PCI_IDS[-1]))
    assert ours[0x2330] == NAMES[0x2330], "an image without pci.ids knows the usual ones"
    assert len(ours) >= 12
    assert all(model_class(name) for name in ours.values())
    os.mkfifo(tmp_path / "fifo")  # nobody writes into it: who opened it as a file would wait
    assert read_model_names((str(tmp_path / "fifo"), str(path))) == read_model_names((str(path),))
