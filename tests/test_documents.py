"""The pages of docs/ that are made of the program."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = runpy.run_path(str(ROOT / "packaging/documents.py"))["make_docs"]()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_program_says(name: str) -> None:
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == PAGES[name], "write it: make docs"


@pytest.mark.parametrize("name", PAGES)
def test_the_readme_leads_to_it(name: str) -> None:
    assert f"(docs/{name})" in (ROOT / "README.md").read_text(encoding="utf-8")
