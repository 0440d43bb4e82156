"""The results of checks: findings and their evidence; and the list of all checks, from checks.toml.

In the order of the checks, causes come before their effects. docs/DOCTOR.md is generated from them.
"""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

SEVERITIES = ("error", "warning", "note", "not-checked", "ok")
"""Worst first.

error: containers do not get their GPUs, or lose them; warning: some do not get what they ask for, or will not after the
next event; note: nothing fails.  "not-checked" always says why: nothing is ok that was not looked at.
"""


def read_table(name: str) -> dict[str, Any]:
    """Return the data of a file beside this one."""
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


KNOWN = read_table("known.toml")


class Evidence(NamedTuple):
    """One examined fact: a path (or a query), the value found, and the value expected ("" for any)."""

    path: str
    found: str
    wanted: str = ""


class Finding(NamedTuple):
    """One result of a check.

    ``text``: one plain sentence.  ``fixes``: commands to run, in this order; a line that begins with "#" explains.
    ``safe``: those that ``doctor --fix`` may run.  ``choices``: optional commands that fix nothing, with the reason as
    their comment: no script may run them.  ``name``: that of the check.  ``code``: the finding's name in the check's
    table, "" where the table has none.
    """

    severity: str
    text: str
    evidence: tuple[Evidence, ...] = ()
    fixes: tuple[str, ...] = ()
    name: str = ""
    safe: tuple[str, ...] = ()
    code: str = ""
    choices: tuple[str, ...] = ()

    @property
    def is_bad(self) -> bool:
        return self.severity in ("error", "warning", "note")

    def is_still(self, before: "Finding") -> bool:
        """Whether this repeats an earlier finding, completely or in part: numbers in a text may change."""
        same = self.is_bad and (self.name, self.code) == (before.name, before.code)
        now, then = ({seen.path for seen in one.evidence} for one in (self, before))
        return same and (not now.isdisjoint(then) or not (now or then))


def ok(text: str, *evidence: Evidence) -> Finding:
    """Looked at, and as it should be."""
    return Finding("ok", text, evidence)


def not_checked(reason: str, *evidence: Evidence) -> Finding:
    """Not looked at, for this reason."""
    return Finding("not-checked", reason, evidence)


class Check(NamedTuple):
    """One possible cause: a stable name, the question, why it matters, and the function that answers it.

    ``run``: "module.function" of this package; the function takes a Host, or the value of the Host's member ``takes``,
    and returns at least one finding.  It may raise OcigpuError or OSError if a source cannot be read: then the check
    counts as not made, with that reason.  ``says``: severity, text and fixes of its findings by name, with places for
    values as of str.format; ``safe`` where ``doctor --fix`` may run them: tests/doctor/test_doctor_fix.py has run each.
    """

    name: str
    title: str
    meaning: str
    run: str
    says: dict[str, dict[str, Any]] = {}
    takes: str = ""


RESTART = "systemctl restart "
"""What a fix contains that is left to people: containers may stop."""
CHECKS = tuple(Check(name, **entry) for name, entry in read_table("checks.toml").items())
TENANTS = tuple(Check(name, **entry, takes="tenant_facts") for name, entry in read_table("tenants.toml").items())
"""The checks of ``ocigpu doctor --tenants``: of a node whose GPUs go to virtual machines."""
CLAIMS = tuple(Check(name, **entry, takes="claim_facts") for name, entry in read_table("claims.toml").items())
"""The checks of ``ocigpu doctor --claims``: of a node whose GPUs are given to resource claims."""
EVERY = (*CHECKS, *TENANTS, *CLAIMS)
_SAYS = {f"{check.name}.{name}": entry for check in EVERY for name, entry in check.says.items()}


def say(what: str, /, *evidence: Evidence, **values: object) -> Finding:
    """Return a finding of the table by the names of its check and its own, "no-gpu.none", with these values.

    A ``severity`` among them overrides the table's.  A fix that consists only of the placeholder of a tuple becomes one
    fix for each member.  Text is never split, because it may be a name on another machine's disk.
    """
    entry = _SAYS[what]
    fixes: list[str] = []
    for fix in entry.get("fixes", ()):
        value = values.get(fix.strip("{}"))
        fixes += value if isinstance(value, tuple) else [fix.format(**values)]
    severity = str(values.get("severity", entry["severity"]))
    fixes = [fix for fix in fixes if fix]
    safe = [fix for fix in fixes if entry.get("safe") and not fix.startswith("#") and RESTART not in fix]
    choices = tuple(choice.format(**values) for choice in entry.get("choices", ()))
    text = entry["text"].format(**values)
    return Finding(severity, text, evidence, tuple(fixes), safe=tuple(safe), code=what, choices=choices)
