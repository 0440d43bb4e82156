import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from handmade_host import TRIPLET, VERSION, HostTree

import ocigpu
from ocigpu.core.errors import HostError
from ocigpu.core.facts import MISSING_NODE, NOT_LISTED, Gpu, facts_from_json, facts_to_json
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.gpus.nvidia.gpus import EXCLUDED, NO_MINOR, gpus_from_procfs, merge_gpus
from ocigpu.gpus.nvidia.procfs import ProcGpu
from ocigpu.gpus.nvidia.selection import select_devices
from ocigpu.gpus.request import Request
from ocigpu.gpus.tree import Roots

NvmlBuilder = Callable[..., Path]


def test_facts_of_a_host_survive_json(host: HostTree, fake_nvml: NvmlBuilder) -> None:
    facts = read_host_facts(host.driver(nvml=fake_nvml("MIG=1")).settings)
    assert facts_from_json(json.loads(json.dumps(facts_to_json(facts)))) == facts


def test_nvml_and_procfs_become_one_list(host: HostTree, fake_nvml: NvmlBuilder) -> None:
    facts = read_host_facts(host.driver(nvml=fake_nvml()).settings)
    assert (facts.simulated, facts.driver_root, facts.source) == (True, str(host.root), "nvml")
    assert (facts.driver_version, facts.cuda_version, facts.notes) == (VERSION, "12.4", ())
    assert [(gpu.index, gpu.minor, gpu.proc_name, gpu.architecture, gpu.error) for gpu in facts.gpus] == [
        (0, 1, "0000:10:00.0", "9.0", ""),
        (1, 0, "0000:11:00.0", "9.0", ""),
    ]
    node = facts.gpus[0].node
    assert node is not None
    assert tuple(node) == ("/dev/nvidia1", "", 195, 1, 0o666, 0, 0)
    assert facts.majors == (("nvidia", 195), ("nvidiactl", 195), ("nvidia-caps", 235), ("nvidia-uvm", 510))
    assert [(node.container_path, node.major, node.minor) for node in facts.control_nodes] == [
        ("/dev/nvidiactl", 195, 255),
        ("/dev/nvidia-uvm", 510, 0),
        ("/dev/nvidia-uvm-tools", 510, 1),
    ]
    assert facts.proc_driver == f"{host.root}/proc/driver/nvidia"
    assert [file.name for file in facts.proc_files] == ["params", "version", "registry"]
    assert facts.proc_capabilities is False


def test_a_lost_gpu_keeps_its_place_and_takes_its_names_from_procfs(host: HostTree, fake_nvml: NvmlBuilder) -> None:
    facts = read_host_facts(host.driver(nvml=fake_nvml("LOST=0")).settings)
    lost, other = facts.gpus
    assert (lost.index, lost.minor, lost.uuid, lost.error) == (
        0,
        1,
        "GPU-00000000-0000-0000-0000-000000000000",
        "GPU is lost (NVML 15)",
    )
    assert other.error == ""


def test_a_gpu_that_nvml_does_not_list_is_still_shown(host: HostTree, fake_nvml: NvmlBuilder) -> None:
    host.driver(gpus=3, nvml=fake_nvml())
    facts = read_host_facts(host.settings)
    assert [(gpu.index, gpu.error) for gpu in facts.gpus] == [(0, ""), (1, ""), (2, NOT_LISTED)]


def test_a_gpu_without_its_node_is_said_to_miss_that(host: HostTree, fake_nvml: NvmlBuilder) -> None:
    """NVML lists the GPUs whose nodes it finds, and numbers those: the others have no index that anybody knows."""
    host.driver(gpus=3, nvml=fake_nvml())
    host.write("/dev/nvidiactl", "")
    facts = read_host_facts(host.settings)
    unlisted = facts.gpus[2]
    assert unlisted.error == f"{MISSING_NODE}/dev/nvidia{unlisted.minor}"
    assert (facts.gpus[0].title, unlisted.title) == ("GPU 0", f"GPU {unlisted.bus_id}")
    with pytest.raises(HostError, match=f"{unlisted.title} .* was requested by .*: device nodes are missing") as caught:
        select_devices(Request(selection="list", devices=(unlisted.uuid,)), facts)
    assert caught.value.hint == "Run: ocigpu system create-device-nodes"
    with pytest.raises(HostError, match="device nodes are missing") as caught:
        select_devices(Request(selection="all"), facts._replace(gpus=facts.gpus[2:]))
    assert caught.value.hint == "Run: ocigpu system create-device-nodes"


