"""Entries added to a container's /etc/ld.so.cache, without running ldconfig.

Layout (glibc's sysdeps/generic/dl-cache.h): a header of 48 bytes, entries of 24 (flags, offsets of name and path from
the header's start, osversion, hwcap), strings, then perhaps extensions, whose offsets count from the file's start.
ldconfig -c compat, the default until glibc 2.32, puts a table of an older layout before all that; every glibc since
2.2 reads the new layout alone (the first loader that had it looks for either: sysdeps/generic/dl-cache.c of 2.2),
so this is what is written.  The image's cache is hostile: nothing in it is followed without a bound.

Our strings come last and end in a footer, which loaders and ldconfig take for strings that no entry names.  The footer
also holds the image's entries that ours replaced, so that another merge can restore the image's cache.
"""

import struct

from ocigpu.gpus.libraries.ldcache import HEADER, NEW_MAGIC, find_table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ocigpu.core.actions import Action
    from ocigpu.core.facts import Library

ENTRY = 24

MAX_CACHE = 8 << 20
MAX_ENTRIES = 200_000
MAX_NAME = 256
MAX_PATH = 4096
MAX_EQUAL = 256
"""Entries of one name that are looked through for those that ours replace, and entries replaced in all."""
MAX_SECTIONS = 64
MAX_SECTION = 4096
"""Bytes of an extension; those that ldconfig writes have under 100."""

FOOTER = b"ocigpu-ld.so.cache\0"

FLAGS = {"x86_64": {64: 0x0303, 32: 0x0003}, "aarch64": {64: 0x0A03}}
"""FLAG_ELF_LIBC6, with FLAG_X8664_LIB64 or FLAG_AARCH64_LIB64 (sysdeps/generic/ldconfig.h); loaders want just these."""
SIGNED_CHAR = {"x86_64": 0x80, "aarch64": 0}
"""What makes bytes compare as the machine's char does: names beyond ASCII sort before the others on x86."""

_HEADER = struct.Struct("<20sIIB3xI12x")
_ENTRY = struct.Struct("<iIIIQ")
_SAVED = struct.Struct("<I24s")
_SIZES = struct.Struct("<II")
_SECTION = struct.Struct("<IIII")
_EXTENSION_MAGIC = 0xEAA42174
_GENERATOR, _HWCAPS = 0, 1


def merge_ld_cache(cache: bytes, entries: "Sequence[tuple[str, str, int]]", machine: str) -> bytes | None:
    """Return the content of an image's loader cache with entries added, or None when it cannot be merged.

    ``cache``: the image's /etc/ld.so.cache, b"" when it has none.  ``entries``: (name that the loader looks for,
    absolute path, 64 or 32), in order of preference; they come before the image's of the same name, except those of
    hwcaps directories, and replace the image's of the same name and path.  ``machine``: of uname(2).  Entries of an
    earlier merge are taken out.  None: not a cache, of another byte order, with offsets out of range, over 8 MiB or
    200,000 entries, or an unknown machine.  Order is that of glibc's elf/cache.c, compare(): the loader relies on it.
    """
    if machine not in FLAGS or any(bits not in FLAGS[machine] for _, _, bits in entries):
        return None
    try:
        merged = _merge(cache, entries, FLAGS[machine], SIGNED_CHAR[machine])
    except _MalformedError:
        return None
    return merged if len(merged) <= MAX_CACHE else None


_NOTHING: tuple[int, ...] = ()


def _numbers(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 4}I", data)


def _words(numbers: "Sequence[int]") -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


class _MalformedError(Exception):
    """The cache cannot be merged."""


