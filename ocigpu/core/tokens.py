"""Words of the vendor's variables and options: lists of devices, what stands alone in them, yes and no."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    Variables: TypeAlias = dict[str, str]

MOUNT_DIRECTORIES = ("/var/run/nvidia-container-devices", "/run/nvidia-container-devices")
MOUNT_SOURCE = f"volume mounts below {MOUNT_DIRECTORIES[0]}"
MAX_TOKENS = 4096
TRUE_WORDS, FALSE_WORDS = ("1", "t", "T", "TRUE", "true", "True"), ("0", "f", "F", "FALSE", "false", "False")
"""What the vendor's programs take for yes and no: strconv.ParseBool of Go."""


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
