"""The container's device cgroup, extended by the devices of a plan that the runtime does not know.

The shim declares the rules in config.json, so that the runtime enforces them; then there is nothing to do here.  The
remaining case is a hook in a bundle that another program made.  On cgroup v1 missing rules are added one by one; on v2
every attached program is replaced, in one step each, by one computed from the whole of config.json.  Nothing is
detached first, because a cgroup without a program allows everything.  If systemd manages the cgroup, its unit is
changed as well (:mod:`ocigpu.provision.scope`); otherwise the next daemon-reload would undo the change.
"""

import errno
import os

from ocigpu.core.errors import ApplyError, cause, printable, quoted
from ocigpu.core.record import NamedTuple
from ocigpu.provision import scope
from ocigpu.provision.device_filter import (
    ACCESS_BITS,
    FilterRule,
    Policy,
    access_mask,
    device_program,
    effective_rules,
)
from ocigpu.system import bpf
from ocigpu.system.namespaces import in_initial_user_namespace
from ocigpu.system.paths import At, opened
from ocigpu.system.proc import parse_cgroup, parse_mounts, read_proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Self

    from ocigpu.core.actions import AllowDevice
    from ocigpu.core.settings import Settings

NO_CGROUPS_NOTE = "no-cgroups is set: device cgroup left alone"
ROOTLESS_NOTE = "rootless: device cgroup left alone; access is what the outer manager allows"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class CgroupMount(NamedTuple):
    """A cgroup file system of the mount table: ``root`` is the directory in it that ``mountpoint`` shows."""

    version: int
    controllers: frozenset[str]
    root: str
    mountpoint: str
    device: tuple[int, int]


class Cgroup(NamedTuple):
    """An open cgroup directory; ``path`` is for messages only."""

    version: int
    fd: int
    path: str
    relative: str
    mountpoint: str


def apply_device_rules(
    container_proc_fd: int,
    rules: "tuple[AllowDevice, ...]",
    config: "dict[str, Any] | None",
    settings: "Settings",
) -> "tuple[str, Callable[[], None]]":
    """Make the device cgroup of a container allow ``rules``; return a note for the user ("" if none) and an undo.

    ``container_proc_fd``: open directory /proc/<pid> of the container's first process; with it, a reused pid cannot be
    mistaken for the container.  ``config``: its OCI configuration; without it (None) rules can be added on cgroup v1,
    but not on v2, whose programs are computed from all of it.  Must run in the host's mount namespace.  Needs root in
    the initial user namespace; without, nothing is changed and the note says so.  The undo restores exactly what was
    there and can be called once.  Raises ApplyError (OCIGPU-CG-1) with nothing changed, SpecError for rules in
    config.json that make no sense.
    """
    if not rules:
        return "", _nothing
    if settings.no_cgroups:
        return NO_CGROUPS_NOTE, _nothing
    declared = effective_rules(config or {})
    policy = Policy(declared)
    is_declared = all(_covers(policy.allowed("c", rule.major, rule.minor), rule) for rule in rules)
    if is_declared and not os.path.isdir(scope.DIRECTORY):
        return "", _nothing
    if os.geteuid() != 0 or not in_initial_user_namespace():
        return "" if is_declared else ROOTLESS_NOTE, _nothing
    if is_declared:  # runc 1.1.3 to 1.1.6 does not tell systemd of a device without a link in /dev/char
        return _tell_systemd(container_proc_fd, rules)
    cgroup = open_device_cgroup(container_proc_fd)
    with _Undo(cgroup.fd) as undo:
        if cgroup.version == 1:
            _change_v1(cgroup, _missing_v1(cgroup, rules), undo)
            note = ""
        else:
            wanted = [FilterRule(True, "c", rule.major, rule.minor, rule.access) for rule in rules]
            replaced = _replace_v2(cgroup, None if config is None else declared + wanted, undo)
            note = _ancestor_note(cgroup) if replaced else ""
        told, forget = _tell_systemd(container_proc_fd, rules)
        undo.steps.append(forget)
        return note or told, undo


