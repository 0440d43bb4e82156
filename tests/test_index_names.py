"""Nothing tells a user to install "ocigpu" by that name from a package index: there it is whoever registers it."""

import re
from pathlib import Path

import pytest
from support.product import REPOSITORY

INSTALLERS = r"(?:pip3?|pipx|uv|uvx|poetry|pdm|conda|easy_install)"
VERBS = r"(?:install|download|wheel|run|inject|add|reinstall|upgrade)"
WORDS = r"""(?:\s[^\n`|&;#",]*?)?"""
NAME = re.compile(
    rf"""\b{INSTALLERS}\b{WORDS}\s{VERBS}{WORDS}\s['"]?ocigpu(?![\w./@'-]?[\w./@-])"""
    r"|\buvx\s+ocigpu\b|/simple/ocigpu\b"
)
PLACES = ("ocigpu", "docs", "packaging", "README.md", "CONTRIBUTING.md", "Makefile", "bench", ".ci")
TEXTS = {".py", ".md", ".toml", ".txt", ".sh", ".yml", ".yaml", ".html", ".service", ".in", ".spec", ""}


def is_one(line: str) -> bool:
    """Tell whether a line installs a bare name; what is uninstalled by it is what is there."""
    return NAME.search(line) is not None and "uninstall" not in line


def texts() -> list[Path]:
    found = [REPOSITORY / place for place in PLACES]
    files = [path for place in found for path in ([place] if place.is_file() else sorted(place.rglob("*")))]
    return [path for path in files if path.is_file() and path.suffix in TEXTS and "__pycache__" not in path.parts]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pip install ocigpu", True),
        ("python3 -m pip install --quiet 'ocigpu[kubernetes]'", True),
        ("pipx install --suffix=-2 ocigpu", True),
        ("pip install 'ocigpu>=1'", True),
        ("uvx ocigpu sim exec", True),
        ("pipx reinstall ocigpu", True),
        ("pip install './ocigpu-0.1.0-py3-none-any.whl[cli]'", False),
        ("pip install https://example.org/ocigpu-0.1.0-py3-none-any.whl#sha256=0", False),
        ("apt install ./ocigpu_*.deb", False),
        ("pipx uninstall ocigpu", False),
        ("pip install -e '.[dev]' in ocigpu's directory", False),
        ('"pip install tensorflow", "ocigpu explain CONTAINER"', False),
    ],
)
def test_a_bare_name_is_known(line: str, expected: bool) -> None:
    assert is_one(line) == expected


def test_no_hint_and_no_page_names_our_name_on_an_index() -> None:
    assert len(texts()) > 500
    found = [
        f"{path.relative_to(REPOSITORY)}: {line.strip()}"
        for path in texts()
        for line in path.read_text(errors="replace").splitlines()
        if is_one(line)
    ]
    assert found == []


def test_the_action_has_no_name_of_an_index() -> None:
    text = (REPOSITORY / "packaging/action/action.yml").read_text()
    assert re.search(r'  ocigpu:\n    description: .*\n    default: ""\n', text)
    assert re.findall(r"pip install.*", text) == re.findall(r"pip install.* --no-index .*", text)
