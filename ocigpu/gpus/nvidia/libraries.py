"""The driver's user-space libraries: which there are, where they lie, which capability needs them.

The table below only classifies; what counts as the driver's is the name and the exact driver version after ".so.".
Names and their grouping are the driver's own (README of the Linux driver, chapter "Installed components").
"""

import os

from ocigpu.core.facts import Library
from ocigpu.core.record import NamedTuple
from ocigpu.gpus.libraries.elf import EM_386, EM_AARCH64, EM_ARM, EM_X86_64, read_elf
from ocigpu.gpus.libraries.ldcache import MAX_CACHE, parse_ldcache
from ocigpu.gpus.tree import Tree, read_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


class Architecture(NamedTuple):
    """What differs between machines: multiarch names, ELF machines and loader-cache flags, 64 then 32 bit."""

    triplet: str
    triplet32: str
    machine: int
    machine32: int
    flags: int
    flags32: int


ARCHITECTURES = {
    "x86_64": Architecture("x86_64-linux-gnu", "i386-linux-gnu", EM_X86_64, EM_386, 0x0300, 0x0000),
    "aarch64": Architecture("aarch64-linux-gnu", "arm-linux-gnueabihf", EM_AARCH64, EM_ARM, 0x0A00, 0x0900),
}
"""By ``uname -m``; flags from glibc's sysdeps/generic/ldconfig.h."""

_COMPUTE = "compute video"
_GRAPHICS = "graphics display"
_GROUPS = (
    ("utility", "libnvidia-ml libnvidia-cfg libnvidia-nscq libnvidia-sandboxutils"),
    (_COMPUTE, "libcuda libcudadebugger libnvidia-opencl"),
    (f"{_COMPUTE} {_GRAPHICS}", "libnvidia-gpucomp"),
    (_COMPUTE, "libnvidia-ptxjitcompiler libnvidia-fatbinaryloader"),
    (f"{_COMPUTE} {_GRAPHICS}", "libnvidia-allocator"),
    (_COMPUTE, "libnvidia-compiler libnvidia-pkcs11 libnvidia-pkcs11-openssl3 libnvidia-nvvm libnvidia-nvvm70"),
    (_COMPUTE, "libnvidia-tileiras"),
    ("ngx", "libnvidia-ngx"),
    ("video", "libvdpau_nvidia libnvidia-encode libnvidia-opticalflow libnvcuvid"),
    (_GRAPHICS, "libnvidia-eglcore libnvidia-glcore libnvidia-tls libnvidia-glsi libnvidia-fbc libnvidia-ifr"),
    (_GRAPHICS, "libnvidia-rtcore libnvoptix libnvidia-egl-gbm libnvidia-egl-wayland libnvidia-egl-wayland2"),
    (_GRAPHICS, "libnvidia-egl-xcb libnvidia-egl-xlib libnvidia-vulkan-producer"),
    (_GRAPHICS, "libGLX_nvidia libEGL_nvidia libGLESv2_nvidia libGLESv1_CM_nvidia libnvidia-glvkspirv libnvidia-cbl"),
    (_GRAPHICS, "libnvidia-present libnvidia-vksc-core"),
)
"""Capabilities, and the libraries that any of them brings, in the order in which nvidia-container-cli lists them."""

TABLE: dict[str, tuple[int, tuple[str, ...]]] = {
    name: (order, tuple(capabilities.split()))
    for order, (name, capabilities) in enumerate((name, group) for group, names in _GROUPS for name in names.split())
}
"""Library name before ".so" to its place in the output and the capabilities that bring it."""

OWN_VERSION = frozenset({
    "libnvidia-egl-gbm", "libnvidia-egl-wayland", "libnvidia-egl-wayland2", "libnvidia-egl-xcb", "libnvidia-egl-xlib",
    "libnvidia-nvvm70",
})  # fmt: skip
"""Libraries that the driver ships with a version of their own."""

REQUIRED = ("libcuda", "libnvidia-ml")
"""When the loader's cache lacks one of these, directories are searched too."""

_PREFIXES = ("libnvidia-", "libcuda", "libnvcuvid.", "libnvoptix.", "libvdpau_nvidia.", "libGL", "libEGL_nvidia.")
_BYTE_PREFIXES = tuple(prefix.encode() for prefix in _PREFIXES)

