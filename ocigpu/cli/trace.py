"""``ocigpu trace``: what shim and hook did for a container, when, and how long each step took."""

import sys
from typing import Any

from ocigpu.cli import show
from ocigpu.cli.timeline import (
    Phase,
    Start,
    TracedStep,
    find_outcome,
    find_phases,
    find_slowest,
    read_starts,
    show_result,
)
from ocigpu.core.errors import OcigpuError, printable, quoted

BAR = 24
"""Columns of a bar on a terminal."""


def trace_command(file: str, container: str = "", json: bool = False) -> None:
    starts, unreadable = read_starts(file, container)
    if not starts:
        what = f"no start of container {quoted(container)}" if container else "no start of a container"
        raise OcigpuError("OCIGPU-TRC-2", f"trace {file}: {what}")
    if json:
        show.data({"file": file, "unreadable": unreadable, "starts": [_start_data(start) for start in starts]})
        return
    shown = starts if container else starts[-1:]
    if len(starts) > len(shown):
        _show_list(starts)
        print()
    for position, start in enumerate(shown):
        if position:
            print()
        _show_start(start)
    if unreadable:
        print()
        show.notes([f"{show.count(unreadable, 'line')} could not be read"])


def _show_list(starts: list[Start]) -> None:
    rows = [
        (start.container, start.steps[0].time, _ms(start.took), str(len(start.steps)), find_outcome(start)[0])
        for start in starts
    ]
    show.table(("container", "time", "ms", "steps", "result"), rows, fold=False)


def _show_start(start: Start) -> None:
    outcome, message = find_outcome(start)
    print(f"container {printable(start.container) or '(unknown)'}, {printable(start.steps[0].time)}")
    print(f"{show.count(len(start.steps), 'step')} in {_ms(start.took)} ms: {printable(outcome)}")
    if message:
        print(f"  {printable(message)}")
    print()
    bars, total = sys.stdout.isatty(), start.took
    phases = [(phase.name, _ms(phase.at), _ms(phase.took), *_bar(bars, phase, total)) for phase in find_phases(start)]
    show.table(("phase", "at ms", "took ms", *(("",) if bars else ())), phases)
    print()
    show.table(
        ("at ms", "took ms", "process", "step", "what", "result", *(("",) if bars else ())),
        [_step_row(step, start.begin, total, bars) for step in start.steps],
    )
    slowest = find_slowest(start)
    if slowest:
        print()
        rows = [(_ms(step.took), step.process, step.action, _what(step)) for step in slowest]
        show.table(("slowest ms", "process", "step", "what"), rows)


def _step_row(step: TracedStep, begin: int, total: int, bars: bool) -> tuple[str, ...]:
    result = show_result(step)
    if step.message and result == step.result and step.action != "failed":  # what failed is above the table
        result = f"{result}: {step.message}"
    return (
        _ms(step.ns - begin),
        _ms(step.took) if step.took else "",
        step.process,
        "  " * step.depth + step.action,
        _what(step),
        result,
        *_bar(bars, Phase("", step.ns - begin, step.took), total),
    )


def _what(step: TracedStep) -> str:
    """Return the path of a step, with its reason where that says more than a plan's usual ones."""
    return step.path if step.detail or not step.reason else f"{step.path}  ({step.reason})".strip()


def _bar(wanted: bool, part: Phase, total: int) -> tuple[str, ...]:
    if not wanted:
        return ()
    scale = BAR / max(total, 1)
    begin = min(int(part.at * scale), BAR - 1)
    length = max(1, round(part.took * scale)) if part.took else 1
    return (" " * begin + ("━" * min(length, BAR - begin) if part.took else "·"),)


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.2f}"


def _start_data(start: Start) -> dict[str, Any]:
    outcome, message = find_outcome(start)
    return {
        "container": start.container,
        "time": start.steps[0].time,
        "took": start.took,
        "result": outcome,
        "message": message,
        "phases": [phase._asdict() for phase in find_phases(start)],
        "slowest": [step._asdict() for step in find_slowest(start)],
        "steps": [step._asdict() for step in start.steps],
    }
