"""Tegra systems (Jetson, Thor): ``ocigpu cdi generate --mode csv``, kind nvidia.com/gpu.

What a container needs is listed in L4T's CSV files.  One device "0" has all their nodes; a system with a discrete GPU
beside the integrated one has two devices.  Written from NVIDIA's documents and generator, tried on copies of such
systems' files and not on a Tegra system.
"""

from typing import TYPE_CHECKING

from ocigpu.core.actions import Link, RefreshLdCache, node_actions
from ocigpu.core.errors import CdiError
from ocigpu.core.facts import DeviceNode, Gpu
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.nvml import NvmlAnswer
from ocigpu.gpus.offer import (
    VOID,
    CompatTerms,
    DeviceOffer,
    GenerateOptions,
    OfferedDevice,
    bind_file,
    choose_names,
    library_folders,
    select_ids,
)
from ocigpu.gpus.tegra.facts import (
    CONTROL_NODES,
    CSV_FILES,
    CsvFacts,
    ask_nvml,
    is_integrated,
    read_csv_facts,
    read_gpu_nodes,
)
from ocigpu.gpus.tree import find_roots, small_number

if TYPE_CHECKING:
    from ocigpu.core.actions import Action

SINGLE_FLAG = "disable-multiple-csv-devices"
ORIN = "Orin (nvgpu)"


def offer(options: GenerateOptions, settings: Settings) -> DeviceOffer:
    """Return the devices of a Tegra system.

    Raises CdiError (OCIGPU-CDI-7) if its CSV files name no device node, or for an unknown device id, and HostError
    (OCIGPU-HOST-3) for a file that cannot be read.
    """
    roots = find_roots(settings)
    files = options.csv_files or CSV_FILES
    facts = read_csv_facts(roots, files, options.csv_ignore_patterns, options.library_search_paths)
    answer = ask_nvml(roots)
    notes: tuple[str, ...] = ()
    if answer is not None and answer.problem:
        notes = (f"{answer.problem}: one device, without CUDA forward compatibility",)
        answer = None
    discrete = next((gpu for gpu in answer.gpus if not is_integrated(gpu)), None) if answer else None
    made = offer_listed(facts, answer, read_gpu_nodes(roots, discrete) if discrete else (), options, settings.ldconfig)
    return made._replace(notes=(*made.notes, *notes))


def offer_listed(
    facts: CsvFacts,
    answer: NvmlAnswer | None,
    discrete_nodes: tuple[DeviceNode, ...],
    options: GenerateOptions,
    ldconfig: str,
) -> DeviceOffer:
    """Return the offer of these facts; ``discrete_nodes`` are those of the GPU that is not integrated, if any.  Pure.

    ``answer``: what NVML says, None without it.  Raises CdiError (OCIGPU-CDI-7) as :func:`offer` does.
    """
    if not facts.nodes:
        reasons = "; ".join(note.removesuffix("; passed over") for note in facts.notes)
        raise CdiError(
            "OCIGPU-CDI-7",
            f"the CSV files name no device node of this host{': ' if reasons else ''}{reasons}",
            "Mode csv is for Tegra systems; other lists: --csv.file FILE; any other host: --mode nvml",
        )
    gpus = answer.gpus if answer else ()
    notes = list(facts.notes)
    several = len(gpus) > 1 and SINGLE_FLAG not in options.feature_flags
    if several and not (len(gpus) == 2 and is_integrated(gpus[0]) and not is_integrated(gpus[1])):
        names = ", ".join(gpu.model or "unknown" for gpu in gpus)
        notes.append(f"GPUs are not an integrated one and then a discrete one ({names}): all nodes are in one device")
        several = False
    if several:
        sets = [node_actions(*_integrated_nodes(facts)), node_actions(*_discrete_nodes(facts, discrete_nodes))]
        chosen = select_ids(options.device_ids, [_ids(gpu) for gpu in gpus], "GPU")
        devices = [
            OfferedDevice(name, sets[index])
            for index in chosen
            for name in _names(gpus[index], options.name_strategies)
        ]
    else:
        select_ids(options.device_ids, [("0",)], "GPU")
        devices = [OfferedDevice("0", node_actions(*facts.nodes))]
    actions = _common(facts, ldconfig)
    return DeviceOffer(
        source="csv",
        vendor=options.vendor or "nvidia.com",
        device_class=options.device_class or "gpu",
        devices=tuple(devices),
        base=actions,
        env=(VOID,),
        hooked=actions,
        compat=_compat(answer, options),
        notes=tuple(notes),
    )


def _integrated_nodes(facts: CsvFacts) -> list[DeviceNode]:
    """The second node of the integrated GPU is /dev/nvidia2 when a discrete one has /dev/nvidia1."""
    nodes = [node for node in facts.nodes if node.container_path != "/dev/nvidia1"]
    second = facts.second_node
    return [*nodes, second] if second and second not in nodes else nodes


def _discrete_nodes(facts: CsvFacts, own: tuple[DeviceNode, ...]) -> list[DeviceNode]:
    """Return a discrete GPU's nodes, the driver's control nodes, and what the files list for every GPU."""
    names = {f"/dev/{name}" for name in CONTROL_NODES}
    shared = [
        node
        for node in facts.nodes
        if node.container_path not in names and small_number(node.container_path.removeprefix("/dev/nvidia")) < 0
    ]
    return [*own, *facts.control_nodes, *shared]


def _ids(gpu: Gpu) -> tuple[str, ...]:
    """NVML writes the UUID of an integrated GPU with or without "GPU-"."""
    return tuple(filter(None, (str(gpu.index), gpu.uuid, gpu.uuid.removeprefix("GPU-"))))


def _names(gpu: Gpu, strategies: tuple[str, ...]) -> tuple[str, ...]:
    return choose_names(strategies, str(gpu.index), f"gpu{gpu.index}", gpu.uuid)


def _common(facts: CsvFacts, ldconfig: str) -> "tuple[Action, ...]":
    actions: list[Action] = [bind_file(file) for file in facts.files]
    actions += [Link(path, target, "") for target, path in facts.links]
    folders = library_folders(facts.files)
    return (*actions, RefreshLdCache(ldconfig, folders, "")) if folders else tuple(actions)


def _compat(answer: NvmlAnswer | None, options: GenerateOptions) -> CompatTerms | None:
    if answer is None or not answer.cuda_version:
        return None
    orin = any(ORIN in gpu.model for gpu in answer.gpus)
    return CompatTerms("", answer.cuda_version, options.csv_compat_container_root if orin else "")