_DIRECTORIES = (
    "/usr/lib64",
    "/usr/lib/{triplet}",
    "/usr/lib",
    "/lib64",
    "/lib",
    "/lib/{triplet}",
    "/usr/lib/{triplet}/nvidia/current",
    "/run/opengl-driver/lib",  # NixOS
    "/usr/local/glibc/usr/lib64",  # Talos
    "/usr/local/glibc/usr/lib",
    "/usr/local/lib",
)
HOMES = ("/usr/local/nvidia", "/home/kubernetes/bin/nvidia", "/var/lib/nvidia", "/opt/nvidia")
"""Directories that some systems keep the whole driver in, with bin, lib64 and firmware, and without an entry in the
loader's cache: Google's Container-Optimized OS (cos-gpu-installer: its last three are one), Fedora CoreOS.  In the
last one Flatcar has one for each version, and a link "current" (setup-nvidia)."""
_TESLA = "/usr/lib/nvidia/tesla"
"""Libraries of Bottlerocket (its packages kmod-*-nvidia), there or in a directory named after the version."""
_DIRECTORIES32 = ("/usr/lib32", "/usr/lib/{triplet32}", "/lib32", "/run/opengl-driver-32/lib")


def split_name(name: str) -> tuple[str, str]:
    """Split a library's file name: "libcuda.so.550.163.01" gives ("libcuda", "550.163.01"), no version gives ""."""
    base, _, rest = name.partition(".so")
    return base, rest[1:] if rest.startswith(".") else ""


def find_libraries(
    tree: Tree, ldcache: str, version: str, machine: str, directories: tuple[str, ...] = ()
) -> tuple[list[str], str]:
    """Return the resolved paths in the tree of files named like driver libraries, and a note on the cache ("": fine).

    Any version; without duplicates; the cache's first.  Directories are searched when the cache has no 64-bit libcuda
    or libnvidia-ml (of ``version``, when that is known).  ``directories``: search only in these.
    """
    architecture = ARCHITECTURES.get(machine)
    if architecture is None:
        return [], f"no table of library directories for {machine}"
    found: dict[str, None] = {}
    if directories:
        _search_directories(tree, list(directories), found)
        return list(found), ""
    note = ""
    cache_path = tree.find(ldcache)
    data = read_bytes(cache_path, MAX_CACHE) if cache_path else None
    if data is not None:
        flags = (architecture.flags, architecture.flags32)
        entries, problem = parse_ldcache(data, _BYTE_PREFIXES, flags)
        note = f"{cache_path}: {problem}; directories are searched" if problem else ""
        beside: dict[str, None] = {}
        for soname, path in entries:
            if split_name(soname)[0] in TABLE:
                resolved = tree.resolve(path)
                _add(found, resolved)
                directory = resolved.rpartition("/")[0]
                if directory and directory != tree.resolve(path.rpartition("/")[0]):
                    beside.setdefault(directory)  # alternatives and stores link to the driver's own directory
        _search_directories(tree, list(beside), found)
    if missing_libraries(found, version, tree, machine):
        _search_directories(tree, _usual_directories(tree, architecture), found)
    return list(found), note


def _add(found: dict[str, None], resolved: str) -> None:
    if resolved and split_name(resolved.rpartition("/")[2])[0] in TABLE:
        found.setdefault(resolved)


def missing_libraries(paths: "Iterable[str]", version: str, tree: Tree, machine: str) -> list[str]:
    """Return which of :data:`REQUIRED` the 64-bit files of this version ("": of any) are not among the paths."""
    paths = list(paths)
    return [name for name in REQUIRED if not _find_native(paths, name, version, tree, machine)]


def _find_native(paths: list[str], name: str, version: str, tree: Tree, machine: str) -> str:
    architecture = ARCHITECTURES.get(machine)
    for path in paths:
        base, found = split_name(path.rpartition("/")[2])
        if base == name and version in ("", found):
            elf = read_elf(tree.host(path))
            if elf is not None and architecture is not None and elf.machine == architecture.machine:
                return path
    return ""


