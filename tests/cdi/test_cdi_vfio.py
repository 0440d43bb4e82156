"""GPUs for virtual machines: groups and single functions, what is not viable and why, NVSwitches."""

from pathlib import Path

import pytest
from support.drafts import draft_from, spec_of
from support.trees import Tree, pci_function, write_tree

from ocigpu.cdi.edits import Draft
from ocigpu.cdi.generate import generate
from ocigpu.core.errors import CdiError
from ocigpu.gpus.offer import GenerateOptions
from ocigpu.gpus.vfio.facts import read_vfio_fingerprint

H100, AUDIO, SWITCH = "10de:2330", "10de:22bb", "10de:22a3"
API: Tree = {"/sys/class/misc/vfio/dev": "10:196\n", "/dev/vfio/vfio": ""}
IOMMUFD: Tree = {"/dev/iommu": ""}


def group_node(group: int) -> Tree:
    return {f"/sys/class/vfio/{group}/dev": f"242:{group}\n", f"/dev/vfio/{group}": ""}


def cdev(address: str, number: int) -> Tree:
    return {
        f"/sys/bus/pci/devices/{address}/vfio-dev/vfio{number}/dev": f"511:{number}\n",
        f"/dev/vfio/devices/vfio{number}": "",
    }


def gpu(address: str, group: int, driver: str = "vfio-pci", ids: str = H100) -> Tree:
    return {**pci_function(address, ids, "0302", driver, str(group)), **group_node(group)}


def switch(address: str, group: int) -> Tree:
    return {**pci_function(address, SWITCH, "0680", "vfio-pci", str(group)), **group_node(group)}


TWO: Tree = {**API, **gpu("0000:3b:00.0", 112), **gpu("0000:19:00.0", 9)}
TWO_SINGLE: Tree = {**TWO, **IOMMUFD, **cdev("0000:3b:00.0", 0), **cdev("0000:19:00.0", 1)}


def devices(result: Draft) -> dict[str, list[str]]:
    return {device.name: [node["path"] for node in device.edits["deviceNodes"]] for device in result.devices}


CASES: dict[str, tuple[Tree, GenerateOptions, dict[str, list[str]]]] = {
    "groups, by number": (
        TWO,
        GenerateOptions(),
        {"9": ["/dev/vfio/vfio", "/dev/vfio/9"], "112": ["/dev/vfio/vfio", "/dev/vfio/112"]},
    ),
    "single functions with iommufd": (
        TWO_SINGLE,
        GenerateOptions(),
        {"0": ["/dev/vfio/devices/vfio0"], "1": ["/dev/vfio/devices/vfio1"]},
    ),
    "no iommufd, whatever nodes there are": (
        {path: text for path, text in TWO_SINGLE.items() if path != "/dev/iommu"},
        GenerateOptions(),
        {"9": ["/dev/vfio/vfio", "/dev/vfio/9"], "112": ["/dev/vfio/vfio", "/dev/vfio/112"]},
    ),
    "one function without a node of its own: groups": (
        {path: text for path, text in TWO_SINGLE.items() if "19:00.0/vfio-dev" not in path},
        GenerateOptions(),
        {"9": ["/dev/vfio/vfio", "/dev/vfio/9"], "112": ["/dev/vfio/vfio", "/dev/vfio/112"]},
    ),
    "Grace Hopper's own driver": (
        {**API, **gpu("0009:01:00.0", 3, "nvgrace_gpu_vfio_pci", "10de:2342")},
        GenerateOptions(),
        {"3": ["/dev/vfio/vfio", "/dev/vfio/3"]},
    ),
    "two GPUs of a group are one device": (
        {**API, **gpu("0000:3b:00.0", 7), **gpu("0000:3c:00.0", 7)},
        GenerateOptions(),
        {"7": ["/dev/vfio/vfio", "/dev/vfio/7"]},
    ),
    "audio on VFIO, a bridge and an unbound function do no harm": (
        {
            **API,
            **gpu("0000:3b:00.0", 7),
            **pci_function("0000:3b:00.1", AUDIO, "0403", "vfio-pci", "7"),
            **pci_function("0000:3a:00.0", "8086:2030", "0604", "pcieport", "7"),
            **pci_function("0000:3b:00.2", "10de:1ad8", "0c03", "", "7"),
        },
        GenerateOptions(),
        {"7": ["/dev/vfio/vfio", "/dev/vfio/7"]},
    ),
    "by PCI address": (
        TWO,
        GenerateOptions(device_ids=("0000:3b:00.0",)),
        {"112": ["/dev/vfio/vfio", "/dev/vfio/112"]},
    ),
    "by group": (TWO, GenerateOptions(device_ids=("9",)), {"9": ["/dev/vfio/vfio", "/dev/vfio/9"]}),
    "NVSwitches by their class": (
        {**TWO, **switch("0000:c1:00.0", 30)},
        GenerateOptions(device_class="nvswitch"),
        {"30": ["/dev/vfio/vfio", "/dev/vfio/30"]},
    ),
}


