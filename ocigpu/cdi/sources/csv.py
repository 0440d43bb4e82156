"""Tegra systems (Jetson, Thor): ``ocigpu cdi generate --mode csv``, kind nvidia.com/gpu.

What a container needs is listed in L4T's CSV files.  One device "0" has all their nodes; a system with a discrete GPU
beside the integrated one has two devices.  Written from NVIDIA's documents and generator, tried on copies of such
systems' files and not on a Tegra system.
"""

from ocigpu.cdi.draft import VOID, Draft, DraftDevice
from ocigpu.cdi.edits import edits_from_actions
from ocigpu.cdi.hook_words import EnableCudaCompat
from ocigpu.cdi.sources.files import bind_file, library_folders
from ocigpu.cdi.sources.ids import choose_names, select_ids
from ocigpu.cdi.sources.program import hook_options, note_program
from ocigpu.core.actions import Link, Node, RefreshLdCache
from ocigpu.core.errors import CdiError
from ocigpu.gpus.tegra.facts import CONTROL_NODES, CSV_FILES, CsvFacts, ask_nvml, read_csv_facts, read_gpu_nodes
from ocigpu.gpus.tree import find_roots, small_number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ocigpu.cdi.draft import Edits, GenerateOptions
    from ocigpu.cdi.edits import HookOptions
    from ocigpu.core.actions import Action
    from ocigpu.core.facts import DeviceNode, Gpu
    from ocigpu.core.settings import Settings
    from ocigpu.gpus.nvidia.nvml import NvmlAnswer

SINGLE_FLAG = "disable-multiple-csv-devices"
INTEGRATED_NAMES = ("(nvgpu)", "NVIDIA Thor")
INTEGRATED_BUS_ID = "00000000:01:00.0"
ORIN = "Orin (nvgpu)"


def draft(options: "GenerateOptions", settings: "Settings") -> Draft:
    """Return the devices of a Tegra system.

    Raises CdiError (OCIGPU-CDI-7) when its CSV files give no device node, or for a device id that it has not, and
    HostError (OCIGPU-HOST-3) for a file that cannot be read.
    """
    roots = find_roots(settings)
    hook = hook_options(options, settings)
    files = options.csv_files or CSV_FILES
    facts = read_csv_facts(roots, files, options.csv_ignore_patterns, options.library_search_paths)
    answer = ask_nvml(roots)
    notes: tuple[str, ...] = ()
    if answer is not None and answer.problem:
        notes = (f"{answer.problem}: one device, without CUDA forward compatibility",)
        answer = None
    discrete = next((gpu for gpu in answer.gpus if not is_integrated(gpu)), None) if answer else None
    made = draft_csv(facts, answer, read_gpu_nodes(roots, discrete) if discrete else (), options, hook)
    return note_program(made._replace(notes=(*made.notes, *notes)), hook)


def draft_csv(
    facts: CsvFacts,
    answer: "NvmlAnswer | None",
    discrete_nodes: "tuple[DeviceNode, ...]",
    options: "GenerateOptions",
    hook: "HookOptions",
) -> Draft:
    """Return the draft for these facts; ``discrete_nodes`` are those of the GPU that is not integrated, if any.  Pure.

    ``answer``: what NVML says, None without it.  Raises CdiError (OCIGPU-CDI-7) as :func:`draft` does.
    """
    if not facts.nodes:
        reasons = "; ".join(note.removesuffix("; passed over") for note in facts.notes)
        raise CdiError(
            "OCIGPU-CDI-7",
            f"the CSV files give no device node of this host{': ' if reasons else ''}{reasons}",
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
        sets = [
            edits_from_actions([Node(node, "") for node in nodes], additional_gids=options.additional_gids)
            for nodes in (_integrated_nodes(facts), _discrete_nodes(facts, discrete_nodes))
        ]
        chosen = select_ids(options.device_ids, [_ids(gpu) for gpu in gpus], "GPU")
        devices = [
            DraftDevice(name, sets[index]) for index in chosen for name in _names(gpus[index], options.name_strategies)
        ]
    else:
        select_ids(options.device_ids, [("0",)], "GPU")
        edits = edits_from_actions([Node(node, "") for node in facts.nodes], additional_gids=options.additional_gids)
        devices = [DraftDevice("0", edits)]
    return Draft(
        source="csv",
        vendor=options.vendor or "nvidia.com",
        device_class=options.device_class or "gpu",
        devices=tuple(devices),
        common=_common(facts, answer, options, hook),
        notes=tuple(notes),
    )


def is_integrated(gpu: "Gpu") -> bool:
    """Return whether a GPU is part of the chip: NVML has no PCI address for it, or gives it that of Tegra's."""
    if gpu.bus_id:
        return gpu.bus_id == INTEGRATED_BUS_ID
    return any(name in gpu.model for name in INTEGRATED_NAMES)


def _integrated_nodes(facts: CsvFacts) -> "list[DeviceNode]":
    """The second node of the integrated GPU is /dev/nvidia2 when a discrete one has /dev/nvidia1."""
    nodes = [node for node in facts.nodes if node.container_path != "/dev/nvidia1"]
    second = facts.second_node
    return [*nodes, second] if second and second not in nodes else nodes


def _discrete_nodes(facts: CsvFacts, own: "tuple[DeviceNode, ...]") -> "list[DeviceNode]":
    """Return a discrete GPU's nodes, the driver's control nodes, and what the files list for every GPU."""
    names = {f"/dev/{name}" for name in CONTROL_NODES}
    shared = [
        node
        for node in facts.nodes
        if node.container_path not in names and small_number(node.container_path.removeprefix("/dev/nvidia")) < 0
    ]
    return [*own, *facts.control_nodes, *shared]


def _ids(gpu: "Gpu") -> tuple[str, ...]:
    """NVML writes the UUID of an integrated GPU with or without "GPU-"."""
    return tuple(filter(None, (str(gpu.index), gpu.uuid, gpu.uuid.removeprefix("GPU-"))))


def _names(gpu: "Gpu", strategies: tuple[str, ...]) -> tuple[str, ...]:
    return choose_names(strategies, str(gpu.index), f"gpu{gpu.index}", gpu.uuid)


def _common(facts: CsvFacts, answer: "NvmlAnswer | None", options: "GenerateOptions", hook: "HookOptions") -> "Edits":
    actions: list[Action] = [bind_file(file) for file in facts.files]
    actions += [Link(path, target, "") for target, path in facts.links]
    folders = library_folders(facts.files)
    if folders:
        actions.append(RefreshLdCache(hook.ldconfig, folders, ""))
    if answer is not None and answer.cuda_version:
        compat = EnableCudaCompat(host_cuda_version=answer.cuda_version)
        if any(ORIN in gpu.model for gpu in answer.gpus):
            compat = compat._replace(container_root=options.csv_compat_container_root)
        hook = hook._replace(compat=compat)
    return {"env": [VOID], **edits_from_actions(actions, hook)}
