"""Where the devices of a generated specification come from: one module for each source, with a function ``draft``."""

from ocigpu.cdi.sources.amd import draft as draft_amd
from ocigpu.cdi.sources.nvidia import draft as draft_nvidia
from ocigpu.cdi.sources.vfio import draft as draft_vfio

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ocigpu.cdi.draft import Draft, GenerateOptions
    from ocigpu.settings import Settings

    Source = tuple[str, Callable[[GenerateOptions, Settings], Draft]]

SOURCES: "dict[str, Source]" = {
    **dict.fromkeys(("nvml", "management", "gds", "mofed", "gdrcopy", "nvswitch", "imex"), ("nvidia", draft_nvidia)),
    "amd": ("amd", draft_amd),
    "vfio": ("vfio", draft_vfio),
}
"""By mode: the name of the source, as fingerprints have it, and its function."""


def detect_mode(settings: "Settings") -> str:  # noqa: ARG001
    """Return the mode that suits this host."""
    return "nvml"
