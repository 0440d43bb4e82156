import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ocigpu.sim.create import create_host
from ocigpu.sim.libraries import library_triplet
from ocigpu.sim.models import find_model, make_gpus

RunPython = Callable[..., subprocess.CompletedProcess[str]]

GPUS = make_gpus(find_model("h100"), 4, ["0:1g.10gb,1g.10gb,3g.40gb", "1:"])

INIT = """
import ctypes
nvml = ctypes.CDLL("libnvidia-ml.so.1")
def list_gpus():
    count, gpu, text = ctypes.c_uint(), ctypes.c_void_p(), ctypes.create_string_buffer(96)
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        code = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(gpu))
        if code == 0:
            code = nvml.nvmlDeviceGetUUID(gpu, text, 96)
        print(index, code or text.value.decode())
print("init", nvml.nvmlInit_v2())
"""


@pytest.fixture
def stand_in_host(tmp_path: Path) -> Path:
    """Four T4s whose nodes are plain files, to break."""
    create_host(str(tmp_path / "host"), 4, "t4", nodes=False, compat32=False, ldcache=False)
    return tmp_path / "host"


def t4_uuid(index: int) -> str:
    return make_gpus(find_model("t4"), 4)[index].uuid


def listed(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)


def test_pynvml_reads_the_host(run_python: RunPython) -> None:
    script = """
import pynvml as n
n.nvmlInit()
print(n.nvmlSystemGetDriverVersion(), n.nvmlSystemGetCudaDriverVersion(), n.nvmlSystemGetNVMLVersion())
print(n.nvmlDeviceGetCount())
gpu = n.nvmlDeviceGetHandleByIndex(2)
pci = n.nvmlDeviceGetPciInfo(gpu)
print(pci.busId, pci.busIdLegacy, hex(pci.pciDeviceId), pci.domain, pci.bus, pci.device)
print(n.nvmlDeviceGetName(gpu), n.nvmlDeviceGetUUID(gpu), n.nvmlDeviceGetBrand(gpu), n.nvmlDeviceGetMinorNumber(gpu))
print(n.nvmlDeviceGetCudaComputeCapability(gpu), n.nvmlDeviceGetMemoryInfo(gpu).total >> 20)
print(n.nvmlDeviceGetMemoryInfo(gpu, version=n.nvmlMemory_v2).total >> 20, n.nvmlDeviceGetMigMode(gpu))
print(n.nvmlDeviceGetUtilizationRates(gpu).gpu, n.nvmlDeviceGetTemperature(gpu, 0), n.nvmlDeviceGetPersistenceMode(gpu))
print(n.nvmlDeviceGetPowerUsage(gpu), n.nvmlDeviceGetComputeRunningProcesses(gpu))
by_bus = n.nvmlDeviceGetHandleByPciBusId("00000000:02:00.0")
print(n.nvmlDeviceGetIndex(by_bus), n.nvmlDeviceGetMigMode(by_bus), n.nvmlDeviceGetMaxMigDeviceCount(by_bus))
for name in ("0000:02:00.0", "02:00.0"):
    assert n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByPciBusId(name)) == n.nvmlDeviceGetUUID(by_bus)
for call in (lambda: n.nvmlDeviceGetHandleByIndex(4), lambda: n.nvmlDeviceGetHandleByPciBusId("1000:02:00.0"),
             lambda: n.nvmlDeviceGetHandleByUUID("GPU-no"), lambda: n.nvmlDeviceGetMigDeviceHandleByIndex(by_bus, 0)):
    try:
        call()
    except n.NVMLError as error:
        print(error)
n.nvmlShutdown()
"""
    done = run_python(script)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "550.163.01 12040 12.550.163.01",
        "4",
        "00000000:03:00.0 0000:03:00.0 0x233010de 0 3 0",
        f"NVIDIA H100 80GB HBM3 {GPUS[2].uuid} 14 2",
        "(9, 0) 81559",
        "81559 [0, 0]",
        "0 30 1",
        "70000 []",
        "1 [1, 1] 7",
        "Invalid Argument",
        "Not Found",
        "Not Found",
        "Not Found",
    ]


