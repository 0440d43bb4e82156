"""The linters are tests: one command checks everything."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMANDS = {
    "ruff check": ["ruff", "check", "--no-cache", "--force-exclude", "."],
    "ruff format": ["ruff", "format", "--no-cache", "--check", "--force-exclude", "."],
    "mypy": ["mypy"],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_linter_is_content(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