class _Image:
    """An image's cache, without ours: ``table`` of entries, ``data`` up to the end of the strings and a NUL more.

    Offsets, those in the table too, count from the start of the new header, which is ``data``'s.
    """

    def __init__(self, cache: bytes) -> None:
        self.order, self.generator, self.hwcaps = 2, b"", _NOTHING  # 2: little endian
        self.table, self.data, self.strings = b"", bytes(HEADER + 1), HEADER
        if cache:
            self._read(cache)
        numbers = _numbers(self.table)
        self.keys, self.values = numbers[1::6], numbers[2::6]
        offsets = self.keys + self.values + self.hwcaps
        if offsets and not self.strings <= min(offsets) <= max(offsets) < len(self.data) - 1:
            raise _MalformedError

    def _read(self, cache: bytes) -> None:
        start = find_table(cache) if len(cache) <= MAX_CACHE else -1
        if start < 0:
            raise _MalformedError
        _, count, size, self.order, extension = _HEADER.unpack_from(cache, start)
        self.strings = strings = HEADER + count * ENTRY
        end = strings + size
        if count > MAX_ENTRIES or start + end > len(cache) or (self.order and self.order & 3 != 2):
            raise _MalformedError
        if extension:
            self._read_extension(cache, extension)
        data = cache[start : start + end]
        self.table = data[HEADER:strings]
        footer = end - len(FOOTER) - _SIZES.size
        if footer >= strings and data.endswith(FOOTER):
            saved, ours = _SIZES.unpack_from(data, footer)
            if saved <= MAX_EQUAL and saved * _SAVED.size + len(FOOTER) + _SIZES.size < ours <= end - strings:
                end -= ours
                self._remove_own_entries(end, data[footer - saved * _SAVED.size : footer])
        self.data = data[:end] + b"\0"

    def _read_extension(self, cache: bytes, at: int) -> None:
        """Keep what is known; other sections may hold offsets, and a cache without them is one of an older glibc."""
        if at % 4 or at + 8 > len(cache):
            raise _MalformedError
        magic, count = _SIZES.unpack_from(cache, at)
        if magic != _EXTENSION_MAGIC or count > MAX_SECTIONS or at + 8 + count * _SECTION.size > len(cache):
            raise _MalformedError
        for tag, _, offset, size in _SECTION.iter_unpack(cache[at + 8 : at + 8 + count * _SECTION.size]):
            if offset + size > len(cache) or size > MAX_SECTION:
                raise _MalformedError
            if tag == _GENERATOR:
                self.generator = cache[offset : offset + size]
            elif tag == _HWCAPS:
                # Also behind an old table these count from the new header, as ldconfig writes them (not as the
                # loader reads them), which makes them right in a file without the old table.
                self.hwcaps = _numbers(cache[offset : offset + size]) if size % 4 == offset % 4 == 0 else _NOTHING

    def _remove_own_entries(self, end: int, saved: bytes) -> None:
        """Remove entries with a string from ``end`` on, and put back those that they replaced."""
        kept = [entry for entry in _ENTRY.iter_unpack(self.table) if entry[1] < end and entry[2] < end]
        records = [_ENTRY.pack(*entry) for entry in kept]
        for index, record in _SAVED.iter_unpack(saved):
            flags, key, value, version, hwcap = _ENTRY.unpack(record)
            if max(key, value) >= end - self.strings:
                raise _MalformedError
            records.insert(index, _ENTRY.pack(flags, key + self.strings, value + self.strings, version, hwcap))
        self.table = b"".join(records)


def _merge(cache: bytes, entries: "Sequence[tuple[str, str, int]]", flags: dict[int, int], sign: int) -> bytes:
    image = _Image(cache)
    own, strings = _own_entries(entries, flags, len(image.data), sign)
    changes: list[tuple[int, int, bytes]] = []
    replaced: set[int] = set()
    first = place = 0
    for flag, name, path, key in own:
        first = _first_not_before(image, name, first, sign)
        place = max(place, _place(image, flag, name, path, first, sign, replaced))
        changes.append((place, 0, _ENTRY.pack(flag, key, key + len(name), 0, 0)))
    if len(replaced) > MAX_EQUAL or len(image.keys) + len(own) > MAX_ENTRIES:
        raise _MalformedError
    changes += [(index, 1, b"") for index in replaced]
    changes.sort(key=_index)  # stable: ours keep their order
    saved = [_saved(image, index) for index in sorted(replaced)]
    pieces, at = [], 0
    for index, skipped, record in changes:
        pieces += [image.table[at : index * ENTRY], record]
        at = (index + skipped) * ENTRY
    pieces.append(image.table[at:])
    part = b"".join([strings, *saved])
    size = 1 + len(part) + _SIZES.size + len(FOOTER)
    return _written(image, b"".join(pieces), part + _SIZES.pack(len(saved), size) + FOOTER)


