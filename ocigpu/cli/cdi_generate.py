"""``ocigpu cdi generate``, ``diff`` and ``refresh``: what the host would give, and what is in the file."""

import os

import typer

from ocigpu.cdi.compare import Difference, compare_specs
from ocigpu.cdi.refresh import DEFAULT_OUTPUT, refresh
from ocigpu.cdi.registry import read_registry
from ocigpu.cdi.write import with_suffix
from ocigpu.cli.cdi_files import find_overlaps, read_valid_spec
from ocigpu.cli.cdi_options import GenerateRequest, takes_generate_options
from ocigpu.cli.cdi_output import (
    FormatOption,
    OutputOption,
    QuietOption,
    check_output,
    output_file,
    say,
    say_skipped,
    write_output,
)
from ocigpu.cli.common import JsonOption, count, print_json, told_when_slow
from ocigpu.core.errors import CdiError, printable
from ocigpu.core.settings import Settings


@takes_generate_options
def generate_command(
    request: GenerateRequest,
    output: OutputOption = "",
    output_format: FormatOption = "",
    json: bool = False,
    strict: bool = False,
    quiet: QuietOption = False,
) -> None:

    from ocigpu.cdi.generate import generate_all

    path, format_name, notes = output_file(output, output_format, json)
    with told_when_slow("still reading this host's devices: NVML can take a while to answer"):
        parts = generate_all(request.options, request.settings)
    made = parts[0].generated
    if strict and made.skipped:
        say_skipped(made.skipped)
        raise CdiError("OCIGPU-CDI-7", f"generate: {count(len(made.skipped), 'device')} would be left out", "")
    for suffix, part in parts:
        write_output(part.spec, with_suffix(path, suffix), format_name)
    if not quiet:
        say(f"note: {text}" for text in (*notes, *made.notes, *_collisions(path, request.settings)))
        say_skipped(made.skipped)
        for suffix, part in parts:
            where = f" to {with_suffix(path, suffix)}" if path else ""
            devices = count(len(part.spec["devices"]), "device")
            version = part.spec["cdiVersion"]
            say([f"Generated CDI specification with version {version}{where}: {part.spec['kind']}, {devices}"])


def _collisions(path: str, settings: Settings) -> list[str]:
    """Return what other files do to the devices of the file just written, if it is in a directory of specifications."""
    if not path or os.path.dirname(path := os.path.abspath(path)) not in settings.cdi_spec_dirs:
        return []
    overlaps = find_overlaps(read_registry(settings))
    return [overlap.describe() for overlap in overlaps if path in (overlap.file, overlap.by)]


@takes_generate_options
def diff_command(
    request: GenerateRequest,
    file: str = DEFAULT_OUTPUT,
    json: JsonOption = False,
) -> None:

    from ocigpu.cdi.generate import generate
    from ocigpu.gpus.vendors import stale_reasons

    old = read_valid_spec(file)
    with told_when_slow("still reading this host's devices: NVML can take a while to answer"):
        made = generate(request.options, request.settings)
    differences = compare_specs(old, made.spec)
    reasons = stale_reasons(old.get("annotations") or {}, request.settings)
    if json:
        print_json(
            {
                "file": file,
                "equal": not differences,
                "reasons": list(reasons),
                "differences": [difference._asdict() for difference in differences],
                "notes": list(made.notes),
                "skipped": list(made.skipped),
            }
        )
    else:
        _print_differences(file, differences, reasons)
        say_skipped(made.skipped)
    if differences:
        raise typer.Exit(1)


def _print_differences(file: str, differences: tuple[Difference, ...], reasons: tuple[str, ...]) -> None:
    for difference in differences:
        print(printable(difference.describe()))
    for reason in reasons:
        print(printable(f"why: {reason}"))
    summary = count(len(differences), "difference") if differences else "as this host would give it now"
    print(printable(f"{file}: {summary}"))


@takes_generate_options
def refresh_command(
    request: GenerateRequest,
    output: str = "",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:

    check_output(output)
    with told_when_slow("still reading this host's devices: NVML can take a while to answer"):
        done = refresh(request.options, request.settings, output or DEFAULT_OUTPUT)
    if json:
        print_json(done._asdict())
        return
    if not quiet:
        say(f"note: {text}" for text in done.notes)
        say_skipped(done.skipped)
    if done.changed:
        print(printable(f"{done.path}: written: {'; '.join(done.reasons)}"))
    elif not quiet:
        print(printable(f"{done.path}: up to date"))
