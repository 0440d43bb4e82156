"""What containers, claims and controllers call things reaches a terminal without what would steer it."""

import pytest

from ocigpu.cli.containers import plan
from ocigpu.cli.containers.plan import Step
from ocigpu.cli.front import show

ESCAPES = "lib\x1b]0;owned\x07\x9b2J.so"


@pytest.mark.parametrize("states", [True, False])
def test_steps_of_a_plan(capsys: pytest.CaptureFixture[str], states: bool) -> None:
    step = Step(what=f"bind {ESCAPES}", source=ESCAPES, reason=f"the image's {ESCAPES}")
    plan.print_each([step], states)
    said = capsys.readouterr().out
    assert "owned" in said
    assert said.replace("\n", "").isprintable()


def test_lines_of_others_on_a_terminal_and_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for terminal in (True, False):
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal)
        show.foreign(f"a\tb {ESCAPES}")
    on, off = capsys.readouterr().out.splitlines()
    assert on == "a\tb lib\\x1b]0;owned\\x07\\x9b2J.so"
    assert off == f"a\tb {ESCAPES}"
