"""Tables of what was tested are made of records of runs."""

import importlib.util
import json
from pathlib import Path

import pytest
from support.product import REPOSITORY

specification = importlib.util.spec_from_file_location("tested", REPOSITORY / "packaging/tested.py")
assert specification is not None
assert specification.loader is not None
tested = importlib.util.module_from_spec(specification)
specification.loader.exec_module(tested)

RUN = ["grounds", "trixie", "12", "0", "--system", "Debian 13", "--python", "3.13.5", "--runtimes", "runc 1.1.15"]
RUN += ["--engine", "Docker 26.1.5", "7", "--engine", "Docker 26.1.5, rootless", "2", "--engine", "runc 1.1.15", "3"]


def test_the_pages_have_the_tables_of_the_records() -> None:
    pages = tested.render(json.loads(tested.RECORDS.read_text()))
    assert {name: (REPOSITORY / name).read_text() for name in pages} == pages


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with empty tables."""
    (tmp_path / "docs").mkdir()
    for name in tested.TABLES:
        (tmp_path / name).write_text(f"before\n{tested.BEGIN}{tested.END}after\n")
    monkeypatch.setattr(tested, "REPOSITORY", tmp_path)
    monkeypatch.setattr(tested, "RECORDS", tmp_path / "docs/tested.json")
    monkeypatch.setenv("WRITE", "1")
    return tmp_path


def test_a_record_replaces_the_earlier_one_of_its_ground(repository: Path) -> None:
    for run in (RUN, [*RUN[:2], "13", *RUN[3:]], ["by-hand", "docker", "27", "0", "--engine", "Docker 29.0", "27"]):
        tested.main(run)
    readme, engines = ((repository / name).read_text() for name in tested.TABLES)
    assert readme.count("make test-grounds") == 1
    assert "| Debian 13 |  | 3.13.5 | runc 1.1.15 | Docker 26.1.5 | 13 |" in readme
    assert "29.0" not in readme
    assert "| Docker 26.1.5 | trixie | `make test-grounds` | 7 |" in engines
    assert "| Docker 26.1.5, rootless | trixie | `make test-grounds` | 2 |" in engines
    assert "| Docker 29.0 | docker | by hand | 27 |" in engines
    assert readme.startswith("before\n")
    assert readme.endswith("after\n")


def test_a_run_that_failed_or_was_only_looked_at_writes_nothing(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tested.main([*RUN[:3], "2", *RUN[4:]])
    monkeypatch.delenv("WRITE")
    tested.main(RUN)
    assert not tested.RECORDS.exists()
    assert "failed: 2" in capsys.readouterr().out
