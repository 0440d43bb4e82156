"""The containers of this host, read from the state files of runc and crun; no daemon is asked.

Every engine here has runc or crun (or a shim that becomes one of them, such as ours) make its containers, and those
keep one directory for each: runc a ``state.json`` (libcontainer, ``State``), crun a ``status`` (libcrun/status.c) and
a copy of config.json.  Only states count that nobody but root and the calling user can write or replace: others would
let their writer name any process and any bundle.  What images and pods may write into a state, annotations, names
neither.
"""

import errno
import glob
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ocigpu.bundle.document import parse_config
from ocigpu.containers.names import find_engine, find_name, read_annotations, read_text
from ocigpu.containers.trusted import read_trusted
from ocigpu.core.config_json import MAX_CONFIG_BYTES, Document, get_list, get_object, is_path, parse_json
from ocigpu.core.errors import OcigpuError, SpecError, quoted
from ocigpu.entry.state import MAX_STATE_BYTES
from ocigpu.system.files import why_replaceable
from ocigpu.system.proc import is_running, parse_cgroup

MAX_CONTAINERS = 10_000
"""Directories looked at in one place."""
RUNTIME_FILES = {"state.json": "runc", "status": "crun"}
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


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


class Places(NamedTuple):
    """Where states are looked for: ``roots`` are directories (``--root`` of runc and crun), or patterns of glob(7)."""

    roots: tuple[str, ...]


def default_places(roots: tuple[str, ...] = ()) -> Places:
    """Return where the runtimes and engines of this user keep states, or only ``roots`` if there are any.

    runc(8) and crun(1), --root; dockerd: ``runtime-NAME/NAMESPACE`` in its exec-root; containerd's shim:
    ``/run/containerd/runc/NAMESPACE``; Podman and CRI-O use the runtimes' own.  Without root: those in
    XDG_RUNTIME_DIR, which is /run/user/UID by default (pam_systemd(8)).
    """
    if roots:
        return Places(tuple(os.path.abspath(root) for root in roots))
    system = ("/run/runc", "/run/crun", "/run/docker/runtime-*/*", "/run/containerd/runc/*")
    own = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    tops = ["/run/user/*"] if os.geteuid() == 0 else [glob.escape(own)]
    names = ("runc", "crun", "docker/runtime-*/*", "containerd/runc/*")
    return Places((*system, *(f"{top}/{name}" for top in tops for name in names)))


def find_containers(places: Places) -> tuple[list[Container], list[str]]:
    """Return the containers of all places, sorted by engine and name, and notes on what could not be read.

    A container that goes while it is looked at is left out.  Needs root to see containers of root.
    """
    found: list[Container] = []
    notes: list[str] = []
    frozen = _FrozenCgroups()
    for root in dict.fromkeys(path for pattern in places.roots for path in sorted(glob.glob(pattern))):
        others: set[int] = set()
        for name in _names(root, notes):
            try:
                container = _read_container(os.path.join(root, name), frozen)
            except _NotTrustedError as error:
                others.add(error.uid)
                continue
            except SpecError as error:
                notes.append(error.message)
                continue
            if container is None:
                continue
            if cause := _why_replaceable(container.state_file):
                notes.append(f"{root}: its states are not trusted: {cause}")
                break
            found.append(container)
        notes += [f"{root}: states of user {uid} are not trusted: look at them as that user" for uid in sorted(others)]
    return sorted(found, key=lambda one: (one.engine, one.name, one.state_file)), notes


def find_container(places: Places, text: str) -> Container:
    """Return the container with this id or name, or whose id alone begins with ``text``.

    Raises OcigpuError OCIGPU-CTR-1 when there is none, OCIGPU-CTR-2 when there are several.
    """
    containers, notes = find_containers(places)
    found = [one for one in containers if text in (one.id, one.name)]
    found = found or [one for one in containers if text and one.id.startswith(text)]
    if not found:
        also = f" ({len(notes)} not readable: see ocigpu ps)" if notes else ""
        raise OcigpuError("OCIGPU-CTR-1", f"no container {quoted(text)} among {len(containers)}{also}")
    if len(found) > 1:
        names = ", ".join(quoted(f"{one.id} ({one.engine or one.runtime} {one.name})") for one in found[:4])
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        raise OcigpuError("OCIGPU-CTR-2", f"{quoted(text)} may be {names}{more}")
    return found[0]


