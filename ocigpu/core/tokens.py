"""Words of the vendor's variables and options: lists of devices, their special values, yes and no."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    Variables: TypeAlias = dict[str, str]

MOUNT_DIRECTORIES = ("/var/run/nvidia-container-devices", "/run/nvidia-container-devices")
MOUNT_SOURCE = f"volume mounts below {MOUNT_DIRECTORIES[0]}"
MAX_TOKENS = 4096
MAX_IMEX_CHANNEL = 1048575  # device numbers have 20 bits for the minor (include/linux/kdev_t.h)
WORDS = ("all", "none", "void")
TRUE_WORDS, FALSE_WORDS = ("1", "t", "T", "TRUE", "true", "True"), ("0", "f", "F", "FALSE", "false", "False")
"""What the vendor's programs accept for yes and no: strconv.ParseBool of Go."""

HEX = frozenset("0123456789abcdefABCDEF")


def is_number(text: str) -> bool:
    """Return whether ``text`` is a decimal number of ASCII digits (leading zeros included)."""
    return text.isascii() and text.isdigit()


def select_tokens(tokens: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return (selection, devices): "void" anywhere is nothing; else the first of "all" and "none" decides."""
    if not tokens or "void" in tokens:
        return "nothing", ()
    for token in tokens:
        if token in ("all", "none"):
            return token, ()
    return "list", tokens


def pci_address(text: str) -> str:
    """Return a PCI bus id as "00000000:3b:00" (domain of 8 digits, no function), or "" if ``text`` is none.

    Domain (4 or 8 hex digits) and function (one) are optional: "3b:00", "3b:00.0", "0000:3b:00.0".
    """
    address, dot, function = text.partition(".")
    if dot and not (len(function) == 1 and function in HEX):
        return ""
    parts = address.split(":")
    if len(parts) == 2:
        parts.insert(0, "0000")
    if [len(part) for part in parts] not in ([4, 2, 2], [8, 2, 2]) or not all(map(HEX.issuperset, parts)):
        return ""
    return ":".join([parts[0].rjust(8, "0"), parts[1], parts[2]]).lower()
