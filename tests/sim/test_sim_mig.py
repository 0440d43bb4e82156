"""GPU instances of a simulated host, made and destroyed through nvidia-ml-py: its structures are the ABI to be held."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.product import python_of_nobody

from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.sim.create import create_host
from ocigpu.sim.libraries import library_triplet
from ocigpu.sim.made import describe_host
from ocigpu.sim.models import MODELS, Model, sim_uuid
from ocigpu.system.settings_file import read_settings

RunPython = Callable[..., subprocess.CompletedProcess[str]]

BEGIN = """
import ctypes, sys, pynvml as n
n.nvmlInit()
gpus = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
def ask(function, *arguments):
    try:
        return function(*arguments)
    except n.NVMLError as error:
        return str(error)
def fields(info):
    return [value for name, kind in info._fields_ if isinstance(value := getattr(info, name), int)]
def placements(function, where, profile):
    count, room = ctypes.c_uint(16), (n.c_nvmlGpuInstancePlacement_t * 16)()
    failure = ask(function, where, profile, room, ctypes.byref(count))
    return [(item.start, item.size) for item in room[:count.value]] if failure == 0 else failure
def listed(function, where, profile, kind):
    count, room = ctypes.c_uint(0), (kind * 16)()
    failure = ask(function, where, profile, room, ctypes.byref(count))
    return list(room[:count.value]) if failure == 0 else failure
gi_places = n.nvmlDeviceGetGpuInstancePossiblePlacements
ci_places = n.nvmlGpuInstanceGetComputeInstancePossiblePlacements
make_gi, make_ci = n.nvmlDeviceCreateGpuInstance, n.nvmlGpuInstanceCreateComputeInstance
gi_profile, ci_profile = n.nvmlDeviceGetGpuInstanceProfileInfo, n.nvmlGpuInstanceGetComputeInstanceProfileInfo
make_at, by_id = n.nvmlDeviceCreateGpuInstanceWithPlacement, n.nvmlDeviceGetGpuInstanceProfileInfoById
all_gis, gi_by_id = n.nvmlDeviceGetGpuInstances, n.nvmlDeviceGetGpuInstanceById
all_cis = n.nvmlGpuInstanceGetComputeInstances
GI, CI, Place = n.c_nvmlGpuInstance_t, n.c_nvmlComputeInstance_t, n.c_nvmlGpuInstancePlacement_t
def gi(handle):
    info = n.nvmlGpuInstanceGetInfo(handle)
    assert ctypes.addressof(info.device.contents) in map(lambda gpu: ctypes.addressof(gpu.contents), gpus)
    return info.id, info.profileId, (info.placement.start, info.placement.size)
def ci(handle):
    info = n.nvmlComputeInstanceGetInfo(handle)
    return info.id, info.profileId, (info.placement.start, info.placement.size)
def migs(gpu):
    found = (ask(n.nvmlDeviceGetMigDeviceHandleByIndex, gpu, i) for i in range(n.nvmlDeviceGetMaxMigDeviceCount(gpu)))
    return [n.nvmlDeviceGetName(item).rpartition(" ")[2] for item in found if not isinstance(item, str)]
"""


def make_host(directory: Path, gpus: int, model: str, *mig: str, nodes: bool | None = None) -> Path:
    create_host(str(directory), gpus, model, mig, nodes=nodes, dri=False, compat32=False, ldcache=False)
    return directory


@pytest.fixture(scope="module")
def host(session_directory: Path) -> Path:
    """Two H100s: the first without MIG mode, the second in MIG mode and not cut."""
    return make_host(session_directory / "cut by NVML", 2, "h100", "1:")


def _profile_lines(model: Model) -> list[str]:
    lines = []
    for item in model.mig_profiles:
        counts = [item.most, item.multiprocessors, *item.engines]
        lines.append(
            str([item.enumerator, [item.id, 0, item.compute_slices, *counts, item.memory_mib], f"MIG {item.name}"])
        )
    return sorted(lines)


@pytest.mark.parametrize("model", ["h100", "rtxpro6000"])
def test_profiles_are_told_in_every_version(run_python: RunPython, sim_host: Path, tmp_path: Path, model: str) -> None:
    host = sim_host if model == "h100" else make_host(tmp_path / "host", 1, model, nodes=False)
    script = """
class V3(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint), *n.c_nvmlGpuInstanceProfileInfo_v2_t._fields_[1:2],
                *n.c_nvmlGpuInstanceProfileInfo_v2_t._fields_[3:], ("capabilities", ctypes.c_uint)]
