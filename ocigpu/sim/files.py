"""The files of a simulated host: those of files.toml, which are the same for every host, and those that depend on it.

The latter are the files of the kernel and its nvidia modules in /proc and /sys, firmware, sockets and the loader's
cache.
"""

import os
import platform
import shutil
import socket
import struct
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from ocigpu.core.errors import OcigpuError, OsErrorAs, printable
from ocigpu.sim.models import CPUS_OF_NODE, MAX_MIG_GPUS, Model, SimGpu, gi_minor, numa_node, sim_error
from ocigpu.sim.nodes import (
    CONFIG_MINOR,
    DRM_MAJOR,
    FABRIC_IMEX_MINOR,
    MONITOR_MINOR,
    NVIDIA_MAJOR,
    Majors,
    drm_number,
)
from ocigpu.system.programs import run_program


@cache
def read_tables() -> dict[str, Any]:
    """Return the tables of files.toml, whose first lines explain them."""
    return tomllib.loads(Path(__file__).with_name("files.toml").read_text(encoding="utf-8"))


def fill_in(text: str, values: Mapping[str, object]) -> str:
    """Return the text with each $name replaced; raises KeyError for a name that ``values`` lacks."""
    return Template(text).substitute(values)


def write_files(root: Path, part: str, values: Mapping[str, object]) -> None:
    """Write the files of one part below ``root``, with the mode that each table is named by."""
    for mode, files in read_tables()[part].items():
        for path, text in files.items():
            write_file(root / fill_in(path, values), fill_in(text, values), int(mode, 8))


def write_file(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Write a file with this mode, and the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)


_VENDOR = 0x10DE


def write_kernel(
    root: Path, gpus: Sequence[SimGpu], majors: Majors, version: str, first_card: int, *, dri: bool
) -> None:
    """Write /proc/devices, /proc/driver and /sys below ``root``: PCI functions, the driver's modules, the DRM class."""
    values = {"version": version, "machine": platform.machine(), "imex_minor": FABRIC_IMEX_MINOR}
    write_file(root / "proc/devices", render_proc_devices(majors), 0o444)
    write_files(root, "kernel", values)
    for gpu in gpus:
        write_files(root, "gpu", values | _describe(gpu, len(gpus)))
    _write_capabilities(root / "proc/driver", gpus, imex=majors.imex != 0)
    (root / "proc/driver/nvidia-uvm").mkdir()
    driver = root / "sys/bus/pci/drivers/nvidia"
    (driver / "module").symlink_to("../../../../module/nvidia")
    for gpu in gpus:
        device = root / "sys/bus/pci/devices" / gpu.bus_id
        write_file(device / "config", _pci_config(gpu), 0o644)
        (device / "driver").symlink_to("../../drivers/nvidia")
        (driver / gpu.bus_id).symlink_to(f"../../devices/{gpu.bus_id}")
        number = drm_number(gpu, first_card)
        if dri and number is not None:
            for name, minor in ((f"card{number}", number), (f"renderD{128 + number}", 128 + number)):
                write_file(device / "drm" / name / "dev", f"{DRM_MAJOR}:{minor}\n", 0o444)
                link = root / "sys/class/drm" / name
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(f"../../bus/pci/devices/{gpu.bus_id}/drm/{name}")


def write_tegra(root: Path, majors: Majors, version: str, nodes: Sequence[str], libraries: Sequence[str]) -> None:
    """Write what a Jetson has instead: L4T's release, the lists of what containers need, and no PCI function.

    ``nodes``, ``libraries``: paths of a host.
    """
    uvm = majors.uvm if "/dev/nvidia-uvm" in nodes else 0
    write_file(root / "proc/devices", render_proc_devices(Majors(uvm, 0, 0, 0, 0)), 0o444)
    values = {
        "version": version,
        "machine": platform.machine(),
        "triplet": f"{platform.machine()}-linux-gnu",
        "release": "R38 (release), REVISION: 2.0" if uvm else "R36 (release), REVISION: 4.3",
        "devices": "".join(f"dev, {path}\n" for path in nodes),
        "libraries": "\n".join(f"lib, {path}" for path in libraries),
    }
    write_files(root, "tegra", values)


