"""The linters are tests: one command checks everything."""

import collections
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import requirements
from support.workers import unit_of

ROOT = Path(__file__).parent.parent
ROOMS = ("ocigpu", "bench", "fuzz", "packaging", "tests")
COMMANDS = {
    "ruff check": ["ruff", "check", "--no-cache", "--force-exclude", "."],
    "ruff format": ["ruff", "format", "--no-cache", "--check", "--force-exclude", "."],
    "mypy": ["mypy"],
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_linter_is_content(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["ocigpu-runtime", "ocigpu-hook", "ocigpu-container-cli"])
@pytest.mark.parametrize("link", ["static", "dynamic"])
def test_the_compiler_is_content(tmp_path: Path, name: str, link: str) -> None:
    """With a static C library and where there is none."""
    requirements.require(requirements.programs("gcc"))
    compiler = tmp_path / "cc"
    refuse = 'case " $* " in *" -static-pie "*) exit 1 ;; esac' if link == "dynamic" else ""
    warnings = "-Wall -Wextra -Wconversion -Wshadow -Wvla -Wformat=2 -Wstrict-prototypes -Werror"
    compiler.write_text(f'#!/bin/sh\n{refuse}\nexec gcc {warnings} "$@"\n')
    compiler.chmod(0o755)
    words = ["interpreter=/p", "encodings=/e", "library=/l", "site=/s"]
    command = [ROOT / "packaging/stub.sh", "compiled", name, tmp_path / name, *words]
    env = {"PATH": "/usr/bin:/bin", "CC": str(compiler)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stderr) == (0, "")
    needs = subprocess.run(["readelf", "-d", tmp_path / name], capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in needs.splitlines() if "NEEDED" in line] == ["[libc.so.6]"][: link == "dynamic"]


def test_no_two_files_make_one_directory() -> None:
    """A worker runs several files with one ``session_directory``: a name belongs to one of them."""
    users = collections.defaultdict(set)
    for file in sorted((ROOT / "tests").rglob("*.py")):
        for name in re.findall(r'session_directory / f?"([^"/]+)', file.read_text()):
            users[name].add(file.name)
    assert {name: files for name, files in users.items() if len(files) > 1} == {}


def test_who_needs_the_packages_is_on_one_worker() -> None:
    """They are built in one directory of the clone, whose tree each build removes."""
    users = [file for file in (ROOT / "tests").rglob("test_*.py") if re.search("[(, ]packages: Path", file.read_text())]
    assert len(users) > 1
    assert len({unit_of(f"{file.relative_to(ROOT)}::test") for file in users}) == 1


def test_what_a_linter_is_to_ignore_has_a_code_and_a_reason() -> None:
    """Types are not checked in tests: there is nothing to ignore."""
    code_and_reason = re.compile(r"(\[[a-z,-]+\] +# |: [A-Z]+\d+(, [A-Z]+\d+)* - )\S")
    found = []
    for file in (file for room in ROOMS for file in (ROOT / room).rglob("*.py")):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            mark = re.search(r"# (type: ?ignore|(?:ruff: )?noqa)(.*)", line)
            if mark and (not code_and_reason.match(mark[2]) or (mark[1][0] == "t" and ROOT / "tests" in file.parents)):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []
