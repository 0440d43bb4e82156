"""The simulated nvidia-smi, read as programs read the real one, and held to the simulated NVML."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from support.process import run
from support.products import one_in

from ocigpu.sim import libraries
from ocigpu.sim.create import create_host
from ocigpu.sim.few import environment_of
from ocigpu.sim.models import MODELS, NVIDIA, find_model, make_gpus

RunPython = Callable[..., subprocess.CompletedProcess[str]]

NAME = "<b>&\x1b[31m"
"""What a process calls itself: it must disturb neither a terminal nor XML."""


def smi(host: Path, *words: str) -> str:
    return run([host / "usr/bin/nvidia-smi", *words]).stdout


def csv(host: Path, *words: str) -> list[list[str]]:
    return [line.split(", ") for line in smi(host, *words, "--format=csv,noheader,nounits").splitlines()]


def make_few(directory: Path, gpus: int, model: str, *mig: str, driver: str = "") -> Path:
    create_host(str(directory), gpus, model, mig, few=True, driver_version=driver)
    return directory


@pytest.fixture(scope="module")
def busy(session_directory: Path) -> Path:
    """Two L4s; the first is at 40 % and has two processes: this one, and one that is gone."""
    host = make_few(session_directory / "busy", 2, "l4")
    (host / "load").write_text(f"load 0 40\nprocess 0 {os.getpid()} 1234 40\nprocess 0 99999999 8 0\n")
    return host


NVML = """
import json, pynvml as n
n.nvmlInit()
def read(gpu):
    memory, bar1 = n.nvmlDeviceGetMemoryInfo(gpu), n.nvmlDeviceGetBAR1MemoryInfo(gpu)
    use = n.nvmlDeviceGetUtilizationRates(gpu)
    watts = "{:.2f}".format(n.nvmlDeviceGetPowerUsage(gpu) / 1000)
    least, most = n.nvmlDeviceGetPowerManagementLimitConstraints(gpu)
    ecc, limit = n.nvmlDeviceGetEccMode(gpu), n.nvmlDeviceGetTemperatureThreshold
    return [n.nvmlDeviceGetUUID(gpu), n.nvmlDeviceGetName(gpu), n.nvmlDeviceGetPciInfo(gpu).busId,
            memory.total >> 20, memory.used >> 20, memory.free >> 20, use.gpu, use.memory, watts,
            "{:.2f}".format(most / 1000), n.nvmlDeviceGetTemperature(gpu, 0), n.nvmlDeviceGetClockInfo(gpu, 1),
            n.nvmlDeviceGetMaxClockInfo(gpu, 2), n.nvmlDeviceGetCurrPcieLinkGeneration(gpu),
            "{}.{}".format(*n.nvmlDeviceGetCudaComputeCapability(gpu)), "Enabled" if ecc[0] else "Disabled",
            n.nvmlDeviceGetTotalEccErrors(gpu, 1, 0), n.nvmlSystemGetDriverVersion()], \\
        [bar1.bar1Total >> 20, bar1.bar1Used >> 20, least, [limit(gpu, kind) for kind in range(4)],
         [(p.pid, p.usedGpuMemory >> 20) for p in n.nvmlDeviceGetComputeRunningProcesses(gpu)]]
