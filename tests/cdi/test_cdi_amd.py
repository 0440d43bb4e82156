"""AMD GPUs in a specification: indices, unique ids, partitions, what is left out and why.

The trees follow what sysfs shows on an MI300A host of four GPUs (one topology node per GPU or partition, platform
devices for unused partitions) and on a workstation.
"""

import os
from pathlib import Path

import pytest
from support.drafts import draft_from, draft_of, spec_of
from support.trees import Tree, drm_entries, pci_function, write_tree

from ocigpu.cdi.edits import Draft
from ocigpu.cdi.generate import generate
from ocigpu.core.errors import CdiError
from ocigpu.core.facts import DeviceNode
from ocigpu.gpus.amd.facts import AmdFacts, AmdGpu, find_node, parse_numbers, read_amd_facts, read_amd_fingerprint
from ocigpu.gpus.amd.offers import offer_gpus
from ocigpu.gpus.offer import GenerateOptions
from ocigpu.gpus.tree import find_roots

ONE = 7843934696581995200
TWO = 11940228331418201223


def topology(node: int, minor: int, unique_id: int, location: int, domain: int = 0) -> Tree:
    text = (
        f"cpu_cores_count 0\nsimd_count 912\nlocation_id {location}\ndomain {domain}\n"
        f"drm_render_minor {minor}\nunique_id {unique_id}\n"
    )
    return {f"/sys/class/kfd/kfd/topology/nodes/{node}/properties": text}


def gpu(address: str, card: int, ids: str = "1002:74a0", base_class: str = "1200") -> Tree:
    directory = f"/sys/bus/pci/devices/{address}"
    return {
        **pci_function(address, ids, base_class, "amdgpu"),
        **drm_entries(directory, card, 128 + card),
        f"{directory}/drm/controlD64": f"-> card{card}",
    }


def partition(slot: int, card: int) -> Tree:
    return drm_entries(f"/sys/devices/platform/amdgpu_xcp.{slot}", card, 128 + card)


KFD: Tree = {"/sys/class/kfd/kfd/dev": "234:0\n", "/dev/kfd": ""}
CPU: Tree = {"/sys/class/kfd/kfd/topology/nodes/0/properties": "cpu_cores_count 48\nsimd_count 0\ndrm_render_minor 0\n"}
TWO_GPUS: Tree = {
    **KFD,
    **CPU,
    **gpu("0001:02:00.0", 8),
    **gpu("0000:02:00.0", 0),
    **partition(0, 1),  # slots that are not in use: nodes, but not in the topology
    **partition(1, 9),
    **topology(1, 128, ONE, 512),
    **topology(2, 136, TWO, 512, domain=1),
}
PARTITIONED: Tree = {
    **TWO_GPUS,
    # partition 1 of GPU 0 (KFD writes its number in place of the function), slots in an order of their own
    **topology(3, 129, ONE, 513),
    **partition(10, 2),
    **topology(4, 130, ONE, 514),
}


def devices(result: Draft) -> dict[str, list[str]]:
    return {
        device.name: [node["path"].rpartition("/")[2] for node in device.edits["deviceNodes"]]
        for device in result.devices
    }


CASES: dict[str, tuple[Tree, GenerateOptions, dict[str, list[str]]]] = {
    "by index, in the order of PCI addresses": (
        TWO_GPUS,
        GenerateOptions(name_strategies=("index",)),
        {"0": ["card0", "renderD128"], "1": ["card8", "renderD136"]},
    ),
    "by unique id as AMD's tools write it": (
        TWO_GPUS,
        GenerateOptions(name_strategies=("uuid",)),
        {f"0x{ONE:x}": ["card0", "renderD128"], f"0x{TWO:x}": ["card8", "renderD136"]},
    ),
    "both, and by type": (
        TWO_GPUS,
        GenerateOptions(name_strategies=("index", "uuid", "type-index"), device_ids=("1",)),
        {name: ["card8", "renderD136"] for name in ("1", f"0x{TWO:x}", "gpu1")},
    ),
    "one GPU by its unique id": (
        TWO_GPUS,
        GenerateOptions(name_strategies=("index",), device_ids=(f"0x{ONE:x}",)),
        {"0": ["card0", "renderD128"]},
    ),
    "partitions are devices, after one another": (
        PARTITIONED,
        GenerateOptions(name_strategies=("index",)),
        {
            "0": ["card0", "renderD128"],
            "1": ["card1", "renderD129"],
            "2": ["card2", "renderD130"],
            "3": ["card8", "renderD136"],
        },
    ),
    "partitions share their GPU's unique id": (
        PARTITIONED,
        GenerateOptions(name_strategies=("uuid",), device_ids=(f"0x{ONE:x}",)),
        {f"0x{ONE:x}:{number}": [f"card{number}", f"renderD{128 + number}"] for number in range(3)},
    ),
    "all partitions of a GPU by its PCI address": (
        PARTITIONED,
        GenerateOptions(name_strategies=("index",), device_ids=("0000:02:00.0",)),
        {str(number): [f"card{number}", f"renderD{128 + number}"] for number in range(3)},
    ),
    "partitions with unique ids of their own": (
        {**PARTITIONED, **topology(3, 129, 0xA1, 513), **topology(4, 130, 0xA2, 514)},
        GenerateOptions(name_strategies=("uuid",), device_ids=("0", "1", "2")),
        {f"0x{ONE:x}": ["card0", "renderD128"], "0xa1": ["card1", "renderD129"], "0xa2": ["card2", "renderD130"]},
    ),
}


