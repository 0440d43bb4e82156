"""What needs ocigpu's programs on this machine: asked before they are removed from it."""

import itertools
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from ocigpu.core.config_json import OUR_HOOK
from ocigpu.core.errors import OcigpuError
from ocigpu.engines.files import Root
from ocigpu.engines.places import (
    DAEMON_PATH,
    ENGINES,
    KUBERNETES,
    expand,
    find_program,
    is_contained,
    is_foreign,
    is_program,
    parse_config,
    read_file,
    read_link,
    running_daemons,
)
from ocigpu.engines.podman import PodmanContainer, read_containers
from ocigpu.engines.status import HOOK, EngineStatus, RuntimeEntry, is_generated, is_our_hook, read_merged
from ocigpu.system.proc import is_running, read_stat

_TASKS = tuple(
    f"{state}/io.containerd.runtime.v2.task/*"
    for state in (
        "/run/containerd",
        "/run/docker/containerd/daemon",
        "/run/k3s/containerd",
        "/run/user/*/docker/containerd/daemon",
    )
)
"""Where the containerds of the system, of Docker and of k3s keep the bundles of a namespace, unless --state or a file
says another place (containerd, docs/ops.md)."""
_KIND = re.compile(r"""\bkind["']?:\s*["']?([\w./-]+)""")
"""In a CDI specification, YAML or JSON, as generators write it: no parser is needed for a remark."""
_LEFT = "/run/ocigpu/left-"
"""Starts of names of files: by which process, and until when, an engine is used that was taken back while it ran."""


def is_shim(root: str, path: str, shim: str) -> bool:
    """Whether a program's path below the root leads to this shim, not to another installation's."""
    path = path if "/" in path else find_program(root, path)
    return bool(path) and len({os.path.realpath(os.path.join(root, one.lstrip("/"))) for one in (path, shim)}) == 1


def find_users(root: str, shim: str, statuses: list[EngineStatus], podman: list[PodmanContainer]) -> list[str]:
    """Return the containers that need the shim, as text; ``podman``: root's of Podman.

    Running containers need it, because the shim also ends them. containerd's own shim keeps the program's path beside
    the bundle (containerd, pkg/runc: WriteRuntime) and works in a bundle's directory (runtime/v2: Command), wherever
    that is; conmon, of Podman and CRI-O, has it on its command line (conmon(8)).  Containers that Docker or root's
    Podman made with a runtime of ours need it, running or not: their file contains the name.
    """
    found: dict[str, str] = {}
    namespaces = {path: None for pattern in _TASKS for path in expand(root, pattern)}
    for path in expand(root, "/proc/[0-9]*/cmdline"):
        words = _text(root, path).split("\0")
        name, process = os.path.basename(words[0]), os.path.dirname(path)
        if name.startswith("containerd-shim") and not is_foreign(root, process):
            namespaces[os.path.dirname(read_link(root, f"{process}/cwd"))] = None
        elif (
            name == "conmon"
            and not is_contained(root, process)
            and any(is_shim(root, word, shim) for word in words[1:])
        ):
            told = dict(itertools.pairwise(words))
            found[told.get("-c", path)] = f"container {told.get('-n', told.get('-c', ''))[:60]} of conmon"
    for path in itertools.chain.from_iterable(expand(root, f"{one}/*/runtime") for one in filter(None, namespaces)):
        if is_shim(root, _text(root, path).strip(), shim):
            namespace, identity = path.split("/")[-3:-1]
            found[identity] = f"container {identity[:12]} of {namespace}"
    for status in statuses:
        names = {entry.name for entry in entries_of(root, shim, status)} if status.engine == "docker" else set()
        for one in _docker_containers(root, status) if names else ():
            if one.runtime in names:
                found[one.identity] = f"Docker's container {one.name}, made with the runtime {one.runtime}"
    found |= _podman_users(root, shim, statuses, podman)
    return list(found.values())


def find_podman_users(shim: str, statuses: list[EngineStatus], home: str) -> list[str]:
    """Return the Podman containers of the user with this home that need the shim, as text; any text may be in it."""
    return list(_podman_users("/", shim, statuses, read_containers("/", home)).values())


def _podman_users(
    root: str, shim: str, statuses: list[EngineStatus], containers: list[PodmanContainer]
) -> dict[str, str]:
    engines = (status for status in statuses if status.engine == "podman")
    names = {entry.name for status in engines for entry in entries_of(root, shim, status)}
    return {
        one.identity: f"Podman's container {one.name}, made with the runtime {one.runtime}"
        for one in containers
        if one.runtime in names or ("/" in one.runtime and is_shim(root, one.runtime, shim))
    }


def find_cdi_users(root: str, shim: str, statuses: list[EngineStatus], podman: list[PodmanContainer]) -> list[str]:
    """Return the containers that start with CDI devices of a specification whose hooks are ours, as text.

    Docker and Podman look the devices up at each start.  Another toolkit can define them, so they need not be removed.
    """
    kinds = {}
    for directory in ("/etc/cdi", "/var/run/cdi"):
        for path in expand(root, f"{directory}/*"):
            text = _text(root, path)
            if os.path.join(os.path.dirname(shim), OUR_HOOK) in text and (kind := _KIND.search(text)):
                kinds[kind[1]] = path
    users = [(f"Podman's container {one.name}", one.devices) for one in podman]
    for status in statuses if kinds else ():
        if status.engine == "docker":
            users += [(f"Docker's container {one.name}", one.devices) for one in _docker_containers(root, status)]
    return [
        f"{who}, made with {device}, starts again once another toolkit has written {spec}"
        for who, devices in users
        for device in devices[:1]
        if (spec := kinds.get(device.partition("=")[0]))
    ]


