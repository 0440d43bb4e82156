"""Where an image's dynamic loader searches libraries: /etc/ld.so.conf and its includes, or musl's path file.

ld.so.conf is read as glibc's ldconfig reads it (elf/ldconfig.c, parse_conf): a directory a line, ``#`` begins a
comment, ``include PATTERN...`` relative to the directory of the including file.  The image is hostile: see
:mod:`ocigpu.provision.inside`.
"""

import os
import stat

from ocigpu.cdi.hook_words import CreateSymlinks, link_target
from ocigpu.core.record import NamedTuple
from ocigpu.provision.image import TRIPLETS, is_debian, read_libc, read_library_dir
from ocigpu.provision.image_cache import CONF_DIRECTORY, LD_SO_CONF
from ocigpu.provision.inside import exists_inside, list_inside, read_inside, status_inside

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ocigpu.cdi.hook_words import Command

OWN_CONF = f"{CONF_DIRECTORY}/00-ocigpu.conf"
"""Folders of CDI hooks."""
COMPAT_CONF = f"{CONF_DIRECTORY}/00-compat-ocigpu.conf"
"""The image's CUDA compatibility libraries; its name sorts before the other's, and so they win."""
MUSL_DIRECTORIES = "/lib:/usr/local/lib:/usr/lib"
"""What musl searches without a path file (musl's ldso/dynlink.c)."""
MAX_CONF = 1 << 16
MAX_CONF_FILES = 64
MAX_DEPTH = 8
MAX_DIRECTORIES = 4096
_GBM = "/gbm/nvidia-drm_gbm.so"


class LoaderFacts(NamedTuple):
    """Facts about how a container's loader finds libraries.

    ``libc``: as in ImageFacts; ``searched``: directories it searches, our own files left out; ``has_conf``,
    ``has_own_conf``, ``has_compat_conf``: whether /etc/ld.so.conf and our two files are there;
    ``own_directories``, ``compat_directories``: what the two say, of the former those that are there: folders of a
    hook before this one, for another specification, or of an earlier start of the container.
    ``musl_file``: musl's path file, "" without musl; ``musl_text``: its content, or what musl does without it; None
    when it is no text of at most 64 KiB, or a link.
    """

    libc: str = "glibc"
    searched: tuple[str, ...] = ()
    has_conf: bool = True
    has_own_conf: bool = False
    has_compat_conf: bool = False
    own_directories: tuple[str, ...] = ()
    compat_directories: tuple[str, ...] = ()
    musl_file: str = ""
    musl_text: str | None = None


def read_loader_facts(root_fd: int) -> LoaderFacts:
    """Return the loader configuration of the image below ``root_fd``; never raises for the content of an image."""
    libc = read_libc(root_fd)
    musl_file = _musl_file(root_fd) if libc == "musl" or exists_inside(root_fd, "/etc/alpine-release") else ""
    return LoaderFacts(
        libc=libc,
        searched=(*system_directories(is_debian(root_fd)), *read_conf(root_fd)),
        has_conf=exists_inside(root_fd, LD_SO_CONF),
        has_own_conf=exists_inside(root_fd, OWN_CONF),
        has_compat_conf=exists_inside(root_fd, COMPAT_CONF),
        own_directories=_own_directories(root_fd),
        compat_directories=tuple(line for line in _lines(root_fd, COMPAT_CONF, os.O_NOFOLLOW) if line.startswith("/"))[
            :1
        ],
        musl_file=musl_file,
        musl_text=_musl_text(root_fd, musl_file) if musl_file else None,
    )


def _own_directories(root_fd: int) -> tuple[str, ...]:
    lines = [line for line in _lines(root_fd, OWN_CONF, os.O_NOFOLLOW) if line.startswith("/")][:MAX_CONF_FILES]
    found = ((line, status_inside(root_fd, line)) for line in lines)
    return tuple(line for line, status in found if status is not None and stat.S_ISDIR(status.st_mode))


def system_directories(debian: bool) -> tuple[str, ...]:
    """Return the directories that a glibc loader searches by default."""
    machine = os.uname().machine
    if debian:
        triplet = TRIPLETS[machine]
        return (f"/lib/{triplet}", f"/usr/lib/{triplet}", "/lib", "/usr/lib")
    return ("/lib", "/usr/lib", "/lib64", "/usr/lib64", *(("/libx32", "/usr/libx32") if machine == "x86_64" else ()))


