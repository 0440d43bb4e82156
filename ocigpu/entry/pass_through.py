"""What lets the stub of ocigpu-runtime pass a command on without starting Python.

Files of the cache directory are read by the stub: one for each settings file and PATH, named by the lengths of both and
the settings file's name: engines with settings of their own, such as hook.toml and spec.toml, each keep theirs.
Each tells the low-level runtime, and the words of which every request for a device contains one, on conditions: just
this settings file and PATH, and nothing changed that the answer came from::

    same 'SETTINGS' 'PATH' &&
    is 'FILE' mark-TIME &&    the file has the time of this file beside the answer, which has it in its name, too
    is 'FILE' none &&         there is none
    runtime='FILE' words='WORD
    WORD'

To a shell (packaging/ocigpu-runtime.sh) that is a command; the compiled stub (packaging/ocigpu-runtime.c) compares it,
byte for byte.
"""

import os
import time

from ocigpu.core.config_json import DECLARED, SEARCH_PATH
from ocigpu.core.settings import DEFAULT_PATH
from ocigpu.core.tokens import MOUNT_DIRECTORIES
from ocigpu.core.vendors import VENDORS
from ocigpu.system.store import open_cache, prune_cache, read_cached, write_cached

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ocigpu.core.settings import Settings

PREFIX = "next-"
MARK = "mark-"
"""Prefix of the names of empty files whose time is the number that follows: a shell can only compare files' times."""
SPARE = 16
"""Files of other settings and PATHs that may stay, and for each as many marks as it has directories, more or less."""
ESCAPES = (
    *(f"\\u00{code}" for code in ("2d", "2D", "2e", "2E", *range(30, 40))),
    *(f"\\u00{code}" for code in range(4, 8)),
)
"""JSON has letters, digits and "_-." as they are or so, and in no other way (RFC 8259 section 7).

Not every escape: Go's encoder writes "<", ">" and "&" as such, which commands of containers often contain.
"""
ANY_CONFIG = "{"
_SETTLED_NS = 2_000_000_000
"""Some shells compare times in whole seconds: what changed so shortly before could change again unseen."""


def remember(runtime: str, settings: "Settings", begin_ns: int) -> None:
    """Store what the stub needs at the next start; does nothing without a trusted cache directory.

    ``begin_ns``: a time before the settings were read.  Nothing either while something that the answer depends on is
    so new that another change could go unseen, nor for settings of a whole second: such a time was given to the file
    (by a package, an archive), and perhaps to the one that will replace it.  Never fails.
    """
    try:
        _remember(runtime, settings, begin_ns)
    except (OSError, ValueError):  # without the file, the next start uses Python
        return


def _remember(runtime: str, settings: "Settings", begin_ns: int) -> None:
    named = os.environ.get("OCIGPU_CONFIG", "")
    search = os.environ.get("PATH", "")
    path = named or DEFAULT_PATH
    candidates = [*(name for name in (*settings.runtime_runtimes, runtime) if "/" in name), path]
    if not all(name.startswith("/") for name in candidates):
        return  # another in another directory
    directories = [name for name in f"{search}:{SEARCH_PATH}".split(":") if name.startswith("/")]
    watched = [
        *candidates,
        *map(os.path.dirname, (*candidates, os.path.realpath(path), os.path.dirname(__file__))),
        *directories,
    ]
    watched = list(dict.fromkeys(watched))
    if any(c in name for name in (*watched, search) for c in "'\n\0"):
        return
    # files, and directories in which one could have been added or replaced
    times = {name: _times(name) for name in watched}
    safe = min(begin_ns, time.time_ns()) - _SETTLED_NS
    for changed, touched in filter(None, times.values()):
        if changed >= safe or touched >= begin_ns:
            return
    if (found := times[path]) and found[0] % 1_000_000_000 == 0:
        return
    if bool(settings.path) != bool(found):
        return
    conditions = [
        f"same '{named}' '{search}' &&",
        *(f"is '{name}' {f'{MARK}{found[0]}' if found else 'none'} &&" for name, found in times.items()),
    ]
    words = "\n".join(find_words(settings))
    content = os.fsencode("\n".join([*conditions, f"runtime='{runtime}' words='{words}'", ""]))
    name = f"{PREFIX}{len(os.fsencode(named))}-{len(os.fsencode(search))}-{os.path.basename(named)}"
    directory = open_cache(create=True)
    if directory < 0:
        return
    try:
        marks = {f"{MARK}{found[0]}": found[0] for found in times.values() if found}
        missing = [mark for mark, changed in marks.items() if not _is_marked(directory, mark, changed)]
        if not missing and read_cached(directory, name) == content:
            return
        for mark in missing:
            if not write_cached(directory, mark, b"", marks[mark]):
                return
        write_cached(directory, name, content, safe)
        prune_cache(directory, PREFIX, (name,), SPARE)
        prune_cache(directory, MARK, marks, SPARE * len(marks))
    finally:
        os.close(directory)


def _times(path: str) -> tuple[int, int] | None:
    """Return a file's mtime and ctime; None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns


def _is_marked(directory: int, mark: str, changed: int) -> bool:
    try:
        return os.stat(mark, dir_fd=directory, follow_symlinks=False).st_mtime_ns == changed
    except OSError:
        return False


def forget() -> None:
    """Remove the stored answers, so that Python decides at the next start."""
    directory = open_cache()
    if directory >= 0:
        prune_cache(directory, PREFIX, (), 0)
        prune_cache(directory, MARK, (), 0)
        os.close(directory)


def find_words(settings: "Settings") -> list[str]:
    """Return words of which at least one is in every config.json that asks for a device, however it is written.

    They also occur in one that was edited in mode spec for an earlier request.
    """
    swarm = filter(None, (name.strip() for name in settings.swarm_resource.split(",")))
    mount = os.path.basename(MOUNT_DIRECTORIES[0])
    return sorted(
        {
            "NVIDIA_",
            "CUDA_VERSION",
            *(variable for _, variable, _ in VENDORS.values() if not variable.startswith("NVIDIA_") and variable),
            DECLARED,
            *ESCAPES,
            mount,
            *map(_plain, (*swarm, *settings.cdi_annotation_prefixes)),
        }
    )


def _plain(text: str) -> str:
    """Return the longest part of a text that JSON has no other form for but one of ESCAPES."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "_-.") else " " for c in text)
    return max(kept.split(), key=len, default=ANY_CONFIG)
