"""What the configuration files of the engines say of ocigpu; no daemon is asked, nothing is written."""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ocigpu.core.errors import OcigpuError
from ocigpu.engines import places
from ocigpu.engines.document import table_at

RUNTIME = "ocigpu-runtime"
HOOK = "nvidia-container-runtime-hook"
"""The name that Docker's --gpus looks for on the daemon's PATH (moby, daemon/nvidia_linux.go)."""
CRI_PLUGINS = {1: ("cri",), 2: ("io.containerd.grpc.v1.cri",), 3: ("io.containerd.cri.v1.runtime",)}
"""The plugin table of Kubernetes' interface by version of containerd's config (containerd, docs/cri/config.md)."""


class RuntimeEntry(NamedTuple):
    """A runtime of an engine's configuration: its name, program, and whether that is there and may be executed."""

    name: str
    path: str
    exists: bool
    ours: bool
    """The program is ocigpu's."""


class EngineStatus(NamedTuple):
    """What one installation of an engine is configured to do.

    ``engine``: docker, containerd, crio or podman.  ``flavour``: "" for the system's, "rootless", "snap", "k3s",
    "rke2", "custom" for a daemon that runs with a file of its own.
    ``files``: the configuration files that are there, in the order the engine reads them.  ``target``: the file that
    "ocigpu engine configure" edits.  ``cdi``: "on", "off" or "unknown" (depends on the version).
    ``gpus_hook``: the hook of Docker's --gpus on the daemon's PATH, "" for none; ``gpus_hook_ours``: it is ocigpu's.
    """

    engine: str
    flavour: str
    installed: bool
    running: bool
    target: str
    files: tuple[str, ...] = ()
    runtimes: tuple[RuntimeEntry, ...] = ()
    default_runtime: str = ""
    cdi: str = "unknown"
    cdi_spec_dirs: tuple[str, ...] = ()
    gpus_hook: str = ""
    gpus_hook_ours: bool = False
    problems: tuple[str, ...] = ()

    @property
    def configured(self) -> bool:
        """Whether a runtime entry names ocigpu's program."""
        return any(entry.ours for entry in self.runtimes)

    @property
    def is_default(self) -> bool:
        """Whether containers that name no runtime get ocigpu."""
        return any(entry.ours and entry.name == self.default_runtime for entry in self.runtimes)


def read_engine_status(root: str = "/") -> list[EngineStatus]:
    """Return the state of every engine below ``root``: the four of the system, then others that are there.

    Others: Docker of this user (rootless) and of a snap, containerd of k3s and RKE2, and daemons that run with a file
    of their own.  Files that cannot be read or understood are in ``problems``, with line and column.
    """
    daemons = places.running_daemons(root)
    rootless_docker = places.home_config(root, "docker/daemon.json")
    candidates = [
        ("docker", "", places.DOCKER),
        ("docker", "rootless", rootless_docker),
        ("docker", "snap", places.DOCKER_SNAP),
        ("containerd", "", places.CONTAINERD),
        *(("containerd", name, path) for name, path in places.KUBERNETES.items()),
        ("crio", "", places.CRIO),
        ("podman", "", places.PODMAN[1]),
        ("podman", "rootless", places.home_config(root, "containers/containers.conf") if os.geteuid() else ""),
    ]
    known = {path for _, _, path in candidates}
    candidates += [(d.engine, "custom", d.config) for d in daemons if d.config and d.config not in known]
    found: dict[tuple[str, str], EngineStatus] = {}
    for engine, flavour, path in candidates:
        if flavour and (not path or places.file_mode(root, path) is None) and not _has_drop_ins(root, engine, path):
            continue
        running = any(d.engine == engine and d.config in ((path,) if flavour else ("", path)) for d in daemons)
        found.setdefault((engine, path), _read(root, engine, flavour, path, running))
    order = {name: number for number, name in enumerate(places.ENGINES)}
    return sorted(found.values(), key=lambda status: order[status.engine])


