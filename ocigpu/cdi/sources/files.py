"""Files of the host as parts of a draft, for sources that have lists of their own instead of a plan."""

from ocigpu.core.actions import Bind
from ocigpu.gpus.nvidia.plan import FILE_OPTIONS, SOCKET_OPTIONS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ocigpu.core.facts import HostFile


def bind_file(file: "HostFile") -> Bind:
    """Return the bind mount of a file of the host, with the options that a plan gives such files."""
    options = SOCKET_OPTIONS if file.kind == "socket" else FILE_OPTIONS
    return Bind(file.host_path, file.container_path, options, "", file.kind)


def library_folders(files: "Iterable[HostFile]") -> tuple[str, ...]:
    """Return the directories of the files that a loader takes for libraries: lib*.so or lib*.so.*, in their order."""
    return tuple(
        dict.fromkeys(
            directory
            for directory, _, name in (file.container_path.rpartition("/") for file in files if file.kind == "file")
            if is_library(name)
        )
    )


def is_library(name: str) -> bool:
    """Return whether a file is named like a shared library: "lib", at least a letter, ".so", a version or nothing."""
    at = name.rfind(".so")
    return name.startswith("lib") and at > 3 and name[at + 3 : at + 4] in ("", ".")
