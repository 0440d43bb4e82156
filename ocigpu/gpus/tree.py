"""Directories that stand for "/" of the driver, and small bounded reads below them.

A driver root (or a simulated host) is trusted, but its paths assume that it is "/": an absolute symbolic link in it is
relative to it.  :class:`Tree` resolves such paths; it does not protect against a hostile tree.
"""

import errno
import os
import stat
from binascii import crc32

from ocigpu.core.errors import HostError
from ocigpu.core.record import NamedTuple
from ocigpu.core.settings import Settings
from ocigpu.system.files import open_regular, read_part, why_untrusted
from ocigpu.system.signals import touched

MAX_LINKS = 40
"""Symbolic links followed for one path, as in the kernel (MAXSYMLINKS, path_resolution(7))."""
TEXT_LIMIT = 1 << 16
"""Default maximum of bytes read from one text file of procfs or sysfs."""
ABSENT = (errno.ENOENT, errno.ENOTDIR)

_noted: "dict[str, int] | None" = None


def note_readings() -> "dict[str, int]":
    """Begin to record what the functions of this module read, until :func:`stop_noting`; returns the record.

    :func:`is_as_noted` compares with it: equal readings lead to equal conclusions.
    """
    global _noted  # noqa: PLW0603 - reading is spread over many modules, and one process notes one thing at a time
    _noted = {}
    return _noted


def stop_noting() -> None:
    """End what :func:`note_readings` began."""
    global _noted  # noqa: PLW0603 - as above
    _noted = None


def is_as_noted(notes: "dict[str, int]") -> bool:
    """Tell whether everything that was noted would be read the same again.  Raises HostError as the readers do."""
    for key, checksum in notes.items():
        kind, _, path = key.partition(" ")
        if kind == "names":
            value = "/".join(list_names(path))
        elif kind == "node":
            value = read_node(path)
        elif kind == "link":
            value = str(_read_link(path))
        else:
            value = str(read_text(path, int(kind)))
        if _checksum(value) != checksum:
            return False
    return True


def _checksum(text: str) -> int:
    return crc32(text.encode("utf-8", "surrogateescape"))


def _note(kind: str, path: str, value: str) -> None:
    if _noted is not None:
        _noted[f"{kind} {path}"] = _checksum(value)


class Roots(NamedTuple):
    """Where to look: ``driver`` and ``dev`` are prefixes of absolute paths ("" for "/"), ``proc`` and ``sys`` paths.

    ``stand_in``: a simulated host stands for this one, and regular files may stand for its nodes.
    """

    driver: str
    dev: str
    proc: str
    sys: str
    stand_in: bool

    @property
    def host(self) -> str:
        """The prefix of paths that belong to the machine, not to the driver: its /dev, sockets of daemons."""
        return self.proc.removesuffix("/proc") if self.stand_in else ""


def find_roots(settings: Settings) -> Roots:
    """Return where the settings say that driver files, device nodes, procfs and sysfs are.

    With ``simulation.root`` everything is below it, ``driver.root`` and ``driver.dev-root`` too; procfs and sysfs are
    the host's own.  Device nodes are below ``driver.dev-root``, else below the driver root when that has a
    /dev/nvidiactl, else in the host's /dev.  Without ``driver.root`` the driver may be in a container of its own:
    :func:`find_driver_container`.
    """
    host = settings.simulation_root.rstrip("/")
    driver = host + (settings.driver_root.rstrip("/") or find_driver_container(host))
    if settings.driver_dev_root:
        dev = host + settings.driver_dev_root.rstrip("/")
    else:
        dev = driver if driver != host and read_node(f"{driver}/dev/nvidiactl") != "-" else host
    return Roots(driver, dev, f"{host}/proc", f"{host}/sys", bool(host))


CONTAINER_ROOT = "/run/nvidia/driver"
"""Where a driver container shows its root directory to the host (NVIDIA GPU Operator, driver container)."""
_NVML = tuple(
    f"{directory}/libnvidia-ml.so.1"
    for directory in ("/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib")
)


