"""Connections of simulated GPUs as nvidia-ml-py reads them: its structures are the ABI that is held to."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ocigpu.sim.create import create_host
from ocigpu.sim.models import MODELS, sim_uuid

RunPython = Callable[..., subprocess.CompletedProcess[str]]

_BEGIN = """
import ctypes, pynvml as n
n.nvmlInit()
gpus = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
def ask(function, *arguments):
    try:
        return function(*arguments)
    except n.NVMLError as error:
        return str(error)
def fabric(kind, version, ask_for):
    info = kind()
    if version:
        info.version = version
    if (failure := ask(ask_for, gpus[0], ctypes.byref(info))) != 0:
        return failure
    return bytes(info.clusterUuid).hex(), info.cliqueId, info.state, info.status
"""


@pytest.fixture(scope="module")
def hosts(session_directory: Path) -> Callable[[str, int], Path]:
    """Make hosts of a model when they are first asked for."""
    made: dict[str, Path] = {}

    def host(model: str, gpus: int) -> Path:
        if model not in made:
            made[model] = session_directory / f"connected {model}"
            create_host(str(made[model]), gpus, model, nodes=False, dri=False, compat32=False, ldcache=False)
        return made[model]

    return host


def test_gpus_are_near_each_other_by_switch_and_socket(run_python: RunPython, sim_host: Path) -> None:
    script = """
print([[n.nvmlDeviceGetTopologyCommonAncestor(a, b) for b in gpus] for a in gpus])
index = lambda found: [n.nvmlDeviceGetIndex(gpu) for gpu in found]
print([index(n.nvmlDeviceGetTopologyNearestGpus(gpus[1], level)) for level in (10, 40, 50)])
print(index(n.nvmlSystemGetTopologyGpuSet(0)), index(n.nvmlSystemGetTopologyGpuSet(64)))
print([hex(word) for word in n.nvmlDeviceGetCpuAffinity(gpus[2], 3)], *n.nvmlDeviceGetMemoryAffinity(gpus[2], 1, 0))
print([hex(word) for word in n.nvmlDeviceGetCpuAffinityWithinScope(gpus[0], 2, 1)], n.nvmlDeviceGetNumaNodeId(gpus[3]))
print(ask(n.nvmlDeviceGetMemoryAffinity, gpus[0], 1, 2), n.nvmlDeviceGetModuleId(gpus[3]))
"""
    done = run_python(_BEGIN + script)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "[[0, 10, 50, 50], [10, 0, 50, 50], [50, 50, 0, 10], [50, 50, 10, 0]]",
        "[[0], [0], [0, 2, 3]]",
        "[0, 1] [2, 3]",
        "['0x0', '0xffffffffffffffff', '0x0'] 2",
        "['0xffffffffffffffff', '0x0'] 1",
        "Invalid Argument 4",
    ]
    device = sim_host / "sys/bus/pci/devices/0000:03:00.0"
    assert (device / "numa_node").read_text() == "1\n"
    assert (device / "local_cpulist").read_text() == "64-127\n"


_LINKS = """
states = [ask(n.nvmlDeviceGetNvLinkState, gpus[0], link) for link in range(n.NVML_NVLINK_MAX_LINKS)]
print(states.count(1), states.count(0), {state for state in states if isinstance(state, str)})
for link in (0, 5):
    pci = ask(n.nvmlDeviceGetNvLinkRemotePciInfo, gpus[0], link)
    print(ask(n.nvmlDeviceGetNvLinkRemoteDeviceType, gpus[0], link), pci if isinstance(pci, str) else pci.busId,
          ask(n.nvmlDeviceGetNvLinkVersion, gpus[0], link), ask(n.nvmlDeviceGetNvLinkErrorCounter, gpus[0], link, 0))
print(ask(n.nvmlDeviceGetP2PStatus, gpus[0], gpus[1], ctypes.c_uint(2)),
      ask(n.nvmlDeviceGetP2PStatus, gpus[0], gpus[-1], ctypes.c_uint(2)),
      ask(n.nvmlDeviceGetP2PStatus, gpus[0], gpus[-1], ctypes.c_uint(0)))
print(fabric(n.c_nvmlGpuFabricInfo_t, 0, n.nvmlDeviceGetGpuFabricInfo))
print(fabric(n.c_nvmlGpuFabricInfo_v2_t, n.nvmlGpuFabricInfo_v2, n.nvmlDeviceGetGpuFabricInfoV))
print(fabric(n.c_nvmlGpuFabricInfo_v3_t, n.nvmlGpuFabricInfo_v3, n.nvmlDeviceGetGpuFabricInfoV))
print(fabric(n.c_nvmlGpuFabricInfo_v3_t, n.nvmlGpuFabricInfo_v2, n.nvmlDeviceGetGpuFabricInfoV) == "Not Supported",
      fabric(n.c_nvmlGpuFabricInfo_v3_t, n.nvmlGpuFabricInfo_v3 + 1, n.nvmlDeviceGetGpuFabricInfoV))
