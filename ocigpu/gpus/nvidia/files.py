"""Programs, firmware, sockets and configuration files that come with the driver.

All are looked for at fixed places below the driver root; no search path of the caller's environment is used.
"""

import os

from ocigpu.core import rawjson
from ocigpu.core.config_json import clean_path
from ocigpu.core.errors import UNUSABLE
from ocigpu.core.facts import HostFile
from ocigpu.gpus.nvidia.libraries import TABLE, home_directories, split_name
from ocigpu.gpus.tree import Tree, read_bytes, read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    DaemonFile = tuple[str, tuple[str, ...], str]

GRAPHICS = ("graphics", "display")

BINARIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("nvidia-smi", ("utility",)),
    ("nvidia-debugdump", ("utility",)),
    ("nvidia-persistenced", ("utility",)),
    ("nv-fabricmanager", ("utility",)),
    ("nvidia-imex", ("utility",)),
    ("nvidia-imex-ctl", ("utility",)),
    ("nvidia-cuda-mps-control", ("compute",)),
    ("nvidia-cuda-mps-server", ("compute",)),
    ("nvidia-xconfig", GRAPHICS),
)
"""In the order in which nvidia-container-cli lists those that it knows."""
BINARY_DIRECTORIES = (
    "/usr/bin",
    "/usr/sbin",
    "/bin",
    "/sbin",
    "/usr/local/bin",
    "/run/current-system/sw/bin",  # NixOS
    "/opt/bin",
    "/usr/libexec/nvidia/tesla/bin",  # Bottlerocket
    "/usr/local/glibc/usr/bin",  # Talos
)
FIRMWARE_DIRECTORIES = (
    "/lib/firmware/updates/{release}",
    "/lib/firmware/updates",
    "/lib/firmware/{release}",
    "/lib/firmware",
    "/usr/lib/firmware",
)
"""Where the kernel looks, after the directory that its parameter names (its documentation, fw_search_path)."""
FIRMWARE_PARAMETER = "module/firmware_class/parameters/path"
SOCKETS: "tuple[DaemonFile, ...]" = (
    ("/run/nvidia-persistenced/socket", ("utility",), "socket"),
    ("/run/nvidia-fabricmanager/socket", ("utility",), "socket"),
    ("/tmp/nvidia-mps", ("compute",), "directory"),
)
SHARED_CONFIGS = (
    "glvnd/egl_vendor.d/10_nvidia.json",
    "egl/egl_external_platform.d/15_nvidia_gbm.json",
    "egl/egl_external_platform.d/10_nvidia_wayland.json",
    "egl/egl_external_platform.d/09_nvidia_wayland2.json",
    "egl/egl_external_platform.d/20_nvidia_xcb.json",
    "egl/egl_external_platform.d/20_nvidia_xlib.json",
    "nvidia/nvoptix.bin",
    "X11/xorg.conf.d/10-nvidia.conf",
    "X11/xorg.conf.d/nvidia-drm-outputclass.conf",
)
"""Given to containers below /usr/share."""
OPENCL_ICD = "OpenCL/vendors/nvidia.icd"
"""Names libnvidia-opencl, and is given with it: without this file OpenCL finds no platform (nvidia-container-toolkit
issue 682)."""
ETC_CONFIGS = (
    OPENCL_ICD,
    "vulkan/icd.d/nvidia_icd.json",
    "vulkan/icd.d/nvidia_icd.{machine}.json",
    "vulkan/icd.d/nvidia_layers.json",
    "vulkan/implicit_layer.d/nvidia_layers.json",
)
"""Given to containers below /etc."""
CONFIG_DIRECTORIES = (
    "/etc",
    "/usr/local/share",
    "/usr/share",
    "/run/opengl-driver/share",
    "/run/opengl-driver/etc",
    "/usr/local/glibc/usr/share",
    "/usr/local/glibc/etc",
)
XORG_DIRECTORIES = (
    "/usr/lib/xorg/modules",
    "/usr/lib64/xorg/modules",
    "/usr/lib/{machine}-linux-gnu/xorg/modules",
    "/usr/lib/{machine}-linux-gnu/nvidia/xorg",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/nvidia/xorg",  # Arch Linux
    "/usr/local/lib/xorg/modules",  # Talos
    "/usr/local/glibc/usr/lib64/xorg/modules",
)
XORG_SUBDIRECTORIES = ("", "/drivers", "/extensions", "/updates/drivers", "/updates/extensions")
MAX_NAMED = 1 << 16
GDS_FILES: "tuple[DaemonFile, ...]" = (("/run/udev", (), "directory"), ("/etc/cufile.json", (), "file"))
"""What GPUDirect Storage needs beside its nodes."""


def _first(tree: Tree, paths: "Iterable[str]", kind: str = "file") -> str:
    """Return the resolved host path of the first path that is of this kind, else ""."""
    for path in paths:
        found = tree.find(path)
        if found and tree.kind(found) == kind:
            return found
    return ""


def read_binaries(tree: Tree) -> tuple[HostFile, ...]:
    """Return the driver's programs; containers get them in /usr/bin."""
    found = []
    more = home_directories(tree, "bin")
    for name, capabilities in BINARIES:
        host_path = _first(tree, (f"{directory}/{name}" for directory in (*BINARY_DIRECTORIES, *more)))
        if host_path:
            host_path = _unpatched(tree, host_path) or host_path
            found.append(HostFile(host_path, f"/usr/bin/{name}", capabilities))
    return tuple(found)


