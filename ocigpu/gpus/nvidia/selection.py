"""Which GPUs and MIG devices of this host a request means: pure, facts and request in, records out."""

from ocigpu.core.errors import HostError, RequestError, printable, quoted
from ocigpu.core.facts import MISSING_NODE, Gpu, HostFacts, MigDevice
from ocigpu.core.tokens import WORDS, pci_address
from ocigpu.gpus.request import Request, Selection, check_without_cdi

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

MIN_PREFIX = 4
"""Hex digits that a shortened UUID must have at least."""

DISPLAY_ONLY = ("DGX Display", "NVIDIA DGX Display")
"""Models that drive the monitor of a workstation and compute nothing: not among "all", as with NVIDIA's tools."""

_SHOWN = 8  # devices listed in one message

if TYPE_CHECKING:
    Target: TypeAlias = tuple[Gpu, MigDevice | None]


def select_devices(request: Request, facts: HostFacts) -> Selection:
    """Return the host's devices for the request, in the requested order (for "all": the host's), each once.

    A GPU with MIG enabled stands for all its MIG devices; one for a display only is not among "all".  If the container
    configures or monitors MIG, it gets a GPU without MIG devices as a whole.  Raises RequestError OCIGPU-DEV-1 for a
    device that does not exist, HostError OCIGPU-DEV-1 when all GPUs were requested but there are none, HostError
    OCIGPU-DEV-2 for one that exists but cannot be used, RequestError OCIGPU-REQ-1 for a MIG variable along with single
    MIG devices, and for CDI devices.
    """
    check_without_cdi(request)
    if request.selection == "all":
        return _select_all(request, facts)
    if request.selection == "list":
        return _select_list(request, facts)
    return Selection()


def _select_all(request: Request, facts: HostFacts) -> Selection:
    gpus: list[Gpu] = []
    mig_devices: list[tuple[Gpu, MigDevice]] = []
    failed: list[Gpu] = []
    empty: list[int] = []
    displays: list[int] = []
    for gpu in facts.gpus:
        if gpu.model in DISPLAY_ONLY:
            displays.append(gpu.index)
        elif gpu.error:
            failed.append(gpu)
        elif _is_whole(gpu, request):
            gpus.append(gpu)
        else:
            mig_devices.extend((gpu, mig) for mig in gpu.mig_devices)
            if not gpu.mig_devices:
                empty.append(gpu.index)
    notes = []
    if failed:
        notes.append(f"left out: {_some([f'{gpu.title} ({printable(gpu.error, 200)})' for gpu in failed])}")
    if empty:
        notes.append(f"left out: {gpu_ranges(empty)}: MIG is enabled, but there are no MIG devices")
    if gpus or mig_devices:
        return Selection(tuple(gpus), tuple(mig_devices), tuple(notes))
    if displays:
        notes.append(f"left out: {gpu_ranges(displays)}: for a display only")
    if notes:
        raise HostError(
            "OCIGPU-DEV-2", f"{request.source}: no GPU of this host is usable; {'; '.join(notes)}", _hint(failed)
        )
    raise HostError("OCIGPU-DEV-1", f"{request.source}: {_available(facts)}")


def _select_list(request: Request, facts: HostFacts) -> Selection:
    names = _names(facts)
    gpus: dict[int, Gpu] = {}
    mig_devices: dict[tuple[int, int], tuple[Gpu, MigDevice]] = {}
    notes: dict[str, None] = {}
    for token in request.devices:
        gpu, mig = _find(token, names, request, facts)
        if gpu.error:
            raise HostError(
                "OCIGPU-DEV-2",
                f"{gpu.title} ({gpu.uuid}) was requested by {quoted(token)}: {printable(gpu.error, 400)}",
                _hint([gpu]),
            )
        if mig is not None:
            if facts.source == "procfs" and len(gpu.mig_devices) > 1 and "/" not in token:
                raise HostError(  # procfs orders them by instance, NVML does not
                    "OCIGPU-DEV-2",
                    f"{quoted(token)} ({request.source}): NVML did not answer, and only it knows which MIG device of"
                    f" GPU {gpu.index} has this index",
                    f"Name it by its instances, as in MIG-{gpu.uuid}/{mig.gpu_instance}/{mig.compute_instance};"
                    " why NVML gave none: ocigpu list.",
                )
            if request.mig_config or request.mig_monitor:
                raise RequestError(
                    "OCIGPU-REQ-1",
                    f"{request.source}: {quoted(token)}: single MIG devices cannot be requested together with "
                    + ("NVIDIA_MIG_CONFIG_DEVICES" if request.mig_config else "NVIDIA_MIG_MONITOR_DEVICES"),
                    "Request the whole GPU, or remove the variable.",
                )
            mig_devices.setdefault((gpu.index, mig.index), (gpu, mig))
        elif _is_whole(gpu, request):
            gpus.setdefault(gpu.index, gpu)
        elif gpu.mig_devices:
            for each in gpu.mig_devices:
                mig_devices.setdefault((gpu.index, each.index), (gpu, each))
            notes[f"GPU {gpu.index} has MIG enabled: the container gets its {len(gpu.mig_devices)} MIG devices"] = None
        else:
            raise HostError(
                "OCIGPU-DEV-2",
                f"GPU {gpu.index} ({gpu.uuid}) was requested by {quoted(token)}: MIG is enabled, but there are no"
                " MIG devices",
                "Create MIG devices (nvidia-smi mig -cgi ... -C), or disable MIG on this GPU.",
            )
    return Selection(tuple(gpus.values()), tuple(mig_devices.values()), tuple(notes))