"""
_CLUSTER = sim_uuid("", "gb200")[1:].replace("-", "")
_NOTHING = "('00000000000000000000000000000000', 0, 3, 0)"
_NO = "Not Supported"


@pytest.mark.parametrize(
    ("model", "lines"),
    [
        (  # all links lead to the switches; the host has a fabric of its own, which is no cluster
            "h100",
            ["18 0 {'Invalid Argument'}", "2 00000000:C0:00.0 6 0", "2 00000000:C1:00.0 6 0", "0 0 0", *[_NOTHING] * 3],
        ),
        (  # boards of four: four links to each of three, and nothing to the other board
            "a100",
            ["12 0 {'Invalid Argument'}", "0 00000000:02:00.0 4 0", "0 00000000:03:00.0 4 0", "0 5 0", *[_NO] * 3],
        ),
        ("t4", [f"0 0 {{'{_NO}'}}", *[f"{_NO} {_NO} {_NO} {_NO}"] * 2, "5 5 0", *[_NO] * 3]),
        (
            "gb200",
            [
                "18 0 {'Invalid Argument'}",
                "2 00000000:C0:00.0 7 0",
                "2 00000000:C1:00.0 7 0",
                "0 0 0",
                *[f"('{_CLUSTER}', 1, 3, 0)"] * 3,
            ],
        ),
    ],
)
def test_nvlinks_and_fabrics(
    run_python: RunPython, hosts: Callable[[str, int], Path], model: str, lines: list[str]
) -> None:
    done = run_python(_BEGIN + _LINKS, host=hosts(model, 5))
    assert done.stderr == ""
    last = f"{model in ('a100', 't4')} Argument version mismatch"
    assert done.stdout.splitlines() == [*lines, last]


def test_functions_that_are_only_looked_up_say_that_they_are_not_supported(run_python: RunPython) -> None:
    """A program that is linked against NVML ends at the first symbol that is missing."""
    script = """
import re
from pathlib import Path
names = set(re.findall(r'FunctionPointer\\("(nvml\\w+)"', Path(n.__file__).read_text()))
there = {name for name in names if hasattr(n.nvmlLib, name)}
later = {name for name in names - there if hasattr(n.nvmlLib, re.sub(r"(_v\\d+|V)$", "", name))}
print(len(names) > 300, sorted(names - there - later), len(later) < 20)
print(ask(n.nvmlDeviceGetFanSpeed, gpus[0]), ask(n.nvmlDeviceGetConfComputeMemSizeInfo, gpus[0]))
n.nvmlShutdown()
print(ask(n.nvmlDeviceGetFanSpeed, gpus[0]))
"""
    done = run_python(_BEGIN + script)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["True [] True", "Not Supported Not Supported", "Uninitialized"]


def test_every_event_set_has_its_own_events(run_python: RunPython, hosts: Callable[[str, int], Path]) -> None:
    """The vendor's device plugin has one for each resource."""
    script = """
one, two = n.nvmlEventSetCreate(), n.nvmlEventSetCreate()
n.nvmlDeviceRegisterEvents(gpus[0], n.nvmlEventTypeXidCriticalError, one)
n.nvmlDeviceRegisterEvents(gpus[1], n.nvmlEventTypeXidCriticalError, two)
import sys
open(sys.argv[1], "w").write("xid 1 79\\nxid 0 48\\n")
print([n.nvmlEventSetWait_v2(events, 0).eventData for events in (one, two)])
print(ask(n.nvmlEventSetWait_v2, two, 0))
n.nvmlEventSetFree(one)
print(ask(n.nvmlEventSetWait_v2, one, 0), ask(n.nvmlEventSetFree, one))
"""
    host = hosts("t4", 5)
    done = run_python(_BEGIN + script, str(host / "faults"), host=host)
    (host / "faults").unlink()
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["[48, 79]", "Timeout", "Invalid Argument Invalid Argument"]


def test_the_architecture_is_that_of_the_model(run_python: RunPython, hosts: Callable[[str, int], Path]) -> None:
    script = "print(n.nvmlDeviceGetArchitecture(gpus[0]), n.nvmlDeviceGetCudaComputeCapability(gpus[0]))"
    for model, architecture in (("t4", 6), ("a100", 7), ("h100", 9), ("gb200", 10)):
        major, minor = MODELS[model].architecture.split(".")
        assert run_python(_BEGIN + script, host=hosts(model, 5)).stdout == f"{architecture} ({major}, {minor})\n"


def test_the_pci_bus_shows_registers_memory_and_the_driver(sim_host: Path) -> None:
    devices = sim_host / "sys/bus/pci/devices"
    for number in range(1, 5):
        regions = [line.split() for line in (devices / f"0000:0{number}:00.0/resource").read_text().splitlines()]
        assert len(regions) == 13  # 6 regions, the ROM, 6 of SR-IOV: PCI_NUM_RESOURCES without bridges
        sizes = [int(end, 16) - int(start, 16) + 1 for start, end, _ in regions if end != f"{0:#018x}"]
        assert sizes == [1 << 24, 1 << 37, 1 << 25]
        assert all(int(start, 16) % size == 0 for (start, *_), size in zip(regions, sizes[:1], strict=False))
    driver = sim_host / "sys/bus/pci/drivers/nvidia"
    assert (driver / "module").resolve() == (sim_host / "sys/module/nvidia").resolve()
    assert sorted(path.name for path in driver.iterdir() if path.is_symlink() and ":" in path.name) == [
        f"0000:0{number}:00.0" for number in range(1, 5)
    ]
    assert all((driver / name).is_file() for name in ("bind", "unbind", "new_id", "remove_id"))
