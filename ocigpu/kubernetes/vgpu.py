"""Whether a GPU is one that a hypervisor made up, from its PCI configuration space.

NVIDIA's vGPUs have a vendor-specific capability that begins with the letters VF and holds records: type, length, data;
the record of type 0 is the host driver's version and branch, ten bytes each.
"""

from typing import NamedTuple

SPACE = 256
STATUS, HAS_CAPABILITIES, FIRST_CAPABILITY = 0x06, 0x10, 0x34
VENDOR_SPECIFIC = 0x09
"""PCI Local Bus Specification 3.0, sections 6.2.3, 6.7 and appendix H."""
_SIGNATURE, _HOST_DRIVER, _TEXT = b"VF", 0, 10


class Vgpu(NamedTuple):
    """What the guest can know of the host's driver."""

    host_driver_version: str = ""
    host_driver_branch: str = ""


def parse_vgpu(config: bytes) -> Vgpu | None:
    """Return what a function's configuration space (sysfs ``config``) says of its vGPU; None when it is none."""
    if len(config) < SPACE or not config[STATUS] & HAS_CAPABILITIES:
        return None
    position, seen = config[FIRST_CAPABILITY], set[int]()
    while position and position not in seen and position + 2 < SPACE:
        seen.add(position)
        if config[position] == VENDOR_SPECIFIC:
            capability = config[position : min(position + config[position + 2], SPACE)]
            if capability[3:5] == _SIGNATURE:
                return _parse_records(capability[5:])
        position = config[position + 1]
    return None


def _parse_records(data: bytes) -> Vgpu:
    while len(data) >= 2 and data[1] >= 2:
        if data[0] == _HOST_DRIVER and len(data) >= 2 + 2 * _TEXT:
            return Vgpu(_text(data[2 : 2 + _TEXT]), _text(data[2 + _TEXT : 2 + 2 * _TEXT]))
        data = data[data[1] :]
    return Vgpu()


def _text(data: bytes) -> str:
    text = data.split(b"\0")[0].decode("ascii", "replace")
    return "".join(c for c in text if c.isascii() and (c.isalnum() or c in "-_."))
