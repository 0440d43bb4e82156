"""The figures as tables: all of them for the page of these processors, a few for the README."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.measure import Figures, Group, Row
from bench.output import Output, milliseconds, times

_AIM = re.compile(r"(\w+) <= ([\d.]+)(?:/(\d+))?(?: of (.+))?")
VENDOR = "vendor "
COSTS = (
    ("8 GPUs, mode `hook` (the default): added to a container's start and end", "hook", "added"),
    ("the same, in processor time", "hook", "cpu"),
    ("the same while every processor has other work", "busy: hook", "added"),
    ("8 GPUs, mode `spec` (NVIDIA's: its default mode)", "spec", "added"),
    ("the same, in processor time", "spec", "cpu"),
    ("the same while every processor has other work", "busy: spec", "added"),
    ("no GPU requested", "no GPU", "added"),
    ("`cdi generate`, the whole command", "generate, 600", "figure"),
)
"""Lines of the README's table: what it says, a row of the benchmark, and which of its figures."""
PAGE = "bench/RESULTS-{}.md"
"""Of one make of processors, by its name."""


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
    own = ["ratio", "added", "cpu"]
    columns = ["", "median", *own, "vendor", *own, "aim", "reached"]
    filled = [place for place in range(len(columns)) if place == 0 or any(line[place] for line in lines)]
    out.table(group.title, [columns[place] for place in filled], [[line[place] for place in filled] for line in lines])


def _cells(figures: Figures | None) -> list[str]:
    if figures is None:
        return [""] * 4
    ratio = "" if figures.ratio is None else times(figures.ratio)
    added = ["" if each is None else milliseconds(each) for each in (figures.added, figures.cpu)]
    return [milliseconds(figures.sample["figure"]), ratio, *added]


def costs(groups: Sequence[Group], figures: dict[str, Figures], processors: str, told: str) -> str:
    """Return the README's table for a make of processors, between its marks; ``told``: what it was measured on."""
    rows = {row.name: row for group in groups for row in group.rows}
    lines = [f"| {processors} | ocigpu | NVIDIA's toolkit |", "|---|---|---|"]
    for text, name, what in COSTS:
        cells = (_cost(figures.get(each), what) for each in (name, rows[name].peer))
        lines.append(f"| {text} | {' | '.join(cells)} |")
    begin, end = _marks(processors)
    return "".join(f"{line}\n" for line in (begin, *lines, "", told, end))


def _marks(processors: str) -> tuple[str, str]:
    return f"<!-- costs on {processors}: make bench WRITE=1 -->", f"<!-- end of costs on {processors} -->"


def _cost(figures: Figures | None, what: str) -> str:
    if figures is None or (value := figures.get(what)) is None:
        return "not measured"
    ratio = f" ({times(figures.ratio)}x)" if what == "added" and figures.ratio is not None else ""
    return f"{milliseconds(value)} ms{ratio}"


def read_costs(text: str, processors: str) -> str:
    """Return the table of :func:`costs` that a page has, with its marks; "" where there is none."""
    begin, end = _marks(processors)
    found = re.search(f"^{begin}\n.*?^{end}\n", text, re.MULTILINE | re.DOTALL)
    return found[0] if found else ""


def replace_costs(page: Path, processors: str, made: str) -> None:
    """Replace a page's table for a make of processors, or put it behind the last table of others.

    Raises ValueError where there is none.
    """
    text = page.read_text()
    there = read_costs(text, processors)
    if not there and not (others := re.findall(r"^<!-- end of costs on .* -->\n", text, re.MULTILINE)):
        raise ValueError(f"{page}: no table between marks")
    page.write_text(text.replace(there, made) if there else text.replace(others[-1], f"{others[-1]}\n{made}"))
