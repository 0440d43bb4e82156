"""The figures as tables: all of them for bench/RESULTS.md, four of them for the README, from the same run."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.measure import Figures, Group, Row
from bench.output import Output, milliseconds, times

_AIM = re.compile(r"(\w+) <= ([\d.]+)(?:/(\d+))?(?: of (.+))?")
VENDOR = "vendor "
COSTS = {
    "8 GPUs, mode `hook` (the default): added to a container's start and end": "hook",
    "8 GPUs, mode `spec` (NVIDIA's: its default mode)": "spec",
    "no GPU asked for": "no GPU",
    "`cdi generate`, the whole command": "generate, 600",
}
"""Rows of the README's table, each with the figure that a user cares about: what is added, else the whole."""
BEGIN, END = "<!-- costs: make bench WRITE=1 -->\n", "<!-- end of costs -->\n"


class Aim(NamedTuple):
    """What a row is to reach: its figure and the most that it may be, None where that was not measured."""

    text: str
    figure: float | None
    limit: float | None

    @property
    def reached(self) -> str:
        if self.figure is None or self.limit is None:
            return ""
        return "yes" if self.figure <= self.limit else f"no, {self.figure:.2f} of {self.limit:.2f}"


def judge(row: Row, figures: dict[str, Figures]) -> list[Aim]:
    """Return the aims of a row."""
    found = []
    for text in filter(None, row.aims.split("; ")):
        match = _AIM.fullmatch(text)
        if not match:
            raise ValueError(f"{row.name}: {text}: not an aim")
        what, limit, divisor, of = match.groups()
        share = float(limit) / float(divisor or 1)
        other = (figures[of].get(what) if of in figures else None) if of else 1.0
        most = None if other is None else share * other
        found.append(Aim(text, figures[row.name].get(what) if row.name in figures else None, most))
    return found


def show_group(out: Output, group: Group, figures: dict[str, Figures]) -> None:
    """Print a group's table.  The vendor's rows stand beside ours, and by themselves where none of ours names them."""
    peers = {row.peer for row in group.rows}
    lines = []
    for row in group.rows:
        if row.name in peers or row.name not in figures:
            continue
        aims = judge(row, figures)
        cells = [*_cells(figures.get(row.name)), *_cells(figures.get(row.peer))]
        lines.append([row.name, *cells, "; ".join(aim.text for aim in aims), "; ".join(aim.reached for aim in aims)])
    columns = ["", "median", "ratio", "added", "vendor", "ratio", "added", "aim", "reached"]
    filled = [place for place in range(len(columns)) if place == 0 or any(line[place] for line in lines)]
    out.table(group.title, [columns[place] for place in filled], [[line[place] for place in filled] for line in lines])


def _cells(figures: Figures | None) -> list[str]:
    if figures is None:
        return ["", "", ""]
    ratio = "" if figures.ratio is None else times(figures.ratio)
    return [milliseconds(figures.sample["figure"]), ratio, "" if figures.added is None else milliseconds(figures.added)]


def costs(groups: Sequence[Group], figures: dict[str, Figures], told: str) -> str:
    """Return the README's table, between its marks; ``told``: what it was measured on."""
    rows = {row.name: row for group in groups for row in group.rows}
    lines = ["| | ocigpu | NVIDIA's toolkit |", "|---|---|---|"]
    for text, name in COSTS.items():
        lines.append(f"| {text} | {_cost(figures.get(name))} | {_cost(figures.get(rows[name].peer))} |")
    return "".join(f"{line}\n" for line in (BEGIN.rstrip("\n"), *lines, "", told, END.rstrip("\n")))


def _cost(figures: Figures | None) -> str:
    if figures is None:
        return "not measured"
    if figures.added is None or figures.ratio is None:
        return f"{milliseconds(figures.sample['figure'])} ms"
    return f"{milliseconds(figures.added)} ms ({times(figures.ratio)}x)"


def read_costs(text: str) -> str:
    """Return the table of :func:`costs` that a page has, with its marks; "" where there is none."""
    return BEGIN + text.partition(BEGIN)[2].partition(END)[0] + END if BEGIN in text and END in text else ""


def replace_costs(page: Path, made: str) -> None:
    """Put the table into a page, in the place of the one that is there; raises ValueError where there is none."""
    text = page.read_text()
    if not (there := read_costs(text)):
        raise ValueError(f"{page}: no table between its marks")
    page.write_text(text.replace(there, made))
