"""``ocigpu diff``: what ocigpu-runtime changes, or has changed, in the config.json of a container."""

import json as json_module
import sys
from collections.abc import Iterable
from typing import Any

import typer

from ocigpu.cli.common import ConfigOption, JsonOption, load_facts, load_settings, print_json
from ocigpu.cli.ps import RootsOption, places_of
from ocigpu.core.errors import UsageError, printable, quoted
from ocigpu.core.settings import MODES, Settings

DIFFERENT = 3
"""Exit status of --exit-code when there is a difference: 1 means that the command failed."""


def diff_command(
    target: str,
    mode: str = "",
    exit_code: bool = False,
    root: RootsOption = None,
    config: ConfigOption = "",
    json: JsonOption = False,
) -> None:
    from ocigpu.containers.difference import find_original, list_changes
    from ocigpu.containers.find import find_target, open_root
    from ocigpu.containers.planned import edit_copy, plan_bundle

    settings = _settings(config, mode)
    bundle, document, container = find_target(target, places_of(root))
    original = find_original(document.config, settings, bundle)
    edited, how, notes = document.config, original.mode, list(original.notes)
    would_be = bool(mode) or not original.mode
    if would_be:
        with open_root(container) as place:
            planned = plan_bundle(original.config, bundle, settings, lambda: load_facts(settings), place)
        edited, how = edit_copy(original.config, bundle, settings, planned), planned.mode
        notes += planned.request.notes
        notes += [f"mode hook, not spec: {planned.why_hook}"] if planned.why_hook else []
        notes += [] if planned.mode else ["the container asks for nothing: its config.json stays as it is"]
    if json:
        unused = {"add": "old", "remove": "new", "replace": ""}
        changes = [
            {name: value for name, value in change._asdict().items() if name != unused[change.op]}
            for change in list_changes(original.config, edited)
        ]
        print_json({"file": document.path, "mode": how, "edited": not would_be, "changes": changes, "notes": notes})
    else:
        names = (
            f"{document.path} (original)",
            f"{document.path} ({'would be ' if would_be else ''}edited, mode {how})",
        )
        _print_diff(_lines(original.config), _lines(edited), *names)
        for note in notes:
            print(f"note: {printable(note)}", file=sys.stderr)
    if exit_code and original.config != edited:
        raise typer.Exit(DIFFERENT)


def _settings(config: str, mode: str) -> Settings:
    if mode and mode not in MODES:
        raise UsageError(f"--mode {quoted(mode)}: modes are {', '.join(sorted(set(MODES.values())))}")
    settings = load_settings(config)
    return settings._replace(mode=mode) if mode else settings


def _lines(config: dict[str, Any]) -> list[str]:
    return json_module.dumps(config, indent=2).splitlines()


def _print_diff(old: list[str], new: list[str], old_name: str, new_name: str) -> None:
    """Print a unified diff, in colours on a terminal."""
    import difflib

    lines: Iterable[str] = difflib.unified_diff(old, new, printable(old_name), printable(new_name), lineterm="")
    colours = {"+": typer.colors.GREEN, "-": typer.colors.RED, "@": typer.colors.CYAN} if sys.stdout.isatty() else {}
    for line in lines:
        colour = colours.get(line[:1])
        print(typer.style(line, fg=colour) if colour else line)
