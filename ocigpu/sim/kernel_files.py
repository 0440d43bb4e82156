"""What the kernel and its nvidia modules show of a simulated host in /proc and /sys."""

import platform
import struct
from collections.abc import Sequence
from pathlib import Path

from ocigpu.sim.models import CPUS_OF_NODE, MAX_MIG_GPUS, SimGpu, gi_minor, numa_node
from ocigpu.sim.nodes import (
    CONFIG_MINOR,
    DRM_MAJOR,
    FABRIC_IMEX_MINOR,
    MONITOR_MINOR,
    NVIDIA_MAJOR,
    Majors,
    drm_number,
)

_VENDOR = 0x10DE
_CLASS = 0x030200
"""PCI class of data center GPUs: display controller, 3D."""

_OTHER_CHARACTER_MAJORS = {
    1: ("mem",),
    4: ("/dev/vc/0", "tty", "ttyS"),
    5: ("/dev/tty", "/dev/console", "/dev/ptmx"),
    7: ("vcs",),
    10: ("misc",),
    13: ("input",),
    29: ("fb",),
    128: ("ptm",),
    136: ("pts",),
    180: ("usb",),
    189: ("usb_device",),
    202: ("cpu/msr",),
    203: ("cpu/cpuid",),
    244: ("hidraw",),
    247: ("ipmidev",),
    249: ("bsg",),
    250: ("watchdog",),
    251: ("ptp",),
    252: ("pps",),
    253: ("rtc",),
    254: ("gpiochip",),
}
_BLOCK_MAJORS = {7: "loop", 8: "sd", 9: "md", 11: "sr", 65: "sd", 253: "device-mapper", 254: "mdp", 259: "blkext"}

_PARAMS = """\
ResmanDebugLevel: 4294967295
RmLogonRC: 1
ModifyDeviceFiles: 1
DeviceFileUID: 0
DeviceFileGID: 0
DeviceFileMode: 438
InitializeSystemMemoryAllocations: 1
UsePageAttributeTable: 4294967295
EnableMSI: 1
EnablePCIeGen3: 0
MemoryPoolSize: 0
KMallocHeapMaxSize: 0
VMallocHeapMaxSize: 0
IgnoreMMIOCheck: 0
EnableStreamMemOPs: 0
EnableUserNUMAManagement: 1
NvLinkDisable: 0
RmProfilingAdminOnly: 1
PreserveVideoMemoryAllocations: 0
EnableS0ixPowerManagement: 0
S0ixPowerManagementVideoMemoryThreshold: 256
DynamicPowerManagement: 3
DynamicPowerManagementVideoMemoryThreshold: 200
RegisterPCIDriver: 1
EnablePCIERelaxedOrderingMode: 0
EnableResizableBar: 0
EnableGpuFirmware: 18
EnableGpuFirmwareLogs: 2
EnableDbgBreakpoint: 0
OpenRmEnableUnsupportedGpus: 1
DmaRemapPeerMmio: 1
ImexChannelCount: 2048
CreateImexChannel0: 0
GrdmaPciTopoCheckOverride: 0
RegistryDwords: ""
RegistryDwordsPerDevice: ""
RmMsg: ""
GpuBlacklist: ""
TemporaryFilePath: ""
ExcludedGpus: ""
"""
"""/proc/driver/nvidia/params of driver 550; DeviceFileMode 438 is 0666."""

_POWER = """\
Runtime D3 status:          Disabled by default
Tegra iGPU Rail-Gating:     Disabled
Video Memory:               Active

GPU Hardware Support:
 Video Memory Self Refresh: Not Supported
 Video Memory Off:          Not Supported

S0ix Power Management:
 Platform Support:          Not Supported
 Status:                    Disabled
"""

_REGISTRY = 'Binary: ""\n'


def write_file(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Write a file with this mode, and the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)


