"""SONAME links that a container's folders lack, as ldconfig without -X would make them.

Specifications that NVIDIA's toolkit wrote up to 1.17 leave libcuda.so.1 and the like to the ldconfig of the hook
update-ldcache; later ones still leave what the host itself has no link for.  Our ldconfig makes no links (it would make
them in every directory of the image), so the links are found here and made by the plan, by descriptor and journalled.
Of several files with one SONAME the one that was mounted for the container wins, then the newest; glibc's ldconfig has
the second rule only (elf/ldconfig.c, search_dir).  The image is hostile: see :mod:`ocigpu.provision.inside`.
"""

import os

from ocigpu.core.record import NamedTuple
from ocigpu.gpus.libraries.elf import read_open_elf
from ocigpu.provision.inside import exists_inside, open_file_inside
from ocigpu.system.paths import open_in_root, opened

MAX_NAMES = 1 << 16
"""Maximum of names read from one folder."""
MAX_READ = 4096
"""Libraries of one folder that are compared by name and opened, those that were mounted first."""
MAX_LINKS = 1024


class SonameLinks(NamedTuple):
    """``links``: pairs of (target, path) to make; ``left``: (folder, SONAME) where the folder is not the image's."""

    links: tuple[tuple[str, str], ...] = ()
    left: tuple[tuple[str, str], ...] = ()


def read_soname_links(
    root_fd: int, folders: tuple[str, ...], given: tuple[tuple[str, str], ...], points: tuple[str, ...]
) -> SonameLinks:
    """Return the links that are missing in folders of the image below ``root_fd``; needs procfs on /proc.

    ``given``: links that are made anyway, as (target, path).  ``points``: where something is mounted in the namespace
    of ``root_fd``.  Never raises for anything that an image contains.
    """
    links: dict[str, str] = {}
    left: list[tuple[str, str]] = []
    for folder in dict.fromkeys(map(os.path.normpath, folders)):
        try:
            with opened(open_in_root(root_fd, folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK)) as fd:
                top, where = (os.readlink(f"/proc/self/fd/{number}") for number in (root_fd, fd))
                mounted = {path.rpartition("/")[2] for path in points if path.rpartition("/")[0] == where.rstrip("/")}
                found = _Folder(root_fd, folder, fd, mounted).missing(given)
        except OSError:  # missing, a link to nowhere, not a directory; or it cannot be listed, on a broken file system
            continue
        below = f"{top.rstrip('/')}/"
        if any(path.startswith(below) and f"{where}/".startswith(f"{path}/") for path in points):
            left += [(folder, soname) for soname in found]  # a volume, or a directory of the host: it stays as it is
        else:
            links.update((f"{folder.rstrip('/')}/{soname}", name) for soname, name in found.items())
    return SonameLinks(tuple((name, path) for path, name in links.items())[:MAX_LINKS], tuple(left))


class _Folder:
    """The libraries of one directory: regular files, those that are mounts of their own, links, and what is neither."""

    def __init__(self, root_fd: int, path: str, fd: int, mounted: set[str]) -> None:
        self.root_fd, self.path, self.fd, self.mounted = root_fd, path, fd, mounted
        self.stems = set(map(_stem, mounted))
        self.files: list[str] = []
        self.links: set[str] = set()
        self.others: set[str] = set()
        with os.scandir(fd) as entries:
            for entry, _ in zip(entries, range(MAX_NAMES), strict=False):
                if entry.name.startswith("lib") and ".so" in entry.name:
                    if entry.is_symlink():
                        self.links.add(entry.name)
                    elif entry.is_file(follow_symlinks=False):
                        self.files.append(entry.name)
                    else:
                        self.others.add(entry.name)

    def missing(self, given: tuple[tuple[str, str], ...]) -> dict[str, str]:
        """Return the links to make, SONAME to file name; a library whose link is there already is not opened."""
        made = {path: target for target, path in given if os.path.dirname(path) == self.path}
        linked = {name: os.readlink(name, dir_fd=self.fd) for name in self.links if self._may_be_of_mounted(name)}
        linked.update((os.path.basename(path), target) for path, target in made.items())
        done = {os.path.basename(target) for name, target in linked.items() if _is_version(name, target)}
        compared = sorted(self.files, key=self.mounted.__contains__, reverse=True)[:MAX_READ]
        wanted = [name for name in compared if name not in done and (name in self.mounted or not self._has_link(name))]
        wanted.sort(key=lambda name: (name in self.mounted, version_key(name)), reverse=True)
        taken = {*self.files, *self.others, *(os.path.basename(path) for path in made)}
        found: dict[str, str] = {}
        for name in wanted:
            soname = self._read_soname(name)
            if soname and soname not in taken and (soname not in self.links or self._may_replace(soname, name)):
                taken.add(soname)
                found[soname] = name
        return found

    def _may_be_of_mounted(self, link: str) -> bool:
        return _stem(link) in self.stems

    def _has_link(self, name: str) -> bool:
        """Tell whether there is a link named as a shorter version of a file: libfoo.so.1 for libfoo.so.1.2.3."""
        start = name.index(".so") + len(".so.")
        return any(letter == "." and name[:at] in self.links for at, letter in enumerate(name) if at > start)

    def _read_soname(self, name: str) -> str:
        fd = open_file_inside(self.root_fd, f"{self.path}/{name}", os.O_NOFOLLOW)
        if fd < 0:
            return ""
        with opened(fd):
            library = read_open_elf(fd)
        soname = library.soname if library else ""
        return soname if soname.startswith("lib") and ".so" in soname and soname.isprintable() else ""

    def _may_replace(self, link: str, name: str) -> bool:
        """Tell whether this file may take over an existing link: a mounted file takes it from a file of the image."""
        target = os.readlink(link, dir_fd=self.fd)
        if name in self.mounted:
            return os.path.basename(target) not in self.mounted
        return not exists_inside(self.root_fd, f"{self.path}/{link}")


def _stem(name: str) -> str:
    return name.partition(".so")[0]


def _is_version(link: str, target: str) -> bool:
    """Tell whether a link is a library's name with a version of its own, as a SONAME is: not libcuda.so."""
    return _stem(link) == _stem(target) and ".so." in link and "/" not in target


def version_key(name: str) -> "list[tuple[int, str]]":
    """Return a key by which names compare as glibc's ldconfig compares them: digits as numbers, above letters."""
    key: "list[tuple[int, str]]" = []
    digits = ""
    for letter in f"{name}\0":
        if letter.isascii() and letter.isdigit():
            digits += letter
            continue
        if digits:
            key.append((int(digits), ""))
            digits = ""
        key.append((-1, letter))
    return key