def _has_drop_ins(root: str, engine: str, path: str) -> bool:
    return engine == "podman" and bool(path) and bool(places.expand(root, f"{path}.d/*.conf"))


def _read(root: str, engine: str, flavour: str, path: str, running: bool) -> EngineStatus:
    problems: list[str] = []
    files, data = read_merged(root, engine, path, problems)
    status = EngineStatus(
        engine,
        flavour,
        bool(flavour in ("k3s", "rke2", "snap") or running or places.find_program(root, places.PROGRAMS[engine])),
        running,
        path,
        tuple(files),
    )
    try:
        status = _READERS[engine](root, status, data)
    except OcigpuError as error:
        problems.append(f"{path}: {error.message}")
    except (TypeError, ValueError) as error:
        problems.append(f"{path}: a value of an unexpected type ({error})")
    problems += [
        f'runtime "{entry.name}": {entry.path} is not there or not executable'
        for entry in status.runtimes
        if entry.ours and not entry.exists
    ]
    return status._replace(problems=tuple(problems))


def read_merged(
    root: str, engine: str, path: str, problems: list[str], texts: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[str], dict[str, Any]]:
    """Return the files of an engine whose main file is ``path``, and their data, later files over earlier ones.

    containerd before 2.1 does not merge the tables of one plugin but takes the last one: what it uses can be less.
    What cannot be read is appended to ``problems``.  ``texts``: what files would hold, instead of what they do.
    """
    paths = {
        "docker": [path],
        "containerd": [path],
        "crio": [path, *places.expand(root, f"{places.CRIO_DIRECTORY}/*")],
        "podman": _podman_files(root, path),
    }[engine]
    files: list[str] = []
    data: dict[str, Any] = {}
    while paths:
        file = paths.pop(0)
        try:
            text = texts[file] if file in texts else places.read_file(root, file)
            more = None if text is None else places.parse_config(file, text)
        except OcigpuError as error:
            problems.append(error.message)
            files.append(file)
            continue
        if more is None or file in files:
            continue
        files.append(file)
        _merge(data, more)
        if engine == "containerd":
            imports = more.get("imports")
            for pattern in imports if isinstance(imports, list) else ():
                paths += import_paths(root, file, str(pattern))
    return files, data


def import_paths(root: str, file: str, pattern: str) -> list[str]:
    """Return the files that one import of a containerd configuration means.

    A relative one begins at the file's directory; for a pattern containerd 1 begins where it runs, / for a service
    (containerd, server/config: resolveImports).
    """
    path = os.path.normpath(os.path.join(os.path.dirname(file), pattern))
    if "*" not in pattern:
        return [path]
    return places.expand(root, path) or places.expand(root, os.path.join("/", pattern))


def _podman_files(root: str, path: str) -> list[str]:
    files = [*places.PODMAN, *places.expand(root, f"{places.PODMAN_DIRECTORY}/*.conf")]
    if path not in files:
        files += [path, *places.expand(root, f"{path}.d/*.conf")]
    return files


