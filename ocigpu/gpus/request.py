"""One container's request, as every vendor's folder reads it from config.json."""

from ocigpu.core.config_json import get_object, has_user_namespace
from ocigpu.core.errors import RequestError
from ocigpu.core.record import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ocigpu.core.facts import Gpu, MigDevice


class Request(NamedTuple):
    """What one container requests.

    ``selection``: "nothing" (unset, empty, void: not a GPU container), "none" (driver files and control nodes, no GPU),
    "all", "list", or "cdi"; ``devices``: for "list" the tokens in order, stripped, without duplicates.
    ``cdi_devices``: for "cdi" the fully qualified names in order, without duplicates; specifications then define what
    the container gets.  Of the other fields source, notes and requirements are set, and ``capabilities`` to those to
    which specifications are limited, () if they decide themselves.  ``source``: where the selection comes from, for
    reasons and messages ("NVIDIA_VISIBLE_DEVICES=0,2", "volume mounts below /var/run/nvidia-container-devices").
    ``capabilities``: driver capabilities, sorted.  ``requirements``: (variable, expression) pairs, sorted.
    ``mig_config``/``mig_monitor``: "" or "all".  ``imex_channels``: sorted channel ids.  ``features``: opt-in parts, of
    "gds", "mofed", "gdrcopy", "nvswitch", in that order.  ``notes``: warnings, a sentence each ("request of an
    unprivileged container ignored ...").  ``vendor``: whose devices are requested, by its name in
    :mod:`ocigpu.gpus.vendors`; for "cdi" the first one.  ``parts``: if devices of several vendors are requested, the
    request to each; all other fields are then the first one's.
    """

    selection: str = "nothing"
    devices: tuple[str, ...] = ()
    source: str = ""
    capabilities: tuple[str, ...] = ()
    requirements: tuple[tuple[str, str], ...] = ()
    mig_config: str = ""
    mig_monitor: str = ""
    imex_channels: tuple[int, ...] = ()
    features: tuple[str, ...] = ()
    cdi_devices: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    vendor: str = "nvidia"
    parts: "tuple[Request, ...]" = ()

    @property
    def each(self) -> "tuple[Request, ...]":
        """The request to each vendor."""
        return self.parts or (self,)

    @property
    def vendors(self) -> tuple[str, ...]:
        """The vendors whose devices are requested."""
        return tuple(one.vendor for one in self.each)


def join_requests(requests: "Sequence[Request]") -> Request:
    """Return the requests to several vendors as one: all of them by CDI names, or none."""
    asking = [one for one in requests if one.selection != "nothing"] or [Request()]
    first = asking[0]._replace(notes=tuple(note for one in requests for note in one.notes))
    if len(asking) == 1:
        return first
    first = first._replace(source=" ".join(one.source for one in asking))
    if first.selection == "cdi":
        return first._replace(cdi_devices=tuple(dict.fromkeys(name for one in asking for name in one.cdi_devices)))
    selection = next((one.selection for one in asking if one.selection != "none"), "none")
    return first._replace(selection=selection, parts=tuple(asking))


class Selection(NamedTuple):
    """What is granted: whole ``gpus``, and ``mig_devices`` each with its parent, which is not thereby in ``gpus``.

    ``notes``: warnings, a sentence each, about GPUs that were left out or are granted in parts.
    """

    gpus: "tuple[Gpu, ...]" = ()
    mig_devices: "tuple[tuple[Gpu, MigDevice], ...]" = ()
    notes: tuple[str, ...] = ()

    def every_gpu(self) -> "tuple[Gpu, ...]":
        """Return the whole GPUs, then the parents of the MIG devices, each once: what requirements apply to."""
        distinct = {gpu.index: gpu for gpu in self.gpus}
        for gpu, _ in self.mig_devices:
            distinct.setdefault(gpu.index, gpu)
        return tuple(distinct.values())


def check_without_cdi(request: Request) -> None:
    """Raise RequestError OCIGPU-REQ-1 for a request that only the shim can grant, from CDI specifications."""
    if request.selection == "cdi":
        raise RequestError(
            "OCIGPU-REQ-1",
            f"{request.source}: only ocigpu-runtime provides CDI devices, from specifications",
            "Use the runtime ocigpu instead of --gpus; to see the devices: ocigpu cdi show NAME",
        )


def is_privileged(config: "dict[str, Any]") -> bool:
    """Return whether the bounding set has CAP_SYS_ADMIN: an object of sets, or one list before OCI 1.0.0-rc5.

    In its own user namespace, that grants a container rights over itself, and none over the host's devices.
    """
    if has_user_namespace(config):
        return False
    capabilities = get_object(config, "process").get("capabilities")
    bounding = capabilities.get("bounding") if isinstance(capabilities, dict) else capabilities
    return isinstance(bounding, list) and "CAP_SYS_ADMIN" in bounding
