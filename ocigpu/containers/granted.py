"""Which devices a container may use: what its config.json says, and what its device cgroup allows now.

What the cgroup allows is asked of the kernel, by a process in that cgroup and with access(2): that passes the filters
of cgroup v1 and v2 and of all their parents (inode_permission in fs/namei.c), as opening does, and does not open the
device, which would wake a GPU.
"""

import os
import stat
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ocigpu.containers.asked import ask_child
from ocigpu.containers.find import Container, open_process, read_state_of
from ocigpu.core.config_json import get_list, get_object, get_rules
from ocigpu.core.errors import OcigpuError, SpecError
from ocigpu.provision.cgroups import CgroupMount, parse_cgroup_mounts, recorded_part
from ocigpu.provision.device_filter import (
    ACCESS_BITS,
    MAX_MAJOR,
    MAX_MINOR,
    FilterRule,
    Policy,
    access_mask,
    effective_rules,
)
from ocigpu.system import libc
from ocigpu.system.proc import parse_cgroup, read_cgroup, read_proc

Number = tuple[int, int]
"""Major and minor of a character device."""
_READ_WRITE = access_mask("rw")
_KINDS = {str(ord(letter)): letter for letter in "abc"}


class Allowed(NamedTuple):
    """What a container's device cgroup allows: ``numbers`` that can be opened for reading and writing.

    ``unknown``: why it could not be asked, else "".
    """

    numbers: frozenset[Number] = frozenset()
    unknown: str = ""


class Granted(NamedTuple):
    """What a config.json grants of some devices: ``numbers`` that its rules allow for reading and writing.

    ``everything``: its rules allow every device (``--privileged``).  ``has_rules``: it has device rules at all; without
    them runc allows nothing but its own defaults, and crun everything.
    """

    numbers: frozenset[Number]
    everything: bool
    has_rules: bool


def read_allowed(container: Container, numbers: Iterable[Number], recorded: str = "") -> Allowed:
    """Return which of these character devices the container's device cgroup allows now; none are opened.

    ``recorded``: as for :func:`cgroup_directories`.
    Needs root of the initial user namespace and Linux 5.2.  A child of ours is in the container's cgroups for a moment
    (of cgroup v1 only in the one for devices); nothing else is changed.
    """
    if not container.pid:
        return Allowed(unknown="the container does not run")
    wanted = sorted(set(numbers))
    try:
        proc_fd = open_process(container)
    except OcigpuError as error:
        return Allowed(unknown=error.message)
    try:
        directories = cgroup_directories(_read(proc_fd, "cgroup"), recorded)
        if container.status == "paused" and any(mount.version == 2 for mount, _ in directories):
            return Allowed(unknown="the container is paused: a process in its cgroup would be, too")
        found = ask_child(lambda: _try_in_cgroups([path for _, path in directories], wanted))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return Allowed(unknown=f"its device cgroup cannot be asked: {where}{error.strerror or error}")
    finally:
        os.close(proc_fd)
    return Allowed(frozenset((major, minor) for major, minor in found))


def read_granted(config: dict[str, Any], numbers: Iterable[Number]) -> Granted:
    """Return which of these character devices the rules of a config.json allow; pure.

    Rules that make no sense (SpecError of :func:`effective_rules`) count as none.
    """
    try:
        policy = Policy(effective_rules(config))
    except SpecError:
        return Granted(frozenset(), False, False)
    allowed = frozenset(number for number in numbers if policy.allowed("c", *number) & _READ_WRITE == _READ_WRITE)
    everything = policy.allowed("c", MAX_MAJOR, MAX_MINOR) & _READ_WRITE == _READ_WRITE
    return Granted(allowed, everything, bool(get_rules(config)))


def read_recorded_rules(container: Container, config: dict[str, Any]) -> list[FilterRule]:
    """Return the device rules that a container's runtime enforces, by its own record.

    runc: ``config.cgroups.devices`` of state.json, its defaults among them, as the last update has left them; crun: the
    rules of ``config``, which is its own copy.  Raises SpecError for a record that makes no sense.
    """
    state = read_state_of(container)
    if container.runtime == "crun":
        return effective_rules(config)
    entries = get_object(get_object(state, "config"), "cgroups").get("devices")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise SpecError("OCIGPU-SPEC-5", f"{container.state_file}: it has no device rules", "")
    return [rule for entry in entries for rule in _recorded_rule(entry, container.state_file)]


