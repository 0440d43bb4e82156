"""The device nodes of a simulated host and their numbers."""

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ocigpu.gpus.nvidia.nodes import STAND_IN
from ocigpu.sim.models import MAX_MIG_GPUS, MINORS_PER_GPU, SimGpu, sim_error

NVIDIA_MAJOR = 195
DRM_MAJOR = 226
CONTROL_MINOR = 255
MODESET_MINOR = 254
IMEX_CHANNELS = 4
NVSWITCHES = 4
_DRM_LIMIT = 64
"""DRM cards and render nodes with the traditional numbers (card N has minor N, its render node 128 + N)."""

CONFIG_MINOR = 1
MONITOR_MINOR = 2
FABRIC_IMEX_MINOR = 3 + MAX_MIG_GPUS * MINORS_PER_GPU


# Character majors are given out downwards from 511 once those below 255 are used (Linux, fs/char_dev.c).
_FIRST_DYNAMIC, _LAST_DYNAMIC = 510, 384
NVIDIA_MAJORS = 5


@dataclass(frozen=True)
class Majors:
    """Majors that a real driver would get from the kernel; ``imex`` and ``nvswitch`` are 0 without that part."""

    uvm: int
    caps: int
    nvlink: int
    imex: int
    nvswitch: int

    def by_name(self) -> dict[str, int | None]:
        """Return them by the names in /proc/devices; None: the host does not have that part."""
        return {
            "nvidia": NVIDIA_MAJOR,
            "nvidia-uvm": self.uvm,
            "nvidia-caps": self.caps,
            "nvidia-nvlink": self.nvlink,
            "nvidia-caps-imex-channels": self.imex or None,
            "nvidia-nvswitch": self.nvswitch or None,
        }


@dataclass(frozen=True)
class SimNode:
    """One node: ``path`` below the host's root."""

    path: str
    major: int
    minor: int
    mode: int = 0o666


def free_majors(proc_devices: str = "/proc/devices") -> list[int]:
    """Return majors that no driver of this machine has, so that no simulated node reaches a real device."""
    try:
        lines = Path(proc_devices).read_text().split("Block devices:")[0].splitlines()
    except OSError:
        lines = []
    used = {int(line.split()[0]) for line in lines if line[:3].strip().isdigit()}
    return [major for major in range(_FIRST_DYNAMIC, _LAST_DYNAMIC - 1, -1) if major not in used]


def choose_majors(gpu: SimGpu, proc_devices: str = "/proc/devices") -> Majors:
    """Return the first of :func:`free_majors` for NVIDIA's driver."""
    uvm, caps, nvlink, imex, nvswitch = free_majors(proc_devices)[:NVIDIA_MAJORS]
    return Majors(uvm, caps, nvlink, imex if gpu.model.imex else 0, nvswitch if gpu.model.has_nvswitch_nodes else 0)


def choose_first_card(dev_dri: str = "/dev/dri") -> int:
    """Return the number of the first DRM card that this machine does not have."""
    try:
        names = os.listdir(dev_dri)
    except OSError:
        return 0
    return 1 + max((int(name[4:]) for name in names if name.startswith("card") and name[4:].isdigit()), default=-1)


def drm_number(gpu: SimGpu, first_card: int) -> int | None:
    """Return N of the GPU's cardN and renderD(128 + N), None when numbers have run out."""
    number = first_card + gpu.index
    return number if number < _DRM_LIMIT else None


def plan_nodes(gpus: Sequence[SimGpu], majors: Majors, first_card: int, *, dri: bool) -> list[SimNode]:
    """Return every node the driver and nvidia-modprobe would make."""
    nodes = [SimNode(f"dev/nvidia{gpu.index}", NVIDIA_MAJOR, gpu.index) for gpu in gpus]
    nodes += [
        SimNode("dev/nvidiactl", NVIDIA_MAJOR, CONTROL_MINOR),
        SimNode("dev/nvidia-modeset", NVIDIA_MAJOR, MODESET_MINOR),
        SimNode("dev/nvidia-uvm", majors.uvm, 0),
        SimNode("dev/nvidia-uvm-tools", majors.uvm, 1),
        _cap(majors, CONFIG_MINOR, 0o400),
        _cap(majors, MONITOR_MINOR),
    ]
    for gpu in gpus:
        for mig in gpu.mig_devices:
            nodes += [_cap(majors, mig.gi_minor), _cap(majors, mig.ci_minor)]
        number = drm_number(gpu, first_card)
        if dri and number is not None:
            nodes.append(SimNode(f"dev/dri/card{number}", DRM_MAJOR, number))
            nodes.append(SimNode(f"dev/dri/renderD{128 + number}", DRM_MAJOR, 128 + number))
    channels = IMEX_CHANNELS if majors.imex else 0
    nodes += [SimNode(f"dev/nvidia-caps-imex-channels/channel{n}", majors.imex, n) for n in range(channels)]
    if majors.nvswitch:
        nodes.append(SimNode("dev/nvidia-nvlink", majors.nvlink, 0))
        nodes.append(SimNode("dev/nvidia-nvswitchctl", majors.nvswitch, 255))
        nodes += [SimNode(f"dev/nvidia-nvswitch{number}", majors.nvswitch, number) for number in range(NVSWITCHES)]
    return nodes


