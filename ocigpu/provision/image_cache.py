"""Whether an image's loader cache names all that ldconfig would find in the image now.

The cache must not be older than what it was made of: /etc/ld.so.conf, the files that this includes, and the directories
that the loader searches.  Whatever adds, removes or replaces a name in such a directory changes the directory's time.
A link on the path of one, at any point of a chain of links, is compared by its own time: one that leads elsewhere now
is a new link.  Equal times count as current, because archives have whole seconds, and a reproducible image has one time
for everything.

What this does not see: a library that is a link to a file outside these directories, where only that file has changed;
a mount over that file; a searched directory whose parent was moved away and replaced by an older one.

The image is hostile: see :mod:`ocigpu.provision.inside`.  It can set all these times, and by that hide its own
libraries from its own loader, which it can do anyway.  It cannot make this long: files, directories, texts and steps
along paths are counted over the whole inspection, and the cache counts as stale beyond a limit.
"""

import os
import stat

from ocigpu.core.errors import quoted
from ocigpu.gpus.libraries.ldcache import HEADER, NEW_MAGIC, OLD_ENTRY, OLD_HEADER, OLD_MAGIC
from ocigpu.provision.inside import list_inside, look_inside, open_file_inside, status_inside
from ocigpu.system.paths import MAX_LINKS, opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

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
"""Bytes of ld.so.conf and the files beside it, together."""
MAX_CONF_FILES = 64
MAX_HWCAPS = 16
MAX_DIRECTORIES = 128
"""Directories that the loader searches; one that is named twice counts twice."""
MAX_MOUNTS = 64
MAX_PATH = 4096
"""PATH_MAX of include/uapi/linux/limits.h: no path of so many bytes can be opened."""
MAX_COMPONENTS = 64
"""Components of one path, those of its links included."""
MAX_STEPS = 2000
"""Components of all paths together, those of links included: each may be a look-up."""
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
    reader = _Reader(root_fd, status.st_mtime_ns)
    directories = [*DEFAULT_DIRECTORIES, f"/lib/{triplet}", f"/usr/lib/{triplet}", *reader.read_conf()]
    places = {reader.follow(path)[0] for path in (LD_CACHE, LD_SO_CONF, CONF_DIRECTORY)}
    for path in directories:
        place, found = reader.follow(path)
        if place not in places:
            places.add(place)  # a missing one too: a mount may bring it
            if found is not None:
                reader.compare(found, path)
                places.update(reader.compare_variants(f"{place}/{HWCAPS}"))
    _check_mounts(reader, mounts, places)


def _has_known_format(fd: int) -> bool:
    """Tell whether a file begins as a cache, or as one that has a table of the older layout before it."""
    head, start = os.pread(fd, HEADER, 0), 0
    if head.startswith(OLD_MAGIC) and len(head) >= OLD_HEADER:
        start = (OLD_HEADER + int.from_bytes(head[12:16], "little") * OLD_ENTRY + 7) & ~7
        head = os.pread(fd, HEADER, start)
    return len(head) == HEADER and head.startswith(NEW_MAGIC)


