"""Files of the host under examination: small bounded reads below its root, with links resolved inside it."""

import os
import shlex
import shutil

from ocigpu.core.config_json import SEARCH_PATH
from ocigpu.core.errors import UsageError
from ocigpu.doctor.findings import Evidence
from ocigpu.gpus.tree import TEXT_LIMIT, Tree, read_text

LARGE_TEXT = 64 << 20
"""Bytes read of a file that may be long: a package database, a list of modules or of users."""
PROGRAM_DIRECTORIES = tuple(SEARCH_PATH.split(":"))


class RootFiles:
    """``root``: "" for this machine, else the directory that stands for "/"; ``live``: this machine.

    Raises UsageError when ``root`` is not a directory.
    """

    def __init__(self, root: str = "") -> None:
        self.root = "" if root in ("", "/") else os.path.realpath(root)
        if self.root and not os.path.isdir(self.root):
            raise UsageError(f"--root {root}: not a directory")
        self.live = not self.root
        self.tree = Tree(self.root)

    def path(self, path: str) -> str:
        """Return where a path of the host is on this machine."""
        return self.root + path

    def find(self, path: str) -> str:
        """Return the path on this machine with links resolved inside the root, "" for a missing file.

        Raises PermissionError when that cannot be determined.
        """
        found = self.tree.find(path)
        if not found:
            try:
                os.lstat(self.root + path)
            except PermissionError:
                raise
            except OSError:  # nothing there
                return ""
        return found

    def exists(self, path: str) -> bool:
        return bool(self.find(path))

    def text(self, path: str, limit: int = TEXT_LIMIT) -> str | None:
        """Return a file's text, None if it is missing; raises HostError if it exists and cannot be read.

        Read files of /proc/sys with the usual limit: the kernel allocates that much (ENOMEM).
        """
        found = self.find(path)
        return read_text(found, limit) if found else None

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a directory; none without one; raises OSError when it cannot be read."""
        found = self.find(path)
        return sorted(os.listdir(found)) if found and os.path.isdir(found) else []

    def program(self, *paths: str) -> str:
        """Return the first of these host paths that is an executable file, "" for none."""
        for path in paths:
            found = self.find(path)
            if found and os.path.isfile(found) and os.stat(found).st_mode & 0o111:
                return path
        return ""

    def command_path(self, name: str) -> str:
        """Return the path of a program by its path or name, "" for none; of this machine on its PATH, too."""
        if "/" in name:
            return self.program(name)
        found = self.program(*(f"{directory}/{name}" for directory in PROGRAM_DIRECTORIES))
        return found or (shutil.which(name) or "" if self.live else "")

    def evidence(self, path: str, found: str, wanted: str = "") -> Evidence:
        """Return evidence on a path of the host."""
        return Evidence(self.path(path), found, wanted)


def put_away(path: str) -> str:
    """Return the command after which engines, which read files by their extension, see a file no more."""
    return shlex.join(["mv", "--backup=numbered", path, f"{path}.unused"])