print(json.dumps([read(n.nvmlDeviceGetHandleByIndex(i)) for i in range(n.nvmlDeviceGetCount())]))
"""
FIELDS = (
    "gpu_uuid,gpu_name,gpu_bus_id,memory.total,memory.used,memory.free,utilization.gpu,utilization.memory,power.draw,"
    "power.max_limit,temperature.gpu,clocks.sm,clocks.max.memory,pcie.link.gen.current,compute_cap,ecc.mode.current,"
    "ecc.errors.uncorrected.volatile.total,driver_version"
)


def test_the_numbers_are_those_of_nvml(run_python: RunPython, busy: Path) -> None:
    done = run_python(NVML, host=busy)
    assert done.stderr == ""
    asked = json.loads(done.stdout)
    assert csv(busy, f"--query-gpu={FIELDS}") == [[str(value) for value in facts] for facts, _ in asked]
    assert [facts[6] for facts, _ in asked] == [40, 0]
    for gpu, (_, (bar1, used, least, limits, processes)) in zip(
        ET.fromstring(smi(busy, "-q", "-x")).iter("gpu"), asked, strict=True
    ):
        at = gpu.findtext
        assert (at("bar1_memory_usage/total"), at("bar1_memory_usage/used")) == (f"{bar1} MiB", f"{used} MiB")
        assert at("gpu_power_readings/min_power_limit") == f"{least / 1000:.2f} W"
        names = ("max", "slow", "max_mem", "max_gpu")
        assert [at(f"temperature/gpu_temp_{name}_threshold") for name in names] == [f"{limit} C" for limit in limits]
        listed = [
            (int(one.findtext("pid", "")), one.findtext("used_memory"))
            for one in gpu.iterfind("processes/process_info")
        ]
        assert listed == [(pid, f"{mib} MiB") for pid, mib in processes]


# What telegraf's plugin reads of XML (its schema_v12), and what it makes of it
STRINGS = [
    "performance_state",
    "product_name",
    "product_architecture",
    "uuid",
    "compute_mode",
    "serial",
    "vbios_version",
    "display_active",
    "display_mode",
    "ecc_mode/current_ecc",
    "fan_speed",
    "fb_memory_usage/total",
    "fb_memory_usage/reserved",
    "retired_pages/multiple_single_bit_retirement/retired_count",
    "retired_pages/pending_blacklist",
    "retired_pages/pending_retirement",
    "remapped_rows/remapped_row_pending",
    "remapped_rows/remapped_row_failure",
    "module_power_readings/power_draw",
]
NUMBERS = [
    "fb_memory_usage/used",
    "fb_memory_usage/free",
    "temperature/gpu_temp",
    "utilization/gpu_util",
    "utilization/memory_util",
    "utilization/encoder_util",
    "utilization/decoder_util",
    "utilization/jpeg_util",
    "utilization/ofa_util",
    "remapped_rows/remapped_row_corr",
    "remapped_rows/remapped_row_unc",
    "pci/pci_gpu_link_info/pcie_gen/current_link_gen",
    "pci/pci_gpu_link_info/link_widths/current_link_width",
    "encoder_stats/session_count",
    "encoder_stats/average_fps",
    "fbc_stats/average_latency",
    "clocks/graphics_clock",
    "clocks/sm_clock",
    "clocks/mem_clock",
    "clocks/video_clock",
    "gpu_power_readings/power_draw",
]
OF_MIG = ["index", "gpu_instance_id", "compute_instance_id", "ecc_error_count/volatile_count/sram_uncorrectable"]


def read_xml(host: Path) -> ET.Element:
    """Return the report, in which all is where telegraf looks for it."""
    text = smi(host, "-q", "-x")
    assert text.startswith('<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n')
    root = ET.fromstring(text)
    assert int(root.findtext("attached_gpus", "")) == len(root.findall("gpu"))
    for gpu in root.iter("gpu"):
        for path in STRINGS:
            assert gpu.findtext(path) or path.startswith("remapped_rows/"), path
        for path in NUMBERS:
            value = gpu.findtext(path) or "N/A"
            assert value == "N/A" or re.fullmatch(r"\d+(\.\d\d)?( (MiB|C|%|MHz|W))?|\d+x", value), (path, value)
    return root


def test_xml_is_where_parsers_look(sim_host: Path) -> None:
    first, second, *_ = read_xml(sim_host).iter("gpu")
    assert first.get("id") == "00000000:01:00.0"
    assert (first.findtext("mig_mode/current_mig"), second.findtext("mig_devices")) == ("Enabled", "None")
    devices = first.findall("mig_devices/mig_device")
    assert [[one.findtext(path) for path in OF_MIG] for one in devices] == [
        ["0", "7", "0", "0"], ["1", "8", "0", "0"], ["2", "1", "0", "0"],
    ]  # fmt: skip
    assert [one.findtext("fb_memory_usage/total") for one in devices] == ["9984 MiB", "9984 MiB", "40448 MiB"]
    assert devices[2].findtext("device_attributes/shared/multiprocessor_count") == "60"
    assert [first.findtext(f"pci/{name}") for name in ("pci_bus", "pci_device_id")] == ["01", "233010DE"]


@pytest.mark.parametrize("model", one_in(12, [key for key, model in MODELS.items() if model.vendor == NVIDIA]))
def test_every_model_is_reported(tmp_path: Path, model: str) -> None:
    host = make_few(tmp_path / "host", 1, model)
    (gpu,) = read_xml(host).iter("gpu")
    assert gpu.findtext("product_name") == MODELS[model].name
    memory = MODELS[model].memory_mib
    assert gpu.findtext("fb_memory_usage/total") == (f"{memory} MiB" if memory else "N/A")
    text = smi(host, "-q")
    assert f"    Product Name                          : {MODELS[model].name}\n" in text
    assert len({line.index(" : ") for line in text.splitlines() if " : " in line}) == 1


def test_a_name_of_a_process_disturbs_neither_xml_nor_terminals(busy: Path) -> None:
    waits = [NAME, "-c", "print(end='x', flush=True); input()"]
    with subprocess.Popen(waits, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as named:
        assert named.stdin
        assert named.stdout
        named.stdout.read(1)
        host = busy.parent / "named"
        if not host.exists():
            make_few(host, 1, "l4")
        (host / "load").write_text(f"process 0 {named.pid} 5 1\n")
        assert [one.text for one in read_xml(host).iter("process_name")] == ["<b>&?[31m"]
        assert csv(host, "--query-compute-apps=process_name") == [["<b>&?[31m"]]
        named.stdin.close()


def test_a_report_is_of_the_chosen_gpus_and_parts(sim_host: Path) -> None:
    text = smi(sim_host, "-q", "-i", "2,0000:04:00.0", "-d", "memory,PERFORMANCE")
    assert re.findall(r"^GPU (\S+)$", text, re.MULTILINE) == ["00000000:03:00.0", "00000000:04:00.0"]
    groups = re.findall(r"^ {4}(\S.*?)(?: +:.*)?$", text, re.MULTILINE)
    assert groups[: len(groups) // 2] == [
        *("Performance State", "Clocks Event Reasons", "FB Memory Usage", "BAR1 Memory Usage"),
        "Conf Compute Protected Memory Usage",
    ]


@pytest.mark.rest
def test_every_part_can_be_chosen_alone(sim_host: Path) -> None:
    source = (Path(libraries.__file__).parent / "smi_show.c").read_text()
    names = re.findall('"([A-Z_]+)"', source.partition("displays[] = {")[2].partition("};")[0])[1:]
    assert {"PIDS", "SUPPORTED_CLOCKS"} < {*names}
    for name in names:
        assert re.search(r"(?m)^ {4}\S", smi(sim_host, "-q", "-i", "2", "-d", name)), name


def test_every_field_that_is_listed_can_be_asked_for(busy: Path) -> None:
    """As nvidia_gpu_exporter finds fields out, with its expression, and reads the table of them."""
    fields = re.findall(r'(?m)\n\s*?^"([^"]+)"', smi(busy, "--help-query-gpu"))
    heading, *rows = smi(busy, f"--query-gpu={','.join(fields)}", "--format=csv").splitlines()
    assert [name.partition(" [")[0] for name in heading.split(", ")] == fields
    assert [len(row.split(", ")) for row in rows] == [len(fields)] * 2
    found = dict(zip(fields, rows[0].split(", "), strict=True))
    assert (found["pstate"], found["utilization.gpu"], found["fan.speed"]) == ("P0", "40 %", "[N/A]")
    assert found["clocks_event_reasons.active"] == "0x0000000000000000"
    assert smi(busy, "--query-gpu=clocks.gr,gpu_name", "--format=csv").startswith(
        "clocks.current.graphics [MHz], name\n"
    )


def test_processes_of_gpus_are_listed(busy: Path) -> None:
    fields = "pid,process_name,used_memory,gpu_uuid,gpu_name,gpu_bus_id"
    heading, *rows = smi(busy, f"--query-compute-apps={fields}", "--format=csv").splitlines()
    assert heading == "pid, process_name, used_gpu_memory [MiB], gpu_uuid, gpu_name, gpu_bus_id"
    of_gpu = [make_gpus(find_model("l4"), 2)[0].uuid, "NVIDIA L4", "00000000:01:00.0"]
    own = Path("/proc/self/cmdline").read_bytes().split(b"\0")[0].decode()
    assert [row.split(", ") for row in rows] == [
        [str(os.getpid()), own, "1234 MiB", *of_gpu], ["99999999", "[Not Found]", "8 MiB", *of_gpu],
    ]  # fmt: skip


def test_gpus_and_processes_are_watched(busy: Path) -> None:
    names, units, *rows = (line.lstrip("#").split() for line in smi(busy, "dmon", "-c", "1").splitlines())
    assert names == ["gpu", "pwr", "gtemp", "mtemp", "sm", "mem", "enc", "dec", "jpg", "ofa", "mclk", "pclk"]
    assert units == ["Idx", "W", "C", "C", "%", "%", "%", "%", "%", "%", "MHz", "MHz"]
    assert [row[0] for row in rows] == ["0", "1"]
    assert (rows[0][4], rows[1][4]) == ("40", "0")
    memory = smi(busy, "dmon", "-c", "1", "-s", "m", "-i", "1").splitlines()
    assert [line.split() for line in memory] == [
        ["#", "gpu", "fb", "bar1", "ccpm"],
        ["#", "Idx", *["MB"] * 3],
        list("1010"),
    ]
    names, _, *rows = (line.lstrip("#").split() for line in smi(busy, "pmon", "-c", "1", "-s", "um").splitlines())
    assert names == ["gpu", "pid", "type", "sm", "mem", "enc", "dec", "jpg", "ofa", "fb", "ccpm", "command"]
    assert [row[:4] + row[9:10] for row in rows] == [
        ["0", str(os.getpid()), "C", "40", "1234"], ["0", "99999999", "C", "0", "8"], ["1", "-", "-", "-", "-"],
    ]  # fmt: skip


TABLE = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.163.01             Driver Version: 550.163.01     CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA L4                      On  |   00000000:01:00.0 Off |                    0 |
| N/A   50C    P0             32W /   72W |    9213MiB /  23034MiB |     40%      Default |
|                                         |                        |                  N/A |
+-----------------------------------------+------------------------+----------------------+

+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|  GPU   GI   CI        PID   Type   Process name                              GPU Memory |
|        ID   ID                                                               Usage      |
|=========================================================================================|
|    0   N/A  N/A  99999999      C   [Not Found]                                     8MiB |
+-----------------------------------------------------------------------------------------+
| SIMULATED host, no real GPU: nothing can be computed on these GPUs                      |
+-----------------------------------------------------------------------------------------+
"""