def read_conf(root_fd: int) -> tuple[str, ...]:
    """Return the directories named in /etc/ld.so.conf and its includes, without our own files; links are kept.

    A pattern may have one ``*``, in its last component.  Anything beyond the limits is ignored.
    """
    found: dict[str, None] = {}
    seen = {OWN_CONF, COMPAT_CONF}
    pending = [(LD_SO_CONF, 0)]
    patterns = 0
    while pending and len(seen) < MAX_CONF_FILES and len(found) < MAX_DIRECTORIES:
        path, depth = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        for line in _lines(root_fd, path):
            word, *included = line.split()
            if line.startswith("/"):
                found[os.path.normpath(line)] = None
            elif word == "include" and depth < MAX_DEPTH:
                for pattern in included[: MAX_CONF_FILES - patterns]:
                    patterns += 1
                    names = _matching(root_fd, os.path.join(os.path.dirname(path), pattern))
                    pending += [(name, depth + 1) for name in names]
    return tuple(found)[:MAX_DIRECTORIES]


def _lines(root_fd: int, path: str, flags: int = 0) -> list[str]:
    """Return the lines of a file, without comments and empty ones; flags as of open(2).

    The target of a link is not copied into our files: it may be in a volume, and readable for root only.
    """
    text = (read_inside(root_fd, path, MAX_CONF, flags) or b"").decode("utf-8", "replace")
    # in C a line ends at a newline and nowhere else, and a text at a NUL
    lines = (line.partition("\0")[0].partition("#")[0].strip() for line in text.split("\n"))
    return [line for line in lines if line]


def _matching(root_fd: int, pattern: str) -> list[str]:
    """Return the paths that match a pattern; as in a shell, ``*`` does not stand for a leading dot."""
    directory, _, name = os.path.normpath(pattern).rpartition("/")
    start, star, end = name.partition("*")
    if not star:
        return [f"{directory}/{name}"]
    return [
        f"{directory}/{entry}"
        for entry in list_inside(root_fd, directory or "/")
        if entry.startswith(start)
        and (start or not entry.startswith("."))
        and entry.endswith(end)
        and len(entry) >= len(start) + len(end)
    ]


def _musl_file(root_fd: int) -> str:
    """Return the path file of the image's musl loader, which is named after its architecture.

    This machine's is searched by name, because only a part of a large directory is listed.
    """
    machine = os.uname().machine
    if exists_inside(root_fd, f"/lib/ld-musl-{machine}.so.1"):
        return f"/etc/ld-musl-{machine}.path"
    for name in list_inside(root_fd, "/lib"):
        machine = name.removeprefix("ld-musl-").partition(".so")[0]
        if name.startswith("ld-musl-") and machine.replace("_", "").isalnum() and len(machine) <= 16:
            return f"/etc/ld-musl-{machine}.path"
    return ""


def _musl_text(root_fd: int, path: str) -> str | None:
    if not exists_inside(root_fd, path):
        return MUSL_DIRECTORIES + "\n"
    # What a link leads to is not copied: the new file is for everybody in the container, that one may be for root only.
    data = read_inside(root_fd, path, MAX_CONF + 1, os.O_NOFOLLOW)
    if data is None or len(data) > MAX_CONF:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def find_gbm_links(root_fd: int, commands: "Iterable[Command]") -> tuple[CreateSymlinks, ...]:
    """Return a link to GBM's backend beside the libraries of the image, where its Mesa looks, () if it needs none.

    A specification names the host's directory: Mesa of a Debian image found no backend on a host with /usr/lib64
    (unraid/unraid-nvidia-driver pull request 10).
    """
    links = [link for command in commands if isinstance(command, CreateSymlinks) for link in command.links]
    for target, path in links:
        if path.endswith(_GBM):
            directory = read_library_dir(root_fd)
            image, host = (status_inside(root_fd, place) for place in (directory, path.removesuffix(_GBM)))
            if image and not (host and os.path.samestat(image, host)):
                return (CreateSymlinks(((link_target(target, path), directory + _GBM),)),)
    return ()
