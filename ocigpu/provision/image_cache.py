"""Whether an image's loader cache names all that ldconfig would find in the image now.

The cache must not be older than what it was made of: /etc/ld.so.conf, the files that this includes, and the directories
that the loader searches.  Whatever adds, removes or replaces a library there changes the time of its directory.  Equal
times count as current, because archives have whole seconds, and a reproducible image has one time for everything.

The image is hostile: see :mod:`ocigpu.provision.inside`.  It can set all these times, and by that hide its own
libraries from its own loader, which it can do anyway.
"""

import os
import stat

from ocigpu.core.errors import quoted
from ocigpu.gpus.libraries.ldcache import HEADER, NEW_MAGIC, OLD_ENTRY, OLD_HEADER, OLD_MAGIC
from ocigpu.provision.inside import list_inside, open_file_inside, resolve_inside, status_inside
from ocigpu.system.paths import opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LD_CACHE = "/etc/ld.so.cache"
LD_SO_CONF = "/etc/ld.so.conf"
CONF_DIRECTORY = "/etc/ld.so.conf.d"
INCLUDED = (f"{CONF_DIRECTORY}/*.conf", "ld.so.conf.d/*.conf")
"""What ld.so.conf includes in Debian's family, and in Fedora's."""
DEFAULT_DIRECTORIES = ("/lib", "/usr/lib", "/lib64", "/usr/lib64", "/lib32", "/usr/lib32", "/libx32", "/usr/libx32")
HWCAPS = "glibc-hwcaps"
"""Directory of variants of libraries for newer processors, in a searched one (glibc's elf/dl-hwcaps.h)."""
MAX_CACHE = 8 << 20
MAX_CONF = 1 << 16
MAX_CONF_FILES = 64
MAX_HWCAPS = 16
MAX_DIRECTORIES = 128
MAX_MOUNTS = 64
_OF_KERNEL = ("/proc", "/sys", "/dev")
_OF_ENGINE = frozenset(("/etc/hosts", "/etc/hostname", "/etc/resolv.conf"))
"""What nearly every container has mounted, and no loader searches."""


class _StaleError(Exception):
    """Says why the cache is not current."""


def why_not_current(root_fd: int, triplet: str, mounts: "Iterable[str]" = ()) -> str:
    """Return why entries should not be added to the image's cache as it is, "" where they may be.

    ``triplet``: of this machine ("x86_64-linux-gnu").  ``mounts``: where the container will have mounts, which may
    bring libraries that only ldconfig finds.  Never raises for anything that an image contains.
    """
    try:
        _check(root_fd, triplet, mounts)
    except _StaleError as stale:
        return str(stale)
    return ""


def _check(root_fd: int, triplet: str, mounts: "Iterable[str]") -> None:
    """Raise _StaleError unless the cache is current."""
    cache_fd = open_file_inside(root_fd, LD_CACHE, os.O_NOFOLLOW)
    if cache_fd < 0:
        raise _StaleError(f"the image has no file {LD_CACHE}")
    with opened(cache_fd):
        status = os.fstat(cache_fd)
        if status.st_size > MAX_CACHE or not _has_known_format(cache_fd):
            raise _StaleError(f"{LD_CACHE} has another format, or over {MAX_CACHE >> 20} MiB")
    made = status.st_mtime_ns
    directories = dict.fromkeys((*DEFAULT_DIRECTORIES, f"/lib/{triplet}", f"/usr/lib/{triplet}"))
    directories.update(dict.fromkeys(_read_conf(root_fd, made)))
    if len(directories) > MAX_DIRECTORIES:
        raise _StaleError(f"the loader searches over {MAX_DIRECTORIES} directories")
    seen: set[tuple[int, int]] = set()
    read = [LD_CACHE, LD_SO_CONF, CONF_DIRECTORY]
    for path in directories:
        found = status_inside(root_fd, path)
        if found is None:  # a mount may bring it
            read.append(path)
        elif (found.st_dev, found.st_ino) not in seen:
            seen.add((found.st_dev, found.st_ino))
            read.append(path)
            _compare(found, path, made)
            _compare_below(root_fd, f"{path}/{HWCAPS}", made)
    _check_mounts(root_fd, mounts, read)


def _has_known_format(fd: int) -> bool:
    """Tell whether a file begins as a cache, or as one that has a table of the older layout before it."""
    head, start = os.pread(fd, HEADER, 0), 0
    if head.startswith(OLD_MAGIC) and len(head) >= OLD_HEADER:
        start = (OLD_HEADER + int.from_bytes(head[12:16], "little") * OLD_ENTRY + 7) & ~7
        head = os.pread(fd, HEADER, start)
    return len(head) == HEADER and head.startswith(NEW_MAGIC)


