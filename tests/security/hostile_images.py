"""Images that attack: how each is built, which ways it is meant for, and what may come of it.

Numbers are those of the battery, which is listed in test_security_images.py.
"""

import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from security_lab import GIVERS, LIBRARY_DIR, MERGE, VERSION, WAYS, Build, Edit, Marker, fill, no_change
from support.bundle import replace
from support.machine import TRIPLET

from ocigpu.gpus.libraries.ldcache import NEW_MAGIC

COMPAT = "usr/local/cuda/compat"
COMPAT_READERS = (*GIVERS, "enable-cuda-compat")


class Attack(NamedTuple):
    """``ways`` it is meant for; ``starts``: those of them whose container starts all the same (None: all).

    ``of_runtime``: links that the low-level runtime itself makes on the host, for a container without GPUs too.
    ``volume``: where the container has the marker as a volume.
    """

    number: int
    build: Build
    ways: tuple[str, ...] = GIVERS
    starts: tuple[str, ...] | None = None
    edit: Edit = no_change
    of_runtime: tuple[str, ...] = ()
    volume: str = ""

    def must_start(self, way: str) -> bool:
        return self.starts is None or way in self.starts


ATTACKS: dict[str, Attack] = {}


def attack(name: str, number: int, build: Build, *ways: str, **more: object) -> None:
    assert name not in ATTACKS
    ATTACKS[name] = Attack(number, build, ways or GIVERS, **more)


def place_link(path: str, target: Callable[[Marker], str]) -> Build:
    def build(rootfs: Path, marker: Marker) -> None:
        replace(rootfs / path, target(marker))

    return build


# 1: the directory of compatibility libraries is a link out of the root

for form, text in {"absolute": "/../../../../", "relative": "../../../../../../../..", "root": "/"}.items():
    attack(f"compat is a link to the top, {form}", 1, place_link(COMPAT, lambda _, text=text: text), *COMPAT_READERS)


def compat_on_the_host(path: str) -> Build:
    def build(rootfs: Path, marker: Marker) -> None:
        library = next((rootfs.parents[2] / "host-rich" / LIBRARY_DIR[1:]).glob("libcuda.so.[0-9]*.*"))
        shutil.copy(library, marker.path / "cuda/compat/libcuda.so.999.1")
        below = {"usr/local": "", "usr/local/cuda": "/cuda", COMPAT: "/cuda/compat"}[path]
        replace(rootfs / path, marker.absolute + below)

    return build


for name in ("usr/local", "usr/local/cuda", COMPAT):
    attack(f"/{name} is a link to the host's libraries", 1, compat_on_the_host(name), *COMPAT_READERS)


# 2: the newest compatibility library is something else than a file

NEWEST = f"{COMPAT}/libcuda.so.999.1"


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_device(path: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 1))


def make_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def odd_compat(make: Callable[[Path], None]) -> Build:
    def build(rootfs: Path, marker: Marker) -> None:
        path = rootfs / NEWEST
        path.parent.mkdir(parents=True)
        make(path)
        (path.parent / "libcuda.so.1").symlink_to(path.name)

    return build


for what, make in {
    "a directory": Path.mkdir,
    "a FIFO": make_fifo,
    "a device": make_device,
    "a socket": make_socket,
    "a link to a FIFO": lambda path: (os.mkfifo(f"{path}.fifo"), path.symlink_to(f"{path.name}.fifo"))[0],
    "a link to /proc/kmsg": lambda path: path.symlink_to("/proc/kmsg"),
}.items():
    attack(f"the newest compatibility library is {what}", 2, odd_compat(make), *COMPAT_READERS)


def compat_is_a_secret(rootfs: Path, marker: Marker) -> None:
    replace(rootfs / NEWEST, f"{marker.absolute}/secret")


attack("the newest compatibility library is a link to a secret of the host", 2, compat_is_a_secret, *COMPAT_READERS)


# 3: directories that things are put into are links out of the root

DIRECTORIES: dict[str, tuple[str, ...]] = {
    LIBRARY_DIR[1:]: ("create-symlinks", "update-ldcache", "chmod"),
    "usr/lib64": (),
    "usr/lib": ("create-symlinks", "chmod"),
    "usr/bin": ("create-symlinks", "chmod"),
    "dev": ("update-application-profile",),
    "run": ("create-symlinks", "chmod"),
    "usr/lib/firmware": ("create-symlinks", "chmod"),
    "etc/nvidia": ("update-application-profile", "chmod"),
    "etc/ld.so.conf.d": ("update-ldcache", "enable-cuda-compat"),
    "etc": ("update-ldcache", "enable-cuda-compat", "update-application-profile", "chmod"),
    "usr": ("create-symlinks", "update-ldcache", "chmod"),
}
OF_RUNC = ("fd", "ptmx", "stdin", "stdout", "stderr")
"""Links that runc 1.1.5 makes in /dev, wherever an image's link of that name leads: nothing of ours is among them."""
for name, hooks in DIRECTORIES.items():
    own = OF_RUNC if name == "dev" else ()
    for form, text in {"to the host": lambda m: m.absolute, "upwards": lambda m: m.relative()}.items():
        case = f"/{name} is a link {form}"
        attack(case, 3, place_link(name, text), *GIVERS, *hooks, starts=(), of_runtime=own)


