"""Files that runtimes and engines keep: read only if nobody but root and the calling user could have written them.

Somebody may name such a file who cannot write it, and write one who cannot name it: both are asked for.  Nothing is
opened before it is known to be a regular file, in a place where only trusted users write.
"""

import os
import stat
from typing import NamedTuple

from ocigpu.core.config_json import is_path
from ocigpu.core.errors import SpecError, quoted
from ocigpu.system.files import why_untrusted

MAX_LINKS = 40
"""The kernel's own limit of links in one path (path_resolution(7))."""
_LAYERS = ("aufs", "btrfs", "devicemapper", "fuse-overlayfs", "overlay", "overlay2", "vfs", "zfs")
"""Names of dockerd's storage drivers: directories beside "image" and "containers" of its data-root."""


class TrustedFile(NamedTuple):
    """What was read, and of which file: mode, uid and gid."""

    text: bytes
    mode: int
    uid: int
    gid: int


def read_trusted(path: str, limit: int, below: str = "") -> TrustedFile:
    """Return the content of a file, of ``limit`` bytes at most, that only root and the calling user could have written.

    Every directory on the way, every link and the file itself must be theirs and not be writable by others (a sticky
    directory may be); the file is no link, does not lie in what containers write (:func:`why_of_containers`) and not
    below the directory ``below``.  Raises SpecError OCIGPU-SPEC-1.
    """
    if not is_path(path):
        raise SpecError("OCIGPU-SPEC-1", f"read {quoted(path)}: not a path")
    try:
        fd, place = _open_by_steps(path)
        try:
            if cause := why_of_containers(place) or _why_below(place, below):
                raise _refused(path, cause)
            status = os.fstat(fd)
            if why_untrusted(status.st_uid, status.st_mode):
                cause = "others than root may write it, so it does not say what was granted"
                raise _refused(path, cause, f"Make it root's: chown root {path}; chmod go-w {path}")
            with open(f"/proc/self/fd/{fd}", "rb") as file:
                text = file.read(limit + 1)
        finally:
            os.close(fd)
    except OSError as error:
        raise SpecError("OCIGPU-SPEC-1", f"read {path}: {error.strerror or error}") from error
    if len(text) > limit:
        raise SpecError("OCIGPU-SPEC-1", f"read {path}: larger than {limit >> 20} MiB")
    return TrustedFile(text, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)


def _refused(path: str, cause: str, hint: str = "") -> SpecError:
    hint = hint or "What could be another's does not say what a container was granted. To look at it: ocigpu diff DIR"
    return SpecError("OCIGPU-SPEC-1", f"read {path}: it is not believed: {cause}", hint)


def _open_by_steps(path: str) -> tuple[int, str]:
    """Return an O_PATH descriptor of a regular file, and its path without links; raises SpecError and OSError."""
    todo = [part for part in reversed(path.split("/")) if part not in ("", ".")]
    opened = [os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)]
    names: list[str] = []
    links = 0
    try:
        while todo:
            name = todo.pop()
            if name == "..":
                if names:
                    names.pop()
                    os.close(opened.pop())
                continue
            here = f"/{'/'.join([*names, name])}"
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=opened[-1])
            opened.append(fd)
            status = os.fstat(fd)
            if not todo:
                if not stat.S_ISREG(status.st_mode):
                    raise _refused(path, "not a regular file")
                return opened.pop(), here
            if stat.S_ISLNK(status.st_mode):
                links += 1
                if cause := why_untrusted(status.st_uid, 0):
                    raise _refused(path, f"link {here}: {cause}")
                if links > MAX_LINKS:
                    raise _refused(path, "too many links")
                target = os.readlink("", dir_fd=fd)
                os.close(opened.pop())
                if target.startswith("/"):
                    names.clear()
                    while len(opened) > 1:
                        os.close(opened.pop())
                todo += [part for part in reversed(target.split("/")) if part not in ("", ".")]
                continue
            _check_directory(status, here, path)
            names.append(name)
        raise _refused(path, "not a regular file")
    finally:
        for fd in opened:
            os.close(fd)


def _check_directory(status: os.stat_result, here: str, path: str) -> None:
    """Raise SpecError for a directory whose entries somebody else could exchange (sticky: only their own, inode(7))."""
    shared = status.st_mode & stat.S_ISVTX
    if cause := why_untrusted(status.st_uid, status.st_mode & ~0o022 if shared else status.st_mode):
        raise _refused(path, f"directory {here}: {cause}")


def _why_below(place: str, below: str) -> str:
    inside = below and f"{place}/".startswith(f"{below.rstrip('/')}/")
    return "it lies below the container's own root directory" if inside else ""


def why_of_containers(place: str) -> str:
    """Return whose data a path without links lies in where containers or images write, "" if it does not.

    Layers of containers/storage (DRIVER beside DRIVER-layers), of dockerd (DRIVER beside image and containers) and of
    containerd (its plugins' directories), volumes of engines and of the kubelet: files of root that root has not made.
    """
    parts = place.split("/")
    for number, part in enumerate(parts):
        above, rest = "/".join(parts[:number]), parts[number + 1 :]
        if part.startswith(("io.containerd.snapshotter.", "io.containerd.content.")):
            return f"{above}/{part} has layers of images"
        if part == "volumes" and rest[1:2] == ["_data"]:
            return f"{above}/{part} has volumes of containers"
        if part == "pods" and rest[1:2] in (["volumes"], ["volume-subpaths"]):
            return f"{above}/{part} has volumes of pods"
        if part and rest and os.path.isdir(f"{above}/{part}-layers"):
            return f"{above}/{part} has layers of images"
        if part in _LAYERS and all(os.path.isdir(f"{above}/{name}") for name in ("image", "containers")):
            return f"{above}/{part} has layers of images"
    return ""
