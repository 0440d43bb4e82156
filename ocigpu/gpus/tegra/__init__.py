"""Tegra systems (Jetson, Thor)."""

from ocigpu.gpus.vendors import Vendor, late

VENDOR = Vendor(
    "csv",
    modes=("csv",),
    read_fingerprint=late("tegra.facts:read_csv_fingerprint"),
    offer=late("tegra.offers:offer"),
    is_here=late("tegra.facts:needs_csv"),
)
