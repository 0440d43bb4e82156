"""make test-grounds takes minutes and a registry; what can go wrong with it unseen is held here."""

import re
import subprocess
from pathlib import Path

import pytest
from support.product import REPOSITORY

GROUNDS = REPOSITORY / "tests/grounds"


@pytest.mark.parametrize("name", ["run.sh", "roots.sh", "boot.sh", "inside.sh", "others.sh"])
def test_the_shell_understands_it(name: str) -> None:
    done = subprocess.run(["bash", "-n", GROUNDS / name], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def bash(function: str, script: str, *, file: str = "inside.sh", stdin: str = "") -> str:
    """Return what a script prints that has functions of a file."""
    text = (GROUNDS / file).read_text()
    functions = re.findall(rf"^(?:{function})\(\) \{{.*?^\}}$", text, re.MULTILINE | re.DOTALL)
    words = ["bash", "-euo", "pipefail", "-c", "\n".join([*functions, script])]
    return subprocess.run(words, cwd=REPOSITORY, input=stdin, capture_output=True, text=True, check=True).stdout


def test_it_types_the_five_minutes_of_the_readme() -> None:
    """inside.sh names them by their place."""
    typed = bash("section", "section README.md 'With Docker, in five minutes'").splitlines()
    wanted = (
        "make deb && apt install ", "ocigpu setup docker", "ocigpu doctor", "ocigpu engine configure docker",
        "systemctl restart docker", "docker run ", "ocigpu sim create ", "install ",
    )  # fmt: skip
    assert [line[: len(begin)] for line, begin in zip(typed, wanted, strict=True)] == list(wanted)


ONCE = "once() { test -e $file || { touch $file; return 1; }; echo 'GPU 0: H100'; }; never() { return 1; }"


@pytest.mark.parametrize(
    ("command", "said", "failed"),
    [
        ("docker 1 once", ["FLAKY sid: docker: once"], 0),
        ("docker no true", ["FAILED sid: docker: true", "    status 0, 0 GPUs (expected: no)"], 1),
        ("docker 2 once", ["FAILED sid: docker: once", "    status 0, 1 GPUs (expected: 2)", "    GPU 0: H100"], 1),
        ("docker - never", ["FAILED sid: docker: never", "    status 1, 0 GPUs (expected: -)"], 1),
        ("docker - true", [], 0),
    ],
)
def test_what_fails_is_tried_once_more(tmp_path: Path, command: str, said: list[str], failed: int) -> None:
    words = f'suite=sid failed=0 file={tmp_path}/file; declare -A cases=(); timeout() {{ shift; "$@"; }}; {ONCE}'
    lines = bash("try|attempt", f"{words}\ntry {command}; echo $failed ${{cases[docker]}}").splitlines()
    assert [line for line in lines[:-1] if line.strip()] == said
    assert lines[-1] == f"{failed} 1"


def test_cases_are_counted_for_the_engine_that_they_name() -> None:
    listed = """\
PASSED tests/engines/test_engines_docker.py::test_a[v2-by name]
PASSED tests/engines/test_engines_kubernetes.py::test_a
PASSED tests/engines/test_engines_runtime.py::test_a[a name-crun]
FAILED tests/engines/test_engines_runtime.py::test_a[runc] - AssertionError: assert 'podman' == 'docker'
SKIPPED [3] tests/engines/test_engines_podman.py:5: no Podman
"""
    counted = bash("count", "count", stdin=listed).splitlines()
    assert sorted(counted) == ["containerd 1", "crun 1", "docker 1", "runc 1"]


def test_a_registry_is_asked_three_times_and_then_named(tmp_path: Path) -> None:
    settings = f"target=test-grounds grounds={tmp_path} mirror=http://mirror"
    doubles = f"sleep() {{ :; }}; mmdebstrap() {{ echo >>{tmp_path}/tries; false; }}"
    script = f"{settings}; {doubles}; (keep sid important a) 2>&1 || echo $?"
    assert bash("die|thrice|make_root|keep", script, file="roots.sh").splitlines()[-2:] == [
        "test-grounds: no root of sid could be made from http://mirror in three tries: nothing was tested there",
        "2",
    ]
    assert (tmp_path / "tries").read_text() == "\n" * 3


@pytest.mark.parametrize(
    ("made", "passes", "status", "said"),
    [
        ("trixie sid", "trixie sid", 0, ""),
        ("trixie", "trixie", 75, "NOT TESTED, as no root could be made: sid"),
        ("sid", "", 1, "NOT TESTED, as no root could be made: trixie\ntest-grounds: FAILED: sid"),
        ("trixie sid", "sid", 1, "FAILED: trixie"),
    ],
)
def test_a_root_that_is_not_to_be_had_hides_no_failure(made: str, passes: str, status: int, said: str) -> None:
    """CI lets 75 pass, and nothing else."""
    loop = (GROUNDS / "run.sh").read_text().partition("failed='' unmade=''")
    doubles = f'keep() {{ :; }}; keep_ground() {{ [[ " {made} " = *" $1 "* ]]; }}; finish() {{ :; }}'
    doubles += f'; try_ground() {{ [[ " {passes} " = *" $1 "* ]]; }}'
    script = f"set -euo pipefail; {doubles}; {''.join(loop[1:])}"
    done = subprocess.run(["bash", "-c", script, "run.sh", "trixie", "sid"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, f"test-grounds: {said}\n" if said else "")
