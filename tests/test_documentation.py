"""The documentation is true of the code: links and paths lead somewhere, and its tables are the tests' own."""

import ast
import re
from pathlib import Path

import pytest

from ocigpu.cli.front.main import COMMANDS, find_command
from ocigpu.cli.front.manual import read_page, words_below

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
DECISIONS = REPOSITORY / "docs/decisions"
IDS = [str(page.relative_to(REPOSITORY)) for page in PAGES]
MADE = {"fuzz/findings/"}
OUTSIDE = ("http://", "https://", "#", "mailto:")


def anchors_of(page: Path) -> set[str]:
    """Return what GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_to_files_of_the_project(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r'(?:src|srcset|href)="([^"]+)"', text)]:
        if not target.startswith(OUTSIDE):
            path, _, anchor = target.partition("#")
            assert (page.parent / path).exists(), target
            assert not anchor or anchor in anchors_of(page.parent / path), target


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_paths_in_the_text_are_there(page: Path) -> None:
    found = re.findall(r"`((?:ocigpu|tests|packaging|bench|fuzz|docs)/[\w./*-]*(?:/|\.\w+))`", page.read_text())
    assert not [path for path in {*found} - MADE if not any(REPOSITORY.glob(path.rstrip("/")))]


def test_the_page_of_the_rooms_has_the_floors_of_the_test() -> None:
    tree = ast.parse((REPOSITORY / "tests/test_architecture.py").read_text())
    assigned = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    floors = ast.literal_eval(assigned["FLOORS"])
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", (REPOSITORY / "docs/ARCHITECTURE.md").read_text(), re.MULTILINE)
    said: list[set[str]] = [set() for _ in floors]
    for floor, rooms in rows:
        said[int(floor) - 1] |= {re.sub(r"\.py$|/$", "", room) for room in re.findall(r"`([^`]+)`", rooms)}
    assert said == [set(floor) for floor in floors]


def test_the_table_of_changes_names_tests_in_each_row() -> None:
    table = (REPOSITORY / "docs/ARCHITECTURE.md").read_text().split("## Where a change goes")[1]
    head, _, *rows = [re.split(r" ?\| ?", line.strip("|")) for line in table.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in head] == ["you want to", "go to", "tests"]
    assert not [row for row in rows if len(row) != 3 or "`tests/" not in row[2]]


def test_the_hops_are_lines_of_the_code() -> None:
    text = (REPOSITORY / "docs/ARCHITECTURE.md").read_text()
    block = text.split("```text\nocigpu/hook.py\n")[1].split("```")[0]
    source = (REPOSITORY / "ocigpu/hook.py").read_text()
    for line in block.splitlines():
        if line.startswith("ocigpu/"):
            source = (REPOSITORY / line).read_text()
        else:
            assert line.strip() in [found.strip() for found in source.splitlines()], line


def test_every_decision_is_dated_listed_and_short() -> None:
    pages = sorted(path.name for path in DECISIONS.glob("2*.md"))
    index = (DECISIONS / "README.md").read_text()
    assert re.findall(r"\]\((2[^)]+)\)", index) == pages
    for name in pages:
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}-[a-z0-9-]+\.md", name)
        text = (DECISIONS / name).read_text()
        titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
        assert titles == ["Context", "Decision", "Rejected", "Consequences"], name
        assert len(text.splitlines()) <= 48, name


def test_every_place_that_waits_for_hardware_is_in_the_list() -> None:
    """And what is in the list says so at its top: what nobody has seen is together, and complete."""
    text = (REPOSITORY / "docs/tenants/TENANTS.md").read_text().split("### What hardware has to confirm")[1]
    listed = set(re.findall(r"^\| `((?:ocigpu|packaging)/[^`]+)`", text, re.MULTILINE))
    files = [*(REPOSITORY / "ocigpu").rglob("*.py"), *(REPOSITORY / "packaging").rglob("*.xml")]
    assert {
        str(path.relative_to(REPOSITORY)) for path in files if "What hardware has yet to confirm" in path.read_text()
    } == listed


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_in_code_have_the_options_that_are_typed(page: Path) -> None:
    text = page.read_text()
    code = re.findall(r"^(?: {4,}|[$#] )(?:[$#] )?(?:[A-Z_]+=\S+ )*ocigpu ([a-z][^#\n]*)", text, re.MULTILINE)
    code += re.findall(r"`ocigpu ([a-z][^`\n]*)`", text)
    for line in code:
        words = re.split(r"&&|\||;| -- ", line)[0].split()
        name, rest = find_command(words)
        assert name in COMMANDS or (words_below(name, COMMANDS) and not [word for word in rest if word[0] != "-"]), line
        manual = read_page(name)
        known = {flag for word in manual.options.values() for flag in word.flags} | {"--help"}
        known |= set(re.findall(r"--?[a-z][a-z.-]*", " ".join(manual.sections.values())))
        typed = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
        assert typed <= known, line
