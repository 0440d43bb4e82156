"""Device rules of running containers: which devices are allowed now, and a change that a failure reverts.

A process in the cgroup asks the kernel by access(2) which devices are allowed.  As opening does, that passes the
filters of cgroup v1 and v2 and of all their parents (inode_permission in fs/namei.c).  It does not open the device,
which would wake a GPU.
"""

import json
import os
import signal
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from ocigpu.containers.believed import Container, process_of
from ocigpu.containers.child import ask_each
from ocigpu.core.actions import AllowDevice
from ocigpu.core.config_json import get_list, get_object, get_rules
from ocigpu.core.errors import ApplyError, OcigpuError, SpecError
from ocigpu.core.facts import DeviceNode, HostFacts
from ocigpu.core.record import NamedTuple
from ocigpu.provision.cgroups import (
    CgroupMount,
    change_device_rules,
    parse_cgroup_mounts,
    recorded_part,
)
from ocigpu.provision.device_filter import MAX_MAJOR, MAX_MINOR, FilterRule, Policy, access_mask, effective_rules
from ocigpu.system import libc
from ocigpu.system.proc import read_cgroup, read_proc

Number = tuple[int, int]
"""Major and minor of a character device."""
_READ_WRITE = access_mask("rw")
_KEEP = b"k"


def may_open(policy: Policy, number: Number) -> bool:
    """Tell whether a policy allows a character device to be opened for reading and writing."""
    return policy.allowed("c", *number) & _READ_WRITE == _READ_WRITE


class Allowed(NamedTuple):
    """What a container's device cgroup allows: ``numbers`` that can be opened for reading and writing.

    ``unknown``: why it could not be asked, else "".
    """

    numbers: frozenset[Number] = frozenset()
    unknown: str = ""


class Granted(NamedTuple):
    """A config.json's grant of some devices: ``numbers`` that its rules allow for reading and writing.

    ``everything``: its rules allow every device (``--privileged``).  ``has_rules``: it contains device rules; without
    them runc allows only its own defaults, and crun everything.
    """

    numbers: frozenset[Number]
    everything: bool
    has_rules: bool


def read_allowed(containers: Sequence[Container], numbers: Iterable[Number], recorded: str = "") -> list[Allowed]:
    """Return which of these character devices each container's device cgroup allows now; none are opened.

    ``recorded``: as for :func:`cgroup_directories`.
    Needs root of the initial user namespace and Linux 5.2.  A child of ours is in the container's cgroups for a moment
    (of cgroup v1 only in the one for devices); nothing else is changed.
    """
    trial = _Trial(sorted(set(numbers)))
    found: dict[int, Allowed] = {}
    # a child goes from cgroup to cgroup of the same hierarchies: it never stays in one of another container
    asked: dict[tuple[str, ...], dict[int, Callable[[], Any]]] = {}
    for place, container in enumerate(containers):
        try:
            directories = _directories_to_ask(container, recorded)
        except OcigpuError as error:
            found[place] = Allowed(unknown=error.message)
        except OSError as error:
            found[place] = _unasked(error)
        else:
            hierarchies = asked.setdefault(tuple(mount.mountpoint for mount, _ in directories), {})
            hierarchies[place] = partial(trial.try_in, [path for _, path in directories])
    for looks in asked.values():
        found |= zip(looks, map(_allowed, ask_each(looks.values())), strict=True)
    return [found[place] for place in range(len(containers))]


def _directories_to_ask(container: Container, recorded: str) -> list[tuple[CgroupMount, str]]:
    """Return the cgroups in which a container's devices can be tried; raises OcigpuError, OSError."""
    if not container.pid:
        raise OcigpuError("OCIGPU-CTR-3", "the container does not run")
    with process_of(container) as proc_fd:
        directories = cgroup_directories(proc_fd, recorded)
    if container.status == "paused" and any(mount.version == 2 for mount, _ in directories):
        raise OcigpuError("OCIGPU-CTR-4", "the container is paused: a process in its cgroup would be, too")
    return directories


def _allowed(ask: Callable[[], Any]) -> Allowed:
    try:
        return Allowed(frozenset((major, minor) for major, minor in ask()))
    except OSError as error:
        return _unasked(error)