def test_pynvml_reads_mig_devices(run_python: RunPython) -> None:
    script = """
import pynvml as n
n.nvmlInit()
gpu = n.nvmlDeviceGetHandleByIndex(0)
for index in range(3):
    mig = n.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
    attributes = n.nvmlDeviceGetAttributes(mig)
    print(n.nvmlDeviceGetName(mig), n.nvmlDeviceGetUUID(mig), n.nvmlDeviceGetGpuInstanceId(mig),
          n.nvmlDeviceGetComputeInstanceId(mig), attributes.gpuInstanceSliceCount, attributes.memorySizeMB)
    assert n.nvmlDeviceIsMigDeviceHandle(mig) and not n.nvmlDeviceIsMigDeviceHandle(gpu)
    parent = n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig)
    assert n.nvmlDeviceGetUUID(parent) == n.nvmlDeviceGetUUID(gpu)
    assert n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(mig))) == index
try:
    n.nvmlDeviceGetMinorNumber(mig)
except n.NVMLError as error:
    print(error)
"""
    done = run_python(script)
    assert done.stderr == ""
    uuids = [device.uuid for device in GPUS[0].mig_devices]
    assert done.stdout.splitlines() == [
        f"NVIDIA H100 80GB HBM3 MIG 1g.10gb {uuids[0]} 7 0 1 9984",
        f"NVIDIA H100 80GB HBM3 MIG 1g.10gb {uuids[1]} 8 0 1 9984",
        f"NVIDIA H100 80GB HBM3 MIG 3g.40gb {uuids[2]} 1 0 3 40448",
        "Not Supported",
    ]


def test_old_names_do_not_write_beyond_their_short_structs(run_python: RunPython) -> None:
    script = """
import ctypes
nvml = ctypes.CDLL("libnvidia-ml.so.1")
nvml.nvmlInit()
gpu = ctypes.c_void_p()
nvml.nvmlDeviceGetHandleByIndex(0, ctypes.byref(gpu))
for name in ("nvmlDeviceGetPciInfo", "nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo_v3"):
    buffer = ctypes.create_string_buffer(b"\\xff" * 100, 100)
    assert getattr(nvml, name)(gpu, buffer) == 0
    print(name, len(buffer.raw.rstrip(b"\\xff")), buffer.value.decode())
"""
    assert run_python(script).stdout.splitlines() == [
        "nvmlDeviceGetPciInfo 32 0000:01:00.0",
        "nvmlDeviceGetPciInfo_v2 36 0000:01:00.0",
        "nvmlDeviceGetPciInfo_v3 68 0000:01:00.0",
    ]


def test_misuse_is_answered_with_codes_not_with_a_crash(run_python: RunPython) -> None:
    script = """
import ctypes
nvml = ctypes.CDLL("libnvidia-ml.so.1")
nvml.nvmlErrorString.restype = ctypes.c_char_p
text, number, gpu = ctypes.create_string_buffer(96), ctypes.c_uint(), ctypes.c_void_p()
print(nvml.nvmlShutdown(), nvml.nvmlDeviceGetCount_v2(ctypes.byref(number)), nvml.nvmlErrorString(1))
nvml.nvmlInit_v2()
nvml.nvmlInit_v2()
print(nvml.nvmlDeviceGetUUID(ctypes.c_void_p(64), text, 96), nvml.nvmlDeviceGetUUID(None, text, 96))
nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu))
print(nvml.nvmlDeviceGetUUID(gpu, text, 8), nvml.nvmlDeviceGetName(gpu, None, 96))
print(nvml.nvmlDeviceGetMaxMigDeviceCount(ctypes.c_void_p(64), ctypes.byref(number)))
print(nvml.nvmlShutdown(), nvml.nvmlShutdown(), nvml.nvmlShutdown())
"""
    done = run_python(script)
    assert (done.returncode, done.stdout) == (0, "1 1 b'Uninitialized'\n2 2\n7 2\n2\n0 0 1\n")


def test_cuda_counts_the_gpus_that_can_be_opened(run_python: RunPython, tmp_path: Path) -> None:
    script = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