def write_proc(root: Path, gpus: Sequence[SimGpu], majors: Majors, driver_version: str) -> None:
    """Write /proc/devices and /proc/driver below ``root``."""
    proc = root / "proc"
    write_file(proc / "devices", render_proc_devices(majors), 0o444)
    nvidia = proc / "driver/nvidia"
    write_file(nvidia / "params", _PARAMS, 0o444)
    write_file(nvidia / "registry", _REGISTRY, 0o644)
    write_file(
        nvidia / "version",
        f"NVRM version: NVIDIA UNIX {platform.machine()} Kernel Module  {driver_version}  "
        "Tue Apr  8 12:41:17 UTC 2025\n"
        "GCC version:  simulated host, no kernel module\n",
        0o444,
    )
    for gpu in gpus:
        directory = nvidia / "gpus" / gpu.bus_id
        write_file(directory / "information", _information(gpu, driver_version), 0o444)
        write_file(directory / "power", _POWER, 0o444)
        write_file(directory / "registry", _REGISTRY, 0o644)
    _write_capabilities(proc / "driver", gpus, imex=majors.imex != 0)
    (proc / "driver/nvidia-uvm").mkdir()


def render_proc_devices(majors: Majors) -> str:
    """Return the text of /proc/devices (proc_devices(5)) of a host with the driver."""
    characters = dict(_OTHER_CHARACTER_MAJORS)
    characters[NVIDIA_MAJOR] = ("nvidia", "nvidia-modeset", "nvidiactl")
    characters[DRM_MAJOR] = ("drm",)
    for major, name in (
        (majors.uvm, "nvidia-uvm"),
        (majors.caps, "nvidia-caps"),
        (majors.nvlink, "nvidia-nvlink"),
        (majors.imex, "nvidia-caps-imex-channels"),
        (majors.nvswitch, "nvidia-nvswitch"),
    ):
        if major:
            characters[major] = (name,)
    lines = ["Character devices:"]
    lines += [f"{major:3d} {name}" for major, names in sorted(characters.items()) for name in names]
    lines += ["", "Block devices:"]
    lines += [f"{major:3d} {name}" for major, name in sorted(_BLOCK_MAJORS.items())]
    return "\n".join(lines) + "\n"


def _information(gpu: SimGpu, driver_version: str) -> str:
    return (
        f"Model: \t\t {gpu.model.name}\n"
        f"IRQ:   \t\t {64 + gpu.index}\n"
        f"GPU UUID: \t {gpu.uuid}\n"
        "Video BIOS: \t 96.00.74.00.01\n"
        "Bus Type: \t PCIe\n"
        "DMA Size: \t 52 bits\n"
        "DMA Mask: \t 0xfffffffffffff\n"
        f"Bus Location: \t {gpu.bus_id}\n"
        f"Device Minor: \t {gpu.index}\n"
        f"GPU Firmware: \t {driver_version}\n"
        "GPU Excluded:\t No\n"
    )


def _write_capabilities(driver: Path, gpus: Sequence[SimGpu], *, imex: bool) -> None:
    capabilities = driver / "nvidia/capabilities"
    _capability(capabilities / "mig/config", CONFIG_MINOR, 0o400)
    _capability(capabilities / "mig/monitor", MONITOR_MINOR, 0o444)
    for gpu in gpus:
        if gpu.model.mig_profiles:
            (capabilities / f"gpu{gpu.index}/mig").mkdir(parents=True)
        for mig in gpu.mig_devices:
            instance = capabilities / f"gpu{gpu.index}/mig/gi{mig.gpu_instance}"
            _capability(instance / "access", mig.gi_minor, 0o444)
            _capability(instance / f"ci{mig.compute_instance}/access", mig.ci_minor, 0o444)
    if imex:
        _capability(capabilities / "fabric-imex-mgmt", FABRIC_IMEX_MINOR, 0o400)
    write_file(driver / "nvidia-caps/mig-minors", render_mig_minors(), 0o444)
    write_file(driver / "nvidia-caps/nvlink-minors", "fabric-mgmt 0\n", 0o444)
    write_file(driver / "nvidia-caps/sys-minors", f"fabric-imex-mgmt {FABRIC_IMEX_MINOR}\n", 0o444)


def _capability(path: Path, minor: int, mode: int) -> None:
    # The driver writes the mode in decimal, and makes the file itself readable for everybody.
    write_file(path, f"DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n", 0o444)


def render_mig_minors() -> str:
    """Return the text of /proc/driver/nvidia-caps/mig-minors: every instance that could ever be made, on 32 GPUs."""
    lines = [f"config {CONFIG_MINOR}", f"monitor {MONITOR_MINOR}"]
    for gpu in range(MAX_MIG_GPUS):
        for instance in range(15):
            minor = gi_minor(gpu, instance)
            lines.append(f"gpu{gpu}/gi{instance}/access {minor}")
            lines += [f"gpu{gpu}/gi{instance}/ci{ci}/access {minor + 1 + ci}" for ci in range(8)]
    return "\n".join(lines) + "\n"