def change_device_rules(
    container_proc_fd: int,
    allow: "tuple[AllowDevice, ...]",
    deny: "tuple[AllowDevice, ...]",
    policy: "list[FilterRule]",
    recorded: str = "",
) -> "Callable[[], None]":
    """Make the device cgroup of a running container allow and deny devices; return the undo, to be called once.

    ``recorded``: as for :func:`open_device_cgroup`.  ``allow`` and ``deny``: the rules to change.  ``policy``: all
    rules that must hold afterwards, from which a program of cgroup v2 is made.  On v1 a denial only revokes what a rule
    for exactly that device has allowed (the kernel's devcgroup_update_access), so the caller must check the result.
    Needs root in the initial user namespace, in the host's mount namespace.  Raises ApplyError OCIGPU-CG-1 with nothing
    changed.
    """
    cgroup = open_device_cgroup(container_proc_fd, recorded)
    with _Undo(cgroup.fd) as undo:
        if cgroup.version == 1:
            changes = [("devices.allow", rule) for rule in allow] + [("devices.deny", rule) for rule in deny]
            lines = [(name, f"c {rule.major}:{rule.minor} {rule.access}") for name, rule in changes]
            _change_v1(cgroup, lines, undo)
        elif not _replace_v2(cgroup, policy, undo):
            raise _failed("replace device program of", cgroup.path, "it has none of its own")
        undo.steps.append(_tell_systemd(container_proc_fd, allow, deny)[1])
        return undo


def _tell_systemd(
    container_proc_fd: int, allow: "tuple[AllowDevice, ...]", deny: "tuple[AllowDevice, ...]" = ()
) -> "tuple[str, Callable[[], None]]":
    """Have systemd keep these rules at a daemon-reload if it manages the cgroup; return a note and an undo."""
    if not os.path.isdir(scope.DIRECTORY):
        return "", _nothing
    paths = parse_cgroup(_read_at(container_proc_fd, "cgroup", "cgroup of the container's process"))
    note, undo = scope.change_scope((paths.v1 or "") + (paths.v2 or ""), allow, deny)
    return note, undo or _nothing


def _nothing() -> None:
    """Undo nothing."""


class _Undo:
    """Undoes changes of a cgroup, last one first, and closes it: called once, or by a block that fails."""

    def __init__(self, cgroup_fd: int) -> None:
        self.fds = [cgroup_fd]
        self.steps: "list[Callable[[], None]]" = []

    def __call__(self) -> None:
        try:
            while self.steps:
                try:
                    self.steps.pop()()
                except ApplyError as error:
                    # Gone: the cgroup itself, or our program because the runtime has set its own anew.
                    if error.errno not in (errno.ENOENT, errno.ENODEV):
                        raise
        finally:
            for fd in self.fds:
                os.close(fd)
            self.fds.clear()

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self()


def _covers(allowed: int, rule: "AllowDevice") -> bool:
    mask = access_mask(rule.access)
    return allowed & mask == mask


def _failed(operation: str, path: str, why: "OSError | str") -> ApplyError:
    number = why.errno or 0 if isinstance(why, OSError) else 0
    text = why if isinstance(why, str) else printable(cause(why))
    return ApplyError("OCIGPU-CG-1", f"{operation} {path}: {text}", None, number)


class _failing:  # noqa: N801 - reads as a statement
    """In the block, an OSError becomes an ApplyError about this operation and path."""

    def __init__(self, operation: str, path: str) -> None:
        self._operation, self._path = operation, path

    def __enter__(self) -> None:
        return

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, OSError):
            raise _failed(self._operation, self._path, error) from error


# -- finding the cgroup ------------------------------------------------------------------------------------------


