"""``ocigpu cdi list``, ``show`` and ``transform``, and what all commands about CDI specifications share."""

import os
import sys
from itertools import chain, groupby, pairwise, repeat

from ocigpu.cdi.check import Checked, Problem, check_spec
from ocigpu.cdi.generate import merge_edits
from ocigpu.cdi.values import MAX_BYTES
from ocigpu.cdi.versions import minimum_version
from ocigpu.cdi.write import FORMATS, dump, target_of, write_spec
from ocigpu.cli.front import show
from ocigpu.cli.front.common import load_settings
from ocigpu.core.cdi_names import is_qualified
from ocigpu.core.errors import CdiError, OcigpuError, UsageError, printable, quoted, suggest
from ocigpu.core.record import NamedTuple
from ocigpu.core.settings import Settings
from ocigpu.gpus.fingerprint import ANNOTATION, stale_reasons

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from ocigpu.cdi.registry import Registry

STANDARD_INPUT = "-"


class SpecState(NamedTuple):
    """How a specification fits this host: ``word`` "fresh", "stale" or "unknown", and why."""

    word: str
    reasons: tuple[str, ...] = ()

    def describe(self) -> str:
        return f"{self.word}: {'; '.join(self.reasons)}" if self.reasons else self.word


class Overlap(NamedTuple):
    """Devices that two files define.  ``kind``: "conflict" (same directory) or "shadowed" (``by`` is used)."""

    kind: str
    file: str
    by: str
    devices: tuple[str, ...]

    def describe(self) -> str:
        more = f" and {show.count(len(self.devices) - 1, 'other')}" if len(self.devices) > 1 else ""
        names = f"{self.devices[0]}{more}"
        if self.kind == "conflict":
            return f"conflict: {self.file} and {self.by} define {names}: no engine can use those"
        return f"shadowed: {self.by} is used for {names}, not {self.file}"


def settings_with_dirs(config: str, spec_dirs: list[str] | None) -> Settings:
    """Return the settings in force, with the directories of the command line or its variable if there are any."""
    settings = load_settings(config)
    texts = spec_dirs if spec_dirs is not None else [os.environ.get("NVIDIA_CTK_CDI_SPEC_DIRS", "")]
    directories = tuple(os.path.abspath(part) for text in texts for part in text.split(",") if part)
    return settings._replace(cdi_spec_dirs=directories) if directories else settings


def file_state(annotations: "dict[str, Any]", settings: Settings) -> SpecState:
    """Return how a specification with these annotations fits this host."""
    if ANNOTATION not in annotations:
        return SpecState("unknown", ("it carries no fingerprint of ocigpu",))
    try:
        reasons = stale_reasons(annotations, settings)
    except OcigpuError as error:
        return SpecState("unknown", (error.message,))
    return SpecState("stale", reasons) if reasons else SpecState("fresh")


def check_file(path: str) -> Checked:
    """Return the checked content of a file, or of standard input for "-"; raises CdiError OCIGPU-CDI-2."""
    from ocigpu.cdi.document import parse_document, read_document

    notes: list[str] = []
    if path == STANDARD_INPUT:
        data = parse_document(sys.stdin.buffer.read(MAX_BYTES + 1), "standard input", notes)
    else:
        data, _ = read_document(path, notes)
    checked = check_spec(data)
    more = tuple(Problem("", note, "documents", "warning") for note in notes)
    return checked._replace(problems=(*checked.problems, *more))


def read_valid_spec(path: str) -> "dict[str, Any]":
    """Return the specification of a file ("-": standard input) without errors; raises CdiError OCIGPU-CDI-2 or 3."""
    checked = check_file(path)
    if checked.errors:
        more = f" (and {show.count(len(checked.errors) - 1, 'problem')} more)" if len(checked.errors) > 1 else ""
        hint = "all of them: ocigpu cdi validate FILE" if more else ""
        raise CdiError("OCIGPU-CDI-3", f"{file_name(path)}: {checked.errors[0].text}{more}", hint)
    return checked.spec


def file_name(path: str) -> str:
    """Return what a file is called in messages."""
    return "standard input" if path == STANDARD_INPUT else path


def find_overlaps(registry: "Registry") -> list[Overlap]:
    """Return which devices are defined twice: the last directory that defines one wins, two files there conflict."""
    pairs = [("conflict", *pair, name) for name, paths in registry.conflicts() for pair in pairwise(paths)]
    pairs += [("shadowed", path, by, name) for name, path, by in registry.shadowed()]
    pairs.sort(key=lambda pair: pair[:3])
    return [
        Overlap(kind, path, other, tuple(pair[3] for pair in group))
        for (kind, path, other), group in groupby(pairs, key=lambda pair: pair[:3])
    ]


def invalid_value(option: str, what: str, value: str, valid: "Sequence[str]") -> UsageError:
    """Return the error for a value that is not one of the valid ones; its hint names those, and the nearest one."""
    hint = f"{suggest(value, valid, likeness=0.5)} valid: {', '.join(valid)}".lstrip()
    return UsageError(f"{option}: invalid {what}: {quoted(value)}", hint)


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


def write_output(spec: "dict[str, Any]", path: str, format_name: str) -> None:
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
        raise CdiError("OCIGPU-CDI-8", f"write standard output: {error.strerror}", "") from error


def say(lines: "Iterable[str]") -> None:
    """Print lines for people on standard error."""
    for line in lines:
        print(printable(line), file=sys.stderr)