def _unasked(error: OSError) -> Allowed:
    where = f"{error.filename}: " if error.filename else ""
    return Allowed(unknown=f"its device cgroup cannot be queried: {where}{error.strerror or error}")


def read_granted(config: dict[str, Any], numbers: Iterable[Number]) -> Granted:
    """Return which of these character devices the rules of a config.json allow; pure.

    Rules that make no sense (SpecError of :func:`effective_rules`) count as none.
    """
    try:
        policy = Policy(effective_rules(config))
    except SpecError:
        return Granted(frozenset(), False, False)
    allowed = frozenset(number for number in numbers if may_open(policy, number))
    everything = may_open(policy, (MAX_MAJOR, MAX_MINOR))
    return Granted(allowed, everything, bool(get_rules(config)))


def listed_nodes(config: dict[str, Any]) -> dict[str, Number]:
    """Return the character devices that a config.json lists in linux.devices, by path."""
    found = {}
    for entry in get_list(get_object(config, "linux"), "devices"):
        if isinstance(entry, dict) and entry.get("type") in ("c", "u") and isinstance(entry.get("path"), str):
            major, minor = entry.get("major"), entry.get("minor")
            if type(major) is int and type(minor) is int:
                found[entry["path"]] = (major, minor)
    return found


def numbers_of(facts: HostFacts, devices: Iterable[str]) -> set[Number]:
    """Return the numbers of all nodes that only holders of these GPUs or MIG devices may open.

    Those of a MIG device are its capabilities, and the nodes of its GPU.
    """
    wanted = set(devices)
    found: list[DeviceNode | None] = []
    capabilities = {node.minor: node for _, node in facts.cap_nodes}
    for gpu in facts.gpus:
        migs = [mig for mig in gpu.mig_devices if mig.uuid in wanted]
        if migs or gpu.uuid in wanted:
            found += [gpu.node, *gpu.drm_nodes]
        found += [capabilities.get(minor) for mig in migs for minor in (mig.gi_minor, mig.ci_minor)]
    return {(node.major, node.minor) for node in found if node is not None}


def cgroup_directories(proc_fd: int, recorded: str = "") -> list[tuple[CgroupMount, str]]:
    """Return where the device cgroups of a process are, of v1 and of v2; none where it is in our own one.

    ``proc_fd``: its directory of procfs.  ``recorded``: as for :func:`ocigpu.provision.cgroups.open_device_cgroup`,
    for v1: of v2 a cgroup with others below takes no process.  Raises OSError for a cgroup that no mount here shows.
    """
    mounts = parse_cgroup_mounts(read_proc("/proc/self/mountinfo"))
    ours, theirs = read_cgroup("/proc/self/cgroup"), read_cgroup("cgroup", proc_fd)
    found = []
    v1 = theirs.v1 and recorded_part(theirs.v1, recorded)
    for path, own, version in ((v1, ours.v1, 1), (theirs.v2, ours.v2, 2)):
        if path is None or path == own:
            continue
        directory = find_cgroup(mounts, path, version)
        if directory is None:
            raise OSError(0, f"no mount of cgroup v{version} shows {path}")
        found.append(directory)
    return found


def find_cgroup(
    mounts: Iterable[CgroupMount], path: str, version: int, controller: str = "devices"
) -> tuple[CgroupMount, str] | None:
    """Return where a cgroup of a hierarchy (``controller``: of v1) is, by the first mount that shows it."""
    for mount in mounts:
        prefix = mount.root.rstrip("/")
        if mount.version == version and (version == 2 or controller in mount.controllers):
            directory = mount.mountpoint + path.removeprefix(prefix)
            if path.startswith(f"{prefix}/") and ".." not in path.split("/") and os.path.isdir(directory):
                return mount, directory
    return None


def join_cgroups(directories: Sequence[str]) -> None:
    """Make this process one of these cgroups, of different hierarchies, for a short while; raises OSError.

    Where memory is short in there, this process is ended before the container's own.
    """
    with open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
        file.write(b"1000")
    for directory in directories:
        with open(f"{directory}/cgroup.procs", "wb", buffering=0) as file:
            file.write(b"0")


