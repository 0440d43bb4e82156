"""Values and settings as they are written in TOML."""

from collections.abc import Callable
from typing import Any

from ocigpu.core.settings import KEYS, Key


def toml_value(value: Any) -> str:
    """Return a value as it is written in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, tuple | list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    text = "".join({"\\": "\\\\", '"': '\\"'}.get(c, c) if c.isprintable() else f"\\U{ord(c):08x}" for c in str(value))
    return f'"{text}"'


def render_settings(lines_of: Callable[[Key, str], list[str]]) -> list[str]:
    """Return a settings file's lines: the tables, and what ``lines_of`` returns for a key and its name in its table."""
    lines: list[str] = []
    table = ""
    for key in sorted(KEYS, key=lambda key: "." in key.name):  # those of no table come first
        parent, _, name = key.name.rpartition(".")
        if its_lines := lines_of(key, name):
            if parent != table:
                table = parent
                lines += ["", f"[{table}]"]
            lines += its_lines
    return lines
