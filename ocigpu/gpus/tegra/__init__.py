"""Tegra systems (Jetson, Thor)."""

from ocigpu.core.errors import HostError
from ocigpu.gpus.tree import Roots, Tree, find_roots, read_text
from ocigpu.gpus.vendors import Vendor, late

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ocigpu.core.settings import Settings

RELEASE = "/etc/nv_tegra_release"
CSV_DIRECTORY = "/etc/nvidia-container-runtime/host-files-for-container.d"
_needs_csv = late("tegra.facts:needs_csv")


def is_tegra(settings: "Settings") -> bool:
    """Return whether the host is a Tegra system: L4T's release file, or a chip family that says so."""
    roots = find_roots(settings)
    if Tree(roots.driver).find(RELEASE):
        return True
    return (read_text(f"{roots.sys}/devices/soc0/family", 64) or "").lower().startswith("tegra")


def no_driver_on_tegra(roots: Roots) -> HostError | None:
    """Return the error OCIGPU-HOST-1 in the words for Tegra, None on any other host.

    The driver of its integrated GPU comes with L4T and is not the kernel module nvidia: there is none to install.
    """
    if not Tree(roots.driver).find(RELEASE):
        return None
    text = f"this is a Tegra system, and the lists in {CSV_DIRECTORY} name none of its device nodes"
    return HostError("OCIGPU-HOST-1", text, "Install L4T's package nvidia-l4t-init, which contains the lists.")


VENDOR = Vendor(
    "csv",
    modes=("csv",),
    read_fingerprint=late("tegra.facts:read_csv_fingerprint"),
    offer=late("tegra.offers:offer"),
    is_here=lambda settings: is_tegra(settings) and _needs_csv(settings),
)
