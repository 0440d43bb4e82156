"""WSL 2, where GPUs are Windows' own."""

import os

from ocigpu.core.errors import HostError
from ocigpu.gpus.tree import Roots, Tree, find_roots, read_text
from ocigpu.gpus.vendors import Vendor, late

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ocigpu.core.settings import Settings

LIBRARIES = "/usr/lib/wsl/lib"
STORES = "/usr/lib/wsl/drivers"
DXCORE = "libdxcore.so"
SPECIFICATION = "/etc/cdi/nvidia.yaml"
GENERATE = f"ocigpu cdi generate --mode wsl --output {SPECIFICATION}"
WAYS = f'{GENERATE}; then --device nvidia.com/gpu=all, or mode = "cdi" in /etc/ocigpu/config.toml'
"""What works there: specifications, by an engine's CDI devices or by the runtime in mode cdi."""
WINDOWS = "In Windows install NVIDIA's driver, then: wsl --update; wsl --shutdown. Never install a driver inside WSL."


def is_wsl(settings: "Settings") -> bool:
    """Return whether the host is WSL with its library for display adapters."""
    return bool(Tree(find_roots(settings).driver).find(f"{LIBRARIES}/{DXCORE}"))


def looks_like_wsl(roots: Roots) -> bool:
    """Return whether a host is WSL, with GPUs or without: by its library, its node, or the name of its kernel.

    Microsoft's kernels are called VERSION-microsoft-standard-WSL2 (github.com/microsoft/WSL2-Linux-Kernel).
    """
    if Tree(roots.driver).find(f"{LIBRARIES}/{DXCORE}") or os.path.exists(f"{roots.dev}/dev/dxg"):
        return True
    return "microsoft" in (read_text(f"{roots.proc}/sys/kernel/osrelease", 256) or "").lower()


def no_driver_on_wsl(roots: Roots) -> HostError | None:
    """Return the error OCIGPU-HOST-1 in the words for WSL, None on any other host.

    There is no driver of Linux to load: installing one there takes the GPU away (NVIDIA, CUDA on WSL User Guide).
    """
    if not looks_like_wsl(roots):
        return None
    if Tree(roots.driver).find(f"{LIBRARIES}/{DXCORE}") and os.path.exists(f"{roots.dev}/dev/dxg"):
        text = "this is WSL: its GPUs are Windows' (/dev/dxg), which only CDI specifications can provide"
        return HostError("OCIGPU-HOST-1", text, WAYS)
    text = f"this is WSL, without a GPU of Windows: there is no /dev/dxg or no {LIBRARIES}/{DXCORE}"
    return HostError("OCIGPU-HOST-1", text, WINDOWS)


VENDOR = Vendor(
    "wsl",
    modes=("wsl",),
    read_fingerprint=late("wsl.facts:read_wsl_fingerprint"),
    offer=late("wsl.offers:offer"),
    is_here=is_wsl,
)
