"""What must hold before a container gets devices of specifications: the settings, and what its image requires."""

from ocigpu.core.errors import HostError, OcigpuError, RequestError, printable, quoted
from ocigpu.core.gate import CAPABILITIES_ANNOTATION, is_gpu_of_nvidia
from ocigpu.gpus.request import Request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ocigpu.cdi.cache import LoadedSpec
    from ocigpu.core.facts import Gpu, HostFacts


def check_conditions(
    request: Request, specs: "Sequence[LoadedSpec]", read_host: "Callable[[], HostFacts]"
) -> tuple[str, ...]:
    """Check that a request may be granted from these specifications; return notes on what could not be looked at.

    ``read_host``: called only where the image requires something.  Raises RequestError OCIGPU-REQ-2 for a specification
    that may give more than the settings permit, OCIGPU-REQ-3 and -4 for a requirement.
    """
    if request.capabilities:
        for spec in specs:
            if is_gpu_of_nvidia(spec.kind):
                _check_bound(spec, request)
    if not request.requirements:
        return ()
    from ocigpu.gpus.nvidia.require import check_requirements

    try:
        facts = read_host()
    except HostError as error:  # WSL: on such a host only specifications know the driver
        names = ", ".join(printable(name, 120) for name, _ in request.requirements[:3])
        return (f"{names} not examined: {error.message}",)
    check_requirements(request.requirements, facts, find_gpus(request.cdi_devices, facts))
    return ()


def _check_bound(spec: "LoadedSpec", request: Request) -> None:
    said = spec.annotations.get(CAPABILITIES_ANNOTATION)
    more = sorted(set(filter(None, (said or "").split(","))).difference(request.capabilities))
    if said is not None and not more:
        return
    cause = f"provides {quoted(', '.join(more))}" if more else "may provide every driver capability"
    raise RequestError(
        "OCIGPU-REQ-2",
        f"{request.source}: {spec.path} {cause}, and supported-driver-capabilities permits"
        f" {', '.join(request.capabilities)}",
        "Write it again with ocigpu cdi generate --max-version 1.1.0, which obeys the setting and says so in the file"
        " (which Podman before 4.7 does not read), or name the GPU by index in mode auto or spec.",
    )


def find_gpus(names: "Sequence[str]", facts: "HostFacts") -> "tuple[Gpu, ...]":
    """Return the GPUs that these CDI devices are; all of the host where a name does not tell."""
    from ocigpu.gpus.nvidia.selection import select_devices

    tokens = tuple(name.partition("=")[2] for name in names if is_gpu_of_nvidia(name))
    if "all" in tokens or not tokens:
        return facts.gpus
    try:
        return select_devices(Request("list", tokens), facts).every_gpu()
    except OcigpuError:  # a name that only the specification has
        return facts.gpus
