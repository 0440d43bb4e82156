"""The steps of a plan on the screen, for ``ocigpu plan`` and ``ocigpu explain CONTAINER``: groups, or each of them."""

import os
from itertools import takewhile

from ocigpu.cli import show
from ocigpu.core.errors import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ocigpu.containers.steps import Step

SIGNS = {"mask": "-", "ldconfig": "~", "merge": "~", "mode": "~", "read-only": "~", "tmpfs": "~"}
"""What hides or changes something that is there, by the first word of a step; all else is added."""
PLURALS = {"directory": "directories", "tmpfs": "tmpfs", "ldconfig": "ldconfig"}
ROOM = 48
"""Columns of the names in a group's line."""


def print_steps(steps: "Sequence[Step]", each: bool, states: bool) -> None:
    """Print steps: a line for each group, or with ``each`` every one below its reason.

    In front of each is its state in a container (``states``), else + for added, ~ for changed, - for hidden.
    """
    if each:
        _print_each(steps, states)
        return
    groups: dict[tuple[str, ...], list[Step]] = {}
    for step in steps:
        if _sign(step):
            groups.setdefault(_group(step), []).append(step)
    rows = [_row(group, states) for group in groups.values()]
    show.table(("now" if states else "", "what", "where", "why"), rows)


def sum_line(steps: "Sequence[Step]") -> str:
    """Return e.g. "52 to add, 2 to change, 0 to hide"."""
    signs = [_sign(step) for step in steps]
    return f"{signs.count('+')} to add, {signs.count('~')} to change, {signs.count('-')} to hide"


def _print_each(steps: "Sequence[Step]", states: bool) -> None:
    """Print the steps below their reasons; the directory on the host is left out where the container's is the same."""
    width = max((len(step.now) for step in steps), default=0)
    heading = ""
    for step in steps:
        if heading != (reason := step.reason + _from([step])):
            heading = reason
            print(printable(heading))
        target = f" -> {step.source}" if step.what.startswith("link ") else ""
        before = f"{step.now or '-':<{width}}" if states else _sign(step)
        print(f"    {show.coloured(before)}  {printable(step.what + target)}" if before else f"    {step.what}{target}")


def _sign(step: "Step") -> str:
    """Return +, ~ or -; "" for an option of a hook, which the step above it has."""
    return "" if step.what.startswith(" ") else SIGNS.get(step.what.split(" ")[0], "+")


def _parts(step: "Step") -> tuple[str, str]:
    """Return a step's kind and path."""
    kind, _, rest = step.what.partition(" ")
    return kind, rest.split(" ")[0]


def _group(step: "Step") -> tuple[str, ...]:
    """Return what steps of one line have in common: their kind, and their reason up to what tells them apart."""
    return _parts(step)[0], _sign(step), "".join(takewhile(lambda c: c != "," and not c.isdigit(), step.reason))


def _row(group: "Sequence[Step]", states: bool) -> tuple[str, ...]:
    kind, first = _parts(group[0])
    what = kind if len(group) == 1 else f"{len(group)} {PLURALS.get(kind, f'{kind}s')}"
    names, shown = [first], 1
    for step in group[1:]:
        path = _parts(step)[1]
        names.append(os.path.basename(path) if os.path.dirname(path) == os.path.dirname(first) else path)
        shown += len(", ".join(names)) <= ROOM and shown == len(names) - 1
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    found = [step.now for step in group]
    counted = ", ".join(f"{found.count(state)} {state}" for state in dict.fromkeys(found))
    now = found[0] if found.count(found[0]) == len(found) else counted
    begin = (now or "-") if states else _sign(group[0])
    return begin, what, ", ".join(names[:shown]) + more, _join([step.reason for step in group]) + _from(group)


def _from(group: "Sequence[Step]") -> str:
    """Return from which directory of the host files come, if that is one, and not that of the container."""
    sources = {os.path.dirname(step.source) for step in group}
    targets = {os.path.dirname(_parts(step)[1]) for step in group}
    source = sources.pop()
    if sources or not source or {source} == targets or group[0].what.startswith("link "):
        return ""
    return f", from {source}"


def _join(reasons: list[str]) -> str:
    """Return one reason for several: what they begin and end with, once, and what differs, if it is not too long."""
    texts = [reason.replace(",", " ,").split(" ") for reason in dict.fromkeys(reasons)]
    if len(texts) == 1:
        return reasons[0]
    begin = _common(texts)
    end = _common([text[len(begin) :][::-1] for text in texts])[::-1]
    differ = [" ".join(text[len(begin) : len(text) - len(end)]) for text in texts]
    separator = " , " if begin or end else "; "
    middle = separator.join(filter(None, dict.fromkeys(part for text in differ for part in text.split(separator))))
    return " ".join([*begin, middle if len(middle) <= ROOM * 2 else "...", *end]).replace(" ,", ",")


def _common(texts: list[list[str]]) -> list[str]:
    """Return the words that all texts begin with."""
    return [words[0] for words in takewhile(lambda words: len(set(words)) == 1, zip(*texts, strict=False))]