for profile in range(n.NVML_GPU_INSTANCE_PROFILE_COUNT):
    old = ask(gi_profile, gpus[0], profile, 1)
    if isinstance(old, str):
        assert old == "Not Supported", old
        continue
    new = gi_profile(gpus[0], profile)
    assert fields(new)[1:] == fields(old)
    assert fields(by_id(gpus[0], old.id)) == fields(new)
    newest = V3(version=3 << 24 | ctypes.sizeof(V3))
    assert n.nvmlLib.nvmlDeviceGetGpuInstanceProfileInfoV(gpus[0], profile, ctypes.byref(newest)) == 0
    assert (newest.id, newest.ofaCount, newest.memorySizeMB) == (old.id, old.ofaCount, old.memorySizeMB)
    assert newest.name.decode() == new.name and newest.capabilities == 2 * ("gfx" in new.name)
    newest.version += 1
    assert n.nvmlLib.nvmlDeviceGetGpuInstanceProfileInfoV(gpus[0], profile, ctypes.byref(newest)) == 25
    print([profile, fields(old), new.name])
print(ask(gi_profile, gpus[0], 99), ask(by_id, gpus[0], 99))
"""
    done = run_python(BEGIN + script, host=host)
    assert done.stderr == ""
    *lines, refused = done.stdout.splitlines()
    assert sorted(lines) == _profile_lines(MODELS[model])
    assert refused == "Invalid Argument Invalid Argument"


def test_mode_is_changed_and_placements_need_it(run_python: RunPython, host: Path) -> None:
    script = """
print(ask(make_gi, gpus[0], 19), placements(gi_places, gpus[0], 9))
print(n.nvmlDeviceSetMigMode(gpus[0], 1), n.nvmlDeviceGetMigMode(gpus[0]), ask(n.nvmlDeviceSetMigMode, gpus[0], 2))
print(*[placements(gi_places, gpus[0], id_) for id_ in (9, 5, 15, 14)])
short = ctypes.c_uint(1)
print(ask(gi_places, gpus[0], 9, (n.c_nvmlGpuInstancePlacement_t * 1)(), ctypes.byref(short)))
print(n.nvmlDeviceSetMigMode(gpus[0], 0), n.nvmlDeviceGetMigMode(gpus[0]))
"""
    done = run_python(BEGIN + script, host=host)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "Not Supported Not Supported",
        "0 [1, 1] Invalid Argument",
        "[(0, 4), (4, 4)] [(0, 4)] [(0, 2), (2, 2), (4, 2), (6, 2)] [(0, 2), (2, 2), (4, 2)]",
        "Insufficient Size",
        "0 [0, 0]",
    ]


def test_instances_are_made_listed_and_destroyed(run_python: RunPython, host: Path) -> None:
    script = """
gpu = gpus[1]
capacity = lambda: [n.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, id_) for id_ in (19, 20, 15, 14, 9, 5, 0)]
print(capacity())
big = make_gi(gpu, 9)
small = make_at(gpu, 19, ctypes.byref(Place(1, 1)))
media = make_gi(gpu, 20)
print(gi(big), gi(small), gi(media), capacity())
print(ask(make_at, gpu, 19, ctypes.byref(Place(1, 1))),
      ask(make_at, gpu, 14, ctypes.byref(Place(3, 2))),
      ask(make_gi, gpu, 5), ask(make_gi, gpu, 20), sep=", ")
kind = GI
print([gi(item)[0] for item in listed(all_gis, gpu, 19, kind)], gi(gi_by_id(gpu, 1)),
      ask(gi_by_id, gpu, 2), listed(all_gis, gpu, 14, kind))

one = ci_profile(big, 0, 0)
print(fields(one), one.name, fields(ci_profile(big, 0, 0, 1)) == fields(one)[1:])
print(*[ask(ci_profile, big, profile, 0) for profile in (3, 4, 99)], sep=", ")
print(placements(ci_places, big, 0), migs(gpu))
parts = [make_ci(big, 0), make_ci(big, 0)]
print([ci(part) for part in parts], n.nvmlGpuInstanceGetComputeInstanceRemainingCapacity(big, 0),
      ask(make_ci, big, 1), ask(n.nvmlGpuInstanceDestroy, big))
whole = make_ci(media, 0)
print(migs(gpu), [ci(item)[0] for item in listed(all_cis, big, 0, CI)])
mig = n.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
info = n.nvmlDeviceGetAttributes(mig)
print(info.multiprocessorCount, info.gpuInstanceSliceCount, info.computeInstanceSliceCount, info.sharedDecoderCount,
      n.nvmlDeviceGetMemoryInfo(mig).total >> 20)
print(ask(n.nvmlDeviceSetMigMode, gpu, 0), ci(n.nvmlGpuInstanceGetComputeInstanceById(big, 1)))

