"""Where the ``cdi`` commands write: specifications to files or standard output, words for people to standard error."""

import os
import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from ocigpu.cdi.write import FORMATS, dump, target_of, write_spec
from ocigpu.cli.cdi_options import invalid_value
from ocigpu.core.errors import CdiError, UsageError, printable, quoted

OutputOption = Annotated[
    str,
    typer.Option(
        "--output",
        metavar="FILE",
        envvar="NVIDIA_CTK_CDI_OUTPUT_FILE_PATH",
        help="File to write; without it, or with -, standard output.",
    ),
]
FormatOption = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="FORMAT",
        envvar="NVIDIA_CTK_CDI_GENERATE_OUTPUT_FORMAT",
        help="json or yaml.  [default: by the file's name, else yaml]",
    ),
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", envvar="NVIDIA_CTK_QUIET", help="Print errors only, no notes.")
]


def output_file(output: str, output_format: str, json: bool = False) -> tuple[str, str, list[str]]:
    """Return the file to write ("" for standard output), the format, and notes; raises UsageError.

    The format is that of the file's name, as with the vendor's generator, else the one that was asked for, else YAML.
    """
    wanted = output_format.lower()
    if wanted and wanted not in FORMATS:
        raise invalid_value("--format", "output format", output_format, FORMATS)
    if json:
        if wanted == "yaml":
            raise UsageError("--json and --format yaml contradict each other", "")
        wanted = "json"
    if output in ("", "-", "/dev/stdout"):
        return "", wanted or "yaml", []
    check_output(output)
    path, format_name = target_of(output, wanted)
    notes = []
    if wanted and wanted != format_name:
        notes.append(f"{path}: the name says {format_name}, so it is {format_name}, not {wanted}")
    if os.path.splitext(path)[1] not in (".json", ".yaml"):
        notes.append(f"{path}: engines read only files whose names end in .json or .yaml")
    return path, format_name, notes


def check_output(output: str) -> None:
    """Raise UsageError for an output that is a directory, a device or "-", where a file is to be written.

    With the extension that is added to a name without one, a file of another name would be written beside it.
    """
    if os.path.isdir(output):
        raise UsageError(
            f"--output: {quoted(output)} is a directory", f"a file in it: {output.rstrip('/')}/nvidia.yaml"
        )
    if output == "-" or (os.path.exists(output) and not os.path.isfile(output)):
        raise UsageError(f"--output: {quoted(output)} is not a file", "name a file that ends in .yaml or .json")


def write_output(spec: dict[str, Any], path: str, format_name: str) -> None:
    """Write a specification to a file, atomically, or to standard output if ``path`` is empty; raises CdiError."""
    if path:
        write_spec(spec, path, format_name)
        return
    text = dump(spec, format_name)
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        # Python would try to write the rest at exit once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise CdiError("OCIGPU-CDI-8", f"write standard output: {error.strerror}", "") from error


def say(lines: Iterable[str]) -> None:
    """Print lines for people on standard error."""
    for line in lines:
        print(printable(line), file=sys.stderr)


def say_skipped(texts: Iterable[str]) -> None:
    """Print what was left out, a line each."""
    say(f"skipped: {text.removeprefix('left out: ')}" for text in texts)