def test_the_table_is_drawn_as_by_the_real_program(busy: Path) -> None:
    date, _, table = smi(busy, "-i", "0").partition("\n")
    assert re.fullmatch(r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4} {7}", date)
    assert "".join(line for line in table.splitlines(True) if f" {os.getpid()} " not in line) == TABLE
    assert {len(line) for line in table.splitlines()} == {91, 0}


@pytest.mark.parametrize(
    ("branch", "pid"),
    [("550.163.01", 27), *(pytest.param(branch, 33, marks=pytest.mark.rest) for branch in ("570.86.10", "580.65.06"))],
)
def test_the_tables_of_mig_devices_and_processes_follow_the_driver(tmp_path: Path, branch: str, pid: int) -> None:
    host = tmp_path / "host"
    create_host(str(host), 2, "h100", ("0:3g.40gb",), few=True, driver_version=branch)
    (host / "load").write_text("process 0 4194304 5 1 1\n")
    _, *lines = smi(host).splitlines()
    assert {len(line) for line in lines} == {91, 0}
    assert lines[2].startswith("|--" if branch < "580" else "+--")
    assert "|  0    1   0   0  |               0MiB / 40448MiB    | 60      0 |  3   0    3    0    3 |" in lines
    process = next(line for line in lines if "4194304" in line)
    assert process.split()[1:4] == ["0", "1", "0"]
    assert process.index("4194304") + 7 == pid == next(line.index("PID") + 3 for line in lines if "PID" in line)
    assert "| N/A   30C    P0             70W /  700W |       0MiB /  81559MiB |     N/A      Default |" in lines


