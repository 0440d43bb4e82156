"""``ocigpu trace``: what shim and hook did for a container, when, and how long each step took."""

import json
import os
import sys
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter

from ocigpu.cli.front import show
from ocigpu.core.errors import OcigpuError, OsErrorAs, printable, quoted
from ocigpu.system.trace import MAX_FILE

MAX_LINE = 64 << 10
"""Bytes of a line that is looked at; ours are shorter."""
MAX_DEPTH = 100
Number = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]


class TracedStep(NamedTuple):
    """One line of a trace; ``ns`` and ``took`` in nanoseconds."""

    time: str
    ns: Number
    took: Number
    process: str
    pid: Number
    container: str
    depth: Annotated[int, Field(strict=True, ge=0, le=MAX_DEPTH)]
    action: str
    path: str
    reason: str
    result: str
    detail: str = ""
    message: str = ""

    @property
    def end(self) -> int:
        return self.ns + self.took


_STEP = TypeAdapter(TracedStep)


class Start(NamedTuple):
    """One start of a container: its steps by the time they began."""

    container: str
    steps: tuple[TracedStep, ...]

    @property
    def begin(self) -> int:
        return self.steps[0].ns

    @property
    def took(self) -> int:
        """Return nanoseconds from the first step to the end of the last."""
        return max(step.end for step in self.steps) - self.begin


class Phase(NamedTuple):
    """A part of a start: "shim", "runtime" (until it calls the hook) or "hook"; ``at`` and ``took`` in ns."""

    name: str
    at: int
    took: int


def read_starts(path: str, container: str = "") -> tuple[list[Start], int]:
    """Return the starts in a trace in their order, and how many lines could not be read (a disk was full, say).

    ``container``: only those whose id begins so.  Raises OcigpuError OCIGPU-TRC-1.
    """
    steps = []
    unreadable = 0
    with OsErrorAs(OcigpuError, "OCIGPU-TRC-1", f"trace {path}"), open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size > 2 * MAX_FILE:
            raise OcigpuError("OCIGPU-TRC-1", f"trace {path}: larger than any that is written")
        while line := file.readline(MAX_LINE):
            step = parse_step(line)
            if step is None:
                unreadable += 1
            elif step.container.startswith(container):
                steps.append(step)
    return group_steps(steps), unreadable


def parse_step(line: bytes) -> TracedStep | None:
    """Return the step of a line, None for anything else."""
    try:
        data = json.loads(line)
        return _STEP.validate_python({name: data[name] for name in TracedStep._fields if name in data})
    except (ValueError, RecursionError, TypeError):  # pydantic's ValidationError is the first
        return None


def group_steps(steps: Iterable[TracedStep]) -> list[Start]:
    """Return the starts that steps belong to: each begins with the shim, or with a hook that no shim has placed."""
    starts: list[list[TracedStep]] = []
    current: dict[str, list[TracedStep]] = {}
    for step in steps:
        mine = current.get(step.container)
        if mine is None or (step.action == "begin" and _begins_anew(step, mine)):
            mine = current[step.container] = []
            starts.append(mine)
        mine.append(step)
    return [Start(mine[0].container, tuple(sorted(mine, key=lambda step: (step.ns, -step.took)))) for mine in starts]


def _begins_anew(step: TracedStep, before: list[TracedStep]) -> bool:
    if step.process == "shim":
        return True
    return step.process == "hook" and (
        before[0].process != "shim" or any(one.process == "hook" and one.action == "begin" for one in before)
    )


def _called(start: Start) -> int:
    """Return when the runtime called the hook, 0 if it did not."""
    for step in start.steps:
        if step.process == "hook" and step.action == "begin":
            return step.ns
        if step.process == "early" and step.action == "wait-for-hook" and step.result == "ok":
            return step.end
    return 0


def find_phases(start: Start) -> list[Phase]:
    """Return the phases of a start in order, those that there were."""
    phases = []
    executed = next((step.ns for step in start.steps if step.process == "shim" and step.action == "exec"), 0)
    called = _called(start)
    shim = [step for step in start.steps if step.process == "shim"]
    if shim:
        end = executed or max(step.end for step in shim)
        phases.append(Phase("shim", 0, end - start.begin))
    if executed and called:
        phases.append(Phase("runtime", executed - start.begin, max(0, called - executed)))
    if called:
        end = max(step.end for step in start.steps if step.process != "shim")
        phases.append(Phase("hook", called - start.begin, end - called))
    return phases


def find_outcome(start: Start) -> tuple[str, str]:
    """Return ("ok", ""), or what went wrong: an error code or "incomplete", and a sentence."""
    actions = {(step.process, step.action) for step in start.steps}
    for step in start.steps:
        if step.action == "failed":
            return step.result, step.message
    if _called(start):
        ended = ("early", "end") in actions or ("hook", "end") in actions
        return ("ok", "") if ended else ("incomplete", "the hook did not come to its end: it was killed, or still runs")
    if ("shim", "exec") not in actions:
        return "incomplete", "the shim did not come to its end: it was killed, or still runs"
    if ("early", "begin") in actions:
        return "incomplete", "the runtime has not called the hook: it failed before, or still runs"
    return "ok", ""


def find_slowest(start: Start, number: int = 5) -> list[TracedStep]:
    """Return the steps that took longest, without those that consist of others and the wait for the runtime."""
    leaves = []
    after: dict[int, TracedStep] = {}  # by process, the step that began next: an inner one begins before the outer ends
    for step in reversed(start.steps):
        following = after.get(step.pid)
        inner = following is not None and following.depth > step.depth and following.ns < step.end
        if step.took and not inner and step.action != "wait-for-hook":
            leaves.append(step)
        after[step.pid] = step
    return sorted(leaves, key=lambda step: -step.took)[:number]


def show_result(step: TracedStep) -> str:
    """Return the result of a step for people, "" for what went well."""
    if step.result == "ok":
        return ""
    if step.action.startswith("undo-") and step.result == "ENOENT":
        return "nothing to undo"
    return step.result


BAR = 24
"""Columns of a bar on a terminal."""


def trace_command(file: str, container: str = "") -> "show.Answer":
    starts, unreadable = read_starts(file, container)
    if not starts:
        what = f"no start of container {quoted(container)}" if container else "no start of a container"
        raise OcigpuError("OCIGPU-TRC-2", f"trace {file}: {what}")
    yield lambda: {"file": file, "unreadable": unreadable, "starts": [_start_data(start) for start in starts]}
    shown = starts if container else starts[-1:]
    if len(starts) > len(shown):
        rows = [
            (one.container, one.steps[0].time, _ms(one.took), str(len(one.steps)), find_outcome(one)[0])
            for one in starts
        ]
        show.table(("container", "time", "ms", "steps", "result"), rows, fold=False)
        print()
    for position, start in enumerate(shown):
        if position:
            print()
        _show_start(start)
    if unreadable:
        print()
        show.notes([f"{show.count(unreadable, 'line')} could not be read"])


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
    line, dot = ("━", "·") if show.draws_unicode() else ("=", ".")
    return (" " * begin + (line * min(length, BAR - begin) if part.took else dot),)


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
