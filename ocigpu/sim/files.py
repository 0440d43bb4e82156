"""The files of a simulated host that are the same for all: files.toml has them."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from string import Template
from typing import Any


@cache
def read_tables() -> dict[str, Any]:
    """Return the tables of files.toml, whose first lines explain them."""
    return tomllib.loads(Path(__file__).with_name("files.toml").read_text(encoding="utf-8"))


def fill_in(text: str, values: Mapping[str, object]) -> str:
    """Return the text with each $name replaced; raises KeyError for a name that ``values`` lacks."""
    return Template(text).substitute(values)


def write_files(root: Path, part: str, values: Mapping[str, object]) -> None:
    """Write the files of one part below ``root``, with the mode that each table is named by."""
    for mode, files in read_tables()[part].items():
        for path, text in files.items():
            write_file(root / fill_in(path, values), fill_in(text, values), int(mode, 8))


def write_file(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Write a file with this mode, and the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)
