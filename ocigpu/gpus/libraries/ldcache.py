"""The dynamic loader's cache (ld.so.cache), searched for the driver's libraries and nothing else.

Layout: see :mod:`ocigpu.gpus.libraries.loader_cache`.  A cache is trusted to name files, not to be well formed.
"""

import struct

OLD_MAGIC, OLD_HEADER, OLD_ENTRY = b"ld.so-1.7.0", 16, 12
NEW_MAGIC, HEADER = b"glibc-ld.so.cache1.1", 48
MAX_CACHE = 1 << 24
"""Maximum of bytes read from a cache; one of 2,000 entries has about 150 KiB."""
MAX_STRING = 4096
MAX_FOUND = 4096
"""Entries for the driver's libraries; a driver has some sixty, in two sizes."""

FLAG_ELF = 0x01
FLAG_ARCHITECTURE = 0xFF00

_ENTRY = struct.Struct("<iIIIQ")
_COUNT = struct.Struct("<I")


def find_table(data: bytes) -> int:
    """Return where the header of the new layout starts, -1 when there is none."""
    start = 0
    if data.startswith(OLD_MAGIC) and len(data) >= OLD_HEADER:
        count = int.from_bytes(data[12:16], "little")
        start = (OLD_HEADER + count * OLD_ENTRY + 7) & ~7
    if len(data) < start + HEADER or not data.startswith(NEW_MAGIC, start):
        return -1
    return start


def parse_ldcache(
    data: bytes, prefixes: tuple[bytes, ...], flags: tuple[int, ...]
) -> tuple[list[tuple[str, str]], str]:
    """Return (SONAME, path) of the entries whose SONAME starts with a prefix, and a note ("" when all is well).

    ``flags`` are the architecture bits to accept (0x0300 for x86-64).  Order is the cache's.  A malformed cache gives
    an empty list and says why; a malformed entry is passed over.
    """
    start = find_table(data)
    if start < 0:
        return [], "not a glibc loader cache" if data else "empty"
    (count,) = _COUNT.unpack_from(data, start + len(NEW_MAGIC))
    end = start + HEADER + count * _ENTRY.size
    if end > len(data):
        return [], f"claims {count} entries in {len(data)} bytes"
    found: list[tuple[str, str]] = []
    starts_with = data.startswith
    for flag, key, value, _, _ in _ENTRY.iter_unpack(data[start + HEADER : end]):
        if starts_with(prefixes, start + key) and flag & FLAG_ELF and flag & FLAG_ARCHITECTURE in flags:
            if len(found) >= MAX_FOUND:
                return [], f"more than {MAX_FOUND} libraries of the driver"
            name, path = _string(data, start + key), _string(data, start + value)
            if name and path.startswith("/"):
                found.append((name, path))
    return found, ""


def _string(data: bytes, offset: int) -> str:
    """Return the NUL-terminated string at an offset, "" when it does not end or is not text."""
    end = data.find(b"\0", offset, offset + MAX_STRING)
    if end < 0:
        return ""
    try:
        return data[offset:end].decode("utf-8")
    except UnicodeDecodeError:
        return ""
