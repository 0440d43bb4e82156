"""WSL 2, where GPUs are Windows' own."""

from ocigpu.gpus.tree import Tree, find_roots
from ocigpu.gpus.vendors import Vendor, late

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ocigpu.core.settings import Settings

LIBRARIES = "/usr/lib/wsl/lib"
DXCORE = "libdxcore.so"


def is_wsl(settings: "Settings") -> bool:
    """Return whether the host is WSL with its library for display adapters."""
    return bool(Tree(find_roots(settings).driver).find(f"{LIBRARIES}/{DXCORE}"))


VENDOR = Vendor(
    "wsl",
    modes=("wsl",),
    read_fingerprint=late("wsl.facts:read_wsl_fingerprint"),
    offer=late("wsl.offers:offer"),
    is_here=is_wsl,
)