def find_driver_container(host: str = "") -> str:
    """Return the root of a driver container, "" where there is none or the host has the driver's libraries itself.

    ``host``: the prefix of the host's paths, which the result is without.
    """
    parent, _, name = CONTAINER_ROOT.rpartition("/")
    if name not in list_names(host + parent):
        return ""
    own, tree = Tree(host), Tree(host + CONTAINER_ROOT)
    if any(map(own.find, _NVML)) or not own.owned(CONTAINER_ROOT) or not any(map(tree.find, _NVML)):
        return ""
    return CONTAINER_ROOT


def settings_digest(settings: Settings) -> str:
    """Return a checksum of what determines where the driver is searched: settings, and a driver container's root."""
    container = "" if settings.driver_root.rstrip("/") else find_driver_container(settings.simulation_root.rstrip("/"))
    chosen = (
        container or settings.driver_root,
        settings.driver_dev_root,
        settings.driver_ldcache,
        settings.simulation_root,
    )
    return f"{crc32(chr(0).join(chosen).encode()):08x}"


class Tree:
    """A directory that stands for "/": ``prefix`` is its path, "" for the real one.

    Remembers where it has looked: make a new one for every discovery.  ``stand_in``: as of :class:`Roots`.
    """

    def __init__(self, prefix: str, stand_in: bool = False) -> None:
        self.prefix = prefix.rstrip("/")
        self.stand_in = stand_in
        self.unreadable: list[str] = []
        self._links: dict[str, str | None] = {}
        self._listed: dict[str, bool] = {}

    def resolve(self, path: str) -> str:
        """Return the absolute path ``path`` with every link resolved inside the tree; "" when there is nothing.

        The result is without the prefix.  A chain of more than 40 links counts as nothing.
        """
        pending = path.split("/")[::-1]
        current = ""
        links = 0
        while pending:
            part = pending.pop()
            if part in ("", "."):
                continue
            if part == "..":
                current = current.rpartition("/")[0]
                continue
            candidate = f"{current}/{part}"
            target = self._link(candidate)
            if target is None:
                return ""
            if not target:
                current = candidate
                continue
            links += 1
            if links > MAX_LINKS:
                return ""
            if target.startswith("/"):
                current = ""
            pending.extend(target.split("/")[::-1])
        return current or "/"

    def _link(self, path: str) -> str | None:
        """Return the target of a link, "" for anything else that exists, None for nothing."""
        if path in self._links:
            return self._links[path]
        found = _read_link(self.prefix + path)
        if isinstance(found, OSError) and found.errno not in ABSENT:
            self.unreadable.append(f"{self.prefix}{path}: {found.strerror}")
        self._links[path] = target = found if isinstance(found, str) else None
        return target

    def link(self, path: str) -> str:
        """Return the text of the link at ``path``, whose directory is resolved; "" if it is not a link."""
        return self._link(path) or ""

    def host(self, path: str) -> str:
        """Return the host's path of a path of the tree."""
        return self.prefix + path

    def find(self, path: str) -> str:
        """Return the host's path of ``path``, links resolved inside the tree; "" when there is nothing."""
        resolved = self.resolve(path)
        return self.prefix + resolved if resolved else ""

    def owned(self, path: str) -> str:
        """Return a directory's resolved path if only root or the caller can have written there, else "".

        A user who may write to one of its parent directories could have replaced it.
        """
        resolved = self.resolve(path)
        place = self.prefix
        for part in filter(None, resolved.split("/")):
            place = f"{place}/{part}"
            mode, _, rest = read_node(place).partition(" ")
            if not rest or why_untrusted(int(rest.partition(" ")[0]), int(mode, 8)):
                return ""
        return resolved

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a directory of the tree; nothing when there is none or it cannot be read."""
        found = self.find(path)
        return list_names(found) if found else []

    def search(self, resolved: str) -> list[str]:
        """Return the sorted names in a directory with a resolved path, and record that its content matters."""
        self._listed[resolved] = True
        return list_names(self.prefix + resolved)

    def places(self) -> dict[str, bool]:
        """Return the host's path of everything that was read, found or not, and whether its content matters."""
        looks = {**dict.fromkeys(self._links, False), **self._listed}
        return {self.prefix + path: searched for path, searched in looks.items()}

    def kind(self, host_path: str) -> str:
        """Return the kind of a resolved path of the host: "file", "directory" or "socket", else ""."""
        try:
            mode = os.lstat(host_path).st_mode
        except OSError:
            return ""
        if stat.S_ISREG(mode):
            return "file"
        if stat.S_ISDIR(mode):
            return "directory"
        return "socket" if stat.S_ISSOCK(mode) else ""


