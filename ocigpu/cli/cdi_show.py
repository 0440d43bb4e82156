"""``ocigpu cdi show`` and ``transform``: one specification, or one device of one."""

import os
from itertools import chain, repeat
from textwrap import wrap

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


def show_command(
    what: str,
    spec_dirs: SpecDirsOption = None,
    config: ConfigOption = "",
    json: JsonOption = False,
) -> None:

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


def transform_root_command(
    from_: str = "/",
    to: str = "/",
    input_: str = "-",
    relative_to: str = "host",
    output: str = "",
    output_format: FormatOption = "",
) -> None:

    if relative_to not in SIDES:
        raise invalid_value("--relative-to", "value", relative_to, SIDES)
    for option, root in (("--from", from_), ("--to", to)):
        if root and not root.startswith("/"):
            raise UsageError(f"{option}: {quoted(root)} is not an absolute path", "")
    path, format_name, notes = output_file(output, output_format)
    spec = read_valid_spec(input_)
    write_output(transform_root(spec, from_, to, relative_to), path, format_name)
    say(f"note: {text}" for text in notes)
