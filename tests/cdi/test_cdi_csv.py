"""Tegra systems: CSV files to nodes, mounts, links and hooks; one device, or an integrated and a discrete GPU."""

import os
import stat
from pathlib import Path

import pytest
from support.drafts import draft_from, draft_of, spec_of
from support.trees import Tree, shared_object, write_tree

from ocigpu.cdi.edits import DEFAULT_HOOKS, Draft, HookOptions
from ocigpu.cdi.generate import generate
from ocigpu.core.errors import CdiError
from ocigpu.core.facts import DeviceNode, Gpu, HostFile
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.nvml import NvmlAnswer
from ocigpu.gpus.offer import GenerateOptions, is_library
from ocigpu.gpus.tegra import CSV_DIRECTORY, is_tegra
from ocigpu.gpus.tegra.facts import (
    CSV_FILES,
    CsvFacts,
    expand,
    is_ignored,
    is_integrated,
    matches_name,
    matches_path,
    parse_csv,
    read_csv_facts,
    read_csv_fingerprint,
    read_gpu_nodes,
)
from ocigpu.gpus.tegra.offers import offer_listed
from ocigpu.gpus.tree import Tree as HostTree
from ocigpu.gpus.tree import find_roots

LIB = "/usr/lib/aarch64-linux-gnu"
HOOK = HookOptions("/usr/bin/ocigpu-hook", enabled=DEFAULT_HOOKS)
VENDOR_HOOK = HOOK._replace(path="/usr/bin/nvidia-cdi-hook")

PARSED: dict[str, tuple[str, list[tuple[str, str]], int]] = {
    "every type": (
        "dev, /dev/a\ndir,/d\nlib , /l.so\nsym,/s\n",
        [("dev", "/dev/a"), ("dir", "/d"), ("lib", "/l.so"), ("sym", "/s")],
        0,
    ),
    "a comma in the path": ("lib, /a,b.so", [("lib", "/a,b.so")], 0),
    "bad lines are passed over": ("foo,/a\nlib\nlib,\n,/b\n\n  \nlib,/c", [("lib", "/c")], 4),
    "empty": ("", [], 0),
}


@pytest.mark.parametrize(("text", "expected", "bad"), PARSED.values(), ids=PARSED.keys())
def test_lines_are_a_type_and_a_path(text: str, expected: list[tuple[str, str]], bad: int) -> None:
    entries, wrong = parse_csv(text)
    assert [tuple(entry) for entry in entries] == expected
    assert wrong == bad


@pytest.mark.parametrize(
    ("path", "patterns", "expected"),
    [
        ("/usr/lib/x/libfoo.so", ("**/libfoo.so",), True),
        ("/usr/lib/x/libfoo.so", ("**/lib*.so",), True),
        ("/usr/lib/x/libfoo.so", ("*.so",), False),
        ("/usr/lib/x/libfoo.so", ("/usr/lib/*/libfoo.so",), True),
        ("/usr/lib/x/libfoo.so", ("/usr/lib/*.so",), False),
        ("/usr/lib/x/libfoo.so", ("/usr/lib/x/libfoo.so",), True),
        ("/usr/lib/x/libfoo.so", (), False),
    ],
)
def test_ignore_patterns_match_a_name_or_the_whole_path(path: str, patterns: tuple[str, ...], expected: bool) -> None:
    assert is_ignored(path, patterns) is expected


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("nvidia*", "nvidia0", True),
        ("nvidia?", "nvidia", False),
        ("nv*a*0", "nvidia-caps0", True),
        ("nvidia[0-9]", "nvidia7", True),
        ("nvidia[!0-9]", "nvidia7", False),
        ("nvidia[^a]", "nvidia7", True),
        ("a[]]b", "a]b", True),
        ("a[b", "a[b", True),
        ("a.b", "axb", False),
        ("", "", True),
        ("*", "", True),
        ("*a*a*a*a*a*a*a*a*b", "a" * 200, False),
    ],
)
def test_patterns_match_names(pattern: str, name: str, expected: bool) -> None:
    assert matches_name(pattern, name) is expected