@pytest.mark.parametrize(("tree", "options", "expected"), CASES.values(), ids=CASES.keys())
def test_functions_of_vfio_become_devices(
    tmp_path: Path, tree: Tree, options: GenerateOptions, expected: dict[str, list[str]]
) -> None:
    result = draft_from("vfio", options, write_tree(tmp_path, tree))
    assert devices(result) == expected
    assert (result.source, result.vendor, result.device_class) == (
        "vfio",
        "nvidia.com",
        options.device_class or "pgpu",
    )
    assert result.skipped == ()
    assert result.max_version == "0.5.0"
    spec_of(result)  # which has that version


def test_a_node_has_the_access_that_the_device_plugin_gives(tmp_path: Path) -> None:
    result = draft_from("vfio", GenerateOptions(), write_tree(tmp_path, {**API, **gpu("0000:3b:00.0", 7)}))
    assert [
        (node["path"], node["permissions"], node["hostPath"]) for node in result.devices[0].edits["deviceNodes"]
    ] == [
        ("/dev/vfio/vfio", "rwm", f"{tmp_path}/dev/vfio/vfio"),
        ("/dev/vfio/7", "rwm", f"{tmp_path}/dev/vfio/7"),
    ]
    assert result.common == {}


SKIPPED: dict[str, tuple[Tree, str]] = {
    "the driver has it": (
        gpu("0000:4b:00.0", 40, "nvidia"),
        "GPU 0000:4b:00.0 (10de:2330) is not bound to vfio-pci, but to nvidia",
    ),
    "no driver": (
        gpu("0000:4b:00.0", 40, ""),
        "GPU 0000:4b:00.0 (10de:2330) is not bound to vfio-pci, but to no driver",
    ),
    "audio with its own driver": (
        {**gpu("0000:4b:00.0", 40), **pci_function("0000:4b:00.1", AUDIO, "0403", "snd_hda", "40")},
        "GPU 0000:4b:00.0 (10de:2330) is in IOMMU group 40, of which 0000:4b:00.1 (10de:22bb) is bound to snd_hda",
    ),
    "a disk in the group": (
        {**gpu("0000:4b:00.0", 40), **pci_function("0000:4c:00.0", "144d:a80a", "0108", "nvme", "40")},
        "GPU 0000:4b:00.0 (10de:2330) is in IOMMU group 40, of which 0000:4c:00.0 (144d:a80a) is bound to nvme",
    ),
    "no IOMMU": (
        pci_function("0000:4b:00.0", H100, "0302", "vfio-pci"),
        "GPU 0000:4b:00.0 (10de:2330) is in no IOMMU group: the host's IOMMU is off",
    ),
    "no node of the group": (
        pci_function("0000:4b:00.0", H100, "0302", "vfio-pci", "40"),
        "GPU 0000:4b:00.0 (10de:2330) cannot be opened: the host has no /dev/vfio/40",
    ),
}


@pytest.mark.parametrize(("tree", "reason"), SKIPPED.values(), ids=SKIPPED.keys())
def test_what_cannot_be_given_is_left_out_with_the_reason(tmp_path: Path, tree: Tree, reason: str) -> None:
    result = draft_from("vfio", GenerateOptions(), write_tree(tmp_path / "with", {**TWO, **tree}))
    assert list(devices(result)) == ["9", "112"]
    assert result.skipped == (reason,)
    with pytest.raises(CdiError) as caught:  # and alone it is an error that says the same
        draft_from("vfio", GenerateOptions(), write_tree(tmp_path / "alone", {**API, **tree}))
    assert caught.value.code == "OCIGPU-CDI-7"
    assert str(caught.value) == f"no GPU for virtual machines: {reason}"


