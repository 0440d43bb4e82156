"""Libraries of a specification whose SONAME links are left to the hook update-ldcache.  Pure but for the given reader.

NVIDIA's toolkit up to 1.17 writes such files.  They work with hook programs that make those links, as the vendor's and
ours do.  With another program, or none, a container lacks libcuda.so.1 without any message.
"""

import os

from ocigpu.cdi.hook_words import OPTIONS, CreateSymlinks, UpdateLdCache, parse_hook
from ocigpu.core.config_json import clean_path
from ocigpu.core.errors import OcigpuError
from ocigpu.gpus.libraries.elf import read_elf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Set as AbstractSet
    from typing import Any

    from ocigpu.cdi.hook_words import Command

USUAL = {"libcuda": "libcuda.so.1", "libnvidia-ml": "libnvidia-ml.so.1"}
"""SONAMEs of libraries that are known without the file (a specification may be looked at on another host)."""


def left_to_ldconfig(spec: "dict[str, Any]", read_soname: "Callable[[str], str]") -> tuple[str, ...]:
    """Return the SONAMEs that no link or mount of a specification gives, in folders of update-ldcache.

    ``read_soname``: returns the SONAME of a file of the host, "" when it has none or is not there.
    """
    edits = [spec.get("containerEdits", {}), *(device.get("containerEdits", {}) for device in spec.get("devices", ()))]
    commands = [c for edit in edits for hook in edit.get("hooks", ()) for c in _commands(hook.get("args", []))]
    folders = {
        clean_path(folder) for command in commands if isinstance(command, UpdateLdCache) for folder in command.folders
    }
    given = {
        clean_path(path) for command in commands if isinstance(command, CreateSymlinks) for _, path in command.links
    }
    mounts = {
        clean_path(m.get("containerPath", "")): m.get("hostPath", "") for edit in edits for m in edit.get("mounts", ())
    }
    given |= mounts.keys()
    sonames: dict[str, str] = {}
    for path, host_path in mounts.items():
        folder, _, name = path.rpartition("/")
        if folder in folders and name.startswith("lib") and ".so." in name:
            sonames[path] = read_soname(host_path) or USUAL.get(name.partition(".so")[0], "")
    return tuple(dict.fromkeys(os.path.basename(path) for _, path in missing_links(sonames, given)))


def missing_links(sonames: "Mapping[str, str]", given: "AbstractSet[str]") -> "list[tuple[str, str]]":
    """Return the missing links (target, path) by which libraries are found.

    ``sonames``: SONAMEs, or "", by container path; ``given``: paths that are made already.  A path appears for each
    library that needs it.
    """
    links = [
        (os.path.basename(path), f"{os.path.dirname(path)}/{soname}") for path, soname in sonames.items() if soname
    ]
    return [(name, path) for name, path in links if path not in given]


def _commands(arguments: list[str]) -> "tuple[Command, ...]":
    """Return the commands in a hook's arguments; none for any other hook."""
    start = next((at for at, word in enumerate(arguments) if word in OPTIONS), -1)
    if start < 0:
        return ()
    try:
        return parse_hook(arguments[start:]).commands
    except OcigpuError:
        return ()


def read_host_soname(path: str) -> str:
    """Return the SONAME of a file of this host, "" if it is not a library."""
    library = read_elf(path)
    return library.soname if library else ""


def describe_left(sonames: tuple[str, ...]) -> str:
    """Return a sentence about what :func:`left_to_ldconfig` found."""
    shown = ", ".join(sonames[:3]) + (f" and {len(sonames) - 3} more" if len(sonames) > 3 else "")
    return f"the links {shown} are left to the program of the hook update-ldcache"
