"""The dynamic loader's cache (ld.so.cache): where its table is."""

TYPE_CHECKING = False

if TYPE_CHECKING:
    pass


OLD_MAGIC = b"ld.so-1.7.0"


OLD_HEADER = 16


OLD_ENTRY = 12


NEW_MAGIC = b"glibc-ld.so.cache1.1"


HEADER = 48


def find_table(data: bytes) -> int:
    """Return where the header of the new layout starts, -1 when there is none."""
    start = 0
    if data.startswith(OLD_MAGIC) and len(data) >= OLD_HEADER:
        count = int.from_bytes(data[12:16], "little")
        start = (OLD_HEADER + count * OLD_ENTRY + 7) & ~7
    if len(data) < start + HEADER or not data.startswith(NEW_MAGIC, start):
        return -1
    return start
