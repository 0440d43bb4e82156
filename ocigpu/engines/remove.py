"""What "ocigpu engine remove" takes away: what the records say, else entries that name ocigpu's program."""

import os

from ocigpu.core.config_json import OUR_HOOK
from ocigpu.core.errors import OcigpuError
from ocigpu.engines import places, template
from ocigpu.engines.checker import Meant
from ocigpu.engines.configure import (
    ConfigureOptions,
    Edit,
    EngineLink,
    EnginePlan,
    default_drop_in,
    main_config,
    read_record,
    without_changes,
)
from ocigpu.engines.document import Applied, ValueChange, is_template, look_up, name_of
from ocigpu.engines.files import Root
from ocigpu.engines.record import EngineRecord, record_path
from ocigpu.engines.status import is_ours, programs_of, read_merged, runtime_keys


def plan_removal(root: Root, options: ConfigureOptions) -> EnginePlan:
    """Return the plan that removes ocigpu from an engine's configuration.

    A file without other changes since returns to its former content, byte for byte.  Raises OcigpuError of area ENG.
    """
    main, paths = _candidates(options)
    if not options.drop_in and (options.engine != "podman" or not os.geteuid()):  # /etc is not a user's to change
        # a drop-in that was named then, and that the engine reads anyway
        files, _ = read_merged(options.root, options.engine, main, [])
        paths += [path for path in files if places.file_mode(options.root, record_path(path)) is not None]
    edits: list[Edit] = []
    links: list[EngineLink] = []
    notes: list[str] = []
    seen: set[str] = set()
    names: set[str] = set()
    while paths:
        file = root.read(paths.pop(0))
        if file.path in seen:
            continue
        seen.add(file.path)
        record = read_record(root, file)
        if record:
            paths += record.others
            links += _links_of(root, record, notes)
        applied = record.applied if record else _evidence(options.engine, file.path, file.text or "")
        after, left = without_changes(root, file, record, applied)
        edit = Edit(file, after, None, None, record.directories if record and after is None else ())
        notes += [f"{file.path}: {name_of(change.keys)} was changed in the meantime: left unchanged" for change in left]
        if edit.changed or record:
            edits.append(edit._replace(forgets=record is not None))
            names |= {change.keys[-1] for change, *_ in applied if change.keys[-2:-1] == ("runtimes",)}
    return EnginePlan(options.engine, main, tuple(edits), tuple(links), tuple(notes), Meant(frozenset(names)))


def _candidates(options: ConfigureOptions) -> tuple[str, list[str]]:
    """Return the engine's main file and all files that may contain our entries."""
    named = [path for path in (options.config, options.drop_in) if path]
    if options.engine == "podman":
        path = named[0] if named else default_drop_in(options)
        return path, named or [path]
    if options.engine == "crio":
        path = options.drop_in or default_drop_in(options, options.config)
        return path, [path]
    main = main_config(options)
    paths = [main, *named]
    if options.engine == "containerd":
        directory = os.path.dirname(main)
        paths += [default_drop_in(options, main)]
        paths += [f"{directory}/{name}" for name in template.NAMES]
    return main, paths


def _evidence(engine: str, path: str, text: str) -> list[Applied]:
    """Return the entries of a file that name ocigpu's program, as if recorded; for example entries made manually."""
    if is_template(path):
        return [Applied(ValueChange((), None), 0, None, "")]
    data = places.parse_config(path, text)
    found = []
    try:
        table, default = runtime_keys(engine, data)
    except ValueError as error:
        raise OcigpuError("OCIGPU-ENG-1", f"{path}: {error}") from error
    runtimes = look_up(data, table)
    for name, entry in (runtimes if isinstance(runtimes, dict) else {}).items():
        if is_ours(next(iter(programs_of(engine, entry)), "")):
            if look_up(data, default) == name:
                found.append(Applied(ValueChange(default, name), len(default) - 1, None, ""))
            found.append(Applied(ValueChange((*table, name), entry), len(table), None, ""))
    return found


def _links_of(root: Root, record: EngineRecord, notes: list[str]) -> list[EngineLink]:
    links = []
    for path in record.links:
        target = root.read_link(path)
        if target is not None and os.path.basename(target) == OUR_HOOK:
            links.append(EngineLink(path, ""))
        elif target is not None:
            notes.append(f"{path}: no longer ocigpu's link: left unchanged")
    return links
