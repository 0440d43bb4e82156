"""The exporter as Prometheus meets it: a real process, real HTTP, a simulated host and a kubelet on a real socket."""

import gzip
import json
import os
import re
import signal
import socket
import sys
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from exporter_lab import Labels, exporter, kubelet, pods_of, read_page, value, write_pods
from support import requirements
from support.process import child_of, run
from support.product import PROGRAMS, SimulatedHost, make_simulated_host
from support.trees import pci_function, write_tree

from ocigpu.exporter.metrics import BY_NAME, METRICS

TEMPERATURE, UTIL, USED, FREE = (f"DCGM_FI_DEV_{name}" for name in ("GPU_TEMP", "GPU_UTIL", "FB_USED", "FB_FREE"))
ACTIVE = "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
UP, AGE, DONE = (f"ocigpu_exporter_{name}" for name in ("up", "sample_age_seconds", "samples_total"))


@pytest.fixture(scope="session")
def h100(session_directory: Path) -> SimulatedHost:
    """Two H100s, which have GPM; the second is cut."""
    requirements.require(requirements.root(), requirements.programs("gcc"))
    return make_simulated_host(session_directory / "exporter-h100", 2, ("1:1g.10gb,3g.40gb",), "h100")


@contextmanager
def file_of(host: SimulatedHost, name: str, text: str) -> Iterator[Path]:
    """Give the host a file that its NVML reads, for a while."""
    path = host.directory / name
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)
    try:
        yield path
    finally:
        path.unlink()


def all_collectors(directory: Path) -> str:
    path = directory / "all.csv"
    path.write_text("".join(f"{metric.name}, {metric.kind}, {metric.help}\n" for metric in METRICS))
    return str(path)


# --- pages


def test_eight_gpus_as_prometheus_reads_them(simulated_host: SimulatedHost, tmp_path: Path) -> None:
    with exporter(simulated_host.directory, tmp_path) as running:
        page = running.next_page()
        text = running.get().body.decode()
        packed = running.get(Accept_Encoding="gzip")
        assert packed.headers["Content-Encoding"] == "gzip"
        assert packed.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert set(read_page(gzip.decompress(packed.body).decode())) == set(page)
        health = running.get("/health")
        assert (health.status, health.headers["X-Reload-In-Progress"]) == (200, "false")
        assert b"./metrics" in running.get("/").body
        with pytest.raises(urllib.error.HTTPError, match="404") as missing:
            running.get("/debug/pprof")
        missing.value.close()
    expected: Labels = {
        "gpu": "7",
        "UUID": simulated_host.gpus[7],
        "pci_bus_id": "00000000:08:00.0",
        "device": "nvidia7",
        "modelName": "NVIDIA A100-SXM4-40GB",
        "hostname": "node-1",
        "DCGM_FI_DRIVER_VERSION": "550.163.01",
    }
    (labels,) = [labels for labels, _ in page[TEMPERATURE] if labels["gpu"] == "7"]
    assert labels == expected
    assert [labels["UUID"] for labels, _ in page[TEMPERATURE]] == list(simulated_host.gpus)
    missing = {"DCGM_FI_DEV_VGPU_LICENSE_STATUS"}  # no vGPU
    assert {name for name in BY_NAME if f"# TYPE {name} " in text} == {
        metric.name
        for metric in METRICS
        if metric.default and metric.kind != "label" and metric.name not in missing
        and (not metric.name.startswith("DCGM_FI_PROF_") or "PCIE" in metric.name)  # no GPM before Hopper
    }  # fmt: skip
    for name, help_text, kind in re.findall(r"# HELP (DCGM\S+) (.*)\n# TYPE \S+ (\S+)", text):
        assert (BY_NAME[name].kind, BY_NAME[name].help) == (kind, help_text)