def test_an_id_that_no_device_has_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CdiError, match='device id "0": no such VFIO device; available: 9, 112'):
        draft_from("vfio", GenerateOptions(device_ids=("0",)), write_tree(tmp_path, TWO))


def test_a_host_without_gpus_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CdiError, match="no NVSwitch for virtual machines: no NVSwitch is on the PCI bus"):
        draft_from("vfio", GenerateOptions(device_class="nvswitch"), write_tree(tmp_path, TWO))


def test_a_note_says_which_gpu_a_device_is(tmp_path: Path) -> None:
    tree = {**TWO, **gpu("0000:3c:00.0", 112), **switch("0000:c1:00.0", 30)}
    names = [f"0000:{bus}:00.0 (10de:2330)" for bus in ("19", "3b", "3c")]
    assert draft_from("vfio", GenerateOptions(), write_tree(tmp_path, tree)).notes == (
        f"devices are named by IOMMU group: 9 is {names[0]}; 112 is {names[1]} and {names[2]}",
        "NVSwitches that are bound to VFIO too: 1; --class nvswitch selects them",
    )


def test_functions_of_one_group_go_to_one_machine_only(tmp_path: Path) -> None:
    tree = {**TWO_SINGLE, **gpu("0000:3c:00.0", 112), **cdev("0000:3c:00.0", 12)}
    assert draft_from("vfio", GenerateOptions(), write_tree(tmp_path, tree)).notes[1:] == (
        "devices 0, 12 share IOMMU group 112: they can only go to the same virtual machine",
    )


def test_a_switch_in_the_group_of_a_gpu_goes_with_the_gpu(tmp_path: Path) -> None:
    settings = write_tree(tmp_path, {**TWO, **switch("0000:c1:00.0", 9), **switch("0000:c2:00.0", 31)})
    assert list(devices(draft_from("vfio", GenerateOptions(), settings))) == ["9", "112"]
    result = draft_from("vfio", GenerateOptions(device_class="nvswitch"), settings)
    assert list(devices(result)) == ["31"]
    assert result.skipped == (
        "NVSwitch 0000:c1:00.0 (10de:22a3) is passed with the GPU 0000:19:00.0 (10de:2330), by IOMMU group 9",
    )


def test_the_fingerprint_changes_when_a_function_changes_its_driver(tmp_path: Path) -> None:
    settings = write_tree(tmp_path, TWO)
    before = dict(read_vfio_fingerprint(settings))
    assert before["gpus"].startswith("2-")
    assert before["iommufd"] == "no"
    write_tree(tmp_path, {**gpu("0000:4b:00.0", 40), **IOMMUFD})
    after = dict(read_vfio_fingerprint(settings))
    assert after["gpus"].startswith("3-")
    assert after["iommufd"] == "yes"
    assert after["nodes"] != before["nodes"]
    # a function of the group that gets another driver makes it unusable
    write_tree(tmp_path, pci_function("0000:4b:00.1", AUDIO, "0403", "snd_hda_intel", "40"))
    assert dict(read_vfio_fingerprint(settings))["groups"] != after["groups"]


def test_the_specification_has_the_version_that_kata_reads_unless_another_is_asked_for(tmp_path: Path) -> None:
    settings = write_tree(tmp_path, TWO)
    generated = generate(GenerateOptions(mode="vfio"), settings)
    assert (generated.spec["kind"], generated.spec["cdiVersion"]) == ("nvidia.com/pgpu", "0.5.0")
    assert "annotations" not in generated.spec
    assert [device["name"] for device in generated.spec["devices"]] == ["112", "9", "all"]
    newer = generate(GenerateOptions(mode="vfio", max_version="1.0.0", all_device=False), settings).spec
    assert (newer["cdiVersion"], len(newer["devices"])) == ("0.6.0", 2)
    assert newer["annotations"]["ocigpu/fingerprint"].startswith("source=vfio gpus=2-")
