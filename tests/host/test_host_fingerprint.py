"""The fingerprint: what changes it, what does not, and what is said of a change."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from handmade_host import HostTree

from ocigpu.core.settings import Settings
from ocigpu.gpus.fingerprint import (
    ANNOTATION,
    explain_changes,
    fingerprint_text,
    parse_fingerprint,
    read_fingerprint,
    stale_reasons,
)
from ocigpu.sim.create import create_host
from ocigpu.system.settings_file import read_settings

CAPABILITIES = "proc/driver/nvidia/capabilities"
INFORMATION = "proc/driver/nvidia/gpus/0000:10:00.0/information"


def add_mig(host: HostTree, path: str) -> None:
    host.write(f"{CAPABILITIES}/{path}/access", "DeviceFileMinor: 3\nDeviceFileMode: 292\n")


@pytest.fixture
def driver(host: HostTree) -> HostTree:
    host.driver()
    add_mig(host, "gpu0/mig/gi1")
    add_mig(host, "gpu0/mig/gi1/ci0")
    for name in ("nvidia0", "nvidiactl", "nvidia-caps/nvidia-cap3"):
        host.write(f"dev/{name}")
    return host


def read_of(host: HostTree) -> dict[str, str]:
    return dict(read_fingerprint("nvidia", host.settings))


def test_a_host_without_a_driver_has_empty_values(host: HostTree) -> None:
    host.root.mkdir()
    host.write("dev/infiniband/uverbs0")
    fingerprint = read_fingerprint("nvidia", host.settings)
    assert fingerprint[0] == ("source", "nvidia")
    assert fingerprint[-1][0] == "settings"
    assert {value for _, value in fingerprint[1:-1]} == {""}
    assert parse_fingerprint(fingerprint_text(fingerprint)) == fingerprint


def test_values_begin_with_how_many_there_are(driver: HostTree) -> None:
    values = read_of(driver)
    assert list(values) == ["source", "driver", "gpus", "uuids", "mig", "nodes", "imex", "settings"]
    assert values["driver"] == "550.163.01"
    assert [values[key].partition("-")[0] for key in ("gpus", "uuids", "mig", "imex")] == ["2", "2", "1", ""]


@pytest.mark.parametrize("mig", [(), ("0:1g.10gb,3g.40gb",)], ids=["whole", "mig"])
def test_a_simulated_host_has_the_same_fingerprint_each_time(tmp_path: Path, mig: tuple[str, ...]) -> None:
    settings = read_settings(create_host(str(tmp_path / "host"), gpus=2, model="h100", mig=mig))
    fingerprint = read_fingerprint("nvidia", settings)
    text = fingerprint_text(fingerprint)
    assert text.startswith("source=nvidia driver=")
    assert parse_fingerprint(text) == fingerprint == read_fingerprint("nvidia", settings)
    assert stale_reasons({ANNOTATION: text}, settings) == ()


def other_version(host: HostTree) -> None:
    path = host.root / "proc/driver/nvidia/version"
    path.write_text(path.read_text().replace("550.163.01", "560.35.03"))


def no_gpu(host: HostTree) -> None:
    (host.root / "proc/driver/nvidia/gpus/0000:10:00.0/information").unlink()
    (host.root / "proc/driver/nvidia/gpus/0000:10:00.0").rmdir()


def other_uuid(host: HostTree) -> None:
    path = host.root / INFORMATION
    path.write_text(path.read_text().replace("GPU-00000000", "GPU-0000000a"))


def other_majors(host: HostTree) -> None:
    path = host.root / "proc/devices"
    path.write_text(path.read_text().replace("510 nvidia-uvm", "509 nvidia-uvm"))


def other_permissions(host: HostTree) -> None:
    path = host.root / "proc/driver/nvidia/params"
    path.write_text(path.read_text().replace("438", "432"))


NODES = "device numbers or nodes have changed"
CHANGES: dict[str, tuple[Callable[[HostTree], object], str]] = {
    "driver": (other_version, "the driver was 550.163.01 and is 560.35.03"),
    "gpu gone": (no_gpu, "the set of GPUs has changed: 2 then, 1 now"),
    "gpu replaced": (other_uuid, "GPUs have been replaced: their UUIDs differ"),
    "compute instance": (lambda host: add_mig(host, "gpu0/mig/gi1/ci1"), "MIG devices have changed: 1 then, 2 now"),
    "GPU instance": (lambda host: add_mig(host, "gpu1/mig/gi7"), "MIG devices have changed: 1 then, 2 now"),
    "major": (other_majors, NODES),
    "permissions of the driver": (other_permissions, NODES),
    "node": (lambda host: host.write("dev/nvidia1"), NODES),
    "node gone": (lambda host: (host.root / "dev/nvidia0").unlink(), NODES),
    "node's mode": (lambda host: (host.root / "dev/nvidia0").chmod(0o600), NODES),
    "capability node": (lambda host: host.write("dev/nvidia-caps/nvidia-cap4"), NODES),
    "DRM": (lambda host: host.write("sys/bus/pci/devices/0000:10:00.0/drm/card1/dev", "226:1\n"), NODES),
    "IMEX channel": (
        lambda host: host.write("dev/nvidia-caps-imex-channels/channel0"),
        "IMEX channels have changed: none then, 1 now",
    ),
}


@pytest.mark.parametrize(("change", "sentence"), CHANGES.values(), ids=CHANGES)
def test_a_change_of_the_host_is_said_in_a_sentence(
    driver: HostTree, change: Callable[[HostTree], object], sentence: str
) -> None:
    before = read_fingerprint("nvidia", driver.settings)
    change(driver)
    after = read_fingerprint("nvidia", driver.settings)
    said = explain_changes(before, after)
    assert said == (sentence,)
    assert stale_reasons({ANNOTATION: fingerprint_text(before)}, driver.settings) == said


@pytest.mark.root
def test_a_node_with_another_number_is_a_change(driver: HostTree) -> None:
    driver.node("dev/nvidia-uvm", 510, 0)
    before = read_fingerprint("nvidia", driver.settings)
    (driver.root / "dev/nvidia-uvm").unlink()
    driver.node("dev/nvidia-uvm", 511, 0)
    assert explain_changes(before, read_fingerprint("nvidia", driver.settings)) == (NODES,)


@pytest.mark.parametrize(
    "change",
    [
        lambda host: host.write("dev/sda"),
        lambda host: host.write("proc/sys/kernel/random/boot_id", "1\n"),
        lambda host: host.write("proc/driver/nvidia/gpus/0000:10:00.0/power", "off\n"),
        lambda host: os.utime(host.root / "dev/nvidia0", (1, 1)),
    ],
    ids=["other node", "boot", "power", "time of use"],
)
def test_what_does_not_matter_does_not_change_it(driver: HostTree, change: Callable[[HostTree], object]) -> None:
    before = read_fingerprint("nvidia", driver.settings)
    change(driver)
    assert read_fingerprint("nvidia", driver.settings) == before


def test_a_gpu_that_nothing_uses_hides_its_uuid_and_that_is_no_change(driver: HostTree) -> None:
    before = read_fingerprint("nvidia", driver.settings)
    path = driver.root / INFORMATION
    path.write_text(path.read_text().replace("GPU-00000000-0000", "GPU-????????-????"))
    after = read_fingerprint("nvidia", driver.settings)
    assert dict(after)["uuids"] == ""
    assert explain_changes(before, after) == explain_changes(after, before) == ()


def test_a_driver_that_is_gone_or_new_is_said(driver: HostTree, tmp_path: Path) -> None:
    present = read_fingerprint("nvidia", driver.settings)
    absent = read_fingerprint("nvidia", HostTree(tmp_path / "empty").settings)
    assert explain_changes(present, absent)[0] == "the driver was 550.163.01 and is not loaded"
    assert explain_changes(absent, present)[0] == "the driver was not loaded and is 550.163.01"


def test_other_settings_are_all_that_is_said_of_a_specification(driver: HostTree) -> None:
    text = fingerprint_text(read_fingerprint("nvidia", driver.settings))
    (said,) = stale_reasons({ANNOTATION: text}, Settings(driver_root="/run/nvidia/driver"))
    assert said.startswith("settings have changed")
    assert stale_reasons({ANNOTATION: text}, driver.settings._replace(runtime_log="/var/log/x")) == ()


def test_a_key_of_another_version_is_no_change() -> None:
    old = (("source", "nvidia"), ("driver", "1.2"), ("weather", "fine"))
    assert explain_changes(old, (("source", "nvidia"), ("driver", "1.2"), ("tide", "low"))) == ()
    assert explain_changes(old, (("source", "nvidia"), ("driver", "1.2"), ("weather", "wet"))) == (
        "weather has changed",
    )


@pytest.mark.parametrize(
    "text",
    ["", "driver=1", "source=nvidia driver", "source=nvidia  driver=1", "source=nvidia gpus=1 gpus=2", "source=a b=\n",
     "source=nvidia " + "x" * 5000],
    ids=["empty", "no source", "no value", "two spaces", "twice", "control character", "long"],
)  # fmt: skip
def test_what_is_no_fingerprint_is_said_in_one_sentence(text: str, driver: HostTree) -> None:
    assert parse_fingerprint(text) == ()
    (said,) = stale_reasons({ANNOTATION: text}, driver.settings)
    assert "cannot be understood" in said
    assert "\n" not in said


def test_an_annotation_of_another_type_cannot_be_understood(driver: HostTree) -> None:
    assert "cannot be understood" in stale_reasons({ANNOTATION: 5}, driver.settings)[0]


def test_a_specification_of_somebody_else_is_not_judged(driver: HostTree) -> None:
    assert stale_reasons({}, driver.settings) == ()
    assert stale_reasons({"vendor/fingerprint": "x"}, driver.settings) == ()


def test_a_source_without_a_reader_is_told() -> None:
    assert [key for key, _ in read_fingerprint("other", Settings())] == ["source", "settings"]
    (said,) = stale_reasons({ANNOTATION: "source=other settings=0"}, Settings())
    assert said == 'its devices come from an unknown source: "other"'
