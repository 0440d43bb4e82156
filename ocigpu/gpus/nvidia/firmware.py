"""Firmware and health of GPUs as reported by their driver: on hosts with a driver, or in a virtual machine for checks.

In the form of :mod:`ocigpu.gpus.firmware.baseline`; the driver's names of models and parts differ from the board
controller's, so a baseline has an entry for each.
"""

from typing import Any

from ocigpu.core.errors import HostError
from ocigpu.core.facts import HostFacts
from ocigpu.gpus.firmware.baseline import FirmwareFacts, check_text
from ocigpu.gpus.nvidia.nvml_process import NvmlError, ask
from ocigpu.gpus.tree import normal_bus_id, sysfs_address

SECONDS = 60.0
_HEALTH = {
    "ecc": "uncorrectable-ecc-errors",
    "rows": "remapped-rows-uncorrectable",
    "pending": "row-remapping-pending",
    "failed": "row-remapping-failed",
    "corrupted": "inforom-corrupted",
}


def read_driver_firmware(facts: HostFacts) -> dict[str, FirmwareFacts]:
    """Return NVML's facts about each GPU, by address as sysfs writes it ("0000:1b:00.0").

    A GPU that is not a module of a baseboard has a negative slot.  Modes that survive a reset (any user of the driver
    may change them) are given as now and as after the next reset: "on/off".  Raises HostError: OCIGPU-FW-1 when NVML
    does not answer, -2 for an invalid answer.
    """
    try:
        found: Any = ask("firmware", facts, SECONDS, parse=lambda document: document)
        return {_address(one["bus_id"]): _facts(number, one) for number, one in enumerate(found)}
    except NvmlError as error:
        raise HostError("OCIGPU-FW-1", f"firmware by NVML: {error}", "See what is wrong: ocigpu doctor") from error
    except (ValueError, KeyError, TypeError) as error:
        raise HostError("OCIGPU-FW-2", f"firmware by NVML: {error}") from error


def _address(bus_id: str) -> str:
    return sysfs_address(normal_bus_id(bus_id))


def _facts(number: int, one: dict[str, Any]) -> FirmwareFacts:
    module = one["module_id"] or 0
    texts = {key: check_text(one[key] or "", empty=True) for key in ("part_number", "serial", "uuid")}
    versions = {name: check_text(one[key]) for name, key in (("VBIOS", "vbios"), ("InfoROM", "inforom")) if one[key]}
    modes = {name: one[key] for name, key in (("ECC", "ecc_mode"), ("MIG", "mig_mode")) if one[key] is not None}
    versions |= {name: "/".join("on" if each else "off" for each in mode) for name, mode in modes.items()}
    health = {name: one[key] for key, name in _HEALTH.items() if one[key] is not None}
    name = f"GPU_SXM_{module}" if module else _address(one["bus_id"])
    return FirmwareFacts(
        name, module or -1 - number, check_text(one["model"] or "unknown"), versions=versions, health=health, **texts
    )
