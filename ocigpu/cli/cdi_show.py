"""``ocigpu cdi show`` and ``transform``: one specification, or one device of one."""

import os
from itertools import chain, repeat
from textwrap import wrap
from typing import Annotated

import typer

from ocigpu.cdi.compare import edit_rows
from ocigpu.cdi.generate import merge_edits
from ocigpu.cdi.registry import read_registry
from ocigpu.cdi.transform import SIDES, transform_root
from ocigpu.cdi.versions import minimum_version
from ocigpu.cli.cdi_files import STANDARD_INPUT, SpecDirsOption, file_state, read_valid_spec, settings_with_dirs
from ocigpu.cli.cdi_options import invalid_value
from ocigpu.cli.cdi_output import FormatOption, output_file, say, write_output
from ocigpu.cli.common import ConfigOption, JsonOption, print_fields, print_json, print_table
from ocigpu.core.cdi_names import is_qualified
from ocigpu.core.errors import CdiError, UsageError, quoted
from ocigpu.core.settings import Settings

SHOW_EPILOG = """\
\b
Examples:
  ocigpu cdi show nvidia.com/gpu=0
  ocigpu cdi show nvidia.com/gpu=all --json
  ocigpu cdi show /etc/cdi/nvidia.yaml
"""
TRANSFORM_EPILOG = """\
\b
Examples:
  ocigpu cdi transform root --from /driver-root --to / --input a.yaml --output /etc/cdi/nvidia.yaml
"""

transform_app = typer.Typer(
    help="Change a specification that was generated somewhere else.", epilog=TRANSFORM_EPILOG, rich_markup_mode=None
)


def show_command(
    what: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A qualified device name, or a file.")],
    spec_dirs: SpecDirsOption = None,
    config: ConfigOption = "",
    json: JsonOption = False,
) -> None:
    """Show what a container gets with a device and from which file, or what a file holds.

    A name is vendor/class=device; anything else is the path of a file.
    """
    settings = settings_with_dirs(config, spec_dirs)
    if not is_qualified(what):
        if "/" not in what and what != STANDARD_INPUT and not os.path.lexists(what):
            message = f"{quoted(what)} is neither a device name, vendor/class=device, nor a file"
            raise CdiError("OCIGPU-CDI-1", message, "all names: ocigpu cdi list")
        _show_file(what, settings, json)
        return
    resolved = read_registry(settings).resolve([what])
    files = [spec.path for spec in resolved.specs]
    edits = merge_edits(resolved.edits)
    if json:
        print_json({"device": what, "files": files, "containerEdits": edits})
        return
    print_fields([("device", what), *(("file", file) for file in files)])
    print()
    print_table(("edit", "details"), edit_rows(edits))


def _show_file(path: str, settings: Settings, json: bool) -> None:
    spec = read_valid_spec(path)
    annotations = spec.get("annotations") or {}
    state = file_state(annotations, settings)
    names = [device["name"] for device in spec["devices"]]
    lines = wrap(f"{len(names)}: {', '.join(names)}", 100, break_long_words=False, break_on_hyphens=False)
    if json:
        print_json(
            {
                "file": path,
                "kind": spec["kind"],
                "version": spec["cdiVersion"],
                "needs": minimum_version(spec),
                "devices": names,
                "state": state._asdict(),
                "annotations": annotations,
                "containerEdits": spec.get("containerEdits") or {},
            }
        )
        return
    print_fields(
        [
            ("file", path),
            ("kind", spec["kind"]),
            ("version", f"{spec['cdiVersion']} (needs {minimum_version(spec)})"),
            *zip(chain(["devices"], repeat("")), lines, strict=False),
            ("state", state.describe()),
        ]
    )
    rows = edit_rows(spec.get("containerEdits") or {})
    if rows:
        print()
        print("with any of its devices:")
        print_table(("edit", "details"), rows)


@transform_app.command("root", epilog=TRANSFORM_EPILOG)
def transform_root_command(
    from_root: Annotated[str, typer.Option("--from", metavar="DIR", help="Root to replace.")] = "/",
    to_root: Annotated[str, typer.Option("--to", metavar="DIR", help="Root to have instead.")] = "/",
    source: Annotated[str, typer.Option("--input", metavar="FILE", help="Specification to read; - is stdin.")] = "-",
    side: Annotated[
        str, typer.Option("--relative-to", metavar="SIDE", help="Change paths of the host or of the container.")
    ] = "host",
    output: Annotated[
        str, typer.Option("--output", metavar="FILE", help="File to write; without it, or with -, standard output.")
    ] = "",
    output_format: FormatOption = "",
) -> None:
    """Replace the root of a specification's paths on the host, or in the container."""
    if side not in SIDES:
        raise invalid_value("--relative-to", "value", side, SIDES)
    for option, root in (("--from", from_root), ("--to", to_root)):
        if root and not root.startswith("/"):
            raise UsageError(f"{option}: {quoted(root)} is not an absolute path", "")
    path, format_name, notes = output_file(output, output_format)
    spec = read_valid_spec(source)
    write_output(transform_root(spec, from_root, to_root, side), path, format_name)
    say(f"note: {text}" for text in notes)
