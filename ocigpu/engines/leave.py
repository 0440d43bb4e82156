"""What needs ocigpu's programs on this machine: asked before they are removed from it."""

import itertools
import os

from ocigpu.core.errors import OcigpuError
from ocigpu.engines.files import Root
from ocigpu.engines.places import ENGINES, KUBERNETES, expand, find_program, parse_config, read_file, running_daemons
from ocigpu.engines.status import EngineStatus, RuntimeEntry, is_generated, read_merged
from ocigpu.system.proc import is_running, read_stat

_TASKS = (
    "/run/containerd",
    "/run/docker/containerd/daemon",
    "/run/k3s/containerd",
    "/run/user/*/docker/containerd/daemon",
)
"""Where the containerds of the system, of Docker and of k3s keep what runs (containerd, docs/ops.md: state)."""
_LEFT = "/run/ocigpu/left-"
"""Starts of names of files: by which process, and until when, an engine is used that was taken back while it ran."""


def is_shim(root: str, path: str, shim: str) -> bool:
    """Whether a program's path below the root leads to this shim, and not to that of another installation."""
    path = path if "/" in path else find_program(root, path)
    return bool(path) and len({os.path.realpath(os.path.join(root, one.lstrip("/"))) for one in (path, shim)}) == 1


def find_users(root: str, shim: str, statuses: list[EngineStatus]) -> list[str]:
    """Return the containers that need the shim, in words.

    Those that run: the shim ends them, too.  containerd's own shim keeps the program's path beside the bundle
    (containerd, pkg/runc: WriteRuntime); conmon, of Podman and CRI-O, has it on its command line (conmon(8)).  And
    Docker's containers that were made with a runtime of ours, running or not: the name is in their file.
    """
    found: dict[str, str] = {}
    mains = [status.target for status in statuses if status.engine == "containerd"]
    states = [str(read_merged(root, "containerd", main, [])[1].get("state", "")) for main in mains]
    tops = dict.fromkeys([*_TASKS, *filter(os.path.isabs, states)])
    patterns = (f"{top}/io.containerd.runtime.v2.task/*/*/runtime" for top in tops)
    for path in itertools.chain.from_iterable(expand(root, pattern) for pattern in patterns):
        if is_shim(root, _text(root, path).strip(), shim):
            namespace, identity = path.split("/")[-3:-1]
            found[identity] = f"container {identity[:12]} of {namespace}"
    for path in expand(root, "/proc/[0-9]*/cmdline"):
        words = _text(root, path).split("\0")
        if os.path.basename(words[0]) == "conmon" and any(is_shim(root, word, shim) for word in words[1:]):
            told = dict(itertools.pairwise(words))
            found[path] = f"container {told.get('-n', told.get('-c', ''))[:60]} of conmon"
    for status in statuses:
        names = {entry.name for entry in entries_of(root, shim, status)} if status.engine == "docker" else set()
        data_root = str(read_merged(root, "docker", status.target, [])[1].get("data-root") or "/var/lib/docker")
        for path in expand(root, f"{data_root}/containers/*/hostconfig.json") if names else ():
            text = _text(root, path)
            try:
                runtime = parse_config(path, text).get("Runtime")
            except OcigpuError:  # cut short when a disk was full
                runtime = next((name for name in names if f'"{name}"' in text), None)
            if runtime in names:
                about = os.path.join(os.path.dirname(path), "config.v2.json")
                name = str(parse_config(about, _text(root, about)).get("Name", "")).lstrip("/")
                identity = path.split("/")[-2]
                found[identity] = f"Docker's container {name or identity[:12]}, made with the runtime {runtime}"
    return list(found.values())


def entries_of(root: str, shim: str, status: EngineStatus) -> list[RuntimeEntry]:
    """Return the runtime entries of an engine that lead to the shim."""
    return [entry for entry in status.runtimes if is_shim(root, entry.path, shim)]


def find_entries(root: str, shim: str, statuses: list[EngineStatus], program: str = "") -> list[str]:
    """Return the runtime entries that lead to the shim, in words; ``program``: only those that have this name.

    A configuration that cannot be understood, and says the name, counts as one; one that k3s or RKE2 writes at each
    start, of the programs that are there, does not (:func:`find_generated`).
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
    """Remember that the daemon of an engine goes on with what was taken out of its file, until a step is done."""
    for daemon in running_daemons(root):
        if daemon.engine == status.engine and daemon.config in ("", status.target):
            try:
                start = read_stat(os.path.join(root, f"proc/{daemon.pid}/stat")).start
            except OSError:  # it has ended
                continue
            with Root(root) as files:
                files.write(files.read(_LEFT + status.engine), f"{daemon.pid} {start} {step}\n")


def find_waiting(root: str) -> list[tuple[str, str]]:
    """Return the engines whose daemons still go on with what was taken out, and the step that ends it."""
    found = []
    for engine in ENGINES:
        pid, _, rest = _text(root, _LEFT + engine).strip().partition(" ")
        start, _, step = rest.partition(" ")
        if pid.isdigit() and start.isdigit() and is_running(int(start), os.path.join(root, f"proc/{pid}/stat")):
            found.append((engine, step))
    return found


def _text(root: str, path: str) -> str:
    try:
        return read_file(root, path) or ""
    except OcigpuError:  # gone by now
        return ""
