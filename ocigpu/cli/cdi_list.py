"""``ocigpu cdi list``: the devices that engines find, and whether they are still right."""

import sys
from typing import NamedTuple

import typer

from ocigpu.cdi.registry import Registry, read_registry
from ocigpu.cli.cdi_files import SpecDirsOption, SpecState, file_state, settings_with_dirs
from ocigpu.cli.cdi_output import QuietOption, say
from ocigpu.cli.common import ConfigOption, JsonOption, count, print_json, print_table
from ocigpu.core.errors import printable


class Row(NamedTuple):
    """One definition of a device; ``usable``: a container that asks for the name gets this one."""

    device: str
    file: str
    version: str
    state: SpecState
    usable: bool


def list_command(
    spec_dirs: SpecDirsOption = None,
    config: ConfigOption = "",
    json: JsonOption = False,
    strict: bool = False,
    quiet: QuietOption = False,
) -> None:

    settings = settings_with_dirs(config, spec_dirs)
    registry = read_registry(settings)
    states = {spec.path: file_state(spec.annotations, settings) for spec in registry.specs}
    rows = device_rows(registry, states)
    names = [row.device for row in rows if row.usable]
    if json:
        print_json(
            {
                "devices": [_row_data(row) for row in rows],
                "errors": [{"file": path, "message": message} for path, message in registry.errors],
            }
        )
    elif sys.stdout.isatty():
        if rows:
            # why a file is stale is said once, below
            table = [
                (row.device, row.file, row.version, "stale" if row.state.word == "stale" else row.state.describe())
                for row in rows
            ]
            print_table(("device", "file", "version", "state"), table, fold=False)
    else:
        for name in names:
            print(printable(name))
    if not json:
        say(f"{path}: {message}" for path, message in registry.errors)
    if not quiet and not json:
        say([f"Found {count(len(names), 'CDI device')}"])
        if not (registry.specs or registry.errors):
            where = ", ".join(settings.cdi_spec_dirs)
            say([f"no specification in {where}; to write one: ocigpu cdi generate --output /etc/cdi/nvidia.yaml"])
        say(f"{path}: {state.describe()}" for path, state in states.items() if state.word == "stale")
    if strict and registry.errors:
        raise typer.Exit(1)


def device_rows(registry: Registry, states: dict[str, SpecState]) -> list[Row]:
    """Return a row for each definition of a device, sorted by name, the one that counts first."""
    conflicts = dict(registry.conflicts())
    shadows = {(name, file): by for name, file, by in registry.shadowed()}
    rows = []
    for name, specs in registry.definitions().items():
        for spec in reversed(specs):
            state = states[spec.path]
            usable = False
            if by := shadows.get((name, spec.path)):
                state = SpecState("shadowed", (f"{by} is used",))
            elif name in conflicts:
                others = [path for path in conflicts[name] if path != spec.path]
                state = SpecState("conflict", (f"{', '.join(others)} defines it too",))
            else:
                usable = True
            rows.append(Row(name, spec.path, spec.version, state, usable))
    return rows


def _row_data(row: Row) -> dict[str, object]:
    state = {"state": row.state.word, "reasons": list(row.state.reasons)}
    return {"device": row.device, "file": row.file, "version": row.version, "usable": row.usable, **state}