count, version, name = ctypes.c_int(-1), ctypes.c_int(), ctypes.create_string_buffer(96)
print(cuda.cuDeviceGetCount(ctypes.byref(count)), cuda.cuInit(0), cuda.cuDriverGetVersion(ctypes.byref(version)))
print(cuda.cuDeviceGetCount(ctypes.byref(count)), count.value, version.value, cuda.cuDeviceGetName(name, 96, 0))
print(name.value.decode())
"""
    assert run_python(script).stdout == "3 0 0\n0 4 12040 0\nNVIDIA H100 80GB HBM3\n"
    assert run_python(script, OCIGPU_SIM_DEV=str(tmp_path)).stdout.startswith("3 100 0\n3 -1 12040")


VISIBLE = """
import ctypes, os, sys
cuda = ctypes.CDLL("libcuda.so.1")
count, sms = ctypes.c_int(), ctypes.c_int()
uuid, name = ctypes.create_string_buffer(16), ctypes.create_string_buffer(96)
for value in sys.argv[1:]:
    os.environ["CUDA_VISIBLE_DEVICES"] = value
    code, seen, count.value = cuda.cuInit(0), [], 0
    cuda.cuDeviceGetCount(ctypes.byref(count))
    for device in range(count.value):
        assert cuda.cuDeviceGetUuid_v2(uuid, device) == cuda.cuDeviceGetName(name, 96, device) == 0
        assert cuda.cuDeviceGetAttribute(ctypes.byref(sms), 16, device) == 0
        seen.append(f"{uuid.raw.hex()[:8]}:{name.value.decode().split()[-1]}:{sms.value}")
    print(code, *seen)
"""


def test_cuda_visible_devices_chooses_devices_for_cuda_alone(run_python: RunPython, sim_host: Path) -> None:
    one, two, three = (gpu.uuid for gpu in GPUS[1:])
    mig = GPUS[0].mig_devices[2]
    known = {uuid: f"{uuid[4:12]}:HBM3:132" for uuid in (one, two, three)}
    choices = {
        "1,2": (one, two),
        " 3,1": (three, one),
        f"{two},{one[:9]}": (two, one),
        "2,9,1": (two,),
        "1,-1,2": (one,),
        f"1,{two}": (one,),
        f"{two},1": (two,),
        "": (),
        "none": (),
        "1,2,1": (),
        "GPU-": (),
        mig.uuid: (mig.uuid,),
        f"{mig.uuid},{GPUS[0].mig_devices[0].uuid}": (mig.uuid,),
        f"MIG-{GPUS[0].uuid}/1/0": (mig.uuid,),
    }
    known[mig.uuid] = f"{mig.uuid[4:12]}:3g.40gb:60"
    for (value, expected), line in zip(choices.items(), run_python(VISIBLE, *choices).stdout.splitlines(), strict=True):
        assert line.split() == ["0" if expected else "100", *(known[uuid] for uuid in expected)], value
    assert run_python(VISIBLE, "", CUDA_VISIBLE_DEVICES="1").stdout == "100\n"
    assert smi(sim_host, "-L", CUDA_VISIBLE_DEVICES="").stdout.count("GPU-") == 4


def test_nvml_lists_only_gpus_whose_node_is_there(run_python: RunPython, stand_in_host: Path) -> None:
    for index in (0, 2):
        (stand_in_host / f"dev/nvidia{index}").unlink()
    done = run_python(INIT + "list_gpus()", host=stand_in_host)
    assert done.stdout == listed("init 0", f"0 {t4_uuid(1)}", f"1 {t4_uuid(3)}")
    (stand_in_host / "dev/nvidiactl").unlink()
    assert run_python(INIT, host=stand_in_host).stdout == "init 9\n"


@pytest.mark.parametrize("code", [9, 18, 999])
def test_environment_makes_nvml_fail(run_python: RunPython, code: int) -> None:
    assert run_python(INIT, OCIGPU_SIM_NVML_FAIL=str(code)).stdout == f"init {code}\n"


def test_faults_file_breaks_nvml(run_python: RunPython, stand_in_host: Path) -> None:
    faults = stand_in_host / "faults"
    faults.write_text("lost 2\nnonsense\nlost 99\n")
    done = run_python(INIT + "list_gpus()", host=stand_in_host)
    assert done.stdout == listed("init 0", f"0 {t4_uuid(0)}", f"1 {t4_uuid(1)}", "2 15", f"3 {t4_uuid(3)}")
    faults.write_text("init 18\n")
    assert run_python(INIT, host=stand_in_host).stdout == "init 18\n"
    faults.write_text("hang\n")
    hang = INIT.replace('print("init"', 'import signal; signal.setitimer(signal.ITIMER_REAL, 0.2)\nprint("init"')
    assert run_python(hang, host=stand_in_host).returncode == -signal.SIGALRM


@pytest.mark.root
def test_nvml_in_a_container_renumbers_the_gpus_and_mig_devices_it_may_open(
    run_python: RunPython, sim_host: Path, tmp_path: Path
) -> None:
    """A mount namespace where the host's directory is hidden and /dev has two GPUs and one MIG device."""
    library = tmp_path / "libnvidia-ml.so.1"
    library.write_bytes((sim_host / "usr/lib" / library_triplet() / "libnvidia-ml.so.1").read_bytes())
    mig = GPUS[0].mig_devices[2]
    caps = sim_host / "dev/nvidia-caps" / f"nvidia-cap{mig.gi_minor}"
    major = os.major(caps.stat().st_rdev)
    shell = f"""
mount --make-rprivate / && mount -t tmpfs none "$1" && mount -t tmpfs -o mode=755 none /dev && mkdir /dev/nvidia-caps
mknod /dev/nvidiactl c 195 255; mknod /dev/nvidia0 c 195 0; mknod /dev/nvidia3 c 195 3
mknod /dev/nvidia-caps/nvidia-cap{mig.gi_minor} c {major} {mig.gi_minor}
mknod /dev/nvidia-caps/nvidia-cap{mig.ci_minor} c {major} {mig.ci_minor}
mknod /dev/nvidia-caps/nvidia-cap{GPUS[0].mig_devices[0].gi_minor} c {major} {GPUS[0].mig_devices[0].gi_minor}
shift; exec "$@"
"""
    script = (
        INIT.replace("libnvidia-ml.so.1", str(library))
        + """
list_gpus()
gpu, mig, text = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.create_string_buffer(96)
nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu))
for index in range(2):
    code = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index, ctypes.byref(mig))
    print("mig", index, code or (nvml.nvmlDeviceGetUUID(mig, text, 96), text.value.decode())[1])
"""
    )
    done = run_python(script, prefix=("unshare", "--mount", "sh", "-ec", shell, "sh", str(sim_host)))
    assert done.stderr == ""
    assert done.stdout == listed("init 0", f"0 {GPUS[0].uuid}", f"1 {GPUS[3].uuid}", f"mig 0 {mig.uuid}", "mig 1 6")


