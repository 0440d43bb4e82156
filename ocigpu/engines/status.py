"""The state of ocigpu in the engines' configuration files; contacts no daemon, writes nothing."""

import os

from ocigpu.core.config_json import OUR_HOOK, is_stub
from ocigpu.core.errors import OcigpuError
from ocigpu.core.record import NamedTuple
from ocigpu.engines import places
from ocigpu.engines.document import look_up, table_at

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

RUNTIME = "ocigpu-runtime"
HOOK = "nvidia-container-runtime-hook"
"""The name that Docker's --gpus looks for on the daemon's PATH (moby, daemon/nvidia_linux.go)."""
CRI_PLUGINS = {1: ("cri",), 2: ("io.containerd.grpc.v1.cri",), 3: ("io.containerd.cri.v1.runtime",)}
"""The plugin table of Kubernetes' interface by version of containerd's config (containerd, docs/cri/config.md)."""


CRI_NAMES = frozenset({"cri", "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"})
"""What a list of disabled plugins may call that interface."""


_OF_SPEC_DIRS = ("spec_dirs", "spec-dirs", "imports", "\\")
"""What the text of a file contains that names such directories, or another file; an escape may hide either."""
_LONG_TEXTS = ('"""', "'''")
"""Between these a line that begins with # is no comment (TOML 1.0, Strings)."""


OF_RUNTIME = "runtime "
"""How a problem of a runtime entry begins, and no problem of a file."""


class RuntimeEntry(NamedTuple):
    """A runtime of an engine's configuration: its name, its program, and whether that exists and is executable."""

    name: str
    path: str
    exists: bool
    ours: bool
    """The program is ocigpu's."""


class EngineStatus(NamedTuple):
    """What one installation of an engine is configured to do.

    ``engine``: docker, containerd, crio or podman.  ``flavour``: "" for the system's, "rootless", "snap", "k3s",
    "rke2", "custom" for a running daemon with its own file.  ``files``: the existing configuration files, in the order
    the engine reads them.  ``target``: the file that "ocigpu engine configure" edits.  ``cdi``: "on", "off" or
    "unknown" (depends on the version).  ``cri``: pods can use it; the CRI plugin is off in a containerd that only
    serves Docker.  ``gpus_hook``: the hook of Docker's --gpus on the daemon's PATH, "" for none; ``gpus_hook_ours``: it
    is ocigpu's.  ``waiting``: the template of k3s or RKE2 with our entry, which they read at their next start.
    ``default_missing``: the default runtime has no entry, see :func:`find_missing_default`.
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
    cri: bool = False
    problems: tuple[str, ...] = ()
    default_missing: bool = False
    waiting: str = ""

    @property
    def name(self) -> str:
        """What to call it on a command line, or at least to people."""
        if not self.flavour or self.flavour in places.KUBERNETES:
            return self.flavour or self.engine
        return f"{self.engine} ({self.target if self.flavour == 'custom' else self.flavour})"

    @property
    def configured(self) -> bool:
        """Whether a runtime entry names ocigpu's program."""
        return any(entry.ours for entry in self.runtimes)

    @property
    def is_default(self) -> bool:
        """Whether containers that name no runtime get ocigpu."""
        return any(entry.ours and entry.name == self.default_runtime for entry in self.runtimes)


def read_engine_status(root: str = "/", daemons: "Sequence[places.Daemon] | None" = None) -> list[EngineStatus]:
    """Return the state of every engine below ``root``: the four of the system, then others found.

    Others: Docker of this user (rootless) and of a snap, containerd of k3s and RKE2, and running daemons with their own
    file.  Files that cannot be read or parsed are in ``problems``, with line and column.  ``daemons``: the running
    ones, if known.
    """
    daemons = places.running_daemons(root) if daemons is None else daemons
    found: dict[tuple[str, str], EngineStatus] = {}
    for engine, flavour, path in _find_installations(root, daemons):
        running = any(d.engine == engine and d.config in ((path,) if flavour else ("", path)) for d in daemons)
        found.setdefault((engine, path), _read(root, engine, flavour, path, running))
    order = {name: number for number, name in enumerate(places.ENGINES)}
    return sorted(found.values(), key=lambda status: order[status.engine])


def read_spec_dirs(root: str = "/") -> list[str]:
    """Return the directories in which the engines below ``root`` are configured to look for CDI specifications.

    The same as in :func:`read_engine_status`, whatever the rest of an engine's configuration is.
    """
    found: list[str] = []
    for engine, _, path in _find_installations(root, places.running_daemons(root)):
        if not any(_may_name_spec_dirs(root, file) for file in _main_files(root, engine, path)):
            continue
        try:
            found += map(str, _read_cdi(engine, read_merged(root, engine, path, [])[1])[1])
        except (OcigpuError, TypeError, ValueError):  # of an unexpected form: the engine's status tells
            continue
    return found


def _may_name_spec_dirs(root: str, path: str) -> bool:
    """Whether a configuration file may have the key, or import one that has it; most have not, and need no parser."""
    try:
        text = places.read_file(root, path) or ""
    except OcigpuError:
        return False
    if not any(marks in text for marks in _LONG_TEXTS):
        text = "\n".join(line for line in text.split("\n") if not line.lstrip(" \t").startswith("#"))
    return any(word in text for word in _OF_SPEC_DIRS)


