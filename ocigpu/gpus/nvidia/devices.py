"""Device nodes of the driver: numbers from /proc/devices, permissions and host paths from the nodes themselves.

Minors are the driver's (README, chapter "Device nodes"): nvidiactl 255 and nvidia-modeset 254 of the GPUs' major,
nvidia-uvm 0 and nvidia-uvm-tools 1 of their own.
"""

from ocigpu.core.facts import DeviceNode, FeatureNodes, HostFile, Permissions
from ocigpu.gpus.nodes import NodeReader
from ocigpu.gpus.nvidia.procfs import find_gpu_major, parse_devices, parse_permissions
from ocigpu.gpus.pci import read_drm_numbers
from ocigpu.gpus.tree import Roots, Tree, read_text, small_number

GPU_MAJOR = 195
"""Registered for the driver in the kernel's list of device numbers."""
CONTROL_MINOR = 255
MODESET_MINOR = 254
IMEX_DRIVER = "nvidia-caps-imex-channels"
MAX_NODES = 4096


class DriverNodes(NodeReader):
    """The nodes of NVIDIA's driver.

    ``loaded``: the kernel module is known to be loaded, whatever /proc/devices says.
    """

    def __init__(
        self, tree: Tree, majors: tuple[tuple[str, int], ...], permissions: Permissions, loaded: bool = True
    ) -> None:
        super().__init__(tree)
        self.majors = dict(majors)
        self.permissions = permissions
        self.gpu_major = find_gpu_major(self.majors, GPU_MAJOR)
        self.loaded = loaded or find_gpu_major(self.majors, 0) > 0

    def control_nodes(self) -> tuple[DeviceNode, ...]:
        """Return nvidiactl, nvidia-uvm, nvidia-uvm-tools and nvidia-modeset, those whose driver part is loaded."""
        control = self.read("/dev/nvidiactl", self.gpu_major, CONTROL_MINOR, self.permissions)
        nodes = [control] if self.loaded or control.host_path else []
        uvm = self.majors.get("nvidia-uvm")
        for name, minor in (("nvidia-uvm", 0), ("nvidia-uvm-tools", 1)):
            if uvm is not None:
                nodes.append(self.read(f"/dev/{name}", uvm, minor))
            elif not self.majors:  # no /proc/devices to tell a loaded driver from a stale node
                node = self.read_existing(f"/dev/{name}")
                nodes += [node] if node else []
        modeset = self.read("/dev/nvidia-modeset", self.gpu_major, MODESET_MINOR, self.permissions)
        if "nvidia-modeset" in self.majors or modeset.host_path:
            nodes.append(modeset)
        return tuple(nodes)

    def gpu_node(self, minor: int) -> DeviceNode | None:
        """Return the node of the GPU with this minor, None when the minor is unknown."""
        if not 0 <= minor < MODESET_MINOR:
            return None
        return self.read(f"/dev/nvidia{minor}", self.gpu_major, minor, self.permissions)

    def drm_nodes(self, sys: str, bus_id: str) -> tuple[DeviceNode, ...]:
        """Return the card and render nodes of a GPU."""
        return self.read_drm(read_drm_numbers(sys, bus_id))

    def cap_node(self, minor: int, mode: int) -> DeviceNode | None:
        """Return the nvidia-caps node with this minor, None without that driver part."""
        major = self.majors.get("nvidia-caps")
        if major is None or minor < 0:
            return None
        return self.read(f"/dev/nvidia-caps/nvidia-cap{minor}", major, minor, Permissions(mode))

    def imex_nodes(self) -> tuple[int | None, tuple[DeviceNode, ...]]:
        """Return the major of the IMEX channels (None without that driver part) and the channels that have a node."""
        major = self.majors.get(IMEX_DRIVER)
        if major is None:
            return None, ()
        directory = f"/dev/{IMEX_DRIVER}"
        minors = sorted(small_number(name.removeprefix("channel")) for name in self.tree.names(directory)[:MAX_NODES])
        nodes = [
            self.read(f"{directory}/channel{minor}", major, minor, self.permissions) for minor in minors if minor >= 0
        ]
        return major, tuple(node for node in nodes if node.host_path)

    def features(self, files: tuple[HostFile, ...]) -> tuple[FeatureNodes, ...]:
        """Return what the opt-in variables bring: GDS, MOFED, GDRCopy and NVSwitch; ``files`` go with GDS."""
        names = self.tree.names("/dev")
        groups = (
            ("gds", [f"/dev/{name}" for name in names if name.startswith("nvidia-fs")]),
            ("mofed", self._infiniband() if "infiniband" in names else []),
            ("gdrcopy", ["/dev/gdrdrv"] if "gdrdrv" in names else []),
            ("nvswitch", [f"/dev/{name}" for name in names if name.startswith("nvidia-nvswitch")]),
        )
        found = []
        for name, paths in groups:
            nodes = tuple(node for node in map(self.read_existing, paths[:MAX_NODES]) if node is not None)
            if nodes:
                found.append(FeatureNodes(name, nodes, files if name == "gds" else ()))
        return tuple(found)

    def _infiniband(self) -> list[str]:
        names = self.tree.names("/dev/infiniband")
        return [f"/dev/infiniband/{name}" for name in names if name.startswith("uverbs") or name == "rdma_cm"]


def driver_nodes(roots: Roots) -> DriverNodes:
    """Return the nodes of a host's driver, which counts as loaded; raises HostError (OCIGPU-HOST-3)."""
    majors = parse_devices(read_text(f"{roots.proc}/devices") or "")
    permissions = parse_permissions(read_text(f"{roots.proc}/driver/nvidia/params") or "")
    return DriverNodes(Tree(roots.dev, roots.stand_in), majors, permissions)
