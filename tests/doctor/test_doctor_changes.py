"""``ocigpu doctor --since`` and ``--watch``: what is new and what is gone, on a host whose faults change."""

import json
import time
from pathlib import Path

import pytest
from doctor.conftest import Broken
from support.fixtures import Run

from ocigpu.cli.host import doctor
from ocigpu.doctor.changes import compare
from ocigpu.doctor.findings import Evidence, Finding
from ocigpu.sim.faults import make_faults


def test_since_a_report_of_before(broken: Broken, run: Run, tmp_path: Path) -> None:
    report = tmp_path / "yesterday.json"
    report.write_text(run("doctor", "--root", broken("missing-uvm"), "--json")[1])
    host = broken("no-dev-char")
    status, output, _ = run("doctor", "--root", host, "--since", report)
    lines = output.splitlines()
    assert lines[0] == f"since {report}: 1 new, 1 gone, 1 unchanged"
    assert lines[1].startswith("+ ")
    assert "dev-char" in lines[1]
    assert lines[-1].startswith("- ")
    assert "uvm" in lines[-1]
    data = json.loads(run("doctor", "--root", host, "--since", report, "--json")[1])
    assert [len(data["since"][kind]) for kind in ("new", "gone", "unchecked", "same")] == [1, 1, 0, 1]
    assert status == {"error": 4, "warning": 3, "note": 0}[data["since"]["new"][0]["severity"]]
    report.write_text(json.dumps(data))
    assert run("doctor", "--root", host, "--since", report) == (0, f"since {report}: 0 new, 0 gone, 2 unchanged\n", "")


def test_a_check_that_could_not_be_made_takes_nothing_away() -> None:
    before = [Finding("error", "two", (Evidence("/a", ""),), name="one", code="x")]
    for now in ([Finding("not-checked", "no root", name="one")], [Finding("ok", "another check", name="two")], []):
        changes = compare(before, now)
        assert (changes.gone, changes.unchecked) == ((), tuple(before))
        assert not changes
    assert compare(before, [Finding("ok", "mended", name="one")]).gone == tuple(before)


NO_REPORTS = (
    None, "", "[]", "{}", '{"findings": [1]}', "[" * 100_000,
    '{"findings": [{"severity": "bad", "text": "", "name": "", "evidence": []}]}',
    '{"findings": [{"severity": "ok", "text": "", "name": "", "evidence": [7]}]}',
)  # fmt: skip


@pytest.mark.parametrize("content", NO_REPORTS)
def test_a_file_that_is_no_report_is_named(run: Run, tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "report"
    if content is not None:
        path.write_text(content)
    status, output, error = run("doctor", "--since", path)
    assert (status, output) == (2, "")
    assert error.startswith("ocigpu: OCIGPU-ARG-1: ")
    assert str(path) in error
    assert len(error.splitlines()) == 2


def test_watching_says_what_comes_and_goes(broken: Broken, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    host = broken()
    rounds = iter([lambda: make_faults(str(host), ["missing-uvm"]), lambda: None])

    sleep_really = time.sleep

    def sleep(seconds: float) -> None:
        if seconds != doctor.WATCH_SECONDS:
            sleep_really(seconds)
            return
        change = next(rounds, None)
        if change is None:
            raise KeyboardInterrupt
        change()

    monkeypatch.setattr("time.sleep", sleep)
    status, output, _ = run("doctor", "--root", host, "--watch")
    seen = output.partition("Ctrl-C ends it\n")[2]
    assert status == 130
    assert seen.count("+ ") == 1
    assert "uvm" in seen


@pytest.mark.parametrize(
    "words", [("--watch", "--json"), ("--watch", "--since", "x"), ("--since", "x", "--fix", "--yes")]
)
def test_what_does_not_go_together(run: Run, words: tuple[str, ...]) -> None:
    assert run("doctor", *words)[0] == 2