def plan_tegra_nodes(names: Sequence[str], majors: Majors) -> list[SimNode]:
    """Return the nodes of a Jetson by their names in /dev; other drivers than NVIDIA's have a free major here."""
    known = {"nvidiactl": (NVIDIA_MAJOR, CONTROL_MINOR), "nvidia-modeset": (NVIDIA_MAJOR, MODESET_MINOR)}
    known |= {"nvidia-uvm": (majors.uvm, 0), "nvidia-uvm-tools": (majors.uvm, 1)}
    known |= {f"nvidia{number}": (NVIDIA_MAJOR, number) for number in range(3)}
    return [SimNode(f"dev/{name}", *known.get(name, (majors.caps, at))) for at, name in enumerate(names)]


def _cap(majors: Majors, minor: int, mode: int = 0o444) -> SimNode:
    return SimNode(f"dev/nvidia-caps/nvidia-cap{minor}", majors.caps, minor, mode)


def make_nodes(root: Path, nodes: Iterable[SimNode], *, real: bool | None) -> bool:
    """Make the nodes below ``root``; return whether they are real ones.

    ``real`` None: real nodes where mknod(2) is permitted (CAP_MKNOD in the initial user namespace), regular files that
    stand for them otherwise. Raises OcigpuError when ``real`` is True and mknod is refused.
    """
    made_real = real
    for node in nodes:
        path = root / node.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if made_real is not False:
            try:
                os.mknod(path, stat.S_IFCHR | node.mode, os.makedev(node.major, node.minor))
                made_real = True
            except OSError as error:
                if made_real or error.errno not in (errno.EPERM, errno.EACCES):
                    raise sim_error(
                        f"mknod {path}: {error.strerror}", "device nodes need root outside of user namespaces"
                    ) from error
                made_real = False
        if not made_real:
            path.write_text(STAND_IN)
        path.chmod(node.mode)
    return bool(made_real)


def why_no_nodes(directory: str) -> str:
    """Return what keeps device nodes from being made and opened in a directory, "" where nothing does.

    A node that no driver answers for is made and opened: that gives ENXIO where nodes can be used.
    """
    number = os.makedev(next(iter(free_majors()), NVIDIA_MAJOR), 0)
    try:
        scratch = tempfile.mkdtemp(prefix=".ocigpu-node-", dir=directory)
    except OSError:
        return ""  # the maker of the host reports it
    try:
        os.mknod(f"{scratch}/node", stat.S_IFCHR | 0o600, number)
        os.close(os.open(f"{scratch}/node", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENODEV):
            return ""
        nodev = error.errno == errno.EACCES and os.statvfs(directory).f_flag & os.ST_NODEV
        call = "open a device node" if os.path.lexists(f"{scratch}/node") else "mknod"
        return f"{directory} is mounted nodev" if nodev else f"{call} in {directory}: {error.strerror}"
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return ""


def link_dri_by_path(root: Path, gpus: Sequence[SimGpu], first_card: int) -> None:
    """Make the links that udev makes in /dev/dri/by-path."""
    directory = root / "dev/dri/by-path"
    directory.mkdir(parents=True)
    for gpu in gpus:
        number = drm_number(gpu, first_card)
        if number is not None:
            (directory / f"pci-{gpu.bus_id}-card").symlink_to(f"../card{number}")
            (directory / f"pci-{gpu.bus_id}-render").symlink_to(f"../renderD{128 + number}")