def find_gpus_users(root: str, shim: str, statuses: list[EngineStatus], all_hooks: bool) -> list[str]:
    """Return the containers of docker run --gpus that would not start again, as text.

    They need a hook on dockerd's PATH at each start (moby, daemon/nvidia_linux.go).  ``all_hooks``: all our hooks are
    removed, with their links; else only the one beside the shim.
    """
    home = os.path.realpath(os.path.join(root, os.path.dirname(shim).lstrip("/")))
    stays = goes = False
    for directory in DAEMON_PATH:
        if is_program(root, path := f"{directory}/{HOOK}"):
            beside = os.path.realpath(os.path.join(root, directory.lstrip("/"))) == home
            ours = is_our_hook(root, path) and (all_hooks or beside)
            stays, goes = stays or not ours, goes or ours
    if stays or not goes:
        return []
    dockers = (status for status in statuses if status.engine == "docker")
    containers = itertools.chain.from_iterable(_docker_containers(root, status) for status in dockers)
    return [f"Docker's container {one.name}, made with --gpus" for one in containers if one.uses_gpus]


class _DockerContainer(NamedTuple):
    """A container that Docker has made; ``uses_gpus``: with --gpus; ``devices``: CDI names."""

    identity: str
    name: str
    runtime: str
    uses_gpus: bool
    devices: tuple[str, ...]


def _docker_containers(root: str, status: EngineStatus) -> Iterator[_DockerContainer]:
    """Yield the containers that Docker has made."""
    data_root = str(read_merged(root, "docker", status.target, [])[1].get("data-root") or "/var/lib/docker")
    for path in expand(root, f"{data_root}/containers/*/hostconfig.json"):
        text, about = _text(root, path), os.path.join(os.path.dirname(path), "config.v2.json")
        identity = path.split("/")[-2]
        name = str(_data(about, _text(root, about)).get("Name", "")).lstrip("/") or identity[:12]
        data = _data(path, text)
        # the text, of a file that was cut short when a disk was full
        named = re.search(r'"Runtime": ?"([^"]*)"', text)
        runtime = str(data.get("Runtime", named[1] if named else ""))
        requests = [one for one in data.get("DeviceRequests") or () if isinstance(one, dict)]
        uses_gpus = any(one.get("Driver") in ("", "nvidia") for one in requests)
        named_devices = (one.get("DeviceIDs") or () for one in requests if one.get("Driver") == "cdi")
        devices = tuple(map(str, itertools.chain.from_iterable(named_devices)))
        yield _DockerContainer(identity, name, runtime, uses_gpus, devices)


def entries_of(root: str, shim: str, status: EngineStatus) -> list[RuntimeEntry]:
    """Return the runtime entries of an engine that lead to the shim."""
    return [entry for entry in status.runtimes if is_shim(root, entry.path, shim)]


def find_entries(root: str, shim: str, statuses: list[EngineStatus], program: str = "") -> list[str]:
    """Return the runtime entries that lead to the shim, as text; ``program``: only those with this name.

    A configuration that cannot be parsed, but contains the name, counts as one.  A configuration that k3s or RKE2
    writes at each start, from the installed programs, does not count (:func:`find_generated`).
    """
    name = program or os.path.basename(shim)
    statuses = [status for status in statuses if not is_generated(root, status)]
    unread = [
        f"{status.engine}: {status.problems[0]}; and it says {name}"
        for status in statuses
        if status.problems and status.target and name in _text(root, status.target)
    ]
    return unread + [
        f'{status.engine}: the runtime "{entry.name}" of {" or ".join(status.files)} is {entry.path}'
        for status in statuses
        for entry in entries_of(root, shim, status)
        if program in ("", os.path.basename(entry.path))
    ]


def find_generated(root: str, shim: str, statuses: list[EngineStatus]) -> list[str]:
    """Return which of k3s and RKE2 have had entries that lead to the shim since their last start."""
    generated = (status for status in statuses if status.flavour in KUBERNETES and is_generated(root, status))
    return [status.flavour for status in generated if entries_of(root, shim, status)]


def note_waiting(root: str, status: EngineStatus, step: str) -> None:
    """Record that an engine's daemon still uses entries removed from its file, until a step is done."""
    for daemon in running_daemons(root):
        if daemon.engine == status.engine and daemon.config in ("", status.target):
            try:
                start = read_stat(os.path.join(root, f"proc/{daemon.pid}/stat")).start
            except OSError:  # it has ended
                continue
            with Root(root) as files:
                files.write(files.read(_LEFT + status.engine), f"{daemon.pid} {start} {step}\n")


def find_waiting(root: str) -> list[tuple[str, str]]:
    """Return the engines whose daemons still use removed entries, and the step that ends it."""
    found = []
    for engine in ENGINES:
        pid, _, rest = _text(root, _LEFT + engine).strip().partition(" ")
        start, _, step = rest.partition(" ")
        if pid.isdigit() and start.isdigit() and is_running(int(start), os.path.join(root, f"proc/{pid}/stat")):
            found.append((engine, step))
    return found


def _data(path: str, text: str) -> dict[str, Any]:
    try:
        return parse_config(path, text)
    except OcigpuError:
        return {}


def _text(root: str, path: str) -> str:
    try:
        return read_file(root, path) or ""
    except OcigpuError:  # gone by now
        return ""
