"""JSON without the standard json: the same values, the same text, the same refusals."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocigpu.core import rawjson

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_a_value_is_written_as_json_writes_it_and_read_back(value: Any) -> None:
    text = rawjson.dump(value)
    assert text == json.dumps(value, separators=(",", ":"))
    assert rawjson.parse(f" {text}\r\n") == value
    assert rawjson.parse(json.dumps(value, indent="\t", ensure_ascii=False)) == value


@given(st.text(alphabet='{}[]",:\\u0041e-+. \n\x01tfn') | VALUES.map(json.dumps).map(lambda text: text[:-1]))
def test_any_text_gives_the_value_or_the_error_of_json(text: str) -> None:
    assert outcome(rawjson.parse, text) in (outcome(json.loads, text), "duplicate key")


def outcome(parse: Callable[[str], Any], text: str) -> str:
    try:
        return repr(parse(text))
    except ValueError as error:
        return "duplicate key" if "duplicate key" in str(error) else f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a":1,"a":1}', 'duplicate key "a"'),
        ('[{"b":{"x":1,"y":2,"x":3}}]', 'duplicate key "x"'),
        ("[NaN]", "NaN is not JSON"),
        ("-Infinity", "-Infinity is not JSON"),
        ("{} {}", "Extra data: line 1 column 4 (char 3)"),
        ("", "Expecting value: line 1 column 1 (char 0)"),
        ("\ufeff{}", "Unexpected UTF-8 BOM (decode using utf-8-sig): line 1 column 1 (char 0)"),
    ],
)
def test_what_readers_would_take_differently_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        rawjson.parse(text)
    assert str(caught.value) == message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [-float("inf")]}])
def test_numbers_that_json_does_not_have_are_not_written(value: Any) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        rawjson.dump(value)


def test_depth_without_end_is_an_error_and_no_crash() -> None:
    with pytest.raises(RecursionError):
        rawjson.parse("[" * 100_000)
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(RecursionError):
        rawjson.dump(value)


def test_another_python_without_these_functions_uses_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rawjson, "make_scanner", None)
    monkeypatch.setattr(rawjson, "make_encoder", None)
    assert rawjson.parse('{"a": [1, "\\u0041"]}') == {"a": [1, "A"]}
    assert rawjson.dump({"a": [1, "é"]}) == '{"a":[1,"\\u00e9"]}'
    with pytest.raises(ValueError, match="duplicate key"):
        rawjson.parse('{"a": 1, "a": 2}')


@pytest.mark.parametrize("text", ["nul", '{"a":1,}', '"\x01"', "[1 2]", '{"a"', "{} x", ""])
def test_a_process_that_has_not_loaded_json_gives_the_same_error(text: str) -> None:
    script = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "from ocigpu.core.rawjson import parse\n"
        "assert 'json' not in sys.modules\n"
        "try: parse(sys.argv[2])\n"
        "except ValueError as error: print(error)\n"
    )
    command = [sys.executable, "-I", "-S", "-c", script, str(Path(rawjson.__file__).parents[2]), text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert f"JSONDecodeError: {done.stdout.strip()}" == outcome(json.loads, text), done.stderr