def test_versions_have_the_names_of_driver_610(tmp_path: Path) -> None:
    """As captured by github.com/utkuozdemir/nvidia_gpu_exporter (internal/captures, 610.57.04); scripts that knew the
    old names found no version (NVIDIA/aicr issue 1667)."""
    host = make_few(tmp_path / "host", 1, "l4", driver="610.57.04")
    line = "| NVIDIA-SMI 610.57.04              KMD Version: 610.57.04     CUDA UMD Version: 13.3     |"
    assert smi(host).splitlines()[2] == line
    assert smi(host, "--version").splitlines()[2:] == [
        'DRIVER version      : Deprecated, see "KMD version" instead',
        'CUDA version        : Deprecated, see "CUDA UMD version" instead',
        "KMD version         : 610.57.04",
        "CUDA UMD version    : 13.3",
    ]
    fields = [re.split(" +: ", entry, maxsplit=1) for entry in smi(host, "-q").splitlines()[4:8]]
    assert fields == [
        ["Driver Version", "610.57.04 [Deprecated; will be removed in CUDA 14.0. Use KMD Version instead]"],
        ["CUDA Version", "13.3 [Deprecated; will be removed in CUDA 14.0. Use CUDA UMD Version instead]"],
        ["KMD Version", "610.57.04"],
        ["CUDA UMD Version", "13.3"],
    ]
    assert csv(host, "--query-gpu=driver_version") == [["610.57.04"]]
    assert "<driver_version>610.57.04</driver_version>" in smi(host, "-q", "-x")