def _describe(gpu: SimGpu, count: int) -> dict[str, object]:
    """Return what the files of one GPU are filled in with."""
    node, model = numa_node(gpu.index, count), gpu.model
    return {
        "name": model.name,
        "uuid": gpu.uuid,
        "bus_id": gpu.bus_id,
        "index": gpu.index,
        "irq": 64 + gpu.index,
        "node": node,
        "cpus": f"{node * CPUS_OF_NODE}-{(node + 1) * CPUS_OF_NODE - 1}",
        "regions": pci_regions(gpu),
        "device": f"{model.device_id:#06x}",
        "DEVICE": f"{model.device_id:04X}",
        "subsystem": f"{model.subsystem_id:#06x}",
        "SUBSYSTEM": f"{model.subsystem_id:04X}",
    }


def render_proc_devices(majors: Majors) -> str:
    """Return the text of /proc/devices (proc_devices(5)) of a host with the driver."""
    table = read_tables()["majors"]
    ours = [(NVIDIA_MAJOR, "nvidia-modeset"), (NVIDIA_MAJOR, "nvidiactl"), (DRM_MAJOR, "drm")]
    ours = [*((number, name) for name, number in majors.by_name().items() if number), *ours]
    characters = sorted([*table["character"], *ours], key=lambda entry: entry[0])
    lines = ["Character devices:", *(f"{major:3d} {name}" for major, name in characters)]
    lines += ["", "Block devices:", *(f"{major:3d} {name}" for major, name in table["block"])]
    return "\n".join(lines) + "\n"


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


def _capability(path: Path, minor: int, mode: int) -> None:
    # The driver writes the mode in decimal, and makes the file itself world-readable.
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


def pci_regions(gpu: SimGpu) -> str:
    """Return the 13 regions of the function, "start end flags" each: registers, memory, the mapped parts of both."""
    memory = 1 << max(gpu.model.memory_mib - 1, 0).bit_length() + 20  # 1 MiB of a GPU without its own memory
    base = (2 + 2 * gpu.index) << 38
    regions = (
        (0xA000_0000 + (gpu.index << 24), 1 << 24, 0x40200),  # IORESOURCE_MEM, aligned to its size
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


_LDCONFIG = ("/sbin/ldconfig.real", "/sbin/ldconfig", "/usr/sbin/ldconfig")
"""Ubuntu's /sbin/ldconfig is a script around ldconfig.real."""


def write_firmware(root: Path, driver_version: str) -> None:
    """Write GSP firmware: some KiB that name themselves."""
    directory = root / "lib/firmware/nvidia" / driver_version
    for name in ("gsp_ga10x.bin", "gsp_tu10x.bin"):
        write_file(directory / name, f"{name} of a simulated host\n".encode().ljust(8192, b"\0"), 0o444)


def make_sockets(root: Path, model: Model) -> list[str]:
    """Make the daemons' sockets: bound once, so that the file exists but does not answer; return their paths."""
    names = ["run/nvidia-persistenced/socket"]
    if model.fabric:
        names.append("run/nvidia-fabricmanager/socket")
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # A socket's path is limited to 107 bytes (unix(7)), so the long part goes through a descriptor.
        directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(f"/proc/self/fd/{directory}/{path.name}")
        finally:
            os.close(directory)
        path.chmod(0o666)
    return names


def write_ldcache(root: Path) -> None:
    """Write etc/ld.so.cache with this machine's ldconfig; the paths in it are without the prefix.

    ``ldconfig -r`` uses chroot(2) if permitted and otherwise adds the prefix by itself, so it needs no privileges.
    Raises OcigpuError when ldconfig is missing (musl systems) or fails.
    """
    program = next((path for path in _LDCONFIG if os.access(path, os.X_OK)), None)
    if program is None:
        raise sim_error(
            "no ldconfig on this machine", "the loader's cache needs a glibc system; or leave the cache out"
        )
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
    with OsErrorAs(OcigpuError, "OCIGPU-SIM-1", f"{program} -r {root}", ""):
        done = run_program([program, "-r", str(root), "-X", "-i"], 300, env=environment)
    cache = root / "etc/ld.so.cache"
    if done.status or not cache.is_file():
        lines: Sequence[str] = done.complaint.splitlines() or ["no cache was written"]
        raise sim_error(f"{program} -r {root}: {printable(lines[-1], 300)}")
    cache.chmod(0o644)
    shutil.rmtree(root / "var/cache", ignore_errors=True)  # ldconfig's own notes
