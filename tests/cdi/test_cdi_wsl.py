"""WSL: the one device, which driver store counts, what is mounted and linked."""

import os
import stat
from pathlib import Path

import pytest
from support.drafts import draft_from, spec_of
from support.trees import Tree, write_tree

from ocigpu.cdi.generate import generate
from ocigpu.core.errors import CdiError
from ocigpu.gpus.offer import GenerateOptions
from ocigpu.gpus.wsl import is_wsl
from ocigpu.gpus.wsl.facts import read_wsl_fingerprint

LIBRARIES = "/usr/lib/wsl/lib"
STORES = "/usr/lib/wsl/drivers"
NVIDIA = f"{STORES}/nv_dispi.inf_amd64_0afec3f2050014a0"
OLDER = f"{STORES}/nv_dispi.inf_amd64_00000000000000aa"
HOOK = "/usr/bin/nvidia-cdi-hook"
OPTIONS = GenerateOptions(hook_path=HOOK, device_ids=("0",))  # ids do not matter here


def store(path: str, smi: str) -> Tree:
    names = ("libcuda.so.1.1", "libnvidia-ml.so.1", "libcuda_loader.so", "nvcubins.bin")
    more = ("libnvoptix.so.1", "nvoptix.bin", "nvcuda64.dll", "nvwddm.inf", "readme.txt")
    return {f"{path}/{name}": "" for name in (*names, *more)} | {f"{path}/nvidia-smi": smi}


BASE: Tree = {
    "/sys/class/misc/dxg/dev": "10:125\n",
    "/dev/dxg": "",
    f"{LIBRARIES}/libdxcore.so": "",
    f"{LIBRARIES}/nvidia-smi": "560",
    f"{STORES}/iigd_dch.inf_amd64_1/libigdgmm_w.so": "",
}
ONE: Tree = {**BASE, **store(NVIDIA, "560")}
TWO: Tree = {**ONE, **store(OLDER, "470")}


def test_the_driver_store_is_mounted_in_the_usual_order(tmp_path: Path) -> None:
    result = draft_from("wsl", OPTIONS, write_tree(tmp_path, ONE))
    assert [device.name for device in result.devices] == ["all"]
    assert [node["path"] for node in result.devices[0].edits["deviceNodes"]] == ["/dev/dxg"]
    assert [mount["containerPath"] for mount in result.common["mounts"]] == [
        f"{LIBRARIES}/libdxcore.so",
        *(
            f"{NVIDIA}/{name}"
            for name in (
                *("libcuda.so.1.1", "libcuda_loader.so", "libnvidia-ml.so.1", "nvcubins.bin", "nvidia-smi"),
                *("libnvoptix.so.1", "nvcuda64.dll", "nvoptix.bin"),
            )
        ),
    ]
    assert {tuple(mount["options"]) for mount in result.common["mounts"]} == {
        ("ro", "nosuid", "nodev", "rbind", "rprivate")
    }
    assert (result.source, result.vendor, result.device_class, result.all_device) == (
        "wsl",
        "nvidia.com",
        "gpu",
        False,
    )
    spec_of(result)


