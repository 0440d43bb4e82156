"""What the engines themselves say of a new configuration, before it is put in place."""

import os
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ocigpu.core.errors import OcigpuError
from ocigpu.engines import places
from ocigpu.engines.document import ValueChange, apply_changes, is_template, look_up, name_of
from ocigpu.engines.status import CRI_NAMES, CRI_PLUGINS, import_paths, is_cri_off
from ocigpu.system.programs import Finished, run_program

_SECONDS = 60


def program_version(root: str, engine: str) -> tuple[int, int] | None:
    """Return (major, minor) of the installed engine; None without one, and for another root, which is never run."""
    program = places.find_program(root, places.PROGRAMS[engine]) if root == "/" else ""
    if not program:
        return None
    major, _, rest = places.parse_release(run_check([program, "--version"]).output).partition(".")
    return (int(major), int(rest.partition(".")[0])) if major else None


class Meant(NamedTuple):
    """What may differ afterwards: runtime entries by name; and the entry that must be there (path "" for none)."""

    names: frozenset[str]
    name: str = ""
    path: str = ""
    default: bool = False


def check(engine: str, main: str, texts: Mapping[str, str | None], meant: Meant) -> str:
    """Let an engine check its configuration; returns the command used, "" if the engine has none.

    ``main``: the engine's own file.  ``texts``: the new contents of the changed files, None for a removed one.  Raises
    OcigpuError OCIGPU-ENG-3 with the engine's message.  No daemon is contacted or started.
    """
    program = places.find_program("/", places.PROGRAMS[engine])
    if not program or any(is_template(path) for path in texts):
        return ""
    with tempfile.TemporaryDirectory(prefix="ocigpu-engine-") as directory:
        if engine == "containerd":
            return _check_containerd(program, directory, main, texts, meant)
        return _CHECKS[engine](program, directory, main, texts)


def _check_docker(program: str, directory: str, main: str, texts: Mapping[str, str | None]) -> str:
    text = texts.get(main)
    if text is None or "--validate" not in run_check([program, "--help"]).output:  # Docker before 23
        return ""
    _require(program, run_check([program, "--validate", "--config-file", _write(directory, "daemon.json", text)]), main)
    return "dockerd --validate"


def _check_containerd(program: str, directory: str, main: str, texts: Mapping[str, str | None], meant: Meant) -> str:
    """Compare containerd's reading of the files before and after: only intended changes may differ."""
    result = _dump(program, directory, "after", main, texts)
    _require(program, result, main)
    after = tomllib.loads(result.output)
    result = _dump(program, directory, "before", main, {})
    if result.status == 0:
        old, new = dict(_leaves(tomllib.loads(result.output))), dict(_leaves(after))
        for keys in sorted({*old, *new}):
            if old.get(keys) != new.get(keys) and not _is_meant(keys, meant):
                name = name_of(keys)
                raise OcigpuError("OCIGPU-ENG-3", f"{main}: containerd would read {name} otherwise than before")
    if meant.path and not is_cri_off(after):
        _require_entry(main, after, meant)
    return "containerd config dump"


def _require_entry(main: str, data: dict[str, Any], meant: Meant) -> None:
    """Raise OcigpuError OCIGPU-ENG-3 unless containerd sees the runtime entry: a later file may hide it."""
    engines = [look_up(data, ("plugins", *plugin, "containerd")) or {} for plugin in CRI_PLUGINS.values()]
    options = [look_up(engine, ("runtimes", meant.name, "options")) or {} for engine in engines]
    if not any(meant.path in (option.get("BinaryName"), option.get("Runtime")) for option in options):
        unseen = f'{main}: containerd would not see the runtime "{meant.name}"'
        if all(path.endswith("/after.toml") for path in data.get("imports", ())):  # containerd 1 lists the file itself
            raise OcigpuError("OCIGPU-ENG-3", unseen, "the file's version is not one that this containerd reads")
        raise OcigpuError(
            "OCIGPU-ENG-3",
            f"{unseen}: a file of its imports replaces the table",
            "name the last file of the imports that has the table: --drop-in FILE",
        )
    if meant.default and not any(engine.get("default_runtime_name") == meant.name for engine in engines):
        raise OcigpuError("OCIGPU-ENG-3", f'{main}: a file of its imports sets another default than "{meant.name}"')