def test_a_star_stays_within_one_part_of_a_path(tmp_path: Path) -> None:
    assert not matches_path("/dev/*", "/dev/dri/card0")
    write_tree(tmp_path, {"/dev/nvhost-a": "", "/dev/nvhost-b": "", "/dev/.nvhost-c": "", "/dev/d/nvhost-e": ""})
    assert expand(HostTree(str(tmp_path)), "/dev/*nvhost-*") == ["/dev/nvhost-a", "/dev/nvhost-b"]
    assert expand(HostTree(str(tmp_path)), "/*/d/nvhost-?") == ["/dev/d/nvhost-e"]


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"/etc/nv_tegra_release": "# R36"}, True),
        ({"/sys/devices/soc0/family": "Tegra\n"}, True),
        ({"/sys/devices/soc0/family": "i.MX\n"}, False),
        ({"/etc/": ""}, False),
    ],
    ids=["release file", "chip family", "another chip", "nothing"],
)
def test_a_tegra_system_is_known_by_its_files(tmp_path: Path, tree: Tree, expected: bool) -> None:
    assert is_tegra(write_tree(tmp_path, tree)) is expected


ORIN: Tree = {
    "/etc/nv_tegra_release": "# R36 (release), REVISION: 4.0\n",
    f"{CSV_DIRECTORY}/devices.csv": "dev, /dev/nvidia0\n",
    f"{CSV_DIRECTORY}/drivers.csv": (
        f"lib, {LIB}/tegra/libcuda.so.1.1\nlib, {LIB}/nvidia/libnvidia-ml.so.1\n"
        f"sym, {LIB}/libchain.so\nsym, {LIB}/libignored.so\ndir, /lib/firmware/tegra\nlib, {LIB}/libmissing.so.1\n"
    ),
    f"{LIB}/tegra/libcuda.so.1.1": "no ELF",
    f"{LIB}/tegra/libcuda.so.1": "-> libcuda.so.1.1",
    f"{LIB}/nvidia/libnvidia-ml.so.1": "no ELF",
    f"{LIB}/libchain.so": "-> libchain.so.2",
    f"{LIB}/libchain.so.2": f"-> {LIB}/tegra/libchain.so.2.3",
    f"{LIB}/tegra/libchain.so.2.3": "no ELF",
    f"{LIB}/libignored.so": "-> libchain.so.2",
    "/lib/firmware/tegra/": "",
}


def read(settings: Settings, ignore: tuple[str, ...] = ("**/libignored*",)) -> CsvFacts:
    return read_csv_facts(find_roots(settings), CSV_FILES, ignore)


def test_files_of_an_orin_are_read(tmp_path: Path) -> None:
    facts = read(write_tree(tmp_path, ORIN))
    assert [(file.container_path, file.kind) for file in facts.files] == [
        (f"{LIB}/tegra/libcuda.so.1.1", "file"),
        (f"{LIB}/nvidia/libnvidia-ml.so.1", "file"),
        (f"{LIB}/tegra/libchain.so.2.3", "file"),
        ("/lib/firmware/tegra", "directory"),
        ("/etc/nv_tegra_release", "file"),
    ]
    assert all(file.host_path == f"{tmp_path}{file.container_path}" for file in facts.files)
    assert {path: target for target, path in facts.links} == {
        f"{LIB}/tegra/libcuda.so": "libcuda.so.1",
        f"{LIB}/libchain.so": "libchain.so.2",
        f"{LIB}/libchain.so.2": f"{LIB}/tegra/libchain.so.2.3",
    }
    assert facts.notes == (
        *(f"{tmp_path}{path}: missing; passed over" for path in CSV_FILES if path.endswith("l4t.csv")),
        f"entries of the CSV files that this host does not have: 2 (/dev/nvidia0, {LIB}/libmissing.so.1)",
    )


def test_a_library_gets_the_links_that_the_host_has_for_its_soname(tmp_path: Path) -> None:
    tree: Tree = {
        f"{CSV_DIRECTORY}/l4t.csv": f"lib, {LIB}/libnvfoo.so.1.2.3\nlib, {LIB}/libnvbar.so.1.2.3\n",
        f"{LIB}/libnvfoo.so.1.2.3": shared_object("libnvfoo.so.1"),
        f"{LIB}/libnvfoo.so.1": "-> libnvfoo.so.1.2.3",
        f"{LIB}/libnvfoo.so": "-> libnvfoo.so.1",
        f"{LIB}/libnvbar.so.1.2.3": shared_object("libnvbar.so.1"),
    }
    assert read(write_tree(tmp_path, tree)).links == (
        ("libnvfoo.so.1.2.3", f"{LIB}/libnvfoo.so.1"),
        ("libnvfoo.so.1", f"{LIB}/libnvfoo.so"),
    )