def _compare(status: os.stat_result, path: str, made: int) -> None:
    if status.st_mtime_ns > made:
        raise _StaleError(f"{quoted(path)} is newer than {LD_CACHE}")


def _compare_below(root_fd: int, path: str, made: int) -> None:
    """Compare a directory, if it is there, and those in it."""
    found = status_inside(root_fd, path)
    if found is None or not stat.S_ISDIR(found.st_mode):
        return
    _compare(found, path, made)
    names = list_inside(root_fd, path)
    if len(names) > MAX_HWCAPS:
        raise _StaleError(f"{quoted(path)} has over {MAX_HWCAPS} names")
    for name in names:
        if (below := status_inside(root_fd, f"{path}/{name}")) is not None:
            _compare(below, f"{path}/{name}", made)


def _read_conf(root_fd: int, made: int) -> list[str]:
    """Return the directories that ld.so.conf and the files beside it name; raises _StaleError for an unusual one."""
    found: list[str] = []
    included = False
    for line in _lines(root_fd, LD_SO_CONF, made):
        word, *patterns = line.split()
        if word == "include" and len(patterns) == 1 and patterns[0] in INCLUDED:
            included = True
        else:
            found.append(_directory(line, LD_SO_CONF))
    status = status_inside(root_fd, CONF_DIRECTORY) if included else None
    if status is None:
        return found
    _compare(status, CONF_DIRECTORY, made)
    names = list_inside(root_fd, CONF_DIRECTORY)
    if len(names) > MAX_CONF_FILES:
        raise _StaleError(f"{CONF_DIRECTORY} has over {MAX_CONF_FILES} files")
    for name in names:
        if name[0] == "." or not name.endswith(".conf"):
            continue
        path = f"{CONF_DIRECTORY}/{name}"
        found += [_directory(line, path) for line in _lines(root_fd, path, made)]
    return found


def _directory(line: str, path: str) -> str:
    """Return the directory that a line names."""
    if line[0] != "/" or any(letter in line for letter in "=\t\0 "):
        raise _StaleError(f"{quoted(path)} has the line {quoted(line)}")
    return os.path.normpath(line)


def _lines(root_fd: int, path: str, made: int) -> list[str]:
    """Return the lines of a file, none if it is missing, without comments and empty ones."""
    fd = open_file_inside(root_fd, path, os.O_NOFOLLOW)
    if fd < 0:
        if status_inside(root_fd, path, os.O_NOFOLLOW) is None:
            return []
        raise _StaleError(f"{quoted(path)} is not a file that can be read")
    with opened(fd):
        _compare(os.fstat(fd), path, made)
        try:
            text = os.pread(fd, MAX_CONF + 1, 0).decode()
        except (OSError, UnicodeDecodeError):  # on a broken file system
            raise _StaleError(f"{quoted(path)} is not a text") from None
    if len(text) > MAX_CONF:
        raise _StaleError(f"{quoted(path)} has over {MAX_CONF >> 10} KiB")
    lines = (line.partition("#")[0].strip() for line in text.split("\n"))
    return [line for line in lines if line]


def _check_mounts(root_fd: int, mounts: "Iterable[str]", read: "Sequence[str]") -> None:
    """Raise _StaleError for a mount that covers what ldconfig reads, or is made in it."""
    own = [path for path in mounts if not path.startswith(_OF_KERNEL) and path not in _OF_ENGINE]
    if not own:
        return
    if len(own) > MAX_MOUNTS:
        raise _StaleError(f"the container has over {MAX_MOUNTS} mounts")
    known: dict[str, str] = {}
    places = {_place(root_fd, path, known) for path in read}
    for path in own:
        place = _place(root_fd, path, known)
        if any(f"{one}/".startswith(f"{place}/") or place.startswith(f"{one}/") for one in places):
            raise _StaleError(f"a mount on {quoted(path)} may have libraries")


def _place(root_fd: int, path: str, known: dict[str, str]) -> str:
    """Return where a path leads in the image, also if its end is missing there: a text to be compared.

    ``known``: where directories of missing paths lead.
    """
    found, rest = resolve_inside(root_fd, path), ""
    while not found and path.strip("/"):
        path, _, name = path.rstrip("/").rpartition("/")
        rest = f"/{name}{rest}"
        if path not in known:
            known[path] = resolve_inside(root_fd, path) if path else ""
        found = known[path]
    return f"{found}{rest}"
