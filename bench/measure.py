"""The runner: rows in groups, measured in paired rounds.  In a round every row of a group runs once, in random order.

A row is compared with another of its group in the same round: what the machine does meanwhile falls on both.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bench.commands import Sample, Take
from bench.hosts import Bench
from bench.output import Output

PAUSE = 0.02
"""Seconds before each row: what the one before has left the kernel to do is mostly done then."""


class Row(NamedTuple):
    """A row of the table: ``make`` prepares what it needs and returns what runs it once; ``name`` is unique.

    ``over``: the row that this one is compared with.  The step of simulated hosts, which that may have and the group's
    first row has not, is no part of what is added, nor of the ratio.  ``peer``: the vendor's row beside it.
    ``aims``: such as "added <= 1/8 of ROW; ratio <= 1.37": a figure of it is at most that, or that share of ROW's.
    """

    name: str
    make: Callable[[Bench], Take]
    over: str = ""
    peer: str = ""
    aims: str = ""


class Group:
    """Rows that are measured side by side; ratios are to the first.  ``busy``: while all processors have other work."""

    def __init__(self, title: str, *rows: Row, busy: bool = False) -> None:
        self.title, self.rows, self.busy = title, rows, busy


class Figures(NamedTuple):
    """Medians of a row: of its samples, of the ratio to its group's first row, of the time and the processor time that
    it adds to its ``over``.
    """

    sample: Sample
    ratio: float | None = None
    added: float | None = None
    cpu: float | None = None

    def get(self, what: str) -> float | None:
        own = {"ratio": self.ratio, "added": self.added, "cpu": self.cpu}
        return own[what] if what in own else self.sample.get(what)


def take_rounds(takes: dict[str, Take], rounds: int, warm: int, out: Output) -> dict[str, list[Sample]]:
    """Run every row of a group once a round; returns the samples by row.

    The order changes at random, the same way each time: what one leaves the kernel to do falls on all the others.
    ``warm`` turns before do not count: they fill the caches of the file system, of byte code and of ours.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in takes}
    for name, take in takes.items():
        out.progress(f"trying {name}")
        for _ in range(warm):
            take()
    for turn in range(rounds):
        out.progress("measuring", turn, rounds)
        for name in random.Random(turn).sample(list(takes), len(takes)):
            time.sleep(PAUSE)
            samples[name].append(takes[name]())
    return samples


def find_figures(rows: Sequence[Row], samples: dict[str, list[Sample]]) -> dict[str, Figures]:
    """Return the medians of a group's rows; ratios and differences are taken round by round."""
    found: dict[str, Figures] = {}
    base = samples.get(rows[0].name, [])
    for row in rows:
        taken = samples.get(row.name, [])
        if not taken:
            continue
        medians = {name: statistics.median(each[name] for each in taken) for name in taken[0]}
        ratio = added = cpu = None
        if row.over in samples:
            triples = [
                (a["figure"], b["figure"], c["figure"]) for a, b, c in zip(taken, samples[row.over], base, strict=True)
            ]
            added = statistics.median(own - over for own, over, _ in triples)
            ratio = statistics.median((own - over + first) / first for own, over, first in triples)
            if "cpu" in medians:
                pairs = zip(taken, samples[row.over], strict=True)
                cpu = statistics.median(own["cpu"] - over["cpu"] for own, over in pairs)
        found[row.name] = Figures(medians, ratio, added, cpu)
    return found
