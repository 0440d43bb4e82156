"""Trusted facts about containers: files of runtimes and engines that no other user could have written.

Runtimes keep one directory for each container: runc a ``state.json`` (libcontainer, ``State``), crun a ``status``
(libcrun/status.c) and a copy of config.json.  A state counts only if no user but root and the caller can write or
replace it: other states would let their writer name any process and any bundle.  Images and pods may write annotations
into a state, which name neither.  A bundle, and files of engines, may be named by one user and written by another: both
are checked.  No file is opened before it is known to be a regular one.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ocigpu.bundle.document import parse_config
from ocigpu.core.config_json import MAX_CONFIG_BYTES, Document, get_list, get_object, is_path, parse_json
from ocigpu.core.errors import OcigpuError, OsErrorAs, SpecError, quoted
from ocigpu.core.record import NamedTuple
from ocigpu.entry.state import MAX_STATE_BYTES
from ocigpu.provision.device_filter import ACCESS_BITS, FilterRule, effective_rules
from ocigpu.system.files import read_part, why_replaceable, why_untrusted
from ocigpu.system.proc import is_running

RUNTIME_FILES = {"state.json": "runc", "status": "crun"}
MAX_ENGINE_FILE = 32 << 20
"""Bytes read of a file of an engine: Podman lists all its containers in one."""
MAX_LINKS = 40
"""The kernel's own limit of links in one path (path_resolution(7))."""
_LAYERS = ("aufs", "btrfs", "devicemapper", "fuse-overlayfs", "overlay", "overlay2", "rootfs", "vfs", "zfs")
"""Names of dockerd's storage drivers: directories beside "image" and "containers" of its data-root; with containerd's
image store its containers' root directories are in "rootfs"."""
_KINDS = {str(ord(letter)): letter for letter in "abc"}
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Container(NamedTuple):
    """A container that runc or crun knows.

    ``id``: of the runtime.  ``name``: of the engine ("namespace/pod/container" for Kubernetes), else the id.
    ``engine``: docker, podman, containerd, cri-o, or "" (started by hand).  ``runtime``: runc or crun.
    ``status``: created, running, paused or stopped.  ``pid``: its first process, 0 when that has ended: a process
    counts only if it started when the state says, ``start_time`` (clock ticks since boot).  ``bundle``, ``rootfs``,
    ``state_file``: absolute host paths.
    """

    id: str
    name: str
    engine: str
    runtime: str
    status: str
    pid: int
    bundle: str
    rootfs: str
    state_file: str
    start_time: int = 0


# its first process


def open_process(container: Container) -> int:
    """Return a descriptor of /proc/<pid> of the container's first process, which never means another process.

    Raises OcigpuError OCIGPU-CTR-3 when it has ended (or its number is another process's now), or cannot be opened.
    """
    ended = OcigpuError("OCIGPU-CTR-3", f"container {container.name}: its first process has ended")
    if not container.pid:
        raise ended
    try:
        fd = os.open(f"/proc/{container.pid}", _DIRECTORY)
    except FileNotFoundError:
        raise ended from None
    except OSError as error:
        raise OcigpuError("OCIGPU-CTR-3", f"container {container.name}: {error.strerror}") from error
    if not is_running(container.start_time, dir_fd=fd):
        os.close(fd)
        raise ended
    return fd


@contextmanager
def process_of(container: Container) -> Iterator[int]:
    """Give the descriptor of :func:`open_process` for a while."""
    fd = open_process(container)
    try:
        yield fd
    finally:
        os.close(fd)


def runs(pid: int, start_time: int) -> bool:
    """Tell whether a process runs that started then (clock ticks since boot)."""
    try:
        return is_running(start_time, f"/proc/{pid}/stat")
    except OSError:  # with hidepid (proc(5)) another user's process is as good as none
        return False


# what its runtime keeps


class NotTrustedError(Exception):
    """A state is of another user."""

    def __init__(self, uid: int) -> None:
        super().__init__(uid)
        self.uid = uid


class OwnState(NamedTuple):
    """What a runtime itself has put into a state.

    ``rootfs``: absolute.  ``labels``: runc's, without its own, None for crun.  ``start_time``: of the process ``pid``.
    """

    bundle: str
    rootfs: str
    labels: list[Any] | None
    pid: int
    start_time: int