n.nvmlComputeInstanceDestroy(parts[0])
print(migs(gpu), ask(n.nvmlComputeInstanceGetInfo, parts[0]), ask(n.nvmlDeviceGetUUID, mig),
      ask(n.nvmlComputeInstanceDestroy, parts[0]))
for item in (parts[1], whole):
    n.nvmlComputeInstanceDestroy(item)
for item in (big, small, media):
    n.nvmlGpuInstanceDestroy(item)
print(migs(gpu), capacity(), ask(n.nvmlGpuInstanceGetInfo, big), n.nvmlDeviceGetMigMode(gpu))
"""
    done = run_python(BEGIN + script, host=host)
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.splitlines() == [
        "[7, 1, 4, 3, 2, 1, 1]",
        "(1, 9, (4, 4)) (7, 19, (1, 1)) (8, 20, (3, 1)) [2, 0, 0, 0, 0, 0, 0]",
        "Insufficient Resources, Invalid Argument, Insufficient Resources, Insufficient Resources",
        "[7] (1, 9, (4, 4)) Not Found []",
        f"[{2 << 24 | 136}, 0, 1, 3, 20, 3, 3, 0, 3, 0] MIG 1c.3g.40gb True",
        "Not Supported, Not Supported, Invalid Argument",
        "[(0, 1), (1, 1), (2, 1)] []",
        "[(0, 0, (0, 1)), (1, 0, (1, 1))] 1 Insufficient Resources In use by another client",
        "['1c.3g.40gb', '1c.3g.40gb', '1g.10gb+me'] [0, 1]",
        "20 3 1 3 40448",
        "In use by another client (1, 0, (1, 1))",
        "['1c.3g.40gb', '1g.10gb+me'] Invalid Argument Invalid Argument Invalid Argument",
        "[] [7, 1, 4, 3, 2, 1, 1] Invalid Argument [1, 1]",
    ]


def _facts(host: Path) -> list[tuple[int, bool, list[tuple[str, str]]]]:
    facts = read_host_facts(read_settings(str(host / "config.toml")))
    return [(gpu.index, gpu.mig_enabled, [(mig.profile, mig.uuid) for mig in gpu.mig_devices]) for gpu in facts.gpus]


@pytest.mark.parametrize("nodes", [False, pytest.param(True, marks=pytest.mark.root)])
def test_what_is_made_is_there_for_every_other_process(run_python: RunPython, tmp_path: Path, nodes: bool) -> None:
    """Made in one process: the next one, nvidia-smi, the kernel's files, the nodes and our own discovery show it."""
    host = make_host(tmp_path / "host", 2, "a100", "0:7g.40gb", nodes=nodes)
    before = {path: path.read_bytes() if path.is_file() else b"" for path in host.rglob("*") if "mig" not in path.name}
    make = """
n.nvmlDeviceSetMigMode(gpus[1], 1)
for profile, size in ((9, 2), (14, 1), (19, 0)):
    instance = make_gi(gpus[1], profile)
    make_ci(instance, size)
print(migs(gpus[1]))
"""
    look = "print(n.nvmlDeviceGetMigMode(gpus[1]), *map(migs, gpus))"
    destroy = """
for profile, size in ((9, 2), (14, 1), (19, 0)):
    for instance in listed(all_gis, gpus[1], profile, GI):
        for part in listed(all_cis, instance, size, CI):
            n.nvmlComputeInstanceDestroy(part)
        n.nvmlGpuInstanceDestroy(instance)
n.nvmlDeviceSetMigMode(gpus[1], 0)
"""
    made = run_python(BEGIN + make, host=host)
    assert (made.stderr, made.stdout) == ("", "['3g.20gb', '2g.10gb', '1g.5gb']\n")
    seen = run_python(BEGIN + look, host=host)
    assert seen.stdout == "[1, 1] ['7g.40gb'] ['3g.20gb', '2g.10gb', '1g.5gb']\n"
    listing = subprocess.run([host / "usr/bin/nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"MIG (\S+) +Device +(\d+): \(UUID: (MIG-\S+)\)", listing)
    assert [(profile, number) for profile, number, _ in found] == [
        *(("7g.40gb", "0"), ("3g.20gb", "0"), ("2g.10gb", "1"), ("1g.5gb", "2"))
    ]
    assert _facts(host) == [
        (0, True, [("7g.40gb", sim_uuid("MIG", "a100", 0, 0, "7g.40gb"))]),
        (1, True, [(profile, uuid) for profile, _, uuid in found[1:]]),
    ]
    shown = [mig for gpu in describe_host(str(host))["gpus"] for mig in gpu["mig_devices"]]
    assert [(mig["profile"], mig["uuid"]) for mig in shown] == [(profile, uuid) for profile, _, uuid in found]
    assert [(mig["index"], mig["gi_minor"], mig["ci_minor"]) for mig in shown[:2]] == [(0, 3, 4), (0, 147, 148)]
    first = 3 + 135 + 1 * 9  # gpu1, GPU instance 1
    access = host / "proc/driver/nvidia/capabilities/gpu1/mig/gi1"
    assert (access / "access").read_text() == f"DeviceFileMinor: {first}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
    assert (access / "ci0/access").read_text().startswith(f"DeviceFileMinor: {first + 1}\n")
    node, other = (host / f"dev/nvidia-caps/nvidia-cap{minor}" for minor in (first, 1))
    assert node.stat().st_mode & 0o777 == 0o444
    assert (os.major(node.stat().st_rdev), os.minor(node.stat().st_rdev)) == (
        (os.major(other.stat().st_rdev), first) if nodes else (0, 0)
    )
    gone = run_python(BEGIN + destroy + look, host=host)
    assert (gone.stderr, gone.stdout) == ("", "[0, 0] ['7g.40gb'] []\n")
    after = {path: path.read_bytes() if path.is_file() else b"" for path in host.rglob("*") if "mig" not in path.name}
    assert after == before


def test_gpm_measures_whole_gpus_and_gpu_instances(run_python: RunPython, sim_host: Path) -> None:
    script = """
instance = gi(gi_by_id(gpus[0], 1))[0]
def measure(take, *where):
    samples = [n.nvmlGpmSampleAlloc(), n.nvmlGpmSampleAlloc()]
    for sample in samples:
        if isinstance(failure := ask(take, *where, sample), str):
            return failure
    metrics = n.c_nvmlGpmMetricsGet_t(version=n.NVML_GPM_METRICS_GET_VERSION, numMetrics=2,
                                      sample1=samples[0], sample2=samples[1])
    metrics.metrics[0].metricId, metrics.metrics[1].metricId = 2, n.NVML_GPM_METRIC_PCIE_TX_PER_SEC
    n.nvmlGpmMetricsGet(metrics)
    for sample in samples:
        n.nvmlGpmSampleFree(sample)
    return [(item.nvmlReturn, item.value) for item in metrics.metrics[:2]]
print(n.nvmlGpmQueryDeviceSupport(gpus[0]).isSupportedDevice, measure(n.nvmlGpmSampleGet, gpus[2]))
print(measure(n.nvmlGpmMigSampleGet, gpus[0], instance), measure(n.nvmlGpmMigSampleGet, gpus[0], 2))
print(ask(n.nvmlGpmQueryIfStreamingEnabled, gpus[0]))
"""
    done = run_python(BEGIN + script)
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.splitlines() == [
        "1 [(0, 0.0), (0, 0.0)]",
        "[(0, 0.0), (3, 0.0)] Invalid Argument",
        "Not Supported",
    ]


@pytest.mark.root
def test_nobody_but_the_owner_of_the_host_changes_it(sim_host: Path, work_directory: Path) -> None:
    script = """
instance = gi_by_id(gpus[0], 1)
part = n.nvmlGpuInstanceGetComputeInstanceById(instance, 0)
for call in ((n.nvmlDeviceSetMigMode, gpus[0], 1), (make_gi, gpus[0], 19),
             (n.nvmlComputeInstanceDestroy, part), (make_ci, instance, 2)):
    print(ask(*call))
print(migs(gpus[0]))
"""
    (work_directory / "clone").mkdir()
    command = [*python_of_nobody(work_directory / "clone"), "-c", BEGIN + script]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(sim_host / "usr/lib" / library_triplet())}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [*["Insufficient Permissions"] * 4, "['1g.10gb', '1g.10gb', '3g.40gb']"]


def test_processes_that_make_instances_at_once_do_not_lose_any(run_python: RunPython, tmp_path: Path) -> None:
    host = make_host(tmp_path / "host", 2, "h100", "all:", nodes=False)
    script = """
import os
children = []
for gpu in (0, 1, 0, 1):
    if not (child := os.fork()):
        n.nvmlInit()
        made = 0
        while not isinstance(instance := ask(make_gi, gpus[gpu], 19), str):
            made += not isinstance(ask(make_ci, instance, 0), str)
        os._exit(made)
    children.append(child)
print(sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children), *map(migs, gpus))
"""
    done = run_python(BEGIN + script, host=host)
    assert done.stderr == ""
    assert done.stdout == f"14 {['1g.10gb'] * 7} {['1g.10gb'] * 7}\n"
