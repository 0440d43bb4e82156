"""Command line and standard input of ocigpu-hook: pure parts."""

import json
import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocigpu.core.errors import SpecError, UsageError
from ocigpu.entry.state import MAX_STATE_BYTES, State, parse_state
from ocigpu.hook import check_command, main, split_options


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param("prestart", ("prestart", {}), id="prestart"),
        pytest.param("createRuntime", ("createRuntime", {}), id="createRuntime"),
        pytest.param("poststart", ("poststart", {}), id="poststart"),
        pytest.param("poststop", ("poststop", {}), id="poststop"),
        pytest.param("--config /c prestart", ("prestart", {"config": "/c"}), id="config"),
        pytest.param("--config=/c prestart", ("prestart", {"config": "/c"}), id="config with ="),
        pytest.param("-config /c prestart", ("prestart", {"config": "/c"}), id="one dash"),
        pytest.param("-config=/c prestart", ("prestart", {"config": "/c"}), id="one dash with ="),
        pytest.param("--config=a=b prestart", ("prestart", {"config": "a=b"}), id="= in the value"),
        pytest.param("--config prestart prestart", ("prestart", {"config": "prestart"}), id="value like a command"),
        pytest.param("--config /a --config /b prestart", ("prestart", {"config": "/b"}), id="last one counts"),
        pytest.param("--bundle /b prestart", ("prestart", {"bundle": "/b"}), id="bundle"),
        pytest.param("--spec /s --config /c prestart", ("prestart", {"spec": "/s", "config": "/c"}), id="spec"),
        pytest.param("-debug prestart", ("prestart", {"debug": ""}), id="debug has no value"),
        pytest.param("prestart --unknown", ("prestart", {}), id="nothing is read after the command"),
        pytest.param("--help", ("help", {}), id="help"),
        pytest.param("-h", ("help", {}), id="h"),
        pytest.param("-help", ("help", {}), id="help with one dash"),
        pytest.param("--version", ("version", {}), id="version"),
        pytest.param("--config /c --version prestart", ("version", {"config": "/c"}), id="version after config"),
    ],
)
def test_command_is_understood(line: str, expected: tuple[str, dict[str, str]]) -> None:
    options, rest = split_options(line.split())
    assert (check_command(rest), options) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param("", "no command given", id="nothing"),
        pytest.param("--config /c", "no command given", id="options only"),
        pytest.param("start", 'unknown command "start"', id="unknown command"),
        pytest.param("Prestart", 'unknown command "Prestart"', id="case counts"),
        pytest.param("--config", "option --config needs a value", id="value missing"),
        pytest.param("--spec", "option --spec needs a value", id="spec without a value"),
        pytest.param("--bundles /b prestart", 'unknown option "--bundles"', id="unknown option"),
        pytest.param("- prestart", 'unknown option "-"', id="dash"),
        pytest.param("-- prestart", 'unknown option "--"', id="two dashes"),
        pytest.param("\x1b[31m", r'unknown command "\x1b[31m"', id="control characters"),
    ],
)
def test_command_that_cannot_be_understood_is_refused(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_command(split_options(line.split(" ") if line else [])[1])
    assert caught.value.message == message
    assert caught.value.exit_code == 2


@given(st.lists(st.text(max_size=10) | st.sampled_from(["--config", "-h", "prestart", "--spec=", "-debug"])))
def test_no_command_line_breaks_the_parser(words: list[str]) -> None:
    try:
        command = check_command(split_options(words)[1])
    except UsageError as error:
        command, shown = "", error.render("ocigpu-hook").splitlines()
        assert len(shown) <= 2
    assert command in ("", "prestart", "createRuntime", "poststart", "poststop", "help", "version")


STATE = {"ociVersion": "1.0.2", "id": "c1", "status": "created", "pid": 4422, "bundle": "/b"}


def changed(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in {**STATE, **fields}.items() if value is not None}


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(STATE, id="1.0"),
        pytest.param(changed(ociVersion="1.2.0", annotations={"a": "b"}), id="1.2 with annotations"),
        pytest.param(changed(status="creating", ociVersion="1.1.0"), id="creating"),
        pytest.param({"ociVersion": "1.0.0-rc1", "id": "c1", "pid": 4422, "bundlePath": "/b"}, id="1.0.0-rc1"),
        pytest.param({"version": "0.4.0", "id": "c1", "pid": 4422, "bundlePath": "/b"}, id="0.4"),
        pytest.param({"version": "0.1", "id": "c1", "pid": 4422, "root": "/b/r", "bundlePath": "/b"}, id="0.1 of runc"),
        pytest.param(changed(bundle="", bundlePath="/b"), id="empty bundle beside bundlePath"),
        pytest.param(changed(bundlePath="/other"), id="bundle counts more than bundlePath"),
        pytest.param({"pid": 4422, "bundle": "/b"}, id="no version at all"),
        pytest.param(changed(fields=[1.5, None, {"x": []}]), id="unknown fields"),
    ],
)
def test_state_of_every_version_is_read(state: dict[str, Any]) -> None:
    expected = State(4422, "/b", state.get("root", ""))
    assert parse_state(json.dumps(state).encode()) == expected
    assert parse_state(json.dumps(state, indent="\t").encode() + b"\n\n") == expected


