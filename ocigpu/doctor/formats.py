"""The report for other programs and for tickets: JUnit's XML, Prometheus' text, and a page of HTML."""

import socket
import time
from html import escape
from pathlib import Path
from string import Template
from typing import Any
from xml.etree import ElementTree

from ocigpu import __version__
from ocigpu.core.errors import OcigpuError, printable
from ocigpu.doctor.archive import Redactor, open_new, read_versions
from ocigpu.doctor.findings import CHECKS, SEVERITIES, Finding
from ocigpu.doctor.host import Host
from ocigpu.doctor.report import count, describe_host, render_counts, render_finding, to_data
from ocigpu.doctor.works import YES, find_works, is_ready


def _by_check(findings: list[Finding]) -> dict[str, list[Finding]]:
    """Return what each check found, worst first."""
    by_name: dict[str, list[Finding]] = {}
    for item in sorted(findings, key=lambda item: SEVERITIES.index(item.severity)):
        by_name.setdefault(item.name, []).append(item)
    return {check.name: by_name[check.name] for check in CHECKS if check.name in by_name}


def render_junit(host: Host, findings: list[Finding]) -> str:
    """Return the report as XML for readers of JUnit results: a case for each check.

    Errors and warnings are failures; a check that could not be made is skipped.  The form meets Ant's schema and
    Jenkins' (JUnit.xsd of github.com/windyroad/JUnit-Schema, junit-10.xsd of github.com/jenkinsci/xunit-plugin).
    """
    top, make = ElementTree.Element("testsuites"), ElementTree.SubElement
    suite = make(top, "testsuite", name="doctor", package="ocigpu", id="0", errors="0", time="0")
    make(make(suite, "properties"), "property", name="version", value=__version__)
    for name, (worst, *more) in _by_check(findings).items():
        case = make(suite, "testcase", name=name, classname="ocigpu.doctor", time="0")
        if worst.severity in ("error", "warning"):
            failure = make(case, "failure", type=worst.severity, message=printable(worst.text))
            failure.text = "\n".join(line for item in (worst, *more) if item.is_bad for line in render_finding(item))
        elif worst.severity == "not-checked":
            make(case, "skipped", message=printable(worst.text))
    for name, path in (("tests", "testcase"), ("failures", "testcase/failure"), ("skipped", "testcase/skipped")):
        suite.set(name, str(len(suite.findall(path))))
    suite.attrib |= {"hostname": socket.gethostname(), "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())}
    make(suite, "system-out").text = describe_host(host)
    make(suite, "system-err")
    ElementTree.indent(top)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(top, encoding="unicode")}\n'


def render_prometheus(host: Host, findings: list[Finding]) -> str:
    """Return the report as metrics for node_exporter's textfile collector."""
    from ocigpu.system.exposition import render_number

    works = find_works(host, findings)
    about = (("version", __version__), ("examined", describe_host(host)))
    counts = [((("severity", severity),), number) for severity, number in count(findings).items()]
    worst = [(name, severity, items[0]) for name, items in _by_check(findings).items() for severity in SEVERITIES]
    checks = [((("check", name), ("severity", text)), int(item.severity == text)) for name, text, item in worst]
    ways = {(("engine", work.what), ("way", way)): int(yes) for work in works for way, yes in work.ways.items()}
    metrics: tuple[tuple[str, str, list[Any]], ...] = (
        ("info", "Version of ocigpu, and what was examined.", [(about, 1)]),
        ("ready", "Whether containers can get GPUs and nothing is amiss.", [((), int(is_ready(works, findings)))]),
        ("findings", "How many findings there are of a severity.", counts),
        ("check", "Whether this severity is the worst that a check has found.", checks),
        ("engine_way", "Whether an engine can provide GPUs in this way.", list(ways.items())),
    )
    return "".join(render_number(f"ocigpu_doctor_{name}", "gauge", text, *rows) for name, text, rows in metrics if rows)


def write_html(path: str, host: Host, findings: list[Finding]) -> None:
    """Write the report without secrets as one page of HTML (mode 0600) to ``path``, which must not exist.

    Raises UsageError when the file exists or cannot be written.
    """
    redactor = Redactor()
    report = redactor.data(to_data(host, findings), "report")
    versions = {}
    try:
        versions = redactor.data(read_versions(host), "versions")
    except (OcigpuError, OSError) as failure:
        versions["not there"] = redactor.text(str(failure), "versions")
    items = {severity: [one for one in report["findings"] if one["severity"] == severity] for severity in SEVERITIES}
    bad = [one for severity in SEVERITIES[:3] for one in items[severity]]
    values = {
        "host": escape(report["host"]),
        "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "ready": '<p class="ready">Your system is ready.</p>' if report["ready"] else "",
        "works": "".join(_row(one["what"], YES[one["works"]], one["text"]) for one in report["works"]),
        "counts": render_counts(report["counts"]),
        "findings": "".join(_section(one, number) for number, one in enumerate(bad, 1)) or "<p>Nothing is wrong.</p>",
        "unmade": "".join(_row(one["name"], one["text"]) for one in items["not-checked"]),
        "fine": "".join(_row(one["name"], one["text"], _seen(one)) for one in items["ok"]),
        "versions": "".join(_row(name, str(value)) for name, value in versions.items()),
        "removed": escape("; ".join(dict.fromkeys(redactor.removed)) or "nothing"),
    }
    page = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8")).substitute(values)
    with open_new(path, "--html") as file:
        file.write(page.encode("utf-8", "backslashreplace"))


def _row(name: str, *cells: str) -> str:
    cells = tuple(escape(printable(cell)) for cell in cells)
    text = "".join(f'<td class="is-{cell if cell in YES.values() else "text"}">{cell}</td>' for cell in cells)
    return f"<tr><th>{escape(printable(name))}</th>{text}</tr>\n"


def _seen(one: dict[str, Any]) -> str:
    return "; ".join(": ".join(filter(None, (seen["path"], seen["found"]))) for seen in one["evidence"])


def _section(one: dict[str, Any], number: int) -> str:
    rows = "".join(_row(seen["path"], seen["found"], seen["wanted"]) for seen in one["evidence"])
    fixes = "\n".join(escape(printable(fix)) for fix in one["fixes"])
    head = f"<h3>{number}. {escape(one['name'])} <span>{escape(one['severity'])}</span></h3>"
    because = f"<h4>Because</h4><table><tr><th>examined</th><td>found</td><td>expected</td></tr>\n{rows}</table>"
    fix = f"<h4>Fix</h4><pre>{fixes}</pre>" if fixes else ""
    choices = "\n".join(escape(printable(choice)) for choice in one["choices"])
    fix += f"<h4>Or</h4><pre>{choices}</pre>" if choices else ""
    text = f"<p>{escape(printable(one['text']))}</p>"
    return f'<section class="{escape(one["severity"])}">{head}{text}{because}{fix}</section>\n'
