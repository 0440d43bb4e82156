"""The cached form of a specification: one device among thousands is found without reading the rest.

The text of a checked specification is one line of JSON with everything but the devices, then a line for each device:
its name, a tab, JSON.  In the cache a head precedes it that identifies the source file and its state.
"""

import os
import time
from binascii import crc32

from ocigpu import __version__
from ocigpu.core import rawjson
from ocigpu.core.record import NamedTuple
from ocigpu.system.files import state_of
from ocigpu.system.store import SEAL_BYTES, is_whole, read_cached, write_kept

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container
    from typing import Any

    Parsed = tuple["LoadedSpec | None", str]

FORMAT = f"ocigpu {__version__} cdi 3 ".encode()
"""The number is another one with every change of the text's form, or of what ocigpu.cdi.check accepts."""
PREFIX = "cdi-"
SPARE_FILES = 64
"""Entries of other files that are kept: settings may name other directories, and drivers write files that go soon."""
SETTLED_NS = 2_000_000_000
"""A file that was changed more recently may change again without another time stamp (the clock of files is coarse)."""


class LoadedSpec(NamedTuple):
    """A checked specification: ``priority`` is the place of its directory in the list, a higher one wins.

    ``edits``: its spec-level containerEdits.  ``text``: has from ``begin`` to ``end`` its devices, see above, with a
    newline before and after each; they are not copied, because thousands of them are megabytes.
    """

    path: str
    priority: int
    kind: str
    version: str
    annotations: "dict[str, str]"
    edits: "dict[str, Any]"
    text: bytes
    begin: int
    end: int

    def find(self, name: str) -> "dict[str, Any] | None":
        """Return the device of this name: its containerEdits, and annotations if it has any."""
        key = b"\n" + name.encode() + b"\t"
        at = self.text.find(key, self.begin, self.end)
        if at < 0:
            return None
        at += len(key)
        device: dict[str, Any] = rawjson.parse(self.text[at : self.text.index(b"\n", at)].decode())
        return device

    def lines(self) -> list[list[bytes]]:
        """Return name and JSON of every device, in the order of the file."""
        return [line.split(b"\t", 1) for line in self.text[self.begin : self.end].split(b"\n") if line]

    def checksum(self) -> int:
        """Return a checksum of the devices."""
        return crc32(memoryview(self.text)[self.begin : self.end])

    def device_names(self) -> tuple[str, ...]:
        """Return the names of all devices, in the order of the file."""
        return tuple(name.decode() for name, _ in self.lines())


def render_text(spec: "dict[str, Any]") -> bytes:
    """Return the text of a checked specification; names of devices and JSON in ASCII have neither tab nor newline."""
    header = {name: value for name, value in spec.items() if name != "devices"}
    lines = [rawjson.dump(header)]
    for device in spec["devices"]:
        rest = {name: value for name, value in device.items() if name != "name"}
        lines.append(f"{device['name']}\t{rawjson.dump(rest)}")
    return ("\n".join(lines) + "\n").encode()


def render_refusal(message: str) -> bytes:
    """Return the text of a file that was read but breaks a rule."""
    return (rawjson.dump({"refused": message}) + "\n").encode()


def parse_text(text: bytes, path: str, priority: int, begin: int = 0, end: int | None = None) -> "Parsed":
    """Return the specification of a text, or None and why its file was refused.

    ``begin``, ``end``: where in ``text`` it stands.  Raises ValueError, TypeError or LookupError for a text that is
    not ours.
    """
    devices = text.index(b"\n", begin)
    header = rawjson.parse(text[begin:devices].decode())
    if "refused" in header:
        return None, header["refused"]
    version, kind = header["cdiVersion"], header["kind"]
    annotations, edits = header.get("annotations", {}), header.get("containerEdits", {})
    end = len(text) if end is None else end
    return LoadedSpec(path, priority, kind, version, annotations, edits, text, devices, end), ""


def cache_name(path: str) -> str:
    """Return the name in the cache for a file; the head tells two files of one name apart."""
    data = os.fsencode(path)
    return f"{PREFIX}{crc32(data):08x}{crc32(data[::-1]):08x}"


def _head(path: str, status: os.stat_result) -> bytes:
    return FORMAT + rawjson.dump([path, *state_of(status)]).encode()


def read_cached_spec(directory: int, path: str, status: os.stat_result, priority: int) -> "Parsed | None":
    """Return what was made from the file in this state, or None when it is missing, damaged or not of this version."""
    content = read_cached(directory, cache_name(path)) if directory >= 0 else b""
    head = _head(path, status) + b"\n"
    if not content.startswith(head) or not is_whole(content):
        return None
    try:
        return parse_text(content, path, priority, len(head), len(content) - SEAL_BYTES)
    except (ValueError, TypeError, LookupError):  # not what this version writes
        return None


def write_cached_text(directory: int, path: str, status: os.stat_result, text: bytes, wanted: "Container[str]") -> None:
    """Keep the text of the file in this state, unless the file was changed a moment ago.

    ``wanted``: names in the cache that are kept when it is pruned.
    """
    if directory >= 0 and time.time_ns() - status.st_ctime_ns >= SETTLED_NS:
        write_kept(directory, cache_name(path), (_head(path, status), text), PREFIX, SPARE_FILES, wanted)
