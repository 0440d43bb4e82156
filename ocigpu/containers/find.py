"""The containers of this host: states of runc and crun, with the names that engines gave them; no daemon is asked.

Names are to show and to choose by; nothing else follows from them.
"""

import glob
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

from ocigpu.bundle.document import read_config
from ocigpu.containers import believed
from ocigpu.containers.believed import Container, open_process, read_config_of, read_engine_file
from ocigpu.containers.rules import find_cgroup
from ocigpu.core.config_json import Document, get_list, get_object
from ocigpu.core.errors import OcigpuError, SpecError, quoted
from ocigpu.core.record import NamedTuple
from ocigpu.provision.cgroups import CgroupMount, parse_cgroup_mounts
from ocigpu.system.proc import parse_cgroup, read_proc, read_stat

USER_DIRECTORIES = "/run/user"
USER_NAMES = ("runc", "crun", "docker/runtime-*/*", "containerd/runc/*")
"""Where runtimes and rootless engines keep states below a user's directory, patterns of glob(7)."""
MAX_CONTAINERS = 10_000
"""Directories looked at in one place."""


class Places(NamedTuple):
    """Where states are searched: ``roots`` are directories (``--root`` of runc and crun), or patterns of glob(7)."""

    roots: tuple[str, ...]


def default_places(roots: tuple[str, ...] = ()) -> Places:
    """Return where the runtimes and engines of this user keep states, or only ``roots`` if given.

    runc(8) and crun(1), --root; dockerd: ``runtime-NAME/NAMESPACE`` in its exec-root; containerd's shim:
    ``/run/containerd/runc/NAMESPACE``; Podman and CRI-O use the runtimes' own.  Those of rootless engines are in
    XDG_RUNTIME_DIR, which is /run/user/UID by default (pam_systemd(8)); other users': :mod:`ocigpu.containers.users`.
    """
    if roots:
        return Places(tuple(os.path.abspath(root) for root in roots))
    system = ("/run/runc", "/run/crun", "/run/docker/runtime-*/*", "/run/containerd/runc/*")
    own = f"{USER_DIRECTORIES}/{os.geteuid()}"
    own = glob.escape(os.environ.get("XDG_RUNTIME_DIR") or own) if os.geteuid() else own
    return Places((*system, *(f"{own}/{name}" for name in USER_NAMES)))


def find_containers(places: Places) -> tuple[list[Container], list[str]]:
    """Return the containers of all places, sorted by engine and name, and notes on what could not be read.

    A container that disappears during the search is left out.  Needs root to see containers of root.
    """
    found: list[Container] = []
    notes: list[str] = []
    mounts = parse_cgroup_mounts(read_proc("/proc/self/mountinfo"))
    for root in dict.fromkeys(path for pattern in places.roots for path in sorted(glob.glob(pattern))):
        others: set[int] = set()
        trusted = False
        for name in _names(root, notes):
            try:
                container = _read_container(os.path.join(root, name), mounts)
            except believed.NotTrustedError as error:
                others.add(error.uid)
                continue
            except SpecError as error:
                notes.append(error.message)
                continue
            if container is None:
                continue
            if not trusted and (cause := believed.why_state_replaceable(container.state_file)):
                notes.append(f"{root}: its states are not trusted: {cause}")
                break
            trusted = True  # all others are entries of this directory, too, and no links
            found.append(container)
        notes += [f"{root}: states of user {uid} are not trusted: inspect them as that user" for uid in sorted(others)]
    return sorted(found, key=lambda one: (one.engine, one.name, one.state_file)), notes


def find_container(places: Places, text: str) -> Container:
    """Return the container with this id or name, or whose id alone begins with ``text``.

    Raises OcigpuError OCIGPU-CTR-1 for no match, OCIGPU-CTR-2 for several.
    """
    containers, notes = find_containers(places)
    found = [one for one in containers if one.id == text] or [one for one in containers if one.name == text]
    found = found or [one for one in containers if text and one.id.startswith(text)]
    if not found:
        also = f", {len(notes)} not readable: see ocigpu ps" if notes else ""
        raise OcigpuError("OCIGPU-CTR-1", f"no container {quoted(text)} ({len(containers)} found{also})")
    if len(found) > 1:
        names = ", ".join(quoted(f"{one.id} ({one.engine or one.runtime} {one.name})") for one in found[:4])
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        raise OcigpuError("OCIGPU-CTR-2", f"{quoted(text)} may be {names}{more}")
    return found[0]


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


