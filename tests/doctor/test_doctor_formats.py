"""The report as JUnit's XML, as metrics and as a page: what readers of each ask for, and no secret in the page."""

import contextlib
import json
import os
import pty
import re
import stat
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from doctor.conftest import Broken
from prometheus_client.parser import text_string_to_metric_families
from support.fixtures import Run
from support.product import PROGRAMS, REPOSITORY

from ocigpu.doctor import formats
from ocigpu.doctor.findings import CHECKS, Evidence, Finding
from ocigpu.doctor.host import Host

ALERTS = REPOSITORY / "packaging/prometheus/ocigpu-doctor-alerts.yaml"
SECRET = "hunter2SECRETvalue"
VOID = {"meta", "br", "link", "img"}


def test_the_first_three_lines_say_what_works_and_the_last_how_much_there_is(broken: Broken, run: Run) -> None:
    _, out, _ = run("doctor", "--root", broken("docker-gpus", "missing-uvm"))
    lines = out.splitlines()
    assert lines[0].startswith("GPUs     no: nodes of nvidia-uvm are missing: ")
    assert lines[0].endswith("(SIMULATED: none is real)")
    assert lines[1] == "driver   yes: driver 550.163.01 is loaded"
    assert re.fullmatch(r"engines  Docker: --runtime yes, --gpus no, CDI (yes|no); Podman: .*", lines[2])
    assert [line[:2] for line in lines if re.match(r"[0-9]\. ", line)] == ["1.", "2.", "3."]
    assert lines[4].startswith("1. ERROR uvm-missing: ")
    assert lines[5].startswith("    because  ")
    assert re.search(r": 1 error, 2 warnings, [0-9]+ not checked, [0-9]+ ok \(--all shows all\)$", lines[-1])


def test_one_gpu_is_not_several(tmp_path: Path, run: Run) -> None:
    run("sim", "create", tmp_path / "host", "--gpus", "1", "--model", "l4")
    _, out, _ = run("doctor", "--root", tmp_path / "host")
    assert out.startswith("GPUs     yes: the GPU answers  (SIMULATED: none is real)\n")
    assert "this host is SIMULATED (1 x l4); its GPUs are not real" in out


def test_a_system_that_is_ready_is_told_so(broken: Broken, run: Run) -> None:
    root = broken()
    code, out, _ = run("doctor", "--root", root)
    assert code == 3  # that it is simulated
    assert ": your system is ready; 1 warning, " in out.splitlines()[-1]
    (root / "usr/bin/ocigpu-runtime").unlink()
    _, out, _ = run("doctor", "--root", root)
    assert "ready" not in out
    assert "Docker: --runtime no" in out


def test_a_terminal_gets_colours_and_lines_that_fit_and_fixes_in_one_piece(broken: Broken, run: Run) -> None:
    root = broken("missing-uvm", "docker-gpus")
    _, plain, _ = run("doctor", "--root", root)
    master, terminal = pty.openpty()
    command = [PROGRAMS / "ocigpu", "doctor", "--root", str(root)]
    environment = {**os.environ, "COLUMNS": "60", "NO_COLOR": ""}
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment) as doctor:
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: all have closed it
            while part := os.read(master, 65536):
                shown += part
        assert doctor.wait(60) == 4
    os.close(master)
    lines = re.sub(r"\r|.*\x1b\[K", "", shown.decode()).split("\n")
    assert "1. \x1b[31mERROR\x1b[0m uvm-missing: " in shown.decode()
    clean = [re.sub(r"\x1b\[\d+m", "", line) for line in lines]
    fixes = [line for line in plain.splitlines() if line.startswith("    fix")]
    assert set(fixes) <= set(clean)
    assert "".join(plain.split()) == "".join("".join(clean).split()), "nothing but line breaks"
    assert [line for line in clean if len(line) > 60 and line not in plain.splitlines() and " " in line.strip()] == []
    assert len(clean) > len(plain.splitlines())


def test_junit_has_a_case_for_each_check(broken: Broken, run: Run) -> None:
    """As JUnit.xsd (Ant) and junit-10.xsd (Jenkins) have it: attributes, their form, and the order of elements."""
    code, out, _ = run("doctor", "--root", broken("missing-uvm"), "--format", "junit")
    assert code == 4
    (suite,) = ElementTree.fromstring(out)
    assert [child.tag for child in suite if child.tag != "testcase"] == ["properties", "system-out", "system-err"]
    assert suite[0].tag == "properties"
    cases = suite.findall("testcase")
    assert [case.get("name") for case in cases] == [check.name for check in CHECKS]
    assert all(set(case.attrib) == {"name", "classname", "time"} and len(case) <= 1 for case in cases)
    assert {name: suite.get(name) for name in ("name", "package", "id", "errors")} == {
        "name": "doctor", "package": "ocigpu", "id": "0", "errors": "0",
    }  # fmt: skip
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", suite.get("timestamp", ""))
    for tag in ("failure", "skipped"):
        count = suite.get({"failure": "failures"}.get(tag, tag))
        assert str(len(suite.findall(f"testcase/{tag}"))) == count
    (failure,) = suite.findall("testcase[@name='uvm-missing']/failure")
    assert failure.get("type") == "error"
    assert "ocigpu system create-device-nodes" in str(failure.text)


