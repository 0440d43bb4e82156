"""Facts about an image: where libraries go, which loader it has, whether it contains newer CUDA libraries.

The image is hostile: see :mod:`ocigpu.provision.inside`.
"""

import os
import stat

from ocigpu.core.errors import SpecError
from ocigpu.core.record import NamedTuple
from ocigpu.provision.inside import exists_inside, list_inside, status_inside
from ocigpu.system.paths import opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ocigpu.core.facts import ImageFacts

TRIPLETS = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}
COMPAT_DIR = "/usr/local/cuda/compat"
"""Where NVIDIA's CUDA images keep the forward-compatibility libraries."""
LOADERS = {
    "x86_64": (("ld-linux-x86-64.so.2", "glibc"), ("ld-linux.so.2", "glibc"), ("ld-musl-x86_64.so.1", "musl")),
    "aarch64": (("ld-linux-aarch64.so.1", "glibc"), ("ld-musl-aarch64.so.1", "musl")),
}
"""Names of the loaders of a machine's programs and their C libraries (System V ABI supplements; musl, INSTALL)."""
_LOADER_DIRS = ("/lib64", "/lib", "/usr/lib64", "/usr/lib")


class ContainerNode(NamedTuple):
    """A character device of the container."""

    path: str
    major: int
    minor: int


def read_rootfs_facts(rootfs: str, driver_version: str, mounts: "Iterable[str] | None" = None) -> "ImageFacts":
    """Return :func:`read_image_facts` of the root directory at the host path ``rootfs``.

    Raises SpecError OCIGPU-SPEC-3, with the OSError as its cause, when there is no such directory.
    """
    with opened(open_rootfs(rootfs)) as root_fd:
        return read_image_facts(root_fd, driver_version, mounts)


def open_rootfs(rootfs: str) -> int:
    """Return an O_PATH descriptor of a container's root directory; raises SpecError OCIGPU-SPEC-3."""
    try:
        return os.open(rootfs, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SpecError("OCIGPU-SPEC-3", f"open rootfs {rootfs}: {error.strerror}") from error


def read_image_facts(root_fd: int, driver_version: str, mounts: "Iterable[str] | None" = None) -> "ImageFacts":
    """Return the facts of the image below ``root_fd``, for a driver of version ``driver_version`` ("550.163.01").

    Debian's family keeps libraries in a directory named after the architecture; everything else has /usr/lib64.
    ``mounts``: where the container will have mounts; None: unknown, then its loader cache is not inspected.  Needs no
    privileges except read access.  Never raises for anything that an image contains.
    """
    from ocigpu.core.facts import ImageFacts

    facts = ImageFacts(*read_layout(root_fd))
    stale_cache = "it was not inspected"
    if mounts is not None and facts.libc == "glibc":
        from ocigpu.provision.image_cache import why_not_current  # mode spec does without

        stale_cache = why_not_current(root_fd, TRIPLETS.get(os.uname().machine, ""), mounts)
    facts = facts._replace(stale_cache=stale_cache)
    if not has_compat(root_fd):
        return facts
    from ocigpu.provision.compat import read_compat, suits_driver  # few images need it

    compat = read_compat(root_fd, COMPAT_DIR)
    if compat is None or not suits_driver(compat, driver_version):
        return facts
    return facts._replace(compat_dir=compat.directory, compat_major=compat.version[0])


def has_compat(root_fd: int) -> bool:
    """Tell whether the image may have CUDA compatibility libraries: then its facts depend on the driver too."""
    return exists_inside(root_fd, COMPAT_DIR)


def read_layout(root_fd: int) -> tuple[str, str, str]:
    """Return library_dir, library_dir32 and libc, as ImageFacts has them."""
    library_dir = read_library_dir(root_fd)
    debian = library_dir != "/usr/lib64"
    return library_dir, _library_dir32(root_fd, debian, os.uname().machine, library_dir), read_libc(root_fd)


def read_library_dir(root_fd: int) -> str:
    """Return where the image has its 64-bit libraries."""
    return f"/usr/lib/{TRIPLETS[os.uname().machine]}" if is_debian(root_fd) else "/usr/lib64"


def is_debian(root_fd: int) -> bool:
    """Tell whether the image keeps its libraries where Debian's family does."""
    return os.uname().machine in TRIPLETS and exists_inside(root_fd, "/etc/debian_version")


def _library_dir32(root_fd: int, debian: bool, machine: str, library_dir: str) -> str:
    if debian:
        return "/usr/lib/i386-linux-gnu" if machine == "x86_64" else "/usr/lib32"
    if not exists_inside(root_fd, "/usr/lib32"):
        lib, lib64 = _identity(root_fd, "/usr/lib"), _identity(root_fd, library_dir)
        if lib is not None and lib != lib64:
            return "/usr/lib"
    return "/usr/lib32"


def _identity(root_fd: int, path: str) -> tuple[int, int] | None:
    status = status_inside(root_fd, path)
    return (status.st_dev, status.st_ino) if status is not None else None


def read_libc(root_fd: int) -> str:
    """Tell the C library ("glibc", "musl", "") by the name of its loader, the file every dynamic program names.

    This machine's loaders are looked for by name: only a part of a large directory is listed, and which part is the
    file system's choice.  Loaders of other names are looked for in what is listed.
    """
    machine = os.uname().machine
    triplet = TRIPLETS.get(machine, "")
    directories = (*_LOADER_DIRS, f"/lib/{triplet}", f"/usr/lib/{triplet}")
    for name, libc in LOADERS.get(machine, ()):
        if any(exists_inside(root_fd, f"{directory}/{name}") for directory in directories):
            return libc
    found = ""
    for directory in directories:
        for name in list_inside(root_fd, directory):
            if name.startswith("ld-linux") and ".so" in name:
                return "glibc"
            if name.startswith("ld-musl-"):
                found = "musl"
    return found


def read_nvidia_nodes(root_fd: int) -> tuple[ContainerNode, ...]:
    """Return the character devices /dev/nvidia<N> and /dev/nvidia-caps/nvidia-cap<N> of a container, by path.

    The numbers are read from the nodes, whatever their names are.
    """
    found = []
    for directory, prefix in (("/dev", "nvidia"), ("/dev/nvidia-caps", "nvidia-cap")):
        for name in list_inside(root_fd, directory):
            digits = name.removeprefix(prefix)
            if digits != name and digits.isascii() and digits.isdigit():
                node = read_device(root_fd, f"{directory}/{name}")
                if node is not None:
                    found.append(node)
    return tuple(found)


def read_device(root_fd: int, path: str) -> ContainerNode | None:
    """Return the character device at a path of the container, None if there is none; links are not followed."""
    status = status_inside(root_fd, path, os.O_NOFOLLOW)
    if status is None or not stat.S_ISCHR(status.st_mode):
        return None
    return ContainerNode(path, os.major(status.st_rdev), os.minor(status.st_rdev))
