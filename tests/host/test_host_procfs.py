from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocigpu.core.facts import Permissions
from ocigpu.gpus.nvidia.procfs import (
    ProcGpu,
    is_version,
    parse_capability,
    parse_devices,
    parse_driver_version,
    parse_fields,
    parse_information,
    parse_mig_minors,
    parse_permissions,
    read_kernel_version,
    read_proc_files,
    read_proc_gpus,
)
from ocigpu.gpus.pci import read_drm_numbers
from ocigpu.gpus.tree import normal_bus_id, sysfs_address


@pytest.mark.parametrize(
    ("text", "version"),
    [
        pytest.param(
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01  Tue Apr  8 12:41:17\nGCC version: 1.2\n",
            "550.163.01",
            id="proprietary module",
        ),
        pytest.param(
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root@host)\n",
            "580.95.05",
            id="open module",
        ),
        pytest.param("NVRM version: NVIDIA UNIX aarch64 Kernel Module  535.54  Tue\n", "535.54", id="two groups"),
        pytest.param("GCC version:  gcc version 12.2.0\n", "", id="no such line"),
        pytest.param("", "", id="empty"),
    ],
)
def test_the_driver_version_is_the_number_after_kernel_module(text: str, version: str) -> None:
    assert parse_driver_version(text) == version


@pytest.mark.parametrize(
    ("text", "valid"), [("550.163.01", True), ("550", False), ("1..2", False), ("x.1", False), ("1.2.3.4.5", False)]
)
def test_versions_are_two_to_four_groups_of_digits(text: str, valid: bool) -> None:
    assert is_version(text) is valid


def test_majors_are_those_of_nvidia_character_devices() -> None:
    text = (
        "Character devices:\n  1 mem\n195 nvidia-frontend\n235 nvidia-caps\n236 nvidia-caps-imex-channels\n"
        "510 nvidia-uvm\nx nvidia-odd\n\nBlock devices:\n  8 sd\n259 nvidia-block\n"
    )
    assert parse_devices(text) == (
        ("nvidia-frontend", 195),
        ("nvidia-caps", 235),
        ("nvidia-caps-imex-channels", 236),
        ("nvidia-uvm", 510),
    )


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        pytest.param(
            "ModifyDeviceFiles: 1\nDeviceFileMode: 438\n", Permissions(0o666, 0, 0), id="the driver's defaults"
        ),
        pytest.param(
            "Registry: x\nA: b\nC: d\nE: f\nG: h\nI: j\nDeviceFileUID: 10\nDeviceFileGID: 44\nDeviceFileMode: 432\n",
            Permissions(0o660, 10, 44),
            id="after the sixth line",
        ),
        pytest.param("DeviceFileMode: 4294967295\n", Permissions(0o777, 0, 0), id="only permission bits"),
        pytest.param("DeviceFileMode: rw\n", Permissions(), id="not a number"),
    ],
)
def test_node_permissions_come_from_params(params: str, expected: Permissions) -> None:
    assert parse_permissions(params) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0000:3b:00.0", "00000000:3b:00.0"),
        ("00000000:3B:00.0", "00000000:3b:00.0"),
        ("10001:AF:1f.7", "00010001:af:1f.7"),
        ("3b:00.0", ""),
        ("0000:100:00.0", ""),
        ("0000:3b:20.0", ""),
        ("", ""),
    ],
)
def test_bus_ids_have_one_spelling(text: str, expected: str) -> None:
    assert normal_bus_id(text) == expected


@pytest.mark.parametrize("name", ["0000:3b:00.0", "00ab:3b:00.0", "10001:af:1f.7"])
def test_bus_ids_become_addresses_of_sysfs(name: str) -> None:
    assert sysfs_address(normal_bus_id(name)) == sysfs_address(name) == name


