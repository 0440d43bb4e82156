"""Tegra systems (Jetson, Thor)."""

from ocigpu.gpus.tree import Tree, find_roots, read_text
from ocigpu.gpus.vendors import Vendor, late

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ocigpu.core.settings import Settings

RELEASE = "/etc/nv_tegra_release"
_needs_csv = late("tegra.facts:needs_csv")


def is_tegra(settings: "Settings") -> bool:
    """Return whether the host is a Tegra system: L4T's release file, or a chip family that says so."""
    roots = find_roots(settings)
    if Tree(roots.driver).find(RELEASE):
        return True
    return (read_text(f"{roots.sys}/devices/soc0/family", 64) or "").lower().startswith("tegra")


VENDOR = Vendor(
    "csv",
    modes=("csv",),
    read_fingerprint=late("tegra.facts:read_csv_fingerprint"),
    offer=late("tegra.offers:offer"),
    is_here=lambda settings: is_tegra(settings) and _needs_csv(settings),
)