def _index(change: tuple[int, int, bytes]) -> tuple[int, int]:
    return change[:2]


def _saved(image: _Image, index: int) -> bytes:
    """Return an entry with its index, its offsets from the start of the strings: these do not move."""
    flags, key, value, version, hwcap = _ENTRY.unpack_from(image.table, index * ENTRY)
    return _SAVED.pack(index, _ENTRY.pack(flags, key - image.strings, value - image.strings, version, hwcap))


def _own_entries(
    entries: "Sequence[tuple[str, str, int]]", flags: dict[int, int], at: int, sign: int
) -> tuple[list[tuple[int, bytes, bytes, int]], bytes]:
    """Return (flags, name, path, offset of the name) in the cache's order, and the strings, which begin at ``at``."""
    own: list[tuple[int, bytes, bytes, int]] = []
    strings = b""
    for name, path, bits in dict.fromkeys(entries):
        name0, path0 = name.encode("utf-8", "surrogateescape") + b"\0", path.encode("utf-8", "surrogateescape") + b"\0"
        if name0.find(b"\0", 0, MAX_NAME) != len(name0) - 1 or path0.find(b"\0", 0, MAX_PATH) != len(path0) - 1:
            raise _MalformedError
        own.append((flags[bits], name0, path0, at + len(strings)))
        strings += name0 + path0
    own.sort(key=_roughly, reverse=True)
    ordered: list[tuple[int, bytes, bytes, int]] = []
    for entry in own:
        at = len(ordered)
        while at and _before(entry, ordered[at - 1], sign):
            at -= 1
        ordered.insert(at, entry)
    return ordered, strings


_DIGITS_LAST = bytes(byte + 0xC0 if 0x30 <= byte <= 0x39 else byte for byte in range(256))


def _roughly(entry: tuple[int, bytes, bytes, int]) -> bytes:
    return entry[1].translate(_DIGITS_LAST)


def _before(one: tuple[int, bytes, bytes, int], other: tuple[int, bytes, bytes, int], sign: int) -> bool:
    order = _compare(one[1], other[1], 0, sign)
    return order > 0 or (order == 0 and one[0] > other[0])


def _first_not_before(image: _Image, name: bytes, first: int, sign: int) -> int:
    """Return the index of the first entry, from ``first`` on, whose name is ``name`` or sorts after it."""
    last = len(image.keys)
    middle = first  # names of the driver are neighbours: often there is none of the image's between them
    while first < last:
        if _compare(name, image.data, image.keys[middle], sign) < 0:
            first = middle + 1
        else:
            last = middle
        middle = (first + last) // 2
    return first


def _place(image: _Image, flag: int, name: bytes, path: bytes, first: int, sign: int, replaced: set[int]) -> int:
    """Return the position of our entry among those of its name, from ``first`` on; record those that it replaces.

    Behind those of higher flags, and of hwcaps: the loader stops at the first entry without.
    """
    place = first
    for index in range(first, len(image.keys)):
        key, value = image.keys[index], image.values[index]
        if _compare(name, image.data, key, sign):
            break
        if index - first > MAX_EQUAL:
            raise _MalformedError
        flags, _, _, _, hwcap = _ENTRY.unpack_from(image.table, index * ENTRY)
        if place == index and (flags > flag or (flags == flag and hwcap)):
            place += 1
        if image.data.startswith(name, key) and image.data.startswith(path, value):
            replaced.add(index)
    return place


def _compare(name: bytes, data: bytes, at: int, sign: int) -> int:
    """Compare a name with the one at an offset, both ended by NUL, as _dl_cache_libcmp() does (elf/dl-cache.c)."""
    other = data[at : at + len(name)]
    if name == other:
        return 0
    last = 0
    for one, two in zip(name, other, strict=False):
        if one != two:
            if 0x30 <= one <= 0x39 or 0x30 <= two <= 0x39:
                if 0x30 <= last <= 0x39 or (0x30 <= one <= 0x39 and 0x30 <= two <= 0x39):
                    end = data.find(b"\0", at, at + MAX_NAME)
                    if end < 0:
                        raise _MalformedError
                    return _compare_numbers(name, data[at : end + 1], sign)
                return 1 if 0x30 <= one <= 0x39 else -1
            return (one ^ sign) - (two ^ sign)
        last = one
    return 0


