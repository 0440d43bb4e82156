"""Templates from which k3s and RKE2 write containerd's configuration at each start: a block of ours at the end.

A template is TOML only once it is filled in, so its text is neither parsed nor touched outside of the block
(docs.k3s.io, "Advanced options": configuring containerd).
"""

from collections.abc import Mapping
from typing import Any

from ocigpu.core.errors import OcigpuError
from ocigpu.engines import toml_text

BEGIN, END = "# begin: ocigpu engine configure\n", "# end: ocigpu engine configure\n"
BASE = '{{ template "base" . }}\n'
"""A template that is k3s's own."""


def put_block(path: str, text: str, tables: Mapping[tuple[str, ...], dict[str, Any]]) -> str:
    """Return the template with a block that holds these tables; raises OcigpuError OCIGPU-ENG-2."""
    text = drop_block(text)
    block = ""
    for keys, value in tables.items():
        if any(toml_text.header_keys(line) == keys for line in text.splitlines()):
            raise OcigpuError("OCIGPU-ENG-2", f"{path}: {toml_text.header(keys)} is there already")
        block = toml_text.put(block, keys, value)
    newline = "" if not text or text.endswith("\n") else "\n"
    return f"{text}{newline}{BEGIN}{block}{END}"


def drop_block(text: str) -> str:
    """Return the template without our block."""
    start, end = text.find(BEGIN), text.find(END)
    return text if start < 0 or end < start else text[:start] + text[end + len(END) :]
