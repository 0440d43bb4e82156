"""A service's log that keeps its lines."""

from collections.abc import Callable
from typing import Any

from ocigpu.system.service import ServiceLog


class Lines(ServiceLog):
    """``lines``: "level: message" each; ``seen`` is called with each message."""

    def __init__(self) -> None:
        super().__init__(False)
        self.lines: list[str] = []
        self.seen: Callable[[str], object] = bool

    def __call__(self, level: str, message: str, **_: Any) -> None:
        self.lines.append(f"{level}: {message}")
        self.seen(message)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)
