"""A container's request by AMD_VISIBLE_DEVICES.  Pure.

As AMD's container toolkit has it (ROCm/container-toolkit, internal/gpu-tracker: parseGPUsList): a list of indices,
ranges of indices and unique ids, or "all"; here also PCI addresses.  "none", "void" and an empty value request nothing.
"""

from ocigpu.core.config_json import read_env
from ocigpu.core.errors import RequestError, printable, quoted
from ocigpu.core.gate import Asker, permits
from ocigpu.core.settings import Settings
from ocigpu.core.tokens import MAX_TOKENS, is_number
from ocigpu.gpus.request import Request, is_privileged
from ocigpu.gpus.tree import normal_bus_id

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

VENDOR = "amd"
VARIABLE = "AMD_VISIBLE_DEVICES"
KIND = "amd.com/gpu"
NONE = "none"
MAX_INDEX = 4  # digits
MAX_ADDRESS = 16  # of a PCI function whose domain has eight digits
MAX_VALUE = 64 * 1024
_HEX = frozenset("0123456789abcdef")
NOTHING = Request(vendor=VENDOR)


def parse_request(config: "dict[str, Any]", settings: Settings, _bundle: str = "") -> Request:
    """Return the request of the container of this config.json; :mod:`ocigpu.core.gate` decides whether it may.

    With mode cdi the devices are named as ``ocigpu cdi generate --vendor amd`` names them.  Raises RequestError
    OCIGPU-REQ-1 for a list that cannot be understood.
    """
    value = _read_variable(config)
    devices = _parse_list(value)
    if not devices:
        return NOTHING
    asker = Asker(settings, is_privileged(config))
    source = f"{VARIABLE}={printable(value, 120)}"
    notes: list[str] = []
    if settings.mode == "cdi":
        names = [f"{KIND}={device}" for device in devices]
        names = [name for name in names if permits("cdi-gpu", "variable", asker, VARIABLE, notes, name)]
        if not names:
            return NOTHING._replace(notes=tuple(notes))
        return Request("cdi", vendor=VENDOR, source=source, cdi_devices=tuple(names), notes=tuple(notes))
    if not permits("gpu", "variable", asker, VARIABLE, notes):
        return NOTHING._replace(notes=tuple(notes))
    if devices == ("all",):
        return Request("all", source=source, vendor=VENDOR)
    return Request("list", devices, source, vendor=VENDOR)


def request_devices(_config: "dict[str, Any]", devices: "Sequence[str]", _settings: Settings) -> Request:
    """Return a request for these devices, which the caller has chosen, not the container."""
    source = f"{VARIABLE}={printable(','.join(devices) or 'none', 120)}"
    return Request("list" if devices else "none", tuple(devices), source, vendor=VENDOR)


def _read_variable(config: "dict[str, Any]") -> str:
    """Return the variable's value; of one that occurs twice the last counts."""
    texts = reversed(read_env(config))
    return next((text[len(VARIABLE) + 1 :] for text in texts if text.startswith(f"{VARIABLE}=")), "")


def _parse_list(value: str) -> tuple[str, ...]:
    """Return the devices: ("all",), or indices and unique ids ("0x..."), each once; () for nothing."""
    if len(value) > MAX_VALUE:
        raise RequestError("OCIGPU-REQ-1", f"{VARIABLE}: longer than {MAX_VALUE} characters: {quoted(value, 40)}")
    tokens = [token.strip() for token in value.split(",")]
    if "void" in tokens:
        return ()
    found: dict[str, None] = {}
    for token in filter(None, tokens):
        if token.lower() == "all":
            return ("all",)
        if token != NONE:
            found.update(dict.fromkeys(_parse_token(token)))
        if len(found) > MAX_TOKENS:
            raise RequestError("OCIGPU-REQ-1", f"{VARIABLE}: more than {MAX_TOKENS} devices")
    return tuple(found)


def _parse_token(token: str) -> list[str]:
    first, dash, last = token.partition("-")
    plain = token.lower()
    if _is_index(token):
        return [str(int(token))]
    if dash and _is_index(first) and _is_index(last) and int(first) <= int(last):
        return [str(index) for index in range(int(first), int(last) + 1)]
    digits, colon, partition = plain.removeprefix("0x").partition(":")
    # without 0x a unique id has more digits than an index could
    known = plain.startswith("0x") or len(digits) > 8
    if known and 0 < len(digits) <= 16 and _HEX.issuperset(digits) and (_is_index(partition) or not colon):
        return [f"0x{digits.lstrip('0') or '0'}{colon}{partition}"]
    # GPUs without a unique id are called by their PCI address
    address, _, partition = plain.rpartition(":") if plain.count(":") == 3 else (plain, "", "0")
    if "." in address and normal_bus_id(address) and len(address) <= MAX_ADDRESS and _is_index(partition):
        return [plain]
    raise RequestError(
        "OCIGPU-REQ-1",
        f"{VARIABLE}: {quoted(token)} is not an index, a range of indices, a unique id or a PCI address",
    )


def _is_index(text: str) -> bool:
    return is_number(text) and len(text) <= MAX_INDEX
