"""GPUs for virtual machines."""

from ocigpu.gpus.vendors import Vendor, late

VENDOR = Vendor(
    "vfio",
    modes=("vfio",),
    subsystems=("vfio",),
    read_fingerprint=late("vfio.facts:read_vfio_fingerprint"),
    offer=late("vfio.offers:offer"),
)