@pytest.mark.parametrize(("tree", "options", "expected"), CASES.values(), ids=CASES.keys())
def test_gpus_become_devices(
    tmp_path: Path, tree: Tree, options: GenerateOptions, expected: dict[str, list[str]]
) -> None:
    result = draft_from("amd", options, write_tree(tmp_path, tree))
    assert devices(result) == expected
    assert (result.source, result.vendor, result.device_class) == ("amd", "amd.com", "gpu")
    assert [node["path"] for node in result.common["deviceNodes"]] == ["/dev/kfd"]
    assert not result.skipped
    spec_of(result)


def test_vendor_and_class_can_be_chosen(tmp_path: Path) -> None:
    result = draft_from(
        "amd", GenerateOptions(vendor="example.com", device_class="accelerator"), write_tree(tmp_path, TWO_GPUS)
    )
    assert (result.vendor, result.device_class) == ("example.com", "accelerator")


def test_a_gpu_without_amdgpu_is_left_out_with_the_reason(tmp_path: Path) -> None:
    tree = {
        **TWO_GPUS,
        **pci_function("0000:43:00.0", "1002:744c", "0300", "vfio-pci"),
        **pci_function("0000:44:00.0", "1002:744c", "0300"),
        **pci_function("0000:44:00.1", "1002:ab30", "0403", "snd_hda_intel"),
        **pci_function("0000:45:00.0", "10de:2330", "0302", "nvidia"),
    }
    result = draft_from("amd", GenerateOptions(), write_tree(tmp_path, tree))
    assert result.skipped == (
        "GPU 0000:43:00.0 (1002:744c) is not bound to amdgpu, but to vfio-pci",
        "GPU 0000:44:00.0 (1002:744c) is not bound to amdgpu, but to no driver",
    )


def test_a_gpu_that_kfd_does_not_know_comes_last_and_is_named(tmp_path: Path) -> None:
    tree = {**KFD, **CPU, **gpu("0000:01:00.0", 1), **gpu("0000:02:00.0", 0), **topology(1, 128, ONE, 512)}
    result = draft_from("amd", GenerateOptions(), write_tree(tmp_path, tree))
    assert devices(result) == {
        "0": ["card0", "renderD128"],
        f"0x{ONE:x}": ["card0", "renderD128"],
        "1": ["card1", "renderD129"],
        "0000:01:00.0": ["card1", "renderD129"],
    }
    assert result.notes == ("GPU 1 (0000:01:00.0) is not in KFD's topology: ROCm cannot use it",)


def test_without_kfd_there_is_a_note_and_graphics_still_work(tmp_path: Path) -> None:
    tree = {path: text for path, text in TWO_GPUS.items() if not path.endswith(("/kfd", "/kfd/dev"))}
    result = draft_from("amd", GenerateOptions(), write_tree(tmp_path, tree))
    assert result.common == {}
    assert result.notes == ("the host has no /dev/kfd: ROCm will not work in containers",)


REFUSED: dict[str, tuple[Tree, tuple[str, ...], str]] = {
    "no GPU": (KFD, ("all",), "no AMD GPU: amdgpu drives no PCI device"),
    "only one without the driver": (
        pci_function("0000:43:00.0", "1002:744c", "0300", "vfio-pci"),
        ("all",),
        "is not bound to amdgpu, but to vfio-pci",
    ),
    "an id that no GPU has": (TWO_GPUS, ("9",), 'device id "9": no such AMD GPU; available: 0, 1'),
    "a GPU without nodes": (
        {**KFD, **pci_function("0000:43:00.0", "1002:744c", "0300", "amdgpu")},
        ("all",),
        "GPU 0 (0000:43:00.0) has no nodes below /dev/dri",
    ),
}


