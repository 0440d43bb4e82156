"""Error codes: each is explained, raised somewhere, and listed in docs/ERRORS.md."""

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import ocigpu
from ocigpu.cli.explain import find_code, render_markdown
from ocigpu.core.codes import AREAS, CODES
from ocigpu.core.errors import UsageError

Run = Callable[..., tuple[int, str, str]]
PACKAGE = Path(ocigpu.__file__).parent
PAGE = PACKAGE.parent / "docs/ERRORS.md"


def codes_in_sources() -> set[str]:
    """Return every code in a string of a module, but for the table itself, and those of the stubs."""
    stubs = (PACKAGE.parent / "packaging").glob("*.sh")
    found = {code for path in stubs for code in re.findall(r"OCIGPU-[A-Z]+-[0-9]+", path.read_text())}
    for path in PACKAGE.rglob("*.py"):
        for item in ast.walk(ast.parse(path.read_text())):
            if (
                path.name != "codes.py"
                and isinstance(item, ast.Constant)
                and isinstance(item.value, str)
                and re.fullmatch(r"OCIGPU-[A-Z]+-[0-9]+", item.value)
            ):
                found.add(item.value)
    return found


def test_every_code_that_is_raised_is_in_the_table() -> None:
    named = {code for path in PACKAGE.rglob("*.py") for code in re.findall(r"OCIGPU-[A-Z]+-[0-9]+", path.read_text())}
    assert named - set(CODES) == set()


def test_every_code_of_the_table_is_raised_somewhere() -> None:
    assert set(CODES) - codes_in_sources() == set()


def test_codes_are_numbered_without_gaps_in_known_areas() -> None:
    numbers: dict[str, list[int]] = {}
    for code in CODES:
        _, area, number = code.split("-")
        numbers.setdefault(area, []).append(int(number))
    assert set(numbers) == set(AREAS)
    for area, found in numbers.items():
        assert found == list(range(1, len(found) + 1)), area


def test_causes_and_fixes_are_sentences() -> None:
    for code, entry in CODES.items():
        assert entry.cause.endswith("."), code
        assert entry.fix, code
        assert "|" not in entry.cause + entry.fix, code  # a table cell


def test_the_page_of_errors_is_current() -> None:
    assert PAGE.read_text() == render_markdown(), "run: ocigpu explain --markdown > docs/ERRORS.md"


@pytest.mark.parametrize("text", ["OCIGPU-DEV-1", "ocigpu-dev-1", "dev-1", " DEV-1 "])
def test_a_code_is_found_in_any_spelling(text: str) -> None:
    assert find_code(text) == "OCIGPU-DEV-1"


@pytest.mark.parametrize(
    ("text", "hint"),
    [("DEV-11", "OCIGPU-DEV-1"), ("OCIGPU-DVE-1", "OCIGPU-DEV-1"), ("hello", "all codes: ocigpu explain")],
)
def test_a_wrong_code_brings_near_ones(text: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_code(text)
    assert hint in str(caught.value.hint)


def test_explain_prints_cause_and_fix(run: Run) -> None:
    status, out, _ = run("explain", "SET-2")
    assert status == 0
    assert CODES["OCIGPU-SET-2"].cause in out
    assert CODES["OCIGPU-SET-2"].fix in out
    assert json.loads(run("explain", "SET-2", "--json")[1])["codes"][0]["code"] == "OCIGPU-SET-2"


def test_explain_without_a_code_lists_all(run: Run) -> None:
    out = run("explain")[1]
    assert [line.split()[0] for line in out.splitlines()[1:]] == list(CODES)
    assert [item["code"] for item in json.loads(run("explain", "--json")[1])["codes"]] == list(CODES)


def test_explain_prints_the_page(run: Run) -> None:
    assert run("explain", "--markdown") == (0, render_markdown(), "")
    assert run("explain", "--markdown", "DEV-1")[0] == 2
