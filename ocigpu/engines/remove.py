"""What "ocigpu engine remove" takes away: what the records say, else entries that name ocigpu's program."""

import os
from collections.abc import Sequence

from ocigpu.core.config_json import OUR_HOOK
from ocigpu.core.errors import OcigpuError
from ocigpu.engines import places
from ocigpu.engines.checker import Meant
from ocigpu.engines.configure import (
    ConfigureOptions,
    Edit,
    EngineLink,
    EnginePlan,
    default_drop_in,
    is_blank,
    main_config,
    read_record,
)
from ocigpu.engines.document import Applied, ValueChange, is_template, look_up, name_of, revert_changes
from ocigpu.engines.files import EngineFile, Root
from ocigpu.engines.record import EngineRecord, backup_path, digest, record_path
from ocigpu.engines.status import is_ours, programs_of, read_merged, runtime_keys


def plan_removal(root: Root, options: ConfigureOptions) -> EnginePlan:
    """Return what takes ocigpu out of an engine's configuration again.

    A file that nobody else has changed since is the one from before, byte for byte.  Raises OcigpuError of area ENG.
    """
    main, paths = _candidates(options)
    if not options.drop_in and (options.engine != "podman" or not os.geteuid()):  # /etc is not a user's to change
        # a drop-in that was named then, and is read by the engine anyhow
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
        edit, left = _restore(root, file, record, applied)
        notes += [
            f"{file.path}: {name_of(change.keys)} was changed by somebody since: left as it is" for change in left
        ]
        if edit.changed or record:
            edits.append(edit._replace(forgets=record is not None))
            names |= {change.keys[-1] for change, *_ in applied if change.keys[-2:-1] == ("runtimes",)}
    return EnginePlan(options.engine, main, tuple(edits), tuple(links), tuple(notes), Meant(frozenset(names)))


def _candidates(options: ConfigureOptions) -> tuple[str, list[str]]:
    """Return the engine's main file and all files that may hold something of ours."""
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
        paths += [f"{directory}/{name}" for name in ("config.toml.tmpl", "config-v3.toml.tmpl")]
    return main, paths


def _restore(
    root: Root, file: EngineFile, record: EngineRecord | None, applied: Sequence[Applied]
) -> tuple[Edit, list[ValueChange]]:
    """Return how a file becomes what it was, and the changes that are left to whoever has changed them again."""
    directories = record.directories if record else ()
    gone = Edit(file, None, None, None, directories)
    if file.text is None:
        return gone, []
    if record is None:
        return Edit(file, revert_changes(file.path, file.text, applied)[0], None, None), []
    if digest(file.text) == record.digest:
        before = root.read(backup_path(file.path)).text
        if record.created is not None or before is not None:
            return Edit(file, None if record.created is not None else before, None, None, directories), []
    after, left = revert_changes(file.path, file.text, applied)
    if record.created is not None and is_blank(file.path, after, record.created):
        return gone, left
    return Edit(file, after, None, None), left


def _evidence(engine: str, path: str, text: str) -> list[Applied]:
    """Return the entries of a file that name ocigpu's program, as if they were recorded: written by hand, say."""
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
            notes.append(f"{path}: no longer ocigpu's link: left as it is")
    return links
