"""Where the devices of a generated specification come from: one module for each source, with a function ``draft``."""

from ocigpu.cdi.sources.amd import draft as draft_amd
from ocigpu.cdi.sources.csv import INTEGRATED_NAMES
from ocigpu.cdi.sources.csv import draft as draft_csv
from ocigpu.cdi.sources.nvidia import draft as draft_nvidia
from ocigpu.cdi.sources.vfio import draft as draft_vfio
from ocigpu.cdi.sources.wsl import draft as draft_wsl
from ocigpu.gpus.tegra.facts import ask_nvml, is_tegra
from ocigpu.gpus.tree import find_roots
from ocigpu.gpus.wsl.facts import is_wsl

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ocigpu.cdi.draft import Draft, GenerateOptions
    from ocigpu.core.settings import Settings

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
    """Return the mode that suits this host's platform: "wsl", "csv" or "nvml".

    "csv" is for Tegra systems without a usable NVML or with their integrated GPU; one with discrete GPUs alone is like
    any other host.  Integrated GPUs are parts of Tegra chips, so NVML, which takes its time, is asked there only.
    """
    if is_wsl(settings):
        return "wsl"
    if not is_tegra(settings):
        return "nvml"
    answer = ask_nvml(find_roots(settings))
    if answer is None or answer.problem:
        return "csv"
    return "csv" if any(name in gpu.model for gpu in answer.gpus for name in INTEGRATED_NAMES) else "nvml"
