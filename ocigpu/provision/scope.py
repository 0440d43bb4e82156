"""systemd's view of a container's devices: the unit file of the scope that the runtime has requested.

A runtime with the systemd cgroup driver passes the device rules of config.json to systemd as properties of a transient
scope, which systemd keeps as a file in /run/systemd/transient (org.freedesktop.systemd1(5), "transient units").  At a
daemon-reload systemd reads that file and puts its own rules into force again: what a hook has added since is lost
("Failed to initialize NVML: Unknown Error").  So the hook adds its devices to that file as well. systemd removes it
with the scope, and looks a path /dev/char/MAJOR:MINOR up by its name alone, since version 240 (NEWS).
"""

import os
import stat

from ocigpu.core.errors import cause, printable
from ocigpu.provision.device_filter import access_mask
from ocigpu.system.files import read_bounded, replace_file
from ocigpu.system.paths import opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ocigpu.core.actions import AllowDevice

DIRECTORY = "/run/systemd/transient"
_LIMIT = 1 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def change_scope(
    cgroup: str, allow: "Iterable[AllowDevice]", deny: "Iterable[AllowDevice]" = ()
) -> "tuple[str, Callable[[], None] | None]":
    """Have the unit of a container's cgroup allow and deny devices; return a note ("" if all is well) and the undo.

    ``cgroup``: path of the cgroup as /proc/<pid>/cgroup of the host shows it.  Nothing is done, and the undo is None,
    where systemd has no scope for it, one without device rules (they would begin to deny everything else), or one that
    says so already.  Whether systemd keeps the devices is never a reason to stop a container: a failure is the note.
    Must run in the host's mount namespace.
    """
    # The first that is no slice: the system's manager has its scopes in slices alone, and what is below a scope or a
    # service (a user's manager) belongs to somebody who may have named it like the scope of another container.
    name = next((part for part in cgroup.strip("/").split("/") if not part.endswith(".slice")), "")
    if not name.endswith(".scope"):
        return "", None
    # runc sets properties of the scope that it has made: a file for each; crun names them when it makes the scope.
    note, undo = _change(f"{DIRECTORY}/{name}.d", "50-DeviceAllow.conf", "DeviceAllow=", allow, deny) or (
        _change(DIRECTORY, name, "DevicePolicy=", allow, deny) or ("", None)
    )
    return note and f"systemd's unit {name} does not include the devices: {note}", undo


def _change(
    folder: str, file: str, sign: str, allow: "Iterable[AllowDevice]", deny: "Iterable[AllowDevice]"
) -> "tuple[str, Callable[[], None] | None] | None":
    """Change one file; return what went wrong and the undo, None if the unit's rules are not in there."""
    try:
        with opened(os.open(folder, _FOLDER)) as fd:
            with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd), "rb") as source:
                status, before = os.fstat(source.fileno()), read_bounded(source, _LIMIT).decode("utf-8", "replace")
            if sign not in before:
                return None
            after = changed_text(before, allow, deny)
            if after == before:
                return "", None
            _write(fd, file, after, status)
    except FileNotFoundError:
        return None
    except OSError as error:
        return printable(cause(error)), None
    return "", lambda: _put_back(folder, file, before, status)


def changed_text(text: str, allow: "Iterable[AllowDevice]", deny: "Iterable[AllowDevice]") -> str:
    """Return the text of a unit file that allows and denies these devices, ``text`` itself if it does so already."""
    gone = {f"/dev/char/{rule.major}:{rule.minor}" for rule in deny}
    lines, granted = [], {}
    for line in text.splitlines(keepends=True):
        key, _, value = line.strip().partition("=")
        path, _, access = value.partition(" ")
        if key == "DeviceAllow" and path in gone:
            continue
        if key == "DeviceAllow":
            granted[path] = access_mask("".join(letter for letter in access if letter in "rwm"))
        lines.append(line)
    added = []
    for rule in allow:
        path, mask = f"/dev/char/{rule.major}:{rule.minor}", access_mask(rule.access)
        if granted.get(path, 0) & mask != mask:
            added.append(f"DeviceAllow={path} {rule.access}\n")
    return "".join(lines) + "".join(("\n[Scope]\n", *added) if added else ())


def _write(folder_fd: int, file: str, text: str, status: os.stat_result) -> None:
    # With its old time: systemctl would ask for a daemon-reload otherwise, and what the kernel has is right already.
    mode = stat.S_IMODE(status.st_mode)
    replace_file(file, text.encode(), mode, folder_fd, mtime_ns=status.st_mtime_ns)


def _put_back(folder: str, file: str, text: str, status: os.stat_result) -> None:
    try:
        with opened(os.open(folder, _FOLDER)) as fd:
            os.stat(file, dir_fd=fd)  # gone with its scope: it stays away
            _write(fd, file, text, status)
    except OSError:
        return
