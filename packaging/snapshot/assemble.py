"""``python assemble.py PROGRAM MEMORY SNAPSHOT``: put the memory that PROGRAM has written into a copy of its file.

PROGRAM is what build.sh links: 64-bit ELF (elf(5)) whose writable segments are, in this order, the C library's data,
Python's data and Python's heap.  The last two are given the contents of MEMORY; the first stays as it is in the file.
Symbols and sections are left out.
"""

import os
import struct
import sys

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
PT_LOAD, PF_W, PAGE = 1, 2, 1 << 16
SIZES = struct.Struct("<QQQ")


def assemble(program: bytes, memory: bytes) -> bytes:
    """Return the file of the snapshot; raises ValueError if the two do not fit together."""
    header = list(HEADER.unpack_from(program))
    begin, size, count = header[5], header[9], header[10]
    table = [list(PROGRAM_HEADER.unpack_from(program, begin + i * size)) for i in range(count)]
    _, data, heap = (row for row in table if row[0] == PT_LOAD and row[1] & PF_W)
    *sizes, room = SIZES.unpack_from(memory)
    if data[6] != sizes[0] or heap[6] < room or len(memory) != SIZES.size + sum(sizes):
        raise ValueError(f"the memory of {sizes} bytes is not of this program: {data[6]}, {heap[6]}")
    end = max(row[2] + row[5] for row in table if row[0] == PT_LOAD and row not in (data, heap))
    parts = [program[:end]]
    at, taken = end, SIZES.size
    for row, length in zip((data, heap), sizes, strict=True):
        gap = -at % PAGE
        row[2], row[5], row[6] = at + gap, length, room if row is heap else length
        parts += [bytes(gap), memory[taken : taken + length]]
        at, taken = at + gap + length, taken + length
    header[6] = header[11] = header[12] = header[13] = 0  # no sections
    whole = bytearray(b"".join(parts))
    HEADER.pack_into(whole, 0, *header)
    for i, row in enumerate(table):
        PROGRAM_HEADER.pack_into(whole, begin + i * size, *row)
    return bytes(whole)


def main(program: str, memory: str, snapshot: str) -> None:
    """Write the snapshot, executable."""
    with open(program, "rb") as first, open(memory, "rb") as second:
        whole = assemble(first.read(), second.read())
    with open(snapshot, "wb") as file:
        file.write(whole)
        os.fchmod(file.fileno(), 0o755)


if __name__ == "__main__":
    main(*sys.argv[1:])