def _unpatched(tree: Tree, host_path: str) -> str:
    """Return the host path of a program as the driver brings it, "" where there is none beside the one that was found.

    NixOS changes programs for a loader that only its store has, and keeps the others for containers (nixpkgs,
    nvidia-x11/builder.sh).
    """
    directory, _, name = host_path.removeprefix(tree.prefix).rpartition("/")
    return _first(tree, (f"{directory.removesuffix('/bin')}/origBin/{name}",)) if directory.endswith("/bin") else ""


def read_firmware(trees: tuple[Tree, ...], version: str, sys: str) -> tuple[HostFile, ...]:
    """Return the GSP firmware images of this driver version; every container with a GPU gets them.

    They come from the first directory that has some, and containers have them in /lib/firmware.  ``trees``: the
    driver's and the host's, where the kernel looks.  ``sys``: sysfs.
    """
    named = read_firmware_parameter(sys)
    usual = [directory.format(release=os.uname().release) for directory in FIRMWARE_DIRECTORIES]
    places = [(trees[-1], named)] if named.startswith("/") else []
    for tree in trees if version else ():
        places += [(tree, directory) for directory in (*usual, *home_directories(tree, "firmware"))]
    for tree, directory in places if version else ():
        resolved = tree.resolve(f"{directory}/nvidia/{version}")
        found = tree.search(resolved) if resolved else []
        names = [name for name in found if name.startswith("gsp") and name.endswith(".bin")]
        if names:
            files = ((name, tree.find(f"{resolved}/{name}")) for name in names)
            return tuple(
                HostFile(host_path, f"/lib/firmware/nvidia/{version}/{name}")
                for name, host_path in files
                if host_path and tree.kind(host_path) == "file"
            )
    return ()


def read_firmware_parameter(sys: str) -> str:
    """Return the directory in which the kernel searches firmware first (its parameter), "" for none."""
    return (read_text(f"{sys}/{FIRMWARE_PARAMETER}") or "").strip()


def read_daemon_files(trees: tuple[Tree, ...], wanted: "Iterable[DaemonFile]" = SOCKETS) -> tuple[HostFile, ...]:
    """Return sockets and directories of daemons that exist; the first tree that has one wins."""
    found = []
    for path, capabilities, kind in wanted:
        for tree in trees:
            host_path = _first(tree, (path, f"/var{path}") if path.startswith("/run/") else (path,), kind)
            if host_path and not _is_planted_link(tree, path):
                found.append(HostFile(host_path, path, capabilities, kind))
                break
    return tuple(found)


def _is_planted_link(tree: Tree, path: str) -> bool:
    """Tell whether a path in /tmp is a symbolic link: anybody can make one there, to have its target given away."""
    directory, _, name = path.rpartition("/")
    return directory == "/tmp" and os.path.islink(f"{tree.find(directory)}/{name}")


def read_configs(tree: Tree, version: str, machine: str, directories: tuple[str, ...] = ()) -> tuple[HostFile, ...]:
    """Return configuration files and X.Org modules for OpenCL, graphics and display.

    ``directories``: directories of the host in which configuration files are searched, instead of the tree's usual
    ones.
    """
    found = []
    shared = Tree("") if directories else tree
    usual = (*CONFIG_DIRECTORIES, *home_directories(tree, ""))
    for target, names in (("/usr/share", SHARED_CONFIGS), ("/etc", ETC_CONFIGS)):
        for pattern in names:
            name = pattern.format(machine=machine)
            host_path = _first(shared, (f"{directory}/{name}" for directory in directories or usual))
            if host_path:
                capabilities = TABLE["libnvidia-opencl"][1] if name == OPENCL_ICD else GRAPHICS
                found.append(HostFile(host_path, f"{target}/{name}", capabilities))
    return (*found, *_xorg_modules(tree, version, machine))


def read_named_libraries(configs: tuple[HostFile, ...]) -> tuple[tuple[str, str], ...]:
    """Return the container's path of each file that names a library of the driver by its path, and that path."""
    files = [
        (item, read_named_library(item.host_path)) for item in configs if item.host_path.endswith((".json", ".icd"))
    ]
    return tuple((item.container_path, library) for item, library in files if library)


def read_named_library(host_path: str) -> str:
    """Return the absolute path of the library that a file for GLVND, EGL, Vulkan or OpenCL names, "" for none.

    Some systems' packages write a path, such as openSUSE's and NixOS': it is one of that system alone.
    """
    try:
        text = (read_bytes(host_path, MAX_NAMED) or b"").decode()
        path = text.strip() if host_path.endswith(".icd") else _library_of(rawjson.parse(text))
    except UNUSABLE:
        return ""
    is_driver = split_name(path.rpartition("/")[2])[0] in TABLE
    return path if path.startswith("/") and is_driver and clean_path(path) == path else ""


def _library_of(document: "Any") -> str:
    """Return the first library_path in an object like {"ICD": {...}} or {"layers": [{...}, ...]}, "" for none."""
    for value in document.values():
        for part in value if isinstance(value, list) else (value,):
            if isinstance(part, dict) and "library_path" in part:
                return str(part["library_path"])
    return ""


def _xorg_modules(tree: Tree, version: str, machine: str) -> tuple[HostFile, ...]:
    """X looks for its modules where the host's X does: the container gets them at the host's path."""
    found: dict[str, HostFile] = {}
    for pattern in XORG_DIRECTORIES:
        directory = pattern.format(machine=machine)
        if not tree.resolve(directory):
            continue
        for subdirectory in XORG_SUBDIRECTORIES:
            for name in ("nvidia_drv.so", f"libglxserver_nvidia.so.{version}", "libglxserver_nvidia.so"):
                path = f"{directory}{subdirectory}/{name}"
                host_path = _first(tree, (path,))
                if host_path:
                    found.setdefault(host_path, HostFile(host_path, path, GRAPHICS))
    return tuple(found.values())
