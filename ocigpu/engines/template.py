"""Templates from which k3s and RKE2 write containerd's configuration at each start: our block at the end.

A template is TOML only once it is filled in, so its text is neither parsed nor changed outside of the block
(docs.k3s.io, "Advanced options": configuring containerd).
"""

import itertools
import os
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from ocigpu.core.errors import OcigpuError
from ocigpu.engines import toml_text

NAMES = ("config.toml.tmpl", "config-v3.toml.tmpl")
"""Beside the file that is written from one of them.  Those with containerd 2 prefer the second (docs.k3s.io)."""
_PLACE = "/agent/etc/containerd"
_GENERATED = "DO NOT EDIT"
"""In the first line of what is written from the templates that k3s and RKE2 bring."""
_VERSION = re.compile(r"[ \t]*version[ \t]*=[ \t]*([0-9]{1,9})")
_BASE = re.compile(r"\{\{-?\s*template\s+[\"`]base[\"`]")
_ACTIONS = re.compile(r"^[ \t]*(?:\{\{[^{}]*\}\}[ \t]*)+$", re.MULTILINE)
_ACTION = re.compile(r"\{\{.*?\}\}", re.DOTALL)
BEGIN, END = "# begin: ocigpu engine configure\n", "# end: ocigpu engine configure\n"
BASE = '{{ template "base" . }}\n'
"""A template that is k3s's own."""


def is_generated(path: str, text: str) -> bool:
    """Whether k3s or RKE2 write containerd's file at each start: by its place, else by its first line.

    A file written from a user's template has the template's first line.
    """
    place = os.path.dirname(path).endswith(_PLACE) and path.endswith(".toml")
    return place or _GENERATED in text.partition("\n")[0]


def has_base(text: str) -> bool:
    """Whether a template includes the one of k3s, and with it an entry for runc."""
    return bool(_BASE.search(text))


def tables_version(path: str, text: str) -> int:
    """Return the version of the tables that containerd will read in the file written from a template.

    It is the version in the text, else that of k3s's own template, by its name.  Otherwise it is 1: containerd assumes
    1 for a file without a version, and ignores tables of version 2 in it (seen with 1.6.20, 1.7.24 and 2.1.9).
    """
    top = itertools.takewhile(lambda line: not toml_text.header_keys(line), text.splitlines())
    if match := next(filter(None, map(_VERSION.match, top)), None):
        return max(1, min(int(match[1]), 3))
    newer = os.path.basename(path) == NAMES[1]
    if has_base(text):
        return 3 if newer else 2
    if newer:
        raise OcigpuError(
            "OCIGPU-ENG-2",
            f"{path}: containerd 2 passes over its tables",
            "put this line at its beginning: version = 3",
        )
    return 1


def has_table(text: str, keys: tuple[str, ...]) -> bool:
    """Whether a template has a table, by one of its headers or, where it can be read as TOML, in any way."""
    if any(toml_text.header_keys(line)[: len(keys)] == keys for line in text.splitlines()):
        return True
    data: Any = _filled(text)
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data is not None


def _filled(text: str) -> dict[str, Any] | None:
    """Return the data of a template with 0 for each of its values, None where that is not TOML."""
    try:
        return tomllib.loads(_ACTION.sub("0", _ACTIONS.sub("", text)))
    except ValueError:
        return None


def put_block(path: str, text: str, tables: Mapping[tuple[str, ...], dict[str, Any]]) -> str:
    """Return the template with a block that holds these tables; raises OcigpuError OCIGPU-ENG-2."""
    text = drop_block(text)
    block = ""
    for keys, value in tables.items():
        if any(toml_text.header_keys(line) == keys for line in text.splitlines()):
            raise OcigpuError("OCIGPU-ENG-2", f"{path}: {toml_text.header(keys)} already exists")
        block = toml_text.put(block, keys, value)
    newline = "" if not text or text.endswith("\n") else "\n"
    after = f"{text}{newline}{BEGIN}{block}{END}"
    if _filled(text) is not None and _filled(after) is None:
        raise OcigpuError("OCIGPU-ENG-2", f"{path}: an entry cannot be added to its content", "write the table by hand")
    return after


def drop_block(text: str) -> str:
    """Return the template without our block."""
    start, end = text.find(BEGIN), text.find(END)
    return text if start < 0 or end < start else text[:start] + text[end + len(END) :]
