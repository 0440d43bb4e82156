"""Where the devices of a generated specification come from: one module for each source, with a function ``draft``."""

from ocigpu.cdi.sources.amd import draft as draft_amd
from ocigpu.cdi.sources.csv import draft as draft_csv
from ocigpu.cdi.sources.nvidia import draft as draft_nvidia
from ocigpu.cdi.sources.vfio import draft as draft_vfio
from ocigpu.cdi.sources.wsl import draft as draft_wsl
from ocigpu.host.tegra import is_tegra
from ocigpu.host.wsl import is_wsl

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ocigpu.cdi.draft import Draft, GenerateOptions
    from ocigpu.settings import Settings

    Source = tuple[str, Callable[[GenerateOptions, Settings], Draft]]

SOURCES: "dict[str, Source]" = {
    **dict.fromkeys(("nvml", "management", "gds", "mofed", "gdrcopy", "nvswitch", "imex"), ("nvidia", draft_nvidia)),
    "amd": ("amd", draft_amd),
    "csv": ("csv", draft_csv),
    "vfio": ("vfio", draft_vfio),
    "wsl": ("wsl", draft_wsl),
}
"""By mode: the name of the source, as fingerprints have it, and its function."""


def detect_mode(settings: "Settings") -> str:
    """Return the mode that suits this host's platform: "wsl", "csv" (Tegra) or "nvml"."""
    if is_wsl(settings):
        return "wsl"
    return "csv" if is_tegra(settings) else "nvml"