def _find_installations(root: str, daemons: "Sequence[places.Daemon]") -> "Iterator[tuple[str, str, str]]":
    """Return engine, flavour and main file of each installation below ``root`` that there is or may be."""
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
    for engine, flavour, path in candidates:
        there = path and (places.file_mode(root, path) is not None or any(one.config == path for one in daemons))
        if not flavour or there or _has_drop_ins(root, engine, path):
            yield engine, flavour, path


def find_engines(root: str = "/") -> list[EngineStatus]:
    """Return the engines found on this host.

    An engine is left out if its daemon does not run and another one runs with another file.
    """
    found = [status for status in read_engine_status(root) if status.installed]
    custom = {status.engine for status in found if status.flavour == "custom"}
    return [
        status
        for status in found
        if (status.flavour != "rootless" or os.geteuid())
        and (status.flavour or status.running or status.engine not in custom)
    ]


def is_generated(root: str, status: EngineStatus) -> bool:
    """Whether k3s or RKE2 writes an engine's file at each start, with or without a template."""
    from ocigpu.engines import template

    if status.engine != "containerd":
        return False
    try:
        text = places.read_file(root, status.target)
    except OcigpuError:
        text = ""
    return text is not None and template.is_generated(status.target, text)


def is_cri_off(data: "Mapping[str, Any]") -> bool:
    """Whether a containerd configuration switches the interface for Kubernetes off."""
    disabled = data.get("disabled_plugins")
    return isinstance(disabled, list) and bool(CRI_NAMES & set(map(str, disabled)))


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
        waiting=_find_block(root, path) if engine == "containerd" else "",
    )
    try:
        status = _read_values(root, status, data)
    except OcigpuError as error:
        problems.append(f"{path}: {error.message}")
    except (TypeError, ValueError) as error:
        problems.append(f"{path}: a value of an unexpected type ({error})")
    problems += [
        f'{OF_RUNTIME}"{entry.name}": {entry.path} {places.why_no_program(root, entry.path)}'
        for entry in status.runtimes
        if entry.ours and not entry.exists
    ]
    return status._replace(problems=tuple(problems))


def _find_block(root: str, path: str) -> str:
    """Return the template with our block beside a containerd configuration, "" for none."""
    from ocigpu.engines import template

    for name in template.NAMES:
        beside = os.path.join(os.path.dirname(path), name)
        try:
            if template.BEGIN in (places.read_file(root, beside) or ""):
                return beside
        except OcigpuError:
            continue
    return ""


def read_merged(
    root: str, engine: str, path: str, problems: list[str], texts: "Mapping[str, str] | None" = None
) -> "tuple[list[str], dict[str, Any]]":
    """Return the files of an engine whose main file is ``path``, and their data, later files over earlier ones.

    containerd before 2.1 does not merge the tables of one plugin but takes the last one: what it uses can be less.
    What cannot be read is appended to ``problems``.  ``texts``: what files would hold, instead of what they do.
    """
    paths = _main_files(root, engine, path)
    files: list[str] = []
    data: dict[str, Any] = {}
    while paths:
        file = paths.pop(0)
        try:
            text = texts[file] if texts and file in texts else places.read_file(root, file)
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


def _main_files(root: str, engine: str, path: str) -> list[str]:
    """Return the files of an engine, without those that a file of containerd imports."""
    if engine == "crio":
        return [path, *places.expand(root, f"{places.CRIO_DIRECTORY}/*")]
    if engine != "podman":
        return [path]
    files = [*places.PODMAN, *places.expand(root, f"{places.PODMAN_DIRECTORY}/*.conf")]
    if path not in files:
        files += [path, *places.expand(root, f"{path}.d/*.conf")]
    return files


def _merge(data: "dict[str, Any]", more: "dict[str, Any]") -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(data.get(key), dict):
            _merge(data[key], value)
        else:
            data[key] = value


def is_ours(path: str, root: str = "") -> bool:
    """Whether a runtime's program is ocigpu's shim, by its path; below a ``root`` also a link to the shim."""
    if root and os.path.basename(path) != RUNTIME:
        path = places.read_link(root, path if "/" in path else places.find_program(root, path))
    return os.path.basename(path) == RUNTIME


def _is_there(root: str, path: str) -> bool:
    return not places.why_no_program(root, path)


