"""What an image decides: where libraries go, which loader it has, whether it brings newer CUDA libraries.

The image is hostile: names are looked up by descriptor below its root, listings are bounded, nothing is opened for
reading.
"""

import os
import stat

from ocigpu.errors import SpecError
from ocigpu.facts import ImageFacts
from ocigpu.linux.paths import open_in_root

COMPAT_DIR = "/usr/local/cuda/compat"
"""Where NVIDIA's CUDA images keep the forward-compatibility libraries."""
_MAX_ENTRIES = 4096
_TRIPLETS = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}
_LOADER_DIRS = ("/lib64", "/lib", "/usr/lib64", "/usr/lib")


def read_rootfs_facts(rootfs: str, driver_version: str) -> ImageFacts:
    """Return :func:`read_image_facts` of the root directory at the host path ``rootfs``.

    Raises SpecError OCIGPU-SPEC-3, with the OSError as its cause, when there is no such directory.
    """
    try:
        root_fd = os.open(rootfs, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SpecError("OCIGPU-SPEC-3", f"open rootfs {rootfs}: {error.strerror}") from error
    try:
        return read_image_facts(root_fd, driver_version)
    finally:
        os.close(root_fd)


def read_image_facts(root_fd: int, driver_version: str) -> ImageFacts:
    """Return what the image below ``root_fd`` decides, for a driver of version ``driver_version`` ("550.163.01").

    Debian's family keeps libraries in a directory named after the architecture; everything else has /usr/lib64.
    Needs no privileges but the right to look.  Never raises for what an image contains.
    """
    machine = os.uname().machine
    triplet = _TRIPLETS.get(machine, "")
    debian = bool(triplet) and _exists(root_fd, "/etc/debian_version")
    library_dir = f"/usr/lib/{triplet}" if debian else "/usr/lib64"
    compat_major = _compat_major(root_fd, driver_version)
    return ImageFacts(
        library_dir=library_dir,
        library_dir32=_library_dir32(root_fd, debian, machine, library_dir),
        libc=_libc(root_fd, triplet),
        compat_dir=COMPAT_DIR if compat_major else "",
        compat_major=compat_major,
    )


def _library_dir32(root_fd: int, debian: bool, machine: str, library_dir: str) -> str:
    if debian:
        return "/usr/lib/i386-linux-gnu" if machine == "x86_64" else "/usr/lib32"
    if not _exists(root_fd, "/usr/lib32"):
        lib, lib64 = _identity(root_fd, "/usr/lib"), _identity(root_fd, library_dir)
        if lib is not None and lib != lib64:
            return "/usr/lib"
    return "/usr/lib32"


def _libc(root_fd: int, triplet: str) -> str:
    """Tell the C library by the name of its loader, the file every dynamic program names."""
    found = ""
    for directory in (*_LOADER_DIRS, f"/lib/{triplet}", f"/usr/lib/{triplet}"):
        for name in _names(root_fd, directory):
            if name.startswith("ld-linux") and ".so" in name:
                return "glibc"
            if name.startswith("ld-musl-"):
                found = "musl"
    return found


def _compat_major(root_fd: int, driver_version: str) -> int:
    """Return the newest major of the image's compatibility libcuda if it is newer than the driver's, else 0."""
    driver_major = _leading_number(driver_version)
    newest = 0
    for name in _names(root_fd, COMPAT_DIR):
        if name.startswith("libcuda.so."):
            major = _leading_number(name.removeprefix("libcuda.so."))
            if max(driver_major, newest) < major and name.count(".") >= 3 and _is_file(root_fd, f"{COMPAT_DIR}/{name}"):
                newest = major
    return newest


def _leading_number(text: str) -> int:
    digits = text.split(".", 1)[0]
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else 0


def _names(root_fd: int, path: str) -> list[str]:
    """Return at most :data:`_MAX_ENTRIES` names of a directory of the image, none if it cannot be listed."""
    try:
        fd = open_in_root(root_fd, path, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK)
    except OSError:  # missing, a link to nowhere, not a directory: no names
        return []
    try:
        with os.scandir(fd) as entries:
            return sorted(entry.name for entry, _ in zip(entries, range(_MAX_ENTRIES), strict=False))
    except OSError:  # a directory that cannot be read, on a broken file system
        return []
    finally:
        os.close(fd)


def _status(root_fd: int, path: str, flags: int) -> os.stat_result | None:
    try:
        fd = open_in_root(root_fd, path, os.O_PATH | flags)
    except OSError:  # missing, or a link that leads nowhere
        return None
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)


def _exists(root_fd: int, path: str) -> bool:
    return _status(root_fd, path, 0) is not None


def _identity(root_fd: int, path: str) -> tuple[int, int] | None:
    status = _status(root_fd, path, 0)
    return (status.st_dev, status.st_ino) if status is not None else None


def _is_file(root_fd: int, path: str) -> bool:
    status = _status(root_fd, path, os.O_NOFOLLOW)
    return status is not None and stat.S_ISREG(status.st_mode)
