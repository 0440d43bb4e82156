"""What tests could leave on the machine: mounts, cgroups, processes.

Other work may go on beside the tests, so only what carries our name or our session directory counts.
"""

import os
import re
import secrets
import stat
import subprocess
from collections.abc import Collection
from pathlib import Path

from support.process import is_alive, stop, wait_for

from ocigpu.provision.image import LOADERS, TRIPLETS

PREFIX = "ocigpu-test-"
"""Start of the name of everything the tests make: directories, cgroups, containerd namespaces."""
NAME = f"{PREFIX}{secrets.token_hex(4)}"
"""What this process calls its own: no name of another process is part of it, nor it of another's."""

MACHINE = os.uname().machine
TRIPLET = TRIPLETS[MACHINE]
LIBRARIES = f"/usr/lib/{TRIPLET}"
"""Where Debian's family has libraries."""
LOADER, MUSL_LOADER = LOADERS[MACHINE][0][0], LOADERS[MACHINE][-1][0]
CACHED = {"x86_64": "libc6,x86-64", "aarch64": "libc6,AArch64"}[MACHINE]
"""What ldconfig(8) says of libraries for this machine."""

_foreign: set[str] = set()


def read_recorded(path: Path) -> str:
    """Return a text that was recorded on x86-64 as another machine would have written it."""
    return path.read_text().replace("x86_64-linux-gnu", TRIPLET)


def note_mounts(directory: str = "/") -> None:
    """Take what is mounted now, at a directory or anywhere, for the machine's: what tests mount comes later."""
    _foreign.update(line for line in _mount_table() if directory in ("/", line.split(" ")[4]))


def own_mounts() -> list[str]:
    """Return the lines of our mount table that tests have made, and of the machine's those that no test may touch."""
    return [line for line in _mount_table() if line not in _foreign or _is_essential(line.split(" ")[4])]


def copies_of_foreign_mounts() -> set[str]:
    """Return lines, without ids, of the machine's mounts in a copy of our namespace; those no test may touch aside.

    One vanishes from every namespace as soon as somebody removes what it is mounted on (detach_mounts, fs/namei.c).
    """
    foreign = (line.split(" ") for line in _foreign)
    return {" ".join(words[2:]) for words in foreign if not _is_essential(words[4])}


def _mount_table() -> list[str]:
    with open("/proc/self/mountinfo", errors="surrogateescape", newline="\n") as file:
        return file.read().split("\n")[:-1]


def _is_essential(path: str) -> bool:
    return path in ("/", "/dev", "/proc", "/sys") or path.startswith(("/proc/", "/dev/"))


def _names(directory: str) -> re.Pattern[str]:
    """Return what finds the directory, and what is below it, in a text; not another whose name only starts alike."""
    return re.compile(rf"{re.escape(directory)}(?![\w.-])")


def mounts_below(directory: str) -> list[str]:
    """Return the lines of our mount table that name the directory, as mount point or as source; oldest first."""
    named = _names(directory)
    return [line for line in _mount_table() if line not in _foreign and named.search(line)]


def let_others_in(directory: Path) -> None:
    """Let other users look into a directory, and come to it; what they may do already stays."""
    for path in (directory, *directory.parents):
        mode = path.stat().st_mode
        if mode & 0o055 != 0o055:
            path.chmod(stat.S_IMODE(mode) | 0o055)


def processes_of(directory: str) -> dict[int, str]:
    """Return pid and command line of every process that names the directory in its arguments or environment.

    The calling process and its ancestors do not count, nor who works in the machine's own mount namespace beside us.
    """
    ours = set()
    named = _names(directory)
    machines = _namespace_of_init()
    pid = os.getpid()
    while pid > 0:
        ours.add(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in ours:
            continue
        try:
            if os.readlink(f"/proc/{name}/ns/mnt") == machines:
                continue
            arguments = Path(f"/proc/{name}/cmdline").read_bytes()
            environment = Path(f"/proc/{name}/environ").read_bytes()
        except OSError:  # gone, or another user's in a mode that hides it
            continue
        if named.search(os.fsdecode(arguments + b"\0" + environment)) and is_alive(int(name)):
            found[int(name)] = arguments.replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def _namespace_of_init() -> str:
    """Return the mount namespace that the machine began with, "" where we are in it ourselves or may not know."""
    try:
        found = os.readlink("/proc/1/ns/mnt")
    except PermissionError:
        return ""
    return "" if found == os.readlink("/proc/self/ns/mnt") else found


def running_ldconfig(directory: Path) -> int:
    """Return the process that is the sealed copy of ldconfig for a bundle, 0 if there is none."""
    named = _names(str(directory))
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if not os.readlink(f"/proc/{name}/exe").startswith("/memfd:ldconfig"):
                continue
            table = Path(f"/proc/{name}/mountinfo").read_text()
            if Path(f"/proc/{name}/cmdline").read_bytes().startswith(b"ldconfig") and named.search(table):
                return int(name)
        except OSError:  # gone meanwhile
            continue
    return 0


def cgroups_named(part: str) -> list[str]:
    """Return all directories of all cgroup hierarchies whose own or whose parent's name has ``part``; deepest first."""
    found = []
    for directory, names, _ in os.walk("/sys/fs/cgroup"):
        for name in names:
            path = os.path.join(directory, name)
            if part in path and not os.path.islink(path):
                found.append(path)
    return sorted(found, key=lambda path: -path.count("/"))


def remove_cgroups(part: str, but: Collection[str] = ()) -> None:
    """Remove cgroups that an engine made as parents of its containers' and keeps for ever, once they are empty.

    ``but``: paths that were there before, and stay.
    """
    wait_for("cgroups to become empty", lambda: _remove_quietly(part, but))


def remains(directory: str, part: str) -> list[str]:
    """Return one line for each mount, process and cgroup that belongs to ``directory`` or is named with ``part``."""
    return [
        *(f"mount {line}" for line in mounts_below(directory)),
        *(f"process {pid} {arguments}" for pid, arguments in processes_of(directory).items()),
        *(f"cgroup {path}" for path in cgroups_named(part)),
    ]


def clean(directory: str, part: str) -> None:
    """End the processes and remove the mounts and cgroups that :func:`remains` would tell."""
    for pid in processes_of(directory):
        stop(pid, 2)
    for line in reversed(mounts_below(directory)):
        path = line.split()[4]
        if directory in path:
            subprocess.run(["umount", "-l", path], check=False)
    wait_for("cgroups to become empty", lambda: _remove_quietly(part))


def _remove_quietly(part: str, but: Collection[str] = ()) -> bool:
    for path in cgroups_named(part):
        if path in but:
            continue
        try:
            os.rmdir(path)
        except OSError:  # a process is still leaving it
            return False
    return True


def tree(directory: str | os.PathLike[str]) -> dict[str, tuple[int, int, int, int, str]]:
    """Return path -> (mode, uid, gid, rdev, content) of everything below a directory; links by their target."""
    top = os.fspath(directory)
    found = {}
    for parent, directories, files in os.walk(top):
        for name in directories + files:
            path = os.path.join(parent, name)
            status = os.lstat(path)
            content = ""
            if os.path.islink(path):
                content = os.readlink(path)
            elif os.path.isfile(path):
                content = str(status.st_size)
            found[os.path.relpath(path, top)] = (status.st_mode, status.st_uid, status.st_gid, status.st_rdev, content)
    return found
