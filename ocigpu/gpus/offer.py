"""What a vendor's folder offers for generating a specification, and the options for it."""

from ocigpu.core.actions import FILE_OPTIONS, SOCKET_OPTIONS, Bind
from ocigpu.core.cdi_names import check_device
from ocigpu.core.errors import CdiError, quoted
from ocigpu.core.record import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ocigpu.core.actions import Action
    from ocigpu.core.facts import HostFile

MODES = ("auto", "csv", "gdrcopy", "gds", "imex", "management", "mofed", "nvml", "nvswitch", "vfio", "wsl")
NAME_STRATEGIES = ("index", "uuid", "type-index")
FEATURE_FLAGS = (
    "enable-explicit-driver-libraries",
    "disable-nvsandboxutils",
    "disable-nvsandbox-utils",
    "enable-coherent-annotations",
    "disable-multiple-csv-devices",
    "no-additional-gids-for-device-nodes",
    "disable-ipc-discoverer",
)
"""The vendor's feature flags, one of them in two spellings."""
VOID = "NVIDIA_VISIBLE_DEVICES=void"
"""Variable that keeps a runtime that injects GPUs itself from doing so once more."""


class GenerateOptions(NamedTuple):
    """Options of ``ocigpu cdi generate`` that a source may need; its directories and ldconfig are in the settings.

    ``vendor``/``device_class``: "" for the source's own.  ``device_ids``: as the operator wrote them ("all", "0",
    "0:1", "GPU-...").  ``hook_path``: "" for ocigpu-hook as installed.  ``max_version``: newest CDI version that the
    result may need, "" for any.
    """

    mode: str = "auto"
    vendor: str = ""
    device_class: str = ""
    name_strategies: tuple[str, ...] = ("index", "uuid")
    device_ids: tuple[str, ...] = ("all",)
    all_device: bool = True
    hook_path: str = ""
    disabled_hooks: tuple[str, ...] = ()
    enabled_hooks: tuple[str, ...] = ()
    feature_flags: tuple[str, ...] = ()
    library_search_paths: tuple[str, ...] = ()
    config_search_paths: tuple[str, ...] = ()
    csv_files: tuple[str, ...] = ()
    csv_ignore_patterns: tuple[str, ...] = ()
    csv_compat_container_root: str = "/usr/local/cuda/compat_orin"
    max_version: str = ""

    @property
    def additional_gids(self) -> bool:
        """Whether the container's user joins the groups that may open nodes."""
        return "no-additional-gids-for-device-nodes" not in self.feature_flags


class CompatTerms(NamedTuple):
    """What decides whether an image's CUDA libraries suit the host's driver, "" for unknown or usual values."""

    driver_version: str = ""
    cuda_version: str = ""
    container_root: str = ""


class OfferedDevice(NamedTuple):
    """One device: its name and its actions, as the part of a plan.

    ``coherent``: whether it is a GPU with coherent access to the host's memory, None if unknown.
    """

    name: str
    actions: "tuple[Action, ...]"
    env: tuple[str, ...] = ()
    coherent: bool | None = None


class DeviceOffer(NamedTuple):
    """What a vendor's folder has for specifications: everything but version, fingerprint, "all" and order.

    ``source``: the vendor by its name in :mod:`ocigpu.gpus.vendors`.  ``base``, ``env``: what every container gets, as
    the base of a plan.  ``hooked``: actions that a CDI hook does, of the base or the devices; links to device nodes are
    made where the container has the node.  ``compat``: of images' CUDA libraries, None for no such hook.
    ``proc_driver``: where the host has /proc/driver/nvidia, "" to leave the container's as it is.  ``groups``: users
    join the groups of nodes.  ``all_device``: whether a device "all" that joins the others makes sense.  ``notes``:
    warnings; ``skipped``: devices that were left out, a sentence each with the reason.  ``max_version``: newest CDI
    version that the readers of this kind of specification understand, "" for any; the operator's limit comes first.
    """

    source: str
    vendor: str
    device_class: str
    devices: tuple[OfferedDevice, ...]
    base: "tuple[Action, ...]" = ()
    env: tuple[str, ...] = ()
    hooked: "tuple[Action, ...]" = ()
    compat: CompatTerms | None = None
    proc_driver: str = ""
    groups: bool = True
    all_device: bool = True
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    max_version: str = ""


def select_ids(ids: "Sequence[str]", known: "Sequence[tuple[str, ...]]", what: str) -> tuple[int, ...]:
    """Return the positions in ``known`` that the ids name, in its order; ``known`` holds each device's own ids.

    "all" among the ids is everything.  Raises CdiError (OCIGPU-CDI-7) for an id that no device has.
    """
    if "all" in ids:
        return tuple(range(len(known)))
    chosen = set()
    for text in ids:
        found = [position for position, own in enumerate(known) if text in own]
        if not found:
            first = ", ".join(own[0] for own in known[:16]) + (", ..." if len(known) > 16 else "")
            message = f"device id {quoted(text)}: no such {what}; available: {first or 'none'}"
            raise CdiError("OCIGPU-CDI-7", message, "Give one of them, or leave --device-id out.")
        chosen.update(found)
    return tuple(sorted(chosen))


def choose_names(strategies: "Sequence[str]", index: str, type_index: str, uuid: str) -> tuple[str, ...]:
    """Return a device's names by these strategies, each once; what no CDI device may be called ("") is left out."""
    names = {"index": index, "type-index": type_index, "uuid": uuid}
    return tuple(dict.fromkeys(names[strategy] for strategy in strategies if not check_device(names[strategy])))


def bind_file(file: "HostFile") -> Bind:
    """Return the bind mount of a file of the host, with a plan's options for such files."""
    return Bind(
        file.host_path, file.container_path, SOCKET_OPTIONS if file.kind == "socket" else FILE_OPTIONS, "", file.kind
    )


def library_folders(files: "Iterable[HostFile]") -> tuple[str, ...]:
    """Return the directories of the files that a loader takes for libraries: lib*.so or lib*.so.*, in their order."""
    paths = (file.container_path.rpartition("/") for file in files if file.kind == "file")
    return tuple(dict.fromkeys(directory for directory, _, name in paths if is_library(name)))


def is_library(name: str) -> bool:
    """Return whether a file is named like a shared library: "lib", at least a letter, ".so", a version or nothing."""
    at = name.rfind(".so")
    return name.startswith("lib") and at > 3 and name[at + 3 : at + 4] in ("", ".")
