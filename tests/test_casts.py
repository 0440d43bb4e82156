"""The moving pictures of the README are recorded, and show what was printed."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "packaging"))
import casts  # noqa: E402 - of the directory that the line before adds

NAMESPACE = "{http://www.w3.org/2000/svg}"


def text_of(file: Path) -> str:
    root = ElementTree.parse(file).getroot()
    return "\n".join("".join(piece.itertext()) for piece in root.iter(f"{NAMESPACE}g"))


def test_the_readme_shows_each_picture() -> None:
    shown = re.findall(r"\(docs/casts/(\w+)\.svg\)", (REPOSITORY / "README.md").read_text())
    assert sorted(shown) == sorted(casts.CASTS)
    words = {"demo": "demo passed", "top": "LAST MINUTE", "doctor": "driver"}
    assert all(words[name] in text_of(casts.DIRECTORY / f"{name}.svg") for name in shown)


def test_a_line_that_goes_is_hidden_and_the_last_screen_stands() -> None:
    def rows(text: str) -> tuple[casts.Row, ...]:
        return (((text, 'fill="#fff"'),), *[((" ", ""),)] * (casts.LINES - 1))

    svg = casts.draw([casts.Frame(0.0, rows("<first>")), casts.Frame(2.0, rows("second"))], "a & b")
    root = ElementTree.fromstring(svg)
    classes = {"".join(piece.itertext()): piece.get("class") for piece in root.iter(f"{NAMESPACE}g")}
    assert classes == {"<first>": "s0 gone", "second": "s1"}
    assert "@keyframes s1{0%{visibility:hidden}33.33%{visibility:visible}}" in svg


@pytest.mark.rest
@pytest.mark.root
@pytest.mark.timeout(300)
def test_demo_top_and_doctor_are_recorded(tmp_path: Path) -> None:
    casts.main([], tmp_path)
    assert "demo passed (SIMULATED host, no real GPU)" in text_of(tmp_path / "demo.svg")
    assert re.search(r"train *runc *\d+%", text_of(tmp_path / "top.svg"))
    assert "uvm-missing" in text_of(tmp_path / "doctor.svg")