@pytest.mark.parametrize(("tree", "ids", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_nothing_to_give_is_an_error(tmp_path: Path, tree: Tree, ids: tuple[str, ...], message: str) -> None:
    with pytest.raises(CdiError) as caught:
        draft_from("amd", GenerateOptions(device_ids=ids), write_tree(tmp_path, tree))
    assert caught.value.code == "OCIGPU-CDI-7"
    assert message in str(caught.value)


def node(path: str, mode: int = 0o660, gid: int = 0) -> DeviceNode:
    return DeviceNode(path, path, 226, 128, mode, 0, gid)


FACTS = AmdFacts(
    (AmdGpu("0000:02:00.0", -1, 0, True, (node("/dev/dri/card0", gid=44), node("/dev/dri/renderD128", gid=105))),),
    node("/dev/kfd", 0o666, 105),
)


def test_groups_of_nodes_are_given_where_others_may_not_open_them() -> None:
    result = draft_of(offer_gpus(FACTS, GenerateOptions()), GenerateOptions())
    assert [device.name for device in result.devices] == ["0", "0000:02:00.0"], "no unique id: its address"
    assert result.devices[0].edits == {
        "deviceNodes": [
            {"path": "/dev/dri/card0", "fileMode": 0o660, "permissions": "rw", "gid": 44},
            {"path": "/dev/dri/renderD128", "fileMode": 0o660, "permissions": "rw", "gid": 105},
        ],
        "additionalGids": [44, 105],
    }
    assert result.common == {"deviceNodes": [{"path": "/dev/kfd", "fileMode": 0o666, "permissions": "rw", "gid": 105}]}
    plain = draft_of(
        offer_gpus(FACTS, GenerateOptions(feature_flags=("no-additional-gids-for-device-nodes",))),
        GenerateOptions(feature_flags=("no-additional-gids-for-device-nodes",)),
    )
    assert "additionalGids" not in plain.devices[0].edits


def test_a_gpu_without_unique_id_is_named_by_its_address() -> None:
    options = GenerateOptions(name_strategies=("uuid",))
    assert [device.name for device in draft_of(offer_gpus(FACTS, options), options).devices] == ["0000:02:00.0"]
    parts = tuple(FACTS.gpus[0]._replace(partition=number) for number in (0, 1))
    draft = draft_of(offer_gpus(FACTS._replace(gpus=parts), options), options)
    assert [device.name for device in draft.devices] == ["0000:02:00.0:0", "0000:02:00.0:1"]
    chosen = options._replace(device_ids=("0000:02:00.0:1",))
    assert [each.name for each in offer_gpus(FACTS._replace(gpus=parts), chosen).devices] == ["0000:02:00.0:1"]


def test_gpus_with_equal_unique_ids_get_no_name_by_them() -> None:
    twins = tuple(FACTS.gpus[0]._replace(address=f"0000:0{number}:00.0", unique_id=1) for number in (2, 3))
    result = draft_of(offer_gpus(FACTS._replace(gpus=twins), GenerateOptions()), GenerateOptions())
    assert [device.name for device in result.devices] == ["0", "0000:02:00.0", "1", "0000:03:00.0"]


@pytest.mark.parametrize(
    "text",
    ["", "simd_count 0\ndrm_render_minor 128\n", "simd_count 4\ndrm_render_minor 0\n", "simd_count x\n", "\0 \0"],
    ids=["empty", "cpu", "no render node", "no number", "binary"],
)
def test_topology_files_without_a_gpu_are_passed_over(text: str) -> None:
    assert find_node(parse_numbers(text)) is None


def test_the_fingerprint_changes_with_partitions_and_nodes(tmp_path: Path) -> None:
    settings = write_tree(tmp_path, TWO_GPUS)
    before = dict(read_amd_fingerprint(settings))
    assert before == dict(read_amd_fingerprint(settings))
    assert before["gpus"].startswith("2-")
    os.chmod(tmp_path / "dev/dri/renderD128", 0o600)
    write_tree(tmp_path, {**topology(3, 129, ONE, 513)})
    after = dict(read_amd_fingerprint(settings))
    assert after["gpus"].startswith("3-")
    assert after["nodes"] != before["nodes"]


def test_facts_of_a_host_without_amd_are_empty(tmp_path: Path) -> None:
    settings = write_tree(tmp_path, pci_function("0000:45:00.0", "10de:2330", "0302", "nvidia"))
    assert read_amd_facts(find_roots(settings)) == AmdFacts()


def test_the_vendor_amd_gives_a_specification_of_amd(tmp_path: Path) -> None:
    spec = generate(GenerateOptions(vendor="amd", name_strategies=("index",)), write_tree(tmp_path, TWO_GPUS)).spec
    assert (spec["kind"], spec["annotations"]["ocigpu/fingerprint"][:18]) == ("amd.com/gpu", "source=amd gpus=2-")
    assert [(device["name"], len(device["containerEdits"]["deviceNodes"])) for device in spec["devices"]] == [
        ("0", 2),
        ("1", 2),
        ("all", 4),
    ]
    assert [node["path"] for node in spec["containerEdits"]["deviceNodes"]] == ["/dev/kfd"]