def open_device_cgroup(container_proc_fd: int, recorded: str = "") -> Cgroup:
    """Return the open device cgroup of a process: of v1 where a v1 "devices" hierarchy is mounted, else of v2.

    ``recorded``: path of the container's cgroup as its runtime records it, from the mount point or from the top; its
    first process may have moved into a lower cgroup (systemd does), but rules stay where the runtime has put them.
    Must run in the host's mount namespace.  Raises ApplyError OCIGPU-CG-1, also for the root cgroup.
    """
    paths = parse_cgroup(_read_at(container_proc_fd, "cgroup", "cgroup of the container's process"))
    mounts = parse_cgroup_mounts(_read_at(-1, "/proc/self/mountinfo", "mount table"))
    v1_mounts = [mount for mount in mounts if mount.version == 1 and "devices" in mount.controllers]
    if paths.v1 is not None and v1_mounts:
        version, path, mounts = 1, recorded_part(paths.v1, recorded), v1_mounts
    elif paths.v2 is not None:
        version, path = 2, recorded_part(paths.v2, recorded)
        mounts = [mount for mount in mounts if mount.version == 2]
    else:
        raise _failed("find device cgroup", "/proc/<pid>/cgroup", "neither a mounted devices controller nor cgroup v2")
    if path == "/":
        raise _failed("find device cgroup", "/", "the container is in the root cgroup, which is never changed")
    if not path.startswith("/") or ".." in path.split("/"):
        raise _failed("find device cgroup", quoted(path), "outside of the cgroups that this process can see")
    for mount in mounts:
        relative = _below(path, mount.root)
        fd = _open_directory(mount, relative) if relative else None
        if fd is None:
            continue
        # The process was in this cgroup a moment ago; a directory of the same name made since would be another one.
        try:
            again = parse_cgroup(_read_at(container_proc_fd, "cgroup", "cgroup of the container's process"))
            if again != paths:
                raise _failed("find device cgroup", quoted(path), "the container's process has just moved elsewhere")
        except ApplyError:
            os.close(fd)
            raise
        return Cgroup(version, fd, f"{mount.mountpoint}/{relative}", relative, mount.mountpoint)
    raise _failed("find device cgroup", quoted(path), f"no cgroup v{version} mount shows it")


def recorded_part(path: str, recorded: str) -> str:
    """Return the longest beginning of a cgroup's path that ``recorded`` ends with, the whole path if there is none."""
    part = path
    while part:
        if recorded.endswith(part):
            return part
        part = part.rpartition("/")[0]
    return path


def parse_cgroup_mounts(text: str) -> list[CgroupMount]:
    """Return the cgroup mounts in the text of /proc/<pid>/mountinfo, last mounted first; other lines are passed over.

    For v1 the controllers are among the superblock options.
    """
    found = []
    for mount in parse_mounts(text, strict=False).values():
        if mount.type in ("cgroup", "cgroup2"):
            version, controllers = (1, mount.super_options) if mount.type == "cgroup" else (2, ())
            major, _, minor = mount.device.partition(":")
            device = (int(major), int(minor))
            found.append(CgroupMount(version, frozenset(controllers), mount.root, mount.point, device))
    found.reverse()
    return found


def _below(path: str, root: str) -> str:
    """Return ``path`` relative to ``root``, "" if it is not strictly below it."""
    prefix = root.rstrip("/") + "/"
    return path[len(prefix) :].strip("/") if path.startswith(prefix) else ""


