"""tested.py RUN NAME CASES FAILED [--system TEXT] [--kernel TEXT] [--python TEXT] [--runtimes TEXT]
    [--engine NAME CASES]...

Prints what a test run on one ground has shown.  With WRITE=1 in the environment, and if nothing failed, the record
replaces the earlier one of the same RUN and NAME in docs/tested.json, and the tables that are made of that file are
written again: README.md's and docs/ENGINES.md's.  A table therefore names nothing that was not run.

RUN: grounds, pythons, arm64, kernels, or by-hand, which only docs/ENGINES.md shows.  --engine "Docker 26.1.5" 52: an
engine, a runtime or another caller with its version, and how many of the cases were its own.
"""

import argparse
import datetime
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
RECORDS = REPOSITORY / "docs/tested.json"
HOW = {
    "grounds": "`make test-grounds`",
    "pythons": "`make test-pythons`",
    "arm64": "`make test-arm64`",
    "kernels": "`make test-kernels`",
    "by-hand": "by hand",
}
"""Each run in the order of the tables, and how it is started."""
TABLES = {"README.md": "grounds", "docs/ENGINES.md": "engines"}
BEGIN, END = "<!-- tested: packaging/tested.py -->\n", "<!-- end of tested -->\n"

Record = dict[str, Any]


def main(arguments: Sequence[str]) -> None:
    record = parse(arguments)
    engines = ", ".join(f"{name}: {cases}" for name, cases in record["engines"])
    about = ", ".join(record[key] for key in ("system", "kernel", "python", "runtimes") if record[key])
    print(
        f"{record['name']}: {about}; cases: {record['cases']}{engines and f' ({engines})'}; failed: {record['failed']}"
    )
    if os.environ.get("WRITE") == "1" and not record["failed"]:
        write_tables(add(json.loads(RECORDS.read_text()) if RECORDS.exists() else [], record))


def parse(arguments: Sequence[str]) -> Record:
    """Return the record that a command line describes, with today's date."""
    parser = argparse.ArgumentParser(prog="tested.py", description=__doc__)
    parser.add_argument("run", choices=HOW)
    parser.add_argument("name")
    parser.add_argument("cases", type=int)
    parser.add_argument("failed", type=int)
    for name in ("system", "kernel", "python", "runtimes"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--engine", nargs=2, action="append", default=[], dest="engines", metavar=("NAME", "CASES"))
    record = vars(parser.parse_args(arguments))
    record["engines"] = [[name, int(cases)] for name, cases in record["engines"]]
    return {"date": datetime.date.today().isoformat(), **record}


def add(records: list[Record], record: Record) -> list[Record]:
    """Return the records with this one instead of the earlier one of the same ground, in the order of the tables."""
    others = [each for each in records if (each["run"], each["name"]) != (record["run"], record["name"])]
    return sorted([*others, record], key=lambda each: (list(HOW).index(each["run"]), each["name"]))


def write_tables(records: list[Record]) -> None:
    """Write docs/tested.json and the tables made of it."""
    RECORDS.write_text(json.dumps(records, indent=1) + "\n")
    for name, text in render(records).items():
        (REPOSITORY / name).write_text(text)


def render(records: list[Record]) -> dict[str, str]:
    """Return each page that has a table, with the table of these records."""
    pages = {}
    for name, kind in TABLES.items():
        before, rest = (REPOSITORY / name).read_text().split(BEGIN)
        after = rest.split(END)[1]
        table = render_grounds(records) if kind == "grounds" else render_engines(records)
        pages[name] = f"{before}{BEGIN}{table}{END}{after}"
    return pages


def render_grounds(records: list[Record]) -> str:
    """Return the table of systems: a row for each run on each ground that a command of this repository can repeat.

    An engine is named once, whatever ways it was tried in: "Docker 28.5.2, rootless" is one way of "Docker 28.5.2".
    """
    lines = [
        "| run | system | kernel | Python | runtimes | engines | cases | date |\n",
        "|---|---|---|---|---|---|---|---|\n",
    ]
    for each in records:
        if each["run"] != "by-hand":
            names = dict.fromkeys(re.split(", | with ", name)[0] for name, _ in each["engines"])
            engines = ", ".join(name for name in names if name not in each["runtimes"])
            words = (HOW[each["run"]], each["system"], each["kernel"], each["python"], each["runtimes"], engines)
            lines.append(f"| {' | '.join(words)} | {each['cases']} | {each['date']} |\n")
    return "".join(lines)


def render_engines(records: list[Record]) -> str:
    """Return the table of engines: a row for each engine and version on each ground."""
    rows = sorted(
        (name, each["name"], HOW[each["run"]], cases, each["date"])
        for each in records
        for name, cases in each["engines"]
    )
    lines = ["| engine | on | run | cases | date |\n", "|---|---|---|---|---|\n"]
    lines += [f"| {name} | {ground} | {how} | {cases} | {date} |\n" for name, ground, how, cases, date in rows]
    return "".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