def open_process(container: Container) -> int:
    """Return a descriptor of /proc/<pid> of the container's first process, which never means another process.

    Raises OcigpuError OCIGPU-CTR-3 when it has ended (or its number is another process's now), or cannot be opened.
    """
    ended = OcigpuError("OCIGPU-CTR-3", f"container {container.name}: its first process has ended")
    if not container.pid:
        raise ended
    try:
        fd = os.open(f"/proc/{container.pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ended from None
    except OSError as error:
        raise OcigpuError("OCIGPU-CTR-3", f"container {container.name}: {error.strerror}") from error
    if not is_running(container.start_time, dir_fd=fd):
        os.close(fd)
        raise ended
    return fd


class _NotTrustedError(Exception):
    """Somebody else may write this state."""

    def __init__(self, uid: int) -> None:
        super().__init__(uid)
        self.uid = uid


def _why_replaceable(path: str) -> str:
    """Return why somebody else could have put a state, or a directory above it, in its place; "" if nobody could."""
    path = os.path.dirname(path)
    try:
        while path != "/":
            if cause := why_replaceable(path):
                return cause
            path = os.path.dirname(path)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def _names(root: str, notes: list[str]) -> list[str]:
    try:
        names = sorted(os.listdir(root))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        notes.append(f"{root}: {error.strerror}")
        return []
    if len(names) > MAX_CONTAINERS:
        notes.append(f"{root}: more than {MAX_CONTAINERS} containers: the rest is left out")
    return names[:MAX_CONTAINERS]


def _read_container(directory: str, frozen: "_FrozenCgroups") -> Container | None:
    """Return the container of a runtime's directory, None for another directory or one that has just gone."""
    try:
        fd = os.open(directory, _FLAGS)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link is none of the runtime's making
            return None
        raise SpecError("OCIGPU-SPEC-5", f"{directory}: {error.strerror}", "") from error
    try:
        for name in RUNTIME_FILES:
            path = f"{directory}/{name}"
            text = _read_trusted(fd, name, path, MAX_STATE_BYTES)
            if text is not None:
                state = parse_json(text, path, "OCIGPU-SPEC-5")
                return _make_container(state, path, fd, frozen)
    finally:
        os.close(fd)
    return None


def _read_trusted(dir_fd: int, name: str, path: str, limit: int) -> bytes | None:
    """Return the content of a file of a runtime's directory, None if there is none.

    Raises _NotTrustedError and SpecError.
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
                raise _NotTrustedError(status.st_uid)
            if status.st_mode & 0o022 and not stat.S_ISLNK(status.st_mode):
                raise SpecError("OCIGPU-SPEC-5", f"{path}: others than its owner may write it: not read", "")
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise SpecError("OCIGPU-SPEC-5", f"{path}: not a regular file", "")
        with open(f"/proc/self/fd/{fd}", "rb") as file:  # only now: opening a device or a FIFO does something
            text = file.read(limit + 1)
    except OSError as error:
        raise SpecError("OCIGPU-SPEC-5", f"{path}: {error.strerror}", "") from error
    finally:
        os.close(fd)
    if len(text) > limit:
        raise SpecError("OCIGPU-SPEC-5", f"{path}: larger than {limit >> 20} MiB", "")
    return text


def _is_waiting(dir_fd: int) -> bool:
    """Tell whether a container was created and not yet started: both runtimes have a FIFO there until then."""
    try:
        return stat.S_ISFIFO(os.stat("exec.fifo", dir_fd=dir_fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _read_own_state(state: dict[str, Any], path: str) -> "_Own":
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
    return _Own(bundle, os.path.normpath(os.path.join(bundle, rootfs)), labels, pid, start_time)


class _Own(NamedTuple):
    """``rootfs``: absolute; ``labels``: runc's, without its own, None for crun."""

    bundle: str
    rootfs: str
    labels: list[Any] | None
    pid: int
    start_time: int


def _make_container(state: dict[str, Any], path: str, dir_fd: int, frozen: "_FrozenCgroups") -> Container:
    """Return the container that a state describes; raises SpecError for what cannot be one."""
    own = _read_own_state(state, path)
    pid = own.pid if _runs(own.pid, own.start_time) else 0
    status = "stopped"
    if pid:
        status = "created" if _is_waiting(dir_fd) else "paused" if frozen.contains(pid) else "running"
    try:
        config = _read_config(own, path, dir_fd).config
    except SpecError:  # it may be gone already, and only a name to show is lost
        config = {}
    identity = os.path.basename(os.path.dirname(path))
    engine = find_engine(own.bundle, read_annotations(config))
    name = find_name(engine, identity, pid, own.bundle, config)
    runtime = RUNTIME_FILES[os.path.basename(path)]
    start_time = own.start_time if pid else 0
    return Container(identity, name or identity, engine, runtime, status, pid, own.bundle, own.rootfs, path, start_time)


def read_state_of(container: Container) -> dict[str, Any]:
    """Return a container's state as its runtime keeps it; raises SpecError, also when it is gone."""
    with _open_directory(container) as dir_fd:
        return _read_state(container, dir_fd)


def read_config_of(container: Container) -> Document:
    """Return the config.json that a container was started with.

    Raises SpecError for one that somebody else could have written (:func:`read_trusted`), or that the container was
    not started with by what its runtime has kept: then it does not say what was granted.
    """
    with _open_directory(container) as dir_fd:
        own = _read_own_state(_read_state(container, dir_fd), container.state_file)
        return _read_config(own, container.state_file, dir_fd)


@contextmanager
def _open_directory(container: Container) -> Iterator[int]:
    directory = os.path.dirname(container.state_file)
    try:
        fd = os.open(directory, _FLAGS)
    except OSError as error:
        raise SpecError("OCIGPU-SPEC-5", f"{directory}: {error.strerror}", "") from error
    try:
        yield fd
    except _NotTrustedError as error:  # of its owner when it was found
        raise SpecError("OCIGPU-SPEC-5", f"{directory}: it is of user {error.uid} now", "") from error
    finally:
        os.close(fd)


def _read_state(container: Container, dir_fd: int) -> dict[str, Any]:
    path = container.state_file
    text = _read_trusted(dir_fd, os.path.basename(path), path, MAX_STATE_BYTES)
    if text is None:
        raise SpecError("OCIGPU-SPEC-5", f"{path}: {os.strerror(errno.ENOENT)}", "")
    return parse_json(text, path, "OCIGPU-SPEC-5")


def _read_config(own: _Own, state_file: str, dir_fd: int) -> Document:
    path = os.path.join(os.path.dirname(state_file), "config.json")
    text = None
    if own.labels is None:  # crun keeps a copy (container.c, libcrun_copy_config_file)
        text = _read_trusted(dir_fd, "config.json", path, MAX_CONFIG_BYTES)
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


def _another(path: str, what: str) -> SpecError:
    hint = "It was changed after the start, or another one has its place."
    return SpecError("OCIGPU-SPEC-1", f"read {path}: the container was started with {what} than it says", hint)


def _runs(pid: int, start_time: int) -> bool:
    try:
        fd = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # it has ended; with hidepid (proc(5)) another user's process is as good as none, too
        return False
    try:
        return is_running(start_time, dir_fd=fd)
    finally:
        os.close(fd)


class _FrozenCgroups:
    """Tells which processes are in a frozen cgroup (cgroup v1 freezer, or cgroup.freeze of v2)."""

    def __init__(self) -> None:
        from ocigpu.provision.cgroups import parse_cgroup_mounts

        self._mounts = parse_cgroup_mounts(read_text("/proc/self/mountinfo"))

    def contains(self, pid: int) -> bool:
        cgroup = parse_cgroup(read_text(f"/proc/{pid}/cgroup"), "freezer")
        rows = ((1, cgroup.v1, "freezer.state", "FROZEN"), (2, cgroup.v2, "cgroup.freeze", "1"))
        for version, path, name, answer in rows:
            if path is None:
                continue
            for mount in self._mounts:
                if mount.version != version or (version == 1 and "freezer" not in mount.controllers):
                    continue
                prefix = mount.root.rstrip("/")
                file = f"{mount.mountpoint}{path.removeprefix(prefix)}/{name}"
                if path.startswith(f"{prefix}/") and read_text(file).strip() == answer:
                    return True
        return False