WHAT = "container's state: "
NO_PID = "pid is missing or not a process id"
NO_BUNDLE = "bundle is missing or not an absolute path"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(b"", "line 1 column 1: Expecting value", id="empty"),
        pytest.param(b"\x7fELF\x02\x01", "line 1 column 1: Expecting value", id="program"),
        pytest.param(b'{"pid": 1', "line 1 column 10: Expecting ',' delimiter", id="truncated"),
        pytest.param(b'{"pid": 1}{"pid": 2}', "line 1 column 11: Extra data", id="two documents"),
        pytest.param(b'{"pid": 1, "pid": 2, "bundle": "/b"}', 'duplicate key "pid"', id="duplicate key"),
        pytest.param(b'{"pid": NaN, "bundle": "/b"}', "NaN is not JSON", id="NaN"),
        pytest.param(b'{"pid": -Infinity, "bundle": "/b"}', "-Infinity is not JSON", id="infinity"),
        pytest.param(b"[]", "not a JSON object", id="list"),
        pytest.param(b"null", "not a JSON object", id="null"),
        pytest.param(b'"state"', "not a JSON object", id="text"),
        pytest.param(b'{"bundle": "/\xff"}', "not UTF-8 at byte 13", id="not UTF-8"),
        pytest.param(b"[" * 100_000, "nested too deeply", id="huge nesting"),
        pytest.param(b'{"bundle": "/b"}', NO_PID, id="no pid"),
        pytest.param(b'{"pid": null, "bundle": "/b"}', NO_PID, id="pid null"),
        pytest.param(b'{"pid": "1", "bundle": "/b"}', NO_PID, id="pid is text"),
        pytest.param(b'{"pid": 1.0, "bundle": "/b"}', NO_PID, id="pid is a fraction"),
        pytest.param(b'{"pid": true, "bundle": "/b"}', NO_PID, id="pid is true"),
        pytest.param(b'{"pid": 0, "bundle": "/b"}', NO_PID, id="pid 0: a stopped container"),
        pytest.param(b'{"pid": -1, "bundle": "/b"}', NO_PID, id="pid negative"),
        pytest.param(b'{"pid": 2147483648, "bundle": "/b"}', NO_PID, id="pid too large"),
        pytest.param(b'{"pid": 1}', NO_BUNDLE, id="no bundle"),
        pytest.param(b'{"pid": 1, "bundle": ""}', NO_BUNDLE, id="bundle empty"),
        pytest.param(b'{"pid": 1, "bundle": "b"}', NO_BUNDLE, id="bundle relative"),
        pytest.param(b'{"pid": 1, "bundle": "/b\\u0000/c"}', NO_BUNDLE, id="bundle with NUL"),
        pytest.param(b'{"pid": 1, "bundle": "/\\ud800"}', NO_BUNDLE, id="bundle with half a surrogate pair"),
        pytest.param(
            b'{"pid": 1, "bundle": "/b", "root": "\\udc80"}', "root is not a path", id="root with such a half"
        ),
        pytest.param(b'{"pid": 1, "bundle": ["/b"]}', NO_BUNDLE, id="bundle is a list"),
        pytest.param(b'{"pid": 1, "bundle": 5, "bundlePath": "/b"}', NO_BUNDLE, id="bundle wrong beside bundlePath"),
        pytest.param(b" " * (MAX_STATE_BYTES + 1), "larger than 4 MiB", id="too large"),
    ],
)
def test_what_is_not_a_state_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_state(text)
    assert caught.value.code == "OCIGPU-SPEC-5"
    assert caught.value.message.startswith(WHAT + message)
    assert len(caught.value.render("ocigpu-hook").splitlines()) == 2


def test_huge_numbers_are_refused_in_one_line() -> None:
    with pytest.raises(SpecError) as caught:
        parse_state(b'{"pid": ' + b"9" * 100_000 + b"}")
    assert caught.value.code == "OCIGPU-SPEC-5"
    assert len(caught.value.message) < 300


@given(st.binary(max_size=200))
def test_garbage_never_breaks_the_parser(text: bytes) -> None:
    with pytest.raises(SpecError):
        parse_state(text)


def test_ctrl_c_ends_the_hook_in_one_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("ocigpu.hook.read_settings", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    assert main(["ocigpu-hook", "prestart"]) == 130
    assert capfd.readouterr() == ("", "ocigpu-hook: interrupted: everything begun was undone\n")