def _read_container(directory: str, mounts: list[CgroupMount]) -> Container | None:
    """Return the container of a runtime's directory, None for another directory or one that just disappeared."""
    with believed.open_state(directory) as (dir_fd, path, state):
        if not path:
            return None
        own = believed.read_own_state(state, path)
        pid = own.pid if believed.runs(own.pid, own.start_time) else 0
        status = "stopped"
        if pid:
            status = "created" if _is_waiting(dir_fd) else "paused" if _is_frozen(pid, mounts) else "running"
        config = believed.read_shown(own, state, path, dir_fd)
    identity = os.path.basename(directory)
    engine = find_engine(own.bundle, read_annotations(config))
    name = find_name(engine, identity, pid, own.bundle, config)
    runtime = believed.RUNTIME_FILES[os.path.basename(path)]
    start_time = own.start_time if pid else 0
    return Container(identity, name or identity, engine, runtime, status, pid, own.bundle, own.rootfs, path, start_time)


def _is_waiting(dir_fd: int) -> bool:
    """Tell whether a container was created and not yet started: both runtimes have a FIFO there until then."""
    try:
        return stat.S_ISFIFO(os.stat("exec.fifo", dir_fd=dir_fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _is_frozen(pid: int, mounts: list[CgroupMount]) -> bool:
    """Tell whether a process is in a frozen cgroup (cgroup v1 freezer, or cgroup.freeze of v2)."""
    cgroup = parse_cgroup(_text(f"/proc/{pid}/cgroup"), "freezer")
    for version, path, name, answer in (
        (1, cgroup.v1, "freezer.state", "FROZEN"),
        (2, cgroup.v2, "cgroup.freeze", "1"),
    ):
        found = find_cgroup(mounts, path, version, "freezer") if path is not None else None
        if found and _text(f"{found[1]}/{name}").strip() == answer:
            return True
    return False


def _text(path: str) -> str:
    with suppress(OSError):  # it is not there any more
        return read_proc(path)
    return ""


# what a command line means


class Target(NamedTuple):
    """A bundle's directory, its config.json, and the container that was made of it, if there is one."""

    bundle: str
    document: Document
    container: Container | None


def find_target(text: str, places: Places) -> Target:
    """Return what ``text`` names: a directory with a config.json is a bundle, else the container of this name or id,
    else a path is a bundle.

    Raises OcigpuError OCIGPU-CTR-1 or -2, SpecError for a configuration that cannot be read, or for a container's that
    is not believed.
    """
    is_file = os.path.isfile(os.path.join(text, "config.json"))
    containers = find_containers(places)[0]
    named = not is_file and not text.startswith(("/", "./", "../")) and any(one.name == text for one in containers)
    if is_file or (not named and ("/" in text or text in (".", ".."))):
        bundle = os.path.abspath(text)
        document = read_config(bundle)
        made = [one for one in containers if os.path.realpath(one.bundle) == os.path.realpath(bundle)]
        return Target(bundle, document, made[0] if len(made) == 1 else None)
    container = find_container(places, text)
    return Target(container.bundle, read_config_of(container), container)


@contextmanager
def open_root(container: Container | None) -> Iterator[str]:
    """Give a path of the root directory as the container's first process sees it, "" without such a process.

    Engines mount a root directory in a private mount namespace.  The path never refers to another process.
    """
    try:
        proc_fd = open_process(container) if container is not None and container.pid else -1
    except OcigpuError:  # it has just ended
        proc_fd = -1
    if proc_fd < 0:
        yield ""
        return
    try:
        yield f"/proc/self/fd/{proc_fd}/root"
    finally:
        os.close(proc_fd)


# engines and names


def find_name(engine: str, identity: str, pid: int, bundle: str, config: dict[str, Any]) -> str:
    """Return the engine's name for a container, "" when it has none; ``pid``: its first process, or 0."""
    if engine == "docker":
        return _docker_name(identity, get_list(config, "mounts"))
    if engine == "podman":
        return _conmon_name(identity, pid) or _podman_name(identity, bundle)
    return _annotated_name(read_annotations(config), engine == "cri-o")


def read_annotations(config: dict[str, Any]) -> dict[str, str]:
    """Return the annotations of a config.json that are text."""
    pairs = get_object(config, "annotations").items()
    return {name: value for name, value in pairs if isinstance(value, str)}


def find_engine(bundle: str, annotations: dict[str, str]) -> str:
    """Return the engine that made a bundle, by where it lies and by annotations that engines put there."""
    parts = bundle.split("/")
    for number, part in enumerate(parts):
        if part.startswith("io.containerd.runtime.") and len(parts) > number + 1:
            return "docker" if parts[number + 1] in ("moby", "plugins.moby") else "containerd"
    manager = annotations.get("io.container.manager", "")
    if manager == "libpod" or (not manager and "io.podman.annotations.autoremove" in annotations):
        return "podman"
    if manager == "cri-o" or "io.kubernetes.cri-o.ContainerID" in annotations:
        return "cri-o"
    return "podman" if bundle.endswith("/userdata") and "overlay-containers" in parts else ""


def _annotated_name(annotations: dict[str, str], of_cri_o: bool) -> str:
    """Return the name by annotations of the engine; under CRI-O the pod's author sets those of containerd."""
    parts = [] if of_cri_o else [annotations.get(f"io.kubernetes.cri.{name}", "") for name in _CRI_NAMES]
    if not any(parts):
        parts = [annotations.get(f"io.kubernetes.{name}", "") for name in _KUBELET_NAMES]
    return "/".join(part for part in parts if part) or ("" if of_cri_o else annotations.get("nerdctl/name", ""))


_CRI_NAMES = ("sandbox-namespace", "sandbox-name", "container-name")
"""Annotations of containerd's CRI (pkg/cri/annotations)."""
_KUBELET_NAMES = ("pod.namespace", "pod.name", "container.name")
"""Labels of the kubelet that CRI-O makes annotations of."""


def is_of_pod(config: dict[str, Any]) -> bool:
    """Tell whether a container is of a pod of Kubernetes, by annotations of containerd's CRI and of CRI-O."""
    return any(
        f"io.kubernetes.{name}" in read_annotations(config) for name in ("cri.sandbox-id", "pod.uid", "pod.name")
    )


def docker_directory(identity: str, mounts: list[Any]) -> str:
    """Return the directory of Docker's own files on a container, "" if it is unknown.

    Its /etc/hostname (or that of the container whose network it shares) is mounted from DATA-ROOT/containers/ID.
    """
    for mount in mounts:
        source = mount.get("source") if isinstance(mount, dict) else None
        directory, found, rest = source.rpartition("/containers/") if isinstance(source, str) else ("", "", "")
        file = rest.partition("/")[2]
        if found and file in ("hostname", "hosts", "resolv.conf") and mount.get("destination") == f"/etc/{file}":
            return f"{directory}/containers/{identity}"
    return ""


def _docker_name(identity: str, mounts: list[Any]) -> str:
    name = read_engine_file(f"{docker_directory(identity, mounts)}/config.v2.json").get("Name")
    return name.lstrip("/") if isinstance(name, str) else ""


def _conmon_name(identity: str, pid: int) -> str:
    """Return the name that conmon, the parent of a container's first process, was given (conmon(8), --name, --cid)."""
    try:
        words = _text(f"/proc/{read_stat(f'/proc/{pid}/stat').parent}/cmdline").split("\0") if pid else []
    except OSError:  # it is not there any more
        words = []
    options = dict(pairwise(words))
    if os.path.basename(words[0] if words else "") != "conmon" or options.get("-c") != identity:
        return ""
    return options.get("-n", "")


def _podman_name(identity: str, bundle: str) -> str:
    """Return the name from the container list of Podman's storage, which contains the bundle: NAME/userdata."""
    listed = read_engine_file(f"{os.path.dirname(os.path.dirname(bundle))}/containers.json", "containers")
    for entry in get_list(listed, "containers"):
        names = get_list(entry, "names")
        if isinstance(entry, dict) and entry.get("id") == identity and names and isinstance(names[0], str):
            return names[0]
    return ""
