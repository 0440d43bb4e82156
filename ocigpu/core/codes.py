"""What each error code means, from codes.toml; loaded when an error is reported.

``ocigpu explain CODE`` and the codes' pages on the documentation's site are made of the same file.
"""

import os

from ocigpu.core.record import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PATH = os.path.join(os.path.dirname(__file__), "codes.toml")


class Code(NamedTuple):
    """What one error code means: ``cause`` and ``fix`` are one or two plain sentences each."""

    cause: str
    fix: str


AREAS: dict[str, str]
"""Titles of the areas, by the second part of a code."""
CODES: dict[str, Code]

with open(PATH, "rb") as _file:
    _TEXT = _file.read()


def __getattr__(name: str) -> "Any":
    """Make the tables when one is first used: the hook reads the file early, and usually does not need it.

    A TOML parser would cost a start too much.
    """
    if name not in ("AREAS", "CODES"):
        raise AttributeError(name)
    head, *parts = _TEXT.decode().split("\n[OCIGPU-")
    titles = [line.partition(' = "') for line in head.partition("[areas]\n")[2].splitlines() if line]
    codes = {}
    for part in parts:
        number, cause, fix, _ = part.split("\n", 3)
        codes[f"OCIGPU-{number[:-1]}"] = Code(cause[len('cause = "') : -1], fix[len('fix = "') : -1])
    globals().update(AREAS={area: title[:-1] for area, _, title in titles}, CODES=codes)
    return globals()[name]
