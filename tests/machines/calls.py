"""calls.py: prints which of the system calls that the product would rather use this kernel lacks, with commas."""

import ctypes
import errno
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from ocigpu.system import libc

SINCE = {
    "open_tree": (5, 2),
    "move_mount": (5, 2),
    "fsopen": (5, 2),
    "fsconfig": (5, 2),
    "fsmount": (5, 2),
    "openat2": (5, 6),
    "pidfd_getfd": (5, 6),
    "mount_setattr": (5, 12),
}
"""The first kernel with each: its "Versions" or "History" in the manual pages."""


def missing() -> list[str]:
    """Return the names of :data:`SINCE` that are unknown here: each is called with arguments that none can have."""
    number = dict(libc.NUMBERS)
    call = ctypes.CDLL(None, use_errno=True).syscall
    found = []
    for name in SINCE:
        call(number[name][libc.MACHINES.index(os.uname().machine)], -1, -1, -1, -1, -1)
        if ctypes.get_errno() == errno.ENOSYS:
            found.append(name)
    return found


if __name__ == "__main__":
    print(", ".join(missing()))