def node_tree(roots: Roots) -> Tree:
    """Return where device nodes of other drivers than NVIDIA's are: the host's /dev, or the simulated host's."""
    return Tree(roots.host, roots.stand_in)


def _read_link(path: str) -> str | OSError:
    """Return the target of a link, "" for anything else that exists, the error for a missing path."""
    target: str | OSError
    touched[0] = path
    try:
        target = os.readlink(path)
    except OSError as error:
        target = "" if error.errno == errno.EINVAL else error
    _note("link", path, str(target))
    return target


def list_names(path: str) -> list[str]:
    """Return the sorted names in a directory; nothing when there is none or it cannot be read."""
    touched[0] = path
    try:
        names = sorted(os.listdir(path))
    except OSError:
        names = []
    _note("names", path, "/".join(names))
    return names


def read_node(path: str) -> str:
    """Return type, permissions, owner and device number of a path as text, "-" if it is missing; follows no link."""
    touched[0] = path
    try:
        status = os.lstat(path)
        text = f"{status.st_mode:o} {status.st_uid} {status.st_gid} {status.st_rdev:x}"
    except OSError:
        text = "-"
    _note("node", path, text)
    return text


def read_text(path: str, limit: int = TEXT_LIMIT) -> str | None:
    """Return at most ``limit`` bytes of a text file, None when there is none.

    Raises HostError (OCIGPU-HOST-3) if it exists but cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno in ABSENT:
            _note(str(limit), path, "None")
            return None
        raise HostError("OCIGPU-HOST-3", f"open {path}: {error.strerror}") from error
    try:
        text = _read_all(fd, limit).decode("utf-8", "replace")
    except OSError as error:
        raise HostError("OCIGPU-HOST-3", f"read {path}: {error.strerror}") from error
    finally:
        os.close(fd)
    _note(str(limit), path, text)
    return text


def read_or_skip(path: str, limit: int = TEXT_LIMIT, notes: "list[str] | None" = None) -> str | None:
    """Return a text as :func:`read_text`; None, and a note, also for one that exists but cannot be read now."""
    try:
        return read_text(path, limit)
    except HostError as error:
        if notes is not None:
            notes.append(error.message)
        return None


def _read_all(fd: int, limit: int) -> bytes:
    """Read until the end or the limit: procfs hands out a page or so at a time."""
    data = os.read(fd, limit)
    if len(data) < limit:
        chunk = os.read(fd, limit - len(data)) if data else b""
        while chunk:
            data += chunk
            chunk = os.read(fd, limit - len(data)) if len(data) < limit else b""
    return data


def read_bytes(path: str, limit: int) -> bytes | None:
    """Return at most ``limit`` bytes of a regular file, None when there is none or it cannot be read."""
    try:
        with open_regular(path) as file:
            return read_part(file, limit)
    except OSError:
        return None


def normal_bus_id(text: str) -> str:
    """Return a PCI address as "00000000:3b:00.0": domain of 8 digits, lower case; "" for anything else."""
    domain, _, rest = text.strip().lower().partition(":")
    bus, _, slot = rest.partition(":")
    device, _, function = slot.partition(".")
    try:
        numbers = [int(part, 16) for part in (domain, bus, device, function or "0")]
    except ValueError:
        return ""
    if (
        any(number < 0 for number in numbers)
        or numbers[0] >> 32
        or numbers[1] >> 8
        or numbers[2] >> 5
        or numbers[3] >> 3
    ):
        return ""
    return f"{numbers[0]:08x}:{numbers[1]:02x}:{numbers[2]:02x}.{numbers[3]:x}"


def sysfs_address(bus_id: str) -> str:
    """Return a bus id as the kernel writes it in sysfs, "0000:3b:00.0": of the domain four digits, more if needed."""
    domain, colon, rest = bus_id.partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}" if colon else bus_id


def small_number(text: str, default: int = -1) -> int:
    """Return a decimal number of at most ten digits, else the default."""
    return int(text) if len(text) <= 10 and text.isascii() and text.isdigit() else default
