"""Settings whose text has been parsed before: the same, and only for the very same text."""

import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as limits
from hypothesis import strategies as st

from ocigpu.cli.front.common import load_settings
from ocigpu.core.errors import SettingsError
from ocigpu.core.settings import KEYS, Key, Settings
from ocigpu.core.toml import toml_value
from ocigpu.system import store as cache
from ocigpu.system.settings_file import PREFIX, SPARE, read_settings
from ocigpu.system.store import seal, unseal

TEXT = 'mode = "cdi"\n[cdi]\nspec-dirs = ["/a", "/b"]  # two\n'


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cache is: neither root's nor the user's real one."""
    monkeypatch.setattr(cache, "SYSTEM_DIRECTORY", str(tmp_path / "ocigpu"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "ocigpu"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o644)
    return path


def refuse_toml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tomllib", None)


def kept_files(place: Path) -> list[Path]:
    return sorted(place.glob(f"{PREFIX}*"))


def test_the_second_start_parses_nothing(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "config.toml", TEXT)
    first = read_settings(str(path), keep=True)
    assert first == read_settings(str(path))
    assert [stat.S_IMODE(path.stat().st_mode) for path in kept_files(place)] == [0o600]
    refuse_toml(monkeypatch)
    assert read_settings(str(path), keep=True) == first
    write(path, TEXT + "no-cgroups = true\n")
    with pytest.raises(ImportError):
        read_settings(str(path), keep=True)


def test_a_command_keeps_the_text_for_the_next(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(write(tmp_path / "config.toml", TEXT))
    first = load_settings(path)
    assert len(kept_files(place)) == 1
    refuse_toml(monkeypatch)
    assert load_settings(path) == first == read_settings(path)


def test_who_does_not_ask_for_it_keeps_nothing(place: Path, tmp_path: Path) -> None:
    read_settings(str(write(tmp_path / "config.toml", TEXT)))
    assert not place.exists()


def values_of(key: Key) -> st.SearchStrategy[Any]:
    if key.kind == "bool":
        return st.booleans()
    words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8)
    if key.kind == "list":
        return st.lists(words, max_size=3).map(tuple)
    if key.kind == "paths":
        return st.lists(words.map("/{}".format), max_size=3).map(tuple)
    if key.kind == "path":
        return words.map("/{}".format)
    names = {"supported-driver-capabilities": ("all", "compute"), "cdi.default-kind": ("a.com/b", "x.org/y")}
    choices = key.choices or names.get(key.name)
    return st.sampled_from(choices) if choices else words


@given(st.fixed_dictionaries({}, optional={key.name: values_of(key) for key in KEYS}))
@limits(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_settings_are_the_same_from_the_cache(place: Path, values: dict[str, Any]) -> None:
    text = "".join(f"{name} = {toml_value(value)}\n" for name, value in values.items())
    with tempfile.TemporaryDirectory() as directory:
        path = str(write(Path(directory) / "config.toml", text))
        plain = read_settings(path)
        assert read_settings(path, keep=True) == plain
        assert read_settings(path, keep=True) == plain
    assert len(kept_files(place)) <= SPARE + 1


@pytest.mark.parametrize(
    "text", ["surprise = 1", "mode = 5", 'mode = "specs"', "mode = 1979-05-27", "mode = nan", "mode = 0x" + "f" * 6000]
)
def test_wrong_settings_are_refused_each_time(place: Path, tmp_path: Path, text: str) -> None:
    path = str(write(tmp_path / "config.toml", text))
    with pytest.raises(SettingsError) as plain:
        read_settings(path)
    for _ in range(2):
        with pytest.raises(SettingsError) as kept:
            read_settings(path, keep=True)
        assert kept.value.render("x") == plain.value.render("x")


@pytest.mark.parametrize(
    "text",
    ["mode = ", "x = " + "[" * 3000, "\x01", "a" + ".a" * 30_000 + " = 1", "#" * 65_537],
    ids=["half", "deep", "control", "a key of many parts", "large"],
)
def test_what_is_not_toml_is_refused_each_time(place: Path, tmp_path: Path, text: str) -> None:
    path = str(write(tmp_path / "config.toml", text))
    for _ in range(2):
        with pytest.raises(SettingsError, match="settings /") as caught:
            read_settings(path, keep=True)
        assert caught.value.code == "OCIGPU-SET-1"
    assert not kept_files(place)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: os.truncate(path, 10),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes().replace(b"cdi", b"xyz", 1)),
        lambda path: path.write_bytes(seal(b"{\n" + TEXT.encode())),
        lambda path: path.write_bytes(seal(b"\n" + TEXT.encode())),
        lambda path: path.write_bytes(seal(b'{"mode":"hook"}\n' + TEXT.encode() + b"# other")),
        lambda path: path.chmod(0o666),
    ],
    ids=["truncated", "empty", "changed", "no JSON", "nothing", "of another text", "open to others"],
)
def test_a_file_that_cannot_be_used_is_written_again(place: Path, tmp_path: Path, spoil: Any) -> None:
    path = str(write(tmp_path / "config.toml", TEXT))
    expected = read_settings(path, keep=True)
    content = kept_files(place)[0].read_bytes()
    assert unseal(content).partition(b"\n")[2] == TEXT.encode()
    spoil(kept_files(place)[0])
    assert read_settings(path, keep=True) == expected
    assert kept_files(place)[0].read_bytes() == content
    assert stat.S_IMODE(kept_files(place)[0].stat().st_mode) == 0o600


def test_without_a_cache_the_file_is_parsed(place: Path, tmp_path: Path) -> None:
    place.touch()
    path = str(write(tmp_path / "config.toml", TEXT))
    assert read_settings(path, keep=True) == Settings(mode="cdi", cdi_spec_dirs=("/a", "/b"), path=path)
