"""A record of each change to a container, written before the change, so that everything can be undone.

An entry is a JSON object: "do" names an operation of :mod:`ocigpu.provision.operations`, "path" is a path inside the
container.  Entries are lines in memory that the worker shares with its parent: if the worker is killed, the parent can
have everything undone.  (A pipe would do the same, and wake the parent for every line.)
"""

import errno
import mmap

from ocigpu.core import rawjson

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias

    Entry: TypeAlias = dict[str, Any]

MEMORY = 4 << 20  # bytes of address space; pages that are not written cost nothing
_STEP = 2048  # bytes at the end of it: the step that the worker is at


class Journal:
    """The journal of one worker, in memory that processes forked later share with us; ``entries``: those we wrote."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, MEMORY + _STEP)
        self.entries: "list[Entry]" = []
        self._end = 0

    def record(self, do: str, path: str, **details: "Any") -> None:
        """Record a change that is about to be made.  Raises OSError (ENOSPC) for an excessively long plan."""
        entry = {"do": do, "path": path, **details}
        line = rawjson.dump(entry).encode()
        end = self._end + len(line)
        if end >= len(self.memory) - _STEP - 1:
            raise OSError(errno.ENOSPC, "the journal is full", path)
        self.memory[self._end : end] = line
        self.memory[end] = ord("\n")  # a line counts from here on: one byte cannot be half written
        self._end = end + 1
        self.entries.append(entry)

    def read(self) -> "list[Entry]":
        """Return the entries of another process that has ended."""
        return parse_entries(self.memory[: self.memory.find(b"\0")])

    def write_step(self, text: str) -> None:
        """Store the next step of this process for the other one."""
        data = text.encode("utf-8", "backslashreplace")[: _STEP - 1] + b"\0"
        start = len(self.memory) - _STEP
        self.memory[start : start + len(data)] = data

    def read_step(self) -> str:
        """Return the last step that the worker began, "" for none yet."""
        return self.memory[len(self.memory) - _STEP :].partition(b"\0")[0].decode("utf-8", "replace")


def parse_entries(lines: bytes) -> "list[Entry]":
    """Return the entries in these lines; an incomplete one is ignored, because its change was not made."""
    *whole, _ = lines.split(b"\n")
    return [rawjson.parse(line.decode()) for line in whole]