def test_names_of_the_host_are_text_in_every_format(tmp_path: Path) -> None:
    nasty = 'a<b>&"\\\x01\x1b[31m\n</section>\ud800'
    finding = Finding("error", nasty, (Evidence(nasty, nasty, nasty),), (nasty,), "no-gpu")
    host = Host(str(tmp_path))
    case = ElementTree.fromstring(formats.render_junit(host, [finding])).find("testsuite/testcase/failure")
    assert case is not None
    assert "a<b>&" in str(case.text)
    assert list(text_string_to_metric_families(formats.render_prometheus(host, [finding])))
    formats.write_html(str(tmp_path / "page"), host, [finding])
    page = (tmp_path / "page").read_text()
    assert "\x1b" not in page
    assert "<b>" not in page
    assert page.count("</section>") == 1


def test_metrics_are_read_by_prometheus_own_reader(broken: Broken, run: Run) -> None:
    _, out, _ = run("doctor", "--root", broken("docker-gpus"), "--format", "prometheus")
    families = {family.name: family for family in text_string_to_metric_families(out)}
    assert all(family.type == "gauge" and family.documentation for family in families.values())
    samples = [(sample.name, tuple(sample.labels.items())) for family in families.values() for sample in family.samples]
    assert len(samples) == len(set(samples))
    value = {sample.name: sample.value for sample in families["ocigpu_doctor_ready"].samples}
    assert value == {"ocigpu_doctor_ready": 0}
    ways = {tuple(one.labels.values()): one.value for one in families["ocigpu_doctor_engine_way"].samples}
    assert (ways["Docker", "--runtime"], ways["Docker", "--gpus"]) == (1, 0)
    worst = [one.labels for one in families["ocigpu_doctor_check"].samples if one.value]
    assert {"check": "docker-gpus-hook", "severity": "warning"} in worst
    assert len(worst) == len(CHECKS)


def test_a_report_is_written_in_one_step(broken: Broken, run: Run, tmp_path: Path) -> None:
    root, file = broken("docker-gpus"), tmp_path / "collector" / "ocigpu.prom"
    code, _, err = run("doctor", "--root", root, "--format", "json", "-o", file)
    assert (code, "mkdir -p" in err, file.parent.exists()) == (2, True, False)
    file.parent.mkdir()
    for form, begin in (("prometheus", "# HELP ocigpu_doctor_info "), ("json", "{"), ("junit", "<?xml ")):
        code, out, _ = run("doctor", "--root", root, "--format", form, "-o", file)
        assert (code, out) == (3, "")
        assert file.read_text().startswith(begin)
        assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    before = file.read_text()
    for words in (["-o", file], ["--format", "prometheus", "-o", tmp_path], ["--tenants", "--json", "-o", file]):
        assert run("doctor", "--root", root, *words)[0] == 2
    assert file.read_text() == before


def test_alerts_are_of_metrics_and_labels_that_there_are(broken: Broken, run: Run) -> None:
    _, out, _ = run("doctor", "--root", broken("missing-uvm"), "--format", "prometheus")
    labels: dict[str, set[str]] = {"node_textfile_mtime_seconds": {"file"}, "up": {"job"}}  # node_exporter's
    values: dict[tuple[str, str], set[str]] = {("up", "job"): {"node"}}
    for family in text_string_to_metric_families(out):
        for sample in family.samples:
            labels[sample.name] = set(sample.labels)
            for name, value in sample.labels.items():
                values.setdefault((sample.name, name), set()).add(value)
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"])
    for rule in group["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert re.fullmatch(r"\d+[mhd]", rule.get("for", "1m"))
        metrics = set(re.findall(r"\b(?:ocigpu|node)_\w+", rule["expr"]))
        assert metrics <= set(labels), rule["expr"]
        for metric, selector in re.findall(r"(\w+)\{([^}]*)\}", rule["expr"]):
            for name, sign, value in re.findall(r'(\w+)(=~?)"([^"]*)"', selector):
                assert name in labels[metric]
                assert sign == "=~" or value in values[metric, name]
        shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert shown <= {"instance"}.union(*(labels[metric] for metric in metrics)), rule
    errors = [line for line in out.splitlines() if 'severity="error"' in line and line.endswith(" 1")]
    assert any('ocigpu_doctor_check{check="uvm-missing"' in line for line in errors)


class Page(HTMLParser):
    """Reads a page: its tags must be closed in order, and what they would load is kept."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [tag] * (tag in ("script", "link", "img", "iframe"))
        self.loads += [name for name, _ in attrs if name in ("src", "href", "style") or name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.root
def test_the_page_is_one_file_without_script_or_secret(broken: Broken, run: Run, tmp_path: Path) -> None:
    root = broken("stale-cdi", "docker-runtime")
    file = root / "etc/docker/daemon.json"
    daemon = json.loads(file.read_text())
    daemon["runtimes"]["ocigpu"]["path"] = f"/opt/token={SECRET}/ocigpu-runtime"
    file.write_text(json.dumps(daemon))
    path = tmp_path / "ticket.html"
    code, out, err = run("doctor", "--root", root, "--html", path)
    assert (code, err) == (4, "")
    assert f"wrote {path}" in out
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    page = Page(text)
    assert (page.open, page.loads) == ([], [])
    assert "http" not in text
    assert "url(" not in text
    assert SECRET in out
    assert SECRET not in text
    assert "[removed]" in text
    assert "prefers-color-scheme: dark" in text
    for words in ("SIMULATED", "cdi-stale", "ocigpu cdi refresh", "Not checked", "Versions"):
        assert words in text
    code, _, err = run("doctor", "--root", root, "--html", path)
    assert (code, "File exists" in err) == (2, True)
    assert path.read_text() == text