@pytest.mark.parametrize(
    ("macro", "note"),
    [
        ("CRASH", "NVML crashed: the library ended its process by signal 11"),
        ("INIT=9", "NVML cannot be initialised: Some error (NVML 9)"),
    ],
)
def test_without_nvml_gpus_come_from_procfs(host: HostTree, fake_nvml: NvmlBuilder, macro: str, note: str) -> None:
    facts = read_host_facts(host.driver(nvml=fake_nvml(macro)).settings)
    assert facts.source == "procfs"
    assert facts.notes == (f"{note}; GPUs come from procfs, without their architecture",)
    assert [(gpu.index, gpu.minor, gpu.uuid[:12], gpu.architecture) for gpu in facts.gpus] == [
        (0, 1, "GPU-00000000", ""),
        (1, 0, "GPU-00000001", ""),
    ]


def test_without_nvml_mig_devices_come_from_the_capabilities(host: HostTree) -> None:
    host.driver(gpus=1)
    (host.root / f"usr/lib/{TRIPLET}/libnvidia-ml.so.{VERSION}").unlink()
    base = "/proc/driver/nvidia/capabilities/gpu0/mig"
    for path, minor in (("gi1/access", 12), ("gi1/ci0/access", 13), ("gi2/access", 21)):
        host.write(f"{base}/{path}", f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\n")
    host.write("/proc/driver/nvidia-caps/mig-minors", "config 1\nmonitor 2\ngpu0/gi1/access 12\n")
    facts = read_host_facts(host.settings)
    gpu = facts.gpus[0]
    assert (gpu.mig_capable, gpu.mig_enabled) == (True, True)
    assert [tuple(mig) for mig in gpu.mig_devices] == [(0, "", "", 1, 0, 12, 13)]
    assert [(path, node.major, node.minor) for path, node in facts.cap_nodes] == [
        ("config", 235, 1),
        ("monitor", 235, 2),
        ("gpu0/gi1/access", 235, 12),
        ("gpu0/gi1/ci0/access", 235, 13),
        ("gpu0/gi2/access", 235, 21),
    ]
    assert facts.proc_capabilities is True


def test_mig_devices_of_nvml_get_the_minors_of_mig_minors(host: HostTree, fake_nvml: NvmlBuilder) -> None:
    host.driver(nvml=fake_nvml("MIG=0"))
    lines = ["config 1", "monitor 2", "gpu1/gi7/access 71", "gpu1/gi7/ci0/access 72", "gpu1/gi9/access 91"]
    host.write("/proc/driver/nvidia-caps/mig-minors", "\n".join(lines) + "\n")
    facts = read_host_facts(host.settings)
    devices = facts.gpus[0].mig_devices
    assert [(mig.uuid[:12], mig.gi_minor, mig.ci_minor) for mig in devices] == [
        ("MIG-00000000", 71, 72),
        ("MIG-00000002", 91, -1),
    ]


def test_a_host_without_a_driver_says_where_it_looked(host: HostTree) -> None:
    host.root.mkdir()
    for name, vendor, kind in (("0000:01:00.0", "0x10de", "0x030200"), ("0000:02:00.0", "0x8086", "0x030000")):
        host.write(f"/sys/bus/pci/devices/{name}/vendor", vendor + "\n")
        host.write(f"/sys/bus/pci/devices/{name}/class", kind + "\n")
    with pytest.raises(HostError) as caught:
        read_host_facts(host.settings)
    assert caught.value.code == "OCIGPU-HOST-1"
    assert caught.value.message == (
        f"no NVIDIA driver: no {host.root}/proc/driver/nvidia, no {host.root}/sys/module/nvidia/version, "
        f"no libnvidia-ml.so.1 or libcuda.so.1 below {host.root}; 1 NVIDIA GPU on the PCI bus"
    )


def test_libraries_without_a_loaded_module_are_no_driver(host: HostTree, fake_nvml: NvmlBuilder) -> None:
    host.library(f"libnvidia-ml.so.{VERSION}", "libnvidia-ml.so.1").write_bytes(fake_nvml("INIT=9").read_bytes())
    with pytest.raises(HostError) as caught:
        read_host_facts(host.settings)
    assert caught.value.code == "OCIGPU-HOST-1"
    assert "NVML cannot be initialised: Some error (NVML 9)" in caught.value.message


def test_libraries_of_another_version_are_named(host: HostTree) -> None:
    host.driver("535.54.03")
    host.write("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01  Tue\n")
    with pytest.raises(HostError) as caught:
        read_host_facts(host.settings)
    assert caught.value.code == "OCIGPU-HOST-2"
    assert caught.value.message == f"kernel module is 550.163.01, but the libraries below {host.root} are 535.54.03"


def test_a_mismatch_that_only_nvml_sees_is_told(host: HostTree, fake_nvml: NvmlBuilder) -> None:
    with pytest.raises(HostError) as caught:
        read_host_facts(host.driver(nvml=fake_nvml("INIT=18")).settings)
    assert caught.value.code == "OCIGPU-HOST-2"
    assert "Driver/library version mismatch (NVML 18)" in caught.value.message


def test_a_proc_file_that_cannot_be_read_is_named(host: HostTree) -> None:
    host.driver()
    (host.root / "proc/devices").unlink()
    (host.root / "proc/devices").mkdir()
    with pytest.raises(HostError) as caught:
        read_host_facts(host.settings)
    assert (caught.value.code, caught.value.message) == (
        "OCIGPU-HOST-3",
        f"read {host.root}/proc/devices: Is a directory",
    )
    with pytest.raises(ChildProcessError):  # the child that asks NVML is not left behind
        os.waitpid(-1, os.WNOHANG)


def test_without_the_module_version_the_libraries_tell_it(host: HostTree, fake_nvml: NvmlBuilder) -> None:
    host.driver(nvml=fake_nvml())
    (host.root / "proc/driver/nvidia/version").unlink()
    facts = read_host_facts(host.settings)
    assert (facts.driver_version, len(facts.libraries)) == (VERSION, 3)


def test_a_driver_root_is_read_where_it_is_and_links_stay_in_it(
    host: HostTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's files below a root of their own, as a driver container has them; procfs elsewhere."""
    host.driver()
    driver = tmp_path / "driver"
    driver.mkdir()
    for name in ("usr", "etc"):
        (host.root / name).rename(driver / name)
    (driver / "usr/store").mkdir()
    library = driver / f"usr/lib/{TRIPLET}/libcuda.so.{VERSION}"
    library.rename(driver / f"usr/store/{library.name}")
    library.symlink_to(f"/usr/store/{library.name}")  # absolute: meant below the driver root
    roots = Roots(str(driver), "", f"{host.root}/proc", f"{host.root}/sys", False)
    monkeypatch.setattr("ocigpu.gpus.nvidia.discover.find_roots", lambda _: roots)
    facts = read_host_facts(Settings())
    assert (facts.driver_root, facts.simulated, facts.driver_version) == (str(driver), False, VERSION)
    assert {item.soname: item.host_path for item in facts.libraries}["libcuda.so.1"] == (
        f"{driver}/usr/store/libcuda.so.{VERSION}"
    )
    assert facts.source == "procfs"  # the library is no real NVML
    assert facts.notes[0].startswith("NVML cannot be loaded")


@pytest.mark.root
def test_existing_nodes_win_with_their_own_permissions(host: HostTree, fake_nvml: NvmlBuilder) -> None:
    host.driver(nvml=fake_nvml())
    host.write("/proc/driver/nvidia/params", "A: 1\nB: 1\nC: 1\nD: 1\nE: 1\nF: 1\nDeviceFileMode: 432\n")
    host.node("/dev/nvidiactl", 195, 255, 0o640)
    host.node("/dev/nvidia0", 195, 7)
    host.node("/dev/store/nvidia1", 195, 1, 0o600)
    host.link("/dev/nvidia1", "/dev/store/nvidia1")
    facts = read_host_facts(host.settings)
    control = facts.control_nodes[0]
    assert (control.host_path, control.mode) == (f"{host.root}/dev/nvidiactl", 0o640)
    linked, wrong = (gpu.node for gpu in facts.gpus)
    assert linked is not None
    assert wrong is not None
    assert (linked.host_path, linked.mode) == (f"{host.root}/dev/store/nvidia1", 0o600)
    assert (wrong.host_path, wrong.major, wrong.minor, wrong.mode) == ("", 195, 0, 0o660)
    assert facts.notes == (f"{host.root}/dev/nvidia0 is device 195:7, not 195:0: not used",)


@pytest.mark.root
def test_drm_nodes_imex_channels_and_features_are_found(host: HostTree, fake_nvml: NvmlBuilder) -> None:
    host.driver(nvml=fake_nvml())
    devices = (host.root / "proc/devices").read_text()
    host.write("/proc/devices", devices.replace("510", "236 nvidia-caps-imex-channels\n510"))
    for path, major, minor in (
        ("/dev/nvidia-caps-imex-channels/channel0", 236, 0),
        ("/dev/nvidia-caps-imex-channels/channel10", 236, 10),
        ("/dev/nvidia-caps-imex-channels/channel2", 236, 2),
        ("/dev/nvidia-caps-imex-channels/channel3", 99, 3),
        ("/dev/nvidia-nvswitchctl", 237, 255),
        ("/dev/nvidia-nvswitch0", 237, 0),
        ("/dev/infiniband/uverbs0", 231, 192),
        ("/dev/infiniband/rdma_cm", 10, 58),
        ("/dev/infiniband/issm0", 231, 64),
        ("/dev/nvidia-fs0", 500, 0),
        ("/dev/gdrdrv", 501, 0),
        ("/dev/dri/renderD128", 226, 128),
    ):
        host.node(path, major, minor)
    for name, number in (("card1", "226:1"), ("renderD128", "226:128"), ("card1-DP-1", "")):
        host.write(f"/sys/bus/pci/devices/0000:10:00.0/drm/{name}/dev", number)
    host.write("/etc/cufile.json", "{}")
    facts = read_host_facts(host.settings)
    assert (facts.imex_major, [node.minor for node in facts.imex_nodes]) == (236, [0, 2, 10])
    assert {item.name: [node.container_path for node in item.nodes] for item in facts.features} == {
        "gds": ["/dev/nvidia-fs0"],
        "mofed": ["/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0"],
        "gdrcopy": ["/dev/gdrdrv"],
        "nvswitch": ["/dev/nvidia-nvswitch0", "/dev/nvidia-nvswitchctl"],
    }
    assert [item.container_path for item in facts.features[0].files] == ["/etc/cufile.json"]
    assert [(node.container_path, node.host_path, node.minor) for node in facts.gpus[0].drm_nodes] == [
        ("/dev/dri/card1", "", 1),
        ("/dev/dri/renderD128", f"{host.root}/dev/dri/renderD128", 128),
    ]
    assert facts.gpus[1].drm_nodes == ()


def test_files_of_the_driver_are_found_at_fixed_places(
    host: HostTree, fake_nvml: NvmlBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.driver(nvml=fake_nvml())
    host.write("/opt/bin/nvidia-smi", "")
    host.write("/usr/sbin/nvidia-persistenced", "")
    host.write("/evil/nvidia-debugdump", "")
    monkeypatch.setenv("PATH", f"{host.root}/evil:/evil")
    host.write(f"/usr/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin", "")
    host.write(f"/usr/lib/firmware/nvidia/{VERSION}/other.bin", "")
    host.link("/lib/firmware", "/usr/lib/firmware")
    host.write("/usr/share/vulkan/icd.d/nvidia_icd.json", "{}")
    host.write("/etc/OpenCL/vendors/nvidia.icd", "libnvidia-opencl.so.1")
    host.write("/etc/glvnd/egl_vendor.d/10_nvidia.json", "{}")
    host.write("/usr/share/glvnd/egl_vendor.d/10_nvidia.json", "{}")
    host.write(f"/usr/lib/xorg/modules/extensions/libglxserver_nvidia.so.{VERSION}", "")
    host.write("/usr/lib64/xorg/modules/updates/drivers/nvidia_drv.so", "")
    facts = read_host_facts(host.settings)
    root = str(host.root)
    assert [(item.host_path, item.container_path, item.capabilities) for item in facts.binaries] == [
        (f"{root}/opt/bin/nvidia-smi", "/usr/bin/nvidia-smi", ("utility",)),
        (f"{root}/usr/sbin/nvidia-persistenced", "/usr/bin/nvidia-persistenced", ("utility",)),
    ]
    firmware = f"lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"
    assert [tuple(item) for item in facts.firmware] == [(f"{root}/usr/{firmware}", f"/{firmware}", (), "file")]
    assert [(item.host_path.removeprefix(root), item.container_path) for item in facts.configs] == [
        ("/etc/glvnd/egl_vendor.d/10_nvidia.json", "/usr/share/glvnd/egl_vendor.d/10_nvidia.json"),
        ("/etc/OpenCL/vendors/nvidia.icd",) * 2,
        ("/usr/share/vulkan/icd.d/nvidia_icd.json", "/etc/vulkan/icd.d/nvidia_icd.json"),
        (f"/usr/lib/xorg/modules/extensions/libglxserver_nvidia.so.{VERSION}",) * 2,
        ("/usr/lib64/xorg/modules/updates/drivers/nvidia_drv.so",) * 2,
    ]
    assert {item.capabilities for item in facts.configs if "OpenCL" not in item.host_path} == {("graphics", "display")}


def test_opencl_finds_its_platform_wherever_the_container_has_its_library(host: HostTree) -> None:
    """With the default capabilities clinfo listed no platform (nvidia-container-toolkit issue 682)."""
    host.driver()
    host.library(f"libnvidia-opencl.so.{VERSION}", "libnvidia-opencl.so.1")
    host.write_cache()
    host.write("/etc/OpenCL/vendors/nvidia.icd", "libnvidia-opencl.so.1")
    facts = read_host_facts(host.settings)
    (library,) = [item for item in facts.libraries if item.soname == "libnvidia-opencl.so.1"]
    (config,) = facts.configs
    assert config.capabilities == library.capabilities == ("compute", "video")


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        (("/srv/firmware", "/lib/firmware/updates", "/lib/firmware"), "/srv/firmware"),
        (("/lib/firmware/updates", f"/lib/firmware/updates/{os.uname().release}"), 1),
        (("/lib/firmware/updates", f"/lib/firmware/{os.uname().release}", "/lib/firmware"), 0),
        (("/lib/firmware", f"/lib/firmware/{os.uname().release}"), 1),
        (("/usr/lib/firmware",), 0),
        ((), None),
    ],
    ids=["the kernel's parameter", "updates for a kernel", "updates", "for a kernel", "usr", "none"],
)
def test_firmware_is_that_of_the_first_directory_in_the_kernels_order(
    host: HostTree, fake_nvml: NvmlBuilder, present: tuple[str, ...], expected: str | int | None
) -> None:
    host.driver(nvml=fake_nvml())
    host.write("/sys/module/firmware_class/parameters/path", "/srv/firmware\n")
    for directory in present:
        host.write(f"{directory}/nvidia/{VERSION}/gsp_ga10x.bin", directory)
    directory = present[expected] if isinstance(expected, int) else expected
    firmware = read_host_facts(host.settings).firmware
    name = f"nvidia/{VERSION}/gsp_ga10x.bin"
    assert [(file.host_path, file.container_path) for file in firmware] == (
        [(f"{host.root}{directory}/{name}", f"/lib/firmware/{name}")] if directory else []
    )


def test_only_real_sockets_and_directories_of_daemons_count(
    host: HostTree, fake_nvml: NvmlBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.driver(nvml=fake_nvml())
    directory = host.root / "run/nvidia-persistenced"
    directory.mkdir(parents=True)
    monkeypatch.chdir(directory)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    host.write("/run/nvidia-fabricmanager/socket", "a file")
    (host.root / "tmp/nvidia-mps").mkdir(parents=True)
    facts = read_host_facts(host.settings)
    assert [(item.container_path, item.capabilities, item.kind) for item in facts.sockets] == [
        ("/run/nvidia-persistenced/socket", ("utility",), "socket"),
        ("/tmp/nvidia-mps", ("compute",), "directory"),
    ]


def test_a_link_in_tmp_gives_nothing_of_the_host_away(host: HostTree, fake_nvml: NvmlBuilder) -> None:
    """Everybody may make /tmp/nvidia-mps; what a link there leads to would be mounted writable."""
    host.driver(nvml=fake_nvml())
    host.write("/etc/shadow", "secret")
    (host.root / "tmp").mkdir()
    (host.root / "tmp/nvidia-mps").symlink_to("/etc")
    assert read_host_facts(host.settings).sockets == ()


def test_discovery_writes_nothing(host: HostTree, fake_nvml: NvmlBuilder) -> None:
    host.driver(nvml=fake_nvml("MIG=0", "NOISE"))

    def snapshot() -> list[tuple[str, int, int]]:
        paths = sorted(host.root.rglob("*"))
        return [(str(path), path.lstat().st_mtime_ns, path.lstat().st_size) for path in paths]

    before = snapshot()
    read_host_facts(host.settings)
    assert snapshot() == before


def proc(bus: int, minor: int = 0, excluded: bool = False) -> ProcGpu:
    return ProcGpu(f"0000:{bus:02x}:00.0", f"00000000:{bus:02x}:00.0", minor, f"GPU-{bus}", "Model", excluded)


def listed(index: int, bus: int | None, minor: int = 0, error: str = "") -> Gpu:
    return Gpu(index, minor, f"GPU-{bus}" if bus else "", f"00000000:{bus:02x}:00.0" if bus else "", error=error)


@pytest.mark.parametrize(
    ("nvml", "in_procfs", "expected"),
    [
        pytest.param([listed(0, 1)], [proc(1)], [(0, "GPU-1", "")], id="same"),
        pytest.param([listed(0, 1)], [], [(0, "GPU-1", "")], id="nothing in procfs"),
        pytest.param([listed(0, 1, -1)], [], [(0, "GPU-1", NO_MINOR)], id="no minor anywhere"),
        pytest.param([listed(0, 1, -1)], [proc(1, 4)], [(0, "GPU-1", "")], id="minor from procfs"),
        pytest.param(
            [listed(0, None, -1, "lost"), listed(1, 2)],
            [proc(1), proc(2)],
            [(0, "GPU-1", "lost"), (1, "GPU-2", "")],
            id="nameless one is the one that is left",
        ),
        pytest.param(
            [listed(0, 1), listed(1, None, -1, "lost")],
            [proc(1), proc(2), proc(3)],
            [(0, "GPU-1", ""), (1, "", "lost"), (2, "GPU-2", NOT_LISTED), (3, "GPU-3", NOT_LISTED)],
            id="no guess when two are left",
        ),
        pytest.param(
            [listed(0, 2)], [proc(1, 0, True), proc(2)], [(0, "GPU-2", ""), (1, "GPU-1", EXCLUDED)], id="excluded"
        ),
    ],
)
def test_lists_are_merged(nvml: list[Gpu], in_procfs: list[ProcGpu], expected: list[tuple[object, ...]]) -> None:
    merged = merge_gpus(tuple(nvml), tuple(in_procfs))
    assert [(gpu.index, gpu.uuid, gpu.error) for gpu in merged] == expected


def test_only_light_modules_are_imported() -> None:
    code = "import sys, ocigpu.gpus.nvidia.discover; print(' '.join(sys.modules))"
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, {str(Path(ocigpu.__file__).parents[1])!r}); {code}",
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    heavy = {"typing", "dataclasses", "pathlib", "logging", "subprocess", "tempfile", "ctypes", "socket"}
    assert not heavy & set(done.stdout.split())


def test_gpus_of_procfs_have_the_indices_of_nvml_which_does_not_count_excluded_ones() -> None:
    gpus = gpus_from_procfs((proc(1, 0), proc(2, 1, True), proc(3, 2)))
    assert [(gpu.index, gpu.uuid, gpu.error) for gpu in gpus] == [
        (0, "GPU-1", ""),
        (1, "GPU-3", ""),
        (2, "GPU-2", EXCLUDED),
    ]
