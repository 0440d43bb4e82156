"""What procfs tells of a process: its mounts, its state and start, its cgroups.  Each text has its one reader here."""

import errno
import os

from ocigpu.core.errors import HostError, printable
from ocigpu.core.record import NamedTuple
from ocigpu.system.files import read_part

MAX_TABLE = 64 << 20
"""Bytes read at most of a file of procfs; the mount table of a big node has some 100 KiB."""


class Mount(NamedTuple):
    """A line of mountinfo, proc_pid_mountinfo(5): the mount at ``point``, without escapes.

    ``device``: number of the file system ("8:1"); ``root``: which part of it ``point`` shows; ``options``: of this
    mount; ``tags``: "shared:N", "master:N" and the like; ``super_options``: of the file system.
    """

    mnt_id: int
    parent: int
    device: str
    root: str
    point: str
    options: tuple[str, ...]
    tags: tuple[str, ...]
    type: str
    source: str
    super_options: tuple[str, ...]


def read_boot_id() -> str:
    """Return what tells this boot of the host from all others (random(4)); raises HostError (OCIGPU-HOST-3)."""
    path = "/proc/sys/kernel/random/boot_id"
    try:
        return read_proc(path).strip()
    except OSError as error:
        raise HostError("OCIGPU-HOST-3", f"read {path}: {error.strerror}") from error


def read_mounts(path: str = "/proc/self/mountinfo", dir_fd: int | None = None) -> dict[int, Mount]:
    """Return the mounts in a file of procfs by id, in the order of the table.  Raises OSError."""
    return parse_mounts(read_proc(path, dir_fd))


def parse_mounts(text: str, strict: bool = True) -> dict[int, Mount]:
    """Return the mounts in the text of a mountinfo by id.

    A line: "id parent dev root point options [tag...] - type source super_options", each with single blanks between.
    Lines end at a newline and nowhere else: of what breaks lines, the kernel writes only that in octal, and a mount
    point may have any other in its name.  Another text is an OSError EPROTO, or passed over if not ``strict``.
    """
    table = {}
    for line in text.removesuffix("\n").split("\n") if text else ():
        fields = line.split(" ")
        numbers = fields[:2] + fields[2].split(":", 1) if len(fields) > 9 else []
        if len(numbers) != 4 or not all(map(_is_number, numbers)) or "-" not in fields[6:-3]:
            if strict:
                raise OSError(errno.EPROTO, os.strerror(errno.EPROTO), "mountinfo")
            continue
        if "\\" in line:
            fields = [_decode(field) for field in fields]
        end = fields.index("-", 6)
        kind, source, options = fields[end + 1 : end + 4]
        table[int(fields[0])] = Mount(
            int(fields[0]), int(fields[1]), fields[2], fields[3], fields[4], tuple(fields[5].split(",")),
            tuple(fields[6:end]), kind, source, tuple(options.split(",")),
        )  # fmt: skip
    return table


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


def _decode(field: str) -> str:
    r"""Return a field with its octal escapes (\040) decoded."""
    parts = os.fsencode(field).split(b"\\")
    out = parts[:1]
    for part in parts[1:]:
        digits = part[:3]
        if len(digits) == 3 and all(48 <= digit <= 55 for digit in digits) and int(digits, 8) < 256:
            out += [bytes((int(digits, 8),)), part[3:]]
        else:
            out += [b"\\", part]
    return os.fsdecode(b"".join(out))


def read_mnt_id_of(fd: int, own_proc: str = "/proc/self") -> int:
    """Return the id of the mount a descriptor is on, as in mountinfo, without a system call of its own (proc(5)).

    ``own_proc``: path of our own directory of procfs.  Raises OSError.
    """
    for line in read_proc(f"{own_proc}/fdinfo/{fd}").splitlines():
        key, _, value = line.partition(":")
        if key == "mnt_id":
            return int(value)
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), f"fdinfo/{fd}")


class ProcessStat(NamedTuple):
    """Of proc_pid_stat(5): the state's letter, the parent's id, the start in clock ticks since boot."""

    state: str
    parent: int
    start: int

    @property
    def ended(self) -> bool:
        """Whether it has ended, and only its parent does not know yet."""
        return self.state in ("Z", "X")


def read_stat(path: str = "stat", dir_fd: int | None = None) -> ProcessStat:
    """Return the stat of a process; raises OSError, FileNotFoundError or ProcessLookupError if it is gone."""
    return parse_stat(read_proc(path, dir_fd))


def parse_stat(text: str) -> ProcessStat:
    """Parse the text of a process's stat; the name in it may contain anything.  Raises OSError EPROTO."""
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20 or not (fields[1].isdigit() and fields[19].isdigit()):
        raise OSError(errno.EPROTO, os.strerror(errno.EPROTO), "stat")
    return ProcessStat(fields[0], int(fields[1]), int(fields[19]))


def is_running(start: int, path: str = "stat", dir_fd: int | None = None) -> bool:
    """Tell whether the process of this stat runs and started then.  Raises OSError where it cannot be read."""
    try:
        stat = read_stat(path, dir_fd)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return not stat.ended and stat.start == start


def read_command(directory: str) -> str:
    """Return the name of a process, which it can choose, escaped; by its directory in procfs.  Raises OSError."""
    return printable(read_proc(f"{directory}/comm").removesuffix("\n"), 64)


def parse_status(text: str) -> "dict[str, list[str]]":
    """Return the words of each line in the text of a process's status by the first, "Uid:" (proc_pid_status(5)).

    Lines end at a newline and nowhere else: of what breaks lines, the kernel escapes only that in the name, which a
    process can choose.
    """
    return {words[0]: words[1:] for line in text.split("\n") if (words := line.split())}


class ProcCgroup(NamedTuple):
    """Cgroup paths of a process: in the v1 hierarchy of a controller, and in the v2 one; None where it has none."""

    v1: str | None
    v2: str | None


def read_cgroup(path: str = "cgroup", dir_fd: int | None = None) -> ProcCgroup:
    """Return the cgroups of a process as far as they matter for devices.  Raises OSError."""
    return parse_cgroup(read_proc(path, dir_fd))


def parse_cgroup(text: str, controller: str = "devices") -> ProcCgroup:
    """Return the paths in the text of /proc/<pid>/cgroup: of the v1 hierarchy with this controller, and of v2.

    Lines are "hierarchy:controllers:path" (cgroups(7)), e.g. "5:devices,freezer:/docker/1f..." or "0::/user.slice";
    the path may hold colons.
    """
    v1: str | None = None
    v2: str | None = None
    for line in text.split("\n"):
        number, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon and controller in controllers.split(","):
            v1 = path
        elif colon and number == "0" and not controllers:
            v2 = path
    return ProcCgroup(v1, v2)


def read_proc(path: str, dir_fd: int | None = None) -> str:
    """Return the text of a file of procfs, at most :data:`MAX_TABLE` bytes.  Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=dir_fd)
    with open(fd, "rb") as file:
        return os.fsdecode(read_part(file, MAX_TABLE))
