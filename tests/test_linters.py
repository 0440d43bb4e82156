"""The linters are tests: one command checks everything."""

import subprocess
import sys
from pathlib import Path

import pytest
from support import requirements

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


@pytest.mark.parametrize("name", ["ocigpu-runtime", "ocigpu-hook"])
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