def _compare_numbers(name: bytes, other: bytes, sign: int) -> int:
    """Compare names with numbers in the place where they differ: in C's int, which wraps around."""
    i = j = 0
    while name[i]:
        i, number = _number(name, i)
        j, other_number = _number(other, j)
        if number is None and other_number is None:
            if name[i] != other[j]:
                return (name[i] ^ sign) - (other[j] ^ sign)
            i, j = i + 1, j + 1
        elif number is None or other_number is None:
            return 1 if other_number is None else -1
        elif (number - other_number) & 0xFFFFFFFF:
            return -1 if (number - other_number) & 0x80000000 else 1
    return (0 ^ sign) - (other[j] ^ sign)


def _number(name: bytes, at: int) -> tuple[int, int | None]:
    """Return the number at an offset, None when there is none, and where it ends."""
    end = at
    while 0x30 <= name[end] <= 0x39:
        end += 1
    return end, int(name[at:end]) if end > at else None


def _written(image: _Image, table: bytes, part: bytes) -> bytes:
    """Return the file: the header, a table whose offsets are those of the image's file, the strings, the extensions."""
    strings = HEADER + len(table)
    moved = strings - image.strings
    numbers = list(_numbers(table))
    numbers[1::6] = [offset + moved for offset in numbers[1::6]]
    numbers[2::6] = [offset + moved for offset in numbers[2::6]]
    blob = image.data[image.strings :] + part
    extension = at = (strings + len(blob) + 3) & ~3
    tail = b""
    if image.generator or image.hwcaps:
        names = _words([offset + moved for offset in image.hwcaps])
        sections = [(_GENERATOR, len(names), image.generator)] if image.generator else []
        if names:
            sections.append((_HWCAPS, 0, names))
        at += _SIZES.size + len(sections) * _SECTION.size
        tail = bytes(extension - strings - len(blob)) + _SIZES.pack(_EXTENSION_MAGIC, len(sections))
        tail += b"".join(_SECTION.pack(tag, 0, at + skipped, len(text)) for tag, skipped, text in sections)
        tail += names + image.generator
    head = _HEADER.pack(NEW_MAGIC, len(table) // ENTRY, len(blob), image.order, extension if tail else 0)
    return b"".join([head, _words(numbers), blob, tail])


def cache_entries(
    actions: "Sequence[Action]", directories: "Sequence[str]", libraries: "Sequence[Library]"
) -> list[tuple[str, str, int]]:
    """Return the entries (name, path, bits) that ldconfig would make for a plan's driver libraries and their links.

    ``libraries``: those of the facts, for their SONAMEs.  Taken are the binds and links right below the directories,
    the first directory's first.  What else the image has in these directories is not known here.

    The rule is elf/ldconfig.c, search_dir(): a file is entered by its SONAME, or its own name if it has none.  A link
    is entered by its own name if that is the SONAME, or ends in .so and the SONAME begins with it; any other link
    counts as one more file of that SONAME.  The path is the directory and the name entered, not the file's.
    """
    from ocigpu.core.actions import Bind, Link  # merging alone does without

    by_host_path = {library.host_path: library for library in libraries}
    bound = {action.container_path: action.host_path for action in actions if isinstance(action, Bind)}
    links = {action.container_path: action.target for action in actions if isinstance(action, Link)}
    found: dict[str, tuple[str, str, int]] = {}
    for directory in dict.fromkeys(directories):
        for path in (*bound, *links):
            parent, _, name = path.rpartition("/")
            library = by_host_path.get(_source(path, bound, links)) if parent == directory else None
            if library is None or not (name.startswith(("lib", "ld-")) and ".so" in name):  # elf/dl-is_dso.h
                continue
            soname = library.soname or name
            if path in links and name.endswith(".so") and soname.startswith(name):
                soname = name
            found.setdefault(f"{directory}/{soname}", (soname, f"{directory}/{soname}", library.bits))
    return list(found.values())


def _source(path: str, bound: dict[str, str], links: dict[str, str]) -> str:
    """Return the host path of what is bound at a container path, links in its directory followed, or ""."""
    for _ in range(8):
        if path not in links:
            break
        path = f"{path.rpartition('/')[0]}/{links[path]}"
    return bound.get(path, "")