@contextmanager
def open_state(directory: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Give a descriptor of a runtime's directory, and path and content of the state in it, "" for none.

    A runtime never makes a link there.  Raises NotTrustedError, SpecError.
    """
    try:
        fd = os.open(directory, _DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise SpecError("OCIGPU-SPEC-5", f"{directory}: {error.strerror}", "") from error
        yield -1, "", {}
        return
    try:
        for name in RUNTIME_FILES:
            path = f"{directory}/{name}"
            text = _read_in(fd, name, path, MAX_STATE_BYTES)
            if text is not None:
                yield fd, path, parse_json(text, path, "OCIGPU-SPEC-5")
                return
        yield -1, "", {}
    finally:
        os.close(fd)


def why_state_replaceable(path: str) -> str:
    """Return why another user could have replaced a state or a directory above it; "" if none could."""
    path = os.path.dirname(path)
    try:
        while path != "/":
            if cause := why_replaceable(path):
                return cause
            path = os.path.dirname(path)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def _read_in(dir_fd: int, name: str, path: str, limit: int) -> bytes | None:
    """Return the content of a file of a runtime's directory, None if it does not exist.

    Raises NotTrustedError and SpecError.
    """
    try:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SpecError("OCIGPU-SPEC-5", f"{path}: {error.strerror}", "") from error
    try:
        for status in (os.fstat(dir_fd), os.fstat(fd)):
            if status.st_uid not in (0, os.geteuid()):
                raise NotTrustedError(status.st_uid)
            if status.st_mode & 0o022 and not stat.S_ISLNK(status.st_mode):
                raise SpecError("OCIGPU-SPEC-5", f"{path}: users other than its owner may write it: not read", "")
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise SpecError("OCIGPU-SPEC-5", f"{path}: not a regular file", "")
        with open(f"/proc/self/fd/{fd}", "rb") as file:  # only now: opening a device or a FIFO does something
            text = read_part(file, limit + 1)
    except OSError as error:
        raise SpecError("OCIGPU-SPEC-5", f"{path}: {error.strerror}", "") from error
    finally:
        os.close(fd)
    if len(text) > limit:
        raise SpecError("OCIGPU-SPEC-5", f"{path}: larger than {limit >> 20} MiB", "")
    return text


def read_own_state(state: dict[str, Any], path: str) -> OwnState:
    """Return what a runtime itself has put into a state; raises SpecError for what cannot be of a container.

    runc: ``labels`` are annotations, "NAME=VALUE" in any order, and last of all its own "bundle=PATH" (libcontainer,
    specconv, CreateLibcontainerConfig): an annotation may be called "bundle", too.
    """
    if os.path.basename(path) == "status":
        bundle, rootfs, labels = state.get("bundle"), state.get("rootfs"), None
        pid, start_time = state.get("pid"), state.get("process-start-time")
    else:
        config = get_object(state, "config")
        labels = get_list(config, "labels")
        last = labels[-1] if labels else None
        bundle = last.removeprefix("bundle=") if isinstance(last, str) and last.startswith("bundle=") else None
        rootfs, labels = config.get("rootfs"), labels[:-1]
        pid, start_time = state.get("init_process_pid"), state.get("init_process_start")
    if not isinstance(bundle, str) or not is_path(bundle) or not bundle.startswith("/"):
        raise SpecError("OCIGPU-SPEC-5", f"{path}: it names no bundle", "")
    if not isinstance(rootfs, str) or not is_path(rootfs):
        raise SpecError("OCIGPU-SPEC-5", f"{path}: it names no root directory", "")
    if type(pid) is not int or type(start_time) is not int or not 0 <= pid < 1 << 31:
        raise SpecError("OCIGPU-SPEC-5", f"{path}: it names no process", "")
    return OwnState(bundle, os.path.normpath(os.path.join(bundle, rootfs)), labels, pid, start_time)


@contextmanager
def _open_state_of(container: Container) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with open_state(os.path.dirname(container.state_file)) as (fd, path, state):
            if path != container.state_file:
                raise SpecError("OCIGPU-SPEC-5", f"{container.state_file}: {os.strerror(errno.ENOENT)}", "")
            yield fd, state
    except NotTrustedError as error:  # of its owner when it was found
        where = os.path.dirname(container.state_file)
        raise SpecError("OCIGPU-SPEC-5", f"{where}: it is of user {error.uid} now", "") from error


def read_config_of(container: Container) -> Document:
    """Return the config.json that a container was started with.

    Raises SpecError for one that another user could have written (:func:`read_trusted`), and for one that differs from
    the configuration that the runtime kept at the start: it does not show what was granted.
    """
    with _open_state_of(container) as (fd, state):
        return read_config(read_own_state(state, container.state_file), container.state_file, fd)


def read_config(own: OwnState, state_file: str, dir_fd: int) -> Document:
    """Return the config.json of a state; as :func:`read_config_of`."""
    path = os.path.join(os.path.dirname(state_file), "config.json")
    text = None
    if own.labels is None:  # crun keeps a copy (container.c, libcrun_copy_config_file)
        text = _read_in(dir_fd, "config.json", path, MAX_CONFIG_BYTES)
        document = Document(path, {}, 0o600, os.geteuid(), os.getegid())
    if text is None:
        path = os.path.join(own.bundle, "config.json")
        file = read_trusted(path, MAX_CONFIG_BYTES, own.rootfs)
        text, document = file.text, Document(path, {}, file.mode, file.uid, file.gid)
    config = parse_config(text, path)
    root = get_object(config, "root").get("path")
    rootfs = os.path.normpath(os.path.join(own.bundle, root)) if isinstance(root, str) and is_path(root) else ""
    if rootfs != own.rootfs and os.path.realpath(rootfs) != os.path.realpath(own.rootfs):
        raise _another(path, "another root directory")
    annotations = get_object(config, "annotations")
    if own.labels is not None and sorted(map(str, own.labels)) != sorted(f"{k}={v}" for k, v in annotations.items()):
        raise _another(path, "other annotations")
    return document._replace(config=config)


def read_shown(own: OwnState, state: dict[str, Any], state_file: str, dir_fd: int) -> dict[str, Any]:
    """Return annotations and mounts of a container as in a config.json: they identify its engine and its name.

    runc stores both in its state, as they were at creation; crun stores them in its copy of config.json.
    """
    if own.labels is not None:
        pairs = [label.partition("=") for label in own.labels if isinstance(label, str)]
        mounts = get_list(get_object(state, "config"), "mounts")
        return {"annotations": {name: value for name, _, value in pairs}, "mounts": mounts}
    try:
        return read_config(own, state_file, dir_fd).config
    except SpecError:  # it may be gone already, and only a name to show is lost
        return {}


def _another(path: str, what: str) -> SpecError:
    hint = "It was changed or replaced after the start."
    return SpecError("OCIGPU-SPEC-1", f"read {path}: the container was started with {what} than it says", hint)


def read_cgroup(container: Container) -> str:
    """Return the path of a container's device cgroup as its runtime keeps it, "" without one.

    runc: ``cgroup_paths`` of state.json, by controller of v1, "" for v2; crun: ``cgroup-path`` of status.
    """
    try:
        with _open_state_of(container) as (_, state):
            paths = get_object(state, "cgroup_paths")
    except SpecError:  # it has just ended
        return ""
    path = paths.get("devices") or paths.get("") or state.get("cgroup-path")
    return path if isinstance(path, str) else ""


def read_recorded_rules(container: Container, config: dict[str, Any]) -> list[FilterRule]:
    """Return the device rules that a container's runtime enforces, by its own record.

    runc: ``config.cgroups.devices`` of state.json, its defaults among them, as the last update has left them; crun: the
    rules of ``config``, which is its own copy.  Raises SpecError for a record that makes no sense.
    """
    with _open_state_of(container) as (_, state):
        entries = get_object(get_object(state, "config"), "cgroups").get("devices")
    if container.runtime == "crun":
        return effective_rules(config)
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


# files that others name


class TrustedFile(NamedTuple):
    """The content of a file, and its mode, uid and gid."""

    text: bytes
    mode: int
    uid: int
    gid: int


def read_trusted(path: str, limit: int, below: str = "") -> TrustedFile:
    """Return the content of a file, of ``limit`` bytes at most, that only root and the calling user could have written.

    Every directory on the way, every link and the file itself must belong to them and not be writable by others (a
    sticky directory may be).  The file is not a link, and lies neither in a place that containers write
    (:func:`why_of_containers`) nor below the directory ``below``.  Raises SpecError OCIGPU-SPEC-1.
    """
    if not is_path(path):
        raise SpecError("OCIGPU-SPEC-1", f"read {quoted(path)}: not a path")
    with OsErrorAs(SpecError, "OCIGPU-SPEC-1", f"read {path}"):
        fd, place = _open_by_steps(path)
        try:
            if cause := why_of_containers(place) or _why_below(place, below):
                raise _refused(path, cause)
            status = os.fstat(fd)
            if why_untrusted(status.st_uid, status.st_mode):
                cause = "users other than root may write it, so it does not prove what was granted"
                raise _refused(path, cause, f"Make it root's: chown root {path}; chmod go-w {path}")
            with open(f"/proc/self/fd/{fd}", "rb") as file:
                text = read_part(file, limit + 1)
        finally:
            os.close(fd)
    if len(text) > limit:
        raise SpecError("OCIGPU-SPEC-1", f"read {path}: larger than {limit >> 20} MiB")
    return TrustedFile(text, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)


def _refused(path: str, cause: str, hint: str = "") -> SpecError:
    hint = (
        hint
        or "A file that others can write does not prove what a container was granted. To inspect it: ocigpu diff DIR"
    )
    return SpecError("OCIGPU-SPEC-1", f"read {path}: it is not trusted: {cause}", hint)


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
    """Raise SpecError for a directory whose entries other users could replace (sticky: only their own, inode(7))."""
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
            return f"{above}/{part} contains layers of images"
        if part == "volumes" and rest[1:2] == ["_data"]:
            return f"{above}/{part} contains volumes of containers"
        if part == "pods" and rest[1:2] in (["volumes"], ["volume-subpaths"]):
            return f"{above}/{part} contains volumes of pods"
        if part and rest and os.path.isdir(f"{above}/{part}-layers"):
            return f"{above}/{part} contains layers of images"
        if part in _LAYERS and all(os.path.isdir(f"{above}/{name}") for name in ("image", "containers")):
            return f"{above}/{part} contains layers of images"
    return ""


def read_engine_file(path: str, name: str = "") -> dict[str, Any]:
    """Return the JSON object of an engine's file (or the list in it, under ``name``); empty when it cannot be read."""
    try:
        text = read_trusted(path, MAX_ENGINE_FILE).text
        return parse_json(b'{"%s":%s}' % (name.encode(), text) if name else text, path)
    except SpecError:  # only a name to show is lost
        return {}
