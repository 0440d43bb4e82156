"""How much of a shared GPU each pod uses."""

import json
from pathlib import Path

import pytest
from exporter_lab import read_page, value
from support.product import SimulatedHost

from ocigpu.exporter.collectors import Collector
from ocigpu.exporter.exposition import Picture, render
from ocigpu.exporter.options import ExporterOptions
from ocigpu.exporter.owners import WHOLE, find_owners
from ocigpu.exporter.sample import GpuSample, Sample
from ocigpu.exporter.sampler import Orders, Sampler
from ocigpu.exporter.shares import USED, UTILIZATION, find_split, pod_uid, read_pod_uids
from ocigpu.kubernetes.cluster.owners import Held, Owner
from ocigpu.system.settings_file import read_settings

ONE, TWO = "11111111-2222-3333-4444-555555555555", "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"
SHARED = "nvidia.com/gpu.shared"


@pytest.mark.parametrize(
    ("cgroup", "uid"),
    [
        (f"0::/kubepods/besteffort/pod{ONE}/0123456789abcdef", ONE),
        ("0::/kubepods.slice/kubepods-burstable-pod" + ONE.replace("-", "_") + ".slice/cri-containerd-abc.scope", ONE),
        (f"12:pids:/user.slice\n4:memory:/kubepods/pod{TWO}/x\n0::/\n", TWO),
        ("0::/kubepods/pod0123456789abcdef0123456789abcdef/x", "0123456789abcdef0123456789abcdef"),
        (f"0::/kubepods/pod{ONE}/c/pod{TWO}", ONE),
        ("0::/user.slice/podman-1.scope", ""),
        ("", ""),
    ],
    ids=["cgroupfs", "systemd", "version 1", "static pod", "a container's own directory", "no pod", "empty"],
)
def test_the_pod_of_a_process_is_in_its_cgroup(cgroup: str, uid: str) -> None:
    assert pod_uid(cgroup) == uid


def checkpoint(path: Path, **uids: list[str]) -> str:
    entries = [
        {"PodUID": uid.replace("_", "-"), "ContainerName": "c", "ResourceName": SHARED, "DeviceIDs": {"-1": ids}}
        for uid, ids in uids.items()
    ]
    path.write_text(json.dumps({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}}, "Checksum": 1}))
    return str(path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"Data": {"PodDeviceEntries": [{"PodUID": 1}]}}', "x", "[" * 100000])
def test_a_checkpoint_that_is_none_tells_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "checkpoint").write_text(text)
    containers = [Held(Owner("p", "n", "c"), SHARED, "GPU-a::0")]
    assert read_pod_uids(containers, str(tmp_path / "checkpoint")) == {}
    assert read_pod_uids(containers, str(tmp_path / "none")) == {}


def test_processes_of_nvml_are_those_of_pods(simulated_host: SimulatedHost, tmp_path: Path) -> None:
    uuid = simulated_host.gpus[2]
    for pid, uid in ((101, ONE), (102, ONE), (103, TWO), (104, "")):
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/cgroup").write_text(f"0::/kubepods/pod{uid}/x\n" if uid else "0::/\n")
    path = checkpoint(
        tmp_path / "checkpoint",
        **{ONE.replace("-", "_"): [f"{uuid}::0"], TWO.replace("-", "_"): [f"{uuid}::1"]},
    )
    containers = [
        Held(Owner(name, "n", "c"), SHARED, f"{uuid}::{number}") for number, name in enumerate(("one", "two", "new"))
    ]
    load = simulated_host.directory / "load"
    load.write_text("".join(f"process 2 {pid} 100 {pid - 91}\n" for pid in range(101, 106)))
    try:
        gpus = sample_processes(simulated_host)
    finally:
        load.unlink()
    assert gpus[2].processes == tuple((pid, 100, pid - 91) for pid in range(101, 106))
    assert gpus[1].processes == ()
    owners = find_owners(containers, gpus, ["nvidia.com/"], virtual=True).gpus
    found = find_split(gpus, owners, read_pod_uids(containers, path), str(tmp_path / "proc"))
    key = (uuid, WHOLE)
    assert found == {
        (key, Owner("one", "n", "c", "0")): {UTILIZATION: 21, USED: 200},
        (key, Owner("two", "n", "c", "1")): {UTILIZATION: 12, USED: 100},
    }


def sample_processes(host: SimulatedHost) -> tuple[GpuSample, ...]:
    sampler = Sampler(read_settings(str(host.settings)), deadline=60.0)
    try:
        sampler.order(Orders((UTILIZATION, USED), 3600, 300, 300, processes=True))
        while not (samples := sampler.wait(20)):
            pass
    finally:
        sampler.close()
    return samples[0].gpus


def test_pods_that_share_a_mig_device_have_their_own_memory(mig_host: SimulatedHost, tmp_path: Path) -> None:
    for pid, uid in ((101, ONE), (102, ONE), (103, TWO)):
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/cgroup").write_text(f"0::/kubepods/pod{uid}/x\n")
    number, other = (each.number for each in sample_processes(mig_host)[0].instances)
    load = mig_host.directory / "load"
    places = ((101, 100, number), (102, 50, number), (103, 30, number), (103, 7, other))
    load.write_text("".join(f"process 0 {pid} {memory} 5 {place}\n" for pid, memory, place in places))
    try:
        gpus = sample_processes(mig_host)
    finally:
        load.unlink()
    shared = gpus[0].instances[0]
    assert sorted(each[:2] for each in shared.processes) == [(101, 100), (102, 50), (103, 30)]
    containers = [Held(Owner(name, "n", "c"), SHARED, f"{shared.uuids[0]}::{n}") for n, name in enumerate(("a", "b"))]
    owners = find_owners(containers, gpus, ["nvidia.com/"], virtual=True).gpus
    found = find_split(gpus, owners, {("n", "a"): ONE, ("n", "b"): TWO}, str(tmp_path / "proc"))
    key = (gpus[0].uuid, number)
    assert found == {(key, Owner("a", "n", "c", "0")): {USED: 150}, (key, Owner("b", "n", "c", "1")): {USED: 30}}
    collectors = (Collector(USED, "gauge", "memory"),)
    page = read_page(render(collectors, Picture(Sample(gpus), owners, split=found), ExporterOptions(), "").decode())
    assert value(page, USED, pod="a", GPU_I_ID=str(number)) == 150