def _dump(program: str, directory: str, name: str, main: str, texts: Mapping[str, str | None]) -> Finished:
    """Run "containerd config dump" on copies; unchanged files are imported from their own paths.

    It omits a plugin that the file switches off (as Docker's package does with the CRI plugin), so the copy switches it
    on.
    """
    text = texts[main] if main in texts else places.read_file("/", main)
    data = places.parse_config(main, text or "version = 2\n")
    imports = []
    for pattern in data.get("imports") or ():
        for path in import_paths("/", main, str(pattern)):
            if path not in texts:
                imports.append(path)
            elif texts[path] is not None:
                imports.append(_write(directory, f"{name}-{os.path.basename(path)}", texts[path] or ""))
    for path, new in texts.items():  # not there yet, so a pattern did not find it
        copy = f"{directory}/{name}-{os.path.basename(path)}"
        if path != main and new is not None and copy not in imports:
            imports.append(_write(directory, os.path.basename(copy), new))
    changes = [ValueChange(("imports",), imports)] if data.get("imports") or imports else []
    if is_cri_off(data):
        changes.append(ValueChange(("disabled_plugins",), [x for x in data["disabled_plugins"] if x not in CRI_NAMES]))
    text, _ = apply_changes(main, text or "version = 2\n", changes)
    return run_check([program, "--config", _write(directory, f"{name}.toml", text), "config", "dump"])


def _leaves(data: Mapping[str, Any], keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every value that is not empty with its keys: an entry without a key means the same as one with "" or 0.

    So do the modes of a runtime's sandboxes: containerd's own entry for runc spells the usual one out, and for any
    other it is filled in at the start (containerd 1.7, pkg/cri/config: ValidatePluginConfig; 2.0,
    internal/cri/config: ValidateRuntimeConfig).
    """
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*keys, key))
        elif value not in ("", 0, False, []) and not (key in _SANDBOX_KEYS and value == "podsandbox"):
            yield (*keys, key), value


_SANDBOX_KEYS = ("sandbox_mode", "sandboxer")


def _is_meant(keys: Sequence[str], meant: Meant) -> bool:
    if keys[0] != "plugins":
        return keys[0] in ("imports", "version")
    if (keys[1],) not in CRI_PLUGINS.values():
        return False
    if keys[2:4] == ("containerd", "runtimes"):
        return keys[4] in meant.names
    if keys[2:4] == ("containerd", "default_runtime_name"):
        return meant.default or not meant.path
    return keys[2] in ("enable_cdi", "cdi_spec_dirs")


def _check_podman(program: str, directory: str, main: str, texts: Mapping[str, str | None]) -> str:
    """Every Podman command reads its files first; --version does nothing else."""
    text = texts.get(main)
    if text is None:
        return ""
    path = _write(directory, "containers.conf", text)
    result = run_check([program, "--version"], CONTAINERS_CONF=path)
    _require(program, result, main)
    return "podman --version"


def _check_crio(program: str, directory: str, main: str, texts: Mapping[str, str | None]) -> str:
    """``crio config`` reads the main file and every file of a directory, and validates them (crio(8))."""
    for path in {*places.expand("/", f"{os.path.dirname(main)}/*"), *texts}:
        text = texts[path] if path in texts else places.read_file("/", path)
        if text is not None:
            _write(directory, os.path.basename(path), text)
    _require(program, run_check([program, "--config-dir", directory, "config"]), main)
    return "crio config"


_CHECKS = {"docker": _check_docker, "podman": _check_podman, "crio": _check_crio}


def _write(directory: str, name: str, text: str) -> str:
    path = f"{directory}/{name}"
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(text)
    return path


def run_check(command: Sequence[str], **variables: str) -> Finished:
    environment = {"PATH": ":".join(places.DAEMON_PATH), "HOME": os.path.expanduser("~"), **variables}
    try:
        return run_program(command, _SECONDS, env=environment)
    except OSError as error:
        raise OcigpuError("OCIGPU-ENG-3", f"{command[0]}: {error}") from error


def _require(program: str, result: Finished, path: str) -> None:
    """Raise OcigpuError with the last line of a checker's output, unless the check passes."""
    if result.status:
        raise OcigpuError("OCIGPU-ENG-3", f"{path}: {os.path.basename(program)} refuses it: {result.last_line}")
