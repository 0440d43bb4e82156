"""WSL 2, where GPUs are Windows' own."""

from ocigpu.gpus.vendors import Vendor, late

VENDOR = Vendor(
    "wsl",
    modes=("wsl",),
    read_fingerprint=late("wsl.facts:read_wsl_fingerprint"),
    offer=late("wsl.offers:offer"),
    is_here=late("wsl.facts:is_wsl"),
)
