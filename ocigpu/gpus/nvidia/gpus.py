"""One list of GPUs out of what NVML and procfs say, and the MIG devices' capabilities."""

from ocigpu.core.facts import NOT_LISTED, DeviceNode, Gpu, MigDevice, capability_path
from ocigpu.gpus.nvidia.devices import DriverNodes
from ocigpu.gpus.nvidia.procfs import MIG_MINORS_LIMIT, ProcGpu, numbered, parse_capability, parse_mig_minors
from ocigpu.gpus.tree import list_names, read_text

EXCLUDED = "excluded by the driver's configuration (GPU Excluded: Yes)"
NO_MINOR = "its device minor is unknown"


def merge_gpus(listed: tuple[Gpu, ...], in_procfs: tuple[ProcGpu, ...]) -> tuple[Gpu, ...]:
    """Return NVML's GPUs completed from procfs, then those that only procfs knows, by index.

    A GPU that NVML could not even identify is matched with what procfs has left, in the order of bus ids, when both
    are as many: NVML numbers GPUs in that order.
    """
    by_bus = {gpu.bus_id: gpu for gpu in in_procfs}
    pairs = [(gpu, by_bus.pop(gpu.bus_id, None)) for gpu in listed]
    nameless = [position for position, (gpu, _) in enumerate(pairs) if not gpu.bus_id]
    if len(nameless) == len(by_bus):
        for position, proc_gpu in zip(nameless, list(by_bus.values()), strict=True):
            pairs[position] = (pairs[position][0], by_bus.pop(proc_gpu.bus_id))
    merged = [_complete(gpu, proc_gpu) for gpu, proc_gpu in pairs]
    index = max((gpu.index for gpu in merged), default=-1)
    for proc_gpu in by_bus.values():
        index += 1
        merged.append(gpu_from_procfs(proc_gpu, index, EXCLUDED if proc_gpu.excluded else NOT_LISTED))
    return tuple(sorted(merged, key=lambda gpu: gpu.index))


def _complete(gpu: Gpu, proc_gpu: ProcGpu | None) -> Gpu:
    if proc_gpu is not None:
        gpu = gpu._replace(
            minor=gpu.minor if gpu.minor >= 0 else proc_gpu.minor,
            uuid=gpu.uuid or proc_gpu.uuid,
            bus_id=proc_gpu.bus_id,
            model=gpu.model or proc_gpu.model,
            proc_name=proc_gpu.name,
            error=gpu.error or (EXCLUDED if proc_gpu.excluded else ""),
        )
    return gpu if gpu.minor >= 0 or gpu.error else gpu._replace(error=NO_MINOR)


def gpu_from_procfs(proc_gpu: ProcGpu, index: int, error: str = "") -> Gpu:
    """Return what procfs alone knows of a GPU."""
    return _complete(Gpu(index, -1, "", "", error=error), proc_gpu)


def gpus_from_procfs(in_procfs: tuple[ProcGpu, ...]) -> tuple[Gpu, ...]:
    """Return all GPUs as procfs alone shows them, in its order, with the indices that NVML would assign.

    NVML does not count the GPUs that the driver excludes: they come last here, as in :func:`merge_gpus`.
    """
    ordered = sorted(in_procfs, key=lambda gpu: gpu.excluded)
    return tuple(gpu_from_procfs(gpu, index) for index, gpu in enumerate(ordered))


class MigCapabilities:
    """MIG capabilities: their minors and the nodes of nvidia-caps.

    Paths are written as in mig-minors ("gpu0/gi1/access"); their files have other names (:func:`capability_path`).
    """

    def __init__(self, proc: str, proc_driver: str, reader: DriverNodes) -> None:
        self.nodes: dict[str, DeviceNode] = {}
        self._reader = reader
        self.directory = f"{proc_driver}/capabilities"
        self._minors_path = f"{proc}/driver/nvidia-caps/mig-minors"
        self._minors: dict[str, int] | None = None

    def add(self, path: str) -> int:
        """Find the capability's minor and remember its node; returns the minor, -1 when it is unknown."""
        mode = 0o444  # the driver's permissions for capabilities of instances; the other files state their own
        minor = self._minor(path) if path.startswith("gpu") else -1
        if minor < 0:
            minor, mode = self._from_file(path)
        if minor < 0:
            minor = self._minor(path)
        node = self._reader.cap_node(minor, mode)
        if node is not None:
            self.nodes.setdefault(path, node)
        return minor

    def _minor(self, path: str) -> int:
        if self._minors is None:
            self._minors = parse_mig_minors(read_text(self._minors_path, MIG_MINORS_LIMIT) or "")
        return self._minors.get(path, -1)

    def _from_file(self, path: str) -> tuple[int, int]:
        return parse_capability(read_text(f"{self.directory}/{capability_path(path)}") or "")[:2]


def complete_mig(gpu: Gpu, capabilities: MigCapabilities, from_procfs: bool) -> Gpu:
    """Return the GPU with the minors of its MIG devices; with ``from_procfs`` the devices come from there, unnamed."""
    directory = f"{capabilities.directory}/gpu{gpu.minor}"
    if from_procfs and "mig" in list_names(directory):
        gpu = gpu._replace(mig_capable=True)
    if gpu.minor < 0 or not (gpu.mig_enabled or (from_procfs and gpu.mig_capable)):
        return gpu
    devices = gpu.mig_devices
    instances = numbered(f"{directory}/mig", "gi")
    if from_procfs:
        pairs = [(gi, ci) for gi in instances for ci in numbered(f"{directory}/mig/gi{gi}", "ci")]
        devices = tuple(MigDevice(index, "", "", gi, ci, -1, -1) for index, (gi, ci) in enumerate(pairs))
    for gpu_instance in instances:  # also those without a compute instance: they can still be configured
        capabilities.add(f"gpu{gpu.minor}/gi{gpu_instance}/access")
    completed = tuple(
        device._replace(
            gi_minor=capabilities.add(f"gpu{gpu.minor}/gi{device.gpu_instance}/access"),
            ci_minor=capabilities.add(f"gpu{gpu.minor}/gi{device.gpu_instance}/ci{device.compute_instance}/access"),
        )
        for device in devices
    )
    return gpu._replace(mig_devices=completed, mig_enabled=gpu.mig_enabled or bool(instances))
