"""``ocigpu config get|set|unset``: one setting at a time, and nothing else in the file changes."""

import json
import tomllib
from pathlib import Path

import pytest
from support.fixtures import Run

from ocigpu.cli.settings.config import render_default
from ocigpu.core.settings import KEYS
from ocigpu.system.settings_file import read_settings

FILE = """\
# ours
mode = "hook"  # for now

[driver]
root = "/run/nvidia/driver"
"""


def test_a_key_is_set_in_its_place_and_unset_again(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(FILE)
    words = ("--config", file)
    status, out, _ = run("config", "set", "mode", "spec", *words)
    assert (status, out) == (0, f'{file}: mode is "spec"\n')
    assert file.read_text() == FILE.replace('"hook"', '"spec"')
    assert run("config", "set", "mode", "spec", *words)[1] == f'{file}: mode is "spec" already\n'
    assert run("config", "set", "runtime.runtimes", "crun", "runc", *words)[0] == 0
    assert run("config", "get", "runtime.runtimes", *words)[1] == "crun\nrunc\n"
    assert run("config", "set", "no-cgroups", "yes", *words)[0] == 0
    assert run("config", "get", "no-cgroups", *words)[1] == "true\n"
    for key in ("runtime.runtimes", "no-cgroups"):
        assert run("config", "unset", key, *words)[0] == 0
    assert tomllib.loads(file.read_text()) == tomllib.loads(FILE.replace('"hook"', '"spec"')) | {"runtime": {}}
    assert run("config", "unset", "no-cgroups", *words)[1] == f"{file}: no-cgroups is its default already\n"
    assert "# ours" in file.read_text()


def test_a_file_is_made_where_there_is_none(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "etc/ocigpu/config.toml"
    assert run("config", "set", "driver.root", "/run/nvidia/driver", "--config", file)[0] == 0
    assert read_settings(str(file)).driver_root == "/run/nvidia/driver"
    status, out, _ = run("config", "get", "driver.root", "--config", file, "--json")
    assert status == 0
    assert json.loads(out) == {
        "schema-version": 1, "key": "driver.root", "value": "/run/nvidia/driver", "default": False, "file": str(file),
    }  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=[key.name for key in KEYS])
def test_every_key_is_set_in_the_place_of_its_comment(run: Run, tmp_path: Path, key: object) -> None:
    """ "ocigpu config default" writes each key as a comment."""
    file = tmp_path / "config.toml"
    file.write_text(render_default())
    value = {
        "bool": "true", "list": "x", "paths": "/x", "path": "/x", "string": "x/y",
    }[key.kind] if not key.choices else key.choices[-1]  # fmt: skip
    value = "utility" if key.name == "supported-driver-capabilities" else value
    value = "x.com/y" if key.name == "cdi.default-kind" else value
    name = key.name
    assert run("config", "set", name, value, "--config", file)[0] == 0
    assert run("config", "get", name, "--config", file)[1] == f"{value}\n"
    assert len(file.read_text().splitlines()) == len(render_default().splitlines())


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["mode", "fast"], 1, "OCIGPU-SET-2"),
        (["driver.root", "relative"], 1, "is not an absolute path"),
        (["mdoe", "spec"], 2, "did you mean mode?"),
        (["no-cgroups", "maybe"], 2, "neither true nor false"),
        (["mode", "spec", "hook"], 2, "mode has one value, not 2"),
    ],
)
def test_what_is_not_a_value_of_the_key_changes_nothing(
    run: Run, tmp_path: Path, words: list[str], status: int, said: str
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(FILE)
    result = run("config", "set", *words, "--config", file)
    assert result[0] == status
    assert said in result[2]
    assert file.read_text() == FILE


def test_a_file_that_is_wrong_already_is_left(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("mdoe = 1\n")
    status, _, err = run("config", "set", "mode", "spec", "--config", file)
    assert (status, file.read_text()) == (1, "mdoe = 1\n")
    assert "mdoe" in err