def _recorded_rule(entry: dict[str, Any], path: str) -> list[FilterRule]:
    """Return a rule as runc writes it (devices.Rule): the type is the number of a letter, -1 any number."""
    kind = _KINDS.get(str(entry.get("type")))
    allow, access, numbers = entry.get("allow"), entry.get("permissions"), (entry.get("major"), entry.get("minor"))
    good = kind is not None and type(allow) is bool and isinstance(access, str) and set(access) <= set(ACCESS_BITS)
    if not good or not all(type(number) is int and number >= -1 for number in numbers):
        raise SpecError("OCIGPU-SPEC-5", f"{path}: it has an invalid device rule", "")
    major, minor = (None if number == -1 else number for number in numbers)
    return [FilterRule(bool(allow), str(kind), major, minor, str(access))] if access else []


def listed_nodes(config: dict[str, Any]) -> dict[str, Number]:
    """Return the character devices that a config.json lists in linux.devices, by path."""
    found = {}
    for entry in get_list(get_object(config, "linux"), "devices"):
        if isinstance(entry, dict) and entry.get("type") in ("c", "u") and isinstance(entry.get("path"), str):
            major, minor = entry.get("major"), entry.get("minor")
            if type(major) is int and type(minor) is int:
                found[entry["path"]] = (major, minor)
    return found


def _read(dir_fd: int, name: str) -> str:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=dir_fd)
    with open(fd, encoding="utf-8", errors="surrogateescape") as file:
        return file.read(1 << 20)


def cgroup_directories(text: str, recorded: str = "") -> list[tuple[CgroupMount, str]]:
    """Return where the device cgroups of a process are, of v1 and of v2; none where it is in our own one.

    ``text``: its /proc/<pid>/cgroup.  ``recorded``: as for :func:`ocigpu.provision.cgroups.open_device_cgroup`, for v1:
    of v2 a cgroup with others below takes no process.  Raises OSError for a cgroup that no mount here shows.
    """
    mounts = parse_cgroup_mounts(read_proc("/proc/self/mountinfo"))
    ours, theirs = read_cgroup("/proc/self/cgroup"), parse_cgroup(text)
    found = []
    v1 = theirs.v1 and recorded_part(theirs.v1, recorded)
    for path, own, version in ((v1, ours.v1, 1), (theirs.v2, ours.v2, 2)):
        if path is None or path == own:
            continue
        directory = next(filter(None, (_below(mount, path) for mount in mounts if _is_of(mount, version))), None)
        if directory is None:
            raise OSError(0, f"no mount of cgroup v{version} shows {path}")
        found.append(directory)
    return found


def _is_of(mount: CgroupMount, version: int) -> bool:
    return mount.version == version and (version == 2 or "devices" in mount.controllers)


def _below(mount: CgroupMount, path: str) -> tuple[CgroupMount, str] | None:
    prefix = mount.root.rstrip("/")
    directory = mount.mountpoint + path.removeprefix(prefix)
    shown = path.startswith(f"{prefix}/") and ".." not in path.split("/") and os.path.isdir(directory)
    return (mount, directory) if shown else None


def join_cgroups(directories: Sequence[str]) -> None:
    """Make this process one of these cgroups, of different hierarchies, for a short while; raises OSError.

    Where memory is short in there, this process is ended before the container's own.
    """
    with open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
        file.write(b"1000")
    for directory in directories:
        with open(f"{directory}/cgroup.procs", "wb", buffering=0) as file:
            file.write(b"0")


def _try_in_cgroups(directories: Sequence[str], numbers: Sequence[Number]) -> list[Number]:
    """Return the devices that processes of these cgroups may open; for a child that ends with this.

    The nodes are made before, where everything is allowed, in a file system that nobody else sees.
    """
    fs_fd = libc.fsopen("tmpfs")
    libc.fsconfig_create(fs_fd)
    nodes_fd = libc.fsmount(fs_fd, 0)
    names = [f"{major}:{minor}" for major, minor in numbers]
    for name, number in zip(names, numbers, strict=True):
        os.mknod(name, stat.S_IFCHR | 0o666, os.makedev(*number), dir_fd=nodes_fd)
    join_cgroups(directories)
    # no more than this in there: what a process needs of memory is charged to its cgroup
    answers = [os.access(name, os.R_OK | os.W_OK, dir_fd=nodes_fd) for name in names]
    return [number for number, answer in zip(numbers, answers, strict=True) if answer]
