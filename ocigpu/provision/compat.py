"""CUDA forward compatibility: whether an image's own libcuda, newer than the driver, is the one to use.

NVIDIA's CUDA images bring it in :data:`ocigpu.provision.image.COMPAT_DIR`; newer ones say in a note of the library
which drivers it works with (CUDA Compatibility guide, chapter "Forward Compatibility").
"""

import os
import stat

from ocigpu.core import rawjson
from ocigpu.core.record import NamedTuple
from ocigpu.gpus.libraries.elf import read_section
from ocigpu.provision.inside import list_inside, open_file_inside, resolve_inside, status_inside

NOTE = ".note.cuda.fwd_compatibility"
MAX_NOTE = 1 << 16
_NOTE_HEAD = 12  # sizes of name and description, type: three 32-bit words (elf(5), Notes)
_MAX_PADDING = 16

Version = tuple[int, ...]


class CompatNote(NamedTuple):
    """The content of the note: the library's CUDA version, and the major versions of drivers it works with."""

    cuda_version: Version
    drivers: tuple[int, ...]


class CompatLibrary(NamedTuple):
    """The libcuda of a compatibility directory: its directory with links resolved, its version, its note if any."""

    directory: str
    version: Version
    note: CompatNote | None = None


def read_compat(root_fd: int, directory: str) -> CompatLibrary | None:
    """Return the newest libcuda.so.<version> in a directory of the image, None when there is none."""
    newest: tuple[Version, str] = ((), "")
    for name in list_inside(root_fd, directory):
        if name.startswith("libcuda.so.") and name.count(".") >= 3:
            version = parse_version(name.removeprefix("libcuda.so."))
            if version > newest[0] and _is_file(root_fd, f"{directory}/{name}"):
                newest = (version, name)
    version, name = newest
    if not version:
        return None
    note = None
    fd = open_file_inside(root_fd, f"{directory}/{name}", os.O_NOFOLLOW)
    if fd >= 0:
        try:
            note = parse_note(read_section(fd, NOTE, MAX_NOTE) or b"")
        except OSError:  # on a broken file system
            note = None
        finally:
            os.close(fd)
    return CompatLibrary(resolve_inside(root_fd, directory) or directory, version, note)


def _is_file(root_fd: int, path: str) -> bool:
    status = status_inside(root_fd, path, os.O_NOFOLLOW)
    return status is not None and stat.S_ISREG(status.st_mode)


def parse_version(text: str) -> Version:
    """Return the numbers of a version ("575.57.08", "12.9"), () for anything but one to four numbers."""
    groups = text.split(".")
    if len(groups) > 4 or any(not (group.isascii() and group.isdigit() and len(group) < 10) for group in groups):
        return ()
    numbers = [int(group) for group in groups]
    while numbers and not numbers[-1]:
        numbers.pop()  # 12.0 is 12
    return tuple(numbers)


def parse_note(data: bytes) -> CompatNote | None:
    """Return the parsed section :data:`NOTE`, JSON in a note of one entry; None if it cannot be parsed."""
    if len(data) < _NOTE_HEAD:
        return None
    name_size, size = (int.from_bytes(data[at : at + 4], "little") for at in (0, 4))
    # The name is padded to the section's alignment; readers differ in how they treat more than 4 bytes.
    end = _NOTE_HEAD + name_size
    start = data.find(b"{", end, end + _MAX_PADDING)
    if start < 0 or not data[_NOTE_HEAD:].startswith(b"NVIDIA Corporation"):
        return None
    try:
        content = rawjson.parse(data[start : start + size].rstrip(b"\0").decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    # The vendor's reader ignores the case of keys; libcuda 575.57.08 and 590.44.01 write "CUDA version" and "driver".
    fields = {key.casefold(): value for key, value in content.items()}
    cuda, drivers = fields.get("cuda version"), fields.get("driver")
    majors = [parse_version(str(item)) for item in drivers[:1024]] if isinstance(drivers, list) else []
    return CompatNote(parse_version(cuda) if isinstance(cuda, str) else (), tuple(item[0] for item in majors if item))


def suits_driver(library: CompatLibrary, driver_version: str, cuda_version: str = "") -> bool:
    """Tell whether the library is to be used on a host with this driver and CUDA version ("": not known).

    With a note, the driver decides if it is known: its major must be listed, and the library must be newer.  Without
    one, a library of a newer major is used, unless the caller asks by CUDA version, which only a note can answer.
    """
    driver, cuda = parse_version(driver_version), parse_version(cuda_version)
    if library.note is None:
        return not cuda and bool(driver) and driver[0] < library.version[0]
    if driver:
        return driver[0] in library.note.drivers and driver < library.version
    return bool(cuda) and cuda < library.note.cuda_version