def test_libraries_are_also_looked_for_in_directories_that_are_named(tmp_path: Path) -> None:
    tree: Tree = {f"{CSV_DIRECTORY}/l4t.csv": "lib, libnvfoo.so.1\n", "/opt/lib/libnvfoo.so.1": ""}
    roots = find_roots(write_tree(tmp_path, tree))
    facts = read_csv_facts(roots, CSV_FILES, (), ("/opt/lib",))
    assert [file.container_path for file in facts.files] == ["/opt/lib/libnvfoo.so.1"]


@pytest.mark.root
def test_nodes_are_character_devices_that_patterns_match(tmp_path: Path) -> None:
    tree: Tree = {
        "/etc/nv_tegra_release": "# R36\n",
        f"{CSV_DIRECTORY}/devices.csv": "dev, /dev/nvhost-*\n",
        "/dev/nvhost-file": "",
        f"{LIB}/libnvidia-ml.so.1": "no ELF",
    }
    settings = write_tree(tmp_path, tree)
    for minor, name in enumerate(("nvhost-a", "nvhost-b", "nvidia2", "nvidiactl")):
        os.mknod(tmp_path / "dev" / name, 0o640 | stat.S_IFCHR, os.makedev(195, minor))
    os.chown(tmp_path / "dev/nvhost-b", 0, 44)
    facts = read(settings)
    assert [(node.container_path, node.gid) for node in facts.nodes] == [("/dev/nvhost-a", 0), ("/dev/nvhost-b", 44)]
    assert [node.container_path for node in facts.control_nodes] == ["/dev/nvidiactl"]
    assert facts.second_node is not None
    result = draft_from("csv", GenerateOptions(hook_path="/usr/bin/true"), settings)
    assert [device.name for device in result.devices] == ["0"]
    assert any("NVML cannot be loaded" in text for text in result.notes)
    spec_of(result)
    spec = generate(GenerateOptions(), settings).spec  # the mode is found by itself
    assert [device["name"] for device in spec["devices"]] == ["0", "all"]
    assert spec["annotations"]["ocigpu/fingerprint"].startswith("source=csv release=1-")


def node(path: str, gid: int = 0) -> DeviceNode:
    return DeviceNode(path, path, 1, 2, 0o660, 0, gid)


def libraries(*paths: str) -> tuple[HostFile, ...]:
    return tuple(HostFile(path, path) for path in paths)


FACTS = CsvFacts(
    nodes=(node("/dev/nvidia0"), node("/dev/nvidia1"), node("/dev/nvidiactl"), node("/dev/nvmap", 44)),
    files=libraries(f"{LIB}/tegra/libcuda.so.1.1", f"{LIB}/nvidia/libnvidia-ml.so.1", "/etc/nv_tegra_release"),
    links=(("libcuda.so.1", f"{LIB}/tegra/libcuda.so"),),
    control_nodes=(node("/dev/nvidiactl"),),
    second_node=node("/dev/nvidia2"),
)
ORIN_GPU = Gpu(0, -1, "54d0709b-558d-5a59-9c65-0c5fc14a21a4", "", "Orin (nvgpu)")
THOR_GPU = Gpu(0, 0, "GPU-11111111-aaaa", "00000000:01:00.0", "NVIDIA Thor")
DISCRETE = Gpu(1, 1, "GPU-22222222-bbbb", "00000000:a1:00.0", "NVIDIA RTX A6000")
ORIN_ANSWER = NvmlAnswer(cuda_version="13.1", gpus=(ORIN_GPU,))
TWO_ANSWER = NvmlAnswer(cuda_version="13.1", gpus=(THOR_GPU, DISCRETE))
LINK = f"libcuda.so.1::{LIB}/tegra/libcuda.so"


def devices(result: Draft) -> dict[str, tuple[list[str], list[int]]]:
    return {
        device.name: (
            [item["path"].removeprefix("/dev/") for item in device.edits["deviceNodes"]],
            device.edits.get("additionalGids", []),
        )
        for device in result.devices
    }


