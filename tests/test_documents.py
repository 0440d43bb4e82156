"""The pages that are made of the program: those of docs/, and those that only the site has."""

import os
import re
import runpy
from pathlib import Path

import pytest

from ocigpu.cli.front.main import COMMANDS
from ocigpu.core.codes import CODES
from ocigpu.doctor.messages import MESSAGES

ROOT = Path(__file__).parents[1]
DOCUMENTS = runpy.run_path(str(ROOT / "packaging/documents.py"))
PAGES = DOCUMENTS["make_docs"]()
CHAPTERS = DOCUMENTS["make_site"]()
GENERATED = {path: text for chapter in CHAPTERS.values() for path, text in chapter.pages.items()}
WRITTEN = {
    str(path.relative_to(ROOT / "docs")): path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_program_says(name: str) -> None:
    assert WRITTEN[name] == PAGES[name], "write it: make docs"


def test_the_list_of_pages_leads_to_all_of_them() -> None:
    """Tenants' pages and decisions have lists of their own."""
    for place, pages in (
        ("", {name for name in WRITTEN if not name.startswith(("tenants/", "decisions/"))}),
        ("tenants/", {name for name in WRITTEN if name.startswith("tenants/")}),
    ):
        found = re.findall(r"\]\(([^)#]+)", WRITTEN[f"{place}README.md"])
        linked = {os.path.normpath(f"{place}{target}") for target in found}
        assert pages - linked == {f"{place}README.md"}
    assert {"tenants/README.md", "decisions/README.md"} <= set(
        re.findall(r"\]\(([^)#]+)", WRITTEN["README.md"]),
    )


def test_every_command_code_and_message_has_one_page() -> None:
    commands = {f"COMMANDS/ocigpu-{name.replace(' ', '-')}.md" for name in COMMANDS}
    assert commands < set(CHAPTERS["COMMANDS.md"].pages)
    assert list(CHAPTERS["ERRORS.md"].pages) == [f"ERRORS/{code}.md" for code in CODES]
    assert len(CHAPTERS["TROUBLESHOOTING.md"].pages) == len(MESSAGES)
    lower = [path.lower() for path in GENERATED]
    assert len(set(lower)) == len(lower)


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_lists_all_its_pages(name: str) -> None:
    chapter = CHAPTERS[name]
    (menu, listed) = ([path for paths in chapter.menu.values() for path in paths], chapter.index)
    assert sorted(menu) == sorted(chapter.pages)
    assert set(re.findall(r"\]\((\w+/[^)]+)\)", listed)) >= set(chapter.pages) - {"COMMANDS/ocigpu.md"}
    assert len(WRITTEN[name].splitlines()) < 25, "what is generated is not committed"


def test_generated_pages_lead_to_pages() -> None:
    there = set(GENERATED) | set(WRITTEN)
    for path, text in GENERATED.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^    .*$|`[^`\n]*`", "", text, flags=re.MULTILINE)):
            if "://" not in target:
                assert os.path.normpath(f"{os.path.dirname(path)}/{target}") in there, (path, target)


def test_a_messages_page_has_its_words_in_address_and_title() -> None:
    path = "TROUBLESHOOTING/failed-to-initialize-nvml-unknown-error.md"
    assert 'heading: "Failed to initialize NVML: Unknown Error (' in GENERATED[path]
    assert "`ocigpu repair CONTAINER`" in GENERATED[path]
    assert "\n# OCIGPU-DEV-1\n" in GENERATED["ERRORS/OCIGPU-DEV-1.md"]
    assert "\n`--output FILE`\n" in GENERATED["COMMANDS/ocigpu-cdi-generate.md"]


def test_links_out_of_the_pages_lead_to_the_repository_or_name_the_file() -> None:
    text = "[the role](../packaging/README.md), [Makefile](../Makefile#x), `[a](../b)`, [CDI](CDI.md#c)"
    lead_out = DOCUMENTS["lead_out"]
    named = "the role (`packaging/README.md`), Makefile, `[a](../b)`, [CDI](CDI.md#c)"
    assert lead_out(text, "docs/ENGINES.md", "") == named
    there = "[the role](https://x/blob/HEAD/packaging/README.md), [Makefile](https://x/blob/HEAD/Makefile#x)"
    assert lead_out(text, "docs/ENGINES.md", "https://x") == f"{there}, `[a](../b)`, [CDI](CDI.md#c)"
