"""Settings as they are written in TOML."""

from typing import Any


def toml_value(value: Any) -> str:
    """Return a setting's value as it is written in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    text = "".join({"\\": "\\\\", '"': '\\"'}.get(c, c) if c.isprintable() else f"\\U{ord(c):08x}" for c in str(value))
    return f'"{text}"'