def fedora(rootfs: Path, marker: Marker) -> None:
    (rootfs / "etc/debian_version").unlink()
    replace(rootfs / "usr/lib64", marker.absolute)


attack("/usr/lib64, where libraries go, is a link to the host", 3, fedora, starts=())


def driver_proc(rootfs: Path, marker: Marker) -> None:
    replace(rootfs / "proc", marker.absolute)


attack("/proc is a link to the host", 3, driver_proc, *GIVERS, "disable-device-node-modification", starts=())


# 4: the very names that are put there are links out of the root


def names_of_the_driver(rootfs: Path) -> list[str]:
    """Return the paths that a container gets files or links at."""
    host = rootfs.parents[2] / "host-rich"
    libraries = [
        f"{LIBRARY_DIR[1:]}/{path.name}" for path in sorted((host / LIBRARY_DIR[1:]).iterdir()) if not path.is_dir()
    ]
    programs = [f"usr/bin/{path.name}" for path in sorted((host / "usr/bin").iterdir())]
    firmware = [f"usr/lib/firmware/nvidia/{VERSION}/{name}" for name in ("gsp_ga10x.bin", "gsp_tu10x.bin")]
    made = ["libGLX_indirect.so.0", "libcuda.so", "gbm/nvidia-drm_gbm.so", "libnvidia-opticalflow.so"]
    return [
        *libraries,
        *programs,
        *firmware,
        *(f"{LIBRARY_DIR[1:]}/{name}" for name in made),
        "etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf",
        "etc/ld.so.conf.d/00-ocigpu.conf",
        "etc/ld.so.conf.d/00-compat.conf",
        "run/nvidia-persistenced/socket",
        "run/nvidia-fabricmanager/socket",
        "etc/vulkan/icd.d/nvidia_icd.json",
        "etc/OpenCL/vendors/nvidia.icd",
        "usr/lib/firmware/ocigpu/gsp.bin",
        "usr/bin/nvidia-link",
    ]


def names_are_links(target: Callable[[Marker, str], str]) -> Build:
    def build(rootfs: Path, marker: Marker) -> None:
        for path in dict.fromkeys(names_of_the_driver(rootfs)):
            if not (rootfs / path).is_dir():
                replace(rootfs / path, target(marker, Path(path).name))

    return build


ALL_BUT_CHMOD = tuple(way for way in WAYS if way != "chmod")
for form, target in {
    "to a file of the host": lambda marker, _: f"{marker.absolute}/file",
    "to a file of the host, upwards": lambda marker, _: f"{marker.relative()}/file",
    "to nothing on the host": lambda marker, name: f"{marker.absolute}/new-{name}",
}.items():
    attack(f"every name of the driver is a link {form}", 4, names_are_links(target), *ALL_BUT_CHMOD, starts=())
    attack(
        f"files whose mode is set are links {form}",
        4,
        place_link(f"{LIBRARY_DIR[1:]}/libcuda.so.{VERSION}", lambda m, target=target: target(m, "library")),
        "chmod",
        starts=(),
    )


def without_dev(config: dict[str, object]) -> None:
    config["mounts"] = [mount for mount in config["mounts"] if not mount["destination"].startswith("/dev")]


def nodes_are_links(rootfs: Path, marker: Marker) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "dri", "nvidia-modeset"):
        (rootfs / "dev" / name).symlink_to(f"{marker.absolute}/file")


attack("the image's own /dev has links to the host", 4, nodes_are_links, starts=(), edit=without_dev)


# 25: the same places are a volume, or links into one: what is made there would stay, for others to read

VOLUME = "/vol"
PLACES: dict[str, tuple[str, ...]] = {
    **{name: hooks for name, hooks in DIRECTORIES.items() if name != "dev"},
    f"usr/lib/{TRIPLET}/gbm": ("create-symlinks",),
    "etc/nvidia/nvidia-application-profiles-rc.d": ("update-application-profile",),
    "run/nvidia-persistenced": ("create-symlinks",),
    "usr/lib/firmware/nvidia": (),
}


def place_volume(rootfs: Path, marker: Marker) -> None:
    assert marker.is_volume


def place_link_to_volume(path: str) -> Build:
    def build(rootfs: Path, marker: Marker) -> None:
        (rootfs / VOLUME[1:]).mkdir()
        replace(rootfs / path, VOLUME)

    return build


for name, hooks in PLACES.items():
    attack(f"/{name} is a volume", 25, place_volume, *GIVERS, MERGE, *hooks, starts=(), volume=f"/{name}")
    case = f"/{name} is a link into a volume"
    attack(case, 25, place_link_to_volume(name), *GIVERS, MERGE, *hooks, starts=(), volume=VOLUME)
attack("/dev is a volume", 25, place_volume, starts=(), volume="/dev", edit=without_dev)
for form, text in {"a file of": f"{VOLUME}/file", "nothing in": f"{VOLUME}/new"}.items():
    attack(
        f"every name of the driver is a link to {form} a volume",
        25,
        names_are_links(lambda _, name, text=text: text if text.endswith("file") else f"{text}-{name}"),
        *ALL_BUT_CHMOD,
        starts=(),
        volume=VOLUME,
    )