def is_our_hook(root: str, path: str) -> bool:
    """Whether a hook on the PATH is ocigpu's: a link to its stub, or a copy of it."""
    if target := places.read_link(root, path):
        return os.path.basename(target) == OUR_HOOK
    try:
        with open(places.open_below(root, path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            return is_stub(file.read(4096), b"ocigpu")
    except OSError:  # gone by now, or not ours to read
        return False


def config_version(data: "dict[str, Any]") -> int:
    """Return the version of a containerd configuration: 1 when it names none, or 0 (containerd, docs/ops.md).

    Raises ValueError when it is not a whole number.
    """
    version = data.get("version", 1)
    if type(version) is not int or version < 0:
        raise ValueError(f"version = {version!r} is not a version")
    return version or 1


def cri_plugin(data: "dict[str, Any]") -> tuple[str, ...]:
    """Return the keys of the plugin table of Kubernetes' interface for a containerd configuration."""
    return ("plugins", *CRI_PLUGINS[min(config_version(data), 3)])


def runtime_keys(engine: str, data: "dict[str, Any]") -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the keys of an engine's table of runtimes and of its default; raises ValueError, see config_version."""
    if engine == "docker":
        return ("runtimes",), ("default-runtime",)
    if engine == "podman":
        return ("engine", "runtimes"), ("engine", "runtime")
    if engine == "crio":
        return ("crio", "runtime", "runtimes"), ("crio", "runtime", "default_runtime")
    plugin = (*cri_plugin(data), "containerd")
    return (*plugin, "runtimes"), (*plugin, "default_runtime_name")


def find_missing_default(engine: str, data: "dict[str, Any]") -> str:
    """Return the default runtime of an engine's configuration if no entry has that name, else "".

    Docker before 23, Podman and CRI-O do not start with such a default; containerd starts without its CRI plugin.
    Names of containerd's shims ("io.containerd.runc.v2"), which newer engines accept, are not checked, and neither are
    the built-in runtimes of the engines.  Raises ValueError, see config_version.
    """
    if engine == "containerd" and is_cri_off(data):
        return ""
    table, default = runtime_keys(engine, data)
    name = str(table_at(data, default[:-1]).get(default[-1]) or "")
    if "/" in name or "." in name or name in _BUILT_IN or name in table_at(data, table):
        return ""
    return name


_BUILT_IN = ("crun", "crun-vm", "crun-wasm", "kata", "krun", "ocijail", "runc", "runj", "runsc", "youki")
"""Runtimes that Podman knows without an entry (containers.conf(5), table engine.runtimes), and all others' runc."""


NO_DEFAULT = {
    "docker": "dockerd does not start",
    "containerd": "containerd serves no Kubernetes",
    "crio": "CRI-O does not start",
    "podman": "no podman command works",
}
"""What comes of a default runtime without an entry."""


def programs_of(engine: str, entry: "Any") -> list[str]:
    """Return the programs that an entry of the table of runtimes names: Podman uses the first existing one."""
    if engine == "podman":
        return list(map(str, entry)) if isinstance(entry, list) else []
    found = [look_up(entry, keys) for keys in _PROGRAM_KEYS[engine]]
    return [str(path) for path in found if path][:1]


_PROGRAM_KEYS = {
    "docker": (("path",),),
    "crio": (("runtime_path",),),
    "containerd": (("options", "BinaryName"), ("options", "Runtime")),
}


def _read_values(root: str, status: EngineStatus, data: "dict[str, Any]") -> EngineStatus:
    engine = status.engine
    table, default = runtime_keys(engine, data)
    entries = []
    for name in sorted(table_at(data, table)):
        entry = table_at(data, table)[name] if engine == "podman" else table_at(data, (*table, name))
        if engine == "podman" and not isinstance(entry, list):
            raise TypeError(f"{name}: {type(entry).__name__}")
        paths = programs_of(engine, entry)
        if path := next((path for path in paths if _is_there(root, path)), next(iter(paths), "")):
            entries.append(RuntimeEntry(name, path, _is_there(root, path), is_ours(path, root)))
    switch, directories = _read_cdi(engine, data)
    hook = places.find_program(root, HOOK) if engine == "docker" else ""
    return status._replace(
        runtimes=tuple(entries),
        default_runtime=str(table_at(data, default[:-1]).get(default[-1], "")),
        cdi=switch,
        cdi_spec_dirs=tuple(directories),
        gpus_hook=hook,
        gpus_hook_ours=bool(hook) and is_our_hook(root, hook),
        cri=engine == "crio" or (engine == "containerd" and not is_cri_off(data)),
        default_missing=bool(find_missing_default(engine, data)),
    )


def _read_cdi(engine: str, data: "dict[str, Any]") -> "tuple[str, Sequence[str]]":
    """Return whether CDI is switched on, and its directories."""
    value: "Any"
    if engine == "podman":
        value, directories = True, table_at(data, ("engine",)).get("cdi_spec_dirs")  # Podman 4.1 and later, no switch
    elif engine == "crio":
        value, directories = True, table_at(data, ("crio", "runtime")).get("cdi_spec_dirs")  # CRI-O 1.23 and later
    elif engine == "docker":
        value, directories = table_at(data, ("features",)).get("cdi"), data.get("cdi-spec-dirs")
    else:
        plugin = table_at(data, cri_plugin(data))
        value, directories = plugin.get("enable_cdi"), plugin.get("cdi_spec_dirs")
        if value is None and config_version(data) >= 3:  # only containerd 2, where it is on by default
            value = True
    if directories is not None and not isinstance(directories, list):
        raise TypeError(f"directories of specifications: {type(directories).__name__}")
    texts = [one for one in directories or () if isinstance(one, str)]  # Podman's may also hold {append = true}
    return "unknown" if value is None else "on" if value is True else "off", texts
