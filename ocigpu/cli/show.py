"""Output of the commands, for terminals, pipes and programs."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Self

from ocigpu.core.errors import printable
from ocigpu.core.facts import HostFacts


def data(value: Any) -> None:
    """Print a value as indented JSON."""
    print(json.dumps(value, indent=2))


def fields(rows: Iterable[tuple[str, str]]) -> None:
    """Print (name, value) pairs as aligned lines; an empty name continues the value above it."""
    pairs = list(rows)
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        print(f"{name:<{width}}  {printable(value)}".rstrip())


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], fold: bool = True) -> None:
    """Print rows: folded to the terminal's width on a terminal, one aligned line a row anywhere else.

    ``fold`` is False for rows that hold names to copy: they stay in one piece, however narrow the terminal.
    """
    clean = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [headers, *clean]) for column in range(len(headers))]
    total = sum(widths) + 3 * len(widths)
    if sys.stdout.isatty() and (fold or total <= shutil.get_terminal_size().columns):
        _print_rich_table(headers, clean)
        return
    for row in [[header.upper() for header in headers], *clean]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_rich_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for header in headers:
        table.add_column(header, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: a name in brackets is not markup
    Console().print(table)


def notes(texts: Iterable[str], apart: bool = False) -> None:
    """Print warnings, a line each; ``apart``: below an empty line."""
    for number, note in enumerate(texts):
        if apart and not number:
            print()
        print(f"note: {printable(note)}")


def diff(lines: Iterable[str]) -> None:
    """Print the lines of a unified diff, in colours on a terminal."""
    colours = {"+": "32", "-": "31", "@": "36"} if sys.stdout.isatty() else {}
    for line in lines:
        clean = "\t".join(printable(part) for part in line.rstrip("\r").split("\t"))
        colour = "" if line.startswith(("+++", "---")) else colours.get(line[:1])
        print(f"\x1b[{colour}m{clean}\x1b[0m" if colour else clean)


def host_line(facts: HostFacts, recorded: str = "") -> str:
    """Return one line that says what host this is: a simulated one is never taken for a real one."""
    if facts.simulated:
        text = f"SIMULATED host {facts.driver_root}: no real GPU"
    elif facts.driver_root != "/":
        text = f"this host, driver root {facts.driver_root}"
    else:
        text = "this host"
    return f"{text} (recorded in {recorded})" if recorded else text


def driver_line(facts: HostFacts) -> str:
    """Return one line on the driver, e.g. "550.163.01, CUDA 12.4, 8 GPUs (from nvml)"."""
    parts = [facts.driver_version or "unknown version"]
    if facts.cuda_version:
        parts.append(f"CUDA {facts.cuda_version}")
    parts.append(count(len(facts.gpus), "GPU"))
    return ", ".join(parts) + (f" (from {facts.source})" if facts.source else "")


def count(number: int, noun: str) -> str:
    """Return e.g. "1 GPU", "2 GPUs"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


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

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGALRM, self._begin)
        signal.setitimer(signal.ITIMER_REAL, self._delay)
        return self

    def __call__(self, text: str) -> None:
        self._text = text
        if self._begun:
            self._show()

    def _begin(self, *_signal: object) -> None:
        self._begun = True
        self._show()

    def _show(self) -> None:
        text = printable(self._text)
        if text == self._last:  # nothing yet; or the signal came when this was about to be shown
            return
        self._last = text
        if self._terminal:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            print(f"\r\x1b[K{text[: columns - 1]}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def __exit__(self, *_exception: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)
        if self._terminal and self._last:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
