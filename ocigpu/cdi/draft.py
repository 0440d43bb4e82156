"""What a source of devices answers when a specification is to be generated, and what it is asked."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NamedTuple

    Edits = dict[str, Any]
else:
    from ocigpu.core.record import NamedTuple

MODES = ("auto", "csv", "gdrcopy", "gds", "imex", "management", "mofed", "nvml", "nvswitch", "vfio", "wsl")
NAME_STRATEGIES = ("index", "uuid", "type-index")
HOOK_NAMES = (
    "create-symlinks",
    "enable-cuda-compat",
    "update-ldcache",
    "disable-device-node-modification",
    "update-application-profile",
    "chmod",
)
"""CDI hooks by the vendor's names, in the order in which they run."""
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


class DraftDevice(NamedTuple):
    """One device: its name and its containerEdits.

    ``coherent``: whether it is a GPU with coherent access to the host's memory, None for what cannot be told.
    """

    name: str
    edits: "Edits"
    coherent: bool | None = None


class Draft(NamedTuple):
    """What a source found: everything of a specification but version, fingerprint, "all" and order.

    ``source``: "nvidia", "amd", "vfio", ...; decides how the fingerprint is read.  ``common``: spec-level edits.
    ``all_device``: whether a device "all" that joins the others makes sense.  ``notes``: warnings; ``skipped``: devices
    that were left out, a sentence each with the reason.  ``max_version``: newest CDI version that the readers of this
    kind of specification understand, "" for any; the operator's own limit comes first.
    """

    source: str
    vendor: str
    device_class: str
    devices: tuple[DraftDevice, ...]
    common: "Edits"
    all_device: bool = True
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    max_version: str = ""