def test_nodes_of_a_gpu_in_a_domain_of_five_digits_are_found(tmp_path: Path) -> None:
    directory = tmp_path / "bus/pci/devices/10000:3b:00.0/drm/card1"
    directory.mkdir(parents=True)
    (directory / "dev").write_text("226:1\n")
    assert read_drm_numbers(str(tmp_path), "00010000:3b:00.0") == (("card1", 226, 1),)


def test_information_of_a_gpu_is_read() -> None:
    text = (
        "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\nGPU UUID: \t GPU-dce4c047-1c9d-191a-a7ec-6d72e6e57d68\n"
        "Video BIOS: \t 96.00.61.00.01\nBus Location: \t 0000:19:00.0\nDevice Minor: \t 3\nGPU Excluded:\t Yes\n"
    )
    assert parse_information(text, "0000:19:00.0") == ProcGpu(
        "0000:19:00.0",
        "00000000:19:00.0",
        3,
        "GPU-dce4c047-1c9d-191a-a7ec-6d72e6e57d68",
        "NVIDIA H100 80GB HBM3",
        True,
    )


def test_a_gpu_that_nothing_has_used_has_no_uuid_yet() -> None:
    text = "GPU UUID: \t GPU-????????-????-????-????-????????????\nDevice Minor: 0\n"
    assert parse_information(text, "0000:19:00.0") == ProcGpu("0000:19:00.0", "00000000:19:00.0", 0)


def test_mig_minors_pass_over_unknown_lines() -> None:
    text = "config 1\nmonitor 2\n\nsomething new\ngpu0/gi1/access 21\ngpu0/gi1/ci0/access 22\n"
    assert parse_mig_minors(text) == {"config": 1, "monitor": 2, "gpu0/gi1/access": 21, "gpu0/gi1/ci0/access": 22}


def test_a_capability_file_names_minor_and_mode() -> None:
    assert parse_capability("DeviceFileMinor: 12\nDeviceFileMode: 292\nDeviceFileModify: 1\n") == (12, 0o444, True)
    assert parse_capability("") == (-1, 0o400, True)


def test_gpus_are_in_the_order_of_bus_ids(tmp_path: Path) -> None:
    for name, minor in (("0001:01:00.0", 0), ("0000:b1:00.0", 1), ("0000:0a:00.0", 2), ("not-a-gpu", 3)):
        (tmp_path / "gpus" / name).mkdir(parents=True)
        (tmp_path / "gpus" / name / "information").write_text(f"Device Minor: {minor}\n")
    assert [(gpu.name, gpu.minor) for gpu in read_proc_gpus(str(tmp_path))] == [
        ("0000:0a:00.0", 2),
        ("0000:b1:00.0", 1),
        ("0001:01:00.0", 0),
    ]


def test_proc_files_are_kept_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "params").write_text("A: 1\n")
    (tmp_path / "params").chmod(0o444)
    (tmp_path / "registry").write_text('Binary: ""\n')
    (tmp_path / "registry").chmod(0o644)
    assert [tuple(file) for file in read_proc_files(str(tmp_path))] == [
        ("params", 0o444, "A: 1\n"),
        ("registry", 0o644, 'Binary: ""\n'),
    ]


def test_the_module_version_comes_from_sysfs_when_procfs_has_none(tmp_path: Path) -> None:
    (tmp_path / "sys/module/nvidia").mkdir(parents=True)
    (tmp_path / "sys/module/nvidia/version").write_text("550.163.01\n")
    assert read_kernel_version(str(tmp_path / "proc"), str(tmp_path / "sys")) == "550.163.01"


@given(st.text(max_size=300))
def test_no_text_makes_a_parser_raise(text: str) -> None:
    for major in dict(parse_devices("Character devices:\n" + text)).values():
        assert major > 0
    parse_driver_version("Kernel Module" + text)
    parse_fields(text)
    parse_permissions(text)
    parse_mig_minors(text)
    parse_capability(text)
    parse_information(text, text)
    assert normal_bus_id(normal_bus_id(text)) == normal_bus_id(text)
