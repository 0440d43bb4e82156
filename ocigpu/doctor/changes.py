"""The differences of two reports: new and gone findings.  The earlier one may be a file of ``doctor --json``."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ocigpu.core.errors import UNUSABLE, UsageError, printable
from ocigpu.doctor.findings import SEVERITIES, Evidence, Finding
from ocigpu.doctor.report import render_finding
from ocigpu.system.files import read_regular

MAX_REPORT = 16 << 20


class Changes(NamedTuple):
    """Findings that are wrong: ``new`` ones, ``gone`` ones, those whose check was ``unchecked`` now, and ``same``."""

    new: tuple[Finding, ...]
    gone: tuple[Finding, ...]
    unchecked: tuple[Finding, ...]
    same: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return bool(self.new or self.gone)


def read_report(path: str) -> list[Finding]:
    """Return the findings of a report that ``doctor --json`` has printed; raises UsageError for another file."""
    try:
        data = read_regular(path, MAX_REPORT)
    except OSError as error:
        raise UsageError(f"read {path}: {error.strerror or error}") from error
    try:
        return [_parse(item) for item in json.loads(data)["findings"]]
    except UNUSABLE as error:
        raise UsageError(f"{path}: not a report of ocigpu doctor --json", "ocigpu doctor --json > FILE") from error


def _parse(item: Any) -> Finding:
    severity, text, name = (str(item[key]) for key in ("severity", "text", "name"))
    if severity not in SEVERITIES:
        raise ValueError(severity)
    evidence = tuple(Evidence(*(str(seen[key]) for key in Evidence._fields)) for seen in item["evidence"])
    return Finding(severity, text, evidence, name=name, code=str(item.get("code", "")))


def compare(before: Sequence[Finding], now: Sequence[Finding]) -> Changes:
    """Return what has changed; a finding whose text tells other numbers is the same one."""
    bad = [item for item in now if item.is_bad]
    earlier = [item for item in before if item.is_bad]
    made = {item.name for item in now if item.severity != "not-checked"}
    left = [item for item in earlier if not any(one.is_still(item) for one in bad)]
    return Changes(
        tuple(item for item in bad if not any(item.is_still(one) for one in earlier)),
        tuple(item for item in left if item.name in made),
        tuple(item for item in left if item.name not in made),
        tuple(item for item in bad if any(item.is_still(one) for one in earlier)),
    )


def render_changes(changes: Changes) -> Iterator[str]:
    """Yield a line for each finding that is gone or was not looked at, and all about each new one."""
    for item in changes.new:
        first, *more = render_finding(item)
        yield f"+ {first}"
        yield from more
    yield from (f"- {item.severity.upper()} {item.name}: {printable(item.text)}" for item in changes.gone)
    yield from (f"? {item.severity.upper()} {item.name}: not checked this time" for item in changes.unchecked)


def to_data(changes: Changes) -> dict[str, list[dict[str, str]]]:
    """Return the changes as JSON data."""
    return {
        kind: [{"name": item.name, "severity": item.severity, "text": item.text} for item in items]
        for kind, items in changes._asdict().items()
    }
