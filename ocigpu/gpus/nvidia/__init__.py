"""NVIDIA's GPUs, MIG devices, and what opt-in variables bring."""

from ocigpu.gpus.vendor import Vendor, late

VENDOR = Vendor(
    "nvidia",
    modes=("nvml", "management", "gds", "mofed", "gdrcopy", "nvswitch", "imex"),
    read_fingerprint=late("nvidia.fingerprint:read_nvidia"),
    offer=late("nvidia.offers:offer"),
)