def smi(host: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [host / "usr/bin/nvidia-smi", *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_nvidia_smi_lists_gpus_and_mig_devices(sim_host: Path) -> None:
    done = smi(sim_host, "-L")
    migs = GPUS[0].mig_devices
    assert done.stdout.splitlines() == [
        f"GPU 0: NVIDIA H100 80GB HBM3 (UUID: {GPUS[0].uuid})",
        f"  MIG 1g.10gb     Device  0: (UUID: {migs[0].uuid})",
        f"  MIG 1g.10gb     Device  1: (UUID: {migs[1].uuid})",
        f"  MIG 3g.40gb     Device  2: (UUID: {migs[2].uuid})",
        *(f"GPU {index}: NVIDIA H100 80GB HBM3 (UUID: {GPUS[index].uuid})" for index in (1, 2, 3)),
    ]
    assert done.stderr == "nvidia-smi: SIMULATED host, no real GPU\n"


def test_nvidia_smi_answers_queries(sim_host: Path) -> None:
    query = "--query-gpu=index,name,uuid,pci.bus_id,memory.total,driver_version"
    done = smi(sim_host, query, "--format=csv", "-i", GPUS[1].uuid)
    assert done.stdout.splitlines() == [
        "index, name, uuid, pci.bus_id, memory.total [MiB], driver_version",
        f"1, NVIDIA H100 80GB HBM3, {GPUS[1].uuid}, 00000000:02:00.0, 81559 MiB, 550.163.01",
    ]
    assert "SIMULATED" in done.stderr
    plain = smi(sim_host, "--query-gpu=memory.total,mig.mode.current", "--format=csv,noheader,nounits", "--id=0")
    assert plain.stdout == "81559, Enabled\n"


def test_nvidia_smi_says_that_it_is_simulated(sim_host: Path) -> None:
    assert "\n| SIMULATED host, no real GPU: nothing can be computed on these GPUs  " in smi(sim_host).stdout
    assert "(simulated)" in smi(sim_host, "--version").stdout
    for name in os.listdir(sim_host / "usr/bin"):
        if name != "nvidia-smi":
            done = subprocess.run([sim_host / "usr/bin" / name], capture_output=True, text=True, timeout=60)
            assert done.stdout == f"{name} 550.163.01 (simulated: does nothing)\n"


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("--colour",), 2, "ERROR: Option --colour is not recognized. Please run 'nvidia-smi -h'.\n"),
        (("--format=csv",), 2, "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n"),
        (("-L", "--query-gpu=index", "--format=csv"), 2, "Invalid combination of input arguments."),
        (("-x",), 2, "Invalid combination of input arguments."),
        (("-q", "-d", "COLOUR"), 2, "-d: one of its types is unknown"),
        (("mig", "-lgi", "-dgi"), 2, 'more than one action: "-dgi"'),
        (("--query-gpu=colour", "--format=csv"), 2, 'Field "colour" is not a valid field to query.'),
        (("--query-gpu=index",), 2, "--query-gpu needs --format=csv"),
        (("-i", "9"), 6, "No devices were found"),
    ],
)
def test_nvidia_smi_refuses(sim_host: Path, arguments: tuple[str, ...], status: int, text: str) -> None:
    done = smi(sim_host, *arguments)
    assert done.returncode == status
    assert text in done.stdout + done.stderr