ALL_NODES = (["nvidia0", "nvidia1", "nvidiactl", "nvmap"], [44])
FIRST = (["nvidia0", "nvidiactl", "nvmap", "nvidia2"], [44])
SECOND = (["nvidia1", "nvidiactl", "nvmap"], [44])
SETS: dict[str, tuple[NvmlAnswer | None, GenerateOptions, dict[str, tuple[list[str], list[int]]]]] = {
    "no NVML": (None, GenerateOptions(), {"0": ALL_NODES}),
    "by its index": (None, GenerateOptions(device_ids=("0",)), {"0": ALL_NODES}),
    "one GPU": (ORIN_ANSWER, GenerateOptions(), {"0": ALL_NODES}),
    "integrated and discrete": (
        TWO_ANSWER,
        GenerateOptions(),
        {"0": FIRST, THOR_GPU.uuid: FIRST, "1": SECOND, DISCRETE.uuid: SECOND},
    ),
    "the discrete one by UUID, named by type": (
        TWO_ANSWER,
        GenerateOptions(device_ids=(DISCRETE.uuid,), name_strategies=("type-index",)),
        {"gpu1": SECOND},
    ),
    "the integrated one by a bare UUID": (
        TWO_ANSWER,
        GenerateOptions(device_ids=("11111111-aaaa",), name_strategies=("index",)),
        {"0": FIRST},
    ),
    "one device by feature flag": (
        TWO_ANSWER,
        GenerateOptions(feature_flags=("disable-multiple-csv-devices",)),
        {"0": ALL_NODES},
    ),
}


@pytest.mark.parametrize(("answer", "options", "expected"), SETS.values(), ids=SETS.keys())
def test_gpus_become_devices(
    answer: NvmlAnswer | None, options: GenerateOptions, expected: dict[str, tuple[list[str], list[int]]]
) -> None:
    result = draft_of(offer_listed(FACTS, answer, (node("/dev/nvidia1"),), options, HOOK.ldconfig), options, HOOK)
    assert devices(result) == expected
    assert (result.source, result.vendor, result.device_class) == ("csv", "nvidia.com", "gpu")
    spec_of(result)


def test_a_discrete_gpu_has_the_permissions_that_the_driver_gives(tmp_path: Path) -> None:
    params = "DeviceFileGID: 44\nDeviceFileMode: 432\n"
    write_tree(tmp_path, {"/proc/driver/nvidia/params": params})
    roots = find_roots(Settings(simulation_root=str(tmp_path)))
    (found,) = read_gpu_nodes(roots, Gpu(1, 1, "GPU-1", ""))
    assert found == DeviceNode("/dev/nvidia1", "", 195, 1, 0o660, 0, 44)


def test_another_order_of_gpus_gives_one_device_and_a_note() -> None:
    answer = NvmlAnswer(gpus=(DISCRETE._replace(index=0), THOR_GPU._replace(index=1)))
    result = draft_of(offer_listed(FACTS, answer, (), GenerateOptions(), HOOK.ldconfig), GenerateOptions(), HOOK)
    assert devices(result) == {"0": ALL_NODES}
    assert "NVIDIA RTX A6000, NVIDIA Thor" in result.notes[0]


@pytest.mark.parametrize(
    ("answer", "ids"), [(None, ("1",)), (TWO_ANSWER, ("2",)), (TWO_ANSWER, ("0:0",)), (TWO_ANSWER, ("MIG-1",))]
)
def test_an_id_that_no_gpu_has_is_an_error(answer: NvmlAnswer | None, ids: tuple[str, ...]) -> None:
    with pytest.raises(CdiError, match="no such GPU; available: 0") as caught:
        offer_listed(FACTS, answer, (), GenerateOptions(device_ids=ids), HOOK.ldconfig)
    assert caught.value.code == "OCIGPU-CDI-7"


def test_files_without_nodes_are_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(CdiError, match=r"the CSV files name no device node of this host: .*l4t.csv: missing$"):
        draft_from("csv", GenerateOptions(), write_tree(tmp_path, {"/etc/nv_tegra_release": ""}))


