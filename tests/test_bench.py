"""The benchmark: every row of its table runs, its limits are understood, README and results are of one run."""

import graphlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.commands import Sample
from bench.measure import Figures, Group, Row, find_figures
from bench.packing import SIZES, churn, fill
from bench.report import PAGE, costs, judge, read_costs, replace_costs
from bench.rows import GROUPS, MANY
from bench.vendor import LEGACY

REPOSITORY = Path(__file__).parents[1]
ROWS = {row.name: row for group in (*GROUPS, *MANY) for row in group.rows}
VENDOR = {
    "nvidia-container-runtime": 'exec runc "$@"',
    "nvidia-ctk": "exit 0",
    "nvidia-cdi-hook": "exit 0",
    **dict.fromkeys(LEGACY, "exit 0"),
}
"""What stands for the vendor's programs: that they are run is what is tested."""


def test_modules_of_the_benchmark_import_each_other_in_no_circle() -> None:
    below = {
        path.stem: re.findall(r"^ *from bench\.(\w+) import", path.read_text(), re.MULTILINE)
        for path in (REPOSITORY / "bench").glob("*.py")
    }
    graphlib.TopologicalSorter(below).prepare()


def test_a_packed_fleet_gets_full_and_a_node_that_offers_what_fits_fails_no_pod() -> None:
    spread, packed = (fill(100, pack, True, 17) for pack in (False, True))
    assert (packed["full"], packed["eights"]) == (1.0, 1.0)
    assert spread["full"] < 0.8
    assert spread["eights"] < 0.6
    assert churn(20, False, False, 17)["failed4"] > 0
    for pack in (False, True):
        lives = churn(20, pack, True, 17)
        assert not any(lives[f"failed{size}"] for size in SIZES)


def test_processor_time_is_that_of_orphans_too() -> None:
    burn = f"{sys.executable} -I -S -c 'import time\nwhile time.process_time() < 0.2: pass'"
    ask = (
        "import subprocess, time\nfrom bench.commands import adopt_orphans, processor_time\nadopt_orphans()\n"
        f"subprocess.run(['sh', '-c', {burn + ' &'!r}], check=True)\n"
        "while processor_time() < 200: time.sleep(0.01)\n"
    )
    subprocess.run([sys.executable, "-c", ask], cwd=REPOSITORY, check=True, timeout=60)


@pytest.mark.rest
@pytest.mark.root
@pytest.mark.engine
def test_every_row_runs_once_with_little_of_everything(tmp_path: Path) -> None:
    for name, text in VENDOR.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    command = [sys.executable, "-m", "bench", "--tiny", "--rounds", "1", "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, "PEER_DIR": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "figures.json").read_text())
    assert {name for name, samples in told["samples"].items() if len(samples) == 1} | told["absent"].keys() == {*ROWS}
    assert {*told["absent"].values()} <= {"crun is not installed"}
    assert all(f"\n| {name} " in done.stdout for name in told["samples"] if "vendor" not in name)


def test_rows_have_names_of_their_own_and_name_others_that_there_are() -> None:
    assert len(ROWS) == sum(len(group.rows) for group in (*GROUPS, *MANY))
    for group in (*GROUPS, *MANY):
        names = {row.name for row in group.rows}
        for row in group.rows:
            assert {row.over, row.peer} - {""} <= names, row.name
            everything = {name: Figures({"figure": 1.0, "MiB": 1.0}, 1.0, 1.0, 1.0) for name in ROWS}
            assert all(aim.limit is not None and aim.figure is not None for aim in judge(row, everything)), row.name


def test_the_step_of_simulated_hosts_is_no_part_of_a_ratio() -> None:
    def make(figures: tuple[float, ...]) -> list[Sample]:
        return [{"figure": figure, "cpu": figure / 2} for figure in figures]

    group = Group(
        "", *(Row(name, lambda _: dict, over) for name, over in (("bare", ""), ("step", "bare"), ("spec", "step")))
    )
    found = find_figures(
        group.rows, {"bare": make((10, 20, 90)), "step": make((12, 22, 92)), "spec": make((17, 32, 97))}
    )
    assert (found["spec"].added, found["spec"].ratio, found["spec"].cpu) == (5, 1.5, 2.5)
    assert (found["step"].added, found["bare"].added) == (2, None)


def test_an_aim_may_be_a_share_of_what_the_vendor_adds_in_the_same_run() -> None:
    row = Row("spec", lambda _: dict, aims="added <= 1/8 of vendor; ratio <= 1.37")
    figures = {"spec": Figures({}, 1.5, 10.0), "vendor": Figures({}, None, 100.0)}
    assert [aim.reached for aim in judge(row, figures)] == ["yes", "no, 1.50 of 1.37"]
    assert [aim.reached for aim in judge(row, {"spec": figures["spec"]})] == ["", "no, 1.50 of 1.37"]


def test_the_costs_name_no_figure_of_the_vendor_that_was_not_measured() -> None:
    lines = costs(GROUPS, {"hook": Figures({"figure": 70.0}, 1.9, 36.8, 20.1)}, "AMD", "here").splitlines()
    at = next(place for place, line in enumerate(lines) if "mode `hook`" in line)
    assert lines[at].endswith("| 36.8 ms (1.90x) | not measured |")
    assert lines[at + 1].endswith("| 20.1 ms | not measured |")


@pytest.mark.parametrize(
    "page", sorted((REPOSITORY / "bench").glob(Path(PAGE.format("*")).name)), ids=lambda page: page.stem
)
def test_readme_and_results_are_of_the_same_run(page: Path) -> None:
    processors = page.stem.partition("-")[2]
    results, readme = (read_costs(each.read_text(), processors) for each in (page, REPOSITORY / "README.md"))
    assert results
    assert results == readme


def test_a_page_has_a_table_for_each_make_of_processors(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    first, other, newer = (costs(GROUPS, {}, name, told) for name, told in (("Intel", "1"), ("AMD", "2"), ("AMD", "3")))
    page.write_text(f"before\n{first}after\n")
    for made in (other, newer):
        replace_costs(page, "AMD", made)
        assert page.read_text() == f"before\n{first}\n{made}after\n"
    page.write_text("nothing\n")
    with pytest.raises(ValueError, match="no table"):
        replace_costs(page, "AMD", newer)
