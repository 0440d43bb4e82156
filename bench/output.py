"""What the bench says: tables on standard output and in the report, progress on standard error."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path


class Output:
    """Prints lines and remembers them, so that they can be written to a report too."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._shown = 0.0

    def say(self, *lines: str) -> None:
        """Print lines of the report."""
        self.clear()
        self.lines += lines
        print(*lines, sep="\n", flush=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table in Markdown; the first column is text, numbers stand to the right."""
        widths = [max(len(row[place]) for row in (columns, *rows)) for place in range(len(columns))]

        def line(cells: Sequence[str]) -> str:
            first, *others = cells
            words = [first.ljust(widths[0])]
            words += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
            return f"| {' | '.join(words)} |"

        rule = [f":{'-' * (widths[0] + 1)}", *(f"{'-' * (width + 1)}:" for width in widths[1:])]
        self.say("", f"### {title}", "", line(columns), f"|{'|'.join(rule)}|", *map(line, rows))

    def progress(self, text: str, part: int = 0, whole: int = 0) -> None:
        """Say on standard error what is going on: one changing line on a terminal, a line for each text elsewhere."""
        if sys.stderr.isatty():
            if time.monotonic() - self._shown > 0.1 or not whole:
                self._shown = time.monotonic()
                count = f" {part}/{whole}" if whole else ""
                print(f"\r\033[K{text}{count}", end="", file=sys.stderr, flush=True)
        elif not whole:
            print(f"bench: {text}", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the progress away from a terminal's line."""
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def write(self, path: Path, head: Sequence[str]) -> None:
        """Write everything printed so far below ``head`` to a file."""
        path.write_text("\n".join((*head, *self.lines)) + "\n")


def milliseconds(value: float) -> str:
    return f"{round(value, 1) or 0:.1f}"  # no -0.0


def times(value: float) -> str:
    return f"{value:.2f}"
