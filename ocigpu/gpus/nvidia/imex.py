"""IMEX on a host: nodes of channels, and of the capability that an IMEX daemon needs.

Nodes are described by number, whether the host has them or not.  Sources: nvidia-modprobe-utils.h of nvidia-modprobe
(the driver's name in /proc/devices, paths of the nodes), "IMEX Service for NVLink Networks" of NVIDIA (channels, and
the registry key ImexChannelCount).
"""

from ocigpu.core.errors import HostError
from ocigpu.core.facts import DeviceNode
from ocigpu.gpus.nvidia.devices import IMEX_DRIVER, DriverNodes, driver_nodes
from ocigpu.gpus.nvidia.procfs import parse_capability, parse_fields
from ocigpu.gpus.tree import Roots, read_text, small_number

MAX_CHANNELS = 2048
MANAGEMENT = "fabric-imex-mgmt"
LEAST_DRIVER = (570, 158, 1)
"""The first driver whose nvidia-imex looks up the names of its nodes again (IMEXDaemonsWithDNSNamesMinDriverVersion of
kubernetes-sigs/dra-driver-nvidia-gpu)."""


def read_channels(roots: Roots, every: bool) -> tuple[DeviceNode, ...]:
    """Return the node of channel 0, or those of all channels that the driver has; raises HostError (OCIGPU-DEV-4)."""
    nodes = driver_nodes(roots)
    major = nodes.majors.get(IMEX_DRIVER)
    if major is None:
        raise HostError("OCIGPU-DEV-4", "IMEX channel 0: this driver or GPU has no IMEX channels")
    count = min(_channel_count(roots), MAX_CHANNELS) if every else 1
    return tuple(_at(nodes, f"/dev/{IMEX_DRIVER}/channel{number}", major, number) for number in range(count))


def _channel_count(roots: Roots) -> int:
    fields = parse_fields(read_text(f"{roots.proc}/driver/nvidia/params") or "")
    return max(1, small_number(fields.get("ImexChannelCount", ""), MAX_CHANNELS))


def _at(nodes: DriverNodes, path: str, major: int, minor: int) -> DeviceNode:
    permissions = nodes.permissions
    return DeviceNode(path, "", major, minor, permissions.mode, permissions.uid, permissions.gid)


def read_management_node(roots: Roots) -> DeviceNode:
    """Return the node that lets a process be the IMEX daemon; raises HostError (OCIGPU-DEV-4) without one."""
    text = read_text(f"{roots.proc}/driver/nvidia/capabilities/{MANAGEMENT}")
    minor, mode, _ = parse_capability(text or "")
    major = driver_nodes(roots).majors.get("nvidia-caps")
    if minor < 0 or major is None:
        raise HostError("OCIGPU-DEV-4", f"capability {MANAGEMENT}: this driver or GPU has none, so no IMEX daemon")
    return DeviceNode(f"/dev/nvidia-caps/nvidia-cap{minor}", "", major, minor, mode)


def why_no_imex(driver_version: str) -> str:
    """Return why the IMEX daemon of a driver does not fit, "" when it does."""
    numbers = tuple(small_number(word) for word in driver_version.split("."))
    if numbers >= LEAST_DRIVER:
        return ""
    return f"driver {driver_version}: IMEX daemons whose peers change need 570.158.01 or later"