def _merge(data: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(data.get(key), dict):
            _merge(data[key], value)
        else:
            data[key] = value


def _entries(root: str, runtimes: dict[str, str]) -> tuple[RuntimeEntry, ...]:
    return tuple(
        RuntimeEntry(name, path, _is_there(root, path), is_ours(path)) for name, path in sorted(runtimes.items())
    )


def is_ours(path: str) -> bool:
    """Whether the path of a runtime's program is that of ocigpu's shim."""
    return os.path.basename(path) == RUNTIME


def _is_there(root: str, path: str) -> bool:
    if "/" not in path:
        return bool(path and places.find_program(root, path))
    return places.is_program(root, path)


def _switch(value: object) -> str:
    return "unknown" if value is None else "on" if value is True else "off"


def _read_docker(root: str, status: EngineStatus, data: dict[str, Any]) -> EngineStatus:
    hook = places.find_program(root, HOOK)
    return status._replace(
        runtimes=_entries(root, _programs(data, ("runtimes",), "path")),
        default_runtime=str(data.get("default-runtime", "")),
        cdi=_switch(table_at(data, ("features",)).get("cdi")),
        cdi_spec_dirs=tuple(data.get("cdi-spec-dirs", ())),
        gpus_hook=hook,
        gpus_hook_ours=bool(hook) and is_our_hook(root, hook),
    )


def is_our_hook(root: str, path: str) -> bool:
    """Whether a hook on the PATH is ocigpu's: a link to its stub, or a copy of it."""
    try:
        target = os.readlink(os.path.join(root, path.lstrip("/")))
    except OSError:  # no link
        try:
            return "ocigpu" in (places.read_file(root, path) or "")[:4096]
        except OcigpuError:  # a compiled program: the vendor's
            return False
    return os.path.basename(target) == "ocigpu-hook"


def config_version(data: dict[str, Any]) -> int:
    """Return the version of a containerd configuration: 1 when it names none, or 0 (containerd, docs/ops.md).

    Raises ValueError when it is no whole number.
    """
    version = data.get("version", 1)
    if type(version) is not int or version < 0:
        raise ValueError(f"version = {version!r} is not a version")
    return version or 1


def cri_plugin(data: dict[str, Any]) -> tuple[str, ...]:
    """Return the keys of the plugin table of Kubernetes' interface for a containerd configuration."""
    return ("plugins", *CRI_PLUGINS[min(config_version(data), 3)])


def _programs(data: dict[str, Any], keys: tuple[str, ...], *names: str) -> dict[str, str]:
    """Return the programs of a table of runtimes by name; ``names``: the keys that may hold one, in an entry."""
    programs = {}
    for name in table_at(data, keys):
        entry = table_at(data, (*keys, name))
        path = next((entry[key] for key in names if entry.get(key)), "")
        if path:
            programs[name] = str(path)
    return programs


def _read_containerd(root: str, status: EngineStatus, data: dict[str, Any]) -> EngineStatus:
    keys = cri_plugin(data)
    plugin = table_at(data, keys)
    engine = table_at(plugin, ("containerd",))
    options = {name: table_at(engine, ("runtimes", name, "options")) for name in table_at(engine, ("runtimes",))}
    cdi = plugin.get("enable_cdi")
    if cdi is None and config_version(data) >= 3:  # only containerd 2, where it is on by default
        cdi = True
    return status._replace(
        runtimes=_entries(root, _programs({"options": options}, ("options",), "BinaryName", "Runtime")),
        default_runtime=str(engine.get("default_runtime_name", "")),
        cdi=_switch(cdi),
        cdi_spec_dirs=tuple(plugin.get("cdi_spec_dirs", ())),
    )


def _read_crio(root: str, status: EngineStatus, data: dict[str, Any]) -> EngineStatus:
    runtime = table_at(data, ("crio", "runtime"))
    return status._replace(
        runtimes=_entries(root, _programs(runtime, ("runtimes",), "runtime_path")),
        default_runtime=str(runtime.get("default_runtime", "")),
        cdi="on",  # CRI-O 1.23 and later, no switch
        cdi_spec_dirs=tuple(runtime.get("cdi_spec_dirs", ())),
    )


def _read_podman(root: str, status: EngineStatus, data: dict[str, Any]) -> EngineStatus:
    engine = table_at(data, ("engine",))
    runtimes = {}
    for name, paths in table_at(engine, ("runtimes",)).items():
        present = [path for path in paths if _is_there(root, path)]
        runtimes[name] = next(iter([*present, *paths]), "")  # Podman takes the first that is there
    return status._replace(
        runtimes=_entries(root, {name: path for name, path in runtimes.items() if path}),
        default_runtime=str(engine.get("runtime", "")),
        cdi="on",  # Podman 4.1 and later, no switch
        cdi_spec_dirs=tuple(engine.get("cdi_spec_dirs", ())),
    )


_READERS = {"docker": _read_docker, "containerd": _read_containerd, "crio": _read_crio, "podman": _read_podman}