@pytest.mark.root
def test_nvidia_smi_in_an_empty_root_lists_only_what_it_can_open(sim_host: Path, session_directory: Path) -> None:
    root = session_directory / "empty root"
    (root / "dev").mkdir(parents=True)
    program = root / "nvidia-smi"
    program.write_bytes((sim_host / "usr/bin/nvidia-smi").read_bytes())
    program.chmod(0o755)

    def run(*prefix: str) -> subprocess.CompletedProcess[str]:
        command = ["chroot", *prefix, str(root), "/nvidia-smi", "-L"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    nothing = run()
    assert nothing.returncode == 9
    assert nothing.stdout.startswith("NVIDIA-SMI has failed because ")
    os.mknod(root / "dev/nvidiactl", 0o020666, os.makedev(195, 255))
    (root / "dev/nvidiactl").chmod(0o666)
    no_gpus = run()
    assert (no_gpus.returncode, no_gpus.stdout) == (6, "No devices were found\n")
    for index, mode in ((1, 0o666), (2, 0o600)):
        os.mknod(root / f"dev/nvidia{index}", 0o020666, os.makedev(195, index))
        (root / f"dev/nvidia{index}").chmod(mode)
    assert [line.split()[-1] for line in run().stdout.splitlines()] == [f"{GPUS[1].uuid})", f"{GPUS[2].uuid})"]
    as_user = run("--userspec=65534:65534")
    assert as_user.stdout == f"GPU 0: NVIDIA H100 80GB HBM3 (UUID: {GPUS[1].uuid})\n"


@pytest.mark.root
def test_nodes_on_a_nodev_file_system_still_count_on_the_host(run_python: RunPython, sim_host: Path) -> None:
    shell = (
        'mount --make-rprivate / && mount --bind "$1" "$1" && mount -o remount,bind,nodev "$1" && shift && exec "$@"'
    )
    done = run_python(INIT + "list_gpus()", prefix=("unshare", "--mount", "sh", "-ec", shell, "sh", str(sim_host)))
    assert done.stdout == listed("init 0", *(f"{gpu.index} {gpu.uuid}" for gpu in GPUS))


@pytest.mark.root
def test_real_driver_of_the_machine_is_not_taken_for_the_simulated_one(run_python: RunPython, sim_host: Path) -> None:
    """/dev/nvidiactl that opens has a driver behind it (here that of /dev/zero): its GPUs are not ours."""
    shell = """
mount --make-rprivate / && mount -t tmpfs -o mode=755 none /dev
mknod /dev/nvidiactl c 1 5; mknod /dev/nvidia0 c 1 5; exec "$@"
"""
    done = run_python(INIT + "list_gpus()", prefix=("unshare", "--mount", "sh", "-ec", shell, "sh"))
    assert done.stdout == listed("init 0", *(f"{gpu.index} {gpu.uuid}" for gpu in GPUS))