class _Reader:
    """Reads an image within limits over the whole inspection; ``made``: the cache's time.

    What is beyond a limit, or newer than the cache, raises _StaleError.
    """

    def __init__(self, root_fd: int, made: int) -> None:
        self._root_fd, self._made = root_fd, made
        self._known: dict[str, tuple[os.stat_result | None, str]] = {}
        self._steps = self._text = 0

    def compare(self, status: os.stat_result, path: str) -> None:
        """Raise _StaleError if a file is newer than the cache."""
        if status.st_mtime_ns > self._made:
            raise _StaleError(f"{quoted(path)} is newer than {LD_CACHE}")

    def follow(self, path: str, links_count: bool = True) -> tuple[str, os.stat_result | None]:
        """Return where a path leads in the image, and what is there, None if missing.

        The place is a text without links, to be compared; the end of a missing one is kept.  ``links_count``: the links
        on the way must not be newer than the cache.
        """
        todo, here, links = _parts(path), "", 0
        while todo:
            name = todo.pop()
            if name == "..":
                here = here.rpartition("/")[0]
                continue
            at = f"{here}/{name}"
            status, target = self._look(at)
            if status is None or not target:
                here = at
                continue
            if links_count:
                self.compare(status, at)
            links += 1
            if links > MAX_LINKS:
                return at, None
            if target[0] == "/":
                here = ""
            todo += _parts(target)
            if here.count("/") + len(todo) > MAX_COMPONENTS:
                raise _too_long(path)
        return here, self._look(here or "/")[0]

    def _look(self, path: str) -> tuple[os.stat_result | None, str]:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise _StaleError("the paths that the loader searches are too many, or too long")
        if path not in self._known:
            self._known[path] = look_inside(self._root_fd, path)
        return self._known[path]

    def compare_variants(self, path: str) -> list[str]:
        """Compare a directory, if it is there, and those in it; return where they all are."""
        place, found = self.follow(path)
        places = [place]
        if found is None or not stat.S_ISDIR(found.st_mode):
            return places
        self.compare(found, path)
        names = list_inside(self._root_fd, place)
        if len(names) > MAX_HWCAPS:
            raise _StaleError(f"{quoted(path)} has over {MAX_HWCAPS} names")
        for name in names:
            below, status = self.follow(f"{place}/{name}")
            places.append(below)
            if status is not None:
                self.compare(status, f"{path}/{name}")
        return places

    def read_conf(self) -> list[str]:
        """Return the directories that ld.so.conf and the files beside it name; an unusual one is stale."""
        found: list[str] = []
        included = False
        for line in self._lines(LD_SO_CONF):
            word, *patterns = line.split()
            if word == "include" and len(patterns) == 1 and patterns[0] in INCLUDED:
                included = True
            else:
                _add_directory(found, line, LD_SO_CONF)
        status = status_inside(self._root_fd, CONF_DIRECTORY) if included else None
        if status is None:
            return found
        self.compare(status, CONF_DIRECTORY)
        names = list_inside(self._root_fd, CONF_DIRECTORY)
        if len(names) > MAX_CONF_FILES:
            raise _StaleError(f"{CONF_DIRECTORY} has over {MAX_CONF_FILES} files")
        for name in names:
            if name[0] != "." and name.endswith(".conf"):
                path = f"{CONF_DIRECTORY}/{name}"
                for line in self._lines(path):
                    _add_directory(found, line, path)
        return found

    def _lines(self, path: str) -> list[str]:
        """Return the lines of a file, none if it is missing, without comments and empty ones."""
        fd = open_file_inside(self._root_fd, path, os.O_NOFOLLOW)
        if fd < 0:
            if status_inside(self._root_fd, path, os.O_NOFOLLOW) is None:
                return []
            raise _StaleError(f"{quoted(path)} is not a file that can be read")
        with opened(fd):
            self.compare(os.fstat(fd), path)
            try:
                data = os.pread(fd, MAX_CONF + 1, 0)
                text = data.decode()
            except (OSError, UnicodeDecodeError):  # on a broken file system
                raise _StaleError(f"{quoted(path)} is not a text") from None
        self._text += len(data)
        if self._text > MAX_CONF:
            raise _StaleError(f"the loader's configuration has over {MAX_CONF >> 10} KiB")
        lines = (line.partition("#")[0].strip() for line in text.split("\n"))
        return [line for line in lines if line]


def _add_directory(found: list[str], line: str, path: str) -> None:
    """Add the directory that a line of a file names."""
    if line[0] != "/" or any(letter in line for letter in "=\t\0 "):
        raise _StaleError(f"{quoted(path)} has the line {quoted(line)}")
    found.append(line)
    if len(found) > MAX_DIRECTORIES:
        raise _StaleError(f"the loader searches over {MAX_DIRECTORIES} directories")


def _parts(path: str) -> list[str]:
    """Return the components of a path, last one first."""
    # counted before anything is split: a text of JSON may be of any length, and have half of a surrogate pair
    if path.count("/") > MAX_COMPONENTS or len(path.encode(errors="surrogatepass")) >= MAX_PATH:
        raise _too_long(path)
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _too_long(path: str) -> _StaleError:
    return _StaleError(f"the path {quoted(path)} is too long, or has over {MAX_COMPONENTS} components")


def _check_mounts(reader: _Reader, mounts: "Iterable[str]", places: "Collection[str]") -> None:
    """Raise _StaleError for a mount that covers what ldconfig reads, or is made in it."""
    own = [path for path in mounts if path not in _OF_ENGINE and not _is_of_kernel(path)]
    if len(own) > MAX_MOUNTS:
        raise _StaleError(f"the container has over {MAX_MOUNTS} mounts")
    for path in own:
        place, _ = reader.follow(path, links_count=False)
        if any(f"{one}/".startswith(f"{place}/") or place.startswith(f"{one}/") for one in places):
            raise _StaleError(f"a mount on {quoted(path)} may have libraries")


def _is_of_kernel(path: str) -> bool:
    return "/.." not in path and any(path == one or path.startswith(f"{one}/") for one in _OF_KERNEL)
