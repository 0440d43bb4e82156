"""Nothing tells a user to install "ocigpu" by that name from a package index: there it is whoever registers it."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support import requirements
from support.process import Completed, run
from support.product import REPOSITORY

INSTALLERS = r"(?:pip3?|pipx|uv|uvx|poetry|pdm|conda|easy_install)"
VERBS = r"(?:install|download|wheel|run|inject|add|reinstall|upgrade)"
WORDS = r"""(?:\s[^\n`|&;#",]*?)?"""
NAME = re.compile(
    rf"""\b{INSTALLERS}\b{WORDS}\s{VERBS}{WORDS}\s['"]?ocigpu(?![\w./@'-]?[\w./@-])"""
    r"|\buvx\s+ocigpu\b|/simple/ocigpu\b"
)
PLACES = ("ocigpu", "docs", "packaging", "README.md", "CONTRIBUTING.md", "Makefile", "bench", ".ci", ".github")
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


@pytest.fixture
def act(tmp_path: Path) -> Callable[[str], Completed]:
    """Call with the input ``ocigpu``: runs the step of the action; an index has our name, in somebody else's hands."""
    (step,) = yaml.safe_load((REPOSITORY / "packaging/action/action.yml").read_text())["runs"]["steps"]
    index = tmp_path / "index/ocigpu"
    index.mkdir(parents=True)
    index.joinpath("index.html").write_text('<a href="ocigpu-99.0.tar.gz">ocigpu-99.0.tar.gz</a>')
    environment = {
        "PATH": os.environ["PATH"], "RUNNER_TEMP": str(tmp_path), "PIP_INDEX_URL": f"file://{index.parent}",
        "GITHUB_ACTION_PATH": str(REPOSITORY / "packaging/action"), "INPUT_PYTHON": sys.executable, "INPUT_GPUS": "2",
        "INPUT_MODEL": "l4", "INPUT_MIG": "", "INPUT_DRIVER_VERSION": "",
    }  # fmt: skip
    environment |= {name: str(tmp_path / name) for name in ("GITHUB_PATH", "GITHUB_ENV", "GITHUB_OUTPUT")}

    def run_step(given: str) -> Completed:
        words = [step["shell"], "-e", "-c", step["run"]]
        return run(words, env={**environment, "INPUT_OCIGPU": given}, cwd=tmp_path, check=False, timeout=200)

    return run_step


@pytest.mark.rest
def test_the_action_gives_gpus_with_the_code_that_it_comes_with(act: Callable[[str], Completed]) -> None:
    requirements.require(requirements.compiler())
    done = act("")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("NVIDIA L4 (UUID: ") == 2


SUM = "0" * 64


@pytest.mark.parametrize(
    "given",
    [
        "ocigpu",
        "ocigpu==0.1.0",
        "ocigpu[cli]",
        "none.whl",
        "https://example.invalid/ocigpu-1-py3-none-any.whl",
        "https://example.invalid/ocigpu-1-py3-none-any.whl#sha256=",
        "https://example.invalid/ocigpu-1-py3-none-any.whl#sha256=00",
        f"http://example.invalid/ocigpu-1-py3-none-any.whl#sha256={SUM}",
        f"git+https://example.invalid/ocigpu.whl#sha256={SUM}",
        f"--index-url=https://example.invalid/x.whl#sha256={SUM}",
    ],
)
def test_the_action_refuses_what_somebody_else_may_have_written(given: str, act: Callable[[str], Completed]) -> None:
    done = act(given)
    assert done.returncode == 2
    assert done.stderr == (
        f"ocigpu: {given} is neither a wheel's path nor its address with its sum, https://.../NAME.whl#sha256=SUM, "
        "nor a release, https://.../\n"
    )


def test_the_action_takes_no_release_that_somebody_on_the_way_may_have_written(act: Callable[[str], Completed]) -> None:
    done = act("http://example.invalid/release/")
    assert done.returncode == 1
    assert "not over http, where anybody on the way can exchange files and their sums" in done.stderr
