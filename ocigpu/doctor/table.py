"""Every check and what it may say, in the order in which causes come before their effects: checks.toml.

docs/DOCTOR.md is generated from it.
"""

from typing import Any, NamedTuple

from ocigpu.doctor.findings import Evidence, Finding, read_table


class Check(NamedTuple):
    """One cause that is looked for: a stable name, what is asked, why it matters, and who answers.

    ``run``: "module.function" of this package; the function takes a Host and returns at least one finding.  It may
    raise OcigpuError or OSError for what cannot be read: then the check counts as not made, with that reason.
    ``says``: severity, text and fixes of its findings by name, with places for values as of str.format; ``safe`` where
    ``doctor --fix`` may run them: tests/doctor/test_doctor_fix.py has run each.
    """

    name: str
    title: str
    meaning: str
    run: str
    says: dict[str, dict[str, Any]] = {}


RESTART = "systemctl restart "
"""How a fix begins that is left to people: containers may stop."""
CHECKS = tuple(Check(name, **entry) for name, entry in read_table("checks.toml").items())
TENANTS = tuple(Check(name, **entry) for name, entry in read_table("tenants.toml").items())
"""The checks of ``ocigpu doctor --tenants``: of a node whose GPUs go to virtual machines."""
_SAYS = {f"{check.name}.{name}": entry for check in (*CHECKS, *TENANTS) for name, entry in check.says.items()}


def say(what: str, /, *evidence: Evidence, **values: object) -> Finding:
    """Return a finding of the table by the names of its check and its own, "no-gpu.none", with these values.

    ``severity`` among them goes before the table's.  A fix that is nothing but the place of a tuple is as many fixes:
    text is never taken apart, it may be a name on another machine's disk.
    """
    entry = _SAYS[what]
    fixes: list[str] = []
    for fix in entry.get("fixes", ()):
        value = values.get(fix.strip("{}"))
        fixes += value if isinstance(value, tuple) else [fix.format(**values)]
    severity = str(values.get("severity", entry["severity"]))
    fixes = [fix for fix in fixes if fix]
    safe = [fix for fix in fixes if entry.get("safe") and not fix.startswith(("#", RESTART))]
    return Finding(severity, entry["text"].format(**values), evidence, tuple(fixes), safe=tuple(safe), code=what)