def _hint(failed: list[Gpu]) -> str | None:
    """Return what helps GPUs of which none is broken, None for what the code says."""
    missing = failed and all(gpu.error.startswith(MISSING_NODE) for gpu in failed)
    return "Run: ocigpu system create-device-nodes" if missing else None


def _is_whole(gpu: Gpu, request: Request) -> bool:
    """Return whether the GPU itself is granted: without MIG, or to a container that will make its MIG devices."""
    return not gpu.mig_enabled or (not gpu.mig_devices and bool(request.mig_config or request.mig_monitor))


def _names(facts: HostFacts) -> "dict[str, Target]":
    """Return every complete spelling of every device, lower case."""
    names: dict[str, Target] = {}
    for gpu in facts.gpus:
        address = pci_address(gpu.bus_id)
        for name in (str(gpu.index), gpu.uuid.lower(), f"pci {address}" if address else ""):
            if name:
                names.setdefault(name, (gpu, None))
        for mig in gpu.mig_devices:
            legacy = f"mig-{gpu.uuid.lower()}/{mig.gpu_instance}/{mig.compute_instance}"
            for name in (f"{gpu.index}:{mig.index}", mig.uuid.lower(), legacy):
                if name:
                    names.setdefault(name, (gpu, mig))
    return names


def _find(token: str, names: "dict[str, Target]", request: Request, facts: HostFacts) -> "Target":
    plain = token.lower()
    # "10:11" could be both GPU:MIG and bus:device: the former is what people write without a domain or function
    target = names.get(plain) or names.get(f"pci {pci_address(token)}")
    if target is not None:
        return target
    unknown = f"no such device {quoted(token)} ({request.source}): "
    if plain in WORDS:
        raise RequestError("OCIGPU-DEV-1", unknown + _available(facts), f"Write it in lower case: {plain}")
    if plain.isdigit() and plain.startswith("0"):
        raise RequestError("OCIGPU-DEV-1", f"{unknown}an index has no leading zeros")
    if plain.startswith(("gpu-", "mig-")) and "/" not in plain:  # instance numbers are never shortened
        if sum(c != "-" for c in plain[4:]) < MIN_PREFIX:
            raise RequestError("OCIGPU-DEV-1", f"{unknown}a shortened UUID needs at least {MIN_PREFIX} digits")
        matches = [name for name in names if name.startswith(plain)]
        distinct = {(gpu.index, mig.index if mig else -1): (gpu, mig) for gpu, mig in map(names.__getitem__, matches)}
        if len(distinct) == 1:
            return next(iter(distinct.values()))
        if matches:
            uuids = [mig.uuid if mig else gpu.uuid for gpu, mig in distinct.values()]
            raise RequestError(
                "OCIGPU-DEV-1",
                f"{quoted(token)} ({request.source}) is not one device: it is the beginning of {_some(uuids)}",
                "Write more digits of the UUID.",
            )
    wants_mig = plain.startswith("mig-") or (":" in plain and not pci_address(token))
    raise RequestError("OCIGPU-DEV-1", unknown + (_available_mig(facts) if wants_mig else _available(facts)))


def _available(facts: HostFacts) -> str:
    if facts.gpus:
        return f"this host has {gpu_ranges([gpu.index for gpu in facts.gpus])}"
    return "this host has no GPUs" + (f" ({printable(facts.notes[0], 300)})" if facts.notes else "")


def _available_mig(facts: HostFacts) -> str:
    pairs = [f"{gpu.index}:{mig.index}" for gpu in facts.gpus for mig in gpu.mig_devices]
    return f"this host has MIG devices {_some(pairs)}" if pairs else "this host has no MIG devices"


def _some(items: list[str]) -> str:
    """Return the items joined, no more than a reader wants to see."""
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


def gpu_ranges(indices: list[int]) -> str:
    """Return GPU indices as text: "GPUs 0-3, 6"."""
    parts: list[list[int]] = []
    for index in sorted(set(indices)):
        if parts and index == parts[-1][1] + 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    text = _some([str(first) if first == last else f"{first}-{last}" for first, last in parts])
    return f"GPU{'s' if len(indices) > 1 else ''} {text}"
