"""Which metrics are exported: dcgm-exporter's file of three columns, ``name, type, help``."""

import csv
import io
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ocigpu.core.errors import SettingsError, printable, quoted, suggest
from ocigpu.exporter.metrics import BY_NAME, DCGM_NAMES, METRICS, OLD_NAMES, why_missing
from ocigpu.system.options import read_text

KINDS = ("gauge", "counter", "label")
MAX_BYTES = 1 << 20


class Collector(NamedTuple):
    """A requested metric, with the type and the help from the file."""

    name: str
    kind: str
    help: str

    @property
    def metric(self) -> str:
        """Its name in the table; a file may use the name of dcgm-exporter 1.x, and then the series has it, too."""
        return OLD_NAMES.get(self.name, self.name)


DEFAULTS = tuple(Collector(metric.name, metric.kind, metric.help) for metric in METRICS if metric.default)


def parse_collectors(text: str, where: str) -> tuple[tuple[Collector, ...], tuple[str, ...]]:
    """Return the metrics of a file that NVML can supply, and a note for each other metric of DCGM.

    Raises SettingsError (OCIGPU-KUBE-4) naming the line that is malformed, has an unknown name, or repeats a metric.
    """
    found: dict[str, Collector] = {}
    notes: list[str] = []
    for number, fields in _records(text, where):
        place = f"{where} line {number}"
        if len(fields) < 3:
            raise collectors_error(place, "three fields are required: name, type, help")
        name, kind, text_ = *fields[:2], ", ".join(fields[2:])  # a value without quotes is one text
        if kind not in KINDS:
            raise collectors_error(place, f"type {quoted(kind)}: not one of {', '.join(KINDS)}")
        if name in found:
            raise collectors_error(place, f"{name} occurs twice")
        known = BY_NAME.get(OLD_NAMES.get(name, name))
        if known is None:
            why = why_missing(name)
            if not why:
                near = suggest(name, [*BY_NAME, *DCGM_NAMES], likeness=0.8)
                raise collectors_error(place, f"unknown metric {quoted(name)}{near and f': {near}'}")
            notes.append(f"{place}: {printable(name, 100)} is left out: {why}")
            continue
        if (kind == "label") != (known.kind == "label"):
            raise collectors_error(place, f"{name} is a {known.kind}")
        found[name] = Collector(name, kind, text_)
    return tuple(found.values()), tuple(notes)


def _records(text: str, where: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the records of a file with the numbers of their last lines: real CSV, fields may have quotes."""
    lines = ("" if line.lstrip().startswith("#") else line for line in text.splitlines(keepends=True))
    reader = csv.reader(lines, skipinitialspace=True, strict=True)
    try:
        for record in reader:
            fields = [" ".join(field.split()) for field in record]
            if any(fields):
                yield reader.line_num, fields
    except csv.Error as error:
        raise collectors_error(f"{where} line {reader.line_num}", f"no CSV: {printable(str(error), 100)}") from error


def read_collectors(path: str) -> tuple[tuple[Collector, ...], tuple[str, ...]]:
    """Return the collectors of a file, see :func:`parse_collectors`; those of the table without a path."""
    if not path:
        return DEFAULTS, ()
    return parse_collectors(read_text(path, MAX_BYTES, collectors_error), path)


def write_collectors(collectors: Sequence[Collector]) -> str:
    """Return the text of a file with these; omitted metrics of the table are comments."""
    wanted = {collector.name: collector for collector in collectors}
    text = io.StringIO()
    text.write("# name, type (gauge, counter or label), help\n\n")
    writer = csv.writer(text, lineterminator="\n")
    for metric in METRICS:
        text.write("" if metric.name in wanted else "# ")
        writer.writerow((metric.name, *(wanted.get(metric.name) or metric)[1:3]))
    return text.getvalue()


def collectors_error(where: str, cause: str) -> SettingsError:
    """Return the error of a file of collectors."""
    return SettingsError("OCIGPU-KUBE-4", f"collectors {printable(where, 300)}: {cause}")
