"""What the ``cdi`` commands share: specification files read, checked and compared with the host's state."""

import os
import sys
from itertools import groupby, pairwise
from typing import Annotated, Any, NamedTuple

import typer

from ocigpu.cdi.check import Checked, check_spec
from ocigpu.cdi.document import parse_document, read_document
from ocigpu.cdi.registry import Registry
from ocigpu.cdi.values import MAX_BYTES
from ocigpu.cli.common import count, load_settings
from ocigpu.core.errors import CdiError, OcigpuError
from ocigpu.core.settings import Settings
from ocigpu.gpus.fingerprint import ANNOTATION
from ocigpu.gpus.vendors import stale_reasons

STANDARD_INPUT = "-"

SpecDirsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--spec-dir",
        metavar="DIRS",
        help="Directories of specifications, a later one wins; repeatable, or with commas.  [env var: "
        "NVIDIA_CTK_CDI_SPEC_DIRS; default: settings' cdi.spec-dirs]",
    ),
]


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
        more = f" and {count(len(self.devices) - 1, 'other')}" if len(self.devices) > 1 else ""
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


def file_state(annotations: dict[str, Any], settings: Settings) -> SpecState:
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
    if path == STANDARD_INPUT:
        return check_spec(parse_document(sys.stdin.buffer.read(MAX_BYTES + 1), "standard input"))
    return check_spec(read_document(path)[0])


def read_valid_spec(path: str) -> dict[str, Any]:
    """Return the specification of a file ("-": standard input) without errors; raises CdiError OCIGPU-CDI-2 or 3."""
    checked = check_file(path)
    if checked.errors:
        more = f" (and {count(len(checked.errors) - 1, 'problem')} more)" if len(checked.errors) > 1 else ""
        hint = "all of them: ocigpu cdi validate FILE" if more else ""
        raise CdiError("OCIGPU-CDI-3", f"{file_name(path)}: {checked.errors[0].text}{more}", hint)
    return checked.spec


def file_name(path: str) -> str:
    """Return what a file is called in messages."""
    return "standard input" if path == STANDARD_INPUT else path


def find_overlaps(registry: Registry) -> list[Overlap]:
    """Return which devices are defined twice: the last directory that defines one wins, two files there conflict."""
    pairs = [("conflict", *pair, name) for name, paths in registry.conflicts() for pair in pairwise(paths)]
    pairs += [("shadowed", path, by, name) for name, path, by in registry.shadowed()]
    pairs.sort(key=lambda pair: pair[:3])
    return [
        Overlap(kind, path, other, tuple(pair[3] for pair in group))
        for (kind, path, other), group in groupby(pairs, key=lambda pair: pair[:3])
    ]