def _usual_directories(tree: Tree, architecture: Architecture) -> list[str]:
    patterns = (*_DIRECTORIES, *_DIRECTORIES32)
    directories = [
        pattern.format(triplet=architecture.triplet, triplet32=architecture.triplet32) for pattern in patterns
    ]
    resolved = tree.resolve("/usr/lib")
    names = tree.search(resolved) if resolved else []
    directories += [f"/usr/lib/{name}" for name in names if name.startswith("nvidia")]
    tesla = tree.resolve(_TESLA)
    directories += [_TESLA, *(f"{_TESLA}/{name}" for name in tree.search(tesla)[:MAX_VERSIONS])] if tesla else []
    return directories + home_directories(tree, "lib64", "lib", "", "current/usr/lib64")


MAX_VERSIONS = 64


def home_directories(tree: Tree, *names: str) -> list[str]:
    """Return directories of these names in :data:`HOMES`, "" for the home itself, as far as they are root's."""
    paths = (f"{home}/{name}".rstrip("/") for home in HOMES for name in names)
    return list(filter(None, map(tree.owned, paths)))


def _search_directories(tree: Tree, directories: list[str], found: dict[str, None]) -> None:
    seen = set()
    for directory in directories:
        resolved = tree.resolve(directory)
        if not resolved or resolved in seen:
            continue
        seen.add(resolved)
        for name in tree.search(resolved):
            if name.startswith(_PREFIXES) and split_name(name)[0] in TABLE:
                _add(found, tree.resolve(f"{resolved}/{name}"))


def library_versions(paths: list[str]) -> list[str]:
    """Return the versions of libcuda and libnvidia-ml among the paths, without duplicates."""
    versions: dict[str, None] = {}
    for path in paths:
        base, version = split_name(path.rpartition("/")[2])
        if base in REQUIRED and version.count("."):
            versions.setdefault(version)
    return list(versions)


def find_nvml(paths: list[str], version: str, tree: Tree, machine: str) -> str:
    """Return the path in the tree of the 64-bit libnvidia-ml of this version, "" when there is none."""
    return _find_native(paths, "libnvidia-ml", version, tree, machine)


def read_libraries(tree: Tree, paths: list[str], version: str, machine: str) -> tuple[tuple[Library, ...], list[str]]:
    """Return the libraries among the paths that belong to driver ``version``, and notes on unreadable ones.

    Order: 64 bit before 32 bit; then utility, compute, ngx, video, graphics; one file per name and width (the first).
    """
    architecture = ARCHITECTURES.get(machine)
    if architecture is None:
        return (), []
    widths = {architecture.machine: 64, architecture.machine32: 32}
    notes = []
    found: dict[tuple[int, int, str], Library] = {}
    for path in (*paths, *_vdpau_paths(tree, paths, version)):
        name = path.rpartition("/")[2]
        base, file_version = split_name(name)
        if base not in TABLE or (file_version != version and base not in OWN_VERSION):
            continue
        host_path = tree.host(path)
        elf = read_elf(host_path)
        if elf is None or (elf.soname and split_name(elf.soname)[0] != base):
            notes.append(f"{host_path}: not a readable shared object of its name; passed over")
            continue
        bits = widths.get(elf.machine)
        if bits is None:
            continue
        order, capabilities = TABLE[base]
        found.setdefault((-bits, order, name), Library(host_path, name, elf.soname, capabilities, bits))
    return tuple(found[key] for key in sorted(found)), notes


def _vdpau_paths(tree: Tree, paths: list[str], version: str) -> list[str]:
    """The VDPAU library lies in a directory of its own, beside libcuda, that loader caches leave out."""
    directories: dict[str, None] = {}
    for path in paths:
        directory, _, name = path.rpartition("/")
        if split_name(name) == ("libcuda", version):
            directories.setdefault(directory)
    candidates = [tree.resolve(f"{directory}/vdpau/libvdpau_nvidia.so.{version}") for directory in directories]
    return [path for path in candidates if path]


def native_machine() -> str:
    """Return the machine's name as in :data:`ARCHITECTURES`; a 32-bit personality does not change it."""
    machine = os.uname().machine
    return {"i686": "x86_64", "armv8l": "aarch64"}.get(machine, machine)