def test_values_are_those_of_nvml_with_dcgms_units(h100: SimulatedHost, tmp_path: Path) -> None:
    with (
        file_of(h100, "load", "load 0 50\n"),
        exporter(h100.directory, tmp_path, "-f", all_collectors(tmp_path)) as running,
    ):
        page = running.wait("two samples for GPM", lambda page: ACTIVE in page)
    whole = {"gpu": "0"}
    assert {name for name in page if name.startswith("DCGM")} == set(BY_NAME) - {
        *(metric.name for metric in METRICS if metric.kind == "label"),
        *("DCGM_FI_DEV_FAN_SPEED", "DCGM_FI_DEV_VGPU_LICENSE_STATUS"),
        *("DCGM_EXP_XID_ERRORS_COUNT", "DCGM_EXP_XID_ERRORS_TOTAL"),
        *("DCGM_FI_DEV_RETIRED_SBE", "DCGM_FI_DEV_RETIRED_DBE", "DCGM_FI_DEV_RETIRED_PENDING"),
    }
    assert value(page, UTIL, **whole) == 50
    assert value(page, "DCGM_FI_DEV_POWER_USAGE", **whole) == 70 + 315
    assert value(page, "DCGM_FI_DEV_ENFORCED_POWER_LIMIT", **whole) == 700
    assert value(page, USED, **whole) == 81559 // 2
    assert value(page, USED, **whole) + value(page, FREE, **whole) in (81558, 81559)
    assert value(page, "DCGM_FI_DEV_FB_USED_PERCENT", **whole) == 0.5
    assert value(page, "DCGM_FI_DEV_MEMORY_TEMP", **whole) == 55
    assert value(page, ACTIVE, **whole) == 0.5
    assert value(page, "DCGM_FI_PROF_NVLINK_TX_BYTES", **whole) == 500 << 20
    assert value(page, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", **whole) > 1e9
    assert page[UTIL][0][0]["DCGM_FI_DEV_BRAND"] == "Nvidia"
    assert value(page, "DCGM_EXP_CLOCK_EVENTS_COUNT", clock_event="gpu_idle", **whole) == 0


def test_instances_have_series_of_their_own(h100: SimulatedHost, tmp_path: Path) -> None:
    with (
        file_of(h100, "load", "load 1 50\n"),
        exporter(h100.directory, tmp_path) as running,
    ):
        page = running.wait("two samples for GPM", lambda page: ACTIVE in page)
    used = {
        (labels["gpu"], labels.get("GPU_I_PROFILE"), labels.get("GPU_I_ID")): number for labels, number in page[USED]
    }
    assert used == {("0", None, None): 0, ("1", "1g.10gb", "7"): 9984 // 2, ("1", "3g.40gb", "1"): 40448 // 2}
    assert len(page[TEMPERATURE]) == 3
    assert [labels["gpu"] for labels, _ in page[UTIL]] == ["0"], "there is no such number with MIG"
    assert value(page, ACTIVE, gpu="1", GPU_I_ID="7") == 0.5
    assert {labels["gpu"] for labels, _ in page["DCGM_FI_PROF_PCIE_TX_BYTES"]} == {"0"}


@pytest.mark.rest
def test_sixty_four_gpus(session_directory: Path, tmp_path: Path) -> None:
    requirements.require(requirements.root(), requirements.programs("gcc"))
    host = make_simulated_host(session_directory / "exporter-64", 64, model="t4", ldcache=False)
    with exporter(host.directory, tmp_path) as running:
        page = running.wait("a sample", lambda page: TEMPERATURE in page)
    assert [labels["UUID"] for labels, _ in page[TEMPERATURE]] == list(host.gpus)


# --- pods


def test_pods_of_whole_shared_and_cut_gpus(h100: SimulatedHost, tmp_path: Path) -> None:
    whole, (small, big) = h100.gpus[0], [uuid for uuid, _, _ in h100.mig_devices]
    pods = [
        ["a", "train", "main", "nvidia.com/gpu.shared", [f"{whole}::0", f"{whole}::1"]],
        ["b", "serve", "web", "nvidia.com/gpu.shared", [f"{whole}::2"]],
        ["a", "small", "main", "nvidia.com/mig-1g.10gb", [small]],
        ["c", "renamed", "main", "nvidia.com/quick", [f"{big}::4"]],
        ["c", "custom", "main", "acme.org/gpu", [big]],
        ["c", "none", "main", "other.org/nic", [whole]],
    ]
    with (
        kubelet(tmp_path, pods) as (kubelet_socket, _),
        exporter(
            h100.directory, tmp_path, "-k", "--pod-resources-kubelet-socket", kubelet_socket,
            NVIDIA_RESOURCE_NAMES="acme.org/gpu",
        ) as running,
    ):  # fmt: skip
        page = running.wait("pods", lambda page: any("pod" in labels for labels, _ in page.get(USED, [])))
    for metric in (USED, TEMPERATURE, "DCGM_FI_DEV_XID_ERRORS"):
        assert pods_of(page, metric, gpu="0") == [("a", "train", "main"), ("b", "serve", "web")]
        assert pods_of(page, metric, GPU_I_PROFILE="1g.10gb") == [("a", "small", "main")]
        assert pods_of(page, metric, GPU_I_PROFILE="3g.40gb") == [("c", "custom", "main"), ("c", "renamed", "main")]
    assert value(page, "ocigpu_exporter_pod_resources_up") == 1


@pytest.mark.rest
def test_replicas_count_apart_where_they_are_wanted(simulated_host: SimulatedHost, tmp_path: Path) -> None:
    gpu = simulated_host.gpus[4]
    pods = [["a", f"p{number}", "c", "nvidia.com/gpu", [f"{gpu}::{number}"]] for number in range(2)]
    with (
        kubelet(tmp_path, pods) as (kubelet_socket, _),
        exporter(
            simulated_host.directory, tmp_path, "-k", "--kubernetes-virtual-gpus", "--use-old-namespace",
            "--hostname-label=Hostname", DCGM_POD_RESOURCES_KUBELET_SOCKET=kubelet_socket,
        ) as running,
    ):  # fmt: skip
        page = running.wait("pods", lambda page: any("vgpu" in labels for labels, _ in page.get(USED, [])))
    found = [labels for labels, _ in page[USED] if labels["uuid"] == gpu]
    assert [(labels["pod_name"], labels["vgpu"], labels["Hostname"]) for labels in found] == [
        ("p0", "0", "node-1"),
        ("p1", "1", "node-1"),
    ]


@pytest.mark.rest
def test_gpus_of_resource_claims_have_their_pods(h100: SimulatedHost, tmp_path: Path) -> None:
    """As kubelet 1.36 lists them: one device, with the CDI names of the claim and of the GPU under it."""
    names = ["k8s.gpu.nvidia.com/claim=1-gpu-0", "k8s.gpu.nvidia.com/device=gpu-0"]
    claims = [
        ["a", "train", "main", "mine", "gpu.nvidia.com", "node-1", "gpu-0", names],
        ["b", "small", "web", "cut", "gpu.nvidia.com", "node-1", "gpu-1-mig-3g40gb-9-0", []],
        ["b", "net", "web", "nic", "net.example.com", "node-1", "gpu-0", []],
    ]
    with (
        kubelet(tmp_path, []) as (kubelet_socket, file),
        exporter(
            h100.directory, tmp_path, "-k", "--kubernetes-enable-dra", "--pod-resources-kubelet-socket", kubelet_socket
        ) as running,
    ):
        write_pods(file, [], claims=claims)
        page = running.wait(
            "the pod", lambda page: USED in page and pods_of(page, USED, gpu="0") == [("a", "train", "main")]
        )
        assert pods_of(page, USED, GPU_I_PROFILE="3g.40gb") == [("b", "small", "web")]
        assert pods_of(page, USED, GPU_I_PROFILE="1g.10gb") == [("", "", "")]
        (labels,) = [labels for labels, _ in page[USED] if labels["gpu"] == "0"]
        assert {name: text for name, text in labels.items() if name.startswith("dra_")} == {
            "dra_claim_name": "mine", "dra_claim_namespace": "a", "dra_driver_name": "gpu.nvidia.com",
            "dra_pool_name": "node-1", "dra_device_name": "gpu-0",
        }  # fmt: skip
        (labels,) = [labels for labels, _ in page[USED] if labels.get("GPU_I_PROFILE") == "3g.40gb"]
        assert labels["dra_mig_profile"] == "3g.40gb"
        assert labels["dra_mig_device_uuid"].startswith("MIG-")
        assert "ocigpu_exporter_vfio_gpu_allocated" not in page, "these GPUs are not for virtual machines"


def test_a_kubelet_that_fails_costs_only_the_labels_of_pods(simulated_host: SimulatedHost, tmp_path: Path) -> None:
    pods = [["a", "p", "c", "nvidia.com/gpu", [simulated_host.gpus[0]]]]
    pod_up = "ocigpu_exporter_pod_resources_up"
    with (
        kubelet(tmp_path, pods) as (kubelet_socket, file),
        exporter(
            simulated_host.directory, tmp_path, "--kubernetes", DCGM_POD_RESOURCES_KUBELET_SOCKET=kubelet_socket
        ) as running,
    ):
        running.wait(
            "the pod", lambda page: pods_of(page, USED, gpu="0") == [("a", "p", "c")] if USED in page else False
        )
        write_pods(file, fail="over the limit")
        page = running.wait("the failure", lambda page: value(page, pod_up) == 0)
        assert value(page, UP) == 1
        assert pods_of(running.next_page(), USED, gpu="0") == [("", "", "")]
        assert running.log.count("no labels of pods") == 1, running.log
        assert "RESOURCE_EXHAUSTED: over the limit" in running.log
        write_pods(file, pods)
        running.wait("the pod again", lambda page: pods_of(page, USED, gpu="0") == [("a", "p", "c")])
        write_pods(file, [])
        running.wait("its end", lambda page: pods_of(page, USED, gpu="0") == [("", "", "")])


def test_without_a_kubelet_there_are_metrics(simulated_host: SimulatedHost, tmp_path: Path) -> None:
    nobody = str(tmp_path / "none.sock")
    with exporter(simulated_host.directory, tmp_path, "-k", "--pod-resources-kubelet-socket", nobody) as running:
        page = running.wait("a sample", lambda page: USED in page)
        assert value(page, "ocigpu_exporter_pod_resources_up") == 0
        assert "none.sock: UNAVAILABLE" in running.log


@pytest.mark.rest
def test_a_list_of_pods_of_more_than_four_mebibytes(simulated_host: SimulatedHost, tmp_path: Path) -> None:
    pods = [["n", f"pod-{number}-{'x' * 200}", "c", "nvidia.com/gpu", ["y" * 200]] for number in range(12000)]
    pods.append(["n", "mine", "c", "nvidia.com/gpu", [simulated_host.gpus[1]]])
    with (
        kubelet(tmp_path, pods) as (kubelet_socket, _),
        exporter(simulated_host.directory, tmp_path, "-k", "--pod-resources-kubelet-socket", kubelet_socket) as running,
    ):
        page = running.wait("a sample", lambda page: USED in page)
    assert pods_of(page, USED, gpu="1") == [("n", "mine", "c")]


@pytest.mark.rest
def test_gpus_for_virtual_machines_have_pods_without_nvml(tmp_path: Path) -> None:
    tree = {
        "/sys/class/misc/vfio/dev": "10:196\n", "/dev/vfio/vfio": "",
        **pci_function("0000:3b:00.0", "10de:2330", "0302", "vfio-pci", "9"),
        **pci_function("0000:3c:00.0", "10de:2330", "0302", "vfio-pci", "10"),
    }  # fmt: skip
    host = tmp_path / "host"
    host.mkdir()
    write_tree(host, tree)
    (host / "config.toml").write_text(f'[simulation]\nroot = "{host}"\n')
    pods = [["vm", "guest", "compute", "nvidia.com/GH100_H100_SXM5_80GB", ["9"]]]
    with (
        kubelet(tmp_path, pods) as (kubelet_socket, _),
        exporter(host, tmp_path, "-k", "--pod-resources-kubelet-socket", kubelet_socket) as running,
    ):
        allocated = "ocigpu_exporter_vfio_gpu_allocated"
        page = running.wait("the GPUs", lambda page: allocated in page)
        assert value(page, UP) == 0
        assert "there is no NVML library" in running.log
    found = {
        labels["pci_bus_id"]: (number, labels.get("pod"), labels["iommu_group"]) for labels, number in page[allocated]
    }
    assert found == {"0000:3b:00.0": (1, "guest", "9"), "0000:3c:00.0": (0, None, "10")}


# --- what goes wrong, and recovers


def test_a_lost_gpu_hides_no_other_and_returns(simulated_host: SimulatedHost, tmp_path: Path) -> None:
    with exporter(simulated_host.directory, tmp_path) as running:
        running.wait("a sample", lambda page: TEMPERATURE in page)
        with file_of(simulated_host, "faults", "lost 3\n"):
            page = running.wait("the loss", lambda page: value(page, "ocigpu_exporter_gpu_up", gpu="3") == 0)
            assert {labels["gpu"] for labels, _ in page[TEMPERATURE]} == set("0124567")
            assert value(page, "ocigpu_exporter_gpu_up", UUID=simulated_host.gpus[3]) == 0, "its name is still known"
        page = running.wait("its return", lambda page: value(page, "ocigpu_exporter_gpu_up", gpu="3") == 1)
        assert len(page[TEMPERATURE]) == 8
        assert re.findall("GPU 3.*", running.log) == ["GPU 3: GPU is lost (NVML 15)", "GPU 3 answers again"]


@pytest.mark.rest
def test_a_gpu_that_stays_lost_costs_the_others_nothing_that_is_counted_between_samples(
    h100: SimulatedHost, tmp_path: Path
) -> None:
    with file_of(h100, "faults", "lost 1\n"), exporter(h100.directory, tmp_path) as running:
        page = running.wait("GPM", lambda page: ACTIVE in page)
        assert {labels["gpu"] for labels, _ in page[ACTIVE]} == {"0"}


@pytest.mark.rest
def test_gpus_that_come_and_go_are_seen_between_samples(h100: SimulatedHost, tmp_path: Path) -> None:
    up = "ocigpu_exporter_gpu_up"
    listed, node = (h100.directory / name for name in ("proc/driver/nvidia/gpus/0000:01:00.0", "dev/nvidia0"))
    watch = ("--enable-gpu-bind-unbind-watch", "--gpu-bind-unbind-poll-interval", "100ms")
    with exporter(h100.directory, tmp_path, *watch, interval=3600000) as running:
        running.wait("a sample", lambda page: len(page.get(up, [])) == 2)
        hidden = h100.directory / "hidden"
        hidden.mkdir()
        try:
            for number, path in enumerate((node, listed)):
                path.rename(hidden / str(number))
            page = running.wait("one GPU less", lambda page: len(page[up]) == 1)
            assert page[up][0][0]["UUID"] == h100.gpus[1]
        finally:
            for number, path in enumerate((node, listed)):
                (hidden / str(number)).rename(path)
            hidden.rmdir()
        running.wait("both", lambda page: len(page[up]) == 2)


@pytest.mark.rest
def test_a_gpu_that_nvml_no_longer_knows_is_down_while_the_driver_has_it(h100: SimulatedHost, tmp_path: Path) -> None:
    up = "ocigpu_exporter_gpu_up"
    node, away = (h100.directory / name for name in ("dev/nvidia0", "nvidia0"))
    with exporter(h100.directory, tmp_path) as running:
        running.wait("a sample", lambda page: len(page.get(up, [])) == 2)
        node.rename(away)
        try:
            os.kill(child_of(running.process.pid), signal.SIGKILL)
            page = running.wait("the loss", lambda page: {number for _, number in page[up]} == {0, 1})
            assert value(page, up, UUID=h100.gpus[0]) == 0
            assert value(page, up, UUID=h100.gpus[1]) == 1
            assert {labels["UUID"] for labels, _ in page[TEMPERATURE]} == {h100.gpus[1]}
        finally:
            away.rename(node)


def test_xids_are_counted_and_told_by_gpu_and_instance(h100: SimulatedHost, tmp_path: Path) -> None:
    words = ("-f", all_collectors(tmp_path), "--xid-count-window-size", "60000")
    xid, count = "DCGM_FI_DEV_XID_ERRORS", "DCGM_EXP_XID_ERRORS_COUNT"
    with file_of(h100, "faults", "\n") as faults, exporter(h100.directory, tmp_path, *words) as running:
        page = running.wait("a sample", lambda page: xid in page)
        assert {number for _, number in page[xid]} == {0}
        with faults.open("a") as file:
            file.write("xid 0 31\nxid 0 79\nxid 0 31\nxid 1 13 7 0\n")
        page = running.wait("the events", lambda page: len(page.get(count, [])) == 3)
        assert value(page, xid, gpu="0", err_msg="GPU memory page fault") == 31
        assert value(page, "ocigpu_gpu_health", gpu="0", reason="XID 79") == 0
        assert value(page, "ocigpu_gpu_health", gpu="1", GPU_I_ID="7") == 1, "13 is a fault of a program"
        assert value(page, count, gpu="0", xid="31", window_size_in_ms="60000") == 2
        assert value(page, count, gpu="0", xid="79") == 1
        assert value(page, "DCGM_EXP_XID_ERRORS_TOTAL", gpu="0", xid="31") == 2
        assert value(page, "DCGM_EXP_XID_ERRORS_TOTAL", GPU_I_ID="7", xid="13") == 1
        assert value(page, xid, GPU_I_ID="7", err_code="13") == 13
        assert value(page, xid, GPU_I_ID="1", err_code="0") == 0


@pytest.mark.rest
def test_nvml_that_hangs_delays_no_page(simulated_host: SimulatedHost, tmp_path: Path) -> None:
    """The process is stopped instead: then it hangs at once, as one does whose driver does not return."""
    with exporter(simulated_host.directory, tmp_path) as running:
        running.wait("a sample", lambda page: TEMPERATURE in page)
        child = child_of(running.process.pid)
        os.kill(child, signal.SIGSTOP)
        page = running.wait("old values", lambda page: value(page, AGE) > 1)
        assert len(page[TEMPERATURE]) == 8
        done = value(page, DONE, result="ok")
        os.kill(child, signal.SIGKILL)
        page = running.wait("another process", lambda page: value(page, DONE, result="ok") > done)
        assert value(page, UP) == 1
        assert "no metrics of GPUs: the process that asks NVML ended (status -9)" in running.log
        assert "NVML answers again" in running.log


@pytest.mark.rest
def test_a_driver_that_is_not_loaded_is_waited_for(simulated_host: SimulatedHost, tmp_path: Path) -> None:
    with (
        file_of(simulated_host, "faults", "init 9\n") as faults,
        exporter(simulated_host.directory, tmp_path) as running,
    ):
        running.wait("a failure", lambda page: value(page, DONE, result="failed") > 2)
        page = running.page()
        assert (value(page, UP), TEMPERATURE in page) == (0, False)
        assert re.findall("error.*", running.log) == ["error: no metrics of GPUs: Driver Not Loaded (NVML 9)"]
        faults.write_text("")
        running.wait("the driver", lambda page: value(page, UP) == 1 and TEMPERATURE in page)


@pytest.mark.rest
def test_the_process_that_asks_nvml_ends_with_the_exporter(simulated_host: SimulatedHost, tmp_path: Path) -> None:
    with exporter(simulated_host.directory, tmp_path) as running:
        running.wait("a sample", lambda page: TEMPERATURE in page)
        child = child_of(running.process.pid)
        status = Path(f"/proc/{child}/status").read_text()
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert (fields["CapEff"], fields["NoNewPrivs"]) == ("0" * 16, "1")


# --- the list of metrics


@pytest.mark.rest
def test_the_list_of_metrics_is_followed_and_a_bad_one_changes_nothing(
    simulated_host: SimulatedHost, tmp_path: Path
) -> None:
    file = tmp_path / "collectors.csv"
    file.write_text(f"{TEMPERATURE}, gauge, hot\n")
    with exporter(simulated_host.directory, tmp_path, "--collectors", str(file)) as running:
        page = running.wait("a sample", lambda page: TEMPERATURE in page)
        assert [name for name in page if name.startswith("DCGM")] == [TEMPERATURE]
        assert f"# HELP {TEMPERATURE} hot\n" in running.get().body.decode()
        file.write_text(f"{UTIL}, gauge, busy\n")
        page = running.wait("the new list", lambda page: UTIL in page)
        assert TEMPERATURE not in page
        file.write_text(f"{UTIL}, gauge\n")
        page = running.wait("the bad list", lambda page: value(page, "ocigpu_exporter_collectors_up") == 0)
        assert UTIL in page
        assert "collectors.csv line 1: three fields are required" in running.log
        file.write_text(f"{UTIL}, gauge, busy\nDCGM_FI_DEV_CPU_UTIL_TOTAL, gauge, x\n")
        running.wait("a good list", lambda page: value(page, "ocigpu_exporter_collectors_up") == 1)
        assert "line 2: DCGM_FI_DEV_CPU_UTIL_TOTAL is left out: only DCGM reports CPUs" in running.log
        before = running.log.count("read again")
        running.process.send_signal(signal.SIGHUP)
        running.wait("SIGHUP", lambda _page: running.log.count("read again") > before)


@pytest.mark.parametrize(
    ("words", "code", "status", "named"),
    [
        (["--collectors", "/none.csv"], "OCIGPU-KUBE-4", 1, "collectors /none.csv: No such file"),
        (["--collectors", "/dev/zero"], "OCIGPU-KUBE-4", 1, "it is not a file"),
        (["--kubernetes-pod-label-allowlist-regex=(a"], "OCIGPU-KUBE-4", 1, "--kubernetes-pod-label-allowlist-regex"),
        (["--frobnicate"], "OCIGPU-ARG-1", 2, "--frobnicate"),
        (["--address", "192.0.2.1:1"], "OCIGPU-KUBE-3", 1, "listen on 192.0.2.1:1"),
    ],
)
def test_what_cannot_begin_says_why_in_a_line(words: list[str], code: str, status: int, named: str) -> None:
    done = run([PROGRAMS / "ocigpu", "exporter", *words], check=False)
    assert done.returncode == status
    line = done.stderr.splitlines()[0]
    assert line.startswith(f"ocigpu: {code}: ")
    assert named in line


def test_a_port_that_is_taken_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run([PROGRAMS / "ocigpu", "exporter", "-a", f"127.0.0.1:{port}"], check=False)
    assert f"listen on 127.0.0.1:{port}: Address already in use" in done.stderr


WITHOUT_GRPC = """import sys
sys.modules.update(dict.fromkeys(("grpc", "google.protobuf")))
from ocigpu.cli.front.main import main
sys.exit(main(["exporter", *sys.argv[1:]]))
"""


def test_the_extra_that_is_missing_is_named() -> None:
    done = run([sys.executable, "-c", WITHOUT_GRPC, "-k"], check=False)
    assert done.returncode == 1
    assert "OCIGPU-KUBE-3: --kubernetes needs grpcio and protobuf" in done.stderr
    assert "-py3-none-any.whl[kubernetes]'" in done.stderr


@pytest.mark.rest
def test_without_the_extra_there_are_metrics_without_pods(simulated_host: SimulatedHost, tmp_path: Path) -> None:
    """As from ``make install`` and the packages, which have no grpcio."""
    program = [sys.executable, "-c", WITHOUT_GRPC]
    with exporter(simulated_host.directory, tmp_path, "--debug", program=program) as running:
        page = running.wait("a sample", lambda page: USED in page)
        assert "debug: sample of 8 GPUs in " in running.log
    assert pods_of(page, USED, gpu="0") == [("", "", "")]


def test_a_log_in_json_and_slow_clients_that_keep_no_other_waiting(
    simulated_host: SimulatedHost, tmp_path: Path
) -> None:
    with exporter(simulated_host.directory, tmp_path, "--log-format", "json") as running:
        running.wait("a sample", lambda page: TEMPERATURE in page)
        slow = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(100)]
        assert running.get("/health").status == 200
        with ThreadPoolExecutor(8) as clients:
            pages = list(clients.map(lambda _number: running.page(), range(8)))
        assert all(len(page[TEMPERATURE]) == 8 for page in pages)
        for connection in slow:
            connection.close()
    lines = [json.loads(line) for line in running.log.splitlines()]
    assert [line["msg"] for line in lines] == [f"listening on 127.0.0.1:{running.port}", "ending"]
