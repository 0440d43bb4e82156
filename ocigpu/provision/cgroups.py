"""The container's device cgroup, widened by the devices of a plan where the runtime has not been told of them.

The shim declares the rules in config.json, so that the runtime enforces them; then there is nothing to do here.  Left
is the case of a hook in a bundle that others made.  On cgroup v1 missing rules are added one by one; on v2 every
attached program is exchanged, in one step each, for one computed from the whole of config.json.  Nothing is ever
detached first: a cgroup without a program allows everything.
"""

import errno
import os

from ocigpu.core.errors import ApplyError, cause, printable, quoted
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
from ocigpu.system.paths import At, named
from ocigpu.system.proc import parse_cgroup, parse_mounts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NamedTuple

    from ocigpu.core.actions import AllowDevice
    from ocigpu.core.settings import Settings
else:
    from ocigpu.core.record import NamedTuple

NO_CGROUPS_NOTE = "no-cgroups is set: device cgroup left alone"
ROOTLESS_NOTE = "rootless: device cgroup left alone; access is what the outer manager allows"
MAX_FILE = 4 << 20
"""Bytes read at most of a file below /proc or of devices.list; the mount table of a big node has some 100 KiB."""


class CgroupMount(NamedTuple):
    """A cgroup file system of the mount table: ``root`` is the part of it that ``mountpoint`` shows."""

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

    ``container_proc_fd``: open directory /proc/<pid> of the container's first process; through it a reused pid cannot
    be mistaken for the container.  ``config``: its OCI configuration; without it (None) rules can be added on cgroup
    v1, but not on v2, whose programs are computed from all of it.
    Must run in the host's mount namespace.  Needs root in the initial user namespace;
    without, nothing is changed and the note says so.  The undo restores exactly what was there and can be called
    once.  Raises ApplyError (OCIGPU-CG-1) with nothing changed, SpecError for rules in config.json that make no sense.
    """
    if not rules:
        return "", _nothing
    if settings.no_cgroups:
        return NO_CGROUPS_NOTE, _nothing
    declared = effective_rules(config or {})
    policy = Policy(declared)
    if all(_covers(policy.allowed("c", rule.major, rule.minor), rule) for rule in rules):
        return "", _nothing
    if os.geteuid() != 0 or not in_initial_user_namespace():
        return ROOTLESS_NOTE, _nothing
    cgroup = open_device_cgroup(container_proc_fd)
    keep = False
    try:
        if cgroup.version == 1:
            undo = _allow_v1(cgroup, rules)
            keep = True
            return "", undo
        wanted = [FilterRule(True, "c", rule.major, rule.minor, rule.access) for rule in rules]
        replaced = _replace_v2(cgroup, None if config is None else declared + wanted)
        if replaced is None:
            return "", _nothing
        keep = True
        return _ancestor_note(cgroup), replaced
    finally:
        if not keep:
            os.close(cgroup.fd)


def change_device_rules(
    container_proc_fd: int,
    allow: "tuple[AllowDevice, ...]",
    deny: "tuple[AllowDevice, ...]",
    policy: "list[FilterRule]",
    recorded: str = "",
) -> "Callable[[], None]":
    """Make the device cgroup of a running container allow and deny devices; return the undo, to be called once.

    ``recorded``: as for :func:`open_device_cgroup`.
    ``allow`` and ``deny``: what is not so now.  ``policy``: everything that is to hold then, which a program of cgroup
    v2 is made of.  On v1 a denial takes back what a rule for exactly that device has allowed, and nothing else (the
    kernel's devcgroup_update_access): look at what came of it.  Needs root in the initial user namespace, in the host's
    mount namespace.  Raises ApplyError OCIGPU-CG-1 with nothing changed.
    """
    cgroup = open_device_cgroup(container_proc_fd, recorded)
    try:
        if cgroup.version == 1:
            changes = [("devices.allow", rule) for rule in allow] + [("devices.deny", rule) for rule in deny]
            return _change_v1(cgroup, [(name, f"c {rule.major}:{rule.minor} {rule.access}") for name, rule in changes])
        undo = _replace_v2(cgroup, policy)
        if undo is None:
            raise _failed("replace device program of", cgroup.path, "it has none of its own")
        return undo
    except ApplyError:
        os.close(cgroup.fd)
        raise


def _nothing() -> None:
    """Undo of nothing."""


def _covers(allowed: int, rule: "AllowDevice") -> bool:
    mask = access_mask(rule.access)
    return allowed & mask == mask


def _failed(operation: str, path: str, why: "OSError | str") -> ApplyError:
    if isinstance(why, OSError):
        return ApplyError("OCIGPU-CG-1", f"{operation} {path}: {printable(cause(why))}", None, why.errno or 0)
    return ApplyError("OCIGPU-CG-1", f"{operation} {path}: {why}")


# -- finding the cgroup ------------------------------------------------------------------------------------------


def open_device_cgroup(container_proc_fd: int, recorded: str = "") -> Cgroup:
    """Return the open device cgroup of a process: of v1 where a v1 "devices" hierarchy is mounted, else of v2.

    ``recorded``: path of the container's cgroup as its runtime keeps it, from the mount point or from the top; its
    first process may have gone on into one below (systemd does), and rules stay where the runtime has put them.
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
    try:
        # A cgroup file system has no symbolic links, and cgroups are only made by those who may change them.
        with named("openat", path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _failed("open device cgroup", path, error) from error
    device = os.fstat(fd).st_dev
    if (os.major(device), os.minor(device)) != mount.device:
        os.close(fd)
        return None
    return fd


def _read_at(directory_fd: int, name: str, what: str) -> str:
    """Return the text of a file below /proc; ``directory_fd`` of -1: ``name`` is an absolute path."""
    try:
        fd = os.open(
            name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory_fd if directory_fd >= 0 else None
        )
        with os.fdopen(fd, "rb") as file:
            data = file.read(MAX_FILE + 1)
    except OSError as error:
        error.filename = None  # known to a user as what it is
        raise _failed("read", what, error) from error
    if len(data) > MAX_FILE:
        raise _failed("read", what, f"more than {MAX_FILE} bytes")
    return os.fsdecode(data)


# -- cgroup v1 ---------------------------------------------------------------------------------------------------


def _allow_v1(cgroup: Cgroup, rules: "tuple[AllowDevice, ...]") -> "Callable[[], None]":
    """Add the rules that devices.list lacks to a v1 cgroup; return the undo, which takes back what was added."""
    listed = Policy(parse_devices_list(_read_at(cgroup.fd, "devices.list", f"{cgroup.path}/devices.list")))
    changes: list[tuple[str, str]] = []
    for rule in rules:
        missing = access_mask(rule.access) & ~listed.allowed("c", rule.major, rule.minor)
        if missing:
            letters = "".join(letter for letter in "rwm" if ACCESS_BITS[letter] & missing)
            changes.append(("devices.allow", f"c {rule.major}:{rule.minor} {letters}"))
    return _change_v1(cgroup, changes)


_OPPOSITE = {"devices.allow": "devices.deny", "devices.deny": "devices.allow"}


def _change_v1(cgroup: Cgroup, changes: "list[tuple[str, str]]") -> "Callable[[], None]":
    """Write rules into files of a v1 cgroup, pairs of (file, rule); return the undo, which also closes the cgroup."""
    done: list[tuple[str, str]] = []

    def take_back() -> None:
        for name, line in reversed(done):
            try:
                _write_v1(cgroup, _OPPOSITE[name], line)
            except ApplyError as error:
                if error.errno not in (errno.ENOENT, errno.ENODEV):  # the cgroup is gone, and with it the rules
                    raise

    try:
        for name, line in changes:
            _write_v1(cgroup, name, line)
            done.append((name, line))
    except ApplyError:
        take_back()
        raise

    def undo() -> None:
        try:
            take_back()
        finally:
            os.close(cgroup.fd)

    return undo


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


def _write_v1(cgroup: Cgroup, name: str, line: str) -> None:
    """Write one rule: the kernel takes exactly one per write (Documentation/admin-guide/cgroup-v1/devices.rst)."""
    try:
        fd = At(cgroup.fd, name, f"{cgroup.path}/{name}").open(os.O_WRONLY)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)
    except OSError as error:
        raise _failed(f'write "{line}" to', f"{cgroup.path}/{name}", error) from error


# -- cgroup v2 ---------------------------------------------------------------------------------------------------


def _replace_v2(cgroup: Cgroup, rules: "list[FilterRule] | None") -> "Callable[[], None] | None":
    """Exchange every device program of a v2 cgroup for one that enforces ``rules`` (None: they are not known).

    Returns the undo, which puts the old programs back, or None if there is no program: then everything is allowed
    and there is nothing to widen.
    """
    try:
        attached = bpf.query_device_programs(cgroup.fd)
    except OSError as error:
        raise _failed("query device programs of", cgroup.path, error) from error
    if not attached.ids:
        return None
    if rules is None:
        raise _failed("widen device program of", cgroup.path, "the container's config.json was not found")
    program = device_program(rules)
    pairs: list[tuple[int, int]] = []  # (old, new) descriptors
    exchanged: list[tuple[int, int]] = []

    def put_back() -> None:
        for old, new in reversed(exchanged):
            try:
                _exchange(cgroup.fd, old, new, attached.flags)
            except OSError as error:
                # Gone: the cgroup itself, or our program because the runtime has set its own anew.
                if error.errno not in (errno.ENOENT, errno.ENODEV):
                    raise _failed("put back device program of", cgroup.path, error) from error

    def close_all() -> None:
        for pair in pairs:
            for fd in pair:
                os.close(fd)

    try:
        # A cgroup refuses the same program twice, so each of the old ones gets a copy of the new one.  All are loaded
        # before the first is exchanged.
        for program_id in attached.ids:
            try:
                old = bpf.open_program(program_id)
            except OSError as error:
                raise _failed(f"read device program {program_id} of", cgroup.path, error) from error
            try:
                pairs.append((old, bpf.load_device_program(program)))
            except OSError as error:
                os.close(old)
                raise _failed("load device program for", cgroup.path, error) from error
        for old, new in pairs:
            try:
                _exchange(cgroup.fd, new, old, attached.flags)
            except OSError as error:
                raise _failed("replace device program of", cgroup.path, _explained(error)) from error
            exchanged.append((old, new))
    except ApplyError:
        put_back()
        close_all()
        raise

    def undo() -> None:
        try:
            put_back()
        finally:
            close_all()
            os.close(cgroup.fd)

    return undo


def _exchange(cgroup_fd: int, new_fd: int, old_fd: int, flags: int) -> None:
    """Attach one program in the place of another, in one step."""
    if flags & bpf.BPF_F_ALLOW_MULTI:
        bpf.attach_device_program(cgroup_fd, new_fd, bpf.BPF_F_ALLOW_MULTI, old_fd)
    else:
        bpf.attach_device_program(cgroup_fd, new_fd, flags & bpf.BPF_F_ALLOW_OVERRIDE)


def _explained(error: OSError) -> "OSError | str":
    if error.errno == errno.EINVAL:
        return f"{cause(error)} (needs Linux 5.5)"
    if error.errno == errno.ENOENT:
        return f"{cause(error)} (something else has just changed it, or it is attached by a link)"
    return error


def _ancestor_note(cgroup: Cgroup) -> str:
    """Return a note if cgroups above have device programs: all levels must agree, and those are not ours to change."""
    parent = cgroup.relative
    while "/" in parent:
        parent = parent.rpartition("/")[0]
        path = f"{cgroup.mountpoint}/{parent}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                programs = bpf.query_device_programs(fd).ids
            finally:
                os.close(fd)
        except OSError as error:
            return f"device programs of {path} could not be read: {cause(error)}"
        if programs:
            return f"{path} has a device filter of its own; the container gets no device that it denies"
    return ""