def _open_directory(mount: CgroupMount, relative: str) -> int | None:
    """Return a descriptor of a cgroup directory, None if this mount does not show it (hidden by another one)."""
    path = f"{mount.mountpoint}/{relative}"
    with _failing("open device cgroup", path):
        try:
            # A cgroup file system has no symbolic links, and cgroups are only made by those who may change them.
            fd = os.open(path, _DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            return None
    device = os.fstat(fd).st_dev
    if (os.major(device), os.minor(device)) != mount.device:
        os.close(fd)
        return None
    return fd


def _read_at(directory_fd: int, name: str, what: str) -> str:
    """Return the text of a file of a pseudo file system; ``directory_fd`` of -1: ``name`` is an absolute path."""
    with _failing("read", what):
        try:
            return read_proc(name, directory_fd if directory_fd >= 0 else None)
        except OSError as error:
            error.filename = None  # users know it by this name
            raise


# -- cgroup v1 ---------------------------------------------------------------------------------------------------


def _missing_v1(cgroup: Cgroup, rules: "tuple[AllowDevice, ...]") -> "list[tuple[str, str]]":
    """Return the rules that devices.list of a v1 cgroup lacks, as pairs of (file, rule)."""
    listed = Policy(parse_devices_list(_read_at(cgroup.fd, "devices.list", f"{cgroup.path}/devices.list")))
    changes: list[tuple[str, str]] = []
    for rule in rules:
        missing = access_mask(rule.access) & ~listed.allowed("c", rule.major, rule.minor)
        if missing:
            letters = "".join(letter for letter in "rwm" if ACCESS_BITS[letter] & missing)
            changes.append(("devices.allow", f"c {rule.major}:{rule.minor} {letters}"))
    return changes


_OPPOSITE = {"devices.allow": "devices.deny", "devices.deny": "devices.allow"}


def _change_v1(cgroup: Cgroup, changes: "list[tuple[str, str]]", undo: _Undo) -> None:
    """Write rules into files of a v1 cgroup, pairs of (file, rule)."""
    for name, line in changes:
        _write_v1(cgroup, name, line)
        undo.steps.append(lambda name=name, line=line: _write_v1(cgroup, _OPPOSITE[name], line))  # type: ignore[misc] # mypy infers no lambda with defaults


def _write_v1(cgroup: Cgroup, name: str, line: str) -> None:
    """Write one rule: the kernel takes exactly one per write (Documentation/admin-guide/cgroup-v1/devices.rst)."""
    at = At(cgroup.fd, name, f"{cgroup.path}/{name}")
    with _failing(f'write "{line}" to', at.path), opened(at.open(os.O_WRONLY)) as fd:
        os.write(fd, line.encode())


def parse_devices_list(text: str) -> list[FilterRule]:
    """Return the rules in the text of a v1 devices.list, e.g. "c 136:* rwm"; "a *:* rwm" means everything."""
    rules: list[FilterRule] = []
    for line in text.split("\n"):
        fields = line.replace(":", " ").split()
        if len(fields) != 4 or fields[0] not in ("a", "b", "c") or not set(fields[3]) <= set(ACCESS_BITS):
            continue
        major, minor = (None if field == "*" else int(field) if field.isdigit() else -1 for field in fields[1:3])
        if major == -1 or minor == -1:
            continue
        rules.append(FilterRule(True, fields[0], major, minor, fields[3]))
    return rules


# -- cgroup v2 ---------------------------------------------------------------------------------------------------


def _replace_v2(cgroup: Cgroup, rules: "list[FilterRule] | None", undo: _Undo) -> bool:
    """Exchange every device program of a v2 cgroup for one that enforces ``rules`` (None: they are not known).

    Returns False if there is no program: then everything is allowed and there is nothing to widen.
    """
    with _failing("query device programs of", cgroup.path):
        attached = bpf.query_device_programs(cgroup.fd)
    if not attached.ids:
        return False
    if rules is None:
        raise _failed("widen device program of", cgroup.path, "the container's config.json was not found")
    program = device_program(rules)
    pairs: list[tuple[int, int]] = []  # (old, new) descriptors
    # A cgroup refuses the same program twice, so each of the old ones gets a copy of the new one.  All are loaded
    # before the first is exchanged.
    for program_id in attached.ids:
        with _failing(f"read device program {program_id} of", cgroup.path):
            undo.fds.append(bpf.open_program(program_id))
        with _failing("load device program for", cgroup.path):
            undo.fds.append(bpf.load_device_program(program))
        pairs.append((undo.fds[-2], undo.fds[-1]))

    def put_back(old: int, new: int) -> None:
        with _failing("put back device program of", cgroup.path):
            _exchange(cgroup.fd, old, new, attached.flags)

    for old, new in pairs:
        try:
            _exchange(cgroup.fd, new, old, attached.flags)
        except OSError as error:
            raise _failed("replace device program of", cgroup.path, _explained(error)) from error
        undo.steps.append(lambda old=old, new=new: put_back(old, new))  # type: ignore[misc] # as above
    return True


def _exchange(cgroup_fd: int, new_fd: int, old_fd: int, flags: int) -> None:
    """Replace one attached program by another, in one step."""
    if flags & bpf.BPF_F_ALLOW_MULTI:
        bpf.attach_device_program(cgroup_fd, new_fd, bpf.BPF_F_ALLOW_MULTI, old_fd)
    else:
        bpf.attach_device_program(cgroup_fd, new_fd, flags & bpf.BPF_F_ALLOW_OVERRIDE)


def _explained(error: OSError) -> "OSError | str":
    words = {
        errno.EINVAL: "needs Linux 5.5",
        errno.ENOENT: "something else has just changed it, or it is attached by a link",
    }
    return f"{cause(error)} ({words[error.errno]})" if error.errno in words else error


def _ancestor_note(cgroup: Cgroup) -> str:
    """Return a note if higher cgroups have device programs: all levels must allow a device; those stay unchanged."""
    parent = cgroup.relative
    while "/" in parent:
        parent = parent.rpartition("/")[0]
        path = f"{cgroup.mountpoint}/{parent}"
        try:
            with opened(os.open(path, _DIRECTORY)) as fd:
                programs = bpf.query_device_programs(fd).ids
        except OSError as error:
            return f"device programs of {path} could not be read: {cause(error)}"
        if programs:
            return f"{path} has a device filter of its own; the container gets no device that it denies"
    return ""