def test_hooks_link_the_program_and_register_the_libraries(tmp_path: Path) -> None:
    common = draft_from("wsl", OPTIONS, write_tree(tmp_path, ONE)).common
    assert [entry["args"][1:] for entry in common["hooks"]] == [
        ["create-symlinks", "--link", f"{NVIDIA}/nvidia-smi::/usr/bin/nvidia-smi"],
        ["update-ldcache", "--folder", LIBRARIES, "--folder", NVIDIA],
    ]
    assert common["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]


def test_of_several_stores_the_one_whose_program_windows_offers_is_used(tmp_path: Path) -> None:
    result = draft_from("wsl", OPTIONS, write_tree(tmp_path, TWO))
    assert all(OLDER not in mount["containerPath"] for mount in result.common["mounts"])
    assert result.notes[0] == (
        f"several NVIDIA drivers ({OLDER}, {NVIDIA}): {NVIDIA} has the nvidia-smi of {LIBRARIES}"
    )


def test_a_store_can_be_named(tmp_path: Path) -> None:
    options = OPTIONS._replace(library_search_paths=(f"{OLDER}/",))
    mounts = draft_from("wsl", options, write_tree(tmp_path, TWO)).common["mounts"]
    assert mounts[1]["containerPath"] == f"{OLDER}/libcuda.so.1.1"


def test_a_store_without_the_program_gets_no_link_to_it(tmp_path: Path) -> None:
    tree = {path: text for path, text in ONE.items() if not path.endswith("/nvidia-smi")}
    hooks = draft_from("wsl", OPTIONS, write_tree(tmp_path, tree)).common["hooks"]
    assert [entry["args"][1] for entry in hooks] == ["update-ldcache"]


REFUSED: dict[str, tuple[Tree, str]] = {
    "no node": (
        {path: text for path, text in ONE.items() if not path.endswith(("/dxg", "/dxg/dev"))},
        "no GPU on this WSL system: it has no /dev/dxg",
    ),
    "no library for adapters": (
        {path: text for path, text in ONE.items() if not path.endswith("libdxcore.so")},
        f"no GPU on this WSL system: it has no {LIBRARIES}/libdxcore.so",
    ),
    "no store of NVIDIA's": (BASE, f"no directory of {STORES} has libcuda.so.1.1"),
    "several stores, none of them known to be in use": (
        {**BASE, **store(NVIDIA, "1"), **store(OLDER, "2")},
        f"several NVIDIA drivers on this WSL system, and no telling which is in use: {OLDER}, {NVIDIA}",
    ),
    "several stores with equal programs": (
        {**ONE, **store(OLDER, "560")},
        f"several NVIDIA drivers on this WSL system, and no telling which is in use: {OLDER}, {NVIDIA}",
    ),
}


@pytest.mark.parametrize(("tree", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_missing_or_unclear_is_an_error(tmp_path: Path, tree: Tree, message: str) -> None:
    with pytest.raises(CdiError) as caught:
        draft_from("wsl", OPTIONS, write_tree(tmp_path, tree))
    assert caught.value.code == "OCIGPU-CDI-7"
    assert message in str(caught.value)


def test_wsl_is_known_by_its_library(tmp_path: Path) -> None:
    assert is_wsl(write_tree(tmp_path / "wsl", ONE))
    assert not is_wsl(write_tree(tmp_path / "other", {"/etc/": ""}))


def test_the_fingerprint_changes_with_the_driver(tmp_path: Path) -> None:
    settings = write_tree(tmp_path, ONE)
    before = dict(read_wsl_fingerprint(settings))
    write_tree(tmp_path, store(OLDER, "470"))
    assert dict(read_wsl_fingerprint(settings))["stores"] != before["stores"]


def test_the_mode_is_found_by_itself(tmp_path: Path) -> None:
    spec = generate(OPTIONS, write_tree(tmp_path, ONE)).spec
    assert [device["name"] for device in spec["devices"]] == ["all"]
    assert spec["annotations"]["ocigpu/fingerprint"].startswith("source=wsl stores=1-")


@pytest.mark.root
@pytest.mark.parametrize("named", [True, False], ids=["--dev-root", "the driver root has it"])
def test_the_node_is_that_of_the_root_that_is_named(tmp_path: Path, named: bool) -> None:
    """As with every other source of devices; /sys is this machine's, which has no such device."""
    tree = {path: text for path, text in ONE.items() if path.startswith("/usr/")}
    settings = write_tree(tmp_path / "driver", tree)
    dev_root = tmp_path / ("dev root" if named else "driver")
    (dev_root / "dev").mkdir(parents=True, exist_ok=True)
    os.mknod(dev_root / "dev/dxg", 0o666 | stat.S_IFCHR, os.makedev(10, 125))
    settings = settings._replace(
        simulation_root="", driver_root=str(tmp_path / "driver"), driver_dev_root=str(dev_root) if named else ""
    )
    (node,) = draft_from("wsl", OPTIONS, settings).devices[0].edits["deviceNodes"]
    assert (node["path"], node["hostPath"]) == ("/dev/dxg", f"{dev_root}/dev/dxg")