class _Trial:
    """The tests of a child in cgroups, one after another; the child ends with the result.

    The nodes are made before, where everything is allowed, in a private file system.
    """

    def __init__(self, numbers: Sequence[Number]) -> None:
        self._numbers = {f"{major}:{minor}": (major, minor) for major, minor in numbers}
        self._nodes_fd = -1

    def try_in(self, directories: Sequence[str]) -> list[Number]:
        """Return the devices that processes of these cgroups may open."""
        if self._nodes_fd < 0:
            fs_fd = libc.fsopen("tmpfs")
            libc.fsconfig_create(fs_fd)
            nodes_fd = libc.fsmount(fs_fd, 0)
            os.close(fs_fd)
            try:
                for name, number in self._numbers.items():
                    os.mknod(name, stat.S_IFCHR | 0o666, os.makedev(*number), dir_fd=nodes_fd)
            except OSError:  # access(2) would say of all that is missing that it is denied
                os.close(nodes_fd)
                raise
            self._nodes_fd = nodes_fd
        join_cgroups(directories)
        # no more than this in there: what a process needs of memory is charged to its cgroup
        answers = [os.access(name, os.R_OK | os.W_OK, dir_fd=self._nodes_fd) for name in self._numbers]
        return [number for number, answer in zip(self._numbers.values(), answers, strict=True) if answer]


# changes


@contextmanager
def changed_rules(
    proc_fd: int,
    allow: Sequence[AllowDevice],
    deny: Sequence[AllowDevice],
    policy: list[FilterRule],
    recorded: str = "",
) -> Iterator[None]:
    """Change the device rules of the container of a process while the block runs, and for good if it ends well.

    A separate process changes them and waits.  If the work fails, or its process is killed, the separate process
    restores the rules.  Arguments as for :func:`ocigpu.provision.cgroups.change_device_rules`, which raises what this
    does.  For a process with one thread.
    """
    if not allow and not deny:
        yield
        return
    up_fd, child_up_fd = os.pipe2(os.O_CLOEXEC)
    child_down_fd, down_fd = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.close(up_fd)
        os.close(down_fd)
        _be_guard(
            lambda: change_device_rules(proc_fd, tuple(allow), tuple(deny), policy, recorded),
            child_up_fd,
            child_down_fd,
        )
    os.close(child_up_fd)
    os.close(child_down_fd)
    with open(up_fd, "rb") as words:
        try:
            _check(words.readline())
            try:
                yield
            except OcigpuError as error:
                os.close(down_fd)
                down_fd = -1
                left = _left(words.readline())
                if left:
                    message = f"{error.message} (device rules could not be put back: {left})"
                    raise ApplyError(error.code, message, error.hint) from error
                raise
            _keep(down_fd)
        finally:
            if down_fd >= 0:
                os.close(down_fd)
            words.read()
            os.waitpid(pid, 0)


def _keep(down_fd: int) -> None:
    try:
        os.write(down_fd, _KEEP)
    except BrokenPipeError:  # the guard was killed: then the rules stay, too
        return


def _left(line: bytes) -> str:
    text: str = json.loads(line).get("left", "") if line else "the process that does it was killed"
    return text


def _check(line: bytes) -> None:
    """Read a message of the guard: {} means success.  Raises ApplyError."""
    if not line:
        raise ApplyError("OCIGPU-INT-2", "device rules: the process that changes them was killed")
    error = json.loads(line).get("error")
    if error:
        raise ApplyError(*error)


def _be_guard(change: Callable[[], Callable[[], None]], up_fd: int, down_fd: int) -> NoReturn:
    def say(**data: object) -> None:
        try:
            os.write(up_fd, json.dumps(data).encode() + b"\n")
        except BrokenPipeError:  # the process we work for was killed
            return

    try:
        os.setsid()  # not ended with the others of a group
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        try:
            undo = change()
        except OcigpuError as error:
            say(error=[error.code, error.message, error.hint])
            os._exit(1)
        say()
        if os.read(down_fd, 1) == _KEEP:
            os._exit(0)
        try:
            undo()
            say()
        except OcigpuError as error:
            say(left=error.message)
    finally:
        os._exit(1)
