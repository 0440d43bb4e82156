"""Lines of the text that Prometheus reads (exposition format 0.0.4): pure."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

Pairs = tuple[tuple[str, str], ...]


def render_number(name: str, kind: str, text: str, *series: tuple[Pairs, float]) -> str:
    """Return a metric with its series, each of labels and a value."""
    lines = head_lines(name, kind, text)
    for labels, value in series:
        lines.append(
            f"{name}{{{label_text(labels)}}} {number_text(value)}" if labels else f"{name} {number_text(value)}"
        )
    return "".join(f"{line}\n" for line in lines)


def render_histogram(name: str, text: str, bounds: Sequence[float], *series: tuple[Pairs, Sequence[int], float]) -> str:
    """Return a histogram, for each series its labels, how many were at most each bound and above all, and their sum."""
    lines = head_lines(name, "histogram", text)
    for labels, counts, total in series:
        most, below = [*map(number_text, bounds), "+Inf"], list(accumulate(counts))
        lines += [
            f"{name}_bucket{{{label_text((*labels, ('le', bound)))}}} {n}" for bound, n in zip(most, below, strict=True)
        ]
        lines += [
            f"{name}_sum{{{label_text(labels)}}} {number_text(total)}",
            f"{name}_count{{{label_text(labels)}}} {below[-1]}",
        ]
    return "".join(f"{line}\n" for line in lines)


def head_lines(name: str, kind: str, text: str) -> list[str]:
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return [f"# HELP {name} {escaped}", f"# TYPE {name} {kind}"]


def label_text(pairs: Iterable[tuple[str, str]]) -> str:
    return ",".join(f'{name}="{_escape(value)}"' for name, value in pairs)


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def number_text(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