for name in ("ld.so.cache", "ld.so.conf", "ld.so.cache~"):
    attack(
        f"/etc/{name} is a link to a file of a volume",
        25,
        place_link(f"etc/{name}", lambda _, name=name: f"{VOLUME}/{name}"),
        *GIVERS,
        MERGE,
        "update-ldcache",
        "enable-cuda-compat",
        starts=(),
        volume=VOLUME,
    )
attack(
    "what a mode is set of is a link to a file of a volume",
    25,
    place_link(f"{LIBRARY_DIR[1:]}/libcuda.so.{VERSION}", lambda _: f"{VOLUME}/libcuda.so.1"),
    "chmod",
    volume=VOLUME,
)
attack(
    "the volume is mounted on the root, by a link", 25, place_link(VOLUME[1:], lambda _: "/"), starts=(), volume=VOLUME
)


# 10: the loader's files lead elsewhere or are too much

CACHE_WRITERS = (*GIVERS, MERGE, "update-ldcache", "enable-cuda-compat")
for name in ("ld.so.cache", "ld.so.conf", "ld.so.cache~"):
    attack(
        f"/etc/{name} is a link to the host",
        10,
        place_link(f"etc/{name}", lambda m, name=name: f"{m.absolute}/{name}"),
        *CACHE_WRITERS,
        starts=(),
    )
    attack(
        f"/etc/{name} is a link upwards",
        10,
        place_link(f"etc/{name}", lambda m, name=name: f"{m.relative()}/{name}"),
        *CACHE_WRITERS,
        starts=(),
    )


def make_odd(name: str, make: Callable[[Path], None]) -> Build:
    def build(rootfs: Path, marker: Marker) -> None:
        path = rootfs / "etc" / name
        path.unlink(missing_ok=True)
        make(path)

    return build


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)


for name in ("ld.so.cache", "ld.so.conf"):
    attack(f"/etc/{name} is a directory", 10, make_odd(name, Path.mkdir), *CACHE_WRITERS, starts=())
    attack(f"/etc/{name} is 1 GiB of nothing", 10, make_odd(name, sparse), *CACHE_WRITERS, starts=())


def includes(rootfs: Path, marker: Marker) -> None:
    lines = [f"include {marker.absolute}/*", "include /proc/1/root/etc/shadow", f"{marker.absolute}/lib"]
    (rootfs / "etc/ld.so.conf").write_text("\n".join([*lines, f"include {marker.relative()}/ld.so.conf", ""]))


attack("the loader's configuration includes files of the host", 10, includes, *CACHE_WRITERS)


def with_lying_cache(build: Build, cache: bytes = NEW_MAGIC + bytes(28)) -> Build:
    """Return an image whose cache claims to be newer than all else, so that it is to be merged."""

    def built(rootfs: Path, marker: Marker) -> None:
        build(rootfs, marker)
        path = rootfs / "etc/ld.so.cache"
        path.unlink(missing_ok=True)
        path.write_bytes(cache)
        os.utime(path, (1 << 32, 1 << 32))

    return built


def endless_paths(rootfs: Path, marker: Marker) -> None:
    (rootfs / "etc/ld.so.conf").write_text("include /etc/ld.so.conf.d/*.conf\n")
    for number in range(8):
        fill(rootfs / f"etc/ld.so.conf.d/{number}.conf", f"/{number}{'/a' * 30_000}\n".encode())


def unchanged(_: Path, __: Marker) -> None:
    return


for name, build in {
    "includes files of the host": includes,
    "is a FIFO": make_odd("ld.so.conf", os.mkfifo),
    "leads to the host": place_link("etc/ld.so.conf.d", lambda m: m.absolute),
    "names a directory that leads to the host": place_link("usr/local/lib", lambda m: m.relative()),
    "names paths without end": endless_paths,
}.items():
    case = f"the cache is newer than all else, and the loader's configuration {name}"
    attack(case, 10, with_lying_cache(build), *CACHE_WRITERS, starts=())
case = "the cache is newer than all else, and ends after its header"
attack(case, 10, with_lying_cache(unchanged, NEW_MAGIC + b"\x05" + bytes(27)), *CACHE_WRITERS, starts=())


def malformed_libraries(rootfs: Path, marker: Marker) -> None:
    """1,000 of them; the load of 100,000 is in test_security_load.py."""
    good = (rootfs / LIBRARY_DIR[1:] / "libm.so.6").read_bytes()[:20000]
    for number in range(1000):
        at = number * 8 % 1000
        broken = good[:at] + os.urandom(8) + good[at + 8 :]
        fill(rootfs / LIBRARY_DIR[1:] / f"libbad{number}.so.1", broken[: 64 + number * 19])


# 11
attack("the library directory has 1,000 malformed libraries", 11, malformed_libraries, *CACHE_WRITERS)

assert {way for case in ATTACKS.values() for way in case.ways} == set(WAYS)