HOOKS: dict[str, tuple[NvmlAnswer | None, GenerateOptions, HookOptions, list[list[str]]]] = {
    "without NVML": (
        None,
        GenerateOptions(),
        VENDOR_HOOK,
        [
            ["nvidia-cdi-hook", "create-symlinks", "--link", LINK],
            ["nvidia-cdi-hook", "update-ldcache", "--folder", f"{LIB}/tegra", "--folder", f"{LIB}/nvidia"],
        ],
    ),
    "Orin has its own directory of CUDA libraries": (
        ORIN_ANSWER,
        GenerateOptions(),
        VENDOR_HOOK._replace(enabled=("enable-cuda-compat",)),
        [
            [
                "nvidia-cdi-hook",
                "enable-cuda-compat",
                "--host-cuda-version=13.1",
                "--cuda-compat-container-root=/usr/local/cuda/compat_orin",
            ]
        ],
    ),
    "which can be another": (
        ORIN_ANSWER,
        GenerateOptions(csv_compat_container_root="/opt/compat"),
        VENDOR_HOOK._replace(enabled=("enable-cuda-compat",)),
        [
            [
                "nvidia-cdi-hook",
                "enable-cuda-compat",
                "--host-cuda-version=13.1",
                "--cuda-compat-container-root=/opt/compat",
            ]
        ],
    ),
    "others have the usual one; one process for our hook": (
        TWO_ANSWER,
        GenerateOptions(),
        HOOK._replace(ldconfig="/sbin/ldconfig.real"),
        [
            [
                "ocigpu-hook",
                *("create-symlinks", "--link", LINK, "+"),
                *("enable-cuda-compat", "--host-cuda-version=13.1", "+"),
                *("update-ldcache", "--ldconfig-path", "/sbin/ldconfig.real"),
                *("--folder", f"{LIB}/tegra", "--folder", f"{LIB}/nvidia"),
            ]
        ],
    ),
}


@pytest.mark.parametrize(("answer", "options", "hook", "expected"), HOOKS.values(), ids=HOOKS.keys())
def test_hooks_are_written(
    answer: NvmlAnswer | None, options: GenerateOptions, hook: HookOptions, expected: list[list[str]]
) -> None:
    result = draft_of(offer_listed(FACTS, answer, (), options, hook.ldconfig), options, hook)
    assert [entry["args"] for entry in result.common["hooks"]] == expected
    assert result.common["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]


def test_files_are_mounted_read_only() -> None:
    offered = offer_listed(FACTS, None, (), GenerateOptions(), HOOK.ldconfig)
    mounts = draft_of(offered, GenerateOptions(), HOOK).common["mounts"]
    assert [mount["containerPath"] for mount in mounts] == [file.container_path for file in FACTS.files]
    assert {tuple(mount["options"]) for mount in mounts} == {("ro", "nosuid", "nodev", "rbind", "rprivate")}


@pytest.mark.parametrize(
    ("bus_id", "model", "expected"),
    [
        ("", "Orin (nvgpu)", True),
        ("", "NVIDIA Thor", True),
        ("", "NVIDIA RTX A6000", False),
        ("00000000:01:00.0", "NVIDIA Thor", True),
        ("00000000:a1:00.0", "NVIDIA RTX A6000", False),
    ],
)
def test_an_integrated_gpu_is_known_by_address_or_name(bus_id: str, model: str, expected: bool) -> None:
    assert is_integrated(Gpu(0, 0, "", bus_id, model)) is expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("libcuda.so", True),
        ("libcuda.so.1.1", True),
        ("lib.so", False),
        ("libcuda.soNOT", False),
        ("notlibcuda.so", False),
        ("libx.so.so.1", True),
        ("cuda.bin", False),
    ],
)
def test_folders_are_those_of_files_named_like_libraries(name: str, expected: bool) -> None:
    assert is_library(name) is expected


def test_the_fingerprint_changes_with_the_csv_files(tmp_path: Path) -> None:
    settings = write_tree(tmp_path, ORIN)
    before = dict(read_csv_fingerprint(settings))
    (tmp_path / CSV_DIRECTORY.lstrip("/") / "l4t.csv").write_text("dir, /opt\n")
    after = dict(read_csv_fingerprint(settings))
    assert before["release"] == after["release"]
    assert before["files"] != after["files"]
