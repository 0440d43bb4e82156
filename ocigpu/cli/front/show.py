"""Output of the commands, for terminals, pipes and programs."""

import os
import sys
from itertools import zip_longest

from ocigpu.cli.front import manual
from ocigpu.cli.front.manual import columns
from ocigpu.core import errors
from ocigpu.core.errors import printable
from ocigpu.system import signals

count = errors.count
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
    from typing import Any, Self

    from ocigpu.core.facts import HostFacts

    Data = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
    Answer = Iterator[Data | tuple[Data, int]]

COLOURS = {
    **dict.fromkeys(("+", "ok", "there", "allowed", "as granted", "fresh", "running"), "32"),
    **dict.fromkeys(("~", "warning", "stale", "detached", "paused", "created", "no node"), "33"),
    **dict.fromkeys(("error", "lost", "missing", "another", "refused", "denied", "conflict", "less", "more"), "31"),
}
"""Words that have a colour on a terminal, wherever they stand alone: green, yellow and red of ECMA-48's SGR."""
NARROW = 12
"""Columns of a table's column that is not folded further."""


SCHEMA_VERSION = 1
"""Of the JSON that commands print: one more when a key goes or means something else; new keys change nothing."""


def answer(command: "Answer", json: bool) -> int:
    """Print the answer of a command, as JSON or for people; returns the exit status.

    A command that has --json is a generator: it yields its answer as data, with the exit status unless that is 0, and
    goes on to print it for people.  Data that takes time to make is a function, which is called for JSON only.  A
    command that yields nothing has no answer, or has printed it.
    """
    first = next(command, None)
    if first is None:
        return 0
    value, status = first if isinstance(first, tuple) else (first, 0)
    if json:
        data(value() if callable(value) else value)
    else:
        next(command, None)
    return status


def data(value: "Mapping[str, Any]") -> None:
    """Print an object as indented JSON, with ``schema-version`` first."""
    import json

    print(json.dumps({"schema-version": SCHEMA_VERSION, **value}, indent=2))


def fields(rows: "Iterable[tuple[str, str]]", whole: "Container[str]" = ()) -> None:
    """Print (name, value) pairs as aligned lines; an empty name continues the value above it.

    A long value is folded on a terminal, but those of the names in ``whole``: commands, to be copied.
    """
    pairs = list(rows)
    width = max((len(name) for name, _ in pairs), default=0)
    last = ""
    for name, value in pairs:
        last = name or last
        first, *more = [printable(value)] if last in whole else folded(printable(value), width + 2)
        head = styled(f"{name:<{width}}", "1") if name else " " * width
        print(f"{head}  {first}".rstrip())
        for line in more:
            print(f"{'':<{width}}  {line}")


def paragraph(text: str) -> None:
    """Print a text, indented, folded to the terminal's width; on lines of 80 columns elsewhere."""
    width = min(columns(), manual.MAX_WIDTH) if sys.stdout.isatty() else manual.WIDTH
    for line in manual.fold(f"  {printable(text)}", width, 2):
        print(line)


def folded(text: str, indent: int) -> list[str]:
    """Return a text as lines that fit a terminal below each other, ``indent`` columns from its left; one elsewhere."""
    room = columns() - indent
    return manual.fold(text, max(room, NARROW), 0) or [""] if sys.stdout.isatty() else [text]


def report(lines: "Iterable[str]") -> None:
    """Print the doctor's report: on a terminal folded below its own words, with severities in their colours.

    Fixes stay in one piece, to be copied.
    """
    width, fix = max(columns(), NARROW), False
    for line in lines:
        labelled = line.startswith("    ")
        fix = labelled and (line[4] == "f" or (fix and line[4] == " "))
        indent = 13 if labelled else 9 if line.startswith(("GPUs ", "driver ", "engines ")) else 4
        first, *more = manual.fold(line, width, indent) or [""] if sys.stdout.isatty() and not fix else [line]
        number, _, rest = first.partition(". ")
        severity = rest.partition(" ")[0] if number.isdigit() else ""
        colour = COLOURS.get(severity.lower(), "36")
        print(first.replace(severity, styled(severity, colour), 1) if severity else first, *more, sep="\n")


def table(
    headers: "Sequence[str]",
    rows: "Sequence[Sequence[str]]",
    fold: bool = True,
    dim: "Container[str]" = (),
    dispensable: "Iterable[str]" = (),
) -> None:
    """Print rows: folded to the terminal's width on a terminal, one aligned line a row anywhere else.

    On a terminal that is too narrow for columns each row is a block of lines with the headers before its cells.
    ``fold`` is False for rows that hold names to copy: they stay in one piece, however narrow the terminal.
    ``dim``: headers of secondary columns; ``dispensable``: headers of columns that a terminal without room for all
    does without, the first goes first.
    """
    terminal = sys.stdout.isatty()
    for name in dispensable if terminal else ():
        if sum(max(map(len, column)) + 2 for column in zip(headers, *rows, strict=True)) - 2 > columns():
            place = headers.index(name)
            headers, *rows = ([*row[:place], *row[place + 1 :]] for row in (headers, *rows))
    clean = [[header.upper() for header in headers], *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*clean, strict=True)]
    while fold and terminal and sum(widths) + 2 * (len(widths) - 1) > columns() and max(widths) > NARROW:
        widths[widths.index(max(widths))] -= 1
    if fold and terminal and sum(widths) + 2 * (len(widths) - 1) > columns():
        for number, row in enumerate(clean[1:]):
            if number:
                print()
            fields((header, cell) for header, cell in zip(clean[0], row, strict=True) if cell)
        return
    for number, row in enumerate(clean):
        cells = (_pieces(cell, width) for cell, width in zip(row, widths, strict=True))
        for parts in zip_longest(*cells, fillvalue=""):
            padded = [part.ljust(width) for part, width in zip(parts, widths, strict=True)]
            if number:
                styles = (
                    COLOURS.get(cell) or ("2" if header in dim else "")
                    for cell, header in zip(row, headers, strict=True)
                )
                padded = [styled(part, style) for part, style in zip(padded, styles, strict=True)]
            print(styled("  ".join(padded).rstrip(), "" if number else "1"))


