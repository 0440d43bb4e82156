"""What ``ocigpu-container-cli info`` and ``list`` print: the lines of nvidia-container-cli, in its order."""

import argparse

from ocigpu.core.errors import RequestError, printable
from ocigpu.core.facts import DeviceNode, Gpu, HostFacts, MigDevice, mig_capability_paths
from ocigpu.gpus.nvidia.files import BINARIES
from ocigpu.gpus.nvidia.libraries import OWN_VERSION, TABLE, split_name

CAPABILITIES_DIRECTORY = "/proc/driver/nvidia/capabilities"
INFO_LABELS = ("Device Index", "Device Minor", "Model", "Brand", "GPU UUID", "Bus Location", "Architecture")

_OURS = {
    *OWN_VERSION, "libnvidia-sandboxutils", "libnvidia-vulkan-producer",
    "nvidia-imex", "nvidia-imex-ctl", "nvidia-xconfig",
}  # fmt: skip
ORDER = [name for name in (*TABLE, *dict(BINARIES)) if name not in _OURS]
"""The order in which nvidia-container-cli lists files (1.17), that of our tables; what it does not know comes after."""


def render_info(facts: HostFacts) -> list[str]:
    """Return the lines of ``info``: labels in 15 columns, an empty line before every GPU."""
    lines = [_field("NVRM version:", facts.driver_version), _field("CUDA version:", facts.cuda_version)]
    for gpu in facts.gpus:
        lines.append("")
        lines += [_field(f"{label}:", value) for label, value in zip(INFO_LABELS, _info_values(gpu), strict=True)]
    return lines


def render_csv(facts: HostFacts) -> list[str]:
    """Return the lines of ``info --csv``; nothing is quoted, and the second header is there without GPUs too."""
    return [
        "NVRM version,CUDA version",
        f"{facts.driver_version},{facts.cuda_version}",
        "",
        ",".join(INFO_LABELS),
        *(",".join(_info_values(gpu)) for gpu in facts.gpus),
    ]


def _info_values(gpu: Gpu) -> tuple[str, ...]:
    return (str(gpu.index), str(gpu.minor), gpu.model, gpu.brand, gpu.uuid, gpu.bus_id, gpu.architecture)


def _field(label: str, value: str) -> str:
    return f"{label:<15} {value}"


def render_list(facts: HostFacts, options: argparse.Namespace, channels: list[int]) -> list[str]:
    """Return the paths that ``list`` prints, in the order of nvidia-container-cli, without the driver root.

    Without options everything is listed; one word that asks for an IMEX channel counts as none.
    """
    whole = options.words == 0 or (options.words == 1 and bool(channels))
    paths: list[str] = []
    gpus: list[Gpu] = []
    mig_devices: list[tuple[Gpu, MigDevice]] = []
    specific_mig = False
    if whole or options.device:
        gpus, mig_devices, specific_mig = select_by_token("all" if whole else ",".join(options.device), facts)
        paths += [node.container_path for node in facts.control_nodes]
        paths += [gpu.node.container_path for gpu in gpus if gpu.node]
        for gpu, mig in mig_devices:
            paths += _mig_paths(facts, gpu, mig)
    paths += [f"/dev/nvidia-caps-imex-channels/channel{channel}" for channel in channels]
    for name, value in (("config", options.mig_config), ("monitor", options.mig_monitor)):
        if value:
            paths += _mig_capability_paths(facts, name, value, gpus, specific_mig)
    root = "" if facts.driver_root == "/" else facts.driver_root.rstrip("/")
    if whole or options.binaries:
        binaries = sorted(facts.binaries, key=lambda file: _rank(file.container_path))
        paths += [_below(root, file.host_path) for file in binaries]
    if whole or options.libraries:
        libraries = sorted(facts.libraries, key=lambda library: _rank(library.name))
        for bits in (64, 32) if whole or options.compat32 else (64,):
            paths += [_below(root, library.host_path) for library in libraries if library.bits == bits]
        paths += [_below(root, file.host_path) for file in (facts.listed.files if facts.listed else ())]
    if whole or options.ipcs:
        dropped = [
            name
            for name, drop in (("persistenced", options.no_persistenced), ("fabricmanager", options.no_fabricmanager))
            if drop
        ]
        for file in facts.sockets:
            if not any(name in file.container_path for name in dropped):
                paths.append(_below(root, file.host_path))
    if (whole or options.firmwares) and not options.no_gsp_firmware:
        paths += [file.container_path for file in facts.firmware]
    return [printable(path) for path in dict.fromkeys(paths)]