def test_power_is_set_within_its_limits(run_python: RunPython, tmp_path: Path) -> None:
    host = make_few(tmp_path / "host", 2, "l4")
    assert smi(host, "-pm", "0", "-i", "1") == "Disabled persistence mode for GPU 00000000:02:00.0.\nAll done.\n"
    assert smi(host, "-pm", "1", "-pl", "60.5").splitlines() == [
        "Persistence mode is already Enabled for GPU 00000000:01:00.0.",
        "Enabled persistence mode for GPU 00000000:02:00.0.",
        "Power limit for GPU 00000000:01:00.0 was set to 60.50 W from 72.00 W.",
        "Power limit for GPU 00000000:02:00.0 was set to 60.50 W from 72.00 W.",
        "All done.",
    ]
    (host / "load").write_text("load 0 100\n")
    fields = "power.limit,enforced.power.limit,power.draw,power.default_limit"
    assert csv(host, f"--query-gpu={fields}", "-i", "0") == [["60.50", "60.50", "60.50", "72.00"]]
    script = (
        "import pynvml as n; n.nvmlInit(); gpu = n.nvmlDeviceGetHandleByIndex(0)\n"
        "n.nvmlDeviceSetPowerManagementLimit(gpu, 50000); print(n.nvmlDeviceGetPowerManagementLimit(gpu))"
    )
    assert run_python(script, host=host).stdout == "50000\n"
    for limit, said in (("73", "between 18.00 W and 72.00 W"), ("1", "between 18.00 W"), ("x", "not a number")):
        done = run([host / "usr/bin/nvidia-smi", "-pl", limit], check=False)
        assert done.returncode == 2
        assert said in done.stdout + done.stderr


def test_memory_in_use_can_be_set_apart_from_the_load(busy: Path) -> None:
    load = (busy / "load").read_text()
    try:
        (busy / "load").write_text(f"{load}memory 0 20000\nmemory 1 999999\n")
        fields = "utilization.gpu,memory.used,memory.free"
        assert csv(busy, f"--query-gpu={fields}") == [["40", "20000", "3034"], ["0", "23034", "0"]]
    finally:
        (busy / "load").write_text(load)


def test_links_and_access_between_gpus_are_shown(sim_host: Path, busy: Path) -> None:
    first, *links = smi(sim_host, "nvlink", "--status", "-i", "1").splitlines()
    assert first.startswith("GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-")
    assert links == [f"\t Link {link}: 26.562 GB/s" for link in range(18)]
    assert smi(busy, "nvlink", "-s") == ""
    assert [smi(host, "topo", "-p2p", kind).splitlines()[1] for host, kind in ((busy, "r"), (busy, "n"))] == [
        " GPU0\tX\tOK",
        " GPU0\tX\tNS",
    ]


@pytest.mark.rest
def test_geforce_boards_do_not_reach_each_others_memory(
    tmp_path: Path, prebuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "PREBUILT", prebuilt)
    assert smi(make_few(tmp_path / "host", 2, "rtx4090"), "topo", "-p2p", "w").splitlines()[2] == " GPU1\tCNS\tX"


def matrix(host: Path, *words: str) -> list[list[str]]:
    return [line.split("\t") for line in smi(host, "topo", *words).split("\n\n")[0].splitlines()]


