"""Facts and a request become a plan: /dev/kfd for every container with a GPU, of each GPU its nodes below /dev/dri.

Libraries come with the image, as with AMD's container toolkit.  Pure.
"""

from ocigpu.core.actions import Plan, join_groups, node_actions
from ocigpu.core.errors import HostError, RequestError, quoted
from ocigpu.core.facts import Gpu, HostFacts, ImageFacts
from ocigpu.core.settings import Settings
from ocigpu.gpus.amd.facts import nodes_of
from ocigpu.gpus.request import Request, Selection, check_without_cdi
from ocigpu.gpus.tree import normal_bus_id

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ocigpu.core.actions import Action


def make_plan(
    facts: HostFacts, request: Request, settings: Settings, image: "ImageFacts | None" = None, mode: str = "hook"
) -> Plan:
    """Return what must be done for a container that makes this request on this host.

    Raises RequestError OCIGPU-DEV-1 for a device that is not there, HostError OCIGPU-DEV-2 for one without nodes.
    """
    image = image or ImageFacts()
    if request.selection == "nothing":
        return Plan((), notes=request.notes, mode=mode, image=image)
    gpus = select_devices(request, facts).gpus
    notes = [*request.notes, *facts.notes]
    if gpus and not facts.control_nodes:
        notes.append("the host has no /dev/kfd: ROCm will not work in containers")
    nodes = [*facts.control_nodes]
    actions: list[Action] = [*node_actions(*nodes, reason="control node, needed by every container with a GPU")]
    parts: dict[str, tuple[Action, ...]] = {}
    for gpu in gpus:
        reason = f"GPU {gpu.index} ({gpu.uuid}), granted by {request.source}"
        parts[gpu.uuid] = node_actions(*nodes_of(gpu), reason=reason)
        actions += parts[gpu.uuid]
        nodes += nodes_of(gpu)
    if not settings.features_no_additional_gids_for_device_nodes:
        actions += join_groups(nodes)
    return Plan(
        tuple(actions),
        gpus=tuple(parts),
        notes=tuple(notes),
        driver_version=facts.driver_version,
        simulated=facts.simulated,
        mode=mode,
        image=image,
        parts=parts,
    )


def select_devices(request: Request, facts: HostFacts) -> Selection:
    """Return the requested GPUs and partitions, each once, in the order of the host.

    A unique id that partitions share means all of them.  Raises RequestError OCIGPU-DEV-1 for a device that does not
    exist, HostError OCIGPU-DEV-1 if all GPUs are requested but there are none, HostError OCIGPU-DEV-2 for one without
    nodes.
    """
    check_without_cdi(request)
    there = f"this host has AMD GPUs 0 to {len(facts.gpus) - 1}" if facts.gpus else "this host has no AMD GPU"
    chosen: dict[int, Gpu] = {}
    if request.selection == "all":
        chosen = {gpu.index: gpu for gpu in facts.gpus if nodes_of(gpu)}
        if not chosen:
            raise HostError("OCIGPU-DEV-1", f"{request.source}: {there}" + (" without nodes" if facts.gpus else ""))
    for token in request.devices:
        found = [gpu for gpu in facts.gpus if token.lower() in _names_of(gpu) or normal_bus_id(token) == gpu.bus_id]
        if not found:
            raise RequestError("OCIGPU-DEV-1", f"no such device {quoted(token)} ({request.source}): {there}")
        for gpu in found:
            if not nodes_of(gpu):
                message = (
                    f"GPU {gpu.index} ({gpu.uuid}) was requested by {quoted(token)}: it has no nodes below /dev/dri"
                )
                raise HostError("OCIGPU-DEV-2", message)
            chosen[gpu.index] = gpu
    return Selection(tuple(chosen[index] for index in sorted(chosen)))


def _names_of(gpu: Gpu) -> tuple[str, ...]:
    """Return what a GPU may be called: its index, its unique id, and that of the GPU it is a partition of."""
    return (str(gpu.index), gpu.uuid, gpu.uuid.partition(":")[0] if gpu.uuid.startswith("0x") else "")