def _rank(path: str) -> int:
    name = split_name(path.rpartition("/")[2])[0]
    return ORDER.index(name) if name in ORDER else len(ORDER)


def _below(root: str, path: str) -> str:
    return path.removeprefix(root) if root and path.startswith(root + "/") else path


def select_by_token(text: str, facts: HostFacts) -> tuple[list[Gpu], list[tuple[Gpu, MigDevice]], bool]:
    """Return the GPUs and MIG devices of a --device list, and whether MIG devices were named one by one.

    As nvidia-container-cli reads it: "all", a GPU's UUID, its PCI address, its index, a MIG device's UUID, "GPU:MIG";
    a MIG device brings its GPU along, and on a host without GPUs every list is accepted.
    Raises RequestError OCIGPU-DEV-1 for anything else.
    """
    gpus: list[Gpu] = []
    mig_devices: list[tuple[Gpu, MigDevice]] = []
    for token in filter(None, text.split(",")) if facts.gpus else ():
        if token.lower() == "all":
            return list(facts.gpus), [(gpu, mig) for gpu in facts.gpus for mig in gpu.mig_devices], False
        gpu = next((gpu for gpu in facts.gpus if _is_gpu(token, gpu)), None)
        pair = next(((gpu, mig) for gpu in facts.gpus for mig in gpu.mig_devices if _is_mig(token, gpu, mig)), None)
        if gpu is None and pair is None:
            raise RequestError("OCIGPU-DEV-1", f"device error: {printable(token, 120)}: unknown device")
        if gpu is not None:
            gpus.append(gpu)
        elif pair is not None:
            gpus.append(pair[0])
            mig_devices.append(pair)
    unique = [gpu for gpu in facts.gpus if gpu in gpus]
    return unique, list(dict.fromkeys(mig_devices)), bool(mig_devices)


def _is_gpu(token: str, gpu: Gpu) -> bool:
    if token.lower() == gpu.uuid.lower():
        return True
    if token.isascii() and token.isdigit():
        return int(token) == gpu.index
    return token.count(":") == 2 and _same_address(token, gpu.bus_id)


def _same_address(token: str, bus_id: str) -> bool:
    """Compare PCI addresses by domain, bus and device; the function is not looked at."""
    try:
        wanted = [int(part, 16) for part in token.partition(".")[0].split(":")]
    except ValueError:
        return False
    return wanted == [int(part, 16) for part in bus_id.partition(".")[0].split(":")]


def _is_mig(token: str, gpu: Gpu, mig: MigDevice) -> bool:
    return token.lower() == mig.uuid.lower() or token == f"{gpu.index}:{mig.index}"


def _mig_paths(facts: HostFacts, gpu: Gpu, mig: MigDevice) -> list[str]:
    paths = [f"{CAPABILITIES_DIRECTORY}/{path}" for path in mig_capability_paths(gpu.minor, mig)]
    by_minor = {node.minor: node for _, node in facts.cap_nodes}
    nodes = [by_minor.get(mig.gi_minor), by_minor.get(mig.ci_minor)]
    return paths + [node.container_path for node in nodes if node is not None]


def check_mig_capability(name: str, value: str) -> None:
    """Raise RequestError OCIGPU-REQ-1 for a value of --mig-config or --mig-monitor (``name``: "config", "monitor")."""
    if value not in ("", "all"):
        raise RequestError("OCIGPU-REQ-1", f"mig-{name} error: only 'all' devices are currently supported", "")


def _mig_capability_paths(facts: HostFacts, name: str, value: str, gpus: list[Gpu], specific_mig: bool) -> list[str]:
    check_mig_capability(name, value)
    if specific_mig:
        message = f"mig-{name} error: cannot enable mig-{name} with specific MIG devices selected"
        raise RequestError("OCIGPU-REQ-1", message, "")
    nodes: list[tuple[str, DeviceNode]] = list(facts.cap_nodes)
    paths = [f"{CAPABILITIES_DIRECTORY}/mig/{name}"]
    paths += [node.container_path for path, node in nodes if path == name]
    for gpu in gpus:
        if gpu.mig_capable:
            paths += [f"{CAPABILITIES_DIRECTORY}/gpu{gpu.minor}", "/dev/nvidia-caps"]
            paths += [node.container_path for path, node in nodes if path.startswith(f"gpu{gpu.minor}/")]
    return paths