def test_the_matrix_shows_links_sockets_and_cpus(sim_host: Path, busy: Path) -> None:
    heading, *rows = matrix(sim_host, "-m")
    assert heading == ["", "GPU0", "GPU1", "GPU2", "GPU3", "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]
    assert rows[0] == ["GPU0", " X ", "NV18", "NV18", "NV18", "0-63", "0", "", "N/A"]
    assert rows[3] == ["GPU3", "NV18", "NV18", "NV18", " X ", "64-127", "1", "", "N/A"]
    assert matrix(sim_host, "-mp")[1][:5] == ["GPU0", " X ", "PIX", "SYS", "SYS"]
    assert matrix(busy, "-m")[1][1:3] == [" X ", "SYS"]


@pytest.mark.rest
def test_links_within_a_board_are_counted(tmp_path: Path) -> None:
    assert matrix(make_few(tmp_path / "host", 8, "a100"), "-m")[1][1:9] == [" X ", *["NV4"] * 3, *["SYS"] * 4]


SEEN = """
import pynvml as n
n.nvmlInit()
gpu = n.nvmlDeviceGetHandleByIndex(0)
for index in range(7):
    try:
        mig = n.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
    except n.NVMLError:
        break
    ids = n.nvmlDeviceGetGpuInstanceId(mig), n.nvmlDeviceGetComputeInstanceId(mig)
    print(n.nvmlDeviceGetName(mig).split()[-1], *ids)
"""


def test_mig_devices_are_made_listed_and_destroyed(run_python: RunPython, tmp_path: Path) -> None:
    """Other programs see each step: the state is that of NVML."""
    host = make_few(tmp_path / "host", 1, "h100")

    def mig(*words: str, status: int = 0) -> str:
        done = run([host / "usr/bin/nvidia-smi", "mig", *words], check=False)
        assert done.returncode == status, done
        return done.stdout

    def seen() -> list[str]:
        return run_python(SEEN, host=host).stdout.splitlines()

    assert "|   0  MIG 1g.10gb       19     0/7        9.75       No     16     1     0   |\n" in mig("-lgip")
    assert mig("-lgi", status=6) == mig("-cgi", "19", status=6) == "No MIG-enabled devices found.\n"
    assert smi(host, "-mig", "1") == "Enabled MIG Mode for GPU 00000000:01:00.0\nAll done.\n"
    assert mig("-lgi", status=6) == mig("-dci", status=6) == "No GPU instances found: Not Found\n"
    assert mig("-cgi", "9,1g.10gb", "-C", "-i", "0").splitlines() == [
        "Successfully created GPU instance ID  1 on GPU  0 using profile MIG 3g.40gb (ID  9)",
        "Successfully created compute instance ID  0 on GPU  0 GPU instance ID  1 using profile MIG 3g.40gb (ID  2)",
        "Successfully created GPU instance ID  7 on GPU  0 using profile MIG 1g.10gb (ID 19)",
        "Successfully created compute instance ID  0 on GPU  0 GPU instance ID  7 using profile MIG 1g.10gb (ID  0)",
    ]
    assert seen() == ["3g.40gb 1 0", "1g.10gb 7 0"]
    assert "|   0  MIG 3g.40gb          9        1          4:4     |\n" in mig("-lgi")
    assert "|   0      1       MIG 3g.40gb          2         0          0:3     |\n" in mig("-lci")
    assert "GPU  0 Profile ID  9 Placements: {0,4}:4\n" in mig("-lgipp")
    assert mig("-cgi", "7g.80gb", status=23) == (
        "Unable to create a GPU instance on GPU  0 using profile 7g.80gb: Insufficient Resources\n"
        "Failed to create GPU instances: Insufficient Resources\n"
    )
    assert "using profile 8g.1gb: Invalid Argument\n" in mig("-cgi", "8g.1gb", status=2)
    assert mig("-dgi", "-gi", "7", status=19).endswith("Failed to destroy GPU instances: In use by another client\n")
    assert mig("-dci", "-gi", "1") == "Successfully destroyed compute instance ID  0 from GPU  0 GPU instance ID  1\n"
    assert "|   0      1       MIG 2c.3g.40gb       1      1/1           40        3     0     0   |\n" in mig("-lcip")
    assert len(mig("-cci", "1c.3g.40gb,1", "-gi", "1").splitlines()) == 2
    assert seen() == ["1g.10gb 7 0", "1c.3g.40gb 1 0", "2c.3g.40gb 1 1"]
    assert smi(host, "-L").count("MIG-") == 3
    assert len(mig("-dci").splitlines()) == 3
    assert mig("-lci", status=6) == "No compute instances found: Not Found\n"
    assert len(mig("-dgi").splitlines()) == 2
    assert smi(host, "-mig", "0") == "Disabled MIG Mode for GPU 00000000:01:00.0\nAll done.\n"
    assert seen() == []


def test_a_mode_is_refused_as_by_the_real_one(busy: Path, tmp_path: Path) -> None:
    line = "Unable to enable MIG Mode for GPU {}: Not Supported\nTreating as warning and moving on.\n"
    buses = ("00000000:01:00.0", "00000000:02:00.0")
    assert smi(busy, "-mig", "1") == "".join(map(line.format, buses)) + "All done.\n"
    assert run([busy / "usr/bin/nvidia-smi", "mig", "-lgip"], check=False).returncode == 6
    host = make_few(tmp_path / "host", 1, "h100", "0:1g.10gb")
    done = run([host / "usr/bin/nvidia-smi", "-mig", "0"], check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (19, "Terminating early due to previous errors.")
    assert smi(host, "-c", "EXCLUSIVE_PROCESS").startswith("Set compute mode to EXCLUSIVE_PROCESS for GPU ")
    assert csv(host, "--query-gpu=compute_mode") == [["Exclusive_Process"]]


def test_a_gpu_or_driver_that_is_lost_is_reported(tmp_path: Path) -> None:
    host = make_few(tmp_path / "host", 2, "l4")
    (host / "faults").write_text("lost 0\n")
    first, *rest = smi(host, "-L").splitlines()
    assert first.startswith("Unable to determine the device handle for GPU0: 00000000:01:00.0: GPU is lost.")
    assert [line.partition(":")[0] for line in rest] == ["GPU 1"]
    assert run([host / "usr/bin/nvidia-smi", "-q", "-i", "0"], check=False).returncode == 15
    (host / "faults").write_text("init 18\n")
    done = run([host / "usr/bin/nvidia-smi"], check=False)
    assert (done.returncode, done.stdout.splitlines()) == (
        18,
        ["Failed to initialize NVML: Driver/library version mismatch", "NVML library version: 550.163.01"],
    )


@pytest.mark.rest
def test_output_goes_to_a_file_and_is_repeated(busy: Path, tmp_path: Path) -> None:
    words = [busy / "usr/bin/nvidia-smi", "--query-gpu=index", "--format=csv,noheader", "-lms", "1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout
        assert [process.stdout.readline() for _ in range(6)] == ["0\n", "1\n"] * 3
        process.kill()
    smi(busy, "-L", "-f", str(tmp_path / "list"))
    assert (tmp_path / "list").read_text().count("GPU ") == 2


@pytest.mark.rest
def test_a_library_of_pypi_reads_it(busy: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    run([*pip, "--target", tmp_path, "nvsmi==0.4.2"], timeout=200)
    script = (
        "import nvsmi\n"
        "for gpu in nvsmi.get_gpus(): print(gpu.id, gpu.name, gpu.mem_total, gpu.gpu_util, gpu.temperature)\n"
        "for one in nvsmi.get_gpu_processes(): print(one.pid, one.used_memory)"
    )
    environment = {**environment_of(str(busy), os.environ), "PYTHONPATH": str(tmp_path)}
    assert run([sys.executable, "-c", script], env=environment).stdout.splitlines() == [
        *("0 NVIDIA L4 23034.0 40.0 50.0", "1 NVIDIA L4 23034.0 0.0 30.0"),
        *(f"{os.getpid()} 1234.0", "99999999 8.0"),
    ]


@pytest.mark.parametrize(
    "line",
    ["load 0 high", "load 2 40", "load 0 101", "load 0", "load 0 40 ", "load 0  40", "lode 0 40", "memory 0 -1",
     "memory 0 1 2", "process 0 1 2", "process 0 1 2 300", "process 0 1 2 3 4 5", "load 0 1000000000"],
)  # fmt: skip
def test_a_wrong_line_of_the_load_is_named(busy: Path, run_python: RunPython, line: str) -> None:
    load = busy / "load"
    before = load.read_text()
    try:
        load.write_text(f"# busy\n\nload 0 40\n{line}\n")
        done = run([busy / "usr/bin/nvidia-smi"], check=False)
        assert (done.returncode, done.stdout) == (2, "Failed to initialize NVML: Invalid Argument\n")
        assert f'{load}: line 4: "{line}": expected "load GPU PERCENT"' in done.stderr
        script = "import pynvml as n\ntry: n.nvmlInit()\nexcept n.NVMLError as error: print(error)"
        assert run_python(script, host=busy).stdout == "Invalid Argument\n"
    finally:
        load.write_text(before)
