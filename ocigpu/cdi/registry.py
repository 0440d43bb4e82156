"""The CDI specifications of a host: their files, the devices they define, and precedence.

An unusable file affects only itself; all others stay usable.
"""

import os
import stat

from ocigpu.cdi.cache import (
    LoadedSpec,
    cache_name,
    parse_text,
    read_cached_spec,
    render_refusal,
    render_text,
    write_cached_text,
)
from ocigpu.core import rawjson
from ocigpu.core.cdi_names import parse_device_name
from ocigpu.core.errors import CdiError, printable, quoted
from ocigpu.core.record import NamedTuple
from ocigpu.core.settings import Settings
from ocigpu.system.files import state_of, why_untrusted
from ocigpu.system.store import open_cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    Edits = dict[str, Any]
    Device = dict[str, Any]

EXTENSIONS = (".json", ".yaml")
MAX_FILES = 4096
"""Specifications in one directory: more is not a configuration."""
HINTED = 8
"""Names in one hint."""
SHOWN = 20
"""Names or files in one message."""
MANY = 8
"""From so many devices of one kind on, their lines are looked up in a table instead of searched one by one."""


class Resolved(NamedTuple):
    """What requested devices stand for: containerEdits in the order of application, and the file of each.

    ``specs``: the specifications they come from, each once, in the order of their first use.
    """

    edits: "tuple[Edits, ...]"
    files: tuple[str, ...]
    specs: tuple[LoadedSpec, ...]