def write_sys(root: Path, gpus: Sequence[SimGpu], driver_version: str, first_card: int, *, dri: bool) -> None:
    """Write the PCI functions, the driver's modules and the DRM class below ``root``/sys."""
    sys = root / "sys"
    driver = sys / "bus/pci/drivers/nvidia"
    for name in ("bind", "unbind", "new_id", "remove_id", "uevent"):
        write_file(driver / name, "")
    (driver / "module").symlink_to("../../../../module/nvidia")
    for gpu in gpus:
        device = sys / "bus/pci/devices" / gpu.bus_id
        for name, text in _pci_attributes(gpu, len(gpus)).items():
            write_file(device / name, text + "\n", 0o444)
        write_file(device / "config", _pci_config(gpu), 0o644)
        (device / "driver").symlink_to("../../drivers/nvidia")
        (driver / gpu.bus_id).symlink_to(f"../../devices/{gpu.bus_id}")
        number = drm_number(gpu, first_card)
        if dri and number is not None:
            for name, minor in ((f"card{number}", number), (f"renderD{128 + number}", 128 + number)):
                write_file(device / "drm" / name / "dev", f"{DRM_MAJOR}:{minor}\n", 0o444)
                link = sys / "class/drm" / name
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(f"../../bus/pci/devices/{gpu.bus_id}/drm/{name}")
    for module, references in (("nvidia", 3), ("nvidia_uvm", 0), ("nvidia_modeset", 1), ("nvidia_drm", 0)):
        write_file(sys / "module" / module / "initstate", "live\n", 0o444)
        write_file(sys / "module" / module / "refcnt", f"{references}\n", 0o444)
        write_file(sys / "module" / module / "version", f"{driver_version}\n", 0o444)


def _pci_attributes(gpu: SimGpu, count: int) -> dict[str, str]:
    node = numa_node(gpu.index, count)
    return {
        "vendor": f"{_VENDOR:#06x}",
        "device": f"{gpu.model.device_id:#06x}",
        "class": f"{_CLASS:#08x}",
        "subsystem_vendor": f"{_VENDOR:#06x}",
        "subsystem_device": f"{gpu.model.subsystem_id:#06x}",
        "revision": "0xa1",
        "irq": str(64 + gpu.index),
        "enable": "1",
        "numa_node": str(node),
        "local_cpulist": f"{node * CPUS_OF_NODE}-{(node + 1) * CPUS_OF_NODE - 1}",
        "driver_override": "(null)",
        "resource": _pci_resource(gpu),
        "uevent": (
            f"DRIVER=nvidia\nPCI_CLASS={_CLASS:X}\nPCI_ID={_VENDOR:04X}:{gpu.model.device_id:04X}\n"
            f"PCI_SUBSYS_ID={_VENDOR:04X}:{gpu.model.subsystem_id:04X}\nPCI_SLOT_NAME={gpu.bus_id}"
        ),
    }


def _pci_resource(gpu: SimGpu) -> str:
    """Return the 13 regions of the function, "start end flags" each: registers, memory, and what is mapped of both."""
    memory = 1 << (gpu.model.memory_mib - 1).bit_length() + 20
    base = (2 + 2 * gpu.index) << 38
    regions = (
        (0xA000_0000 + (gpu.index << 24), 1 << 24, 0x40200),  # IORESOURCE_MEM, sized as it is aligned
        (base, memory, 0x14220C),  # and prefetchable, 64 bits wide (include/linux/ioport.h)
        (0, 0, 0),
        (base + (1 << 38), 1 << 25, 0x14220C),
        *[(0, 0, 0)] * 9,
    )
    return "\n".join(f"{start:#018x} {max(start + size - 1, 0):#018x} {flags:#018x}" for start, size, flags in regions)


def _pci_config(gpu: SimGpu) -> bytes:
    """Return the 256 bytes of configuration space: a type 0 header, its first 48 bytes are what programs look at."""
    header = struct.pack("<HHHHBBBBBBBB", _VENDOR, gpu.model.device_id, 0x0406, 0x0010, 0xA1, 0, 0x02, 0x03, 0, 0, 0, 0)
    subsystem = struct.pack("<HH", _VENDOR, gpu.model.subsystem_id)
    return (header.ljust(44, b"\0") + subsystem).ljust(256, b"\0")
