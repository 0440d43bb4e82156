"""The checks carried out, and their findings as text, as data, and as an exit status."""

from collections.abc import Container, Iterator, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from ocigpu import __version__
from ocigpu.core.errors import UNUSABLE, OcigpuError, printable
from ocigpu.doctor.findings import CHECKS, EVERY, RESTART, SEVERITIES, Check, Finding, not_checked
from ocigpu.doctor.host import Host
from ocigpu.doctor.works import find_works, is_ready
from ocigpu.sim.fault_names import FAULT_NAMES

STATUS = {"error": 4, "warning": 3}
"""Exit status by the worst finding; 0 for all others.  1 and 2 are those of every command."""
_LABELS = {"not-checked": "not checked"}


def run_checks(host: Host, names: Container[str] = (), checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Return the findings of every check, or of those with these ``names``, in the table's order.

    A check that cannot be made is a finding "not-checked" with the reason.
    """
    wanted = [check for check in checks if not names or check.name in names]
    last = [check for check in wanted if check.run.startswith("containers.")]
    with host.asking() if last else nullcontext():
        found = {check.name: _run(check, host) for check in sorted(wanted, key=last.__contains__)}
    return [finding._replace(name=check.name) for check in wanted for finding in found[check.name]]


def _run(check: Check, host: Host) -> list[Finding]:
    module, _, name = check.run.partition(".")
    try:
        subject = getattr(host, check.takes) if check.takes else host
        found: list[Finding] = getattr(import_module(f"ocigpu.doctor.{module}"), name)(subject)
        return found
    except OcigpuError as failure:
        return [not_checked(failure.message)]
    except OSError as failure:
        where = f"{failure.filename}: " if failure.filename else ""
        return [not_checked(f"{where}{failure.strerror or failure}")]
    except UNUSABLE as failure:
        return [not_checked(f"the check failed: {type(failure).__name__}: {failure}")]


def exit_status(findings: list[Finding]) -> int:
    """Return 4 when there is an error, 3 when there is a warning, else 0."""
    return max((STATUS.get(finding.severity, 0) for finding in findings), default=0)


def describe_host(host: Host) -> str:
    """Return one line that names the examined host."""
    if host.root:
        what = f"the host below {printable(host.root)}"
    elif host.roots.stand_in:
        what = f"this machine, with the driver of {printable(host.settings.simulation_root)}"
    else:
        what = "this machine"
    return f"{what}{', SIMULATED: no real GPU' if host.simulated else ''}"


def count(findings: list[Finding]) -> dict[str, int]:
    """Return how many findings of each severity there are."""
    return {severity: sum(item.severity == severity for item in findings) for severity in SEVERITIES}


def to_data(host: Host, findings: list[Finding]) -> dict[str, Any]:
    """Return the report as JSON data."""
    titles = {check.name: check.title for check in EVERY}
    works = find_works(host, findings)
    return {
        "version": __version__,
        "host": describe_host(host),
        "simulated": host.simulated,
        "exit_status": exit_status(findings),
        "ready": is_ready(works, findings),
        "works": [work._asdict() for work in works],
        "counts": count(findings),
        "findings": [
            {
                "name": item.name,
                "code": item.code,
                "severity": item.severity,
                "title": titles[item.name],
                "text": item.text,
                "evidence": [entry._asdict() for entry in item.evidence],
                "fixes": list(item.fixes),
                "safe": list(item.safe),
                "choices": list(item.choices),
            }
            for item in findings
        ],
    }


def sort_bad(findings: list[Finding]) -> list[Finding]:
    """Return the problems, worst first: the order of their numbers."""
    return sorted((item for item in findings if item.is_bad), key=lambda item: SEVERITIES.index(item.severity))


def render(host: Host, findings: list[Finding], everything: bool = False) -> Iterator[str]:
    """Yield the report's lines: what works in three lines, numbered problems, and the counts.

    ``everything``: also skipped checks with their reasons, and passed checks with their evidence.
    """
    gpus, driver, *engines = works = find_works(host, findings)
    yield f"GPUs     {printable(gpus.line, 400)}{'  (SIMULATED: none is real)' if host.simulated else ''}"
    yield f"driver   {printable(driver.line, 400)}"
    yield f"engines  {'; '.join(f'{work.what}: {printable(work.text, 300)}' for work in engines)}"
    yield from render_findings(findings, everything)
    yield ""
    ready = "your system is ready; " if is_ready(works, findings) else ""
    yield f"{describe_host(host)}: {ready}{render_counts(count(findings))}{'' if everything else ' (--all shows all)'}"


def render_part(title: str, host: Host, findings: list[Finding], everything: bool = False) -> Iterator[str]:
    """Yield the lines of ``ocigpu doctor --tenants`` and ``--claims``, which do not show what works."""
    yield f"{title}, {describe_host(host)}"
    yield from render_findings(findings, everything)
    if not everything:
        yield from _render_reasons(findings)
    yield ""
    yield f"{render_counts(count(findings))}{'' if everything else ' (--all shows all)'}"


def render_findings(findings: list[Finding], everything: bool = False) -> Iterator[str]:
    """Yield the numbered problems, and with ``everything`` the rest."""
    bad = sort_bad(findings)
    last = {fix: number for number, item in enumerate(bad, 1) for fix in item.fixes if _is_restart(fix)}
    for number, item in enumerate(bad, 1):
        # systemd takes three restarts of dockerd in a minute: whoever types all of this makes one
        fixes = (fix if last.get(fix, number) == number else f"# {fix}  (once, see {last[fix]})" for fix in item.fixes)
        yield ""
        yield from render_finding(item._replace(fixes=tuple(fixes)), number)
    if everything:
        yield from _render_reasons(findings)
        for item in findings:
            if item.severity == "ok":
                yield ""
                yield from render_finding(item)


def _render_reasons(findings: list[Finding]) -> Iterator[str]:
    """Yield which checks could not be made, and why."""
    reasons: dict[str, list[str]] = {}
    for item in findings:
        if item.severity == "not-checked":
            reasons.setdefault(item.text, []).append(item.name)
    yield from ("", "not checked:") if reasons else ()
    yield from (f"  {', '.join(names)}: {printable(reason, 300)}" for reason, names in reasons.items())


def _is_restart(fix: str) -> bool:
    return RESTART in fix and "#" not in fix


def render_counts(counts: dict[str, int]) -> str:
    """Return how many findings of each severity there are, "1 error, 2 notes, 40 ok"."""
    return ", ".join(
        f"{number} {_LABELS.get(severity, severity)}{'s' if _is_many(severity, number) else ''}"
        for severity, number in counts.items()
        if number
    )


def _is_many(severity: str, number: int) -> bool:
    return severity in ("error", "warning", "note") and number != 1


def render_finding(item: Finding, number: int = 0) -> Iterator[str]:
    """Yield a finding's lines: the problem, the evidence, and the fixes."""
    yield f"{number}. {item.severity.upper()} {item.name}: {printable(item.text)}".removeprefix("0. ")
    for place, entry in enumerate(item.evidence):
        wanted = f" (expected: {printable(entry.wanted, 300)})" if entry.wanted else ""
        found = f": {printable(entry.found, 400)}" if entry.found else ""
        yield f"    {_word('because' if item.is_bad else 'seen', place)}{printable(entry.path, 300)}{found}{wanted}"
    for place, fix in enumerate(item.fixes):
        yield f"    {_word('fix', place)}{printable(fix, 1000)}"
    for place, choice in enumerate(item.choices):
        yield f"    {_word('or', place)}{printable(choice, 1000)}"


def _word(text: str, place: int) -> str:
    return f"{'' if place else text:<9}"


def render_markdown() -> str:
    """Return docs/DOCTOR.md: every check, what it finds and why that matters."""
    checks = [f"| `{check.name}` | {check.title} | {_cell(check.meaning)} |" for check in CHECKS]
    faults = []
    for name, fault in FAULT_NAMES.items():
        found = ", ".join(f"`{finding}`" for finding in fault.findings) or "nothing"
        faults.append(f"| `{name}` | {_cell(fault.text)} | {found} |")
    page = Path(__file__).with_name("page.md").read_text(encoding="utf-8")
    return page.format(checks="\n".join(checks), faults="\n".join(faults))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("[[", "\\[\\[").replace("*", "\\*")