class Registry(NamedTuple):
    """What the directories of specifications hold.

    ``specs``: those that can be used, in the order in which they were read: lowest priority first, then by name.
    ``errors``: (path, reason) of what cannot be used.
    """

    specs: tuple[LoadedSpec, ...]
    errors: tuple[tuple[str, str], ...]

    def resolve(self, names: "Sequence[str]") -> Resolved:
        """Return the edits for these qualified names; spec-level edits come once, before a file's first device.

        Raises CdiError: OCIGPU-CDI-1 for an invalid qualified name, OCIGPU-CDI-5 for a device that two files of the
        winning directory define, OCIGPU-CDI-4 for an undefined device.
        """
        wanted: dict[str, list[str]] = {}
        for name in dict.fromkeys(names):
            parsed = parse_device_name(name)
            wanted.setdefault(parsed.kind, []).append(parsed.device)
        found: dict[str, tuple[LoadedSpec, Device]] = {}
        for kind, devices in wanted.items():
            found.update(_find_devices(kind, devices, [spec for spec in self.specs if spec.kind == kind]))
        unknown = [name for name in dict.fromkeys(names) if name not in found]
        if unknown:
            message = f"unresolvable CDI devices {_listed(unknown)}{_describe_errors(self.errors)}"
            raise CdiError("OCIGPU-CDI-4", message, self._hint(parse_device_name(unknown[0]).kind))
        edits: list[Edits] = []
        files: list[str] = []
        used: dict[str, LoadedSpec] = {}
        for name in dict.fromkeys(names):
            spec, device = found[name]
            parts = [device.get("containerEdits", {})]
            if spec.path not in used:
                used[spec.path] = spec
                parts.insert(0, spec.edits)
            edits.extend(parts)
            files.extend(spec.path for _ in parts)
        return Resolved(tuple(edits), tuple(files), tuple(used.values()))

    def _hint(self, kind: str) -> "str | None":
        """Return a hint for an unknown device of this kind: the defined devices or kinds; None without any."""
        names = sorted({name for spec in self.specs if spec.kind == kind for name in spec.device_names()})
        what, found = (f"Devices of {kind}", names) if names else ("Kinds", sorted({spec.kind for spec in self.specs}))
        more = ", ..." if len(found) > HINTED else ""
        if not found and self.errors:
            return f"Check it: ocigpu cdi validate {self.errors[0][0]}"
        return f"{what} that are defined: {_listed(found[:HINTED])}{more}; all: ocigpu cdi list" if found else None

    def definitions(self) -> dict[str, tuple[LoadedSpec, ...]]:
        """Return every qualified name with the specifications that define it, lowest priority first."""
        defined: dict[str, list[LoadedSpec]] = {}
        for spec in self.specs:
            for name in spec.device_names():
                defined.setdefault(f"{spec.kind}={name}", []).append(spec)
        return {name: tuple(specs) for name, specs in sorted(defined.items())}

    def devices(self) -> tuple[tuple[str, str], ...]:
        """Return (qualified name, file) of every device that can be requested, sorted."""
        winners = ((name, _winners(specs)) for name, specs in self.definitions().items())
        return tuple((name, specs[0].path) for name, specs in winners if len(specs) == 1)

    def shadowed(self) -> tuple[tuple[str, str, str], ...]:
        """Return (qualified name, file, file that is used instead) of definitions that do not count, sorted."""
        return tuple(
            (name, spec.path, _winners(specs)[0].path)
            for name, specs in self.definitions().items()
            for spec in specs
            if spec.priority < specs[-1].priority
        )

    def conflicts(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Return (qualified name, files) of unusable devices: two files of one directory define them."""
        winners = ((name, _winners(specs)) for name, specs in self.definitions().items())
        return tuple((name, tuple(spec.path for spec in specs)) for name, specs in winners if len(specs) > 1)


def _winners(specs: "Sequence[LoadedSpec]") -> list[LoadedSpec]:
    """Return those of the highest priority; ``specs`` are sorted by it."""
    return [spec for spec in specs if spec.priority == specs[-1].priority]


def _find_devices(kind: str, devices: list[str], specs: list[LoadedSpec]) -> "dict[str, tuple[LoadedSpec, Device]]":
    """Return by qualified name the devices that ``specs``, all of this kind, define; raises OCIGPU-CDI-5."""
    found: dict[str, tuple[LoadedSpec, Device]] = {}
    for spec in specs:  # lowest priority first: what comes later wins
        lines = dict(spec.lines()) if len(devices) > MANY else None
        for name in devices:
            if lines is None:
                device = spec.find(name)
            else:
                line = lines.get(name.encode())
                device = None if line is None else rawjson.parse(line.decode())
            if device is None:
                continue
            text = f"{kind}={name}"
            before = found.get(text)
            if before and before[0].priority == spec.priority and not _is_overruled(name, spec, specs):
                raise CdiError(
                    "OCIGPU-CDI-5",
                    f"conflicting device {quoted(text)} (specs {quoted(spec.path)}, {quoted(before[0].path)})",
                )
            found[text] = (spec, device)
    return found


def _is_overruled(name: str, spec: LoadedSpec, specs: list[LoadedSpec]) -> bool:
    return any(other.priority > spec.priority and other.find(name) is not None for other in specs)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(printable(name, 200) for name in names[:SHOWN]) + more


def _describe_errors(errors: "Sequence[tuple[str, str]]") -> str:
    """Return what could not be used, as the end of a message: the device may well be defined there."""
    if not errors:
        return ""
    count = f"{len(errors)} files" if len(errors) > 1 else "1 file"
    shown = "; ".join(f"{printable(path, 300)}: {printable(reason, 300)}" for path, reason in errors[:3])
    return f" and {count} could not be used: {shown}{'; ...' if len(errors) > 3 else ''}"


def read_registry(settings: Settings) -> Registry:
    """Return the specifications of the directories that the settings name; a missing directory is an empty one.

    Files are read one level deep, in order of their names, ".json" and ".yaml" only.  An unchanged file that was
    parsed before comes from the cache, which is brought up to date where that is possible.
    """
    errors: list[tuple[str, str]] = []
    files: list[tuple[str, int]] = []
    for priority, directory in enumerate(settings.cdi_spec_dirs):
        if directory in settings.cdi_spec_dirs[priority + 1 :]:
            continue  # named again: it counts there
        names, problem = _list_directory(directory)
        if problem:
            errors.append((directory, problem))
        files.extend((os.path.join(directory, name), priority) for name in names)
    if not files:
        return Registry((), tuple(errors))
    loaded: list[LoadedSpec] = []
    cache = open_cache(create=True)
    try:
        wanted = {cache_name(path) for path, _ in files}
        for path, priority in files:
            spec, problem = _load(path, priority, cache, wanted)
            if spec:
                loaded.append(spec)
            elif problem:
                errors.append((path, problem))
    finally:
        if cache >= 0:
            os.close(cache)
    return Registry(tuple(loaded), tuple(errors))


def _list_directory(directory: str) -> tuple[list[str], str]:
    """Return the names of the specifications in a directory, sorted, and the directory's problem ("": none)."""
    try:
        status = os.stat(directory)
        if problem := why_untrusted(status.st_uid, status.st_mode):
            return [], problem
        names = sorted(name for name in os.listdir(directory) if name.endswith(EXTENSIONS))
    except FileNotFoundError:
        return [], ""
    except OSError as error:
        return [], str(error.strerror)
    if len(names) > MAX_FILES:
        return [], f"more than {MAX_FILES} specifications"
    return names, ""


def _load(path: str, priority: int, cache: int, wanted: set[str]) -> "tuple[LoadedSpec | None, str]":
    """Return the specification of a file, or None and why it cannot be used ("": not a specification, or gone)."""
    try:
        linked = os.path.islink(path)
        status = os.stat(path)
    except FileNotFoundError as error:  # removed since the directory was read, or a link to nothing
        return None, str(error.strerror) if linked else ""
    except OSError as error:
        return None, str(error.strerror)
    if stat.S_ISDIR(status.st_mode) and not linked:
        return None, ""
    if not stat.S_ISREG(status.st_mode):
        return None, "not a regular file"
    if problem := why_untrusted(status.st_uid, status.st_mode):
        return None, problem
    return read_cached_spec(cache, path, status, priority) or _parse(path, priority, status, cache, wanted)


def _parse(
    path: str, priority: int, status: os.stat_result, cache: int, wanted: set[str]
) -> "tuple[LoadedSpec | None, str]":
    from ocigpu.cdi.check import check_spec
    from ocigpu.cdi.document import read_document

    try:
        data, found = read_document(path)
    except CdiError as error:
        return None, error.message.removeprefix(f"read {printable(path, 300)}: ")
    if problem := why_untrusted(found.st_uid, found.st_mode):  # replaced in the meantime
        return None, problem
    checked = check_spec(data)
    if checked.errors:
        more = f" (first of {len(checked.errors)} problems)" if len(checked.errors) > 1 else ""
        text = render_refusal(checked.errors[0].text + more)
    else:
        text = render_text(checked.spec)
    if state_of(found) == state_of(status):
        write_cached_text(cache, path, status, text, wanted)
    return parse_text(text, path, priority)
