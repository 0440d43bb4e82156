"""What a check says: findings, and the evidence they rest on."""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

SEVERITIES = ("error", "warning", "note", "not-checked", "ok")
"""Worst first.

error: containers do not get their GPUs, or lose them; warning: some do not get what they ask for, or will not after the
next event; note: nothing fails.  "not-checked" always says why: nothing is ok that was not looked at.
"""
UNUSABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What reading a file raises whose content nobody expected: the other checks go on."""


def read_table(name: str) -> dict[str, Any]:
    """Return the data of a file beside this one."""
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


KNOWN = read_table("known.toml")


class Evidence(NamedTuple):
    """One thing that was looked at: a path (or what was asked), the value found, and the value wanted ("" for any)."""

    path: str
    found: str
    wanted: str = ""


class Finding(NamedTuple):
    """One result of a check.

    ``text``: one plain sentence.  ``fixes``: commands to run, in this order; a line that begins with "#" explains.
    ``safe``: those that ``doctor --fix`` may run.  ``name``: that of the check.  ``code``: the finding's name in the
    check's table, "" where the table has none.
    """

    severity: str
    text: str
    evidence: tuple[Evidence, ...] = ()
    fixes: tuple[str, ...] = ()
    name: str = ""
    safe: tuple[str, ...] = ()
    code: str = ""

    @property
    def is_bad(self) -> bool:
        return self.severity in ("error", "warning", "note")

    def is_still(self, before: "Finding") -> bool:
        """Whether this is what was found before, in whole or in part: a text may tell numbers that change."""
        same = self.is_bad and (self.name, self.code) == (before.name, before.code)
        now, then = ({seen.path for seen in one.evidence} for one in (self, before))
        return same and (not now.isdisjoint(then) or not (now or then))


def ok(text: str, *evidence: Evidence) -> Finding:
    """Looked at, and as it should be."""
    return Finding("ok", text, evidence)


def not_checked(reason: str, *evidence: Evidence) -> Finding:
    """Not looked at, for this reason."""
    return Finding("not-checked", reason, evidence)