def say_skipped(texts: "Iterable[str]") -> None:
    """Print what was left out, a line each."""
    say(f"skipped: {text.removeprefix('left out: ')}" for text in texts)


class Row(NamedTuple):
    """One definition of a device; ``usable``: a container that asks for the name gets this one."""

    device: str
    file: str
    version: str
    usable: bool
    state: SpecState


def list_command(
    spec_dir: list[str] | None = None,
    config: str = "",
    strict: bool = False,
    quiet: bool = False,
) -> "show.Answer":
    from ocigpu.cdi.registry import read_registry

    settings = settings_with_dirs(config, spec_dir)
    registry = read_registry(settings)
    states = {spec.path: file_state(spec.annotations, settings) for spec in registry.specs}
    rows = device_rows(registry, states)
    names = [row.device for row in rows if row.usable]
    errors = [{"file": path, "message": message} for path, message in registry.errors]
    devices = [{**row._asdict(), "state": row.state.word, "reasons": row.state.reasons} for row in rows]
    yield {"devices": devices, "errors": errors}, int(strict and bool(errors))
    if sys.stdout.isatty():
        if rows:
            # why a file is stale is said once, below
            table = [
                (row.device, row.file, row.version, "stale" if row.state.word == "stale" else row.state.describe())
                for row in rows
            ]
            show.table(("device", "file", "version", "state"), table, fold=False)
    else:
        for name in names:
            print(printable(name))
    say(f"{path}: {message}" for path, message in registry.errors)
    if not quiet:
        say([f"Found {show.count(len(names), 'CDI device')}"])
        if not (registry.specs or registry.errors):
            where = ", ".join(settings.cdi_spec_dirs)
            say([f"no specification in {where}; to write one: ocigpu cdi generate --output /etc/cdi/nvidia.yaml"])
        say(f"{path}: {state.describe()}" for path, state in states.items() if state.word == "stale")


def device_rows(registry: "Registry", states: dict[str, SpecState]) -> list[Row]:
    """Return a row for each definition of a device, sorted by name, the one that counts first."""
    conflicts = dict(registry.conflicts())
    shadows = {(name, file): by for name, file, by in registry.shadowed()}
    rows = []
    for name, specs in registry.definitions().items():
        for spec in reversed(specs):
            state = states[spec.path]
            if by := shadows.get((name, spec.path)):
                state = SpecState("shadowed", (f"{by} is used",))
            elif name in conflicts:
                others = [path for path in conflicts[name] if path != spec.path]
                state = SpecState("conflict", (f"{', '.join(others)} defines it too",))
            rows.append(Row(name, spec.path, spec.version, state == states[spec.path], state))
    return rows


def show_command(what: str, spec_dir: list[str] | None = None, config: str = "") -> "show.Answer":
    from ocigpu.cdi.compare import edit_rows
    from ocigpu.cdi.registry import read_registry

    settings = settings_with_dirs(config, spec_dir)
    if not is_qualified(what):
        if "/" not in what and what != STANDARD_INPUT and not os.path.lexists(what):
            message = f"{quoted(what)} is neither a device name, vendor/class=device, nor a file"
            raise CdiError("OCIGPU-CDI-1", message, "all names: ocigpu cdi list")
        spec = read_valid_spec(what)
        yield _spec_data(what, spec, "", spec.get("containerEdits") or {}, settings)
        _show_file(what, spec, settings)
        return
    resolved = read_registry(settings).resolve([what])
    files = [spec.path for spec in resolved.specs]
    edits = merge_edits(resolved.edits)
    yield lambda: _spec_data(files[0], read_valid_spec(files[0]), what, edits, settings)
    show.fields([("device", what), *(("file", file) for file in files)])
    print()
    show.table(("edit", "details"), edit_rows(edits))


def _show_file(path: str, spec: "dict[str, Any]", settings: Settings) -> None:
    from textwrap import wrap

    from ocigpu.cdi.compare import edit_rows

    state = file_state(spec.get("annotations") or {}, settings)
    names = [device["name"] for device in spec["devices"]]
    lines = wrap(f"{len(names)}: {', '.join(names)}", 100, break_long_words=False, break_on_hyphens=False)
    show.fields(
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
        show.table(("edit", "details"), rows)


def _spec_data(
    path: str, spec: "dict[str, Any]", device: str, edits: "dict[str, Any]", settings: Settings
) -> "dict[str, Any]":
    annotations = spec.get("annotations") or {}
    return {
        "device": device,
        "file": path,
        "kind": spec["kind"],
        "version": spec["cdiVersion"],
        "needs": minimum_version(spec),
        "devices": [one["name"] for one in spec["devices"]],
        "state": file_state(annotations, settings)._asdict(),
        "annotations": annotations,
        "containerEdits": edits,
    }


def transform_root_command(
    from_: str = "/",
    to: str = "/",
    input_: str = "-",
    relative_to: str = "host",
    output: str = "",
    format_: str = "",
) -> None:
    from ocigpu.cdi.transform import SIDES, transform_root

    if relative_to not in SIDES:
        raise invalid_value("--relative-to", "value", relative_to, SIDES)
    for option, root in (("--from", from_), ("--to", to)):
        if root and not root.startswith("/"):
            raise UsageError(f"{option}: {quoted(root)} is not an absolute path", "")
    path, format_name, notes = output_file(output, format_)
    spec = read_valid_spec(input_)
    write_output(transform_root(spec, from_, to, relative_to), path, format_name)
    say(f"note: {text}" for text in notes)
