"""AMD's GPUs and their partitions."""

from ocigpu.gpus.vendor import Vendor, late

VENDOR = Vendor(
    "amd",
    modes=("amd",),
    read_fingerprint=late("amd.facts:read_amd_fingerprint"),
    offer=late("amd.offers:offer"),
    kinds=("amd", "amd.com"),
)