def styled(line: str, style: str | None) -> str:
    """Return a line in a style of a terminal (ECMA-48's SGR), if there is one and standard output has colours."""
    return f"\x1b[{style}m{line}\x1b[0m" if style and has_colours(sys.stdout.isatty()) else line


def has_colours(terminal: bool) -> bool:
    """Return whether output may have colours: NO_COLOR forbids them (no-color.org), FORCE_COLOR wants them anywhere.

    Else a terminal has them unless TERM is "dumb".
    """
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (terminal and os.environ.get("TERM") != "dumb")


def draws_unicode() -> bool:
    """Return whether standard output may have more than ASCII: neither its encoding nor the locale forbids it.

    Python writes UTF-8 in the locale C, too (PEP 540), which promises a terminal of ASCII alone.
    """
    locale = next(filter(None, map(os.environ.get, ("LC_ALL", "LC_CTYPE", "LANG"))), "")
    return locale not in ("C", "POSIX") and "utf" in (sys.stdout.encoding or "utf-8").lower()


def coloured(text: str) -> str:
    """Return a word that says how something is in its colour, on a terminal."""
    return styled(text, COLOURS.get(text.strip()))


def _pieces(text: str, width: int) -> list[str]:
    lines = manual.fold(text, width, 0)
    return [line[at : at + width] for line in lines for at in range(0, len(line), width)] or [""]


def notes(texts: "Iterable[str]", apart: bool = False) -> None:
    """Print warnings, a line each; ``apart``: below an empty line."""
    for number, note in enumerate(texts):
        if apart and not number:
            print()
        first, *more = folded(printable(note), len("note: "))
        print(f"{styled('note:', '33')} {first}", *(f"      {line}" for line in more), sep="\n")


def diff(lines: "Iterable[str]") -> None:
    """Print the lines of a unified diff, in colours on a terminal."""
    colours = {"+": "32", "-": "31", "@": "36"}
    for line in lines:
        clean = "\t".join(printable(part) for part in line.rstrip("\r").split("\t"))
        print(styled(clean, None if line.startswith(("+++", "---")) else colours.get(line[:1])))


def foreign(text: str, flush: bool = False) -> None:
    """Print a line of a container, pod or node: as it is, but on a terminal, which it must not steer."""
    if sys.stdout.isatty():
        text = "\t".join(printable(part, len(part)) for part in text.split("\t"))
    print(text, flush=flush)


def confirm(question: str, piped: bool = False) -> bool:
    """Ask on the terminal; False for anything but yes, and where nobody can answer.

    ``piped``: also where what is printed, and the question, goes elsewhere.
    """
    if not (sys.stdin.isatty() and (piped or sys.stdout.isatty())):
        return False
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


def host_line(facts: "HostFacts", recorded: str = "") -> str:
    """Return one line that says what host this is: a simulated one is never taken for a real one."""
    if facts.simulated:
        text = f"SIMULATED host {facts.driver_root}: no real GPU"
    elif facts.driver_root != "/":
        text = f"this host, driver root {facts.driver_root}"
    else:
        text = "this host"
    return f"{text} (recorded in {recorded})" if recorded else text


def driver_line(facts: "HostFacts") -> str:
    """Return one line on the driver, e.g. "550.163.01, CUDA 12.4, 8 GPUs (from nvml)"; of several, on each."""
    if facts.parts:
        return "; ".join(f"{one.vendor} {driver_line(one)}" for one in facts.parts)
    parts = [facts.driver_version or "unknown version"]
    if facts.cuda_version:
        parts.append(f"CUDA {facts.cuda_version}")
    parts.append(count(len(facts.gpus), "GPU"))
    return ", ".join(parts) + (f" (from {facts.source})" if facts.source else "")


class Progress:
    """Says what a long operation is at, on standard error, once it has taken ``delay`` seconds.

    On a terminal one line is rewritten and removed at the end; elsewhere each text is a line of its own.  By SIGALRM,
    without a thread: what is done meanwhile may fork.
    """

    def __init__(self, text: str = "", delay: float = 2.0) -> None:
        self._text = text
        self._delay = delay
        self._begun = False
        self._last = ""
        self._terminal = sys.stderr.isatty()

    def __enter__(self) -> "Self":
        self._before = signals.signal(signals.SIGALRM, self.begin)
        signals.setitimer(signals.ITIMER_REAL, self._delay)
        return self

    def __call__(self, text: str) -> None:
        self._text = text
        if self._begun:
            self._show()

    def begin(self, *_signal: object) -> None:
        self._begun = True
        self._show()

    def _show(self) -> None:
        text = printable(self._text)
        if text == self._last:  # nothing yet; or the signal came when this was about to be shown
            return
        self._last = text
        if self._terminal:
            width = columns(sys.stderr.fileno())
            print(f"\r\x1b[K{text[: width - 1]}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def __exit__(self, *_exception: object) -> None:
        signals.setitimer(signals.ITIMER_REAL, 0)
        signals.signal(signals.SIGALRM, self._before)
        if self._terminal and self._last:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
