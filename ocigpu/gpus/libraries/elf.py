"""Reads ELF files within bounds: class, machine and DT_SONAME, and single sections.

Layout: elf(5) and the System V ABI.  Anything that is not a well-formed little-endian shared object gives None.
"""

import os
import struct

from ocigpu.core.record import NamedTuple

EM_386, EM_ARM, EM_X86_64, EM_AARCH64 = 3, 40, 62, 183
ET_DYN = 3
PT_LOAD, PT_DYNAMIC = 1, 2
DT_NULL, DT_STRTAB, DT_SONAME = 0, 5, 14

HEAD_SIZE = 4096
"""Header and program headers are read at once: linkers put them together."""
MAX_PROGRAM_HEADERS = 128
MAX_DYNAMIC = 1 << 16
MAX_SONAME = 255
MAX_SECTIONS = 4096
MAX_SECTION_NAMES = 1 << 18


class Elf(NamedTuple):
    """A shared object: ``bits`` 64 or 32, ``machine`` an EM_ number, ``soname`` "" when it has none."""

    bits: int
    machine: int
    soname: str


class _Layout(NamedTuple):
    header: struct.Struct
    program: struct.Struct
    dynamic: struct.Struct
    bits: int


_LAYOUTS = {
    # e_type, e_machine, skip version and entry, e_phoff, skip shoff, flags and ehsize, e_phentsize, e_phnum
    1: _Layout(struct.Struct("<16xHH8xI10xHH"), struct.Struct("<8I"), struct.Struct("<iI"), 32),
    2: _Layout(struct.Struct("<16xHH12xQ14xHH"), struct.Struct("<2I6Q"), struct.Struct("<qQ"), 64),
}


class _SectionLayout(NamedTuple):
    header: struct.Struct
    entry: struct.Struct


_SECTIONS = {
    # skip to e_shoff, skip to e_shentsize, e_shnum, e_shstrndx; sh_name, skip to sh_offset, sh_size, skip the rest
    1: _SectionLayout(struct.Struct("<32xI10xHHH"), struct.Struct("<I12xII16x")),
    2: _SectionLayout(struct.Struct("<40xQ10xHHH"), struct.Struct("<I20xQQ24x")),
}


def read_elf(path: str) -> Elf | None:
    """Return class, machine and SONAME of a file, None if it is not a shared object or cannot be read."""
    try:
        return read_elf_strictly(path)
    except OSError:
        return None


def read_elf_strictly(path: str) -> Elf | None:
    """Return the same for a file that must be readable; raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        return _read(fd)
    finally:
        os.close(fd)


def read_open_elf(fd: int) -> Elf | None:
    """Return :func:`read_elf` of an open file, which stays open."""
    try:
        return _read(fd)
    except OSError:
        return None


def _read(fd: int) -> Elf | None:
    head = os.pread(fd, HEAD_SIZE, 0)
    if len(head) < 52 or head[:4] != b"\x7fELF" or head[5] != 1:
        return None
    layout = _LAYOUTS.get(head[4])
    if layout is None or len(head) < layout.header.size:
        return None
    kind, machine, offset, entry_size, count = layout.header.unpack_from(head)
    if kind != ET_DYN or entry_size != layout.program.size or count > MAX_PROGRAM_HEADERS:
        return None
    table = _part(fd, head, offset, entry_size * count)
    if table is None:
        return None
    loads: list[tuple[int, int, int]] = []
    dynamic = (0, 0)
    for fields in layout.program.iter_unpack(table):
        if layout.bits == 64:
            header_type, _, file_offset, address, _, file_size = fields[:6]
        else:
            header_type, file_offset, address, _, file_size = fields[:5]
        if header_type == PT_LOAD:
            loads.append((address, file_offset, file_size))
        elif header_type == PT_DYNAMIC:
            dynamic = (file_offset, file_size)
    soname = _soname(fd, head, layout.dynamic, dynamic, loads)
    return None if soname is None else Elf(layout.bits, machine, soname)


def _soname(
    fd: int, head: bytes, entry: struct.Struct, dynamic: tuple[int, int], loads: list[tuple[int, int, int]]
) -> str | None:
    """Return DT_SONAME, "" when the object has none, None when the dynamic section is malformed."""
    offset, size = dynamic
    if not size:
        return ""
    table = _part(fd, head, offset, min(size, MAX_DYNAMIC) // entry.size * entry.size)
    if table is None:
        return None
    name = strings = -1
    for tag, value in entry.iter_unpack(table):
        if tag == DT_NULL:
            break
        if tag == DT_SONAME:
            name = value
        elif tag == DT_STRTAB:
            strings = value
    if name < 0:
        return ""
    for address, file_offset, file_size in loads:
        if address <= strings < address + file_size:
            start = strings - address + file_offset + name
            return _string(fd, head, start)
    return None


def _string(fd: int, head: bytes, offset: int) -> str | None:
    data = head[offset : offset + MAX_SONAME + 1]
    if b"\0" not in data:
        if offset >= 1 << 62:
            return None
        data = os.pread(fd, MAX_SONAME + 1, offset)
    text, end, _ = data.partition(b"\0")
    if not end or b"/" in text:
        return None
    try:
        return text.decode("ascii")
    except UnicodeDecodeError:
        return None


def _part(fd: int, head: bytes, offset: int, size: int) -> bytes | None:
    """Return exactly ``size`` bytes at ``offset``, from what was read already where it can be."""
    if offset + size <= len(head):
        return head[offset : offset + size]
    if offset >= 1 << 62:  # beyond what pread takes as an offset
        return None
    data = os.pread(fd, size, offset)
    return data if len(data) == size else None


def read_section(fd: int, name: str, limit: int) -> bytes | None:
    """Return the content of the first section of this name, of at most ``limit`` bytes.

    None when there is none, it is larger, or the file is no little-endian ELF file with a section table as in elf(5).
    Raises OSError when the file cannot be read.
    """
    head = os.pread(fd, 64, 0)
    layout = _SECTIONS.get(head[4]) if len(head) >= 52 and head[:4] == b"\x7fELF" and head[5] == 1 else None
    if layout is None or len(head) < layout.header.size:
        return None
    offset, entry_size, count, names_index = layout.header.unpack_from(head)
    if entry_size != layout.entry.size or not names_index < count <= MAX_SECTIONS:
        return None
    table = _part(fd, b"", offset, entry_size * count)
    if table is None:
        return None
    sections = list(layout.entry.iter_unpack(table))
    _, start, size = sections[names_index]
    names = _part(fd, b"", start, size) if size <= MAX_SECTION_NAMES else None
    wanted = name.encode() + b"\0"
    for name_offset, start, size in sections if names else ():
        if names and names[name_offset : name_offset + len(wanted)] == wanted:
            return _part(fd, b"", start, size) if size <= limit else None
    return None
