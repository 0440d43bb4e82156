"""The exporter on hosts with AMD's GPUs, alone and beside NVIDIA's: their metrics, pods and health."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from amd_lab import AmdHost
from exporter_lab import Series, exporter, kubelet, pods_of, value, write_pods
from support import requirements
from support.process import wait_for

from ocigpu.exporter.sample import Sample, parse_sample
from ocigpu.exporter.sampler import Orders, Sampler
from ocigpu.gpus.amd.ras import BLOCKS
from ocigpu.gpus.amd.sampler import METRICS, sample
from ocigpu.gpus.amd.simulated import RAS_BLOCKS
from ocigpu.gpus.tree import find_roots
from ocigpu.sim.create import create_host

BUSY, DCGM_BUSY = "gpu_gfx_activity", "DCGM_FI_DEV_GPU_UTIL"
UP = "ocigpu_exporter_gpu_up"


@pytest.fixture
def amd_host(work_directory: Path) -> AmdHost:
    create_host(str(work_directory / "amd"), 2, "mi300x")
    return AmdHost(work_directory / "amd")


def write(host: AmdHost, number: int, **files: int) -> None:
    """Write what amdgpu says of a GPU."""
    directory = host.root / "sys/bus/pci/devices" / f"0000:{0x41 + number:02x}:00.0"
    for name, reading in files.items():
        path = directory / f"hwmon/hwmon{number}" if name.endswith("_input") else directory
        (path / name).write_text(f"{reading}\n")


def numbers(page: dict[str, Series], name: str) -> dict[str, float]:
    """Return the values of a metric by GPU and partition."""
    return {f"{labels['gpu_id']}/{labels['gpu_partition_id']}": number for labels, number in page[name]}


def read(host: AmdHost) -> Any:
    return parse_sample(json.loads(json.dumps(sample(find_roots(host.settings)))))


# the folder's sample


def test_a_sample_has_what_files_of_the_kernel_say(amd_host: AmdHost) -> None:
    write(amd_host, 1, gpu_busy_percent=83, mem_busy_percent=12, mem_info_vram_used=100_000 << 20, temp2_input=71_000)
    found = read(amd_host)
    assert not found.error
    assert [metric.name for metric in found.metrics] == list(METRICS)
    first, second = found.gpus
    assert dict(second.values) == {
        "gpu_health": 1,
        "gpu_gfx_activity": 83,
        "gpu_umc_activity": 12,
        "gpu_total_vram": 196_592,
        "gpu_used_vram": 100_000,
        "gpu_free_vram": 96_592,
        "gpu_average_package_power": 140,
        "gpu_edge_temperature": 40,
        "gpu_junction_temperature": 71,
        "gpu_memory_temperature": 42,
        "gpu_ecc_correct_total": 0,
        "gpu_ecc_uncorrect_total": 0,
        **{f"gpu_ecc_{kind}_{BLOCKS[block]}": 0 for kind in ("correct", "uncorrect") for block in RAS_BLOCKS},
    }
    assert dict(first.names) == {
        "gpu_id": "0",
        "gpu_uuid": f"0x{amd_host.gpus[0].unique_id:x}",
        "gpu_partition_id": "0",
        "gpu_compute_partition_type": "spx",
        "gpu_memory_partition_type": "nps1",
        "card_model": "AMD Instinct MI300X OAM",
        "serial_number": "",
    }
    assert first.ids == ("0000:41:00.0",)
    directory = amd_host.root / "sys/bus/pci/devices/0000:41:00.0"
    shutil.rmtree(directory / "hwmon")
    (directory / "gpu_busy_percent").write_text("what\n")
    (directory / "product_number").write_text("102-G30211-0C\n")
    (amd_host.root / "sys/class/kfd/kfd/dev").unlink()
    (amd_host.root / "dev/kfd").unlink()
    less = read(amd_host).gpus[0]
    assert sorted(set(first.values) - set(less.values)) == [
        "gpu_average_package_power",
        "gpu_edge_temperature",
        "gpu_gfx_activity",
        "gpu_junction_temperature",
        "gpu_memory_temperature",
    ]
    assert less.values["gpu_health"] == 0
    assert less.names["card_model"] == "102-G30211-0C"


def test_the_first_partition_has_what_is_of_the_whole_gpu(amd_host: AmdHost) -> None:
    amd_host.cut(0, 2)
    gpus = read(amd_host).gpus
    assert [(gpu.names["gpu_partition_id"], gpu.names["gpu_compute_partition_type"]) for gpu in gpus] == [
        ("0", "cpx"),
        ("1", "cpx"),
        ("0", "spx"),
    ]
    assert "gpu_gfx_activity" in gpus[0].values
    assert dict(gpus[1].values) == {"gpu_health": 1}
    assert [gpu.ids for gpu in gpus] == [("0000:41:00.0/0",), ("0000:41:00.0/1",), ("0000:42:00.0",)]


def test_the_process_samples_at_intervals_and_without_a_driver_says_so(amd_host: AmdHost) -> None:
    sampler = Sampler(amd_host.settings, vendor="amd")
    sampler.order(Orders((), 0.05, 300, 300))
    try:
        found: list[Sample] = []
        wait_for("a sample", lambda: found.extend(sampler.wait(1)) or found)
        assert [gpu.number for gpu in found[0].gpus] == [0, 1]
        shutil.rmtree(amd_host.root / "sys/bus/pci/drivers/amdgpu")
        wait_for("an error", lambda: found.extend(sampler.wait(1)) or found[-1].error)
        assert found[-1].error == "amdgpu drives no PCI device"
    finally:
        sampler.close()
    again = Sampler(amd_host.settings, vendor="amd")
    again.order(Orders((), 0.05, 300, 300))
    assert again.wait(0)[0].error == f"there is no driver of amd below {amd_host.root}"


# the page


@pytest.mark.parametrize("collectors", ["", "DCGM_FI_DEV_GPU_TEMP, gauge, of NVIDIA\n"], ids=["usual", "chosen"])
def test_a_host_of_amds_gpus_alone(amd_host: AmdHost, tmp_path: Path, collectors: str) -> None:
    (tmp_path / "collectors.csv").write_text(collectors)
    words = [f"--collectors={tmp_path}/collectors.csv"] if collectors else []
    write(amd_host, 1, gpu_busy_percent=50)
    with exporter(amd_host.root, tmp_path, *words) as running:
        page = running.wait("a sample", lambda page: BUSY in page)
        others = {f"gpu_ecc_{kind}_{BLOCKS[block]}" for block in BLOCKS.keys() - RAS_BLOCKS
                  for kind in ("correct", "uncorrect")}  # fmt: skip
        assert set(METRICS) - set(page) == {"gpu_package_power", *others}
        assert not [name for name in page if name.startswith("DCGM")]
        assert numbers(page, BUSY) == {"0/0": 0, "1/0": 50}
        labels = page[BUSY][0][0]
        assert list(labels) == [
            "gpu_id", "gpu_uuid", "gpu_partition_id", "gpu_compute_partition_type", "gpu_memory_partition_type",
            "card_model", "serial_number", "hostname",
        ]  # fmt: skip
        assert f"# HELP {BUSY} {METRICS[BUSY][0]}" in running.get().body.decode()
        assert value(page, "ocigpu_exporter_up") == 1
        amd_host.lose("0000:41:00.0")
        running.wait("its loss", lambda page: numbers(page, BUSY) == {"0/0": 50})
        shutil.rmtree(amd_host.root / "sys/bus/pci/drivers/amdgpu")
        page = running.wait("the driver's end", lambda page: value(page, "ocigpu_exporter_up") == 0)
        assert numbers(page, BUSY) == {"0/0": 50}, "the last values stay for a while"
    assert "no metrics of amd GPUs: amdgpu drives no PCI device" in running.log


@pytest.fixture(scope="module")
def both(session_directory: Path) -> AmdHost:
    requirements.require(requirements.programs("gcc"))
    create_host(str(session_directory / "exporter-both"), 2, ("h100", "mi300x"), compat32=False)
    return AmdHost(session_directory / "exporter-both")


def test_both_vendors_gpus_have_their_own_metrics_labels_and_pods(both: AmdHost, tmp_path: Path) -> None:
    ids = [f"0x{gpu.unique_id:x}" for gpu in both.gpus]
    pods = [
        ["team", "ours", "main", "amd.com/gpu", [ids[0]]],
        ["team", "theirs", "main", "amd.com/gpu", ["0000:42:00.0"]],
        ["team", "nvidia", "main", "nvidia.com/gpu", ["nvidia0"]],
    ]
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/0").write_text("job-7\n")
    with (
        kubelet(tmp_path, pods) as (socket, file),
        exporter(
            both.root,
            tmp_path,
            "--kubernetes",
            "--devices=g:0",
            f"--pod-resources-kubelet-socket={socket}",
            f"--hpc-job-mapping-dir={tmp_path}/jobs",
        ) as running,
    ):
        page = running.wait("both", lambda page: BUSY in page and DCGM_BUSY in page)
        assert pods_of(page, BUSY, gpu_id="0") == [("team", "ours", "main")]
        assert pods_of(page, BUSY, gpu_id="1") == [("team", "theirs", "main")]
        assert pods_of(page, DCGM_BUSY) == [("team", "nvidia", "main")], "the first of NVIDIA's GPUs alone"
        assert [labels["hpc_job"] for labels, _ in page[DCGM_BUSY]] == ["job-7"]
        assert not any("hpc_job" in labels or "modelName" in labels for labels, _ in page[BUSY])
        assert [number for _, number in page[UP]] == [1, 1, 1, 1]
        claim = ["team", "claiming", "main", "mine", "gpu.amd.com", "node-1", "gpu-0000-42-00-0", []]
        write_pods(file, claims=[claim, [*claim[:4], "net.example.com", *claim[5:]]])
        running.wait("a claim", lambda page: pods_of(page, BUSY, gpu_id="1") == [("team", "claiming", "main")])


def test_an_nvml_that_fails_costs_only_its_own_values(both: AmdHost, tmp_path: Path) -> None:
    (both.root / "faults").write_text("init 999\n")
    try:
        with exporter(both.root, tmp_path) as running:
            page = running.wait(
                "a failure and a sample", lambda page: BUSY in page and "no metrics of GPUs" in running.log
            )
            assert value(page, "ocigpu_exporter_up") == 0
            assert DCGM_BUSY not in page
            write(both, 0, gpu_busy_percent=77)
            running.wait("another value", lambda page: numbers(page, BUSY) == {"0/0": 77, "1/0": 0})
            (both.root / "faults").unlink()
            # that NVML answers is told at once, and its values when their page is made
            running.wait(
                "NVML", lambda page: value(page, "ocigpu_exporter_up") == 1 and {BUSY, DCGM_BUSY} <= page.keys()
            )
    finally:
        (both.root / "faults").unlink(missing_ok=True)


@pytest.mark.parametrize(
    "change",
    [
        {"metrics": [["gpu health", "gauge", "x"]]},
        {"metrics": [["gpu_health", "label", "x"]]},
        {"gpus": [{"number": 0, "names": {'a="b"': "x"}}]},
    ],
)
def test_a_sample_with_names_that_no_page_may_have_is_refused(change: dict[str, Any]) -> None:
    document = {"gpus": [], "labels": {}, "seconds": 0.1, "listed": [], "metrics": []}
    assert parse_sample(document).metrics == ()
    with pytest.raises(ValueError, match=r"pattern|Input should be"):
        parse_sample({**document, **change})
